// ConsumerMachine: one worker's pull pipeline, K slots deep. Rules: docs/PROTOCOL.md, "Consumer".
//
//   idle --start_update--> updating --update--> ... everything landed, scattered, confirmed --> prepared
//   prepared --finish_update--> committing --> idle
//   any error --> failed --start_update--> updating
//
// An error stops everything new at once and is reported when what is in flight (transfers, copies, scatters,
// hooks) has ended: until then the worker is still "updating". Pulls that are not answered yet are not in
// flight: a producer writes nothing here by itself, and its late answer is dropped.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "protocol/types.h"

namespace shardpull {

enum class WorkerState : std::uint8_t { kIdle, kUpdating, kPrepared, kCommitting, kFailed };
std::string_view to_string(WorkerState state);

// What a module's bytes are worth.
struct ModuleState {
  enum class Kind : std::uint8_t { kUnset, kCurrent, kLanding, kPrepared, kMixed };
  Kind kind = Kind::kUnset;  // unset: nothing has landed in it yet
  std::uint64_t version =
      0;  // current: its version; landing, prepared: the version under way; mixed: the later one
  std::uint64_t old_version = 0;  // landing, prepared, mixed: what it held before, where has_old
  bool has_old = false;
  friend bool operator==(const ModuleState&, const ModuleState&) = default;
};
std::string to_string(const ModuleState& state);  // "current(3)", "mixed(2, 3)", "mixed(unset, 1)"

struct ConsumerConfig {
  std::shared_ptr<const WorkerPlan> plan;
  std::uint32_t num_modules = 0;  // Recording::modules.size()
  std::set<Path> summed;          // plan/integrity.h: whose Ready brings one sum per key
  // Packed chunks (Chunk::chunk_id) that are scattered while they arrive: they take no receive slot, and are
  // started by StartCopy as mapped ones are.
  std::set<std::uint32_t> scattered_on_arrival;
  // Chunks land beside the parameters, which are written by StartCommit alone: until then every module keeps
  // its bytes, state and version, also when the sync fails. Hooks run after the commit's copies.
  bool staged = false;
  // Bounds what no producer's watchdog sees: a transfer, copy or scatter under way, and signals not confirmed
  // after the last chunk. A pull that waits for its group is covered by the producer's own watchdog, however
  // long others keep it waiting.
  std::int64_t stall_timeout_ns = 300'000'000'000;
  // How long a transfer or copy that failed because its producer cannot be reached waits for word that the
  // producer is lost (producer_lost, producer_unreachable) before its error counts.
  std::int64_t loss_grace_ns = 6'000'000'000;
};

namespace consumer_action {
struct SendPull {
  std::uint32_t producer = 0;
  PullId pull;
};
// Announce recovery_pulls_at(the whole plan, producer) there, over an endpoint to it that is opened if there
// is none. Answer with recovery_reserved(). At most once per producer while it is reachable.
struct AnnounceRecovery {
  std::uint32_t producer = 0;
};
// Packed: read the producer's slot into receive slot `slot` at the run's offset. Answer with transfer_done().
struct StartTransfer {
  std::uint32_t chunk = 0;
  std::uint16_t run = 0;
  std::uint32_t producer = 0;
  std::uint32_t slot = 0;
  ReadyInfo ready;
};
// At most K scatters and copies run at once; they may end in any order. Those that depend on one another (a
// module's later chunks on its first, which materialises and fills) are started in turn.
//
// Packed, all runs landed: materialise the chunk's modules, run their fills, scatter the slot. Where the chunk
// is summed, no byte of a key whose bytes have another sum may be scattered: that is DATA_LOSS. Answer with
// scatter_done().
struct StartScatter {
  std::uint32_t chunk = 0;
  std::uint32_t slot = 0;
  std::vector<std::uint32_t> producers;  // by run: whom it came from
  std::vector<std::uint64_t> sums;  // one per key of the chunk where it is summed, else empty
};
// Mapped: materialise, fill and copy straight from the producers' memory. Direct, and packed where it is
// scattered on arrival: read from there. `ready` has one entry per run of the chunk, an empty one for a run
// without keys. Answer with scatter_done(): the producers' memory is no longer read then. Also used, with no
// runs, for chunks without keys. ReadyInfo::sums as StartScatter's, of the run's keys.
//
// One that fails with UNAVAILABLE may be asked for once more, from other producers.
struct StartCopy {
  std::uint32_t chunk = 0;
  std::vector<std::uint32_t> producers;  // by run: whose memory it is
  std::vector<ReadyInfo> ready;
};
// Post-process the modules whose last chunk this is: everything of them has been scattered (staged: is in the
// parameters). Answer with post_done(). Must not delay scatters: it has a thread of its own, and several may be
// waiting.
struct StartPost {
  std::uint32_t chunk = 0;
};
// Staged: copy everything that this sync's plan has landed beside the parameters into them. Answer with
// commit_done().
struct StartCommit {};
// Tell the producer that these groups will not be read any more. Confirmed by signals_acked(); sent again
// only after producer_unreachable(): a channel is reliable until it breaks. Where a send fails, call that.
// Also sent, of what had been asked for, when a failed sync has drained here; no worker waits for those
// confirmations, but the producer keeps what may be read for a while.
struct SendSignals {
  std::uint32_t producer = 0;
  std::uint64_t sync_id = 0;
  std::vector<std::uint32_t> groups;
};
// The connection to the producer broke, and what was read from it has ended: tell it, by control, that this
// worker reads nothing there any more and pulls nothing more in this sync. Once in a sync.
struct LeaveLanes {
  std::uint32_t producer = 0;
  std::uint64_t sync_id = 0;
};
// update() is over: prepared (every chunk landed and scattered, hooks ended, signals confirmed: in place
// nothing is left that could fail), or the first error (nothing is in flight any more). At most once prepared
// and once failed per sync: the error also follows when the sync fails before update() or after it was
// prepared.
struct UpdateDone {
  std::uint64_t sync_id = 0;
  Status status;
};
// finish_update() is over: committed, where staged copied and post-processed before; or the error.
struct FinishDone {
  std::uint64_t sync_id = 0;
  Status status;
};
// This worker failed a sync by itself: tell the sender.
struct ReportFailure {
  std::uint64_t sync_id = 0;
  Status status;
};
}  // namespace consumer_action

using ConsumerAction =
    std::variant<consumer_action::SendPull, consumer_action::AnnounceRecovery, consumer_action::StartTransfer,
                 consumer_action::StartScatter, consumer_action::StartCopy, consumer_action::StartPost,
                 consumer_action::StartCommit, consumer_action::SendSignals, consumer_action::LeaveLanes,
                 consumer_action::UpdateDone, consumer_action::FinishDone, consumer_action::ReportFailure>;
using ConsumerActions = std::vector<ConsumerAction>;

class ConsumerMachine {
 public:
  explicit ConsumerMachine(ConsumerConfig config);
  // Worker `consumer`, which does the same as `twin` in another replica: it shares the plan, and what follows
  // from it, with that machine, but goes by its own id. In the state of a new machine, whatever the twin's
  // is. Many machines of one process are little larger this way than what they keep of a sync.
  ConsumerMachine(const ConsumerMachine& twin, std::uint32_t consumer);
  ~ConsumerMachine();

  // Legal from idle, prepared (abandoned), failed, once nothing is in flight. `plan`: what this sync runs, of
  // restrict_plan on the whole plan; null = the whole plan. The same pointer again costs nothing. Until the
  // next start_update `chunk` in events and actions is a Chunk::chunk_id of this plan. Refused: while
  // updating (also while an error drains) or committing, a sync id not above the last one, a plan of another
  // worker or depth, after shutdown.
  Status start_update(std::int64_t now_ns, std::uint64_t sync_id, std::uint64_t version,
                      std::shared_ptr<const WorkerPlan> plan, ConsumerActions& out);
  // Signals the groups this worker takes nothing from, issues the first K pulls. Refused without
  // start_update, with the first error when the sync has failed already.
  Status update(std::int64_t now_ns, ConsumerActions& out);
  void ready(std::int64_t now_ns, std::uint32_t producer, const PullId& pull, ReadyInfo ready,
             ConsumerActions& out);
  void pull_failed(std::int64_t now_ns, std::uint32_t producer, const PullId& pull, const Status& why,
                   ConsumerActions& out);
  void transfer_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk, std::uint16_t run,
                     const Status& status, ConsumerActions& out);
  void scatter_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk, const Status& status,
                    ConsumerActions& out);
  void post_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk, const Status& status,
                 ConsumerActions& out);
  // An error says that parameters may be half written.
  void commit_done(std::int64_t now_ns, std::uint64_t sync_id, const Status& status, ConsumerActions& out);
  void signals_acked(std::int64_t now_ns, std::uint32_t producer, std::uint64_t sync_id,
                     const std::vector<std::uint32_t>& groups, ConsumerActions& out);
  // The commit; FinishDone follows. Refused unless prepared, with the first error when the sync has failed.
  Status finish_update(std::int64_t now_ns, std::uint64_t sync_id, ConsumerActions& out);
  // A producer's process is gone. What has not been read of its chunks is pulled from the next
  // candidate that is left, in that one's recovery lane, now and in later syncs; its confirmations are not
  // waited for. Where no candidate is left the update fails with `why`.
  void producer_lost(std::int64_t now_ns, std::uint32_t producer, const Status& why, ConsumerActions& out);
  // The connection to a producer broke, and whether it lives is not known: pulls as above. Its confirmations
  // stay due; signals without one are sent again, by another way. Its lanes there are left (LeaveLanes), in
  // later syncs too, as nobody else that shares them could go on. Until producer_reachable().
  void producer_unreachable(std::int64_t now_ns, std::uint32_t producer, const Status& why,
                            ConsumerActions& out);
  // There is a connection again. Between syncs only: no effect in one, or on a producer that is lost.
  void producer_reachable(std::uint32_t producer);
  // A lost producer has a successor, at which this worker's pulls are announced: it serves as planned from
  // the next start_update on. Between syncs only: no effect in one.
  void producer_returned(std::uint32_t producer);
  // The answer to AnnounceRecovery. On an error the producer is no candidate in this sync.
  void recovery_reserved(std::int64_t now_ns, std::uint32_t producer, const Status& status,
                         ConsumerActions& out);
  // The sync failed elsewhere: it fails here with `why` (the first error is kept) once what is in flight has
  // ended. No effect while committing: the commit was decided by the sender, and a mate may have seen it.
  void fail(std::int64_t now_ns, std::uint64_t sync_id, const Status& why, ConsumerActions& out);
  void tick(std::int64_t now_ns, ConsumerActions& out);
  // The update, if any, fails with SHUTDOWN once what is in flight has ended; wait for !in_flight() before
  // memory is freed. Idempotent; later calls are refused.
  void shutdown(ConsumerActions& out);

  WorkerState state() const;
  std::uint64_t sync_id() const;
  const Status& failure() const;                    // of the last sync; OK when it did not fail
  bool in_flight() const;  // a transfer, copy, scatter, hook or commit's copy has not ended
  const std::vector<ModuleState>& modules() const;  // by Recording::modules index
  // The version of the last committed sync, when no module of the whole plan holds anything else than a
  // committed version; FAILED_PRECONDITION listing those that do (mixed, landing, prepared). After syncs of
  // some names modules hold different versions by request: modules() tells which. Those that no sync has
  // touched have no say, but without any commit there is no version.
  Result<std::uint64_t> version() const;
  const DropCounters& drops() const;
  std::uint32_t rerouted() const;  // pulls of the running or last sync that went to another producer than planned

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardpull
