#include "shardpull/model.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "base/status_macros.h"
#include "model/coverage.h"
#include "model/describe.h"
#include "model/recorder.h"
#include "tensor/copy.h"
#include "tensor/shape.h"
#include "tensor/strided_view.h"

namespace shardpull {
namespace {

Status refused(StatusCode code, Reason reason, std::string message, std::string tensor) {
  return Status(code, std::move(message), ErrorInfo{.reason = reason, .tensor = std::move(tensor)});
}

Region region_of(const ParameterView& view) {
  Region region;
  region.offset = view.offset();
  for (std::size_t d = 0; d < view.shape().size(); ++d)
    region.dims.push_back({view.shape()[d], view.stride()[d]});
  return region;
}

// Whether the copy kernels turn `from` into `to`. Two elements, so that sub-byte dtypes fill a byte.
bool conversion_exists(DType from, DType to) {
  if (from == to) return true;
  return compile_copy(Slice::whole(2), SourceLayout::contiguous(from, 2), from, contiguous_region(2), to)
      .ok();
}

// Copies `source` (real) into `target`, whose parameter lies at `memory`. Shapes are equal.
Status copy_elements(const Tensor& source, const ParameterView& target, std::byte* memory) {
  if (source.numel() == 0) return {};
  SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes, bytes_of(source.dtype(), source.numel()));
  const BitWindow window = bit_window(target.dtype(), target.offset(), target.shape(), target.stride());
  const bool in_order =
      StridedView{target.dtype(), target.shape(), target.stride(), target.offset()}.is_contiguous();
  if (source.dtype() == target.dtype() && in_order && window.offset % 8 == 0) {
    return source.copy_out(memory + window.offset / 8, bytes);
  }
  std::vector<std::byte> packed(static_cast<std::size_t>(bytes));
  SHARDPULL_RETURN_IF_ERROR(source.copy_out(packed.data(), bytes));
  SHARDPULL_ASSIGN_OR_RETURN(
      const CopyProgram program,
      compile_copy(Slice::whole(source.numel()), SourceLayout::contiguous(source.dtype(), source.numel()),
                   source.dtype(), region_of(target), target.dtype()));
  run(program, packed.data(), memory);
  return {};
}

// Names the running loader for the length of one load().
class StampScope {
 public:
  StampScope(std::vector<Parameter*>& stamps, Parameter* parameter) : stamps_(stamps) {
    stamps_.push_back(parameter);
  }
  ~StampScope() { stamps_.pop_back(); }
  StampScope(const StampScope&) = delete;
  StampScope& operator=(const StampScope&) = delete;

 private:
  std::vector<Parameter*>& stamps_;
};

}  // namespace

// ---- ParameterView -----------------------------------------------------------------------------------

std::string ParameterView::to_string() const {
  std::string out = parameter_->full_name();
  if (offset_ != 0) out += "+" + std::to_string(offset_);
  return out + " " + std::string(dtype_name(dtype_)) + " " + describe(shape_);
}

template <typename Operation>
Result<ParameterView> ParameterView::derived(const char* name, const Operation& operation) const {
  const StridedView view{dtype_, shape_, stride_, offset_};
  Result<StridedView> result = operation(view);
  if (!result.ok()) return result.status().with_context(std::string(name) + " of " + to_string());
  StridedView made = std::move(result).value();
  return ParameterView(parameter_, made.dtype, std::move(made.shape), std::move(made.stride), made.offset);
}

Result<ParameterView> ParameterView::narrow(std::int64_t dim, std::int64_t start, std::int64_t length) const {
  return derived("narrow", [&](const StridedView& view) { return view.narrow(dim, start, length); });
}

Result<ParameterView> ParameterView::select(std::int64_t dim, std::int64_t index) const {
  return derived("select", [&](const StridedView& view) { return view.select(dim, index); });
}

Result<ParameterView> ParameterView::transpose(std::int64_t d0, std::int64_t d1) const {
  return derived("transpose", [&](const StridedView& view) { return view.transpose(d0, d1); });
}

Result<ParameterView> ParameterView::view(std::vector<std::int64_t> sizes) const {
  return derived("view", [&](const StridedView& view) { return view.view(sizes); });
}

Result<ParameterView> ParameterView::view(DType dtype) const {
  return derived("view", [&](const StridedView& view) { return view.view(dtype); });
}

Result<ParameterView> ParameterView::index(std::vector<IndexItem> items) const {
  return derived("__getitem__", [&](const StridedView& view) { return view.index(items); });
}

Result<ParameterView> ParameterView::as_strided(std::int64_t offset, std::vector<std::int64_t> shape,
                                                std::vector<std::int64_t> stride) const {
  return as_strided(dtype_, offset, std::move(shape), std::move(stride));
}

Result<ParameterView> ParameterView::as_strided(DType dtype, std::int64_t offset,
                                                std::vector<std::int64_t> shape,
                                                std::vector<std::int64_t> stride) const {
  if (shape.size() != stride.size() || shape.size() > static_cast<std::size_t>(kMaxDims)) {
    return refused(
        StatusCode::kInvalidArgument, Reason::kBadArgument,
        "as_strided of " + to_string() + ": shape " + describe(shape) + " with stride " + describe(stride),
        parameter_->full_name());
  }
  return ParameterView(parameter_, dtype, std::move(shape), std::move(stride), offset);
}

Status ParameterView::check_region() const {
  const auto outside = [&] {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   "the window offset " + std::to_string(offset()) + " shape " + describe(shape()) +
                       " stride " + describe(stride()) + " of " + std::string(dtype_name(dtype())) +
                       " lies outside " + parameter_->full_name() + " " + describe(parameter_->shape()),
                   parameter_->full_name());
  };
  const auto extent = extent_of(shape(), stride());
  if (!extent || offset() < 0) return outside();
  const auto end = checked_add<std::int64_t>(offset(), *extent);
  const std::int64_t storage_bits = static_cast<std::int64_t>(parameter_->storage_bytes()) * 8;
  if (!end || *end > storage_bits / dtype_bits(dtype())) return outside();

  const BitWindow window = bit_window(dtype(), offset(), shape(), stride());
  if (window.self_overlapping) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   "the window offset " + std::to_string(offset()) + " shape " + describe(shape()) +
                       " stride " + describe(stride()) + " of " + parameter_->full_name() +
                       " overlaps itself",
                   parameter_->full_name());
  }
  const BitWindow whole = bit_window(parameter_->dtype(), 0, parameter_->shape(), parameter_->stride());
  if (!whole.dims.empty() && !contains(whole, window)) return outside();
  return {};
}

Status ParameterView::copy_(const Tensor& source) const {
  ParameterView target = *this;
  while (target.shape().size() > source.shape().size() && target.shape().front() == 1) {
    SHARDPULL_ASSIGN_OR_RETURN(target, target.select(0, 0));
  }
  if (target.shape() != source.shape()) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   "copy_ of " + source.to_string() + " with shape " + describe(source.shape()) + " into " +
                       to_string() + " with shape " + describe(shape()) +
                       ": shapes must be equal once leading 1s of the destination are dropped",
                   source.name());
  }
  SHARDPULL_RETURN_IF_ERROR(target.check_region());
  if (!conversion_exists(source.dtype(), dtype())) {
    return refused(StatusCode::kUnimplemented, Reason::kBadArgument,
                   "copy_ of " + source.to_string() + " into " + to_string() +
                       ": there is no conversion from " + std::string(dtype_name(source.dtype())) + " to " +
                       std::string(dtype_name(dtype())),
                   source.name());
  }
  const Model& model = parameter_->module().model();
  if (source.is_fake()) {
    if (source.recorder() == nullptr) {
      return refused(StatusCode::kFailedPrecondition, Reason::kWrongState,
                     "copy_ of the fake " + source.to_string() + ", which no bake records", source.name());
    }
    return source.recorder()->on_copy(source, target);
  }
  if (model.baking()) {
    return refused(StatusCode::kFailedPrecondition, Reason::kBakeFailed,
                   "copy_ of the real tensor " + source.to_string() + " into " + to_string() +
                       " during a bake: only the fakes a bake hands out may be copied",
                   source.name());
  }
  if (!model.takes_writes(parameter_->module())) return {};
  std::byte* const memory = parameter_->memory();
  if (memory == nullptr) {
    return refused(
        StatusCode::kFailedPrecondition, Reason::kWrongState,
        "copy_ into " + to_string() + ": the parameter has no memory (Model::materialise gives it some)",
        parameter_->full_name());
  }
  return copy_elements(source, target, memory);
}

Status ParameterView::zero_() const {
  SHARDPULL_RETURN_IF_ERROR(check_region());
  const Model& model = parameter_->module().model();
  if (model.recorder_ != nullptr) return model.recorder_->on_zero(*this);
  if (!model.takes_writes(parameter_->module())) return {};
  std::byte* const memory = parameter_->memory();
  if (memory == nullptr) {
    return refused(
        StatusCode::kFailedPrecondition, Reason::kWrongState,
        "zero_ of " + to_string() + ": the parameter has no memory (Model::materialise gives it some)",
        parameter_->full_name());
  }
  const BitWindow window = bit_window(dtype(), offset(), shape(), stride());
  if (window.offset % 8 != 0 || window.run % 8 != 0 ||
      std::any_of(window.dims.begin(), window.dims.end(),
                  [](const Dim& dim) { return dim.stride % 8 != 0; })) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   "zero_ of " + to_string() + ": its runs do not begin and end on whole bytes",
                   parameter_->full_name());
  }
  for (const BitRun& run : runs_of(window)) {
    std::memset(memory + run.begin / 8, 0, static_cast<std::size_t>((run.end - run.begin) / 8));
  }
  return {};
}

// ---- Parameter ---------------------------------------------------------------------------------------

std::string Parameter::full_name() const {
  return module_->name().empty() ? name_ : module_->name() + "." + name_;
}

std::int64_t Parameter::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape_) count *= size;
  return count;
}

std::uint64_t Parameter::storage_bytes() const {
  const std::int64_t bits = extent_of(shape_, stride_).value_or(0) * dtype_bits(dtype_);
  return static_cast<std::uint64_t>(bits) / 8;
}

Status Parameter::load(const Tensor& loaded, const std::string& shard) {
  const StampScope stamp(module_->model().stamps_, this);
  const Status status = loader_ ? loader_(*this, loaded, shard) : data().copy_(loaded);
  return status.with_context("loading " + loaded.name() + " into " + full_name());
}

ParameterView Parameter::data() {
  return ParameterView(&storage(), dtype_, shape_, stride_, 0);
}

std::byte* Parameter::memory() const {
  return module_->model().baking() ? nullptr : storage().memory_;
}

Status Parameter::bind(std::byte* memory, std::uint64_t bytes) {
  if (module_->model().baking() || is_alias()) {
    return refused(StatusCode::kFailedPrecondition, Reason::kWrongState,
                   "bind of " + full_name() +
                       (is_alias() ? ", an alias of " + storage().full_name() : ": the model bakes"),
                   full_name());
  }
  if (memory != nullptr && bytes < storage_bytes()) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   "bind of " + full_name() + " to " + std::to_string(bytes) + " bytes: it needs " +
                       std::to_string(storage_bytes()),
                   full_name());
  }
  memory_ = memory;
  return {};
}

// ---- Module ------------------------------------------------------------------------------------------

Parameter* Module::find(std::string_view parameter) const {
  for (const auto* list : {&parameters_, &aliases_}) {
    for (const auto& candidate : *list) {
      if (candidate->name() == parameter) return candidate.get();
    }
  }
  return nullptr;
}

// Whether the model's structure may still change.
#define SHARDPULL_REQUIRE_OPEN(model, what)                                                             \
  do {                                                                                                  \
    if ((model).baking() || (model).storage_ != nullptr) {                                              \
      return refused(StatusCode::kFailedPrecondition, Reason::kWrongState,                              \
                     (what) + ((model).baking() ? ": the model bakes" : ": the model is materialised"), \
                     (what));                                                                           \
    }                                                                                                   \
  } while (false)

Result<Parameter*> Module::add(std::string name, DType dtype, std::vector<std::int64_t> shape,
                               std::vector<std::int64_t> stride, Loader loader) {
  const std::string full = name_.empty() ? name : name_ + "." + name;
  SHARDPULL_REQUIRE_OPEN(*model_, full);
  if (name.empty() || find(name) != nullptr) {
    return refused(StatusCode::kAlreadyExists, Reason::kBadArgument,
                   name.empty() ? "a parameter of " + name_ + " without a name" : full + " exists already",
                   full);
  }
  SHARDPULL_RETURN_IF_ERROR(checked_numel(dtype, shape).status().with_context(full));
  if (stride.size() != shape.size()) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   full + ": shape " + describe(shape) + " with stride " + describe(stride), full);
  }
  const auto extent = extent_of(shape, stride);
  const auto bits = extent ? checked_mul<std::int64_t>(*extent, dtype_bits(dtype)) : std::nullopt;
  if (!bits || *bits > std::numeric_limits<std::int64_t>::max() / 2) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   full + " " + describe(shape) + " is too large", full);
  }
  if (*bits % 8 != 0) {
    return refused(
        StatusCode::kInvalidArgument, Reason::kBadArgument,
        full + " " + describe(shape) + " of " + std::string(dtype_name(dtype)) + " does not end on a byte",
        full);
  }
  if (bit_window(dtype, 0, shape, stride).self_overlapping) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument, full + " overlaps itself", full);
  }
  std::unique_ptr<Parameter> parameter(new Parameter);
  parameter->module_ = this;
  parameter->name_ = std::move(name);
  parameter->dtype_ = dtype;
  parameter->shape_ = std::move(shape);
  parameter->stride_ = std::move(stride);
  parameter->loader_ = std::move(loader);
  parameters_.push_back(std::move(parameter));
  return parameters_.back().get();
}

Result<Parameter*> Module::add_parameter(std::string name, DType dtype, std::vector<std::int64_t> shape,
                                         Loader loader) {
  SHARDPULL_RETURN_IF_ERROR(checked_numel(dtype, shape).status().with_context(name_ + "." + name));
  std::vector<std::int64_t> stride = contiguous_strides(shape);
  return add(std::move(name), dtype, std::move(shape), std::move(stride), std::move(loader));
}

Result<Parameter*> Module::add_strided_parameter(std::string name, DType dtype,
                                                 std::vector<std::int64_t> shape,
                                                 std::vector<std::int64_t> stride, Loader loader) {
  return add(std::move(name), dtype, std::move(shape), std::move(stride), std::move(loader));
}

Result<Parameter*> Module::add_buffer(std::string name, DType dtype, std::vector<std::int64_t> shape,
                                      std::vector<std::byte> initial, Loader loader) {
  SHARDPULL_ASSIGN_OR_RETURN(Parameter* const buffer,
                             add_parameter(std::move(name), dtype, std::move(shape), std::move(loader)));
  if (!initial.empty() && initial.size() != buffer->storage_bytes()) {
    const Status status = refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                                  buffer->full_name() + " has " + std::to_string(initial.size()) +
                                      " initial bytes; it needs " + std::to_string(buffer->storage_bytes()),
                                  buffer->full_name());
    parameters_.pop_back();
    return status;
  }
  buffer->optional_ = true;
  buffer->initial_ = std::move(initial);
  return buffer;
}

Result<Parameter*> Module::add_alias(std::string name, Parameter& target, std::vector<std::int64_t> shape) {
  Parameter& root = target.storage();
  const std::string full = name_.empty() ? name : name_ + "." + name;
  SHARDPULL_REQUIRE_OPEN(*model_, full);
  if (name.empty() || find(name) != nullptr) {
    return refused(StatusCode::kAlreadyExists, Reason::kBadArgument, full + " exists already", full);
  }
  if (&root.module().model() != model_) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   full + " aliases a parameter of another model", full);
  }
  // A view, as PyTorch's view(shape) would give it; refused where that would need a copy.
  SHARDPULL_ASSIGN_OR_RETURN(const ParameterView view, root.data().view(std::move(shape)));
  std::unique_ptr<Parameter> alias(new Parameter);
  alias->module_ = this;
  alias->name_ = std::move(name);
  alias->dtype_ = root.dtype_;
  alias->shape_ = view.shape();
  alias->stride_ = view.stride();
  alias->loader_ = nullptr;
  alias->storage_ = &root;
  aliases_.push_back(std::move(alias));
  return aliases_.back().get();
}

Status Module::declare_padding_rows(std::string_view parameter, std::int64_t first, std::int64_t end) {
  Parameter* const target = find(parameter);
  if (target == nullptr || target->is_alias()) {
    return refused(StatusCode::kNotFound, Reason::kBadArgument,
                   name_ + " has no parameter " + std::string(parameter), name_);
  }
  SHARDPULL_REQUIRE_OPEN(*model_, target->full_name());
  if (target->shape_.empty() || first < 0 || end < first || end > target->shape_[0]) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   "padding rows [" + std::to_string(first) + ", " + std::to_string(end) + ") of " +
                       target->full_name() + " " + describe(target->shape_),
                   target->full_name());
  }
  Region region;
  region.offset = first * target->stride_[0];
  for (std::size_t d = 0; d < target->shape_.size(); ++d) {
    region.dims.push_back({d == 0 ? end - first : target->shape_[d], target->stride_[d]});
  }
  return declare_padding(parameter, std::move(region));
}

Status Module::declare_padding(std::string_view parameter, Region region) {
  Parameter* const target = find(parameter);
  if (target == nullptr || target->is_alias()) {
    return refused(StatusCode::kNotFound, Reason::kBadArgument,
                   name_ + " has no parameter " + std::string(parameter), name_);
  }
  SHARDPULL_REQUIRE_OPEN(*model_, target->full_name());
  std::vector<std::int64_t> shape, stride;
  for (const Dim& dim : region.dims) {
    shape.push_back(dim.size);
    stride.push_back(dim.stride);
  }
  SHARDPULL_ASSIGN_OR_RETURN(const ParameterView window,
                             target->data().as_strided(region.offset, std::move(shape), std::move(stride)));
  SHARDPULL_RETURN_IF_ERROR(window.check_region().with_context("padding"));
  if (region.numel() > 0) target->padding_.push_back(std::move(region));
  return {};
}

// ---- Model -------------------------------------------------------------------------------------------

struct Model::Storage {
  struct Free {
    void operator()(void* block) const { std::free(block); }
  };
  struct Allocation {
    Parameter* parameter = nullptr;
    std::unique_ptr<void, Free> block;
    std::byte* memory = nullptr;
    std::uint64_t bytes = 0;
  };
  std::vector<Allocation> allocations;
  std::uint64_t guard_bytes = 0;
  std::byte fill{0};
};

Model::Model() = default;
Model::~Model() = default;

Result<Module*> Model::add_module(std::string name, std::string type) {
  SHARDPULL_REQUIRE_OPEN(*this, name);
  if (by_name_.contains(name)) {
    return refused(StatusCode::kAlreadyExists, Reason::kBadArgument,
                   "the model has a module " + name + " already", name);
  }
  std::unique_ptr<Module> module(new Module);
  module->model_ = this;
  module->name_ = std::move(name);
  module->type_ = std::move(type);
  module->index_ = static_cast<std::uint32_t>(modules_.size());
  modules_.push_back(std::move(module));
  Module* const added = modules_.back().get();
  by_name_.emplace(added->name_, added);
  return added;
}

Status Model::add_module_alias(std::string alias, Module& target) {
  SHARDPULL_REQUIRE_OPEN(*this, alias);
  if (by_name_.contains(alias)) {
    return refused(StatusCode::kAlreadyExists, Reason::kBadArgument,
                   "the model has a module " + alias + " already", alias);
  }
  if (&target.model() != this) {
    return refused(StatusCode::kInvalidArgument, Reason::kBadArgument,
                   alias + " aliases a module of another model", alias);
  }
  by_name_.emplace(std::move(alias), &target);
  return {};
}

#undef SHARDPULL_REQUIRE_OPEN

Module* Model::find_module(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

std::vector<std::pair<std::string, Module*>> Model::module_aliases() const {
  std::vector<std::pair<std::string, Module*>> aliases;
  for (const auto& [path, module] : by_name_) {
    if (path != module->name()) aliases.emplace_back(path, module);
  }
  return aliases;
}

Status Model::materialise(std::byte fill, std::uint64_t guard_bytes) {
  constexpr std::uint64_t kAlignment = 64;  // of each parameter's first byte
  if (storage_ != nullptr) return {};
  auto storage = std::make_unique<Storage>();
  storage->guard_bytes = guard_bytes;
  storage->fill = fill;
  for (const auto& module : modules_) {
    for (const auto& parameter : module->parameters_) {
      if (parameter->memory_ != nullptr) continue;  // bound
      const std::uint64_t bytes = parameter->storage_bytes();
      const auto guards = checked_mul<std::uint64_t>(guard_bytes, 2);
      const auto guarded = guards ? checked_add<std::uint64_t>(bytes, *guards) : std::nullopt;
      const auto total = guarded ? checked_add<std::uint64_t>(*guarded, kAlignment) : std::nullopt;
      // calloc leaves the pages of large zeroed blocks untouched.
      void* const block =
          total ? (fill == std::byte{0} ? std::calloc(*total, 1) : std::malloc(*total)) : nullptr;
      if (block == nullptr) {
        return refused(StatusCode::kResourceExhausted, Reason::kNoMemory,
                       "no memory for " + parameter->full_name() + ": " + std::to_string(bytes) + " bytes",
                       parameter->full_name());
      }
      Storage::Allocation allocation;
      allocation.parameter = parameter.get();
      allocation.block.reset(block);
      allocation.bytes = bytes;
      if (fill != std::byte{0}) std::memset(block, static_cast<int>(fill), *total);
      void* first = static_cast<std::byte*>(block) + guard_bytes;
      std::size_t room = static_cast<std::size_t>(*total - guard_bytes);
      allocation.memory =
          static_cast<std::byte*>(std::align(kAlignment, static_cast<std::size_t>(bytes), first, room));
      if (!parameter->initial_.empty())
        std::memcpy(allocation.memory, parameter->initial_.data(), parameter->initial_.size());
      storage->allocations.push_back(std::move(allocation));
    }
  }
  for (const Storage::Allocation& allocation : storage->allocations)
    allocation.parameter->memory_ = allocation.memory;
  storage_ = std::move(storage);
  return {};
}

Status Model::check_guards() const {
  if (storage_ == nullptr) return {};
  for (const Storage::Allocation& allocation : storage_->allocations) {
    for (std::uint64_t i = 0; i < storage_->guard_bytes; ++i) {
      const auto report = [&](std::string where) {
        return refused(StatusCode::kDataLoss, Reason::kCorrupt,
                       "a guard byte of " + allocation.parameter->full_name() + " was written: " + where,
                       allocation.parameter->full_name());
      };
      if (*(allocation.memory - 1 - i) != storage_->fill)
        return report(std::to_string(i + 1) + " bytes before its first");
      if (allocation.memory[allocation.bytes + i] != storage_->fill)
        return report(std::to_string(i) + " bytes past its end");
    }
  }
  return {};
}

std::uint64_t Model::parameter_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& module : modules_) {
    for (const auto& parameter : module->parameters_) {
      bytes += static_cast<std::uint64_t>(parameter->numel() * dtype_bits(parameter->dtype()) / 8);
    }
  }
  return bytes;
}

std::uint64_t Model::parameter_count() const {
  std::uint64_t count = 0;
  for (const auto& module : modules_) {
    for (const auto& parameter : module->parameters_) count += static_cast<std::uint64_t>(parameter->numel());
  }
  return count;
}

}  // namespace shardpull
