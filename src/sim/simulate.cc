#include "sim/simulate.h"

#include <algorithm>

#include <fmt/format.h>

#include "sim/fleet.h"
#include "sim/sim_model.h"
#include "sim/world.h"

namespace shardpull::sim {

std::string_view to_string(Holdings holdings) {
  switch (holdings) {
    case Holdings::kEverybody:
      return "everybody";
    case Holdings::kStages:
      return "stages";
    case Holdings::kRandom:
      return "random";
    case Holdings::kRows:
      return "rows";
    case Holdings::kBoxes:
      return "boxes";
  }
  return "unknown";
}

SimOptions SimOptions::draw(std::uint64_t seed) {
  Random random = Random(seed).fork(9);
  const auto one_of = [&](std::initializer_list<std::uint32_t> values) {
    return values.begin()[random.below(values.size())];
  };
  SimOptions options;
  options.trainers = one_of({1, 2, 3, 4});
  options.tp = one_of({1, 2, 4});
  options.pp = options.tp == 4 ? 1 : one_of({1, 2});
  options.replicas = one_of({1, 2});
  options.ring_depth = one_of({1, 2, 4});
  options.lookahead = one_of({0, 1, 3});
  options.layers = one_of({2, 3, 5});
  options.holdings = static_cast<Holdings>(random.below(kHoldings));
  options.path = static_cast<PathPolicy>(random.below(4));
  options.max_chunk_bytes = one_of({0, 256, 512, 1024});
  options.chunk_split = one_of({1, 1, 3});
  options.pull_split = one_of({1, 1, 2});
  options.tied = random.chance(0.3);
  options.share_slots = random.chance(0.8);
  options.degraded = options.replicas > 1 && random.chance(0.3);
  options.partial = random.chance(0.5);
  options.resident = random.chance(0.4);
  if (options.path == PathPolicy::kPacked || options.path == PathPolicy::kDirect)
    options.transport = random.chance(0.6) ? TransportKind::kTcp : TransportKind::kShm;
  options.integrity = static_cast<Integrity>(random.below(3));
  options.fail_on_loss = random.chance(0.15);
  return options;
}

SimOptions SimOptions::draw_with_faults(std::uint64_t seed) {
  SimOptions options = draw(seed);
  Random random = Random(seed).fork(19);
  options.faults = true;
  options.failures = random.chance(0.5);
  options.corruption = options.integrity == Integrity::kFull && random.chance(0.5);
  options.replicas += static_cast<std::uint32_t>(random.below(2));
  options.syncs = static_cast<std::uint32_t>(random.between(4, 7));
  return options;
}

std::string to_string(const SimOptions& o) {
  return fmt::format(
      "trainers={} tp={} pp={} replicas={} ring_depth={} lookahead={} layers={} syncs={} holdings={} path={} "
      "max_chunk_bytes={} "
      "chunk_split={} pull_split={} tied={} share_slots={} degraded={} failures={} partial={} resident={} "
      "transport={} integrity={} corruption={} faults={} fail_on_loss={}",
      o.trainers, o.tp, o.pp, o.replicas, o.ring_depth, o.lookahead, o.layers, o.syncs, to_string(o.holdings),
      o.path == PathPolicy::kAuto     ? "auto"
      : o.path == PathPolicy::kPacked ? "packed"
      : o.path == PathPolicy::kMapped ? "mapped"
                                      : "direct",
      o.max_chunk_bytes, o.chunk_split, o.pull_split, o.tied, o.share_slots, o.degraded, o.failures,
      o.partial, o.resident, to_string(o.transport), to_string(o.integrity), o.corruption, o.faults,
      o.fail_on_loss);
}

SimReport simulate(std::uint64_t seed, const SimOptions& options, bool trace) {
  SimReport report;
  auto model = SimModel::make(options, seed);
  if (!model.ok()) {
    report.violations.push_back(fmt::format("no plan: {}", model.status().to_string()));
    return report;
  }
  World world(seed);
  if (trace) world.keep_trace();
  Fleet fleet(world, *model, seed);
  const std::uint32_t consumers = model->tables->num_consumers;
  std::vector<NameSet> sets;  // drawn so far: the same ones come again
  bool going = fleet.start();
  for (std::uint64_t sync_id = 1; going && !fleet.over() && sync_id <= options.syncs; ++sync_id) {
    const bool last = sync_id == options.syncs;
    const bool leave_out = options.degraded && sync_id % 2 == 0 && !last;
    const std::uint32_t allowed = consumers - (leave_out ? model->workers_per_replica() : 0);
    NameSet names;
    if (options.partial && !last && world.random().chance(0.6)) {
      ++report.syncs_partial;
      if (sets.empty() || world.random().chance(0.6)) sets.push_back(model->draw_names(world.random()));
      names = sets[world.random().below(sets.size())];
    }
    if (options.failures && options.partial && !last && world.random().chance(0.15)) {
      names = model->half_a_module();
    } else if (options.failures && !last && world.random().chance(0.5)) {
      world.arm(static_cast<Failure>(world.random().below(kFailures)), world.random().below(12));
    } else if (options.corruption && !last && world.random().chance(0.6)) {
      world.arm(world.random().chance(0.5) ? Failure::kSlotBit : Failure::kArrivedBit,
                world.random().below(12));
    }
    going = fleet.sync(sync_id, 100 + sync_id, allowed, names, last);
  }
  if (going) fleet.shutdown();
  fleet.count(report);
  report.trace_hash = world.trace_hash();
  report.events = world.events();
  report.simulated_ns = world.now_ns();
  report.repeated = world.repeated();
  report.violations = world.violations();
  report.trace = world.take_trace();
  return report;
}

}  // namespace shardpull::sim
