#include "runtime/fallback_model.h"

#include <utility>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "base/units.h"

namespace shardpull {

Result<std::unique_ptr<FallbackModel>> FallbackModel::make(Model& target, const Recording& baked,
                                                           const Recording& planned) {
  std::unique_ptr<FallbackModel> made(new FallbackModel(target));
  const std::vector<FallbackModule> fallbacks = fallback_modules(baked);
  std::size_t p = baked.parameters.size();
  for (std::size_t f = 0; f < fallbacks.size(); ++f) {
    const RecordedModule& recorded = planned.modules[baked.modules.size() + f];
    SHARDPULL_ASSIGN_OR_RETURN(Module* const module, made->add_module(recorded.name, recorded.type));
    for (std::size_t i = 0; i < fallbacks[f].names.size(); ++i, ++p) {
      const RecordedParameter& tensor = planned.parameters[p];
      SHARDPULL_RETURN_IF_ERROR(module->add_parameter(tensor.name, tensor.dtype, tensor.shape).status());
    }
    module->set_post_process([self = made.get(), modules = fallbacks[f].modules](
                                 Module& from, const std::vector<std::byte*>&) { return self->load(from, modules); });
  }
  if (const Status status = made->materialise(); !status.ok()) {
    return Status(status.code(),
                  fmt::format("{}: {} of tensors that did not bake are kept whole, for the model's own loaders "
                              "(unbaked = fallback); loaders that bake need none of it",
                              status.message(), format_bytes(made->parameter_bytes())),
                  status.info());
  }
  return made;
}

Status FallbackModel::load_weights(const std::vector<NamedTensor>&) {
  return Status(StatusCode::kUnimplemented, "tensors that did not bake come with a sync",
                {.reason = Reason::kWrongState});
}

Status FallbackModel::load(const Module& from, const std::vector<std::uint32_t>& modules) const {
  std::vector<NamedTensor> weights;
  for (const auto& parameter : from.parameters()) {
    SHARDPULL_ASSIGN_OR_RETURN(
        Tensor tensor,
        Tensor::real(parameter->name(), parameter->dtype(), parameter->shape(), parameter->memory()));
    weights.push_back({parameter->name(), std::move(tensor)});
  }
  SHARDPULL_RETURN_IF_ERROR(load_modules(target_, modules, weights).with_context("loading what did not bake"));
  for (const std::uint32_t module : modules) {
    Module& loaded = *target_.modules()[module];
    if (loaded.post_process()) SHARDPULL_RETURN_IF_ERROR(loaded.post_process()(loaded, {}));
  }
  return {};
}

}  // namespace shardpull
