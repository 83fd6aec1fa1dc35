#include "checkpoint/shapes.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/status_macros.h"
#include "base/strict_json.h"
#include "checkpoint/safetensors.h"

namespace shardpull {
namespace {

// Routed experts of one size of one shape.
struct Experts {
  std::int64_t count = 0, per_token = 0, intermediate = 0;
};

// What deepseek_v3 has besides. head_dim is not used: heads are made of these parts.
struct Latent {
  std::int64_t query_rank = 0, key_value_rank = 0, no_rope = 0, rope = 0, value = 0;
  std::int64_t dense_layers = 0;       // the first ones
  std::int64_t prediction_layers = 0;  // past the model's own
  std::int64_t groups = 0, groups_per_token = 0;
};

// The numbers of one size of one shape.
struct Sizes {
  std::int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0, vocab = 0;
  Experts experts{};
  Latent latent{};
};

enum class Family { kBert, kLlama, kQwen2, kQwen3, kQwen3Moe, kDeepseekV3, kNone };

// The proportions of the published models. tiny keeps 8 query and 2 KV heads, so that every replication of KV
// heads up to eight ranks can be tested, and 8 experts; its vocabulary is a multiple of 64 until an override
// says otherwise.
struct Row {
  ShapeInfo info;
  Family family;
  bool tied;
  std::array<Sizes, 3> sizes;  // by ShapeSize
};

const std::vector<Row>& catalogue() {
  static const std::vector<Row> rows = {
      {{"minilm", "bert", true},
       Family::kBert,
       true,
       {{{64, 3, 4, 4, 16, 96, 1024}, {384, 6, 12, 12, 32, 1536, 30522}, {384, 6, 12, 12, 32, 1536, 30522}}}},
      {{"qwen2-0.5b", "qwen2", true},
       Family::kQwen2,
       true,
       {{{64, 4, 8, 2, 8, 96, 1024},
         {896, 12, 14, 2, 64, 4864, 151936},
         {896, 24, 14, 2, 64, 4864, 151936}}}},
      {{"qwen3-0.6b", "qwen3", true},
       Family::kQwen3,
       true,
       {{{64, 4, 8, 2, 8, 96, 1024},
         {1024, 9, 16, 8, 128, 3072, 151936},
         {1024, 28, 16, 8, 128, 3072, 151936}}}},
      {{"qwen3-8b", "qwen3", true},
       Family::kQwen3,
       false,
       {{{64, 4, 8, 2, 8, 96, 1024},
         {2048, 4, 16, 4, 128, 6144, 151936},
         {4096, 36, 32, 8, 128, 12288, 151936}}}},
      {{"llama-3-70b", "llama", true},
       Family::kLlama,
       false,
       {{{64, 4, 8, 2, 8, 96, 1024},
         {2048, 6, 16, 2, 128, 7168, 128256},
         {8192, 80, 64, 8, 128, 28672, 128256}}}},
      {{"qwen3-30b-a3b", "qwen3_moe", true},
       Family::kQwen3Moe,
       false,
       {{{64, 4, 8, 2, 8, 96, 1024, {8, 2, 32}},
         {1024, 4, 8, 1, 128, 3072, 151936, {32, 4, 384}},
         {2048, 48, 32, 4, 128, 6144, 151936, {128, 8, 768}}}}},
      {{"qwen3-235b-a22b", "qwen3_moe", true},
       Family::kQwen3Moe,
       false,
       {{{64, 4, 8, 2, 8, 96, 1024, {8, 2, 32}},
         {1024, 4, 16, 1, 128, 3072, 151936, {64, 8, 384}},
         {4096, 94, 64, 4, 128, 12288, 151936, {128, 8, 1536}}}}},
      {{"glm-4.5-air", "glm4_moe", false}, Family::kNone, false, {}},
      {{"deepseek-v3", "deepseek_v3", true},
       Family::kDeepseekV3,
       false,
       {{{64, 3, 8, 8, 0, 96, 1024, {8, 2, 32}, {48, 32, 16, 8, 16, 1, 1, 2, 1}},
         {1024, 4, 16, 16, 0, 2560, 129280, {32, 4, 512}, {384, 512, 128, 64, 128, 1, 1, 8, 4}},
         {7168, 61, 128, 128, 0, 18432, 129280, {256, 8, 2048}, {1536, 512, 128, 64, 128, 3, 1, 8, 4}}}}},
      {{"kimi-k2", "deepseek_v3", true},
       Family::kDeepseekV3,
       false,
       {{{64, 3, 8, 8, 0, 96, 1024, {8, 2, 32}, {48, 32, 16, 8, 16, 1, 0, 1, 1}},
         {1024, 4, 8, 8, 0, 2560, 163840, {48, 8, 512}, {384, 512, 128, 64, 128, 1, 0, 1, 1}},
         {7168, 61, 64, 64, 0, 18432, 163840, {384, 8, 2048}, {1536, 512, 128, 64, 128, 1, 0, 1, 1}}}}},
  };
  return rows;
}

std::string known_keys() {
  std::vector<std::string_view> keys;
  for (const Row& row : catalogue()) {
    if (row.info.available) keys.push_back(row.info.key);
  }
  return fmt::format("{}", fmt::join(keys, ", "));
}

Status bad(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = Reason::kBadArgument});
}

Status check_range(std::string_view what, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return {};
  return bad(fmt::format("{} {} is not between {} and {}", what, value, low, high));
}

// Appends BF16 tensors.
class TensorList {
 public:
  explicit TensorList(std::vector<TensorMeta>& tensors) : tensors_(tensors) {}
  void operator()(std::string name, std::vector<std::int64_t> shape) const {
    tensors_.push_back({std::move(name), DType::kBF16, std::move(shape)});
  }

 private:
  std::vector<TensorMeta>& tensors_;
};

// A gated feed-forward network named `at`gate_proj and so on.
void add_gated(const TensorList& add, const std::string& at, std::int64_t hidden, std::int64_t intermediate) {
  add(at + "gate_proj.weight", {intermediate, hidden});
  add(at + "up_proj.weight", {intermediate, hidden});
  add(at + "down_proj.weight", {hidden, intermediate});
}

// A router and its experts, one tensor each.
void add_experts(const TensorList& add, const std::string& at, const Sizes& s) {
  add(at + "gate.weight", {s.experts.count, s.hidden});
  for (std::int64_t expert = 0; expert < s.experts.count; ++expert) {
    add_gated(add, fmt::format("{}experts.{}.", at, expert), s.hidden, s.experts.intermediate);
  }
}

// A decoder of the llama line: what the four families share, and what tells them apart.
void add_decoder(const Row& row, const Sizes& s, bool tied, nlohmann::ordered_json& config,
                 std::vector<TensorMeta>& tensors) {
  const bool qwen2 = row.family == Family::kQwen2;
  const bool moe = row.family == Family::kQwen3Moe;
  const bool qwen3 = row.family == Family::kQwen3 || moe;
  config["architectures"] = {qwen2   ? "Qwen2ForCausalLM"
                             : moe   ? "Qwen3MoeForCausalLM"
                             : qwen3 ? "Qwen3ForCausalLM"
                                     : "LlamaForCausalLM"};
  config["model_type"] = row.info.family;
  config["hidden_size"] = s.hidden;
  config["num_hidden_layers"] = s.layers;
  config["num_attention_heads"] = s.heads;
  config["num_key_value_heads"] = s.kv_heads;
  if (!qwen2) config["head_dim"] = s.head_dim;
  config["intermediate_size"] = s.intermediate;
  config["vocab_size"] = s.vocab;
  config["tie_word_embeddings"] = tied;
  if (!qwen2) config["attention_bias"] = false;
  if (row.family == Family::kLlama) config["mlp_bias"] = false;
  if (moe) {
    config["num_experts"] = s.experts.count;
    config["num_experts_per_tok"] = s.experts.per_token;
    config["moe_intermediate_size"] = s.experts.intermediate;
    config["norm_topk_prob"] = true;
    config["decoder_sparse_step"] = 1;
    config["mlp_only_layers"] = nlohmann::ordered_json::array();
  }
  config["hidden_act"] = "silu";
  config["max_position_embeddings"] = row.family == Family::kLlama ? 8192 : qwen3 ? 40960 : 131072;
  config["rms_norm_eps"] = row.family == Family::kLlama ? 1e-5 : 1e-6;
  config["rope_theta"] = row.family == Family::kLlama ? 500000.0 : 1000000.0;
  config["torch_dtype"] = "bfloat16";

  const TensorList add(tensors);
  const std::int64_t q = s.heads * s.head_dim;
  const std::int64_t kv = s.kv_heads * s.head_dim;
  add("model.embed_tokens.weight", {s.vocab, s.hidden});
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    const std::string at = fmt::format("model.layers.{}.", layer);
    add(at + "input_layernorm.weight", {s.hidden});
    add(at + "post_attention_layernorm.weight", {s.hidden});
    add(at + "self_attn.q_proj.weight", {q, s.hidden});
    add(at + "self_attn.k_proj.weight", {kv, s.hidden});
    add(at + "self_attn.v_proj.weight", {kv, s.hidden});
    add(at + "self_attn.o_proj.weight", {s.hidden, q});
    if (qwen2) {
      add(at + "self_attn.q_proj.bias", {q});
      add(at + "self_attn.k_proj.bias", {kv});
      add(at + "self_attn.v_proj.bias", {kv});
    }
    if (qwen3) {
      add(at + "self_attn.q_norm.weight", {s.head_dim});
      add(at + "self_attn.k_norm.weight", {s.head_dim});
    }
    if (moe) {
      add_experts(add, at + "mlp.", s);
    } else {
      add_gated(add, at + "mlp.", s.hidden, s.intermediate);
    }
  }
  add("model.norm.weight", {s.hidden});
  if (!tied) add("lm_head.weight", {s.vocab, s.hidden});
}

// Latent attention, dense layers first, then routed and shared experts; layers that predict further tokens
// last.
void add_deepseek(const Row& row, const Sizes& s, bool tied, nlohmann::ordered_json& config,
                  std::vector<TensorMeta>& tensors) {
  constexpr std::int64_t kSharedExperts = 1;
  const Latent& latent = s.latent;
  const bool kimi = latent.groups == 1;
  config["architectures"] = {"DeepseekV3ForCausalLM"};
  config["model_type"] = row.info.family;
  config["hidden_size"] = s.hidden;
  config["num_hidden_layers"] = s.layers;
  config["num_attention_heads"] = s.heads;
  config["num_key_value_heads"] = s.kv_heads;
  config["intermediate_size"] = s.intermediate;
  config["vocab_size"] = s.vocab;
  config["tie_word_embeddings"] = tied;
  config["attention_bias"] = false;
  config["q_lora_rank"] = latent.query_rank;
  config["kv_lora_rank"] = latent.key_value_rank;
  config["qk_nope_head_dim"] = latent.no_rope;
  config["qk_rope_head_dim"] = latent.rope;
  config["v_head_dim"] = latent.value;
  config["first_k_dense_replace"] = latent.dense_layers;
  config["moe_layer_freq"] = 1;
  config["n_routed_experts"] = s.experts.count;
  config["n_shared_experts"] = kSharedExperts;
  config["num_experts_per_tok"] = s.experts.per_token;
  config["moe_intermediate_size"] = s.experts.intermediate;
  config["n_group"] = latent.groups;
  config["topk_group"] = latent.groups_per_token;
  config["topk_method"] = "noaux_tc";
  config["scoring_func"] = "sigmoid";
  config["norm_topk_prob"] = true;
  config["routed_scaling_factor"] = kimi ? 2.827 : 2.5;
  config["num_nextn_predict_layers"] = latent.prediction_layers;
  config["hidden_act"] = "silu";
  config["max_position_embeddings"] = kimi ? 131072 : 163840;
  config["rms_norm_eps"] = 1e-6;
  config["rope_theta"] = kimi ? 50000.0 : 10000.0;
  config["torch_dtype"] = "bfloat16";

  const TensorList add(tensors);
  add("model.embed_tokens.weight", {s.vocab, s.hidden});
  for (std::int64_t layer = 0; layer < s.layers + latent.prediction_layers; ++layer) {
    const std::string at = fmt::format("model.layers.{}.", layer);
    add(at + "input_layernorm.weight", {s.hidden});
    add(at + "post_attention_layernorm.weight", {s.hidden});
    add(at + "self_attn.q_a_proj.weight", {latent.query_rank, s.hidden});
    add(at + "self_attn.q_a_layernorm.weight", {latent.query_rank});
    add(at + "self_attn.q_b_proj.weight", {s.heads * (latent.no_rope + latent.rope), latent.query_rank});
    add(at + "self_attn.kv_a_proj_with_mqa.weight", {latent.key_value_rank + latent.rope, s.hidden});
    add(at + "self_attn.kv_a_layernorm.weight", {latent.key_value_rank});
    add(at + "self_attn.kv_b_proj.weight",
        {s.heads * (latent.no_rope + latent.value), latent.key_value_rank});
    add(at + "self_attn.o_proj.weight", {s.hidden, s.heads * latent.value});
    if (layer < latent.dense_layers) {
      add_gated(add, at + "mlp.", s.hidden, s.intermediate);
    } else {
      add_experts(add, at + "mlp.", s);
      tensors.push_back({at + "mlp.gate.e_score_correction_bias", DType::kF32, {s.experts.count}});
      add_gated(add, at + "mlp.shared_experts.", s.hidden, kSharedExperts * s.experts.intermediate);
    }
    if (layer >= s.layers) {
      add(at + "embed_tokens.weight", {s.vocab, s.hidden});
      add(at + "enorm.weight", {s.hidden});
      add(at + "hnorm.weight", {s.hidden});
      add(at + "eh_proj.weight", {s.hidden, 2 * s.hidden});
      add(at + "shared_head.norm.weight", {s.hidden});
      add(at + "shared_head.head.weight", {s.vocab, s.hidden});
    }
  }
  add("model.norm.weight", {s.hidden});
  if (!tied) add("lm_head.weight", {s.vocab, s.hidden});
}

void add_bert(const Sizes& s, nlohmann::ordered_json& config, std::vector<TensorMeta>& tensors) {
  constexpr std::int64_t kPositions = 512;
  constexpr std::int64_t kTokenTypes = 2;
  config["architectures"] = {"BertModel"};
  config["model_type"] = "bert";
  config["hidden_size"] = s.hidden;
  config["num_hidden_layers"] = s.layers;
  config["num_attention_heads"] = s.heads;
  config["intermediate_size"] = s.intermediate;
  config["vocab_size"] = s.vocab;
  config["max_position_embeddings"] = kPositions;
  config["type_vocab_size"] = kTokenTypes;
  config["position_embedding_type"] = "absolute";
  config["hidden_act"] = "gelu";
  config["layer_norm_eps"] = 1e-12;
  config["pad_token_id"] = 0;
  config["torch_dtype"] = "float32";

  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    tensors.push_back({std::move(name), DType::kF32, std::move(shape)});
  };
  const auto add_linear = [&](const std::string& name, std::int64_t out, std::int64_t in) {
    add(name + ".weight", {out, in});
    add(name + ".bias", {out});
  };
  const auto add_norm = [&](const std::string& name) {
    add(name + ".weight", {s.hidden});
    add(name + ".bias", {s.hidden});
  };
  tensors.push_back({"embeddings.position_ids", DType::kI64, {1, kPositions}});
  add("embeddings.word_embeddings.weight", {s.vocab, s.hidden});
  add("embeddings.position_embeddings.weight", {kPositions, s.hidden});
  add("embeddings.token_type_embeddings.weight", {kTokenTypes, s.hidden});
  add_norm("embeddings.LayerNorm");
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    const std::string at = fmt::format("encoder.layer.{}.", layer);
    for (const char* part : {"query", "key", "value"})
      add_linear(at + "attention.self." + part, s.hidden, s.hidden);
    add_linear(at + "attention.output.dense", s.hidden, s.hidden);
    add_norm(at + "attention.output.LayerNorm");
    add_linear(at + "intermediate.dense", s.intermediate, s.hidden);
    add_linear(at + "output.dense", s.hidden, s.intermediate);
    add_norm(at + "output.LayerNorm");
  }
  add_linear("pooler.dense", s.hidden, s.hidden);
}

Status apply_overrides(const Row& row, const ShapeOverrides& overrides, Sizes& s, bool& tied) {
  if (overrides.vocab) {
    SHARDPULL_RETURN_IF_ERROR(
        check_range("vocab", *overrides.vocab, 1, std::numeric_limits<std::int32_t>::max()));
    s.vocab = *overrides.vocab;
  }
  if (overrides.layers) {
    SHARDPULL_RETURN_IF_ERROR(check_range("layers", *overrides.layers, 1, 10'000));
    s.layers = *overrides.layers;
  }
  if (overrides.kv_heads) {
    if (row.family == Family::kBert)
      return bad(fmt::format("{}: bert has no KV heads of their own to change", row.info.key));
    if (row.family == Family::kDeepseekV3) {
      return bad(fmt::format("{}: latent attention has no KV heads of its own to change", row.info.key));
    }
    SHARDPULL_RETURN_IF_ERROR(check_range("kv_heads", *overrides.kv_heads, 1, s.heads));
    if (s.heads % *overrides.kv_heads != 0) {
      return bad(fmt::format("kv_heads {} does not divide the {} attention heads of {}", *overrides.kv_heads,
                             s.heads, row.info.key));
    }
    s.kv_heads = *overrides.kv_heads;
  }
  if (overrides.tied) {
    if (row.family == Family::kBert) return bad(fmt::format("{}: bert has no head to tie", row.info.key));
    tied = *overrides.tied;
  }
  return {};
}

}  // namespace

std::string_view to_string(ShapeSize size) {
  switch (size) {
    case ShapeSize::kTiny:
      return "tiny";
    case ShapeSize::kScaled:
      return "scaled";
    case ShapeSize::kFull:
      return "full";
  }
  return "unknown";
}

const std::vector<ShapeInfo>& known_shapes() {
  static const std::vector<ShapeInfo> infos = [] {
    std::vector<ShapeInfo> out;
    for (const Row& row : catalogue()) out.push_back(row.info);
    return out;
  }();
  return infos;
}

Result<ShapeSpec> parse_shape_spec(std::string_view text) {
  const auto form = [&](std::string_view problem) {
    return bad(
        fmt::format("shape {}: {}; give KEY:SIZE with KEY one of {} and SIZE one of tiny, scaled, full",
                    in_quotes(text), problem, known_keys()));
  };
  const std::size_t colon = text.find(':');
  if (colon == text.npos) return form("no ':'");
  const std::string_view key = text.substr(0, colon);
  const std::string_view size = text.substr(colon + 1);
  const auto& infos = known_shapes();
  if (std::none_of(infos.begin(), infos.end(), [&](const ShapeInfo& info) { return info.key == key; })) {
    return form("unknown key " + in_quotes(key));
  }
  for (const ShapeSize candidate : {ShapeSize::kTiny, ShapeSize::kScaled, ShapeSize::kFull}) {
    if (size == to_string(candidate)) return ShapeSpec{std::string(key), candidate};
  }
  return form("unknown size " + in_quotes(size));
}

Result<ModelShape> shape_config(const ShapeSpec& spec, const ShapeOverrides& overrides) {
  const auto& rows = catalogue();
  const auto row =
      std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.info.key == spec.key; });
  if (row == rows.end())
    return bad(fmt::format("unknown shape {}; known: {}", in_quotes(spec.key), known_keys()));
  if (!row->info.available) {
    return Status(StatusCode::kUnimplemented,
                  fmt::format("shape {}: the family {} is not supported yet; available: {}", spec.key,
                              row->info.family, known_keys()),
                  {.reason = Reason::kUnknownArchitecture});
  }
  const auto size = static_cast<std::size_t>(spec.size);
  if (size >= row->sizes.size()) return bad("unknown shape size");
  Sizes sizes = row->sizes[size];
  bool tied = row->tied;
  SHARDPULL_RETURN_IF_ERROR(apply_overrides(*row, overrides, sizes, tied));

  ModelShape out;
  out.spec = spec;
  nlohmann::ordered_json config = nlohmann::ordered_json::object();
  if (row->family == Family::kBert) {
    add_bert(sizes, config, out.tensors);
  } else if (row->family == Family::kDeepseekV3) {
    add_deepseek(*row, sizes, tied, config, out.tensors);
  } else {
    add_decoder(*row, sizes, tied, config, out.tensors);
  }
  out.config_json = config.dump(2) + "\n";
  std::sort(out.tensors.begin(), out.tensors.end(),
            [](const TensorMeta& a, const TensorMeta& b) { return a.name < b.name; });
  for (const TensorMeta& meta : out.tensors) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes, tensor_bytes(meta.dtype, meta.shape));
    const auto total = checked_add(out.total_bytes, bytes);
    if (!total) return bad("the shape's size overflows");
    out.total_bytes = *total;
  }
  return out;
}

}  // namespace shardpull
