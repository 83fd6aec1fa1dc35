// Syncs of some names. Goal: listed names change and nothing else does, on every path; untouched groups are
// not asked for, untouched modules keep their version, and what cannot be done in part is refused before a
// byte moves.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/fleet_testing.h"

namespace shardpull {
namespace {

using fleet_testing::expect_exact;
using fleet_testing::FleetOutcome;
using fleet_testing::FleetSpec;
using fleet_testing::ModelSpec;
using fleet_testing::RankSpec;
using fleet_testing::run_fleet;
using fleet_testing::sharded;
using fleet_testing::Step;
using fleet_testing::tensor_parallel;

// A vision tower, a language model and a draft.
std::vector<TensorMeta> towers() {
  std::vector<TensorMeta> metadata{{"embed.weight", DType::kBF16, {24, 12}}};
  for (const std::string prefix :
       {"layers.0.", "layers.1.", "visual.blocks.0.", "visual.blocks.1.", "draft.0."}) {
    metadata.push_back({prefix + "down.weight", DType::kBF16, {12, 10}});
    metadata.push_back({prefix + "norm.weight", DType::kF32, {7}});
    metadata.push_back({prefix + "up.weight", DType::kF8E4M3, {10, 12}});
  }
  return metadata;
}

FleetSpec towers_fleet(std::uint32_t ranks, std::uint32_t tp, std::uint32_t replicas = 1) {
  FleetSpec spec;
  spec.metadata = towers();
  spec.ranks = sharded(spec.metadata, ranks);
  for (std::uint32_t worker = 0; worker < tp * replicas; ++worker)
    spec.workers.push_back(tensor_parallel(spec.metadata, worker % tp, tp));
  spec.replicas = replicas;
  return spec;
}

const std::vector<Step> kSteps{
    {0, {"visual.*", "embed.weight"}},  // the first sync of all may be one of some names
    {1},
    {2, {"layers.*"}},
    {3, {"layers.*"}},
    {4, {"*.up.weight"}},
    {5, {"draft.0.norm.weight", "layers.1.*"}},
    {6, {"*"}},
    {7, {"embed.weight"}},
    {8}};

TEST(Partial, only_listed_names_change) {
  for (const bool resident : {false, true}) {
    for (const PathChoice path : {PathChoice::kMapped, PathChoice::kPacked}) {
      SCOPED_TRACE(std::string(resident ? "resident " : "gather ") +
                   (path == PathChoice::kMapped ? "mapped" : "packed"));
      FleetSpec spec = towers_fleet(3, 2);
      spec.steps = kSteps;
      for (RankSpec& rank : spec.ranks) rank.resident = resident;
      spec.worker_options = [path](std::uint32_t, WorkerOptions& options) { options.path = path; };
      const FleetOutcome outcome = expect_exact(spec);
      for (const auto& yielded : outcome.yielded) {
        // Groups asked for: the embedding, two layers, two blocks, a draft.
        EXPECT_EQ(yielded, (std::vector<int>{3, 6, 2, 2, 5, 2, 6, 1, 6}));
      }
      // A worker of two keeps half of each matrix that has an even number of rows, and all of each norm.
      const std::uint64_t layer = 12 * 10 * 2 / 2 + 7 * 4 + 10 * 12 / 2, embed = 24 * 12 * 2 / 2;
      for (const auto& reports : outcome.at_workers) {
        ASSERT_EQ(reports.size(), kSteps.size());
        EXPECT_EQ(reports[0].bytes_kept, 2 * layer + embed);
        EXPECT_EQ(reports[1].bytes_kept, 5 * layer + embed);
        EXPECT_EQ(reports[2].bytes_kept, 2 * layer);
        EXPECT_EQ(reports[4].bytes_kept, 5u * 10 * 12 / 2);
        EXPECT_EQ(reports[5].bytes_kept, 7 * 4 + layer);
        EXPECT_EQ(reports[7].bytes_kept, embed);
      }
      for (std::size_t i = 0; i < outcome.reports.size(); ++i) {
        for (const WorkerReport& worker : outcome.reports[i].workers)
          EXPECT_EQ(worker.bytes_kept, outcome.at_workers[worker.consumer][i].bytes_kept);
      }
    }
  }
}

TEST(Partial, replicas_splits_and_small_chunks) {
  FleetSpec spec = towers_fleet(2, 2, 2);
  spec.steps = kSteps;
  for (RankSpec& rank : spec.ranks) {  // interchangeable owners, so that pulls are split
    rank.pieces.clear();
    rank.whole.clear();
    for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) rank.whole.push_back(name);
  }
  for (const PathChoice path : {PathChoice::kMapped, PathChoice::kPacked}) {
    spec.worker_options = [path](std::uint32_t, WorkerOptions& options) {
      options.path = path;
      options.max_chunk_bytes = 128;
      options.pull_split = 2;
    };
    expect_exact(spec);
  }
}

// Goal: ranks that own no listed group, or a listed group of which they hold no listed name, take part and
// publish nothing.
TEST(Partial, ranks_without_a_listed_name) {
  FleetSpec spec = towers_fleet(3, 1);
  for (RankSpec& rank : spec.ranks) rank = {};
  for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) {
    const std::string& text = spec.metadata[name].name;
    const bool visual = text.starts_with("visual."), norm = text.ends_with("norm.weight");
    spec.ranks[visual ? 1 : norm ? 2 : 0].whole.push_back(name);
  }
  spec.steps = {{0}, {1, {"layers.*.up.weight"}}, {2, {"visual.*"}}, {3, {"draft.0.norm.weight"}}, {4}};
  for (const PathChoice path : {PathChoice::kMapped, PathChoice::kPacked}) {
    spec.worker_options = [path](std::uint32_t, WorkerOptions& options) { options.path = path; };
    const FleetOutcome outcome = expect_exact(spec);
    EXPECT_EQ(outcome.yielded,
              (std::vector<std::vector<int>>{{4, 2, 0, 1, 4}, {2, 0, 2, 0, 2}, {3, 2, 0, 1, 3}}));
  }
}

// Goal: a module fed by a listed and an unlisted name would hold two versions: refused on every rank and
// worker before a byte moves; the fleet goes on.
TEST(Partial, a_module_of_listed_and_unlisted_names_is_refused_naming_both) {
  FleetSpec spec = towers_fleet(2, 1);
  // One module takes both names.
  std::erase_if(spec.workers[0], [](const auto& module) {
    return module.name == "layers.1.down.weight" || module.name == "visual.blocks.0.down.weight";
  });
  spec.workers[0].push_back(
      {"merger", DType::kBF16, {24, 10}, {}, {{4, {}, {0, 0}, false}, {7, {}, {12, 0}, false}}});
  spec.steps = {{0}, {1, {"layers.*"}, true}, {2, {"*.down.weight"}}, {3, {"visual.*"}, true}, {4}};
  const FleetOutcome outcome = expect_exact(spec);
  for (const std::size_t step : {1, 3}) {
    for (const auto& rank : outcome.sends) {
      for (const std::string text :
           {"merger", "layers.1.down.weight", "visual.blocks.0.down.weight", "worker 0"})
        EXPECT_NE(rank[step].message().find(text), std::string::npos) << rank[step].to_string();
    }
  }
}

// Goal: ranks that ask for different names never move a byte: both sets are named.
TEST(Partial, ranks_with_other_names_than_the_sender_are_refused_naming_both) {
  FleetSpec spec = towers_fleet(2, 1);
  spec.steps = {{0}, {1, {"layers.*"}, true}, {2, {"layers.*"}}, {3}};
  spec.names = [](std::uint32_t rank, const Step& step) {
    return rank == 1 && step.version == 1 ? std::vector<std::string>{"layers.0.*", "embed.weight"}
                                          : step.names;
  };
  const FleetOutcome outcome = expect_exact(spec);
  for (const auto& rank : outcome.sends) {
    EXPECT_NE(rank[1].message().find("trainer 1 sends 4 of 16 names: 'embed.weight', 'layers.0.down.weight', "
                                     "'layers.0.norm.weight', ...; trainer 0 opened sync 2 of 6 of 16 names"),
              std::string::npos)
        << rank[1].to_string();
  }
}

TEST(Partial, a_pattern_that_matches_nothing_is_refused_by_every_rank_itself) {
  FleetSpec spec = towers_fleet(2, 1);
  spec.steps = {{0}, {1, {"layers.*", "lm_head.*"}, true}, {2}};
  const FleetOutcome outcome = run_fleet(spec);
  for (const auto& rank : outcome.sends) {
    ASSERT_EQ(rank.size(), 3u);
    EXPECT_NE(rank[1].message().find("'lm_head.*'"), std::string::npos) << rank[1].to_string();
    EXPECT_TRUE(rank[2].ok()) << rank[2].to_string();
  }
  EXPECT_EQ(outcome.syncs[0].size(), 2u);  // the worker never heard of it
  EXPECT_TRUE(outcome.problems.empty()) << outcome.problems.front();
}

// Goal: a sync of some names that fails on the way leaves unlisted modules as they were; a later sync of the
// same names makes everything whole again.
TEST(Partial, a_failing_sync_of_some_names_touches_nothing_else) {
  for (const PathChoice path : {PathChoice::kMapped, PathChoice::kPacked}) {
    FleetSpec spec = towers_fleet(2, 2);
    spec.steps = {{0}, {1, {"layers.*"}, true}, {2, {"layers.*"}}, {3, {"visual.*"}, true}, {4}};
    spec.worker_options = [path](std::uint32_t, WorkerOptions& options) { options.path = path; };
    spec.tamper = [](std::uint32_t rank, std::uint64_t version, GroupTensors& tensors) -> Status {
      const bool broken = (version == 1 && tensors.group == 2) || (version == 3 && tensors.group == 4);
      if (rank == 1 && broken) return Status(StatusCode::kInternal, "the gather broke");
      return {};
    };
    const FleetOutcome outcome = expect_exact(spec);
    for (const auto& rank : outcome.sends)
      EXPECT_NE(rank[1].message().find("the gather broke"), std::string::npos) << rank[1].to_string();
  }
}

// Goal: a source that yields what the sync does not ask for, or leaves out what it does, is told so by name.
TEST(Partial, a_source_that_yields_other_names_is_refused) {
  for (const bool surplus : {true, false}) {
    FleetSpec spec = towers_fleet(1, 1);
    spec.steps = {{0}, {1, {"*.norm.weight"}, true}, {2, {"*.norm.weight"}}};
    spec.tamper = [&](std::uint32_t, std::uint64_t version, GroupTensors& tensors) -> Status {
      if (version != 1) return {};
      NamedView& norm = tensors.tensors[1];
      if (surplus) {
        tensors.tensors[0].view = norm.view;
      } else {
        norm.view.reset();
      }
      return {};
    };
    const FleetOutcome outcome = expect_exact(spec);
    const std::string text = surplus ? "carries a tensor and is not part of this sync"
                                     : "is claimed as held and carries no tensor";
    EXPECT_NE(outcome.sends[0][1].message().find("layers.0."), std::string::npos);
    EXPECT_NE(outcome.sends[0][1].message().find(text), std::string::npos) << outcome.sends[0][1].to_string();
  }
}

// Goal: one of 60 tensors where a sync of all was begun is loud and nobody claims the version; five that are
// listed change, and only they.
TEST(Partial, case_099_fewer_tensors_than_declared) {
  FleetSpec spec;
  for (int layer = 0; layer < 60; ++layer)
    spec.metadata.push_back({"layers." + std::to_string(100 + layer) + ".weight", DType::kBF16, {4, 8}});
  spec.ranks = sharded(spec.metadata, 2);
  for (std::uint32_t worker = 0; worker < 2; ++worker)
    spec.workers.push_back(tensor_parallel(spec.metadata, worker, 2));
  spec.steps = {{0},
                {1, {}, true},
                {2,
                 {"layers.100.weight", "layers.111.weight", "layers.122.weight", "layers.133.weight",
                  "layers.159.weight"}},
                {3}};
  spec.tamper = [](std::uint32_t, std::uint64_t version, GroupTensors& tensors) -> Status {
    if (version == 1 && tensors.group != 7) {
      for (NamedView& each : tensors.tensors) each.view.reset();
    }
    return {};
  };
  const FleetOutcome outcome = expect_exact(spec);
  for (const auto& rank : outcome.sends)
    EXPECT_NE(rank[1].message().find("carries no tensor"), std::string::npos) << rank[1].to_string();
}

}  // namespace
}  // namespace shardpull
