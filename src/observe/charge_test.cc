#include "observe/charge.h"

#include <algorithm>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

using ::testing::ElementsAre;

Span span(Phase phase, std::int64_t begin, std::int64_t end, std::uint32_t peer = kNoPeer) {
  return {.phase = phase, .peer = peer, .begin_ns = begin, .end_ns = end};
}

// (begin, end, phase) of each segment.
std::vector<std::tuple<std::int64_t, std::int64_t, Phase>> flat(const Charged& charged) {
  std::vector<std::tuple<std::int64_t, std::int64_t, Phase>> out;
  for (const Segment& each : charged.segments) out.emplace_back(each.begin_ns, each.end_ns, each.phase);
  return out;
}

PhaseTime of(const Charged& charged, Phase phase) {
  for (const PhaseTime& each : charged.phases) {
    if (each.phase == phase) return each;
  }
  return {.phase = phase};
}

std::uint64_t sum(const Charged& charged) {
  std::uint64_t total = 0;
  for (const PhaseTime& each : charged.phases) total += each.charged_ns;
  return total;
}

// Goal: a pipeline that is known instant by instant is charged instant by instant: waits behind work cost
// nothing, what nobody does is the engine's, and what is hidden shows as active.
TEST(Charge, EachInstantGoesToTheFirstPhaseUnderWay) {
  const std::vector<Span> spans = {
      span(Phase::kSlotWait, 0, 5),       span(Phase::kProduceWait, 5, 40),  span(Phase::kTransfer, 40, 60),
      span(Phase::kProduceWait, 30, 70),  span(Phase::kScatter, 60, 90),     span(Phase::kTransfer, 70, 80),
      span(Phase::kPostProcess, 90, 130), span(Phase::kSignalWait, 95, 120),
  };
  const std::vector<Window> windows = {{0, 120, Phase::kEngine}};
  const Charged charged = charge(spans, windows);
  EXPECT_THAT(flat(charged),
              ElementsAre(std::tuple(0, 5, Phase::kSlotWait), std::tuple(5, 40, Phase::kProduceWait),
                          std::tuple(40, 60, Phase::kTransfer), std::tuple(60, 70, Phase::kScatter),
                          std::tuple(70, 80, Phase::kTransfer), std::tuple(80, 90, Phase::kScatter),
                          std::tuple(90, 120, Phase::kPostProcess)));
  EXPECT_EQ(sum(charged), 120u);
  EXPECT_EQ(of(charged, Phase::kProduceWait), (PhaseTime{Phase::kProduceWait, 35, 65, 2}));
  EXPECT_EQ(of(charged, Phase::kScatter), (PhaseTime{Phase::kScatter, 20, 30, 1}));
  EXPECT_EQ(of(charged, Phase::kPostProcess), (PhaseTime{Phase::kPostProcess, 30, 30, 1}));
  EXPECT_EQ(of(charged, Phase::kSignalWait), (PhaseTime{Phase::kSignalWait, 0, 25, 1}));
}

// Goal: between windows nothing is charged; a span that reaches over the gap counts in both; each window has
// a rest of its own.
TEST(Charge, WindowsHaveTheirOwnRest) {
  const std::vector<Span> spans = {span(Phase::kTransfer, 10, 20), span(Phase::kPostProcess, 15, 45)};
  const std::vector<Window> windows = {{0, 30, Phase::kEngine}, {40, 60, Phase::kCommit}};
  const Charged charged = charge(spans, windows);
  EXPECT_THAT(flat(charged),
              ElementsAre(std::tuple(0, 10, Phase::kEngine), std::tuple(10, 20, Phase::kTransfer),
                          std::tuple(20, 30, Phase::kPostProcess), std::tuple(40, 45, Phase::kPostProcess),
                          std::tuple(45, 60, Phase::kCommit)));
  EXPECT_EQ(of(charged, Phase::kCommit), (PhaseTime{Phase::kCommit, 15, 15, 0}));
  EXPECT_EQ(of(charged, Phase::kPostProcess), (PhaseTime{Phase::kPostProcess, 15, 20, 1}));
}

// Goal: what a rank serves is shown beside and takes nothing from its time.
TEST(Charge, ServingIsNeverCharged) {
  const std::vector<Span> spans = {span(Phase::kServe, 0, 50), span(Phase::kCreditWait, 10, 20)};
  const std::vector<Window> windows = {{0, 50, Phase::kEngine}};
  const Charged charged = charge(spans, windows);
  EXPECT_THAT(flat(charged),
              ElementsAre(std::tuple(0, 10, Phase::kEngine), std::tuple(10, 20, Phase::kCreditWait),
                          std::tuple(20, 50, Phase::kEngine)));
  EXPECT_EQ(of(charged, Phase::kServe), (PhaseTime{Phase::kServe, 0, 50, 1}));
}

// Goal: of several waits the one that began first is charged, and the trainer that most of it was for is
// named.
TEST(Charge, NamesWhoWasWaitedFor) {
  const std::vector<Span> spans = {span(Phase::kProduceWait, 0, 30, 7), span(Phase::kProduceWait, 10, 100, 2),
                                   span(Phase::kProduceWait, 90, 130, 7)};
  const std::vector<Window> windows = {{0, 130, Phase::kEngine}};
  const Charged charged = charge(spans, windows);
  const Waited most = most_waited(charged, spans, Phase::kProduceWait);
  EXPECT_EQ(most.peer, 2u);
  EXPECT_EQ(most.ns, 70u);
  EXPECT_EQ(most_waited(charged, spans, Phase::kTransfer).peer, kNoPeer);
}

TEST(Charge, TakesNoSpansAndNoWindows) {
  EXPECT_TRUE(charge({}, {}).segments.empty());
  const std::vector<Window> empty = {{5, 5, Phase::kEngine}};
  const std::vector<Span> spans = {span(Phase::kTransfer, 0, 10), span(Phase::kTransfer, 9, 3)};
  EXPECT_EQ(sum(charge(spans, empty)), 0u);
  EXPECT_TRUE(charge(spans, {}).phases.empty());
}

// Goal: whatever the spans are, each instant of the windows is charged once, to what a plain look at that
// instant says: segments tile the windows, and sums are exact.
RC_GTEST_PROP(Charge, AgreesWithLookingAtEveryInstant, ()) {
  const auto time = rc::gen::inRange<std::int64_t>(-5, 45);
  const auto spans = *rc::gen::container<std::vector<Span>>(
      rc::gen::map(rc::gen::tuple(rc::gen::inRange(0, static_cast<int>(Phase::kEngine)), time, time,
                                  rc::gen::inRange<std::uint32_t>(0, 3)),
                   [](const auto& drawn) {
                     const auto& [phase, begin, end, peer] = drawn;
                     return span(static_cast<Phase>(phase), begin, end, peer);
                   }));
  auto cuts = *rc::gen::container<std::vector<std::int64_t>>(4, rc::gen::inRange<std::int64_t>(0, 40));
  std::sort(cuts.begin(), cuts.end());
  const std::vector<Window> windows = {{cuts[0], cuts[1], Phase::kEngine},
                                       {cuts[2], cuts[3], Phase::kCommit}};
  const Charged charged = charge(spans, windows);

  std::vector<std::uint64_t> expected(static_cast<std::size_t>(Phase::kEngine) + 1);
  auto segment = charged.segments.begin();
  for (const Window& window : windows) {
    for (std::int64_t now = window.begin_ns; now < window.end_ns; ++now) {
      const Span* first = nullptr;  // of the phase that counts
      for (const Span& each : spans) {
        if (each.phase == Phase::kServe || each.begin_ns > now || each.end_ns <= now) continue;
        if (first == nullptr || each.phase < first->phase ||
            (each.phase == first->phase && each.begin_ns < first->begin_ns)) {
          first = &each;
        }
      }
      while (segment != charged.segments.end() && segment->end_ns <= now) ++segment;
      RC_ASSERT(segment != charged.segments.end());
      RC_ASSERT(segment->begin_ns <= now);
      RC_ASSERT(segment->phase == (first != nullptr ? first->phase : window.rest));
      RC_ASSERT((segment->span == kNoSpan) == (first == nullptr));
      if (first != nullptr) RC_ASSERT(spans[segment->span].begin_ns == first->begin_ns);
      ++expected[static_cast<std::size_t>(segment->phase)];
    }
  }
  for (const PhaseTime& each : charged.phases)
    RC_ASSERT(each.charged_ns == expected[static_cast<std::size_t>(each.phase)]);
  RC_ASSERT(sum(charged) == static_cast<std::uint64_t>(cuts[1] - cuts[0] + cuts[3] - cuts[2]));
}

}  // namespace
}  // namespace shardpull
