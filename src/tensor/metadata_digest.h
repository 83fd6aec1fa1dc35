// The digest by which two processes, or a process and a file, know that they speak of the same model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardpull/source.h"

namespace shardpull {

struct Digest128 {
  std::uint64_t low = 0, high = 0;
  friend bool operator==(const Digest128&, const Digest128&) = default;
};
std::string to_string(const Digest128& digest);  // 32 hex digits, the high half first

// XXH3-128 over count, names, dtypes and shapes, in order. The encoding is docs/FORMATS.md, "Recording file".
Digest128 metadata_digest(const std::vector<TensorMeta>& metadata);

}  // namespace shardpull
