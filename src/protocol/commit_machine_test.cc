// How a replica's workers end a sync without the sender: docs/PROTOCOL.md, "Commit".
#include "protocol/commit_machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/random.h"
#include "protocol/protocol_testing.h"

namespace shardpull::protocol_testing {
namespace {

using namespace commit_action;  // NOLINT
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const Status kLost(StatusCode::kUnavailable, "trainer 0 is lost", {.reason = Reason::kPeerLost});
const Status kBroken(StatusCode::kDataLoss, "broken");

// Worker 0 of a replica, with what it did since the last take().
struct Bench {
  explicit Bench(std::vector<std::uint32_t> mates = {1})
      : machine({.consumer = 0, .mates = std::move(mates), .answer_within_ns = 100}) {}

  void prepare(std::uint64_t sync) {
    EXPECT_EQ(machine.start(sync), Status());
    machine.update_done(sync, Status());
  }
  CommitActions take() { return std::exchange(out, {}); }
  template <typename T>
  std::vector<T> all() const {
    return of_kind<T>(out);
  }
  std::vector<std::uint32_t> asked() const {
    std::vector<std::uint32_t> mates;
    for (const AskMate& ask : all<AskMate>()) mates.push_back(ask.mate);
    return mates;
  }
  CommitWord word() const {
    EXPECT_EQ(all<AnswerMate>().size(), 1u);
    return all<AnswerMate>().at(0).word;
  }
  std::string aborted() const {
    EXPECT_EQ(all<Abort>().size(), 1u);
    return all<Abort>().empty() ? "" : all<Abort>()[0].why.message();
  }

  CommitMachine machine;
  CommitActions out;
};

TEST(Commit, AMateIsGoneWhenASecondConnectionBreaks) {
  Bench b({1, 2});
  b.machine.connection_broke(0, 1, b.out);
  EXPECT_THAT(b.out, IsEmpty()) << "nothing was asked";
  b.prepare(1);
  b.machine.sender_lost(0, kLost, b.out);
  EXPECT_THAT(b.asked(), ElementsAre(1, 2));
  b.take();
  b.machine.connection_broke(0, 1, b.out);
  EXPECT_THAT(b.asked(), ElementsAre(1)) << "over another one";
  b.take();
  b.machine.answered(0, 2, 1, 1, CommitWord::kUndecided, b.out);
  EXPECT_THAT(b.out, IsEmpty()) << "mate 1 is waited for";
  b.machine.connection_broke(0, 1, b.out);
  EXPECT_THAT(b.asked(), ElementsAre(2)) << "the next round is without it";
  b.take();
  b.machine.connection_broke(0, 2, b.out);
  EXPECT_THAT(b.asked(), ElementsAre(2)) << "once for each question";
}

TEST(Commit, FollowsTheSender) {
  Bench b;
  EXPECT_FALSE(b.machine.finish(1, b.out).ok()) << "nothing has started";
  ASSERT_EQ(b.machine.start(1), Status());
  EXPECT_FALSE(b.machine.finish(1, b.out).ok()) << "it is not prepared";
  b.machine.update_done(1, Status());
  EXPECT_FALSE(b.machine.finish(2, b.out).ok());
  EXPECT_EQ(b.machine.finish(1, b.out), Status());
  EXPECT_EQ(b.all<Commit>().size(), 1u);
  EXPECT_EQ(b.machine.finish(1, b.out), Status());
  EXPECT_EQ(b.all<Commit>().size(), 1u) << "twice";
  b.machine.sender_lost(0, kLost, b.out);
  EXPECT_EQ(b.all<Commit>().size(), 1u) << "it was decided";
  ASSERT_EQ(b.all<AskMate>().size(), 1u) << "its mate is told";
  EXPECT_EQ(b.all<AskMate>()[0].word, CommitWord::kCommitted);
  EXPECT_TRUE(b.machine.deciding()) << "it stays until the mate has answered";
  b.machine.answered(0, 1, 1, 0, CommitWord::kCommitted, b.out);
  EXPECT_FALSE(b.machine.deciding());
}

TEST(Commit, AFailedUpdateIsNotCommitted) {
  Bench b;
  ASSERT_EQ(b.machine.start(1), Status());
  b.machine.update_done(1, kBroken);
  EXPECT_EQ(b.machine.finish(1, b.out), kBroken);
  b.machine.sender_lost(0, kLost, b.out);
  EXPECT_THAT(b.out, IsEmpty());
  b.prepare(2);
  b.machine.update_done(2, kBroken);  // a hook, after it was prepared
  EXPECT_EQ(b.machine.finish(2, b.out), kBroken);
}

TEST(Commit, WithoutMatesALostSenderAborts) {
  Bench b(std::vector<std::uint32_t>{});
  b.prepare(1);
  b.machine.sender_lost(0, kLost, b.out);
  EXPECT_THAT(b.aborted(), HasSubstr("trainer 0 is lost; no mate has committed sync 1"));
}

TEST(Commit, AnUpdateUnderWayIsAbortedWithoutAsking) {
  Bench b;
  ASSERT_EQ(b.machine.start(1), Status());
  b.machine.sender_lost(0, kLost, b.out);
  EXPECT_EQ(b.aborted(), "trainer 0 is lost");
  EXPECT_THAT(b.asked(), IsEmpty());
}

TEST(Commit, OneMateThatCommittedIsEnough) {
  Bench b({1, 2, 3});
  b.prepare(1);
  b.machine.sender_lost(0, kLost, b.out);
  EXPECT_THAT(b.asked(), ElementsAre(1u, 2u, 3u));
  EXPECT_TRUE(b.machine.deciding());
  EXPECT_THAT(b.machine.finish(1, b.out).message(), HasSubstr("being decided by its mates"))
      << "it is fenced";
  EXPECT_FALSE(b.machine.start(2).ok());
  b.machine.answered(1, 2, 1, 1, CommitWord::kUndecided, b.out);
  b.machine.answered(1, 3, 1, 1, CommitWord::kCommitted, b.out);
  EXPECT_EQ(b.all<Commit>().size(), 1u);
  EXPECT_TRUE(b.machine.deciding()) << "the others are being told";
  b.machine.unreachable(1, 2, b.out);
  b.machine.answered(1, 1, 1, 1, CommitWord::kAborted, b.out);
  EXPECT_FALSE(b.machine.deciding());
  EXPECT_THAT(b.all<Abort>(), IsEmpty());
  EXPECT_EQ(b.machine.finish(1, b.out), Status()) << "late, and no news";
  EXPECT_EQ(b.all<Commit>().size(), 1u);
}

TEST(Commit, OneMateThatAbortedIsEnough) {
  Bench b({1, 2});
  b.prepare(1);
  b.machine.sender_lost(0, kLost, b.out);
  b.machine.answered(1, 2, 1, 1, CommitWord::kAborted, b.out);
  EXPECT_THAT(b.aborted(), HasSubstr("worker 2 has not committed sync 1"));
  EXPECT_THAT(b.machine.finish(1, b.out).message(), HasSubstr("worker 2 has not committed sync 1"));
}

// As many rounds as mates: all of them undecided, or gone.
TEST(Commit, AbortsWhenNobodyHasSeenTheCommit) {
  Bench b({1, 2});
  b.prepare(1);
  b.machine.sender_lost(0, kLost, b.out);
  b.machine.answered(1, 1, 1, 1, CommitWord::kUndecided, b.out);
  b.machine.answered(1, 1, 1, 1, CommitWord::kUndecided, b.out);  // a repeat counts once
  EXPECT_EQ(b.asked().size(), 2u);
  b.machine.answered(1, 2, 1, 1, CommitWord::kUndecided, b.out);
  EXPECT_THAT(b.asked(), ElementsAre(1u, 2u, 1u, 2u));
  b.machine.answered(1, 2, 1, 1, CommitWord::kUndecided, b.out);  // of the round before
  b.machine.unreachable(1, 1, b.out);
  EXPECT_THAT(b.all<Abort>(), IsEmpty());
  b.machine.answered(1, 2, 1, 2, CommitWord::kUndecided, b.out);
  EXPECT_THAT(b.aborted(), HasSubstr("no mate has committed sync 1"));
}

TEST(Commit, SilentMatesAreTakenForDead) {
  Bench b({1, 2, 3});
  b.prepare(1);
  b.machine.sender_lost(0, kLost, b.out);
  b.machine.answered(50, 3, 1, 1, CommitWord::kUndecided, b.out);
  b.take();
  b.machine.tick(99, b.out);
  EXPECT_THAT(b.out, IsEmpty());
  b.machine.tick(100, b.out);
  EXPECT_THAT(b.asked(), ElementsAre(3u)) << "the second round, without them";
  b.machine.tick(199, b.out);
  EXPECT_TRUE(b.machine.deciding()) << "its answer is not due yet";
  b.machine.tick(200, b.out);
  EXPECT_THAT(b.aborted(), HasSubstr("no mate has committed"));
}

TEST(Commit, WhoeverIsAskedIsFenced) {
  Bench updating;
  ASSERT_EQ(updating.machine.start(1), Status());
  updating.machine.asked(0, 1, 1, 1, CommitWord::kUndecided, updating.out);
  EXPECT_EQ(updating.word(), CommitWord::kAborted);
  EXPECT_THAT(updating.aborted(), HasSubstr("worker 1 has lost trainer 0"));
  updating.machine.update_done(1, Status());
  EXPECT_THAT(updating.machine.finish(1, updating.out).message(), HasSubstr("worker 1 has lost trainer 0"));

  Bench prepared;
  prepared.prepare(1);
  prepared.machine.asked(0, 1, 1, 1, CommitWord::kUndecided, prepared.out);
  EXPECT_THAT(prepared.asked(), ElementsAre(1u)) << "it asks as well";
  EXPECT_EQ(prepared.word(), CommitWord::kUndecided);
  EXPECT_THAT(prepared.machine.finish(1, prepared.out).message(), HasSubstr("worker 1 has lost trainer 0"));
  prepared.machine.answered(0, 1, 1, 1, CommitWord::kUndecided, prepared.out);
  EXPECT_THAT(prepared.aborted(), HasSubstr("no mate has committed"));

  Bench early;
  early.machine.asked(0, 1, 3, 1, CommitWord::kUndecided, early.out);  // not started here yet
  EXPECT_EQ(early.word(), CommitWord::kAborted);
  EXPECT_THAT(early.machine.start(3).message(), HasSubstr("sync 3 will not be committed"));
  EXPECT_EQ(early.machine.start(4), Status());

  Bench committed;
  committed.prepare(1);
  EXPECT_EQ(committed.machine.finish(1, committed.out), Status());
  committed.take();
  committed.machine.asked(0, 1, 1, 1, CommitWord::kUndecided, committed.out);
  EXPECT_EQ(committed.word(), CommitWord::kCommitted);
  committed.take();
  ASSERT_EQ(committed.machine.start(2), Status());
  committed.machine.asked(0, 1, 1, 1, CommitWord::kUndecided, committed.out);
  EXPECT_EQ(committed.word(), CommitWord::kCommitted) << "the last one that was";
}

TEST(Commit, AQuestionOfALaterRoundWaitsForIt) {
  Bench b({1, 2});
  b.prepare(1);
  b.machine.sender_lost(0, kLost, b.out);
  b.machine.asked(0, 1, 1, 2, CommitWord::kUndecided, b.out);
  EXPECT_THAT(b.all<AnswerMate>(), IsEmpty());
  b.machine.answered(0, 1, 1, 1, CommitWord::kUndecided, b.out);
  b.machine.answered(0, 2, 1, 1, CommitWord::kUndecided, b.out);
  ASSERT_EQ(b.all<AnswerMate>().size(), 1u);
  EXPECT_EQ(b.all<AnswerMate>()[0].round, 2u);
  EXPECT_EQ(b.word(), CommitWord::kUndecided);

  Bench later({1, 2});
  later.prepare(1);
  later.machine.sender_lost(0, kLost, later.out);
  later.machine.asked(0, 1, 1, 2, CommitWord::kUndecided, later.out);
  later.machine.answered(0, 2, 1, 1, CommitWord::kCommitted, later.out);
  EXPECT_EQ(later.word(), CommitWord::kCommitted);
}

// A failure found here while mates are being asked does not decide for them.
// Of three mates one has lost the sender and asks; worker 0, which still hears it, is told that the sync
// failed for the loss, then that worker 2 has committed.
TEST(Commit, AFailureFromTheSenderIsNotHeededWhileMatesDecide) {
  Bench b({1, 2});
  b.prepare(1);
  EXPECT_TRUE(b.machine.heeds_failure(1));
  b.machine.asked(0, 1, 1, 1, CommitWord::kUndecided, b.out);
  EXPECT_FALSE(b.machine.heeds_failure(1));
  EXPECT_TRUE(b.machine.heeds_failure(2)) << "another sync";
  b.machine.answered(0, 2, 1, 1, CommitWord::kCommitted, b.out);
  EXPECT_EQ(b.all<Commit>().size(), 1u);
  EXPECT_TRUE(b.machine.heeds_failure(1)) << "a commit is not undone by it";

  Bench aborted({1, 2});
  aborted.prepare(1);
  aborted.machine.asked(0, 1, 1, 1, CommitWord::kUndecided, aborted.out);
  aborted.machine.answered(0, 2, 1, 1, CommitWord::kAborted, aborted.out);
  EXPECT_EQ(aborted.all<Abort>().size(), 1u) << "the sync ends by what they decide";
  EXPECT_TRUE(aborted.machine.heeds_failure(1));
}

TEST(Commit, AFailureWhileDecidingChangesNothing) {
  Bench b;
  b.prepare(1);
  b.machine.sender_lost(0, kLost, b.out);
  b.machine.update_done(1, kBroken);
  b.machine.answered(0, 1, 1, 1, CommitWord::kCommitted, b.out);
  EXPECT_EQ(b.all<Commit>().size(), 1u);
}

// ---- agreement ------------------------------------------------------------------------------------------

// A replica whose sender dies after some of its Finish messages, with workers that die at any instant. Links
// are ordered; a worker's death is noticed on a link behind what it had sent there, as far as that arrived.
class Replica {
 public:
  Replica(std::uint32_t size, Random& random) : random_(random), workers_(size) {
    for (std::uint32_t w = 0; w < size; ++w) {
      std::vector<std::uint32_t> mates;
      for (std::uint32_t m = 0; m < size; ++m) {
        if (m != w) mates.push_back(m);
      }
      workers_[w].machine.emplace(CommitConfig{w, mates, kNanosPerSecond});
      EXPECT_EQ(workers_[w].machine->start(1), Status());
      // The first sync may still be under way on some: then no Finish was sent.
      workers_[w].machine->update_done(1, Status());
    }
  }

  // `seen`: those whose Finish arrives; it may be on its way when its mates ask.
  void run(const std::set<std::uint32_t>& seen, int deaths) {
    for (std::uint32_t w = 0; w < workers_.size(); ++w) {
      if (seen.contains(w)) events_.push_back({Event::kFinish, w});
      events_.push_back({Event::kSenderLost, w});  // after its Finish, which is on the same link
    }
    while (true) {
      const std::vector<std::pair<std::uint32_t, std::uint32_t>> links = busy_links();
      if (events_.empty() && links.empty()) break;
      if (random_.chance(0.2)) leave(static_cast<std::uint32_t>(random_.below(workers_.size())));
      if (deaths > 0 && random_.chance(0.05)) {
        --deaths;
        die(static_cast<std::uint32_t>(random_.below(workers_.size())));
        continue;
      }
      const std::size_t pick = random_.below(events_.size() + links.size());
      if (pick < events_.size()) {
        event(pick);
      } else {
        deliver(links[pick - events_.size()]);
      }
    }
  }

  struct Worker {
    std::optional<CommitMachine> machine;
    bool alive = true;
    bool left = false;    // of its own accord, when its sync had ended
    bool orphan = false;  // has lost the sender
    std::optional<bool> committed;
  };
  const std::vector<Worker>& workers() const { return workers_; }

 private:
  struct Event {
    enum Kind : std::uint8_t { kFinish, kSenderLost } kind;
    std::uint32_t worker;
  };
  struct Message {
    enum Kind : std::uint8_t { kAsk, kAnswer, kDeath } kind;
    std::uint32_t round = 0;
    CommitWord word = CommitWord::kAborted;
  };

  std::vector<std::pair<std::uint32_t, std::uint32_t>> busy_links() const {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> busy;
    for (const auto& [link, queue] : links_) {
      if (!queue.empty() && workers_[link.second].alive) busy.push_back(link);
    }
    return busy;
  }
  void event(std::size_t pick) {
    // A worker's events take place in order.
    const std::uint32_t worker = events_[pick].worker;
    std::size_t first = 0;
    while (events_[first].worker != worker) ++first;
    const Event event = events_[first];
    events_.erase(events_.begin() + static_cast<std::ptrdiff_t>(first));
    if (!workers_[worker].alive) return;
    CommitActions out;
    if (event.kind == Event::kFinish) {
      (void)workers_[worker].machine->finish(1, out).ok();
    } else {
      workers_[worker].machine->sender_lost(0, kLost, out);
      workers_[worker].orphan = true;
    }
    perform(worker, out);
  }
  void deliver(std::pair<std::uint32_t, std::uint32_t> link) {
    const Message message = links_[link].front();
    links_[link].pop_front();
    const auto [from, to] = link;
    CommitActions out;
    CommitMachine& machine = *workers_[to].machine;
    if (message.kind == Message::kAsk) machine.asked(0, from, 1, message.round, message.word, out);
    if (message.kind == Message::kAnswer) machine.answered(0, from, 1, message.round, message.word, out);
    if (message.kind == Message::kDeath) machine.unreachable(0, from, out);
    perform(to, out);
  }
  void perform(std::uint32_t me, const CommitActions& out) {
    for (const CommitAction& action : out) {
      if (const auto* ask = std::get_if<AskMate>(&action)) {
        links_[{me, ask->mate}].push_back({Message::kAsk, ask->round, ask->word});
        // Whoever connects to a dead one is told.
        if (!workers_[ask->mate].alive) links_[{ask->mate, me}].push_back({Message::kDeath});
      }
      if (const auto* answer = std::get_if<AnswerMate>(&action))
        links_[{me, answer->mate}].push_back({Message::kAnswer, answer->round, answer->word});
      if (std::holds_alternative<Commit>(action)) decided(me, true);
      if (std::holds_alternative<Abort>(action)) decided(me, false);
    }
  }
  void decided(std::uint32_t me, bool commit) {
    EXPECT_FALSE(workers_[me].committed.has_value()) << "twice";
    workers_[me].committed = commit;
  }
  // A worker that has lost the sender ends with its sync; what it had sent arrives.
  void leave(std::uint32_t worker) {
    Worker& me = workers_[worker];
    if (!me.alive || !me.orphan || !me.committed || me.machine->deciding()) return;
    me.alive = false;
    me.left = true;
    for (std::uint32_t mate = 0; mate < workers_.size(); ++mate) {
      if (mate != worker) links_[{worker, mate}].push_back({Message::kDeath});
    }
  }
  void die(std::uint32_t worker) {
    if (!workers_[worker].alive) return;
    workers_[worker].alive = false;
    for (std::uint32_t mate = 0; mate < workers_.size(); ++mate) {
      if (mate == worker) continue;
      auto& queue = links_[{worker, mate}];
      queue.resize(random_.below(queue.size() + 1));  // what had left it
      queue.push_back({Message::kDeath});
    }
  }

  Random& random_;
  std::vector<Worker> workers_;
  std::vector<Event> events_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::deque<Message>> links_;
};

// Goal: the living agree, whatever the order of messages and whoever dies; all commit when a living one has
// seen its Finish, and nobody does when none was sent.
TEST(Commit, TheLivingAgree) {
  int commits = 0, aborts = 0;
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    Random random(seed);
    const auto size = static_cast<std::uint32_t>(random.between(1, 6));
    Replica replica(size, random);
    std::set<std::uint32_t> seen;
    const bool some = random.chance(0.7);
    for (std::uint32_t w = 0; w < size; ++w) {
      if (some && random.chance(0.3)) seen.insert(w);
    }
    replica.run(seen, static_cast<int>(random.below(size)));
    std::optional<bool> common;
    for (std::uint32_t w = 0; w < size; ++w) {
      const Replica::Worker& worker = replica.workers()[w];
      if (!worker.alive && !worker.left) continue;
      ASSERT_TRUE(worker.committed.has_value()) << "seed " << seed << ": worker " << w << " waits for ever";
      if (!common) common = worker.committed;
      ASSERT_EQ(*worker.committed, *common) << "seed " << seed << ": worker " << w << " of " << size;
      if (seen.empty()) {
        ASSERT_FALSE(*worker.committed) << "seed " << seed;
      }
    }
    if (common) ++(*common ? commits : aborts);
  }
  EXPECT_GT(commits, 1'000);
  EXPECT_GT(aborts, 1'000);
}

}  // namespace
}  // namespace shardpull::protocol_testing
