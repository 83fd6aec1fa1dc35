// The inference model of a family: which checkpoint name feeds which parameter, and why the others do not.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/families/cuts.h"
#include "model/families/family.h"
#include "shardpull/model.h"

namespace shardpull::families {

// Filled by the builder (families/build.cc), then only read. Thread-compatible.
class FamilyModel final : public Model {
 public:
  // What a checkpoint tensor is to this worker.
  struct Source {
    std::vector<std::int64_t> shape;  // that the config implies
    std::string unused;               // why this worker does not keep it, when nothing is in `targets`
    struct Target {
      Parameter* parameter;
      std::string shard;
    };
    std::vector<Target> targets;
    bool is_fused = false;                      // a key of FamilyModel::fused
    std::shared_ptr<const ExpertCutter> stack;  // of stacked experts: tells which shapes it may have
    std::string stack_shard;

    // Refuses another shape than the config implies, with both.
    Status check_shape(const std::string& name, const std::vector<std::int64_t>& found) const;
  };

  struct NameHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
  };
  std::unordered_map<std::string, Source, NameHash, std::equal_to<>> sources;
  std::unordered_map<const Parameter*, std::vector<std::string>> fed_by;
  std::map<std::string, std::vector<std::string>> fused;  // fused or stacked name -> the names it replaces
  std::vector<IgnoredName> ignored;
  std::string tied_head;  // the name a tied head would have; empty when not tied
  std::string tied_to;
  // Names of layers past the model's own that predict further tokens: those that begin with `prefix` and a
  // number in [first, end).
  struct {
    std::string prefix;
    std::int64_t first = 0, end = 0;
  } prediction_layers;

  Status load_weights(const std::vector<NamedTensor>& weights) override;
  std::string explain_unused(std::string_view name) const override;
  std::vector<std::string> sources_of(const Parameter& parameter) const override;

  // The error for names that this architecture does not have: each with the nearest known one, or one that
  // differs in its prefix alone; then the names that this worker keeps and `given` does not have.
  Status unknown_names(const std::vector<std::string>& unknown,
                       const std::function<bool(std::string_view)>& given) const;
  // A part may come fused (or stacked) or by itself, not both. `given` says whether the checkpoint has a
  // name.
  Status check_fused(const std::function<bool(std::string_view)>& given) const;
};

}  // namespace shardpull::families
