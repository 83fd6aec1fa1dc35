// The families. One row per module, in vLLM's order and under vLLM's names.
#include "model/families/family.h"

namespace shardpull::families {
namespace {

using enum Extent;

constexpr Section query(std::string_view source) {
  return {source, "q", kQuery, Cut::kQueryHeads};
}
constexpr Section key(std::string_view source) {
  return {source, "k", kKeyValue, Cut::kKeyValueHeads};
}
constexpr Section value(std::string_view source) {
  return {source, "v", kKeyValue, Cut::kKeyValueHeads};
}

constexpr ModuleRow norm(Place place, std::string_view name, Extent size = kHidden) {
  return {
      .place = place, .name = name, .type = "RMSNorm", .sections = {Section{name, "", size, Cut::kWhole}}};
}

constexpr ModuleRow kEmbedTokens{.place = Place::kEmbedding,
                                 .name = "model.embed_tokens",
                                 .type = "VocabParallelEmbedding",
                                 .sections = {Section{"model.embed_tokens", "", kVocab, Cut::kVocab}},
                                 .columns = kHidden};

constexpr ModuleRow qkv_projection(Bias bias) {
  return {.place = Place::kLayer,
          .name = "self_attn.qkv_proj",
          .type = "QKVParallelLinear",
          .sections = {query("self_attn.q_proj"), key("self_attn.k_proj"), value("self_attn.v_proj")},
          .columns = kHidden,
          .bias = bias,
          .fused_source = "self_attn.qkv_proj"};
}

constexpr ModuleRow output_projection(Bias bias) {
  return {.place = Place::kLayer,
          .name = "self_attn.o_proj",
          .type = "RowParallelLinear",
          .sections = {Section{"self_attn.o_proj", "", kHidden, Cut::kWhole}},
          .columns = kQuery,
          .column_cut = Cut::kQueryHeads,
          .bias = bias};
}

constexpr ModuleRow gate_up_projection(Bias bias, Present present = Present::kAlways) {
  return {.place = Place::kLayer,
          .name = "mlp.gate_up_proj",
          .type = "MergedColumnParallelLinear",
          .sections = {Section{"mlp.gate_proj", "0", kIntermediate, Cut::kEven},
                       Section{"mlp.up_proj", "1", kIntermediate, Cut::kEven}},
          .columns = kHidden,
          .bias = bias,
          .fused_source = "mlp.gate_up_proj",
          .present = present};
}

constexpr ModuleRow down_projection(Bias bias, Present present = Present::kAlways) {
  return {.place = Place::kLayer,
          .name = "mlp.down_proj",
          .type = "RowParallelLinear",
          .sections = {Section{"mlp.down_proj", "", kHidden, Cut::kWhole}},
          .columns = kIntermediate,
          .column_cut = Cut::kEven,
          .bias = bias,
          .present = present};
}

constexpr ModuleRow router(Bias bias) {
  return {.place = Place::kLayer,
          .name = "mlp.gate",
          .type = "GateLinear",
          .sections = {Section{"mlp.gate", "", kExperts, Cut::kWhole}},
          .columns = kHidden,
          .bias = bias,
          .present = Present::kExpertLayer};
}

constexpr ExpertRow kRoutedExperts{.name = "mlp.experts.routed_experts",
                                   .type = "RoutedExperts",
                                   .source = "mlp.experts.",
                                   .gate = "gate_proj",
                                   .up = "up_proj",
                                   .down = "down_proj",
                                   .stacked_gate_up = "gate_up_proj"};

constexpr ModuleRow kFinalNorm = norm(Place::kLastStage, "model.norm");
constexpr ModuleRow kHeadRow{.place = Place::kHead,
                             .name = "lm_head",
                             .type = "ParallelLMHead",
                             .sections = {Section{"lm_head", "", kVocab, Cut::kVocab}},
                             .columns = kHidden};

constexpr ModuleRow kLlamaRows[] = {
    kEmbedTokens,
    qkv_projection(Bias::kAttentionBias),
    output_projection(Bias::kAttentionBias),
    gate_up_projection(Bias::kMlpBias),
    down_projection(Bias::kMlpBias),
    norm(Place::kLayer, "input_layernorm"),
    norm(Place::kLayer, "post_attention_layernorm"),
    kFinalNorm,
    kHeadRow,
};

constexpr ModuleRow kQwen2Rows[] = {
    kEmbedTokens,
    qkv_projection(Bias::kAlways),
    output_projection(Bias::kNever),
    gate_up_projection(Bias::kNever),
    down_projection(Bias::kNever),
    norm(Place::kLayer, "input_layernorm"),
    norm(Place::kLayer, "post_attention_layernorm"),
    kFinalNorm,
    kHeadRow,
};

constexpr ModuleRow kQwen3Rows[] = {
    kEmbedTokens,
    qkv_projection(Bias::kAttentionBias),
    output_projection(Bias::kNever),
    norm(Place::kLayer, "self_attn.q_norm", kHeadDim),
    norm(Place::kLayer, "self_attn.k_norm", kHeadDim),
    gate_up_projection(Bias::kNever),
    down_projection(Bias::kNever),
    norm(Place::kLayer, "input_layernorm"),
    norm(Place::kLayer, "post_attention_layernorm"),
    kFinalNorm,
    kHeadRow,
};

constexpr ModuleRow kQwen3MoeRows[] = {
    kEmbedTokens,
    qkv_projection(Bias::kAttentionBias),
    output_projection(Bias::kNever),
    norm(Place::kLayer, "self_attn.q_norm", kHeadDim),
    norm(Place::kLayer, "self_attn.k_norm", kHeadDim),
    gate_up_projection(Bias::kNever, Present::kDenseLayer),
    down_projection(Bias::kNever, Present::kDenseLayer),
    router(Bias::kNever),
    norm(Place::kLayer, "input_layernorm"),
    norm(Place::kLayer, "post_attention_layernorm"),
    kFinalNorm,
    kHeadRow,
};

// A linear layer of latent attention with one source of the same name.
constexpr ModuleRow latent_projection(std::string_view name, std::string_view type, Extent rows, Cut cut,
                                      Extent columns, Present present) {
  return {.place = Place::kLayer,
          .name = name,
          .type = type,
          .sections = {Section{name, "", rows, cut}},
          .columns = columns,
          .present = present};
}

constexpr ModuleRow latent_norm(std::string_view name, Extent size, Present present) {
  ModuleRow row = norm(Place::kLayer, name, size);
  row.present = present;
  return row;
}

constexpr ModuleRow kDeepseekV3Rows[] = {
    kEmbedTokens,
    ModuleRow{.place = Place::kLayer,
              .name = "self_attn.fused_qkv_a_proj",
              .type = "DeepSeekV2FusedQkvAProjLinear",
              .sections = {Section{"self_attn.q_a_proj", "0", kQueryLatent, Cut::kWhole},
                           Section{"self_attn.kv_a_proj_with_mqa", "1", kKeyValueLatentMqa, Cut::kWhole}},
              .columns = kHidden,
              .present = Present::kQueryLatent},
    latent_norm("self_attn.q_a_layernorm", kQueryLatent, Present::kQueryLatent),
    latent_projection("self_attn.q_b_proj", "ColumnParallelLinear", kLatentQuery, Cut::kQueryHeads,
                      kQueryLatent, Present::kQueryLatent),
    latent_projection("self_attn.kv_a_proj_with_mqa", "ReplicatedLinear", kKeyValueLatentMqa, Cut::kWhole,
                      kHidden, Present::kNoQueryLatent),
    latent_projection("self_attn.q_proj", "ColumnParallelLinear", kLatentQuery, Cut::kQueryHeads, kHidden,
                      Present::kNoQueryLatent),
    latent_norm("self_attn.kv_a_layernorm", kKeyValueLatent, Present::kAlways),
    latent_projection("self_attn.kv_b_proj", "ColumnParallelLinear", kLatentKeyValue, Cut::kQueryHeads,
                      kKeyValueLatent, Present::kAlways),
    ModuleRow{.place = Place::kLayer,
              .name = "self_attn.o_proj",
              .type = "RowParallelLinear",
              .sections = {Section{"self_attn.o_proj", "", kHidden, Cut::kWhole}},
              .columns = kLatentValue,
              .column_cut = Cut::kQueryHeads},
    gate_up_projection(Bias::kNever, Present::kDenseLayer),
    down_projection(Bias::kNever, Present::kDenseLayer),
    router(Bias::kRouterCorrection),
    ModuleRow{.place = Place::kLayer,
              .name = "mlp.shared_experts.gate_up_proj",
              .type = "MergedColumnParallelLinear",
              .sections = {Section{"mlp.shared_experts.gate_proj", "0", kSharedIntermediate, Cut::kEven},
                           Section{"mlp.shared_experts.up_proj", "1", kSharedIntermediate, Cut::kEven}},
              .columns = kHidden,
              .fused_source = "mlp.shared_experts.gate_up_proj",
              .present = Present::kSharedExperts},
    ModuleRow{.place = Place::kLayer,
              .name = "mlp.shared_experts.down_proj",
              .type = "RowParallelLinear",
              .sections = {Section{"mlp.shared_experts.down_proj", "", kHidden, Cut::kWhole}},
              .columns = kSharedIntermediate,
              .column_cut = Cut::kEven,
              .present = Present::kSharedExperts},
    norm(Place::kLayer, "input_layernorm"),
    norm(Place::kLayer, "post_attention_layernorm"),
    kFinalNorm,
    kHeadRow,
};

constexpr ModuleRow bert_embedding(std::string_view name, std::string_view source, Extent rows) {
  return {.place = Place::kFirstStage,
          .name = name,
          .type = "VocabParallelEmbedding",
          .sections = {Section{source, "", rows, Cut::kVocab}},
          .columns = kHidden};
}

constexpr ModuleRow bert_norm(Place place, std::string_view name, std::string_view source) {
  return {.place = place,
          .name = name,
          .type = "LayerNorm",
          .sections = {Section{source, "", kHidden, Cut::kWhole}},
          .bias = Bias::kAlways};
}

constexpr ModuleRow bert_row_projection(std::string_view name, Extent columns, Cut column_cut) {
  return {.place = Place::kLayer,
          .name = name,
          .type = "RowParallelLinear",
          .sections = {Section{name, "", kHidden, Cut::kWhole}},
          .columns = columns,
          .column_cut = column_cut,
          .bias = Bias::kAlways};
}

constexpr ModuleRow kBertRows[] = {
    bert_embedding("model.embeddings.word_embeddings", "embeddings.word_embeddings", kVocab),
    bert_embedding("model.embeddings.position_embeddings", "embeddings.position_embeddings", kPositions),
    bert_embedding("model.embeddings.token_type_embeddings", "embeddings.token_type_embeddings", kTokenTypes),
    bert_norm(Place::kFirstStage, "model.embeddings.LayerNorm", "embeddings.LayerNorm"),
    ModuleRow{
        .place = Place::kLayer,
        .name = "attention.self.qkv_proj",
        .type = "QKVParallelLinear",
        .sections = {query("attention.self.query"), key("attention.self.key"), value("attention.self.value")},
        .columns = kHidden,
        .bias = Bias::kAlways},
    bert_row_projection("attention.output.dense", kQuery, Cut::kQueryHeads),
    bert_norm(Place::kLayer, "attention.output.LayerNorm", "attention.output.LayerNorm"),
    ModuleRow{.place = Place::kLayer,
              .name = "intermediate.dense",
              .type = "ColumnParallelLinear",
              .sections = {Section{"intermediate.dense", "", kIntermediate, Cut::kEven}},
              .columns = kHidden,
              .bias = Bias::kAlways},
    bert_row_projection("output.dense", kIntermediate, Cut::kEven),
    bert_norm(Place::kLayer, "output.LayerNorm", "output.LayerNorm"),
};

constexpr IndexBuffer kBertBuffers[] = {
    {"model.embeddings", "BertEmbedding", "position_ids", "embeddings.position_ids", kPositions},
};

constexpr IgnoredName kDecoderIgnored[] = {
    {IgnoredName::Match::kSuffix, "rotary_emb.inv_freq", "unused buffer: rotary frequencies are computed"},
    {IgnoredName::Match::kSuffix, "rotary_emb.cos_cached", "unused buffer: rotary tables are computed"},
    {IgnoredName::Match::kSuffix, "rotary_emb.sin_cached", "unused buffer: rotary tables are computed"},
};
constexpr IgnoredName kBertIgnored[] = {
    {IgnoredName::Match::kPrefix, "pooler.", "unused: an embedding model keeps no pooler weights"},
};

constexpr std::string_view kDecoderFields[] = {"hidden_size", "num_hidden_layers", "num_attention_heads",
                                               "intermediate_size", "vocab_size"};
constexpr std::string_view kQwen3MoeFields[] = {"hidden_size", "num_hidden_layers",     "num_attention_heads",
                                                "vocab_size",  "moe_intermediate_size", "num_experts"};
constexpr std::string_view kDeepseekV3Fields[] = {
    "hidden_size",           "num_hidden_layers", "num_attention_heads", "vocab_size",
    "moe_intermediate_size", "num_experts",       "kv_lora_rank",        "first_k_dense_replace",
    "qk_nope_head_dim",      "qk_rope_head_dim",  "v_head_dim"};
constexpr std::string_view kBertFields[] = {
    "hidden_size", "num_hidden_layers",       "num_attention_heads", "intermediate_size",
    "vocab_size",  "max_position_embeddings", "type_vocab_size"};

constexpr std::string_view kLlamaArchitectures[] = {"LlamaForCausalLM", "MistralForCausalLM"};
constexpr std::string_view kLlamaTypes[] = {"llama", "mistral"};
constexpr std::string_view kQwen2Architectures[] = {"Qwen2ForCausalLM"};
constexpr std::string_view kQwen2Types[] = {"qwen2", "qwen2_vl_text", "qwen2_5_vl_text"};
constexpr std::string_view kQwen3Architectures[] = {"Qwen3ForCausalLM"};
constexpr std::string_view kQwen3Types[] = {"qwen3", "qwen3_vl_text"};
constexpr std::string_view kQwen3MoeArchitectures[] = {"Qwen3MoeForCausalLM"};
constexpr std::string_view kQwen3MoeTypes[] = {"qwen3_moe", "qwen3_vl_moe_text"};
constexpr std::string_view kDeepseekV3Architectures[] = {"DeepseekV3ForCausalLM"};
constexpr std::string_view kBertArchitectures[] = {"BertModel", "BertEmbeddingModel"};

constexpr Family kFamilies[] = {
    {.key = "llama",
     .architectures = kLlamaArchitectures,
     .text_types = kLlamaTypes,
     .source_layer_prefix = "model.layers.",
     .worker_layer_prefix = "model.layers.",
     .rows = kLlamaRows,
     .buffers = {},
     .ignored = kDecoderIgnored,
     .required_fields = kDecoderFields},
    {.key = "qwen2",
     .architectures = kQwen2Architectures,
     .text_types = kQwen2Types,
     .source_layer_prefix = "model.layers.",
     .worker_layer_prefix = "model.layers.",
     .rows = kQwen2Rows,
     .buffers = {},
     .ignored = kDecoderIgnored,
     .required_fields = kDecoderFields},
    {.key = "qwen3",
     .architectures = kQwen3Architectures,
     .text_types = kQwen3Types,
     .source_layer_prefix = "model.layers.",
     .worker_layer_prefix = "model.layers.",
     .rows = kQwen3Rows,
     .buffers = {},
     .ignored = kDecoderIgnored,
     .required_fields = kDecoderFields},
    {.key = "qwen3_moe",
     .architectures = kQwen3MoeArchitectures,
     .text_types = kQwen3MoeTypes,
     .source_layer_prefix = "model.layers.",
     .worker_layer_prefix = "model.layers.",
     .rows = kQwen3MoeRows,
     .buffers = {},
     .ignored = kDecoderIgnored,
     .expert_layers = ExpertLayers::kStep,
     .experts = kRoutedExperts,
     .required_fields = kQwen3MoeFields},
    {.key = "deepseek_v3",
     .architectures = kDeepseekV3Architectures,
     .text_types = {},
     .source_layer_prefix = "model.layers.",
     .worker_layer_prefix = "model.layers.",
     .rows = kDeepseekV3Rows,
     .buffers = {},
     .ignored = kDecoderIgnored,
     .expert_layers = ExpertLayers::kAfterDense,
     .experts = kRoutedExperts,
     .required_fields = kDeepseekV3Fields},
    {.key = "bert",
     .architectures = kBertArchitectures,
     .text_types = {},
     .source_layer_prefix = "encoder.layer.",
     .worker_layer_prefix = "model.encoder.layer.",
     .rows = kBertRows,
     .buffers = kBertBuffers,
     .ignored = kBertIgnored,
     .has_head = false,
     .pipelines = false,
     .required_fields = kBertFields},
};

constexpr Wrapper kWrappers[] = {
    {"LlavaForConditionalGeneration"},
    {"LlavaNextForConditionalGeneration"},
    {"LlavaOnevisionForConditionalGeneration"},
    {"Mistral3ForConditionalGeneration"},
    {"Qwen2VLForConditionalGeneration"},
    {"Qwen2_5_VLForConditionalGeneration"},
    {"Qwen3VLForConditionalGeneration"},
    {.architecture = "Qwen3VLMoeForConditionalGeneration", .either_stack_order = true},
};

}  // namespace

std::span<const Family> catalogue() {
  return kFamilies;
}
std::span<const Wrapper> wrappers() {
  return kWrappers;
}

}  // namespace shardpull::families
