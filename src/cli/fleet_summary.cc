#include "cli/fleet_summary.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/units.h"
#include "cli/sync_report.h"
#include "plan/boxes.h"
#include "plan/path.h"

namespace shardpull::cli {
namespace {

constexpr std::size_t kShownLines = 8;

std::uint64_t tensor_bytes_of(const TensorMeta& meta) {
  return bytes_of(meta.dtype, checked_numel(meta.shape).value_or(0))
      .value();  // the tables have been validated
}

// Bytes of export buffers per rank: (lookahead + 1) x the small tensors, on multiples of 16, of its largest
// group.
void add_export_buffers(const FleetPlan& fleet, std::uint32_t lookahead,
                        std::vector<TrainerFigures>& trainers) {
  const InitTables& tables = fleet.tables;
  std::vector<std::uint64_t> largest(trainers.size(), 0), in_group(trainers.size(), 0);
  std::vector<std::uint32_t> everyone(trainers.size());
  std::iota(everyone.begin(), everyone.end(), 0u);
  std::uint32_t name = 0;
  for (const std::uint32_t length : tables.group_lens) {
    std::map<std::int32_t, std::uint64_t> by_class;  // names held in pieces are published in place
    for (std::uint32_t i = 0; i < length; ++i, ++name) {
      const std::uint64_t bytes = tensor_bytes_of(tables.metadata[name]);
      const std::int32_t owner_class =
          tables.ownership.name_owner_class.empty() ? 0 : tables.ownership.name_owner_class[name];
      if (owner_class >= 0 && bytes <= tables.export_pack_limit)
        by_class[owner_class] += checked_align_up<std::uint64_t>(bytes, kLayoutAlignment).value_or(bytes);
    }
    std::fill(in_group.begin(), in_group.end(), 0);
    for (const auto& [owner_class, bytes] : by_class) {
      const auto& owners = tables.ownership.owner_sets.empty()
                               ? everyone
                               : tables.ownership.owner_sets[static_cast<std::size_t>(owner_class)];
      for (const std::uint32_t rank : owners) in_group[rank] += bytes;
    }
    for (std::size_t rank = 0; rank < largest.size(); ++rank)
      largest[rank] = std::max(largest[rank], in_group[rank]);
  }
  for (std::size_t rank = 0; rank < trainers.size(); ++rank) {
    if (tables.producer_resident[rank] != 0) continue;
    trainers[rank].export_buffer_bytes =
        std::min<std::uint64_t>(std::uint64_t{lookahead} + 1, trainers[rank].groups) * largest[rank];
  }
}

struct Extreme {
  std::uint64_t value = 0;
  std::size_t who = 0;
};

// The smallest, the middle and the largest of `values`, which is not empty.
std::array<Extreme, 3> spread_of(const std::vector<std::uint64_t>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  const auto at = [&](std::size_t i) { return Extreme{.value = values[order[i]], .who = order[i]}; };
  // Of equal largest ones the first, as of equal smallest ones.
  const std::uint64_t most = values[order.back()];
  const auto first = static_cast<std::size_t>(std::find(values.begin(), values.end(), most) - values.begin());
  return {at(0), at((order.size() - 1) / 2), Extreme{.value = most, .who = first}};
}

template <typename Figures>
std::vector<std::uint64_t> column(const std::vector<Figures>& figures, std::uint64_t Figures::* field) {
  std::vector<std::uint64_t> out;
  for (const Figures& one : figures) out.push_back(one.*field);
  return out;
}

class SpreadTable {
 public:
  explicit SpreadTable(std::string who) : who_(std::move(who)) {
    rows_.push_back({"per " + who_, "least", "median", "most", "sum", "least at", "most at"});
  }
  // The sum counts every row `times` times, as often as there are replicas of it; 0: a sum says nothing.
  template <typename Figures>
  void add(const std::string& what, const std::vector<Figures>& figures, std::uint64_t Figures::* field,
           bool bytes, std::uint64_t times = 1) {
    const std::vector<std::uint64_t> values = column(figures, field);
    const auto text = [&](std::uint64_t value) {
      return bytes ? format_bytes(value) : fmt::format("{}", value);
    };
    const auto [least, median, most] = spread_of(values);
    const std::uint64_t sum = std::accumulate(values.begin(), values.end(), std::uint64_t{0}) * times;
    const bool even = least.value == most.value;
    rows_.push_back({what, text(least.value), text(median.value), text(most.value),
                     times == 0 ? "" : text(sum), even ? "" : fmt::format("{} {}", who_, least.who),
                     even ? "" : fmt::format("{} {}", who_, most.who)});
  }
  std::string text() const { return format_table(rows_); }

 private:
  std::string who_;
  std::vector<std::vector<std::string>> rows_;
};

std::int64_t transfer_ns(std::uint64_t bytes, std::uint64_t bytes_per_s) {
  return static_cast<std::int64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(bytes_per_s));
}

}  // namespace

FleetFigures figures_of(const FleetPlan& fleet, std::uint32_t lookahead) {
  const InitTables& tables = fleet.tables;
  const std::uint32_t replicas = tables.num_replicas;
  FleetFigures figures;
  figures.trainers.resize(tables.producers.size());
  for (std::size_t rank = 0; rank < figures.trainers.size(); ++rank) {
    figures.trainers[rank].held_bytes = held_bytes(tables.metadata, fleet.holdings.served[rank]);
  }
  for (const auto& owners : group_owners(tables)) {
    for (const std::uint32_t rank : owners) ++figures.trainers[rank].groups;
  }
  for (const WorkerPlan& plan : fleet.plans) {
    WorkerFigures& worker = figures.workers.emplace_back();
    std::vector<std::uint64_t> from(tables.producers.size(), 0);
    worker.bytes_kept = plan.bytes_kept;
    worker.bytes_planned = plan.bytes_planned;
    worker.chunks = plan.chunks.size();
    worker.receive_ring_bytes = plan.receive_slot_bytes * plan.ring_depth;
    worker.groups_not_taken = plan.pre_free.size();
    worker.dead_names = fleet.recording(plan.consumer).dead.size();
    worker.conversions = fleet.recording(plan.consumer).conversions.size();
    for (const Chunk& chunk : plan.chunks) {
      worker.keys += chunk.keys.size();
      worker.largest_chunk_bytes = std::max(worker.largest_chunk_bytes, chunk.bytes);
      worker.pulls += chunk.runs.size();
      if (chunk.path == Path::kMapped) {
        ++worker.mapped_chunks;
      } else if (chunk.path == Path::kDirect) {
        ++worker.direct_chunks;
      } else if (!chunk.keys.empty()) {
        if (const auto obstacle = why_not_reachable(tables, chunk.candidates, chunk.keys))
          ++figures.packed_because[obstacle->reason];
      }
      for (const Run& run : chunk.runs) {
        for (std::uint32_t k = run.first_key; k < run.first_key + run.key_count; ++k)
          from[run.producer] += chunk.keys[k].bytes;
        figures.trainers[run.producer].pulls += replicas;
        if (chunk.path == Path::kPacked) ++figures.trainers[run.producer].packs;
      }
    }
    for (const ProducerPlan& producer : plan.producers)
      figures.trainers[producer.producer].serve_ring_bytes += producer.serve_slot_bytes * plan.ring_depth;
    for (std::uint32_t rank = 0; rank < from.size(); ++rank) {
      figures.trainers[rank].served_bytes += from[rank] * replicas;
      if (from[rank] <= figures.hottest_bytes) continue;
      figures.hottest_bytes = from[rank];
      figures.hottest_trainer = rank;
      figures.hottest_worker = plan.consumer;
    }
  }
  add_export_buffers(fleet, lookahead, figures.trainers);
  return figures;
}

Prediction predict(const FleetPlan& fleet, const FleetFigures& figures, const LinkSpeeds& links) {
  Prediction out;
  for (std::uint32_t rank = 0; rank < figures.trainers.size(); ++rank) {
    const std::int64_t ns = transfer_ns(figures.trainers[rank].served_bytes, links.trainer_bytes_per_s);
    if (ns <= out.trainers_ns) continue;
    out.trainers_ns = ns;
    out.slowest_trainer = rank;
  }
  std::uint64_t largest = 0;
  for (std::uint32_t w = 0; w < figures.workers.size(); ++w) {
    const WorkerFigures& worker = figures.workers[w];
    largest = std::max(largest, worker.largest_chunk_bytes);
    const auto waits =
        static_cast<std::int64_t>(ceil_div<std::uint64_t>(worker.chunks, fleet.tables.ring_depth));
    const std::int64_t ns =
        std::max(transfer_ns(worker.bytes_planned, links.worker_bytes_per_s), waits * links.pull_latency_ns);
    if (ns <= out.workers_ns) continue;
    out.workers_ns = ns;
    out.slowest_worker = w;
  }
  out.fill_ns = transfer_ns(largest * fleet.tables.ring_depth,
                            std::min(links.trainer_bytes_per_s, links.worker_bytes_per_s)) +
                links.pull_latency_ns;
  return out;
}

std::string to_text(const FleetPlan& fleet, const FleetFigures& figures, const std::string& publish,
                    const std::optional<LinkSpeeds>& links) {
  const InitTables& tables = fleet.tables;
  const std::uint32_t replicas = tables.num_replicas;
  std::string text = fmt::format("publish    {}\n", publish);
  std::uint64_t largest_group = 0, largest_bytes = 0;
  std::uint32_t name = 0;
  for (std::uint32_t group = 0; group < tables.group_lens.size(); ++group) {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < tables.group_lens[group]; ++i)
      bytes += tensor_bytes_of(tables.metadata[name++]);
    if (bytes <= largest_bytes) continue;
    largest_bytes = bytes;
    largest_group = group;
  }
  text += fmt::format(
      "groups     {} gather groups, the largest is group {} with {}; owner classes: {}; pieces: {}\n",
      tables.group_lens.size(), largest_group, format_bytes(largest_bytes),
      std::max<std::size_t>(1, tables.ownership.owner_sets.size()), tables.ownership.pieces.size());
  text += fmt::format("workers    {} = {} replica{} of {}, ring depth {}; {} different recordings\n",
                      fleet.workers(), replicas, replicas == 1 ? "" : "s", fleet.plans.size(),
                      tables.ring_depth, fleet.recordings.size());
  std::uint64_t chunks = 0, mapped = 0, direct = 0, packed = 0;
  for (const WorkerFigures& worker : figures.workers) {
    chunks += worker.chunks;
    mapped += worker.mapped_chunks;
    direct += worker.direct_chunks;
  }
  for (const TrainerFigures& trainer : figures.trainers) packed += trainer.packs;
  text += fmt::format(
      "paths      over {}: of {} chunks of a replica {} are mapped, {} direct; {} pulls are packed\n",
      to_string(tables.transport), chunks, mapped, direct, packed);
  std::size_t shown = 0;
  for (const auto& [reason, count] : figures.packed_because) {
    if (++shown > kShownLines) break;
    text += fmt::format("           {} packed: {}\n", count, reason);
  }
  if (figures.packed_because.size() > kShownLines)
    text += fmt::format("           ... {} reasons in all\n", figures.packed_because.size());
  if (packed > 0 && figures.packed_because.empty()) {
    text += fmt::format("           packed: asked for, not contiguous on both sides, or below {}\n",
                        format_bytes(kMinDirectBytes));
  }

  SpreadTable trainers("trainer");
  trainers.add("publishes", figures.trainers, &TrainerFigures::held_bytes, true);
  trainers.add("serves", figures.trainers, &TrainerFigures::served_bytes, true);
  trainers.add("pulls", figures.trainers, &TrainerFigures::pulls, false);
  trainers.add("packs", figures.trainers, &TrainerFigures::packs, false);
  trainers.add("serve rings", figures.trainers, &TrainerFigures::serve_ring_bytes, true);
  trainers.add("export buffers", figures.trainers, &TrainerFigures::export_buffer_bytes, true);
  text += "\n" + trainers.text();
  SpreadTable workers("worker");
  workers.add("keeps", figures.workers, &WorkerFigures::bytes_kept, true, replicas);
  workers.add("moves", figures.workers, &WorkerFigures::bytes_planned, true, replicas);
  workers.add("chunks", figures.workers, &WorkerFigures::chunks, false, replicas);
  workers.add("keys", figures.workers, &WorkerFigures::keys, false, replicas);
  workers.add("largest chunk", figures.workers, &WorkerFigures::largest_chunk_bytes, true, 0);
  workers.add("receive ring", figures.workers, &WorkerFigures::receive_ring_bytes, true, replicas);
  workers.add("groups not taken", figures.workers, &WorkerFigures::groups_not_taken, false, 0);
  workers.add("dead names", figures.workers, &WorkerFigures::dead_names, false, 0);
  workers.add("conversions", figures.workers, &WorkerFigures::conversions, false, replicas);
  text += "\n" + workers.text();
  if (figures.hottest_bytes > 0) {
    text += fmt::format("\nhottest pair: trainer {} to worker {}, {}\n", figures.hottest_trainer,
                        figures.hottest_worker, format_bytes(figures.hottest_bytes));
  }
  if (replicas > 1) {
    text += fmt::format("replicas share serve slots: {} sharing groups of {} workers\n", fleet.plans.size(),
                        replicas);
  }
  std::map<std::string, std::uint64_t> conversions;  // workers of a replica, by line
  for (const std::uint32_t recording : fleet.recording_of) {
    for (const std::string& line : fleet.recordings[recording].conversions) ++conversions[line];
  }
  shown = 0;
  for (const auto& [line, count] : conversions) {
    if (++shown > kShownLines) break;
    text += fmt::format("converted: {} ({} workers of a replica)\n", line, count);
  }
  if (conversions.size() > kShownLines)
    text += fmt::format("converted: ... {} lines in all\n", conversions.size());
  if (!links) return text;
  const Prediction prediction = predict(fleet, figures, *links);
  text += fmt::format(
      "\nprediction: {} per sync at {} out of a trainer, {} into a worker, {} per pull\n"
      "  trainers {}: trainer {} sends {}\n"
      "  workers  {}: worker {} receives {} in {} chunks, {} under way\n"
      "  fill     {}: the first {} chunks, before all overlaps\n",
      format_duration_ns(prediction.total_ns()), format_rate(links->trainer_bytes_per_s, 1'000'000'000),
      format_rate(links->worker_bytes_per_s, 1'000'000'000), format_duration_ns(links->pull_latency_ns),
      format_duration_ns(prediction.trainers_ns), prediction.slowest_trainer,
      format_bytes(figures.trainers[prediction.slowest_trainer].served_bytes),
      format_duration_ns(prediction.workers_ns), prediction.slowest_worker,
      format_bytes(figures.workers[prediction.slowest_worker].bytes_planned),
      figures.workers[prediction.slowest_worker].chunks, tables.ring_depth,
      format_duration_ns(prediction.fill_ns), tables.ring_depth);
  return text;
}

void add_json(const FleetPlan& fleet, const FleetFigures& figures, const std::optional<LinkSpeeds>& links,
              nlohmann::ordered_json& out) {
  using nlohmann::ordered_json;
  out["producers"] = ordered_json::array();
  for (std::size_t rank = 0; rank < figures.trainers.size(); ++rank) {
    const TrainerFigures& trainer = figures.trainers[rank];
    out["producers"].push_back(
        {{"rank", rank},
         {"publish", fleet.tables.producer_resident[rank] != 0 ? "resident" : "gather"},
         {"groups", trainer.groups},
         {"held_bytes", trainer.held_bytes},
         {"bytes", trainer.served_bytes},
         {"pulls", trainer.pulls},
         {"packs", trainer.packs},
         {"serve_ring_bytes", trainer.serve_ring_bytes},
         {"export_buffer_bytes", trainer.export_buffer_bytes}});
  }
  out["hottest_pair"] = {{"rank", figures.hottest_trainer},
                         {"worker", figures.hottest_worker},
                         {"bytes", figures.hottest_bytes}};
  out["prediction"] = nullptr;
  if (!links) return;
  const Prediction prediction = predict(fleet, figures, *links);
  const auto seconds = [](std::int64_t ns) { return static_cast<double>(ns) / 1e9; };
  out["prediction"] = {
      {"trainer_bytes_per_s", links->trainer_bytes_per_s}, {"worker_bytes_per_s", links->worker_bytes_per_s},
      {"pull_latency_s", seconds(links->pull_latency_ns)}, {"trainers_s", seconds(prediction.trainers_ns)},
      {"workers_s", seconds(prediction.workers_ns)},       {"fill_s", seconds(prediction.fill_ns)},
      {"total_s", seconds(prediction.total_ns())}};
}

}  // namespace shardpull::cli
