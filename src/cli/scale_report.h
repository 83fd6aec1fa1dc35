// What `simulate --scale` runs, and what it shows of that.
#pragma once

#include <cstdint>
#include <string>

#include "cli/commands.h"
#include "cli/fleet_plan.h"
#include "sim/scale.h"

namespace shardpull::cli {

// The simulator's view of a plan, which must outlive it.
sim::ScaleFleet scale_fleet(const FleetPlan& plan, const FleetArguments& arguments);

// What was simulated, and what came of it.
struct ScaleRun {
  const ScaleArguments& arguments;
  const ModelInput& model;
  const FleetPlan& plan;
  const sim::ScaleFleet& fleet;
  const sim::ScaleReport& report;
};

// Tables for people, and one JSON object. Both end in a newline.
std::string to_text(const ScaleRun& run);
std::string to_json_text(const ScaleRun& run);

}  // namespace shardpull::cli
