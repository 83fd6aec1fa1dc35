// Whole fleets over each transport, and each path that it has.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/fleet_testing.h"
#include "transport/cma/cma_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;
using namespace fleet_testing;  // NOLINT

struct Way {
  TransportKind transport;
  PathChoice path;
};

void PrintTo(const Way& way, std::ostream* out) {
  *out << to_string(way.transport) << ' ' << to_string(way.path);
}

class Transports : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (GetParam().transport == TransportKind::kCma) {
      if (const Status usable = cma_available(); !usable.ok()) GTEST_SKIP() << usable.message();
    }
    if (GetParam().transport == TransportKind::kTcp) {
      if (const auto ucx = describe_ucx(); !ucx.ok()) GTEST_SKIP() << ucx.status().message();
    }
  }

  FleetSpec over(FleetSpec spec, std::uint64_t export_pack_limit = 64 << 20) const {
    const Way way = GetParam();
    spec.trainer_options = [way, export_pack_limit](std::uint32_t, TrainerOptions& options) {
      options.fleet.transport = way.transport;
      options.export_pack_limit_bytes = export_pack_limit;
    };
    spec.worker_options = [way](std::uint32_t, WorkerOptions& options) {
      options.fleet.transport = way.transport;
      options.path = way.path;
    };
    return spec;
  }
};

std::vector<TensorMeta> two_layers() {
  std::vector<TensorMeta> metadata = {{"embed", DType::kBF16, {48, 16}}};
  for (int layer = 0; layer < 2; ++layer) {
    const std::string at = "layers." + std::to_string(layer) + ".";
    metadata.push_back({at + "a", DType::kBF16, {16, 32}});
    metadata.push_back({at + "b", DType::kF32, {24, 8}});
    metadata.push_back({at + "norm", DType::kF32, {16}});
  }
  return metadata;
}

std::vector<std::uint32_t> all_names(const std::vector<TensorMeta>& metadata) {
  std::vector<std::uint32_t> names(metadata.size());
  for (std::uint32_t name = 0; name < names.size(); ++name) names[name] = name;
  return names;
}

std::uint64_t packs_of(const FleetOutcome& outcome) {
  std::uint64_t packs = 0;
  for (const SyncReport& report : outcome.reports) {
    for (const RankReport& rank : report.ranks) packs += rank.packs;
  }
  return packs;
}

// Whether keys that are contiguous on both sides are read one-sidedly, with no pack at all.
bool all_direct(const Way& way) {
  return way.path == PathChoice::kDirect || way.path == PathChoice::kMapped;
}

TEST_P(Transports, rows_and_columns_of_whole_tensors) {
  const auto metadata = two_layers();
  for (const std::size_t dim : {0u, 1u}) {
    SCOPED_TRACE(dim);
    const FleetOutcome outcome = expect_exact(over({
        .metadata = metadata,
        .ranks = {{.whole = all_names(metadata)}, {.whole = all_names(metadata)}},
        .workers = {tensor_parallel(metadata, 0, 2, dim), tensor_parallel(metadata, 1, 2, dim)},
    }));
    if (dim == 0 && all_direct(GetParam())) {
      EXPECT_EQ(packs_of(outcome), 0u);
    }
    if (GetParam().path == PathChoice::kPacked) {
      EXPECT_GT(packs_of(outcome), 0u);
    }
    for (const auto& reports : outcome.at_workers) {
      for (const WorkerReport& report : reports)
        EXPECT_EQ(report.bytes_moved - report.padding_bytes, report.bytes_kept);
    }
  }
}

// Memory that the engine did not allocate, too large for export buffers: cma reads it where it lies.
TEST_P(Transports, foreign_memory) {
  if (GetParam().path == PathChoice::kMapped) GTEST_SKIP() << "mapped needs engine memory";
  const auto metadata = two_layers();
  for (const Lie lie : {Lie::kRowMajor, Lie::kPadded, Lie::kColumnMajor, Lie::kRestless}) {
    for (const bool resident : {false, true}) {
      SCOPED_TRACE(static_cast<int>(lie) * 2 + (resident ? 1 : 0));
      const RankSpec rank{
          .whole = all_names(metadata), .lie = lie, .engine_memory = false, .resident = resident};
      const FleetOutcome outcome = expect_exact(over(
          {
              .metadata = metadata,
              .ranks = {rank},
              .workers = {tensor_parallel(metadata, 0, 2), tensor_parallel(metadata, 1, 2)},
          },
          0));
      if (GetParam().transport == TransportKind::kCma && GetParam().path == PathChoice::kDirect) {
        EXPECT_EQ(packs_of(outcome), 0u);
      }
    }
  }
}

TEST_P(Transports, uneven_shards_and_a_sync_of_some_names) {
  const auto metadata = two_layers();
  for (const std::size_t dim : {0u, 1u}) {
    SCOPED_TRACE(dim);
    std::vector<RankSpec> ranks = sharded(metadata, 3, dim);
    for (RankSpec& rank : ranks) rank.resident = true;
    ranks[1].lie = Lie::kPadded;
    expect_exact(over({
        .metadata = metadata,
        .ranks = ranks,
        .workers = {tensor_parallel(metadata, 0, 2), tensor_parallel(metadata, 1, 2, 1)},
        .steps = {{0}, {1, {"layers.1.*"}}, {2}},
    }));
  }
}

// Zeroed parts of a parameter, and keys that land beside them.
TEST_P(Transports, replicas_and_small_chunks) {
  const auto metadata = two_layers();
  FleetSpec spec = over({
      .metadata = metadata,
      .ranks = {{.whole = all_names(metadata)}, {.whole = all_names(metadata)}},
      .workers = {tensor_parallel(metadata, 0, 2), tensor_parallel(metadata, 1, 2),
                  tensor_parallel(metadata, 0, 2), tensor_parallel(metadata, 1, 2)},
      .replicas = 2,
  });
  const Way way = GetParam();
  spec.worker_options = [way](std::uint32_t, WorkerOptions& options) {
    options.fleet.transport = way.transport;
    options.path = way.path;
    options.max_chunk_bytes = 100;
    options.chunk_split = 2;
    options.pull_split = 2;
  };
  expect_exact(spec);
}

TEST_P(Transports, a_failed_sync_is_followed_by_an_exact_one) {
  const auto metadata = two_layers();
  FleetSpec spec = over({
      .metadata = metadata,
      .ranks = {{.whole = all_names(metadata)}},
      .workers = {tensor_parallel(metadata, 0, 1)},
      .steps = {{0}, {.version = 1, .fails = true}, {2}, {3}},
  });
  spec.tamper = [](std::uint32_t, std::uint64_t version, GroupTensors& tensors) {
    if (version != 1 || tensors.group != 2) return Status();
    return Status(StatusCode::kInternal, "the source broke");
  };
  expect_exact(spec);
}

// A build without UCX has no tcp; a host that lacks the library skips it.
bool built_with_ucx() {
  return describe_ucx().status().code() != StatusCode::kUnimplemented;
}

std::vector<Way> ways() {
  std::vector<Way> all{
      {TransportKind::kShm, PathChoice::kAuto},   {TransportKind::kShm, PathChoice::kPacked},
      {TransportKind::kShm, PathChoice::kMapped}, {TransportKind::kShm, PathChoice::kDirect},
      {TransportKind::kCma, PathChoice::kAuto},   {TransportKind::kCma, PathChoice::kPacked},
      {TransportKind::kCma, PathChoice::kDirect}, {TransportKind::kTcp, PathChoice::kAuto},
      {TransportKind::kTcp, PathChoice::kPacked}, {TransportKind::kTcp, PathChoice::kDirect},
  };
  const auto is_tcp = [](const Way& way) { return way.transport == TransportKind::kTcp; };
  if (!built_with_ucx()) std::erase_if(all, is_tcp);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Each, Transports, ::testing::ValuesIn(ways()), [](const auto& info) {
  return std::string(to_string(info.param.transport)) + "_" + std::string(to_string(info.param.path));
});

// Elements of different sizes one after another, and chunks so small that tensors are split across them.
TEST_P(Transports, case_079_mixed_elements_in_one_chunk) {
  const std::vector<TensorMeta> metadata = {{"a", DType::kF16, {3}},
                                            {"b", DType::kF32, {5}},
                                            {"c", DType::kBF16, {1}},
                                            {"d", DType::kF8E4M3, {7}},
                                            {"e", DType::kI64, {1}}};
  for (const std::uint64_t limit : {std::uint64_t{0}, std::uint64_t{24}}) {
    SCOPED_TRACE(limit);
    FleetSpec spec = over({.metadata = metadata,
                           .ranks = {{.whole = all_names(metadata)}},
                           .workers = {tensor_parallel(metadata, 0, 1)}});
    const Way way = GetParam();
    spec.worker_options = [way, limit](std::uint32_t, WorkerOptions& options) {
      options.fleet.transport = way.transport;
      options.path = way.path;
      options.max_chunk_bytes = limit;
    };
    expect_exact(spec);
  }
}

// Groups that grow from one to the next, through two slots that nothing has sized before: everything is
// allocated and granted before the first pull, so that the first sync is as good as any.
TEST_P(Transports, case_090_growing_groups_in_the_first_sync) {
  std::vector<TensorMeta> metadata;
  std::int64_t rows = 16 << 10;
  for (int layer = 0; layer < 3; ++layer, rows *= 4)  // 64 KiB, 256 KiB, 1 MiB
    metadata.push_back({"layers." + std::to_string(layer) + ".w", DType::kF32, {rows / 16, 16}});
  for (int again = 0; again < 3; ++again) {
    expect_exact(over({
        .metadata = metadata,
        .ranks = {{.whole = all_names(metadata)}},
        .workers = {tensor_parallel(metadata, 0, 2), tensor_parallel(metadata, 1, 2)},
        .steps = {{0}, {1}},
    }));
  }
}

// Parameters in memory of the engine's allocator.
TEST_P(Transports, bound_parameters) {
  const auto metadata = two_layers();
  FleetSpec spec = over({
      .metadata = metadata,
      .ranks = {{.whole = all_names(metadata)}},
      .workers = {tensor_parallel(metadata, 0, 2), tensor_parallel(metadata, 1, 2)},
  });
  std::vector<EngineMemory> memory(spec.workers.size());
  spec.bind = [&](std::uint32_t worker, Model& model) -> Status {
    std::uint64_t bytes = 0;
    for (const auto& module : model.modules()) {
      for (const auto& parameter : module->parameters()) bytes += (parameter->storage_bytes() + 63) / 64 * 64;
    }
    auto made = Worker::allocate(bytes);
    if (!made.ok()) return made.status();
    memory[worker] = *made;
    std::byte* at = made->data;
    for (const auto& module : model.modules()) {
      for (const auto& parameter : module->parameters()) {
        if (const Status bound = parameter->bind(at, parameter->storage_bytes()); !bound.ok()) return bound;
        at += (parameter->storage_bytes() + 63) / 64 * 64;
      }
    }
    return {};
  };
  expect_exact(spec);
}

FleetSpec small() {
  const auto metadata = two_layers();
  return {.metadata = metadata,
          .ranks = {{.whole = all_names(metadata)}},
          .workers = {tensor_parallel(metadata, 0, 1)},
          .steps = {{0}}};
}

TEST(TransportChoice, a_path_that_the_transport_lacks_is_refused_naming_the_pair) {
  if (!built_with_ucx()) GTEST_SKIP() << "this build has no UCX";
  FleetSpec spec = small();
  spec.trainer_options = [](std::uint32_t, TrainerOptions& options) {
    options.fleet.transport = TransportKind::kTcp;
    options.fleet.connect_timeout_ms = 5000;
  };
  spec.worker_options = [](std::uint32_t, WorkerOptions& options) {
    options.fleet.transport = TransportKind::kTcp;
    options.path = PathChoice::kMapped;
  };
  const FleetOutcome outcome = run_fleet(spec);
  EXPECT_THAT(outcome.connects[0].message(), HasSubstr("path mapped with transport tcp"));
  EXPECT_THAT(outcome.inits[0].message(), HasSubstr("path mapped with transport tcp"));
}

TEST(TransportChoice, sides_with_different_transports_are_refused_naming_both) {
  if (!built_with_ucx()) GTEST_SKIP() << "this build has no UCX";
  FleetSpec spec = small();
  spec.worker_options = [](std::uint32_t, WorkerOptions& options) {
    options.fleet.transport = TransportKind::kTcp;
  };
  const FleetOutcome outcome = run_fleet(spec);
  EXPECT_THAT(outcome.connects[0].message(), HasSubstr("transport tcp, the trainers with shm"));
}

TEST(TransportChoice, nothing_listens_beyond_loopback_unasked) {
  TrainerOptions options;
  options.fleet.token = 7;
  options.fleet.rendezvous = "0.0.0.0:0";
  EXPECT_THAT(Trainer::create(options).status().message(), HasSubstr("rendezvous"));
  options.fleet.rendezvous = "0.0.0.0:39471";
  const Status refused = Trainer::create(options).status();
  EXPECT_THAT(refused.message(), HasSubstr("--insecure-listen"));
}

}  // namespace
}  // namespace shardpull
