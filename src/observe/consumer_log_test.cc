#include "observe/consumer_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardpull {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

std::vector<std::tuple<Phase, std::uint32_t, std::int64_t, std::int64_t>> flat(const ConsumerLog& log) {
  std::vector<std::tuple<Phase, std::uint32_t, std::int64_t, std::int64_t>> out;
  for (const Span& span : log.spans()) out.emplace_back(span.phase, span.item, span.begin_ns, span.end_ns);
  return out;
}

// Goal: a packed chunk of two runs and one behind it give every wait from what ends to what begins, and slot
// waits follow each other without overlap.
TEST(ConsumerLog, WaitsLieBetweenWhatHappens) {
  ConsumerLog log;
  log.begin_sync(4);
  log.begin_update(100);
  log.pull_sent(0, 0, 3, 101);
  log.pull_sent(0, 1, 4, 102);
  log.pull_sent(1, 0, 3, 110);
  log.answered(0, 0, 120);
  log.run_started(0, 0, 125);
  log.worked({.phase = Phase::kTransfer, .item = 0, .peer = 3, .begin_ns = 125, .end_ns = 130});
  log.answered(0, 1, 140);
  log.run_started(0, 1, 140);
  log.worked({.phase = Phase::kTransfer, .run = 1, .item = 0, .peer = 4, .begin_ns = 140, .end_ns = 150});
  log.answered(1, 0, 145);
  log.chunk_started(1, 160);
  log.worked({.phase = Phase::kMaterialise, .item = 1, .begin_ns = 161, .end_ns = 161});
  log.worked({.phase = Phase::kTransfer, .item = 1, .begin_ns = 161, .end_ns = 170});
  log.end_update(180);
  EXPECT_THAT(
      flat(log),
      ElementsAre(std::tuple(Phase::kSlotWait, 0u, 100, 101), std::tuple(Phase::kSlotWait, 1u, 101, 110),
                  std::tuple(Phase::kProduceWait, 0u, 101, 120), std::tuple(Phase::kEventWait, 0u, 120, 125),
                  std::tuple(Phase::kTransfer, 0u, 125, 130), std::tuple(Phase::kProduceWait, 0u, 102, 140),
                  std::tuple(Phase::kEventWait, 0u, 140, 140), std::tuple(Phase::kTransfer, 0u, 140, 150),
                  std::tuple(Phase::kProduceWait, 1u, 110, 145), std::tuple(Phase::kEventWait, 1u, 145, 160),
                  std::tuple(Phase::kTransfer, 1u, 161, 170),
                  std::tuple(Phase::kSignalWait, kNoItem, 170, 180)));
  EXPECT_EQ(log.spans()[5].peer, 4u);
  log.begin_commit(200);
  log.end_commit(230);
  log.end_commit(240);  // it is over
  log.end_update(250);
  WorkerReport report;
  log.fill(report);
  EXPECT_EQ(report.commit_ns, 30u);
  EXPECT_EQ(report.waited_for, 3u);
  EXPECT_EQ(report.waited_ns, 19u);  // until 120; from 130 to 140 trainer 4 is waited for longer
  std::uint64_t sum = 0;
  for (const PhaseTime& phase : report.phases) sum += phase.charged_ns;
  EXPECT_EQ(sum, 80u + 30u);
  EXPECT_EQ(log.timeline().spans.size(), log.spans().size());
  EXPECT_THAT(log.windows(), ElementsAre(Window{100, 180, Phase::kEngine}, Window{200, 230, Phase::kCommit}));
}

// Goal: an update that fails has waited until then for what nobody answered; the next sync starts afresh.
TEST(ConsumerLog, AnUnansweredPullWasWaitedForUntilTheEnd) {
  ConsumerLog log;
  log.begin_sync(2);
  log.begin_update(0);
  log.pull_sent(0, 0, 1, 0);
  log.pull_sent(1, 0, 2, 0);
  log.answered(1, 0, 5);
  log.end_update(50);
  std::vector<std::pair<std::uint32_t, std::int64_t>> waits;
  for (const Span& span : log.spans()) {
    if (span.phase == Phase::kProduceWait) waits.emplace_back(span.peer, span.end_ns);
  }
  EXPECT_THAT(waits, ElementsAre(std::pair(2u, 5), std::pair(1u, 50)));
  log.begin_sync(2);
  EXPECT_THAT(log.spans(), SizeIs(0));
  EXPECT_THAT(log.windows(), SizeIs(0));
}

// Goal: what is asked for again, of another trainer, waits from then on, without a second slot wait; answers
// that nobody asked for are no spans.
TEST(ConsumerLog, APullThatIsSentAgainWaitsForTheOther) {
  ConsumerLog log;
  log.begin_sync(1);
  log.begin_update(0);
  log.pull_sent(0, 0, 1, 2);
  log.pull_sent(0, 0, 2, 10);
  log.answered(0, 0, 14);
  log.answered(0, 0, 15);
  log.answered(9, 0, 15);
  log.chunk_started(9, 15);
  EXPECT_THAT(flat(log),
              ElementsAre(std::tuple(Phase::kSlotWait, 0u, 0, 2), std::tuple(Phase::kProduceWait, 0u, 2, 10),
                          std::tuple(Phase::kProduceWait, 0u, 10, 14)));
}

// Goal: memory is bounded by what the sync was said to hold; what has no room is counted.
TEST(SpanLog, CountsWhatHasNoRoom) {
  SpanLog log;
  log.reset(3);
  for (int i = 0; i < 5; ++i) log.add({.begin_ns = i, .end_ns = i + 1});
  EXPECT_THAT(log.spans(), SizeIs(3));
  EXPECT_EQ(log.dropped(), 2u);
  log.reset(1);
  EXPECT_THAT(log.spans(), SizeIs(0));
  EXPECT_EQ(log.dropped(), 0u);
}

}  // namespace
}  // namespace shardpull
