// `shardpull simulate --scale`: one sync of a fleet at its real size, under a model of its links.
#include <cstdio>

#include "base/status_macros.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/fleet_plan.h"
#include "cli/model_input.h"
#include "cli/progress.h"
#include "cli/scale_report.h"
#include "sim/scale.h"

namespace shardpull::cli {
namespace {

Status simulate(const ScaleArguments& arguments) {
  SHARDPULL_ASSIGN_OR_RETURN(const ModelInput model, planned_model(arguments.model));
  SHARDPULL_ASSIGN_OR_RETURN(const FleetPlan plan, plan_fleet(model, plan_options(arguments.fleet)));
  const sim::ScaleFleet fleet = scale_fleet(plan, arguments.fleet);
  Progress progress;
  auto report = sim::simulate_scale(fleet, arguments.links, [&](double fraction, std::int64_t now_ns) {
    progress.update("simulating", fraction, format_duration_ns(now_ns));
  });
  progress.clear();
  if (!report.ok()) return report.status().with_context("the simulated sync");
  const ScaleRun run{arguments, model, plan, fleet, *report};
  std::fputs((arguments.json ? to_json_text(run) : to_text(run)).c_str(), stdout);
  return {};
}

}  // namespace

int run_scale(const ScaleArguments& arguments) {
  const Status status = simulate(arguments);
  std::fflush(stdout);
  if (status.ok()) return kExitDone;
  std::fprintf(stderr, "error: %s\n", status.message().c_str());
  return kExitFailed;
}

}  // namespace shardpull::cli
