// Gather groups: the cut of the name list by the first dotted part made of ASCII digits.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "plan/plan.h"
#include "plan/plan_errors.h"

namespace shardpull {
namespace {

// "model.layers." and "3" of "model.layers.03.mlp.w": the text before the first all-digit part, and that part
// without its leading zeros ("0" for zero).
struct GroupKey {
  std::string_view prefix, value;
};

bool all_digits(std::string_view part) {
  return !part.empty() && std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::optional<GroupKey> group_key(std::string_view name) {
  std::size_t start = 0;
  while (true) {
    const std::size_t dot = name.find('.', start);
    const std::string_view part = name.substr(start, dot == std::string_view::npos ? dot : dot - start);
    if (all_digits(part)) {
      const std::size_t first = std::min(part.find_first_not_of('0'), part.size() - 1);
      return GroupKey{name.substr(0, start), part.substr(first)};
    }
    if (dot == std::string_view::npos) return std::nullopt;
    start = dot + 1;
  }
}

// Unambiguous: the value is the first part of digits, so a label splits into prefix and value in one way
// only.
std::string label_of(const GroupKey& key) {
  return std::string(key.prefix).append(key.value);
}

// As numbers of any length; values carry no leading zeros.
bool value_less(std::string_view a, std::string_view b) {
  return a.size() != b.size() ? a.size() < b.size() : a < b;
}

}  // namespace

Result<std::vector<GatherGroup>> form_groups(const std::vector<TensorMeta>& metadata) {
  std::vector<GatherGroup> groups;
  std::unordered_map<std::string, std::uint32_t> group_of_label;
  std::unordered_map<std::string_view, std::uint32_t> place_of_name;
  place_of_name.reserve(metadata.size());
  for (std::uint32_t i = 0; i < metadata.size(); ++i) {
    const std::string& name = metadata[i].name;
    if (const auto [place, fresh] = place_of_name.try_emplace(name, i); !fresh) {
      return plan_error(
          fmt::format("name '{}' appears twice in the metadata: at {} and at {}", name, place->second, i),
          name);
    }
    const auto key = group_key(name);
    const std::string label = key ? label_of(*key) : std::string();
    if (!groups.empty() && groups.back().label == label) {
      ++groups.back().count;
      continue;
    }
    const auto group = static_cast<std::uint32_t>(groups.size());
    if (key) {
      if (const auto [known, fresh] = group_of_label.try_emplace(label, group); !fresh) {
        const GatherGroup& before = groups[known->second];
        const std::uint32_t last = before.first + before.count - 1;
        return plan_error(fmt::format("gather group '{}' returns after another group: name '{}' at {} "
                                      "belongs to it, but it ended with "
                                      "'{}' at {}; give the names group by group",
                                      label, name, i, metadata[last].name, last),
                          name);
      }
    }
    groups.push_back({.first = i, .count = 1, .label = label});
  }
  return groups;
}

std::vector<std::uint32_t> normalise(const std::vector<std::string>& names) {
  struct Indexed {
    std::uint32_t prefix = 0;  // number of the prefix, by first appearance
    std::string_view value;
    std::uint32_t name = 0;
  };
  std::vector<std::uint32_t> order, trailing;
  std::vector<Indexed> indexed;
  std::unordered_map<std::string_view, std::uint32_t> prefixes;
  for (std::uint32_t i = 0; i < names.size(); ++i) {
    if (const auto key = group_key(names[i])) {
      const auto number =
          prefixes.try_emplace(key->prefix, static_cast<std::uint32_t>(prefixes.size())).first->second;
      indexed.push_back({.prefix = number, .value = key->value, .name = i});
    } else {
      (indexed.empty() ? order : trailing).push_back(i);
    }
  }
  std::sort(indexed.begin(), indexed.end(), [](const Indexed& a, const Indexed& b) {
    if (a.prefix != b.prefix) return a.prefix < b.prefix;
    if (a.value != b.value) return value_less(a.value, b.value);
    return a.name < b.name;
  });
  for (const Indexed& item : indexed) order.push_back(item.name);
  order.insert(order.end(), trailing.begin(), trailing.end());
  return order;
}

}  // namespace shardpull
