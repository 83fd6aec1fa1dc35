// `shardpull simulate`: whole fleets in simulated time, many seeds, a few at once. Each runs in one thread
// and depends on its seed alone.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/mutex.h"
#include "cli/commands.h"
#include "sim/simulate.h"

namespace shardpull::cli {
namespace {

// What many runs came to. Thread-safe.
class Tally {
 public:
  void add(std::uint64_t seed, const sim::SimReport& report) {
    const MutexLock lock(mutex_);
    completed_ += report.syncs_completed;
    failed_ += report.syncs_failed;
    faults_ += report.faults;
    if (report.violations.empty()) return;
    ++failures_;
    if (failures_ <= kShown) fmt::print("seed {}: {}\n", seed, report.violations.front());
    if (!first_ || seed < *first_) first_ = seed;
  }
  int finish(std::uint64_t seeds) {
    const MutexLock lock(mutex_);
    fmt::print("{} syncs were exact, {} failed as they had to, {} faults struck\n", completed_, failed_,
               faults_);
    fmt::print("seeds run: {}, failures: {}, first failing seed: {}\n", seeds, failures_,
               first_ ? std::to_string(*first_) : "none");
    return failures_ == 0 ? kExitDone : kExitFailed;
  }

 private:
  static constexpr std::uint64_t kShown = 10;
  Mutex mutex_;
  std::uint64_t completed_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::uint64_t failed_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::uint64_t faults_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::uint64_t failures_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::optional<std::uint64_t> first_ SHARDPULL_GUARDED_BY(mutex_);
};

int run_one(const SimulateArguments& arguments) {
  const auto seed = static_cast<std::uint64_t>(*arguments.seed);
  const sim::SimOptions options = sim::SimOptions::draw_with_faults(seed);
  fmt::print("seed {}: {}\n", seed, sim::to_string(options));
  const sim::SimReport report = sim::simulate(seed, options, arguments.trace);
  std::fputs(report.trace.c_str(), stderr);
  for (const std::string& fault : report.struck) fmt::print("struck: {}\n", fault);
  fmt::print("{} events in {:.3f} s of simulated time, trace hash {:016x}\n", report.events,
             static_cast<double>(report.simulated_ns) / 1e9, report.trace_hash);
  Tally tally;
  tally.add(seed, report);
  return tally.finish(1);
}

}  // namespace

int run_simulate(const SimulateArguments& arguments) {
  if (arguments.scale) return run_scale(*arguments.scale);
  if (arguments.seed) return run_one(arguments);
  Tally tally;
  std::atomic<std::uint64_t> next{0};
  const auto work = [&] {
    for (std::uint64_t i = next++; i < arguments.seeds; i = next++) {
      const std::uint64_t seed = arguments.first_seed + i;
      tally.add(seed, sim::simulate(seed, sim::SimOptions::draw_with_faults(seed)));
    }
  };
  const std::uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::uint32_t count = arguments.threads != 0 ? arguments.threads : cores;
  std::vector<std::thread> threads;
  for (std::uint32_t t = 1; t < count; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return tally.finish(arguments.seeds);
}

}  // namespace shardpull::cli
