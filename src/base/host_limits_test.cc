#include "base/host_limits.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include <gtest/gtest.h>

namespace shardpull {
namespace {

namespace fs = std::filesystem;

// Files in the place of the system's own.
class FakeRoot {
 public:
  explicit FakeRoot(const std::map<std::string, std::string>& files) {
    std::string name = (fs::temp_directory_path() / "shardpull-root-XXXXXX").string();
    path_ = mkdtemp(name.data());
    for (const auto& [file, text] : files) {
      fs::create_directories(fs::path(path_ + file).parent_path());
      std::ofstream(path_ + file) << text;
    }
  }
  ~FakeRoot() { fs::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(HostLimits, ReadsWhatTheSystemSays) {
  const FakeRoot root({{"/proc/meminfo", "MemTotal:       24660120 kB\nMemFree:  1 kB\n"},
                       {"/proc/self/cgroup", "1:cpu:/old\n0::/a/b\n"},
                       {"/sys/fs/cgroup/memory.max", "max\n"},
                       {"/sys/fs/cgroup/a/memory.max", "1073741824\n"},
                       {"/sys/fs/cgroup/a/b/memory.max", "2147483648\n"},
                       {"/sys/fs/cgroup/a/cpu.max", "150000 100000\n"},
                       {"/sys/fs/cgroup/a/b/cpu.max", "max 100000\n"},
                       {"/proc/sys/kernel/yama/ptrace_scope", "2\n"},
                       {"/proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\nSeccomp:\t2\n"},
                       {"/sys/class/infiniband/mlx5_0/node_type", "1: CA\n"},
                       {"/proc/sys/net/core/rmem_max", "212992\n"},
                       {"/proc/sys/net/core/wmem_max", "4194304\n"},
                       {"/dev/shm/x", ""}});
  const HostLimits limits = read_host_limits(root.path());
  EXPECT_EQ(limits.memory_bytes, 24660120ull * 1024);
  EXPECT_EQ(limits.group_bytes, 1ull << 30);  // the least on the way up
  EXPECT_DOUBLE_EQ(limits.quota_cores, 1.5);
  EXPECT_EQ(limits.ptrace_scope, 2);
  EXPECT_TRUE(limits.seccomp_filter);
  EXPECT_TRUE(limits.may_ptrace);
  EXPECT_TRUE(limits.rdma);
  EXPECT_EQ(limits.receive_buffer_bytes, 212992u);
  EXPECT_EQ(limits.send_buffer_bytes, 4194304u);
  ASSERT_TRUE(limits.dev_shm.has_value());
  EXPECT_GT(limits.dev_shm->total_bytes, 0u);
  EXPECT_GE(limits.dev_shm->total_bytes, limits.dev_shm->free_bytes);
}

TEST(HostLimits, TheGroupOfAContainerIsTheRoot) {
  const FakeRoot root({{"/proc/self/cgroup", "0::/\n"},
                       {"/sys/fs/cgroup/memory.max", "536870912\n"},
                       {"/sys/fs/cgroup/cpu.max", "50000 100000\n"}});
  const HostLimits limits = read_host_limits(root.path());
  EXPECT_EQ(limits.group_bytes, 512ull << 20);
  EXPECT_DOUBLE_EQ(limits.quota_cores, 0.5);
}

TEST(HostLimits, WhatIsNotThereStaysUnknown) {
  const FakeRoot root({{"/proc/self/cgroup", "4:memory:/x\n"},
                       {"/proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t0\n"},
                       {"/proc/sys/net/core/rmem_max", "nonsense\n"}});
  const HostLimits limits = read_host_limits(root.path());
  EXPECT_EQ(limits.memory_bytes, kNoLimit);
  EXPECT_EQ(limits.group_bytes, kNoLimit);
  EXPECT_EQ(limits.quota_cores, 0);
  EXPECT_EQ(limits.ptrace_scope, -1);
  EXPECT_FALSE(limits.seccomp_filter);
  EXPECT_FALSE(limits.may_ptrace);
  EXPECT_FALSE(limits.rdma);
  EXPECT_FALSE(limits.receive_buffer_bytes.has_value());
  EXPECT_FALSE(limits.send_buffer_bytes.has_value());
  EXPECT_FALSE(limits.dev_shm.has_value());
}

// Goal: what is asked of the kernel and not of a file is this process's own.
TEST(HostLimits, LimitsOfThisProcess) {
  const auto number = [](rlim_t value) { return value == RLIM_INFINITY ? kNoLimit : value; };
  rlimit before{}, limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  limit = before;
  limit.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  cpu_set_t allowed, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  CPU_ZERO(&one);
  for (std::size_t core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &allowed)) CPU_SET(core, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);

  const HostLimits limits = read_host_limits();
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(sched_setaffinity(0, sizeof allowed, &allowed), 0);
  EXPECT_EQ(limits.open_files, 100u);
  EXPECT_EQ(limits.open_files_hard, number(before.rlim_max));
  EXPECT_EQ(limits.usable_cores, 1u);
  EXPECT_GE(limits.online_cores, 1u);
  EXPECT_LE(limits.available_bytes, limits.memory_bytes);
  EXPECT_EQ(read_host_limits().usable_cores, static_cast<unsigned>(CPU_COUNT(&allowed)));
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  EXPECT_EQ(limits.locked_bytes, number(limit.rlim_cur));
}

}  // namespace
}  // namespace shardpull
