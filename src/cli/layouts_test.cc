#include "cli/layouts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace shardpull::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<TensorMeta> tensors(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  std::vector<TensorMeta> out;
  for (std::string& name : names) out.push_back({std::move(name), DType::kBF16, {4}});
  return out;
}

std::vector<std::string> decoder(int layers, bool head) {
  std::vector<std::string> names = {"model.embed_tokens.weight", "model.norm.weight"};
  if (head) names.push_back("lm_head.weight");
  for (int i = 0; i < layers; ++i) {
    names.push_back("model.layers." + std::to_string(i) + ".mlp.up_proj.weight");
  }
  return names;
}

std::vector<std::vector<std::string>> held(const std::vector<TensorMeta>& metadata, bool tied,
                                           std::uint32_t pp) {
  auto names = names_of_ranks(metadata, tied, {.pp = pp});
  EXPECT_TRUE(names.ok()) << names.status().message();
  std::vector<std::vector<std::string>> out;
  if (!names.ok()) return out;
  for (const auto& rank : *names) {
    EXPECT_TRUE(std::is_sorted(rank.begin(), rank.end()));
    auto& texts = out.emplace_back();
    for (const std::uint32_t name : rank) texts.push_back(metadata[name].name);
  }
  return out;
}

TEST(Layouts, Words) {
  EXPECT_EQ(parse_trainer_layout("pp=3")->pp, 3u);
  const auto layout = parse_inference_layout("pp=2,tp=4");
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(to_string(*layout), "tp=4,pp=2");
  EXPECT_EQ(workers(*layout), 8u);
  EXPECT_EQ(workers(*parse_inference_layout("tp=2,pp=2,dp=2,replicas=3")), 24u);
}

TEST(Layouts, MalformedWordsAreRefusedWithTheForm) {
  for (const char* text : {"", ",", "pp", "pp=", "pp=0", "pp=x", "pp=1.5", "pp=2,", "pp=2,pp=2", "=2", "PP=2",
                           "pp=2 ", "pp=65537"}) {
    const auto layout = parse_trainer_layout(text);
    ASSERT_FALSE(layout.ok()) << text;
    EXPECT_EQ(layout.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(layout.status().message(), HasSubstr("--trainer")) << text;
  }
  EXPECT_THAT(parse_trainer_layout("fsdp=2").status().message(), HasSubstr("not supported"));
  EXPECT_THAT(parse_inference_layout("frob=2").status().message(), HasSubstr("unknown"));
  EXPECT_FALSE(parse_inference_layout("tp=60000,pp=60000,dp=60000,replicas=60000").ok());
}

// Goal: layers follow their number, not their place in a list sorted by bytes, where 10 comes before 2.
TEST(Layouts, TwelveLayersOnTwoRanks) {
  const auto metadata = tensors(decoder(12, true));
  const auto ranks = held(metadata, false, 2);
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[0].front(), "model.embed_tokens.weight");
  EXPECT_THAT(ranks[0], ::testing::Contains("model.layers.5.mlp.up_proj.weight"));
  EXPECT_THAT(ranks[0], ::testing::Not(::testing::Contains("model.layers.10.mlp.up_proj.weight")));
  EXPECT_EQ(ranks[1].front(), "lm_head.weight");
  EXPECT_EQ(ranks[1].back(), "model.norm.weight");
  EXPECT_EQ(ranks[0].size(), 7u);
  EXPECT_EQ(ranks[1].size(), 8u);
}

// Goal: the ownership that was recorded of a real trainer pipeline (oracle qwen3_tied_pptrain): two layers
// before the last stage's one, and the tied embedding on both ends.
TEST(Layouts, RemainderGoesBeforeTheLastStage) {
  const auto metadata = tensors(decoder(3, false));
  EXPECT_THAT(held(metadata, true, 2),
              ElementsAre(ElementsAre("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight",
                                      "model.layers.1.mlp.up_proj.weight"),
                          ElementsAre("model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight",
                                      "model.norm.weight")));
}

TEST(Layouts, EveryNameHasAnOwnerAndOneRankHasAll) {
  for (const bool tied : {false, true}) {
    for (int layers = 1; layers <= 7; ++layers) {
      const auto metadata = tensors(decoder(layers, !tied));
      EXPECT_EQ(held(metadata, tied, 1)[0].size(), metadata.size());
      for (std::uint32_t pp = 1; pp <= static_cast<std::uint32_t>(layers); ++pp) {
        std::vector<std::string> all;
        for (const auto& rank : held(metadata, tied, pp)) all.insert(all.end(), rank.begin(), rank.end());
        std::sort(all.begin(), all.end());
        EXPECT_EQ(all.size(), metadata.size() + (tied && pp > 1 ? 1 : 0));
        all.erase(std::unique(all.begin(), all.end()), all.end());
        EXPECT_EQ(all.size(), metadata.size());
      }
    }
  }
}

TEST(Layouts, RankWithoutNamesIsRefused) {
  const auto refused = names_of_ranks(tensors(decoder(2, true)), false, {.pp = 5});
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(), HasSubstr("would hold nothing"));
  EXPECT_THAT(refused.status().message(), HasSubstr("2 layers"));
}

TEST(Layouts, BertNames) {
  const auto metadata = tensors({"embeddings.word_embeddings.weight", "embeddings.LayerNorm.weight",
                                 "encoder.layer.0.output.dense.weight", "encoder.layer.1.output.dense.weight",
                                 "pooler.dense.weight"});
  EXPECT_THAT(held(metadata, false, 2),
              ElementsAre(ElementsAre("embeddings.LayerNorm.weight", "embeddings.word_embeddings.weight",
                                      "encoder.layer.0.output.dense.weight"),
                          ElementsAre("encoder.layer.1.output.dense.weight", "pooler.dense.weight")));
}

}  // namespace
}  // namespace shardpull::cli
