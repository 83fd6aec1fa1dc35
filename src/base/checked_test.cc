#include "base/checked.h"

#include <cstdint>
#include <limits>

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
constexpr auto kMin = std::numeric_limits<std::int64_t>::min();
constexpr auto kUnsignedMax = std::numeric_limits<std::uint64_t>::max();

TEST(Checked, Borders) {
  EXPECT_EQ(checked_add<std::int64_t>(kMax, 0), kMax);
  EXPECT_EQ(checked_add<std::int64_t>(kMax, 1), std::nullopt);
  EXPECT_EQ(checked_sub<std::int64_t>(kMin, 1), std::nullopt);
  EXPECT_EQ(checked_sub<std::uint64_t>(0, 1), std::nullopt);
  EXPECT_EQ(checked_mul<std::int64_t>(kMin, -1), std::nullopt);
  EXPECT_EQ(checked_mul<std::uint64_t>(kUnsignedMax, 1), kUnsignedMax);
  EXPECT_EQ(checked_mul<std::uint64_t>(1ull << 32, 1ull << 32), std::nullopt);
  EXPECT_EQ(checked_align_up<std::uint64_t>(17, 16), 32u);
  EXPECT_EQ(checked_align_up<std::uint64_t>(32, 16), 32u);
  EXPECT_EQ(checked_align_up<std::uint64_t>(kUnsignedMax, 16), std::nullopt);
  EXPECT_EQ(ceil_div<std::int64_t>(kMax, kMax - 1), 2);
  EXPECT_EQ(ceil_div(0, 7), 0);
}

TEST(Checked, Casts) {
  EXPECT_EQ(checked_cast<std::uint32_t>(std::int64_t{-1}), std::nullopt);
  EXPECT_EQ(checked_cast<std::uint64_t>(std::int64_t{-1}), std::nullopt);
  EXPECT_EQ(checked_cast<std::int64_t>(kUnsignedMax), std::nullopt);
  EXPECT_EQ(checked_cast<std::int32_t>(std::int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(checked_cast<std::int32_t>(std::int64_t{-5}), -5);
  EXPECT_EQ(checked_cast<std::uint8_t>(255), std::uint8_t{255});
}

__extension__ using Wide = __int128;

// Goal: the same answer as arithmetic in 128 bits.
RC_GTEST_PROP(Checked, AgreesWithWideArithmetic, (std::int64_t a, std::int64_t b)) {
  const auto expect = [](Wide value, std::optional<std::int64_t> got) {
    const bool fits = value >= kMin && value <= kMax;
    RC_ASSERT(got.has_value() == fits);
    if (fits) RC_ASSERT(*got == static_cast<std::int64_t>(value));
  };
  for (const std::int64_t x : {a, a << 40, kMax - (a & 0xFF)}) {
    for (const std::int64_t y : {b, b << 40, kMin + (b & 0xFF)}) {
      expect(Wide{x} + y, checked_add<std::int64_t>(x, y));
      expect(Wide{x} - y, checked_sub<std::int64_t>(x, y));
      expect(Wide{x} * y, checked_mul<std::int64_t>(x, y));
    }
  }
}

}  // namespace
}  // namespace shardpull
