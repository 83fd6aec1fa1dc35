// ReadThreads: threads that copy bytes out of peers' memory, so that the progress thread stays free to
// answer.
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
#include "transport/peer_memory.h"

namespace shardpull {

// Reads begin in the order they were submitted. Each is cut into steps of at most kStepBytes and kStepParts,
// which the threads share: one large read keeps all of them busy. Thread-safe.
class ReadThreads {
 public:
  struct Job {
    std::uint64_t id = 0;
    std::vector<CopyPart> parts;
    std::vector<std::shared_ptr<const PeerMemory>> keeps_alive;  // what the parts lie in
  };
  struct Done {
    std::uint64_t id = 0;
    Status status;  // the first error of a step; later steps are not begun
  };

  // `on_done` is called on a reading thread after each job; it must not block.
  ReadThreads(unsigned threads, CopyParts copy, std::function<void()> on_done);
  // Ends after at most the steps at hand; jobs not ended are dropped, none is reported any more.
  ~ReadThreads();
  ReadThreads(const ReadThreads&) = delete;
  ReadThreads& operator=(const ReadThreads&) = delete;

  // Queues a job. RESOURCE_EXHAUSTED when kMaxQueued are waiting.
  Status submit(Job job);
  // The jobs that ended since the last call.
  std::vector<Done> take_done();

  static constexpr std::size_t kMaxQueued = 65'536;
  static constexpr std::uint64_t kStepBytes = 4u << 20;  // about a millisecond
  static constexpr std::size_t kStepParts = 1024;

 private:
  struct Work {
    Job job;
    std::uint64_t bytes = 0;
    std::vector<std::size_t> step_ends;  // step i is the parts [step_ends[i - 1], step_ends[i])
    std::size_t begun = 0, running = 0;  // steps
    Status status;
  };
  void run();

  const CopyParts copy_;
  const std::function<void()> on_done_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::deque<std::shared_ptr<Work>> queue_ SHARDPULL_GUARDED_BY(mutex_);  // with steps to begin
  std::vector<Done> done_ SHARDPULL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace shardpull
