// One simulated inference worker: drives a ConsumerMachine and a CommitMachine over the world's networks and
// its own parameters, and checks the bytes it ends with.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "protocol/commit_machine.h"
#include "protocol/consumer_machine.h"
#include "protocol/returning_producers.h"
#include "sim/sim_model.h"
#include "sim/sim_trainer.h"
#include "sim/world.h"

namespace shardpull::sim {

class SimWorker final : public Process, TransportSink, ControlSink {
 public:
  // `life` counts the processes that were this worker.
  SimWorker(World& world, const SimModel& model, SlotReaders& readers, std::uint32_t consumer,
            std::uint32_t life);

  std::uint32_t consumer() const { return consumer_; }
  Incarnation incarnation() const { return 1000 + 1000 * std::uint64_t{life_} + consumer_; }
  // Joins at a random instant: connects, announces its pulls, tells the sender.
  void start();
  // Whether it cannot take part in a sync any more: the fleet is over for it.
  bool broken() const { return down_ || ended_; }
  // Ends in good order.
  void shutdown();
  // Its process dies, with what it had not sent yet.
  void crash();

  const ConsumerMachine& machine() const { return machine_; }
  // How each sync ended for it, by sync: true where it was told to commit, by the sender or a mate. Without
  // those that were not decided.
  const std::map<std::uint64_t, bool>& decided() const { return decided_; }
  bool crashed() const { return crashed_; }
  std::uint64_t mates_asked() const { return mates_asked_; }
  std::uint32_t mates_committed() const { return mates_committed_; }
  // Of the sync at hand, or the last.
  std::uint64_t sync_version() const { return version_; }
  std::uint64_t pulls() const { return pulls_; }
  std::uint64_t mapped_chunks() const { return mapped_chunks_; }
  std::uint64_t direct_chunks() const { return direct_chunks_; }
  std::uint64_t summed_keys() const { return summed_keys_; }
  // Compares every byte of every parameter of a module that is current or was never loaded, guards included,
  // with the version that it claims.
  void verify();

 private:
  static constexpr std::size_t kGuardBytes = 64;

  void on_accepted(EndpointId endpoint) override;
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override;
  void on_closed(EndpointId endpoint, const Status& why) override;
  void on_read_done(ReadToken token, const Status& status) override;
  void on_control(const Member& from, Incarnation incarnation, ControlBody body) override;
  void on_member_up(const Member& member, Incarnation incarnation) override;
  void on_member_lost(const Member& member, Incarnation incarnation, const Status& why) override;

  template <typename Event>
  void drive(Event event);
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

  template <typename Event>
  void drive_returning(Event event);
  void perform(const returning_action::Meet& action);
  void perform(const returning_action::Part& action);
  void perform(const returning_action::TakeBack& action);
  void perform(const returning_action::StandIn& action);
  void perform(const returning_action::Reconnect& action);
  void perform(const returning_action::Reached& action);

  // The sync's end, with its mates. As runtime/replica_link.h.
  struct Mate {
    Incarnation life = 0;          // 0: not up
    EndpointId endpoint = 0;       // to it; 0: none
  };
  template <typename Event>
  void decide(Event event);
  void perform(const commit_action::AskMate& action);
  void perform(const commit_action::AnswerMate& action);
  void perform(const commit_action::Commit& action);
  void perform(const commit_action::Abort& action);
  void unreachable_mate(std::uint32_t mate);
  HotHeader to_mate(HotType type, std::uint64_t sync_id, std::uint32_t mate, std::uint32_t round) const;
  // False: the endpoint is no mate's.
  bool from_mate(EndpointId endpoint, const HotHeader& header, const std::byte* payload);
  bool mate_closed(EndpointId endpoint);
  bool being_decided() const;

  void join_later();
  void connect_and_reserve();
  Status connect_to(std::uint32_t producer);
  Result<EndpointId> open_endpoint(std::uint32_t producer);
  void give_up(EndpointId endpoint, const Status& why);
  void announce(std::uint32_t producer, std::uint64_t slot_bytes, const std::vector<PullDescription>& pulls);
  void recovery_reserved(std::uint32_t producer, const Status& status);
  EndpointId endpoint_to(std::uint32_t producer) const;  // 0: it is gone
  SlotReader reader() { return {consumer_, incarnation(), machine_.sync_id()}; }
  void join();
  void end();
  void exit_when_quiet();
  void start_deferred();
  void stop();
  void tick();
  // Where chunks land: in the parameters or beside them.
  std::vector<std::vector<std::byte>>& landing() { return stage_.empty() ? parameters_ : stage_; }
  std::byte* data_of(std::uint32_t parameter) { return landing()[parameter].data() + kGuardBytes; }
  void materialise(std::uint32_t chunk);
  // A chunk on its way from where it arrived into its parameters.
  struct Landing {
    std::uint64_t sync_id = 0;
    std::uint32_t chunk = 0;
    std::vector<std::uint32_t> producers;  // by run
    std::vector<ReadyInfo> ready;          // mapped, direct
    std::vector<std::uint64_t> sums;       // by key, or empty
    SlotReader reader;
    std::vector<SlotReaders::Slot> reads;  // mapped, direct: what must not be released meanwhile
    std::map<std::uint32_t, Transport::Mapping> mappings;  // mapped: by key
    std::size_t reads_left = 0;                            // direct
    Status status;                                         // the first error
  };
  const Run& run_of(const Chunk& chunk, std::uint32_t key) const;
  std::uint32_t producer_of(const Landing& landing, std::uint32_t key) const;
  // Where a run's key lies at its producer.
  const Location& source_of(const Landing& landing, std::uint32_t key) const;
  // The byte offset there of each element of the key, in order.
  std::vector<std::uint64_t> source_offsets(const Landing& landing, std::uint32_t key) const;
  // The packed bytes of a key have arrived at `bytes`: damages them when it is their turn, and compares their
  // sum.
  void arrived(Landing& landing, std::uint32_t key, std::span<std::byte> bytes);
  void scatter(const Landing& landing, std::size_t index, const std::byte* packed);
  std::vector<std::byte> copy_from_mapping(const Landing& landing, std::uint32_t key);
  void read_direct(const std::shared_ptr<Landing>& landing);
  void check_direct(Landing& landing);
  void finish(const Landing& landing);
  void check_parameter(std::uint32_t parameter, const std::vector<std::uint64_t>& versions,
                       std::string_view when);
  void producer_returned(const TrainerReturned& message);
  void close_endpoint(std::map<std::uint32_t, EndpointId>& endpoints, std::uint32_t producer);
  bool in_fleet(std::uint32_t rank) const;
  void try_start();
  void start_update(const StartUpdate& start);
  const Chunk& chunk_of(std::uint32_t chunk_id) const { return *chunks_.at(chunk_id); }
  void send(const Member& to, ControlBody body);
  void confirmed(std::uint32_t producer, std::uint64_t sync_id, const std::vector<std::uint32_t>& groups);

  struct Transfer {
    std::uint64_t sync_id = 0;
    std::uint32_t chunk = 0;
    std::uint16_t run = 0;
    SlotReaders::Slot slot;
    SlotReader reader;
  };

  const SimModel& model_;
  SlotReaders& readers_;
  const std::uint32_t consumer_, life_;
  const WorkerPlan& plan_;
  const Recording& recording_;
  ConsumerMachine machine_;
  CommitMachine commit_;
  ReturningProducers returning_;
  std::map<std::uint64_t, bool> decided_;
  std::uint64_t version_ = 0;
  std::optional<StartUpdate>
      deferred_;  // until the sync before has drained here, and those that come back are there
  bool crashed_ = false;
  bool told_by_sender_ = false;  // its Finish is being obeyed
  std::uint64_t mates_asked_ = 0;
  std::uint32_t mates_committed_ = 0;
  std::map<std::uint32_t, Mate> mates_;
  std::map<EndpointId, std::uint32_t> to_mates_,
      from_mates_;  // accepted: its own number until it has said who it is
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Control> control_;
  bool joined_ = false, ended_ = false;

  std::map<std::uint32_t, EndpointId> endpoint_of_;  // by producer
  std::map<std::uint32_t, EndpointId> waiting_;      // to those that have returned: for the next sync
  std::map<EndpointId, std::uint32_t> producer_of_;
  std::set<std::uint32_t> waiting_reserves_;
  std::map<std::uint32_t, Incarnation> ranks_up_;
  std::vector<Incarnation> trainers_;  // the lives that the sender speaks of; empty: no payload yet
  bool met_ = false;
  std::vector<std::vector<std::byte>> parameters_;
  std::vector<std::vector<std::byte>> stage_;  // as parameters_; empty: chunks land in those
  std::vector<std::byte> receive_ring_;
  std::map<ReadToken, Transfer> transfers_;
  std::map<ReadToken, std::shared_ptr<Landing>> direct_reads_;
  ReadToken next_token_ = 1;
  std::set<std::uint32_t> scattering_slots_;
  NameSet names_;
  std::map<NameSet, std::shared_ptr<const WorkerPlan>> parts_;  // restricted plans, by names
  std::shared_ptr<const WorkerPlan> running_;                   // the sync's plan
  std::map<std::uint32_t, const Chunk*> chunks_;                // of it, by chunk id
  std::vector<std::uint64_t> versions_;  // by name: what modules hold that are current, or will when they are
  std::set<std::pair<std::uint32_t, std::uint32_t>> signalled_, confirmed_;  // (producer, group), this sync
  std::uint64_t pulls_ = 0, mapped_chunks_ = 0, direct_chunks_ = 0, summed_keys_ = 0;
};

}  // namespace shardpull::sim
