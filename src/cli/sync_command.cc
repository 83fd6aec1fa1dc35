// `shardpull sync`: a launcher. It makes a private directory and a token, starts `trainer` and `worker`
// processes of this same program, and collects what they report. The processes do the work and could as well
// be started by hand.
//
//   trainers   ready(i) ----------------> wait            synced(i) -> wait          mutate, ready(i+1) ...
//   workers                      (serve)                  synced(i) -> wait          verify, tell the sender
//   launcher             copy, release      the sync               copy, release
//
// The two waits are there to measure plain copies beside the sync while the fleet stands still; nothing else
// needs them.
#include <signal.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/identity.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/copy_probe.h"
#include "cli/fleet_plan.h"
#include "cli/model_input.h"
#include "cli/output_files.h"
#include "cli/process_setup.h"
#include "cli/progress.h"
#include "cli/recordings.h"
#include "cli/run_directory.h"
#include "cli/supervisor.h"
#include "cli/sync_report.h"
#include "observe/trace_file.h"

namespace shardpull::cli {
namespace {

std::vector<std::vector<std::uint64_t>> key_bytes(const FleetPlan& fleet) {
  std::vector<std::vector<std::uint64_t>> out;
  for (std::uint32_t worker = 0; worker < fleet.workers(); ++worker) {
    auto& keys = out.emplace_back();
    for (const Chunk& chunk : fleet.plan(worker).chunks) {
      for (const ChunkKey& key : chunk.keys) keys.push_back(key.bytes);
    }
  }
  return out;
}

// A running fleet as the launcher sees it.
class FleetRun {
 public:
  FleetRun(const SyncArguments& arguments, const FleetPlan& plan, Supervisor& supervisor, Progress& progress,
           RunReport& report)
      : arguments_(arguments),
        trainers_(plan.holdings.ranks()),
        workers_(workers(arguments.fleet.inference)),
        supervisor_(supervisor),
        progress_(progress),
        report_(report) {
    auto probe = CopyProbe::start(key_bytes(plan));
    if (probe.ok()) {
      probe_ = std::move(*probe);
    } else {
      report_.notes.push_back(probe.status().message());
    }
    through_.resize(trainers_, 0);
  }

  // Bytes of all ranks' tensors: what progress counts.
  void set_bytes_per_sync(std::uint64_t bytes) { bytes_per_sync_ = bytes; }

  // By worker of a replica; none: workers bake.
  void set_recordings(std::vector<std::string> files) { recordings_ = std::move(files); }

  std::optional<RunError> run(const std::string& model, const std::string& fleet_directory) {
    for (std::uint32_t rank = 0; rank < trainers_; ++rank) {
      std::vector<std::string> words = {"trainer", "--rank", fmt::format("{}", rank)};
      append(words, to_flags(arguments_.versions));
      if (arguments_.verify) words.push_back("--verify");
      if (rank == 0 && !arguments_.trace.empty()) append(words, {"--trace", arguments_.trace});
      if (!arguments_.recordings.empty()) words.push_back("--any-architecture");
      for (const std::string& name : arguments_.withhold) append(words, {"--withhold", name});
      if (auto failed = start(fmt::format("trainer {}", rank), std::move(words), model, fleet_directory)) {
        return failed;
      }
    }
    for (std::uint32_t id = 0; id < workers_; ++id) {
      std::vector<std::string> words = {"worker", "--id", fmt::format("{}", id)};
      if (arguments_.verify) words.push_back("--verify");
      if (!arguments_.dump.empty()) append(words, {"--dump", arguments_.dump});
      if (!recordings_.empty()) append(words, {"--recording", recordings_[id % recordings_.size()]});
      if (auto failed = start(fmt::format("worker {}", id), std::move(words), model, fleet_directory)) {
        return failed;
      }
    }
    progress_.update("starting", 0, "");
    return supervisor_.run(
        {.on_event = [this](std::size_t child, const nlohmann::json& event) { on_event(child, event); },
         .extra_fd = [this] { return probe_ ? probe_->reply_fd() : -1; },
         .on_extra = [this] { on_probe(); },
         .on_child_signal =
             [this] {
               if (probe_ && probe_->broken()) drop_probe("a copying process ended");
             }});
  }

 private:
  enum class Stage { kGathering, kBefore, kAfter, kNonTemporal, kVectored };

  static void append(std::vector<std::string>& words, std::vector<std::string> more) {
    for (std::string& word : more) words.push_back(std::move(word));
  }

  std::optional<RunError> start(std::string name, std::vector<std::string> words, const std::string& model,
                                const std::string& fleet_directory) {
    append(words, {"--model", model, "--fleet-dir", fleet_directory});
    append(words, to_flags(arguments_.fleet));
    const Status started = supervisor_.start({.name = std::move(name), .arguments = std::move(words)});
    if (!started.ok()) return RunError{"", started.message()};
    return std::nullopt;
  }

  void on_event(std::size_t child, const nlohmann::json& event) {
    const std::string kind = event.value("event", "");
    if (kind == "progress") {
      if (child < through_.size()) through_[child] = event.value("bytes", std::uint64_t{0});
      show_progress();
    } else if (kind == "ready" || kind == "synced") {
      waiting_.insert(child);
      const std::size_t expected = kind == "ready" ? trainers_ : trainers_ + workers_;
      if (waiting_.size() == expected) at_gate(kind == "ready" ? Stage::kBefore : Stage::kAfter);
    } else if (kind == "sync") {
      take_outcome(event);
    }
  }

  // Everybody stands still: measure, when that is possible, then let them go.
  void at_gate(Stage stage) {
    if (stage == Stage::kBefore) {
      before_.reset();
      after_.reset();
      non_temporal_.reset();
      vectored_.reset();
      begin_ns_ = SystemClock::instance().now_ns();
      std::fill(through_.begin(), through_.end(), 0);
    }
    stage_ = stage;
    if (!probe_) return go_on();
    if (probe_ready_) probe_->begin(CopyKind::kPlain);
  }

  void on_probe() {
    if (!probe_ || !probe_->advance()) return;
    if (!probe_ready_) {  // its memory is there now
      probe_ready_ = true;
      if (stage_ == Stage::kBefore) probe_->begin(CopyKind::kPlain);
      return;
    }
    switch (stage_) {
      case Stage::kGathering:
        return;
      case Stage::kBefore:
        before_ = probe_->elapsed_ns();
        return go_on();
      case Stage::kAfter:
        after_ = probe_->elapsed_ns();
        stage_ = Stage::kNonTemporal;
        return probe_->begin(CopyKind::kNonTemporal);
      case Stage::kNonTemporal:
        non_temporal_ = probe_->elapsed_ns();
        if (arguments_.fleet.transport != TransportKind::kCma) return go_on();
        stage_ = Stage::kVectored;
        return probe_->begin(CopyKind::kVectored);
      case Stage::kVectored:
        vectored_ = probe_->elapsed_ns();
        return go_on();
    }
  }

  void go_on() {
    if (stage_ == Stage::kBefore) begin_ns_ = SystemClock::instance().now_ns();
    stage_ = Stage::kGathering;
    const std::set<std::size_t> released = std::exchange(waiting_, {});
    for (const std::size_t child : released) supervisor_.release(child);
  }

  void drop_probe(const std::string& why) {
    probe_.reset();
    report_.notes.push_back("the memcpy limit is not measured: " + why);
    if (stage_ != Stage::kGathering) go_on();
  }

  void show_progress() {
    if (bytes_per_sync_ == 0) return;
    std::uint64_t through = 0;
    for (const std::uint64_t bytes : through_) through += bytes;
    const double part = static_cast<double>(through) / static_cast<double>(bytes_per_sync_);
    const double done = (static_cast<double>(report_.syncs.size()) + part) / arguments_.versions.syncs;
    const std::int64_t elapsed = SystemClock::instance().now_ns() - begin_ns_;
    progress_.update(fmt::format("sync {}/{}", report_.syncs.size() + 1, arguments_.versions.syncs), done,
                     format_rate(through, elapsed));
  }

  void take_outcome(const nlohmann::json& event) {
    auto outcome = sync_outcome_from_json(event.value("outcome", nlohmann::json()));
    if (!outcome.ok()) return;
    outcome->copy_before_ns = before_;
    outcome->copy_after_ns = after_;
    outcome->copy_non_temporal_ns = non_temporal_;
    outcome->read_vectored_ns = vectored_;
    report_.processes.clear();
    for (const nlohmann::json& one : event.value("processes", nlohmann::json::array())) {
      auto memory = memory_report_from_json(one);
      if (memory.ok()) report_.processes.push_back(std::move(*memory));
    }
    progress_.line(fmt::format("sync {}/{}: {}{}", outcome->sync, arguments_.versions.syncs, outcome->summary,
                               !outcome->verified() ? ""
                               : outcome->exact()   ? ", exact"
                                                    : ", NOT exact"));
    report_.syncs.push_back(std::move(*outcome));
    through_.assign(trainers_, 0);
  }

  const SyncArguments& arguments_;
  const std::uint32_t trainers_, workers_;
  Supervisor& supervisor_;
  Progress& progress_;
  RunReport& report_;
  std::unique_ptr<CopyProbe> probe_;
  bool probe_ready_ = false;
  Stage stage_ = Stage::kGathering;
  std::set<std::size_t> waiting_;  // children at a gate
  std::vector<std::uint64_t> through_;
  std::uint64_t bytes_per_sync_ = 0;
  std::vector<std::string> recordings_;
  std::int64_t begin_ns_ = 0;
  std::optional<std::int64_t> before_, after_, non_temporal_, vectored_;
};

Status prepare_host() {
  // A crash of a child is reported by name; its memory image, as large as the model, helps nobody here.
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  signal(SIGPIPE, SIG_IGN);
  if (setenv("SHARDPULL_TOKEN", fmt::format("{:016x}", random_nonzero_u64()).c_str(), 1) != 0) {
    return Status(StatusCode::kResourceExhausted, "no memory for the environment",
                  {.reason = Reason::kNoMemory, .fault = Fault::kHost});
  }
  return {};
}

std::optional<RunError> generate_model(const SyncArguments& arguments, const std::string& directory,
                                       Supervisor& supervisor, Progress& progress) {
  const ShapeSpec& shape = *arguments.model.shape;
  const ShapeOverrides& overrides = arguments.model.overrides;
  std::vector<std::string> words = {
      "generate", "--shape", fmt::format("{}:{}", shape.key, to_string(shape.size)), "--out", directory};
  const auto add = [&](const char* flag, const std::optional<std::int64_t>& value) {
    if (!value) return;
    words.push_back(flag);
    words.push_back(fmt::format("{}", *value));
  };
  add("--vocab", overrides.vocab);
  add("--layers", overrides.layers);
  add("--kv-heads", overrides.kv_heads);
  if (overrides.tied) words.push_back(*overrides.tied ? "--tied" : "--untied");
  const Status started = supervisor.start({.name = "generate", .arguments = std::move(words)});
  if (!started.ok()) return RunError{"", started.message()};
  return supervisor.run({.on_event =
                             [&](std::size_t, const nlohmann::json& event) {
                               if (event.value("event", "") != "generated") return;
                               const double total = event.value("total", 1.0);
                               progress.update("generating", event.value("bytes", 0.0) / std::max(total, 1.0),
                                               "");
                             },
                         .extra_fd = nullptr,
                         .on_extra = nullptr,
                         .on_child_signal = nullptr});
}

std::optional<RunError> sync(const SyncArguments& arguments, Progress& progress, RunReport& report,
                             std::vector<std::string>& child_lines) {
  const auto failed = [](const Status& status) { return RunError{"", status.message()}; };
  std::vector<NamedFile> outputs = dump_files(arguments.dump, 0, workers(arguments.fleet.inference));
  outputs.push_back({"--trace", arguments.trace});
  const Status writable = check_outputs(
      outputs, fleet_inputs(arguments.model.directory, arguments.fleet, arguments.recordings, ""));
  if (!writable.ok()) return failed(writable);
  if (!arguments.trace.empty()) {  // the sender writes it, long after a wrong name could have been told
    const auto trace = TraceFile::create(arguments.trace);
    if (!trace.ok()) return failed(trace.status());
  }
  auto supervisor = Supervisor::make();
  if (!supervisor.ok()) return failed(supervisor.status());
  if (const Status prepared = prepare_host(); !prepared.ok()) return failed(prepared);
  auto directory = RunDirectory::make();
  if (!directory.ok()) return failed(directory.status());

  std::string model_directory = arguments.model.directory;
  if (arguments.model.shape) {
    model_directory = (directory->path() / "model").string();
    auto cause = generate_model(arguments, model_directory, **supervisor, progress);
    child_lines = (*supervisor)->held_lines();
    if (cause) return cause;
  }
  std::vector<std::string> recordings;
  if (!arguments.recordings.empty()) {
    auto files = recording_files(arguments.recordings, arguments.fleet.inference, "--recording");
    if (!files.ok()) return failed(files.status());
    recordings = std::move(*files);
  }
  auto model = open_model(model_directory, !recordings.empty());
  if (!model.ok()) return failed(model.status());
  report.model_bytes = model->total_bytes;
  report.tensors = model->metadata.size();
  report.notes = model->notes;

  // Whatever is wrong with model, layout or plan shows here, before a process starts.
  FleetPlanOptions options = plan_options(arguments.fleet);
  options.recordings = recordings;
  options.withheld = arguments.withhold;
  auto plan = plan_fleet(*model, options);
  if (!plan.ok()) return failed(plan.status());
  const Status descriptors =
      check_descriptors(arguments.fleet, plan->holdings.ranks(), workers(arguments.fleet.inference), true);
  if (!descriptors.ok()) return failed(descriptors);
  report.publish = plan->holdings.resident ? "resident" : "gather";
  std::uint64_t bytes_per_sync = 0;
  for (const HeldByRank& served : plan->holdings.served) bytes_per_sync += held_bytes(model->metadata, served);

  const std::filesystem::path fleet_directory = directory->path() / "fleet";
  std::error_code error;
  std::filesystem::create_directory(fleet_directory, error);
  std::filesystem::permissions(fleet_directory, std::filesystem::perms::owner_all, error);
  if (error) return RunError{"", fmt::format("{}: {}", fleet_directory.string(), error.message())};
  FleetRun run(arguments, *plan, **supervisor, progress, report);
  run.set_bytes_per_sync(bytes_per_sync);
  run.set_recordings(std::move(recordings));
  auto cause = run.run(model_directory, fleet_directory.string());
  child_lines.insert(child_lines.end(), (*supervisor)->held_lines().begin(),
                     (*supervisor)->held_lines().end());
  if (!cause && report.syncs.size() != arguments.versions.syncs) {
    cause = RunError{"", fmt::format("the fleet ended after {} of {} syncs", report.syncs.size(),
                                     arguments.versions.syncs)};
  }
  return cause;
}

}  // namespace

int run_sync(const SyncArguments& arguments) {
  RunReport report;
  report.model = arguments.model.shape ? fmt::format("{}:{}", arguments.model.shape->key,
                                                     to_string(arguments.model.shape->size))
                                       : arguments.model.directory;
  report.trainer = to_string(arguments.fleet.trainer);
  report.inference = to_string(arguments.fleet.inference);
  report.path = to_string(arguments.fleet.path);
  report.apply = to_string(arguments.fleet.apply);
  report.transport = to_string(arguments.fleet.transport);
  report.integrity = to_string(arguments.fleet.integrity);
  report.names = arguments.fleet.names;
  report.chunk_split = arguments.fleet.chunk_split;
  report.pull_split = arguments.fleet.pull_split;
  report.ring_depth = arguments.fleet.ring_depth;
  report.lookahead = arguments.fleet.lookahead;
  report.max_chunk_bytes = arguments.fleet.max_chunk_bytes;
  report.export_pack_limit_bytes = arguments.fleet.export_pack_limit_bytes;
  report.verify = arguments.verify;

  std::vector<std::string> child_lines;
  {
    Progress progress;
    report.error = sync(arguments, progress, report, child_lines);
  }
  if (report.error) {
    const std::string who = report.error->process.empty() ? "" : report.error->process + ": ";
    std::fprintf(stderr, "error: %s%s\n", who.c_str(), report.error->message.c_str());
    if (report.error->process.empty()) report.error->process = "launcher";
  }
  for (const std::string& line : child_lines) std::fprintf(stderr, "%s\n", line.c_str());
  if (arguments.json) {
    std::fputs(to_json_text(report).c_str(), stdout);
  } else if (!report.error) {
    std::fputs(to_text(report).c_str(), stdout);
  }
  std::fflush(stdout);
  return report.error || report.exact() == std::optional<bool>(false) ? kExitFailed : kExitDone;
}

}  // namespace shardpull::cli
