// Control messages: everything cold. Plain structs; proto/shardpull/v1/control.proto is their wire form.
//
// The control channel is a star: every process has one link to the sender's hub, which routes
// (docs/PROTOCOL.md, "Control").
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/identity.h"
#include "shardpull/fleet.h"
#include "shardpull/status.h"

namespace shardpull {

// trainer R -> sender: this rank exists, its producer listens. Part of the collective of trainer_init.
struct TrainerJoin {
  std::uint32_t world_size = 0;
  std::vector<std::byte> holding;  // plan: encoded Holding
  std::string producer_address;    // hot channel
  std::vector<std::byte>
      settings;  // canonical bytes of the settings all ranks must share (K, lookahead, C, ...)
};
// sender -> every trainer: the collective's result, or why there is none.
struct TrainerTable {
  Status status;
  std::vector<std::byte> tables;  // plan: encoded InitTables
  bool returned = false;          // the rank has joined a fleet that runs
};
// sender -> every worker: a rank that was lost has joined again, and serves from the next sync on.
struct TrainerReturned {
  std::uint32_t rank = 0;
  Incarnation incarnation = 0;
  std::string producer_address;     // hot channel
  std::uint64_t without_until = 0;  // the last sync that has begun without it; 0: none
};

// worker -> sender: asks for the init payload (at any time: a restarted worker asks again).
struct InitRequest {
  std::uint32_t ring_depth = 0;  // 0 = take the fleet's; another K than the fleet's is refused
  std::string settings;          // FleetOptions::settings; another one is refused
};
struct InitPayload {
  Status status;
  std::vector<std::byte> tables;
  std::vector<Incarnation> trainers;  // by rank: its life; 0: it is lost
};
// worker -> a mate (another worker of its replica) that has come up: where it listens for mates.
struct MateListens {
  std::string address;  // hot channel
};
// worker -> sender: baked, planned and registered, or why not.
struct InitDone {
  Status status;
  std::uint64_t bytes_kept = 0, bytes_planned = 0;
};

// worker -> trainer R, before any pull of the lane: at init for the regular one, for a recovery lane when another
// trainer is gone.
struct Reserve {
  std::uint64_t slot_bytes = 0;
  std::uint32_t ring_depth = 0, num_consumers = 0, workers_per_replica = 0;
  std::uint64_t digest_low = 0, digest_high = 0;
  std::vector<std::byte> pulls;  // plan: encoded PullDescriptions
};
struct ReserveReply {
  Status status;
  std::uint32_t lane_kind = 0;  // of the pulls: 0 regular, 1 recovery
};

// sender -> every trainer: opens a sync.
struct SyncOpen {
  std::uint64_t sync_id = 0, version = 0;
  std::vector<std::uint32_t> live_consumers;  // ascending
  std::vector<std::uint8_t> names;            // bitmask over metadata order; empty = all
  bool trace = false;                         // TimelineReport is wanted
};
// trainer R -> sender: its producer has begun the sync.
struct SyncBegan {
  std::uint64_t sync_id = 0;
};
// sender -> every live worker.
struct StartUpdate {
  std::uint64_t sync_id = 0, version = 0;
  std::vector<std::uint8_t> names;
  bool trace = false;  // TimelineReport is wanted
};
struct UpdateStarted {
  std::uint64_t sync_id = 0;
  Status status;
};
struct Update {
  std::uint64_t sync_id = 0;
};
// worker -> sender: the result of update: every chunk landed, checked, signals confirmed; or the error.
struct Prepared {
  std::uint64_t sync_id = 0;
  Status status;
  std::uint64_t bytes_moved = 0;
  std::uint64_t update_ns = 0;   // duration of the update on the worker's clock
  std::uint64_t copy_ns = 0;     // time in which its bytes moved
  std::uint64_t bytes_kept = 0;  // by what this sync runs of its plan
  std::uint64_t padding_bytes = 0;
  std::uint32_t rerouted = 0;  // pulls that another trainer than the plan's served
  std::uint32_t fallback_names = 0;  // loaded by the model's own loaders
};
// sender -> worker: commit.
struct Finish {
  std::uint64_t sync_id = 0;
};
struct Finished {
  std::uint64_t sync_id = 0;
  Status status;
  std::uint64_t commit_ns = 0;         // duration of the commit
  std::vector<PhaseTime> phases = {};  // of update and commit
  std::uint32_t waited_for = 0;        // as WorkerReport
  std::uint64_t waited_ns = 0;
};
// worker -> trainer R: free signals for producers it has no hot endpoint to.
struct FreeGroups {
  std::uint64_t sync_id = 0;
  std::vector<std::uint32_t> groups;
};
struct FreeAck {
  std::uint64_t sync_id = 0;
  std::vector<std::uint32_t> groups;
};
// worker -> trainer R, where its connection broke: it reads nothing there any more and pulls nothing more in
// this sync. Sharers of its slots do not wait for it.
struct LeaveLanes {
  std::uint64_t sync_id = 0;
};
// trainer R -> sender: this rank's end_sync returned, or why it failed.
struct RankEnded {
  std::uint64_t sync_id = 0;
  Status status;
  std::uint64_t export_ns = 0;  // time spent copying into export buffers
  std::uint64_t export_bytes = 0;
  std::uint64_t peak_resident_bytes = 0;
  std::uint64_t packs = 0, packed_bytes = 0;  // pulls packed into serve slots
  std::uint64_t wall_ns = 0;                  // as RankReport
  std::vector<PhaseTime> phases = {};
};
// sender -> trainer R: everybody committed; send_weights may return.
struct SyncClosed {
  std::uint64_t sync_id = 0;
  Status status;
};
// anybody -> sender -> everybody.
struct SyncFailed {
  std::uint64_t sync_id = 0;
  Status status;
};
// sender -> everybody: the fleet ends in good order, or because of an error.
struct Shutdown {
  std::string reason;
  Status status;
};
// anybody -> sender, where the sync's opening asked for it: what happened when, once the sync is over there.
struct TimelineReport {
  std::uint64_t sync_id = 0;
  std::vector<std::byte> timeline;  // observe: encoded Timeline
};
// worker -> sender or back: free for the program on top (the CLI's verify results and barriers). At most 1
// MiB.
struct UserMessage {
  std::string topic;
  std::string body;
};

using ControlBody =
    std::variant<TrainerJoin, TrainerTable, InitRequest, InitPayload, InitDone, Reserve, ReserveReply,
                 SyncOpen, StartUpdate, UpdateStarted, Update, Prepared, Finish, Finished, FreeGroups,
                 FreeAck, RankEnded, SyncClosed, SyncFailed, Shutdown, UserMessage, SyncBegan, TimelineReport,
                 MateListens, LeaveLanes, TrainerReturned>;
std::string_view name_of(const ControlBody& body);  // "Reserve"

}  // namespace shardpull
