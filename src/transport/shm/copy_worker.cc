#include "transport/shm/copy_worker.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>

#include "base/clock.h"
#include "tensor/copy_kernels.h"

namespace shardpull {
namespace {

// Between two steps the thread looks whether it should end. A step takes about a millisecond.
constexpr std::uint64_t kStepBytes = 8u << 20;

}  // namespace

CopyWorker::CopyWorker(std::function<void()> on_done) : on_done_(std::move(on_done)), thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), "shardpull-copy");
}

CopyWorker::~CopyWorker() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Status CopyWorker::submit(Job job) {
  {
    MutexLock lock(mutex_);
    if (queue_.size() >= kMaxQueued) {
      return Status(StatusCode::kResourceExhausted, fmt::format("{} reads are waiting already", kMaxQueued),
                    {.reason = Reason::kLimit, .fault = Fault::kLibrary, .retryable = true});
    }
    queue_.push_back(std::move(job));
  }
  changed_.notify_one();
  return {};
}

std::vector<std::uint64_t> CopyWorker::take_done() {
  MutexLock lock(mutex_);
  return std::exchange(done_, {});
}

void CopyWorker::run() {
  for (;;) {
    Job job;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && queue_.empty()) changed_.wait_for_ns(mutex_, kNanosPerSecond);
      if (stopping_) return;
      job = std::move(queue_.front());
      queue_.pop_front();
    }
    // What exceeds the caches is written past them, as on every other copy path.
    const bool streaming = job.bytes >= kStreamingProgramBytes;
    for (std::uint64_t offset = 0; offset < job.bytes; offset += kStepBytes) {
      const std::uint64_t step = std::min(kStepBytes, job.bytes - offset);
      if (streaming) {
        stream_copy(job.to + offset, job.from + offset, static_cast<std::size_t>(step));
      } else {
        std::memcpy(job.to + offset, job.from + offset, static_cast<std::size_t>(step));
      }
      MutexLock lock(mutex_);
      if (stopping_) return;
    }
    job.keeps_alive.reset();
    {
      MutexLock lock(mutex_);
      done_.push_back(job.id);
    }
    on_done_();
  }
}

}  // namespace shardpull
