#include "transport/local_frame.h"

#include <gtest/gtest.h>

namespace shardpull {
namespace {

// Goal: the frames of these backends are as strict as the hot header.
TEST(LocalFrame, RoundTripsAndRefusesWhatIsNotOurs) {
  const LocalFrame shm{.kind = LocalFrameKind::kGrant,
                       .backend = LocalBackend::kShm,
                       .token = 5,
                       .incarnation = 6,
                       .region = 7,
                       .generation = 8,
                       .bytes = 9};
  LocalFrame cma = shm;
  cma.backend = LocalBackend::kCma;
  cma.address = 10;
  cma.proof_address = 11;
  cma.proof = 12;
  LocalFrame retire = shm;
  retire.kind = LocalFrameKind::kRetire;
  retire.bytes = 0;
  for (const LocalFrame& frame : {shm, cma, retire}) {
    const auto bytes = encode(frame);
    const Result<LocalFrame> out = decode_local_frame(bytes.data(), bytes.size());
    ASSERT_TRUE(out.ok()) << out.status().to_string();
    EXPECT_EQ(out->kind, frame.kind);
    EXPECT_EQ(out->backend, frame.backend);
    EXPECT_EQ(out->token, 5u);
    EXPECT_EQ(out->incarnation, 6u);
    EXPECT_EQ(out->region, 7u);
    EXPECT_EQ(out->generation, 8u);
    EXPECT_EQ(out->bytes, frame.bytes);
    EXPECT_EQ(out->address, frame.address);
    EXPECT_EQ(out->proof_address, frame.proof_address);
    EXPECT_EQ(out->proof, frame.proof);
    for (std::size_t size = 0; size < bytes.size(); ++size)
      EXPECT_FALSE(decode_local_frame(bytes.data(), size).ok());
    // Every byte that has only one legal value.
    for (const std::size_t offset : {0, 1, 2, 3, 4, 5, 6, 7}) {
      auto changed = bytes;
      changed[offset] ^= std::byte{0x40};
      EXPECT_FALSE(decode_local_frame(changed.data(), changed.size()).ok()) << offset;
    }
  }
}

// Goal: addresses come with cma's grants, with nothing else, and never past the end of memory.
TEST(LocalFrame, RefusesAddressesThatCannotBe) {
  const LocalFrame good{.kind = LocalFrameKind::kGrant,
                        .backend = LocalBackend::kCma,
                        .token = 5,
                        .incarnation = 6,
                        .region = 7,
                        .generation = 8,
                        .bytes = 4096,
                        .address = 4096,
                        .proof_address = 8,
                        .proof = 1};
  const auto refused = [](const LocalFrame& frame) {
    const auto bytes = encode(frame);
    return !decode_local_frame(bytes.data(), bytes.size()).ok();
  };
  EXPECT_FALSE(refused(good));
  LocalFrame bad = good;
  bad.bytes = ~std::uint64_t{0};
  EXPECT_TRUE(refused(bad));
  bad = good;
  bad.address = ~std::uint64_t{0} - 4095;
  EXPECT_TRUE(refused(bad));
  bad = good;
  bad.proof_address = ~std::uint64_t{0} - 3;
  EXPECT_TRUE(refused(bad));
  for (std::uint64_t LocalFrame::* field :
       {&LocalFrame::address, &LocalFrame::proof_address, &LocalFrame::proof}) {
    bad = good;
    bad.*field = 0;
    EXPECT_TRUE(refused(bad));
    bad = LocalFrame{.kind = LocalFrameKind::kRetire,
                     .backend = LocalBackend::kCma,
                     .token = 5,
                     .incarnation = 6,
                     .region = 7,
                     .generation = 8};
    EXPECT_FALSE(refused(bad));
    bad.*field = 1;
    EXPECT_TRUE(refused(bad));
    bad.kind = LocalFrameKind::kGrant;
    bad.backend = LocalBackend::kShm;
    bad.bytes = 1;
    EXPECT_TRUE(refused(bad));
  }
}

}  // namespace
}  // namespace shardpull
