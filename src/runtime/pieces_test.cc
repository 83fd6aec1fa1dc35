// Fleets whose trainers hold pieces. Goal: whatever boxes the ranks hold, however they lie in memory,
// gathered or in place, mapped or packed, each worker ends with exactly the bytes of the whole tensors.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"
#include "runtime/fleet_testing.h"

namespace shardpull {
namespace {

using fleet_testing::box;
using fleet_testing::cut;
using fleet_testing::expect_exact;
using fleet_testing::FleetOutcome;
using fleet_testing::FleetSpec;
using fleet_testing::Lie;
using fleet_testing::ModelSpec;
using fleet_testing::ModuleSpec;
using fleet_testing::RankSpec;
using fleet_testing::run_fleet;
using fleet_testing::sharded;
using fleet_testing::tensor_parallel;

// A small model: matrices of odd sizes, vectors, a scalar, several dtypes, groups of one and of several
// names.
std::vector<TensorMeta> small_model() {
  std::vector<TensorMeta> metadata{{"embed.weight", DType::kBF16, {24, 12}}};
  for (int layer = 0; layer < 3; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    metadata.push_back({prefix + "down.weight", DType::kBF16, {12, 10}});
    metadata.push_back({prefix + "norm.weight", DType::kF32, {7}});
    metadata.push_back({prefix + "scale", DType::kF32, {}});
    metadata.push_back({prefix + "up.weight", DType::kF8E4M3, {10, 12}});
  }
  metadata.push_back({"norm.weight", DType::kF32, {12}});
  return metadata;
}

std::vector<ModelSpec> workers_of(const std::vector<TensorMeta>& metadata, std::uint32_t tp,
                                  std::uint32_t replicas = 1, std::size_t dim = 0) {
  std::vector<ModelSpec> workers;
  for (std::uint32_t worker = 0; worker < tp * replicas; ++worker)
    workers.push_back(tensor_parallel(metadata, worker % tp, tp, dim));
  return workers;
}

struct Mode {
  const char* name;
  bool resident;
  bool engine_memory;
  PathChoice path;
};
// Every combination that a fleet on one host can run.
constexpr Mode kModes[] = {{"gather mapped", false, true, PathChoice::kMapped},
                           {"gather packed", false, true, PathChoice::kPacked},
                           {"gather foreign auto", false, false, PathChoice::kAuto},
                           {"resident mapped", true, true, PathChoice::kMapped},
                           {"resident packed", true, true, PathChoice::kPacked},
                           {"resident foreign auto", true, false, PathChoice::kAuto}};

void set_mode(FleetSpec& spec, const Mode& mode) {
  for (RankSpec& rank : spec.ranks) {
    rank.resident = mode.resident;
    rank.engine_memory = mode.engine_memory;
  }
  spec.worker_options = [path = mode.path, given = spec.worker_options](std::uint32_t worker,
                                                                        WorkerOptions& options) {
    if (given) given(worker, options);
    options.path = path;
  };
}

void expect_exact_in_every_mode(const FleetSpec& given) {
  for (const Mode& mode : kModes) {
    SCOPED_TRACE(mode.name);
    FleetSpec spec = given;
    set_mode(spec, mode);
    const FleetOutcome outcome = expect_exact(spec);
    const bool packs =
        std::any_of(outcome.reports.begin(), outcome.reports.end(), [](const SyncReport& report) {
          return std::any_of(report.ranks.begin(), report.ranks.end(),
                             [](const RankReport& rank) { return rank.packs != 0; });
        });
    if (mode.path != PathChoice::kAuto) {
      EXPECT_EQ(packs, mode.path == PathChoice::kPacked);
    }
    for (const SyncReport& report : outcome.reports) {
      for (const RankReport& rank : report.ranks) {
        if (mode.resident) {
          EXPECT_EQ(rank.export_bytes, 0u);
        }
      }
    }
    for (const std::uint64_t bytes : outcome.engine_bytes) {
      if (mode.resident && mode.path == PathChoice::kMapped) {
        EXPECT_EQ(bytes, 0u);
      }
    }
  }
}

TEST(Pieces, uneven_rows_in_every_mode) {
  FleetSpec spec;
  spec.metadata = small_model();
  spec.ranks = sharded(spec.metadata, 3);
  spec.workers = workers_of(spec.metadata, 2);
  expect_exact_in_every_mode(spec);
}

TEST(Pieces, columns_in_every_mode_and_lie) {
  for (const Lie lie : {Lie::kRowMajor, Lie::kColumnMajor, Lie::kPadded}) {
    SCOPED_TRACE(static_cast<int>(lie));
    FleetSpec spec;
    spec.metadata = small_model();
    spec.ranks = sharded(spec.metadata, 3, 1);
    for (RankSpec& rank : spec.ranks) rank.lie = lie;
    spec.workers = workers_of(spec.metadata, 2);
    spec.steps = {{0}, {1}};
    expect_exact_in_every_mode(spec);
  }
}

// Goal: shards that do not come out even, one of them empty, and a worker's cut inside a shard.
TEST(Pieces, case_058_uneven_and_empty_shards_with_a_cut_inside_one) {
  FleetSpec spec;
  spec.metadata = {{"a.weight", DType::kBF16, {10, 2}},
                   {"b.weight", DType::kBF16, {3, 2}},
                   {"c.weight", DType::kF32, {4}}};
  spec.ranks = sharded(spec.metadata, 4);
  const auto rows_of = [&](std::uint32_t rank, std::uint32_t name) {
    for (const Piece& piece : spec.ranks[rank].pieces) {
      if (piece.name == name) return piece.box.size[0];
    }
    return std::int64_t{0};
  };
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(rows_of(rank, 0), (std::vector<std::int64_t>{3, 3, 3, 1}[rank]));
    EXPECT_EQ(rows_of(rank, 1), (std::vector<std::int64_t>{1, 1, 1, 0}[rank]));
  }
  spec.workers = workers_of(spec.metadata, 2);
  EXPECT_EQ(spec.workers[1][0].feeds[0].part.start[0], 5);
  expect_exact_in_every_mode(spec);
}

// Goal: the number of shards makes no difference to any byte, and unchanged weights stay as they are.
TEST(Pieces, case_060_one_hash_for_every_shard_count_and_sync) {
  std::vector<std::uint64_t> hashes;
  for (const std::uint32_t fsdp : {1u, 2u, 8u, 3u}) {
    for (const bool resident : {false, true}) {
      SCOPED_TRACE(std::to_string(fsdp) + (resident ? " resident" : " gather"));
      FleetSpec spec;
      spec.metadata = small_model();
      spec.ranks = sharded(spec.metadata, fsdp);
      spec.ranks.resize(fsdp);
      for (std::uint32_t rank = 0; rank < fsdp; ++rank) spec.ranks[rank].resident = resident;
      spec.workers = workers_of(spec.metadata, 2);
      spec.steps.assign(5, {7});
      const FleetOutcome outcome = expect_exact(spec);
      // All five syncs have the same version, so that their hashes add up in the first one.
      hashes.push_back(outcome.hashes[0]);
    }
  }
  EXPECT_EQ(std::count(hashes.begin(), hashes.end(), hashes[0]), 8);
}

// FSDP inside TP: rank (t, f) holds column block t, of it row block f; norms are replicated over everybody.
TEST(Pieces, two_level_mesh) {
  FleetSpec spec;
  spec.metadata = small_model();
  const std::uint32_t tp = 2, fsdp = 2;
  spec.ranks.resize(tp * fsdp);
  for (std::uint32_t t = 0; t < tp; ++t) {
    for (std::uint32_t f = 0; f < fsdp; ++f) {
      RankSpec& rank = spec.ranks[t * fsdp + f];
      for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) {
        const TensorMeta& meta = spec.metadata[name];
        if (meta.shape.size() < 2) {
          rank.whole.push_back(name);
          continue;
        }
        const std::int64_t rows = (meta.shape[0] + 1) / 3, columns = meta.shape[1] / 2;  // uneven rows
        Box part = f == 0 ? cut(meta, 0, 0, rows) : cut(meta, 0, rows, meta.shape[0] - rows);
        part.start[1] = t * columns;
        part.size[1] = columns;
        rank.pieces.push_back({name, part, 0});
      }
    }
  }
  spec.workers = workers_of(spec.metadata, 2);
  expect_exact_in_every_mode(spec);
}

// An expert stack as one tensor [E, out, in], cut by experts over ranks; workers keep experts of their own,
// and parts of experts transposed.
TEST(Pieces, expert_stacks_cut_by_expert) {
  FleetSpec spec;
  spec.metadata = {{"layers.0.experts.w13", DType::kBF16, {6, 8, 10}},
                   {"layers.0.experts.w2", DType::kBF16, {6, 10, 4}},
                   {"layers.1.experts.w13", DType::kBF16, {6, 8, 10}}};
  spec.ranks = sharded(spec.metadata, 4);  // 2, 2, 2, 0 experts
  spec.ranks.resize(3);
  for (std::uint32_t worker = 0; worker < 2; ++worker) {
    ModelSpec model;
    for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) {
      const TensorMeta& meta = spec.metadata[name];
      ModuleSpec module{meta.name, meta.dtype, {3, meta.shape[1] / 2, meta.shape[2]}, {}, {}};
      Box part = cut(meta, 0, worker * 3, 3);
      part.start[1] = meta.shape[1] / 2;
      part.size[1] = meta.shape[1] / 2;
      module.feeds.push_back({name, part, {0, 0, 0}, false});
      model.push_back(module);
    }
    spec.workers.push_back(model);
  }
  expect_exact_in_every_mode(spec);
}

// Goal: what several ranks hold may be taken from any of them; together it is everything once.
TEST(Pieces, overlapping_boxes_of_several_ranks) {
  FleetSpec spec;
  spec.metadata = small_model();
  spec.ranks.resize(3);
  for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) {
    const TensorMeta& meta = spec.metadata[name];
    if (meta.shape.size() < 2) {
      spec.ranks[name % 3].whole.push_back(name);
      continue;
    }
    const std::int64_t rows = meta.shape[0], columns = meta.shape[1];
    if (name % 2 == 0)
      spec.ranks[0].whole.push_back(name);  // whole here, corners elsewhere
    else
      spec.ranks[0].pieces.push_back({name, box({0, 0}, {rows - 2, columns}), 0});
    spec.ranks[1].pieces.push_back({name, box({3, 1}, {rows - 3, columns - 1}), 0});
    spec.ranks[1].pieces.push_back({name, box({rows - 3, 0}, {3, 4}), 0});
    spec.ranks[2].pieces.push_back({name, box({2, 0}, {2, columns}), 0});
  }
  for (RankSpec& rank : spec.ranks) rank.lie = Lie::kPadded;
  spec.workers = workers_of(spec.metadata, 2);
  expect_exact_in_every_mode(spec);
}

// Random boxes around a base of rows, random windows of workers, some transposed or strided: seeds that once
// failed would be listed here.
TEST(Pieces, random_boxes_and_windows) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const auto below = [&](std::int64_t bound) {
      return static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(bound)));
    };
    FleetSpec spec;
    const std::vector<DType> dtypes{DType::kBF16, DType::kF32, DType::kU8, DType::kI64};
    for (int name = 0; name < 5; ++name) {
      spec.metadata.push_back({"layers." + std::to_string(name / 2) + ".w" + std::to_string(name),
                               dtypes[random.below(dtypes.size())],
                               {2 + below(7), 2 + below(7)}});
    }
    const auto random_box = [&](const TensorMeta& meta) {
      Box part;
      for (const std::int64_t size : meta.shape) {
        part.start.push_back(below(size));
        part.size.push_back(1 + below(size - part.start.back()));
      }
      return part;
    };
    const auto ranks = static_cast<std::uint32_t>(1 + random.below(3));
    spec.ranks = sharded(spec.metadata, ranks, random.below(2));
    for (RankSpec& rank : spec.ranks) {
      for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) {
        if (random.chance(0.4)) rank.pieces.push_back({name, random_box(spec.metadata[name]), 0});
      }
      rank.lie = static_cast<Lie>(random.below(3));
      rank.resident = random.chance(0.5);
      rank.engine_memory = random.chance(0.6);
    }
    std::erase_if(spec.ranks, [](const RankSpec& rank) { return rank.pieces.empty(); });
    const auto workers = static_cast<std::uint32_t>(1 + random.below(2));
    for (std::uint32_t worker = 0; worker < workers; ++worker) {
      ModelSpec model;
      for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) {
        if (random.chance(0.2)) continue;
        const TensorMeta& meta = spec.metadata[name];
        const Box part = random_box(meta);
        const bool transposed = random.chance(0.3);
        std::vector<std::int64_t> shape = part.size;
        if (transposed) std::swap(shape[0], shape[1]);
        std::vector<std::int64_t> stride;
        if (random.chance(0.3)) stride = {shape[1] + 1 + below(3), 1};
        model.push_back({meta.name, meta.dtype, shape, stride, {{name, part, {0, 0}, transposed}}});
      }
      spec.workers.push_back(model);
    }
    if (std::all_of(spec.workers.begin(), spec.workers.end(), [](const auto& m) { return m.empty(); }))
      spec.workers[0] = tensor_parallel(spec.metadata, 0, 1);
    spec.steps = {{0}, {1}};
    const auto max_chunk = static_cast<std::uint64_t>(below(3)) * 64;
    const auto split = static_cast<std::uint32_t>(1 + random.below(3));
    const auto pulls = static_cast<std::uint32_t>(1 + random.below(3));
    spec.worker_options = [=](std::uint32_t, WorkerOptions& options) {
      options.max_chunk_bytes = max_chunk;
      options.chunk_split = split;
      options.pull_split = pulls;
    };
    const std::uint64_t limit = random.chance(0.5) ? 40 : 64 << 20;
    spec.trainer_options = [=](std::uint32_t, TrainerOptions& options) {
      options.export_pack_limit_bytes = limit;
    };
    expect_exact(spec);
  }
}

// Sub-byte elements: two to a byte. Boxes on byte boundaries are served like any other; others are refused.
TEST(Pieces, four_bit_elements_on_byte_boundaries) {
  FleetSpec spec;
  spec.metadata = {{"layers.0.a", DType::kF4, {6, 12}}, {"layers.0.b", DType::kF4, {20}}};
  for (const std::size_t dim : {0, 1}) {
    spec.ranks = sharded(spec.metadata, 2, dim);
    if (dim == 1) {
      spec.ranks[0].whole.clear();
      spec.ranks[0].pieces.push_back({1, box({0}, {6}), 0});
      spec.ranks[1].pieces.push_back({1, box({6}, {14}), 0});
      spec.ranks[1].pieces.push_back({0, box({1, 2}, {3, 4}), 0});  // overlaps both
      spec.ranks[1].lie = Lie::kPadded;
    }
    spec.workers = workers_of(spec.metadata, 2, 1, 1);
    spec.workers[0][1] = {"layers.0.b", DType::kF4, {10}, {}, {{1, box({4}, {10}), {0}, false}}};
    expect_exact_in_every_mode(spec);
  }
  spec.ranks = sharded(spec.metadata, 1);
  spec.ranks[0].pieces.push_back({0, box({0, 3}, {6, 4}), 0});
  spec.workers = workers_of(spec.metadata, 1);
  spec.trainer_options = [](std::uint32_t, TrainerOptions& options) {
    options.fleet.connect_timeout_ms = 200;
  };
  spec.worker_options = [](std::uint32_t, WorkerOptions& options) { options.fleet.connect_timeout_ms = 200; };
  const FleetOutcome refused = run_fleet(spec);
  EXPECT_NE(refused.inits[0].message().find("layers.0.a begins or ends within a byte of F4"),
            std::string::npos)
      << refused.inits[0].to_string();
}

}  // namespace
}  // namespace shardpull
