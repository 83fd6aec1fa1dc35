// Goal: all small layouts. Every way to cut a matrix of up to 6 by 6 into up to three pieces by straight
// cuts, every way to give the pieces to three trainers, every run of rows or of columns that one of up to
// three workers may take: byte-exact.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "plan/plan.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using namespace plan_testing;
using Boxes = std::vector<Box>;

constexpr std::int64_t kLargest = 6;
constexpr std::uint32_t kTrainers = 3, kWorkers = 3;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kLess =
    3;  // sanitizers see every kind of cut in smaller matrices, and take twenty times as long
#else
constexpr std::int64_t kLess = 0;
#endif

// The two parts of `box` for every straight cut through it.
std::vector<Boxes> cuts_of(const Box& box) {
  std::vector<Boxes> out;
  for (std::size_t d = 0; d < 2; ++d) {
    for (std::int64_t at = 1; at < box.size[d]; ++at) {
      Boxes parts{box, box};
      parts[0].size[d] = at;
      parts[1].start[d] += at;
      parts[1].size[d] -= at;
      out.push_back(std::move(parts));
    }
  }
  return out;
}

// Every tiling by at most two cuts: one, two or three pieces. Two parallel cuts appear once.
std::vector<Boxes> tilings(std::int64_t height, std::int64_t width) {
  const Box whole{{0, 0}, {height, width}};
  std::vector<Boxes> out{{whole}};
  for (const Boxes& two : cuts_of(whole)) {
    out.push_back(two);
    for (std::size_t first : {0, 1}) {
      for (const Boxes& parts : cuts_of(two[first])) {
        const bool parallel = (two[0].size[0] == height) == (parts[0].size[0] == two[first].size[0]);
        if (first == 0 && parallel) continue;
        Boxes three{two[1 - first], parts[0], parts[1]};
        out.push_back(std::move(three));
      }
    }
  }
  return out;
}

// Who holds what: `owners[i]` is a set of trainers, bit by bit, that hold piece i. A second name keeps
// trainers without a piece legal.
InitTables tables_of(const std::vector<TensorMeta>& metadata, const Boxes& pieces,
                     const std::vector<std::uint32_t>& owners, std::vector<Holding>& holdings) {
  holdings = holdings_of(metadata, kTrainers);
  for (std::uint32_t rank = 0; rank < kTrainers; ++rank) {
    hold(holdings[rank], 1);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if ((owners[i] >> rank & 1) != 0) hold(holdings[rank], 0, pieces[i]);
    }
  }
  InitTables tables = make_tables(metadata, kTrainers, kWorkers);
  tables.ownership = must(resolve_ownership(metadata, holdings));
  return tables;
}

struct Share {
  Recording recording;
  WorkerBytes expected;
};

// Every run of rows and of columns: whatever part one of up to three workers takes, evenly or not.
std::vector<Share> shares(const std::vector<TensorMeta>& metadata) {
  std::vector<Share> out;
  for (std::int64_t dim = 0; dim < 2; ++dim) {
    const std::int64_t size = metadata[0].shape[static_cast<std::size_t>(dim)];
    for (std::int64_t first = 0; first < size; ++first) {
      for (std::int64_t count = 1; first + count <= size; ++count) {
        if (dim == 1 && count == size) continue;  // all of it: as for rows
        RecordingBuilder builder(metadata);
        builder.whole("w", 0, must(builder.fake(0).narrow(dim, first, count)));
        Share share{.recording = builder.build(), .expected = {}};
        EXPECT_EQ(bytes_of_recording(metadata, share.recording, share.expected), "");
        out.push_back(std::move(share));
      }
    }
  }
  return out;
}

std::size_t check(const InitTables& tables, const std::vector<Holding>& holdings,
                  const std::vector<Share>& shares) {
  std::uint32_t worker = 0;
  for (const Share& share : shares) {
    worker = (worker + 1) % kWorkers;
    const Result<WorkerPlan> plan = plan_worker(tables, share.recording, worker);
    if (!plan.ok()) {
      ADD_FAILURE() << plan.status().message();
      return 0;
    }
    WorkerBytes planned;
    const std::string failure = bytes_of_plan(tables, holdings, share.recording, *plan, planned);
    if (!failure.empty() || planned != share.expected) {
      ADD_FAILURE() << failure << " worker " << worker << ", "
                    << to_string(share.recording.scatters[0].slice);
      return 0;
    }
  }
  return shares.size();
}

// All sets of owners for each piece, taken from `choices`, by an odometer.
template <typename Each>
void each_assignment(std::size_t pieces, const std::vector<std::uint32_t>& choices, const Each& each) {
  std::vector<std::size_t> at(pieces, 0);
  for (;;) {
    std::vector<std::uint32_t> owners;
    for (const std::size_t choice : at) owners.push_back(choices[choice]);
    each(owners);
    std::size_t i = 0;
    while (i < pieces && ++at[i] == choices.size()) at[i++] = 0;
    if (i == pieces) return;
  }
}

std::size_t check_all(const std::vector<std::uint32_t>& choices, std::int64_t largest) {
  std::size_t plans = 0;
  for (std::int64_t height = 1; height <= largest; ++height) {
    for (std::int64_t width = 1; width <= largest; ++width) {
      const std::vector<TensorMeta> metadata{meta("w", {height, width}, DType::kU8),
                                             meta("v", {1}, DType::kU8)};
      const std::vector<Share> all = shares(metadata);
      for (const Boxes& pieces : tilings(height, width)) {
        each_assignment(pieces.size(), choices, [&](const std::vector<std::uint32_t>& owners) {
          std::vector<Holding> holdings;
          const InitTables tables = tables_of(metadata, pieces, owners, holdings);
          plans += check(tables, holdings, all);
        });
        if (testing::Test::HasFailure()) return plans;
      }
    }
  }
  return plans;
}

// Each piece is held by one trainer.
TEST(Exhaustive, every_layout_up_to_six_by_six) {
  EXPECT_EQ(tilings(6, 6).size(), 131u);  // 1, 5 + 5, and 10 + 10 parallel and 100 crossing pairs of cuts
  EXPECT_GT(check_all({1, 2, 4}, kLargest - kLess), kLess == 0 ? 800'000u : 1'000u);
}

// Each piece is held by any set of trainers.
TEST(Exhaustive, every_layout_up_to_three_by_three_with_replicas) {
  EXPECT_GT(check_all({1, 2, 3, 4, 5, 6, 7}, kLess == 0 ? 3 : 2), kLess == 0 ? 100'000u : 1'000u);
}

}  // namespace
}  // namespace shardpull
