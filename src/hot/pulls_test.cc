// Goal: a pull is the same pull after it was on the wire, and no two of its fields share a place there.
#include "hot/pulls.h"

#include <gtest/gtest.h>

namespace shardpull {
namespace {

TEST(HotPulls, APullIsTheSameAfterItWasOnTheWire) {
  const PullId pull{.sync_id = 0x1122334455667788,
                    .consumer = 0x01020304,
                    .chunk = 0x05060708,
                    .run = 0x090A,
                    .attempt = 0x0B0C,
                    .seq = 0x0D0E0F10,
                    .lane = LaneKind::kRecovery};
  for (const HotType type : {HotType::kPull, HotType::kReady, HotType::kFail}) {
    HotHeader header = header_of(type, pull);
    EXPECT_EQ(header.token, 0U);
    EXPECT_EQ(header.incarnation, 0U);
    header.token = 1;
    header.incarnation = 2;
    const auto bytes = encode(header);
    const auto decoded = decode_hot_header(bytes.data(), bytes.size());
    ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
    EXPECT_EQ(decoded->type, type);
    EXPECT_EQ(pull_of(*decoded), pull);
  }
}

TEST(HotPulls, AReadyKeepsItsEntriesAndSaysTheBytesOfAPackedOne) {
  const RemoteRef slot{.region = 3, .generation = 4, .offset = 80, .bytes = 96};
  const ReadyInfo packed =
      ready_info({.encoding = 0, .entries = {{slot, {}}}, .sums = {7, 8}}, Path::kPacked);
  EXPECT_EQ(packed.path, Path::kPacked);
  EXPECT_EQ(packed.bytes, 96U);
  EXPECT_EQ(packed.sums, (std::vector<std::uint64_t>{7, 8}));

  const ReadyInfo mapped =
      ready_info({.encoding = 0, .entries = {{slot, {5, 1}}, {slot, {}}}, .sums = {}}, Path::kMapped);
  EXPECT_EQ(mapped.path, Path::kMapped);
  EXPECT_EQ(mapped.bytes, 0U) << "of a packed pull alone";
  ASSERT_EQ(mapped.entries.size(), 2U);
  EXPECT_EQ(mapped.entries[0].where, slot);
  EXPECT_EQ(mapped.entries[0].stride, (std::vector<std::int64_t>{5, 1}));

  EXPECT_EQ(ready_info({}, Path::kPacked).bytes, 0U) << "without entries: for the machine to refuse";
}

}  // namespace
}  // namespace shardpull
