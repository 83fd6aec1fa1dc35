// How workers of a replica agree over real progress threads and a simulated network: docs/PROTOCOL.md,
// "Commit".
#include "runtime/replica_link.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/mutex.h"
#include "transport/sim/sim_transport.h"

namespace shardpull {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

constexpr FleetToken kToken = 7;
const Status kLost(StatusCode::kUnavailable, "trainer 0 is lost", {.reason = Reason::kPeerLost});

// One worker's link on a thread of its own, and what it decided.
class Mate final : TransportSink {
 public:
  Mate(SimNet& net, std::uint32_t consumer, std::uint32_t size, Incarnation life, std::int64_t dead_after_ns)
      : life_(life),
        address_("sim:" + name(consumer, life)),
        progress_(
            net.open(name(consumer, life), kToken, life), *this,
            [this] { link_.tick(); }, [](const Status&) {}, kNanosPerMilli, SystemClock::instance()),
        link_(progress_, consumer, others(consumer, size), kToken, life, dead_after_ns,
              {.announce = [](std::uint32_t, const std::string&) {},
               .commit = [this](std::uint64_t) { decided(""); },
               .abort = [this](std::uint64_t, const Status& why) { decided(why.message()); }}) {
    progress_.start();
    run([&] { EXPECT_EQ(link_.listen(), Status()); });
  }
  ~Mate() override { progress_.stop(); }

  void run(const std::function<void()>& task) { EXPECT_TRUE(progress_.run(task)); }
  ReplicaLink& link() { return link_; }
  // "": committed, else why not; bounded.
  std::string outcome() {
    MutexLock lock(mutex_);
    for (int waits = 0; !outcome_ && waits < 30; ++waits) wake_.wait_for_ns(mutex_, kNanosPerSecond);
    EXPECT_TRUE(outcome_.has_value()) << "nothing was decided";
    return outcome_.value_or("nothing");
  }
  Incarnation life() const { return life_; }
  const std::string& address() const { return address_; }

 private:
  static std::string name(std::uint32_t consumer, Incarnation life) {
    return "worker-" + std::to_string(consumer) + "-" + std::to_string(life);
  }
  static std::vector<std::uint32_t> others(std::uint32_t consumer, std::uint32_t size) {
    std::vector<std::uint32_t> mates;
    for (std::uint32_t mate = 0; mate < size; ++mate) {
      if (mate != consumer) mates.push_back(mate);
    }
    return mates;
  }
  void decided(std::string text) {
    MutexLock lock(mutex_);
    EXPECT_FALSE(outcome_.has_value()) << "twice";
    outcome_ = std::move(text);
    wake_.notify_all();
  }
  void on_accepted(EndpointId endpoint) override { link_.on_accepted(endpoint); }
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override {
    EXPECT_TRUE(link_.on_message(endpoint, header, payload));
  }
  void on_closed(EndpointId endpoint, const Status& why) override { link_.on_closed(endpoint, why); }
  void on_read_done(ReadToken, const Status&) override {}

  const Incarnation life_;
  const std::string address_;
  Mutex mutex_;
  CondVar wake_;
  std::optional<std::string> outcome_ SHARDPULL_GUARDED_BY(mutex_);
  ProgressThread progress_;
  ReplicaLink link_;
};

class Replica {
 public:
  explicit Replica(std::uint32_t size, std::int64_t dead_after_ns = 20 * kNanosPerSecond) {
    for (std::uint32_t c = 0; c < size; ++c)
      mates.push_back(std::make_unique<Mate>(net, c, size, 100 + c, dead_after_ns));
    for (std::uint32_t a = 0; a < size; ++a) {
      for (std::uint32_t b = 0; b < size; ++b) {
        if (a != b) introduce(a, b, mates[b]->life());
      }
    }
    for (auto& mate : mates) {
      mate->run([&] {
        EXPECT_EQ(mate->link().start(1), Status());
        mate->link().update_done(1, Status());
      });
    }
  }
  // `a` hears that `b` is up, in this life, and where it listens.
  void introduce(std::uint32_t a, std::uint32_t b, Incarnation life) {
    const std::string address = mates[b]->address();
    mates[a]->run([&] {
      mates[a]->link().worker_up(b, life);
      mates[a]->link().mate_listens(b, life, address);
    });
  }
  void finish(std::uint32_t c) {
    mates[c]->run([&] { EXPECT_EQ(mates[c]->link().finish(1), Status()); });
  }
  void lose_sender(std::uint32_t c) {
    mates[c]->run([&] { mates[c]->link().sender_lost(kLost); });
  }

  SimNet net{SystemClock::instance(), SimNetOptions{}};
  std::vector<std::unique_ptr<Mate>> mates;
};

TEST(ReplicaLink, AMateThatSawTheCommitTakesTheOthersAlong) {
  for (const std::uint32_t size : {2u, 5u}) {
    Replica replica(size);
    replica.finish(1);
    for (std::uint32_t c = 0; c < size; ++c) replica.lose_sender(c);
    for (auto& mate : replica.mates) EXPECT_EQ(mate->outcome(), "");
  }
}

// One loses its link to a sender that lives: its mates are asked, and abort with it.
TEST(ReplicaLink, NobodySawItSoNobodyCommits) {
  for (const std::uint32_t size : {1u, 2u, 5u}) {
    Replica replica(size);
    replica.lose_sender(0);
    for (auto& mate : replica.mates) EXPECT_THAT(mate->outcome(), ContainsRegex("(no mate has|has not) committed sync 1"));
    for (auto& mate : replica.mates)
      mate->run([&] { EXPECT_FALSE(mate->link().finish(1).ok()) << "too late"; });
  }
}

TEST(ReplicaLink, DeadMatesAreNotWaitedFor) {
  Replica replica(3);
  replica.mates[2].reset();
  replica.lose_sender(0);
  for (const std::uint32_t c : {0u, 1u})
    EXPECT_THAT(replica.mates[c]->outcome(), ContainsRegex("(no mate has|has not) committed sync 1"));
}

// It was asked, and is started again before it answers: the life that could have is gone.
TEST(ReplicaLink, AMateThatIsStartedAgainHasNoAnswer) {
  Replica replica(2, 60 * kNanosPerSecond);
  const auto mute = replica.net.open("mute", kToken, 556);
  const std::string address = *mute->listen();
  replica.mates[0]->run([&] {
    replica.mates[0]->link().worker_up(1, 556);
    replica.mates[0]->link().mate_listens(1, 556, address);
  });
  replica.lose_sender(0);
  replica.mates[0]->run([&] { EXPECT_TRUE(replica.mates[0]->link().deciding()); });
  replica.mates[0]->run([&] { replica.mates[0]->link().worker_up(1, 777); });
  EXPECT_THAT(replica.mates[0]->outcome(), HasSubstr("no mate has committed sync 1"));
}

// A mate of another life than the control channel knows is not believed, nor is one that never said where it
// listens waited for.
TEST(ReplicaLink, StrangersHaveNoSay) {
  Replica replica(2);
  replica.finish(1);
  replica.introduce(0, 1, 555);  // another life of worker 1 is up there
  replica.lose_sender(0);
  EXPECT_THAT(replica.mates[0]->outcome(), HasSubstr("no mate has committed sync 1"));

  Replica silent(2, 200 * kNanosPerMilli);
  silent.mates[0]->run([&] { silent.mates[0]->link().worker_up(1, 556); });
  silent.finish(1);
  silent.lose_sender(0);
  EXPECT_THAT(silent.mates[0]->outcome(), HasSubstr("no mate has committed sync 1"));
}

}  // namespace
}  // namespace shardpull
