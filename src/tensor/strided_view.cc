#include "tensor/strided_view.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked.h"
#include "base/limits.h"
#include "base/status_macros.h"
#include "tensor/shape.h"

namespace shardpull {
namespace {

constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();

Status refused(std::string why, Reason reason = Reason::kUnsupportedOp) {
  return Status(StatusCode::kInvalidArgument, std::move(why), {.reason = reason});
}

std::string join(const Sizes& values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}

std::int64_t product(const Sizes& sizes) {
  std::int64_t result = 1;
  for (const std::int64_t size : sizes) result *= size;
  return result;
}

// offset + index * stride. Strides grow with slice steps, so this can leave 64 bits.
Result<std::int64_t> moved(std::int64_t offset, std::int64_t index, std::int64_t stride) {
  const auto distance = checked_mul<std::int64_t>(index, stride);
  const auto sum = distance ? checked_add<std::int64_t>(offset, *distance) : std::nullopt;
  if (!sum) return refused("reaches an offset that does not fit 64 bits", Reason::kLimit);
  return *sum;
}

Status check_outputs(std::int64_t outputs) {
  if (outputs <= static_cast<std::int64_t>(kMaxOutputsPerOp)) return {};
  return refused(fmt::format("would give {} tensors, at most {} are allowed", outputs, kMaxOutputsPerOp),
                 Reason::kLimit);
}

// The strides with which `new_shape` looks at the same memory, or nothing when only a copy could. Walks from
// the innermost dim over runs of old dims that are one piece of memory; each run must be filled exactly by
// new dims. Same numel.
std::optional<Sizes> view_strides(const Sizes& old_shape, const Sizes& old_stride, const Sizes& new_shape) {
  if (old_shape.empty()) return Sizes(new_shape.size(), 1);
  if (product(old_shape) == 0) return old_shape == new_shape ? old_stride : contiguous_strides(new_shape);
  Sizes new_stride(new_shape.size());
  std::size_t view_dims_left = new_shape.size();
  std::int64_t run_stride = old_stride.back();
  std::int64_t old_numel = 1, view_numel = 1;
  for (std::size_t d = old_shape.size(); d-- > 0;) {
    old_numel *= old_shape[d];
    const bool run_ends = d == 0 || (old_shape[d - 1] != 1 && old_stride[d - 1] != old_numel * run_stride);
    if (!run_ends) continue;
    while (view_dims_left > 0 && (view_numel < old_numel || new_shape[view_dims_left - 1] == 1)) {
      --view_dims_left;
      new_stride[view_dims_left] = view_numel * run_stride;
      view_numel *= new_shape[view_dims_left];
    }
    if (view_numel != old_numel) return std::nullopt;
    if (d > 0) {
      run_stride = old_stride[d - 1];
      old_numel = view_numel = 1;
    }
  }
  if (view_dims_left != 0) return std::nullopt;
  return new_stride;
}

// Python's start:stop:step on one dim of a view.
Result<StridedView> sliced(StridedView view, std::int64_t dim, const IndexSlice& slice) {
  const std::int64_t step = slice.step.value_or(1);
  if (step < 1) return refused(fmt::format("slice step {} is not positive", step));
  const auto d = static_cast<std::size_t>(dim);
  const std::int64_t size = view.shape[d];
  const auto clamp = [&](std::int64_t bound) {
    if (bound < 0) bound += size;
    return std::clamp<std::int64_t>(bound, 0, size);
  };
  const std::int64_t start = clamp(slice.start.value_or(0));
  const std::int64_t stop = std::max(start, clamp(slice.stop.value_or(kInt64Max)));
  SHARDPULL_ASSIGN_OR_RETURN(view.offset, moved(view.offset, start, view.stride[d]));
  const auto stride = checked_mul<std::int64_t>(view.stride[d], step);
  if (!stride)
    return refused(fmt::format("slice step {} makes a stride that does not fit 64 bits", step),
                   Reason::kLimit);
  view.stride[d] = *stride;
  view.shape[d] = ceil_div(stop - start, step);
  return view;
}

}  // namespace

Sizes contiguous_strides(const Sizes& shape) {
  Sizes stride(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    stride[i] = step;
    step *= std::max<std::int64_t>(shape[i], 1);
  }
  return stride;
}

Result<std::int64_t> wrap_dim(std::int64_t dim, std::int64_t ndim, bool scalar_has_one) {
  const std::int64_t range = ndim == 0 && scalar_has_one ? 1 : ndim;
  if (range == 0) return refused(fmt::format("dim {} given, but the tensor has none", dim));
  if (dim < -range || dim >= range) {
    return refused(fmt::format("dim {} is out of range [{}, {}]", dim, -range, range - 1));
  }
  return dim < 0 ? dim + range : dim;
}

StridedView StridedView::contiguous(DType dtype, Sizes shape) {
  StridedView view;
  view.dtype = dtype;
  view.stride = contiguous_strides(shape);
  view.shape = std::move(shape);
  return view;
}

std::int64_t StridedView::numel() const {
  return product(shape);
}

bool StridedView::is_contiguous() const {
  if (numel() == 0) return true;
  std::int64_t expected = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && stride[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

Region StridedView::region() const {
  Region region{.offset = offset, .dims = {}};
  region.dims.reserve(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) region.dims.push_back({shape[i], stride[i]});
  return region;
}

Result<StridedView> StridedView::narrow(std::int64_t dim_arg, std::int64_t start, std::int64_t length) const {
  if (shape.empty()) return refused("the tensor has no dim to narrow");
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t d, wrap_dim(dim_arg, dim()));
  const std::int64_t size = shape[static_cast<std::size_t>(d)];
  if (length < 0) return refused(fmt::format("length {} is negative", length));
  if (start < -size || start > size) {
    return refused(fmt::format("start {} is out of range [{}, {}] of dim {}", start, -size, size, d));
  }
  const std::int64_t begin = start < 0 ? start + size : start;
  if (begin > size - length) {
    return refused(fmt::format("start {} + length {} exceeds dim {} of size {}", begin, length, d, size));
  }
  return sliced(*this, d, IndexSlice{begin, begin + length, 1});
}

Result<StridedView> StridedView::select(std::int64_t dim_arg, std::int64_t index) const {
  if (shape.empty()) return refused("the tensor has no dim to index");
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t wrapped, wrap_dim(dim_arg, dim()));
  const auto d = static_cast<std::size_t>(wrapped);
  if (index < -shape[d] || index >= shape[d]) {
    return refused(fmt::format("index {} is out of bounds for dim {} of size {}", index, d, shape[d]));
  }
  StridedView result = *this;
  SHARDPULL_ASSIGN_OR_RETURN(result.offset, moved(offset, index < 0 ? index + shape[d] : index, stride[d]));
  result.shape.erase(result.shape.begin() + wrapped);
  result.stride.erase(result.stride.begin() + wrapped);
  return result;
}

Result<StridedView> StridedView::index(const std::vector<IndexItem>& items) const {
  const auto consumes_dim = [](const IndexItem& item) {
    return std::holds_alternative<std::int64_t>(item) || std::holds_alternative<IndexSlice>(item);
  };
  const std::int64_t specified = std::count_if(items.begin(), items.end(), consumes_dim);
  if (specified > dim()) return refused(fmt::format("{} indices for a tensor of {} dims", specified, dim()));
  StridedView result = *this;
  std::int64_t d = 0;  // the dim of `result` that the next item applies to
  for (const IndexItem& item : items) {
    if (const auto* index = std::get_if<std::int64_t>(&item)) {
      SHARDPULL_ASSIGN_OR_RETURN(result, result.select(d, *index));
    } else if (const auto* slice = std::get_if<IndexSlice>(&item)) {
      SHARDPULL_RETURN_IF_ERROR(wrap_dim(d, result.dim(), false).status());
      SHARDPULL_ASSIGN_OR_RETURN(result, sliced(std::move(result), d, *slice));
      ++d;
    } else if (std::holds_alternative<IndexNone>(item)) {
      SHARDPULL_ASSIGN_OR_RETURN(result, result.unsqueeze(d));
      ++d;
    } else {
      d += dim() - specified;
    }
  }
  return result;
}

Result<StridedView> StridedView::unsqueeze(std::int64_t dim_arg) const {
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t d, wrap_dim(dim_arg, dim() + 1));
  if (dim() + 1 > kMaxDims)
    return refused(fmt::format("would give {} dims, at most {} are allowed", dim() + 1, kMaxDims),
                   Reason::kLimit);
  StridedView result = *this;
  std::int64_t step = 1;
  if (d < dim()) {
    const auto at = static_cast<std::size_t>(d);
    const auto span = checked_mul<std::int64_t>(shape[at], stride[at]);
    if (!span) return refused("makes a stride that does not fit 64 bits", Reason::kLimit);
    step = *span;
  }
  result.shape.insert(result.shape.begin() + d, 1);
  result.stride.insert(result.stride.begin() + d, step);
  return result;
}

StridedView StridedView::squeeze() const {
  StridedView result{.dtype = dtype, .shape = {}, .stride = {}, .offset = offset};
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 1) continue;
    result.shape.push_back(shape[i]);
    result.stride.push_back(stride[i]);
  }
  return result;
}

Result<StridedView> StridedView::squeeze(const Sizes& dims) const {
  std::vector<bool> named(std::max<std::size_t>(shape.size(), 1), false);
  for (const std::int64_t dim_arg : dims) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t d, wrap_dim(dim_arg, dim()));
    if (named[static_cast<std::size_t>(d)]) return refused(fmt::format("dim {} is given twice", d));
    named[static_cast<std::size_t>(d)] = true;
  }
  StridedView result{.dtype = dtype, .shape = {}, .stride = {}, .offset = offset};
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (named[i] && shape[i] == 1) continue;
    result.shape.push_back(shape[i]);
    result.stride.push_back(stride[i]);
  }
  return result;
}

Result<StridedView> StridedView::transpose(std::int64_t d0, std::int64_t d1) const {
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t a, wrap_dim(d0, dim()));
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t b, wrap_dim(d1, dim()));
  StridedView result = *this;
  if (a == b) return result;
  std::swap(result.shape[static_cast<std::size_t>(a)], result.shape[static_cast<std::size_t>(b)]);
  std::swap(result.stride[static_cast<std::size_t>(a)], result.stride[static_cast<std::size_t>(b)]);
  return result;
}

Result<StridedView> StridedView::t() const {
  if (dim() > 2) return refused(fmt::format("expects a tensor of at most 2 dims, this one has {}", dim()));
  return dim() < 2 ? *this : transpose(0, 1);
}

Result<StridedView> StridedView::permute(const Sizes& dims) const {
  if (dims.size() != shape.size()) {
    return refused(fmt::format("{} dims given for a tensor of {}", dims.size(), dim()));
  }
  StridedView result{.dtype = dtype, .shape = {}, .stride = {}, .offset = offset};
  std::vector<bool> named(shape.size(), false);
  for (const std::int64_t dim_arg : dims) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t wrapped, wrap_dim(dim_arg, dim()));
    const auto d = static_cast<std::size_t>(wrapped);
    if (named[d]) return refused(fmt::format("dim {} is given twice", d));
    named[d] = true;
    result.shape.push_back(shape[d]);
    result.stride.push_back(stride[d]);
  }
  return result;
}

Result<Sizes> StridedView::infer_sizes(const Sizes& sizes) const {
  Sizes result = sizes;
  std::optional<std::size_t> unknown;
  std::int64_t known = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == -1) {
      if (unknown) return refused("only one size may be -1");
      unknown = i;
    } else if (sizes[i] < 0) {
      return refused(fmt::format("size {} is negative", sizes[i]));
    } else {
      const auto next = checked_mul<std::int64_t>(known, sizes[i]);
      if (!next)
        return refused(fmt::format("sizes {} have more elements than 64 bits can count", join(sizes)));
      known = *next;
    }
  }
  if (sizes.size() > static_cast<std::size_t>(kMaxDims)) {
    return refused(fmt::format("{} dims given, at most {} are allowed", sizes.size(), kMaxDims),
                   Reason::kLimit);
  }
  const std::int64_t elements = numel();
  const bool fits = unknown ? known > 0 && elements % known == 0 : known == elements;
  if (!fits) {
    if (unknown && known == 0 && elements == 0)
      return refused(fmt::format("the -1 in {} can be any size", join(sizes)));
    return refused(
        fmt::format("sizes {} do not fit the {} elements of shape {}", join(sizes), elements, join(shape)));
  }
  if (unknown) result[*unknown] = elements / known;
  if (elements == 0)
    SHARDPULL_RETURN_IF_ERROR(checked_numel(DType::kU64, result).status());  // strides must fit, too
  return result;
}

Result<std::optional<StridedView>> StridedView::reshape_view(const Sizes& sizes) const {
  SHARDPULL_ASSIGN_OR_RETURN(Sizes shape_wanted, infer_sizes(sizes));
  auto strides = view_strides(shape, stride, shape_wanted);
  if (!strides) return std::optional<StridedView>();
  return std::optional<StridedView>(
      {.dtype = dtype, .shape = std::move(shape_wanted), .stride = std::move(*strides), .offset = offset});
}

Result<StridedView> StridedView::view(const Sizes& sizes) const {
  SHARDPULL_ASSIGN_OR_RETURN(std::optional<StridedView> result, reshape_view(sizes));
  if (!result) {
    return refused(fmt::format(
        "shape {} with strides {} cannot be viewed as {}: dims that are not adjacent in memory would "
        "be joined; use reshape",
        join(shape), join(stride), join(sizes)));
  }
  return std::move(*result);
}

Result<StridedView> StridedView::view(DType new_dtype) const {
  const std::int64_t old_bits = dtype_bits(dtype), new_bits = dtype_bits(new_dtype);
  if (new_bits == 0) return refused("unknown dtype");
  StridedView result = *this;
  result.dtype = new_dtype;
  if (old_bits == new_bits) return result;
  if (shape.empty()) {
    return refused(
        fmt::format("a tensor without dims cannot be viewed as {}, whose elements have another size",
                    dtype_name(new_dtype)));
  }
  if (stride.back() != 1) {
    return refused(fmt::format("stride {} of the last dim must be 1 to view {} as {}", stride.back(),
                               dtype_name(dtype), dtype_name(new_dtype)));
  }
  if (old_bits > new_bits) {
    const std::int64_t ratio = old_bits / new_bits;
    bool fits = true;
    const auto scale = [&](std::int64_t& value) {
      const auto scaled = checked_mul<std::int64_t>(value, ratio);
      fits = fits && scaled.has_value();
      value = scaled.value_or(0);
    };
    scale(result.offset);
    scale(result.shape.back());
    for (std::size_t i = 0; i + 1 < result.stride.size(); ++i) scale(result.stride[i]);
    if (!fits) return refused("makes numbers that do not fit 64 bits", Reason::kLimit);
    return result;
  }
  const std::int64_t ratio = new_bits / old_bits;
  if (shape.back() % ratio != 0) {
    return refused(fmt::format("the last dim's size {} must be a multiple of {} to view {} as {}",
                               shape.back(), ratio, dtype_name(dtype), dtype_name(new_dtype)));
  }
  if (offset % ratio != 0) {
    return refused(fmt::format("the offset {} must be a multiple of {} to view {} as {}", offset, ratio,
                               dtype_name(dtype), dtype_name(new_dtype)));
  }
  for (std::size_t i = 0; i + 1 < stride.size(); ++i) {
    if (stride[i] % ratio != 0) {
      return refused(fmt::format("stride {} of dim {} must be a multiple of {} to view {} as {}", stride[i],
                                 i, ratio, dtype_name(dtype), dtype_name(new_dtype)));
    }
    result.stride[i] /= ratio;
  }
  result.shape.back() /= ratio;
  result.offset /= ratio;
  return result;
}

Result<Sizes> StridedView::flatten_sizes(std::int64_t start_arg, std::int64_t end_arg) const {
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t start, wrap_dim(start_arg, dim()));
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t end, wrap_dim(end_arg, dim()));
  if (start > end) return refused(fmt::format("start dim {} comes after end dim {}", start, end));
  if (shape.empty()) return Sizes{1};
  Sizes sizes(shape.begin(), shape.begin() + start);
  std::int64_t joined = 1;
  for (std::int64_t d = start; d <= end; ++d) joined *= shape[static_cast<std::size_t>(d)];
  sizes.push_back(joined);
  sizes.insert(sizes.end(), shape.begin() + end + 1, shape.end());
  return sizes;
}

Result<StridedView::EvenCut> StridedView::chunk_cut(std::int64_t chunks, std::int64_t dim_arg) const {
  if (shape.empty()) return refused("the tensor has no dim to cut");
  if (chunks < 1) return refused(fmt::format("{} chunks asked for, at least 1 is needed", chunks));
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t d, wrap_dim(dim_arg, dim()));
  const std::int64_t size = shape[static_cast<std::size_t>(d)];
  if (size > 0) return split_cut(ceil_div(size, chunks), d);
  SHARDPULL_RETURN_IF_ERROR(check_outputs(chunks));
  return EvenCut{.dim = d, .size = 0, .parts = chunks};
}

Result<StridedView::EvenCut> StridedView::split_cut(std::int64_t size, std::int64_t dim_arg) const {
  if (shape.empty()) return refused("the tensor has no dim to cut");
  if (size < 0) return refused(fmt::format("split size {} is negative", size));
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t d, wrap_dim(dim_arg, dim()));
  const std::int64_t whole = shape[static_cast<std::size_t>(d)];
  if (size == 0 && whole != 0) return refused(fmt::format("split size 0 for dim {} of size {}", d, whole));
  const std::int64_t parts = size == 0 ? 1 : std::max<std::int64_t>(ceil_div(whole, size), 1);
  SHARDPULL_RETURN_IF_ERROR(check_outputs(parts));
  return EvenCut{.dim = d, .size = size, .parts = parts};
}

Result<StridedView> StridedView::part(const EvenCut& cut, std::int64_t index) const {
  const std::int64_t start = index * cut.size;
  return narrow(cut.dim, start, std::min(cut.size, shape[static_cast<std::size_t>(cut.dim)] - start));
}

namespace {

Result<std::vector<StridedView>> all_parts(const StridedView& view, const StridedView::EvenCut& cut) {
  std::vector<StridedView> result;
  result.reserve(static_cast<std::size_t>(cut.parts));
  for (std::int64_t i = 0; i < cut.parts; ++i) {
    SHARDPULL_ASSIGN_OR_RETURN(StridedView part, view.part(cut, i));
    result.push_back(std::move(part));
  }
  return result;
}

}  // namespace

Result<std::vector<StridedView>> StridedView::chunk(std::int64_t chunks, std::int64_t dim_arg) const {
  SHARDPULL_ASSIGN_OR_RETURN(const EvenCut cut, chunk_cut(chunks, dim_arg));
  return all_parts(*this, cut);
}

Result<std::vector<StridedView>> StridedView::split(std::int64_t size, std::int64_t dim_arg) const {
  SHARDPULL_ASSIGN_OR_RETURN(const EvenCut cut, split_cut(size, dim_arg));
  return all_parts(*this, cut);
}

Result<std::vector<StridedView>> StridedView::split(const Sizes& sizes, std::int64_t dim_arg) const {
  if (shape.empty()) return refused("the tensor has no dim to cut");
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t d, wrap_dim(dim_arg, dim()));
  const std::int64_t whole = shape[static_cast<std::size_t>(d)];
  SHARDPULL_RETURN_IF_ERROR(check_outputs(static_cast<std::int64_t>(sizes.size())));
  std::int64_t left = whole;
  for (const std::int64_t size : sizes) {
    if (size < 0) return refused(fmt::format("split size {} is negative", size));
    if (size > left)
      return refused(fmt::format("split sizes {} do not sum to dim {} of size {}", join(sizes), d, whole));
    left -= size;
  }
  if (left != 0)
    return refused(fmt::format("split sizes {} do not sum to dim {} of size {}", join(sizes), d, whole));
  std::vector<StridedView> result;
  result.reserve(sizes.size());
  std::int64_t start = 0;
  for (const std::int64_t size : sizes) {
    SHARDPULL_ASSIGN_OR_RETURN(StridedView part, narrow(d, start, size));
    result.push_back(std::move(part));
    start += size;
  }
  return result;
}

Result<std::int64_t> StridedView::unbind_count(std::int64_t dim_arg) const {
  if (shape.empty()) return refused("the tensor has no dim to unbind");
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t d, wrap_dim(dim_arg, dim()));
  const std::int64_t size = shape[static_cast<std::size_t>(d)];
  SHARDPULL_RETURN_IF_ERROR(check_outputs(size));
  return size;
}

Result<std::vector<StridedView>> StridedView::unbind(std::int64_t dim_arg) const {
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t size, unbind_count(dim_arg));
  std::vector<StridedView> result;
  result.reserve(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    SHARDPULL_ASSIGN_OR_RETURN(StridedView part, select(dim_arg, i));
    result.push_back(std::move(part));
  }
  return result;
}

}  // namespace shardpull
