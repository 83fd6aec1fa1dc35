// `shardpull trainer`: one trainer rank over a checkpoint. Rank 0 is the sender: it starts the syncs, gathers
// what the others report after each, and at the end tells them that it is over.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "cli/checkpoint_source.h"
#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/fleet_plan.h"
#include "cli/launcher_channel.h"
#include "cli/memory_sampler.h"
#include "cli/model_input.h"
#include "cli/output_files.h"
#include "cli/process_setup.h"
#include "cli/sync_report.h"
#include "cli/trainer_side.h"
#include "shardpull/trainer.h"

namespace shardpull::cli {
namespace {

constexpr const char* kReportTopic = "report";  // to the sender, after each sync
constexpr std::int64_t kProgressPeriodNs = 50 * kNanosPerMilli;

// Which versions all ranks send, as FleetOptions::settings.
std::string shared_settings(const VersionArguments& versions) {
  return fmt::format("--syncs={}\n--seed={}{}", versions.syncs, versions.seed,
                     versions.mutate ? "" : "\n--no-mutate");
}

class TrainerRun {
 public:
  TrainerRun(const TrainerArguments& arguments, LauncherChannel& launcher)
      : arguments_(arguments),
        launcher_(launcher),
        name_(fmt::format("trainer {}", arguments.rank)),
        workers_(workers(arguments.fleet.inference)) {}

  Status run() {
    SHARDPULL_RETURN_IF_ERROR(check_outputs(
        {{"--trace", arguments_.trace}},
        fleet_inputs(arguments_.model, arguments_.fleet, {}, arguments_.process.token_file)));
    SHARDPULL_RETURN_IF_ERROR(check_threads());
    SHARDPULL_ASSIGN_OR_RETURN(const FleetOptions fleet, fleet_options(arguments_.fleet, arguments_.process));
    SHARDPULL_ASSIGN_OR_RETURN(const ModelInput model,
                               open_model(arguments_.model, arguments_.any_architecture));
    SHARDPULL_ASSIGN_OR_RETURN(TrainerHoldings holdings,
                               trainer_holdings(model, arguments_.fleet.trainer, arguments_.withhold));
    ranks_ = holdings.ranks();
    if (arguments_.rank >= ranks_) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--rank: {} is not below the {} ranks of {}", arguments_.rank, ranks_,
                                to_string(arguments_.fleet.trainer)),
                    {.reason = Reason::kBadArgument});
    }
    SHARDPULL_RETURN_IF_ERROR(check_descriptors(arguments_.fleet, ranks_, workers_, false));
    SHARDPULL_ASSIGN_OR_RETURN(names_, later_names(arguments_.fleet, model));
    const auto replicas = static_cast<std::uint32_t>(arguments_.fleet.inference.replicas);
    SHARDPULL_ASSIGN_OR_RETURN(
        const std::unique_ptr<Trainer> trainer,
        Trainer::create({.fleet = fleet,
                         .rank = arguments_.rank,
                         .world_size = ranks_,
                         .num_consumers = workers_,
                         .num_replicas = replicas,
                         .workers_per_replica = workers_ / replicas,
                         .ring_depth = arguments_.fleet.ring_depth,
                         .lookahead = arguments_.fleet.lookahead,
                         .export_pack_limit_bytes = arguments_.fleet.export_pack_limit_bytes,
                         .on_consumer_loss = arguments_.on_consumer_loss,
                         .publish = arguments_.fleet.trainer.publish,
                         .integrity = arguments_.fleet.integrity,
                         .settings = shared_settings(arguments_.versions),
                         .trace_file = arguments_.trace}));
    trainer_ = trainer.get();
    SHARDPULL_ASSIGN_OR_RETURN(
        const std::unique_ptr<CheckpointSource> source,
        CheckpointSource::load(model,
                               {.kept = std::move(holdings.kept[arguments_.rank]),
                                .served = std::move(holdings.served[arguments_.rank]),
                                .resident = holdings.resident,
                                .resident_groups = arguments_.fleet.lookahead + 1},
                               *trainer, [this](std::uint64_t bytes) { show_progress(bytes); }));
    SHARDPULL_RETURN_IF_ERROR(trainer->init(*source));
    const Status done = run_syncs(*source);
    trainer->shutdown(done);
    return done;
  }

 private:
  // What the sender opens, until it ends the fleet.
  Status follow(CheckpointSource& source) {
    for (;;) {
      const auto next = trainer_->next_sync();
      if (!next.ok()) return next.status().info().reason == Reason::kShutdown ? Status() : next.status();
      const Status done = run_sync(0, next->version, !next->names.empty(), source);
      // The sender may be two syncs ahead of one that failed before this rank came to it.
      const bool late = continues() && done.info().reason == Reason::kSuperseded;
      if (!done.ok() && !late && !outlives(done)) return done;
    }
  }

  Status run_syncs(CheckpointSource& source) {
    // Which syncs are over, and which are sent again, a rank that was started again cannot know, and another
    // one not where the fleet outlives losses: the sender may find one after the sync was closed (collect).
    if (trainer_->returned() || (!sender() && continues())) return follow(source);
    for (std::uint32_t sync = 1; sync <= arguments_.versions.syncs;) {
      const std::uint64_t version = arguments_.versions.version_of(sync);
      const Status done = run_sync(sync, version, sync > 1 && !names_.empty(), source);
      if (done.ok()) {
        ++sync;
        continue;
      }
      // By the version: the message may have the number of the sync, which counts those sent again.
      if (!outlives(done)) return done.with_context(fmt::format("version {}", version));
      if (sender() && !launcher_.attached()) {
        std::fprintf(stdout, "version %llu failed, and is sent again: %s\n",
                     static_cast<unsigned long long>(version), done.message().c_str());
        std::fflush(stdout);
      }
    }
    // A rank that left at once would look lost to a sender that still waits for others.
    if (!sender()) return follow(source);
    if (!launcher_.attached()) std::fprintf(stdout, "%s\n", verdict_line(report_).c_str());
    return {};
  }

  bool sender() const { return arguments_.rank == 0; }

  bool continues() const { return arguments_.on_consumer_loss == OnConsumerLoss::kContinue; }

  // Whether the fleet goes on after this error: of a lost process, which may be started again.
  bool outlives(const Status& why) const {
    return continues() && why.info().reason == Reason::kPeerLost && !why.info().peer.empty() &&
           why.info().peer != "trainer 0";
  }

  // What was left from before the sync at hand: reports of workers that were lost later, and their losses.
  void forget_messages() {
    for (;;) {
      const auto message = trainer_->receive_message(0);
      if (message.ok() && message->has_value()) continue;
      const Reason reason = message.status().info().reason;  // unspecified: there is none left
      if (reason != Reason::kPeerLost && reason != Reason::kLimit) return;
    }
  }

  void show_progress(std::uint64_t bytes) {
    const std::int64_t now = SystemClock::instance().now_ns();
    if (now - shown_ns_ < kProgressPeriodNs) return;
    shown_ns_ = now;
    launcher_.send_progress(bytes);
  }

  // `sync`: 0 where this rank does not know. `part`: of the names of the syncs after the first.
  Status run_sync(std::uint32_t sync, std::uint64_t version, bool part, CheckpointSource& source) {
    source.set_version(version, part ? names_ : std::vector<std::uint32_t>());
    SHARDPULL_RETURN_IF_ERROR(launcher_.pass_gate("ready", sync));
    if (sender() && continues()) forget_messages();
    SHARDPULL_ASSIGN_OR_RETURN(const SyncReport report,
                               trainer_->send_weights(version, {.names = part ? arguments_.fleet.names
                                                                              : std::vector<std::string>()}));
    memory_.pause();
    SHARDPULL_RETURN_IF_ERROR(launcher_.pass_gate("synced", sync));

    ProcessReport own;
    // The weights are shared memory of their own; the engine's rings and buffers are shared as well.
    own.memory = {
        .process = name_,
        .model_bytes = source.held_bytes(),
        .engine_bytes = trainer_->engine_bytes(),
        .peak_extra_bytes = memory_.peak_bytes() + trainer_->engine_bytes() + source.gather_bytes()};
    if (sender()) {
      SHARDPULL_RETURN_IF_ERROR(collect(sync, report, std::move(own)));
    } else {
      SHARDPULL_RETURN_IF_ERROR(trainer_->send_message("trainer 0", kReportTopic, encode(own)));
    }
    memory_.resume();
    return {};
  }

  // Waits for a report of every other process that was in the sync and lives.
  Status collect(std::uint32_t sync, const SyncReport& from, ProcessReport own) {
    std::map<std::string, ProcessReport> reports;
    reports.emplace(name_, std::move(own));
    const SystemClock& clock = SystemClock::instance();
    const std::int64_t deadline = clock.now_ns() + arguments_.fleet.stall_timeout_ns;
    std::set<std::string> expected;
    Status last_loss;  // of a worker
    for (std::uint32_t rank = 1; rank < ranks_; ++rank) {
      if (!std::binary_search(from.lost_ranks.begin(), from.lost_ranks.end(), rank))
        expected.insert(fmt::format("trainer {}", rank));
    }
    for (const WorkerReport& worker : from.workers) expected.insert(fmt::format("worker {}", worker.consumer));
    const std::size_t processes_in_sync = expected.size() + 1;
    while (!expected.empty()) {
      const std::int64_t left = deadline - clock.now_ns();
      if (left <= 0) {
        return Status(StatusCode::kDeadlineExceeded,
                      fmt::format("{} of {} processes reported within {}", reports.size(), processes_in_sync,
                                  format_duration_ns(arguments_.fleet.stall_timeout_ns)),
                      {.reason = Reason::kStalled, .fault = Fault::kPeer});
      }
      const auto received = trainer_->receive_message(static_cast<std::uint64_t>(left / kNanosPerMilli) + 1);
      if (!received.ok()) {
        const std::string& peer = received.status().info().peer;
        std::uint32_t rank = 1;
        while (rank < ranks_ && peer != fmt::format("trainer {}", rank)) ++rank;
        if (rank == ranks_) {  // whether there is a sync without a rank, the next send_weights says
          if (!outlives(received.status())) return received.status();
          if (expected.contains(peer)) last_loss = received.status();
        }
        expected.erase(peer);
        continue;
      }
      const std::optional<FleetMessage>& message = *received;
      if (!message || message->topic != kReportTopic) continue;
      SHARDPULL_ASSIGN_OR_RETURN(ProcessReport report, decode_process_report(message->body));
      expected.erase(message->from);
      reports.insert_or_assign(message->from, std::move(report));
    }
    SHARDPULL_RETURN_IF_ERROR(check_confirmed(from, reports, last_loss));

    SyncOutcome outcome;
    outcome.sync = sync;
    outcome.version = from.version;
    outcome.wall_ns = from.wall_ns;
    outcome.summary = summary_line(from);
    outcome.ranks = from.ranks;
    nlohmann::json processes = nlohmann::json::array();
    report_.processes.clear();
    for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
      const auto report = reports.find(fmt::format("trainer {}", rank));
      if (report != reports.end()) take_memory(report->second, processes);
    }
    for (const WorkerReport& one : from.workers) {
      const auto report = reports.find(fmt::format("worker {}", one.consumer));
      if (report == reports.end()) continue;  // lost since
      take_memory(report->second, processes);
      outcome.workers.push_back({.report = one, .verdict = report->second.verdict});
    }
    launcher_.send({{"event", "sync"}, {"outcome", to_json(outcome)}, {"processes", std::move(processes)}});
    if (!launcher_.attached()) {
      std::fprintf(stdout, "sync %u: %s%s%s\n", sync, outcome.summary.c_str(),
                   !outcome.verified() ? ""
                   : outcome.exact()   ? ", exact"
                                       : ", NOT exact",
                   absent(outcome, from).c_str());
      std::fflush(stdout);
    }
    report_.verify = arguments_.verify;
    for (const WorkerOutcome& worker : outcome.workers) {
      const std::string who = fmt::format("worker {}", worker.report.consumer);
      if (arguments_.verify && !worker.verdict) {
        return Status(StatusCode::kFailedPrecondition, who + " did not verify; start it with --verify",
                      {.reason = Reason::kSettingMismatch, .fault = Fault::kUser, .peer = who});
      }
      if (worker.verdict && !worker.verdict->exact) {
        return Status(StatusCode::kDataLoss, who + ": " + worker.verdict->error,
                      {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = who});
      }
    }
    report_.syncs.push_back(std::move(outcome));
    return {};
  }

  // Weights are delivered when all workers of a replica have said so. All may have committed and have been
  // lost since.
  Status check_confirmed(const SyncReport& from, const std::map<std::string, ProcessReport>& reports,
                         const Status& last_loss) const {
    std::vector<std::string> lost;
    std::map<std::uint32_t, std::uint32_t> reported;  // workers, by replica
    const auto per_replica = workers_ / static_cast<std::uint32_t>(arguments_.fleet.inference.replicas);
    for (const WorkerReport& one : from.workers) {
      const std::string name = fmt::format("worker {}", one.consumer);
      if (!reports.contains(name)) {
        lost.push_back(name);
      } else if (++reported[one.consumer / per_replica] == per_replica) {
        return {};
      }
    }
    return Status(StatusCode::kUnavailable,
                  fmt::format("no whole replica is left that has it: lost after the commit: {} ({})",
                              fmt::join(lost, ", "), last_loss.message()),
                  last_loss.info());
  }

  // ", by 3 of 4 workers; lost: worker 3", or nothing where all of them have it and no rank is gone.
  std::string absent(const SyncOutcome& outcome, const SyncReport& from) const {
    std::string text;
    if (outcome.workers.size() != workers_)
      text = fmt::format(", by {} of {} workers", outcome.workers.size(), workers_);
    std::vector<std::string> lost;
    for (const std::uint32_t rank : from.lost_ranks) lost.push_back(fmt::format("trainer {}", rank));
    for (const std::uint32_t consumer : from.lost_consumers) lost.push_back(fmt::format("worker {}", consumer));
    for (const WorkerReport& one : from.workers) {  // committed, and was lost before it reported
      if (std::none_of(outcome.workers.begin(), outcome.workers.end(),
                       [&](const WorkerOutcome& each) { return each.report.consumer == one.consumer; }))
        lost.push_back(fmt::format("worker {}", one.consumer));
    }
    if (!lost.empty()) text += fmt::format("; lost: {}", fmt::join(lost, ", "));
    return text;
  }

  void take_memory(const ProcessReport& report, nlohmann::json& processes) {
    report_.processes.push_back(report.memory);
    processes.push_back(to_json(report.memory));
  }

  const TrainerArguments& arguments_;
  LauncherChannel& launcher_;
  const std::string name_;
  const std::uint32_t workers_;
  std::uint32_t ranks_ = 0;
  std::vector<std::uint32_t> names_;  // of the syncs after the first, ascending; empty: all
  MemorySampler memory_;
  Trainer* trainer_ = nullptr;
  RunReport report_;  // by hand only: what the last line says
  std::int64_t shown_ns_ = 0;
};

}  // namespace

int run_trainer(const TrainerArguments& arguments) {
  const std::string name = fmt::format("trainer {}", arguments.rank);
  become(name);
  LauncherChannel launcher(arguments.process.launcher_fd);
  const Status status = TrainerRun(arguments, launcher).run();
  return status.ok() ? kExitDone : fail(launcher, name, status);
}

}  // namespace shardpull::cli
