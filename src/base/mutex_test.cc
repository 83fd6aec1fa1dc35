#include "base/mutex.h"

#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"

namespace shardpull {
namespace {

class Counter {
 public:
  void add() SHARDPULL_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    ++value_;
    changed_.notify_all();
  }
  bool wait_for(int value, std::int64_t timeout_ns) SHARDPULL_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return changed_.wait_for_ns(mutex_, timeout_ns,
                                [&]() SHARDPULL_REQUIRES(mutex_) { return value_ >= value; });
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int value_ SHARDPULL_GUARDED_BY(mutex_) = 0;
};

// Goal: a waiter sees what the others did; under ThreadSanitizer this is also the proof that the lock locks.
TEST(Mutex, WaitersSeeWhatOthersDid) {
  Counter counter;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) counter.add();
    });
  }
  EXPECT_TRUE(counter.wait_for(2000, 60 * kNanosPerSecond));
  for (std::thread& thread : threads) thread.join();
}

TEST(Mutex, WaitsAreBounded) {
  Counter counter;
  EXPECT_FALSE(counter.wait_for(1, kNanosPerMilli));
  Mutex mutex;
  CondVar never;
  const MutexLock lock(mutex);
  // May wake early; must wake.
  never.wait_for_ns(mutex, kNanosPerMilli);
  SUCCEED();
}

bool try_and_release(Mutex& mutex) {
  if (!mutex.try_lock()) return false;
  mutex.unlock();
  return true;
}

TEST(Mutex, TryLockNeverWaits) {
  Mutex mutex;
  bool elsewhere = true;
  {
    const MutexLock lock(mutex);
    std::thread([&] { elsewhere = try_and_release(mutex); }).join();
  }
  EXPECT_FALSE(elsewhere);
  EXPECT_TRUE(try_and_release(mutex));
}

}  // namespace
}  // namespace shardpull
