#include "base/mapped_ranges.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <system_error>

namespace shardpull {

std::optional<MappedRanges> MappedRanges::read(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  MappedRanges ranges;
  // "7f0000000000-7f0000001000 rw-p ...", ascending (proc(5)).
  for (std::string line; std::getline(file, line);) {
    Range range;
    const char* const end = line.data() + line.size();
    const auto first = std::from_chars(line.data(), end, range.begin, 16);
    if (first.ec != std::errc() || first.ptr == end || *first.ptr != '-') return std::nullopt;
    const auto last = std::from_chars(first.ptr + 1, end, range.end, 16);
    if (last.ec != std::errc() || end - last.ptr < 5) return std::nullopt;
    if (last.ptr[2] != 'w') continue;
    if (!ranges.writable_.empty() && ranges.writable_.back().end == range.begin) {
      ranges.writable_.back().end = range.end;
    } else {
      ranges.writable_.push_back(range);
    }
  }
  return ranges;
}

bool MappedRanges::writable(const void* data, std::uint64_t bytes) const {
  if (bytes == 0) return true;
  const auto begin = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(data));
  auto found = std::upper_bound(writable_.begin(), writable_.end(), begin,
                                [](std::uint64_t at, const Range& range) { return at < range.begin; });
  if (found == writable_.begin()) return false;
  --found;
  return begin < found->end && bytes <= found->end - begin;
}

}  // namespace shardpull
