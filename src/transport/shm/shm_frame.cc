#include "transport/shm/shm_frame.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include <fmt/format.h>

#include "base/encoder.h"
#include "base/status_macros.h"

namespace shardpull {

std::array<std::byte, kShmFrameBytes> encode(const ShmFrame& frame) {
  ByteWriter writer;
  writer.reserve(kShmFrameBytes);
  writer.u32(kShmMagic);
  writer.u16(kWireVersion);
  writer.u8(static_cast<std::uint8_t>(frame.kind));
  writer.u8(0);
  writer.u64(frame.token);
  writer.u64(frame.incarnation);
  writer.u32(frame.region);
  writer.u32(frame.generation);
  writer.u64(frame.bytes);
  std::array<std::byte, kShmFrameBytes> out{};
  std::copy(writer.bytes().begin(), writer.bytes().end(), out.begin());
  return out;
}

bool is_shm_frame(const std::byte* data) {
  std::uint32_t magic = 0;
  std::memcpy(&magic, data, sizeof magic);
  return magic == kShmMagic;
}

Result<ShmFrame> decode_shm_frame(const std::byte* data, std::size_t size) {
  ByteReader reader(std::span(data, std::min(size, kShmFrameBytes)), "shm frame");
  ShmFrame frame;
  std::uint32_t magic = 0;
  std::uint16_t version = 0;
  std::uint8_t kind = 0, zero = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u32(magic));
  if (magic != kShmMagic) return reader.malformed("another magic");
  SHARDPULL_RETURN_IF_ERROR(reader.u16(version));
  if (version != kWireVersion) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("shm frame: the peer speaks wire version {}, this process {}", version, kWireVersion),
                  {.reason = Reason::kVersionMismatch, .fault = Fault::kPeer});
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u8(kind));
  if (kind != static_cast<std::uint8_t>(ShmFrameKind::kGrant) && kind != static_cast<std::uint8_t>(ShmFrameKind::kRetire)) {
    return reader.malformed(fmt::format("unknown kind {}", kind));
  }
  frame.kind = static_cast<ShmFrameKind>(kind);
  SHARDPULL_RETURN_IF_ERROR(reader.u8(zero));
  if (zero != 0) return reader.malformed("a reserved byte is not 0");
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.token));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.incarnation));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(frame.region));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(frame.generation));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.bytes));
  if (frame.token == 0 || frame.incarnation == 0 || frame.region == 0 || frame.generation == 0) {
    return reader.malformed("a token, incarnation, region or generation of 0");
  }
  if (frame.kind == ShmFrameKind::kGrant && frame.bytes == 0) return reader.malformed("a grant of 0 bytes");
  while (reader.position() < kShmFrameBytes) {
    SHARDPULL_RETURN_IF_ERROR(reader.u8(zero));
    if (zero != 0) return reader.malformed("a reserved byte is not 0");
  }
  return frame;
}

}  // namespace shardpull
