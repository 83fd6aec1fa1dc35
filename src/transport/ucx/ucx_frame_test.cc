#include "transport/ucx/ucx_frame.h"

#include <gtest/gtest.h>

namespace shardpull {
namespace {

UcxFrame sample(UcxFrameKind kind) {
  UcxFrame frame{.kind = kind, .token = 5, .incarnation = 6};
  const bool read = kind == UcxFrameKind::kRead, hello = kind == UcxFrameKind::kHello;
  const bool data = kind == UcxFrameKind::kData;
  if (kind == UcxFrameKind::kGrant || kind == UcxFrameKind::kRetire || read)
    frame.region = frame.generation = 7;
  if (read || data || hello || kind == UcxFrameKind::kRefused) frame.read = 8;
  if (read || data || hello) frame.offset = 9;
  if (read || data || hello || kind == UcxFrameKind::kGrant) frame.bytes = 10;
  return frame;
}

// Goal: every kind comes back as it was, and only from its whole 64 bytes.
TEST(UcxFrame, RoundTrips) {
  for (int kind = 1; kind <= 7; ++kind) {
    const UcxFrame frame = sample(static_cast<UcxFrameKind>(kind));
    const auto bytes = encode(frame);
    EXPECT_TRUE(is_ucx_frame(bytes.data()));
    const Result<UcxFrame> out = decode_ucx_frame(bytes.data(), bytes.size());
    ASSERT_TRUE(out.ok()) << out.status().to_string();
    EXPECT_EQ(out->kind, frame.kind);
    EXPECT_EQ(out->token, 5u);
    EXPECT_EQ(out->incarnation, 6u);
    EXPECT_EQ(out->region, frame.region);
    EXPECT_EQ(out->generation, frame.generation);
    EXPECT_EQ(out->read, frame.read);
    EXPECT_EQ(out->offset, frame.offset);
    EXPECT_EQ(out->bytes, frame.bytes);
    for (std::size_t size = 0; size < bytes.size(); ++size)
      EXPECT_FALSE(decode_ucx_frame(bytes.data(), size).ok());
  }
}

// Goal: bytes that have one legal value are held to it, fields a kind needs must be there, others must not.
TEST(UcxFrame, RefusesWhatIsNotOurs) {
  const auto refused = [](std::array<std::byte, kUcxFrameBytes> bytes, std::size_t offset,
                          std::uint8_t value) {
    bytes[offset] = static_cast<std::byte>(value);
    return decode_ucx_frame(bytes.data(), bytes.size()).status();
  };
  const auto read = encode(sample(UcxFrameKind::kRead));
  for (const std::size_t offset : {0, 1, 2, 3, 7, 56, 63})
    EXPECT_FALSE(refused(read, offset, 0x77).ok()) << offset;
  for (const std::size_t offset : {8, 16, 24, 28, 32, 48})
    EXPECT_FALSE(refused(read, offset, 0).ok()) << offset;
  EXPECT_TRUE(refused(read, 40, 0).ok());  // an offset of 0 is one
  EXPECT_FALSE(refused(read, 6, 0).ok());
  EXPECT_FALSE(refused(read, 6, 8).ok());
  const Status version = refused(read, 4, 99);
  EXPECT_EQ(version.info().reason, Reason::kVersionMismatch);
  EXPECT_NE(version.message().find("99"), std::string::npos) << version.message();
  const auto bye = encode(sample(UcxFrameKind::kBye));
  for (const std::size_t offset : {24, 28, 32, 40, 48}) EXPECT_FALSE(refused(bye, offset, 1).ok()) << offset;
}

}  // namespace
}  // namespace shardpull
