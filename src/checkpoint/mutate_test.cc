#include "checkpoint/mutate.h"

#include <cstring>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "checkpoint/checkpoint_testing.h"

namespace shardpull {
namespace {

using Bytes = std::vector<std::byte>;

Bytes counting(std::size_t size) {
  const std::string text = testing::counting_bytes(size);
  const auto bytes = testing::as_bytes(text);
  return {bytes.begin(), bytes.end()};
}

// The formula of the header, one byte at a time.
Bytes expected(const Bytes& original, std::uint64_t version) {
  Bytes out = original;
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] ^= static_cast<std::byte>(mutation_word(version, i / 8) >> (8 * (i % 8)));
  }
  return out;
}

// Goal: the documented function, pinned by values that anybody can compute. SplitMix64 seeded with 1 begins with these.
TEST(Mutate, IsSplitMix64) {
  EXPECT_EQ(mutation_word(1, 0), 0x910A2DEC89025CC1u);
  EXPECT_EQ(mutation_word(1, 1), 0xBEEB8DA1658EEC67u);
  EXPECT_EQ(mutation_word(0, 0), 0u);
  EXPECT_EQ(mutation_word(0, 12345), 0u);
  EXPECT_EQ(mix64(0), 0u);
}

TEST(Mutate, VersionZeroIsTheCheckpoint) {
  const Bytes original = counting(37);
  Bytes copy(37);
  mutate_copy(copy.data(), original.data(), 37, 0);
  EXPECT_EQ(copy, original);
  mutate(copy.data(), 37, 0, 0);
  mutate(copy.data(), 37, 5, 5);
  EXPECT_EQ(copy, original);
  mutate_copy(nullptr, nullptr, 0, 0);
  mutate_copy(nullptr, nullptr, 0, 7);
}

// Goal: every length, alignment and pair of versions gives the formula, and touches nothing beside the range.
TEST(Mutate, EveryLengthAlignmentAndVersion) {
  for (std::size_t size = 0; size <= 40; ++size) {
    for (std::size_t shift = 0; shift < 8; ++shift) {
      Bytes memory(size + 16, std::byte{0xCD});
      std::byte* const data = memory.data() + shift;
      const Bytes original = counting(size);
      std::copy(original.begin(), original.end(), data);
      std::uint64_t version = 0;
      for (const std::uint64_t next : {1ull, 2ull, ~0ull, 0ull, 7ull, 1ull}) {
        mutate(data, size, version, next);
        version = next;
        ASSERT_EQ(Bytes(data, data + size), expected(original, version)) << size << " " << shift << " " << version;
        Bytes copy(size);
        mutate_copy(copy.data(), original.data(), size, version);
        ASSERT_EQ(copy, expected(original, version));
      }
      for (std::size_t i = 0; i < memory.size(); ++i) {
        const bool outside = i < shift || i >= shift + size;
        ASSERT_TRUE(!outside || memory[i] == std::byte{0xCD}) << i;
      }
    }
  }
}

// Goal: a part of a tensor changes as the whole does, wherever it begins and ends.
TEST(Mutate, PartsChangeAsTheWhole) {
  const Bytes original = counting(45);
  const Bytes whole = expected(original, 3);
  for (std::size_t begin = 0; begin <= original.size(); ++begin) {
    for (std::size_t end = begin; end <= original.size(); ++end) {
      Bytes part(original.begin() + static_cast<std::ptrdiff_t>(begin), original.begin() + static_cast<std::ptrdiff_t>(end));
      mutate(part.data(), part.size(), 0, 3, begin);
      ASSERT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin)));
      mutate(part.data(), part.size(), 3, 9, begin);
      mutate(part.data(), part.size(), 9, 0, begin);
      ASSERT_TRUE(std::equal(part.begin(), part.end(), original.begin() + static_cast<std::ptrdiff_t>(begin)));
    }
  }
}

// Goal: two versions differ in practically every byte, so that a stale slice cannot pass for a fresh one.
TEST(Mutate, VersionsDifferEverywhere) {
  const Bytes original(1 << 16, std::byte{0});
  const Bytes one = expected(original, 1), two = expected(original, 2);
  std::size_t equal = 0;
  for (std::size_t i = 0; i < one.size(); ++i) equal += one[i] == two[i] ? 1 : 0;
  EXPECT_LT(equal, one.size() / 128);  // 1/256 by chance
  std::set<std::uint64_t> words;
  for (std::uint64_t version = 1; version <= 8; ++version) {
    for (std::uint64_t word = 0; word < 4096; ++word) words.insert(mutation_word(version, word));
  }
  EXPECT_EQ(words.size(), 8u * 4096);
}

}  // namespace
}  // namespace shardpull
