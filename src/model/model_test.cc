#include "shardpull/model.h"

#include <cstring>

#include <gtest/gtest.h>

#include "model/model_testing.h"

namespace shardpull {
namespace {

using namespace std::string_literals;

struct OneModule {
  TableModel model;
  Module& module = model.module("layer", "Linear");
};

// Views have the geometry that PyTorch's have.
TEST(ParameterView, Geometry) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("weight", DType::kBF16, {8, 6}));
  EXPECT_EQ(p.full_name(), "layer.weight");
  EXPECT_EQ(p.numel(), 48);
  EXPECT_EQ(p.storage_bytes(), 96u);
  const ParameterView rows = must(p.data().narrow(0, 2, 3));
  EXPECT_EQ(rows.offset(), 12);
  EXPECT_EQ(rows.shape(), (std::vector<std::int64_t>{3, 6}));
  EXPECT_EQ(rows.stride(), (std::vector<std::int64_t>{6, 1}));
  const ParameterView transposed = must(rows.transpose(0, 1));
  EXPECT_EQ(transposed.stride(), (std::vector<std::int64_t>{1, 6}));
  EXPECT_FALSE(transposed.view({18}).ok());
  const ParameterView flat = must(rows.view({-1}));
  EXPECT_EQ(flat.shape(), (std::vector<std::int64_t>{18}));
  const ParameterView bytes = must(rows.view(DType::kU8));
  EXPECT_EQ(bytes.dtype(), DType::kU8);
  EXPECT_EQ(bytes.offset(), 24);
  EXPECT_EQ(bytes.shape(), (std::vector<std::int64_t>{3, 12}));
  const ParameterView wide = must(rows.view(DType::kF32));
  EXPECT_EQ(wide.offset(), 6);
  EXPECT_EQ(wide.shape(), (std::vector<std::int64_t>{3, 3}));
  const ParameterView column = must(p.data().index({IndexEllipsis{}, std::int64_t{-1}}));
  EXPECT_EQ(column.offset(), 5);
  EXPECT_EQ(column.stride(), (std::vector<std::int64_t>{6}));
  EXPECT_EQ(must(p.data().select(0, 7)).offset(), 42);
  EXPECT_TRUE(fails_with(p.data().narrow(0, 5, 4), {"narrow", "layer.weight"}));
}

// Shapes: equal once leading 1s of the destination are dropped, and nothing else.
TEST(ParameterView, CopyShapes) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("weight", DType::kF32, {1, 1, 4}));
  ASSERT_OK(m.model.materialise(std::byte{0xCD}));
  const std::vector<float> values{1, 2, 3, 4};
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  EXPECT_OK(p.data().copy_(must(Tensor::real("x", DType::kF32, {4}, data))));
  EXPECT_EQ(std::memcmp(p.memory(), data, 16), 0);
  EXPECT_OK(p.data().copy_(must(Tensor::real("x", DType::kF32, {1, 4}, data))));
  EXPECT_OK(p.data().copy_(must(Tensor::real("x", DType::kF32, {1, 1, 4}, data))));
  EXPECT_TRUE(fails_with(p.data().copy_(must(Tensor::real("x", DType::kF32, {2, 2}, data))),
                         {"[2, 2]", "[1, 1, 4]", "x"}));
  EXPECT_TRUE(
      fails_with(p.data().copy_(must(Tensor::real("x", DType::kF32, {1}, data))), {"[1]", "[1, 1, 4]"}));
  EXPECT_TRUE(fails_with(p.data().copy_(must(Tensor::real("x", DType::kF32, {4, 1}, data))), {"[4, 1]"}));
  EXPECT_TRUE(
      fails_with(p.data().copy_(must(Tensor::real("x", DType::kF32, {1, 1, 1, 4}, data))), {"[1, 1, 1, 4]"}));
}

TEST(ParameterView, OneElement) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("scale", DType::kF32, {1}));
  ASSERT_OK(m.model.materialise());
  const float value = 3;
  EXPECT_OK(
      p.data().copy_(must(Tensor::real("s", DType::kF32, {}, reinterpret_cast<const std::byte*>(&value)))));
  EXPECT_EQ(std::memcmp(p.memory(), &value, 4), 0);
}

// Another dtype is converted, strided destinations are honoured.
TEST(ParameterView, ConvertsIntoStridedWindows) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("weight", DType::kF32, {2, 3}));
  ASSERT_OK(m.model.materialise(std::byte{0xCD}));
  const std::vector<std::uint16_t> ones{0x3F80, 0x4000, 0x4040};  // BF16 1, 2, 3
  const Tensor source =
      must(Tensor::real("x", DType::kBF16, {3}, reinterpret_cast<const std::byte*>(ones.data())));
  const ParameterView window = must(must(p.data().view({3, 2})).select(1, 1));
  EXPECT_OK(window.copy_(source));
  float out[6];
  std::memcpy(out, p.memory(), sizeof out);
  EXPECT_EQ(out[1], 1.0f);
  EXPECT_EQ(out[3], 2.0f);
  EXPECT_EQ(out[5], 3.0f);
  EXPECT_OK(must(must(p.data().view({3, 2})).select(1, 0)).zero_());
  std::memcpy(out, p.memory(), sizeof out);
  EXPECT_EQ(out[0], 0.0f);
  EXPECT_EQ(out[1], 1.0f);
  EXPECT_EQ(out[4], 0.0f);
}

// A write through a view of another dtype moves bytes, not values.
TEST(ParameterView, WritesThroughViewOfDtype) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("packed", DType::kU8, {8}));
  ASSERT_OK(m.model.materialise());
  const std::vector<std::uint16_t> values{0x1234, 0xABCD, 0x7FC1, 0xFFFF};
  EXPECT_OK(must(p.data().view(DType::kBF16))
                .copy_(must(Tensor::real("x", DType::kBF16, {4},
                                         reinterpret_cast<const std::byte*>(values.data())))));
  EXPECT_EQ(std::memcmp(p.memory(), values.data(), 8), 0);
}

// Outside the parameter, or over itself: refused, nothing written.
TEST(ParameterView, RefusesBadRegions) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("weight", DType::kU8, {4, 4}));
  ASSERT_OK(m.model.materialise(std::byte{0xCD}, 64));
  const std::vector<std::byte> data(64);
  const Tensor four = must(Tensor::real("x", DType::kU8, {4}, data.data()));
  EXPECT_TRUE(fails_with(must(p.data().as_strided(13, {4}, {1})).copy_(four), {"outside", "layer.weight"}));
  EXPECT_TRUE(fails_with(must(p.data().as_strided(-1, {4}, {1})).copy_(four), {"outside"}));
  EXPECT_TRUE(fails_with(must(p.data().as_strided(0, {4}, {6})).copy_(four), {"outside"}));
  EXPECT_TRUE(
      fails_with(must(p.data().as_strided(0, {4}, {std::int64_t{1} << 62})).copy_(four), {"outside"}));
  EXPECT_TRUE(fails_with(must(p.data().as_strided(0, {4}, {0})).copy_(four), {"overlaps itself"}));
  EXPECT_TRUE(fails_with(must(p.data().as_strided(0, {2, 2}, {1, 1})).copy_(must(four.view({2, 2}))),
                         {"overlaps itself"}));
  EXPECT_OK(must(p.data().as_strided(0, {2, 2}, {3, 2})).copy_(must(four.view({2, 2}))));  // 0 2 3 5
  EXPECT_FALSE(p.data().as_strided(0, {4}, {1, 1}).ok());
  EXPECT_OK(m.model.check_guards());
}

TEST(ParameterView, RealCopyNeedsMemory) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("weight", DType::kU8, {4}));
  const std::vector<std::byte> data(4);
  const Tensor real = must(Tensor::real("x", DType::kU8, {4}, data.data()));
  EXPECT_TRUE(fails_with(p.data().copy_(real), {"no memory"}));
  EXPECT_TRUE(fails_with(p.data().zero_(), {"no memory"}));
  EXPECT_TRUE(fails_with(p.data().copy_(must(Tensor::fake("x", DType::kU8, {4}))), {"no bake records"}));
  std::vector<std::byte> mine(4, std::byte{1});
  EXPECT_TRUE(fails_with(p.bind(mine.data(), 3), {"3 bytes", "4"}));
  ASSERT_OK(p.bind(mine.data(), 4));
  EXPECT_OK(p.data().copy_(real));
  EXPECT_EQ(mine, data);
}

// Conversions that PyTorch does not have are refused before anything happens.
TEST(ParameterView, RefusesConversionsThatDoNotExist) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("weight", DType::kF32, {4}));
  ASSERT_OK(m.model.materialise());
  const std::vector<std::byte> data(64);
  EXPECT_TRUE(fails_with(p.data().copy_(must(Tensor::real("x", DType::kF4, {4}, data.data()))),
                         {"F4", "F32", "no conversion"}));
}

TEST(Module, Refusals) {
  OneModule m;
  Parameter* const weight = must(m.module.add_parameter("weight", DType::kF32, {4, 2}));
  EXPECT_TRUE(fails_with(m.module.add_parameter("weight", DType::kF32, {4}), {"layer.weight", "already"}));
  EXPECT_TRUE(fails_with(m.module.add_parameter("bad", DType::kF32, {-1}), {"layer.bad"}));
  EXPECT_TRUE(
      fails_with(m.module.add_parameter("big", DType::kF32, {std::int64_t{1} << 40, std::int64_t{1} << 40}),
                 {"layer.big"}));
  EXPECT_TRUE(
      fails_with(m.module.add_strided_parameter("over", DType::kF32, {4, 4}, {1, 1}), {"overlaps itself"}));
  EXPECT_TRUE(fails_with(m.model.add_module("layer", "Linear"), {"layer", "already"}));
  EXPECT_TRUE(fails_with(m.module.declare_padding_rows("weight", 2, 5), {"[2, 5)", "[4, 2]"}));
  EXPECT_TRUE(fails_with(m.module.declare_padding_rows("nothing", 0, 1), {"nothing"}));
  EXPECT_TRUE(fails_with(m.module.add_alias("other", *weight, {3}), {}));
  EXPECT_TRUE(
      fails_with(m.module.add_buffer("ids", DType::kI64, {2}, std::vector<std::byte>(3)), {"3", "16"}));
  EXPECT_EQ(m.module.find("ids"), nullptr);
  ASSERT_OK(m.model.materialise());
  EXPECT_TRUE(fails_with(m.module.add_parameter("late", DType::kF32, {4}), {"materialised"}));
  EXPECT_TRUE(fails_with(m.model.add_module("late", "Linear"), {"materialised"}));
}

TEST(Model, FindsModulesAndAliases) {
  OneModule m;
  EXPECT_EQ(m.model.find_module("layer"), &m.module);
  EXPECT_EQ(m.model.find_module("head"), nullptr);
  ASSERT_OK(m.model.add_module_alias("head", m.module));
  EXPECT_EQ(m.model.find_module("head"), &m.module);
  EXPECT_FALSE(m.model.add_module_alias("layer", m.module).ok());
  EXPECT_EQ(m.model.modules().size(), 1u);
}

// Guards are seen when written; buffers begin with their own bytes; counts are of elements.
TEST(Model, MemoryAndGuards) {
  OneModule m;
  Parameter& p = *must(m.module.add_parameter("weight", DType::kBF16, {3}));
  Parameter& ids = *must(m.module.add_buffer("ids", DType::kU8, {2}, {std::byte{7}, std::byte{8}}));
  Parameter& empty = *must(m.module.add_parameter("empty", DType::kF32, {0, 4}));
  EXPECT_EQ(p.memory(), nullptr);
  EXPECT_OK(m.model.check_guards());
  ASSERT_OK(m.model.materialise(std::byte{0xCD}, 64));
  EXPECT_EQ(p.memory()[0], std::byte{0xCD});
  EXPECT_EQ(ids.memory()[1], std::byte{8});
  EXPECT_NE(empty.memory(), nullptr);
  EXPECT_EQ(m.model.parameter_count(), 5u);
  EXPECT_EQ(m.model.parameter_bytes(), 8u);
  std::byte* const before = p.memory();
  ASSERT_OK(m.model.materialise(std::byte{0}, 0));
  EXPECT_EQ(p.memory(), before);
  EXPECT_OK(m.model.check_guards());
  p.memory()[6] = std::byte{0};
  EXPECT_TRUE(fails_with(m.model.check_guards(), {"layer.weight", "past its end"}));
  p.memory()[6] = std::byte{0xCD};
  ids.memory()[-64] = std::byte{0};
  EXPECT_TRUE(fails_with(m.model.check_guards(), {"layer.ids", "64 bytes before"}));
}

// An alias is another shape of the same bytes.
TEST(Model, AliasesShareStorage) {
  OneModule m;
  Parameter& weight = *must(m.module.add_parameter("weight", DType::kU8, {4, 1, 2}));
  Module& parent = m.model.module("parent");
  Parameter& alias = *must(parent.add_alias("weights", weight, {4, 2}));
  EXPECT_TRUE(alias.is_alias());
  EXPECT_EQ(&alias.storage(), &weight);
  ASSERT_OK(m.model.materialise());
  EXPECT_EQ(alias.memory(), weight.memory());
  EXPECT_EQ(parent.find("weights"), &alias);
  EXPECT_TRUE(parent.parameters().empty());
  EXPECT_EQ(m.model.parameter_count(), 8u);
  const std::vector<std::byte> data(8, std::byte{5});
  EXPECT_OK(alias.load(must(Tensor::real("x", DType::kU8, {4, 2}, data.data()))));
  EXPECT_EQ(std::memcmp(weight.memory(), data.data(), 8), 0);
}

// A strided parameter: its elements are written, its gaps are not.
TEST(Model, StridedParameter) {
  OneModule m;
  Parameter& p = *must(m.module.add_strided_parameter("weight", DType::kU8, {4, 3}, {1, 8}));
  EXPECT_EQ(p.storage_bytes(), 20u);
  ASSERT_OK(m.model.materialise(std::byte{0xCD}, 64));
  std::vector<std::byte> data;
  for (int i = 0; i < 12; ++i) data.push_back(static_cast<std::byte>(i));
  ASSERT_OK(p.load(must(Tensor::real("x", DType::kU8, {4, 3}, data.data()))));
  for (int c = 0; c < 3; ++c) {
    for (int r = 0; r < 4; ++r) EXPECT_EQ(p.memory()[r + 8 * c], static_cast<std::byte>(3 * r + c));
  }
  EXPECT_EQ(p.memory()[4], std::byte{0xCD});
  EXPECT_TRUE(fails_with(must(p.data().as_strided(2, {4}, {1})).zero_(), {"outside"}));  // 4 and 5 are gaps
  EXPECT_OK(m.model.check_guards());
}

}  // namespace
}  // namespace shardpull
