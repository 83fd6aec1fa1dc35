#include "shardpull/status.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "base/status_macros.h"

namespace shardpull {
namespace {

TEST(Status, DefaultIsOkAndEmpty) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.message(), "");
  EXPECT_EQ(status.to_string(), "OK");
  EXPECT_EQ(status.info().reason, Reason::kUnspecified);
  EXPECT_TRUE(Status(StatusCode::kOk, "dropped").ok());
}

TEST(Status, CarriesCodeMessageAndInfo) {
  const Status status(
      StatusCode::kUnavailable, "trainer 1 is gone",
      {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .retryable = true, .peer = "trainer 1"});
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.to_string(), "UNAVAILABLE: trainer 1 is gone");
  EXPECT_EQ(status.info().peer, "trainer 1");
  EXPECT_TRUE(status.info().retryable);
}

TEST(Status, ContextGoesInFrontAndKeepsTheRest) {
  const Status status = Status(StatusCode::kNotFound, "no file", {.reason = Reason::kHost, .tensor = "w"})
                            .with_context("model.safetensors");
  EXPECT_EQ(status.message(), "model.safetensors: no file");
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_EQ(status.info().tensor, "w");
  EXPECT_TRUE(Status().with_context("anything").ok());
}

// Goal: every code and reason has a spelling of its own, and unknown numbers have one, too.
TEST(Status, SpellingsAreTotal) {
  std::set<std::string> codes, reasons;
  for (int code = 0; code <= 16; ++code) codes.insert(std::string(to_string(static_cast<StatusCode>(code))));
  EXPECT_EQ(codes.size(), 17u);
  EXPECT_EQ(to_string(static_cast<StatusCode>(99)), "UNKNOWN");
  for (int reason = 0; reason <= static_cast<int>(Reason::kCorrupt); ++reason) {
    reasons.insert(std::string(to_string(static_cast<Reason>(reason))));
  }
  EXPECT_EQ(reasons.size(), static_cast<std::size_t>(Reason::kCorrupt) + 1);
  EXPECT_EQ(to_string(static_cast<Reason>(9999)), "unspecified");
}

Result<int> half(int value) {
  if (value % 2 != 0) return Status(StatusCode::kInvalidArgument, "odd");
  return value / 2;
}

Result<int> quarter(int value) {
  SHARDPULL_ASSIGN_OR_RETURN(const int once, half(value));
  SHARDPULL_ASSIGN_OR_RETURN(const int twice, half(once));
  return twice;
}

Status check_quarter(int value) {
  SHARDPULL_RETURN_IF_ERROR(quarter(value).status());
  return {};
}

TEST(Result, ValueOrStatus) {
  EXPECT_EQ(quarter(12).value(), 3);
  EXPECT_TRUE(quarter(12).status().ok());
  EXPECT_EQ(quarter(6).status().message(), "odd");
  EXPECT_TRUE(check_quarter(8).ok());
  EXPECT_FALSE(check_quarter(7).ok());
}

TEST(ResultDeathTest, ReadingAFailedResultEndsTheProcess) {
  EXPECT_DEATH((void)half(1).value(), "");
  EXPECT_DEATH((void)Result<int>(Status()), "");
}

}  // namespace
}  // namespace shardpull
