#include "base/log.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardpull {
namespace {

using ::testing::HasSubstr;

// Goal: lines go to standard error only, carry the process's identity, and are not even formatted below the
// level.
TEST(Log, WritesToStandardErrorAtItsLevel) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  set_log_level(LogLevel::kWarn);
  set_log_identity("worker 3 100%");
  log_info("not {}", "written");
  log_warn("written {}", 7);
  set_log_level(LogLevel::kDebug);
  log_debug("now too");
  set_log_level(LogLevel::kOff);
  log_error("silent");
  EXPECT_FALSE(log_enabled(LogLevel::kError));
  set_log_level(LogLevel::kWarn);
  set_log_identity("shardpull");
  const std::string errors = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_THAT(errors, HasSubstr("[worker 3 100%] written 7"));
  EXPECT_THAT(errors, HasSubstr("now too"));
  EXPECT_THAT(errors, ::testing::Not(HasSubstr("not written")));
  EXPECT_THAT(errors, ::testing::Not(HasSubstr("silent")));
}

}  // namespace
}  // namespace shardpull
