#include "control/sim/sim_control.h"

#include <algorithm>

#include <fmt/format.h>

namespace shardpull {

class SimControl final : public Control {
 public:
  SimControl(SimControlNet& net, const Member& self, Incarnation incarnation)
      : net_(net), self_(self), incarnation_(incarnation) {}
  ~SimControl() override { shutdown(); }

  Status send(const Member& to, ControlBody body) override {
    const auto me = net_.members_.find(self_), peer = net_.members_.find(to);
    if (me == net_.members_.end() || me->second.incarnation != incarnation_) {
      return Status(StatusCode::kUnavailable, "the control link is down", {.reason = Reason::kPeerLost});
    }
    if (peer == net_.members_.end()) {
      return Status(StatusCode::kUnavailable, fmt::format("{} is not up", to_string(to)),
                    {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = to_string(to)});
    }
    net_.post({SimControlNet::Event::Kind::kMessage, self_, to, incarnation_, peer->second.incarnation,
               std::move(body)});
    return {};
  }
  void shutdown() override { net_.leave(self_, incarnation_); }

 private:
  SimControlNet& net_;
  const Member self_;
  const Incarnation incarnation_;
};

SimControlNet::SimControlNet(const Clock& clock, const SimControlOptions& options)
    : clock_(clock), options_(options), random_(options.seed) {}
SimControlNet::~SimControlNet() = default;

std::unique_ptr<Control> SimControlNet::open(const Member& self, Incarnation incarnation, ControlSink& sink) {
  const auto before = members_.find(self);
  if (before != members_.end()) leave(self, before->second.incarnation);
  for (const auto& [other, life] : members_) {
    post({Event::Kind::kUp, self, other, incarnation, life.incarnation, {}});
    post({Event::Kind::kUp, other, self, life.incarnation, incarnation, {}});
  }
  members_[self] = {incarnation, &sink};
  return std::make_unique<SimControl>(*this, self, incarnation);
}

void SimControlNet::leave(const Member& self, Incarnation incarnation) {
  const auto it = members_.find(self);
  if (it == members_.end() || it->second.incarnation != incarnation) return;
  members_.erase(it);
  for (const auto& [other, life] : members_)
    post({Event::Kind::kLost, self, other, incarnation, life.incarnation, {}});
}

void SimControlNet::post(Event event) {
  std::int64_t& last = last_due_ns_[std::pair(event.from, event.to)];
  last = std::max(last, clock_.now_ns() + random_.between(options_.min_delay_ns, options_.max_delay_ns));
  events_.emplace(std::pair(last, next_order_++), std::move(event));
}

std::optional<std::int64_t> SimControlNet::next_due_ns() const {
  return events_.empty() ? std::nullopt : std::optional(events_.begin()->first.first);
}

void SimControlNet::deliver_due() {
  while (!events_.empty() && events_.begin()->first.first <= clock_.now_ns()) {
    Event event = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    const auto to = members_.find(event.to);
    if (to == members_.end() || to->second.incarnation != event.to_life) continue;
    ControlSink& sink = *to->second.sink;
    switch (event.kind) {
      case Event::Kind::kMessage:
        sink.on_control(event.from, event.from_life, std::move(event.body));
        break;
      case Event::Kind::kUp:
        sink.on_member_up(event.from, event.from_life);
        break;
      case Event::Kind::kLost:
        sink.on_member_lost(event.from, event.from_life,
                            Status(StatusCode::kUnavailable, "its link is gone",
                                   {.reason = Reason::kPeerLost, .fault = Fault::kPeer}));
        break;
    }
  }
}

}  // namespace shardpull
