// Whole fleets inside one process: real machines, drivers, shm transport and gRPC control, one thread a rank.
// Goal: after every sync each worker's parameters equal an independently cut slice, and every failure reaches
// everybody and leaves the fleet able to run the next sync.
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/identity.h"
#include "base/mutex.h"
#include "shardpull/shardpull.h"

namespace shardpull {
namespace {

constexpr std::int64_t kHidden = 48, kRows = 40;
constexpr int kLayers = 5;

// Layer names and shapes: a matrix cut by rows, one cut by columns, a replicated vector; an embedding and a
// norm outside.
std::vector<TensorMeta> test_metadata() {
  std::vector<TensorMeta> metadata{{"embed.weight", DType::kBF16, {kRows, kHidden}}};
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    metadata.push_back({prefix + "down.weight", DType::kBF16, {kHidden, kRows}});
    metadata.push_back({prefix + "norm.weight", DType::kF32, {kHidden}});
    metadata.push_back({prefix + "up.weight", DType::kBF16, {kRows, kHidden}});
  }
  metadata.push_back({"norm.weight", DType::kF32, {kHidden}});
  return metadata;
}

// The position code: byte `i` of `name` at `version`.
std::byte code(std::uint32_t name, std::uint64_t version, std::uint64_t i) {
  std::uint64_t x = (i / 8 + 1) * 0x9E3779B97F4A7C15ull ^ (name + 1) * 0xC2B2AE3D27D4EB4Full ^
                    (version + 1) * 0x165667B19E3779F9ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  return static_cast<std::byte>(x >> (8 * (i % 8)));
}

std::uint64_t bytes_of_meta(const TensorMeta& meta) {
  return *bytes_of(meta.dtype, std::accumulate(meta.shape.begin(), meta.shape.end(), std::int64_t{1},
                                               std::multiplies<>()));
}

// One of `tp` workers. Each layer's "up" is cut by rows, "down" by columns; "embed" by rows.
class TestModel final : public Model {
 public:
  static std::unique_ptr<TestModel> make(int rank, int tp) {
    auto model = std::make_unique<TestModel>();
    model->cut_ = [rank, tp](const Tensor& tensor, std::int64_t dim) {
      const std::int64_t part = tensor.size(dim) / tp;
      return tensor.narrow(dim, rank * part, part);
    };
    model->add("embed", DType::kBF16, {kRows / tp, kHidden});
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string prefix = "layers." + std::to_string(layer) + ".";
      model->add(prefix + "down", DType::kBF16, {kHidden, kRows / tp});
      model->add(prefix + "norm", DType::kF32, {kHidden});
      model->add(prefix + "up", DType::kBF16, {kRows / tp, kHidden});
    }
    model->add("norm", DType::kF32, {kHidden});
    return model;
  }
  Status load_weights(const std::vector<NamedTensor>& weights) override {
    for (const NamedTensor& weight : weights) {
      const std::string module = weight.name.substr(0, weight.name.size() - std::strlen(".weight"));
      Parameter& parameter = *find_module(module)->find("weight");
      Result<Tensor> part = weight.tensor;
      if (module.ends_with("up") || module == "embed") part = cut_(weight.tensor, 0);
      if (module.ends_with("down")) part = cut_(weight.tensor, 1);
      if (!part.ok()) return part.status();
      const Status status = parameter.load(*part);
      if (!status.ok()) return status;
    }
    return {};
  }

 private:
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
    Module* module = *add_module(name, "Linear");
    ASSERT_TRUE(module->add_parameter("weight", dtype, std::move(shape)).ok());
  }
  std::function<Result<Tensor>(const Tensor&, std::int64_t)> cut_;
};

// Compares every parameter with bytes cut by plain index arithmetic.
std::string first_difference(const Model& model, int rank, int tp, std::uint64_t version) {
  const std::vector<TensorMeta> metadata = test_metadata();
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    const std::string module =
        metadata[name].name.substr(0, metadata[name].name.size() - std::strlen(".weight"));
    const std::byte* memory = model.find_module(module)->find("weight")->memory();
    std::vector<std::uint64_t> sources;  // source byte of each destination byte
    if (module.ends_with("up") || module == "embed") {
      const std::uint64_t bytes = bytes_of_meta(metadata[name]) / static_cast<std::uint64_t>(tp);
      for (std::uint64_t i = 0; i < bytes; ++i)
        sources.push_back(static_cast<std::uint64_t>(rank) * bytes + i);
    } else if (module.ends_with("down")) {
      const std::uint64_t row = 2 * kRows, part = row / static_cast<std::uint64_t>(tp);
      for (std::uint64_t r = 0; r < kHidden; ++r) {
        for (std::uint64_t i = 0; i < part; ++i)
          sources.push_back(r * row + static_cast<std::uint64_t>(rank) * part + i);
      }
    } else {
      for (std::uint64_t i = 0; i < bytes_of_meta(metadata[name]); ++i) sources.push_back(i);
    }
    for (std::uint64_t i = 0; i < sources.size(); ++i) {
      if (memory[i] != code(name, version, sources[i])) {
        return metadata[name].name + " byte " + std::to_string(i) + " of worker " + std::to_string(rank);
      }
    }
  }
  return {};
}

// What a test may do to the source.
struct SourceFault {
  int at_version = -1;
  enum Kind { kNone, kError, kEndsEarly, kSurplus, kDtype, kShape, kReleased, kMissing } kind = kNone;
};

// Holds the names of every group g with g % world == rank; one storage a tensor, in engine memory or in
// vectors.
class TestSource final : public WeightSource {
 public:
  TestSource(Trainer* engine, std::uint32_t rank, std::uint32_t world, SourceFault fault) : fault_(fault) {
    metadata_ = test_metadata();
    const auto group_of = [](std::uint32_t name) {
      return name == 0 ? 0u : name == 1 + 3 * kLayers ? kLayers + 1 : 1 + (name - 1) / 3;
    };
    for (std::uint32_t name = 0; name < metadata_.size(); ++name) {
      groups_.resize(group_of(name) + 1);
      groups_.back().push_back(name);
      if (group_of(name) % world != rank) continue;
      held_.push_back(name);
      const std::uint64_t bytes = bytes_of_meta(metadata_[name]);
      if (engine != nullptr) {
        memory_.push_back(*engine->allocate(bytes));
      } else {
        auto owned = std::make_shared<std::vector<std::byte>>(bytes);
        memory_.push_back({owned->data(), bytes, owned});
      }
    }
    engine_memory_ = engine != nullptr;
  }
  void set_version(std::uint64_t version) {
    for (std::size_t i = 0; i < held_.size(); ++i) {
      for (std::uint64_t b = 0; b < bytes_of_meta(metadata_[held_[i]]); ++b)
        memory_[i].data[b] = code(held_[i], version, b);
    }
  }
  std::vector<TensorMeta> metadata() const override { return metadata_; }
  std::vector<std::uint32_t> held_names() const override { return held_; }
  bool in_engine_memory() const override { return engine_memory_; }
  Result<std::unique_ptr<GroupStream>> iter_groups(const SyncRequest& request) override {
    return std::unique_ptr<GroupStream>(std::make_unique<Stream>(*this, request));
  }
  int resident = 0, peak_resident = 0, streams = 0;

 private:
  class Stream final : public GroupStream {
   public:
    Stream(TestSource& source, const SyncRequest& request) : source_(source), request_(request) {
      ++source_.streams;
    }
    ~Stream() override { --source_.streams; }
    Result<std::optional<GroupTensors>> next() override {
      const bool faulty = static_cast<int>(request_.version) == source_.fault_.at_version && at_ == 1;
      const auto kind = faulty ? source_.fault_.kind : SourceFault::kNone;
      if (kind == SourceFault::kError) return Status(StatusCode::kInternal, "the gather broke");
      if (kind == SourceFault::kEndsEarly) return std::optional<GroupTensors>();
      const bool surplus = source_.fault_.kind == SourceFault::kSurplus &&
                           static_cast<int>(request_.version) == source_.fault_.at_version &&
                           at_ == request_.groups.size();
      if (at_ == request_.groups.size() && !surplus) return std::optional<GroupTensors>();
      GroupTensors tensors;
      tensors.group = request_.groups[surplus ? 0 : at_++];
      for (const std::uint32_t name : source_.groups_[tensors.group]) {
        NamedView entry{name, 0, std::nullopt};
        for (std::size_t i = 0; i < source_.held_.size(); ++i) {
          if (source_.held_[i] == name) entry.view = source_.view(i);
        }
        tensors.tensors.push_back(entry);
      }
      TensorView& first = *tensors.tensors[0].view;
      if (kind == SourceFault::kDtype) first.dtype = DType::kF16;
      if (kind == SourceFault::kShape) first.shape[0] += 1;
      if (kind == SourceFault::kReleased) first.storage_bytes -= 1;
      if (kind == SourceFault::kMissing) tensors.tensors[0].view.reset();
      source_.peak_resident = std::max(source_.peak_resident, ++source_.resident);
      return std::optional<GroupTensors>(std::move(tensors));
    }
    void released(std::uint32_t) override { --source_.resident; }

   private:
    TestSource& source_;
    const SyncRequest request_;
    std::size_t at_ = 0;
  };
  TensorView view(std::size_t i) const {
    const TensorMeta& meta = metadata_[held_[i]];
    TensorView view{memory_[i].data, meta.dtype, meta.shape, {}, memory_[i].data, bytes_of_meta(meta)};
    view.stride.assign(meta.shape.size(), 1);
    for (std::size_t d = meta.shape.size(); d-- > 1;) view.stride[d - 1] = view.stride[d] * meta.shape[d];
    return view;
  }

  std::vector<TensorMeta> metadata_;
  std::vector<std::vector<std::uint32_t>> groups_;
  std::vector<std::uint32_t> held_;
  std::vector<EngineMemory> memory_;
  SourceFault fault_;
  bool engine_memory_ = false;
};

struct FleetCase {
  std::uint32_t trainers = 2, workers = 2, lookahead = 1, ring_depth = 2;
  PathChoice path = PathChoice::kAuto;
  std::uint64_t export_pack_limit = 64ull << 20, max_chunk_bytes = 64ull << 20;
  bool engine_memory = true;
  SourceFault fault;
  std::uint64_t connect_timeout_ms = 20'000;
};

// A fleet that runs `versions` and checks every byte after each OK sync.
class Fleet {
 public:
  explicit Fleet(const FleetCase& given) : given_(given) {
    char path[] = "/tmp/shardpull-test-XXXXXX";
    directory_ = ::mkdtemp(path);
    fleet_.directory = directory_;
    fleet_.token = random_nonzero_u64();
    fleet_.connect_timeout_ms = given.connect_timeout_ms;
    fleet_.stall_timeout_ms = 20'000;
  }
  ~Fleet() { std::filesystem::remove_all(directory_); }

  // Statuses of send_weights by rank and version; of serve by worker.
  std::vector<std::vector<Status>> sends;
  std::vector<Status> inits, serves, connects;
  std::vector<std::vector<Status>> syncs;  // by worker, in order
  std::vector<std::string> differences;
  std::vector<SyncReport> reports;  // the sender's
  std::vector<int> peak_resident, open_streams;

  void run(const std::vector<std::uint64_t>& versions,
           const std::function<void(WorkerOptions&)>& change_worker = nullptr,
           const std::function<void(TrainerOptions&)>& change_trainer = nullptr,
           std::uint32_t absent_trainer = ~0u) {
    sends.resize(given_.trainers);
    inits.resize(given_.trainers);
    peak_resident.assign(given_.trainers, 0);
    open_streams.assign(given_.trainers, 0);
    serves.resize(given_.workers);
    connects.resize(given_.workers);
    syncs.resize(given_.workers);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < given_.trainers; ++rank) {
      if (rank == absent_trainer) continue;
      threads.emplace_back([&, rank] { train(rank, versions, change_trainer); });
    }
    for (std::uint32_t worker = 0; worker < given_.workers; ++worker) {
      threads.emplace_back([&, worker] { work(worker, change_worker); });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void train(std::uint32_t rank, const std::vector<std::uint64_t>& versions,
             const std::function<void(TrainerOptions&)>& change) {
    TrainerOptions options;
    options.fleet = fleet_;
    options.rank = rank;
    options.world_size = given_.trainers;
    options.num_consumers = given_.workers;
    options.lookahead = given_.lookahead;
    options.ring_depth = given_.ring_depth;
    options.export_pack_limit_bytes = given_.export_pack_limit;
    if (change) change(options);
    auto trainer = Trainer::create(options);
    inits[rank] = trainer.status();
    if (!trainer.ok()) return;
    TestSource source(given_.engine_memory ? trainer->get() : nullptr, rank, given_.trainers, given_.fault);
    inits[rank] = (*trainer)->init(source);
    if (!inits[rank].ok()) return;
    for (const std::uint64_t version : versions) {
      source.set_version(version);
      auto report = (*trainer)->send_weights(version);
      sends[rank].push_back(report.status());
      if (rank == 0 && report.ok()) reports.push_back(*report);
      open_streams[rank] += source.streams;
    }
    peak_resident[rank] = source.peak_resident;
    EXPECT_EQ(source.resident, 0) << "rank " << rank;
    (*trainer)->shutdown();
  }
  void work(std::uint32_t id, const std::function<void(WorkerOptions&)>& change) {
    auto model = TestModel::make(static_cast<int>(id), static_cast<int>(given_.workers));
    ASSERT_TRUE(model->materialise(std::byte{0xCD}, 64).ok());
    WorkerOptions options;
    options.fleet = fleet_;
    options.consumer = id;
    options.path = given_.path;
    options.max_chunk_bytes = given_.max_chunk_bytes;
    if (change) change(options);
    auto worker = Worker::connect(options, *model);
    connects[id] = worker.status();
    if (!worker.ok()) return;
    serves[id] =
        (*worker)->serve([&](std::uint64_t version, const Status& status, const WorkerReport& report) {
          syncs[id].push_back(status);
          // Even: the parameters are one version. After a failed sync only if it had not started here.
          const bool even = (*worker)->version_guard().load() % 2 == 0;
          EXPECT_TRUE(status.ok() ? even : !even || (*worker)->version().ok()) << status.to_string();
          std::string difference;
          if (status.ok()) {
            difference =
                first_difference(*model, static_cast<int>(id), static_cast<int>(given_.workers), version);
            EXPECT_EQ(report.bytes_moved, report.bytes_kept);
            EXPECT_EQ(*(*worker)->version(), version);
          }
          if (!model->check_guards().ok()) difference += " guards";
          MutexLock lock(mutex_);
          if (!difference.empty()) differences.push_back(difference);
        });
  }

  const FleetCase given_;
  std::string directory_;
  FleetOptions fleet_;
  Mutex mutex_;
};

void expect_exact(const FleetCase& given) {
  Fleet fleet(given);
  fleet.run({0, 1, 2, 3});
  for (const auto& status : fleet.inits) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const auto& rank : fleet.sends) {
    EXPECT_EQ(rank.size(), 4u);
    for (const auto& status : rank) EXPECT_TRUE(status.ok()) << status.to_string();
  }
  for (const auto& worker : fleet.syncs) {
    EXPECT_EQ(worker.size(), 4u);
    for (const auto& status : worker) EXPECT_TRUE(status.ok()) << status.to_string();
  }
  for (const auto& status : fleet.serves) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(fleet.differences.empty()) << fleet.differences[0];
  for (const int peak : fleet.peak_resident) EXPECT_LE(peak, static_cast<int>(given.lookahead) + 1);
  ASSERT_EQ(fleet.reports.size(), 4u);
  EXPECT_EQ(fleet.reports[0].workers.size(), given.workers);
  EXPECT_EQ(fleet.reports[0].ranks.size(), given.trainers);
}

TEST(Runtime, exact_over_paths_depths_and_lookaheads) {
  for (const PathChoice path : {PathChoice::kPacked, PathChoice::kMapped}) {
    for (const std::uint32_t lookahead : {0u, 1u, 3u}) {
      for (const std::uint32_t ring_depth : {1u, 2u, 4u}) {
        FleetCase given;
        given.path = path;
        given.lookahead = lookahead;
        given.ring_depth = ring_depth;
        SCOPED_TRACE(std::to_string(static_cast<int>(path)) + " " + std::to_string(lookahead) + " " +
                     std::to_string(ring_depth));
        expect_exact(given);
      }
    }
  }
}

TEST(Runtime, exact_for_several_fleet_sizes_and_small_chunks) {
  for (const std::uint32_t trainers : {1u, 3u}) {
    for (const std::uint32_t workers : {1u, 4u}) {
      for (const PathChoice path : {PathChoice::kPacked, PathChoice::kMapped}) {
        FleetCase given;
        given.trainers = trainers;
        given.workers = workers;
        given.path = path;
        given.max_chunk_bytes = 512;
        expect_exact(given);
      }
    }
  }
}

TEST(Runtime, exact_when_nothing_is_packed_into_export_buffers) {
  for (const PathChoice path : {PathChoice::kPacked, PathChoice::kMapped}) {
    FleetCase given;
    given.path = path;
    given.export_pack_limit = 0;
    expect_exact(given);
  }
}

TEST(Runtime, foreign_memory_above_the_pack_limit_is_packed) {
  FleetCase given;
  given.engine_memory = false;
  given.export_pack_limit = 1000;
  expect_exact(given);
}

// A source that breaks its promise fails the sync on every rank and worker, with a message that says what;
// the next sync works.
TEST(Runtime, case_095_a_broken_source_fails_one_sync_everywhere_and_the_next_one_works) {
  const std::vector<std::pair<SourceFault::Kind, std::string>> kinds{
      {SourceFault::kError, "the gather broke"},     {SourceFault::kEndsEarly, "ended before group"},
      {SourceFault::kSurplus, "after its last one"}, {SourceFault::kDtype, "the metadata says BF16"},
      {SourceFault::kShape, "the metadata says ["},  {SourceFault::kReleased, "does not hold them"},
      {SourceFault::kMissing, "carries no tensor"}};
  for (const auto& [kind, message] : kinds) {
    for (const PathChoice path : {PathChoice::kPacked, PathChoice::kMapped}) {
      SCOPED_TRACE(message);
      FleetCase given;
      given.path = path;
      given.fault = {1, kind};
      Fleet fleet(given);
      fleet.run({0, 1, 2});
      for (const auto& rank : fleet.sends) {
        ASSERT_EQ(rank.size(), 3u);
        EXPECT_TRUE(rank[0].ok()) << rank[0].to_string();
        EXPECT_FALSE(rank[1].ok());
        EXPECT_NE(rank[1].message().find(message), std::string::npos) << rank[1].to_string();
        EXPECT_TRUE(rank[2].ok()) << rank[2].to_string();
      }
      for (const auto& worker : fleet.syncs) {
        ASSERT_EQ(worker.size(), 3u);
        EXPECT_FALSE(worker[1].ok());
        EXPECT_TRUE(worker[2].ok()) << worker[2].to_string();
      }
      EXPECT_TRUE(fleet.differences.empty());
      for (const int open : fleet.open_streams) EXPECT_EQ(open, 0);  // the source was closed each time
    }
  }
}

TEST(Runtime, a_worker_with_another_ring_depth_is_refused_naming_both) {
  Fleet fleet({});
  fleet.run({0}, [](WorkerOptions& options) {
    if (options.consumer == 1) options.ring_depth = 3;
  });
  EXPECT_NE(fleet.connects[1].message().find("ring_depth differs: worker 1 has 3, the trainers have 2"),
            std::string::npos)
      << fleet.connects[1].to_string();
  EXPECT_NE(fleet.inits[0].message().find("worker 1"), std::string::npos) << fleet.inits[0].to_string();
}

// Goal: an engine that moves experts between slots at run time is refused before it bakes, for whatever
// reason it may not be said not to, and the sender hears why.
TEST(Runtime, case_040_a_worker_whose_engine_moves_experts_is_refused_at_init) {
  for (const std::optional<bool> enable_eplb : {std::optional(true), std::optional<bool>()}) {
    SCOPED_TRACE(enable_eplb ? "on" : "unknown");
    Fleet fleet({});
    fleet.run({0}, [&](WorkerOptions& options) {
      if (options.consumer == 1) options.enable_eplb = enable_eplb;
    });
    EXPECT_EQ(fleet.connects[1].code(), StatusCode::kUnimplemented);
    EXPECT_EQ(fleet.inits[0].message().find("worker 1: "), 0U) << fleet.inits[0].to_string();
    for (const Status& status : {fleet.connects[1], fleet.inits[0]}) {
      EXPECT_NE(status.message().find("the engine moves experts at run time"), std::string::npos)
          << status.to_string();
      EXPECT_EQ(status.message().find("is not known (enable_eplb)") == std::string::npos,
                enable_eplb.has_value());
    }
  }
}

TEST(Runtime, trainers_with_other_settings_are_refused_naming_both) {
  Fleet fleet({.connect_timeout_ms = 5'000});
  fleet.run({0}, nullptr, [](TrainerOptions& options) {
    if (options.rank == 1) options.lookahead = 5;
  });
  for (const auto& status : fleet.inits) {
    EXPECT_NE(status.message().find("than trainer 0: lookahead=5 against lookahead=1"), std::string::npos)
        << status.to_string();
    EXPECT_EQ(status.message().find("ring_depth"), std::string::npos) << "that is the same";
  }
  for (const auto& status : fleet.connects) EXPECT_FALSE(status.ok());
}

TEST(Runtime, an_absent_trainer_is_named_within_the_timeout) {
  Fleet fleet({.connect_timeout_ms = 500});
  fleet.run({0}, nullptr, nullptr, 1);
  EXPECT_NE(fleet.inits[0].message().find("trainer 1 to join"), std::string::npos)
      << fleet.inits[0].to_string();
  for (const auto& status : fleet.connects) EXPECT_FALSE(status.ok());
}

}  // namespace
}  // namespace shardpull
