// Building blocks of this room's tests: whole fleets inside one process (real machines, drivers, shm
// transport and gRPC control, one thread a rank) over tensors, holdings and models that are written down as
// boxes, and an independent reference that compares every byte by plain index arithmetic.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "shardpull/shardpull.h"

namespace shardpull::fleet_testing {

// The position code: byte `i` of tensor `name` at `version`.
std::byte code(std::uint32_t name, std::uint64_t version, std::uint64_t i);
// What byte `i` of a tensor is; where tensors share memory, something else than code().
using Content = std::function<std::byte(std::uint32_t name, std::uint64_t version, std::uint64_t i)>;

Box box(std::vector<std::int64_t> start, std::vector<std::int64_t> size);
// Rows [first, first + count) of dim `dim`, everything of the others.
Box cut(const TensorMeta& meta, std::size_t dim, std::int64_t first, std::int64_t count);

// ---- the trainer side -----------------------------------------------------------------------------------

// How a held tensor lies in memory.
enum class Lie : std::uint8_t {
  kRowMajor,
  kColumnMajor,  // strides ascend
  kPadded,       // every innermost row is followed by a gap
  kRestless,     // row-major in syncs of even versions, column-major in the others
};

// What one rank holds and how.
struct RankSpec {
  std::vector<std::uint32_t> whole;
  std::vector<Piece> pieces;
  Lie lie = Lie::kRowMajor;
  bool engine_memory = true;
  bool resident = false;
  PublishMode publish = PublishMode::kAuto;
  // Where its tensors lie, all in one storage: first byte and strides in elements, one for each whole name
  // and piece, by name. Empty: each has a storage of its own and lies as `lie` says.
  struct Place {
    std::int64_t offset = 0;
    std::vector<std::int64_t> stride;
  };
  std::vector<Place> places;
};

// fully_shard: rank r of n holds rows [r c, (r + 1) c) of dim `dim`, c = ceil(rows / n), of every tensor that
// has that dim; rank 0 holds the others whole. Ranks past the end hold nothing of a tensor.
std::vector<RankSpec> sharded(const std::vector<TensorMeta>& metadata, std::uint32_t ranks,
                              std::size_t dim = 0);

// A source over position-coded memory. What it has been told is free is overwritten at once.
class BoxSource final : public WeightSource {
 public:
  // Tells the thread of send_weights' source what to break: called with every group before it is yielded.
  using Tamper = std::function<Status(std::uint64_t version, GroupTensors& tensors)>;

  BoxSource(Trainer& engine, const std::vector<TensorMeta>& metadata, RankSpec spec, Tamper tamper,
            Content content);
  ~BoxSource() override;
  // Writes all tensors as of `version`.
  void set_version(std::uint64_t version);

  std::vector<TensorMeta> metadata() const override { return metadata_; }
  std::vector<std::uint32_t> held_names() const override { return spec_.whole; }
  std::vector<Piece> held_pieces() const override { return spec_.pieces; }
  bool resident() const override { return spec_.resident; }
  bool in_engine_memory() const override { return spec_.engine_memory; }
  Result<std::unique_ptr<GroupStream>> iter_groups(const SyncRequest& request) override;

  // Groups yielded and not let go, now and at most; streams not closed; groups yielded in the last pass.
  int held_groups = 0, peak_groups = 0, open_streams = 0, yielded = 0;

 private:
  class Stream;
  struct Held;
  std::vector<TensorMeta> metadata_;
  RankSpec spec_;
  Tamper tamper_;
  Content content_;
  std::vector<Held> held_;
  std::vector<std::vector<std::uint32_t>> groups_;
};

// ---- the worker side ------------------------------------------------------------------------------------

// A box of a checkpoint tensor, at `at` of the parameter; `transposed`: with its (two) dims exchanged.
struct Feed {
  std::uint32_t name = 0;
  Box part;
  std::vector<std::int64_t> at;
  bool transposed = false;
};
// A module with one parameter, "weight". `stride` empty: contiguous.
struct ModuleSpec {
  std::string name;
  DType dtype = DType::kBF16;
  std::vector<std::int64_t> shape, stride;
  std::vector<Feed> feeds;
  bool unattributed = false;  // its copies are made outside Parameter::load: it does not bake
};
using ModelSpec = std::vector<ModuleSpec>;

// A module of the same name for each tensor: dim `dim` cut for worker `rank` of `tp`, where that divides;
// everything of the others.
ModelSpec tensor_parallel(const std::vector<TensorMeta>& metadata, std::uint32_t rank, std::uint32_t tp,
                          std::size_t dim = 0);

class BoxModel final : public Model {
 public:
  BoxModel(const std::vector<TensorMeta>& metadata, ModelSpec spec);
  Status load_weights(const std::vector<NamedTensor>& weights) override;
  std::string explain_unused(std::string_view) const override { return "not kept by this worker"; }

 private:
  std::vector<TensorMeta> metadata_;
  ModelSpec spec_;
};

// The bytes of a module's parameter that holds the versions `version_of` (by name; none: never sent), before
// its first sync filled with 0xCD.
std::vector<std::byte> expected_bytes(const std::vector<TensorMeta>& metadata, const ModuleSpec& module,
                                      const std::vector<std::optional<std::uint64_t>>& version_of,
                                      const Content& content);

// The first byte of `model` (filled with 0xCD before its first sync) that is not what `version_of` (by name;
// none: never sent) says, or "".
std::string first_difference(const Model& model, const std::vector<TensorMeta>& metadata,
                             const ModelSpec& spec,
                             const std::vector<std::optional<std::uint64_t>>& version_of,
                             const Content& content);

// ---- the fleet ------------------------------------------------------------------------------------------

struct Step {
  std::uint64_t version = 0;
  std::vector<std::string> names = {};  // SendOptions::names
  bool fails = false;
  // Staged: fails in its commit, so that what it was to move may be half written.
  bool torn = false;
};

struct FleetSpec {
  std::vector<TensorMeta> metadata;
  std::vector<RankSpec> ranks;
  std::vector<ModelSpec> workers;
  std::uint32_t replicas = 1;
  std::vector<Step> steps = {{0}, {1}, {2}};
  Content content = code;
  // What of options the test changes.
  std::function<void(std::uint32_t rank, TrainerOptions&)> trainer_options = nullptr;
  std::function<void(std::uint32_t worker, WorkerOptions&)> worker_options = nullptr;
  std::function<Status(std::uint32_t rank, std::uint64_t version, GroupTensors&)> tamper = nullptr;
  std::function<Status(std::uint32_t worker, Model&)> bind = nullptr;  // gives parameters memory of its own
  std::function<std::vector<std::string>(std::uint32_t rank, const Step&)> names = nullptr;
  // Runs on a thread of its own beside each worker's serve(); `ended`: it has returned.
  std::function<void(std::uint32_t worker, const Worker&, const Model&, const std::atomic<bool>& ended)>
      reader = nullptr;
  Status end = {};  // what all ranks shut down with, at the end
};

struct FleetOutcome {
  std::vector<Status> inits, connects, serves;        // by rank, by worker, by worker
  std::vector<std::vector<Status>> sends, syncs;      // by rank, by worker; in the order of the steps
  std::vector<SyncReport> reports;                    // the sender's, of the steps that succeeded
  std::vector<std::vector<WorkerReport>> at_workers;  // by worker, of the steps that succeeded
  std::vector<int> peak_groups;                       // by rank
  std::vector<std::vector<int>> yielded;              // by rank, by step
  std::vector<std::string> problems;                  // wrong bytes, versions or reports
  std::vector<std::uint64_t> hashes;                  // of all parameters of all workers, by successful step
  std::vector<std::uint64_t> engine_bytes;            // by rank
};

// Runs all steps. Checks every byte and every module's version after each successful sync, that what was
// moved is what is kept, and the guards around parameters.
FleetOutcome run_fleet(const FleetSpec& spec);
// The same, and expects that everything went as the steps say.
FleetOutcome expect_exact(const FleetSpec& spec);

}  // namespace shardpull::fleet_testing
