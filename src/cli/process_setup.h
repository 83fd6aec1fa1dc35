// What the trainer and the worker command share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/launcher_channel.h"
#include "cli/model_input.h"
#include "shardpull/fleet.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// The fleet's options: its directory, the token from --token-file or SHARDPULL_TOKEN, and the time limits.
Result<FleetOptions> fleet_options(const FleetArguments& fleet, const ProcessArguments& process);

// The names that the syncs after the first send, ascending indices into the model's metadata; empty: all.
// Refused: a pattern that matches nothing.
Result<std::vector<std::uint32_t>> later_names(const FleetArguments& fleet, const ModelInput& model);

// What every process of a fleet must have been given alike, one a line: "--trainer=pp=2\n--inference=tp=2".
std::string describe_layouts(const FleetArguments& fleet);

// Lets this process have as many descriptors as its hard limit allows, and checks that they are enough for its
// part of a fleet of `ranks` and `workers`; a launcher has two to each process besides. The error says how
// many it takes and how to allow them.
Status check_descriptors(const FleetArguments& fleet, std::uint32_t ranks, std::uint32_t workers, bool launcher);

// Whether this process may start as many threads as a process of a fleet has, and `more`: libraries end a process
// that may not. The error says how many it may, and which limits there are.
Status check_threads(unsigned more = 0);

// Prepares this process to be `name` ("worker 1"): log lines carry it, a peer that goes does not end it with
// SIGPIPE, freed large blocks go back to the system at once.
void become(const std::string& name);

// Says why this process fails: to the launcher, which prints it, or on standard error. Returns the exit code.
int fail(LauncherChannel& launcher, const std::string& name, const Status& status);

}  // namespace shardpull::cli
