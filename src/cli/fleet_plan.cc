#include "cli/fleet_plan.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <thread>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/status_macros.h"
#include "cli/recordings.h"
#include "plan/restrict.h"
#include "runtime/hot_transport.h"

namespace shardpull::cli {

namespace {

// Runs work(0), ..., work(count - 1) and returns the status of the lowest one that failed.
Status for_each_in_parallel(std::uint32_t count, const std::function<Status(std::uint32_t)>& work) {
  std::vector<Status> results(count);
  std::atomic<std::uint32_t> next{0};
  const auto run = [&] {
    for (std::uint32_t i = next++; i < count; i = next++) results[i] = work(i);
  };
  const std::uint32_t threads = std::min(count, std::max(1u, std::thread::hardware_concurrency()));
  {
    std::vector<std::jthread> others;
    for (std::uint32_t t = 1; t < threads; ++t) others.emplace_back(run);
    run();
  }
  for (Status& result : results) SHARDPULL_RETURN_IF_ERROR(std::move(result));
  return {};
}

// The first worker of a replica of each set of workers that are built alike, and per worker its set: they are
// where stage, part of the tensors and part of the experts are the same.
struct Alike {
  std::vector<std::uint32_t> first;
  std::vector<std::uint32_t> set_of;
};

Result<Alike> workers_alike(const InferenceLayout& layout, std::uint32_t workers) {
  Alike alike;
  std::map<std::tuple<int, int, int>, std::uint32_t> sets;
  for (std::uint32_t worker = 0; worker < workers; ++worker) {
    SHARDPULL_ASSIGN_OR_RETURN(const WorkerCoordinates at, worker_coordinates(layout, worker));
    const auto [set, fresh] = sets.try_emplace({at.pp_rank, at.tp_rank, at.ep_rank},
                                               static_cast<std::uint32_t>(alike.first.size()));
    if (fresh) alike.first.push_back(worker);
    alike.set_of.push_back(set->second);
  }
  return alike;
}

// Recordings say nothing of each other.
Alike each_for_itself(std::uint32_t workers) {
  Alike alike;
  for (std::uint32_t worker = 0; worker < workers; ++worker) {
    alike.first.push_back(worker);
    alike.set_of.push_back(worker);
  }
  return alike;
}

// What each rank declares, for resolve_ownership.
std::vector<Holding> declared(const ModelInput& model, const TrainerHoldings& holdings) {
  const Digest128 digest = metadata_digest(model.metadata);
  std::vector<Holding> out(holdings.ranks());
  for (std::uint32_t rank = 0; rank < out.size(); ++rank) {
    Holding& holding = out[rank];
    holding.rank = rank;
    holding.digest = digest;
    holding.whole.assign((model.metadata.size() + 7) / 8, 0);
    for (const std::uint32_t name : holdings.served[rank].whole) {
      holding.whole[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
    }
    holding.pieces = holdings.served[rank].pieces;
    holding.resident = holdings.resident;
  }
  return out;
}

}  // namespace

std::uint64_t FleetPlan::keys() const {
  std::uint64_t count = 0;
  for (const WorkerPlan& plan : plans) {
    for (const Chunk& chunk : plan.chunks) count += chunk.keys.size();
  }
  return count * tables.num_replicas;
}

std::uint64_t FleetPlan::chunks() const {
  std::uint64_t count = 0;
  for (const WorkerPlan& plan : plans) count += plan.chunks.size();
  return count * tables.num_replicas;
}

std::uint64_t FleetPlan::bytes_kept() const {
  std::uint64_t bytes = 0;
  for (const WorkerPlan& plan : plans) bytes += plan.bytes_kept;
  return bytes * tables.num_replicas;
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

Result<ModelInput> planned_model(const ModelArguments& arguments, bool any_architecture) {
  return arguments.shape ? model_of_shape(*arguments.shape, arguments.overrides)
                         : open_model(arguments.directory, any_architecture);
}

FleetPlanOptions plan_options(const FleetArguments& fleet) {
  return {.trainer = fleet.trainer,
          .inference = fleet.inference,
          .ring_depth = fleet.ring_depth,
          .export_pack_limit_bytes = fleet.export_pack_limit_bytes,
          .transport = fleet.transport == TransportKind::kAuto ? TransportKind::kShm : fleet.transport,
          .plan = {.max_chunk_bytes = fleet.max_chunk_bytes,
                   .chunk_split = fleet.chunk_split,
                   .pull_split = fleet.pull_split,
                   .path = policy_of(fleet.path)},
          .bake = {},
          .recordings = {},
          .withheld = {},
          .names = fleet.names};
}

Result<FleetPlan> plan_fleet(const ModelInput& model, const FleetPlanOptions& options) {
  const SystemClock& clock = SystemClock::instance();
  const std::uint32_t count = workers(options.inference);
  const auto replicas = static_cast<std::uint32_t>(options.inference.replicas);
  const std::uint32_t per_replica = count / replicas;
  FleetPlan fleet;

  const std::int64_t begin = clock.now_ns();
  SHARDPULL_ASSIGN_OR_RETURN(Alike alike, options.recordings.empty()
                                              ? workers_alike(options.inference, per_replica)
                                              : Result<Alike>(each_for_itself(per_replica)));
  fleet.recordings.resize(alike.first.size());
  SHARDPULL_RETURN_IF_ERROR(
      for_each_in_parallel(static_cast<std::uint32_t>(alike.first.size()), [&](std::uint32_t set) -> Status {
        const std::string who = fmt::format("worker {}", alike.first[set]);
        if (!options.recordings.empty()) {
          SHARDPULL_ASSIGN_OR_RETURN(RecordingFile file,
                                     load_recording(options.recordings[set], model, options.inference, set));
          fleet.recordings[set] = std::move(file.recording);
          return {};
        }
        auto built = build_model(model.config, options.inference, alike.first[set]);
        if (!built.ok()) return built.status().with_context(who);
        auto recording = bake(**built, model.metadata, options.bake);
        if (!recording.ok()) return recording.status().with_context(who);
        fleet.recordings[set] = std::move(*recording);
        return {};
      }));
  fleet.recording_of = std::move(alike.set_of);
  const std::int64_t baked = clock.now_ns();
  fleet.bake_ns = baked - begin;

  SHARDPULL_ASSIGN_OR_RETURN(fleet.holdings, trainer_holdings(model, options.trainer, options.withheld));
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<GatherGroup> groups, form_groups(model.metadata));
  InitTables& tables = fleet.tables;
  auto ownership = resolve_ownership(model.metadata, declared(model, fleet.holdings));
  if (!ownership.ok()) {
    return options.trainer.file.empty() ? ownership.status()
                                        : ownership.status().with_context(options.trainer.file);
  }
  tables.ownership = std::move(*ownership);
  tables.metadata = model.metadata;
  for (const GatherGroup& group : groups) tables.group_lens.push_back(group.count);
  for (std::uint32_t rank = 0; rank < fleet.holdings.ranks(); ++rank) {
    tables.producers.push_back(fmt::format("trainer {}", rank));
    tables.producer_mappable.push_back(1);
    tables.producer_resident.push_back(fleet.holdings.resident ? 1 : 0);
  }
  tables.num_consumers = count;
  tables.num_replicas = replicas;
  tables.workers_per_replica = per_replica;
  tables.ring_depth = options.ring_depth;
  tables.export_pack_limit = options.export_pack_limit_bytes;
  tables.transport = options.transport;
  SHARDPULL_RETURN_IF_ERROR(validate(tables));
  fleet.plans.resize(per_replica);
  SHARDPULL_RETURN_IF_ERROR(for_each_in_parallel(per_replica, [&](std::uint32_t consumer) -> Status {
    auto plan = plan_worker(tables, fleet.recording(consumer), consumer, options.plan);
    if (!plan.ok()) return plan.status().with_context(fmt::format("worker {}", consumer));
    fleet.plans[consumer] = std::move(*plan);
    return {};
  }));
  fleet.plan_ns = clock.now_ns() - baked;

  auto names = names_matching(options.names, model.metadata);
  if (!names.ok()) return names.status().with_context("--names");
  for (std::uint32_t consumer = 0; consumer < per_replica && !names->empty(); ++consumer) {
    const auto some = restrict_plan(fleet.plans[consumer], fleet.recording(consumer), tables, *names);
    if (!some.ok()) return some.status().with_context(fmt::format("--names: worker {}", consumer));
  }
  return fleet;
}

}  // namespace shardpull::cli
