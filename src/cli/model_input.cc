#include "cli/model_input.h"

#include <span>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "model/families/build.h"

namespace shardpull::cli {
namespace {

void take(ModelInput& model, std::size_t tensor) {
  model.metadata.push_back(model.checkpoint->tensors()[tensor]);
  model.tensor.push_back(tensor);
}

Result<std::vector<std::string>> check(const ModelInput& model) {
  const Checkpoint& files = *model.checkpoint;
  return check_checkpoint(model.config, model.metadata,
                          [&](std::uint32_t name) -> Result<std::span<const std::byte>> {
                            const std::size_t tensor = model.tensor[name];
                            return std::span<const std::byte>(files.data(tensor), files.bytes(tensor));
                          });
}

}  // namespace

std::uint64_t bytes_of(const ModelInput& model, std::size_t index) {
  const TensorMeta& meta = model.metadata[index];
  return tensor_bytes(meta.dtype, meta.shape).value();  // checked when the file was opened
}

Result<ModelInput> open_model(const std::string& directory, bool any_architecture) {
  ModelInput model;
  model.label = directory;
  SHARDPULL_ASSIGN_OR_RETURN(model.checkpoint, Checkpoint::open(directory));
  SHARDPULL_ASSIGN_OR_RETURN(model.config, ModelConfig::load(directory));
  model.notes = model.checkpoint->notes();
  model.notes.insert(model.notes.end(), model.config.notes.begin(), model.config.notes.end());

  const std::size_t count = model.checkpoint->tensors().size();
  std::vector<std::size_t> extra;
  for (std::size_t i = 0; i < count; ++i) {
    if (model.checkpoint->indexed(i)) {
      take(model, i);
    } else {
      extra.push_back(i);
    }
  }
  auto checked =
      any_architecture ? Result<std::vector<std::string>>(std::vector<std::string>()) : check(model);
  if (!checked.ok() && !extra.empty()) {
    ModelInput whole = std::move(model);
    whole.metadata.clear();
    whole.tensor.clear();
    for (std::size_t i = 0; i < count; ++i) take(whole, i);
    whole.notes.push_back(fmt::format(
        "{} tensors that the index does not list are used, because the model needs them", extra.size()));
    model = std::move(whole);
    checked = check(model);
  }
  if (!checked.ok()) return checked.status();
  model.notes.insert(model.notes.end(), checked->begin(), checked->end());
  for (std::size_t i = 0; i < model.metadata.size(); ++i) model.total_bytes += bytes_of(model, i);
  return model;
}

Result<ModelInput> model_of_shape(const ShapeSpec& spec, const ShapeOverrides& overrides) {
  SHARDPULL_ASSIGN_OR_RETURN(ModelShape shape, shape_config(spec, overrides));
  ModelInput model;
  model.label = fmt::format("{}:{}", spec.key, to_string(spec.size));
  SHARDPULL_ASSIGN_OR_RETURN(model.config,
                             ModelConfig::parse(shape.config_json, model.label + " config.json"));
  model.metadata = std::move(shape.tensors);
  model.total_bytes = shape.total_bytes;
  return model;
}

}  // namespace shardpull::cli
