#include "shardpull/dtype.h"

#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shardpull/slice.h"
#include "tensor/shape.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;

// Goal: every dtype of the safetensors format, by its exact name, with its width.
TEST(DType, NamesAndWidths) {
  const std::pair<const char*, int> expected[] = {
      {"BOOL", 8}, {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
      {"I16", 16}, {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},    {"U32", 32},
      {"F32", 32}, {"F64", 64}, {"I64", 64}, {"U64", 64},    {"C64", 64},    {"F4", 4},
  };
  std::set<DType> seen;
  for (const auto& [name, bits] : expected) {
    const auto dtype = dtype_from_name(name);
    ASSERT_TRUE(dtype.ok()) << name;
    EXPECT_EQ(dtype_name(*dtype), name);
    EXPECT_EQ(dtype_bits(*dtype), bits) << name;
    EXPECT_TRUE(dtype_valid(static_cast<std::uint8_t>(*dtype)));
    seen.insert(*dtype);
  }
  EXPECT_EQ(seen.size(), std::size(expected));
  int valid = 0;
  for (int number = 0; number < 256; ++number) valid += dtype_valid(static_cast<std::uint8_t>(number));
  EXPECT_EQ(valid, static_cast<int>(std::size(expected)));
}

TEST(DType, UnknownNamesAreRefusedByName) {
  for (const char* name : {"", "bf16", "BF16 ", "F8", "F8_E4M3FN", "F128", "I4"}) {
    const auto dtype = dtype_from_name(name);
    ASSERT_FALSE(dtype.ok()) << name;
    EXPECT_THAT(dtype.status().message(), HasSubstr("\"" + std::string(name) + "\""));
    EXPECT_THAT(dtype.status().message(), HasSubstr("F8_E4M3"));
  }
}

TEST(DType, TorchNames) {
  EXPECT_EQ(dtype_from_torch_name("bfloat16").value(), DType::kBF16);
  EXPECT_EQ(dtype_from_torch_name("torch.float8_e4m3fn").value(), DType::kF8E4M3);
  EXPECT_EQ(dtype_from_torch_name("half").value(), DType::kF16);
  EXPECT_EQ(dtype_from_torch_name("torch.long").value(), DType::kI64);
  EXPECT_FALSE(dtype_from_torch_name("BF16").ok());
  EXPECT_FALSE(dtype_from_torch_name("torch.").ok());
}

TEST(DType, BytesOf) {
  EXPECT_EQ(bytes_of(DType::kBF16, 5).value(), 10u);
  EXPECT_EQ(bytes_of(DType::kF4, 8).value(), 4u);
  EXPECT_EQ(bytes_of(DType::kF64, 0).value(), 0u);
  EXPECT_FALSE(bytes_of(DType::kF4, 7).ok());
  EXPECT_FALSE(bytes_of(DType::kU8, -1).ok());
  EXPECT_EQ(bytes_of(DType::kF4, std::int64_t{1} << 62).value(), std::uint64_t{1} << 61);
  EXPECT_FALSE(bytes_of(DType::kF64, (std::int64_t{1} << 62)).ok());
}

TEST(Shape, Limits) {
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(checked_numel(DType::kF32, Sizes{}).value(), 1);
  EXPECT_EQ(checked_numel(DType::kF32, Sizes{3, 0, 5}).value(), 0);
  EXPECT_EQ(checked_bytes(DType::kF4, Sizes{2, 8}).value(), 8u);
  EXPECT_FALSE(checked_numel(DType::kF32, Sizes{-1}).ok());
  EXPECT_FALSE(checked_numel(DType::kF32, Sizes(9, 1)).ok());
  EXPECT_TRUE(checked_numel(DType::kF32, Sizes(8, 1)).ok());
  EXPECT_FALSE(checked_numel(DType::kF32, Sizes{std::int64_t{1} << 32, std::int64_t{1} << 32}).ok());
  EXPECT_FALSE(checked_numel(DType::kF32, Sizes{0, std::int64_t{1} << 32, std::int64_t{1} << 32}).ok())
      << "strides would not fit";
  EXPECT_THAT(checked_numel(DType::kF32, Sizes{std::int64_t{1} << 62}).status().message(),
              HasSubstr("larger than 2^60 bytes"));
}

}  // namespace
}  // namespace shardpull
