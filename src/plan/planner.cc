// The plan of one worker, in three passes:
//   1. per gather group, its scatters in planning order, cut by pieces and rows, into one list per owner
//   class;
//   2. per list, deduplicated keys, cut into chunks, each with its packed layout;
//   3. over all chunks, producers, paths and sequence numbers, and what happens with which: materialise,
//   post-process, signal; sizes and digests.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/encoder.h"
#include "base/status_macros.h"
#include "plan/balance.h"
#include "plan/boxes.h"
#include "plan/cut.h"
#include "plan/kept.h"
#include "plan/path.h"
#include "plan/plan.h"
#include "plan/plan_errors.h"
#include "tensor/slice_algebra.h"

namespace shardpull {
namespace {

// A part of a recorded copy on its way into a chunk.
struct Entry {
  std::uint32_t scatter = 0;
  std::uint32_t name = 0;
  Part part;
};

// A fetch key and the entries that read it, by position in their list.
struct Item {
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> entries;
};

// Equal keys have equal texts.
std::string key_text(std::uint32_t name, std::uint32_t piece, DType wire_dtype, const Slice& slice) {
  ByteWriter writer;
  writer.u32(name);
  writer.u32(piece);
  writer.u8(static_cast<std::uint8_t>(wire_dtype));
  encode_slice(writer, slice);
  const auto bytes = writer.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string place_text(const Recording& recording, const Destination& destination) {
  const RecordedParameter& parameter = recording.parameters[destination.parameter];
  const std::string& module = recording.modules[parameter.module].name;
  return module.empty() ? parameter.name : fmt::format("{}.{}", module, parameter.name);
}

// One past the last bit that a window of `dtype` elements reaches, or nothing when it is malformed or does
// not fit.
std::optional<std::int64_t> window_end_bits(DType dtype, std::int64_t offset,
                                            const std::vector<std::int64_t>& shape,
                                            const std::vector<std::int64_t>& stride) {
  if (offset < 0 || shape.size() != stride.size()) return std::nullopt;
  std::optional<std::int64_t> last = offset;
  for (std::size_t d = 0; d < shape.size() && last; ++d) {
    if (shape[d] < 0 || stride[d] < 0) return std::nullopt;
    if (shape[d] == 0) return 0;
    const auto reach = checked_mul(shape[d] - 1, stride[d]);
    last = reach ? checked_add(*last, *reach) : std::nullopt;
  }
  if (last) last = checked_add(*last, 1);
  return last ? checked_mul(*last, dtype_bits(dtype)) : std::nullopt;
}

Status check_destination(const Recording& recording, const Destination& destination, std::string_view what) {
  if (destination.parameter >= recording.parameters.size()) {
    return plan_error(fmt::format("recording: {} goes to parameter {} of {}", what, destination.parameter,
                                  recording.parameters.size()));
  }
  const RecordedParameter& parameter = recording.parameters[destination.parameter];
  const auto end =
      window_end_bits(destination.dtype, destination.offset, destination.shape, destination.stride);
  const auto room = window_end_bits(parameter.dtype, 0, parameter.shape, parameter.stride);
  if (!end || !room || *end > *room || !checked_numel(destination.shape)) {
    return plan_error(fmt::format(
        "recording: {} goes to offset {}, shape {}, stride {} of '{}', which is {} {}", what,
        destination.offset, shape_text(destination.shape), shape_text(destination.stride),
        place_text(recording, destination), dtype_name(parameter.dtype), shape_text(parameter.shape)));
  }
  return {};
}

Status check_recording(const InitTables& tables, const Recording& recording) {
  const auto names = static_cast<std::uint32_t>(tables.metadata.size());
  if (recording.live.size() + recording.dead.size() != names) {
    return plan_error(fmt::format("recording of other metadata: it knows {} names, the tables have {}",
                                  recording.live.size() + recording.dead.size(), names));
  }
  std::vector<std::uint8_t> known(names), live(names);
  for (const auto* list : {&recording.live, &recording.dead}) {
    for (const std::uint32_t name : *list) {
      if (name >= names || std::exchange(known[name], std::uint8_t{1}) != 0) {
        return plan_error(fmt::format(
            "recording of other metadata: name {} is unknown or listed twice; the tables have {} names", name,
            names));
      }
      if (list == &recording.live) live[name] = 1;
    }
  }
  if (!recording.unbaked.empty()) {
    const std::uint32_t first = recording.unbaked.front();
    const std::string name = first < names ? tables.metadata[first].name : fmt::format("#{}", first);
    return plan_error(
        fmt::format("{} live name{} did not bake, the first is '{}': they are planned as modules of their own "
                    "(with_fallbacks)",
                    recording.unbaked.size(), recording.unbaked.size() == 1 ? "" : "s", name),
        name);
  }
  for (std::size_t i = 0; i < recording.parameters.size(); ++i) {
    if (recording.parameters[i].module >= recording.modules.size()) {
      return plan_error(fmt::format("recording: parameter {} '{}' belongs to module {} of {}", i,
                                    recording.parameters[i].name, recording.parameters[i].module,
                                    recording.modules.size()));
    }
  }
  for (std::size_t i = 0; i < recording.fills.size(); ++i) {
    SHARDPULL_RETURN_IF_ERROR(
        check_destination(recording, recording.fills[i].destination, fmt::format("fill {}", i)));
  }
  for (std::size_t i = 0; i < recording.scatters.size(); ++i) {
    const Scatter& scatter = recording.scatters[i];
    if (scatter.name >= names || live[scatter.name] == 0) {
      return plan_error(fmt::format(
          "recording of other metadata: copy {} reads name {}, which is not live; the tables have {} names",
          i, scatter.name, names));
    }
    const TensorMeta& meta = tables.metadata[scatter.name];
    const auto wrong = [&](std::string_view problem) {
      return plan_error(fmt::format("recording: copy {} of '{}' {}{}: {}", i, meta.name,
                                    shape_text(meta.shape), scatter.chain, problem),
                        meta.name);
    };
    if (!dtype_valid(static_cast<std::uint8_t>(scatter.wire_dtype)) ||
        !dtype_valid(static_cast<std::uint8_t>(scatter.destination.dtype))) {
      return wrong("unknown dtype");
    }
    if (const Status slice =
            check_slice(scatter.slice, scatter.wire_dtype, meta.dtype, *checked_numel(meta.shape));
        !slice.ok()) {
      return wrong(slice.message());
    }
    SHARDPULL_RETURN_IF_ERROR(
        check_destination(recording, scatter.destination, fmt::format("copy {} of '{}'", i, meta.name)));
    const auto shape = checked_numel(scatter.shape);
    if (!shape || *shape != scatter.slice.numel()) {
      return wrong(fmt::format("its shape {} is not that of {} elements", shape_text(scatter.shape),
                               scatter.slice.numel()));
    }
    const std::int64_t window = *checked_numel(scatter.destination.shape);
    // Element by element, or the same bytes through a view of another dtype.
    const auto window_bits = checked_mul(window, dtype_bits(scatter.destination.dtype));
    const auto wire_bits = checked_mul(*shape, dtype_bits(scatter.wire_dtype));
    if (window != *shape && (!window_bits || window_bits != wire_bits)) {
      return wrong(fmt::format("{} elements go to a destination of shape {}", *shape,
                               shape_text(scatter.destination.shape)));
    }
    const RecordedModule& module =
        recording.modules[recording.parameters[scatter.destination.parameter].module];
    if (!module.baked) return wrong(fmt::format("module '{}' did not bake", module.name));
  }
  return {};
}

class Planner {
 public:
  Planner(const InitTables& tables, const Recording& recording, std::uint32_t consumer,
          const PlanOptions& options)
      : tables_(tables),
        recording_(recording),
        options_(options),
        workers_(effective_workers_per_replica(tables)),
        everyone_(tables.producers.size()),
        next_seq_(tables.producers.size(), 0) {
    std::iota(everyone_.begin(), everyone_.end(), 0u);
    plan_.consumer = consumer;
    plan_.ring_depth = tables.ring_depth;
    plan_.sharing_group = consumer % workers_;
  }

  Result<WorkerPlan> run() {
    index_pieces();
    const std::vector<std::uint32_t> group_of = group_of_names(tables_);
    std::vector<std::vector<std::uint32_t>> by_group(tables_.group_lens.size());
    for (std::uint32_t s = 0; s < recording_.scatters.size(); ++s) {
      const Scatter& scatter = recording_.scatters[s];
      if (scatter.slice.numel() > 0) by_group[group_of[scatter.name]].push_back(s);
    }
    planned_elements_.resize(recording_.scatters.size(), 0);
    plan_.group_owners = group_owners(tables_);
    for (std::uint32_t group = 0; group < by_group.size(); ++group) {
      SHARDPULL_RETURN_IF_ERROR(plan_group(group, by_group[group]));
    }
    SHARDPULL_RETURN_IF_ERROR(route());
    assign_modules();
    add_up();
    SHARDPULL_RETURN_IF_ERROR(check_invariants());
    return std::move(plan_);
  }

 private:
  using List = std::vector<Entry>;

  void index_pieces() {
    const auto& pieces = tables_.ownership.pieces;
    for (std::uint32_t i = 0; i < pieces.size(); ++i) {
      auto& [first, count] = pieces_of_[pieces[i].name];
      if (count++ == 0) first = i;
    }
  }

  std::uint32_t module_of(const Destination& destination) const {
    return recording_.parameters[destination.parameter].module;
  }

  const std::vector<std::uint32_t>& owners_of(std::uint32_t owner_class) const {
    return tables_.ownership.owner_sets.empty() ? everyone_ : tables_.ownership.owner_sets[owner_class];
  }

  // Modules by the first of their names in the group, then by their first copy; the copies of a module as
  // recorded.
  std::vector<std::uint32_t> in_planning_order(const std::vector<std::uint32_t>& scatters) const {
    struct Order {
      std::uint32_t first_name = 0, first_scatter = 0;
    };
    std::unordered_map<std::uint32_t, Order> orders;
    for (const std::uint32_t s : scatters) {
      const std::uint32_t name = recording_.scatters[s].name;
      const auto [at, fresh] =
          orders.try_emplace(module_of(recording_.scatters[s].destination), Order{name, s});
      if (!fresh) at->second.first_name = std::min(at->second.first_name, name);
    }
    struct Ranked {
      Order module;
      std::uint32_t scatter = 0;
    };
    std::vector<Ranked> ranked;
    ranked.reserve(scatters.size());
    for (const std::uint32_t s : scatters)
      ranked.push_back({orders.at(module_of(recording_.scatters[s].destination)), s});
    std::sort(ranked.begin(), ranked.end(), [](const Ranked& a, const Ranked& b) {
      return std::tuple(a.module.first_name, a.module.first_scatter, a.scatter) <
             std::tuple(b.module.first_name, b.module.first_scatter, b.scatter);
    });
    std::vector<std::uint32_t> order;
    order.reserve(ranked.size());
    for (const Ranked& item : ranked) order.push_back(item.scatter);
    return order;
  }

  Status plan_group(std::uint32_t group, const std::vector<std::uint32_t>& scatters) {
    std::map<std::uint32_t, List> by_class;
    for (const std::uint32_t s : in_planning_order(scatters)) SHARDPULL_RETURN_IF_ERROR(cut(s, by_class));
    const std::size_t before = plan_.chunks.size();
    for (auto& [owner_class, list] : by_class)
      SHARDPULL_RETURN_IF_ERROR(add_chunks(group, owner_class, list));
    if (plan_.chunks.size() == before) {
      plan_.pre_free.push_back(group);
    } else {
      plan_.chunks.back().signal_groups.push_back(group);
    }
    return {};
  }

  // Cuts one copy by the pieces of its tensor and by rows, into the lists of its owner classes.
  Status cut(std::uint32_t s, std::map<std::uint32_t, List>& by_class) {
    const Scatter& scatter = recording_.scatters[s];
    const TensorMeta& meta = tables_.metadata[scatter.name];
    const Ownership& own = tables_.ownership;
    std::vector<Part> parts;
    if (own.name_owner_class.empty() || own.name_owner_class[scatter.name] >= 0) {
      SHARDPULL_ASSIGN_OR_RETURN(Part whole, whole_part(scatter));
      parts.push_back(std::move(whole));
    } else {
      const auto [first, count] = pieces_of_.at(scatter.name);
      SHARDPULL_ASSIGN_OR_RETURN(
          parts, cut_by_pieces(scatter, meta, std::span(own.pieces).subspan(first, count), first));
    }
    std::vector<Part> rows;
    for (Part& part : parts) {
      rows.clear();
      const std::uint32_t owner_class = part.piece != 0 ? own.pieces[part.piece - 1].owner_class
                                        : own.name_owner_class.empty()
                                            ? 0
                                            : static_cast<std::uint32_t>(own.name_owner_class[scatter.name]);
      if (options_.max_chunk_bytes > 0) {
        SHARDPULL_RETURN_IF_ERROR(cut_by_rows(std::move(part), meta.name, options_.max_chunk_bytes, rows));
      } else {
        rows.push_back(std::move(part));
      }
      List& list = by_class[owner_class];
      for (Part& row : rows) list.push_back({.scatter = s, .name = scatter.name, .part = std::move(row)});
    }
    return {};
  }

  // Cuts the list of one group and owner class into chunks.
  Status add_chunks(std::uint32_t group, std::uint32_t owner_class, List& list) {
    std::vector<Item> items;  // by first use
    std::unordered_map<std::string, std::uint32_t> item_of_key;
    for (std::uint32_t e = 0; e < list.size(); ++e) {
      const Part& part = list[e].part;
      const auto [at, fresh] =
          item_of_key.try_emplace(key_text(list[e].name, part.piece, part.wire_dtype, part.slice),
                                  static_cast<std::uint32_t>(items.size()));
      if (fresh) items.push_back({.bytes = part.bytes, .entries = {}});
      items[at->second].entries.push_back(e);
    }
    const auto direct = std::stable_partition(items.begin(), items.end(), [&](const Item& item) {
      return !goes_direct(owner_class, item, list);
    });
    SHARDPULL_RETURN_IF_ERROR(
        add_chunks(group, owner_class, list, std::span(items.begin(), direct), Path::kPacked));
    return add_chunks(group, owner_class, list, std::span(direct, items.end()), Path::kDirect);
  }

  // Whether a key is read straight into its parameter: it must be possible, and asked for or worth it.
  bool goes_direct(std::uint32_t owner_class, const Item& item, const List& list) const {
    if (options_.path == PathPolicy::kPacked || options_.path == PathPolicy::kMapped) return false;
    if (options_.path == PathPolicy::kAuto && (maps(tables_.transport) || item.bytes < kMinDirectBytes))
      return false;
    if (item.entries.size() != 1) return false;
    const Entry& entry = list[item.entries.front()];
    const std::uint64_t run = direct_run_bytes(tables_, entry.name, entry.part.piece, entry.part.wire_dtype,
                                               entry.part.slice, entry.part.destination);
    const bool in_runs = reads_vectored(tables_.transport) && run >= kMinDirectRunBytes;
    if (run == 0 || (run != item.bytes && !in_runs)) return false;
    ChunkKey key;
    key.name = entry.name;
    return !why_not_reachable(tables_, owners_of(owner_class), std::span(&key, 1));
  }

  // Cuts items into chunks. kPacked stands for any path that is not direct: route() decides.
  Status add_chunks(std::uint32_t group, std::uint32_t owner_class, List& list, std::span<const Item> items,
                    Path path) {
    if (items.empty()) return {};
    std::vector<std::uint64_t> sizes;
    sizes.reserve(items.size());
    for (const Item& item : items) sizes.push_back(item.bytes);
    std::vector<std::uint32_t> cuts = greedy_cut(sizes, options_.chunk_split);
    cuts.push_back(static_cast<std::uint32_t>(items.size()));
    for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
      std::uint32_t first = cuts[c];
      std::uint64_t end = 0;
      for (std::uint32_t i = cuts[c]; i < cuts[c + 1]; ++i) {
        const auto next = layout_end(end, items[i].bytes);
        if (!next) return plan_limit_error(fmt::format("group {}: a chunk larger than 2^64 bytes", group));
        end = *next;
        if (i > first && ((options_.max_chunk_bytes > 0 && end > options_.max_chunk_bytes) ||
                          i - first >= kMaxKeysPerChunk)) {
          SHARDPULL_RETURN_IF_ERROR(
              add_chunk(group, owner_class, list, items.subspan(first, i - first), path));
          first = i;
          end = items[i].bytes;
        }
      }
      SHARDPULL_RETURN_IF_ERROR(
          add_chunk(group, owner_class, list, items.subspan(first, cuts[c + 1] - first), path));
    }
    return {};
  }

  // Where a key of `bytes` ends that is laid out after `end`.
  static std::optional<std::uint64_t> layout_end(std::uint64_t end, std::uint64_t bytes) {
    const auto start = checked_align_up(end, kLayoutAlignment);
    return start ? checked_add(*start, bytes) : std::nullopt;
  }

  Status add_chunk(std::uint32_t group, std::uint32_t owner_class, List& list, std::span<const Item> items,
                   Path path) {
    if (plan_.chunks.size() >= kMaxChunks) {
      return plan_limit_error(
          fmt::format("more than {} chunks; max_chunk_bytes is {}", kMaxChunks, options_.max_chunk_bytes));
    }
    Chunk chunk;
    chunk.chunk_id = static_cast<std::uint32_t>(plan_.chunks.size());
    chunk.group = group;
    chunk.owner_class = owner_class;
    chunk.path = path;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> uses;  // (position in the list, key)
    for (std::uint32_t k = 0; k < items.size(); ++k) {
      Entry& entry = list[items[k].entries.front()];
      ChunkKey& key = chunk.keys.emplace_back();
      key.name = entry.name;
      key.piece = entry.part.piece;
      key.wire_dtype = entry.part.wire_dtype;
      key.offset = *checked_align_up(chunk.bytes, kLayoutAlignment);  // add_chunks has seen the sum
      key.bytes = entry.part.bytes;
      chunk.bytes = key.offset + key.bytes;
      for (const std::uint32_t e : items[k].entries) {
        uses.emplace_back(e, k);
        planned_elements_[list[e].scatter] += list[e].part.slice.numel();
      }
      key.slice = std::move(entry.part.slice);
    }
    std::sort(uses.begin(), uses.end());
    chunk.scatters.reserve(uses.size());
    for (const auto& [e, k] : uses)
      chunk.scatters.push_back({.key = k, .destination = std::move(list[e].part.destination)});
    plan_.chunks.push_back(std::move(chunk));
    return {};
  }

  // Producers, path, runs and sequence numbers of all chunks.
  Status route() {
    std::vector<std::vector<BlockOwner>> blocks;
    std::unordered_map<std::uint32_t, std::uint32_t> block_of_class;
    std::vector<ChunkDemand> demands;
    demands.reserve(plan_.chunks.size());
    for (const Chunk& chunk : plan_.chunks) {
      const auto [block, fresh] =
          block_of_class.try_emplace(chunk.owner_class, static_cast<std::uint32_t>(blocks.size()));
      if (fresh) blocks.push_back(block_of(owners_of(chunk.owner_class)));
      ChunkDemand& demand = demands.emplace_back();
      demand.group = chunk.group;
      demand.block = block->second;
      demand.keys.reserve(chunk.keys.size());
      for (const ChunkKey& key : chunk.keys) demand.keys.push_back(key.bytes);
    }
    std::vector<std::uint32_t> starts;
    if (options_.balance == Balance::kBytes) {
      starts = balance_chunks(demands, blocks, options_.pull_split);
    } else {
      for (const ChunkDemand& demand : demands)
        starts.push_back(demand.group % static_cast<std::uint32_t>(blocks[demand.block].size()));
    }
    for (std::size_t c = 0; c < demands.size(); ++c)
      SHARDPULL_RETURN_IF_ERROR(
          route_chunk(plan_.chunks[c], demands[c], blocks[demands[c].block], starts[c]));
    return {};
  }

  std::vector<BlockOwner> block_of(const std::vector<std::uint32_t>& owners) const {
    if (options_.balance == Balance::kBytes) return weighted_block(owners, plan_.consumer, workers_);
    std::vector<BlockOwner> block;
    for (const std::uint32_t producer : route_block(owners, plan_.consumer, workers_))
      block.push_back({.producer = producer, .weight = 1});
    return block;
  }

  // The block from `start` on, cyclically, then the owners that follow it in the set, cyclically.
  Status route_chunk(Chunk& chunk, const ChunkDemand& demand, const std::vector<BlockOwner>& block,
                     std::uint32_t start) {
    const std::vector<std::uint32_t>& owners = owners_of(chunk.owner_class);
    chunk.candidates.reserve(owners.size());
    for (std::size_t i = 0; i < block.size(); ++i)
      chunk.candidates.push_back(block[(start + i) % block.size()].producer);
    const auto last = static_cast<std::size_t>(
        std::lower_bound(owners.begin(), owners.end(), block.back().producer) - owners.begin());
    for (std::size_t i = 1; i <= owners.size() - block.size(); ++i)
      chunk.candidates.push_back(owners[(last + i) % owners.size()]);
    SHARDPULL_RETURN_IF_ERROR(choose_path(chunk));

    std::vector<std::uint32_t> starts = runs_of(demand, block, start, options_.pull_split);
    starts.push_back(static_cast<std::uint32_t>(chunk.keys.size()));
    for (std::size_t r = 0; r + 1 < starts.size(); ++r) {
      const ChunkKey& first_key = chunk.keys[starts[r]];
      const ChunkKey& last_key = chunk.keys[starts[r + 1] - 1];
      const std::uint32_t producer = chunk.candidates[r];
      chunk.runs.push_back({.producer = producer,
                            .first_key = starts[r],
                            .key_count = starts[r + 1] - starts[r],
                            .offset = first_key.offset,
                            .bytes = last_key.offset + last_key.bytes - first_key.offset,
                            .seq = next_seq_[producer]++});
    }
    return {};
  }

  // A chunk is mapped only where each of its candidates could be: a takeover must not change the path.
  Status choose_path(Chunk& chunk) const {
    if (chunk.path == Path::kDirect || options_.path == PathPolicy::kPacked ||
        options_.path == PathPolicy::kDirect || !maps(tables_.transport)) {
      return {};
    }
    if (const auto obstacle = why_not_reachable(tables_, chunk.candidates, chunk.keys)) {
      if (options_.path == PathPolicy::kAuto) return {};
      return plan_error(fmt::format("path mapped: {}; use auto or packed", obstacle->reason),
                        tables_.metadata[obstacle->name].name);
    }
    chunk.path = Path::kMapped;
    return {};
  }

  void assign_modules() {
    constexpr std::uint32_t kNone = UINT32_MAX;
    std::vector<std::uint32_t> last(recording_.modules.size(), kNone);
    std::vector<std::uint32_t> order;  // by first use
    for (Chunk& chunk : plan_.chunks) {
      for (const PlannedScatter& scatter : chunk.scatters) {
        const std::uint32_t module = module_of(scatter.destination);
        if (last[module] == kNone) {
          order.push_back(module);
          chunk.materialise.push_back(module);
        }
        last[module] = chunk.chunk_id;
      }
    }
    for (const std::uint32_t module : order) plan_.chunks[last[module]].post_process.push_back(module);

    // Modules that take no bytes here: fills, or copies without elements, only.
    std::vector<std::uint8_t> filled(recording_.modules.size());
    for (const Fill& fill : recording_.fills) filled[module_of(fill.destination)] = 1;
    for (const Scatter& scatter : recording_.scatters) filled[module_of(scatter.destination)] = 1;
    for (std::uint32_t module = 0; module < filled.size(); ++module) {
      if (filled[module] == 0 || last[module] != kNone || !recording_.modules[module].baked) continue;
      if (plan_.chunks.empty()) plan_.chunks.emplace_back();
      plan_.chunks.front().materialise.push_back(module);
      plan_.chunks.front().post_process.push_back(module);
    }
  }

  void add_up() {
    std::map<std::uint32_t, ProducerPlan> producers;
    for (const Chunk& chunk : plan_.chunks) {
      if (chunk.path == Path::kPacked && !chunk.keys.empty()) {
        plan_.receive_slot_bytes = std::max({plan_.receive_slot_bytes, chunk.bytes, tables_.presize});
      }
      for (const ChunkKey& key : chunk.keys) plan_.bytes_planned += key.bytes;
      for (const Run& run : chunk.runs) {
        ProducerPlan& at = producers[run.producer];
        ++at.pulls;
        if (chunk.path == Path::kPacked) at.serve_slot_bytes = std::max(at.serve_slot_bytes, run.bytes);
      }
    }
    for (auto& [producer, totals] : producers) {
      totals.producer = producer;
      totals.digest = pulls_digest(pulls_at(plan_, producer), plan_.ring_depth);
      plan_.producers.push_back(totals);
    }
    plan_.bytes_kept = unique_source_bytes(recording_.scatters);
  }

  Status check_invariants() const {
    std::vector<std::uint32_t> signalled(tables_.group_lens.size(), 0);
    for (const std::uint32_t group : plan_.pre_free) ++signalled[group];
    for (const Chunk& chunk : plan_.chunks) {
      for (const std::uint32_t group : chunk.signal_groups) ++signalled[group];
    }
    for (std::size_t group = 0; group < signalled.size(); ++group) {
      if (signalled[group] != 1) {
        return plan_internal_error(fmt::format("group {} would be signalled {} times by worker {}", group,
                                               signalled[group], plan_.consumer));
      }
    }
    for (std::size_t s = 0; s < planned_elements_.size(); ++s) {
      const Scatter& scatter = recording_.scatters[s];
      if (planned_elements_[s] != scatter.slice.numel()) {
        const std::string& name = tables_.metadata[scatter.name].name;
        return plan_internal_error(
            fmt::format("{} of the {} elements that '{}' takes from '{}' are planned", planned_elements_[s],
                        scatter.slice.numel(), place_text(recording_, scatter.destination), name),
            name);
      }
    }
    return {};
  }

  const InitTables& tables_;
  const Recording& recording_;
  const PlanOptions options_;
  const std::uint32_t workers_;  // per replica
  std::vector<std::uint32_t> everyone_;
  std::vector<std::uint32_t> next_seq_;  // per producer
  std::unordered_map<std::uint32_t, std::pair<std::uint32_t, std::uint32_t>>
      pieces_of_;                               // name -> first, count
  std::vector<std::int64_t> planned_elements_;  // per scatter
  WorkerPlan plan_;
};

}  // namespace

std::string_view to_string(Path path) {
  switch (path) {
    case Path::kPacked:
      return "packed";
    case Path::kMapped:
      return "mapped";
    case Path::kDirect:
      return "direct";
  }
  return "unknown";
}

Result<WorkerPlan> plan_worker(const InitTables& tables, const Recording& recording, std::uint32_t consumer,
                               const PlanOptions& options) {
  SHARDPULL_RETURN_IF_ERROR(validate(tables));
  if (consumer >= tables.num_consumers) {
    return plan_error(fmt::format("consumer {}: ids are 0 to {}", consumer, tables.num_consumers - 1));
  }
  if (options.chunk_split == 0) return plan_error("chunk_split is 0, it must be at least 1");
  if (options.pull_split == 0) return plan_error("pull_split is 0, it must be at least 1");
  if (const auto illegal = illegal_pair(tables.transport, options.path)) return plan_error(*illegal);
  SHARDPULL_RETURN_IF_ERROR(check_recording(tables, recording));
  return Planner(tables, recording, consumer, options).run();
}

std::uint64_t padding_bytes(const WorkerPlan& plan) {
  std::uint64_t bytes = 0;
  for (const Chunk& chunk : plan.chunks) {
    if (chunk.path != Path::kPacked) continue;
    for (const Run& run : chunk.runs) bytes += run.bytes;
    for (const ChunkKey& key : chunk.keys) bytes -= key.bytes;
  }
  return bytes;
}

namespace {

PullDescription describe(const Chunk& chunk, std::uint32_t r, const Lane& lane, std::uint32_t seq) {
  const Run& run = chunk.runs[r];
  PullDescription pull;
  pull.chunk_id = chunk.chunk_id;
  pull.run = r;
  pull.group = chunk.group;
  pull.owner_class = chunk.owner_class;
  pull.path = chunk.path;
  pull.lane = lane;
  pull.seq = seq;
  pull.bytes = run.bytes;
  pull.keys.assign(chunk.keys.begin() + run.first_key, chunk.keys.begin() + run.first_key + run.key_count);
  for (ChunkKey& key : pull.keys) key.offset -= run.offset;
  return pull;
}

}  // namespace

std::vector<PullDescription> pulls_at(const WorkerPlan& plan, std::uint32_t producer) {
  const Lane lane{.producer = producer, .sharing_group = plan.sharing_group, .kind = LaneKind::kRegular};
  std::vector<PullDescription> pulls;
  for (const Chunk& chunk : plan.chunks) {
    for (std::uint32_t r = 0; r < chunk.runs.size(); ++r) {
      const Run& run = chunk.runs[r];
      if (run.producer == producer && run.key_count != 0) pulls.push_back(describe(chunk, r, lane, run.seq));
    }
  }
  return pulls;
}

std::vector<PullDescription> recovery_pulls_at(const WorkerPlan& plan, std::uint32_t producer,
                                               std::uint32_t workers_per_replica) {
  const Lane lane{.producer = producer,
                  .sharing_group = workers_per_replica + plan.consumer,
                  .kind = LaneKind::kRecovery};
  std::vector<PullDescription> pulls;
  for (const Chunk& chunk : plan.chunks) {
    if (std::find(chunk.candidates.begin(), chunk.candidates.end(), producer) == chunk.candidates.end())
      continue;
    for (std::uint32_t r = 0; r < chunk.runs.size(); ++r) {
      const Run& run = chunk.runs[r];
      if (run.producer != producer && run.key_count != 0)
        pulls.push_back(describe(chunk, r, lane, static_cast<std::uint32_t>(pulls.size())));
    }
  }
  return pulls;
}

std::uint32_t lane_slots(const std::vector<PullDescription>& pulls, std::uint32_t ring_depth) {
  if (pulls.empty() || pulls.front().lane.kind == LaneKind::kRegular) return ring_depth;
  std::uint32_t runs = 1;
  for (const PullDescription& pull : pulls) runs = std::max(runs, pull.run + 1);
  return 2 * ring_depth * runs;
}

std::uint64_t lane_slot_bytes(const std::vector<PullDescription>& pulls) {
  std::uint64_t bytes = 0;
  for (const PullDescription& pull : pulls) {
    if (pull.path == Path::kPacked) bytes = std::max(bytes, pull.bytes);
  }
  return bytes;
}

}  // namespace shardpull
