#include "tensor/copy.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "tensor/chain_json_testing.h"
#include "tensor/convert.h"
#include "tensor/copy_kernels.h"
#include "tensor/slice_algebra.h"

namespace shardpull {
namespace {

using testing::enumerate;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;
using Sizes = std::vector<std::int64_t>;

constexpr std::byte kCanary{0xCD};

std::byte source_byte(std::int64_t position) {
  return static_cast<std::byte>((position * 167 + (position >> 8) * 59 + 13) & 0xFF);
}

// Memory of exactly `size` bytes, at an odd address, with guards that a sanitizer or check() sees.
class Buffer {
 public:
  explicit Buffer(std::int64_t size)
      : bytes_(static_cast<std::size_t>(size) + 1 + kGuard, kCanary), size_(size) {}
  std::byte* data() { return bytes_.data() + 1; }
  const std::byte* data() const { return bytes_.data() + 1; }
  std::byte at(std::int64_t i) const { return data()[i]; }
  bool guards_intact() const {
    return bytes_[0] == kCanary &&
           std::all_of(bytes_.begin() + 1 + size_, bytes_.end(), [](std::byte b) { return b == kCanary; });
  }

 private:
  static constexpr std::size_t kGuard = 64;
  Bytes bytes_;
  std::int64_t size_;
};

// Memory address (in elements) of each logical element of a layout, in order.
Sizes layout_addresses(const SourceLayout& layout) {
  Region region;
  for (std::size_t i = 0; i < layout.shape.size(); ++i)
    region.dims.push_back({layout.shape[i], layout.stride[i]});
  return enumerate(Slice{{region}});
}

struct Case {
  SourceLayout layout;
  Slice slice;  // in wire elements
  DType wire;
  Region destination;
  DType destination_dtype;
  bool raw = false;
};

DType unsigned_of(std::int64_t bytes) {
  return bytes == 1 ? DType::kU8 : bytes == 2 ? DType::kBF16 : bytes == 4 ? DType::kF32 : DType::kI64;
}

// A layout, a slice of it and a destination whose elements do not lie on each other, of up to three dims
// each, with gaps.
Case random_case() {
  const std::int64_t published = std::int64_t{1} << *rc::gen::inRange(0, 4);
  const std::int64_t wire = std::int64_t{1} << *rc::gen::inRange(0, 4);
  Case result;
  result.wire = result.destination_dtype = unsigned_of(wire);
  result.layout.dtype = unsigned_of(published);
  // Physical order of dims and gaps after each.
  const auto dims = static_cast<std::size_t>(*rc::gen::inRange(1, 4));
  std::int64_t numel = 1;
  for (std::size_t i = 0; i < dims; ++i) result.layout.shape.push_back(*rc::gen::inRange<std::int64_t>(1, 9));
  if (wire > published) result.layout.shape.back() *= wire / published;
  for (const std::int64_t size : result.layout.shape) numel *= size;
  std::vector<std::size_t> order(dims);
  std::iota(order.begin(), order.end(), 0);
  if (*rc::gen::inRange(0, 2) == 1) std::rotate(order.begin(), order.begin() + 1, order.end());
  result.layout.stride.resize(dims);
  std::int64_t step = 1;
  for (std::size_t i = dims; i-- > 0;) {
    result.layout.stride[order[i]] = step;
    step = step * result.layout.shape[order[i]] + *rc::gen::inRange<std::int64_t>(0, 3);
  }
  // The slice: regions of the logical elements.
  const std::int64_t available = numel * published / wire;
  std::vector<Region> regions;
  const auto count = *rc::gen::inRange(1, 4);
  for (int r = 0; r < count; ++r) {
    Region region{.offset = *rc::gen::inRange<std::int64_t>(0, available), .dims = {}};
    std::int64_t reach = available - 1 - region.offset;
    for (int d = *rc::gen::inRange(0, 4); d > 0; --d) {
      const std::int64_t size = *rc::gen::inRange<std::int64_t>(1, 9);
      const std::int64_t limit = size > 1 ? reach / (size - 1) : 1;
      if (limit < 1) continue;
      const std::int64_t stride = *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(limit, 20) + 1);
      region.dims.push_back({size, stride});
      reach -= (size - 1) * stride;
    }
    regions.push_back(region);
  }
  result.slice = canonicalise(regions);
  // The destination: the elements of the slice in some shape.
  std::int64_t left = result.slice.numel();
  Sizes shape;
  for (const std::int64_t factor : {2, 3, 5, 7}) {
    if (left % factor == 0 && *rc::gen::inRange(0, 2) == 1) {
      shape.push_back(factor);
      left /= factor;
    }
  }
  shape.push_back(left);
  if (*rc::gen::inRange(0, 2) == 1) std::reverse(shape.begin(), shape.end());
  std::vector<std::size_t> physical(shape.size());
  std::iota(physical.begin(), physical.end(), 0);
  if (*rc::gen::inRange(0, 2) == 1) std::reverse(physical.begin(), physical.end());
  result.destination.dims.resize(shape.size());
  result.destination.offset = *rc::gen::inRange<std::int64_t>(0, 5);
  step = 1;
  for (std::size_t i = physical.size(); i-- > 0;) {
    result.destination.dims[physical[i]] = {shape[physical[i]], step};
    step = step * shape[physical[i]] + *rc::gen::inRange<std::int64_t>(0, 3);
  }
  return result;
}

// Goal: every byte lands where an independent walk over logical elements puts it, every other byte stays, and
// no byte outside [0, src_end) and [0, dst_end) is touched. Also when the program is split among threads.
RC_GTEST_PROP(Copy, MovesExactlyTheElements, ()) {
  const Case c = random_case();
  const auto program = compile_copy(c.slice, c.layout, c.wire, c.destination, c.destination_dtype);
  if (!program.ok()) RC_LOG(program.status().to_string());
  RC_ASSERT(program.ok());

  const std::int64_t wire = dtype_bits(c.wire) / 8, published = dtype_bits(c.layout.dtype) / 8;
  const Sizes addresses = layout_addresses(c.layout);
  const Sizes elements = enumerate(c.slice), targets = enumerate(Slice{{c.destination}});
  RC_ASSERT(elements.size() == targets.size());
  Buffer source(program->src_end), expected(program->dst_end), parts(program->dst_end),
      whole(program->dst_end);
  for (std::int64_t i = 0; i < program->src_end; ++i) source.data()[i] = source_byte(i);
  for (std::size_t i = 0; i < elements.size(); ++i) {
    for (std::int64_t b = 0; b < wire; ++b) {
      const std::int64_t logical = elements[i] * wire + b;  // byte of the row-major logical tensor
      const std::int64_t at =
          addresses[static_cast<std::size_t>(logical / published)] * published + logical % published;
      RC_ASSERT(at < program->src_end);
      RC_ASSERT(targets[i] * wire + b < program->dst_end);
      expected.data()[targets[i] * wire + b] = source_byte(at);
    }
  }
  run(*program, source.data(), whole.data());
  RC_ASSERT(std::equal(whole.data(), whole.data() + program->dst_end, expected.data()));
  RC_ASSERT(whole.guards_intact());
  RC_ASSERT(program->bytes == elements.size() * static_cast<std::size_t>(wire));

  std::uint64_t bytes = 0;
  const auto pieces = split(*program, static_cast<std::size_t>(*rc::gen::inRange(1, 6)), 1);
  for (const CopyProgram& piece : pieces) {
    run(piece, source.data(), parts.data());
    bytes += piece.bytes;
  }
  RC_ASSERT(std::equal(parts.data(), parts.data() + program->dst_end, expected.data()));
  RC_ASSERT(parts.guards_intact());
  RC_ASSERT(bytes == program->bytes);

  // In parts of the source, each in memory of its own, in any order.
  Sizes cuts = *rc::gen::container<Sizes>(rc::gen::inRange<std::int64_t>(0, program->src_end + 1));
  cuts.push_back(0);
  cuts.push_back(program->src_end);
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::size_t> order(cuts.size() - 1);
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin(), order.begin() + *rc::gen::inRange<std::ptrdiff_t>(0, std::ssize(order)),
              order.end());
  Buffer arrived(program->dst_end);
  for (const std::size_t i : order) {
    const Bytes part(source.data() + cuts[i], source.data() + cuts[i + 1]);
    run_part(*program, cuts[i], std::ssize(part), part.data(), arrived.data(), i % 2 == 0);
  }
  RC_ASSERT(std::equal(arrived.data(), arrived.data() + program->dst_end, expected.data()));
  RC_ASSERT(arrived.guards_intact());
}

// Goal: all shapes of rows, at all alignments and lengths around the kernels' sizes.
TEST(Copy, EveryRunLengthAndAlignment) {
  for (std::int64_t run_bytes = 1; run_bytes <= 300; ++run_bytes) {
    for (const std::int64_t rows : {1, 3}) {
      const std::int64_t src_pitch = run_bytes + 5, dst_pitch = run_bytes + 3;
      const Slice slice = canonicalise({{0, {{rows, src_pitch}, {run_bytes, 1}}}});
      const Region destination{0, {{rows, dst_pitch}, {run_bytes, 1}}};
      const auto program = compile_copy(slice, SourceLayout::contiguous(DType::kU8, rows * src_pitch),
                                        DType::kU8, destination, DType::kU8);
      ASSERT_TRUE(program.ok());
      Buffer source(rows * src_pitch), target(rows * dst_pitch);
      for (std::int64_t i = 0; i < rows * src_pitch; ++i) source.data()[i] = source_byte(i);
      run(*program, source.data(), target.data());
      for (std::int64_t i = 0; i < rows * dst_pitch; ++i) {
        const bool written = i % dst_pitch < run_bytes;
        ASSERT_EQ(target.at(i), written ? source_byte(i / dst_pitch * src_pitch + i % dst_pitch) : kCanary)
            << run_bytes << " " << i;
      }
      ASSERT_TRUE(target.guards_intact());
    }
  }
}

// Goal: streaming stores write the same bytes, whatever the alignment of both sides.
TEST(Copy, StreamingCopiesAtEveryAlignment) {
  constexpr std::int64_t kSize = 5000;
  Bytes source(kSize + 64), target(kSize + 256);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = source_byte(static_cast<std::int64_t>(i));
  for (std::size_t src = 0; src < 64; src += 7) {
    for (std::size_t dst = 0; dst < 64; ++dst) {
      for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{64},
                                     std::size_t{200}, std::size_t{kSize}}) {
        std::fill(target.begin(), target.end(), kCanary);
        stream_copy(target.data() + 64 + dst, source.data() + src, size);
        end_streaming();
        ASSERT_EQ(std::memcmp(target.data() + 64 + dst, source.data() + src, size), 0)
            << src << " " << dst << " " << size;
        ASSERT_EQ(target[63 + dst], kCanary);
        ASSERT_EQ(target[64 + dst + size], kCanary);
      }
    }
  }
}

TEST(Copy, LargeProgramsStreamTheSameBytes) {
  const std::int64_t rows = 600, columns = 9000, kept = 8500;  // above kStreamingProgramBytes
  Buffer source(rows * columns), target(rows * kept);
  for (std::int64_t i = 0; i < rows * columns; ++i) source.data()[i] = source_byte(i);
  const Slice slice = canonicalise({{17, {{rows, columns}, {kept, 1}}}});
  const auto program = compile_copy(slice, SourceLayout::contiguous(DType::kU8, rows * columns), DType::kU8,
                                    contiguous_region(rows * kept), DType::kU8);
  ASSERT_TRUE(program.ok());
  ASSERT_GE(program->bytes, kStreamingProgramBytes);
  run(*program, source.data(), target.data());
  for (std::int64_t r = 0; r < rows; ++r)
    ASSERT_EQ(std::memcmp(target.data() + r * kept, source.data() + 17 + r * columns,
                          static_cast<std::size_t>(kept)),
              0);
  EXPECT_TRUE(target.guards_intact());
}

// Goal: parts of odd sizes of a scatter into columns, with whole and cut rows, land as the whole does.
TEST(Copy, PartsOfAScatterLandWhereTheWholeDoes) {
  const std::int64_t blocks = 5, rows = 37, kept = 1021, columns = 1500, packed = blocks * rows * kept;
  Buffer source(packed);
  for (std::int64_t i = 0; i < packed; ++i) source.data()[i] = source_byte(i);
  const auto program =
      compile_copy(Slice::whole(packed), SourceLayout::contiguous(DType::kU8, packed), DType::kU8,
                   {7, {{blocks, (rows + 2) * columns}, {rows, columns}, {kept, 1}}}, DType::kU8);
  ASSERT_TRUE(program.ok());
  Buffer whole(program->dst_end);
  run(*program, source.data(), whole.data());
  for (const std::int64_t step :
       {std::int64_t{1}, std::int64_t{64}, kept, kept * 3 + 1, rows * kept, packed / 2 + 1, packed}) {
    Buffer parts(program->dst_end);
    for (std::int64_t from = (packed - 1) / step * step; from >= 0; from -= step) {
      const std::int64_t bytes = std::min(step, packed - from);
      run_part(*program, from, bytes, source.data() + from, parts.data(), step > kept);
    }
    EXPECT_TRUE(std::equal(parts.data(), parts.data() + program->dst_end, whole.data())) << step;
    EXPECT_TRUE(parts.guards_intact()) << step;
  }
}

// Goal: programs are as short as the shapes allow.
TEST(Copy, ProgramsAreMergedAsFarAsPossible) {
  const auto nests = [](std::vector<Region> slice, Sizes shape, Region destination) {
    std::int64_t numel = 1;
    for (const std::int64_t size : shape) numel *= size;
    auto program = compile_copy(canonicalise(std::move(slice)), SourceLayout::contiguous(DType::kBF16, numel),
                                DType::kBF16, destination, DType::kBF16);
    EXPECT_TRUE(program.ok()) << program.status().to_string();
    return program->nests;
  };
  // Contiguous on both sides: one run.
  EXPECT_EQ(nests({{4096, {{4096, 1}}}}, {128, 64}, {0, {{64, 64}, {64, 1}}}),
            (std::vector<CopyNest>{{8192, 0, {}, 8192}}));
  // Rows out of a matrix into a packed slot.
  EXPECT_EQ(nests({{32, {{128, 64}, {32, 1}}}}, {128, 64}, contiguous_region(128 * 32)),
            (std::vector<CopyNest>{{64, 0, {{128, 128, 64}}, 64}}));
  // Out of a slot into columns of a parameter.
  EXPECT_EQ(nests({{0, {{128 * 32, 1}}}}, {128 * 32}, {32, {{128, 64}, {32, 1}}}),
            (std::vector<CopyNest>{{0, 64, {{128, 64, 128}}, 64}}));
  // Both strided, one copy.
  EXPECT_EQ(nests({{32, {{128, 64}, {32, 1}}}}, {128, 64}, {16, {{128, 48}, {32, 1}}}),
            (std::vector<CopyNest>{{64, 32, {{128, 128, 96}}, 64}}));
  // A region whose rows do not end where the destination's rows end: a few nests, not one per row.
  EXPECT_LE(nests({{0, {{3000, 5}, {4, 1}}}}, {3000, 5}, {0, {{4000, 7}, {3, 1}}}).size(), 12u);
}

// A column slice of a long tensor: a strided loop, fast, and no list of pieces.
TEST(Copy, case_106_column_slice_of_a_long_tensor) {
  const std::int64_t rows = 200000;
  std::vector<std::uint16_t> source(static_cast<std::size_t>(rows) * 8),
      target(static_cast<std::size_t>(rows) * 4);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint16_t>(i * 31);
  const auto program =
      compile_copy(canonicalise({{0, {{rows, 8}, {4, 1}}}}), SourceLayout{DType::kBF16, {rows, 8}, {8, 1}},
                   DType::kBF16, contiguous_region(rows * 4), DType::kBF16);
  ASSERT_TRUE(program.ok());
  EXPECT_EQ(program->nests.size(), 1u);
  EXPECT_EQ(program->bytes, 1'600'000u);
  run(*program, reinterpret_cast<const std::byte*>(source.data()),
      reinterpret_cast<std::byte*>(target.data()));
  for (std::size_t i = 0; i < target.size(); ++i) ASSERT_EQ(target[i], source[i / 4 * 8 + i % 4]);
}

// Goal: a transpose is tiled and right, also where the tiles do not come out even.
TEST(Copy, TransposesAreTiled) {
  for (const auto& [rows, columns] :
       {std::pair<std::int64_t, std::int64_t>{100, 77}, {64, 64}, {1, 50}, {50, 1}, {33, 31}}) {
    std::vector<std::uint16_t> source(static_cast<std::size_t>(rows * columns)), target(source.size());
    std::iota(source.begin(), source.end(), std::uint16_t{1});
    const auto program =
        compile_copy(Slice::whole(rows * columns), SourceLayout::contiguous(DType::kF16, rows * columns),
                     DType::kF16, Region{0, {{rows, 1}, {columns, rows}}}, DType::kF16);
    ASSERT_TRUE(program.ok());
    run(*program, reinterpret_cast<const std::byte*>(source.data()),
        reinterpret_cast<std::byte*>(target.data()));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        ASSERT_EQ(target[static_cast<std::size_t>(c * rows + r)],
                  source[static_cast<std::size_t>(r * columns + c)]);
      }
    }
  }
}

TEST(Copy, EmptyCopiesDoNothing) {
  const auto program = compile_copy(Slice{}, SourceLayout{DType::kF32, {0, 5}, {5, 1}}, DType::kF32,
                                    Region{3, {{0, 5}, {5, 1}}}, DType::kBF16);
  ASSERT_TRUE(program.ok());
  EXPECT_TRUE(program->nests.empty());
  EXPECT_EQ(program->bytes, 0u);
  run(*program, nullptr, nullptr);
  EXPECT_EQ(split(*program, 4, 1).size(), 1u);
}

// Goal: conversion happens on the way, whatever the strides of both sides.
TEST(Copy, ConvertsOnTheWay) {
  std::vector<float> source(8 * 6);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>(i) + 0.5f;
  std::vector<std::uint16_t> target(6 * 8 + 4, 0xCDCD);
  // Columns 1 to 4 of the source, transposed, into a padded BF16 region.
  const auto program =
      compile_copy(canonicalise({{1, {{4, 1}, {8, 6}}}}), SourceLayout{DType::kF32, {8, 6}, {6, 1}},
                   DType::kF32, Region{2, {{4, 10}, {8, 1}}}, DType::kBF16);
  ASSERT_TRUE(program.ok()) << program.status().to_string();
  EXPECT_EQ(program->bytes, 64u);
  run(*program, reinterpret_cast<const std::byte*>(source.data()),
      reinterpret_cast<std::byte*>(target.data()));
  for (std::size_t c = 0; c < 4; ++c) {
    for (std::size_t r = 0; r < 8; ++r) {
      std::uint16_t expected = 0;
      convert_kernel(DType::kF32, DType::kBF16)(reinterpret_cast<const std::byte*>(&source[r * 6 + c + 1]), 4,
                                                reinterpret_cast<std::byte*>(&expected), 2, 1);
      ASSERT_EQ(target[2 + c * 10 + r], expected);
    }
  }
  EXPECT_EQ(target[0], 0xCDCD);
  EXPECT_EQ(target[10], 0xCDCD);

  // A wire dtype wider than what is published (a dtype view): elements lie whole in memory.
  const auto wide = compile_copy(Slice::whole(12), SourceLayout{DType::kU8, {4, 12}, {12, 1}}, DType::kF32,
                                 contiguous_region(12), DType::kF64);
  ASSERT_TRUE(wide.ok()) << wide.status().to_string();
  // Published by columns they do not.
  EXPECT_FALSE(compile_copy(Slice::whole(12), SourceLayout{DType::kU8, {4, 12}, {1, 4}}, DType::kF32,
                            contiguous_region(12), DType::kF64)
                   .ok());
  // Moved as they are, they may lie anywhere.
  EXPECT_TRUE(compile_copy(Slice::whole(12), SourceLayout{DType::kU8, {4, 12}, {1, 4}}, DType::kF32,
                           contiguous_region(12), DType::kF32)
                  .ok());
}

// Goal: a destination recorded in bytes takes the wire's bytes, also where a conversion between the dtypes
// exists.
TEST(Copy, RawDestinationsTakeBytes) {
  const std::vector<std::uint8_t> source = {0x7E, 0x38, 0x01, 0xFF};
  std::vector<std::uint8_t> target(4);
  const auto layout = SourceLayout::contiguous(DType::kF8E4M3, 4);
  const auto raw =
      compile_copy(Slice::whole(4), layout, DType::kF8E4M3, contiguous_region(4), DType::kU8, true);
  ASSERT_TRUE(raw.ok());
  run(*raw, reinterpret_cast<const std::byte*>(source.data()), reinterpret_cast<std::byte*>(target.data()));
  EXPECT_EQ(target, source);
  const auto converted = compile_copy(Slice::whole(2), SourceLayout::contiguous(DType::kF8E4M3, 2),
                                      DType::kF8E4M3, contiguous_region(2), DType::kU8);
  ASSERT_TRUE(converted.ok());
  run(*converted, reinterpret_cast<const std::byte*>(source.data()),
      reinterpret_cast<std::byte*>(target.data()));
  EXPECT_EQ(target[1], 1) << "0x38 is 1.0";
  const auto wide = compile_copy(Slice::whole(2), SourceLayout::contiguous(DType::kBF16, 2), DType::kBF16,
                                 Region{0, {{2, 2}, {2, 1}}}, DType::kU8, true);
  EXPECT_TRUE(wide.ok());
  EXPECT_FALSE(compile_copy(Slice::whole(2), SourceLayout::contiguous(DType::kBF16, 2), DType::kBF16,
                            contiguous_region(2), DType::kU8, true)
                   .ok());
}

// Goal: what does not fit is refused when the copy is compiled.
TEST(Copy, RefusesWhatDoesNotFit) {
  const SourceLayout layout{DType::kBF16, {4, 6}, {6, 1}};
  const auto compiled = [&](const Slice& slice, const Region& destination, DType to = DType::kBF16) {
    return compile_copy(slice, layout, DType::kBF16, destination, to).status();
  };
  constexpr std::int64_t kHuge = std::int64_t{1} << 61;
  EXPECT_THAT(compiled(Slice::whole(24), contiguous_region(23)).message(),
              HasSubstr("the source has 24 elements, the destination 23"));
  EXPECT_FALSE(compiled(Slice::whole(25), contiguous_region(25)).ok());
  EXPECT_FALSE(compiled(Slice::whole(24), {-1, {{24, 1}}}).ok());
  EXPECT_FALSE(compiled(Slice::whole(24), {0, {{24, -1}}}).ok());
  EXPECT_THAT(compiled(Slice::whole(24), {0, {{4, 0}, {6, 1}}}).message(), HasSubstr("overlaps itself"));
  EXPECT_FALSE(compiled(Slice::whole(24), {0, {{24, kHuge}}}).ok());
  EXPECT_FALSE(compiled(Slice::whole(24), {kHuge * 2, {{24, 1}}}).ok());
  EXPECT_FALSE(compiled(Slice::whole(24), {0, {{-24, 1}}}).ok());
  EXPECT_THAT(compiled(Slice::whole(24), contiguous_region(24), DType::kF4).message(),
              HasSubstr("BF16 cannot be converted to F4"));
  EXPECT_FALSE(compile_copy(Slice::whole(4), SourceLayout{DType::kF32, {4}, {-1}}, DType::kF32,
                            contiguous_region(4), DType::kF32)
                   .ok());
  EXPECT_FALSE(compile_copy(Slice::whole(4), SourceLayout{DType::kF32, {4}, {}}, DType::kF32,
                            contiguous_region(4), DType::kF32)
                   .ok());
  EXPECT_FALSE(compile_copy(Slice::whole(4), SourceLayout{DType::kF32, {4}, {kHuge}}, DType::kF32,
                            contiguous_region(4), DType::kF32)
                   .ok());
}

// A published tensor by columns, with pad words after each column, wanted by rows: pads are never read.
TEST(Copy, case_023_column_major_scales_with_padding) {
  std::vector<std::int32_t> published(6 * 8, -1);
  for (std::int32_t r = 0; r < 4; ++r) {
    for (std::int32_t c = 0; c < 6; ++c) published[static_cast<std::size_t>(c * 8 + r)] = r * 6 + c;
  }
  std::vector<std::int32_t> target(24);
  const auto program = compile_copy(Slice::whole(24), SourceLayout{DType::kI32, {4, 6}, {1, 8}}, DType::kI32,
                                    contiguous_region(24), DType::kI32);
  ASSERT_TRUE(program.ok());
  run(*program, reinterpret_cast<const std::byte*>(published.data()),
      reinterpret_cast<std::byte*>(target.data()));
  for (std::int32_t i = 0; i < 24; ++i) EXPECT_EQ(target[static_cast<std::size_t>(i)], i);
}

// Goal: a zero stride in the source repeats an element (a constant, a fill).
TEST(Copy, SourcesMayRepeatElements) {
  const std::uint16_t one = 0x3F80;
  std::vector<std::uint16_t> target(12, 0);
  const auto program = compile_copy(Slice::whole(12), SourceLayout{DType::kBF16, {3, 4}, {0, 0}},
                                    DType::kBF16, contiguous_region(12), DType::kBF16);
  ASSERT_TRUE(program.ok());
  EXPECT_EQ(program->src_end, 2);
  run(*program, reinterpret_cast<const std::byte*>(&one), reinterpret_cast<std::byte*>(target.data()));
  EXPECT_EQ(target, std::vector<std::uint16_t>(12, one));
}

// Goal: steps larger than a part leave no empty part and no empty nest behind.
TEST(Copy, SplitsWhatHardlySplits) {
  CopyProgram program;
  program.nests = {{34, 6, {{2, 79, 4}, {2, 4, 1}}, 1}, {200, 20, {}, 3}};
  program.bytes = 7;
  for (std::size_t parts = 1; parts <= 9; ++parts) {
    std::uint64_t bytes = 0;
    for (const CopyProgram& part : split(program, parts, 1)) {
      EXPECT_GT(part.bytes, 0u);
      for (const CopyNest& nest : part.nests) EXPECT_GT(nest.run_elements, 0);
      bytes += part.bytes;
    }
    EXPECT_EQ(bytes, program.bytes) << parts;
  }
}

TEST(Copy, SplitsIntoSimilarParts) {
  const std::int64_t rows = 1000, columns = 512;
  const auto program = compile_copy(canonicalise({{0, {{rows, columns * 2}, {columns, 1}}}}),
                                    SourceLayout::contiguous(DType::kBF16, rows * columns * 2), DType::kBF16,
                                    contiguous_region(rows * columns), DType::kBF16);
  ASSERT_TRUE(program.ok());
  const auto parts = split(*program, 4, 4096);
  ASSERT_EQ(parts.size(), 4u);
  for (const CopyProgram& part : parts)
    EXPECT_NEAR(static_cast<double>(part.bytes), static_cast<double>(program->bytes) / 4, 2048);
  EXPECT_EQ(split(*program, 4, program->bytes).size(), 1u) << "too small to be worth it";
  EXPECT_EQ(split(*program, 0, 1).size(), 1u);
}

}  // namespace
}  // namespace shardpull
