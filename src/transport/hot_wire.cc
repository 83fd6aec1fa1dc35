#include "transport/hot_wire.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>
#include <xxhash.h>

#include "base/encoder.h"
#include "base/limits.h"
#include "base/status_macros.h"
#include "shardpull/slice.h"

namespace shardpull {
namespace {

constexpr std::size_t kMaxStatusMessageBytes = 4096;
constexpr std::uint8_t kEncodingRaw = 0;
// The smallest encodings of one item of each list, which bound how many items the bytes at hand can hold.
constexpr std::uint64_t kMinReadyEntryBytes = 4 + 4 + 8 + 8 + 4;
constexpr std::uint64_t kMinFreeEntryBytes = 4 + 4;
constexpr std::uint64_t kMaxItems = kMaxHotPayloadBytes;  // an item takes at least a byte

bool known(std::uint8_t type) {
  return type >= static_cast<std::uint8_t>(HotType::kHello) && type <= static_cast<std::uint8_t>(HotType::kOutcome);
}

Status refused(Reason reason, std::string message) {
  return Status(reason == Reason::kVersionMismatch ? StatusCode::kFailedPrecondition : StatusCode::kDataLoss,
                std::move(message), {.reason = reason, .fault = Fault::kPeer});
}

// The first `limit` bytes of `text` at most, not ending within a UTF-8 character.
std::string_view cut(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return text;
  std::size_t end = limit;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

StatusCode code_from_wire(std::uint8_t code) {
  return code <= static_cast<std::uint8_t>(StatusCode::kUnauthenticated) ? static_cast<StatusCode>(code)
                                                                         : StatusCode::kUnknown;
}

Reason reason_from_wire(std::uint16_t reason) {
  return reason <= static_cast<std::uint16_t>(Reason::kCorrupt) ? static_cast<Reason>(reason) : Reason::kUnspecified;
}

Fault fault_from_wire(std::uint8_t fault) {
  return fault <= static_cast<std::uint8_t>(Fault::kLibrary) ? static_cast<Fault>(fault) : Fault::kPeer;
}

Status read_status(ByteReader& reader, Status& out) {
  std::uint8_t code = 0, fault = 0;
  std::uint16_t reason = 0;
  ErrorInfo info;
  std::string message;
  SHARDPULL_RETURN_IF_ERROR(reader.u8(code));
  if (code == 0) return reader.malformed("an error with the code of success");
  SHARDPULL_RETURN_IF_ERROR(reader.u16(reason));
  SHARDPULL_RETURN_IF_ERROR(reader.u8(fault));
  SHARDPULL_RETURN_IF_ERROR(reader.boolean(info.retryable));
  SHARDPULL_RETURN_IF_ERROR(reader.string(message, kMaxStatusMessageBytes));
  SHARDPULL_RETURN_IF_ERROR(reader.string(info.peer, kMaxNameBytes));
  SHARDPULL_RETURN_IF_ERROR(reader.string(info.tensor, kMaxNameBytes));
  SHARDPULL_RETURN_IF_ERROR(reader.end());
  info.reason = reason_from_wire(reason);
  info.fault = fault_from_wire(fault);
  out = Status(code_from_wire(code), std::move(message), std::move(info));
  return {};
}

}  // namespace

std::string_view name_of(HotType type) {
  switch (type) {
    case HotType::kHello: return "Hello";
    case HotType::kHelloReply: return "HelloReply";
    case HotType::kPull: return "Pull";
    case HotType::kReady: return "Ready";
    case HotType::kFail: return "Fail";
    case HotType::kFree: return "Free";
    case HotType::kFreeAck: return "FreeAck";
    case HotType::kAsk: return "Ask";
    case HotType::kOutcome: return "Outcome";
  }
  return "unknown";
}

std::uint64_t payload_sum(const std::byte* data, std::size_t size) { return XXH3_64bits(data, size); }

std::array<std::byte, kHotHeaderBytes> encode(const HotHeader& header) {
  ByteWriter writer;
  writer.reserve(kHotHeaderBytes);
  writer.u32(kHotMagic);
  writer.u16(kWireVersion);
  writer.u8(static_cast<std::uint8_t>(header.type));
  writer.u8(header.flags);
  writer.u64(header.token);
  writer.u64(header.incarnation);
  writer.u64(header.sync_id);
  writer.u32(header.consumer);
  writer.u32(header.target);
  writer.u16(header.attempt);
  writer.u16(header.run);
  writer.u16(header.lane_kind);
  writer.u16(0);
  writer.u32(header.seq);
  writer.u32(header.length);
  writer.u64(header.sum);
  std::array<std::byte, kHotHeaderBytes> out;
  std::copy(writer.bytes().begin(), writer.bytes().end(), out.begin());
  return out;
}

Result<HotHeader> decode_hot_header(const std::byte* data, std::size_t size) {
  ByteReader reader(std::span(data, std::min(size, kHotHeaderBytes)), "hot header");
  HotHeader header;
  std::uint32_t magic = 0;
  std::uint16_t version = 0, reserved = 0;
  std::uint8_t type = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u32(magic));
  if (magic != kHotMagic) {
    return refused(Reason::kCorrupt, fmt::format("hot header: not our protocol (it begins with 0x{:08x}, not 0x{:08x})", magic,
                                                 kHotMagic));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u16(version));
  if (version != kWireVersion) {
    return refused(Reason::kVersionMismatch,
                   fmt::format("hot header: the peer speaks wire version {}, this process {}", version, kWireVersion));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u8(type));
  if (!known(type)) return refused(Reason::kCorrupt, fmt::format("hot header: unknown message type {}", type));
  header.type = static_cast<HotType>(type);
  SHARDPULL_RETURN_IF_ERROR(reader.u8(header.flags));
  if (header.flags != 0) return refused(Reason::kCorrupt, fmt::format("hot header: unknown flags 0x{:02x}", header.flags));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(header.token));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(header.incarnation));
  if (header.token == 0 || header.incarnation == 0) {
    return refused(Reason::kCorrupt, "hot header: the fleet token and the incarnation are never 0");
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u64(header.sync_id));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(header.consumer));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(header.target));
  SHARDPULL_RETURN_IF_ERROR(reader.u16(header.attempt));
  SHARDPULL_RETURN_IF_ERROR(reader.u16(header.run));
  SHARDPULL_RETURN_IF_ERROR(reader.u16(header.lane_kind));
  if (header.lane_kind > kMaxLaneKind) {
    return refused(Reason::kCorrupt, fmt::format("hot header: unknown lane kind {}", header.lane_kind));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u16(reserved));
  if (reserved != 0) return refused(Reason::kCorrupt, fmt::format("hot header: reserved field is {}, not 0", reserved));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(header.seq));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(header.length));
  if (header.length > kMaxHotPayloadBytes) {
    return refused(Reason::kLimit, fmt::format("hot header: a payload of {} bytes, above the limit of {}", header.length,
                                               kMaxHotPayloadBytes));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u64(header.sum));
  return header;
}

std::vector<std::byte> encode(const ReadyPayload& payload) {
  ByteWriter writer;
  writer.reserve(16 + payload.entries.size() * kMinReadyEntryBytes + payload.sums.size() * 8);
  writer.u8(payload.encoding);
  writer.u32(static_cast<std::uint32_t>(payload.entries.size()));
  for (const ReadyEntry& entry : payload.entries) {
    writer.u32(entry.where.region);
    writer.u32(entry.where.generation);
    writer.u64(entry.where.offset);
    writer.u64(entry.where.bytes);
    writer.i64_list(entry.stride);
  }
  writer.u32(static_cast<std::uint32_t>(payload.sums.size()));
  for (const std::uint64_t sum : payload.sums) writer.u64(sum);
  return writer.take();
}

Result<ReadyPayload> decode_ready(const std::byte* data, std::size_t size) {
  ByteReader reader(std::span(data, size), "ready payload");
  ReadyPayload payload;
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u8(payload.encoding));
  if (payload.encoding != kEncodingRaw) {
    return reader.malformed(fmt::format("unknown encoding {} (this build knows {}, raw)", payload.encoding, kEncodingRaw));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxItems, kMinReadyEntryBytes));
  payload.entries.resize(count);
  for (ReadyEntry& entry : payload.entries) {
    SHARDPULL_RETURN_IF_ERROR(reader.u32(entry.where.region));
    SHARDPULL_RETURN_IF_ERROR(reader.u32(entry.where.generation));
    SHARDPULL_RETURN_IF_ERROR(reader.u64(entry.where.offset));
    SHARDPULL_RETURN_IF_ERROR(reader.u64(entry.where.bytes));
    SHARDPULL_RETURN_IF_ERROR(reader.i64_list(entry.stride, kMaxDims));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxItems, sizeof(std::uint64_t)));
  payload.sums.resize(count);
  for (std::uint64_t& sum : payload.sums) SHARDPULL_RETURN_IF_ERROR(reader.u64(sum));
  SHARDPULL_RETURN_IF_ERROR(reader.end());
  return payload;
}

std::vector<std::byte> encode(const std::vector<FreeEntry>& entries) {
  ByteWriter writer;
  writer.u32(static_cast<std::uint32_t>(entries.size()));
  for (const FreeEntry& entry : entries) {
    writer.u32(entry.consumer);
    writer.u32_list(entry.groups);
  }
  return writer.take();
}

Result<std::vector<FreeEntry>> decode_free(const std::byte* data, std::size_t size) {
  ByteReader reader(std::span(data, size), "free payload");
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxItems, kMinFreeEntryBytes));
  std::vector<FreeEntry> entries(count);
  for (FreeEntry& entry : entries) {
    SHARDPULL_RETURN_IF_ERROR(reader.u32(entry.consumer));
    SHARDPULL_RETURN_IF_ERROR(reader.u32_list(entry.groups, kMaxItems));
    if (std::adjacent_find(entry.groups.begin(), entry.groups.end(), std::greater_equal<>()) != entry.groups.end()) {
      return reader.malformed(fmt::format("the groups of consumer {} do not ascend", entry.consumer));
    }
  }
  SHARDPULL_RETURN_IF_ERROR(reader.end());
  return entries;
}

std::vector<std::byte> encode_outcome(std::uint8_t word) {
  ByteWriter writer;
  writer.u8(word);
  return writer.take();
}

Result<std::uint8_t> decode_outcome(const std::byte* data, std::size_t size) {
  ByteReader reader(std::span(data, size), "outcome payload");
  std::uint8_t word = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u8(word));
  if (word < 1 || word > 3) return reader.malformed(fmt::format("unknown word {}", word));
  SHARDPULL_RETURN_IF_ERROR(reader.end());
  return word;
}

std::vector<std::byte> encode(const Status& status) {
  const ErrorInfo& info = status.info();
  ByteWriter writer;
  writer.u8(static_cast<std::uint8_t>(status.code()));
  writer.u16(static_cast<std::uint16_t>(info.reason));
  writer.u8(static_cast<std::uint8_t>(info.fault));
  writer.boolean(info.retryable);
  writer.string(cut(status.message(), kMaxStatusMessageBytes));
  writer.string(cut(info.peer, kMaxNameBytes));
  writer.string(cut(info.tensor, kMaxNameBytes));
  return writer.take();
}

Status decode_status(const std::byte* data, std::size_t size) {
  ByteReader reader(std::span(data, size), "error payload");
  Status travelled;
  if (Status malformed = read_status(reader, travelled); !malformed.ok()) return malformed;
  return travelled;
}

}  // namespace shardpull
