#include "transport/read_threads.h"

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>

#include "base/clock.h"

namespace shardpull {

ReadThreads::ReadThreads(unsigned threads, CopyParts copy, std::function<void()> on_done)
    : copy_(std::move(copy)), on_done_(std::move(on_done)) {
  for (unsigned i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { run(); });
    pthread_setname_np(threads_.back().native_handle(), "shardpull-read");
  }
}

ReadThreads::~ReadThreads() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Status ReadThreads::submit(Job job) {
  auto work = std::make_shared<Work>();
  work->job = std::move(job);
  std::vector<CopyPart>& parts = work->job.parts;
  // Only what is larger than a step has to be cut.
  if (std::any_of(parts.begin(), parts.end(), [](const CopyPart& part) { return part.bytes > kStepBytes; })) {
    std::vector<CopyPart> pieces;
    for (CopyPart part : parts) {
      while (part.bytes > 0) {
        CopyPart piece = part;
        piece.bytes = std::min(part.bytes, kStepBytes);
        pieces.push_back(piece);
        part.offset += piece.bytes;
        part.to += piece.bytes;
        part.bytes -= piece.bytes;
      }
    }
    parts = std::move(pieces);
  }
  std::uint64_t step_bytes = 0;
  std::size_t step_begin = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > step_begin && (step_bytes + parts[i].bytes > kStepBytes || i - step_begin == kStepParts)) {
      work->step_ends.push_back(step_begin = i);
      step_bytes = 0;
    }
    step_bytes += parts[i].bytes;
    work->bytes += parts[i].bytes;
  }
  work->step_ends.push_back(parts.size());
  {
    MutexLock lock(mutex_);
    if (queue_.size() >= kMaxQueued) {
      return Status(StatusCode::kResourceExhausted, fmt::format("{} reads are waiting already", kMaxQueued),
                    {.reason = Reason::kLimit, .fault = Fault::kLibrary, .retryable = true});
    }
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
  return {};
}

std::vector<ReadThreads::Done> ReadThreads::take_done() {
  MutexLock lock(mutex_);
  return std::exchange(done_, {});
}

void ReadThreads::run() {
  for (;;) {
    std::shared_ptr<Work> work;
    std::span<const CopyPart> step;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && queue_.empty()) changed_.wait_for_ns(mutex_, kNanosPerSecond);
      if (stopping_) return;
      work = queue_.front();
      const std::size_t begin = work->begun == 0 ? 0 : work->step_ends[work->begun - 1];
      step = std::span(work->job.parts).subspan(begin, work->step_ends[work->begun] - begin);
      ++work->running;
      if (++work->begun == work->step_ends.size()) queue_.pop_front();
    }
    Status status = copy_(step, work->bytes);
    bool ended = false;
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
      --work->running;
      if (!status.ok() && work->status.ok()) {
        work->status = std::move(status);
        if (work->begun < work->step_ends.size()) std::erase(queue_, work);
        work->begun = work->step_ends.size();
      }
      ended = work->running == 0 && work->begun == work->step_ends.size();
    }
    if (!ended) continue;
    work->job.keeps_alive.clear();
    {
      MutexLock lock(mutex_);
      done_.push_back({.id = work->job.id, .status = std::move(work->status)});
    }
    on_done_();
  }
}

}  // namespace shardpull
