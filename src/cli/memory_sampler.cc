#include "cli/memory_sampler.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <string_view>

#include "base/clock.h"
#include "base/unique_fd.h"

namespace shardpull::cli {
namespace {

constexpr std::int64_t kPeriodNs = 20 * kNanosPerMilli;

// A "Name:   123 kB" line of /proc/self/status, in bytes; 0 when there is none.
std::uint64_t status_line(std::string_view name) {
  const UniqueFd fd(open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  char text[8192];
  const ssize_t got = fd ? read(fd.get(), text, sizeof text) : -1;
  if (got <= 0) return 0;
  const std::string_view all(text, static_cast<std::size_t>(got));
  std::size_t at = all.find(name);
  if (at == std::string_view::npos) return 0;
  at = all.find_first_not_of(" \t", at + name.size());
  if (at == std::string_view::npos) return 0;
  std::uint64_t kib = 0;
  std::from_chars(all.data() + at, all.data() + all.size(), kib);
  return kib * 1024;
}

}  // namespace

std::uint64_t anonymous_bytes() {
  return status_line("\nRssAnon:");
}
std::uint64_t peak_resident_bytes() {
  return status_line("\nVmHWM:");
}

MemorySampler::MemorySampler() : thread_([this] { run(); }) {}

MemorySampler::~MemorySampler() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void MemorySampler::run() {
  const MutexLock lock(mutex_);
  while (!stopping_) {
    if (!paused_) sample();
    wake_.wait_for_ns(mutex_, kPeriodNs);
  }
}

void MemorySampler::sample() {
  const std::uint64_t now = anonymous_bytes();
  if (now > peak_.load()) peak_.store(now);
}

void MemorySampler::pause() {
  const MutexLock lock(mutex_);
  if (!paused_) sample();
  paused_ = true;
}

void MemorySampler::resume() {
  const MutexLock lock(mutex_);
  paused_ = false;
}

}  // namespace shardpull::cli
