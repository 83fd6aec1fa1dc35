#include "plan/fallback.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "plan/plan_errors.h"
#include "tensor/shape.h"
#include "tensor/strided_view.h"

namespace shardpull {

std::vector<FallbackModule> fallback_modules(const Recording& recording) {
  // Names joined by the modules they share: union and find over the modules.
  std::vector<std::uint32_t> parent(recording.modules.size());
  std::iota(parent.begin(), parent.end(), 0u);
  const auto root = [&](std::uint32_t module) {
    while (parent[module] != module) module = parent[module] = parent[parent[module]];
    return module;
  };
  std::map<std::uint32_t, std::uint32_t> module_of;  // a name's first
  for (const RecordedFallback& fallback : recording.fallbacks) {
    const auto [first, fresh] = module_of.emplace(fallback.name, fallback.module);
    if (!fresh) parent[root(fallback.module)] = root(first->second);
  }
  std::map<std::uint32_t, FallbackModule> by_root;
  for (const RecordedFallback& fallback : recording.fallbacks) {
    FallbackModule& made = by_root[root(fallback.module)];
    made.names.push_back(fallback.name);
    made.modules.push_back(fallback.module);
  }
  std::vector<FallbackModule> found;
  for (auto& [first, made] : by_root) {
    for (auto* const list : {&made.names, &made.modules}) {
      std::sort(list->begin(), list->end());
      list->erase(std::unique(list->begin(), list->end()), list->end());
    }
    found.push_back(std::move(made));
  }
  std::sort(found.begin(), found.end(),
            [](const FallbackModule& a, const FallbackModule& b) { return a.names < b.names; });
  return found;
}

Result<Recording> with_fallbacks(const Recording& recording, const std::vector<TensorMeta>& metadata) {
  Recording planned = recording;
  for (const FallbackModule& fallback : fallback_modules(recording)) {
    const auto module = static_cast<std::uint32_t>(planned.modules.size());
    const std::string& first = recording.modules[fallback.modules.front()].name;
    // No name of the model's own has a blank and a bracket in it by chance.
    RecordedModule& made = planned.modules.emplace_back();
    made.name = fmt::format("{} (by its loaders)", first);
    made.type = "fallback";
    made.baked = true;
    made.has_post_process = true;
    for (const std::uint32_t name : fallback.names) {
      if (name >= metadata.size()) return plan_error(fmt::format("fallback of name {} of {}", name, metadata.size()));
      const TensorMeta& meta = metadata[name];
      SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t numel, checked_numel(meta.dtype, meta.shape));
      const std::vector<std::int64_t> stride = contiguous_strides(meta.shape);
      planned.scatters.push_back({.name = name,
                                  .wire_dtype = meta.dtype,
                                  .slice = Slice::whole(numel),
                                  .shape = meta.shape,
                                  .chain = {},
                                  .destination = {.parameter = static_cast<std::uint32_t>(planned.parameters.size()),
                                                  .dtype = meta.dtype,
                                                  .offset = 0,
                                                  .shape = meta.shape,
                                                  .stride = stride}});
      planned.parameters.push_back(
          {.module = module, .name = meta.name, .dtype = meta.dtype, .shape = meta.shape, .stride = stride});
    }
  }
  planned.unbaked.clear();
  planned.fallbacks.clear();
  return planned;
}

}  // namespace shardpull
