// Op chains as text: what to_string(OpChain) writes, read back. The grammar is in docs/FORMATS.md,
// "Recording file".
#pragma once

#include <string_view>

#include "shardpull/status.h"
#include "shardpull/tensor.h"

namespace shardpull {

// Reads a chain such as ".narrow(0, 512, 512)[1:3, ...].view(F32)"; "" is the chain without operations. Only
// the spelling is looked at: whether the operations exist and fit is for Tensor::apply. Refused, with the
// offset of what is wrong: any other spelling, more than kMaxOpsPerChain operations.
Result<OpChain> parse_chain(std::string_view text);

}  // namespace shardpull
