// Goal: the simulation of a fleet at its size moves what the plan says, over the links that the plan says,
// with the messages that the protocol says, and says the same each time.
#include "cli/scale_report.h"

#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/fleet_plan.h"
#include "cli/fleet_summary.h"

namespace shardpull::cli {
namespace {

using ::testing::HasSubstr;

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) ADD_FAILURE() << result.status().message();
  return std::move(result).value();
}

struct Scaled {
  ScaleArguments arguments;
  ModelInput model;
  FleetPlan plan;
  sim::ScaleFleet fleet;
  sim::ScaleReport report;
};

std::unique_ptr<Scaled> scaled(const std::string& shape, const std::string& trainer,
                               const std::string& inference, ScaleArguments arguments = {}) {
  auto out = std::make_unique<Scaled>();
  out->arguments = std::move(arguments);
  out->arguments.workload = "own";
  FleetArguments& fleet = out->arguments.fleet;
  fleet.trainer.layout = must(parse_trainer_layout(trainer));
  fleet.inference = must(parse_inference_layout(inference));
  fleet.transport = TransportKind::kTcp;
  fleet.path = PathChoice::kDirect;  // what is tiny would all be packed otherwise
  out->arguments.links.ranks_per_host = 3;
  out->arguments.links.workers_per_host = 5;
  out->model = must(model_of_shape({shape, ShapeSize::kTiny}, {}));
  out->plan = must(plan_fleet(out->model, plan_options(fleet)));
  out->fleet = scale_fleet(out->plan, fleet);
  out->report = must(sim::simulate_scale(out->fleet, out->arguments.links));
  return out;
}

std::uint64_t sum(const std::vector<sim::LinkUse>& hosts) {
  std::uint64_t bytes = 0;
  for (const sim::LinkUse& host : hosts) bytes += host.bytes;
  return bytes;
}

std::uint64_t messages(const sim::ScaleReport& report, sim::ControlKind kind) {
  return report.control[static_cast<std::size_t>(kind)];
}

TEST(ScaleReport, moves_what_the_plan_says) {
  for (const char* trainer : {"pp=2,ep=4", "pp=2,fsdp=3", "pp=1"}) {
    SCOPED_TRACE(trainer);
    const auto run = scaled("kimi-k2", trainer, "tp=4,ep=4,replicas=3");
    const sim::ScaleReport& report = run->report;
    std::uint64_t moved = 0, padding = 0, pulls = 0;
    std::vector<std::uint64_t> from(report.trainer_hosts.size(), 0), to(report.worker_hosts.size(), 0);
    for (std::uint32_t consumer = 0; consumer < run->plan.workers(); ++consumer) {
      const WorkerPlan& plan = run->plan.plan(consumer);
      moved += plan.bytes_planned;
      padding += padding_bytes(plan);
      to[consumer / 5] += plan.bytes_planned + padding_bytes(plan);
      for (const Chunk& chunk : plan.chunks) {
        pulls += chunk.runs.size();
        for (const ::shardpull::Run& run_of : chunk.runs) {
          std::uint64_t bytes = 0;
          for (std::uint32_t k = 0; k < run_of.key_count; ++k)
            bytes += chunk.keys[run_of.first_key + k].bytes;
          from[run_of.producer / 3] += chunk.path == Path::kPacked ? run_of.bytes : bytes;
        }
      }
    }
    EXPECT_EQ(report.bytes_moved, moved);
    EXPECT_EQ(report.padding_bytes, padding);
    EXPECT_EQ(report.pulls, pulls);
    EXPECT_EQ(sum(report.trainer_hosts), moved + padding);
    EXPECT_EQ(sum(report.worker_hosts), moved + padding);
    for (std::size_t host = 0; host < from.size(); ++host)
      EXPECT_EQ(report.trainer_hosts[host].bytes, from[host]);
    for (std::size_t host = 0; host < to.size(); ++host) EXPECT_EQ(report.worker_hosts[host].bytes, to[host]);
    std::uint64_t packs = 0;
    for (const TrainerFigures& figures : figures_of(run->plan, run->fleet.lookahead).trainers)
      packs += figures.packs;
    EXPECT_EQ(report.packs, packs);  // one for all replicas
    EXPECT_GT(report.packs, 0u);
    EXPECT_GE(report.sync_ns, report.bound_ns);
    for (const sim::RankMemory& memory : report.ranks) {
      EXPECT_LE(memory.reached, memory.promised);
      EXPECT_GE(memory.reached, memory.serve_rings);
    }
  }
}

TEST(ScaleReport, counts_the_messages_of_the_protocol) {
  const auto run = scaled("kimi-k2", "pp=2,ep=4", "tp=4,ep=4,replicas=3");
  const sim::ScaleReport& report = run->report;
  const std::uint64_t ranks = 8, workers = 12;
  using sim::ControlKind;
  for (const ControlKind kind :
       {ControlKind::kSyncOpen, ControlKind::kSyncBegan, ControlKind::kRankEnded, ControlKind::kSyncClosed})
    EXPECT_EQ(messages(report, kind), ranks) << sim::to_string(kind);
  for (const ControlKind kind : {ControlKind::kStartUpdate, ControlKind::kUpdateStarted, ControlKind::kUpdate,
                                 ControlKind::kPrepared, ControlKind::kFinish, ControlKind::kFinished})
    EXPECT_EQ(messages(report, kind), workers) << sim::to_string(kind);
  // A worker signals each group to each of its owners: on the hot endpoint where it pulls from that one.
  std::uint64_t signals = 0, cold = 0;
  for (std::uint32_t consumer = 0; consumer < workers; ++consumer) {
    const WorkerPlan& plan = run->plan.plan(consumer);
    std::set<std::uint32_t> hot;
    for (const ProducerPlan& producer : plan.producers) hot.insert(producer.producer);
    for (const auto& owners : plan.group_owners) {
      for (const std::uint32_t owner : owners) {
        ++signals;
        cold += hot.contains(owner) ? 0 : 1;
      }
    }
  }
  EXPECT_EQ(report.signals, signals);
  EXPECT_GT(cold, 0u);
  EXPECT_LE(messages(report, ControlKind::kFreeGroups), cold);  // those of one event to one rank are one
  EXPECT_EQ(messages(report, ControlKind::kFreeAck), messages(report, ControlKind::kFreeGroups));
  // The hub is where all but the sender's own pass; both ends of each are counted.
  const std::uint64_t all = std::accumulate(report.control.begin(), report.control.end(), std::uint64_t{0});
  const std::uint64_t ends =
      std::accumulate(report.worker_control.begin(), report.worker_control.end(), std::uint64_t{0}) +
      std::accumulate(report.rank_control.begin(), report.rank_control.end(), std::uint64_t{0});
  EXPECT_EQ(ends, 2 * all);
  EXPECT_EQ(report.hub_in + report.hub_out, 2 * all - report.rank_control[0]);
}

TEST(ScaleReport, is_the_same_each_time) {
  const auto text = [] {
    const auto run = scaled("kimi-k2", "pp=2,ep=4", "tp=4,ep=4,replicas=3");
    auto json = nlohmann::ordered_json::parse(
        to_json_text({run->arguments, run->model, run->plan, run->fleet, run->report}));
    EXPECT_GT(json["took"]["events"].get<std::uint64_t>(), 100u);
    json.erase("took");
    return json.dump();
  };
  EXPECT_EQ(text(), text());
}

TEST(ScaleReport, staged_and_resident_fleets_run_too) {
  ScaleArguments arguments;
  arguments.fleet.apply = Apply::kStaged;
  arguments.fleet.trainer.publish = PublishMode::kResident;
  arguments.fleet.pull_split = 2;
  arguments.fleet.integrity = Integrity::kFull;
  const auto run = scaled("qwen3-30b-a3b", "ep=2", "tp=2,replicas=2", arguments);
  EXPECT_GT(run->report.sync_ns, run->report.prepared_ns);
  for (const sim::RankMemory& memory : run->report.ranks) EXPECT_EQ(memory.reached, memory.serve_rings);
  EXPECT_GT(run->report.sums, 0u);
  const std::string shown = to_text({run->arguments, run->model, run->plan, run->fleet, run->report});
  EXPECT_THAT(shown, HasSubstr("resident ranks publish"));
  EXPECT_THAT(shown, HasSubstr("times as long"));
}

}  // namespace
}  // namespace shardpull::cli
