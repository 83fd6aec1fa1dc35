// What every process of a fleet shares: where it meets, the token, and the settings all must agree on.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/api.h"
#include "shardpull/status.h"

namespace shardpull {

// What carries the bytes; the same for all processes of a fleet.
enum class TransportKind : std::uint8_t {
  kAuto,  // kTcp with a rendezvous, else kShm
  kShm,   // one host: shared memory
  kCma,   // one host: reads across processes, of any memory
  kTcp,   // between hosts: UCX over TCP
  kUcx,   // between hosts: UCX over the fastest network it finds
};
SHARDPULL_API std::string_view to_string(TransportKind transport);  // "auto", "shm", "cma", "tcp", "ucx"

// Which weight bytes are summed (XXH3-64 of each key, where it leaves the trainer's tensors) and compared before
// they are used; the same for all processes of a fleet.
enum class Integrity : std::uint8_t {
  kOff,
  kWire,  // what crosses a transport other than shared memory
  kFull,  // everything; and that no source writes what it has yielded
};
SHARDPULL_API std::string_view to_string(Integrity integrity);  // "off", "wire", "full"

// How a process joins its fleet. All processes of a fleet give the same rendezvous or directory, and token.
struct FleetOptions {
  // Owner-only (0700), on this host: holds the sockets of what travels within it, and without a rendezvous the
  // sender's hub, `directory`/hub.sock. May be empty where neither is needed: a rendezvous, and kTcp or kUcx.
  std::string directory;
  // Random, not 0, one per fleet. Hand it down by file, environment (token_from_environment()) or descriptor,
  // never on a command line.
  std::uint64_t token = 0;
  std::uint64_t connect_timeout_ms = 60'000;  // how long a process waits for the others to appear
  std::uint64_t stall_timeout_ms = 300'000;   // a running sync without progress for this long fails
  std::uint64_t heartbeat_ms = 500;           // how often processes show each other that they live
  std::uint64_t dead_after_ms = 5'000;        // a process that shows no sign of life for this long is dead
  // What the programs on top were given and must all have been given alike, as text for people: a setting a
  // line, best as "name=value". A process whose text is another is refused as it joins, with what differs.
  std::string settings = {};
  // "HOST:PORT" ("[HOST]:PORT" for IPv6) where the sender listens and the others meet it, from any host. A
  // name is resolved. Empty: the directory.
  std::string rendezvous = {};
  // Lets this process listen where other hosts reach it: neither the token nor the weights are encrypted.
  // Without it anything but loopback is refused. With kTcp and kUcx every process listens, workers too.
  bool insecure_listen = false;
  TransportKind transport = TransportKind::kAuto;  // the same for all processes of a fleet
  // kTcp, kUcx: the network interfaces to use, "eth0" or "eth0,eth1"; empty: the one that leads to the
  // rendezvous.
  std::string interfaces = {};
  std::uint32_t ucx_workers = 1;  // kTcp, kUcx: 1..16, streams to each peer, each with a thread of its own
  // Asked by what blocks (Worker::connect and serve; Trainer::init, send_weights, next_sync and
  // receive_message) while it waits, on the thread that called it, about every 50 ms and without a lock. An
  // error ends the wait and is what the call returns; a trainer's sync under way is failed everywhere first, as
  // by any other error, and the next one may succeed. serve() just returns: a sync under way goes on, and the
  // next serve() brings its result. Looking up a host's name is not interrupted. Empty: never.
  std::function<Status()> interrupt = {};
};

// Reads 16 hexadecimal digits from the environment variable SHARDPULL_TOKEN.
SHARDPULL_API Result<std::uint64_t> token_from_environment();

// What a process does, or waits for, in a sync: in order of priority. An instant in which several are under way is
// charged to the first of them, so that the phases of a process add up to its time: what moves or makes bytes comes
// before what waits, as what hides behind work costs nothing. docs/ARCHITECTURE.md, "Where the time goes".
enum class Phase : std::uint8_t {
  // Of a worker.
  kTransfer,     // bytes cross: reads into slots and parameters, copies out of mappings
  kScatter,      // out of a receive slot into parameters, sums of packed keys included
  kCheck,        // summing what was read into parameters
  kMaterialise,  // zeroing what no tensor fills
  kRegister,     // finding and mapping published memory
  kPostProcess,  // hooks of modules
  kEventWait,    // answered; the receive slot or its turn is not free yet
  kProduceWait,  // asked; the trainer has not answered yet
  kSlotWait,     // next in line; not asked yet
  kSignalWait,   // everything has landed; trainers have not confirmed the signals
  kCommit,       // of finish_update, what is none of the above
  // Of a rank.
  kSource,      // in the weight source
  kExport,      // copying small tensors into export buffers, checking what the source gave
  kPublish,     // telling the producer
  kPack,        // gathering a pull into a serve slot, its sums included
  kSum,         // summing a pull that is read in place
  kCreditWait,  // all groups it may hold are held: workers have not freed one
  kEndWait,     // everything is published: workers have not freed the last ones
  kServe,       // from a worker's pull to the answer; never charged
  // Of both.
  kEngine,  // none of the others
};
SHARDPULL_API std::string_view to_string(Phase phase);  // "transfer", "produce wait"

// One phase of a process in one sync.
struct PhaseTime {
  Phase phase = Phase::kEngine;  // which one
  std::uint64_t charged_ns = 0;  // these add up to the process's time
  std::uint64_t active_ns = 0;   // while it was under way at all, also beside others
  std::uint64_t count = 0;       // how often
  friend bool operator==(const PhaseTime&, const PhaseTime&) = default;
};

// One worker's part of a finished sync.
struct WorkerReport {
  std::uint32_t consumer = 0;     // the worker's id
  std::uint64_t bytes_kept = 0;   // unique source bytes it keeps of this sync's names, in wire dtypes
  std::uint64_t bytes_moved = 0;  // by the transport's counters, headers apart
  std::uint64_t update_ns = 0;    // duration of its update
  std::uint64_t copy_ns = 0;      // of it, time in which bytes moved
  // Of bytes_moved, the gaps of at most 15 bytes between the keys of packed chunks, each of which begins
  // on 16.
  std::uint64_t padding_bytes = 0;
  // Pulls that another trainer than the plan's served, because the plan's was lost or could not be reached.
  std::uint32_t rerouted_pulls = 0;
  std::uint32_t fallback_names = 0;  // names that did not bake: pulled whole and loaded by the model's own loaders
  std::uint64_t commit_ns = 0;  // duration of its finish_update
  // By priority, each at most once. What is charged adds up to update_ns + commit_ns.
  std::vector<PhaseTime> phases = {};
  // The trainer that most of kProduceWait was spent on, and how much; meaningless when waited_ns is 0.
  std::uint32_t waited_for = 0;
  std::uint64_t waited_ns = 0;  // 0: for none
};

// One rank's part of a finished sync.
struct RankReport {
  std::uint32_t rank = 0;          // the trainer's
  std::uint64_t export_ns = 0;     // time spent copying small tensors into export buffers
  std::uint64_t export_bytes = 0;  // that it copied there
  // Most bytes of gathered groups held at once; of a resident rank everything it published.
  std::uint64_t peak_resident_bytes = 0;
  // Pulls packed into serve slots in this sync. Workers of different replicas that take the same share one.
  std::uint64_t packs = 0;
  std::uint64_t packed_bytes = 0;  // of those
  std::uint64_t wall_ns = 0;  // from when it learnt of the sync to when all its groups were freed
  // By priority, each at most once. What is charged adds up to wall_ns.
  std::vector<PhaseTime> phases = {};
};

// A finished sync, as the sender sees it.
struct SyncReport {
  std::uint64_t sync_id = 0;                     // the sender's number, never reused in a fleet's life
  std::uint64_t version = 0;                     // the caller's
  std::uint64_t wall_ns = 0;                     // from the call of send_weights to the last commit
  std::vector<WorkerReport> workers;             // the sender's report only
  std::vector<RankReport> ranks;                 // all ranks on the sender, itself elsewhere
  std::vector<std::uint32_t> lost_consumers;     // whose processes were lost in this sync
  std::vector<std::uint32_t> dropped_consumers;  // their living mates, which left the sync with them
  std::vector<std::uint32_t> lost_ranks;  // trainers that were lost; others served what they would have
};

// One line, without a newline, of a report of the sender: wall time, bytes and rate, the slowest worker with its bytes
// beside its rate and those of the middle one, and the phase that most of its time went to, with the cause where that
// is a rank. Less where the report has no workers.
SHARDPULL_API std::string summary_line(const SyncReport& report);

// Free text between the programs on top of a fleet, delivered in order per pair, at most 1 MiB.
struct FleetMessage {
  std::string from;   // "trainer 0", "worker 3"
  std::string topic;  // for whoever reads it to tell messages apart
  std::string body;   // at most 1 MiB
};

}  // namespace shardpull
