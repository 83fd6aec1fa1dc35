// The catalogue of model shapes: real models by key, in three sizes, as a config.json and a list of tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// tiny: the same structure with hidden size 64 and a few layers, for tests. scaled: the real vocabulary and
// proportions cut to between 90 MB and 2 GB, for benchmarks on one machine. full: the published model; names,
// shapes and dtypes are enough to plan with. deepseek-v3 is in BF16, without the scales that its published
// checkpoint has.
enum class ShapeSize : std::uint8_t { kTiny, kScaled, kFull };
std::string_view to_string(ShapeSize size);

// "qwen3-8b:tiny".
struct ShapeSpec {
  std::string key;
  ShapeSize size = ShapeSize::kTiny;
};
// Parses KEY:SIZE. Refused (INVALID_ARGUMENT): anything else, naming the accepted form, the known keys and
// the sizes.
Result<ShapeSpec> parse_shape_spec(std::string_view text);

// What may be changed about a shape. Refused where the family has no such thing (bert: tied, kv_heads;
// deepseek_v3: kv_heads).
struct ShapeOverrides {
  std::optional<std::int64_t> vocab;     // 1 .. 2^31 - 1
  std::optional<std::int64_t> layers;    // 1 .. 10,000
  std::optional<std::int64_t> kv_heads;  // must divide the attention heads
  std::optional<bool> tied;              // head and embedding are one tensor
};

// A row of the catalogue.
struct ShapeInfo {
  std::string_view key;
  std::string_view family;  // config.json's model_type
  bool available = false;   // false: known by name, refused by shape_config
};
// All rows, in the catalogue's order.
const std::vector<ShapeInfo>& known_shapes();

struct ModelShape {
  ShapeSpec spec;
  std::string config_json;          // the text of config.json
  std::vector<TensorMeta> tensors;  // in ascending name order; Hugging Face names
  std::uint64_t total_bytes = 0;    // of all tensors
};

// Config and tensors of one shape. INVALID_ARGUMENT: an unknown key (the known ones are listed), an override
// out of range. UNIMPLEMENTED: a key whose family does not exist yet, by name.
Result<ModelShape> shape_config(const ShapeSpec& spec, const ShapeOverrides& overrides = {});

}  // namespace shardpull
