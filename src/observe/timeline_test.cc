#include "observe/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

Timeline sample() {
  return make_timeline({{10, 90, Phase::kEngine}, {100, 120, Phase::kCommit}},
                       {{.phase = Phase::kTransfer,
                         .path = SpanPath::kDirect,
                         .run = 2,
                         .item = 7,
                         .peer = 1,
                         .begin_ns = 30,
                         .end_ns = 60,
                         .bytes = 4096},
                        {.phase = Phase::kProduceWait, .item = 7, .peer = 1, .begin_ns = 10, .end_ns = 30}},
                       3);
}

TEST(Timeline, SurvivesItsBytes) {
  const Timeline sent = sample();
  EXPECT_EQ(sent.spans.front().phase, Phase::kProduceWait);  // by begin
  const auto bytes = encode_timeline(sent);
  const auto read = decode_timeline(bytes);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  EXPECT_EQ(*read, sent);
}

// Goal: a prefix, an unknown phase or path, times that go back: each is refused, and nothing is read beyond.
TEST(Timeline, RefusesWhatItNeverWrites) {
  const auto bytes = encode_timeline(sample());
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_FALSE(decode_timeline({bytes.data(), size}).ok()) << size;
  auto longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode_timeline(longer).ok());
  Timeline wrong = sample();
  wrong.spans[0].end_ns = wrong.spans[0].begin_ns - 1;
  EXPECT_FALSE(decode_timeline(encode_timeline(wrong)).ok());
  wrong = sample();
  wrong.spans[0].phase = static_cast<Phase>(static_cast<int>(Phase::kEngine) + 1);
  EXPECT_FALSE(decode_timeline(encode_timeline(wrong)).ok());
  wrong = sample();
  wrong.windows[1].begin_ns = 80;
  EXPECT_FALSE(decode_timeline(encode_timeline(wrong)).ok());
}

RC_GTEST_PROP(Timeline, DecodingIsTotal, ()) {
  auto bytes = encode_timeline(sample());
  const auto at = *rc::gen::inRange<std::size_t>(0, bytes.size());
  bytes[at] = static_cast<std::byte>(*rc::gen::inRange(0, 256));
  const auto read = decode_timeline(bytes);
  if (read.ok()) RC_ASSERT(encode_timeline(*read) == bytes);
}

// Goal: what travels is bounded; the longest spans go, in order of time, and the others are counted.
TEST(Timeline, KeepsTheLongestOfTooMany) {
  std::vector<Span> spans;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(kMaxTimelineSpans) + 10; ++i)
    spans.push_back({.begin_ns = 1000 - i % 7, .end_ns = 1000 + i});
  const Timeline kept = make_timeline({}, spans, 1);
  ASSERT_EQ(kept.spans.size(), kMaxTimelineSpans);
  EXPECT_EQ(kept.dropped, 11u);
  for (std::size_t i = 0; i < kept.spans.size(); ++i) {
    EXPECT_GE(kept.spans[i].end_ns - kept.spans[i].begin_ns, 9);
    EXPECT_LE(kept.spans[i == 0 ? 0 : i - 1].begin_ns, kept.spans[i].begin_ns);
  }
}

// Goal: a wait is traced to what the trainer did meanwhile, by aligned clocks: the rank's clock is 1000 ahead
// of the sender's, the worker's 50 behind.
TEST(Causes, AWaitIsTracedThroughTheClocks) {
  FleetTimeline fleet;
  ProcessTimeline rank{{Role::kTrainer, 1}, {}, ClockOffset{-1000, 2}};
  rank.timeline.windows = {{1000, 1400, Phase::kEngine}};
  rank.timeline.spans = {
      {.phase = Phase::kSource, .item = 4, .begin_ns = 1000, .end_ns = 1100},
      {.phase = Phase::kExport, .item = 4, .begin_ns = 1100, .end_ns = 1110},
      {.phase = Phase::kCreditWait, .item = 5, .begin_ns = 1110, .end_ns = 1300},
      {.phase = Phase::kPack, .item = 9, .peer = 0, .begin_ns = 1200, .end_ns = 1260},
      {.phase = Phase::kServe, .item = 9, .peer = 0, .begin_ns = 1000, .end_ns = 1400},
  };
  ProcessTimeline worker{{Role::kWorker, 0}, {}, ClockOffset{50, 2}};
  worker.timeline.spans = {
      {.phase = Phase::kProduceWait, .item = 9, .peer = 1, .begin_ns = -50, .end_ns = 250},
      {.phase = Phase::kProduceWait, .item = 9, .peer = 6, .begin_ns = -50, .end_ns = 250}};
  fleet.processes = {rank, worker};
  const Causes causes(fleet);
  const auto cause = [&](std::int64_t begin, std::int64_t end, std::uint32_t span = 0) {
    return causes.of(worker, {begin, end, Phase::kProduceWait, span});
  };
  EXPECT_EQ(cause(-50, 55), "trainer 1: source, group 4");
  EXPECT_EQ(cause(60, 250), "trainer 1: credit wait, group 5");
  EXPECT_EQ(cause(140, 210), "trainer 1: pack, chunk 9");
  EXPECT_EQ(cause(260, 300), "trainer 1: the way there and back");
  EXPECT_EQ(cause(0, 10, 1), "trainer 6: its timeline has not come");
  EXPECT_EQ(causes.of(worker, {0, 10, Phase::kTransfer, kNoSpan}), "");
}

}  // namespace
}  // namespace shardpull
