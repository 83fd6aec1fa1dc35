// Which paths a transport has, and which of them a key or a chunk can take.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace shardpull {

// A key of fewer bytes is packed where a plan may choose: one read of its own costs more than to gather and
// to scatter it (docs/ARCHITECTURE.md, "Which path, and why").
inline constexpr std::uint64_t kMinDirectBytes = 64 << 10;

// A key that is no single run of bytes goes direct where one read takes many runs (reads_vectored) of at least
// so many bytes each: beside a run of 1 KiB the kernel's work for it costs as much as to gather and to scatter.
inline constexpr std::uint64_t kMinDirectRunBytes = 2 << 10;

// Path mapped: the reader can map its peers' memory.
bool maps(TransportKind transport);
// Path direct reads memory wherever it lies. Others read what the transport knows: engine memory, export
// buffers.
bool reads_any_memory(TransportKind transport);
// Many windows of a peer's memory are one system call, not a request each.
bool reads_vectored(TransportKind transport);
// What the transport cannot do that `policy` asks for, and what helps; nothing when it can. `transport` is not
// kAuto.
std::optional<std::string> illegal_pair(TransportKind transport, PathPolicy policy);

struct MappingObstacle {
  std::uint32_t producer = 0, name = 0;  // the first candidate that cannot, and for which name
  std::string reason;                    // why, and what helps
};

// Why peers could not map, or read directly, what `owners` publish for `keys`, or nothing when they can. Such
// memory is what a producer says it is (InitTables::producer_mappable), and export buffers: a producer that
// gathers copies tensors of up to export_pack_limit bytes there, a resident one copies nothing.
std::optional<MappingObstacle> why_not_reachable(const InitTables& tables,
                                                 const std::vector<std::uint32_t>& owners,
                                                 std::span<const ChunkKey> keys);

// The least run of bytes that lie together both where `name` (or its piece) is published as planned and in the
// parameter; 0 when the key cannot be read without a conversion, or as runs of one length. The key's bytes: it
// is contiguous on both sides.
std::uint64_t direct_run_bytes(const InitTables& tables, std::uint32_t name, std::uint32_t piece, DType wire_dtype,
                               const Slice& slice, const Destination& destination);

}  // namespace shardpull
