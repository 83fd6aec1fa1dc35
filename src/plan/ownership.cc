// Who holds what: transposing the ranks' declarations, and the rules of the init payload.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked.h"
#include "base/limits.h"
#include "base/status_macros.h"
#include "plan/boxes.h"
#include "plan/plan.h"
#include "plan/plan_errors.h"

namespace shardpull {
namespace {

using Ranks = std::vector<std::uint32_t>;  // ascending, distinct

// "3 names ('a', 'b', ...)" style lists stop after this many.
constexpr std::size_t kShown = 8;

std::string ranks_text(const Ranks& ranks) {
  const std::size_t shown = std::min(ranks.size(), kShown);
  std::string text =
      fmt::format("{}", fmt::join(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(shown), ", "));
  if (shown < ranks.size()) text += fmt::format(", ... ({} ranks)", ranks.size());
  return text;
}

bool bit(const std::vector<std::uint8_t>& bits, std::size_t i) {
  return (bits[i / 8] >> (i % 8) & 1) != 0;
}

// Numbers distinct owner sets by first appearance.
class OwnerSets {
 public:
  std::uint32_t number_of(const Ranks& ranks) {
    if (last_ && sets_[*last_] == ranks) return *last_;
    const auto [place, fresh] = numbers_.try_emplace(ranks, static_cast<std::uint32_t>(sets_.size()));
    if (fresh) sets_.push_back(ranks);
    last_ = place->second;
    return place->second;
  }
  std::vector<Ranks> take() { return std::move(sets_); }

 private:
  std::vector<Ranks> sets_;
  std::map<Ranks, std::uint32_t> numbers_;
  std::optional<std::uint32_t> last_;  // neighbouring names mostly share their owners
};

struct HeldBox {
  Box box;
  Ranks ranks;
};

Ranks merged(const Ranks& a, const Ranks& b) {
  Ranks out;
  std::set_union(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(out));
  return out;
}

// What is wrong with `box` as a piece of `meta`, or nothing.
std::optional<std::string> piece_problem(const TensorMeta& meta, const Box& box) {
  if (auto problem = box_problem(box, meta.shape)) return problem;
  if (box.whole()) return std::nullopt;
  const std::int64_t bits = dtype_bits(meta.dtype);
  if (box.start.back() % 2 * bits % 8 == 0 && box.size.back() % 2 * bits % 8 == 0) return std::nullopt;
  return fmt::format("box {} of {} does not begin and end on whole bytes", to_string(box),
                     dtype_name(meta.dtype));
}

// Joins equal boxes, ascending by start and size.
std::vector<HeldBox> distinct_boxes(std::vector<HeldBox> held) {
  std::stable_sort(held.begin(), held.end(), [](const HeldBox& a, const HeldBox& b) {
    return std::tie(a.box.start, a.box.size) < std::tie(b.box.start, b.box.size);
  });
  std::vector<HeldBox> out;
  for (HeldBox& item : held) {
    if (out.empty() || out.back().box != item.box) {
      out.push_back(std::move(item));
    } else if (out.back().ranks.back() < item.ranks.front()) {  // the usual order
      out.back().ranks.insert(out.back().ranks.end(), item.ranks.begin(), item.ranks.end());
    } else {
      out.back().ranks = merged(out.back().ranks, item.ranks);
    }
  }
  return out;
}

// Cuts overlapping boxes, so that all are disjoint and each is held by everybody who holds any box around it.
// `held` is in canonical order (distinct boxes, ascending), the result too.
std::vector<HeldBox> disjoint_boxes(std::vector<HeldBox> held) {
  std::vector<const Box*> boxes;
  for (const HeldBox& item : held) boxes.push_back(&item.box);
  if (!find_overlap(boxes)) return held;
  std::vector<HeldBox> out;
  for (const HeldBox& item : held) {
    std::vector<Box> rest{item.box};  // what of the new box no earlier one holds
    std::vector<HeldBox> next;
    for (HeldBox& old : out) {
      const auto common = box_intersection(old.box, item.box);
      if (!common) {
        next.push_back(std::move(old));
        continue;
      }
      for (Box& part : box_difference(old.box, *common)) next.push_back({std::move(part), old.ranks});
      next.push_back({*common, merged(old.ranks, item.ranks)});
      std::vector<Box> kept;
      for (const Box& part : rest) {
        if (const auto hole = box_intersection(part, *common)) {
          for (Box& piece : box_difference(part, *hole)) kept.push_back(std::move(piece));
        } else {
          kept.push_back(part);
        }
      }
      rest = std::move(kept);
    }
    for (Box& part : rest) next.push_back({std::move(part), item.ranks});
    out = std::move(next);
  }
  std::sort(out.begin(), out.end(),
            [](const HeldBox& a, const HeldBox& b) { return a.box.start < b.box.start; });
  return out;
}

// A part of `shape` outside all of `held` (disjoint boxes), or nothing when they tile it.
std::optional<Box> uncovered(const std::vector<HeldBox>& held, const std::vector<std::int64_t>& shape) {
  std::int64_t covered = 0;
  for (const HeldBox& item : held) covered += box_numel(item.box);
  const Box all{.start = std::vector<std::int64_t>(shape.size(), 0), .size = shape};
  if (covered == box_numel(all)) return std::nullopt;
  std::vector<Box> rest{all};
  for (const HeldBox& item : held) {
    std::vector<Box> next;
    for (const Box& part : rest) {
      if (const auto hole = box_intersection(part, item.box)) {
        for (Box& piece : box_difference(part, *hole)) next.push_back(std::move(piece));
      } else {
        next.push_back(part);
      }
    }
    rest = std::move(next);
  }
  return rest.empty() ? std::nullopt : std::optional(rest.front());
}

Status check_metadata(const std::vector<TensorMeta>& metadata) {
  if (metadata.empty()) return plan_error("metadata: no names");
  if (metadata.size() > kMaxTensors) {
    return plan_limit_error(
        fmt::format("metadata: {} names, at most {} allowed", metadata.size(), kMaxTensors));
  }
  std::unordered_set<std::string_view> names;
  names.reserve(metadata.size());
  for (std::size_t i = 0; i < metadata.size(); ++i) {
    const TensorMeta& meta = metadata[i];
    const auto wrong = [&](std::string_view problem) {
      return plan_error(fmt::format("metadata[{}] '{}': {}", i, meta.name, problem), meta.name);
    };
    if (meta.name.size() > kMaxNameBytes) {
      return plan_limit_error(fmt::format("metadata[{}]: name of {} bytes, at most {} allowed", i,
                                          meta.name.size(), kMaxNameBytes));
    }
    if (!names.insert(meta.name).second) return wrong("a second tensor of this name");
    if (!dtype_valid(static_cast<std::uint8_t>(meta.dtype))) {
      return wrong(fmt::format("unknown dtype number {}", static_cast<int>(meta.dtype)));
    }
    if (meta.shape.size() > static_cast<std::size_t>(kMaxDims)) {
      return wrong(fmt::format("{} dims, at most {} allowed", meta.shape.size(), kMaxDims));
    }
    const auto numel = checked_numel(meta.shape);
    if (!numel) return wrong(fmt::format("shape {} is negative or too large", shape_text(meta.shape)));
    if (const auto bytes = bytes_of(meta.dtype, *numel); !bytes.ok()) {
      return bytes.status().with_context(
          fmt::format("metadata[{}] '{}' {}", i, meta.name, shape_text(meta.shape)));
    }
  }
  return {};
}

Status check_ownership(const InitTables& tables) {
  const Ownership& own = tables.ownership;
  const auto producers = static_cast<std::uint32_t>(tables.producers.size());
  if (own.owner_sets.empty() && own.name_owner_class.empty() && own.pieces.empty()) return {};
  if (own.name_owner_class.size() != tables.metadata.size()) {
    return plan_error(
        fmt::format("name_owner_class: {} entries for {} names; every name needs an owner class, or none",
                    own.name_owner_class.size(), tables.metadata.size()));
  }
  if (own.owner_sets.size() > kMaxOwnerSets) {
    return plan_limit_error(
        fmt::format("owner_sets: {} sets, at most {} allowed", own.owner_sets.size(), kMaxOwnerSets));
  }
  for (std::size_t i = 0; i < own.owner_sets.size(); ++i) {
    const Ranks& ranks = own.owner_sets[i];
    if (ranks.empty()) return plan_error(fmt::format("owner_sets[{}] is empty", i));
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r] >= producers) {
        return plan_error(
            fmt::format("owner_sets[{}]: rank {} is no producer: there are {}", i, ranks[r], producers));
      }
      if (r > 0 && ranks[r] <= ranks[r - 1])
        return plan_error(fmt::format("owner_sets[{}] is not ascending: {}", i, ranks_text(ranks)));
    }
  }
  if (own.pieces.size() > kMaxPieces) {
    return plan_limit_error(fmt::format("pieces: {}, at most {} allowed", own.pieces.size(), kMaxPieces));
  }
  const auto classes = static_cast<std::int64_t>(own.owner_sets.size());
  std::size_t at = 0;  // walks pieces along with the names
  std::vector<const Box*> boxes;
  for (std::uint32_t name = 0; name < tables.metadata.size(); ++name) {
    const TensorMeta& meta = tables.metadata[name];
    const std::int64_t owner_class = own.name_owner_class[name];
    if (owner_class < -1 || owner_class >= classes) {
      return plan_error(fmt::format("name_owner_class[{}] of '{}' is {}: there are {} owner sets", name,
                                    meta.name, owner_class, classes),
                        meta.name);
    }
    if (owner_class >= 0) continue;
    boxes.clear();
    std::int64_t covered = 0;
    for (; at < own.pieces.size() && own.pieces[at].name == name; ++at) {
      const OwnedPiece& piece = own.pieces[at];
      const auto wrong = [&](std::string_view problem) {
        return plan_error(fmt::format("pieces[{}] of '{}': {}", at, meta.name, problem), meta.name);
      };
      if (const auto problem = piece_problem(meta, piece.box)) return wrong(*problem);
      if (piece.box.whole() || box_empty(piece.box)) return wrong("a piece is a written-out, non-empty box");
      if (piece.owner_class >= own.owner_sets.size()) {
        return wrong(
            fmt::format("owner class {}: there are {} owner sets", piece.owner_class, own.owner_sets.size()));
      }
      if (!boxes.empty() && !(boxes.back()->start < piece.box.start))
        return wrong("pieces do not ascend by start");
      const auto sum = checked_add(covered, box_numel(piece.box));
      if (!sum) return wrong("pieces overlap");
      covered = *sum;
      boxes.push_back(&piece.box);
    }
    if (boxes.empty()) {
      return plan_error(fmt::format("'{}' has neither an owner class nor pieces: nobody holds it", meta.name),
                        meta.name);
    }
    if (const auto overlap = find_overlap(boxes)) {
      return plan_error(fmt::format("pieces {} and {} of '{}' overlap", to_string(*boxes[overlap->first]),
                                    to_string(*boxes[overlap->second]), meta.name),
                        meta.name);
    }
    if (covered != *checked_numel(meta.shape)) {
      return plan_error(fmt::format("pieces of '{}' {} hold {} of its {} elements", meta.name,
                                    shape_text(meta.shape), covered, *checked_numel(meta.shape)),
                        meta.name);
    }
  }
  if (at < own.pieces.size()) {
    const std::uint32_t name = own.pieces[at].name;
    if (name >= tables.metadata.size()) {
      return plan_error(fmt::format("pieces[{}]: name {} of {} names", at, name, tables.metadata.size()));
    }
    return plan_error(fmt::format("pieces[{}] of '{}': pieces must ascend by name, and only names whose "
                                  "owner class is -1 have them",
                                  at, tables.metadata[name].name),
                      tables.metadata[name].name);
  }
  return {};
}

}  // namespace

Result<Ownership> resolve_ownership(const std::vector<TensorMeta>& metadata,
                                    const std::vector<Holding>& holdings) {
  SHARDPULL_RETURN_IF_ERROR(check_metadata(metadata));
  if (holdings.empty()) return plan_error("no trainer rank declared what it holds");
  if (holdings.size() > kMaxRanks) {
    return plan_limit_error(fmt::format("{} trainer ranks, at most {} allowed", holdings.size(), kMaxRanks));
  }
  const auto ranks = static_cast<std::uint32_t>(holdings.size());
  std::vector<const Holding*> by_rank(ranks, nullptr);
  for (const Holding& holding : holdings) {
    if (holding.rank >= ranks) {
      return plan_error(
          fmt::format("trainer rank {} declared its holding, but there are {} ranks", holding.rank, ranks));
    }
    if (by_rank[holding.rank] != nullptr)
      return plan_error(fmt::format("trainer rank {} declared its holding twice", holding.rank));
    by_rank[holding.rank] = &holding;
  }

  const Digest128 digest = metadata_digest(metadata);
  Ranks differing;
  for (const Holding* holding : by_rank) {
    if (holding->digest != digest) differing.push_back(holding->rank);
  }
  if (!differing.empty()) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format(
            "trainer rank{} {} describe{} another model than the sender: every rank must give the names, "
            "dtypes and shapes of the whole model, in the same order (digest {} against {})",
            differing.size() == 1 ? "" : "s", ranks_text(differing), differing.size() == 1 ? "s" : "",
            to_string(by_rank[differing.front()]->digest), to_string(digest)),
        {.reason = Reason::kMetadataMismatch, .peer = fmt::format("trainer {}", differing.front())});
  }

  // Pieces by name; what amounts to a whole tensor counts as such.
  std::vector<std::vector<std::pair<const Box*, std::uint32_t>>> pieces(metadata.size());
  std::vector<Ranks> wholes(metadata.size());
  const std::size_t mask_bytes = (metadata.size() + 7) / 8;
  for (const Holding* holding : by_rank) {
    const std::uint32_t rank = holding->rank;
    if (holding->whole.size() != mask_bytes) {
      return plan_error(fmt::format("trainer rank {}: the mask of held names has {} bytes, {} names need {}",
                                    rank, holding->whole.size(), metadata.size(), mask_bytes));
    }
    for (std::size_t i = metadata.size(); i < mask_bytes * 8; ++i) {
      if (bit(holding->whole, i)) {
        return plan_error(fmt::format("trainer rank {} holds unknown name {}: there are {} names", rank, i,
                                      metadata.size()));
      }
    }
    bool any = !holding->pieces.empty();
    for (std::uint32_t name = 0; name < metadata.size(); ++name) {
      if (!bit(holding->whole, name)) continue;
      any = true;
      wholes[name].push_back(rank);
    }
    if (!any) return plan_error(fmt::format("trainer rank {} holds nothing", rank));
    for (const Piece& piece : holding->pieces) {
      if (piece.name >= metadata.size()) {
        return plan_error(fmt::format("trainer rank {} holds a piece of unknown name {}: there are {} names",
                                      rank, piece.name, metadata.size()));
      }
      const TensorMeta& meta = metadata[piece.name];
      if (piece.rank != rank) {
        return plan_error(
            fmt::format("trainer rank {} declares a piece of '{}' for rank {}", rank, meta.name, piece.rank),
            meta.name);
      }
      if (bit(holding->whole, piece.name)) {
        return plan_error(fmt::format("trainer rank {} holds '{}' whole and in pieces", rank, meta.name),
                          meta.name);
      }
      if (const auto problem = piece_problem(meta, piece.box)) {
        return plan_error(fmt::format("trainer rank {}, '{}': {}", rank, meta.name, *problem), meta.name);
      }
      const bool covers = piece.box.whole() || box_covers(piece.box, meta.shape);
      if (covers || *checked_numel(meta.shape) == 0) {
        wholes[piece.name] = merged(wholes[piece.name], {rank});
      } else if (!box_empty(piece.box)) {
        pieces[piece.name].emplace_back(&piece.box, rank);
      }
    }
  }

  Ownership own;
  OwnerSets sets;
  own.name_owner_class.reserve(metadata.size());
  std::vector<std::string> orphans;
  std::size_t orphan_count = 0;
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    const TensorMeta& meta = metadata[name];
    if (pieces[name].empty()) {
      if (wholes[name].empty()) {
        ++orphan_count;
        if (orphans.size() < kShown) orphans.push_back(fmt::format("'{}'", meta.name));
        own.name_owner_class.push_back(-1);
      } else {
        own.name_owner_class.push_back(static_cast<std::int32_t>(sets.number_of(wholes[name])));
      }
      continue;
    }
    std::vector<HeldBox> held;
    for (const auto& [box, rank] : pieces[name]) held.push_back({.box = *box, .ranks = {rank}});
    if (!wholes[name].empty()) {
      held.push_back(
          {.box = Box{.start = std::vector<std::int64_t>(meta.shape.size(), 0), .size = meta.shape},
           .ranks = wholes[name]});
    }
    held = distinct_boxes(std::move(held));
    held = disjoint_boxes(std::move(held));
    if (const auto hole = uncovered(held, meta.shape)) {
      return plan_error(
          fmt::format("nobody holds {} of '{}' {}", to_string(*hole), meta.name, shape_text(meta.shape)),
          meta.name);
    }
    own.name_owner_class.push_back(-1);
    if (held.size() > kMaxPieces - own.pieces.size()) {
      return plan_limit_error(fmt::format("more than {} pieces, at '{}'", kMaxPieces, meta.name), meta.name);
    }
    for (HeldBox& item : held) {
      own.pieces.push_back(
          {.name = name, .box = std::move(item.box), .owner_class = sets.number_of(item.ranks)});
    }
  }
  if (orphan_count > 0) {
    return plan_error(fmt::format("{} name{} held by no trainer rank: {}{}", orphan_count,
                                  orphan_count == 1 ? " is" : "s are", fmt::join(orphans, ", "),
                                  orphan_count > orphans.size() ? ", ..." : ""));
  }
  own.owner_sets = sets.take();
  return own;
}

Status validate(const InitTables& tables) {
  if (tables.producers.empty()) return plan_error("producers: none; at least one trainer rank must serve");
  if (tables.producers.size() > kMaxRanks) {
    return plan_limit_error(
        fmt::format("producers: {}, at most {} allowed", tables.producers.size(), kMaxRanks));
  }
  SHARDPULL_RETURN_IF_ERROR(check_metadata(tables.metadata));
  if (tables.group_lens.empty()) return plan_error("group_lens: absent; it is required");
  std::uint64_t names = 0;
  for (std::size_t g = 0; g < tables.group_lens.size(); ++g) {
    if (tables.group_lens[g] == 0) return plan_error(fmt::format("group_lens[{}] is 0", g));
    names += tables.group_lens[g];
  }
  if (names != tables.metadata.size()) {
    return plan_error(
        fmt::format("group_lens sums to {}, but there are {} names", names, tables.metadata.size()));
  }
  SHARDPULL_RETURN_IF_ERROR(check_ownership(tables));
  const auto check_flags = [&](std::string_view field, const std::vector<std::uint8_t>& flags) -> Status {
    if (flags.size() != tables.producers.size()) {
      return plan_error(
          fmt::format("{}: {} entries for {} producers", field, flags.size(), tables.producers.size()));
    }
    for (std::size_t p = 0; p < flags.size(); ++p) {
      if (flags[p] > 1) return plan_error(fmt::format("{}[{}] is {}, neither 0 nor 1", field, p, flags[p]));
    }
    return {};
  };
  SHARDPULL_RETURN_IF_ERROR(check_flags("producer_mappable", tables.producer_mappable));
  SHARDPULL_RETURN_IF_ERROR(check_flags("producer_resident", tables.producer_resident));
  if (tables.transport == TransportKind::kAuto) return plan_error("transport is auto: it must be decided");
  if (tables.num_consumers == 0 || tables.num_consumers > kMaxRanks) {
    return plan_error(
        fmt::format("num_consumers is {}, it must be 1 to {}", tables.num_consumers, kMaxRanks));
  }
  if (tables.num_replicas == 0 || tables.num_consumers % tables.num_replicas != 0) {
    return plan_error(fmt::format("num_replicas is {}: it must divide num_consumers, {}", tables.num_replicas,
                                  tables.num_consumers));
  }
  const std::uint32_t per_replica = tables.num_consumers / tables.num_replicas;
  if (tables.workers_per_replica != 0 && tables.workers_per_replica != per_replica &&
      tables.workers_per_replica != tables.num_consumers) {
    return plan_error(fmt::format(
        "workers_per_replica is {}: with {} consumers in {} replicas it is {}, or {} to share no slots",
        tables.workers_per_replica, tables.num_consumers, tables.num_replicas, per_replica,
        tables.num_consumers));
  }
  if (tables.ring_depth == 0 || tables.ring_depth > kMaxRingDepth) {
    return plan_error(fmt::format("ring_depth is {}, it must be 1 to {}", tables.ring_depth, kMaxRingDepth));
  }
  return {};
}

std::uint32_t effective_workers_per_replica(const InitTables& tables) {
  return tables.workers_per_replica != 0 ? tables.workers_per_replica
                                         : tables.num_consumers / tables.num_replicas;
}

std::vector<std::uint32_t> group_of_names(const InitTables& tables) {
  std::vector<std::uint32_t> groups;
  groups.reserve(tables.metadata.size());
  for (std::uint32_t g = 0; g < tables.group_lens.size(); ++g)
    groups.insert(groups.end(), tables.group_lens[g], g);
  return groups;
}

bool held_without(const InitTables& tables, const std::vector<std::uint32_t>& lost) {
  const auto is_lost = [&](std::uint32_t rank) { return std::binary_search(lost.begin(), lost.end(), rank); };
  if (tables.ownership.owner_sets.empty()) return lost.size() < tables.producers.size();
  return std::none_of(
      tables.ownership.owner_sets.begin(), tables.ownership.owner_sets.end(),
      [&](const std::vector<std::uint32_t>& owners) { return std::all_of(owners.begin(), owners.end(), is_lost); });
}

std::vector<std::vector<std::uint32_t>> group_owners(const InitTables& tables) {
  std::vector<Ranks> owners(tables.group_lens.size());
  const Ownership& own = tables.ownership;
  if (own.name_owner_class.empty()) {
    Ranks everyone(tables.producers.size());
    std::iota(everyone.begin(), everyone.end(), 0u);
    std::fill(owners.begin(), owners.end(), everyone);
    return owners;
  }
  std::vector<std::uint8_t> owns(tables.producers.size());
  std::vector<std::uint32_t> seen(own.owner_sets.size(), UINT32_MAX);  // the last group that counted this set
  std::size_t piece = 0;
  std::uint32_t name = 0;
  for (std::uint32_t g = 0; g < tables.group_lens.size(); ++g) {
    std::fill(owns.begin(), owns.end(), std::uint8_t{0});
    const auto count = [&](std::uint32_t owner_class) {
      if (std::exchange(seen[owner_class], g) == g) return;
      for (const std::uint32_t rank : own.owner_sets[owner_class]) owns[rank] = 1;
    };
    for (std::uint32_t i = 0; i < tables.group_lens[g]; ++i, ++name) {
      if (own.name_owner_class[name] >= 0) count(static_cast<std::uint32_t>(own.name_owner_class[name]));
      for (; piece < own.pieces.size() && own.pieces[piece].name == name; ++piece)
        count(own.pieces[piece].owner_class);
    }
    for (std::uint32_t rank = 0; rank < owns.size(); ++rank) {
      if (owns[rank] != 0) owners[g].push_back(rank);
    }
  }
  return owners;
}

}  // namespace shardpull
