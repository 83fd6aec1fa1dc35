// Goal: cutting a copy by pieces and by rows moves every element exactly once to where the uncut copy puts
// it, from the piece that holds it, and costs as few keys as the shapes allow.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"
#include "plan/boxes.h"
#include "plan/cut.h"
#include "plan/plan_testing.h"
#include "tensor/slice_algebra.h"

namespace shardpull {
namespace {

using namespace plan_testing;

Scatter scatter_of(const Tensor& source) {
  Scatter scatter;
  scatter.wire_dtype = source.dtype();
  scatter.slice = must(source.slice());
  scatter.shape = source.shape();
  scatter.destination = {.parameter = 0,
                         .dtype = source.dtype(),
                         .offset = 0,
                         .shape = source.shape(),
                         .stride = contiguous_stride(source.shape())};
  return scatter;
}

// Destination position -> position in the tensor.
using Moves = std::map<std::int64_t, std::int64_t>;

Moves moves_of(const Scatter& scatter) {
  Moves moves;
  const auto from = elements_of(scatter.slice), to = elements_of(scatter.destination);
  EXPECT_EQ(from.size(), to.size());
  for (std::size_t i = 0; i < from.size(); ++i) moves[to[i]] = from[i];
  return moves;
}

Moves moves_of(const std::vector<Part>& parts, const std::vector<OwnedPiece>& pieces,
               std::uint32_t first_piece, const std::vector<std::int64_t>& shape) {
  Moves moves;
  for (const Part& part : parts) {
    std::vector<std::int64_t> positions;
    if (part.piece != 0) positions = elements_of(pieces.at(part.piece - 1 - first_piece).box, shape);
    const auto from = elements_of(part.slice), to = elements_of(part.destination);
    EXPECT_EQ(from.size(), to.size());
    EXPECT_EQ(canonicalise(part.slice.regions), part.slice);
    EXPECT_EQ(part.bytes, bytes_of(part.wire_dtype, static_cast<std::int64_t>(from.size())).value());
    EXPECT_LE(part.destination.shape.size(), static_cast<std::size_t>(kMaxDims));
    for (std::size_t i = 0; i < from.size() && i < to.size(); ++i) {
      const std::int64_t position =
          part.piece != 0 ? positions.at(static_cast<std::size_t>(from[i])) : from[i];
      EXPECT_TRUE(moves.try_emplace(to[i], position).second) << "written twice";
    }
  }
  return moves;
}

std::vector<OwnedPiece> grid(const std::vector<std::vector<std::int64_t>>& cuts) {
  std::vector<OwnedPiece> pieces{{.name = 0, .box = {}, .owner_class = 0}};
  for (const auto& sizes : cuts) {
    std::vector<OwnedPiece> next;
    for (const OwnedPiece& piece : pieces) {
      std::int64_t start = 0;
      for (const std::int64_t size : sizes) {
        if (size > 0) {
          next.push_back(piece);
          next.back().box.start.push_back(start);
          next.back().box.size.push_back(size);
        }
        start += size;
      }
    }
    pieces = std::move(next);
  }
  return pieces;
}

std::vector<Part> cut(const Scatter& scatter, const TensorMeta& meta, const std::vector<OwnedPiece>& pieces) {
  const auto parts = cut_by_pieces(scatter, meta, pieces, 5);
  EXPECT_TRUE(parts.ok()) << parts.status().message();
  if (!parts.ok()) return {};
  EXPECT_EQ(moves_of(*parts, pieces, 5, must(wire_shape(meta, scatter.wire_dtype))), moves_of(scatter));
  return *parts;
}

TEST(CutByPieces, rows_inside_and_across_row_shards) {
  const TensorMeta w = meta("w", {10, 4});
  const Tensor fake = must(Tensor::fake(w.name, w.dtype, w.shape));
  const auto shards = grid({{3, 3, 3, 1}, {4}});
  EXPECT_EQ(cut(scatter_of(must(fake.narrow(0, 0, 5))), w, shards).size(), 2u);
  EXPECT_EQ(cut(scatter_of(must(fake.narrow(0, 5, 5))), w, shards).size(), 3u);
  EXPECT_EQ(cut(scatter_of(fake), w, shards).size(), 4u);
  // Columns of row shards: one strided key each.
  const auto columns = cut(scatter_of(must(fake.narrow(1, 1, 2))), w, shards);
  ASSERT_EQ(columns.size(), 4u);
  EXPECT_EQ(columns[1].slice.regions.size(), 1u);
  EXPECT_EQ(columns[1].piece, 7u);
}

TEST(CutByPieces, columns_transposes_and_merged_dims_stay_compact) {
  const TensorMeta w = meta("w", {64, 32});
  const Tensor fake = must(Tensor::fake(w.name, w.dtype, w.shape));
  const auto columns = grid({{64}, {8, 16, 8}});
  EXPECT_EQ(cut(scatter_of(fake), w, columns).size(), 3u);
  EXPECT_EQ(cut(scatter_of(must(fake.transpose(0, 1))), w, columns).size(), 3u);
  EXPECT_EQ(cut(scatter_of(must(fake.flatten())), w, columns).size(), 3u);
  EXPECT_EQ(cut(scatter_of(must(fake.narrow(0, 7, 40))), w, grid({{20, 44}, {16, 16}})).size(), 4u);
  // Heads of 16 rows, the first 8 of each, against shards of 24 rows that cut heads in two.
  const Tensor heads = must(must(fake.view({4, 16, 32})).narrow(1, 0, 8));
  EXPECT_LE(cut(scatter_of(heads), w, grid({{24, 24, 16}, {32}})).size(), 5u);
}

TEST(CutByPieces, stacked_experts_on_any_dim) {
  const TensorMeta w = meta("w", {6, 4, 8});
  const Tensor fake = must(Tensor::fake(w.name, w.dtype, w.shape));
  EXPECT_EQ(cut(scatter_of(must(fake.select(0, 3))), w, grid({{2, 2, 2}, {4}, {8}})).size(), 1u);
  EXPECT_EQ(
      cut(scatter_of(must(must(fake.narrow(0, 1, 4)).transpose(1, 2))), w, grid({{6}, {1, 3}, {8}})).size(),
      2u);
  EXPECT_EQ(cut(scatter_of(fake), w, grid({{3, 3}, {2, 2}, {5, 3}})).size(), 8u);
}

TEST(CutByPieces, case_032_square_transposes_keep_their_orientation) {
  const TensorMeta w = meta("w", {4, 8, 8});
  const Tensor fake = must(Tensor::fake(w.name, w.dtype, w.shape));
  cut(scatter_of(must(must(fake.narrow(0, 2, 2)).transpose(1, 2))), w, grid({{4}, {3, 5}, {8}}));
}

TEST(CutByPieces, dtype_views_are_cut_in_elements_of_the_wire) {
  const TensorMeta w = meta("w", {4, 8}, DType::kU8);
  const Tensor fake = must(must(Tensor::fake(w.name, w.dtype, w.shape)).view(DType::kBF16));
  const auto parts = must(cut_by_pieces(scatter_of(fake), w, grid({{4}, {2, 6}}), 5));
  EXPECT_EQ(parts.size(), 2u);
  EXPECT_EQ(moves_of(parts, grid({{4}, {1, 3}}), 5, {4, 4}), moves_of(scatter_of(fake)));
  const auto refused = cut_by_pieces(scatter_of(fake), w, grid({{4}, {3, 5}}), 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kUnimplemented);
  EXPECT_NE(refused.status().message().find("'w'"), std::string::npos);
}

TEST(CutByPieces, windows_of_raw_bytes_keep_their_bytes_together) {
  const TensorMeta w = meta("w", {6, 4}, DType::kBF16);
  Scatter scatter = scatter_of(must(Tensor::fake(w.name, w.dtype, w.shape)));
  scatter.destination = {
      .parameter = 0, .dtype = DType::kU8, .offset = 3, .shape = {6, 8}, .stride = {10, 1}};
  const auto pieces = grid({{6}, {1, 3}});
  const auto parts = must(cut_by_pieces(scatter, w, pieces, 0));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[1].destination.offset, 5);
  EXPECT_EQ(parts[1].destination.shape, (std::vector<std::int64_t>{6, 6}));
  EXPECT_EQ(parts[1].destination.stride, (std::vector<std::int64_t>{10, 1}));
}

TEST(CutByPieces, half_bytes_are_never_split) {
  const TensorMeta w = meta("w", {2, 8}, DType::kF4);
  const Tensor fake = must(Tensor::fake(w.name, w.dtype, w.shape));
  EXPECT_TRUE(cut_by_pieces(scatter_of(fake), w, grid({{2}, {4, 4}}), 0).ok());
  EXPECT_FALSE(cut_by_pieces(scatter_of(fake), w, grid({{2}, {3, 5}}), 0).ok());
}

Tensor random_chain(Random& random, Tensor tensor) {
  for (std::int64_t steps = random.between(0, 4); steps > 0; --steps) {
    Result<Tensor> next = tensor;
    const std::int64_t dims = tensor.dim();
    switch (random.below(6)) {
      case 0:
        if (dims > 0) {
          const std::int64_t d = random.between(0, dims - 1), size = tensor.size(d);
          const std::int64_t start = random.between(0, std::max<std::int64_t>(size - 1, 0));
          next = tensor.narrow(d, start, random.between(size > 0 ? 1 : 0, size - start));
        }
        break;
      case 1:
        if (dims > 1) next = tensor.transpose(random.between(0, dims - 1), random.between(0, dims - 1));
        break;
      case 2:
        if (dims > 0)
          next = tensor.index({IndexSlice{
              .start = random.between(0, 1), .stop = std::nullopt, .step = random.between(1, 3)}});
        break;
      case 3:
        if (dims > 0) next = tensor.reshape({-1});
        break;
      case 4: {
        // A reshape into factors, often no view.
        const std::int64_t numel = tensor.numel();
        for (const std::int64_t factor : {2, 3, 4}) {
          if (numel > 0 && numel % factor == 0 && random.below(2) == 0) {
            next = tensor.reshape({factor, numel / factor});
            break;
          }
        }
        break;
      }
      default:
        if (dims < 4) next = tensor.unsqueeze(random.between(0, dims));
    }
    if (next.ok() && next->slice().ok() && next->numel() > 0) tensor = *next;
  }
  return tensor;
}

// A window with gaps and permuted strides for a shape, non-overlapping.
Destination random_window(Random& random, const Tensor& source) {
  Destination window{.parameter = 0,
                     .dtype = source.dtype(),
                     .offset = random.between(0, 5),
                     .shape = source.shape(),
                     .stride = {}};
  std::vector<std::size_t> order(window.shape.size());
  for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
  if (random.below(2) == 0) {
    for (std::size_t d = order.size(); d > 1; --d) std::swap(order[d - 1], order[random.below(d)]);
  }
  window.stride.assign(window.shape.size(), 1);
  std::int64_t stride = random.between(1, 2);
  for (std::size_t i = order.size(); i-- > 0;) {
    window.stride[order[i]] = stride;
    stride = stride * window.shape[order[i]] + random.between(0, 1);
  }
  return window;
}

TEST(CutByPieces, random_chains_windows_and_boxes) {
  int cut_in_many = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<std::int64_t> shape(static_cast<std::size_t>(random.between(1, 4)));
    for (auto& size : shape) size = random.between(1, 6);
    const TensorMeta w = meta("w", shape);
    const Tensor source = random_chain(random, must(Tensor::fake(w.name, w.dtype, w.shape)));
    Scatter scatter = scatter_of(source);
    scatter.destination = random_window(random, source);
    std::vector<std::vector<std::int64_t>> cuts;
    for (const std::int64_t size : shape) {
      std::vector<std::int64_t> sizes;
      for (std::int64_t left = size; left > 0;) {
        const std::int64_t part = random.below(3) == 0 ? left : random.between(1, left);
        sizes.push_back(part);
        left -= part;
      }
      cuts.push_back(sizes);
    }
    const auto parts = cut(scatter, w, grid(cuts));
    if (HasFailure()) return;
    if (parts.size() > 1) ++cut_in_many;
  }
  EXPECT_GT(cut_in_many, 500);
}

TEST(CutByRows, balanced_runs_within_the_limit) {
  const TensorMeta w = meta("w", {100, 8});  // rows of 16 bytes
  const Part whole = must(whole_part(scatter_of(must(Tensor::fake(w.name, w.dtype, w.shape)))));
  std::vector<Part> parts;
  ASSERT_TRUE(cut_by_rows(whole, "w", 16 * 30, parts).ok());
  ASSERT_EQ(parts.size(), 4u);
  for (const Part& part : parts) EXPECT_EQ(part.bytes, 16u * 25);
  EXPECT_EQ(parts[1].slice, (Slice{{{.offset = 200, .dims = {{200, 1}}}}}));
  EXPECT_EQ(parts[1].destination.offset, 200);
  EXPECT_EQ(parts[1].destination.shape, (std::vector<std::int64_t>{25, 8}));
  EXPECT_EQ(moves_of(parts, {}, 0, w.shape),
            moves_of(scatter_of(must(Tensor::fake(w.name, w.dtype, w.shape)))));

  parts.clear();
  ASSERT_TRUE(cut_by_rows(whole, "w", 1, parts).ok());  // a single row may be larger
  EXPECT_EQ(parts.size(), 100u);
  parts.clear();
  ASSERT_TRUE(cut_by_rows(whole, "w", 1600, parts).ok());  // fits
  EXPECT_EQ(parts.size(), 1u);
}

TEST(CutByRows, along_the_outermost_dim_longer_than_1) {
  const TensorMeta w = meta("w", {1, 3, 4});
  Scatter scatter = scatter_of(must(Tensor::fake(w.name, w.dtype, w.shape)));
  scatter.destination.shape = {3, 4};  // leading 1s of the source do not matter
  scatter.destination.stride = {6, 1};
  std::vector<Part> parts;
  ASSERT_TRUE(cut_by_rows(must(whole_part(scatter)), "w", 8, parts).ok());
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[2].shape, (std::vector<std::int64_t>{1, 1, 4}));
  EXPECT_EQ(parts[2].destination.offset, 12);
  EXPECT_EQ(moves_of(parts, {}, 0, w.shape), moves_of(scatter));
}

TEST(CutByRows, rows_of_half_bytes_and_windows_of_raw_bytes) {
  const TensorMeta f4 = meta("w", {12}, DType::kF4);
  const Scatter scatter = scatter_of(must(Tensor::fake(f4.name, f4.dtype, f4.shape)));
  std::vector<Part> parts;
  ASSERT_TRUE(cut_by_rows(must(whole_part(scatter)), "w", 1, parts).ok());
  EXPECT_EQ(parts.size(), 6u);  // two elements make a whole byte
  EXPECT_EQ(moves_of(parts, {}, 0, f4.shape), moves_of(scatter));

  const TensorMeta flat = meta("w", {10}, DType::kF32);
  Scatter raw = scatter_of(must(Tensor::fake(flat.name, flat.dtype, flat.shape)));
  raw.destination = {.parameter = 0, .dtype = DType::kU8, .offset = 0, .shape = {40}, .stride = {1}};
  parts.clear();
  ASSERT_TRUE(cut_by_rows(must(whole_part(raw)), "w", 16, parts).ok());
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[1].destination.offset, 16);
  EXPECT_EQ(parts[1].destination.shape, (std::vector<std::int64_t>{16}));
  EXPECT_EQ(parts[2].destination.shape, (std::vector<std::int64_t>{8}));
}

TEST(CutByRows, random_chains_keep_their_elements) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<std::int64_t> shape(static_cast<std::size_t>(random.between(1, 4)));
    for (auto& size : shape) size = random.between(1, 6);
    const Tensor source = random_chain(random, must(Tensor::fake("w", DType::kBF16, shape)));
    Scatter scatter = scatter_of(source);
    scatter.destination = random_window(random, source);
    std::vector<Part> parts;
    const std::uint64_t limit = random.below(64) + 1;
    const Status status = cut_by_rows(must(whole_part(scatter)), "w", limit, parts);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(moves_of(parts, {}, 0, shape), moves_of(scatter));
    for (const Part& part : parts) {
      const auto rows =
          std::find_if(part.shape.begin(), part.shape.end(), [](std::int64_t size) { return size > 1; });
      const bool one_row =
          parts.size() > 1 && part.bytes * parts.size() >= parts.front().bytes;  // cut as far as it goes
      ASSERT_TRUE(part.bytes <= limit || rows == part.shape.end() || one_row);
    }
  }
}

TEST(CutByRows, case_107_one_strided_region_stays_one_key) {
  const TensorMeta w = meta("w", {200000, 8});
  const Tensor columns = must(must(Tensor::fake(w.name, w.dtype, w.shape)).narrow(1, 0, 4));
  const Scatter scatter = scatter_of(columns);
  EXPECT_EQ(scatter.slice.regions.size(), 1u);
  const auto parts = must(cut_by_pieces(scatter, w, grid({{100000, 100000}, {3, 5}}), 0));
  EXPECT_EQ(parts.size(), 4u);
  for (const Part& part : parts) EXPECT_EQ(part.slice.regions.size(), 1u);
}

TEST(Boxes, difference_and_intersection) {
  const Box a{.start = {0, 0}, .size = {4, 4}}, hole{.start = {1, 1}, .size = {2, 2}};
  std::int64_t left = 0;
  std::vector<Box> parts = box_difference(a, hole);
  for (const Box& part : parts) {
    left += box_numel(part);
    EXPECT_FALSE(box_intersection(part, hole));
  }
  EXPECT_EQ(left, 12);
  EXPECT_FALSE(find_overlap(parts));
  parts.push_back(a);
  EXPECT_TRUE(find_overlap(parts));
  EXPECT_TRUE(box_difference(a, a).empty());
  EXPECT_EQ(checked_numel({2, 0, 3}), 0);
  EXPECT_EQ(checked_numel({-1}), std::nullopt);
  EXPECT_EQ(checked_numel({1ll << 62, 4}), std::nullopt);
}

}  // namespace
}  // namespace shardpull
