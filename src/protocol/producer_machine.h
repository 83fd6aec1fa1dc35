// ProducerMachine: one trainer rank's side that answers pulls. Rules: docs/PROTOCOL.md, "Producer".
//
//   ring:   none --reserve--> allocating --ring_allocated--> there
//   sync:   idle --begin_sync--> syncing --end_sync, everything freed--> idle
//                                   \-- fail, stall, last replica lost --> failed --begin_sync--> syncing
//   group:  unpublished --publish_group--> published --every live consumer has signalled--> freed
//
// Messages for a sync that has not begun here are kept, per consumer for the newest such sync, and take
// effect at its begin_sync; those of an earlier sync are dropped and counted. A failed sync answers every
// pull with its failure until a newer one begins.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "plan/restrict.h"
#include "protocol/types.h"

namespace shardpull {

struct ProducerConfig {
  std::uint32_t rank = 0;
  std::shared_ptr<const InitTables> tables;  // after validate()
  std::int64_t stall_timeout_ns = 300'000'000'000;
  bool fail_on_consumer_loss = false;              // on_consumer_loss=fail
  std::int64_t drain_timeout_ns = 10'000'000'000;  // how long a failed sync's readers are waited for
};

namespace producer_action {
// Allocate (or grow) the serve ring of a lane (Lane::sharing_group): `slots` slots of `slot_bytes`. Those of
// regular lanes are read by all consumers of a sharing group, those of recovery lanes by one. Answer with
// ring_allocated().
struct AllocateRing {
  std::uint32_t sharing_group = 0;
  std::uint32_t slots = 0;
  std::uint64_t slot_bytes = 0;
};
struct ReserveReply {
  std::uint32_t consumer = 0;
  std::uint64_t incarnation = 0;
  LaneKind lane = LaneKind::kRegular;
  Status status;
};
// Gather `pull`'s keys into the slot, packed from 0. `sources` has one location per distinct (name, piece),
// in order of first use among the keys. Answer with pack_done(), and where `summed` with the sum of each
// key's bytes in the slot. `pull` stays valid until then, and is the same object in every sync of the same
// names until the consumer announces anew or a sync of other names runs.
struct Pack {
  std::uint64_t ticket = 0;
  std::uint32_t sharing_group = 0, slot = 0;
  std::shared_ptr<const PullDescription> pull;
  std::vector<PublishedView> sources;
  bool summed = false;
};
// The keys of `pull` are read in place, and summed before they are: sum the bytes that a pack would gather.
// Answer with pack_done(). It reads the group as a pack does; it has no slot.
struct Sum {
  std::uint64_t ticket = 0;
  std::shared_ptr<const PullDescription> pull;
  std::vector<PublishedView> sources;
};
// Replies go to the life of the consumer that asked (`incarnation`), never to its successor under the same
// id; they are dropped when that life has no endpoint any more.
struct ReadyReply {
  std::uint64_t incarnation = 0;
  PullId pull;
  ReadyInfo ready;
};
struct FailReply {
  std::uint64_t incarnation = 0;
  PullId pull;
  Status status;
};
// The way that the signal came: on the hot endpoint, or by control. A worker that signals by control has
// none, even where its end here is not known to be broken yet.
struct SignalAck {
  std::uint64_t incarnation = 0;
  std::uint32_t consumer = 0;
  std::uint64_t sync_id = 0;
  std::vector<std::uint32_t> groups;
  bool by_control = false;
};
// Every live consumer has signalled the group: its memory is no longer read. Credit goes back to the trainer.
struct GroupFreed {
  std::uint64_t sync_id = 0;
  std::uint32_t group = 0;
};
// The answer to end_sync: everything freed, nothing parked, no slot being read.
struct SyncEnded {
  std::uint64_t sync_id = 0;
};
// At most once per sync: it failed here first, or was told to. Wake every waiter and tell everybody. No
// GroupFreed follows.
struct SyncFailed {
  std::uint64_t sync_id = 0;
  Status status;
};
// Once per failed sync, after SyncFailed, at once or when its last pack and the last mapped read of its
// published memory have ended: nobody reads it any more. A worker says so by signalling, also after a
// failure; one that does not is waited for no longer than drain_timeout. Hand it to
// TrainerMachine::producer_quiet; references may be dropped then, and not before.
struct SyncQuiet {
  std::uint64_t sync_id = 0;
};
}  // namespace producer_action

using ProducerAction =
    std::variant<producer_action::AllocateRing, producer_action::ReserveReply, producer_action::Pack,
                 producer_action::Sum, producer_action::ReadyReply, producer_action::FailReply,
                 producer_action::SignalAck, producer_action::GroupFreed, producer_action::SyncEnded,
                 producer_action::SyncFailed, producer_action::SyncQuiet>;
using ProducerActions = std::vector<ProducerAction>;

class ProducerMachine {
 public:
  explicit ProducerMachine(ProducerConfig config);
  ~ProducerMachine();

  // Starts a sync on this rank. `live` ascending, distinct, within 0..C-1, not empty; `groups` = the owned
  // groups of this sync (ascending, may be empty). `names`: the sync moves these only, empty = all; it has
  // the owned groups of which a name is listed, whether or not this rank holds one of those, and pulls are
  // those of restrict_pulls. Ends what is left of earlier syncs (SyncFailed, superseded). Then what was kept
  // for this sync takes effect, a failure included: OK with SyncFailed in `out` is possible. Refused,
  // nothing changed: a sync id not above the last, a bad live set, a bad name set, a group not owned or
  // without a listed name.
  Status begin_sync(std::int64_t now_ns, std::uint64_t sync_id, std::uint64_t version,
                    const std::vector<std::uint32_t>& live, const std::vector<std::uint32_t>& groups,
                    const NameSet& names, ProducerActions& out);
  // The sender has opened a sync with these workers, and means their lives of now. Call it as the sender's
  // word arrives, whenever this rank comes to begin_sync: a worker that was started again meanwhile knows
  // nothing of the sync, and is lost to it as it begins. Of the newest such sync.
  void sync_opened(std::uint64_t sync_id, const std::vector<std::uint32_t>& live);
  // The bytes are final. `views` has every listed name (or piece) this rank holds of the group, once each,
  // in any order; it may have none. Refused: not syncing (with the failure when the sync has failed), group
  // not owned or published twice, a name missing, extra, or with another dtype or shape than the metadata, a
  // view that leaves its window.
  Status publish_group(std::int64_t now_ns, std::uint32_t group, std::vector<PublishedView> views,
                       ProducerActions& out);
  // A life of this consumer is up: messages of any other are refused from now on. Call for every member-up
  // report; reserve() implies it. Another life that took part in the running sync is lost to it
  // (consumer_lost).
  void consumer_up(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t incarnation,
                   ProducerActions& out);
  // A consumer announces its pulls. Settings and digest are checked first, then descriptions, then memory is
  // asked for; a refusal records nothing. Exactly one ReserveReply follows. Replaces the consumer's earlier
  // announcement; the same one again changes nothing. A ring in use is regrown once nothing packs into it or
  // reads it, and the reply waits for that. Pulls of a recovery lane may come at any time, also during a sync;
  // nobody shares them, and a life announces them once.
  void reserve(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t incarnation,
               std::uint64_t slot_bytes, std::uint32_t ring_depth, std::uint32_t num_consumers,
               std::uint32_t workers_per_replica, const Digest128& digest, std::vector<PullDescription> pulls,
               ProducerActions& out);
  // On an error the ring is what it was before AllocateRing.
  void ring_allocated(std::int64_t now_ns, std::uint32_t ring, const Status& status,
                      ProducerActions& out);
  void pull(std::int64_t now_ns, std::uint64_t incarnation, const PullId& pull, ProducerActions& out);
  // The pack, or the summing, has ended. An error fails every sharer's pull and the sync. `sums` has one
  // checksum per key where the pull's path is summed, else none.
  void pack_done(std::int64_t now_ns, std::uint64_t ticket, const Status& status,
                 std::vector<std::uint64_t> sums, ProducerActions& out);
  // Free signals of a consumer (a set: repeats have no effect and are acknowledged again). In a failed sync
  // they only say that the consumer has stopped reading. `by_control`: how they came, for the SignalAck.
  void signal(std::int64_t now_ns, std::uint64_t incarnation, std::uint64_t sync_id, std::uint32_t consumer,
              const std::vector<std::uint32_t>& groups, ProducerActions& out, bool by_control = false);
  // The consumer lives, cannot reach this rank, and reads nothing here any more: in this sync nobody waits
  // for its pulls, and what it has asked for is dropped. It stays in the barrier, with signals that come by
  // another way. For a sync not begun here it takes effect at its begin_sync; repeats have no effect.
  void leave_lanes(std::int64_t now_ns, std::uint64_t incarnation, std::uint64_t sync_id,
                   std::uint32_t consumer, ProducerActions& out);
  // The consumer's process is gone: its replica leaves the barrier and the sharing groups of the running
  // sync; when no consumer is left, or on_consumer_loss=fail, the sync fails naming it. A later sync whose
  // live set names it before consumer_up() or reserve() loses it as it begins. Call it from the control
  // channel's reports only: the sender, which decides what a failure report means, hears of a loss there
  // first.
  void consumer_lost(std::int64_t now_ns, std::uint32_t consumer, const Status& why, ProducerActions& out);
  // The trainer has published everything; SyncEnded or SyncFailed follows. Refused: no sync, with the failure
  // when it has failed already (nothing follows then), a group of the sync not published.
  Status end_sync(std::int64_t now_ns, ProducerActions& out);
  // Fails the sync with `why`; the first failure is kept. For a sync not begun here it is kept and takes
  // effect at its begin_sync; for an earlier one it has no effect.
  void fail(std::uint64_t sync_id, const Status& why, ProducerActions& out);
  // The stall watchdog, and the limit on readers of a failed sync. Call at least every min(5 s, stall_timeout
  // / 10).
  void tick(std::int64_t now_ns, ProducerActions& out);
  // Every waiter fails with SHUTDOWN, the running sync too. Idempotent; later events are refused, but for
  // pack_done().
  void shutdown(ProducerActions& out);

  bool syncing() const;  // begun, not ended, not failed
  std::optional<std::uint64_t> running_sync() const;
  const Status& failure() const;               // of the last sync; OK when it did not fail
  std::vector<std::uint32_t> unfreed() const;  // published and not freed, ascending
  std::vector<std::uint32_t> live() const;
  const DropCounters& drops() const;
  std::uint64_t packs() const;         // packs performed, all syncs (replicas share one)
  std::uint64_t bytes_packed() const;  // by them, padding between keys included

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardpull
