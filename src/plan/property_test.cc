// Goal: whatever the groups, owners, pieces, chains and splits, a plan moves every element once, from a legal
// owner, in chunks within the limit, with the same layout on both sides, and signals every group once.
// Seeded: a failure names its problem.
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "base/random.h"
#include "plan/boxes.h"
#include "plan/plan.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using namespace plan_testing;
using Ids = std::vector<std::uint32_t>;

struct Problem {
  InitTables tables;
  std::vector<Holding> holdings;
  std::vector<Recording> recordings;  // of the workers of one replica
  PlanOptions options;
};

std::vector<TensorMeta> random_metadata(Random& random) {
  std::vector<TensorMeta> metadata;
  const std::int64_t groups = random.between(1, 4);
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::string prefix =
        random.below(3) == 0 ? "run" + std::to_string(g) + "_." : "l." + std::to_string(g) + ".";
    for (std::int64_t n = random.between(1, 4); n > 0; --n) {
      std::vector<std::int64_t> shape(random.below(4));
      for (auto& size : shape) size = random.below(20) == 0 ? 0 : random.between(1, 6);
      const DType dtypes[] = {DType::kU8, DType::kBF16, DType::kF32};
      metadata.push_back(meta(prefix + "w" + std::to_string(n), shape, dtypes[random.below(3)]));
    }
  }
  return metadata;
}

Box random_box(Random& random, const std::vector<std::int64_t>& shape) {
  Box box{.start = shape, .size = shape};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    box.start[d] = random.between(0, shape[d]);
    box.size[d] = random.between(0, shape[d] - box.start[d]);
  }
  return box;
}

// Cuts every dim now and then, gives each cell one or two owners, and declares some boxes more.
void hold_in_pieces(Random& random, const TensorMeta& meta, std::uint32_t name,
                    std::vector<Holding>& holdings) {
  std::vector<Box> cells{Box{}};
  for (const std::int64_t size : meta.shape) {
    std::vector<Box> next;
    std::int64_t start = 0;
    do {
      const std::int64_t part = random.below(2) == 0 ? size - start : random.between(0, size - start);
      for (Box cell : cells) {
        cell.start.push_back(start);
        cell.size.push_back(part);
        next.push_back(std::move(cell));
      }
      start += part;
    } while (start < size);
    cells = std::move(next);
  }
  for (const Box& cell : cells) {
    hold(holdings[random.below(holdings.size())], name, cell);
    if (random.below(4) == 0) hold(holdings[random.below(holdings.size())], name, cell);
  }
  if (!meta.shape.empty() && random.below(3) == 0)
    hold(holdings[random.below(holdings.size())], name, random_box(random, meta.shape));
}

Tensor random_slice(Random& random, Tensor tensor) {
  for (std::int64_t steps = random.between(0, 3); steps > 0; --steps) {
    if (tensor.dim() == 0) break;
    const std::int64_t d = random.between(0, tensor.dim() - 1), size = tensor.size(d);
    switch (random.below(5)) {
      case 0: {
        const std::int64_t start = random.between(0, size);
        tensor = must(tensor.narrow(d, start, random.between(0, size - start)));
        break;
      }
      case 1:
        tensor = must(tensor.transpose(d, random.between(0, tensor.dim() - 1)));
        break;
      case 2:
        tensor = must(tensor.index(
            {IndexSlice{.start = std::nullopt, .stop = std::nullopt, .step = random.between(1, 3)}}));
        break;
      case 3:
        if (auto flat = tensor.reshape({tensor.numel()}); flat.ok() && flat->slice().ok()) tensor = *flat;
        break;
      default:
        if (size > 0) tensor = must(tensor.select(d, random.between(0, size - 1)));
    }
  }
  return tensor;
}

void record_copy(Random& random, RecordingBuilder& builder, std::uint32_t name, const Tensor& source,
                 const DType dtype) {
  // A window with permuted strides and gaps, in a parameter of its own.
  std::vector<std::int64_t> stride(source.shape().size(), 1);
  std::vector<std::size_t> order(stride.size());
  for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
  for (std::size_t d = order.size(); d > 1 && random.below(2) == 0; --d)
    std::swap(order[d - 1], order[random.below(d)]);
  const std::int64_t offset = random.between(0, 3);
  std::int64_t step = random.between(1, 2), extent = offset + 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::int64_t size = source.shape()[order[i]];
    stride[order[i]] = step;
    extent += std::max<std::int64_t>(size - 1, 0) * step;
    step = step * std::max<std::int64_t>(size, 1) + random.between(0, 1);
  }
  const std::string module = "m" + std::to_string(random.below(5));
  builder.copy(name, source, builder.parameter(module, "p", {extent}, dtype), offset, source.shape(), stride);
}

Recording random_recording(Random& random, const std::vector<TensorMeta>& metadata) {
  RecordingBuilder builder(metadata);
  Ids order(metadata.size());
  for (std::uint32_t name = 0; name < order.size(); ++name) order[name] = name;
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[random.below(i)]);  // loaders read in any order
  for (const std::uint32_t name : order) {
    if (random.below(5) == 0) continue;
    const Tensor source = random_slice(random, builder.fake(name));
    record_copy(random, builder, name, source, metadata[name].dtype);
    while (random.below(4) == 0) {
      record_copy(random, builder, name,
                  random.below(2) == 0 ? source : random_slice(random, builder.fake(name)),
                  metadata[name].dtype);
    }
  }
  if (random.below(4) == 0) builder.fill(builder.parameter("filled", "p", {4}));
  return builder.build();
}

Problem random_problem(std::uint64_t seed) {
  Random random(seed);
  Problem problem;
  const auto producers = static_cast<std::uint32_t>(random.between(1, 6));
  const auto workers = static_cast<std::uint32_t>(random.between(1, 4));
  const auto replicas = static_cast<std::uint32_t>(random.between(1, 3));
  problem.tables = make_tables(random_metadata(random), producers, workers * replicas);
  InitTables& tables = problem.tables;
  tables.num_replicas = replicas;
  tables.ring_depth = static_cast<std::uint32_t>(random.between(1, 4));
  tables.export_pack_limit = random.below(100);
  for (auto& mappable : tables.producer_mappable) mappable = random.below(4) != 0;

  problem.holdings = holdings_of(tables.metadata, producers);
  for (std::uint32_t name = 0; name < tables.metadata.size(); ++name) {
    if (random.below(2) == 0) {
      hold_in_pieces(random, tables.metadata[name], name, problem.holdings);
    } else {
      for (std::int64_t n = random.between(1, producers); n > 0; --n)
        hold(problem.holdings[random.below(producers)], name);
    }
  }
  for (Holding& holding : problem.holdings) {
    const bool nothing = holding.pieces.empty() && std::all_of(holding.whole.begin(), holding.whole.end(),
                                                               [](auto byte) { return byte == 0; });
    if (nothing) hold(holding, 0);
  }
  tables.ownership = must(resolve_ownership(tables.metadata, problem.holdings));
  for (std::uint32_t w = 0; w < workers; ++w)
    problem.recordings.push_back(random_recording(random, tables.metadata));

  const std::uint64_t limits[] = {0, 16, 40, 100, 1000};
  problem.options.max_chunk_bytes = limits[random.below(5)];
  problem.options.chunk_split = static_cast<std::uint32_t>(random.between(1, 3));
  problem.options.pull_split = static_cast<std::uint32_t>(random.between(1, 3));
  problem.options.path = random.below(2) == 0 ? PathPolicy::kAuto : PathPolicy::kPacked;
  problem.options.mapping_available = random.below(2) == 0;
  return problem;
}

// Whether `rank` declared that it holds all of `key`.
bool holds(const Problem& problem, std::uint32_t rank, const ChunkKey& key) {
  const Holding& holding = problem.holdings[rank];
  if ((holding.whole[key.name / 8] >> (key.name % 8) & 1) != 0) return true;
  const std::vector<std::int64_t>& shape = problem.tables.metadata[key.name].shape;
  const Box whole{.start = std::vector<std::int64_t>(shape.size(), 0), .size = shape};
  const Box& box = key.piece == 0 ? whole : problem.tables.ownership.pieces[key.piece - 1].box;
  return std::any_of(holding.pieces.begin(), holding.pieces.end(), [&](const Piece& piece) {
    if (piece.name != key.name) return false;
    return piece.box.whole() || box_intersection(piece.box, box) == box;
  });
}

void check_chunks(const Problem& problem, const Recording& recording, const WorkerPlan& plan) {
  const InitTables& tables = problem.tables;
  const std::vector<std::uint32_t> group_of = group_of_names(tables);
  std::map<std::uint32_t, std::uint32_t> next_seq, last_chunk_of_module;
  std::set<std::uint32_t> materialised, processed;
  std::vector<int> signalled(tables.group_lens.size(), 0);
  std::uint64_t bytes = 0;
  for (const std::uint32_t group : plan.pre_free) ++signalled[group];
  for (const Chunk& chunk : plan.chunks) {
    for (const PlannedScatter& scatter : chunk.scatters) {
      last_chunk_of_module[recording.parameters[scatter.destination.parameter].module] = chunk.chunk_id;
    }
  }
  for (const Chunk& chunk : plan.chunks) {
    ASSERT_TRUE(problem.options.max_chunk_bytes == 0 || chunk.bytes <= problem.options.max_chunk_bytes ||
                chunk.keys.size() == 1);
    for (const ChunkKey& key : chunk.keys) {
      bytes += key.bytes;
      ASSERT_EQ(group_of[key.name], chunk.group);
      for (const std::uint32_t candidate : chunk.candidates) ASSERT_TRUE(holds(problem, candidate, key));
    }
    Ids candidates = chunk.candidates;
    std::sort(candidates.begin(), candidates.end());
    ASSERT_TRUE(chunk.keys.empty() || candidates == tables.ownership.owner_sets.at(chunk.owner_class));
    const Ids block = route_block(candidates, plan.consumer, effective_workers_per_replica(tables));
    std::set<std::uint32_t> serving;
    for (const shardpull::Run& run : chunk.runs) {
      ASSERT_TRUE(std::find(block.begin(), block.end(), run.producer) != block.end());
      ASSERT_TRUE(serving.insert(run.producer).second);
      ASSERT_EQ(run.seq, next_seq[run.producer]++);
    }
    for (const std::uint32_t module : chunk.materialise) ASSERT_TRUE(materialised.insert(module).second);
    for (const PlannedScatter& scatter : chunk.scatters) {
      const std::uint32_t module = recording.parameters[scatter.destination.parameter].module;
      ASSERT_TRUE(materialised.contains(module));
      ASSERT_FALSE(processed.contains(module));
    }
    for (const std::uint32_t module : chunk.post_process) {
      ASSERT_TRUE(processed.insert(module).second);
      const auto last = last_chunk_of_module.find(module);
      ASSERT_EQ(last == last_chunk_of_module.end() ? 0 : last->second, chunk.chunk_id);
    }
    for (const std::uint32_t group : chunk.signal_groups) ++signalled[group];
    ASSERT_TRUE(chunk.path == Path::kPacked || problem.options.mapping_available);
  }
  for (const Chunk& chunk : plan.chunks) {  // nothing is taken from a group after its signal
    for (const Chunk& later : plan.chunks) {
      if (later.chunk_id <= chunk.chunk_id || later.keys.empty()) continue;
      ASSERT_TRUE(std::find(chunk.signal_groups.begin(), chunk.signal_groups.end(), later.group) ==
                  chunk.signal_groups.end());
    }
  }
  ASSERT_EQ(signalled, std::vector<int>(tables.group_lens.size(), 1));
  ASSERT_EQ(materialised, processed);
  ASSERT_EQ(bytes, plan.bytes_planned);
}

void check_both_sides(const Problem& problem, const WorkerPlan& plan) {
  std::size_t runs = 0;
  for (const ProducerPlan& at : plan.producers) {
    const auto pulls = pulls_at(plan, at.producer);
    runs += pulls.size();
    ASSERT_EQ(pulls.size(), at.pulls);
    const auto bytes = encode_pulls(pulls);
    const auto decoded = decode_pulls(bytes.data(), bytes.size());
    ASSERT_TRUE(decoded.ok()) << decoded.status().message();
    ASSERT_EQ(*decoded, pulls);
    ASSERT_EQ(pulls_digest(*decoded, plan.ring_depth), at.digest);
    const Status checked = check_pulls(*decoded, problem.tables, at.producer);
    ASSERT_TRUE(checked.ok()) << checked.message();
    std::uint64_t slot = 0;
    for (const PullDescription& pull : pulls) {
      if (pull.path == Path::kPacked) slot = std::max(slot, pull.bytes);
    }
    ASSERT_EQ(slot, at.serve_slot_bytes);
  }
  std::size_t all = 0;
  for (const Chunk& chunk : plan.chunks) all += chunk.runs.size();
  ASSERT_EQ(runs, all);
}

void check_problem(const Problem& problem) {
  const auto workers = static_cast<std::uint32_t>(problem.recordings.size());
  std::vector<WorkerPlan> plans;
  for (std::uint32_t consumer = 0; consumer < problem.tables.num_consumers; ++consumer) {
    const Recording& recording = problem.recordings[consumer % workers];
    const auto plan = plan_worker(problem.tables, recording, consumer, problem.options);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    if (consumer >= workers) {  // mates of other replicas share slots
      ASSERT_EQ(plan->chunks, plans[consumer % workers].chunks);
      ASSERT_EQ(plan->producers, plans[consumer % workers].producers);
      continue;
    }
    Origins expected, planned;
    ASSERT_EQ(origins_of(recording, expected), "");
    ASSERT_EQ(origins_of(*plan, problem.tables, planned), "");
    ASSERT_EQ(planned, expected);
    ASSERT_NO_FATAL_FAILURE(check_chunks(problem, recording, *plan));
    ASSERT_NO_FATAL_FAILURE(check_both_sides(problem, *plan));
    const auto bytes = encode(*plan);
    const auto decoded = decode_plan(bytes.data(), bytes.size());
    ASSERT_TRUE(decoded.ok()) << decoded.status().message();
    ASSERT_EQ(*decoded, *plan);
    ASSERT_EQ(encode(must(plan_worker(problem.tables, recording, consumer, problem.options))), bytes);
    plans.push_back(*plan);
  }
  const auto bytes = encode_tables(problem.tables);
  const auto tables = decode_tables(bytes.data(), bytes.size());
  ASSERT_TRUE(tables.ok()) << tables.status().message();
  ASSERT_EQ(*tables, problem.tables);
}

TEST(PlanProperties, random_problems) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ASSERT_NO_FATAL_FAILURE(check_problem(random_problem(seed)));
  }
}

RC_GTEST_PROP(PlanProperties, any_seed, (std::uint64_t seed)) {
  check_problem(random_problem(seed));
  RC_ASSERT(!::testing::Test::HasFatalFailure());
}

// All ways to cut a 2-D tensor into at most two by two pieces, against all row or column shares of up to 3
// workers.
TEST(PlanProperties, every_small_layout) {
  for (std::int64_t height = 1; height <= 4; ++height) {
    for (std::int64_t width = 1; width <= 4; ++width) {
      const std::vector<TensorMeta> metadata{meta("w", {height, width})};
      for (std::int64_t row = 0; row < height; ++row) {
        for (std::int64_t column = 0; column < width; ++column) {
          auto holdings = holdings_of(metadata, 2);
          hold(holdings[0], 0, Box{{0, 0}, {row, column}});
          hold(holdings[1], 0, Box{{row, 0}, {height - row, column}});
          hold(holdings[1], 0, Box{{0, column}, {row, width - column}});
          hold(holdings[0], 0, Box{{row, column}, {height - row, width - column}});
          InitTables tables = make_tables(metadata, 2, 3);
          tables.ownership = must(resolve_ownership(metadata, holdings));
          for (std::int64_t workers = 1; workers <= 3; ++workers) {
            for (std::int64_t axis = 0; axis < 2; ++axis) {
              const std::int64_t size = axis == 0 ? height : width;
              for (std::int64_t w = 0; w < workers; ++w) {
                RecordingBuilder builder(metadata);
                const std::int64_t first = size * w / workers, end = size * (w + 1) / workers;
                builder.whole("w", 0, must(builder.fake(0).narrow(axis, first, end - first)));
                const Recording recording = builder.build();
                const WorkerPlan plan = must(plan_worker(tables, recording, static_cast<std::uint32_t>(w)));
                Origins expected, planned;
                ASSERT_EQ(origins_of(recording, expected), "");
                ASSERT_EQ(origins_of(plan, tables, planned), "");
                ASSERT_EQ(planned, expected);
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardpull
