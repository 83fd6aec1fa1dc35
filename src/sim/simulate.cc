#include "sim/simulate.h"

#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "sim/sim_model.h"
#include "sim/sim_trainer.h"
#include "sim/sim_worker.h"
#include "sim/world.h"

namespace shardpull::sim {
namespace {

constexpr std::int64_t kSyncLimitNs =
    20 * kNanosPerSecond;  // below the watchdogs: a hang is found as what it is

// The fleet and the rules that hold between its members.
class Fleet {
 public:
  Fleet(World& world, const SimModel& model) : world_(world), model_(model) {
    for (std::uint32_t r = 0; r < model.options.trainers; ++r) {
      trainers_.push_back(std::make_unique<SimTrainer>(world, model, readers_, r));
    }
    peaks_.assign(trainers_.size(), 0);
    for (std::uint32_t c = 0; c < model.tables->num_consumers; ++c) {
      workers_.push_back(std::make_unique<SimWorker>(world, model, readers_, c));
      versions_.emplace_back(model.tables->metadata.size(), 0);
    }
  }

  bool start() {
    for (auto& worker : workers_) worker->start();
    return world_.run_until(
        [&] { return std::all_of(workers_.begin(), workers_.end(), [](auto& w) { return w->ready(); }); },
        kSyncLimitNs, "init");
  }

  bool sync(std::uint64_t sync_id, std::uint64_t version, const std::vector<std::uint32_t>& live,
            const NameSet& names) {
    std::size_t called = 0;
    states_.clear();
    for (const auto& worker : workers_) states_.push_back(worker->machine().modules());
    for (auto& trainer :
         trainers_) {  // a training step ends when it ends: the ranks come one after the other
      world_.later(20 * kNanosPerMilli, [&called, &trainer, sync_id, version, live, names] {
        trainer->send_weights(sync_id, version, live, names);
        ++called;
      });
    }
    const bool over = world_.run_until(
        [&] {
          return called == trainers_.size() && trainers_[0]->outcome() &&
                 std::all_of(trainers_.begin(), trainers_.end(),
                             [](auto& t) { return t->returned().has_value(); });
        },
        kSyncLimitNs, fmt::format("sync {}", sync_id));
    world_.disarm();
    if (!over) return false;
    if (trainers_[0]->outcome()->status.ok()) {
      check_success(version, live, names);
      ++syncs_completed_;
    } else {
      check_failure(version, live, names);
      ++syncs_failed_;
    }
    return world_.violations().empty();
  }

  void shutdown() {
    for (auto& worker : workers_) worker->shutdown();
    for (auto& trainer : trainers_) trainer->shutdown();
    for (auto& worker : workers_) {
      if (worker->machine().in_flight()) world_.broken("a worker shuts down with work in flight");
    }
  }

  void count(SimReport& report) const {
    report.syncs_completed = syncs_completed_;
    report.syncs_failed = syncs_failed_;
    report.syncs_refused = syncs_refused_;
    report.syncs_corrupt = syncs_corrupt_;
    for (const auto& trainer : trainers_) {
      report.packs += trainer->producer().packs();
      report.kept_early += trainer->producer().drops().kept_early;
    }
    for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
      std::uint32_t& peak = model_.resident[r] ? report.peak_in_place : report.peak_resident;
      peak = std::max(peak, peaks_[r]);
    }
    for (const auto& worker : workers_) {
      report.pulls += worker->pulls();
      report.mapped_chunks += worker->mapped_chunks();
      report.direct_chunks += worker->direct_chunks();
      report.summed_keys += worker->summed_keys();
    }
  }

 private:
  void check_ranks() {
    for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
      const SimTrainer& trainer = *trainers_[r];
      if (trainer.trainer().running() || trainer.trainer().resident() != 0) {
        world_.broken("trainer {} still holds groups after the sync", r);
      }
      peaks_[r] = std::max(peaks_[r], trainer.trainer().peak_resident());
      if (!model_.resident[r] && trainer.trainer().peak_resident() > model_.options.lookahead + 1) {
        world_.broken("trainer {} held {} groups, lookahead is {}", r, trainer.trainer().peak_resident(),
                      model_.options.lookahead);
      }
    }
  }

  // Modules of which the sync moved nothing are as they were; everything that claims to be current is exact.
  void check_modules(const NameSet& names) {
    for (std::uint32_t c = 0; c < workers_.size(); ++c) {
      const std::vector<ModuleState>& states = workers_[c]->machine().modules();
      for (std::uint32_t m = 0; m < states.size(); ++m) {
        if (states[m] == states_[c][m] || model_.touches(c, m, names)) continue;
        world_.broken("worker {} module {} is {}, was {}, and the sync moves nothing of it", c, m,
                      to_string(states[m]), to_string(states_[c][m]));
      }
      workers_[c]->verify(versions_[c]);
    }
  }

  void committed(std::uint32_t consumer, std::uint64_t version, const NameSet& names) {
    for (std::uint32_t name = 0; name < versions_[consumer].size(); ++name) {
      if (listed(names, name)) versions_[consumer][name] = version;
    }
  }

  void check_success(std::uint64_t version, const std::vector<std::uint32_t>& live, const NameSet& names) {
    check_ranks();
    if (names == model_.half_a_module()) world_.broken("half a module was moved");
    for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
      const SimTrainer& trainer = *trainers_[r];
      if (!trainer.returned()->ok())
        world_.broken("send_weights of trainer {}: {}", r, trainer.returned()->to_string());
      const DropCounters& drops = trainer.producer().drops();
      if (drops.duplicate_signals + drops.stale_incarnation + drops.not_live + drops.unknown != 0 ||
          (syncs_failed_ == 0 && drops.stale_sync != 0)) {
        world_.broken(
            "trainer {} dropped messages: {} duplicate, {} of old syncs, {} of old lives, {} not live, {} "
            "unknown",
            r, drops.duplicate_signals, drops.stale_sync, drops.stale_incarnation, drops.not_live,
            drops.unknown);
      }
    }
    if (!trainers_[0]->outcome()->lost.empty()) world_.broken("the sync lost workers that live");
    for (const std::uint32_t c : live) {
      const ConsumerMachine& machine = workers_[c]->machine();
      bool clean = true;  // nothing is left of a failed sync that this one did not repair
      for (std::uint32_t m = 0; m < machine.modules().size(); ++m) {
        const ModuleState& state = machine.modules()[m];
        if (model_.touches(c, m, names) &&
            (state.kind != ModuleState::Kind::kCurrent || state.version != version)) {
          world_.broken("worker {} module {} is {} after a sync of version {}", c, m, to_string(state),
                        version);
        }
        clean =
            clean && (state.kind == ModuleState::Kind::kCurrent || state.kind == ModuleState::Kind::kUnset);
      }
      const auto held = machine.version();
      if (held.ok() != clean) {
        world_.broken("worker {} has a version: {}, holds committed ones only: {}", c, held.ok(), clean);
      } else if (held.ok() && *held != version) {
        world_.broken("worker {} holds version {} after a sync of version {}", c, *held, version);
      }
      committed(c, version, names);
    }
    check_modules(names);
  }

  void check_failure(std::uint64_t version, const std::vector<std::uint32_t>& live, const NameSet& names) {
    check_ranks();
    const Status& why = trainers_[0]->outcome()->status;
    if (names == model_.half_a_module()) {
      ++syncs_refused_;
      if (why.message().find("'layers.0.k.weight', which it does not") == std::string::npos)
        world_.broken("half a module was refused with: {}", why.to_string());
      for (std::uint32_t c = 0; c < workers_.size(); ++c) {
        if (workers_[c]->machine().modules() != states_[c])
          world_.broken("worker {} was written by a sync that was refused", c);
      }
      return check_modules(names);
    }
    const auto says = [&](std::string_view what) { return why.message().find(what) != std::string::npos; };
    const bool corrupt = why.info().reason == Reason::kCorrupt;
    if (!world_.struck() || !(corrupt || says("simulated")))
      return world_.broken("a sync failed by itself: {}", why.to_string());
    if (corrupt) {
      ++syncs_corrupt_;
      if (why.code() != StatusCode::kDataLoss || !says(": chunk ") || !says("from trainer ") ||
          !why.info().peer.starts_with("trainer ") || why.info().tensor.empty()) {
        world_.broken("a flipped bit was found with: {}", why.to_string());
      }
    }
    for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
      if (trainers_[r]->returned()->ok())
        world_.broken("send_weights of trainer {} returned normally: {}", r, why.to_string());
    }
    const bool committing = why.message().find("hook") != std::string::npos;
    for (const std::uint32_t c : live) {
      const ConsumerMachine& machine = workers_[c]->machine();
      if (machine.in_flight()) world_.broken("worker {} has work in flight after the sync", c);
      const bool holds =
          std::any_of(machine.modules().begin(), machine.modules().end(), [&](const ModuleState& state) {
            return state.kind == ModuleState::Kind::kCurrent && state.version == version;
          });
      const auto held = machine.version();
      if ((holds || (held.ok() && *held == version)) && !committing)
        world_.broken("worker {} holds version {}, whose sync failed", c, version);
      if (holds) committed(c, version, names);
    }
    check_modules(names);
  }

  World& world_;
  const SimModel& model_;
  SlotReaders readers_;
  std::uint32_t syncs_completed_ = 0, syncs_failed_ = 0, syncs_refused_ = 0, syncs_corrupt_ = 0;
  std::vector<std::vector<std::uint64_t>> versions_;  // by worker and name: of the last commit that moved it
  std::vector<std::vector<ModuleState>> states_;      // by worker and module: before the sync
  std::vector<std::uint32_t> peaks_;                  // by trainer
  std::vector<std::unique_ptr<SimTrainer>> trainers_;
  std::vector<std::unique_ptr<SimWorker>> workers_;
};

}  // namespace

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
  return options;
}

std::string to_string(const SimOptions& o) {
  return fmt::format(
      "trainers={} tp={} pp={} replicas={} ring_depth={} lookahead={} layers={} syncs={} holdings={} path={} "
      "max_chunk_bytes={} "
      "chunk_split={} pull_split={} tied={} share_slots={} degraded={} failures={} partial={} resident={} "
      "transport={} integrity={} corruption={}",
      o.trainers, o.tp, o.pp, o.replicas, o.ring_depth, o.lookahead, o.layers, o.syncs, to_string(o.holdings),
      o.path == PathPolicy::kAuto     ? "auto"
      : o.path == PathPolicy::kPacked ? "packed"
      : o.path == PathPolicy::kMapped ? "mapped"
                                      : "direct",
      o.max_chunk_bytes, o.chunk_split, o.pull_split, o.tied, o.share_slots, o.degraded, o.failures,
      o.partial, o.resident, to_string(o.transport), to_string(o.integrity), o.corruption);
}

SimReport simulate(std::uint64_t seed, const SimOptions& options) {
  SimReport report;
  auto model = SimModel::make(options, seed);
  if (!model.ok()) {
    report.violations.push_back(fmt::format("no plan: {}", model.status().to_string()));
    return report;
  }
  World world(seed);
  Fleet fleet(world, *model);
  const std::uint32_t consumers = model->tables->num_consumers;
  std::vector<NameSet> sets;  // drawn so far: the same ones come again
  bool going = fleet.start();
  for (std::uint64_t sync_id = 1; going && sync_id <= options.syncs; ++sync_id) {
    std::vector<std::uint32_t> live;
    const bool leave_out = options.degraded && sync_id % 2 == 0;
    for (std::uint32_t c = 0; c < consumers - (leave_out ? model->workers_per_replica() : 0); ++c)
      live.push_back(c);
    NameSet names;
    if (options.partial && sync_id < options.syncs && world.random().chance(0.6)) {
      ++report.syncs_partial;
      if (sets.empty() || world.random().chance(0.6)) sets.push_back(model->draw_names(world.random()));
      names = sets[world.random().below(sets.size())];
    }
    if (options.failures && options.partial && sync_id < options.syncs && world.random().chance(0.15)) {
      names = model->half_a_module();
    } else if (options.failures && sync_id < options.syncs && world.random().chance(0.5)) {
      world.arm(static_cast<Failure>(world.random().below(kFailures)), world.random().below(12));
    } else if (options.corruption && sync_id < options.syncs && world.random().chance(0.6)) {
      world.arm(world.random().chance(0.5) ? Failure::kSlotBit : Failure::kArrivedBit,
                world.random().below(12));
    }
    going = fleet.sync(sync_id, 100 + sync_id, live, names);
  }
  if (going) fleet.shutdown();
  fleet.count(report);
  report.trace_hash = world.trace_hash();
  report.events = world.events();
  report.simulated_ns = world.now_ns();
  report.violations = world.violations();
  return report;
}

}  // namespace shardpull::sim
