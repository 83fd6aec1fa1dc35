// What a command works on: a checkpoint directory, or a shape of the catalogue without bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/config.h"
#include "checkpoint/shapes.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// Movable; thread-compatible.
struct ModelInput {
  std::string label;  // the directory or "qwen3-8b:tiny", for people
  ModelConfig config;
  std::vector<TensorMeta> metadata;      // ascending names (bytes): the gather order of every command
  std::vector<std::size_t> tensor;       // metadata index -> index into the checkpoint
  std::optional<Checkpoint> checkpoint;  // absent for a shape
  std::uint64_t total_bytes = 0;         // of the metadata
  std::vector<std::string> notes;        // what was decided on the way, one sentence each
};

// Opens a Hugging Face directory and checks it against its own config.json. Tensors that an index exists for
// but does not list are taken only when the model cannot be built without them. `any_architecture`: no family
// needs to know the model (its workers replay recordings); nothing is checked then, and the index decides.
Result<ModelInput> open_model(const std::string& directory, bool any_architecture = false);

// A shape of the catalogue: config, names, dtypes and shapes.
Result<ModelInput> model_of_shape(const ShapeSpec& spec, const ShapeOverrides& overrides);

// Bytes of `index` of the metadata.
std::uint64_t bytes_of(const ModelInput& model, std::size_t index);

}  // namespace shardpull::cli
