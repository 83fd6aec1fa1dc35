// TrainerMachine: at most one source call at a time, and none without credit.
//
//   asking g --published--> idle --credit--> asking next ... --all published, credit--> asking end --> ending
//        \-- any failure --> failing: waits for the source call and the producer --> released, RankDone
//
// SenderMachine: one sync over the fleet, in phases.
//
//   starting --all started--> updating --all prepared, all ranks ended--> finishing --all committed--> idle
//        \---------- failure, loss, limit ----------\------------------------\--> draining --> idle
//
// A member's place in the sync is one enum (Progress, RankProgress); what a phase waits for is derived from
// them, so that a loss only changes a member's place and everything else follows in advance().
#include "protocol/trainer_machine.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/plants.h"
#include "protocol/wording.h"

namespace shardpull {

// ---- one rank -----------------------------------------------------------------------------------

using namespace trainer_action;  // NOLINT: this file is about them
using namespace sender_action;   // NOLINT

struct TrainerMachine::State {
  std::uint32_t lookahead = 1;
  std::uint64_t sync_id = 0;
  bool running = false;
  bool unbounded = false;  // publishes in place: no credit
  std::vector<std::uint32_t> groups;
  std::size_t next = 0;  // groups[next] is asked for next
  bool asking = false;   // a source call is under way
  bool asked_end = false, source_over = false, ending = false;
  std::set<std::uint32_t> resident;  // asked for or published, not freed
  std::uint32_t peak = 0;
  Status error;
  bool quiet = false;

  void advance(TrainerActions& out) {
    if (!running) return;
    if (!error.ok()) {
      if (asking || (!quiet && !SHARDPULL_PLANT("buffers-back-before-quiet"))) return;
      for (const std::uint32_t group : std::exchange(resident, {})) out.push_back(Release{group});
      running = false;
      out.push_back(RankDone{sync_id, error});
      return;
    }
    if (asking || asked_end || (!unbounded && resident.size() > lookahead)) {
      if (source_over && !ending) {
        ending = true;
        out.push_back(EndProducer{});
      }
      return;
    }
    asking = true;
    if (next == groups.size()) {
      asked_end = true;
      out.push_back(AskEnd{});
      return;
    }
    const std::uint32_t group = groups[next++];
    resident.insert(group);
    peak = std::max(peak, static_cast<std::uint32_t>(resident.size()));
    out.push_back(AskSource{group});
  }
};

TrainerMachine::TrainerMachine(std::uint32_t lookahead) : state_(std::make_unique<State>()) {
  state_->lookahead = lookahead;
}
TrainerMachine::~TrainerMachine() = default;

Status TrainerMachine::begin(std::uint64_t sync_id, std::vector<std::uint32_t> groups, bool resident,
                             TrainerActions& out) {
  State& s = *state_;
  if (s.running)
    return wrong_state(fmt::format("sync {} begun while sync {} runs on this rank", sync_id, s.sync_id));
  const std::uint32_t lookahead = s.lookahead;
  s = State{};
  s.lookahead = lookahead;
  s.sync_id = sync_id;
  s.running = true;
  s.groups = std::move(groups);
  s.unbounded = resident;
  s.advance(out);
  return {};
}

void TrainerMachine::published(std::uint32_t group, TrainerActions& out) {
  State& s = *state_;
  if (!s.running || !s.asking || s.asked_end || s.groups[s.next - 1] != group) return;
  s.asking = false;
  s.advance(out);
}

void TrainerMachine::group_freed(std::uint32_t group, TrainerActions& out) {
  State& s = *state_;
  if (!s.running || s.resident.erase(group) == 0) return;
  out.push_back(Release{group});
  s.advance(out);
}

void TrainerMachine::source_ended(TrainerActions& out) {
  State& s = *state_;
  if (!s.running || !s.asked_end || !s.asking) return;
  s.asking = false;
  s.source_over = true;
  s.advance(out);
}

void TrainerMachine::producer_ended(TrainerActions& out) {
  State& s = *state_;
  if (!s.running || !s.ending || !s.error.ok()) return;
  s.running = false;
  out.push_back(RankDone{s.sync_id, {}});
}

void TrainerMachine::fail(const Status& why, TrainerActions& out) {
  State& s = *state_;
  if (!s.running) return;
  if (s.error.ok()) s.error = why;
  s.advance(out);
}

void TrainerMachine::producer_quiet(TrainerActions& out) {
  State& s = *state_;
  if (!s.running) return;
  s.quiet = true;
  s.advance(out);
}

void TrainerMachine::source_returned(TrainerActions& out) {
  State& s = *state_;
  if (!s.running || !s.asking) return;
  s.asking = false;
  s.advance(out);
}

bool TrainerMachine::running() const {
  return state_->running;
}
std::uint32_t TrainerMachine::resident() const {
  return static_cast<std::uint32_t>(state_->resident.size());
}
std::uint32_t TrainerMachine::peak_resident() const {
  return state_->peak;
}

// ---- the sender ---------------------------------------------------------------------------------

namespace {

enum class SyncPhase : std::uint8_t { kIdle, kStarting, kUpdating, kFinishing, kDraining };

// A consumer's place in the sync. kOver: it has answered a failure, and nothing more is expected of it.
// kLeaving: it has ended with a mate that has lost the sender, whose own loss is awaited.
enum class Progress : std::uint8_t {
  kAbsent,
  kStarting,
  kStarted,
  kUpdating,
  kPrepared,
  kFinishing,
  kFinished,
  kOver,
  kLeaving,
  kLost
};
enum class RankProgress : std::uint8_t { kOpened, kBegan, kEnded, kLost };

}  // namespace

struct SenderMachine::State {
  SenderConfig config;
  std::shared_ptr<const InitTables> tables;
  SyncPhase phase = SyncPhase::kIdle;
  std::uint64_t sync_id = 0;
  std::vector<Progress> consumers;
  std::vector<RankProgress> ranks;
  std::vector<std::uint32_t> lost, dropped;
  std::set<std::uint32_t> joined;              // workers that are there
  std::map<std::uint32_t, Status> lost_ranks;  // that are not back, and why
  Status last_loss;                            // of a worker
  std::set<Member> lost_between;               // lost while no sync ran, and not back
  Status error;
  std::int64_t since_ns = 0;   // the last event of the wait at hand
  std::int64_t opened_ns = 0;  // when the sync was opened

  std::uint32_t replica() const { return std::max(1u, config.workers_per_replica); }

  bool in_sync(Progress p) const { return p != Progress::kAbsent && p != Progress::kLost; }
  template <typename List, typename Value>
  static std::vector<std::uint32_t> members(const List& list, Value value) {
    std::vector<std::uint32_t> out;
    for (std::uint32_t i = 0; i < list.size(); ++i) {
      if (list[i] == value) out.push_back(i);
    }
    return out;
  }
  bool none(Progress p) const { return std::find(consumers.begin(), consumers.end(), p) == consumers.end(); }
  bool none(RankProgress p) const { return std::find(ranks.begin(), ranks.end(), p) == ranks.end(); }

  // Moves every consumer at `from` to `to`.
  template <typename Action>
  void step(Progress from, Progress to, SenderActions& out) {
    for (std::uint32_t c = 0; c < consumers.size(); ++c) {
      if (consumers[c] != from) continue;
      consumers[c] = to;
      out.push_back(Action{c});
    }
  }

  void advance(std::int64_t now_ns, SenderActions& out) {
    if (!none(Progress::kLeaving) && phase != SyncPhase::kDraining) return;
    if (phase == SyncPhase::kStarting && none(Progress::kStarting)) {
      phase = SyncPhase::kUpdating;
      since_ns = now_ns;
      step<Update>(Progress::kStarted, Progress::kUpdating, out);
    }
    if (phase == SyncPhase::kUpdating && (none(Progress::kUpdating) || SHARDPULL_PLANT("commit-without-a-mate")) && none(RankProgress::kOpened) &&
        none(RankProgress::kBegan)) {
      phase = SyncPhase::kFinishing;
      since_ns = now_ns;
      step<Finish>(Progress::kPrepared, Progress::kFinishing, out);
    }
    if (phase == SyncPhase::kFinishing && none(Progress::kFinishing)) close(out);
    if (phase == SyncPhase::kDraining && drained()) close(out);
  }

  // After a failure every consumer still in the sync answers FailConsumer, or its commit; every rank ends.
  bool drained() const {
    return std::all_of(consumers.begin(), consumers.end(),
                       [](Progress p) {
                         return p == Progress::kAbsent || p == Progress::kLost || p == Progress::kOver ||
                                p == Progress::kLeaving || p == Progress::kFinished;
                       }) &&
           none(RankProgress::kOpened) && none(RankProgress::kBegan);
  }

  void close(SenderActions& out) {
    phase = SyncPhase::kIdle;
    for (std::uint32_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r] != RankProgress::kLost) out.push_back(CloseSync{r, error});
    }
    out.push_back(SyncDone{sync_id, error, lost, dropped, members(ranks, RankProgress::kLost)});
  }

  bool running(std::uint64_t id) const { return phase != SyncPhase::kIdle && id == sync_id; }

  void fail(std::int64_t now_ns, const Status& why, SenderActions& out) {
    if (phase == SyncPhase::kIdle || phase == SyncPhase::kDraining) return;  // the first error is kept
    error = why;
    phase = SyncPhase::kDraining;
    since_ns = now_ns;
    for (std::uint32_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r] != RankProgress::kLost) out.push_back(FailRank{r, why});
    }
    for (std::uint32_t c = 0; c < consumers.size(); ++c) {
      const bool ended = consumers[c] == Progress::kOver || consumers[c] == Progress::kLeaving;
      if (in_sync(consumers[c]) && !ended) out.push_back(FailConsumer{c, why});
    }
    advance(now_ns, out);
  }

  // What a consumer reports moves it from one of `from` to `to`; false when it has no business here.
  bool report(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t id,
              std::initializer_list<Progress> from, Progress to) {
    if (!running(id) || consumer >= consumers.size()) return false;
    Progress& place = consumers[consumer];
    if (std::find(from.begin(), from.end(), place) == from.end()) return false;
    place = to;
    since_ns = now_ns;
    return true;
  }

  // Whether a worker reports that it has left the sync because a mate has lost the sender, which may not know
  // it yet. That is no failure of the others': the hub is about to tell whose loss it is. True: it is waited
  // for.
  bool leaves(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t id, const Status& status,
              SenderActions& out) {
    if (status.ok() || status.info().reason != Reason::kPeerLost || !running(id) ||
        consumer >= consumers.size() || !in_sync(consumers[consumer]))
      return false;
    const std::uint32_t first = consumer / replica() * replica();
    for (std::uint32_t c = first; c < std::min<std::size_t>(first + replica(), consumers.size()); ++c) {
      if (c == consumer || status.info().peer != worker_name(c)) continue;
      consumers[consumer] = Progress::kLeaving;
      since_ns = now_ns;
      advance(now_ns, out);
      return true;
    }
    return false;
  }

  void fail_for(std::int64_t now_ns, const Member& who, const Status& why, SenderActions& out) {
    const std::string name = to_string(who);
    fail(now_ns, why.message().starts_with(name) ? why : why.with_context(name), out);
  }

  void drop_replica(std::uint32_t consumer, const Status& why, SenderActions& out) {
    const std::uint32_t first = consumer / replica() * replica();
    const Status mate_lost =
        Status(StatusCode::kUnavailable,
               fmt::format("left sync {} because {} of the same replica was lost: {}", sync_id,
                           worker_name(consumer), why.message()),
               {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = worker_name(consumer)});
    for (std::uint32_t c = first; c < std::min<std::size_t>(first + replica(), consumers.size()); ++c) {
      if (c == consumer || !in_sync(consumers[c]) || SHARDPULL_PLANT("mates-of-the-lost-stay")) continue;
      consumers[c] = Progress::kLost;
      dropped.push_back(c);
      out.push_back(FailConsumer{c, mate_lost});
    }
    std::sort(dropped.begin(), dropped.end());
  }

  // The running sync goes on without them, or fails.
  void rank_leaves(std::int64_t now_ns, std::uint32_t rank, const Status& why, SenderActions& out) {
    if (phase == SyncPhase::kIdle || rank >= ranks.size() || ranks[rank] == RankProgress::kLost) return;
    const bool ended = ranks[rank] == RankProgress::kEnded;
    ranks[rank] = RankProgress::kLost;
    since_ns = now_ns;
    // One that has ended was needed by nobody any more; the next sync meets its absence.
    const bool stood_in_for = tables != nullptr && held_without(*tables, members(ranks, RankProgress::kLost));
    if (!ended && !stood_in_for) {
      fail(now_ns,
           Status(StatusCode::kUnavailable,
                  fmt::format("{} was lost in sync {}: {}", trainer_name(rank), sync_id, why.message()),
                  {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = trainer_name(rank)}),
           out);
    }
    advance(now_ns, out);
  }

  void consumer_leaves(std::int64_t now_ns, std::uint32_t consumer, const Status& why, SenderActions& out) {
    if (phase == SyncPhase::kIdle || consumer >= consumers.size() || consumers[consumer] == Progress::kAbsent)
      return;
    if (std::find(lost.begin(), lost.end(), consumer) != lost.end()) return;
    std::erase(dropped, consumer);  // a mate of one lost before is lost itself now
    consumers[consumer] = Progress::kLost;
    const std::string before = lost.empty() ? "" : fmt::format("; {} before", count_noun("worker", lost));
    lost.push_back(consumer);
    std::sort(lost.begin(), lost.end());
    since_ns = now_ns;
    const Status named(
        StatusCode::kUnavailable,
        fmt::format("{} was lost in sync {}: {}{}", worker_name(consumer), sync_id, why.message(), before),
        {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = worker_name(consumer)});
    if (phase != SyncPhase::kDraining) {
      if (!config.fail_on_consumer_loss) drop_replica(consumer, why, out);
      const bool any =
          std::any_of(consumers.begin(), consumers.end(), [&](Progress p) { return in_sync(p); });
      if (config.fail_on_consumer_loss || !any) fail(now_ns, named, out);
    }
    advance(now_ns, out);
  }
};

SenderMachine::SenderMachine(SenderConfig config) : state_(std::make_unique<State>()) {
  state_->config = config;
}
SenderMachine::~SenderMachine() = default;

void SenderMachine::set_tables(std::shared_ptr<const InitTables> tables) {
  state_->tables = std::move(tables);
}

Status SenderMachine::begin(std::int64_t now_ns, std::uint64_t sync_id, std::vector<std::uint32_t> live,
                            SenderActions& out) {
  State& s = *state_;
  if (s.phase != SyncPhase::kIdle)
    return wrong_state(fmt::format("sync {} begun while sync {} runs", sync_id, s.sync_id));
  if (sync_id <= s.sync_id)
    return wrong_state(fmt::format("sync {} is not after sync {}", sync_id, s.sync_id));
  if (live.empty()) return bad_argument(fmt::format("sync {}: the live set is empty", sync_id));
  std::vector<Progress> places(s.config.num_consumers, Progress::kAbsent);
  for (std::size_t i = 0; i < live.size(); ++i) {
    if (live[i] >= s.config.num_consumers) {
      return bad_argument(fmt::format("sync {}: live consumer {} is not within 0..{}", sync_id, live[i],
                                      s.config.num_consumers - 1));
    }
    if (i > 0 && live[i] <= live[i - 1]) {
      return bad_argument(
          fmt::format("sync {}: the live set is not ascending: {} after {}", sync_id, live[i], live[i - 1]));
    }
    places[live[i]] = Progress::kStarting;
  }
  for (std::uint32_t c = 0; c < s.config.num_consumers; ++c) {
    const std::uint32_t first = c / s.replica() * s.replica();
    if (places[c] != places[first]) {
      return bad_argument(fmt::format("sync {}: the live set has {} without {} of the same replica", sync_id,
                                      worker_name(places[c] == Progress::kAbsent ? first : c),
                                      worker_name(places[c] == Progress::kAbsent ? c : first)));
    }
  }
  s.phase = SyncPhase::kStarting;
  s.sync_id = sync_id;
  s.consumers = std::move(places);
  s.ranks.assign(s.config.world_size, RankProgress::kOpened);
  s.lost.clear();
  s.dropped.clear();
  s.error = {};
  s.since_ns = s.opened_ns = now_ns;
  s.lost_between.clear();
  for (std::uint32_t r = 0; r < s.config.world_size; ++r) {
    if (!s.lost_ranks.contains(r)) out.push_back(OpenSync{r});
  }
  for (const std::uint32_t c : live) {
    if (s.joined.contains(c)) out.push_back(StartUpdate{c});
  }
  const Status down(StatusCode::kUnavailable, "it was down before the sync began",
                    {.reason = Reason::kPeerLost});
  for (const auto& [rank, why] : s.lost_ranks) s.rank_leaves(now_ns, rank, down, out);
  for (const std::uint32_t c : live) {
    if (!s.joined.contains(c)) s.consumer_leaves(now_ns, c, down, out);
  }
  return {};
}

void SenderMachine::worker_joined(std::uint32_t consumer) {
  state_->joined.insert(consumer);
  state_->lost_between.erase({Role::kWorker, consumer});
}

void SenderMachine::take_back(std::uint32_t rank) {
  state_->lost_ranks.erase(rank);
  state_->lost_between.erase({Role::kTrainer, rank});
}

bool SenderMachine::lost(std::uint32_t rank) const {
  return state_->lost_ranks.contains(rank);
}

std::vector<std::uint32_t> SenderMachine::next_live() const {
  const State& s = *state_;
  const auto counts = [&](std::uint32_t c) {
    return s.joined.contains(c) ||
           (s.config.fail_on_consumer_loss && s.lost_between.contains({Role::kWorker, c}));
  };
  std::vector<std::uint32_t> live;
  for (std::uint32_t first = 0; first < s.config.num_consumers; first += s.replica()) {
    const std::size_t before = live.size();
    for (std::uint32_t c = first; c < std::min(first + s.replica(), s.config.num_consumers); ++c) {
      if (counts(c)) live.push_back(c);
    }
    if (live.size() - before != s.replica()) live.resize(before);
  }
  return live;
}

std::string SenderMachine::awaited() const {
  const State& s = *state_;
  if (next_live().empty()) return fmt::format("a whole replica of workers; missing: {}", missing_workers());
  std::vector<std::uint32_t> ranks;
  for (const auto& [rank, why] : s.lost_ranks) ranks.push_back(rank);
  if (ranks.empty() || (s.tables != nullptr && held_without(*s.tables, ranks))) return {};
  const bool fails = s.config.fail_on_consumer_loss &&
                     std::any_of(s.lost_between.begin(), s.lost_between.end(),
                                 [](const Member& member) { return member.role == Role::kTrainer; });
  if (fails) return {};
  return fmt::format("trainer {} to come back, of whose weights nobody else has all ({})",
                     fmt::join(ranks, ", trainer "), s.lost_ranks.rbegin()->second.message());
}

std::string SenderMachine::missing_workers() const {
  const State& s = *state_;
  std::string missing;
  for (std::uint32_t c = 0; c < s.config.num_consumers; ++c) {
    if (!s.joined.contains(c)) missing += (missing.empty() ? "" : ", ") + worker_name(c);
  }
  return s.last_loss.ok() ? missing : fmt::format("{} ({})", missing, s.last_loss.message());
}

void SenderMachine::rank_began(std::int64_t now_ns, std::uint32_t rank, std::uint64_t sync_id,
                               SenderActions& out) {
  State& s = *state_;
  (void)out;
  if (!s.running(sync_id) || rank >= s.ranks.size() || s.ranks[rank] != RankProgress::kOpened) return;
  s.ranks[rank] = RankProgress::kBegan;
  s.since_ns = now_ns;
}

void SenderMachine::update_started(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id,
                                   const Status& status, SenderActions& out) {
  State& s = *state_;
  if (s.leaves(now_ns, consumer, sync_id, status, out)) return;
  if (!status.ok()) {
    // It refused: it is not in the sync, and will not answer a failure.
    if (!s.report(now_ns, consumer, sync_id, {Progress::kStarting}, Progress::kOver)) return;
    s.fail_for(now_ns, {Role::kWorker, consumer}, status.with_context("start_update"), out);
    return s.advance(now_ns, out);
  }
  if (s.report(now_ns, consumer, sync_id, {Progress::kStarting}, Progress::kStarted)) s.advance(now_ns, out);
}

void SenderMachine::prepared(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id,
                             const Status& status, SenderActions& out) {
  State& s = *state_;
  if (s.leaves(now_ns, consumer, sync_id, status, out)) return;
  if (!status.ok()) {
    if (!s.report(now_ns, consumer, sync_id,
                  {Progress::kStarting, Progress::kStarted, Progress::kUpdating, Progress::kPrepared,
                   Progress::kFinishing},
                  Progress::kOver)) {
      return;
    }
    s.fail_for(now_ns, {Role::kWorker, consumer}, status, out);
    return s.advance(now_ns, out);
  }
  if (s.report(now_ns, consumer, sync_id, {Progress::kUpdating}, Progress::kPrepared)) s.advance(now_ns, out);
}

void SenderMachine::finished(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t sync_id,
                             const Status& status, SenderActions& out) {
  State& s = *state_;
  if (s.leaves(now_ns, consumer, sync_id, status, out)) return;
  if (!s.report(now_ns, consumer, sync_id, {Progress::kFinishing},
                status.ok() ? Progress::kFinished : Progress::kOver))
    return;
  if (!status.ok()) s.fail_for(now_ns, {Role::kWorker, consumer}, status.with_context("finish_update"), out);
  s.advance(now_ns, out);
}

void SenderMachine::rank_ended(std::int64_t now_ns, std::uint32_t rank, std::uint64_t sync_id,
                               const Status& status, SenderActions& out) {
  State& s = *state_;
  if (!s.running(sync_id) || rank >= s.ranks.size()) return;
  RankProgress& place = s.ranks[rank];
  if (place == RankProgress::kEnded || place == RankProgress::kLost) return;
  place = RankProgress::kEnded;
  s.since_ns = now_ns;
  if (!status.ok()) s.fail_for(now_ns, {Role::kTrainer, rank}, status, out);
  s.advance(now_ns, out);
}

void SenderMachine::failed(std::int64_t now_ns, const Member& from, std::uint64_t sync_id, const Status& why,
                           SenderActions& out) {
  State& s = *state_;
  if (!s.running(sync_id)) return;
  if (from.role == Role::kWorker && (from.id >= s.consumers.size() || !s.in_sync(s.consumers[from.id])))
    return;
  if (from.role == Role::kTrainer && from.id >= s.ranks.size()) return;
  if (from.role == Role::kWorker && s.leaves(now_ns, from.id, sync_id, why, out)) return;
  s.fail_for(now_ns, from, why, out);
}

void SenderMachine::rank_lost(std::int64_t now_ns, std::uint32_t rank, const Status& why,
                              SenderActions& out) {
  State& s = *state_;
  s.lost_ranks.insert_or_assign(rank, why);
  if (s.phase == SyncPhase::kIdle) s.lost_between.insert({Role::kTrainer, rank});
  s.rank_leaves(now_ns, rank, why, out);
}

void SenderMachine::consumer_lost(std::int64_t now_ns, std::uint32_t consumer, const Status& why,
                                  SenderActions& out) {
  State& s = *state_;
  s.last_loss = why;
  if (s.joined.erase(consumer) != 0 && s.phase == SyncPhase::kIdle &&
      !SHARDPULL_PLANT("forgets-who-was-lost-between"))
    s.lost_between.insert({Role::kWorker, consumer});
  s.consumer_leaves(now_ns, consumer, why, out);
}

void SenderMachine::tick(std::int64_t now_ns, SenderActions& out) {
  State& s = *state_;
  const std::int64_t limit = s.config.step_timeout_ns;
  const auto late = [&](std::string what) {
    s.fail(now_ns,
           stalled(fmt::format("sync {}: no answer within {:.3g} s: {}", s.sync_id,
                               static_cast<double>(limit) / 1e9, what)),
           out);
    s.advance(now_ns, out);
  };
  if (s.phase == SyncPhase::kIdle) return;
  if (s.phase == SyncPhase::kDraining) {
    if (now_ns - s.since_ns >= s.config.drain_timeout_ns) s.close(out);
    return;
  }
  if (now_ns - s.opened_ns >= limit && !s.none(RankProgress::kOpened)) {
    return late(fmt::format("{} did not begin the sync",
                            count_noun("trainer", State::members(s.ranks, RankProgress::kOpened))));
  }
  if (now_ns - s.since_ns < limit) return;
  if (const auto leaving = State::members(s.consumers, Progress::kLeaving); !leaving.empty())
    return late(fmt::format("{} left with a mate that had lost this trainer, and none is lost",
                            count_noun("worker", leaving)));
  switch (s.phase) {
    case SyncPhase::kStarting:
      return late(fmt::format("start_update of {}",
                              count_noun("worker", State::members(s.consumers, Progress::kStarting))));
    case SyncPhase::kUpdating:
      // While a rank is in the sync its watchdog sees more than we do.
      if (s.none(RankProgress::kBegan)) {
        return late(fmt::format("all trainers have ended, but {} not prepared",
                                count_noun("worker", State::members(s.consumers, Progress::kUpdating))));
      }
      return;
    case SyncPhase::kFinishing:
      return late(fmt::format("finish_update of {}",
                              count_noun("worker", State::members(s.consumers, Progress::kFinishing))));
    case SyncPhase::kIdle:
    case SyncPhase::kDraining:
      return;
  }
}

bool SenderMachine::running() const {
  return state_->phase != SyncPhase::kIdle;
}

}  // namespace shardpull
