// The layout file (docs/FORMATS.md, "Layout file"): which trainer rank holds which pieces, as JSON.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// What one rank holds: names whole (ascending indices into the metadata), and boxes of other names (ascending
// by name, several per name in the file's order, never empty, never the whole tensor).
struct HeldByRank {
  std::vector<std::uint32_t> whole;
  std::vector<Piece> pieces;
  friend bool operator==(const HeldByRank&, const HeldByRank&) = default;
};

// Reads a layout from an untrusted `text`: one entry per rank, 0..n-1. Refused, naming `origin` and where in
// the file: no strict JSON, above the limits of the format, unknown or missing fields, another version
// (FAILED_PRECONDITION), a rank that no group has, a name that two groups give a rank, a pattern that matches
// nothing that is left to it, a box or shard that does not fit a tensor it applies to, boxes of one rule that
// overlap, a rank that holds nothing. That all ranks together cover every name is for resolve_ownership.
Result<std::vector<HeldByRank>> read_layout(std::string_view text, const std::vector<TensorMeta>& metadata,
                                            std::string_view origin);

}  // namespace shardpull
