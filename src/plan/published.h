// What a rank publishes, in the terms of the plan: the plan's pieces are cut where the boxes of ranks
// overlap, so that one box a rank holds may be several of them.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// One name (piece 0) or plan piece that a rank serves, and where it lies in what the rank holds.
struct PublishedPart {
  std::uint32_t name = 0;
  std::uint32_t piece = 0;  // as ChunkKey::piece
  std::uint32_t held = 0;   // which of the rank's pieces of the name holds it; 0 for a name held whole
  Box within;               // relative to that piece; whole when it is all of it
  friend bool operator==(const PublishedPart&, const PublishedPart&) = default;
};

// What `rank` serves, ascending by (name, piece). `pieces`: those it declared (WeightSource::held_pieces).
// INTERNAL when the tables give the rank a piece that it does not hold.
Result<std::vector<PublishedPart>> published_parts(const InitTables& tables, std::uint32_t rank,
                                                   const std::vector<Piece>& pieces);

}  // namespace shardpull
