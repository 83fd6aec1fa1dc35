// Cutting recorded copies: by the pieces a tensor is held in, and into rows where a copy exceeds a chunk.
//
// A copy is a list of source elements (a slice, in order) that fills a strided destination window row-major.
// A part of it is again such a pair, so whatever the planner cuts stays one fetch key and one window. Where a
// part of the source falls into the window as several rectangles it becomes several parts.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "shardpull/bake.h"
#include "shardpull/slice.h"
#include "shardpull/status.h"

namespace shardpull {

// One fetch key and the window its elements fill.
struct Part {
  std::uint32_t piece = 0;  // ChunkKey::piece: index into Ownership::pieces + 1, 0 = the whole tensor
  DType wire_dtype = DType::kF32;
  Slice slice;                      // over the piece's row-major elements, canonical
  std::vector<std::int64_t> shape;  // of the elements, outermost first; what may be cut into rows
  Destination destination;
  std::uint64_t bytes = 0;  // of the slice, on the wire
};

// The elements of the tensor `meta` as `wire` ones: its shape with the last dim rescaled. Nothing when the
// dtypes' widths do not divide it.
Result<std::vector<std::int64_t>> wire_shape(const TensorMeta& meta, DType wire);

// A whole copy as one part.
Result<Part> whole_part(const Scatter& scatter);

// Cuts a copy by the pieces its tensor is held in: every element goes to the piece that holds it. `pieces`
// are all of the tensor, disjoint; `first_piece` is the index of the first one in Ownership::pieces. Parts
// come piece by piece. Refused: more than kMaxPartsPerScatter parts of one piece; kUnimplemented: piece
// bounds between two wire elements, or between two bytes of a window that is written as raw bytes.
Result<std::vector<Part>> cut_by_pieces(const Scatter& scatter, const TensorMeta& meta,
                                        std::span<const OwnedPiece> pieces, std::uint32_t first_piece);

// Cuts a part larger than `max_bytes` (> 0) along its outermost dim longer than 1 into about equal runs of
// rows of at most `max_bytes` each; a single row may be larger. Appends to `out` in order; a part that fits,
// or has one row, is appended as it is. Refused: more than kMaxChunks runs, or kMaxRegions regions in one.
Status cut_by_rows(Part part, std::string_view name, std::uint64_t max_bytes, std::vector<Part>& out);

}  // namespace shardpull
