// Conversions between element types, value by value as PyTorch's copy_ makes them: round to nearest, ties to even; F8_E4M3
// saturates, the other small floats overflow to infinity; F64 and integers reach the 16-bit and 8-bit floats through F32;
// floats become integers by truncation; anything that is not zero becomes true.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shardpull/dtype.h"

namespace shardpull {

// Converts `count` elements that lie `src_stride` and `dst_stride` bytes apart. Any alignment; no overlap. Never fails: NaN and
// out-of-range values have defined results.
using ConvertKernel = void (*)(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride,
                               std::int64_t count);

// The kernel for a pair of different dtypes, or null where PyTorch has no such conversion (F4).
ConvertKernel convert_kernel(DType from, DType to);

// Whether every value of `from`, NaN and the infinities included, has its exact equal in `to`. True for equal dtypes.
bool is_lossless(DType from, DType to);

}  // namespace shardpull
