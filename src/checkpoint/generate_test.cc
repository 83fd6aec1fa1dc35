#include "checkpoint/generate.h"

#include <xxhash.h>

#include <cstring>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_testing.h"
#include "checkpoint/config.h"
#include "checkpoint/mutate.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::TemporaryDirectory;

std::vector<std::byte> fill(std::string_view name, std::uint64_t begin, std::size_t size) {
  std::vector<std::byte> out(size);
  fill_position_coded(name, begin, out);
  return out;
}

// Goal: the documented words, and parts that equal the whole wherever they begin and end.
TEST(Fill, WordsAndParts) {
  const std::string name = "model.norm.weight";
  const auto whole = fill(name, 0, 67);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const std::uint64_t word = mix64(XXH3_64bits(name.data(), name.size()) ^ (i / 8));
    EXPECT_EQ(whole[i], static_cast<std::byte>(word >> (8 * (i % 8))));
  }
  for (std::size_t begin = 0; begin <= whole.size(); ++begin) {
    for (std::size_t end = begin; end <= whole.size(); ++end) {
      const auto part = fill(name, begin, end - begin);
      ASSERT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin)));
    }
  }
}

// Goal: no word occurs twice in a whole model, so that no slice can pass for another.
TEST(Fill, NoWordTwiceInAModel) {
  const auto shape = shape_config({"qwen2-0.5b", ShapeSize::kTiny});
  ASSERT_TRUE(shape.ok());
  std::set<std::uint64_t> words;
  std::uint64_t count = 0;
  for (const TensorMeta& meta : shape->tensors) {
    const std::uint64_t bytes = *tensor_bytes(meta.dtype, meta.shape);
    const auto data = fill(meta.name, 0, bytes);
    for (std::uint64_t at = 0; at + 8 <= bytes; at += 8, ++count) {
      std::uint64_t word = 0;
      std::memcpy(&word, data.data() + at, 8);
      words.insert(word);
    }
  }
  EXPECT_EQ(words.size(), count);
}

// Goal: a generated directory is a checkpoint like any other: it opens without notes, holds the shape's tensors with the
// documented bytes, and its config reads back.
TEST(Generate, RoundTripInOneFileAndInShards) {
  for (const std::uint64_t shard_bytes : {std::uint64_t{256} << 20, std::uint64_t{64} << 10}) {
    for (const auto& info : known_shapes()) {
      if (!info.available) continue;
      const auto shape = shape_config({std::string(info.key), ShapeSize::kTiny}, {.vocab = 101});
      ASSERT_TRUE(shape.ok()) << shape.status().to_string();
      TemporaryDirectory directory;
      const auto path = directory.path() / "a" / "model";
      std::uint64_t last = 0, total = 0;
      GenerateOptions options;
      options.max_shard_bytes = shard_bytes;
      options.progress = [&](std::uint64_t done, std::uint64_t of) {
        EXPECT_GT(done, last);
        last = done;
        total = of;
      };
      const Status status = generate(path, *shape, options);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(last, shape->total_bytes);
      EXPECT_EQ(total, shape->total_bytes);

      const auto checkpoint = Checkpoint::open(path);
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
      EXPECT_THAT(checkpoint->notes(), IsEmpty());
      EXPECT_EQ(checkpoint->tensors(), shape->tensors);
      EXPECT_EQ(checkpoint->total_bytes(), shape->total_bytes);
      std::set<std::filesystem::path> files;
      for (std::size_t t = 0; t < shape->tensors.size(); ++t) {
        files.insert(checkpoint->file(t));
        std::vector<std::byte> bytes(checkpoint->bytes(t));
        ASSERT_TRUE(checkpoint->read(t, 0, bytes).ok());
        EXPECT_EQ(bytes, fill(shape->tensors[t].name, 0, bytes.size()));
      }
      EXPECT_EQ(files.size() > 1, shard_bytes < shape->total_bytes);
      for (const auto& file : files) {
        // One tensor may exceed the bound; a file with several must not. The header is small.
        const auto opened = SafetensorsFile::open(file);
        EXPECT_TRUE(opened->tensors().size() == 1 || opened->file_bytes() <= shard_bytes + (64u << 10));
      }
      const auto config = ModelConfig::load(path);
      ASSERT_TRUE(config.ok()) << config.status().to_string();
      EXPECT_EQ(config->model_type, info.family);
      EXPECT_EQ(config->vocab_size, 101);

      EXPECT_EQ(generate(path, *shape, options).code(), StatusCode::kAlreadyExists);
    }
  }
}

TEST(Generate, RefusesWhereItCannotWrite) {
  const auto shape = shape_config({"qwen3-8b", ShapeSize::kTiny});
  ASSERT_TRUE(shape.ok());
  EXPECT_THAT(generate("/proc/none", *shape).message(), HasSubstr("/proc/none"));
  TemporaryDirectory directory;
  EXPECT_EQ(generate(directory.path(), *shape, {.max_shard_bytes = 0}).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace shardpull
