// ReturningProducers: which producers a worker does without, and how they serve it again. Rules:
// docs/PROTOCOL.md, "A rank that comes back".
//
//   lost --returned--> met --greeted and reserved--> ready --start--> it serves
//                       \---- fails, or is late ----> given up --start--> it lives, and is stood in for
//                                    ^                    |
//                                    \---- met again, before a later sync that it is in
//   out of reach --start--> reconnect: it serves, or stays out of reach until the next sync
//
// What is done with a producer that others stand in for is ConsumerMachine's.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <variant>
#include <vector>

#include "protocol/types.h"

namespace shardpull {

namespace returning_action {
// Connect and announce this worker's pulls there, beside whatever runs. Answer with greeted() and reserved(),
// or failed(), also at once.
struct Meet {
  std::uint32_t producer = 0;
};
// Close the connection that was opened to meet it, if there is one.
struct Part {
  std::uint32_t producer = 0;
};
// It serves as planned from here on: the connection that was opened to meet it replaces those before. Call
// ConsumerMachine::producer_returned.
struct TakeBack {
  std::uint32_t producer = 0;
};
// It lives, and waits for this worker's signals, but cannot serve it in this sync. Call
// ConsumerMachine::producer_returned, then producer_unreachable with `why`.
struct StandIn {
  std::uint32_t producer = 0;
  Status why;
};
// Connect to one whose connection broke. Answer with reconnected() where that succeeds.
struct Reconnect {
  std::uint32_t producer = 0;
};
// Call ConsumerMachine::producer_reachable.
struct Reached {
  std::uint32_t producer = 0;
};
}  // namespace returning_action
using ReturningAction =
    std::variant<returning_action::Meet, returning_action::Part, returning_action::TakeBack,
                 returning_action::StandIn, returning_action::Reconnect, returning_action::Reached>;
using ReturningActions = std::vector<ReturningAction>;

class ReturningProducers {
 public:
  // Of the whole plan. Only producers that it pulls from are met; others are connected to as they are needed.
  explicit ReturningProducers(const WorkerPlan& plan);

  // The producer's process is gone, a next life on its way back included.
  void producer_lost(std::uint32_t producer, ReturningActions& out);
  bool lost(std::uint32_t producer) const { return lost_.contains(producer); }  // and not taken back
  bool any_lost() const { return !lost_.empty(); }
  // The connection that served broke, or could not be opened, while the process is not known to be lost.
  void unreachable(std::uint32_t producer);
  bool any_unreachable() const { return !unreachable_.empty(); }

  // A lost producer has a successor, which is in the syncs after `without_until`. `limit_ns`: for how long
  // greeting and reserving there may take together.
  void returned(std::int64_t now_ns, std::uint32_t producer, std::uint64_t without_until,
                std::int64_t limit_ns, ReturningActions& out);
  // The answers to Meet. reserved(): false when nothing was announced there, or it is answered already.
  void greeted(std::uint32_t producer);
  bool reserved(std::uint32_t producer, const Status& status, ReturningActions& out);
  // It could not be connected to, or the connection that was opened to meet it broke.
  void failed(std::uint32_t producer, const Status& why, ReturningActions& out);

  // A sync is to start here. Meets again those that are in it and were given up before an earlier one.
  void wanted(std::int64_t now_ns, std::uint64_t sync_id, ReturningActions& out);
  // Whether all that are in the sync are ready, or given up: it may start.
  bool ready_for(std::uint64_t sync_id) const;
  // The sync starts: takes back those that are in it, and reconnects to those out of reach. Before
  // ConsumerMachine::start_update.
  void start(std::uint64_t sync_id, ReturningActions& out);
  void reconnected(std::uint32_t producer, ReturningActions& out);
  void tick(std::int64_t now_ns, ReturningActions& out);

 private:
  struct Returning {
    std::uint64_t without_until = 0;
    std::int64_t limit_ns = 0, deadline_ns = 0;
    bool greeted = false, reserved = false;
    std::optional<Status> failed;  // given up
    std::uint64_t wanted_for = 0;  // the latest sync that it was wanted for
    bool ready() const { return greeted && reserved && !failed; }
  };
  void meet(std::int64_t now_ns, std::uint32_t producer, Returning& returning, ReturningActions& out);
  void give_up(std::uint32_t producer, Returning& returning, const Status& why, ReturningActions& out);

  std::set<std::uint32_t> planned_;
  std::set<std::uint32_t> lost_, unreachable_;
  std::map<std::uint32_t, Returning> returning_;
};

}  // namespace shardpull
