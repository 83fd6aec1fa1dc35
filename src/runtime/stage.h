// Stage: memory beside the parameters that staged syncs land in, and the copy of it into them.
// docs/ARCHITECTURE.md, "Memory".
//
// Laid out as the parameters are, so that whatever lands in a parameter lands in the stage by another base
// address. Holds only what the worker's plan writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "plan/plan.h"
#include "runtime/landing_memory.h"
#include "runtime/progress_thread.h"
#include "shardpull/bake.h"
#include "shardpull/status.h"
#include "tensor/copy.h"

namespace shardpull {

// Thread-compatible, but for landing(), which is thread-safe once made.
class Stage {
 public:
  // Allocates, and starts the copying threads. `plan`: the whole one of a worker; `recording`: what it was
  // planned from, which must outlive the stage. RESOURCE_EXHAUSTED names the size and the setting.
  static Result<std::unique_ptr<Stage>> make(const WorkerPlan& plan, const Recording& recording);

  // Where the parameter's first element lands; null for one that the plan does not write.
  std::byte* landing(std::uint32_t parameter) const { return places_[parameter].memory; }

  // Copies all parameters of `modules` (ascending; indices of the recording) from the stage to where
  // `memory_of` says they are, on all threads at once, then calls `done` on one of them. Only elements of
  // parameters are written: what lies between those of a strided one stays. One at a time.
  void commit(const std::vector<std::uint32_t>& modules,
              const std::function<std::byte*(std::uint32_t parameter)>& memory_of,
              std::function<void()> done);

  std::uint64_t bytes() const { return memory_.size(); }
  // Waits for a commit under way, joins. Idempotent.
  void stop() { threads_->stop(); }

 private:
  struct Place {
    std::byte* memory = nullptr;
    std::vector<CopyProgram> parts;  // together the whole parameter
  };

  Stage() = default;

  const Recording* recording_ = nullptr;
  LandingMemory memory_;
  std::vector<Place> places_;  // by Recording::parameters index
  unsigned thread_count_ = 1;
  std::unique_ptr<JobThreads> threads_;
};

}  // namespace shardpull
