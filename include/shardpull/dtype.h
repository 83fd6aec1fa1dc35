// DType: the element types of the safetensors format, by name.
#pragma once

#include <cstdint>
#include <string_view>

#include "shardpull/api.h"
#include "shardpull/status.h"

namespace shardpull {

// Numbers travel on the wire and in recordings: never reuse one.
enum class DType : std::uint8_t {
  kBool = 1,
  kU8 = 2,
  kI8 = 3,
  kF8E5M2 = 4,
  kF8E4M3 = 5,
  kF8E8M0 = 6,
  kI16 = 7,
  kU16 = 8,
  kF16 = 9,
  kBF16 = 10,
  kI32 = 11,
  kU32 = 12,
  kF32 = 13,
  kF64 = 14,
  kI64 = 15,
  kU64 = 16,
  kC64 = 17,  // two F32
  kF4 = 18,   // E2M1, two logical elements a byte, the first in the low half
};

// Bits per logical element: 4 for F4, 64 for C64.
SHARDPULL_API int dtype_bits(DType dtype);

// The safetensors name: "BF16", "F8_E4M3", ... Total over the enum.
SHARDPULL_API std::string_view dtype_name(DType dtype);

// The inverse of dtype_name, exact and case-sensitive. An unknown name is refused, naming it and the known ones.
SHARDPULL_API Result<DType> dtype_from_name(std::string_view name);

// PyTorch's spelling ("bfloat16", "float8_e4m3fn"), as config.json's torch_dtype/dtype uses it, with or without "torch.".
SHARDPULL_API Result<DType> dtype_from_torch_name(std::string_view name);

// True for the number of a known dtype (used by decoders before casting).
SHARDPULL_API bool dtype_valid(std::uint8_t number);

}  // namespace shardpull
