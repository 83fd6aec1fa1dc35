#include "model/families/family_model.h"

#include <algorithm>
#include <charconv>
#include <unordered_set>

#include "base/edit_distance.h"
#include "base/status_macros.h"
#include "model/describe.h"

namespace shardpull::families {
namespace {

Status refused(std::string message, Reason reason, std::string tensor) {
  return Status(StatusCode::kInvalidArgument, std::move(message),
                ErrorInfo{.reason = reason, .tensor = std::move(tensor)});
}

}  // namespace

Status FamilyModel::Source::check_shape(const std::string& name,
                                        const std::vector<std::int64_t>& found) const {
  if (stack != nullptr) return stack->exchanged(name, stack_shard, found).status();
  return found == shape ? Status() : wrong_shape(name, found, shape);
}

Status FamilyModel::load_weights(const std::vector<NamedTensor>& weights) {
  std::vector<const Source*> found;
  found.reserve(weights.size());
  std::vector<std::string> unknown;
  bool any_fused = false;
  for (const NamedTensor& weight : weights) {
    const auto source = sources.find(weight.name);
    found.push_back(source == sources.end() ? nullptr : &source->second);
    if (source == sources.end() && explain_unused(weight.name).empty()) unknown.push_back(weight.name);
    any_fused = any_fused || (source != sources.end() && source->second.is_fused);
  }
  if (!unknown.empty() || any_fused) {
    std::unordered_set<std::string_view> names;
    for (const NamedTensor& weight : weights) names.insert(weight.name);
    const auto given = [&](std::string_view name) { return names.contains(name); };
    if (!unknown.empty()) return unknown_names(unknown, given);
    SHARDPULL_RETURN_IF_ERROR(check_fused(given));
  }
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (found[i] == nullptr) continue;
    for (const Source::Target& target : found[i]->targets) {
      SHARDPULL_RETURN_IF_ERROR(target.parameter->load(weights[i].tensor, target.shard));
    }
  }
  return {};
}

std::string FamilyModel::explain_unused(std::string_view name) const {
  if (const auto source = sources.find(name); source != sources.end()) return source->second.unused;
  if (!tied_head.empty() && name == tied_head) return "tied head: " + tied_to + " feeds it";
  for (const IgnoredName& rule : ignored) {
    if (rule.match == IgnoredName::Match::kPrefix ? name.starts_with(rule.pattern)
                                                  : name.ends_with(rule.pattern)) {
      return std::string(rule.reason);
    }
  }
  if (prediction_layers.first < prediction_layers.end && name.starts_with(prediction_layers.prefix)) {
    const char* const end = name.data() + name.size();
    std::int64_t layer = -1;
    const auto number = std::from_chars(name.data() + prediction_layers.prefix.size(), end, layer);
    if (number.ec == std::errc() && number.ptr != end && *number.ptr == '.' &&
        layer >= prediction_layers.first && layer < prediction_layers.end) {
      return "unused: layer " + std::to_string(layer) +
             " predicts further tokens (num_nextn_predict_layers) and is no part of this model";
    }
  }
  return {};
}

std::vector<std::string> FamilyModel::sources_of(const Parameter& parameter) const {
  const auto names = fed_by.find(&parameter);
  return names == fed_by.end() ? std::vector<std::string>() : names->second;
}

Status FamilyModel::unknown_names(const std::vector<std::string>& unknown,
                                  const std::function<bool(std::string_view)>& given) const {
  // The first known name that is `name` but for what stands before its second part.
  const auto other_prefix = [&](std::string_view name) -> const std::string* {
    const std::size_t dot = name.find('.');
    if (dot == std::string_view::npos) return nullptr;
    const std::string* found = nullptr;
    for (const auto& [known, source] : sources) {
      if (std::string_view(known).ends_with(name.substr(dot)) && (found == nullptr || known < *found))
        found = &known;
    }
    return found;
  };
  std::vector<std::string> lines;
  for (const std::string& name : unknown) {
    std::string line = name;
    if (lines.size() < kMaxListed) {
      const std::string* nearest = nullptr;
      std::size_t best = std::max<std::size_t>(3, name.size() / 4);
      for (const auto& [known, source] : sources) {
        // Of equally near ones the first by name.
        const std::size_t here = edit_distance(name, known, best + 1);
        if (here < best || (here == best && nearest != nullptr && known < *nearest)) {
          best = here;
          nearest = &known;
        }
      }
      if (nearest == nullptr) nearest = other_prefix(name);
      if (nearest != nullptr) line += " (nearest: " + *nearest + ")";
    }
    lines.push_back(std::move(line));
  }
  std::unordered_set<std::string_view> replaced;
  for (const auto& [name, parts] : fused) {
    if (given(name)) replaced.insert(parts.begin(), parts.end());
  }
  std::vector<std::string> missing;
  for (const auto& [known, source] : sources) {
    if (!source.targets.empty() && !source.is_fused && !given(known) && !replaced.contains(known))
      missing.push_back(known);
  }
  std::sort(missing.begin(), missing.end());
  return refused(
      std::to_string(unknown.size()) +
          " name(s) that this architecture does not have: " + describe_list(lines) +
          (missing.empty() ? std::string()
                           : "; " + std::to_string(missing.size()) +
                                 " name(s) that it needs are not given: " + describe_list(missing)),
      Reason::kBakeFailed, unknown.front());
}

Status FamilyModel::check_fused(const std::function<bool(std::string_view)>& given) const {
  for (const auto& [name, parts] : fused) {
    if (!given(name)) continue;
    for (const std::string& part : parts) {
      if (given(part)) {
        return refused(part + " is in the checkpoint twice: by itself and fused in " + name,
                       Reason::kCheckpointMalformed, part);
      }
    }
  }
  return {};
}

}  // namespace shardpull::families
