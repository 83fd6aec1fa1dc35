#include "base/host_memory.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <limits>
#include <string>
#include <string_view>

#include "base/checked.h"
#include "base/unique_fd.h"

namespace shardpull {
namespace {

// The text of a small file of /proc or /sys, or empty.
std::string small_file(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text(16384, '\0');
  ssize_t got = 0;
  if (fd) {
    do {
      got = read(fd.get(), text.data(), text.size());
    } while (got < 0 && errno == EINTR);
  }
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return text;
}

// The number after `key` in `text`, or `otherwise`.
std::uint64_t number_after(std::string_view text, std::string_view key, std::uint64_t otherwise) {
  std::size_t at = text.find(key);
  if (at == std::string_view::npos) return otherwise;
  at = text.find_first_not_of(" \t", at + key.size());
  if (at == std::string_view::npos) return otherwise;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), value);
  return error == std::errc() ? value : otherwise;
}

std::uint64_t available_in_control_group() {
  constexpr auto kUnknown = std::numeric_limits<std::uint64_t>::max();
  const std::string groups = small_file("/proc/self/cgroup");
  const std::size_t at = groups.find("0::/");
  if (at == std::string::npos) return kUnknown;
  const std::string directory = "/sys/fs/cgroup" + groups.substr(at + 3, groups.find('\n', at) - at - 3);
  const std::uint64_t limit = number_after(small_file(directory + "/memory.max"), "", kUnknown);
  const std::uint64_t used = number_after(small_file(directory + "/memory.current"), "", kUnknown);
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  // Cached file pages are counted as used and given back on demand.
  const std::uint64_t cached = number_after(small_file(directory + "/memory.stat"), "inactive_file ", 0);
  return limit - std::min(limit, used - std::min(used, cached));
}

}  // namespace

std::uint64_t available_memory_bytes() {
  constexpr auto kUnknown = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t host_kib = number_after(small_file("/proc/meminfo"), "MemAvailable:", kUnknown);
  const std::uint64_t host = checked_mul<std::uint64_t>(host_kib, 1024).value_or(kUnknown);
  return std::min(host, available_in_control_group());
}

}  // namespace shardpull
