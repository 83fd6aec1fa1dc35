// Bit-exact conversions between F32 and the 16-bit and 8-bit floating-point formats.
#pragma once

#include <bit>
#include <cstdint>

namespace shardpull {

// BF16: the upper half of an F32.
constexpr float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

constexpr std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? std::uint16_t{0x7FC0} : static_cast<std::uint16_t>(rounded);
}

// The IEEE-like formats with `kExponentBits` and `kMantissaBits` that have infinities: F16 (5, 10) and F8_E5M2 (5, 2).
template <typename Bits, int kExponentBits, int kMantissaBits>
struct IeeeSmall {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr std::uint32_t kInfinity = ((1u << kExponentBits) - 1u) << kMantissaBits;
  static constexpr std::uint32_t kSign = 1u << (kExponentBits + kMantissaBits);

  static constexpr float to_float(Bits bits) {
    const std::uint32_t sign = (bits & kSign) != 0 ? 0x80000000u : 0u;
    const std::uint32_t magnitude = bits & (kSign - 1u);
    if (magnitude >= kInfinity) {  // NaN keeps its payload and becomes quiet, as the hardware does it
      const std::uint32_t quiet = magnitude > kInfinity ? 0x400000u : 0u;
      return std::bit_cast<float>(sign | 0x7F800000u | quiet | ((magnitude - kInfinity) << kShift));
    }
    if (magnitude < (1u << kMantissaBits)) {  // zero or subnormal: an exact multiple of the smallest one
      const float value = static_cast<float>(magnitude) * std::bit_cast<float>(static_cast<std::uint32_t>(127 + 1 - kBias - kMantissaBits) << 23);
      return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
    }
    return std::bit_cast<float>(sign | ((magnitude << kShift) + (static_cast<std::uint32_t>(127 - kBias) << 23)));
  }

  static constexpr Bits from_float(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 31) != 0 ? kSign : 0u;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<Bits>(sign | kQuietNan);
    constexpr std::uint32_t kMinNormal = static_cast<std::uint32_t>(127 + 1 - kBias) << 23;
    if (magnitude < kMinNormal) {
      // Adding a power of two whose last place is the smallest subnormal lets the hardware round to nearest even.
      constexpr float kRounder = std::bit_cast<float>(static_cast<std::uint32_t>(127 + 1 - kBias + kShift) << 23);
      const float rounded = std::bit_cast<float>(magnitude) + kRounder;
      return static_cast<Bits>(sign | (std::bit_cast<std::uint32_t>(rounded) - std::bit_cast<std::uint32_t>(kRounder)));
    }
    const std::uint32_t even = (magnitude >> kShift) & 1u;
    const std::uint32_t rounded =
        (magnitude - (static_cast<std::uint32_t>(127 - kBias) << 23) + ((1u << (kShift - 1)) - 1u) + even) >> kShift;
    return static_cast<Bits>(sign | (rounded >= kInfinity ? kInfinity : rounded));
  }

  static constexpr std::uint32_t kQuietNan = sizeof(Bits) == 1 ? kSign - 1u : kInfinity | (1u << (kMantissaBits - 1));
};

using F16Format = IeeeSmall<std::uint16_t, 5, 10>;
using F8E5M2Format = IeeeSmall<std::uint8_t, 5, 2>;

// F8_E4M3 ("fn"): no infinities; 0x7F and 0xFF are NaN; what lies above the largest value, 448, becomes 448, infinity too.
constexpr float f8e4m3_to_float(std::uint8_t bits) {
  const std::uint32_t sign = (bits & 0x80u) != 0 ? 0x80000000u : 0u;
  const std::uint32_t magnitude = bits & 0x7Fu;
  if (magnitude == 0x7Fu) return std::bit_cast<float>(sign | 0x7FF00000u);
  if (magnitude < 8u) {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

constexpr std::uint8_t float_to_f8e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  constexpr std::uint32_t kMinNormal = 121u << 23;  // 2^-6
  if (magnitude < kMinNormal) {
    constexpr float kRounder = 0x1p14f;  // its last place is 2^-9, the smallest subnormal
    const float rounded = std::bit_cast<float>(magnitude) + kRounder;
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(rounded) - std::bit_cast<std::uint32_t>(kRounder)));
  }
  if (magnitude > 0x7F800000u) return static_cast<std::uint8_t>(sign | 0x7Fu);
  if (magnitude >= (135u << 23) + 0x600000u) return static_cast<std::uint8_t>(sign | 0x7Eu);  // 448 and above
  const std::uint32_t even = (magnitude >> 20) & 1u;
  const std::uint32_t rounded = (magnitude - (120u << 23) + 0x7FFFFu + even) >> 20;
  return static_cast<std::uint8_t>(sign | rounded);
}

// F8_E8M0 ("fnu"): a power of two, 2^(bits - 127); 0xFF is NaN.
constexpr float f8e8m0_to_float(std::uint8_t bits) {
  if (bits == 0xFFu) return std::bit_cast<float>(0x7F800001u);
  if (bits == 0u) return std::bit_cast<float>(0x00400000u);
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 23);
}

// The sign is ignored; a mantissa above one half rounds up, one half rounds up when there is an exponent to be even with.
constexpr std::uint8_t float_to_f8e8m0(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t exponent = (bits >> 23) & 0xFFu;
  if (exponent == 0xFFu) return 0xFFu;
  const bool guard = (bits & 0x400000u) != 0;
  const bool round = (bits & 0x200000u) != 0;
  const bool sticky = (bits & 0x1FFFFFu) != 0;
  const bool lowest = exponent > 0;
  return static_cast<std::uint8_t>(exponent + (guard && (lowest || round || sticky) ? 1u : 0u));
}

}  // namespace shardpull
