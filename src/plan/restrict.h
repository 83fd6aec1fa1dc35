// A sync of some names: what of a plan it runs. Both sides apply the same pure functions, so that
// restrict_pulls(pulls_at(plan, p)) is pulls_at(restrict_plan(plan), p): keys of other names are left out,
// chunks and pulls without keys too; what is left of a chunk is laid out anew, so that no other byte moves,
// and sequence numbers are counted anew in each lane. Chunk ids, run numbers, paths, producers and slot sizes
// stay those of the whole plan: a restricted chunk fits the slots, and Chunk::chunk_id tells which chunk of
// the whole plan it is (it is no index into the restricted plan's chunks). A run that is left without keys
// keeps its place in Chunk::runs, with key_count 0: it is not pulled.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "shardpull/bake.h"
#include "shardpull/status.h"

namespace shardpull {

// Names as a bitmask over metadata order, lowest bit first, ceil(n/8) bytes; empty: all names.
using NameSet = std::vector<std::uint8_t>;
bool listed(const NameSet& names, std::uint32_t name);
// The listed ones of `count` names, ascending; none for all names, as SyncRequest::names has it.
std::vector<std::uint32_t> listed_names(const NameSet& names, std::size_t count);
// Of `count` names. Refused: another length, a bit past the last name, no bit set.
Status check_name_set(const NameSet& names, std::size_t count);
// The names that match one of the glob patterns (fnmatch(3) without flags: * also matches dots and slashes).
// No pattern: the empty set, all names. Refused: a pattern that matches nothing, naming it.
Result<NameSet> names_matching(const std::vector<std::string>& patterns,
                               const std::vector<TensorMeta>& metadata);

// Per group, whether any of its names is listed: the groups a restricted sync visits and signals.
std::vector<bool> listed_groups(const NameSet& names, const InitTables& tables);

std::vector<PullDescription> restrict_pulls(const std::vector<PullDescription>& pulls, const NameSet& names);
// Groups without a listed name are in no signal_groups, pre_free or chunk; materialise and post_process name
// modules of which something is loaded. Refused: a module fed by a listed and an unlisted name, naming both
// and the module.
Result<WorkerPlan> restrict_plan(const WorkerPlan& plan, const Recording& recording, const InitTables& tables,
                                 const NameSet& names);

}  // namespace shardpull
