// Slice: which elements of a tensor, in which order, independent of how somebody wrote it down.
//
// The canonical form (docs/FORMATS.md, "Canonical slice") is an ordered list of strided regions over the logical,
// row-major elements of the source tensor, counted in elements of the slice's dtype (the WIRE dtype: what the op chain
// produces; a view(dtype) in the chain changes it). Elements are enumerated region by region, each region row-major.
// Canonical means: dims of size 1 dropped, neighbouring dims merged where strides allow, neighbouring regions merged
// where they continue each other, empty regions dropped. Two chains that select the same elements in the same order have
// equal canonical slices. For sub-byte dtypes (F4) all numbers count logical elements and every contiguous run begins and
// ends on a byte.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "shardpull/api.h"
#include "shardpull/dtype.h"
#include "shardpull/status.h"

namespace shardpull {

inline constexpr int kMaxDims = 8;        // dims per region, and dims of any tensor
inline constexpr int kMaxRegions = 64;    // regions per slice
inline constexpr int kSliceFormatVersion = 1;  // travels where slices do

// One dim of a region.
struct Dim {
  std::int64_t size = 0;    // in elements
  std::int64_t stride = 0;  // in elements
  friend bool operator==(const Dim&, const Dim&) = default;
};

// One strided box. A region with no dims is one element at `offset`. Outermost dim first.
struct SHARDPULL_API Region {
  std::int64_t offset = 0;  // in elements, >= 0
  std::vector<Dim> dims;    // at most kMaxDims
  std::int64_t numel() const;  // the product of the sizes
  friend bool operator==(const Region&, const Region&) = default;
};

// Regions, whose elements follow each other.
struct SHARDPULL_API Slice {
  std::vector<Region> regions;  // at most kMaxRegions; none = no elements
  std::int64_t numel() const;   // of all regions
  // The whole of a contiguous tensor of `numel` elements: one region of one dim (or empty).
  static Slice whole(std::int64_t numel);
  friend bool operator==(const Slice&, const Slice&) = default;
};

// Bytes of `numel` elements of `dtype`. Fails when numel is negative, the product overflows, or a sub-byte count does not
// end on a byte.
SHARDPULL_API Result<std::uint64_t> bytes_of(DType dtype, std::int64_t numel);

// "[off 32768: 512x64 stride 64,1]" for people and error messages.
SHARDPULL_API std::string to_string(const Slice& slice);

}  // namespace shardpull
