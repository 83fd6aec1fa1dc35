// Goal: packed chunks that are scattered while they arrive go the way of mapped ones, beside packed ones that
// take a slot.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "protocol/consumer_machine.h"
#include "protocol/protocol_testing.h"

namespace shardpull::protocol_testing {
namespace {

using namespace consumer_action;  // NOLINT
using testing::ElementsAre;
using testing::IsEmpty;

struct Bench {
  Bench(const TinyOptions& options, std::uint32_t modules, std::set<std::uint32_t> on_arrival)
      : plan(tiny_model(options).plan(0)),
        machine(ConsumerConfig{
            .plan = plan, .num_modules = modules, .scattered_on_arrival = std::move(on_arrival)}) {
    EXPECT_EQ(machine.start_update(0, 1, 10, nullptr, out), Status());
    EXPECT_EQ(machine.update(0, out), Status());
  }
  void ready(std::uint32_t chunk) {
    const std::vector<SendPull> pulls = of_kind<SendPull>(out);
    const auto asked = std::find_if(pulls.begin(), pulls.end(),
                                    [&](const SendPull& pull) { return pull.pull.chunk == chunk; });
    ASSERT_NE(asked, pulls.end()) << chunk;
    ReadyInfo info;
    info.bytes = plan->chunks[chunk].runs[0].bytes;
    const SendPull pull = *asked;
    machine.ready(0, pull.producer, pull.pull, info, out);
  }
  std::vector<std::uint32_t> pulled() const {
    std::vector<std::uint32_t> chunks;
    for (const SendPull& pull : of_kind<SendPull>(out)) chunks.push_back(pull.pull.chunk);
    return chunks;
  }
  std::vector<std::uint32_t> copied() const {
    std::vector<std::uint32_t> chunks;
    for (const StartCopy& copy : of_kind<StartCopy>(out)) chunks.push_back(copy.chunk);
    return chunks;
  }

  std::shared_ptr<const WorkerPlan> plan;
  ConsumerMachine machine;
  ConsumerActions out;
};

TEST(ConsumerArrival, TakesNoSlotAndIsReadInItsModulesOrder) {
  Bench bench({.groups = 3, .ring_depth = 3, .modules_span_groups = true}, 1, {0, 2});
  for (const std::uint32_t chunk : {2u, 1u, 0u}) bench.ready(chunk);
  const std::vector<StartTransfer> transfers = of_kind<StartTransfer>(bench.out);
  ASSERT_EQ(transfers.size(), 1u) << "the second chunk alone takes a slot";
  EXPECT_EQ(transfers[0].chunk, 1u);
  EXPECT_EQ(transfers[0].slot, 0u);
  EXPECT_THAT(bench.copied(), ElementsAre(0u))
      << "chunk 2 waits for the module's first chunk, which fills it";
  const StartCopy first = of_kind<StartCopy>(bench.out)[0];
  ASSERT_EQ(first.ready.size(), 1u) << "says where the producer's slot is";
  EXPECT_EQ(first.ready[0].path, Path::kPacked);
  EXPECT_EQ(first.ready[0].bytes, bench.plan->chunks[0].bytes);
  EXPECT_THAT(of_kind<SendSignals>(bench.out), IsEmpty())
      << "the producer's slot is read until it is scattered";
  bench.machine.transfer_done(0, 1, 1, 0, {}, bench.out);
  EXPECT_THAT(of_kind<StartScatter>(bench.out), IsEmpty());
  bench.machine.scatter_done(0, 1, 0, {}, bench.out);
  EXPECT_THAT(bench.copied(), ElementsAre(0u, 2u));
  EXPECT_EQ(of_kind<StartScatter>(bench.out).size(), 1u);
}

TEST(ConsumerArrival, TheChunkKLaterIsPulledWhenThisOneHasBeenScattered) {
  Bench bench({.groups = 3, .ring_depth = 1}, 3, {0, 1, 2});
  bench.ready(0);
  EXPECT_THAT(bench.pulled(), ElementsAre(0u));
  EXPECT_THAT(bench.copied(), ElementsAre(0u));
  bench.machine.scatter_done(0, 1, 0, {}, bench.out);
  EXPECT_THAT(bench.pulled(), ElementsAre(0u, 1u));
  EXPECT_EQ(of_kind<SendSignals>(bench.out).size(), 1u);
}

}  // namespace
}  // namespace shardpull::protocol_testing
