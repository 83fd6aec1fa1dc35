// The two messages of the backends of one host, as local_transport.h describes them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/identity.h"
#include "shardpull/status.h"
#include "transport/hot_wire.h"

namespace shardpull {

inline constexpr std::uint32_t kLocalMagic = 0x4D4C5053;  // "SPLM" in memory
inline constexpr std::size_t kLocalFrameBytes = kHotHeaderBytes;

enum class LocalFrameKind : std::uint8_t { kGrant = 1, kRetire = 2 };
enum class LocalBackend : std::uint8_t { kShm = 1, kCma = 2 };
std::string_view name_of(LocalBackend backend);  // "shm"

struct LocalFrame {
  LocalFrameKind kind = LocalFrameKind::kGrant;
  LocalBackend backend = LocalBackend::kShm;
  FleetToken token = 0;
  Incarnation incarnation = 0;
  std::uint32_t region = 0;
  std::uint32_t generation = 0;
  std::uint64_t bytes = 0;          // grant
  std::uint64_t address = 0;        // cma's grant: where the region begins in its owner
  std::uint64_t proof_address = 0;  // cma's grant: where its owner keeps the proof that the region is alive,
  std::uint64_t proof = 0;          //   and what it reads while it is
};

std::array<std::byte, kLocalFrameBytes> encode(const LocalFrame& frame);
// True when the bytes (at least four) begin as a frame of these backends.
bool is_local_frame(const std::byte* data);
// Refuses another magic, wire version, kind or backend, a region, generation, token or incarnation of 0, a
// grant of 0 bytes, cma's grant without its addresses or of memory that ends beyond the address space, and
// addresses anywhere else.
Result<LocalFrame> decode_local_frame(const std::byte* data, std::size_t size);

}  // namespace shardpull
