// Which bits of a parameter a set of windows touches: union, overlap and what is missing.
//
// A window is brought to a set form (dims sorted by stride, neighbours merged), from which it is expanded
// into runs of consecutive bits. Bits, because sub-byte dtypes count in them. Sets of few runs are sorted
// intervals; sets of very many (every second column of a large matrix) are bitmaps over the greatest common
// granule.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "shardpull/dtype.h"
#include "shardpull/slice.h"

namespace shardpull {

// Half-open, in bits.
struct BitRun {
  std::int64_t begin = 0, end = 0;
  friend bool operator==(const BitRun&, const BitRun&) = default;
};

// The bits of a strided window as a set: `run` bits at every combination of `dims` (strides in bits,
// descending), from `offset`. Empty when `run` is 0.
struct BitWindow {
  std::int64_t offset = 0;
  std::int64_t run = 0;
  std::vector<Dim> dims;
  bool self_overlapping = false;  // two of its elements share a bit

  bool empty() const { return run == 0; }
  std::int64_t size() const;  // bits, each counted once
  std::int64_t run_count() const;
  std::int64_t end() const;  // past the last bit
};

// Above this many runs in one question a bitmap is used instead of sorted intervals (16 MiB of them).
inline constexpr std::int64_t kMaxSortedRuns = std::int64_t{1} << 20;

// Elements from the first to past the last of a window, or nothing on overflow or a negative number.
std::optional<std::int64_t> extent_of(const std::vector<std::int64_t>& shape,
                                      const std::vector<std::int64_t>& stride);

// offset, shape and stride in elements of `dtype`. Strides are not negative.
BitWindow bit_window(DType dtype, std::int64_t offset, const std::vector<std::int64_t>& shape,
                     const std::vector<std::int64_t>& stride);

// Runs of the window in ascending order, neighbours joined. At most run_count() of them.
std::vector<BitRun> runs_of(const BitWindow& window);

// True when the two windows share a bit.
bool intersects(const BitWindow& a, const BitWindow& b);
// True when every bit of `inner` is a bit of `outer`.
bool contains(const BitWindow& outer, const BitWindow& inner);
// Bits of `a` that are not in `b`, as runs.
std::vector<BitRun> difference(const BitWindow& a, const BitWindow& b);

// True when no two of the windows share a bit.
bool disjoint(const std::vector<BitWindow>& windows);
// The first bits of `whole` that no window touches (as far as they go, or less); nothing when the union
// covers it.
std::optional<BitRun> first_gap(const BitWindow& whole, const std::vector<BitWindow>& windows);

}  // namespace shardpull
