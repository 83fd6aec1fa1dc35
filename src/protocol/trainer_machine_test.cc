// The rules of a rank's gather loop and of the sender: docs/PROTOCOL.md, "Trainer".
#include "protocol/trainer_machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <set>

#include "base/random.h"
#include "protocol/protocol_testing.h"

namespace shardpull::protocol_testing {
namespace {

using namespace trainer_action;  // NOLINT
using namespace sender_action;   // NOLINT
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const Status kBroken(StatusCode::kInternal, "broken");

// ---- one rank -----------------------------------------------------------------------------------

struct RankBench {
  explicit RankBench(std::uint32_t lookahead) : machine(lookahead) {}
  std::vector<std::uint32_t> asked() const {
    std::vector<std::uint32_t> groups;
    for (const AskSource& ask : of_kind<AskSource>(out)) groups.push_back(ask.group);
    return groups;
  }
  std::vector<std::uint32_t> released() const {
    std::vector<std::uint32_t> groups;
    for (const Release& one : of_kind<Release>(out)) groups.push_back(one.group);
    return groups;
  }
  template <typename T>
  std::size_t count() const {
    return of_kind<T>(out).size();
  }
  TrainerMachine machine;
  TrainerActions out;
};

TEST(TrainerCredit, AtMostLookaheadPlusOneGroupsAreResident) {
  for (const std::uint32_t lookahead : {0u, 1u, 3u}) {
    SCOPED_TRACE(lookahead);
    RankBench b(lookahead);
    ASSERT_EQ(b.machine.begin(1, {2, 3, 5, 7, 8, 9}, false, b.out), Status());
    const std::vector<std::uint32_t> groups{2, 3, 5, 7, 8, 9};
    for (std::uint32_t i = 0; i <= lookahead; ++i) {
      EXPECT_EQ(b.asked().size(), i + 1) << "one call at a time, in order";
      b.machine.published(groups[i], b.out);
    }
    EXPECT_EQ(b.asked().size(), lookahead + 1) << "credit is waited for BEFORE the source is asked";
    EXPECT_EQ(b.machine.resident(), lookahead + 1);
    b.machine.group_freed(groups[lookahead], b.out);
    EXPECT_EQ(b.asked().back(), groups[lookahead + 1]);
    EXPECT_EQ(b.machine.peak_resident(), lookahead + 1);
  }
}

TEST(TrainerCredit, AResidentRankNeedsNone) {
  RankBench b(0);
  ASSERT_EQ(b.machine.begin(1, {2, 3, 5}, true, b.out), Status());
  EXPECT_THAT(b.asked(), ElementsAre(2u)) << "still one call at a time, in order";
  b.machine.published(2, b.out);
  b.machine.published(3, b.out);
  EXPECT_THAT(b.asked(), ElementsAre(2u, 3u, 5u)) << "nothing has been freed";
  b.machine.group_freed(3, b.out);
  EXPECT_THAT(b.released(), ElementsAre(3u)) << "a release follows each free";
  b.machine.published(5, b.out);
  EXPECT_EQ(b.count<AskEnd>(), 1u);
  b.machine.source_ended(b.out);
  EXPECT_EQ(b.count<EndProducer>(), 1u);
  b.machine.group_freed(2, b.out);
  b.machine.group_freed(5, b.out);
  EXPECT_THAT(b.released(), ElementsAre(3u, 2u, 5u));
  EXPECT_EQ(b.machine.peak_resident(), 3u);
  b.machine.producer_ended(b.out);
  EXPECT_EQ(b.count<RankDone>(), 1u);

  ASSERT_EQ(b.machine.begin(2, {0, 1}, false, b.out), Status());
  b.machine.published(0, b.out);
  EXPECT_EQ(b.asked().back(), 0u) << "the next sync waits for credit again";
}

TEST(TrainerCredit, AFailedResidentSyncReleasesEverything) {
  RankBench b(0);
  ASSERT_EQ(b.machine.begin(1, {0, 1, 2}, true, b.out), Status());
  b.machine.published(0, b.out);
  b.machine.published(1, b.out);
  b.machine.fail(Status(StatusCode::kInternal, "x"), b.out);
  b.machine.producer_quiet(b.out);
  EXPECT_THAT(b.released(), IsEmpty()) << "the source call under way has not returned";
  b.machine.source_returned(b.out);
  EXPECT_THAT(b.released(), ElementsAre(0u, 1u, 2u));
  EXPECT_EQ(b.count<RankDone>(), 1u);
}

TEST(TrainerCredit, GroupsFreeOutOfOrder) {
  RankBench b(1);
  ASSERT_EQ(b.machine.begin(1, {0, 1, 2}, false, b.out), Status());
  b.machine.published(0, b.out);
  b.machine.published(1, b.out);
  b.machine.group_freed(1, b.out);
  EXPECT_THAT(b.released(), ElementsAre(1u));
  EXPECT_THAT(b.asked(), ElementsAre(0u, 1u, 2u));
  b.machine.published(2, b.out);
  EXPECT_EQ(b.count<AskEnd>(), 0u);
  b.machine.group_freed(1, b.out);  // again, and a stranger: no effect
  b.machine.group_freed(9, b.out);
  EXPECT_EQ(b.machine.resident(), 2u);
}

TEST(TrainerCredit, TheSourceIsAskedOnceMoreAndTheProducerEndsAfterIt) {
  RankBench b(0);
  ASSERT_EQ(b.machine.begin(1, {4}, false, b.out), Status());
  b.machine.published(4, b.out);
  EXPECT_EQ(b.count<AskEnd>(), 0u) << "asking needs credit, also for the last time";
  b.machine.group_freed(4, b.out);
  EXPECT_EQ(b.count<AskEnd>(), 1u);
  EXPECT_EQ(b.count<EndProducer>(), 0u);
  b.machine.source_ended(b.out);
  EXPECT_EQ(b.count<EndProducer>(), 1u);
  EXPECT_EQ(b.count<RankDone>(), 0u);
  b.machine.producer_ended(b.out);
  ASSERT_EQ(b.count<RankDone>(), 1u);
  EXPECT_EQ(of_kind<RankDone>(b.out)[0].status, Status());
  EXPECT_FALSE(b.machine.running());
}

TEST(TrainerCredit, GroupsFreedAfterTheSourceEndedAreReleasedToo) {
  RankBench b(3);
  ASSERT_EQ(b.machine.begin(1, {0, 1}, false, b.out), Status());
  b.machine.published(0, b.out);
  b.machine.published(1, b.out);
  EXPECT_EQ(b.count<AskEnd>(), 1u);
  b.machine.group_freed(1, b.out);
  EXPECT_EQ(b.count<EndProducer>(), 0u) << "the source still runs";
  b.machine.source_ended(b.out);
  b.machine.group_freed(0, b.out);
  b.machine.producer_ended(b.out);
  EXPECT_THAT(b.released(), ElementsAre(1u, 0u));
  EXPECT_EQ(b.count<EndProducer>(), 1u);
  EXPECT_EQ(b.count<RankDone>(), 1u);
}

TEST(TrainerCredit, ARankWithoutGroupsStillRunsItsSourceToTheEnd) {
  RankBench b(1);
  ASSERT_EQ(b.machine.begin(1, {}, false, b.out), Status());
  EXPECT_EQ(b.count<AskEnd>(), 1u);
  b.machine.source_ended(b.out);
  b.machine.producer_ended(b.out);
  EXPECT_EQ(b.count<RankDone>(), 1u);
}

TEST(TrainerCredit, OneSyncAtATime) {
  RankBench b(1);
  ASSERT_EQ(b.machine.begin(1, {0}, false, b.out), Status());
  EXPECT_THAT(b.machine.begin(2, {0}, false, b.out).message(), HasSubstr("while sync 1 runs"));
}

TEST(TrainerFail, ReferencesAreDroppedWhenSourceCallAndPacksHaveEnded) {
  for (const bool quiet_first : {false, true}) {
    RankBench b(2);
    ASSERT_EQ(b.machine.begin(1, {0, 1, 2, 3}, false, b.out), Status());
    b.machine.published(0, b.out);
    b.machine.published(1, b.out);  // group 2 is being asked for
    b.machine.fail(kBroken, b.out);
    b.machine.fail(Status(StatusCode::kUnknown, "a later one"), b.out);
    if (quiet_first) b.machine.producer_quiet(b.out);
    EXPECT_THAT(b.released(), IsEmpty());
    b.machine.source_returned(b.out);
    if (!quiet_first) {
      EXPECT_THAT(b.released(), IsEmpty()) << "a pack may read them";
      b.machine.producer_quiet(b.out);
    }
    EXPECT_THAT(b.released(), ElementsAre(0u, 1u, 2u));
    ASSERT_EQ(b.count<RankDone>(), 1u);
    EXPECT_EQ(of_kind<RankDone>(b.out)[0].status, kBroken) << "the first error is kept";
    EXPECT_THAT(b.asked(), ElementsAre(0u, 1u, 2u)) << "nothing is asked any more";
  }
}

TEST(TrainerFail, WhileWaitingForCreditAndInEndSync) {
  RankBench waiting(0);
  ASSERT_EQ(waiting.machine.begin(1, {0, 1}, false, waiting.out), Status());
  waiting.machine.published(0, waiting.out);
  waiting.machine.fail(kBroken, waiting.out);
  waiting.machine.producer_quiet(waiting.out);
  EXPECT_EQ(waiting.count<RankDone>(), 1u);
  EXPECT_THAT(waiting.released(), ElementsAre(0u));

  RankBench ending(1);
  ASSERT_EQ(ending.machine.begin(1, {0}, false, ending.out), Status());
  ending.machine.published(0, ending.out);
  ending.machine.source_ended(ending.out);
  ending.machine.fail(kBroken, ending.out);
  ending.machine.producer_ended(ending.out);  // cannot be, and does not count
  EXPECT_EQ(ending.count<RankDone>(), 0u);
  ending.machine.producer_quiet(ending.out);
  EXPECT_EQ(of_kind<RankDone>(ending.out).at(0).status, kBroken);

  ending.out.clear();
  ASSERT_EQ(ending.machine.begin(2, {0}, false, ending.out), Status()) << "the next sync starts fresh";
  EXPECT_THAT(ending.asked(), ElementsAre(0u));
}

RC_GTEST_PROP(TrainerCreditStorm, NeverMoreThanTheBoundAndAlwaysToTheEnd, ()) {
  const auto seed = *rc::gen::arbitrary<std::uint64_t>();
  Random random(seed);
  const auto lookahead = static_cast<std::uint32_t>(random.below(4));
  RankBench b(lookahead);
  std::vector<std::uint32_t> groups(random.below(12));
  for (std::uint32_t i = 0; i < groups.size(); ++i) groups[i] = i;
  std::vector<std::uint32_t> published;
  RC_ASSERT(b.machine.begin(1, groups, false, b.out).ok());
  bool asking_end = false, ended = false, over = false;
  std::optional<std::uint32_t> asked;
  std::size_t next = 0;
  const auto collect = [&] {
    for (const TrainerAction& action : std::exchange(b.out, {})) {
      if (const auto* ask = std::get_if<AskSource>(&action)) {
        RC_ASSERT(!asked && ask->group == next++);
        asked = ask->group;
        RC_ASSERT(published.size() + 1 <= lookahead + 1);
      }
      if (std::holds_alternative<AskEnd>(action)) asking_end = true;
      if (std::holds_alternative<EndProducer>(action)) ended = true;
      if (std::holds_alternative<RankDone>(action)) over = true;
    }
  };
  collect();
  for (int step = 0; step < 1000 && !over; ++step) {
    if (asked && random.chance(0.5)) {
      published.push_back(*asked);
      b.machine.published(*std::exchange(asked, std::nullopt), b.out);
    } else if (!published.empty() && random.chance(0.5)) {
      const std::size_t pick = static_cast<std::size_t>(random.below(published.size()));
      const std::uint32_t group = published[pick];
      published.erase(published.begin() + static_cast<std::ptrdiff_t>(pick));
      b.machine.group_freed(group, b.out);
    } else if (asking_end) {
      asking_end = false;
      b.machine.source_ended(b.out);
    } else if (ended && published.empty()) {
      b.machine.producer_ended(b.out);
    }
    collect();
  }
  RC_ASSERT(over);
  RC_ASSERT(next == groups.size());
}

// ---- the sender ---------------------------------------------------------------------------------

struct SenderBench {
  explicit SenderBench(SenderConfig config = {.world_size = 2, .num_consumers = 4, .workers_per_replica = 2})
      : config(config), machine(config) {
    for (std::uint32_t c = 0; c < config.num_consumers; ++c) machine.worker_joined(c);
  }
  void begin(std::uint64_t sync, std::vector<std::uint32_t> live = {0, 1, 2, 3}) {
    id = sync;
    EXPECT_EQ(machine.begin(now, sync, std::move(live), out), Status());
  }
  void all_began() {
    for (std::uint32_t r = 0; r < config.world_size; ++r) machine.rank_began(now, r, id, out);
  }
  void started(std::uint32_t c, const Status& status = {}) {
    machine.update_started(now, c, id, status, out);
  }
  void prepared(std::uint32_t c, const Status& status = {}) { machine.prepared(now, c, id, status, out); }
  void finished(std::uint32_t c, const Status& status = {}) { machine.finished(now, c, id, status, out); }
  void ended(std::uint32_t r, const Status& status = {}) { machine.rank_ended(now, r, id, status, out); }
  void to_updating(const std::vector<std::uint32_t>& live = {0, 1, 2, 3}) {
    all_began();
    for (const std::uint32_t c : live) started(c);
    out.clear();
  }
  void to_finishing() {
    to_updating();
    for (std::uint32_t c = 0; c < 4; ++c) prepared(c);
    ended(0);
    ended(1);
    out.clear();
  }
  // Everybody still in the sync answers a failure.
  void drain() {
    for (std::uint32_t c = 0; c < config.num_consumers; ++c) prepared(c, kBroken);
    for (std::uint32_t r = 0; r < config.world_size; ++r) ended(r, kBroken);
  }
  template <typename T>
  std::size_t count() const {
    return of_kind<T>(out).size();
  }
  SyncDone done() const {
    const auto all = of_kind<SyncDone>(out);
    EXPECT_EQ(all.size(), 1u);
    return all.empty() ? SyncDone{} : all[0];
  }
  SenderConfig config;
  SenderMachine machine;
  SenderActions out;
  std::uint64_t id = 0;
  std::int64_t now = 0;
};

TEST(SenderSync, GoesThroughItsStepsInOrder) {
  SenderBench b;
  b.begin(1);
  EXPECT_EQ(b.count<OpenSync>(), 2u);
  EXPECT_EQ(b.count<StartUpdate>(), 4u);
  EXPECT_THAT(b.machine.begin(0, 2, {0, 1}, b.out).message(), HasSubstr("while sync 1 runs"));
  b.all_began();
  for (std::uint32_t c = 0; c < 3; ++c) b.started(c);
  EXPECT_EQ(b.count<Update>(), 0u) << "all have started first";
  b.started(3);
  EXPECT_EQ(b.count<Update>(), 4u);
  for (std::uint32_t c = 0; c < 4; ++c) b.prepared(c);
  b.ended(1);
  EXPECT_EQ(b.count<Finish>(), 0u) << "prepared everywhere AND ended on every rank";
  b.ended(0);
  EXPECT_EQ(b.count<Finish>(), 4u);
  for (std::uint32_t c = 0; c < 3; ++c) b.finished(c);
  EXPECT_EQ(b.count<CloseSync>(), 0u);
  b.finished(3);
  EXPECT_EQ(b.count<CloseSync>(), 2u);
  EXPECT_EQ(b.done().status, Status());
  EXPECT_THAT(b.done().lost_consumers, IsEmpty());
  EXPECT_FALSE(b.machine.running());
}

// Goal: slow is not dead: each report of any member, and each loss, begins the wait for the next anew.
TEST(SenderSync, EveryReportHoldsTheTimeoutOff) {
  SenderBench b(
      {.world_size = 3, .num_consumers = 4, .workers_per_replica = 1, .step_timeout_ns = 10 * kSecond});
  const auto wait = [&] {
    b.now += 10 * kSecond - 1;
    b.machine.tick(b.now, b.out);
  };
  for (const std::uint64_t sync : {1u, 2u}) {
    b.now += 1000 * kSecond;
    b.begin(sync, sync == 1 ? std::vector<std::uint32_t>{0, 1, 2, 3} : std::vector<std::uint32_t>{0, 2});
    b.machine.tick(b.now, b.out);
    b.now += 5 * kSecond;
    b.all_began();
    wait();
    if (sync == 1) {
      b.machine.consumer_lost(b.now, 3, kBroken, b.out);
      wait();
      b.machine.consumer_lost(b.now, 1, kBroken, b.out);
      wait();
    }
    b.started(0);
    wait();
    b.started(2);
    for (const std::uint32_t rank : {2u, 0u, 1u}) {
      wait();
      b.ended(rank);
    }
    for (const std::uint32_t c : {2u, 0u}) {
      wait();
      b.prepared(c);
    }
    for (const std::uint32_t c : {0u, 2u}) {
      wait();
      b.finished(c);
    }
    EXPECT_EQ(b.done().status, Status());
    const std::vector<std::uint32_t> lost =
        sync == 1 ? std::vector<std::uint32_t>{1, 3} : std::vector<std::uint32_t>{};
    EXPECT_EQ(b.done().lost_consumers, lost);
    b.out.clear();
  }
}

// Goal: a failed sync is closed once the last of those who owe an answer has been lost instead.
TEST(SenderFailure, LossesAnswerToo) {
  SenderBench b;
  b.begin(1);
  b.to_updating();
  b.prepared(0, kBroken);
  b.prepared(1, kBroken);
  b.ended(0, kBroken);
  for (const std::uint32_t c : {3u, 2u}) b.machine.consumer_lost(0, c, kBroken, b.out);
  EXPECT_TRUE(b.machine.running());
  b.machine.rank_lost(0, 1, kBroken, b.out);
  EXPECT_FALSE(b.machine.running());
  EXPECT_EQ(b.done().status.message().find("drain"), std::string::npos);
}

TEST(SenderSync, RefusesABadLiveSet) {
  SenderBench b;
  const auto refused = [&](std::uint64_t sync, std::vector<std::uint32_t> live) {
    return b.machine.begin(0, sync, std::move(live), b.out).message();
  };
  EXPECT_THAT(refused(1, {}), HasSubstr("empty"));
  EXPECT_THAT(refused(1, {0, 4}), HasSubstr("live consumer 4"));
  EXPECT_THAT(refused(1, {1, 0}), HasSubstr("not ascending"));
  EXPECT_THAT(refused(1, {0, 1, 2}), HasSubstr("worker 2 without worker 3 of the same replica"));
  EXPECT_THAT(b.out, IsEmpty());
  b.begin(5, {2, 3});
  EXPECT_EQ(b.count<StartUpdate>(), 2u);
  SenderBench again;
  again.begin(5);
  again.drain();
  EXPECT_THAT(again.machine.begin(0, 5, {0, 1}, again.out).message(), HasSubstr("not after sync 5"));
}

TEST(SenderFailure, OfAnyMemberReachesEveryRankAndConsumerAndNobodyCommits) {
  const auto failing = [](auto fail, const char* name) {
    SCOPED_TRACE(name);
    SenderBench b;
    b.begin(1);
    b.to_updating();
    fail(b);
    EXPECT_EQ(b.count<FailRank>(), 2u);
    EXPECT_EQ(b.count<Finish>(), 0u);
    b.machine.failed(0, {Role::kTrainer, 1}, 1, Status(StatusCode::kUnknown, "a later one"), b.out);
    EXPECT_EQ(b.count<FailRank>(), 2u);
    b.drain();
    EXPECT_EQ(b.count<Finish>(), 0u);
    EXPECT_EQ(b.count<CloseSync>(), 2u);
    EXPECT_THAT(b.done().status.message(), HasSubstr("broken"));
    EXPECT_THAT(b.done().status.message(), HasSubstr(name));
    b.out.clear();
    b.begin(2);  // and the next one runs
    EXPECT_EQ(b.count<OpenSync>(), 2u);
  };
  failing([](SenderBench& b) { b.prepared(2, kBroken); }, "worker 2");
  failing([](SenderBench& b) { b.ended(1, kBroken); }, "trainer 1");
  failing([](SenderBench& b) { b.machine.failed(0, {Role::kWorker, 3}, 1, kBroken, b.out); }, "worker 3");
  failing([](SenderBench& b) { b.machine.failed(0, {Role::kTrainer, 0}, 1, kBroken, b.out); }, "trainer 0");
}

TEST(SenderFailure, AFailingStartUpdateFailsTheSyncForEverybody) {
  SenderBench b;
  b.begin(1);
  b.started(0);
  b.out.clear();
  b.started(1, kBroken);
  EXPECT_EQ(b.count<FailRank>(), 2u);
  EXPECT_EQ(b.count<FailConsumer>(), 3u) << "not to the one that refused: it is not in the sync";
  b.prepared(0, kBroken);
  b.started(2);  // its answer comes late, and then the one to the failure
  b.prepared(2, kBroken);
  b.prepared(3, kBroken);
  EXPECT_EQ(b.count<SyncDone>(), 0u);
  b.ended(0, kBroken);
  b.ended(1, kBroken);
  EXPECT_THAT(b.done().status.message(), HasSubstr("worker 1: start_update: broken"));
  EXPECT_EQ(b.count<Update>(), 0u);
}

TEST(SenderFailure, ThePathOfErrorsNeverWaitsWithoutALimit) {
  SenderBench b;
  b.begin(1);
  b.to_updating();
  b.machine.failed(0, {Role::kTrainer, 1}, 1, kBroken, b.out);
  b.now = b.config.drain_timeout_ns - 1;
  b.machine.tick(b.now, b.out);
  EXPECT_EQ(b.count<SyncDone>(), 0u);
  b.now = b.config.drain_timeout_ns;
  b.machine.tick(b.now, b.out);
  EXPECT_EQ(b.count<SyncDone>(), 1u);
  EXPECT_EQ(b.count<CloseSync>(), 2u);
}

TEST(SenderFailure, DuringTheCommitOthersComplete) {
  SenderBench b;
  b.begin(1);
  b.to_finishing();
  b.finished(0);
  b.finished(1, kBroken);
  b.finished(2);
  EXPECT_EQ(b.count<SyncDone>(), 0u);
  b.finished(3);
  EXPECT_THAT(b.done().status.message(), HasSubstr("worker 1: finish_update: broken"));
}

TEST(SenderFailure, ReportsOfOtherSyncsAndStrangersDoNotCount) {
  SenderBench b;
  b.begin(7);
  b.to_updating();
  b.machine.failed(0, {Role::kTrainer, 1}, 6, kBroken, b.out);
  b.machine.prepared(0, 0, 6, kBroken, b.out);
  b.machine.prepared(0, 99, 7, kBroken, b.out);
  b.machine.rank_ended(0, 9, 7, kBroken, b.out);
  b.machine.rank_ended(0, 0, 8, kBroken, b.out);
  b.machine.failed(0, {Role::kWorker, 99}, 7, kBroken, b.out);
  b.machine.failed(0, {Role::kTrainer, 99}, 7, kBroken, b.out);
  b.finished(0);  // nobody asked it to
  EXPECT_THAT(b.out, IsEmpty());
}

TEST(SenderLoss, TheSyncGoesOnWithoutTheReplicaAndNamesTheLost) {
  SenderBench b;
  b.begin(1);
  b.to_updating();
  b.machine.consumer_lost(0, 2, Status(StatusCode::kUnavailable, "killed"), b.out);
  ASSERT_EQ(b.count<FailConsumer>(), 1u) << "its mate leaves too";
  EXPECT_EQ(of_kind<FailConsumer>(b.out)[0].consumer, 3u);
  EXPECT_EQ(b.count<FailRank>(), 0u);
  b.prepared(3, kBroken);  // the mate's last words do not fail the others
  b.machine.failed(0, {Role::kWorker, 3}, 1, kBroken, b.out);
  b.prepared(0);
  b.prepared(1);
  b.ended(0);
  b.ended(1);
  EXPECT_EQ(b.count<Finish>(), 2u);
  b.finished(0);
  b.finished(1);
  EXPECT_EQ(b.done().status, Status());
  EXPECT_THAT(b.done().lost_consumers, ElementsAre(2u));
  EXPECT_THAT(b.done().dropped_consumers, ElementsAre(3u));
}

// A worker whose link has broken asks its mates how the sync ended, perhaps before its loss is known here:
// that they leave the sync with it is no failure of the others'.
TEST(SenderLoss, AMateThatLeavesWithOneThatHasLostTheSenderReportsALoss) {
  const Status asked(StatusCode::kUnavailable, "worker 2 has lost trainer 0 and asks how sync 1 ended",
                     {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = "worker 2"});
  for (int how = 0; how < 4; ++how) {
    SCOPED_TRACE(how);
    SenderBench b;
    b.begin(1);
    if (how == 0) {
      b.machine.update_started(0, 3, 1, asked, b.out);
      b.all_began();
      b.started(0);
      b.started(1);
    } else if (how == 3) {
      b.to_finishing();
      b.finished(3, asked);
    } else {
      b.to_updating();
      if (how == 1) b.prepared(3, asked);
      if (how == 2) b.machine.failed(0, {Role::kWorker, 3}, 1, asked, b.out);
    }
    EXPECT_EQ(b.count<FailRank>(), 0u);
    if (how == 1) {
      SenderBench unheard;
      unheard.begin(1);
      unheard.to_updating();
      unheard.prepared(3, asked);
      for (const std::uint32_t c : {0u, 1u, 2u}) unheard.prepared(c);
      for (const std::uint32_t r : {0u, 1u}) unheard.ended(r);
      EXPECT_EQ(unheard.count<Finish>(), 0u) << "worker 2's loss is awaited";
    }
    b.machine.consumer_lost(0, 2, kBroken, b.out);  // by now the hub knows
    if (how != 3) {
      b.prepared(0);
      b.prepared(1);
      b.ended(0);
      b.ended(1);
    }
    b.finished(0);
    b.finished(1);
    EXPECT_EQ(b.done().status, Status());
    EXPECT_THAT(b.done().lost_consumers, ElementsAre(2u));
    EXPECT_THAT(b.done().dropped_consumers, ElementsAre(3u));
  }
}

TEST(SenderLoss, IsNoticedInEveryPhase) {
  for (int phase = 0; phase < 3; ++phase) {
    SCOPED_TRACE(phase);
    SenderBench b;
    b.begin(1);
    if (phase == 1) b.to_updating();
    if (phase == 2) b.to_finishing();
    b.machine.consumer_lost(0, 0, kBroken, b.out);
    b.machine.consumer_lost(0, 1, kBroken, b.out);  // its mate dies too
    if (phase == 0) {
      b.all_began();
      b.started(2);
      b.started(3);
      EXPECT_EQ(b.count<Update>(), 2u);
    }
    if (phase < 2) {
      b.prepared(2);
      b.prepared(3);
      b.ended(0);
      b.ended(1);
    }
    b.finished(2);
    b.finished(3);
    EXPECT_EQ(b.done().status, Status());
    EXPECT_THAT(b.done().lost_consumers, ElementsAre(0u, 1u));
    EXPECT_THAT(b.done().dropped_consumers, IsEmpty());
  }
}

TEST(SenderLoss, OfTheLastReplicaOrWithTheSettingFailsNamingIt) {
  SenderBench last;
  last.begin(1, {0, 1});
  last.to_updating({0, 1});
  last.machine.consumer_lost(0, 1, kBroken, last.out);
  EXPECT_EQ(last.count<FailRank>(), 2u);
  last.drain();
  EXPECT_THAT(last.done().status.message(), HasSubstr("worker 1 was lost in sync 1"));
  EXPECT_THAT(last.done().lost_consumers, ElementsAre(1u));

  SenderBench strict(
      {.world_size = 2, .num_consumers = 4, .workers_per_replica = 2, .fail_on_consumer_loss = true});
  strict.begin(1);
  strict.to_updating();
  strict.machine.consumer_lost(0, 1, kBroken, strict.out);
  EXPECT_EQ(strict.count<FailRank>(), 2u);
  EXPECT_EQ(strict.count<FailConsumer>(), 3u);
  strict.drain();
  EXPECT_THAT(strict.done().status.message(), HasSubstr("worker 1 was lost"));
}

// Goal: a sync whose every worker is lost while it commits has reached nobody, whoever had committed by then;
// all of them are named.
TEST(SenderLoss, OfEverybodyWhileCommitting) {
  for (const bool confirmed : {false, true}) {
    SCOPED_TRACE(confirmed);
    SenderBench b;
    b.begin(1);
    b.to_finishing();
    if (confirmed) {
      b.finished(0);
      b.finished(1);
    }
    for (const std::uint32_t c : {0u, 1u}) b.machine.consumer_lost(0, c, kBroken, b.out);
    EXPECT_TRUE(b.machine.running());
    b.machine.consumer_lost(0, 3, kBroken, b.out);
    EXPECT_FALSE(b.machine.running());
    EXPECT_THAT(b.done().status.message(),
                AllOf(HasSubstr("worker 3 was lost in sync 1"), HasSubstr("workers 0-1 before")));
    EXPECT_EQ(b.done().status.info().reason, Reason::kPeerLost);
    EXPECT_THAT(b.done().lost_consumers, ElementsAre(0u, 1u, 3u));
    EXPECT_THAT(b.done().dropped_consumers, ElementsAre(2u));
    EXPECT_EQ(b.count<CloseSync>(), 2u);
  }
}

TEST(SenderLoss, AMemberKnownToBeDownIsLostAsTheSyncBegins) {
  SenderBench b;
  b.machine.consumer_lost(0, 3, kBroken, b.out);
  b.begin(1);
  EXPECT_EQ(b.count<StartUpdate>(), 3u);
  b.out.clear();
  b.to_updating({0, 1});
  b.prepared(0);
  b.prepared(1);
  b.ended(0);
  b.ended(1);
  b.finished(0);
  b.finished(1);
  EXPECT_THAT(b.done().lost_consumers, ElementsAre(3u));

  b.out.clear();
  b.machine.worker_joined(3);
  b.begin(2);
  EXPECT_EQ(b.count<StartUpdate>(), 4u);
}

TEST(SenderNext, AreTheWholeReplicasOfThoseThatHaveJoined) {
  SenderMachine machine({.world_size = 1, .num_consumers = 4, .workers_per_replica = 2});
  SenderActions out;
  EXPECT_THAT(machine.next_live(), IsEmpty());
  EXPECT_EQ(machine.awaited(), "a whole replica of workers; missing: worker 0, worker 1, worker 2, worker 3");
  for (const std::uint32_t c : {0u, 2u, 3u}) machine.worker_joined(c);
  EXPECT_THAT(machine.next_live(), ElementsAre(2, 3));
  EXPECT_EQ(machine.awaited(), "");
  EXPECT_EQ(machine.missing_workers(), "worker 1");
  machine.consumer_lost(0, 3, kBroken, out);
  EXPECT_THAT(machine.next_live(), IsEmpty());
  EXPECT_THAT(machine.awaited(), HasSubstr("missing: worker 1, worker 3 (" + kBroken.message() + ")"));
  machine.worker_joined(3);
  EXPECT_THAT(machine.next_live(), ElementsAre(2, 3));
}

TEST(SenderNext, ALossBetweenTwoSyncsFailsTheNextOneWhereThatIsAskedFor) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    SenderBench b(
        {.world_size = 2, .num_consumers = 4, .workers_per_replica = 2, .fail_on_consumer_loss = fails});
    b.machine.consumer_lost(0, 3, kBroken, b.out);
    const std::vector<std::uint32_t> all{0, 1, 2, 3}, left{0, 1};
    EXPECT_EQ(b.machine.next_live(), fails ? all : left);
    b.begin(1, b.machine.next_live());
    EXPECT_EQ(b.count<StartUpdate>(), fails ? 3u : 2u);
    ASSERT_EQ(b.count<FailConsumer>(), fails ? 3u : 0u);
    if (!fails) continue;
    EXPECT_THAT(of_kind<FailConsumer>(b.out)[0].status.message(), HasSubstr("worker 3 was lost in sync 1"));
    b.drain();
    EXPECT_EQ(b.machine.next_live(), left) << "the next one is not for it";
  }
}

TEST(SenderNext, OneThatIsBackFailsNothing) {
  SenderBench b(
      {.world_size = 2, .num_consumers = 4, .workers_per_replica = 2, .fail_on_consumer_loss = true});
  b.machine.consumer_lost(0, 3, kBroken, b.out);
  b.machine.rank_lost(0, 1, kBroken, b.out);
  b.machine.worker_joined(3);
  b.machine.take_back(1);
  b.begin(1, b.machine.next_live());
  EXPECT_EQ(b.count<StartUpdate>(), 4u);
  EXPECT_EQ(b.count<OpenSync>(), 2u);
  EXPECT_EQ(b.count<FailConsumer>(), 0u);
}

TEST(SenderNext, ALossInASyncIsNotMetAgain) {
  SenderBench b(
      {.world_size = 2, .num_consumers = 4, .workers_per_replica = 2, .fail_on_consumer_loss = true});
  b.begin(1);
  b.machine.consumer_lost(0, 3, kBroken, b.out);
  b.drain();
  b.out.clear();
  EXPECT_THAT(b.machine.next_live(), ElementsAre(0, 1));
  b.begin(2, b.machine.next_live());
  EXPECT_EQ(b.count<FailConsumer>(), 0u);
}

TEST(SenderNext, ARankThatNobodyStandsInForIsWaitedForUnlessItsLossIsToFailASync) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    SenderBench b(
        {.world_size = 2, .num_consumers = 4, .workers_per_replica = 2, .fail_on_consumer_loss = fails});
    b.machine.rank_lost(0, 1, kBroken, b.out);
    if (fails) {
      EXPECT_EQ(b.machine.awaited(), "");
      b.begin(1);
      EXPECT_THAT(of_kind<FailConsumer>(b.out).at(0).status.message(),
                  HasSubstr("trainer 1 was lost in sync 1"));
      b.drain();
    }
    EXPECT_EQ(b.machine.awaited(),
              "trainer 1 to come back, of whose weights nobody else has all (" + kBroken.message() + ")");
    b.machine.take_back(1);
    EXPECT_EQ(b.machine.awaited(), "");
  }
}

TEST(SenderLoss, OfARankFailsTheSyncNamingItUnlessCommitsAreUnderWay) {
  SenderBench b;
  b.begin(1);
  b.to_updating();
  b.machine.rank_lost(0, 1, kBroken, b.out);
  EXPECT_EQ(b.count<FailRank>(), 1u) << "to the living";
  EXPECT_EQ(b.count<FailConsumer>(), 4u);
  b.drain();
  EXPECT_THAT(b.done().status.message(), HasSubstr("trainer 1 was lost in sync 1"));
  EXPECT_EQ(b.count<CloseSync>(), 1u);

  SenderBench late;
  late.begin(1);
  late.to_finishing();
  late.machine.rank_lost(0, 1, kBroken, late.out);
  for (std::uint32_t c = 0; c < 4; ++c) late.finished(c);
  EXPECT_EQ(late.done().status, Status());
}

TEST(SenderWatch, EveryWaitHasALimitThatNamesWhoIsMissing) {
  const std::int64_t limit = SenderConfig{}.step_timeout_ns;
  SenderBench starting;
  starting.begin(1);
  starting.all_began();
  starting.started(0);
  starting.machine.tick(limit, starting.out);
  starting.drain();
  EXPECT_THAT(starting.done().status.message(), HasSubstr("start_update of workers 1-3"));

  SenderBench opening;
  opening.begin(1);
  opening.machine.rank_began(0, 0, 1, opening.out);
  for (std::uint32_t c = 0; c < 4; ++c) opening.started(c);
  opening.now = limit - 1;
  opening.prepared(0);
  opening.machine.tick(limit, opening.out);
  opening.drain();
  EXPECT_THAT(opening.done().status.message(), HasSubstr("trainer 1 did not begin the sync"));

  SenderBench updating;
  updating.begin(1);
  updating.to_updating();
  updating.machine.tick(100 * limit, updating.out);
  EXPECT_THAT(updating.out, IsEmpty()) << "the ranks' watchdogs see more";
  updating.now = 100 * limit;
  updating.ended(0);
  updating.ended(1);
  updating.prepared(2);
  updating.machine.tick(101 * limit, updating.out);
  updating.drain();
  EXPECT_THAT(updating.done().status.message(), HasSubstr("workers 0-1, 3 not prepared"));

  SenderBench finishing;
  finishing.begin(1);
  finishing.to_finishing();
  finishing.finished(0);
  finishing.machine.tick(limit, finishing.out);
  EXPECT_EQ(finishing.count<FailRank>(), 2u);
  finishing.machine.tick(limit + finishing.config.drain_timeout_ns, finishing.out);
  EXPECT_THAT(finishing.done().status.message(), HasSubstr("finish_update of workers 1-3"));
}

}  // namespace
}  // namespace shardpull::protocol_testing
