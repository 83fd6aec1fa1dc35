// Mixtures of experts: how layers, experts and shared experts are spread, and what is refused.
#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "checkpoint/shapes.h"
#include "model/families/cuts.h"
#include "model/family_testing.h"

namespace shardpull {
namespace {

using Order = TinyExperts::Order;

std::vector<int> numbers(int first, int end) {
  std::vector<int> out(static_cast<std::size_t>(end - first));
  std::iota(out.begin(), out.end(), first);
  return out;
}

bool has_module(const Model& model, const std::string& name) {
  return model.find_module(name) != nullptr;
}

TEST(Layout, ExpertRanks) {
  const InferenceLayout layout{.tp = 2, .pp = 2, .dp = 3, .ep = 6, .replicas = 2};
  EXPECT_EQ(layout.workers(), 24) << "ep counts no workers of its own";
  for (std::int64_t id = 0; id < layout.workers(); ++id) {
    const WorkerCoordinates at = must(worker_coordinates(layout, id));
    EXPECT_EQ(at.ep_rank, at.dp_rank * 2 + at.tp_rank) << id;
  }
  EXPECT_EQ(must(worker_coordinates({.tp = 2, .dp = 3}, 5)).ep_rank, 0) << "without expert parallelism";
  EXPECT_TRUE(fails_with(worker_coordinates({.tp = 2, .dp = 3, .ep = 2}, 0), {"ep=2", "2 x 3 = 6"}));
  EXPECT_TRUE(fails_with(worker_coordinates({.tp = 2, .ep = 0}, 0), {"ep=0"}));
}

// Every expert is in exactly one block, blocks are contiguous, and expert_rank agrees with them.
TEST(Layout, ExpertBlocks) {
  for (std::int64_t experts = 1; experts <= 20; ++experts) {
    for (int ep = 1; ep <= 20; ++ep) {
      if (experts < ep) {
        EXPECT_TRUE(
            fails_with(families::expert_share(experts, ep, 0, "mlp.experts"),
                       {"ep=" + std::to_string(ep), std::to_string(experts) + " experts", "mlp.experts"}));
        continue;
      }
      std::int64_t next = 0;
      for (int rank = 0; rank < ep; ++rank) {
        const families::Share share = must(families::expert_share(experts, ep, rank, ""));
        EXPECT_EQ(share.start, next);
        EXPECT_EQ(share.length, experts / ep + (rank < experts % ep ? 1 : 0));
        for (std::int64_t e = share.start; e < share.start + share.length; ++e)
          EXPECT_EQ(families::expert_rank(experts, ep, e), rank);
        next += share.length;
      }
      EXPECT_EQ(next, experts);
    }
  }
}

// Every kind of model, spread every way that is legal: replay and eager load agree on every byte, and the
// experts are those cut out of the checkpoint here.
TEST(Experts, EveryLayoutIsExact) {
  const std::vector<InferenceLayout> layouts{{},
                                             {.tp = 2},
                                             {.tp = 8},
                                             {.tp = 2, .ep = 2},
                                             {.tp = 4, .ep = 4},
                                             {.tp = 2, .dp = 2, .ep = 4},
                                             {.dp = 3, .ep = 3},
                                             {.dp = 2},
                                             {.tp = 2, .pp = 2, .ep = 2},
                                             {.tp = 2, .dp = 2, .replicas = 2}};
  const std::vector<TinyExperts> models{
      {},
      {.experts = 7, .dense = 0},
      {.architecture = "Qwen3VLMoeForConditionalGeneration"},
      {.architecture = "DeepseekV3ForCausalLM", .shared = 2},
      {.architecture = "DeepseekV3ForCausalLM", .shared = 0, .query_rank = 0, .prediction_layers = 1},
  };
  for (const TinyExperts& tiny : models) {
    const ModelConfig config = tiny.config();
    const Weights weights(tiny.tensors());
    for (const InferenceLayout& layout : layouts) {
      const auto stages = pipeline_stages(tiny.layers, layout.pp);
      for (std::int64_t id = 0; id < layout.workers(); ++id) {
        SCOPED_TRACE(tiny.architecture + " tp=" + std::to_string(layout.tp) +
                     " dp=" + std::to_string(layout.dp) + " ep=" + std::to_string(layout.ep) + " id " +
                     std::to_string(id));
        const auto model = exact_worker(config, weights, layout, id);
        const WorkerCoordinates at = must(worker_coordinates(layout, id));
        int first = 0, end = static_cast<int>(tiny.experts);
        for (int e = 0; e < static_cast<int>(tiny.experts) && layout.ep > 1; ++e) {
          const int larger = static_cast<int>(tiny.experts % layout.ep),
                    each = static_cast<int>(tiny.experts / layout.ep);
          first = at.ep_rank * each + std::min(at.ep_rank, larger);
          end = first + each + (at.ep_rank < larger ? 1 : 0);
        }
        const std::int64_t width = layout.ep > 1 ? tiny.width : tiny.width / layout.tp;
        const std::int64_t begin = layout.ep > 1 ? 0 : width * at.tp_rank;
        for (std::int64_t layer = 0; layer < tiny.layers; ++layer) {
          const std::string p =
              (tiny.nested() ? "language_model." : "") + ("model.layers." + std::to_string(layer) + ".mlp.");
          const auto& [stage_begin, stage_end] = stages[static_cast<std::size_t>(at.pp_rank)];
          const bool here = layer >= stage_begin && layer < stage_end;
          EXPECT_EQ(has_module(*model, p + "gate_up_proj"), here && layer < tiny.dense);
          EXPECT_EQ(has_module(*model, p + "experts.routed_experts"), here && layer >= tiny.dense);
          if (!here || layer < tiny.dense) continue;
          EXPECT_EQ(bytes_of_parameter(*model, p + "experts.routed_experts", "w13_weight"),
                    tiny.w13(weights, layer, numbers(first, end), begin, width));
          EXPECT_EQ(bytes_of_parameter(*model, p + "experts.routed_experts", "w2_weight"),
                    tiny.w2(weights, layer, numbers(first, end), begin, width));
          EXPECT_EQ(bytes_of_parameter(*model, p + "gate", "weight"),
                    weights.of(tiny.root() + "layers." + std::to_string(layer) + ".mlp.gate.weight"));
          EXPECT_EQ(has_module(*model, p + "shared_experts.down_proj"), tiny.latent() && tiny.shared > 0);
          if (!tiny.latent() || tiny.shared == 0) continue;
          const std::int64_t part = tiny.shared * tiny.width / layout.tp;
          EXPECT_EQ(bytes_of_parameter(*model, p + "shared_experts.gate_up_proj", "weight"),
                    joined({rows(weights, p + "shared_experts.gate_proj.weight", part * at.tp_rank, part),
                            rows(weights, p + "shared_experts.up_proj.weight", part * at.tp_rank, part)}));
          EXPECT_EQ(bytes_of_parameter(*model, p + "shared_experts.down_proj", "weight"),
                    columns(weights, p + "shared_experts.down_proj.weight", part * at.tp_rank, part));
        }
      }
    }
    EXPECT_OK(check_checkpoint(config, weights.metadata, nullptr));
  }
}

TEST(Experts, LatentAttentionIsCutByHeads) {
  for (const std::int64_t query_rank : {24, 0}) {
    const TinyExperts tiny{.architecture = "DeepseekV3ForCausalLM", .query_rank = query_rank};
    const Weights weights(tiny.tensors());
    for (int rank = 0; rank < 4; ++rank) {
      const auto model = exact_worker(tiny.config(), weights, {.tp = 4}, rank);
      const std::string a = "model.layers.1.self_attn.";
      EXPECT_EQ(bytes_of_parameter(*model, a + "kv_b_proj", "weight"),
                rows(weights, a + "kv_b_proj.weight", 32 * rank, 32));
      EXPECT_EQ(bytes_of_parameter(*model, a + "o_proj", "weight"),
                columns(weights, a + "o_proj.weight", 16 * rank, 16));
      const std::string query = query_rank > 0 ? "q_b_proj" : "q_proj";
      EXPECT_EQ(bytes_of_parameter(*model, a + query, "weight"),
                rows(weights, a + query + ".weight", 24 * rank, 24));
      if (query_rank > 0) {
        EXPECT_EQ(bytes_of_parameter(*model, a + "fused_qkv_a_proj", "weight"),
                  joined({weights.of(a + "q_a_proj.weight"), weights.of(a + "kv_a_proj_with_mqa.weight")}));
        EXPECT_FALSE(has_module(*model, a + "kv_a_proj_with_mqa"));
      } else {
        EXPECT_EQ(bytes_of_parameter(*model, a + "kv_a_proj_with_mqa", "weight"),
                  weights.of(a + "kv_a_proj_with_mqa.weight"));
        EXPECT_FALSE(has_module(*model, a + "fused_qkv_a_proj"));
        EXPECT_FALSE(has_module(*model, a + "q_a_layernorm"));
      }
    }
  }
}

// Which layers have experts, by the rules of both families.
TEST(Experts, LayersWithAndWithout) {
  const auto layers_with_experts = [](const TinyExperts& tiny) {
    const auto model = must(build_model(tiny.config(), {}, 0));
    std::vector<int> layers;
    for (int layer = 0; layer < tiny.layers; ++layer) {
      const std::string p = "model.layers." + std::to_string(layer) + ".mlp.";
      EXPECT_NE(has_module(*model, p + "experts.routed_experts"), has_module(*model, p + "gate_up_proj"));
      EXPECT_EQ(has_module(*model, p + "experts.routed_experts"), has_module(*model, p + "gate"));
      if (has_module(*model, p + "gate")) layers.push_back(layer);
    }
    return layers;
  };
  using Layers = std::vector<int>;
  EXPECT_EQ(layers_with_experts({.layers = 4, .dense = 2}), (Layers{2, 3}));
  EXPECT_EQ(layers_with_experts({.layers = 6, .dense = 2, .extra = R"("decoder_sparse_step": 2, )"}),
            (Layers{3, 5}));
  EXPECT_EQ(layers_with_experts({.experts = 0, .dense = 0}), Layers{});
  const std::string deepseek = "DeepseekV3ForCausalLM";
  EXPECT_EQ(layers_with_experts({.architecture = deepseek, .layers = 5, .dense = 3}), (Layers{3, 4}));
  EXPECT_EQ(layers_with_experts(
                {.architecture = deepseek, .layers = 6, .dense = 1, .extra = R"("moe_layer_freq": 2, )"}),
            (Layers{2, 4}));
  EXPECT_TRUE(fails_with(build_model(TinyExperts{.extra = R"("decoder_sparse_step": 0, )"}.config(), {}, 0),
                         {"decoder_sparse_step"}));
}

TEST(Experts, CorrectionBiasOfTheRouter) {
  const TinyExperts tiny{.architecture = "DeepseekV3ForCausalLM"};
  const auto model = must(build_model(tiny.config(), {}, 0, {.dtype = DType::kF16}));
  EXPECT_EQ(model->find_module("model.layers.1.mlp.gate")->find("e_score_correction_bias")->dtype(),
            DType::kF32);
  EXPECT_EQ(model->find_module("model.layers.1.mlp.gate")->find("weight")->dtype(), DType::kF16);
  const TinyExperts without{.architecture = "DeepseekV3ForCausalLM", .extra = R"("topk_method": "greedy", )"};
  EXPECT_EQ(must(build_model(without.config(), {}, 0))
                ->find_module("model.layers.1.mlp.gate")
                ->find("e_score_correction_bias"),
            nullptr);
  EXPECT_TRUE(fails_with(bake(*must(build_model(without.config(), {}, 0)), without.tensors()),
                         {"model.layers.1.mlp.gate.e_score_correction_bias"}));
}

TEST(Experts, ExplainsWhatOtherRanksAndStagesHold) {
  const TinyExperts tiny{.architecture = "DeepseekV3ForCausalLM", .experts = 7, .prediction_layers = 1};
  const auto model = must(build_model(tiny.config(), {.tp = 2, .pp = 2, .dp = 2, .ep = 4}, 2));
  ASSERT_EQ(must(worker_coordinates({.tp = 2, .pp = 2, .dp = 2, .ep = 4}, 2)).pp_rank, 1);
  const std::string experts = "model.layers.2.mlp.experts.";
  EXPECT_EQ(model->explain_unused(experts + "1.up_proj.weight"), "");
  EXPECT_EQ(model->explain_unused(experts + "2.up_proj.weight"), "other rank: expert 2 is on rank 1");
  EXPECT_EQ(model->explain_unused(experts + "6.down_proj.weight"), "other rank: expert 6 is on rank 3");
  EXPECT_EQ(model->explain_unused(experts + "7.down_proj.weight"), "") << "there is no expert 7";
  EXPECT_NE(model->explain_unused("model.layers.1.mlp.experts.0.up_proj.weight").find("other stage: layer 1"),
            std::string::npos);
  EXPECT_NE(model->explain_unused("model.layers.1.mlp.experts.gate_up_proj").find("other stage: layer 1"),
            std::string::npos);
  EXPECT_EQ(model->explain_unused(experts + "gate_up_proj"), "");
  EXPECT_NE(model->explain_unused("model.layers.3.eh_proj.weight").find("layer 3 predicts further tokens"),
            std::string::npos);
  EXPECT_EQ(model->explain_unused("model.layers.4.eh_proj.weight"), "");
  EXPECT_EQ(model->explain_unused("model.layers.3"), "");
  const Recording recording = must(bake(*model, tiny.tensors()));
  EXPECT_EQ(recording.unused_reasons.size(), recording.dead.size());
}

TEST(Experts, Refusals) {
  const TinyExperts tiny;
  EXPECT_TRUE(
      fails_with(build_model(tiny.config(), {.tp = 8, .dp = 2, .ep = 16}, 0), {"ep=16", "8 experts"}));
  EXPECT_TRUE(fails_with(build_model(tiny.config(), {.tp = 2, .ep = 4}, 0), {"ep=4", "2 x 1 = 2"}));
  // As an engine does, a model without experts takes no notice of ep.
  EXPECT_OK(build_model(TinyModel{}.config(), {.tp = 2, .ep = 2}, 0));
  EXPECT_OK(build_model(TinyExperts{.experts = 0}.config(), {.tp = 2, .ep = 2}, 0));
  // Cut by tp experts need a width that divides; whole ones do not.
  const TinyExperts odd{.width = 49};
  EXPECT_TRUE(fails_with(build_model(odd.config(), {.tp = 2}, 0), {"tp=2", "moe_intermediate_size 49"}));
  EXPECT_OK(build_model(odd.config(), {.tp = 2, .ep = 2}, 0));
  const TinyExperts odd_shared{.architecture = "DeepseekV3ForCausalLM", .width = 49};
  EXPECT_TRUE(fails_with(build_model(odd_shared.config(), {.tp = 2, .ep = 2}, 0),
                         {"tp=2", "n_shared_experts x moe_intermediate_size 49"}));
  EXPECT_TRUE(
      fails_with(build_model(TinyExperts{.architecture = "DeepseekV3ForCausalLM"}.config(), {.tp = 16}, 0),
                 {"tp=16", "num_attention_heads 8"}));
  EXPECT_TRUE(fails_with(
      build_model(must(ModelConfig::parse(R"({"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64})")),
                  {}, 0),
      {"moe_intermediate_size", "DeepseekV3ForCausalLM"}));
  EXPECT_TRUE(fails_with(build_model(TinyExperts{.layers = 2000, .experts = 60'000}.config(), {}, 0),
                         {"60000 experts", "limit is 4000000"}));
  // A quantised checkpoint would need its scales.
  EXPECT_TRUE(
      fails_with(build_model(TinyExperts{.architecture = "DeepseekV3ForCausalLM",
                                         .extra = R"("quantization_config": {"quant_method": "fp8"}, )"}
                                 .config(),
                             {}, 0),
                 {"quantization_config"}));
}

TEST(Experts, MissingAndMisshapenTensors) {
  for (const TinyExperts& tiny : {TinyExperts{}, TinyExperts{.order = Order::kOutIn}}) {
    const std::string root = "model.layers.2.mlp.experts.";
    const std::string missing =
        tiny.order == Order::kOutIn ? root + "down_proj" : root + "5.down_proj.weight";
    std::vector<TensorMeta> metas = tiny.tensors();
    std::erase_if(metas, [&](const TensorMeta& meta) { return meta.name == missing; });
    EXPECT_TRUE(fails_with(bake(*must(build_model(tiny.config(), {.tp = 2, .ep = 2}, 1)), metas),
                           {"w2_weight", "the source has no", root + "5.down_proj.weight"}));
    EXPECT_TRUE(fails_with(check_checkpoint(tiny.config(), metas, nullptr), {root + "5.down_proj.weight"}));

    metas = tiny.tensors();
    const auto wrong = std::find_if(metas.begin(), metas.end(),
                                    [&](const TensorMeta& meta) { return meta.name == missing; });
    wrong->shape.back() = 47;
    const std::string implied = tiny.order == Order::kOutIn ? "[8, 64, 48]" : "[64, 48]";
    EXPECT_TRUE(fails_with(bake(*must(build_model(tiny.config(), {.tp = 2, .ep = 2}, 1)), metas),
                           {missing, "47]", implied}));
    EXPECT_TRUE(fails_with(check_checkpoint(tiny.config(), metas, nullptr), {missing, "47]", implied}));
  }
  // A rank that does not hold the expert has no use for its tensor, and check_checkpoint misses it.
  std::vector<TensorMeta> metas = TinyExperts{}.tensors();
  std::erase_if(metas, [](const TensorMeta& meta) {
    return meta.name == "model.layers.2.mlp.experts.5.down_proj.weight";
  });
  EXPECT_OK(bake(*must(build_model(TinyExperts{}.config(), {.tp = 2, .ep = 2}, 0)), metas));
}

// Experts stacked and one by one, of one layer, on any rank; the layers may differ.
TEST(Experts, StackedAndPerExpertAtOnce) {
  const TinyExperts per_expert, stacked{.order = Order::kOutIn};
  std::vector<TensorMeta> metas = stacked.tensors();
  for (const TensorMeta& meta : per_expert.tensors()) {
    if (meta.name == "model.layers.1.mlp.experts.0.up_proj.weight") metas.push_back(meta);
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(fails_with(
        bake(*must(build_model(stacked.config(), {.tp = 2, .ep = 2}, rank)), metas),
        {"model.layers.1.mlp.experts.0.up_proj.weight", "twice", "model.layers.1.mlp.experts.gate_up_proj"}));
  }
  EXPECT_TRUE(fails_with(check_checkpoint(stacked.config(), metas, nullptr),
                         {"model.layers.1.mlp.experts.0.up_proj.weight", "twice"}));

  metas.clear();
  for (const TensorMeta& meta : per_expert.tensors()) {
    if (!meta.name.starts_with("model.layers.2.mlp.experts.")) metas.push_back(meta);
  }
  for (const TensorMeta& meta : stacked.tensors()) {
    if (meta.name.starts_with("model.layers.2.mlp.experts.")) metas.push_back(meta);
  }
  EXPECT_OK(check_checkpoint(per_expert.config(), metas, nullptr));
  exact_worker(per_expert.config(), Weights(metas), {.tp = 2, .ep = 2}, 1);
}

// The catalogue's shapes are models of these families, whose every name is explained on every rank.
TEST(Experts, ShapesAreModels) {
  for (const std::string key : {"qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"}) {
    const ModelShape tiny = must(shape_config({key, ShapeSize::kTiny}));
    const ModelConfig config = must(ModelConfig::parse(tiny.config_json));
    EXPECT_OK(check_checkpoint(config, tiny.tensors, nullptr));
    const Weights weights(tiny.tensors);
    for (const InferenceLayout& layout :
         {InferenceLayout{.tp = 8}, InferenceLayout{.tp = 2, .dp = 2, .ep = 4},
          InferenceLayout{.tp = 4, .pp = 2}}) {
      exact_worker(config, weights, layout, layout.workers() - 1);
    }
    const ModelShape full = must(shape_config({key, ShapeSize::kFull}));
    const auto model =
        must(build_model(must(ModelConfig::parse(full.config_json)), {.tp = 32, .ep = 32}, 31));
    const Recording recording = must(bake(*model, full.tensors));
    std::size_t unexplained = 0;
    for (const std::string& reason : recording.unused_reasons) unexplained += reason.empty() ? 1 : 0;
    EXPECT_EQ(unexplained, 0u);
    EXPECT_EQ(recording.live.size() + recording.dead.size(), full.tensors.size());
  }
}

}  // namespace
}  // namespace shardpull
