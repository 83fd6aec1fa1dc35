// Which addresses of this process have memory that it may write to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardpull {

// What /proc/self/maps said when it was read; memory may come and go afterwards. A value.
class MappedRanges {
 public:
  // Reads `path` again. Nothing when it cannot be read.
  static std::optional<MappedRanges> read(const std::string& path = "/proc/self/maps");

  // Whether all of [data, data + bytes) is mapped and may be written to. No bytes: true.
  bool writable(const void* data, std::uint64_t bytes) const;

 private:
  struct Range {
    std::uint64_t begin = 0, end = 0;
  };
  std::vector<Range> writable_;  // ascending; neighbours are joined
};

}  // namespace shardpull
