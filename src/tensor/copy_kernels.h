// The inner loops of the copy path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/convert.h"
#include "tensor/copy.h"

namespace shardpull {

// A program that writes at least this much streams past the caches: what it writes first would be evicted before anybody
// reads it.
inline constexpr std::uint64_t kStreamingProgramBytes = 4u << 20;

// Copies one nest of raw bytes; `src` and `dst` are at its offsets. With `streaming`, long runs bypass the caches, and
// end_streaming() must follow before another thread is told of the bytes.
void copy_nest(const CopyNest& nest, const std::byte* src, std::byte* dst, bool streaming);
void end_streaming();

// Converts one nest of elements of `src_unit` and `dst_unit` bytes.
void convert_nest(const CopyNest& nest, ConvertKernel kernel, std::int64_t src_unit, std::int64_t dst_unit, const std::byte* src,
                  std::byte* dst);

// Copies `bytes` (any number, any alignment) with stores that bypass the caches where the processor has them; ends with
// end_streaming() as above.
void stream_copy(std::byte* dst, const std::byte* src, std::size_t bytes);

}  // namespace shardpull
