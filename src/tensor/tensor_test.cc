#include "shardpull/tensor.h"

#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/limits.h"
#include "tensor/chain_json_testing.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;
using Sizes = std::vector<std::int64_t>;
using testing::enumerate;

Tensor fake(DType dtype, Sizes shape, std::string name = "w") {
  return Tensor::fake(std::move(name), dtype, std::move(shape)).value();
}

// Follows a chain of calls that must all succeed.
#define MUST(expr)                                                            \
  [&] {                                                                       \
    auto must_result = (expr);                                                \
    if (!must_result.ok()) ADD_FAILURE() << must_result.status().to_string(); \
    return std::move(must_result).value();                                    \
  }()

TEST(Tensor, AnswersMetadataQuestions) {
  const Tensor tensor = MUST(fake(DType::kBF16, {4, 6, 8}, "model.w").transpose(0, -1));
  EXPECT_TRUE(tensor.is_fake());
  EXPECT_EQ(tensor.name(), "model.w");
  EXPECT_EQ(tensor.shape(), (Sizes{8, 6, 4}));
  EXPECT_EQ(tensor.stride(), (Sizes{1, 8, 48}));
  EXPECT_EQ(tensor.dim(), 3);
  EXPECT_EQ(tensor.numel(), 192);
  EXPECT_EQ(tensor.size(-1), 4);
  EXPECT_EQ(tensor.size(0), 8);
  EXPECT_EQ(tensor.size(3), -1);
  EXPECT_EQ(tensor.size(-4), -1);
  EXPECT_FALSE(tensor.is_contiguous());
  EXPECT_EQ(tensor.recorder(), nullptr);
  EXPECT_EQ(tensor.to_string(), "model.w.transpose(0, 2) BF16 [8, 6, 4]");
}

TEST(Tensor, ChainsArePrintedAsPeopleWriteThem) {
  const Tensor root = fake(DType::kU8, {4, 6, 8});
  const Tensor tensor =
      MUST(MUST(MUST(root.narrow(-1, -6, 4))
                    .index({IndexSlice{1, {}, 2}, IndexEllipsis{}, IndexNone{}, std::int64_t{-1}}))
               .reshape({-1}));
  EXPECT_EQ(to_string(tensor.chain()), ".narrow(2, 2, 4)[1::2, ..., None, -1].reshape(12)");
  EXPECT_EQ(to_string(MUST(root.split({1, 3}, 0))[1].chain()), ".split([1, 3], 0)[1]");
  EXPECT_EQ(to_string(MUST(root.view(DType::kF32)).chain()), ".view(F32)");
  EXPECT_EQ(to_string(MUST(MUST(root.squeeze({-1})).index({})).chain()), ".squeeze([2])[()]");
}

TEST(Tensor, RefusedShapesNameTheTensor) {
  EXPECT_THAT(Tensor::fake("bad.w", DType::kF32, {2, -1}).status().message(), HasSubstr("bad.w"));
  EXPECT_FALSE(Tensor::fake("w", DType::kF32, Sizes(9, 1)).ok());
  EXPECT_FALSE(Tensor::real("w", DType::kF32, {2}, nullptr).ok());
  EXPECT_TRUE(Tensor::real("w", DType::kF32, {0}, nullptr).ok());
  EXPECT_FALSE(Tensor::real_strided("w", DType::kF32, {2}, {1, 1}, nullptr).ok());
}

// Goal: every malformed operation is refused, leaves its operand as it was, and the message names operation,
// tensor and chain.
TEST(Tensor, MalformedOperationsAreRefusedByName) {
  const Tensor tensor = MUST(fake(DType::kBF16, {4, 6}, "layer.weight").t());  // [6, 4]
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  const auto refused = [&](const auto& result, const char* operation) {
    ASSERT_FALSE(result.ok()) << operation;
    const Status status = result.status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.info().tensor, "layer.weight");
    EXPECT_EQ(status.info().reason, Reason::kUnsupportedOp) << status.to_string();
    EXPECT_THAT(status.message(), HasSubstr(std::string(operation)));
    EXPECT_THAT(status.message(), HasSubstr("layer.weight.t() BF16 [6, 4]"));
  };
  refused(tensor.narrow(2, 0, 1), "narrow(2, 0, 1)");
  refused(tensor.narrow(-3, 0, 1), "narrow(-3, 0, 1)");
  refused(tensor.narrow(0, 0, -1), "narrow(0, 0, -1)");
  refused(tensor.narrow(0, 7, 0), "narrow(0, 7, 0)");
  refused(tensor.narrow(0, -7, 1), "narrow");
  refused(tensor.narrow(0, 3, 4), "narrow(0, 3, 4)");
  refused(tensor.narrow(0, kMin, kMax), "narrow");
  refused(tensor.narrow(0, 1, kMax), "narrow");
  refused(tensor.view({24}), "view(24)");
  refused(tensor.view({5, 5}), "view(5, 5)");
  refused(tensor.view({-1, -1}), "view(-1, -1)");
  refused(tensor.view({-2, 12}), "view");
  refused(tensor.view({-1, 7}), "view");
  refused(tensor.view({0, -1}), "view");
  refused(tensor.view({kMax, kMax}), "view");
  refused(tensor.view(DType::kF32), "view(F32)");
  refused(tensor.reshape({5}), "reshape(5)");
  refused(tensor.index({std::int64_t{6}}), "[6]");
  refused(tensor.index({std::int64_t{-7}}), "[-7]");
  refused(tensor.index({std::int64_t{0}, std::int64_t{0}, std::int64_t{0}}), "[0, 0, 0]");
  refused(tensor.index({IndexSlice{{}, {}, 0}}), "[::0]");
  refused(tensor.index({IndexSlice{{}, {}, -1}}), "[::-1]");
  refused(tensor.select(0, 6), "select(0, 6)");
  refused(tensor.select(5, 0), "select(5, 0)");
  refused(tensor.unsqueeze(4), "unsqueeze(4)");
  refused(tensor.unsqueeze(-4), "unsqueeze(-4)");
  refused(tensor.squeeze({2}), "squeeze([2])");
  refused(tensor.squeeze({0, 0}), "squeeze([0, 0])");
  refused(tensor.transpose(0, 2), "transpose(0, 2)");
  refused(MUST(fake(DType::kBF16, {4, 6}, "layer.weight").t()).permute({0}), "permute(0)");
  refused(tensor.permute({0, 0}), "permute(0, 0)");
  refused(tensor.permute({0, 2}), "permute(0, 2)");
  refused(tensor.flatten(1, 0), "flatten(1, 0)");
  refused(tensor.flatten(0, 2), "flatten(0, 2)");
  refused(tensor.chunk(0), "chunk(0, 0)");
  refused(tensor.chunk(2, 2), "chunk(2, 2)");
  refused(tensor.split(-1), "split(-1, 0)");
  refused(tensor.split(0), "split(0, 0)");
  refused(tensor.split({3, 2}), "split([3, 2], 0)");
  refused(tensor.split({7, -1}), "split");
  refused(tensor.split({kMax, kMax}), "split");
  refused(tensor.unbind(2), "unbind(2)");
  EXPECT_EQ(tensor.shape(), (Sizes{6, 4}));
  EXPECT_EQ(tensor.chain().size(), 1u);
}

TEST(Tensor, ScalarsHaveNoDimToCut) {
  const Tensor scalar = fake(DType::kF32, {});
  EXPECT_FALSE(scalar.narrow(0, 0, 0).ok());
  EXPECT_FALSE(scalar.select(0, 0).ok());
  EXPECT_FALSE(scalar.index({std::int64_t{0}}).ok());
  EXPECT_FALSE(scalar.index({IndexSlice{}}).ok());
  EXPECT_FALSE(scalar.chunk(1).ok());
  EXPECT_FALSE(scalar.split(1).ok());
  EXPECT_FALSE(scalar.unbind().ok());
  EXPECT_FALSE(scalar.view(DType::kU8).ok());
  EXPECT_TRUE(scalar.view(DType::kI32).ok());
  EXPECT_EQ(MUST(scalar.index({IndexEllipsis{}, IndexNone{}})).shape(), (Sizes{1}));
  EXPECT_EQ(MUST(scalar.flatten()).shape(), (Sizes{1}));
  EXPECT_EQ(MUST(scalar.slice()), Slice::whole(1));
}

TEST(Tensor, MoreThanEightDimsAreALimit) {
  const Tensor tensor = fake(DType::kF32, Sizes(8, 1));
  EXPECT_EQ(tensor.unsqueeze(0).status().info().reason, Reason::kLimit);
  EXPECT_EQ(tensor.view(Sizes(9, 1)).status().info().reason, Reason::kLimit);
  Tensor longest = fake(DType::kF32, {2});
  for (std::uint64_t i = 0; i < kMaxOpsPerChain; ++i) longest = MUST(longest.contiguous());
  EXPECT_EQ(longest.contiguous().status().info().reason, Reason::kLimit);
}

// Goal: numbers that leave 64 bits are refused, not wrapped.
TEST(Tensor, HugeStepsDoNotOverflow) {
  const Tensor tensor = fake(DType::kU8, {4, 1 << 20});
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_FALSE(tensor.index({IndexSlice{{}, {}, kMax}}).ok());
  EXPECT_EQ(MUST(tensor.index({IndexEllipsis{}, IndexSlice{{}, {}, kMax}})).shape(), (Sizes{4, 1}));
  EXPECT_EQ(MUST(tensor.index({IndexSlice{std::numeric_limits<std::int64_t>::min(), kMax, {}}})).shape(),
            (Sizes{4, 1 << 20}));
}

TEST(Tensor, ApplyChecksTheFormOfArguments) {
  const Tensor root = fake(DType::kBF16, {4, 6});
  const auto refused = [&](Op op) {
    const auto result = Tensor::apply(root, {op});
    EXPECT_FALSE(result.ok()) << to_string({op});
    EXPECT_EQ(result.status().info().reason, Reason::kUnsupportedOp);
  };
  refused({"narrow", {std::int64_t{0}, std::int64_t{0}}});
  refused({"narrow", {Sizes{0, 0, 1}}});
  refused({"view", {}});
  refused({"view", {DType::kU8, DType::kU8}});
  refused({"view", {Sizes{24}, Sizes{24}}});
  refused({"t", {std::int64_t{0}}});
  refused({"select", {std::int64_t{0}}});
  refused({"flatten", {std::int64_t{0}, std::int64_t{1}, std::int64_t{1}}});
  refused({"contiguous", {std::int64_t{0}}});
  refused({"__getitem__", {Sizes{0}}});
  refused({"__getitem__", {}});
  refused({"squeeze", {DType::kU8}});
  refused({"chunk", {std::int64_t{2}}});  // a tuple is not a tensor
  refused({"unbind", {Sizes{0}}});
  const auto child = [&](OpArg index) {
    return Tensor::apply(root, {{"chunk", {std::int64_t{2}, std::int64_t{0}}}, {"__getitem__", {index}}});
  };
  EXPECT_EQ(MUST(child(std::int64_t{1})).offset(), 12);
  EXPECT_EQ(MUST(child(std::int64_t{-1})).offset(), 12);
  EXPECT_EQ(MUST(child(std::vector<IndexItem>{std::int64_t{1}})).offset(), 12);
  EXPECT_FALSE(child(std::int64_t{2}).ok());
  EXPECT_FALSE(child(std::vector<IndexItem>{IndexSlice{}}).ok());
  EXPECT_FALSE(child(std::vector<IndexItem>{std::int64_t{1}, std::int64_t{0}}).ok());
  // Sizes one by one, or as one list.
  EXPECT_EQ(MUST(Tensor::apply(root, {{"view", {std::int64_t{2}, std::int64_t{-1}}}})).shape(),
            (Sizes{2, 12}));
  EXPECT_EQ(MUST(Tensor::apply(root, {{"permute", {std::int64_t{1}, std::int64_t{0}}}})).shape(),
            (Sizes{6, 4}));
  EXPECT_EQ(MUST(Tensor::apply(root, {})).shape(), root.shape());
}

TEST(Tensor, SlicesOfOneSelectionAreEqualHoweverItIsWritten) {
  const Tensor root = fake(DType::kBF16, {128, 64});
  const Slice expected = MUST(MUST(root.narrow(0, 32, 32)).slice());
  EXPECT_EQ(MUST(MUST(root.chunk(4))[1].slice()), expected);
  EXPECT_EQ(MUST(MUST(root.split(32))[1].slice()), expected);
  EXPECT_EQ(MUST(MUST(root.index({IndexSlice{32, 64, {}}})).slice()), expected);
  EXPECT_EQ(MUST(MUST(MUST(root.view({4, 32, 64})).select(0, 1)).slice()), expected);
  EXPECT_EQ(MUST(MUST(MUST(MUST(MUST(root.t()).narrow(1, 32, 32)).t()).contiguous()).slice()), expected);
  EXPECT_EQ(MUST(MUST(MUST(MUST(MUST(root.t()).reshape({-1})).view({64, 128}))
                          .t()
                          .value()
                          .index({IndexSlice{-96, -64, 1}}))
                     .slice()),
            expected);
  EXPECT_EQ(expected, (Slice{{{2048, {{2048, 1}}}}}));
}

TEST(Tensor, EmptySlicesAreLegal) {
  const Tensor root = fake(DType::kBF16, {4, 6});
  EXPECT_EQ(MUST(MUST(root.narrow(0, 4, 0)).slice()), Slice{});
  EXPECT_EQ(MUST(MUST(MUST(root.narrow(1, 2, 0)).t().value().reshape({3, 0})).slice()), Slice{});
  EXPECT_EQ(MUST(fake(DType::kBF16, {0, 5}).slice()), Slice{});
}

TEST(Tensor, DtypeViewsChangeTheUnit) {
  const Tensor root = fake(DType::kF32, {4, 6});
  const Tensor bytes = MUST(MUST(root.view(DType::kU8)).narrow(1, 4, 8));
  EXPECT_EQ(bytes.dtype(), DType::kU8);
  EXPECT_EQ(MUST(bytes.slice()), (Slice{{{4, {{4, 24}, {8, 1}}}}}));
  EXPECT_FALSE(bytes.view(DType::kF64).ok()) << "the rows do not start on multiples of 8";
  EXPECT_EQ(MUST(MUST(bytes.view(DType::kF16)).slice()), (Slice{{{2, {{4, 12}, {4, 1}}}}}));
  // A copy may put the halves of an element together from two places: a legal tensor, but no slice.
  const Tensor torn = MUST(MUST(MUST(fake(DType::kBF16, {4, 6}).t()).contiguous()).view(DType::kF32));
  EXPECT_EQ(torn.shape(), (Sizes{6, 2}));
  EXPECT_THAT(torn.slice().status().message(), HasSubstr("slice of w.t().contiguous().view(F32)"));
}

TEST(Tensor, ChainsOfTooManyRegionsAreRefusedByName) {
  // Rows of six across the copy's rows of seven, each cut somewhere else.
  const Tensor tensor = MUST(MUST(MUST(fake(DType::kU8, {7, 200}, "odd").t()).reshape({-1}))
                                 .view({140, 10})
                                 .value()
                                 .narrow(1, 2, 6));
  const auto slice = tensor.slice();
  ASSERT_FALSE(slice.ok());
  EXPECT_EQ(slice.status().info().reason, Reason::kLimit);
  EXPECT_EQ(slice.status().info().tensor, "odd");
  EXPECT_THAT(slice.status().message(), HasSubstr("odd.t().reshape(1400).view(140, 10).narrow(1, 2, 6)"));
}

// A packed FP4 checkpoint whose rows need a rotary permutation: chains work on the stored shape, and a
// reshape after a transpose gathers.
TEST(Tensor, case_017_packed_rows_in_rotary_order) {
  const auto permuted = [](const char* name, std::int64_t rows) {
    const Tensor stored = fake(DType::kU8, {rows, 32}, name);
    return MUST(MUST(MUST(stored.view({rows / 8, 4, 2, 32})).transpose(1, 2)).reshape({rows, 32}));
  };
  for (const auto& [name, rows] :
       {std::pair{"q_proj.weight", std::int64_t{64}}, {"k_proj.weight", std::int64_t{16}}}) {
    const Tensor tensor = permuted(name, rows);
    EXPECT_EQ(tensor.shape(), (Sizes{rows, 32}));
    EXPECT_EQ(tensor.stride(), (Sizes{32, 1}));
    const Slice slice = MUST(tensor.slice());
    EXPECT_EQ(slice.regions.size(), 1u);
    const Sizes order = enumerate(slice);
    ASSERT_EQ(order.size(), static_cast<std::size_t>(rows * 32));
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t head = row / 8, half = row % 8 / 4,
                         pair = row % 4;  // after the transpose: [head][2][4]
      const std::int64_t stored_row = head * 8 + pair * 2 + half;
      for (std::int64_t column = 0; column < 32; ++column) {
        ASSERT_EQ(order[static_cast<std::size_t>(row * 32 + column)], stored_row * 32 + column);
      }
    }
  }
  // A view of the transpose is refused: it would alias, and only a copy can.
  const Tensor stored = fake(DType::kU8, {64, 32}, "q_proj.weight");
  EXPECT_THAT(MUST(stored.view({8, 4, 2, 32}).value().transpose(1, 2)).view({64, 32}).status().message(),
              HasSubstr("use reshape"));
  // Unpacked widths do not fit the stored bytes.
  EXPECT_FALSE(stored.view({8, 4, 2, 64}).ok());
  // Per-expert scales have one dim more.
  const Tensor scales = fake(DType::kF8E4M3, {4, 16, 8}, "experts.weight_scale");
  EXPECT_EQ(MUST(MUST(scales.index({std::int64_t{2}})).slice()), (Slice{{{256, {{128, 1}}}}}));
}

// A fused parameter with one second-level scale per part: scalars are addressed by part, never by row offset.
TEST(Tensor, case_026_row_offset_on_a_scale_per_part) {
  const Tensor parts = fake(DType::kF32, {3}, "qkv_proj.weight_scale_2");
  const auto broken = parts.narrow(0, 64, 16);
  ASSERT_FALSE(broken.ok());
  EXPECT_THAT(broken.status().message(),
              HasSubstr("narrow(0, 64, 16) refused on qkv_proj.weight_scale_2 F32 [3]"));
  for (std::int64_t part = 0; part < 3; ++part) {
    const Tensor one = MUST(parts.select(0, part));
    EXPECT_EQ(one.dim(), 0);
    EXPECT_EQ(MUST(one.slice()), (Slice{{{part, {}}}}));
  }
}

// Sub-byte and byte-sized float formats: F4 counts logical elements, and slices begin and end on bytes.
TEST(Tensor, case_028_f4_and_its_neighbours) {
  const Tensor weight = fake(DType::kF4, {2, 8});
  EXPECT_EQ(bytes_of(DType::kF4, weight.numel()).value(), 8u);
  const Tensor right = MUST(weight.narrow(1, 4, 4));
  EXPECT_EQ(MUST(right.slice()), (Slice{{{4, {{2, 8}, {4, 1}}}}}));
  EXPECT_EQ(MUST(MUST(right.view(DType::kU8)).slice()), (Slice{{{2, {{2, 4}, {2, 1}}}}}))
      << "2 bytes a row, at byte 2";
  EXPECT_THAT(MUST(weight.narrow(1, 3, 2)).slice().status().message(),
              HasSubstr("slice of w.narrow(1, 3, 2)"));
  EXPECT_FALSE(MUST(weight.narrow(1, 2, 3)).slice().ok());
  EXPECT_FALSE(MUST(weight.select(1, 0)).slice().ok());
  EXPECT_FALSE(MUST(weight.t()).slice().ok());
  EXPECT_FALSE(Tensor::fake("w", DType::kF4, {2, 7}).ok());
  EXPECT_FALSE(Tensor::fake("w", DType::kF4, {}).ok());
  EXPECT_EQ(MUST(weight.view(DType::kU8)).shape(), (Sizes{2, 4}));
  EXPECT_EQ(MUST(fake(DType::kU8, {2, 4}).view(DType::kF4)).shape(), (Sizes{2, 8}));
  EXPECT_EQ(MUST(MUST(MUST(weight.view(DType::kU8)).narrow(1, 2, 2)).slice()),
            (Slice{{{2, {{2, 4}, {2, 1}}}}}));
  EXPECT_EQ(MUST(MUST(MUST(weight.select(0, 1)).view({2, 4})).slice()), (Slice{{{8, {{8, 1}}}}}));

  const std::pair<DType, Sizes> others[] = {{DType::kF8E8M0, {2, 1}},
                                            {DType::kF8E5M2, {3}},
                                            {DType::kI64, {}},
                                            {DType::kU16, {5}},
                                            {DType::kBool, {9}}};
  for (const auto& [dtype, shape] : others) {
    const Tensor tensor = fake(dtype, shape);
    EXPECT_EQ(MUST(tensor.slice()), Slice::whole(tensor.numel()));
  }
  // Raw bits travel: both halves of every byte.
  const std::vector<std::uint8_t> bits = {0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F};
  const Tensor real =
      Tensor::real("w", DType::kF4, {2, 8}, reinterpret_cast<const std::byte*>(bits.data())).value();
  std::vector<std::uint8_t> out(4);
  ASSERT_TRUE(MUST(real.narrow(1, 4, 4)).copy_out(reinterpret_cast<std::byte*>(out.data()), 4).ok());
  EXPECT_EQ(out, (std::vector<std::uint8_t>{0x65, 0x87, 0xED, 0x0F}));
}

// One source slice whose two parts are cut from one tensor by head.
TEST(Tensor, case_029_absorbed_projections) {
  const Tensor kv_b = fake(DType::kBF16, {256, 32}, "kv_b_proj.weight");
  const Tensor heads = MUST(kv_b.view({8, 32, 32}));
  const Tensor w_kc = MUST(MUST(heads.index({IndexSlice{}, IndexSlice{{}, 16, {}}})).transpose(1, 2));
  const Tensor w_vc = MUST(heads.index({IndexSlice{}, IndexSlice{16, {}, {}}}));
  EXPECT_EQ(MUST(w_kc.slice()), (Slice{{{0, {{8, 1024}, {32, 1}, {16, 32}}}}}));
  EXPECT_EQ(MUST(w_vc.slice()), (Slice{{{512, {{8, 1024}, {512, 1}}}}}));
}

// A column slice of a long tensor is one strided region, not two hundred thousand pieces.
TEST(Tensor, case_106_column_slice_is_one_region) {
  const Tensor tensor = fake(DType::kBF16, {200000, 8});
  EXPECT_EQ(MUST(MUST(tensor.narrow(1, 0, 4)).slice()), (Slice{{{0, {{200000, 8}, {4, 1}}}}}));
  EXPECT_EQ(MUST(MUST(tensor.narrow(1, 4, 0)).slice()), Slice{}) << "pieces without elements are dropped";
}

// Goal: a real tensor gives the elements its slice names, also over memory with strides.
TEST(Tensor, RealTensorsCopyTheirElements) {
  std::vector<std::uint16_t> memory(4 * 6);
  std::iota(memory.begin(), memory.end(), std::uint16_t{100});
  const auto* const data = reinterpret_cast<const std::byte*>(memory.data());
  const Tensor real = Tensor::real("w", DType::kBF16, {4, 6}, data).value();
  std::vector<std::uint16_t> out(8);
  const auto copy = [&](const Tensor& tensor) {
    return tensor.copy_out(reinterpret_cast<std::byte*>(out.data()), out.size() * 2);
  };
  ASSERT_TRUE(copy(MUST(MUST(real.narrow(1, 2, 2)).t())).ok());
  EXPECT_EQ(out, (std::vector<std::uint16_t>{102, 108, 114, 120, 103, 109, 115, 121}));
  // The same logical tensor, lying in memory by columns.
  const Tensor strided = Tensor::real_strided("w", DType::kBF16, {6, 4}, {1, 6}, data).value();
  EXPECT_TRUE(strided.is_contiguous()) << "its logical elements are row-major";
  ASSERT_TRUE(copy(MUST(strided.narrow(0, 2, 2))).ok());
  EXPECT_EQ(out, (std::vector<std::uint16_t>{102, 108, 114, 120, 103, 109, 115, 121}));
  EXPECT_THAT(real.copy_out(reinterpret_cast<std::byte*>(out.data()), 4).message(),
              HasSubstr("takes 48 bytes, 4 given"));
  EXPECT_THAT(fake(DType::kBF16, {8}).copy_out(reinterpret_cast<std::byte*>(out.data()), 16).message(),
              HasSubstr("fake"));
}

}  // namespace
}  // namespace shardpull
