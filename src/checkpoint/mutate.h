// The mutation that stands for a training step: a documented, reversible change of every byte from version to version.
//
// Byte for byte on the tensor's little-endian 8-byte words, i = 0, 1, 2, ... from its first byte:
//     word_v(i) = word_0(i) xor mix(v, i)
//     mix(0, i) = 0                                   version 0 is the checkpoint
//     mix(v, i) = mix64(v + (i + 1) * 0x9E3779B97F4A7C15)   modulo 2^64, for v != 0: output i of SplitMix64 seeded with v
//     mix64(z): z = (z xor z >> 30) * 0xBF58476D1CE4E5B9; z = (z xor z >> 27) * 0x94D049BB133111EB; z xor z >> 31
// The last word of a tensor whose length is no multiple of 8 takes the low bytes. The change depends on the version and the
// place only, not on the name: anybody who has the checkpoint can compute any version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardpull {

// SplitMix64's finaliser: a bijection of 64-bit words in which every input bit changes every output bit half of the time.
constexpr std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// mix(version, word_index) of the formula above.
constexpr std::uint64_t mutation_word(std::uint64_t version, std::uint64_t word_index) {
  return version == 0 ? 0 : mix64(version + (word_index + 1) * 0x9E3779B97F4A7C15u);
}

// Changes `bytes` bytes of a tensor from one version to another, in place. `begin` is the offset of data[0] from the tensor's
// first byte: a part of a tensor is changed as the whole would be. Any alignment.
void mutate(std::byte* data, std::uint64_t bytes, std::uint64_t from_version, std::uint64_t to_version,
            std::uint64_t begin = 0);

// Writes version `version` of the checkpoint's bytes `src` to `dst`. The two do not overlap, or are the same.
void mutate_copy(std::byte* dst, const std::byte* src, std::uint64_t bytes, std::uint64_t version, std::uint64_t begin = 0);

}  // namespace shardpull
