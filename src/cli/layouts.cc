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

// The product of the words' numbers, or an error when it is above the most processes of one side.
Result<std::uint64_t> count_of(std::string_view text, std::string_view flag, std::string_view what,
                               std::span<const Word> words) {
  std::uint64_t count = 1;
  for (const Word& word : words) {
    count *= *word.target;  // at most kMaxRanks^2 here
    if (count > kMaxRanks)
      return refused(fmt::format("{}: {} gives more than {} {}", flag, text, kMaxRanks, what));
  }
  return count;
}

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

// A part of `total` things: rank `index` of `count` has [first, first + size), the remainder going to the
// first.
struct Block {
  std::int64_t first = 0, size = 0;
};
Block block_of(std::int64_t total, std::int64_t count, std::int64_t index) {
  const std::int64_t each = total / count, more = total % count;
  return {index * each + std::min(index, more), each + (index < more ? 1 : 0)};
}

// What of a name the experts of a model are: "<prefix>.experts" and, for a name of one expert, which.
struct ExpertName {
  std::string_view owner;
  std::optional<std::int64_t> expert;  // absent: a stack of all
};
std::optional<ExpertName> expert_of(std::string_view name) {
  constexpr std::string_view kPart = ".experts.";
  const std::size_t at = name.find(kPart);
  if (at == std::string_view::npos) return std::nullopt;
  ExpertName out{.owner = name.substr(0, at + kPart.size()), .expert = std::nullopt};
  const std::string_view rest = name.substr(at + kPart.size());
  const std::string_view part = rest.substr(0, rest.find('.'));
  if (!part.empty() && std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    const auto number = parse_integer(part, name, 0, INT32_MAX);
    if (!number.ok()) return std::nullopt;
    out.expert = *number;
  }
  return out;
}

// The rows of dim 0 of `box` that fsdp rank `index` of `count` has; nothing when it has none.
std::optional<Box> fsdp_rows(Box box, std::int64_t count, std::int64_t index) {
  const std::int64_t rows = box.size[0], each = (rows + count - 1) / count;
  const std::int64_t first = std::min(index * each, rows);
  if (first == rows) return std::nullopt;
  box.start[0] += first;
  box.size[0] = std::min(each, rows - first);
  return box;
}

// The names of each pipeline stage.
Result<std::vector<std::vector<std::uint32_t>>> names_of_stages(const std::vector<TensorMeta>& metadata,
                                                                bool tied, std::uint32_t pp) {
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
  const auto stages = pipeline_stages(static_cast<std::int64_t>(layers.size()), static_cast<int>(pp));
  std::vector<std::optional<std::uint32_t>> rank_of_group(groups.size());
  std::int64_t layer = 0;
  std::uint32_t rank = 0;
  for (const auto& [key, group] : layers) {
    while (layer >= stages[rank].second) ++rank;
    rank_of_group[group] = rank;
    ++layer;
  }

  std::vector<std::vector<std::uint32_t>> names(pp);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::uint32_t n = groups[g].first; n < groups[g].first + groups[g].count; ++n) {
      if (rank_of_group[g]) {
        names[*rank_of_group[g]].push_back(n);
        continue;
      }
      const bool first = is_embedding(metadata[n].name);
      const bool last = !first || (tied && is_input_embedding(metadata[n].name));
      if (first) names.front().push_back(n);
      if (last && (!first || pp > 1)) names.back().push_back(n);
    }
  }
  for (std::uint32_t r = 0; r < pp; ++r) {
    if (!names[r].empty()) continue;
    return refused(fmt::format("--trainer pp={}: stage {} would hold nothing, since the model has {} layers",
                               pp, r, layers.size()));
  }
  return names;
}

}  // namespace

Result<TrainerLayout> parse_trainer_layout(std::string_view text) {
  TrainerLayout layout;
  const Word words[] = {{"pp", &layout.pp}, {"ep", &layout.ep}, {"fsdp", &layout.fsdp}};
  SHARDPULL_RETURN_IF_ERROR(
      parse_words(text, "--trainer", "pp=N, ep=N and fsdp=N, each at most once, such as pp=2,fsdp=4", words));
  SHARDPULL_RETURN_IF_ERROR(count_of(text, "--trainer", "ranks", words).status());
  return layout;
}

Result<InferenceLayout> parse_inference_layout(std::string_view text) {
  std::uint32_t tp = 0, pp = 1, dp = 1, ep = 1, replicas = 1;
  const Word words[] = {{"tp", &tp}, {"pp", &pp}, {"dp", &dp}, {"ep", &ep}, {"replicas", &replicas}};
  SHARDPULL_RETURN_IF_ERROR(
      parse_words(text, "--inference",
                  "tp=N, pp=N, dp=N, ep=N and replicas=N, each at most once, such as tp=2,pp=1", words));
  if (tp == 0) tp = ep > 1 && ep % dp == 0 ? ep / dp : 1;
  if (ep > 1 && std::uint64_t{ep} != std::uint64_t{tp} * dp) {
    return refused(
        fmt::format("--inference: {}: ep is 1 or tp x dp, the workers of a pipeline stage, which are {} x {}",
                    text, tp, dp));
  }
  const Word processes[] = {{"tp", &tp}, {"pp", &pp}, {"dp", &dp}, {"replicas", &replicas}};
  SHARDPULL_RETURN_IF_ERROR(count_of(text, "--inference", "workers", processes).status());
  InferenceLayout layout;
  layout.tp = static_cast<int>(tp);
  layout.pp = static_cast<int>(pp);
  layout.dp = static_cast<int>(dp);
  layout.ep = static_cast<int>(ep);
  layout.replicas = static_cast<int>(replicas);
  return layout;
}

std::string to_string(const TrainerLayout& layout) {
  std::string text = fmt::format("pp={}", layout.pp);
  if (layout.ep != 1) text += fmt::format(",ep={}", layout.ep);
  if (layout.fsdp != 1) text += fmt::format(",fsdp={}", layout.fsdp);
  return text;
}

std::string to_string(const InferenceLayout& layout) {
  std::string text = fmt::format("tp={},pp={}", layout.tp, layout.pp);
  if (layout.dp != 1) text += fmt::format(",dp={}", layout.dp);
  if (layout.ep != 1) text += fmt::format(",ep={}", layout.ep);
  if (layout.replicas != 1) text += fmt::format(",replicas={}", layout.replicas);
  return text;
}

std::uint32_t workers(const InferenceLayout& layout) {
  return static_cast<std::uint32_t>(layout.workers());
}

Result<std::vector<HeldByRank>> holdings_of(const std::vector<TensorMeta>& metadata, bool tied,
                                            const TrainerLayout& layout) {
  SHARDPULL_ASSIGN_OR_RETURN(const auto stages, names_of_stages(metadata, tied, layout.pp));
  std::map<std::string_view, std::int64_t> experts;  // by ExpertName::owner, how many
  for (const TensorMeta& meta : metadata) {
    const auto name = expert_of(meta.name);
    if (!name) continue;
    std::int64_t& count = experts[name->owner];
    count = std::max(count, name->expert ? *name->expert + 1 : meta.shape.empty() ? 0 : meta.shape[0]);
  }
  std::vector<HeldByRank> ranks;
  ranks.reserve(layout.ranks());
  for (std::uint32_t pp = 0; pp < layout.pp; ++pp) {
    for (std::uint32_t ep = 0; ep < layout.ep; ++ep) {
      for (std::uint32_t fsdp = 0; fsdp < layout.fsdp; ++fsdp) {
        const auto rank = static_cast<std::uint32_t>(ranks.size());
        HeldByRank& held = ranks.emplace_back();
        for (const std::uint32_t name : stages[pp]) {
          const std::vector<std::int64_t>& shape = metadata[name].shape;
          std::optional<Box> box = Box{std::vector<std::int64_t>(shape.size(), 0), shape};
          if (const auto expert = expert_of(metadata[name].name)) {
            const Block mine = block_of(experts[expert->owner], layout.ep, ep);
            if (expert->expert) {
              if (*expert->expert < mine.first || *expert->expert >= mine.first + mine.size) continue;
            } else if (!shape.empty()) {
              box->start[0] = mine.first;
              box->size[0] = mine.size;
              if (mine.size == 0) continue;
            }
          }
          const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
          if (layout.fsdp > 1 && !shape.empty() && !empty) box = fsdp_rows(*box, layout.fsdp, fsdp);
          if (!box) continue;
          if (box->size == shape) {
            held.whole.push_back(name);
          } else {
            held.pieces.push_back({.name = name, .box = std::move(*box), .rank = rank});
          }
        }
        if (held.whole.empty() && held.pieces.empty()) {
          return refused(fmt::format("--trainer {}: rank {} would hold nothing: no tensor has enough rows",
                                     to_string(layout), rank));
        }
      }
    }
  }
  return ranks;
}

}  // namespace shardpull::cli
