#include "observe/charge.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <optional>

namespace shardpull {
namespace {

constexpr std::size_t kPhases = static_cast<std::size_t>(Phase::kEngine) + 1;

std::size_t index_of(Phase phase) {
  return static_cast<std::size_t>(phase);
}

// The spans of one phase that are under way, in order of their begin.
struct UnderWay {
  std::vector<std::uint32_t> opened;  // those before `first` have ended
  std::size_t first = 0;
  std::size_t count = 0;
};

class Sweep {
 public:
  Sweep(std::span<const Span> spans, std::span<const Window> windows)
      : spans_(spans), windows_(windows), ended_(spans.size(), false) {}

  Charged run() {
    // An end sorts before a begin at the same instant; neither takes time, so the order is of no consequence
    // but for spans that are empty, which are left out.
    std::vector<Edge> edges;
    edges.reserve(2 * spans_.size());
    for (std::uint32_t i = 0; i < spans_.size(); ++i) {
      const Span& span = spans_[i];
      if (std::any_of(windows_.begin(), windows_.end(), [&](const Window& window) {
            return span.begin_ns <= window.end_ns && span.end_ns >= window.begin_ns;
          })) {
        ++phases_[index_of(span.phase)].count;
      }
      if (span.end_ns <= span.begin_ns) continue;
      edges.push_back({span.begin_ns, true, i});
      edges.push_back({span.end_ns, false, i});
    }
    std::sort(edges.begin(), edges.end());
    auto edge = edges.begin();
    for (const Window& window : windows_) {
      std::int64_t now = window.begin_ns;
      for (; edge != edges.end() && edge->at_ns < window.end_ns; ++edge) {
        if (edge->at_ns > now) {
          advance(now, edge->at_ns, window.rest);
          now = edge->at_ns;
        }
        take(*edge);
      }
      if (now < window.end_ns) advance(now, window.end_ns, window.rest);
    }
    for (std::size_t p = 0; p < kPhases; ++p) {
      phases_[p].phase = static_cast<Phase>(p);
      if (phases_[p].count != 0 || phases_[p].charged_ns != 0) out_.phases.push_back(phases_[p]);
    }
    return std::move(out_);
  }

 private:
  struct Edge {
    std::int64_t at_ns;
    bool begins;
    std::uint32_t span;
    auto operator<=>(const Edge&) const = default;
  };

  void take(const Edge& edge) {
    UnderWay& phase = under_way_[index_of(spans_[edge.span].phase)];
    if (edge.begins) {
      phase.opened.push_back(edge.span);
      ++phase.count;
    } else {
      ended_[edge.span] = true;
      --phase.count;
      while (phase.first < phase.opened.size() && ended_[phase.opened[phase.first]]) ++phase.first;
    }
  }

  void advance(std::int64_t from, std::int64_t to, Phase rest) {
    const auto length = static_cast<std::uint64_t>(to - from);
    std::optional<std::size_t> charged;
    for (std::size_t p = 0; p < kPhases; ++p) {
      if (under_way_[p].count == 0) continue;
      phases_[p].active_ns += length;
      if (!charged && static_cast<Phase>(p) != Phase::kServe) charged = p;
    }
    Segment segment{from, to, rest, kNoSpan};
    if (charged) {
      const UnderWay& phase = under_way_[*charged];
      segment.phase = static_cast<Phase>(*charged);
      segment.span = phase.opened[phase.first];
    } else {
      phases_[index_of(rest)].active_ns += length;
    }
    phases_[index_of(segment.phase)].charged_ns += length;
    if (!out_.segments.empty()) {
      Segment& last = out_.segments.back();
      if (last.end_ns == from && last.phase == segment.phase && last.span == segment.span) {
        last.end_ns = to;
        return;
      }
    }
    out_.segments.push_back(segment);
  }

  const std::span<const Span> spans_;
  const std::span<const Window> windows_;
  std::vector<bool> ended_;
  std::array<UnderWay, kPhases> under_way_;
  std::array<PhaseTime, kPhases> phases_;
  Charged out_;
};

}  // namespace

Charged charge(std::span<const Span> spans, std::span<const Window> windows) {
  return Sweep(spans, windows).run();
}

Waited most_waited(const Charged& charged, std::span<const Span> spans, Phase phase) {
  std::map<std::uint32_t, std::uint64_t> by_peer;
  for (const Segment& segment : charged.segments) {
    if (segment.phase != phase || segment.span == kNoSpan || spans[segment.span].peer == kNoPeer) continue;
    by_peer[spans[segment.span].peer] += static_cast<std::uint64_t>(segment.end_ns - segment.begin_ns);
  }
  Waited most;
  for (const auto& [peer, ns] : by_peer) {
    if (ns > most.ns) most = {peer, ns};
  }
  return most;
}

}  // namespace shardpull
