// A whole fleet at its real size under a model of its links: how long one sync takes, which bytes cross which
// link, who says how much to whom, and what memory it needs. Made for fleets of ten thousand workers, of
// which simulate.h's, with a byte for every byte, could hold a hundred.
//
// What is real: the plans, and every machine of the fleet (ConsumerMachine of each worker, ProducerMachine
// and TrainerMachine of each rank, SenderMachine) with every one of its events and actions: each reserve,
// pull, pack, sum, answer, signal, confirmation and message of the sync's opening and end.
//
// What is a model, and everything that takes time:
//
//   links     Each host has one network link, full duplex; between hosts there is no other limit. A read
//             takes a latency to its producer, its bytes at the smaller of its equal shares of the two links
//             (scale_links.h), and a latency for the last byte. Trainers and workers are on different hosts.
//   messages  A hot message takes a latency, whatever its size. A control message takes one to the sender's
//             hub, its turn there, and one to its receiver. The hub does one thing at a time, in the order of
//             arrival: hub_message_ns to receive a message and as much to send it on, neither for what is of
//             or for the sender itself. Messages use no bandwidth.
//   copies    Each rank has one thread that packs and sums, and one that asks the source and fills export
//             buffers; each worker has one that scatters, compares sums and commits. They do one thing after
//             the other, at copy_bytes_per_s and sum_bytes_per_s. What is scattered on arrival takes the
//             worker no time of its own, as that is done while the link delivers it.
//   source    A rank's group is there after its bytes at source_bytes_per_s (0: at once) and its small
//             tensors at copy_bytes_per_s, the copy into an export buffer. Resident ranks have theirs at
//             once.
//
// What is not there: init takes no time (its reserves are made, by the machines). Hooks take none, nor does a
// process to handle a message. Heartbeats, losses, failures, other traffic and the slowness of single hosts
// do not happen. Watchdogs end nothing: how long a rank went without what its own counts as progress is
// reported, to be compared with stall_timeout.
//
// Deterministic: the same fleet and model give the same report.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "shardpull/status.h"

namespace shardpull::sim {

struct ScaleModel {
  std::uint32_t ranks_per_host = 8, workers_per_host = 8;  // > 0
  // Of a host's link, either way; > 0.
  std::uint64_t trainer_host_bytes_per_s = 50'000'000'000, worker_host_bytes_per_s = 50'000'000'000;
  std::int64_t latency_ns = 10'000;  // of anything that crosses the network, one way
  std::uint64_t copy_bytes_per_s = 10'000'000'000, sum_bytes_per_s = 20'000'000'000;  // of one thread; > 0
  std::uint64_t source_bytes_per_s = 0;                                               // 0: it takes no time
  // The gRPC hub took 8 us of processor time for a message from one member to another, on two cores.
  std::int64_t hub_message_ns = 4'000;
};

// A worker of one replica, and all that do the same in the others.
struct ScaleWorker {
  std::shared_ptr<const WorkerPlan> plan;
  std::uint32_t num_modules = 0;                 // ConsumerConfig::num_modules
  std::set<std::uint32_t> scattered_on_arrival;  // likewise
};

struct ScaleFleet {
  std::shared_ptr<const InitTables> tables;  // valid ones
  std::vector<ScaleWorker> workers;          // of a replica, in the order of their ids
  std::uint32_t lookahead = 1;
  bool staged = false;
};

enum class ControlKind : std::uint8_t {
  kSyncOpen,
  kSyncBegan,
  kStartUpdate,
  kUpdateStarted,
  kUpdate,
  kFreeGroups,
  kFreeAck,
  kPrepared,
  kRankEnded,
  kFinish,
  kFinished,
  kSyncClosed,
};
inline constexpr std::size_t kControlKinds = 12;
std::string_view to_string(ControlKind kind);  // the message's name, "SyncOpen"

// One direction of a host's link.
struct LinkUse {
  std::uint64_t bytes = 0;
  std::int64_t busy_ns = 0;  // while any transfer was under way
};

struct RankMemory {
  std::uint64_t serve_rings = 0;
  // What the rank may hold beyond its own weights, rings included: (lookahead + 1) x (its largest group + the
  // small tensors of the group that has most of them) + rings. Of a resident rank the rings alone.
  std::uint64_t promised = 0;
  std::uint64_t reached = 0;  // the most it held at once, counted the same way
  std::uint32_t peak_groups = 0;
};

struct ScaleReport {
  // From the sender's begin: all workers have been told to pull; all are prepared and all ranks have ended;
  // all have committed.
  std::int64_t updates_ns = 0, prepared_ns = 0, sync_ns = 0;
  std::vector<LinkUse> trainer_hosts, worker_hosts;  // what leaves the former and what arrives at the latter
  std::uint64_t bytes_moved = 0;                     // keys; what the plans say
  std::uint64_t padding_bytes = 0;                   // that travels between them in packed slots
  // How long the busiest link takes for its bytes alone: no sync can be faster.
  std::int64_t bound_ns = 0;
  bool bound_by_trainer = true;  // which side's link that is
  std::uint32_t bound_host = 0;

  std::uint64_t pulls = 0, packs = 0, sums = 0, bytes_packed = 0;
  std::uint64_t signals = 0;  // (worker, rank, group), by either way
  std::uint64_t hot_messages = 0;
  std::array<std::uint64_t, kControlKinds> control{};  // messages, by kind
  std::uint64_t hub_in = 0, hub_out = 0;               // of them, over the sender's links
  std::int64_t hub_busy_ns = 0;
  std::uint64_t hub_waiting = 0;                            // most messages that were on their way at once
  std::vector<std::uint32_t> worker_control, rank_control;  // sent and received, by worker and by rank
  std::vector<RankMemory> ranks;
  // The longest that a rank in the sync went without progress, which its watchdog must outlast.
  std::int64_t longest_wait_ns = 0;
  std::uint32_t longest_wait_rank = 0;

  std::uint64_t events = 0;
  std::int64_t init_real_ns = 0, sync_real_ns = 0;  // what it took to make and run the machines
};

// `progress`, which may be empty, is called now and then with the part of the bytes that has arrived and the
// simulated time. Refused: another number of workers than the tables have, a zero in the model that must not
// be one, paths that links do not carry (mapped). What a machine refuses, which none should, is returned as
// it is.
Result<ScaleReport> simulate_scale(const ScaleFleet& fleet, const ScaleModel& model,
                                   const std::function<void(double, std::int64_t)>& progress = {});

}  // namespace shardpull::sim
