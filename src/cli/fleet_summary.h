// What a planned fleet moves and needs, in figures: `plan --summary` and the lists of `plan --json`.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/fleet_plan.h"

namespace shardpull::cli {

// Of one trainer rank, per sync, all replicas together.
struct TrainerFigures {
  std::uint64_t held_bytes = 0;    // of what it publishes
  std::uint64_t served_bytes = 0;  // of keys, what the workers take
  std::uint64_t pulls = 0;
  std::uint64_t packs = 0;  // packed pulls; the workers of all replicas share one
  std::uint64_t serve_ring_bytes = 0;
  std::uint64_t export_buffer_bytes = 0;  // 0 when it publishes in place
  std::uint32_t groups = 0;
};

// Of one worker.
struct WorkerFigures {
  std::uint64_t bytes_kept = 0, bytes_planned = 0;
  std::uint64_t chunks = 0, mapped_chunks = 0, direct_chunks = 0, keys = 0, pulls = 0;
  std::uint64_t largest_chunk_bytes = 0;
  std::uint64_t receive_ring_bytes = 0;
  std::uint64_t groups_not_taken = 0, dead_names = 0, conversions = 0;
};

struct FleetFigures {
  std::vector<TrainerFigures> trainers;  // by rank
  std::vector<WorkerFigures> workers;    // by worker of a replica; all replicas are alike
  // The trainer and the worker between which most bytes move.
  std::uint32_t hottest_trainer = 0, hottest_worker = 0;
  std::uint64_t hottest_bytes = 0;
  // Why chunks of a replica are packed although mapping is not ruled out: reasons and counts.
  std::map<std::string, std::uint64_t> packed_because;
};

// `lookahead` sizes the export buffers: each rank has min(lookahead + 1, its groups) of them, of the tensors
// up to export_pack_limit of its largest group.
FleetFigures figures_of(const FleetPlan& fleet, std::uint32_t lookahead);

// What is known of the network, per process and direction.
struct LinkSpeeds {
  std::uint64_t trainer_bytes_per_s = 0, worker_bytes_per_s = 0;  // both > 0
  std::int64_t pull_latency_ns = 0;                               // from a pull to its first byte
};

// How long a sync takes when nothing but links and latency counts: gathering, copies and hooks overlap.
//   trainers  the busiest one sends all it serves
//   workers   the slowest one receives all it takes, or waits for its pulls, of which ring_depth are under
//   way fill      the first ring_depth chunks, the largest there are, before everything overlaps
struct Prediction {
  std::int64_t trainers_ns = 0, workers_ns = 0, fill_ns = 0;
  std::uint32_t slowest_trainer = 0, slowest_worker = 0;
  std::int64_t total_ns() const { return (trainers_ns > workers_ns ? trainers_ns : workers_ns) + fill_ns; }
};
Prediction predict(const FleetPlan& fleet, const FleetFigures& figures, const LinkSpeeds& links);

// Minimum, median and maximum of every figure, with who has the extremes. `publish`: why the ranks publish as
// they do.
std::string to_text(const FleetPlan& fleet, const FleetFigures& figures, const std::string& publish,
                    const std::optional<LinkSpeeds>& links);

// Adds `producers` (by rank), `hottest_pair` and, with links, `prediction` to `out`.
void add_json(const FleetPlan& fleet, const FleetFigures& figures, const std::optional<LinkSpeeds>& links,
              nlohmann::ordered_json& out);

}  // namespace shardpull::cli
