// Syncs of some names, on both sides: docs/PROTOCOL.md, "Syncs of some names".
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "protocol/protocol_testing.h"

namespace shardpull::protocol_testing {
namespace {

using namespace consumer_action;  // NOLINT
using namespace producer_action;  // NOLINT
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::Pair;

const Status kBroken(StatusCode::kDataLoss, "broken");

std::vector<std::uint32_t> freed(const ProducerBench& bench) {
  std::vector<std::uint32_t> groups;
  for (const GroupFreed& one : bench.all<GroupFreed>()) groups.push_back(one.group);
  return groups;
}

// ---- the producer -------------------------------------------------------------------------------

TEST(RestrictedProducer, RefusesABadSetAndGroupsWithoutAListedName) {
  ProducerBench b({.groups = 3});
  EXPECT_THAT(b.machine.begin_sync(0, 1, 1, {0}, {0}, {1, 0}, b.out).message(), HasSubstr("3 names take 1"));
  EXPECT_THAT(b.machine.begin_sync(0, 1, 1, {0}, {0}, {0}, b.out).message(), HasSubstr("lists none"));
  EXPECT_THAT(b.machine.begin_sync(0, 1, 1, {0}, {0, 2}, some_names(b.model, {2}), b.out).message(),
              HasSubstr("no name of group 0 is listed"));
  EXPECT_FALSE(b.machine.syncing());
  EXPECT_EQ(b.machine.begin_sync(0, 1, 1, {0}, {2}, some_names(b.model, {2}), b.out), Status());
}

TEST(RestrictedProducer, ServesTheListedNamesWithSequenceNumbersOfTheirOwn) {
  ProducerBench b({.groups = 3, .names_per_group = 2, .module_per_name = true, .max_chunk_bytes = 0});
  b.reserve_all();
  b.names = some_names(b.model, {1, 4, 5});  // half of group 0, group 2
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  ASSERT_EQ(b.publish(2), Status());
  b.pull(0, 0);
  b.pull(0, 1);
  const auto packs = b.all<Pack>();
  ASSERT_EQ(packs.size(), 2u);
  EXPECT_EQ(*packs[0].pull, restrict_pulls(b.pulls[0], b.names)[0]);
  EXPECT_EQ(packs[0].pull->bytes, 64u);
  EXPECT_EQ(packs[0].sources.size(), 1u);
  EXPECT_EQ(packs[1].pull->chunk_id, 2u);
  b.finish_packs();
  ASSERT_EQ(b.count<ReadyReply>(), 2u);
  EXPECT_EQ(b.all<ReadyReply>()[0].ready.bytes, 64u);
  EXPECT_EQ(b.all<ReadyReply>()[1].ready.slot, 1u);
  EXPECT_EQ(b.machine.packs(), 2u);
  EXPECT_EQ(b.machine.bytes_packed(), 64u + 128u);
  b.signal(0, {0, 2});
  EXPECT_THAT(freed(b), ElementsAre(0u, 2u));
  EXPECT_EQ(b.machine.end_sync(0, b.out), Status());
  EXPECT_EQ(b.count<SyncEnded>(), 1u) << "group 1 is not part of it";
}

TEST(RestrictedProducer, RefusesWhatIsNotListed) {
  ProducerBench b({.groups = 2});
  b.reserve_all();
  b.names = some_names(b.model, {1});
  ASSERT_EQ(b.begin(1), Status());
  b.machine.pull(0, b.life(0), {1, 0, 0, 0, 0, 0}, b.out);  // the chunk of group 0
  EXPECT_THAT(b.refusal(), HasSubstr("chunk 0 run 0 of worker 0 has none of the names of sync 1"));
  b.take();
  b.machine.pull(0, b.life(0), {1, 0, 1, 0, 0, 1}, b.out);  // its seq in the whole plan
  EXPECT_THAT(b.refusal(), HasSubstr("its seq is 0"));
  b.take();
  b.signal(0, {0});
  EXPECT_EQ(b.machine.drops().unknown, 1u);
  EXPECT_THAT(b.publish(0).message(), HasSubstr("not part of sync 1"));
}

TEST(RestrictedProducer, WantsExactlyTheListedViews) {
  ProducerBench b({.groups = 1, .names_per_group = 3});
  const std::vector<PublishedView> all = b.views(0);
  b.names = some_names(b.model, {0, 2});
  ASSERT_EQ(b.begin(1), Status());
  EXPECT_THAT(b.machine.publish_group(0, 0, all, b.out).message(),
              HasSubstr("'layers.0.w1' is none of the names of sync 1"));
  EXPECT_THAT(b.machine.publish_group(0, 0, {all[0]}, b.out).message(),
              HasSubstr("'layers.0.w2' is held here but missing"));
  EXPECT_EQ(b.machine.publish_group(0, 0, {all[2], all[0]}, b.out), Status());
}

TEST(RestrictedProducer, CountsTheDepthAlongWhatIsLeft) {
  ProducerBench b({.groups = 5, .ring_depth = 1});
  b.reserve_all();
  b.names = some_names(b.model, {0, 3, 4});
  ASSERT_EQ(b.begin(1), Status());
  for (const std::uint32_t g : {0u, 3u, 4u}) ASSERT_EQ(b.publish(g), Status());
  b.pull(0, 1);
  EXPECT_THAT(b.refusal(), HasSubstr("too early, seq 0 has not been served"));
  b.take();
  b.serve(0, 0);
  b.take();
  b.pull(0, 1);
  EXPECT_EQ(b.all<Pack>().at(0).pull->group, 3u);
}

TEST(RestrictedProducer, AnEarlyPullHasTheSequenceNumberOfItsSync) {
  ProducerBench b({.groups = 3});
  b.reserve_all();
  b.names = some_names(b.model, {2});
  b.sync_id = 1;
  b.pull(0, 0);  // chunk 2, whose seq in the whole plan is 2
  EXPECT_THAT(b.take(), IsEmpty());
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(2), Status());
  EXPECT_EQ(b.count<Pack>(), 1u);

  b.names = {};
  b.sync_id = 2;
  b.machine.pull(0, b.life(0), {2, 0, 2, 0, 0, 0}, b.out);  // kept, and refused by a sync of all names
  b.take();
  ASSERT_EQ(b.begin(2), Status());
  ASSERT_EQ(b.count<FailReply>(), 2u) << "the one parked in sync 1, and the early one";
  EXPECT_THAT(b.all<FailReply>()[1].status.message(), HasSubstr("its seq is 2"));
  PullId beyond = b.pull_id(0, 2);
  beyond.sync_id = 3;
  beyond.seq = 3;
  b.take();
  b.machine.pull(0, b.life(0), beyond, b.out);
  EXPECT_THAT(b.refusal(), HasSubstr("with seq 3")) << "later than in any sync";
}

TEST(RestrictedProducer, TheSameNamesAgainRebuildNothing) {
  ProducerBench b({.groups = 3, .consumers = 2, .replicas = 2});
  b.reserve_all();
  std::uint64_t sync = 0;
  const auto packed = [&](const NameSet& names, std::uint32_t group) {
    b.names = names;
    EXPECT_EQ(b.begin(++sync), Status());
    EXPECT_EQ(b.publish(group), Status());
    b.take();
    b.pull(0, 0);
    b.pull(1, 0);
    const auto packs = b.all<Pack>();
    EXPECT_EQ(packs.size(), 1u) << "sharers meet";
    b.finish_packs();
    EXPECT_EQ(b.count<ReadyReply>(), 2u);
    return packs.at(0).pull;
  };
  const NameSet some = some_names(b.model, {0, 2}), others = some_names(b.model, {1});
  const auto first = packed(some, 0);
  packed({}, 0);
  EXPECT_EQ(packed(some, 0), first);
  EXPECT_NE(packed(others, 1), first);
  EXPECT_EQ(*packed(some, 0), *first);
}

TEST(RestrictedProducer, ANewAnnouncementIsRestrictedToo) {
  ProducerBench b({.groups = 2, .consumers = 2, .replicas = 2});
  b.reserve_all();
  b.names = some_names(b.model, {1});
  ASSERT_EQ(b.begin(1), Status());
  b.machine.reserve(0, 0, b.life(0), 256, 2, 2, 1, pulls_digest(b.pulls[0], 2), b.pulls[0], b.out);
  b.machine.ring_allocated(0, 0, {}, b.out);  // the same pulls in larger slots, in the middle of a sync
  ASSERT_EQ(b.publish(1), Status());
  b.pull(0, 0);
  b.pull(1, 0);
  ASSERT_EQ(b.count<Pack>(), 1u);
  EXPECT_EQ(b.all<Pack>()[0].pull->chunk_id, 1u);
}

// Group 0 has a name of each rank; only rank 0's is listed.
TEST(RestrictedProducer, VisitsAListedGroupOfWhichItHoldsOtherNames) {
  const TinyModel model = tiny_model({.groups = 1, .names_per_group = 2, .producers = 2});
  auto tables = std::make_shared<InitTables>(*model.tables);
  tables->ownership.owner_sets = {{0}, {1}};
  tables->ownership.name_owner_class = {0, 1};
  ProducerConfig config;
  config.rank = 1;
  config.tables = tables;
  ProducerMachine machine(config);
  ProducerActions out;
  ASSERT_EQ(machine.begin_sync(0, 1, 1, {0}, {0}, some_names(model, {0}), out), Status());
  ASSERT_EQ(machine.publish_group(0, 0, {}, out), Status());
  machine.signal(0, 7, 1, 0, {0}, out);
  EXPECT_EQ(of_kind<GroupFreed>(out).size(), 1u);
}

// ---- the consumer -------------------------------------------------------------------------------

std::vector<std::string> kinds(const ConsumerBench& bench) {
  std::vector<std::string> text;
  for (const ModuleState& module : bench.machine.modules()) text.push_back(to_string(module));
  return text;
}

struct Restricted : testing::Test {
  void commit(std::uint64_t sync, std::uint64_t version, const std::vector<std::uint32_t>& names) {
    b.part = names.empty() ? nullptr : part_of(model, *b.plan, some_names(model, names));
    b.take();
    b.start(sync, version);
    b.run_to_end();
    EXPECT_EQ(b.update_result(), Status());
    EXPECT_EQ(b.machine.finish_update(0, sync, b.out), Status());
  }
  TinyOptions options{.groups = 4};
  TinyModel model = tiny_model(options);
  ConsumerBench b{options};
};

TEST_F(Restricted, RunsTheListedChunksUnderTheirIdsAndTouchesTheirModulesOnly) {
  commit(1, 10, {});
  commit(2, 20, {1, 3});
  EXPECT_THAT(b.pulled(), ElementsAre(1u, 3u));
  EXPECT_THAT(b.transferring(), ElementsAre(1u, 3u));
  EXPECT_THAT(b.scattering(), ElementsAre(1u, 3u));
  EXPECT_THAT(b.posting(), ElementsAre(1u, 3u));
  EXPECT_THAT(b.signalled(), ElementsAre(Pair(0u, 1u), Pair(0u, 3u)));
  EXPECT_EQ(b.all<SendPull>()[1].pull.seq, 1u);
  EXPECT_THAT(kinds(b), ElementsAre("current(10)", "current(20)", "current(10)", "current(20)"));
  EXPECT_EQ(*b.machine.version(), 20u) << "of the last commit; others hold older ones by request";
  commit(3, 30, {});
  EXPECT_THAT(b.pulled(), ElementsAre(0u, 1u, 2u, 3u));
  EXPECT_THAT(kinds(b), ElementsAre("current(30)", "current(30)", "current(30)", "current(30)"));
}

TEST_F(Restricted, AFirstSyncOfSomeNamesHasAVersion) {
  EXPECT_FALSE(b.machine.version().ok());
  commit(1, 10, {0});
  EXPECT_THAT(kinds(b), ElementsAre("current(10)", "unset", "unset", "unset"));
  EXPECT_EQ(*b.machine.version(), 10u);
}

TEST_F(Restricted, AFailureLeavesWhatItTouchedMixedAndTheRestAlone) {
  commit(1, 10, {});
  b.part = part_of(model, *b.plan, some_names(model, {1, 2}));
  b.take();
  b.start(2, 20);
  b.ready(1);
  b.land(1);
  b.ready(2);
  b.land(2, 0, kBroken);
  b.scattered(1);
  EXPECT_EQ(b.update_result().message(), "worker 0: chunk 2 (group 2) from trainer 0: broken");
  EXPECT_THAT(kinds(b), ElementsAre("current(10)", "mixed(10, 20)", "current(10)", "current(10)"));
  EXPECT_THAT(b.machine.version().status().message(),
              AllOf(HasSubstr("module 1 is mixed(10, 20)"), Not(HasSubstr("module 0"))));
  commit(3, 30, {3});
  EXPECT_FALSE(b.machine.version().ok()) << "a sync of other names repairs nothing";
  commit(4, 40, {1});
  EXPECT_EQ(*b.machine.version(), 40u);
  EXPECT_THAT(kinds(b), ElementsAre("current(10)", "current(40)", "current(10)", "current(30)"));
  commit(5, 50, {});
  EXPECT_THAT(kinds(b), ElementsAre("current(50)", "current(50)", "current(50)", "current(50)"));
}

TEST_F(Restricted, WhatAnAbandonedSyncPreparedIsNotCommittedByTheNext) {
  b.start(1, 10);
  b.run_to_end();
  ASSERT_EQ(b.machine.state(), WorkerState::kPrepared);
  commit(2, 20, {0});
  EXPECT_THAT(kinds(b), ElementsAre("current(20)", "prepared(10)", "prepared(10)", "prepared(10)"));
  EXPECT_THAT(b.machine.version().status().message(), HasSubstr("module 1 is prepared(10)"));
}

TEST_F(Restricted, RepliesForOtherChunksAnswerNothing) {
  b.part = part_of(model, *b.plan, some_names(model, {1, 3}));
  b.start(1, 10);
  PullId pull = b.pull_id(1);
  pull.chunk = 0;
  b.machine.ready(0, 0, pull, b.ready_info(1), b.out);
  b.machine.transfer_done(0, 1, 2, 0, {}, b.out);
  b.machine.scatter_done(0, 1, 0, {}, b.out);
  b.machine.post_done(0, 1, 0, {}, b.out);
  EXPECT_EQ(b.machine.drops().unknown, 4u);
  EXPECT_EQ(b.count<StartTransfer>(), 0u);
  b.run_to_end();
  EXPECT_EQ(b.update_result(), Status());
}

TEST_F(Restricted, RefusesAPlanOfAnotherWorker) {
  const auto refused = [&](WorkerPlan plan) {
    return b.machine.start_update(0, 1, 10, std::make_shared<const WorkerPlan>(std::move(plan)), b.out)
        .message();
  };
  WorkerPlan other = *part_of(model, *b.plan, some_names(model, {1}));
  other.consumer = 5;
  EXPECT_THAT(refused(other), HasSubstr("with a plan of worker 5"));
  other.consumer = 0;
  other.ring_depth = 3;
  EXPECT_THAT(refused(other), HasSubstr("ring_depth 3, this worker's is 2"));
  other.ring_depth = 2;
  other.chunks[0].materialise = {9};
  EXPECT_THAT(refused(other), HasSubstr("loads module 9 of 4"));
  EXPECT_EQ(b.machine.state(), WorkerState::kIdle);
  commit(1, 10, {1});
}

TEST_F(Restricted, AWorkerThatTakesNothingSignalsAndIsPrepared) {
  TinyModel part = tiny_model(options);
  part.recording.scatters.resize(2);  // this one takes the first two layers
  ConsumerBench taker(part.plan(0), 4);
  taker.part = part_of(part, *taker.plan, some_names(part, {3}));
  taker.start(1, 10);
  EXPECT_EQ(taker.count<UpdateDone>(), 0u) << "its signal is not confirmed";
  EXPECT_THAT(taker.signalled(), ElementsAre(Pair(0u, 3u)));
  taker.ack_all();
  EXPECT_EQ(taker.update_result(), Status());
  EXPECT_EQ(taker.machine.finish_update(0, 1, taker.out), Status());
  EXPECT_THAT(kinds(taker), ElementsAre("unset", "unset", "unset", "unset"));
}

// One chunk of two names from two producers; one name is listed.
TEST(RestrictedRuns, ARunWithoutKeysIsNotPulledNorWaitedFor) {
  for (const Path path : {Path::kPacked, Path::kMapped}) {
    const TinyOptions options{.groups = 1,
                              .names_per_group = 2,
                              .producers = 2,
                              .module_per_name = true,
                              .path = path,
                              .max_chunk_bytes = 0,
                              .pull_split = 2};
    const TinyModel model = tiny_model(options);
    ConsumerBench b(model.plan(0), 2);
    ASSERT_EQ(b.plan->chunks.at(0).runs.size(), 2u);
    const std::uint32_t idle = b.plan->chunks[0].runs[0].producer;
    b.part = part_of(model, *b.plan, some_names(model, {1}));
    b.start(1, 10);
    ASSERT_EQ(b.count<SendPull>(), 1u);
    EXPECT_EQ(b.all<SendPull>()[0].pull.run, 1u);
    b.machine.fail(0, 1, kBroken, b.out);
    EXPECT_THAT(b.signalled(), ElementsAre(Pair(1 - idle, 0u))) << "of what was asked for";
    b.take();
    b.start(2, 20);
    b.run_to_end();
    EXPECT_EQ(b.update_result(), Status());
    if (path == Path::kMapped) {
      EXPECT_THAT(b.all<StartCopy>().at(0).ready[0].entries, IsEmpty());
      EXPECT_EQ(b.all<StartCopy>()[0].ready[1].entries.size(), 1u);
    }
  }
}

}  // namespace
}  // namespace shardpull::protocol_testing
