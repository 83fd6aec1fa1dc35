// Worker: one inference process's side of the engine. It bakes and plans once, then replays the plan in every
// sync.
//
//   auto worker = Worker::connect(options, model);        // bake, plan, reserve
//   (*worker)->serve();                                   // syncs as the sender starts them, until the fleet
//   ends
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "shardpull/api.h"
#include "shardpull/bake.h"
#include "shardpull/fleet.h"
#include "shardpull/memory.h"
#include "shardpull/model.h"
#include "shardpull/status.h"

namespace shardpull {

// How bytes travel. kAuto: mapped where peers' memory can be mapped, else as kDirect for what is worth a read
// of its own. kMapped and kDirect are refused where the fleet's transport does not have them: shm has all
// three, the others have no kMapped.
enum class PathChoice : std::uint8_t {
  kAuto,
  kPacked,  // the trainer gathers a chunk into a slot, the worker scatters it
  kMapped,  // the worker copies out of the trainer's memory
  kDirect,  // what is contiguous on both sides is read straight into the parameter, the rest is packed
};
SHARDPULL_API std::string_view to_string(PathChoice path);  // "auto", "packed", "mapped", "direct"

// Where a sync lands. kInplace: in the parameters, which are between versions from its begin to its commit,
// and after a failed sync until a later one commits. kStaged: beside them, in memory of the size of what the
// worker is sent, taken once as it connects; the commit copies it over, so that the old version stays, bit
// for bit, until then and when a sync fails.
enum class Apply : std::uint8_t { kInplace, kStaged };
SHARDPULL_API std::string_view to_string(Apply apply);  // "inplace", "staged"

struct WorkerOptions {
  FleetOptions fleet;
  std::uint32_t consumer = 0;                   // 0..C-1 over the whole fleet
  std::uint32_t ring_depth = 0;                 // 0 = the fleet's; another number is refused, naming both
  std::uint64_t max_chunk_bytes = 64ull << 20;  // 0 = off
  std::uint32_t chunk_split = 1;                // >= 1: byte-balanced pieces a group's chunk is cut into
  std::uint32_t pull_split = 1;                 // >= 1: producers one chunk is pulled from at once
  PathChoice path = PathChoice::kAuto;
  Apply apply = Apply::kInplace;
  // Whether the engine around the model moves or duplicates experts between slots at run time (vLLM's setting
  // of this name). A plan fixes the slot of each expert, so that a sync would load weights into others: such
  // a worker is refused. Null, where the engine's setting could not be read, is refused too.
  std::optional<bool> enable_eplb = false;
  BakeOptions bake = {};
  // A bake made before (read_recording, shardpull/recording.h): the model's loaders are not run. Its modules
  // and parameters must be the model's. Null: bake.
  std::shared_ptr<const Recording> recording = nullptr;
  std::string trace_file = {};  // as TrainerOptions::trace_file, for this worker's part alone
};

// Thread-compatible.
class SHARDPULL_API Worker {
 public:
  // Memory for parameters that last (Parameter::bind): what lands in it meets no page fault. Thread-safe.
  // RESOURCE_EXHAUSTED names `what`, the size and what is available.
  static Result<EngineMemory> allocate(std::uint64_t bytes, const std::string& what = "parameters");

  // Joins the fleet, bakes `model` (which must outlive the worker and be materialised before the first sync;
  // it is materialised here if it is not), plans, reserves at every producer it pulls from. Blocks until
  // done, bounded by connect_timeout_ms without news. What is refused here ends the sender's init as well,
  // with the same reason.
  static Result<std::unique_ptr<Worker>> connect(const WorkerOptions& options, Model& model);
  ~Worker();  // shutdown()
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Called on serve()'s thread after a commit (OK, the module bytes are `version`'s) or a failed sync (the
  // error; the modules' states say what they hold). The next sync starts only after it returned.
  using OnSync = std::function<void(std::uint64_t version, const Status& status, const WorkerReport& report)>;
  // Runs syncs as the sender starts them until the fleet shuts down (OK) or the sender is lost (the error). A
  // failed sync does not end it. No sync begins while it does not run: one that the sender starts then waits.
  Status serve(const OnSync& on_sync = nullptr);

  // The version the parameters hold, or an error listing the modules in a mixed state.
  Result<std::uint64_t> version() const;
  // The version one module holds: after a sync of some names it may differ from version(), which is that of
  // the last commit. NOT_FOUND for an unknown module; FAILED_PRECONDITION when it is mixed or unset.
  Result<std::uint64_t> module_version(const std::string& module) const;
  // A sequence lock over the parameters, for readers on other threads that must not see a half-applied
  // version. It is odd while they are between versions: in place, from the begin of a sync to its commit, and
  // after a failed one until a later one commits; staged, while a commit copies and runs hooks, and after one
  // that failed in that. Load it (acquire), read, std::atomic_thread_fence(acquire), load it again: what was
  // read is one version when both are the same even number.
  const std::atomic<std::uint64_t>& version_guard() const;
  const Recording& recording() const;

  // Sends to "worker N" or "trainer N". To a sender that has ended the fleet: the error says why it has.
  Status send_message(const std::string& to, const std::string& topic, const std::string& body);

  // Most bytes the engine itself holds beyond the parameters (receive slots, tensors that did not bake).
  std::uint64_t engine_bytes() const;
  // The plan, printed.
  std::string plan_summary() const;

  void shutdown();  // idempotent

 private:
  struct SHARDPULL_HIDDEN Impl;
  explicit Worker(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardpull
