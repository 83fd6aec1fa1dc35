// Small, seeded, portable random numbers: the same seed gives the same sequence on every machine and standard library,
// so a failing seed can be replayed. Not for secrets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace shardpull {

// One step of SplitMix64: a bijective mix of 64 bits. Also good as a hash of a counter or an index.
constexpr std::uint64_t splitmix64(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

// xoshiro256**, seeded through SplitMix64. Thread-compatible; a value (copies continue independently).
class Random {
 public:
  explicit Random(std::uint64_t seed) {
    for (auto& word : state_) {
      word = splitmix64(seed);
      seed += 0x9E3779B97F4A7C15ull;
    }
  }

  std::uint64_t next_u64() {
    const std::uint64_t result = rotate_left(state_[1] * 5, 7) * 9;
    const std::uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = rotate_left(state_[3], 45);
    return result;
  }

  // Uniform in [0, bound). bound > 0.
  std::uint64_t below(std::uint64_t bound) {
    const std::uint64_t threshold = (0 - bound) % bound;  // rejects the part of the range that would bias the rest
    for (;;) {
      const std::uint64_t value = next_u64();
      if (value >= threshold) return value % bound;
    }
  }

  // Uniform in [low, high], both ends included. low <= high.
  std::int64_t between(std::int64_t low, std::int64_t high) {
    const std::uint64_t span = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) + 1;
    const std::uint64_t step = span == 0 ? next_u64() : below(span);
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + step);
  }

  // Uniform in [0, 1), 53 random bits.
  double unit() { return static_cast<double>(next_u64() >> 11) * 0x1.0p-53; }

  // True with probability `probability`.
  bool chance(double probability) { return unit() < probability; }

  // Fisher-Yates over a random-access container.
  template <typename Container>
  void shuffle(Container& items) {
    for (std::size_t i = items.size(); i > 1; --i) {
      using std::swap;
      swap(items[i - 1], items[static_cast<std::size_t>(below(i))]);
    }
  }

  // A generator whose sequence is independent of this one's further use: one per component of a simulation.
  Random fork(std::uint64_t stream) const {
    return Random(splitmix64(state_[0] ^ splitmix64(stream ^ 0xD1B54A32D192ED03ull)) ^ state_[3]);
  }

 private:
  static constexpr std::uint64_t rotate_left(std::uint64_t value, int bits) {
    return (value << bits) | (value >> (64 - bits));
  }
  std::uint64_t state_[4];
};

}  // namespace shardpull
