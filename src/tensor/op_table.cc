#include "tensor/op_table.h"

#include <algorithm>

namespace shardpull {
namespace {

constexpr OpSpec kTable[] = {
    {OpKind::kNarrow, "narrow", "narrow(dim, start, length)", false},
    {OpKind::kView, "view", "view(sizes | dtype)", false},
    {OpKind::kReshape, "reshape", "reshape(sizes)", false},
    {OpKind::kIndex, "__getitem__", "__getitem__(int | slice | None | Ellipsis | tuple of these)", false},
    {OpKind::kSelect, "select", "select(dim, index)", false},
    {OpKind::kUnsqueeze, "unsqueeze", "unsqueeze(dim)", false},
    {OpKind::kSqueeze, "squeeze", "squeeze([dim | dims])", false},
    {OpKind::kTranspose, "transpose", "transpose(dim0, dim1)", false},
    {OpKind::kT, "t", "t()", false},
    {OpKind::kPermute, "permute", "permute(dims)", false},
    {OpKind::kFlatten, "flatten", "flatten(start=0, end=-1)", false},
    {OpKind::kContiguous, "contiguous", "contiguous()", false},
    {OpKind::kChunk, "chunk", "chunk(chunks, dim=0)", true},
    {OpKind::kSplit, "split", "split(size | sizes, dim=0)", true},
    {OpKind::kUnbind, "unbind", "unbind(dim=0)", true},
};

struct Refusal {
  std::string_view reason;
  std::initializer_list<std::string_view> methods;
};

constexpr std::string_view kNotInTable = "is not an operation of the table";

const Refusal kRefusals[] = {
    {"changes dtype, device or memory; a worker takes the bytes as they are, and the copy into its parameter "
     "converts",
     {"to",   "type", "type_as", "float",      "double",        "half", "bfloat16",
      "int",  "long", "short",   "char",       "byte",          "bool", "cfloat",
      "cuda", "cpu",  "xpu",     "pin_memory", "share_memory_", "numpy"}},
    {"computes values; a slice only selects them",
     {"add",      "sub",          "mul",      "div",         "matmul",       "mm",         "bmm",
      "neg",      "abs",          "exp",      "log",         "sqrt",         "rsqrt",      "pow",
      "sum",      "mean",         "max",      "min",         "amax",         "amin",       "norm",
      "clamp",    "round",        "where",    "softmax",     "__add__",      "__radd__",   "__sub__",
      "__rsub__", "__mul__",      "__rmul__", "__truediv__", "__rtruediv__", "__matmul__", "__neg__",
      "__pow__",  "__and__",      "__or__",   "__xor__",     "__invert__",   "__lshift__", "__rshift__",
      "__mod__",  "__floordiv__", "eq",       "ne",          "lt",           "le",         "gt",
      "ge",       "cumsum",       "sort"}},
    {"reads values, which a checkpoint tensor has only once it is pulled",
     {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "all", "any", "equal", "allclose",
      "nonzero", "unique"}},
    {"selects by values or lists of indices, which is no strided slice",
     {"index_select", "gather", "take", "masked_select", "take_along_dim", "scatter", "index_copy",
      "masked_fill"}},
    {"repeats elements; a slice takes each at most once",
     {"expand", "expand_as", "repeat", "repeat_interleave", "broadcast_to", "tile"}},
    {"copies; the copy into the parameter is the only one",
     {"clone", "detach", "data", "new_tensor", "new_empty", "copy"}},
};

}  // namespace

std::span<const OpSpec> op_table() {
  return kTable;
}

const OpSpec* find_op(std::string_view method) {
  const auto* const found = std::find_if(std::begin(kTable), std::end(kTable),
                                         [&](const OpSpec& op) { return op.method == method; });
  return found == std::end(kTable) ? nullptr : found;
}

std::string_view refusal_reason(std::string_view method) {
  for (const Refusal& refusal : kRefusals) {
    if (std::find(refusal.methods.begin(), refusal.methods.end(), method) != refusal.methods.end())
      return refusal.reason;
  }
  if (method.size() > 1 && method.back() == '_' && !method.starts_with("__")) {
    return "writes in place; a checkpoint tensor is only read";
  }
  return kNotInTable;
}

}  // namespace shardpull
