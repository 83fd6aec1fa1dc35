#include "runtime/consumer_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/encoder.h"
#include "base/fault_hooks.h"
#include "base/log.h"
#include "base/mapped_ranges.h"
#include "base/status_macros.h"
#include "hot/pulls.h"
#include "plan/integrity.h"
#include "protocol/key_sums.h"
#include "tensor/checksum.h"
#include "tensor/shape.h"

namespace shardpull {
namespace {

// The distinct (name, piece) of a run's keys in order of first use: the order of ReadyInfo::entries for the
// mapped path.
std::vector<std::pair<std::uint32_t, std::uint32_t>> entry_order(const Chunk& chunk, const Run& run) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> order;
  for (std::uint32_t i = run.first_key; i < run.first_key + run.key_count; ++i) {
    const std::pair<std::uint32_t, std::uint32_t> item(chunk.keys[i].name, chunk.keys[i].piece);
    if (std::find(order.begin(), order.end(), item) == order.end()) order.push_back(item);
  }
  return order;
}

// The shape of what a key's slice indexes: the whole tensor, or the piece's box.
std::vector<std::int64_t> source_shape(const InitTables& tables, std::uint32_t name, std::uint32_t piece) {
  if (piece == 0) return tables.metadata[name].shape;
  return tables.ownership.pieces[piece - 1].box.size;
}

Region destination_region(const Destination& destination) {
  Region region;
  region.offset = destination.offset;
  for (std::size_t d = 0; d < destination.shape.size(); ++d) {
    region.dims.push_back({destination.shape[d], destination.stride[d]});
  }
  return region;
}

// Calls `visit(source offset, destination offset, bytes)` for each contiguous run of loops [d, end) of a nest
// of bytes, in order, until it returns false.
template <typename Visit>
bool for_each_run(const CopyNest& nest, std::size_t d, std::int64_t from, std::int64_t to, Visit& visit) {
  if (d == nest.loops.size()) return visit(from, to, nest.run_elements);
  const CopyLoop& loop = nest.loops[d];
  for (std::int64_t i = 0; i < loop.size; ++i) {
    if (!for_each_run(nest, d + 1, from + i * loop.src_stride, to + i * loop.dst_stride, visit)) return false;
  }
  return true;
}

template <typename Visit>
void for_each_run(const CopyProgram& program, Visit visit) {
  for (const CopyNest& nest : program.nests) {
    if (!for_each_run(nest, 0, nest.src_offset, nest.dst_offset, visit)) return;
  }
}

// The packed bytes of a scatter's key, as a destination.
PlannedScatter into_window(const Chunk& chunk, const PlannedScatter& scatter) {
  const ChunkKey& key = chunk.keys[scatter.key];
  return {scatter.key,
          {scatter.destination.parameter, key.wire_dtype, 0, {key.slice.numel()}, {1}}};
}

std::vector<std::uint64_t> sums_by_key(const consumer_action::StartCopy& action) {
  std::vector<std::uint64_t> sums;  // runs lie in the order of the chunk's keys
  for (const ReadyInfo& ready : action.ready) sums.insert(sums.end(), ready.sums.begin(), ready.sums.end());
  return sums;
}

// Calls `visit(offset in bytes, bytes)` for each contiguous run of a window of a parameter, row-major.
template <typename Visit>
void for_each_run(const Destination& window, std::size_t d, std::int64_t offset, std::size_t inner,
                  std::int64_t run, Visit& visit) {
  if (d == inner) return visit(offset, run);
  const std::int64_t step = window.stride[d] * dtype_bits(window.dtype) / 8;
  for (std::int64_t i = 0; i < window.shape[d]; ++i)
    for_each_run(window, d + 1, offset + i * step, inner, run, visit);
}

template <typename Visit>
void for_each_run(const Destination& window, Visit visit) {
  std::size_t inner = window.shape.size();  // dims from here on are one run
  std::int64_t elements = 1;
  while (inner > 0 && (window.shape[inner - 1] == 1 || window.stride[inner - 1] == elements))
    elements *= window.shape[--inner];
  for_each_run(window, 0, window.offset * dtype_bits(window.dtype) / 8, inner,
               elements * dtype_bits(window.dtype) / 8, visit);
}

// Reads that one key may take: a guard, as a key of the direct path is planned as one.
constexpr std::size_t kMaxDirectParts = 1u << 18;

// How long a trainer that is up, as far as the control channel knows, may take to accept a connection while
// a sync waits for it.
constexpr std::int64_t kReconnectTimeoutNs = kNanosPerSecond;

Status producer_gone(std::uint32_t producer) {
  return Status(StatusCode::kUnavailable, fmt::format("trainer {} is gone", producer),
                {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = fmt::format("trainer {}", producer)});
}

// Zeroes `loops` [d, end) of a nest.
void zero(const CopyNest& nest, std::size_t d, std::byte* at) {
  if (d == nest.loops.size()) {
    std::memset(at, 0, static_cast<std::size_t>(nest.run_elements));
    return;
  }
  for (std::int64_t i = 0; i < nest.loops[d].size; ++i) zero(nest, d + 1, at + i * nest.loops[d].dst_stride);
}

}  // namespace

ConsumerEngine::ConsumerEngine(ProgressThread& progress, Model& model, const Recording& recording,
                               std::shared_ptr<const InitTables> tables,
                               std::shared_ptr<const WorkerPlan> plan, FleetToken token,
                               Incarnation incarnation, std::int64_t stall_timeout_ns,
                               std::int64_t loss_grace_ns, ConsumerHooks hooks, Model* fallbacks, Apply apply)
    : progress_(progress),
      model_(model),
      fallbacks_(fallbacks),
      recording_(recording),
      tables_(std::move(tables)),
      plan_(std::move(plan)),
      token_(token),
      incarnation_(incarnation),
      hooks_(std::move(hooks)),
      staged_(apply == Apply::kStaged),
      on_arrival_(progress.transport().can_read_to() ? scattered_on_arrival(*plan_)
                                                     : std::set<std::uint32_t>()),
      machine_(ConsumerConfig{.plan = plan_,
                              .num_modules = static_cast<std::uint32_t>(recording.modules.size()),
                              .summed = summed_paths(*tables_),
                              .scattered_on_arrival = on_arrival_,
                              .staged = staged_,
                              .stall_timeout_ns = stall_timeout_ns,
                              .loss_grace_ns = loss_grace_ns}),
      returning_(*plan_),
      addresses_(tables_->producers),
      copies_(1),
      post_process_(1) {}

ConsumerEngine::~ConsumerEngine() = default;

void ConsumerEngine::stop() {
  copies_.stop();
  if (stage_) stage_->stop();
  post_process_.stop();
}

// ---- once
// -------------------------------------------------------------------------------------------------------------

Status ConsumerEngine::prepare() {
  for (const RecordedModule& recorded : recording_.modules) {
    const bool own = modules_.size() < model_.modules().size() || fallbacks_ == nullptr;
    Module* module = (own ? &model_ : fallbacks_)->find_module(recorded.name);
    if (module == nullptr) {
      return Status(StatusCode::kInternal,
                    fmt::format("the model has no module '{}' any more", recorded.name));
    }
    modules_.push_back(module);
  }
  for (const RecordedParameter& recorded : recording_.parameters) {
    Parameter* parameter = modules_[recorded.module]->find(recorded.name);
    if (parameter == nullptr || parameter->memory() == nullptr) {
      return Status(StatusCode::kInternal,
                    fmt::format("{}.{} has no memory to land in", recording_.modules[recorded.module].name,
                                recorded.name));
    }
    parameters_.push_back(parameter);
  }
  if (staged_) {
    SHARDPULL_ASSIGN_OR_RETURN(stage_, Stage::make(*plan_, recording_));
  }
  SHARDPULL_ASSIGN_OR_RETURN(whole_, prepare_plan(plan_));
  running_ = whole_;

  const bool takes_slots = std::any_of(plan_->chunks.begin(), plan_->chunks.end(), [&](const Chunk& chunk) {
    return chunk.path == Path::kPacked && !on_arrival_.contains(chunk.chunk_id);
  });
  const std::uint64_t ring_bytes = takes_slots ? plan_->receive_slot_bytes * plan_->ring_depth : 0;
  if (ring_bytes != 0) {
    SHARDPULL_ASSIGN_OR_RETURN(
        receive_ring_,
        LandingMemory::allocate(ring_bytes, "receive ring", "a smaller max_chunk_bytes or ring_depth"));
  }
  std::uint64_t window_bytes = 0;
  for (const Chunk& chunk : plan_->chunks) {
    if (chunk.path != Path::kMapped || !summed(*tables_, chunk.path)) continue;
    for (const ChunkKey& key : chunk.keys) window_bytes = std::max(window_bytes, key.bytes);
  }
  if (window_bytes != 0) {
    SHARDPULL_ASSIGN_OR_RETURN(sum_window_,
                               LandingMemory::allocate(window_bytes, "window that mapped keys are summed in",
                                                       "integrity wire, or a smaller max_chunk_bytes"));
  }
  return {};
}

Result<std::shared_ptr<ConsumerEngine::PreparedPlan>> ConsumerEngine::prepare_plan(
    std::shared_ptr<const WorkerPlan> plan) {
  auto prepared = std::make_shared<PreparedPlan>();
  prepared->chunks.resize(plan_->chunks.size());
  for (const Chunk& chunk : plan->chunks) {
    prepared->chunks[chunk.chunk_id].chunk = &chunk;
    SHARDPULL_RETURN_IF_ERROR(prepare_chunk(chunk, prepared->chunks[chunk.chunk_id]));
    prepared->modules.insert(prepared->modules.end(), chunk.materialise.begin(), chunk.materialise.end());
  }
  std::sort(prepared->modules.begin(), prepared->modules.end());
  prepared->plan = std::move(plan);
  return prepared;
}

Status ConsumerEngine::prepare_chunk(const Chunk& chunk, PreparedChunk& prepared) {
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> entries;
  for (const Run& run : chunk.runs) entries.push_back(entry_order(chunk, run));
  for (const ChunkKey& key : chunk.keys) prepared.key_bytes += key.bytes;
  const bool by_window = chunk.path == Path::kMapped && summed(*tables_, chunk.path);
  if (by_window) prepared.gathers.resize(chunk.keys.size());
  for (const PlannedScatter& scatter : chunk.scatters) {
    SHARDPULL_ASSIGN_OR_RETURN(
        PreparedCopy copy, prepare_copy(chunk, scatter, chunk.path == Path::kPacked || by_window, entries));
    if (by_window) {
      SHARDPULL_ASSIGN_OR_RETURN(prepared.gathers[copy.key],
                                 prepare_copy(chunk, into_window(chunk, scatter), false, entries));
    }
    prepared.copies.push_back(std::move(copy));
  }
  for (const std::uint32_t module : chunk.materialise) {
    for (const Fill& fill : recording_.fills) {
      if (recording_.parameters[fill.destination.parameter].module != module) continue;
      const Region region = destination_region(fill.destination);
      const SourceLayout zeros = SourceLayout::contiguous(fill.destination.dtype, region.numel());
      SHARDPULL_ASSIGN_OR_RETURN(CopyProgram program,
                                 compile_copy(Slice::whole(region.numel()), zeros, fill.destination.dtype,
                                              region, fill.destination.dtype));
      prepared.fills.push_back({fill.destination.parameter, std::move(program)});
    }
  }
  for (const std::uint32_t module : chunk.post_process) {
    if (modules_[module]->post_process()) prepared.post_process.push_back(modules_[module]);
  }
  return {};
}

Result<ConsumerEngine::PreparedCopy> ConsumerEngine::prepare_copy(
    const Chunk& chunk, const PlannedScatter& scatter, bool packed,
    const std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>>& entries) {
  const ChunkKey& key = chunk.keys[scatter.key];
  PreparedCopy copy;
  copy.key = scatter.key;
  copy.parameter = scatter.destination.parameter;
  for (std::size_t r = 0; r < chunk.runs.size(); ++r) {
    const Run& run = chunk.runs[r];
    if (scatter.key < run.first_key || scatter.key >= run.first_key + run.key_count) continue;
    copy.run = static_cast<std::uint16_t>(r);
    const auto& order = entries[r];
    copy.entry = static_cast<std::uint32_t>(
        std::find(order.begin(), order.end(), std::pair(key.name, key.piece)) - order.begin());
  }
  const Region destination = destination_region(scatter.destination);
  SourceLayout layout;
  Slice slice;
  if (packed) {
    slice = Slice::whole(key.slice.numel());
    layout = SourceLayout::contiguous(key.wire_dtype, key.slice.numel());
  } else {
    slice = key.slice;
    const DType dtype = tables_->metadata[key.name].dtype;
    SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t numel,
                               checked_numel(dtype, source_shape(*tables_, key.name, key.piece)));
    layout = SourceLayout::contiguous(dtype, numel);
  }
  auto program = compile_copy(slice, layout, key.wire_dtype, destination, scatter.destination.dtype);
  if (!program.ok()) {
    return program.status().with_context(fmt::format("copying {} into {}", tables_->metadata[key.name].name,
                                                     parameters_[copy.parameter]->full_name()));
  }
  copy.program = std::move(program).value();
  return copy;
}

Status ConsumerEngine::connect(std::int64_t timeout_ns) {
  for (const ProducerPlan& producer : plan_->producers) {
    if (returning_.lost(producer.producer)) continue;
    const Status status = connect_to(producer.producer, timeout_ns).status();
    // One that has just died is lost once the control channel says so.
    if (status.code() == StatusCode::kUnavailable) {
      unreachable(producer.producer, status);
    } else if (!status.ok()) {
      return status;
    }
  }
  return {};
}

Result<EndpointId> ConsumerEngine::connect_to(std::uint32_t producer, std::int64_t timeout_ns) {
  auto endpoint = progress_.transport().connect(addresses_[producer], timeout_ns);
  if (!endpoint.ok()) return endpoint.status().with_context(fmt::format("connecting to trainer {}", producer));
  endpoints_[*endpoint] = Endpoint{producer};
  ByteWriter hello;
  hello.u32(kSliceFormatVersion);
  SHARDPULL_RETURN_IF_ERROR(
      progress_.transport().send(*endpoint, header(HotType::kHello, 0), hello.bytes().data(), hello.size()));
  return *endpoint;
}

bool ConsumerEngine::connected() const {
  return std::all_of(endpoints_.begin(), endpoints_.end(), [&](const auto& endpoint) {
    return endpoint.second.greeted || returning_.lost(endpoint.second.producer);
  });
}

// ---- producers that come back ---------------------------------------------------------------------------

template <typename Event>
void ConsumerEngine::drive_returning(Event event) {
  ReturningActions actions;
  event(progress_.clock().now_ns(), actions);
  for (const ReturningAction& action : actions)
    std::visit([this](const auto& each) { this->perform(each); }, action);
}

void ConsumerEngine::producer_returned(std::uint32_t rank, std::string address, std::uint64_t without_until,
                                       std::int64_t limit_ns) {
  addresses_[rank] = std::move(address);
  drive_returning([&](std::int64_t now, ReturningActions& out) {
    returning_.returned(now, rank, without_until, limit_ns, out);
  });
}

bool ConsumerEngine::reserved(std::uint32_t rank, const Status& status) {
  bool answers = false;
  drive_returning(
      [&](std::int64_t, ReturningActions& out) { answers = returning_.reserved(rank, status, out); });
  return answers;
}

bool ConsumerEngine::ready_for(std::uint64_t sync_id) {
  drive_returning([&](std::int64_t now, ReturningActions& out) { returning_.wanted(now, sync_id, out); });
  return returning_.ready_for(sync_id);
}

void ConsumerEngine::perform(const returning_action::Meet& action) {
  const auto endpoint = connect_to(action.producer, kReconnectTimeoutNs);
  if (!endpoint.ok()) {
    drive_returning([&](std::int64_t, ReturningActions& out) {
      returning_.failed(action.producer, endpoint.status(), out);
    });
    return;
  }
  endpoints_[*endpoint].waits = true;
  hooks_.announce(action.producer);
}

void ConsumerEngine::perform(const returning_action::Part& action) {
  close_endpoints(action.producer, true);
}

void ConsumerEngine::perform(const returning_action::TakeBack& action) {
  close_endpoints(action.producer, false);
  for (auto& [id, endpoint] : endpoints_) {
    if (endpoint.producer == action.producer) endpoint.waits = false;
  }
  machine_.producer_returned(action.producer);
  log_info("worker {} pulls from trainer {} again", plan_->consumer, action.producer);
}

void ConsumerEngine::perform(const returning_action::StandIn& action) {
  log_warn("worker {} cannot take trainer {} back: {}", plan_->consumer, action.producer,
           action.why.to_string());
  machine_.producer_returned(action.producer);
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.producer_unreachable(now, action.producer, action.why, out);
  });
}

void ConsumerEngine::perform(const returning_action::Reconnect& action) {
  const Status opened = connect_to(action.producer, kReconnectTimeoutNs).status();
  if (!opened.ok()) return log_warn("{}", opened.to_string());
  drive_returning([&](std::int64_t, ReturningActions& out) { returning_.reconnected(action.producer, out); });
}

void ConsumerEngine::perform(const returning_action::Reached& action) {
  machine_.producer_reachable(action.producer);
}

void ConsumerEngine::close_endpoints(std::uint32_t producer, bool waiting) {
  for (auto it = endpoints_.begin(); it != endpoints_.end();) {
    const EndpointId id = it->first;
    if (it->second.producer != producer || it->second.waits != waiting) {
      ++it;
      continue;
    }
    it = endpoints_.erase(it);
    progress_.transport().close(id);
  }
}

// ---- events
// -----------------------------------------------------------------------------------------------------------

template <typename Event>
void ConsumerEngine::drive(Event event) {
  ConsumerActions actions;
  event(progress_.clock().now_ns(), actions);
  perform(actions);
}

Status ConsumerEngine::start_update(std::uint64_t sync_id, std::uint64_t version,
                                    std::shared_ptr<const WorkerPlan> plan) {
  std::shared_ptr<PreparedPlan> prepared = whole_;
  if (plan != nullptr) {
    prepared = part_;
    if (prepared == nullptr || prepared->plan != plan) {
      SHARDPULL_ASSIGN_OR_RETURN(prepared, prepare_plan(plan));
    }
  }
  SHARDPULL_RETURN_IF_ERROR(check_memory(*prepared));
  drive_returning([&](std::int64_t, ReturningActions& out) { returning_.start(sync_id, out); });
  Status status;
  drive([&](std::int64_t now, ConsumerActions& out) {
    status = machine_.start_update(now, sync_id, version, plan, out);
  });
  if (status.ok()) {
    if (!staged_) hooks_.writing();
    running_ = prepared;
    if (plan != nullptr) part_ = prepared;
    bytes_moved_ = copy_ns_ = update_ns_ = 0;
    bytes_before_ = progress_.transport().counters().payload_bytes_read;
    std::size_t items = running_->plan->chunks.size();
    for (const Chunk& chunk : running_->plan->chunks) items += chunk.runs.size();
    log_.begin_sync(items);
  }
  return status;
}

Status ConsumerEngine::update() {
  Status status;
  update_started_ns_ = progress_.clock().now_ns();
  log_.begin_update(update_started_ns_);
  drive([&](std::int64_t now, ConsumerActions& out) { status = machine_.update(now, out); });
  return status;
}

Status ConsumerEngine::finish_update(std::uint64_t sync_id) {
  Status status;
  log_.begin_commit(progress_.clock().now_ns());
  drive([&](std::int64_t now, ConsumerActions& out) { status = machine_.finish_update(now, sync_id, out); });
  return status;
}

void ConsumerEngine::fail(std::uint64_t sync_id, const Status& why) {
  drive([&](std::int64_t now, ConsumerActions& out) { machine_.fail(now, sync_id, why, out); });
}

void ConsumerEngine::recovery_reserved(std::uint32_t rank, const Status& status) {
  drive([&](std::int64_t now, ConsumerActions& out) { machine_.recovery_reserved(now, rank, status, out); });
  const EndpointId endpoint = endpoint_of(rank);
  if (status.ok() || endpoint == 0) return;
  // Nothing comes over it until the next sync, which opens another one.
  progress_.transport().close(endpoint);
  on_closed(endpoint, status);
}

void ConsumerEngine::producer_lost(std::uint32_t rank, const Status& why) {
  drive_returning([&](std::int64_t, ReturningActions& out) { returning_.producer_lost(rank, out); });
  drive([&](std::int64_t now, ConsumerActions& out) { machine_.producer_lost(now, rank, why, out); });
}

void ConsumerEngine::signals_acked(std::uint32_t producer, std::uint64_t sync_id,
                                   const std::vector<std::uint32_t>& groups) {
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.signals_acked(now, producer, sync_id, groups, out);
  });
}

void ConsumerEngine::tick() {
  drive_returning([&](std::int64_t now, ReturningActions& out) { returning_.tick(now, out); });
  drive([&](std::int64_t now, ConsumerActions& out) { machine_.tick(now, out); });
}

void ConsumerEngine::shutdown() {
  drive([&](std::int64_t, ConsumerActions& out) { machine_.shutdown(out); });
}

bool ConsumerEngine::on_message(EndpointId id, const HotHeader& header, const std::byte* payload) {
  const auto found = endpoints_.find(id);
  if (found == endpoints_.end()) return false;
  Endpoint& endpoint = found->second;
  const std::uint32_t producer = endpoint.producer;
  const PullId pull = pull_of(header);
  const auto reject = [&](const Status& why) {
    log_warn("trainer {} sent a message this worker cannot use: {}", producer, why.to_string());
    progress_.transport().close(id);
    on_closed(id, why);
  };
  switch (header.type) {
    case HotType::kHelloReply:
      if (header.length != 0) {  // refused, and why
        reject(decode_status(payload, header.length));
        return true;
      }
      endpoint.greeted = true;
      if (endpoint.waits) returning_.greeted(producer);
      return true;
    case HotType::kReady: {
      fault_point("worker.ready", header.sync_id);
      auto ready = decode_ready(payload, header.length);
      if (!ready.ok()) {
        reject(ready.status());
        return true;
      }
      const Chunk* const asked = chunk_of(pull.chunk);
      ReadyInfo info = ready_info(std::move(*ready), asked != nullptr ? asked->path : Path::kPacked);
      if (pull.sync_id == machine_.sync_id()) log_.answered(pull.chunk, pull.run, progress_.clock().now_ns());
      drive([&](std::int64_t now, ConsumerActions& out) {
        machine_.ready(now, producer, pull, std::move(info), out);
      });
      return true;
    }
    case HotType::kFail: {
      const Status named =
          decode_status(payload, header.length).with_context(fmt::format("trainer {}", producer));
      drive([&](std::int64_t now, ConsumerActions& out) {
        machine_.pull_failed(now, producer, pull, named, out);
      });
      return true;
    }
    case HotType::kFreeAck: {
      auto entries = decode_free(payload, header.length);
      if (!entries.ok()) {
        reject(entries.status());
        return true;
      }
      for (const FreeEntry& entry : *entries) {
        if (entry.consumer == plan_->consumer) signals_acked(producer, header.sync_id, entry.groups);
      }
      return true;
    }
    default:
      reject(Status(StatusCode::kInvalidArgument,
                    fmt::format("hot message type {} is not for a worker", static_cast<int>(header.type))));
      return true;
  }
}

bool ConsumerEngine::on_closed(EndpointId id, const Status& why) {
  const auto found = endpoints_.find(id);
  if (found == endpoints_.end()) return false;
  const Endpoint endpoint = found->second;
  endpoints_.erase(found);
  const Status named(StatusCode::kUnavailable,
                     fmt::format("trainer {} closed its hot endpoint: {}", endpoint.producer, why.message()),
                     {.reason = Reason::kPeerLost,
                      .fault = Fault::kPeer,
                      .peer = fmt::format("trainer {}", endpoint.producer)});
  if (endpoint.waits) {
    drive_returning(
        [&](std::int64_t, ReturningActions& out) { returning_.failed(endpoint.producer, named, out); });
    return true;
  }
  unreachable(endpoint.producer, named);
  return true;
}

void ConsumerEngine::unreachable(std::uint32_t producer, const Status& why) {
  connect_error_ = why;
  returning_.unreachable(producer);
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.producer_unreachable(now, producer, why, out);
  });
}

void ConsumerEngine::on_read_done(ReadToken token, const Status& status) {
  if (const auto direct = direct_reads_.find(token); direct != direct_reads_.end()) {
    const std::shared_ptr<DirectReads> reads = direct->second;
    direct_reads_.erase(direct);
    if (reads->status.ok()) reads->status = status;
    if (--reads->left != 0) return;
    const std::int64_t ended = progress_.clock().now_ns();
    copy_ns_ += static_cast<std::uint64_t>(ended - reads->started_ns);
    log_.worked({.phase = Phase::kTransfer,
                 .path = reads->plan->chunks[reads->chunk].chunk->path == Path::kDirect ? SpanPath::kDirect
                                                                                        : SpanPath::kPacked,
                 .item = reads->chunk,
                 .begin_ns = reads->started_ns,
                 .end_ns = ended,
                 .bytes = reads->plan->chunks[reads->chunk].key_bytes});
    fault_point("worker.landed", reads->sync_id);
    if (reads->status.ok() && !reads->sums.empty()) return check_direct(reads);
    return scatter_done(reads->sync_id, reads->chunk, reads->status);
  }
  const auto found = transfers_.find(token);
  if (found == transfers_.end()) return;
  const Transfer transfer = found->second;
  transfers_.erase(found);
  const std::int64_t ended = progress_.clock().now_ns();
  copy_ns_ += static_cast<std::uint64_t>(ended - transfer.started_ns);
  log_.worked({.phase = Phase::kTransfer,
               .path = SpanPath::kPacked,
               .run = transfer.run,
               .item = transfer.chunk,
               .peer = transfer.producer,
               .begin_ns = transfer.started_ns,
               .end_ns = ended,
               .bytes = transfer.bytes});
  fault_point("worker.landed", transfer.sync_id);
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.transfer_done(now, transfer.sync_id, transfer.chunk, transfer.run, status, out);
  });
}

// ---- actions
// ----------------------------------------------------------------------------------------------------------

void ConsumerEngine::perform(ConsumerActions& actions) {
  for (ConsumerAction& action : actions) std::visit([this](const auto& each) { this->perform(each); }, action);
}

const Chunk* ConsumerEngine::chunk_of(std::uint32_t chunk_id) const {
  return chunk_id < running_->chunks.size() ? running_->chunks[chunk_id].chunk : nullptr;
}

EndpointId ConsumerEngine::endpoint_of(std::uint32_t producer) const {
  for (const auto& [id, endpoint] : endpoints_) {
    if (endpoint.producer == producer && !endpoint.waits) return id;
  }
  return 0;
}

HotHeader ConsumerEngine::header(HotType type, std::uint64_t sync_id) const {
  HotHeader header;
  header.type = type;
  header.token = token_;
  header.incarnation = incarnation_;
  header.sync_id = sync_id;
  header.consumer = plan_->consumer;
  return header;
}

void ConsumerEngine::perform(const consumer_action::SendPull& action) {
  HotHeader message = header_of(HotType::kPull, action.pull);
  message.token = token_;
  message.incarnation = incarnation_;
  log_.pull_sent(action.pull.chunk, action.pull.run, action.producer, progress_.clock().now_ns());
  const EndpointId endpoint = endpoint_of(action.producer);
  const Status status = progress_.transport().send(endpoint, message, nullptr, 0);
  fault_point("worker.pulled", action.pull.sync_id);
  if (!status.ok()) give_up(endpoint, status);
}

void ConsumerEngine::give_up(EndpointId endpoint, const Status& why) {
  progress_.post([this, endpoint, why] {
    if (!endpoints_.contains(endpoint)) return;
    progress_.transport().close(endpoint);
    on_closed(endpoint, why);
  });
}

Status ConsumerEngine::check_offer(const ReadyInfo& ready, std::uint32_t producer, const Run& run,
                                   std::uint32_t chunk_id) const {
  if (ready.entries.size() == 1 && ready.entries[0].where.bytes == run.bytes) return {};
  return Status(
      StatusCode::kDataLoss,
      fmt::format("trainer {} offers {} bytes for chunk {}, the plan says {}", producer,
                  ready.entries.empty() ? 0 : ready.entries[0].where.bytes, chunk_id, run.bytes),
      {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = fmt::format("trainer {}", producer)});
}

void ConsumerEngine::perform(const consumer_action::AnnounceRecovery& action) {
  const std::uint32_t producer = action.producer;
  const Status status =
      endpoint_of(producer) != 0 ? Status() : connect_to(producer, kReconnectTimeoutNs).status();
  if (status.ok()) {
    log_warn("worker {} pulls from trainer {} what another one no longer serves", plan_->consumer, producer);
    hooks_.announce_recovery(producer);
    return;
  }
  returning_.unreachable(producer);
  progress_.post([this, producer, status] { recovery_reserved(producer, status); });
}

void ConsumerEngine::perform(const consumer_action::StartTransfer& action) {
  const Run& run = chunk_of(action.chunk)->runs[action.run];
  const ReadToken token = next_token_++;
  const std::int64_t now = progress_.clock().now_ns();
  transfers_[token] = {machine_.sync_id(), action.chunk, action.run, now, action.producer, run.bytes};
  log_.run_started(action.chunk, action.run, now);
  Status wrong = check_offer(action.ready, action.producer, run, action.chunk);
  const EndpointId endpoint = endpoint_of(action.producer);
  if (wrong.ok() && endpoint == 0) wrong = producer_gone(action.producer);
  if (!wrong.ok()) {
    progress_.post([this, token, wrong] { on_read_done(token, wrong); });
    return;
  }
  std::byte* const local = receive_ring_.data() + action.slot * plan_->receive_slot_bytes + run.offset;
  progress_.transport().read(endpoint, action.ready.entries[0].where, local, token);
  fault_point("worker.transferring", machine_.sync_id());
}

std::byte* ConsumerEngine::landing(std::uint32_t parameter) const {
  return stage_ ? stage_->landing(parameter) : parameters_[parameter]->memory();
}

Status ConsumerEngine::check_memory(const PreparedPlan& plan) const {
  const auto mapped = MappedRanges::read();
  for (std::uint32_t p = 0; p < parameters_.size(); ++p) {
    const Parameter& parameter = *parameters_[p];
    if (!std::binary_search(plan.modules.begin(), plan.modules.end(), recording_.parameters[p].module))
      continue;
    const auto refused = [&](std::string_view what) {
      return Status(StatusCode::kFailedPrecondition,
                    fmt::format("parameter {} {}", parameter.full_name(), what),
                    {.reason = Reason::kWrongState, .tensor = parameter.full_name()});
    };
    if (parameter.memory() == nullptr) return refused("has no memory any more");
    if (mapped && !mapped->writable(parameter.memory(), parameter.storage_bytes())) {
      return refused(
          fmt::format("has {} bytes at {} that are not mapped any more, or may only be read: bind it "
                      "to the memory that it has now",
                      parameter.storage_bytes(), static_cast<const void*>(parameter.memory())));
    }
  }
  return {};
}

void ConsumerEngine::run_fills(const PreparedChunk& chunk) const {
  for (const PreparedFill& fill : chunk.fills) {
    std::byte* const memory = landing(fill.parameter);
    for (const CopyNest& nest : fill.program.nests) zero(nest, 0, memory + nest.dst_offset);
  }
}

void ConsumerEngine::perform(const consumer_action::StartScatter& action) {
  const std::uint64_t sync_id = machine_.sync_id();
  const std::uint32_t chunk_id = action.chunk;
  const std::byte* const slot = receive_ring_.data() + action.slot * plan_->receive_slot_bytes;
  copies_.post([this, sync_id, chunk_id, slot, producers = action.producers, sums = action.sums,
                plan = running_] {
    const PreparedChunk& prepared = plan->chunks[chunk_id];
    const std::int64_t started = progress_.clock().now_ns();
    run_fills(prepared);
    const std::int64_t filled = progress_.clock().now_ns();
    Status status;
    std::vector<bool> checked(sums.size());  // by key: one may have several destinations
    for (const PreparedCopy& copy : prepared.copies) {
      const std::byte* const packed = slot + prepared.chunk->keys[copy.key].offset;
      if (!sums.empty() && !checked[copy.key]) {
        status = check_key(*prepared.chunk, copy, packed, producers, sums);
        if (!status.ok()) break;
        checked[copy.key] = true;
      }
      run(copy.program, packed, landing(copy.parameter));
    }
    const std::int64_t ended = progress_.clock().now_ns();
    progress_.post([this, sync_id, chunk_id, status, started, filled, ended, bytes = prepared.key_bytes] {
      log_.worked({.phase = Phase::kMaterialise, .item = chunk_id, .begin_ns = started, .end_ns = filled});
      log_.worked(
          {.phase = Phase::kScatter, .item = chunk_id, .begin_ns = filled, .end_ns = ended, .bytes = bytes});
      scatter_done(sync_id, chunk_id, status);
    });
  });
}

Status ConsumerEngine::check_key(const Chunk& chunk, const PreparedCopy& copy, const std::byte* bytes,
                                 const std::vector<std::uint32_t>& producers,
                                 const std::vector<std::uint64_t>& sums) const {
  const ChunkKey& key = chunk.keys[copy.key];
  return check_sum(*tables_, key, producers[copy.run], {bytes, key.bytes}, sums[copy.key]);
}

void ConsumerEngine::scatter_done(std::uint64_t sync_id, std::uint32_t chunk_id, const Status& status) {
  fault_point("worker.scattered", sync_id);
  drive([&](std::int64_t now, ConsumerActions& out) {
    machine_.scatter_done(now, sync_id, chunk_id, status, out);
  });
}

Result<std::vector<std::vector<ConsumerEngine::PublishedSource>>> ConsumerEngine::published_sources(
    const consumer_action::StartCopy& action, const Chunk& chunk) {
  std::vector<std::vector<PublishedSource>> sources;
  for (std::size_t r = 0; r < action.ready.size(); ++r) {
    const std::uint32_t producer = action.producers[r];
    const auto order = entry_order(chunk, chunk.runs[r]);
    const std::vector<Location>& entries = action.ready[r].entries;
    std::vector<PublishedSource>& of_run = sources.emplace_back();
    if (entries.size() != order.size()) {
      return Status(StatusCode::kDataLoss,
                    fmt::format("trainer {} locates {} tensors of chunk {}, the plan names {}", producer,
                                entries.size(), chunk.chunk_id, order.size()),
                    {.reason = Reason::kCorrupt, .fault = Fault::kPeer});
    }
    const EndpointId endpoint = endpoint_of(producer);
    for (std::size_t e = 0; e < entries.size(); ++e) {
      const TensorMeta& meta = tables_->metadata[order[e].first];
      const auto bytes = checked_bytes(meta.dtype, source_shape(*tables_, order[e].first, order[e].second));
      if (bytes.ok() && entries[e].stride.empty() && entries[e].where.bytes != *bytes) {
        return Status(StatusCode::kDataLoss,
                      fmt::format("trainer {} offers {} bytes of {}, the metadata says {}", producer,
                                  entries[e].where.bytes, meta.name, *bytes),
                      {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .tensor = meta.name});
      }
      PublishedSource& source = of_run.emplace_back(PublishedSource{entries[e].where, entries[e].stride, {}});
      if (chunk.path != Path::kMapped) continue;
      auto mapping =
          endpoint == 0 ? Result<Transport::Mapping>(Status(StatusCode::kUnavailable, "the endpoint is gone"))
                        : progress_.transport().map(endpoint, source.where);
      if (!mapping.ok()) {
        return mapping.status().with_context(fmt::format("mapping {} of trainer {}", meta.name, producer));
      }
      source.mapping = *mapping;
    }
  }
  return sources;
}

Result<const CopyProgram*> ConsumerEngine::program_for(PreparedCopy& copy, const PublishedSource& source,
                                                       const Chunk& chunk,
                                                       const PlannedScatter& scatter) const {
  if (source.stride.empty()) return &copy.program;
  const ChunkKey& key = chunk.keys[copy.key];
  if (copy.stride != source.stride) {
    const SourceLayout layout{tables_->metadata[key.name].dtype, source_shape(*tables_, key.name, key.piece),
                              source.stride};
    SHARDPULL_ASSIGN_OR_RETURN(
        copy.strided, compile_copy(key.slice, layout, key.wire_dtype, destination_region(scatter.destination),
                                   scatter.destination.dtype));
    copy.stride = source.stride;
  }
  if (static_cast<std::uint64_t>(copy.strided.src_end) > source.where.bytes) {
    return Status(
        StatusCode::kDataLoss,
        fmt::format("the strides of {} leave the {} bytes it was published with",
                    tables_->metadata[key.name].name, source.where.bytes),
        {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .tensor = tables_->metadata[key.name].name});
  }
  return &copy.strided;
}

void ConsumerEngine::perform(const consumer_action::StartCopy& action) {
  const Chunk& chunk = *chunk_of(action.chunk);
  const std::int64_t started = progress_.clock().now_ns();
  log_.chunk_started(action.chunk, started);
  if (chunk.path == Path::kPacked && !chunk.runs.empty()) return read_packed(action, sums_by_key(action));
  auto sources = published_sources(action, chunk);
  if (!chunk.runs.empty()) {
    log_.worked({.phase = Phase::kRegister,
                 .item = action.chunk,
                 .begin_ns = started,
                 .end_ns = progress_.clock().now_ns()});
  }
  if (!sources.ok()) {
    progress_.post([this, sync_id = machine_.sync_id(), chunk_id = action.chunk, why = sources.status()] {
      scatter_done(sync_id, chunk_id, why);
    });
  } else if (chunk.path == Path::kDirect) {
    read_direct(action.chunk, *sources, action.producers, sums_by_key(action));
  } else {
    copy_mapped(action.chunk, std::move(*sources), action.producers, sums_by_key(action));
  }
}

Status ConsumerEngine::copy_one(PreparedChunk& prepared, std::size_t c,
                                const std::vector<std::vector<PublishedSource>>& sources,
                                const std::vector<std::uint32_t>& producers,
                                const std::vector<std::uint64_t>& sums, std::int64_t& held) const {
  PreparedCopy& copy = prepared.copies[c];
  const Chunk& chunk = *prepared.chunk;
  const PlannedScatter& scatter = chunk.scatters[c];
  const PublishedSource& source = sources[copy.run][copy.entry];
  std::byte* const memory = landing(copy.parameter);
  if (sums.empty()) {
    SHARDPULL_ASSIGN_OR_RETURN(const CopyProgram* const program, program_for(copy, source, chunk, scatter));
    run(*program, source.mapping.data, memory);
    return {};
  }
  std::byte* const window = sum_window_.data();
  if (held != copy.key) {
    SHARDPULL_ASSIGN_OR_RETURN(
        const CopyProgram* const gather,
        program_for(prepared.gathers[copy.key], source, chunk, into_window(chunk, scatter)));
    run(*gather, source.mapping.data, window);
    SHARDPULL_RETURN_IF_ERROR(check_key(chunk, copy, window, producers, sums));
    held = copy.key;
  }
  run(copy.program, window, memory);
  return {};
}

void ConsumerEngine::copy_mapped(std::uint32_t chunk_id, std::vector<std::vector<PublishedSource>> sources,
                                 std::vector<std::uint32_t> producers, std::vector<std::uint64_t> sums) {
  copies_.post([this, sync_id = machine_.sync_id(), chunk_id, sources = std::move(sources),
                producers = std::move(producers), sums = std::move(sums), plan = running_] {
    PreparedChunk& prepared = plan->chunks[chunk_id];
    const std::int64_t started = progress_.clock().now_ns();
    fault_point("worker.transferring", sync_id);
    run_fills(prepared);
    const std::int64_t filled = progress_.clock().now_ns();
    Status status;
    std::int64_t held = -1;
    for (std::size_t c = 0; c < prepared.copies.size() && status.ok(); ++c)
      status = copy_one(prepared, c, sources, producers, sums, held);
    const std::int64_t ended = progress_.clock().now_ns();
    fault_point("worker.landed", sync_id);
    if (status.ok()) progress_.transport().add_mapped_bytes(prepared.key_bytes);
    progress_.post([this, sync_id, chunk_id, status, started, filled, ended, bytes = prepared.key_bytes] {
      copy_ns_ += static_cast<std::uint64_t>(ended - started);
      log_.worked({.phase = Phase::kMaterialise, .item = chunk_id, .begin_ns = started, .end_ns = filled});
      if (bytes != 0) {
        log_.worked({.phase = Phase::kTransfer,
                     .path = SpanPath::kMapped,
                     .item = chunk_id,
                     .begin_ns = filled,
                     .end_ns = ended,
                     .bytes = bytes});
      }
      scatter_done(sync_id, chunk_id, status);
    });
  });
}

Status ConsumerEngine::direct_parts(PreparedChunk& prepared,
                                    const std::vector<std::vector<PublishedSource>>& sources, bool summed,
                                    std::vector<std::vector<ReadPart>>& by_run,
                                    std::vector<SumOnArrival>& on_arrival) const {
  const bool summed_on_arrival = summed && progress_.transport().can_read_to();
  by_run.resize(sources.size());
  std::vector<std::vector<std::vector<Arrival::Key>>> keys(sources.size());  // by run and part
  struct Place {
    std::size_t part = 0, key = 0;
  };
  std::vector<Place> places(prepared.copies.size());  // of each copy's last piece
  std::vector<std::size_t> pieces(prepared.copies.size());
  for (std::size_t c = 0; c < prepared.copies.size(); ++c) {
    PreparedCopy& copy = prepared.copies[c];
    const PublishedSource& source = sources[copy.run][copy.entry];
    SHARDPULL_ASSIGN_OR_RETURN(const CopyProgram* const program,
                               program_for(copy, source, *prepared.chunk, prepared.chunk->scatters[c]));
    std::byte* const parameter = landing(copy.parameter);
    std::vector<ReadPart>& parts = by_run[copy.run];
    const std::size_t before = parts.size();
    const auto take = [&](std::uint64_t offset, std::int64_t to, std::int64_t bytes) {
      if (!summed_on_arrival) return;
      std::vector<std::vector<Arrival::Key>>& its = keys[copy.run];
      its.resize(parts.size());
      its.back().push_back({offset, static_cast<std::uint64_t>(bytes), {{nullptr, parameter + to}}});
      places[c] = {parts.size() - 1, its.back().size() - 1};
      ++pieces[c];
    };
    for_each_run(*program, [&](std::int64_t from, std::int64_t to, std::int64_t bytes) {
      const RemoteRef remote{source.where.region, source.where.generation,
                             source.where.offset + static_cast<std::uint64_t>(from),
                             static_cast<std::uint64_t>(bytes)};
      if (!parts.empty()) {
        ReadPart& last = parts.back();
        if (last.remote.region == remote.region && last.remote.generation == remote.generation &&
            last.remote.offset + last.remote.bytes == remote.offset &&
            last.local + last.remote.bytes == parameter + to) {
          take(last.remote.bytes, to, bytes);
          last.remote.bytes += remote.bytes;
          return true;
        }
      }
      parts.push_back({remote, parameter + to});
      take(0, to, bytes);
      return parts.size() - before <= kMaxDirectParts;
    });
    if (parts.size() - before > kMaxDirectParts) {
      const TensorMeta& meta = tables_->metadata[prepared.chunk->keys[copy.key].name];
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} is published with strides [{}], in more than {} parts: it cannot be read "
                                "directly; use path packed, or publish it contiguous",
                                meta.name, fmt::join(source.stride, ", "), kMaxDirectParts),
                    {.reason = Reason::kLimit, .tensor = meta.name});
    }
  }
  if (!summed_on_arrival) return {};
  on_arrival.resize(prepared.copies.size());
  for (std::size_t c = 0; c < prepared.copies.size(); ++c) {
    if (pieces[c] != 1) continue;  // its pieces need not come in order
    const std::size_t run = prepared.copies[c].run, part = places[c].part;
    std::shared_ptr<ReadTarget>& target = by_run[run][part].target;
    if (target == nullptr) target = std::make_shared<Arrival>(std::move(keys[run][part]), true, running_);
    on_arrival[c] = {std::static_pointer_cast<Arrival>(target), places[c].key};
  }
  return {};
}

void ConsumerEngine::read_direct(std::uint32_t chunk_id,
                                 const std::vector<std::vector<PublishedSource>>& sources,
                                 std::vector<std::uint32_t> producers, std::vector<std::uint64_t> sums) {
  PreparedChunk& prepared = running_->chunks[chunk_id];
  const std::uint64_t sync_id = machine_.sync_id();
  std::vector<std::vector<ReadPart>> by_run;
  std::vector<SumOnArrival> on_arrival;
  const Status wrong = direct_parts(prepared, sources, !sums.empty(), by_run, on_arrival);
  if (!wrong.ok()) {
    progress_.post([this, sync_id, chunk_id, wrong] { scatter_done(sync_id, chunk_id, wrong); });
    return;
  }
  after_fills(chunk_id, [this, chunk_id, by_run = std::move(by_run), producers = std::move(producers),
                         sums = std::move(sums), on_arrival = std::move(on_arrival)]() mutable {
    const auto reads = begin_reads(chunk_id, std::move(producers), std::move(sums));
    reads->on_arrival = std::move(on_arrival);
    start_reads(
        reads, [&](std::size_t r) { return !by_run[r].empty(); },
        [&](std::size_t r, EndpointId endpoint, ReadToken token) {
          progress_.transport().read_parts(endpoint, std::move(by_run[r]), token);
        });
  });
}

void ConsumerEngine::after_fills(std::uint32_t chunk_id, std::function<void()> then) {
  if (running_->chunks[chunk_id].fills.empty()) return then();
  copies_.post([this, chunk_id, plan = running_, then = std::move(then)]() mutable {
    const std::int64_t started = progress_.clock().now_ns();
    run_fills(plan->chunks[chunk_id]);
    const std::int64_t filled = progress_.clock().now_ns();
    progress_.post([this, chunk_id, started, filled, then = std::move(then)] {
      log_.worked({.phase = Phase::kMaterialise, .item = chunk_id, .begin_ns = started, .end_ns = filled});
      then();
    });
  });
}

std::shared_ptr<ConsumerEngine::DirectReads> ConsumerEngine::begin_reads(
    std::uint32_t chunk_id, std::vector<std::uint32_t> producers, std::vector<std::uint64_t> sums) {
  const std::size_t runs = producers.size();
  return std::make_shared<DirectReads>(DirectReads{machine_.sync_id(),
                                                   chunk_id,
                                                   runs,
                                                   {},
                                                   progress_.clock().now_ns(),
                                                   std::move(producers),
                                                   std::move(sums),
                                                   running_,
                                                   {}});
}

template <typename Wanted, typename Read>
void ConsumerEngine::start_reads(const std::shared_ptr<DirectReads>& reads, Wanted wanted, Read read) {
  for (std::size_t r = 0; r < reads->producers.size(); ++r) {
    const ReadToken token = next_token_++;
    direct_reads_[token] = reads;
    const std::uint32_t producer = reads->producers[r];
    const EndpointId endpoint = endpoint_of(producer);
    if (endpoint == 0 || !wanted(r)) {
      const Status status = wanted(r) ? producer_gone(producer) : Status();
      progress_.post([this, token, status] { on_read_done(token, status); });
      continue;
    }
    read(r, endpoint, token);
  }
  fault_point("worker.transferring", machine_.sync_id());
}

void ConsumerEngine::read_packed(const consumer_action::StartCopy& action, std::vector<std::uint64_t> sums) {
  const std::uint32_t chunk_id = action.chunk;
  const Chunk& chunk = *chunk_of(chunk_id);
  std::vector<RemoteRef> slots(action.ready.size());
  Status wrong;
  for (std::size_t r = 0; r < slots.size() && wrong.ok(); ++r) {
    if (chunk.runs[r].key_count == 0) continue;
    wrong = check_offer(action.ready[r], action.producers[r], chunk.runs[r], chunk_id);
    if (wrong.ok()) slots[r] = action.ready[r].entries[0].where;
  }
  if (!wrong.ok()) {
    progress_.post(
        [this, sync_id = machine_.sync_id(), chunk_id, wrong] { scatter_done(sync_id, chunk_id, wrong); });
    return;
  }
  after_fills(chunk_id, [this, chunk_id, slots = std::move(slots), producers = action.producers,
                         sums = std::move(sums)]() mutable {
    start_arrivals(chunk_id, slots, std::move(producers), std::move(sums));
  });
}

void ConsumerEngine::start_arrivals(std::uint32_t chunk_id, const std::vector<RemoteRef>& slots,
                                    std::vector<std::uint32_t> producers, std::vector<std::uint64_t> sums) {
  const PreparedChunk& prepared = running_->chunks[chunk_id];
  const Chunk& chunk = *prepared.chunk;
  const auto reads = begin_reads(chunk_id, std::move(producers), std::move(sums));
  std::vector<Arrival::Key> keys;
  for (const ChunkKey& key : chunk.keys) keys.push_back({key.offset, key.bytes, {}});
  for (const PreparedCopy& copy : prepared.copies)
    keys[copy.key].copies.push_back({&copy.program, landing(copy.parameter)});
  std::vector<std::shared_ptr<Arrival>> arrivals;  // by run
  for (std::size_t r = 0; r < slots.size(); ++r) {
    const Run& run = chunk.runs[r];
    std::vector<Arrival::Key> its(keys.begin() + run.first_key, keys.begin() + run.first_key + run.key_count);
    for (Arrival::Key& key : its) key.offset -= run.offset;
    arrivals.push_back(std::make_shared<Arrival>(std::move(its), !reads->sums.empty(), running_));
  }
  for (const PreparedCopy& copy : prepared.copies)
    reads->on_arrival.push_back({arrivals[copy.run], copy.key - chunk.runs[copy.run].first_key});
  start_reads(
      reads, [&](std::size_t r) { return chunk.runs[r].key_count != 0; },
      [&](std::size_t r, EndpointId endpoint, ReadToken token) {
        progress_.transport().read_to(endpoint, slots[r], arrivals[r], token);
      });
}

void ConsumerEngine::check_direct(const std::shared_ptr<DirectReads>& reads) {
  const bool summed =
      !reads->on_arrival.empty() &&
      std::all_of(reads->on_arrival.begin(), reads->on_arrival.end(), [](const SumOnArrival& each) {
        return each.arrival != nullptr && each.arrival->sum(each.key).has_value();
      });
  if (summed) return scatter_done(reads->sync_id, reads->chunk, check_landed(*reads));
  copies_.post([this, reads] {
    const std::int64_t started = progress_.clock().now_ns();
    const Status status = check_landed(*reads);
    progress_.post([this, reads, status, started, ended = progress_.clock().now_ns()] {
      log_.worked({.phase = Phase::kCheck, .item = reads->chunk, .begin_ns = started, .end_ns = ended});
      scatter_done(reads->sync_id, reads->chunk, status);
    });
  });
}

Status ConsumerEngine::check_landed(const DirectReads& reads) const {
  const PreparedChunk& prepared = reads.plan->chunks[reads.chunk];
  for (std::size_t c = 0; c < prepared.copies.size(); ++c) {
    const PreparedCopy& copy = prepared.copies[c];
    std::optional<std::uint64_t> sum;
    if (!reads.on_arrival.empty() && reads.on_arrival[c].arrival != nullptr)
      sum = reads.on_arrival[c].arrival->sum(reads.on_arrival[c].key);
    if (!sum) {
      Hasher hasher;
      for_each_run(prepared.chunk->scatters[c].destination, [&](std::int64_t offset, std::int64_t bytes) {
        hasher.update({landing(copy.parameter) + offset, static_cast<std::size_t>(bytes)});
      });
      sum = hasher.checksum();
    }
    SHARDPULL_RETURN_IF_ERROR(compare_sums(*tables_, prepared.chunk->keys[copy.key],
                                           reads.producers[copy.run], *sum, reads.sums[copy.key]));
  }
  return {};
}

void ConsumerEngine::perform(const consumer_action::StartPost& action) {
  const std::uint64_t sync_id = machine_.sync_id();
  const std::uint32_t chunk_id = action.chunk;
  const auto finish = [this, sync_id, chunk_id](const Status& status) {
    progress_.post([this, sync_id, chunk_id, status] {
      drive([&](std::int64_t now, ConsumerActions& out) {
        machine_.post_done(now, sync_id, chunk_id, status, out);
      });
    });
  };
  if (running_->chunks[chunk_id].post_process.empty()) {
    finish(Status());
    return;
  }
  post_process_.post([this, plan = running_, chunk_id, finish] {
    const std::int64_t started = progress_.clock().now_ns();
    Status status;
    for (Module* module : plan->chunks[chunk_id].post_process) {
      status =
          module->post_process()(*module, {}).with_context(fmt::format("post-processing {}", module->name()));
      if (!status.ok()) break;
    }
    progress_.post([this, chunk_id, started, ended = progress_.clock().now_ns()] {
      log_.worked({.phase = Phase::kPostProcess, .item = chunk_id, .begin_ns = started, .end_ns = ended});
    });
    finish(status);
  });
}

void ConsumerEngine::perform(const consumer_action::StartCommit&) {
  const auto finish = [this, sync_id = machine_.sync_id()](const Status& status) {
    progress_.post([this, sync_id, status] {
      drive(
          [&](std::int64_t now, ConsumerActions& out) { machine_.commit_done(now, sync_id, status, out); });
    });
  };
  const Status memory = check_memory(*running_);
  if (!memory.ok()) return finish(memory);
  hooks_.writing();
  stage_->commit(
      running_->modules, [this](std::uint32_t parameter) { return parameters_[parameter]->memory(); },
      [finish] { finish(Status()); });
}

void ConsumerEngine::perform(const consumer_action::SendSignals& action) {
  const EndpointId endpoint = endpoint_of(action.producer);
  if (endpoint == 0) {
    hooks_.signal_by_control(action.producer, action.sync_id, action.groups);
    return;
  }
  const std::vector<std::byte> payload = encode(std::vector<FreeEntry>{{plan_->consumer, action.groups}});
  const Status status = progress_.transport().send(endpoint, header(HotType::kFree, action.sync_id),
                                                   payload.data(), payload.size());
  if (!status.ok()) give_up(endpoint, status);  // and the signals go by control
}

void ConsumerEngine::perform(const consumer_action::LeaveLanes& action) {
  hooks_.leave_lanes(action.producer, action.sync_id);
}

void ConsumerEngine::perform(const consumer_action::UpdateDone& action) {
  const std::int64_t now = progress_.clock().now_ns();
  log_.end_update(now);
  update_ns_ = static_cast<std::uint64_t>(now - update_started_ns_);
  bytes_moved_ = progress_.transport().counters().payload_bytes_read - bytes_before_;
  hooks_.update_done(action.sync_id, action.status);
}

void ConsumerEngine::perform(const consumer_action::FinishDone& action) {
  log_.end_commit(progress_.clock().now_ns());
  hooks_.finish_done(action.sync_id, action.status);
}

void ConsumerEngine::perform(const consumer_action::ReportFailure& action) {
  hooks_.report_failure(action.sync_id, action.status);
}

}  // namespace shardpull
