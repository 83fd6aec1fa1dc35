#include "shardpull/slice.h"

#include <fmt/format.h>

#include "base/checked.h"

namespace shardpull {

std::int64_t Region::numel() const {
  std::int64_t product = 1;
  for (const Dim& dim : dims) product *= dim.size;
  return product;
}

std::int64_t Slice::numel() const {
  std::int64_t sum = 0;
  for (const Region& region : regions) sum += region.numel();
  return sum;
}

Slice Slice::whole(std::int64_t numel) {
  Slice slice;
  if (numel == 1) slice.regions.push_back({});
  if (numel > 1) slice.regions.push_back({0, {{numel, 1}}});
  return slice;
}

Result<std::uint64_t> bytes_of(DType dtype, std::int64_t numel) {
  const auto refused = [&](std::string_view why) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} elements of {} {}", numel, dtype_name(dtype), why),
                  {.reason = Reason::kBadArgument});
  };
  if (numel < 0) return refused("are a negative number");
  const auto bits = static_cast<std::uint64_t>(dtype_bits(dtype));
  const auto count = static_cast<std::uint64_t>(numel);
  if (bits % 8 != 0) {
    if (count * bits % 8 != 0) return refused("do not end on a byte");  // wrapping keeps the low bits right
    const std::uint64_t per_byte = 8 / bits;
    return count / per_byte;
  }
  const auto bytes = checked_mul<std::uint64_t>(count, bits / 8);
  if (!bytes) return refused("take more bytes than 64 bits can count");
  return *bytes;
}

std::string to_string(const Slice& slice) {
  std::string text = "[";
  for (const Region& region : slice.regions) {
    if (text.size() > 1) text += ", ";
    text += fmt::format("off {}", region.offset);
    if (region.dims.empty()) continue;
    std::string sizes, strides;
    for (const Dim& dim : region.dims) {
      sizes += fmt::format("{}{}", sizes.empty() ? "" : "x", dim.size);
      strides += fmt::format("{}{}", strides.empty() ? "" : ",", dim.stride);
    }
    text += fmt::format(": {} stride {}", sizes, strides);
  }
  return text += "]";
}

}  // namespace shardpull
