// Goal: what a rank is asked to publish is exactly what the plan takes of it, found where it really lies.
#include "plan/published.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"
#include "plan/boxes.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using plan_testing::hold;
using plan_testing::holdings_of;
using plan_testing::make_tables;
using plan_testing::meta;
using plan_testing::must;

InitTables tables_of(const std::vector<TensorMeta>& metadata, const std::vector<Holding>& holdings) {
  InitTables tables = make_tables(metadata, static_cast<std::uint32_t>(holdings.size()));
  tables.ownership = must(resolve_ownership(metadata, holdings));
  return tables;
}

TEST(Published, empty_tables_and_whole_names_give_whole_parts) {
  const std::vector<TensorMeta> metadata{meta("a", {4, 2}), meta("b", {3}), meta("c", {})};
  const InitTables everyone = make_tables(metadata, 2);
  EXPECT_EQ(must(published_parts(everyone, 1, {})),
            (std::vector<PublishedPart>{{0, 0, 0, {}}, {1, 0, 0, {}}, {2, 0, 0, {}}}));

  auto holdings = holdings_of(metadata, 2);
  hold(holdings[0], 0);
  hold(holdings[0], 2);
  hold(holdings[1], 1);
  hold(holdings[1], 2);
  const InitTables split = tables_of(metadata, holdings);
  EXPECT_EQ(must(published_parts(split, 0, {})), (std::vector<PublishedPart>{{0, 0, 0, {}}, {2, 0, 0, {}}}));
  EXPECT_EQ(must(published_parts(split, 1, {})), (std::vector<PublishedPart>{{1, 0, 0, {}}, {2, 0, 0, {}}}));
}

// Rank 0 holds rows 0..5 as one box, rank 1 rows 3..7 and, as a second box, rows 7..9: the plan cuts at 3, 6
// and 7.
TEST(Published, a_declared_box_is_cut_where_another_rank_begins) {
  const std::vector<TensorMeta> metadata{meta("w", {10, 4})};
  auto holdings = holdings_of(metadata, 2);
  hold(holdings[0], 0, {{0, 0}, {6, 4}});
  hold(holdings[1], 0, {{3, 0}, {4, 4}});
  hold(holdings[1], 0, {{7, 0}, {3, 4}});
  const InitTables tables = tables_of(metadata, holdings);
  EXPECT_EQ(must(published_parts(tables, 0, holdings[0].pieces)),
            (std::vector<PublishedPart>{{0, 1, 0, {{0, 0}, {3, 4}}}, {0, 2, 0, {{3, 0}, {3, 4}}}}));
  EXPECT_EQ(
      must(published_parts(tables, 1, holdings[1].pieces)),
      (std::vector<PublishedPart>{{0, 2, 0, {{0, 0}, {3, 4}}}, {0, 3, 0, {{3, 0}, {1, 4}}}, {0, 4, 1, {}}}));
}

// Rank 0 holds the tensor whole, rank 1 a corner of it: rank 0 publishes the plan's pieces of its whole.
TEST(Published, a_name_held_whole_by_one_rank_and_in_pieces_by_another) {
  const std::vector<TensorMeta> metadata{meta("v", {2}), meta("w", {4, 4})};
  auto holdings = holdings_of(metadata, 2);
  hold(holdings[0], 0);
  hold(holdings[0], 1);
  hold(holdings[1], 1, {{2, 1}, {2, 3}});
  const InitTables tables = tables_of(metadata, holdings);
  const auto parts = must(published_parts(tables, 0, {}));
  ASSERT_EQ(parts.size(), 1 + tables.ownership.pieces.size());
  EXPECT_EQ(parts[0], (PublishedPart{0, 0, 0, {}}));
  std::int64_t elements = 0;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].within, tables.ownership.pieces[parts[i].piece - 1].box);
    elements += box_numel(parts[i].within);
  }
  EXPECT_EQ(elements, 16);
  const auto corner = must(published_parts(tables, 1, holdings[1].pieces));
  ASSERT_EQ(corner.size(), 1u);
  EXPECT_TRUE(corner[0].within.whole());
}

// A box that is the whole tensor, written out or not, is served as the whole name.
TEST(Published, a_box_around_everything_is_the_whole_name) {
  const std::vector<TensorMeta> metadata{meta("w", {4, 4})};
  for (const Box& box : {Box{}, Box{{0, 0}, {4, 4}}}) {
    auto holdings = holdings_of(metadata, 1);
    hold(holdings[0], 0, box);
    const InitTables tables = tables_of(metadata, holdings);
    EXPECT_EQ(must(published_parts(tables, 0, holdings[0].pieces)),
              (std::vector<PublishedPart>{{0, 0, 0, {}}}));
  }
}

TEST(Published, tables_that_ask_for_what_a_rank_lacks_are_an_internal_error) {
  const std::vector<TensorMeta> metadata{meta("w", {4, 4})};
  auto holdings = holdings_of(metadata, 2);
  hold(holdings[0], 0, {{0, 0}, {2, 4}});
  hold(holdings[1], 0, {{2, 0}, {2, 4}});
  const InitTables tables = tables_of(metadata, holdings);
  const auto wrong = published_parts(tables, 1, holdings[0].pieces);
  ASSERT_EQ(wrong.status().code(), StatusCode::kInternal);
  EXPECT_NE(wrong.status().message().find("trainer 1 [2:4, 0:4] of 'w' [4, 4]"), std::string::npos)
      << wrong.status().to_string();
  EXPECT_EQ(published_parts(tables, 0, {{7, {}, 0}}).status().code(), StatusCode::kInternal);
}

// Random boxes over random ranks: the parts of a rank are the pieces it owns, each once, and each names the
// elements of its piece within one box that the rank declared.
TEST(Published, random_overlapping_boxes_are_found_where_they_lie) {
  Random random(20240607);
  for (int round = 0; round < 200; ++round) {
    const std::vector<std::int64_t> shape{static_cast<std::int64_t>(1 + random.below(5)),
                                          static_cast<std::int64_t>(1 + random.below(5))};
    const std::vector<TensorMeta> metadata{meta("v", {3}), meta("w", shape)};
    const auto ranks = static_cast<std::uint32_t>(1 + random.below(4));
    auto holdings = holdings_of(metadata, ranks);
    hold(holdings[0], 0);
    hold(holdings[random.below(ranks)], 1, {{0, 0}, shape});
    for (auto& holding : holdings) {
      for (std::uint64_t n = 1 + random.below(3); n > 0; --n) {
        Box box;
        for (const std::int64_t size : shape) {
          box.start.push_back(static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(size))));
          box.size.push_back(1 + static_cast<std::int64_t>(
                                     random.below(static_cast<std::uint64_t>(size - box.start.back()))));
        }
        hold(holding, 1, box);
      }
    }
    const InitTables tables = tables_of(metadata, holdings);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<std::pair<std::uint32_t, std::uint32_t>> expected, got;
      if (rank == 0) expected.emplace_back(0, 0);
      const Ownership& own = tables.ownership;
      const auto mine = [&](std::uint32_t owner_class) {
        const auto& set = own.owner_sets[owner_class];
        return std::find(set.begin(), set.end(), rank) != set.end();
      };
      if (own.name_owner_class[1] >= 0 && mine(static_cast<std::uint32_t>(own.name_owner_class[1])))
        expected.emplace_back(1, 0);
      for (std::uint32_t p = 0; p < own.pieces.size(); ++p) {
        if (mine(own.pieces[p].owner_class)) expected.emplace_back(1, p + 1);
      }
      for (const PublishedPart& part : must(published_parts(tables, rank, holdings[rank].pieces))) {
        got.emplace_back(part.name, part.piece);
        if (part.name == 0) continue;
        const Box held = holdings[rank].pieces[part.held].box;
        const Box target = part.piece == 0 ? Box{{0, 0}, shape} : tables.ownership.pieces[part.piece - 1].box;
        const Box inner = part.within.whole() ? Box{{0, 0}, held.size} : part.within;
        EXPECT_EQ(inner.size, target.size);
        for (std::size_t d = 0; d < 2; ++d) EXPECT_EQ(held.start[d] + inner.start[d], target.start[d]);
      }
      EXPECT_EQ(got, expected);
    }
  }
}

}  // namespace
}  // namespace shardpull
