// CopyWorker: one thread that copies bytes out of mapped memory, so that the progress thread stays free to answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "shardpull/status.h"

namespace shardpull {

// Thread-safe.
class CopyWorker {
 public:
  struct Job {
    std::uint64_t id = 0;
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    std::uint64_t bytes = 0;
    std::shared_ptr<const void> keeps_alive;  // what `from` points into
  };

  // `on_done` is called on the copying thread after each job; it must not block.
  explicit CopyWorker(std::function<void()> on_done);
  // Ends after at most one step (a few MiB) of the job at hand; jobs not begun are dropped, none is reported any more.
  ~CopyWorker();
  CopyWorker(const CopyWorker&) = delete;
  CopyWorker& operator=(const CopyWorker&) = delete;

  // Queues a job. RESOURCE_EXHAUSTED when kMaxQueued are waiting.
  Status submit(Job job);
  // The ids of jobs done since the last call, in order.
  std::vector<std::uint64_t> take_done();

  static constexpr std::size_t kMaxQueued = 65'536;

 private:
  void run();

  const std::function<void()> on_done_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::deque<Job> queue_ SHARDPULL_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> done_ SHARDPULL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace shardpull
