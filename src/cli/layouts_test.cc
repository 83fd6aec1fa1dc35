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
  auto names = holdings_of(metadata, tied, {.pp = pp});
  EXPECT_TRUE(names.ok()) << names.status().message();
  std::vector<std::vector<std::string>> out;
  if (!names.ok()) return out;
  for (const auto& rank : *names) {
    EXPECT_TRUE(std::is_sorted(rank.whole.begin(), rank.whole.end()));
    EXPECT_TRUE(rank.pieces.empty());
    auto& texts = out.emplace_back();
    for (const std::uint32_t name : rank.whole) texts.push_back(metadata[name].name);
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
  EXPECT_EQ(to_string(*parse_inference_layout("ep=4")), "tp=4,pp=1,ep=4");
  EXPECT_EQ(to_string(*parse_inference_layout("dp=2,ep=4")), "tp=2,pp=1,dp=2,ep=4");
  EXPECT_EQ(workers(*parse_inference_layout("tp=2,dp=2,ep=4")), 4u);
  EXPECT_EQ(to_string(*parse_trainer_layout("fsdp=3,pp=2,ep=2")), "pp=2,ep=2,fsdp=3");
  EXPECT_EQ(parse_trainer_layout("fsdp=3,pp=2,ep=2")->ranks(), 12u);
}

TEST(Layouts, MalformedWordsAreRefusedWithTheForm) {
  for (const char* text : {"", ",", "pp", "pp=", "pp=0", "pp=x", "pp=1.5", "pp=2,", "pp=2,pp=2", "=2", "PP=2",
                           "pp=2 ", "pp=65537"}) {
    const auto layout = parse_trainer_layout(text);
    ASSERT_FALSE(layout.ok()) << text;
    EXPECT_EQ(layout.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(layout.status().message(), HasSubstr("--trainer")) << text;
  }
  EXPECT_THAT(parse_trainer_layout("tp=2").status().message(), HasSubstr("not supported"));
  EXPECT_FALSE(parse_trainer_layout("pp=300,ep=300").ok());
  EXPECT_THAT(parse_inference_layout("tp=2,ep=4").status().message(), HasSubstr("tp x dp"));
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
  const auto refused = holdings_of(tensors(decoder(2, true)), false, {.pp = 5});
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

// Goal: torch's fully_shard: ceil(rows / ranks) each, so that the last rank has the rest, or nothing.
TEST(Layouts, FsdpRowsAreTorchChunks) {
  const std::vector<TensorMeta> metadata = {
      {"a", DType::kBF16, {10, 2}}, {"b", DType::kBF16, {3, 2}}, {"c", DType::kF32, {}}};
  const auto ranks = holdings_of(metadata, false, {.fsdp = 4});
  ASSERT_TRUE(ranks.ok()) << ranks.status().message();
  ASSERT_EQ(ranks->size(), 4u);
  const std::int64_t a[] = {3, 3, 3, 1};
  for (std::uint32_t r = 0; r < 4; ++r) {
    const HeldByRank& held = (*ranks)[r];
    EXPECT_THAT(held.whole, ElementsAre(2u));
    ASSERT_EQ(held.pieces.size(), r < 3 ? 2u : 1u);
    EXPECT_EQ(held.pieces[0], (Piece{0, Box{{3 * r, 0}, {a[r], 2}}, r}));
    if (held.pieces.size() > 1) {
      EXPECT_EQ(held.pieces[1], (Piece{1, Box{{r, 0}, {1, 2}}, r}));
    }
  }
}

// Goal: five experts over two ranks are 3 + 2, one by one and stacked; what is no expert is on both; fsdp
// ranks cut the block of a stack.
TEST(Layouts, ExpertsAreCutIntoBlocks) {
  std::vector<TensorMeta> metadata = {{"model.layers.0.mlp.gate.weight", DType::kBF16, {5, 4}}};
  for (int e = 0; e < 5; ++e) {
    metadata.push_back(
        {"model.layers.1.mlp.experts." + std::to_string(e) + ".up_proj.weight", DType::kBF16, {6, 4}});
  }
  metadata.push_back({"model.layers.2.mlp.experts.down_proj", DType::kBF16, {5, 4, 6}});
  metadata.push_back({"model.layers.2.mlp.shared_experts.down_proj.weight", DType::kBF16, {4, 6}});
  const auto ranks = holdings_of(metadata, false, {.ep = 2});
  ASSERT_TRUE(ranks.ok()) << ranks.status().message();
  EXPECT_THAT((*ranks)[0].whole, ElementsAre(0u, 1u, 2u, 3u, 7u));
  EXPECT_THAT((*ranks)[1].whole, ElementsAre(0u, 4u, 5u, 7u));
  EXPECT_THAT((*ranks)[0].pieces, ElementsAre(Piece{6, Box{{0, 0, 0}, {3, 4, 6}}, 0}));
  EXPECT_THAT((*ranks)[1].pieces, ElementsAre(Piece{6, Box{{3, 0, 0}, {2, 4, 6}}, 1}));
  const auto both = holdings_of(metadata, false, {.ep = 2, .fsdp = 2});
  ASSERT_TRUE(both.ok()) << both.status().message();
  const auto has = [](const HeldByRank& held, const Piece& piece) {
    return std::find(held.pieces.begin(), held.pieces.end(), piece) != held.pieces.end();
  };
  EXPECT_TRUE(has((*both)[0], Piece{6, Box{{0, 0, 0}, {2, 4, 6}}, 0}));
  EXPECT_TRUE(has((*both)[1], Piece{6, Box{{2, 0, 0}, {1, 4, 6}}, 1}));
  EXPECT_TRUE(has((*both)[3], Piece{6, Box{{4, 0, 0}, {1, 4, 6}}, 3}));
}

}  // namespace
}  // namespace shardpull::cli
