// Small checkpoints of the families, and the check that a worker's bytes are exact by two independent paths.
#pragma once

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
