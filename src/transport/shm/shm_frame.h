// The two messages of the shm backend, as shm_transport.h describes them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/identity.h"
#include "shardpull/status.h"
#include "transport/hot_wire.h"

namespace shardpull {

inline constexpr std::uint32_t kShmMagic = 0x4D535053;  // "SPSM" in memory
inline constexpr std::size_t kShmFrameBytes = kHotHeaderBytes;

enum class ShmFrameKind : std::uint8_t { kGrant = 1, kRetire = 2 };

struct ShmFrame {
  ShmFrameKind kind = ShmFrameKind::kGrant;
  FleetToken token = 0;
  Incarnation incarnation = 0;
  std::uint32_t region = 0;
  std::uint32_t generation = 0;
  std::uint64_t bytes = 0;
};

std::array<std::byte, kShmFrameBytes> encode(const ShmFrame& frame);
// True when the bytes (at least four) begin as a frame of this backend.
bool is_shm_frame(const std::byte* data);
// Refuses another magic, wire version, kind, a region, generation, token or incarnation of 0, a grant of 0 bytes, and
// anything but zeros at the end.
Result<ShmFrame> decode_shm_frame(const std::byte* data, std::size_t size);

}  // namespace shardpull
