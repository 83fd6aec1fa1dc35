// Op chains as JSON, for the comparison with PyTorch: a chain is [[method, [argument, ...]], ...] where an argument is an
// integer, a list of integers, {"dtype": "BF16"}, or {"index": [item, ...]} with items of integers, null (None), "..." and
// {"slice": [start, stop, step]} (absent parts null).
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "shardpull/tensor.h"

namespace shardpull::testing {

inline IndexItem index_item_from_json(const nlohmann::json& item) {
  if (item.is_null()) return IndexNone{};
  if (item.is_string()) return IndexEllipsis{};
  if (item.is_number_integer()) return item.get<std::int64_t>();
  const auto part = [&](std::size_t i) {
    const auto& value = item.at("slice").at(i);
    return value.is_null() ? std::nullopt : std::optional(value.get<std::int64_t>());
  };
  return IndexSlice{part(0), part(1), part(2)};
}

inline OpArg op_arg_from_json(const nlohmann::json& argument) {
  if (argument.is_number_integer()) return argument.get<std::int64_t>();
  if (argument.is_array()) return argument.get<std::vector<std::int64_t>>();
  if (argument.contains("dtype")) return dtype_from_name(argument.at("dtype").get<std::string>()).value();
  std::vector<IndexItem> items;
  for (const auto& item : argument.at("index")) items.push_back(index_item_from_json(item));
  return items;
}

inline OpChain chain_from_json(const nlohmann::json& chain) {
  OpChain result;
  for (const auto& entry : chain) {
    Op op{entry.at(0).get<std::string>(), {}};
    for (const auto& argument : entry.at(1)) op.args.push_back(op_arg_from_json(argument));
    result.push_back(std::move(op));
  }
  return result;
}

// Positions of a slice's elements in enumeration order.
inline std::vector<std::int64_t> enumerate(const Slice& slice) {
  std::vector<std::int64_t> result;
  for (const Region& region : slice.regions) {
    std::vector<std::int64_t> index(region.dims.size(), 0);
    for (std::int64_t count = region.numel(); count > 0; --count) {
      std::int64_t at = region.offset;
      for (std::size_t d = 0; d < index.size(); ++d) at += index[d] * region.dims[d].stride;
      result.push_back(at);
      for (std::size_t d = index.size(); d-- > 0;) {
        if (++index[d] < region.dims[d].size) break;
        index[d] = 0;
      }
    }
  }
  return result;
}

}  // namespace shardpull::testing
