#include "checkpoint/generate.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/status_macros.h"
#include "checkpoint/mutate.h"
#include "checkpoint/posix_file.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/words.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kPartBytes = 4ull << 20;  // filled and written at a time

Status require_fresh(const std::filesystem::path& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return host_error(error.value(), fmt::format("{}: cannot create the directory", directory.native()));
  std::filesystem::directory_iterator at(directory, error);
  for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().native();
    if (name == "config.json" || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) {
      return Status(StatusCode::kAlreadyExists,
                    fmt::format("{}: holds {} already; give another directory, or remove it", directory.native(), name),
                    {.reason = Reason::kBadArgument});
    }
  }
  if (error) return host_error(error.value(), directory.native());
  return {};
}

// Consecutive tensors into shards of at most `max_bytes`, but for a single tensor above it.
Result<std::vector<std::vector<TensorMeta>>> cut_into_shards(const std::vector<TensorMeta>& tensors, std::uint64_t max_bytes) {
  std::vector<std::vector<TensorMeta>> shards;
  std::uint64_t filled = 0;
  for (const TensorMeta& meta : tensors) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes, tensor_bytes(meta.dtype, meta.shape));
    if (shards.empty() || (filled != 0 && bytes > max_bytes - std::min(filled, max_bytes))) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(meta);
    filled += bytes;
  }
  return shards;
}

}  // namespace

void fill_position_coded(std::string_view name, std::uint64_t begin, std::span<std::byte> out) {
  const std::uint64_t hash = XXH3_64bits(name.data(), name.size());
  std::byte* const to = out.data();
  walk_words(
      begin, out.size(),
      [&](std::uint64_t at, std::uint64_t word, std::uint64_t count) {
        for (std::uint64_t i = 0; i < count; ++i) {
          const std::uint64_t value = mix64(hash ^ (word + i));
          std::memcpy(to + at + i * 8, &value, 8);
        }
      },
      [&](std::uint64_t at, std::uint64_t word, std::uint64_t skip, std::uint64_t count) {
        const std::uint64_t bits = mix64(hash ^ word) >> (8 * skip);
        for (std::uint64_t i = 0; i < count; ++i) to[at + i] = static_cast<std::byte>(bits >> (8 * i));
      });
}

Status generate(const std::filesystem::path& directory, const ModelShape& shape, const GenerateOptions& options) {
  if (options.max_shard_bytes == 0) {
    return Status(StatusCode::kInvalidArgument, "max_shard_bytes must be at least 1", {.reason = Reason::kBadArgument});
  }
  SHARDPULL_RETURN_IF_ERROR(require_fresh(directory));
  SHARDPULL_ASSIGN_OR_RETURN(const auto shards, cut_into_shards(shape.tensors, options.max_shard_bytes));

  SHARDPULL_RETURN_IF_ERROR(write_text_file(directory / "config.json", shape.config_json));
  std::vector<std::byte> part(static_cast<std::size_t>(std::min(kPartBytes, std::max<std::uint64_t>(shape.total_bytes, 1))));
  nlohmann::json weight_map = nlohmann::json::object();
  std::uint64_t done = 0;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const std::string file =
        shards.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards.size());
    SHARDPULL_ASSIGN_OR_RETURN(auto writer, SafetensorsWriter::create(directory / file, shards[s], {{"format", "pt"}}));
    for (const TensorMeta& meta : shards[s]) {
      SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes, tensor_bytes(meta.dtype, meta.shape));
      for (std::uint64_t at = 0; at < bytes; at += kPartBytes) {
        const std::span<std::byte> now(part.data(), static_cast<std::size_t>(std::min(kPartBytes, bytes - at)));
        fill_position_coded(meta.name, at, now);
        SHARDPULL_RETURN_IF_ERROR(writer.append(meta.name, now));
        done += now.size();
        if (options.progress) options.progress(done, shape.total_bytes);
      }
      if (shards.size() > 1) weight_map[meta.name] = file;
    }
    SHARDPULL_RETURN_IF_ERROR(writer.finish());
  }
  if (shards.size() > 1) {
    const nlohmann::json index = {{"metadata", {{"total_size", shape.total_bytes}}}, {"weight_map", weight_map}};
    SHARDPULL_RETURN_IF_ERROR(write_text_file(directory / "model.safetensors.index.json", index.dump(2) + "\n"));
  }
  return {};
}

}  // namespace shardpull
