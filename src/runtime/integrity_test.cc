// Sums of keys from end to end: whole fleets under every setting, and a producer and a worker over a transport
// that damages what it brings. docs/PROTOCOL.md, "Integrity".
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/mutex.h"
#include "runtime/consumer_engine.h"
#include "runtime/fleet_testing.h"
#include "runtime/producer_server.h"
#include "runtime/progress_thread.h"
#include "transport/sim/sim_transport.h"

namespace shardpull {
namespace {

using namespace fleet_testing;  // NOLINT
using testing::AllOf;
using testing::HasSubstr;

std::vector<TensorMeta> two_layers() {
  return {{"layers.0.bias", DType::kBF16, {33}},
          {"layers.0.w", DType::kF32, {24, 16}},
          {"layers.1.bias", DType::kBF16, {33}},
          {"layers.1.w", DType::kF32, {24, 16}}};
}

std::vector<std::uint32_t> every_name() {
  return {0, 1, 2, 3};
}

// ---- whole fleets ---------------------------------------------------------------------------------------

FleetSpec one_of_each(Integrity integrity, PathChoice path) {
  FleetSpec spec{.metadata = two_layers(),
                 .ranks = {{.whole = every_name()}},
                 .workers = {tensor_parallel(two_layers(), 0, 2), tensor_parallel(two_layers(), 1, 2)}};
  spec.trainer_options = [integrity](std::uint32_t, TrainerOptions& options) { options.integrity = integrity; };
  spec.worker_options = [path](std::uint32_t, WorkerOptions& options) { options.path = path; };
  return spec;
}

TEST(IntegrityFleets, EverySettingAndPathIsExact) {
  for (const Integrity integrity : {Integrity::kOff, Integrity::kWire, Integrity::kFull}) {
    for (const PathChoice path : {PathChoice::kPacked, PathChoice::kMapped, PathChoice::kDirect}) {
      SCOPED_TRACE(std::string(to_string(integrity)) + " path " + std::to_string(static_cast<int>(path)));
      expect_exact(one_of_each(integrity, path));
    }
  }
}

// Sums are of the key's elements, however they lie: in sources that change their strides between syncs, in
// columns, in pieces, under two destinations and a transposition.
TEST(IntegrityFleets, FullSumsWhatLiesWithStrides) {
  const auto metadata = two_layers();
  for (const Lie lie : {Lie::kColumnMajor, Lie::kPadded, Lie::kRestless}) {
    for (const bool resident : {false, true}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(lie)) + (resident ? " resident" : " gathered"));
      FleetSpec spec = one_of_each(Integrity::kFull, PathChoice::kMapped);
      spec.ranks = sharded(metadata, 2);
      for (RankSpec& rank : spec.ranks) {
        rank.lie = lie;
        rank.resident = resident;
      }
      spec.workers = {tensor_parallel(metadata, 0, 2, 1), tensor_parallel(metadata, 1, 2, 1)};
      for (ModelSpec& worker : spec.workers) {
        ModuleSpec again = worker[1];  // the same key once more
        again.name = "again";
        worker.push_back(again);
        worker[3] = {"turned", DType::kF32, {16, 24}, {}, {{3, {}, {0, 0}, true}}};
      }
      spec.trainer_options = [](std::uint32_t, TrainerOptions& options) {
        options.integrity = Integrity::kFull;
        options.export_pack_limit_bytes = 0;
      };
      expect_exact(spec);
    }
  }
}

TEST(IntegrityFleets, RanksMustAgree) {
  FleetSpec spec = one_of_each(Integrity::kWire, PathChoice::kAuto);
  spec.ranks = {{.whole = every_name()}, {.whole = every_name()}};
  spec.trainer_options = [](std::uint32_t rank, TrainerOptions& options) {
    options.integrity = rank == 0 ? Integrity::kFull : Integrity::kOff;
    options.fleet.connect_timeout_ms = 5'000;
  };
  spec.worker_options = [](std::uint32_t, WorkerOptions& options) { options.fleet.connect_timeout_ms = 5'000; };
  const FleetOutcome outcome = run_fleet(spec);
  EXPECT_THAT(outcome.inits[1].message(), AllOf(HasSubstr("integrity=off"), HasSubstr("integrity=full")));
}

// The source writes its first group while it is asked for the second one, of which it has not been told that
// it is free. What workers read are copies in export buffers.
FleetSpec hasty_source(Integrity integrity) {
  FleetSpec spec = one_of_each(integrity, PathChoice::kMapped);
  auto first = std::make_shared<std::byte*>();
  spec.tamper = [first](std::uint32_t, std::uint64_t version, GroupTensors& tensors) {
    if (tensors.group == 0) *first = const_cast<std::byte*>(tensors.tensors[1].view->data);
    if (tensors.group == 1 && version == 1) **first ^= std::byte{1};
    return Status();
  };
  return spec;
}

TEST(IntegrityFleets, case_088_full_finds_a_source_that_writes_what_it_yielded) {
  FleetSpec spec = hasty_source(Integrity::kFull);
  spec.steps = {{.version = 0}, {.version = 1, .names = {}, .fails = true}, {.version = 2}};
  const FleetOutcome outcome = expect_exact(spec);
  const Status& status = outcome.sends[0].at(1);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_EQ(status.info().reason, Reason::kCorrupt);
  EXPECT_EQ(status.info().tensor, "layers.0.w");
  EXPECT_THAT(status.message(), HasSubstr("the weight source of trainer 0 wrote layers.0.w of group 0 after"));
}

TEST(IntegrityFleets, WithoutFullSuchASourceGoesUnnoticed) {
  expect_exact(hasty_source(Integrity::kWire));
}

// ---- over a transport that damages ----------------------------------------------------------------------

// What is to go wrong.
struct Damage {
  std::atomic<int> countdown{0};    // of reads and mappings until the one to damage; 0: none
  std::atomic<bool> hollow{false};  // reads end well and bring nothing
  std::atomic<bool> mute{false};    // no free signal can be sent
  std::atomic<int> arrived{0};      // reads that came part by part
};

// How what is read comes: all of it at once, or part by part, as over tcp, in order or not.
enum class Arrives { kWhole, kInOrder, kBackwards };

// Hands everything on, and flips one bit of one read, or of a copy of one mapped window, or takes back what
// reads brought, when it is told to. Reads to targets are made of the other's whole ones.
class Damaging final : public Transport {
 public:
  Damaging(std::unique_ptr<Transport> inner, Damage& damage, Arrives arrives)
      : inner_(std::move(inner)), damage_(damage), arrives_(arrives) {}

  std::string name() const override { return inner_->name(); }
  bool can_map() const override { return inner_->can_map(); }
  Result<std::shared_ptr<ExportedMemory>> allocate(std::uint64_t bytes, std::string_view what) override {
    return inner_->allocate(bytes, what);
  }
  Result<std::string> listen() override { return inner_->listen(); }
  Result<EndpointId> connect(const std::string& address, std::int64_t timeout_ns) override {
    return inner_->connect(address, timeout_ns);
  }
  Status send(EndpointId endpoint, HotHeader header, const std::byte* payload, std::size_t length) override {
    if (damage_.mute && header.type == HotType::kFree)
      return Status(StatusCode::kUnavailable, "the endpoint is gone", {.reason = Reason::kPeerLost});
    return inner_->send(endpoint, header, payload, length);
  }
  Status grant(EndpointId endpoint, const std::shared_ptr<ExportedMemory>& memory) override {
    return inner_->grant(endpoint, memory);
  }
  void close(EndpointId endpoint) override { inner_->close(endpoint); }
  void read(EndpointId endpoint, const RemoteRef& remote, std::byte* local, ReadToken token) override {
    reads_[token] = {{local, remote.bytes}};
    if (damage_.hollow) keep({{remote, local}}, reads_[token]);
    inner_->read(endpoint, remote, local, token);
  }
  void read_parts(EndpointId endpoint, std::vector<ReadPart> parts, ReadToken token) override {
    Read& read = reads_[token];
    for (ReadPart& part : parts) {
      if (part.target == nullptr) continue;
      read.arriving.push_back({std::vector<std::byte>(part.remote.bytes), std::move(part.target)});
      part = {part.remote, read.arriving.back().bytes.data()};
    }
    read.last = {parts.back().local, parts.back().remote.bytes};
    if (damage_.hollow) keep(parts, read);
    inner_->read_parts(endpoint, std::move(parts), token);
  }
  bool can_read_to() const override { return arrives_ != Arrives::kWhole; }
  void read_to(EndpointId endpoint, const RemoteRef& remote, std::shared_ptr<ReadTarget> target,
               ReadToken token) override {
    read_parts(endpoint, {{remote, nullptr, std::move(target)}}, token);
  }
  Result<Mapping> map(EndpointId endpoint, const RemoteRef& remote) override {
    auto mapping = inner_->map(endpoint, remote);
    if (!mapping.ok() || !turn()) return mapping;
    const auto copy = std::make_shared<std::vector<std::byte>>(mapping->data, mapping->data + remote.bytes);
    copy->back() ^= std::byte{0x10};
    return Mapping{copy->data(), copy};
  }
  void add_mapped_bytes(std::uint64_t bytes) override { inner_->add_mapped_bytes(bytes); }
  Status progress(std::int64_t timeout_ns, TransportSink& sink) override {
    Sink damaging(*this, sink);
    return inner_->progress(timeout_ns, damaging);
  }
  void wake() override { inner_->wake(); }
  TransportCounters counters() const override { return inner_->counters(); }

 private:
  struct Window {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
  };
  struct Read {
    Window last;
    std::vector<std::pair<std::byte*, std::vector<std::byte>>> before = {};  // where it brings nothing
    struct Arriving {
      std::vector<std::byte> bytes;
      std::shared_ptr<ReadTarget> target;
    };
    std::vector<Arriving> arriving = {};
  };
  void deliver(const Read::Arriving& whole) const {
    constexpr std::size_t kPart = 100;
    const std::size_t parts = (whole.bytes.size() + kPart - 1) / kPart;
    for (std::size_t i = 0; i < parts; ++i) {
      const std::size_t from = kPart * (arrives_ == Arrives::kInOrder ? i : parts - 1 - i);
      whole.target->take(from,
                         std::span(whole.bytes).subspan(from, std::min(kPart, whole.bytes.size() - from)));
    }
    ++damage_.arrived;
  }
  static void keep(const std::vector<ReadPart>& parts, Read& read) {
    for (const ReadPart& part : parts)
      read.before.emplace_back(part.local, std::vector<std::byte>(part.local, part.local + part.remote.bytes));
  }
  class Sink final : public TransportSink {
   public:
    Sink(Damaging& owner, TransportSink& inner) : owner_(owner), inner_(inner) {}
    void on_accepted(EndpointId endpoint) override { inner_.on_accepted(endpoint); }
    void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override {
      inner_.on_message(endpoint, header, payload);
    }
    void on_closed(EndpointId endpoint, const Status& why) override { inner_.on_closed(endpoint, why); }
    void on_read_done(ReadToken token, const Status& status) override {
      const auto found = owner_.reads_.find(token);
      if (found != owner_.reads_.end()) {
        const Read read = std::move(found->second);
        owner_.reads_.erase(found);
        // The last byte is a key's: a run ends with its last key.
        if (status.ok() && owner_.turn()) read.last.data[read.last.bytes - 1] ^= std::byte{0x10};
        for (const auto& [data, bytes] : read.before) std::copy(bytes.begin(), bytes.end(), data);
        if (status.ok())
          for (const Read::Arriving& whole : read.arriving) owner_.deliver(whole);
      }
      inner_.on_read_done(token, status);
    }

   private:
    Damaging& owner_;
    TransportSink& inner_;
  };
  bool turn() { return damage_.countdown.load() > 0 && damage_.countdown.fetch_sub(1) == 1; }

  std::unique_ptr<Transport> inner_;
  Damage& damage_;
  const Arrives arrives_;
  std::map<ReadToken, Read> reads_;
};

// What a test's thread waits for, bounded.
template <typename T>
class Awaited {
 public:
  void put(T value) {
    MutexLock lock(mutex_);
    value_ = std::move(value);
    wake_.notify_all();
  }
  void forget() {
    MutexLock lock(mutex_);
    value_.reset();
  }
  T take() {
    MutexLock lock(mutex_);
    for (int waits = 0; !value_ && waits < 30; ++waits) wake_.wait_for_ns(mutex_, kNanosPerSecond);
    EXPECT_TRUE(value_.has_value()) << "nothing came";
    T value = value_.value_or(T());
    value_.reset();
    return value;
  }

 private:
  Mutex mutex_;
  CondVar wake_;
  std::optional<T> value_ SHARDPULL_GUARDED_BY(mutex_);
};

constexpr FleetToken kToken = 7;
constexpr std::int64_t kStallNs = 30 * kNanosPerSecond;

// A trainer's producer and a worker's engine, without a control channel: the test says what it would.
class Pair {
 public:
  Pair(TransportKind transport, Integrity integrity, PathPolicy path, Apply apply = Apply::kInplace,
       Arrives arrives = Arrives::kWhole)
      : metadata_(two_layers()), spec_(tensor_parallel(metadata_, 0, 1)), model_(metadata_, spec_) {
    EXPECT_TRUE(model_.materialise(std::byte{0xCD}, 64).ok());
    auto trainer = net_.open("trainer", kToken, 1);
    InitTables tables;
    tables.producers = {*trainer->listen()};
    tables.metadata = metadata_;
    tables.group_lens = {2, 2};
    tables.producer_mappable = {1};
    tables.producer_resident = {1};
    tables.transport = transport;
    tables.integrity = integrity;
    EXPECT_TRUE(validate(tables).ok());
    tables_ = std::make_shared<const InitTables>(std::move(tables));
    recording_ = *bake(model_, metadata_, {});
    plan_ = std::make_shared<const WorkerPlan>(*plan_worker(*tables_, recording_, 0, {.path = path}));

    trainer_ = std::make_unique<ProgressThread>(std::move(trainer), at_trainer_, [] {}, [](const Status&) {},
                                                kNanosPerSecond, SystemClock::instance());
    worker_ = std::make_unique<ProgressThread>(
        std::make_unique<Damaging>(net_.open("worker", kToken, 2), damage_, arrives), at_worker_, [] {},
        [](const Status&) {}, kNanosPerSecond, SystemClock::instance());
    server_ = std::make_unique<ProducerServer>(
        *trainer_, 0, kToken, 1,
        ProducerHooks{
            .reserve_reply = [this](std::uint32_t, LaneKind, const Status& status) { reserved_.put(status); },
            .ack_by_control =
                [this](std::uint32_t, std::uint64_t sync_id, const std::vector<std::uint32_t>& groups) {
                  worker_->post([this, sync_id, groups] { engine_->signals_acked(0, sync_id, groups); });
                },
            .group_freed = [](std::uint32_t) {},
            .sync_ended = [] {},
            .sync_failed = [](std::uint64_t, const Status&) {},
            .sync_quiet = [this] { quiet_.put(true); }});
    engine_ = std::make_unique<ConsumerEngine>(
        *worker_, model_, recording_, tables_, plan_, kToken, 2, kStallNs, kStallNs,
        ConsumerHooks{
            .signal_by_control =
                [this](std::uint32_t, std::uint64_t sync_id, const std::vector<std::uint32_t>& groups) {
                  trainer_->post([this, sync_id, groups] { server_->signal(0, 2, sync_id, groups); });
                },
            .leave_lanes = [](std::uint32_t, std::uint64_t) {},
            .update_done = [this](std::uint64_t, const Status& status) { updated_.put(status); },
            .finish_done = [this](std::uint64_t, const Status& status) { finished_.put(status); },
            .report_failure = [](std::uint64_t, const Status&) {}},
        nullptr, apply);
    EXPECT_EQ(engine_->prepare(), Status());
    at_trainer_.server = server_.get();
    at_worker_.engine = engine_.get();
    at_worker_.connected = &connected_;
    trainer_->start();
    worker_->start();
    memory_ = *trainer_->transport().allocate(8192, "weights");
    trainer_->run([&] {
      server_->start(tables_, kStallNs, false);
      server_->add_memory(memory_);
    });
    Status status;
    worker_->run([&] { status = engine_->connect(kNanosPerSecond); });
    EXPECT_EQ(status, Status());
    EXPECT_TRUE(connected_.take());
    const ProducerPlan& producer = plan_->producers.at(0);
    trainer_->run([&] {
      server_->reserve(0, 2, producer.serve_slot_bytes, plan_->ring_depth, 1, 1, producer.digest,
                       encode_pulls(pulls_at(*plan_, 0)));
    });
    EXPECT_EQ(reserved_.take(), Status());
  }

  ~Pair() {
    trainer_->run([&] { server_->shutdown(); });
    worker_->run([&] { engine_->shutdown(); });
    server_->stop();
    engine_->stop();
    trainer_->stop();
    worker_->stop();
  }

  int arrived() const { return damage_.arrived; }
  // The `nth` read or mapping from now on is damaged.
  void damage(int nth) { damage_.countdown = nth; }
  bool damaged() const { return damage_.countdown == 0; }
  // Whether reads bring anything from now on.
  void hollow(bool hollow) { damage_.hollow = hollow; }
  // Whether free signals fail to be sent from now on.
  void mute(bool mute) { damage_.mute = mute; }
  // What the control channel says of a sync that failed: true once the producer's memory is not read any
  // more. Its clock never ticks here, so that no time limit makes it so.
  bool quiet_after(std::uint64_t id, const Status& why) {
    trainer_->run([&] {
      quiet_.forget();  // of the sync before, which this one superseded
      server_->fail(id, why);
    });
    return quiet_.take();
  }

  // One sync to its commit, or its error.
  Status sync(std::uint64_t id) {
    Status status;
    std::uint64_t at = 0;
    std::vector<std::vector<ServedTensor>> groups(2);
    for (std::uint32_t name = 0; name < metadata_.size(); ++name) {
      const TensorMeta& meta = metadata_[name];
      std::uint64_t bytes = static_cast<std::uint64_t>(dtype_bits(meta.dtype)) / 8;
      for (const std::int64_t size : meta.shape) bytes *= static_cast<std::uint64_t>(size);
      std::byte* const data = memory_->ref().address + at;
      for (std::uint64_t i = 0; i < bytes; ++i) data[i] = code(name, id, i);
      PublishedView view{name, 0, meta.dtype, meta.shape, {}};
      view.location.where = {memory_->ref().region, memory_->ref().generation, at, bytes};
      groups[name / 2].push_back({std::move(view), data});
      at = (at + bytes + 63) / 64 * 64;
    }
    worker_->run([&] { status = engine_->start_update(id, id, nullptr); });
    if (!status.ok()) return status;
    trainer_->run([&] {
      status = server_->begin_sync(id, id, {0}, {0, 1}, {});
      for (std::uint32_t group = 0; group < 2 && status.ok(); ++group)
        status = server_->publish_group(group, groups[group]);
    });
    if (!status.ok()) return status;
    worker_->run([&] { status = engine_->update(); });
    if (!status.ok()) return status;
    status = updated_.take();
    if (!status.ok()) return status;
    worker_->run([&] { status = engine_->finish_update(id); });
    return status.ok() ? finished_.take() : status;
  }

  std::string difference(std::uint64_t version) const {
    const std::vector<std::optional<std::uint64_t>> versions(metadata_.size(), version);
    return first_difference(model_, metadata_, spec_, versions, code);
  }
  const WorkerPlan& plan() const { return *plan_; }
  Parameter& parameter(std::uint32_t name) const { return *model_.find_module(metadata_[name].name)->find("weight"); }
  // What the worker says that it holds.
  Result<std::uint64_t> version() {
    Result<std::uint64_t> version = Status(StatusCode::kInternal, "not asked");
    worker_->run([&] { version = engine_->machine().version(); });
    return version;
  }
  // Whether every byte of the name's parameter is of `version`.
  bool holds(std::uint32_t name, std::uint64_t version) const {
    const Parameter& parameter = *model_.find_module(metadata_[name].name)->find("weight");
    for (std::uint64_t i = 0; i < parameter.storage_bytes(); ++i) {
      if (parameter.memory()[i] != code(name, version, i)) return false;
    }
    return true;
  }

 private:
  struct AtTrainer final : TransportSink {
    ProducerServer* server = nullptr;
    void on_accepted(EndpointId endpoint) override { server->on_accepted(endpoint); }
    void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override {
      server->on_message(endpoint, header, payload);
    }
    void on_closed(EndpointId endpoint, const Status& why) override { server->on_closed(endpoint, why); }
    void on_read_done(ReadToken, const Status&) override {}
  };
  struct AtWorker final : TransportSink {
    ConsumerEngine* engine = nullptr;
    Awaited<bool>* connected = nullptr;
    void on_accepted(EndpointId) override {}
    void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override {
      engine->on_message(endpoint, header, payload);
      if (header.type == HotType::kHelloReply && engine->connected()) connected->put(true);
    }
    void on_closed(EndpointId endpoint, const Status& why) override { engine->on_closed(endpoint, why); }
    void on_read_done(ReadToken token, const Status& status) override { engine->on_read_done(token, status); }
  };

  const std::vector<TensorMeta> metadata_;
  const ModelSpec spec_;
  SimNet net_{SystemClock::instance(), {.seed = 1, .min_delay_ns = 1, .max_delay_ns = 1000, .max_piece_ns = 1000}};
  BoxModel model_;
  std::shared_ptr<const InitTables> tables_;
  Recording recording_;
  std::shared_ptr<const WorkerPlan> plan_;
  Damage damage_;
  Awaited<Status> reserved_, updated_, finished_;
  Awaited<bool> connected_, quiet_;
  AtTrainer at_trainer_;
  AtWorker at_worker_;
  std::unique_ptr<ProgressThread> trainer_, worker_;
  std::shared_ptr<ExportedMemory> memory_;
  std::unique_ptr<ProducerServer> server_;
  std::unique_ptr<ConsumerEngine> engine_;
};

struct Way {
  Path path;
  PathPolicy policy;
  TransportKind transport;
  Integrity summed;  // the least that sums it
  Arrives arrives = Arrives::kWhole;
};
std::string trace_of(const Way& way) {
  constexpr std::array kArrives = {"whole", "in order", "backwards"};
  return fmt::format("{}, arrives {}", to_string(way.path),
                     kArrives.at(static_cast<std::size_t>(way.arrives)));
}
const Way kWays[] = {
    {Path::kPacked, PathPolicy::kPacked, TransportKind::kTcp, Integrity::kWire},
    {Path::kPacked, PathPolicy::kPacked, TransportKind::kTcp, Integrity::kWire, Arrives::kInOrder},
    {Path::kPacked, PathPolicy::kPacked, TransportKind::kTcp, Integrity::kWire, Arrives::kBackwards},
    {Path::kDirect, PathPolicy::kDirect, TransportKind::kTcp, Integrity::kWire},
    {Path::kDirect, PathPolicy::kDirect, TransportKind::kTcp, Integrity::kWire, Arrives::kInOrder},
    {Path::kDirect, PathPolicy::kDirect, TransportKind::kTcp, Integrity::kWire, Arrives::kBackwards},
    {Path::kMapped, PathPolicy::kMapped, TransportKind::kShm, Integrity::kFull},
    {Path::kPacked, PathPolicy::kPacked, TransportKind::kShm, Integrity::kFull}};

// One flipped bit of any read or mapping fails the sync, naming chunk, tensor and producer; the next one is
// exact. Staged, the version before is there until then, bit for bit; in place none is.
void find_flipped_bits(Apply apply) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(trace_of(way));
    Pair pair(way.transport, way.summed, way.policy, apply, way.arrives);
    for (const Chunk& chunk : pair.plan().chunks) ASSERT_EQ(chunk.path, way.path);
    std::uint64_t id = 0;
    ASSERT_EQ(pair.sync(++id), Status());
    EXPECT_EQ(pair.difference(id), "");
    int found = 0;
    for (int nth = 1; nth <= 8; ++nth) {
      pair.damage(nth);
      const Status status = pair.sync(++id);
      if (!pair.damaged()) {  // past the last read of a sync
        EXPECT_EQ(status, Status());
        break;
      }
      ++found;
      EXPECT_EQ(status.code(), StatusCode::kDataLoss) << "read " << nth;
      EXPECT_EQ(status.info().reason, Reason::kCorrupt);
      EXPECT_EQ(status.info().peer, "trainer 0");
      EXPECT_THAT(status.info().tensor, HasSubstr("layers."));
      EXPECT_THAT(status.message(), AllOf(HasSubstr("worker 0: chunk "), HasSubstr("from trainer 0 are corrupt"),
                                          HasSubstr("'" + status.info().tensor + "'")));
      const auto version = pair.version();
      EXPECT_EQ(version.ok(), apply == Apply::kStaged);
      if (version.ok()) {
        EXPECT_EQ(*version, id - 1);
        EXPECT_EQ(pair.difference(id - 1), "");
      }
      pair.damage(0);
      ASSERT_EQ(pair.sync(++id), Status());
      EXPECT_EQ(pair.difference(id), "");
      EXPECT_EQ(*pair.version(), id);
    }
    EXPECT_GE(found, 2);
    EXPECT_EQ(pair.arrived() != 0, way.arrives != Arrives::kWhole);
  }
}
TEST(IntegrityOverATransport, AFlippedBitIsFoundOnEveryPath) {
  find_flipped_bits(Apply::kInplace);
}
TEST(IntegrityOverATransport, AFlippedBitReachesNoParameterWhenStaged) {
  find_flipped_bits(Apply::kStaged);
}

// A parameter that has lost its memory between two syncs is an error naming it, not the end of the process.
TEST(IntegrityOverATransport, AParameterWithoutMemoryIsRefused) {
  for (const Apply apply : {Apply::kInplace, Apply::kStaged}) {
    SCOPED_TRACE(to_string(apply));
    Pair pair(TransportKind::kTcp, Integrity::kWire, PathPolicy::kPacked, apply);
    ASSERT_EQ(pair.sync(1), Status());
    ASSERT_TRUE(pair.parameter(3).bind(nullptr, 0).ok());
    EXPECT_THAT(pair.sync(2).message(), HasSubstr("layers.1.w.weight has no memory any more"));
    std::vector<std::byte> memory(pair.parameter(3).storage_bytes());
    ASSERT_TRUE(pair.parameter(3).bind(memory.data(), memory.size()).ok());
    ASSERT_EQ(pair.sync(3), Status());
    EXPECT_EQ(pair.difference(3), "");
  }
}

// Goal: memory that its owner has taken away, or made read-only, since the parameter was bound to it is
// refused before a byte is written; bound again it takes the next sync.
TEST(IntegrityOverATransport, case_102_memory_that_has_gone_since_the_bake) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (const Apply apply : {Apply::kInplace, Apply::kStaged}) {
    for (const bool unmapped : {true, false}) {
      SCOPED_TRACE(std::string(to_string(apply)) + (unmapped ? " unmapped" : " read-only"));
      Pair pair(TransportKind::kTcp, Integrity::kWire, PathPolicy::kPacked, apply);
      const std::uint64_t bytes = pair.parameter(3).storage_bytes();
      const std::size_t mapped = (bytes + page - 1) / page * page;
      auto* const memory = static_cast<std::byte*>(
          ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      ASSERT_NE(memory, MAP_FAILED);
      ASSERT_TRUE(pair.parameter(3).bind(memory, bytes).ok());
      ASSERT_EQ(pair.sync(1), Status());
      EXPECT_EQ(pair.difference(1), "");
      if (unmapped) {
        ASSERT_EQ(::munmap(memory, mapped), 0);
      } else {
        ASSERT_EQ(::mprotect(memory, mapped, PROT_READ), 0);
      }
      EXPECT_THAT(pair.sync(2).message(),
                  HasSubstr("layers.1.w.weight has " + std::to_string(bytes) + " bytes at"));
      std::vector<std::byte> other(bytes);
      ASSERT_TRUE(pair.parameter(3).bind(other.data(), other.size()).ok());
      ASSERT_EQ(pair.sync(3), Status());
      EXPECT_EQ(pair.difference(3), "");
      if (!unmapped) ::munmap(memory, mapped);
    }
  }
}

// Packed and mapped keys are compared before one byte of them is in a parameter, but for what comes part by
// part.
TEST(IntegrityOverATransport, NothingOfACorruptKeyReachesItsParameter) {
  for (const Way& way : kWays) {
    if (way.path == Path::kDirect || way.arrives != Arrives::kWhole) continue;
    SCOPED_TRACE(trace_of(way));
    Pair pair(way.transport, way.summed, way.policy, Apply::kInplace, way.arrives);
    ASSERT_EQ(pair.sync(1), Status());
    pair.damage(1);
    const Status status = pair.sync(2);
    ASSERT_EQ(status.info().reason, Reason::kCorrupt);
    const std::vector<TensorMeta> metadata = two_layers();
    for (std::uint32_t name = 0; name < metadata.size(); ++name) {
      if (metadata[name].name == status.info().tensor) {
        EXPECT_TRUE(pair.holds(name, 1));
      }
    }
  }
}

// A transport that reports success and moves nothing: old bytes are no update.
TEST(IntegrityOverATransport, case_098_reads_that_bring_nothing) {
  for (const Way& way : kWays) {
    if (way.path == Path::kMapped) continue;  // reads nothing
    SCOPED_TRACE(trace_of(way));
    Pair pair(way.transport, way.summed, way.policy, Apply::kInplace, way.arrives);
    ASSERT_EQ(pair.sync(1), Status());
    pair.hollow(true);
    const Status status = pair.sync(2);
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_EQ(status.info().reason, Reason::kCorrupt);
    EXPECT_NE(pair.difference(2), "");
    pair.hollow(false);
    ASSERT_EQ(pair.sync(3), Status());
    EXPECT_EQ(pair.difference(3), "");
  }
}

// Signals that cannot be sent to a producer that lives go by control: it does not wait, until a time limit
// ends that, for readers that read no more.
TEST(SignalsOverATransport, GoByControlWhereTheyCannotBeSent) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(trace_of(way));
    Pair pair(way.transport, way.summed, way.policy, Apply::kInplace, way.arrives);
    ASSERT_EQ(pair.sync(1), Status());
    pair.mute(true);
    pair.damage(1);
    const Status status = pair.sync(2);
    ASSERT_FALSE(status.ok()) << "corrupt, or without anybody to ask for the rest";
    EXPECT_TRUE(pair.quiet_after(2, status));
    pair.damage(0);
    pair.mute(false);
    ASSERT_EQ(pair.sync(3), Status());
    EXPECT_EQ(pair.difference(3), "");
  }
}

// The test's own damage is real: where nothing is summed it ends in the model.
TEST(IntegrityOverATransport, WhereNothingIsSummedItIsNotFound) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(trace_of(way));
    Pair pair(way.transport, Integrity::kOff, way.policy, Apply::kInplace, way.arrives);
    pair.damage(1);
    ASSERT_EQ(pair.sync(1), Status());
    EXPECT_TRUE(pair.damaged());
    EXPECT_NE(pair.difference(1), "");
  }
}

}  // namespace
}  // namespace shardpull
