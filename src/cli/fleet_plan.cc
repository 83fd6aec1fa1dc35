#include "cli/fleet_plan.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/status_macros.h"

namespace shardpull::cli {

std::uint64_t FleetPlan::keys() const {
  std::uint64_t count = 0;
  for (const WorkerPlan& plan : plans) {
    for (const Chunk& chunk : plan.chunks) count += chunk.keys.size();
  }
  return count;
}

std::uint64_t FleetPlan::chunks() const {
  std::uint64_t count = 0;
  for (const WorkerPlan& plan : plans) count += plan.chunks.size();
  return count;
}

std::uint64_t FleetPlan::bytes_kept() const {
  std::uint64_t bytes = 0;
  for (const WorkerPlan& plan : plans) bytes += plan.bytes_kept;
  return bytes;
}

Digest128 FleetPlan::digest() const {
  std::vector<std::uint64_t> words;  // the host is little-endian: so are the bytes
  for (const WorkerPlan& plan : plans) {
    const Digest128 one = shardpull::digest(plan);
    words.push_back(one.low);
    words.push_back(one.high);
  }
  const XXH128_hash_t all = XXH3_128bits(words.data(), words.size() * sizeof(std::uint64_t));
  return {.low = all.low64, .high = all.high64};
}

Result<FleetPlan> plan_fleet(const ModelInput& model, const FleetPlanOptions& options) {
  const SystemClock& clock = SystemClock::instance();
  const std::uint32_t count = workers(options.inference);
  FleetPlan fleet;

  const std::int64_t begin = clock.now_ns();
  for (std::uint32_t consumer = 0; consumer < count; ++consumer) {
    const std::string who = fmt::format("worker {}", consumer);
    auto built = build_model(model.config, options.inference, consumer);
    if (!built.ok()) return built.status().with_context(who);
    auto recording = bake(**built, model.metadata, options.bake);
    if (!recording.ok()) return recording.status().with_context(who);
    fleet.parameters += (*built)->parameter_count();
    fleet.recordings.push_back(std::move(*recording));
  }
  const std::int64_t baked = clock.now_ns();
  fleet.bake_ns = baked - begin;

  SHARDPULL_ASSIGN_OR_RETURN(fleet.holdings, trainer_holdings(model, options.trainer, options.withheld));
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<GatherGroup> groups, form_groups(model.metadata));
  const std::uint32_t ranks = fleet.holdings.ranks();
  std::vector<Holding> holdings;
  const Digest128 metadata = metadata_digest(model.metadata);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    Holding holding;
    holding.rank = rank;
    holding.digest = metadata;
    holding.whole.assign((model.metadata.size() + 7) / 8, 0);
    for (const std::uint32_t name : fleet.holdings.served[rank].whole) {
      holding.whole[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
    }
    holding.pieces = fleet.holdings.served[rank].pieces;
    holding.resident = fleet.holdings.resident;
    holdings.push_back(std::move(holding));
  }
  InitTables& tables = fleet.tables;
  SHARDPULL_ASSIGN_OR_RETURN(tables.ownership, resolve_ownership(model.metadata, holdings));
  tables.metadata = model.metadata;
  for (const GatherGroup& group : groups) tables.group_lens.push_back(group.count);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    tables.producers.push_back(fmt::format("trainer {}", rank));
    tables.producer_mappable.push_back(1);
    tables.producer_resident.push_back(fleet.holdings.resident ? 1 : 0);
  }
  tables.num_consumers = count;
  tables.num_replicas = static_cast<std::uint32_t>(options.inference.replicas);
  tables.workers_per_replica = count / tables.num_replicas;
  tables.ring_depth = options.ring_depth;
  tables.export_pack_limit = options.export_pack_limit_bytes;
  SHARDPULL_RETURN_IF_ERROR(validate(tables));
  for (std::uint32_t consumer = 0; consumer < count; ++consumer) {
    auto plan = plan_worker(tables, fleet.recordings[consumer], consumer, options.plan);
    if (!plan.ok()) return plan.status().with_context(fmt::format("worker {}", consumer));
    fleet.plans.push_back(std::move(*plan));
  }
  fleet.plan_ns = clock.now_ns() - baked;
  return fleet;
}

}  // namespace shardpull::cli
