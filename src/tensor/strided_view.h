// StridedView: shape, stride and offset over somebody's memory, with PyTorch's view operations on them. Pure geometry: what
// it is a view of (a checkpoint tensor, a copy, a parameter) is its owner's business.
//
// Semantics (sizes, strides, offsets, which arguments are refused) are those of the PyTorch methods of the same names. An
// error's message says only what is wrong with the arguments; the owner adds operation, name and chain.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shardpull/dtype.h"
#include "shardpull/slice.h"
#include "shardpull/status.h"
#include "shardpull/tensor.h"

namespace shardpull {

using Sizes = std::vector<std::int64_t>;

// A value. All numbers count elements of `dtype`.
struct StridedView {
  DType dtype = DType::kF32;
  Sizes shape, stride;
  std::int64_t offset = 0;

  // Over contiguous memory. `shape` has been checked (tensor/shape.h).
  static StridedView contiguous(DType dtype, Sizes shape);

  std::int64_t dim() const { return static_cast<std::int64_t>(shape.size()); }
  std::int64_t numel() const;
  bool is_contiguous() const;  // empty tensors are; strides of dims of size 1 do not matter
  // The view's elements as a region: enumerated row-major.
  Region region() const;

  Result<StridedView> narrow(std::int64_t dim, std::int64_t start, std::int64_t length) const;
  Result<StridedView> select(std::int64_t dim, std::int64_t index) const;
  Result<StridedView> index(const std::vector<IndexItem>& items) const;
  Result<StridedView> unsqueeze(std::int64_t dim) const;
  StridedView squeeze() const;
  Result<StridedView> squeeze(const Sizes& dims) const;
  Result<StridedView> transpose(std::int64_t d0, std::int64_t d1) const;
  Result<StridedView> t() const;
  Result<StridedView> permute(const Sizes& dims) const;
  // Refused where only a copy could give that shape.
  Result<StridedView> view(const Sizes& sizes) const;
  Result<StridedView> view(DType new_dtype) const;
  // Nothing where the strides do not allow a view: reshape then copies. Refused as view() for sizes that do not fit.
  Result<std::optional<StridedView>> reshape_view(const Sizes& sizes) const;
  // The sizes flatten(start, end) reshapes to.
  Result<Sizes> flatten_sizes(std::int64_t start, std::int64_t end) const;
  // `parts` parts of `size` along `dim`, the last one maybe shorter: what chunk() and split(size) cut.
  struct EvenCut {
    std::int64_t dim = 0, size = 0, parts = 0;
  };
  Result<EvenCut> chunk_cut(std::int64_t chunks, std::int64_t dim) const;
  Result<EvenCut> split_cut(std::int64_t size, std::int64_t dim) const;
  // How many tensors unbind() gives.
  Result<std::int64_t> unbind_count(std::int64_t dim) const;
  // Part `index` of the cut, 0 <= index < parts, without making the others.
  Result<StridedView> part(const EvenCut& cut, std::int64_t index) const;
  Result<std::vector<StridedView>> chunk(std::int64_t chunks, std::int64_t dim) const;
  Result<std::vector<StridedView>> split(std::int64_t size, std::int64_t dim) const;
  Result<std::vector<StridedView>> split(const Sizes& sizes, std::int64_t dim) const;
  Result<std::vector<StridedView>> unbind(std::int64_t dim) const;

  // `sizes` with a -1 replaced by what is left of numel().
  Result<Sizes> infer_sizes(const Sizes& sizes) const;

  friend bool operator==(const StridedView&, const StridedView&) = default;
};

// Strides of a tensor that has just been copied. As PyTorch sets them: empty dims count as 1.
Sizes contiguous_strides(const Sizes& shape);

// `dim` in [-ndim, ndim) as [0, ndim). Scalars have one dim for this purpose where PyTorch says so (`scalar_has_one`).
Result<std::int64_t> wrap_dim(std::int64_t dim, std::int64_t ndim, bool scalar_has_one = true);

}  // namespace shardpull
