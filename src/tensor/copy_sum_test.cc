// Goal: what is summed in place has the sum of what would be packed.
#include "tensor/copy_sum.h"

#include <gtest/gtest.h>

#include <vector>

#include "tensor/checksum.h"

namespace shardpull {
namespace {

struct Case {
  std::vector<std::int64_t> shape, stride;
  Slice slice;
  bool in_order;
};

Slice slice_of(std::int64_t offset, std::vector<Dim> dims) {
  return Slice{{Region{offset, std::move(dims)}}};
}

TEST(CopySum, in_place_and_packed_sums_are_equal_where_reads_are_in_order) {
  std::vector<std::byte> source(8 * 64 * 4);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 131 >> 3);
  const std::vector<Case> cases = {
      {{8, 16}, {16, 1}, Slice::whole(128), true},                      // one run
      {{8, 16}, {16, 1}, slice_of(16, {{48, 1}}), true},                // rows
      {{8, 16}, {16, 1}, slice_of(4, {{8, 16}, {6, 1}}), true},         // columns
      {{8, 16}, {20, 1}, Slice::whole(128), true},                      // with a pitch
      {{4, 2, 16}, {64, 20, 1}, Slice::whole(128), true},               // with two
      {{8, 16}, {1, 8}, slice_of(0, {{8, 16}, {16, 1}}), false},        // transposed in memory
      {{8, 16}, {16, 1}, slice_of(0, {{16, 1}, {8, 16}}), false},       // transposed by the slice
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& one = cases[i];
    const SourceLayout layout{DType::kF32, one.shape, one.stride};
    const auto program = compile_copy(one.slice, layout, DType::kF32, contiguous_region(one.slice.numel()), DType::kF32);
    ASSERT_TRUE(program.ok()) << i << ": " << program.status().to_string();
    std::vector<std::byte> packed(static_cast<std::size_t>(one.slice.numel()) * 4);
    run(*program, source.data(), packed.data());
    // A program may read what is transposed in either order; the sums agree exactly where it says so.
    if (one.in_order) {
      EXPECT_TRUE(reads_in_order(*program)) << i;
    }
    EXPECT_EQ(sum_of_reads(*program, source.data()) == checksum64(packed), reads_in_order(*program)) << i;
  }
}

// Goal: a gather that sums as it goes packs the same bytes and has their sum: rows, runs and shuffled ones,
// beyond one step and of odd sizes.
TEST(CopySum, summed_gathers_pack_the_same) {
  const std::int64_t rows = 331, columns = 4099;
  std::vector<std::byte> source(static_cast<std::size_t>(rows * columns) * 4);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 167 + (i >> 8) * 59);
  const std::vector<Slice> slices = {
      Slice::whole(rows * columns),
      Slice::whole(1),
      slice_of(3, {{rows - 1, columns}, {2047, 1}}),
      slice_of(5, {{rows, columns}, {63, 1}}),
      slice_of(5, {{7, 40 * columns}, {11, 3 * columns}, {1001, 1}}),
      slice_of(0, {{columns, 1}, {rows, columns}}),
      Slice{{{17, {{100'003, 1}}}, {400'000, {{50, columns}, {900, 1}}}}},
  };
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const std::int64_t numel = slices[i].numel();
    const auto program = compile_copy(slices[i], SourceLayout::contiguous(DType::kF32, rows * columns),
                                      DType::kF32, contiguous_region(numel), DType::kF32);
    ASSERT_TRUE(program.ok()) << i << ": " << program.status().to_string();
    std::vector<std::byte> packed(static_cast<std::size_t>(numel) * 4 + 1), expected = packed;
    run(*program, source.data(), expected.data());
    EXPECT_EQ(run_and_sum(*program, source.data(), packed.data()),
              checksum64({expected.data(), static_cast<std::size_t>(numel) * 4}))
        << i;
    EXPECT_EQ(packed, expected) << i;
  }
}

TEST(CopySum, every_byte_that_is_read_counts_and_no_other) {
  std::vector<std::byte> source(5 * 9 * 2);
  const SourceLayout layout{DType::kBF16, {5, 7}, {9, 1}};
  const auto program = compile_copy(Slice::whole(35), layout, DType::kBF16, contiguous_region(35), DType::kBF16);
  ASSERT_TRUE(program.ok());
  const std::uint64_t sum = sum_of_reads(*program, source.data());
  for (std::size_t i = 0; i < source.size(); ++i) {
    source[i] = std::byte{1};
    EXPECT_EQ(sum_of_reads(*program, source.data()) != sum, i % 18 < 14) << i;
    source[i] = std::byte{0};
  }
}

}  // namespace
}  // namespace shardpull
