#include "runtime/producer_server.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/encoder.h"
#include "base/fault_hooks.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "hot/pulls.h"
#include "tensor/checksum.h"
#include "tensor/copy_sum.h"
#include "tensor/shape.h"

namespace shardpull {
namespace {

using PieceId = std::pair<std::uint32_t, std::uint32_t>;

bool is_contiguous(const PublishedView& view) {
  return view.location.stride.empty();
}

}  // namespace

ProducerServer::ProducerServer(ProgressThread& progress, std::uint32_t rank, FleetToken token,
                               Incarnation incarnation, ProducerHooks hooks)
    : progress_(progress),
      rank_(rank),
      token_(token),
      incarnation_(incarnation),
      hooks_(std::move(hooks)),
      packs_(1) {}

ProducerServer::~ProducerServer() = default;

void ProducerServer::stop() {
  packs_.stop();
}

void ProducerServer::add_memory(std::shared_ptr<ExportedMemory> memory) {
  bool known = false;
  std::erase_if(memory_, [&](const std::weak_ptr<ExportedMemory>& each) {
    known = known || (!each.owner_before(memory) && !memory.owner_before(each));
    return each.expired();
  });
  if (known) return;
  for (const auto& [id, endpoint] : endpoints_) {
    if (endpoint.consumer)
      progress_.transport().grant(id, memory).ignore();  // a broken endpoint reports on_closed
  }
  memory_.push_back(std::move(memory));
}

std::vector<std::shared_ptr<ExportedMemory>> ProducerServer::live_memory() {
  std::vector<std::shared_ptr<ExportedMemory>> live;
  std::erase_if(memory_, [&](const std::weak_ptr<ExportedMemory>& each) {
    if (auto memory = each.lock()) live.push_back(std::move(memory));
    return each.expired();
  });
  return live;
}

void ProducerServer::start(std::shared_ptr<const InitTables> tables, std::int64_t stall_timeout_ns,
                           bool fail_on_consumer_loss) {
  tables_ = std::move(tables);
  machine_ =
      std::make_unique<ProducerMachine>(ProducerConfig{.rank = rank_,
                                                       .tables = tables_,
                                                       .stall_timeout_ns = stall_timeout_ns,
                                                       .fail_on_consumer_loss = fail_on_consumer_loss});
}

// ---- events
// -----------------------------------------------------------------------------------------------------------

template <typename Event>
void ProducerServer::drive(Event event) {
  if (machine_ == nullptr) return;
  ProducerActions actions;
  event(progress_.clock().now_ns(), actions);
  perform(actions);
}

Status ProducerServer::begin_sync(std::uint64_t sync_id, std::uint64_t version,
                                  const std::vector<std::uint32_t>& live,
                                  const std::vector<std::uint32_t>& groups, const NameSet& names) {
  Status status;
  data_.clear();
  names_of_group_.clear();
  packs_done_ = packed_bytes_ = 0;
  running_sync_ = sync_id;
  // Those of pulls that no table has any more: of another set of names.
  std::erase_if(programs_, [](const auto& each) { return each.second.pull.use_count() <= 1; });
  drive([&](std::int64_t now, ProducerActions& out) {
    status = machine_->begin_sync(now, sync_id, version, live, groups, names, out);
  });
  return status;
}

Status ProducerServer::publish_group(std::uint32_t group, std::vector<ServedTensor> tensors) {
  std::vector<PublishedView> views;
  std::vector<PieceId>& names = names_of_group_[group];
  for (ServedTensor& tensor : tensors) {
    const PieceId id(tensor.view.name, tensor.view.piece);
    data_[id] = tensor.data;
    names.push_back(id);
    views.push_back(std::move(tensor.view));
  }
  Status status;
  drive([&](std::int64_t now, ProducerActions& out) {
    status = machine_->publish_group(now, group, std::move(views), out);
  });
  return status;
}

Status ProducerServer::end_sync() {
  Status status;
  drive([&](std::int64_t now, ProducerActions& out) { status = machine_->end_sync(now, out); });
  return status;
}

void ProducerServer::fail(std::uint64_t sync_id, const Status& why) {
  drive([&](std::int64_t, ProducerActions& out) { machine_->fail(sync_id, why, out); });
}

void ProducerServer::reserve(std::uint32_t consumer, Incarnation incarnation, std::uint64_t slot_bytes,
                             std::uint32_t ring_depth, std::uint32_t num_consumers,
                             std::uint32_t workers_per_replica, const Digest128& digest,
                             const std::vector<std::byte>& encoded) {
  if (machine_ == nullptr) {
    hooks_.reserve_reply(consumer, LaneKind::kRegular,
                         Status(StatusCode::kFailedPrecondition,
                                fmt::format("trainer {} has not finished trainer_init", rank_),
                                {.reason = Reason::kWrongState, .retryable = true}));
    return;
  }
  auto pulls = decode_pulls(encoded.data(), encoded.size());
  if (!pulls.ok()) {
    hooks_.reserve_reply(consumer, LaneKind::kRegular, pulls.status());
    return;
  }
  programs_.clear();  // compiled again at the next pack; descriptions of a replaced worker do not pile up
  drive([&](std::int64_t now, ProducerActions& out) {
    machine_->reserve(now, consumer, incarnation, slot_bytes, ring_depth, num_consumers, workers_per_replica,
                      digest, std::move(*pulls), out);
  });
}

void ProducerServer::signal(std::uint32_t consumer, Incarnation incarnation, std::uint64_t sync_id,
                            const std::vector<std::uint32_t>& groups) {
  drive([&](std::int64_t now, ProducerActions& out) {
    machine_->signal(now, incarnation, sync_id, consumer, groups, out, /*by_control=*/true);
  });
}

void ProducerServer::leave_lanes(std::uint32_t consumer, Incarnation incarnation, std::uint64_t sync_id) {
  drive([&](std::int64_t now, ProducerActions& out) {
    machine_->leave_lanes(now, incarnation, sync_id, consumer, out);
  });
}

void ProducerServer::consumer_up(std::uint32_t consumer, Incarnation incarnation) {
  drive([&](std::int64_t now, ProducerActions& out) {
    machine_->consumer_up(now, consumer, incarnation, out);
  });
}

void ProducerServer::consumer_lost(std::uint32_t consumer, const Status& why) {
  drive([&](std::int64_t now, ProducerActions& out) { machine_->consumer_lost(now, consumer, why, out); });
}

void ProducerServer::tick() {
  drive([&](std::int64_t now, ProducerActions& out) { machine_->tick(now, out); });
}

void ProducerServer::shutdown() {
  drive([&](std::int64_t, ProducerActions& out) { machine_->shutdown(out); });
}

// ---- from the transport
// -----------------------------------------------------------------------------------------------

void ProducerServer::on_accepted(EndpointId endpoint) {
  endpoints_[endpoint] = {};
}

void ProducerServer::refuse(EndpointId endpoint, const Status& why) {
  log_warn("closing a hot endpoint: {}", why.to_string());
  endpoints_.erase(endpoint);
  progress_.transport().close(endpoint);
}

void ProducerServer::on_message(EndpointId id, const HotHeader& header, const std::byte* payload) {
  const auto found = endpoints_.find(id);
  if (found == endpoints_.end()) return;
  Endpoint& endpoint = found->second;
  if (header.token != token_) {
    refuse(id, Status(StatusCode::kUnauthenticated,
                      fmt::format("worker {} has another fleet token", header.consumer),
                      {.reason = Reason::kBadToken, .fault = Fault::kPeer}));
    return;
  }
  if (header.type == HotType::kHello) {
    endpoint = {header.consumer, header.incarnation};
    Status refused;
    ByteReader reader({payload, header.length}, "hello");
    std::uint32_t slice_format = 0;
    if (reader.u32(slice_format).ok() && slice_format != kSliceFormatVersion) {
      refused = Status(StatusCode::kFailedPrecondition,
                       fmt::format("slice format versions differ: worker {} has {}, trainer {} has {}",
                                   header.consumer, slice_format, rank_, kSliceFormatVersion),
                       {.reason = Reason::kVersionMismatch, .fault = Fault::kPeer});
    } else if (!reader.end().ok() || header.length == 0) {
      refused = Status(StatusCode::kInvalidArgument,
                       fmt::format("worker {} sent a malformed hello", header.consumer),
                       {.reason = Reason::kVersionMismatch, .fault = Fault::kPeer});
    }
    if (refused.ok()) {
      for (const auto& memory : live_memory()) progress_.transport().grant(id, memory).ignore();
      // The ring of its sharing group may exist already: its mates reserved before it, or it is a restarted
      // worker.
      for (const auto& [ring_id, ring] : rings_) {
        if (reads_ring(header.consumer, ring_id)) progress_.transport().grant(id, ring.memory).ignore();
      }
    }
    const std::vector<std::byte> why = refused.ok() ? std::vector<std::byte>() : encode(refused);
    HotHeader answer;
    answer.type = HotType::kHelloReply;
    answer.token = token_;
    answer.incarnation = incarnation_;
    answer.consumer = header.consumer;
    progress_.transport().send(id, answer, why.data(), why.size()).ignore();
    return;
  }
  if (!endpoint.consumer || *endpoint.consumer != header.consumer ||
      endpoint.incarnation != header.incarnation) {
    refuse(id, Status(StatusCode::kUnauthenticated,
                      fmt::format("a message of worker {} on an endpoint that did not say hello as it",
                                  header.consumer),
                      {.reason = Reason::kBadToken, .fault = Fault::kPeer}));
    return;
  }
  const std::uint32_t consumer = header.consumer;
  if (header.type == HotType::kPull) {
    const PullId pull = pull_of(header);
    log_.pulled(pull.sync_id, consumer, pull.chunk, pull.run, progress_.clock().now_ns());
    drive(
        [&](std::int64_t now, ProducerActions& out) { machine_->pull(now, header.incarnation, pull, out); });
  } else if (header.type == HotType::kFree) {
    auto entries = decode_free(payload, header.length);
    if (!entries.ok()) {
      refuse(id, entries.status());
      return;
    }
    drive([&](std::int64_t now, ProducerActions& out) {
      for (const FreeEntry& entry : *entries)
        machine_->signal(now, header.incarnation, header.sync_id, entry.consumer, entry.groups, out);
    });
  } else {
    refuse(id, Status(StatusCode::kInvalidArgument,
                      fmt::format("hot message type {} is not for a producer", static_cast<int>(header.type)),
                      {.reason = Reason::kBadArgument, .fault = Fault::kPeer}));
  }
}

void ProducerServer::on_closed(EndpointId endpoint, const Status&) {
  // Whether the worker is lost, or has left its lanes, is for the control channel to say: it may read here
  // still.
  endpoints_.erase(endpoint);
}

// ---- actions
// ----------------------------------------------------------------------------------------------------------

void ProducerServer::perform(ProducerActions& actions) {
  for (ProducerAction& action : actions) std::visit([this](auto& each) { perform(each); }, action);
}

bool ProducerServer::reads_ring(std::uint32_t consumer, std::uint32_t ring) const {
  const std::uint32_t sharing = effective_workers_per_replica(*tables_);
  return ring == consumer % sharing || ring == sharing + consumer;
}

EndpointId ProducerServer::endpoint_of(std::uint32_t consumer, Incarnation incarnation) const {
  EndpointId latest = 0;  // one before it may be broken, and not be known to be
  for (const auto& [id, endpoint] : endpoints_) {
    if (endpoint.consumer == consumer && endpoint.incarnation == incarnation) latest = id;
  }
  return latest;
}

void ProducerServer::perform(producer_action::AllocateRing& action) {
  const std::uint32_t sharing_group = action.sharing_group;
  const auto product = checked_mul(action.slot_bytes, std::uint64_t{action.slots});
  const std::uint64_t bytes = product.value_or(0);
  Status status;
  if (!product) {
    status = Status(StatusCode::kInvalidArgument,
                    fmt::format("a serve ring of {} slots of {} bytes does not fit an address space",
                                action.slots, action.slot_bytes),
                    {.reason = Reason::kLimit, .fault = Fault::kPeer});
  } else if (bytes != 0) {
    auto memory = progress_.transport().allocate(bytes, "serve ring");
    if (memory.ok()) {
      Ring& ring = rings_[sharing_group];
      ring_bytes_ += bytes - (ring.memory ? ring.memory->ref().bytes : 0);
      ring = {*memory, action.slot_bytes};
      for (const auto& [id, endpoint] : endpoints_) {
        if (endpoint.consumer && reads_ring(*endpoint.consumer, sharing_group))
          progress_.transport().grant(id, *memory).ignore();
      }
    } else {
      status = Status(
          memory.status().code(),
          fmt::format("{}: a serve ring of {} slots of {}; a smaller max_chunk_bytes or ring_depth lowers it",
                      memory.status().message(), action.slots, format_bytes(action.slot_bytes)),
          memory.status().info());
    }
  }
  progress_.post([this, sharing_group, status] {
    drive([&](std::int64_t now, ProducerActions& out) {
      machine_->ring_allocated(now, sharing_group, status, out);
    });
  });
}

void ProducerServer::perform(producer_action::ReserveReply& action) {
  hooks_.reserve_reply(action.consumer, action.lane, action.status);
}

Result<ProducerServer::Programs> ProducerServer::programs_for(
    const std::shared_ptr<const PullDescription>& pull, const std::vector<PublishedView>& sources) const {
  auto programs = std::make_shared<std::vector<CopyProgram>>();
  for (const ChunkKey& key : pull->keys) {
    const auto view = std::find_if(sources.begin(), sources.end(), [&](const PublishedView& each) {
      return each.name == key.name && each.piece == key.piece;
    });
    if (view == sources.end()) {
      return Status(StatusCode::kInternal,
                    fmt::format("{} is not published", tables_->metadata[key.name].name));
    }
    SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t numel, checked_numel(view->dtype, view->shape));
    const SourceLayout layout = is_contiguous(*view)
                                    ? SourceLayout::contiguous(view->dtype, numel)
                                    : SourceLayout{view->dtype, view->shape, view->location.stride};
    const Region packed = contiguous_region(key.slice.numel());
    SHARDPULL_ASSIGN_OR_RETURN(CopyProgram program,
                               compile_copy(key.slice, layout, key.wire_dtype, packed, key.wire_dtype));
    programs->push_back(std::move(program));
  }
  return Programs(std::move(programs));
}

Result<ProducerServer::Gather> ProducerServer::gather(const std::shared_ptr<const PullDescription>& pull,
                                                      const std::vector<PublishedView>& sources) {
  std::vector<std::vector<std::int64_t>> strides;
  for (const PublishedView& source : sources) strides.push_back(source.location.stride);
  PreparedPack& prepared = programs_[pull.get()];
  if (prepared.programs == nullptr || prepared.strides != strides) {
    SHARDPULL_ASSIGN_OR_RETURN(Programs compiled, programs_for(pull, sources));
    prepared = {pull, std::move(strides), std::move(compiled)};
  }
  Gather gather{prepared.programs, {}};
  for (const ChunkKey& key : pull->keys) {
    const auto found = data_.find({key.name, key.piece});
    if (found == data_.end()) {
      return Status(StatusCode::kInternal,
                    fmt::format("{} is not published", tables_->metadata[key.name].name));
    }
    gather.data.push_back(found->second);
  }
  return gather;
}

void ProducerServer::pack_done(std::uint64_t ticket, const Status& status, std::vector<std::uint64_t> sums,
                               const Span& work) {
  progress_.post([this, ticket, status, sums = std::move(sums), work] {
    if (work.end_ns > work.begin_ns) log_.worked(work);
    drive([&](std::int64_t now, ProducerActions& out) {
      machine_->pack_done(now, ticket, status, sums, out);
    });
  });
}

Span ProducerServer::work_on(const PullDescription& pull, Phase phase, std::int64_t started_ns) const {
  std::uint64_t bytes = 0;
  for (const ChunkKey& key : pull.keys) bytes += key.bytes;
  return {.phase = phase,
          .run = static_cast<std::uint16_t>(pull.run),
          .item = pull.chunk_id,
          .begin_ns = started_ns,
          .end_ns = progress_.clock().now_ns(),
          .bytes = bytes};
}

void ProducerServer::perform(producer_action::Pack& action) {
  const std::uint64_t ticket = action.ticket;
  auto source = gather(action.pull, action.sources);
  if (!source.ok()) {
    pack_done(ticket, source.status(), {});
    return;
  }
  const Ring& ring = rings_.at(action.sharing_group);
  std::byte* const slot = ring.memory->ref().address + action.slot * ring.slot_bytes;
  ++packs_done_;
  packed_bytes_ += action.pull->bytes;
  // `ring.memory` is held until the pack has ended: a ring that grows meanwhile is another one.
  packs_.post([this, ticket, pull = action.pull, source = std::move(*source), slot, memory = ring.memory,
               summed = action.summed, sync_id = running_sync_] {
    fault_point("rank.packing", sync_id);
    const std::int64_t started = progress_.clock().now_ns();
    std::vector<std::uint64_t> sums;
    for (std::size_t i = 0; i < pull->keys.size(); ++i) {
      std::byte* const packed = slot + pull->keys[i].offset;
      const CopyProgram& program = (*source.programs)[i];
      if (summed) {
        sums.push_back(run_and_sum(program, source.data[i], packed));
      } else {
        run(program, source.data[i], packed);
      }
    }
    pack_done(ticket, Status(), std::move(sums), work_on(*pull, Phase::kPack, started));
  });
}

void ProducerServer::perform(producer_action::Sum& action) {
  const std::uint64_t ticket = action.ticket;
  auto source = gather(action.pull, action.sources);
  if (!source.ok()) {
    pack_done(ticket, source.status(), {});
    return;
  }
  packs_.post([this, ticket, pull = action.pull, source = std::move(*source)] {
    const std::int64_t started = progress_.clock().now_ns();
    std::vector<std::uint64_t> sums;
    for (std::size_t i = 0; i < pull->keys.size(); ++i) {
      const CopyProgram& program = (*source.programs)[i];
      if (sums_in_place(program)) {
        sums.push_back(sum_of_reads(program, source.data[i]));
        continue;
      }
      const std::uint64_t bytes = pull->keys[i].bytes;
      if (shuffled_key_.size() < bytes) {
        shuffled_key_.resize(bytes);
        window_bytes_ = bytes;
      }
      run(program, source.data[i], shuffled_key_.data());
      sums.push_back(checksum64({shuffled_key_.data(), bytes}));
    }
    pack_done(ticket, Status(), std::move(sums), work_on(*pull, Phase::kSum, started));
  });
}

void ProducerServer::reply(HotType type, Incarnation to, const PullId& pull,
                           const std::vector<std::byte>& payload) {
  HotHeader header = header_of(type, pull);
  header.token = token_;
  header.incarnation = incarnation_;
  const EndpointId endpoint = endpoint_of(pull.consumer, to);
  if (endpoint == 0) return;  // it is gone; the control channel reports it
  log_.answered(pull.sync_id, pull.consumer, pull.chunk, pull.run, progress_.clock().now_ns());
  progress_.transport().send(endpoint, header, payload.data(), payload.size()).ignore();
}

void ProducerServer::perform(producer_action::ReadyReply& action) {
  ReadyPayload payload;
  payload.sums = action.ready.sums;
  if (action.ready.path == Path::kPacked) {
    const Ring& ring = rings_.at(action.ready.sharing_group);
    const MemoryRef& ref = ring.memory->ref();
    payload.entries.push_back(
        {RemoteRef{ref.region, ref.generation, action.ready.slot * ring.slot_bytes, action.ready.bytes}, {}});
  } else {
    for (const Location& entry : action.ready.entries) payload.entries.push_back({entry.where, entry.stride});
  }
  reply(HotType::kReady, action.incarnation, action.pull, encode(payload));
}

void ProducerServer::perform(producer_action::FailReply& action) {
  reply(HotType::kFail, action.incarnation, action.pull, encode(action.status));
}

void ProducerServer::perform(producer_action::SignalAck& action) {
  const EndpointId endpoint = action.by_control ? 0 : endpoint_of(action.consumer, action.incarnation);
  if (endpoint == 0) {
    hooks_.ack_by_control(action.consumer, action.sync_id, action.groups);
    return;
  }
  HotHeader header;
  header.type = HotType::kFreeAck;
  header.token = token_;
  header.incarnation = incarnation_;
  header.sync_id = action.sync_id;
  header.consumer = action.consumer;
  const std::vector<std::byte> payload = encode(std::vector<FreeEntry>{{action.consumer, action.groups}});
  progress_.transport().send(endpoint, header, payload.data(), payload.size()).ignore();
}

void ProducerServer::perform(producer_action::GroupFreed& action) {
  for (const PieceId& id : names_of_group_[action.group]) data_.erase(id);
  names_of_group_.erase(action.group);
  hooks_.group_freed(action.group);
}

void ProducerServer::perform(producer_action::SyncEnded&) {
  hooks_.sync_ended();
}

void ProducerServer::perform(producer_action::SyncFailed& action) {
  hooks_.sync_failed(action.sync_id, action.status);
}

void ProducerServer::perform(producer_action::SyncQuiet&) {
  hooks_.sync_quiet();
}

}  // namespace shardpull
