// Worker: joins a fleet, then serves syncs. The life of one:
//
//   connect: link up -> InitRequest -> InitPayload -> bake, plan, prepare -> hot hellos -> Reserve at each
//   producer -> InitDone serve:   StartUpdate -> UpdateStarted   Update -> Prepared   Finish -> Finished,
//   then the caller's on_sync
#include "shardpull/worker.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fault_hooks.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "control/grpc/grpc_control.h"
#include "plan/plan.h"
#include "plan/restrict.h"
#include "runtime/consumer_engine.h"
#include "runtime/fallback_model.h"
#include "runtime/fleet_link.h"
#include "runtime/fleet_trace.h"
#include "runtime/hot_transport.h"
#include "runtime/progress_thread.h"
#include "runtime/replica_link.h"
#include "transport/shm/shared_memory.h"

namespace shardpull {
namespace {

Status check_options(const WorkerOptions& options) {
  SHARDPULL_RETURN_IF_ERROR(validate(options.fleet));
  for (const auto& [field, value] :
       {std::pair("chunk_split", options.chunk_split), std::pair("pull_split", options.pull_split)}) {
    if (value != 0) continue;
    return Status(StatusCode::kInvalidArgument, fmt::format("{} must be >= 1 (it is 0)", field),
                  {.reason = Reason::kBadArgument});
  }
  return {};
}

// A plan knows where each expert lies; nobody tells it when that changes.
Status check_experts(const WorkerOptions& options) {
  if (options.enable_eplb == false) return {};
  const std::string what = options.enable_eplb
                               ? "the engine moves experts at run time (enable_eplb), which is not supported"
                               : "whether the engine moves experts at run time is not known (enable_eplb)";
  return Status(StatusCode::kUnimplemented,
                what +
                    ": the plan fixes the slot of each expert, and once they have moved a sync would load "
                    "weights into the slots of others. Turn it off in the engine",
                {.reason = Reason::kBadArgument});
}

// The first difference between a recording's names, modules and parameters and the model's, or OK.
Status check_recording(const Recording& recording, const Model& model,
                       const std::vector<TensorMeta>& metadata) {
  const auto differs = [](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, "the recording is of another model: " + what,
                  {.reason = Reason::kMetadataMismatch});
  };
  if (recording.metadata != to_string(metadata_digest(metadata))) {
    return differs("it is not one of the names, dtypes and shapes that the trainer has, in their order");
  }
  const auto shape_of = [](const auto& parameter) {
    return std::tuple(parameter.dtype, parameter.shape, parameter.stride);
  };
  const auto text = [](const auto& shape) {
    return fmt::format("{} [{}] stride [{}]", dtype_name(std::get<0>(shape)),
                       fmt::join(std::get<1>(shape), ", "), fmt::join(std::get<2>(shape), ", "));
  };
  const auto& modules = model.modules();
  std::size_t p = 0;
  for (std::size_t m = 0; m < std::max(modules.size(), recording.modules.size()); ++m) {
    if (m == modules.size())
      return differs(fmt::format("the model has no module '{}'", recording.modules[m].name));
    if (m == recording.modules.size())
      return differs(fmt::format("it has no module '{}'", modules[m]->name()));
    const std::string& name = modules[m]->name();
    if (recording.modules[m].name != name)
      return differs(
          fmt::format("module {} is '{}', the model's is '{}'", m, recording.modules[m].name, name));
    for (const auto& parameter : modules[m]->parameters()) {
      if (p == recording.parameters.size() || recording.parameters[p].module != m ||
          recording.parameters[p].name != parameter->name()) {
        return differs(
            fmt::format("it has no parameter '{}' where the model has it", parameter->full_name()));
      }
      const auto theirs = shape_of(recording.parameters[p++]);
      const std::tuple ours(parameter->dtype(), parameter->shape(), parameter->stride());
      if (theirs != ours) {
        return differs(fmt::format("parameter '{}' is {}, the model's is {}", parameter->full_name(),
                                   text(theirs), text(ours)));
      }
    }
    if (p < recording.parameters.size() && recording.parameters[p].module <= m) {
      return differs(
          fmt::format("the model has no parameter '{}' in module '{}'", recording.parameters[p].name, name));
    }
  }
  return {};
}

}  // namespace

struct Worker::Impl final : TransportSink {
  // A finished sync on its way to serve().
  struct Result_ {
    std::uint64_t version = 0;
    Status status;
    WorkerReport report;
    std::uint64_t sync_id = 0;
    std::optional<Timeline> timeline;  // where there is a trace file
  };

  Impl(const WorkerOptions& given, Model& target) : options(given), model(target) {}

  // ---- init, on the caller's thread
  // -----------------------------------------------------------------------------------
  Status start();
  Status join();
  Status make_plan();
  Status reserve();
  void announce(std::uint32_t producer, std::uint64_t slot_bytes, const std::vector<PullDescription>& pulls);
  void announce_plan(std::uint32_t producer);  // of the regular lane there
  // Whether the rank is in the fleet as far as this worker knows. On the progress thread.
  bool in_fleet(std::uint32_t rank) const;
  // Makes the link to the other workers of the replica.
  Status meet_mates();
  // send_user_message()'s.
  std::optional<Status> why_ended();
  // Waits until `ready` (called with `mutex` held), the fleet's end, or the connect timeout; the error says
  // what was waited for.
  Status wait_for(const std::function<bool()>& ready, const std::string& what);
  void stop();

  // ---- on the progress thread
  // -----------------------------------------------------------------------------------------
  // Names that the plan pulls for the model's own loaders.
  std::uint32_t fallback_names(const WorkerPlan& of) const;
  void on_control(const Member& from, Incarnation incarnation, ControlBody body);
  void on_up(const Member& member, Incarnation incarnation);
  void on_lost(const Member& member, const Status& why);
  void on_tick();
  // Starts the deferred update once nothing holds it back any more.
  void try_start();
  void start_update(const StartUpdate& message);
  void deliver(std::uint64_t sync_id, const Status& status);
  void push_result(std::uint64_t version, const Status& status, const WorkerReport& report,
                   std::optional<Timeline> timeline = std::nullopt);
  // On serve()'s thread.
  void write_trace(const Result_& result);
  void end(const Status& why);
  // Whether the running sync may have been committed by a mate, or is being committed here, or mates are being
  // told: it has an end of its own, which serve() tells before the fleet's.
  bool being_decided() const;
  void end_if_decided();
  void send(const Member& to, ControlBody body) { control->send(to, std::move(body)).ignore(); }

  void on_accepted(EndpointId endpoint) override { replica->on_accepted(endpoint); }
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override;
  void on_closed(EndpointId endpoint, const Status& why) override;
  void on_read_done(ReadToken token, const Status& status) override {
    if (engine) engine->on_read_done(token, status);
    after_event();
  }
  // Tells connect() that every hot endpoint has said hello, or that one never will.
  void after_event();

  const WorkerOptions options;
  Model& model;
  const Incarnation incarnation = random_nonzero_u64();
  const Clock& clock = SystemClock::instance();
  // These two are destroyed after the progress thread: until the transport has gone, reads under way may land in
  // their memory.
  std::unique_ptr<FallbackModel> fallbacks;  // the modules that did not bake; null when all did
  std::unique_ptr<ConsumerEngine> engine;    // confined to the progress thread once made
  std::unique_ptr<ProgressThread> progress;
  std::unique_ptr<ControlRelay> relay;
  std::unique_ptr<Control> control;
  std::shared_ptr<const Recording> recorded = std::make_shared<Recording>();
  // `recorded` with what did not bake as modules of their own; the same when all did.
  std::shared_ptr<const Recording> planned = recorded;
  std::shared_ptr<const InitTables> tables;
  std::shared_ptr<const WorkerPlan> plan;

  std::atomic<std::uint64_t> version_guard{0};

  // Confined to the progress thread.
  std::map<std::uint32_t, Incarnation> ranks_up;
  std::vector<Incarnation> trainers;                  // by rank: the life the sender speaks of; 0: lost
  std::map<std::uint32_t, std::string> returned;      // where those listen that came back since the payload
  bool met = false;                                   // reserve() has begun
  std::unique_ptr<ReplicaLink> replica;               // null until the fleet is known
  std::map<std::uint32_t, Incarnation> workers_up;    // before that
  std::map<std::uint32_t, std::pair<Incarnation, std::string>> workers_listen;
  std::optional<Status> ending;  // the sender is gone, and what that means for the last sync is being decided
  std::uint64_t current_sync = 0, current_version = 0;
  std::shared_ptr<const WorkerPlan> current_plan;  // what the sync runs: the plan, or what is left of it
  WorkerReport current_report;                     // once its update is over
  NameSet part_names;                              // the names `part` is of
  std::shared_ptr<const WorkerPlan> part;          // of the last sync of some names
  bool current_trace = false;                      // the sender wants current_sync's timeline
  bool delivered = true;                           // whether current_sync's result has reached serve()
  bool serving = false;     // whether serve() runs: a StartUpdate waits for it
  int pending_results = 0;  // handed to serve() whose on_sync has not returned: the next StartUpdate waits
  std::optional<StartUpdate> deferred;  // for these, or for trainers that are coming back

  Mutex mutex;
  CondVar wake;
  std::optional<InitPayload> payload SHARDPULL_GUARDED_BY(mutex);
  std::map<std::uint32_t, Status> reserve_replies SHARDPULL_GUARDED_BY(mutex);
  std::set<std::uint32_t> ranks_lost SHARDPULL_GUARDED_BY(mutex);  // ever: they may owe an answer to reserve
  bool hot_ready SHARDPULL_GUARDED_BY(mutex) = false;
  std::optional<Status> ended SHARDPULL_GUARDED_BY(mutex);  // OK = orderly shutdown
  std::deque<Result_> results SHARDPULL_GUARDED_BY(mutex);
  Result<std::uint64_t> held_version SHARDPULL_GUARDED_BY(mutex) = Status(StatusCode::kFailedPrecondition,
                                                                          "no sync has been applied yet",
                                                                          {.reason = Reason::kWrongState});
  std::vector<ModuleState> held_modules SHARDPULL_GUARDED_BY(mutex);  // by Recording::modules index
  bool stopped = false;                                               // the caller's thread
  std::unique_ptr<FleetTrace> trace;                                  // the caller's thread; null: none
};

// ---- init
// ---------------------------------------------------------------------------------------------------------------

std::optional<Status> Worker::Impl::why_ended() {
  MutexLock lock(mutex);
  wake.wait_for_ns(mutex, kEndKnownWithinNs, [&]() SHARDPULL_REQUIRES(mutex) { return ended.has_value(); });
  return ended;
}

Status Worker::Impl::wait_for(const std::function<bool()>& ready, const std::string& what) {
  const std::int64_t deadline =
      clock.now_ns() + static_cast<std::int64_t>(options.fleet.connect_timeout_ms) * kNanosPerMilli;
  Interrupt interrupt(options.fleet, clock);
  MutexLock lock(mutex);
  while (!ready()) {
    if (ended) {
      if (!ended->ok()) return *ended;
      return Status(StatusCode::kUnavailable,
                    fmt::format("the fleet ended while this worker waited for {}", what),
                    {.reason = Reason::kShutdown, .fault = Fault::kPeer});
    }
    const std::int64_t left = deadline - clock.now_ns();
    if (left <= 0) {
      return Status(
          StatusCode::kDeadlineExceeded,
          fmt::format("no {} within {} ms (connect_timeout_ms)", what, options.fleet.connect_timeout_ms),
          {.reason = Reason::kPeerLost, .fault = Fault::kPeer});
    }
    SHARDPULL_RETURN_IF_ERROR(interrupt.wait(wake, mutex, left));
  }
  return {};
}

Status Worker::Impl::start() {
  SHARDPULL_RETURN_IF_ERROR(check_options(options));
  SHARDPULL_ASSIGN_OR_RETURN(trace, FleetTrace::create(options.trace_file));
  const Member self{Role::kWorker, options.consumer};
  SHARDPULL_ASSIGN_OR_RETURN(std::unique_ptr<Transport> transport,
                             make_hot_transport(options.fleet, self, incarnation));
  progress = std::make_unique<ProgressThread>(
      std::move(transport), *this, [this] { on_tick(); }, [this](const Status& why) { end(why); },
      tick_ns(options.fleet), clock);
  relay = std::make_unique<ControlRelay>(
      *progress,
      ControlRelay::Handlers{
          .message = [this](const Member& from, Incarnation life,
                            ControlBody body) { on_control(from, life, std::move(body)); },
          .up = [this](const Member& member, Incarnation life) { on_up(member, life); },
          .lost = [this](const Member& member, const Status& why) { on_lost(member, why); }});
  progress->start();
  SHARDPULL_ASSIGN_OR_RETURN(control,
                             connect_grpc_control(control_options(options.fleet, self, incarnation), *relay));
  relay->open();
  return {};
}

Status Worker::Impl::join() {
  send(kSender, InitRequest{.ring_depth = options.ring_depth, .settings = options.fleet.settings});
  SHARDPULL_RETURN_IF_ERROR(wait_for([this]() SHARDPULL_REQUIRES(mutex) { return payload.has_value(); },
                                     "init payload from trainer 0"));
  InitPayload received;
  {
    MutexLock lock(mutex);
    received = std::move(*payload);
  }
  SHARDPULL_RETURN_IF_ERROR(received.status);
  auto decoded = decode_tables(received.tables.data(), received.tables.size());
  if (!decoded.ok()) return decoded.status().with_context("the init payload");
  SHARDPULL_RETURN_IF_ERROR(validate(*decoded).with_context("the init payload"));
  tables = std::make_shared<const InitTables>(std::move(*decoded));
  if (tables->transport != transport_of(options.fleet)) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("worker {} was started with transport {}, the trainers with {}", options.consumer,
                              to_string(transport_of(options.fleet)), to_string(tables->transport)),
                  {.reason = Reason::kSettingMismatch, .fault = Fault::kUser});
  }
  if (options.consumer >= tables->num_consumers) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("worker {} is out of range: the fleet has {} workers, numbered from 0",
                              options.consumer, tables->num_consumers),
                  {.reason = Reason::kSettingMismatch});
  }
  return {};
}

Status Worker::Impl::meet_mates() {
  const std::uint32_t size = tables->num_consumers / tables->num_replicas;
  const std::uint32_t first = options.consumer / size * size;
  std::vector<std::uint32_t> mates;
  for (std::uint32_t worker = first; worker < first + size; ++worker) {
    if (worker != options.consumer) mates.push_back(worker);
  }
  ReplicaHooks hooks;
  hooks.announce = [this](std::uint32_t mate, const std::string& address) {
    send({Role::kWorker, mate}, MateListens{address});
  };
  hooks.settled = [this] { end_if_decided(); };
  hooks.commit = [this](std::uint64_t sync_id) {
    const Status status = engine->finish_update(sync_id);
    if (!status.ok()) {
      send(kSender, Finished{sync_id, status});
      engine->log().fill(current_report);
      deliver(sync_id, status);
    }
  };
  hooks.abort = [this](std::uint64_t sync_id, const Status& why) {
    send(kSender, SyncFailed{sync_id, why.with_context(fmt::format("worker {}", options.consumer))});
    engine->fail(sync_id, why);
    end_if_decided();
  };
  Status status;
  progress->run([&] {
    replica = std::make_unique<ReplicaLink>(
        *progress, options.consumer, std::move(mates), options.fleet.token, incarnation,
        static_cast<std::int64_t>(options.fleet.dead_after_ms) * kNanosPerMilli, std::move(hooks));
    status = replica->listen();
    if (!status.ok()) return;
    for (const auto& [worker, life] : workers_up) replica->worker_up(worker, life);
    for (auto& [worker, listens] : workers_listen)
      replica->mate_listens(worker, listens.first, std::move(listens.second));
  });
  return status;
}

Status Worker::Impl::make_plan() {
  fault_point("worker.joining", 0);
  if (options.recording != nullptr) {
    SHARDPULL_RETURN_IF_ERROR(check_recording(*options.recording, model, tables->metadata));
    recorded = options.recording;
  } else {
    SHARDPULL_ASSIGN_OR_RETURN(Recording baked, bake(model, tables->metadata, options.bake));
    recorded = std::make_shared<const Recording>(std::move(baked));
  }
  PlanOptions plan_options;
  plan_options.max_chunk_bytes = options.max_chunk_bytes;
  plan_options.chunk_split = options.chunk_split;
  plan_options.pull_split = options.pull_split;
  plan_options.path = policy_of(options.path);
  planned = recorded;
  if (!recorded->fallbacks.empty()) {
    SHARDPULL_ASSIGN_OR_RETURN(Recording extended, with_fallbacks(*recorded, tables->metadata));
    planned = std::make_shared<const Recording>(std::move(extended));
  }
  SHARDPULL_ASSIGN_OR_RETURN(WorkerPlan made,
                             plan_worker(*tables, *planned, options.consumer, plan_options));
  plan = std::make_shared<const WorkerPlan>(std::move(made));
  SHARDPULL_RETURN_IF_ERROR(model.materialise());
  if (planned != recorded) {
    SHARDPULL_ASSIGN_OR_RETURN(fallbacks, FallbackModel::make(model, *recorded, *planned));
  }

  ConsumerHooks hooks;
  hooks.signal_by_control = [this](std::uint32_t producer, std::uint64_t sync_id,
                                   const std::vector<std::uint32_t>& groups) {
    send({Role::kTrainer, producer}, FreeGroups{sync_id, groups});
  };
  hooks.leave_lanes = [this](std::uint32_t producer, std::uint64_t sync_id) {
    send({Role::kTrainer, producer}, LeaveLanes{sync_id});
  };
  hooks.announce_recovery = [this](std::uint32_t producer) {
    const auto pulls = recovery_pulls_at(*plan, producer, effective_workers_per_replica(*tables));
    announce(producer, lane_slot_bytes(pulls), pulls);
  };
  hooks.announce = [this](std::uint32_t producer) { announce_plan(producer); };
  hooks.writing = [this] {
    if (version_guard.load() % 2 == 0) version_guard.fetch_add(1);  // odd before the first byte is written
  };
  hooks.update_done = [this](std::uint64_t sync_id, const Status& status) {
    current_report = {.consumer = options.consumer,
                      .bytes_kept = current_plan->bytes_kept,
                      .bytes_moved = engine->bytes_moved(),
                      .update_ns = engine->update_ns(),
                      .copy_ns = engine->copy_ns(),
                      .padding_bytes = padding_bytes(*current_plan),
                      .rerouted_pulls = engine->machine().rerouted(),
                      .fallback_names = fallback_names(*current_plan)};
    send(kSender, Prepared{.sync_id = sync_id,
                           .status = status,
                           .bytes_moved = current_report.bytes_moved,
                           .update_ns = current_report.update_ns,
                           .copy_ns = current_report.copy_ns,
                           .bytes_kept = current_report.bytes_kept,
                           .padding_bytes = current_report.padding_bytes,
                           .rerouted = current_report.rerouted_pulls,
                           .fallback_names = current_report.fallback_names});
    replica->update_done(sync_id, status);
    if (status.ok()) fault_point("worker.prepared", sync_id);
    if (status.ok()) return;
    engine->log().fill(current_report);
    deliver(sync_id, status);
  };
  hooks.finish_done = [this](std::uint64_t sync_id, const Status& status) {
    if (status.ok()) version_guard.fetch_add(1);
    engine->log().fill(current_report);
    send(kSender, Finished{sync_id, status, current_report.commit_ns, current_report.phases,
                           current_report.waited_for, current_report.waited_ns});
    if (status.ok()) fault_point("worker.committed", sync_id);
    deliver(sync_id, status);
  };
  hooks.report_failure = [this](std::uint64_t sync_id, const Status& status) {
    send(kSender, SyncFailed{sync_id, status.with_context(fmt::format("worker {}", options.consumer))});
  };
  auto made_engine = std::make_unique<ConsumerEngine>(
      *progress, model, *planned, tables, plan, options.fleet.token, incarnation,
      static_cast<std::int64_t>(options.fleet.stall_timeout_ms) * kNanosPerMilli,
      static_cast<std::int64_t>(options.fleet.dead_after_ms) * kNanosPerMilli + kNanosPerSecond,
      std::move(hooks), fallbacks.get(), options.apply);
  SHARDPULL_RETURN_IF_ERROR(made_engine->prepare());
  progress->run([&] { engine = std::move(made_engine); });
  return {};
}

Status Worker::Impl::reserve() {
  Status status;
  std::vector<std::uint32_t> producers;
  progress->run([&] {
    met = true;
    for (const auto& [rank, address] : returned) engine->producer_at(rank, address);
    // Of a fleet that goes on without it. Also one that this worker takes nothing from: it would be signalled.
    for (std::uint32_t rank = 0; rank < tables->producers.size(); ++rank) {
      if (in_fleet(rank)) continue;
      engine->producer_lost(rank, Status(StatusCode::kUnavailable, "it was down before this worker joined",
                                         {.reason = Reason::kPeerLost, .fault = Fault::kPeer}));
    }
    for (const ProducerPlan& producer : plan->producers) {
      if (in_fleet(producer.producer)) producers.push_back(producer.producer);
    }
    status = engine->connect(static_cast<std::int64_t>(options.fleet.connect_timeout_ms) * kNanosPerMilli);
    after_event();
  });
  SHARDPULL_RETURN_IF_ERROR(status);
  SHARDPULL_RETURN_IF_ERROR(
      wait_for([this]() SHARDPULL_REQUIRES(mutex) { return hot_ready; }, "hello on the hot channel"));

  for (const std::uint32_t producer : producers) announce_plan(producer);
  SHARDPULL_RETURN_IF_ERROR(wait_for(
      [&]() SHARDPULL_REQUIRES(mutex) {
        return std::all_of(producers.begin(), producers.end(),
                           [&](std::uint32_t rank) SHARDPULL_REQUIRES(mutex) {
                             return reserve_replies.contains(rank) || ranks_lost.contains(rank);
                           });
      },
      "answer to reserve"));
  // A trainer that lives and cannot be reached. One that died has been told by the control channel meanwhile.
  progress->run([&] { status = engine->connect_error(); });
  SHARDPULL_RETURN_IF_ERROR(status);
  MutexLock lock(mutex);
  for (const auto& [rank, reply] : reserve_replies) {
    if (!reply.ok()) return reply.with_context(fmt::format("trainer {} refused this worker's plan", rank));
  }
  return {};
}

bool Worker::Impl::in_fleet(std::uint32_t rank) const {
  const auto up = ranks_up.find(rank);
  return up != ranks_up.end() && rank < trainers.size() && trainers[rank] == up->second;
}

void Worker::Impl::announce_plan(std::uint32_t producer) {
  for (const ProducerPlan& planned_at : plan->producers) {
    if (planned_at.producer != producer) continue;
    announce(producer,
             planned_at.serve_slot_bytes == 0 ? 0 : std::max(planned_at.serve_slot_bytes, tables->presize),
             pulls_at(*plan, producer));
  }
}

void Worker::Impl::announce(std::uint32_t producer, std::uint64_t slot_bytes,
                            const std::vector<PullDescription>& pulls) {
  const Digest128 digest = pulls_digest(pulls, plan->ring_depth);
  Reserve message;
  message.slot_bytes = slot_bytes;
  message.ring_depth = plan->ring_depth;
  message.num_consumers = tables->num_consumers;
  message.workers_per_replica = tables->workers_per_replica;
  message.digest_low = digest.low;
  message.digest_high = digest.high;
  message.pulls = encode_pulls(pulls);
  send({Role::kTrainer, producer}, std::move(message));
}

void Worker::Impl::stop() {
  if (stopped) return;
  stopped = true;
  if (progress) {
    progress->run([this] {
      if (engine) engine->shutdown();
    });
  }
  if (engine) engine->stop();
  if (control) control->shutdown();
  if (progress) progress->stop();
  end(Status());
}

// ---- on the progress thread
// ---------------------------------------------------------------------------------------------

void Worker::Impl::end(const Status& why) {
  MutexLock lock(mutex);
  if (!ended) ended = why;
  wake.notify_all();
}

bool Worker::Impl::being_decided() const {
  if (replica != nullptr && replica->deciding()) return true;
  if (engine == nullptr || delivered) return false;
  const WorkerState state = engine->machine().state();
  return state == WorkerState::kPrepared || state == WorkerState::kCommitting;
}

void Worker::Impl::end_if_decided() {
  if (ending && !being_decided()) end(*ending);
}

void Worker::Impl::on_up(const Member& member, Incarnation life) {
  if (member.role == Role::kTrainer) {
    ranks_up[member.id] = life;
  } else if (replica != nullptr) {
    replica->worker_up(member.id, life);
  } else {
    workers_up[member.id] = life;
  }
}

void Worker::Impl::on_control(const Member& from, Incarnation life, ControlBody body) {
  if (auto* message = std::get_if<InitPayload>(&body)) {
    trainers = message->trainers;
    returned.clear();
    MutexLock lock(mutex);
    payload = std::move(*message);
    wake.notify_all();
  } else if (auto* message = std::get_if<ReserveReply>(&body)) {
    if (message->lane_kind == static_cast<std::uint32_t>(LaneKind::kRecovery)) {
      if (engine != nullptr) engine->recovery_reserved(from.id, message->status);
    } else if (engine == nullptr || !engine->reserved(from.id, message->status)) {
      MutexLock lock(mutex);
      reserve_replies[from.id] = message->status;
      wake.notify_all();
    }
  } else if (auto* message = std::get_if<Shutdown>(&body)) {
    log_info("the fleet ends: {}", message->reason);
    ending = end_of(*message);
    end_if_decided();
  } else if (auto* message = std::get_if<TrainerReturned>(&body)) {
    const auto up = ranks_up.find(message->rank);
    // Not one that is lost again. What came before the payload is in it.
    if (message->rank < trainers.size() && up != ranks_up.end() && up->second == message->incarnation) {
      trainers[message->rank] = message->incarnation;
      if (met) {
        const auto limit_ms = std::min(options.fleet.connect_timeout_ms, options.fleet.stall_timeout_ms / 2);
        engine->producer_returned(message->rank, std::move(message->producer_address), message->without_until,
                                  static_cast<std::int64_t>(limit_ms) * kNanosPerMilli);
      } else {
        returned[message->rank] = std::move(message->producer_address);
      }
    }
  } else if (auto* message = std::get_if<MateListens>(&body)) {
    if (replica != nullptr) {
      replica->mate_listens(from.id, life, std::move(message->address));
    } else {
      workers_listen[from.id] = {life, std::move(message->address)};
    }
  } else if (engine == nullptr) {
    log_debug("{} from {} before this worker was ready: dropped", name_of(body), to_string(from));
  } else if (auto* message = std::get_if<StartUpdate>(&body)) {
    deferred = std::move(*message);  // after_event() starts it, or what holds it back does
  } else if (auto* message = std::get_if<Update>(&body)) {
    const Status status =
        message->sync_id == current_sync
            ? engine->update()
            : Status(StatusCode::kFailedPrecondition,
                     fmt::format("update of sync {}, started was {}", message->sync_id, current_sync),
                     {.reason = Reason::kWrongState});
    if (!status.ok()) send(kSender, Prepared{.sync_id = message->sync_id, .status = status});
  } else if (auto* message = std::get_if<Finish>(&body)) {
    fault_point("worker.committing", message->sync_id);
    const Status status = replica->finish(message->sync_id);
    if (!status.ok()) send(kSender, Finished{message->sync_id, status});
  } else if (auto* message = std::get_if<SyncFailed>(&body)) {
    if (deferred && deferred->sync_id == message->sync_id) {  // it never started here
      push_result(deferred->version, message->status,
                  {.consumer = options.consumer, .bytes_kept = plan->bytes_kept});
      deferred.reset();
      send(kSender, Prepared{.sync_id = message->sync_id, .status = message->status});
    } else if (replica->heeds_failure(message->sync_id)) {
      engine->fail(message->sync_id, message->status);
    }
  } else if (auto* message = std::get_if<FreeAck>(&body)) {
    engine->signals_acked(from.id, message->sync_id, message->groups);
  } else {
    log_debug("{} from {} is not for a worker: dropped", name_of(body), to_string(from));
  }
  after_event();
}

void Worker::Impl::try_start() {
  if (!deferred || !serving || pending_results != 0) return;
  // A mate of one that was lost may still drain the sync that it was taken out of, or ask its mates how that
  // ended: its result follows.
  if (replica->deciding()) return;
  const WorkerState state = engine->machine().state();
  if (state == WorkerState::kUpdating || state == WorkerState::kCommitting) return;
  if (!engine->ready_for(deferred->sync_id)) return;
  const StartUpdate message = *std::exchange(deferred, std::nullopt);
  start_update(message);
}

void Worker::Impl::start_update(const StartUpdate& message) {
  std::shared_ptr<const WorkerPlan> some;
  Status status;
  if (!message.names.empty()) {
    if (part == nullptr || part_names != message.names) {
      auto made = restrict_plan(*plan, *planned, *tables, message.names);
      status = made.status();
      if (made.ok()) {
        part = std::make_shared<const WorkerPlan>(std::move(*made));
        part_names = message.names;
      }
    }
    some = part;
  }
  if (status.ok()) status = replica->start(message.sync_id);
  if (status.ok()) {
    status = engine->start_update(message.sync_id, message.version, some);
    if (!status.ok()) replica->update_done(message.sync_id, status);
  }
  if (status.ok()) {
    current_plan = some != nullptr ? some : plan;
    current_sync = message.sync_id;
    current_version = message.version;
    current_trace = message.trace;
    delivered = false;
  } else {
    push_result(message.version, status, {.consumer = options.consumer, .bytes_kept = plan->bytes_kept});
  }
  send(kSender, UpdateStarted{message.sync_id, status});
  fault_point("worker.started", message.sync_id);
}

std::uint32_t Worker::Impl::fallback_names(const WorkerPlan& of) const {
  if (fallbacks == nullptr) return 0;
  std::set<std::uint32_t> names;
  for (const Chunk& chunk : of.chunks) {
    for (const PlannedScatter& scatter : chunk.scatters) {
      if (scatter.destination.parameter >= recorded->parameters.size())
        names.insert(chunk.keys[scatter.key].name);
    }
  }
  return static_cast<std::uint32_t>(names.size());
}

void Worker::Impl::deliver(std::uint64_t sync_id, const Status& status) {
  if (delivered || sync_id != current_sync) return;
  delivered = true;
  push_result(current_version, status, current_report,
              trace ? std::optional(engine->log().timeline()) : std::nullopt);
  if (current_trace) send(kSender, TimelineReport{sync_id, encode_timeline(engine->log().timeline())});
  end_if_decided();
}

void Worker::Impl::push_result(std::uint64_t version, const Status& status, const WorkerReport& report,
                               std::optional<Timeline> timeline) {
  ++pending_results;
  const auto held = engine->machine().version();
  MutexLock lock(mutex);
  held_version = held;
  held_modules = engine->machine().modules();
  results.push_back({version, status, report, current_sync, std::move(timeline)});
  wake.notify_all();
}

void Worker::Impl::write_trace(const Result_& result) {
  if (!trace || !result.timeline || result.timeline->windows.empty()) return;
  const std::vector<Window>& windows = result.timeline->windows;
  trace->finish({.sync_id = result.sync_id,
                 .version = result.version,
                 .begin_ns = windows.front().begin_ns,
                 .end_ns = windows.back().end_ns,
                 .summary = result.status.to_string(),
                 .processes = {{{Role::kWorker, options.consumer}, *result.timeline, ClockOffset()}},
                 .missing = {}},
                {}, [](const Member&) { return std::nullopt; });
}

void Worker::Impl::after_event() {
  if (engine == nullptr) return;
  try_start();
  MutexLock lock(mutex);
  if (!hot_ready && engine->connected()) {
    hot_ready = true;
    wake.notify_all();
  }
}

void Worker::Impl::on_lost(const Member& member, const Status& why) {
  const Status named(StatusCode::kUnavailable,
                     fmt::format("{} is lost: {}", to_string(member), why.message()),
                     {.reason = Reason::kPeerLost, .fault = why.info().fault, .peer = to_string(member)});
  if (member.role == Role::kTrainer) {
    ranks_up.erase(member.id);
    // Whether the fleet can go on without it is the sender's to say, also while this worker joins.
    MutexLock lock(mutex);
    ranks_lost.insert(member.id);
    wake.notify_all();
  }
  if (engine != nullptr && member.role == Role::kTrainer) engine->producer_lost(member.id, named);
  after_event();
  if (member == kSender) {
    deferred.reset();
    // A sender that ends the fleet has no commit under way: there is nobody to tell or ask.
    if (replica != nullptr && (!ending || being_decided())) replica->sender_lost(named);
    if (!ending) ending = named;
    if (!being_decided()) {
      if (engine != nullptr && !delivered) engine->fail(current_sync, named);
      end(*ending);
    }
    after_event();
  }
}

void Worker::Impl::on_tick() {
  if (engine) engine->tick();
  if (replica) replica->tick();
  end_if_decided();
  after_event();
}

void Worker::Impl::on_message(EndpointId endpoint, const HotHeader& header, const std::byte* bytes) {
  if (replica && replica->on_message(endpoint, header, bytes)) {
    end_if_decided();
  } else if (engine) {
    engine->on_message(endpoint, header, bytes);
  }
  after_event();
}

void Worker::Impl::on_closed(EndpointId endpoint, const Status& why) {
  if (!replica || !replica->on_closed(endpoint, why)) {
    if (engine) engine->on_closed(endpoint, why);
  }
  after_event();
}

// ---- the public face
// ------------------------------------------------------------------------------------------------------

Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Worker::~Worker() {
  shutdown();
}

Result<EngineMemory> Worker::allocate(std::uint64_t bytes, const std::string& what) {
  SHARDPULL_ASSIGN_OR_RETURN(const std::shared_ptr<const SharedSegment> segment,
                             SharedSegment::create(bytes, what));
  return EngineMemory{segment->data(), segment->bytes(), std::const_pointer_cast<SharedSegment>(segment)};
}

Result<std::unique_ptr<Worker>> Worker::connect(const WorkerOptions& options, Model& model) {
  auto impl = std::make_unique<Impl>(options, model);
  Impl& worker = *impl;
  std::unique_ptr<Worker> owner(new Worker(std::move(impl)));
  SHARDPULL_RETURN_IF_ERROR(worker.start());
  Status status = check_experts(options);  // the fleet is told, as of all that follows
  if (status.ok()) status = worker.join();
  if (status.ok()) status = worker.meet_mates();
  if (status.ok()) status = worker.make_plan();
  if (status.ok()) status = worker.reserve();
  InitDone done{.status = status};
  if (worker.plan) {
    done.bytes_kept = worker.plan->bytes_kept;
    done.bytes_planned = worker.plan->bytes_planned;
  }
  worker.send(kSender, std::move(done));
  if (!status.ok()) return status;
  return owner;
}

Status Worker::serve(const OnSync& on_sync) {
  Impl& worker = *impl_;
  Interrupt interrupt(worker.options.fleet, worker.clock);
  int taken = 0;  // results whose on_sync has begun, while the progress thread does not know that it is over
  const auto tell = [&worker, &taken](bool serving) {
    worker.progress->post([&worker, serving, seen = std::exchange(taken, 0)] {
      worker.serving = serving;
      worker.pending_results -= seen;
      worker.try_start();
    });
  };
  struct Leave {
    const decltype(tell)& tell_progress;
    ~Leave() { tell_progress(false); }
  } const leave{tell};
  tell(true);
  for (;;) {
    Impl::Result_ result;
    {
      MutexLock lock(worker.mutex);
      while (worker.results.empty() && !worker.ended)
        SHARDPULL_RETURN_IF_ERROR(interrupt.wait(worker.wake, worker.mutex, kNanosPerSecond));
      if (worker.results.empty()) return *worker.ended;
      result = std::move(worker.results.front());
      worker.results.pop_front();
    }
    taken = 1;
    worker.write_trace(result);
    if (on_sync) on_sync(result.version, result.status, result.report);
    // Asked before the next sync may begin: one that leaves here has let none begin.
    SHARDPULL_RETURN_IF_ERROR(interrupt.ask());
    tell(true);
  }
}

Result<std::uint64_t> Worker::version() const {
  MutexLock lock(impl_->mutex);
  return impl_->held_version;
}

Result<std::uint64_t> Worker::module_version(const std::string& module) const {
  const std::vector<RecordedModule>& modules = impl_->recorded->modules;
  const auto found = std::find_if(modules.begin(), modules.end(),
                                  [&](const RecordedModule& each) { return each.name == module; });
  if (found == modules.end()) {
    return Status(StatusCode::kNotFound, fmt::format("the model has no module '{}'", module),
                  {.reason = Reason::kBadArgument});
  }
  auto index = static_cast<std::size_t>(found - modules.begin());
  const std::vector<FallbackModule> fallbacks = fallback_modules(*impl_->recorded);
  for (std::size_t f = 0; f < fallbacks.size(); ++f) {  // one that did not bake is loaded with its fallback module
    const auto& loaded = fallbacks[f].modules;
    if (std::binary_search(loaded.begin(), loaded.end(), index)) index = modules.size() + f;
  }
  MutexLock lock(impl_->mutex);
  const ModuleState state = index < impl_->held_modules.size() ? impl_->held_modules[index] : ModuleState{};
  if (state.kind == ModuleState::Kind::kCurrent) return state.version;
  return Status(StatusCode::kFailedPrecondition, fmt::format("module '{}' is {}", module, to_string(state)),
                {.reason = Reason::kWrongState});
}

const std::atomic<std::uint64_t>& Worker::version_guard() const {
  return impl_->version_guard;
}

const Recording& Worker::recording() const {
  return *impl_->recorded;
}

Status Worker::send_message(const std::string& to, const std::string& topic, const std::string& body) {
  return send_user_message(impl_->control.get(), to, topic, body, [this] { return impl_->why_ended(); });
}

std::uint64_t Worker::engine_bytes() const {
  return (impl_->engine ? impl_->engine->landing_bytes() : 0) +
         (impl_->fallbacks ? impl_->fallbacks->parameter_bytes() : 0);
}

std::string Worker::plan_summary() const {
  return summarise(*impl_->tables, *impl_->plan, *impl_->planned);
}

void Worker::shutdown() {
  impl_->stop();
}

}  // namespace shardpull
