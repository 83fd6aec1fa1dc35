#include "base/units.h"

#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

using ::testing::HasSubstr;

TEST(Units, ParsesBytes) {
  EXPECT_EQ(parse_bytes("0", "x").value(), 0u);
  EXPECT_EQ(parse_bytes("4096", "x").value(), 4096u);
  EXPECT_EQ(parse_bytes("7B", "x").value(), 7u);
  EXPECT_EQ(parse_bytes("64MiB", "x").value(), 64u << 20);
  EXPECT_EQ(parse_bytes("2GiB", "x").value(), 2ull << 30);
  EXPECT_EQ(parse_bytes("3TB", "x").value(), 3'000'000'000'000u);
  EXPECT_EQ(parse_bytes("18446744073709551615", "x").value(), std::numeric_limits<std::uint64_t>::max());
}

// Goal: what is not a whole number with a known unit is refused, and the message names the setting and the
// accepted form.
TEST(Units, RefusesHalfNumbersWithTheAcceptedForm) {
  for (const char* text :
       {"", "MiB", "1.5MiB", "1,5MiB", "64M", "64 MiB", "64mib", "-1", "+1", "0x10", "1e6", "64MiB ",
        " 64MiB", "18446744073709551616", "16777216TiB", "99999999999999999999TiB"}) {
    const auto result = parse_bytes(text, "--max-chunk-bytes");
    ASSERT_FALSE(result.ok()) << text;
    EXPECT_THAT(result.status().message(), HasSubstr("--max-chunk-bytes"));
    EXPECT_THAT(result.status().message(), HasSubstr("such as 64MiB"));
    EXPECT_EQ(result.status().info().reason, Reason::kBadArgument);
  }
}

TEST(Units, ParsesDurations) {
  EXPECT_EQ(parse_duration_ns("300s", "x").value(), 300'000'000'000);
  EXPECT_EQ(parse_duration_ns("500ms", "x").value(), 500'000'000);
  EXPECT_EQ(parse_duration_ns("2h", "x").value(), 7'200'000'000'000);
  for (const char* text : {"300", "0.5s", "5 s", "-1s", "5m", "9223372036854775807s"}) {
    EXPECT_FALSE(parse_duration_ns(text, "x").ok()) << text;
  }
  EXPECT_THAT(parse_duration_ns("300", "stall").status().message(), HasSubstr("has no unit"));
}

TEST(Units, ParsesIntegers) {
  EXPECT_EQ(parse_integer("12", "x", 0, 100).value(), 12);
  EXPECT_EQ(parse_integer("-3", "x", -5, 5).value(), -3);
  for (const char* text : {"", "1.5", "12a", "a", " 1", "1 ", "101", "-1", "99999999999999999999"}) {
    EXPECT_FALSE(parse_integer(text, "--lookahead", 0, 100).ok()) << text;
  }
  EXPECT_THAT(parse_integer("101", "--lookahead", 0, 100).status().message(), HasSubstr("from 0 to 100"));
}

TEST(Units, FormatsBytes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1 KiB");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(64u << 20), "64 MiB");
  EXPECT_EQ(format_bytes(1'567'000'000), "1.46 GiB");
  EXPECT_EQ(format_bytes((1ull << 30) - 1), "1 GiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::uint64_t>::max()), "16 EiB");
}

TEST(Units, FormatsDurations) {
  EXPECT_EQ(format_duration_ns(0), "0 ns");
  EXPECT_EQ(format_duration_ns(950), "950 ns");
  EXPECT_EQ(format_duration_ns(1'230'000), "1.23 ms");
  EXPECT_EQ(format_duration_ns(999'600'000), "1 s");
  EXPECT_EQ(format_duration_ns(4'560'000'000), "4.56 s");
  EXPECT_EQ(format_duration_ns(123'000'000'000), "2 min 03 s");
  EXPECT_EQ(format_duration_ns(3'720'000'000'000), "1 h 02 min");
  EXPECT_EQ(format_duration_ns(-1500), "-1.5 us");
  EXPECT_EQ(format_duration_ns(std::numeric_limits<std::int64_t>::min()).front(), '-');
}

TEST(Units, FormatsRates) {
  EXPECT_EQ(format_rate(3'210'000'000, 1'000'000'000), "3.21 GB/s");
  EXPECT_EQ(format_rate(10, 0), "-");
}

// Goal: what is written in bytes is read back.
RC_GTEST_PROP(Units, BytesRoundTrip, (std::uint64_t bytes)) {
  RC_ASSERT(parse_bytes(std::to_string(bytes) + "B", "x").value() == bytes);
}

}  // namespace
}  // namespace shardpull
