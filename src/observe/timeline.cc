#include "observe/timeline.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "base/encoder.h"
#include "base/status_macros.h"

namespace shardpull {
namespace {

constexpr std::uint8_t kFormat = 1;
constexpr std::uint64_t kWindowBytes = 17, kSpanBytes = 36;

bool known_phase(std::uint8_t value) {
  return value <= static_cast<std::uint8_t>(Phase::kEngine);
}

}  // namespace

Timeline make_timeline(std::vector<Window> windows, std::vector<Span> spans, std::uint64_t dropped) {
  if (spans.size() > kMaxTimelineSpans) {
    std::nth_element(
        spans.begin(), spans.begin() + kMaxTimelineSpans, spans.end(),
        [](const Span& a, const Span& b) { return a.end_ns - a.begin_ns > b.end_ns - b.begin_ns; });
    dropped += spans.size() - kMaxTimelineSpans;
    spans.resize(kMaxTimelineSpans);
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.begin_ns < b.begin_ns; });
  return {std::move(windows), std::move(spans), dropped};
}

std::vector<std::byte> encode_timeline(const Timeline& timeline) {
  ByteWriter out;
  out.reserve(32 + timeline.windows.size() * kWindowBytes + timeline.spans.size() * kSpanBytes);
  out.u8(kFormat);
  out.u64(timeline.dropped);
  out.u32(static_cast<std::uint32_t>(timeline.windows.size()));
  for (const Window& window : timeline.windows) {
    out.i64(window.begin_ns);
    out.i64(window.end_ns);
    out.u8(static_cast<std::uint8_t>(window.rest));
  }
  out.u32(static_cast<std::uint32_t>(timeline.spans.size()));
  for (const Span& span : timeline.spans) {
    out.u8(static_cast<std::uint8_t>(span.phase));
    out.u8(static_cast<std::uint8_t>(span.path));
    out.u16(span.run);
    out.u32(span.item);
    out.u32(span.peer);
    out.i64(span.begin_ns);
    out.i64(span.end_ns);
    out.u64(span.bytes);
  }
  return out.take();
}

Result<Timeline> decode_timeline(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "timeline");
  std::uint8_t format = 0;
  SHARDPULL_RETURN_IF_ERROR(in.u8(format));
  if (format != kFormat) return in.malformed("another format");
  Timeline timeline;
  SHARDPULL_RETURN_IF_ERROR(in.u64(timeline.dropped));
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(in.count(count, kMaxTimelineSpans, kWindowBytes));
  std::int64_t before_ns = INT64_MIN;
  for (std::uint32_t i = 0; i < count; ++i) {
    Window window;
    std::uint8_t rest = 0;
    SHARDPULL_RETURN_IF_ERROR(in.i64(window.begin_ns));
    SHARDPULL_RETURN_IF_ERROR(in.i64(window.end_ns));
    SHARDPULL_RETURN_IF_ERROR(in.u8(rest));
    if (!known_phase(rest) || window.begin_ns < before_ns || window.end_ns < window.begin_ns)
      return in.malformed("windows that do not ascend, or an unknown phase");
    window.rest = static_cast<Phase>(rest);
    before_ns = window.end_ns;
    timeline.windows.push_back(window);
  }
  SHARDPULL_RETURN_IF_ERROR(in.count(count, kMaxTimelineSpans, kSpanBytes));
  timeline.spans.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    Span span;
    std::uint8_t phase = 0, path = 0;
    SHARDPULL_RETURN_IF_ERROR(in.u8(phase));
    SHARDPULL_RETURN_IF_ERROR(in.u8(path));
    SHARDPULL_RETURN_IF_ERROR(in.u16(span.run));
    SHARDPULL_RETURN_IF_ERROR(in.u32(span.item));
    SHARDPULL_RETURN_IF_ERROR(in.u32(span.peer));
    SHARDPULL_RETURN_IF_ERROR(in.i64(span.begin_ns));
    SHARDPULL_RETURN_IF_ERROR(in.i64(span.end_ns));
    SHARDPULL_RETURN_IF_ERROR(in.u64(span.bytes));
    if (!known_phase(phase) || path > static_cast<std::uint8_t>(SpanPath::kDirect) ||
        span.end_ns < span.begin_ns)
      return in.malformed("an unknown phase or path, or a span that ends before it begins");
    span.phase = static_cast<Phase>(phase);
    span.path = static_cast<SpanPath>(path);
    timeline.spans.push_back(span);
  }
  SHARDPULL_RETURN_IF_ERROR(in.end());
  return timeline;
}

Causes::Causes(const FleetTimeline& fleet) {
  for (const ProcessTimeline& process : fleet.processes) {
    if (process.member.role != Role::kTrainer) continue;
    Rank& rank = ranks_[process.member.id];
    rank.offset_ns = process.clock.value_or(ClockOffset()).offset_ns;
    for (const Span& span : process.timeline.spans) {
      if (span.phase == Phase::kServe) continue;
      Track& track = rank.tracks[span.phase == Phase::kPack || span.phase == Phase::kSum ? 1 : 0];
      track.spans.push_back(span);
      track.ends.push_back(std::max(track.ends.empty() ? INT64_MIN : track.ends.back(), span.end_ns));
    }
  }
}

std::string Causes::of(const ProcessTimeline& worker, const Segment& waiting) const {
  switch (waiting.phase) {
    case Phase::kEventWait:
      return "receive slots and copies before it";
    case Phase::kSlotWait:
      return "chunks before it";
    case Phase::kSignalWait:
      return "trainers that confirm";
    case Phase::kProduceWait:
      break;
    default:
      return "";
  }
  if (waiting.span == kNoSpan || worker.timeline.spans[waiting.span].peer == kNoPeer) return "";
  const std::string trainer = to_string(Member{Role::kTrainer, worker.timeline.spans[waiting.span].peer});
  const auto rank = ranks_.find(worker.timeline.spans[waiting.span].peer);
  if (rank == ranks_.end()) return trainer + ": its timeline has not come";
  // From the worker's clock to the sender's, and on to the rank's.
  const std::int64_t shift = worker.clock.value_or(ClockOffset()).offset_ns - rank->second.offset_ns;
  const std::int64_t begin_ns = waiting.begin_ns + shift, end_ns = waiting.end_ns + shift;
  std::vector<Span> meanwhile;
  for (const Track& track : rank->second.tracks) {
    const auto first = std::upper_bound(track.ends.begin(), track.ends.end(), begin_ns) - track.ends.begin();
    for (auto i = static_cast<std::size_t>(first); i < track.spans.size() && track.spans[i].begin_ns < end_ns;
         ++i)
      meanwhile.push_back(track.spans[i]);
  }
  const std::array<Window, 1> window = {Window{begin_ns, end_ns, Phase::kEngine}};
  const Charged charged = charge(meanwhile, window);
  const auto most =
      std::max_element(charged.phases.begin(), charged.phases.end(),
                       [](const PhaseTime& a, const PhaseTime& b) { return a.charged_ns < b.charged_ns; });
  if (most == charged.phases.end() || most->phase == Phase::kEngine)
    return trainer + ": the way there and back";
  const Phase phase = most->phase;
  std::uint32_t item = kNoItem;  // of the longest stretch
  std::int64_t longest_ns = 0;
  for (const Segment& segment : charged.segments) {
    if (segment.phase != phase || segment.end_ns - segment.begin_ns <= longest_ns) continue;
    longest_ns = segment.end_ns - segment.begin_ns;
    item = meanwhile[segment.span].item;
  }
  const bool of_chunk = phase == Phase::kPack || phase == Phase::kSum;
  std::string text = fmt::format("{}: {}", trainer, to_string(phase));
  if (item != kNoItem) text += fmt::format(", {} {}", of_chunk ? "chunk" : "group", item);
  return text;
}

}  // namespace shardpull
