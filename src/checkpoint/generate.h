// Checkpoints with position-coded bytes: any slice that lands in the wrong place shows.
//
// A tensor's bytes are its little-endian 8-byte words
//     word(i) = mix64(XXH3_64bits(name) xor i),        i = 0, 1, 2, ...
// cut to the tensor's length. mix64 is a bijection (checkpoint/mutate.h), so two words are equal only where the hashes of two
// names differ by less than a tensor's length: never in practice. Every byte of a word depends on i, so that narrow columns
// and single elements differ as well. All bit patterns occur, NaN and infinity included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string_view>

#include "checkpoint/shapes.h"
#include "shardpull/status.h"

namespace shardpull {

// Writes bytes [begin, begin + out.size()) of the fill of tensor `name`. Any begin, any alignment.
void fill_position_coded(std::string_view name, std::uint64_t begin, std::span<std::byte> out);

struct GenerateOptions {
  // A file is closed before it exceeds this, unless one tensor does. One file is called model.safetensors; several are
  // model-00001-of-0000N.safetensors with an index.
  std::uint64_t max_shard_bytes = 256ull << 20;
  // Told after each written part how many bytes of the total are done; may be empty.
  std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)> progress;
};

// Writes `shape` as a Hugging Face directory: config.json, safetensors files, and an index when there are several, last.
// Creates the directory. Refused (ALREADY_EXISTS): a directory that holds safetensors files, an index or a config.json
// already. Memory: a few MiB. After an error what was written so far stays.
Status generate(const std::filesystem::path& directory, const ModelShape& shape, const GenerateOptions& options = {});

}  // namespace shardpull
