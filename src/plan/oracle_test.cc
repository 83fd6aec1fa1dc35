// Goal: the chunk cut, packed layouts, order, signals and owners of the recorded plans, with the recording's
// settings: one chunk per group and owner class, packed, producers by rotation.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "oracles/oracle.h"
#include "plan/plan.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using namespace plan_testing;
using oracles::Oracle;

InitTables tables_of(const Oracle& oracle) {
  InitTables tables;
  for (int p = 0; p < oracle.num_producers; ++p) tables.producers.push_back("trainer-" + std::to_string(p));
  tables.metadata = oracle.names;
  tables.group_lens = oracle.group_lens;
  tables.ownership = {
      .owner_sets = oracle.owner_sets, .name_owner_class = oracle.name_owner_class, .pieces = {}};
  tables.producer_mappable.assign(tables.producers.size(), 1);
  tables.producer_resident.assign(tables.producers.size(), 0);
  tables.num_consumers = static_cast<std::uint32_t>(oracle.num_consumers);
  tables.num_replicas = static_cast<std::uint32_t>(oracle.num_replicas);
  tables.workers_per_replica = static_cast<std::uint32_t>(oracle.workers_per_replica);
  return tables;
}

Recording recording_of(const Oracle& oracle) {
  Recording recording;
  std::map<std::string, std::uint32_t> modules, parameters;
  std::vector<bool> live(oracle.names.size(), false);
  for (const auto& scatter : oracle.scatters) {
    live[scatter.name] = true;
    const auto module =
        modules.try_emplace(scatter.module, static_cast<std::uint32_t>(recording.modules.size()));
    if (module.second)
      recording.modules.push_back({.name = scatter.module, .type = scatter.type, .baked = true});
    const std::string path = scatter.module + "." + scatter.parameter;
    const auto parameter =
        parameters.try_emplace(path, static_cast<std::uint32_t>(recording.parameters.size()));
    if (parameter.second) {
      // Room enough for every window: the recording does not list biases.
      recording.parameters.push_back({.module = module.first->second,
                                      .name = scatter.parameter,
                                      .dtype = scatter.dtype,
                                      .shape = {1ll << 40},
                                      .stride = {1}});
    }
    recording.scatters.push_back({.name = scatter.name,
                                  .wire_dtype = scatter.wire_dtype,
                                  .slice = scatter.slice,
                                  .shape = scatter.shape,
                                  .chain = to_string(scatter.ops),
                                  .destination = {.parameter = parameter.first->second,
                                                  .dtype = scatter.dtype,
                                                  .offset = scatter.destination.offset,
                                                  .shape = scatter.destination.shape,
                                                  .stride = scatter.destination.stride}});
  }
  for (std::uint32_t name = 0; name < live.size(); ++name)
    (live[name] ? recording.live : recording.dead).push_back(name);
  return recording;
}

std::vector<std::string> module_names(const Recording& recording, const std::vector<std::uint32_t>& modules) {
  std::vector<std::string> names;
  for (const std::uint32_t module : modules) names.push_back(recording.modules[module].name);
  return names;
}

// Modules that only an empty copy feeds: the recorded plans leave them out, here they go with the first
// chunk.
std::vector<std::string> empty_modules(const Oracle& oracle) {
  std::map<std::string, std::int64_t> elements;
  for (const auto& scatter : oracle.scatters) elements[scatter.module] += scatter.slice.numel();
  std::vector<std::string> names;
  for (const auto& [module, count] : elements) {
    if (count == 0) names.push_back(module);
  }
  return names;
}

class RecordedPlan : public testing::TestWithParam<std::string> {};

TEST_P(RecordedPlan, equals_ours) {
  const Oracle oracle = oracles::load_oracle(GetParam());
  const InitTables tables = tables_of(oracle);
  ASSERT_TRUE(validate(tables).ok()) << validate(tables).message();
  const Recording recording = recording_of(oracle);

  std::vector<std::uint32_t> lens;
  for (const GatherGroup& group : must(form_groups(oracle.names))) lens.push_back(group.count);
  EXPECT_EQ(lens, oracle.group_lens);
  if (!oracle.group_owners.empty()) {
    EXPECT_EQ(group_owners(tables), oracle.group_owners);
  }

  if (!oracle.name_owner_class.empty()) {  // the same sets from what each trainer would declare
    auto holdings = holdings_of(oracle.names, static_cast<std::uint32_t>(oracle.num_producers));
    for (std::uint32_t name = 0; name < oracle.names.size(); ++name) {
      const auto owner_class = static_cast<std::size_t>(oracle.name_owner_class[name]);
      for (const std::uint32_t rank : oracle.owner_sets.at(owner_class)) hold(holdings[rank], name);
    }
    EXPECT_EQ(must(resolve_ownership(oracle.names, holdings)), tables.ownership);
  }

  const WorkerPlan plan =
      must(plan_worker(tables, recording, static_cast<std::uint32_t>(oracle.consumer_id),
                       {.max_chunk_bytes = 0, .path = PathPolicy::kPacked, .balance = Balance::kRotation}));
  EXPECT_EQ(plan.pre_free, oracle.pre_free);
  ASSERT_EQ(plan.chunks.size(), oracle.chunks.size());
  for (std::size_t i = 0; i < plan.chunks.size(); ++i) {
    SCOPED_TRACE("chunk " + std::to_string(i));
    const Chunk& ours = plan.chunks[i];
    const oracles::OracleChunk& theirs = oracle.chunks[i];
    ASSERT_EQ(ours.runs.size(), 1u);
    EXPECT_EQ(ours.runs[0].producer, theirs.owner);
    EXPECT_EQ(ours.candidates.front(), theirs.owner);
    EXPECT_EQ(ours.runs[0].seq, theirs.seq);
    EXPECT_EQ(ours.bytes, theirs.bytes);
    ASSERT_EQ(ours.keys.size(), theirs.layout.size());
    for (std::size_t k = 0; k < ours.keys.size(); ++k) {
      EXPECT_EQ(ours.keys[k].offset, theirs.layout[k].offset);
      EXPECT_EQ(ours.keys[k].wire_dtype, theirs.layout[k].dtype);
      EXPECT_EQ(ours.keys[k].slice.numel(), theirs.layout[k].numel);
    }
    ASSERT_EQ(ours.scatters.size(), theirs.scatters.size());
    for (std::size_t s = 0; s < ours.scatters.size(); ++s) {
      const auto& scatter = oracle.scatters[theirs.scatters[s]];
      const ChunkKey& key = ours.keys[ours.scatters[s].key];
      EXPECT_EQ(key.name, scatter.name);
      EXPECT_EQ(key.slice, scatter.slice);
      EXPECT_EQ(ours.scatters[s].destination.offset, scatter.destination.offset);
      EXPECT_EQ(ours.scatters[s].destination.shape, scatter.destination.shape);
      EXPECT_EQ(ours.scatters[s].destination.stride, scatter.destination.stride);
    }
    auto materialise = theirs.materialise, post_process = theirs.post_process;
    if (i == 0) {
      for (const std::string& module : empty_modules(oracle)) {
        materialise.push_back(module);
        post_process.push_back(module);
      }
    }
    EXPECT_EQ(module_names(recording, ours.materialise), materialise);
    EXPECT_EQ(module_names(recording, ours.post_process), post_process);
    EXPECT_EQ(ours.signal_groups, theirs.signal_groups);
  }
}

INSTANTIATE_TEST_SUITE_P(Oracles, RecordedPlan, testing::ValuesIn(oracles::oracle_files()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

}  // namespace
}  // namespace shardpull
