// How this room writes shapes, conversions and lists in messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/dtype.h"

namespace shardpull {

// "[512, 64]"
inline std::string describe(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (d > 0) out += ", ";
    out += std::to_string(shape[d]);
  }
  return out + "]";
}

// "lm_head.weight BF16 -> lm_head.weight F32", the line of Recording::conversions.
inline std::string conversion_text(const std::string& name, DType wire, const std::string& parameter,
                                   DType dtype) {
  return name + " " + std::string(dtype_name(wire)) + " -> " + parameter + " " +
         std::string(dtype_name(dtype));
}

inline constexpr std::size_t kMaxListed = 8;

// The first kMaxListed items and how many more there are.
inline std::string describe_list(const std::vector<std::string>& items, std::string_view separator = ", ") {
  std::string out;
  for (std::size_t i = 0; i < items.size() && i < kMaxListed; ++i) {
    if (i > 0) out += separator;
    out += items[i];
  }
  if (items.size() > kMaxListed) {
    out += separator;
    out += "and " + std::to_string(items.size() - kMaxListed) + " more";
  }
  return out;
}

}  // namespace shardpull
