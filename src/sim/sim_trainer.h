// One simulated trainer rank: drives ProducerMachine, TrainerMachine and, on rank 0, SenderMachine over the
// world's networks, and plays the source: it gathers groups into buffers from a pool, and overwrites them the
// moment they are released. A resident rank has a place for every group, and overwrites all of them the
// moment a sync is over.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "protocol/producer_machine.h"
#include "protocol/trainer_machine.h"
#include "sim/sim_model.h"
#include "sim/world.h"

namespace shardpull::sim {

inline constexpr FleetToken kSimToken = 0x51D;
inline constexpr std::int64_t kSimStallNs = 30 * kNanosPerSecond;

// What a sender's sync came to.
struct SyncOutcome {
  Status status;
  std::vector<std::uint32_t> live;     // that it was begun with
  std::vector<std::uint32_t> lost;     // processes that were lost in it
  std::vector<std::uint32_t> dropped;  // their living mates
  std::vector<std::uint32_t> lost_ranks;
  bool committing = false;             // a Finish was sent
};

// A life of a worker that reads in a sync.
struct SlotReader {
  std::uint32_t consumer = 0;
  Incarnation life = 0;
  std::uint64_t sync_id = 0;
  friend bool operator==(const SlotReader&, const SlotReader&) = default;
};

// Who reads which serve slot, or copies from which group's buffer, now. Shared by trainers and workers;
// nobody in a real fleet knows it.
class SlotReaders {
 public:
  using Slot = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>;  // rank, region, offset
  static constexpr std::uint64_t kMapped = ~0ull;                        // as offset: the whole region

  void begin(const Slot& slot, const SlotReader& reader) { readers_.emplace(slot, reader); }
  void end(const Slot& slot, const SlotReader& reader) {
    for (auto [it, last] = readers_.equal_range(slot); it != last; ++it) {
      if (it->second == reader) return void(readers_.erase(it));
    }
  }
  // The process has died.
  void forget(std::uint32_t consumer, Incarnation life) {
    std::erase_if(readers_, [&](const auto& one) {
      return one.second.consumer == consumer && one.second.life == life;
    });
  }
  // Whether there is a reader for whom `counts` is true, of a slot or of any slot of a region.
  template <typename Counts>
  bool any(const Slot& slot, Counts counts) const {
    const auto [first, last] = readers_.equal_range(slot);
    return std::any_of(first, last, [&](const auto& one) { return counts(one.second); });
  }
  template <typename Counts>
  bool any_of_region(std::uint32_t rank, std::uint32_t region, Counts counts) const {
    const auto first = readers_.lower_bound({rank, region, 0}),
               last = readers_.upper_bound({rank, region, kMapped});
    return std::any_of(first, last, [&](const auto& one) { return counts(one.second); });
  }

 private:
  std::multimap<Slot, SlotReader> readers_;
};

class SimTrainer final : public Process, TransportSink, ControlSink {
 public:
  // `life` counts the processes that were this rank. A later one joins the fleet that goes on, by itself, and
  // follows its sender from then on: it is in every sync that is opened for it, without send_weights().
  SimTrainer(World& world, const SimModel& model, SlotReaders& readers, std::uint32_t rank,
             std::uint32_t life);

  Incarnation incarnation() const { return 1 + rank_ + 100 * std::uint64_t{own_life_}; }
  bool follows() const { return own_life_ != 0; }
  // The user's call. `names` is read on the sender only, which opens the sync with those workers of 0 ..
  // `allowed` - 1 that SenderMachine says. Where that waits for somebody it returns an error, as nobody comes
  // in time, and the others are to be told by withdraw().
  void send_weights(std::uint64_t sync_id, std::uint64_t version, std::uint32_t allowed, NameSet names);
  void withdraw(std::uint64_t sync_id, const Status& why);
  // Whether send_weights of the last sync has returned, and with what.
  const std::optional<Status>& returned() const { return returned_; }
  std::uint64_t returned_of() const { return returned_of_; }  // which sync that was
  bool in_sync() const { return running_; }
  const std::optional<SyncOutcome>& outcome() const { return outcome_; }  // on the sender
  bool committing() const { return committing_; }    // on the sender: it has sent a Finish in this sync
  bool ended() const { return ended_.has_value(); }  // the fleet is over for it
  bool all_joined() const { return ready_.size() == model_.tables->num_consumers; }  // on the sender
  // On the sender: who was lost while it ran no sync, and has not joined again since.
  const std::set<Member>& lost_between() const { return lost_between_; }
  // The life of the worker that has joined, as far as the sender knows; 0: none.
  Incarnation joined(std::uint32_t consumer) const {
    const auto it = ready_.find(consumer);
    return it == ready_.end() ? 0 : it->second;
  }
  // The life of the rank that is in the fleet, as far as the sender knows; 0: none.
  Incarnation in_fleet(std::uint32_t rank) const { return sender_->lost(rank) ? 0 : rank_lives_[rank]; }
  // Ends the rank in good order.
  void shutdown();
  // Its process dies, with what it had not sent yet.
  void crash();

  const ProducerMachine& producer() const { return *producer_; }
  std::uint64_t stale_lives() const {
    return stale_lives_;
  }  // messages of workers that had another life by then
  const TrainerMachine& trainer() const { return trainer_; }

 private:
  struct Place {  // where a held name (or piece) lies in the buffer of its group
    std::uint64_t offset = 0;
    std::vector<std::int64_t> stride;  // empty: contiguous
  };
  struct PieceId {
    std::uint32_t name = 0, piece = 0;
    friend auto operator<=>(const PieceId&, const PieceId&) = default;
  };
  struct Ring {
    std::shared_ptr<ExportedMemory> memory;
    std::uint64_t slot_bytes = 0;
  };
  struct Peer {
    std::uint32_t consumer = 0;
    Incarnation incarnation = 0;
  };

  void on_accepted(EndpointId endpoint) override;
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override;
  void on_closed(EndpointId endpoint, const Status& why) override;
  void on_read_done(ReadToken token, const Status& status) override;
  void on_control(const Member& from, Incarnation incarnation, ControlBody body) override;
  void on_member_up(const Member& member, Incarnation incarnation) override;
  void on_member_lost(const Member& member, Incarnation incarnation, const Status& why) override;

  void take_back(std::uint32_t rank, Incarnation life);
  void try_begin();
  void gather(std::uint32_t group);
  std::shared_ptr<ExportedMemory> take_buffer(std::uint32_t group);
  std::shared_ptr<ExportedMemory> allocate_and_grant(std::uint64_t bytes);
  // Gathers a key's bytes to `to`; a broken rule when its group has been released.
  void gather_key(const PullDescription& pull, const std::vector<PublishedView>& sources, const ChunkKey& key,
                  std::byte* to);
  void overwrite_homes();
  // A rule: what a life sends that has a successor is dropped.
  void check_dropped(const HotHeader& header, std::uint64_t drops_before);
  void end(const Status& why);
  void maybe_return();
  // Whether a reader is one that this rank has to leave memory to: its worker has not left the sync it reads
  // in.
  auto counted() const {
    return [this](const SlotReader& reader) {
      const auto left = left_.find(reader.consumer);
      return left == left_.end() || reader.sync_id > left->second;
    };
  }
  // Runs an event that may take workers out of the producer's sync.
  template <typename Event>
  void produce_losing(Event event);
  void send_again(EndpointId endpoint, const HotHeader& header, const std::vector<std::byte>& payload);
  void send(const Member& to, ControlBody body);
  void reply(HotType type, Incarnation to, const PullId& pull, const std::vector<std::byte>& payload);
  EndpointId endpoint_of(std::uint32_t consumer, Incarnation incarnation) const;
  void tick();

  template <typename Event>
  void produce(Event event);
  template <typename Event>
  void train(Event event);
  template <typename Event>
  void drive_sender(Event event);
  void perform(const producer_action::AllocateRing& action);
  void perform(const producer_action::ReserveReply& action);
  void perform(const producer_action::Pack& action);
  void perform(const producer_action::Sum& action);
  void perform(const producer_action::ReadyReply& action);
  void perform(const producer_action::FailReply& action);
  void perform(const producer_action::SignalAck& action);
  void perform(const producer_action::GroupFreed& action);
  void perform(const producer_action::SyncEnded& action);
  void perform(const producer_action::SyncFailed& action);
  void perform(const producer_action::SyncQuiet& action);
  void perform(const trainer_action::AskSource& action);
  void perform(const trainer_action::AskEnd& action);
  void perform(const trainer_action::Release& action);
  void perform(const trainer_action::EndProducer& action);
  void perform(const trainer_action::RankDone& action);
  void perform(const sender_action::OpenSync& action);
  void perform(const sender_action::StartUpdate& action);
  void perform(const sender_action::Update& action);
  void perform(const sender_action::Finish& action);
  void perform(const sender_action::FailRank& action);
  void perform(const sender_action::FailConsumer& action);
  void perform(const sender_action::CloseSync& action);
  void perform(const sender_action::SyncDone& action);

  const SimModel& model_;
  SlotReaders& readers_;
  const std::uint32_t rank_, own_life_;
  std::unique_ptr<ProducerMachine> producer_;
  TrainerMachine trainer_;
  std::unique_ptr<SenderMachine> sender_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Control> control_;

  std::map<EndpointId, Peer> peers_;
  std::map<std::uint32_t, Ring> rings_;  // by sharing group
  std::map<PieceId, Place> places_;
  std::map<std::uint32_t, std::uint64_t> group_bytes_;
  std::map<std::uint32_t, std::shared_ptr<ExportedMemory>> resident_;  // by live group
  std::vector<std::shared_ptr<ExportedMemory>> free_buffers_;
  std::map<std::uint32_t, std::shared_ptr<ExportedMemory>> homes_;           // of a resident rank, by group
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> packed_;  // (ring, slot) -> chunk
  std::map<std::uint64_t, std::uint32_t> packing_;                           // ticket -> group

  std::uint64_t stale_lives_ = 0;
  std::map<std::uint32_t, Incarnation> life_;    // by worker: the latest that is known to be up
  std::map<std::uint32_t, std::uint64_t> left_;  // by worker: the last sync it left here
  std::map<std::uint32_t, Incarnation> ready_;   // on the sender: workers that have joined
  std::set<Member> lost_between_;                // on the sender
  std::vector<Incarnation> rank_lives_;          // on the sender
  std::optional<Status> ended_;                  // the fleet is over

  // The sync at hand.
  struct Call {
    std::uint64_t sync_id = 0, version = 0;
    std::vector<std::uint32_t> live;
    NameSet names;
  };
  std::optional<Call> call_;      // send_weights was called and has not begun
  std::optional<SyncOpen> open_;  // the sender has opened it
  std::uint64_t sync_id_ = 0, version_ = 0;
  NameSet names_;
  Call sent_;                         // the sender's own
  bool committing_ = false;           // it has sent a Finish
  bool running_ = false;              // begun here, and send_weights has not returned
  std::optional<Status> done_;        // RankDone
  std::optional<SyncClosed> closed_;  // the sender's word on a sync
  std::optional<Status> returned_;
  std::uint64_t returned_of_ = 0;
  std::optional<SyncOutcome> outcome_;
};

}  // namespace shardpull::sim
