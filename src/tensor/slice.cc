#include "shardpull/slice.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked.h"
#include "tensor/slice_algebra.h"

namespace shardpull {
namespace {

// Drops dims of size 1 and merges neighbours. Sizes > 0.
void normalise(Region& region) {
  std::size_t kept = 0;
  for (const Dim& dim : region.dims) {
    if (dim.size == 1) continue;
    Dim* const outer = kept > 0 ? &region.dims[kept - 1] : nullptr;
    if (outer != nullptr && outer->stride == dim.size * dim.stride) {
      *outer = {outer->size * dim.size, dim.stride};
    } else {
      region.dims[kept++] = dim;
    }
  }
  region.dims.resize(kept);
}

bool same_dims(std::span<const Dim> a, std::span<const Dim> b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

// Makes `first` the one region that enumerates `first` and then `second`, if there is one with positive strides and few
// enough dims. Both normalised.
bool merge(Region& first, const Region& second) {
  const std::int64_t gap = second.offset - first.offset;
  if (gap <= 0) return false;
  const std::span<const Dim> a(first.dims);
  const std::span<const Dim> b(second.dims);
  if (same_dims(a, b)) {
    if (a.size() == kMaxDims && a[0].size * a[0].stride != gap) return false;
    first.dims.insert(first.dims.begin(), Dim{2, gap});
  } else if (!a.empty() && gap == a[0].size * a[0].stride && !b.empty() && a[0].stride == b[0].stride &&
             same_dims(a.subspan(1), b.subspan(1))) {
    first.dims[0].size += b[0].size;
  } else if (!a.empty() && gap == a[0].size * a[0].stride && same_dims(a.subspan(1), b)) {
    first.dims[0].size += 1;
  } else if (!b.empty() && gap == b[0].stride && same_dims(a, b.subspan(1))) {
    first.dims.insert(first.dims.begin(), Dim{b[0].size + 1, b[0].stride});
  } else {
    return false;
  }
  normalise(first);
  return true;
}

}  // namespace

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

Slice canonicalise(std::vector<Region> regions) {
  Slice slice;
  std::vector<Region>& kept = slice.regions;
  for (Region& region : regions) {
    if (std::any_of(region.dims.begin(), region.dims.end(), [](const Dim& dim) { return dim.size == 0; })) continue;
    normalise(region);
    kept.push_back(std::move(region));
    while (kept.size() > 1 && merge(kept[kept.size() - 2], kept.back())) kept.pop_back();
  }
  return slice;
}

Result<std::uint64_t> bytes_of(DType dtype, std::int64_t numel) {
  const auto refused = [&](std::string_view why) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{} elements of {} {}", numel, dtype_name(dtype), why),
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
