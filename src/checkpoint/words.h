// Walking a byte range of a tensor by the tensor's own 8-byte words. Private.
#pragma once

#include <algorithm>
#include <cstdint>

namespace shardpull {

// Bytes [begin, begin + bytes) of a tensor as at most one cut word, a run of whole ones, and at most one cut word:
//   whole(at, word, count)        `count` words from word index `word`, at offset `at` of the range
//   part(at, word, skip, count)   `count` bytes (1..7) of word `word`, without its first `skip` bytes, at offset `at`
template <typename Whole, typename Part>
void walk_words(std::uint64_t begin, std::uint64_t bytes, Whole whole, Part part) {
  std::uint64_t at = 0;
  std::uint64_t word = begin / 8;
  if (const std::uint64_t skip = begin % 8; skip != 0 && bytes != 0) {
    at = std::min(8 - skip, bytes);
    part(std::uint64_t{0}, word, skip, at);
    ++word;
  }
  const std::uint64_t count = (bytes - at) / 8;
  if (count != 0) whole(at, word, count);
  at += count * 8;
  if (at < bytes) part(at, word + count, std::uint64_t{0}, bytes - at);
}

}  // namespace shardpull
