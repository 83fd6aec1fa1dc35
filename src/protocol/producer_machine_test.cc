// The producer's rules, one test each: docs/PROTOCOL.md, "Producer".
#include "protocol/producer_machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>

#include "base/random.h"
#include "protocol/protocol_testing.h"

namespace shardpull::protocol_testing {
namespace {

using namespace producer_action;  // NOLINT
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<std::uint32_t> freed(const ProducerBench& bench) {
  std::vector<std::uint32_t> groups;
  for (const GroupFreed& one : bench.all<GroupFreed>()) groups.push_back(one.group);
  return groups;
}
std::vector<std::uint32_t> answered(const ProducerBench& bench) {  // seqs
  std::vector<std::uint32_t> seqs;
  for (const ReadyReply& one : bench.all<ReadyReply>()) seqs.push_back(one.pull.seq);
  return seqs;
}

// ---- messages of other syncs --------------------------------------------------------------------

TEST(ProducerEarly, MessagesForASyncNotBegunAreKeptAndTakeEffectAtBegin) {
  ProducerBench b({.groups = 2, .consumers = 2});
  b.reserve_all();
  b.sync_id = 1;
  b.pull(0, 0);
  b.signal(1, {1});
  EXPECT_THAT(b.take(), IsEmpty());
  EXPECT_EQ(b.machine.drops().kept_early, 2u);

  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.count<SignalAck>(), 1u);
  EXPECT_THAT(b.all<SignalAck>()[0].groups, ElementsAre(1u));
  ASSERT_EQ(b.publish(0), Status());
  b.finish_packs();
  EXPECT_THAT(answered(b), ElementsAre(0u));
  b.signal(0, {1});
  ASSERT_EQ(b.publish(1), Status());
  EXPECT_THAT(freed(b), ElementsAre(1u)) << "begin_sync must not erase an early signal";
}

TEST(ProducerEarly, OneSyncAheadAtMostTheOlderIsDroppedAndCounted) {
  ProducerBench b({.groups = 2});
  b.reserve_all();
  b.sync_id = 5;
  b.signal(0, {0, 1});
  b.sync_id = 7;
  b.signal(0, {0});
  EXPECT_EQ(b.machine.drops().stale_sync, 2u) << "signals of 5 make room for those of 7";
  b.sync_id = 6;
  b.signal(0, {1});
  EXPECT_EQ(b.machine.drops().stale_sync, 3u);

  ASSERT_EQ(b.begin(7), Status());
  ASSERT_EQ(b.publish(0), Status());
  ASSERT_EQ(b.publish(1), Status());
  EXPECT_THAT(freed(b), ElementsAre(0u));
}

TEST(ProducerEarly, WhatWasKeptForASkippedSyncIsDropped) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  b.sync_id = 5;
  b.signal(0, {0});
  ASSERT_EQ(b.begin(6), Status());
  ASSERT_EQ(b.publish(0), Status());
  EXPECT_THAT(freed(b), IsEmpty());
  EXPECT_EQ(b.machine.drops().stale_sync, 1u);
}

TEST(ProducerEarly, ARepeatedEarlyPullIsOnePull) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  b.sync_id = 1;
  for (int i = 0; i < 100; ++i) b.pull(0, 0);
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.finish_packs();
  EXPECT_EQ(b.count<ReadyReply>() + b.count<FailReply>(), 1u);
}

TEST(ProducerEarly, AnEarlyPullOfAnUnknownChunkIsRefusedAtOnce) {
  ProducerBench b;
  b.reserve_all();
  PullId pull = b.pull_id(0, 0);
  pull.sync_id = 9;
  pull.chunk = 77;
  b.machine.pull(0, b.life(0), pull, b.out);
  EXPECT_THAT(b.refusal(), HasSubstr("chunk 77"));
}

TEST(ProducerEarly, ASignalOfAnEarlierSyncIsIgnored) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.machine.fail(1, Status(StatusCode::kInternal, "x"), b.out);
  ASSERT_EQ(b.begin(2), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.take();
  b.machine.signal(0, b.life(0), 1, 0, {0}, b.out);
  b.machine.pull(0, b.life(0), {1, 0, 0, 0, 0, 0}, b.out);
  EXPECT_THAT(b.take(), IsEmpty());
  EXPECT_EQ(b.machine.drops().stale_sync, 2u);
}

// Goal: what is dropped on purpose is counted, each kind by itself.
TEST(ProducerEarly, WhatIsDroppedIsCounted) {
  ProducerBench b({.groups = 2, .consumers = 2, .replicas = 2});
  b.reserve_all();
  const auto signal = [&](std::uint32_t consumer, std::uint64_t sync_id, std::vector<std::uint32_t> groups,
                          std::uint64_t life = 0) {
    b.machine.signal(0, life != 0 ? life : ProducerBench::life(consumer), sync_id, consumer, groups, b.out);
  };
  const auto pull = [&](std::uint64_t sync_id, std::uint32_t seq) {
    PullId id = b.pull_id(0, seq);
    id.sync_id = sync_id;
    b.machine.pull(0, ProducerBench::life(0), id, b.out);
  };
  const DropCounters& drops = b.machine.drops();
  signal(0, 7, {0, 0, 9});
  EXPECT_EQ(drops.kept_early, 1u);
  EXPECT_EQ(drops.duplicate_signals, 1u);
  EXPECT_EQ(drops.unknown, 1u) << "there is no group 9";
  signal(0, 6, {0});
  pull(6, 0);
  EXPECT_EQ(drops.stale_sync, 2u) << "one for sync 7 is kept";
  pull(7, 0);
  EXPECT_EQ(drops.kept_early, 2u);
  pull(8, 0);
  EXPECT_EQ(drops.stale_sync, 4u) << "a signal and a pull of sync 7 make room";
  signal(5, 7, {0});
  EXPECT_EQ(drops.not_live, 1u) << "there is no worker 5";
  signal(0, 8, {0}, 999);
  EXPECT_EQ(drops.stale_incarnation, 1u);
  b.machine.consumer_up(0, 0, 777, b.out);
  EXPECT_EQ(drops.stale_incarnation, 2u) << "what its last life had sent early goes with it";
  b.machine.consumer_lost(0, 0, Status(StatusCode::kUnavailable, "killed"), b.out);
  b.machine.reserve(0, 0, 777, 64, 2, 2, 1, pulls_digest(b.pulls[0], 2), b.pulls[0], b.out);
  EXPECT_EQ(drops.stale_incarnation, 3u) << "a life that was declared lost";
}

// ---- begin_sync ---------------------------------------------------------------------------------

TEST(ProducerBegin, RefusesABadLiveSetAndChangesNothing) {
  ProducerBench b({.groups = 2, .producers = 2, .consumers = 3, .pipeline_stages = true});
  EXPECT_THAT(b.machine.begin_sync(0, 1, 1, {}, {}, {}, b.out).message(), HasSubstr("live set is empty"));
  EXPECT_THAT(b.machine.begin_sync(0, 1, 1, {0, 3}, {}, {}, b.out).message(), HasSubstr("live consumer 3"));
  EXPECT_THAT(b.machine.begin_sync(0, 1, 1, {1, 1}, {}, {}, b.out).message(), HasSubstr("not ascending"));
  EXPECT_THAT(b.machine.begin_sync(0, 1, 1, {0}, {1}, {}, b.out).message(),
              HasSubstr("does not own group 1"));
  EXPECT_FALSE(b.machine.syncing());
  EXPECT_EQ(b.machine.begin_sync(0, 1, 1, {0, 2}, {0}, {}, b.out), Status());
  EXPECT_THAT(b.machine.live(), ElementsAre(0u, 2u));
  EXPECT_THAT(b.machine.begin_sync(0, 1, 1, {0}, {0}, {}, b.out).message(), HasSubstr("not after sync 1"));
}

TEST(ProducerBegin, EndsWhatIsLeftOfEarlierSyncs) {
  ProducerBench b({.groups = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 0);
  b.take();
  ASSERT_EQ(b.begin(2), Status());
  ASSERT_EQ(b.count<SyncFailed>(), 1u);
  EXPECT_EQ(b.all<SyncFailed>()[0].sync_id, 1u);
  EXPECT_EQ(b.all<SyncFailed>()[0].status.info().reason, Reason::kSuperseded);
  EXPECT_THAT(b.refusal(), HasSubstr("superseded"));
  EXPECT_EQ(b.all<FailReply>()[0].pull.sync_id, 1u);
  EXPECT_TRUE(b.machine.syncing());
}

TEST(ProducerBegin, APullIsNeverServedWithTheTensorsOfAFailedSync) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.machine.fail(1, Status(StatusCode::kInternal, "x"), b.out);
  ASSERT_EQ(b.begin(2), Status());
  b.take();
  b.pull(0, 0);
  EXPECT_THAT(b.take(), IsEmpty()) << "group 0 is not published in sync 2";
}

// ---- publish_group ------------------------------------------------------------------------------

TEST(ProducerPublish, RefusesWhatIsNotExactlyTheGroup) {
  ProducerBench b({.groups = 2, .names_per_group = 2, .producers = 2, .pipeline_stages = true});
  b.reserve_all();
  EXPECT_THAT(b.publish(0).message(), HasSubstr("outside a sync"));
  ASSERT_EQ(b.begin(1), Status());
  EXPECT_THAT(b.publish(1).message(), HasSubstr("not owned"));
  EXPECT_THAT(b.publish(9).message(), HasSubstr("not owned"));

  const auto publish = [&](auto change) {
    auto views = b.views(0);
    change(views);
    return b.machine.publish_group(0, 0, views, b.out).message();
  };
  EXPECT_THAT(publish([](auto& v) { v.pop_back(); }), HasSubstr("'layers.0.w1' is held here but missing"));
  EXPECT_THAT(publish([](auto& v) { v.push_back(v[0]); }),
              HasSubstr("'layers.0.w0' is not held here in this group, or given twice"));
  EXPECT_THAT(publish([](auto& v) { v[1].name = 2; }), HasSubstr("'layers.0.w1' is held here but missing"));
  EXPECT_THAT(publish([](auto& v) { v[1].name = 99; }), HasSubstr("missing"));
  EXPECT_THAT(publish([](auto& v) { v[1].dtype = DType::kBF16; }),
              HasSubstr("'layers.0.w1' has dtype BF16, its metadata says F32"));
  EXPECT_THAT(publish([](auto& v) { v[0].shape = {2, 8}; }),
              HasSubstr("'layers.0.w0' has shape [2, 8], its metadata says [4, 4]"));
  EXPECT_THAT(publish([](auto& v) { v[0].location.where.bytes = 63; }),
              HasSubstr("does not fit the 63 bytes"));
  EXPECT_THAT(publish([](auto& v) { v[0].location.stride = {5, 1}; }), HasSubstr("does not fit"));
  EXPECT_THAT(publish([](auto& v) { v[0].location.stride = {-4, 1}; }), HasSubstr("does not fit"));
  EXPECT_THAT(publish([](auto& v) { v[0].location.stride = {INT64_MAX, INT64_MAX}; }),
              HasSubstr("does not fit"));
  EXPECT_THAT(publish([](auto& v) { v[0].location.stride = {4}; }), HasSubstr("2 dims and 1 strides"));
  EXPECT_EQ(publish([](auto& v) {
              v[0].location.stride = {1, 4};  // transposed, still within its 64 bytes
              std::swap(v[0], v[1]);          // in any order
            }),
            "");
  EXPECT_THAT(b.publish(0).message(), HasSubstr("published twice"));
}

TEST(ProducerPublish, AGroupWhoseBarrierIsSatisfiedIsReleasedImmediately) {
  ProducerBench b({.groups = 1, .consumers = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.signal(0, {0});
  b.signal(1, {0});
  EXPECT_THAT(freed(b), IsEmpty());
  ASSERT_EQ(b.publish(0), Status());
  EXPECT_THAT(freed(b), ElementsAre(0u));
  EXPECT_THAT(b.publish(0).message(), HasSubstr("twice"));
}

// ---- the free barrier ---------------------------------------------------------------------------

TEST(ProducerBarrier, SignalsAreASetAgainstTheLiveSet) {
  ProducerBench b({.groups = 1, .consumers = 3});
  b.reserve_all();
  ASSERT_EQ(b.begin(1, {0, 2}), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.signal(0, {0});
  b.signal(0, {0});
  b.signal(0, {0});
  EXPECT_THAT(freed(b), IsEmpty()) << "a repeat has no effect";
  EXPECT_EQ(b.machine.drops().duplicate_signals, 2u);
  EXPECT_EQ(b.count<SignalAck>(), 3u) << "a repeat is acknowledged again";
  b.signal(1, {0});
  EXPECT_THAT(freed(b), IsEmpty()) << "worker 1 is not live";
  EXPECT_EQ(b.machine.drops().not_live, 1u);
  b.signal(2, {0});
  EXPECT_THAT(freed(b), ElementsAre(0u));
  b.signal(2, {0});
  EXPECT_THAT(freed(b), ElementsAre(0u)) << "released once";
}

TEST(ProducerBarrier, UnknownGroupsAndHostileIdsAreCounted) {
  ProducerBench b({.groups = 2, .producers = 2, .pipeline_stages = true});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.signal(0, {1, 2, 0xFFFFFFFFu});
  EXPECT_EQ(b.machine.drops().unknown, 3u);
  EXPECT_EQ(b.count<SignalAck>(), 0u);
  b.machine.signal(0, 1, 1, 0xFFFFFFFFu, {0}, b.out);
  b.machine.pull(0, 1, {1, 0xFFFFFFFFu, 0, 0, 0, 0}, b.out);
  EXPECT_THAT(b.refusal(), HasSubstr("not within 0..0"));
}

TEST(ProducerBarrier, GroupsFreeOutOfOrder) {
  ProducerBench b({.groups = 3});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  for (std::uint32_t g = 0; g < 3; ++g) ASSERT_EQ(b.publish(g), Status());
  b.signal(0, {2});
  b.signal(0, {0});
  EXPECT_THAT(freed(b), ElementsAre(2u, 0u));
  EXPECT_THAT(b.machine.unfreed(), ElementsAre(1u));
}

// ---- pulls --------------------------------------------------------------------------------------

TEST(ProducerPull, WaitsUntilItsGroupIsPublished) {
  ProducerBench b({.groups = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 1);
  EXPECT_EQ(b.count<Pack>(), 0u);
  ASSERT_EQ(b.publish(0), Status());
  EXPECT_EQ(b.count<Pack>(), 0u);
  ASSERT_EQ(b.publish(1), Status());
  ASSERT_EQ(b.count<Pack>(), 1u);
  EXPECT_EQ(b.count<ReadyReply>(), 0u) << "a pack has ended before anybody is answered";
  b.finish_packs();
  ASSERT_EQ(b.count<ReadyReply>(), 1u);
  EXPECT_EQ(b.all<ReadyReply>()[0].ready.slot, 1u);
  EXPECT_EQ(b.all<ReadyReply>()[0].incarnation, b.life(0));
}

TEST(ProducerPull, SlotIsSeqModKNeverByArrival) {
  ProducerBench b({.groups = 4, .ring_depth = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  for (std::uint32_t g = 0; g < 4; ++g) ASSERT_EQ(b.publish(g), Status());
  b.pull(0, 1);  // arrives first
  b.pull(0, 0);
  b.finish_packs();
  b.pull(0, 3);
  b.pull(0, 2);
  std::map<std::uint32_t, std::uint32_t> slot_of_seq;
  for (const Pack& pack : b.all<Pack>()) slot_of_seq[pack.pull->seq] = pack.slot;
  EXPECT_THAT(slot_of_seq,
              ElementsAre(std::pair(0u, 0u), std::pair(1u, 1u), std::pair(2u, 0u), std::pair(3u, 1u)));
}

TEST(ProducerPull, MappedIsAnsweredWithTheTensorsPlaces) {
  ProducerBench b({.groups = 1, .names_per_group = 2, .path = Path::kMapped, .max_chunk_bytes = 1024});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 0);
  EXPECT_THAT(b.take(), IsEmpty());
  ASSERT_EQ(b.publish(0), Status());
  ASSERT_EQ(b.count<ReadyReply>(), 1u);
  const ReadyInfo ready = b.all<ReadyReply>()[0].ready;
  EXPECT_EQ(ready.path, Path::kMapped);
  ASSERT_EQ(ready.entries.size(), 2u);
  EXPECT_EQ(ready.entries[0].where.region, 1u);
  EXPECT_EQ(ready.entries[1].where.region, 2u);
}

TEST(ProducerPull, RefusedAtOnceNamingWhatIsWrong) {
  ProducerBench b({.groups = 4, .consumers = 2, .ring_depth = 2});
  b.reserve(0);
  b.take();
  ASSERT_EQ(b.begin(1, {0}), Status());
  const auto refused = [&](std::uint64_t life, PullId pull) {
    b.take();
    b.machine.pull(0, life, pull, b.out);
    EXPECT_EQ(b.out.size(), 1u);
    return b.refusal();
  };
  PullId pull = b.pull_id(1, 0);
  EXPECT_THAT(refused(b.life(1), pull), HasSubstr("worker 1 has not reserved"));
  pull = b.pull_id(0, 0);
  pull.chunk = 40;
  EXPECT_THAT(refused(b.life(0), pull), HasSubstr("has not announced chunk 40"));
  pull = b.pull_id(0, 0);
  pull.run = 3;
  EXPECT_THAT(refused(b.life(0), pull), HasSubstr("chunk 0 run 3"));
  pull = b.pull_id(0, 0);
  pull.seq = 1;
  EXPECT_THAT(refused(b.life(0), pull), HasSubstr("its seq is 0"));
  EXPECT_THAT(refused(b.life(0), b.pull_id(0, 2)), HasSubstr("too early, seq 0 has not been served"));
  EXPECT_THAT(refused(999, b.pull_id(0, 0)), HasSubstr("another life of worker 0"));
  EXPECT_EQ(b.machine.drops().stale_incarnation, 1u);

  ASSERT_EQ(b.publish(0), Status());
  b.signal(0, {1});
  EXPECT_THAT(refused(b.life(0), b.pull_id(0, 1)), HasSubstr("group 1 was already signalled by it"));
  b.signal(0, {0});
  EXPECT_THAT(refused(b.life(0), b.pull_id(0, 0)), HasSubstr("group 0 has been freed"));
}

TEST(ProducerPull, RefusedFromAConsumerThatIsNotLive) {
  ProducerBench b({.consumers = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1, {1}), Status());
  b.pull(0, 0);
  EXPECT_THAT(b.refusal(), HasSubstr("worker 0 is not live in sync 1"));
  EXPECT_EQ(b.machine.drops().not_live, 1u);
}

TEST(ProducerPull, OfAMateOfOneThatWasLostNamesThatOne) {
  ProducerBench b({.consumers = 4, .replicas = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.machine.consumer_lost(0, 1, Status(StatusCode::kUnavailable, "killed"), b.out);
  b.pull(0, 0);
  EXPECT_THAT(b.refusal(), HasSubstr("worker 0 is not live in sync 1: worker 1 was lost in sync 1: killed"));
  ASSERT_EQ(b.begin(2, {2, 3}), Status());
  b.out.clear();
  b.pull(0, 0);
  EXPECT_THAT(b.refusal(), EndsWith("worker 0 is not live in sync 2"));
}

TEST(ProducerPull, OfASyncThatFailedDoesNotSayThatTheProcessEnds) {
  ProducerBench b({.consumers = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 0);
  b.machine.fail(1, Status(StatusCode::kCancelled, "enough", {.reason = Reason::kShutdown}), b.out);
  b.pull(1, 0);
  const auto replies = b.all<FailReply>();
  ASSERT_EQ(replies.size(), 2u) << "one was parked, one came later";
  for (const FailReply& reply : replies) {
    EXPECT_EQ(reply.status.message(), "enough");
    EXPECT_NE(reply.status.info().reason, Reason::kShutdown);
  }
}

TEST(ProducerPull, OfAGroupThatIsNotPartOfTheSyncIsRefused) {
  ProducerBench b({.groups = 2});
  b.reserve_all();
  b.sync_id = 1;
  ASSERT_EQ(b.machine.begin_sync(0, 1, 1, {0}, {0}, {}, b.out), Status());
  b.pull(0, 1);
  EXPECT_THAT(b.refusal(), HasSubstr("group 1 is not part of sync 1"));
}

TEST(ProducerPull, ParkedPullsOfAFreedGroupAreRefusedNotWaitedFor) {
  // A worker that signals a group it still pulls from; its own fault, and nobody hangs on it.
  ProducerBench b({.groups = 1});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 0);
  b.signal(0, {0});
  ASSERT_EQ(b.publish(0), Status());
  EXPECT_THAT(freed(b), IsEmpty()) << "the pack reads it";
  b.finish_packs();
  EXPECT_THAT(freed(b), ElementsAre(0u));
}

TEST(ProducerPull, AMappedPullEndsWithItsOwnersSignal) {
  ProducerBench b({.groups = 1, .consumers = 2, .path = Path::kMapped});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 0);
  b.signal(0, {0});
  EXPECT_THAT(b.refusal(), HasSubstr("worker 0 signalled group 0 meanwhile"));
  ASSERT_EQ(b.publish(0), Status());
  EXPECT_EQ(b.count<ReadyReply>(), 0u);
}

TEST(ProducerPull, TheSameSeqAgainIsAnsweredWhileItsSlotHoldsIt) {
  ProducerBench b({.groups = 3, .ring_depth = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  for (std::uint32_t g = 0; g < 3; ++g) ASSERT_EQ(b.publish(g), Status());
  b.serve(0, 0);
  b.take();
  PullId again = b.pull_id(0, 0);
  again.attempt = 1;
  b.machine.pull(0, b.life(0), again, b.out);
  EXPECT_EQ(b.count<Pack>(), 0u) << "nothing is packed twice";
  ASSERT_EQ(b.count<ReadyReply>(), 1u);
  EXPECT_EQ(b.all<ReadyReply>()[0].pull, again);

  b.pull(0, 2);  // the slot's next content
  b.take();
  b.pull(0, 0);
  EXPECT_THAT(b.refusal(), HasSubstr("its slot holds a later one"));
}

TEST(ProducerPull, TheSameSeqWhileItIsParkedGetsOneAnswer) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 0);
  b.pull(0, 0);
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  ASSERT_EQ(b.count<Pack>(), 1u);
  b.finish_packs();
  EXPECT_EQ(b.count<ReadyReply>(), 1u);
}

TEST(ProducerPull, ASyncStartsWithFreshSeqs) {
  ProducerBench b({.groups = 3, .ring_depth = 1});
  b.reserve_all();
  for (std::uint64_t sync = 1; sync <= 3; ++sync) {
    ASSERT_EQ(b.begin(sync), Status());
    for (std::uint32_t g = 0; g < 3; ++g) {
      ASSERT_EQ(b.publish(g), Status());
      b.serve(0, g);
      ASSERT_EQ(b.count<FailReply>(), 0u);
      b.take();
      b.signal(0, {g});
    }
    ASSERT_EQ(b.machine.end_sync(0, b.out), Status());
    EXPECT_EQ(b.count<SyncEnded>(), 1u);
    b.take();
  }
}

// ---- slot sharing -------------------------------------------------------------------------------

constexpr TinyOptions kThreeReplicas{.groups = 3, .consumers = 6, .replicas = 3};

TEST(ProducerSharing, SharersMeetPerSeqAndTheLastToArrivePacksOnce) {
  ProducerBench b(kThreeReplicas);
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(4, 0);
  b.pull(0, 0);
  b.pull(1, 0);  // of the other sharing group
  EXPECT_EQ(b.count<Pack>(), 0u);
  b.pull(2, 0);
  ASSERT_EQ(b.count<Pack>(), 1u);
  EXPECT_EQ(b.all<Pack>()[0].sharing_group, 0u);
  b.finish_packs();
  std::set<std::uint32_t> consumers;
  for (const ReadyReply& reply : b.all<ReadyReply>()) {
    consumers.insert(reply.pull.consumer);
    EXPECT_EQ(reply.ready.slot, 0u);
    EXPECT_EQ(reply.ready.sharing_group, 0u);
  }
  EXPECT_THAT(consumers, ElementsAre(0u, 2u, 4u));
  EXPECT_EQ(b.machine.packs(), 1u);
}

TEST(ProducerSharing, OneRingPerSharingGroup) {
  ProducerBench b(kThreeReplicas);
  for (std::uint32_t c = 0; c < 6; ++c) b.reserve(c);
  const auto rings = b.all<AllocateRing>();
  ASSERT_EQ(rings.size(), 2u);
  EXPECT_EQ(rings[0].sharing_group, 0u);
  EXPECT_EQ(rings[1].sharing_group, 1u);
  EXPECT_EQ(rings[0].slots, 2u);
  EXPECT_EQ(rings[0].slot_bytes, 64u);
}

TEST(ProducerSharing, TheLiveSharersMeetWhateverTheirNumber) {
  ProducerBench b(kThreeReplicas);
  b.reserve_all();
  ASSERT_EQ(b.begin(1, {2, 3}), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(2, 0);
  EXPECT_EQ(b.count<Pack>(), 1u) << "one replica left: nobody else is waited for";
}

TEST(ProducerSharing, AFailedPackFailsEverySharerAndTheSync) {
  ProducerBench b(kThreeReplicas);
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  for (const std::uint32_t c : {0u, 2u, 4u}) b.pull(c, 0);
  b.pull(1, 0);
  b.finish_packs(Status(StatusCode::kDataLoss, "checksum"));
  std::set<std::uint32_t> consumers;
  for (const FailReply& reply : b.all<FailReply>()) {
    consumers.insert(reply.pull.consumer);
    EXPECT_THAT(reply.status.message(), HasSubstr("checksum"));
  }
  EXPECT_THAT(consumers, ElementsAre(0u, 1u, 2u, 4u));
  EXPECT_EQ(b.count<SyncFailed>(), 1u);
  EXPECT_EQ(b.count<ReadyReply>(), 0u);
}

TEST(ProducerSharing, ALossNarrowsBarrierAndMeetingTogetherAndStartsThePack) {
  ProducerBench b(kThreeReplicas);
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.pull(2, 0);
  b.pull(5, 0);
  b.take();
  b.machine.consumer_lost(0, 4, Status(StatusCode::kUnavailable, "killed"), b.out);
  ASSERT_EQ(b.count<Pack>(), 1u) << "it waited only for worker 4";
  EXPECT_THAT(b.refusal(), HasSubstr("worker 4 was lost")) << "worker 5 of the same replica leaves with it";
  EXPECT_EQ(b.all<FailReply>()[0].pull.consumer, 5u);
  b.finish_packs();
  EXPECT_EQ(b.count<ReadyReply>(), 2u);
  for (std::uint32_t c = 0; c < 4; ++c) b.signal(c, {0});
  EXPECT_THAT(freed(b), ElementsAre(0u));
  EXPECT_FALSE(b.machine.failure().ok() && !b.machine.syncing());
}

// Its hot connection has broken, and both processes live.
void leave(ProducerBench& b, std::uint32_t consumer, std::uint64_t sync_id) {
  b.machine.leave_lanes(0, ProducerBench::life(consumer), sync_id, consumer, b.out);
}

TEST(ProducerLanes, ASharerThatHasLeftIsNotWaitedForAndStaysInTheBarrier) {
  ProducerBench b({.groups = 3, .consumers = 2, .replicas = 2, .ring_depth = 1});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  for (std::uint32_t g = 0; g < 3; ++g) ASSERT_EQ(b.publish(g), Status());
  b.pull(0, 0);
  EXPECT_EQ(b.count<Pack>(), 0u) << "both share the slot";
  leave(b, 1, 1);
  leave(b, 1, 1);
  EXPECT_EQ(b.count<Pack>(), 1u);
  b.finish_packs();
  b.serve(0, 1);
  EXPECT_EQ(b.count<ReadyReply>(), 2u);
  b.signal(0, {0, 1});
  EXPECT_EQ(b.count<GroupFreed>(), 0u);
  b.signal(1, {0});  // it has the group from another rank
  EXPECT_THAT(freed(b), ElementsAre(0u));

  ASSERT_EQ(b.begin(2), Status());  // it has a connection again
  ASSERT_EQ(b.publish(0), Status());
  b.take();
  b.pull(0, 0);
  EXPECT_EQ(b.count<Pack>(), 0u);
  b.pull(1, 0);
  EXPECT_EQ(b.count<Pack>(), 1u);
}

TEST(ProducerLanes, WhatItHadAskedForIsDroppedAndWhatItAsksForIsRefused) {
  ProducerBench b({.groups = 2, .consumers = 3, .replicas = 3});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(1, 0);  // before the connection broke
  b.pull(0, 0);
  leave(b, 1, 1);
  EXPECT_THAT(b.refusal(), HasSubstr("worker 1 has left its lanes in sync 1"));
  EXPECT_EQ(b.all<FailReply>()[0].status.code(), StatusCode::kUnavailable);
  EXPECT_EQ(b.count<Pack>(), 0u) << "worker 2 has not come";
  b.pull(2, 0);
  b.finish_packs();
  EXPECT_EQ(b.count<ReadyReply>(), 2u);
  b.take();
  b.pull(1, 1);  // was under way
  EXPECT_EQ(b.refusal(), "trainer 0: worker 1 has left its lanes in sync 1");
  EXPECT_EQ(b.machine.live().size(), 3u);
}

TEST(ProducerLanes, APackUnderWayIsForThoseThatAreLeft) {
  ProducerBench b({.groups = 2, .consumers = 2, .replicas = 2, .ring_depth = 1});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.pull(1, 0);
  ASSERT_EQ(b.count<Pack>(), 1u);
  leave(b, 1, 1);
  b.finish_packs();
  ASSERT_EQ(b.count<ReadyReply>(), 1u);
  EXPECT_EQ(b.all<ReadyReply>()[0].pull.consumer, 0u);
  ASSERT_EQ(b.publish(1), Status());
  b.pull(0, 1);
  EXPECT_EQ(b.count<Pack>(), 2u) << "nobody reads the slot but worker 0, which asks for its next use";
  b.finish_packs();
  for (std::uint32_t c = 0; c < 2; ++c) b.signal(c, {0, 1});
  ASSERT_EQ(b.machine.end_sync(0, b.out), Status());
  EXPECT_EQ(b.count<SyncEnded>(), 1u);
}

// The hot endpoint of a worker that signals by control may not be known to be broken here: what is sent over
// it is lost.
TEST(ProducerLanes, AConfirmationGoesBackTheWayItsSignalCame) {
  ProducerBench b({.groups = 2});
  b.reserve_all();
  b.machine.signal(0, b.life(0), 1, 0, {0}, b.out, true);
  b.machine.signal(0, b.life(0), 1, 0, {0}, b.out);  // was under way
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.count<SignalAck>(), 1u);
  EXPECT_TRUE(b.all<SignalAck>()[0].by_control);
  b.take();
  b.signal(0, {1});
  b.machine.signal(0, b.life(0), 1, 0, {1}, b.out, true);
  ASSERT_EQ(b.count<SignalAck>(), 2u);
  EXPECT_FALSE(b.all<SignalAck>()[0].by_control);
  EXPECT_TRUE(b.all<SignalAck>()[1].by_control);
}

TEST(ProducerLanes, ALossOfOneThatHasLeftCountsItOnce) {
  ProducerBench b({.groups = 1, .consumers = 3, .replicas = 3});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  leave(b, 1, 1);
  b.machine.consumer_lost(0, 1, Status(StatusCode::kUnavailable, "killed"), b.out);
  b.pull(0, 0);
  EXPECT_EQ(b.count<Pack>(), 0u) << "worker 2 shares the slot";
  b.pull(2, 0);
  EXPECT_EQ(b.count<Pack>(), 1u);
}

TEST(ProducerLanes, LeavingASyncNotBegunIsKeptAndOneOfAnEarlierSyncHasNoEffect) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2});
  b.reserve_all();
  leave(b, 1, 1);
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  EXPECT_EQ(b.count<Pack>(), 1u);
  b.finish_packs();
  ASSERT_EQ(b.begin(2), Status());
  leave(b, 1, 1);
  b.machine.leave_lanes(0, 7, 2, 1, b.out);  // another life
  EXPECT_EQ(b.machine.drops().stale_incarnation, 1u);
  ASSERT_EQ(b.publish(0), Status());
  b.take();
  b.pull(0, 0);
  EXPECT_EQ(b.count<Pack>(), 0u);
}

TEST(ProducerSharing, FirstReplicaLostOneLeftTheRestGoesOn) {
  ProducerBench b({.groups = 1, .consumers = 4, .replicas = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.pull(2, 0);
  ASSERT_EQ(b.count<Pack>(), 1u);
  b.machine.consumer_lost(0, 1, Status(StatusCode::kUnavailable, "killed"), b.out);
  b.finish_packs();
  ASSERT_EQ(b.count<ReadyReply>(), 1u);
  EXPECT_EQ(b.all<ReadyReply>()[0].pull.consumer, 2u);
  b.serve(3, 0);
  b.signal(2, {0});
  b.signal(3, {0});
  EXPECT_THAT(freed(b), ElementsAre(0u));
}

// ---- losses -------------------------------------------------------------------------------------

TEST(ProducerLoss, OfTheLastReplicaFailsTheSyncNamingIt) {
  ProducerBench b({.groups = 1, .consumers = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.machine.consumer_lost(0, 1, Status(StatusCode::kUnavailable, "killed"), b.out);
  ASSERT_EQ(b.count<SyncFailed>(), 1u);
  EXPECT_THAT(b.machine.failure().message(), HasSubstr("worker 1 was lost in sync 1: killed"));
  EXPECT_EQ(b.machine.failure().info().peer, "worker 1");
}

TEST(ProducerLoss, FailsTheSyncWhenTheSettingSaysSo) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2}, 0, true);
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.machine.consumer_lost(0, 1, Status(StatusCode::kUnavailable, "killed"), b.out);
  EXPECT_EQ(b.count<SyncFailed>(), 1u);
  b.take();
  ASSERT_EQ(b.begin(2, {0}), Status()) << "the next sync with the reduced live set succeeds";
  ASSERT_EQ(b.publish(0), Status());
  b.serve(0, 0);
  b.signal(0, {0});
  ASSERT_EQ(b.machine.end_sync(0, b.out), Status());
  EXPECT_EQ(b.count<SyncEnded>(), 1u);
}

TEST(ProducerLoss, AGroupIsNotFreedWhileAPackForTheLostReadsIt) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.pull(1, 0);
  b.signal(0, {0});
  b.machine.consumer_lost(0, 1, Status(StatusCode::kUnavailable, "killed"), b.out);
  EXPECT_THAT(freed(b), IsEmpty());
  b.finish_packs();
  EXPECT_THAT(freed(b), ElementsAre(0u));
}

TEST(ProducerLoss, ARestartInASyncIsALossAndJoinsTheNext) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(1, 0);
  b.machine.consumer_up(0, 1, 777, b.out);
  EXPECT_EQ(b.all<FailReply>()[0].incarnation, b.life(1)) << "the old life is answered, not the new one";
  EXPECT_THAT(b.machine.live(), ElementsAre(0u));
  b.take();
  b.signal(1, {0});
  EXPECT_EQ(b.machine.drops().stale_incarnation, 1u) << "the zombie is fenced";
  b.machine.reserve(0, 1, 777, 64, 2, 2, 1, pulls_digest(b.pulls[1], 2), b.pulls[1], b.out);
  ASSERT_EQ(b.count<ReserveReply>(), 1u);
  EXPECT_EQ(b.all<ReserveReply>()[0].status, Status());
  ASSERT_EQ(b.begin(2), Status());
  EXPECT_THAT(b.machine.live(), ElementsAre(0u, 1u));
}

TEST(ProducerLoss, AConsumerKnownToBeGoneIsLostAsTheSyncBegins) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2});
  b.reserve_all();
  b.machine.consumer_lost(0, 1, Status(StatusCode::kUnavailable, "killed"), b.out);
  ASSERT_EQ(b.begin(1), Status());
  EXPECT_THAT(b.machine.live(), ElementsAre(0u));
  b.machine.consumer_up(0, 1, b.life(1), b.out);  // a zombie does not revive
  ASSERT_EQ(b.begin(2), Status());
  EXPECT_THAT(b.machine.live(), ElementsAre(0u));
  b.machine.consumer_up(0, 1, 9, b.out);
  ASSERT_EQ(b.begin(3), Status());
  EXPECT_THAT(b.machine.live(), ElementsAre(0u, 1u));
}

// The sender means the life that was up when it opened the sync. A rank that comes to it late, still busy
// training, must not wait for the next life, which has never heard of the sync.
TEST(ProducerLoss, ALifeThatCameAfterTheSyncWasOpenedHasNoPartInIt) {
  ProducerBench b({.groups = 1, .consumers = 2, .replicas = 2});
  b.reserve_all();
  b.machine.sync_opened(1, {0, 1});
  b.machine.consumer_lost(0, 1, Status(StatusCode::kUnavailable, "killed"), b.out);
  b.machine.consumer_up(0, 1, 777, b.out);
  b.machine.reserve(0, 1, 777, 64, 2, 2, 1, pulls_digest(b.pulls[1], 2), b.pulls[1], b.out);
  b.take();
  ASSERT_EQ(b.begin(1), Status());
  EXPECT_THAT(b.machine.live(), ElementsAre(0u));
  ASSERT_EQ(b.publish(0), Status());
  b.serve(0, 0);
  b.signal(0, {0});
  EXPECT_THAT(freed(b), ElementsAre(0u));
  ASSERT_EQ(b.machine.end_sync(0, b.out), Status());
  EXPECT_EQ(b.count<SyncEnded>(), 1u);
  b.machine.sync_opened(2, {0, 1});
  ASSERT_EQ(b.begin(2), Status());
  EXPECT_THAT(b.machine.live(), ElementsAre(0u, 1u)) << "the next one means the new life";
}

// ---- reserve ------------------------------------------------------------------------------------

struct ReserveCall {
  std::uint32_t consumer = 0;
  std::uint64_t life = 0, bytes = 64;
  std::uint32_t ring_depth = 2, num_consumers = 4, workers_per_replica = 2;
};

class ProducerReserve : public testing::Test {
 protected:
  ProducerBench b{TinyOptions{.groups = 3, .consumers = 4, .replicas = 2}};

  void call(const ReserveCall& c, std::vector<PullDescription> pulls) {
    b.machine.reserve(0, c.consumer, c.life != 0 ? c.life : b.life(c.consumer), c.bytes, c.ring_depth,
                      c.num_consumers, c.workers_per_replica, pulls_digest(pulls, c.ring_depth), pulls,
                      b.out);
  }
  void call(const ReserveCall& c) { call(c, b.pulls[c.consumer]); }
  Status reply() {
    const auto replies = b.all<ReserveReply>();
    EXPECT_EQ(replies.size(), 1u);
    b.take();
    return replies.empty() ? Status(StatusCode::kUnknown, "none") : replies[0].status;
  }
};

TEST_F(ProducerReserve, SettingsThatDifferAreRefusedNamingBothValues) {
  call({.consumer = 0, .ring_depth = 3});
  EXPECT_THAT(reply().message(), HasSubstr("ring_depth of worker 0 is 3, of trainer 0 2"));
  call({.consumer = 0, .workers_per_replica = 4});
  EXPECT_THAT(reply().message(), HasSubstr("workers_per_replica of worker 0 is 4, of trainer 0 2"));
  call({.consumer = 0, .num_consumers = 8});
  const Status status = reply();
  EXPECT_THAT(status.message(), HasSubstr("num_consumers of worker 0 is 8, of trainer 0 4"));
  EXPECT_EQ(status.info().reason, Reason::kSettingMismatch);
  call({.consumer = 9}, b.pulls[0]);
  EXPECT_THAT(reply().message(), HasSubstr("not within 0..3"));
}

TEST_F(ProducerReserve, DescriptionsAreCheckedAndARefusalRecordsNothing) {
  auto pulls = b.pulls[0];
  pulls[1].keys[0].name = 99;
  call({.consumer = 0}, pulls);
  EXPECT_FALSE(reply().ok());
  pulls = b.pulls[0];
  pulls[2].lane.sharing_group = 1;
  call({.consumer = 0}, pulls);
  EXPECT_FALSE(reply().ok());
  call({.consumer = 0, .bytes = 63});
  EXPECT_THAT(reply().message(), HasSubstr("packs 64 bytes, more than the 63 bytes reserved"));
  b.machine.reserve(0, 0, 100, 64, 2, 4, 2, Digest128{1, 2}, b.pulls[0], b.out);
  EXPECT_THAT(reply().message(), HasSubstr("digest"));
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 0);
  EXPECT_THAT(b.refusal(), HasSubstr("has not reserved"));
}

TEST_F(ProducerReserve, ANameThisProducerNeverServesIsAnImmediateError) {
  ProducerBench stage({.groups = 2, .producers = 2, .pipeline_stages = true}, 0);
  auto pulls = pulls_at(*stage.plans[0], 1);  // those of the other stage
  for (auto& pull : pulls) pull.lane.producer = 0;
  stage.machine.reserve(0, 0, 100, 64, 2, 1, 1, pulls_digest(pulls, 2), pulls, stage.out);
  ASSERT_EQ(stage.count<ReserveReply>(), 1u);
  EXPECT_FALSE(stage.all<ReserveReply>()[0].status.ok());
}

TEST_F(ProducerReserve, ConcurrentFirstCallersAllocateOnce) {
  call({.consumer = 0});
  ASSERT_EQ(b.count<AllocateRing>(), 1u);
  EXPECT_EQ(b.count<ReserveReply>(), 0u);
  call({.consumer = 2});
  EXPECT_EQ(b.count<AllocateRing>(), 1u);
  b.machine.ring_allocated(0, 0, {}, b.out);
  ASSERT_EQ(b.count<ReserveReply>(), 2u);
  for (const auto& one : b.all<ReserveReply>()) EXPECT_EQ(one.status, Status());
}

TEST_F(ProducerReserve, AgainChangesNothingAndASmallerRequestKeepsTheRing) {
  call({.consumer = 0, .bytes = 128});
  b.machine.ring_allocated(0, 0, {}, b.out);
  b.take();
  call({.consumer = 0, .bytes = 128});
  EXPECT_EQ(reply(), Status());
  call({.consumer = 2, .bytes = 64});
  EXPECT_EQ(b.count<AllocateRing>(), 0u);
  EXPECT_EQ(reply(), Status());
}

TEST_F(ProducerReserve, WithoutMemoryNothingIsRecorded) {
  call({.consumer = 0});
  b.machine.ring_allocated(0, 0, Status(StatusCode::kResourceExhausted, "no memory"), b.out);
  EXPECT_THAT(reply().message(), HasSubstr("no memory"));
  call({.consumer = 0});
  EXPECT_EQ(b.count<AllocateRing>(), 1u) << "asked anew";
}

TEST_F(ProducerReserve, SharersMustAgreeOnTheirPlanAndAreBothNamed) {
  call({.consumer = 0});
  auto pulls = b.pulls[2];
  pulls.pop_back();
  call({.consumer = 2}, pulls);  // while the first still waits for memory
  EXPECT_THAT(reply().message(),
              testing::AllOf(HasSubstr("worker 2"), HasSubstr("worker 0"), HasSubstr("digests")));
  b.machine.ring_allocated(0, 0, {}, b.out);
  EXPECT_EQ(reply(), Status());
  call({.consumer = 2}, pulls);
  EXPECT_THAT(reply().message(), testing::AllOf(HasSubstr("worker 2"), HasSubstr("worker 0")));
  call({.consumer = 2});
  EXPECT_EQ(reply(), Status());
}

TEST_F(ProducerReserve, ARestartedFleetMayComeWithANewPlanOnceAllHaveIt) {
  b.reserve_all();
  auto pulls = b.pulls[0];
  pulls.pop_back();
  call({.consumer = 0, .life = 500}, pulls);
  EXPECT_FALSE(reply().ok()) << "worker 2 still has the old plan";
  b.machine.consumer_lost(0, 2, Status(StatusCode::kUnavailable, "restarting"), b.out);
  call({.consumer = 0, .life = 500}, pulls);
  EXPECT_EQ(reply(), Status());
  call({.consumer = 2, .life = 502});
  EXPECT_FALSE(reply().ok()) << "now the old plan is the odd one";
  call({.consumer = 2, .life = 502}, pulls);
  EXPECT_EQ(reply(), Status());
}

TEST_F(ProducerReserve, ARingInUseIsRegrownOnceNothingPacksOrReads) {
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  b.pull(2, 0);
  ASSERT_EQ(b.count<Pack>(), 1u);
  call({.consumer = 0, .bytes = 4096});
  EXPECT_EQ(b.count<AllocateRing>(), 0u) << "a pack writes the ring";
  b.finish_packs();
  EXPECT_EQ(b.count<ReadyReply>(), 2u) << "the sync goes on meanwhile";
  EXPECT_EQ(b.count<AllocateRing>(), 0u) << "two workers read the ring";
  b.signal(0, {0});
  EXPECT_EQ(b.count<AllocateRing>(), 0u);
  b.signal(2, {0});
  ASSERT_EQ(b.count<AllocateRing>(), 1u);
  EXPECT_EQ(b.all<AllocateRing>()[0].slot_bytes, 4096u);
  b.take();

  // Packs wait for the new ring.
  ASSERT_EQ(b.publish(1), Status());
  b.pull(0, 1);
  b.pull(2, 1);
  EXPECT_EQ(b.count<Pack>(), 0u);
  b.machine.ring_allocated(0, 0, {}, b.out);
  EXPECT_EQ(b.count<Pack>(), 1u);
  EXPECT_EQ(b.count<ReserveReply>(), 1u);
}

TEST_F(ProducerReserve, MappedPullsNeedNoRing) {
  ProducerBench mapped({.groups = 1, .path = Path::kMapped});
  mapped.reserve(0);
  EXPECT_EQ(mapped.count<AllocateRing>(), 0u);
  EXPECT_EQ(mapped.all<ReserveReply>()[0].status, Status());
}

// ---- the end of a sync --------------------------------------------------------------------------

TEST(ProducerEnd, ReturnsWhenEveryGroupIsFreed) {
  ProducerBench b({.groups = 2});
  b.reserve_all();
  EXPECT_THAT(b.machine.end_sync(0, b.out).message(), HasSubstr("without a sync"));
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  EXPECT_THAT(b.machine.end_sync(0, b.out).message(), HasSubstr("before group 1 was published"));
  ASSERT_EQ(b.publish(1), Status());
  b.serve(0, 0);
  b.signal(0, {0});
  ASSERT_EQ(b.machine.end_sync(0, b.out), Status());
  EXPECT_EQ(b.count<SyncEnded>(), 0u);
  b.serve(0, 1);
  b.signal(0, {1});
  EXPECT_EQ(b.count<SyncEnded>(), 1u);
  EXPECT_FALSE(b.machine.syncing());
  EXPECT_EQ(b.count<SyncFailed>(), 0u);
}

TEST(ProducerEnd, AStallInEndSyncIsAFailureNeverANormalReturn) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  ASSERT_EQ(b.machine.end_sync(0, b.out), Status());
  b.machine.tick(300 * kSecond, b.out);
  EXPECT_EQ(b.count<SyncFailed>(), 1u);
  b.signal(0, {0});
  EXPECT_EQ(b.count<SyncEnded>(), 0u);
  EXPECT_EQ(b.machine.end_sync(0, b.out).info().reason, Reason::kStalled) << "with the first error";
}

TEST(ProducerEnd, ARankWithoutGroupsEndsAtOnce) {
  ProducerBench b({.groups = 1, .producers = 2, .pipeline_stages = true}, 1);
  ASSERT_EQ(b.machine.begin_sync(0, 1, 1, {0}, {}, {}, b.out), Status());
  ASSERT_EQ(b.machine.end_sync(0, b.out), Status());
  EXPECT_EQ(b.count<SyncEnded>(), 1u);
}

// ---- failures -----------------------------------------------------------------------------------

TEST(ProducerFail, WakesEveryWaiterAndKeepsTheFirstError) {
  ProducerBench b({.groups = 2, .consumers = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.pull(0, 0);
  b.pull(1, 1);
  b.machine.fail(1, Status(StatusCode::kInternal, "the source broke"), b.out);
  b.machine.fail(1, Status(StatusCode::kUnknown, "a later one"), b.out);
  EXPECT_EQ(b.count<FailReply>(), 2u);
  EXPECT_EQ(b.count<SyncFailed>(), 1u);
  EXPECT_EQ(b.machine.failure().message(), "the source broke");
  b.take();
  b.pull(0, 1);
  EXPECT_EQ(b.refusal(), "the source broke") << "a later pull fails with it too";
  EXPECT_EQ(b.publish(0).message(), "the source broke");
}

TEST(ProducerFail, BeforeBeginIsKeptAndTakesEffectThen) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  b.machine.fail(3, Status(StatusCode::kInternal, "worker 9 refused"), b.out);
  ASSERT_EQ(b.begin(2), Status());
  EXPECT_EQ(b.count<SyncFailed>(), 0u) << "it is of sync 3";
  b.take();
  ASSERT_EQ(b.begin(3), Status());
  EXPECT_EQ(b.machine.failure().message(), "worker 9 refused");
  b.machine.fail(2, Status(StatusCode::kInternal, "old"), b.out);
  ASSERT_EQ(b.begin(4), Status());
  EXPECT_TRUE(b.machine.syncing());
}

TEST(ProducerFail, AfterAnEarlyFailureTheSkippedSyncLeavesNoTrace) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  b.machine.fail(3, Status(StatusCode::kInternal, "x"), b.out);
  ASSERT_EQ(b.begin(4), Status());
  EXPECT_TRUE(b.machine.syncing());
}

TEST(ProducerFail, MemoryIsQuietWhenTheLastPackHasEnded) {
  ProducerBench b({.groups = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.pull(0, 0);
  const auto packs = b.all<Pack>();
  ASSERT_EQ(packs.size(), 1u);
  b.machine.fail(1, Status(StatusCode::kInternal, "x"), b.out);
  EXPECT_EQ(b.count<SyncQuiet>(), 0u);

  // The next sync must not write the slot before that pack has ended.
  ASSERT_EQ(b.begin(2), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.take();
  b.pull(0, 0);
  EXPECT_EQ(b.count<Pack>(), 0u);
  b.machine.pack_done(0, packs[0].ticket, {}, {}, b.out);
  ASSERT_EQ(b.count<SyncQuiet>(), 1u);
  EXPECT_EQ(b.all<SyncQuiet>()[0].sync_id, 1u);
  ASSERT_EQ(b.count<Pack>(), 1u);
  EXPECT_EQ(b.count<ReadyReply>(), 0u) << "the old pack answers nobody";
  b.finish_packs();
  EXPECT_EQ(b.count<ReadyReply>(), 1u);
}

TEST(ProducerFail, MemoryIsQuietWhenTheLastMappedReadHasEnded) {
  const auto failed = [](auto end_reading) {
    ProducerBench b({.groups = 2, .consumers = 2, .replicas = 2, .path = Path::kMapped});
    b.reserve_all();
    EXPECT_EQ(b.begin(1), Status());
    EXPECT_EQ(b.publish(0), Status());
    b.pull(0, 0);
    b.pull(1, 0);
    EXPECT_EQ(b.count<ReadyReply>(), 2u);
    b.signal(1, {0});
    b.machine.fail(1, Status(StatusCode::kInternal, "x"), b.out);
    EXPECT_EQ(b.count<SyncQuiet>(), 0u) << "worker 0 may still copy";
    end_reading(b);
    return b.count<SyncQuiet>();
  };
  EXPECT_EQ(failed([](ProducerBench& b) { b.signal(0, {0}); }), 1u);
  EXPECT_EQ(failed([](ProducerBench& b) { b.signal(0, {1}); }), 0u);
  EXPECT_EQ(failed([](ProducerBench& b) { b.signal(1, {0}); }), 0u);
  EXPECT_EQ(failed([](ProducerBench& b) {
              b.machine.consumer_lost(0, 0, Status(StatusCode::kUnavailable, "y"), b.out);
            }),
            1u);
  EXPECT_EQ(failed([](ProducerBench& b) { b.machine.shutdown(b.out); }), 1u);
  const std::int64_t limit = ProducerConfig{}.drain_timeout_ns;
  EXPECT_EQ(failed([&](ProducerBench& b) {
              b.machine.tick(5 * kSecond, b.out);
              b.machine.tick(5 * kSecond + limit - 1, b.out);
            }),
            0u);
  EXPECT_EQ(failed([&](ProducerBench& b) {
              b.machine.tick(5 * kSecond, b.out);
              b.machine.tick(5 * kSecond + limit, b.out);
            }),
            1u)
      << "never without a limit";
  EXPECT_EQ(failed([](ProducerBench& b) {
              EXPECT_EQ(b.begin(2), Status());
              b.signal(0, {1});  // of sync 2: it has nothing of sync 1 in flight
            }),
            1u);
}

TEST(ProducerFail, WithoutPacksMemoryIsQuietAtOnce) {
  ProducerBench b;
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  b.machine.fail(1, Status(StatusCode::kInternal, "x"), b.out);
  EXPECT_EQ(b.count<SyncQuiet>(), 1u);
}

// ---- the watchdog -------------------------------------------------------------------------------

TEST(ProducerWatchdog, SaysWhatWasWaitedFor) {
  ProducerBench b({.groups = 4, .consumers = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.serve(0, 0);
  b.signal(0, {0});
  b.pull(1, 1);
  b.take();
  b.machine.tick(300 * kSecond - 1, b.out);
  EXPECT_THAT(b.take(), IsEmpty());
  b.machine.tick(300 * kSecond, b.out);
  ASSERT_EQ(b.count<SyncFailed>(), 1u);
  const Status why = b.all<SyncFailed>()[0].status;
  EXPECT_EQ(why.info().reason, Reason::kStalled);
  EXPECT_THAT(why.message(), HasSubstr("has not published groups 1-3"));
  EXPECT_THAT(why.message(), HasSubstr("group 0 is not signalled by worker 1"));
  EXPECT_THAT(why.message(), HasSubstr("1 pull(s) parked: chunk 1 of worker 1"));
  EXPECT_THAT(why.message(), HasSubstr("4 of 4 group(s) unfreed"));
  EXPECT_EQ(b.count<FailReply>(), 1u) << "any waiter wakes";
}

TEST(ProducerWatchdog, SlowButSteadyProgressNeverTripsIt) {
  ProducerBench b({.groups = 3, .consumers = 2});
  b.reserve_all();
  const auto wait = [&] {
    b.now += 299 * kSecond;
    b.machine.tick(b.now, b.out);
  };
  b.now = 1000 * kSecond;
  ASSERT_EQ(b.begin(1), Status());
  for (std::uint32_t g = 0; g < 3; ++g) {
    wait();
    ASSERT_EQ(b.publish(g), Status());
    for (const std::uint32_t c : {0u, 1u}) {
      b.pull(c, g);  // asking alone is no progress
      const auto packs = b.all<Pack>();
      b.take();
      if (!packs.empty()) wait();
      for (const auto& pack : packs) b.machine.pack_done(b.now, pack.ticket, {}, {}, b.out);
      wait();
      b.signal(c, {g});
    }
  }
  ASSERT_EQ(b.machine.end_sync(b.now, b.out), Status());
  EXPECT_EQ(b.count<SyncFailed>(), 0u);
  EXPECT_EQ(b.count<SyncEnded>(), 1u);
}

TEST(ProducerWatchdog, JunkDoesNotHoldItOff) {
  ProducerBench b({.groups = 2, .producers = 2, .consumers = 2, .pipeline_stages = true});
  b.reserve_all();
  ASSERT_EQ(b.begin(1, {0}), Status());
  ASSERT_EQ(b.publish(0), Status());
  b.serve(0, 0);
  for (b.now = 0; b.now < 300 * kSecond; b.now += 10 * kSecond) {
    b.pull(0, 0);                                          // a repeat
    b.pull(1, 0);                                          // from a worker that is not live
    b.signal(0, {1, 9});                                   // unknown groups
    b.machine.signal(b.now, 5, 1, 0, {0}, b.out);          // another life
    b.machine.signal(b.now, b.life(0), 0, 0, {0}, b.out);  // an old sync
    b.machine.signal(b.now, b.life(0), 2, 0, {0}, b.out);  // a sync not begun
    b.machine.tick(b.now, b.out);
  }
  b.machine.tick(300 * kSecond, b.out);
  EXPECT_EQ(b.count<SyncFailed>(), 1u);
}

TEST(ProducerWatchdog, IsArmedOnlyBetweenBeginAndEnd) {
  ProducerBench b({.groups = 1});
  b.reserve_all();
  b.sync_id = 1;
  b.signal(0, {0});  // kept: does not arm it
  b.machine.tick(1000 * kSecond, b.out);
  EXPECT_EQ(b.count<SyncFailed>(), 0u);
  b.now = 2000 * kSecond;
  ASSERT_EQ(b.begin(1), Status());
  b.machine.tick(b.now + kSecond, b.out);
  EXPECT_EQ(b.count<SyncFailed>(), 0u) << "not over the previous sync's stamp";
  ASSERT_EQ(b.publish(0), Status());
  ASSERT_EQ(b.machine.end_sync(b.now, b.out), Status());
  ASSERT_EQ(b.count<SyncEnded>(), 1u);
  b.machine.tick(9000 * kSecond, b.out);
  EXPECT_EQ(b.count<SyncFailed>(), 0u);
}

// ---- shutdown -----------------------------------------------------------------------------------

TEST(ProducerShutdown, WakesEveryWaiterInEveryState) {
  ProducerBench idle;
  idle.machine.shutdown(idle.out);
  EXPECT_THAT(idle.out, IsEmpty());

  ProducerBench b({.groups = 2});
  b.reserve(0, false);
  b.machine.shutdown(b.out);
  ASSERT_EQ(b.count<ReserveReply>(), 1u);
  EXPECT_EQ(b.all<ReserveReply>()[0].status.info().reason, Reason::kShutdown);

  ProducerBench syncing({.groups = 2});
  syncing.reserve_all();
  ASSERT_EQ(syncing.begin(1), Status());
  ASSERT_EQ(syncing.publish(0), Status());
  syncing.pull(0, 0);
  syncing.pull(0, 1);
  syncing.sync_id = 2;
  syncing.pull(0, 0);  // kept for sync 2
  const auto packs = syncing.all<Pack>();
  syncing.take();
  syncing.machine.shutdown(syncing.out);
  EXPECT_EQ(syncing.count<FailReply>(), 3u);
  EXPECT_EQ(syncing.count<SyncFailed>(), 1u);
  EXPECT_EQ(syncing.count<SyncQuiet>(), 0u);
  syncing.machine.pack_done(0, packs.at(0).ticket, {}, {}, syncing.out);
  EXPECT_EQ(syncing.count<SyncQuiet>(), 1u);
  syncing.take();

  syncing.machine.shutdown(syncing.out);  // idempotent
  EXPECT_THAT(syncing.out, IsEmpty());
  EXPECT_FALSE(syncing.begin(5).ok());
  syncing.pull(0, 0);
  EXPECT_EQ(syncing.all<FailReply>()[0].status.info().reason, Reason::kShutdown);
}

// ---- a storm ------------------------------------------------------------------------------------

// Whatever peers send in whatever order: every group is freed at most once a sync and never before all live
// consumers have signalled it, every pull is answered at most once per request, no slot is packed while a
// pack writes it, and a sync ends in exactly one of SyncEnded and SyncFailed.
RC_GTEST_PROP(ProducerStorm, KeepsItsInvariants, ()) {
  const auto seed = *rc::gen::arbitrary<std::uint64_t>();
  Random random(seed);
  TinyOptions options;
  options.groups = 1 + static_cast<std::uint32_t>(random.below(4));
  options.replicas = 1 + static_cast<std::uint32_t>(random.below(3));
  options.consumers = options.replicas * (1 + static_cast<std::uint32_t>(random.below(2)));
  options.ring_depth = 1 + static_cast<std::uint32_t>(random.below(3));
  options.path = random.chance(0.3) ? Path::kMapped : Path::kPacked;
  ProducerBench b(options);
  b.reserve_all();

  std::map<std::pair<std::uint64_t, std::uint32_t>, std::set<std::uint32_t>> signalled;  // (sync, group)
  std::set<std::pair<std::uint64_t, std::uint32_t>> freed_groups;
  std::map<std::uint64_t, int> ends;
  std::set<std::pair<std::uint32_t, std::uint32_t>> packing;
  std::map<std::uint64_t, Pack> open;
  std::size_t asked = 0, answers = 0;
  std::uint64_t begun = 0;
  const auto check = [&] {
    const auto live = b.machine.live();
    for (const ProducerAction& action : b.take()) {
      if (const auto* one = std::get_if<GroupFreed>(&action)) {
        RC_ASSERT(freed_groups.emplace(one->sync_id, one->group).second);
        for (const std::uint32_t c : live)
          RC_ASSERT(signalled[std::pair(one->sync_id, one->group)].contains(c));
      } else if (const auto* pack = std::get_if<Pack>(&action)) {
        RC_ASSERT(packing.emplace(pack->sharing_group, pack->slot).second);
        RC_ASSERT(pack->slot == pack->pull->seq % options.ring_depth);
        open.emplace(pack->ticket, *pack);
      } else if (std::holds_alternative<ReadyReply>(action) || std::holds_alternative<FailReply>(action)) {
        ++answers;
      } else if (const auto* ended = std::get_if<SyncEnded>(&action)) {
        RC_ASSERT(++ends[ended->sync_id] == 1);
      } else if (const auto* failed = std::get_if<SyncFailed>(&action)) {
        RC_ASSERT(++ends[failed->sync_id] == 1);
      }
    }
    RC_ASSERT(answers <= asked);
  };
  for (int step = 0; step < 400; ++step) {
    const auto consumer = static_cast<std::uint32_t>(random.below(options.consumers + 1));
    const auto group = static_cast<std::uint32_t>(random.below(options.groups + 1));
    const std::uint64_t sync = begun + random.below(3) - (begun > 0 ? random.below(2) : 0);
    switch (random.below(12)) {
      case 0:
        if (random.chance(0.2)) {
          std::vector<std::uint32_t> live;
          for (std::uint32_t c = 0; c < options.consumers; ++c) {
            if (random.chance(0.9)) live.push_back(c);
          }
          if (!live.empty() && b.begin(begun + 1, live).ok()) ++begun;
        }
        break;
      case 1:
      case 2:
        (void)b.machine.publish_group(b.now, group, b.views(group), b.out).ok();
        break;
      case 3:
      case 4:
      case 5: {
        const std::uint32_t from = std::min(consumer, options.consumers - 1);
        const auto seq = static_cast<std::uint32_t>(random.below(b.pulls[from].size()));
        PullId pull = b.pull_id(from, seq);
        pull.sync_id = sync;
        pull.consumer = consumer;
        if (random.chance(0.05)) pull.seq += 1;
        if (random.chance(0.05)) pull.chunk += 1;
        ++asked;
        b.machine.pull(b.now, b.life(consumer), pull, b.out);
        break;
      }
      case 6:
      case 7:
      case 8:
        signalled[std::pair(sync, group)].insert(consumer);
        b.machine.signal(b.now, b.life(consumer), sync, consumer, {group}, b.out);
        break;
      case 9:
        if (!open.empty()) {
          const Pack pack = open.begin()->second;
          open.erase(open.begin());
          packing.erase({pack.sharing_group, pack.slot});
          b.machine.pack_done(b.now, pack.ticket,
                              random.chance(0.05) ? Status(StatusCode::kInternal, "pack") : Status(), {},
                              b.out);
        }
        break;
      case 10:
        (void)b.machine.end_sync(b.now, b.out).ok();
        break;
      default:
        b.now += static_cast<std::int64_t>(random.below(20)) * kSecond;
        b.machine.tick(b.now, b.out);
        if (random.chance(0.02)) b.machine.fail(sync, Status(StatusCode::kInternal, "told"), b.out);
        if (random.chance(0.02))
          b.machine.consumer_lost(b.now, consumer, Status(StatusCode::kUnavailable, "lost"), b.out);
        if (random.chance(0.02)) b.reserve(std::min(consumer, options.consumers - 1));
    }
    check();
  }
  b.machine.shutdown(b.out);
  check();
  for (std::uint64_t sync = 1; sync <= begun; ++sync) RC_ASSERT(ends[sync] == 1);
}

}  // namespace
}  // namespace shardpull::protocol_testing
