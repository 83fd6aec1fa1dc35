#include "transport/local_frame.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/encoder.h"
#include "base/status_macros.h"

namespace shardpull {

std::string_view name_of(LocalBackend backend) {
  return backend == LocalBackend::kShm ? "shm" : "cma";
}

std::array<std::byte, kLocalFrameBytes> encode(const LocalFrame& frame) {
  ByteWriter writer;
  writer.reserve(kLocalFrameBytes);
  writer.u32(kLocalMagic);
  writer.u16(kWireVersion);
  writer.u8(static_cast<std::uint8_t>(frame.kind));
  writer.u8(static_cast<std::uint8_t>(frame.backend));
  writer.u64(frame.token);
  writer.u64(frame.incarnation);
  writer.u32(frame.region);
  writer.u32(frame.generation);
  writer.u64(frame.bytes);
  writer.u64(frame.address);
  writer.u64(frame.proof_address);
  writer.u64(frame.proof);
  std::array<std::byte, kLocalFrameBytes> out{};
  std::copy(writer.bytes().begin(), writer.bytes().end(), out.begin());
  return out;
}

bool is_local_frame(const std::byte* data) {
  std::uint32_t magic = 0;
  std::memcpy(&magic, data, sizeof magic);
  return magic == kLocalMagic;
}

Result<LocalFrame> decode_local_frame(const std::byte* data, std::size_t size) {
  ByteReader reader(std::span(data, std::min(size, kLocalFrameBytes)), "local frame");
  LocalFrame frame;
  std::uint32_t magic = 0;
  std::uint16_t version = 0;
  std::uint8_t kind = 0, backend = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u32(magic));
  if (magic != kLocalMagic) return reader.malformed("another magic");
  SHARDPULL_RETURN_IF_ERROR(reader.u16(version));
  if (version != kWireVersion) {
    return Status(
        StatusCode::kFailedPrecondition,
        fmt::format("local frame: the peer speaks wire version {}, this process {}", version, kWireVersion),
        {.reason = Reason::kVersionMismatch, .fault = Fault::kPeer});
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u8(kind));
  if (kind != static_cast<std::uint8_t>(LocalFrameKind::kGrant) &&
      kind != static_cast<std::uint8_t>(LocalFrameKind::kRetire)) {
    return reader.malformed(fmt::format("unknown kind {}", kind));
  }
  frame.kind = static_cast<LocalFrameKind>(kind);
  SHARDPULL_RETURN_IF_ERROR(reader.u8(backend));
  if (backend != static_cast<std::uint8_t>(LocalBackend::kShm) &&
      backend != static_cast<std::uint8_t>(LocalBackend::kCma)) {
    return reader.malformed(fmt::format("unknown backend {}", backend));
  }
  frame.backend = static_cast<LocalBackend>(backend);
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.token));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.incarnation));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(frame.region));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(frame.generation));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.bytes));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.address));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.proof_address));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.proof));
  if (frame.token == 0 || frame.incarnation == 0 || frame.region == 0 || frame.generation == 0) {
    return reader.malformed("a token, incarnation, region or generation of 0");
  }
  const bool grant = frame.kind == LocalFrameKind::kGrant;
  if (grant && frame.bytes == 0) return reader.malformed("a grant of 0 bytes");
  if (grant && frame.backend == LocalBackend::kCma) {
    if (frame.address == 0 || frame.proof_address == 0 || frame.proof == 0) {
      return reader.malformed("a grant without its address or proof");
    }
    if (!checked_add(frame.address, frame.bytes) || !checked_add(frame.proof_address, sizeof frame.proof)) {
      return reader.malformed("a grant that ends beyond the address space");
    }
  } else if (frame.address != 0 || frame.proof_address != 0 || frame.proof != 0) {
    return reader.malformed("a reserved byte is not 0");
  }
  return frame;
}

}  // namespace shardpull
