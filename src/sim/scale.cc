// One thread runs the events in the order of their instants, and those of one instant in a fixed order. What
// always takes the same time comes back in the order in which it was started, so that each kind of it is a
// queue, not a part of a heap: hot messages, reads on their way to a link and back from it, and the hub's
// messages, whose turns are known as they are sent.
//
// Ten thousand workers fit because replicas are alike: their machines share a plan and what follows from it
// (ConsumerMachine's second constructor), producers keep one table of announced pulls for all sharers, and a
// message is a few words. Nothing has payload.
#include "sim/scale.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <optional>
#include <queue>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "plan/boxes.h"
#include "plan/integrity.h"
#include "protocol/consumer_machine.h"
#include "protocol/producer_machine.h"
#include "protocol/trainer_machine.h"
#include "protocol/wording.h"
#include "sim/scale_links.h"

namespace shardpull::sim {

std::string_view to_string(ControlKind kind) {
  static constexpr std::array<std::string_view, kControlKinds> kNames = {
      "SyncOpen", "SyncBegan", "StartUpdate", "UpdateStarted", "Update",   "FreeGroups",
      "FreeAck",  "Prepared",  "RankEnded",   "Finish",        "Finished", "SyncClosed"};
  return kNames[static_cast<std::size_t>(kind)];
}

namespace {

constexpr std::uint64_t kSyncId = 1, kVersion = 1;
constexpr std::uint32_t kSenderRank = 0;
constexpr std::int64_t kNever = FairLinks::kNever;

Incarnation life_of(std::uint32_t consumer) {
  return std::uint64_t{consumer} + 1;
}

std::int64_t time_for(std::uint64_t bytes, std::uint64_t bytes_per_s) {
  return static_cast<std::int64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(bytes_per_s));
}

// A thread that does one thing after the other.
class Thread {
 public:
  // When work that is handed to it now will be done.
  std::int64_t take(std::int64_t now_ns, std::int64_t work_ns) {
    return free_ns_ = std::max(free_ns_, now_ns) + work_ns;
  }

 private:
  std::int64_t free_ns_ = 0;
};

// ---- what is on its way -------------------------------------------------------------------------

// Exactly one of the four, as `kind` says; `pull` of the first two, `groups` of the last two.
struct Hot {
  enum class Kind : std::uint8_t { kPull, kReady, kFree, kFreeAck };
  std::int64_t at = 0;
  Kind kind = Kind::kPull;
  std::uint32_t rank = 0, consumer = 0;
  PullId pull;
  ReadyInfo ready;
  std::uint32_t groups = 0;  // which of the lists of groups
};

// Who from and to follows from the kind: ranks, workers, or the sender's rank.
struct Cold {
  std::int64_t at = 0;
  std::uint32_t from = 0, to = 0;
  std::uint32_t groups = 0;
  ControlKind kind = ControlKind::kSyncOpen;
};

// A read of a run of a chunk, into a receive slot or into parameters.
struct Read {
  std::uint32_t consumer = 0, chunk = 0, rank = 0;
  std::uint16_t run = 0;
  bool slot = false;
};
struct ReadAt {
  std::int64_t at = 0;
  std::uint32_t read = 0;
};

struct Job {
  enum class Kind : std::uint8_t { kGathered, kSourceEnded, kPacked, kScattered, kPosted, kCommitted };
  std::int64_t at = 0;
  std::uint64_t order = 0;
  Kind kind = Kind::kGathered;
  std::uint32_t who = 0;   // rank or worker
  std::uint32_t what = 0;  // group, chunk, or how many sums
  std::uint64_t ticket = 0;
  bool operator>(const Job& other) const { return at != other.at ? at > other.at : order > other.order; }
};

// ---- the processes ------------------------------------------------------------------------------

// What workers of all replicas share.
struct Kind {
  const WorkerPlan* plan = nullptr;
  std::vector<std::vector<std::uint64_t>> wire_bytes;  // by chunk and run: what a read of it moves
  std::vector<bool> hot;                               // by rank: whether there is an endpoint to it
};

struct Worker {
  Worker(const ConsumerMachine& twin, std::uint32_t consumer) : machine(twin, consumer) {}
  ConsumerMachine machine;
  Thread copier;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> reading;  // copies under way: chunk, reads left
};

struct GroupBytes {
  std::uint64_t gathered = 0, small = 0;
};

struct Rank {
  Rank(ProducerConfig config, std::uint32_t lookahead) : producer(std::move(config)), trainer(lookahead) {}
  ProducerMachine producer;
  TrainerMachine trainer;
  Thread packer, source;
  std::vector<std::uint32_t> groups;                                       // owned
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> held;  // of each: (name, piece)
  std::vector<GroupBytes> bytes;                                           // of each
  bool resident = false;
  std::uint64_t holds = 0;  // of groups, now
  RankMemory memory;
  std::int64_t progress_ns = 0, longest_wait_ns = 0;

  // What the producer's watchdog counts as progress has happened.
  void progress(std::int64_t now_ns) {
    longest_wait_ns = std::max(longest_wait_ns, now_ns - progress_ns);
    progress_ns = now_ns;
  }

  std::size_t place(std::uint32_t group) const {
    return static_cast<std::size_t>(std::lower_bound(groups.begin(), groups.end(), group) - groups.begin());
  }
};

class Scale {
 public:
  Scale(const ScaleFleet& fleet, const ScaleModel& model,
        const std::function<void(double, std::int64_t)>& progress)
      : fleet_(fleet),
        model_(model),
        tables_(*fleet.tables),
        progress_(progress),
        per_replica_(static_cast<std::uint32_t>(fleet.workers.size())),
        links_(ceil_div<std::uint32_t>(ranks_in_all(), model.ranks_per_host), model.trainer_host_bytes_per_s,
               ceil_div<std::uint32_t>(tables_.num_consumers, model.workers_per_host),
               model.worker_host_bytes_per_s),
        sender_({.world_size = ranks_in_all(),
                 .num_consumers = tables_.num_consumers,
                 .workers_per_replica = per_replica_,
                 .fail_on_consumer_loss = false}) {}

  Result<ScaleReport> run() {
    const Clock& clock = SystemClock::instance();
    const std::int64_t begun = clock.now_ns();
    make();
    SHARDPULL_RETURN_IF_ERROR(reserve());
    const std::int64_t made = clock.now_ns();
    SHARDPULL_RETURN_IF_ERROR(sync());
    finish_report();
    report_.init_real_ns = made - begun;
    report_.sync_real_ns = clock.now_ns() - made;
    return std::move(report_);
  }

 private:
  std::uint32_t ranks_in_all() const { return static_cast<std::uint32_t>(tables_.producers.size()); }
  const Kind& kind_of(std::uint32_t consumer) const { return kinds_[consumer % per_replica_]; }

  // ---- making the fleet -------------------------------------------------------------------------

  void make() {
    make_ranks();
    const std::set<Path> summed = summed_paths(tables_);
    for (const ScaleWorker& worker : fleet_.workers) {
      Kind& kind = kinds_.emplace_back();
      kind.plan = worker.plan.get();
      kind.hot.assign(ranks_in_all(), false);
      for (const ProducerPlan& producer : kind.plan->producers) kind.hot[producer.producer] = true;
      for (const Chunk& chunk : kind.plan->chunks) {
        std::vector<std::uint64_t>& runs = kind.wire_bytes.emplace_back();
        for (const Run& run : chunk.runs) {
          std::uint64_t bytes = 0;
          for (std::uint32_t k = 0; k < run.key_count; ++k) bytes += chunk.keys[run.first_key + k].bytes;
          runs.push_back(chunk.path == Path::kPacked ? run.bytes : bytes);
        }
      }
      ConsumerConfig config;
      config.plan = worker.plan;
      config.num_modules = worker.num_modules;
      config.summed = summed;
      config.scattered_on_arrival = worker.scattered_on_arrival;
      config.staged = fleet_.staged;
      machines_.emplace_back(std::move(config));
    }
    for (std::uint32_t c = 0; c < tables_.num_consumers; ++c)
      workers_.emplace_back(machines_[c % per_replica_], c);
    report_.worker_control.assign(tables_.num_consumers, 0);
    report_.rank_control.assign(ranks_in_all(), 0);
    for (const ScaleWorker& worker : fleet_.workers) {
      report_.bytes_moved += worker.plan->bytes_planned * tables_.num_replicas;
      report_.padding_bytes += padding_bytes(*worker.plan) * tables_.num_replicas;
    }
  }

  void make_ranks() {
    const std::vector<std::vector<std::uint32_t>> owners = group_owners(tables_);
    const std::vector<std::uint32_t> group_of = group_of_names(tables_);
    const Ownership& own = tables_.ownership;
    for (std::uint32_t r = 0; r < ranks_in_all(); ++r) {
      ProducerConfig config;
      config.rank = r;
      config.tables = fleet_.tables;
      Rank& rank = *ranks_.emplace_back(std::make_unique<Rank>(std::move(config), fleet_.lookahead));
      rank.resident = tables_.producer_resident[r] != 0;
    }
    for (std::uint32_t g = 0; g < owners.size(); ++g) {
      for (const std::uint32_t r : owners[g]) ranks_[r]->groups.push_back(g);
    }
    for (const auto& rank : ranks_) {
      rank->held.resize(rank->groups.size());
      rank->bytes.resize(rank->groups.size());
    }
    const auto hold = [&](std::uint32_t r, std::uint32_t name, std::uint32_t piece, std::uint64_t bytes) {
      Rank& rank = *ranks_[r];
      const std::size_t at = rank.place(group_of[name]);
      rank.held[at].emplace_back(name, piece);
      rank.bytes[at].gathered += bytes;
      if (bytes <= tables_.export_pack_limit)
        rank.bytes[at].small += ceil_div(bytes, kLayoutAlignment) * kLayoutAlignment;
    };
    const auto size = [&](std::uint32_t name, const std::vector<std::int64_t>& shape) {
      return bytes_of(tables_.metadata[name].dtype, checked_numel(shape).value_or(0)).value();
    };
    for (std::uint32_t name = 0; name < tables_.metadata.size(); ++name) {
      const std::uint64_t bytes = size(name, tables_.metadata[name].shape);
      if (own.name_owner_class.empty()) {
        for (std::uint32_t r = 0; r < ranks_in_all(); ++r) hold(r, name, 0, bytes);
      } else if (own.name_owner_class[name] >= 0) {
        for (const std::uint32_t r : own.owner_sets[static_cast<std::size_t>(own.name_owner_class[name])])
          hold(r, name, 0, bytes);
      }
    }
    for (std::uint32_t piece = 0; piece < own.pieces.size(); ++piece) {
      const OwnedPiece& one = own.pieces[piece];
      for (const std::uint32_t r : own.owner_sets[one.owner_class])
        hold(r, one.name, piece + 1, size(one.name, one.box.size));
    }
  }

  // Every worker announces its pulls to every rank that it pulls from. Ranks know nothing of each other here,
  // so that they are done at once on as many threads as there are processors.
  Status reserve() {
    std::vector<Status> results(ranks_.size());
    std::atomic<std::uint32_t> next{0};
    const auto work = [&] {
      for (std::uint32_t r = next++; r < ranks_.size(); r = next++) results[r] = reserve_at(r);
    };
    const std::uint32_t threads =
        std::min<std::uint32_t>(ranks_in_all(), std::max(1u, std::thread::hardware_concurrency()));
    {
      std::vector<std::jthread> others;
      for (std::uint32_t t = 1; t < threads; ++t) others.emplace_back(work);
      work();
    }
    for (Status& result : results) SHARDPULL_RETURN_IF_ERROR(std::move(result));
    return {};
  }

  Status reserve_at(std::uint32_t r) {
    Rank& rank = *ranks_[r];
    ProducerActions out;
    for (std::uint32_t c = 0; c < tables_.num_consumers; ++c)
      rank.producer.consumer_up(0, c, life_of(c), out);
    const std::uint32_t sharing = effective_workers_per_replica(tables_);
    for (std::uint32_t w = 0; w < per_replica_; ++w) {
      const WorkerPlan& plan = *kinds_[w].plan;
      const auto producer = std::find_if(plan.producers.begin(), plan.producers.end(),
                                         [&](const ProducerPlan& one) { return one.producer == r; });
      if (producer == plan.producers.end()) continue;
      const std::vector<PullDescription> pulls = pulls_at(plan, r);
      for (std::uint32_t c = w; c < tables_.num_consumers; c += per_replica_) {
        rank.producer.reserve(0, c, life_of(c), producer->serve_slot_bytes, tables_.ring_depth,
                              tables_.num_consumers, sharing, producer->digest, pulls, out);
        while (!out.empty()) {
          for (const ProducerAction& action : std::exchange(out, {})) {
            if (const auto* ring = std::get_if<producer_action::AllocateRing>(&action)) {
              rank.memory.serve_rings += ring->slots * ring->slot_bytes;
              rank.producer.ring_allocated(0, ring->sharing_group, {}, out);
            } else if (const auto* reply = std::get_if<producer_action::ReserveReply>(&action)) {
              if (!reply->status.ok()) return reply->status.with_context(trainer_name(r));
            }
          }
        }
      }
    }
    return {};
  }

  // ---- running ----------------------------------------------------------------------------------

  Status sync() {
    for (std::uint32_t c = 0; c < tables_.num_consumers; ++c) sender_.worker_joined(c);
    live_ = sender_.next_live();
    sender_.set_tables(fleet_.tables);
    drive_sender([&](SenderActions& out) { note(sender_.begin(now_ns_, kSyncId, live_, out)); });
    while (status_.ok() && !done_) {
      const std::array<std::int64_t, 6> next = {front(cold_),     front(hot_),
                                                front(leaving_),  front(arriving_),
                                                links_.next_ns(), jobs_.empty() ? kNever : jobs_.top().at};
      const auto first = std::min_element(next.begin(), next.end());
      if (*first == kNever) {
        note(Status(StatusCode::kInternal, "nothing is left to happen, and the sync is not over"));
        break;
      }
      now_ns_ = *first;
      ++report_.events;
      switch (first - next.begin()) {
        case 0:
          deliver(take(cold_));
          break;
        case 1:
          deliver(take(hot_));
          break;
        case 2:
          leave(take(leaving_).read);
          break;
        case 3:
          arrive(take(arriving_).read);
          break;
        case 4:
          ended_.clear();
          links_.end_due(now_ns_, ended_);
          for (const std::uint32_t read : ended_) arriving_.push_back({now_ns_ + model_.latency_ns, read});
          break;
        default: {
          const Job job = jobs_.top();
          jobs_.pop();
          perform(job);
        }
      }
      if (progress_ && report_.events % 65'536 == 0)
        progress_(static_cast<double>(arrived_bytes_) /
                      static_cast<double>(std::max<std::uint64_t>(1, report_.bytes_moved)),
                  now_ns_);
    }
    return status_;
  }

  template <typename Queue>
  static std::int64_t front(const Queue& queue) {
    return queue.empty() ? kNever : queue.front().at;
  }
  template <typename Queue>
  static typename Queue::value_type take(Queue& queue) {
    auto one = std::move(queue.front());
    queue.pop_front();
    return one;
  }

  // The first error ends the run.
  void note(const Status& status) {
    if (status_.ok()) status_ = status;
  }

  void later(std::int64_t delay_ns, Job::Kind kind, std::uint32_t who, std::uint32_t what,
             std::uint64_t ticket = 0) {
    at(now_ns_ + delay_ns, kind, who, what, ticket);
  }
  void at(std::int64_t at_ns, Job::Kind kind, std::uint32_t who, std::uint32_t what,
          std::uint64_t ticket = 0) {
    jobs_.push({at_ns, next_order_++, kind, who, what, ticket});
  }

  std::uint32_t intern(const std::vector<std::uint32_t>& groups) {
    const auto [at, fresh] = list_of_.try_emplace(groups, static_cast<std::uint32_t>(lists_.size()));
    if (fresh) lists_.push_back(&at->first);
    return at->second;
  }

  // ---- machines ---------------------------------------------------------------------------------

  template <typename Event>
  void drive_sender(Event event) {
    SenderActions actions;
    event(actions);
    for (const SenderAction& action : actions) std::visit([&](const auto& one) { perform(one); }, action);
  }
  template <typename Event>
  void produce(std::uint32_t r, Event event) {
    ProducerActions actions;
    event(ranks_[r]->producer, actions);
    for (ProducerAction& action : actions) std::visit([&](auto& one) { perform(r, one); }, action);
  }
  template <typename Event>
  void train(std::uint32_t r, Event event) {
    TrainerActions actions;
    event(ranks_[r]->trainer, actions);
    for (const TrainerAction& action : actions) std::visit([&](const auto& one) { perform(r, one); }, action);
  }
  template <typename Event>
  void consume(std::uint32_t c, Event event) {
    ConsumerActions actions;
    event(workers_[c].machine, actions);
    for (const ConsumerAction& action : actions)
      std::visit([&](const auto& one) { perform(c, one); }, action);
  }

  // ---- the control channel ----------------------------------------------------------------------

  static bool from_worker(ControlKind kind) {
    return kind == ControlKind::kUpdateStarted || kind == ControlKind::kFreeGroups ||
           kind == ControlKind::kPrepared || kind == ControlKind::kFinished;
  }
  static bool to_worker(ControlKind kind) {
    return kind == ControlKind::kStartUpdate || kind == ControlKind::kUpdate ||
           kind == ControlKind::kFreeAck || kind == ControlKind::kFinish;
  }

  void send(ControlKind kind, std::uint32_t from, std::uint32_t to, std::uint32_t groups = 0) {
    const bool in = from_worker(kind) || from != kSenderRank, out = to_worker(kind) || to != kSenderRank;
    ++report_.control[static_cast<std::size_t>(kind)];
    report_.hub_in += in ? 1 : 0;
    report_.hub_out += out ? 1 : 0;
    ++(from_worker(kind) ? report_.worker_control[from] : report_.rank_control[from]);
    ++(to_worker(kind) ? report_.worker_control[to] : report_.rank_control[to]);
    const std::int64_t turn = ((in ? 1 : 0) + (out ? 1 : 0)) * model_.hub_message_ns;
    report_.hub_busy_ns += turn;
    cold_.push_back(
        {hub_.take(now_ns_ + model_.latency_ns, turn) + model_.latency_ns, from, to, groups, kind});
    report_.hub_waiting = std::max<std::uint64_t>(report_.hub_waiting, cold_.size());
  }

  void deliver(const Cold& message) {
    const std::uint32_t from = message.from, to = message.to;
    switch (message.kind) {
      case ControlKind::kSyncOpen:
        return begin(to);
      case ControlKind::kSyncBegan:
        return drive_sender([&](SenderActions& out) { sender_.rank_began(now_ns_, from, kSyncId, out); });
      case ControlKind::kStartUpdate:
        consume(to, [&](ConsumerMachine& machine, ConsumerActions& out) {
          note(machine.start_update(now_ns_, kSyncId, kVersion, nullptr, out));
        });
        return send(ControlKind::kUpdateStarted, to, kSenderRank);
      case ControlKind::kUpdateStarted:
        return drive_sender(
            [&](SenderActions& out) { sender_.update_started(now_ns_, from, kSyncId, {}, out); });
      case ControlKind::kUpdate:
        return consume(
            to, [&](ConsumerMachine& machine, ConsumerActions& out) { note(machine.update(now_ns_, out)); });
      case ControlKind::kFreeGroups:
        return signal(to, from, message.groups, true);
      case ControlKind::kFreeAck:
        return acknowledge(to, from, message.groups);
      case ControlKind::kPrepared:
        return drive_sender([&](SenderActions& out) { sender_.prepared(now_ns_, from, kSyncId, {}, out); });
      case ControlKind::kRankEnded:
        return drive_sender([&](SenderActions& out) { sender_.rank_ended(now_ns_, from, kSyncId, {}, out); });
      case ControlKind::kFinish:
        return consume(to, [&](ConsumerMachine& machine, ConsumerActions& out) {
          note(machine.finish_update(now_ns_, kSyncId, out));
        });
      case ControlKind::kFinished:
        return drive_sender([&](SenderActions& out) { sender_.finished(now_ns_, from, kSyncId, {}, out); });
      case ControlKind::kSyncClosed:
        return;
    }
  }

  void begin(std::uint32_t r) {
    Rank& rank = *ranks_[r];
    rank.producer.sync_opened(kSyncId, live_);
    produce(r, [&](ProducerMachine& machine, ProducerActions& out) {
      note(machine.begin_sync(now_ns_, kSyncId, kVersion, live_, rank.groups, {}, out));
    });
    rank.progress_ns = now_ns_;
    send(ControlKind::kSyncBegan, r, kSenderRank);
    train(r, [&](TrainerMachine& machine, TrainerActions& out) {
      note(machine.begin(kSyncId, rank.groups, rank.resident, out));
    });
  }

  void signal(std::uint32_t r, std::uint32_t consumer, std::uint32_t groups, bool by_control) {
    produce(r, [&](ProducerMachine& machine, ProducerActions& out) {
      machine.signal(now_ns_, life_of(consumer), kSyncId, consumer, *lists_[groups], out, by_control);
    });
  }
  void acknowledge(std::uint32_t consumer, std::uint32_t r, std::uint32_t groups) {
    consume(consumer, [&](ConsumerMachine& machine, ConsumerActions& out) {
      machine.signals_acked(now_ns_, r, kSyncId, *lists_[groups], out);
    });
  }

  // ---- hot messages and reads -------------------------------------------------------------------

  Hot& send_hot(Hot::Kind kind, std::uint32_t r, std::uint32_t consumer) {
    ++report_.hot_messages;
    Hot& message = hot_.emplace_back();
    message.at = now_ns_ + model_.latency_ns;
    message.kind = kind;
    message.rank = r;
    message.consumer = consumer;
    return message;
  }

  void deliver(Hot message) {
    switch (message.kind) {
      case Hot::Kind::kPull:
        return produce(message.rank, [&](ProducerMachine& machine, ProducerActions& out) {
          machine.pull(now_ns_, life_of(message.consumer), message.pull, out);
        });
      case Hot::Kind::kReady:
        return consume(message.consumer, [&](ConsumerMachine& machine, ConsumerActions& out) {
          machine.ready(now_ns_, message.rank, message.pull, std::move(message.ready), out);
        });
      case Hot::Kind::kFree:
        return signal(message.rank, message.consumer, message.groups, false);
      case Hot::Kind::kFreeAck:
        return acknowledge(message.consumer, message.rank, message.groups);
    }
  }

  void read(const Read& what) {
    std::uint32_t at = static_cast<std::uint32_t>(reads_.size());
    if (free_reads_.empty()) {
      reads_.push_back(what);
    } else {
      at = free_reads_.back();
      free_reads_.pop_back();
      reads_[at] = what;
    }
    leaving_.push_back({now_ns_ + model_.latency_ns, at});
  }

  std::uint64_t bytes_of_read(const Read& read) const {
    return kind_of(read.consumer).wire_bytes[read.chunk][read.run];
  }

  void leave(std::uint32_t index) {
    const Read& read = reads_[index];
    links_.begin(now_ns_, read.rank / model_.ranks_per_host, read.consumer / model_.workers_per_host,
                 bytes_of_read(read), index);
  }

  void arrive(std::uint32_t index) {
    const Read read = reads_[index];
    free_reads_.push_back(index);
    arrived_bytes_ += bytes_of_read(read);
    if (read.slot) {
      return consume(read.consumer, [&](ConsumerMachine& machine, ConsumerActions& out) {
        machine.transfer_done(now_ns_, kSyncId, read.chunk, read.run, {}, out);
      });
    }
    Worker& worker = workers_[read.consumer];
    const auto copy = std::find_if(worker.reading.begin(), worker.reading.end(),
                                   [&](const auto& one) { return one.first == read.chunk; });
    if (--copy->second != 0) return;
    worker.reading.erase(copy);
    const Chunk& chunk = kind_of(read.consumer).plan->chunks[read.chunk];
    const bool compared = chunk.path == Path::kDirect && summed(tables_, chunk.path);
    scattered(read.consumer, read.chunk, compared ? time_for(chunk.bytes, model_.sum_bytes_per_s) : 0);
  }

  // The copy thread does what is left to do of a chunk.
  void scattered(std::uint32_t consumer, std::uint32_t chunk, std::int64_t work_ns) {
    const std::int64_t end = work_ns == 0 ? now_ns_ : workers_[consumer].copier.take(now_ns_, work_ns);
    at(end, Job::Kind::kScattered, consumer, chunk);
  }

  // ---- jobs -------------------------------------------------------------------------------------

  void perform(const Job& job) {
    switch (job.kind) {
      case Job::Kind::kGathered:
        return publish(job.who, job.what);
      case Job::Kind::kSourceEnded:
        return train(job.who,
                     [](TrainerMachine& machine, TrainerActions& out) { machine.source_ended(out); });
      case Job::Kind::kPacked:
        ranks_[job.who]->progress(now_ns_);
        return produce(job.who, [&](ProducerMachine& machine, ProducerActions& out) {
          machine.pack_done(now_ns_, job.ticket, {}, std::vector<std::uint64_t>(job.what, 0), out);
        });
      case Job::Kind::kScattered:
        return consume(job.who, [&](ConsumerMachine& machine, ConsumerActions& out) {
          machine.scatter_done(now_ns_, kSyncId, job.what, {}, out);
        });
      case Job::Kind::kPosted:
        return consume(job.who, [&](ConsumerMachine& machine, ConsumerActions& out) {
          machine.post_done(now_ns_, kSyncId, job.what, {}, out);
        });
      case Job::Kind::kCommitted:
        return consume(job.who, [&](ConsumerMachine& machine, ConsumerActions& out) {
          machine.commit_done(now_ns_, kSyncId, {}, out);
        });
    }
  }

  void publish(std::uint32_t r, std::uint32_t group) {
    Rank& rank = *ranks_[r];
    rank.progress(now_ns_);
    std::vector<PublishedView> views;
    std::uint64_t offset = 0;
    for (const auto& [name, piece] : rank.held[rank.place(group)]) {
      PublishedView& view = views.emplace_back();
      view.name = name;
      view.piece = piece;
      view.dtype = tables_.metadata[name].dtype;
      view.shape = piece == 0 ? tables_.metadata[name].shape : tables_.ownership.pieces[piece - 1].box.size;
      const std::uint64_t bytes = bytes_of(view.dtype, checked_numel(view.shape).value_or(0)).value();
      view.location.where = {.region = 1, .generation = 1, .offset = offset, .bytes = bytes};
      offset += bytes;
    }
    produce(r, [&](ProducerMachine& machine, ProducerActions& out) {
      note(machine.publish_group(now_ns_, group, std::move(views), out));
    });
    train(r, [&](TrainerMachine& machine, TrainerActions& out) { machine.published(group, out); });
  }

  // ---- actions of a rank ------------------------------------------------------------------------

  void perform(std::uint32_t r, const trainer_action::AskSource& action) {
    Rank& rank = *ranks_[r];
    const GroupBytes& bytes = rank.bytes[rank.place(action.group)];
    std::int64_t work_ns = 0;
    if (!rank.resident) {
      rank.holds += bytes.gathered + bytes.small;
      rank.memory.reached = std::max(rank.memory.reached, rank.holds);
      if (model_.source_bytes_per_s != 0) work_ns += time_for(bytes.gathered, model_.source_bytes_per_s);
      work_ns += time_for(bytes.small, model_.copy_bytes_per_s);
    }
    at(rank.source.take(now_ns_, work_ns), Job::Kind::kGathered, r, action.group);
  }
  void perform(std::uint32_t r, const trainer_action::AskEnd&) { later(0, Job::Kind::kSourceEnded, r, 0); }
  void perform(std::uint32_t r, const trainer_action::Release& action) {
    Rank& rank = *ranks_[r];
    if (rank.resident) return;
    const GroupBytes& bytes = rank.bytes[rank.place(action.group)];
    rank.holds -= bytes.gathered + bytes.small;
  }
  void perform(std::uint32_t r, const trainer_action::EndProducer&) {
    produce(r, [&](ProducerMachine& machine, ProducerActions& out) { note(machine.end_sync(now_ns_, out)); });
  }
  void perform(std::uint32_t r, const trainer_action::RankDone& action) {
    note(action.status);
    send(ControlKind::kRankEnded, r, kSenderRank);
  }

  void perform(std::uint32_t, const producer_action::AllocateRing&) {}  // all were allocated by reserve()
  void perform(std::uint32_t, const producer_action::ReserveReply&) {}
  void perform(std::uint32_t r, const producer_action::Pack& action) {
    std::int64_t work_ns = time_for(action.pull->bytes, model_.copy_bytes_per_s);
    if (action.summed) work_ns += time_for(action.pull->bytes, model_.sum_bytes_per_s);
    at(ranks_[r]->packer.take(now_ns_, work_ns), Job::Kind::kPacked, r,
       action.summed ? static_cast<std::uint32_t>(action.pull->keys.size()) : 0, action.ticket);
  }
  void perform(std::uint32_t r, const producer_action::Sum& action) {
    ++report_.sums;
    at(ranks_[r]->packer.take(now_ns_, time_for(action.pull->bytes, model_.sum_bytes_per_s)),
       Job::Kind::kPacked, r, static_cast<std::uint32_t>(action.pull->keys.size()), action.ticket);
  }
  void perform(std::uint32_t r, producer_action::ReadyReply& action) {
    ranks_[r]->progress(now_ns_);
    Hot& message = send_hot(Hot::Kind::kReady, r, action.pull.consumer);
    message.pull = action.pull;
    message.ready = std::move(action.ready);
  }
  void perform(std::uint32_t r, const producer_action::FailReply& action) {
    note(action.status.with_context(trainer_name(r)));
  }
  void perform(std::uint32_t r, const producer_action::SignalAck& action) {
    ranks_[r]->progress(now_ns_);
    const std::uint32_t groups = intern(action.groups);
    if (action.by_control) return send(ControlKind::kFreeAck, r, action.consumer, groups);
    send_hot(Hot::Kind::kFreeAck, r, action.consumer).groups = groups;
  }
  void perform(std::uint32_t r, const producer_action::GroupFreed& action) {
    train(r, [&](TrainerMachine& machine, TrainerActions& out) { machine.group_freed(action.group, out); });
  }
  void perform(std::uint32_t r, const producer_action::SyncEnded&) {
    train(r, [](TrainerMachine& machine, TrainerActions& out) { machine.producer_ended(out); });
  }
  void perform(std::uint32_t, const producer_action::SyncFailed& action) { note(action.status); }
  void perform(std::uint32_t, const producer_action::SyncQuiet&) {}

  // ---- actions of a worker ----------------------------------------------------------------------

  void perform(std::uint32_t c, const consumer_action::SendPull& action) {
    ++report_.pulls;
    send_hot(Hot::Kind::kPull, action.producer, c).pull = action.pull;
  }
  void perform(std::uint32_t c, const consumer_action::StartTransfer& action) {
    read({c, action.chunk, action.producer, action.run, true});
  }
  void perform(std::uint32_t c, const consumer_action::StartScatter& action) {
    const Chunk& chunk = kind_of(c).plan->chunks[action.chunk];
    std::int64_t work_ns = time_for(chunk.bytes, model_.copy_bytes_per_s);
    if (!action.sums.empty()) work_ns += time_for(chunk.bytes, model_.sum_bytes_per_s);
    scattered(c, action.chunk, work_ns);
  }
  void perform(std::uint32_t c, const consumer_action::StartCopy& action) {
    if (action.producers.empty()) return scattered(c, action.chunk, 0);
    workers_[c].reading.emplace_back(action.chunk, static_cast<std::uint32_t>(action.producers.size()));
    for (std::uint16_t run = 0; run < action.producers.size(); ++run)
      read({c, action.chunk, action.producers[run], run, false});
  }
  void perform(std::uint32_t c, const consumer_action::StartPost& action) {
    later(0, Job::Kind::kPosted, c, action.chunk);
  }
  void perform(std::uint32_t c, const consumer_action::StartCommit&) {
    const std::int64_t work_ns = time_for(kind_of(c).plan->bytes_planned, model_.copy_bytes_per_s);
    at(workers_[c].copier.take(now_ns_, work_ns), Job::Kind::kCommitted, c, 0);
  }
  void perform(std::uint32_t c, const consumer_action::SendSignals& action) {
    report_.signals += action.groups.size();
    const std::uint32_t groups = intern(action.groups);
    if (!kind_of(c).hot[action.producer]) return send(ControlKind::kFreeGroups, c, action.producer, groups);
    send_hot(Hot::Kind::kFree, action.producer, c).groups = groups;
  }
  void perform(std::uint32_t c, const consumer_action::UpdateDone& action) {
    note(action.status);
    send(ControlKind::kPrepared, c, kSenderRank);
  }
  void perform(std::uint32_t c, const consumer_action::FinishDone& action) {
    note(action.status);
    send(ControlKind::kFinished, c, kSenderRank);
  }
  void perform(std::uint32_t, const consumer_action::ReportFailure& action) { note(action.status); }
  void perform(std::uint32_t, const consumer_action::AnnounceRecovery&) {}  // nobody is lost
  void perform(std::uint32_t, const consumer_action::LeaveLanes&) {}        // nor out of reach

  // ---- actions of the sender --------------------------------------------------------------------

  void perform(const sender_action::OpenSync& action) {
    send(ControlKind::kSyncOpen, kSenderRank, action.rank);
  }
  void perform(const sender_action::StartUpdate& action) {
    send(ControlKind::kStartUpdate, kSenderRank, action.consumer);
  }
  void perform(const sender_action::Update& action) {
    report_.updates_ns = now_ns_;
    send(ControlKind::kUpdate, kSenderRank, action.consumer);
  }
  void perform(const sender_action::Finish& action) {
    report_.prepared_ns = now_ns_;
    send(ControlKind::kFinish, kSenderRank, action.consumer);
  }
  void perform(const sender_action::FailRank& action) { note(action.status); }
  void perform(const sender_action::FailConsumer& action) { note(action.status); }
  void perform(const sender_action::CloseSync& action) {
    send(ControlKind::kSyncClosed, kSenderRank, action.rank);
  }
  void perform(const sender_action::SyncDone& action) {
    note(action.status);
    report_.sync_ns = now_ns_;
    done_ = true;
  }

  // ---- the end ----------------------------------------------------------------------------------

  void finish_report() {
    const std::uint32_t trainer_hosts = ceil_div<std::uint32_t>(ranks_in_all(), model_.ranks_per_host);
    const std::uint32_t worker_hosts =
        ceil_div<std::uint32_t>(tables_.num_consumers, model_.workers_per_host);
    for (std::uint32_t h = 0; h < trainer_hosts; ++h)
      report_.trainer_hosts.push_back({links_.outward_bytes(h), links_.outward_busy_ns(h)});
    for (std::uint32_t h = 0; h < worker_hosts; ++h)
      report_.worker_hosts.push_back({links_.inward_bytes(h), links_.inward_busy_ns(h)});
    const auto bound = [&](const std::vector<LinkUse>& hosts, std::uint64_t bytes_per_s, bool trainers) {
      for (std::uint32_t h = 0; h < hosts.size(); ++h) {
        const std::int64_t ns = time_for(hosts[h].bytes, bytes_per_s);
        if (ns <= report_.bound_ns) continue;
        report_.bound_ns = ns;
        report_.bound_by_trainer = trainers;
        report_.bound_host = h;
      }
    };
    bound(report_.trainer_hosts, model_.trainer_host_bytes_per_s, true);
    bound(report_.worker_hosts, model_.worker_host_bytes_per_s, false);
    for (const auto& rank : ranks_) {
      RankMemory memory = rank->memory;
      GroupBytes most;
      for (const GroupBytes& bytes : rank->bytes) {
        most.gathered = std::max(most.gathered, bytes.gathered);
        most.small = std::max(most.small, bytes.small);
      }
      if (!rank->resident)
        memory.promised = (std::uint64_t{fleet_.lookahead} + 1) * (most.gathered + most.small);
      memory.promised += memory.serve_rings;
      memory.reached += memory.serve_rings;
      memory.peak_groups = rank->trainer.peak_resident();
      if (rank->longest_wait_ns > report_.longest_wait_ns) {
        report_.longest_wait_ns = rank->longest_wait_ns;
        report_.longest_wait_rank = static_cast<std::uint32_t>(report_.ranks.size());
      }
      report_.ranks.push_back(memory);
      report_.packs += rank->producer.packs();
      report_.bytes_packed += rank->producer.bytes_packed();
    }
  }

  const ScaleFleet& fleet_;
  const ScaleModel& model_;
  const InitTables& tables_;
  const std::function<void(double, std::int64_t)>& progress_;
  const std::uint32_t per_replica_;
  std::vector<Kind> kinds_;               // by worker of a replica
  std::deque<ConsumerMachine> machines_;  // likewise: the twins of all others, which run nothing themselves
  std::deque<Worker> workers_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::uint32_t> live_;

  std::int64_t now_ns_ = 0;
  FairLinks links_;
  SenderMachine sender_;
  Thread hub_;
  std::deque<Cold> cold_;
  std::deque<Hot> hot_;
  std::deque<ReadAt> leaving_, arriving_;
  std::priority_queue<Job, std::vector<Job>, std::greater<>> jobs_;
  std::uint64_t next_order_ = 0;
  std::vector<Read> reads_;
  std::vector<std::uint32_t> free_reads_, ended_;
  std::map<std::vector<std::uint32_t>, std::uint32_t> list_of_;
  std::vector<const std::vector<std::uint32_t>*> lists_;  // lists of groups, as messages name them
  std::uint64_t arrived_bytes_ = 0;
  Status status_;
  bool done_ = false;
  ScaleReport report_;
};

Status check(const ScaleFleet& fleet, const ScaleModel& model) {
  const auto bad = [](std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = Reason::kBadArgument});
  };
  if (model.ranks_per_host == 0 || model.workers_per_host == 0) return bad("a host without processes");
  if (model.trainer_host_bytes_per_s == 0 || model.worker_host_bytes_per_s == 0 ||
      model.copy_bytes_per_s == 0 || model.sum_bytes_per_s == 0) {
    return bad("a speed of 0");
  }
  if (model.latency_ns < 0 || model.hub_message_ns < 0) return bad("a time below 0");
  if (fleet.workers.empty() ||
      fleet.workers.size() * fleet.tables->num_replicas != fleet.tables->num_consumers) {
    return bad(fmt::format("{} workers in each of {} replicas, the tables have {}", fleet.workers.size(),
                           fleet.tables->num_replicas, fleet.tables->num_consumers));
  }
  for (const ScaleWorker& worker : fleet.workers) {
    for (const Chunk& chunk : worker.plan->chunks) {
      if (chunk.path == Path::kMapped)
        return bad("mapped chunks do not cross links; plan with transport tcp or ucx");
    }
  }
  return {};
}

}  // namespace

Result<ScaleReport> simulate_scale(const ScaleFleet& fleet, const ScaleModel& model,
                                   const std::function<void(double, std::int64_t)>& progress) {
  SHARDPULL_RETURN_IF_ERROR(check(fleet, model));
  return Scale(fleet, model, progress).run();
}

}  // namespace shardpull::sim
