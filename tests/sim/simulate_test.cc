// Whole fleets in one thread: every rule of docs/PROTOCOL.md at once, over random orders and delays.
#include "sim/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/clock.h"

namespace shardpull::sim {
namespace {

void expect_clean(std::uint64_t seed, const SimOptions& options) {
  const SimReport report = simulate(seed, options);
  EXPECT_TRUE(report.violations.empty())
      << "seed " << seed << ", " << to_string(options) << "\n  " << report.violations.front();
  EXPECT_EQ(report.syncs_completed + report.syncs_failed, options.syncs);
  EXPECT_TRUE(options.failures || report.syncs_failed == 0);
  EXPECT_GE(report.syncs_completed, 1u);
  EXPECT_LE(report.peak_resident, options.lookahead + 1);
}

class Seeds : public testing::TestWithParam<std::uint64_t> {};

// Settings and delays drawn from the seed.
TEST_P(Seeds, EveryRuleHolds) {
  expect_clean(GetParam(), SimOptions::draw(GetParam()));
}

// The same fleets with steps that fail: the sync fails everywhere, and the next one is exact.
TEST_P(Seeds, AFailedSyncEndsEverywhereAndTheNextOneIsExact) {
  SimOptions options = SimOptions::draw(GetParam());
  options.failures = true;
  options.syncs = 6;
  expect_clean(GetParam(), options);
}

INSTANTIATE_TEST_SUITE_P(Simulate, Seeds, testing::Range<std::uint64_t>(1, 41));

// Processes die and come back, links fall silent, break or are held up, members are slow, messages repeat.
void expect_rules_under_faults(std::uint64_t first, std::uint64_t count, SimReport& sum) {
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    const SimOptions options = SimOptions::draw_with_faults(seed);
    const SimReport report = simulate(seed, options);
    ASSERT_TRUE(report.violations.empty())
        << "seed " << seed << ", " << to_string(options) << "\n  " << report.violations.front();
    sum.syncs_completed += report.syncs_completed;
    sum.syncs_failed += report.syncs_failed;
    sum.syncs_lossy += report.syncs_lossy;
    sum.rejoined += report.rejoined;
    sum.ranks_returned += report.ranks_returned;
    sum.syncs_without_a_rank += report.syncs_without_a_rank;
    sum.syncs_lost_between += report.syncs_lost_between;
    sum.faults += report.faults;
    sum.repeated += report.repeated;
    sum.stale_lives += report.stale_lives;
    sum.mates_asked += report.mates_asked;
    sum.mates_committed += report.mates_committed;
    sum.longest_sync_ns = std::max(sum.longest_sync_ns, report.longest_sync_ns);
  }
}

TEST(Simulate, EveryRuleHoldsUnderFaults) {
  SimReport sum;
  expect_rules_under_faults(1, 200, sum);
  EXPECT_GT(sum.faults, 400u);
  EXPECT_GT(sum.syncs_completed, 300u);
  EXPECT_GT(sum.syncs_failed, 100u);
  EXPECT_GT(sum.syncs_lossy, 30u) << "exact for the replicas that lost nobody";
  EXPECT_GT(sum.rejoined, 100u);
  EXPECT_GT(sum.ranks_returned, 50u);
  EXPECT_GT(sum.syncs_without_a_rank, 10u);
  EXPECT_GT(sum.syncs_lost_between, 10u);
  EXPECT_GT(sum.repeated, 1000u);
  EXPECT_GT(sum.stale_lives, 5u);
  EXPECT_GT(sum.mates_asked, 100u);
  EXPECT_GT(sum.mates_committed, 0u);
  EXPECT_LT(sum.longest_sync_ns, 15 * kNanosPerSecond) << "what a failed sync may wait for its members";
}

// One whose worker is there again between the end of a sync and the opening of the next.
TEST(Simulate, AWorkerThatComesBackBeforeASyncIsOpenedTakesPart) {
  SimReport sum;
  expect_rules_under_faults(900000651, 1, sum);
  EXPECT_GT(sum.rejoined, 0u);
  EXPECT_GT(sum.syncs_completed, 1u);
}

TEST(Simulate, ARunWithFaultsReplaysToo) {
  const SimOptions options = SimOptions::draw_with_faults(7);
  const SimReport first = simulate(7, options), again = simulate(7, options, true);
  EXPECT_EQ(first.trace_hash, again.trace_hash);
  EXPECT_EQ(first.struck, again.struck);
  EXPECT_TRUE(first.trace.empty());
  EXPECT_FALSE(again.trace.empty());
}

// Syncs of some names and resident ranks, with and without failures: every name holds the version it was last
// moved in.
TEST(Simulate, SyncsOfSomeNamesAndResidentRanks) {
  std::uint32_t partial = 0, failed = 0, refused = 0, in_place = 0, without_credit = 0;
  for (std::uint64_t seed = 501; seed <= 515; ++seed) {
    SimOptions options = SimOptions::draw(seed);
    options.partial = options.resident = true;
    options.failures = seed % 2 == 0;
    options.syncs = 6;
    const SimReport report = simulate(seed, options);
    ASSERT_TRUE(report.violations.empty())
        << "seed " << seed << ", " << to_string(options) << "\n  " << report.violations.front();
    partial += report.syncs_partial;
    failed += report.syncs_failed;
    refused += report.syncs_refused;
    in_place += report.peak_in_place > 0 ? 1 : 0;
    without_credit += report.peak_in_place > options.lookahead + 1 ? 1 : 0;
  }
  EXPECT_GT(partial, 30u);
  EXPECT_GT(failed, 10u);
  EXPECT_GT(refused, 0u);
  EXPECT_GT(in_place, 5u);
  EXPECT_GT(without_credit, 0u) << "a resident rank publishes more than a rank with credit could hold";
}

SimOptions with_sums(PathPolicy path) {
  SimOptions options;
  options.path = path;
  options.replicas = 2;
  options.trainers = 3;
  options.pull_split = 2;
  options.transport = path == PathPolicy::kMapped ? TransportKind::kShm : TransportKind::kTcp;
  options.integrity = path == PathPolicy::kMapped ? Integrity::kFull : Integrity::kWire;
  options.corruption = true;
  options.syncs = 6;
  return options;
}

// A flipped bit, in a serve slot or in what has just arrived on any path, fails the sync everywhere, and the
// next one is exact.
TEST(Simulate, AFlippedBitIsFoundOnEveryPath) {
  for (const PathPolicy path : {PathPolicy::kPacked, PathPolicy::kMapped, PathPolicy::kDirect}) {
    std::uint32_t corrupt = 0;
    std::uint64_t on_path = 0;
    for (std::uint64_t seed = 701; seed <= 712; ++seed) {
      SimOptions options = with_sums(path);
      options.partial = options.resident = seed % 2 == 0;
      const SimReport report = simulate(seed, options);
      ASSERT_TRUE(report.violations.empty())
          << "seed " << seed << ", " << to_string(options) << "\n  " << report.violations.front();
      EXPECT_EQ(report.syncs_failed, report.syncs_corrupt);
      EXPECT_GT(report.summed_keys, 0u);
      corrupt += report.syncs_corrupt;
      on_path += path == PathPolicy::kMapped   ? report.mapped_chunks
                 : path == PathPolicy::kDirect ? report.direct_chunks
                                               : report.packs;
    }
    EXPECT_GE(corrupt, 12u) << to_string(with_sums(path));
    EXPECT_GT(on_path, 0u);
  }
}

// The simulator notices the flipped bit itself: without sums it ends in a parameter.
TEST(Simulate, AFlippedBitWithoutSumsIsAViolation) {
  for (const PathPolicy path : {PathPolicy::kPacked, PathPolicy::kMapped, PathPolicy::kDirect}) {
    std::uint32_t found = 0;
    for (std::uint64_t seed = 701; seed <= 704; ++seed) {
      SimOptions options = with_sums(path);
      options.integrity = Integrity::kOff;
      found += simulate(seed, options).violations.empty() ? 0 : 1;
    }
    EXPECT_GE(found, 2u) << to_string(with_sums(path));
  }
}

// Every depth, lookahead and path, whatever the seeds draw.
TEST(Simulate, EveryDepthLookaheadAndPath) {
  std::uint64_t seed = 1000;
  for (const std::uint32_t ring_depth : {1u, 2u, 4u}) {
    for (const std::uint32_t lookahead : {0u, 1u, 3u}) {
      for (const PathPolicy path :
           {PathPolicy::kPacked, PathPolicy::kMapped, PathPolicy::kDirect, PathPolicy::kAuto}) {
        SimOptions options;
        options.ring_depth = ring_depth;
        options.lookahead = lookahead;
        options.path = path;
        expect_clean(++seed, options);
      }
    }
  }
}

TEST(Simulate, TheLargestFleetOfTheFirstKind) {
  SimOptions options;
  options.trainers = 4;
  options.tp = 4;
  options.replicas = 2;
  options.ring_depth = 4;
  options.holdings = Holdings::kRandom;
  options.path = PathPolicy::kPacked;
  expect_clean(5, options);
}

TEST(Simulate, AChunkMayComeFromSeveralProducers) {
  SimOptions options;
  options.trainers = 4;
  options.tp = 2;
  options.max_chunk_bytes = 0;
  options.pull_split = 3;
  for (const PathPolicy path : {PathPolicy::kPacked, PathPolicy::kMapped, PathPolicy::kDirect}) {
    options.path = path;
    expect_clean(6, options);
  }
}

TEST(Simulate, ReplicasShareOnePackPerChunk) {
  SimOptions options;
  options.trainers = 1;
  options.tp = 2;
  options.replicas = 3;
  options.path = PathPolicy::kPacked;
  const SimReport shared = simulate(7, options);
  ASSERT_TRUE(shared.violations.empty()) << shared.violations.front();
  EXPECT_EQ(shared.packs * 3, shared.pulls);
  options.share_slots = false;
  const SimReport own = simulate(7, options);
  ASSERT_TRUE(own.violations.empty()) << own.violations.front();
  EXPECT_EQ(own.packs, own.pulls);
}

TEST(Simulate, TheSameSeedIsTheSameRun) {
  const SimOptions options = SimOptions::draw(3);
  const SimReport first = simulate(3, options), again = simulate(3, options), other = simulate(4, options);
  EXPECT_EQ(first.trace_hash, again.trace_hash);
  EXPECT_EQ(first.events, again.events);
  EXPECT_EQ(first.simulated_ns, again.simulated_ns);
  EXPECT_NE(first.trace_hash, other.trace_hash);
}

TEST(Simulate, StepsDoFail) {
  std::uint32_t failed = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SimOptions options = SimOptions::draw(seed);
    options.failures = true;
    options.syncs = 6;
    failed += simulate(seed, options).syncs_failed;
  }
  EXPECT_GE(failed, 10u);
}

// The seeds reach what they are there for.
TEST(Simulate, TheSeedsCoverTheirSettings) {
  std::set<std::uint32_t> depths, lookaheads, trainers, workers;
  std::set<Holdings> holdings;
  std::set<PathPolicy> paths;
  std::set<Integrity> integrities;
  std::set<TransportKind> transports;
  std::uint64_t early = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const SimOptions options = SimOptions::draw(seed);
    depths.insert(options.ring_depth);
    lookaheads.insert(options.lookahead);
    trainers.insert(options.trainers);
    workers.insert(options.tp * options.pp * options.replicas);
    holdings.insert(options.holdings);
    paths.insert(options.path);
    integrities.insert(options.integrity);
    transports.insert(options.transport);
    if (early == 0) early = simulate(seed, options).kept_early;
  }
  EXPECT_EQ(depths.size(), 3u);
  EXPECT_EQ(lookaheads.size(), 3u);
  EXPECT_EQ(trainers.size(), 4u);
  EXPECT_GE(workers.size(), 4u);
  EXPECT_EQ(holdings.size(), std::size_t{kHoldings});
  EXPECT_EQ(paths.size(), 4u);
  EXPECT_EQ(integrities.size(), 3u);
  EXPECT_EQ(transports.size(), 2u);
  EXPECT_GT(early, 0u) << "messages that come before their sync has begun on a rank";
}

}  // namespace
}  // namespace shardpull::sim
