#include "checkpoint/mutate.h"

#include <cstring>

#include "checkpoint/words.h"

namespace shardpull {
namespace {

// dst = src xor change(word), word by word. `dst` may be `src`.
template <typename Change>
void xor_words(std::byte* dst, const std::byte* src, std::uint64_t bytes, std::uint64_t begin, Change change) {
  walk_words(
      begin, bytes,
      [&](std::uint64_t at, std::uint64_t word, std::uint64_t count) {
        std::byte* const to = dst + at;
        const std::byte* const from = src + at;
        for (std::uint64_t i = 0; i < count; ++i) {
          std::uint64_t value;  // memcpy: neither side is aligned
          std::memcpy(&value, from + i * 8, 8);
          value ^= change(word + i);
          std::memcpy(to + i * 8, &value, 8);
        }
      },
      [&](std::uint64_t at, std::uint64_t word, std::uint64_t skip, std::uint64_t count) {
        const std::uint64_t bits = change(word) >> (8 * skip);
        for (std::uint64_t i = 0; i < count; ++i) dst[at + i] = src[at + i] ^ static_cast<std::byte>(bits >> (8 * i));
      });
}

}  // namespace

void mutate(std::byte* data, std::uint64_t bytes, std::uint64_t from_version, std::uint64_t to_version, std::uint64_t begin) {
  if (from_version == to_version) return;
  if (from_version == 0 || to_version == 0) {
    mutate_copy(data, data, bytes, from_version + to_version, begin);
    return;
  }
  xor_words(data, data, bytes, begin, [=](std::uint64_t word) {
    return mutation_word(from_version, word) ^ mutation_word(to_version, word);
  });
}

void mutate_copy(std::byte* dst, const std::byte* src, std::uint64_t bytes, std::uint64_t version, std::uint64_t begin) {
  if (version == 0) {
    if (dst != src && bytes != 0) std::memcpy(dst, src, bytes);
    return;
  }
  xor_words(dst, src, bytes, begin, [=](std::uint64_t word) { return mutation_word(version, word); });
}

}  // namespace shardpull
