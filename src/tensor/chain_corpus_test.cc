// The frozen corpus: op chains with what PyTorch makes of them (tests/torch/chains.py writes it), checked
// without PyTorch.
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "shardpull/tensor.h"
#include "tensor/chain_json_testing.h"

namespace shardpull {
namespace {

using nlohmann::json;
using Sizes = std::vector<std::int64_t>;

// The root byte of every byte of a slice's elements.
Sizes byte_positions(const Slice& slice, DType dtype) {
  const std::int64_t element = dtype_bits(dtype) / 8;
  Sizes result;
  for (const std::int64_t position : testing::enumerate(slice)) {
    for (std::int64_t b = 0; b < element; ++b) result.push_back(position * element + b);
  }
  return result;
}

// Goal: acceptance, dtype, shape, strides, offset and the order of every byte equal what torch gave when the
// corpus was made.
TEST(ChainCorpus, EveryChainGivesWhatTorchGave) {
  std::ifstream file(std::string(SHARDPULL_SOURCE_DIR) + "/tests/torch/corpus.jsonl");
  ASSERT_TRUE(file.is_open());
  int accepted = 0, refused = 0, unsliceable = 0;
  for (std::string line; std::getline(file, line);) {
    SCOPED_TRACE(line.substr(0, 400));
    const json entry = json::parse(line);
    const json& torch = entry.at("torch");
    const auto root = Tensor::fake("w", dtype_from_name(entry.at("dtype").get<std::string>()).value(),
                                   entry.at("shape").get<Sizes>());
    ASSERT_TRUE(root.ok());
    const auto tensor = Tensor::apply(*root, testing::chain_from_json(entry.at("chain")));
    ASSERT_EQ(tensor.ok(), torch.at("ok").get<bool>()) << tensor.status().to_string();
    if (!tensor.ok()) {
      EXPECT_EQ(tensor.status().info().tensor, "w");
      EXPECT_THAT(tensor.status().message(), ::testing::HasSubstr(" refused on w"));
      ++refused;
      continue;
    }
    ++accepted;
    EXPECT_EQ(dtype_name(tensor->dtype()), torch.at("dtype").get<std::string>());
    EXPECT_EQ(tensor->shape(), torch.at("shape").get<Sizes>());
    EXPECT_EQ(tensor->stride(), torch.at("stride").get<Sizes>());
    EXPECT_EQ(tensor->offset(), torch.at("offset").get<std::int64_t>());
    EXPECT_EQ(tensor->is_contiguous(), torch.at("contiguous").get<bool>());
    const auto slice = tensor->slice();
    if (!slice.ok()) {  // a dtype view over a copy puts elements together from several places
      EXPECT_THAT(slice.status().message(), ::testing::HasSubstr("slice of w"));
      ++unsliceable;
      continue;
    }
    EXPECT_EQ(byte_positions(*slice, tensor->dtype()), torch.at("positions").get<Sizes>())
        << to_string(*slice);
  }
  EXPECT_GT(accepted, 400);
  EXPECT_GT(refused, 100);
  EXPECT_LT(unsliceable, 20);
}

}  // namespace
}  // namespace shardpull
