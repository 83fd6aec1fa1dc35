// Goal: a restricted plan moves the listed names and nothing else, in whole modules, laid out the same on
// both sides, and signals the groups that a restricted sync visits.
#include "plan/restrict.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/random.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using namespace plan_testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Ids = std::vector<std::uint32_t>;
using Tensors = std::vector<TensorMeta>;

NameSet set_of(std::size_t count, const std::set<std::uint32_t>& names) {
  NameSet set((count + 7) / 8, 0);
  for (const std::uint32_t name : names) set[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
  return set;
}

std::set<std::uint32_t> ids_of(const NameSet& names, std::size_t count) {
  std::set<std::uint32_t> ids;
  for (std::uint32_t name = 0; name < count; ++name) {
    if (listed(names, name)) ids.insert(name);
  }
  return ids;
}

// ---- sets of names ------------------------------------------------------------------------------

TEST(NameSet, patterns_list_what_they_match) {
  const Tensors model{meta("visual.blocks.0.w", {2}), meta("model.layers.0.w", {2}),
                      meta("model.layers.10.w", {2}), meta("lm_head.weight", {2})};
  EXPECT_EQ(ids_of(must(names_matching({"model.*"}, model)), 4), (std::set<std::uint32_t>{1, 2}));
  EXPECT_EQ(ids_of(must(names_matching({"*.?.w", "lm_*"}, model)), 4), (std::set<std::uint32_t>{0, 1, 3}));
  EXPECT_EQ(ids_of(must(names_matching({"model.layers.[1-9]*"}, model)), 4), (std::set<std::uint32_t>{2}));
  EXPECT_EQ(must(names_matching({}, model)), NameSet());
  const Status none = names_matching({"model.*", "draft.*"}, model).status();
  EXPECT_EQ(none.info().reason, Reason::kBadArgument);
  EXPECT_THAT(none.message(), AllOf(HasSubstr("'draft.*'"), HasSubstr("4 names")));
}

TEST(NameSet, a_set_is_checked) {
  EXPECT_TRUE(check_name_set({}, 9).ok());
  EXPECT_TRUE(check_name_set(set_of(9, {0, 8}), 9).ok());
  EXPECT_TRUE(check_name_set(set_of(8, {7}), 8).ok());
  EXPECT_THAT(check_name_set({1}, 9).message(), HasSubstr("1 bytes, 9 names take 2"));
  EXPECT_THAT(check_name_set({0, 2}, 9).message(), HasSubstr("past the last of 9"));
  EXPECT_THAT(check_name_set({0, 0}, 9).message(), HasSubstr("lists none"));
}

TEST(NameSet, the_empty_set_lists_all_and_others_their_bits) {
  EXPECT_TRUE(listed({}, 70));
  EXPECT_TRUE(listed({0, 1}, 8));
  EXPECT_FALSE(listed({0, 1}, 9));
  EXPECT_FALSE(listed({255}, 8)) << "past the set's end";
}

TEST(NameSet, groups_with_a_listed_name_are_visited) {
  const InitTables tables =
      make_tables({meta("l.0.a", {2}), meta("l.0.b", {2}), meta("l.1.a", {2}), meta("tail", {2})});
  EXPECT_THAT(listed_groups(set_of(4, {1, 3}), tables), ElementsAre(true, false, true));
  EXPECT_THAT(listed_groups({}, tables), ElementsAre(true, true, true));
}

// ---- plans --------------------------------------------------------------------------------------

// A layer whose q, k and v feed one module, a norm beside them, and a tail.
struct Layer {
  Layer() {
    builder.copy_at(0, builder.fake(0), qkv, 0);
    builder.copy_at(1, builder.fake(1), qkv, 8);
    builder.whole("norm", 2, builder.fake(2));
    builder.whole("head", 3, builder.fake(3));
  }
  Tensors metadata{meta("l.0.k", {8}), meta("l.0.q", {8}), meta("l.0.norm", {4}), meta("tail", {8})};
  RecordingBuilder builder{metadata};
  std::uint32_t qkv = builder.parameter("qkv", "weight", {16});
};

TEST(RestrictPlan, keeps_chunk_ids_and_lays_the_rest_out_anew) {
  Layer layer;
  const Recording recording = layer.builder.build();
  const InitTables tables = make_tables(layer.metadata);
  const WorkerPlan plan = must(plan_worker(tables, recording, 0));
  ASSERT_EQ(plan.chunks.size(), 2u);
  const WorkerPlan tail = must(restrict_plan(plan, recording, tables, set_of(4, {3})));
  ASSERT_EQ(tail.chunks.size(), 1u);
  EXPECT_EQ(tail.chunks[0].chunk_id, 1u);
  EXPECT_EQ(tail.chunks[0].runs[0].seq, 0u);
  EXPECT_THAT(tail.pre_free, IsEmpty());
  EXPECT_THAT(tail.chunks[0].signal_groups, ElementsAre(1));

  const WorkerPlan norm = must(restrict_plan(plan, recording, tables, set_of(4, {2})));
  ASSERT_EQ(norm.chunks.size(), 1u);
  const Chunk& chunk = norm.chunks[0];
  EXPECT_EQ(chunk.bytes, 8u) << "k and q are not moved";
  EXPECT_EQ(chunk.keys[0].offset, 0u);
  EXPECT_EQ(norm.bytes_planned, 8u);
  EXPECT_EQ(norm.bytes_kept, 8u);
  EXPECT_EQ(recording.modules[chunk.materialise.at(0)].name, "norm");
  EXPECT_EQ(chunk.post_process, chunk.materialise);
}

TEST(RestrictPlan, refuses_a_module_of_two_versions) {
  Layer layer;
  const Recording recording = layer.builder.build();
  const InitTables tables = make_tables(layer.metadata);
  const WorkerPlan plan = must(plan_worker(tables, recording, 0));
  const Status half = restrict_plan(plan, recording, tables, set_of(4, {1, 2})).status();
  EXPECT_EQ(half.info().reason, Reason::kPlanInvalid);
  EXPECT_EQ(half.info().tensor, "l.0.k");
  EXPECT_THAT(half.message(), AllOf(HasSubstr("'qkv'"), HasSubstr("'l.0.q'"), HasSubstr("'l.0.k'")));
  EXPECT_TRUE(restrict_plan(plan, recording, tables, set_of(4, {0, 1})).ok());
  EXPECT_THAT(restrict_plan(plan, recording, tables, {0}).status().message(), HasSubstr("lists none"));
}

TEST(RestrictPlan, a_copy_without_elements_feeds_nothing) {
  Layer layer;
  layer.builder.copy_at(2, must(layer.builder.fake(2).narrow(0, 0, 0)), layer.qkv, 0);
  const Recording recording = layer.builder.build();
  const InitTables tables = make_tables(layer.metadata);
  const WorkerPlan plan = must(plan_worker(tables, recording, 0));
  EXPECT_TRUE(restrict_plan(plan, recording, tables, set_of(4, {2})).ok());
}

TEST(RestrictPlan, fills_go_with_their_module_and_never_alone) {
  Layer layer;
  layer.builder.fill(layer.builder.parameter("buffers", "inv_freq", {4}));
  const Recording recording = layer.builder.build();
  const InitTables tables = make_tables(layer.metadata);
  const WorkerPlan plan = must(plan_worker(tables, recording, 0));
  const auto buffers = static_cast<std::uint32_t>(recording.modules.size() - 1);
  ASSERT_THAT(plan.chunks[0].materialise, ::testing::Contains(buffers));
  const WorkerPlan left = must(restrict_plan(plan, recording, tables, set_of(4, {0, 1, 2, 3})));
  for (const Chunk& chunk : left.chunks)
    EXPECT_THAT(chunk.materialise, ::testing::Not(::testing::Contains(buffers)));
}

TEST(RestrictPlan, a_worker_that_takes_nothing_signals_at_once) {
  Layer layer;
  RecordingBuilder other(layer.metadata);
  other.whole("head", 3, other.fake(3));
  const Recording recording = other.build();
  const InitTables tables = make_tables(layer.metadata);
  const WorkerPlan plan = must(plan_worker(tables, recording, 0));
  const WorkerPlan left = must(restrict_plan(plan, recording, tables, set_of(4, {2})));
  EXPECT_THAT(left.chunks, IsEmpty());
  EXPECT_THAT(left.producers, IsEmpty());
  EXPECT_THAT(left.pre_free, ElementsAre(0));
}

TEST(RestrictPlan, a_run_without_keys_keeps_its_number) {
  const Tensors metadata{meta("l.0.a", {8}), meta("l.0.b", {8})};
  RecordingBuilder builder(metadata);
  builder.whole("a", 0, builder.fake(0));
  builder.whole("b", 1, builder.fake(1));
  const Recording recording = builder.build();
  const InitTables tables = make_tables(metadata, 2);
  PlanOptions options;
  options.pull_split = 2;
  const WorkerPlan plan = must(plan_worker(tables, recording, 0, options));
  ASSERT_EQ(plan.chunks.at(0).runs.size(), 2u);
  const WorkerPlan left = must(restrict_plan(plan, recording, tables, set_of(2, {1})));
  ASSERT_EQ(left.chunks.at(0).runs.size(), 2u);
  EXPECT_EQ(left.chunks[0].runs[0].key_count, 0u);
  const std::uint32_t idle = plan.chunks[0].runs[0].producer, serving = plan.chunks[0].runs[1].producer;
  EXPECT_THAT(pulls_at(left, idle), IsEmpty());
  EXPECT_EQ(pulls_at(left, serving).at(0).run, 1u);
  ASSERT_EQ(left.producers.size(), 1u);
  EXPECT_EQ(left.producers[0].producer, serving);
}

// ---- random problems ----------------------------------------------------------------------------

struct Problem {
  InitTables tables;
  Recording recording;
  PlanOptions options;
  NameSet names;
};

// Whole at some ranks, or cut in two, with common rows now and then, at two.
void hold_somehow(Random& random, std::uint32_t name, const TensorMeta& meta, std::vector<Holding>& ranks) {
  const std::size_t first = random.below(ranks.size());
  const std::int64_t rows = meta.shape[0], columns = meta.shape[1];
  if (ranks.size() == 1 || random.below(2) == 0) {
    for (std::int64_t n = random.between(1, 3); n > 0; --n) hold(ranks[random.below(ranks.size())], name);
    return;
  }
  const std::int64_t end = random.between(1, rows), begin = random.between(0, end);
  hold(ranks[first], name, Box{{0, 0}, {end, columns}});
  if (begin < rows) hold(ranks[(first + 1) % ranks.size()], name, Box{{begin, 0}, {rows - begin, columns}});
}

Problem random_problem(std::uint64_t seed) {
  Random random(seed);
  Problem problem;
  Tensors metadata;
  for (std::int64_t g = random.between(1, 4), i = 0; i < g; ++i) {
    for (std::int64_t n = random.between(1, 5), j = 0; j < n; ++j) {
      metadata.push_back(meta("l." + std::to_string(i) + ".w" + std::to_string(j),
                              {random.between(1, 6), random.between(1, 4)}));
    }
  }
  const auto ranks = static_cast<std::uint32_t>(random.between(1, 4));
  auto holdings = holdings_of(metadata, ranks);
  for (Holding& holding : holdings) hold(holding, 0);
  for (std::uint32_t name = 1; name < metadata.size(); ++name)
    hold_somehow(random, name, metadata[name], holdings);

  RecordingBuilder builder(metadata);
  std::map<std::string, std::set<std::uint32_t>> feeds;
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    for (std::int64_t uses = random.between(0, 2); uses > 0; --uses) {
      const std::string module = "m" + std::to_string(random.below(metadata.size() + 1));
      const std::int64_t rows = metadata[name].shape[0], first = random.between(0, rows - 1);
      const Tensor source = must(builder.fake(name).narrow(0, first, random.between(1, rows - first)));
      builder.copy(name, source, builder.parameter(module, "p", source.shape()));
      feeds[module].insert(name);
    }
  }
  if (random.below(3) == 0) builder.fill(builder.parameter("m0", "filled", {4}));
  problem.recording = builder.build();

  // Some names, and with each of a module all of them.
  std::set<std::uint32_t> some{static_cast<std::uint32_t>(random.below(metadata.size()))};
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    if (random.below(4) == 0) some.insert(name);
  }
  for (bool grown = true; grown;) {
    grown = false;
    for (const auto& [module, by] : feeds) {
      if (std::none_of(by.begin(), by.end(), [&](std::uint32_t name) { return some.contains(name); }))
        continue;
      for (const std::uint32_t name : by) grown = some.insert(name).second || grown;
    }
  }
  problem.names = set_of(metadata.size(), some);
  problem.tables = make_tables(metadata, ranks, static_cast<std::uint32_t>(random.between(1, 3)));
  problem.tables.ownership = must(resolve_ownership(metadata, holdings));
  problem.tables.ring_depth = static_cast<std::uint32_t>(random.between(1, 3));
  const std::uint64_t limits[] = {0, 16, 40, 1000};
  problem.options.max_chunk_bytes = limits[random.below(4)];
  problem.options.chunk_split = static_cast<std::uint32_t>(random.between(1, 2));
  problem.options.pull_split = static_cast<std::uint32_t>(random.between(1, 3));
  problem.options.path = random.below(2) == 0 ? PathPolicy::kPacked : PathPolicy::kMapped;
  return problem;
}

void check_coverage(const Problem& problem, const WorkerPlan& left) {
  Origins all, expected, moved;
  ASSERT_EQ(origins_of(problem.recording, all), "");
  for (const auto& [to, from] : all) {
    if (listed(problem.names, from.first)) expected.emplace(to, from);
  }
  ASSERT_EQ(origins_of(left, problem.tables, moved), "");
  ASSERT_EQ(moved, expected);
  std::uint64_t bytes = 0;
  for (const Chunk& chunk : left.chunks) {
    for (const ChunkKey& key : chunk.keys) bytes += key.bytes;
  }
  ASSERT_EQ(left.bytes_planned, bytes);
}

void check_both_sides(const Problem& problem, const WorkerPlan& plan, const WorkerPlan& left) {
  std::size_t served = 0;
  for (const ProducerPlan& whole : plan.producers) {
    const std::uint32_t producer = whole.producer;
    const auto pulls = pulls_at(left, producer);
    ASSERT_EQ(restrict_pulls(pulls_at(plan, producer), problem.names), pulls);
    if (pulls.empty()) continue;
    const Status checked = check_pulls(pulls, problem.tables, producer);
    ASSERT_TRUE(checked.ok()) << checked.message();
    const ProducerPlan& to = left.producers.at(served++);
    ASSERT_EQ(to.producer, producer);
    ASSERT_EQ(to.pulls, pulls.size());
    ASSERT_EQ(to.digest, pulls_digest(pulls, plan.ring_depth));
    for (const PullDescription& pull : pulls) {
      ASSERT_TRUE(pull.path != Path::kPacked || pull.bytes <= whole.serve_slot_bytes);
    }
  }
  ASSERT_EQ(served, left.producers.size());
}

void check_order(const Problem& problem, const WorkerPlan& plan, const WorkerPlan& left) {
  const std::vector<bool> groups = listed_groups(problem.names, problem.tables);
  std::vector<int> signalled(groups.size(), 0);
  for (const std::uint32_t group : left.pre_free) ++signalled[group];
  std::set<std::uint32_t> begun, ended;
  for (const Chunk& chunk : left.chunks) {
    const Chunk& whole = plan.chunks.at(chunk.chunk_id);
    ASSERT_EQ(chunk.path, whole.path);
    ASSERT_EQ(chunk.runs.size(), whole.runs.size());
    ASSERT_LE(chunk.bytes, whole.bytes);
    ASSERT_EQ(signalled[chunk.group], 0) << "nothing is taken from a group after its signal";
    for (const std::uint32_t module : chunk.materialise) ASSERT_TRUE(begun.insert(module).second);
    for (const PlannedScatter& scatter : chunk.scatters) {
      const std::uint32_t module = problem.recording.parameters[scatter.destination.parameter].module;
      ASSERT_TRUE(begun.contains(module) && !ended.contains(module));
    }
    for (const std::uint32_t module : chunk.post_process) ASSERT_TRUE(ended.insert(module).second);
    for (const std::uint32_t group : chunk.signal_groups) ++signalled[group];
  }
  ASSERT_EQ(begun, ended);
  for (std::size_t group = 0; group < groups.size(); ++group)
    ASSERT_EQ(signalled[group], groups[group] ? 1 : 0);
}

TEST(RestrictPlan, random_problems) {
  std::size_t dropped_runs = 0;
  for (std::uint64_t seed = 0; seed < 1500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = random_problem(seed);
    for (std::uint32_t consumer = 0; consumer < problem.tables.num_consumers; ++consumer) {
      const WorkerPlan plan = must(plan_worker(problem.tables, problem.recording, consumer, problem.options));
      const WorkerPlan left = must(restrict_plan(plan, problem.recording, problem.tables, problem.names));
      ASSERT_NO_FATAL_FAILURE(check_coverage(problem, left));
      ASSERT_NO_FATAL_FAILURE(check_both_sides(problem, plan, left));
      ASSERT_NO_FATAL_FAILURE(check_order(problem, plan, left));
      for (const Chunk& chunk : left.chunks) {
        for (const shardpull::Run& run : chunk.runs) dropped_runs += run.key_count == 0 ? 1 : 0;
      }
      ASSERT_EQ(must(restrict_plan(plan, problem.recording, problem.tables, {})), plan);
    }
  }
  EXPECT_GT(dropped_runs, 20u) << "runs without keys are among the problems";
}

}  // namespace
}  // namespace shardpull
