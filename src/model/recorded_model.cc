#include "model/recorded_model.h"

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "model/describe.h"
#include "shardpull/recording.h"
#include "tensor/chain_text.h"
#include "tensor/slice_algebra.h"

namespace shardpull {
namespace {

Status refused(std::string message, std::string tensor = {}) {
  return Status(StatusCode::kInvalidArgument, std::move(message),
                ErrorInfo{.reason = Reason::kBadArgument, .tensor = std::move(tensor)});
}

// Its loaders know nothing of the model: they put what they are given where the recording says.
class RecordedModel final : public Model {
 public:
  RecordedModel(Recording recording, std::vector<TensorMeta> metadata)
      : recording_(std::move(recording)), metadata_(std::move(metadata)) {
    for (std::uint32_t n = 0; n < metadata_.size(); ++n) names_.emplace(metadata_[n].name, n);
    for (std::size_t i = 0; i < recording_.dead.size(); ++i) {
      reasons_.emplace(recording_.dead[i], &recording_.unused_reasons[i]);
    }
  }

  Status add_structure() {
    for (const RecordedModule& module : recording_.modules) {
      SHARDPULL_ASSIGN_OR_RETURN(Module* const added, add_module(module.name, module.type));
      // The hook itself is code: who has it sets it again.
      if (module.has_post_process) {
        added->set_post_process([](Module&, const std::vector<std::byte*>&) { return Status(); });
      }
    }
    for (std::size_t m = 0; m < recording_.modules.size(); ++m) {
      for (const std::string& alias : recording_.modules[m].aliases) {
        SHARDPULL_RETURN_IF_ERROR(add_module_alias(alias, *modules()[m]));
      }
    }
    const Loader loader = [this](Parameter& parameter, const Tensor& loaded, const std::string&) -> Status {
      SHARDPULL_ASSIGN_OR_RETURN(
          const ParameterView window,
          parameter.data().as_strided(landing_->dtype, landing_->offset, landing_->shape, landing_->stride));
      return window.copy_(loaded);
    };
    for (const RecordedParameter& parameter : recording_.parameters) {
      Module& module = *modules()[parameter.module];
      Result<Parameter*> added =
          parameter.optional
              ? module.add_buffer(parameter.name, parameter.dtype, parameter.shape, parameter.initial, loader)
              : module.add_strided_parameter(parameter.name, parameter.dtype, parameter.shape,
                                             parameter.stride, loader);
      if (!added.ok()) return added.status();
      if ((*added)->stride() != parameter.stride) {
        return refused("the buffer " + (*added)->full_name() + " " + describe(parameter.shape) +
                           " has stride " + describe(parameter.stride) + "; buffers are contiguous",
                       (*added)->full_name());
      }
      parameters_.push_back(*added);
    }
    for (const RecordedAlias& alias : recording_.aliases) {
      SHARDPULL_RETURN_IF_ERROR(modules()[alias.module]
                                    ->add_alias(alias.name, *parameters_[alias.parameter], alias.shape)
                                    .status());
    }
    return {};
  }

  // What takes no source is padding, and what takes one has its chain.
  Status add_copies() {
    for (const Fill& fill : recording_.fills) {
      const Destination& at = fill.destination;
      const Parameter& parameter = *parameters_[at.parameter];
      Region region{at.offset, {}};
      for (std::size_t d = 0; d < at.shape.size(); ++d) region.dims.push_back({at.shape[d], at.stride[d]});
      Slice elements{{std::move(region)}};
      if (at.dtype != parameter.dtype()) {
        auto own =
            change_unit(canonicalise(elements.regions), dtype_bits(at.dtype), dtype_bits(parameter.dtype()));
        if (!own.ok()) return own.status().with_context("a fill of " + parameter.full_name());
        elements = *std::move(own);
      }
      for (Region& own : elements.regions) {
        SHARDPULL_RETURN_IF_ERROR(parameter.module().declare_padding(parameter.name(), std::move(own)));
      }
    }
    for (const Scatter& scatter : recording_.scatters) {
      SHARDPULL_ASSIGN_OR_RETURN(OpChain chain, parse_chain(scatter.chain));
      chains_.push_back(std::move(chain));
      const Parameter* const parameter = parameters_[scatter.destination.parameter];
      sources_[parameter].push_back(metadata_[scatter.name].name);
    }
    return {};
  }

  Status load_weights(const std::vector<NamedTensor>& weights) override {
    std::vector<const Tensor*> given(metadata_.size(), nullptr);
    for (const NamedTensor& weight : weights) {
      const auto name = names_.find(weight.name);
      if (name == names_.end()) {
        return refused(weight.name + " is not one of the names that the recording was made of", weight.name);
      }
      const TensorMeta& meta = metadata_[name->second];
      if (weight.tensor.dtype() != meta.dtype || weight.tensor.shape() != meta.shape) {
        return refused(weight.name + " is " + std::string(dtype_name(weight.tensor.dtype())) + " " +
                           describe(weight.tensor.shape()) + "; the recording was made of " +
                           std::string(dtype_name(meta.dtype)) + " " + describe(meta.shape),
                       weight.name);
      }
      given[name->second] = &weight.tensor;
    }
    for (std::size_t i = 0; i < recording_.scatters.size(); ++i) {
      const Scatter& scatter = recording_.scatters[i];
      if (given[scatter.name] == nullptr) continue;
      SHARDPULL_ASSIGN_OR_RETURN(const Tensor source, Tensor::apply(*given[scatter.name], chains_[i]));
      landing_ = &scatter.destination;
      SHARDPULL_RETURN_IF_ERROR(parameters_[scatter.destination.parameter]->load(source));
    }
    return {};
  }

  std::string explain_unused(std::string_view name) const override {
    const auto known = names_.find(name);
    if (known == names_.end()) return {};
    const auto reason = reasons_.find(known->second);
    return reason == reasons_.end() ? "overwritten by later copies" : *reason->second;
  }

  std::vector<std::string> sources_of(const Parameter& parameter) const override {
    const auto names = sources_.find(&parameter);
    return names == sources_.end() ? std::vector<std::string>() : names->second;
  }

 private:
  const Recording recording_;
  const std::vector<TensorMeta> metadata_;
  std::map<std::string_view, std::uint32_t> names_;
  std::map<std::uint32_t, const std::string*> reasons_;  // of dead names
  std::vector<Parameter*> parameters_;                   // by index in the recording
  std::vector<OpChain> chains_;                          // by index of the scatter
  std::map<const Parameter*, std::vector<std::string>> sources_;
  const Destination* landing_ = nullptr;  // where the loader that runs puts its tensor
};

}  // namespace

Result<std::unique_ptr<Model>> skeleton_of(const Recording& recording) {
  Recording structure;
  structure.modules = recording.modules;
  structure.parameters = recording.parameters;
  structure.aliases = recording.aliases;
  auto model = std::make_unique<RecordedModel>(std::move(structure), std::vector<TensorMeta>());
  SHARDPULL_RETURN_IF_ERROR(model->add_structure());
  return std::unique_ptr<Model>(std::move(model));
}

Result<std::unique_ptr<Model>> model_of(const Recording& recording, const std::vector<TensorMeta>& metadata) {
  auto model = std::make_unique<RecordedModel>(recording, metadata);
  SHARDPULL_RETURN_IF_ERROR(model->add_structure());
  SHARDPULL_RETURN_IF_ERROR(model->add_copies());
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace shardpull
