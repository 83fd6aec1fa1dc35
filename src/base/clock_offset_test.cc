#include "base/clock_offset.h"

#include <cstdint>

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

// Goal: whatever the ways there and back take, the true offset is within what is said of it.
RC_GTEST_PROP(ClockComparison, TheTruthLiesWithinTheError, ()) {
  const auto offset = *rc::gen::inRange<std::int64_t>(-1'000'000'000'000, 1'000'000'000'000);
  ClockComparison comparison;
  std::int64_t now = 0;
  for (int i = *rc::gen::inRange(1, 6); i > 0; --i) {
    const auto way = [] { return *rc::gen::inRange<std::int64_t>(0, 1'000'000); };
    const std::int64_t sent = now + way(), came = sent + way(), left = came + way();
    now = left + way();
    comparison.add(sent, came - offset, left - offset, now);
  }
  const auto found = comparison.at(now + 1000);
  RC_ASSERT(found.has_value());
  RC_ASSERT(found->offset_ns - found->error_ns <= offset);
  RC_ASSERT(offset <= found->offset_ns + found->error_ns);
  RC_ASSERT(found->error_ns <= 1'000'001);
}

// Goal: a close look is kept until it has aged so much that a coarser, later one says more.
TEST(ClockComparison, KeepsTheBestUntilItHasAged) {
  ClockComparison comparison;
  EXPECT_FALSE(comparison.at(0));
  comparison.add(0, 500, 500, 100);  // within 50 ns
  EXPECT_EQ(comparison.at(100), (ClockOffset{-450, 50}));
  comparison.add(1'000, 1'600, 1'600, 3'000);  // within 1000 ns
  EXPECT_EQ(comparison.at(3'000)->offset_ns, -450);
  EXPECT_EQ(comparison.at(10'000'100)->error_ns, 50 + 1'000);  // 10 ms later
  comparison.add(20'000'000, 20'000'500, 20'000'500, 20'002'000);
  EXPECT_EQ(comparison.at(20'002'000), (ClockOffset{500, 1'000}));
}

// Goal: a peer's numbers are only numbers: what cannot be is not believed and does no harm.
TEST(ClockComparison, IgnoresTimesThatCannotBe) {
  ClockComparison comparison;
  comparison.add(0, INT64_MAX, INT64_MIN, 10);
  comparison.add(0, INT64_MIN, INT64_MAX, 10);
  comparison.add(100, 5, 5, 50);
  comparison.add(0, 50, 40, 100);
  EXPECT_FALSE(comparison.at(0));
}

}  // namespace
}  // namespace shardpull
