// Faults that systems of this kind have had, as fleets: how the trainer's memory lies, and what it offers.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/fleet_testing.h"

namespace shardpull {
namespace {

using fleet_testing::box;
using fleet_testing::code;
using fleet_testing::expect_exact;
using fleet_testing::FleetOutcome;
using fleet_testing::FleetSpec;
using fleet_testing::ModelSpec;
using fleet_testing::RankSpec;
using fleet_testing::run_fleet;
using fleet_testing::sharded;
using fleet_testing::tensor_parallel;

void expect_exact_mapped_and_packed(FleetSpec spec) {
  for (const bool resident : {false, true}) {
    for (const PathChoice path : {PathChoice::kMapped, PathChoice::kPacked}) {
      SCOPED_TRACE(std::string(resident ? "resident " : "gather ") +
                   (path == PathChoice::kMapped ? "mapped" : "packed"));
      for (RankSpec& rank : spec.ranks) rank.resident = resident;
      spec.worker_options = [path](std::uint32_t, WorkerOptions& options) { options.path = path; };
      expect_exact(spec);
    }
  }
}

// Attention of query groups: the trainer's fused buffer has (2 Q heads, K, V) one group after the other, the
// checkpoint q, k and v. Goal: what is published says where q, k and v lie, and that is where they are read.
TEST(RuntimeCases, case_014_query_groups_interleaved_in_one_buffer) {
  FleetSpec spec;
  const std::int64_t groups = 4, head = 8, hidden = 64, stride = 4 * head * hidden * 2;
  spec.metadata = {{"layers.0.k_proj.weight", DType::kBF16, {groups * head, hidden}},
                   {"layers.0.q_proj.weight", DType::kBF16, {groups * 2 * head, hidden}},
                   {"layers.0.v_proj.weight", DType::kBF16, {groups * head, hidden}}};
  RankSpec rank;
  const std::vector<std::int64_t> rows{head, 2 * head, head}, first{2 * head, 0, 3 * head};
  for (std::uint32_t name = 0; name < 3; ++name) {
    for (std::int64_t g = 0; g < groups; ++g) {
      rank.pieces.push_back({name, box({g * rows[name], 0}, {rows[name], hidden}), 0});
      rank.places.push_back({g * stride + first[name] * hidden * 2, {hidden, 1}});
    }
  }
  spec.ranks = {rank};
  for (std::uint32_t worker = 0; worker < 2; ++worker)
    spec.workers.push_back(tensor_parallel(spec.metadata, worker, 2));
  expect_exact_mapped_and_packed(spec);
}

// Scales of a trainer whose column shards end within a block: each rank has its own scale for the common
// block, and no tensor of the whole model is made of them. Goal: loud before anything moves.
TEST(RuntimeCases, case_021_shards_off_the_block_grid_are_refused) {
  FleetSpec spec;
  spec.metadata = {{"w.weight", DType::kF8E4M3, {16, 34}}, {"w.weight_scale", DType::kF32, {1, 3}}};
  spec.ranks.resize(2);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    spec.ranks[rank].pieces = {{0, box({0, rank * 17}, {16, 17}), rank},
                               {1, box({0, rank * 2}, {1, 2}), rank}};  // two scales a rank: four in all
  }
  spec.workers = {tensor_parallel(spec.metadata, 0, 1)};
  spec.trainer_options = [](std::uint32_t, TrainerOptions& options) {
    options.fleet.connect_timeout_ms = 300;
  };
  spec.worker_options = [](std::uint32_t, WorkerOptions& options) { options.fleet.connect_timeout_ms = 300; };
  FleetOutcome outcome = run_fleet(spec);
  EXPECT_NE(outcome.inits[1].message().find(
                "a piece of w.weight_scale: box [0:1, 2:4] does not lie within shape [1, 3] in dim 1"),
            std::string::npos)
      << outcome.inits[1].to_string();

  // Declared as what the model has, and then given as what the rank has.
  spec.ranks[1].pieces[1].box = box({0, 2}, {1, 1});
  spec.trainer_options = nullptr;
  spec.worker_options = nullptr;
  spec.steps = {{0}, {1, {}, true}, {2}};
  spec.tamper = [](std::uint32_t rank, std::uint64_t version, GroupTensors& tensors) {
    for (NamedView& entry : tensors.tensors) {
      if (rank == 1 && version == 1 && entry.name == 1) entry.view->shape = {1, 2};
    }
    return Status();
  };
  outcome = expect_exact(spec);
  for (const auto& rank : outcome.sends) {
    EXPECT_NE(rank[1].message().find(
                  "w.weight_scale piece 0 [0:1, 2:3] has shape [1, 2], the metadata says [1, 1]"),
              std::string::npos)
        << rank[1].to_string();
  }
}

// Goal: a parameter that has been released, or a region too short, is loud on every rank and worker, whether
// it is held whole or in a piece; the next sync is exact.
TEST(RuntimeCases, case_059_released_or_short_memory_is_loud) {
  FleetSpec spec;
  spec.metadata = {{"visual.patch_embed.proj.weight", DType::kBF16, {16, 3, 2, 4, 4}}};
  spec.workers = {tensor_parallel(spec.metadata, 0, 2), tensor_parallel(spec.metadata, 1, 2)};
  spec.steps = {{0}, {1, {}, true}, {2}};
  for (const std::uint32_t ranks : {1u, 3u}) {
    for (const bool released : {true, false}) {
      for (const bool resident : {true, false}) {
        SCOPED_TRACE(std::to_string(ranks) + (released ? " released" : " short") +
                     (resident ? " resident" : " gather"));
        spec.ranks = sharded(spec.metadata, ranks);
        for (RankSpec& rank : spec.ranks) rank.resident = resident;
        spec.tamper = [&](std::uint32_t rank, std::uint64_t version, GroupTensors& tensors) {
          if (version == 1 && rank + 1 == ranks) {
            TensorView& view = *tensors.tensors[0].view;
            view.storage_bytes = released ? 0 : view.storage_bytes - 1;
          }
          return Status();
        };
        const FleetOutcome outcome = expect_exact(spec);
        const std::string bytes = std::to_string((ranks == 1 ? 16 : 4) * 3 * 2 * 4 * 4 * 2);
        for (const auto& statuses : {outcome.sends, outcome.syncs}) {
          for (const auto& each : statuses) {
            EXPECT_NE(each[1].message().find("visual.patch_embed.proj.weight"), std::string::npos);
            EXPECT_NE(each[1].message().find("needs " + bytes + " bytes, its storage of"), std::string::npos)
                << each[1].to_string();
          }
        }
      }
    }
  }
}

// Goal: a column of a matrix, or its transpose, is what the strides say, never the block of memory it lies
// in.
TEST(RuntimeCases, case_061_strided_views_are_never_taken_for_flat_memory) {
  FleetSpec spec;
  spec.metadata = {{"column", DType::kI64, {2}}, {"flipped.weight", DType::kBF16, {32, 64}}};
  RankSpec rank;
  rank.whole = {0, 1};
  rank.places = {{8, {2}}, {32, {1, 32}}};
  spec.ranks = {rank};
  spec.workers = {tensor_parallel(spec.metadata, 0, 2), tensor_parallel(spec.metadata, 1, 2)};
  expect_exact_mapped_and_packed(spec);
  spec.trainer_options = [](std::uint32_t, TrainerOptions& options) { options.export_pack_limit_bytes = 0; };
  expect_exact_mapped_and_packed(spec);
}

// Goal: every way a tensor can lie in memory, of every width, is packed exactly, all in one chunk.
TEST(RuntimeCases, case_062_all_layouts_in_one_chunk) {
  FleetSpec spec;
  RankSpec rank;
  std::int64_t at = 0;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const std::string prefix = "layers.0." + std::string(dtype_name(dtype)) + ".";
    const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> layouts{
        {{8}, {1}}, {{5}, {2}}, {{4, 6}, {9, 1}}, {{6, 4}, {1, 6}}, {{}, {}}, {{0, 4}, {4, 1}}};
    for (const auto& [shape, stride] : layouts) {
      rank.whole.push_back(static_cast<std::uint32_t>(spec.metadata.size()));
      spec.metadata.push_back({prefix + std::to_string(spec.metadata.size()), dtype, shape});
      rank.places.push_back({at, stride});
      at += 52 * dtype_bits(dtype) / 8;
    }
  }
  spec.ranks = {rank};
  spec.workers = {tensor_parallel(spec.metadata, 0, 1)};
  expect_exact_mapped_and_packed(spec);
  spec.trainer_options = [](std::uint32_t, TrainerOptions& options) { options.export_pack_limit_bytes = 0; };
  expect_exact_mapped_and_packed(spec);
}

// Goal: strides count on the destination's side too, and what lies between its elements is left alone.
TEST(RuntimeCases, case_063_a_strided_destination_keeps_its_gaps) {
  FleetSpec spec;
  spec.metadata = {{"experts.w", DType::kBF16, {64, 32}}};
  spec.ranks = sharded(spec.metadata, 3);
  spec.workers = {{{"experts.w", DType::kBF16, {64, 32}, {1, 80}, {{0, {}, {0, 0}, false}}}}};
  expect_exact_mapped_and_packed(spec);
}

// Goal: two groups may publish the same memory, and two tensors overlapping parts of it; freeing one group
// takes nothing from the other.
TEST(RuntimeCases, case_064_groups_that_share_memory) {
  FleetSpec spec;
  spec.metadata = {{"layers.0.a", DType::kF32, {6}},
                   {"layers.0.c", DType::kF32, {5, 4}},
                   {"layers.1.c", DType::kF32, {5, 4}},
                   {"layers.1.e", DType::kF32, {6}},
                   {"layers.2.c", DType::kF32, {20}}};
  RankSpec rank;
  rank.whole = {0, 1, 2, 3, 4};
  rank.places = {{0, {1}}, {40, {4, 1}}, {40, {4, 1}}, {16, {1}}, {40, {1}}};
  spec.ranks = {rank, rank};
  spec.content = [places = rank.places](std::uint32_t name, std::uint64_t version, std::uint64_t i) {
    return code(0, version, static_cast<std::uint64_t>(places[name].offset) + i);
  };
  spec.workers = {tensor_parallel(spec.metadata, 0, 2), tensor_parallel(spec.metadata, 1, 2)};
  for (const std::uint32_t lookahead : {0u, 2u}) {
    spec.trainer_options = [lookahead](std::uint32_t, TrainerOptions& options) {
      options.lookahead = lookahead;
      options.export_pack_limit_bytes = 0;
    };
    expect_exact_mapped_and_packed(spec);
  }
}

// Goal: a view is storage, offset, shape and strides: the one that begins where its base begins is not the
// base.
TEST(RuntimeCases, case_065_views_of_a_fused_parameter) {
  FleetSpec spec;
  spec.metadata = {{"k_proj.weight", DType::kBF16, {16, 64}},
                   {"q_proj.weight", DType::kBF16, {64, 64}},
                   {"qkv_proj.weight", DType::kBF16, {96, 64}}};
  RankSpec rank;
  rank.whole = {0, 1, 2};
  rank.places = {{64 * 64 * 2, {64, 1}}, {0, {64, 1}}, {0, {64, 1}}};
  spec.ranks = {rank};
  spec.content = [places = rank.places](std::uint32_t name, std::uint64_t version, std::uint64_t i) {
    return code(0, version, static_cast<std::uint64_t>(places[name].offset) + i);
  };
  spec.workers = {tensor_parallel(spec.metadata, 0, 1)};
  expect_exact_mapped_and_packed(spec);
}

}  // namespace
}  // namespace shardpull
