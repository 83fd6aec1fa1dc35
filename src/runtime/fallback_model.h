// The model of what did not bake (plan/fallback.h): one module per fallback module of a planned recording, whose
// parameters are whole checkpoint tensors and whose hook runs the worker's own loaders over them.
#pragma once

#include <memory>
#include <vector>

#include "plan/fallback.h"
#include "shardpull/bake.h"
#include "shardpull/model.h"
#include "shardpull/status.h"

namespace shardpull {

class FallbackModel final : public Model {
 public:
  // `baked`: the recording with fallbacks; `planned`: with_fallbacks of it. `target` must outlive it. Takes
  // memory for all tensors: RESOURCE_EXHAUSTED says what they are and what makes them unnecessary.
  //
  // The hooks run `target`'s loaders over the tensors, into the modules that did not bake and no others, and then
  // these modules' own hooks. They, and nothing else, may use `target`'s loaders meanwhile.
  static Result<std::unique_ptr<FallbackModel>> make(Model& target, const Recording& baked,
                                                     const Recording& planned);

  Status load_weights(const std::vector<NamedTensor>& weights) override;  // refused: it is loaded by syncs

 private:
  explicit FallbackModel(Model& target) : target_(target) {}
  Status load(const Module& from, const std::vector<std::uint32_t>& modules) const;

  Model& target_;
};

}  // namespace shardpull
