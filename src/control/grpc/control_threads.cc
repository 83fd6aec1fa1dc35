#include "control/grpc/control_threads.h"

#include <utility>

#include <fmt/format.h>
#include <pthread.h>

#include "base/clock.h"
#include "base/units.h"

namespace shardpull {

Dispatcher::Dispatcher(const std::string& name) : thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

void Dispatcher::post(std::function<void()> task) {
  {
    MutexLock lock(mutex_);
    if (stopping_) return;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void Dispatcher::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Dispatcher::run() {
  for (;;) {
    std::function<void()> task;
    {
      MutexLock lock(mutex_);
      while (tasks_.empty() && !stopping_) changed_.wait_for_ns(mutex_, kNanosPerSecond);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

Ticker::Ticker(const std::string& name, std::int64_t period_ns, std::function<void()> tick)
    : period_ns_(period_ns), tick_(std::move(tick)), thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

void Ticker::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Ticker::run() {
  const SystemClock& clock = SystemClock::instance();
  std::int64_t next_ns = clock.now_ns() + period_ns_;
  for (;;) {
    {
      MutexLock lock(mutex_);
      for (std::int64_t left_ns = next_ns - clock.now_ns(); !stopping_ && left_ns > 0;
           left_ns = next_ns - clock.now_ns()) {
        changed_.wait_for_ns(mutex_, left_ns);
      }
      if (stopping_) return;
    }
    tick_();
    next_ns += period_ns_;
    if (const std::int64_t now_ns = clock.now_ns(); next_ns < now_ns) next_ns = now_ns + period_ns_;
  }
}

void StandstillWatch::start(std::int64_t now_ns) {
  MutexLock lock(mutex_);
  beat_ns_ = now_ns;
}

void StandstillWatch::beat(std::int64_t now_ns) {
  MutexLock lock(mutex_);
  if (now_ns - beat_ns_ >= dead_after_ns_) {
    still_ns_ = now_ns - beat_ns_;
    ended_ns_ = now_ns;
  }
  beat_ns_ = now_ns;
}

std::string StandstillWatch::recent(std::int64_t now_ns) const {
  MutexLock lock(mutex_);
  std::int64_t still_ns = now_ns - beat_ns_;
  if (still_ns < dead_after_ns_) still_ns = still_ns_ != 0 && now_ns - ended_ns_ < dead_after_ns_ ? still_ns_ : 0;
  if (still_ns == 0) return {};
  return fmt::format("this process stood still for {}, longer than dead_after ({})", format_duration_ns(still_ns),
                     format_duration_ns(dead_after_ns_));
}

}  // namespace shardpull
