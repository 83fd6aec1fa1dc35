// TrainerMachine: one rank's gather loop (credit, order, release), and SenderMachine: trainer 0's orchestration of one sync
// over the fleet. Rules: docs/PROTOCOL.md, "Trainer".
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "protocol/types.h"

namespace shardpull {

// ---- one rank ---------------------------------------------------------------------------------------------------------

namespace trainer_action {
// Credit is there: ask the source for its next group, which must be `group`. Answer with source_gave() or fail().
struct AskSource { std::uint32_t group = 0; };
// All groups are published: ask once more; the source must end. Answer with source_ended() or fail().
struct AskEnd {};
// Nobody reads the group any more: drop references, give its export buffer back, tell the source.
struct Release { std::uint32_t group = 0; };
// Call ProducerMachine::end_sync.
struct EndProducer {};
// The rank's part is over: ended well, or the first error (the source is to be closed).
struct RankDone { std::uint64_t sync_id = 0; Status status; };
}  // namespace trainer_action
using TrainerAction = std::variant<trainer_action::AskSource, trainer_action::AskEnd, trainer_action::Release,
                                   trainer_action::EndProducer, trainer_action::RankDone>;
using TrainerActions = std::vector<TrainerAction>;

class TrainerMachine {
 public:
  explicit TrainerMachine(std::uint32_t lookahead);
  ~TrainerMachine();
  // `groups`: the owned groups of this sync, ascending (may be empty). Refused while a sync runs here.
  Status begin(std::uint64_t sync_id, std::vector<std::uint32_t> groups, TrainerActions& out);
  void published(std::uint32_t group, TrainerActions& out);      // the asked group has been published
  void group_freed(std::uint32_t group, TrainerActions& out);    // from the producer
  void source_ended(TrainerActions& out);
  void producer_ended(TrainerActions& out);                      // SyncEnded
  // The first failure is kept. RankDone follows once the source call under way, if any, has returned (source_returned()).
  void fail(const Status& why, TrainerActions& out);
  void source_returned(TrainerActions& out);                     // a source call ended although the sync had failed
  bool running() const;
  std::uint32_t resident() const;                                // groups asked for or published, not freed
  std::uint32_t peak_resident() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// ---- the sender -------------------------------------------------------------------------------------------------------

namespace sender_action {
struct OpenSync { std::uint32_t rank = 0; };            // SyncOpen to a rank (its own included)
struct StartUpdate { std::uint32_t consumer = 0; };
struct Update { std::uint32_t consumer = 0; };
struct Finish { std::uint32_t consumer = 0; };
struct FailRank { std::uint32_t rank = 0; Status status; };
struct FailConsumer { std::uint32_t consumer = 0; Status status; };
struct CloseSync { std::uint32_t rank = 0; Status status; };  // the rank's send_weights returns this
// The whole sync is over on the sender.
struct SyncDone { std::uint64_t sync_id = 0; Status status; std::vector<std::uint32_t> lost_consumers; };
}  // namespace sender_action
using SenderAction = std::variant<sender_action::OpenSync, sender_action::StartUpdate, sender_action::Update,
                                  sender_action::Finish, sender_action::FailRank, sender_action::FailConsumer,
                                  sender_action::CloseSync, sender_action::SyncDone>;
using SenderActions = std::vector<SenderAction>;

struct SenderConfig {
  std::uint32_t world_size = 1, num_consumers = 1, workers_per_replica = 1;
  bool fail_on_consumer_loss = false;
  // Bounds every wait of the sender that no other watchdog covers (opening, starting, finishing).
  std::int64_t step_timeout_ns = 300'000'000'000;
};

class SenderMachine {
 public:
  explicit SenderMachine(SenderConfig config);
  ~SenderMachine();
  // opens -> starts updates -> (all started) update -> (all prepared and all ranks ended) finish -> (all finished) close.
  // Refused: a sync is running, sync id not above the last, a live set that is empty, out of range, or not whole replicas.
  Status begin(std::int64_t now_ns, std::uint64_t sync_id, std::vector<std::uint32_t> live, SenderActions& out);
  void update_started(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id, const Status& status, SenderActions& out);
  void prepared(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id, const Status& status, SenderActions& out);
  void finished(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id, const Status& status, SenderActions& out);
  void rank_ended(std::int64_t now_ns, std::uint32_t rank, std::uint64_t sync_id, const Status& status, SenderActions& out);
  // A failure report of any member.
  void failed(std::int64_t now_ns, std::uint64_t sync_id, const Status& why, SenderActions& out);
  void rank_lost(std::int64_t now_ns, std::uint32_t rank, const Status& why, SenderActions& out);
  void consumer_lost(std::int64_t now_ns, std::uint32_t consumer, const Status& why, SenderActions& out);
  void tick(std::int64_t now_ns, SenderActions& out);
  bool running() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardpull
