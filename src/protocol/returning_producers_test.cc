// Producers that come back, as a worker sees it: docs/PROTOCOL.md, "A rank that comes back".
#include "protocol/returning_producers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "protocol/protocol_testing.h"

namespace shardpull::protocol_testing {
namespace {

using namespace returning_action;  // NOLINT
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const Status kRefused(StatusCode::kFailedPrecondition, "refused");
constexpr std::int64_t kLimit = 100;

// A worker that pulls from producers 0 and 1 by plan, and not from 2; with what was asked for since the last
// take().
struct Bench {
  static WorkerPlan plan() {
    WorkerPlan plan;
    plan.producers.resize(2);
    plan.producers[1].producer = 1;
    return plan;
  }

  void lose(std::uint32_t producer) { machine.producer_lost(producer, out); }
  void come_back(std::uint32_t producer, std::uint64_t without_until = 0) {
    machine.returned(now, producer, without_until, kLimit, out);
  }
  void meet_well(std::uint32_t producer) {
    machine.greeted(producer);
    EXPECT_TRUE(machine.reserved(producer, Status(), out));
  }
  // Whether a sync may start, as a driver asks.
  bool ready_for(std::uint64_t sync_id) {
    machine.wanted(now, sync_id, out);
    return machine.ready_for(sync_id);
  }
  void start(std::uint64_t sync_id) {
    out.clear();
    EXPECT_TRUE(ready_for(sync_id));
    machine.start(sync_id, out);
  }
  template <typename T>
  std::vector<std::uint32_t> all() const {
    std::vector<std::uint32_t> producers;
    for (const T& action : of_kind<T>(out)) producers.push_back(action.producer);
    return producers;
  }

  ReturningProducers machine{plan()};
  ReturningActions out;
  std::int64_t now = 0;
};

TEST(Returning, IsMetThenTakenBack) {
  Bench b;
  b.lose(1);
  EXPECT_TRUE(b.machine.lost(1));
  EXPECT_TRUE(b.ready_for(1)) << "one that is gone holds up nobody";
  b.come_back(1);
  EXPECT_THAT(b.all<Meet>(), ElementsAre(1));
  EXPECT_FALSE(b.ready_for(1));
  b.machine.greeted(1);
  EXPECT_FALSE(b.ready_for(1)) << "nothing is reserved there yet";
  EXPECT_TRUE(b.machine.reserved(1, Status(), b.out));
  EXPECT_FALSE(b.machine.reserved(1, Status(), b.out)) << "answered already";
  EXPECT_TRUE(b.machine.lost(1)) << "until a sync starts";
  b.start(1);
  EXPECT_THAT(b.all<TakeBack>(), ElementsAre(1));
  EXPECT_FALSE(b.machine.lost(1));
  b.start(2);
  EXPECT_THAT(b.out, IsEmpty());
}

TEST(Returning, IsNotInSyncsThatBeganWithoutIt) {
  Bench b;
  b.lose(0);
  b.come_back(0, 3);
  EXPECT_TRUE(b.ready_for(3)) << "it is not waited for";
  b.start(3);
  EXPECT_THAT(b.out, IsEmpty());
  EXPECT_FALSE(b.ready_for(4));
  b.meet_well(0);
  b.start(4);
  EXPECT_THAT(b.all<TakeBack>(), ElementsAre(0));
}

TEST(Returning, OneThatNothingIsTakenFromIsNotMet) {
  Bench b;
  b.lose(2);
  b.come_back(2);
  EXPECT_THAT(b.all<Meet>(), IsEmpty());
  EXPECT_FALSE(b.machine.reserved(2, Status(), b.out)) << "nothing was announced there";
  b.start(1);
  EXPECT_THAT(b.all<TakeBack>(), ElementsAre(2));
}

TEST(Returning, OneThatRefusesIsStoodInForAndTriedOnceBeforeEachLaterSync) {
  Bench b;
  b.lose(1);
  b.come_back(1);
  EXPECT_TRUE(b.machine.reserved(1, kRefused, b.out));
  EXPECT_THAT(b.all<Part>(), ElementsAre(1));
  b.out.clear();
  EXPECT_TRUE(b.ready_for(1));
  EXPECT_TRUE(b.ready_for(1)) << "asked again";
  EXPECT_THAT(b.all<Meet>(), IsEmpty()) << "it was tried for this sync";
  b.start(1);
  ASSERT_EQ(of_kind<StandIn>(b.out).size(), 1u);
  EXPECT_EQ(of_kind<StandIn>(b.out)[0].why, kRefused);
  EXPECT_FALSE(b.machine.lost(1)) << "it lives";

  EXPECT_FALSE(b.ready_for(2));
  EXPECT_THAT(b.all<Meet>(), ElementsAre(1));
  b.machine.failed(1, kRefused, b.out);
  EXPECT_TRUE(b.ready_for(2)) << "once";
  b.start(2);
  EXPECT_EQ(of_kind<StandIn>(b.out).size(), 1u);

  EXPECT_FALSE(b.ready_for(3));
  b.meet_well(1);
  b.start(3);
  EXPECT_THAT(b.all<TakeBack>(), ElementsAre(1));
}

TEST(Returning, OneThatDoesNotAnswerIsGivenUp) {
  Bench b;
  b.lose(1);
  b.now = 1000;
  b.come_back(1);
  b.machine.greeted(1);
  b.machine.tick(1000 + kLimit - 1, b.out);
  EXPECT_FALSE(b.ready_for(1));
  b.machine.tick(1000 + kLimit, b.out);
  EXPECT_THAT(b.all<Part>(), ElementsAre(1));
  EXPECT_FALSE(b.machine.reserved(1, Status(), b.out)) << "too late";
  b.start(1);
  ASSERT_EQ(of_kind<StandIn>(b.out).size(), 1u);
  EXPECT_THAT(of_kind<StandIn>(b.out)[0].why.message(), HasSubstr("trainer 1 did not answer within"));
}

TEST(Returning, AConnectionThatBreaksBeforeTheSyncDoesNotServe) {
  Bench b;
  b.lose(1);
  b.come_back(1);
  b.meet_well(1);
  b.machine.failed(1, kRefused, b.out);
  b.machine.tick(kLimit, b.out);
  b.start(1);
  EXPECT_EQ(of_kind<StandIn>(b.out).size(), 1u);
  EXPECT_THAT(b.all<TakeBack>(), IsEmpty());
}

TEST(Returning, OneThatIsLostAgainIsForgotten) {
  Bench b;
  b.lose(1);
  b.come_back(1);
  b.lose(1);
  EXPECT_THAT(b.all<Part>(), ElementsAre(1));
  EXPECT_TRUE(b.ready_for(1));
  b.machine.failed(1, kRefused, b.out);  // of the life before
  b.machine.greeted(1);
  b.start(1);
  EXPECT_THAT(b.out, IsEmpty());
  EXPECT_TRUE(b.machine.lost(1));

  b.come_back(1, 1);
  b.meet_well(1);
  b.come_back(1, 1);  // another life, of whose predecessor's end nothing was heard
  EXPECT_THAT(b.all<Part>(), ElementsAre(1));
  EXPECT_FALSE(b.ready_for(2)) << "what the life before had answered is void";
}

TEST(Returning, BrokenConnectionsAreOpenedAgainAsASyncStarts) {
  Bench b;
  b.machine.unreachable(0);
  b.machine.unreachable(2);
  EXPECT_TRUE(b.machine.any_unreachable());
  b.start(1);
  EXPECT_THAT(b.all<Reconnect>(), ElementsAre(0));
  EXPECT_THAT(b.all<Reached>(), ElementsAre(2)) << "it is connected to as it is needed";
  b.start(2);
  EXPECT_THAT(b.all<Reconnect>(), ElementsAre(0)) << "it could not be connected to";
  b.machine.reconnected(0, b.out);
  EXPECT_THAT(b.all<Reached>(), ElementsAre(0));
  EXPECT_FALSE(b.machine.any_unreachable());
  b.start(3);
  EXPECT_THAT(b.out, IsEmpty());
}

TEST(Returning, OneThatIsLostIsNotReconnectedTo) {
  Bench b;
  b.machine.unreachable(0);
  b.lose(0);
  b.machine.unreachable(0);  // its connections break as it dies
  EXPECT_FALSE(b.machine.any_unreachable());
  b.start(1);
  EXPECT_THAT(b.out, IsEmpty());
}

}  // namespace
}  // namespace shardpull::protocol_testing
