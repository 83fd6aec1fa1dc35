// The op table: every operation a loader may apply to a checkpoint tensor, in one place for C++, Python and recordings.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace shardpull {

enum class OpKind : std::uint8_t {
  kNarrow,
  kView,
  kReshape,
  kIndex,
  kSelect,
  kUnsqueeze,
  kSqueeze,
  kTranspose,
  kT,
  kPermute,
  kFlatten,
  kContiguous,
  kChunk,
  kSplit,
  kUnbind,
};

struct OpSpec {
  OpKind kind;
  std::string_view method;     // PyTorch's method name
  std::string_view signature;  // "narrow(dim, start, length)", for error messages and documentation
  bool multi_output;           // gives a tuple; a recording follows it with "__getitem__" and the child's index
};

// All operations. Immutable.
std::span<const OpSpec> op_table();

// The entry of `method`, or null.
const OpSpec* find_op(std::string_view method);

// Why a method that is not in the table is refused: "changes the dtype or the device, ..." Never empty: what is not known at
// all is "not an operation of the table".
std::string_view refusal_reason(std::string_view method);

}  // namespace shardpull
