#include "control/sim/sim_control.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace shardpull {
namespace {

Status link_gone(const char* why) {
  return Status(StatusCode::kUnavailable, why, {.reason = Reason::kPeerLost, .fault = Fault::kPeer});
}

}  // namespace

class SimControl final : public Control {
 public:
  SimControl(SimControlNet& net, SimControlNet::LinkPtr link) : net_(net), link_(std::move(link)) {}
  ~SimControl() override { shutdown(); }

  Status send(const Member& to, ControlBody body) override { return net_.send(link_, to, std::move(body)); }
  void shutdown() override { net_.leave(link_); }

 private:
  SimControlNet& net_;
  const SimControlNet::LinkPtr link_;
};

SimControlNet::SimControlNet(const Clock& clock, const SimControlOptions& options)
    : clock_(clock), options_(options), random_(options.seed) {}
SimControlNet::~SimControlNet() = default;

std::unique_ptr<Control> SimControlNet::open(const Member& self, Incarnation incarnation, ControlSink& sink) {
  auto link = std::make_shared<Link>();
  link->self = self;
  link->incarnation = incarnation;
  link->sink = &sink;
  if (self == kSender) {
    hub_ = link;
    return std::make_unique<SimControl>(*this, link);
  }
  if (const auto before = links_.find(self); before != links_.end()) leave(before->second);
  links_[self] = link;
  if (hub_ == nullptr) {
    post({.kind = Event::Kind::kOver, .link = link});  // nobody answers
  } else {
    post({.kind = Event::Kind::kUp, .link = link, .at_hub = true});
  }
  return std::make_unique<SimControl>(*this, link);
}

Status SimControlNet::send(const LinkPtr& link, const Member& to, ControlBody body) {
  if (!link->up) return link_gone("the control link is down");
  Event event{.link = link, .from = link->self, .to = to, .from_life = link->incarnation};
  event.body = std::move(body);
  if (to == link->self) {
    post_at(clock_.now_ns() + options_.min_delay_ns, std::move(event));
    return {};
  }
  const auto peer = members_.find(to);
  if (link == hub_ ? peer == members_.end() : link->lost.contains(to)) {
    return Status(StatusCode::kUnavailable, fmt::format("{} is not up", to_string(to)),
                  {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = to_string(to)});
  }
  if (link == hub_) {
    event.link = peer->second;
  } else {
    event.at_hub = true;
    // 0: whoever is up.
    if (const auto known = link->known.find(to); known != link->known.end()) event.to_life = known->second;
  }
  post(std::move(event));
  return {};
}

void SimControlNet::post_at(std::int64_t due_ns, Event event) {
  events_.emplace(std::pair(due_ns, next_order_++), std::move(event));
}

void SimControlNet::post(Event event) {
  std::int64_t& last = event.at_hub ? event.link->up_ns : event.link->down_ns;
  last = std::max(last, clock_.now_ns() + delay());
  post_at(last, std::move(event));
}

// In good order: what was sent before arrives before.
void SimControlNet::leave(const LinkPtr& link) {
  if (!std::exchange(link->up, false)) return;
  link->sink = nullptr;
  if (link != hub_) return post({.kind = Event::Kind::kOver, .link = link, .at_hub = true});
  hub_ = nullptr;
  for (const auto& [member, other] : links_) post({.kind = Event::Kind::kOver, .link = other});
}

void SimControlNet::crash(const Member& member) {
  if (member == kSender) {
    if (hub_ == nullptr) return;
    for (const auto& [other, link] : links_) drop_some(link, false);
    return leave(hub_);
  }
  const auto it = links_.find(member);
  if (it == links_.end() || !it->second->up) return;
  drop_some(it->second, true);
  leave(it->second);
}

// What a process had queued when it died arrives up to some message, and nothing after it.
void SimControlNet::drop_some(const LinkPtr& link, bool at_hub) {
  std::vector<std::pair<std::int64_t, std::uint64_t>> under_way;
  for (const auto& [key, event] : events_) {
    if (event.link == link && event.at_hub == at_hub && !event.timer && event.kind != Event::Kind::kOver)
      under_way.push_back(key);
  }
  for (std::size_t kept = random_.below(under_way.size() + 1); kept < under_way.size(); ++kept)
    events_.erase(under_way[kept]);
}

bool SimControlNet::silence(const Member& member, std::int64_t duration_ns) {
  const auto it = links_.find(member);
  if (it == links_.end() || !it->second->up || hub_ == nullptr) return false;
  const LinkPtr& link = it->second;
  const std::int64_t now_ns = clock_.now_ns();
  link->silent_until_ns = std::max(link->silent_until_ns, now_ns + duration_ns);
  if (duration_ns <= options_.dead_after_ns) return true;
  for (const bool at_hub : {false, true}) {
    post_at(now_ns + options_.dead_after_ns + random_.between(0, options_.heartbeat_ns),
            {.kind = Event::Kind::kOver, .link = link, .at_hub = at_hub, .timer = true});
  }
  return true;
}

std::optional<std::int64_t> SimControlNet::next_due_ns() const {
  return events_.empty() ? std::nullopt : std::optional(events_.begin()->first.first);
}

void SimControlNet::deliver_due() {
  while (!events_.empty() && events_.begin()->first.first <= clock_.now_ns()) {
    const std::uint64_t order = events_.begin()->first.second;
    Event event = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    const bool to_oneself = event.kind == Event::Kind::kMessage && event.from == event.to;
    if (!event.timer && !to_oneself && clock_.now_ns() < event.link->silent_until_ns) {
      events_.emplace(std::pair(event.link->silent_until_ns, order), std::move(event));
    } else if (event.at_hub) {
      if (hub_ != nullptr) arrive_at_hub(event);
    } else if (event.link->up) {
      arrive_at_member(event);
    }
  }
}

void SimControlNet::arrive_at_hub(Event& event) {
  const LinkPtr link = event.link;
  if (event.kind == Event::Kind::kUp) return admit(link);
  const auto from = members_.find(link->self);
  if (from == members_.end() || from->second != link) return;
  if (event.kind == Event::Kind::kOver) return lose(link);
  if (event.to == kSender) return hub_->sink->on_control(event.from, event.from_life, std::move(event.body));
  const auto peer = members_.find(event.to);
  if (peer == members_.end()) return;
  if (event.to_life != 0 && event.to_life != peer->second->incarnation) return;
  event.link = peer->second;
  event.at_hub = false;
  post(std::move(event));
}

void SimControlNet::admit(const LinkPtr& link) {
  if (links_[link->self] != link) return;  // replaced meanwhile
  if (const auto before = members_.find(link->self); before != members_.end()) lose(LinkPtr(before->second));
  members_[link->self] = link;
  const auto tell = [&](const LinkPtr& whom, const LinkPtr& of) {
    Event event{.kind = Event::Kind::kUp, .link = whom, .from = of->self, .from_life = of->incarnation};
    post(std::move(event));
  };
  for (const auto& [member, other] : members_) {
    if (other == link) continue;
    tell(other, link);
    tell(link, other);
  }
  tell(link, hub_);
  hub_->sink->on_member_up(link->self, link->incarnation);
}

void SimControlNet::lose(const LinkPtr& link) {
  members_.erase(link->self);
  for (const auto& [member, other] : members_) {
    post({.kind = Event::Kind::kLost, .link = other, .from = link->self, .from_life = link->incarnation});
  }
  hub_->sink->on_member_lost(link->self, link->incarnation, link_gone("its link is gone"));
}

void SimControlNet::arrive_at_member(Event& event) {
  Link& link = *event.link;
  switch (event.kind) {
    case Event::Kind::kMessage:
      return link.sink->on_control(event.from, event.from_life, std::move(event.body));
    case Event::Kind::kUp:
      link.known[event.from] = event.from_life;
      link.lost.erase(event.from);
      return link.sink->on_member_up(event.from, event.from_life);
    case Event::Kind::kLost:
      link.known.erase(event.from);
      link.lost.insert(event.from);
      return link.sink->on_member_lost(event.from, event.from_life, link_gone("its link is gone"));
    case Event::Kind::kOver:
      return lose_hub(event.link);
  }
}

void SimControlNet::lose_hub(const LinkPtr& link) {
  ControlSink* const sink = std::exchange(link->sink, nullptr);
  link->up = false;
  const auto hub = link->known.find(kSender);
  const Incarnation life = hub != link->known.end() ? hub->second : 0;
  sink->on_member_lost(kSender, life, link_gone("its hub does not answer"));
}

}  // namespace shardpull
