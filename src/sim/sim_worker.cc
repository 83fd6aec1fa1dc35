#include "sim/sim_worker.h"

#include <algorithm>
#include <utility>

#include "hot/pulls.h"
#include "plan/integrity.h"
#include "protocol/key_sums.h"
#include "transport/hot_wire.h"

namespace shardpull::sim {
namespace {

// Beyond what links are silent for: nobody that lives is given up for being slow.
constexpr std::int64_t kReturnLimitNs = 10 * kNanosPerSecond;
constexpr std::int64_t kPieceNs = 100 * kNanosPerMicro;
constexpr std::byte kGuard{0x5A}, kScattered{0xEE};  // guard bytes; a receive slot after its scatter

ConsumerConfig consumer_config(const SimModel& model, std::uint32_t consumer) {
  ConsumerConfig config;
  config.plan = model.plans[consumer];
  config.num_modules = static_cast<std::uint32_t>(model.recordings[consumer].modules.size());
  config.summed = summed_paths(*model.tables);
  config.stall_timeout_ns = kSimStallNs;
  config.staged = model.staged[consumer];
  config.loss_grace_ns = 2 * kNanosPerSecond;
  return config;
}

CommitConfig commit_config(const SimModel& model, std::uint32_t consumer) {
  CommitConfig config;
  config.consumer = consumer;
  const std::uint32_t size = model.tables->num_consumers / model.tables->num_replicas;
  for (std::uint32_t c = consumer / size * size; c < consumer / size * size + size; ++c) {
    if (c != consumer) config.mates.push_back(c);
  }
  config.answer_within_ns = 3 * kNanosPerSecond;  // beyond what connections are held up for
  return config;
}

}  // namespace

SimWorker::SimWorker(World& world, const SimModel& model, SlotReaders& readers, std::uint32_t consumer,
                     std::uint32_t life)
    : Process(world),
      model_(model),
      readers_(readers),
      consumer_(consumer),
      life_(life),
      plan_(*model.plans[consumer]),
      recording_(model.recordings[consumer]),
      machine_(consumer_config(model, consumer)),
      commit_(commit_config(model, consumer)),
      returning_(plan_),
      transport_(world.net().open(fmt::format("worker-{}", consumer), kSimToken, incarnation())) {
  for (const RecordedParameter& parameter : recording_.parameters) {
    std::uint64_t bytes = element_bytes(parameter.dtype);
    for (const std::int64_t size : parameter.shape) bytes *= static_cast<std::uint64_t>(size);
    std::vector<std::byte> memory(bytes + 2 * kGuardBytes, kGuard);
    std::fill_n(memory.begin() + kGuardBytes, bytes, SimModel::kUnwritten);
    parameters_.push_back(std::move(memory));
  }
  if (model.staged[consumer]) stage_ = parameters_;
  versions_.assign(model.tables->metadata.size(), 0);
  receive_ring_.assign(plan_.receive_slot_bytes * plan_.ring_depth, kScattered);
  world.add_transport(*transport_, *this);
  for (const std::uint32_t mate : commit_config(model, consumer).mates) mates_[mate];
  if (mates_.empty()) return;
  if (const auto address = transport_->listen(); !address.ok())
    world.broken("{}", address.status().to_string());
}

void SimWorker::start() {
  after(2 * kNanosPerMilli, [this] { join_later(); });
}

// By now everybody has heard of the trainers.
void SimWorker::join_later() {
  later(5 * kNanosPerMilli,
        [this] { control_ = world_.control().open({Role::kWorker, consumer_}, incarnation(), *this); });
}

void SimWorker::connect_and_reserve() {
  if (broken()) return;
  met_ = true;
  for (std::uint32_t rank = 0; rank < model_.options.trainers; ++rank) {
    if (in_fleet(rank)) continue;  // else: of a fleet that goes on without it
    drive_returning([&](std::int64_t, ReturningActions& out) { returning_.producer_lost(rank, out); });
    drive([&](std::int64_t now, ConsumerActions& out) {
      machine_.producer_lost(now, rank,
                             Status(StatusCode::kUnavailable, "it was down before this worker joined",
                                    {.reason = Reason::kPeerLost, .fault = Fault::kPeer}),
                             out);
    });
  }
  for (const ProducerPlan& producer : plan_.producers) {
    if (returning_.lost(producer.producer)) continue;
    if (!connect_to(producer.producer).ok()) return end();  // it has just died
    waiting_reserves_.insert(producer.producer);
    announce(producer.producer, producer.serve_slot_bytes, pulls_at(plan_, producer.producer));
  }
  tick();
  join();
}

// Says so when every producer has taken its pulls.
void SimWorker::join() {
  if (joined_ || broken() || !waiting_reserves_.empty()) return;
  joined_ = true;
  send(kSender, InitDone{});
}

EndpointId SimWorker::endpoint_to(std::uint32_t producer) const {
  const auto it = endpoint_of_.find(producer);
  return it == endpoint_of_.end() ? 0 : it->second;
}

Status SimWorker::connect_to(std::uint32_t producer) {
  const auto endpoint = open_endpoint(producer);
  if (endpoint.ok()) endpoint_of_[producer] = *endpoint;
  return endpoint.status();
}

Result<EndpointId> SimWorker::open_endpoint(std::uint32_t producer) {
  const auto endpoint = transport_->connect(model_.tables->producers[producer], 0);
  if (!endpoint.ok()) return endpoint.status();
  producer_of_[*endpoint] = producer;
  HotHeader hello;
  hello.type = HotType::kHello;
  hello.consumer = consumer_;
  const Status sent = transport_->send(*endpoint, hello, nullptr, 0);
  if (!sent.ok()) return sent;
  return *endpoint;
}

// ---- ranks that come back: what ConsumerEngine does ---------------------------------------------

bool SimWorker::in_fleet(std::uint32_t rank) const {
  const auto up = ranks_up_.find(rank);
  return up != ranks_up_.end() && rank < trainers_.size() && trainers_[rank] == up->second;
}

template <typename Event>
void SimWorker::drive_returning(Event event) {
  ReturningActions actions;
  event(world_.now_ns(), actions);
  for (const ReturningAction& action : actions) std::visit([&](const auto& one) { perform(one); }, action);
}

void SimWorker::close_endpoint(std::map<std::uint32_t, EndpointId>& endpoints, std::uint32_t producer) {
  const auto found = endpoints.find(producer);
  if (found == endpoints.end()) return;
  if (producer_of_.erase(found->second) != 0) transport_->close(found->second);
  endpoints.erase(found);
}

void SimWorker::producer_returned(const TrainerReturned& message) {
  const auto up = ranks_up_.find(message.rank);
  if (message.rank >= trainers_.size() || up == ranks_up_.end() || up->second != message.incarnation) return;
  trainers_[message.rank] = message.incarnation;
  if (!met_) return;
  world_.trace("returned", consumer_, message.rank);
  drive_returning([&](std::int64_t now, ReturningActions& out) {
    returning_.returned(now, message.rank, message.without_until, kReturnLimitNs, out);
  });
}

void SimWorker::perform(const returning_action::Meet& action) {
  const std::uint32_t producer = action.producer;
  const auto endpoint = open_endpoint(producer);
  if (!endpoint.ok()) {
    drive_returning(
        [&](std::int64_t, ReturningActions& out) { returning_.failed(producer, endpoint.status(), out); });
    return;
  }
  waiting_[producer] = *endpoint;
  returning_.greeted(producer);  // no hello is answered here
  for (const ProducerPlan& at : plan_.producers) {
    if (at.producer == producer) announce(producer, at.serve_slot_bytes, pulls_at(plan_, producer));
  }
}
void SimWorker::perform(const returning_action::Part& action) {
  world_.trace("part", consumer_, action.producer);
  close_endpoint(waiting_, action.producer);
}
void SimWorker::perform(const returning_action::TakeBack& action) {
  const std::uint32_t producer = action.producer;
  world_.trace("take_back", consumer_, producer);
  close_endpoint(endpoint_of_, producer);
  if (const auto waiting = waiting_.extract(producer)) endpoint_of_[producer] = waiting.mapped();
  machine_.producer_returned(producer);
}
void SimWorker::perform(const returning_action::StandIn& action) {
  world_.trace("stand_in", consumer_, action.producer);
  machine_.producer_returned(action.producer);
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.producer_unreachable(now, action.producer, action.why, out);
  });
}
void SimWorker::perform(const returning_action::Reconnect& action) {
  if (!connect_to(action.producer).ok()) return;
  drive_returning([&](std::int64_t, ReturningActions& out) { returning_.reconnected(action.producer, out); });
}
void SimWorker::perform(const returning_action::Reached& action) {
  machine_.producer_reachable(action.producer);
}

void SimWorker::try_start() {
  if (!deferred_ || commit_.deciding() || machine_.state() == WorkerState::kUpdating ||
      machine_.state() == WorkerState::kCommitting)
    return;
  const std::uint64_t sync_id = deferred_->sync_id;
  drive_returning([&](std::int64_t now, ReturningActions& out) { returning_.wanted(now, sync_id, out); });
  if (!returning_.ready_for(sync_id)) return;
  const StartUpdate start = *std::exchange(deferred_, std::nullopt);
  start_update(start);
}

void SimWorker::announce(std::uint32_t producer, std::uint64_t slot_bytes,
                         const std::vector<PullDescription>& pulls) {
  const Digest128 digest = pulls_digest(pulls, plan_.ring_depth);
  Reserve reserve;
  reserve.slot_bytes = slot_bytes;
  reserve.ring_depth = plan_.ring_depth;
  reserve.num_consumers = model_.tables->num_consumers;
  reserve.workers_per_replica = effective_workers_per_replica(*model_.tables);
  reserve.digest_low = digest.low;
  reserve.digest_high = digest.high;
  reserve.pulls = encode_pulls(pulls);
  send({Role::kTrainer, producer}, std::move(reserve));
}

void SimWorker::recovery_reserved(std::uint32_t producer, const Status& status) {
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.recovery_reserved(now, producer, status, out);
  });
  const EndpointId endpoint = endpoint_to(producer);
  if (status.ok() || endpoint == 0 || down_) return;
  transport_->close(endpoint);
  on_closed(endpoint, status);
}

void SimWorker::tick() {
  after(kNanosPerSecond, [this] {
    drive_returning([&](std::int64_t now, ReturningActions& out) { returning_.tick(now, out); });
    drive([&](std::int64_t now, ConsumerActions& out) { machine_.tick(now, out); });
    decide([&](std::int64_t now, CommitActions& out) { commit_.tick(now, out); });
    try_start();
    tick();
  });
}

template <typename Event>
void SimWorker::drive(Event event) {
  ConsumerActions actions;
  event(world_.now_ns(), actions);
  for (const ConsumerAction& action : actions) std::visit([&](const auto& one) { perform(one); }, action);
  exit_when_quiet();
}

// Who is gone is told of by the control channel.
void SimWorker::send(const Member& to, ControlBody body) {
  (void)control_->send(to, std::move(body)).ok();
}

// ---- actions ------------------------------------------------------------------------------------

void SimWorker::perform(const consumer_action::SendPull& action) {
  ++pulls_;
  world_.trace("send_pull", consumer_, action.producer, action.pull.chunk);
  const HotHeader header = header_of(HotType::kPull, action.pull);
  const EndpointId endpoint = endpoint_to(action.producer);
  const Status status = transport_->send(endpoint, header, nullptr, 0);
  world_.maybe_again([this, endpoint, header] {
    if (!down_) (void)transport_->send(endpoint, header, nullptr, 0).ok();
  });
  if (!status.ok()) give_up(endpoint, status);
}

void SimWorker::give_up(EndpointId endpoint, const Status& why) {
  after(0, [this, endpoint, why] {
    if (!producer_of_.contains(endpoint)) return;
    transport_->close(endpoint);
    on_closed(endpoint, why);
  });
}

void SimWorker::perform(const consumer_action::AnnounceRecovery& action) {
  const std::uint32_t producer = action.producer;
  world_.trace("announce_recovery", consumer_, producer);
  const Status status = endpoint_of_.contains(producer) ? Status() : connect_to(producer);
  if (status.ok()) {
    const auto pulls = recovery_pulls_at(plan_, producer, effective_workers_per_replica(*model_.tables));
    return announce(producer, lane_slot_bytes(pulls), pulls);
  }
  returning_.unreachable(producer);
  after(1, [this, producer, status] { recovery_reserved(producer, status); });
}

void SimWorker::perform(const consumer_action::StartTransfer& action) {
  const Run& run = chunk_of(action.chunk).runs[action.run];
  if (scattering_slots_.contains(action.slot)) {
    world_.broken("worker {} reads chunk {} into slot {} while a scatter reads it", consumer_, action.chunk,
                  action.slot);
  }
  const RemoteRef& where = action.ready.entries.at(0).where;
  const Transfer transfer{
      machine_.sync_id(), action.chunk, action.run, {action.producer, where.region, where.offset}, reader()};
  world_.trace("transfer", consumer_, action.chunk, action.slot);
  readers_.begin(transfer.slot, transfer.reader);
  transfers_[next_token_] = transfer;
  transport_->read(endpoint_to(action.producer), where,
                   receive_ring_.data() + action.slot * plan_.receive_slot_bytes + run.offset, next_token_);
  ++next_token_;
}

void SimWorker::materialise(std::uint32_t chunk) {
  for (const std::uint32_t module : chunk_of(chunk).materialise) {
    for (std::uint32_t p = 0; p < recording_.parameters.size(); ++p) {
      if (recording_.parameters[p].module != module) continue;
      std::fill(landing()[p].begin() + kGuardBytes, landing()[p].end() - kGuardBytes, SimModel::kUnwritten);
    }
    for (const Fill& fill : recording_.fills) {
      if (recording_.parameters[fill.destination.parameter].module != module) continue;
      const std::uint64_t width = element_bytes(fill.destination.dtype);
      for (const std::uint64_t at : positions_of(fill.destination)) {
        std::fill_n(data_of(fill.destination.parameter) + at * width, width, std::byte{0});
      }
    }
  }
}

const Run& SimWorker::run_of(const Chunk& chunk, std::uint32_t key) const {
  return *std::find_if(chunk.runs.begin(), chunk.runs.end(), [&](const Run& run) {
    return key >= run.first_key && key < run.first_key + run.key_count;
  });
}

std::uint32_t SimWorker::producer_of(const Landing& landing, std::uint32_t key) const {
  const Chunk& chunk = chunk_of(landing.chunk);
  return landing.producers[static_cast<std::size_t>(&run_of(chunk, key) - chunk.runs.data())];
}

const Location& SimWorker::source_of(const Landing& landing, std::uint32_t key) const {
  const Chunk& chunk = chunk_of(landing.chunk);
  const Run& run = run_of(chunk, key);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> order;  // distinct (name, piece), by first use
  for (std::uint32_t k = run.first_key; k < run.first_key + run.key_count; ++k) {
    const std::pair piece(chunk.keys[k].name, chunk.keys[k].piece);
    if (std::find(order.begin(), order.end(), piece) == order.end()) order.push_back(piece);
  }
  const auto entry =
      std::find(order.begin(), order.end(), std::pair(chunk.keys[key].name, chunk.keys[key].piece));
  return landing.ready[static_cast<std::size_t>(&run - chunk.runs.data())].entries.at(
      static_cast<std::size_t>(entry - order.begin()));
}

std::vector<std::uint64_t> SimWorker::source_offsets(const Landing& landing, std::uint32_t key) const {
  const ChunkKey& planned = chunk_of(landing.chunk).keys[key];
  const Location& location = source_of(landing, key);
  const std::vector<std::int64_t>& shape = model_.shape_of(planned.name, planned.piece);
  std::vector<std::uint64_t> offsets = positions_of(planned.slice);
  for (std::uint64_t& at : offsets) {
    if (!location.stride.empty()) {
      std::uint64_t rest = std::exchange(at, 0);
      for (std::size_t d = shape.size(); d-- > 0;) {
        at += rest % static_cast<std::uint64_t>(shape[d]) * static_cast<std::uint64_t>(location.stride[d]);
        rest /= static_cast<std::uint64_t>(shape[d]);
      }
    }
    at *= element_bytes(planned.wire_dtype);
  }
  return offsets;
}

void SimWorker::arrived(Landing& landing, std::uint32_t key, std::span<std::byte> bytes) {
  const Chunk& chunk = chunk_of(landing.chunk);
  world_.maybe_flip(Failure::kArrivedBit, bytes);
  if (landing.sums.empty() || !landing.status.ok()) return;
  ++summed_keys_;
  landing.status =
      check_sum(*model_.tables, chunk.keys[key], producer_of(landing, key), bytes, landing.sums[key]);
}

void SimWorker::scatter(const Landing& landing, std::size_t index, const std::byte* packed) {
  const PlannedScatter& scatter = chunk_of(landing.chunk).scatters[index];
  const std::uint64_t width = element_bytes(chunk_of(landing.chunk).keys[scatter.key].wire_dtype);
  for (const std::uint64_t at : positions_of(scatter.destination)) {
    std::copy_n(packed, width, data_of(scatter.destination.parameter) + at * width);
    packed += width;
  }
}

std::vector<std::byte> SimWorker::copy_from_mapping(const Landing& landing, std::uint32_t key) {
  const std::uint64_t width = element_bytes(chunk_of(landing.chunk).keys[key].wire_dtype);
  const std::byte* const data = landing.mappings.at(key).data;
  std::vector<std::byte> bytes;
  for (const std::uint64_t at : source_offsets(landing, key))
    bytes.insert(bytes.end(), data + at, data + at + width);
  return bytes;
}

void SimWorker::read_direct(const std::shared_ptr<Landing>& landing) {
  const Chunk& chunk = chunk_of(landing->chunk);
  std::vector<std::vector<ReadPart>> parts(chunk.runs.size());
  for (const PlannedScatter& scatter : chunk.scatters) {
    const ChunkKey& key = chunk.keys[scatter.key];
    const RemoteRef& where = source_of(*landing, scatter.key).where;
    const std::uint64_t width = element_bytes(key.wire_dtype);
    const auto from = source_offsets(*landing, scatter.key), to = positions_of(scatter.destination);
    std::vector<ReadPart>& of_run =
        parts[static_cast<std::size_t>(&run_of(chunk, scatter.key) - chunk.runs.data())];
    for (std::size_t i = 0; i < from.size(); ++i) {
      std::byte* const local = data_of(scatter.destination.parameter) + to[i] * width;
      if (i > 0 && from[i] == from[i - 1] + width && to[i] == to[i - 1] + 1) {
        of_run.back().remote.bytes += width;
      } else {
        of_run.push_back({{where.region, where.generation, where.offset + from[i], width}, local});
      }
    }
  }
  for (std::size_t r = 0; r < parts.size(); ++r) {
    if (parts[r].empty()) continue;
    ++landing->reads_left;
    direct_reads_[next_token_] = landing;
    transport_->read_parts(endpoint_to(landing->producers[r]), std::move(parts[r]), next_token_);
    ++next_token_;
  }
}

void SimWorker::check_direct(Landing& landing) {
  const Chunk& chunk = chunk_of(landing.chunk);
  for (std::size_t i = 0; i < chunk.scatters.size(); ++i) {
    const PlannedScatter& planned = chunk.scatters[i];
    const std::uint64_t width = element_bytes(chunk.keys[planned.key].wire_dtype);
    std::vector<std::byte> bytes;
    for (const std::uint64_t at : positions_of(planned.destination)) {
      const std::byte* const element = data_of(planned.destination.parameter) + at * width;
      bytes.insert(bytes.end(), element, element + width);
    }
    arrived(landing, planned.key, bytes);
    scatter(landing, i, bytes.data());  // the damage, if any
  }
}

void SimWorker::finish(const Landing& landing) {
  for (const auto& place : landing.reads) readers_.end(place, landing.reader);
  const Status outcome = landing.status.ok() ? world_.outcome_of(Failure::kScatter) : landing.status;
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.scatter_done(now, landing.sync_id, landing.chunk, outcome, out);
  });
}

void SimWorker::perform(const consumer_action::StartScatter& action) {
  const std::uint32_t slot = action.slot;
  world_.trace("scatter", consumer_, action.chunk, slot);
  scattering_slots_.insert(slot);
  std::byte* const data = receive_ring_.data() + slot * plan_.receive_slot_bytes;
  auto landing = std::make_shared<Landing>();
  landing->sync_id = machine_.sync_id();
  landing->chunk = action.chunk;
  landing->producers = action.producers;
  landing->sums = action.sums;
  materialise(action.chunk);
  in_pieces(
      chunk_of(action.chunk).scatters.size(), kPieceNs,
      [this, landing, data](std::size_t i) {
        const std::uint32_t key = chunk_of(landing->chunk).scatters[i].key;
        const ChunkKey& planned = chunk_of(landing->chunk).keys[key];
        arrived(*landing, key, {data + planned.offset, planned.bytes});
        if (landing->status.ok()) scatter(*landing, i, data + planned.offset);
      },
      [this, landing, slot, data] {
        std::fill_n(data, plan_.receive_slot_bytes, kScattered);
        scattering_slots_.erase(slot);
        finish(*landing);
      });
}

void SimWorker::perform(const consumer_action::StartCopy& action) {
  const Chunk& chunk = chunk_of(action.chunk);
  world_.trace("copy", consumer_, action.chunk);
  auto landing = std::make_shared<Landing>();
  landing->sync_id = machine_.sync_id();
  landing->chunk = action.chunk;
  landing->producers = action.producers;
  landing->ready = action.ready;
  landing->reader = reader();
  for (std::size_t r = 0; r < action.ready.size(); ++r) {
    const ReadyInfo& ready = action.ready[r];
    landing->sums.insert(landing->sums.end(), ready.sums.begin(), ready.sums.end());
    for (const Location& entry : ready.entries) {
      landing->reads.emplace_back(action.producers[r], entry.where.region, SlotReaders::kMapped);
      readers_.begin(landing->reads.back(), landing->reader);
    }
  }
  materialise(action.chunk);
  if (chunk.path == Path::kDirect && !action.ready.empty()) {
    ++direct_chunks_;
    return read_direct(landing);
  }
  if (!action.ready.empty()) {
    ++mapped_chunks_;
    for (std::uint32_t key = 0; key < chunk.keys.size() && landing->status.ok(); ++key) {
      auto mapping = transport_->map(endpoint_to(producer_of(*landing, key)), source_of(*landing, key).where);
      landing->status = mapping.status();
      if (mapping.ok()) landing->mappings.emplace(key, std::move(*mapping));
    }
  }
  in_pieces(
      chunk.scatters.size(), kPieceNs,
      [this, landing](std::size_t i) {
        if (!landing->status.ok()) return;
        const std::uint32_t key = chunk_of(landing->chunk).scatters[i].key;
        std::vector<std::byte> bytes = copy_from_mapping(*landing, key);
        arrived(*landing, key, bytes);
        if (landing->status.ok()) scatter(*landing, i, bytes.data());
      },
      [this, landing] { finish(*landing); });
}

void SimWorker::check_parameter(std::uint32_t parameter, const std::vector<std::uint64_t>& versions,
                                std::string_view when) {
  const std::vector<std::byte> expected = model_.expected(consumer_, parameter, versions);
  const std::vector<std::byte>& memory = parameters_[parameter];
  const RecordedParameter& p = recording_.parameters[parameter];
  const std::string name = fmt::format("{}.{}", recording_.modules[p.module].name, p.name);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (memory[kGuardBytes + i] == expected[i]) continue;
    return world_.broken("worker {} {}: byte {} of {} is {:#04x}, not {:#04x}", consumer_, when, i, name,
                         static_cast<int>(memory[kGuardBytes + i]), static_cast<int>(expected[i]));
  }
  const auto guard = [](std::byte byte) { return byte == kGuard; };
  if (!std::all_of(memory.begin(), memory.begin() + kGuardBytes, guard) ||
      !std::all_of(memory.end() - kGuardBytes, memory.end(), guard)) {
    world_.broken("worker {} {}: bytes beside {} were written", consumer_, when, name);
  }
}

void SimWorker::verify() {
  for (std::uint32_t p = 0; p < parameters_.size(); ++p) {
    const ModuleState& state = machine_.modules()[recording_.parameters[p].module];
    if (state.kind != ModuleState::Kind::kCurrent && state.kind != ModuleState::Kind::kUnset) continue;
    const std::uint64_t version = state.kind == ModuleState::Kind::kCurrent ? state.version : 0;
    check_parameter(p, std::vector<std::uint64_t>(versions_.size(), version), "between syncs");
  }
}

void SimWorker::perform(const consumer_action::StartPost& action) {
  const std::uint32_t chunk = action.chunk;
  const std::uint64_t sync_id = machine_.sync_id();
  world_.trace("post", consumer_, chunk);
  later(20 * kPieceNs, [this, chunk, sync_id] {
    for (const std::uint32_t module : chunk_of(chunk).post_process) {
      if (world_.disowned(consumer_)) break;
      for (std::uint32_t p = 0; p < recording_.parameters.size(); ++p) {
        if (recording_.parameters[p].module == module) check_parameter(p, versions_, "in its hook");
      }
    }
    const Status outcome = world_.outcome_of(Failure::kHook);
    drive([&](std::int64_t now, ConsumerActions& out) {
      machine_.post_done(now, sync_id, chunk, outcome, out);
    });
  });
}

void SimWorker::perform(const consumer_action::StartCommit&) {
  world_.trace("commit", consumer_, machine_.sync_id());
  later(20 * kPieceNs, [this, sync_id = machine_.sync_id()] {
    for (std::uint32_t p = 0; p < parameters_.size(); ++p) {
      if (model_.touches(consumer_, recording_.parameters[p].module, names_)) parameters_[p] = stage_[p];
    }
    drive([&](std::int64_t now, ConsumerActions& out) { machine_.commit_done(now, sync_id, {}, out); });
  });
}

void SimWorker::perform(const consumer_action::SendSignals& action) {
  for (const std::uint32_t group : action.groups) {
    world_.trace("signal", consumer_, action.producer, group);
    if (machine_.state() == WorkerState::kFailed) continue;  // what it gives up, not what it has received
    if (!signalled_.emplace(action.producer, group).second && !model_.options.faults) {
      world_.broken("worker {} signals group {} to trainer {} twice", consumer_, group, action.producer);
    }
  }
  const EndpointId endpoint = endpoint_to(action.producer);
  if (endpoint == 0) {
    const FreeGroups free{action.sync_id, action.groups};
    world_.maybe_again([this, to = action.producer, free] {
      if (!down_) send({Role::kTrainer, to}, free);
    });
    return send({Role::kTrainer, action.producer}, free);
  }
  HotHeader header;
  header.type = HotType::kFree;
  header.sync_id = action.sync_id;
  header.consumer = consumer_;
  const auto payload = encode(std::vector<FreeEntry>{{consumer_, action.groups}});
  const Status status = transport_->send(endpoint, header, payload.data(), payload.size());
  if (!status.ok()) give_up(endpoint, status);
  world_.maybe_again([this, endpoint, header, payload] {
    if (!down_) (void)transport_->send(endpoint, header, payload.data(), payload.size()).ok();
  });
}

void SimWorker::perform(const consumer_action::LeaveLanes& action) {
  world_.trace("leave_lanes", consumer_, action.producer);
  const LeaveLanes leave{action.sync_id};
  world_.maybe_again([this, to = action.producer, leave] {
    if (!down_) send({Role::kTrainer, to}, leave);
  });
  send({Role::kTrainer, action.producer}, leave);
}

void SimWorker::perform(const consumer_action::UpdateDone& action) {
  world_.trace("update_done", consumer_, action.sync_id, action.status.ok());
  if (action.status.ok() && !returning_.any_lost()) {
    std::size_t owners = 0;
    const std::vector<bool> visited = listed_groups(names_, *model_.tables);
    for (std::uint32_t g = 0; g < visited.size(); ++g)
      owners += visited[g] ? plan_.group_owners[g].size() : 0;
    if (signalled_.size() != owners || confirmed_.size() != owners) {
      world_.broken("worker {} is prepared with {} signals sent and {} confirmed of {}", consumer_,
                    signalled_.size(), confirmed_.size(), owners);
    }
  }
  Prepared prepared;
  prepared.sync_id = action.sync_id;
  prepared.status = action.status;
  send(kSender, prepared);
  commit_.update_done(action.sync_id, action.status);
  if (!action.status.ok() && !commit_.deciding()) decided_.emplace(action.sync_id, false);
  if (!action.status.ok()) start_deferred();
}
void SimWorker::perform(const consumer_action::FinishDone& action) {
  world_.trace("finish_done", consumer_, action.sync_id, action.status.ok());
  if (action.status.ok()) {
    for (std::uint32_t p = 0; p < parameters_.size(); ++p) {
      if (model_.touches(consumer_, recording_.parameters[p].module, names_))
        check_parameter(p, versions_, "after its commit");
    }
  }
  send(kSender, Finished{action.sync_id, action.status});
  start_deferred();
}
void SimWorker::perform(const consumer_action::ReportFailure& action) {
  send(kSender, SyncFailed{action.sync_id, action.status});
}

// ---- mates --------------------------------------------------------------------------------------

template <typename Event>
void SimWorker::decide(Event event) {
  CommitActions actions;
  event(world_.now_ns(), actions);
  for (const CommitAction& action : actions) std::visit([&](const auto& one) { perform(one); }, action);
  exit_when_quiet();
}

HotHeader SimWorker::to_mate(HotType type, std::uint64_t sync_id, std::uint32_t mate,
                             std::uint32_t round) const {
  HotHeader header;
  header.type = type;
  header.sync_id = sync_id;
  header.consumer = consumer_;
  header.target = mate;
  header.seq = round;
  return header;
}

void SimWorker::unreachable_mate(std::uint32_t mate) {
  after(1, [this, mate] {
    decide([&](std::int64_t now, CommitActions& out) { commit_.unreachable(now, mate, out); });
  });
}

void SimWorker::perform(const commit_action::AskMate& action) {
  world_.trace("ask_mate", consumer_, action.mate, action.round, static_cast<int>(action.word));
  ++mates_asked_;
  const std::uint32_t id = action.mate;
  Mate& mate = mates_.at(id);
  if (mate.life == 0) return unreachable_mate(id);
  if (mate.endpoint == 0) {
    const auto endpoint = transport_->connect(fmt::format("sim:worker-{}", id), 0);
    if (!endpoint.ok()) return unreachable_mate(id);
    mate.endpoint = *endpoint;
    to_mates_[*endpoint] = id;
  }
  const std::vector<std::byte> payload = encode_outcome(static_cast<std::uint8_t>(action.word));
  (void)transport_
      ->send(mate.endpoint, to_mate(HotType::kAsk, action.sync_id, id, action.round), payload.data(),
             payload.size())
      .ok();
}

void SimWorker::perform(const commit_action::AnswerMate& action) {
  world_.trace("answer_mate", consumer_, action.mate, action.round, static_cast<int>(action.word));
  const std::vector<std::byte> payload = encode_outcome(static_cast<std::uint8_t>(action.word));
  for (const auto& [endpoint, mate] : from_mates_) {
    if (mate != action.mate) continue;
    (void)transport_
        ->send(endpoint, to_mate(HotType::kOutcome, action.sync_id, action.mate, action.round),
               payload.data(), payload.size())
        .ok();
  }
}

void SimWorker::perform(const commit_action::Commit& action) {
  world_.trace("decided", consumer_, action.sync_id);
  decided_[action.sync_id] = true;
  if (!told_by_sender_) ++mates_committed_;
  Status status;
  drive([&](std::int64_t now, ConsumerActions& out) {
    status = machine_.finish_update(now, action.sync_id, out);
  });
  if (!status.ok()) send(kSender, Finished{action.sync_id, status});
}

void SimWorker::perform(const commit_action::Abort& action) {
  world_.trace("abort", consumer_, action.sync_id);
  decided_.emplace(action.sync_id, false);
  send(kSender, SyncFailed{action.sync_id, action.why});
  drive([&](std::int64_t now, ConsumerActions& out) { machine_.fail(now, action.sync_id, action.why, out); });
}

bool SimWorker::from_mate(EndpointId endpoint, const HotHeader& header, const std::byte* payload) {
  const auto from = from_mates_.find(endpoint), to = to_mates_.find(endpoint);
  if (from == from_mates_.end() && to == to_mates_.end()) return false;
  const auto mate = mates_.find(header.consumer);
  if (mate == mates_.end() || mate->second.life != header.incarnation) {  // of another life
    transport_->close(endpoint);
    return mate_closed(endpoint);
  }
  const auto word = decode_outcome(payload, header.length);
  if (!word.ok()) world_.broken("{}", word.status().to_string());
  if (from != from_mates_.end()) {
    from->second = header.consumer;
    decide([&](std::int64_t now, CommitActions& out) {
      commit_.asked(now, header.consumer, header.sync_id, header.seq, static_cast<CommitWord>(*word), out);
    });
  } else {
    decide([&](std::int64_t now, CommitActions& out) {
      commit_.answered(now, header.consumer, header.sync_id, header.seq, static_cast<CommitWord>(*word), out);
    });
  }
  return true;
}

bool SimWorker::mate_closed(EndpointId endpoint) {
  if (from_mates_.erase(endpoint) != 0) return true;
  const auto found = to_mates_.find(endpoint);
  if (found == to_mates_.end()) return false;
  const std::uint32_t id = found->second;
  to_mates_.erase(found);
  mates_.at(id).endpoint = 0;
  decide([&](std::int64_t now, CommitActions& out) { commit_.connection_broke(now, id, out); });
  return true;
}

// ---- what arrives -------------------------------------------------------------------------------

void SimWorker::on_accepted(EndpointId endpoint) {
  from_mates_[endpoint] = consumer_;
}
void SimWorker::on_closed(EndpointId endpoint, const Status& why) {
  if (mate_closed(endpoint)) return;
  const auto it = producer_of_.find(endpoint);
  if (it == producer_of_.end()) return;
  const std::uint32_t producer = it->second;
  producer_of_.erase(it);
  const auto waiting = waiting_.find(producer);
  if (waiting != waiting_.end() && waiting->second == endpoint) {
    drive_returning([&](std::int64_t, ReturningActions& out) { returning_.failed(producer, why, out); });
    return try_start();
  }
  endpoint_of_.erase(producer);
  if (!joined_) return end();
  const Status named(
      StatusCode::kUnavailable,
      fmt::format("trainer {} closed its hot endpoint: {}", producer, why.message()),
      {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = fmt::format("trainer {}", producer)});
  returning_.unreachable(producer);
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.producer_unreachable(now, producer, named, out);
  });
}

void SimWorker::on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) {
  if (from_mate(endpoint, header, payload)) return;
  const std::uint32_t producer = producer_of_.at(endpoint);
  const PullId pull = pull_of(header);
  if (header.type == HotType::kReady) {
    auto decoded = decode_ready(payload, header.length);
    if (!decoded.ok()) return world_.broken("{}", decoded.status().to_string());
    const auto chunk = chunks_.find(pull.chunk);
    ReadyInfo ready =
        ready_info(std::move(*decoded), chunk != chunks_.end() ? chunk->second->path : Path::kPacked);
    drive([&](std::int64_t now, ConsumerActions& out) {
      machine_.ready(now, producer, pull, std::move(ready), out);
    });
  } else if (header.type == HotType::kFail) {
    const Status why = decode_status(payload, header.length);
    drive(
        [&](std::int64_t now, ConsumerActions& out) { machine_.pull_failed(now, producer, pull, why, out); });
  } else if (header.type == HotType::kFreeAck) {
    const auto entries = decode_free(payload, header.length);
    if (!entries.ok()) return world_.broken("{}", entries.status().to_string());
    for (const FreeEntry& entry : *entries) confirmed(producer, header.sync_id, entry.groups);
  }
}

void SimWorker::confirmed(std::uint32_t producer, std::uint64_t sync_id,
                          const std::vector<std::uint32_t>& groups) {
  if (sync_id == machine_.sync_id()) {
    for (const std::uint32_t group : groups) confirmed_.emplace(producer, group);
  }
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.signals_acked(now, producer, sync_id, groups, out);
  });
}

void SimWorker::on_read_done(ReadToken token, const Status& status) {
  if (const auto direct = direct_reads_.find(token); direct != direct_reads_.end()) {
    const std::shared_ptr<Landing> landing = direct->second;
    direct_reads_.erase(direct);
    const Status outcome = status.ok() ? world_.outcome_of(Failure::kTransfer) : status;
    if (landing->status.ok()) landing->status = outcome;
    if (--landing->reads_left != 0) return;
    if (landing->status.ok()) check_direct(*landing);
    return finish(*landing);
  }
  const auto it = transfers_.find(token);
  if (it == transfers_.end()) return world_.broken("a read that nobody started");
  const Transfer transfer = it->second;
  transfers_.erase(it);
  readers_.end(transfer.slot, transfer.reader);
  const Status outcome = status.ok() ? world_.outcome_of(Failure::kTransfer) : status;
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.transfer_done(now, transfer.sync_id, transfer.chunk, transfer.run, outcome, out);
  });
}

void SimWorker::on_member_up(const Member& member, Incarnation life) {
  if (const auto mate = mates_.find(member.id); member.role == Role::kWorker && mate != mates_.end()) {
    if (mate->second.endpoint != 0) {
      transport_->close(mate->second.endpoint);
      to_mates_.erase(mate->second.endpoint);
    }
    if (mate->second.life != 0) unreachable_mate(member.id);
    mate->second = Mate{};
    mate->second.life = life;
  }
  if (member.role == Role::kTrainer) ranks_up_[member.id] = life;
  if (member == kSender) send(kSender, InitRequest{});
}
void SimWorker::on_member_lost(const Member& member, Incarnation, const Status& why) {
  if (member.role != Role::kTrainer) return;
  const Status named(StatusCode::kUnavailable,
                     fmt::format("{} is lost: {}", to_string(member), why.message()),
                     {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = to_string(member)});
  ranks_up_.erase(member.id);
  drive_returning([&](std::int64_t, ReturningActions& out) { returning_.producer_lost(member.id, out); });
  drive([&](std::int64_t now, ConsumerActions& out) { machine_.producer_lost(now, member.id, named, out); });
  if (member == kSender) {
    decide([&](std::int64_t now, CommitActions& out) { commit_.sender_lost(now, named, out); });
    end();
  } else if (!joined_) {
    end();
  } else {
    try_start();
  }
}

// The fleet is over for this worker: its process ends once its memory is quiet.
void SimWorker::end() {
  ended_ = true;
  exit_when_quiet();
}
void SimWorker::start_deferred() {
  after(1, [this] { try_start(); });
}
void SimWorker::exit_when_quiet() {
  if (ended_ && !being_decided()) after(0, [this] { shutdown(); });
}
bool SimWorker::being_decided() const {
  const WorkerState state = machine_.state();
  return commit_.deciding() || machine_.in_flight() || state == WorkerState::kUpdating ||
         state == WorkerState::kPrepared || state == WorkerState::kCommitting;
}

void SimWorker::on_control(const Member& from, Incarnation, ControlBody body) {
  if (auto* reserved = std::get_if<ReserveReply>(&body)) {
    if (reserved->lane_kind == static_cast<std::uint32_t>(LaneKind::kRecovery))
      return recovery_reserved(from.id, reserved->status);
    bool answers = false;
    drive_returning([&](std::int64_t, ReturningActions& out) {
      answers = returning_.reserved(from.id, reserved->status, out);
    });
    if (answers) return try_start();
    if (!reserved->status.ok())
      return world_.broken("reserve of worker {}: {}", consumer_, reserved->status.to_string());
    waiting_reserves_.erase(from.id);
    join();
  } else if (auto* payload = std::get_if<InitPayload>(&body)) {
    trainers_ = payload->trainers;
    later(20 * kNanosPerMilli, [this] { connect_and_reserve(); });
  } else if (auto* returned = std::get_if<TrainerReturned>(&body)) {
    producer_returned(*returned);
  } else if (auto* start = std::get_if<StartUpdate>(&body)) {
    deferred_ = std::move(*start);
    try_start();
  } else if (auto* update = std::get_if<Update>(&body)) {
    Status status;
    drive([&](std::int64_t now, ConsumerActions& out) { status = machine_.update(now, out); });
    if (!status.ok()) {
      Prepared prepared;
      prepared.sync_id = update->sync_id;
      prepared.status = status;
      send(kSender, prepared);
    }
  } else if (auto* finish = std::get_if<Finish>(&body)) {
    Status status;
    told_by_sender_ = true;
    decide([&](std::int64_t, CommitActions& out) { status = commit_.finish(finish->sync_id, out); });
    told_by_sender_ = false;
    if (!status.ok()) send(kSender, Finished{finish->sync_id, status});
  } else if (auto* failed = std::get_if<SyncFailed>(&body)) {
    if (deferred_ && deferred_->sync_id == failed->sync_id) {  // it never started here
      deferred_.reset();
      Prepared prepared;
      prepared.sync_id = failed->sync_id;
      prepared.status = failed->status;
      return send(kSender, prepared);
    }
    if (!commit_.heeds_failure(failed->sync_id)) return;
    drive([&](std::int64_t now, ConsumerActions& out) {
      machine_.fail(now, failed->sync_id, failed->status, out);
    });
  } else if (auto* acked = std::get_if<FreeAck>(&body)) {
    confirmed(from.id, acked->sync_id, acked->groups);
  }
}

void SimWorker::start_update(const StartUpdate& start) {
  drive_returning([&](std::int64_t, ReturningActions& out) { returning_.start(start.sync_id, out); });
  std::shared_ptr<const WorkerPlan> part;
  if (!start.names.empty()) {
    auto& kept = parts_[start.names];
    if (!kept) {
      auto plan = restrict_plan(plan_, recording_, *model_.tables, start.names);
      if (!plan.ok()) return send(kSender, UpdateStarted{start.sync_id, plan.status()});
      kept = std::make_shared<const WorkerPlan>(std::move(*plan));
    }
    part = kept;
  }
  Status status = commit_.start(start.sync_id);
  if (status.ok()) {
    drive([&](std::int64_t now, ConsumerActions& out) {
      status = machine_.start_update(now, start.sync_id, start.version, part, out);
    });
    if (!status.ok()) commit_.update_done(start.sync_id, status);
  }
  if (status.ok()) {
    version_ = start.version;
    names_ = start.names;
    running_ = part ? part : model_.plans[consumer_];
    chunks_.clear();
    for (const Chunk& chunk : running_->chunks) chunks_[chunk.chunk_id] = &chunk;
    for (std::uint32_t name = 0; name < versions_.size(); ++name) {
      if (listed(names_, name)) versions_[name] = start.version;
    }
    signalled_.clear();
    confirmed_.clear();
  }
  send(kSender, UpdateStarted{start.sync_id, status});
}

void SimWorker::shutdown() {
  if (down_) return;
  drive([&](std::int64_t, ConsumerActions& out) { machine_.shutdown(out); });
  if (machine_.in_flight()) world_.broken("worker {} shuts down with work in flight", consumer_);
  if (commit_.deciding()) world_.broken("worker {} shuts down while its mates need its word", consumer_);
  if (control_) control_->shutdown();
  stop();
}

void SimWorker::crash() {
  if (down_) return;
  crashed_ = true;
  world_.control().crash({Role::kWorker, consumer_});
  stop();
}

void SimWorker::stop() {
  world_.trace("stop", 2, consumer_);
  down_ = true;
  readers_.forget(consumer_, incarnation());
  world_.remove_transport(*transport_);
  transport_.reset();
}

}  // namespace shardpull::sim
