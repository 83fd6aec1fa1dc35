#include "cli/scale_report.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/identity.h"
#include "base/units.h"
#include "cli/memory_sampler.h"
#include "cli/sync_report.h"
#include "runtime/arrival.h"

namespace shardpull::cli {
namespace {

using nlohmann::ordered_json;

// Of processes or hosts of one kind, one figure each.
struct Spread {
  std::uint64_t least = 0, median = 0, most = 0;
  std::size_t most_at = 0;  // the first of them
};

template <typename List, typename Figure>
Spread spread(const List& list, Figure figure) {
  std::vector<std::uint64_t> values;
  for (const auto& one : list) values.push_back(figure(one));
  const auto most = std::max_element(values.begin(), values.end());
  Spread out{.most = *most, .most_at = static_cast<std::size_t>(most - values.begin())};
  std::sort(values.begin(), values.end());
  out.least = values.front();
  out.median = values[(values.size() - 1) / 2];
  return out;
}

double seconds(std::int64_t ns) {
  return static_cast<double>(ns) / 1e9;
}
double ratio(std::int64_t part, std::int64_t of) {
  return of == 0 ? 0 : static_cast<double>(part) / static_cast<double>(of);
}
std::uint64_t gigabits(std::uint64_t bytes_per_s) {
  return bytes_per_s / kBytesPerGigabit;
}
std::string speed(std::uint64_t bytes_per_s) {
  return format_rate(bytes_per_s, 1'000'000'000);
}

// How many of the hosts had a transfer under way, on average over the time in which workers pulled.
double in_use(const std::vector<sim::LinkUse>& hosts, const sim::ScaleReport& report) {
  std::int64_t busy = 0;
  for (const sim::LinkUse& host : hosts) busy += host.busy_ns;
  return ratio(busy, report.prepared_ns - report.updates_ns);
}

std::uint64_t control_messages(const sim::ScaleReport& report) {
  return std::accumulate(report.control.begin(), report.control.end(), std::uint64_t{0});
}

// Of worker w of a replica. What is scattered on arrival takes no slot.
std::uint64_t receive_ring(const sim::ScaleWorker& worker) {
  const bool slots =
      std::any_of(worker.plan->chunks.begin(), worker.plan->chunks.end(), [&](const Chunk& chunk) {
        return chunk.path == Path::kPacked && !chunk.keys.empty() &&
               !worker.scattered_on_arrival.contains(chunk.chunk_id);
      });
  return slots ? worker.plan->receive_slot_bytes * worker.plan->ring_depth : 0;
}

std::string bound_text(const sim::ScaleReport& report) {
  const bool trainer = report.bound_by_trainer;
  const sim::LinkUse& host = (trainer ? report.trainer_hosts : report.worker_hosts)[report.bound_host];
  return fmt::format("{} host {} {} {}", trainer ? "trainer" : "worker", report.bound_host,
                     trainer ? "sends" : "receives", format_bytes(host.bytes));
}

}  // namespace

sim::ScaleFleet scale_fleet(const FleetPlan& plan, const FleetArguments& arguments) {
  sim::ScaleFleet fleet;
  auto tables = std::make_shared<InitTables>(plan.tables);
  tables->integrity = arguments.integrity;
  fleet.tables = std::move(tables);
  for (const WorkerPlan& one : plan.plans) {
    sim::ScaleWorker& worker = fleet.workers.emplace_back();
    worker.plan = std::shared_ptr<const WorkerPlan>(std::shared_ptr<void>(), &one);
    worker.num_modules = static_cast<std::uint32_t>(plan.recording(one.consumer).modules.size());
    if (arguments.transport == TransportKind::kTcp) worker.scattered_on_arrival = scattered_on_arrival(one);
  }
  fleet.lookahead = arguments.lookahead;
  fleet.staged = arguments.apply == Apply::kStaged;
  return fleet;
}

std::string to_text(const ScaleRun& run) {
  const auto& [arguments, model, plan, fleet, report] = run;
  const sim::ScaleModel& links = arguments.links;
  std::string text = fmt::format("model      {}: {} tensors, {}\n", model.label, model.metadata.size(),
                                 format_bytes(model.total_bytes));
  text += fmt::format("fleet      {}trainer {}, inference {}\n",
                      arguments.workload == "own" ? "" : arguments.workload + ": ",
                      to_string(arguments.fleet.trainer), to_string(arguments.fleet.inference));
  text += fmt::format(
      "           {} ranks on {} hosts, {} workers on {} hosts; ring depth {}, lookahead {}, {} publish\n",
      report.ranks.size(), report.trainer_hosts.size(), plan.workers(), report.worker_hosts.size(),
      fleet.tables->ring_depth, fleet.lookahead,
      plan.holdings.resident ? "resident ranks" : "ranks gather and");
  text += fmt::format(
      "model of   {} Gbit/s out of a trainer host, {} into a worker host, {} one way; copies {}, sums {}, "
      "source {}, hub {} a message\n",
      gigabits(links.trainer_host_bytes_per_s), gigabits(links.worker_host_bytes_per_s),
      format_duration_ns(links.latency_ns), speed(links.copy_bytes_per_s), speed(links.sum_bytes_per_s),
      links.source_bytes_per_s == 0 ? "at once" : speed(links.source_bytes_per_s),
      format_duration_ns(links.hub_message_ns));
  text += fmt::format("moves      {} in {} pulls, as planned, and {} between keys; {} packs of {}, {} sums\n",
                      format_bytes(report.bytes_moved), report.pulls, format_bytes(report.padding_bytes),
                      report.packs, format_bytes(report.bytes_packed), report.sums);

  text += fmt::format("\nsync       {}: opened after {}, pulled for {}, committed in {}\n",
                      format_duration_ns(report.sync_ns), format_duration_ns(report.updates_ns),
                      format_duration_ns(report.prepared_ns - report.updates_ns),
                      format_duration_ns(report.sync_ns - report.prepared_ns));
  text += fmt::format("limit      {}: {}; the sync takes {:.2f} times as long\n",
                      format_duration_ns(report.bound_ns), bound_text(report),
                      ratio(report.sync_ns, report.bound_ns));
  text += fmt::format("hub        {} of work, {:.0f} % of the sync; at most {} messages on their way\n",
                      format_duration_ns(report.hub_busy_ns), 100 * ratio(report.hub_busy_ns, report.sync_ns),
                      report.hub_waiting);
  text +=
      fmt::format("in use     {:.1f} of {} trainer hosts send at a time, {:.1f} of {} worker hosts receive\n",
                  in_use(report.trainer_hosts, report), report.trainer_hosts.size(),
                  in_use(report.worker_hosts, report), report.worker_hosts.size());

  text += fmt::format("waits      trainer {} has nothing to do for {}", report.longest_wait_rank,
                      format_duration_ns(report.longest_wait_ns));
  if (report.longest_wait_ns >= arguments.fleet.stall_timeout_ns) {
    text +=
        fmt::format(": its watchdog would fail this sync after {}; give the fleet a longer --stall-timeout",
                    format_duration_ns(arguments.fleet.stall_timeout_ns));
  }
  text += "\n";

  std::vector<std::vector<std::string>> rows = {
      {"per host or process", "least", "median", "most", "most at"}};
  const auto row = [&](const std::string& what, const Spread& spread, const std::string& who, bool bytes) {
    const auto show = [&](std::uint64_t value) {
      return bytes ? format_bytes(value) : fmt::format("{}", value);
    };
    rows.push_back({what, show(spread.least), show(spread.median), show(spread.most),
                    spread.least == spread.most ? "" : fmt::format("{} {}", who, spread.most_at)});
  };
  const auto bytes = [](const sim::LinkUse& host) { return host.bytes; };
  row("trainer host sends", spread(report.trainer_hosts, bytes), "host", true);
  row("worker host receives", spread(report.worker_hosts, bytes), "host", true);
  row("worker keeps", spread(plan.plans, [](const WorkerPlan& one) { return one.bytes_kept; }), "worker",
      true);
  row("worker moves", spread(plan.plans, [](const WorkerPlan& one) { return one.bytes_planned; }), "worker",
      true);
  row("worker's chunks", spread(plan.plans, [](const WorkerPlan& one) { return one.chunks.size(); }),
      "worker", false);
  row("worker's receive ring", spread(fleet.workers, receive_ring), "worker", true);
  row("rank may hold more", spread(report.ranks, [](const auto& one) { return one.promised; }), "rank", true);
  row("rank held more", spread(report.ranks, [](const auto& one) { return one.reached; }), "rank", true);
  row("of it serve rings", spread(report.ranks, [](const auto& one) { return one.serve_rings; }), "rank",
      true);
  row("rank's groups at once", spread(report.ranks, [](const auto& one) { return one.peak_groups; }), "rank",
      false);
  row("worker's control messages", spread(report.worker_control, [](std::uint32_t one) { return one; }),
      "worker", false);
  row("rank's control messages", spread(report.rank_control, [](std::uint32_t one) { return one; }), "rank",
      false);
  text += "\n" + format_table(rows);

  text += fmt::format(
      "\ncontrol    {} messages: {} into the sender's hub, {} out of it; {} hot messages beside them\n",
      control_messages(report), report.hub_in, report.hub_out, report.hot_messages);
  std::string kinds;
  for (std::size_t kind = 0; kind < sim::kControlKinds; ++kind) {
    kinds += fmt::format("{}{} {}", kinds.empty() ? "" : ", ", report.control[kind],
                         sim::to_string(static_cast<sim::ControlKind>(kind)));
  }
  text +=
      fmt::format("           {}\n           {} signals of a worker to a rank that it is done with a group\n",
                  kinds, report.signals);
  text += fmt::format(
      "took       bake {}, plan {}, machines and reserves {}, sync {} ({} events); peak memory {}\n",
      format_duration_ns(plan.bake_ns), format_duration_ns(plan.plan_ns),
      format_duration_ns(report.init_real_ns), format_duration_ns(report.sync_real_ns), report.events,
      format_bytes(peak_resident_bytes()));
  text +=
      "left out   init's time, hooks, heartbeats, losses, other traffic, the network between hosts: "
      "src/sim/scale.h\n";
  return text;
}

std::string to_json_text(const ScaleRun& run) {
  const auto& [arguments, model, plan, fleet, report] = run;
  const sim::ScaleModel& links = arguments.links;
  ordered_json out;
  out["shardpull"] = kReportVersion;
  out["software"] = kSoftwareVersion;
  out["workload"] = arguments.workload;
  out["model"] = {{"name", model.label}, {"tensors", model.metadata.size()}, {"bytes", model.total_bytes}};
  out["settings"] = {{"trainer", to_string(arguments.fleet.trainer)},
                     {"inference", to_string(arguments.fleet.inference)},
                     {"publish", plan.holdings.resident ? "resident" : "gather"},
                     {"ring_depth", fleet.tables->ring_depth},
                     {"lookahead", fleet.lookahead},
                     {"max_chunk_bytes", arguments.fleet.max_chunk_bytes},
                     {"export_pack_limit_bytes", fleet.tables->export_pack_limit}};
  out["links"] = {{"ranks_per_host", links.ranks_per_host},
                  {"workers_per_host", links.workers_per_host},
                  {"trainer_host_bytes_per_s", links.trainer_host_bytes_per_s},
                  {"worker_host_bytes_per_s", links.worker_host_bytes_per_s},
                  {"latency_s", seconds(links.latency_ns)},
                  {"copy_bytes_per_s", links.copy_bytes_per_s},
                  {"sum_bytes_per_s", links.sum_bytes_per_s},
                  {"source_bytes_per_s", links.source_bytes_per_s},
                  {"hub_message_s", seconds(links.hub_message_ns)}};
  out["digest"] = to_string(plan.digest());
  out["sync_s"] = seconds(report.sync_ns);
  out["opened_s"] = seconds(report.updates_ns);
  out["prepared_s"] = seconds(report.prepared_ns);
  out["bound_s"] = seconds(report.bound_ns);
  out["bound_by"] =
      fmt::format("{} host {}", report.bound_by_trainer ? "trainer" : "worker", report.bound_host);
  out["sync_over_bound"] = ratio(report.sync_ns, report.bound_ns);
  out["longest_wait_s"] = seconds(report.longest_wait_ns);
  out["longest_wait_rank"] = report.longest_wait_rank;
  out["stall_timeout_s"] = seconds(arguments.fleet.stall_timeout_ns);
  out["bytes_kept"] = plan.bytes_kept();
  out["bytes_moved"] = report.bytes_moved;
  out["padding_bytes"] = report.padding_bytes;
  out["pulls"] = report.pulls;
  out["packs"] = report.packs;
  out["bytes_packed"] = report.bytes_packed;
  out["sums"] = report.sums;
  out["signals"] = report.signals;
  out["hot_messages"] = report.hot_messages;
  ordered_json control;
  for (std::size_t kind = 0; kind < sim::kControlKinds; ++kind)
    control[std::string(sim::to_string(static_cast<sim::ControlKind>(kind)))] = report.control[kind];
  out["control"] = std::move(control);
  out["hub"] = {{"in", report.hub_in},
                {"out", report.hub_out},
                {"busy_s", seconds(report.hub_busy_ns)},
                {"most_waiting", report.hub_waiting}};
  const auto hosts = [](const std::vector<sim::LinkUse>& list) {
    ordered_json rows = ordered_json::array();
    for (const sim::LinkUse& host : list)
      rows.push_back({{"bytes", host.bytes}, {"busy_s", seconds(host.busy_ns)}});
    return rows;
  };
  out["trainer_hosts"] = hosts(report.trainer_hosts);
  out["worker_hosts"] = hosts(report.worker_hosts);
  out["trainers"] = ordered_json::array();
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const sim::RankMemory& memory = report.ranks[rank];
    out["trainers"].push_back({{"rank", rank},
                               {"promised_bytes", memory.promised},
                               {"reached_bytes", memory.reached},
                               {"serve_ring_bytes", memory.serve_rings},
                               {"peak_groups", memory.peak_groups},
                               {"control_messages", report.rank_control[rank]}});
  }
  out["workers"] = ordered_json::array();  // of one replica
  for (std::size_t worker = 0; worker < fleet.workers.size(); ++worker) {
    const WorkerPlan& one = plan.plans[worker];
    out["workers"].push_back({{"worker", worker},
                              {"bytes_kept", one.bytes_kept},
                              {"bytes_planned", one.bytes_planned},
                              {"chunks", one.chunks.size()},
                              {"receive_ring_bytes", receive_ring(fleet.workers[worker])},
                              {"control_messages", report.worker_control[worker]}});
  }
  out["took"] = {{"bake_s", seconds(plan.bake_ns)},
                 {"plan_s", seconds(plan.plan_ns)},
                 {"init_s", seconds(report.init_real_ns)},
                 {"sync_s", seconds(report.sync_real_ns)},
                 {"events", report.events},
                 {"peak_rss_bytes", peak_resident_bytes()}};
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace shardpull::cli
