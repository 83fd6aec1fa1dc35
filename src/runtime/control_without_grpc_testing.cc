// The control channel of fleets within one process, for builds without gRPC: it takes the place of the gRPC
// room's two functions, so that this room's tests run under ThreadSanitizer, which cannot follow gRPC's own
// libraries, whose code is not instrumented.
//
// It keeps what Control promises, and the star's shape: a hub that decides everything on one thread, and a
// thread for each link that runs the link's callbacks in order. Nothing is encoded, nobody is silent, and
// all members are of one build, so that heartbeats and versions are not checked.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/mutex.h"
#include "control/grpc/grpc_control.h"
#include "runtime/progress_thread.h"

namespace shardpull {
namespace {

constexpr std::int64_t kFlushNs = 2 * kNanosPerSecond;
constexpr std::int64_t kRetryNs = 20 * kNanosPerMilli;

Status gone(const Member& member, std::string_view why, Reason reason) {
  const std::string name = to_string(member);
  return Status(StatusCode::kUnavailable, fmt::format("{} is gone: {}", name, why),
                {.reason = reason, .fault = Fault::kPeer, .peer = name});
}

// What one member is told, on its own thread.
class Inbox {
 public:
  Inbox(const Member& self, Incarnation incarnation, ControlSink& sink)
      : self(self), incarnation(incarnation), sink_(sink) {}

  void message(const Member& from, Incarnation life, ControlBody body) {
    post([this, from, life, body = std::make_shared<ControlBody>(std::move(body))] {
      if (!closing_) sink_.on_control(from, life, std::move(*body));
    });
  }
  void up(const Member& member, Incarnation life) {
    post([this, member, life] {
      {
        MutexLock lock(mutex_);
        up_[member] = life;
      }
      if (!closing_) sink_.on_member_up(member, life);
    });
  }
  void lost(const Member& member, Incarnation life, const Status& why) {
    post([this, member, life, why] {
      {
        MutexLock lock(mutex_);
        up_.erase(member);
        if (member == kSender) down_ = why;
      }
      if (!closing_) sink_.on_member_lost(member, life, why);
    });
  }
  // The life of `to` as far as this member knows, 0 when it knows none; the reason once the hub is gone.
  Result<Incarnation> life_of(const Member& to) {
    MutexLock lock(mutex_);
    if (!down_.ok()) return down_;
    const auto up = up_.find(to);
    return up == up_.end() ? 0 : up->second;
  }
  // From now on callbacks that have not begun are left out.
  void close() { closing_ = true; }
  bool closed() const { return closing_; }
  // Runs what is queued and joins the thread. Not from a callback.
  void stop() { thread_.stop(); }

  const Member self;
  const Incarnation incarnation;

 private:
  void post(std::function<void()> task) { thread_.post(std::move(task)); }

  ControlSink& sink_;
  std::atomic<bool> closing_{false};
  Mutex mutex_;
  std::map<Member, Incarnation> up_ SHARDPULL_GUARDED_BY(mutex_);
  Status down_ SHARDPULL_GUARDED_BY(mutex_);
  JobThreads thread_{1};  // last: it uses all of the above
};
using InboxPtr = std::shared_ptr<Inbox>;

// The star's middle: who is up, and which way a message goes. The sender is a member like the others.
class Hub {
 public:
  Hub(FleetToken token, const InboxPtr& sender) : token_(token) { members_[sender->self] = sender; }

  // All of these are thread-safe, never block and take effect in the order they were called.
  void join(const InboxPtr& member, FleetToken token, std::function<void(const Status&)> answer) {
    thread_.post([this, member, token, answer = std::move(answer)] { answer(admit(member, token)); });
  }
  void route(const InboxPtr& from, const Member& to, Incarnation life, ControlBody body) {
    thread_.post([this, from, to, life, body = std::make_shared<ControlBody>(std::move(body))] {
      const auto up = members_.find(to);
      const bool known = up != members_.end();
      if (known && (life == 0 || life == up->second->incarnation)) {
        up->second->message(from->self, from->incarnation, std::move(*body));
      } else if (life == 0) {
        from->lost(to, 0, gone(to, "it is not connected to the hub", Reason::kPeerLost));
      }
    });
  }
  void leave(const InboxPtr& member, std::function<void()> done) {
    thread_.post([this, member, done = std::move(done)] {
      const auto up = members_.find(member->self);
      if (up != members_.end() && up->second == member) {
        members_.erase(up);
        const Status why = gone(member->self, "it left in good order", Reason::kShutdown);
        for (const auto& [id, other] : members_) other->lost(member->self, member->incarnation, why);
      }
      done();
    });
  }
  // The sender is gone: what is queued goes out before.
  void stop() {
    thread_.stop();
    for (const auto& [id, member] : members_) {
      if (id != kSender)
        member->lost(kSender, members_.at(kSender)->incarnation,
                     gone(kSender, "the hub shuts down", Reason::kShutdown));
    }
  }

 private:
  Status admit(const InboxPtr& member, FleetToken token) {
    if (token != token_) {
      return Status(StatusCode::kUnauthenticated, "the fleet token is not this fleet's",
                    {.reason = Reason::kBadToken, .fault = Fault::kPeer});
    }
    if (members_.contains(member->self)) {
      return Status(StatusCode::kAlreadyExists,
                    fmt::format("{} is connected already", to_string(member->self)),
                    {.reason = Reason::kWrongState, .fault = Fault::kPeer, .retryable = true});
    }
    for (const auto& [id, other] : members_) {
      member->up(id, other->incarnation);
      other->up(member->self, member->incarnation);
    }
    members_[member->self] = member;
    return {};
  }

  const FleetToken token_;
  std::map<Member, InboxPtr> members_;  // the thread's, and stop()'s after it
  JobThreads thread_{1};                // last: it uses all of the above
};
using HubPtr = std::shared_ptr<Hub>;

// Which hub listens where.
class Addresses {
 public:
  static Addresses& instance() {
    static Addresses* const addresses = new Addresses;
    return *addresses;
  }
  bool listen(const std::string& address, const HubPtr& hub) {
    MutexLock lock(mutex_);
    const bool added = hubs_.emplace(address, hub).second;
    changed_.notify_all();
    return added;
  }
  void close(const std::string& address) {
    MutexLock lock(mutex_);
    hubs_.erase(address);
  }
  HubPtr wait_for(const std::string& address, std::int64_t timeout_ns) {
    MutexLock lock(mutex_);
    const auto there = [&]() SHARDPULL_NO_THREAD_SAFETY_ANALYSIS { return hubs_.contains(address); };
    return changed_.wait_for_ns(mutex_, timeout_ns, there) ? hubs_.at(address) : nullptr;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, HubPtr> hubs_ SHARDPULL_GUARDED_BY(mutex_);
};

// One answer, waited for by another thread. The first one counts.
class Answer {
 public:
  void give(const Status& status) {
    MutexLock lock(mutex_);
    if (!status_) status_ = status;
    given_.notify_all();
  }
  std::optional<Status> wait(std::int64_t timeout_ns) {
    MutexLock lock(mutex_);
    given_.wait_for_ns(mutex_, timeout_ns,
                       [this]() SHARDPULL_NO_THREAD_SAFETY_ANALYSIS { return status_.has_value(); });
    return status_;
  }

 private:
  Mutex mutex_;
  CondVar given_;
  std::optional<Status> status_ SHARDPULL_GUARDED_BY(mutex_);
};

// Kept by a task, it answers when the task is gone, run or not: a hub that stopped drops what comes later.
std::shared_ptr<void> answers_at_the_latest(const std::shared_ptr<Answer>& answer) {
  return {nullptr, [answer](void*) { answer->give(gone(kSender, "its hub stopped", Reason::kShutdown)); }};
}

// The sender's side when it has an address, everybody else's without one.
class MemberControl final : public Control {
 public:
  MemberControl(HubPtr hub, InboxPtr inbox, std::string address)
      : hub_(std::move(hub)), inbox_(std::move(inbox)), address_(std::move(address)) {}
  ~MemberControl() override { shutdown(); }

  Status send(const Member& to, ControlBody body) override {
    if (inbox_->closed()) return gone(to, "this control link is shut down", Reason::kShutdown);
    if (to == inbox_->self) {
      inbox_->message(to, inbox_->incarnation, std::move(body));
      return {};
    }
    const Result<Incarnation> life = inbox_->life_of(to);
    if (!life.ok()) return life.status();
    const bool is_hub = !address_.empty();
    if (is_hub && *life == 0) return gone(to, "it is not connected to the hub", Reason::kPeerLost);
    hub_->route(inbox_, to, *life, std::move(body));
    return {};
  }

  void shutdown() override {
    if (std::exchange(stopped_, true)) return;
    inbox_->close();
    if (address_.empty()) {
      const auto left = std::make_shared<Answer>();
      hub_->leave(inbox_, [left, last = answers_at_the_latest(left)] { left->give({}); });
      left->wait(kFlushNs);
    } else {
      Addresses::instance().close(address_);
      hub_->stop();
    }
    inbox_->stop();
  }

 private:
  const HubPtr hub_;
  const InboxPtr inbox_;
  const std::string address_;
  bool stopped_ = false;  // the owner's thread
};

}  // namespace

Result<std::unique_ptr<Control>> start_grpc_hub(const ControlOptions& options, ControlSink& sink) {
  auto inbox = std::make_shared<Inbox>(options.self, options.incarnation, sink);
  auto hub = std::make_shared<Hub>(options.token, inbox);
  if (!Addresses::instance().listen(options.address, hub)) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("the control hub cannot listen at \"{}\": another one does", options.address),
                  {.reason = Reason::kHost, .fault = Fault::kHost});
  }
  return std::unique_ptr<Control>(
      std::make_unique<MemberControl>(std::move(hub), std::move(inbox), options.address));
}

Result<std::unique_ptr<Control>> connect_grpc_control(const ControlOptions& options, ControlSink& sink) {
  const SystemClock& clock = SystemClock::instance();
  const std::int64_t deadline_ns = clock.now_ns() + options.connect_timeout_ns;
  const auto inbox = std::make_shared<Inbox>(options.self, options.incarnation, sink);
  Status failure(StatusCode::kDeadlineExceeded,
                 fmt::format("no control hub answered at \"{}\"", options.address),
                 {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .retryable = true,
                  .peer = to_string(kSender)});
  for (;;) {
    const std::int64_t left_ns = deadline_ns - clock.now_ns();
    if (left_ns <= 0) break;
    if (options.interrupt) {
      if (const Status asked = options.interrupt(); !asked.ok()) {
        failure = asked;
        break;
      }
    }
    const HubPtr hub = Addresses::instance().wait_for(options.address, std::min(left_ns, kAskEveryNs));
    if (hub == nullptr) continue;
    const auto answer = std::make_shared<Answer>();
    hub->join(inbox, options.token, [answer, last = answers_at_the_latest(answer)](const Status& status) {
      answer->give(status);
    });
    const std::optional<Status> status = answer->wait(left_ns);
    if (status && status->ok())
      return std::unique_ptr<Control>(std::make_unique<MemberControl>(hub, inbox, ""));
    const bool again = !status || status->code() == StatusCode::kAlreadyExists ||
                       status->code() == StatusCode::kUnavailable;
    if (!again) {
      failure = status->with_context(
          fmt::format("the hub at \"{}\" refused {}", options.address, to_string(options.self)));
      break;
    }
    Answer().wait(kRetryNs);  // the old life of this number may be about to leave
  }
  inbox->close();
  inbox->stop();  // nobody is called any more
  return failure;
}

}  // namespace shardpull
