#include "tensor/slice_algebra.h"

#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "tensor/chain_json_testing.h"

namespace shardpull {
namespace {

using testing::enumerate;
using ::testing::HasSubstr;
using Positions = std::vector<std::int64_t>;

Region random_region(std::int64_t limit) {
  Region region{.offset = *rc::gen::inRange<std::int64_t>(0, limit), .dims = {}};
  const auto dims = *rc::gen::inRange(0, 4);
  for (int i = 0; i < dims; ++i)
    region.dims.push_back({*rc::gen::inRange<std::int64_t>(1, 5), *rc::gen::inRange<std::int64_t>(1, 30)});
  return region;
}

std::vector<Region> random_regions(std::int64_t limit) {
  std::vector<Region> regions;
  const auto count = *rc::gen::inRange(0, 6);
  for (int i = 0; i < count; ++i) regions.push_back(random_region(limit));
  return regions;
}

// Goal: the canonical form keeps elements and order, is a fixed point, and does not depend on how the regions
// were cut.
RC_GTEST_PROP(Canonicalise, KeepsTheSequenceAndForgetsTheCuts, ()) {
  const std::vector<Region> regions = random_regions(50);
  const Slice canonical = canonicalise(regions);
  RC_ASSERT(enumerate(canonical) == enumerate(Slice{regions}));
  RC_ASSERT(canonicalise(canonical.regions) == canonical);

  std::vector<Region> elements;
  for (const std::int64_t position : enumerate(canonical)) elements.push_back({position, {}});
  RC_ASSERT(canonicalise(elements) == canonical);

  std::vector<Region> cut;
  for (const Region& region : regions) {  // along the outermost dim
    if (region.dims.empty()) {
      cut.push_back(region);
      continue;
    }
    const std::int64_t at = *rc::gen::inRange<std::int64_t>(0, region.dims[0].size + 1);
    Region head = region, tail = region;
    head.dims[0].size = at;
    tail.dims[0].size -= at;
    tail.offset += at * region.dims[0].stride;
    cut.push_back(head);
    cut.push_back(tail);
  }
  RC_ASSERT(canonicalise(cut) == canonical);
}

TEST(Canonicalise, Examples) {
  // A whole matrix is one dim, however it is written.
  EXPECT_EQ(canonicalise({{0, {{4, 8}, {8, 1}}}}), Slice::whole(32));
  EXPECT_EQ(canonicalise({{0, {{1, 99}, {32, 1}, {1, 7}}}}), Slice::whole(32));
  EXPECT_EQ(canonicalise({{0, {{2, 8}, {8, 1}}}, {16, {{2, 8}, {8, 1}}}}), Slice::whole(32));
  // Columns of a matrix.
  EXPECT_EQ(canonicalise({{2, {{4, 8}, {2, 1}}}}), (Slice{{{2, {{4, 8}, {2, 1}}}}}));
  // Empty regions are nothing.
  EXPECT_EQ(canonicalise({{5, {{0, 1}}}, {3, {{4, 0}, {0, 1}}}}), Slice{});
  // One element.
  EXPECT_EQ(canonicalise({{5, {{1, 3}}}}), (Slice{{{5, {}}}}));
  EXPECT_EQ(to_string(canonicalise({{32768, {{512, 128}, {64, 1}}}})), "[off 32768: 512x64 stride 128,1]");
  EXPECT_EQ(to_string(Slice{}), "[]");
}

// Goal: large selections, too, are one region when one region can describe them, although the cuts went
// through its rows.
TEST(Canonicalise, FindsOneRegionInManyLargeOnes) {
  const Region whole{7, {{1000, 1'000'000}, {30, 20'000}, {5000, 2}}};
  std::vector<Region> cut;
  for (std::int64_t first = 0; first < 1000; first += 250) {
    cut.push_back({7 + first * 1'000'000, {{1, 0}, {29, 20'000}, {5000, 2}}});
    cut.push_back({7 + first * 1'000'000 + 29 * 20'000, {{5000, 2}}});
    cut.push_back({7 + (first + 1) * 1'000'000, {{249, 1'000'000}, {30, 20'000}, {5000, 2}}});
  }
  EXPECT_EQ(canonicalise(cut), (Slice{{whole}}));
}

// Goal: a range of a slice is that range of its elements.
RC_GTEST_PROP(SliceRange, IsTheRangeOfTheElements, ()) {
  const Slice slice = canonicalise(random_regions(50));
  const Positions all = enumerate(slice);
  const auto first = *rc::gen::inRange<std::int64_t>(0, static_cast<std::int64_t>(all.size()) + 1);
  const auto count = *rc::gen::inRange<std::int64_t>(0, static_cast<std::int64_t>(all.size()) - first + 1);
  const auto range = slice_range(slice, first, count);
  RC_PRE(range.ok() || range.status().info().reason == Reason::kLimit);
  if (range.ok()) RC_ASSERT(enumerate(*range) == Positions(all.begin() + first, all.begin() + first + count));
}

TEST(SliceRange, RefusesWhatLiesOutside) {
  const Slice slice = Slice::whole(10);
  EXPECT_TRUE(slice_range(slice, 10, 0).ok());
  for (const auto& [first, count] : {std::pair{-1, 1}, {0, 11}, {11, 0}, {5, -1}, {5, 6}}) {
    EXPECT_FALSE(slice_range(slice, first, count).ok()) << first << " " << count;
  }
}

// Goal: composing looks positions up.
RC_GTEST_PROP(Compose, LooksPositionsUp, ()) {
  const Region outer = random_region(20);
  const Positions outer_positions = enumerate(Slice{{outer}});
  Slice inner;
  for (const Region& region : random_regions(outer.numel())) {
    const Positions positions = enumerate(Slice{{region}});
    if (*std::max_element(positions.begin(), positions.end()) < outer.numel())
      inner.regions.push_back(region);
  }
  const auto composed = compose(outer, inner, 100000);
  RC_ASSERT(composed.ok());
  Positions expected;
  for (const std::int64_t position : enumerate(inner))
    expected.push_back(outer_positions[static_cast<std::size_t>(position)]);
  RC_ASSERT(enumerate(*composed) == expected);
}

TEST(Compose, RefusesPositionsOutside) {
  EXPECT_THAT(compose({0, {{10, 1}}}, Slice{{{5, {{6, 1}}}}}).status().message(),
              HasSubstr("outside its 10 elements"));
  EXPECT_FALSE(compose({0, {{10, 1}}}, Slice{{{-1, {}}}}).ok());
}

// Goal: changing to a smaller unit and back changes nothing; the bytes are the same ones.
RC_GTEST_PROP(ChangeUnit, RoundTrip, ()) {
  const Slice slice = canonicalise(random_regions(50));
  const auto bytes = change_unit(slice, 32, 8);
  RC_ASSERT(bytes.ok());
  Positions expected;
  for (const std::int64_t position : enumerate(slice)) {
    for (int b = 0; b < 4; ++b) expected.push_back(position * 4 + b);
  }
  RC_ASSERT(enumerate(*bytes) == expected);
  const auto back = change_unit(*bytes, 8, 32);
  RC_ASSERT(back.ok());
  RC_ASSERT(*back == slice);
}

TEST(ChangeUnit, RefusesElementsPutTogether) {
  EXPECT_FALSE(change_unit(Slice{{{0, {{4, 2}}}}}, 8, 16).ok());
  EXPECT_FALSE(change_unit(Slice{{{1, {{4, 1}}}}}, 8, 16).ok());
  EXPECT_FALSE(change_unit(Slice{{{0, {{2, 5}, {4, 1}}}}}, 8, 16).ok());
  EXPECT_EQ(change_unit(Slice{{{2, {{2, 6}, {4, 1}}}}}, 8, 16).value(), (Slice{{{1, {{2, 3}, {2, 1}}}}}));
}

// Goal: what a peer sends is checked against the tensor before anybody copies.
TEST(CheckSlice, RefusesWhatDoesNotFitTheTensor) {
  const auto check = [](std::vector<Region> regions, DType wire = DType::kBF16, DType dtype = DType::kBF16) {
    return check_slice(Slice{std::move(regions)}, wire, dtype, 100);
  };
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  EXPECT_TRUE(check({}).ok());
  EXPECT_TRUE(check({{0, {{100, 1}}}}).ok());
  EXPECT_TRUE(check({{99, {}}}).ok());
  EXPECT_TRUE(check({{0, {{200, 1}}}}, DType::kU8).ok()) << "200 bytes";
  EXPECT_TRUE(check({{0, {{50, 1}}}}, DType::kF32).ok());
  EXPECT_FALSE(check({{0, {{51, 1}}}}, DType::kF32).ok());
  EXPECT_FALSE(check({{100, {}}}).ok());
  EXPECT_FALSE(check({{1, {{100, 1}}}}).ok());
  EXPECT_FALSE(check({{-1, {{2, 1}}}}).ok());
  EXPECT_FALSE(check({{0, {{0, 1}}}}).ok());
  EXPECT_FALSE(check({{0, {{-5, 1}}}}).ok());
  EXPECT_FALSE(check({{50, {{2, -1}}}}).ok());
  EXPECT_FALSE(check({{0, {{kHuge, 8}}}}).ok()) << "overflows";
  EXPECT_FALSE(check({{0, {{kHuge, 0}, {kHuge, 0}}}}).ok()) << "counts more elements than 64 bits hold";
  EXPECT_FALSE(check({{kHuge, {{3, kHuge}}}}).ok());
  EXPECT_FALSE(check(std::vector<Region>(65, Region{0, {}})).ok());
  EXPECT_FALSE(check({{0, std::vector<Dim>(9, Dim{1, 1})}}).ok());
  EXPECT_THAT(check({{0, {{101, 1}}}}).message(), HasSubstr("region 0"));
  EXPECT_TRUE(check({{2, {{4, 10}, {2, 1}}}}, DType::kF4, DType::kF4).ok());
  EXPECT_FALSE(check({{1, {{4, 10}, {2, 1}}}}, DType::kF4, DType::kF4).ok()) << "starts inside a byte";
  EXPECT_FALSE(check({{0, {{4, 9}, {2, 1}}}}, DType::kF4, DType::kF4).ok());
}

// Goal: encode and decode are inverse, and what is decoded stays within the limits.
RC_GTEST_PROP(SliceEncoding, RoundTrip, ()) {
  const Slice slice = canonicalise(random_regions(50));
  ByteWriter writer;
  encode_slice(writer, slice);
  ByteReader reader(writer.bytes());
  Slice decoded;
  RC_ASSERT(decode_slice(reader, decoded).ok());
  RC_ASSERT(reader.end().ok());
  RC_ASSERT(decoded == slice);
  for (std::size_t size = 0; size < writer.size(); ++size) {
    ByteReader cut(writer.bytes().first(size));
    RC_ASSERT(!decode_slice(cut, decoded).ok());
  }
}

TEST(SliceEncoding, RefusesTooManyRegionsAndDims) {
  ByteWriter regions;
  encode_slice(regions, Slice{std::vector<Region>(65, Region{0, {}})});
  Slice out;
  ByteReader first(regions.bytes());
  EXPECT_FALSE(decode_slice(first, out).ok());
  ByteWriter dims;
  encode_slice(dims, Slice{{{0, std::vector<Dim>(9, Dim{2, 1})}}});
  ByteReader second(dims.bytes());
  EXPECT_FALSE(decode_slice(second, out).ok());
}

}  // namespace
}  // namespace shardpull
