// A Hugging Face checkpoint directory as one set of tensors.
//
// Which files count:
//   - with model.safetensors.index.json, its weight_map decides: every file it names must be there and hold the tensors it
//     assigns to that file; of a tensor in two files the assigned one is used
//   - without an index, all *.safetensors of the directory count; a tensor in two of them is refused, and so is a set
//     "...-00001-of-00003" with parts missing
//   - consolidated*.safetensors (a vendor's own file beside the Hugging Face ones) is ignored when there is anything else
//   - tensors in files of the directory that the index does not list are offered as well, marked as not indexed
// Every such decision leaves a note.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

struct CheckpointLimits {
  SafetensorsLimits file;
  std::uint64_t max_index_bytes = kMaxSafetensorsHeaderBytes;
  std::uint64_t max_files = 16'384;
};

// An opened directory. Nothing is cached between two opens of one path. Movable. Immutable, so thread-safe once opened.
class Checkpoint {
 public:
  // Opens every file and checks all of them, reading headers only. Errors name the file, the tensor and the rule, and list
  // everything of one kind at once (all missing files). Codes as SafetensorsFile::open.
  static Result<Checkpoint> open(const std::filesystem::path& directory, const CheckpointLimits& limits = {});

  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::filesystem::path& directory() const;

  // All tensors by ascending name (bytes): the order of a source's metadata.
  const std::vector<TensorMeta>& tensors() const;
  // Index into tensors(), or nothing.
  std::optional<std::size_t> find(std::string_view name) const;
  std::uint64_t bytes(std::size_t tensor) const;
  std::uint64_t total_bytes() const;
  // False for a tensor that an index exists for but does not list: use it where it is needed, and do not complain where not.
  bool indexed(std::size_t tensor) const;
  // The file that holds the tensor.
  const std::filesystem::path& file(std::size_t tensor) const;

  // As SafetensorsFile: a pointer into the mapping (any alignment, valid while this object lives, SIGBUS if somebody cuts
  // the file), or a copy that fails cleanly.
  const std::byte* data(std::size_t tensor) const;
  Status read(std::size_t tensor, std::uint64_t begin, std::span<std::byte> out) const;
  Status read(std::string_view name, std::byte* out) const;

  // What was decided, for people: one sentence each, naming files and tensors.
  const std::vector<std::string>& notes() const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardpull
