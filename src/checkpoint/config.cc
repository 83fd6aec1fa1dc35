#include "checkpoint/config.h"

#include <limits>
#include <set>
#include <system_error>
#include <utility>

#include "base/status_macros.h"
#include "base/strict_json.h"
#include "checkpoint/posix_file.h"

namespace shardpull {
namespace {

using json = nlohmann::json;

constexpr std::uint64_t kMaxConfigBytes = 16ull << 20;
constexpr std::size_t kMaxConfigDepth = 64;

// Ranges that no real model leaves; products of any four of them still fit 64 bits with room to spare, or are checked.
constexpr std::int64_t kMaxWidth = 1 << 24;
constexpr std::int64_t kMaxLayers = 10'000;
constexpr std::int64_t kMaxHeads = 65'536;
constexpr std::int64_t kMaxVocab = std::numeric_limits<std::int32_t>::max();

// Reads fields out of the two objects of a config and remembers which were taken.
class Fields {
 public:
  Fields(const json& top, const json* text, std::string who) : top_(top), text_(text), who_(std::move(who)) {}

  // Null when absent everywhere or null. The nested object is asked first, unless `top_first`.
  const json* find(std::string_view name, bool top_first = false) {
    taken_.insert(std::string(name));
    const json* first = top_first ? &top_ : text_;
    const json* second = top_first ? text_ : &top_;
    for (const json* object : {first, second}) {
      if (object == nullptr) continue;
      const auto found = object->find(name);
      if (found != object->end() && !found->is_null()) return &*found;
    }
    return nullptr;
  }

  Status refuse(std::string_view field, std::string_view rule) const {
    return Status(StatusCode::kDataLoss, fmt::format("{}: field \"{}\": {}", who_, field, rule),
                  {.reason = Reason::kCheckpointMalformed});
  }

  Status integer(std::string_view name, const json& value, std::int64_t low, std::int64_t high, std::int64_t& out) const {
    if (!value.is_number_integer()) return refuse(name, fmt::format("must be an integer, not {}", shown(value)));
    const bool above_int64 = value.is_number_unsigned() && value.get<std::uint64_t>() >> 63 != 0;
    if (above_int64 || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high) {
      return refuse(name, fmt::format("{} is not between {} and {}", shown(value), low, high));
    }
    out = value.get<std::int64_t>();
    return {};
  }

  Status take(std::string_view name, std::int64_t low, std::int64_t high, std::int64_t& out) {
    const json* value = find(name);
    return value == nullptr ? Status() : integer(name, *value, low, high, out);
  }
  Status take(std::string_view name, std::int64_t low, std::int64_t high, std::optional<std::int64_t>& out) {
    const json* value = find(name);
    if (value == nullptr) return {};
    std::int64_t number = 0;
    SHARDPULL_RETURN_IF_ERROR(integer(name, *value, low, high, number));
    out = number;
    return {};
  }
  Status take(std::string_view name, std::string& out, bool top_first = false) {
    const json* value = find(name, top_first);
    if (value == nullptr) return {};
    if (!value->is_string()) return refuse(name, fmt::format("must be a string, not {}", shown(*value)));
    out = value->get<std::string>();
    return {};
  }
  Status take(std::string_view name, bool& out) {
    const json* value = find(name);
    if (value == nullptr) return {};
    if (!value->is_boolean()) return refuse(name, fmt::format("must be true or false, not {}", shown(*value)));
    out = value->get<bool>();
    return {};
  }
  Status take(std::string_view name, double& out) {
    const json* value = find(name);
    if (value == nullptr) return {};
    if (!value->is_number()) return refuse(name, fmt::format("must be a number, not {}", shown(*value)));
    const double number = value->get<double>();
    if (!(number > 0) || number > 1) return refuse(name, fmt::format("{} is not above 0 and at most 1", shown(*value)));
    out = number;
    return {};
  }
  Status take_list(std::string_view name, std::int64_t low, std::int64_t high, std::vector<std::int64_t>& out) {
    const json* value = find(name);
    if (value == nullptr) return {};
    if (!value->is_array()) return refuse(name, fmt::format("must be a list, not {}", shown(*value)));
    if (value->size() > static_cast<std::size_t>(kMaxLayers)) return refuse(name, fmt::format("has {} entries", value->size()));
    for (const json& item : *value) SHARDPULL_RETURN_IF_ERROR(integer(name, item, low, high, out.emplace_back()));
    return {};
  }

  // A value as messages show it, on one line and cut.
  static std::string shown(const json& value) {
    constexpr std::size_t kShown = 80;
    const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
    return text.size() <= kShown ? text : text.substr(0, kShown) + "...";
  }

  bool taken(const std::string& name) const { return taken_.contains(name); }

 private:
  const json& top_;
  const json* text_;
  std::string who_;
  std::set<std::string> taken_;
};

// The top level counts before the language model's part, as inference engines have it.
Status parse_dtype(const json& top, const json* text, Fields& fields, ModelConfig& config) {
  for (const json* object : {&top, text}) {
    if (object == nullptr || config.dtype) continue;
    for (const std::string_view field : {"dtype", "torch_dtype"}) {
      fields.find(field);  // taken
      const auto value = object->find(field);
      if (value == object->end() || value->is_null() || *value == "auto") continue;
      if (!value->is_string()) return fields.refuse(field, fmt::format("must be a string, not {}", Fields::shown(*value)));
      const auto dtype = dtype_from_torch_name(value->get_ref<const std::string&>());
      if (!dtype.ok()) return fields.refuse(field, dtype.status().message());
      if (config.dtype && *config.dtype != *dtype) {
        return fields.refuse(field, fmt::format("says {}, \"dtype\" says {}", dtype_name(*dtype), dtype_name(*config.dtype)));
      }
      config.dtype = *dtype;
    }
  }
  return {};
}

Status parse_kv_heads(Fields& fields, ModelConfig& config) {
  constexpr std::string_view kField = "num_key_value_heads";
  const json* value = fields.find(kField);
  const auto layers = static_cast<std::size_t>(config.num_hidden_layers);
  if (value == nullptr) {
    if (config.num_attention_heads > 0) config.num_key_value_heads.assign(layers, config.num_attention_heads);
    return {};
  }
  if (value->is_array()) {
    SHARDPULL_RETURN_IF_ERROR(fields.take_list(kField, 1, kMaxHeads, config.num_key_value_heads));
    if (config.num_key_value_heads.size() != layers) {
      return fields.refuse(kField, fmt::format("lists {} layers, num_hidden_layers is {}", config.num_key_value_heads.size(),
                                               config.num_hidden_layers));
    }
  } else {
    std::int64_t number = 0;
    SHARDPULL_RETURN_IF_ERROR(fields.integer(kField, *value, 1, kMaxHeads, number));
    config.num_key_value_heads.assign(layers, number);
  }
  for (const std::int64_t heads : config.num_key_value_heads) {
    if (config.num_attention_heads > 0 && config.num_attention_heads % heads != 0) {
      return fields.refuse(kField, fmt::format("{} does not divide num_attention_heads {}", heads, config.num_attention_heads));
    }
  }
  return {};
}

Status parse_fields(Fields& fields, ModelConfig& config) {
  SHARDPULL_RETURN_IF_ERROR(fields.take("hidden_size", 1, kMaxWidth, config.hidden_size));
  SHARDPULL_RETURN_IF_ERROR(fields.take("num_hidden_layers", 1, kMaxLayers, config.num_hidden_layers));
  SHARDPULL_RETURN_IF_ERROR(fields.take("num_attention_heads", 1, kMaxHeads, config.num_attention_heads));
  SHARDPULL_RETURN_IF_ERROR(fields.take("head_dim", 1, kMaxWidth, config.head_dim));
  SHARDPULL_RETURN_IF_ERROR(fields.take("intermediate_size", 1, kMaxWidth, config.intermediate_size));
  SHARDPULL_RETURN_IF_ERROR(fields.take("vocab_size", 1, kMaxVocab, config.vocab_size));
  SHARDPULL_RETURN_IF_ERROR(fields.take("max_position_embeddings", 1, kMaxVocab, config.max_position_embeddings));
  SHARDPULL_RETURN_IF_ERROR(fields.take("type_vocab_size", 1, kMaxWidth, config.type_vocab_size));
  SHARDPULL_RETURN_IF_ERROR(fields.take("rms_norm_eps", config.rms_norm_eps));
  SHARDPULL_RETURN_IF_ERROR(fields.take("layer_norm_eps", config.layer_norm_eps));
  SHARDPULL_RETURN_IF_ERROR(fields.take("hidden_act", config.hidden_act));
  SHARDPULL_RETURN_IF_ERROR(fields.take("position_embedding_type", config.position_embedding_type));
  SHARDPULL_RETURN_IF_ERROR(fields.take("attention_bias", config.attention_bias));
  SHARDPULL_RETURN_IF_ERROR(fields.take("mlp_bias", config.mlp_bias));

  if (config.head_dim == 0) {
    if (config.text_model_type == "qwen3") {
      config.head_dim = 128;
    } else if (config.num_attention_heads > 0) {
      config.head_dim = config.hidden_size / config.num_attention_heads;
    }
  }
  if (config.num_hidden_layers > 0) SHARDPULL_RETURN_IF_ERROR(parse_kv_heads(fields, config));

  for (const std::string_view name : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (!config.num_experts) SHARDPULL_RETURN_IF_ERROR(fields.take(name, 0, kMaxHeads, config.num_experts));
  }
  SHARDPULL_RETURN_IF_ERROR(fields.take("num_experts_per_tok", 0, kMaxHeads, config.num_experts_per_tok));
  SHARDPULL_RETURN_IF_ERROR(fields.take("moe_intermediate_size", 1, kMaxWidth, config.moe_intermediate_size));
  SHARDPULL_RETURN_IF_ERROR(fields.take("n_shared_experts", 0, kMaxHeads, config.n_shared_experts));
  SHARDPULL_RETURN_IF_ERROR(fields.take("first_k_dense_replace", 0, kMaxLayers, config.first_k_dense_replace));
  SHARDPULL_RETURN_IF_ERROR(fields.take("moe_layer_freq", 1, kMaxLayers, config.moe_layer_freq));
  SHARDPULL_RETURN_IF_ERROR(fields.take("topk_method", config.topk_method));
  SHARDPULL_RETURN_IF_ERROR(fields.take("decoder_sparse_step", 0, kMaxLayers, config.decoder_sparse_step));
  SHARDPULL_RETURN_IF_ERROR(fields.take_list("mlp_only_layers", 0, kMaxLayers, config.mlp_only_layers));
  SHARDPULL_RETURN_IF_ERROR(fields.take("q_lora_rank", 1, kMaxWidth, config.q_lora_rank));
  SHARDPULL_RETURN_IF_ERROR(fields.take("kv_lora_rank", 1, kMaxWidth, config.kv_lora_rank));
  SHARDPULL_RETURN_IF_ERROR(fields.take("qk_nope_head_dim", 0, kMaxWidth, config.qk_nope_head_dim));
  SHARDPULL_RETURN_IF_ERROR(fields.take("qk_rope_head_dim", 0, kMaxWidth, config.qk_rope_head_dim));
  SHARDPULL_RETURN_IF_ERROR(fields.take("v_head_dim", 1, kMaxWidth, config.v_head_dim));
  return fields.take("num_nextn_predict_layers", 0, kMaxLayers, config.num_nextn_predict_layers);
}

// The head is tied when the top level says so, or, where it does not speak, when the language model's own part does.
Status parse_tie(const json& top, const json* text, Fields& fields, ModelConfig& config) {
  constexpr std::string_view kField = "tie_word_embeddings";
  const json* value = fields.find(kField, /*top_first=*/true);
  if (value == nullptr) return {};
  if (!value->is_boolean()) return fields.refuse(kField, fmt::format("must be true or false, not {}", Fields::shown(*value)));
  config.tie_word_embeddings = value->get<bool>();
  if (text == nullptr) return {};
  const auto nested = text->find(kField);
  if (nested == text->end() || !nested->is_boolean()) return {};
  const auto outer = top.find(kField);
  if (outer == top.end() || outer->is_null()) {
    config.notes.push_back(fmt::format("{} = {} taken from text_config", kField, config.tie_word_embeddings));
  } else if (*outer != *nested) {
    config.notes.push_back(fmt::format("{}: the top level says {}, text_config says {}; the top level counts", kField,
                                       outer->dump(), nested->dump()));
  }
  return {};
}

}  // namespace

Result<ModelConfig> ModelConfig::load(const std::filesystem::path& directory_or_file) {
  std::error_code error;
  const bool directory = std::filesystem::is_directory(directory_or_file, error);
  const std::filesystem::path path = directory ? directory_or_file / "config.json" : directory_or_file;
  SHARDPULL_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxConfigBytes));
  return parse(text, path.native());
}

Result<ModelConfig> ModelConfig::parse(std::string_view text, std::string_view origin) {
  if (text.size() > kMaxConfigBytes) {
    return Status(StatusCode::kResourceExhausted, fmt::format("{}: {} bytes, the limit is {}", origin, text.size(), kMaxConfigBytes),
                  {.reason = Reason::kLimit});
  }
  if (text.empty()) return malformed(origin, {}, "empty (0 bytes): an interrupted download?");
  SHARDPULL_RETURN_IF_ERROR(check_json(text, kMaxConfigDepth, origin));
  const json top = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!top.is_object()) return malformed(origin, {}, "a config is a JSON object");

  ModelConfig config;
  config.origin = origin;
  const json* nested = nullptr;
  if (const auto found = top.find("text_config"); found != top.end() && found->is_object()) nested = &*found;
  config.nested = nested != nullptr;

  if (const auto found = top.find("architectures"); found != top.end() && !found->is_null()) {
    if (!found->is_array()) return malformed(origin, {}, "field \"architectures\": must be a list of strings");
    for (const json& item : *found) {
      if (!item.is_string()) return malformed(origin, {}, "field \"architectures\": must be a list of strings");
      config.architectures.push_back(item.get<std::string>());
    }
  }
  Fields fields(top, nested, fmt::format("{} ({})", origin, config.architecture()));
  SHARDPULL_RETURN_IF_ERROR(fields.take("model_type", config.text_model_type));
  SHARDPULL_RETURN_IF_ERROR(fields.take("model_type", config.model_type, /*top_first=*/true));
  SHARDPULL_RETURN_IF_ERROR(parse_tie(top, nested, fields, config));
  SHARDPULL_RETURN_IF_ERROR(parse_dtype(top, nested, fields, config));
  SHARDPULL_RETURN_IF_ERROR(parse_fields(fields, config));

  for (const auto& [key, value] : top.items()) {
    if (key != "architectures" && !fields.taken(key)) config.other.emplace(key, value.dump());
  }
  return config;
}

Status ModelConfig::require(std::initializer_list<std::string_view> fields) const {
  const auto present = [&](std::string_view field) -> std::optional<bool> {
    const std::pair<std::string_view, bool> table[] = {
        {"architectures", !architectures.empty()},
        {"model_type", !model_type.empty()},
        {"hidden_size", hidden_size != 0},
        {"num_hidden_layers", num_hidden_layers != 0},
        {"num_attention_heads", num_attention_heads != 0},
        {"num_key_value_heads", !num_key_value_heads.empty()},
        {"head_dim", head_dim != 0},
        {"intermediate_size", intermediate_size != 0},
        {"vocab_size", vocab_size != 0},
        {"max_position_embeddings", max_position_embeddings != 0},
        {"type_vocab_size", type_vocab_size != 0},
        {"rms_norm_eps", rms_norm_eps != 0},
        {"layer_norm_eps", layer_norm_eps != 0},
        {"dtype", dtype.has_value()},
        {"num_experts", num_experts.has_value()},
        {"num_experts_per_tok", num_experts_per_tok.has_value()},
        {"moe_intermediate_size", moe_intermediate_size.has_value()},
        {"n_shared_experts", n_shared_experts.has_value()},
        {"first_k_dense_replace", first_k_dense_replace.has_value()},
        {"moe_layer_freq", moe_layer_freq.has_value()},
        {"decoder_sparse_step", decoder_sparse_step.has_value()},
        {"q_lora_rank", q_lora_rank.has_value()},
        {"kv_lora_rank", kv_lora_rank.has_value()},
        {"qk_nope_head_dim", qk_nope_head_dim.has_value()},
        {"qk_rope_head_dim", qk_rope_head_dim.has_value()},
        {"v_head_dim", v_head_dim.has_value()},
        {"num_nextn_predict_layers", num_nextn_predict_layers.has_value()},
    };
    for (const auto& [name, given] : table) {
      if (name == field) return given;
    }
    return std::nullopt;
  };
  for (const std::string_view field : fields) {
    const std::optional<bool> given = present(field);
    if (!given) {
      return Status(StatusCode::kInternal, fmt::format("ModelConfig::require: no field \"{}\"", field),
                    {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
    }
    if (!*given) {
      return Status(StatusCode::kDataLoss, fmt::format("{}: field \"{}\" is missing, {} needs it", origin, field, architecture()),
                    {.reason = Reason::kCheckpointMalformed});
    }
  }
  return {};
}

std::string ModelConfig::architecture() const {
  return architectures.empty() ? "(none)" : fmt::format("{}", fmt::join(architectures, ", "));
}

}  // namespace shardpull
