// ProducerMachine: one trainer rank's side that answers pulls. Rules: docs/PROTOCOL.md, "Producer".
//
//            reserve                         begin_sync        publish_group / pull / signal           end_sync
//   [no ring] ------> [ring allocated] ...  [idle] -----> [syncing: groups unpublished -> published -> freed] -----> [idle]
//                                                               \-- fail / stall / loss of the last replica --> [failed] --> begin_sync of a newer sync
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "protocol/types.h"

namespace shardpull {

struct ProducerConfig {
  std::uint32_t rank = 0;
  std::shared_ptr<const InitTables> tables;   // after validate()
  std::int64_t stall_timeout_ns = 300'000'000'000;
  bool fail_on_consumer_loss = false;         // on_consumer_loss=fail
};

namespace producer_action {
// Allocate (or grow) the serve ring of a sharing group: `slots` slots of `slot_bytes`. Answer with ring_allocated().
struct AllocateRing { std::uint32_t sharing_group = 0; std::uint32_t slots = 0; std::uint64_t slot_bytes = 0; };
struct ReserveReply { std::uint32_t consumer = 0; std::uint64_t incarnation = 0; Status status; };
// Gather `pull`'s keys into the slot, packed from 0. `sources` has one location per distinct (name, piece), in order of
// first use among the keys. Answer with pack_done(). `pull` stays valid until then.
struct Pack {
  std::uint64_t ticket = 0;
  std::uint32_t sharing_group = 0, slot = 0;
  std::shared_ptr<const PullDescription> pull;
  std::vector<PublishedView> sources;
};
struct ReadyReply { PullId pull; ReadyInfo ready; };
struct FailReply { PullId pull; Status status; };
struct SignalAck { std::uint32_t consumer = 0; std::uint64_t sync_id = 0; std::vector<std::uint32_t> groups; };
// Every live consumer has signalled the group: its memory is no longer read. Credit goes back to the trainer.
struct GroupFreed { std::uint64_t sync_id = 0; std::uint32_t group = 0; };
// The answer to end_sync: everything freed, nothing parked, no slot being read.
struct SyncEnded { std::uint64_t sync_id = 0; };
// Once per sync: the sync failed here first, or was told to. Wake every waiter and tell everybody.
struct SyncFailed { std::uint64_t sync_id = 0; Status status; };
}  // namespace producer_action

using ProducerAction =
    std::variant<producer_action::AllocateRing, producer_action::ReserveReply, producer_action::Pack,
                 producer_action::ReadyReply, producer_action::FailReply, producer_action::SignalAck,
                 producer_action::GroupFreed, producer_action::SyncEnded, producer_action::SyncFailed>;
using ProducerActions = std::vector<ProducerAction>;

class ProducerMachine {
 public:
  explicit ProducerMachine(ProducerConfig config);
  ~ProducerMachine();

  // Starts a sync on this rank. `live` ascending, within 0..C-1, not empty; `groups` = the owned groups of this sync
  // (ascending; those with no listed name are left out). Ends what is left of earlier syncs (their pulls fail as
  // superseded). Refused: a sync id not above the last, a bad live set.
  Status begin_sync(std::int64_t now_ns, std::uint64_t sync_id, std::uint64_t version, const std::vector<std::uint32_t>& live,
                    const std::vector<std::uint32_t>& groups, ProducerActions& out);
  // The bytes are final. Refused: not syncing, group not owned or published twice, a name missing, extra, or with another
  // dtype or shape than the metadata.
  Status publish_group(std::int64_t now_ns, std::uint32_t group, std::vector<PublishedView> views, ProducerActions& out);
  // A consumer announces its pulls. Digest and settings are checked first, then descriptions; a refusal records nothing.
  void reserve(std::uint32_t consumer, std::uint64_t incarnation, std::uint64_t slot_bytes, std::uint32_t ring_depth,
               std::uint32_t num_consumers, std::uint32_t workers_per_replica, const Digest128& digest,
               std::vector<PullDescription> pulls, ProducerActions& out);
  void ring_allocated(std::uint32_t sharing_group, const Status& status, ProducerActions& out);
  void pull(std::int64_t now_ns, std::uint64_t incarnation, const PullId& pull, ProducerActions& out);
  void pack_done(std::int64_t now_ns, std::uint64_t ticket, const Status& status, std::vector<std::uint64_t> sums,
                 ProducerActions& out);
  // Free signals of a consumer (a set: repeats have no effect and are acknowledged again).
  void signal(std::int64_t now_ns, std::uint64_t incarnation, std::uint64_t sync_id, std::uint32_t consumer,
              const std::vector<std::uint32_t>& groups, ProducerActions& out);
  // The consumer's process is gone: its replica leaves the barrier and the sharing groups; when no replica is left, or
  // on_consumer_loss=fail, the sync fails naming it.
  void consumer_lost(std::int64_t now_ns, std::uint32_t consumer, const Status& why, ProducerActions& out);
  // The trainer has published everything; SyncEnded (or SyncFailed) follows when the last group is freed.
  Status end_sync(std::int64_t now_ns, ProducerActions& out);
  // Fails the running sync with `why`; the first failure is kept. No effect without a running sync of that id.
  void fail(std::uint64_t sync_id, const Status& why, ProducerActions& out);
  // The stall watchdog. Call at least every min(5 s, stall_timeout / 10).
  void tick(std::int64_t now_ns, ProducerActions& out);
  // Every waiter fails with SHUTDOWN. Idempotent; later events are refused.
  void shutdown(ProducerActions& out);

  bool syncing() const;
  std::optional<std::uint64_t> running_sync() const;
  const Status& failure() const;               // of the last sync; OK when it did not fail
  std::vector<std::uint32_t> unfreed() const;  // published and not freed, ascending
  std::vector<std::uint32_t> live() const;
  const DropCounters& drops() const;
  std::uint64_t packs() const;                 // packs performed, all syncs (replicas share one)

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardpull
