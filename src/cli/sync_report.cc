#include "cli/sync_report.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/identity.h"
#include "base/units.h"

namespace shardpull::cli {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

double seconds(double ns) {
  return ns / 1e9;
}

json to_json(const VerdictReport& verdict) {
  return {{"exact", verdict.exact},
          {"error", verdict.error},
          {"parameters", verdict.parameters},
          {"bytes", verdict.bytes}};
}

// Phases by their number, as only this build's processes read them.
json to_json(const std::vector<PhaseTime>& phases) {
  json out = json::array();
  for (const PhaseTime& each : phases)
    out.push_back({static_cast<int>(each.phase), each.charged_ns, each.active_ns, each.count});
  return out;
}

std::vector<PhaseTime> phases_from(const json& from) {
  std::vector<PhaseTime> phases;
  for (const json& each : from) {
    const auto phase = std::clamp(each.at(0).get<int>(), 0, static_cast<int>(Phase::kEngine));
    phases.push_back({static_cast<Phase>(phase), each.at(1), each.at(2), each.at(3)});
  }
  return phases;
}

// As people and programs read them.
ordered_json named(const std::vector<PhaseTime>& phases) {
  ordered_json out = ordered_json::object();
  for (const PhaseTime& each : phases) {
    out[std::string(to_string(each.phase))] = {{"charged_s", seconds(static_cast<double>(each.charged_ns))},
                                               {"active_s", seconds(static_cast<double>(each.active_ns))},
                                               {"count", each.count}};
  }
  return out;
}

VerdictReport verdict_from(const json& from) {
  return {.exact = from.at("exact"),
          .error = from.at("error"),
          .parameters = from.at("parameters"),
          .bytes = from.at("bytes")};
}

MemoryReport memory_from(const json& from) {
  return {.process = from.at("process"),
          .model_bytes = from.at("model_bytes"),
          .engine_bytes = from.at("engine_bytes"),
          .peak_extra_bytes = from.at("peak_extra_bytes")};
}

Status malformed(const char* what) {
  return Status(StatusCode::kInvalidArgument, what, {.reason = Reason::kBadArgument, .fault = Fault::kPeer});
}

std::string dumped(const json& value, int indent = -1) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

std::string duration(double ns) {
  return format_duration_ns(static_cast<std::int64_t>(ns));
}

}  // namespace

std::string encode(const ProcessReport& report) {
  json out = {{"memory", to_json(report.memory)}};
  if (report.verdict) out["verdict"] = to_json(*report.verdict);
  return dumped(out);
}

Result<ProcessReport> decode_process_report(const std::string& text) {
  try {
    const json from = json::parse(text);
    ProcessReport report{.memory = memory_from(from.at("memory")), .verdict = std::nullopt};
    if (from.contains("verdict")) report.verdict = verdict_from(from.at("verdict"));
    return report;
  } catch (const json::exception&) {
    return malformed("a process reported something that is no report");
  }
}

json to_json(const MemoryReport& memory) {
  return {{"process", memory.process},
          {"model_bytes", memory.model_bytes},
          {"engine_bytes", memory.engine_bytes},
          {"peak_extra_bytes", memory.peak_extra_bytes}};
}

Result<MemoryReport> memory_report_from_json(const json& from) {
  try {
    return memory_from(from);
  } catch (const json::exception&) {
    return malformed("a process reported memory that is no report");
  }
}

// ---- one sync ---------------------------------------------------------------------------------------------

std::uint64_t SyncOutcome::bytes_kept() const {
  std::uint64_t sum = 0;
  for (const WorkerOutcome& worker : workers) sum += worker.report.bytes_kept;
  return sum;
}

std::uint64_t SyncOutcome::bytes_moved() const {
  std::uint64_t sum = 0;
  for (const WorkerOutcome& worker : workers) sum += worker.report.bytes_moved;
  return sum;
}

std::uint64_t SyncOutcome::padding_bytes() const {
  std::uint64_t sum = 0;
  for (const WorkerOutcome& worker : workers) sum += worker.report.padding_bytes;
  return sum;
}

std::uint64_t SyncOutcome::export_ns() const {
  std::uint64_t slowest = 0;
  for (const RankReport& rank : ranks) slowest = std::max(slowest, rank.export_ns);
  return slowest;
}

std::uint64_t SyncOutcome::export_bytes() const {
  std::uint64_t sum = 0;
  for (const RankReport& rank : ranks) sum += rank.export_bytes;
  return sum;
}

std::uint64_t SyncOutcome::packs() const {
  std::uint64_t sum = 0;
  for (const RankReport& rank : ranks) sum += rank.packs;
  return sum;
}

std::uint64_t SyncOutcome::packed_bytes() const {
  std::uint64_t sum = 0;
  for (const RankReport& rank : ranks) sum += rank.packed_bytes;
  return sum;
}

std::optional<double> SyncOutcome::memcpy_limit_ns() const {
  if (!copy_before_ns || !copy_after_ns) return std::nullopt;
  return (static_cast<double>(*copy_before_ns) + static_cast<double>(*copy_after_ns)) / 2;
}

bool SyncOutcome::memcpy_steady() const {
  if (!copy_before_ns || !copy_after_ns) return false;
  const auto [low, high] = std::minmax(*copy_before_ns, *copy_after_ns);
  return static_cast<double>(high - low) <= 0.15 * static_cast<double>(high);
}

bool SyncOutcome::verified() const {
  return !workers.empty() && std::all_of(workers.begin(), workers.end(), [](const WorkerOutcome& worker) {
    return worker.verdict.has_value();
  });
}

bool SyncOutcome::exact() const {
  return verified() && std::all_of(workers.begin(), workers.end(),
                                   [](const WorkerOutcome& worker) { return worker.verdict->exact; });
}

json to_json(const SyncOutcome& outcome) {
  json workers = json::array();
  for (const WorkerOutcome& worker : outcome.workers) {
    json one = {{"consumer", worker.report.consumer},       {"bytes_kept", worker.report.bytes_kept},
                {"bytes_moved", worker.report.bytes_moved}, {"update_ns", worker.report.update_ns},
                {"copy_ns", worker.report.copy_ns},         {"padding_bytes", worker.report.padding_bytes}};
    one["commit_ns"] = worker.report.commit_ns;
    one["phases"] = to_json(worker.report.phases);
    one["waited_for"] = worker.report.waited_for;
    one["waited_ns"] = worker.report.waited_ns;
    if (worker.verdict) one["verdict"] = to_json(*worker.verdict);
    workers.push_back(std::move(one));
  }
  json ranks = json::array();
  for (const RankReport& rank : outcome.ranks) {
    ranks.push_back({{"rank", rank.rank},
                     {"export_ns", rank.export_ns},
                     {"export_bytes", rank.export_bytes},
                     {"peak_resident_bytes", rank.peak_resident_bytes},
                     {"packs", rank.packs},
                     {"packed_bytes", rank.packed_bytes},
                     {"wall_ns", rank.wall_ns},
                     {"phases", to_json(rank.phases)}});
  }
  return {{"sync", outcome.sync},       {"version", outcome.version},    {"wall_ns", outcome.wall_ns},
          {"summary", outcome.summary}, {"workers", std::move(workers)}, {"ranks", std::move(ranks)}};
}

Result<SyncOutcome> sync_outcome_from_json(const json& from) {
  try {
    SyncOutcome outcome;
    outcome.sync = from.at("sync");
    outcome.version = from.at("version");
    outcome.wall_ns = from.at("wall_ns");
    outcome.summary = from.at("summary");
    for (const json& worker : from.at("workers")) {
      WorkerOutcome& one = outcome.workers.emplace_back();
      one.report.consumer = worker.at("consumer");
      one.report.bytes_kept = worker.at("bytes_kept");
      one.report.bytes_moved = worker.at("bytes_moved");
      one.report.update_ns = worker.at("update_ns");
      one.report.copy_ns = worker.at("copy_ns");
      one.report.padding_bytes = worker.at("padding_bytes");
      one.report.commit_ns = worker.at("commit_ns");
      one.report.phases = phases_from(worker.at("phases"));
      one.report.waited_for = worker.at("waited_for");
      one.report.waited_ns = worker.at("waited_ns");
      if (worker.contains("verdict")) one.verdict = verdict_from(worker.at("verdict"));
    }
    for (const json& rank : from.at("ranks")) {
      RankReport& one = outcome.ranks.emplace_back();
      one.rank = rank.at("rank");
      one.export_ns = rank.at("export_ns");
      one.export_bytes = rank.at("export_bytes");
      one.peak_resident_bytes = rank.at("peak_resident_bytes");
      one.packs = rank.at("packs");
      one.packed_bytes = rank.at("packed_bytes");
      one.wall_ns = rank.at("wall_ns");
      one.phases = phases_from(rank.at("phases"));
    }
    return outcome;
  } catch (const json::exception&) {
    return malformed("the sender reported something that is no report of a sync");
  }
}

// ---- the run ----------------------------------------------------------------------------------------------

std::uint64_t RunReport::parameters() const {
  std::uint64_t sum = 0;
  if (syncs.empty()) return 0;
  for (const WorkerOutcome& worker : syncs.back().workers) {
    sum += worker.verdict ? worker.verdict->parameters : 0;
  }
  return sum;
}

std::uint64_t RunReport::bytes_compared() const {
  std::uint64_t sum = 0;
  for (const SyncOutcome& sync : syncs) {
    for (const WorkerOutcome& worker : sync.workers) sum += worker.verdict ? worker.verdict->bytes : 0;
  }
  return sum;
}

std::optional<bool> RunReport::exact() const {
  if (error) return false;
  if (!verify) return std::nullopt;
  return !syncs.empty() &&
         std::all_of(syncs.begin(), syncs.end(), [](const SyncOutcome& s) { return s.exact(); });
}

std::string format_table(const std::vector<std::vector<std::string>>& rows, std::size_t left_columns) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (c > 0) line += "  ";
      line += c < left_columns ? fmt::format("{:<{}}", row[c], widths[c])
                               : fmt::format("{:>{}}", row[c], widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string verdict_line(const RunReport& report) {
  const std::optional<bool> exact = report.exact();
  const std::string syncs =
      fmt::format("{} sync{}", report.syncs.size(), report.syncs.size() == 1 ? "" : "s");
  if (!exact) return fmt::format("done: {}, not verified (--verify compares every byte)", syncs);
  if (!*exact) return "NOT exact";
  return fmt::format("exact: {} parameters, {} bytes, {}", report.parameters(), report.bytes_compared(),
                     syncs);
}

std::string to_text(const RunReport& report) {
  std::string text;
  text += fmt::format("model      {}: {} tensors, {}\n", report.model, report.tensors,
                      format_bytes(report.model_bytes));
  text += fmt::format("fleet      trainer {}, inference {}\n", report.trainer, report.inference);
  text += fmt::format("transfer   path {}, transport {}, integrity {}, apply {}\n", report.path,
                      report.transport, report.integrity, report.apply);
  for (const std::string& note : report.notes) text += fmt::format("note       {}\n", note);
  if (!report.syncs.empty()) {
    text += "\n";
    std::vector<std::vector<std::string>> rows = {{"sync", "version", "kept", "moved", "moved/kept", "wall",
                                                   "rate", "memcpy limit", "wall/limit", "non-temporal",
                                                   "export copy", "packs"}};
    std::size_t unsteady = 0;
    for (const SyncOutcome& sync : report.syncs) {
      const double kept = static_cast<double>(sync.bytes_kept());
      const std::optional<double> limit = sync.memcpy_limit_ns();
      const bool steady = limit && sync.memcpy_steady();
      if (limit && !steady) ++unsteady;
      rows.push_back(
          {fmt::format("{}", sync.sync), fmt::format("{}", sync.version), format_bytes(sync.bytes_kept()),
           format_bytes(sync.bytes_moved()),
           kept > 0 ? fmt::format("{:.3f}", static_cast<double>(sync.bytes_moved()) / kept) : "-",
           duration(static_cast<double>(sync.wall_ns)),
           format_rate(sync.bytes_moved(), static_cast<std::int64_t>(sync.wall_ns)),
           limit ? duration(*limit) : "-",
           limit && *limit > 0
               ? fmt::format("{:.2f}{}", static_cast<double>(sync.wall_ns) / *limit, steady ? "" : "*")
               : "-",
           sync.copy_non_temporal_ns ? format_duration_ns(*sync.copy_non_temporal_ns) : "-",
           sync.export_bytes() != 0 ? fmt::format("{} in {}", format_bytes(sync.export_bytes()),
                                                  duration(static_cast<double>(sync.export_ns())))
                                    : "none",
           sync.packs() != 0 ? fmt::format("{} of {}", sync.packs(), format_bytes(sync.packed_bytes()))
                             : "none"});
    }
    text += format_table(rows, 0);
    if (unsteady != 0) {
      text += fmt::format(
          "* {} of {} memcpy limits measured before and after the sync differ by more than 15 %\n", unsteady,
          report.syncs.size());
    }
  }
  if (!report.processes.empty()) {
    std::vector<std::vector<std::string>> rows = {{"process", "model", "engine", "peak extra"}};
    for (const MemoryReport& memory : report.processes) {
      rows.push_back({memory.process, format_bytes(memory.model_bytes), format_bytes(memory.engine_bytes),
                      format_bytes(memory.peak_extra_bytes)});
    }
    text += "\n" + format_table(rows);
  }
  text += "\n" + verdict_line(report) + "\n";
  return text;
}

std::string to_json_text(const RunReport& report) {
  ordered_json out;
  out["shardpull"] = kReportVersion;
  out["software"] = kSoftwareVersion;
  const std::optional<bool> exact = report.exact();
  out["exact"] = exact ? ordered_json(*exact) : ordered_json(nullptr);
  out["parameters"] = report.parameters();
  out["bytes_compared"] = report.bytes_compared();
  if (report.error) out["error"] = {{"process", report.error->process}, {"message", report.error->message}};
  out["model"] = {{"name", report.model}, {"tensors", report.tensors}, {"bytes", report.model_bytes}};
  out["settings"] = {{"trainer", report.trainer},
                     {"inference", report.inference},
                     {"publish", report.publish},
                     {"names", report.names},
                     {"path", report.path},
                     {"apply", report.apply},
                     {"transport", report.transport},
                     {"integrity", report.integrity},
                     {"ring_depth", report.ring_depth},
                     {"lookahead", report.lookahead},
                     {"max_chunk_bytes", report.max_chunk_bytes},
                     {"chunk_split", report.chunk_split},
                     {"pull_split", report.pull_split},
                     {"export_pack_limit_bytes", report.export_pack_limit_bytes}};
  out["notes"] = report.notes;
  out["syncs"] = ordered_json::array();
  for (const SyncOutcome& sync : report.syncs) {
    ordered_json one;
    one["sync"] = sync.sync;
    one["version"] = sync.version;
    one["wall_s"] = seconds(static_cast<double>(sync.wall_ns));
    one["summary"] = sync.summary;
    one["bytes_kept"] = sync.bytes_kept();
    one["bytes_moved"] = sync.bytes_moved();
    one["padding_bytes"] = sync.padding_bytes();
    const std::optional<double> limit = sync.memcpy_limit_ns();
    const auto optional_seconds = [](const auto& ns) {
      return ns ? ordered_json(seconds(static_cast<double>(*ns))) : ordered_json(nullptr);
    };
    one["memcpy_limit_s"] = optional_seconds(limit);
    one["memcpy_before_s"] = optional_seconds(sync.copy_before_ns);
    one["memcpy_after_s"] = optional_seconds(sync.copy_after_ns);
    one["memcpy_steady"] = sync.memcpy_steady();
    one["non_temporal_s"] = optional_seconds(sync.copy_non_temporal_ns);
    one["vectored_read_s"] = optional_seconds(sync.read_vectored_ns);
    one["ratio"] = limit && *limit > 0 ? ordered_json(static_cast<double>(sync.wall_ns) / *limit)
                                       : ordered_json(nullptr);
    one["export_copy_s"] = seconds(static_cast<double>(sync.export_ns()));
    one["export_bytes"] = sync.export_bytes();
    one["packs"] = sync.packs();
    one["packed_bytes"] = sync.packed_bytes();
    one["workers"] = ordered_json::array();
    for (const WorkerOutcome& worker : sync.workers) {
      ordered_json w;
      w["worker"] = worker.report.consumer;
      w["bytes_kept"] = worker.report.bytes_kept;
      w["bytes_moved"] = worker.report.bytes_moved;
      w["update_s"] = seconds(static_cast<double>(worker.report.update_ns));
      w["copy_s"] = seconds(static_cast<double>(worker.report.copy_ns));
      w["commit_s"] = seconds(static_cast<double>(worker.report.commit_ns));
      w["phases"] = named(worker.report.phases);
      w["waited_for_rank"] =
          worker.report.waited_ns != 0 ? ordered_json(worker.report.waited_for) : ordered_json(nullptr);
      w["waited_s"] = seconds(static_cast<double>(worker.report.waited_ns));
      w["exact"] = worker.verdict ? ordered_json(worker.verdict->exact) : ordered_json(nullptr);
      one["workers"].push_back(std::move(w));
    }
    one["ranks"] = ordered_json::array();
    for (const RankReport& rank : sync.ranks) {
      ordered_json r;
      r["rank"] = rank.rank;
      r["export_copy_s"] = seconds(static_cast<double>(rank.export_ns));
      r["export_bytes"] = rank.export_bytes;
      r["peak_resident_bytes"] = rank.peak_resident_bytes;
      r["packs"] = rank.packs;
      r["packed_bytes"] = rank.packed_bytes;
      r["wall_s"] = seconds(static_cast<double>(rank.wall_ns));
      r["phases"] = named(rank.phases);
      one["ranks"].push_back(std::move(r));
    }
    out["syncs"].push_back(std::move(one));
  }
  out["processes"] = ordered_json::array();
  for (const MemoryReport& memory : report.processes) {
    ordered_json p;
    p["process"] = memory.process;
    p["model_bytes"] = memory.model_bytes;
    p["engine_bytes"] = memory.engine_bytes;
    p["peak_extra_bytes"] = memory.peak_extra_bytes;
    out["processes"].push_back(std::move(p));
  }
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace shardpull::cli
