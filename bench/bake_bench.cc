// Building and baking one worker of the largest public models: no bytes, only names, shapes and slices.
#include <cstdint>
#include <string>
#include <utility>

#include <benchmark/benchmark.h>

#include "checkpoint/config.h"
#include "checkpoint/shapes.h"
#include "model/families/build.h"
#include "shardpull/bake.h"

namespace shardpull {
namespace {

void bake_worker(benchmark::State& state, const std::string& key, const InferenceLayout& layout,
                 std::int64_t id) {
  const Result<ModelShape> shape = shape_config({key, ShapeSize::kFull});
  if (!shape.ok()) return state.SkipWithError(shape.status().message().c_str());
  const Result<ModelConfig> config = ModelConfig::parse(shape->config_json);
  if (!config.ok()) return state.SkipWithError(config.status().message().c_str());
  std::size_t scatters = 0;
  for (auto _ : state) {
    const auto model = build_model(*config, layout, id);
    if (!model.ok()) return state.SkipWithError(model.status().message().c_str());
    const Result<Recording> recording = bake(**model, shape->tensors);
    if (!recording.ok()) return state.SkipWithError(recording.status().message().c_str());
    scatters = recording->scatters.size();
  }
  state.counters["names"] = static_cast<double>(shape->tensors.size());
  state.counters["scatters"] = static_cast<double>(scatters);
}

BENCHMARK_CAPTURE(bake_worker, qwen3_235b_tp8, "qwen3-235b-a22b", InferenceLayout{.tp = 8}, 3)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(bake_worker, qwen3_235b_ep8, "qwen3-235b-a22b", InferenceLayout{.tp = 8, .ep = 8}, 3)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(bake_worker, kimi_k2_ep32, "kimi-k2", InferenceLayout{.tp = 32, .ep = 32}, 17)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(bake_worker, deepseek_v3_tp16, "deepseek-v3", InferenceLayout{.tp = 16}, 3)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardpull
