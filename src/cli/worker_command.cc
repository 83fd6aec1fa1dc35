// `shardpull worker`: one inference worker over a model built from config.json.
#include <malloc.h>

#include <cstdio>
#include <memory>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/launcher_channel.h"
#include "cli/memory_sampler.h"
#include "cli/model_input.h"
#include "cli/output_files.h"
#include "cli/process_setup.h"
#include "cli/recordings.h"
#include "cli/sync_report.h"
#include "cli/verifier.h"
#include "shardpull/recording.h"
#include "shardpull/worker.h"

namespace shardpull::cli {
namespace {

class WorkerRun {
 public:
  WorkerRun(const WorkerArguments& arguments, LauncherChannel& launcher)
      : arguments_(arguments), launcher_(launcher), name_(fmt::format("worker {}", arguments.id)) {}

  Status run() {
    std::vector<NamedFile> outputs = dump_files(arguments_.dump, arguments_.id, arguments_.id + 1);
    outputs.push_back({"--trace", arguments_.trace});
    SHARDPULL_RETURN_IF_ERROR(
        check_outputs(outputs, fleet_inputs(arguments_.model, arguments_.fleet, arguments_.recordings,
                                            arguments_.process.token_file)));
    if (!arguments_.dump.empty()) SHARDPULL_RETURN_IF_ERROR(prepare_dump(arguments_.dump));
    // Staged, as many more as copy a commit.
    SHARDPULL_RETURN_IF_ERROR(check_threads(arguments_.fleet.apply == Apply::kStaged ? 8 : 0));
    SHARDPULL_ASSIGN_OR_RETURN(const FleetOptions fleet, fleet_options(arguments_.fleet, arguments_.process));
    // How many ranks there are only the sender knows, where a layout file says it.
    const TrainerSide& trainers = arguments_.fleet.trainer;
    SHARDPULL_RETURN_IF_ERROR(check_descriptors(arguments_.fleet,
                                                trainers.file.empty() ? trainers.layout.ranks() : 1,
                                                workers(arguments_.fleet.inference), false));
    const bool recorded = !arguments_.recordings.empty();
    SHARDPULL_ASSIGN_OR_RETURN(const ModelInput input, open_model(arguments_.model, recorded));
    input_ = &input;
    if (recorded) SHARDPULL_RETURN_IF_ERROR(read_recording());
    SHARDPULL_ASSIGN_OR_RETURN(names_, later_names(arguments_.fleet, input));
    SHARDPULL_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, build());
    model_ = model.get();
    SHARDPULL_RETURN_IF_ERROR(model->materialise(kCanary, kGuardBytes));
    SHARDPULL_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                               Worker::connect({.fleet = fleet,
                                                .consumer = arguments_.id,
                                                .ring_depth = arguments_.fleet.ring_depth,
                                                .max_chunk_bytes = arguments_.fleet.max_chunk_bytes,
                                                .chunk_split = arguments_.fleet.chunk_split,
                                                .pull_split = arguments_.fleet.pull_split,
                                                .path = arguments_.fleet.path,
                                                .apply = arguments_.fleet.apply,
                                                .enable_eplb = arguments_.enable_eplb,
                                                .bake = {},
                                                .recording = recording_,
                                                .trace_file = arguments_.trace},
                                               *model));
    worker_ = worker.get();
    const Status served =
        worker->serve([this](std::uint64_t version, const Status& status, const WorkerReport& report) {
          const Status done = on_sync(version, status, report);
          if (done.ok()) return;
          // The sender hears of it by a verdict, or by a report that does not come; this process goes on
          // until the fleet ends.
          if (failure_.ok()) {
            failure_ = done.with_context(fmt::format("version {}", version));
            launcher_.send_error(failure_);
          }
        });
    // The cause of what followed: the sync that failed, unless it is this process that fell out of the fleet.
    if (wrong_ || (!served.ok() && served.info().fault != Fault::kHost)) SHARDPULL_RETURN_IF_ERROR(failure_);
    SHARDPULL_RETURN_IF_ERROR(served);
    if (!arguments_.dump.empty()) {
      SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t version, worker->version());
      SHARDPULL_RETURN_IF_ERROR(dump(*model, arguments_.dump, arguments_.id, version));
    }
    return {};
  }

  // Whether the launcher knows already why this process fails.
  bool told() const { return !failure_.ok(); }

 private:
  // The family's model, or that of the recording.
  Result<std::unique_ptr<Model>> build() const {
    return recording_ == nullptr ? build_model(input_->config, arguments_.fleet.inference, arguments_.id)
                                 : model_of(*recording_, input_->metadata);
  }

  // What the checkpoint is loaded into to be compared with. Of a recording that this program's families made,
  // their model: a recording that took another worker's slices would agree with itself.
  Result<std::unique_ptr<Model>> build_reference() const {
    if (recording_ == nullptr || !baked_here_) return build();
    auto family = build_model(input_->config, arguments_.fleet.inference, arguments_.id);
    return family.ok() ? std::move(family) : build();  // nobody needs to know the architecture
  }

  Status read_recording() {
    std::vector<std::string> files = arguments_.recordings;
    if (files.size() != 1 || files.front().find(kWorkerPlace) != std::string::npos) {
      SHARDPULL_ASSIGN_OR_RETURN(files, recording_files(files, arguments_.fleet.inference, "--recording"));
    }
    const std::uint32_t worker =
        arguments_.id % (workers(arguments_.fleet.inference) /
                         static_cast<std::uint32_t>(arguments_.fleet.inference.replicas));
    SHARDPULL_ASSIGN_OR_RETURN(
        RecordingFile file,
        load_recording(files[files.size() == 1 ? 0 : worker], *input_, arguments_.fleet.inference, worker));
    baked_here_ = file.header.engine == kOwnEngine;
    recording_ = std::make_shared<const Recording>(std::move(file.recording));
    return {};
  }

  Status on_sync(std::uint64_t version, const Status& status, const WorkerReport& report) {
    ++syncs_;
    if (!status.ok()) {
      if (!launcher_.attached()) {
        std::fprintf(stdout, "%s: version %llu failed: %s\n", name_.c_str(), static_cast<unsigned long long>(version),
                     status.message().c_str());
        std::fflush(stdout);
      }
      return status;
    }
    if (!wrong_) failure_ = {};  // a sync that failed was outlived
    if (syncs_ == 1 || names_.empty()) {
      versions_.assign(input_->metadata.size(), version);
    } else {
      for (const std::uint32_t name : names_) versions_[name] = version;
    }
    memory_.pause();
    SHARDPULL_RETURN_IF_ERROR(launcher_.pass_gate("synced", syncs_));

    ProcessReport own;
    const std::uint64_t model_bytes = model_->parameter_bytes();
    const std::uint64_t peak = memory_.peak_bytes();
    // Parameters and receive slots are anonymous memory: both are in the peak.
    own.memory = {.process = name_,
                  .model_bytes = model_bytes,
                  .engine_bytes = worker_->engine_bytes(),
                  .peak_extra_bytes = peak > model_bytes ? peak - model_bytes : 0};
    Status verdict_status;
    if (arguments_.verify) {
      auto verdict =
          verify(*input_, [this] { return build_reference(); }, worker_->recording(), versions_, *model_);
      verdict_status = verdict.ok() ? verdict->status : verdict.status().with_context("verifying");
      own.verdict = VerdictReport{.exact = verdict_status.ok(),
                                  .error = verdict_status.message(),
                                  .parameters = verdict.ok() ? verdict->parameters : 0,
                                  .bytes = verdict.ok() ? verdict->bytes : 0};
      wrong_ = wrong_ || !verdict_status.ok();
      if (verdict_status.ok() && arguments_.dump.empty()) poison(*model_, worker_->recording(), names_);
      malloc_trim(0);
    }
    memory_.resume();
    if (!launcher_.attached()) {
      std::fprintf(stdout, "%s: version %llu, %s in %s%s\n", name_.c_str(),
                   static_cast<unsigned long long>(version), format_bytes(report.bytes_moved).c_str(),
                   format_duration_ns(static_cast<std::int64_t>(report.update_ns)).c_str(),
                   !own.verdict         ? ""
                   : own.verdict->exact ? ", exact"
                                        : ", NOT exact");
      std::fflush(stdout);
    }
    SHARDPULL_RETURN_IF_ERROR(
        worker_->send_message("trainer 0", "report", encode(own)).with_context("reporting to trainer 0"));
    return verdict_status;
  }

  const WorkerArguments& arguments_;
  LauncherChannel& launcher_;
  const std::string name_;
  MemorySampler memory_;
  const ModelInput* input_ = nullptr;
  std::shared_ptr<const Recording> recording_;  // null: the worker bakes
  bool baked_here_ = false;
  Model* model_ = nullptr;
  Worker* worker_ = nullptr;
  std::uint32_t syncs_ = 0;
  std::vector<std::uint32_t> names_;     // of the syncs after the first, ascending; empty: all
  std::vector<std::uint64_t> versions_;  // that each tensor was last sent at, by metadata index
  Status failure_;      // of the last sync, or the first that went wrong
  bool wrong_ = false;  // a sync was said to be good, and its bytes are others
};

}  // namespace

int run_worker(const WorkerArguments& arguments) {
  const std::string name = fmt::format("worker {}", arguments.id);
  become(name);
  LauncherChannel launcher(arguments.process.launcher_fd);
  WorkerRun run(arguments, launcher);
  const Status status = run.run();
  if (status.ok()) return kExitDone;
  if (run.told() && launcher.attached()) return kExitFailed;
  return fail(launcher, name, status);
}

}  // namespace shardpull::cli
