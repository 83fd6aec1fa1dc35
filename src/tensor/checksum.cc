#include "tensor/checksum.h"

#include <fmt/format.h>
#include <xxhash.h>
#ifdef SHARDPULL_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#endif

#include <array>

namespace shardpull {
namespace {

// The library looks at the CPU in its first sum of a long input, without a lock: once, before threads have any.
void choose_kernels() {
#ifdef SHARDPULL_XXHASH_DISPATCH
  static const bool chosen = [] {
    const std::array<char, 1024> bytes{};
    XXH3_state_t* const state = XXH3_createState();
    XXH3_128bits_reset(state);
    XXH3_128bits_update(state, bytes.data(), bytes.size());
    XXH3_freeState(state);
    return (XXH3_64bits(bytes.data(), bytes.size()) ^ XXH3_128bits(bytes.data(), bytes.size()).low64) != 0;
  }();
  (void)chosen;
#endif
}

}  // namespace

// One XXH3 state serves both widths. Its own allocator gives it the alignment it wants.
struct Hasher::State {
  State() : xxh3(XXH3_createState()) {
    choose_kernels();
    XXH3_128bits_reset(xxh3);
  }
  ~State() { XXH3_freeState(xxh3); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  XXH3_state_t* xxh3;
};

std::string Digest::hex() const {
  return fmt::format("{:016x}{:016x}", high, low);
}

std::uint64_t checksum64(std::span<const std::byte> bytes) {
  choose_kernels();
  return XXH3_64bits(bytes.data(), bytes.size());
}

Digest digest128(std::span<const std::byte> bytes) {
  choose_kernels();
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {.high = hash.high64, .low = hash.low64};
}

Hasher::Hasher() : state_(std::make_unique<State>()) {}
Hasher::~Hasher() = default;
Hasher::Hasher(Hasher&&) noexcept = default;
Hasher& Hasher::operator=(Hasher&&) noexcept = default;

void Hasher::update(std::span<const std::byte> bytes) {
  XXH3_128bits_update(state_->xxh3, bytes.data(), bytes.size());
}

std::uint64_t Hasher::checksum() const {
  return XXH3_64bits_digest(state_->xxh3);
}

Digest Hasher::digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_->xxh3);
  return {.high = hash.high64, .low = hash.low64};
}

}  // namespace shardpull
