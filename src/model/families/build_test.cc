#include "model/families/build.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "model/family_testing.h"

namespace shardpull {
namespace {

TEST(Layout, NumbersWorkersWithTpFastest) {
  const InferenceLayout layout{.tp = 2, .pp = 3, .dp = 2, .replicas = 2};
  EXPECT_EQ(layout.workers(), 24);
  const WorkerCoordinates at = must(worker_coordinates(layout, 12 + 6 + 2 * 2 + 1));
  EXPECT_EQ(at.replica, 1);
  EXPECT_EQ(at.dp_rank, 1);
  EXPECT_EQ(at.pp_rank, 2);
  EXPECT_EQ(at.tp_rank, 1);
  EXPECT_TRUE(fails_with(worker_coordinates(layout, 24), {"24"}));
  EXPECT_TRUE(fails_with(worker_coordinates(layout, -1), {"-1"}));
  EXPECT_TRUE(fails_with(worker_coordinates({.tp = 0}, 0), {"tp=0"}));
}

TEST(Layout, PipelineStagesAsVllmCutsThem) {
  using Stages = std::vector<std::pair<std::int64_t, std::int64_t>>;
  EXPECT_EQ(pipeline_stages(4, 2), (Stages{{0, 2}, {2, 4}}));
  EXPECT_EQ(pipeline_stages(3, 2), (Stages{{0, 2}, {2, 3}}));
  EXPECT_EQ(pipeline_stages(7, 3), (Stages{{0, 2}, {2, 5}, {5, 7}}));
  EXPECT_EQ(pipeline_stages(8, 3), (Stages{{0, 3}, {3, 6}, {6, 8}}));
  EXPECT_EQ(pipeline_stages(61, 8),
            (Stages{{0, 7}, {7, 14}, {14, 22}, {22, 30}, {30, 38}, {38, 46}, {46, 54}, {54, 61}}));
  EXPECT_EQ(pipeline_stages(2, 4), (Stages{{0, 0}, {0, 1}, {1, 2}, {2, 2}}));
}

// Every family, cut every way that is legal: replay and eager load agree on every byte.
TEST(Families, EveryLayoutIsExact) {
  const auto check = [](const TinyModel& tiny, std::initializer_list<InferenceLayout> layouts) {
    const ModelConfig config = tiny.config();
    const Weights weights(tiny.tensors());
    for (const InferenceLayout& layout : layouts) {
      for (std::int64_t id = 0; id < layout.workers(); ++id) {
        SCOPED_TRACE(tiny.architecture + " tp=" + std::to_string(layout.tp) +
                     " pp=" + std::to_string(layout.pp) + " id " + std::to_string(id));
        exact_worker(config, weights, layout, id);
      }
    }
  };
  const std::initializer_list<InferenceLayout> layouts{
      {}, {.tp = 2}, {.tp = 4}, {.tp = 8}, {.pp = 2}, {.tp = 2, .pp = 3}, {.tp = 2, .dp = 2, .replicas = 2}};
  check({}, layouts);
  check({.tied = true}, layouts);
  check({.vocab = 1024}, {{.tp = 4, .pp = 4}});
  check({.fused = true}, layouts);
  check({.architecture = "Qwen2ForCausalLM", .qkv_bias = true}, layouts);
  check({.architecture = "Qwen3ForCausalLM", .tied = true, .qk_norm = true}, layouts);
  check({.architecture = "MistralForCausalLM"}, {{.tp = 2}});
  check({.architecture = "LlavaForConditionalGeneration", .text_config_type = "llama"}, {{.tp = 2, .pp = 2}});
}

TEST(Families, BertIsExact) {
  const ModelConfig config =
      must(ModelConfig::parse(R"({"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 32,
      "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 100, "max_position_embeddings": 40,
      "type_vocab_size": 2})"));
  for (const bool with_ids : {true, false}) {
    std::vector<TensorMeta> metas;
    const auto add = [&](std::string name, std::vector<std::int64_t> shape, DType dtype = DType::kF32) {
      metas.push_back({std::move(name), dtype, std::move(shape)});
    };
    const auto dense = [&](const std::string& name, std::int64_t out, std::int64_t in) {
      add(name + ".weight", {out, in});
      add(name + ".bias", {out});
    };
    const auto norm = [&](const std::string& name) {
      add(name + ".weight", {32});
      add(name + ".bias", {32});
    };
    add("embeddings.word_embeddings.weight", {100, 32});
    add("embeddings.position_embeddings.weight", {40, 32});
    add("embeddings.token_type_embeddings.weight", {2, 32});
    if (with_ids) add("embeddings.position_ids", {1, 40}, DType::kI64);
    norm("embeddings.LayerNorm");
    for (const std::string layer : {"encoder.layer.0.", "encoder.layer.1."}) {
      dense(layer + "attention.self.query", 32, 32);
      dense(layer + "attention.self.key", 32, 32);
      dense(layer + "attention.self.value", 32, 32);
      dense(layer + "attention.output.dense", 32, 32);
      norm(layer + "attention.output.LayerNorm");
      dense(layer + "intermediate.dense", 48, 32);
      dense(layer + "output.dense", 32, 48);
      norm(layer + "output.LayerNorm");
    }
    dense("pooler.dense", 32, 32);
    const Weights weights(metas);
    for (const int tp : {1, 2, 4}) {
      for (int rank = 0; rank < tp; ++rank) {
        const auto model = exact_worker(config, weights, {.tp = tp}, rank);
        const auto ids = bytes_of_parameter(*model, "model.embeddings", "position_ids");
        if (!with_ids) {
          for (std::int64_t i = 0; i < 40; ++i) EXPECT_EQ(std::memcmp(ids.data() + 8 * i, &i, 8), 0);
        } else {
          EXPECT_EQ(ids, weights.of("embeddings.position_ids"));
        }
      }
    }
    EXPECT_OK(check_checkpoint(config, metas, nullptr));
  }
  EXPECT_TRUE(fails_with(build_model(config, {.pp = 2}, 0), {"pp=2", "BertModel"}));
  EXPECT_TRUE(fails_with(build_model(config, {.tp = 3}, 0), {"tp=3"}));
  EXPECT_EQ(must(build_model(config, {}, 0))
                ->find_module("model.embeddings.word_embeddings")
                ->find("weight")
                ->dtype(),
            DType::kF32);
  const auto half = must(build_model(config, {}, 0, {.dtype = DType::kBF16}));
  EXPECT_EQ(half->find_module("model.embeddings.word_embeddings")->find("weight")->dtype(), DType::kBF16);
  EXPECT_EQ(half->find_module("model.embeddings")->find("position_ids")->dtype(), DType::kI64);
}

TEST(Families, RefusesUnknownArchitectures) {
  const ModelConfig config = must(ModelConfig::parse(R"({"architectures": ["FalconForCausalLM"]})"));
  const auto refused = build_model(config, {}, 0);
  EXPECT_TRUE(fails_with(refused, {"FalconForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM",
                                   "Qwen3ForCausalLM", "BertModel"}));
  EXPECT_EQ(refused.status().info().reason, Reason::kUnknownArchitecture);
  EXPECT_TRUE(fails_with(
      build_model(TinyModel{.architecture = "LlavaForConditionalGeneration"}.config(), {}, 0), {"Llava"}));
  EXPECT_TRUE(fails_with(
      build_model(
          TinyModel{.architecture = "LlavaForConditionalGeneration", .text_config_type = "gemma"}.config(),
          {}, 0),
      {"gemma"}));
}

// tp that does not fit, with the numbers.
TEST(Families, RefusesTensorParallelSizes) {
  EXPECT_TRUE(fails_with(build_model(TinyModel{}.config(), {.tp = 3}, 0), {"tp=3", "vocab_size 100", "128"}));
  EXPECT_TRUE(fails_with(build_model(TinyModel{.vocab = 192}.config(), {.tp = 3}, 0),
                         {"tp=3", "num_attention_heads 8"}));
  EXPECT_TRUE(fails_with(build_model(TinyModel{.vocab = 1024}.config(), {.tp = 16}, 0),
                         {"tp=16", "num_attention_heads 8"}));
  EXPECT_TRUE(fails_with(build_model(TinyModel{.heads = 12, .kv_heads = 6}.config(), {.tp = 4}, 0),
                         {"tp=4", "num_key_value_heads 6"}));
  EXPECT_TRUE(fails_with(build_model(TinyModel{.heads = 24, .kv_heads = 3}.config(), {.tp = 8}, 0),
                         {"tp=8", "num_key_value_heads 3", "no multiple"}));
  EXPECT_TRUE(
      fails_with(build_model(TinyModel{.ffn = 98}.config(), {.tp = 4}, 0), {"tp=4", "intermediate_size 98"}));
  EXPECT_TRUE(fails_with(build_model(TinyModel{}.config(), {.tp = 2}, 2), {"2"}));
}

TEST(Families, NeedsItsFields) {
  EXPECT_TRUE(fails_with(
      build_model(must(ModelConfig::parse(R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 64})")),
                  {}, 0),
      {"num_hidden_layers"}));
}

// A missing tensor is named; a shape that the config does not imply is named with both shapes.
TEST(Families, MissingAndMisshapenTensors) {
  const TinyModel tiny;
  for (const std::string missing : {"model.norm.weight", "model.layers.2.self_attn.k_proj.weight",
                                    "lm_head.weight", "model.embed_tokens.weight"}) {
    std::vector<TensorMeta> metas = tiny.tensors();
    std::erase_if(metas, [&](const TensorMeta& meta) { return meta.name == missing; });
    EXPECT_TRUE(fails_with(bake(*must(build_model(tiny.config(), {.tp = 2}, 1)), metas),
                           {"the source has no " + missing}))
        << missing;
    EXPECT_TRUE(fails_with(check_checkpoint(tiny.config(), metas, nullptr), {missing})) << missing;
  }
  std::vector<TensorMeta> metas = tiny.tensors();
  const auto wrong = std::find_if(metas.begin(), metas.end(), [](const TensorMeta& meta) {
    return meta.name == "model.layers.1.self_attn.v_proj.weight";
  });
  wrong->shape = {64, 64};
  EXPECT_TRUE(fails_with(bake(*must(build_model(tiny.config(), {.tp = 2}, 0)), metas),
                         {wrong->name, "[64, 64]", "[16, 64]"}));
  EXPECT_TRUE(
      fails_with(check_checkpoint(tiny.config(), metas, nullptr), {wrong->name, "[64, 64]", "[16, 64]"}));
  EXPECT_OK(check_checkpoint(tiny.config(), tiny.tensors(), nullptr));
  EXPECT_OK(check_checkpoint(TinyModel{.fused = true}.config(), TinyModel{.fused = true}.tensors(), nullptr));
}

// A part that is there twice, fused and by itself, is refused.
TEST(Families, FusedAndSeparateAtOnce) {
  const TinyModel tiny;
  std::vector<TensorMeta> metas = tiny.tensors();
  metas.push_back({"model.layers.0.self_attn.qkv_proj.weight", DType::kBF16, {96, 64}});
  EXPECT_TRUE(fails_with(bake(*must(build_model(tiny.config(), {}, 0)), metas),
                         {"model.layers.0.self_attn.q_proj.weight", "fused"}));
  EXPECT_TRUE(fails_with(check_checkpoint(tiny.config(), metas, nullptr), {"fused"}));
}

TEST(Families, ExplainsWhatItDoesNotKeep) {
  const auto stage0 = must(build_model(TinyModel{}.config(), {.tp = 2, .pp = 2}, 0));
  EXPECT_NE(
      stage0->explain_unused("model.layers.3.mlp.up_proj.weight").find("other stage: layer 3 is on stage 1"),
      std::string::npos);
  EXPECT_NE(stage0->explain_unused("model.layers.3.mlp.gate_up_proj.weight").find("other stage"),
            std::string::npos);
  EXPECT_NE(stage0->explain_unused("lm_head.weight").find("other stage: stage 1"), std::string::npos);
  EXPECT_EQ(stage0->explain_unused("model.layers.0.mlp.up_proj.weight"), "");
  EXPECT_EQ(stage0->explain_unused("model.layers.4.mlp.up_proj.weight"), "");
  EXPECT_NE(stage0->explain_unused("model.layers.3.self_attn.rotary_emb.inv_freq").find("unused"),
            std::string::npos);
  const auto tied = must(build_model(TinyModel{.tied = true}.config(), {.pp = 2}, 1));
  EXPECT_NE(tied->explain_unused("lm_head.weight").find("tied head"), std::string::npos);
  EXPECT_EQ(tied->find_module("lm_head"), tied->find_module("model.embed_tokens"));
  EXPECT_EQ(tied->explain_unused("mtp.lm_head.weight"), "");
}

// Loaders do not care in which order names come, or whether all come at once.
TEST(Families, PartialLoads) {
  const TinyModel tiny;
  const Weights weights(tiny.tensors());
  const auto whole = exact_worker(tiny.config(), weights, {.tp = 2}, 1);
  const auto model = must(build_model(tiny.config(), {.tp = 2}, 1));
  ASSERT_OK(model->materialise(std::byte{0xCD}));
  std::vector<NamedTensor> tensors = weights.real();
  std::reverse(tensors.begin(), tensors.end());
  for (const NamedTensor& tensor : tensors) ASSERT_OK(model->load_weights({tensor}));
  EXPECT_EQ(bytes_of_parameter(*model, "model.layers.3.self_attn.qkv_proj", "weight"),
            bytes_of_parameter(*whole, "model.layers.3.self_attn.qkv_proj", "weight"));
}

}  // namespace
}  // namespace shardpull
