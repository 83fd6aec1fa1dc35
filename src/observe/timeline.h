// Timeline: one process's sync, as it travels to the sender and into a trace.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock_offset.h"
#include "base/identity.h"
#include "observe/charge.h"
#include "observe/span.h"

namespace shardpull {

struct Timeline {
  std::vector<Window> windows;  // as charge() takes them
  std::vector<Span> spans;      // by begin
  std::uint64_t dropped = 0;    // spans that had no room
  friend bool operator==(const Timeline&, const Timeline&) = default;
};

// Spans that travel: the longest, where there are more. 2.3 MiB.
inline constexpr std::size_t kMaxTimelineSpans = 1u << 16;

Timeline make_timeline(std::vector<Window> windows, std::vector<Span> spans, std::uint64_t dropped);

// Canonical bytes. Decoding is total: DATA_LOSS for what encode_timeline never writes.
std::vector<std::byte> encode_timeline(const Timeline& timeline);
Result<Timeline> decode_timeline(std::span<const std::byte> bytes);

// A process's part of a fleet's sync. Times are its own.
struct ProcessTimeline {
  Member member;
  Timeline timeline;
  std::optional<ClockOffset> clock;  // to the sender's; nothing: not known, taken for the same
};

// One sync of a fleet, for a trace.
struct FleetTimeline {
  std::uint64_t sync_id = 0, version = 0;
  std::int64_t begin_ns = 0, end_ns = 0;  // of send_weights, on the sender's clock
  std::string summary;                    // summary_line(), or the error
  std::vector<ProcessTimeline> processes;
  std::vector<Member> missing;  // whose timelines have not come
};

// What workers waited for, found in what the ranks did meanwhile.
class Causes {
 public:
  // Borrows `fleet`.
  explicit Causes(const FleetTimeline& fleet);
  // "trainer 1: source, group 7"; empty for what is no waiting. `waiting` is of charge() of `worker`'s
  // timeline.
  std::string of(const ProcessTimeline& worker, const Segment& waiting) const;

 private:
  // What a rank does on one thread, by begin; `ends` are the latest so far.
  struct Track {
    std::vector<Span> spans;
    std::vector<std::int64_t> ends;
  };
  struct Rank {
    std::int64_t offset_ns = 0;
    std::array<Track, 2> tracks;  // of send_weights' thread, and of packs and sums
  };
  std::map<std::uint32_t, Rank> ranks_;
};

}  // namespace shardpull
