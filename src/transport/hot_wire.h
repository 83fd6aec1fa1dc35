// The hot wire: one fixed 64-byte little-endian header, then `length` payload bytes. docs/PROTOCOL.md, "Hot messages".
//
//    0 u32 magic "SPUL"      8 u64 token                24 u64 sync id            40 u16 attempt      48 u32 seq
//    4 u16 wire version     16 u64 incarnation          32 u32 consumer           42 u16 run          52 u32 length
//    6 u8 type, u8 flags       (the sender's)           36 u32 target             44 u16 lane kind    56 u64 sum of the
//                                                          (chunk or group)       46 u16 0 (reserved)     payload (XXH3-64)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/identity.h"
#include "base/memory_ref.h"
#include "shardpull/status.h"

namespace shardpull {

inline constexpr std::size_t kHotHeaderBytes = 64;
inline constexpr std::uint32_t kHotMagic = 0x4C555053;        // "SPUL" in memory
inline constexpr std::uint32_t kMaxHotPayloadBytes = 16u << 20;
inline constexpr std::uint16_t kMaxLaneKind = 1;  // 0 regular, 1 recovery

enum class HotType : std::uint8_t {
  kHello = 1,       // consumer -> producer, first message of an endpoint; payload: u32 slice-format version
  kHelloReply = 2,  // producer -> consumer; payload: none, or the error that refuses it
  kPull = 3,        // consumer -> producer
  kReady = 4,       // producer -> consumer; payload: where the bytes are (ReadyPayload)
  kFail = 5,        // producer -> consumer; payload: code and message
  kFree = 6,        // consumer -> producer; payload: groups (FreePayload)
  kFreeAck = 7,     // producer -> consumer; payload: the groups now known to be signalled
  kAsk = 8,         // consumer -> its mate `target`: how did the sync end? Round `seq`; payload: its own word
  kOutcome = 9,     // back, of the same round; payload: one word (CommitWord)
};

struct HotHeader {
  HotType type = HotType::kHello;
  std::uint8_t flags = 0;  // none defined: any set bit is refused
  FleetToken token = 0;
  Incarnation incarnation = 0;
  std::uint64_t sync_id = 0;
  std::uint32_t consumer = 0;
  std::uint32_t target = 0;
  std::uint16_t attempt = 0;
  std::uint16_t run = 0;
  std::uint16_t lane_kind = 0;
  std::uint32_t seq = 0;
  std::uint32_t length = 0;
  std::uint64_t sum = 0;
};
std::array<std::byte, kHotHeaderBytes> encode(const HotHeader& header);
// Decodes the first 64 of `size` bytes. Refuses another magic ("not our protocol"), wire version (naming both), type, flag, lane
// kind, a reserved field that is not 0, a token or incarnation of 0, or a length above the limit. Whether the token is OURS is the
// transport's to check.
Result<HotHeader> decode_hot_header(const std::byte* data, std::size_t size);
// XXH3-64: the `sum` of a header whose payload is these bytes. The sum of no bytes is that of the empty string.
std::uint64_t payload_sum(const std::byte* data, std::size_t size);
std::string_view name_of(HotType type);  // "Pull"

// Where one name (or piece) of a mapped chunk is; packed chunks have one entry: the serve slot's part.
struct ReadyEntry {
  RemoteRef where;
  std::vector<std::int64_t> stride;  // empty = contiguous, else per dim, in elements of the published dtype
};
struct ReadyPayload {
  std::uint8_t encoding = 0;         // 0 = raw
  std::vector<ReadyEntry> entries;   // mapped: one per distinct (name, piece) of the run, in order of first use
  std::vector<std::uint64_t> sums;   // integrity: one per key, or empty
};
std::vector<std::byte> encode(const ReadyPayload& payload);
// Refuses an unknown encoding, more than kMaxDims strides, counts the bytes cannot hold, and bytes left over.
Result<ReadyPayload> decode_ready(const std::byte* data, std::size_t size);

// A batch of free signals: each consumer with the groups it signals.
struct FreeEntry {
  std::uint32_t consumer = 0;
  std::vector<std::uint32_t> groups;  // ascending
};
std::vector<std::byte> encode(const std::vector<FreeEntry>& entries);
// Refuses groups that do not ascend strictly, counts the bytes cannot hold, and bytes left over.
Result<std::vector<FreeEntry>> decode_free(const std::byte* data, std::size_t size);

// What a worker says of a sync to a mate: 1 undecided, 2 committed, 3 aborted.
std::vector<std::byte> encode_outcome(std::uint8_t word);
// Refuses any other number, and bytes left over.
Result<std::uint8_t> decode_outcome(const std::byte* data, std::size_t size);

// An error that travels: code, reason, fault, retryable, peer, tensor and message (cut to 4 KiB between characters).
std::vector<std::byte> encode(const Status& status);
// The error that travelled. Bytes that are no error (malformed, or an OK) give DATA_LOSS, kCorrupt: never OK. A code or reason
// this build does not know becomes UNKNOWN or kUnspecified.
Status decode_status(const std::byte* data, std::size_t size);

}  // namespace shardpull
