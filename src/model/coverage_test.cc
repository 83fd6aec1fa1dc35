#include "model/coverage.h"

#include <set>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

std::set<std::int64_t> plain(DType dtype, std::int64_t offset, const std::vector<std::int64_t>& shape,
                             const std::vector<std::int64_t>& stride, std::size_t& count) {
  std::vector<std::int64_t> offsets{offset};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::vector<std::int64_t> next;
    for (const std::int64_t base : offsets) {
      for (std::int64_t i = 0; i < shape[d]; ++i) next.push_back(base + i * stride[d]);
    }
    offsets = std::move(next);
  }
  count = offsets.size();
  std::set<std::int64_t> bits;
  for (const std::int64_t at : offsets) {
    for (int b = 0; b < dtype_bits(dtype); ++b) bits.insert(at * dtype_bits(dtype) + b);
  }
  return bits;
}

std::set<std::int64_t> bits_of(const std::vector<BitRun>& runs) {
  std::set<std::int64_t> bits;
  for (const BitRun& run : runs) {
    for (std::int64_t bit = run.begin; bit < run.end; ++bit) bits.insert(bit);
  }
  return bits;
}

struct Random {
  DType dtype;
  std::int64_t offset;
  std::vector<std::int64_t> shape, stride;
};

Random random_window() {
  Random w;
  w.dtype = *rc::gen::element(DType::kF4, DType::kU8, DType::kBF16);
  w.offset = *rc::gen::inRange<std::int64_t>(0, 12);
  const int dims = *rc::gen::inRange(0, 4);
  for (int d = 0; d < dims; ++d) {
    w.shape.push_back(*rc::gen::inRange<std::int64_t>(0, 5));
    w.stride.push_back(*rc::gen::inRange<std::int64_t>(0, 14));
  }
  return w;
}

// Against plain sets of bits: size, self-overlap, intersection, containment, difference and gaps.
RC_GTEST_PROP(Coverage, AgreesWithPlainSets, ()) {
  const Random a = random_window();
  const Random b = random_window();
  std::size_t a_count = 0, b_count = 0;
  const auto a_bits = plain(a.dtype, a.offset, a.shape, a.stride, a_count);
  const auto b_bits = plain(b.dtype, b.offset, b.shape, b.stride, b_count);
  const BitWindow wa = bit_window(a.dtype, a.offset, a.shape, a.stride);
  const BitWindow wb = bit_window(b.dtype, b.offset, b.shape, b.stride);
  RC_ASSERT(wa.empty() == a_bits.empty());
  RC_ASSERT(wa.self_overlapping ==
            (a_bits.size() != a_count * static_cast<std::size_t>(dtype_bits(a.dtype))));
  RC_ASSERT(bits_of(runs_of(wa)) == a_bits);
  RC_PRE(!wa.self_overlapping && !wb.self_overlapping);
  RC_ASSERT(static_cast<std::size_t>(wa.size()) == a_bits.size());
  if (!wa.empty()) RC_ASSERT(wa.end() == *a_bits.rbegin() + 1);

  std::set<std::int64_t> minus;
  bool common = false;
  for (const std::int64_t bit : a_bits) {
    if (b_bits.contains(bit)) {
      common = true;
    } else {
      minus.insert(bit);
    }
  }
  RC_ASSERT(intersects(wa, wb) == common);
  RC_ASSERT(contains(wb, wa) == minus.empty());
  RC_ASSERT(bits_of(difference(wa, wb)) == minus);
  const auto gap = first_gap(wa, {wb});
  RC_ASSERT(gap.has_value() == !minus.empty());
  if (gap) {
    RC_ASSERT(gap->begin == *minus.begin());
    for (std::int64_t bit = gap->begin; bit < gap->end; ++bit) RC_ASSERT(minus.contains(bit));
  }
}

// Every second column of a large matrix: millions of runs, answered by a bitmap.
TEST(Coverage, InterleavedColumnsOfALargeMatrix) {
  const std::int64_t rows = 1024, cols = 2048;
  const BitWindow whole = bit_window(DType::kBF16, 0, {rows, cols}, {cols, 1});
  const BitWindow even = bit_window(DType::kBF16, 0, {rows, cols / 2}, {cols, 2});
  const BitWindow odd = bit_window(DType::kBF16, 1, {rows, cols / 2}, {cols, 2});
  EXPECT_TRUE(disjoint({even, odd}));
  EXPECT_FALSE(disjoint({even, odd, bit_window(DType::kBF16, 77, {1}, {1})}));
  EXPECT_EQ(first_gap(whole, {even, odd}), std::nullopt);
  const auto gap = first_gap(whole, {even});
  ASSERT_TRUE(gap.has_value());
  EXPECT_EQ(gap->begin, 16);
  EXPECT_EQ(gap->end, 32);
  EXPECT_TRUE(contains(whole, odd));
  EXPECT_FALSE(contains(even, whole));
}

// The set does not care how the window was walked: a transposed window is one run.
TEST(Coverage, OrderOfDimsDoesNotMatter) {
  const BitWindow transposed = bit_window(DType::kF32, 0, {64, 512}, {1, 64});
  EXPECT_TRUE(transposed.dims.empty());
  EXPECT_EQ(transposed.run, 64 * 512 * 32);
}

}  // namespace
}  // namespace shardpull
