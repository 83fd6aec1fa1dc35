// What a worker keeps: a model of a recording, of a family, or of whole tensors.
#include <memory>
#include <string>

#include "model/families/build.h"
#include "native.h"
#include "plan/plan.h"

namespace shardpull::python {
namespace {

// Every parameter is fed by the checkpoint tensor of its own name, whole.
class WholeModel final : public Model {
 public:
  Status load_weights(const std::vector<NamedTensor>& weights) override {
    for (const NamedTensor& weight : weights) {
      Parameter* const parameter = find(weight.name);
      if (parameter == nullptr) continue;
      if (Status loaded = parameter->load(weight.tensor); !loaded.ok()) return loaded;
    }
    return {};
  }
  std::string explain_unused(std::string_view name) const override {
    return find(name) == nullptr ? "this worker keeps no tensor of that name" : "";
  }
  Status add(const std::string& name, const TensorView& like) {
    const std::size_t dot = name.rfind('.');
    const std::string module = dot == std::string::npos ? "" : name.substr(0, dot);
    Module* home = find_module(module);
    if (home == nullptr) {
      auto added = add_module(module, "Tensors");
      if (!added.ok()) return added.status();
      home = *added;
    }
    return home
        ->add_strided_parameter(dot == std::string::npos ? name : name.substr(dot + 1), like.dtype,
                                like.shape, like.stride)
        .status();
  }

 private:
  Parameter* find(std::string_view name) const {
    const std::size_t dot = name.rfind('.');
    const Module* const home = find_module(dot == std::string_view::npos ? "" : name.substr(0, dot));
    return home == nullptr ? nullptr
                           : home->find(dot == std::string_view::npos ? name : name.substr(dot + 1));
  }
};

Parameter& parameter_of(const ModelHandle& handle, const std::string& name) {
  for (const auto& module : handle.model->modules()) {
    for (const auto& parameter : module->parameters()) {
      if (parameter->full_name() == name) return *parameter;
    }
  }
  raise(Status(StatusCode::kNotFound, "the model has no parameter '" + name + "'",
               {.reason = Reason::kBadArgument}));
}

void check_unused(const ModelHandle& handle, const std::string& what) {
  if (handle.users != 0)
    raise(Status(StatusCode::kFailedPrecondition, what + " while a worker writes into the model",
                 {.reason = Reason::kWrongState}));
}

void bind_parameter(ModelHandle& handle, const std::string& name, nb::handle tensor) {
  Parameter& parameter = parameter_of(handle, name);
  check_unused(handle, "bind of " + name);
  const View view = view_of(tensor, "the tensor for " + name);
  if (!view.writable) raise_argument("the tensor for " + name + " is read-only");
  if (view.view.dtype != parameter.dtype())
    raise_argument("the tensor for " + name + " is " + std::string(dtype_name(view.view.dtype)) +
                   ", the parameter is " + std::string(dtype_name(parameter.dtype())));
  bool same = view.view.shape == parameter.shape();
  for (std::size_t d = 0; same && d < view.view.shape.size(); ++d)
    same = view.view.shape[d] <= 1 || view.view.stride[d] == parameter.stride()[d];
  if (!same)
    raise_argument("the tensor for " + name + " has another shape or other strides than the parameter");
  check(parameter.bind(const_cast<std::byte*>(view.view.data), parameter.storage_bytes()));
}

// The parameter's elements; `owner` keeps its memory.
nb::ndarray<nb::array_api> array_of(const ModelHandle& handle, const std::string& name, nb::handle owner) {
  const Parameter& parameter = parameter_of(handle, name);
  if (parameter.memory() == nullptr)
    raise(Status(StatusCode::kFailedPrecondition,
                 name + " has no memory yet: materialise the model, or bind it",
                 {.reason = Reason::kWrongState}));
  const std::vector<std::size_t> shape(parameter.shape().begin(), parameter.shape().end());
  return nb::ndarray<nb::array_api>(parameter.memory(), shape.size(), shape.data(), owner,
                                    parameter.stride().data(), dlpack_of(parameter.dtype()),
                                    nb::device::cpu::value);
}

nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>> memory_of(const ModelHandle& handle,
                                                              const std::string& name, nb::handle owner) {
  const Parameter& parameter = parameter_of(handle, name);
  if (parameter.memory() == nullptr)
    raise(Status(StatusCode::kFailedPrecondition,
                 name + " has no memory yet: materialise the model, or bind it",
                 {.reason = Reason::kWrongState}));
  const std::size_t shape[] = {parameter.storage_bytes()};
  return nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>(
      parameter.memory(), 1, shape, owner, nullptr, nb::dtype<std::uint8_t>(), nb::device::cpu::value);
}

ModelHandle* model_of_recording(const nb::bytes& text, nb::handle metadata, const std::string& origin) {
  const std::vector<TensorMeta> names = metadata_of(metadata);
  const RecordingFile file =
      check(read_recording(std::string_view(text.c_str(), text.size()), names, origin));
  return new ModelHandle(check(model_of(file.recording, names)));
}

ModelHandle* model_of_family(nb::handle config, nb::handle consumer, const nb::dict& layout) {
  InferenceLayout parsed;
  const auto take = [&](const char* word, int& out) {
    out = static_cast<int>(unsigned_of(nb::object(layout[word]), word, INT32_MAX));
  };
  take("tp", parsed.tp);
  take("pp", parsed.pp);
  take("dp", parsed.dp);
  take("ep", parsed.ep);
  take("replicas", parsed.replicas);
  const std::uint32_t worker = number_of(consumer, "consumer");
  const ModelConfig of = check(ModelConfig::load(text_of(config, "config")));
  return new ModelHandle(check(build_model(of, parsed, worker)));
}

ModelHandle* model_of_tensors(const nb::dict& tensors) {
  auto model = std::make_unique<WholeModel>();
  std::vector<std::string> names;
  for (const auto& [key, tensor] : tensors) {
    names.push_back(text_of(key, "a name of parameters"));
    check(model->add(names.back(), view_of(tensor, "the tensor for " + names.back()).view));
  }
  auto handle = std::make_unique<ModelHandle>(std::move(model));
  std::size_t n = 0;
  for (const auto& [key, tensor] : tensors) bind_parameter(*handle, names[n++], tensor);
  return handle.release();
}

nb::list parameters_of(const ModelHandle& handle) {
  nb::list out;
  for (const auto& module : handle.model->modules()) {
    for (const auto& parameter : module->parameters()) {
      out.append(nb::make_tuple(parameter->full_name(), std::string(dtype_name(parameter->dtype())),
                                nb::tuple(nb::cast(parameter->shape())),
                                nb::tuple(nb::cast(parameter->stride()))));
    }
  }
  return out;
}

nb::list gather_groups(nb::handle metadata) {
  nb::list out;
  for (const GatherGroup& group : check(form_groups(metadata_of(metadata))))
    out.append(nb::make_tuple(group.first, group.count));
  return out;
}

}  // namespace

void bind_model(nb::module_& module) {
  nb::class_<ModelHandle>(module, "Model")
      .def("parameters", parameters_of)
      .def("bind", bind_parameter, nb::arg("name"), nb::arg("tensor").none())
      .def("array", array_of, nb::arg("name"), nb::arg("owner"))
      .def("memory", memory_of, nb::arg("name"), nb::arg("owner"))
      .def("materialise",
           [](ModelHandle& self) {
             check_unused(self, "materialise");
             check(self.model->materialise());
           })
      .def("parameter_bytes", [](const ModelHandle& self) { return self.model->parameter_bytes(); });
  module.def("model_of_recording", model_of_recording, nb::arg("text"), nb::arg("metadata").none(),
             nb::arg("origin"));
  module.def("model_of_family", model_of_family, nb::arg("config").none(), nb::arg("consumer").none(),
             nb::arg("layout"));
  module.def("model_of_tensors", model_of_tensors, nb::arg("tensors"));
  module.def("gather_groups", gather_groups, nb::arg("metadata").none());
}

}  // namespace shardpull::python
