#include "base/clock.h"

#include <gtest/gtest.h>

namespace shardpull {
namespace {

TEST(Clock, SystemClockNeverGoesBack) {
  const Clock& clock = SystemClock::instance();
  std::int64_t last = clock.now_ns();
  for (int i = 0; i < 1000; ++i) {
    const std::int64_t now = clock.now_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Clock, FakeClockMovesOnlyWhenTold) {
  FakeClock clock(100);
  EXPECT_EQ(clock.now_ns(), 100);
  clock.advance_ns(5 * kNanosPerMilli);
  EXPECT_EQ(clock.now_ns(), 5'000'100);
  clock.set_ns(7);
  EXPECT_EQ(clock.now_ns(), 5'000'100) << "a clock never goes back";
  clock.set_ns(kNanosPerSecond);
  EXPECT_EQ(clock.now_ns(), kNanosPerSecond);
}

}  // namespace
}  // namespace shardpull
