// Modules that do not bake: their names are pulled whole and loaded by the model's own loaders.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/fleet_testing.h"

namespace shardpull {
namespace {

using fleet_testing::box;
using fleet_testing::expect_exact;
using fleet_testing::FleetOutcome;
using fleet_testing::FleetSpec;
using fleet_testing::ModelSpec;
using fleet_testing::RankSpec;
using fleet_testing::run_fleet;
using fleet_testing::sharded;
using fleet_testing::tensor_parallel;

// Layers of two tensors; the worker's "fused" module of each layer takes rows of both and does not bake, "plain"
// takes the first one's and does.
FleetSpec two_kinds(std::uint32_t layers, std::uint32_t tp) {
  FleetSpec spec;
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    const std::string at = "layers." + std::to_string(layer);
    spec.metadata.push_back({at + ".q", DType::kBF16, {8, 6}});
    spec.metadata.push_back({at + ".v", DType::kBF16, {8, 6}});
    spec.metadata.push_back({at + ".norm", DType::kF32, {6}});
  }
  spec.metadata.push_back({"tail", DType::kF32, {5, 3}});
  for (std::uint32_t worker = 0; worker < tp; ++worker) {
    const std::int64_t rows = 8 / tp, first = rows * worker;
    ModelSpec model;
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      const std::string at = "layers." + std::to_string(layer);
      const std::uint32_t q = layer * 3;
      model.push_back({at + ".fused",
                       DType::kBF16,
                       {2 * rows, 6},
                       {},
                       {{q, box({first, 0}, {rows, 6}), {0, 0}}, {q + 1, box({first, 0}, {rows, 6}), {rows, 0}}},
                       true});
      model.push_back({at + ".plain", DType::kBF16, {rows, 6}, {}, {{q, box({first, 0}, {rows, 6}), {0, 0}}}});
      model.push_back({at + ".norm", DType::kF32, {6}, {}, {{q + 2, box({0}, {6}), {0}}}});
    }
    const auto tail = static_cast<std::uint32_t>(spec.metadata.size() - 1);
    model.push_back({"tail", DType::kF32, {5, 3}, {}, {{tail, box({0, 0}, {5, 3}), {0, 0}}}, true});
    spec.workers.push_back(std::move(model));
  }
  spec.ranks.resize(1);
  for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) spec.ranks[0].whole.push_back(name);
  spec.worker_options = [](std::uint32_t, WorkerOptions& options) {
    options.bake.unbaked = UnbakedPolicy::kFallback;
  };
  return spec;
}

TEST(Fallback, StrictRefusesAndNamesWhatDoesNotBake) {
  FleetSpec spec = two_kinds(2, 1);
  spec.worker_options = [](std::uint32_t, WorkerOptions& options) { options.fleet.connect_timeout_ms = 500; };
  spec.trainer_options = [](std::uint32_t, TrainerOptions& options) { options.fleet.connect_timeout_ms = 500; };
  const FleetOutcome outcome = run_fleet(spec);
  EXPECT_NE(outcome.connects[0].message().find("layers.0.q -> layers.0.fused"), std::string::npos)
      << outcome.connects[0].to_string();
}

TEST(Fallback, IsExactBesideWhatBakesOnEveryPath) {
  for (const std::uint32_t tp : {1u, 2u}) {
    for (const PathChoice path : {PathChoice::kMapped, PathChoice::kPacked, PathChoice::kDirect}) {
      SCOPED_TRACE(std::to_string(tp) + " " + std::string(to_string(path)));
      FleetSpec spec = two_kinds(3, tp);
      spec.worker_options = [path](std::uint32_t, WorkerOptions& options) {
        options.path = path;
        options.max_chunk_bytes = 64;  // a tensor comes in several chunks
        options.bake.unbaked = UnbakedPolicy::kFallback;
      };
      spec.trainer_options = [](std::uint32_t, TrainerOptions& options) {
        options.integrity = Integrity::kFull;
        options.lookahead = 0;
      };
      expect_exact(spec);
    }
  }
}

TEST(Fallback, TensorsHeldInPiecesArePutTogether) {
  FleetSpec spec = two_kinds(2, 2);
  spec.ranks = sharded(spec.metadata, 3);
  const FleetOutcome outcome = expect_exact(spec);
  for (const WorkerReport& report : outcome.reports.back().workers) EXPECT_EQ(report.fallback_names, 5u);
}

TEST(Fallback, ASyncOfSomeNamesLoadsAModuleWholeOrNotAtAll) {
  FleetSpec spec = two_kinds(2, 1);
  spec.steps = {{0}, {1, {"layers.1.*"}}, {2, {"tail"}}, {3, {"layers.0.q"}, true}, {4}};
  const FleetOutcome outcome = expect_exact(spec);
  EXPECT_EQ(outcome.reports[1].workers[0].fallback_names, 2u);
  EXPECT_EQ(outcome.at_workers[0][2].fallback_names, 1u);
  EXPECT_NE(outcome.sends[0][3].message().find("layers.0.fused"), std::string::npos)
      << outcome.sends[0][3].to_string();
}

// A hook that fails stands for a loader that does.
TEST(Fallback, ALoaderThatFailsFailsTheSyncAndTheNextIsExact) {
  FleetSpec spec = two_kinds(2, 1);
  auto calls = std::make_shared<std::atomic<int>>(0);
  spec.steps = {{0}, {1, {}, true}, {2}};
  spec.bind = [calls](std::uint32_t, Model& model) {
    model.find_module("layers.1.fused")->set_post_process([calls](Module& module, const std::vector<std::byte*>&) {
      EXPECT_EQ(module.name(), "layers.1.fused");
      return ++*calls == 2 ? Status(StatusCode::kInternal, "cannot repack") : Status();
    });
    return Status();
  };
  const FleetOutcome outcome = expect_exact(spec);
  EXPECT_EQ(calls->load(), 3) << "the hook of a module that did not bake runs once a sync, after its loaders";
  EXPECT_NE(outcome.sends[0][1].message().find("cannot repack"), std::string::npos)
      << outcome.sends[0][1].to_string();
}

}  // namespace
}  // namespace shardpull
