// TrainerMachine: one rank's gather loop (credit, order, release), and SenderMachine: trainer 0's
// orchestration of one sync over the fleet. Rules: docs/PROTOCOL.md, "Trainer".
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "base/identity.h"
#include "protocol/types.h"

namespace shardpull {

// ---- one rank -----------------------------------------------------------------------------------

namespace trainer_action {
// Credit is there: ask the source for its next group, which must be `group`. Answer with source_gave() or
// fail().
struct AskSource {
  std::uint32_t group = 0;
};
// All groups are published: ask once more; the source must end. Answer with source_ended() or fail().
struct AskEnd {};
// Nobody reads the group any more, or its sync has failed: drop references, give its export buffer back, tell
// the source.
struct Release {
  std::uint32_t group = 0;
};
// Call ProducerMachine::end_sync.
struct EndProducer {};
// The rank's part is over: ended well, or the first error (the source is to be closed).
struct RankDone {
  std::uint64_t sync_id = 0;
  Status status;
};
}  // namespace trainer_action
using TrainerAction = std::variant<trainer_action::AskSource, trainer_action::AskEnd, trainer_action::Release,
                                   trainer_action::EndProducer, trainer_action::RankDone>;
using TrainerActions = std::vector<TrainerAction>;

class TrainerMachine {
 public:
  explicit TrainerMachine(std::uint32_t lookahead);
  ~TrainerMachine();
  // After ProducerMachine::begin_sync has returned OK and not failed the sync at once (a failure that was
  // kept for it): such a sync has nothing to gather and is not begun here. `groups`: the owned groups of this
  // sync, ascending (may be empty). `resident`: no credit; the groups are asked for one after the other
  // without waiting for freed ones, so that peak_resident() is not bounded. Refused while a sync runs here.
  Status begin(std::uint64_t sync_id, std::vector<std::uint32_t> groups, bool resident, TrainerActions& out);
  void published(std::uint32_t group, TrainerActions& out);    // the asked group has been published
  void group_freed(std::uint32_t group, TrainerActions& out);  // from the producer
  void source_ended(TrainerActions& out);
  void producer_ended(TrainerActions& out);  // SyncEnded
  // The first failure is kept. Nothing is asked any more. Release of every resident group and RankDone follow
  // once the source call under way, if any, has returned (published(), source_ended() or source_returned())
  // and the producer is quiet. Call it for the producer's SyncFailed; an error found elsewhere goes through
  // ProducerMachine::fail, which answers with that.
  void fail(const Status& why, TrainerActions& out);
  void producer_quiet(TrainerActions& out);  // SyncQuiet
  // A source call ended and nothing was published: it failed, or the sync had failed meanwhile.
  void source_returned(TrainerActions& out);
  bool running() const;
  std::uint32_t resident() const;  // groups asked for or published, not freed
  std::uint32_t peak_resident() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// ---- the sender ---------------------------------------------------------------------------------

namespace sender_action {
struct OpenSync {
  std::uint32_t rank = 0;
};  // SyncOpen to a rank (its own included)
struct StartUpdate {
  std::uint32_t consumer = 0;
};
struct Update {
  std::uint32_t consumer = 0;
};
struct Finish {
  std::uint32_t consumer = 0;
};
struct FailRank {
  std::uint32_t rank = 0;
  Status status;
};
struct FailConsumer {
  std::uint32_t consumer = 0;
  Status status;
};
// The rank's send_weights returns this. After a failure it may reach a rank whose send_weights has not begun
// yet: that one fails as soon as it does.
struct CloseSync {
  std::uint32_t rank = 0;
  Status status;
};
// The whole sync is over on the sender. `lost_consumers`: the processes that were lost in it, ascending;
// `dropped_consumers`: their living mates, which left the sync with them.
struct SyncDone {
  std::uint64_t sync_id = 0;
  Status status;
  std::vector<std::uint32_t> lost_consumers;
  std::vector<std::uint32_t> dropped_consumers;
  std::vector<std::uint32_t> lost_ranks;  // that had no part in it, or not to its end, ascending
};
}  // namespace sender_action
using SenderAction = std::variant<sender_action::OpenSync, sender_action::StartUpdate, sender_action::Update,
                                  sender_action::Finish, sender_action::FailRank, sender_action::FailConsumer,
                                  sender_action::CloseSync, sender_action::SyncDone>;
using SenderActions = std::vector<SenderAction>;

struct SenderConfig {
  std::uint32_t world_size = 1, num_consumers = 1, workers_per_replica = 1;
  bool fail_on_consumer_loss = false;
  // Bounds every wait of the sender that no other watchdog covers: for ranks to begin, updates to start, the
  // last consumers to be prepared once all ranks have ended, commits.
  std::int64_t step_timeout_ns = 300'000'000'000;
  // How long a failed sync waits for everybody to have ended before the sender gives up on them.
  std::int64_t drain_timeout_ns = 10'000'000'000;
};

class SenderMachine {
 public:
  explicit SenderMachine(SenderConfig config);
  ~SenderMachine();
  // Who holds what, after validate(): whether a sync can go on without a rank. Before this it cannot.
  void set_tables(std::shared_ptr<const InitTables> tables);
  // opens -> starts updates -> (all started) update -> (all prepared and all ranks ended) finish -> (all
  // finished) close.
  //
  // A failure of any rank or consumer, a lost rank of whose weights nobody else holds some, a lost consumer
  // (on_consumer_loss=fail, or the last replica) and a wait past its limit fail the sync: FailRank and
  // FailConsumer to everybody still in it, then, once everybody has ended or drain_timeout has passed,
  // CloseSync and SyncDone with the first error. A lost consumer's replica leaves the sync otherwise: its
  // living mates get FailConsumer and nothing they report counts any more. A lost rank that others can stand
  // in for is out of the sync: the consumers, who hear of it themselves, pull from those.
  //
  // Those of `live` (next_live(), or some whole replicas of it) that are not there are lost as it begins.
  //
  // Refused: a sync is running, sync id not above the last, a live set that is empty, not ascending, out of
  // range, or not whole replicas.
  Status begin(std::int64_t now_ns, std::uint64_t sync_id, std::vector<std::uint32_t> live,
               SenderActions& out);
  // The worker has joined: it is in the syncs that begin from now on, until it is lost.
  void worker_joined(std::uint32_t consumer);
  // A rank that was lost has joined again, as another process: it is in the next sync that begins, not in the
  // one that runs.
  void take_back(std::uint32_t rank);
  bool lost(std::uint32_t rank) const;  // and not back
  // The workers of a sync that begins now, ascending: the whole replicas of those that have joined. With
  // fail_on_consumer_loss one that was lost since the last sync, and is not back, counts as there: the sync
  // begins, and fails for its loss. Empty: there is no whole replica.
  std::vector<std::uint32_t> next_live() const;
  // What has to come back before a sync can begin, in words; empty: nothing. That is a whole replica, or a
  // lost rank of whose weights the others do not hold all. A rank that was lost since the last sync is not
  // waited for with fail_on_consumer_loss: the sync begins, and fails for its loss.
  std::string awaited() const;
  // "worker 1, worker 3 (WHY)": those that have not joined, or are lost; why the last of them was lost.
  std::string missing_workers() const;
  // The rank's producer has begun the sync: from here on its own watchdog covers it. Required of every rank.
  void rank_began(std::int64_t now_ns, std::uint32_t rank, std::uint64_t sync_id, SenderActions& out);
  void update_started(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id,
                      const Status& status, SenderActions& out);
  // UpdateDone of a consumer; also its answer to FailConsumer.
  void prepared(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id, const Status& status,
                SenderActions& out);
  void finished(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id, const Status& status,
                SenderActions& out);
  // RankDone of a rank.
  void rank_ended(std::int64_t now_ns, std::uint32_t rank, std::uint64_t sync_id, const Status& status,
                  SenderActions& out);
  // A failure report: a producer's SyncFailed, a consumer's ReportFailure.
  void failed(std::int64_t now_ns, const Member& from, std::uint64_t sync_id, const Status& why,
              SenderActions& out);
  void rank_lost(std::int64_t now_ns, std::uint32_t rank, const Status& why, SenderActions& out);
  void consumer_lost(std::int64_t now_ns, std::uint32_t consumer, const Status& why, SenderActions& out);
  // Call at least every min(5 s, step_timeout / 10).
  void tick(std::int64_t now_ns, SenderActions& out);
  bool running() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardpull
