#include "control/sim/sim_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace shardpull {
namespace {

using testing::ElementsAre;

struct Log : ControlSink {
  void on_control(const Member& from, Incarnation, ControlBody body) override {
    const auto* message = std::get_if<UserMessage>(&body);
    lines.push_back(to_string(from) + ": " +
                    (message != nullptr ? message->body : std::string(name_of(body))));
  }
  void on_member_up(const Member& member, Incarnation incarnation) override {
    lines.push_back(to_string(member) + " up " + std::to_string(incarnation));
  }
  void on_member_lost(const Member& member, Incarnation incarnation, const Status&) override {
    lines.push_back(to_string(member) + " lost " + std::to_string(incarnation));
  }
  std::vector<std::string> take() { return std::exchange(lines, {}); }
  std::vector<std::string> lines;
};

class SimControlTest : public testing::Test {
 protected:
  FakeClock clock;
  SimControlNet net{clock, {.seed = 3}};
  Log trainer_log, worker_log, other_log;
  const Member worker{Role::kWorker, 0}, other{Role::kWorker, 1};

  void run() {
    while (const auto due = net.next_due_ns()) {
      clock.set_ns(*due);
      net.deliver_due();
    }
  }
};

TEST_F(SimControlTest, MembersHearOfEachOtherAndOfLosses) {
  auto trainer_link = net.open(kSender, 1, trainer_log);
  auto worker_link = net.open(worker, 2, worker_log);
  run();
  EXPECT_THAT(trainer_log.take(), ElementsAre("worker 0 up 2"));
  EXPECT_THAT(worker_log.take(), ElementsAre("trainer 0 up 1"));
  EXPECT_FALSE(trainer_link->send(other, UserMessage{"", "x"}).ok());
  worker_link.reset();
  run();
  EXPECT_THAT(trainer_log.take(), ElementsAre("worker 0 lost 2"));
  EXPECT_FALSE(trainer_link->send(worker, UserMessage{"", "x"}).ok());
}

TEST_F(SimControlTest, APairKeepsItsOrderAndPairsOvertake) {
  auto trainer_link = net.open(kSender, 1, trainer_log);
  auto worker_link = net.open(worker, 2, worker_log);
  auto other_link = net.open(other, 3, other_log);
  run();
  trainer_log.take();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(worker_link->send(kSender, UserMessage{"", std::to_string(100 + i)}).ok());
    ASSERT_TRUE(other_link->send(kSender, UserMessage{"", std::to_string(100 + i)}).ok());
  }
  run();
  std::vector<std::string> of_worker, all = trainer_log.take();
  for (const std::string& line : all) {
    if (line.starts_with("worker 0")) of_worker.push_back(line);
  }
  EXPECT_EQ(all.size(), 40u);
  EXPECT_TRUE(std::is_sorted(of_worker.begin(), of_worker.end()));
  EXPECT_FALSE(std::is_sorted(all.begin(), all.end(),
                              [](const auto& a, const auto& b) { return a.substr(10) < b.substr(10); }));
}

TEST_F(SimControlTest, ANewLifeReplacesTheOldAndItsMail) {
  auto trainer_link = net.open(kSender, 1, trainer_log);
  auto old_link = net.open(worker, 2, worker_log);
  run();
  trainer_log.take();
  worker_log.take();
  ASSERT_TRUE(trainer_link->send(worker, UserMessage{"", "for the old life"}).ok());
  Log new_log;
  auto new_link = net.open(worker, 5, new_log);
  run();
  EXPECT_THAT(trainer_log.take(), ElementsAre("worker 0 lost 2", "worker 0 up 5"));
  EXPECT_TRUE(worker_log.take().empty());
  EXPECT_THAT(new_log.take(), ElementsAre("trainer 0 up 1"));
  EXPECT_FALSE(old_link->send(kSender, UserMessage{"", "zombie"}).ok());
}

TEST_F(SimControlTest, AMemberMaySendToItself) {
  auto link = net.open(kSender, 1, trainer_log);
  ASSERT_TRUE(link->send(kSender, UserMessage{"", "me"}).ok());
  EXPECT_TRUE(trainer_log.lines.empty()) << "later, not from within send()";
  run();
  EXPECT_THAT(trainer_log.take(), ElementsAre("trainer 0: me"));
}

// A message between two members and the news of its sender's end take the same way.
TEST_F(SimControlTest, NothingOfADeadMemberArrivesAfterTheNewsOfItsEnd) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SimControlNet star(clock, {.seed = seed});
    Log hub_log, first_log, second_log;
    auto hub = star.open(kSender, 1, hub_log);
    auto first = star.open(worker, 2, first_log);
    auto second = star.open(other, 3, second_log);
    const auto run_star = [&] {
      while (const auto due = star.next_due_ns()) {
        clock.set_ns(*due);
        star.deliver_due();
      }
    };
    run_star();
    second_log.take();
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(first->send(other, UserMessage{"", std::to_string(i)}).ok());
    star.crash(worker);
    EXPECT_FALSE(first->send(other, UserMessage{"", "dead"}).ok());
    run_star();
    std::vector<std::string> lines = second_log.take();
    ASSERT_FALSE(lines.empty());
    EXPECT_EQ(lines.back(), "worker 0 lost 2");
    for (std::size_t i = 0; i + 1 < lines.size(); ++i)
      EXPECT_EQ(lines[i], "worker 0: " + std::to_string(i)) << "what arrives are the first ones";
  }
}

TEST_F(SimControlTest, TheEndOfTheHubIsTheEndOfEveryLink) {
  auto trainer_link = net.open(kSender, 1, trainer_log);
  auto worker_link = net.open(worker, 2, worker_log);
  run();
  worker_log.take();
  net.crash(kSender);
  run();
  EXPECT_THAT(worker_log.take(), ElementsAre("trainer 0 lost 1"));
  EXPECT_FALSE(worker_link->send(kSender, UserMessage{"", "x"}).ok());
}

// A short silence delays, a long one ends the link on both sides; what was under way is lost then.
TEST_F(SimControlTest, SilenceDelaysAndThenKills) {
  auto trainer_link = net.open(kSender, 1, trainer_log);
  auto worker_link = net.open(worker, 2, worker_log);
  run();
  trainer_log.take();
  worker_log.take();
  const std::int64_t before_ns = clock.now_ns();
  net.silence(worker, 200 * kNanosPerMilli);
  ASSERT_TRUE(worker_link->send(kSender, UserMessage{"", "a"}).ok());
  ASSERT_TRUE(worker_link->send(kSender, UserMessage{"", "b"}).ok());
  ASSERT_TRUE(worker_link->send(worker, UserMessage{"", "me"}).ok());
  run();
  EXPECT_THAT(trainer_log.take(), ElementsAre("worker 0: a", "worker 0: b"));
  EXPECT_THAT(worker_log.take(), ElementsAre("worker 0: me"));
  EXPECT_GE(clock.now_ns() - before_ns, 200 * kNanosPerMilli);

  net.silence(worker, 3 * kNanosPerSecond);
  ASSERT_TRUE(worker_link->send(kSender, UserMessage{"", "c"}).ok());
  run();
  EXPECT_THAT(trainer_log.take(), ElementsAre("worker 0 lost 2"));
  EXPECT_THAT(worker_log.take(), ElementsAre("trainer 0 lost 1"));
  EXPECT_FALSE(worker_link->send(kSender, UserMessage{"", "zombie"}).ok());
}

}  // namespace
}  // namespace shardpull
