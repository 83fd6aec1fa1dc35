#include "tensor/affine.h"

#include <algorithm>
#include <functional>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

using Addresses = std::vector<std::vector<std::int64_t>>;  // per iteration, per layout

std::vector<Dim> random_dims(int max_dims, int max_size) {
  const auto count = *rc::gen::inRange(0, max_dims + 1);
  std::vector<Dim> dims;
  for (int i = 0; i < count; ++i)
    dims.push_back({*rc::gen::inRange(1, max_size + 1), *rc::gen::inRange(0, 40)});
  return dims;
}

std::int64_t numel(const std::vector<Dim>& dims) {
  std::int64_t product = 1;
  for (const Dim& dim : dims) product *= dim.size;
  return product;
}

// The address of a row-major position, digit by digit.
std::int64_t address_of(const std::vector<Dim>& dims, std::int64_t position) {
  std::int64_t address = 0;
  for (std::size_t d = dims.size(); d-- > 0;) {
    address += position % dims[d].size * dims[d].stride;
    position /= dims[d].size;
  }
  return address;
}

void for_each_iteration(const std::vector<Loop>& loops,
                        const std::function<void(const std::vector<std::int64_t>&)>& visit) {
  std::vector<std::int64_t> index(loops.size(), 0);
  for (;;) {
    visit(index);
    std::size_t d = loops.size();
    for (;;) {
      if (d == 0) return;
      --d;
      if (++index[d] < loops[d].size) break;
      index[d] = 0;
    }
  }
}

Addresses of_pieces(const std::vector<AffinePiece>& pieces, std::size_t layouts) {
  Addresses result;
  for (const AffinePiece& piece : pieces) {
    for_each_iteration(piece.loops, [&](const std::vector<std::int64_t>& index) {
      std::vector<std::int64_t> at(piece.offset, piece.offset + layouts);
      for (std::size_t i = 0; i < index.size(); ++i) {
        for (std::size_t l = 0; l < layouts; ++l) at[l] += index[i] * piece.loops[i].step[l];
      }
      result.push_back(at);
    });
  }
  return result;
}

// Goal: the pieces enumerate the addresses of the nest, each iteration once; in order, when asked to keep it.
RC_GTEST_PROP(Affine, PiecesAreTheNest, ()) {
  const auto layouts_used = static_cast<std::size_t>(*rc::gen::inRange(1, 3));
  std::vector<std::vector<Dim>> dims;
  std::vector<Layout> layouts;
  for (std::size_t l = 0; l < layouts_used; ++l) {
    dims.push_back(random_dims(4, 6));
    layouts.emplace_back(dims.back(), 7);
  }
  std::vector<Loop> loops;
  std::int64_t start[kMaxLayouts] = {};
  std::int64_t reach[kMaxLayouts] = {};
  for (std::size_t l = 0; l < layouts_used; ++l) {
    start[l] = *rc::gen::inRange<std::int64_t>(0, numel(dims[l]));
    reach[l] = numel(dims[l]) - 1 - start[l];
  }
  const auto count = *rc::gen::inRange(0, 4);
  for (int i = 0; i < count; ++i) {
    Loop loop{.size = *rc::gen::inRange<std::int64_t>(1, 9), .step = {}};
    for (std::size_t l = 0; l < layouts_used; ++l) {
      const std::int64_t limit = loop.size > 1 ? reach[l] / (loop.size - 1) : 5;
      loop.step[l] = *rc::gen::inRange<std::int64_t>(0, std::min<std::int64_t>(limit, 60) + 1);
      reach[l] -= (loop.size - 1) * loop.step[l];
    }
    loops.push_back(loop);
  }
  Addresses expected;
  for_each_iteration(loops, [&](const std::vector<std::int64_t>& index) {
    std::vector<std::int64_t> at;
    for (std::size_t l = 0; l < layouts_used; ++l) {
      std::int64_t position = start[l];
      for (std::size_t i = 0; i < index.size(); ++i) position += index[i] * loops[i].step[l];
      at.push_back(7 + address_of(dims[l], position));
    }
    expected.push_back(at);
  });

  std::vector<AffinePiece> kept, freed;
  RC_ASSERT(decompose(layouts, loops, {start, layouts_used}, PieceOrder::kKeep, 100000, kept));
  RC_ASSERT(of_pieces(kept, layouts_used) == expected);
  RC_ASSERT(decompose(layouts, loops, {start, layouts_used}, PieceOrder::kFree, 100000, freed));
  Addresses any_order = of_pieces(freed, layouts_used);
  std::sort(any_order.begin(), any_order.end());
  std::sort(expected.begin(), expected.end());
  RC_ASSERT(any_order == expected);
}

// Goal: sizes do not matter to the number of pieces: a window of a transposed matrix is a head, a body and a
// tail.
TEST(Affine, LargeWindowsTakeFewPieces) {
  const std::vector<Dim> transposed{{1'000'000, 1}, {3'000'000, 1'000'000}};
  const Layout layout(transposed);
  const Loop window{.size = 2'000'000'000'000, .step = {1}};
  const std::int64_t start = 17;
  std::vector<AffinePiece> pieces;
  ASSERT_TRUE(decompose({&layout, 1}, {&window, 1}, {&start, 1}, PieceOrder::kKeep, 8, pieces));
  EXPECT_EQ(pieces.size(), 3u);
}

// Goal: a limit on pieces ends the work early instead of filling memory.
TEST(Affine, TooManyPiecesAreRefused) {
  const std::vector<Dim> rows{{1'000'000, 10}, {3, 1}};
  const Layout layout(rows);
  const Loop across{.size = 1'000'000, .step = {2}};
  const std::int64_t start = 0;
  std::vector<AffinePiece> pieces;
  EXPECT_FALSE(decompose({&layout, 1}, {&across, 1}, {&start, 1}, PieceOrder::kKeep, 100, pieces));
  pieces.clear();
  EXPECT_TRUE(decompose({&layout, 1}, {&across, 1}, {&start, 1}, PieceOrder::kFree, 100, pieces))
      << "regrouped, few suffice";
  EXPECT_LE(pieces.size(), 4u);
}

}  // namespace
}  // namespace shardpull
