// Charging: every instant of a process's time goes to exactly one phase, the first by Phase's order of those
// under way. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "observe/span.h"

namespace shardpull {

// A time that is charged; `rest` takes the instants in which no span is under way.
struct Window {
  std::int64_t begin_ns = 0, end_ns = 0;
  Phase rest = Phase::kEngine;
  friend bool operator==(const Window&, const Window&) = default;
};

inline constexpr std::uint32_t kNoSpan = UINT32_MAX;

// A stretch charged to one phase.
struct Segment {
  std::int64_t begin_ns = 0, end_ns = 0;
  Phase phase = Phase::kEngine;
  std::uint32_t span = kNoSpan;  // of those of the phase that are under way, the one that began first
};

struct Charged {
  std::vector<PhaseTime> phases;  // by Phase; those that occur
  std::vector<Segment> segments;  // in order, without gaps within a window
};

// `windows` ascend and do not overlap. Phase::kServe is counted and never charged. The charged times add up
// to the windows' lengths exactly, whatever the spans are: those that end before they begin count as empty.
Charged charge(std::span<const Span> spans, std::span<const Window> windows);

struct Waited {
  std::uint32_t peer = kNoPeer;  // kNoPeer: for nobody
  std::uint64_t ns = 0;
};
// The peer that most of what `charged` gave to `phase` was spent on; of equals the lowest.
Waited most_waited(const Charged& charged, std::span<const Span> spans, Phase phase);

}  // namespace shardpull
