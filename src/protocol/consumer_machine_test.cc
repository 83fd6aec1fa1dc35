// The consumer's rules, one test each: docs/PROTOCOL.md, "Consumer".
#include "protocol/consumer_machine.h"

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

using namespace consumer_action;  // NOLINT
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::UnorderedElementsAre;
using Kind = ModuleState::Kind;

const Status kBroken(StatusCode::kDataLoss, "broken");

// ---- the pipeline -------------------------------------------------------------------------------

TEST(ConsumerPipeline, IssuesKDeepFromTheFirstUpdateOn) {
  for (const std::uint32_t depth : {1u, 2u, 4u}) {
    ConsumerBench b({.groups = 6, .ring_depth = depth});
    b.start(1, 10);
    EXPECT_EQ(b.pulled().size(), depth);
  }
}

TEST(ConsumerPipeline, DrainsBeforeIssue) {
  ConsumerBench b({.groups = 5, .ring_depth = 2});
  b.start(1, 10);
  b.ready(0);
  b.ready(1);
  EXPECT_THAT(b.pulled(), ElementsAre(0u, 1u));
  b.land(1);
  EXPECT_THAT(b.pulled(), ElementsAre(0u, 1u)) << "chunk 2 waits for chunk 0, not for any chunk";
  b.land(0);
  EXPECT_THAT(b.pulled(), ElementsAre(0u, 1u, 2u, 3u));
}

TEST(ConsumerPipeline, AskedOnceForEachPullWithItsPlaceInTheLane) {
  ConsumerBench b({.groups = 4, .producers = 2, .pipeline_stages = true});
  for (std::uint64_t sync = 1; sync <= 3; ++sync) {
    b.start(sync, sync);
    b.run_to_end();
    std::vector<std::pair<std::uint32_t, std::uint32_t>> asked;
    for (const SendPull& pull : b.all<SendPull>()) {
      EXPECT_EQ(pull.pull.sync_id, sync);
      asked.emplace_back(pull.producer, pull.pull.seq);
    }
    EXPECT_THAT(asked, ElementsAre(Pair(0u, 0u), Pair(1u, 0u), Pair(0u, 1u), Pair(1u, 1u)))
        << "seq restarts each sync";
    EXPECT_EQ(b.update_result(), Status());
    ASSERT_EQ(b.machine.finish_update(0, sync, b.out), Status());
    b.take();
  }
}

TEST(ConsumerPipeline, ATransferWaitsForTheScatterThatReadsItsSlot) {
  ConsumerBench b({.groups = 4, .ring_depth = 2});
  b.start(1, 10);
  b.ready(0);
  b.land(0);  // its scatter starts and stays
  b.ready(1);
  b.land(1);
  EXPECT_THAT(b.scattering(), ElementsAre(0u, 1u));
  b.ready(2);  // into slot 0
  b.ready(3);  // into slot 1
  EXPECT_THAT(b.transferring(), ElementsAre(0u, 1u)) << "handing the address over is what must wait";
  b.scattered(1);
  EXPECT_THAT(b.transferring(), ElementsAre(0u, 1u, 3u));
  b.scattered(0);
  EXPECT_THAT(b.transferring(), ElementsAre(0u, 1u, 3u, 2u));
}

TEST(ConsumerPipeline, ReceiveSlotsGoRoundAcrossSyncs) {
  ConsumerBench b({.groups = 3, .ring_depth = 2});
  std::vector<std::uint32_t> slots;
  for (std::uint64_t sync = 1; sync <= 2; ++sync) {
    b.start(sync, sync);
    b.run_to_end();
    for (const StartTransfer& transfer : b.all<StartTransfer>()) slots.push_back(transfer.slot);
    ASSERT_EQ(b.machine.finish_update(0, sync, b.out), Status());
    b.take();
  }
  EXPECT_THAT(slots, ElementsAre(0u, 1u, 0u, 1u, 0u, 1u));
}

TEST(ConsumerPipeline, ATwinSharesThePlanAndGoesByItsOwnId) {
  ConsumerBench b({.groups = 3});
  b.start(1, 10);  // what the first one does is nothing to the other
  ConsumerMachine twin(b.machine, 7);
  EXPECT_EQ(twin.state(), WorkerState::kIdle);
  ConsumerActions out;
  ASSERT_EQ(twin.start_update(0, 1, 10, nullptr, out), Status());
  ASSERT_EQ(twin.update(0, out), Status());
  const auto pulls = of_kind<SendPull>(out);
  ASSERT_EQ(pulls.size(), b.pulled().size());
  for (const SendPull& pull : pulls) EXPECT_EQ(pull.pull.consumer, 7u);
  out.clear();
  twin.ready(0, pulls[0].producer, pulls[0].pull, b.ready_info(pulls[0].pull.chunk), out);
  EXPECT_EQ(twin.drops().unknown, 0u);
  EXPECT_FALSE(out.empty());
  EXPECT_THAT(twin.update(0, out).message(), HasSubstr("worker 7"));
}

TEST(ConsumerPipeline, AChunkHasLandedWhenAllItsRunsHave) {
  ConsumerBench b(
      {.groups = 2, .names_per_group = 2, .producers = 2, .max_chunk_bytes = 128, .pull_split = 2});
  ASSERT_EQ(b.plan->chunks[0].runs.size(), 2u);
  b.start(1, 10);
  b.ready(0, 1);
  b.land(0, 1);
  EXPECT_THAT(b.scattering(), IsEmpty());
  b.ready(0, 0);
  b.land(0, 0);
  EXPECT_THAT(b.scattering(), ElementsAre(0u));
}

TEST(ConsumerPipeline, AModulesLaterChunksWaitForItsFirst) {
  // One module over all groups: chunk 0 materialises and fills it.
  ConsumerBench b({.groups = 3, .ring_depth = 4, .modules_span_groups = true});
  b.start(1, 10);
  for (const std::uint32_t chunk : {2u, 1u}) {
    b.ready(chunk);
    b.land(chunk);
  }
  EXPECT_THAT(b.scattering(), IsEmpty());
  b.ready(0);
  b.land(0);
  EXPECT_THAT(b.scattering(), ElementsAre(0u));
  b.scattered(0);
  EXPECT_THAT(b.scattering(), ElementsAre(0u, 1u, 2u)) << "independent of each other";
  EXPECT_THAT(b.posting(), IsEmpty());
  b.scattered(2);
  EXPECT_THAT(b.posting(), IsEmpty()) << "its last chunk is done, but not all of them";
  b.scattered(1);
  EXPECT_THAT(b.posting(), ElementsAre(2u));
}

TEST(ConsumerPipeline, PostProcessingDelaysNothing) {
  ConsumerBench b({.groups = 6, .ring_depth = 1});
  b.start(1, 10);
  for (std::uint32_t chunk = 0; chunk < 6; ++chunk) {
    b.ready(chunk);
    b.land(chunk);
    b.scattered(chunk);
  }
  b.ack_all();
  EXPECT_EQ(b.posting().size(), 6u);
  EXPECT_TRUE(b.machine.in_flight());
  for (std::uint32_t chunk = 0; chunk < 6; ++chunk) {
    EXPECT_EQ(b.count<UpdateDone>(), 0u) << "a hook may fail, and mates must not commit without this worker";
    b.posted(chunk);
  }
  EXPECT_EQ(b.update_result(), Status());
}

// ---- signals ------------------------------------------------------------------------------------

TEST(ConsumerSignals, APackedGroupIsSignalledWhenItHasArrived) {
  ConsumerBench b({.groups = 2, .producers = 2});  // everybody holds everything: both are told
  b.start(1, 10);
  b.ready(0);
  EXPECT_THAT(b.signalled(), IsEmpty());
  b.land(0);
  EXPECT_THAT(b.signalled(), UnorderedElementsAre(Pair(0u, 0u), Pair(1u, 0u)));
}

TEST(ConsumerSignals, AMappedGroupIsSignalledWhenItsCopyHasEnded) {
  ConsumerBench b({.groups = 2, .path = Path::kMapped});
  b.start(1, 10);
  b.ready(0);
  EXPECT_THAT(b.scattering(), ElementsAre(0u));
  EXPECT_THAT(b.transferring(), IsEmpty());
  EXPECT_THAT(b.signalled(), IsEmpty());
  b.scattered(0);
  EXPECT_THAT(b.signalled(), ElementsAre(Pair(0u, 0u)));
}

TEST(ConsumerSignals, AGroupOfSeveralChunksIsSignalledAfterAllOfThem) {
  ConsumerBench b({.groups = 2, .names_per_group = 3, .ring_depth = 4});  // 3 chunks a group
  b.start(1, 10);
  for (const std::uint32_t chunk : {2u, 0u}) {  // the last, which carries the signal, lands first
    b.ready(chunk);
    b.land(chunk);
  }
  EXPECT_THAT(b.signalled(), IsEmpty());
  b.ready(1);
  b.land(1);
  EXPECT_THAT(b.signalled(), ElementsAre(Pair(0u, 0u)));
}

TEST(ConsumerSignals, GroupsItTakesNothingFromAreSignalledAtTheStart) {
  TinyModel model = tiny_model({.groups = 3});
  model.recording.scatters.erase(model.recording.scatters.begin() + 1);
  model.recording.live = {0, 2};
  model.recording.dead = {1};
  ConsumerBench b(model.plan(0), 3);
  ASSERT_EQ(b.machine.start_update(0, 1, 10, nullptr, b.out), Status());
  EXPECT_THAT(b.signalled(), IsEmpty());
  ASSERT_EQ(b.machine.update(0, b.out), Status());
  EXPECT_THAT(b.signalled(), ElementsAre(Pair(0u, 1u)));
}

TEST(ConsumerSignals, EveryGroupOnceToEveryOwnerAndAllConfirmedBeforeUpdateReturns) {
  ConsumerBench b(
      {.groups = 5, .names_per_group = 2, .producers = 3, .ring_depth = 2, .pipeline_stages = true});
  b.start(1, 10);
  for (std::uint32_t chunk = 0; chunk < b.plan->chunks.size(); ++chunk) {
    b.ready(chunk);
    b.land(chunk);
    b.scattered(chunk);
    b.posted(chunk);
  }
  const auto signalled = b.signalled();
  EXPECT_THAT(signalled,
              UnorderedElementsAre(Pair(0u, 0u), Pair(1u, 1u), Pair(2u, 2u), Pair(0u, 3u), Pair(1u, 4u)));
  EXPECT_EQ(b.count<UpdateDone>(), 0u);
  for (std::size_t i = 0; i < signalled.size(); ++i) {
    EXPECT_EQ(b.count<UpdateDone>(), 0u);
    b.machine.signals_acked(0, signalled[i].first, 1, {signalled[i].second}, b.out);
    b.machine.signals_acked(0, signalled[i].first, 1, {signalled[i].second},
                            b.out);  // confirmed twice: no effect
  }
  EXPECT_EQ(b.count<UpdateDone>(), 1u);
  EXPECT_EQ(b.update_result(), Status());
  EXPECT_EQ(b.machine.state(), WorkerState::kPrepared);
}

TEST(ConsumerSignals, ConfirmationsOfAnotherSyncAreDropped) {
  ConsumerBench b({.groups = 1});
  b.start(2, 10);
  b.ready(0);
  b.land(0);
  b.scattered(0);
  b.machine.signals_acked(0, 0, 1, {0}, b.out);
  EXPECT_EQ(b.count<UpdateDone>(), 0u);
  EXPECT_EQ(b.machine.drops().stale_sync, 1u);
}

// ---- replies that do not fit --------------------------------------------------------------------

TEST(ConsumerReplies, ThoseThatAnswerNothingAreDroppedAndCounted) {
  ConsumerBench b({.groups = 3, .producers = 2});
  b.start(5, 10);
  const auto drop = [&](std::uint32_t producer, PullId pull) {
    const std::uint64_t before = b.machine.drops().unknown + b.machine.drops().stale_sync;
    const std::size_t actions = b.out.size();
    b.machine.ready(0, producer, pull, b.ready_info(0), b.out);
    b.machine.pull_failed(0, producer, pull, kBroken, b.out);
    EXPECT_EQ(b.machine.drops().unknown + b.machine.drops().stale_sync, before + 2);
    EXPECT_EQ(b.out.size(), actions);
  };
  const std::uint32_t producer = b.plan->chunks[0].runs[0].producer;
  PullId pull = b.pull_id(0);
  pull.sync_id = 4;
  drop(producer, pull);
  pull = b.pull_id(0);
  pull.chunk = 99;
  drop(producer, pull);
  pull = b.pull_id(0);
  pull.run = 9;
  drop(producer, pull);
  pull = b.pull_id(0);
  pull.seq = 9;
  drop(producer, pull);
  pull = b.pull_id(0);
  pull.consumer = 1;
  drop(producer, pull);
  pull = b.pull_id(0);
  pull.attempt = 1;
  drop(producer, pull);
  drop(1 - producer, b.pull_id(0));
  drop(b.plan->chunks[2].runs[0].producer, b.pull_id(2));  // not asked for yet
  b.ready(0);
  EXPECT_THAT(b.transferring(), ElementsAre(0u));
  drop(producer, b.pull_id(0));                    // answered before
  b.machine.transfer_done(0, 5, 1, 0, {}, b.out);  // no such transfer
  b.machine.scatter_done(0, 5, 0, {}, b.out);
  b.machine.post_done(0, 5, 0, {}, b.out);
  b.machine.transfer_done(0, 5, 99, 0, {}, b.out);
  EXPECT_THAT(b.transferring(), ElementsAre(0u));
}

TEST(ConsumerReplies, OneThatDiffersFromThePlanFailsTheSyncNamingChunkAndProducer) {
  const auto fail_with = [](const TinyOptions& options, auto change) {
    ConsumerBench b(options);
    b.start(1, 10);
    ReadyInfo info = b.ready_info(0);
    change(info);
    b.machine.ready(0, 0, b.pull_id(0), info, b.out);
    EXPECT_EQ(b.count<ReportFailure>(), 1u);
    EXPECT_EQ(b.update_result().info().peer, "trainer 0");
    return b.update_result().message();
  };
  EXPECT_THAT(fail_with({}, [](ReadyInfo& r) { r.bytes = 60; }),
              HasSubstr("chunk 0 (group 0): trainer 0 packed 60 bytes, the plan says 64"));
  EXPECT_THAT(fail_with({}, [](ReadyInfo& r) { r.path = Path::kMapped; }), HasSubstr("path"));
  EXPECT_THAT(fail_with({.path = Path::kMapped}, [](ReadyInfo& r) { r.entries.clear(); }),
              HasSubstr("named 0 tensors, the plan says 1"));
}

// ---- errors -------------------------------------------------------------------------------------

TEST(ConsumerErrors, InFlightWorkEndsBeforeTheFirstErrorIsReported) {
  ConsumerBench b({.groups = 6, .ring_depth = 3});
  b.start(1, 10);
  b.ready(0);
  b.land(0);
  b.scattered(0);  // its hook runs
  b.ready(1);
  b.land(1);   // its scatter runs
  b.ready(2);  // its transfer runs
  b.ready(3);  // so does this one
  const auto pulls = b.pulled();
  b.machine.pull_failed(0, 0, b.pull_id(4), kBroken, b.out);
  ASSERT_EQ(b.count<ReportFailure>(), 1u) << "the sender hears at once";
  EXPECT_EQ(b.count<UpdateDone>(), 0u);
  EXPECT_EQ(b.machine.state(), WorkerState::kUpdating);
  EXPECT_FALSE(b.machine.start_update(0, 2, 20, nullptr, b.out).ok()) << "not before the slots are quiet";

  const std::size_t scatters = b.scattering().size(), transfers = b.transferring().size(),
                    posts = b.posting().size();
  b.land(2, 0, Status(StatusCode::kUnavailable, "a later error"));
  b.land(3);
  b.scattered(1);
  EXPECT_EQ(b.count<UpdateDone>(), 0u);
  b.posted(0);
  ASSERT_EQ(b.count<UpdateDone>(), 1u);
  EXPECT_THAT(b.update_result().message(), HasSubstr("chunk 4 (group 4) from trainer 0: broken"))
      << "the first error, once";
  EXPECT_EQ(b.count<ReportFailure>(), 1u);
  EXPECT_EQ(b.machine.state(), WorkerState::kFailed);
  EXPECT_EQ(b.pulled(), pulls) << "nothing new was started";
  EXPECT_EQ(b.scattering().size(), scatters);
  EXPECT_EQ(b.transferring().size(), transfers);
  EXPECT_EQ(b.posting().size(), posts);
}

TEST(ConsumerErrors, AFreshUpdateRunsAfterOneThatFailedAnywhere) {
  for (int where = 0; where < 5; ++where) {
    SCOPED_TRACE(where);
    ConsumerBench b({.groups = 4, .ring_depth = 2});
    b.start(1, 10);
    if (where == 0) b.machine.pull_failed(0, 0, b.pull_id(0), kBroken, b.out);
    if (where > 0) b.ready(0);
    if (where == 1) b.land(0, 0, kBroken);
    if (where > 1) b.land(0);
    if (where == 2) b.scattered(0, kBroken);
    if (where > 2) b.scattered(0);
    if (where == 3) b.posted(0, kBroken);
    if (where == 4) {
      b.machine.fail(0, 1, kBroken, b.out);
      b.posted(0);
    }
    EXPECT_THAT(b.update_result().message(), HasSubstr("broken"));
    EXPECT_EQ(b.count<ReportFailure>(), where == 4 ? 0u : 1u);
    b.take();
    b.start(2, 20);
    b.run_to_end();
    EXPECT_EQ(b.update_result(), Status());
    ASSERT_EQ(b.machine.finish_update(0, 2, b.out), Status());
    EXPECT_EQ(b.finish_result(), Status());
    EXPECT_EQ(*b.machine.version(), 20u);
  }
}

TEST(ConsumerErrors, ALateReadyOfAFailedSyncStartsNothing) {
  ConsumerBench b({.groups = 2});
  b.start(1, 10);
  const PullId late = b.pull_id(1);
  b.machine.pull_failed(0, 0, b.pull_id(0), kBroken, b.out);
  b.take();
  b.machine.ready(0, 0, late, b.ready_info(1), b.out);
  b.start(2, 20);
  b.take();
  b.machine.ready(0, 0, late, b.ready_info(1), b.out);
  EXPECT_THAT(b.take(), IsEmpty());
}

TEST(ConsumerErrors, ProducersHearWhatIsNotReadAnyMoreOnceNothingIsInFlight) {
  ConsumerBench b(
      {.groups = 5, .producers = 2, .ring_depth = 2, .pipeline_stages = true, .path = Path::kMapped});
  b.start(1, 10);
  b.ready(0);
  b.scattered(0);
  b.ready(1);  // copies on
  EXPECT_THAT(b.signalled(), ElementsAre(Pair(0u, 0u)));
  b.machine.fail(0, 1, kBroken, b.out);
  EXPECT_THAT(b.signalled(), ElementsAre(Pair(0u, 0u)));
  b.posted(0);
  b.scattered(1);
  EXPECT_THAT(b.signalled(), ElementsAre(Pair(0u, 0u), Pair(0u, 2u), Pair(1u, 1u)))
      << "group 1, which it copied, and group 2, which it had asked for";
  EXPECT_EQ(b.update_result(), kBroken);
  b.ack_all();
  EXPECT_EQ(b.machine.drops().unknown, 0u);
}

TEST(ConsumerErrors, TheCallerReceivesItFromTheNextCall) {
  ConsumerBench b({.groups = 1});
  ASSERT_EQ(b.machine.start_update(0, 1, 10, nullptr, b.out), Status());
  b.machine.fail(0, 1, kBroken, b.out);
  EXPECT_EQ(b.machine.state(), WorkerState::kFailed);
  EXPECT_EQ(b.machine.update(0, b.out), kBroken);

  b.take();
  b.start(2, 20);
  b.ready(0);
  b.land(0);
  b.scattered(0);
  b.ack_all();
  ASSERT_EQ(b.machine.state(), WorkerState::kUpdating);
  b.posted(0, kBroken);
  EXPECT_EQ(b.count<ReportFailure>(), 1u);
  EXPECT_THAT(b.machine.finish_update(0, 2, b.out).message(), HasSubstr("post-processing: broken"));
}

TEST(ConsumerErrors, ALostProducerMattersWhileNobodyElseHasWhatIsWantedFromIt) {
  const TinyOptions options{.groups = 2, .producers = 3, .ring_depth = 1, .pipeline_stages = true};
  {
    ConsumerBench b(options);
    b.start(1, 10);
    b.machine.producer_lost(0, 2, kBroken, b.out);  // holds nothing
    EXPECT_EQ(b.count<ReportFailure>(), 0u);
    b.machine.producer_lost(0, 1, kBroken, b.out);  // its chunk is not even asked for yet
    EXPECT_THAT(b.update_result().message(),
                HasSubstr("worker 0 lost trainer 1 in sync 1, and nobody else has chunk 1 (group 1): broken"));
    EXPECT_EQ(b.update_result().info().reason, Reason::kPeerLost);
  }
  {
    ConsumerBench b(options);
    b.start(1, 10);
    b.ready(0);
    b.land(0);
    b.machine.producer_lost(0, 0, kBroken, b.out);
    EXPECT_EQ(b.count<ReportFailure>(), 0u) << "all of it has arrived, and nobody waits for the dead to confirm";
    b.run_to_end();
    EXPECT_TRUE(b.update_result().ok());
  }
  {
    ConsumerBench b(options);
    b.machine.producer_lost(0, 0, kBroken, b.out);  // between syncs
    EXPECT_EQ(b.machine.start_update(0, 1, 10, nullptr, b.out), Status());
    EXPECT_EQ(b.machine.update(0, b.out), Status());
    EXPECT_THAT(b.update_result().message(), HasSubstr("worker 0 lost trainer 0 in sync 1"));
    EXPECT_EQ(b.pulled().size(), 0u) << "nothing is applied of what cannot be completed";
  }
}

// ---- states -------------------------------------------------------------------------------------

TEST(ConsumerStates, CallsOutOfOrderAreErrorsNamingTheState) {
  ConsumerBench b({.groups = 1}, 0, true);
  EXPECT_THAT(b.machine.update(0, b.out).message(),
              HasSubstr("update without start_update (the worker is idle)"));
  EXPECT_THAT(b.machine.finish_update(0, 1, b.out).message(), HasSubstr("while idle"));
  b.start(3, 10);
  EXPECT_THAT(b.machine.update(0, b.out).message(), HasSubstr("the worker is updating"));
  EXPECT_THAT(b.machine.start_update(0, 4, 10, nullptr, b.out).message(),
              HasSubstr("while updating in sync 3"));
  EXPECT_THAT(b.machine.finish_update(0, 3, b.out).message(), HasSubstr("while updating"));
  b.ready(0);
  b.land(0);
  b.scattered(0);
  b.ack_all();
  EXPECT_THAT(b.machine.finish_update(0, 2, b.out).message(),
              HasSubstr("of sync 2 while prepared in sync 3"));
  ASSERT_EQ(b.machine.finish_update(0, 3, b.out), Status());
  EXPECT_EQ(b.machine.state(), WorkerState::kCommitting);
  EXPECT_THAT(b.machine.start_update(0, 4, 10, nullptr, b.out).message(), HasSubstr("while committing"));
  EXPECT_THAT(b.machine.finish_update(0, 3, b.out).message(), HasSubstr("while committing"));
  b.copied();
  b.posted(0);
  EXPECT_EQ(b.finish_result(), Status());
  EXPECT_EQ(b.machine.state(), WorkerState::kIdle);
  EXPECT_THAT(b.machine.start_update(0, 3, 10, nullptr, b.out).message(),
              HasSubstr("sync 3 is not after sync 3"));
}

TEST(ConsumerStates, ModulesSayWhatTheyHold) {
  ConsumerBench b({.groups = 3, .ring_depth = 1});
  const auto kinds = [&] {
    std::vector<std::string> text;
    for (const ModuleState& module : b.machine.modules()) text.push_back(to_string(module));
    return text;
  };
  EXPECT_THAT(kinds(), ElementsAre("unset", "unset", "unset"));
  EXPECT_FALSE(b.machine.version().ok());
  b.start(1, 10);
  b.run_to_end();
  EXPECT_THAT(kinds(), ElementsAre("prepared(10)", "prepared(10)", "prepared(10)"));
  EXPECT_FALSE(b.machine.version().ok()) << "not before the commit";
  ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
  EXPECT_THAT(kinds(), ElementsAre("current(10)", "current(10)", "current(10)"));
  EXPECT_EQ(*b.machine.version(), 10u);

  b.take();
  b.start(2, 20);
  EXPECT_EQ(*b.machine.version(), 10u) << "nothing has been touched yet";
  b.ready(0);
  b.land(0);
  b.scattered(0);
  b.posted(0);
  b.ready(1);
  b.land(1);
  EXPECT_THAT(kinds(), ElementsAre("prepared(20)", "landing(20)", "current(10)"));
  b.machine.fail(0, 2, kBroken, b.out);
  b.scattered(1);
  EXPECT_THAT(kinds(), ElementsAre("prepared(20)", "mixed(10, 20)", "current(10)"));
  EXPECT_THAT(b.machine.version().status().message(),
              HasSubstr("holds no single version: module 0 is prepared(20), module 1 is mixed(10, 20)"));

  b.take();
  b.start(3, 10);  // the old version sent again repairs them
  b.run_to_end();
  ASSERT_EQ(b.machine.finish_update(0, 3, b.out), Status());
  EXPECT_EQ(*b.machine.version(), 10u);
}

TEST(ConsumerStates, AFirstUpdateThatFailsLeavesNoVersion) {
  ConsumerBench b({.groups = 1});
  b.start(1, 10);
  b.ready(0);
  b.land(0);
  b.scattered(0, kBroken);
  EXPECT_EQ(to_string(b.machine.modules()[0]), "mixed(unset, 10)");
}

TEST(ConsumerStates, AModuleWithAFailedChunkIsNotProcessed) {
  ConsumerBench b({.groups = 2, .ring_depth = 2, .modules_span_groups = true});
  b.start(1, 10);
  b.ready(0);
  b.land(0);
  b.ready(1);
  b.land(1);
  b.scattered(0);
  b.scattered(1, kBroken);
  EXPECT_THAT(b.posting(), IsEmpty());
  EXPECT_EQ(b.machine.modules()[0].kind, Kind::kMixed);
}

TEST(ConsumerStates, AnAbandonedUpdateMayBeFollowedByAnother) {
  ConsumerBench b({.groups = 2});
  b.start(1, 10);
  b.run_to_end();
  ASSERT_EQ(b.machine.state(), WorkerState::kPrepared);
  b.take();
  b.start(2, 20);  // never committed
  b.run_to_end();
  ASSERT_EQ(b.machine.finish_update(0, 2, b.out), Status());
  EXPECT_EQ(*b.machine.version(), 20u);
}

TEST(ConsumerStates, AFailureElsewhereAbortsBeforeTheCommitAndNotAfter) {
  ConsumerBench b({.groups = 1});
  b.start(1, 10);
  b.ready(0);
  b.land(0);
  b.scattered(0);
  b.ack_all();
  b.posted(0);
  ASSERT_EQ(b.machine.state(), WorkerState::kPrepared);
  b.take();
  b.machine.fail(0, 1, kBroken, b.out);
  EXPECT_EQ(b.update_result(), kBroken);
  EXPECT_EQ(b.machine.state(), WorkerState::kFailed);
  EXPECT_EQ(b.machine.finish_update(0, 1, b.out), kBroken);

  b.take();
  b.start(2, 20);
  b.ready(0);
  b.land(0);
  b.scattered(0);
  b.ack_all();
  b.posted(0);
  ASSERT_EQ(b.machine.finish_update(0, 2, b.out), Status());
  EXPECT_EQ(b.finish_result(), Status());
  EXPECT_EQ(*b.machine.version(), 20u);
  b.machine.fail(0, 2, kBroken, b.out);
  EXPECT_EQ(*b.machine.version(), 20u);

  ConsumerBench staged({.groups = 1}, 0, true);  // a commit that takes a while
  staged.start(1, 10);
  staged.run_to_end();
  ASSERT_EQ(staged.machine.finish_update(0, 1, staged.out), Status());
  staged.machine.fail(0, 1, kBroken, staged.out);
  staged.copied();
  staged.posted(0);
  EXPECT_EQ(staged.finish_result(), Status());
  EXPECT_EQ(*staged.machine.version(), 10u);
}

TEST(ConsumerStates, AHookThatFailsIsFoundBeforeAnybodyCommits) {
  ConsumerBench b({.groups = 1});
  b.start(1, 10);
  b.ready(0);
  b.land(0);
  b.scattered(0);
  b.ack_all();
  EXPECT_EQ(b.count<UpdateDone>(), 0u) << "the hook runs";
  EXPECT_FALSE(b.machine.finish_update(0, 1, b.out).ok());
  b.posted(0, kBroken);
  EXPECT_THAT(b.update_result().message(), HasSubstr("broken"));
  EXPECT_EQ(b.count<ReportFailure>(), 1u);
  EXPECT_THAT(b.machine.finish_update(0, 1, b.out).message(), HasSubstr("broken"));
  EXPECT_EQ(b.machine.state(), WorkerState::kFailed);
  EXPECT_EQ(b.machine.modules()[0].kind, Kind::kMixed);
}

// ---- staged -------------------------------------------------------------------------------------

std::vector<std::string> states(const ConsumerBench& b) {
  std::vector<std::string> text;
  for (const ModuleState& module : b.machine.modules()) text.push_back(to_string(module));
  return text;
}

TEST(ConsumerStaged, ModulesAreTouchedByTheCommitAlone) {
  ConsumerBench b({.groups = 2}, 0, true);
  b.start(1, 10);
  b.run_to_end();
  EXPECT_EQ(b.update_result(), Status());
  EXPECT_THAT(states(b), ElementsAre("unset", "unset"));
  EXPECT_THAT(b.posting(), IsEmpty()) << "hooks read parameters";
  EXPECT_FALSE(b.machine.in_flight());
  b.take();
  ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
  EXPECT_EQ(b.count<StartCommit>(), 1u);
  EXPECT_THAT(states(b), ElementsAre("landing(10)", "landing(10)"));
  EXPECT_TRUE(b.machine.in_flight());
  b.copied();
  EXPECT_THAT(b.posting(), ElementsAre(0u, 1u));
  EXPECT_EQ(b.count<FinishDone>(), 0u);
  b.posted(1);
  EXPECT_THAT(states(b), ElementsAre("landing(10)", "prepared(10)"));
  b.posted(0);
  EXPECT_EQ(b.finish_result(), Status());
  EXPECT_THAT(states(b), ElementsAre("current(10)", "current(10)"));
  EXPECT_EQ(*b.machine.version(), 10u);
}

// Whatever fails before the commit leaves every module what it was.
TEST(ConsumerStaged, AFailureBeforeTheCommitLeavesTheOldVersionCurrent) {
  for (const int step : {0, 1, 2, 3, 4}) {
    SCOPED_TRACE(step);
    ConsumerBench b({.groups = 2, .ring_depth = 1}, 0, true);
    b.start(1, 10);
    b.run_to_end();
    ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
    b.run_to_end();
    ASSERT_EQ(b.machine.state(), WorkerState::kIdle);
    b.take();
    b.start(2, 20);
    if (step == 1) b.machine.pull_failed(0, 0, b.pull_id(0), kBroken, b.out);
    if (step >= 2) b.ready(0);
    if (step == 2) b.land(0, 0, kBroken);
    if (step >= 3) b.land(0);
    if (step == 3) b.scattered(0, kBroken);
    if (step == 4) {
      b.run_to_end();
      ASSERT_EQ(b.machine.state(), WorkerState::kPrepared);
    }
    if (step == 0 || step == 4) b.machine.fail(0, 2, kBroken, b.out);
    EXPECT_EQ(b.machine.state(), WorkerState::kFailed);
    EXPECT_EQ(b.count<StartCommit>(), 0u);
    EXPECT_FALSE(b.machine.finish_update(0, 2, b.out).ok());
    EXPECT_THAT(states(b), ElementsAre("current(10)", "current(10)"));
    EXPECT_EQ(*b.machine.version(), 10u);
    b.take();
    b.start(3, 30);
    b.run_to_end();
    ASSERT_EQ(b.machine.finish_update(0, 3, b.out), Status());
    b.run_to_end();
    EXPECT_EQ(*b.machine.version(), 30u);
  }
}

// Nothing of a commit that has begun is current, whether its copies or a hook failed, until a later sync
// commits, of the old version or another.
TEST(ConsumerStaged, ACommitThatFailsLeavesModulesMixedUntilALaterOne) {
  for (const bool hook : {false, true}) {
    SCOPED_TRACE(hook ? "hook" : "copy");
    ConsumerBench b({.groups = 2}, 0, true);
    b.start(1, 10);
    b.run_to_end();
    ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
    b.run_to_end();
    b.take();
    b.start(2, 20);
    b.run_to_end();
    b.take();
    ASSERT_EQ(b.machine.finish_update(0, 2, b.out), Status());
    b.copied(hook ? Status() : kBroken);
    if (hook) {
      b.posted(0);
      b.posted(1, kBroken);
    }
    EXPECT_THAT(b.finish_result().message(), HasSubstr("broken"));
    EXPECT_EQ(b.count<ReportFailure>(), 1u);
    EXPECT_THAT(states(b), ElementsAre(hook ? "prepared(20)" : "mixed(10, 20)", "mixed(10, 20)"));
    EXPECT_FALSE(b.machine.version().ok());
    b.take();
    b.start(3, 10);
    b.run_to_end();
    EXPECT_FALSE(b.machine.version().ok()) << "not before its commit";
    b.machine.fail(0, 3, kBroken, b.out);
    EXPECT_FALSE(b.machine.version().ok()) << "a failed sync repairs nothing";
    b.start(4, 10);
    b.run_to_end();
    ASSERT_EQ(b.machine.finish_update(0, 4, b.out), Status());
    b.run_to_end();
    EXPECT_EQ(*b.machine.version(), 10u);
  }
}

TEST(ConsumerStaged, StrangeEndsOfCommitsAreDropped) {
  ConsumerBench b({.groups = 1}, 0, true);
  b.start(1, 10);
  b.copied();
  b.run_to_end();
  b.machine.commit_done(0, 1, kBroken, b.out);
  EXPECT_EQ(b.machine.drops().unknown, 2u);
  ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
  b.machine.commit_done(0, 7, kBroken, b.out);
  b.machine.shutdown(b.out);
  EXPECT_TRUE(b.machine.in_flight());
  b.copied();
  b.posted(0);
  EXPECT_EQ(b.finish_result(), Status()) << "the commit was decided";
}

TEST(ConsumerStates, AWorkerWithoutChunksStillSignalsAndCommits) {
  TinyModel model = tiny_model({.groups = 2, .producers = 2});
  model.recording = Recording{};
  model.recording.dead = {0, 1};
  ConsumerBench b(model.plan(0), 0);
  b.start(1, 10);
  EXPECT_EQ(b.signalled().size(), 4u);
  EXPECT_EQ(b.count<UpdateDone>(), 0u);
  b.ack_all();
  EXPECT_EQ(b.update_result(), Status());
  ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
  EXPECT_EQ(*b.machine.version(), 10u);
}

TEST(ConsumerStates, AChunkWithoutKeysRunsItsFillsAndSendsItsSignals) {
  auto plan = std::make_shared<WorkerPlan>();
  plan->ring_depth = 1;
  plan->group_owners = {{0}, {0}};
  plan->chunks.resize(2);
  plan->chunks[0].group = 0;
  plan->chunks[0].materialise = {0};
  plan->chunks[0].post_process = {0};
  plan->chunks[0].signal_groups = {0};
  plan->chunks[1] = plan->chunks[0];
  plan->chunks[1].chunk_id = 1;
  plan->chunks[1].group = 1;
  plan->chunks[1].materialise = plan->chunks[1].post_process = {1};
  plan->chunks[1].signal_groups = {1};
  ConsumerBench b(plan, 2);
  b.start(1, 10);
  EXPECT_EQ(b.count<StartCopy>(), 2u);
  EXPECT_EQ(b.count<SendPull>(), 0u);
  b.run_to_end();
  EXPECT_THAT(b.signalled(), UnorderedElementsAre(Pair(0u, 0u), Pair(0u, 1u)));
  EXPECT_THAT(b.posting(), UnorderedElementsAre(0u, 1u));
  EXPECT_EQ(b.update_result(), Status());
}

// ---- the watchdog -------------------------------------------------------------------------------

TEST(ConsumerWatchdog, NamesTheTransferThatHangs) {
  ConsumerBench b({.groups = 3});
  b.start(1, 10);
  b.ready(1);
  b.machine.tick(300 * kSecond - 1, b.out);
  EXPECT_EQ(b.count<ReportFailure>(), 0u);
  b.machine.tick(300 * kSecond, b.out);
  ASSERT_EQ(b.count<ReportFailure>(), 1u);
  EXPECT_THAT(b.all<ReportFailure>()[0].status.message(),
              HasSubstr("waiting for the transfer of chunk 1 from trainer 0"));
  EXPECT_EQ(b.count<UpdateDone>(), 0u) << "the transfer may still write the slot";
  b.land(1, 0, Status(StatusCode::kCancelled, "given up"));
  EXPECT_EQ(b.update_result().info().reason, Reason::kStalled);
}

TEST(ConsumerWatchdog, NamesTheSignalsThatAreNotConfirmed) {
  ConsumerBench b({.groups = 2, .producers = 2});
  b.start(1, 10);
  for (const std::uint32_t chunk : {0u, 1u}) {
    b.ready(chunk);
    b.land(chunk);
    b.scattered(chunk);
    b.posted(chunk);
  }
  b.machine.tick(300 * kSecond, b.out);
  EXPECT_THAT(
      b.update_result().message(),
      HasSubstr(
          "trainer 0 to confirm the signals of groups 0-1; trainer 1 to confirm the signals of groups 0-1"));
}

// Goal: slow is not dead: each answer, of whatever kind, is progress.
TEST(ConsumerWatchdog, EveryAnswerHoldsItOff) {
  for (const Path path : {Path::kPacked, Path::kMapped, Path::kDirect}) {
    for (const bool staged : {false, true}) {
      SCOPED_TRACE(std::string(to_string(path)) + (staged ? " staged" : ""));
      ConsumerBench b({.groups = 4, .names_per_group = 2, .producers = 2, .path = path}, 0, staged);
      const std::int64_t step = 300 * kSecond - 1;
      for (const std::uint64_t sync : {1u, 2u}) {
        b.now += 1000 * kSecond;
        b.start(sync, 9 + sync);
        b.run_to_end(step);
        EXPECT_EQ(b.count<ReportFailure>(), 0u);
        ASSERT_EQ(b.update_result(), Status());
        b.take();
        b.now += step;
        ASSERT_EQ(b.machine.finish_update(b.now, sync, b.out), Status());
        b.run_to_end(step);
        EXPECT_EQ(b.finish_result(), Status());
        b.take();
      }
    }
  }
}

TEST(ConsumerWatchdog, LeavesPullsThatWaitForTheirGroupToTheProducers) {
  ConsumerBench b({.groups = 3});
  b.machine.tick(1000 * kSecond, b.out);
  b.start(1, 10);
  b.machine.tick(5000 * kSecond, b.out);
  EXPECT_EQ(b.count<ReportFailure>(), 0u) << "others may be slow";
}

// ---- shutdown -----------------------------------------------------------------------------------

TEST(ConsumerShutdown, DrainsFromEveryState) {
  {
    ConsumerBench b({.groups = 1});
    b.machine.shutdown(b.out);
    EXPECT_THAT(b.out, IsEmpty());
    EXPECT_EQ(b.machine.start_update(0, 1, 1, nullptr, b.out).info().reason, Reason::kShutdown);
  }
  {
    ConsumerBench b({.groups = 2});
    b.start(1, 10);
    b.ready(0);
    b.machine.shutdown(b.out);
    b.machine.shutdown(b.out);
    EXPECT_EQ(b.count<ReportFailure>(), 1u);
    EXPECT_TRUE(b.machine.in_flight());
    EXPECT_EQ(b.count<UpdateDone>(), 0u);
    b.land(0);
    EXPECT_EQ(b.update_result().info().reason, Reason::kShutdown);
    EXPECT_FALSE(b.machine.in_flight());
    EXPECT_EQ(b.machine.update(0, b.out).info().reason, Reason::kShutdown);
  }
  {
    ConsumerBench b({.groups = 1}, 0, true);  // committing: the commit completes
    b.start(1, 10);
    b.ready(0);
    b.land(0);
    b.scattered(0);
    b.ack_all();
    ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
    b.machine.shutdown(b.out);
    b.copied();
    b.posted(0);
    EXPECT_EQ(b.finish_result(), Status());
  }
  {
    ConsumerBench b({.groups = 1});  // after an error
    b.start(1, 10);
    b.machine.fail(0, 1, kBroken, b.out);
    b.take();
    b.machine.shutdown(b.out);
    EXPECT_THAT(b.out, IsEmpty());
  }
}

// ---- a storm ------------------------------------------------------------------------------------

// Answers in any order, a failure somewhere or nowhere: a slot is never written while its scatter reads it,
// at most K pulls are ahead of the oldest chunk not landed, signals go out exactly once and never before
// their chunks were read, and the update ends once, with nothing in flight when it failed.
RC_GTEST_PROP(ConsumerStorm, KeepsItsInvariants, ()) {
  const auto seed = *rc::gen::arbitrary<std::uint64_t>();
  Random random(seed);
  TinyOptions options;
  options.groups = 1 + static_cast<std::uint32_t>(random.below(6));
  options.names_per_group = 1 + static_cast<std::uint32_t>(random.below(3));
  options.producers = 1 + static_cast<std::uint32_t>(random.below(3));
  options.pipeline_stages = random.chance(0.5);
  options.modules_span_groups = random.chance(0.3);
  options.ring_depth = 1 + static_cast<std::uint32_t>(random.below(4));
  options.path = random.chance(0.4) ? Path::kMapped : Path::kPacked;
  options.max_chunk_bytes = random.chance(0.5) ? 64 : 1024;
  options.pull_split = 1 + static_cast<std::uint32_t>(random.below(2));
  ConsumerBench b(options);
  std::map<std::uint32_t, std::uint32_t> slot_reader;  // slot -> chunk whose scatter runs or is due

  for (std::uint64_t sync = 1; sync <= 4; ++sync) {
    const bool fails = random.chance(0.4);
    RC_ASSERT(b.machine.start_update(0, sync, sync, nullptr, b.out).ok());
    RC_ASSERT(b.machine.update(0, b.out).ok());
    std::vector<ConsumerAction> todo;
    std::set<std::uint32_t> landed, written;
    std::set<std::pair<std::uint32_t, std::uint32_t>> signalled;
    std::map<std::uint32_t, std::uint32_t> slot_writer;
    std::map<std::uint32_t, std::size_t> runs_left;
    int done = 0;
    Status result;
    const auto read_ended = [&](std::uint32_t group) {
      for (std::uint32_t c = 0; c < b.plan->chunks.size(); ++c) {
        if (b.plan->chunks[c].group == group && !landed.contains(c)) return false;
      }
      return true;
    };
    const auto collect = [&] {
      for (ConsumerAction& action : b.take()) {
        if (const auto* pull = std::get_if<SendPull>(&action)) {
          std::size_t ahead = 0;
          for (std::uint32_t c = 0; c < pull->pull.chunk; ++c) ahead += landed.contains(c) ? 0 : 1;
          RC_ASSERT(ahead < options.ring_depth);
        } else if (const auto* transfer = std::get_if<StartTransfer>(&action)) {
          RC_ASSERT(!slot_reader.contains(transfer->slot));
          const auto [at, fresh] = slot_writer.emplace(transfer->slot, transfer->chunk);
          RC_ASSERT(at->second == transfer->chunk);
        } else if (const auto* scatter = std::get_if<StartScatter>(&action)) {
          RC_ASSERT(landed.contains(scatter->chunk));
        } else if (const auto* signals = std::get_if<SendSignals>(&action)) {
          for (const std::uint32_t group : signals->groups) {
            RC_ASSERT(signalled.emplace(signals->producer, group).second);
            RC_ASSERT(b.machine.state() == WorkerState::kFailed || read_ended(group));
          }
        } else if (const auto* over = std::get_if<UpdateDone>(&action)) {
          ++done;
          result = over->status;
          if (!result.ok()) RC_ASSERT(!b.machine.in_flight());
        }
        todo.push_back(std::move(action));
      }
    };
    collect();
    while (!todo.empty()) {
      const std::size_t pick = static_cast<std::size_t>(random.below(todo.size()));
      const ConsumerAction action = todo[pick];
      todo.erase(todo.begin() + static_cast<std::ptrdiff_t>(pick));
      const Status status = fails && random.chance(0.05) ? kBroken : Status();
      if (const auto* pull = std::get_if<SendPull>(&action)) {
        if (status.ok()) {
          b.ready(pull->pull.chunk, pull->pull.run);
        } else {
          b.machine.pull_failed(0, pull->producer, pull->pull, status, b.out);
        }
      } else if (const auto* transfer = std::get_if<StartTransfer>(&action)) {
        if (!runs_left.contains(transfer->chunk))
          runs_left[transfer->chunk] = b.plan->chunks[transfer->chunk].runs.size();
        if (--runs_left[transfer->chunk] == 0) {
          landed.insert(transfer->chunk);
          slot_writer.erase(transfer->slot);
          slot_reader[transfer->slot] = transfer->chunk;
        }
        b.land(transfer->chunk, transfer->run, status);
      } else if (const auto* scatter = std::get_if<StartScatter>(&action)) {
        slot_reader.erase(scatter->slot);
        b.scattered(scatter->chunk, status);
      } else if (const auto* copy = std::get_if<StartCopy>(&action)) {
        landed.insert(copy->chunk);
        b.scattered(copy->chunk, status);
      } else if (const auto* post = std::get_if<StartPost>(&action)) {
        b.posted(post->chunk, status);
      } else if (const auto* signals = std::get_if<SendSignals>(&action)) {
        b.machine.signals_acked(0, signals->producer, signals->sync_id, signals->groups, b.out);
      }
      collect();
    }
    RC_ASSERT(done >= 1);
    RC_ASSERT(!b.machine.in_flight());
    if (b.machine.state() == WorkerState::kPrepared) {
      RC_ASSERT(result.ok());
      std::size_t owners = 0;
      for (const auto& set : b.plan->group_owners) owners += set.size();
      RC_ASSERT(signalled.size() == owners);
      RC_ASSERT(b.machine.finish_update(0, sync, b.out).ok());
      RC_ASSERT(*b.machine.version() == sync);
    } else {
      RC_ASSERT(!result.ok());
      slot_reader.clear();
    }
    b.take();
  }
}

}  // namespace
}  // namespace shardpull::protocol_testing
