// The consumer's pipeline, chunk by chunk:
//
//   packed:   waiting --issue--> asked --Ready--> ready --[generation]--> transferring --> landed
//             landed --[module order]--> scattering --> done
//   mapped:   waiting --issue--> asked --Ready--> ready --[module order]--> copying --> done
//   packed, scattered on arrival: as mapped
//   no keys:  waiting --[module order]--> copying --> done
//
// Issue: in plan order; the chunk K keyed chunks later is issued only after this one has landed (drain before
// issue). That makes the producer's `seq mod K` safe.
//
// Generation: every use of a receive slot has a number. A transfer into a slot starts only when the use
// before it has ended its scatter (Slot::done), which precedes handing the address to the transport. Slots go
// round across syncs.
//
// Module order: a chunk within a module's span waits for the module's first chunk, which materialises and
// fills it.
//
// Signals: a group is signalled to all its owners when every chunk of it has been read: packed chunks when
// they have landed in their slot, the others when their copy has ended.
//
// Takeover: a run whose producer is away (lost, or its connection broke) and that has not been read is asked
// for again from the next candidate, in that one's recovery lane, where seqs are counted as pulls are sent:
// reroute. A transfer or copy that failed with UNAVAILABLE waits, stranded, for word of who is away:
// resolve_stranded. The lanes of one that is only unreachable are left, once nothing reads it: leave_lanes.
//
// Plans: a sync runs the whole plan or a restricted one. What a plan fixes beyond its own words is a Course,
// built once for each; inside, chunks are counted by their place in it, outside by Chunk::chunk_id.
//
// Staged: modules are touched by the commit, not by landing. finish_update --StartCommit--> copying
// --commit_done--> the hooks of all chunks --> current.
//
// Errors: the first one is kept and stops everything new; settle() reports it once nothing is in flight,
// after telling the producers which of their groups are not read any more.
#include "protocol/consumer_machine.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "base/plants.h"
#include "protocol/wording.h"

namespace shardpull {

using namespace consumer_action;  // NOLINT: this file is about them

std::string_view to_string(WorkerState state) {
  switch (state) {
    case WorkerState::kIdle:
      return "idle";
    case WorkerState::kUpdating:
      return "updating";
    case WorkerState::kPrepared:
      return "prepared";
    case WorkerState::kCommitting:
      return "committing";
    case WorkerState::kFailed:
      return "failed";
  }
  return "unknown";
}

std::string to_string(const ModuleState& state) {
  switch (state.kind) {
    case ModuleState::Kind::kUnset:
      return "unset";
    case ModuleState::Kind::kCurrent:
      return fmt::format("current({})", state.version);
    case ModuleState::Kind::kLanding:
      return fmt::format("landing({})", state.version);
    case ModuleState::Kind::kPrepared:
      return fmt::format("prepared({})", state.version);
    case ModuleState::Kind::kMixed:
      return state.has_old ? fmt::format("mixed({}, {})", state.old_version, state.version)
                           : fmt::format("mixed(unset, {})", state.version);
  }
  return "unknown";
}

namespace {

constexpr std::uint32_t kNone = 0xFFFFFFFFu;

// kNone: without keys in this sync, nothing is pulled. kStranded: its transfer or copy failed because a producer
// could not be reached.
enum class RunState : std::uint8_t { kNone, kWaiting, kAsked, kReady, kTransferring, kStranded, kLanded };
enum class ChunkState : std::uint8_t { kWaiting, kIssued, kLanded, kScattering, kDone };

struct RunProgress {
  RunState state = RunState::kWaiting;
  std::uint32_t producer = 0;  // that serves it, by plan or since a takeover
  LaneKind lane = LaneKind::kRegular;
  std::uint32_t seq = 0;  // kNone: not sent yet, its recovery lane is being announced
  std::uint16_t attempt = 0;
  ReadyInfo ready;
};

struct ChunkProgress {
  ChunkState state = ChunkState::kWaiting;
  bool read = false;  // nothing of it reads a producer's tensors or slots any more
  bool posting = false;
  std::uint32_t slot = kNone;
  std::uint64_t generation = 0;  // of its use of the slot
  std::vector<RunProgress> runs;

  // Every run that is pulled is at `state`.
  bool all_runs(RunState state) const {
    return std::all_of(runs.begin(), runs.end(), [&](const RunProgress& run) {
      return run.state == state || run.state == RunState::kNone;
    });
  }
};

// A producer that cannot be pulled from.
struct Away {
  bool lost = false;  // its process is gone
  Status why;
};

// The lane at another producer than the plan's, for what the plan's no longer serves.
struct RecoveryLane {
  bool reserved = false;
  std::uint32_t next_seq = 0;                                   // this sync
  std::set<std::pair<std::uint32_t, std::uint32_t>> waiting;  // (chunk, run) to be sent once it is reserved
};

// What the plan fixes for a chunk beyond the plan's own words.
struct ChunkFacts {
  std::uint32_t ordinal = kNone;     // among the chunks with keys
  std::vector<std::uint32_t> after;  // chunks to be done before this one touches its modules
  std::uint32_t post_from = 0;  // chunks [post_from, this] are done before its modules are post-processed
  std::vector<std::uint32_t> blocks;   // groups whose signal waits for this chunk
  std::vector<std::uint32_t> entries;  // per run: distinct (name, piece), what a mapped Ready must bring
};

struct Slot {
  std::uint64_t queued = 0, done = 0;  // uses handed out, uses whose scatter has ended
  std::uint32_t user = kNone;          // the chunk of the latest use
};

// A plan and what follows from it.
struct Course {
  explicit Course(std::shared_ptr<const WorkerPlan> given) : held(std::move(given)), plan(*held) {
    const std::size_t count = plan.chunks.size();
    facts.resize(count);
    std::map<std::uint32_t, std::uint32_t> open;  // modules whose span is open: module -> first chunk
    std::map<std::uint32_t, std::vector<std::uint32_t>> chunks_of_group;
    for (std::uint32_t c = 0; c < count; ++c) {
      const Chunk& chunk = plan.chunks[c];
      ChunkFacts& fact = facts[c];
      place_of.emplace(chunk.chunk_id, c);
      if (!chunk.runs.empty()) {
        fact.ordinal = static_cast<std::uint32_t>(keyed.size());
        keyed.push_back(c);
      }
      std::set<std::uint32_t> after;
      for (const auto& [module, opened] : open) after.insert(opened);
      fact.after.assign(after.begin(), after.end());
      for (const std::uint32_t module : chunk.materialise) {
        open.emplace(module, c);
        fed.insert(module);
      }
      fact.post_from = c;
      for (const std::uint32_t module : chunk.post_process) {
        const auto it = open.find(module);
        if (it == open.end()) continue;  // not the planner's work: every module is materialised before
        fact.post_from = std::min(fact.post_from, it->second);
        open.erase(it);
      }
      for (const Run& run : chunk.runs) {
        std::set<std::pair<std::uint32_t, std::uint32_t>> distinct;
        for (std::uint32_t k = 0; k < run.key_count; ++k) {
          const ChunkKey& key = chunk.keys[run.first_key + k];
          distinct.emplace(key.name, key.piece);
        }
        fact.entries.push_back(static_cast<std::uint32_t>(distinct.size()));
      }
      chunks_of_group[chunk.group].push_back(c);
    }
    for (std::uint32_t c = 0; c < count; ++c) {
      for (const std::uint32_t group : plan.chunks[c].signal_groups) {
        std::set<std::uint32_t> blockers{c};
        const auto it = chunks_of_group.find(group);
        if (it != chunks_of_group.end()) blockers.insert(it->second.begin(), it->second.end());
        for (const std::uint32_t blocker : blockers) facts[blocker].blocks.push_back(group);
        blockers_of[group] = static_cast<std::uint32_t>(blockers.size());
      }
    }
  }

  // The place of a chunk in the plan; past its end when the plan has no such chunk.
  std::uint32_t place(std::uint32_t chunk_id) const {
    const auto it = place_of.find(chunk_id);
    return it == place_of.end() ? kNone : it->second;
  }

  const std::shared_ptr<const WorkerPlan> held;
  const WorkerPlan& plan;
  std::vector<ChunkFacts> facts;
  std::unordered_map<std::uint32_t, std::uint32_t> place_of;  // by chunk id
  std::vector<std::uint32_t> keyed;                           // chunks with keys, in order
  std::map<std::uint32_t, std::uint32_t> blockers_of;         // group -> chunks its signal waits for
  std::set<std::uint32_t> fed;                                // modules the plan feeds
};

}  // namespace

struct ConsumerMachine::State {
  explicit State(ConsumerConfig given)
      : State(given, std::make_shared<const Course>(given.plan), given.plan->consumer) {}
  State(ConsumerConfig given, std::shared_ptr<const Course> same, std::uint32_t id)
      : config(std::move(given)), consumer(id), whole(std::move(same)), course(whole) {
    slots.resize(std::max<std::uint32_t>(whole->plan.ring_depth, 1));
    modules.resize(
        std::max<std::size_t>(config.num_modules, whole->fed.empty() ? 0 : *whole->fed.rbegin() + 1));
  }

  const ConsumerConfig config;
  const std::uint32_t consumer;  // this worker; where the plan is a twin's as well, that has another id
  const std::shared_ptr<const Course> whole;
  std::shared_ptr<const Course> part;    // of the last restricted plan
  std::shared_ptr<const Course> course;  // the running (or last) sync's: one of the two
  const WorkerPlan& plan() const { return course->plan; }
  std::uint32_t id_of(std::uint32_t c) const { return plan().chunks[c].chunk_id; }

  WorkerState state = WorkerState::kIdle;
  std::uint64_t sync_id = 0, version = 0;
  std::vector<ModuleState> modules;
  std::optional<std::uint64_t> committed;
  DropCounters drops;
  bool shut = false;

  // This sync.
  bool asked = false;  // update() was called
  Status error;
  std::vector<ChunkProgress> chunks;
  std::uint32_t next = 0;  // the next chunk to issue
  std::uint32_t done_count = 0;
  std::set<std::uint32_t> startable;  // landed, ready or without keys, and not started for module order
  std::set<std::uint32_t> posts_due;  // chunks whose modules wait for post-processing
  std::map<std::uint32_t, std::uint32_t> blockers_left;
  std::set<std::pair<std::uint32_t, std::uint32_t>> unconfirmed;  // (producer, group)
  std::map<std::uint32_t, std::vector<std::uint32_t>> outgoing;   // signals of the event at hand, by producer
  std::int64_t last_progress_ns = 0;
  std::uint32_t rerouted = 0;
  std::set<std::uint32_t> leaving;  // producers that are unreachable and are to be told so
  Status stranded_by;            // the first error of what is stranded
  std::int64_t stranded_ns = 0;  // since when

  // Across syncs.
  std::map<std::uint32_t, Away> away;              // by producer
  std::map<std::uint32_t, RecoveryLane> recovery;  // by producer, of those announced
  std::vector<Slot> slots;
  std::uint64_t slot_cursor = 0;
  std::uint32_t transfers = 0, scatters = 0, posts = 0;  // in flight
  bool copying = false;                                   // a commit's copies

  bool in_flight() const { return transfers + scatters + posts != 0 || copying; }
  bool working() const { return state == WorkerState::kUpdating && asked && error.ok(); }

  bool takes_slot(const Chunk& chunk) const {
    return chunk.path == Path::kPacked && !config.scattered_on_arrival.contains(chunk.chunk_id);
  }

  // ---- issuing ----------------------------------------------------------------------------------

  void issue(ConsumerActions& out) {
    for (; next < plan().chunks.size(); ++next) {
      const Chunk& chunk = plan().chunks[next];
      ChunkProgress& progress = chunks[next];
      if (chunk.runs.empty()) {
        progress.state = ChunkState::kLanded;
        startable.insert(next);
        continue;
      }
      const std::uint32_t ordinal = course->facts[next].ordinal,
                          depth = static_cast<std::uint32_t>(slots.size());
      if (ordinal >= depth && !chunks[course->keyed[ordinal - depth]].read && !SHARDPULL_PLANT("issue-without-drain"))
        return;
      progress.state = ChunkState::kIssued;
      if (takes_slot(chunk)) {
        progress.slot = static_cast<std::uint32_t>(slot_cursor++ % slots.size());
        progress.generation = ++slots[progress.slot].queued;
        slots[progress.slot].user = next;
      }
      for (std::uint16_t r = 0; r < chunk.runs.size(); ++r) {
        RunProgress& run = progress.runs[r];
        if (run.state == RunState::kNone) continue;
        run.state = RunState::kAsked;
        if (!away.contains(run.producer)) {
          send_pull(next, r, out);
        } else if (!reroute(next, r, out)) {
          ++next;  // it is issued, and fails
          return;
        }
      }
    }
  }

  void send_pull(std::uint32_t c, std::uint16_t r, ConsumerActions& out) {
    const RunProgress& run = chunks[c].runs[r];
    out.push_back(
        SendPull{run.producer, PullId{sync_id, consumer, id_of(c), r, run.attempt, run.seq, run.lane}});
  }

  // ---- takeover ---------------------------------------------------------------------------------

  // The next candidate after the one that the run is asked at, of those not away.
  std::optional<std::uint32_t> stand_in(std::uint32_t c, std::uint16_t r) const {
    const std::vector<std::uint32_t>& candidates = plan().chunks[c].candidates;
    const auto at = static_cast<std::size_t>(
        std::find(candidates.begin(), candidates.end(), chunks[c].runs[r].producer) - candidates.begin());
    for (std::size_t step = 1; step < candidates.size(); ++step) {
      const std::uint32_t candidate = candidates[(at + step) % candidates.size()];
      if (!away.contains(candidate)) return candidate;
    }
    return std::nullopt;
  }

  // Whether somebody is left for all that has not been read. Fails the update otherwise, before more of it is
  // applied.
  bool all_served(ConsumerActions& out) {
    if (away.empty()) return true;
    for (std::uint32_t c = 0; c < chunks.size(); ++c) {
      if (chunks[c].read) continue;
      for (std::uint16_t r = 0; r < chunks[c].runs.size(); ++r) {
        const RunProgress& run = chunks[c].runs[r];
        const bool moving = run.state == RunState::kTransferring || run.state == RunState::kLanded ||
                            chunks[c].state == ChunkState::kScattering;
        if (run.state == RunState::kNone || moving || !away.contains(run.producer) || stand_in(c, r)) continue;
        lost_for_good(c, r, out);
        return false;
      }
    }
    return true;
  }

  void lost_for_good(std::uint32_t c, std::uint16_t r, ConsumerActions& out) {
    const std::uint32_t producer = chunks[c].runs[r].producer;
    set_error(Status(StatusCode::kUnavailable,
                     fmt::format("{} lost {} in sync {}, and nobody else has chunk {} (group {}): {}",
                                 worker_name(consumer), trainer_name(producer), sync_id, id_of(c),
                                 plan().chunks[c].group, away.at(producer).why.message()),
                     {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = trainer_name(producer)}),
              true, out);
  }

  // Asks for a run at the candidate that stands in. False when none is left: the update has failed.
  bool reroute(std::uint32_t c, std::uint16_t r, ConsumerActions& out) {
    RunProgress& run = chunks[c].runs[r];
    const auto candidate = stand_in(c, r);
    if (!candidate) {
      lost_for_good(c, r, out);
      return false;
    }
    ++rerouted;
    ++run.attempt;
    run.state = RunState::kAsked;
    run.producer = *candidate;
    run.ready = {};
    if (!SHARDPULL_PLANT("reroute-without-a-lane")) run.lane = LaneKind::kRecovery;
    run.seq = kNone;
    const auto [lane, fresh] = recovery.try_emplace(*candidate);
    if (fresh) out.push_back(AnnounceRecovery{*candidate});
    if (lane->second.reserved) {
      send_recovery(lane->second, c, r, out);
    } else {
      lane->second.waiting.emplace(c, r);
    }
    return true;
  }

  void send_recovery(RecoveryLane& lane, std::uint32_t c, std::uint16_t r, ConsumerActions& out) {
    chunks[c].runs[r].seq = lane.next_seq++;
    send_pull(c, r, out);
  }

  // The producer has just gone away: what is asked for there, or has failed there, is asked for elsewhere.
  void take_over_from(std::uint32_t producer, ConsumerActions& out) {
    recovery.erase(producer);
    if (!working() || !all_served(out)) return;
    for (std::uint32_t c = 0; c < next; ++c) {
      if (chunks[c].state != ChunkState::kIssued) continue;
      for (std::uint16_t r = 0; r < chunks[c].runs.size(); ++r) {
        const RunProgress& run = chunks[c].runs[r];
        if (run.producer != producer || (run.state != RunState::kAsked && run.state != RunState::kReady)) continue;
        startable.erase(c);
        if (!reroute(c, r, out)) return;
      }
      if (!resolve_stranded(c, out)) return;
    }
  }

  // A transfer or copy of the chunk failed because a producer could not be reached. Once one of them is known
  // to be away, what failed is asked for again, from those that are not at their own place. False when the
  // update has failed.
  bool resolve_stranded(std::uint32_t c, ConsumerActions& out) {
    std::vector<RunProgress>& runs = chunks[c].runs;
    const bool known = std::any_of(runs.begin(), runs.end(), [&](const RunProgress& run) {
      return run.state == RunState::kStranded && away.contains(run.producer);
    });
    if (!known) return true;
    for (std::uint16_t r = 0; r < runs.size(); ++r) {
      RunProgress& run = runs[r];
      if (run.state != RunState::kStranded) continue;
      if (away.contains(run.producer)) {
        if (!reroute(c, r, out)) return false;
      } else {
        run.state = RunState::kAsked;
        ++run.attempt;
        send_pull(c, r, out);
      }
    }
    return true;
  }

  // Whether a transfer out of the producer's slots, or a copy out of its tensors, has not ended.
  bool reads_from(std::uint32_t producer) const {
    return std::any_of(chunks.begin(), chunks.begin() + next, [&](const ChunkProgress& chunk) {
      const bool copied = chunk.state == ChunkState::kScattering && !chunk.read;
      return std::any_of(chunk.runs.begin(), chunk.runs.end(), [&](const RunProgress& run) {
        return run.producer == producer && (copied || run.state == RunState::kTransferring);
      });
    });
  }

  // Sharers of a slot wait for each other, here and there: without a word from this worker they would wait
  // for pulls that it cannot send, and it for theirs elsewhere.
  void leave_lanes(ConsumerActions& out) {
    std::erase_if(leaving, [&](std::uint32_t producer) {
      if (reads_from(producer)) return false;
      out.push_back(LeaveLanes{producer, sync_id});
      return true;
    });
  }

  void strand(std::int64_t now_ns, std::uint32_t c, const Status& why) {
    if (!anything_stranded()) {
      stranded_by = why.with_context(describe(c));
      stranded_ns = now_ns;
    }
  }
  bool anything_stranded() const {
    return std::any_of(chunks.begin(), chunks.begin() + next, [](const ChunkProgress& chunk) {
      return std::any_of(chunk.runs.begin(), chunk.runs.end(),
                         [](const RunProgress& run) { return run.state == RunState::kStranded; });
    });
  }

  std::vector<std::uint32_t> producers_of(std::uint32_t c) const {
    std::vector<std::uint32_t> producers;
    for (const RunProgress& run : chunks[c].runs) producers.push_back(run.producer);
    return producers;
  }

  // ---- landing ----------------------------------------------------------------------------------

  void start_transfers(std::uint32_t c, ConsumerActions& out) {
    ChunkProgress& progress = chunks[c];
    if (slots[progress.slot].done + 1 != progress.generation && !SHARDPULL_PLANT("slot-without-generation"))
      return;  // the use before still reads the slot
    for (std::uint16_t r = 0; r < progress.runs.size(); ++r) {
      RunProgress& run = progress.runs[r];
      if (run.state != RunState::kReady) continue;
      run.state = RunState::kTransferring;
      ++transfers;
      out.push_back(StartTransfer{id_of(c), r, run.producer, progress.slot, run.ready});
    }
  }

  // Nothing of the chunk reads a producer any more.
  void end_reading(std::uint32_t c) {
    chunks[c].read = true;
    for (const std::uint32_t group : course->facts[c].blocks) {
      if (--blockers_left[group] == 0) signal(group);
    }
  }

  void signal(std::uint32_t group) {
    for (const std::uint32_t owner : plan().group_owners[group]) {
      const auto it = away.find(owner);
      if (it != away.end() && it->second.lost) continue;
      unconfirmed.emplace(owner, group);
      outgoing[owner].push_back(group);
    }
  }

  // ---- scattering -------------------------------------------------------------------------------

  void touch(std::uint32_t module) {
    ModuleState& m = modules[module];
    if (m.kind == ModuleState::Kind::kCurrent || m.kind == ModuleState::Kind::kPrepared) {
      m.has_old = true;
      m.old_version = m.version;
    }
    m.kind = ModuleState::Kind::kLanding;
    m.version = version;
  }

  void start_scatters(ConsumerActions& out) {
    for (auto it = startable.begin(); it != startable.end();) {
      const std::uint32_t c = *it;
      const bool blocked =
          std::any_of(course->facts[c].after.begin(), course->facts[c].after.end(),
                      [&](std::uint32_t before) { return chunks[before].state != ChunkState::kDone; });
      if (blocked && !SHARDPULL_PLANT("chunks-without-module-order")) {
        ++it;
        continue;
      }
      it = startable.erase(it);
      ChunkProgress& progress = chunks[c];
      progress.state = ChunkState::kScattering;
      ++scatters;
      if (SHARDPULL_PLANT("signal-before-the-copy-ends") && !progress.read) end_reading(c);
      if (!config.staged) {
        for (const std::uint32_t module : plan().chunks[c].materialise) touch(module);
      }
      if (progress.slot != kNone) {
        StartScatter scatter{id_of(c), progress.slot, producers_of(c), {}};
        for (const RunProgress& run : progress.runs)  // they lie in the order of the chunk's keys
          scatter.sums.insert(scatter.sums.end(), run.ready.sums.begin(), run.ready.sums.end());
        out.push_back(std::move(scatter));
      } else {
        StartCopy copy{id_of(c), producers_of(c), {}};
        for (RunProgress& run : progress.runs) copy.ready.push_back(std::move(run.ready));
        out.push_back(std::move(copy));
      }
    }
  }

  void start_posts(ConsumerActions& out) {
    for (auto it = posts_due.begin(); it != posts_due.end();) {
      const std::uint32_t c = *it;
      bool complete = true;
      for (std::uint32_t before = course->facts[c].post_from; before <= c && complete; ++before) {
        complete = chunks[before].state == ChunkState::kDone;
      }
      if (!complete) {
        ++it;
        continue;
      }
      it = posts_due.erase(it);
      chunks[c].posting = true;
      ++posts;
      out.push_back(StartPost{id_of(c)});
    }
  }

  // ---- what follows from an event ---------------------------------------------------------------

  void advance(ConsumerActions& out) {
    if (working()) {
      issue(out);
      if (!working()) return settle(out);  // nobody has what comes next
      start_scatters(out);
      start_posts(out);
      for (auto& [producer, groups] : std::exchange(outgoing, {})) {
        out.push_back(SendSignals{producer, sync_id, std::move(groups)});
      }
      leave_lanes(out);
      // Hooks that could still fail would leave mates that commit without this worker.
      const bool processed = posts == 0 && posts_due.empty();
      if (done_count == plan().chunks.size() && unconfirmed.empty() && processed) {
        state = WorkerState::kPrepared;
        out.push_back(UpdateDone{sync_id, {}});
      }
    }
    settle(out);
  }

  void settle(ConsumerActions& out) {
    if (state == WorkerState::kCommitting && posts == 0 && !copying) {
      if (!error.ok()) {
        end_failed(out);
        out.push_back(FinishDone{sync_id, error});
        return;
      }
      for (const std::uint32_t module : course->fed)
        modules[module] = {ModuleState::Kind::kCurrent, version, 0, false};
      committed = version;
      state = WorkerState::kIdle;
      out.push_back(FinishDone{sync_id, {}});
      return;
    }
    if ((state == WorkerState::kUpdating || state == WorkerState::kPrepared) && !error.ok() && !in_flight()) {
      end_failed(out);
      out.push_back(UpdateDone{sync_id, error});
    }
  }

  void end_failed(ConsumerActions& out) {
    state = WorkerState::kFailed;
    // What was asked for and not signalled: a late Ready for it will be dropped, so it is not read any more.
    // And the signals that the failure found on their way.
    std::map<std::uint32_t, std::set<std::uint32_t>> given_up;
    for (const auto& [producer, groups] : outgoing) given_up[producer].insert(groups.begin(), groups.end());
    for (std::uint32_t c = 0; c < next; ++c) {
      const auto left = blockers_left.find(plan().chunks[c].group);
      if (left != blockers_left.end() && left->second == 0) continue;
      for (std::size_t r = 0; r < chunks[c].runs.size(); ++r) {
        if (chunks[c].runs[r].state == RunState::kNone) continue;
        for (const std::uint32_t producer : {plan().chunks[c].runs[r].producer, chunks[c].runs[r].producer}) {
          const auto it = away.find(producer);
          if (it == away.end() || !it->second.lost) given_up[producer].insert(plan().chunks[c].group);
        }
      }
    }
    for (const auto& [producer, groups] : given_up) {
      for (const std::uint32_t group : groups) unconfirmed.emplace(producer, group);
      out.push_back(SendSignals{producer, sync_id, {groups.begin(), groups.end()}});
    }
    for (ModuleState& module : modules) {
      if (module.kind == ModuleState::Kind::kLanding) module.kind = ModuleState::Kind::kMixed;
    }
    for (Slot& slot : slots) slot.done = slot.queued;
    startable.clear();
    posts_due.clear();
    outgoing.clear();
  }

  // Keeps the first error. `ours`: found here, so that the sender is to hear of it.
  void set_error(const Status& why, bool ours, ConsumerActions& out) {
    if (error.ok()) {
      error = why;
      if (ours) out.push_back(ReportFailure{sync_id, why});
    }
    settle(out);
  }

  std::string describe(std::uint32_t c) const {
    return fmt::format("{}: chunk {} (group {})", worker_name(consumer), id_of(c), plan().chunks[c].group);
  }

  // The chunk's run that `pull` names, when a reply to it is still awaited from `producer`; `c`: its chunk.
  RunProgress* awaited(std::uint32_t producer, const PullId& pull, std::uint32_t& c) {
    if (pull.sync_id != sync_id || state != WorkerState::kUpdating) {
      ++drops.stale_sync;
      return nullptr;
    }
    c = course->place(pull.chunk);
    if (!working() || pull.consumer != consumer || c >= chunks.size() || pull.run >= chunks[c].runs.size()) {
      ++drops.unknown;
      return nullptr;
    }
    RunProgress& progress = chunks[c].runs[pull.run];
    if (progress.state != RunState::kAsked || progress.producer != producer || progress.seq != pull.seq ||
        progress.lane != pull.lane || progress.attempt != pull.attempt) {
      ++drops.unknown;
      return nullptr;
    }
    return &progress;
  }
};

ConsumerMachine::ConsumerMachine(ConsumerConfig config)
    : state_(std::make_unique<State>(std::move(config))) {}
ConsumerMachine::ConsumerMachine(const ConsumerMachine& twin, std::uint32_t consumer)
    : state_(std::make_unique<State>(twin.state_->config, twin.state_->whole, consumer)) {}
ConsumerMachine::~ConsumerMachine() = default;

Status ConsumerMachine::start_update(std::int64_t now_ns, std::uint64_t sync_id, std::uint64_t version,
                                     std::shared_ptr<const WorkerPlan> plan, ConsumerActions& out) {
  State& s = *state_;
  (void)out;
  if (s.shut) return shutting_down();
  const std::string me = worker_name(s.consumer);
  if (s.state == WorkerState::kUpdating || s.state == WorkerState::kCommitting) {
    return wrong_state(fmt::format("{}: start_update of sync {} while {} in sync {}", me, sync_id,
                                   to_string(s.state), s.sync_id));
  }
  if (sync_id <= s.sync_id)
    return wrong_state(fmt::format("{}: sync {} is not after sync {}", me, sync_id, s.sync_id));
  std::shared_ptr<const Course> course = s.whole;
  if (plan != nullptr) {
    if (plan->consumer != s.whole->plan.consumer || plan->ring_depth != s.whole->plan.ring_depth) {
      return bad_argument(fmt::format("{}: sync {} with a plan of {} and ring_depth {}, this worker's is {}",
                                      me, sync_id, worker_name(plan->consumer), plan->ring_depth,
                                      s.whole->plan.ring_depth));
    }
    course = s.part;
    if (course == nullptr || course->held != plan) course = std::make_shared<const Course>(std::move(plan));
    if (!course->fed.empty() && *course->fed.rbegin() >= s.modules.size()) {
      return bad_argument(fmt::format("{}: sync {} with a plan that loads module {} of {}", me, sync_id,
                                      *course->fed.rbegin(), s.modules.size()));
    }
    s.part = course;
  }
  s.course = std::move(course);
  s.state = WorkerState::kUpdating;
  s.sync_id = sync_id;
  s.version = version;
  s.asked = false;
  s.error = {};
  s.next = s.done_count = s.rerouted = 0;
  s.startable.clear();
  s.posts_due.clear();
  s.outgoing.clear();
  s.unconfirmed.clear();
  s.leaving.clear();
  for (const auto& [producer, away] : s.away) {
    if (!away.lost) s.leaving.insert(producer);
  }
  s.blockers_left = s.course->blockers_of;
  s.chunks.assign(s.plan().chunks.size(), ChunkProgress{});
  for (std::size_t c = 0; c < s.chunks.size(); ++c) {
    for (const Run& run : s.plan().chunks[c].runs) {
      RunProgress& progress = s.chunks[c].runs.emplace_back();
      progress.state = run.key_count == 0 ? RunState::kNone : RunState::kWaiting;
      progress.producer = run.producer;
      progress.seq = run.seq;
    }
  }
  for (auto& [producer, lane] : s.recovery) {
    lane.next_seq = 0;
    lane.waiting.clear();
  }
  s.last_progress_ns = now_ns;
  return {};
}

Status ConsumerMachine::update(std::int64_t now_ns, ConsumerActions& out) {
  State& s = *state_;
  if (s.shut) return shutting_down();
  if (s.state == WorkerState::kFailed || !s.error.ok()) return s.error;
  if (s.state != WorkerState::kUpdating || s.asked) {
    return wrong_state(fmt::format("{}: update without start_update (the worker is {})",
                                   worker_name(s.consumer), to_string(s.state)));
  }
  s.asked = true;
  s.last_progress_ns = now_ns;
  if (!s.all_served(out)) return {};  // UpdateDone says why
  for (const std::uint32_t group : s.plan().pre_free) s.signal(group);
  s.advance(out);
  return {};
}

void ConsumerMachine::ready(std::int64_t now_ns, std::uint32_t producer, const PullId& pull, ReadyInfo ready,
                            ConsumerActions& out) {
  State& s = *state_;
  std::uint32_t c = kNone;
  RunProgress* run = s.awaited(producer, pull, c);
  if (run == nullptr) return;
  const Chunk& chunk = s.plan().chunks[c];
  const auto corrupt = [&](std::string message) {
    s.set_error(peer_error(StatusCode::kDataLoss, trainer_name(producer),
                           fmt::format("{}: {} {}", s.describe(c), trainer_name(producer), message),
                           Reason::kCorrupt),
                true, out);
  };
  if (ready.path != chunk.path) {
    return corrupt(
        fmt::format("answered on path {}, the plan says {}", to_string(ready.path), to_string(chunk.path)));
  }
  if (chunk.path == Path::kPacked && ready.bytes != chunk.runs[pull.run].bytes) {
    return corrupt(fmt::format("packed {} bytes, the plan says {}", ready.bytes, chunk.runs[pull.run].bytes));
  }
  if (chunk.path != Path::kPacked && ready.entries.size() != s.course->facts[c].entries[pull.run]) {
    return corrupt(fmt::format("named {} tensors, the plan says {}", ready.entries.size(),
                               s.course->facts[c].entries[pull.run]));
  }
  const std::size_t sums = s.config.summed.contains(chunk.path) ? chunk.runs[pull.run].key_count : 0;
  if (ready.sums.size() != sums) {
    return corrupt(fmt::format("sent {} sums for {} keys on path {}, the setting integrity asks for {}",
                               ready.sums.size(), chunk.runs[pull.run].key_count, to_string(chunk.path), sums));
  }
  run->state = RunState::kReady;
  run->ready = std::move(ready);
  s.last_progress_ns = now_ns;
  ChunkProgress& progress = s.chunks[c];
  if (s.takes_slot(chunk)) {
    s.start_transfers(c, out);
  } else if (progress.all_runs(RunState::kReady)) {
    s.startable.insert(c);
  }
  s.advance(out);
}

void ConsumerMachine::pull_failed(std::int64_t now_ns, std::uint32_t producer, const PullId& pull,
                                  const Status& why, ConsumerActions& out) {
  State& s = *state_;
  std::uint32_t c = kNone;
  if (s.awaited(producer, pull, c) == nullptr) return;
  // A process that ends in good order says so here before its end is known.
  if (why.info().reason == Reason::kShutdown) return producer_unreachable(now_ns, producer, why, out);
  s.set_error(why.with_context(fmt::format("{} from {}", s.describe(c), trainer_name(producer))), true, out);
}

void ConsumerMachine::transfer_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk_id,
                                    std::uint16_t run, const Status& status, ConsumerActions& out) {
  State& s = *state_;
  const std::uint32_t chunk = s.course->place(chunk_id);
  if (sync_id != s.sync_id || chunk >= s.chunks.size() || run >= s.chunks[chunk].runs.size() ||
      s.chunks[chunk].runs[run].state != RunState::kTransferring) {
    ++s.drops.unknown;
    return;
  }
  ChunkProgress& progress = s.chunks[chunk];
  --s.transfers;
  s.last_progress_ns = now_ns;
  if (status.code() == StatusCode::kUnavailable && s.working()) {
    s.strand(now_ns, chunk,
             status.with_context(fmt::format("from {}", trainer_name(progress.runs[run].producer))));
    progress.runs[run].state = RunState::kStranded;
    s.resolve_stranded(chunk, out);
    return s.advance(out);
  }
  progress.runs[run].state = RunState::kLanded;
  if (!status.ok()) {
    return s.set_error(
        status.with_context(fmt::format("{} from {}", s.describe(chunk),
                                        trainer_name(progress.runs[run].producer))),
        true, out);
  }
  if (s.working() && progress.all_runs(RunState::kLanded)) {
    progress.state = ChunkState::kLanded;
    s.end_reading(chunk);
    s.startable.insert(chunk);
  }
  s.advance(out);
}

void ConsumerMachine::scatter_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk_id,
                                   const Status& status, ConsumerActions& out) {
  State& s = *state_;
  const std::uint32_t chunk = s.course->place(chunk_id);
  if (sync_id != s.sync_id || chunk >= s.chunks.size() || s.chunks[chunk].state != ChunkState::kScattering) {
    ++s.drops.unknown;
    return;
  }
  ChunkProgress& progress = s.chunks[chunk];
  --s.scatters;
  s.last_progress_ns = now_ns;
  if (status.code() == StatusCode::kUnavailable && s.working() && !progress.read &&
      !progress.runs.empty()) {  // a copy in place
    s.strand(now_ns, chunk, status);
    progress.state = ChunkState::kIssued;
    for (RunProgress& run : progress.runs) {
      if (run.state != RunState::kNone) run.state = RunState::kStranded;
    }
    s.resolve_stranded(chunk, out);
    return s.advance(out);
  }
  progress.state = ChunkState::kDone;
  if (progress.slot != kNone) s.slots[progress.slot].done = progress.generation;
  if (!status.ok()) return s.set_error(status.with_context(s.describe(chunk)), true, out);
  if (s.working()) {
    ++s.done_count;
    if (!progress.read) s.end_reading(chunk);
    if (!s.plan().chunks[chunk].post_process.empty() && !s.config.staged) s.posts_due.insert(chunk);
    // The slot's next use, if it was handed out: a slot has at most two, as the one after next waits for the
    // next to land.
    if (progress.slot != kNone && s.slots[progress.slot].user != chunk)
      s.start_transfers(s.slots[progress.slot].user, out);
  }
  s.advance(out);
}

void ConsumerMachine::post_done(std::int64_t now_ns, std::uint64_t sync_id, std::uint32_t chunk_id,
                                const Status& status, ConsumerActions& out) {
  State& s = *state_;
  const std::uint32_t chunk = s.course->place(chunk_id);
  if (sync_id != s.sync_id || chunk >= s.chunks.size() || !s.chunks[chunk].posting) {
    ++s.drops.unknown;
    return;
  }
  s.chunks[chunk].posting = false;
  --s.posts;
  s.last_progress_ns = now_ns;
  if (!status.ok())
    return s.set_error(status.with_context(s.describe(chunk) + ": post-processing"), true, out);
  for (const std::uint32_t module : s.plan().chunks[chunk].post_process) {
    if (!s.course->fed.contains(module)) continue;
    s.modules[module].kind = ModuleState::Kind::kPrepared;
  }
  s.advance(out);
}

void ConsumerMachine::commit_done(std::int64_t now_ns, std::uint64_t sync_id, const Status& status,
                                  ConsumerActions& out) {
  State& s = *state_;
  if (sync_id != s.sync_id || !s.copying) {
    ++s.drops.unknown;
    return;
  }
  s.copying = false;
  s.last_progress_ns = now_ns;
  if (!status.ok()) {
    return s.set_error(status.with_context(worker_name(s.consumer) + ": the commit"), true, out);
  }
  for (std::uint32_t c = 0; c < s.chunks.size(); ++c) {
    if (!s.plan().chunks[c].post_process.empty()) s.posts_due.insert(c);
  }
  s.start_posts(out);
  s.settle(out);
}

void ConsumerMachine::signals_acked(std::int64_t now_ns, std::uint32_t producer, std::uint64_t sync_id,
                                    const std::vector<std::uint32_t>& groups, ConsumerActions& out) {
  State& s = *state_;
  if (sync_id != s.sync_id) {
    ++s.drops.stale_sync;
    return;
  }
  for (const std::uint32_t group : groups) {
    if (s.unconfirmed.erase({producer, group}) == 0) {
      if (s.state != WorkerState::kFailed) ++s.drops.unknown;
    } else {
      s.last_progress_ns = now_ns;
    }
  }
  s.advance(out);
}

Status ConsumerMachine::finish_update(std::int64_t now_ns, std::uint64_t sync_id, ConsumerActions& out) {
  State& s = *state_;
  (void)now_ns;
  if (s.shut) return shutting_down();
  if (sync_id == s.sync_id && !s.error.ok()) return s.error;
  if (sync_id != s.sync_id || s.state != WorkerState::kPrepared) {
    return wrong_state(fmt::format("{}: finish_update of sync {} while {} in sync {}",
                                   worker_name(s.consumer), sync_id, to_string(s.state), s.sync_id));
  }
  s.state = WorkerState::kCommitting;
  if (s.config.staged) {
    for (const std::uint32_t module : s.course->fed) s.touch(module);
    s.copying = true;
    out.push_back(StartCommit{});
  }
  s.settle(out);
  return {};
}

void ConsumerMachine::producer_lost(std::int64_t now_ns, std::uint32_t producer, const Status& why,
                                    ConsumerActions& out) {
  State& s = *state_;
  const bool known = s.away.contains(producer);
  Away& away = s.away[producer];
  if (away.lost) return;
  away = {true, why};
  s.leaving.erase(producer);
  if (s.state == WorkerState::kUpdating) s.last_progress_ns = now_ns;
  s.outgoing.erase(producer);
  std::erase_if(s.unconfirmed, [&](const auto& signal) { return signal.first == producer; });
  if (!known) s.take_over_from(producer, out);
  s.advance(out);
}

void ConsumerMachine::producer_unreachable(std::int64_t now_ns, std::uint32_t producer, const Status& why,
                                           ConsumerActions& out) {
  State& s = *state_;
  if (!s.away.try_emplace(producer, Away{false, why}).second) return;
  s.leaving.insert(producer);
  if (s.working()) s.last_progress_ns = now_ns;
  std::vector<std::uint32_t> again;
  for (auto it = s.unconfirmed.lower_bound({producer, 0}); it != s.unconfirmed.end() && it->first == producer;
       ++it) {
    again.push_back(it->second);
  }
  if (s.state == WorkerState::kFailed) {
    if (!again.empty()) out.push_back(SendSignals{producer, s.sync_id, std::move(again)});
  } else if (!again.empty()) {
    s.outgoing[producer] = std::move(again);  // sent now, or, while an error drains, at its end
  }
  s.take_over_from(producer, out);
  s.advance(out);
}

void ConsumerMachine::producer_reachable(std::uint32_t producer) {
  State& s = *state_;
  if (s.state == WorkerState::kUpdating) return;
  const auto it = s.away.find(producer);
  if (it != s.away.end() && !it->second.lost) s.away.erase(it);
}

void ConsumerMachine::producer_returned(std::uint32_t producer) {
  State& s = *state_;
  if (s.state != WorkerState::kUpdating) s.away.erase(producer);
}

void ConsumerMachine::recovery_reserved(std::int64_t now_ns, std::uint32_t producer, const Status& status,
                                        ConsumerActions& out) {
  State& s = *state_;
  const auto it = s.recovery.find(producer);
  if (it == s.recovery.end() || it->second.reserved) return;
  if (!status.ok()) return producer_unreachable(now_ns, producer, status, out);
  s.last_progress_ns = now_ns;
  it->second.reserved = true;
  for (const auto& [c, r] : std::exchange(it->second.waiting, {})) {
    if (s.working()) s.send_recovery(it->second, c, static_cast<std::uint16_t>(r), out);
  }
  s.advance(out);
}

void ConsumerMachine::fail(std::int64_t now_ns, std::uint64_t sync_id, const Status& why,
                           ConsumerActions& out) {
  State& s = *state_;
  (void)now_ns;
  if (sync_id != s.sync_id) {
    ++s.drops.stale_sync;
    return;
  }
  if (s.state == WorkerState::kUpdating || s.state == WorkerState::kPrepared) s.set_error(why, false, out);
}

void ConsumerMachine::tick(std::int64_t now_ns, ConsumerActions& out) {
  State& s = *state_;
  if (s.working() && s.anything_stranded() && now_ns - s.stranded_ns >= s.config.loss_grace_ns)
    return s.set_error(s.stranded_by, true, out);
  if (!s.working() || now_ns - s.last_progress_ns < s.config.stall_timeout_ns) return;
  std::string waiting;
  for (std::uint32_t c = 0; c < s.chunks.size(); ++c) {
    for (std::size_t r = 0; r < s.chunks[c].runs.size(); ++r) {
      if (s.chunks[c].runs[r].state != RunState::kTransferring) continue;
      waiting += fmt::format("; the transfer of chunk {} from {}", s.id_of(c),
                             trainer_name(s.chunks[c].runs[r].producer));
    }
    if (s.chunks[c].state == ChunkState::kScattering)
      waiting += fmt::format("; the copies of chunk {}", s.id_of(c));
  }
  if (waiting.empty() && s.done_count == s.plan().chunks.size()) {
    std::map<std::uint32_t, std::vector<std::uint32_t>> by_producer;
    for (const auto& [producer, group] : s.unconfirmed) by_producer[producer].push_back(group);
    for (const auto& [producer, groups] : by_producer) {
      waiting += fmt::format("; {} to confirm the signals of {}", trainer_name(producer),
                             count_noun("group", groups));
    }
  }
  if (waiting.empty()) return;
  s.set_error(stalled(fmt::format("{}: sync {} made no progress for {:.3g} s, waiting for{}",
                                  worker_name(s.consumer), s.sync_id,
                                  static_cast<double>(now_ns - s.last_progress_ns) / 1e9, waiting.substr(1))),
              true, out);
}

void ConsumerMachine::shutdown(ConsumerActions& out) {
  State& s = *state_;
  if (s.shut) return;
  s.shut = true;
  if (s.state == WorkerState::kUpdating || s.state == WorkerState::kPrepared)
    s.set_error(shutting_down(), true, out);
}

WorkerState ConsumerMachine::state() const {
  return state_->state;
}
std::uint64_t ConsumerMachine::sync_id() const {
  return state_->sync_id;
}
bool ConsumerMachine::in_flight() const {
  return state_->in_flight();
}
const std::vector<ModuleState>& ConsumerMachine::modules() const {
  return state_->modules;
}
const DropCounters& ConsumerMachine::drops() const {
  return state_->drops;
}
std::uint32_t ConsumerMachine::rerouted() const {
  return state_->rerouted;
}

Result<std::uint64_t> ConsumerMachine::version() const {
  const State& s = *state_;
  std::string others;
  std::size_t count = 0;
  for (const std::uint32_t module : s.whole->fed) {
    const ModuleState& m = s.modules[module];
    if (m.kind == ModuleState::Kind::kCurrent || (s.committed && m.kind == ModuleState::Kind::kUnset))
      continue;
    if (++count <= 8)
      others += fmt::format("{}module {} is {}", others.empty() ? "" : ", ", module, to_string(m));
  }
  if (count == 0 && s.committed) return *s.committed;
  return wrong_state(count == 0
                         ? fmt::format("{} holds no version yet", worker_name(s.consumer))
                         : fmt::format("{} holds no single version: {}{}", worker_name(s.consumer), others,
                                       count > 8 ? fmt::format(", ... ({} in all)", count) : ""));
}

}  // namespace shardpull
