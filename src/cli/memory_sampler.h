// The most anonymous memory this process has held, sampled.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "base/mutex.h"

namespace shardpull::cli {

// Anonymous resident bytes now (RssAnon of /proc/self/status): the heap, stacks and private mappings, no file
// and no shared memory. 0 when the kernel does not say.
std::uint64_t anonymous_bytes();
// The most resident memory of any kind this process ever had (VmHWM).
std::uint64_t peak_resident_bytes();

// Samples anonymous_bytes() every 20 ms on a thread of its own while it is not paused. The kernel keeps no
// such maximum itself. Thread-safe.
class MemorySampler {
 public:
  MemorySampler();
  ~MemorySampler();
  MemorySampler(const MemorySampler&) = delete;
  MemorySampler& operator=(const MemorySampler&) = delete;

  void pause();  // takes a last sample; what is allocated from here on does not count
  void resume();
  std::uint64_t peak_bytes() const { return peak_.load(); }

 private:
  void run();
  void sample();
  std::atomic<std::uint64_t> peak_{0};
  Mutex mutex_;
  CondVar wake_;
  bool paused_ SHARDPULL_GUARDED_BY(mutex_) = false;
  bool stopping_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace shardpull::cli
