// Small checkpoints of the families, and the check that a worker's bytes are exact by two independent paths.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/config.h"
#include "model/families/build.h"
#include "model/model_testing.h"

namespace shardpull {

// 4 layers, hidden 64, 8 query heads, 2 key/value heads, head_dim 8, FFN 96, vocabulary 100, BF16. Change
// what a test is about.
struct TinyModel {
  std::string architecture = "LlamaForCausalLM";
  std::int64_t layers = 4, hidden = 64, heads = 8, kv_heads = 2, head_dim = 8, ffn = 96, vocab = 100;
  std::vector<std::int64_t> kv_heads_per_layer;  // instead of kv_heads
  bool tied = false, qkv_bias = false, qk_norm = false;
  bool fused = false;            // qkv and gate_up fused on disk
  std::string text_config_type;  // nested when not empty; the tie flag is in text_config only
  std::string extra;             // more fields, each followed by a comma

  ModelConfig config() const {
    std::string kv = std::to_string(kv_heads);
    if (!kv_heads_per_layer.empty()) {
      kv = "[";
      for (const std::int64_t heads_here : kv_heads_per_layer)
        kv += (kv.size() > 1 ? "," : "") + std::to_string(heads_here);
      kv += "]";
    }
    const std::string fields =
        extra + "\"hidden_size\": " + std::to_string(hidden) +
        ", \"num_hidden_layers\": " + std::to_string(layers) +
        ", \"num_attention_heads\": " + std::to_string(heads) + ", \"num_key_value_heads\": " + kv +
        ", \"head_dim\": " + std::to_string(head_dim) + ", \"intermediate_size\": " + std::to_string(ffn) +
        ", \"vocab_size\": " + std::to_string(vocab) +
        ", \"tie_word_embeddings\": " + (tied ? "true" : "false");
    std::string text = "{\"architectures\": [\"" + architecture + "\"], \"dtype\": \"bfloat16\", ";
    text += text_config_type.empty() ? "\"model_type\": \"llama\", " + fields
                                     : "\"model_type\": \"outer\", \"text_config\": {\"model_type\": \"" +
                                           text_config_type + "\", " + fields + "}";
    return must(ModelConfig::parse(text + "}"));
  }

  // In ascending name order, as the command line's source gives them.
  std::vector<TensorMeta> tensors() const {
    std::vector<TensorMeta> all;
    const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
      all.push_back({std::move(name), DType::kBF16, std::move(shape)});
    };
    const std::string root = text_config_type.empty() ? "model." : "model.language_model.";
    add(root + "embed_tokens.weight", {vocab, hidden});
    for (std::int64_t l = 0; l < layers; ++l) {
      const std::string p = root + "layers." + std::to_string(l) + ".";
      const std::int64_t kv =
          (kv_heads_per_layer.empty() ? kv_heads : kv_heads_per_layer[static_cast<std::size_t>(l)]) *
          head_dim;
      const std::int64_t q = heads * head_dim;
      add(p + "input_layernorm.weight", {hidden});
      add(p + "post_attention_layernorm.weight", {hidden});
      add(p + "mlp.down_proj.weight", {hidden, ffn});
      add(p + "self_attn.o_proj.weight", {hidden, q});
      if (fused) {
        add(p + "mlp.gate_up_proj.weight", {2 * ffn, hidden});
        add(p + "self_attn.qkv_proj.weight", {q + 2 * kv, hidden});
      } else {
        add(p + "mlp.gate_proj.weight", {ffn, hidden});
        add(p + "mlp.up_proj.weight", {ffn, hidden});
        add(p + "self_attn.q_proj.weight", {q, hidden});
        add(p + "self_attn.k_proj.weight", {kv, hidden});
        add(p + "self_attn.v_proj.weight", {kv, hidden});
        if (qkv_bias) {
          add(p + "self_attn.q_proj.bias", {q});
          add(p + "self_attn.k_proj.bias", {kv});
          add(p + "self_attn.v_proj.bias", {kv});
        }
      }
      if (qk_norm) {
        add(p + "self_attn.q_norm.weight", {head_dim});
        add(p + "self_attn.k_norm.weight", {head_dim});
      }
    }
    add(root + "norm.weight", {hidden});
    if (!tied) add("lm_head.weight", {vocab, hidden});
    std::sort(all.begin(), all.end(),
              [](const TensorMeta& a, const TensorMeta& b) { return a.name < b.name; });
    return all;
  }
};

// Mixtures of experts: hidden 64, 8 query heads, the first layer dense, experts of width 48, vocabulary 128,
// BF16. Change what a test is about.
struct TinyExperts {
  enum class Order {
    kPerExpert,  // a tensor an expert and part
    kOutIn,      // stacks [E, 2 I, H] and [E, H, I]
    kInOut,      // stacks [E, H, 2 I] and [E, I, H]
  };

  std::string architecture = "Qwen3MoeForCausalLM";
  std::int64_t layers = 3, hidden = 64, experts = 8, width = 48, shared = 1, dense = 1;
  std::int64_t query_rank = 24;  // of latent attention; 0: none
  std::int64_t prediction_layers = 0;
  Order order = Order::kPerExpert;
  std::string extra;  // more fields of config.json, each followed by a comma

  bool latent() const { return architecture == "DeepseekV3ForCausalLM"; }
  bool nested() const { return architecture == "Qwen3VLMoeForConditionalGeneration"; }
  std::string root() const { return nested() ? "model.language_model." : "model."; }

  ModelConfig config() const {
    const auto number = [](const char* name, std::int64_t value) {
      return "\"" + std::string(name) + "\": " + std::to_string(value) + ", ";
    };
    std::string fields = extra + number("hidden_size", hidden) + number("num_hidden_layers", layers) +
                         number("num_attention_heads", 8) + number("intermediate_size", 96) +
                         number("vocab_size", 128) + number("moe_intermediate_size", width);
    if (latent()) {
      fields += number("n_routed_experts", experts) + number("n_shared_experts", shared) +
                number("first_k_dense_replace", dense) + number("kv_lora_rank", 32) +
                number("qk_nope_head_dim", 8) + number("qk_rope_head_dim", 4) + number("v_head_dim", 8) +
                number("num_nextn_predict_layers", prediction_layers) +
                (query_rank > 0 ? number("q_lora_rank", query_rank) : "\"q_lora_rank\": null, ");
    } else {
      std::string only = "[";
      for (std::int64_t layer = 0; layer < dense; ++layer)
        only += (layer > 0 ? ", " : "") + std::to_string(layer);
      fields += number("num_experts", experts) + number("num_key_value_heads", 2) + number("head_dim", 8) +
                "\"mlp_only_layers\": " + only + "], ";
    }
    fields += "\"model_type\": \"" +
              std::string(latent()   ? "deepseek_v3"
                          : nested() ? "qwen3_vl_moe_text"
                                     : "qwen3_moe") +
              "\"";
    if (nested()) fields = "\"model_type\": \"qwen3_vl_moe\", \"text_config\": {" + fields + "}";
    return must(ModelConfig::parse("{\"architectures\": [\"" + architecture +
                                   "\"], \"dtype\": \"bfloat16\", " + fields + "}"));
  }

  // In ascending name order.
  std::vector<TensorMeta> tensors() const {
    std::vector<TensorMeta> all;
    const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
      all.push_back({std::move(name), DType::kBF16, std::move(shape)});
    };
    const auto add_gated = [&](const std::string& at, std::int64_t inner) {
      add(at + "gate_proj.weight", {inner, hidden});
      add(at + "up_proj.weight", {inner, hidden});
      add(at + "down_proj.weight", {hidden, inner});
    };
    add(root() + "embed_tokens.weight", {128, hidden});
    add(root() + "norm.weight", {hidden});
    add("lm_head.weight", {128, hidden});
    for (std::int64_t layer = 0; layer < layers + prediction_layers; ++layer) {
      const std::string p = root() + "layers." + std::to_string(layer) + ".";
      add(p + "input_layernorm.weight", {hidden});
      add(p + "post_attention_layernorm.weight", {hidden});
      const std::string a = p + "self_attn.";
      if (latent()) {
        if (query_rank > 0) {
          add(a + "q_a_proj.weight", {query_rank, hidden});
          add(a + "q_a_layernorm.weight", {query_rank});
          add(a + "q_b_proj.weight", {8 * 12, query_rank});
        } else {
          add(a + "q_proj.weight", {8 * 12, hidden});
        }
        add(a + "kv_a_proj_with_mqa.weight", {32 + 4, hidden});
        add(a + "kv_a_layernorm.weight", {32});
        add(a + "kv_b_proj.weight", {8 * 16, 32});
        add(a + "o_proj.weight", {hidden, 8 * 8});
      } else {
        add(a + "q_proj.weight", {64, hidden});
        add(a + "k_proj.weight", {16, hidden});
        add(a + "v_proj.weight", {16, hidden});
        add(a + "o_proj.weight", {hidden, 64});
        add(a + "q_norm.weight", {8});
        add(a + "k_norm.weight", {8});
      }
      if (layer < dense) {
        add_gated(p + "mlp.", 96);
        continue;
      }
      add(p + "mlp.gate.weight", {experts, hidden});
      if (latent()) {
        all.push_back({p + "mlp.gate.e_score_correction_bias", DType::kF32, {experts}});
        if (shared > 0) add_gated(p + "mlp.shared_experts.", shared * width);
      }
      if (order == Order::kPerExpert) {
        for (std::int64_t e = 0; e < experts; ++e)
          add_gated(p + "mlp.experts." + std::to_string(e) + ".", width);
      } else {
        const bool out_in = order == Order::kOutIn;
        const std::int64_t both = 2 * width;
        add(p + "mlp.experts.gate_up_proj", {experts, out_in ? both : hidden, out_in ? hidden : both});
        add(p + "mlp.experts.down_proj", {experts, out_in ? hidden : width, out_in ? width : hidden});
      }
    }
    std::sort(all.begin(), all.end(),
              [](const TensorMeta& a, const TensorMeta& b) { return a.name < b.name; });
    return all;
  }

  // The bytes of `per_expert` (the same model with a tensor an expert) in this model's order on disk.
  Weights stacked(const Weights& per_expert) const {
    Weights weights(tensors());
    for (std::size_t i = 0; i < weights.metadata.size(); ++i) {
      const TensorMeta& meta = weights.metadata[i];
      const bool gate_up = meta.name.ends_with(".experts.gate_up_proj");
      if (!gate_up && !meta.name.ends_with(".experts.down_proj")) {
        weights.bytes[i] = per_expert.of(meta.name);
        continue;
      }
      const std::string prefix = meta.name.substr(0, meta.name.rfind('.') + 1);
      const std::int64_t inner = gate_up ? 2 * width : hidden, outer = gate_up ? hidden : width;
      for (std::int64_t e = 0; e < experts; ++e) {
        const std::string at = prefix + std::to_string(e) + ".";
        std::vector<std::byte> rows = per_expert.of(at + (gate_up ? "gate_proj.weight" : "down_proj.weight"));
        if (gate_up) {
          const std::vector<std::byte>& up = per_expert.of(at + "up_proj.weight");
          rows.insert(rows.end(), up.begin(), up.end());
        }
        for (std::int64_t r = 0; r < inner; ++r) {
          for (std::int64_t c = 0; c < outer; ++c) {
            const std::int64_t to = order == Order::kOutIn ? r * outer + c : c * inner + r;
            std::memcpy(weights.bytes[i].data() + 2 * (e * inner * outer + to),
                        rows.data() + 2 * (r * outer + c), 2);
          }
        }
      }
    }
    return weights;
  }

  // What a worker holds of these experts of a layer: columns [begin, begin + count) of the intermediate dim.
  std::vector<std::byte> w13(const Weights& per_expert, std::int64_t layer, const std::vector<int>& which,
                             std::int64_t begin, std::int64_t count) const {
    std::vector<std::vector<std::byte>> parts;
    for (const int e : which) {
      const std::string at = root() + "layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(e);
      parts.push_back(rows(per_expert, at + ".gate_proj.weight", begin, count));
      parts.push_back(rows(per_expert, at + ".up_proj.weight", begin, count));
    }
    return joined(parts);
  }
  std::vector<std::byte> w2(const Weights& per_expert, std::int64_t layer, const std::vector<int>& which,
                            std::int64_t begin, std::int64_t count) const {
    std::vector<std::vector<std::byte>> parts;
    for (const int e : which) {
      const std::string at = root() + "layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(e);
      parts.push_back(columns(per_expert, at + ".down_proj.weight", begin, count));
    }
    return joined(parts);
  }
};

// Bakes and replays over 0xCD, and loads a second model eagerly; every byte of both is equal and all guards
// are intact. Returns the replayed model.
inline std::unique_ptr<Model> exact_worker(const ModelConfig& config, const Weights& weights,
                                           const InferenceLayout& layout, std::int64_t id,
                                           const BuildOptions& options = {}) {
  auto replayed = must(build_model(config, layout, id, options));
  const Recording recording = must(bake(*replayed, weights.metadata));
  EXPECT_OK(replayed->materialise(std::byte{0xCD}, 64));
  replay(recording, *replayed, weights);
  EXPECT_OK(replayed->check_guards());

  const auto loaded = must(build_model(config, layout, id, options));
  EXPECT_OK(loaded->materialise(std::byte{0xCD}, 64));
  EXPECT_OK(load_eagerly(*loaded, weights.real()));
  EXPECT_OK(loaded->check_guards());
  for (const auto& module : replayed->modules()) {
    for (const auto& parameter : module->parameters()) {
      EXPECT_EQ(bytes_of_parameter(*replayed, module->name(), parameter->name()),
                bytes_of_parameter(*loaded, module->name(), parameter->name()))
          << parameter->full_name();
    }
  }
  return replayed;
}

}  // namespace shardpull
