// The plan of a whole fleet, made in one process without any of the fleet's processes: what `plan` prints and
// what `sync` checks before it starts anything.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/layouts.h"
#include "cli/model_input.h"
#include "cli/trainer_side.h"
#include "plan/plan.h"
#include "shardpull/bake.h"
#include "shardpull/status.h"

namespace shardpull::cli {

struct FleetPlanOptions {
  TrainerSide trainer;
  InferenceLayout inference;
  std::uint32_t ring_depth = 2;
  std::uint64_t export_pack_limit_bytes = 64ull << 20;
  PlanOptions plan;
  BakeOptions bake;
  std::vector<std::string> withheld;  // names that no rank holds
};

struct FleetPlan {
  TrainerHoldings holdings;
  InitTables tables;
  std::vector<Recording> recordings;  // by consumer
  std::vector<WorkerPlan> plans;      // by consumer
  std::int64_t bake_ns = 0, plan_ns = 0;
  std::uint64_t parameters = 0;  // elements that all workers keep together

  std::uint64_t keys() const;
  std::uint64_t chunks() const;
  std::uint64_t bytes_kept() const;
  Digest128 digest() const;  // over all workers' plans, in their order
};

// Builds, bakes and plans every worker. Errors are those of the rooms, with the worker named where there is
// one.
Result<FleetPlan> plan_fleet(const ModelInput& model, const FleetPlanOptions& options);

}  // namespace shardpull::cli
