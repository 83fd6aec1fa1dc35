// Whether the tensors of a chunk can be mapped by its consumer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan.h"

namespace shardpull {

struct MappingObstacle {
  std::uint32_t producer = 0, name = 0;  // the first candidate that cannot, and for which name
  std::string reason;                    // why, and what helps
};

// Why not every candidate of `chunk` could serve it mapped, or nothing when all can. Memory that consumers
// can map is what a producer says it is (InitTables::producer_mappable), and export buffers: a producer that
// gathers copies tensors of up to export_pack_limit bytes there, a resident one copies nothing.
std::optional<MappingObstacle> why_not_mapped(const InitTables& tables, const Chunk& chunk);

}  // namespace shardpull
