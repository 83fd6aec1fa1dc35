#include "base/random.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

namespace shardpull {
namespace {

// Goal: the sequence is the published one of SplitMix64 (seed 1234567), so that seeds mean the same
// everywhere.
TEST(Random, SplitMixIsThePublishedFunction) {
  constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15ull;
  EXPECT_EQ(splitmix64(1234567), 6457827717110365317ull);
  EXPECT_EQ(splitmix64(1234567 + kStep), 3203168211198807973ull);
  EXPECT_EQ(splitmix64(1234567 + 2 * kStep), 9817491932198370423ull);
}

TEST(Random, SameSeedSameSequence) {
  Random a(42), b(42), c(43);
  int equal = 0;
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t value = a.next_u64();
    EXPECT_EQ(value, b.next_u64());
    equal += value == c.next_u64();
  }
  EXPECT_EQ(equal, 0);
}

TEST(Random, BelowIsUniformAndInRange) {
  Random random(1);
  std::array<int, 7> counts{};
  for (int i = 0; i < 70000; ++i) ++counts.at(random.below(7));
  for (const int count : counts) EXPECT_NEAR(count, 10000, 500);
  EXPECT_EQ(random.below(1), 0u);
}

TEST(Random, BetweenIncludesBothEnds) {
  Random random(2);
  bool low = false, high = false;
  for (int i = 0; i < 1000; ++i) {
    const std::int64_t value = random.between(-2, 2);
    ASSERT_GE(value, -2);
    ASSERT_LE(value, 2);
    low |= value == -2;
    high |= value == 2;
  }
  EXPECT_TRUE(low && high);
  (void)random.between(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(random.between(5, 5), 5);
}

TEST(Random, ShuffleKeepsTheItems) {
  Random random(3);
  std::vector<int> items(50);
  std::iota(items.begin(), items.end(), 0);
  std::vector<int> shuffled = items;
  random.shuffle(shuffled);
  EXPECT_NE(shuffled, items);
  std::sort(shuffled.begin(), shuffled.end());
  EXPECT_EQ(shuffled, items);
}

TEST(Random, ForksAreIndependentOfFurtherUse) {
  Random parent(4);
  const std::uint64_t first = parent.fork(1).next_u64();
  EXPECT_EQ(parent.fork(1).next_u64(), first);
  EXPECT_NE(parent.fork(2).next_u64(), first);
  const double unit = parent.unit();
  EXPECT_GE(unit, 0.0);
  EXPECT_LT(unit, 1.0);
}

}  // namespace
}  // namespace shardpull
