// What can happen to a fleet in a sync beside steps that fail: processes that die, links that fall silent,
// are held up or break, members that are slow. Drawn from a seed, each to strike after a number of steps, so
// that every phase of a sync is met as often as its steps are many.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "sim/sim_model.h"

namespace shardpull::sim {

enum class FaultKind : std::uint8_t {
  kCrashWorker,
  kSilenceWorker,  // its control link, beyond dead_after: declared dead while it lives and its hot links work
  kDelayWorker,    // its control link, not as long as that
  kCrashRank,      // not the sender
  kSilenceRank,
  kCrashSender,
  kCutHot,   // the connection of a worker and a rank
  kHoldHot,  // all connections of a worker
  kSlowWorker,
  kSlowRank,
};

struct Fault {
  FaultKind kind = FaultKind::kCrashWorker;
  std::uint32_t worker = 0, rank = 0;  // those of the two that the kind is about
  std::uint64_t step = 0;              // of the sync: when
  std::int64_t duration_ns = 0;
};
std::string to_string(const Fault& fault);

// None to three faults of a sync of about `steps` steps. `last`: one that ends the fleet among them, or that
// leaves it without a rank.
std::vector<Fault> draw_faults(Random& random, const SimOptions& options, std::uint64_t steps, bool last);

// What has happened to the processes of a sync, before it or in it.
struct Struck {
  std::set<std::uint32_t> workers;  // dead, or declared dead
  std::set<std::uint32_t> ranks;    // likewise; without the sender
  bool sender = false;
  bool estranged = false;  // one of `ranks` lives, and refuses what it is asked until everybody knows
  std::set<std::pair<std::uint32_t, std::uint32_t>> cut;  // (worker, rank): without a hot connection
  bool step = false;                                      // a step failed, or a bit was flipped
};

// Whether a sync of these workers may fail. A sync may always succeed: that its bytes are exact is checked
// then.
bool may_fail(const SimModel& model, const Struck& struck, const std::vector<std::uint32_t>& live);
// Whether an error names something that was struck.
bool names_struck(const std::string& message, const Struck& struck);

}  // namespace shardpull::sim
