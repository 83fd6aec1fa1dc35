#include "shardpull/tensor.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked.h"
#include "base/limits.h"
#include "base/status_macros.h"
#include "tensor/copy.h"
#include "tensor/op_table.h"
#include "tensor/shape.h"
#include "tensor/slice_algebra.h"
#include "tensor/strided_view.h"

namespace shardpull {
namespace {

using Items = std::vector<IndexItem>;

std::string print(const IndexItem& item) {
  struct Printer {
    std::string operator()(std::int64_t index) const { return fmt::format("{}", index); }
    std::string operator()(IndexNone) const { return "None"; }
    std::string operator()(IndexEllipsis) const { return "..."; }
    std::string operator()(const IndexSlice& slice) const {
      const auto part = [](const std::optional<std::int64_t>& value) {
        return value ? fmt::format("{}", *value) : "";
      };
      std::string text = part(slice.start) + ":" + part(slice.stop);
      if (slice.step) text += ":" + part(slice.step);
      return text;
    }
  };
  return std::visit(Printer{}, item);
}

std::string print(const Items& items) {
  if (items.empty()) return "()";
  std::string text;
  for (const IndexItem& item : items) {
    if (!text.empty()) text += ", ";
    text += print(item);
  }
  return text;
}

// Whether people write the method's list argument as separate arguments.
bool spreads_list(std::string_view method) {
  return method == "view" || method == "reshape" || method == "permute";
}

// "narrow(0, 512, 512)" or "[1:3, ...]".
std::string print(const Op& op) {
  std::string arguments;
  for (const OpArg& argument : op.args) {
    if (!arguments.empty()) arguments += ", ";
    if (const auto* integer = std::get_if<std::int64_t>(&argument)) {
      arguments += fmt::format("{}", *integer);
    } else if (const auto* list = std::get_if<Sizes>(&argument)) {
      const std::string values = fmt::format("{}", fmt::join(*list, ", "));
      arguments += spreads_list(op.method) && !list->empty() ? values : "[" + values + "]";
    } else if (const auto* dtype = std::get_if<DType>(&argument)) {
      arguments += dtype_name(*dtype);
    } else {
      arguments += print(std::get<Items>(argument));
    }
  }
  if (op.method == "__getitem__") return "[" + arguments + "]";
  return fmt::format("{}({})", op.method, arguments);
}

// The result of a reshape or contiguous() that had to copy. Its elements, row-major, are those of `view`
// (counted in elements of `dtype`) over what lies below: an earlier copy, or the root's logical row-major
// elements.
struct Copied {
  Region view;
  DType dtype = DType::kF32;
  std::shared_ptr<const Copied> below;
};

// What all handles derived from one tensor share. Immutable.
struct Root {
  std::string name;
  DType dtype = DType::kF32;
  Sizes shape;
  const std::byte* data = nullptr;  // real tensors only
  Sizes memory_stride;              // real tensors only: the strides of the memory at `data`
  bool fake = true;
  std::shared_ptr<Recorder> recorder;
};

}  // namespace

std::string to_string(const OpChain& chain) {
  std::string text;
  for (const Op& op : chain) text += op.method == "__getitem__" ? print(op) : "." + print(op);
  return text;
}

struct Tensor::Impl {
  std::shared_ptr<const Root> root;
  StridedView view;  // over the elements of `base`, or of the root
  std::shared_ptr<const Copied> base;
  OpChain chain;

  // Names operation, tensor and chain in front of what is wrong.
  Status refuse(const Op& op, const Status& why) const {
    ErrorInfo info = why.info();
    info.tensor = root->name;
    return Status(why.code(), fmt::format("{} refused on {}: {}", print(op), describe(), why.message()),
                  std::move(info));
  }

  std::string describe() const {
    return fmt::format("{}{} {} [{}]", root->name, shardpull::to_string(chain), dtype_name(view.dtype),
                       fmt::join(view.shape, ", "));
  }

  Status check_chain(const Op& op) const {
    if (chain.size() < kMaxOpsPerChain) return {};
    return refuse(op, Status(StatusCode::kInvalidArgument,
                             fmt::format("chains have at most {} operations", kMaxOpsPerChain),
                             {.reason = Reason::kLimit}));
  }

  Result<Tensor> derive(Op op, Result<StridedView> result) const {
    if (!result.ok()) return refuse(op, result.status());
    SHARDPULL_RETURN_IF_ERROR(check_chain(op));
    auto impl =
        std::make_shared<Impl>(Impl{.root = root, .view = *std::move(result), .base = base, .chain = {}});
    impl->chain.reserve(chain.size() + 1);
    impl->chain = chain;
    impl->chain.push_back(std::move(op));
    return Tensor(std::move(impl));
  }

  // The same elements, copied: contiguous, in a `shape` of equally many.
  Result<Tensor> derive_copy(Op op, Sizes shape) const {
    SHARDPULL_RETURN_IF_ERROR(check_chain(op));
    auto impl = std::make_shared<Impl>(Impl{.root = root,
                                            .view = StridedView::contiguous(view.dtype, std::move(shape)),
                                            .base = {},
                                            .chain = chain});
    impl->base =
        std::make_shared<const Copied>(Copied{.view = view.region(), .dtype = view.dtype, .below = base});
    impl->chain.push_back(std::move(op));
    return Tensor(std::move(impl));
  }

  Result<Tensor> reshaped(Op op, const Sizes& sizes) const {
    auto as_view = view.reshape_view(sizes);
    if (!as_view.ok()) return refuse(op, as_view.status());
    if (as_view->has_value()) return derive(std::move(op), **std::move(as_view));
    return derive_copy(std::move(op), *view.infer_sizes(sizes));
  }

  Result<std::vector<Tensor>> derive_all(const Op& op, Result<std::vector<StridedView>> results) const {
    if (!results.ok()) return refuse(op, results.status());
    SHARDPULL_RETURN_IF_ERROR(check_chain(op));
    std::vector<Tensor> children;
    children.reserve(results->size());
    std::int64_t index = 0;
    for (StridedView& result : *results) {
      auto impl =
          std::make_shared<Impl>(Impl{.root = root, .view = std::move(result), .base = base, .chain = {}});
      impl->chain.reserve(chain.size() + 2);
      impl->chain = chain;
      impl->chain.push_back(op);
      impl->chain.push_back({"__getitem__", {index++}});
      children.push_back(Tensor(std::move(impl)));
    }
    return children;
  }

  // Output `index` of the multi-output operation `op`, without making the others: a recording names one of
  // hundreds, and is replayed once for each. Nothing when the arguments have the wrong form.
  std::optional<Result<Tensor>> child(OpKind kind, const Op& op, std::int64_t index) const;

  // A dim argument as a chain records it: counted from the front. Out-of-range ones stay as they were; the
  // operation refuses them.
  std::int64_t wrapped(std::int64_t dim, std::int64_t extra = 0) const {
    const std::int64_t range = std::max<std::int64_t>(view.dim() + extra, 1);
    return dim < 0 && dim >= -range ? dim + range : dim;
  }
  Sizes wrapped(Sizes dims) const {
    for (std::int64_t& dim : dims) dim = wrapped(dim);
    return dims;
  }

  Result<Slice> slice() const;
};

// Looks the view's elements up through the copies, outermost first, down to the root. A view(dtype) changes
// the unit that positions count in; everything is done in the smallest unit that occurs and converted at the
// end.
Result<Slice> Tensor::Impl::slice() const {
  if (view.numel() == 0) return Slice{};
  const int wire_bits = dtype_bits(view.dtype);
  int unit = std::min(wire_bits, dtype_bits(root->dtype));
  for (const Copied* layer = base.get(); layer != nullptr; layer = layer->below.get()) {
    unit = std::min(unit, dtype_bits(layer->dtype));
  }
  // More regions than a slice may have are fine on the way: what comes later may drop or merge them.
  constexpr std::size_t kMaxOnTheWay = 4096;
  SHARDPULL_ASSIGN_OR_RETURN(Slice slice, change_unit(canonicalise({view.region()}), wire_bits, unit));
  for (const Copied* layer = base.get(); layer != nullptr; layer = layer->below.get()) {
    SHARDPULL_ASSIGN_OR_RETURN(const Slice source,
                               change_unit(canonicalise({layer->view}), dtype_bits(layer->dtype), unit));
    SHARDPULL_ASSIGN_OR_RETURN(slice, compose(source.regions.front(), slice, kMaxOnTheWay));
  }
  SHARDPULL_ASSIGN_OR_RETURN(slice, change_unit(slice, unit, wire_bits));
  SHARDPULL_RETURN_IF_ERROR(check_limits(slice));
  SHARDPULL_RETURN_IF_ERROR(check_byte_runs(slice, view.dtype));
  return slice;
}

Tensor::Tensor(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Result<Tensor> Tensor::fake(std::string name, DType dtype, std::vector<std::int64_t> shape,
                            std::shared_ptr<Recorder> recorder) {
  if (auto checked = checked_numel(dtype, shape); !checked.ok()) return checked.status().with_context(name);
  auto root = std::make_shared<const Root>(Root{.name = std::move(name),
                                                .dtype = dtype,
                                                .shape = shape,
                                                .data = nullptr,
                                                .memory_stride = {},
                                                .fake = true,
                                                .recorder = std::move(recorder)});
  auto impl = std::make_shared<const Impl>(Impl{.root = std::move(root),
                                                .view = StridedView::contiguous(dtype, std::move(shape)),
                                                .base = {},
                                                .chain = {}});
  return Tensor(std::move(impl));
}

Result<Tensor> Tensor::real(std::string name, DType dtype, std::vector<std::int64_t> shape,
                            const std::byte* data) {
  Sizes stride = contiguous_strides(shape);
  return real_strided(std::move(name), dtype, std::move(shape), std::move(stride), data);
}

Result<Tensor> Tensor::real_strided(std::string name, DType dtype, std::vector<std::int64_t> shape,
                                    std::vector<std::int64_t> stride, const std::byte* data) {
  const auto refused = [&](std::string_view why) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: {}", name, why),
                  {.reason = Reason::kBadArgument, .tensor = name});
  };
  const auto numel = checked_numel(dtype, shape);
  if (!numel.ok()) return numel.status().with_context(name);
  if (stride.size() != shape.size()) return refused("shape and stride have different numbers of dims");
  if (std::any_of(stride.begin(), stride.end(), [](std::int64_t step) { return step < 0; }))
    return refused("a stride is negative");
  if (data == nullptr && *numel > 0) return refused("no memory given");
  auto root = std::make_shared<const Root>(Root{.name = std::move(name),
                                                .dtype = dtype,
                                                .shape = shape,
                                                .data = data,
                                                .memory_stride = std::move(stride),
                                                .fake = false,
                                                .recorder = nullptr});
  auto impl = std::make_shared<const Impl>(Impl{.root = std::move(root),
                                                .view = StridedView::contiguous(dtype, std::move(shape)),
                                                .base = {},
                                                .chain = {}});
  return Tensor(std::move(impl));
}

bool Tensor::is_fake() const {
  return impl_->root->fake;
}
const std::string& Tensor::name() const {
  return impl_->root->name;
}
DType Tensor::dtype() const {
  return impl_->view.dtype;
}
const std::vector<std::int64_t>& Tensor::shape() const {
  return impl_->view.shape;
}
const std::vector<std::int64_t>& Tensor::stride() const {
  return impl_->view.stride;
}
std::int64_t Tensor::offset() const {
  return impl_->view.offset;
}
std::int64_t Tensor::dim() const {
  return impl_->view.dim();
}
std::int64_t Tensor::numel() const {
  return impl_->view.numel();
}
bool Tensor::is_contiguous() const {
  return impl_->view.is_contiguous();
}
const OpChain& Tensor::chain() const {
  return impl_->chain;
}
std::string Tensor::to_string() const {
  return impl_->describe();
}
const std::shared_ptr<Recorder>& Tensor::recorder() const {
  return impl_->root->recorder;
}

std::int64_t Tensor::size(std::int64_t d) const {
  const std::int64_t ndim = dim();
  if (d < -ndim || d >= ndim) return -1;
  return impl_->view.shape[static_cast<std::size_t>(d < 0 ? d + ndim : d)];
}

Result<Tensor> Tensor::narrow(std::int64_t dim, std::int64_t start, std::int64_t length) const {
  const std::int64_t d = impl_->wrapped(dim);
  const std::int64_t extent = size(d);
  const std::int64_t first = start < 0 && extent > 0 && start >= -extent ? start + extent : start;
  return impl_->derive({"narrow", {d, first, length}}, impl_->view.narrow(dim, start, length));
}

Result<Tensor> Tensor::view(std::vector<std::int64_t> sizes) const {
  auto result = impl_->view.view(sizes);
  Op op{"view", {result.ok() ? result->shape : std::move(sizes)}};
  return impl_->derive(std::move(op), std::move(result));
}

Result<Tensor> Tensor::view(DType dtype) const {
  return impl_->derive({"view", {dtype}}, impl_->view.view(dtype));
}

Result<Tensor> Tensor::reshape(std::vector<std::int64_t> sizes) const {
  auto inferred = impl_->view.infer_sizes(sizes);
  return impl_->reshaped({"reshape", {inferred.ok() ? *std::move(inferred) : sizes}}, sizes);
}

Result<Tensor> Tensor::index(std::vector<IndexItem> items) const {
  auto result = impl_->view.index(items);
  return impl_->derive({"__getitem__", {std::move(items)}}, std::move(result));
}

Result<Tensor> Tensor::select(std::int64_t dim, std::int64_t index) const {
  const std::int64_t d = impl_->wrapped(dim);
  const std::int64_t extent = size(d);
  const std::int64_t at = index < 0 && extent > 0 && index >= -extent ? index + extent : index;
  return impl_->derive({"select", {d, at}}, impl_->view.select(dim, index));
}

Result<Tensor> Tensor::unsqueeze(std::int64_t dim) const {
  return impl_->derive({"unsqueeze", {impl_->wrapped(dim, 1)}}, impl_->view.unsqueeze(dim));
}

Result<Tensor> Tensor::squeeze() const {
  return impl_->derive({"squeeze", {}}, impl_->view.squeeze());
}

Result<Tensor> Tensor::squeeze(std::vector<std::int64_t> dims) const {
  auto result = impl_->view.squeeze(dims);
  return impl_->derive({"squeeze", {impl_->wrapped(std::move(dims))}}, std::move(result));
}

Result<Tensor> Tensor::transpose(std::int64_t d0, std::int64_t d1) const {
  return impl_->derive({"transpose", {impl_->wrapped(d0), impl_->wrapped(d1)}},
                       impl_->view.transpose(d0, d1));
}

Result<Tensor> Tensor::t() const {
  return impl_->derive({"t", {}}, impl_->view.t());
}

Result<Tensor> Tensor::permute(std::vector<std::int64_t> dims) const {
  auto result = impl_->view.permute(dims);
  return impl_->derive({"permute", {impl_->wrapped(std::move(dims))}}, std::move(result));
}

Result<Tensor> Tensor::flatten(std::int64_t start, std::int64_t end) const {
  Op op{"flatten", {impl_->wrapped(start), impl_->wrapped(end)}};
  const auto sizes = impl_->view.flatten_sizes(start, end);
  if (!sizes.ok()) return impl_->refuse(op, sizes.status());
  if (*sizes == impl_->view.shape) return impl_->derive(std::move(op), impl_->view);
  return impl_->reshaped(std::move(op), *sizes);
}

Result<Tensor> Tensor::contiguous() const {
  if (is_contiguous()) return impl_->derive({"contiguous", {}}, impl_->view);
  return impl_->derive_copy({"contiguous", {}}, impl_->view.shape);
}

Result<std::vector<Tensor>> Tensor::chunk(std::int64_t n, std::int64_t dim) const {
  return impl_->derive_all({"chunk", {n, impl_->wrapped(dim)}}, impl_->view.chunk(n, dim));
}

Result<std::vector<Tensor>> Tensor::split(std::int64_t size, std::int64_t dim) const {
  return impl_->derive_all({"split", {size, impl_->wrapped(dim)}}, impl_->view.split(size, dim));
}

Result<std::vector<Tensor>> Tensor::split(std::vector<std::int64_t> sizes, std::int64_t dim) const {
  auto results = impl_->view.split(sizes, dim);
  return impl_->derive_all({"split", {std::move(sizes), impl_->wrapped(dim)}}, std::move(results));
}

Result<std::vector<Tensor>> Tensor::unbind(std::int64_t dim) const {
  return impl_->derive_all({"unbind", {impl_->wrapped(dim)}}, impl_->view.unbind(dim));
}

namespace {

// Reads the arguments of one recorded operation. Accepts what PyTorch accepts: sizes as one list or one by
// one, defaults left out.
class Arguments {
 public:
  explicit Arguments(const Op& op) : args_(op.args) {}

  std::size_t size() const { return args_.size(); }
  bool is_int(std::size_t i) const {
    return i < args_.size() && std::holds_alternative<std::int64_t>(args_[i]);
  }
  bool is_list(std::size_t i) const { return i < args_.size() && std::holds_alternative<Sizes>(args_[i]); }
  bool is_dtype(std::size_t i) const { return i < args_.size() && std::holds_alternative<DType>(args_[i]); }
  bool is_items(std::size_t i) const { return i < args_.size() && std::holds_alternative<Items>(args_[i]); }
  std::int64_t integer(std::size_t i) const { return std::get<std::int64_t>(args_[i]); }
  const Sizes& list(std::size_t i) const { return std::get<Sizes>(args_[i]); }
  DType dtype(std::size_t i) const { return std::get<DType>(args_[i]); }
  const Items& items(std::size_t i) const { return std::get<Items>(args_[i]); }

  // Exactly `count` integers.
  bool integers(std::size_t count) const { return args_.size() == count && all_ints(); }
  // At most `count` integers, for methods whose later arguments have defaults.
  bool integers_up_to(std::size_t count) const { return args_.size() <= count && all_ints(); }
  std::int64_t integer_or(std::size_t i, std::int64_t otherwise) const {
    return is_int(i) ? integer(i) : otherwise;
  }
  // One list, or any number of integers.
  std::optional<Sizes> sizes() const {
    if (args_.size() == 1 && is_list(0)) return list(0);
    if (!all_ints()) return std::nullopt;
    Sizes result;
    for (std::size_t i = 0; i < args_.size(); ++i) result.push_back(integer(i));
    return result;
  }

 private:
  bool all_ints() const {
    return std::all_of(args_.begin(), args_.end(),
                       [](const OpArg& arg) { return std::holds_alternative<std::int64_t>(arg); });
  }
  const std::vector<OpArg>& args_;
};

Status malformed(const OpSpec& spec) {
  return Status(StatusCode::kInvalidArgument, fmt::format("expected {}", spec.signature),
                {.reason = Reason::kUnsupportedOp});
}

// Applies an operation with one output. Nothing when the arguments have the wrong form.
std::optional<Result<Tensor>> apply_single(const Tensor& tensor, OpKind kind, const Arguments& args) {
  switch (kind) {
    case OpKind::kNarrow:
      if (args.integers(3)) return tensor.narrow(args.integer(0), args.integer(1), args.integer(2));
      break;
    case OpKind::kView:
      if (args.size() == 1 && args.is_dtype(0)) return tensor.view(args.dtype(0));
      if (auto sizes = args.sizes(); sizes && args.size() > 0) return tensor.view(*std::move(sizes));
      break;
    case OpKind::kReshape:
      if (auto sizes = args.sizes(); sizes && args.size() > 0) return tensor.reshape(*std::move(sizes));
      break;
    case OpKind::kIndex:
      if (args.size() == 1 && args.is_items(0)) return tensor.index(args.items(0));
      if (args.integers(1)) return tensor.index({args.integer(0)});
      break;
    case OpKind::kSelect:
      if (args.integers(2)) return tensor.select(args.integer(0), args.integer(1));
      break;
    case OpKind::kUnsqueeze:
      if (args.integers(1)) return tensor.unsqueeze(args.integer(0));
      break;
    case OpKind::kSqueeze:
      if (args.size() == 0) return tensor.squeeze();
      if (args.integers(1)) return tensor.squeeze(Sizes{args.integer(0)});
      if (args.size() == 1 && args.is_list(0)) return tensor.squeeze(args.list(0));
      break;
    case OpKind::kTranspose:
      if (args.integers(2)) return tensor.transpose(args.integer(0), args.integer(1));
      break;
    case OpKind::kT:
      if (args.size() == 0) return tensor.t();
      break;
    case OpKind::kPermute:
      if (auto dims = args.sizes()) return tensor.permute(*std::move(dims));
      break;
    case OpKind::kFlatten:
      if (args.integers_up_to(2)) return tensor.flatten(args.integer_or(0, 0), args.integer_or(1, -1));
      break;
    case OpKind::kContiguous:
      if (args.size() == 0) return tensor.contiguous();
      break;
    case OpKind::kChunk:
    case OpKind::kSplit:
    case OpKind::kUnbind:
      break;
  }
  return std::nullopt;
}

// The child index that follows a multi-output operation.
std::optional<std::int64_t> child_index(const OpChain& chain, std::size_t at) {
  if (at >= chain.size() || chain[at].method != "__getitem__") return std::nullopt;
  const Arguments args(chain[at]);
  if (args.size() != 1) return std::nullopt;
  if (args.is_int(0)) return args.integer(0);
  if (!args.is_items(0) || args.items(0).size() != 1) return std::nullopt;
  const auto* const index = std::get_if<std::int64_t>(&args.items(0).front());
  return index != nullptr ? std::optional(*index) : std::nullopt;
}

}  // namespace

std::optional<Result<Tensor>> Tensor::Impl::child(OpKind kind, const Op& op, std::int64_t index) const {
  const auto output = [&](const Op& normal, const Result<std::int64_t>& count,
                          const auto& part) -> Result<Tensor> {
    if (!count.ok()) return refuse(normal, count.status());
    if (index < -*count || index >= *count) {
      return refuse(op, Status(StatusCode::kInvalidArgument,
                               fmt::format("it gives {} tensors, index {} is out of range", *count, index),
                               {.reason = Reason::kUnsupportedOp}));
    }
    const std::int64_t at = index < 0 ? index + *count : index;
    SHARDPULL_ASSIGN_OR_RETURN(const Tensor made, derive(normal, part(at)));
    auto impl = std::make_shared<Impl>(*made.impl_);
    impl->chain.push_back({"__getitem__", {at}});
    return Tensor(std::move(impl));
  };
  const auto even = [&](const Op& normal, const Result<StridedView::EvenCut>& cut) {
    const Result<std::int64_t> count = cut.ok() ? Result<std::int64_t>(cut->parts) : cut.status();
    return output(normal, count, [&](std::int64_t at) { return view.part(*cut, at); });
  };
  const auto listed = [&](const Op& normal, const Result<std::vector<StridedView>>& parts) {
    const Result<std::int64_t> count =
        parts.ok() ? Result<std::int64_t>(static_cast<std::int64_t>(parts->size())) : parts.status();
    return output(normal, count, [&](std::int64_t at) {
      return Result<StridedView>((*parts)[static_cast<std::size_t>(at)]);
    });
  };

  const Arguments args(op);
  if (kind == OpKind::kUnbind && args.integers_up_to(1)) {
    const std::int64_t dim = args.integer_or(0, 0);
    return output({"unbind", {wrapped(dim)}}, view.unbind_count(dim),
                  [&](std::int64_t at) { return view.select(dim, at); });
  }
  if (args.size() == 0 || args.size() > 2 || (args.size() == 2 && !args.is_int(1))) return std::nullopt;
  const std::int64_t dim = args.integer_or(1, 0);
  if (kind == OpKind::kChunk && args.is_int(0)) {
    return even({"chunk", {args.integer(0), wrapped(dim)}}, view.chunk_cut(args.integer(0), dim));
  }
  if (kind == OpKind::kSplit && args.is_int(0)) {
    return even({"split", {args.integer(0), wrapped(dim)}}, view.split_cut(args.integer(0), dim));
  }
  if (kind == OpKind::kSplit && args.is_list(0)) {
    return listed({"split", {args.list(0), wrapped(dim)}}, view.split(args.list(0), dim));
  }
  return std::nullopt;
}

Result<Tensor> Tensor::apply(const Tensor& root, const OpChain& chain) {
  Tensor tensor = root;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const Op& op = chain[i];
    const OpSpec* const spec = find_op(op.method);
    const auto refuse = [&](std::string why) {
      return tensor.impl_->refuse(
          op, Status(StatusCode::kInvalidArgument, std::move(why), {.reason = Reason::kUnsupportedOp}));
    };
    if (spec == nullptr) return refuse(fmt::format("\"{}\" {}", op.method, refusal_reason(op.method)));
    const Arguments args(op);
    if (!spec->multi_output) {
      auto result = apply_single(tensor, spec->kind, args);
      if (!result) return tensor.impl_->refuse(op, malformed(*spec));
      if (!result->ok()) return result->status();
      tensor = **std::move(result);
      continue;
    }
    const auto index = child_index(chain, i + 1);
    if (!index)
      return refuse("it gives several tensors, and must be followed by \"__getitem__\" with one integer");
    auto result = tensor.impl_->child(spec->kind, op, *index);
    if (!result) return tensor.impl_->refuse(op, malformed(*spec));
    if (!result->ok()) return result->status();
    tensor = **std::move(result);
    ++i;
  }
  return tensor;
}

Result<Slice> Tensor::slice() const {
  auto result = impl_->slice();
  if (result.ok()) return result;
  ErrorInfo info = result.status().info();
  info.tensor = name();
  return Status(result.status().code(),
                fmt::format("slice of {}: {}", to_string(), result.status().message()), std::move(info));
}

Status Tensor::copy_out(std::byte* out, std::uint64_t out_bytes) const {
  const auto refused = [&](std::string_view why) {
    return Status(StatusCode::kInvalidArgument, fmt::format("copy_out of {}: {}", to_string(), why),
                  {.reason = Reason::kBadArgument, .tensor = name()});
  };
  if (is_fake()) return refused("a fake has no elements");
  const auto bytes = bytes_of(dtype(), numel());
  if (!bytes.ok()) return refused(bytes.status().message());
  if (*bytes != out_bytes) return refused(fmt::format("takes {} bytes, {} given", *bytes, out_bytes));
  SHARDPULL_ASSIGN_OR_RETURN(const Slice elements, slice());
  const Root& root = *impl_->root;
  const SourceLayout layout{.dtype = root.dtype, .shape = root.shape, .stride = root.memory_stride};
  const auto program = compile_copy(elements, layout, dtype(), contiguous_region(numel()), dtype());
  if (!program.ok()) return program.status().with_context(to_string());
  run(*program, root.data, out);
  return {};
}

}  // namespace shardpull
