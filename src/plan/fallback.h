// Names that did not bake (BakeOptions::unbaked = fallback): pulled whole, then loaded by the model's own loaders.
//
// A plan knows them as modules of their own. Names and modules that did not bake are joined where one feeds the
// other; each set of modules that no name joins with others becomes one more module of the recording, after the
// model's: a FALLBACK MODULE, with one parameter per name, as large as the tensor, into which the whole tensor is
// copied. So pieces, chunks, paths, sums, signals, takeovers and syncs of some names are those of any module, and
// loading is what is done after its last chunk: where another module is post-processed, a fallback module is
// loaded. It holds the bytes by then, whether or not their group has been freed.
#pragma once

#include <cstdint>
#include <vector>

#include "shardpull/bake.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

struct FallbackModule {
  std::vector<std::uint32_t> names;    // ascending; parameter i of the module is names[i]
  std::vector<std::uint32_t> modules;  // of the model: what loading them writes, ascending
};

// Ascending by first name. Empty when everything baked.
std::vector<FallbackModule> fallback_modules(const Recording& recording);

// `recording` with the fallback modules behind its own, for plans: what plan_worker and restrict_plan want. The
// same recording when there are none. Of a recording with fallbacks of metadata this long.
Result<Recording> with_fallbacks(const Recording& recording, const std::vector<TensorMeta>& metadata);

}  // namespace shardpull
