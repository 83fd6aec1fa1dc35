// Goal: what ranks declare becomes one table that every process can trust, and the init payload's rules hold.
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"
#include "plan/boxes.h"
#include "plan/plan.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using namespace plan_testing;
using Ranks = std::vector<std::uint32_t>;

Box rows(std::int64_t first, std::int64_t count, std::int64_t columns) {
  return {.start = {first, 0}, .size = {count, columns}};
}

void expect_refused(const Status& status, const std::vector<std::string>& parts) {
  ASSERT_FALSE(status.ok());
  for (const std::string& part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " in: " << status.message();
}

TEST(Ownership, everyone_holds_everything) {
  const std::vector<TensorMeta> metadata{meta("a", {2}), meta("b", {2})};
  auto holdings = holdings_of(metadata, 3);
  for (Holding& holding : holdings) {
    hold(holding, 0);
    hold(holding, 1);
  }
  const Ownership own = must(resolve_ownership(metadata, holdings));
  EXPECT_EQ(own.owner_sets, (std::vector<Ranks>{{0, 1, 2}}));
  EXPECT_EQ(own.name_owner_class, (std::vector<std::int32_t>{0, 0}));
  EXPECT_TRUE(own.pieces.empty());
}

TEST(Ownership, sets_are_numbered_by_first_appearance_in_metadata_order) {
  // A pipeline of two stages; lm_head sorts first and is on the last stage.
  const std::vector<TensorMeta> metadata{meta("lm_head", {2}), meta("embed", {2}), meta("l.0.w", {2}),
                                         meta("l.1.w", {2})};
  auto holdings = holdings_of(metadata, 2);
  hold(holdings[0], 1);
  hold(holdings[0], 2);
  hold(holdings[1], 0);
  hold(holdings[1], 3);
  std::swap(holdings[0], holdings[1]);  // any order of arrival
  const Ownership own = must(resolve_ownership(metadata, holdings));
  EXPECT_EQ(own.owner_sets, (std::vector<Ranks>{{1}, {0}}));
  EXPECT_EQ(own.name_owner_class, (std::vector<std::int32_t>{0, 1, 1, 0}));

  InitTables tables = make_tables(metadata, 2, 2);
  tables.ownership = own;
  ASSERT_TRUE(validate(tables).ok());
  EXPECT_EQ(group_owners(tables), (std::vector<Ranks>{{0, 1}, {0}, {1}}));
}

TEST(Ownership, case_058_uneven_and_empty_row_shards_tile_the_tensor) {
  const std::vector<TensorMeta> metadata{meta("a", {10, 2}), meta("b", {3, 2})};
  auto holdings = holdings_of(metadata, 4);
  const std::int64_t a_rows[] = {3, 3, 3, 1}, b_rows[] = {1, 1, 1, 0};
  std::int64_t a = 0, b = 0;
  for (int r = 0; r < 4; ++r) {
    hold(holdings[static_cast<std::size_t>(r)], 0, rows(a, a_rows[r], 2));
    hold(holdings[static_cast<std::size_t>(r)], 1, rows(b, b_rows[r], 2));
    a += a_rows[r];
    b += b_rows[r];
  }
  const Ownership own = must(resolve_ownership(metadata, holdings));
  EXPECT_EQ(own.owner_sets, (std::vector<Ranks>{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(own.name_owner_class, (std::vector<std::int32_t>{-1, -1}));
  ASSERT_EQ(own.pieces.size(), 7u);
  EXPECT_EQ(own.pieces[3], (OwnedPiece{.name = 0, .box = rows(9, 1, 2), .owner_class = 3}));
  EXPECT_EQ(own.pieces[6], (OwnedPiece{.name = 1, .box = rows(2, 1, 2), .owner_class = 2}));

  holdings[2].pieces[0].box = rows(6, 2, 2);  // one row missing
  expect_refused(resolve_ownership(metadata, holdings).status(), {"nobody holds [8:9, 0:2] of 'a'"});
}

TEST(Ownership, a_box_of_everything_is_the_whole_tensor) {
  const std::vector<TensorMeta> metadata{meta("a", {4, 2}), meta("none", {0, 2}), meta("scalar", {})};
  auto holdings = holdings_of(metadata, 2);
  hold(holdings[0], 0, rows(0, 4, 2));
  hold(holdings[1], 0, Box{});
  hold(holdings[0], 1, rows(0, 0, 2));
  hold(holdings[1], 1, rows(0, 0, 2));
  hold(holdings[1], 2);
  const Ownership own = must(resolve_ownership(metadata, holdings));
  EXPECT_TRUE(own.pieces.empty());
  EXPECT_EQ(own.owner_sets, (std::vector<Ranks>{{0, 1}, {1}}));
  EXPECT_EQ(own.name_owner_class, (std::vector<std::int32_t>{0, 0, 1}));
}

TEST(Ownership, overlapping_boxes_are_cut_and_shared) {
  const std::vector<TensorMeta> metadata{meta("a", {10, 2})};
  auto holdings = holdings_of(metadata, 3);
  hold(holdings[0], 0, rows(0, 6, 2));
  hold(holdings[1], 0, rows(4, 6, 2));
  hold(holdings[2], 0);
  const Ownership own = must(resolve_ownership(metadata, holdings));
  ASSERT_EQ(own.pieces.size(), 3u);
  EXPECT_EQ(own.pieces[0].box, rows(0, 4, 2));
  EXPECT_EQ(own.pieces[1].box, rows(4, 2, 2));
  EXPECT_EQ(own.pieces[2].box, rows(6, 4, 2));
  EXPECT_EQ(own.owner_sets, (std::vector<Ranks>{{0, 2}, {0, 1, 2}, {1, 2}}));
}

TEST(Ownership, random_boxes_every_element_has_exactly_its_holders) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<std::int64_t> shape(static_cast<std::size_t>(random.between(1, 3)));
    for (auto& size : shape) size = random.between(1, 5);
    const std::vector<TensorMeta> metadata{meta("a", shape)};
    auto holdings = holdings_of(metadata, 4);
    std::vector<std::set<std::uint32_t>> holders(
        elements_of(Box{std::vector<std::int64_t>(shape.size(), 0), shape}, shape).size());
    for (Holding& holding : holdings) {
      for (std::int64_t n = random.between(1, 2); n > 0; --n) {
        Box box{.start = shape, .size = shape};
        for (std::size_t d = 0; d < shape.size(); ++d) {
          box.start[d] = random.between(0, shape[d]);
          box.size[d] = random.between(0, shape[d] - box.start[d]);
        }
        for (const std::int64_t element : elements_of(box, shape))
          holders[static_cast<std::size_t>(element)].insert(holding.rank);
        hold(holding, 0, box);
      }
    }
    const auto own = resolve_ownership(metadata, holdings);
    const bool complete =
        std::all_of(holders.begin(), holders.end(), [](const auto& set) { return !set.empty(); });
    ASSERT_EQ(own.ok(), complete);
    if (!own.ok()) continue;
    InitTables tables = make_tables(metadata, 4);
    tables.ownership = *own;
    ASSERT_TRUE(validate(tables).ok()) << validate(tables).message();
    std::vector<int> seen(holders.size(), 0);
    for (const OwnedPiece& piece : own->pieces) {
      const Ranks& ranks = own->owner_sets[piece.owner_class];
      for (const std::int64_t element : elements_of(piece.box, shape)) {
        ++seen[static_cast<std::size_t>(element)];
        EXPECT_EQ(std::set<std::uint32_t>(ranks.begin(), ranks.end()),
                  holders[static_cast<std::size_t>(element)]);
      }
    }
    if (!own->pieces.empty()) {
      EXPECT_EQ(seen, std::vector<int>(holders.size(), 1));
    }
  }
}

TEST(Ownership, refusals_name_ranks_and_names) {
  const std::vector<TensorMeta> metadata{meta("a", {4, 2}), meta("b", {2})};
  const auto good = [&] {
    auto holdings = holdings_of(metadata, 2);
    hold(holdings[0], 0);
    hold(holdings[1], 1);
    return holdings;
  };
  ASSERT_TRUE(resolve_ownership(metadata, good()).ok());
  const auto refused = [&](const std::function<void(std::vector<Holding>&)>& spoil,
                           const std::vector<std::string>& parts) {
    auto holdings = good();
    spoil(holdings);
    expect_refused(resolve_ownership(metadata, holdings).status(), parts);
  };
  refused([](auto& h) { h[1].digest.low ^= 1; }, {"trainer rank 1 describes another model"});
  refused([](auto& h) { h[1].rank = 0; }, {"trainer rank 0", "twice"});
  refused([](auto& h) { h[1].rank = 7; }, {"trainer rank 7", "2 ranks"});
  refused([](auto& h) { h.pop_back(); }, {"'b'", "held by no trainer rank"});
  refused([](auto& h) { h[0].whole[0] |= 4; }, {"trainer rank 0 holds unknown name 2"});
  refused([](auto& h) { h[0].whole.push_back(0); }, {"trainer rank 0", "2 bytes", "need 1"});
  refused([](auto& h) { h[1].whole[0] = 0; }, {"trainer rank 1 holds nothing"});
  refused([](auto& h) { hold(h[1], 5, Box{}); }, {"trainer rank 1", "unknown name 5"});
  refused([](auto& h) { hold(h[1], 0, rows(3, 2, 2)); }, {"trainer rank 1, 'a'", "[3:5, 0:2]", "[4, 2]"});
  refused([](auto& h) { hold(h[1], 0, rows(-1, 2, 2)); }, {"trainer rank 1, 'a'", "does not lie within"});
  refused([](auto& h) { hold(h[1], 0, Box{{0}, {4}}); }, {"'a'", "has 1 dims"});
  refused([](auto& h) { hold(h[1], 0, Box{{0, 0}, {4}}); }, {"'a'", "2 starts and 1 sizes"});
  refused([](auto& h) { hold(h[1], 0, Box{{INT64_MAX, 0}, {2, 2}}); }, {"'a'", "does not lie within"});
  refused([](auto& h) { hold(h[0], 0, rows(0, 1, 2)); }, {"trainer rank 0", "whole and in pieces"});
  refused(
      [](auto& h) {
        hold(h[1], 0, rows(0, 1, 2));
        h[1].pieces[0].rank = 0;
      },
      {"trainer rank 1", "for rank 0"});
  expect_refused(resolve_ownership(metadata, {}).status(), {"no trainer rank"});
}

TEST(Ownership, pieces_of_half_bytes_are_refused) {
  const std::vector<TensorMeta> metadata{meta("a", {2, 8}, DType::kF4)};
  const auto with_columns = [&](std::int64_t columns) {
    auto holdings = holdings_of(metadata, 2);
    hold(holdings[0], 0, Box{{0, 0}, {2, columns}});
    hold(holdings[1], 0, Box{{0, columns}, {2, 8 - columns}});
    return resolve_ownership(metadata, holdings);
  };
  EXPECT_TRUE(with_columns(4).ok());
  expect_refused(with_columns(3).status(), {"trainer rank 0", "'a'", "whole bytes"});
}

TEST(InitTables, every_rule_names_its_field) {
  const auto good = [] {
    InitTables tables = make_tables({meta("l.0.a", {4, 2}), meta("l.1.a", {4, 2})}, 2, 4);
    tables.ownership.owner_sets = {{0, 1}, {0}, {1}};
    tables.ownership.name_owner_class = {0, -1};
    tables.ownership.pieces = {{1, rows(0, 1, 2), 1}, {1, rows(1, 3, 2), 2}};
    return tables;
  };
  ASSERT_TRUE(validate(good()).ok()) << validate(good()).message();
  const auto refused = [&](const std::function<void(InitTables&)>& spoil,
                           const std::vector<std::string>& parts) {
    InitTables tables = good();
    spoil(tables);
    expect_refused(validate(tables), parts);
  };
  refused([](auto& t) { t.producers.clear(); }, {"producers"});
  refused([](auto& t) { t.metadata.clear(); }, {"metadata"});
  refused([](auto& t) { t.metadata[1].name = t.metadata[0].name; }, {"metadata[1]", "'l.0.a'"});
  refused([](auto& t) { t.metadata[0].shape = {-1}; }, {"metadata[0]", "'l.0.a'", "[-1]"});
  refused([](auto& t) { t.metadata[0].shape = {1ll << 40, 1ll << 40}; }, {"metadata[0]", "too large"});
  refused([](auto& t) { t.metadata[0].shape = std::vector<std::int64_t>(9, 1); }, {"metadata[0]", "9 dims"});
  refused([](auto& t) { t.metadata[0].dtype = static_cast<DType>(200); },
          {"metadata[0]", "dtype number 200"});
  refused([](auto& t) { t.metadata[0] = meta("l.0.a", {2, 7}, DType::kF4), t.metadata[0].shape = {1, 7}; },
          {"metadata[0]"});
  refused([](auto& t) { t.group_lens.clear(); }, {"group_lens: absent"});
  refused([](auto& t) { t.group_lens = {1}; }, {"group_lens sums to 1", "2 names"});
  refused([](auto& t) { t.group_lens = {2, 0}; }, {"group_lens[1] is 0"});
  refused([](auto& t) { t.ownership.name_owner_class.pop_back(); },
          {"name_owner_class", "1 entries for 2 names"});
  refused([](auto& t) { t.ownership.name_owner_class.clear(); }, {"name_owner_class", "0 entries"});
  refused([](auto& t) { t.ownership.name_owner_class[0] = 3; }, {"name_owner_class[0]", "'l.0.a'", "3"});
  refused([](auto& t) { t.ownership.name_owner_class[0] = -2; }, {"name_owner_class[0]"});
  refused([](auto& t) { t.ownership.name_owner_class[0] = -1; }, {"'l.0.a'", "nobody holds it"});
  refused([](auto& t) { t.ownership.owner_sets[2] = {2}; }, {"owner_sets[2]", "rank 2 is no producer"});
  refused([](auto& t) { t.ownership.owner_sets.push_back({9}); }, {"owner_sets[3]"});  // unused ones too
  refused([](auto& t) { t.ownership.owner_sets[0] = {1, 0}; }, {"owner_sets[0]", "ascending"});
  refused([](auto& t) { t.ownership.owner_sets[0] = {1, 1}; }, {"owner_sets[0]", "ascending"});
  refused([](auto& t) { t.ownership.owner_sets[0].clear(); }, {"owner_sets[0] is empty"});
  refused([](auto& t) { t.ownership.pieces[0].owner_class = 3; }, {"pieces[0]", "owner class 3"});
  refused([](auto& t) { t.ownership.pieces[0].box.size = {2, 2}; }, {"pieces", "'l.1.a'", "overlap"});
  refused([](auto& t) { t.ownership.pieces[1].box.size = {2, 2}; }, {"pieces of 'l.1.a'", "6 of its 8"});
  refused([](auto& t) { t.ownership.pieces[1].box.size = {4, 2}; }, {"pieces[1]", "does not lie within"});
  refused([](auto& t) { t.ownership.pieces[1].box.size = {0, 2}; }, {"pieces[1]", "non-empty"});
  refused([](auto& t) { t.ownership.pieces[1].box = {}; }, {"pieces[1]", "written-out"});
  refused([](auto& t) { std::swap(t.ownership.pieces[0], t.ownership.pieces[1]); }, {"pieces[1]", "ascend"});
  refused([](auto& t) { t.ownership.pieces.push_back({0, rows(0, 1, 2), 0}); }, {"pieces[2]", "'l.0.a'"});
  refused([](auto& t) { t.ownership.pieces.push_back({7, rows(0, 1, 2), 0}); }, {"pieces[2]", "name 7 of 2"});
  refused([](auto& t) { t.producer_mappable.pop_back(); }, {"producer_mappable", "1 entries for 2"});
  refused([](auto& t) { t.producer_mappable[0] = 2; }, {"producer_mappable[0]"});
  refused([](auto& t) { t.num_consumers = 0; }, {"num_consumers"});
  refused([](auto& t) { t.num_replicas = 0; }, {"num_replicas"});
  refused([](auto& t) { t.num_replicas = 3; }, {"num_replicas is 3", "num_consumers, 4"});
  refused([](auto& t) { t.num_replicas = 2, t.workers_per_replica = 3; }, {"workers_per_replica is 3"});
  refused([](auto& t) { t.ring_depth = 0; }, {"ring_depth is 0"});
}

TEST(InitTables, workers_per_replica_is_derived_or_switches_sharing_off) {
  InitTables tables = make_tables({meta("a", {2})}, 1, 6);
  tables.num_replicas = 3;
  EXPECT_EQ(effective_workers_per_replica(tables), 2u);
  tables.workers_per_replica = 6;
  ASSERT_TRUE(validate(tables).ok());
  EXPECT_EQ(effective_workers_per_replica(tables), 6u);
}

TEST(InitTables, empty_ownership_means_everyone_holds_everything) {
  const InitTables tables = make_tables({meta("a", {2}), meta("l.0.a", {2})}, 3);
  ASSERT_TRUE(validate(tables).ok());
  EXPECT_EQ(group_owners(tables), (std::vector<Ranks>(2, Ranks{0, 1, 2})));
  EXPECT_EQ(group_of_names(tables), (Ranks{0, 1}));
}

}  // namespace
}  // namespace shardpull
