// simulate(): a whole fleet in one thread. The production machines of P trainers and C workers run real plans
// over a simulated network, clock and memory; position-coded bytes travel, and every rule is checked as it
// goes.
//
// Checked: slots are never written while they are read, freed memory (overwritten at once) is never read,
// every worker ends with the exact bytes of the version that each of its modules claims, the workers of a
// replica that live have committed the same syncs, every signal arrives exactly once, residency keeps its
// bound where there is one, every sync ends in bounded time, modules of which a sync moves nothing keep their
// state and bytes. A sync in which a step is made to fail fails on
// every rank with that error, no worker holds its version (unless commits were under way), and the last one,
// of all names, is exact again. A sync of half a module is refused before a byte has moved.
//
// With faults, processes die and come back, also between syncs, links fall silent, are held up or break,
// members are slow, and messages that may arrive twice do (sim/faults.h). A sync that loses workers is exact
// for the replicas that lost none; one that may fail and does names what was lost; when the faults have
// stopped, the next sync has everybody who is there again, and is exact.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace shardpull::sim {

enum class Holdings : std::uint8_t {
  kEverybody,  // every rank holds everything
  kStages,     // pipeline stages: a layer belongs to one rank
  kRandom,     // every name has its own random set of owners
  kRows,       // each rank holds its rows of every matrix, as pieces
  kBoxes,      // boxes of every tensor along any dim; some overlap, some are held by several ranks
};
inline constexpr std::uint32_t kHoldings = 5;
std::string_view to_string(Holdings holdings);

struct SimOptions {
  std::uint32_t trainers = 2;
  std::uint32_t tp = 2, pp = 1, replicas = 1;  // C = tp * pp * replicas
  std::uint32_t ring_depth = 2;
  std::uint32_t lookahead = 1;
  std::uint32_t layers = 3;
  std::uint32_t syncs = 3;
  Holdings holdings = Holdings::kEverybody;
  PathPolicy path = PathPolicy::kAuto;  // auto, direct: only some ranks' large tensors can be read in place,
                                        // so that lanes carry both
  std::uint64_t max_chunk_bytes = 512;
  std::uint32_t chunk_split = 1, pull_split = 1;
  bool tied = false;        // the head is the embedding: one name feeds two modules
  bool share_slots = true;  // replicas meet at the serve slots
  bool degraded = false;    // every second sync leaves the last replica out
  bool failures = false;    // something fails in about every second sync but the last; with `partial`, some
                            // ask for half of a module
  bool partial = false;     // about every second sync but the last moves some names only
  bool resident = false;    // about every second rank publishes in place, without credit
  TransportKind transport = TransportKind::kShm;  // what the tables say; mapped paths need kShm
  Integrity integrity = Integrity::kOff;
  bool corruption = false;    // a bit is flipped in about every second sync but the last
  bool faults = false;        // in most syncs but the last, see sim/faults.h
  bool fail_on_loss = false;  // on_consumer_loss=fail

  // Settings drawn from a seed, K of 1, 2, 4, lookahead of 0, 1, 3 and all paths among them.
  static SimOptions draw(std::uint64_t seed);
  // The same, with everything that can go wrong.
  static SimOptions draw_with_faults(std::uint64_t seed);
};
// One line, for the message of a failed seed.
std::string to_string(const SimOptions& options);

struct SimReport {
  std::uint64_t trace_hash = 0;  // the same for the same seed and options
  std::uint32_t syncs_completed = 0;
  std::uint32_t syncs_failed = 0;   // as they were made to, everywhere, and nothing else
  std::uint32_t syncs_refused = 0;  // of those: half a module
  std::uint32_t syncs_partial = 0;  // of some names, completed or not
  std::uint64_t events = 0;
  std::int64_t simulated_ns = 0;
  std::uint32_t syncs_corrupt = 0;  // of those that failed: a bit was flipped
  std::uint64_t packs = 0, pulls = 0, mapped_chunks = 0, direct_chunks = 0;
  std::uint64_t summed_keys = 0;    // compared by workers
  std::uint64_t kept_early = 0;     // messages that came before their sync had begun on a rank
  std::uint32_t peak_resident = 0;  // groups on one trainer with credit
  std::uint32_t peak_in_place = 0;  // groups on one resident trainer
  std::uint32_t faults = 0;         // that struck
  std::uint32_t syncs_lossy = 0;    // completed without workers that were lost in them
  std::uint32_t rejoined = 0;       // workers that came back
  std::uint32_t ranks_returned = 0;
  std::uint32_t syncs_without_a_rank = 0;  // completed, others stood in for it
  std::uint32_t syncs_lost_between = 0;    // failed for who was lost before them, as that was asked for
  std::uint64_t repeated = 0;       // messages sent twice
  std::uint64_t stale_lives = 0;    // messages that reached a trainer when their worker had another life
  std::uint64_t mates_asked = 0;    // questions of workers that had lost the sender, and of those they asked
  std::uint32_t mates_committed = 0;  // commits that a mate's word led to
  std::int64_t longest_sync_ns = 0;
  std::vector<std::string> violations;  // empty: every rule held
  std::vector<std::string> struck;      // the faults, "crash of worker 3 after 120 steps of sync 2"
  std::string trace;                    // where it was asked for
};

// Runs `options.syncs` syncs, fewer when the fleet ends before. Deterministic. `trace`: keep one line a step.
SimReport simulate(std::uint64_t seed, const SimOptions& options, bool trace = false);

}  // namespace shardpull::sim
