#include "runtime/progress_thread.h"

#include <utility>

#include "base/log.h"

namespace shardpull {

ProgressThread::ProgressThread(std::unique_ptr<Transport> transport, TransportSink& sink, Task on_tick,
                               std::function<void(const Status&)> on_broken, std::int64_t tick_ns,
                               const Clock& clock)
    : transport_(std::move(transport)),
      sink_(sink),
      on_tick_(std::move(on_tick)),
      on_broken_(std::move(on_broken)),
      tick_ns_(tick_ns),
      clock_(clock) {}

ProgressThread::~ProgressThread() {
  stop();
}

void ProgressThread::start() {
  thread_ = std::thread([this] { loop(); });
}

void ProgressThread::post(Task task) {
  {
    MutexLock lock(mutex_);
    if (stopping_) return;
    tasks_.push_back(std::move(task));
    if (tasks_.size() > 1) return;  // the thread is awake, or about to be, for an earlier one
  }
  transport_->wake();
}

bool ProgressThread::run(Task task) {
  struct Done {
    Mutex mutex;
    CondVar wake;
    bool done SHARDPULL_GUARDED_BY(mutex) = false;
    bool dropped SHARDPULL_GUARDED_BY(mutex) = false;
  };
  // The guard tells the waiter also when the task is destroyed without having run.
  auto done = std::make_shared<Done>();
  std::shared_ptr<void> guard(nullptr, [done](void*) {
    MutexLock lock(done->mutex);
    if (!done->done) done->dropped = true;
    done->wake.notify_all();
  });
  post([task = std::move(task), done, guard = std::move(guard)] {
    task();
    MutexLock lock(done->mutex);
    done->done = true;
    done->wake.notify_all();
  });
  MutexLock lock(done->mutex);
  while (!done->done && !done->dropped) done->wake.wait_for_ns(done->mutex, kNanosPerSecond);
  return done->done;
}

void ProgressThread::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  transport_->wake();
  if (thread_.joinable()) thread_.join();
}

void ProgressThread::loop() {
  std::int64_t next_tick = clock_.now_ns() + tick_ns_;
  std::vector<Task> running;
  for (;;) {
    bool stopping = false;
    {
      MutexLock lock(mutex_);
      running.swap(tasks_);
      stopping = stopping_;
    }
    for (Task& task : running) {
      task();
      task = nullptr;  // frees what it holds before the next one runs
    }
    const bool ran = !running.empty();
    running.clear();
    if (stopping && !ran) return;

    const std::int64_t now = clock_.now_ns();
    if (now >= next_tick) {
      on_tick_();
      next_tick = now + tick_ns_;
    }
    bool more = false;
    {
      MutexLock lock(mutex_);
      more = !tasks_.empty();
    }
    const Status status = transport_->progress(more || stopping ? 0 : next_tick - now, sink_);
    if (!status.ok()) {
      // Not recoverable: nothing would be served any more. Waiters of run() learn it when their task is
      // destroyed.
      log_error("the transport stopped: {}", status.to_string());
      on_broken_(status.with_context("the transport stopped"));
      std::vector<Task> dropped;
      MutexLock lock(mutex_);
      stopping_ = true;
      dropped.swap(tasks_);
      return;
    }
  }
}

JobThreads::JobThreads(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { loop(); });
}

JobThreads::~JobThreads() {
  stop();
}

void JobThreads::post(std::function<void()> job) {
  MutexLock lock(mutex_);
  if (stopping_) return;
  jobs_.push_back(std::move(job));
  wake_.notify_one();
}

void JobThreads::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void JobThreads::loop() {
  for (;;) {
    std::function<void()> job;
    {
      MutexLock lock(mutex_);
      while (head_ == jobs_.size() && !stopping_) wake_.wait_for_ns(mutex_, kNanosPerSecond);
      if (head_ == jobs_.size()) return;
      job = std::move(jobs_[head_++]);
      if (head_ == jobs_.size()) {
        jobs_.clear();
        head_ = 0;
      }
    }
    job();
  }
}

}  // namespace shardpull
