// FleetOptions::interrupt. Goal: an error of it ends every wait with that error, and a sync under way fails
// for everybody and leaves nothing behind.
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <string>

#include <gtest/gtest.h>

#include "runtime/fleet_testing.h"

namespace shardpull {
namespace {

using namespace fleet_testing;

Status enough() {
  return {StatusCode::kCancelled, "enough", {.reason = Reason::kShutdown}};
}

TEST(Interrupt, ends_the_waits_for_others_that_do_not_come) {
  char directory[] = "/tmp/shardpull-interrupt-XXXXXX";
  ASSERT_NE(::mkdtemp(directory), nullptr);
  std::atomic<int> asked = 0;
  const FleetOptions fleet{
      .directory = directory, .token = 7, .interrupt = [&] { return ++asked < 3 ? Status() : enough(); }};
  const std::vector<TensorMeta> metadata{{"w", DType::kF32, {4, 4}}};
  const ModelSpec kept = tensor_parallel(metadata, 0, 1);
  BoxModel model(metadata, kept);
  EXPECT_EQ(Worker::connect({.fleet = fleet}, model).status().to_string(), enough().to_string()) << "no sender";
  asked = 0;
  for (const std::uint32_t world_size : {1u, 2u}) {
    auto trainer = Trainer::create({.fleet = fleet, .world_size = world_size});
    ASSERT_TRUE(trainer.ok()) << trainer.status().to_string();
    BoxSource source(**trainer, metadata, sharded(metadata, 1)[0], nullptr, code);
    asked = 0;
    EXPECT_EQ((*trainer)->init(source).to_string(), enough().to_string())
        << "no worker, or no other rank";
    asked = 0;
    EXPECT_EQ((*trainer)->receive_message(1'000'000).status().to_string(), enough().to_string());
  }
  std::filesystem::remove_all(directory);
}

TEST(Interrupt, fails_a_sync_everywhere_and_the_next_one_is_exact) {
  std::promise<void> interrupted;
  const std::shared_future<void> heard = interrupted.get_future().share();
  std::atomic<bool> waits = false;
  FleetSpec spec;
  spec.metadata = {{"layers.0.w", DType::kF32, {8, 4}}, {"layers.1.w", DType::kF32, {8, 4}}};
  spec.ranks = sharded(spec.metadata, 2);
  spec.workers = {tensor_parallel(spec.metadata, 0, 2), tensor_parallel(spec.metadata, 1, 2)};
  spec.steps = {{0}, {1, {}, true}, {2}};
  // The other rank yields nothing until the sender has been interrupted in its wait for it.
  spec.tamper = [&](std::uint32_t rank, std::uint64_t version, GroupTensors&) {
    if (rank == 1 && version == 1 && !waits.exchange(true)) heard.wait();
    return Status();
  };
  std::atomic<bool> told = false;
  spec.trainer_options = [&](std::uint32_t rank, TrainerOptions& options) {
    if (rank != 0) return;
    options.fleet.interrupt = [&] {
      if (!waits || told.exchange(true)) return Status();
      interrupted.set_value();
      return enough();
    };
  };
  const FleetOutcome outcome = run_fleet(spec);
  EXPECT_EQ(outcome.problems, std::vector<std::string>());
  ASSERT_EQ(outcome.sends[0].size(), 3u);
  EXPECT_EQ(outcome.sends[0][1], enough().with_context("trainer 0"));
  for (const auto* statuses : {&outcome.sends, &outcome.syncs}) {
    for (const std::vector<Status>& each : *statuses) {
      ASSERT_EQ(each.size(), 3u);
      EXPECT_TRUE(each[0].ok() && each[2].ok()) << each[0].to_string() << each[2].to_string();
      EXPECT_NE(each[1].message().find("enough"), std::string::npos) << each[1].to_string();
    }
  }
}

}  // namespace
}  // namespace shardpull
