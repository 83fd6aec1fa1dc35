// Sums of keys in the machines: docs/PROTOCOL.md, "Integrity".
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "protocol/key_sums.h"
#include "protocol/protocol_testing.h"
#include "tensor/checksum.h"

namespace shardpull::protocol_testing {
namespace {

using producer_action::FailReply;
using producer_action::GroupFreed;
using producer_action::Pack;
using producer_action::ReadyReply;
using producer_action::Sum;
using producer_action::SyncEnded;
using producer_action::SyncFailed;
using producer_action::SyncQuiet;
using testing::AllOf;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::IsEmpty;

// ---- the producer -------------------------------------------------------------------------------

TEST(ProducerSums, APackThatCrossesATransportIsSummedForAllItsSharers) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2, .transport = TransportKind::kTcp});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.pull(1, 0);
  ASSERT_EQ(b.count<Pack>(), 1u);
  EXPECT_TRUE(b.all<Pack>()[0].summed);
  b.finish_packs();
  ASSERT_EQ(b.count<ReadyReply>(), 2u);
  for (const ReadyReply& reply : b.all<ReadyReply>())
    EXPECT_THAT(reply.ready.sums, ElementsAreArray(sums_of(0, 0, 1)));
  b.take();
  b.pull(1, 0);  // asked again: from the slot, with its sums
  ASSERT_EQ(b.count<ReadyReply>(), 1u);
  EXPECT_THAT(b.all<ReadyReply>()[0].ready.sums, ElementsAreArray(sums_of(0, 0, 1)));
}

TEST(ProducerSums, NoneInSharedMemoryOrWhenOff) {
  for (const TinyOptions& options :
       {TinyOptions{.groups = 1}, TinyOptions{.groups = 1, .path = Path::kMapped},
        TinyOptions{.groups = 1, .path = Path::kDirect},
        TinyOptions{.groups = 1, .transport = TransportKind::kTcp, .integrity = Integrity::kOff},
        TinyOptions{.groups = 1,
                    .path = Path::kDirect,
                    .transport = TransportKind::kCma,
                    .integrity = Integrity::kOff}}) {
    ProducerBench b(options);
    ASSERT_EQ(b.plans[0]->chunks[0].path, options.path);
    b.reserve_all();
    ASSERT_EQ(b.begin(1), Status());
    ASSERT_EQ(b.publish(0), Status());
    b.serve(0, 0);
    EXPECT_EQ(b.count<Sum>(), 0u);
    ASSERT_EQ(b.count<ReadyReply>(), 1u);
    EXPECT_THAT(b.all<ReadyReply>()[0].ready.sums, IsEmpty());
  }
}

// What is read in place is summed once per run, when the first sharer asks, and answered after that.
TEST(ProducerSums, WhatIsReadInPlaceIsSummedOnceForAllSharers) {
  for (const Path path : {Path::kMapped, Path::kDirect}) {
    ProducerBench b({.groups = 2,
                     .names_per_group = 2,
                     .consumers = 3,
                     .replicas = 3,
                     .path = path,
                     .max_chunk_bytes = 128,
                     .integrity = Integrity::kFull});
    ASSERT_EQ(b.plans[0]->chunks[0].path, path);
    b.reserve_all();
    ASSERT_EQ(b.begin(1), Status());
    b.pull(0, 0);  // before its group is published
    EXPECT_EQ(b.count<Sum>(), 0u);
    ASSERT_EQ(b.publish(0), Status());
    ASSERT_EQ(b.count<Sum>(), 1u);
    EXPECT_EQ(b.all<Sum>()[0].pull->keys.size(), 2u);
    EXPECT_EQ(b.all<Sum>()[0].sources.size(), 2u);
    b.pull(1, 0);  // while the sums are made
    EXPECT_EQ(b.count<Sum>(), 1u);
    EXPECT_EQ(b.count<ReadyReply>(), 0u);
    b.finish_packs();
    b.pull(2, 0);  // after
    EXPECT_EQ(b.count<Sum>(), 1u);
    ASSERT_EQ(b.count<ReadyReply>(), 3u);
    for (const ReadyReply& reply : b.all<ReadyReply>()) {
      EXPECT_EQ(reply.ready.path, path);
      EXPECT_EQ(reply.ready.entries.size(), 2u);
      EXPECT_THAT(reply.ready.sums, ElementsAreArray(sums_of(0, 0, 2)));
    }
    b.take();
    b.pull(0, 0);  // asked again
    ASSERT_EQ(b.count<ReadyReply>(), 1u);
    EXPECT_THAT(b.all<ReadyReply>()[0].ready.sums, ElementsAreArray(sums_of(0, 0, 2)));
    EXPECT_EQ(b.machine.packs(), 0u) << "nothing was packed";
  }
}

TEST(ProducerSums, ANewSyncSumsAnew) {
  ProducerBench b({.groups = 1, .path = Path::kMapped, .integrity = Integrity::kFull});
  b.reserve_all();
  for (std::uint64_t sync = 1; sync <= 2; ++sync) {
    ASSERT_EQ(b.begin(sync), Status());
    ASSERT_EQ(b.publish(0), Status());
    b.pull(0, 0);
    EXPECT_EQ(b.count<Sum>(), 1u);
    b.finish_packs();
    b.signal(0, {0});
    ASSERT_EQ(b.machine.end_sync(0, b.out), Status());
    EXPECT_EQ(b.count<SyncEnded>(), 1u);
    b.take();
  }
}

// A sum reads the group as a pack does.
TEST(ProducerSums, AGroupIsNotFreedWhileItsSumsAreMade) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2, .path = Path::kMapped, .integrity = Integrity::kFull});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.signal(1, {0});
  b.machine.consumer_lost(0, 0, Status(StatusCode::kUnavailable, "gone"), b.out);
  EXPECT_EQ(b.count<GroupFreed>(), 0u) << "nobody is left to read it, but the sum does";
  b.finish_packs();
  EXPECT_EQ(b.count<GroupFreed>(), 1u);
  EXPECT_EQ(b.count<ReadyReply>(), 0u) << "to a worker that was lost";
}

TEST(ProducerSums, ASignalBesidesTheSumsEndsThePull) {
  ProducerBench b({.groups = 1, .path = Path::kMapped, .integrity = Integrity::kFull});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.signal(0, {0});
  EXPECT_THAT(b.refusal(), HasSubstr("signalled group 0 meanwhile"));
  EXPECT_EQ(b.count<GroupFreed>(), 0u);
  b.finish_packs();
  EXPECT_EQ(b.count<GroupFreed>(), 1u);
  EXPECT_EQ(b.count<ReadyReply>(), 0u);
}

TEST(ProducerSums, AFailedSyncIsQuietWhenItsSumsHaveEnded) {
  ProducerBench b({.groups = 1, .path = Path::kDirect, .transport = TransportKind::kCma});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.machine.fail(1, Status(StatusCode::kInternal, "elsewhere"), b.out);
  EXPECT_EQ(b.count<SyncFailed>(), 1u);
  EXPECT_EQ(b.count<SyncQuiet>(), 0u);
  b.finish_packs();
  EXPECT_EQ(b.count<SyncQuiet>(), 1u);
  EXPECT_EQ(b.count<ReadyReply>(), 0u);
  ASSERT_EQ(b.begin(2), Status());  // and its sums are none of the next one's
  ASSERT_EQ(b.publish(0), Status());
  b.take();
  b.pull(0, 0);
  EXPECT_EQ(b.count<Sum>(), 1u);
}

TEST(ProducerSums, AFailedSumFailsTheSyncAndEveryPullOfIt) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2, .path = Path::kMapped, .integrity = Integrity::kFull});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.pull(1, 0);
  b.finish_packs(Status(StatusCode::kInternal, "EIO"));
  ASSERT_EQ(b.count<FailReply>(), 2u);
  EXPECT_THAT(b.all<FailReply>()[0].status.message(), AllOf(HasSubstr("summing seq 0 of group 0"), HasSubstr("EIO")));
  EXPECT_EQ(b.count<SyncFailed>(), 1u);
}

TEST(ProducerSums, AnotherNumberOfSumsThanKeysIsAnError) {
  ProducerBench b({.groups = 1, .transport = TransportKind::kTcp});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.machine.pack_done(0, b.all<Pack>()[0].ticket, Status(), {1, 2}, b.out);
  EXPECT_THAT(b.refusal(), HasSubstr("2 sums were made, 1 are due"));
}

// A worker that announces the same pulls again, for a larger ring, while its pull waits for its sums.
TEST(ProducerSums, APullOutlivesTheAnnouncementItWasMadeUnder) {
  ProducerBench b({.groups = 1, .path = Path::kMapped, .integrity = Integrity::kFull});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.machine.reserve(0, 0, b.life(0), 4096, 2, 1, 1, pulls_digest(b.pulls[0], 2), b.pulls[0], b.out);
  for (const auto& ring : b.all<producer_action::AllocateRing>())
    b.machine.ring_allocated(0, ring.sharing_group, Status(), b.out);
  b.finish_packs();
  b.finish_packs();  // those of the new announcement
  ASSERT_EQ(b.count<ReadyReply>(), 1u);
  EXPECT_THAT(b.all<ReadyReply>()[0].ready.sums, ElementsAreArray(sums_of(0, 0, 1)));
}

// ---- the consumer -------------------------------------------------------------------------------

TEST(ConsumerSums, TheScatterOfAChunkGetsTheSumsOfAllItsRuns) {
  ConsumerBench b({.groups = 1,
                   .names_per_group = 4,
                   .producers = 2,
                   .max_chunk_bytes = 256,
                   .pull_split = 2,
                   .transport = TransportKind::kTcp});
  ASSERT_EQ(b.plan->chunks[0].runs.size(), 2u);
  b.start(1, 10);
  b.ready(0, 1);
  b.ready(0, 0);
  b.land(0, 0);
  b.land(0, 1);
  const auto scatters = b.all<consumer_action::StartScatter>();
  ASSERT_EQ(scatters.size(), 1u);
  std::vector<std::uint64_t> sums = sums_of(0, 0, 2);
  for (const std::uint64_t sum : sums_of(0, 1, 2)) sums.push_back(sum);
  EXPECT_THAT(scatters[0].sums, ElementsAreArray(sums));
}

TEST(ConsumerSums, TheCopyOfAChunkGetsItsSums) {
  for (const Path path : {Path::kMapped, Path::kDirect}) {
    ConsumerBench b({.groups = 1, .path = path, .integrity = Integrity::kFull});
    b.start(1, 10);
    b.ready(0);
    const auto copies = b.all<consumer_action::StartCopy>();
    ASSERT_EQ(copies.size(), 1u);
    EXPECT_THAT(copies[0].ready.at(0).sums, ElementsAreArray(sums_of(0, 0, 1)));
  }
}

TEST(ConsumerSums, AReadyWithOtherSumsThanAreDueFailsTheSync) {
  const auto result = [](const TinyOptions& options, std::size_t sums) {
    ConsumerBench b(options);
    b.start(1, 10);
    ReadyInfo info = b.ready_info(0);
    info.sums = sums_of(0, 0, sums);
    b.machine.ready(0, 0, b.pull_id(0), std::move(info), b.out);
    return b.update_result();
  };
  for (const std::size_t sums : {std::size_t{0}, std::size_t{2}}) {
    for (const Path path : {Path::kPacked, Path::kDirect}) {
      const Status status = result({.groups = 1, .path = path, .transport = TransportKind::kCma}, sums);
      EXPECT_EQ(status.code(), StatusCode::kDataLoss);
      EXPECT_EQ(status.info().reason, Reason::kCorrupt);
      EXPECT_EQ(status.info().peer, "trainer 0");
      EXPECT_THAT(status.message(), AllOf(HasSubstr("chunk 0"), HasSubstr("trainer 0 sent " + std::to_string(sums)),
                                          HasSubstr("integrity asks for 1")));
    }
  }
  EXPECT_THAT(result({.groups = 1}, 1).message(), HasSubstr("integrity asks for 0"))
      << "both sides derive it from the same tables";
}

TEST(ConsumerSums, ACorruptScatterFailsTheSyncAndTheNextOneRuns) {
  ConsumerBench b({.groups = 2, .transport = TransportKind::kTcp});
  b.start(1, 10);
  b.ready(0);
  b.land(0);
  const TinyModel model = tiny_model({.groups = 2});
  const std::vector<std::byte> bytes(64, std::byte{1});
  const Status corrupt = check_sum(*model.tables, b.plan->chunks[0].keys[0], 0, bytes, 7);
  b.scattered(0, corrupt);
  EXPECT_EQ(b.update_result().code(), StatusCode::kDataLoss);
  EXPECT_THAT(b.update_result().message(),
              AllOf(HasSubstr("worker 0"), HasSubstr("chunk 0"), HasSubstr("'layers.0.w0' from trainer 0")));
  b.take();
  b.start(2, 11);
  b.run_to_end();
  EXPECT_EQ(b.update_result(), Status());
}

TEST(KeySums, EqualSumsPassAndOthersNameTensorProducerAndBoth) {
  const TinyModel model = tiny_model({.groups = 1});
  const ConsumerBench b({.groups = 1});
  const ChunkKey& key = b.plan->chunks[0].keys[0];
  std::vector<std::byte> bytes(64, std::byte{1});
  const std::uint64_t sum = checksum64(bytes);
  EXPECT_EQ(check_sum(*model.tables, key, 3, bytes, sum), Status());
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const Status status = check_sum(*model.tables, key, 3, bytes, sum);
    EXPECT_EQ(status.info().reason, Reason::kCorrupt) << "bit " << bit;
    EXPECT_EQ(status.info().peer, "trainer 3");
    EXPECT_EQ(status.info().tensor, "layers.0.w0");
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
}

}  // namespace
}  // namespace shardpull::protocol_testing
