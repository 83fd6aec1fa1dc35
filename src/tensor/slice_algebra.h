// What can be done with slices: canonicalise, compose, cut, change the unit they count in, check against a tensor, encode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/encoder.h"
#include "shardpull/dtype.h"
#include "shardpull/slice.h"
#include "shardpull/status.h"
#include "tensor/affine.h"

namespace shardpull {

// Brings regions (sizes >= 0, strides >= 0 and > 0 where the size is above 1) into the canonical form: dims of size 1
// dropped, neighbouring dims merged, empty regions dropped, neighbouring regions merged from left to right. The order of
// elements stays. The result may hold more than kMaxRegions regions; check_limits refuses those.
Slice canonicalise(std::vector<Region> regions);

// OK when `slice` has at most kMaxRegions regions of at most kMaxDims dims. The message says how many it has.
Status check_limits(const Slice& slice);

// Elements [first, first + count) of the slice's enumeration, as a canonical slice: what a cut along the outermost dim
// takes. Refused: a range outside the slice, more regions than a slice may have.
Result<Slice> slice_range(const Slice& slice, std::int64_t first, std::int64_t count);

// Looks positions up: the slice whose elements are `outer`'s elements number inner[0], inner[1], ... in the same order. `inner`
// counts elements of `outer`'s row-major enumeration. Canonical, but with up to `max_regions` regions. Refused: positions
// outside `outer`, more regions than that.
Result<Slice> compose(const Region& outer, const Slice& inner, std::size_t max_regions = kMaxRegions);

// The same elements counted in units of `to_bits` instead of `from_bits`. Refused when a unit of `to_bits` would be put
// together from places that are not adjacent, or does not start on a multiple of its size.
Result<Slice> change_unit(const Slice& slice, int from_bits, int to_bits);

// Checks a slice that came from somewhere else: limits, sizes > 0, strides >= 0, every element of `wire` inside a tensor of `numel`
// elements of `dtype`, sub-byte runs on whole bytes. Errors name the region. The slice of a checked description can be
// copied without further checks.
Status check_slice(const Slice& slice, DType wire, DType dtype, std::int64_t numel);

// OK when every contiguous run of the slice begins and ends on a byte; always so for dtypes of whole bytes.
Status check_byte_runs(const Slice& slice, DType wire);

// The canonical encoding (docs/FORMATS.md): u32 regions; per region i64 offset, u32 dims, per dim i64 size and i64 stride.
void encode_slice(ByteWriter& writer, const Slice& slice);
// Decodes within the limits; the result is not checked against any tensor yet.
Status decode_slice(ByteReader& reader, Slice& out);

}  // namespace shardpull
