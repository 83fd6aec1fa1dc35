// Spans: what a process did, or waited for, from when to when, in one sync.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "shardpull/fleet.h"

namespace shardpull {

// How the bytes of a transfer went.
enum class SpanPath : std::uint8_t { kNone, kPacked, kMapped, kDirect };
std::string_view to_string(SpanPath path);  // "packed"; kNone: ""

inline constexpr std::uint32_t kNoPeer = UINT32_MAX;
// No chunk or group in particular.
inline constexpr std::uint32_t kNoItem = UINT32_MAX;

struct Span {
  Phase phase = Phase::kEngine;
  SpanPath path = SpanPath::kNone;
  std::uint16_t run = 0;
  std::uint32_t item = kNoItem;  // of a worker, and of what a rank does for one: the chunk; else the group
  std::uint32_t peer = kNoPeer;  // of a worker: the trainer; of a rank: the worker
  std::int64_t begin_ns = 0;     // on the process's clock; begin <= end
  std::int64_t end_ns = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const Span&, const Span&) = default;
};

// The spans of one sync, as many as there is room for: memory is taken when a sync begins, none while bytes
// move. Confined to one thread.
class SpanLog {
 public:
  // Forgets everything; makes room for `room` spans, at most kMaxSpans.
  void reset(std::size_t room);
  void add(const Span& span) {
    if (spans_.size() < room_) {
      spans_.push_back(span);
    } else {
      ++dropped_;
    }
  }
  const std::vector<Span>& spans() const { return spans_; }
  std::uint64_t dropped() const { return dropped_; }

  // 36 MiB. A worker has about seven spans a chunk.
  static constexpr std::size_t kMaxSpans = 1u << 20;

 private:
  std::vector<Span> spans_;
  std::size_t room_ = 0;
  std::uint64_t dropped_ = 0;
};

}  // namespace shardpull
