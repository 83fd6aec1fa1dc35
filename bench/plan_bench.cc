// Planning the largest public models: who holds what, and the plan of one worker. No bytes, only names,
// shapes and slices.
#include <cstdint>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "checkpoint/config.h"
#include "checkpoint/shapes.h"
#include "cli/layouts.h"
#include "model/families/build.h"
#include "plan/plan.h"
#include "shardpull/bake.h"

namespace shardpull {
namespace {

struct Fleet {
  ModelConfig config;
  std::vector<TensorMeta> metadata;
  std::vector<Holding> holdings;
};

Result<Fleet> fleet_of(const std::string& key, const cli::TrainerLayout& trainer) {
  auto shape = shape_config({key, ShapeSize::kFull});
  if (!shape.ok()) return shape.status();
  auto config = ModelConfig::parse(shape->config_json);
  if (!config.ok()) return config.status();
  const auto held = cli::holdings_of(shape->tensors, config->tie_word_embeddings, trainer);
  if (!held.ok()) return held.status();
  const Digest128 digest = metadata_digest(shape->tensors);
  std::vector<Holding> holdings(held->size());
  for (std::uint32_t rank = 0; rank < holdings.size(); ++rank) {
    holdings[rank] = {.rank = rank, .digest = digest, .whole = {}, .pieces = (*held)[rank].pieces};
    holdings[rank].whole.assign((shape->tensors.size() + 7) / 8, 0);
    for (const std::uint32_t name : (*held)[rank].whole)
      holdings[rank].whole[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
  }
  return Fleet{
      .config = std::move(*config), .metadata = std::move(shape->tensors), .holdings = std::move(holdings)};
}

void resolve(benchmark::State& state, const std::string& key, const cli::TrainerLayout& trainer) {
  const Result<Fleet> fleet = fleet_of(key, trainer);
  if (!fleet.ok()) return state.SkipWithError(fleet.status().message().c_str());
  std::size_t pieces = 0;
  for (auto _ : state) {
    const Result<Ownership> ownership = resolve_ownership(fleet->metadata, fleet->holdings);
    if (!ownership.ok()) return state.SkipWithError(ownership.status().message().c_str());
    pieces = ownership->pieces.size();
  }
  state.counters["names"] = static_cast<double>(fleet->metadata.size());
  state.counters["pieces"] = static_cast<double>(pieces);
}

void plan_one(benchmark::State& state, const std::string& key, const cli::TrainerLayout& trainer,
              const InferenceLayout& inference) {
  Result<Fleet> fleet = fleet_of(key, trainer);
  if (!fleet.ok()) return state.SkipWithError(fleet.status().message().c_str());
  InitTables tables;
  const auto ownership = resolve_ownership(fleet->metadata, fleet->holdings);
  const auto groups = form_groups(fleet->metadata);
  const auto model = build_model(fleet->config, inference, 0);
  if (!ownership.ok() || !groups.ok() || !model.ok()) return state.SkipWithError("no fleet");
  const auto recording = bake(**model, fleet->metadata);
  if (!recording.ok()) return state.SkipWithError(recording.status().message().c_str());
  tables.ownership = *ownership;
  for (const GatherGroup& group : *groups) tables.group_lens.push_back(group.count);
  tables.producers.assign(fleet->holdings.size(), "trainer");
  tables.producer_mappable.assign(tables.producers.size(), 1);
  tables.producer_resident.assign(tables.producers.size(), 0);
  tables.metadata = std::move(fleet->metadata);
  tables.num_consumers = static_cast<std::uint32_t>(inference.workers());
  tables.num_replicas = static_cast<std::uint32_t>(inference.replicas);
  std::size_t chunks = 0, keys = 0;
  for (auto _ : state) {
    const Result<WorkerPlan> plan = plan_worker(tables, *recording, 0);
    if (!plan.ok()) return state.SkipWithError(plan.status().message().c_str());
    chunks = plan->chunks.size();
    keys = 0;
    for (const Chunk& chunk : plan->chunks) keys += chunk.keys.size();
  }
  state.counters["chunks"] = static_cast<double>(chunks);
  state.counters["keys"] = static_cast<double>(keys);
}

BENCHMARK_CAPTURE(resolve, kimi_k2_256_ranks, "kimi-k2", cli::TrainerLayout{.pp = 8, .ep = 32})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(resolve, qwen3_235b_fsdp8, "qwen3-235b-a22b", cli::TrainerLayout{.fsdp = 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(resolve, qwen3_235b_fsdp64, "qwen3-235b-a22b", cli::TrainerLayout{.fsdp = 64})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_one, kimi_k2_ep32, "kimi-k2", cli::TrainerLayout{.pp = 8, .ep = 32},
                  InferenceLayout{.tp = 32, .ep = 32, .replicas = 4})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_one, qwen3_235b_tp8, "qwen3-235b-a22b", cli::TrainerLayout{}, InferenceLayout{.tp = 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_one, qwen3_235b_fsdp8_tp8, "qwen3-235b-a22b", cli::TrainerLayout{.fsdp = 8},
                  InferenceLayout{.tp = 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_one, qwen3_235b_fsdp64_tp8, "qwen3-235b-a22b", cli::TrainerLayout{.fsdp = 64},
                  InferenceLayout{.tp = 8})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardpull
