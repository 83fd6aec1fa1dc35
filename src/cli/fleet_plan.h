// The plan of a whole fleet, made in one process without any of the fleet's processes: what `plan` prints and
// what `sync` checks before it starts anything.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/commands.h"
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
  TransportKind transport = TransportKind::kShm;
  PlanOptions plan;
  BakeOptions bake;
  std::vector<std::string> recordings;  // files to read instead, by worker of a replica; none: bake
  std::vector<std::string> withheld;    // names that no rank holds
  std::vector<std::string> names;       // patterns of syncs of some names, checked against all workers
};

// The model that is to be planned: a shape of the catalogue or a directory. `any_architecture`: as
// open_model.
Result<ModelInput> planned_model(const ModelArguments& arguments, bool any_architecture = false);

// What a fleet's arguments say of its plan.
FleetPlanOptions plan_options(const FleetArguments& fleet);

// Worker w of every replica does the same, so its plan is there once; so is a recording that several workers
// share.
struct FleetPlan {
  TrainerHoldings holdings;
  InitTables tables;
  std::vector<Recording> recordings;        // the distinct ones, by first worker
  std::vector<std::uint32_t> recording_of;  // by worker of a replica
  std::vector<WorkerPlan> plans;            // by worker of a replica
  std::int64_t bake_ns = 0, plan_ns = 0;

  std::uint32_t workers() const { return tables.num_consumers; }
  const WorkerPlan& plan(std::uint32_t consumer) const { return plans[consumer % plans.size()]; }
  const Recording& recording(std::uint32_t consumer) const {
    return recordings[recording_of[consumer % plans.size()]];
  }

  std::uint64_t keys() const;  // these three over all workers of the fleet
  std::uint64_t chunks() const;
  std::uint64_t bytes_kept() const;
  Digest128 digest() const;  // over the plans of a replica's workers, in their order
};

// Builds, bakes and plans every worker, on as many threads as there are processors; the result does not
// depend on them. Errors are those of the rooms, with the first worker named that has one.
Result<FleetPlan> plan_fleet(const ModelInput& model, const FleetPlanOptions& options);

}  // namespace shardpull::cli
