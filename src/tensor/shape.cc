#include "tensor/shape.h"

#include <algorithm>
#include <limits>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked.h"
#include "shardpull/slice.h"

namespace shardpull {

Result<std::int64_t> checked_numel(DType dtype, std::span<const std::int64_t> shape) {
  const auto refused = [&](const std::string& why, Reason reason = Reason::kBadArgument) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("shape [{}] of {} {}", fmt::join(shape, ", "), dtype_name(dtype), why),
                  {.reason = reason});
  };
  const std::int64_t bits = dtype_bits(dtype);
  if (bits == 0) return refused("has an unknown dtype");
  if (shape.size() > static_cast<std::size_t>(kMaxDims)) {
    return refused(fmt::format("has {} dims, at most {} are allowed", shape.size(), kMaxDims),
                   Reason::kLimit);
  }
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; })) {
    return refused("has a negative size");
  }
  // Sizes count even beside an empty dim: strides are products of them.
  std::int64_t total_bits = bits;
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    const auto product = checked_mul<std::int64_t>(total_bits, std::max<std::int64_t>(size, 1));
    if (!product) return refused("is larger than 2^60 bytes", Reason::kLimit);
    total_bits = *product;
    numel *= size;
  }
  if (bits % 8 != 0) {
    const std::int64_t per_byte = 8 / bits;
    if (shape.empty() || shape.back() % per_byte != 0) {
      return refused(
          fmt::format("has rows that do not end on a byte: the last dim must be a multiple of {}", per_byte));
    }
  }
  return numel;
}

Result<std::uint64_t> checked_bytes(DType dtype, std::span<const std::int64_t> shape) {
  const auto numel = checked_numel(dtype, shape);
  if (!numel.ok()) return numel.status();
  return bytes_of(dtype, *numel);
}

}  // namespace shardpull
