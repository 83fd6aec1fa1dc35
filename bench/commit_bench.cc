// The window in which a staged commit holds readers off, against one memcpy of the same parameters in the
// same run: `ratio` is the middle one of window / memcpy over the iterations, each of which does both. Must
// stay below 1.25.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <future>
#include <numeric>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "base/clock.h"
#include "runtime/stage.h"

namespace shardpull {
namespace {

constexpr std::int64_t kTotalBytes = 256 << 20;

// `count` parameters of equal size, one module each, as a plan writes them.
void BM_commit(benchmark::State& state) {
  const std::int64_t count = state.range(0), each = kTotalBytes / count;
  Recording recording;
  WorkerPlan plan;
  Chunk chunk;
  for (std::uint32_t p = 0; p < count; ++p) {
    recording.modules.push_back({.name = "module " + std::to_string(p), .type = "", .baked = true});
    recording.parameters.push_back(
        {.module = p, .name = "weight", .dtype = DType::kBF16, .shape = {each / 2}, .stride = {1}});
    chunk.materialise.push_back(p);
    chunk.scatters.push_back({0, {.parameter = p, .dtype = DType::kBF16, .offset = 0, .shape = {}, .stride = {}}});
  }
  plan.chunks.push_back(std::move(chunk));
  auto stage = Stage::make(plan, recording);
  if (!stage.ok()) {
    state.SkipWithError(stage.status().message().c_str());
    return;
  }
  std::vector<std::vector<std::byte>> parameters;
  for (std::uint32_t p = 0; p < count; ++p) {
    parameters.emplace_back(static_cast<std::size_t>(each), std::byte{1});
    std::memset((*stage)->landing(p), 2, static_cast<std::size_t>(each));
  }
  std::vector<std::uint32_t> modules(static_cast<std::size_t>(count));
  std::iota(modules.begin(), modules.end(), 0u);

  const Clock& clock = SystemClock::instance();
  std::vector<double> ratios;
  std::int64_t memcpy_ns = 0;
  for (auto _ : state) {
    const std::int64_t start = clock.now_ns();
    for (std::uint32_t p = 0; p < count; ++p)
      std::memcpy(parameters[p].data(), (*stage)->landing(p), parameters[p].size());
    benchmark::ClobberMemory();
    const std::int64_t middle = clock.now_ns();
    std::promise<void> done;
    (*stage)->commit(
        modules, [&](std::uint32_t p) { return parameters[p].data(); }, [&] { done.set_value(); });
    done.get_future().wait();
    const std::int64_t end = clock.now_ns();
    state.SetIterationTime(static_cast<double>(end - middle) / 1e9);
    memcpy_ns += middle - start;
    ratios.push_back(static_cast<double>(end - middle) / static_cast<double>(middle - start));
  }
  std::sort(ratios.begin(), ratios.end());
  state.counters["ratio"] = ratios[ratios.size() / 2];
  state.counters["memcpy_ms"] = static_cast<double>(memcpy_ns) / 1e6 / static_cast<double>(ratios.size());
  state.SetBytesProcessed(state.iterations() * kTotalBytes);
}
BENCHMARK(BM_commit)->Arg(1)->Arg(32)->Arg(4096)->UseManualTime()->Unit(benchmark::kMillisecond)->MinTime(1);

}  // namespace
}  // namespace shardpull
