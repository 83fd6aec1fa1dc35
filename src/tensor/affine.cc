#include "tensor/affine.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace shardpull {

Layout::Layout(std::span<const Dim> dims, std::int64_t offset) : offset_(offset) {
  std::vector<Dim> merged;
  for (const Dim& dim : dims) {
    if (dim.size == 1) continue;
    if (!merged.empty() && merged.back().stride == dim.size * dim.stride) {
      merged.back() = {merged.back().size * dim.size, dim.stride};
    } else {
      merged.push_back(dim);
    }
  }
  weights_.resize(merged.size());
  strides_.resize(merged.size());
  std::int64_t weight = 1;
  for (std::size_t j = merged.size(); j-- > 0;) {
    weights_[j] = weight;
    strides_[j] = merged[j].stride;
    weight *= merged[j].size;
  }
}

std::int64_t Layout::delta(std::int64_t step) const {
  std::int64_t result = 0;
  for (std::size_t j = 0; j < weights_.size(); ++j) {
    result += step / weights_[j] * strides_[j];
    step %= weights_[j];
  }
  return result;
}

std::int64_t Layout::address(std::int64_t position) const {
  return offset_ + delta(position);
}

namespace {

__extension__ using Wide = unsigned __int128;
using Start = std::array<std::int64_t, kMaxLayouts>;

class Decomposition {
 public:
  Decomposition(std::span<const Layout> layouts, PieceOrder order, std::size_t max_pieces)
      : layouts_(layouts), order_(order), max_pieces_(max_pieces) {}

  bool run(std::span<const Loop> nest, const Start& start, std::vector<AffinePiece>& out) const {
    std::vector<Loop> loops;
    loops.reserve(nest.size());
    for (const Loop& loop : nest) {
      if (loop.size != 1) loops.push_back(loop);
    }
    const Break found = find_break(loops, start);
    if (!found.any) return emit(loops, start, out);
    if (found.weight == 0) return repeat(loops, start, out);
    return cut(loops, start, found, out);
  }

 private:
  // Where digits carry within the nest. weight == 0: only breaks that the outermost loop steps over by whole
  // multiples, so that all its iterations look alike.
  struct Break {
    bool any = false;
    std::size_t layout = 0;
    std::int64_t weight = 0;
  };

  // Sum over loops[from..] of the largest distance travelled within a cell of `weight` positions.
  static Wide extent(std::span<const Loop> loops, std::size_t layout, std::int64_t weight) {
    Wide sum = 0;
    for (const Loop& loop : loops) {
      sum += static_cast<Wide>(loop.size - 1) * static_cast<Wide>(loop.step[layout] % weight);
    }
    return sum;
  }

  Break find_break(std::span<const Loop> loops, const Start& start) const {
    Break found;
    for (std::size_t l = 0; l < layouts_.size(); ++l) {
      for (const std::int64_t weight : layouts_[l].weights()) {
        const Wide reach = static_cast<Wide>(start[l] % weight) + extent(loops, l, weight);
        if (reach < static_cast<Wide>(weight)) continue;
        found.any = true;
        if (loops.front().step[l] % weight != 0 && weight > found.weight) {
          found.layout = l;
          found.weight = weight;
        }
      }
    }
    return found;
  }

  bool emit(std::span<const Loop> loops, const Start& start, std::vector<AffinePiece>& out) const {
    if (out.size() >= max_pieces_) return false;
    AffinePiece& piece = out.emplace_back();
    for (std::size_t l = 0; l < layouts_.size(); ++l) piece.offset[l] = layouts_[l].address(start[l]);
    piece.loops.reserve(loops.size());
    for (const Loop& loop : loops) piece.loops.push_back(to_strides(loop));
    return true;
  }

  Loop to_strides(const Loop& loop) const {
    Loop result{.size = loop.size, .step = {}};
    for (std::size_t l = 0; l < layouts_.size(); ++l) result.step[l] = layouts_[l].delta(loop.step[l]);
    return result;
  }

  static Start advanced(const Start& start, const Loop& loop, std::int64_t iterations) {
    Start result = start;
    for (std::size_t l = 0; l < result.size(); ++l) result[l] += iterations * loop.step[l];
    return result;
  }

  // Every iteration of the outermost loop breaks in the same places: split the inside once.
  bool repeat(std::span<const Loop> loops, const Start& start, std::vector<AffinePiece>& out) const {
    std::vector<AffinePiece> inside;
    if (!run(loops.subspan(1), start, inside)) return false;
    const Loop outer = to_strides(loops.front());
    if (inside.size() == 1 || order_ == PieceOrder::kFree) {
      for (AffinePiece& piece : inside) {
        if (out.size() >= max_pieces_) return false;
        piece.loops.insert(piece.loops.begin(), outer);
        out.push_back(std::move(piece));
      }
      return true;
    }
    if (static_cast<Wide>(inside.size()) * static_cast<Wide>(outer.size) + out.size() > max_pieces_)
      return false;
    for (std::int64_t i = 0; i < outer.size; ++i) {
      for (const AffinePiece& piece : inside) {
        AffinePiece& copy = out.emplace_back(piece);
        for (std::size_t l = 0; l < layouts_.size(); ++l) copy.offset[l] += i * outer.step[l];
      }
    }
    return true;
  }

  // The outermost loop walks through cells of `weight` positions: cut it where it enters another cell, and
  // fold equal whole cells into one loop over cells.
  bool cut(std::span<const Loop> loops, const Start& start, const Break& found,
           std::vector<AffinePiece>& out) const {
    const Loop outer = loops.front();
    const std::span<const Loop> rest = loops.subspan(1);
    const std::int64_t weight = found.weight;
    const std::int64_t step = outer.step[found.layout] % weight;
    const Wide inner = extent(rest, found.layout, weight);
    // After `period` iterations the position within a cell is the same again.
    const std::int64_t period = weight / std::gcd(weight, step);
    std::vector<Loop> part(loops.begin(), loops.end());
    std::vector<Loop> folded;
    for (std::int64_t i = 0; i < outer.size;) {
      const Start here = advanced(start, outer, i);
      const std::int64_t within = here[found.layout] % weight;
      const std::int64_t left = outer.size - i;
      const bool crosses = static_cast<Wide>(within) + inner >= static_cast<Wide>(weight);
      std::int64_t alike = 1;  // iterations from here that stay in this cell
      if (!crosses)
        alike = std::min(left, (weight - 1 - static_cast<std::int64_t>(inner) - within) / step + 1);
      const bool whole_cell = !crosses && alike == period;
      if ((whole_cell || order_ == PieceOrder::kFree) && left / period >= 2) {
        const std::int64_t cells = left / period;
        folded.assign(1, Loop{.size = cells, .step = {}});
        for (std::size_t l = 0; l < layouts_.size(); ++l) folded[0].step[l] = outer.step[l] * period;
        folded.push_back(outer);
        folded[1].size = period;
        folded.insert(folded.end(), rest.begin(), rest.end());
        if (!run(folded, here, out)) return false;
        i += cells * period;
      } else if (crosses) {
        if (!run(rest, here, out)) return false;
        i += 1;
      } else {
        part[0].size = alike;
        if (!run(part, here, out)) return false;
        i += alike;
      }
    }
    return true;
  }

  std::span<const Layout> layouts_;
  PieceOrder order_;
  std::size_t max_pieces_;
};

}  // namespace

bool decompose(std::span<const Layout> layouts, std::span<const Loop> loops,
               std::span<const std::int64_t> start, PieceOrder order, std::size_t max_pieces,
               std::vector<AffinePiece>& out) {
  Start begin{};
  std::copy_n(start.begin(), std::min(start.size(), layouts.size()), begin.begin());
  return Decomposition(layouts, order, max_pieces).run(loops, begin, out);
}

}  // namespace shardpull
