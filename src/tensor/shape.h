// Shapes of tensors as they come from files, peers and users.
#pragma once

#include <cstdint>
#include <span>

#include "shardpull/dtype.h"
#include "shardpull/status.h"

namespace shardpull {

// Checks a shape and gives its number of elements. Refused: a negative size, more than kMaxDims dims, more elements than
// 2^60 bytes hold, and for sub-byte dtypes rows that do not end on a byte (an odd last dim of F4, or no dim at all).
Result<std::int64_t> checked_numel(DType dtype, std::span<const std::int64_t> shape);

// Bytes of a contiguous tensor, with the checks of checked_numel.
Result<std::uint64_t> checked_bytes(DType dtype, std::span<const std::int64_t> shape);

}  // namespace shardpull
