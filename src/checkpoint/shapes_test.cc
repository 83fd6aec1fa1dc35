#include "checkpoint/shapes.h"

#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/config.h"

namespace shardpull {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::map<std::string, TensorMeta> by_name(const ModelShape& shape) {
  std::map<std::string, TensorMeta> out;
  for (const TensorMeta& meta : shape.tensors) out[meta.name] = meta;
  return out;
}

TEST(Shapes, ParsesSpecs) {
  const auto spec = parse_shape_spec("qwen3-0.6b:scaled");
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(spec->key, "qwen3-0.6b");
  EXPECT_EQ(spec->size, ShapeSize::kScaled);
  for (const char* text : {"", ":", "qwen3-0.6b", "qwen3-0.6b:", "qwen3-0.6b:huge", "qwen3:tiny",
                           "qwen3-0.6b:tiny:tiny", " minilm:tiny"}) {
    const auto refused = parse_shape_spec(text);
    ASSERT_FALSE(refused.ok()) << text;
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(refused.status().message(),
                AllOf(HasSubstr("KEY:SIZE"), HasSubstr("minilm"), HasSubstr("tiny, scaled, full")));
  }
}

// Goal: the full shapes are the published models: their parameters, counted.
TEST(Shapes, FullShapesHaveThePublishedParameterCounts) {
  const std::map<std::string, std::uint64_t> parameters = {
      {"minilm", 22'713'216},
      {"qwen2-0.5b", 494'032'768},
      {"qwen3-0.6b", 596'049'920},
      {"qwen3-8b", 8'190'735'360},
      {"llama-3-70b", 70'553'706'496},
      {"qwen3-30b-a3b", 30'532'122'624},
      {"qwen3-235b-a22b", 235'093'634'560},
      {"deepseek-v3", 671'026'419'200},
      {"kimi-k2", 1'026'408'232'448},
  };
  for (const auto& [key, count] : parameters) {
    const auto shape = shape_config({key, ShapeSize::kFull});
    ASSERT_TRUE(shape.ok()) << shape.status().to_string();
    std::uint64_t found = 0;
    for (const TensorMeta& meta : shape->tensors) {
      if (meta.dtype == DType::kI64) continue;  // position_ids is a buffer
      if (key == "deepseek-v3" && meta.name.starts_with("model.layers.61."))
        continue;  // predicts further tokens
      std::uint64_t elements = 1;
      for (const std::int64_t dim : meta.shape) elements *= static_cast<std::uint64_t>(dim);
      found += elements;
    }
    EXPECT_EQ(found, count) << key;
  }
}

TEST(Shapes, SizesFitTheirPurpose) {
  for (const ShapeInfo& info : known_shapes()) {
    if (!info.available) continue;
    const auto tiny = shape_config({std::string(info.key), ShapeSize::kTiny});
    const auto scaled = shape_config({std::string(info.key), ShapeSize::kScaled});
    ASSERT_TRUE(tiny.ok() && scaled.ok());
    EXPECT_LT(tiny->total_bytes, 2u << 20) << info.key;
    EXPECT_GE(scaled->total_bytes, 80'000'000u) << info.key;
    EXPECT_LE(scaled->total_bytes, 2'000'000'000u) << info.key;
  }
  const auto demo = shape_config({"qwen3-0.6b", ShapeSize::kScaled});
  EXPECT_NEAR(static_cast<double>(demo->total_bytes), 600e6, 20e6);
}

// Goal: every size and override gives names in order, once, and a config that reads back as the family needs
// it.
TEST(Shapes, ConfigAndTensorsAgree) {
  for (const ShapeInfo& info : known_shapes()) {
    if (!info.available) continue;
    for (const ShapeSize size : {ShapeSize::kTiny, ShapeSize::kScaled, ShapeSize::kFull}) {
      const auto shape = shape_config({std::string(info.key), size});
      ASSERT_TRUE(shape.ok());
      EXPECT_TRUE(std::is_sorted(shape->tensors.begin(), shape->tensors.end(),
                                 [](const TensorMeta& a, const TensorMeta& b) { return a.name < b.name; }));
      const auto tensors = by_name(*shape);
      EXPECT_EQ(tensors.size(), shape->tensors.size());
      const auto config = ModelConfig::parse(shape->config_json);
      ASSERT_TRUE(config.ok()) << config.status().to_string();
      EXPECT_EQ(config->model_type, info.family);
      ASSERT_TRUE(
          config
              ->require({"architectures", "hidden_size", "num_hidden_layers", "num_attention_heads",
                         "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "dtype"})
              .ok());
      const std::int64_t q = config->num_attention_heads * config->head_dim;
      if (info.family == "bert") {
        EXPECT_EQ(q, config->hidden_size);
        EXPECT_EQ(tensors.at("encoder.layer.0.attention.self.key.bias").shape, std::vector<std::int64_t>{q});
        EXPECT_EQ(tensors.at("embeddings.token_type_embeddings.weight").shape[0], config->type_vocab_size);
        EXPECT_EQ(tensors.at("embeddings.position_ids").dtype, DType::kI64);
      } else if (info.family == "deepseek_v3") {
        ASSERT_TRUE(
            config
                ->require({"num_experts", "moe_intermediate_size", "n_shared_experts",
                           "first_k_dense_replace", "moe_layer_freq", "q_lora_rank", "kv_lora_rank",
                           "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_nextn_predict_layers"})
                .ok());
        const std::int64_t first = *config->first_k_dense_replace;
        EXPECT_GE(first, 1);
        EXPECT_GE(config->num_hidden_layers - first, 2);
        EXPECT_TRUE(tensors.contains(fmt::format("model.layers.{}.mlp.down_proj.weight", first - 1)));
        EXPECT_EQ(tensors.at(fmt::format("model.layers.{}.mlp.gate.e_score_correction_bias", first)).dtype,
                  DType::kF32);
        EXPECT_EQ(tensors
                      .at(fmt::format("model.layers.{}.mlp.experts.{}.gate_proj.weight", first,
                                      *config->num_experts - 1))
                      .shape,
                  (std::vector<std::int64_t>{*config->moe_intermediate_size, config->hidden_size}));
        EXPECT_EQ(tensors.contains(fmt::format("model.layers.{}.eh_proj.weight", config->num_hidden_layers)),
                  *config->num_nextn_predict_layers > 0);
      } else {
        EXPECT_EQ(tensors.at("model.layers.0.self_attn.q_proj.weight").shape,
                  (std::vector<std::int64_t>{q, config->hidden_size}));
        EXPECT_EQ(tensors.at("model.layers.0.self_attn.k_proj.weight").shape,
                  (std::vector<std::int64_t>{config->num_key_value_heads[0] * config->head_dim,
                                             config->hidden_size}));
        EXPECT_EQ(tensors.contains("lm_head.weight"), !config->tie_word_embeddings);
        EXPECT_EQ(tensors.contains("model.layers.0.self_attn.q_proj.bias"), info.family == "qwen2");
        EXPECT_EQ(tensors.contains("model.layers.0.self_attn.q_norm.weight"),
                  info.family.starts_with("qwen3"));
        EXPECT_EQ(tensors.contains("model.layers.0.mlp.down_proj.weight"), info.family != "qwen3_moe");
        EXPECT_EQ(config->num_experts.has_value(), info.family == "qwen3_moe");
      }
    }
  }
}

TEST(Shapes, Overrides) {
  const ShapeSpec spec{"qwen3-0.6b", ShapeSize::kTiny};
  const auto shape = shape_config(spec, {.vocab = 100, .layers = 7, .kv_heads = 4, .tied = false});
  ASSERT_TRUE(shape.ok()) << shape.status().to_string();
  const auto tensors = by_name(*shape);
  EXPECT_EQ(tensors.at("model.embed_tokens.weight").shape, (std::vector<std::int64_t>{100, 64}));
  EXPECT_EQ(tensors.at("lm_head.weight").shape, (std::vector<std::int64_t>{100, 64}));
  EXPECT_EQ(tensors.at("model.layers.6.self_attn.v_proj.weight").shape, (std::vector<std::int64_t>{32, 64}));
  EXPECT_FALSE(tensors.contains("model.layers.7.input_layernorm.weight"));
  const auto config = ModelConfig::parse(shape->config_json);
  ASSERT_TRUE(config.ok());
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_EQ(config->num_key_value_heads, std::vector<std::int64_t>(7, 4));

  const auto refused = [](const ShapeSpec& s, const ShapeOverrides& o) {
    return shape_config(s, o).status();
  };
  EXPECT_THAT(refused(spec, {.kv_heads = 3}).message(), HasSubstr("does not divide"));
  EXPECT_THAT(refused(spec, {.kv_heads = 0}).message(), HasSubstr("kv_heads 0"));
  EXPECT_THAT(refused(spec, {.vocab = 0}).message(), HasSubstr("vocab 0"));
  EXPECT_THAT(refused(spec, {.layers = -1}).message(), HasSubstr("layers -1"));
  EXPECT_THAT(refused({"kimi-k2", ShapeSize::kTiny}, {.kv_heads = 1}).message(),
              HasSubstr("latent attention"));
  const ShapeSpec bert{"minilm", ShapeSize::kTiny};
  EXPECT_THAT(refused(bert, {.tied = true}).message(), HasSubstr("no head to tie"));
  EXPECT_THAT(refused(bert, {.kv_heads = 1}).message(), HasSubstr("KV heads"));
}

TEST(Shapes, KnownButNotAvailable) {
  const auto refused = shape_config({"glm-4.5-air", ShapeSize::kTiny});
  EXPECT_EQ(refused.status().code(), StatusCode::kUnimplemented);
  EXPECT_THAT(refused.status().message(),
              AllOf(HasSubstr("glm-4.5-air"), HasSubstr("glm4_moe"), HasSubstr("kimi-k2")));
  EXPECT_EQ(shape_config({"gpt-5", ShapeSize::kTiny}).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace shardpull
