// The layout file: which trainer rank holds which pieces, as JSON. The format is docs/FORMATS.md, "Layout file".
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// What one rank holds: names whole (ascending indices into the metadata), and boxes of other names (ascending
// by name, several per name in the file's order, never empty).
struct HeldByRank {
  std::vector<std::uint32_t> whole;
  std::vector<Piece> pieces;
  friend bool operator==(const HeldByRank&, const HeldByRank&) = default;
};

// Reads a layout from an untrusted `text`: one entry per rank, 0..n-1. Refused, naming `origin` and where in the
// file: no strict JSON, above the limits, unknown or missing fields, another version, a rank missing or twice,
// a name or pattern that matches nothing, a box that does not fit its tensor, a name both whole and in pieces
// on one rank, a rank that holds nothing. That all ranks together cover every name is for resolve_ownership.
Result<std::vector<HeldByRank>> read_layout(std::string_view text, const std::vector<TensorMeta>& metadata,
                                            std::string_view origin);

}  // namespace shardpull
