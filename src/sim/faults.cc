#include "sim/faults.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/clock.h"

namespace shardpull::sim {
namespace {

std::string_view to_string(FaultKind kind) {
  switch (kind) {
    case FaultKind::kCrashWorker:
      return "crash of worker";
    case FaultKind::kSilenceWorker:
      return "silence of worker";
    case FaultKind::kDelayWorker:
      return "delay of worker";
    case FaultKind::kCrashRank:
      return "crash of trainer";
    case FaultKind::kSilenceRank:
      return "silence of trainer";
    case FaultKind::kCrashSender:
      return "crash of the sender";
    case FaultKind::kCutHot:
      return "cut between worker";
    case FaultKind::kHoldHot:
      return "held connections of worker";
    case FaultKind::kSlowWorker:
      return "slow worker";
    case FaultKind::kSlowRank:
      return "slow trainer";
  }
  return "unknown";
}

// "trainer 1", or "trainer-1" as the simulated transport calls it.
bool contains_name(std::string message, const char* role, std::uint32_t id) {
  std::replace(message.begin(), message.end(), '-', ' ');
  const std::string name = fmt::format("{} {}", role, id);
  for (std::size_t at = message.find(name); at != std::string::npos; at = message.find(name, at + 1)) {
    const std::size_t end = at + name.size();
    if (end == message.size() || message[end] < '0' || message[end] > '9') return true;
  }
  return false;
}

}  // namespace

std::string to_string(const Fault& fault) {
  std::string text(to_string(fault.kind));
  switch (fault.kind) {
    case FaultKind::kCrashWorker:
    case FaultKind::kSilenceWorker:
    case FaultKind::kDelayWorker:
    case FaultKind::kHoldHot:
    case FaultKind::kSlowWorker:
      text += fmt::format(" {}", fault.worker);
      break;
    case FaultKind::kCrashRank:
    case FaultKind::kSilenceRank:
    case FaultKind::kSlowRank:
      text += fmt::format(" {}", fault.rank);
      break;
    case FaultKind::kCutHot:
      text += fmt::format(" {} and trainer {}", fault.worker, fault.rank);
      break;
    case FaultKind::kCrashSender:
      break;
  }
  return text + fmt::format(" after {} steps", fault.step);
}

std::vector<Fault> draw_faults(Random& random, const SimOptions& options, std::uint64_t steps, bool last) {
  std::vector<Fault> faults;
  const std::uint32_t workers = options.tp * options.pp * options.replicas;
  const auto draw = [&](FaultKind kind) {
    Fault fault;
    fault.kind = kind;
    fault.worker = static_cast<std::uint32_t>(random.below(workers));
    fault.rank = static_cast<std::uint32_t>(random.below(options.trainers));
    fault.step = random.below(steps + steps / 8 + 1);
    switch (kind) {
      case FaultKind::kSilenceWorker:
      case FaultKind::kSilenceRank:
        fault.duration_ns = 5 * kNanosPerSecond;
        break;
      case FaultKind::kDelayWorker:
      case FaultKind::kHoldHot:
        fault.duration_ns = random.between(kNanosPerMilli, 900 * kNanosPerMilli);
        break;
      default:
        break;
    }
    if (kind == FaultKind::kCrashRank || kind == FaultKind::kSilenceRank)
      fault.rank = static_cast<std::uint32_t>(random.between(1, options.trainers - 1));
    faults.push_back(fault);
  };
  if (last) {
    const std::uint64_t what = options.trainers == 1 ? 0 : random.below(3);
    draw(what == 0 ? FaultKind::kCrashSender : what == 1 ? FaultKind::kCrashRank : FaultKind::kSilenceRank);
  }
  static constexpr FaultKind kKinds[] = {
      FaultKind::kCrashWorker,   FaultKind::kCrashWorker, FaultKind::kCrashWorker, FaultKind::kSilenceWorker,
      FaultKind::kSilenceWorker, FaultKind::kDelayWorker, FaultKind::kCutHot,      FaultKind::kCutHot,
      FaultKind::kHoldHot,       FaultKind::kSlowWorker,  FaultKind::kSlowRank,    FaultKind::kCrashRank,
      FaultKind::kCrashRank,     FaultKind::kSilenceRank};
  for (std::uint64_t left = random.below(3); left > 0; --left) {
    const FaultKind kind = kKinds[random.below(std::size(kKinds))];
    const bool of_rank = kind == FaultKind::kCrashRank || kind == FaultKind::kSilenceRank;
    if (!of_rank || options.trainers > 1) draw(kind);
  }
  return faults;
}

bool may_fail(const SimModel& model, const Struck& struck, const std::vector<std::uint32_t>& live) {
  if (struck.sender || struck.step || struck.estranged) return true;
  const std::uint32_t replica = model.options.tp * model.options.pp;
  std::set<std::uint32_t> hit;  // replicas
  for (const std::uint32_t worker : struck.workers) hit.insert(worker / replica);
  bool any = false;  // replica that nothing happened to
  for (const std::uint32_t worker : live) any = any || !hit.contains(worker / replica);
  if (!any) return true;
  const auto takes_part = [&](std::uint32_t worker) {
    return std::find(live.begin(), live.end(), worker) != live.end();
  };
  if (model.options.fail_on_loss && std::any_of(struck.workers.begin(), struck.workers.end(), takes_part))
    return true;
  // What a rank held others may hold too: they stand in for it. To a worker that cannot reach a rank it is as
  // good as dead.
  std::set<std::uint32_t> out_of_reach = struck.ranks;
  for (const auto& [worker, rank] : struck.cut) out_of_reach.insert(rank);
  return !held_without(*model.tables, {out_of_reach.begin(), out_of_reach.end()});
}

bool names_struck(const std::string& message, const Struck& struck) {
  const auto names = [&](const char* role, std::uint32_t id) { return contains_name(message, role, id); };
  return (struck.step && message.find("simulated") != std::string::npos) ||
         (struck.sender && names("trainer", 0)) ||
         std::any_of(struck.workers.begin(), struck.workers.end(),
                     [&](std::uint32_t worker) { return names("worker", worker); }) ||
         std::any_of(struck.ranks.begin(), struck.ranks.end(),
                     [&](std::uint32_t rank) { return names("trainer", rank); }) ||
         std::any_of(struck.cut.begin(), struck.cut.end(),
                     [&](const auto& cut) { return names("trainer", cut.second); });
}

}  // namespace shardpull::sim
