// Where a sync lands: staged and in place, on whole fleets, with failures at every step. run_fleet compares
// every byte, version and module state after each sync, good or failed.
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/fleet_testing.h"
#include "runtime/stage.h"
#include "transport/cma/cma_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull {
namespace {

using namespace fleet_testing;  // NOLINT
using testing::AllOf;
using testing::HasSubstr;

const Status kBroken(StatusCode::kInternal, "it broke");

std::vector<TensorMeta> two_layers() {
  return {{"layers.0.bias", DType::kBF16, {33}},
          {"layers.0.w", DType::kF32, {24, 16}},
          {"layers.1.bias", DType::kBF16, {33}},
          {"layers.1.w", DType::kF32, {24, 16}}};
}

struct Way {
  Apply apply = Apply::kStaged;
  PathChoice path = PathChoice::kAuto;
  TransportKind transport = TransportKind::kShm;
  Integrity integrity = Integrity::kWire;
};

// Two workers, cut by `dim`, of two ranks that hold rows. The sync of version 1 fails at its second group.
FleetSpec fleet_of(const Way& way, const std::vector<TensorMeta>& metadata = two_layers(),
                   std::size_t dim = 0) {
  FleetSpec spec{.metadata = metadata,
                 .ranks = sharded(metadata, 2),
                 .workers = {tensor_parallel(metadata, 0, 2, dim), tensor_parallel(metadata, 1, 2, dim)}};
  spec.trainer_options = [way](std::uint32_t, TrainerOptions& options) {
    options.integrity = way.integrity;
    options.fleet.transport = way.transport;
  };
  spec.worker_options = [way](std::uint32_t, WorkerOptions& options) {
    options.apply = way.apply;
    options.path = way.path;
    options.fleet.transport = way.transport;
  };
  spec.tamper = [](std::uint32_t, std::uint64_t version, GroupTensors& tensors) {
    return version == 1 && tensors.group == 1 ? kBroken : Status();
  };
  spec.steps = {{.version = 0},
                {.version = 1, .fails = true},
                {.version = 2},
                {.version = 3, .names = {"layers.1.*"}},
                {.version = 1, .names = {"layers.1.*"}, .fails = true},
                {.version = 4}};
  return spec;
}

TEST(Staged, EveryPathAndIntegrity) {
  for (const Apply apply : {Apply::kInplace, Apply::kStaged}) {
    for (const Integrity integrity : {Integrity::kOff, Integrity::kFull}) {
      for (const PathChoice path : {PathChoice::kPacked, PathChoice::kMapped, PathChoice::kDirect}) {
        for (const std::size_t dim : {0u, 1u}) {
          SCOPED_TRACE(std::string(to_string(apply)) + " " + std::string(to_string(integrity)) + " " +
                       std::string(to_string(path)) + " dim " + std::to_string(dim));
          expect_exact(fleet_of({.apply = apply, .path = path, .integrity = integrity}, two_layers(), dim));
        }
      }
    }
  }
}

TEST(Staged, EveryTransport) {
  for (const TransportKind transport : {TransportKind::kCma, TransportKind::kTcp}) {
    if (transport == TransportKind::kCma && !cma_available().ok()) continue;
    if (transport == TransportKind::kTcp && !describe_ucx().ok()) continue;
    for (const PathChoice path : {PathChoice::kPacked, PathChoice::kDirect}) {
      SCOPED_TRACE(std::string(to_string(transport)) + " " + std::string(to_string(path)));
      expect_exact(fleet_of({.path = path, .transport = transport}));
    }
  }
}

// Workers of one fleet need not agree.
TEST(Staged, BesideAnInplaceWorker) {
  FleetSpec spec = fleet_of({});
  const auto common = spec.worker_options;
  spec.worker_options = [common](std::uint32_t worker, WorkerOptions& options) {
    common(worker, options);
    if (worker == 1) options.apply = Apply::kInplace;
  };
  expect_exact(spec);
}

// Gaps between the elements of strided parameters, transposed windows, another dtype than the tensor's, and
// memory of the worker's own allocator.
TEST(Staged, ParametersOfEveryKind) {
  const std::vector<TensorMeta> metadata = {{"layers.0.w", DType::kF32, {24, 16}},
                                            {"layers.1.w", DType::kF32, {24, 16}}};
  FleetSpec spec = fleet_of({}, metadata);
  spec.workers = {{{"pitched", DType::kF32, {24, 16}, {20, 1}, {{0, {}, {0, 0}, false}}},
                   {"turned", DType::kF32, {16, 24}, {}, {{1, {}, {0, 0}, true}}}},
                  {{"twice", DType::kF32, {48, 16}, {}, {{0, {}, {0, 0}, false}, {1, {}, {24, 0}, false}}}}};
  std::vector<EngineMemory> owned;
  spec.bind = [&owned](std::uint32_t worker, Model& model) {
    if (worker == 0) return model.materialise(std::byte{0xCD}, 64);
    Parameter& parameter = *model.modules()[0]->parameters()[0];
    owned.push_back(*Worker::allocate(parameter.storage_bytes()));
    std::memset(owned.back().data, 0xCD, owned.back().bytes);
    return parameter.bind(owned.back().data, owned.back().bytes);
  };
  spec.steps = {{.version = 0}, {.version = 1, .fails = true}, {.version = 2}};
  expect_exact(spec);
}

// ---- hooks ----------------------------------------------------------------------------------------------

// What hooks meet. The sync of version 1 fails in worker 0's hook of layers.0.w.
FleetSpec with_hooks(Apply apply, std::atomic<int>& calls, std::atomic<int>& wrong) {
  FleetSpec spec = fleet_of({.apply = apply});
  const auto version = std::make_shared<std::atomic<std::uint64_t>>(0);
  spec.tamper = [version](std::uint32_t, std::uint64_t now, GroupTensors&) {
    *version = now;
    return Status();
  };
  spec.bind = [spec, version, &calls, &wrong](std::uint32_t worker, Model& model) {
    const Status status = model.materialise(std::byte{0xCD}, 64);
    for (const ModuleSpec& module : spec.workers[worker]) {
      model.find_module(module.name)->set_post_process([=, &calls, &wrong](Module& me, const auto&) {
        ++calls;
        const std::vector<std::byte> expected =
            expected_bytes(spec.metadata, module, {*version, *version, *version, *version}, code);
        if (std::memcmp(me.find("weight")->memory(), expected.data(), expected.size()) != 0) ++wrong;
        return *version == 1 && worker == 0 && module.name == "layers.0.w" ? kBroken : Status();
      });
    }
    return status;
  };
  // Version 0 again repairs what version 1 left.
  spec.steps = {{.version = 0}, {.version = 1, .fails = true, .torn = true}, {.version = 0}, {.version = 2}};
  return spec;
}

TEST(Staged, HooksReadTheNewBytesInTheParameters) {
  for (const Apply apply : {Apply::kInplace, Apply::kStaged}) {
    SCOPED_TRACE(to_string(apply));
    std::atomic<int> calls{0}, wrong{0};
    FleetSpec spec = with_hooks(apply, calls, wrong);
    spec.steps = {{.version = 0}, {.version = 2}, {.version = 3}};
    expect_exact(spec);
    EXPECT_EQ(calls, 3 * 2 * 4);
    EXPECT_EQ(wrong, 0);
  }
}

// The worker whose hook fails is mixed. In place its mate does not commit without it; staged, where hooks are
// the commit's, it has the new version. Both get the old one when that is sent again.
TEST(Staged, AHookThatFailsLeavesNothingCurrentUntilALaterSync) {
  for (const Apply apply : {Apply::kInplace, Apply::kStaged}) {
    SCOPED_TRACE(to_string(apply));
    std::atomic<int> calls{0}, wrong{0};
    const FleetSpec spec = with_hooks(apply, calls, wrong);
    const FleetOutcome outcome = run_fleet(spec);
    EXPECT_TRUE(outcome.problems.empty()) << outcome.problems.front();
    EXPECT_EQ(wrong, 0);
    for (const auto& sends : outcome.sends) {
      ASSERT_EQ(sends.size(), 4u);
      EXPECT_EQ(sends[0], Status());
      EXPECT_THAT(sends[1].message(), AllOf(HasSubstr("it broke"), HasSubstr("layers.0.w")));
      EXPECT_EQ(sends[2], Status());
      EXPECT_EQ(sends[3], Status());
    }
    EXPECT_THAT(outcome.syncs[0].at(1).message(), HasSubstr("it broke"));
    if (apply == Apply::kStaged) {
      EXPECT_EQ(outcome.syncs[1].at(1), Status()) << "hooks are the commit's";
    } else {
      EXPECT_FALSE(outcome.syncs[1].at(1).ok()) << "nobody commits what a mate cannot";
    }
  }
}

// ---- a reader under the guard ---------------------------------------------------------------------------

// Reads what the engine may be writing: whether it did is what the guard says afterwards. A sequence lock's
// reader races by design, and ThreadSanitizer is told so.
__attribute__((no_sanitize("thread"))) void racing_copy(std::byte* to, const std::byte* from,
                                                        std::size_t bytes) {
  const volatile std::byte* const source = from;
  for (std::size_t i = 0; i < bytes; ++i) to[i] = source[i];
}

// Goal: whoever reads all parameters under the guard sees complete old or complete new versions, over many
// syncs, a third of which fail in one way or another.
TEST(Staged, AReaderUnderTheGuardSeesWholeVersionsOnly) {
  std::vector<TensorMeta> metadata;
  for (int layer = 0; layer < 3; ++layer) {
    metadata.push_back({"layers." + std::to_string(layer) + ".up.weight", DType::kBF16, {64, 64}});
    metadata.push_back({"layers." + std::to_string(layer) + ".norm.weight", DType::kF32, {64}});
  }
  FleetSpec spec = fleet_of({.path = PathChoice::kMapped}, metadata);
  spec.steps.clear();
  constexpr std::uint64_t kSyncs = 30;
  for (std::uint64_t version = 0; version < kSyncs; ++version)
    spec.steps.push_back({.version = version, .names = {}, .fails = version % 3 == 1});
  spec.tamper = [](std::uint32_t rank, std::uint64_t version, GroupTensors& tensors) {
    const bool broken = version % 3 == 1 && rank == version % 2 && tensors.group == version % 3;
    return broken ? kBroken : Status();
  };

  using Snapshot = std::vector<std::vector<std::byte>>;  // by module
  std::array<std::vector<Snapshot>, 2> versions;         // by worker and version
  for (std::uint32_t worker = 0; worker < 2; ++worker) {
    for (std::uint64_t version = 0; version < kSyncs; ++version) {
      Snapshot snapshot;
      for (const ModuleSpec& module : spec.workers[worker]) {
        const std::vector<std::optional<std::uint64_t>> all(metadata.size(), version);
        snapshot.push_back(expected_bytes(metadata, module, all, code));
      }
      versions[worker].push_back(std::move(snapshot));
    }
  }
  std::array<std::atomic<std::uint64_t>, 2> reads{}, seen{};
  std::atomic<int> torn{0};
  spec.reader = [&](std::uint32_t id, const Worker& worker, const Model& model,
                    const std::atomic<bool>& ended) {
    const std::atomic<std::uint64_t>& guard = worker.version_guard();
    Snapshot snapshot = versions[id][0];
    std::uint64_t last = ~0ull;
    while (!ended) {
      const std::uint64_t before = guard.load(std::memory_order_acquire);
      if (before % 2 == 1 || before == 0) {
        std::this_thread::yield();
        continue;
      }
      for (std::size_t m = 0; m < snapshot.size(); ++m) {
        const Parameter& parameter = *model.modules()[m]->parameters()[0];
        racing_copy(snapshot[m].data(), parameter.memory(), snapshot[m].size());
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (guard.load(std::memory_order_relaxed) != before) continue;
      ++reads[id];
      const auto found = std::find(versions[id].begin(), versions[id].end(), snapshot);
      if (found == versions[id].end()) {
        ++torn;
      } else if (const auto version = static_cast<std::uint64_t>(found - versions[id].begin());
                 version != last) {
        ++seen[id];
        last = version;
      }
    }
  };
  expect_exact(spec);
  EXPECT_EQ(torn, 0);
  for (const auto& count : reads) EXPECT_GT(count, 0u);
  for (const auto& count : seen) EXPECT_GT(count, 1u) << "it read beside the syncs";
}

// ---- the stage ------------------------------------------------------------------------------------------

// A plan and a recording that write parameters, one module each, and nothing else.
std::pair<WorkerPlan, Recording> writes(std::vector<RecordedParameter> parameters) {
  std::pair<WorkerPlan, Recording> made;
  Chunk chunk;
  for (std::uint32_t p = 0; p < parameters.size(); ++p) {
    parameters[p].module = p;
    made.second.modules.push_back({"module " + std::to_string(p), "", true, false});
    chunk.materialise.push_back(p);
    chunk.scatters.push_back({0, {.parameter = p}});
  }
  made.first.chunks.push_back(chunk);
  made.second.parameters = std::move(parameters);
  return made;
}

// Two parameters that lie between each other's rows of one memory: a commit writes elements, not extents.
TEST(Stage, ParametersThatShareStorageKeepApart) {
  const RecordedParameter rows{.name = "rows", .dtype = DType::kU8, .shape = {100, 4}, .stride = {8, 1}};
  const auto [plan, recording] = writes({rows, rows, rows});
  auto stage = Stage::make(plan, recording);
  ASSERT_TRUE(stage.ok()) << stage.status().to_string();
  std::vector<std::byte> memory(800, std::byte{7}), third(800, std::byte{7});
  for (std::uint32_t p = 0; p < 3; ++p)
    std::memset((*stage)->landing(p), static_cast<int>(p) + 1, 99 * 8 + 4);
  std::atomic<bool> done{false};
  (*stage)->commit(
      {0, 1}, [&](std::uint32_t p) { return p == 2 ? third.data() : memory.data() + 4 * p; },
      [&] { done = true; });
  (*stage)->stop();
  EXPECT_TRUE(done);
  for (std::size_t i = 0; i < memory.size(); ++i)
    ASSERT_EQ(memory[i], i % 8 < 4 ? std::byte{1} : std::byte{2}) << i;
  EXPECT_EQ(third, std::vector<std::byte>(800, std::byte{7})) << "not a module of this commit";
}

TEST(Stage, HoldsOnlyWhatThePlanWrites) {
  const RecordedParameter large{.name = "large", .dtype = DType::kF32, .shape = {1 << 20}, .stride = {1}};
  auto [plan, recording] = writes({large, large});
  plan.chunks[0].scatters.pop_back();
  const auto stage = Stage::make(plan, recording);
  ASSERT_TRUE(stage.ok());
  EXPECT_EQ((*stage)->bytes(), 4u << 20);
  EXPECT_EQ((*stage)->landing(1), nullptr);
  plan.chunks.clear();
  const auto empty = Stage::make(plan, recording);
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ((*empty)->bytes(), 0u);
}

TEST(Stage, NamesTheSizeThatDoesNotFit) {
  const RecordedParameter huge{.name = "huge", .dtype = DType::kF32, .shape = {1ll << 45}, .stride = {1}};
  const auto [plan, recording] = writes({huge});
  const auto stage = Stage::make(plan, recording);
  EXPECT_EQ(stage.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(stage.status().info().reason, Reason::kNoMemory);
  EXPECT_THAT(stage.status().message(), AllOf(HasSubstr("128 TiB"), HasSubstr("--apply inplace")));
}

}  // namespace
}  // namespace shardpull
