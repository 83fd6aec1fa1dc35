// Trainer: one training process's side of the engine. Rank 0 is the sender: besides its own producer it
// drives the sync.
//
//   auto trainer = Trainer::create(options);              // transport is up, memory can be allocated
//   (*trainer)->init(source);                             // collective: returns when every rank and worker
//   is ready
//   (*trainer)->send_weights(version);                    // collective: returns when every worker has
//   committed
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardpull/api.h"
#include "shardpull/fleet.h"
#include "shardpull/memory.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// What a lost worker leads to: the sync goes on without its replica, or fails everywhere. With kFail the loss
// of a worker or rank between two syncs fails the next one, unless it is back; a later send_weights waits for
// it.
enum class OnConsumerLoss : std::uint8_t { kContinue, kFail };

// How a rank publishes: what its source declares (WeightSource::resident), or one of the two for all.
// kResident is refused when the source does not keep its tensors in place.
enum class PublishMode : std::uint8_t { kAuto, kGather, kResident };

// How a rank takes part. All but `rank`, `publish`, `trace_file` and what of `fleet` is this process's own
// must be the same on all ranks; a rank that was given others is refused at init.
struct TrainerOptions {
  FleetOptions fleet;                     // where the fleet meets
  std::uint32_t rank = 0;                 // 0..world_size-1; 0 is the sender
  std::uint32_t world_size = 1;           // trainer ranks
  std::uint32_t num_consumers = 1;        // C, over all replicas
  std::uint32_t num_replicas = 1;         // C must divide by it
  std::uint32_t workers_per_replica = 0;  // 0 = C / num_replicas
  std::uint32_t ring_depth = 2;           // K >= 1
  std::uint32_t lookahead = 1;            // >= 0: groups held beyond the one being pulled
  std::uint64_t presize_bytes = 0;        // floor for a slot's bytes
  std::uint64_t export_pack_limit_bytes = 64ull
                                          << 20;  // storages up to this size are packed into export buffers
  OnConsumerLoss on_consumer_loss = OnConsumerLoss::kContinue;  // what a lost worker leads to
  PublishMode publish = PublishMode::kAuto;                     // how this rank publishes
  // kFull also sums every view the source yields, and again when its group is released: a source that writes
  // what it has yielded fails the sync.
  Integrity integrity = Integrity::kWire;
  std::string settings = {};  // as FleetOptions::settings, of the ranks alone
  // A file to write the timelines of all syncs to, in Trace Event JSON (Perfetto, chrome://tracing); empty:
  // none. Created, or emptied, by Trainer::create, which refuses what it cannot write. The sender's holds the
  // whole fleet, another rank's its own part. Complete after each send_weights.
  std::string trace_file = {};
};

// Of one sync; the same on every rank.
struct SendOptions {
  // Glob patterns (*, ? and [...]; * also matches dots) of the checkpoint names to send, such as
  // "model.layers.0.*". Empty: all names. Groups without a matching name are skipped on both sides, and the
  // modules they feed keep their version. Refused: a pattern that matches nothing; a module that is fed by a
  // matching and another name, naming both.
  std::vector<std::string> names;
};

// What the sender has opened; see Trainer::next_sync.
struct NextSync {
  std::uint64_t version = 0;         // that this rank is to send
  std::vector<std::uint32_t> names;  // by metadata index, ascending; empty: all
};

// Thread-compatible; send_weights blocks the calling thread, everything else runs on the engine's own
// threads.
class SHARDPULL_API Trainer {
 public:
  // Starts the transport. On the sender also the hub. Refused: bad options (each named with its value and
  // range).
  static Result<std::unique_ptr<Trainer>> create(const TrainerOptions& options);
  ~Trainer();  // shutdown()
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Memory that peers can reach: weights that live in it from the start are served without a copy.
  // Thread-safe. After create(), which waits for nobody. RESOURCE_EXHAUSTED names `what`, the size and what is
  // available.
  Result<EngineMemory> allocate(std::uint64_t bytes, const std::string& what = "weights");

  // Forms groups, resolves ownership over all ranks (one collective), starts the producer; on the sender,
  // waits until every consumer has baked, planned and reserved. `source` must outlive the trainer. Errors
  // name the rank, name or worker.
  //
  // Of a rank (not the sender) that was lost from a fleet that goes on, started again: it joins that one, and
  // is in the next sync that the sender opens. Refused, naming both, when its settings, its metadata or what
  // it holds are not those of its first life.
  Status init(WeightSource& source);
  // Whether init() has joined a fleet that ran already: the program is to follow its sender, by next_sync().
  bool returned() const;

  // The same payload init made, rebuilt at any time without a collective, so that a restarted worker can join
  // at a sync boundary. Error before init.
  Result<std::vector<std::byte>> worker_init_payload() const;

  // One sync. On every rank with the same version. Returns when every live worker has committed, or with the
  // first error (after which the next call may succeed: nothing of a failed sync lingers). The sender assigns
  // the sync id. It first waits, connect_timeout_ms at most, for a whole replica, and for lost ranks that
  // held what nobody else does, to be there again.
  Result<SyncReport> send_weights(std::uint64_t version, const SendOptions& send = {});

  // Not on the sender: waits for the sync that it opens next, which this rank's next send_weights is to be
  // of. The source may be brought to that version meanwhile; the others wait. Called once before each
  // send_weights, or not at all. The end of the fleet is an error: Reason::kShutdown after one in good order.
  Result<NextSync> next_sync();

  // Sends to "worker N" or "trainer N". To a sender that has ended the fleet: the error says why it has.
  Status send_message(const std::string& to, const std::string& topic, const std::string& body);
  // The next message, waiting at most `timeout_ms`; nothing on timeout. An error once for each member
  // that is lost, and when the fleet has ended. Of messages that nobody receives the newest 262,144 are kept,
  // or 256 MiB of them; where older ones were dropped, Reason::kLimit says once how many.
  Result<std::optional<FleetMessage>> receive_message(std::uint64_t timeout_ms);

  // Most bytes of anonymous and own shared memory the engine itself holds (rings, export buffers).
  std::uint64_t engine_bytes() const;

  // Sender: tells every process that the fleet ends: in good order, or, when the last sync failed, with its
  // error. Everybody: wakes waiters, joins threads, frees. Idempotent.
  void shutdown(const std::string& reason = "the trainer has finished");
  // The same for a program that has failed (OK: it has not): Worker::serve, and what other ranks wait in,
  // return an error that says `why`.
  void shutdown(const Status& why);

 private:
  struct SHARDPULL_HIDDEN Impl;
  explicit Trainer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardpull
