// The progress thread: the one thread that touches a process's transport and its machines.
//
// Everybody else posts tasks. It sleeps only in the transport's own wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "transport/transport.h"

namespace shardpull {

class ProgressThread {
 public:
  using Task = std::function<void()>;

  // `sink` receives the transport's callbacks and `on_tick` is called about every `tick_ns`, both on the
  // thread, from start() until stop() has returned. `on_broken` is called once, on the thread, as its last
  // act, if the transport breaks.
  ProgressThread(std::unique_ptr<Transport> transport, TransportSink& sink, Task on_tick,
                 std::function<void(const Status&)> on_broken, std::int64_t tick_ns, const Clock& clock);
  ~ProgressThread();  // stop()

  void start();
  // Runs `task` on the thread, in the order posted. Thread-safe; never blocks. Tasks posted after stop() are
  // dropped.
  void post(Task task);
  // Posts and waits until it has run. Not from the thread itself. False when the thread has stopped and it
  // did not run.
  bool run(Task task);
  // Runs what is posted, then joins. Idempotent. Not from the thread itself.
  void stop();

  // Confined to the thread, but for the methods Transport calls thread-safe.
  Transport& transport() { return *transport_; }
  const Clock& clock() const { return clock_; }

 private:
  void loop();

  std::unique_ptr<Transport> transport_;
  TransportSink& sink_;
  Task on_tick_;
  std::function<void(const Status&)> on_broken_;
  const std::int64_t tick_ns_;
  const Clock& clock_;
  Mutex mutex_;
  std::vector<Task> tasks_ SHARDPULL_GUARDED_BY(mutex_);
  bool stopping_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// A few threads that run jobs in the order posted: strided copies, post-processing hooks.
class JobThreads {
 public:
  explicit JobThreads(unsigned threads);
  ~JobThreads();  // stop()
  // Thread-safe; never blocks. Jobs posted after stop() are dropped.
  void post(std::function<void()> job);
  // Runs what is queued, then joins. Idempotent.
  void stop();

 private:
  void loop();

  Mutex mutex_;
  CondVar wake_;
  std::vector<std::function<void()>> jobs_ SHARDPULL_GUARDED_BY(mutex_);  // FIFO: taken from head_
  std::size_t head_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  bool stopping_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace shardpull
