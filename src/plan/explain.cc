// The plan in words.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/units.h"
#include "plan/boxes.h"
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

// Changed, added and dropped characters that lead from `a` to `b`.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
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

// Why the chunk takes its path, as far as tables tell.
std::string path_reason(const InitTables& tables, const Chunk& chunk) {
  if (chunk.path == Path::kMapped) return "every owner's memory can be mapped on this host";
  for (const std::uint32_t producer : chunk.candidates) {
    if (tables.producer_mappable[producer] != 0) continue;
    for (const ChunkKey& key : chunk.keys) {
      const TensorMeta& meta = tables.metadata[key.name];
      const auto bytes = bytes_of(meta.dtype, checked_numel(meta.shape).value_or(0));
      if (!bytes.ok() || *bytes <= tables.export_pack_limit) continue;
      return fmt::format(
          "trainer {} does not hold '{}' in memory that can be mapped, and its {} are above "
          "export_pack_limit, {}",
          producer, meta.name, format_bytes(*bytes), format_bytes(tables.export_pack_limit));
    }
  }
  return "asked for, or the transport cannot map";
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
  const std::vector<std::uint32_t> block = route_block(owners, plan.consumer, workers);

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
  text += fmt::format(
      "    why trainer {}: of {} (owner class {}) worker {} of {} takes from {}; gather group {} rotates to "
      "place {}\n",
      run->producer, trainers_text(owners), chunk.owner_class, plan.consumer % workers, workers,
      ranks_text(block), chunk.group, block.empty() ? 0 : chunk.group % block.size());
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

std::string explain(const InitTables& tables, const std::vector<WorkerPlan>& plans,
                    const std::vector<Recording>& recordings, std::string_view name) {
  const auto found = std::find_if(tables.metadata.begin(), tables.metadata.end(),
                                  [&](const TensorMeta& meta) { return meta.name == name; });
  if (found == tables.metadata.end()) return unknown_name(tables, name);
  const auto index = static_cast<std::uint32_t>(found - tables.metadata.begin());
  const std::uint32_t group = group_of_names(tables)[index];

  std::string text = fmt::format(
      "{} {} {}, {}; name {}, gather group {}\n", found->name, dtype_name(found->dtype),
      shape_text(found->shape),
      format_bytes(bytes_of(found->dtype, checked_numel(found->shape).value_or(0)).value()), index, group);
  const Ownership& own = tables.ownership;
  if (own.name_owner_class.empty()) {
    text += fmt::format("held whole by every trainer ({})\n", tables.producers.size());
  } else if (own.name_owner_class[index] >= 0) {
    const auto owner_class = static_cast<std::uint32_t>(own.name_owner_class[index]);
    text += fmt::format("held whole by {} (owner class {})\n", trainers_text(own.owner_sets[owner_class]),
                        owner_class);
  } else {
    for (const OwnedPiece& piece : own.pieces) {
      if (piece.name != index) continue;
      text += fmt::format("piece {} held by {} (owner class {})\n", to_string(piece.box),
                          trainers_text(own.owner_sets[piece.owner_class]), piece.owner_class);
    }
  }
  for (std::size_t i = 0; i < plans.size() && i < recordings.size(); ++i) {
    text += fmt::format("worker {}:\n", plans[i].consumer);
    text += explain_worker(tables, plans[i], recordings[i], index);
  }
  return text;
}

std::string summarise(const InitTables& tables, const std::vector<WorkerPlan>& plans,
                      const std::vector<Recording>& recordings) {
  const std::uint32_t workers = effective_workers_per_replica(tables);
  std::string text = fmt::format(
      "{} trainer{}, {} worker{} in {} replica{}, ring depth {}; {} names in {} gather groups\n\n",
      tables.producers.size(), tables.producers.size() == 1 ? "" : "s", tables.num_consumers,
      tables.num_consumers == 1 ? "" : "s", tables.num_replicas, tables.num_replicas == 1 ? "" : "s",
      tables.ring_depth, tables.metadata.size(), tables.group_lens.size());

  struct Served {
    std::uint64_t bytes = 0;
    std::uint64_t pulls = 0;
    std::map<std::uint32_t, std::uint64_t> slot;  // per sharing group, the largest slot
  };
  std::vector<Served> served(tables.producers.size());
  std::uint64_t hottest_bytes = 0;
  std::pair<std::uint32_t, std::uint32_t> hottest{0, 0};

  Table table({"worker", "kept", "moved", "chunks", "keys", "largest", "mapped", "receive slots",
               "groups not taken", "dead names", "conversions"});
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const WorkerPlan& plan = plans[i];
    std::uint64_t keys = 0, largest = 0, mapped = 0;
    std::vector<std::uint64_t> from(tables.producers.size(), 0);
    for (const Chunk& chunk : plan.chunks) {
      keys += chunk.keys.size();
      largest = std::max(largest, chunk.bytes);
      mapped += chunk.path == Path::kMapped ? 1 : 0;
      for (const Run& run : chunk.runs) {
        for (std::uint32_t k = run.first_key; k < run.first_key + run.key_count; ++k)
          from[run.producer] += chunk.keys[k].bytes;
        served[run.producer].pulls += 1;
        if (chunk.path == Path::kPacked) {
          std::uint64_t& slot = served[run.producer].slot[plan.sharing_group];
          slot = std::max(slot, run.bytes);
        }
      }
    }
    for (std::uint32_t producer = 0; producer < from.size(); ++producer) {
      served[producer].bytes += from[producer];
      if (from[producer] > hottest_bytes) {
        hottest_bytes = from[producer];
        hottest = {producer, plan.consumer};
      }
    }
    table.add({fmt::format("{}", plan.consumer), format_bytes(plan.bytes_kept),
               format_bytes(plan.bytes_planned), fmt::format("{}", plan.chunks.size()),
               fmt::format("{}", keys), format_bytes(largest), fmt::format("{}", mapped),
               plan.receive_slot_bytes == 0
                   ? "-"
                   : fmt::format("{} x {}", plan.ring_depth, format_bytes(plan.receive_slot_bytes)),
               fmt::format("{}", plan.pre_free.size()),
               i < recordings.size() ? fmt::format("{}", recordings[i].dead.size()) : "-",
               i < recordings.size() ? fmt::format("{}", recordings[i].conversions.size()) : "-"});
  }
  text += table.text() + "\n";

  Table trainers({"trainer", "serves", "pulls", "serve slots"});
  for (std::uint32_t producer = 0; producer < served.size(); ++producer) {
    std::uint64_t slots = 0;
    for (const auto& [group, bytes] : served[producer].slot) slots += bytes * tables.ring_depth;
    trainers.add({fmt::format("{}", producer), format_bytes(served[producer].bytes),
                  fmt::format("{}", served[producer].pulls), slots == 0 ? "-" : format_bytes(slots)});
  }
  text += trainers.text();
  if (hottest_bytes > 0) {
    text += fmt::format("\nhottest pair: trainer {} to worker {}, {}\n", hottest.first, hottest.second,
                        format_bytes(hottest_bytes));
  }
  if (workers < tables.num_consumers) {
    text += fmt::format("replicas share serve slots: {} sharing groups of {}\n", workers,
                        tables.num_consumers / workers);
  }
  for (std::size_t i = 0; i < plans.size() && i < recordings.size(); ++i) {
    for (const std::string& conversion : recordings[i].conversions) {
      text += fmt::format("converted, worker {}: {}\n", plans[i].consumer, conversion);
    }
  }
  return text;
}

}  // namespace shardpull
