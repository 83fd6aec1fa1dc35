// Words shared by the protocol's machines.
//
// A machine holds all state and takes all decisions of its side of the protocol. It has no threads, sockets,
// clocks or memory of its own: a driver (src/runtime) or the simulator (src/sim) calls its event methods and
// then performs the actions it appended to the list given, in order. Every method that depends on time takes
// `now_ns`. Machines are Confined: one thread at a time. A machine never trusts a peer: an event that does
// not fit its state is answered with an error action or dropped and counted, never asserted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/memory_ref.h"
#include "plan/plan.h"
#include "shardpull/status.h"

namespace shardpull {

// One pull: sync, worker, chunk, the chunk's run, the try, and the place in its lane.
struct PullId {
  std::uint64_t sync_id = 0;
  std::uint32_t consumer = 0;
  std::uint32_t chunk = 0;
  std::uint16_t run = 0;
  std::uint16_t attempt = 0;  // 0, and one more for every time the run is asked for again
  std::uint32_t seq = 0;
  LaneKind lane = LaneKind::kRegular;
  friend bool operator==(const PullId&, const PullId&) = default;
};

// Where a published tensor (or piece) is. `stride` empty = contiguous row-major, else per dim in elements.
struct Location {
  RemoteRef where;
  std::vector<std::int64_t> stride;
};

// One name (or piece) of a published group.
struct PublishedView {
  std::uint32_t name = 0;
  std::uint32_t piece = 0;  // as ChunkKey::piece
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  Location location;
};

// What a producer answers to a pull.
struct ReadyInfo {
  Path path = Path::kPacked;
  std::uint32_t sharing_group = 0, slot = 0;  // packed: which serve slot of the lane's ring
  std::uint64_t bytes = 0;                    // packed: bytes in the slot
  std::vector<Location> entries;  // mapped: one per distinct (name, piece) of the run, in order of first use.
                                  // packed: filled in by the driver (one entry: the slot)
  std::vector<std::uint64_t> sums;  // one per key of the run where its path is summed, else empty
};

// Counters of things that are dropped on purpose; shown in reports.
struct DropCounters {
  std::uint64_t stale_sync = 0;  // messages of an earlier sync
  std::uint64_t stale_incarnation = 0;
  std::uint64_t duplicate_signals = 0;
  std::uint64_t not_live = 0;    // from a consumer outside the live set
  std::uint64_t unknown = 0;     // a group that is not of this sync here, a reply that answers nothing
  std::uint64_t kept_early = 0;  // kept for a sync not begun here yet (not a drop)
};

}  // namespace shardpull
