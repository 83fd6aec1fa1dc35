#include "plan/restrict.h"

#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/status_macros.h"
#include "plan/plan_errors.h"

namespace shardpull {
namespace {

constexpr std::uint32_t kNone = UINT32_MAX;

// Puts `key` after `end`; returns where it ends. It cannot overflow: no key lies later than in the whole
// plan.
std::uint64_t place(ChunkKey& key, std::uint64_t end) {
  key.offset = *checked_align_up(end, kLayoutAlignment);
  return key.offset + key.bytes;
}

// A module that would hold two versions: fed by a listed and an unlisted name.
Status check_modules(const Recording& recording, const InitTables& tables, const NameSet& names) {
  struct Fed {
    std::uint32_t by_listed = kNone, by_other = kNone;
  };
  std::map<std::uint32_t, Fed> modules;
  for (const Scatter& scatter : recording.scatters) {
    if (scatter.slice.numel() == 0) continue;
    Fed& fed = modules[recording.parameters[scatter.destination.parameter].module];
    std::uint32_t& by = listed(names, scatter.name) ? fed.by_listed : fed.by_other;
    if (by == kNone) by = scatter.name;
  }
  for (const auto& [module, fed] : modules) {
    if (fed.by_listed == kNone || fed.by_other == kNone) continue;
    const std::string& other = tables.metadata[fed.by_other].name;
    return plan_error(
        fmt::format("module '{}' is fed by '{}', which the sync moves, and by '{}', which it does not: "
                    "a sync of some names takes all names of a module or none",
                    recording.modules[module].name, tables.metadata[fed.by_listed].name, other),
        other);
  }
  return {};
}

// What is left of `chunk`, not yet numbered in its lanes; nothing when no key is listed.
std::optional<Chunk> restrict_chunk(const Chunk& chunk, const NameSet& names) {
  Chunk left;
  std::vector<std::uint32_t> new_index(chunk.keys.size(), kNone);
  for (const Run& run : chunk.runs) {
    Run& to = left.runs.emplace_back();
    to.producer = run.producer;
    to.first_key = static_cast<std::uint32_t>(left.keys.size());
    for (std::uint32_t k = run.first_key; k < run.first_key + run.key_count; ++k) {
      if (!listed(names, chunk.keys[k].name)) continue;
      new_index[k] = static_cast<std::uint32_t>(left.keys.size());
      ChunkKey& key = left.keys.emplace_back(chunk.keys[k]);
      left.bytes = place(key, left.bytes);
      if (to.key_count++ == 0) to.offset = key.offset;
      to.bytes = left.bytes - to.offset;
    }
  }
  if (left.keys.empty()) return std::nullopt;
  left.chunk_id = chunk.chunk_id;
  left.group = chunk.group;
  left.owner_class = chunk.owner_class;
  left.path = chunk.path;
  left.candidates = chunk.candidates;
  left.encoding = chunk.encoding;
  for (const PlannedScatter& scatter : chunk.scatters) {
    if (new_index[scatter.key] != kNone)
      left.scatters.push_back({.key = new_index[scatter.key], .destination = scatter.destination});
  }
  return left;
}

// Modules begin with the first chunk that loads them and end with the last.
void assign_modules(WorkerPlan& plan, const Recording& recording) {
  std::vector<std::uint32_t> last(recording.modules.size(), kNone);
  std::vector<std::uint32_t> order;  // by first use
  for (std::uint32_t c = 0; c < plan.chunks.size(); ++c) {
    for (const PlannedScatter& scatter : plan.chunks[c].scatters) {
      const std::uint32_t module = recording.parameters[scatter.destination.parameter].module;
      if (last[module] == kNone) {
        order.push_back(module);
        plan.chunks[c].materialise.push_back(module);
      }
      last[module] = c;
    }
  }
  for (const std::uint32_t module : order) plan.chunks[last[module]].post_process.push_back(module);
}

std::uint64_t bytes_kept(const Recording& recording, const NameSet& names) {
  std::uint64_t bytes = 0;
  std::unordered_map<std::uint32_t, std::vector<const Scatter*>> kept;  // distinct keys, by name
  for (const Scatter& scatter : recording.scatters) {
    if (scatter.slice.numel() == 0 || !listed(names, scatter.name)) continue;
    std::vector<const Scatter*>& same_name = kept[scatter.name];
    const bool known = std::any_of(same_name.begin(), same_name.end(), [&](const Scatter* other) {
      return other->wire_dtype == scatter.wire_dtype && other->slice == scatter.slice;
    });
    if (known) continue;
    same_name.push_back(&scatter);
    bytes += *bytes_of(scatter.wire_dtype, scatter.slice.numel());
  }
  return bytes;
}

}  // namespace

bool listed(const NameSet& names, std::uint32_t name) {
  return names.empty() || (name / 8 < names.size() && (names[name / 8] >> (name % 8) & 1) != 0);
}

std::vector<std::uint32_t> listed_names(const NameSet& names, std::size_t count) {
  std::vector<std::uint32_t> out;
  for (std::uint32_t name = 0; !names.empty() && name < count; ++name) {
    if (listed(names, name)) out.push_back(name);
  }
  return out;
}

Status check_name_set(const NameSet& names, std::size_t count) {
  if (names.empty()) return {};
  if (names.size() != (count + 7) / 8) {
    return plan_error(
        fmt::format("a set of names has {} bytes, {} names take {}", names.size(), count, (count + 7) / 8));
  }
  if (count % 8 != 0 && names.back() >> (count % 8) != 0)
    return plan_error(fmt::format("a set of names lists one past the last of {}", count));
  if (std::all_of(names.begin(), names.end(), [](std::uint8_t byte) { return byte == 0; }))
    return plan_error("a set of names lists none");
  return {};
}

Result<NameSet> names_matching(const std::vector<std::string>& patterns,
                               const std::vector<TensorMeta>& metadata) {
  if (patterns.empty()) return NameSet();
  NameSet names((metadata.size() + 7) / 8, 0);
  for (const std::string& pattern : patterns) {
    bool any = false;
    for (std::size_t name = 0; name < metadata.size(); ++name) {
      if (fnmatch(pattern.c_str(), metadata[name].name.c_str(), 0) != 0) continue;
      names[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
      any = true;
    }
    if (!any) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("no name of the model matches '{}' (of {} names, the first is '{}')", pattern,
                                metadata.size(), metadata.empty() ? "" : metadata.front().name),
                    {.reason = Reason::kBadArgument});
    }
  }
  return names;
}

std::vector<bool> listed_groups(const NameSet& names, const InitTables& tables) {
  std::vector<bool> groups;
  groups.reserve(tables.group_lens.size());
  std::uint32_t name = 0;
  for (const std::uint32_t count : tables.group_lens) {
    bool any = false;
    for (const std::uint32_t end = name + count; name < end; ++name) any = any || listed(names, name);
    groups.push_back(any);
  }
  return groups;
}

std::vector<PullDescription> restrict_pulls(const std::vector<PullDescription>& pulls, const NameSet& names) {
  std::vector<PullDescription> left;
  for (const PullDescription& pull : pulls) {
    std::vector<ChunkKey> keys;
    std::uint64_t end = 0;
    for (const ChunkKey& key : pull.keys) {
      if (listed(names, key.name)) end = place(keys.emplace_back(key), end);
    }
    if (keys.empty()) continue;
    const auto seq = static_cast<std::uint32_t>(left.size());
    PullDescription& to = left.emplace_back();
    to.chunk_id = pull.chunk_id;
    to.run = pull.run;
    to.group = pull.group;
    to.owner_class = pull.owner_class;
    to.path = pull.path;
    to.lane = pull.lane;
    to.seq = seq;
    to.bytes = end;
    to.keys = std::move(keys);
  }
  return left;
}

Result<WorkerPlan> restrict_plan(const WorkerPlan& plan, const Recording& recording, const InitTables& tables,
                                 const NameSet& names) {
  if (names.empty()) return plan;
  SHARDPULL_RETURN_IF_ERROR(check_name_set(names, tables.metadata.size()));
  SHARDPULL_RETURN_IF_ERROR(check_modules(recording, tables, names));

  WorkerPlan left;
  left.consumer = plan.consumer;
  left.ring_depth = plan.ring_depth;
  left.sharing_group = plan.sharing_group;
  left.group_owners = plan.group_owners;
  left.receive_slot_bytes = plan.receive_slot_bytes;
  std::map<std::uint32_t, std::uint32_t> pulls_of;     // by producer: its lane's next seq
  std::map<std::uint32_t, std::size_t> last_chunk_of;  // by group
  for (const Chunk& chunk : plan.chunks) {
    std::optional<Chunk> some = restrict_chunk(chunk, names);
    if (!some) continue;
    for (Run& run : some->runs) {
      if (run.key_count != 0) run.seq = pulls_of[run.producer]++;
    }
    for (const ChunkKey& key : some->keys) left.bytes_planned += key.bytes;
    last_chunk_of[some->group] = left.chunks.size();
    left.chunks.push_back(std::move(*some));
  }
  assign_modules(left, recording);
  const std::vector<bool> groups = listed_groups(names, tables);
  for (std::uint32_t group = 0; group < groups.size(); ++group) {
    if (!groups[group]) continue;
    const auto last = last_chunk_of.find(group);
    if (last == last_chunk_of.end()) {
      left.pre_free.push_back(group);
    } else {
      left.chunks[last->second].signal_groups.push_back(group);
    }
  }
  for (const ProducerPlan& producer : plan.producers) {
    const auto pulls = pulls_of.find(producer.producer);
    if (pulls == pulls_of.end()) continue;
    ProducerPlan& to = left.producers.emplace_back(producer);
    to.pulls = pulls->second;
    to.digest = pulls_digest(pulls_at(left, producer.producer), left.ring_depth);
  }
  left.bytes_kept = bytes_kept(recording, names);
  return left;
}

}  // namespace shardpull
