// ModelConfig: what a Hugging Face config.json says about a model's shape.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/dtype.h"
#include "shardpull/status.h"

namespace shardpull {

// A value type. Every number that is present has been checked against a range; an absent one is 0 (or nullopt) unless a
// default is given here. Which fields a model needs is the family's business: require().
//
// A multimodal config nests the language model in "text_config": sizes are then read there first and at the top level second;
// "tie_word_embeddings" and the dtype at the top level first and nested second.
struct ModelConfig {
  // Reads config.json of `directory` (or the file itself). NOT_FOUND, or DATA_LOSS with reason kCheckpointMalformed naming
  // file, field and rule: not JSON, a key twice, nested too deep, a field of another type, a number out of its range.
  static Result<ModelConfig> load(const std::filesystem::path& directory_or_file);
  // The same from text; `origin` names it in messages.
  static Result<ModelConfig> parse(std::string_view text, std::string_view origin = "config.json");

  // Fails (reason kCheckpointMalformed) naming the first of `fields` that config.json does not give, and the architecture. The
  // names are those of config.json, for the fields listed below up to "vocab_size", "head_dim" and the MoE fields included.
  Status require(std::initializer_list<std::string_view> fields) const;

  // "LlamaForCausalLM" of a list with one entry; all of them joined by ", "; "(none)".
  std::string architecture() const;

  std::string origin;  // the file, for messages
  std::vector<std::string> architectures;
  std::string model_type;       // top level
  std::string text_model_type;  // of text_config; equals model_type without one
  bool nested = false;          // there is a text_config

  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  // One per layer. config.json may give a number or a list as long as the layers; default: num_attention_heads.
  std::vector<std::int64_t> num_key_value_heads;
  // Default: 128 for qwen3, hidden_size / num_attention_heads (rounded down) otherwise.
  std::int64_t head_dim = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 0;
  std::int64_t type_vocab_size = 0;  // bert
  double rms_norm_eps = 0;
  double layer_norm_eps = 0;
  std::string hidden_act;
  std::string position_embedding_type;  // bert

  bool tie_word_embeddings = false;  // default false, as the families here have it
  bool attention_bias = false;
  bool mlp_bias = false;

  // "dtype" or "torch_dtype". Absent, null and "auto" give nothing.
  std::optional<DType> dtype;

  // Mixture of experts and latent attention; parsed wherever they appear.
  std::optional<std::int64_t> num_experts;  // num_experts, num_local_experts or n_routed_experts
  std::optional<std::int64_t> num_experts_per_tok;
  std::optional<std::int64_t> moe_intermediate_size;
  std::optional<std::int64_t> n_shared_experts;
  std::optional<std::int64_t> first_k_dense_replace;
  std::optional<std::int64_t> moe_layer_freq;
  std::string topk_method;  // "noaux_tc" routes with a correction bias; "" when absent
  std::optional<std::int64_t> decoder_sparse_step;
  std::vector<std::int64_t> mlp_only_layers;
  std::optional<std::int64_t> q_lora_rank;
  std::optional<std::int64_t> kv_lora_rank;
  std::optional<std::int64_t> qk_nope_head_dim;
  std::optional<std::int64_t> qk_rope_head_dim;
  std::optional<std::int64_t> v_head_dim;
  std::optional<std::int64_t> num_nextn_predict_layers;

  // Every other top-level key, with its value as compact JSON text.
  std::map<std::string, std::string> other;
  // Fields that were resolved between two places, for people.
  std::vector<std::string> notes;
};

}  // namespace shardpull
