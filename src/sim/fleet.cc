#include "sim/fleet.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

namespace shardpull::sim {
namespace {

// Below the watchdogs: a hang is found as what it is. Above dead_after and what a failed sync may wait for
// its members.
constexpr std::int64_t kSyncLimitNs = 25 * kNanosPerSecond;
static_assert(kSyncLimitNs < kSimStallNs);

}  // namespace

Fleet::Fleet(World& world, const SimModel& model, std::uint64_t seed)
    : world_(world), model_(model), random_(Random(seed).fork(10)) {
  for (std::uint32_t r = 0; r < model.options.trainers; ++r)
    trainers_.push_back(std::make_unique<SimTrainer>(world, model, readers_, r, 0));
  peaks_.assign(trainers_.size(), 0);
  rank_lives_.assign(trainers_.size(), 0);
  rank_hit_.assign(trainers_.size(), -1);
  const std::uint32_t consumers = model.tables->num_consumers;
  lives_.assign(consumers, 0);
  hit_.assign(consumers, -1);
  for (std::uint32_t c = 0; c < consumers; ++c)
    workers_.push_back(std::make_unique<SimWorker>(world, model, readers_, c, 0));
}

// Until it comes true. Between syncs the sender may die as well.
bool Fleet::wait_for(const std::function<bool()>& over, const std::string& what) {
  return world_.run_until(over, kSyncLimitNs, what);
}

bool Fleet::start() {
  for (auto& worker : workers_) worker->start();
  return wait_for([&] { return trainers_[0]->all_joined(); }, "init");
}

// ---- what happens -------------------------------------------------------------------------------

// The worker's process is about to be lost.
void Fleet::hit(std::uint32_t consumer) {
  hit_[consumer] = lives_[consumer];
  const std::uint32_t replica = model_.tables->num_consumers / model_.tables->num_replicas;
  const std::uint32_t from = consumer / replica * replica;
  for (std::uint32_t c = from; c < from + replica; ++c) world_.disown(c);
}

void Fleet::strike(const Fault& fault) {
  SimWorker& worker = *workers_[fault.worker];
  SimTrainer& rank = *trainers_[fault.rank];
  const std::string name = fmt::format("worker-{}", fault.worker);
  world_.trace("fault", static_cast<int>(fault.kind), fault.worker, fault.rank);
  faults_.push_back(fmt::format("{} of sync {}", to_string(fault), sync_id_));
  if (fault.kind == FaultKind::kCrashWorker) hit(fault.worker);
  switch (fault.kind) {
    case FaultKind::kCrashWorker:
      struck_.workers.insert(fault.worker);
      if (random_.chance(0.5))  // what it sent last arrives late, perhaps after its next life has joined
        world_.net().hold(name, world_.now_ns() + random_.between(0, 200 * kNanosPerMilli));
      worker.crash();
      if (random_.chance(0.4))
        world_.later(100 * kNanosPerMilli, [this, consumer = fault.worker] {
          if (workers_[consumer]->down()) restart(consumer);
        });
      return;
    case FaultKind::kSilenceWorker:
      if (world_.control().silence({Role::kWorker, fault.worker}, fault.duration_ns)) {
        hit(fault.worker);
        struck_.workers.insert(fault.worker);
      }
      return;
    case FaultKind::kDelayWorker:
      world_.control().silence({Role::kWorker, fault.worker}, fault.duration_ns);
      return;
    case FaultKind::kCrashRank:
      hit_rank(fault.rank);
      rank.crash();
      if (random_.chance(0.4))
        world_.later(100 * kNanosPerMilli, [this, r = fault.rank] {
          if (trainers_[r]->down()) restart_rank(r);
        });
      return;
    case FaultKind::kSilenceRank:
      if (world_.control().silence({Role::kTrainer, fault.rank}, fault.duration_ns)) {
        hit_rank(fault.rank);
        struck_.estranged = estranged_ = true;
      }
      return;
    case FaultKind::kCrashSender:
      struck_.sender = true;
      return trainers_[0]->crash();
    case FaultKind::kCutHot:
      struck_.cut.emplace(fault.worker, fault.rank);
      cut_.emplace(fault.worker, fault.rank);
      return world_.net().cut(name, fmt::format("trainer-{}", fault.rank));
    case FaultKind::kHoldHot:
      return world_.net().hold(name, world_.now_ns() + fault.duration_ns);
    case FaultKind::kSlowWorker:
      return worker.slow_down(10);
    case FaultKind::kSlowRank:
      return rank.slow_down(10);
  }
}

// Somebody dies while no sync runs. The next one may begin before the sender has heard of it. False: a rule
// was broken.
bool Fleet::strike_between() {
  if (over()) return true;
  Fault fault;
  fault.worker = static_cast<std::uint32_t>(random_.below(workers_.size()));
  fault.rank = static_cast<std::uint32_t>(random_.below(trainers_.size()));
  fault.kind = fault.rank != 0 && random_.chance(0.3) ? FaultKind::kCrashRank : FaultKind::kCrashWorker;
  const bool of_rank = fault.kind == FaultKind::kCrashRank;
  if (of_rank ? trainers_[fault.rank]->down() : workers_[fault.worker]->broken()) return true;
  strike(fault);
  const auto heard = [&] {
    return over() || (of_rank ? trainers_[0]->in_fleet(fault.rank) != trainers_[fault.rank]->incarnation()
                              : trainers_[0]->joined(fault.worker) != workers_[fault.worker]->incarnation());
  };
  return random_.chance(0.3) || wait_for(heard, "the sender to hear of a loss");
}

// Another process takes the worker's place. What is left of the one before ends.
void Fleet::restart(std::uint32_t consumer) {
  if (over()) return;
  if (!workers_[consumer]->down()) {
    hit(consumer);
    struck_.workers.insert(consumer);
    workers_[consumer]->crash();
  }
  dead_.push_back(std::move(workers_[consumer]));
  workers_[consumer] = std::make_unique<SimWorker>(world_, model_, readers_, consumer,
                                                   static_cast<std::uint32_t>(++lives_[consumer]));
  workers_[consumer]->start();
  world_.trace("restart", consumer, lives_[consumer]);
  ++rejoined_;
}

// The rank's process is about to be lost.
void Fleet::hit_rank(std::uint32_t rank) {
  rank_hit_[rank] = rank_lives_[rank];
  struck_.ranks.insert(rank);
}

void Fleet::restart_rank(std::uint32_t rank) {
  if (over()) return;
  if (!trainers_[rank]->down()) {
    hit_rank(rank);
    trainers_[rank]->crash();
  }
  dead_trainers_.push_back(std::move(trainers_[rank]));
  trainers_[rank] = std::make_unique<SimTrainer>(world_, model_, readers_, rank, ++rank_lives_[rank]);
  world_.trace("restart_rank", rank, rank_lives_[rank]);
}

// Between syncs: ranks that are gone come back, or not yet.
bool Fleet::heal_ranks(bool everybody) {
  const auto was_hit = [&](std::uint32_t r) { return rank_hit_[r] == rank_lives_[r]; };
  const auto joined = [&](std::uint32_t r) {
    return trainers_[0]->in_fleet(r) == trainers_[r]->incarnation();
  };
  for (std::uint32_t r = 1; r < trainers_.size(); ++r) {
    if (was_hit(r) && (everybody || random_.chance(0.5))) restart_rank(r);
  }
  const auto settled = [&] {
    if (over()) return true;
    for (std::uint32_t r = 1; r < trainers_.size(); ++r) {
      if (!was_hit(r) && !joined(r)) return false;
    }
    return true;
  };
  if ((everybody || random_.chance(0.7)) && !wait_for(settled, "trainers to join again")) return false;
  for (std::uint32_t r = 1; r < trainers_.size(); ++r) {
    if (!was_hit(r) && joined(r) && struck_.ranks.erase(r) != 0) ++ranks_returned_;
  }
  return true;
}

// Between syncs: workers that are gone, or have lost a connection, come back; some do not yet, unless
// `everybody` does. False: a rule was broken.
bool Fleet::heal(bool everybody) {
  if (over()) return true;
  if (!heal_ranks(everybody)) return false;
  const std::uint32_t all = model_.tables->num_consumers;
  const auto was_hit = [&](std::uint32_t c) { return hit_[c] == lives_[c]; };
  const auto joined = [&](std::uint32_t c) { return trainers_[0]->joined(c) == workers_[c]->incarnation(); };
  if (everybody) {  // those that were declared dead find it out
    const bool found = wait_for(
        [&] {
          return this->over() ||
                 std::all_of(struck_.workers.begin(), struck_.workers.end(),
                             [&](std::uint32_t c) { return !was_hit(c) || workers_[c]->broken(); });
        },
        "the end of workers that were declared dead");
    if (!found) return false;
  }
  for (std::uint32_t c = 0; c < all; ++c) {
    if (everybody ? was_hit(c) || workers_[c]->broken() : workers_[c]->broken() && random_.chance(0.75))
      restart(c);
  }
  const auto settled = [&] {
    if (over()) return true;
    for (std::uint32_t c = 0; c < all; ++c) {
      if (!joined(c) && !workers_[c]->broken()) return false;
    }
    return true;
  };
  if (everybody || random_.chance(0.6)) {
    if (!wait_for(settled, "workers to join again")) return false;
    // A worker whose trainer dies while it joins ends, and comes again.
    for (std::uint32_t c = 0; everybody && c < all; ++c) {
      if (workers_[c]->broken()) restart(c);
    }
    if (everybody && !wait_for([&] { return over() || (settled() && trainers_[0]->all_joined()); },
                               "everybody to join again"))
      return false;
  }
  for (std::uint32_t c = 0; c < all; ++c) {
    workers_[c]->slow_down(1);
    if (was_hit(c) || !joined(c)) continue;
    struck_.workers.erase(c);
  }
  for (std::uint32_t c = 0; c < all; ++c) {
    if (!mate_struck(c)) world_.own(c);
  }
  for (auto& trainer : trainers_) trainer->slow_down(1);
  return true;
}

// ---- one sync -----------------------------------------------------------------------------------

// As the sender opens the sync: a worker may have come back since the one before, and takes part then.
void Fleet::note_before() {
  before_.clear();
  for (std::uint32_t c = 0; c < workers_.size(); ++c) {
    const ConsumerMachine& machine = workers_[c]->machine();
    const bool busy = machine.state() == WorkerState::kUpdating ||
                      machine.state() == WorkerState::kPrepared ||
                      machine.state() == WorkerState::kCommitting || machine.in_flight();
    before_.push_back({lives_[c], machine.modules(), busy, workers_[c]->sync_version()});
  }
}

void Fleet::note_opening(std::uint32_t allowed) {
  const SimTrainer& sender = *trainers_[0];
  opening_ = {.lost_between = sender.lost_between(),
              .joined = {},
              .lost_ranks = {},
              .rank_lives = rank_lives_,
              .allowed = allowed};
  for (std::uint32_t c = 0; c < workers_.size(); ++c) {
    if (sender.joined(c) != 0) opening_.joined.insert(c);
  }
  for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
    if (sender.in_fleet(r) == 0) opening_.lost_ranks.insert(r);
  }
}

void Fleet::call(std::uint32_t rank, std::uint64_t sync_id, std::uint64_t version, std::uint32_t allowed,
                 const NameSet& names) {
  if (sync_id != sync_id_ || called_[rank]) return;  // withdrawn
  called_[rank] = true;
  if (rank == 0) note_before();
  SimTrainer& trainer = *trainers_[rank];
  if (trainer.down() || trainer.follows()) return;
  if (rank == 0) note_opening(allowed);
  trainer.send_weights(sync_id, version, allowed, names);
  if (rank != 0 || !trainer.outcome() || !trainer.outcome()->live.empty()) return;
  for (std::uint32_t r = 1; r < trainers_.size(); ++r) {  // there is no sync: the program on top says so
    if (!trainers_[r]->down() && !trainers_[r]->follows())
      trainers_[r]->withdraw(sync_id, trainer.outcome()->status);
    called_[r] = true;
  }
}

// Whether the rank, which lives, has no part in the sync: it has come back too late for it.
bool Fleet::absent(std::uint32_t rank) const {
  const SimTrainer& trainer = *trainers_[rank];
  if (!trainer.follows() || trainer.in_sync() || trainer.returned_of() == sync_id_) return false;
  if (trainer.ended()) return true;
  const auto& outcome = trainers_[0]->outcome();
  return outcome && (outcome->live.empty() || opening_.rank_lives[rank] != rank_lives_[rank] ||
                     std::binary_search(outcome->lost_ranks.begin(), outcome->lost_ranks.end(), rank));
}

bool Fleet::sync_is_over() const {
  for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
    if (!called_[r] || (!trainers_[r]->down() && !absent(r) && trainers_[r]->returned_of() != sync_id_))
      return false;
  }
  if (!over()) return trainers_[0]->outcome().has_value();
  return std::all_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->down(); });
}

bool Fleet::sync(std::uint64_t sync_id, std::uint64_t version, std::uint32_t allowed, const NameSet& names,
                 bool last) {
  if (!heal(last)) return false;
  if (over()) return true;
  sync_id_ = sync_id;
  called_.assign(trainers_.size(), false);
  struck_.step = false;
  // An estranged rank's end may not be known yet. A connection that broke late may be noticed late, and is
  // opened again in the next sync that its worker is in.
  const auto& before = trainers_[0]->outcome();
  if (!before || !before->live.empty()) struck_.estranged = false;
  std::erase_if(struck_.cut, [&](const auto& cut) {
    return !before || std::binary_search(before->live.begin(), before->live.end(), cut.first);
  });
  struck_.estranged |= std::exchange(estranged_, false);
  struck_.cut.merge(std::exchange(cut_, {}));
  if (model_.options.faults && !last && random_.chance(0.25) && !strike_between()) return false;
  const std::uint64_t first_step = world_.steps();
  const std::int64_t began_ns = world_.now_ns();
  if (model_.options.faults && !last) {
    const bool ending = !ending_ && sync_id > 1 && random_.chance(0.12);
    ending_ = ending_ || ending;
    for (const Fault& fault : draw_faults(random_, model_.options, last_steps_, ending))
      world_.at_step(first_step + fault.step, [this, fault] { strike(fault); });
    world_.repeat_messages(random_.chance(0.5) ? 0.2 : 0);
  }
  for (std::uint32_t r = 0; r < trainers_.size(); ++r) {  // a training step ends when it ends
    world_.later(20 * kNanosPerMilli,
                 [this, r, sync_id, version, allowed, names] { call(r, sync_id, version, allowed, names); });
  }
  const bool done = wait_for([&] { return sync_is_over(); }, fmt::format("sync {}", sync_id));
  struck_.step = world_.struck();
  world_.disarm();
  world_.clear_steps();
  world_.repeat_messages(0);
  if (!done) return false;
  last_steps_ = std::max<std::uint64_t>(world_.steps() - first_step, 50);
  longest_ns_ = std::max(longest_ns_, world_.now_ns() - began_ns);
  check(version, names);
  for (auto& trainer : trainers_) {
    if (trainer->ended()) trainer->shutdown();  // its program ends with the error
  }
  return world_.violations().empty();
}

void Fleet::shutdown() {
  check_commits();
  for (auto& worker : workers_) worker->shutdown();
  for (auto& trainer : trainers_) trainer->shutdown();
}

void Fleet::count(SimReport& report) const {
  report.syncs_completed = completed_;
  report.syncs_failed = failed_;
  report.syncs_refused = refused_;
  report.syncs_corrupt = corrupt_;
  report.syncs_lossy = lossy_;
  report.rejoined = rejoined_;
  report.ranks_returned = ranks_returned_;
  report.syncs_without_a_rank = rank_lossy_;
  report.syncs_lost_between = lost_between_;
  report.faults = static_cast<std::uint32_t>(faults_.size());
  report.struck = faults_;
  report.longest_sync_ns = longest_ns_;
  for (const auto& trainer : trainers_) {
    report.packs += trainer->producer().packs();
    report.kept_early += trainer->producer().drops().kept_early;
    report.stale_lives += trainer->stale_lives();
  }
  for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
    std::uint32_t& peak = model_.resident[r] ? report.peak_in_place : report.peak_resident;
    peak = std::max(peak, peaks_[r]);
  }
  for (const auto* list : {&workers_, &dead_}) {
    for (const auto& worker : *list) {
      report.pulls += worker->pulls();
      report.mapped_chunks += worker->mapped_chunks();
      report.direct_chunks += worker->direct_chunks();
      report.summed_keys += worker->summed_keys();
      report.mates_asked += worker->mates_asked();
      report.mates_committed += worker->mates_committed();
    }
  }
}

// ---- the rules ----------------------------------------------------------------------------------

void Fleet::check(std::uint64_t version, const NameSet& names) {
  check_ranks();
  if (over()) {  // nobody is left to say what the sync came to
    if (!struck_.sender) world_.broken("the sender is gone by itself");
    return check_modules(version, names, trainers_[0]->committing());
  }
  const SyncOutcome& outcome = *trainers_[0]->outcome();
  check_opening(outcome);
  if (outcome.status.ok()) {
    ++completed_;
    check_success(version, outcome, names);
  } else {
    ++failed_;
    if (!outcome.live.empty()) check_failure(outcome.status, names);
  }
  check_modules(version, names, outcome.committing);
}

// Whom the sync was opened with, whether it could be, and what became of those that were lost before it.
void Fleet::check_opening(const SyncOutcome& outcome) {
  const bool strict = model_.options.fail_on_loss;
  Struck between;
  for (const Member& member : opening_.lost_between)
    (member.role == Role::kWorker ? between.workers : between.ranks).insert(member.id);
  const bool held = held_without(*model_.tables, {opening_.lost_ranks.begin(), opening_.lost_ranks.end()});
  const std::uint32_t replica = model_.tables->num_consumers / model_.tables->num_replicas;
  std::vector<std::uint32_t> live;
  for (std::uint32_t first = 0; first + replica <= opening_.allowed; first += replica) {
    bool whole = true;
    for (std::uint32_t c = first; c < first + replica; ++c)
      whole = whole && (opening_.joined.contains(c) || (strict && between.workers.contains(c)));
    for (std::uint32_t c = first; whole && c < first + replica; ++c) live.push_back(c);
  }
  if (!held && !(strict && !between.ranks.empty())) live.clear();  // the lost rank is waited for
  if (outcome.live != live)
    return world_.broken("a sync was opened with {} workers, not {}", outcome.live.size(), live.size());
  const bool fails = strict && !live.empty() &&
                     (!held || std::any_of(live.begin(), live.end(),
                                           [&](std::uint32_t c) { return between.workers.contains(c); }));
  if (!fails) return;
  ++lost_between_;
  // The first error is kept, and that of the opening is the first. It may be that of a rank lost earlier.
  between.ranks.insert(opening_.lost_ranks.begin(), opening_.lost_ranks.end());
  if (outcome.status.ok() || !names_struck(outcome.status.message(), between))
    world_.broken("members were lost before the sync, and it came to: {}", outcome.status.to_string());
}

void Fleet::check_ranks() {
  for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
    const SimTrainer& trainer = *trainers_[r];
    peaks_[r] = std::max(peaks_[r], trainer.trainer().peak_resident());
    if (!model_.resident[r] && trainer.trainer().peak_resident() > model_.options.lookahead + 1) {
      world_.broken("trainer {} held {} groups, lookahead is {}", r, trainer.trainer().peak_resident(),
                    model_.options.lookahead);
    }
    if (trainer.down()) continue;
    if (trainer.trainer().running() || trainer.trainer().resident() != 0)
      world_.broken("trainer {} still holds groups after the sync", r);
    if (absent(r)) continue;
    if (over()) {
      if (trainer.returned()->ok() && !trainers_[0]->committing())
        world_.broken("send_weights of trainer {} returned normally without the sender", r);
      continue;
    }
    const Status& why = trainers_[0]->outcome()->status;
    const bool excused = struck_.ranks.contains(r) && trainer.ended();
    if (trainer.returned()->ok() != why.ok() && !excused) {
      world_.broken("send_weights of trainer {}: {}; of trainer 0: {}", r, trainer.returned()->to_string(),
                    why.to_string());
    }
  }
}

// Everything that claims to be current is exact; what was not touched is as it was; a version that was not
// committed is nowhere.
void Fleet::check_modules(std::uint64_t version, const NameSet& names, bool committing) {
  for (std::uint32_t c = 0; c < workers_.size(); ++c) {
    SimWorker& worker = *workers_[c];
    const ConsumerMachine& machine = worker.machine();
    if (machine.in_flight() && !mate_struck(c) && !worker.down())
      world_.broken("worker {} has work in flight after the sync", c);
    const bool same = lives_[c] == before_[c].life;
    for (std::uint32_t m = 0; m < machine.modules().size(); ++m) {
      const ModuleState& state = machine.modules()[m];
      const ModuleState was = same ? before_[c].modules[m] : ModuleState{};
      if (state == was) continue;
      if (same && before_[c].busy &&
          (state.kind != ModuleState::Kind::kCurrent || state.version == before_[c].version))
        continue;
      if (!same || !model_.touches(c, m, names)) {
        world_.broken("worker {} module {} is {}, was {}, and the sync moves nothing of it", c, m,
                      to_string(state), to_string(was));
      } else if (state.kind == ModuleState::Kind::kCurrent && (state.version != version || !committing)) {
        world_.broken("worker {} module {} is {}, was {}, and nobody has committed that", c, m,
                      to_string(state), to_string(was));
      }
    }
    const auto held = machine.version();
    if (same && held.ok() && *held == version && !committing)
      world_.broken("worker {} holds version {}, whose sync was not committed", c, version);
    worker.verify();
  }
}

// Whether something happened to its replica: nobody waits for it then.
bool Fleet::mate_struck(std::uint32_t consumer) const {
  const std::uint32_t replica = model_.tables->num_consumers / model_.tables->num_replicas;
  return std::any_of(struck_.workers.begin(), struck_.workers.end(),
                     [&](std::uint32_t worker) { return worker / replica == consumer / replica; });
}

void Fleet::check_success(std::uint64_t version, const SyncOutcome& outcome, const NameSet& names) {
  if (names == model_.half_a_module()) world_.broken("half a module was moved");
  check_drops();
  const auto in = [](const std::vector<std::uint32_t>& list, std::uint32_t c) {
    return std::find(list.begin(), list.end(), c) != list.end();
  };
  if (!outcome.lost.empty()) ++lossy_;
  if (!outcome.lost_ranks.empty()) ++rank_lossy_;
  for (const std::uint32_t r : outcome.lost_ranks) {
    if (!struck_.ranks.contains(r)) world_.broken("the sync went without trainer {}, which is there", r);
  }
  for (const std::uint32_t c : outcome.lost) {
    if (!struck_.workers.contains(c)) world_.broken("the sync lost worker {}, which lives", c);
  }
  const std::uint32_t replica = model_.tables->num_consumers / model_.tables->num_replicas;
  for (const std::uint32_t c : outcome.dropped) {
    const bool mate = std::any_of(outcome.lost.begin(), outcome.lost.end(),
                                  [&](std::uint32_t lost) { return lost / replica == c / replica; });
    if (!mate) world_.broken("worker {} left the sync, and none of its replica was lost", c);
  }
  for (const std::uint32_t c : outcome.live) {
    if (in(outcome.lost, c) || in(outcome.dropped, c) || struck_.workers.contains(c)) continue;
    const ConsumerMachine& machine = workers_[c]->machine();
    bool clean = true;  // nothing is left of a failed sync that this one did not repair
    for (std::uint32_t m = 0; m < machine.modules().size(); ++m) {
      const ModuleState& state = machine.modules()[m];
      if (model_.touches(c, m, names) &&
          (state.kind != ModuleState::Kind::kCurrent || state.version != version)) {
        world_.broken("worker {} module {} is {} after a sync of version {}", c, m, to_string(state),
                      version);
      }
      clean = clean && (state.kind == ModuleState::Kind::kCurrent || state.kind == ModuleState::Kind::kUnset);
    }
    const auto held = machine.version();
    if (held.ok() != clean) {
      world_.broken("worker {} has a version: {}, holds committed ones only: {}", c, held.ok(), clean);
    } else if (held.ok() && *held != version) {
      world_.broken("worker {} holds version {} after a sync of version {}", c, *held, version);
    }
  }
}

// Mates never end with different versions. One that has died has no say: nobody reads what it holds.
void Fleet::check_commits() {
  const std::uint32_t replica = model_.tables->num_consumers / model_.tables->num_replicas;
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::pair<std::uint32_t, bool>>
      first;  // by replica and sync
  for (const auto* list : {&workers_, &dead_}) {
    for (const auto& worker : *list) {
      if (worker->crashed()) continue;
      for (const auto& [sync, committed] : worker->decided()) {
        const auto [mate, fresh] =
            first.try_emplace({worker->consumer() / replica, sync}, worker->consumer(), committed);
        if (fresh || mate->second.second == committed) continue;
        world_.broken("worker {} {} sync {}, and worker {} of its replica did not", worker->consumer(),
                      committed ? "committed" : "aborted", sync, mate->second.first);
      }
    }
  }
}

// While nothing goes wrong nothing is dropped.
void Fleet::check_drops() {
  if (model_.options.faults) return;
  for (std::uint32_t r = 0; r < trainers_.size(); ++r) {
    const DropCounters& drops = trainers_[r]->producer().drops();
    if (drops.duplicate_signals + drops.stale_incarnation + drops.not_live + drops.unknown != 0 ||
        (failed_ == 0 && drops.stale_sync != 0)) {
      world_.broken(
          "trainer {} dropped messages: {} duplicate, {} of old syncs, {} of old lives, {} not live, {} "
          "unknown",
          r, drops.duplicate_signals, drops.stale_sync, drops.stale_incarnation, drops.not_live,
          drops.unknown);
    }
  }
}

void Fleet::check_failure(const Status& why, const NameSet& names) {
  const std::vector<std::uint32_t>& live = trainers_[0]->outcome()->live;
  const bool lossy = may_fail(model_, struck_, live);
  if (names == model_.half_a_module()) {
    ++refused_;
    if (why.message().find("'layers.0.k.weight', which it does not") == std::string::npos && !lossy)
      world_.broken("half a module was refused with: {}", why.to_string());
    for (std::uint32_t c = 0; c < workers_.size(); ++c) {
      if (lives_[c] == before_[c].life && workers_[c]->machine().modules() != before_[c].modules)
        world_.broken("worker {} was written by a sync that was refused", c);
    }
    return;
  }
  const bool corrupt = why.info().reason == Reason::kCorrupt;
  if (!lossy || !(corrupt ? struck_.step : names_struck(why.message(), struck_)))
    return world_.broken("a sync failed by itself: {}", why.to_string());
  if (corrupt) {
    ++corrupt_;
    if (why.code() != StatusCode::kDataLoss || why.message().find(": chunk ") == std::string::npos ||
        why.message().find("from trainer ") == std::string::npos ||
        !why.info().peer.starts_with("trainer ") || why.info().tensor.empty()) {
      world_.broken("a flipped bit was found with: {}", why.to_string());
    }
  }
}

}  // namespace shardpull::sim
