// Goal: where a sync's time can be worked out by hand, the simulation of fleets at their size gives it.
#include "sim/scale.h"

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "plan/plan.h"
#include "shardpull/bake.h"
#include "shardpull/tensor.h"

namespace shardpull::sim {
namespace {

constexpr std::int64_t kLatency = 1'000, kHub = 70;

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) ADD_FAILURE() << result.status().message();
  return std::move(result).value();
}

// Every rank holds every tensor, one per group, of `columns` x 2 bytes; a worker keeps all of each, or with
// `strided` its first column.
struct Small {
  std::uint32_t ranks = 1, replicas = 1;
  std::vector<std::int64_t> rows = {1'000'000};
  bool strided = false;
  Integrity integrity = Integrity::kOff;
  std::uint32_t ring_depth = 2, lookahead = 1;
};

ScaleFleet fleet_of(const Small& small) {
  InitTables tables;
  Recording recording;
  for (std::uint32_t i = 0; i < small.rows.size(); ++i) {
    const std::vector<std::int64_t> shape = {small.rows[i], 2};
    tables.metadata.push_back(
        {.name = "layers." + std::to_string(i) + ".w", .dtype = DType::kU8, .shape = shape});
    tables.group_lens.push_back(1);
    const TensorMeta& meta = tables.metadata.back();
    Tensor kept = must(Tensor::fake(meta.name, meta.dtype, meta.shape));
    if (small.strided) kept = must(kept.narrow(1, 0, 1));
    recording.modules.push_back({.name = "m" + std::to_string(i), .type = "Module", .baked = true});
    const std::vector<std::int64_t> stride = {kept.shape()[1], 1};
    recording.parameters.push_back(
        {.module = i, .name = "w", .dtype = meta.dtype, .shape = kept.shape(), .stride = stride});
    Scatter scatter;
    scatter.name = i;
    scatter.wire_dtype = meta.dtype;
    scatter.slice = must(kept.slice());
    scatter.shape = kept.shape();
    scatter.chain = to_string(kept.chain());
    scatter.destination = {
        .parameter = i, .dtype = meta.dtype, .offset = 0, .shape = kept.shape(), .stride = stride};
    recording.scatters.push_back(std::move(scatter));
    recording.live.push_back(i);
  }
  for (std::uint32_t rank = 0; rank < small.ranks; ++rank)
    tables.producers.push_back("t" + std::to_string(rank));
  tables.producer_mappable.assign(small.ranks, 1);
  tables.producer_resident.assign(small.ranks, 0);
  tables.num_consumers = tables.num_replicas = small.replicas;
  tables.ring_depth = small.ring_depth;
  tables.transport = TransportKind::kUcx;
  tables.integrity = small.integrity;
  ScaleFleet fleet;
  fleet.tables = std::make_shared<const InitTables>(tables);
  fleet.workers.push_back(
      {.plan = std::make_shared<const WorkerPlan>(must(plan_worker(tables, recording, 0))),
       .num_modules = static_cast<std::uint32_t>(small.rows.size()),
       .scattered_on_arrival = {}});
  fleet.lookahead = small.lookahead;
  return fleet;
}

// A host for each process; links of a byte, copies of two and sums of four bytes a nanosecond.
ScaleModel model() {
  ScaleModel model;
  model.ranks_per_host = model.workers_per_host = 1;
  model.trainer_host_bytes_per_s = model.worker_host_bytes_per_s = 1'000'000'000;
  model.latency_ns = kLatency;
  model.copy_bytes_per_s = 2'000'000'000;
  model.sum_bytes_per_s = 4'000'000'000;
  model.hub_message_ns = kHub;
  return model;
}

ScaleReport run(const Small& small, const ScaleModel& model) {
  return must(simulate_scale(fleet_of(small), model));
}

// Of one rank and one worker: to the worker's first pull at the rank, and from the last byte at the worker to
// the sync's end. A control message between the two takes two latencies and the hub once.
constexpr std::int64_t kToPull =
    3 * (2 * kLatency + kHub) + kLatency;  // StartUpdate, UpdateStarted, Update, Pull
constexpr std::int64_t kAfter =
    2 * kLatency + 3 * (2 * kLatency + kHub);  // Free, FreeAck, Prepared, Finish, Finished

TEST(Scale, one_read_takes_its_latencies_and_its_bytes) {
  const Small small;
  const std::int64_t bytes = 2'000'000;
  const ScaleReport report = run(small, model());
  const std::int64_t published = 2 * kLatency + bytes / 2;  // SyncOpen; copied into the export buffer
  EXPECT_EQ(report.sync_ns, std::max(kToPull, published) + 3 * kLatency + bytes + kAfter);
  EXPECT_EQ(report.bound_ns, bytes);
  EXPECT_EQ(report.bytes_moved, static_cast<std::uint64_t>(bytes));
  ASSERT_EQ(report.trainer_hosts.size(), 1u);
  EXPECT_EQ(report.trainer_hosts[0].bytes, static_cast<std::uint64_t>(bytes));
  EXPECT_EQ(report.trainer_hosts[0].busy_ns, bytes);
  EXPECT_EQ(report.worker_hosts[0].bytes, static_cast<std::uint64_t>(bytes));
  EXPECT_EQ(report.pulls, 1u);
  EXPECT_EQ(report.packs, 0u);
  EXPECT_EQ(report.hot_messages, 4u);  // Pull, Ready, Free, FreeAck
  EXPECT_EQ(report.hub_in, 3u);        // UpdateStarted, Prepared, Finished
  EXPECT_EQ(report.hub_out, 3u);
  EXPECT_EQ(report.hub_busy_ns, 6 * kHub);
  EXPECT_EQ(report.worker_control, std::vector<std::uint32_t>{6});
}

// The sums of what is read in place: first the rank's, then the worker's.
TEST(Scale, sums_and_the_source_take_their_time) {
  Small small;
  small.integrity = Integrity::kWire;
  ScaleModel slow = model();
  slow.source_bytes_per_s = 500'000'000;
  const std::int64_t bytes = 2'000'000;
  const ScaleReport report = run(small, slow);
  const std::int64_t published = 2 * kLatency + bytes / 2 + bytes * 2;
  EXPECT_EQ(report.sync_ns, published + bytes / 4 + 3 * kLatency + bytes + bytes / 4 + kAfter);
  EXPECT_EQ(report.sums, 1u);
}

// Two workers that do the same share the rank's link; on its own each would take half as long.
TEST(Scale, workers_share_a_trainers_link) {
  Small small;
  small.replicas = 2;
  ScaleModel at_once = model();
  at_once.hub_message_ns = 0;
  const std::int64_t bytes = 2'000'000;
  const ScaleReport report = run(small, at_once);
  const std::int64_t published = 2 * kLatency + bytes / 2;
  EXPECT_EQ(report.sync_ns, published + 3 * kLatency + 2 * bytes + kAfter - 3 * kHub);
  EXPECT_EQ(report.bound_ns, 2 * bytes);
  EXPECT_TRUE(report.bound_by_trainer);
  EXPECT_EQ(report.worker_hosts[1].busy_ns, 2 * bytes);
}

// Two ranks serve, and the worker's link is the narrower one.
TEST(Scale, a_workers_link_can_be_the_limit) {
  Small small;
  small.ranks = 2;
  small.rows = {1'000'000, 1'000'000};
  const std::int64_t bytes = 2'000'000;
  const ScaleReport report = run(small, model());
  EXPECT_EQ(report.trainer_hosts[0].bytes, static_cast<std::uint64_t>(bytes));
  EXPECT_EQ(report.trainer_hosts[1].bytes, static_cast<std::uint64_t>(bytes));
  EXPECT_FALSE(report.bound_by_trainer);
  EXPECT_EQ(report.bound_ns, 2 * bytes);
  EXPECT_GE(report.sync_ns, 2 * bytes);
  EXPECT_LE(report.worker_hosts[0].busy_ns, report.sync_ns);
}

// Strided slices: one pack for both replicas, a receive slot, a scatter.
TEST(Scale, packs_once_for_all_replicas) {
  Small small;
  small.strided = true;
  small.replicas = 2;
  ScaleModel at_once = model();
  at_once.hub_message_ns = 0;
  const std::int64_t bytes = 1'000'000;  // of the two columns one
  const ScaleReport report = run(small, at_once);
  EXPECT_EQ(report.packs, 1u);
  EXPECT_EQ(report.bytes_packed, static_cast<std::uint64_t>(bytes));
  const std::int64_t published = 2 * kLatency + bytes, pack = bytes / 2, scatter = bytes / 2;
  // The group is signalled as the slot has arrived; the scatter is the longer way to the end.
  EXPECT_EQ(report.sync_ns, published + pack + 3 * kLatency + 2 * bytes + scatter + 3 * 2 * kLatency);
  EXPECT_EQ(report.ranks[0].serve_rings, small.ring_depth * static_cast<std::uint64_t>(bytes));
}

// With no lookahead a rank holds one group, and asks for the next when everybody has signalled.
TEST(Scale, credit_bounds_what_a_rank_holds) {
  Small small;
  small.rows = {1'000'000, 500'000, 250'000};
  small.lookahead = 0;
  const ScaleReport none = run(small, model());
  EXPECT_EQ(none.ranks[0].peak_groups, 1u);
  EXPECT_EQ(none.ranks[0].promised, 4'000'000u);  // the largest group, and as much in an export buffer
  EXPECT_EQ(none.ranks[0].reached, 4'000'000u);
  small.lookahead = 2;
  const ScaleReport all = run(small, model());
  EXPECT_EQ(all.ranks[0].peak_groups, 3u);
  EXPECT_EQ(all.ranks[0].promised, 12'000'000u);
  EXPECT_EQ(all.ranks[0].reached, 7'000'000u);
  EXPECT_LT(all.sync_ns, none.sync_ns);
}

TEST(Scale, refuses_what_it_cannot_mean) {
  ScaleFleet fleet = fleet_of({});
  ScaleModel still = model();
  still.copy_bytes_per_s = 0;
  EXPECT_FALSE(simulate_scale(fleet, still).ok());
  still = model();
  still.workers_per_host = 0;
  EXPECT_FALSE(simulate_scale(fleet, still).ok());
  fleet.workers.push_back(fleet.workers.front());
  EXPECT_FALSE(simulate_scale(fleet, model()).ok());
  fleet.workers.clear();
  EXPECT_FALSE(simulate_scale(fleet, model()).ok());
}

// What its watchdog has to outlast: here the source.
TEST(Scale, says_how_long_a_rank_waits) {
  ScaleModel slow = model();
  slow.source_bytes_per_s = 1'000;  // 2,000 s
  const ScaleReport report = run({}, slow);
  EXPECT_EQ(report.longest_wait_ns, 2'000'000'000'000 + 1'000'000);
  EXPECT_EQ(report.longest_wait_rank, 0u);
}

}  // namespace
}  // namespace shardpull::sim
