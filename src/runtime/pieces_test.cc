// Fleets whose trainers hold pieces. Goal: whatever boxes the ranks hold, however they lie in memory,
// gathered or in place, mapped or packed, each worker ends with exactly the bytes of the whole tensors.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
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

// Goal: copies that were compiled for one way of lying are not run on another.
TEST(Pieces, tensors_that_lie_another_way_in_every_sync) {
  FleetSpec spec;
  spec.metadata = small_model();
  spec.ranks = sharded(spec.metadata, 2);
  for (RankSpec& rank : spec.ranks) rank.lie = Lie::kRestless;
  spec.workers = workers_of(spec.metadata, 2);
  spec.steps = {{0}, {1}, {2}, {3, {"layers.*"}}, {4, {"layers.*"}}, {5}};
  for (const std::uint64_t limit : {std::uint64_t{0}, std::uint64_t{64} << 20}) {
    spec.trainer_options = [limit](std::uint32_t, TrainerOptions& options) {
      options.export_pack_limit_bytes = limit;
    };
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
    const std::string some = spec.metadata[random.below(5)].name;
    spec.steps = {{0}, {1, {"layers." + std::to_string(random.below(3)) + ".*", some}}, {2, {some}}, {3}};
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

// Pulls of all ranks in one sync.
std::uint64_t packs_of(const SyncReport& report) {
  std::uint64_t packs = 0;
  for (const RankReport& rank : report.ranks) packs += rank.packs;
  return packs;
}

// Goal: workers of different replicas that take the same share a producer's serve slots: it packs once for
// all of them, however many there are.
TEST(Pieces, a_producer_packs_once_for_all_replicas) {
  std::vector<std::uint64_t> packs, bytes;
  for (const std::uint32_t replicas : {1u, 2u, 3u}) {
    SCOPED_TRACE(replicas);
    FleetSpec spec;
    spec.metadata = small_model();
    spec.ranks = sharded(spec.metadata, 2);
    spec.workers = workers_of(spec.metadata, 2, replicas);
    spec.replicas = replicas;
    set_mode(spec, kModes[1]);
    const FleetOutcome outcome = expect_exact(spec);
    packs.push_back(packs_of(outcome.reports[0]));
    std::uint64_t packed = 0, moved = 0;
    for (const SyncReport& report : outcome.reports) EXPECT_EQ(packs_of(report), packs.back());
    for (const RankReport& rank : outcome.reports[0].ranks) packed += rank.packed_bytes;
    for (const WorkerReport& worker : outcome.reports[0].workers) moved += worker.bytes_moved;
    EXPECT_EQ(moved, replicas * packed);
    bytes.push_back(packed);
  }
  EXPECT_EQ(packs, (std::vector<std::uint64_t>(3, packs[0])));
  EXPECT_EQ(bytes, (std::vector<std::uint64_t>(3, bytes[0])));

  // Without sharing, every replica has slots of its own.
  FleetSpec spec;
  spec.metadata = small_model();
  spec.ranks = sharded(spec.metadata, 2);
  spec.workers = workers_of(spec.metadata, 2, 2);
  spec.replicas = 2;
  set_mode(spec, kModes[1]);
  spec.trainer_options = [](std::uint32_t, TrainerOptions& options) { options.workers_per_replica = 4; };
  EXPECT_EQ(packs_of(expect_exact(spec).reports[0]), 2 * packs[0]);
}

// Goal: chunks cut finer, and pulled from several producers at once, are the same bytes in more pulls.
TEST(Pieces, chunk_split_and_pull_split) {
  FleetSpec spec;
  spec.metadata = small_model();
  spec.ranks.resize(4);
  for (RankSpec& rank : spec.ranks) {
    for (std::uint32_t name = 0; name < spec.metadata.size(); ++name) rank.whole.push_back(name);
  }
  spec.workers = workers_of(spec.metadata, 1);
  std::vector<std::uint64_t> packs;
  for (const auto& [chunk_split, pull_split] : {std::pair(1u, 1u), {3u, 1u}, {1u, 2u}, {1u, 3u}, {3u, 2u}}) {
    SCOPED_TRACE(std::to_string(chunk_split) + " " + std::to_string(pull_split));
    spec.worker_options = [chunk_split = chunk_split, pull_split = pull_split](std::uint32_t,
                                                                               WorkerOptions& options) {
      options.chunk_split = chunk_split;
      options.pull_split = pull_split;
    };
    expect_exact_in_every_mode(spec);
    set_mode(spec, kModes[1]);
    packs.push_back(packs_of(expect_exact(spec).reports[0]));
  }
  // Five groups, three of them of four names; the others of one, which cannot be split.
  EXPECT_EQ(packs[0], 5u);
  EXPECT_EQ(packs[1], 2 + 3 * 3u);
  EXPECT_EQ(packs[2], 2 + 3 * 2u);
  EXPECT_EQ(packs[3], 2 + 3 * 3u);
  EXPECT_GT(packs[4], packs[1]);

  for (const bool chunk : {true, false}) {
    spec.worker_options = [chunk](std::uint32_t, WorkerOptions& options) {
      (chunk ? options.chunk_split : options.pull_split) = 0;
    };
    spec.trainer_options = [](std::uint32_t, TrainerOptions& options) {
      options.fleet.connect_timeout_ms = 300;
    };
    const FleetOutcome refused = run_fleet(spec);
    EXPECT_NE(refused.connects[0].message().find((chunk ? std::string("chunk") : std::string("pull")) +
                                                 "_split must be >= 1 (it is 0)"),
              std::string::npos)
        << refused.connects[0].to_string();
  }
}

// Goal: ranks of one fleet may publish differently, and a rank's own choice overrides its source's.
TEST(Pieces, ranks_of_one_fleet_publish_in_different_modes) {
  FleetSpec spec;
  spec.metadata = small_model();
  spec.ranks = sharded(spec.metadata, 4);
  spec.ranks[0].resident = true;                                                // in place
  spec.ranks[1].resident = true, spec.ranks[1].publish = PublishMode::kGather;  // credit all the same
  spec.ranks[2].resident = true, spec.ranks[2].publish = PublishMode::kResident;
  spec.ranks[2].engine_memory = false;
  spec.workers = workers_of(spec.metadata, 2);
  spec.trainer_options = [](std::uint32_t, TrainerOptions& options) { options.lookahead = 0; };
  const FleetOutcome outcome = expect_exact(spec);
  std::vector<std::uint64_t> held;
  for (const RankSpec& rank : spec.ranks) {
    std::uint64_t bytes = 0;
    for (const Piece& piece : rank.pieces) {
      std::int64_t elements = 1;
      for (const std::int64_t size : piece.box.size) elements *= size;
      bytes += *bytes_of(spec.metadata[piece.name].dtype, elements);
    }
    for (const std::uint32_t name : rank.whole) bytes += *bytes_of(spec.metadata[name].dtype, 1);
    held.push_back(bytes);
  }
  for (const SyncReport& report : outcome.reports) {
    // A resident rank copies nothing and has everything published at the end; the others export all (it is
    // small) and hold one group.
    EXPECT_EQ(report.ranks[0].export_bytes, 0u);
    EXPECT_EQ(report.ranks[2].export_bytes, 0u);
    EXPECT_EQ(report.ranks[0].peak_resident_bytes, held[0]);
    EXPECT_EQ(report.ranks[2].peak_resident_bytes, held[2]);
    EXPECT_EQ(report.ranks[1].export_bytes, held[1]);
    EXPECT_EQ(report.ranks[3].export_bytes, held[3]);
    EXPECT_LT(report.ranks[1].peak_resident_bytes, held[1]);
  }
  EXPECT_EQ(outcome.peak_groups[1], 1);
  EXPECT_EQ(outcome.peak_groups[3], 1);
  EXPECT_EQ(outcome.engine_bytes[0], 0u);
}

// What describe refuses, by its message.
TEST(Pieces, holdings_that_make_no_sense_are_refused_naming_the_tensor) {
  const auto refused = [](const std::string& message, auto change) {
    FleetSpec spec;
    spec.metadata = small_model();
    spec.ranks = sharded(spec.metadata, 1);
    change(spec.ranks[0]);
    spec.workers = workers_of(spec.metadata, 1);
    spec.trainer_options = [](std::uint32_t, TrainerOptions& options) {
      options.fleet.connect_timeout_ms = 300;
    };
    spec.worker_options = [](std::uint32_t, WorkerOptions& options) {
      options.fleet.connect_timeout_ms = 300;
    };
    const FleetOutcome outcome = run_fleet(spec);
    EXPECT_NE(outcome.inits[0].message().find(message), std::string::npos)
        << message << " | " << outcome.inits[0].to_string();
    EXPECT_FALSE(outcome.connects[0].ok());
  };
  refused("embed.weight is held whole and in pieces", [](RankSpec& rank) { rank.whole.push_back(0); });
  refused("a piece of embed.weight is empty: [4:4, 0:12]; leave it out",
          [](RankSpec& rank) { rank.pieces[0].box = box({4, 0}, {0, 12}); });
  refused("a piece of embed.weight: box [4:25, 0:12] does not lie within shape [24, 12] in dim 0",
          [](RankSpec& rank) { rank.pieces[0].box = box({4, 0}, {21, 12}); });
  refused("nobody holds [20:24, 0:12] of 'embed.weight'",
          [](RankSpec& rank) { rank.pieces[0].box.size[0] = 20; });
  refused("holds a piece of name 14, the model has 14 names",
          [](RankSpec& rank) { rank.pieces[0].name = 14; });
  refused("publish is resident, but the weight source of trainer 0 does not keep its tensors in place",
          [](RankSpec& rank) { rank.publish = PublishMode::kResident; });
  refused("trainer rank 0 holds nothing", [](RankSpec& rank) {
    rank.pieces.clear();
    rank.whole.clear();
  });
}

// A worker that is given a recording runs no loader; one of another model is refused.
TEST(Pieces, a_given_recording_replaces_the_bake) {
  FleetSpec spec;
  spec.metadata = small_model();
  spec.ranks = sharded(spec.metadata, 2);
  spec.workers = workers_of(spec.metadata, 2);
  std::vector<std::shared_ptr<const Recording>> recordings;
  for (const ModelSpec& worker : spec.workers) {
    fleet_testing::BoxModel model(spec.metadata, worker);
    auto baked = bake(model, spec.metadata);
    ASSERT_TRUE(baked.ok()) << baked.status().to_string();
    recordings.push_back(std::make_shared<const Recording>(std::move(*baked)));
  }
  spec.worker_options = [&](std::uint32_t worker, WorkerOptions& options) {
    options.recording = recordings[worker];
  };
  const FleetOutcome given = expect_exact(spec);
  spec.worker_options = nullptr;
  EXPECT_EQ(given.hashes, expect_exact(spec).hashes);

  const auto refused = [&](const std::string& message, const std::function<void(Recording&)>& change) {
    auto other = std::make_shared<Recording>(*recordings[1]);
    change(*other);
    FleetSpec broken = spec;
    broken.worker_options = [&](std::uint32_t worker, WorkerOptions& options) {
      options.recording = worker == 1 ? other : recordings[0];
      options.fleet.connect_timeout_ms = 2'000;
    };
    broken.trainer_options = [](std::uint32_t, TrainerOptions& options) {
      options.fleet.connect_timeout_ms = 2'000;
    };
    const FleetOutcome outcome = run_fleet(broken);
    EXPECT_NE(outcome.connects[1].message().find("the recording is of another model: " + message),
              std::string::npos)
        << message << " | " << outcome.connects[1].to_string();
  };
  refused("it is not one of the names, dtypes and shapes that the trainer has",
          [](Recording& recording) { recording.metadata.front() = 'x'; });
  refused("module 1 is 'other', the model's is 'layers.0.down.weight'",
          [](Recording& recording) { recording.modules[1].name = "other"; });
  refused("it has no module 'norm.weight'", [](Recording& recording) {
    recording.modules.pop_back();
    recording.parameters.pop_back();
  });
  refused("the model has no module 'more'",
          [](Recording& recording) { recording.modules.push_back({"more", "Box", false, false}); });
  refused("parameter 'embed.weight.weight' is F16 [12, 12] stride [12, 1], the model's is BF16 [12, 12]",
          [](Recording& recording) { recording.parameters[0].dtype = DType::kF16; });
  refused("parameter 'embed.weight.weight' is BF16 [24, 12] stride [12, 1], the model's is BF16 [12, 12]",
          [](Recording& recording) { recording.parameters[0].shape = {24, 12}; });
  refused("it has no parameter 'embed.weight.weight' where the model has it",
          [](Recording& recording) { recording.parameters[0].name = "bias"; });
  refused("the model has no parameter 'bias' in module 'norm.weight'", [](Recording& recording) {
    recording.parameters.push_back(recording.parameters.back());
    recording.parameters.back().name = "bias";
  });
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
