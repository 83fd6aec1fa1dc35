#include "cli/process_setup.h"

#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <future>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "base/units.h"
#include "cli/host_report.h"
#include "plan/restrict.h"

namespace shardpull::cli {
namespace {

// `where`: the flag and what it names, for messages.
Result<std::uint64_t> parse_token(std::string text, const std::string& where) {
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
  if (good && token != 0) return token;
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} does not hold a token; expected 16 hexadecimal digits that are not all 0", where),
                {.reason = Reason::kBadArgument});
}

Result<std::uint64_t> read_token_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return Status(StatusCode::kNotFound, fmt::format("--token-file: cannot read {}", path),
                  {.reason = Reason::kBadArgument});
  }
  std::string text(64, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse_token(std::move(text), "--token-file: " + path);
}

// Reads to the end or 64 bytes, and waits at most so long for whoever writes it.
Result<std::uint64_t> read_token_descriptor(int fd, std::int64_t timeout_ns) {
  const UniqueFd owner(fd);
  const std::string where = fmt::format("--token-fd: descriptor {}", fd);
  const std::int64_t deadline = SystemClock::instance().now_ns() + timeout_ns;
  std::string text;
  char buffer[64];
  while (text.size() < sizeof buffer) {
    const std::int64_t left = deadline - SystemClock::instance().now_ns();
    pollfd waiting{fd, POLLIN, 0};
    const int ready = left <= 0 ? 0 : poll(&waiting, 1, static_cast<int>(left / kNanosPerMilli) + 1);
    if (ready == 0) {
      return Status(StatusCode::kDeadlineExceeded, fmt::format("{} was neither written nor closed within {}", where, format_duration_ns(timeout_ns)),
                    {.reason = Reason::kBadArgument});
    }
    if (ready < 0 && errno == EINTR) continue;
    const ssize_t got = read(fd, buffer, sizeof buffer - text.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) {
      return Status(StatusCode::kNotFound, fmt::format("{} cannot be read: {}", where, std::strerror(errno)),
                    {.reason = Reason::kBadArgument});
    }
    if (got == 0) break;
    text.append(buffer, static_cast<std::size_t>(got));
  }
  return parse_token(std::move(text), where);
}

}  // namespace

Result<FleetOptions> fleet_options(const FleetArguments& fleet, const ProcessArguments& process) {
  FleetOptions options;
  options.directory = process.fleet_directory;
  if (process.token_fd >= 0) {
    SHARDPULL_ASSIGN_OR_RETURN(options.token, read_token_descriptor(process.token_fd, std::min(fleet.connect_timeout_ns, 10 * kNanosPerSecond)));
  } else if (!process.token_file.empty()) {
    SHARDPULL_ASSIGN_OR_RETURN(options.token, read_token_file(process.token_file));
  } else {
    SHARDPULL_ASSIGN_OR_RETURN(options.token, token_from_environment());
  }
  options.rendezvous = process.rendezvous;
  options.insecure_listen = process.insecure_listen;
  options.interfaces = process.interfaces;
  options.transport = fleet.transport;
  options.ucx_workers = fleet.ucx_workers;
  options.connect_timeout_ms = static_cast<std::uint64_t>(fleet.connect_timeout_ns / kNanosPerMilli);
  options.stall_timeout_ms = static_cast<std::uint64_t>(fleet.stall_timeout_ns / kNanosPerMilli);
  options.heartbeat_ms = static_cast<std::uint64_t>(fleet.heartbeat_ns / kNanosPerMilli);
  options.dead_after_ms = static_cast<std::uint64_t>(fleet.dead_after_ns / kNanosPerMilli);
  options.settings = describe_layouts(fleet);
  return options;
}

void become(const std::string& name) {
  set_log_identity(name);
  signal(SIGPIPE, SIG_IGN);
  mallopt(M_MMAP_THRESHOLD, 256 << 10);
}

Status check_descriptors(const FleetArguments& fleet, std::uint32_t ranks, std::uint32_t workers, bool launcher) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return {};
  if (files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) != 0 && getrlimit(RLIMIT_NOFILE, &files) != 0) return {};
  }
  std::uint64_t needed = descriptors_needed(ranks, workers, fleet.transport, fleet.ucx_workers);
  if (launcher) needed = std::max<std::uint64_t>(needed, 64 + 2ull * (ranks + workers));
  if (files.rlim_cur >= needed) return {};
  return Status(StatusCode::kResourceExhausted,
                fmt::format("a process of a fleet of {} trainers and {} workers needs {} descriptors over {}, and {} "
                            "are allowed: `ulimit -n {}` before it starts, once the hard limit allows it",
                            ranks, workers, needed, to_string(fleet.transport), files.rlim_cur, needed),
                {.reason = Reason::kLimit, .fault = Fault::kHost});
}

Status check_threads(unsigned more) {
  const std::size_t count = 24 + more;  // ours, gRPC's and UCX's
  std::promise<void> go;
  const std::shared_future<void> gate(go.get_future());
  std::vector<std::thread> threads;
  threads.reserve(count);
  std::string why;
  try {
    while (threads.size() < count) threads.emplace_back([gate] { gate.wait(); });
  } catch (const std::system_error& error) {
    why = error.what();
  }
  go.set_value();
  for (std::thread& thread : threads) thread.join();
  if (why.empty()) return {};
  return Status(StatusCode::kResourceExhausted,
                fmt::format("a process of a fleet has about {} threads, and this one may start {} ({}): raise the "
                            "limit of processes (`ulimit -u`, a container's pids limit) or of address space "
                            "(`ulimit -v`)",
                            count, threads.size(), why),
                {.reason = Reason::kLimit, .fault = Fault::kHost});
}

Result<std::vector<std::uint32_t>> later_names(const FleetArguments& fleet, const ModelInput& model) {
  auto set = names_matching(fleet.names, model.metadata);
  if (!set.ok()) return set.status().with_context("--names");
  return listed_names(*set, model.metadata.size());
}

std::string describe_layouts(const FleetArguments& fleet) {
  // A file may lie elsewhere on another host; what it says reaches the workers with the plan's tables.
  const std::string trainer =
      fleet.trainer.file.empty() ? "--trainer=" + to_string(fleet.trainer) : "--trainer-layout";
  std::string text = fmt::format("{}\n--inference={}\n--integrity={}", trainer, to_string(fleet.inference),
                                 to_string(fleet.integrity));
  for (const std::string& pattern : fleet.names) text += "\n--names=" + pattern;
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
