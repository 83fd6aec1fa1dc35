// Goal: the block rule and the greedy cut, against values written down by hand and against their definitions.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"
#include "plan/plan.h"

namespace shardpull {
namespace {

using Ranks = std::vector<std::uint32_t>;

Ranks up_to(std::uint32_t n) {
  Ranks ranks(n);
  std::iota(ranks.begin(), ranks.end(), 0u);
  return ranks;
}

TEST(RouteBlock, as_recorded_from_the_reference) {
  // Three trainers, two workers: an uneven block. Four trainers: two each.
  EXPECT_EQ(route_block(up_to(3), 0, 2), (Ranks{0}));
  EXPECT_EQ(route_block(up_to(3), 1, 2), (Ranks{1, 2}));
  EXPECT_EQ(route_block(up_to(4), 0, 2), (Ranks{0, 1}));
  EXPECT_EQ(route_block(up_to(4), 1, 2), (Ranks{2, 3}));
  EXPECT_EQ(route_block(up_to(2), 0, 1), (Ranks{0, 1}));
  // Workers 0 and 2 are the same worker of two replicas.
  EXPECT_EQ(route_block(up_to(4), 2, 2), route_block(up_to(4), 0, 2));
  EXPECT_EQ(route_block({5, 9}, 3, 2), (Ranks{9}));
}

TEST(RouteBlock, fewer_owners_than_workers_are_shared_evenly) {
  std::vector<int> load(3, 0);
  for (std::uint32_t c = 0; c < 7; ++c) {
    const Ranks block = route_block(up_to(3), c, 7);
    ASSERT_EQ(block.size(), 1u);
    EXPECT_EQ(block[0], c * 3 / 7);
    ++load[block[0]];
  }
  EXPECT_EQ(load, (std::vector<int>{3, 2, 2}));
}

TEST(RouteBlock, blocks_partition_the_owners_when_there_are_enough) {
  for (std::uint32_t owners = 1; owners <= 12; ++owners) {
    for (std::uint32_t workers = 1; workers <= owners; ++workers) {
      Ranks all;
      for (std::uint32_t c = 0; c < workers; ++c) {
        const Ranks block = route_block(up_to(owners), c, workers);
        EXPECT_GE(block.size(), owners / workers);
        EXPECT_LE(block.size(), (owners + workers - 1) / workers);
        all.insert(all.end(), block.begin(), block.end());
      }
      EXPECT_EQ(all, up_to(owners)) << owners << " owners, " << workers << " workers";
    }
  }
}

TEST(RouteBlock, no_overflow_at_the_largest_fleet) {
  const Ranks owners = up_to(65536);
  EXPECT_EQ(route_block(owners, 65535, 65536), (Ranks{65535}));
  EXPECT_TRUE(route_block({}, 0, 1).empty());
}

TEST(GreedyCut, as_defined) {
  EXPECT_EQ(greedy_cut({1, 1, 1, 1}, 2), (Ranks{0, 2}));
  EXPECT_EQ(greedy_cut({4, 1, 1, 1, 1}, 2), (Ranks{0, 1}));
  EXPECT_EQ(greedy_cut({1, 1, 1, 1, 4}, 2), (Ranks{0, 4}));
  EXPECT_EQ(greedy_cut({9, 9, 1}, 3), (Ranks{0, 1, 2}));
  EXPECT_EQ(greedy_cut({5}, 4), (Ranks{0}));
  EXPECT_EQ(greedy_cut({}, 4), (Ranks{}));
  EXPECT_EQ(greedy_cut({0, 0, 0}, 2), (Ranks{0}));
  EXPECT_EQ(greedy_cut({3, 3, 3, 3, 3}, 1), (Ranks{0}));
}

TEST(WeightedBlock, as_computed_by_hand) {
  using Block = std::vector<BlockOwner>;
  EXPECT_EQ(weighted_block(up_to(3), 0, 2), (Block{{0, 2}, {1, 1}}));
  EXPECT_EQ(weighted_block(up_to(3), 1, 2), (Block{{1, 1}, {2, 2}}));
  EXPECT_EQ(weighted_block(up_to(2), 1, 3), (Block{{0, 1}, {1, 1}}));
  EXPECT_EQ(weighted_block({5, 9}, 5, 3), (Block{{9, 2}}));  // worker 2 of the second replica
}

TEST(WeightedBlock, shares_owners_and_workers_out_evenly) {
  for (std::uint32_t owners = 1; owners <= 12; ++owners) {
    for (std::uint32_t workers = 1; workers <= 12; ++workers) {
      std::vector<std::uint64_t> taken(owners, 0);
      for (std::uint32_t c = 0; c < workers; ++c) {
        std::uint64_t weights = 0;
        Ranks producers;
        std::set<std::uint64_t> distinct;
        for (const BlockOwner& owner : weighted_block(up_to(owners), c, workers)) {
          weights += owner.weight;
          taken[owner.producer] += owner.weight;
          distinct.insert(owner.weight);
          producers.push_back(owner.producer);
        }
        EXPECT_EQ(weights, owners);
        if (owners % workers != 0 && workers % owners != 0) continue;
        EXPECT_EQ(producers, route_block(up_to(owners), c, workers));
        EXPECT_EQ(distinct.size(), 1u);
      }
      EXPECT_EQ(taken, std::vector<std::uint64_t>(owners, workers))
          << owners << " owners, " << workers << " workers";
    }
  }
}

TEST(GreedyCut, runs_as_long_as_their_weights) {
  const std::vector<std::uint64_t> items(9, 10);
  EXPECT_EQ(greedy_cut(items, std::vector<std::uint64_t>{2, 1}), (Ranks{0, 6}));
  EXPECT_EQ(greedy_cut(items, std::vector<std::uint64_t>{1, 2}), (Ranks{0, 3}));
  EXPECT_EQ(greedy_cut(items, std::vector<std::uint64_t>{1, 1, 1}), greedy_cut(items, 3));
  EXPECT_EQ(greedy_cut({1u << 20, 1}, std::vector<std::uint64_t>{1, 5}), (Ranks{0, 1}));
}

TEST(GreedyCut, properties) {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::uint64_t> bytes(random.below(12));
    for (auto& item : bytes) item = random.below(20);
    const auto runs = static_cast<std::uint32_t>(random.between(1, 5));
    const Ranks starts = greedy_cut(bytes, runs);
    ASSERT_EQ(starts.empty(), bytes.empty());
    if (starts.empty()) continue;
    ASSERT_LE(starts.size(), runs);
    ASSERT_EQ(starts.front(), 0u);
    const std::uint64_t total = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
    const std::uint64_t target = (total + runs - 1) / runs;
    for (std::size_t r = 0; r + 1 < starts.size(); ++r) {
      ASSERT_LT(starts[r], starts[r + 1]);
      const auto first = bytes.begin() + starts[r], end = bytes.begin() + starts[r + 1];
      const std::uint64_t sum = std::accumulate(first, end, std::uint64_t{0});
      ASSERT_TRUE(sum <= target || end - first == 1);
      ASSERT_GT(sum + *end, target);
    }
  }
}

}  // namespace
}  // namespace shardpull
