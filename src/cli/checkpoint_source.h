// A trainer rank whose weights are a checkpoint's, held in memory that workers can map.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cli/model_input.h"
#include "plan/layout_file.h"
#include "plan/plan.h"
#include "shardpull/source.h"
#include "shardpull/status.h"
#include "shardpull/trainer.h"

namespace shardpull::cli {

// What a rank keeps and what it serves (cli/trainer_side.h).
struct SourceOptions {
  HeldByRank kept;
  HeldByRank served;
  bool resident = false;
  std::uint32_t resident_groups = 2;  // gathered ones, lookahead + 1
};

// Keeps the rank's names and pieces in one allocation of the engine; each is a storage of its own. Between
// syncs set_version() changes every byte as a training step would (checkpoint/mutate.h).
//
// Where `served` has more than `kept`, next() gathers: the group's tensors are put together in one of
// `resident_groups` buffers, from the rank's own memory and, for what other ranks keep, from the checkpoint
// (the ranks of this command have no collective of their own). A buffer is used again once its group is
// released.
//
// Thread-compatible.
class CheckpointSource final : public WeightSource {
 public:
  // Told, on the thread of send_weights, how many bytes of groups are through since the sync began.
  using Progress = std::function<void(std::uint64_t bytes)>;

  // Loads what is kept as version 0. `model` and `trainer` must outlive the source.
  static Result<std::unique_ptr<CheckpointSource>> load(const ModelInput& model, SourceOptions options,
                                                        Trainer& trainer, Progress progress);

  std::vector<TensorMeta> metadata() const override { return model_.metadata; }
  std::vector<std::uint32_t> held_names() const override { return options_.served.whole; }
  std::vector<Piece> held_pieces() const override { return options_.served.pieces; }
  bool in_engine_memory() const override { return true; }
  bool resident() const override { return options_.resident; }
  Result<std::unique_ptr<GroupStream>> iter_groups(const SyncRequest& request) override;

  // Rewrites what is kept of `names` (ascending; empty: of all names) from the version it is at to `version`.
  // Not while a sync runs.
  void set_version(std::uint64_t version, const std::vector<std::uint32_t>& names = {});
  std::uint64_t held_bytes() const { return held_bytes_; }
  std::uint64_t gather_bytes() const { return gather_memory_.bytes; }

 private:
  class Stream;
  // A name or piece in memory, row-major.
  struct Slab {
    std::uint32_t name = 0;
    Box box;  // written out
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
  };
  CheckpointSource(const ModelInput& model, SourceOptions options, Progress progress)
      : model_(model), options_(std::move(options)), progress_(std::move(progress)) {}
  Result<std::vector<Slab>> slabs_of(const HeldByRank& held) const;
  std::span<const Slab> served_of(std::uint32_t group) const;
  Status allocate(Trainer& trainer);
  Status read(const Slab& slab) const;
  Status gather(const Slab& slab, std::byte* to) const;

  const ModelInput& model_;
  const SourceOptions options_;
  const Progress progress_;
  std::vector<GatherGroup> groups_;
  std::vector<Slab> kept_, served_;  // ascending by name; the served ones have data where nothing is gathered
  std::vector<std::uint64_t> version_;  // of each name, by metadata index
  bool gathers_ = false;
  EngineMemory memory_, gather_memory_;
  std::uint64_t gather_buffer_bytes_ = 0;
  std::uint64_t held_bytes_ = 0;
};

}  // namespace shardpull::cli
