#include "runtime/replica_link.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"
#include "base/status_macros.h"

namespace shardpull {
namespace {

constexpr std::uint32_t kUnknown = 0xFFFFFFFFu;

// Connecting blocks the progress thread, which has mates to answer as well: all connects together take less
// than the time within which an answer is due.
std::int64_t connect_timeout(std::int64_t dead_after_ns, std::size_t mates) {
  return std::max<std::int64_t>(
      dead_after_ns / 2 / static_cast<std::int64_t>(std::max<std::size_t>(mates, 1)), kNanosPerMilli);
}

}  // namespace

ReplicaLink::ReplicaLink(ProgressThread& progress, std::uint32_t consumer, std::vector<std::uint32_t> mates,
                         FleetToken token, Incarnation incarnation, std::int64_t dead_after_ns,
                         ReplicaHooks hooks)
    : progress_(progress),
      consumer_(consumer),
      token_(token),
      incarnation_(incarnation),
      connect_timeout_ns_(connect_timeout(dead_after_ns, mates.size())),
      hooks_(std::move(hooks)),
      machine_({.consumer = consumer, .mates = mates, .answer_within_ns = dead_after_ns}) {
  for (const std::uint32_t mate : mates) mates_[mate];
}

Status ReplicaLink::listen() {
  if (mates_.empty()) return {};
  SHARDPULL_ASSIGN_OR_RETURN(address_, progress_.transport().listen());
  return {};
}

void ReplicaLink::worker_up(std::uint32_t worker, Incarnation incarnation) {
  const auto found = mates_.find(worker);
  if (found == mates_.end()) return;
  Mate& mate = found->second;
  if (mate.incarnation != incarnation) {
    if (mate.endpoint != 0) progress_.transport().close(mate.endpoint);
    to_mates_.erase(mate.endpoint);
    // Whoever may have been asked is gone.
    if (mate.incarnation != 0) unreachable(worker, Status(StatusCode::kUnavailable, "it was started again"));
    mate = Mate{};
    mate.incarnation = incarnation;
  }
  hooks_.announce(worker, address_);
}

void ReplicaLink::mate_listens(std::uint32_t mate, Incarnation incarnation, std::string address) {
  const auto found = mates_.find(mate);
  if (found == mates_.end() || found->second.incarnation != incarnation) return;
  found->second.address = std::move(address);
}

// ---- events -----------------------------------------------------------------------------------------------

template <typename Event>
void ReplicaLink::drive(Event event) {
  CommitActions actions;
  event(progress_.clock().now_ns(), actions);
  for (const CommitAction& action : actions)
    std::visit([this](const auto& each) { this->perform(each); }, action);
}

Status ReplicaLink::finish(std::uint64_t sync_id) {
  Status status;
  drive([&](std::int64_t, CommitActions& out) { status = machine_.finish(sync_id, out); });
  return status;
}

void ReplicaLink::sender_lost(const Status& why) {
  drive([&](std::int64_t now, CommitActions& out) { machine_.sender_lost(now, why, out); });
}

void ReplicaLink::tick() {
  drive([&](std::int64_t now, CommitActions& out) { machine_.tick(now, out); });
}

void ReplicaLink::unreachable(std::uint32_t mate, const Status& why) {
  log_info("worker {} cannot be asked how the sync ended: {}", mate, why.to_string());
  // Posted: the machine may be in the middle of the event that asked.
  progress_.post([this, mate] {
    drive([&](std::int64_t now, CommitActions& out) { machine_.unreachable(now, mate, out); });
    hooks_.settled();
  });
}

void ReplicaLink::on_accepted(EndpointId endpoint) {
  from_mates_[endpoint] = kUnknown;
}

bool ReplicaLink::on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) {
  const auto refuse = [&](std::string_view why) {
    log_warn("a connection that said it is worker {} was closed: {}", header.consumer, why);
    progress_.transport().close(endpoint);
    on_closed(endpoint, Status(StatusCode::kUnavailable, std::string(why)));
    return true;
  };
  const auto from = from_mates_.find(endpoint);
  const auto to = to_mates_.find(endpoint);
  if (from == from_mates_.end() && to == to_mates_.end()) return false;
  const auto mate = mates_.find(header.consumer);
  if (mate == mates_.end()) return refuse("it is no mate of this worker");
  if (mate->second.incarnation != header.incarnation) return refuse("it is of another life");
  if (header.target != consumer_) return refuse("it takes this worker for another one");
  if (from != from_mates_.end()) {
    const auto word = decode_outcome(payload, header.length);
    if (header.type != HotType::kAsk || !word.ok()) return refuse("it asks nothing");
    if (from->second != kUnknown && from->second != header.consumer)
      return refuse("it was another worker before");
    from->second = header.consumer;
    drive([&](std::int64_t now, CommitActions& out) {
      machine_.asked(now, header.consumer, header.sync_id, header.seq, static_cast<CommitWord>(*word), out);
    });
    return true;
  }
  const auto word = decode_outcome(payload, header.length);
  if (header.type != HotType::kOutcome || to->second != header.consumer || !word.ok())
    return refuse("it answers something else");
  drive([&](std::int64_t now, CommitActions& out) {
    machine_.answered(now, header.consumer, header.sync_id, header.seq, static_cast<CommitWord>(*word), out);
  });
  return true;
}

bool ReplicaLink::on_closed(EndpointId endpoint, const Status& why) {
  if (from_mates_.erase(endpoint) != 0) return true;
  const auto found = to_mates_.find(endpoint);
  if (found == to_mates_.end()) return false;
  const std::uint32_t id = found->second;
  to_mates_.erase(found);
  mates_[id].endpoint = 0;
  log_debug("the connection to worker {} broke: {}", id, why.to_string());
  drive([&](std::int64_t now, CommitActions& out) { machine_.connection_broke(now, id, out); });
  hooks_.settled();
  return true;
}

// ---- actions ----------------------------------------------------------------------------------------------

HotHeader ReplicaLink::header(HotType type, std::uint64_t sync_id, std::uint32_t mate,
                              std::uint32_t round) const {
  HotHeader header;
  header.type = type;
  header.token = token_;
  header.incarnation = incarnation_;
  header.sync_id = sync_id;
  header.consumer = consumer_;
  header.target = mate;
  header.seq = round;
  return header;
}

void ReplicaLink::perform(const commit_action::AskMate& action) {
  const std::uint32_t id = action.mate;
  Mate& mate = mates_[id];
  if (mate.address.empty())
    return unreachable(id, Status(StatusCode::kUnavailable, "it has not said where it listens"));
  if (mate.endpoint == 0) {
    const auto endpoint = progress_.transport().connect(mate.address, connect_timeout_ns_);
    if (!endpoint.ok()) return unreachable(id, endpoint.status());
    mate.endpoint = *endpoint;
    to_mates_[*endpoint] = id;
  }
  const std::vector<std::byte> payload = encode_outcome(static_cast<std::uint8_t>(action.word));
  // A send that fails is followed by on_closed.
  progress_.transport()
      .send(mate.endpoint, header(HotType::kAsk, action.sync_id, id, action.round), payload.data(),
            payload.size())
      .ignore();
}

void ReplicaLink::perform(const commit_action::AnswerMate& action) {
  const std::vector<std::byte> payload = encode_outcome(static_cast<std::uint8_t>(action.word));
  for (const auto& [endpoint, mate] : from_mates_) {
    if (mate != action.mate) continue;
    // A mate that is gone needs no answer.
    progress_.transport()
        .send(endpoint, header(HotType::kOutcome, action.sync_id, action.mate, action.round), payload.data(),
              payload.size())
        .ignore();
  }
}

void ReplicaLink::perform(const commit_action::Commit& action) {
  hooks_.commit(action.sync_id);
}

void ReplicaLink::perform(const commit_action::Abort& action) {
  hooks_.abort(action.sync_id, action.why);
}

}  // namespace shardpull
