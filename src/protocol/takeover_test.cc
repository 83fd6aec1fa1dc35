// A dead producer's chunks, pulled from another owner: docs/PROTOCOL.md, "Takeover".
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "protocol/protocol_testing.h"

namespace shardpull {
namespace {

using namespace consumer_action;  // NOLINT: this file is about them
using protocol_testing::ConsumerBench;
using protocol_testing::kSecond;
using protocol_testing::ProducerBench;
using protocol_testing::TinyOptions;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAreArray;

const Status kGone(StatusCode::kUnavailable, "the process is gone", {.reason = Reason::kPeerLost});
const Status kReadFailed(StatusCode::kUnavailable, "the connection broke", {.reason = Reason::kPeerLost});

// Everybody holds everything; worker 0 takes each group from the producer that the plan says.
struct Consumer : ConsumerBench {
  explicit Consumer(const TinyOptions& options) : ConsumerBench(options) {}

  std::uint32_t primary(std::uint32_t chunk) const { return plan->chunks[chunk].runs[0].producer; }
  std::uint32_t candidate(std::uint32_t chunk, std::size_t place) const {
    return plan->chunks[chunk].candidates.at(place);
  }
  void lost(std::uint32_t producer) { machine.producer_lost(now, producer, kGone, out); }
  void reserved(std::uint32_t producer, const Status& status = {}) {
    machine.recovery_reserved(now, producer, status, out);
  }
  SendPull last_pull() const { return all<SendPull>().back(); }
};

TEST(Takeover, WhatWasAskedForIsPulledFromTheNextCandidateInItsRecoveryLane) {
  Consumer b({.groups = 3, .producers = 2, .consumers = 2, .replicas = 2, .ring_depth = 1});
  b.start(1, 10);
  const SendPull asked = b.last_pull();
  const std::uint32_t dead = b.primary(0), heir = b.candidate(0, 1);
  EXPECT_EQ(asked.producer, dead);
  b.take();
  b.lost(dead);
  ASSERT_EQ(b.count<AnnounceRecovery>(), 1u);
  EXPECT_EQ(b.all<AnnounceRecovery>()[0].producer, heir);
  EXPECT_EQ(b.count<SendPull>(), 0u) << "the lane is not there yet";
  b.answer(asked);  // on its way when the producer died
  EXPECT_EQ(b.transferring().size(), 0u);
  EXPECT_EQ(b.machine.drops().unknown, 1u);

  b.reserved(heir);
  ASSERT_EQ(b.count<SendPull>(), 1u);
  const SendPull again = b.last_pull();
  EXPECT_EQ(again.producer, heir);
  EXPECT_EQ(again.pull, (PullId{1, 0, 0, 0, 1, 0, LaneKind::kRecovery}));
  b.answer(again);
  EXPECT_EQ(b.all<StartTransfer>().back().producer, heir);
  b.take();
  b.land(0);
  b.scattered(0);
  b.run_to_end();
  EXPECT_TRUE(b.update_result().ok()) << b.update_result().message();
  for (const auto& [producer, group] : b.signalled()) EXPECT_EQ(producer, heir) << group;
  EXPECT_GE(b.machine.rerouted(), 1u);
}

TEST(Takeover, SeqsOfARecoveryLaneCountUpInOrderOfIssue) {
  // Two of three producers die, one after the other: the last one serves what both had, and its own.
  Consumer b({.groups = 9, .producers = 3, .ring_depth = 3, .pull_split = 1});
  b.start(1, 10);
  const std::uint32_t heir = b.candidate(0, 0);
  std::set<std::uint32_t> dead;
  for (const Chunk& chunk : b.plan->chunks) {
    if (chunk.runs[0].producer != heir) dead.insert(chunk.runs[0].producer);
  }
  for (const std::uint32_t producer : dead) b.lost(producer);
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok()) << b.update_result().message();
  std::map<std::pair<std::uint32_t, LaneKind>, std::vector<std::uint32_t>> seqs;
  for (const SendPull& pull : b.all<SendPull>()) seqs[{pull.producer, pull.pull.lane}].push_back(pull.pull.seq);
  for (auto& [lane, of_lane] : seqs) {
    for (std::uint32_t i = 0; i < of_lane.size(); ++i) EXPECT_EQ(of_lane[i], i);
  }
  EXPECT_FALSE((seqs[{heir, LaneKind::kRecovery}].empty()));

  // The next sync knows from the start, and announces nothing again.
  b.take();
  ASSERT_TRUE(b.machine.finish_update(0, 1, b.out).ok());
  b.start(2, 20);
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok());
  EXPECT_EQ(b.count<AnnounceRecovery>(), 0u);
  std::uint32_t next = 0;
  for (const SendPull& pull : b.all<SendPull>()) {
    EXPECT_EQ(pull.producer, heir);
    if (pull.pull.lane == LaneKind::kRecovery) {
      EXPECT_EQ(pull.pull.seq, next++);
    }
  }
  EXPECT_EQ(b.machine.rerouted(), next);
}

TEST(Takeover, ATransferUnderWayIsWaitedForAndCountsIfItEndsWell) {
  Consumer b({.groups = 1, .producers = 2});
  b.start(1, 10);
  b.ready(0);
  ASSERT_EQ(b.transferring().size(), 1u);
  b.lost(b.primary(0));
  EXPECT_EQ(b.count<AnnounceRecovery>(), 0u);
  b.land(0);
  b.scattered(0);
  b.run_to_end();
  EXPECT_TRUE(b.update_result().ok());
  EXPECT_EQ(b.machine.rerouted(), 0u);
}

TEST(Takeover, ATransferThatFailsWithItsProducerIsAskedForAgain) {
  for (const bool loss_first : {true, false}) {
    Consumer b({.groups = 1, .producers = 2});
    b.start(1, 10);
    b.ready(0);
    if (loss_first) b.lost(b.primary(0));
    b.land(0, 0, kReadFailed);
    EXPECT_EQ(b.count<ReportFailure>(), 0u);
    if (!loss_first) b.lost(b.primary(0));
    b.take();
    b.reserved(b.candidate(0, 1));
    ASSERT_EQ(b.count<SendPull>(), 1u) << loss_first;
    b.run_to_end();
    EXPECT_TRUE(b.update_result().ok());
  }
}

TEST(Takeover, ATransferThatFailsAndNobodyIsLostIsAnErrorAfterTheGrace) {
  Consumer b({.groups = 1, .producers = 2});
  b.start(1, 10);
  b.ready(0);
  b.land(0, 0, kReadFailed);
  b.machine.tick(5 * kSecond, b.out);
  EXPECT_EQ(b.count<UpdateDone>(), 0u);
  b.machine.tick(7 * kSecond, b.out);
  EXPECT_THAT(b.update_result().message(), HasSubstr("the connection broke"));
  EXPECT_THAT(b.update_result().message(), HasSubstr("chunk 0 (group 0)"));
}

TEST(Takeover, AFailureThatIsNotItsProducersIsAnErrorAtOnce) {
  Consumer b({.groups = 1, .producers = 2});
  b.start(1, 10);
  b.ready(0);
  b.land(0, 0, Status(StatusCode::kDataLoss, "short read"));
  EXPECT_THAT(b.update_result().message(), HasSubstr("short read"));
}

TEST(Takeover, ACopyInPlaceThatFailsIsAskedForAgainOfTheLivingToo) {
  Consumer b({.groups = 1, .names_per_group = 2, .producers = 3, .path = Path::kMapped, .max_chunk_bytes = 0,
              .pull_split = 2});
  ASSERT_EQ(b.plan->chunks[0].runs.size(), 2u);
  b.start(1, 10);
  b.ready(0, 0);
  b.ready(0, 1);
  ASSERT_EQ(b.count<StartCopy>(), 1u);
  const std::uint32_t dead = b.plan->chunks[0].runs[0].producer, alive = b.plan->chunks[0].runs[1].producer;
  EXPECT_THAT(b.all<StartCopy>()[0].producers, ElementsAre(dead, alive));
  b.scattered(0, kReadFailed);
  b.take();
  b.lost(dead);
  ASSERT_EQ(b.count<SendPull>(), 1u) << "the living one's run again, at its own place";
  EXPECT_EQ(b.last_pull().producer, alive);
  EXPECT_EQ(b.last_pull().pull, (PullId{1, 0, 0, 1, 1, b.plan->chunks[0].runs[1].seq, LaneKind::kRegular}));
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok()) << b.update_result().message();
  EXPECT_THAT(b.all<StartCopy>().back().producers, testing::Each(testing::Ne(dead)));
}

TEST(Takeover, AnHeirThatDiesOrRefusesIsSucceededByTheNextCandidate) {
  for (const bool dies : {true, false}) {
    Consumer b({.groups = 1, .producers = 3});
    b.start(1, 10);
    b.lost(b.candidate(0, 0));
    if (dies) {
      b.reserved(b.candidate(0, 1));
      b.lost(b.candidate(0, 1));
    } else {
      b.reserved(b.candidate(0, 1), Status(StatusCode::kResourceExhausted, "no memory"));
    }
    EXPECT_EQ(b.all<AnnounceRecovery>().back().producer, b.candidate(0, 2));
    b.take();
    b.reserved(b.candidate(0, 2));
    EXPECT_EQ(b.last_pull().producer, b.candidate(0, 2));
    EXPECT_EQ(b.last_pull().pull.attempt, 2u);
    b.run_to_end();
    EXPECT_TRUE(b.update_result().ok());
  }
}

TEST(Takeover, WithoutAnHeirTheUpdateFailsNamingTheDeadAndTheChunk) {
  Consumer b({.groups = 2, .producers = 2});
  b.start(1, 10);
  b.lost(b.candidate(0, 1));
  b.lost(b.candidate(0, 0));
  EXPECT_THAT(b.update_result().message(), HasSubstr("and nobody else has chunk"));
  EXPECT_EQ(b.update_result().info().reason, Reason::kPeerLost);
}

// The connection breaks and the process lives: its barrier still waits for this worker.
TEST(Takeover, SignalsToAProducerThatIsOnlyUnreachableAreSentAgain) {
  Consumer b({.groups = 2, .producers = 2, .ring_depth = 1});
  b.start(1, 10);
  b.ready(0);
  b.land(0);
  b.scattered(0);  // group 0 is signalled to both, unconfirmed
  b.posted(0);
  const std::uint32_t broken = b.primary(0);
  const SendPull second = b.last_pull();
  ASSERT_NE(second.producer, broken);
  b.take();
  b.machine.producer_unreachable(0, broken, kReadFailed, b.out);
  EXPECT_THAT(b.signalled(), ElementsAre(std::pair(broken, 0u)));
  b.answer(second);
  b.run_to_end();
  EXPECT_EQ(b.count<UpdateDone>(), 0u) << "the other one's confirmation is due";
  b.machine.signals_acked(0, 1 - broken, 1, {0}, b.out);
  EXPECT_TRUE(b.update_result().ok());
}

// Nobody but the producer waits for the signals of a failed sync: for as long as memory may still be read.
TEST(Takeover, SignalsOfAFailedSyncAreSentAgainWhereTheConnectionBreaks) {
  for (const bool drained : {false, true}) {
    SCOPED_TRACE(drained ? "after it has drained" : "while it drains");
    Consumer b({.groups = 3, .producers = 2, .ring_depth = 2, .path = Path::kMapped});
    b.start(1, 10);
    b.ready(0);
    b.scattered(0);  // group 0 is signalled to both
    b.ready(1);      // copies on
    b.machine.fail(0, 1, kReadFailed, b.out);
    b.machine.signals_acked(0, 1, 1, {0}, b.out);
    b.posted(0);
    if (drained) {
      b.scattered(1);
      EXPECT_EQ(b.count<UpdateDone>(), 1u);
      b.machine.signals_acked(0, 1, 1, {1}, b.out);
    }
    b.take();
    b.machine.producer_unreachable(0, 0, kReadFailed, b.out);
    b.machine.producer_unreachable(0, 1, kReadFailed, b.out);
    if (!drained) {
      EXPECT_THAT(b.signalled(), IsEmpty()) << "group 1 is being read";
      b.scattered(1);
      EXPECT_EQ(b.count<UpdateDone>(), 1u);
    }
    // Rank 1 has confirmed group 0, and, drained, the group that was given up as it was read.
    std::set<std::pair<std::uint32_t, std::uint32_t>> due{{0, 0}, {b.primary(1), 1}, {b.primary(2), 2}};
    if (drained) due.erase({1, 1});
    EXPECT_THAT(b.signalled(), UnorderedElementsAreArray(due));
    b.take();
    b.machine.producer_lost(0, 0, kReadFailed, b.out);
    b.machine.producer_lost(0, 1, kReadFailed, b.out);
    EXPECT_THAT(b.signalled(), IsEmpty());
    b.start(2, 20);
  }
}

TEST(Takeover, TheLanesAtAnUnreachableProducerAreLeftWhenNothingReadsItAnyMore) {
  Consumer b({.groups = 4, .producers = 2, .ring_depth = 2});
  b.start(1, 10);
  b.ready(0);
  const std::uint32_t broken = b.primary(0);
  ASSERT_EQ(b.transferring().size(), 1u);
  b.machine.producer_unreachable(0, broken, kReadFailed, b.out);
  EXPECT_EQ(b.count<LeaveLanes>(), 0u) << "the slot is being read";
  b.land(0);
  ASSERT_EQ(b.count<LeaveLanes>(), 1u);
  EXPECT_EQ(b.all<LeaveLanes>()[0].producer, broken);
  EXPECT_EQ(b.all<LeaveLanes>()[0].sync_id, 1u);
  b.scattered(0);
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok());
  EXPECT_EQ(b.count<LeaveLanes>(), 1u);
  ASSERT_TRUE(b.machine.finish_update(0, 1, b.out).ok());

  b.take();
  b.start(2, 20);  // there is no connection yet
  ASSERT_EQ(b.count<LeaveLanes>(), 1u);
  EXPECT_EQ(b.all<LeaveLanes>()[0].sync_id, 2u);
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok());
  ASSERT_TRUE(b.machine.finish_update(0, 2, b.out).ok());

  b.machine.producer_reachable(broken);
  b.take();
  b.start(3, 30);
  EXPECT_EQ(b.count<LeaveLanes>(), 0u);
  b.lost(broken);
  EXPECT_EQ(b.count<LeaveLanes>(), 0u) << "nobody is there to be told";
}

TEST(Takeover, ACopyOutOfAnUnreachableProducersTensorsEndsBeforeItsLanesAreLeft) {
  Consumer b({.groups = 1, .producers = 2, .path = Path::kMapped});
  b.start(1, 10);
  b.ready(0);
  ASSERT_EQ(b.scattering().size(), 1u);
  b.machine.producer_unreachable(0, b.primary(0), kReadFailed, b.out);
  EXPECT_EQ(b.count<LeaveLanes>(), 0u);
  b.scattered(0);
  EXPECT_EQ(b.count<LeaveLanes>(), 1u);
}

TEST(Takeover, AHeirThatRefusesTheLaneIsLeftToo) {
  Consumer b({.groups = 2, .producers = 3, .ring_depth = 1});
  b.start(1, 10);
  const std::uint32_t heir = b.candidate(0, 1);
  b.lost(b.primary(0));
  b.take();
  b.reserved(heir, Status(StatusCode::kResourceExhausted, "no memory"));
  ASSERT_EQ(b.count<LeaveLanes>(), 1u);
  EXPECT_EQ(b.all<LeaveLanes>()[0].producer, heir);
}

TEST(Takeover, AProducerThatIsReachableAgainServesTheNextSyncAsPlanned) {
  Consumer b({.groups = 1, .producers = 2});
  b.start(1, 10);
  b.machine.producer_unreachable(0, b.primary(0), kReadFailed, b.out);
  b.machine.producer_reachable(b.primary(0));  // not within a sync
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok());
  EXPECT_EQ(b.machine.rerouted(), 1u);
  ASSERT_TRUE(b.machine.finish_update(0, 1, b.out).ok());
  b.machine.producer_reachable(b.primary(0));
  b.take();
  b.start(2, 20);
  EXPECT_EQ(b.last_pull().producer, b.primary(0));
  EXPECT_EQ(b.last_pull().pull.lane, LaneKind::kRegular);
}

TEST(Takeover, AProducerThatHasReturnedServesTheNextSyncAsPlanned) {
  Consumer b({.groups = 4, .producers = 2});
  const std::uint32_t dead = b.primary(0), heir = 1 - dead;
  b.start(1, 10);
  b.lost(dead);
  b.machine.producer_returned(dead);  // not within a sync, which its successor is not in
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok());
  EXPECT_GT(b.machine.rerouted(), 0u);
  for (const auto& [producer, group] : b.signalled()) EXPECT_EQ(producer, heir) << group;
  ASSERT_TRUE(b.machine.finish_update(0, 1, b.out).ok());
  b.machine.producer_returned(dead);
  b.take();
  b.start(2, 20);
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok());
  EXPECT_EQ(b.machine.rerouted(), 0u);
  EXPECT_THAT(b.signalled(), testing::Contains(std::pair(dead, 0u)));
  for (const SendPull& pull : b.all<SendPull>()) EXPECT_EQ(pull.pull.lane, LaneKind::kRegular);

  // Its lane for what others no longer serve is another life's: it is announced again.
  ASSERT_TRUE(b.machine.finish_update(0, 2, b.out).ok());
  b.take();
  b.start(3, 30);
  b.lost(heir);
  ASSERT_EQ(b.count<AnnounceRecovery>(), 1u);
  EXPECT_EQ(b.all<AnnounceRecovery>()[0].producer, dead);
  b.run_to_end();
  EXPECT_TRUE(b.update_result().ok());
}

TEST(Takeover, AProducerThatCouldNotBeReservedAtIsStoodInForAndSignalled) {
  Consumer b({.groups = 2, .producers = 2});
  const std::uint32_t back = b.primary(0);
  b.lost(back);
  b.machine.producer_returned(back);
  b.machine.producer_unreachable(0, back, kReadFailed, b.out);
  b.start(1, 10);
  b.run_to_end();
  ASSERT_TRUE(b.update_result().ok());
  for (const SendPull& pull : b.all<SendPull>()) EXPECT_NE(pull.producer, back);
  EXPECT_THAT(b.signalled(), testing::Contains(std::pair(back, 0u))) << "its barrier waits for this worker";
}

// ---- the heir -----------------------------------------------------------------------------------

using namespace producer_action;  // NOLINT: this part is about them

// Rank 1 of two that hold everything, and workers of two replicas that share its slots.
struct Heir : ProducerBench {
  explicit Heir(const TinyOptions& options) : ProducerBench(options, 1) {
    reserve_all();
    for (std::uint32_t c = 0; c < plans.size(); ++c)
      recovery.push_back(recovery_pulls_at(*plans[c], rank, effective_workers_per_replica(*model.tables)));
  }
  void announce(std::uint32_t consumer, bool answer = true) {
    const InitTables& t = *model.tables;
    machine.reserve(now, consumer, life(consumer), lane_slot_bytes(recovery[consumer]), t.ring_depth,
                    t.num_consumers, effective_workers_per_replica(t),
                    pulls_digest(recovery[consumer], t.ring_depth), recovery[consumer], out);
    if (!answer) return;
    for (const AllocateRing& ring : all<AllocateRing>()) machine.ring_allocated(now, ring.sharing_group, {}, out);
  }
  PullId id(std::uint32_t consumer, std::uint32_t seq, std::size_t which) const {
    const PullDescription& pull = recovery[consumer].at(which);
    return {sync_id, consumer, pull.chunk_id, static_cast<std::uint16_t>(pull.run), 1, seq, LaneKind::kRecovery};
  }
  void recover(std::uint32_t consumer, std::uint32_t seq, std::size_t which) {
    machine.pull(now, life(consumer), id(consumer, seq, which), out);
  }

  std::vector<std::vector<PullDescription>> recovery;
};

constexpr TinyOptions kShared{.groups = 8, .producers = 2, .consumers = 2, .replicas = 2, .ring_depth = 2};

TEST(Takeover, AnnouncedIsWhatTheHeirIsACandidateForAndDoesNotServeByPlan) {
  Heir b(kShared);
  std::set<std::uint32_t> planned, recovered;
  for (const PullDescription& pull : b.pulls[0]) planned.insert(pull.chunk_id);
  for (const PullDescription& pull : b.recovery[0]) recovered.insert(pull.chunk_id);
  EXPECT_EQ(planned.size() + recovered.size(), b.plans[0]->chunks.size());
  for (const std::uint32_t chunk : recovered) EXPECT_FALSE(planned.contains(chunk));
  EXPECT_EQ(check_pulls(b.recovery[0], *b.model.tables, 1), Status());
  EXPECT_EQ(lane_slots(b.recovery[0], 2), 4u);
  EXPECT_EQ(lane_slots(b.pulls[0], 2), 2u);
}

TEST(Takeover, ARecoveryLaneHasARingOfItsOwnAndWaitsForNobody) {
  Heir b(kShared);
  ASSERT_TRUE(b.begin(1).ok());
  for (std::uint32_t g = 0; g < 8; ++g) ASSERT_TRUE(b.publish(g).ok());
  b.take();
  b.announce(0);
  const auto rings = b.all<AllocateRing>();
  ASSERT_EQ(rings.size(), 1u) << "while the sync runs";
  EXPECT_EQ(rings[0].sharing_group, 1u + 0u);
  EXPECT_EQ(rings[0].slots, 4u);
  ASSERT_EQ(b.count<ReserveReply>(), 1u);
  EXPECT_EQ(b.all<ReserveReply>()[0].lane, LaneKind::kRecovery);
  EXPECT_TRUE(b.all<ReserveReply>()[0].status.ok());
  b.take();
  b.recover(0, 0, 2);  // out of plan order
  b.recover(0, 1, 0);
  const auto packs = b.all<Pack>();
  ASSERT_EQ(packs.size(), 2u) << "its sharer has not come, and never will";
  EXPECT_EQ(packs[0].sharing_group, 1u);
  EXPECT_EQ(packs[0].slot, 0u);
  EXPECT_EQ(packs[0].pull->chunk_id, b.recovery[0][2].chunk_id);
  EXPECT_EQ(packs[1].slot, 1u);
  b.finish_packs();
  ASSERT_EQ(b.count<ReadyReply>(), 2u);
  EXPECT_EQ(b.all<ReadyReply>()[1].pull, b.id(0, 1, 0));
  EXPECT_EQ(b.all<ReadyReply>()[1].ready.slot, 1u);
  EXPECT_EQ(b.all<ReadyReply>()[1].ready.sharing_group, 1u);
}

TEST(Takeover, TheRegularLaneGoesOnBesideIt) {
  Heir b(kShared);
  ASSERT_TRUE(b.begin(1).ok());
  for (std::uint32_t g = 0; g < 8; ++g) ASSERT_TRUE(b.publish(g).ok());
  b.announce(0);
  b.announce(1);
  b.take();
  b.pull(0, 0);
  b.recover(0, 0, 0);
  b.recover(1, 0, 1);
  EXPECT_EQ(b.count<Pack>(), 2u) << "the regular pull waits for its sharer";
  b.pull(1, 0);
  EXPECT_EQ(b.count<Pack>(), 3u);
  b.finish_packs();
  EXPECT_EQ(b.count<ReadyReply>(), 4u);
}

TEST(Takeover, TheHeirRefusesWhatDoesNotFitTheLane) {
  Heir b(kShared);
  ASSERT_TRUE(b.begin(1).ok());
  for (std::uint32_t g = 0; g < 8; ++g) ASSERT_TRUE(b.publish(g).ok());
  b.take();
  b.recover(0, 0, 0);
  EXPECT_THAT(b.refusal(), HasSubstr("worker 0 has not reserved"));
  b.announce(0);
  b.take();
  b.recover(0, 0, 0);
  b.finish_packs();
  b.take();
  b.recover(0, 0, 1);
  EXPECT_THAT(b.refusal(), HasSubstr("that seq is chunk")) << "planted: another chunk under the same seq";
  b.take();
  b.recover(0, 99, 1);
  EXPECT_THAT(b.refusal(), HasSubstr("its lane has"));
  b.take();
  b.machine.pull(0, b.life(0), {1, 0, b.pulls[0][0].chunk_id, 0, 1, 1, LaneKind::kRecovery}, b.out);
  EXPECT_THAT(b.refusal(), HasSubstr("has not announced chunk")) << "it is of the regular lane";
  b.take();
  b.machine.pull(0, b.life(0), b.id(0, 0, 0), b.out);  // the same again
  ASSERT_EQ(b.count<ReadyReply>(), 1u) << "the slot still holds it";
}

TEST(Takeover, ASeqIsServedOnlyAfterTheOneThatHeldItsSlot) {
  TinyOptions options = kShared;
  options.groups = 24;
  Heir b(options);
  ASSERT_GT(b.recovery[0].size(), 5u);
  ASSERT_TRUE(b.begin(1).ok());
  for (std::uint32_t g = 0; g < options.groups; ++g) ASSERT_TRUE(b.publish(g).ok());
  b.announce(0);
  for (std::uint32_t seq = 0; seq < 4; ++seq) b.recover(0, seq, seq);
  b.take();
  b.recover(0, 4, 4);
  EXPECT_THAT(b.refusal(), HasSubstr("too early, seq 0 has not been served to it (4 slots)"));
}

TEST(Takeover, ALaneIsAnnouncedOnceInALifeAndGoesWithIt) {
  Heir b(kShared);
  b.announce(0);
  b.take();
  b.announce(0);  // the same again
  ASSERT_EQ(b.count<ReserveReply>(), 1u);
  EXPECT_TRUE(b.all<ReserveReply>()[0].status.ok());
  EXPECT_EQ(b.count<AllocateRing>(), 0u);
  b.take();
  b.recovery[0].pop_back();
  b.announce(0);
  EXPECT_THAT(b.all<ReserveReply>().back().status.message(), HasSubstr("announced other pulls"));
  b.take();

  b.machine.consumer_lost(0, 0, kGone, b.out);
  ASSERT_TRUE(b.begin(1, {1}).ok());
  b.machine.consumer_up(0, 0, 555, b.out);
  b.machine.pull(0, 555, b.id(0, 0, 0), b.out);
  EXPECT_THAT(b.refusal(), HasSubstr("has not reserved")) << "what another life announced";
}

TEST(Takeover, PullsOfARecoveryLaneMayComeBeforeTheirSync) {
  Heir b(kShared);
  b.announce(0);
  b.sync_id = 1;
  b.recover(0, 0, 1);
  b.take();
  ASSERT_TRUE(b.begin(1).ok());
  EXPECT_EQ(b.machine.drops().kept_early, 1u);
  for (std::uint32_t g = 0; g < 8; ++g) ASSERT_TRUE(b.publish(g).ok());
  b.finish_packs();
  ASSERT_EQ(b.count<ReadyReply>(), 1u);
  EXPECT_EQ(b.all<ReadyReply>()[0].pull, b.id(0, 0, 1));
}

// ---- the sender ---------------------------------------------------------------------------------

using namespace sender_action;  // NOLINT: this part is about them

struct Sender {
  explicit Sender(const TinyOptions& options)
      : model(protocol_testing::tiny_model(options)),
        machine({.world_size = options.producers, .num_consumers = options.consumers}) {
    machine.set_tables(model.tables);
    machine.worker_joined(0);
    EXPECT_EQ(machine.begin(0, 1, {0}, out), Status());
    machine.update_started(0, 0, 1, {}, out);
    for (std::uint32_t rank = 0; rank < options.producers; ++rank) machine.rank_began(0, rank, 1, out);
  }
  template <typename T>
  std::vector<T> all() const {
    return protocol_testing::of_kind<T>(out);
  }
  protocol_testing::TinyModel model;
  SenderMachine machine;
  SenderActions out;
};

TEST(Takeover, ASyncGoesOnWithoutARankThatOthersStandInFor) {
  Sender b({.producers = 3});
  b.machine.rank_lost(0, 2, kGone, b.out);
  EXPECT_TRUE(b.all<FailConsumer>().empty());
  b.machine.rank_ended(0, 0, 1, {}, b.out);
  b.machine.rank_ended(0, 1, 1, {}, b.out);
  b.machine.prepared(0, 0, 1, {}, b.out);
  EXPECT_EQ(b.all<Finish>().size(), 1u);
  b.machine.finished(0, 0, 1, {}, b.out);
  ASSERT_EQ(b.all<SyncDone>().size(), 1u);
  EXPECT_TRUE(b.all<SyncDone>()[0].status.ok());
  EXPECT_THAT(b.all<SyncDone>()[0].lost_ranks, ElementsAre(2));

  b.out.clear();  // and the next one
  EXPECT_EQ(b.machine.begin(0, 2, {0}, b.out), Status());
  EXPECT_EQ(b.all<OpenSync>().size(), 2u);
  EXPECT_TRUE(b.all<FailConsumer>().empty());
}

TEST(Takeover, ASyncFailsWithoutARankWhoseWeightsNobodyElseHas) {
  Sender b({.groups = 2, .producers = 2, .pipeline_stages = true});
  b.machine.rank_lost(0, 1, kGone, b.out);
  ASSERT_EQ(b.all<FailConsumer>().size(), 1u);
  EXPECT_THAT(b.all<FailConsumer>()[0].status.message(), HasSubstr("trainer 1 was lost in sync 1"));
}

TEST(Takeover, ARankThatIsTakenBackIsInTheNextSync) {
  Sender b({.groups = 2, .producers = 2, .pipeline_stages = true});
  b.machine.rank_ended(0, 1, 1, {}, b.out);
  b.machine.rank_lost(0, 1, kGone, b.out);
  EXPECT_TRUE(b.machine.lost(1));
  EXPECT_THAT(b.machine.awaited(), HasSubstr("trainer 1 to come back"));
  b.machine.take_back(1);  // while the sync runs
  EXPECT_FALSE(b.machine.lost(1));
  EXPECT_EQ(b.machine.awaited(), "");
  b.machine.rank_ended(0, 0, 1, {}, b.out);
  b.machine.prepared(0, 0, 1, {}, b.out);
  b.machine.finished(0, 0, 1, {}, b.out);
  EXPECT_EQ(b.all<CloseSync>().size(), 1u) << "its successor was not in that one";
  ASSERT_EQ(b.all<SyncDone>().size(), 1u);
  EXPECT_THAT(b.all<SyncDone>()[0].lost_ranks, ElementsAre(1));

  b.out.clear();
  EXPECT_EQ(b.machine.begin(0, 2, {0}, b.out), Status());
  EXPECT_EQ(b.all<OpenSync>().size(), 2u);
  EXPECT_TRUE(b.all<FailConsumer>().empty());
}

TEST(Takeover, RanksThatOthersStandInForAreNotMissed) {
  Sender b({.producers = 3});
  b.machine.rank_lost(0, 2, kGone, b.out);
  EXPECT_EQ(b.machine.awaited(), "");
  b.machine.rank_lost(0, 1, kGone, b.out);
  EXPECT_EQ(b.machine.awaited(), "");
  b.machine.rank_lost(0, 0, kGone, b.out);
  EXPECT_THAT(b.machine.awaited(), HasSubstr("trainer 0, trainer 1, trainer 2 to come back"));
}

TEST(Takeover, ARankThatHasEndedIsNotMissed) {
  Sender b({.groups = 2, .producers = 2, .pipeline_stages = true});
  b.machine.rank_ended(0, 1, 1, {}, b.out);
  b.machine.rank_lost(0, 1, kGone, b.out);
  EXPECT_TRUE(b.all<FailConsumer>().empty());
}

}  // namespace
}  // namespace shardpull
