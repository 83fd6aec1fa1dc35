// What travels between two UCX transports besides hot messages, as ucx_transport.h describes it. 64 bytes,
// little-endian:
//
//    0 u32 magic "SPUX"   6 u8 kind      8 u64 token         24 u32 region       32 u64 read     48 u64 bytes
//    4 u16 wire version   7 u8 0        16 u64 incarnation   28 u32 generation   40 u64 offset   56 u64 0
//
//   hello     read: the key that the sender wants before each of the peer's messages; offset: the length of
//             the name; bytes: of data.              data: the sender's name; then its transports, for people
//                                                    (string); the addresses of its UCX workers (list of
//                                                    strings)
//   grant     region, generation, bytes.             data: UCX's remote key
//   retire    region, generation
//   read      region, generation, read, offset, bytes
//   data      read, offset within it, bytes.         data: the bytes
//   refused   read.                                  data: the error (hot_wire.h)
//   bye
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/identity.h"
#include "shardpull/status.h"
#include "transport/hot_wire.h"

namespace shardpull {

inline constexpr std::uint32_t kUcxMagic = 0x58555053;  // "SPUX" in memory
inline constexpr std::size_t kUcxFrameBytes = kHotHeaderBytes;
inline constexpr std::size_t kMaxUcxNameBytes = 64;
inline constexpr std::size_t kMaxUcxTransportsBytes = 256;
inline constexpr std::size_t kMaxUcxHelloDataBytes = 64u << 10;
inline constexpr std::size_t kMaxUcxFrameDataBytes = 64u << 10;  // of a frame that is not data

enum class UcxFrameKind : std::uint8_t {
  kHello = 1,
  kGrant = 2,
  kRetire = 3,
  kRead = 4,
  kData = 5,
  kRefused = 6,
  kBye = 7,
};

struct UcxFrame {
  UcxFrameKind kind = UcxFrameKind::kHello;
  FleetToken token = 0;
  Incarnation incarnation = 0;
  std::uint32_t region = 0;
  std::uint32_t generation = 0;
  std::uint64_t read = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

std::array<std::byte, kUcxFrameBytes> encode(const UcxFrame& frame);
// True when the bytes (at least four) begin as a frame of this backend.
bool is_ucx_frame(const std::byte* data);
// Refuses another magic, wire version (naming both), kind, a token or incarnation of 0, a field that
// must be set and is 0 or must be 0 and is not.
Result<UcxFrame> decode_ucx_frame(const std::byte* data, std::size_t size);

}  // namespace shardpull
