#include "runtime/fleet_testing.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include "base/identity.h"
#include "plan/plan.h"
#include "tensor/checksum.h"

namespace shardpull::fleet_testing {
namespace {

using Sizes = std::vector<std::int64_t>;

std::int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

Sizes row_major(const Sizes& shape) {
  Sizes stride(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  return stride;
}

Sizes column_major(const Sizes& shape) {
  Sizes stride(shape.size(), 1);
  for (std::size_t d = 1; d < shape.size(); ++d) stride[d] = stride[d - 1] * shape[d - 1];
  return stride;
}

// A tensor whose elements are whole bytes: pairs of F4 elements count as one.
struct Bytewise {
  std::int64_t element = 1;  // bytes
  std::int64_t halves = 1;   // elements of the dtype in one of ours

  explicit Bytewise(DType dtype)
      : element(std::max(dtype_bits(dtype) / 8, 1)), halves(dtype_bits(dtype) == 4 ? 2 : 1) {}
  Sizes sizes(Sizes shape) const {
    if (!shape.empty()) shape.back() /= halves;
    return shape;
  }
  Sizes strides(Sizes stride) const {
    for (std::size_t d = 0; d + 1 < stride.size(); ++d) stride[d] /= halves;
    return stride;
  }
};

// Calls `visit` with every index within `sizes`, row-major.
void for_each_index(const Sizes& sizes, const std::function<void(const Sizes&)>& visit) {
  if (product(sizes) == 0) return;
  Sizes index(sizes.size(), 0);
  for (;;) {
    visit(index);
    std::size_t d = sizes.size();
    while (d > 0 && ++index[d - 1] == sizes[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

std::int64_t dot(const Sizes& index, const Sizes& stride) {
  return std::inner_product(index.begin(), index.end(), stride.begin(), std::int64_t{0});
}

Box written_out(const Box& given, const TensorMeta& meta) {
  return given.whole() ? Box{Sizes(meta.shape.size(), 0), meta.shape} : given;
}

}  // namespace

std::byte code(std::uint32_t name, std::uint64_t version, std::uint64_t i) {
  std::uint64_t x = (i / 8 + 1) * 0x9E3779B97F4A7C15ull ^ (name + 1) * 0xC2B2AE3D27D4EB4Full ^
                    (version + 1) * 0x165667B19E3779F9ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  return static_cast<std::byte>(x >> (8 * (i % 8)));
}

Box box(std::vector<std::int64_t> start, std::vector<std::int64_t> size) {
  return {std::move(start), std::move(size)};
}

Box cut(const TensorMeta& meta, std::size_t dim, std::int64_t first, std::int64_t count) {
  Box part = written_out({}, meta);
  part.start[dim] = first;
  part.size[dim] = count;
  return part;
}

std::vector<RankSpec> sharded(const std::vector<TensorMeta>& metadata, std::uint32_t ranks, std::size_t dim) {
  std::vector<RankSpec> specs(ranks);
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    const TensorMeta& meta = metadata[name];
    if (meta.shape.size() <= dim) {
      specs[0].whole.push_back(name);
      continue;
    }
    const std::int64_t unit = dim + 1 == meta.shape.size() ? Bytewise(meta.dtype).halves : 1;
    const std::int64_t rows = meta.shape[dim] / unit;
    const std::int64_t each = (rows + ranks - 1) / ranks;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const std::int64_t first = std::min(rank * each, rows), end = std::min(first + each, rows);
      if (first == end) continue;
      specs[rank].pieces.push_back({name, cut(meta, dim, first * unit, (end - first) * unit), rank});
    }
  }
  return specs;
}

// ---- the trainer side -----------------------------------------------------------------------------------

struct BoxSource::Held {
  std::uint32_t name = 0, piece = 0;
  Box part;      // written out
  Sizes stride;  // in elements of the dtype
  std::byte* data = nullptr;
  std::byte* storage = nullptr;
  std::uint64_t storage_bytes = 0;
  std::shared_ptr<void> owner;
};

BoxSource::BoxSource(Trainer& engine, const std::vector<TensorMeta>& metadata, RankSpec spec, Tamper tamper,
                     Content content)
    : metadata_(metadata), spec_(std::move(spec)), tamper_(std::move(tamper)), content_(std::move(content)) {
  const auto groups = form_groups(metadata_);
  for (const GatherGroup& group : *groups) {
    groups_.emplace_back(group.count);
    std::iota(groups_.back().begin(), groups_.back().end(), group.first);
  }
  for (std::uint32_t name = 0; name < metadata_.size(); ++name) {
    if (std::find(spec_.whole.begin(), spec_.whole.end(), name) != spec_.whole.end())
      held_.push_back({name, 0, written_out({}, metadata_[name]), {}, nullptr, nullptr, 0, nullptr});
    std::uint32_t count = 0;
    for (const Piece& piece : spec_.pieces) {
      if (piece.name != name) continue;
      held_.push_back(
          {name, count++, written_out(piece.box, metadata_[name]), {}, nullptr, nullptr, 0, nullptr});
    }
  }
  const auto memory_of = [&](std::uint64_t bytes) {
    EngineMemory memory;
    if (spec_.engine_memory) {
      auto allocated = engine.allocate(bytes);
      EXPECT_TRUE(allocated.ok()) << allocated.status().to_string();
      return *allocated;
    }
    auto owned = std::make_shared<std::vector<std::byte>>(bytes);
    return EngineMemory{owned->data(), bytes, owned};
  };
  std::vector<std::uint64_t> bytes;  // from a tensor's first element to past its last
  std::uint64_t total = 1;
  for (std::size_t i = 0; i < held_.size(); ++i) {
    Held& held = held_[i];
    const Bytewise unit(metadata_[held.name].dtype);
    held.stride = row_major(held.part.size);
    if (spec_.lie == Lie::kPadded && held.part.size.size() > 1) {
      Sizes pitched = held.part.size;
      pitched.back() += 6;
      held.stride = row_major(pitched);
    }
    if (spec_.lie == Lie::kColumnMajor && unit.halves == 1) held.stride = column_major(held.part.size);
    if (!spec_.places.empty()) held.stride = spec_.places[i].stride;
    std::int64_t last = 0;
    const Sizes sizes = unit.sizes(held.part.size), stride = unit.strides(held.stride);
    for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * stride[d];
    bytes.push_back(product(sizes) == 0 ? 0 : static_cast<std::uint64_t>((last + 1) * unit.element));
    if (!spec_.places.empty())
      total = std::max(total, static_cast<std::uint64_t>(spec_.places[i].offset) + bytes.back());
  }
  const EngineMemory shared = spec_.places.empty() ? EngineMemory{} : memory_of(total);
  for (std::size_t i = 0; i < held_.size(); ++i) {
    const bool own = spec_.places.empty();
    const EngineMemory memory = own ? memory_of(std::max<std::uint64_t>(bytes[i], 1)) : shared;
    held_[i].data = memory.data + (own ? 0 : spec_.places[i].offset);
    held_[i].storage = memory.data;
    held_[i].storage_bytes = own ? bytes[i] : total;
    held_[i].owner = memory.owner;
  }
}

BoxSource::~BoxSource() = default;

void BoxSource::set_version(std::uint64_t version) {
  for (Held& held : held_) {
    const TensorMeta& meta = metadata_[held.name];
    const Bytewise unit(meta.dtype);
    if (spec_.lie == Lie::kRestless)
      held.stride = version % 2 == 0 ? row_major(held.part.size) : column_major(held.part.size);
    const Sizes stride = unit.strides(held.stride), global = row_major(unit.sizes(meta.shape));
    const std::int64_t first = dot(unit.sizes(held.part.start), global);
    for_each_index(unit.sizes(held.part.size), [&](const Sizes& index) {
      const std::int64_t from = (first + dot(index, global)) * unit.element;
      for (std::int64_t b = 0; b < unit.element; ++b) {
        held.data[dot(index, stride) * unit.element + b] =
            content_(held.name, version, static_cast<std::uint64_t>(from + b));
      }
    });
  }
}

class BoxSource::Stream final : public GroupStream {
 public:
  Stream(BoxSource& source, const SyncRequest& request) : source_(source), request_(request) {
    ++source_.open_streams;
    source_.yielded = 0;
  }
  ~Stream() override { --source_.open_streams; }

  Result<std::optional<GroupTensors>> next() override {
    if (at_ == request_.groups.size()) return std::optional<GroupTensors>();
    GroupTensors tensors;
    tensors.group = request_.groups[at_++];
    for (const std::uint32_t name : source_.groups_[tensors.group]) {
      const bool asked =
          request_.names.empty() || std::binary_search(request_.names.begin(), request_.names.end(), name);
      bool any = false;
      for (const Held& held : source_.held_) {
        if (held.name != name) continue;
        any = true;
        NamedView entry{name, held.piece, std::nullopt};
        if (asked) {
          entry.view = TensorView{held.data,      source_.metadata_[name].dtype,
                                  held.part.size, held.stride,
                                  held.storage,   held.storage_bytes};
        }
        tensors.tensors.push_back(std::move(entry));
      }
      if (!any) tensors.tensors.push_back({name, 0, std::nullopt});
    }
    if (source_.tamper_) {
      const Status status = source_.tamper_(request_.version, tensors);
      if (!status.ok()) return status;
    }
    ++source_.yielded;
    source_.peak_groups = std::max(source_.peak_groups, ++source_.held_groups);
    return std::optional<GroupTensors>(std::move(tensors));
  }

  void released(std::uint32_t group) override {
    --source_.held_groups;
    for (const Held& held : source_.held_) {
      const auto& names = source_.groups_[group];
      if (std::find(names.begin(), names.end(), held.name) == names.end() || !source_.spec_.places.empty())
        continue;
      std::memset(held.data, 0xEE, held.storage_bytes);
    }
  }

 private:
  BoxSource& source_;
  const SyncRequest request_;
  std::size_t at_ = 0;
};

Result<std::unique_ptr<GroupStream>> BoxSource::iter_groups(const SyncRequest& request) {
  return std::unique_ptr<GroupStream>(std::make_unique<Stream>(*this, request));
}

// ---- the worker side ------------------------------------------------------------------------------------

ModelSpec tensor_parallel(const std::vector<TensorMeta>& metadata, std::uint32_t rank, std::uint32_t tp,
                          std::size_t dim) {
  ModelSpec spec;
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    const TensorMeta& meta = metadata[name];
    Box part = written_out({}, meta);
    const std::int64_t unit = Bytewise(meta.dtype).halves;
    if (meta.shape.size() > dim && meta.shape[dim] % (tp * unit) == 0)
      part = cut(meta, dim, rank * (meta.shape[dim] / tp), meta.shape[dim] / tp);
    spec.push_back({meta.name, meta.dtype, part.size, {}, {{name, part, Sizes(part.size.size(), 0), false}}});
  }
  return spec;
}

BoxModel::BoxModel(const std::vector<TensorMeta>& metadata, ModelSpec spec)
    : metadata_(metadata), spec_(std::move(spec)) {
  for (const ModuleSpec& given : spec_) {
    const auto loader = [this, &given](Parameter& parameter, const Tensor& loaded, const std::string& shard) {
      const Feed& feed = given.feeds[static_cast<std::size_t>(std::stoul(shard))];
      const Box part = written_out(feed.part, metadata_[feed.name]);
      Tensor source = loaded;
      for (std::size_t d = 0; d < part.size.size(); ++d) {
        if (part.size[d] == loaded.shape()[d]) continue;
        auto narrowed = source.narrow(static_cast<std::int64_t>(d), part.start[d], part.size[d]);
        if (!narrowed.ok()) return narrowed.status();
        source = *narrowed;
      }
      if (feed.transposed) source = *source.transpose(0, 1);
      ParameterView window = parameter.data();
      for (std::size_t d = 0; d < feed.at.size(); ++d) {
        auto narrowed = window.narrow(static_cast<std::int64_t>(d), feed.at[d], source.shape()[d]);
        if (!narrowed.ok()) return narrowed.status();
        window = *narrowed;
      }
      return window.copy_(source);
    };
    Module* module = *add_module(given.name, "Box");
    const auto added =
        given.stride.empty()
            ? module->add_parameter("weight", given.dtype, given.shape, loader)
            : module->add_strided_parameter("weight", given.dtype, given.shape, given.stride, loader);
    EXPECT_TRUE(added.ok()) << added.status().to_string();
  }
}

Status BoxModel::load_weights(const std::vector<NamedTensor>& weights) {
  for (const NamedTensor& weight : weights) {
    for (const ModuleSpec& given : spec_) {
      for (std::size_t f = 0; f < given.feeds.size(); ++f) {
        if (metadata_[given.feeds[f].name].name != weight.name) continue;
        Parameter& parameter = *find_module(given.name)->find("weight");
        const Status status = given.unattributed
                                  ? parameter.loader()(parameter, weight.tensor, std::to_string(f))
                                  : parameter.load(weight.tensor, std::to_string(f));
        if (!status.ok()) return status;
      }
    }
  }
  return {};
}

std::vector<std::byte> expected_bytes(const std::vector<TensorMeta>& metadata, const ModuleSpec& module,
                                      const std::vector<std::optional<std::uint64_t>>& version_of,
                                      const Content& content) {
  const Bytewise unit(module.dtype);
  const Sizes to = unit.strides(module.stride.empty() ? row_major(module.shape) : module.stride);
  const Sizes sizes = unit.sizes(module.shape);
  std::int64_t last = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * to[d];
  const std::int64_t bytes = product(sizes) == 0 ? 0 : (last + 1) * unit.element;
  std::vector<std::byte> expected(static_cast<std::size_t>(bytes), std::byte{0xCD});
  for (const Feed& feed : module.feeds) {
    if (!version_of[feed.name]) continue;
    const TensorMeta& meta = metadata[feed.name];
    const Box part = written_out(feed.part, meta);
    const Sizes global = row_major(unit.sizes(meta.shape));
    for_each_index(unit.sizes(part.size), [&](Sizes index) {
      const std::int64_t from = dot(unit.sizes(part.start), global) + dot(index, global);
      if (feed.transposed) std::swap(index[0], index[1]);
      const std::int64_t at = dot(unit.sizes(feed.at), to) + dot(index, to);
      for (std::int64_t b = 0; b < unit.element; ++b) {
        expected[static_cast<std::size_t>(at * unit.element + b)] =
            content(feed.name, *version_of[feed.name], static_cast<std::uint64_t>(from * unit.element + b));
      }
    });
  }
  return expected;
}

std::string first_difference(const Model& model, const std::vector<TensorMeta>& metadata,
                             const ModelSpec& spec,
                             const std::vector<std::optional<std::uint64_t>>& version_of,
                             const Content& content) {
  for (const ModuleSpec& given : spec) {
    const Parameter& parameter = *model.find_module(given.name)->find("weight");
    if (parameter.memory() == nullptr) return given.name + " has no memory";
    const std::vector<std::byte> expected = expected_bytes(metadata, given, version_of, content);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (parameter.memory()[i] != expected[i]) return given.name + " byte " + std::to_string(i);
    }
  }
  return {};
}

// ---- the fleet ------------------------------------------------------------------------------------------

namespace {

bool matches(const std::vector<std::string>& patterns, const std::string& name) {
  return patterns.empty() || std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
           return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
         });
}

class Fleet {
 public:
  explicit Fleet(const FleetSpec& spec) : spec_(spec) {
    char path[] = "/tmp/shardpull-test-XXXXXX";
    directory_ = ::mkdtemp(path);
    options_.directory = directory_;
    options_.token = random_nonzero_u64();
    options_.connect_timeout_ms = 30'000;
    options_.stall_timeout_ms = 30'000;
    out_.inits.resize(spec.ranks.size());
    out_.sends.resize(spec.ranks.size());
    out_.yielded.resize(spec.ranks.size());
    out_.peak_groups.resize(spec.ranks.size());
    out_.engine_bytes.resize(spec.ranks.size());
    out_.connects.resize(spec.workers.size());
    out_.serves.resize(spec.workers.size());
    out_.syncs.resize(spec.workers.size());
    out_.at_workers.resize(spec.workers.size());
    out_.hashes.resize(spec.steps.size());
  }
  ~Fleet() { std::filesystem::remove_all(directory_); }

  FleetOutcome run() {
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < spec_.ranks.size(); ++rank)
      threads.emplace_back([this, rank] { train(rank); });
    for (std::uint32_t worker = 0; worker < spec_.workers.size(); ++worker)
      threads.emplace_back([this, worker] { work(worker); });
    for (std::thread& thread : threads) thread.join();
    return std::move(out_);
  }

 private:
  void problem(const std::string& text) {
    MutexLock lock(mutex_);
    out_.problems.push_back(text);
  }

  void train(std::uint32_t rank) {
    TrainerOptions options;
    options.fleet = options_;
    options.rank = rank;
    options.world_size = static_cast<std::uint32_t>(spec_.ranks.size());
    options.num_consumers = static_cast<std::uint32_t>(spec_.workers.size());
    options.num_replicas = spec_.replicas;
    options.publish = spec_.ranks[rank].publish;
    if (spec_.trainer_options) spec_.trainer_options(rank, options);
    auto trainer = Trainer::create(options);
    out_.inits[rank] = trainer.status();
    if (!trainer.ok()) return;
    BoxSource::Tamper tamper;
    if (spec_.tamper) {
      tamper = [this, rank](std::uint64_t version, GroupTensors& tensors) {
        return spec_.tamper(rank, version, tensors);
      };
    }
    BoxSource source(**trainer, spec_.metadata, spec_.ranks[rank], tamper, spec_.content);
    out_.inits[rank] = (*trainer)->init(source);
    if (!out_.inits[rank].ok()) return;
    for (const Step& step : spec_.steps) {
      source.set_version(step.version);
      auto report = (*trainer)->send_weights(step.version,
                                             {.names = spec_.names ? spec_.names(rank, step) : step.names});
      out_.sends[rank].push_back(report.status());
      out_.yielded[rank].push_back(source.yielded);
      if (rank == 0 && report.ok()) out_.reports.push_back(*report);
      if (source.held_groups != 0 || source.open_streams != 0)
        problem("rank " + std::to_string(rank) + " was not told that its groups are free");
    }
    out_.peak_groups[rank] = source.peak_groups;
    out_.engine_bytes[rank] = (*trainer)->engine_bytes();
    (*trainer)->shutdown(spec_.end);
  }

  void work(std::uint32_t id) {
    BoxModel model(spec_.metadata, spec_.workers[id]);
    if (spec_.bind) {
      const Status bound = spec_.bind(id, model);
      EXPECT_TRUE(bound.ok()) << bound.to_string();
    } else {
      EXPECT_TRUE(model.materialise(std::byte{0xCD}, 64).ok());
    }
    WorkerOptions options;
    options.fleet = options_;
    options.consumer = id;
    if (spec_.worker_options) spec_.worker_options(id, options);
    auto worker = Worker::connect(options, model);
    out_.connects[id] = worker.status();
    if (!worker.ok()) return;
    std::vector<std::optional<std::uint64_t>> version_of(spec_.metadata.size());
    std::atomic<bool> ended{false};
    std::thread reader;
    if (spec_.reader) reader = std::thread([&] { spec_.reader(id, **worker, model, ended); });
    out_.serves[id] =
        (*worker)->serve([&](std::uint64_t version, const Status& status, const WorkerReport& report) {
          out_.syncs[id].push_back(status);
          std::size_t at = 0;
          while (at < spec_.steps.size() && spec_.steps[at].version != version) ++at;
          if (at == spec_.steps.size())
            return problem("a sync of unknown version " + std::to_string(version));
          if (!status.ok())
            return check_failed(id, at, **worker, model, version_of, options.apply == Apply::kStaged);
          for (std::uint32_t name = 0; name < version_of.size(); ++name) {
            if (matches(spec_.steps[at].names, spec_.metadata[name].name)) version_of[name] = version;
          }
          check(id, at, **worker, model, version_of, options.path == PathChoice::kMapped, report);
        });
    ended = true;
    if (reader.joinable()) reader.join();
  }

  // After a failed sync: what it was not to move is what it was, staged also what it was; and no module says
  // that it holds a version whose bytes it does not have.
  void check_failed(std::uint32_t id, std::size_t at, const Worker& worker, const BoxModel& model,
                    const std::vector<std::optional<std::uint64_t>>& version_of, bool staged) {
    ModelSpec untouched = spec_.workers[id];
    const std::string where = "worker " + std::to_string(id) + " after the failed version " +
                              std::to_string(spec_.steps[at].version) + ": ";
    bool whole = true;
    for (const ModuleSpec& module : untouched) {
      const auto held = worker.module_version(module.name);
      whole = whole && held.ok();
      if (!held.ok()) continue;
      auto claimed = version_of;
      for (const Feed& feed : module.feeds) claimed[feed.name] = *held;
      const std::string difference =
          first_difference(model, spec_.metadata, {module}, claimed, spec_.content);
      if (!difference.empty())
        problem(where + "is said to hold " + std::to_string(*held) + ": " + difference);
    }
    const bool guarded = worker.version_guard().load() % 2 == 1;
    const bool torn = !staged || spec_.steps[at].torn;
    if (torn && !whole && worker.version().ok()) problem(where + "mixed modules have a version");
    if (!torn && guarded && at != 0 && !spec_.steps[at - 1].torn) problem(where + "the guard is odd");
    if (torn && staged && !guarded) problem(where + "a torn commit is not guarded");
    if (torn) {
      std::erase_if(untouched, [&](const ModuleSpec& module) {
        return std::any_of(module.feeds.begin(), module.feeds.end(), [&](const Feed& feed) {
          return matches(spec_.steps[at].names, spec_.metadata[feed.name].name);
        });
      });
    }
    const std::string difference =
        first_difference(model, spec_.metadata, untouched, version_of, spec_.content);
    if (!difference.empty()) problem(where + difference);
    for (const ModuleSpec& module : untouched) {
      const auto held = worker.module_version(module.name);
      const auto expected = version_of[module.feeds[0].name];
      if (held.ok() != expected.has_value() || (expected && *held != *expected))
        problem(where + module.name + " lost its version");
    }
  }

  void check(std::uint32_t id, std::size_t at, const Worker& worker, const BoxModel& model,
             const std::vector<std::optional<std::uint64_t>>& version_of, bool mapped,
             const WorkerReport& report) {
    const std::string where =
        "worker " + std::to_string(id) + " version " + std::to_string(spec_.steps[at].version) + ": ";
    const std::string difference =
        first_difference(model, spec_.metadata, spec_.workers[id], version_of, spec_.content);
    if (!difference.empty()) problem(where + difference);
    if (const Status guards = model.check_guards(); !guards.ok()) problem(where + guards.to_string());
    if (const auto version = worker.version(); !version.ok() || *version != spec_.steps[at].version)
      problem(where + "version() is " +
              (version.ok() ? std::to_string(*version) : version.status().to_string()));
    std::uint64_t hash = 0;
    for (const ModuleSpec& module : spec_.workers[id]) {
      const Parameter& parameter = *model.find_module(module.name)->find("weight");
      hash = hash * 31 + checksum64({parameter.memory(), parameter.storage_bytes()});
      if (module.feeds.empty()) continue;
      const auto expected = version_of[module.feeds[0].name];
      const auto held = worker.module_version(module.name);
      if (held.ok() != expected.has_value() || (expected && *held != *expected))
        problem(where + module.name + " is of another version than its bytes");
    }
    // A packed chunk has gaps of up to 15 bytes between its keys; nothing else may be moved twice.
    const std::uint64_t most = mapped ? report.bytes_kept : 2 * report.bytes_kept + 256;
    if (report.bytes_moved < report.bytes_kept || report.bytes_moved > most) {
      problem(where + "moved " + std::to_string(report.bytes_moved) + " bytes, keeps " +
              std::to_string(report.bytes_kept));
    }
    MutexLock lock(mutex_);
    out_.at_workers[id].push_back(report);
    out_.hashes[at] += hash * (2 * id + 1);
  }

  const FleetSpec& spec_;
  std::string directory_;
  FleetOptions options_;
  FleetOutcome out_;
  Mutex mutex_;
};

}  // namespace

FleetOutcome run_fleet(const FleetSpec& spec) {
  return Fleet(spec).run();
}

FleetOutcome expect_exact(const FleetSpec& spec) {
  FleetOutcome outcome = run_fleet(spec);
  for (const Status& status : outcome.inits) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const Status& status : outcome.connects) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const Status& status : outcome.serves) EXPECT_TRUE(status.ok()) << status.to_string();
  const auto as_planned = [&](const std::vector<Status>& statuses) {
    EXPECT_EQ(statuses.size(), spec.steps.size());
    for (std::size_t i = 0; i < statuses.size() && i < spec.steps.size(); ++i)
      EXPECT_EQ(statuses[i].ok(), !spec.steps[i].fails) << "step " << i << ": " << statuses[i].to_string();
  };
  for (const auto& statuses : outcome.sends) as_planned(statuses);
  for (const auto& statuses : outcome.syncs) as_planned(statuses);
  EXPECT_TRUE(outcome.problems.empty()) << outcome.problems.front();
  for (const SyncReport& report : outcome.reports) {
    EXPECT_EQ(report.workers.size(), spec.workers.size());
    EXPECT_EQ(report.ranks.size(), spec.ranks.size());
  }
  return outcome;
}

}  // namespace shardpull::fleet_testing
