// Mutex, MutexLock and CondVar with clang's thread-safety annotations: which lock guards which field is checked when clang
// compiles with -Wthread-safety, and costs nothing elsewhere.
//
// Locks never nest. Waits are always bounded: a CondVar has no wait without a timeout, so that no thread can sleep past the
// end of the process's work.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#if defined(__clang__)
#define SHARDPULL_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define SHARDPULL_THREAD_ANNOTATION(x)
#endif

#define SHARDPULL_CAPABILITY(x) SHARDPULL_THREAD_ANNOTATION(capability(x))
#define SHARDPULL_SCOPED_CAPABILITY SHARDPULL_THREAD_ANNOTATION(scoped_lockable)
// The field is read and written only while `x` is held.
#define SHARDPULL_GUARDED_BY(x) SHARDPULL_THREAD_ANNOTATION(guarded_by(x))
// What the field points to is read and written only while `x` is held.
#define SHARDPULL_PT_GUARDED_BY(x) SHARDPULL_THREAD_ANNOTATION(pt_guarded_by(x))
// The function is called with the locks held, and leaves them held.
#define SHARDPULL_REQUIRES(...) SHARDPULL_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
// The function is called with the locks NOT held.
#define SHARDPULL_EXCLUDES(...) SHARDPULL_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define SHARDPULL_ACQUIRE(...) SHARDPULL_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define SHARDPULL_RELEASE(...) SHARDPULL_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define SHARDPULL_TRY_ACQUIRE(...) SHARDPULL_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define SHARDPULL_NO_THREAD_SAFETY_ANALYSIS SHARDPULL_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace shardpull {

// A plain, non-recursive mutual exclusion lock. Prefer MutexLock to calling lock() and unlock().
class SHARDPULL_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() SHARDPULL_ACQUIRE() { mutex_.lock(); }
  void unlock() SHARDPULL_RELEASE() { mutex_.unlock(); }
  bool try_lock() SHARDPULL_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a Mutex for a scope.
class SHARDPULL_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) SHARDPULL_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() SHARDPULL_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A condition variable over Mutex. Woken early is normal: callers re-check their condition, or use the predicate form.
class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  // Releases `mutex`, sleeps until notified or for `timeout_ns`, takes it again. False on timeout.
  bool wait_for_ns(Mutex& mutex, std::int64_t timeout_ns) SHARDPULL_REQUIRES(mutex) SHARDPULL_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool notified = condition_.wait_for(lock, std::chrono::nanoseconds(timeout_ns)) == std::cv_status::no_timeout;
    lock.release();
    return notified;
  }

  // Waits until `predicate()` (called with `mutex` held) is true or `timeout_ns` have passed. Returns its last value.
  template <typename Predicate>
  bool wait_for_ns(Mutex& mutex, std::int64_t timeout_ns, Predicate predicate) SHARDPULL_REQUIRES(mutex)
      SHARDPULL_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool satisfied = condition_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), std::move(predicate));
    lock.release();
    return satisfied;
  }

 private:
  std::condition_variable condition_;
};

}  // namespace shardpull
