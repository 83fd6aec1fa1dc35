// Checksums of bytes that travel (XXH3, 64 bits) and digests of what must be equal on two sides (XXH3, 128 bits). They find
// errors, not forgeries.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace shardpull {

// A 128-bit digest. Ordered and comparable; all zeros is no digest.
struct Digest {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  // 32 lower-case hexadecimal digits, the most significant first.
  std::string hex() const;
  friend auto operator<=>(const Digest&, const Digest&) = default;
};

// XXH3-64 of the bytes. The sum of no bytes is that of the empty string.
std::uint64_t checksum64(std::span<const std::byte> bytes);

// XXH3-128 of the bytes.
Digest digest128(std::span<const std::byte> bytes);

// The same over bytes that come in parts: however they are cut, the result is that of the whole. Movable; thread-compatible.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(Hasher&&) noexcept;
  Hasher& operator=(Hasher&&) noexcept;

  void update(std::span<const std::byte> bytes);
  // Of everything so far; more may follow.
  std::uint64_t checksum() const;
  Digest digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardpull
