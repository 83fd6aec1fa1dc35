// Every planted mistake is found by the simulator within 200 seeds. Built and run by `./dev test --planted`;
// in other builds there is nothing here.
#include "base/plants.h"

#ifdef SHARDPULL_PLANTS

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <string>

#include "sim/simulate.h"

namespace shardpull::sim {
namespace {

class Plants : public testing::TestWithParam<const char*> {
 protected:
  void TearDown() override { plant(""); }
};

TEST_P(Plants, AreFound) {
  plant(GetParam());
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const SimReport report = simulate(seed, SimOptions::draw_with_faults(seed));
    if (report.violations.empty()) continue;
    std::printf("%s: seed %d: %s\n", GetParam(), static_cast<int>(seed), report.violations.front().c_str());
    return;
  }
  FAIL() << GetParam() << " was not found";
}

INSTANTIATE_TEST_SUITE_P(
    Simulate, Plants,
    testing::Values(
        // Producer: slots are chosen by the order of arrival; packed before all sharers are there; a retry is
        // answered with whatever its slot holds.
        "slot-by-arrival", "pack-before-all-sharers", "retry-gets-what-the-slot-holds",
        // Producer: signals are a number instead of a set; one is enough; a new sync erases those that came
        // early; those of an earlier sync count; a group is freed while a pack reads it.
        "signals-are-counted", "freed-by-the-first-signal", "begin-forgets-early-signals",
        "stale-signals-count", "freed-under-a-pack",
        // Worker: chunks are asked for before K earlier ones have landed; a slot is written while its last
        // use is scattered; a group is signalled while it is copied; chunks do not wait for their module's
        // first.
        "issue-without-drain", "slot-without-generation", "signal-before-the-copy-ends",
        "chunks-without-module-order",
        // Producer: pulls, and signals, of a worker's life before the present one count.
        "any-life-will-do", "old-lives-are-heard",
        // Takeover: in the lane of the sharers; those wait for one that has left its lane.
        "reroute-without-a-lane", "sharers-wait-for-one-that-left",
        // Commit: one that is prepared and has lost the sender aborts without asking its mates.
        "aborts-without-asking",
        // Trainer: memory goes back while somebody reads it. Sender: commits while a mate is not prepared;
        // mates of a lost worker stay in the sync; who is lost between two syncs is left out where that is to
        // fail the next one.
        "buffers-back-before-quiet", "commit-without-a-mate", "mates-of-the-lost-stay",
        "forgets-who-was-lost-between"),
    [](const auto& info) {
      std::string name = info.param;
      std::replace_if(name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
      return name;
    });

// What is not planted is not found: the seeds pass.
TEST(NoPlant, NothingIsFound) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const SimReport report = simulate(seed, SimOptions::draw_with_faults(seed));
    ASSERT_TRUE(report.violations.empty()) << "seed " << seed << ": " << report.violations.front();
  }
}

}  // namespace
}  // namespace shardpull::sim

#endif
