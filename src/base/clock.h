// Time comes from a Clock that is handed in, so that tests and the simulator own it. Monotonic: wall-clock time is never
// used to measure or to wait.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace shardpull {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Nanoseconds since an arbitrary fixed point of this process (or host). Never goes back.
  virtual std::int64_t now_ns() const = 0;
};

// CLOCK_MONOTONIC of this host: comparable between processes of one host, not between hosts.
class SystemClock final : public Clock {
 public:
  std::int64_t now_ns() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  // The process-wide instance, for wiring at the top; never destroyed.
  static const SystemClock& instance() {
    static const SystemClock* const clock = new SystemClock;
    return *clock;
  }
};

// A clock that stands still until it is told to move.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(std::int64_t start_ns = 0) : now_ns_(start_ns) {}
  std::int64_t now_ns() const override { return now_ns_.load(std::memory_order_acquire); }
  // Moves forward by `delta_ns` (>= 0).
  void advance_ns(std::int64_t delta_ns) { now_ns_.fetch_add(delta_ns, std::memory_order_acq_rel); }
  // Moves to `now_ns`; a time in the past is ignored, as the clock never goes back.
  void set_ns(std::int64_t now_ns) {
    std::int64_t current = now_ns_.load(std::memory_order_acquire);
    while (current < now_ns && !now_ns_.compare_exchange_weak(current, now_ns, std::memory_order_acq_rel)) {
    }
  }

 private:
  std::atomic<std::int64_t> now_ns_;
};

inline constexpr std::int64_t kNanosPerMicro = 1'000;
inline constexpr std::int64_t kNanosPerMilli = 1'000'000;
inline constexpr std::int64_t kNanosPerSecond = 1'000'000'000;

}  // namespace shardpull
