// Spreading the chunks of one worker over the producers that hold them.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace shardpull {

// What has to be known of a chunk: where it comes from and the bytes of its keys, in order.
struct ChunkDemand {
  std::uint32_t group = 0;
  std::uint32_t block = 0;  // which of the blocks below serves it
  std::vector<std::uint64_t> keys;
};

// The first key of each run of a chunk that the owners block[start], block[start + 1], ... (cyclically)
// serve: at most `pull_split` runs, as long as the owners' weights say. No run is empty.
std::vector<std::uint32_t> runs_of(const ChunkDemand& chunk, const std::vector<BlockOwner>& block,
                                   std::uint32_t start, std::uint32_t pull_split);

// Per chunk the place in its block where its first run is served; the others follow cyclically. Blocks are
// taken one by one and evened out each for itself, by weight: other workers may take other shares of other
// blocks, and what this worker takes elsewhere says nothing about the load of an owner. Within a block chunks
// are placed largest first, those of one size in order, each where the fullest owner it touches stays least
// full; ties go to the owner this worker takes least from in all, then to the next in the rotation by group.
// A pure function of its arguments.
std::vector<std::uint32_t> balance_chunks(const std::vector<ChunkDemand>& chunks,
                                          const std::vector<std::vector<BlockOwner>>& blocks,
                                          std::uint32_t pull_split);

}  // namespace shardpull
