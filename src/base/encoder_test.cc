#include "base/encoder.h"

#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

using ::testing::HasSubstr;

TEST(Encoder, LittleEndianWithoutPadding) {
  ByteWriter writer;
  writer.u8(1);
  writer.u16(0x0203);
  writer.u32(0x04050607);
  writer.u64(0x08090A0B0C0D0E0F);
  writer.i64(-2);
  writer.boolean(true);
  writer.string("hi");
  const std::vector<std::uint8_t> expected = {1,   3,   2,   7, 6, 5,   4,   15,  14,  13,
                                              12,  11,  10,  9, 8, 254, 255, 255, 255, 255,
                                              255, 255, 255, 1, 2, 0,   0,   0,   'h', 'i'};
  ASSERT_EQ(writer.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(std::to_integer<int>(writer.bytes()[i]), expected[i]) << i;
}

// Goal: everything that is written is read back, and nothing is left over.
RC_GTEST_PROP(Encoder, RoundTrip,
              (std::uint8_t a, std::uint16_t b, std::uint32_t c, std::uint64_t d, std::int64_t e, bool f,
               const std::string& g, const std::vector<std::int64_t>& h,
               const std::vector<std::uint32_t>& i)) {
  ByteWriter writer;
  writer.u8(a);
  writer.u16(b);
  writer.u32(c);
  writer.u64(d);
  writer.i64(e);
  writer.boolean(f);
  writer.string(g);
  writer.i64_list(h);
  writer.u32_list(i);
  const std::vector<std::byte> bytes = writer.take();
  ByteReader reader(bytes);
  std::uint8_t a2 = 0;
  std::uint16_t b2 = 0;
  std::uint32_t c2 = 0;
  std::uint64_t d2 = 0;
  std::int64_t e2 = 0;
  bool f2 = false;
  std::string g2;
  std::vector<std::int64_t> h2;
  std::vector<std::uint32_t> i2;
  RC_ASSERT(reader.u8(a2).ok() && reader.u16(b2).ok() && reader.u32(c2).ok() && reader.u64(d2).ok() &&
            reader.i64(e2).ok());
  RC_ASSERT(reader.boolean(f2).ok() && reader.string(g2, 1 << 20).ok() && reader.i64_list(h2, 1 << 20).ok());
  RC_ASSERT(!reader.end().ok() || i.empty());
  RC_ASSERT(reader.u32_list(i2, 1 << 20).ok() && reader.end().ok());
  RC_ASSERT(a == a2 && b == b2 && c == c2 && d == d2 && e == e2 && f == f2 && g == g2 && h == h2 && i == i2);
}

// Goal: input cut off anywhere is refused by the read that misses bytes, which changes neither position nor
// output.
TEST(Encoder, TruncatedInputIsRefused) {
  ByteWriter writer;
  writer.u32(7);
  writer.string("abc");
  writer.i64_list(std::vector<std::int64_t>{1, 2});
  const std::vector<std::byte> bytes = writer.take();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const std::span<const std::byte> all(bytes);
    ByteReader reader(all.first(size), "plan");
    std::uint32_t number = 99;
    std::string text = "before";
    std::vector<std::int64_t> list{9};
    Status status = reader.u32(number);
    if (status.ok())
      status = reader.string(text, 100);
    else
      EXPECT_EQ(number, 99u);
    std::size_t before = reader.position();
    if (status.ok()) {
      before = reader.position();
      status = reader.i64_list(list, 100);
    } else {
      EXPECT_EQ(text, "before");
    }
    ASSERT_FALSE(status.ok()) << size;
    EXPECT_EQ(reader.position(), before);
    EXPECT_EQ(list, std::vector<std::int64_t>{9});
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_THAT(status.message(), HasSubstr("plan"));
  }
}

TEST(Encoder, HostileCountsReserveNothing) {
  ByteWriter writer;
  writer.u32(0xFFFFFFFF);
  const std::vector<std::byte> bytes = writer.take();
  std::vector<std::int64_t> list;
  std::string text;
  std::uint32_t count = 0;
  EXPECT_FALSE(ByteReader(bytes).i64_list(list, std::numeric_limits<std::uint64_t>::max()).ok());
  EXPECT_FALSE(ByteReader(bytes).string(text, std::numeric_limits<std::uint64_t>::max()).ok());
  EXPECT_FALSE(ByteReader(bytes).count(count, 10, 1).ok());
  EXPECT_EQ(list.capacity(), 0u);
}

TEST(Encoder, BooleansAreZeroOrOne) {
  const std::vector<std::byte> bytes{std::byte{2}};
  bool value = true;
  EXPECT_FALSE(ByteReader(bytes).boolean(value).ok());
  EXPECT_TRUE(value);
}

TEST(Encoder, LeftOverBytesAreRefused) {
  const std::vector<std::byte> bytes(3);
  ByteReader reader(bytes, "hello");
  std::uint8_t value = 0;
  ASSERT_TRUE(reader.u8(value).ok());
  EXPECT_THAT(reader.end().message(), HasSubstr("2 bytes left over at byte 1 of 3"));
  std::span<const std::byte> rest;
  ASSERT_TRUE(reader.raw(2, rest).ok());
  EXPECT_TRUE(reader.end().ok());
}

TEST(Encoder, PatchesALengthWrittenBefore) {
  ByteWriter writer;
  writer.u32(0);
  writer.string("payload");
  writer.patch_u32(0, static_cast<std::uint32_t>(writer.size()));
  std::uint32_t length = 0;
  ByteReader reader(writer.bytes());
  ASSERT_TRUE(reader.u32(length).ok());
  EXPECT_EQ(length, writer.size());
}

}  // namespace
}  // namespace shardpull
