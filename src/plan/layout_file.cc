// Reading layout files, in two steps: the JSON becomes groups of rules, each with the names it decides; then
// each rank is given what the rules of its groups say.
#include "plan/layout_file.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/limits.h"
#include "base/status_macros.h"
#include "base/strict_json.h"
#include "plan/boxes.h"
#include "plan/restrict.h"
#include "shardpull/slice.h"

namespace shardpull {
namespace {

using nlohmann::json;

constexpr std::int64_t kVersion = 1;
constexpr std::size_t kMaxTextBytes = 16u << 20;
constexpr std::size_t kMaxDepth = 16;
constexpr std::size_t kMaxRules = 1'000'000;        // of all groups
constexpr std::size_t kMaxPatternTests = 1u << 28;  // patterns x names
constexpr std::size_t kMaxBoxesPerRule = 64;
constexpr std::size_t kMaxCuts = 8;                 // of one shard
constexpr std::size_t kMaxHeldWhole = 64'000'000;   // over all ranks
constexpr std::size_t kMaxHeldPieces = 16'000'000;  // over all ranks

// A value and where in the file it is: "groups[1].hold[0].name".
struct Node {
  const json& value;
  std::string path;

  Status wrong(std::string_view what) const { return wrong_at(path, what); }
  static Status wrong_at(std::string_view path, std::string_view what, Reason reason = Reason::kBadArgument) {
    return Status(StatusCode::kInvalidArgument,
                  path.empty() ? std::string(what) : fmt::format("{}: {}", path, what), {.reason = reason});
  }

  Node at(const char* key) const {
    return {value[key], path.empty() ? std::string(key) : fmt::format("{}.{}", path, key)};
  }
  bool has(const char* key) const { return value.contains(key); }

  // An object with all of `required`, some of `optional`, and nothing else.
  Status object(std::initializer_list<const char*> required,
                std::initializer_list<const char*> optional) const {
    if (!value.is_object()) return wrong("expected an object");
    for (const char* const key : required) {
      if (!has(key)) return wrong(fmt::format("the field \"{}\" is missing", key));
    }
    const auto known = [&](const std::string& key) {
      const auto is = [&](const char* name) { return key == name; };
      return std::any_of(required.begin(), required.end(), is) ||
             std::any_of(optional.begin(), optional.end(), is);
    };
    for (const auto& [key, ignored] : value.items()) {
      if (!known(key)) return wrong(fmt::format("the field {} is unknown", in_quotes(key)));
    }
    return {};
  }
  Result<std::int64_t> integer(std::int64_t low, std::int64_t high) const {
    const bool small = value.is_number_unsigned()
                           ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(high)
                           : value.is_number_integer();
    if (!small || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high) {
      return wrong(fmt::format("expected an integer from {} to {}", low, high));
    }
    return value.get<std::int64_t>();
  }
  // The elements of a list with 1 to `most` of them.
  Result<std::vector<Node>> list(std::size_t most) const {
    if (!value.is_array() || value.empty() || value.size() > most) {
      return wrong(fmt::format("expected a list of 1 to {} entries", most));
    }
    std::vector<Node> elements;
    elements.reserve(value.size());
    for (std::size_t i = 0; i < value.size(); ++i)
      elements.push_back({value[i], fmt::format("{}[{}]", path, i)});
    return elements;
  }
};

// One cut of a shard: part `index` of `of` along `dim`. Absent: the rank's place in its group, of its size.
struct Cut {
  std::size_t dim = 0;
  std::optional<std::pair<std::int64_t, std::int64_t>> part;
};

struct Rule {
  std::string path;
  std::vector<std::uint32_t> names;  // that it decides, ascending
  std::vector<Box> boxes;            // explicit ones
  std::vector<Cut> cuts;             // of a shard; neither: whole
};

struct Group {
  std::vector<std::uint32_t> ranks;
  std::vector<Rule> hold;
};

class LayoutReader {
 public:
  explicit LayoutReader(const std::vector<TensorMeta>& metadata)
      : metadata_(metadata), decided_(metadata.size(), 0) {
    for (std::uint32_t n = 0; n < metadata.size(); ++n) names_.emplace(metadata[n].name, n);
  }

  Result<std::vector<HeldByRank>> read(const json& document) {
    const Node root{document, ""};
    SHARDPULL_RETURN_IF_ERROR(root.object({"format", "version", "groups"}, {}));
    if (root.value["format"] != "shardpull-layout") {
      return root.at("format").wrong("expected \"shardpull-layout\"");
    }
    SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t version, root.at("version").integer(0, INT64_MAX));
    if (version != kVersion) {
      return Status(StatusCode::kFailedPrecondition,
                    fmt::format("layout format version {}, this program reads {}", version, kVersion),
                    {.reason = Reason::kVersionMismatch});
    }
    SHARDPULL_ASSIGN_OR_RETURN(const std::vector<Node> groups, root.at("groups").list(kMaxRanks));
    for (const Node& group : groups) SHARDPULL_RETURN_IF_ERROR(read_group(group));
    return hand_out();
  }

 private:
  Status read_group(const Node& node) {
    SHARDPULL_RETURN_IF_ERROR(node.object({"ranks", "hold"}, {}));
    Group group;
    SHARDPULL_ASSIGN_OR_RETURN(const std::vector<Node> ranks, node.at("ranks").list(kMaxRanks));
    for (const Node& rank : ranks) {
      SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t number, rank.integer(0, kMaxRanks - 1));
      group.ranks.push_back(static_cast<std::uint32_t>(number));
    }
    std::vector<std::uint32_t> sorted = group.ranks;
    std::sort(sorted.begin(), sorted.end());
    if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
      return node.at("ranks").wrong(fmt::format("rank {} is there twice", *twice));
    }
    SHARDPULL_ASSIGN_OR_RETURN(const std::vector<Node> rules, node.at("hold").list(kMaxRules));
    ++group_;
    for (const Node& rule : rules) {
      if (++rules_ > kMaxRules) {
        return Node::wrong_at(rule.path, fmt::format("more than {} rules", kMaxRules), Reason::kLimit);
      }
      SHARDPULL_ASSIGN_OR_RETURN(Rule read, read_rule(rule));
      group.hold.push_back(std::move(read));
    }
    groups_.push_back(std::move(group));
    return {};
  }

  Result<Rule> read_rule(const Node& node) {
    SHARDPULL_RETURN_IF_ERROR(node.object({"name"}, {"boxes", "shard"}));
    Rule rule{.path = node.path, .names = {}, .boxes = {}, .cuts = {}};
    SHARDPULL_RETURN_IF_ERROR(take_names(node.at("name"), rule));
    if (node.has("boxes") && node.has("shard")) return node.wrong("has boxes and shard: one of them");
    if (node.has("boxes")) SHARDPULL_RETURN_IF_ERROR(read_boxes(node.at("boxes"), rule));
    if (node.has("shard")) SHARDPULL_RETURN_IF_ERROR(read_shard(node.at("shard"), rule));
    return rule;
  }

  // The names that match and that no rule before it in its group has taken.
  Status take_names(const Node& node, Rule& rule) {
    if (!node.value.is_string()) return node.wrong("expected a name or pattern");
    const std::string& pattern = node.value.get_ref<const std::string&>();
    if (pattern.size() > kMaxNameBytes || pattern.find('\0') != std::string::npos) {
      return node.wrong(fmt::format("a name has at most {} bytes, none of them 0", kMaxNameBytes));
    }
    std::size_t matched = 0;
    const auto take = [&](std::uint32_t name) {
      ++matched;
      if (decided_[name] == group_) return;
      decided_[name] = group_;
      rule.names.push_back(name);
    };
    if (pattern.find_first_of("*?[\\") == std::string::npos) {
      const auto found = names_.find(pattern);
      if (found == names_.end())
        return node.wrong(fmt::format("the model has no tensor {}", in_quotes(pattern)));
      take(found->second);
    } else {
      tests_ += metadata_.size();
      if (tests_ > kMaxPatternTests) {
        return Node::wrong_at(node.path,
                              "too many patterns for so many names: write names out, or share groups",
                              Reason::kLimit);
      }
      auto set = names_matching({pattern}, metadata_);
      if (!set.ok()) return node.wrong(set.status().message());
      for (std::uint32_t n = 0; n < metadata_.size(); ++n) {
        if (listed(*set, n)) take(n);
      }
    }
    taken_ += rule.names.size();
    if (taken_ > kMaxHeldWhole) {
      return Node::wrong_at(node.path, fmt::format("the groups hold more than {} tensors", kMaxHeldWhole),
                            Reason::kLimit);
    }
    if (rule.names.empty()) {
      return node.wrong(fmt::format("all {} name(s) that {} matches are decided by rules before it", matched,
                                    in_quotes(pattern)));
    }
    return {};
  }

  // [[[start, size], ...], ...]: boxes of one [start, size] a dim. They apply to every name of the rule.
  Status read_boxes(const Node& node, Rule& rule) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::vector<Node> boxes, node.list(kMaxBoxesPerRule));
    for (const Node& entry : boxes) {
      SHARDPULL_ASSIGN_OR_RETURN(const std::vector<Node> dims, entry.list(kMaxDims));
      Box box;
      for (const Node& dim : dims) {
        SHARDPULL_ASSIGN_OR_RETURN(const std::vector<Node> bounds, dim.list(2));
        if (bounds.size() != 2) return dim.wrong("expected [start, size]");
        SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t start, bounds[0].integer(0, INT64_MAX));
        SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t size, bounds[1].integer(1, INT64_MAX));
        box.start.push_back(start);
        box.size.push_back(size);
      }
      for (const std::uint32_t name : rule.names) {
        if (const auto problem = box_problem(box, metadata_[name].shape)) {
          return entry.wrong(fmt::format("does not fit {} {}: {}", metadata_[name].name,
                                         shape_text(metadata_[name].shape), *problem));
        }
      }
      rule.boxes.push_back(std::move(box));
    }
    if (const auto both = find_overlap(rule.boxes)) {
      return node.wrong(fmt::format("boxes {} and {} overlap", to_string(rule.boxes[both->first]),
                                    to_string(rule.boxes[both->second])));
    }
    return {};
  }

  Status read_shard(const Node& node, Rule& rule) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::vector<Node> cuts, node.list(kMaxCuts));
    for (const Node& entry : cuts) {
      SHARDPULL_RETURN_IF_ERROR(entry.object({"dim"}, {"index", "of"}));
      SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t dim, entry.at("dim").integer(0, kMaxDims - 1));
      Cut cut{.dim = static_cast<std::size_t>(dim), .part = {}};
      if (entry.has("index") != entry.has("of")) return entry.wrong("has one of index and of: both or none");
      if (entry.has("of")) {
        SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t of, entry.at("of").integer(1, kMaxRanks));
        SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t index, entry.at("index").integer(0, of - 1));
        cut.part = {index, of};
      }
      for (const std::uint32_t name : rule.names) {
        if (cut.dim >= metadata_[name].shape.size()) {
          return entry.wrong(fmt::format("{} {} has no dim {}", metadata_[name].name,
                                         shape_text(metadata_[name].shape), dim));
        }
      }
      rule.cuts.push_back(cut);
    }
    return {};
  }

  // The part of a tensor that the rank at `place` of `count` holds, as torch.chunk cuts: parts of equal size,
  // rounded up, the last ones smaller or empty.
  static Box shard_of(const std::vector<std::int64_t>& shape, const std::vector<Cut>& cuts,
                      std::int64_t place, std::int64_t count) {
    Box box{.start = std::vector<std::int64_t>(shape.size(), 0), .size = shape};
    for (const Cut& cut : cuts) {
      const auto [index, of] = cut.part.value_or(std::pair(place, count));
      const std::int64_t whole = box.size[cut.dim];
      const std::int64_t step = ceil_div(whole, of);
      // index < of <= 2^16 and step <= whole / of + 1: the product is far from overflowing.
      const std::int64_t begin = std::min(index * step, whole);
      box.start[cut.dim] += begin;
      box.size[cut.dim] = std::min(step, whole - begin);
    }
    return box;
  }

  Result<std::vector<HeldByRank>> hand_out() const {
    std::uint32_t count = 0;
    for (const Group& group : groups_) {
      for (const std::uint32_t rank : group.ranks) count = std::max(count, rank + 1);
    }
    struct Place {
      const Group* group;
      std::size_t index;
    };
    std::vector<std::vector<Place>> places(count);
    for (const Group& group : groups_) {
      for (std::size_t i = 0; i < group.ranks.size(); ++i) places[group.ranks[i]].push_back({&group, i});
    }

    std::vector<HeldByRank> held(count);
    std::vector<std::pair<std::uint32_t, const Rule*>> given(metadata_.size(), {count, nullptr});
    std::size_t wholes = 0, pieces = 0;
    for (std::uint32_t rank = 0; rank < count; ++rank) {
      if (places[rank].empty()) {
        return Node::wrong_at("groups",
                              fmt::format("no group has rank {}, and there is rank {}", rank, count - 1));
      }
      HeldByRank& mine = held[rank];
      for (const Place& place : places[rank]) {
        for (const Rule& rule : place.group->hold) {
          for (const std::uint32_t name : rule.names) {
            if (given[name].first == rank) {
              return Node::wrong_at(
                  rule.path, fmt::format("gives rank {} the tensor {}, which {} gives it already", rank,
                                         metadata_[name].name, given[name].second->path));
            }
            given[name] = {rank, &rule};
            hold(rule, name, rank, place.index, place.group->ranks.size(), mine);
          }
          if (wholes + mine.whole.size() > kMaxHeldWhole || pieces + mine.pieces.size() > kMaxHeldPieces) {
            return Node::wrong_at(rule.path,
                                  fmt::format("the ranks hold more than {} tensors or {} pieces together",
                                              kMaxHeldWhole, kMaxHeldPieces),
                                  Reason::kLimit);
          }
        }
      }
      wholes += mine.whole.size();
      pieces += mine.pieces.size();
      if (mine.whole.empty() && mine.pieces.empty()) {
        return Node::wrong_at("groups", fmt::format("rank {} holds nothing", rank));
      }
      std::sort(mine.whole.begin(), mine.whole.end());
      std::stable_sort(mine.pieces.begin(), mine.pieces.end(),
                       [](const Piece& a, const Piece& b) { return a.name < b.name; });
    }
    return held;
  }

  void hold(const Rule& rule, std::uint32_t name, std::uint32_t rank, std::size_t place, std::size_t count,
            HeldByRank& mine) const {
    const std::vector<std::int64_t>& shape = metadata_[name].shape;
    const auto piece = [&](const Box& box) {
      if (box_covers(box, shape) || std::find(shape.begin(), shape.end(), 0) != shape.end()) {
        mine.whole.push_back(name);  // a tensor without elements has no parts
      } else if (!box_empty(box)) {  // the last parts of an uneven shard are
        mine.pieces.push_back({.name = name, .box = box, .rank = rank});
      }
    };
    if (rule.boxes.empty() && rule.cuts.empty()) {
      mine.whole.push_back(name);
    } else if (!rule.cuts.empty()) {
      piece(shard_of(shape, rule.cuts, static_cast<std::int64_t>(place), static_cast<std::int64_t>(count)));
    } else {
      for (const Box& box : rule.boxes) piece(box);
    }
  }

  const std::vector<TensorMeta>& metadata_;
  std::unordered_map<std::string_view, std::uint32_t> names_;
  std::vector<Group> groups_;
  std::vector<std::uint32_t> decided_;  // by name: the group (from 1) in which a rule has taken it last
  std::uint32_t group_ = 0;
  std::size_t rules_ = 0, tests_ = 0, taken_ = 0;
};

}  // namespace

Result<std::vector<HeldByRank>> read_layout(std::string_view text, const std::vector<TensorMeta>& metadata,
                                            std::string_view origin) {
  if (text.size() > kMaxTextBytes) {
    return Node::wrong_at(
        origin, fmt::format("{} bytes, a layout has at most {}", text.size(), kMaxTextBytes), Reason::kLimit);
  }
  if (const Status checked = check_json(text, kMaxDepth, origin); !checked.ok()) {
    return Status(StatusCode::kInvalidArgument, checked.message(), {.reason = Reason::kBadArgument});
  }
  const json document = json::parse(text, nullptr, /*allow_exceptions=*/false);
  auto held = LayoutReader(metadata).read(document);
  if (!held.ok()) return held.status().with_context(origin);
  return held;
}

}  // namespace shardpull
