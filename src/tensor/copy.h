// The copy path: moves the elements of a slice of one tensor into a strided region of another.
//
// A copy is compiled once, when the plan is built, into a CopyProgram: a few nested loops over byte offsets. It is run once
// per sync, with nothing left to decide. The same program covers the three ways weights move:
//   gather  - a strided slice into a packed (contiguous) slot,
//   scatter - a packed slot into a strided region of a parameter,
//   mapped  - a strided slice of mapped memory straight into a strided region.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shardpull/dtype.h"
#include "shardpull/slice.h"
#include "shardpull/status.h"

namespace shardpull {

// How a published tensor lies in memory: its shape and strides in elements of `dtype`. Its LOGICAL elements, which slices
// count, are always in row-major order of the shape.
struct SourceLayout {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> stride;  // >= 0

  // `numel` elements, one after the other.
  static SourceLayout contiguous(DType dtype, std::int64_t numel);
};

// `numel` elements, one after the other, starting at `offset`.
Region contiguous_region(std::int64_t numel, std::int64_t offset = 0);

// One loop of a copy: `size` iterations, moving source and destination by these bytes.
struct CopyLoop {
  std::int64_t size = 0;
  std::int64_t src_stride = 0;
  std::int64_t dst_stride = 0;
  friend bool operator==(const CopyLoop&, const CopyLoop&) = default;
};

// A loop nest, outermost first, around one contiguous run of `run_elements` units.
struct CopyNest {
  std::int64_t src_offset = 0;  // bytes
  std::int64_t dst_offset = 0;  // bytes
  std::vector<CopyLoop> loops;
  std::int64_t run_elements = 0;  // contiguous on both sides
  friend bool operator==(const CopyNest&, const CopyNest&) = default;
};

// A compiled copy. Immutable once made; may be run by several threads at once on different memory.
struct CopyProgram {
  // Nests move raw bytes when from == to (run_elements then count bytes, and both are U8), else they convert elements.
  DType from = DType::kU8;
  DType to = DType::kU8;
  std::vector<CopyNest> nests;
  std::int64_t src_end = 0;  // one past the last source byte read, from the source's first element
  std::int64_t dst_end = 0;  // one past the last destination byte written
  std::uint64_t bytes = 0;   // destination bytes written
};

// Compiles the copy of `src` (a canonical slice over the logical elements of `layout`, counted in `wire` elements) into `dst`
// (enumerated row-major, counted in `dst_dtype` elements, strides >= 0). When `dst_dtype` is not `wire` the values are
// converted, with PyTorch's rounding. `raw` says that `dst` counts bytes of a region that takes the wire bytes as they are
// (a parameter written through a view of another dtype); `dst_dtype` is then ignored.
//
// Refused: a slice or a region that is negative or overflows, different numbers of elements (both are named), a slice outside
// the layout, wire elements that the layout scatters, a conversion that PyTorch does not have. The caller compares
// dst_end with the size of its memory.
Result<CopyProgram> compile_copy(const Slice& src, const SourceLayout& layout, DType wire, const Region& dst, DType dst_dtype,
                                 bool raw = false);

// Runs a program. `src` is the address of the published tensor's first element, `dst` of the parameter's (or slot's). They
// may have any alignment and must not overlap. Never fails, never allocates.
void run(const CopyProgram& program, const std::byte* src, std::byte* dst);

// Runs the part of a program without conversion whose source bytes are [from, from + bytes): `src` is the
// address of the first of them. Parts that together cover the source, in any order, do what run() does. Fast
// where the program reads its source in order, as scatters of packed bytes do. With `streaming`, long runs
// bypass the caches: for a destination that nobody reads soon.
void run_part(const CopyProgram& program, std::int64_t from, std::int64_t bytes, const std::byte* src,
              std::byte* dst, bool streaming);

// Cuts a program into at most `max_parts` programs of similar size that together do the same, for as many threads. Nothing
// smaller than `min_bytes` is cut off.
std::vector<CopyProgram> split(const CopyProgram& program, std::size_t max_parts, std::uint64_t min_bytes);

}  // namespace shardpull
