// Integer arithmetic that notices overflow. Sizes and offsets come from files, peers and users: every product and sum of
// them goes through here before it is believed.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

namespace shardpull {

// An integer type of at least 32 bits; bool and characters are not numbers here.
template <typename T>
concept CheckedInteger = std::integral<T> && !std::same_as<T, bool> && sizeof(T) >= 4;

// a + b, or nothing when the sum does not fit T.
template <CheckedInteger T>
constexpr std::optional<T> checked_add(T a, std::type_identity_t<T> b) {
  T out = 0;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// a - b, or nothing when the difference does not fit T.
template <CheckedInteger T>
constexpr std::optional<T> checked_sub(T a, std::type_identity_t<T> b) {
  T out = 0;
  if (__builtin_sub_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// a * b, or nothing when the product does not fit T.
template <CheckedInteger T>
constexpr std::optional<T> checked_mul(T a, std::type_identity_t<T> b) {
  T out = 0;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// `value` as To, or nothing when To cannot hold it.
template <std::integral To, std::integral From>
constexpr std::optional<To> checked_cast(From value) {
  const To out = static_cast<To>(value);
  if (static_cast<From>(out) != value || (out < To{0}) != (value < From{0})) return std::nullopt;
  return out;
}

// ceil(a / b) for a >= 0, b > 0; never overflows.
template <std::integral T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

// `value` up to the next multiple of `alignment` (> 0), or nothing when that does not fit T. value >= 0.
template <CheckedInteger T>
constexpr std::optional<T> checked_align_up(T value, std::type_identity_t<T> alignment) {
  const T rest = value % alignment;
  return rest == 0 ? std::optional<T>(value) : checked_add<T>(value, alignment - rest);
}

}  // namespace shardpull
