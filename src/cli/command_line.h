// From words to commands.
#pragma once

#include <span>
#include <string>
#include <variant>
#include <vector>

#include "cli/commands.h"
#include "cli/environment.h"

namespace shardpull::cli {

// The command line asked for a text (help, the version: code 0), or it was wrong (code 2).
struct Notice {
  int exit_code = kExitUsage;
  std::string text;
};

using Command = std::variant<Notice, GenerateArguments, InspectArguments, PlanArguments, SyncArguments,
                             TrainerArguments, WorkerArguments, DoctorArguments, SimulateArguments>;

// Parses what follows the program's name. Never fails otherwise than by a Notice, which names the flag and
// the accepted form. `environment` says what trainer and worker processes were not given (cli/environment.h).
Command parse_command_line(const std::vector<std::string>& words, const Environment& environment);

// The flags that give another process the same fleet settings; parse_command_line reads them back.
std::vector<std::string> to_flags(const FleetArguments& fleet);
std::vector<std::string> to_flags(const VersionArguments& versions);

// Parses, runs, and returns the exit code.
int run(int argc, const char* const* argv);

}  // namespace shardpull::cli
