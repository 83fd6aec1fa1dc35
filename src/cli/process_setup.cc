#include "cli/process_setup.h"

#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdio>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "plan/restrict.h"

namespace shardpull::cli {
namespace {

Result<std::uint64_t> read_token(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return Status(StatusCode::kNotFound, fmt::format("--token-file: cannot read {}", path),
                  {.reason = Reason::kBadArgument});
  }
  std::string text(64, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) text.pop_back();
  std::uint64_t token = 0;
  bool good = text.size() == 16;
  for (const char c : text) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    good = good && digit >= 0;
    token = token * 16 + static_cast<std::uint64_t>(digit < 0 ? 0 : digit);
  }
  if (!good || token == 0) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format(
            "--token-file: {} does not hold a token; expected 16 hexadecimal digits that are not all 0",
            path),
        {.reason = Reason::kBadArgument});
  }
  return token;
}

}  // namespace

Result<FleetOptions> fleet_options(const FleetArguments& fleet, const ProcessArguments& process) {
  FleetOptions options;
  options.directory = process.fleet_directory;
  if (process.token_file.empty()) {
    SHARDPULL_ASSIGN_OR_RETURN(options.token, token_from_environment());
  } else {
    SHARDPULL_ASSIGN_OR_RETURN(options.token, read_token(process.token_file));
  }
  options.connect_timeout_ms = static_cast<std::uint64_t>(fleet.connect_timeout_ns / kNanosPerMilli);
  options.stall_timeout_ms = static_cast<std::uint64_t>(fleet.stall_timeout_ns / kNanosPerMilli);
  options.settings = describe_layouts(fleet);
  return options;
}

void become(const std::string& name) {
  set_log_identity(name);
  signal(SIGPIPE, SIG_IGN);
  mallopt(M_MMAP_THRESHOLD, 256 << 10);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;  // a segment is a descriptor
    setrlimit(RLIMIT_NOFILE, &files);
  }
}

Result<std::vector<std::uint32_t>> later_names(const FleetArguments& fleet, const ModelInput& model) {
  auto set = names_matching(fleet.names, model.metadata);
  if (!set.ok()) return set.status().with_context("--names");
  return listed_names(*set, model.metadata.size());
}

std::string describe_layouts(const FleetArguments& fleet) {
  // A file may lie elsewhere on another host; what it says reaches the workers with the plan's tables.
  const std::string trainer =
      fleet.trainer.file.empty() ? "--trainer " + to_string(fleet.trainer) : "--trainer-layout";
  std::string text = fmt::format("{} --inference {}", trainer, to_string(fleet.inference));
  for (const std::string& pattern : fleet.names) text += " --names " + pattern;
  return text;
}

int fail(LauncherChannel& launcher, const std::string& name, const Status& status) {
  if (launcher.attached()) {
    launcher.send_error(status);
  } else {
    const bool named = status.message().starts_with(name + " ") || status.message().starts_with(name + ":");
    std::fprintf(stderr, "error: %s%s%s\n", named ? "" : name.c_str(), named ? "" : ": ",
                 status.message().c_str());
  }
  return kExitFailed;
}

}  // namespace shardpull::cli
