// How much of its sources a worker keeps.
#pragma once

#include <cstdint>
#include <vector>

#include "shardpull/bake.h"

namespace shardpull {

// Bytes of the tensors that `scatters` read, each byte once however many copies read it, whatever dtype they
// read it as. The slices must lie within their tensors (check_slice). Copies of a name whose slices
// interleave are compared run by run of contiguous bytes; where that would be more than 16 million runs, each
// distinct region counts in full.
std::uint64_t unique_source_bytes(const std::vector<Scatter>& scatters);

}  // namespace shardpull
