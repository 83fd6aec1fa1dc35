// ConsumerMachine: one worker's pull pipeline, K slots deep. Rules: docs/PROTOCOL.md, "Consumer".
//
//   idle --start_update--> updating(sync) --update--> ... all chunks landed, scattered, signals confirmed --> prepared
//   prepared --finish_update--> committing --> idle(version)          any error --> failed --start_update--> updating
#pragma once

#include <cstdint>
#include <memory>
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
  Kind kind = Kind::kUnset;
  std::uint64_t version = 0;      // current: its version; landing, prepared: the version under way; mixed: the newer
  std::uint64_t old_version = 0;  // mixed: the older
};
std::string to_string(const ModuleState& state);  // "current(3)", "mixed(2, 3)"

struct ConsumerConfig {
  std::shared_ptr<const WorkerPlan> plan;
  std::uint32_t num_modules = 0;               // Recording::modules.size()
  std::int64_t stall_timeout_ns = 300'000'000'000;
};

namespace consumer_action {
struct SendPull { std::uint32_t producer = 0; PullId pull; };
// Packed: read the producer's slot into receive slot `slot` at the run's offset. Answer with transfer_done().
struct StartTransfer { std::uint32_t chunk = 0; std::uint16_t run = 0; std::uint32_t producer = 0; std::uint32_t slot = 0; ReadyInfo ready; };
// Packed, all runs landed: materialise the chunk's modules, run their fills, scatter the slot. Answer with scatter_done().
struct StartScatter { std::uint32_t chunk = 0; std::uint32_t slot = 0; };
// Mapped: materialise, fill and copy straight from the producers' memory. `ready` has one entry per run. Answer with
// scatter_done(): the producers' memory is no longer read then. Also used, with no runs, for chunks without keys.
struct StartCopy { std::uint32_t chunk = 0; std::vector<ReadyInfo> ready; };
// Post-process the chunk's finished modules. Answer with post_done().
struct StartPost { std::uint32_t chunk = 0; };
// Tell the producer that these groups will not be read any more. Confirmed by signals_acked(); resent never (the channel is
// reliable while the peer lives).
struct SendSignals { std::uint32_t producer = 0; std::uint64_t sync_id = 0; std::vector<std::uint32_t> groups; };
// update() is over: prepared, or the first error. Nothing is in flight any more.
struct UpdateDone { std::uint64_t sync_id = 0; Status status; };
// finish_update() is over: committed, or the error.
struct FinishDone { std::uint64_t sync_id = 0; Status status; };
// This worker failed a sync by itself: tell the sender.
struct ReportFailure { std::uint64_t sync_id = 0; Status status; };
}  // namespace consumer_action

using ConsumerAction =
    std::variant<consumer_action::SendPull, consumer_action::StartTransfer, consumer_action::StartScatter,
                 consumer_action::StartCopy, consumer_action::StartPost, consumer_action::SendSignals,
                 consumer_action::UpdateDone, consumer_action::FinishDone, consumer_action::ReportFailure>;
using ConsumerActions = std::vector<ConsumerAction>;

class ConsumerMachine {
 public:
  explicit ConsumerMachine(ConsumerConfig config);
  ~ConsumerMachine();

  // Legal from idle, prepared (abandoned), failed, once nothing is in flight. Refused: while updating or committing, a sync
  // id not above the last one.
  Status start_update(std::int64_t now_ns, std::uint64_t sync_id, std::uint64_t version, ConsumerActions& out);
  // Signals the groups this worker takes nothing from, issues the first K pulls. Refused without start_update.
  Status update(std::int64_t now_ns, ConsumerActions& out);
  void ready(std::int64_t now_ns, std::uint32_t producer, const PullId& pull, ReadyInfo ready, ConsumerActions& out);
  void pull_failed(std::int64_t now_ns, std::uint32_t producer, const PullId& pull, const Status& why, ConsumerActions& out);
  void transfer_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk, std::uint16_t run, const Status& status,
                     ConsumerActions& out);
  void scatter_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk, const Status& status, ConsumerActions& out);
  void post_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk, const Status& status, ConsumerActions& out);
  void signals_acked(std::int64_t now_ns, std::uint32_t producer, std::uint64_t sync_id,
                     const std::vector<std::uint32_t>& groups, ConsumerActions& out);
  // The commit. Refused unless prepared.
  Status finish_update(std::int64_t now_ns, std::uint64_t sync_id, ConsumerActions& out);
  // A producer this worker needs is gone, or the sync failed elsewhere: the update fails with `why` (the first error is
  // kept) once what is in flight has ended.
  void producer_lost(std::int64_t now_ns, std::uint32_t producer, const Status& why, ConsumerActions& out);
  void fail(std::int64_t now_ns, std::uint64_t sync_id, const Status& why, ConsumerActions& out);
  void tick(std::int64_t now_ns, ConsumerActions& out);
  void shutdown(ConsumerActions& out);

  WorkerState state() const;
  std::uint64_t sync_id() const;
  bool in_flight() const;                          // a transfer, copy, scatter or hook has not ended
  const std::vector<ModuleState>& modules() const; // by Recording::modules index
  // The version every module of the plan holds, or FAILED_PRECONDITION listing the mixed ones.
  Result<std::uint64_t> version() const;
  const DropCounters& drops() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardpull
