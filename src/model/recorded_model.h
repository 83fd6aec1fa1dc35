// Models made from recordings.
#pragma once

#include <memory>

#include "shardpull/bake.h"
#include "shardpull/model.h"
#include "shardpull/status.h"

namespace shardpull {

// A model with the modules, parameters, buffers and aliases of `recording`, to which nothing is ever loaded:
// it says whether such a model can be. Indices have been checked.
Result<std::unique_ptr<Model>> skeleton_of(const Recording& recording);

}  // namespace shardpull
