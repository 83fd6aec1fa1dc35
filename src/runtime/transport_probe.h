// Whether a transport works on this host, and how fast it is: bytes of one side's memory read by another
// side, as fleets read them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "shardpull/fleet.h"
#include "shardpull/status.h"
#include "transport/transport.h"

namespace shardpull {

struct TransferRate {
  std::uint64_t bytes = 0;
  std::int64_t ns = 0;
};

struct ProbeOptions {
  std::uint64_t buffer_bytes = 64u << 20;   // on each side; less, and it is the caches that are measured
  std::int64_t budget_ns = 150'000'000;     // for so long reads begin; at least one of the whole buffer
  std::int64_t timeout_ns = 5'000'000'000;  // for meeting, and again for the reads
};

// Reads the owner's buffer into the reader's over and over, a few MiB at a time, some at once, and compares
// every byte. The owner runs on a thread of its own, which is joined. DATA_LOSS when a byte differs,
// DEADLINE_EXCEEDED when nothing came in time; else the transport's own error.
Result<TransferRate> probe_transport(std::unique_ptr<Transport> owner, std::unique_ptr<Transport> reader,
                                     const ProbeOptions& options);

// The same between two transports of this kind, made as a fleet's are. Those of one host meet in `directory`,
// which is owner-only and has no fleet in it; those between hosts on this host's loopback interface.
Result<TransferRate> probe_transport(TransportKind kind, const std::string& directory,
                                     const ProbeOptions& options);

// What plain memcpy does with buffers of the same size, on one thread.
TransferRate probe_memcpy(const ProbeOptions& options);

}  // namespace shardpull
