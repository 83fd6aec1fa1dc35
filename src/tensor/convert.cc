#include "tensor/convert.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "tensor/convert_simd.h"
#include "tensor/small_floats.h"

namespace shardpull {
namespace {

// How an element type is stored, and the arithmetic type its values are handled in.
template <DType kType>
struct Element;

template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value value(Stored stored) { return stored; }
};
template <>
struct Element<DType::kI8> : Plain<std::int8_t> {};
template <>
struct Element<DType::kU8> : Plain<std::uint8_t> {};
template <>
struct Element<DType::kI16> : Plain<std::int16_t> {};
template <>
struct Element<DType::kU16> : Plain<std::uint16_t> {};
template <>
struct Element<DType::kI32> : Plain<std::int32_t> {};
template <>
struct Element<DType::kU32> : Plain<std::uint32_t> {};
template <>
struct Element<DType::kI64> : Plain<std::int64_t> {};
template <>
struct Element<DType::kU64> : Plain<std::uint64_t> {};
template <>
struct Element<DType::kF32> : Plain<float> {};
template <>
struct Element<DType::kF64> : Plain<double> {};
template <>
struct Element<DType::kBool> {
  using Stored = std::uint8_t;
  using Value = std::uint8_t;
  static Value value(Stored stored) { return stored != 0 ? 1 : 0; }
};

template <typename Bits, float (*kTo)(Bits), Bits (*kFrom)(float)>
struct Small {
  using Stored = Bits;
  using Value = float;
  static Value value(Stored stored) { return kTo(stored); }
  static Stored rounded(float value) { return kFrom(value); }
};
template <>
struct Element<DType::kBF16> : Small<std::uint16_t, bf16_to_float, float_to_bf16> {};
template <>
struct Element<DType::kF16> : Small<std::uint16_t, F16Format::to_float, F16Format::from_float> {};
template <>
struct Element<DType::kF8E5M2> : Small<std::uint8_t, F8E5M2Format::to_float, F8E5M2Format::from_float> {};
template <>
struct Element<DType::kF8E4M3> : Small<std::uint8_t, f8e4m3_to_float, float_to_f8e4m3> {};
template <>
struct Element<DType::kF8E8M0> : Small<std::uint8_t, f8e8m0_to_float, float_to_f8e8m0> {};

struct Complex {
  float real, imaginary;
};
template <>
struct Element<DType::kC64> {
  using Stored = Complex;
  using Value = Complex;
  static Value value(Stored stored) { return stored; }
};

// Truncates. NaN and what no 64-bit integer holds becomes the smallest integer, as the x86 instruction gives
// it.
template <typename Float>
std::int64_t truncated(Float value) {
  constexpr Float kLimit = static_cast<Float>(0x1p63);
  return value >= -kLimit && value < kLimit ? static_cast<std::int64_t>(value)
                                            : std::numeric_limits<std::int64_t>::min();
}

template <typename Float>
std::uint64_t truncated_unsigned(Float value) {
  constexpr Float kHalf = static_cast<Float>(0x1p63);
  if (value >= kHalf && value < 2 * kHalf) return static_cast<std::uint64_t>(value);
  return static_cast<std::uint64_t>(truncated(value));
}

template <DType kFrom, DType kTo>
typename Element<kTo>::Stored convert(typename Element<kFrom>::Stored stored) {
  using To = Element<kTo>;
  using Stored = typename To::Stored;
  const auto value = Element<kFrom>::value(stored);
  using Value = std::remove_const_t<decltype(value)>;
  if constexpr (std::is_same_v<Value, Complex>) {
    if constexpr (kTo == DType::kBool) {
      return value.real != 0 || value.imaginary != 0 ? 1 : 0;
    } else {
      return convert<DType::kF32, kTo>(value.real);
    }
  } else if constexpr (kTo == DType::kC64) {
    return Complex{static_cast<float>(value), 0.0f};
  } else if constexpr (kTo == DType::kBool) {
    return value != 0 ? 1 : 0;
  } else if constexpr (requires { To::rounded(0.0f); }) {
    return To::rounded(static_cast<float>(value));
  } else if constexpr (std::is_floating_point_v<Stored>) {
    return static_cast<Stored>(value);
  } else if constexpr (std::is_floating_point_v<Value>) {
    if constexpr (kTo == DType::kU64) return truncated_unsigned(value);
    return static_cast<Stored>(truncated(value));
  } else {
    return static_cast<Stored>(value);
  }
}

// Pairs that may have a vectorised kernel.
template <DType kFrom, DType kTo>
constexpr bool kHasPrefix = (kFrom == DType::kF32 && (kTo == DType::kBF16 || kTo == DType::kF16)) ||
                            (kTo == DType::kF32 && (kFrom == DType::kBF16 || kFrom == DType::kF16));

template <DType kFrom, DType kTo>
void convert_run(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride,
                 std::int64_t count) {
  using From = typename Element<kFrom>::Stored;
  using To = typename Element<kTo>::Stored;
  const auto step = [](const std::byte* from, std::byte* to) {
    From element;
    std::memcpy(&element, from, sizeof element);
    const To converted = convert<kFrom, kTo>(element);
    std::memcpy(to, &converted, sizeof converted);
  };
  if (src_stride == static_cast<std::int64_t>(sizeof(From)) &&
      dst_stride == static_cast<std::int64_t>(sizeof(To))) {
    std::int64_t i = 0;
    if constexpr (kHasPrefix<kFrom, kTo>) {
      static const ConvertPrefix kPrefix = convert_prefix(kFrom, kTo);
      if (kPrefix != nullptr) i = kPrefix(src, dst, count);
    }
    for (; i < count; ++i) {  // strides known to the compiler
      step(src + i * static_cast<std::int64_t>(sizeof(From)),
           dst + i * static_cast<std::int64_t>(sizeof(To)));
    }
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) step(src + i * src_stride, dst + i * dst_stride);
}

constexpr std::array kConvertible = {
    DType::kBool, DType::kU8,  DType::kI8,  DType::kF8E5M2, DType::kF8E4M3, DType::kF8E8M0,
    DType::kI16,  DType::kU16, DType::kF16, DType::kBF16,   DType::kI32,    DType::kU32,
    DType::kF32,  DType::kF64, DType::kI64, DType::kU64,    DType::kC64,
};
constexpr std::size_t kCount = kConvertible.size();

template <std::size_t kPair>
constexpr ConvertKernel kernel_of_pair() {
  constexpr DType kFrom = kConvertible[kPair / kCount];
  constexpr DType kTo = kConvertible[kPair % kCount];
  if constexpr (kFrom == kTo) {
    return nullptr;
  } else {
    return convert_run<kFrom, kTo>;
  }
}

template <std::size_t... kPairs>
constexpr std::array<ConvertKernel, sizeof...(kPairs)> make_kernels(std::index_sequence<kPairs...>) {
  return {kernel_of_pair<kPairs>()...};
}
constexpr auto kKernels = make_kernels(std::make_index_sequence<kCount * kCount>());

// What a dtype can represent: integers by sign and bits, floats by exponent range and precision.
struct Range {
  enum Kind { kInteger, kFloat, kOther } kind = kOther;
  bool negative = true;
  int precision = 0;     // value bits of an integer, significand bits of a float
  int max_exponent = 0;  // the largest float is below 2^max_exponent
  int min_exponent = 0;  // the smallest float above zero is 2^min_exponent
  bool infinity = true;
};

Range range_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return {Range::kInteger, false, 1};
    case DType::kU8:
      return {Range::kInteger, false, 8};
    case DType::kI8:
      return {Range::kInteger, true, 7};
    case DType::kU16:
      return {Range::kInteger, false, 16};
    case DType::kI16:
      return {Range::kInteger, true, 15};
    case DType::kU32:
      return {Range::kInteger, false, 32};
    case DType::kI32:
      return {Range::kInteger, true, 31};
    case DType::kU64:
      return {Range::kInteger, false, 64};
    case DType::kI64:
      return {Range::kInteger, true, 63};
    case DType::kF8E5M2:
      return {Range::kFloat, true, 3, 16, -16, true};
    case DType::kF8E4M3:
      return {Range::kFloat, true, 4, 9, -9, false};
    case DType::kF8E8M0:
      return {Range::kFloat, false, 1, 128, -127, false};
    case DType::kF16:
      return {Range::kFloat, true, 11, 16, -24, true};
    case DType::kBF16:
      return {Range::kFloat, true, 8, 128, -133, true};
    case DType::kF32:
      return {Range::kFloat, true, 24, 128, -149, true};
    case DType::kF64:
      return {Range::kFloat, true, 53, 1024, -1074, true};
    case DType::kC64:
    case DType::kF4:
      return {};
  }
  return {};
}

}  // namespace

ConvertKernel convert_kernel(DType from, DType to) {
  std::size_t row = kCount, column = kCount;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (kConvertible[i] == from) row = i;
    if (kConvertible[i] == to) column = i;
  }
  return row < kCount && column < kCount ? kKernels[row * kCount + column] : nullptr;
}

bool is_lossless(DType from, DType to) {
  if (from == to) return true;
  if (to == DType::kC64) return is_lossless(from, DType::kF32);
  const Range a = range_of(from), b = range_of(to);
  if (a.kind == Range::kOther || b.kind == Range::kOther) return false;
  if (a.negative && !b.negative) return false;
  if (b.kind == Range::kInteger) return a.kind == Range::kInteger && a.precision <= b.precision;
  // An integer of n value bits needs n bits of significand and an exponent up to n; every zero and one is
  // there.
  if (a.kind == Range::kInteger)
    return to != DType::kF8E8M0 && a.precision <= b.precision && a.precision <= b.max_exponent;
  return a.precision <= b.precision && a.max_exponent <= b.max_exponent && a.min_exponent >= b.min_exponent &&
         (!a.infinity || b.infinity);
}

}  // namespace shardpull
