// What fakes report their copies to during a bake.
#pragma once

#include "shardpull/model.h"
#include "shardpull/status.h"
#include "shardpull/tensor.h"

namespace shardpull {

// Confined to the baking thread.
class Recorder {
 public:
  virtual ~Recorder() = default;
  // A copy of `source` (fake, checked shape) into `destination`.
  virtual Status on_copy(const Tensor& source, const ParameterView& destination) = 0;
  virtual Status on_zero(const ParameterView& destination) = 0;
};

}  // namespace shardpull
