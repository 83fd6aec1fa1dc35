// One simulated inference worker: drives a ConsumerMachine over the world's networks and its own parameters,
// and checks the bytes it ends with.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "protocol/consumer_machine.h"
#include "sim/sim_model.h"
#include "sim/sim_trainer.h"
#include "sim/world.h"

namespace shardpull::sim {

class SimWorker final : TransportSink, ControlSink {
 public:
  SimWorker(World& world, const SimModel& model, SlotReaders& readers, std::uint32_t consumer);

  Incarnation incarnation() const { return 1000 + consumer_; }
  // Whether every producer it pulls from has accepted its pulls.
  bool ready() const { return started_ && waiting_reserves_.empty(); }
  // Connects and announces its pulls, at a random instant.
  void start();
  void shutdown();

  const ConsumerMachine& machine() const { return machine_; }
  std::uint64_t pulls() const { return pulls_; }
  std::uint64_t mapped_chunks() const { return mapped_chunks_; }
  // Compares every byte of every parameter of a module that is current or was never loaded, guards included,
  // with these versions of the names.
  void verify(const std::vector<std::uint64_t>& versions);

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
  void perform(const consumer_action::StartTransfer& action);
  void perform(const consumer_action::StartScatter& action);
  void perform(const consumer_action::StartCopy& action);
  void perform(const consumer_action::StartPost& action);
  void perform(const consumer_action::SendSignals& action);
  void perform(const consumer_action::UpdateDone& action);
  void perform(const consumer_action::FinishDone& action);
  void perform(const consumer_action::ReportFailure& action);

  void connect_and_reserve();
  void tick();
  std::byte* data_of(std::uint32_t parameter) { return parameters_[parameter].data() + kGuardBytes; }
  void materialise(std::uint32_t chunk);
  // Copies element i of a scatter from element source(i) of `data`.
  void scatter_packed(std::uint32_t chunk, std::size_t index, const std::byte* slot);
  void scatter_mapped(std::uint32_t chunk, std::size_t index, const std::vector<ReadyInfo>& ready);
  void check_parameter(std::uint32_t parameter, const std::vector<std::uint64_t>& versions,
                       std::string_view when);
  void start_update(const StartUpdate& start);
  const Chunk& chunk_of(std::uint32_t chunk_id) const { return *chunks_.at(chunk_id); }
  void send(const Member& to, ControlBody body);
  void confirmed(std::uint32_t producer, std::uint64_t sync_id, const std::vector<std::uint32_t>& groups);

  struct Transfer {
    std::uint64_t sync_id = 0;
    std::uint32_t chunk = 0;
    std::uint16_t run = 0;
    SlotReaders::Slot slot;
  };

  World& world_;
  const SimModel& model_;
  SlotReaders& readers_;
  const std::uint32_t consumer_;
  const WorkerPlan& plan_;
  const Recording& recording_;
  ConsumerMachine machine_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Control> control_;
  bool started_ = false, down_ = false;

  std::map<std::uint32_t, EndpointId> endpoint_of_;  // by producer
  std::map<EndpointId, std::uint32_t> producer_of_;
  std::set<std::uint32_t> waiting_reserves_;
  std::vector<std::vector<std::byte>> parameters_;
  std::vector<std::byte> receive_ring_;
  std::map<ReadToken, Transfer> transfers_;
  ReadToken next_token_ = 1;
  std::set<std::uint32_t> scattering_slots_;
  NameSet names_;
  std::map<NameSet, std::shared_ptr<const WorkerPlan>> parts_;  // restricted plans, by names
  std::shared_ptr<const WorkerPlan> running_;                   // the sync's plan
  std::map<std::uint32_t, const Chunk*> chunks_;                // of it, by chunk id
  std::vector<std::uint64_t> versions_;  // by name: what modules hold that are current, or will when they are
  std::set<std::pair<std::uint32_t, std::uint32_t>> signalled_, confirmed_;  // (producer, group), this sync
  std::uint64_t pulls_ = 0, mapped_chunks_ = 0;
};

}  // namespace shardpull::sim
