// `shardpull doctor`: what of this host makes a fleet slow or fail, and the command that helps.
#include <csignal>
#include <cstdio>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/host_report.h"

namespace shardpull::cli {

int run_doctor(const DoctorArguments& arguments) {
  std::signal(SIGPIPE, SIG_IGN);  // whoever is asked may hang up
  const HostFacts facts = read_host_facts(arguments);
  const std::vector<Finding> findings = findings_of(facts, arguments);
  std::fputs((arguments.json ? as_json(facts, findings) : as_text(facts, findings)).c_str(), stdout);
  std::fflush(stdout);
  std::string failing;
  for (const Finding& each : findings) {
    if (each.severity == Severity::kFails) failing += (failing.empty() ? "" : ", ") + each.name;
  }
  if (failing.empty()) return kExitDone;
  std::fputs(fmt::format("error: a fleet would fail here by: {}\n", failing).c_str(), stderr);
  return kExitFailed;
}

}  // namespace shardpull::cli
