#include "cli/layouts.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/limits.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "plan/plan.h"

namespace shardpull::cli {
namespace {

Status refused(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = Reason::kBadArgument});
}

struct Word {
  std::string_view name;
  std::uint32_t* target;
};

// Words of layouts that exist elsewhere in the field: refused as missing, not as misspelt.
constexpr std::array<std::string_view, 8> kOtherWords = {"tp",   "pp", "dp", "ep",
                                                         "fsdp", "cp", "sp", "replicas"};

Status parse_words(std::string_view text, std::string_view flag, std::string_view form,
                   std::span<const Word> words) {
  const std::string expected = fmt::format("expected {}", form);
  if (text.empty()) return refused(fmt::format("{}: no layout; {}", flag, expected));
  std::vector<std::string_view> seen;
  std::string_view rest = text;
  for (;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const std::size_t equals = part.find('=');
    const std::string_view name = part.substr(0, equals);
    if (equals == std::string_view::npos || name.empty()) {
      return refused(fmt::format("{}: \"{}\" is not WORD=NUMBER; {}", flag, part, expected));
    }
    const auto word =
        std::find_if(words.begin(), words.end(), [&](const Word& known) { return known.name == name; });
    if (word == words.end()) {
      const bool other = std::find(kOtherWords.begin(), kOtherWords.end(), name) != kOtherWords.end();
      return refused(fmt::format("{}: {} \"{}\" {}; {}", flag, other ? "layout" : "word", name,
                                 other ? "is not supported here" : "is unknown", expected));
    }
    if (std::find(seen.begin(), seen.end(), name) != seen.end()) {
      return refused(fmt::format("{}: \"{}\" is given twice; {}", flag, name, expected));
    }
    seen.push_back(name);
    SHARDPULL_ASSIGN_OR_RETURN(
        const std::int64_t value,
        parse_integer(part.substr(equals + 1), fmt::format("{} {}", flag, name), 1, std::int64_t{kMaxRanks}));
    *word->target = static_cast<std::uint32_t>(value);
    if (comma == std::string_view::npos) return {};
    rest.remove_prefix(comma + 1);
  }
}

// Embeddings sit before the first layer, norms and heads behind the last one. Families agree on the word.
bool is_embedding(std::string_view name) {
  return name.find("embed") != std::string_view::npos;
}

// The one embedding that a tied head shares.
bool is_input_embedding(std::string_view name) {
  return name.ends_with("embed_tokens.weight") || name.ends_with("word_embeddings.weight");
}

}  // namespace

Result<TrainerLayout> parse_trainer_layout(std::string_view text) {
  TrainerLayout layout;
  const Word words[] = {{"pp", &layout.pp}};
  SHARDPULL_RETURN_IF_ERROR(parse_words(text, "--trainer", "pp=N, such as pp=2", words));
  return layout;
}

Result<InferenceLayout> parse_inference_layout(std::string_view text) {
  std::uint32_t tp = 1, pp = 1, dp = 1, replicas = 1;
  const Word words[] = {{"tp", &tp}, {"pp", &pp}, {"dp", &dp}, {"replicas", &replicas}};
  SHARDPULL_RETURN_IF_ERROR(parse_words(
      text, "--inference", "tp=N, pp=N, dp=N and replicas=N, each at most once, such as tp=2,pp=1", words));
  std::uint64_t count = 1;
  for (const Word& word : words) {
    count *= *word.target;  // at most kMaxRanks^2 here
    if (count > kMaxRanks) {
      return refused(fmt::format("--inference: {} gives more than {} workers", text, kMaxRanks));
    }
  }
  InferenceLayout layout;
  layout.tp = static_cast<int>(tp);
  layout.pp = static_cast<int>(pp);
  layout.dp = static_cast<int>(dp);
  layout.replicas = static_cast<int>(replicas);
  return layout;
}

std::string to_string(const TrainerLayout& layout) {
  return fmt::format("pp={}", layout.pp);
}

std::string to_string(const InferenceLayout& layout) {
  std::string text = fmt::format("tp={},pp={}", layout.tp, layout.pp);
  if (layout.dp != 1) text += fmt::format(",dp={}", layout.dp);
  if (layout.replicas != 1) text += fmt::format(",replicas={}", layout.replicas);
  return text;
}

std::uint32_t workers(const InferenceLayout& layout) {
  return static_cast<std::uint32_t>(layout.workers());
}

Result<std::vector<std::vector<std::uint32_t>>> names_of_ranks(const std::vector<TensorMeta>& metadata,
                                                               bool tied, const TrainerLayout& layout) {
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<GatherGroup> groups, form_groups(metadata));

  // The layers in the model's order. form_groups gives them in the list's, where 10 may come before 2.
  std::vector<std::string> prefixes;
  std::map<std::pair<std::size_t, std::uint64_t>, std::size_t> layers;  // (prefix, number) -> group
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::string& label = groups[g].label;
    if (label.empty()) continue;
    const std::size_t dot = label.rfind('.');
    const std::string prefix = dot == std::string::npos ? "" : label.substr(0, dot);
    auto at = std::find(prefixes.begin(), prefixes.end(), prefix);
    if (at == prefixes.end()) at = prefixes.insert(prefixes.end(), prefix);
    SHARDPULL_ASSIGN_OR_RETURN(
        const std::int64_t number,
        parse_integer(std::string_view(label).substr(dot == std::string::npos ? 0 : dot + 1),
                      "the layer of " + metadata[groups[g].first].name, 0, INT64_MAX));
    layers[{static_cast<std::size_t>(at - prefixes.begin()), static_cast<std::uint64_t>(number)}] = g;
  }
  const auto stages = pipeline_stages(static_cast<std::int64_t>(layers.size()), static_cast<int>(layout.pp));
  std::vector<std::optional<std::uint32_t>> rank_of_group(groups.size());
  std::int64_t layer = 0;
  std::uint32_t rank = 0;
  for (const auto& [key, group] : layers) {
    while (layer >= stages[rank].second) ++rank;
    rank_of_group[group] = rank;
    ++layer;
  }

  std::vector<std::vector<std::uint32_t>> names(layout.pp);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::uint32_t n = groups[g].first; n < groups[g].first + groups[g].count; ++n) {
      if (rank_of_group[g]) {
        names[*rank_of_group[g]].push_back(n);
        continue;
      }
      const bool first = is_embedding(metadata[n].name);
      const bool last = !first || (tied && is_input_embedding(metadata[n].name));
      if (first) names.front().push_back(n);
      if (last && (!first || layout.pp > 1)) names.back().push_back(n);
    }
  }
  for (std::uint32_t r = 0; r < layout.pp; ++r) {
    if (!names[r].empty()) continue;
    return refused(fmt::format("--trainer pp={}: rank {} would hold nothing, since the model has {} layers",
                               layout.pp, r, layers.size()));
  }
  return names;
}

}  // namespace shardpull::cli
