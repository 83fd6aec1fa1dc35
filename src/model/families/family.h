// A model family as data: which modules it has, which checkpoint tensors feed them, and how each is cut.
//
// A Family is a list of ModuleRows. Every row is one module with a "weight" (and maybe a "bias") made of
// SECTIONS along dim 0, each fed by a checkpoint tensor of its own (q, k, v), or all together by one that is
// fused on disk. A rank's part of a section is a contiguous run of its rows (`cut`), and of its columns when
// `column_cut` says so. One builder (families/build.cc) turns rows, a config and a worker's place into
// modules, loaders and the list of names. Layers with routed experts also have an ExpertRow: two stacks of
// all experts that the worker holds. The tables are in families/catalogue.cc; names and layouts are those of
// vLLM 0.32.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace shardpull::families {

// A size that config.json gives.
enum class Extent : std::uint8_t {
  kNone,  // no such dim
  kHidden,
  kIntermediate,
  kQuery,     // query heads x head_dim
  kKeyValue,  // the layer's key/value heads x head_dim
  kHeadDim,
  kVocab,
  kPositions,   // max_position_embeddings
  kTokenTypes,  // type_vocab_size
  kExperts,     // routed experts
  kExpertIntermediate,
  kSharedIntermediate,  // of all shared experts together
  // Latent attention.
  kQueryLatent,        // q_lora_rank
  kKeyValueLatent,     // kv_lora_rank
  kKeyValueLatentMqa,  // the same and the part that all heads rotate
  kLatentQuery,        // query heads x (the parts with and without rotation)
  kLatentKeyValue,     // query heads x (key part without rotation, value)
  kLatentValue,        // query heads x value
};

// How a dim is divided over the tensor-parallel ranks.
enum class Cut : std::uint8_t {
  kWhole,          // every rank holds all of it
  kEven,           // equal parts; refused when tp does not divide it
  kQueryHeads,     // whole heads; refused when tp does not divide them
  kKeyValueHeads,  // whole heads; one head is shared by tp / heads ranks when there are fewer heads than
                   // ranks
  kVocab,  // padded to a multiple of 64, then equal parts; rows past the real ones are declared padding
};

// Where a module lives, and whether its names repeat per layer.
enum class Place : std::uint8_t {
  kFirstStage,
  kEmbedding,  // the first stage, and the last as well when the head is tied to it
  kLayer,      // the stage of its layer; names are relative to the layer's prefix
  kLastStage,
  kHead,  // the last stage; absent when tied (unless asked to keep storage of its own, fed by the embedding's
          // name)
};

// What decides whether a row has a bias.
enum class Bias : std::uint8_t {
  kNever,
  kAlways,
  kAttentionBias,
  kMlpBias,
  kRouterCorrection,  // called "e_score_correction_bias" and F32; there unless topk_method says otherwise
};

// Which layers of a model have a row.
enum class Present : std::uint8_t {
  kAlways,
  kDenseLayer,     // those without routed experts
  kExpertLayer,    // those with routed experts
  kSharedExperts,  // those with routed experts, of a model that also has shared ones
  kQueryLatent,    // of a model with a q_lora_rank
  kNoQueryLatent,
};

// Which layers have routed experts.
enum class ExpertLayers : std::uint8_t {
  kNone,
  kStep,        // every decoder_sparse_step-th, but for mlp_only_layers
  kAfterDense,  // from first_k_dense_replace on, where moe_layer_freq divides the layer's number
};

struct Section {
  std::string_view source;  // checkpoint module: relative to the layer's prefix for Place::kLayer
  std::string_view shard;   // what the loader calls this part: "q", "0", "" when it is the only one
  Extent rows = Extent::kNone;
  Cut cut = Cut::kWhole;
};

inline constexpr std::size_t kMaxSections = 3;

struct ModuleRow {
  Place place = Place::kLayer;
  std::string_view name;                         // the worker's module
  std::string_view type;                         // vLLM's class
  std::array<Section, kMaxSections> sections{};  // those with an empty source do not exist
  Extent columns = Extent::kNone;                // kNone: the weight has one dim
  Cut column_cut = Cut::kWhole;
  Bias bias = Bias::kNever;
  std::string_view
      fused_source{};  // checkpoint module that holds all sections one after the other; may be empty
  Present present = Present::kAlways;
};

// The routed experts of a layer: "w13_weight" [experts here, gate and up rows, hidden] and "w2_weight"
// [experts here, hidden, intermediate]. A checkpoint has them per expert (`source` E `gate`.weight [I, H],
// the same for `up`, `down` [H, I]), or stacked: `source` `stacked_gate_up` [E, 2 I, H], gate rows first, and
// `source` `down` [E, H, I]; some architectures (Wrapper::either_stack_order) also with the last two dims
// exchanged.
struct ExpertRow {
  std::string_view name, type;  // of the worker's module
  std::string_view source;      // "mlp.experts.", relative to the layer's prefix
  std::string_view gate, up, down;
  std::string_view stacked_gate_up;
};

// A buffer that a checkpoint may feed: row 0, 1, 2, ... as I64 [1, size] when it does not.
struct IndexBuffer {
  std::string_view module, type, name;
  std::string_view source;
  Extent size = Extent::kNone;
};

// A checkpoint name that is legal and kept by no worker: it equals, begins or ends with `pattern`.
struct IgnoredName {
  enum class Match : std::uint8_t { kPrefix, kSuffix } match;
  std::string_view pattern;
  std::string_view reason;
};

struct Family {
  std::string_view key;                             // "llama"
  std::span<const std::string_view> architectures;  // of config.json
  std::span<const std::string_view> text_types;     // text_config.model_type, inside a multimodal checkpoint
  std::string_view source_layer_prefix;             // "model.layers."
  std::string_view worker_layer_prefix;
  std::span<const ModuleRow> rows;
  std::span<const IndexBuffer> buffers;
  std::span<const IgnoredName> ignored;
  bool has_head = true;
  bool pipelines = true;  // may be cut into pipeline stages
  ExpertLayers expert_layers = ExpertLayers::kNone;
  ExpertRow experts{};                                // of those layers
  std::span<const std::string_view> required_fields;  // of config.json
};

// Multimodal architectures whose language model is a family of its own: its source names lie under
// "model.language_model." (the head stays "lm_head."), its worker names under "language_model.". The other
// parts of such a model are not known here, and their names are refused.
struct Wrapper {
  std::string_view architecture;
  // Its checkpoints have stacked experts in two orders, [E, out, in] and [E, in, out]: the shape tells which,
  // and a shape that fits both is refused.
  bool either_stack_order = false;
};

std::span<const Family> catalogue();
std::span<const Wrapper> wrappers();

}  // namespace shardpull::families
