// Splits a loop nest over linear positions into pieces on which every address is affine.
//
// A strided layout (sizes s, strides t) maps a linear, row-major position x to an address: write x in the mixed radix s and
// take the dot product of the digits with t. Over a loop nest `x = start + i0*step0 + i1*step1 + ...` that address is affine
// in the loop indices exactly as long as no digit carries into the next one. Everything the tensor layer needs is this one
// question: a reshape that is not a view (positions of a copy, through the strides of what was copied), a slice over a
// published tensor with strides, and a copy between two strided regions (two layouts at once, in lockstep).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shardpull/slice.h"

namespace shardpull {

// Two layouts at most are walked in lockstep.
inline constexpr int kMaxLayouts = 2;

// A mixed-radix address function. Dims of size 1 are gone and neighbours merged, so that every carry is a real break.
class Layout {
 public:
  // Sizes > 0; strides of any sign. Outermost first.
  explicit Layout(std::span<const Dim> dims, std::int64_t offset = 0);

  // The address of position x >= 0. The outermost digit is unbounded: bounds are the caller's business.
  std::int64_t address(std::int64_t position) const;
  // Address difference of a step that causes no carry.
  std::int64_t delta(std::int64_t step) const;

  // The distances between carries, outermost (largest) first: a digit carries into the next one, and the address function
  // breaks, at the multiples of these positions only. Each divides the one before it.
  std::span<const std::int64_t> weights() const { return {weights_.data(), weights_.empty() ? 0 : weights_.size() - 1}; }

 private:
  std::vector<std::int64_t> weights_;  // per digit: positions per step; the last is 1
  std::vector<std::int64_t> strides_;  // per digit: addresses per step
  std::int64_t offset_;
};

// One loop: `size` iterations, each moving layout l's position by step[l].
struct Loop {
  std::int64_t size = 0;
  std::int64_t step[kMaxLayouts] = {};
};

// A loop nest on which all addresses are affine: strides instead of position steps.
struct AffinePiece {
  std::int64_t offset[kMaxLayouts] = {};
  std::vector<Loop> loops;  // step = address stride; sizes > 1
};

// Whether pieces must enumerate the nest's iterations in its own order (a slice), or may regroup them (a copy, where only
// the set of pairs matters). Regrouping keeps the number of pieces small.
enum class PieceOrder { kKeep, kFree };

// Splits the nest `loops` (outermost first, sizes >= 1, steps >= 0) starting at `start` (per layout) into pieces, appended to
// `out`. False when more than `max_pieces` pieces would be in `out`; `out` is then unspecified.
bool decompose(std::span<const Layout> layouts, std::span<const Loop> loops, std::span<const std::int64_t> start,
               PieceOrder order, std::size_t max_pieces, std::vector<AffinePiece>& out);

}  // namespace shardpull
