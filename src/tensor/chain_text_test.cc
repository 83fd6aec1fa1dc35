#include "tensor/chain_text.h"

#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tensor/chain_json_testing.h"

namespace shardpull {
namespace {

// Goal: a recorded chain survives being written and read. Of every chain of the corpus that torch accepts,
// the recorded form is read back as text that gives the same tensor and, recorded again, the same text.
TEST(ChainText, WhatARecordingWritesIsReadBack) {
  std::ifstream file(std::string(SHARDPULL_SOURCE_DIR) + "/tests/torch/corpus.jsonl");
  ASSERT_TRUE(file.is_open());
  int chains = 0;
  for (std::string line; std::getline(file, line);) {
    SCOPED_TRACE(line.substr(0, 400));
    const auto entry = nlohmann::json::parse(line);
    const auto root = Tensor::fake("w", dtype_from_name(entry.at("dtype").get<std::string>()).value(),
                                   entry.at("shape").get<std::vector<std::int64_t>>());
    ASSERT_TRUE(root.ok());
    const auto tensor = Tensor::apply(*root, testing::chain_from_json(entry.at("chain")));
    if (!tensor.ok()) continue;
    const std::string text = to_string(tensor->chain());
    const auto chain = parse_chain(text);
    ASSERT_TRUE(chain.ok()) << text << ": " << chain.status().to_string();
    const auto again = Tensor::apply(*root, *chain);
    ASSERT_TRUE(again.ok()) << text << ": " << again.status().to_string();
    EXPECT_EQ(to_string(again->chain()), text);
    EXPECT_EQ(again->dtype(), tensor->dtype());
    EXPECT_EQ(again->shape(), tensor->shape());
    EXPECT_EQ(again->stride(), tensor->stride());
    EXPECT_EQ(again->offset(), tensor->offset());
    ++chains;
  }
  EXPECT_GT(chains, 300);
}

// Goal: one spelling. Whatever to_string does not write is refused, with the place.
TEST(ChainText, OtherSpellingsAreRefused) {
  for (const char* const good : {"", ".t()", "[()]", "[1]", "[-1, None, ..., :, 1:, :2, 1:2, ::2, 1:7:3]",
                                 ".permute([])", ".split([1, 2], 0)[1]", ".view(F8_E4M3).squeeze([0, 1])"}) {
    const auto chain = parse_chain(good);
    ASSERT_TRUE(chain.ok()) << good;
    EXPECT_EQ(to_string(*chain), good);
  }
  for (const char* const bad : {"t()",
                                " .t()",
                                ".t() ",
                                ".t",
                                ".t(",
                                ".()",
                                ".narrow(0,1,2)",
                                ".narrow(0, 1, 2",
                                ".narrow(0, )",
                                ".view(bf16)",
                                ".view(BF16x)",
                                "[",
                                "[]",
                                "[1",
                                "[1,2]",
                                "[1::]",
                                "[none]",
                                ".split([1, 2)",
                                ".split([, 1], 0)",
                                ".narrow(0, 1, 9223372036854775808)",
                                ".narrow(+1, 0, 1)",
                                ".view(0x10)"}) {
    const auto chain = parse_chain(bad);
    ASSERT_FALSE(chain.ok()) << bad;
    EXPECT_THAT(chain.status().message(), ::testing::HasSubstr("at offset"));
  }
  std::string longest;
  for (int i = 0; i < 256; ++i) longest += ".t()";
  EXPECT_TRUE(parse_chain(longest).ok());
  EXPECT_THAT(parse_chain(longest + ".t()").status().message(), ::testing::HasSubstr("256 operations"));
}

// Goal: one output of an operation that gives a million costs no more than one of two.
TEST(ChainText, OneOutputOfManyIsMadeAlone) {
  const auto root = Tensor::fake("w", DType::kBF16, {1 << 20, 4});
  ASSERT_TRUE(root.ok());
  for (const char* const text :
       {".chunk(1048576, 0)[1048575]", ".split(1, 0)[1048575]", ".unbind(0)[1048575]"}) {
    const auto chain = parse_chain(text);
    ASSERT_TRUE(chain.ok());
    for (int i = 0; i < 10'000; ++i) {
      const auto tensor = Tensor::apply(*root, *chain);
      ASSERT_TRUE(tensor.ok()) << tensor.status().to_string();
      ASSERT_EQ(tensor->offset(), 4 * 1048575);
      ASSERT_EQ(to_string(tensor->chain()), text);
    }
  }
  EXPECT_FALSE(Tensor::apply(*root, *parse_chain(".unbind(0)[1048576]")).ok());
  EXPECT_FALSE(Tensor::apply(*root, *parse_chain(".unbind(1)[-5]")).ok());
}

}  // namespace
}  // namespace shardpull
