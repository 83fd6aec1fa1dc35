// Known faults of systems of this kind that show over several syncs, on whole fleets. run_fleet compares
// every byte and every module's version after each.
//
// case_050 (two publishers of one name with different bytes) needs checksums of what interchangeable owners
// hold, which nothing here computes: consumers take each byte from one of them.
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/fleet_testing.h"

namespace shardpull {
namespace {

using fleet_testing::expect_exact;
using fleet_testing::FleetSpec;
using fleet_testing::RankSpec;
using fleet_testing::sharded;
using fleet_testing::tensor_parallel;

FleetSpec fleet_of(std::vector<TensorMeta> metadata) {
  FleetSpec spec;
  spec.metadata = std::move(metadata);
  spec.ranks = sharded(spec.metadata, 2);
  for (std::uint32_t worker = 0; worker < 2; ++worker)
    spec.workers.push_back(tensor_parallel(spec.metadata, worker, 2));
  return spec;
}

// Goal: the versions of modules are the set of what a sync changed: of three inputs of a merged copy the one
// that was sent is listed, the other two are not.
TEST(LifeCases, case_045_one_of_three_inputs_changed) {
  FleetSpec spec = fleet_of({{"k_conv1d.weight", DType::kBF16, {16, 4}},
                             {"q_conv1d.weight", DType::kBF16, {16, 4}},
                             {"v_conv1d.weight", DType::kBF16, {16, 4}}});
  spec.steps = {{1}, {2, {"v_conv1d.weight"}}, {3, {"q_*", "k_*"}}, {4}};
  expect_exact(spec);
}

// Goal: a draft beside its target is updated by every sync, on every path; the embedding that both have
// copies of feeds both.
TEST(LifeCases, case_052_a_draft_beside_its_target) {
  for (const PathChoice path : {PathChoice::kMapped, PathChoice::kPacked}) {
    for (const bool resident : {false, true}) {
      FleetSpec spec = fleet_of({{"model.embed.weight", DType::kBF16, {12, 8}},
                                 {"model.layers.0.up.weight", DType::kBF16, {8, 8}},
                                 {"model.layers.1.up.weight", DType::kBF16, {8, 8}},
                                 {"mtp.0.norm.weight", DType::kF32, {8}},
                                 {"mtp.0.up.weight", DType::kBF16, {8, 8}}});
      for (auto& modules : spec.workers) {
        auto shared = modules[0];
        shared.name = "draft.embed";
        modules.push_back(shared);
      }
      for (RankSpec& rank : spec.ranks) rank.resident = resident;
      spec.worker_options = [path](std::uint32_t, WorkerOptions& options) { options.path = path; };
      spec.steps = {{1}, {2}, {3}};
      expect_exact(spec);
    }
  }
}

// Goal: a producer that fails to publish a group after the sync was announced leaves no worker that claims
// the version, though earlier groups have landed (run_fleet compares the version of every module).
TEST(LifeCases, case_093_a_group_that_was_never_published) {
  std::vector<TensorMeta> metadata;
  for (int layer = 0; layer < 6; ++layer)
    metadata.push_back({"layers." + std::to_string(layer) + ".weight", DType::kBF16, {8, 8}});
  for (const PathChoice path : {PathChoice::kMapped, PathChoice::kPacked}) {
    FleetSpec spec = fleet_of(metadata);
    spec.worker_options = [path](std::uint32_t, WorkerOptions& options) { options.path = path; };
    spec.steps = {{4}, {5, {}, true}, {6}};
    spec.tamper = [](std::uint32_t rank, std::uint64_t version, GroupTensors& tensors) -> Status {
      if (rank == 1 && version == 5 && tensors.group == 3)
        return Status(StatusCode::kInternal, "the gather broke");
      return {};
    };
    const auto outcome = expect_exact(spec);
    for (const auto& worker : outcome.syncs)
      EXPECT_NE(worker[1].message().find("the gather broke"), std::string::npos) << worker[1].to_string();
  }
}

// Goal: sources and engines that meet in any order are connected within the bound; nobody waits for a turn.
TEST(LifeCases, case_094_connections_in_every_order) {
  for (int run = 0; run < 20; ++run) {
    FleetSpec spec = fleet_of({{"model.embed.weight", DType::kBF16, {12, 8}}});
    spec.steps = {{1}};
    // In every second fleet the other side waits for the first to be on its way.
    std::atomic<bool> one_side{false};
    const auto meet = [&one_side, run](bool first) {
      if (first == (run % 2 == 0)) {
        one_side = true;
        one_side.notify_all();
      } else {
        one_side.wait(false);
      }
    };
    spec.trainer_options = [&](std::uint32_t, TrainerOptions& options) {
      meet(true);
      options.fleet.connect_timeout_ms = 5'000;
    };
    spec.worker_options = [&](std::uint32_t, WorkerOptions& options) {
      meet(false);
      options.fleet.connect_timeout_ms = 5'000;
    };
    expect_exact(spec);
  }
}

// Goal: a fleet that ends because its last sync failed tells everybody what failed, not only that the sender
// has gone.
TEST(LifeCases, a_failed_fleet_says_why_to_all) {
  FleetSpec spec = fleet_of({{"layers.0.up.weight", DType::kBF16, {8, 8}}});
  spec.steps = {{1}, {2, {}, true}};
  spec.tamper = [](std::uint32_t rank, std::uint64_t version, GroupTensors&) -> Status {
    if (rank != 1 || version != 2) return {};
    return Status(StatusCode::kInternal, "the gather of version 2 broke");
  };
  const auto outcome = fleet_testing::run_fleet(spec);
  ASSERT_EQ(outcome.serves.size(), 2u);
  for (const Status& served : outcome.serves) {
    EXPECT_NE(served.message().find("trainer 0 ended the fleet: "), std::string::npos) << served.to_string();
    EXPECT_NE(served.message().find("the gather of version 2 broke"), std::string::npos) << served.to_string();
    EXPECT_EQ(served.info().reason, Reason::kPeerLost);
  }
}

// Goal: the same after good syncs, when the program on top of the sender fails.
TEST(LifeCases, a_failed_program_says_why_to_all) {
  FleetSpec spec = fleet_of({{"layers.0.up.weight", DType::kBF16, {8, 8}}});
  spec.steps = {{1}};
  spec.end = Status(StatusCode::kDataLoss, "worker 1 holds other bytes");
  const auto outcome = fleet_testing::run_fleet(spec);
  ASSERT_EQ(outcome.serves.size(), 2u);
  for (const Status& served : outcome.serves) {
    EXPECT_EQ(served.message(), "trainer 0 ended the fleet: worker 1 holds other bytes");
    EXPECT_EQ(served.code(), StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace shardpull
