// A trainer rank whose weights are a checkpoint's, held in memory that workers can map.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cli/model_input.h"
#include "plan/plan.h"
#include "shardpull/source.h"
#include "shardpull/status.h"
#include "shardpull/trainer.h"

namespace shardpull::cli {

// Holds the rank's names in one allocation of the engine; each tensor is a storage of its own. Between syncs
// set_version() changes every byte as a training step would (checkpoint/mutate.h). Thread-compatible.
class CheckpointSource final : public WeightSource {
 public:
  // Told, on the thread of send_weights, how many bytes of groups are through since the sync began.
  using Progress = std::function<void(std::uint64_t bytes)>;

  // Loads the names `held` (ascending indices into model.metadata) as version 0. `model` and `trainer` must
  // outlive the source.
  static Result<std::unique_ptr<CheckpointSource>> load(const ModelInput& model,
                                                        std::vector<std::uint32_t> held, Trainer& trainer,
                                                        Progress progress);

  std::vector<TensorMeta> metadata() const override { return model_.metadata; }
  std::vector<std::uint32_t> held_names() const override { return held_; }
  bool in_engine_memory() const override { return true; }
  Result<std::unique_ptr<GroupStream>> iter_groups(const SyncRequest& request) override;

  // Rewrites all held tensors from the version they are at to `version`. Not while a sync runs.
  void set_version(std::uint64_t version);
  std::uint64_t held_bytes() const { return held_bytes_; }

 private:
  class Stream;
  struct Tensor {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    std::vector<std::int64_t> stride;
  };
  CheckpointSource(const ModelInput& model, std::vector<std::uint32_t> held, Progress progress)
      : model_(model), held_(std::move(held)), progress_(std::move(progress)) {}

  const ModelInput& model_;
  const std::vector<std::uint32_t> held_;
  const Progress progress_;
  std::vector<GatherGroup> groups_;
  std::vector<Tensor> tensors_;  // by metadata index; no data where not held
  EngineMemory memory_;
  std::uint64_t held_bytes_ = 0;
  std::uint64_t version_ = 0;
};

}  // namespace shardpull::cli
