// Goal: the plan of a worker. Order, cuts, layouts, producers, paths and signals on models written down by
// hand.
#include <algorithm>
#include <clocale>
#include <cstdint>
#include <functional>
#include <locale>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "plan/plan.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using namespace plan_testing;
using Ids = std::vector<std::uint32_t>;

// A tied embedding, two layers with a fused and a plain module, and a last norm; everything whole.
struct SmallModel {
  std::vector<TensorMeta> metadata{
      meta("embed", {32, 8}),          // 512 bytes
      meta("layers.0.down", {8, 16}),  // 256
      meta("layers.0.gate", {16, 8}),  // 256
      meta("layers.0.norm", {3}),      // 6
      meta("layers.0.up", {16, 8}),    // 256
      meta("layers.1.down", {8, 16}),
      meta("layers.1.gate", {16, 8}),
      meta("layers.1.norm", {3}),
      meta("layers.1.up", {16, 8}),
      meta("norm", {8}),
  };
  Recording record() const {
    RecordingBuilder builder(metadata);
    builder.whole("embed", 0, builder.fake(0));
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      const std::uint32_t first = 1 + 4 * layer;
      const std::string prefix = "layers." + std::to_string(layer) + ".";
      const std::uint32_t fused = builder.parameter(prefix + "gate_up", "weight", {32, 8});
      builder.copy_at(first + 3, builder.fake(first + 3), fused,
                      128);  // up before gate: as the loader wrote them
      builder.copy_at(first + 1, builder.fake(first + 1), fused, 0);
      builder.whole(prefix + "norm", first + 2, builder.fake(first + 2));
      builder.whole(prefix + "down", first, builder.fake(first));
    }
    builder.whole("norm", 9, builder.fake(9));
    return builder.build();
  }
};

PlanOptions unlimited() {
  return {.max_chunk_bytes = 0, .path = PathPolicy::kPacked};
}

std::vector<std::string> names_of(const InitTables& tables, const Chunk& chunk) {
  std::vector<std::string> names;
  for (const ChunkKey& key : chunk.keys) names.push_back(tables.metadata[key.name].name);
  return names;
}

void expect_exact(const InitTables& tables, const Recording& recording, const WorkerPlan& plan) {
  Origins expected, planned;
  ASSERT_EQ(origins_of(recording, expected), "");
  ASSERT_EQ(origins_of(plan, tables, planned), "");
  EXPECT_EQ(planned, expected);
}

TEST(PlanWorker, order_layout_and_signals) {
  const SmallModel model;
  const InitTables tables = make_tables(model.metadata);
  const Recording recording = model.record();
  const WorkerPlan plan = must(plan_worker(tables, recording, 0, unlimited()));
  expect_exact(tables, recording, plan);
  ASSERT_EQ(plan.chunks.size(), 4u);

  // Modules by the first of their names in the group (down, gate_up, norm); the copies of gate_up as
  // recorded.
  const Chunk& layer = plan.chunks[1];
  EXPECT_EQ(layer.chunk_id, 1u);
  EXPECT_EQ(layer.group, 1u);
  EXPECT_EQ(names_of(tables, layer),
            (std::vector<std::string>{"layers.0.down", "layers.0.up", "layers.0.gate", "layers.0.norm"}));
  EXPECT_EQ(layer.keys[3].offset, 768u);
  EXPECT_EQ(layer.bytes, 774u);  // no padding after the last key
  EXPECT_EQ(layer.signal_groups, (Ids{1}));
  EXPECT_EQ(plan.chunks[3].bytes, 16u);
  EXPECT_TRUE(plan.pre_free.empty());
  EXPECT_EQ(plan.receive_slot_bytes, 774u);
  EXPECT_EQ(plan.bytes_kept, 512u + 2 * 774 + 16);
  EXPECT_EQ(plan.bytes_planned, plan.bytes_kept);
  ASSERT_EQ(plan.producers.size(), 1u);
  EXPECT_EQ(plan.producers[0].serve_slot_bytes, 774u);
  EXPECT_EQ(plan.producers[0].pulls, 4u);
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_EQ(plan.chunks[i].runs.at(0).seq, i);
}

TEST(PlanWorker, keys_start_on_multiples_of_16) {
  const std::vector<TensorMeta> metadata{meta("a", {3}, DType::kF16), meta("b", {5}, DType::kF32),
                                         meta("c", {1}, DType::kBF16), meta("d", {7}, DType::kF8E4M3),
                                         meta("e", {1}, DType::kI64)};
  RecordingBuilder builder(metadata);
  for (std::uint32_t name = 0; name < 5; ++name) builder.whole(metadata[name].name, name, builder.fake(name));
  const InitTables tables = make_tables(metadata);
  const WorkerPlan plan = must(plan_worker(tables, builder.build(), 0, unlimited()));
  std::vector<std::uint64_t> offsets;
  for (const ChunkKey& key : plan.chunks.at(0).keys) offsets.push_back(key.offset);
  EXPECT_EQ(offsets, (std::vector<std::uint64_t>{0, 16, 48, 64, 80}));
  EXPECT_EQ(plan.chunks[0].bytes, 88u);

  // Slots smaller than the whole: the same keys, cut between tensors.
  const WorkerPlan cut =
      must(plan_worker(tables, builder.build(), 0, {.max_chunk_bytes = 24, .path = PathPolicy::kPacked}));
  expect_exact(tables, builder.build(), cut);
  for (const Chunk& chunk : cut.chunks) EXPECT_LE(chunk.bytes, 24u);
}

TEST(PlanWorker, an_equal_key_travels_once) {
  const std::vector<TensorMeta> metadata{meta("w", {8, 8})};
  RecordingBuilder builder(metadata);
  // The same slice written down in two ways, into two modules; and once again into a third place of the
  // first.
  const std::uint32_t a = builder.parameter("a", "weight", {4, 8}),
                      a2 = builder.parameter("a", "copy", {4, 8});
  const std::uint32_t b = builder.parameter("b", "weight", {4, 8});
  builder.copy(0, must(builder.fake(0).narrow(0, 4, 4)), a);
  builder.copy(0, must(must(builder.fake(0).view({2, 4, 8})).select(0, 1)), b);
  builder.copy(0, must(builder.fake(0).chunk(2)).at(1), a2);
  const Recording recording = builder.build();
  const InitTables tables = make_tables(metadata);
  const WorkerPlan plan = must(plan_worker(tables, recording, 0, unlimited()));
  expect_exact(tables, recording, plan);
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_EQ(plan.chunks[0].keys.size(), 1u);
  EXPECT_EQ(plan.chunks[0].scatters.size(), 3u);
  EXPECT_EQ(plan.bytes_kept, 64u);
  EXPECT_EQ(plan.bytes_planned, 64u);

  // Also where the key has to be cut: both readers are in the chunk of their rows.
  const WorkerPlan cut = must(plan_worker(tables, recording, 0, {.max_chunk_bytes = 32}));
  expect_exact(tables, recording, cut);
  EXPECT_EQ(cut.chunks.size(), 2u);
  EXPECT_EQ(cut.bytes_planned, 64u);
}

TEST(PlanWorker, case_002_one_name_feeds_two_storages) {
  const std::vector<TensorMeta> metadata{meta("model.embed_tokens.weight", {100, 64})};
  RecordingBuilder builder(metadata);
  for (const char* module : {"model.embed_tokens", "lm_head"})
    builder.whole(module, 0, must(builder.fake(0).narrow(0, 0, 50)));
  const Recording recording = builder.build();
  const InitTables tables = make_tables(metadata, 1, 2);
  const WorkerPlan plan = must(plan_worker(tables, recording, 0));
  expect_exact(tables, recording, plan);
  EXPECT_EQ(plan.bytes_planned, 50u * 64 * 2);
  EXPECT_EQ(plan.chunks.at(0).materialise, (Ids{0, 1}));
}

TEST(PlanWorker, modules_span_groups_and_owner_classes) {
  // A module fed from an early and a late group: materialised with the first chunk, post-processed with the
  // last.
  const std::vector<TensorMeta> metadata{meta("a", {4}), meta("l.0.x", {4}), meta("l.0.y", {4}),
                                         meta("b", {4})};
  RecordingBuilder builder(metadata);
  const std::uint32_t wide = builder.parameter("wide", "weight", {3, 4});
  builder.copy_at(0, builder.fake(0), wide, 0);
  builder.whole("x", 1, builder.fake(1));
  builder.copy_at(2, builder.fake(2), wide, 4);
  builder.copy_at(3, builder.fake(3), wide, 8);
  InitTables tables = make_tables(metadata, 2);
  tables.ownership = {.owner_sets = {{0}, {1}}, .name_owner_class = {0, 1, 0, 0}, .pieces = {}};
  const Recording recording = builder.build();
  const WorkerPlan plan = must(plan_worker(tables, recording, 0, unlimited()));
  expect_exact(tables, recording, plan);
  ASSERT_EQ(plan.chunks.size(), 4u);
  EXPECT_EQ(plan.chunks[1].owner_class, 0u);
  EXPECT_EQ(plan.chunks[2].owner_class, 1u);
  EXPECT_EQ(plan.chunks[0].materialise, (Ids{0}));
  EXPECT_EQ(plan.chunks[2].materialise, (Ids{1}));
  EXPECT_EQ(plan.chunks[2].post_process, (Ids{1}));
  EXPECT_EQ(plan.chunks[3].post_process, (Ids{0}));
  EXPECT_TRUE(plan.chunks[1].signal_groups.empty());
  EXPECT_EQ(plan.chunks[2].signal_groups, (Ids{1}));
  // Sequence numbers count per producer.
  EXPECT_EQ(plan.chunks[2].runs.at(0).seq, 0u);
  EXPECT_EQ(plan.chunks[3].runs.at(0).seq, 2u);
}

TEST(PlanWorker, groups_without_a_pull_are_signalled_at_the_start) {
  SmallModel model;
  const InitTables tables = make_tables(model.metadata, 2);
  RecordingBuilder builder(model.metadata);
  builder.whole("embed", 0, builder.fake(0));
  builder.whole("norm", 9, builder.fake(9));
  const WorkerPlan plan = must(plan_worker(tables, builder.build(), 0));
  EXPECT_EQ(plan.pre_free, (Ids{1, 2}));
  EXPECT_EQ(plan.group_owners, (std::vector<Ids>(4, Ids{0, 1})));
}

TEST(PlanWorker, case_007_a_worker_with_no_real_rows) {
  // Vocabulary 65 padded to 128 over four workers: worker 2 keeps one row, worker 3 none.
  const std::vector<TensorMeta> metadata{meta("embed", {65, 8}), meta("l.0.w", {8})};
  const InitTables tables = make_tables(metadata, 1, 4);
  for (std::uint32_t rank : {2u, 3u}) {
    RecordingBuilder builder(metadata);
    const std::uint32_t embed = builder.parameter("embed", "weight", {32, 8});
    const std::int64_t real = rank == 2 ? 1 : 0;
    builder.copy_at(0, must(builder.fake(0).narrow(0, rank == 2 ? 64 : 65, real)), embed, 0);
    builder.fill(embed);
    builder.whole("l.0", 1, builder.fake(1));
    const Recording recording = builder.build();
    const WorkerPlan plan = must(plan_worker(tables, recording, rank, unlimited()));
    expect_exact(tables, recording, plan);
    if (rank == 2) {
      EXPECT_EQ(plan.chunks.size(), 2u);
      EXPECT_EQ(plan.chunks[0].bytes, 16u);
    } else {
      // The empty copy takes no place; its module is filled with the first chunk of the sync.
      ASSERT_EQ(plan.chunks.size(), 1u);
      EXPECT_EQ(plan.pre_free, (Ids{0}));
      EXPECT_EQ(plan.chunks[0].materialise, (Ids{1, 0}));
      EXPECT_EQ(plan.chunks[0].post_process, (Ids{1, 0}));
      EXPECT_EQ(plan.bytes_kept, 16u);
    }
  }
}

TEST(PlanWorker, fills_alone_make_a_chunk_without_keys) {
  const std::vector<TensorMeta> metadata{meta("w", {4})};
  RecordingBuilder builder(metadata);
  builder.fill(builder.parameter("pad", "weight", {4}));
  const InitTables tables = make_tables(metadata);
  const WorkerPlan plan = must(plan_worker(tables, builder.build(), 0));
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_TRUE(plan.chunks[0].keys.empty());
  EXPECT_TRUE(plan.chunks[0].runs.empty());
  EXPECT_EQ(plan.chunks[0].materialise, (Ids{0}));
  EXPECT_EQ(plan.pre_free, (Ids{0}));
  EXPECT_EQ(plan.receive_slot_bytes, 0u);
  EXPECT_TRUE(plan.producers.empty());

  // Nothing at all: no chunk, nothing registered, every group signalled.
  const WorkerPlan nothing = must(plan_worker(tables, RecordingBuilder(metadata).build(), 0));
  EXPECT_TRUE(nothing.chunks.empty());
  EXPECT_EQ(nothing.pre_free, (Ids{0}));
}

TEST(PlanWorker, max_chunk_bytes_bounds_the_slot) {
  // An untied vocabulary matrix must not dictate the slot size.
  const std::vector<TensorMeta> metadata{meta("lm_head", {1000, 16}), meta("norm", {16}),
                                         meta("other", {24, 16})};
  RecordingBuilder builder(metadata);
  for (std::uint32_t name = 0; name < 3; ++name) builder.whole(metadata[name].name, name, builder.fake(name));
  const Recording recording = builder.build();
  const InitTables tables = make_tables(metadata);
  const WorkerPlan plan =
      must(plan_worker(tables, recording, 0, {.max_chunk_bytes = 4096, .path = PathPolicy::kPacked}));
  expect_exact(tables, recording, plan);
  for (const Chunk& chunk : plan.chunks) EXPECT_LE(chunk.bytes, 4096u);
  EXPECT_EQ(plan.bytes_planned, plan.bytes_kept);
  // Materialised once, with the first of its rows; processed once, with the last; the group is signalled
  // once.
  EXPECT_EQ(plan.chunks.front().materialise, (Ids{0}));
  EXPECT_EQ(std::accumulate(plan.chunks.begin(), plan.chunks.end(), std::size_t{0},
                            [](std::size_t n, const Chunk& chunk) {
                              return n + chunk.materialise.size() + chunk.post_process.size();
                            }),
            6u);
  EXPECT_EQ(plan.chunks.back().signal_groups, (Ids{0}));

  // A single row may be larger than the limit, nothing else.
  const WorkerPlan rows =
      must(plan_worker(tables, recording, 0, {.max_chunk_bytes = 20, .path = PathPolicy::kPacked}));
  for (const Chunk& chunk : rows.chunks) {
    EXPECT_EQ(chunk.keys.size(), 1u);
    EXPECT_LE(chunk.bytes, 32u);
  }
}

TEST(PlanWorker, chunk_split_balances_bytes) {
  const SmallModel model;
  const InitTables tables = make_tables(model.metadata);
  const Recording recording = model.record();
  PlanOptions options = unlimited();
  options.chunk_split = 2;
  const WorkerPlan plan = must(plan_worker(tables, recording, 0, options));
  expect_exact(tables, recording, plan);
  // Layer 0: 256, 256, 256, 6 bytes; half is 387: down alone, then the rest.
  ASSERT_EQ(plan.chunks.size(), 6u);
  EXPECT_EQ(plan.chunks[1].keys.size(), 1u);
  EXPECT_EQ(plan.chunks[2].keys.size(), 3u);
  EXPECT_TRUE(plan.chunks[1].signal_groups.empty());
  EXPECT_EQ(plan.chunks[2].signal_groups, (Ids{1}));
}

TEST(PlanWorker, rotation_within_the_block_as_recorded_from_the_reference) {
  const SmallModel model;
  const Recording recording = model.record();
  const auto primaries = [&](std::uint32_t producers, std::uint32_t workers, std::uint32_t consumer) {
    const InitTables tables = make_tables(model.metadata, producers, workers);
    Ids out;
    PlanOptions options = unlimited();
    options.balance = Balance::kRotation;
    for (const Chunk& chunk : must(plan_worker(tables, recording, consumer, options)).chunks) {
      EXPECT_EQ(chunk.runs.size(), 1u);
      EXPECT_EQ(chunk.runs[0].producer, chunk.candidates[0]);
      Ids owners = chunk.candidates;
      std::sort(owners.begin(), owners.end());
      Ids all(producers);
      std::iota(all.begin(), all.end(), 0u);
      EXPECT_EQ(owners, all);
      out.push_back(chunk.candidates[0]);
    }
    return out;
  };
  EXPECT_EQ(primaries(4, 2, 1), (Ids{2, 3, 2, 3}));
  EXPECT_EQ(primaries(4, 2, 0), (Ids{0, 1, 0, 1}));
  EXPECT_EQ(primaries(3, 2, 0), (Ids{0, 0, 0, 0}));
  EXPECT_EQ(primaries(3, 2, 1), (Ids{1, 2, 1, 2}));
  EXPECT_EQ(primaries(2, 2, 1), (Ids{1, 1, 1, 1}));
  EXPECT_EQ(primaries(2, 1, 0), (Ids{0, 1, 0, 1}));
}

TEST(PlanWorker, bytes_are_evened_out_within_the_block) {
  // Three workers over two trainers: the middle one takes half from each, whatever the groups' numbers.
  const std::vector<TensorMeta> metadata{meta("l.0.a", {40, 8}), meta("l.1.a", {20, 8}),
                                         meta("l.2.a", {10, 8}), meta("l.3.a", {10, 8}),
                                         meta("l.4.a", {80, 8})};
  RecordingBuilder builder(metadata);
  for (std::uint32_t name = 0; name < 5; ++name) builder.whole(metadata[name].name, name, builder.fake(name));
  const InitTables tables = make_tables(metadata, 2, 3);
  const auto primaries = [&](std::uint32_t consumer) {
    Ids out;
    for (const Chunk& chunk : must(plan_worker(tables, builder.build(), consumer)).chunks)
      out.push_back(chunk.runs.at(0).producer);
    return out;
  };
  EXPECT_EQ(primaries(0), (Ids{0, 0, 0, 0, 0}));
  EXPECT_EQ(primaries(1), (Ids{1, 1, 1, 1, 0}));  // the largest first, by rotation; the rest to the other one
  EXPECT_EQ(primaries(2), (Ids{1, 1, 1, 1, 1}));
}

TEST(PlanWorker, split_pulls_are_as_long_as_their_owners_have_room) {
  // Two workers over three trainers; every chunk is pulled from two of them, from the middle one half as
  // much.
  std::vector<TensorMeta> metadata;
  for (int layer = 0; layer < 10; ++layer) {
    for (char name = 'a'; name <= 'l'; ++name)
      metadata.push_back(meta("l." + std::to_string(layer) + "." + name, {8}));
  }
  RecordingBuilder builder(metadata);
  for (std::uint32_t name = 0; name < metadata.size(); ++name)
    builder.whole(metadata[name].name, name, builder.fake(name));
  const InitTables tables = make_tables(metadata, 3, 2);
  std::map<std::uint32_t, std::size_t> keys;
  for (std::uint32_t consumer = 0; consumer < 2; ++consumer) {
    const WorkerPlan plan = must(plan_worker(tables, builder.build(), consumer, {.pull_split = 2}));
    expect_exact(tables, builder.build(), plan);
    for (const Chunk& chunk : plan.chunks) {
      ASSERT_EQ(chunk.runs.size(), 2u);
      for (const shardpull::Run& run : chunk.runs) keys[run.producer] += run.key_count;
    }
  }
  EXPECT_EQ(keys, (std::map<std::uint32_t, std::size_t>{{0, 80}, {1, 80}, {2, 80}}));
}

TEST(PlanWorker, each_owner_set_is_evened_out_for_itself) {
  // What is held by trainer 1 alone does not push what both hold to trainer 0: other workers may not take
  // from it.
  std::vector<TensorMeta> metadata;
  for (int layer = 0; layer < 4; ++layer) {
    metadata.push_back(meta("l." + std::to_string(layer) + ".both", {8, 8}));
    metadata.push_back(meta("l." + std::to_string(layer) + ".one", {64, 8}));
  }
  RecordingBuilder builder(metadata);
  for (std::uint32_t name = 0; name < 8; ++name) builder.whole(metadata[name].name, name, builder.fake(name));
  InitTables tables = make_tables(metadata, 2);
  tables.ownership = {
      .owner_sets = {{0, 1}, {1}}, .name_owner_class = {0, 1, 0, 1, 0, 1, 0, 1}, .pieces = {}};
  std::map<std::uint32_t, std::uint32_t> chunks;
  for (const Chunk& chunk : must(plan_worker(tables, builder.build(), 0)).chunks) {
    if (chunk.owner_class == 0) ++chunks[chunk.runs.at(0).producer];
  }
  EXPECT_EQ(chunks, (std::map<std::uint32_t, std::uint32_t>{{0, 2}, {1, 2}}));
}

TEST(PlanWorker, what_is_published_in_place_is_mapped_only_where_it_lies) {
  const SmallModel model;
  const Recording recording = model.record();
  InitTables tables = make_tables(model.metadata, 2);
  const auto paths = [&] {
    std::set<Path> out;
    for (const Chunk& chunk : must(plan_worker(tables, recording, 0)).chunks) out.insert(chunk.path);
    return out;
  };
  tables.producer_mappable = {1, 0};  // trainer 1 copies these small tensors into export buffers
  EXPECT_EQ(paths(), (std::set<Path>{Path::kMapped}));
  tables.producer_resident = {0, 1};  // now it copies nothing
  EXPECT_EQ(paths(), (std::set<Path>{Path::kPacked}));
  const auto refused = plan_worker(tables, recording, 0, {.path = PathPolicy::kMapped});
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find(
                "trainer 1 does not hold 'embed' in memory that can be mapped, and publishes "
                "it in place"),
            std::string::npos)
      << refused.status().message();
  tables.producer_mappable = {1, 1};
  EXPECT_EQ(paths(), (std::set<Path>{Path::kMapped}));
}

TEST(PlanWorker, bytes_kept_count_each_byte_of_a_source_once) {
  const std::vector<TensorMeta> metadata{meta("w", {8, 8}), meta("v", {16}, DType::kF32)};
  const auto kept = [&](const std::function<void(RecordingBuilder&)>& write) {
    RecordingBuilder builder(metadata);
    write(builder);
    return must(plan_worker(make_tables(metadata), builder.build(), 0)).bytes_kept;
  };
  // Rows 0 to 4 and 3 to 7; columns and rows; every second row and all rows; the same bytes read as other
  // dtypes.
  EXPECT_EQ(kept([](RecordingBuilder& b) {
              b.whole("a", 0, must(b.fake(0).narrow(0, 0, 5)));
              b.whole("b", 0, must(b.fake(0).narrow(0, 3, 5)));
            }),
            128u);
  EXPECT_EQ(kept([](RecordingBuilder& b) {
              b.whole("a", 0, must(b.fake(0).narrow(0, 0, 2)));
              b.whole("b", 0, must(b.fake(0).narrow(1, 0, 2)));
            }),
            2u * (16 + 12));
  EXPECT_EQ(kept([](RecordingBuilder& b) {
              b.whole("a", 0, must(b.fake(0).index({IndexSlice{.start = {}, .stop = {}, .step = 2}})));
              b.whole("b", 0, must(b.fake(0).transpose(0, 1)));
            }),
            128u);
  EXPECT_EQ(kept([](RecordingBuilder& b) {
              b.whole("a", 1, must(b.fake(1).narrow(0, 0, 4)));
              b.whole("b", 1, must(must(b.fake(1).view(DType::kU8)).narrow(0, 12, 8)));
            }),
            20u);
}

TEST(PlanWorker, pull_split_cuts_keys_over_the_block) {
  const SmallModel model;
  const InitTables tables = make_tables(model.metadata, 4, 2);
  const Recording recording = model.record();
  PlanOptions options = unlimited();
  options.pull_split = 3;
  const WorkerPlan plan = must(plan_worker(tables, recording, 1, options));
  expect_exact(tables, recording, plan);
  const Chunk& layer = plan.chunks[1];
  ASSERT_EQ(layer.runs.size(), 2u);  // the block has two producers
  EXPECT_EQ(
      layer.runs[0],
      (shardpull::Run{.producer = 3, .first_key = 0, .key_count = 1, .offset = 0, .bytes = 256, .seq = 0}));
  EXPECT_EQ(
      layer.runs[1],
      (shardpull::Run{.producer = 2, .first_key = 1, .key_count = 3, .offset = 256, .bytes = 518, .seq = 1}));
  EXPECT_EQ(plan.chunks[0].runs.size(), 1u);  // one key
  // Each producer's slots hold the largest run taken there.
  ASSERT_EQ(plan.producers.size(), 2u);
  EXPECT_EQ(plan.producers[0].producer, 2u);
  EXPECT_EQ(plan.producers[0].serve_slot_bytes, 518u);
  // What travels counts from the run's start.
  const auto pulls = pulls_at(plan, 2);
  ASSERT_EQ(pulls.size(), plan.producers[0].pulls);
  EXPECT_EQ(pulls[1].run, 1u);
  EXPECT_EQ(pulls[1].keys.front().offset, 0u);
  EXPECT_TRUE(check_pulls(pulls, tables, 2).ok()) << check_pulls(pulls, tables, 2).message();
}

TEST(PlanWorker, replicas_pull_the_same_bytes_from_the_same_producers) {
  const SmallModel model;
  InitTables tables = make_tables(model.metadata, 4, 4);
  tables.num_replicas = 2;
  const Recording recording = model.record();
  const WorkerPlan first = must(plan_worker(tables, recording, 1)),
                   second = must(plan_worker(tables, recording, 3));
  EXPECT_EQ(first.chunks, second.chunks);
  EXPECT_EQ(first.producers, second.producers);
  EXPECT_EQ(first.sharing_group, 1u);
  EXPECT_EQ(second.sharing_group, 1u);
  // Without sharing the four are four workers.
  tables.workers_per_replica = 4;
  const WorkerPlan alone = must(plan_worker(tables, recording, 3));
  EXPECT_EQ(alone.sharing_group, 3u);
  EXPECT_EQ(alone.chunks[0].runs[0].producer, 3u);
}

TEST(PlanWorker, case_091_ring_depth_and_layout_are_in_the_digest) {
  const SmallModel model;
  InitTables tables = make_tables(model.metadata);
  const Recording recording = model.record();
  const auto digest_of = [&](std::uint64_t max_chunk_bytes) {
    return must(plan_worker(tables, recording, 0, {.max_chunk_bytes = max_chunk_bytes}))
        .producers.at(0)
        .digest;
  };
  const Digest128 digest = digest_of(1024);
  EXPECT_EQ(digest_of(1024), digest);
  EXPECT_NE(digest_of(512), digest);
  tables.ring_depth = 3;
  EXPECT_NE(digest_of(1024), digest);
}

TEST(PlanWorker, paths) {
  const SmallModel model;
  InitTables tables = make_tables(model.metadata, 2);
  const Recording recording = model.record();
  const auto paths = [&](PlanOptions options) {
    std::string text;
    for (const Chunk& chunk : must(plan_worker(tables, recording, 0, options)).chunks)
      text += to_string(chunk.path).front();
    return text;
  };
  EXPECT_EQ(paths({}), "mmmm");
  EXPECT_EQ(paths({.path = PathPolicy::kPacked}), "pppp");
  tables.transport = TransportKind::kTcp;
  EXPECT_EQ(paths({}), "pppp");  // every key is below kMinDirectBytes
  EXPECT_NE(paths({.path = PathPolicy::kDirect}).find('d'), std::string::npos);
  tables.transport = TransportKind::kShm;
  EXPECT_EQ(must(plan_worker(tables, recording, 0)).receive_slot_bytes, 0u);

  // Memory that cannot be mapped: names up to export_pack_limit can, for they are packed into export buffers.
  tables.producer_mappable = {1, 0};
  EXPECT_EQ(paths({}), "mmmm");
  tables.export_pack_limit = 256;
  EXPECT_EQ(paths({}), "pmmm");
  tables.export_pack_limit = 255;
  EXPECT_EQ(paths({}), "pppm");
  const auto refused = plan_worker(tables, recording, 0, {.path = PathPolicy::kMapped});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().info().tensor, "embed");
  EXPECT_NE(refused.status().message().find("trainer 1"), std::string::npos) << refused.status().message();
  EXPECT_NE(refused.status().message().find("export_pack_limit"), std::string::npos)
      << refused.status().message();
  for (const TransportKind transport : {TransportKind::kCma, TransportKind::kTcp, TransportKind::kUcx}) {
    tables.transport = transport;
    const auto illegal = plan_worker(tables, recording, 0, {.path = PathPolicy::kMapped});
    ASSERT_FALSE(illegal.ok());
    EXPECT_NE(illegal.status().message().find("path mapped with transport " + std::string(to_string(transport))),
              std::string::npos)
        << illegal.status().message();
  }
}

TEST(PlanWorker, presize_is_a_floor_for_packed_slots) {
  const SmallModel model;
  InitTables tables = make_tables(model.metadata);
  tables.presize = 4096;
  EXPECT_EQ(must(plan_worker(tables, model.record(), 0, unlimited())).receive_slot_bytes, 4096u);
  EXPECT_EQ(must(plan_worker(tables, model.record(), 0)).receive_slot_bytes, 0u);  // all mapped
}

TEST(PlanWorker, case_008_recording_of_other_shapes_is_refused) {
  // The trainer's embedding has 97 rows; the worker was made for 100.
  const std::vector<TensorMeta> baked{meta("embed", {100, 64})};
  RecordingBuilder builder(baked);
  builder.whole("embed", 0, must(builder.fake(0).narrow(0, 50, 50)));
  const auto plan = plan_worker(make_tables({meta("embed", {97, 64})}), builder.build(), 0);
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.status().message().find("'embed' [97, 64]"), std::string::npos) << plan.status().message();
}

TEST(PlanWorker, refusals) {
  const SmallModel model;
  const InitTables tables = make_tables(model.metadata, 1, 2);
  const auto refused = [&](const std::function<void(Recording&)>& spoil, const std::string& part,
                           StatusCode code = StatusCode::kInvalidArgument) {
    Recording recording = model.record();
    spoil(recording);
    const auto plan = plan_worker(tables, recording, 0);
    ASSERT_FALSE(plan.ok()) << part;
    EXPECT_EQ(plan.status().code(), code);
    EXPECT_NE(plan.status().message().find(part), std::string::npos) << plan.status().message();
  };
  EXPECT_NE(plan_worker(tables, model.record(), 2).status().message().find("consumer 2"), std::string::npos);
  EXPECT_FALSE(plan_worker(tables, model.record(), 0, {.chunk_split = 0}).ok());
  EXPECT_FALSE(plan_worker(tables, model.record(), 0, {.pull_split = 0}).ok());
  EXPECT_FALSE(plan_worker({}, model.record(), 0).ok());
  refused([](Recording& r) { r.live.pop_back(); }, "recording of other metadata");
  refused([](Recording& r) { r.live.back() = 99; }, "name 99");
  refused([](Recording& r) { r.live.back() = 0; }, "listed twice");
  refused([](Recording& r) { r.unbaked = {1}; }, "'layers.0.down'");
  refused([](Recording& r) { r.modules[0].baked = false; }, "did not bake");
  refused([](Recording& r) { r.scatters[0].name = 77; }, "name 77");
  refused([](Recording& r) { r.scatters[0].shape = {1}; }, "its shape [1]");
  refused([](Recording& r) { r.scatters[0].slice.regions[0].offset = 1; }, "'embed'");
  refused([](Recording& r) { r.scatters[0].destination.parameter = 99; }, "parameter 99");
  refused([](Recording& r) { r.scatters[0].destination.offset = 1; }, "embed.weight");
  refused([](Recording& r) { r.scatters[0].destination.shape = {3, 3}; }, "shape [3, 3]");
  refused([](Recording& r) { r.scatters[0].destination.stride = {1ll << 62, 1}; }, "embed.weight");
  refused([](Recording& r) { r.parameters[0].module = 50; }, "module 50");
}

TEST(PlanWorker, case_106_a_column_of_many_rows_is_one_region) {
  const std::vector<TensorMeta> metadata{meta("w", {200000, 8})};
  RecordingBuilder builder(metadata);
  builder.whole("w", 0, must(builder.fake(0).narrow(1, 0, 4)));
  const InitTables tables = make_tables(metadata, 1, 2);
  const WorkerPlan plan = must(plan_worker(tables, builder.build(), 0));
  ASSERT_EQ(plan.chunks.size(), 1u);
  ASSERT_EQ(plan.chunks[0].keys.size(), 1u);
  EXPECT_EQ(plan.chunks[0].keys[0].slice.regions.size(), 1u);
  EXPECT_EQ(plan.bytes_planned, 1600000u);
}

TEST(PlanWorker, case_107_the_encoded_plan_is_compact) {
  std::vector<TensorMeta> metadata{meta("columns", {200000, 8})};
  for (int layer = 0; layer < 4; ++layer) {
    for (int expert = 0; expert < 64; ++expert) {
      for (const char* part : {"w1", "w2", "w3"}) {
        metadata.push_back(meta(
            "layers." + std::to_string(layer) + ".experts." + std::to_string(expert) + "." + part, {16, 16}));
      }
    }
  }
  RecordingBuilder builder(metadata);
  builder.whole("columns", 0, must(builder.fake(0).narrow(1, 0, 4)));
  for (std::uint32_t name = 1; name < metadata.size(); ++name)
    builder.whole(metadata[name].name, name, builder.fake(name));
  const WorkerPlan plan = must(plan_worker(make_tables(metadata), builder.build(), 0));
  EXPECT_LT(encode(plan).size(), 1u << 20);
  EXPECT_LT(encode_pulls(pulls_at(plan, 0)).size(), 1u << 20);
}

TEST(PlanWorker, case_108_offsets_above_32_bits) {
  const std::vector<TensorMeta> metadata{meta("w", {5000000000}, DType::kU8)};
  RecordingBuilder builder(metadata);
  const std::uint32_t to = builder.parameter("w", "weight", {3, 4096}, DType::kU8);
  std::int64_t at = 0;
  for (const std::int64_t start : {(1ll << 31) - 100, (1ll << 32) - 100, 5000000000ll - 4096}) {
    builder.copy_at(0, must(builder.fake(0).narrow(0, start, 4096)), to, at);
    at += 4096;
  }
  const WorkerPlan plan = must(plan_worker(make_tables(metadata), builder.build(), 0));
  EXPECT_EQ(plan.chunks.at(0).keys.at(2).slice.regions.at(0).offset, 5000000000ll - 4096);
  EXPECT_EQ(plan.bytes_planned, 3u * 4096);
}

TEST(PlanWorker, case_019_scale_tiles_may_belong_to_two_workers) {
  // Tiles are pulled by block index: neighbours take the same column of the scale tensor.
  const std::vector<TensorMeta> metadata{meta("down.weight_scale_inv", {1, 2}, DType::kF32)};
  const InitTables tables = make_tables(metadata, 1, 4);
  for (std::uint32_t worker = 0; worker < 4; ++worker) {
    RecordingBuilder builder(metadata);
    builder.whole("down", 0, must(builder.fake(0).narrow(1, worker / 2, 1)));
    const Recording recording = builder.build();
    const WorkerPlan plan = must(plan_worker(tables, recording, worker));
    expect_exact(tables, recording, plan);
    EXPECT_EQ(plan.chunks.at(0).keys.at(0).slice.regions.at(0).offset, worker / 2);
  }
}

// Trainers that hold rows as fully sharded data parallel cuts them: ceil(rows / ranks) each, the last ones
// fewer or none.
std::vector<Holding> row_shards(const std::vector<TensorMeta>& metadata, std::uint32_t ranks) {
  auto holdings = holdings_of(metadata, ranks);
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    const std::vector<std::int64_t>& shape = metadata[name].shape;
    const std::int64_t each = (shape[0] + ranks - 1) / ranks;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const std::int64_t first = std::min(shape[0], each * rank);
      Box box{.start = std::vector<std::int64_t>(shape.size(), 0), .size = shape};
      box.start[0] = first;
      box.size[0] = std::min(each, shape[0] - first);
      hold(holdings[rank], name, std::move(box));
    }
  }
  return holdings;
}

TEST(PlanWorker, case_058_a_cut_inside_an_uneven_shard_takes_from_both_sides) {
  // Rows 3, 3, 3, 1 and 1, 1, 1, 0 on four ranks; two workers, cut at row 5, inside the second shard.
  const std::vector<TensorMeta> metadata{meta("w", {10, 2}), meta("v", {3, 2})};
  const auto holdings = row_shards(metadata, 4);
  InitTables tables = make_tables(metadata, 4, 2);
  tables.ownership = must(resolve_ownership(metadata, holdings));
  for (std::uint32_t worker = 0; worker < 2; ++worker) {
    RecordingBuilder builder(metadata);
    builder.whole("w", 0, must(builder.fake(0).narrow(0, 5 * worker, 5)));
    builder.whole("v", 1, builder.fake(1));
    const Recording recording = builder.build();
    const WorkerPlan plan = must(plan_worker(tables, recording, worker));
    WorkerBytes expected, planned;
    ASSERT_EQ(bytes_of_recording(metadata, recording, expected), "");
    ASSERT_EQ(bytes_of_plan(tables, holdings, recording, plan, planned), "");
    EXPECT_EQ(planned, expected);
    std::set<std::uint32_t> of_w;
    for (const Chunk& chunk : plan.chunks) {
      for (const ChunkKey& key : chunk.keys) {
        if (key.name == 0) of_w.insert(chunk.runs.at(0).producer);
      }
    }
    EXPECT_EQ(Ids(of_w.begin(), of_w.end()), worker == 0 ? (Ids{0, 1}) : (Ids{1, 2, 3}));
  }
}

TEST(PlanWorker, case_060_bytes_do_not_depend_on_the_number_of_shards) {
  const std::vector<TensorMeta> metadata{meta("l.0.q", {7, 6}), meta("l.0.o", {6, 10}), meta("l.1.q", {7, 6}),
                                         meta("norm", {5}, DType::kF32)};
  for (std::uint32_t worker = 0; worker < 2; ++worker) {
    RecordingBuilder builder(metadata);
    builder.whole("q0", 0, must(builder.fake(0).narrow(0, worker == 0 ? 0 : 4, worker == 0 ? 4 : 3)));
    builder.whole("o0", 1, must(must(builder.fake(1).narrow(1, 5 * worker, 5)).transpose(0, 1)));
    builder.whole("q1", 2, must(builder.fake(2).narrow(0, worker == 0 ? 0 : 4, worker == 0 ? 4 : 3)));
    builder.whole("norm", 3, builder.fake(3));
    const Recording recording = builder.build();
    WorkerBytes expected;
    ASSERT_EQ(bytes_of_recording(metadata, recording, expected), "");
    for (const std::uint32_t shards : {1, 2, 8, 3}) {
      const auto holdings = row_shards(metadata, shards);
      InitTables tables = make_tables(metadata, shards, 2);
      tables.ownership = must(resolve_ownership(metadata, holdings));
      const WorkerPlan plan = must(plan_worker(tables, recording, worker));
      WorkerBytes planned;
      ASSERT_EQ(bytes_of_plan(tables, holdings, recording, plan, planned), "");
      EXPECT_EQ(planned, expected) << shards << " shards";
      EXPECT_EQ(plan.bytes_planned, plan.bytes_kept) << shards << " shards";
      EXPECT_EQ(encode(plan), encode(must(plan_worker(tables, recording, worker)))) << shards << " shards";
    }
  }
}

TEST(PlanWorker, pure_whatever_the_locale) {
  const SmallModel model;
  const InitTables tables = make_tables(model.metadata, 3, 2);
  const Recording recording = model.record();
  const auto bytes = encode(must(plan_worker(tables, recording, 1)));
  const std::string text = summarise(tables, must(plan_worker(tables, recording, 1)), recording);
  struct Grouped : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\1"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Grouped));
  for (const char* name : {"de_DE.UTF-8", "tr_TR.UTF-8", "C.UTF-8"}) {
    if (std::setlocale(LC_ALL, name) == nullptr) continue;
    EXPECT_EQ(encode(must(plan_worker(tables, recording, 1))), bytes);
    EXPECT_EQ(summarise(tables, must(plan_worker(tables, recording, 1)), recording), text);
  }
  std::setlocale(LC_ALL, "C");
  std::locale::global(before);
}

TEST(Explain, says_who_serves_whom_and_why) {
  const SmallModel model;
  InitTables tables = make_tables(model.metadata, 2, 2);
  tables.ownership = {
      .owner_sets = {{0, 1}, {1}}, .name_owner_class = {0, 1, 1, 1, 1, 0, 0, 0, 0, 0}, .pieces = {}};
  RecordingBuilder other(model.metadata);
  other.whole("norm", 9, other.fake(9));
  const std::vector<Recording> recordings{model.record(), other.build()};
  const std::vector<WorkerPlan> plans{must(plan_worker(tables, recordings[0], 0)),
                                      must(plan_worker(tables, recordings[1], 1))};
  std::string text = explain(tables, "layers.0.gate");
  for (std::size_t w = 0; w < 2; ++w) text += explain(tables, plans[w], recordings[w], "layers.0.gate");
  for (const char* part :
       {"held whole by trainer 1 (owner class 1), gather: ", "gather group 1",
        "worker 0:", "from trainer 1, mapped", "layers.0.gate_up.weight takes BF16 [16, 8]: all of it",
        "why trainer 1: it alone holds it (owner class 1)", "why mapped: every owner's memory can be mapped",
        "worker 1:\n  dead here: other rank"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
  }
  EXPECT_NE(explain(tables, "layers.0.gat").find("  layers.0.gate\n"), std::string::npos);
  EXPECT_EQ(explain(tables, plans[0], recordings[0], "layers.0.gat"), "");
}

TEST(Explain, says_how_owners_publish_and_what_keeps_them_from_being_mapped) {
  const SmallModel model;
  InitTables tables = make_tables(model.metadata, 2);
  tables.producer_resident = {1, 0};
  tables.producer_mappable = {0, 1};
  const Recording recording = model.record();
  const WorkerPlan plan = must(plan_worker(tables, recording, 0));
  EXPECT_NE(explain(tables, "norm")
                .find("held whole by every trainer (2), resident on trainer 0, gather on the others"),
            std::string::npos)
      << explain(tables, "norm");
  const std::string text = explain(tables, plan, recording, "norm");
  EXPECT_NE(text.find("why packed: trainer 0 does not hold 'norm' in memory that can be mapped"),
            std::string::npos)
      << text;
  const std::string summary = summarise(tables, plan, recording);
  for (const char* part :
       {"keeps 2.03 KiB, moves 2.03 KiB per sync in 4 chunks (0 mapped", "resident", "gather"})
    EXPECT_NE(summary.find(part), std::string::npos) << part << " in:\n" << summary;
}

TEST(Explain, lists_pieces) {
  const std::vector<TensorMeta> metadata{meta("w", {4, 4})};
  InitTables tables = make_tables(metadata, 2);
  tables.ownership = {.owner_sets = {{0}, {1}},
                      .name_owner_class = {-1},
                      .pieces = {{0, Box{{0, 0}, {3, 4}}, 0}, {0, Box{{3, 0}, {1, 4}}, 1}}};
  RecordingBuilder builder(metadata);
  builder.whole("w", 0, builder.fake(0));
  const Recording recording = builder.build();
  const WorkerPlan plan = must(plan_worker(tables, recording, 0));
  expect_exact(tables, recording, plan);
  const std::string text = explain(tables, "w") + explain(tables, plan, recording, "w");
  for (const char* part :
       {"piece [0:3, 0:4] held by trainer 0", "piece [3:4, 0:4] held by trainer 1", "from trainer 1"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
  }
}

}  // namespace
}  // namespace shardpull
