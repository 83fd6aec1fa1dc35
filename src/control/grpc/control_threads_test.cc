#include "control/grpc/control_threads.h"

#include <gtest/gtest.h>

#include "base/clock.h"

namespace shardpull {
namespace {

// Goal: a process that was stopped knows that its peers have taken it for dead, whatever it notices first,
// and does not explain later losses by that.
TEST(StandstillWatch, ALateBeatIsAStandstillForAWhile) {
  constexpr std::int64_t kSecond = kNanosPerSecond;
  StandstillWatch watch(5 * kSecond);
  EXPECT_EQ(watch.recent(60 * kSecond), "");  // no beat is due yet
  watch.start(0);
  for (std::int64_t at = 1; at <= 10; ++at) watch.beat(at * kSecond);
  EXPECT_EQ(watch.recent(14 * kSecond), "");
  const std::string still = "this process stood still for 8 s, longer than dead_after (5 s)";
  EXPECT_EQ(watch.recent(18 * kSecond), still);  // before the late beat
  watch.beat(18 * kSecond);
  EXPECT_EQ(watch.recent(18 * kSecond), still);
  for (std::int64_t at = 19; at <= 22; ++at) {
    watch.beat(at * kSecond);
    EXPECT_EQ(watch.recent(at * kSecond), still);
  }
  watch.beat(23 * kSecond);
  EXPECT_EQ(watch.recent(23 * kSecond), "");
}

TEST(StandstillWatch, ALateBeatBelowTheLimitIsNone) {
  StandstillWatch watch(5);
  watch.start(100);
  watch.beat(104);
  EXPECT_EQ(watch.recent(108), "");
}

}  // namespace
}  // namespace shardpull
