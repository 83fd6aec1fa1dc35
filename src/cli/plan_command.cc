// `shardpull plan`: what every worker would pull from whom, without a process of the fleet running.
#include <cstdio>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/identity.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/fleet_plan.h"
#include "cli/fleet_summary.h"
#include "cli/memory_sampler.h"
#include "cli/model_input.h"
#include "cli/output_files.h"
#include "cli/recordings.h"
#include "cli/sync_report.h"

namespace shardpull::cli {
namespace {

using nlohmann::ordered_json;

std::optional<LinkSpeeds> links_of(const PlanArguments& arguments) {
  if (arguments.link == 0) return std::nullopt;
  return LinkSpeeds{
      .trainer_bytes_per_s = arguments.trainer_link != 0 ? arguments.trainer_link : arguments.link,
      .worker_bytes_per_s = arguments.worker_link != 0 ? arguments.worker_link : arguments.link,
      .pull_latency_ns = arguments.pull_latency_ns};
}

// How the ranks publish, and why.
std::string publish_text(const PlanArguments& arguments, const FleetPlan& fleet) {
  const bool resident = fleet.holdings.resident;
  const bool in_pieces = !fleet.tables.ownership.pieces.empty();
  std::string text = resident ? "resident: ranks publish what they hold, in place"
                              : "gather: ranks publish whole tensors, group by group as there is credit";
  if (arguments.fleet.trainer.publish != PublishMode::kAuto) return text + " (asked for)";
  return text +
         (in_pieces ? " (auto: some rank holds a part of a tensor)" : " (auto: all tensors are held whole)");
}

std::string as_json(const ModelInput& model, const PlanArguments& arguments, const FleetPlan& fleet) {
  ordered_json out;
  out["shardpull"] = kReportVersion;
  out["software"] = kSoftwareVersion;
  out["model"] = {{"name", model.label}, {"tensors", model.metadata.size()}, {"bytes", model.total_bytes}};
  out["settings"] = {{"trainer", to_string(arguments.fleet.trainer)},
                     {"inference", to_string(arguments.fleet.inference)},
                     {"ring_depth", arguments.fleet.ring_depth},
                     {"max_chunk_bytes", arguments.fleet.max_chunk_bytes},
                     {"export_pack_limit_bytes", arguments.fleet.export_pack_limit_bytes}};
  out["notes"] = model.notes;
  out["bake_s"] = static_cast<double>(fleet.bake_ns) / 1e9;
  out["plan_s"] = static_cast<double>(fleet.plan_ns) / 1e9;
  out["peak_rss_bytes"] = peak_resident_bytes();
  out["names"] = model.metadata.size();
  out["keys"] = fleet.keys();
  out["chunks"] = fleet.chunks();
  out["bytes_kept"] = fleet.bytes_kept();
  out["digest"] = to_string(fleet.digest());
  add_json(fleet, figures_of(fleet, arguments.fleet.lookahead), links_of(arguments), out);
  out["workers"] = ordered_json::array();
  for (std::uint32_t consumer = 0; consumer < fleet.workers(); ++consumer) {
    WorkerPlan plan = fleet.plan(consumer);
    plan.consumer = consumer;
    ordered_json worker;
    std::uint64_t keys = 0;
    for (const Chunk& chunk : plan.chunks) keys += chunk.keys.size();
    worker["worker"] = consumer;
    worker["bytes_kept"] = plan.bytes_kept;
    worker["bytes_planned"] = plan.bytes_planned;
    worker["keys"] = keys;
    worker["chunks"] = plan.chunks.size();
    worker["receive_slot_bytes"] = plan.receive_slot_bytes;
    worker["dead_names"] = fleet.recording(consumer).dead.size();
    worker["conversions"] = fleet.recording(consumer).conversions;
    worker["plan_bytes"] = encode(plan).size();
    worker["digest"] = to_string(digest(plan));
    worker["producers"] = ordered_json::array();
    for (const ProducerPlan& producer : plan.producers) {
      worker["producers"].push_back({{"rank", producer.producer},
                                     {"pulls", producer.pulls},
                                     {"serve_slot_bytes", producer.serve_slot_bytes},
                                     {"digest", to_string(producer.digest)}});
    }
    out["workers"].push_back(std::move(worker));
  }
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string chunk_table(const FleetPlan& fleet) {
  const InitTables& tables = fleet.tables;
  std::vector<std::string> labels;
  std::uint32_t first = 0;
  for (const std::uint32_t length : tables.group_lens) {
    labels.push_back(length == 1 ? tables.metadata[first].name
                                 : fmt::format("{} .. {}", tables.metadata[first].name,
                                               tables.metadata[first + length - 1].name));
    first += length;
  }
  std::vector<std::vector<std::string>> rows = {
      {"worker", "chunk", "group", "path", "from", "keys", "bytes"}};
  for (const WorkerPlan& plan : fleet.plans) {
    for (const Chunk& chunk : plan.chunks) {
      std::string from;
      for (const Run& run : chunk.runs) {
        from += fmt::format("{}trainer {}", from.empty() ? "" : ", ", run.producer);
      }
      rows.push_back({fmt::format("{}", plan.consumer), fmt::format("{}", chunk.chunk_id),
                      fmt::format("{} {}", chunk.group, labels[chunk.group]),
                      chunk.keys.empty() ? "-" : std::string(to_string(chunk.path)),
                      from.empty() ? "-" : from, fmt::format("{}", chunk.keys.size()),
                      fmt::format("{}", chunk.bytes)});
    }
  }
  return format_table(rows, 5);
}

Status plan(const PlanArguments& arguments) {
  SHARDPULL_ASSIGN_OR_RETURN(const ModelInput model,
                             planned_model(arguments.model, !arguments.recordings.empty()));
  std::vector<std::string> recordings;
  if (!arguments.recordings.empty()) {
    SHARDPULL_ASSIGN_OR_RETURN(
        recordings, recording_files(arguments.recordings, arguments.fleet.inference, "--recording"));
  }
  std::vector<std::string> saved;
  if (!arguments.save_recording.empty()) {
    SHARDPULL_ASSIGN_OR_RETURN(
        saved, recording_files({arguments.save_recording}, arguments.fleet.inference, "--save-recording"));
    std::vector<NamedFile> outputs;
    for (const std::string& file : saved) outputs.push_back({"--save-recording", file});
    SHARDPULL_RETURN_IF_ERROR(
        check_outputs(outputs, fleet_inputs(arguments.model.directory, arguments.fleet, recordings, "")));
  }
  FleetPlanOptions options = plan_options(arguments.fleet);
  options.recordings = recordings;
  options.withheld = arguments.withhold;
  SHARDPULL_ASSIGN_OR_RETURN(const FleetPlan fleet, plan_fleet(model, options));
  for (std::uint32_t worker = 0; worker < saved.size(); ++worker) {
    SHARDPULL_RETURN_IF_ERROR(
        save_recording(saved[worker], fleet.recording(worker), model, arguments.fleet.inference, worker));
  }
  if (!arguments.explain.empty()) {
    bool known = false;
    for (const TensorMeta& meta : model.metadata) known = known || meta.name == arguments.explain;
    if (!known) {
      return Status(StatusCode::kNotFound,
                    fmt::format("--explain: {} has no tensor {}", model.label, arguments.explain),
                    {.reason = Reason::kBadArgument, .tensor = arguments.explain});
    }
  }
  if (arguments.json) {
    std::fputs(as_json(model, arguments, fleet).c_str(), stdout);
    return {};
  }
  if (!arguments.explain.empty()) {
    std::fputs(explain(fleet.tables, arguments.explain).c_str(), stdout);
    for (const WorkerPlan& plan : fleet.plans) {
      std::fputs(explain(fleet.tables, plan, fleet.recording(plan.consumer), arguments.explain).c_str(),
                 stdout);
    }
    if (fleet.tables.num_replicas > 1) {
      std::fputs(fmt::format("the same in all {} replicas\n", fleet.tables.num_replicas).c_str(), stdout);
    }
    return {};
  }
  std::string text = fmt::format("model      {}: {} tensors, {}\n", model.label, model.metadata.size(),
                                 format_bytes(model.total_bytes));
  text += fmt::format("fleet      trainer {}, inference {}\n", to_string(arguments.fleet.trainer),
                      to_string(arguments.fleet.inference));
  for (const std::string& note : model.notes) text += fmt::format("note       {}\n", note);
  text += fmt::format("planned    bake {}, plan {}, peak memory {}, digest {}\n",
                      format_duration_ns(fleet.bake_ns), format_duration_ns(fleet.plan_ns),
                      format_bytes(peak_resident_bytes()), to_string(fleet.digest()));
  text += to_text(fleet, figures_of(fleet, arguments.fleet.lookahead), publish_text(arguments, fleet),
                  links_of(arguments));
  if (!arguments.summary) text += "\n" + chunk_table(fleet);
  std::fputs(text.c_str(), stdout);
  return {};
}

}  // namespace

int run_plan(const PlanArguments& arguments) {
  const Status status = plan(arguments);
  std::fflush(stdout);
  if (status.ok()) return kExitDone;
  std::fprintf(stderr, "error: %s\n", status.message().c_str());
  return kExitFailed;
}

}  // namespace shardpull::cli
