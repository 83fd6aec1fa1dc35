#include "observe/rank_log.h"

#include <gtest/gtest.h>

namespace shardpull {
namespace {

// Goal: a pull that comes before its rank has begun the sync counts from when it came; those of other syncs,
// and answers to what nobody asked, do not.
TEST(ServeLog, APullMayComeBeforeTheSync) {
  ServeLog log;
  log.begin_sync(1, true);
  log.pulled(1, 0, 7, 0, 5);  // never answered
  log.pulled(2, 0, 7, 0, 10);
  log.begin_sync(2, true);
  log.answered(1, 0, 7, 0, 20);
  log.answered(2, 0, 7, 0, 30);
  log.answered(2, 0, 7, 0, 31);
  ASSERT_EQ(log.spans().size(), 1u);
  EXPECT_EQ(log.spans()[0],
            (Span{.phase = Phase::kServe, .item = 7, .peer = 0, .begin_ns = 10, .end_ns = 30}));
}

// Goal: without a trace only work is kept.
TEST(ServeLog, ServesAreForTracesAlone) {
  ServeLog log;
  log.begin_sync(1, false);
  log.pulled(1, 0, 7, 0, 5);
  log.answered(1, 0, 7, 0, 9);
  log.worked({.phase = Phase::kPack, .begin_ns = 5, .end_ns = 8});
  ASSERT_EQ(log.spans().size(), 1u);
  EXPECT_EQ(log.spans()[0].phase, Phase::kPack);
}

}  // namespace
}  // namespace shardpull
