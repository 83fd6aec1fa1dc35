#include "base/host_limits.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string_view>

#include "base/checked.h"
#include "base/host_memory.h"

namespace shardpull {
namespace {

constexpr int kTraceCapability = 19;  // CAP_SYS_PTRACE

// The text of a small file, or empty.
std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// What follows `key` on its line, without the white space before it; empty when no line has it.
std::string_view value_after(std::string_view text, std::string_view key) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (line.starts_with(key)) {
      const std::size_t at = line.find_first_not_of(" \t", key.size());
      return at == std::string_view::npos ? std::string_view() : line.substr(at);
    }
    begin = end + 1;
  }
  return {};
}

std::optional<std::uint64_t> number(std::string_view text, int base = 10) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

std::uint64_t as_limit(rlim_t value) {
  return value == RLIM_INFINITY ? kNoLimit : static_cast<std::uint64_t>(value);
}

void read_control_groups(const std::string& root, HostLimits& limits) {
  const std::string groups = text_of(root + "/proc/self/cgroup");
  const std::string_view path = value_after(groups, "0::");
  if (!path.starts_with('/')) return;
  // A limit of any group above holds as well.
  for (std::string group(path);; group.resize(group.rfind('/'))) {
    const std::string directory = root + "/sys/fs/cgroup" + (group == "/" ? "" : group);
    limits.group_bytes =
        std::min(limits.group_bytes, number(text_of(directory + "/memory.max")).value_or(kNoLimit));
    std::istringstream quota(text_of(directory + "/cpu.max"));  // "max 100000" without a quota
    double micros = 0, period = 0;
    if (quota >> micros >> period && micros > 0 && period > 0) {
      const double cores = micros / period;
      limits.quota_cores = limits.quota_cores == 0 ? cores : std::min(limits.quota_cores, cores);
    }
    if (group.empty() || group == "/") return;
  }
}

// Cores this process may run on, however many the host has; 0 when unknown.
unsigned affinity_cores(unsigned online) {
  for (std::size_t count = std::max(online, 1024u); count <= (1u << 20); count *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(count),
                                                               [](cpu_set_t* each) { CPU_FREE(each); });
    const std::size_t bytes = CPU_ALLOC_SIZE(count);
    if (sched_getaffinity(0, bytes, set.get()) == 0) {
      return static_cast<unsigned>(CPU_COUNT_S(bytes, set.get()));
    }
  }
  return 0;
}

}  // namespace

std::optional<Space> space_at(const std::string& path) {
  struct statvfs info{};
  if (statvfs(path.c_str(), &info) != 0) return std::nullopt;
  const auto bytes = [&](std::uint64_t blocks) {
    return checked_mul<std::uint64_t>(blocks, info.f_frsize).value_or(kNoLimit);
  };
  return Space{.total_bytes = bytes(info.f_blocks), .free_bytes = bytes(info.f_bavail)};
}

HostLimits read_host_limits(const std::string& root) {
  HostLimits limits;
  limits.online_cores = static_cast<unsigned>(std::max(sysconf(_SC_NPROCESSORS_ONLN), 0l));
  limits.usable_cores = affinity_cores(limits.online_cores);

  const auto kib = number(value_after(text_of(root + "/proc/meminfo"), "MemTotal:"));
  if (kib) limits.memory_bytes = checked_mul<std::uint64_t>(*kib, 1024).value_or(kNoLimit);
  limits.available_bytes = available_memory_bytes();
  read_control_groups(root, limits);

  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limits.open_files = as_limit(limit.rlim_cur);
    limits.open_files_hard = as_limit(limit.rlim_max);
  }
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    limits.locked_bytes = as_limit(limit.rlim_cur);
    limits.locked_bytes_hard = as_limit(limit.rlim_max);
  }

  const auto scope = number(text_of(root + "/proc/sys/kernel/yama/ptrace_scope"));
  if (scope) limits.ptrace_scope = static_cast<int>(std::min<std::uint64_t>(*scope, 3));
  const std::string status = text_of(root + "/proc/self/status");
  limits.seccomp_filter = number(value_after(status, "Seccomp:")).value_or(0) == 2;
  limits.may_ptrace = (number(value_after(status, "CapEff:"), 16).value_or(0) >> kTraceCapability & 1) != 0;
  std::error_code error;
  const std::filesystem::directory_iterator devices(root + "/sys/class/infiniband", error);
  limits.rdma = !error && devices != std::filesystem::directory_iterator();

  limits.receive_buffer_bytes = number(text_of(root + "/proc/sys/net/core/rmem_max"));
  limits.send_buffer_bytes = number(text_of(root + "/proc/sys/net/core/wmem_max"));
  limits.dev_shm = space_at(root + "/dev/shm");
  return limits;
}

}  // namespace shardpull
