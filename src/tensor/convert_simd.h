// Vectorised conversions of contiguous runs for the pairs that checkpoints and parameters meet in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shardpull/dtype.h"

namespace shardpull {

// Converts a prefix of `count` contiguous elements, bit for bit as the portable kernel does, and returns its length. The caller
// converts the rest.
using ConvertPrefix = std::int64_t (*)(const std::byte* src, std::byte* dst, std::int64_t count);

// The kernel for this pair on this processor, or null.
ConvertPrefix convert_prefix(DType from, DType to);

}  // namespace shardpull
