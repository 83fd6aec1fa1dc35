// Trainer: one rank. Its progress thread runs three machines: ProducerMachine (in ProducerServer),
// TrainerMachine (the gather loop's credit), and on rank 0 SenderMachine (the fleet's sync). The caller's
// thread of send_weights asks the source, packs small tensors and waits.
//
//   init:          TrainerJoin -> TrainerTable (a collective), then on the sender InitRequest -> InitPayload
//   -> InitDone per worker send_weights:  SyncOpen -> begin -> [AskSource -> publish]* -> AskEnd -> end_sync
//   -> RankEnded -> SyncClosed
#include "shardpull/trainer.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fault_hooks.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "control/grpc/grpc_control.h"
#include "observe/charge.h"
#include "plan/path.h"
#include "plan/plan.h"
#include "plan/published.h"
#include "plan/restrict.h"
#include "protocol/trainer_machine.h"
#include "runtime/fleet_link.h"
#include "runtime/fleet_trace.h"
#include "runtime/group_placer.h"
#include "runtime/hot_transport.h"
#include "runtime/producer_server.h"
#include "runtime/progress_thread.h"
#include "runtime/settings.h"

namespace shardpull {
namespace {

Status bad_option(std::string_view field, std::string_view rule, std::uint64_t value) {
  return Status(StatusCode::kInvalidArgument, fmt::format("{} {} (it is {})", field, rule, value),
                {.reason = Reason::kBadArgument});
}

Status check_options(const TrainerOptions& options) {
  SHARDPULL_RETURN_IF_ERROR(validate(options.fleet));
  if (options.world_size == 0) return bad_option("world_size", "must be >= 1", 0);
  if (options.rank >= options.world_size) {
    return bad_option("rank", fmt::format("must be below world_size {}", options.world_size), options.rank);
  }
  if (options.num_consumers == 0) return bad_option("num_consumers", "must be >= 1", 0);
  if (options.num_replicas == 0 || options.num_consumers % options.num_replicas != 0) {
    return bad_option("num_replicas", fmt::format("must divide num_consumers {}", options.num_consumers),
                      options.num_replicas);
  }
  if (options.ring_depth == 0) return bad_option("ring_depth", "must be >= 1", 0);
  const std::uint32_t workers = options.num_consumers / options.num_replicas;
  if (options.workers_per_replica != 0 && options.workers_per_replica != workers &&
      options.workers_per_replica != options.num_consumers) {
    return bad_option("workers_per_replica",
                      fmt::format("must be 0, {} (num_consumers / num_replicas) or {} (no slot sharing)",
                                  workers, options.num_consumers),
                      options.workers_per_replica);
  }
  return {};
}

// How long a sender whose init has failed stays for workers that have not come yet.
constexpr std::uint64_t kJoinGraceMs = 3'000;

// A wait that only its event or the fleet's end finishes.
constexpr std::uint64_t kNoLimit = UINT64_MAX;

// The settings every rank must share; compared byte for byte in the collective.
std::string shared_settings(const TrainerOptions& options) {
  return fmt::format(
      "world_size={}\nnum_consumers={}\nnum_replicas={}\nworkers_per_replica={}\nring_depth={}\n"
      "lookahead={}\npresize={}\nexport_pack_limit={}\non_consumer_loss={}\ntransport={}\nintegrity={}\n"
      "{}\n{}",
      options.world_size, options.num_consumers, options.num_replicas, options.workers_per_replica,
      options.ring_depth, options.lookahead, options.presize_bytes, options.export_pack_limit_bytes,
      options.on_consumer_loss == OnConsumerLoss::kFail ? "fail" : "continue",
      to_string(transport_of(options.fleet)), to_string(options.integrity), options.fleet.settings,
      options.settings);
}

std::vector<std::byte> to_bytes(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

std::string to_text(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Status lost(const Member& member, const Status& why) {
  return Status(StatusCode::kUnavailable, fmt::format("{} is lost: {}", to_string(member), why.message()),
                {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = to_string(member)});
}

}  // namespace

std::vector<std::uint32_t> WeightSource::held_names() const {
  std::vector<bool> whole(metadata().size(), true);
  for (const Piece& piece : held_pieces()) {
    if (piece.name < whole.size()) whole[piece.name] = false;
  }
  std::vector<std::uint32_t> names;
  for (std::uint32_t name = 0; name < whole.size(); ++name) {
    if (whole[name]) names.push_back(name);
  }
  return names;
}

struct Trainer::Impl final : TransportSink {
  explicit Impl(const TrainerOptions& given) : options(given), sender(given.rank == 0) {}

  // ---- on the caller's thread
  // -----------------------------------------------------------------------------------------
  Status start();
  Status describe(WeightSource& source);
  Status join(WeightSource& source);
  Status wait_for_workers();
  // "; refused was a peer: ..." of those that wanted to join, or "".
  std::string refused_meanwhile() const;
  Result<SyncReport> send_weights(std::uint64_t version, const SendOptions& send);
  // Sender: opens a sync over the whole replicas, once there is one.
  Status open_sync(std::uint64_t version, const NameSet& names);
  Status wait_for_open(std::uint64_t version, SyncOpen& open);
  Result<SyncOpen> take_opened(std::uint64_t limit_ms, const std::function<std::string()>& what);
  Result<NextSync> next_sync();
  // What `open` asks for, against what this rank's caller does.
  Status check_open(const SyncOpen& open, std::uint64_t version, const NameSet& names) const;
  // "all names", "3 of 40 names: 'a', 'b', 'c'".
  std::string names_text(const NameSet& names) const;
  // What this rank did in the sync so far, into `timeline`; and its part of it, into `mine`.
  void end_timeline(const SyncOpen& open, RankReport& mine);
  // Tells the sender, and the trace file, what the sync that has ended was.
  void trace_sync(std::int64_t started_ns, std::uint64_t version, const Result<SyncReport>& outcome);
  Status gather_loop(const SyncOpen& open);
  Status take_group(GroupStream& stream, std::uint32_t group);
  // What allocate() gave out and somebody still owns, ascending by address.
  std::vector<std::shared_ptr<ExportedMemory>> owned_memory();
  Status expect_end(GroupStream& stream);
  void release(GroupStream* stream, std::uint32_t group);
  void stop(const std::string& reason, const Status& why);
  // send_user_message()'s.
  std::optional<Status> why_ended();
  // Waits on `wake` until `ready` (called with `mutex` held), the fleet's end, or `timeout_ms`; the error
  // names `what`.
  enum class Asks : std::uint8_t { kYes, kNo };  // whether FleetOptions::interrupt may end the wait
  Status wait_for(const std::function<bool()>& ready, std::uint64_t timeout_ms,
                  const std::function<std::string()>& what, Asks asks = Asks::kYes);

  // ---- on the progress thread
  // -----------------------------------------------------------------------------------------
  void on_control(const Member& from, Incarnation from_incarnation, ControlBody body);
  void on_lost(const Member& member, const Status& why);
  void on_tick();
  void collect_join(std::uint32_t rank, Incarnation life, TrainerJoin join);
  // A lost rank's next life.
  void take_back(std::uint32_t rank, Incarnation life, const TrainerJoin& join);
  Status check_return(std::uint32_t rank, const TrainerJoin& join) const;
  void answer_joins(const Status& status);
  Result<InitTables> resolve();
  Status check_request(std::uint32_t consumer, const InitRequest& request) const;
  void answer_init_request(std::uint32_t consumer, const InitRequest& request);
  void worker_done(std::uint32_t consumer, const InitDone& done);
  void end(const Status& why);
  void send(const Member& to, ControlBody body) { control->send(to, std::move(body)).ignore(); }
  template <typename Event>
  void drive_trainer(Event event);
  template <typename Event>
  void drive_sender(Event event);
  void perform(const SenderAction& action);

  void on_accepted(EndpointId endpoint) override { server->on_accepted(endpoint); }
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override {
    server->on_message(endpoint, header, payload);
  }
  void on_closed(EndpointId endpoint, const Status& why) override { server->on_closed(endpoint, why); }
  void on_read_done(ReadToken, const Status&) override {}  // a trainer reads nothing

  const TrainerOptions options;
  const bool sender;
  const Incarnation incarnation = random_nonzero_u64();
  const Clock& clock = SystemClock::instance();
  std::unique_ptr<ProgressThread> progress;
  std::unique_ptr<ProducerServer> server;
  std::unique_ptr<ControlRelay> relay;
  std::unique_ptr<Control> control;
  std::string hot_address;
  MessageQueue messages;
  std::atomic<std::uint64_t> ring_bytes{0};

  // Set by describe(), constant afterwards.
  WeightSource* source = nullptr;
  RankDescription rank;
  Holding holding;

  // Confined to the progress thread.
  std::map<std::uint32_t, TrainerJoin> joins;  // of their first lives
  std::map<std::uint32_t, Incarnation> rank_lives;
  bool joins_answered = false;
  std::map<std::uint32_t, InitRequest> early_requests;  // sender: before the tables exist
  std::unique_ptr<TrainerMachine> trainer;
  std::unique_ptr<SenderMachine> sync;  // sender
  std::uint64_t last_sync_id = 0;       // sender
  SyncReport report;                    // of the running sync
  std::vector<std::uint32_t> live;      // sender: of the running sync
  NameSet sync_names;                   // sender: of the running sync
  std::uint64_t running_sync = 0;       // on this rank; 0 = none
  bool failed = false;                  // the running sync has failed on this rank

  mutable Mutex mutex;
  CondVar wake;
  std::shared_ptr<const InitTables> tables SHARDPULL_GUARDED_BY(mutex);
  std::set<std::uint32_t> joined_ranks SHARDPULL_GUARDED_BY(mutex);    // sender
  std::set<std::uint32_t> joined_workers SHARDPULL_GUARDED_BY(mutex);  // sender
  std::optional<Status> table_status SHARDPULL_GUARDED_BY(mutex);
  std::map<std::uint32_t, InitDone> workers_done SHARDPULL_GUARDED_BY(mutex);
  // Sender: workers became ready, ranks came back.
  std::uint64_t times_joined SHARDPULL_GUARDED_BY(mutex) = 0;
  std::optional<Status> init_failure
      SHARDPULL_GUARDED_BY(mutex);                             // sender: a member lost before init was over
  bool returned SHARDPULL_GUARDED_BY(mutex) = false;           // this rank, to a fleet that ran already
  std::optional<SyncOpen> opened SHARDPULL_GUARDED_BY(mutex);  // not yet taken by send_weights or next_sync
  std::deque<TrainerAction> work SHARDPULL_GUARDED_BY(mutex);  // for the caller of send_weights
  std::optional<SyncClosed> closed SHARDPULL_GUARDED_BY(mutex);
  std::optional<Status> ended SHARDPULL_GUARDED_BY(mutex);  // the fleet is over, OK or not

  // The caller's thread.
  GroupPlacer placer{rank, clock};
  SpanLog gather_log;                 // of the running sync
  std::int64_t opened_ns = 0;         // when this rank learnt of it
  std::optional<SyncOpen> next;       // taken by next_sync, for send_weights
  std::optional<SyncOpen> traced;     // what was opened, until it has been traced
  Timeline timeline;                  // of the last sync
  std::unique_ptr<FleetTrace> trace;  // null: none; take() is also called on the progress thread
  std::vector<std::weak_ptr<ExportedMemory>> allocations SHARDPULL_GUARDED_BY(mutex);
  Status last_error;  // of init or the last sync
  bool initialised = false, stopped = false;
};

// ---- starting
// -----------------------------------------------------------------------------------------------------------

Status Trainer::Impl::start() {
  SHARDPULL_RETURN_IF_ERROR(check_options(options));
  SHARDPULL_ASSIGN_OR_RETURN(trace, FleetTrace::create(options.trace_file));
  const Member self{Role::kTrainer, options.rank};
  SHARDPULL_ASSIGN_OR_RETURN(std::unique_ptr<Transport> transport,
                             make_hot_transport(options.fleet, self, incarnation));
  SHARDPULL_ASSIGN_OR_RETURN(hot_address, transport->listen());
  progress = std::make_unique<ProgressThread>(
      std::move(transport), *this, [this] { on_tick(); }, [this](const Status& why) { end(why); },
      tick_ns(options.fleet), clock);

  ProducerHooks hooks;
  hooks.reserve_reply = [this](std::uint32_t consumer, LaneKind lane, const Status& status) {
    ring_bytes = server->ring_bytes();
    send({Role::kWorker, consumer}, ReserveReply{status, static_cast<std::uint32_t>(lane)});
  };
  hooks.ack_by_control = [this](std::uint32_t consumer, std::uint64_t sync_id,
                                const std::vector<std::uint32_t>& freed) {
    send({Role::kWorker, consumer}, FreeAck{sync_id, freed});
  };
  hooks.group_freed = [this](std::uint32_t group) {
    drive_trainer([&](TrainerActions& out) { trainer->group_freed(group, out); });
  };
  hooks.sync_ended = [this] { drive_trainer([&](TrainerActions& out) { trainer->producer_ended(out); }); };
  hooks.sync_failed = [this](std::uint64_t sync_id, const Status& why) {
    failed = true;
    send(kSender, SyncFailed{sync_id, why});
    drive_trainer([&](TrainerActions& out) { trainer->fail(why, out); });
  };
  hooks.sync_quiet = [this] { drive_trainer([&](TrainerActions& out) { trainer->producer_quiet(out); }); };
  server = std::make_unique<ProducerServer>(*progress, options.rank, options.fleet.token, incarnation,
                                            std::move(hooks));
  trainer = std::make_unique<TrainerMachine>(options.lookahead);
  if (sender) {
    const std::uint32_t per_replica = options.num_consumers / options.num_replicas;
    sync = std::make_unique<SenderMachine>(SenderConfig{
        .world_size = options.world_size,
        .num_consumers = options.num_consumers,
        .workers_per_replica = per_replica,
        .fail_on_consumer_loss = options.on_consumer_loss == OnConsumerLoss::kFail,
        .step_timeout_ns = static_cast<std::int64_t>(options.fleet.stall_timeout_ms) * kNanosPerMilli});
  }
  relay = std::make_unique<ControlRelay>(
      *progress,
      ControlRelay::Handlers{
          .message = [this](const Member& from, Incarnation from_incarnation,
                            ControlBody body) { on_control(from, from_incarnation, std::move(body)); },
          .up =
              [this](const Member& member, Incarnation from_incarnation) {
                if (member.role == Role::kWorker) server->consumer_up(member.id, from_incarnation);
              },
          .lost = [this](const Member& member, const Status& why) { on_lost(member, why); }});
  progress->start();
  if (sender) {
    SHARDPULL_ASSIGN_OR_RETURN(control,
                               start_grpc_hub(control_options(options.fleet, self, incarnation), *relay));
    relay->open();
  }
  return {};
}

Status Trainer::Impl::describe(WeightSource& given) {
  source = &given;
  const bool resident = given.resident();
  if (options.publish == PublishMode::kResident && !resident) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("publish is resident, but the weight source of trainer {} does not keep its "
                              "tensors in place (WeightSource::resident); use gather or auto",
                              options.rank),
                  {.reason = Reason::kBadArgument});
  }
  rank.rank = options.rank;
  rank.metadata = given.metadata();
  rank.mappable = given.in_engine_memory();
  rank.resident = resident && options.publish != PublishMode::kGather;
  rank.export_pack_limit = options.export_pack_limit_bytes;
  rank.sums_views = options.integrity == Integrity::kFull;
  rank.adopts = reads_any_memory(transport_of(options.fleet));
  SHARDPULL_ASSIGN_OR_RETURN(rank.groups, form_groups(rank.metadata));
  SHARDPULL_RETURN_IF_ERROR(describe_holding(given.held_names(), given.held_pieces(), rank));
  holding.rank = options.rank;
  holding.digest = metadata_digest(rank.metadata);
  holding.whole.assign((rank.metadata.size() + 7) / 8, 0);
  for (std::uint32_t name = 0; name < rank.metadata.size(); ++name) {
    if (rank.whole[name]) holding.whole[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
  }
  holding.pieces = rank.pieces;
  holding.mappable = rank.mappable;
  holding.resident = rank.resident;
  // Registered once, here, while nothing moves.
  SHARDPULL_RETURN_IF_ERROR(placer.allocate(progress->transport(), options.lookahead + 1));
  progress->run([this] {
    for (const auto& buffer : placer.exports().buffers()) server->add_memory(buffer);
  });
  return {};
}

Status Trainer::Impl::wait_for(const std::function<bool()>& ready, std::uint64_t timeout_ms,
                               const std::function<std::string()>& what, Asks asks) {
  Interrupt interrupt(options.fleet, clock);
  if (asks == Asks::kNo) interrupt.ask_no_more();
  const std::int64_t deadline = timeout_ms == kNoLimit
                                    ? INT64_MAX
                                    : clock.now_ns() + static_cast<std::int64_t>(timeout_ms) * kNanosPerMilli;
  MutexLock lock(mutex);
  while (!ready()) {
    if (ended) {
      if (!ended->ok()) return *ended;
      return Status(StatusCode::kUnavailable,
                    fmt::format("the fleet ended while trainer {} waited for {}", options.rank, what()),
                    {.reason = Reason::kShutdown, .fault = Fault::kPeer});
    }
    const std::int64_t left = deadline - clock.now_ns();
    if (left <= 0) {
      return Status(StatusCode::kDeadlineExceeded,
                    fmt::format("trainer {} waited {} ms for {}", options.rank, timeout_ms, what()),
                    {.reason = Reason::kPeerLost, .fault = Fault::kPeer});
    }
    SHARDPULL_RETURN_IF_ERROR(interrupt.wait(wake, mutex, std::min(left, kNanosPerSecond)));
  }
  return {};
}

std::optional<Status> Trainer::Impl::why_ended() {
  MutexLock lock(mutex);
  wake.wait_for_ns(mutex, kEndKnownWithinNs, [&]() SHARDPULL_REQUIRES(mutex) { return ended.has_value(); });
  return ended;
}

Status Trainer::Impl::join(WeightSource& given) {
  SHARDPULL_RETURN_IF_ERROR(describe(given));
  if (!sender) {
    // The link comes up only now: a rank the fleet knows of has described itself.
    SHARDPULL_ASSIGN_OR_RETURN(
        control, connect_grpc_control(
                     control_options(options.fleet, {Role::kTrainer, options.rank}, incarnation), *relay));
    relay->open();
  }
  TrainerJoin message;
  message.world_size = options.world_size;
  message.holding = encode_holding(holding);
  message.producer_address = hot_address;
  message.settings = to_bytes(shared_settings(options));
  send(kSender, std::move(message));
  SHARDPULL_RETURN_IF_ERROR(wait_for(
      [this]() SHARDPULL_REQUIRES(mutex) { return table_status.has_value() || init_failure.has_value(); },
      options.fleet.connect_timeout_ms,
      [this]() SHARDPULL_REQUIRES(mutex) {
        if (!sender) return std::string("the table of trainers from trainer 0");
        std::string missing;
        for (std::uint32_t rank = 0; rank < options.world_size; ++rank) {
          if (joined_ranks.count(rank) == 0)
            missing += fmt::format("{}trainer {}", missing.empty() ? "" : ", ", rank);
        }
        return fmt::format("{} to join{}", missing, refused_meanwhile());
      }));
  std::shared_ptr<const InitTables> current;
  {
    MutexLock lock(mutex);
    if (init_failure) return *init_failure;
    SHARDPULL_RETURN_IF_ERROR(*table_status);
    current = tables;
  }
  SHARDPULL_ASSIGN_OR_RETURN(rank.parts, published_parts(*current, options.rank, rank.pieces));
  return {};
}

std::string Trainer::Impl::refused_meanwhile() const {
  const std::vector<std::string> refusals = control->refusals();
  return refusals.empty() ? std::string() : fmt::format("; refused was {}", fmt::join(refusals, "; "));
}

Status Trainer::Impl::wait_for_workers() {
  const auto first_error = [this]() SHARDPULL_REQUIRES(mutex) -> Status {
    for (const auto& [consumer, done] : workers_done) {
      if (!done.status.ok()) return done.status.with_context(fmt::format("worker {}", consumer));
    }
    return {};
  };
  SHARDPULL_RETURN_IF_ERROR(wait_for(
      [&]() SHARDPULL_REQUIRES(mutex) {
        return init_failure.has_value() || workers_done.size() == options.num_consumers ||
               !first_error().ok();
      },
      options.fleet.connect_timeout_ms,
      [this]() SHARDPULL_REQUIRES(mutex) {
        std::string missing;
        for (std::uint32_t worker = 0; worker < options.num_consumers; ++worker) {
          if (workers_done.count(worker) != 0) continue;
          missing += fmt::format("{}worker {} to {}", missing.empty() ? "" : ", ", worker,
                                 joined_workers.count(worker) == 0 ? "join" : "finish its init");
        }
        return fmt::format("{} (num_consumers is {}){}", missing, options.num_consumers, refused_meanwhile());
      }));
  bool failed_worker = false;
  {
    MutexLock lock(mutex);
    failed_worker = !first_error().ok();
  }
  if (failed_worker) {
    // Who comes after the hub has gone waits for it in vain: those that are on their way shall hear why.
    wait_for([this]() SHARDPULL_REQUIRES(mutex) { return joined_workers.size() >= options.num_consumers; },
             std::min(options.fleet.connect_timeout_ms, kJoinGraceMs), [] { return std::string("workers"); })
        .ignore();
  }
  MutexLock lock(mutex);
  SHARDPULL_RETURN_IF_ERROR(first_error());
  if (init_failure) return *init_failure;
  return {};
}

// ---- the collective, on the sender's progress thread
// ----------------------------------------------------------------------

void Trainer::Impl::collect_join(std::uint32_t rank, Incarnation life, TrainerJoin message) {
  if (joins_answered && rank < options.world_size) return take_back(rank, life, message);
  if (rank >= options.world_size) {
    const Status wrong(StatusCode::kFailedPrecondition,
                       fmt::format("rank {} is out of range: world_size is {}", rank, options.world_size),
                       {.reason = Reason::kWrongState});
    return send({Role::kTrainer, rank}, TrainerTable{wrong, {}});
  }
  joins[rank] = std::move(message);
  rank_lives[rank] = life;
  {
    MutexLock lock(mutex);
    joined_ranks.insert(rank);
  }
  if (joins.size() < options.world_size) return;
  auto resolved = resolve();
  if (!resolved.ok()) {
    answer_joins(resolved.status());
    return;
  }
  {
    MutexLock lock(mutex);
    tables = std::make_shared<const InitTables>(std::move(resolved).value());
  }
  answer_joins(Status());
  const std::map<std::uint32_t, InitRequest> waiting = std::move(early_requests);
  early_requests.clear();
  for (const auto& [consumer, request] : waiting) answer_init_request(consumer, request);
}

Status Trainer::Impl::check_return(std::uint32_t rank, const TrainerJoin& message) const {
  const auto refuse = [&](Reason reason, const std::string& what) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("trainer {} cannot join again: {}", rank, what), {.reason = reason});
  };
  {
    MutexLock lock(mutex);
    if (tables == nullptr) return refuse(Reason::kWrongState, "trainer_init of this fleet has failed");
  }
  if (!sync->lost(rank)) return refuse(Reason::kWrongState, "it is in the fleet");
  const TrainerJoin& first = joins.at(rank);
  if (message.settings != first.settings) {
    const auto [now, then] = settings_difference(to_text(message.settings), to_text(first.settings));
    return refuse(Reason::kSettingMismatch,
                  fmt::format("its settings have {}, in its first life they had {}", now, then));
  }
  if (message.holding == first.holding) return {};
  const auto now = decode_holding(message.holding.data(), message.holding.size());
  if (!now.ok()) return now.status().with_context(fmt::format("what trainer {} holds", rank));
  const auto then = decode_holding(first.holding.data(), first.holding.size());
  if (then.ok() && now->digest != then->digest) {
    return refuse(Reason::kMetadataMismatch,
                  fmt::format("the digest of its metadata is {}, in its first life it was {}",
                              shardpull::to_string(now->digest), shardpull::to_string(then->digest)));
  }
  const auto describe = [](const Holding& held) {
    std::size_t whole = 0;
    for (const std::uint8_t bits : held.whole) whole += static_cast<std::size_t>(std::popcount(bits));
    return fmt::format("{} whole names and {} pieces{}{}", whole, held.pieces.size(),
                       held.mappable ? ", mappable" : "", held.resident ? ", resident" : "");
  };
  return refuse(Reason::kMetadataMismatch,
                fmt::format("it holds something else ({}) than in its first life ({})", describe(*now),
                            then.ok() ? describe(*then) : "unknown"));
}

void Trainer::Impl::take_back(std::uint32_t rank, Incarnation life, const TrainerJoin& message) {
  const Member member{Role::kTrainer, rank};
  const Status refused = check_return(rank, message);
  if (!refused.ok()) {
    log_warn("{}", refused.to_string());
    return send(member, TrainerTable{refused, {}});
  }
  rank_lives[rank] = life;
  TrainerTable answer{{}, {}, true};
  {
    MutexLock lock(mutex);
    auto changed = std::make_shared<InitTables>(*tables);
    changed->producers[rank] = message.producer_address;
    tables = std::move(changed);
    answer.tables = encode_tables(*tables);
  }
  sync->take_back(rank);
  // The rank hears first: whoever reserves there finds its producer started.
  send(member, std::move(answer));
  for (std::uint32_t worker = 0; worker < options.num_consumers; ++worker)
    send({Role::kWorker, worker}, TrainerReturned{rank, life, message.producer_address, last_sync_id});
  log_info("trainer {} is back, and in the syncs after sync {}", rank, last_sync_id);
  {
    MutexLock lock(mutex);
    ++times_joined;
    wake.notify_all();
  }
  fault_point("sender.rejoined", 0);
}

Result<InitTables> Trainer::Impl::resolve() {
  const std::string mine = shared_settings(options);
  InitTables resolved;
  std::vector<Holding> holdings;
  for (const auto& [rank, message] : joins) {
    const std::string theirs = to_text(message.settings);
    if (theirs != mine) {
      const auto [there, here] = settings_difference(theirs, mine);
      return Status(
          StatusCode::kFailedPrecondition,
          fmt::format("trainer {} has other settings than trainer 0: {} against {}", rank, there, here),
          {.reason = Reason::kSettingMismatch});
    }
    auto decoded = decode_holding(message.holding.data(), message.holding.size());
    if (!decoded.ok()) return decoded.status().with_context(fmt::format("what trainer {} holds", rank));
    resolved.producers.push_back(message.producer_address);
    resolved.producer_mappable.push_back(decoded->mappable ? 1 : 0);
    resolved.producer_resident.push_back(decoded->resident ? 1 : 0);
    holdings.push_back(std::move(*decoded));
  }
  SHARDPULL_ASSIGN_OR_RETURN(resolved.ownership, resolve_ownership(rank.metadata, holdings));
  resolved.metadata = rank.metadata;
  for (const GatherGroup& group : rank.groups) resolved.group_lens.push_back(group.count);
  resolved.num_consumers = options.num_consumers;
  resolved.num_replicas = options.num_replicas;
  resolved.workers_per_replica = options.workers_per_replica != 0
                                     ? options.workers_per_replica
                                     : options.num_consumers / options.num_replicas;
  resolved.ring_depth = options.ring_depth;
  resolved.presize = options.presize_bytes;
  resolved.export_pack_limit = options.export_pack_limit_bytes;
  resolved.transport = transport_of(options.fleet);
  resolved.integrity = options.integrity;
  SHARDPULL_RETURN_IF_ERROR(shardpull::validate(resolved));
  return resolved;
}

void Trainer::Impl::answer_joins(const Status& status) {
  joins_answered = true;
  TrainerTable answer{status, {}};
  if (status.ok()) {
    MutexLock lock(mutex);
    answer.tables = encode_tables(*tables);
  }
  for (const auto& [rank, message] : joins) send({Role::kTrainer, rank}, answer);
  for (const auto& [consumer, request] : early_requests) {
    if (!status.ok()) send({Role::kWorker, consumer}, InitPayload{status, {}, {}});
  }
}

// What is wrong with a worker's request: known before the tables are.
Status Trainer::Impl::check_request(std::uint32_t consumer, const InitRequest& request) const {
  if (consumer >= options.num_consumers) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("worker {} is out of range: the fleet has {} workers, numbered from 0", consumer,
                              options.num_consumers),
                  {.reason = Reason::kSettingMismatch});
  }
  if (request.ring_depth != 0 && request.ring_depth != options.ring_depth) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("ring_depth differs: worker {} has {}, the trainers have {}", consumer,
                              request.ring_depth, options.ring_depth),
                  {.reason = Reason::kSettingMismatch});
  }
  if (request.settings != options.fleet.settings) {
    const auto [there, here] = settings_difference(request.settings, options.fleet.settings);
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("worker {} was started with {}, the trainers with {}", consumer, there, here),
                  {.reason = Reason::kSettingMismatch, .fault = Fault::kUser});
  }
  return {};
}

void Trainer::Impl::answer_init_request(std::uint32_t consumer, const InitRequest& request) {
  std::shared_ptr<const InitTables> current;
  {
    MutexLock lock(mutex);
    joined_workers.insert(consumer);
    current = tables;
  }
  Status status = check_request(consumer, request);
  if (status.ok() && current == nullptr) {
    if (!joins_answered) {
      early_requests[consumer] = request;
      return;
    }
    status = Status(StatusCode::kFailedPrecondition, "trainer_init failed");
  }
  InitPayload answer{status, {}, {}};
  if (status.ok()) {
    answer.tables = encode_tables(*current);
    for (std::uint32_t rank = 0; rank < options.world_size; ++rank)
      answer.trainers.push_back(sync->lost(rank) ? 0 : rank_lives[rank]);
  }
  send({Role::kWorker, consumer}, std::move(answer));
}

void Trainer::Impl::worker_done(std::uint32_t consumer, const InitDone& done) {
  if (done.status.ok()) sync->worker_joined(consumer);
  {
    MutexLock lock(mutex);
    joined_workers.insert(consumer);
    workers_done[consumer] = done;
    if (done.status.ok()) ++times_joined;
    wake.notify_all();
  }
  if (done.status.ok()) fault_point("sender.joined", 0);
}

// ---- control events
// -------------------------------------------------------------------------------------------------------

void Trainer::Impl::end(const Status& why) {
  messages.close(why);
  MutexLock lock(mutex);
  if (!ended) ended = why;
  wake.notify_all();
}

void Trainer::Impl::on_lost(const Member& member, const Status& why) {
  const Status named = lost(member, why);
  const bool idle = sync && !sync->running();
  if (member.role == Role::kWorker) {
    server->consumer_lost(member.id, named);
    if (sync)
      drive_sender(
          [&](std::int64_t now, SenderActions& out) { sync->consumer_lost(now, member.id, named, out); });
  } else {
    if (sync) {
      drive_sender(
          [&](std::int64_t now, SenderActions& out) { sync->rank_lost(now, member.id, named, out); });
    }
    // Whether a sync can go on without a rank is the sender's to say.
    if (member == kSender && running_sync != 0) server->fail(running_sync, named);
  }
  if (member == kSender) {
    end(named);
  } else {
    messages.push_error(named);
  }
  if (!sender) return;
  {
    MutexLock lock(mutex);
    // A worker that failed its init has told us why, and ranks leave a collective that failed: that they are
    // gone then is no news.
    const auto done = workers_done.find(member.id);
    const bool explained =
        (table_status && !table_status->ok()) ||
        (member.role == Role::kWorker && done != workers_done.end() && !done->second.status.ok());
    if (!init_failure && !explained) init_failure = named;
    wake.notify_all();
  }
  if (idle) fault_point("sender.lost", 0);
}

void Trainer::Impl::on_tick() {
  server->tick();
  if (sync) drive_sender([&](std::int64_t now, SenderActions& out) { sync->tick(now, out); });
}

void Trainer::Impl::on_control(const Member& from, Incarnation from_incarnation, ControlBody body) {
  const std::int64_t now = clock.now_ns();
  const bool from_trainer = from.role == Role::kTrainer;
  if (auto* message = std::get_if<UserMessage>(&body)) {
    messages.push({to_string(from), std::move(message->topic), std::move(message->body)});
  } else if (auto* message = std::get_if<Reserve>(&body); message && !from_trainer) {
    server->reserve(from.id, from_incarnation, message->slot_bytes, message->ring_depth,
                    message->num_consumers, message->workers_per_replica,
                    {message->digest_low, message->digest_high}, message->pulls);
  } else if (auto* message = std::get_if<FreeGroups>(&body); message && !from_trainer) {
    server->signal(from.id, from_incarnation, message->sync_id, message->groups);
  } else if (auto* message = std::get_if<LeaveLanes>(&body); message && !from_trainer) {
    server->leave_lanes(from.id, from_incarnation, message->sync_id);
  } else if (auto* message = std::get_if<SyncFailed>(&body)) {
    if (sync) {
      drive_sender([&](std::int64_t, SenderActions& out) {
        sync->failed(now, from, message->sync_id, message->status, out);
      });
    }
    // The sender decides for everybody: only its word fails this rank.
    if (from == kSender) server->fail(message->sync_id, message->status);
  } else if (auto* message = std::get_if<TrainerTable>(&body); message && from == kSender) {
    Status status = message->status;
    if (status.ok()) {
      auto decoded = decode_tables(message->tables.data(), message->tables.size());
      status = decoded.ok() ? shardpull::validate(*decoded) : decoded.status();
      if (status.ok()) {
        auto shared = std::make_shared<const InitTables>(std::move(*decoded));
        server->start(shared, static_cast<std::int64_t>(options.fleet.stall_timeout_ms) * kNanosPerMilli,
                      options.on_consumer_loss == OnConsumerLoss::kFail);
        if (sync) sync->set_tables(shared);
        MutexLock lock(mutex);
        tables = shared;
      }
    }
    MutexLock lock(mutex);
    table_status = status;
    returned = message->returned;
    wake.notify_all();
  } else if (auto* message = std::get_if<SyncOpen>(&body); message && from == kSender) {
    server->sync_opened(message->sync_id, message->live_consumers);
    MutexLock lock(mutex);
    opened = std::move(*message);
    wake.notify_all();
  } else if (auto* message = std::get_if<SyncClosed>(&body); message && from == kSender) {
    MutexLock lock(mutex);
    closed = std::move(*message);
    wake.notify_all();
  } else if (auto* message = std::get_if<Shutdown>(&body); message && from == kSender) {
    log_info("the fleet ends: {}", message->reason);
    end(end_of(*message));
  } else if (!sender) {
    log_debug("{} from {} is not for trainer {}: dropped", name_of(body), to_string(from), options.rank);
  } else if (auto* message = std::get_if<TrainerJoin>(&body); message && from_trainer) {
    collect_join(from.id, from_incarnation, std::move(*message));
  } else if (auto* message = std::get_if<InitRequest>(&body); message && !from_trainer) {
    answer_init_request(from.id, *message);
  } else if (auto* message = std::get_if<InitDone>(&body); message && !from_trainer) {
    worker_done(from.id, *message);
  } else if (auto* message = std::get_if<UpdateStarted>(&body); message && !from_trainer) {
    drive_sender([&](std::int64_t, SenderActions& out) {
      sync->update_started(now, from.id, message->sync_id, message->status, out);
    });
  } else if (auto* message = std::get_if<Prepared>(&body); message && !from_trainer) {
    if (message->sync_id == report.sync_id) {
      report.workers.push_back({from.id, message->bytes_kept, message->bytes_moved, message->update_ns,
                                message->copy_ns, message->padding_bytes, message->rerouted,
                                message->fallback_names});
    }
    drive_sender([&](std::int64_t, SenderActions& out) {
      sync->prepared(now, from.id, message->sync_id, message->status.with_context(to_string(from)), out);
    });
  } else if (auto* message = std::get_if<TimelineReport>(&body)) {
    if (trace) trace->take(from, std::move(*message));
  } else if (auto* message = std::get_if<Finished>(&body); message && !from_trainer) {
    for (WorkerReport& worker : report.workers) {
      if (message->sync_id != report.sync_id || worker.consumer != from.id) continue;
      worker.commit_ns = message->commit_ns;
      worker.phases = std::move(message->phases);
      worker.waited_for = message->waited_for;
      worker.waited_ns = message->waited_ns;
    }
    drive_sender([&](std::int64_t, SenderActions& out) {
      sync->finished(now, from.id, message->sync_id, message->status.with_context(to_string(from)), out);
    });
  } else if (auto* message = std::get_if<SyncBegan>(&body); message && from_trainer) {
    drive_sender(
        [&](std::int64_t, SenderActions& out) { sync->rank_began(now, from.id, message->sync_id, out); });
  } else if (auto* message = std::get_if<RankEnded>(&body); message && from_trainer) {
    if (message->sync_id == report.sync_id) {
      report.ranks.push_back({from.id, message->export_ns, message->export_bytes,
                              message->peak_resident_bytes, message->packs, message->packed_bytes,
                              message->wall_ns, std::move(message->phases)});
    }
    drive_sender([&](std::int64_t, SenderActions& out) {
      sync->rank_ended(now, from.id, message->sync_id, message->status, out);
    });
  } else {
    log_debug("{} from {} is not for a trainer: dropped", name_of(body), to_string(from));
  }
}

// ---- machines
// ---------------------------------------------------------------------------------------------------------

template <typename Event>
void Trainer::Impl::drive_trainer(Event event) {
  TrainerActions actions;
  event(actions);
  for (TrainerAction& action : actions) {
    if (std::holds_alternative<trainer_action::EndProducer>(action)) {
      const Status status = server->end_sync();
      if (!status.ok()) server->fail(running_sync, status);
      continue;
    }
    MutexLock lock(mutex);
    work.push_back(std::move(action));
    wake.notify_all();
  }
}

template <typename Event>
void Trainer::Impl::drive_sender(Event event) {
  SenderActions actions;
  event(clock.now_ns(), actions);
  for (const SenderAction& action : actions) perform(action);
}

void Trainer::Impl::perform(const SenderAction& action) {
  const std::uint64_t sync_id = report.sync_id;
  if (const auto* open = std::get_if<sender_action::OpenSync>(&action)) {
    send({Role::kTrainer, open->rank}, SyncOpen{sync_id, report.version, live, sync_names, trace != nullptr});
    fault_point("sender.opened", sync_id);
  } else if (const auto* start = std::get_if<sender_action::StartUpdate>(&action)) {
    send({Role::kWorker, start->consumer},
         StartUpdate{sync_id, report.version, sync_names, trace != nullptr});
    fault_point("sender.starting", sync_id);
  } else if (const auto* update = std::get_if<sender_action::Update>(&action)) {
    send({Role::kWorker, update->consumer}, Update{sync_id});
    fault_point("sender.updating", sync_id);
  } else if (const auto* finish = std::get_if<sender_action::Finish>(&action)) {
    fault_point("sender.prepared", sync_id);
    send({Role::kWorker, finish->consumer}, Finish{sync_id});
    fault_point("sender.finishing", sync_id);
  } else if (const auto* fail = std::get_if<sender_action::FailRank>(&action)) {
    send({Role::kTrainer, fail->rank}, SyncFailed{sync_id, fail->status});
  } else if (const auto* fail = std::get_if<sender_action::FailConsumer>(&action)) {
    send({Role::kWorker, fail->consumer}, SyncFailed{sync_id, fail->status});
  } else if (const auto* close = std::get_if<sender_action::CloseSync>(&action)) {
    fault_point("sender.closing", sync_id);
    send({Role::kTrainer, close->rank}, SyncClosed{sync_id, close->status});
  } else if (const auto* done = std::get_if<sender_action::SyncDone>(&action)) {
    report.lost_consumers = done->lost_consumers;
    report.dropped_consumers = done->dropped_consumers;
    report.lost_ranks = done->lost_ranks;
  }
}

// ---- send_weights, on the caller's thread
// -----------------------------------------------------------------------------------

Status Trainer::Impl::open_sync(std::uint64_t version, const NameSet& names) {
  const std::int64_t deadline =
      clock.now_ns() + static_cast<std::int64_t>(options.fleet.connect_timeout_ms) * kNanosPerMilli;
  fault_point("sender.sending", 0);
  for (;;) {
    std::uint64_t joined = 0;
    {
      MutexLock lock(mutex);
      joined = times_joined;
    }
    Status status;
    std::string missing;
    progress->run([&] {
      missing = sync->awaited();
      if (!missing.empty()) return;
      live = sync->next_live();
      report = {};
      report.sync_id = ++last_sync_id;
      if (trace) trace->begin(report.sync_id);
      report.version = version;
      sync_names = names;
      for (const std::uint32_t consumer : live)
        messages.forget_errors_of(to_string(Member{Role::kWorker, consumer}));
      for (std::uint32_t rank = 1; rank < options.world_size; ++rank) {
        if (!sync->lost(rank)) messages.forget_errors_of(to_string(Member{Role::kTrainer, rank}));
      }
      drive_sender([&](std::int64_t now, SenderActions& out) {
        status = sync->begin(now, report.sync_id, live, out);
      });
      if (live.size() < options.num_consumers) {
        log_warn("sync {} runs with {} of {} workers, without the replicas of {}", report.sync_id,
                 live.size(), options.num_consumers, sync->missing_workers());
      }
    });
    if (missing.empty()) return status;
    // Who was lost may be on its way again.
    const std::int64_t left = std::max<std::int64_t>(0, deadline - clock.now_ns());
    status = wait_for([&]() SHARDPULL_REQUIRES(mutex) { return times_joined != joined; },
                      static_cast<std::uint64_t>(left / kNanosPerMilli), [&] { return missing; });
    if (!status.ok()) return status;
  }
}

Status Trainer::Impl::wait_for_open(std::uint64_t version, SyncOpen& open) {
  // Before the first sync the sender may still wait for workers to appear.
  const std::uint64_t limit_ms = options.fleet.stall_timeout_ms + options.fleet.connect_timeout_ms;
  if (next) {
    open = *std::exchange(next, std::nullopt);
  } else {
    SHARDPULL_ASSIGN_OR_RETURN(open, take_opened(limit_ms, [&] {
                                 return fmt::format("trainer 0 to open the sync of version {}", version);
                               }));
  }
  MutexLock lock(mutex);
  // A sync that failed before this rank came to it has been closed already; its verdict is kept.
  if (closed && closed->sync_id < open.sync_id) closed.reset();
  if (!closed) return {};
  if (closed->sync_id != open.sync_id) {
    return Status(StatusCode::kAborted,
                  fmt::format("sync {} was over before trainer {} came to it", open.sync_id, options.rank),
                  {.reason = Reason::kSuperseded});
  }
  return closed->status.ok() ? Status(StatusCode::kInternal, "a sync was closed before this rank ended")
                             : closed->status;
}

Result<SyncOpen> Trainer::Impl::take_opened(std::uint64_t limit_ms,
                                            const std::function<std::string()>& what) {
  // What the sender has opened it has to run, to its end.
  SHARDPULL_RETURN_IF_ERROR(wait_for([this]() SHARDPULL_REQUIRES(mutex) { return opened.has_value(); },
                                     limit_ms, what, sender ? Asks::kNo : Asks::kYes));
  MutexLock lock(mutex);
  return *std::exchange(opened, std::nullopt);
}

Result<NextSync> Trainer::Impl::next_sync() {
  if (!initialised || stopped || sender) {
    return Status(StatusCode::kFailedPrecondition,
                  sender         ? "next_sync on the sender, which opens the syncs"
                  : !initialised ? "next_sync before init"
                                 : "the trainer has been shut down",
                  {.reason = Reason::kWrongState});
  }
  // No limit of its own: a training step takes as long as it takes, and the sender's loss ends the fleet.
  if (!next) {
    SHARDPULL_ASSIGN_OR_RETURN(next,
                               take_opened(kNoLimit, [] { return std::string("trainer 0 to open a sync"); }));
  }
  NextSync out{next->version, {}};
  for (std::uint32_t name = 0; !next->names.empty() && name < rank.metadata.size(); ++name) {
    if (listed(next->names, name)) out.names.push_back(name);
  }
  return out;
}

std::string Trainer::Impl::names_text(const NameSet& names) const {
  if (names.empty()) return "all names";
  constexpr std::size_t kShown = 3;
  std::vector<std::string> shown;
  std::size_t count = 0;
  for (std::uint32_t name = 0; name < rank.metadata.size(); ++name) {
    if (!listed(names, name)) continue;
    if (++count <= kShown) shown.push_back(fmt::format("'{}'", rank.metadata[name].name));
  }
  return fmt::format("{} of {} names: {}{}", count, rank.metadata.size(), fmt::join(shown, ", "),
                     count > kShown ? ", ..." : "");
}

Status Trainer::Impl::check_open(const SyncOpen& open, std::uint64_t version, const NameSet& names) const {
  if (open.version != version) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("trainer {} sends version {}, trainer 0 opened sync {} of version {}",
                              options.rank, version, open.sync_id, open.version),
                  {.reason = Reason::kSettingMismatch});
  }
  if (open.names != names) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("trainer {} sends {}; trainer 0 opened sync {} of {}", options.rank,
                              names_text(names), open.sync_id, names_text(open.names)),
                  {.reason = Reason::kSettingMismatch});
  }
  return {};
}

Result<SyncReport> Trainer::Impl::send_weights(std::uint64_t version, const SendOptions& send_options) {
  if (!initialised || stopped) {
    return Status(StatusCode::kFailedPrecondition,
                  stopped ? "the trainer has been shut down" : "send_weights before init",
                  {.reason = Reason::kWrongState});
  }
  const std::int64_t started = clock.now_ns();
  SHARDPULL_ASSIGN_OR_RETURN(NameSet names, names_matching(send_options.names, rank.metadata));
  {
    MutexLock lock(mutex);
    work.clear();
  }
  if (sender) SHARDPULL_RETURN_IF_ERROR(open_sync(version, names));
  SyncOpen open;
  Status status = wait_for_open(version, open);
  if (!status.ok()) return status;
  opened_ns = clock.now_ns();
  gather_log.reset(6 * rank.owned_groups.size() + 64);  // a source call, a copy, a publish, waits
  status = check_open(open, version, names);
  placer.begin_sync(std::move(names));
  if (status.ok()) status = gather_loop(open);

  RankReport mine{
      options.rank, placer.export_ns(), placer.export_bytes(), placer.peak_resident_bytes(), 0, 0};
  progress->run([&] {
    if (running_sync != open.sync_id) return;  // its producer never began it
    mine.packs = server->packs();
    mine.packed_bytes = server->packed_bytes();
  });
  end_timeline(open, mine);
  send(kSender, RankEnded{open.sync_id, status, mine.export_ns, mine.export_bytes, mine.peak_resident_bytes,
                          mine.packs, mine.packed_bytes, mine.wall_ns, mine.phases});
  fault_point("rank.ended", open.sync_id);
  // No limit of its own: the other ranks may take long. The sender bounds every step of the sync and its loss
  // ends the fleet.
  const auto wait_for_close = [&](Asks asks) {
    return wait_for(
        [&]() SHARDPULL_REQUIRES(mutex) { return closed.has_value() && closed->sync_id == open.sync_id; },
        kNoLimit, [&] { return fmt::format("trainer 0 to close sync {}", open.sync_id); }, asks);
  };
  Status verdict = wait_for_close(Asks::kYes);
  Status interrupted;
  bool over = false;
  {
    MutexLock lock(mutex);
    over = ended.has_value();
  }
  if (!verdict.ok() && !over) {
    interrupted = verdict;
    send(kSender, SyncFailed{open.sync_id, interrupted});
    verdict = wait_for_close(Asks::kNo);
  }
  progress->run([&] { running_sync = 0; });
  SHARDPULL_RETURN_IF_ERROR(interrupted);
  SHARDPULL_RETURN_IF_ERROR(verdict);
  SyncReport result;
  {
    MutexLock lock(mutex);
    if (!closed->status.ok()) return closed->status;
  }
  SHARDPULL_RETURN_IF_ERROR(status);
  if (sender) {
    progress->run([&] { result = report; });
    std::erase_if(result.workers, [&](const WorkerReport& each) {  // prepared, and did not live to commit
      const auto is_in = [&](const std::vector<std::uint32_t>& gone) {
        return std::find(gone.begin(), gone.end(), each.consumer) != gone.end();
      };
      return is_in(result.lost_consumers) || is_in(result.dropped_consumers);
    });
    const auto by_id = [](const auto& a, const auto& b) { return a < b; };
    std::sort(result.workers.begin(), result.workers.end(),
              [&](const WorkerReport& a, const WorkerReport& b) { return by_id(a.consumer, b.consumer); });
    std::sort(result.ranks.begin(), result.ranks.end(),
              [&](const RankReport& a, const RankReport& b) { return by_id(a.rank, b.rank); });
  } else {
    result.ranks.push_back(mine);
  }
  result.sync_id = open.sync_id;
  result.version = version;
  result.wall_ns = static_cast<std::uint64_t>(clock.now_ns() - started);
  return result;
}

void Trainer::Impl::end_timeline(const SyncOpen& open, RankReport& mine) {
  std::vector<Span> spans = gather_log.spans();
  std::uint64_t dropped = gather_log.dropped();
  progress->run([&] {
    if (running_sync != open.sync_id) return;  // its producer never began it
    const ServeLog& served = server->log();
    spans.insert(spans.end(), served.spans().begin(), served.spans().end());
    dropped += served.dropped();
  });
  const std::vector<Window> windows = {{opened_ns, clock.now_ns(), Phase::kEngine}};
  mine.wall_ns = static_cast<std::uint64_t>(windows[0].end_ns - windows[0].begin_ns);
  mine.phases = charge(spans, windows).phases;
  traced = open;
  if (open.trace || trace) timeline = make_timeline(windows, std::move(spans), dropped);
}

void Trainer::Impl::trace_sync(std::int64_t started_ns, std::uint64_t version,
                               const Result<SyncReport>& outcome) {
  if (!traced || !(traced->trace || trace)) return;
  const SyncOpen open = *std::exchange(traced, std::nullopt);
  // What follows the report: the others' ends.
  Window& window = timeline.windows.front();
  const std::int64_t now = clock.now_ns();
  timeline.spans.push_back({.phase = Phase::kEndWait, .begin_ns = window.end_ns, .end_ns = now});
  window.end_ns = now;
  if (open.trace && !sender) send(kSender, TimelineReport{open.sync_id, encode_timeline(timeline)});
  if (!trace) return;
  std::vector<Member> others, gone;
  const auto add = [&](const Member& member) {  // who is gone tells nothing, and is not waited for
    if (sender && member != kSender) (control->clock_offset(member) ? others : gone).push_back(member);
  };
  for (std::uint32_t other = 0; other < options.world_size; ++other) {
    // One that has come back since it was lost was not in the sync either.
    const auto& lost_ranks = outcome.ok() ? outcome->lost_ranks : std::vector<std::uint32_t>{};
    if (!std::binary_search(lost_ranks.begin(), lost_ranks.end(), other)) add({Role::kTrainer, other});
  }
  for (const std::uint32_t consumer : open.live_consumers) add({Role::kWorker, consumer});
  trace->finish({.sync_id = open.sync_id,
                 .version = version,
                 .begin_ns = started_ns,
                 .end_ns = now,
                 .summary = outcome.ok() ? summary_line(*outcome) : outcome.status().to_string(),
                 .processes = {{{Role::kTrainer, options.rank}, timeline, ClockOffset()}},
                 .missing = std::move(gone)},
                others, [this](const Member& member) { return control->clock_offset(member); });
}

Status Trainer::Impl::gather_loop(const SyncOpen& open) {
  SyncRequest request{open.sync_id, open.version, {}, {}};
  std::shared_ptr<const InitTables> current;
  {
    MutexLock lock(mutex);
    current = tables;
  }
  const std::vector<bool> wanted = listed_groups(open.names, *current);
  for (const std::uint32_t group : rank.owned_groups) {
    if (wanted[group]) request.groups.push_back(group);
  }
  request.names = listed_names(open.names, rank.metadata.size());
  auto stream = source->iter_groups(request);
  if (!stream.ok())
    return stream.status().with_context(fmt::format("the weight source of trainer {}", options.rank));
  std::unique_ptr<GroupStream> groups_stream = std::move(stream).value();

  Status status;
  progress->run([&] {
    running_sync = open.sync_id;
    failed = false;
    server->log().begin_sync(open.sync_id, open.trace);
    status = server->begin_sync(open.sync_id, open.version, open.live_consumers, request.groups, open.names);
    if (!status.ok()) return;
    if (!failed)
      drive_trainer([&](TrainerActions& out) {
        status = trainer->begin(open.sync_id, request.groups, rank.resident, out);
      });
    if (failed) status = server->failure();
    if (!status.ok()) {
      server->fail(open.sync_id, status);
    } else {
      send(kSender, SyncBegan{open.sync_id});
    }
  });
  SHARDPULL_RETURN_IF_ERROR(status);
  fault_point("rank.begun", open.sync_id);

  // Fails the sync here and everywhere; the machine then ends the loop with RankDone.
  const auto give_up = [&](const Status& why) {
    progress->run([&] {
      server->fail(open.sync_id, why);
      drive_trainer([&](TrainerActions& out) { trainer->source_returned(out); });
    });
  };
  Status changed;  // the first group that the source wrote too early: the producer may have ended well before
  Interrupt interrupt(options.fleet, clock);
  Status interrupted;
  std::size_t asked = 0;
  for (;;) {
    std::optional<TrainerAction> action;
    const std::int64_t waiting_ns = clock.now_ns();
    Status now;
    {
      MutexLock lock(mutex);
      // Bounded by the watchdogs: of the producer while the sync runs, of the sender's steps, of the
      // heartbeats.
      while (work.empty() && !ended && now.ok()) now = interrupt.wait(wake, mutex, kNanosPerSecond);
      if (!work.empty()) {
        action = std::move(work.front());
        work.pop_front();
      } else if (ended) {
        status = ended->ok() ? Status(StatusCode::kUnavailable, "the fleet ended during the sync",
                                      {.reason = Reason::kShutdown})
                             : *ended;
      }
    }
    // The machine drains the sync and ends the loop.
    if (!now.ok()) {
      interrupted = now;
      interrupt.ask_no_more();
      progress->run([&] { server->fail(open.sync_id, interrupted); });
    }
    gather_log.add({.phase = asked < request.groups.size() ? Phase::kCreditWait : Phase::kEndWait,
                    .begin_ns = waiting_ns,
                    .end_ns = clock.now_ns()});
    if (!action && status.ok()) continue;
    if (!action) {
      progress->run([&] { server->fail(open.sync_id, status); });
      break;
    }
    if (const auto* ask = std::get_if<trainer_action::AskSource>(&*action)) {
      ++asked;
      const Status taken = take_group(*groups_stream, ask->group);
      fault_point("rank.published", open.sync_id);
      if (!taken.ok()) give_up(taken);
    } else if (std::holds_alternative<trainer_action::AskEnd>(*action)) {
      const Status at_end = expect_end(*groups_stream);
      if (at_end.ok()) {
        progress->run([&] { drive_trainer([&](TrainerActions& out) { trainer->source_ended(out); }); });
      } else {
        give_up(at_end);
      }
    } else if (const auto* freed = std::get_if<trainer_action::Release>(&*action)) {
      if (changed.ok()) {
        changed = placer.check_unchanged(freed->group);
        if (!changed.ok()) progress->run([&] { server->fail(open.sync_id, changed); });
      }
      release(groups_stream.get(), freed->group);
    } else if (const auto* done = std::get_if<trainer_action::RankDone>(&*action)) {
      status = done->status;
      break;
    }
  }
  for (const std::uint32_t group : placer.resident()) release(groups_stream.get(), group);
  if (!interrupted.ok()) return interrupted;
  return status.ok() ? changed : status;
}

void Trainer::Impl::release(GroupStream* stream, std::uint32_t group) {
  if (placer.release(group)) stream->released(group);
}

std::vector<std::shared_ptr<ExportedMemory>> Trainer::Impl::owned_memory() {
  std::vector<std::shared_ptr<ExportedMemory>> owned;
  MutexLock lock(mutex);
  std::erase_if(allocations, [&](const std::weak_ptr<ExportedMemory>& each) {
    if (auto memory = each.lock()) owned.push_back(std::move(memory));
    return each.expired();
  });
  std::sort(owned.begin(), owned.end(),
            [](const auto& a, const auto& b) { return a->ref().address < b->ref().address; });
  return owned;
}

Status Trainer::Impl::take_group(GroupStream& stream, std::uint32_t group) {
  std::int64_t since_ns = clock.now_ns();
  const auto did = [&](Phase phase, std::uint64_t bytes) {
    const std::int64_t now = clock.now_ns();
    gather_log.add({.phase = phase,
                    .item = group,
                    .begin_ns = std::exchange(since_ns, now),
                    .end_ns = now,
                    .bytes = bytes});
  };
  auto next = stream.next();
  did(Phase::kSource, 0);
  if (!next.ok()) {
    return next.status().with_context(
        fmt::format("the weight source of trainer {} at group {}", options.rank, group));
  }
  if (!next->has_value()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the weight source of trainer {} ended before group {} ({})", options.rank,
                              group, rank.metadata[rank.groups[group].first].name),
                  {.reason = Reason::kMetadataMismatch});
  }
  const GroupTensors& tensors = **next;
  if (const Status wrong = placer.check(tensors, group); !wrong.ok()) {
    stream.released(tensors.group);  // refused: nobody reads it
    return wrong;
  }
  const std::uint64_t exported = placer.export_bytes();
  auto served = placer.place(tensors, group, owned_memory());
  did(Phase::kExport, placer.export_bytes() - exported);
  if (!served.ok()) {
    stream.released(group);
    return served.status();
  }
  Status status;
  progress->run([&] {
    if (failed) {  // found out while the source was asked; the machine waits for its return
      drive_trainer([&](TrainerActions& out) { trainer->source_returned(out); });
      return;
    }
    for (auto& memory : placer.adopted(group)) server->add_memory(std::move(memory));
    // Told first: a group nobody waits for is freed within publish_group.
    drive_trainer([&](TrainerActions& out) { trainer->published(group, out); });
    status = server->publish_group(group, std::move(served).value());
    if (!status.ok()) {
      MutexLock lock(mutex);
      work.clear();  // what publishing asked for next: the sync is about to fail
    }
  });
  did(Phase::kPublish, 0);
  return status;
}

Status Trainer::Impl::expect_end(GroupStream& stream) {
  auto next = stream.next();
  if (!next.ok())
    return next.status().with_context(
        fmt::format("the weight source of trainer {} at its end", options.rank));
  if (next->has_value()) {
    stream.released((*next)->group);
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the weight source of trainer {} gave group {} after its last one",
                              options.rank, (*next)->group),
                  {.reason = Reason::kMetadataMismatch});
  }
  return {};
}

void Trainer::Impl::stop(const std::string& reason, const Status& why) {
  if (stopped) return;
  stopped = true;
  if (progress && sender && control) {
    const Shutdown message{reason, why.ok() ? last_error : why};
    for (std::uint32_t rank = 1; rank < options.world_size; ++rank) send({Role::kTrainer, rank}, message);
    for (std::uint32_t worker = 0; worker < options.num_consumers; ++worker)
      send({Role::kWorker, worker}, message);
  }
  if (progress) progress->run([this] { server->shutdown(); });
  if (server) server->stop();
  if (control) control->shutdown();
  if (progress) progress->stop();
  end(Status());
}

// ---- the public face
// ------------------------------------------------------------------------------------------------------

Trainer::Trainer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Trainer::~Trainer() {
  shutdown();
}

Result<std::unique_ptr<Trainer>> Trainer::create(const TrainerOptions& options) {
  std::unique_ptr<Trainer> trainer(new Trainer(std::make_unique<Impl>(options)));
  SHARDPULL_RETURN_IF_ERROR(trainer->impl_->start());
  return trainer;
}

Result<EngineMemory> Trainer::allocate(std::uint64_t bytes, const std::string& what) {
  SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<ExportedMemory> memory,
                             impl_->progress->transport().allocate(bytes, what));
  {
    MutexLock lock(impl_->mutex);
    impl_->allocations.push_back(memory);
  }
  impl_->progress->post([impl = impl_.get(), memory] { impl->server->add_memory(memory); });
  return EngineMemory{memory->ref().address, memory->ref().bytes, memory};
}

Status Trainer::init(WeightSource& source) {
  if (impl_->initialised || impl_->stopped) {
    return Status(StatusCode::kFailedPrecondition, "init is called once, before shutdown",
                  {.reason = Reason::kWrongState});
  }
  Status status = impl_->join(source);
  if (status.ok() && impl_->sender) status = impl_->wait_for_workers();
  impl_->initialised = status.ok();
  impl_->last_error = status;
  return status;
}

Result<std::vector<std::byte>> Trainer::worker_init_payload() const {
  MutexLock lock(impl_->mutex);
  if (impl_->tables == nullptr) {
    return Status(StatusCode::kFailedPrecondition, "worker_init_payload before init",
                  {.reason = Reason::kWrongState});
  }
  return encode_tables(*impl_->tables);
}

Result<SyncReport> Trainer::send_weights(std::uint64_t version, const SendOptions& send) {
  const std::int64_t started_ns = impl_->clock.now_ns();
  auto report = impl_->send_weights(version, send);
  impl_->last_error = report.status();
  if (impl_->sender && report.ok()) log_info("sync {}: {}", report->sync_id, summary_line(*report));
  impl_->trace_sync(started_ns, version, report);
  return report;
}

bool Trainer::returned() const {
  MutexLock lock(impl_->mutex);
  return impl_->returned;
}

Result<NextSync> Trainer::next_sync() {
  return impl_->next_sync();
}

Status Trainer::send_message(const std::string& to, const std::string& topic, const std::string& body) {
  return send_user_message(impl_->control.get(), to, topic, body, [this] { return impl_->why_ended(); });
}

Result<std::optional<FleetMessage>> Trainer::receive_message(std::uint64_t timeout_ms) {
  return impl_->messages.pop(timeout_ms, impl_->options.fleet);
}

std::uint64_t Trainer::engine_bytes() const {
  return impl_->placer.exports().bytes() + impl_->ring_bytes.load() + impl_->server->window_bytes();
}

void Trainer::shutdown(const std::string& reason) {
  impl_->stop(reason, Status());
}

void Trainer::shutdown(const Status& why) {
  if (why.ok()) return shutdown();
  impl_->stop(why.message(), why);
}

}  // namespace shardpull
