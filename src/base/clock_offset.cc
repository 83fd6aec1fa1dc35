#include "base/clock_offset.h"

#include <algorithm>

#include "base/checked.h"

namespace shardpull {
namespace {

// Quartz is within 50 parts per million, on either side.
constexpr std::int64_t kDriftPerMillion = 100;

}  // namespace

std::int64_t ClockComparison::error_at(const Best& best, std::int64_t now_ns) {
  return best.error_ns + std::max<std::int64_t>(now_ns - best.at_ns, 0) / 1'000'000 * kDriftPerMillion;
}

void ClockComparison::add(std::int64_t sent_ns, std::int64_t there_received_ns, std::int64_t there_sent_ns,
                          std::int64_t received_ns) {
  const auto here = checked_sub(received_ns, sent_ns), there = checked_sub(there_sent_ns, there_received_ns);
  const auto out = checked_sub(sent_ns, there_received_ns), back = checked_sub(received_ns, there_sent_ns);
  if (!here || !there || !out || !back || *there < 0 || *here < *there) return;
  // The offset is at least `out` and at most `back`, as nothing comes before it was sent.
  Best one;
  one.error_ns = (*back - *out + 1) / 2;
  one.offset_ns = *out + (*back - *out) / 2;
  one.at_ns = received_ns;
  if (!best_ || one.error_ns <= error_at(*best_, received_ns)) best_ = one;
}

std::optional<ClockOffset> ClockComparison::at(std::int64_t now_ns) const {
  if (!best_) return std::nullopt;
  return ClockOffset{best_->offset_ns, error_at(*best_, now_ns)};
}

}  // namespace shardpull
