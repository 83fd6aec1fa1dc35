// Conversions are compared with PyTorch exhaustively by tests/torch/test_conversions.py; this file pins the
// corners.
#include "tensor/convert.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tensor/small_floats.h"

namespace shardpull {
namespace {

template <typename To, typename From>
To converted(DType from, DType to, From value) {
  To result{};
  convert_kernel(from, to)(reinterpret_cast<const std::byte*>(&value), sizeof value,
                           reinterpret_cast<std::byte*>(&result), sizeof result, 1);
  return result;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Convert, RoundsToNearestEven) {
  EXPECT_EQ(float_to_bf16(1.0f), 0x3F80);
  EXPECT_EQ(float_to_bf16(1.00390625f), 0x3F80) << "halfway, to even";
  EXPECT_EQ(float_to_bf16(1.01171875f), 0x3F82) << "halfway, to even";
  EXPECT_EQ(float_to_bf16(std::nextafterf(1.00390625f, 2.0f)), 0x3F81);
  EXPECT_EQ(float_to_bf16(3.4e38f), 0x7F80) << "rounds to infinity";
  EXPECT_EQ(float_to_bf16(kNan), 0x7FC0);
  EXPECT_EQ(F16Format::from_float(65504.0f), 0x7BFF);
  EXPECT_EQ(F16Format::from_float(65520.0f), 0x7C00);
  EXPECT_EQ(F16Format::from_float(0x1p-24f), 0x0001);
  EXPECT_EQ(F16Format::from_float(0x1p-25f), 0x0000);
  EXPECT_EQ(F16Format::from_float(-0.0f), 0x8000);
  EXPECT_EQ(F8E5M2Format::from_float(1e9f), 0x7C);
  EXPECT_EQ(float_to_f8e4m3(448.0f), 0x7E);
  EXPECT_EQ(float_to_f8e4m3(1e9f), 0x7E) << "saturates";
  EXPECT_EQ(float_to_f8e4m3(-kInfinity), 0xFE);
  EXPECT_EQ(float_to_f8e4m3(kNan) & 0x7F, 0x7F);
  EXPECT_EQ(float_to_f8e4m3(0x1p-10f), 0x00);
  EXPECT_EQ(float_to_f8e8m0(1.0f), 127);
  EXPECT_EQ(f8e8m0_to_float(0), 0x1p-127f);
}

// Goal: the narrow formats keep all of their own values on the way through F32.
TEST(Convert, NarrowFormatsRoundTrip) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (!std::isnan(F16Format::to_float(half))) {
      ASSERT_EQ(F16Format::from_float(F16Format::to_float(half)), half);
    }
    if (!std::isnan(bf16_to_float(half))) {
      ASSERT_EQ(float_to_bf16(bf16_to_float(half)), half);
    }
  }
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    const auto byte = static_cast<std::uint8_t>(bits);
    if (!std::isnan(f8e4m3_to_float(byte))) {
      ASSERT_EQ(float_to_f8e4m3(f8e4m3_to_float(byte)), byte);
    }
    if (!std::isnan(F8E5M2Format::to_float(byte))) {
      ASSERT_EQ(F8E5M2Format::from_float(F8E5M2Format::to_float(byte)), byte);
    }
    ASSERT_EQ(float_to_f8e8m0(f8e8m0_to_float(byte)), byte);
  }
}

// Goal: a run's vectorised part and its rest agree bit for bit, NaN payloads included: where a run is cut
// must not show.
TEST(Convert, VectorisedPrefixesEqualThePortableKernel) {
  const std::pair<DType, DType> pairs[] = {{DType::kF32, DType::kBF16},
                                           {DType::kBF16, DType::kF32},
                                           {DType::kF16, DType::kF32},
                                           {DType::kF32, DType::kF16}};
  for (const auto& [from, to] : pairs) {
    const auto from_bytes = static_cast<std::int64_t>(dtype_bits(from) / 8),
               to_bytes = static_cast<std::int64_t>(dtype_bits(to) / 8);
    const std::int64_t count = 1 << 16;
    std::vector<std::byte> source(static_cast<std::size_t>(count * from_bytes) + 1);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto bits = static_cast<std::uint32_t>(i);
      const std::uint32_t spread = (bits << 16) | ((bits * 40503u) & 0xFFFFu);
      std::memcpy(&source[static_cast<std::size_t>(1 + i * from_bytes)], from_bytes == 4 ? &spread : &bits,
                  static_cast<std::size_t>(from_bytes));
    }
    std::vector<std::byte> together(static_cast<std::size_t>(count * to_bytes)), alone(together.size());
    const ConvertKernel kernel = convert_kernel(from, to);
    kernel(source.data() + 1, from_bytes, together.data(), to_bytes, count);
    for (std::int64_t i = 0; i < count; ++i)
      kernel(source.data() + 1 + i * from_bytes, from_bytes, alone.data() + i * to_bytes, to_bytes, 1);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i * to_bytes);
      ASSERT_EQ(std::memcmp(&together[at], &alone[at], static_cast<std::size_t>(to_bytes)), 0)
          << dtype_name(from) << " " << i;
    }
  }
}

// Goal: no value, NaN and huge ones included, makes the conversion undefined.
TEST(Convert, IntegersTruncateAndNeverTrap) {
  EXPECT_EQ((converted<std::int32_t>(DType::kF32, DType::kI32, -2.9f)), -2);
  EXPECT_EQ((converted<std::uint8_t>(DType::kF32, DType::kU8, 300.7f)), 44) << "wraps like an integer";
  EXPECT_EQ((converted<std::uint64_t>(DType::kF64, DType::kU64, 1e19)), 10000000000000000000u);
  for (const float value : {kNan, kInfinity, -kInfinity, 1e30f}) {
    EXPECT_EQ((converted<std::int64_t>(DType::kF32, DType::kI64, value)),
              std::numeric_limits<std::int64_t>::min());
    EXPECT_EQ((converted<std::uint8_t>(DType::kF32, DType::kU8, value)), 0);
  }
  EXPECT_EQ((converted<std::uint8_t>(DType::kF32, DType::kBool, kNan)), 1);
  EXPECT_EQ((converted<std::uint8_t>(DType::kF32, DType::kBool, -0.0f)), 0);
  EXPECT_EQ((converted<float>(DType::kBool, DType::kF32, std::uint8_t{1})), 1.0f);
  EXPECT_EQ((converted<std::int8_t>(DType::kI64, DType::kI8, std::int64_t{511})), -1);
  EXPECT_TRUE(std::isinf(converted<float>(DType::kF64, DType::kF32, 1e300)));
}

TEST(Convert, EveryPairButF4HasAKernel) {
  for (std::uint8_t a = 1; dtype_valid(a); ++a) {
    for (std::uint8_t b = 1; dtype_valid(b); ++b) {
      const auto from = static_cast<DType>(a), to = static_cast<DType>(b);
      const bool expected = from != to && from != DType::kF4 && to != DType::kF4;
      EXPECT_EQ(convert_kernel(from, to) != nullptr, expected) << dtype_name(from) << " " << dtype_name(to);
    }
  }
}

// Goal: exactly these conversions lose nothing.
TEST(Convert, LosslessPairs) {
  using D = DType;
  std::set<std::pair<D, D>> expected;
  const auto add = [&](D from, std::initializer_list<D> targets) {
    for (const D to : targets) expected.insert({from, to});
  };
  add(D::kBool, {D::kU8, D::kI8, D::kI16, D::kU16, D::kI32, D::kU32, D::kI64, D::kU64, D::kF8E5M2, D::kF8E4M3,
                 D::kF16, D::kBF16, D::kF32, D::kF64, D::kC64});
  add(D::kU8,
      {D::kI16, D::kU16, D::kI32, D::kU32, D::kI64, D::kU64, D::kF16, D::kBF16, D::kF32, D::kF64, D::kC64});
  add(D::kI8, {D::kI16, D::kI32, D::kI64, D::kF16, D::kBF16, D::kF32, D::kF64, D::kC64});
  add(D::kI16, {D::kI32, D::kI64, D::kF32, D::kF64, D::kC64});
  add(D::kU16, {D::kI32, D::kU32, D::kI64, D::kU64, D::kF32, D::kF64, D::kC64});
  add(D::kI32, {D::kI64, D::kF64});
  add(D::kU32, {D::kI64, D::kU64, D::kF64});
  add(D::kF8E5M2, {D::kF16, D::kBF16, D::kF32, D::kF64, D::kC64});
  add(D::kF8E4M3, {D::kF16, D::kBF16, D::kF32, D::kF64, D::kC64});
  add(D::kF8E8M0, {D::kBF16, D::kF32, D::kF64, D::kC64});
  add(D::kF16, {D::kF32, D::kF64, D::kC64});
  add(D::kBF16, {D::kF32, D::kF64, D::kC64});
  add(D::kF32, {D::kF64, D::kC64});
  for (std::uint8_t a = 1; dtype_valid(a); ++a) {
    for (std::uint8_t b = 1; dtype_valid(b); ++b) {
      const auto from = static_cast<D>(a), to = static_cast<D>(b);
      EXPECT_EQ(is_lossless(from, to), from == to || expected.contains({from, to}))
          << dtype_name(from) << " -> " << dtype_name(to);
    }
  }
}

}  // namespace
}  // namespace shardpull
