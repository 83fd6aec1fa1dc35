// Named points at which a test stops or kills this process, or holds it and looks. Only in builds with
// SHARDPULL_FAULT_HOOKS, which the presets of tests set; elsewhere a point is nothing, its name included.
//
// The environment variable SHARDPULL_FAULT lists what happens where:
//
//   ACTION@POINT[/SYNC][:N],...      kill@worker.landed/2:3,announce@sender.prepared
//
// SYNC: only in this sync (of its id). N: only the Nth time that the entry's point is reached; else every
// time.
//
//   kill      SIGKILL to the whole process
//   stop      SIGSTOP to the whole process
//   announce  connects to the unix socket SHARDPULL_FAULT_SOCKET, writes "PID POINT SYNC N\n", and holds the
//             thread that reached the point until it is answered by a byte or the connection ends, two
//             minutes at most. Other threads go on: the process shows signs of life.
//
// The points, in the order of a sync. Of a trainer's: sender.joined (a worker's InitDone has arrived),
// sender.lost (a worker or trainer was lost while no sync ran), sender.rejoined (a trainer that was lost is in
// the fleet again), sender.sending (before a sync is opened),
// sender.opened (once per rank, SyncOpen sent), sender.starting (per worker, StartUpdate sent), rank.begun,
// sender.updating (per worker, Update sent), rank.published (per group), rank.packing (per pack), rank.ended,
// sender.prepared (per worker, before its Finish), sender.finishing (per worker, Finish sent), sender.closing
// (per rank, before its SyncClosed). Of a worker's: worker.joining (before it bakes), worker.started,
// worker.pulled (per run), worker.ready (per run), worker.transferring, worker.landed and worker.scattered
// (per chunk; packed: the first two per run), worker.prepared, worker.committing, worker.committed.
#pragma once

#include <cstdint>
#include <string_view>

namespace shardpull {

#ifdef SHARDPULL_FAULT_HOOKS
inline namespace with_fault_hooks {
// Thread-safe. `sync_id` 0: outside of a sync.
void fault_point(std::string_view point, std::uint64_t sync_id);
}  // namespace with_fault_hooks
#else
inline namespace without_fault_hooks {
inline void fault_point(std::string_view, std::uint64_t) {}
}  // namespace without_fault_hooks
#endif

}  // namespace shardpull
