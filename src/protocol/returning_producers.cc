#include "protocol/returning_producers.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/clock.h"
#include "protocol/wording.h"

namespace shardpull {

using namespace returning_action;  // NOLINT: this file is about them

ReturningProducers::ReturningProducers(const WorkerPlan& plan) {
  for (const ProducerPlan& producer : plan.producers) planned_.insert(producer.producer);
}

void ReturningProducers::producer_lost(std::uint32_t producer, ReturningActions& out) {
  lost_.insert(producer);
  unreachable_.erase(producer);
  if (returning_.erase(producer) != 0) out.push_back(Part{producer});
}

void ReturningProducers::unreachable(std::uint32_t producer) {
  if (!lost_.contains(producer)) unreachable_.insert(producer);
}

void ReturningProducers::returned(std::int64_t now_ns, std::uint32_t producer, std::uint64_t without_until,
                                  std::int64_t limit_ns, ReturningActions& out) {
  if (returning_.erase(producer) != 0) out.push_back(Part{producer});
  Returning& returning = returning_[producer];
  returning.without_until = without_until;
  returning.limit_ns = limit_ns;
  meet(now_ns, producer, returning, out);
}

void ReturningProducers::meet(std::int64_t now_ns, std::uint32_t producer, Returning& returning,
                              ReturningActions& out) {
  returning.failed.reset();
  // Nothing is taken from others: they are signalled, by the control channel.
  returning.greeted = returning.reserved = !planned_.contains(producer);
  if (returning.ready()) return;
  returning.deadline_ns = now_ns + returning.limit_ns;
  out.push_back(Meet{producer});
}

void ReturningProducers::give_up(std::uint32_t producer, Returning& returning, const Status& why,
                                 ReturningActions& out) {
  returning.failed = why;
  out.push_back(Part{producer});
}

void ReturningProducers::greeted(std::uint32_t producer) {
  if (const auto found = returning_.find(producer); found != returning_.end()) found->second.greeted = true;
}

bool ReturningProducers::reserved(std::uint32_t producer, const Status& status, ReturningActions& out) {
  const auto found = returning_.find(producer);
  if (found == returning_.end() || found->second.failed || found->second.reserved) return false;
  if (status.ok()) {
    found->second.reserved = true;
  } else {
    give_up(producer, found->second, status, out);
  }
  return true;
}

void ReturningProducers::failed(std::uint32_t producer, const Status& why, ReturningActions& out) {
  if (const auto found = returning_.find(producer); found != returning_.end() && !found->second.failed)
    give_up(producer, found->second, why, out);
}

void ReturningProducers::wanted(std::int64_t now_ns, std::uint64_t sync_id, ReturningActions& out) {
  for (auto& [producer, returning] : returning_) {
    if (returning.without_until >= sync_id) continue;
    const bool for_another = returning.wanted_for != 0 && returning.wanted_for != sync_id;
    returning.wanted_for = sync_id;
    if (returning.failed && for_another) meet(now_ns, producer, returning, out);
  }
}

bool ReturningProducers::ready_for(std::uint64_t sync_id) const {
  return std::all_of(returning_.begin(), returning_.end(), [&](const auto& each) {
    const Returning& returning = each.second;
    return returning.without_until >= sync_id || returning.ready() || returning.failed;
  });
}

void ReturningProducers::start(std::uint64_t sync_id, ReturningActions& out) {
  for (auto it = returning_.begin(); it != returning_.end();) {
    const auto& [producer, returning] = *it;
    if (returning.without_until >= sync_id) {
      ++it;
      continue;
    }
    lost_.erase(producer);
    unreachable_.erase(producer);
    if (returning.ready()) {
      out.push_back(TakeBack{producer});
      it = returning_.erase(it);
    } else {
      out.push_back(StandIn{producer, returning.failed.value_or(Status(StatusCode::kUnavailable,
                                                                       "it was not reserved at in time"))});
      ++it;
    }
  }
  const std::set<std::uint32_t> away = unreachable_;
  for (const std::uint32_t producer : away) {
    if (planned_.contains(producer)) {
      out.push_back(Reconnect{producer});
    } else {
      reconnected(producer, out);
    }
  }
}

void ReturningProducers::reconnected(std::uint32_t producer, ReturningActions& out) {
  if (unreachable_.erase(producer) != 0) out.push_back(Reached{producer});
}

void ReturningProducers::tick(std::int64_t now_ns, ReturningActions& out) {
  for (auto& [producer, returning] : returning_) {
    if (returning.ready() || returning.failed || now_ns < returning.deadline_ns) continue;
    give_up(producer, returning,
            peer_error(StatusCode::kDeadlineExceeded, trainer_name(producer),
                       fmt::format("{} did not answer within {} ms", trainer_name(producer),
                                   returning.limit_ns / kNanosPerMilli),
                       Reason::kPeerLost),
            out);
  }
}

}  // namespace shardpull
