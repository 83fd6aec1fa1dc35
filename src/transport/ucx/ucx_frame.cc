#include "transport/ucx/ucx_frame.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "base/encoder.h"
#include "base/status_macros.h"

namespace shardpull {
namespace {

Status refused(std::string message, Reason reason = Reason::kCorrupt) {
  return Status(reason == Reason::kVersionMismatch ? StatusCode::kFailedPrecondition : StatusCode::kDataLoss,
                "ucx frame: " + std::move(message), {.reason = reason, .fault = Fault::kPeer});
}

// Which fields a kind has.
struct Fields {
  bool region = false, read = false, bytes = false, offset = false;
};
Fields fields_of(UcxFrameKind kind) {
  switch (kind) {
    case UcxFrameKind::kHello:
      return {.read = true, .bytes = true, .offset = true};
    case UcxFrameKind::kBye:
      return {};
    case UcxFrameKind::kGrant:
      return {.region = true, .bytes = true};
    case UcxFrameKind::kRetire:
      return {.region = true};
    case UcxFrameKind::kRead:
      return {.region = true, .read = true, .bytes = true, .offset = true};
    case UcxFrameKind::kData:
      return {.read = true, .bytes = true, .offset = true};
    case UcxFrameKind::kRefused:
      return {.read = true};
  }
  return {};
}

}  // namespace

std::array<std::byte, kUcxFrameBytes> encode(const UcxFrame& frame) {
  ByteWriter writer;
  writer.reserve(kUcxFrameBytes);
  writer.u32(kUcxMagic);
  writer.u16(kWireVersion);
  writer.u8(static_cast<std::uint8_t>(frame.kind));
  writer.u8(0);
  writer.u64(frame.token);
  writer.u64(frame.incarnation);
  writer.u32(frame.region);
  writer.u32(frame.generation);
  writer.u64(frame.read);
  writer.u64(frame.offset);
  writer.u64(frame.bytes);
  writer.u64(0);
  std::array<std::byte, kUcxFrameBytes> out;
  std::copy(writer.bytes().begin(), writer.bytes().end(), out.begin());
  return out;
}

bool is_ucx_frame(const std::byte* data) {
  std::uint32_t magic = 0;
  std::memcpy(&magic, data, sizeof magic);
  return magic == kUcxMagic;
}

Result<UcxFrame> decode_ucx_frame(const std::byte* data, std::size_t size) {
  ByteReader reader(std::span(data, std::min(size, kUcxFrameBytes)), "ucx frame");
  UcxFrame frame;
  std::uint32_t magic = 0;
  std::uint16_t version = 0;
  std::uint8_t kind = 0, flags = 0;
  std::uint64_t rest = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u32(magic));
  if (magic != kUcxMagic) return refused(fmt::format("not our protocol (it begins with 0x{:08x})", magic));
  SHARDPULL_RETURN_IF_ERROR(reader.u16(version));
  if (version != kWireVersion) {
    return refused(fmt::format("the peer speaks wire version {}, this process {}", version, kWireVersion),
                   Reason::kVersionMismatch);
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u8(kind));
  if (kind < static_cast<std::uint8_t>(UcxFrameKind::kHello) ||
      kind > static_cast<std::uint8_t>(UcxFrameKind::kBye)) {
    return refused(fmt::format("unknown kind {}", kind));
  }
  frame.kind = static_cast<UcxFrameKind>(kind);
  SHARDPULL_RETURN_IF_ERROR(reader.u8(flags));
  if (flags != 0) return refused(fmt::format("unknown flags 0x{:02x}", flags));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.token));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.incarnation));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(frame.region));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(frame.generation));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.read));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.offset));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(frame.bytes));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(rest));
  if (frame.token == 0 || frame.incarnation == 0)
    return refused("the fleet token and the incarnation are never 0");
  const Fields fields = fields_of(frame.kind);
  if ((frame.region != 0) != fields.region || (frame.generation != 0) != fields.region ||
      (frame.read != 0) != fields.read || (frame.bytes != 0) != fields.bytes ||
      (frame.offset != 0 && !fields.offset) || rest != 0) {
    return refused(fmt::format("fields of kind {} that must be set are 0, or the other way round", kind));
  }
  return frame;
}

}  // namespace shardpull
