// Goal: what a rank declares is checked and counted, and what is placed can be found.
#include "runtime/group_placer.h"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"

namespace shardpull {
namespace {

RankDescription two_groups() {
  RankDescription rank;
  rank.metadata = {{"layers.0.w", DType::kF32, {4, 6}},
                   {"layers.1.v", DType::kF32, {2}},
                   {"layers.1.w", DType::kF32, {4, 6}}};
  rank.groups = *form_groups(rank.metadata);
  rank.resident = true;
  return rank;
}

TEST(DescribeHolding, pieces_are_ordered_by_name_and_groups_owned_by_what_is_held) {
  RankDescription rank = two_groups();
  ASSERT_TRUE(describe_holding({1}, {{2, {{2, 0}, {2, 6}}, 9}, {2, {{0, 0}, {1, 6}}, 9}}, rank).ok());
  EXPECT_EQ(rank.owned_groups, (std::vector<std::uint32_t>{1}));
  ASSERT_EQ(rank.pieces_of(2).size(), 2u);
  EXPECT_EQ(rank.pieces_of(2)[0].box.start, (std::vector<std::int64_t>{2, 0}));  // as given
  EXPECT_EQ(rank.pieces_of(2)[0].rank, rank.rank);
  EXPECT_EQ(rank.held_shape(2, 1), (std::vector<std::int64_t>{1, 6}));
  EXPECT_EQ(rank.held_shape(1, 0), (std::vector<std::int64_t>{2}));
  EXPECT_TRUE(rank.pieces_of(0).empty());
}

// A resident rank's groups stay where they are when they are free: what it published adds up. One that
// gathers counts what it holds at once.
TEST(GroupPlacer, resident_bytes_add_up_and_gathered_ones_come_and_go) {
  for (const bool resident : {true, false}) {
    RankDescription rank = two_groups();
    rank.resident = resident;
    ASSERT_TRUE(describe_holding({0, 1, 2}, {}, rank).ok());
    for (std::uint32_t name = 0; name < 3; ++name) rank.parts.push_back({name, 0, 0, {}});
    rank.export_pack_limit = 0;
    GroupPlacer placer(rank, SystemClock::instance());
    placer.begin_sync({});
    std::vector<std::byte> memory(4 * 6 * 4);
    for (std::uint32_t group = 0; group < 2; ++group) {
      GroupTensors tensors{group, {}};
      for (std::uint32_t name = rank.groups[group].first, i = 0; i < rank.groups[group].count; ++i, ++name) {
        const TensorMeta& meta = rank.metadata[name];
        std::vector<std::int64_t> stride(meta.shape.size(), 1);
        stride[0] = meta.shape.size() == 2 ? 6 : 1;
        tensors.tensors.push_back(
            {name, 0,
             TensorView{memory.data(), meta.dtype, meta.shape, stride, memory.data(), memory.size()}});
      }
      ASSERT_TRUE(placer.check(tensors, group).ok());
      const auto served = placer.place(tensors, group, {});
      ASSERT_TRUE(served.ok()) << served.status().to_string();
      EXPECT_EQ(served->size(), tensors.tensors.size());
      EXPECT_TRUE(placer.release(group));
      EXPECT_FALSE(placer.release(group));
    }
    EXPECT_EQ(placer.peak_resident_bytes(), resident ? 96u + 8 + 96 : 8u + 96);
  }
}

// One held piece, cut by the plan into two: both point into it, the second where its box begins.
TEST(GroupPlacer, plan_pieces_point_into_the_held_one) {
  RankDescription rank = two_groups();
  ASSERT_TRUE(describe_holding({}, {{0, {{1, 0}, {3, 4}}, 0}}, rank).ok());
  rank.parts = {{0, 5, 0, {{0, 0}, {1, 4}}}, {0, 7, 0, {{1, 2}, {2, 2}}}};
  GroupPlacer placer(rank, SystemClock::instance());
  placer.begin_sync({});
  std::vector<std::byte> memory(3 * 8 * 4);
  GroupTensors tensors{
      0, {{0, 0, TensorView{memory.data(), DType::kF32, {3, 4}, {8, 1}, memory.data(), memory.size()}}}};
  ASSERT_TRUE(placer.check(tensors, 0).ok());
  const auto served = placer.place(tensors, 0, {});
  ASSERT_TRUE(served.ok()) << served.status().to_string();
  ASSERT_EQ(served->size(), 2u);
  EXPECT_EQ((*served)[0].data, memory.data());
  EXPECT_TRUE((*served)[0].view.location.stride.empty());  // one row
  EXPECT_EQ((*served)[0].view.piece, 5u);
  EXPECT_EQ((*served)[1].data, memory.data() + (8 + 2) * 4);
  EXPECT_EQ((*served)[1].view.shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ((*served)[1].view.location.stride, (std::vector<std::int64_t>{8, 1}));
  EXPECT_EQ((*served)[1].view.location.where, (RemoteRef{0, 0, 0, 10 * 4}));
}

// Entries that do not fit what was declared, by their message.
TEST(GroupPlacer, entries_are_due_per_name_and_piece) {
  RankDescription rank = two_groups();
  ASSERT_TRUE(describe_holding({1}, {{2, {{0, 0}, {1, 6}}, 0}, {2, {{2, 0}, {1, 6}}, 0}}, rank).ok());
  GroupPlacer placer(rank, SystemClock::instance());
  placer.begin_sync({});
  std::vector<std::byte> memory(24);
  const auto view = [&](std::vector<std::int64_t> shape) {
    std::vector<std::int64_t> stride(shape.size(), 1);
    return TensorView{memory.data(), DType::kF32, shape, stride, memory.data(), memory.size()};
  };
  const GroupTensors good{1, {{1, 0, view({2})}, {2, 0, view({1, 6})}, {2, 1, view({1, 6})}}};
  ASSERT_TRUE(placer.check(good, 1).ok());
  const auto wrong = [&](const std::string& message, auto change) {
    GroupTensors tensors = good;
    change(tensors);
    const Status status = placer.check(tensors, 1);
    EXPECT_NE(status.message().find(message), std::string::npos) << message << " | " << status.to_string();
  };
  wrong("gave group 0, expected group 1", [](GroupTensors& t) { t.group = 0; });
  wrong("group 1 has 2 entries and none for layers.1.w piece 1 [2:3, 0:6]",
        [](GroupTensors& t) { t.tensors.pop_back(); });
  wrong("group 1 has 4 entries, expected 3", [](GroupTensors& t) { t.tensors.push_back({3, 0, {}}); });
  wrong("entry 2 of group 1 is name 2 piece 0, expected 2 piece 1",
        [](GroupTensors& t) { t.tensors[2].piece = 0; });
  wrong("layers.1.w piece 0 [0:1, 0:6] is claimed as held and carries no tensor",
        [](GroupTensors& t) { t.tensors[1].view.reset(); });
  wrong("layers.1.w piece 1 [2:3, 0:6] has shape [2, 3], the metadata says [1, 6]",
        [&](GroupTensors& t) { t.tensors[2].view->shape = {2, 3}; });
  wrong("layers.1.w piece 1 [2:3, 0:6] is F16, the metadata says F32",
        [&](GroupTensors& t) { t.tensors[2].view->dtype = DType::kF16; });
  wrong("layers.1.w piece 1 [2:3, 0:6] needs 24 bytes, its storage of 23 bytes",
        [&](GroupTensors& t) { t.tensors[2].view->storage_bytes = 23; });
  wrong("has strides [-1, 1] for shape [1, 6]",
        [&](GroupTensors& t) { t.tensors[2].view->stride = {-1, 1}; });
}

// integrity full: each byte of what was yielded, and none beside it, must stay until the release.
TEST(GroupPlacer, a_source_that_writes_what_it_yielded_is_found) {
  RankDescription rank = two_groups();
  ASSERT_TRUE(describe_holding({0}, {}, rank).ok());
  rank.parts = {{0, 0, 0, {}}};
  for (const bool sums : {false, true}) {
    rank.sums_views = sums;
    for (const std::vector<std::int64_t>& stride :
         {std::vector<std::int64_t>{6, 1}, {1, 4}, {1, 5}, {9, 1}, {12, 2}}) {
      GroupPlacer placer(rank, SystemClock::instance());
      std::vector<std::byte> memory(4 * 12 * 4);
      GroupTensors tensors{
          0, {{0, 0, TensorView{memory.data(), DType::kF32, {4, 6}, stride, memory.data(), memory.size()}}}};
      placer.begin_sync({});
      ASSERT_TRUE(placer.check(tensors, 0).ok());
      ASSERT_TRUE(placer.place(tensors, 0, {}).ok());
      std::vector<bool> part(memory.size());
      for (std::int64_t row = 0; row < 4; ++row) {
        for (std::int64_t column = 0; column < 6; ++column) {
          for (std::int64_t b = 0; b < 4; ++b)
            part[static_cast<std::size_t>((row * stride[0] + column * stride[1]) * 4 + b)] = true;
        }
      }
      for (std::size_t i = 0; i < memory.size(); ++i) {
        memory[i] ^= std::byte{0x40};
        const Status status = placer.check_unchanged(0);
        EXPECT_EQ(status.ok(), !sums || !part[i]) << "byte " << i << ", strides " << stride[0] << " " << stride[1];
        if (!status.ok()) {
          EXPECT_EQ(status.info().tensor, "layers.0.w");
          EXPECT_NE(status.message().find("wrote layers.0.w of group 0"), std::string::npos) << status.message();
        }
        memory[i] ^= std::byte{0x40};
      }
      EXPECT_TRUE(placer.check_unchanged(0).ok());
      EXPECT_TRUE(placer.release(0));
      memory[0] ^= std::byte{1};
      EXPECT_TRUE(placer.check_unchanged(0).ok()) << "it is the source's again";
    }
  }
}

}  // namespace
}  // namespace shardpull
