// ConsumerEngine: binds one ConsumerMachine to a transport, memory and threads.
// docs/ARCHITECTURE.md, "A sync".
//
// Confined to the progress thread once bound, except prepare(), which the caller's thread runs before.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/identity.h"
#include "observe/consumer_log.h"
#include "plan/plan.h"
#include "protocol/consumer_machine.h"
#include "protocol/returning_producers.h"
#include "runtime/arrival.h"
#include "runtime/landing_memory.h"
#include "runtime/progress_thread.h"
#include "runtime/stage.h"
#include "shardpull/bake.h"
#include "shardpull/model.h"
#include "shardpull/worker.h"
#include "tensor/copy.h"
#include "transport/transport.h"

namespace shardpull {

// What the engine needs from whoever owns it.
struct ConsumerHooks {
  // Free signals for a producer without a hot endpoint.
  std::function<void(std::uint32_t producer, std::uint64_t sync_id, const std::vector<std::uint32_t>& groups)>
      signal_by_control;
  // This worker reads nothing there any more, and pulls nothing more in this sync.
  std::function<void(std::uint32_t producer, std::uint64_t sync_id)> leave_lanes;
  // Announces what this worker may have to pull there instead of at a trainer that is gone; the answer goes to
  // recovery_reserved().
  std::function<void(std::uint32_t producer)> announce_recovery;
  // Announces what this worker pulls there by plan, at a trainer that is back; the answer goes to reserved().
  std::function<void(std::uint32_t producer)> announce = [](std::uint32_t) {};
  // The parameters are about to be written: as a sync begins, or, staged, as its commit does.
  std::function<void()> writing = [] {};
  // update() and finish_update() are over.
  std::function<void(std::uint64_t sync_id, const Status& status)> update_done;
  std::function<void(std::uint64_t sync_id, const Status& status)> finish_done;
  std::function<void(std::uint64_t sync_id, const Status& status)> report_failure;
};

class ConsumerEngine {
 public:
  // `recording` is the plan's: the modules of `model`, then those of `fallbacks` (runtime/fallback_model.h), if
  // there are any.
  ConsumerEngine(ProgressThread& progress, Model& model, const Recording& recording,
                 std::shared_ptr<const InitTables> tables, std::shared_ptr<const WorkerPlan> plan,
                 FleetToken token, Incarnation incarnation, std::int64_t stall_timeout_ns,
                 std::int64_t loss_grace_ns, ConsumerHooks hooks, Model* fallbacks = nullptr,
                 Apply apply = Apply::kInplace);
  ~ConsumerEngine();  // stop() has been called, and the progress thread has stopped

  // Compiles every copy of the plan, allocates the receive ring and, staged, the stage. On the caller's thread.
  Status prepare();
  // Where a producer listens, when that is not what the tables say. Before connect().
  void producer_at(std::uint32_t rank, std::string address) { addresses_[rank] = std::move(address); }
  // Opens a hot endpoint to every producer of the plan that is not lost and says hello. Done when connected() is
  // true. Where nobody listens, that is connect_error()'s.
  Status connect(std::int64_t timeout_ns);
  bool connected() const;
  // That of a connection which broke or could not be made, while its producer is not known to be lost.
  Status connect_error() const { return returning_.any_unreachable() ? connect_error_ : Status(); }

  // `plan`: what this sync runs (restrict_plan of the whole plan), null for all of it. Its copies are
  // compiled here, and kept until a sync runs another one. Connections that broke are opened again first, and
  // producers that have returned serve as planned from here on, or, where they could not be reserved at, are
  // stood in for still.
  Status start_update(std::uint64_t sync_id, std::uint64_t version, std::shared_ptr<const WorkerPlan> plan);
  Status update();
  Status finish_update(std::uint64_t sync_id);
  void fail(std::uint64_t sync_id, const Status& why);
  void producer_lost(std::uint32_t rank, const Status& why);
  // A lost producer has a successor, which is in the syncs after `without_until`. Connects to it and
  // announces this worker's pulls there, beside a sync that runs; `limit_ns`: for how long both may take
  // together.
  void producer_returned(std::uint32_t rank, std::string address, std::uint64_t without_until,
                         std::int64_t limit_ns);
  // The answer to hooks.announce. False: nothing was announced there.
  bool reserved(std::uint32_t rank, const Status& status);
  // Whether all that have returned are connected and reserved at, or have failed to be: a sync is to be
  // started then. Those that failed for an earlier sync are tried once more.
  bool ready_for(std::uint64_t sync_id);
  void recovery_reserved(std::uint32_t rank, const Status& status);
  void signals_acked(std::uint32_t producer, std::uint64_t sync_id, const std::vector<std::uint32_t>& groups);
  void tick();

  // From the transport. False when the endpoint is not one of this engine's.
  bool on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload);
  bool on_closed(EndpointId endpoint, const Status& why);
  void on_read_done(ReadToken token, const Status& status);

  // Fails a running update and refuses later ones.
  void shutdown();

  // Finishes the copies under way and joins their threads. From the caller's thread.
  void stop();

  const ConsumerMachine& machine() const { return machine_; }
  // Receive slots, the window that mapped keys are summed in, and the stage.
  std::uint64_t landing_bytes() const {
    return receive_ring_.size() + sum_window_.size() + (stage_ ? stage_->bytes() : 0);
  }
  // Of the running or last sync.
  std::uint64_t bytes_moved() const { return bytes_moved_; }
  std::uint64_t update_ns() const { return update_ns_; }
  std::uint64_t copy_ns() const { return copy_ns_; }
  const ConsumerLog& log() const { return log_; }

 private:
  struct Endpoint {
    std::uint32_t producer = 0;
    bool greeted = false;
    bool waits = false;  // to a producer that has returned: for the next sync
  };
  // One copy of a chunk, ready to run: `program` reads from the key's packed bytes, or from the piece's first
  // element (direct; mapped without sums).
  struct PreparedCopy {
    std::uint32_t key = 0;
    std::uint32_t entry = 0;  // mapped, direct: index into the run's ReadyInfo::entries
    std::uint16_t run = 0;
    std::uint32_t parameter = 0;
    CopyProgram program;
    // Mapped or direct, of a source that lies with strides of its own: compiled when it is met. The copy
    // thread's, for direct the progress thread's.
    std::vector<std::int64_t> stride;
    CopyProgram strided;
  };
  // One tensor (or piece) that a chunk reads, as its producer published it.
  struct PublishedSource {
    RemoteRef where;
    std::vector<std::int64_t> stride;  // empty: contiguous
    Transport::Mapping mapping;        // mapped only
  };
  struct PreparedFill {
    std::uint32_t parameter = 0;
    CopyProgram program;  // of a contiguous source: only its destination side is used
  };
  struct PreparedChunk {
    const Chunk* chunk = nullptr;  // null: the plan leaves it out
    std::vector<PreparedCopy> copies;
    std::vector<PreparedCopy> gathers;  // mapped and summed: by key, out of the mapping into the window
    std::vector<PreparedFill> fills;
    std::vector<Module*> post_process;  // only modules with a hook
    std::uint64_t key_bytes = 0;
  };
  // A plan whose copies are compiled.
  struct PreparedPlan {
    std::shared_ptr<const WorkerPlan> plan;
    std::vector<PreparedChunk> chunks;  // by Chunk::chunk_id
    std::vector<std::uint32_t> modules;  // that it writes, ascending
  };
  // Where a copy's bytes are summed as they arrive.
  struct SumOnArrival {
    std::shared_ptr<Arrival> arrival;  // none: nowhere
    std::size_t key = 0;               // of the arrival's
  };
  // The reads of a direct chunk, or of a packed one that is scattered on arrival, one per run.
  struct DirectReads {
    std::uint64_t sync_id = 0;
    std::uint32_t chunk = 0;
    std::size_t left = 0;
    Status status;  // the first error
    std::int64_t started_ns = 0;
    std::vector<std::uint32_t> producers;  // by run
    std::vector<std::uint64_t> sums;       // by key, or empty
    std::shared_ptr<PreparedPlan> plan;
    std::vector<SumOnArrival> on_arrival;  // by copy; empty: nothing is summed as it arrives
  };
  struct Transfer {
    std::uint64_t sync_id = 0;
    std::uint32_t chunk = 0;
    std::uint16_t run = 0;
    std::int64_t started_ns = 0;
    std::uint32_t producer = 0;
    std::uint64_t bytes = 0;
  };

  Result<std::shared_ptr<PreparedPlan>> prepare_plan(std::shared_ptr<const WorkerPlan> plan);
  Status prepare_chunk(const Chunk& chunk, PreparedChunk& prepared);
  // `packed`: out of the key's packed bytes, else out of the piece.
  Result<PreparedCopy> prepare_copy(
      const Chunk& chunk, const PlannedScatter& scatter, bool packed,
      const std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>>& entries);
  // What the producers of a chunk's runs said of its sources, checked against the plan; by run and entry.
  Result<std::vector<std::vector<PublishedSource>>> published_sources(const consumer_action::StartCopy& action,
                                                                      const Chunk& chunk);
  // The program of one copy out of `source`: the prepared one, or one for its strides, which is kept.
  Result<const CopyProgram*> program_for(PreparedCopy& copy, const PublishedSource& source, const Chunk& chunk,
                                         const PlannedScatter& scatter) const;
  // `producers`: by run; `sums`: by key, or empty.
  void copy_mapped(std::uint32_t chunk_id, std::vector<std::vector<PublishedSource>> sources,
                   std::vector<std::uint32_t> producers, std::vector<std::uint64_t> sums);
  // One copy out of a mapping, by way of the window where there are sums. `held`: the key in the window, -1:
  // none.
  Status copy_one(PreparedChunk& prepared, std::size_t copy,
                  const std::vector<std::vector<PublishedSource>>& sources,
                  const std::vector<std::uint32_t>& producers, const std::vector<std::uint64_t>& sums,
                  std::int64_t& held) const;
  void read_direct(std::uint32_t chunk_id, const std::vector<std::vector<PublishedSource>>& sources,
                   std::vector<std::uint32_t> producers, std::vector<std::uint64_t> sums);
  // Compares the sums of what has landed before the chunk counts as done, on the copy thread where it was not
  // summed as it came.
  void check_direct(const std::shared_ptr<DirectReads>& reads);
  Status check_landed(const DirectReads& reads) const;
  // `producers`: by run, whom the bytes came from.
  Status check_key(const Chunk& chunk, const PreparedCopy& copy, const std::byte* bytes,
                   const std::vector<std::uint32_t>& producers, const std::vector<std::uint64_t>& sums) const;
  // Into `by_run`: what a direct chunk reads, neighbours together. Into `on_arrival`, with `summed` and where
  // the transport can: by copy, where it is summed.
  Status direct_parts(PreparedChunk& prepared, const std::vector<std::vector<PublishedSource>>& sources,
                      bool summed, std::vector<std::vector<ReadPart>>& by_run,
                      std::vector<SumOnArrival>& on_arrival) const;
  // `then` on the progress thread, once the chunk's fills have run: what they zero, the reads overwrite.
  void after_fills(std::uint32_t chunk_id, std::function<void()> then);
  std::shared_ptr<DirectReads> begin_reads(std::uint32_t chunk_id, std::vector<std::uint32_t> producers,
                                           std::vector<std::uint64_t> sums);
  // Calls `read(run, endpoint, token)` for every run that has something to read, `wanted(run)`; the others, and those of
  // a producer without an endpoint, end by themselves.
  template <typename Wanted, typename Read>
  void start_reads(const std::shared_ptr<DirectReads>& reads, Wanted wanted, Read read);
  // Scatters a packed chunk while it arrives. `slots`: by run, the producer's.
  void read_packed(const consumer_action::StartCopy& action, std::vector<std::uint64_t> sums);
  void start_arrivals(std::uint32_t chunk_id, const std::vector<RemoteRef>& slots,
                      std::vector<std::uint32_t> producers, std::vector<std::uint64_t> sums);
  // Whether a producer offers the slot that the plan says.
  Status check_offer(const ReadyInfo& ready, std::uint32_t producer, const Run& run,
                     std::uint32_t chunk_id) const;
  void scatter_done(std::uint64_t sync_id, std::uint32_t chunk_id, const Status& status);
  void perform(ConsumerActions& actions);
  void perform(const consumer_action::SendPull& action);
  void perform(const consumer_action::AnnounceRecovery& action);
  void perform(const consumer_action::StartTransfer& action);
  void perform(const consumer_action::StartScatter& action);
  void perform(const consumer_action::StartCopy& action);
  void perform(const consumer_action::StartPost& action);
  void perform(const consumer_action::StartCommit& action);
  void perform(const consumer_action::SendSignals& action);
  void perform(const consumer_action::LeaveLanes& action);
  void perform(const consumer_action::UpdateDone& action);
  void perform(const consumer_action::FinishDone& action);
  void perform(const consumer_action::ReportFailure& action);
  // Of the running sync's plan; null when that leaves it out.
  const Chunk* chunk_of(std::uint32_t chunk_id) const;
  EndpointId endpoint_of(std::uint32_t producer) const;
  // A message could not be sent there: ends the endpoint as if it had broken. Posted: the machine is in the
  // middle of the event that asked for the message.
  void give_up(EndpointId endpoint, const Status& why);
  // Opens an endpoint and says hello.
  Result<EndpointId> connect_to(std::uint32_t producer, std::int64_t timeout_ns);
  // What it has is pulled from others, until a connection to it is there again.
  void unreachable(std::uint32_t producer, const Status& why);
  template <typename Event>
  void drive_returning(Event event);
  void perform(const returning_action::Meet& action);
  void perform(const returning_action::Part& action);
  void perform(const returning_action::TakeBack& action);
  void perform(const returning_action::StandIn& action);
  void perform(const returning_action::Reconnect& action);
  void perform(const returning_action::Reached& action);
  // Those to the producer which wait for the next sync, or those which do not.
  void close_endpoints(std::uint32_t producer, bool waiting);
  HotHeader header(HotType type, std::uint64_t sync_id) const;
  void run_fills(const PreparedChunk& chunk) const;
  // Where what is sent for a parameter lands, its first element: in the parameter or in the stage.
  std::byte* landing(std::uint32_t parameter) const;
  // An error names the first parameter of the plan's modules whose memory has gone or cannot be written.
  Status check_memory(const PreparedPlan& plan) const;
  // Moves `actions_` through perform() until no event handler appended more.
  template <typename Event>
  void drive(Event event);

  ProgressThread& progress_;
  Model& model_;
  Model* const fallbacks_;
  const Recording& recording_;
  const std::shared_ptr<const InitTables> tables_;
  const std::shared_ptr<const WorkerPlan> plan_;
  const FleetToken token_;
  const Incarnation incarnation_;
  const ConsumerHooks hooks_;
  const bool staged_;
  const std::set<std::uint32_t> on_arrival_;  // packed chunks that take no receive slot
  ConsumerMachine machine_;
  std::vector<Parameter*> parameters_;  // by Recording::parameters index
  std::vector<Module*> modules_;        // by Recording::modules index
  std::shared_ptr<PreparedPlan> whole_,
      part_;                               // of the whole plan, and of the last part of it that a sync ran
  std::shared_ptr<PreparedPlan> running_;  // one of the two
  LandingMemory receive_ring_;
  std::unique_ptr<Stage> stage_;  // null: in place
  LandingMemory sum_window_;  // the copy thread's: one key of a mapped chunk that is summed
  ConsumerLog log_;           // of the running or last sync
  std::map<EndpointId, Endpoint> endpoints_;
  ReturningProducers returning_;
  std::vector<std::string> addresses_;  // hot, by producer
  Status connect_error_;
  std::unordered_map<ReadToken, Transfer> transfers_;
  std::unordered_map<ReadToken, std::shared_ptr<DirectReads>> direct_reads_;
  ReadToken next_token_ = 1;
  std::uint64_t bytes_moved_ = 0, bytes_before_ = 0, copy_ns_ = 0, update_ns_ = 0;
  std::int64_t update_started_ns_ = 0;
  JobThreads copies_;
  JobThreads post_process_;
};

}  // namespace shardpull
