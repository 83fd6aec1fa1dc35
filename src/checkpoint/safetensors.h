// Reading and writing of safetensors files.
//
//   8 bytes    N, the header's length, little-endian
//   N bytes    one JSON object: tensor name -> {"dtype", "shape", "data_offsets": [begin, end)}, and perhaps "__metadata__",
//              an object of strings; may be padded with white space
//   the rest   the data; offsets count from here
//
// The rules, all of them checked before a file is believed, and named in every error:
//   - N is at most 100,000,000 and the file holds 8 + N bytes; the header is UTF-8, begins with '{' and is valid JSON
//   - no name appears twice; "__metadata__" is not a tensor, its values are strings
//   - an entry has exactly the three keys; the dtype is known; dims and offsets are non-negative integers; begin <= end and
//     end - begin is the shape's size in bytes
//   - ordered by offset (the header's own order is free), the tensors cover the data from the first byte to the last one of
//     the file: no hole, no overlap, nothing behind. A tensor with a dim of zero has begin = end and is valid
//   - the rows of a sub-byte dtype (F4) fall on whole bytes; at most kMaxDims dims
// Nothing in the format aligns a tensor's data: addresses may be odd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/limits.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// The one name that no tensor may have.
inline constexpr std::string_view kSafetensorsMetadataName = "__metadata__";

// What a file may ask of its reader. A file above a limit is refused with the size found and the limit.
struct SafetensorsLimits {
  std::uint64_t max_header_bytes = kMaxSafetensorsHeaderBytes;
  std::uint64_t max_tensors = kMaxTensors;
  std::uint64_t max_name_bytes = kMaxNameBytes;  // tensor names and metadata keys
};

// An open file: its header, checked, and a read-only mapping of its data. Movable. Immutable, so thread-safe once opened.
//
// Two ways to the bytes:
//   read()  copies with pread. A file that was cut short since open() gives an error.
//   data()  points into the mapping. Reading it costs no copy, but a file that is cut short meanwhile raises SIGBUS at the
//           reader, as any mapping does: only for files that nobody writes to.
// Both see later writes to the same file; a file replaced by rename is not seen until it is opened anew.
class SafetensorsFile {
 public:
  // Opens and checks `path`. The header is read, the data is not. Memory used on a refused file is bounded by the header it
  // really has. Errors name the file, the tensor and the rule: NOT_FOUND (no such file), PERMISSION_DENIED or INTERNAL (the
  // host), DATA_LOSS with reason kCheckpointMalformed (a rule), RESOURCE_EXHAUSTED with reason kLimit (a limit).
  static Result<SafetensorsFile> open(const std::filesystem::path& path, const SafetensorsLimits& limits = {});

  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::filesystem::path& path() const;
  std::uint64_t file_bytes() const;

  // The tensors by ascending name (bytes).
  const std::vector<TensorMeta>& tensors() const;
  // Index into tensors(), or nothing.
  std::optional<std::size_t> find(std::string_view name) const;
  std::uint64_t bytes(std::size_t tensor) const;
  // Offset of the tensor's first byte from the start of the FILE.
  std::uint64_t file_offset(std::size_t tensor) const;

  // The tensor's first byte in the mapping; any alignment; valid while this object lives. Never null, but must not be
  // dereferenced when bytes(tensor) is 0.
  const std::byte* data(std::size_t tensor) const;

  // Copies bytes [begin, begin + out.size()) of the tensor into `out`. OUT_OF_RANGE beyond the tensor; DATA_LOSS ("truncated")
  // when the file has become shorter; then `out` is undefined.
  Status read(std::size_t tensor, std::uint64_t begin, std::span<std::byte> out) const;
  // Copies the whole tensor; `out` holds bytes(tensor). NOT_FOUND when the file has no tensor `name`.
  Status read(std::string_view name, std::byte* out) const;

  // "__metadata__", empty when absent.
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  explicit SafetensorsFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Writes one file, tensor by tensor, without holding the data in memory. The file appears under its name only when
// finish() succeeds: until then it is a temporary beside it, removed by the destructor. A file that was there is replaced.
// Movable; thread-compatible.
//
//   SHARDPULL_ASSIGN_OR_RETURN(auto writer, SafetensorsWriter::create("model.safetensors", {{"w", DType::kF32, {2, 2}}}));
//   SHARDPULL_RETURN_IF_ERROR(writer.append("w", bytes));
//   SHARDPULL_RETURN_IF_ERROR(writer.finish());
class SafetensorsWriter {
 public:
  // Lays out `tensors` in the order given, without gaps, and writes the header. Refused (INVALID_ARGUMENT): the reserved
  // name, a name twice, a name that is not UTF-8 or too long, a negative or overflowing shape, rows of F4 that do not fall
  // on whole bytes, a header above the format's bound.
  static Result<SafetensorsWriter> create(const std::filesystem::path& path, std::vector<TensorMeta> tensors,
                                          const std::map<std::string, std::string>& metadata = {});

  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();

  // Appends the next bytes of tensor `name`. Tensors come in the order given to create(); one tensor may come in parts.
  // Refused (INVALID_ARGUMENT): another tensor than the one that is due, more bytes than the tensor has.
  Status append(std::string_view name, std::span<const std::byte> bytes);

  // Gives the file its name. Refused (FAILED_PRECONDITION) while a tensor lacks bytes, naming it. The data is not forced to
  // the disk: the file is whole after a killed process, not after a power cut.
  Status finish();

 private:
  struct Impl;
  explicit SafetensorsWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Bytes of a contiguous tensor: the rule shared by the reader, the writer and the generator. Fails on a negative dim, on a
// product that overflows (a dim of zero does not excuse the others), above kMaxDims dims and on F4 rows that do not fall on
// whole bytes. The message names the rule, not the tensor.
Result<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape);

}  // namespace shardpull
