#include "sim/world.h"

#include <algorithm>
#include <memory>
#include <optional>

#include <fmt/ranges.h>

namespace shardpull::sim {

World::World(std::uint64_t seed)
    : random_(Random(seed).fork(1)),
      net_(clock_, {.seed = splitmix64(seed ^ 2), .piece_bytes = 256}),
      control_(clock_, {.seed = splitmix64(seed ^ 3)}) {}

void World::later(std::int64_t max_delay_ns, std::function<void()> step) {
  after(random_.between(1, max_delay_ns), std::move(step));
}

void World::after(std::int64_t delay_ns, std::function<void()> step) {
  events_.emplace(std::pair(now_ns() + delay_ns, next_order_++), std::move(step));
}

void World::in_pieces(std::size_t count, std::int64_t max_piece_ns, std::function<void(std::size_t)> step,
                      std::function<void()> done) {
  struct Work {
    std::size_t next = 0, count = 0;
    std::int64_t max_piece_ns = 0;
    std::function<void(std::size_t)> step;
    std::function<void()> done;
  };
  auto work = std::make_shared<Work>(Work{0, count, max_piece_ns, std::move(step), std::move(done)});
  struct Runner {
    static void run(World& world, const std::shared_ptr<Work>& work) {
      world.later(work->max_piece_ns, [&world, work] {
        if (work->next == work->count) return work->done();
        work->step(work->next++);
        run(world, work);
      });
    }
  };
  Runner::run(*this, work);
}

bool World::step(std::int64_t deadline_ns) {
  std::optional<std::int64_t> next;
  const auto consider = [&](std::optional<std::int64_t> due_ns) {
    if (due_ns && (!next || *due_ns < *next)) next = due_ns;
  };
  if (!events_.empty()) consider(events_.begin()->first.first);
  consider(net_.next_due_ns());
  consider(control_.next_due_ns());
  if (!next || *next > deadline_ns) return false;
  clock_.set_ns(*next);
  ++events_run_;
  while (!events_.empty() && events_.begin()->first.first <= now_ns()) {
    const std::function<void()> event = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    event();
  }
  control_.deliver_due();
  for (const auto& [transport, sink] : transports_) {
    if (const Status status = transport->progress(0, *sink); !status.ok())
      broken("progress: {}", status.to_string());
  }
  return true;
}

bool World::run_until(const std::function<bool()>& over, std::int64_t limit_ns, std::string_view what) {
  const std::int64_t deadline_ns = now_ns() + limit_ns;
  while (violations_.empty()) {
    if (over()) return true;
    if (!step(deadline_ns))
      broken("liveness: {} is not over after {} ms of simulated time", what, limit_ns / kNanosPerMilli);
  }
  return false;
}

std::string World::line(std::string_view what, std::initializer_list<std::int64_t> numbers) const {
  return fmt::format("{:>12} {} {}\n", now_ns() / kNanosPerMicro, what, fmt::join(numbers, " "));
}

void World::start_due_steps() {
  while (!at_step_.empty() && at_step_.begin()->first <= steps_) {
    after(0, std::move(at_step_.begin()->second));
    at_step_.erase(at_step_.begin());
  }
}

void World::arm(Failure kind, std::uint64_t spared) {
  armed_ = true;
  struck_ = false;
  kind_ = kind;
  spared_ = spared;
}

bool World::strikes(Failure kind) {
  if (!armed_ || kind != kind_ || spared_-- != 0) return false;
  armed_ = false;
  struck_ = true;
  trace("failure", static_cast<int>(kind));
  return true;
}

Status World::outcome_of(Failure kind) {
  static constexpr const char* kNames[kFailures] = {"source", "pack", "transfer", "scatter", "hook"};
  if (!strikes(kind)) return {};
  return Status(StatusCode::kInternal, fmt::format("a simulated {} failure", kNames[static_cast<int>(kind)]));
}

void World::maybe_flip(Failure kind, std::span<std::byte> bytes) {
  if (bytes.empty() || !strikes(kind)) return;
  bytes[random_.below(bytes.size())] ^= static_cast<std::byte>(1 << random_.below(8));
}

void World::note_broken(std::string what) {
  violations_.push_back(fmt::format("at {} us: {}", now_ns() / kNanosPerMicro, what));
}

}  // namespace shardpull::sim
