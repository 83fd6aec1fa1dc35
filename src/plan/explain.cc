// The plan in words.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/edit_distance.h"
#include "base/units.h"
#include "plan/boxes.h"
#include "plan/path.h"
#include "plan/plan.h"

namespace shardpull {
namespace {

constexpr std::size_t kShownRanks = 8;

std::string ranks_text(const std::vector<std::uint32_t>& ranks) {
  const std::size_t shown = std::min(ranks.size(), kShownRanks);
  std::string text =
      fmt::format("{}", fmt::join(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(shown), ", "));
  if (shown < ranks.size()) text += fmt::format(", ... ({} in all)", ranks.size());
  return text;
}

std::string trainers_text(const std::vector<std::uint32_t>& ranks) {
  return fmt::format("trainer{} {}", ranks.size() == 1 ? "" : "s", ranks_text(ranks));
}

std::optional<std::uint32_t> index_of(const InitTables& tables, std::string_view name) {
  const auto found = std::find_if(tables.metadata.begin(), tables.metadata.end(),
                                  [&](const TensorMeta& meta) { return meta.name == name; });
  if (found == tables.metadata.end()) return std::nullopt;
  return static_cast<std::uint32_t>(found - tables.metadata.begin());
}

std::string unknown_name(const InitTables& tables, std::string_view name) {
  constexpr std::size_t kSuggestions = 3;
  std::vector<std::pair<std::size_t, std::size_t>> nearest;  // (distance, name)
  for (std::size_t i = 0; i < tables.metadata.size(); ++i)
    nearest.emplace_back(edit_distance(tables.metadata[i].name, name), i);
  const std::size_t shown = std::min(kSuggestions, nearest.size());
  std::partial_sort(nearest.begin(), nearest.begin() + static_cast<std::ptrdiff_t>(shown), nearest.end());
  std::string text =
      fmt::format("no tensor is named '{}' among {} names; the nearest are:\n", name, tables.metadata.size());
  for (std::size_t i = 0; i < shown; ++i)
    text += fmt::format("  {}\n", tables.metadata[nearest[i].second].name);
  return text;
}

std::string parameter_name(const Recording& recording, std::uint32_t parameter) {
  const RecordedParameter& recorded = recording.parameters[parameter];
  const std::string& module = recording.modules[recorded.module].name;
  return module.empty() ? recorded.name : fmt::format("{}.{}", module, recorded.name);
}

std::string publishing_text(const InitTables& tables, const std::vector<std::uint32_t>& ranks) {
  std::vector<std::uint32_t> resident;
  for (const std::uint32_t rank : ranks) {
    if (tables.producer_resident[rank] != 0) resident.push_back(rank);
  }
  if (resident.empty()) return "gather: the owners' sources hand over whole groups as there is credit";
  if (resident.size() == ranks.size()) return "resident: the owners' sources keep it in place";
  return fmt::format("resident on {}, gather on the others", trainers_text(resident));
}

// Why the chunk takes its path, as far as tables tell.
std::string path_reason(const InitTables& tables, const Chunk& chunk) {
  const auto obstacle = why_not_reachable(tables, chunk.candidates, chunk.keys);
  if (obstacle) return obstacle->reason;
  if (chunk.path == Path::kMapped) return "every owner's memory can be mapped on this host";
  if (chunk.path == Path::kDirect)
    return "in long runs of bytes in the tensor and in the parameter, and reachable at every owner";
  return maps(tables.transport) ? "asked for, or read directly where it is contiguous"
                                : fmt::format("not contiguous on both sides, below {}, or asked for; {} maps nothing",
                                              format_bytes(kMinDirectBytes), to_string(tables.transport));
}

// What this worker takes of an owner class, by the producers of its block.
std::string taken_text(const WorkerPlan& plan, std::uint32_t owner_class,
                       const std::vector<BlockOwner>& block) {
  std::map<std::uint32_t, std::uint64_t> taken;
  for (const Chunk& chunk : plan.chunks) {
    if (chunk.owner_class != owner_class) continue;
    for (const Run& run : chunk.runs) {
      for (std::uint32_t k = run.first_key; k < run.first_key + run.key_count; ++k)
        taken[run.producer] += chunk.keys[k].bytes;
    }
  }
  std::vector<std::string> parts;
  for (const BlockOwner& owner : block) {
    if (parts.size() == kShownRanks)
      return fmt::format("{}, ... ({} in all)", fmt::join(parts, ", "), block.size());
    parts.push_back(fmt::format("{} (weight {}, {} in all)", owner.producer, owner.weight,
                                format_bytes(taken[owner.producer])));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string explain_key(const InitTables& tables, const WorkerPlan& plan, const Recording& recording,
                        const Chunk& chunk, std::uint32_t k) {
  const ChunkKey& key = chunk.keys[k];
  const auto run = std::find_if(chunk.runs.begin(), chunk.runs.end(), [&](const Run& r) {
    return k >= r.first_key && k < r.first_key + r.key_count;
  });
  if (run == chunk.runs.end()) return {};
  const std::uint32_t workers = effective_workers_per_replica(tables);
  std::vector<std::uint32_t> owners = chunk.candidates;
  std::sort(owners.begin(), owners.end());
  const std::vector<BlockOwner> block = weighted_block(owners, plan.consumer, workers);

  std::string text =
      fmt::format("  {} {} from trainer {}, {}: chunk {}, key {}, bytes {} to {} of {}, seq {}\n",
                  format_bytes(key.bytes), dtype_name(key.wire_dtype), run->producer, to_string(chunk.path),
                  chunk.chunk_id, k, key.offset, key.offset + key.bytes, chunk.bytes, run->seq);
  text += fmt::format(
      "    elements {}{}\n", to_string(key.slice),
      key.piece == 0 ? std::string()
                     : fmt::format(" of piece {}", to_string(tables.ownership.pieces[key.piece - 1].box)));
  for (const PlannedScatter& scatter : chunk.scatters) {
    if (scatter.key != k) continue;
    const Destination& to = scatter.destination;
    const RecordedParameter& parameter = recording.parameters[to.parameter];
    text += fmt::format("    into {} {} {}: offset {}, shape {}, stride {}\n",
                        parameter_name(recording, to.parameter), dtype_name(parameter.dtype),
                        shape_text(parameter.shape), to.offset, shape_text(to.shape), shape_text(to.stride));
    if (to.dtype == parameter.dtype && to.dtype != key.wire_dtype) {
      text += fmt::format("    converted from {} to {} where it lands\n", dtype_name(key.wire_dtype),
                          dtype_name(to.dtype));
    }
  }
  if (owners.size() == 1) {
    text += fmt::format("    why trainer {}: it alone holds it (owner class {})\n", run->producer,
                        chunk.owner_class);
  } else {
    text += fmt::format("    why trainer {}: of {} (owner class {}) worker {} of {} takes from {}{}\n",
                        run->producer, trainers_text(owners), chunk.owner_class, plan.consumer % workers,
                        workers, taken_text(plan, chunk.owner_class, block),
                        block.size() > 1 ? ": evened out by weight" : "");
  }
  if (chunk.candidates.size() > 1) {
    std::vector<std::uint32_t> others;
    for (const std::uint32_t candidate : chunk.candidates) {
      if (candidate != run->producer) others.push_back(candidate);
    }
    text += fmt::format("    if it is lost: {}\n", trainers_text(others));
  }
  text += fmt::format("    why {}: {}\n", to_string(chunk.path), path_reason(tables, chunk));
  return text;
}

std::string explain_worker(const InitTables& tables, const WorkerPlan& plan, const Recording& recording,
                           std::uint32_t name) {
  std::string text;
  for (const Scatter& scatter : recording.scatters) {
    if (scatter.name != name) continue;
    text += fmt::format("  {} takes {} {}: {}\n", parameter_name(recording, scatter.destination.parameter),
                        dtype_name(scatter.wire_dtype), shape_text(scatter.shape),
                        scatter.chain.empty() ? "all of it" : scatter.chain);
    if (scatter.slice.numel() == 0) text += "    no elements: nothing is pulled for it\n";
  }
  for (const Chunk& chunk : plan.chunks) {
    for (std::uint32_t k = 0; k < chunk.keys.size(); ++k) {
      if (chunk.keys[k].name == name) text += explain_key(tables, plan, recording, chunk, k);
    }
  }
  if (!text.empty()) return text;
  const auto dead = std::lower_bound(recording.dead.begin(), recording.dead.end(), name);
  if (dead == recording.dead.end() || *dead != name) return "  in no plan of this worker\n";
  const auto at = static_cast<std::size_t>(dead - recording.dead.begin());
  const std::string reason =
      at < recording.unused_reasons.size() ? recording.unused_reasons[at] : std::string();
  return fmt::format("  dead here{}{}\n", reason.empty() ? "" : ": ", reason);
}

// Columns as wide as their widest cell, two spaces apart, numbers and all aligned right but for the first
// column.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const {
    std::vector<std::size_t> width(rows_.front().size(), 0);
    for (const auto& row : rows_) {
      for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
    }
    std::string out;
    for (const auto& row : rows_) {
      for (std::size_t c = 0; c < row.size(); ++c) {
        out += c == 0 ? fmt::format("{:<{}}", row[c], width[c]) : fmt::format("  {:>{}}", row[c], width[c]);
      }
      out += '\n';
    }
    return out;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace

std::string explain(const InitTables& tables, std::string_view name) {
  const auto index = index_of(tables, name);
  if (!index) return unknown_name(tables, name);
  const TensorMeta& meta = tables.metadata[*index];
  std::string text = fmt::format(
      "{} {} {}, {}; name {}, gather group {}\n", meta.name, dtype_name(meta.dtype), shape_text(meta.shape),
      format_bytes(bytes_of(meta.dtype, checked_numel(meta.shape).value_or(0)).value()), *index,
      group_of_names(tables)[*index]);
  const Ownership& own = tables.ownership;
  if (own.name_owner_class.empty()) {
    std::vector<std::uint32_t> everyone(tables.producers.size());
    std::iota(everyone.begin(), everyone.end(), 0u);
    text += fmt::format("held whole by every trainer ({}), {}\n", tables.producers.size(),
                        publishing_text(tables, everyone));
  } else if (own.name_owner_class[*index] >= 0) {
    const auto owner_class = static_cast<std::uint32_t>(own.name_owner_class[*index]);
    const std::vector<std::uint32_t>& owners = own.owner_sets[owner_class];
    text += fmt::format("held whole by {} (owner class {}), {}\n", trainers_text(owners), owner_class,
                        publishing_text(tables, owners));
  } else {
    for (const OwnedPiece& piece : own.pieces) {
      if (piece.name != *index) continue;
      const std::vector<std::uint32_t>& owners = own.owner_sets[piece.owner_class];
      text += fmt::format("piece {} held by {} (owner class {}), {}\n", to_string(piece.box),
                          trainers_text(owners), piece.owner_class, publishing_text(tables, owners));
    }
  }
  return text;
}

std::string explain(const InitTables& tables, const WorkerPlan& plan, const Recording& recording,
                    std::string_view name) {
  const auto index = index_of(tables, name);
  if (!index) return {};
  return fmt::format("worker {}:\n{}", plan.consumer, explain_worker(tables, plan, recording, *index));
}

std::string summarise(const InitTables& tables, const WorkerPlan& plan, const Recording& recording) {
  const std::uint32_t workers = effective_workers_per_replica(tables);
  std::string text =
      fmt::format("worker {}, {} of {} in replica {} of {}; {} names in {} gather groups\n", plan.consumer,
                  plan.consumer % workers, workers, plan.consumer / workers, tables.num_consumers / workers,
                  tables.metadata.size(), tables.group_lens.size());
  std::uint64_t keys = 0, largest = 0, mapped = 0, direct = 0;
  std::map<std::uint32_t, std::uint64_t> from;
  for (const Chunk& chunk : plan.chunks) {
    keys += chunk.keys.size();
    largest = std::max(largest, chunk.bytes);
    mapped += chunk.path == Path::kMapped ? 1 : 0;
    direct += chunk.path == Path::kDirect ? 1 : 0;
    for (const Run& run : chunk.runs) {
      for (std::uint32_t k = run.first_key; k < run.first_key + run.key_count; ++k)
        from[run.producer] += chunk.keys[k].bytes;
    }
  }
  text += fmt::format(
      "keeps {}, moves {} per sync in {} chunks ({} mapped, {} direct, the largest {}) of {} keys\n",
      format_bytes(plan.bytes_kept), format_bytes(plan.bytes_planned), plan.chunks.size(), mapped, direct,
      format_bytes(largest), keys);
  if (plan.receive_slot_bytes > 0)
    text += fmt::format("receive slots: {} x {}\n", plan.ring_depth, format_bytes(plan.receive_slot_bytes));
  text += fmt::format("takes nothing from {} groups; {} dead names\n\n", plan.pre_free.size(),
                      recording.dead.size());
  Table table({"trainer", "serves", "pulls", "serve slots", "publishes"});
  for (const ProducerPlan& producer : plan.producers) {
    table.add({fmt::format("{}", producer.producer), format_bytes(from[producer.producer]),
               fmt::format("{}", producer.pulls),
               producer.serve_slot_bytes == 0
                   ? "-"
                   : fmt::format("{} x {}", plan.ring_depth, format_bytes(producer.serve_slot_bytes)),
               tables.producer_resident[producer.producer] != 0 ? "resident" : "gather"});
  }
  text += table.text();
  for (const std::string& conversion : recording.conversions)
    text += fmt::format("converted: {}\n", conversion);
  return text;
}

}  // namespace shardpull
