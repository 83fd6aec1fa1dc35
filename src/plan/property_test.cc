// Goal: whatever the groups, owners, pieces, chains and splits, a plan moves every byte once, from a legal
// owner, in chunks within the limit, with the same layout on both sides, and signals every group once to each
// of its owners; and evens out what interchangeable owners serve. Seeded: a failure names its problem.
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
#include "plan/path.h"
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

// Rows as fully sharded data parallel cuts them: ceil(rows / ranks) each, the last ones fewer or none.
void hold_rows(const std::vector<std::uint32_t>& ranks, const Box& of, std::uint32_t name,
               std::vector<Holding>& holdings) {
  const std::int64_t rows = of.size.front(), count = static_cast<std::int64_t>(ranks.size());
  const std::int64_t each = std::max<std::int64_t>(1, (rows + count - 1) / count);
  for (std::int64_t i = 0; i < count; ++i) {
    Box box = of;
    const std::int64_t first = std::min(rows, i * each);
    box.start.front() += first;
    box.size.front() = std::min(each, rows - first);
    hold(holdings[ranks[static_cast<std::size_t>(i)]], name, box);
  }
}

// A mesh of two levels: another dim is cut over the first one, rows over the second. With `copies` the first
// level are replicas of each other.
void hold_in_a_mesh(Random& random, const TensorMeta& meta, std::uint32_t name,
                    std::vector<Holding>& holdings) {
  const auto ranks = static_cast<std::uint32_t>(holdings.size());
  const auto outer = static_cast<std::uint32_t>(random.between(1, ranks)), inner = ranks / outer;
  const bool copies = random.below(3) == 0;
  const std::size_t dim = meta.shape.size() - 1;
  for (std::uint32_t o = 0; o < outer; ++o) {
    Box box{.start = std::vector<std::int64_t>(meta.shape.size(), 0), .size = meta.shape};
    if (!copies && dim > 0) {
      box.start[dim] = meta.shape[dim] * o / outer;
      box.size[dim] = meta.shape[dim] * (o + 1) / outer - box.start[dim];
    }
    Ids row_ranks;
    for (std::uint32_t i = 0; i < inner; ++i) row_ranks.push_back(o * inner + i);
    hold_rows(row_ranks, box, name, holdings);
  }
}

Tensor random_slice(Random& random, Tensor tensor) {
  if (random.below(8) == 0 && tensor.dtype() != DType::kU8 && tensor.dim() > 0)
    tensor = must(tensor.view(DType::kU8));
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

void record_copy(Random& random, RecordingBuilder& builder, std::uint32_t name, const Tensor& source) {
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
  builder.copy(name, source, builder.parameter(module, "p", {extent}, source.dtype()), offset, source.shape(),
               stride);
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
    record_copy(random, builder, name, source);
    while (random.below(4) == 0)
      record_copy(random, builder, name,
                  random.below(2) == 0 ? source : random_slice(random, builder.fake(name)));
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
  for (auto& resident : tables.producer_resident) resident = random.below(3) == 0;

  problem.holdings = holdings_of(tables.metadata, producers);
  for (std::uint32_t name = 0; name < tables.metadata.size(); ++name) {
    const TensorMeta& meta = tables.metadata[name];
    if (random.below(2) == 0) {
      meta.shape.empty() || random.below(2) == 0 ? hold_in_pieces(random, meta, name, problem.holdings)
                                                 : hold_in_a_mesh(random, meta, name, problem.holdings);
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
  problem.options.balance = random.below(3) == 0 ? Balance::kRotation : Balance::kBytes;
  const PathPolicy paths[] = {PathPolicy::kAuto, PathPolicy::kPacked, PathPolicy::kDirect};
  problem.options.path = paths[random.below(3)];
  const TransportKind transports[] = {TransportKind::kShm, TransportKind::kCma, TransportKind::kTcp};
  tables.transport = transports[random.below(3)];
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

// Whoever declared any element of the group, or one of its tensors without elements.
std::vector<Ids> naive_group_owners(const Problem& problem) {
  std::vector<std::set<std::uint32_t>> owners(problem.tables.group_lens.size());
  const std::vector<std::uint32_t> group_of = group_of_names(problem.tables);
  for (const Holding& holding : problem.holdings) {
    for (std::uint32_t name = 0; name < problem.tables.metadata.size(); ++name) {
      if ((holding.whole[name / 8] >> (name % 8) & 1) != 0) owners[group_of[name]].insert(holding.rank);
    }
    for (const Piece& piece : holding.pieces) {
      const bool empty_tensor = *checked_numel(problem.tables.metadata[piece.name].shape) == 0;
      if (piece.box.whole() || !box_empty(piece.box) || empty_tensor)
        owners[group_of[piece.name]].insert(holding.rank);
    }
  }
  std::vector<Ids> out;
  for (const auto& set : owners) out.emplace_back(set.begin(), set.end());
  return out;
}

std::uint64_t naive_bytes_kept(const Recording& recording) {
  std::set<std::pair<std::uint32_t, std::int64_t>> bytes;
  for (const Scatter& scatter : recording.scatters) {
    const std::int64_t width = dtype_bits(scatter.wire_dtype) / 8;
    for (const std::int64_t element : elements_of(scatter.slice)) {
      for (std::int64_t b = 0; b < width; ++b) bytes.emplace(scatter.name, element * width + b);
    }
  }
  return bytes.size();
}

// A chunk above the limit is one key of one row: less cannot be pulled. Seen here for tensors held whole.
bool is_one_row(const Recording& recording, const Chunk& chunk) {
  if (chunk.keys.size() != 1) return false;
  const ChunkKey& key = chunk.keys.front();
  if (key.piece != 0) return true;
  return std::any_of(recording.scatters.begin(), recording.scatters.end(), [&](const Scatter& scatter) {
    if (scatter.name != key.name || scatter.wire_dtype != key.wire_dtype) return false;
    const auto axis =
        std::find_if(scatter.shape.begin(), scatter.shape.end(), [](auto size) { return size > 1; });
    const std::int64_t rows = axis == scatter.shape.end() ? 1 : *axis;
    return scatter.slice.numel() / rows == key.slice.numel();
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
                is_one_row(recording, chunk));
    for (const ChunkKey& key : chunk.keys) {
      bytes += key.bytes;
      ASSERT_EQ(group_of[key.name], chunk.group);
      for (const std::uint32_t candidate : chunk.candidates) ASSERT_TRUE(holds(problem, candidate, key));
    }
    Ids candidates = chunk.candidates;
    std::sort(candidates.begin(), candidates.end());
    ASSERT_TRUE(chunk.keys.empty() || candidates == tables.ownership.owner_sets.at(chunk.owner_class));
    const std::uint32_t workers = effective_workers_per_replica(tables);
    Ids block = route_block(candidates, plan.consumer, workers);
    if (problem.options.balance == Balance::kBytes) {
      block.clear();
      for (const BlockOwner& owner : weighted_block(candidates, plan.consumer, workers))
        block.push_back(owner.producer);
    }
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
    if (chunk.path == Path::kMapped) {
      ASSERT_EQ(tables.transport, TransportKind::kShm);
    }
    if (chunk.path == Path::kDirect) {  // one run of bytes in the source and in the parameter, used once
      ASSERT_EQ(chunk.scatters.size(), chunk.keys.size());
      for (const PlannedScatter& scatter : chunk.scatters) {
        const ChunkKey& key = chunk.keys[scatter.key];
        ASSERT_EQ(key.slice.regions.size(), 1u);
        const std::uint64_t run = direct_run_bytes(tables, key.name, key.piece, key.wire_dtype, key.slice,
                                                   scatter.destination);
        ASSERT_TRUE(run == key.bytes || (tables.transport == TransportKind::kCma && run >= kMinDirectRunBytes));
        ASSERT_EQ(key.wire_dtype, scatter.destination.dtype);
      }
    }
    // What is mapped or read directly lies in memory that can be.
    for (const std::uint32_t candidate : chunk.candidates) {
      if (chunk.path == Path::kPacked || tables.producer_mappable[candidate] != 0) continue;
      if (tables.transport == TransportKind::kCma) continue;
      ASSERT_EQ(tables.producer_resident[candidate], 0);
      for (const ChunkKey& key : chunk.keys) {
        const TensorMeta& meta = tables.metadata[key.name];
        ASSERT_LE(*bytes_of(meta.dtype, *checked_numel(meta.shape)), tables.export_pack_limit);
      }
    }
  }
  for (const Chunk& chunk : plan.chunks) {  // nothing is taken from a group after its signal
    for (const Chunk& later : plan.chunks) {
      if (later.chunk_id <= chunk.chunk_id || later.keys.empty()) continue;
      ASSERT_TRUE(std::find(chunk.signal_groups.begin(), chunk.signal_groups.end(), later.group) ==
                  chunk.signal_groups.end());
    }
  }
  ASSERT_EQ(signalled, std::vector<int>(tables.group_lens.size(), 1));
  ASSERT_EQ(plan.group_owners, naive_group_owners(problem));
  ASSERT_EQ(plan.bytes_kept, naive_bytes_kept(recording));
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
    WorkerBytes expected, planned;
    ASSERT_EQ(bytes_of_recording(problem.tables.metadata, recording, expected), "");
    ASSERT_EQ(bytes_of_plan(problem.tables, problem.holdings, recording, *plan, planned), "");
    ASSERT_EQ(planned, expected);
    for (const ParameterBytes& parameter : planned) {
      for (const std::uint8_t writes : parameter.writes) ASSERT_LE(writes, 1);
    }
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

// A fleet whose workers take equal parts of everything: names are held whole by one of several disjoint sets
// of trainers, or in two pieces by one set each.
Problem even_problem(std::uint64_t seed) {
  Random random(seed);
  Problem problem;
  const auto workers = static_cast<std::uint32_t>(random.between(1, 9));
  const auto replicas = static_cast<std::uint32_t>(random.between(1, 2));
  std::vector<Ids> sets(static_cast<std::size_t>(random.between(1, 3)));
  std::uint32_t producers = 0;
  for (Ids& set : sets) {
    for (std::int64_t n = random.between(1, 8); n > 0; --n) set.push_back(producers++);
  }
  std::vector<TensorMeta> metadata;
  for (std::uint32_t name = 0; name < 60; ++name) {
    const std::int64_t rows = random.between(1, 40) * workers;
    metadata.push_back(meta("l." + std::to_string(name / 6) + ".w" + std::to_string(name),
                            {rows, 2 * random.between(1, 20)}, DType::kU8));
  }
  problem.tables = make_tables(metadata, producers, workers * replicas);
  problem.tables.num_replicas = replicas;
  problem.holdings = holdings_of(metadata, producers);
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    const Ids& set = sets[name % sets.size()];
    const Ids& other = sets[(name + 1) % sets.size()];
    const std::int64_t rows = metadata[name].shape[0], columns = metadata[name].shape[1];
    const bool whole = &set == &other || random.below(2) == 0;
    for (const std::uint32_t rank : set)
      whole ? hold(problem.holdings[rank], name)
            : hold(problem.holdings[rank], name, Box{{0, 0}, {rows, columns / 2}});
    if (whole) continue;
    for (const std::uint32_t rank : other)
      hold(problem.holdings[rank], name, Box{{0, columns / 2}, {rows, columns - columns / 2}});
  }
  problem.tables.ownership = must(resolve_ownership(metadata, problem.holdings));
  for (std::int64_t w = 0; w < workers; ++w) {
    RecordingBuilder builder(metadata);
    for (std::uint32_t name = 0; name < metadata.size(); ++name) {
      const std::int64_t rows = metadata[name].shape[0] / workers;
      builder.whole(metadata[name].name, name, must(builder.fake(name).narrow(0, rows * w, rows)));
    }
    problem.recordings.push_back(builder.build());
  }
  problem.options.max_chunk_bytes = static_cast<std::uint64_t>(random.between(40, 400));
  problem.options.chunk_split = static_cast<std::uint32_t>(random.between(1, 3));
  problem.options.pull_split = random.below(3) == 0 ? static_cast<std::uint32_t>(random.between(2, 4)) : 1;
  return problem;
}

// Of every owner set of which all workers of a replica take as much, in chunks of at most 2 % of an owner's
// even share: what its owners serve differs from that share by at most 10 %.
TEST(PlanProperties, interchangeable_owners_serve_even_bytes) {
  std::size_t checked = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = even_problem(seed);
    std::map<std::uint32_t, std::map<std::uint32_t, std::uint64_t>> served;  // by owner class, by producer
    std::map<std::uint32_t, std::uint64_t> largest;                          // chunk, by owner class
    for (std::uint32_t consumer = 0; consumer < problem.tables.num_consumers; ++consumer) {
      const Recording& recording = problem.recordings[consumer % problem.recordings.size()];
      const WorkerPlan plan = must(plan_worker(problem.tables, recording, consumer, problem.options));
      for (const Chunk& chunk : plan.chunks) {
        largest[chunk.owner_class] = std::max(largest[chunk.owner_class], chunk.bytes);
        for (const shardpull::Run& run : chunk.runs) {
          for (std::uint32_t k = run.first_key; k < run.first_key + run.key_count; ++k)
            served[chunk.owner_class][run.producer] += chunk.keys[k].bytes;
        }
      }
    }
    for (const auto& [owner_class, by_producer] : served) {
      const Ids& owners = problem.tables.ownership.owner_sets[owner_class];
      std::uint64_t total = 0;
      for (const auto& [producer, bytes] : by_producer) total += bytes;
      const double share = static_cast<double>(total) / static_cast<double>(owners.size());
      const double per_replica = share / problem.tables.num_replicas;
      if (static_cast<double>(largest[owner_class]) > 0.02 * per_replica) continue;
      ++checked;
      for (const std::uint32_t owner : owners) {
        const auto at = by_producer.find(owner);
        const double bytes = at == by_producer.end() ? 0 : static_cast<double>(at->second);
        ASSERT_NEAR(bytes / share, 1, 0.1)
            << "owner " << owner << " of class " << owner_class << " of " << owners.size() << " owners";
      }
    }
  }
  ASSERT_GE(checked, 300u);
}

}  // namespace
}  // namespace shardpull
