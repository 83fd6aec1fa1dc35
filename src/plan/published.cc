#include "plan/published.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "plan/boxes.h"

namespace shardpull {
namespace {

Status not_held(const TensorMeta& meta, std::uint32_t rank, const Box& box) {
  return Status(StatusCode::kInternal,
                fmt::format("the tables give trainer {} {} of '{}' {}, which it does not hold", rank,
                            to_string(box), meta.name, shape_text(meta.shape)),
                {.tensor = meta.name});
}

Box written_out(const Box& box, const std::vector<std::int64_t>& shape) {
  return box.whole() ? Box{.start = std::vector<std::int64_t>(shape.size(), 0), .size = shape} : box;
}

// `box` relative to `held`, in which it lies; nothing when it does not.
std::optional<Box> within(const Box& box, const Box& held) {
  if (box == held) return Box{};
  Box relative = box;
  for (std::size_t d = 0; d < box.start.size(); ++d) {
    relative.start[d] -= held.start[d];
    if (relative.start[d] < 0 || relative.start[d] > held.size[d] - box.size[d]) return std::nullopt;
  }
  return relative;
}

}  // namespace

Result<std::vector<PublishedPart>> published_parts(const InitTables& tables, std::uint32_t rank,
                                                   const std::vector<Piece>& pieces) {
  std::vector<std::vector<Box>> held(tables.metadata.size());
  for (const Piece& piece : pieces) {
    if (piece.name >= held.size()) {
      return Status(StatusCode::kInternal,
                    fmt::format("trainer {} holds a piece of name {}, the tables have {} names", rank,
                                piece.name, held.size()));
    }
    held[piece.name].push_back(written_out(piece.box, tables.metadata[piece.name].shape));
  }
  const Ownership& own = tables.ownership;
  const auto owns = [&](std::uint32_t owner_class) {
    return std::binary_search(own.owner_sets[owner_class].begin(), own.owner_sets[owner_class].end(), rank);
  };

  std::vector<PublishedPart> parts;
  const auto publish = [&](std::uint32_t name, std::uint32_t piece, const Box& box) -> Status {
    const TensorMeta& meta = tables.metadata[name];
    if (held[name].empty()) held[name].push_back(written_out(Box{}, meta.shape));
    for (std::uint32_t h = 0; h < held[name].size(); ++h) {
      if (auto relative = within(box, held[name][h])) {
        parts.push_back({.name = name, .piece = piece, .held = h, .within = std::move(*relative)});
        return {};
      }
    }
    return not_held(meta, rank, box);
  };
  std::uint32_t next = 0;  // walks the pieces along with the names
  for (std::uint32_t name = 0; name < tables.metadata.size(); ++name) {
    const std::int32_t owner_class = own.name_owner_class.empty() ? 0 : own.name_owner_class[name];
    if (owner_class >= 0) {
      if (own.owner_sets.empty() || owns(static_cast<std::uint32_t>(owner_class))) {
        SHARDPULL_RETURN_IF_ERROR(publish(name, 0, written_out(Box{}, tables.metadata[name].shape)));
      }
      continue;
    }
    for (; next < own.pieces.size() && own.pieces[next].name == name; ++next) {
      if (!owns(own.pieces[next].owner_class)) continue;
      SHARDPULL_RETURN_IF_ERROR(publish(name, next + 1, own.pieces[next].box));
    }
  }
  return parts;
}

}  // namespace shardpull
