// summary_line: a sync in one line.
#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "base/units.h"
#include "shardpull/fleet.h"

namespace shardpull {
namespace {

std::uint64_t time_of(const WorkerReport& worker) {
  return worker.update_ns + worker.commit_ns;
}

std::string rate(std::uint64_t bytes, std::uint64_t ns) {
  return format_rate(bytes, static_cast<std::int64_t>(ns));
}

std::string duration(std::uint64_t ns) {
  return format_duration_ns(static_cast<std::int64_t>(ns));
}

std::uint64_t percent(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0 : (100 * part + whole / 2) / whole;
}

// What most of a process's time was charged to; null when nothing was.
const PhaseTime* longest(const std::vector<PhaseTime>& phases) {
  const auto most =
      std::max_element(phases.begin(), phases.end(),
                       [](const PhaseTime& a, const PhaseTime& b) { return a.charged_ns < b.charged_ns; });
  return most == phases.end() || most->charged_ns == 0 ? nullptr : &*most;
}

// ", 62 % produce wait, for trainer 1 (81 % source)".
std::string dominating(const WorkerReport& worker, const std::vector<RankReport>& ranks) {
  const PhaseTime* const most = longest(worker.phases);
  if (most == nullptr) return "";
  std::string text =
      fmt::format(", {} % {}", percent(most->charged_ns, time_of(worker)), to_string(most->phase));
  if (most->phase != Phase::kProduceWait || worker.waited_ns == 0) return text;
  text += fmt::format(" for trainer {}", worker.waited_for);
  const auto rank = std::find_if(ranks.begin(), ranks.end(),
                                 [&](const RankReport& each) { return each.rank == worker.waited_for; });
  const PhaseTime* const its = rank == ranks.end() ? nullptr : longest(rank->phases);
  if (its != nullptr)
    text += fmt::format(" ({} % {})", percent(its->charged_ns, rank->wall_ns), to_string(its->phase));
  return text;
}

// Why the slowest worker takes longer than the middle one; empty where it does not, by a tenth.
std::string_view why_slower(const WorkerReport& slowest, const WorkerReport& middle) {
  const double times = static_cast<double>(time_of(slowest)) - static_cast<double>(time_of(middle));
  if (times <= 0.1 * static_cast<double>(time_of(middle))) return "";
  // The time that its additional bytes take at the middle one's rate, against the time it takes longer.
  const double more = static_cast<double>(slowest.bytes_moved) /
                          static_cast<double>(std::max<std::uint64_t>(middle.bytes_moved, 1)) -
                      1;
  return more * static_cast<double>(time_of(middle)) >= times / 2 ? ", more bytes" : ", slower";
}

}  // namespace

std::string summary_line(const SyncReport& report) {
  std::uint64_t bytes = 0;
  for (const WorkerReport& worker : report.workers) bytes += worker.bytes_moved;
  std::string text = fmt::format("version {}, {} in {} ({})", report.version, format_bytes(bytes),
                                 duration(report.wall_ns), rate(bytes, report.wall_ns));
  if (report.workers.empty()) return text;
  std::vector<const WorkerReport*> by_time;
  for (const WorkerReport& worker : report.workers) by_time.push_back(&worker);
  std::sort(by_time.begin(), by_time.end(),
            [](const WorkerReport* a, const WorkerReport* b) { return time_of(*a) < time_of(*b); });
  const WorkerReport& slowest = *by_time.back();
  const WorkerReport& middle = *by_time[(by_time.size() - 1) / 2];
  text +=
      fmt::format("; slowest worker {}: {} in {} ({})", slowest.consumer, format_bytes(slowest.bytes_moved),
                  duration(time_of(slowest)), rate(slowest.bytes_moved, time_of(slowest)));
  if (by_time.size() > 1)
    text +=
        fmt::format(" against {} in {} ({}){}", format_bytes(middle.bytes_moved), duration(time_of(middle)),
                    rate(middle.bytes_moved, time_of(middle)), why_slower(slowest, middle));
  return text + dominating(slowest, report.ranks);
}

}  // namespace shardpull
