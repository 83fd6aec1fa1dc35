// ProducerServer: binds one ProducerMachine to a transport, serve rings and the copy thread.
// docs/ARCHITECTURE.md, "A sync".
//
// Confined to the progress thread, except where a method says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/identity.h"
#include "observe/rank_log.h"
#include "plan/plan.h"
#include "plan/restrict.h"
#include "protocol/producer_machine.h"
#include "runtime/progress_thread.h"
#include "tensor/copy.h"
#include "transport/transport.h"

namespace shardpull {

struct ProducerHooks {
  std::function<void(std::uint32_t consumer, LaneKind lane, const Status& status)> reserve_reply;
  // Acknowledges signals that came by control, or whose endpoint is gone.
  std::function<void(std::uint32_t consumer, std::uint64_t sync_id, const std::vector<std::uint32_t>& groups)>
      ack_by_control;
  std::function<void(std::uint32_t group)> group_freed;
  std::function<void()> sync_ended;
  std::function<void(std::uint64_t sync_id, const Status& status)> sync_failed;
  // After sync_failed: no pack reads published memory any more.
  std::function<void()> sync_quiet;
};

// One tensor of a group as the trainer hands it to the server: its bytes are final.
struct ServedTensor {
  PublishedView view;
  const std::byte* data = nullptr;  // the view's first element, for packs
};

class ProducerServer {
 public:
  ProducerServer(ProgressThread& progress, std::uint32_t rank, FleetToken token, Incarnation incarnation,
                 ProducerHooks hooks);
  ~ProducerServer();

  // Memory consumers may map: granted to every endpoint, present and future, as long as somebody owns it.
  void add_memory(std::shared_ptr<ExportedMemory> memory);
  // The fleet's tables are known: pulls can be served from now on.
  void start(std::shared_ptr<const InitTables> tables, std::int64_t stall_timeout_ns,
             bool fail_on_consumer_loss);
  const Status& failure() const { return machine_->failure(); }

  void sync_opened(std::uint64_t sync_id, const std::vector<std::uint32_t>& live) {
    if (machine_ != nullptr) machine_->sync_opened(sync_id, live);
  }
  Status begin_sync(std::uint64_t sync_id, std::uint64_t version, const std::vector<std::uint32_t>& live,
                    const std::vector<std::uint32_t>& groups, const NameSet& names);
  Status publish_group(std::uint32_t group, std::vector<ServedTensor> tensors);
  Status end_sync();
  void fail(std::uint64_t sync_id, const Status& why);
  void reserve(std::uint32_t consumer, Incarnation incarnation, std::uint64_t slot_bytes,
               std::uint32_t ring_depth, std::uint32_t num_consumers, std::uint32_t workers_per_replica,
               const Digest128& digest, const std::vector<std::byte>& pulls);
  // Signals that came by control.
  void signal(std::uint32_t consumer, Incarnation incarnation, std::uint64_t sync_id,
              const std::vector<std::uint32_t>& groups);
  void leave_lanes(std::uint32_t consumer, Incarnation incarnation, std::uint64_t sync_id);
  void consumer_up(std::uint32_t consumer, Incarnation incarnation);
  void consumer_lost(std::uint32_t consumer, const Status& why);
  void tick();
  void shutdown();

  // From the transport.
  void on_accepted(EndpointId endpoint);
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload);
  void on_closed(EndpointId endpoint, const Status& why);

  // Finishes the packs under way and joins their thread. From the caller's thread.
  void stop();

  std::uint64_t ring_bytes() const { return ring_bytes_; }
  // Of the window that keys are gathered in to be summed. Thread-safe.
  std::uint64_t window_bytes() const { return window_bytes_; }
  // Of the running or last sync: pulls packed, and their bytes.
  std::uint64_t packs() const { return packs_done_; }
  std::uint64_t packed_bytes() const { return packed_bytes_; }
  // What was served, and when; its owner begins each sync's.
  ServeLog& log() { return log_; }

 private:
  struct Endpoint {
    std::optional<std::uint32_t> consumer;  // after its hello
    Incarnation incarnation = 0;
  };
  struct Ring {
    std::shared_ptr<ExportedMemory> memory;
    std::uint64_t slot_bytes = 0;
  };
  // A pull's gather programs, compiled at its first pack and again when a source lies in another way.
  using Programs = std::shared_ptr<const std::vector<CopyProgram>>;
  struct PreparedPack {
    std::shared_ptr<const PullDescription> pull;
    std::vector<std::vector<std::int64_t>> strides;  // of the sources
    Programs programs;
  };
  // What a pack or a sum reads: by key, the program that gathers it and its tensor's first element.
  struct Gather {
    Programs programs;
    std::vector<const std::byte*> data;
  };

  template <typename Event>
  void drive(Event event);
  void perform(ProducerActions& actions);
  void perform(producer_action::AllocateRing& action);
  void perform(producer_action::ReserveReply& action);
  void perform(producer_action::Pack& action);
  void perform(producer_action::Sum& action);
  void perform(producer_action::ReadyReply& action);
  void perform(producer_action::FailReply& action);
  void perform(producer_action::SignalAck& action);
  void perform(producer_action::GroupFreed& action);
  void perform(producer_action::SyncEnded& action);
  void perform(producer_action::SyncFailed& action);
  void perform(producer_action::SyncQuiet& action);
  std::vector<std::shared_ptr<ExportedMemory>> live_memory();
  // Whether pulls of the consumer are packed into the ring: its sharing group's, or that of its recovery lane.
  bool reads_ring(std::uint32_t consumer, std::uint32_t ring) const;
  // The endpoint of one life of a worker, the latest; 0 when it has none.
  EndpointId endpoint_of(std::uint32_t consumer, Incarnation incarnation) const;
  void reply(HotType type, Incarnation to, const PullId& pull, const std::vector<std::byte>& payload);
  void refuse(EndpointId endpoint, const Status& why);
  Result<Programs> programs_for(const std::shared_ptr<const PullDescription>& pull,
                                const std::vector<PublishedView>& sources) const;
  Result<Gather> gather(const std::shared_ptr<const PullDescription>& pull,
                        const std::vector<PublishedView>& sources);
  // From any thread. `work`: from when to when it was done.
  void pack_done(std::uint64_t ticket, const Status& status, std::vector<std::uint64_t> sums,
                 const Span& work = {});
  Span work_on(const PullDescription& pull, Phase phase, std::int64_t started_ns) const;

  ProgressThread& progress_;
  const std::uint32_t rank_;
  const FleetToken token_;
  const Incarnation incarnation_;
  const ProducerHooks hooks_;
  std::shared_ptr<const InitTables> tables_;
  std::unique_ptr<ProducerMachine> machine_;
  std::vector<std::weak_ptr<ExportedMemory>> memory_;
  std::map<EndpointId, Endpoint> endpoints_;
  std::map<std::uint32_t, Ring> rings_;  // by Lane::sharing_group
  std::map<std::pair<std::uint32_t, std::uint32_t>, const std::byte*>
      data_;  // (name, piece) of published, unfreed groups
  std::map<std::uint32_t, std::vector<std::pair<std::uint32_t, std::uint32_t>>> names_of_group_;
  std::unordered_map<const PullDescription*, PreparedPack> programs_;
  ServeLog log_;
  std::uint64_t ring_bytes_ = 0, packs_done_ = 0, packed_bytes_ = 0, running_sync_ = 0;
  std::vector<std::byte> shuffled_key_;  // the pack thread's: a key that is summed and lies in another order
  std::atomic<std::uint64_t> window_bytes_{0};  // of shuffled_key_
  JobThreads packs_;
};

}  // namespace shardpull
