// The two threads of a control channel: one that runs events in order, one that keeps time.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "base/mutex.h"

namespace shardpull {

// Runs tasks one after the other, in the order of post(), on its own thread. Thread-safe.
class Dispatcher {
 public:
  explicit Dispatcher(const std::string& name);
  ~Dispatcher() { stop(); }
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // Queues a task; after stop() it is dropped. Tasks must not block.
  void post(std::function<void()> task);
  // Runs what is queued, then ends the thread and joins it. Idempotent. Not from a task.
  void stop();
  // True on the dispatcher's own thread.
  bool is_current_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void run();

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> tasks_ SHARDPULL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses all of the above
};

// Calls `tick` every `period_ns` on its own thread, the first time one period after the start. Late calls are
// not made up for: a process that was stopped ticks once when it goes on. Thread-safe.
class Ticker {
 public:
  Ticker(const std::string& name, std::int64_t period_ns, std::function<void()> tick);
  ~Ticker() { stop(); }
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

  // Ends the thread after the tick at hand and joins it. Idempotent. Not from the tick.
  void stop();

 private:
  void run();

  const std::int64_t period_ns_;
  const std::function<void()> tick_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all of the above
};

// Notices, by a beat that comes late, that this process stood still for so long that its peers take it for dead: it
// was stopped, or its host was. Thread-safe.
class StandstillWatch {
 public:
  explicit StandstillWatch(std::int64_t dead_after_ns) : dead_after_ns_(dead_after_ns) {}

  // Beats are due from now on.
  void start(std::int64_t now_ns);
  void beat(std::int64_t now_ns);
  // "this process stood still for 3.2s, longer than dead_after (2s)": does so still, or did until at most dead_after
  // ago; else nothing.
  std::string recent(std::int64_t now_ns) const;

 private:
  const std::int64_t dead_after_ns_;
  mutable Mutex mutex_;
  std::int64_t beat_ns_ SHARDPULL_GUARDED_BY(mutex_) = INT64_MAX;
  std::int64_t still_ns_ SHARDPULL_GUARDED_BY(mutex_) = 0, ended_ns_ SHARDPULL_GUARDED_BY(mutex_) = 0;
};

}  // namespace shardpull
