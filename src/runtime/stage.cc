#include "runtime/stage.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/host_memory.h"
#include "base/status_macros.h"
#include "base/units.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kAlignment = 4096;  // of each parameter: none shares a page with another
// A part is large enough to be written past the caches (kStreamingProgramBytes of the copy kernels), and
// small enough that threads end together.
constexpr std::uint64_t kPartBytes = 8u << 20;
// More do not copy faster on one socket's memory.
constexpr unsigned kMaxThreads = 8;

// The whole parameter, onto the same layout.
Result<CopyProgram> whole_copy(const RecordedParameter& parameter) {
  std::int64_t numel = 1;
  Region region;
  for (std::size_t d = 0; d < parameter.shape.size(); ++d) {
    numel *= parameter.shape[d];
    region.dims.push_back({parameter.shape[d], parameter.stride[d]});
  }
  return compile_copy(Slice::whole(numel), {parameter.dtype, parameter.shape, parameter.stride},
                      parameter.dtype, region, parameter.dtype);
}

// Those that the plan's chunks write. A module that is baked is written as a whole, so that all of such a
// parameter is.
std::set<std::uint32_t> written(const WorkerPlan& plan, const Recording& recording) {
  std::set<std::uint32_t> modules, parameters;
  for (const Chunk& chunk : plan.chunks) {
    for (const PlannedScatter& scatter : chunk.scatters) parameters.insert(scatter.destination.parameter);
    modules.insert(chunk.materialise.begin(), chunk.materialise.end());
  }
  for (const Fill& fill : recording.fills) {
    if (modules.contains(recording.parameters[fill.destination.parameter].module))
      parameters.insert(fill.destination.parameter);
  }
  return parameters;
}

}  // namespace

Result<std::unique_ptr<Stage>> Stage::make(const WorkerPlan& plan, const Recording& recording) {
  std::unique_ptr<Stage> stage(new Stage);
  stage->recording_ = &recording;
  stage->places_.resize(recording.parameters.size());
  const std::set<std::uint32_t> parameters = written(plan, recording);
  std::vector<std::tuple<std::uint32_t, std::uint64_t, CopyProgram>> placed;
  std::uint64_t bytes = 0;
  for (const std::uint32_t p : parameters) {
    SHARDPULL_ASSIGN_OR_RETURN(CopyProgram whole, whole_copy(recording.parameters[p]));
    const std::uint64_t extent = static_cast<std::uint64_t>(whole.dst_end);
    placed.emplace_back(p, bytes, std::move(whole));
    bytes += ceil_div(extent, kAlignment) * kAlignment;
  }
  if (bytes != 0) {
    // Taking memory that is not there would have the kernel end some process instead of telling this one.
    if (const std::uint64_t available = available_memory_bytes(); bytes > available) {
      return Status(StatusCode::kResourceExhausted,
                    fmt::format("no memory for the stage that syncs land in: {} of {} parameters, and {} is "
                                "available; apply inplace (--apply inplace) needs none",
                                format_bytes(bytes), parameters.size(), format_bytes(available)),
                    {.reason = Reason::kNoMemory, .fault = Fault::kHost});
    }
    SHARDPULL_ASSIGN_OR_RETURN(stage->memory_, LandingMemory::allocate(bytes, "stage that syncs land in",
                                                                       "apply inplace (--apply inplace)"));
  }
  for (const auto& [p, offset, whole] : placed) {
    stage->places_[p] = {stage->memory_.data() + offset,
                         split(whole, std::max<std::uint64_t>(whole.bytes / kPartBytes, 1), 0)};
  }
  stage->thread_count_ = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxThreads);
  stage->threads_ = std::make_unique<JobThreads>(stage->thread_count_);
  return stage;
}

void Stage::commit(const std::vector<std::uint32_t>& modules,
                   const std::function<std::byte*(std::uint32_t parameter)>& memory_of,
                   std::function<void()> done) {
  struct Part {
    const CopyProgram* program;
    const std::byte* from;
    std::byte* to;
  };
  struct Work {
    std::vector<Part> parts;
    std::atomic<std::size_t> next{0};
    std::atomic<unsigned> running{0};
    std::function<void()> done;
  };
  auto work = std::make_shared<Work>();
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    const Place& place = places_[p];
    if (place.memory == nullptr ||
        !std::binary_search(modules.begin(), modules.end(), recording_->parameters[p].module))
      continue;
    for (const CopyProgram& part : place.parts) work->parts.push_back({&part, place.memory, memory_of(p)});
  }
  work->done = std::move(done);
  work->running = thread_count_;
  for (unsigned i = 0; i < thread_count_; ++i) {
    threads_->post([work] {
      for (std::size_t at = work->next++; at < work->parts.size(); at = work->next++) {
        const Part& part = work->parts[at];
        run(*part.program, part.from, part.to);
      }
      if (--work->running == 0) work->done();
    });
  }
}

}  // namespace shardpull
