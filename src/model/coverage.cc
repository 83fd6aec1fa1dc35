#include "model/coverage.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/checked.h"

namespace shardpull {
namespace {

template <typename Visit>  // visit(begin, end) in no particular order
void for_each_run(const BitWindow& window, const Visit& visit) {
  if (window.empty()) return;
  std::vector<std::int64_t> index(window.dims.size(), 0);
  std::int64_t at = window.offset;
  for (;;) {
    visit(at, at + window.run);
    std::size_t d = window.dims.size();
    for (; d > 0; --d) {
      const Dim& dim = window.dims[d - 1];
      at += dim.stride;
      if (++index[d - 1] < dim.size) break;
      at -= dim.stride * dim.size;
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

// Sorts and joins runs.
void normalise_runs(std::vector<BitRun>& runs) {
  std::sort(runs.begin(), runs.end(), [](const BitRun& a, const BitRun& b) { return a.begin < b.begin; });
  std::size_t kept = 0;
  for (const BitRun& run : runs) {
    if (kept > 0 && run.begin <= runs[kept - 1].end) {
      runs[kept - 1].end = std::max(runs[kept - 1].end, run.end);
    } else {
      runs[kept++] = run;
    }
  }
  runs.resize(kept);
}

std::int64_t total_runs(const std::vector<BitWindow>& windows) {
  std::int64_t total = 0;
  for (const BitWindow& window : windows) total += window.run_count();
  return total;
}

// One bit per granule over the span of the windows it was built for.
class GranuleMap {
 public:
  explicit GranuleMap(const std::vector<BitWindow>& windows) {
    begin_ = std::numeric_limits<std::int64_t>::max();
    std::int64_t end = std::numeric_limits<std::int64_t>::min();
    for (const BitWindow& window : windows) {
      if (window.empty()) continue;
      begin_ = std::min(begin_, window.offset);
      end = std::max(end, window.end());
    }
    if (end <= begin_) return;
    for (const BitWindow& window : windows) {
      if (window.empty()) continue;
      granule_ = std::gcd(granule_, window.offset - begin_);
      granule_ = std::gcd(granule_, window.run);
      for (const Dim& dim : window.dims) granule_ = std::gcd(granule_, dim.stride);
    }
    bits_.resize(static_cast<std::size_t>((end - begin_) / granule_), false);
  }

  // Marks the window; false when one of its granules was marked before.
  bool mark(const BitWindow& window) {
    bool fresh = true;
    for_each_run(window, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = index(begin); i < index(end); ++i) {
        if (bits_[i]) fresh = false;
        bits_[i] = true;
      }
    });
    return fresh;
  }

  // The lowest granule of the window that is not marked.
  std::optional<BitRun> first_unmarked(const BitWindow& window) const {
    std::optional<BitRun> first;
    for_each_run(window, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = index(begin); i < index(end); ++i) {
        if (bits_[i]) continue;
        const std::int64_t at = begin_ + static_cast<std::int64_t>(i) * granule_;
        if (!first || at < first->begin) first = BitRun{at, at + granule_};
        return;
      }
    });
    return first;
  }

  // Runs of the window that are not marked, joined.
  std::vector<BitRun> unmarked(const BitWindow& window) const {
    std::vector<BitRun> out;
    for_each_run(window, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = index(begin); i < index(end); ++i) {
        if (bits_[i]) continue;
        const std::int64_t at = begin_ + static_cast<std::int64_t>(i) * granule_;
        if (!out.empty() && out.back().end == at) {
          out.back().end = at + granule_;
        } else {
          out.push_back({at, at + granule_});
        }
      }
    });
    normalise_runs(out);
    return out;
  }

 private:
  std::size_t index(std::int64_t bit) const { return static_cast<std::size_t>((bit - begin_) / granule_); }

  std::int64_t begin_ = 0;
  std::int64_t granule_ = 0;
  std::vector<bool> bits_;
};

bool spans_touch(const BitWindow& a, const BitWindow& b) {
  return !a.empty() && !b.empty() && a.offset < b.end() && b.offset < a.end();
}

bool windows_disjoint_by_runs(const std::vector<BitWindow>& windows) {
  std::vector<BitRun> runs;
  runs.reserve(static_cast<std::size_t>(total_runs(windows)));
  for (const BitWindow& window : windows) {
    for_each_run(window, [&](std::int64_t begin, std::int64_t end) { runs.push_back({begin, end}); });
  }
  std::sort(runs.begin(), runs.end(), [](const BitRun& a, const BitRun& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].begin < runs[i - 1].end) return false;
  }
  return true;
}

bool windows_disjoint_by_bitmap(const std::vector<BitWindow>& windows) {
  GranuleMap map(windows);
  bool fresh = true;
  for (const BitWindow& window : windows) fresh = map.mark(window) && fresh;
  return fresh;
}

}  // namespace

std::optional<std::int64_t> extent_of(const std::vector<std::int64_t>& shape,
                                      const std::vector<std::int64_t>& stride) {
  std::int64_t extent = 1;
  bool empty = false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] < 0 || stride[d] < 0) return std::nullopt;
    if (shape[d] == 0) {
      empty = true;
      continue;
    }
    const auto span = checked_mul<std::int64_t>(shape[d] - 1, stride[d]);
    if (!span) return std::nullopt;
    const auto sum = checked_add<std::int64_t>(extent, *span);
    if (!sum) return std::nullopt;
    extent = *sum;
  }
  return empty ? 0 : extent;
}

std::int64_t BitWindow::run_count() const {
  if (empty()) return 0;
  std::int64_t count = 1;
  for (const Dim& dim : dims) count *= dim.size;
  return count;
}

std::int64_t BitWindow::size() const {
  return run_count() * run;
}

std::int64_t BitWindow::end() const {
  if (empty()) return offset;
  std::int64_t last = offset + run;
  for (const Dim& dim : dims) last += (dim.size - 1) * dim.stride;
  return last;
}

BitWindow bit_window(DType dtype, std::int64_t offset, const std::vector<std::int64_t>& shape,
                     const std::vector<std::int64_t>& stride) {
  const std::int64_t bits = dtype_bits(dtype);
  BitWindow window;
  window.offset = offset * bits;
  window.run = bits;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) {
      window.run = 0;
      window.dims.clear();
      return window;
    }
    if (shape[d] > 1) window.dims.push_back({shape[d], stride[d] * bits});
  }
  std::stable_sort(window.dims.begin(), window.dims.end(),
                   [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  // Innermost first: a dim that continues the run lengthens it; one that continues its inner neighbour joins
  // it.
  std::vector<Dim> merged;  // innermost first
  bool certain = true;      // no two elements can share a bit as far as strides tell
  std::int64_t reach = window.run;
  for (auto dim = window.dims.rbegin(); dim != window.dims.rend(); ++dim) {
    if (dim->stride < reach) certain = false;
    reach += (dim->size - 1) * dim->stride;
    if (merged.empty() && dim->stride == window.run) {
      window.run *= dim->size;
    } else if (!merged.empty() && dim->stride == merged.back().stride * merged.back().size) {
      merged.back().size *= dim->size;
    } else {
      merged.push_back(*dim);
    }
  }
  window.dims.assign(merged.rbegin(), merged.rend());
  if (!certain) {
    window.self_overlapping = window.run_count() > kMaxSortedRuns ? !windows_disjoint_by_bitmap({window})
                                                                  : !windows_disjoint_by_runs({window});
  }
  return window;
}

std::vector<BitRun> runs_of(const BitWindow& window) {
  std::vector<BitRun> runs;
  runs.reserve(static_cast<std::size_t>(window.run_count()));
  for_each_run(window, [&](std::int64_t begin, std::int64_t end) { runs.push_back({begin, end}); });
  normalise_runs(runs);
  return runs;
}

bool intersects(const BitWindow& a, const BitWindow& b) {
  return spans_touch(a, b) && !disjoint({a, b});
}

bool contains(const BitWindow& outer, const BitWindow& inner) {
  return !first_gap(inner, {outer});
}

std::vector<BitRun> difference(const BitWindow& a, const BitWindow& b) {
  if (a.empty()) return {};
  if (!spans_touch(a, b)) return runs_of(a);
  if (a.run_count() + b.run_count() > kMaxSortedRuns) {
    GranuleMap map({a, b});
    map.mark(b);
    return map.unmarked(a);
  }
  const std::vector<BitRun> from = runs_of(a);
  const std::vector<BitRun> minus = runs_of(b);
  std::vector<BitRun> out;
  std::size_t j = 0;
  for (const BitRun& run : from) {
    std::int64_t at = run.begin;
    while (j < minus.size() && minus[j].end <= at) ++j;
    for (std::size_t k = j; k < minus.size() && minus[k].begin < run.end; ++k) {
      if (minus[k].begin > at) out.push_back({at, minus[k].begin});
      at = std::max(at, minus[k].end);
    }
    if (at < run.end) out.push_back({at, run.end});
  }
  return out;
}

bool disjoint(const std::vector<BitWindow>& windows) {
  std::vector<const BitWindow*> order;
  for (const BitWindow& window : windows) {
    if (!window.empty()) order.push_back(&window);
  }
  if (order.size() < 2) return true;
  // Windows that follow one another need no look inside.
  std::sort(order.begin(), order.end(),
            [](const BitWindow* a, const BitWindow* b) { return a->offset < b->offset; });
  bool apart = true;
  for (std::size_t i = 1; i < order.size() && apart; ++i) apart = order[i - 1]->end() <= order[i]->offset;
  if (apart) return true;
  return total_runs(windows) > kMaxSortedRuns ? windows_disjoint_by_bitmap(windows)
                                              : windows_disjoint_by_runs(windows);
}

std::optional<BitRun> first_gap(const BitWindow& whole, const std::vector<BitWindow>& windows) {
  if (whole.empty()) return std::nullopt;
  if (whole.run_count() + total_runs(windows) > kMaxSortedRuns) {
    std::vector<BitWindow> all = windows;
    all.push_back(whole);
    GranuleMap map(all);
    for (const BitWindow& window : windows) map.mark(window);
    return map.first_unmarked(whole);
  }
  std::vector<BitRun> covered;
  for (const BitWindow& window : windows) {
    for_each_run(window, [&](std::int64_t begin, std::int64_t end) { covered.push_back({begin, end}); });
  }
  normalise_runs(covered);
  std::size_t j = 0;
  for (const BitRun& run : runs_of(whole)) {
    std::int64_t at = run.begin;
    while (at < run.end) {
      while (j < covered.size() && covered[j].end <= at) ++j;
      if (j == covered.size() || covered[j].begin > at) {
        return BitRun{at, j == covered.size() ? run.end : std::min(run.end, covered[j].begin)};
      }
      at = covered[j].end;
    }
  }
  return std::nullopt;
}

}  // namespace shardpull
