// What the system lets this process have: processors, memory, descriptors, and the switches that make
// transports slow or impossible. Reading only; what follows from it is for others to say.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

namespace shardpull {

inline constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

struct Space {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  // for this user
};
// Of the file system at `path`; nothing when there is none.
std::optional<Space> space_at(const std::string& path);

struct HostLimits {
  unsigned online_cores = 0;
  unsigned usable_cores = 0;  // that this process may run on
  double quota_cores = 0;     // what its control group gives it; 0: no quota

  std::uint64_t memory_bytes = kNoLimit;     // the host's
  std::uint64_t available_bytes = kNoLimit;  // what this process could still allocate
  std::uint64_t group_bytes = kNoLimit;      // the least limit of its control groups

  std::uint64_t open_files = kNoLimit, open_files_hard = kNoLimit;      // RLIMIT_NOFILE
  std::uint64_t locked_bytes = kNoLimit, locked_bytes_hard = kNoLimit;  // RLIMIT_MEMLOCK

  int ptrace_scope = -1;        // kernel.yama.ptrace_scope; -1: no Yama
  bool seccomp_filter = false;  // system calls of this process are filtered
  bool may_ptrace = false;      // it has the capability to trace any process
  bool rdma = false;            // there are RDMA devices

  // net.core.rmem_max and wmem_max; nothing where this network namespace does not show them.
  std::optional<std::uint64_t> receive_buffer_bytes, send_buffer_bytes;
  std::optional<Space> dev_shm;
};

// `root` stands before /proc, /sys and /dev, so that a test can put its own in their place. What cannot be
// read stays as above. Control groups are read as version 2 has them.
HostLimits read_host_limits(const std::string& root = "");

}  // namespace shardpull
