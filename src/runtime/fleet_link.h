// What Trainer and Worker have in common: identity, the event queue between control threads and the progress
// thread, and messages between the programs on top.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/identity.h"
#include "base/limits.h"
#include "base/mutex.h"
#include "control/control.h"
#include "runtime/progress_thread.h"
#include "shardpull/fleet.h"

namespace shardpull {

// Checks the fields every process gives; the error names field, value and range.
Status validate(const FleetOptions& options);
ControlOptions control_options(const FleetOptions& options, const Member& self, Incarnation incarnation);
// "worker 3" or "trainer 1".
Result<Member> member_from_string(const std::string& text);

// What a process ends with that the sender has told so: OK, or the error of another process's failure.
Status end_of(const Shutdown& message);

// How often machines are ticked: often enough for the stall watchdog's period, min(5 s, a tenth of its
// limit).
std::int64_t tick_ns(const FleetOptions& options);

// Lets FleetOptions::interrupt end a wait of the caller's thread. One for each blocking call; confined to it.
class Interrupt {
 public:
  Interrupt(const FleetOptions& options, const Clock& clock)
      : ask_(options.interrupt ? &options.interrupt : nullptr), clock_(clock), next_ns_(clock.now_ns()) {}

  Status ask() { return ask_ != nullptr ? (*ask_)() : Status(); }
  void ask_no_more() { ask_ = nullptr; }  // from here on it only sleeps
  // Sleeps on `wake`, `limit_ns` at most, and asks when it is time to, which `mutex` is let go for.
  Status wait(CondVar& wake, Mutex& mutex, std::int64_t limit_ns) SHARDPULL_REQUIRES(mutex);

 private:
  const std::function<Status()>* ask_;
  const Clock& clock_;
  std::int64_t next_ns_;
};

// Turns control callbacks into tasks of the progress thread. Callbacks before open() are kept: a handler may
// send, and the link exists only once its factory has returned.
class ControlRelay final : public ControlSink {
 public:
  // What the owner does with each event, on the progress thread.
  struct Handlers {
    std::function<void(const Member&, Incarnation, ControlBody)> message;
    std::function<void(const Member&, Incarnation)> up;
    std::function<void(const Member&, const Status&)> lost;
  };
  ControlRelay(ProgressThread& progress, Handlers handlers)
      : progress_(progress), handlers_(std::move(handlers)) {}

  void open();

  void on_control(const Member& from, Incarnation incarnation, ControlBody body) override;
  void on_member_up(const Member& member, Incarnation incarnation) override;
  void on_member_lost(const Member& member, Incarnation incarnation, const Status& why) override;

 private:
  void post(ProgressThread::Task task);

  ProgressThread& progress_;
  const Handlers handlers_;
  Mutex mutex_;
  bool open_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::vector<ProgressThread::Task> early_ SHARDPULL_GUARDED_BY(mutex_);
};

// What a MessageQueue keeps for a program that does not receive, or not now: two messages of every process of
// the largest fleet, as they all come at once after a sync, or bodies of the largest size from 256.
struct UnreadLimits {
  std::uint64_t messages = 4 * std::uint64_t{kMaxRanks};  // of ranks and of workers
  std::uint64_t bytes = 256u << 20;                       // text, and what a message takes besides
};

// Messages of the programs on top, from the progress thread to a caller. Thread-safe.
class MessageQueue {
 public:
  explicit MessageQueue(const UnreadLimits& limits = {}) : limits_(limits) {}

  // Beyond the limits the oldest messages are dropped: whoever has not received them so far waits for later
  // ones, if for any. The first time that is logged; the next pop() reports how many are gone.
  void push(FleetMessage message);
  // pop() reports `why` once, in its turn among the messages.
  void push_error(const Status& why);
  // A member that was lost is in a sync again: what push_error() said of its earlier life, and nobody has
  // read, is no news any more. Not before that: whoever waits for a message of that life is to hear that none
  // comes.
  void forget_errors_of(const std::string& peer);
  // From now on pop() reports `why` once the queue is empty. The first reason is kept.
  void close(const Status& why);
  Result<std::optional<FleetMessage>> pop(std::uint64_t timeout_ms, const FleetOptions& options);

 private:
  FleetMessage take(std::deque<Result<FleetMessage>>::iterator at) SHARDPULL_REQUIRES(mutex_);
  bool above_limits() const SHARDPULL_REQUIRES(mutex_);

  const UnreadLimits limits_;
  Mutex mutex_;
  CondVar wake_;
  std::deque<Result<FleetMessage>> messages_ SHARDPULL_GUARDED_BY(mutex_);
  std::uint64_t unread_ SHARDPULL_GUARDED_BY(mutex_) = 0;        // messages_ without the errors
  std::uint64_t unread_bytes_ SHARDPULL_GUARDED_BY(mutex_) = 0;  // of these
  std::uint64_t dropped_ SHARDPULL_GUARDED_BY(mutex_) = 0;       // since pop() last said so
  bool warned_ SHARDPULL_GUARDED_BY(mutex_) = false;
  std::optional<Status> closed_ SHARDPULL_GUARDED_BY(mutex_);
};

// Sends `body` to "worker N" or "trainer N". `control`: null before init. `why_ended` is asked where the sender cannot be reached: the fleet's
// end as this process knows it, waiting for it for kEndKnownWithinNs at most, or nothing.
Status send_user_message(Control* control, const std::string& to, const std::string& topic,
                         const std::string& body,
                         const std::function<std::optional<Status>()>& why_ended);
// Why the fleet ended comes before the end of the link, and is taken in by another thread.
inline constexpr std::int64_t kEndKnownWithinNs = kNanosPerSecond;

}  // namespace shardpull
