// Boxes in a tensor's global shape: checks, intersection, difference. Pure values; nothing here knows ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// Elements of `shape`, or nothing when a dim is negative or the product does not fit.
std::optional<std::int64_t> checked_numel(const std::vector<std::int64_t>& shape);

// "[0:4, 2:8]"; "whole" for the whole tensor.
std::string to_string(const Box& box);
// "[64, 32]"
std::string shape_text(const std::vector<std::int64_t>& shape);

// What is wrong with `box` as a part of `shape` (another number of dims, a negative or overflowing bound,
// past the end), or nothing. Empty boxes are in order.
std::optional<std::string> box_problem(const Box& box, const std::vector<std::int64_t>& shape);

// The boxes below have as many dims as their tensor and lie within it (box_problem). `whole()` boxes have
// been written out.
bool box_empty(const Box& box);
bool box_covers(const Box& box, const std::vector<std::int64_t>& shape);
std::int64_t box_numel(const Box& box);
// The common part; nothing when it is empty.
std::optional<Box> box_intersection(const Box& a, const Box& b);
// `a` without `hole` (a part of it), as disjoint non-empty boxes.
std::vector<Box> box_difference(const Box& a, const Box& hole);
// Two boxes of `boxes` that overlap, by index, or nothing.
std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const std::vector<Box>& boxes);
std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const std::vector<const Box*>& boxes);

}  // namespace shardpull
