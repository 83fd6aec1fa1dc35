#include "plan/boxes.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked.h"

namespace shardpull {

std::optional<std::int64_t> checked_numel(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  bool empty = false, overflow = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) empty = true;
    const auto product = checked_mul(numel, size == 0 ? 1 : size);
    overflow = overflow || !product;
    if (product) numel = *product;
  }
  if (overflow) return std::nullopt;  // also beside a dim of 0: strides of such a shape do not fit
  return empty ? 0 : numel;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::string to_string(const Box& box) {
  if (box.whole()) return "whole";
  std::string text = "[";
  for (std::size_t d = 0; d < box.start.size(); ++d) {
    const std::int64_t size = d < box.size.size() ? box.size[d] : 0;
    text += fmt::format("{}{}:{}", d == 0 ? "" : ", ", box.start[d],
                        checked_add(box.start[d], size).value_or(INT64_MAX));
  }
  return text + "]";
}

std::optional<std::string> box_problem(const Box& box, const std::vector<std::int64_t>& shape) {
  if (box.start.size() != box.size.size()) {
    return fmt::format("box has {} starts and {} sizes", box.start.size(), box.size.size());
  }
  if (box.whole()) return std::nullopt;
  if (box.start.size() != shape.size()) {
    return fmt::format("box {} has {} dims, the tensor's shape {} has {}", to_string(box), box.start.size(),
                       shape_text(shape), shape.size());
  }
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const auto end = checked_add(box.start[d], box.size[d]);
    if (box.start[d] < 0 || box.size[d] < 0 || !end || *end > shape[d]) {
      return fmt::format("box {} does not lie within shape {} in dim {}", to_string(box), shape_text(shape),
                         d);
    }
  }
  return std::nullopt;
}

bool box_empty(const Box& box) {
  return std::any_of(box.size.begin(), box.size.end(), [](std::int64_t size) { return size == 0; });
}

bool box_covers(const Box& box, const std::vector<std::int64_t>& shape) {
  return box.size == shape;
}

std::int64_t box_numel(const Box& box) {
  return std::accumulate(box.size.begin(), box.size.end(), std::int64_t{1}, std::multiplies<>());
}

std::optional<Box> box_intersection(const Box& a, const Box& b) {
  Box common{.start = a.start, .size = a.size};
  for (std::size_t d = 0; d < a.start.size(); ++d) {
    const std::int64_t start = std::max(a.start[d], b.start[d]);
    const std::int64_t end = std::min(a.start[d] + a.size[d], b.start[d] + b.size[d]);
    if (start >= end) return std::nullopt;
    common.start[d] = start;
    common.size[d] = end - start;
  }
  return common;
}

std::vector<Box> box_difference(const Box& a, const Box& hole) {
  std::vector<Box> parts;
  Box rest = a;
  for (std::size_t d = 0; d < a.start.size(); ++d) {
    const std::int64_t before = hole.start[d] - rest.start[d];
    const std::int64_t after = rest.start[d] + rest.size[d] - (hole.start[d] + hole.size[d]);
    if (before > 0) {
      parts.push_back(rest);
      parts.back().size[d] = before;
    }
    if (after > 0) {
      parts.push_back(rest);
      parts.back().start[d] = hole.start[d] + hole.size[d];
      parts.back().size[d] = after;
    }
    rest.start[d] = hole.start[d];
    rest.size[d] = hole.size[d];
  }
  return parts;
}

std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const std::vector<Box>& boxes) {
  std::vector<const Box*> pointers;
  for (const Box& box : boxes) pointers.push_back(&box);
  return find_overlap(pointers);
}

std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const std::vector<const Box*>& boxes) {
  if (boxes.size() < 2) return std::nullopt;
  // A sweep along the dim with the most distinct starts: shards of any mesh then meet few others at a time.
  std::size_t best = 0, most = 0;
  std::vector<std::int64_t> starts(boxes.size());
  for (std::size_t d = 0; d < boxes.front()->start.size(); ++d) {
    for (std::size_t i = 0; i < boxes.size(); ++i) starts[i] = boxes[i]->start[d];
    std::sort(starts.begin(), starts.end());
    const auto distinct =
        static_cast<std::size_t>(std::unique(starts.begin(), starts.end()) - starts.begin());
    if (distinct > most) {
      most = distinct;
      best = d;
    }
  }
  if (most == 0) return std::pair<std::size_t, std::size_t>{0, 1};  // 0-d: every box is the one element
  // Shards along one dim, as they mostly come: each ends where the next one begins, or before.
  bool apart = true;
  for (std::size_t i = 1; apart && i < boxes.size(); ++i)
    apart = boxes[i - 1]->start[best] + boxes[i - 1]->size[best] <= boxes[i]->start[best];
  if (apart) return std::nullopt;
  std::vector<std::size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(boxes[a]->start[best], a) < std::pair(boxes[b]->start[best], b);
  });
  std::vector<std::size_t> active;
  for (const std::size_t i : order) {
    std::erase_if(active, [&](std::size_t j) {
      return boxes[j]->start[best] + boxes[j]->size[best] <= boxes[i]->start[best];
    });
    for (const std::size_t j : active) {
      if (box_intersection(*boxes[i], *boxes[j])) return std::pair{std::min(i, j), std::max(i, j)};
    }
    active.push_back(i);
  }
  return std::nullopt;
}

}  // namespace shardpull
