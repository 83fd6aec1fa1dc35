// Tensor: a handle a weight loader works on. It is either FAKE (name, shape, dtype, strides and the chain of operations so
// far, no storage) or REAL (the same, over memory). The same loader code therefore bakes (fakes: every copy is recorded) and
// loads (real tensors: every copy moves bytes).
//
// The allowed operations are those of one table (src/tensor/op_table.h, docs/FORMATS.md "Op table") with the semantics of
// the PyTorch methods of the same names: shapes, strides, error conditions, negative indices, -1 sizes. Whatever the table
// lacks is refused by name. An operation never changes values: no arithmetic, no casts.
//
// Errors: operations return Result; a failed one leaves its operand as it was. The message names operation, tensor and
// chain. Thread-compatible. Handles are values: cheap to copy, they share storage and recorder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "shardpull/api.h"
#include "shardpull/dtype.h"
#include "shardpull/slice.h"
#include "shardpull/status.h"

namespace shardpull {

// Python's start:stop:step, absent parts empty.
struct IndexSlice {
  std::optional<std::int64_t> start;  // from which index
  std::optional<std::int64_t> stop;   // before which index
  std::optional<std::int64_t> step;   // 1 where absent
  friend bool operator==(const IndexSlice&, const IndexSlice&) = default;
};
// Python's None: a dim of size 1 more.
struct IndexNone {
  friend bool operator==(const IndexNone&, const IndexNone&) = default;
};
// Python's `...`: all dims that the other items leave.
struct IndexEllipsis {
  friend bool operator==(const IndexEllipsis&, const IndexEllipsis&) = default;
};
// One item of an index expression.
using IndexItem = std::variant<std::int64_t, IndexSlice, IndexNone, IndexEllipsis>;
// An argument of an operation.
using OpArg = std::variant<std::int64_t, std::vector<std::int64_t>, DType, std::vector<IndexItem>>;
// One entry of an op chain, as a person reads it and a recording stores it.
struct Op {
  std::string method;       // a name of the op table
  std::vector<OpArg> args;  // normalised: positional order, defaults filled in where the table says so
  friend bool operator==(const Op&, const Op&) = default;
};
// What was done to a tensor, from the first operation to the last.
using OpChain = std::vector<Op>;
SHARDPULL_API std::string to_string(const OpChain& chain);  // ".narrow(0, 512, 512).transpose(0, 1)"

class Parameter;  // shardpull/model.h
class Recorder;   // src/model/bake: receives the copies of fakes

class SHARDPULL_API Tensor {
 public:
  // A fake of a checkpoint tensor. Contiguous strides. `recorder` may be null (the chain is still tracked).
  static Result<Tensor> fake(std::string name, DType dtype, std::vector<std::int64_t> shape,
                             std::shared_ptr<Recorder> recorder = nullptr);
  // A real contiguous tensor over borrowed memory, which must outlive every handle derived from it. `data` may be unaligned.
  static Result<Tensor> real(std::string name, DType dtype, std::vector<std::int64_t> shape, const std::byte* data);
  // The same over memory with these strides (in elements, >= 0). Operations and stride() see its row-major logical elements.
  static Result<Tensor> real_strided(std::string name, DType dtype, std::vector<std::int64_t> shape,
                                     std::vector<std::int64_t> stride, const std::byte* data);

  bool is_fake() const;                         // whether it has no memory
  const std::string& name() const;              // of the checkpoint tensor at the root
  DType dtype() const;                          // of its elements
  const std::vector<std::int64_t>& shape() const;   // in elements of dtype()
  const std::vector<std::int64_t>& stride() const;  // in elements of dtype()
  std::int64_t offset() const;                  // in elements of dtype(), from the root's (or last materialised copy's) start
  std::int64_t dim() const;                     // how many dims
  std::int64_t size(std::int64_t d) const;      // d in [-dim, dim); out of range gives -1
  std::int64_t numel() const;                   // elements
  bool is_contiguous() const;                   // whether its elements lie row-major, without gaps
  const OpChain& chain() const;                 // how it came from the root
  std::string to_string() const;                // "model.embed_tokens.weight.narrow(0, 512, 512) BF16 [512, 64]"

  // As PyTorch's method of this name:
  Result<Tensor> narrow(std::int64_t dim, std::int64_t start, std::int64_t length) const;
  Result<Tensor> view(std::vector<std::int64_t> sizes) const;
  Result<Tensor> view(DType dtype) const;
  Result<Tensor> reshape(std::vector<std::int64_t> sizes) const;
  Result<Tensor> index(std::vector<IndexItem> items) const;   // PyTorch's __getitem__
  Result<Tensor> select(std::int64_t dim, std::int64_t index) const;
  Result<Tensor> unsqueeze(std::int64_t dim) const;
  Result<Tensor> squeeze() const;
  Result<Tensor> squeeze(std::vector<std::int64_t> dims) const;
  Result<Tensor> transpose(std::int64_t d0, std::int64_t d1) const;
  Result<Tensor> t() const;
  Result<Tensor> permute(std::vector<std::int64_t> dims) const;
  Result<Tensor> flatten(std::int64_t start = 0, std::int64_t end = -1) const;
  Result<Tensor> contiguous() const;
  Result<std::vector<Tensor>> chunk(std::int64_t n, std::int64_t dim = 0) const;
  Result<std::vector<Tensor>> split(std::int64_t size, std::int64_t dim = 0) const;
  Result<std::vector<Tensor>> split(std::vector<std::int64_t> sizes, std::int64_t dim = 0) const;
  Result<std::vector<Tensor>> unbind(std::int64_t dim = 0) const;

  // Applies one recorded operation (method, args) with all checks; "__getitem__" with an integer on a tuple-valued result
  // is folded into the multi-output operation's child, as recordings write it: [("chunk", [2, 0]), ("__getitem__", [1])].
  static Result<Tensor> apply(const Tensor& root, const OpChain& chain);

  // The canonical slice of this tensor's elements over the ROOT's logical row-major elements, in elements of dtype().
  // Refused when it needs more than kMaxRegions regions or a sub-byte run does not fall on whole bytes.
  Result<Slice> slice() const;

  // REAL only: copies the elements, row-major, into `out` (numel elements of dtype(), out_bytes exactly that many).
  Status copy_out(std::byte* out, std::uint64_t out_bytes) const;

  // For the model layer: the recorder of a fake, null otherwise.
  const std::shared_ptr<Recorder>& recorder() const;

 private:
  struct SHARDPULL_HIDDEN Impl;
  explicit Tensor(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace shardpull
