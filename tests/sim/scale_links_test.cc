// Goal: shares are what the header says, whatever begins and ends when: against a sweep over all transfers at
// every event, which nobody could afford for many.
#include "sim/scale_links.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"

namespace shardpull::sim {
namespace {

constexpr std::uint64_t kGigabyte = 1'000'000'000;  // a second: a byte a nanosecond

struct Wanted {
  std::int64_t begin_ns = 0;
  std::uint32_t outward = 0, inward = 0;
  std::uint64_t bytes = 0;
};

// When each ends, to the nanosecond or so.
std::vector<double> swept(const std::vector<Wanted>& wanted, double outward, double inward) {
  std::vector<double> left, end(wanted.size(), -1);
  for (const Wanted& one : wanted) left.push_back(static_cast<double>(one.bytes));
  double now = 0;
  for (;;) {
    std::map<std::uint32_t, int> out, in;
    std::vector<std::size_t> running;
    double next = INFINITY;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const auto begin = static_cast<double>(wanted[i].begin_ns);
      if (begin > now) next = std::min(next, begin);
      if (begin > now || end[i] >= 0) continue;
      running.push_back(i);
      ++out[wanted[i].outward];
      ++in[wanted[i].inward];
    }
    if (running.empty() && next == INFINITY) return end;
    std::vector<double> rate;
    for (const std::size_t i : running) {
      rate.push_back(std::min(outward / out[wanted[i].outward], inward / in[wanted[i].inward]));
      next = std::min(next, now + left[i] / rate.back());
    }
    for (std::size_t r = 0; r < running.size(); ++r) {
      left[running[r]] -= (next - now) * rate[r];
      if (left[running[r]] < 1e-6 * rate[r]) end[running[r]] = next;
    }
    now = next;
  }
}

std::vector<std::int64_t> by_links(const std::vector<Wanted>& wanted, FairLinks& links) {
  std::vector<std::int64_t> end(wanted.size(), -1);
  std::size_t begun = 0;
  std::vector<std::uint32_t> tokens;
  for (;;) {
    const std::int64_t begin = begun < wanted.size() ? wanted[begun].begin_ns : FairLinks::kNever;
    const std::int64_t now = std::min(begin, links.next_ns());
    if (now == FairLinks::kNever) return end;
    if (links.next_ns() <= begin) {
      tokens.clear();
      links.end_due(now, tokens);
      for (const std::uint32_t token : tokens) {
        EXPECT_EQ(end[token], -1);
        end[token] = now;
      }
      continue;
    }
    const Wanted& one = wanted[begun];
    links.begin(now, one.outward, one.inward, one.bytes, static_cast<std::uint32_t>(begun++));
  }
}

TEST(FairLinks, one_transfer_has_the_narrower_link) {
  FairLinks links(1, 4 * kGigabyte, 1, 2 * kGigabyte);
  EXPECT_EQ(by_links({{100, 0, 0, 1000}}, links), std::vector<std::int64_t>{600});
  EXPECT_EQ(links.outward_bytes(0), 1000u);
  EXPECT_EQ(links.inward_bytes(0), 1000u);
  EXPECT_EQ(links.outward_busy_ns(0), 500);
}

TEST(FairLinks, two_share_a_link_and_the_longer_one_has_it_alone_in_the_end) {
  FairLinks links(1, kGigabyte, 2, kGigabyte);
  // Until 200 each has half; then 200 bytes are left of the second.
  EXPECT_EQ(by_links({{0, 0, 0, 100}, {0, 0, 1, 300}}, links), (std::vector<std::int64_t>{200, 400}));
  EXPECT_EQ(links.outward_busy_ns(0), 400);
  EXPECT_EQ(links.inward_busy_ns(0), 200);
}

TEST(FairLinks, nothing_takes_no_time) {
  FairLinks links(1, kGigabyte, 1, kGigabyte);
  EXPECT_EQ(by_links({{7, 0, 0, 0}, {7, 0, 0, 10}}, links), (std::vector<std::int64_t>{7, 17}));
}

TEST(FairLinks, agree_with_a_sweep) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const std::uint32_t outward = 1 + static_cast<std::uint32_t>(random.below(5));
    const std::uint32_t inward = 1 + static_cast<std::uint32_t>(random.below(5));
    const std::uint64_t out_speed = (1 + random.below(4)) * kGigabyte,
                        in_speed = (1 + random.below(4)) * kGigabyte;
    std::vector<Wanted> wanted;
    std::uint64_t bytes = 0;
    for (int i = 0; i < 200; ++i) {
      Wanted one;
      one.begin_ns = static_cast<std::int64_t>(random.below(40'000'000));
      one.outward = static_cast<std::uint32_t>(random.below(outward));
      one.inward = static_cast<std::uint32_t>(random.below(inward));
      one.bytes = random.below(2'000'000);
      bytes += one.bytes;
      wanted.push_back(one);
    }
    std::stable_sort(wanted.begin(), wanted.end(),
                     [](const Wanted& a, const Wanted& b) { return a.begin_ns < b.begin_ns; });
    FairLinks links(outward, out_speed, inward, in_speed);
    const std::vector<std::int64_t> ends = by_links(wanted, links);
    const std::vector<double> expected =
        swept(wanted, static_cast<double>(out_speed) / 1e9, static_cast<double>(in_speed) / 1e9);
    // Each end is rounded up to a nanosecond, and those behind it follow.
    for (std::size_t i = 0; i < wanted.size(); ++i)
      EXPECT_NEAR(static_cast<double>(ends[i]), expected[i], 250) << i;
    std::uint64_t carried = 0;
    for (std::uint32_t link = 0; link < outward; ++link) carried += links.outward_bytes(link);
    EXPECT_EQ(carried, bytes);
  }
}

}  // namespace
}  // namespace shardpull::sim
