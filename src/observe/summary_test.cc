#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shardpull/fleet.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint64_t kMillion = 1'000'000;

WorkerReport worker(std::uint32_t id, std::uint64_t bytes, std::uint64_t ms, Phase phase) {
  WorkerReport report;
  report.consumer = id;
  report.bytes_moved = bytes;
  report.update_ns = ms * kMillion - kMillion;
  report.commit_ns = kMillion;
  report.phases = {{phase, ms * kMillion * 4 / 5, ms * kMillion, 3},
                   {Phase::kEngine, ms * kMillion / 5, 0, 0}};
  return report;
}

SyncReport sync(std::vector<WorkerReport> workers) {
  SyncReport report;
  report.version = 9;
  report.wall_ns = 500 * kMillion;
  report.workers = std::move(workers);
  return report;
}

// Goal: bytes beside rates tell a worker that takes more from one whose link is slower.
TEST(Summary, TellsMoreBytesFromASlowerLink) {
  const std::vector<WorkerReport> even = {worker(0, 100 * kMillion, 100, Phase::kTransfer),
                                          worker(1, 100 * kMillion, 100, Phase::kTransfer)};
  auto more = even, slower = even;
  more.push_back(worker(2, 400 * kMillion, 400, Phase::kTransfer));
  slower.push_back(worker(2, 100 * kMillion, 400, Phase::kTransfer));
  EXPECT_EQ(summary_line(sync(more)),
            "version 9, 572 MiB in 500 ms (1.2 GB/s); slowest worker 2: 381 MiB in 400 ms (1 GB/s) against "
            "95.4 MiB in 100 ms (1 GB/s), more bytes, 80 % transfer");
  EXPECT_EQ(
      summary_line(sync(slower)),
      "version 9, 286 MiB in 500 ms (600 MB/s); slowest worker 2: 95.4 MiB in 400 ms (250 MB/s) against "
      "95.4 MiB in 100 ms (1 GB/s), slower, 80 % transfer");
  EXPECT_THAT(summary_line(sync(even)), Not(HasSubstr("slower,")));
}

// Goal: a worker that waits for a trainer names it, and what that rank spends its time on.
TEST(Summary, NamesTheTrainerThatIsWaitedFor) {
  SyncReport report = sync({worker(0, kMillion, 100, Phase::kProduceWait)});
  report.workers[0].waited_for = 3;
  report.workers[0].waited_ns = 70 * kMillion;
  EXPECT_THAT(summary_line(report), HasSubstr(", 80 % produce wait for trainer 3"));
  report.ranks = {
      {.rank = 3, .wall_ns = 200, .phases = {{Phase::kSource, 150, 150, 1}, {Phase::kEngine, 50, 50, 0}}}};
  EXPECT_THAT(summary_line(report), HasSubstr(", 80 % produce wait for trainer 3 (75 % source)"));
}

TEST(Summary, TakesReportsWithoutWorkersOrPhases) {
  EXPECT_EQ(summary_line(sync({})), "version 9, 0 B in 500 ms (0 B/s)");
  WorkerReport bare;
  EXPECT_THAT(summary_line(sync({bare})), HasSubstr("slowest worker 0: 0 B in 0 ns"));
}

}  // namespace
}  // namespace shardpull
