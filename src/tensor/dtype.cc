#include "shardpull/dtype.h"

#include <iterator>
#include <string>

#include <fmt/format.h>

namespace shardpull {
namespace {

struct Entry {
  DType dtype;
  int bits;
  std::string_view name;        // safetensors
  std::string_view torch_name;  // empty where PyTorch has no such dtype of one element a value
};

// Ordered by number; numbers start at 1 and have no gaps.
constexpr Entry kEntries[] = {
    {DType::kBool, 8, "BOOL", "bool"},
    {DType::kU8, 8, "U8", "uint8"},
    {DType::kI8, 8, "I8", "int8"},
    {DType::kF8E5M2, 8, "F8_E5M2", "float8_e5m2"},
    {DType::kF8E4M3, 8, "F8_E4M3", "float8_e4m3fn"},
    {DType::kF8E8M0, 8, "F8_E8M0", "float8_e8m0fnu"},
    {DType::kI16, 16, "I16", "int16"},
    {DType::kU16, 16, "U16", "uint16"},
    {DType::kF16, 16, "F16", "float16"},
    {DType::kBF16, 16, "BF16", "bfloat16"},
    {DType::kI32, 32, "I32", "int32"},
    {DType::kU32, 32, "U32", "uint32"},
    {DType::kF32, 32, "F32", "float32"},
    {DType::kF64, 64, "F64", "float64"},
    {DType::kI64, 64, "I64", "int64"},
    {DType::kU64, 64, "U64", "uint64"},
    {DType::kC64, 64, "C64", "complex64"},
    {DType::kF4, 4, "F4", "float4_e2m1fn_x2"},
};

// Other spellings PyTorch accepts for the same dtypes.
struct Alias {
  std::string_view name;
  DType dtype;
};
constexpr Alias kTorchAliases[] = {
    {"half", DType::kF16}, {"float", DType::kF32}, {"double", DType::kF64}, {"short", DType::kI16},
    {"int", DType::kI32},  {"long", DType::kI64},  {"cfloat", DType::kC64},
};

constexpr bool entries_match_numbers() {
  std::uint8_t number = 1;
  for (const Entry& entry : kEntries) {
    if (static_cast<std::uint8_t>(entry.dtype) != number++) return false;
  }
  return true;
}
static_assert(entries_match_numbers());

const Entry* find(DType dtype) {
  const auto number = static_cast<std::uint8_t>(dtype);
  return dtype_valid(number) ? &kEntries[number - 1] : nullptr;
}

Status unknown(std::string_view name, std::string_view Entry::* column) {
  std::string known;
  for (const Entry& entry : kEntries) {
    if (!known.empty()) known += ", ";
    known += entry.*column;
  }
  return Status(StatusCode::kInvalidArgument, fmt::format("unknown dtype \"{}\"; known are {}", name, known),
                {.reason = Reason::kBadArgument});
}

}  // namespace

bool dtype_valid(std::uint8_t number) {
  return number >= 1 && number <= std::size(kEntries);
}

int dtype_bits(DType dtype) {
  const Entry* const entry = find(dtype);
  return entry ? entry->bits : 0;
}

std::string_view dtype_name(DType dtype) {
  const Entry* const entry = find(dtype);
  return entry ? entry->name : "?";
}

Result<DType> dtype_from_name(std::string_view name) {
  for (const Entry& entry : kEntries) {
    if (entry.name == name) return entry.dtype;
  }
  return unknown(name, &Entry::name);
}

Result<DType> dtype_from_torch_name(std::string_view name) {
  std::string_view bare = name;
  if (constexpr std::string_view kPrefix = "torch."; bare.starts_with(kPrefix))
    bare.remove_prefix(kPrefix.size());
  for (const Entry& entry : kEntries) {
    if (entry.torch_name == bare) return entry.dtype;
  }
  for (const Alias& alias : kTorchAliases) {
    if (alias.name == bare) return alias.dtype;
  }
  return unknown(name, &Entry::torch_name);
}

}  // namespace shardpull
