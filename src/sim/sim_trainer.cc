#include "sim/sim_trainer.h"

#include <algorithm>

#include "hot/pulls.h"
#include "tensor/checksum.h"
#include "transport/hot_wire.h"

namespace shardpull::sim {
namespace {

constexpr std::int64_t kGatherNs = 2 * kNanosPerMilli;
constexpr std::int64_t kPieceNs = 100 * kNanosPerMicro;
constexpr std::byte kReleased{0xDB};  // a group's memory from the moment it is released
constexpr std::byte kPacking{0xAA};   // a slot from the moment its next pack starts

ProducerConfig producer_config(const SimModel& model, std::uint32_t rank) {
  ProducerConfig config;
  config.rank = rank;
  config.tables = model.tables;
  config.stall_timeout_ns = kSimStallNs;
  config.fail_on_consumer_loss = model.options.fail_on_loss;
  return config;
}

// The byte offset of element `position` (row-major) of a tensor laid out with strides.
std::uint64_t strided_element(std::uint64_t position, const std::vector<std::int64_t>& shape,
                              const std::vector<std::int64_t>& stride) {
  if (stride.empty()) return position;
  std::uint64_t at = 0;
  for (std::size_t d = shape.size(); d-- > 0;) {
    const auto size = static_cast<std::uint64_t>(shape[d]);
    at += position % size * static_cast<std::uint64_t>(stride[d]);
    position /= size;
  }
  return at;
}

std::uint64_t numel(const std::vector<std::int64_t>& shape) {
  std::uint64_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::uint64_t>(size);
  return count;
}

}  // namespace

SimTrainer::SimTrainer(World& world, const SimModel& model, SlotReaders& readers, std::uint32_t rank,
                       std::uint32_t life)
    : Process(world),
      model_(model),
      readers_(readers),
      rank_(rank),
      own_life_(life),
      producer_(std::make_unique<ProducerMachine>(producer_config(model, rank))),
      trainer_(model.options.lookahead),
      transport_(world.net().open(fmt::format("trainer-{}", rank), kSimToken, incarnation())) {
  if (rank == 0) {
    SenderConfig config;
    config.world_size = model.options.trainers;
    config.num_consumers = model.tables->num_consumers;
    config.workers_per_replica = model.workers_per_replica();
    config.step_timeout_ns = kSimStallNs;
    config.fail_on_consumer_loss = model.options.fail_on_loss;
    sender_ = std::make_unique<SenderMachine>(config);
    sender_->set_tables(model.tables);
    for (std::uint32_t r = 0; r < model.options.trainers; ++r) rank_lives_.push_back(1 + r);
  }
  const auto group_of = group_of_names(*model.tables);
  for (const auto& [name, piece] : model.held[rank]) {
    const TensorMeta& meta = model.tables->metadata[name];
    const std::vector<std::int64_t>& shape = model.shape_of(name, piece);
    Place place;
    std::uint64_t& end = group_bytes_[group_of[name]];
    place.offset = (end + 15) / 16 * 16;
    if (shape.size() == 2 && world.random().chance(0.4))
      place.stride = {1, shape[0]};  // transposed in memory
    end = place.offset + numel(shape) * element_bytes(meta.dtype);
    places_[{name, piece}] = place;
  }
  if (const auto address = transport_->listen(); !address.ok())
    world.broken("{}", address.status().to_string());
  world.add_transport(*transport_, *this);
  control_ = world.control().open({Role::kTrainer, rank}, incarnation(), *this);
  tick();
}

void SimTrainer::tick() {
  after(kNanosPerSecond, [this] {
    produce([&](std::int64_t now, ProducerActions& out) { producer_->tick(now, out); });
    if (sender_) drive_sender([&](std::int64_t now, SenderActions& out) { sender_->tick(now, out); });
    tick();
  });
}

template <typename Event>
void SimTrainer::produce(Event event) {
  ProducerActions actions;
  event(world_.now_ns(), actions);
  for (const ProducerAction& action : actions) std::visit([&](const auto& one) { perform(one); }, action);
}
template <typename Event>
void SimTrainer::produce_losing(Event event) {
  produce([&](std::int64_t now, ProducerActions& out) {
    const std::vector<std::uint32_t> before = producer_->live();
    event(now, out);
    const std::vector<std::uint32_t> after = producer_->live();
    for (const std::uint32_t c : before) {
      if (!std::binary_search(after.begin(), after.end(), c)) left_[c] = sync_id_;
    }
  });
}
template <typename Event>
void SimTrainer::train(Event event) {
  TrainerActions actions;
  event(actions);
  for (const TrainerAction& action : actions) std::visit([&](const auto& one) { perform(one); }, action);
}
template <typename Event>
void SimTrainer::drive_sender(Event event) {
  SenderActions actions;
  event(world_.now_ns(), actions);
  for (const SenderAction& action : actions) std::visit([&](const auto& one) { perform(one); }, action);
}

// Who is gone is told of by the control channel.
void SimTrainer::send(const Member& to, ControlBody body) {
  (void)control_->send(to, std::move(body)).ok();
}

// ---- one sync -----------------------------------------------------------------------------------

void SimTrainer::send_weights(std::uint64_t sync_id, std::uint64_t version, std::uint32_t allowed,
                              NameSet names) {
  world_.trace("send_weights", rank_, sync_id);
  returned_.reset();
  done_.reset();
  call_ = Call{sync_id, version, {}, {}};
  if (ended_) return maybe_return();
  if (sender_) {
    outcome_.reset();
    committing_ = false;
    std::vector<std::uint32_t> live = sender_->next_live();
    std::erase_if(live, [&](std::uint32_t c) { return c >= allowed; });
    std::string awaited = sender_->awaited();
    if (awaited.empty() && live.empty()) awaited = "a whole replica of those that are allowed";
    sent_ = Call{sync_id, version, std::move(live), std::move(names)};
    if (!awaited.empty()) {
      withdraw(sync_id, Status(StatusCode::kUnavailable, awaited, {.reason = Reason::kPeerLost}));
      outcome_ = SyncOutcome{*returned_, {}, {}, {}, {}, false};
      return;
    }
    lost_between_.clear();
    drive_sender([&](std::int64_t now, SenderActions& out) {
      if (const Status status = sender_->begin(now, sync_id, sent_.live, out); !status.ok())
        world_.broken("{}", status.to_string());
    });
  }
  try_begin();
}

void SimTrainer::withdraw(std::uint64_t sync_id, const Status& why) {
  call_.reset();
  returned_ = why;
  returned_of_ = sync_id;
}

void SimTrainer::try_begin() {
  if (follows() && open_ && !call_) {
    returned_.reset();
    done_.reset();
    call_ = Call{open_->sync_id, open_->version, {}, {}};
  }
  if (!call_ || !open_ || call_->sync_id != open_->sync_id) return;
  const SyncOpen open = *std::exchange(open_, std::nullopt);
  call_.reset();
  if (closed_ && closed_->sync_id == open.sync_id) {  // over before this rank came to it
    returned_ = closed_->status;
    returned_of_ = open.sync_id;
    if (returned_->ok()) world_.broken("sync {} was closed before trainer {} began it", open.sync_id, rank_);
    return;
  }
  sync_id_ = open.sync_id;
  version_ = open.version;
  names_ = open.names;
  running_ = true;
  const std::vector<bool> visited = listed_groups(names_, *model_.tables);
  std::vector<std::uint32_t> groups = model_.owned_groups[rank_];
  std::erase_if(groups, [&](std::uint32_t group) { return !visited[group]; });
  produce([&](std::int64_t now, ProducerActions& out) {
    const Status status =
        producer_->begin_sync(now, open.sync_id, open.version, open.live_consumers, groups, names_, out);
    if (!status.ok()) world_.broken("begin_sync: {}", status.to_string());
    const std::vector<std::uint32_t> live = producer_->live();
    for (const std::uint32_t c : open.live_consumers) {
      if (!std::binary_search(live.begin(), live.end(), c)) left_[c] = sync_id_;
    }
  });
  send(kSender, SyncBegan{open.sync_id});
  if (!producer_->syncing()) {  // it had failed elsewhere already
    RankEnded ended;
    ended.sync_id = open.sync_id;
    ended.status = producer_->failure();
    done_ = ended.status;
    send(kSender, ended);
    return maybe_return();
  }
  train([&](TrainerActions& out) {
    const Status status = trainer_.begin(open.sync_id, groups, model_.resident[rank_], out);
    if (!status.ok()) world_.broken("trainer begin: {}", status.to_string());
  });
}

// send_weights returns when its part is over and the sender has spoken, or is gone.
void SimTrainer::maybe_return() {
  if (call_ && ended_) return withdraw(call_->sync_id, *ended_);
  if (!running_ || !done_) return;
  const bool closed = closed_ && closed_->sync_id == sync_id_;
  if (!closed && !ended_) return;
  running_ = false;
  returned_ = closed ? closed_->status : *ended_;
  returned_of_ = sync_id_;
  if (returned_->ok()) returned_ = done_;
  overwrite_homes();
}

std::shared_ptr<ExportedMemory> SimTrainer::allocate_and_grant(std::uint64_t bytes) {
  auto memory = transport_->allocate(bytes, "a group");
  if (!memory.ok()) {
    world_.broken("{}", memory.status().to_string());
    return nullptr;
  }
  for (const auto& [endpoint, peer] : peers_) (void)transport_->grant(endpoint, *memory).ok();
  return *memory;
}

std::shared_ptr<ExportedMemory> SimTrainer::take_buffer(std::uint32_t group) {
  if (model_.resident[rank_]) {
    auto& home = homes_[group];
    if (!home) home = allocate_and_grant(std::max<std::uint64_t>(group_bytes_[group], 16));
    return home;
  }
  if (free_buffers_.empty()) {
    std::uint64_t bytes = 16;
    for (const auto& [other, needed] : group_bytes_) bytes = std::max(bytes, needed);
    if (resident_.size() > model_.options.lookahead) {
      world_.broken("trainer {} needs a buffer for group {} beside {} resident ones", rank_, group,
                    resident_.size());
    }
    return allocate_and_grant(bytes);
  }
  auto buffer = std::move(free_buffers_.back());
  free_buffers_.pop_back();
  return buffer;
}

void SimTrainer::gather(std::uint32_t group) {
  if (const Status status = world_.outcome_of(Failure::kSource); !status.ok()) {
    produce([&](std::int64_t, ProducerActions& out) { producer_->fail(sync_id_, status, out); });
    return train([&](TrainerActions& out) { trainer_.source_returned(out); });
  }
  auto buffer = take_buffer(group);
  if (!buffer) return;
  resident_[group] = buffer;
  if (!model_.resident[rank_] && resident_.size() > model_.options.lookahead + 1) {
    world_.broken("trainer {} holds {} groups, lookahead is {}", rank_, resident_.size(),
                  model_.options.lookahead);
  }
  const auto group_of = group_of_names(*model_.tables);
  std::vector<PublishedView> views;
  for (const auto& [name, piece] : model_.held[rank_]) {
    if (group_of[name] != group || !listed(names_, name)) continue;
    const TensorMeta& meta = model_.tables->metadata[name];
    const std::vector<std::int64_t>& shape = model_.shape_of(name, piece);
    const Place& place = places_.at({name, piece});
    const std::uint64_t width = element_bytes(meta.dtype), count = numel(shape);
    std::byte* const data = buffer->ref().address + place.offset;
    for (std::uint64_t position = 0; position < count; ++position) {
      const std::uint64_t global = model_.global_element(name, piece, position);
      const std::uint64_t at = strided_element(position, shape, place.stride);
      for (std::uint64_t b = 0; b < width; ++b) data[at * width + b] = source_byte(name, global, b, version_);
    }
    PublishedView view;
    view.name = name;
    view.piece = piece;
    view.dtype = meta.dtype;
    view.shape = shape;
    view.location.where = {buffer->ref().region, buffer->ref().generation, place.offset, count * width};
    view.location.stride = place.stride;
    views.push_back(std::move(view));
  }
  world_.trace("publish", rank_, group);
  Status published;
  produce([&](std::int64_t now, ProducerActions& out) {
    published = producer_->publish_group(now, group, std::move(views), out);
  });
  if (published.ok()) {
    train([&](TrainerActions& out) { trainer_.published(group, out); });
    return;
  }
  if (producer_->failure().ok()) world_.broken("publish_group {}: {}", group, published.to_string());
  train([&](TrainerActions& out) { trainer_.source_returned(out); });
}

void SimTrainer::perform(const trainer_action::AskSource& action) {
  later(kGatherNs, [this, group = action.group] { gather(group); });
}
void SimTrainer::perform(const trainer_action::AskEnd&) {
  later(kPieceNs, [this] { train([&](TrainerActions& out) { trainer_.source_ended(out); }); });
}
void SimTrainer::perform(const trainer_action::Release& action) {
  world_.trace("release", rank_, action.group);
  const auto it = resident_.find(action.group);
  if (it == resident_.end()) return;  // asked for and never published
  for (const auto& [ticket, group] : packing_) {
    if (group == action.group)
      world_.broken("trainer {} releases group {} while a pack reads it", rank_, group);
  }
  if (readers_.any({rank_, it->second->ref().region, SlotReaders::kMapped}, counted())) {
    world_.broken("trainer {} releases group {} while a worker copies from it", rank_, action.group);
  }
  if (!model_.resident[rank_]) {
    std::fill_n(it->second->ref().address, it->second->ref().bytes, kReleased);
    free_buffers_.push_back(std::move(it->second));
  }
  resident_.erase(it);
}
void SimTrainer::perform(const trainer_action::EndProducer&) {
  produce([&](std::int64_t now, ProducerActions& out) {
    if (const Status status = producer_->end_sync(now, out); !status.ok() && producer_->failure().ok()) {
      world_.broken("end_sync: {}", status.to_string());
    }
  });
}
void SimTrainer::perform(const trainer_action::RankDone& action) {
  world_.trace("rank_done", rank_, action.sync_id, action.status.ok());
  RankEnded ended;
  ended.sync_id = action.sync_id;
  ended.status = action.status;
  send(kSender, ended);
  done_ = action.status;
  maybe_return();
}

// ---- the producer -------------------------------------------------------------------------------

void SimTrainer::perform(const producer_action::AllocateRing& action) {
  later(kPieceNs, [this, action] {
    Ring& ring = rings_[action.sharing_group];
    if (ring.memory && readers_.any_of_region(rank_, ring.memory->ref().region, counted())) {
      world_.broken("trainer {} regrows the ring of sharing group {} while it is read", rank_,
                    action.sharing_group);
    }
    auto memory = transport_->allocate(action.slot_bytes * action.slots, "a serve ring");
    if (memory.ok()) {
      ring = {*memory, action.slot_bytes};
      for (const auto& [endpoint, peer] : peers_) (void)transport_->grant(endpoint, *memory).ok();
    }
    produce([&](std::int64_t now, ProducerActions& out) {
      producer_->ring_allocated(now, action.sharing_group, memory.status(), out);
    });
  });
}
void SimTrainer::perform(const producer_action::ReserveReply& action) {
  ReserveReply reply;
  reply.status = action.status;
  reply.lane_kind = static_cast<std::uint32_t>(action.lane);
  send({Role::kWorker, action.consumer}, reply);
}

void SimTrainer::perform(const producer_action::Pack& action) {
  const Ring& ring = rings_.at(action.sharing_group);
  const std::uint64_t slot_offset = action.slot * ring.slot_bytes;
  world_.trace("pack", rank_, action.sharing_group, action.slot, action.pull->chunk_id);
  if (readers_.any({rank_, ring.memory->ref().region, slot_offset}, counted())) {
    world_.broken("trainer {} packs chunk {} into slot {} of sharing group {} while it is read", rank_,
                  action.pull->chunk_id, action.slot, action.sharing_group);
  }
  packing_[action.ticket] = action.pull->group;
  packed_[{action.sharing_group, action.slot}] = action.pull->chunk_id;
  std::byte* const slot = ring.memory->ref().address + slot_offset;
  std::fill_n(slot, ring.slot_bytes, kPacking);
  auto sums = std::make_shared<std::vector<std::uint64_t>>();
  in_pieces(
      action.pull->keys.size(), kPieceNs,
      [this, action, slot, sums](std::size_t i) {
        const ChunkKey& key = action.pull->keys[i];
        gather_key(*action.pull, action.sources, key, slot + key.offset);
        if (action.summed) sums->push_back(checksum64({slot + key.offset, key.bytes}));
      },
      [this, action, slot, sums] {
        packing_.erase(action.ticket);
        const Status status = world_.outcome_of(Failure::kPack);
        const ChunkKey& key = action.pull->keys[world_.random().below(action.pull->keys.size())];
        world_.maybe_flip(Failure::kSlotBit, {slot + key.offset, key.bytes});
        produce([&](std::int64_t now, ProducerActions& out) {
          producer_->pack_done(now, action.ticket, status, *sums, out);
        });
      });
}

void SimTrainer::perform(const producer_action::Sum& action) {
  world_.trace("sum", rank_, action.pull->chunk_id);
  packing_[action.ticket] = action.pull->group;
  auto sums = std::make_shared<std::vector<std::uint64_t>>();
  in_pieces(
      action.pull->keys.size(), kPieceNs,
      [this, action, sums](std::size_t i) {
        const ChunkKey& key = action.pull->keys[i];
        std::vector<std::byte> bytes(key.bytes);
        gather_key(*action.pull, action.sources, key, bytes.data());
        sums->push_back(checksum64(bytes));
      },
      [this, action, sums] {
        packing_.erase(action.ticket);
        const Status status = world_.outcome_of(Failure::kPack);
        produce([&](std::int64_t now, ProducerActions& out) {
          producer_->pack_done(now, action.ticket, status, *sums, out);
        });
      });
}

void SimTrainer::gather_key(const PullDescription& pull, const std::vector<PublishedView>& sources,
                            const ChunkKey& key, std::byte* to) {
  const auto buffer = resident_.find(pull.group);
  if (buffer == resident_.end())
    return world_.broken("trainer {} packs from group {}, which was released", rank_, pull.group);
  const auto view = std::find_if(sources.begin(), sources.end(), [&](const PublishedView& one) {
    return one.name == key.name && one.piece == key.piece;
  });
  if (view == sources.end()) return world_.broken("pack without a source for name {}", key.name);
  const std::byte* const data = buffer->second->ref().address + view->location.where.offset;
  const std::uint64_t width = element_bytes(key.wire_dtype);
  for (const std::uint64_t position : positions_of(key.slice)) {
    std::copy_n(data + strided_element(position, view->shape, view->location.stride) * width, width, to);
    to += width;
  }
}

EndpointId SimTrainer::endpoint_of(std::uint32_t consumer, Incarnation incarnation) const {
  EndpointId latest = 0;  // one before it may be broken, and not be known to be
  for (const auto& [endpoint, peer] : peers_) {
    if (peer.consumer == consumer && peer.incarnation == incarnation) latest = endpoint;
  }
  return latest;
}

void SimTrainer::reply(HotType type, Incarnation to, const PullId& pull,
                       const std::vector<std::byte>& payload) {
  const EndpointId endpoint = endpoint_of(pull.consumer, to);
  if (endpoint == 0) return;
  const HotHeader header = header_of(type, pull);
  (void)transport_->send(endpoint, header, payload.data(), payload.size()).ok();
  send_again(endpoint, header, payload);
}

void SimTrainer::send_again(EndpointId endpoint, const HotHeader& header,
                            const std::vector<std::byte>& payload) {
  world_.maybe_again([this, endpoint, header, payload] {
    if (!down_) (void)transport_->send(endpoint, header, payload.data(), payload.size()).ok();
  });
}

void SimTrainer::perform(const producer_action::ReadyReply& action) {
  world_.trace("ready", rank_, action.pull.consumer, action.pull.chunk);
  ReadyPayload payload;
  payload.sums = action.ready.sums;
  if (action.ready.path == Path::kPacked) {
    const Ring& ring = rings_.at(action.ready.sharing_group);
    const MemoryRef& ref = ring.memory->ref();
    const std::uint32_t held = packed_[{action.ready.sharing_group, action.ready.slot}];
    if (held != action.pull.chunk) {
      world_.broken("trainer {} answers worker {}'s pull of chunk {} with a slot that holds chunk {}", rank_,
                    action.pull.consumer, action.pull.chunk, held);
    }
    payload.entries.push_back(
        {{ref.region, ref.generation, action.ready.slot * ring.slot_bytes, action.ready.bytes}, {}});
  } else {
    for (const Location& entry : action.ready.entries) payload.entries.push_back({entry.where, entry.stride});
  }
  reply(HotType::kReady, action.incarnation, action.pull, encode(payload));
}
void SimTrainer::perform(const producer_action::FailReply& action) {
  world_.trace("refuse", rank_, action.pull.consumer, action.pull.chunk);
  reply(HotType::kFail, action.incarnation, action.pull, encode(action.status));
}
void SimTrainer::perform(const producer_action::SignalAck& action) {
  const EndpointId endpoint = action.by_control ? 0 : endpoint_of(action.consumer, action.incarnation);
  if (endpoint == 0) {
    const FreeAck ack{action.sync_id, action.groups};
    world_.maybe_again([this, to = action.consumer, ack] {
      if (!down_) send({Role::kWorker, to}, ack);
    });
    return send({Role::kWorker, action.consumer}, ack);
  }
  HotHeader header;
  header.type = HotType::kFreeAck;
  header.sync_id = action.sync_id;
  header.consumer = action.consumer;
  const auto payload = encode(std::vector<FreeEntry>{{action.consumer, action.groups}});
  (void)transport_->send(endpoint, header, payload.data(), payload.size()).ok();
  send_again(endpoint, header, payload);
}
void SimTrainer::perform(const producer_action::GroupFreed& action) {
  world_.trace("freed", rank_, action.group);
  train([&](TrainerActions& out) { trainer_.group_freed(action.group, out); });
}
void SimTrainer::perform(const producer_action::SyncEnded&) {
  train([&](TrainerActions& out) { trainer_.producer_ended(out); });
}
void SimTrainer::perform(const producer_action::SyncFailed& action) {
  send(kSender, SyncFailed{action.sync_id, action.status});
  train([&](TrainerActions& out) { trainer_.fail(action.status, out); });
}
void SimTrainer::perform(const producer_action::SyncQuiet&) {
  train([&](TrainerActions& out) { trainer_.producer_quiet(out); });
}

void SimTrainer::on_accepted(EndpointId) {}

void SimTrainer::check_dropped(const HotHeader& header, std::uint64_t drops_before) {
  const auto life = life_.find(header.consumer);
  if (life == life_.end() || life->second == header.incarnation) return;
  ++stale_lives_;
  if (producer_->drops().stale_incarnation == drops_before)
    world_.broken("trainer {} takes a message of an old life of worker {}", rank_, header.consumer);
}

void SimTrainer::on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) {
  if (header.type == HotType::kHello) {
    peers_[endpoint] = {header.consumer, header.incarnation};
    for (const auto& [sharing_group, ring] : rings_) (void)transport_->grant(endpoint, ring.memory).ok();
    for (const auto& [group, buffer] : resident_) (void)transport_->grant(endpoint, buffer).ok();
    for (const auto& buffer : free_buffers_) (void)transport_->grant(endpoint, buffer).ok();
    for (const auto& [group, home] : homes_) (void)transport_->grant(endpoint, home).ok();
    return;
  }
  const std::uint64_t drops_before = producer_->drops().stale_incarnation;
  if (header.type == HotType::kPull) {
    const PullId pull = pull_of(header);
    world_.trace("pull", rank_, pull.consumer, pull.chunk);
    produce(
        [&](std::int64_t now, ProducerActions& out) { producer_->pull(now, header.incarnation, pull, out); });
    check_dropped(header, drops_before);
  } else if (header.type == HotType::kFree) {
    const auto entries = decode_free(payload, header.length);
    if (!entries.ok()) return world_.broken("{}", entries.status().to_string());
    for (const FreeEntry& entry : *entries) {
      produce([&](std::int64_t now, ProducerActions& out) {
        producer_->signal(now, header.incarnation, header.sync_id, entry.consumer, entry.groups, out);
      });
    }
    check_dropped(header, drops_before);
  }
}
void SimTrainer::on_closed(EndpointId endpoint, const Status&) {
  peers_.erase(endpoint);
}
void SimTrainer::on_read_done(ReadToken, const Status&) {}

// ---- the sender ---------------------------------------------------------------------------------

void SimTrainer::perform(const sender_action::OpenSync& action) {
  send({Role::kTrainer, action.rank}, SyncOpen{sent_.sync_id, sent_.version, sent_.live, sent_.names});
}
void SimTrainer::perform(const sender_action::StartUpdate& action) {
  StartUpdate start;
  start.sync_id = sent_.sync_id;
  start.version = sent_.version;
  start.names = sent_.names;
  send({Role::kWorker, action.consumer}, start);
}
void SimTrainer::perform(const sender_action::Update& action) {
  send({Role::kWorker, action.consumer}, Update{sent_.sync_id});
}
void SimTrainer::perform(const sender_action::Finish& action) {
  committing_ = true;
  send({Role::kWorker, action.consumer}, Finish{sent_.sync_id});
}
void SimTrainer::perform(const sender_action::FailRank& action) {
  send({Role::kTrainer, action.rank}, SyncFailed{sent_.sync_id, action.status});
}
void SimTrainer::perform(const sender_action::FailConsumer& action) {
  send({Role::kWorker, action.consumer}, SyncFailed{sent_.sync_id, action.status});
}
void SimTrainer::perform(const sender_action::CloseSync& action) {
  send({Role::kTrainer, action.rank}, SyncClosed{sent_.sync_id, action.status});
}
void SimTrainer::perform(const sender_action::SyncDone& action) {
  world_.trace("sync_done", action.sync_id, action.status.ok());
  outcome_ = SyncOutcome{action.status,     sent_.live, action.lost_consumers, action.dropped_consumers,
                         action.lost_ranks, committing_};
}

void SimTrainer::on_member_up(const Member& member, Incarnation incarnation) {
  if (member.role == Role::kWorker) {
    life_[member.id] = incarnation;
    produce_losing([&](std::int64_t now, ProducerActions& out) {
      producer_->consumer_up(now, member.id, incarnation, out);
    });
  }
  if (follows() && member == kSender) send(kSender, TrainerJoin{});
}

void SimTrainer::take_back(std::uint32_t rank, Incarnation life) {
  world_.trace("take_back", rank, static_cast<std::int64_t>(life));
  if (!sender_->lost(rank)) return world_.broken("trainer {} joins again, and is not lost", rank);
  rank_lives_[rank] = life;
  sender_->take_back(rank);
  lost_between_.erase({Role::kTrainer, rank});
  send({Role::kTrainer, rank}, TrainerTable{.status = {}, .tables = {}, .returned = true});
  for (std::uint32_t worker = 0; worker < model_.tables->num_consumers; ++worker) {
    send({Role::kWorker, worker}, TrainerReturned{.rank = rank,
                                                  .incarnation = life,
                                                  .producer_address = model_.tables->producers[rank],
                                                  .without_until = sent_.sync_id});
  }
}

void SimTrainer::on_member_lost(const Member& member, Incarnation, const Status& why) {
  world_.trace("lost", rank_, static_cast<int>(member.role), member.id);
  const Status named(StatusCode::kUnavailable,
                     fmt::format("{} is lost: {}", to_string(member), why.message()),
                     {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = to_string(member)});
  if (member.role == Role::kWorker) {
    left_[member.id] = sync_id_;
    produce_losing([&](std::int64_t now, ProducerActions& out) {
      producer_->consumer_lost(now, member.id, named, out);
    });
    if (ready_.erase(member.id) != 0 && sender_ && !sender_->running()) lost_between_.insert(member);
    if (sender_) {
      drive_sender(
          [&](std::int64_t now, SenderActions& out) { sender_->consumer_lost(now, member.id, named, out); });
    }
    return;
  }
  if (sender_) {
    if (!sender_->running()) lost_between_.insert(member);
    drive_sender(
        [&](std::int64_t now, SenderActions& out) { sender_->rank_lost(now, member.id, named, out); });
  }
  if (member != kSender) return;  // whether a sync can go on without a rank is the sender's to say
  if (running_) produce([&](std::int64_t, ProducerActions& out) { producer_->fail(sync_id_, named, out); });
  end(named);
}

// The sender is gone: send_weights returns, and the process ends.
void SimTrainer::end(const Status& why) {
  if (ended_) return;
  ended_ = why;
  maybe_return();
}

void SimTrainer::on_control(const Member& from, Incarnation incarnation, ControlBody body) {
  world_.trace("control", rank_, static_cast<int>(from.role), from.id, body.index());
  if (auto* reserve = std::get_if<Reserve>(&body)) {
    auto pulls = decode_pulls(reserve->pulls.data(), reserve->pulls.size());
    if (!pulls.ok()) return world_.broken("{}", pulls.status().to_string());
    produce([&](std::int64_t now, ProducerActions& out) {
      producer_->reserve(now, from.id, incarnation, reserve->slot_bytes, reserve->ring_depth,
                         reserve->num_consumers, reserve->workers_per_replica,
                         {reserve->digest_low, reserve->digest_high}, std::move(*pulls), out);
    });
  } else if (auto* open = std::get_if<SyncOpen>(&body)) {
    producer_->sync_opened(open->sync_id, open->live_consumers);
    open_ = std::move(*open);
    try_begin();
  } else if (auto* closed = std::get_if<SyncClosed>(&body)) {
    closed_ = std::move(*closed);
    maybe_return();
  } else if (auto* free = std::get_if<FreeGroups>(&body)) {
    produce([&](std::int64_t now, ProducerActions& out) {
      producer_->signal(now, incarnation, free->sync_id, from.id, free->groups, out, true);
    });
  } else if (auto* leave = std::get_if<LeaveLanes>(&body)) {
    produce([&](std::int64_t now, ProducerActions& out) {
      producer_->leave_lanes(now, incarnation, leave->sync_id, from.id, out);
    });
  } else if (auto* failed = std::get_if<SyncFailed>(&body)) {
    if (sender_) {
      drive_sender([&](std::int64_t now, SenderActions& out) {
        sender_->failed(now, from, failed->sync_id, failed->status, out);
      });
    }
    // The sender decides for everybody: only its word fails this rank.
    if (from == kSender) {
      produce(
          [&](std::int64_t, ProducerActions& out) { producer_->fail(failed->sync_id, failed->status, out); });
    }
  } else if (std::holds_alternative<TrainerJoin>(body)) {
    take_back(from.id, incarnation);
  } else if (std::holds_alternative<InitRequest>(body)) {
    InitPayload payload;
    for (std::uint32_t rank = 0; rank < model_.options.trainers; ++rank)
      payload.trainers.push_back(in_fleet(rank));
    send(from, std::move(payload));
  } else if (auto* joined = std::get_if<InitDone>(&body)) {
    if (!joined->status.ok()) return;
    ready_[from.id] = incarnation;
    lost_between_.erase(from);
    sender_->worker_joined(from.id);
  } else if (auto* began = std::get_if<SyncBegan>(&body)) {
    drive_sender([&](std::int64_t now, SenderActions& out) {
      sender_->rank_began(now, from.id, began->sync_id, out);
    });
  } else if (auto* started = std::get_if<UpdateStarted>(&body)) {
    drive_sender([&](std::int64_t now, SenderActions& out) {
      sender_->update_started(now, from.id, started->sync_id, started->status, out);
    });
  } else if (auto* prepared = std::get_if<Prepared>(&body)) {
    drive_sender([&](std::int64_t now, SenderActions& out) {
      sender_->prepared(now, from.id, prepared->sync_id, prepared->status, out);
    });
  } else if (auto* finished = std::get_if<Finished>(&body)) {
    drive_sender([&](std::int64_t now, SenderActions& out) {
      sender_->finished(now, from.id, finished->sync_id, finished->status, out);
    });
  } else if (auto* ended = std::get_if<RankEnded>(&body)) {
    drive_sender([&](std::int64_t now, SenderActions& out) {
      sender_->rank_ended(now, from.id, ended->sync_id, ended->status, out);
    });
  }
}

// The next training step.
void SimTrainer::overwrite_homes() {
  for (const auto& [group, home] : homes_) {
    if (readers_.any({rank_, home->ref().region, SlotReaders::kMapped}, counted())) {
      world_.broken("trainer {} trains on while a worker copies from its group {}", rank_, group);
    }
    std::fill_n(home->ref().address, home->ref().bytes, kReleased);
  }
}

void SimTrainer::shutdown() {
  if (down_) return;
  produce([&](std::int64_t, ProducerActions& out) { producer_->shutdown(out); });
  down_ = true;
  control_->shutdown();
  world_.remove_transport(*transport_);
  transport_.reset();
}

void SimTrainer::crash() {
  if (down_) return;
  world_.trace("crash", 1, rank_);
  down_ = true;
  world_.control().crash({Role::kTrainer, rank_});
  world_.remove_transport(*transport_);
  transport_.reset();
}

}  // namespace shardpull::sim
