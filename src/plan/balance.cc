#include "plan/balance.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace shardpull {
namespace {

// How full an owner is: bytes per weight.
struct Fullness {
  std::uint64_t bytes = 0, weight = 1;
};

bool less_full(const Fullness& a, const Fullness& b) {
  const std::uint64_t whole_a = a.bytes / a.weight, whole_b = b.bytes / b.weight;
  if (whole_a != whole_b) return whole_a < whole_b;
  return a.bytes % a.weight * b.weight < b.bytes % b.weight * a.weight;  // both factors are below 2^32
}

// What choosing a place leads to, the best first.
struct Outcome {
  Fullness fullest;          // of the owners the chunk touches, with it
  std::uint64_t in_all = 0;  // what this worker takes from them already
  std::uint32_t turns = 0;   // from the rotation's choice
};

bool better(const Outcome& a, const Outcome& b) {
  if (less_full(a.fullest, b.fullest)) return true;
  if (less_full(b.fullest, a.fullest)) return false;
  return std::pair(a.in_all, a.turns) < std::pair(b.in_all, b.turns);
}

class Spread {
 public:
  Spread(const std::vector<BlockOwner>& block, std::uint32_t pull_split, std::vector<std::uint64_t>& taken)
      : block_(block), pull_split_(pull_split), taken_(taken), given_(block.size(), 0) {}

  std::uint32_t place(const ChunkDemand& chunk, std::uint64_t bytes) {
    const auto owners = static_cast<std::uint32_t>(block_.size());
    const std::uint32_t rotation = chunk.group % owners;
    std::uint32_t best = rotation;
    Outcome best_outcome;
    for (std::uint32_t turns = 0; turns < owners; ++turns) {
      const std::uint32_t start = (rotation + turns) % owners;
      Outcome outcome{.fullest = {}, .in_all = 0, .turns = turns};
      each_run(chunk, bytes, start, [&](std::size_t owner, std::uint64_t run) {
        const Fullness with_it{.bytes = given_[owner] + run, .weight = block_[owner].weight};
        if (less_full(outcome.fullest, with_it)) outcome.fullest = with_it;
        outcome.in_all += taken_[block_[owner].producer];
      });
      if (turns == 0 || better(outcome, best_outcome)) {
        best = start;
        best_outcome = outcome;
      }
    }
    each_run(chunk, bytes, best, [&](std::size_t owner, std::uint64_t run) {
      given_[owner] += run;
      taken_[block_[owner].producer] += run;
    });
    return best;
  }

 private:
  template <typename Each>
  void each_run(const ChunkDemand& chunk, std::uint64_t bytes, std::uint32_t start, const Each& each) const {
    if (pull_split_ == 1 || block_.size() == 1) return each(start, bytes);
    std::vector<std::uint32_t> starts = runs_of(chunk, block_, start, pull_split_);
    starts.push_back(static_cast<std::uint32_t>(chunk.keys.size()));
    for (std::size_t r = 0; r + 1 < starts.size(); ++r) {
      each((start + r) % block_.size(),
           std::accumulate(chunk.keys.begin() + starts[r], chunk.keys.begin() + starts[r + 1],
                           std::uint64_t{0}));
    }
  }

  const std::vector<BlockOwner>& block_;
  const std::uint32_t pull_split_;
  std::vector<std::uint64_t>& taken_;  // per producer, over all blocks
  std::vector<std::uint64_t> given_;   // per owner of the block
};

}  // namespace

std::vector<std::uint32_t> runs_of(const ChunkDemand& chunk, const std::vector<BlockOwner>& block,
                                   std::uint32_t start, std::uint32_t pull_split) {
  std::vector<std::uint64_t> weights(std::min<std::size_t>({pull_split, block.size(), chunk.keys.size()}));
  for (std::size_t r = 0; r < weights.size(); ++r) weights[r] = block[(start + r) % block.size()].weight;
  return greedy_cut(chunk.keys, weights);
}

std::vector<std::uint32_t> balance_chunks(const std::vector<ChunkDemand>& chunks,
                                          const std::vector<std::vector<BlockOwner>>& blocks,
                                          std::uint32_t pull_split) {
  std::vector<std::uint64_t> bytes(chunks.size());
  for (std::size_t c = 0; c < chunks.size(); ++c)
    bytes[c] = std::accumulate(chunks[c].keys.begin(), chunks[c].keys.end(), std::uint64_t{0});
  std::vector<std::uint32_t> order(chunks.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    const std::size_t owners_a = blocks[chunks[a].block].size(), owners_b = blocks[chunks[b].block].size();
    // Blocks of one owner first: they leave no choice, and the rest can give way to them where all else is
    // equal.
    if ((owners_a == 1) != (owners_b == 1)) return owners_a == 1;
    return bytes[a] > bytes[b];
  });
  std::uint32_t producers = 0;
  for (const std::vector<BlockOwner>& block : blocks) {
    for (const BlockOwner& owner : block) producers = std::max(producers, owner.producer + 1);
  }
  std::vector<std::uint64_t> taken(producers, 0);
  std::vector<Spread> spreads;
  spreads.reserve(blocks.size());
  for (const std::vector<BlockOwner>& block : blocks) spreads.emplace_back(block, pull_split, taken);
  std::vector<std::uint32_t> starts(chunks.size());
  for (const std::uint32_t c : order) starts[c] = spreads[chunks[c].block].place(chunks[c], bytes[c]);
  return starts;
}

}  // namespace shardpull
