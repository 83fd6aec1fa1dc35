// Goal: the plan of a fleet is that of each of its workers, made once for those that are alike, and its
// figures add up.
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/fleet_plan.h"
#include "cli/fleet_summary.h"
#include "cli/layouts.h"
#include "cli/model_input.h"
#include "model/families/build.h"

namespace shardpull::cli {
namespace {

using ::testing::HasSubstr;

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) ADD_FAILURE() << result.status().message();
  return std::move(result).value();
}

ModelInput tiny(const std::string& key) {
  return must(model_of_shape({key, ShapeSize::kTiny}, {}));
}

FleetPlan planned(const ModelInput& model, const std::string& trainer, const std::string& inference,
                  PublishMode publish = PublishMode::kAuto, PlanOptions options = {}) {
  FleetPlanOptions fleet;
  fleet.trainer.layout = must(parse_trainer_layout(trainer));
  fleet.trainer.publish = publish;
  fleet.inference = must(parse_inference_layout(inference));
  fleet.plan = options;
  return must(plan_fleet(model, fleet));
}

TEST(FleetPlan, is_that_of_each_worker_by_itself) {
  const ModelInput model = tiny("qwen3-30b-a3b");
  for (const char* inference : {"tp=2,replicas=3", "tp=2,dp=2", "tp=2,dp=2,ep=4,replicas=2", "pp=2,tp=2"}) {
    SCOPED_TRACE(inference);
    const FleetPlan fleet = planned(model, "pp=2,ep=2", inference);
    const InferenceLayout layout = must(parse_inference_layout(inference));
    std::uint64_t keys = 0, chunks = 0, kept = 0;
    for (std::uint32_t consumer = 0; consumer < fleet.workers(); ++consumer) {
      const auto built = must(build_model(model.config, layout, consumer));
      WorkerPlan alone = must(plan_worker(fleet.tables, must(bake(*built, model.metadata)), consumer));
      for (const Chunk& chunk : alone.chunks) keys += chunk.keys.size();
      chunks += alone.chunks.size();
      kept += alone.bytes_kept;
      alone.consumer = fleet.plan(consumer).consumer;
      EXPECT_EQ(fleet.plan(consumer), alone) << "worker " << consumer;
    }
    EXPECT_EQ(fleet.keys(), keys);
    EXPECT_EQ(fleet.chunks(), chunks);
    EXPECT_EQ(fleet.bytes_kept(), kept);
    EXPECT_EQ(fleet.digest(), planned(model, "pp=2,ep=2", inference).digest());
  }
}

TEST(FleetPlan, bakes_once_what_is_alike) {
  const ModelInput model = tiny("qwen3-30b-a3b");
  EXPECT_EQ(planned(model, "pp=1", "tp=2,dp=3,replicas=2").recordings.size(), 2u);  // dp ranks are alike
  EXPECT_EQ(planned(model, "pp=1", "tp=2,dp=2,ep=4").recordings.size(), 4u);        // but for their experts
  EXPECT_EQ(planned(model, "pp=1", "tp=2,pp=2").recordings.size(), 4u);
}

TEST(FleetPlan, names_the_first_worker_that_cannot_be_built) {
  const ModelInput model = tiny("qwen3-0.6b");
  FleetPlanOptions options;
  options.inference.tp = 3;
  const Result<FleetPlan> fleet = plan_fleet(model, options);
  ASSERT_FALSE(fleet.ok());
  EXPECT_THAT(fleet.status().message(), HasSubstr("worker 0"));
}

TEST(FleetFigures, add_up) {
  const ModelInput model = tiny("qwen3-30b-a3b");
  for (const PathPolicy path : {PathPolicy::kPacked, PathPolicy::kMapped}) {
    PlanOptions options;
    options.path = path;
    const FleetPlan fleet = planned(model, "pp=2,ep=2", "tp=2,ep=2,replicas=3", PublishMode::kAuto, options);
    const FleetFigures figures = figures_of(fleet, 1);
    ASSERT_EQ(figures.trainers.size(), 4u);
    ASSERT_EQ(figures.workers.size(), 2u);
    std::uint64_t served = 0, moved = 0, pulls = 0, packs = 0, published = 0, mapped = 0;
    for (const TrainerFigures& trainer : figures.trainers) {
      served += trainer.served_bytes;
      pulls += trainer.pulls;
      packs += trainer.packs;
      published += trainer.held_bytes;
      EXPECT_GT(trainer.export_buffer_bytes, 0u);
      EXPECT_LE(trainer.export_buffer_bytes, 2 * trainer.held_bytes + 4096);
      EXPECT_EQ(trainer.serve_ring_bytes > 0, path == PathPolicy::kPacked);
    }
    for (const WorkerFigures& worker : figures.workers) {
      moved += 3 * worker.bytes_planned;
      mapped += worker.mapped_chunks;
      EXPECT_EQ(worker.bytes_planned, worker.bytes_kept);
      EXPECT_EQ(worker.receive_ring_bytes > 0, path == PathPolicy::kPacked);
    }
    EXPECT_EQ(served, moved);
    EXPECT_EQ(packs, path == PathPolicy::kPacked ? pulls / 3 : 0);  // replicas share a pack
    EXPECT_EQ(mapped,
              path == PathPolicy::kMapped ? figures.workers[0].chunks + figures.workers[1].chunks : 0);
    EXPECT_GT(published, model.total_bytes);  // what is not an expert, twice
    EXPECT_GT(figures.hottest_bytes, 0u);
    EXPECT_LE(figures.hottest_bytes, figures.trainers[figures.hottest_trainer].served_bytes / 3);
  }
}

TEST(FleetFigures, resident_ranks_have_no_export_buffers) {
  const FleetPlan fleet = planned(tiny("qwen3-8b"), "fsdp=3", "tp=2");
  const FleetFigures figures = figures_of(fleet, 1);
  std::uint64_t held = 0;
  for (const TrainerFigures& trainer : figures.trainers) {
    EXPECT_EQ(trainer.export_buffer_bytes, 0u);
    held += trainer.held_bytes;
  }
  EXPECT_EQ(held, tiny("qwen3-8b").total_bytes);
}

TEST(FleetFigures, predict_what_links_and_latency_cost) {
  FleetPlan fleet;
  fleet.tables.ring_depth = 2;
  FleetFigures figures;
  figures.trainers.resize(2);
  figures.trainers[1].served_bytes = 4'000'000'000;
  figures.workers.resize(1);
  figures.workers[0].bytes_planned = 1'000'000'000;
  figures.workers[0].chunks = 11;
  figures.workers[0].largest_chunk_bytes = 10'000'000;
  LinkSpeeds links{
      .trainer_bytes_per_s = 2'000'000'000, .worker_bytes_per_s = 1'000'000'000, .pull_latency_ns = 1'000};
  Prediction prediction = predict(fleet, figures, links);
  EXPECT_EQ(prediction.trainers_ns, 2'000'000'000);
  EXPECT_EQ(prediction.slowest_trainer, 1u);
  EXPECT_EQ(prediction.workers_ns, 1'000'000'000);
  EXPECT_EQ(prediction.fill_ns, 20'000'000 + 1'000);
  EXPECT_EQ(prediction.total_ns(), 2'020'001'000);
  links.pull_latency_ns = 1'000'000'000;  // six rounds of two pulls
  EXPECT_EQ(predict(fleet, figures, links).workers_ns, 6'000'000'000);
}

TEST(FleetFigures, text_names_extremes_and_reasons) {
  const FleetPlan fleet = planned(tiny("qwen3-8b"), "pp=3", "tp=2,replicas=2");
  const std::string text = to_text(fleet, figures_of(fleet, 1), "gather: because",
                                   LinkSpeeds{2'000'000'000, 1'000'000'000, 1'000});
  for (const char* part :
       {"publish    gather: because", "per trainer", "export buffers", "per worker", "receive ring",
        "4 = 2 replicas of 2", "hottest pair: trainer", "prediction: ", " GB/s out of a trainer"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_THAT(to_text(fleet, figures_of(fleet, 1), "", std::nullopt),
              ::testing::Not(HasSubstr("prediction")));
}

}  // namespace
}  // namespace shardpull::cli
