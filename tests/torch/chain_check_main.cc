// Applies op chains read as JSON lines from standard input and prints what became of each, one JSON line per
// chain, for comparison with PyTorch.
//
// In:  {"dtype": "BF16", "shape": [4, 6], "chain": [...], "layout": [1, 0], "gap": 1}   (chain as in
// chain_json_testing.h) Out: {"ok": true, "dtype": ..., "shape": ..., "stride": ..., "offset": ..., "slice":
// [[offset, [[size, stride], ...]], ...],
//       "bytes": "hex", "strided_bytes": "hex"}
//      or {"ok": false, "error": ..., "reason": ...}; where only the slice is refused, "slice_error" and
//      "slice_reason".
//
// "bytes" are the elements of the chain over real memory whose byte i is byte_at(i); "strided_bytes" the same
// over a tensor that lies in memory with its dims in the order `layout` (outermost first) and `gap` unused
// elements after each row.
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "shardpull/tensor.h"
#include "tensor/chain_json_testing.h"

namespace {

using nlohmann::json;
using shardpull::DType;
using shardpull::OpChain;
using shardpull::Result;
using shardpull::Slice;
using shardpull::Tensor;

std::byte byte_at(std::uint64_t position) {
  return static_cast<std::byte>((position * 167 + (position >> 8) * 59 + 13) & 0xFF);
}

std::string hex(const std::vector<std::byte>& bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

json copied(const Result<Tensor>& root, const OpChain& chain) {
  if (!root.ok()) return root.status().to_string();
  const auto tensor = Tensor::apply(*root, chain);
  if (!tensor.ok()) return tensor.status().to_string();
  std::vector<std::byte> out(shardpull::bytes_of(tensor->dtype(), tensor->numel()).value());
  const auto status = tensor->copy_out(out.data(), out.size());
  return status.ok() ? json(hex(out)) : json(status.to_string());
}

json check(const json& request) {
  const DType dtype = shardpull::dtype_from_name(request.at("dtype").get<std::string>()).value();
  const auto shape = request.at("shape").get<std::vector<std::int64_t>>();
  const OpChain chain = shardpull::testing::chain_from_json(request.at("chain"));
  const auto root = Tensor::fake("w", dtype, shape);
  if (!root.ok())
    return {{"ok", false},
            {"error", root.status().to_string()},
            {"reason", to_string(root.status().info().reason)}};
  const auto tensor = Tensor::apply(*root, chain);
  if (!tensor.ok()) {
    return {{"ok", false},
            {"error", tensor.status().to_string()},
            {"reason", to_string(tensor.status().info().reason)}};
  }
  json answer = {{"ok", true},
                 {"dtype", dtype_name(tensor->dtype())},
                 {"shape", tensor->shape()},
                 {"stride", tensor->stride()},
                 {"offset", tensor->offset()},
                 {"contiguous", tensor->is_contiguous()}};
  // A recorded chain replays to the same tensor.
  const auto replayed = Tensor::apply(*root, tensor->chain());
  answer["replays"] = replayed.ok() && replayed->shape() == tensor->shape() &&
                      replayed->stride() == tensor->stride() && replayed->offset() == tensor->offset() &&
                      replayed->chain() == tensor->chain();
  const auto slice = tensor->slice();
  if (!slice.ok()) {
    answer["slice_error"] = slice.status().to_string();
    answer["slice_reason"] = to_string(slice.status().info().reason);
    return answer;
  }
  answer["slice"] = json::array();
  for (const auto& region : slice->regions) {
    json dims = json::array();
    for (const auto& dim : region.dims) dims.push_back({dim.size, dim.stride});
    answer["slice"].push_back({region.offset, dims});
  }
  if (dtype_bits(dtype) < 8) return answer;

  const auto numel = root->numel();
  const auto element = static_cast<std::uint64_t>(dtype_bits(dtype)) / 8;
  std::vector<std::byte> memory(static_cast<std::uint64_t>(numel) * element + 1);
  // One byte off any alignment.
  for (std::uint64_t i = 0; i + 1 < memory.size(); ++i) memory[i + 1] = byte_at(i);
  answer["bytes"] = copied(Tensor::real("w", dtype, shape, memory.data() + 1), chain);
  if (!request.contains("layout") || numel == 0) return answer;

  const auto order = request.at("layout").get<std::vector<std::size_t>>();
  std::vector<std::int64_t> stride(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    stride[order[i]] = step;
    step *= shape[order[i]] + (i + 1 == order.size() ? request.at("gap").get<std::int64_t>() : 0);
  }
  std::vector<std::byte> strided(static_cast<std::uint64_t>(step) * element, std::byte{0xEE});
  std::vector<std::int64_t> index(shape.size(), 0);
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(numel); ++i) {
    std::uint64_t at = 0;
    for (std::size_t d = 0; d < index.size(); ++d) at += static_cast<std::uint64_t>(index[d] * stride[d]);
    for (std::uint64_t b = 0; b < element; ++b) strided[at * element + b] = byte_at(i * element + b);
    for (std::size_t d = index.size(); d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
  answer["strided_bytes"] = copied(Tensor::real_strided("w", dtype, shape, stride, strided.data()), chain);
  return answer;
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  for (std::string line; std::getline(std::cin, line);) {
    json answer = check(json::parse(line));
    std::cout << answer.dump() << '\n';
  }
  return 0;
}
