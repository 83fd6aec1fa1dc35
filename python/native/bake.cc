// A model whose loaders are Python code, and the handles that these work on.
#include <functional>
#include <memory>
#include <string>

#include "native.h"
#include "shardpull/bake.h"
#include "shardpull/recording.h"

namespace shardpull::python {
namespace {

// ---- Operations of the table, arguments in the order of PyTorch's methods

std::int64_t integer_of(nb::handle value, const std::string& argument) {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid() || PyBool_Check(value.ptr())) {
    PyErr_Clear();
    raise_type(argument, "an integer", value);
  }
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) raise_argument(argument + " does not fit 64 bits");
  return number;
}

std::vector<std::int64_t> integers_of(nb::handle value, const std::string& argument) {
  std::vector<std::int64_t> out;
  for (nb::handle item : value) out.push_back(integer_of(item, argument));
  return out;
}

std::vector<IndexItem> index_of(nb::handle value) {
  const auto bound = [](nb::handle number) -> std::optional<std::int64_t> {
    if (number.is_none()) return std::nullopt;
    return integer_of(number, "a bound of a slice");
  };
  std::vector<IndexItem> out;
  for (nb::handle item : value) {
    if (item.is_none()) {
      out.emplace_back(IndexNone{});
    } else if (item.ptr() == Py_Ellipsis) {
      out.emplace_back(IndexEllipsis{});
    } else if (PySlice_Check(item.ptr())) {
      out.emplace_back(IndexSlice{bound(item.attr("start")), bound(item.attr("stop")), bound(item.attr("step"))});
    } else {
      out.emplace_back(integer_of(item, "an index"));
    }
  }
  return out;
}

nb::object one(Result<Tensor> result) {
  return nb::cast(check(std::move(result)));
}

nb::object several(Result<std::vector<Tensor>> result) {
  nb::list out;
  for (Tensor& tensor : check(std::move(result))) out.append(nb::cast(std::move(tensor)));
  return nb::tuple(out);
}

// `arguments` are those of the method, complete: Python has bound them.
nb::object apply(const Tensor& tensor, const std::string& method, const nb::tuple& arguments) {
  const auto number = [&](std::size_t n) { return integer_of(arguments[n], method); };
  const auto numbers = [&](std::size_t n) { return integers_of(arguments[n], method); };
  if (method == "narrow") return one(tensor.narrow(number(0), number(1), number(2)));
  if (method == "view" && nb::isinstance<nb::str>(arguments[0]))
    return one(tensor.view(check(dtype_from_name(nb::cast<std::string>(arguments[0])))));
  if (method == "view") return one(tensor.view(numbers(0)));
  if (method == "reshape") return one(tensor.reshape(numbers(0)));
  if (method == "__getitem__") return one(tensor.index(index_of(arguments[0])));
  if (method == "select") return one(tensor.select(number(0), number(1)));
  if (method == "unsqueeze") return one(tensor.unsqueeze(number(0)));
  if (method == "squeeze") return one(arguments.size() == 0 ? tensor.squeeze() : tensor.squeeze(numbers(0)));
  if (method == "transpose") return one(tensor.transpose(number(0), number(1)));
  if (method == "t") return one(tensor.t());
  if (method == "permute") return one(tensor.permute(numbers(0)));
  if (method == "flatten") return one(tensor.flatten(number(0), number(1)));
  if (method == "contiguous") return one(tensor.contiguous());
  if (method == "chunk") return several(tensor.chunk(number(0), number(1)));
  if (method == "split" && PyIndex_Check(nb::object(arguments[0]).ptr()) != 0)
    return several(tensor.split(number(0), number(1)));
  if (method == "split") return several(tensor.split(numbers(0), number(1)));
  if (method == "unbind") return several(tensor.unbind(number(0)));
  return one(Tensor::apply(tensor, {{method, {}}}));  // refuses it, and says why
}

// ---- The model

// Its modules and parameters are those of a Python module, and load_weights is a Python callable, which a bake gives
// fakes and which answers by record_copy and record_zero.
class LoaderModel final : public Model {
 public:
  LoaderModel(nb::object load, nb::object explain) : load_(std::move(load)), explain_(std::move(explain)) {}
  ~LoaderModel() override {
    const nb::gil_scoped_acquire gil;
    load_.reset();
    explain_.reset();
    hooks_.clear();
    raised_.reset();
  }

  Status load_weights(const std::vector<NamedTensor>& weights) override {
    if (!baking())
      return {StatusCode::kUnimplemented, "loaders in Python bake, and load nothing eagerly", {}};
    const nb::gil_scoped_acquire gil;
    raised_.reset();
    try {
      nb::list fakes;
      for (const NamedTensor& weight : weights) fakes.append(nb::make_tuple(weight.name, weight.tensor));
      load_(fakes);
      return {};
    } catch (nb::python_error& error) {
      raised_ = std::make_unique<nb::python_error>(std::move(error));
      return {StatusCode::kAborted, raised_->what(), {.reason = Reason::kBakeFailed}};
    }
  }
  std::string explain_unused(std::string_view name) const override {
    const nb::gil_scoped_acquire gil;
    try {
      return nb::cast<std::string>(explain_(nb::str(name.data(), name.size())));
    } catch (nb::python_error& error) {
      raised_ = std::make_unique<nb::python_error>(std::move(error));
      return {};
    }
  }

  // `description`: of shardpull/modules.py.
  void add(nb::handle description) {
    Module& module = *check(add_module(text_of(description.attr("name"), "a module's name"),
                                       text_of(description.attr("type"), "a module's type")));
    for (nb::handle entry : nb::object(description.attr("parameters"))) {
      const std::string name = text_of(entry.attr("name"), "a parameter's name");
      const DType dtype = check(dtype_from_name(text_of(entry.attr("dtype"), "a parameter's dtype")));
      std::vector<std::int64_t> shape = sizes_of(entry.attr("shape"), "a parameter's shape");
      std::vector<std::int64_t> stride = sizes_of(entry.attr("stride"), "a parameter's stride");
      const Loader loader = [this](Parameter& parameter, const Tensor& loaded, const std::string&) {
        return write_(parameter, loaded);
      };
      Parameter* added = nullptr;
      if (nb::cast<bool>(nb::bool_(entry.attr("optional")))) {
        added = check(module.add_buffer(name, dtype, std::move(shape), {}, loader));
      } else {
        added = check(module.add_strided_parameter(name, dtype, std::move(shape), std::move(stride), loader));
      }
      parameters_.push_back(added);
    }
    const nb::object hook = nb::object(description.attr("post_process"));
    if (hook.is_none()) return;
    hooks_.push_back(hook);
    module.set_post_process([this, call = hooks_.size() - 1](Module&, const std::vector<std::byte*>&) {
      const nb::gil_scoped_acquire gil;
      try {
        hooks_[call]();
        return Status();
      } catch (nb::python_error& error) {
        return Status(StatusCode::kAborted, error.what());
      }
    });
  }
  void add_alias(nb::handle module, nb::handle name, std::uint64_t target, nb::handle shape) {
    Module* const home = find_module(text_of(module, "an alias's module"));
    if (home == nullptr) raise_argument("an alias in an unknown module");
    check(home->add_alias(text_of(name, "an alias's name"), parameter(target), sizes_of(shape, "an alias's shape")));
  }

  // Windows are in elements of `dtype`, from the parameter's first one.
  void record(std::uint64_t target, const std::string& dtype, std::int64_t offset, std::vector<std::int64_t> shape,
              std::vector<std::int64_t> stride, const Tensor* source) {
    const DType type = check(dtype_from_name(dtype));
    Parameter& into = parameter(target);
    write_ = [&](Parameter& parameter, const Tensor& loaded) -> Status {
      auto window = parameter.data().as_strided(type, offset, shape, stride);
      if (!window.ok()) return window.status();
      return source == nullptr ? window->zero_() : window->copy_(loaded);
    };
    static const Tensor zeros = check(Tensor::fake("zeros", DType::kU8, {0}));
    check(into.load(source == nullptr ? zeros : *source));
  }

  // Raises what Python code raised in the bake that has just failed.
  void rethrow() {
    if (!raised_) return;
    nb::python_error error = std::move(*std::exchange(raised_, nullptr));
    throw error;
  }

 private:
  Parameter& parameter(std::uint64_t index) const {
    if (index >= parameters_.size()) raise_argument("a write into an unknown parameter");
    return *parameters_[index];
  }

  nb::object load_, explain_;
  std::vector<nb::object> hooks_;
  std::vector<Parameter*> parameters_;  // as added
  std::function<Status(Parameter&, const Tensor&)> write_;  // of the load under way
  mutable std::unique_ptr<nb::python_error> raised_;        // by the loaders of the last bake
};

LoaderModel& loaders_of(const ModelHandle& handle) {
  auto* const model = dynamic_cast<LoaderModel*>(handle.model.get());
  if (model == nullptr) raise_argument("this model has no loaders in Python");
  return *model;
}

ModelHandle* model_of_loaders(const nb::object& load, const nb::object& explain, nb::handle modules) {
  auto model = std::make_unique<LoaderModel>(load, explain);
  for (nb::handle module : modules) model->add(module);
  return new ModelHandle(std::move(model));
}

nb::bytes record(ModelHandle& handle, nb::handle metadata, nb::handle conversions, nb::handle header) {
  const std::vector<TensorMeta> names = metadata_of(metadata);
  BakeOptions options;
  options.conversions = conversion_policy(conversions, "conversions");
  RecordingHeader about;
  about.engine = "shardpull";
  about.architecture = text_of(header.attr("architecture"), "architecture");
  about.layout = text_of(header.attr("layout"), "layout");
  about.worker = number_of(header.attr("worker"), "worker");
  const auto baked = bake(*handle.model, names, options);
  rethrow_raised(handle);
  const std::string text = check(write_recording(check(baked), names, about));
  return nb::bytes(text.data(), text.size());
}

}  // namespace

void rethrow_raised(const ModelHandle& handle) {
  if (auto* const model = dynamic_cast<LoaderModel*>(handle.model.get())) model->rethrow();
}

void bind_bake(nb::module_& module) {
  nb::class_<Tensor>(module, "Handle")
      .def("__init__",
           [](Tensor* self, const std::string& name, const std::string& dtype, nb::handle shape) {
             new (self) Tensor(
                 check(Tensor::fake(name, check(dtype_from_name(dtype)), sizes_of(shape, "shape"))));
           },
           nb::arg("name"), nb::arg("dtype"), nb::arg("shape"))
      .def_prop_ro("name", &Tensor::name)
      .def_prop_ro("dtype", [](const Tensor& self) { return std::string(dtype_name(self.dtype())); })
      .def_prop_ro("shape", [](const Tensor& self) { return nb::tuple(nb::cast(self.shape())); })
      .def_prop_ro("stride", [](const Tensor& self) { return nb::tuple(nb::cast(self.stride())); })
      .def_prop_ro("offset", &Tensor::offset)
      .def_prop_ro("chain", [](const Tensor& self) { return to_string(self.chain()); })
      .def("is_contiguous", &Tensor::is_contiguous)
      .def("apply", apply, nb::arg("method"), nb::arg("arguments"))
      .def("__str__", &Tensor::to_string);
  module.def("model_of_loaders", model_of_loaders, nb::arg("load"), nb::arg("explain"), nb::arg("modules"));
  module.def(
      "add_alias",
      [](ModelHandle& self, nb::handle home, nb::handle name, std::uint64_t target, nb::handle shape) {
        loaders_of(self).add_alias(home, name, target, shape);
      },
      nb::arg("model"), nb::arg("module"), nb::arg("name"), nb::arg("target"), nb::arg("shape"));
  module.def(
      "add_module_alias",
      [](ModelHandle& self, const std::string& path, const std::string& target) {
        Module* const found = self.model->find_module(target);
        if (found == nullptr) raise_argument("an alias of the unknown module " + target);
        check(self.model->add_module_alias(path, *found));
      },
      nb::arg("model"), nb::arg("path"), nb::arg("target"));
  module.def(
      "record_copy",
      [](ModelHandle& self, std::uint64_t target, const std::string& dtype, std::int64_t offset,
         std::vector<std::int64_t> shape, std::vector<std::int64_t> stride, const Tensor& source) {
        loaders_of(self).record(target, dtype, offset, std::move(shape), std::move(stride), &source);
      },
      nb::arg("model"), nb::arg("target"), nb::arg("dtype"), nb::arg("offset"), nb::arg("shape"),
      nb::arg("stride"), nb::arg("source"));
  module.def(
      "record_zero",
      [](ModelHandle& self, std::uint64_t target, const std::string& dtype, std::int64_t offset,
         std::vector<std::int64_t> shape, std::vector<std::int64_t> stride) {
        loaders_of(self).record(target, dtype, offset, std::move(shape), std::move(stride), nullptr);
      },
      nb::arg("model"), nb::arg("target"), nb::arg("dtype"), nb::arg("offset"), nb::arg("shape"),
      nb::arg("stride"));
  module.def("record", record, nb::arg("model"), nb::arg("metadata").none(),
             nb::arg("conversions").none(), nb::arg("header"));
}

}  // namespace shardpull::python
