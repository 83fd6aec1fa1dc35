#include "runtime/fleet_link.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>

#include "base/host_port.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "runtime/hot_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull {
namespace {

Status bad_option(std::string_view field, std::string_view rule, const std::string& value) {
  return Status(StatusCode::kInvalidArgument, fmt::format("{} {} (it is {})", field, rule, value),
                {.reason = Reason::kBadArgument});
}

std::uint64_t bytes_of(const FleetMessage& message) {
  return sizeof(Result<FleetMessage>) + message.from.size() + message.topic.size() + message.body.size();
}

}  // namespace

Result<std::uint64_t> token_from_environment() {
  const char* text = std::getenv("SHARDPULL_TOKEN");
  const Status malformed(
      StatusCode::kInvalidArgument,
      "the environment variable SHARDPULL_TOKEN must hold the fleet token as 16 hexadecimal digits, not "
      "all zero",
      {.reason = Reason::kBadToken});
  if (text == nullptr) return malformed;
  const std::string_view digits(text);
  std::uint64_t token = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), token, 16);
  if (digits.size() != 16 || error != std::errc() || end != digits.data() + digits.size() || token == 0)
    return malformed;
  return token;
}

Status validate(const FleetOptions& options) {
  const TransportKind transport = transport_of(options);
  const bool between_hosts = transport == TransportKind::kTcp || transport == TransportKind::kUcx;
  if (options.directory.empty() && (options.rendezvous.empty() || !between_hosts)) {
    return bad_option("fleet.directory",
                      options.rendezvous.empty()
                          ? "must name the fleet's directory, or fleet.rendezvous where it meets"
                          : fmt::format("(--fleet-dir) must name a directory of this host for the sockets of transport {}, "
                                        "which reaches no other host", to_string(transport)),
                      "empty");
  }
  if (!options.rendezvous.empty()) {
    SHARDPULL_RETURN_IF_ERROR(parse_host_port(options.rendezvous, "fleet.rendezvous").status());
  }
  if (options.ucx_workers == 0 || options.ucx_workers > kMaxUcxWorkers) {
    return bad_option("fleet.ucx_workers", fmt::format("must be 1 to {}", kMaxUcxWorkers),
                      std::to_string(options.ucx_workers));
  }
  if (options.token == 0) return bad_option("fleet.token", "must be a random number", "0");
  if (options.connect_timeout_ms == 0) return bad_option("fleet.connect_timeout_ms", "must be >= 1", "0");
  if (options.stall_timeout_ms == 0) return bad_option("fleet.stall_timeout_ms", "must be >= 1", "0");
  if (options.heartbeat_ms == 0) return bad_option("fleet.heartbeat_ms", "must be >= 1", "0");
  if (options.dead_after_ms < 2 * options.heartbeat_ms) {
    return bad_option("fleet.dead_after_ms", "must be at least two heartbeats",
                      std::to_string(options.dead_after_ms));
  }
  return {};
}

ControlOptions control_options(const FleetOptions& options, const Member& self, Incarnation incarnation) {
  ControlOptions control;
  control.address = options.rendezvous.empty() ? "unix:" + options.directory + "/hub.sock"
                                               : "tcp:" + options.rendezvous;
  control.insecure_listen = options.insecure_listen;
  control.token = options.token;
  control.self = self;
  control.incarnation = incarnation;
  control.heartbeat_ns = static_cast<std::int64_t>(options.heartbeat_ms) * kNanosPerMilli;
  control.dead_after_ns = static_cast<std::int64_t>(options.dead_after_ms) * kNanosPerMilli;
  control.connect_timeout_ns = static_cast<std::int64_t>(options.connect_timeout_ms) * kNanosPerMilli;
  control.interrupt = options.interrupt;
  return control;
}

Result<Member> member_from_string(const std::string& text) {
  Member member;
  std::string_view rest(text);
  if (rest.starts_with("trainer ")) {
    member.role = Role::kTrainer;
    rest.remove_prefix(8);
  } else if (rest.starts_with("worker ")) {
    member.role = Role::kWorker;
    rest.remove_prefix(7);
  } else {
    rest = {};
  }
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), member.id);
  if (rest.empty() || error != std::errc() || end != rest.data() + rest.size()) {
    return bad_option("a member", "is written \"trainer R\" or \"worker C\"", "'" + text + "'");
  }
  return member;
}

Status end_of(const Shutdown& message) {
  if (message.status.ok()) return {};
  const std::string sender = to_string(kSender);
  return Status(message.status.code(), fmt::format("{} ended the fleet: {}", sender, message.status.message()),
                {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = sender});
}

std::int64_t tick_ns(const FleetOptions& options) {
  const std::int64_t stall_ns = static_cast<std::int64_t>(options.stall_timeout_ms) * kNanosPerMilli;
  return std::clamp(std::min(5 * kNanosPerSecond, stall_ns / 10), kNanosPerMilli, 250 * kNanosPerMilli);
}

Status Interrupt::wait(CondVar& wake, Mutex& mutex,
                       std::int64_t limit_ns) SHARDPULL_NO_THREAD_SAFETY_ANALYSIS {
  if (ask_ == nullptr) {
    wake.wait_for_ns(mutex, limit_ns);
    return {};
  }
  const std::int64_t left_ns = next_ns_ - clock_.now_ns();
  if (left_ns > 0) {
    wake.wait_for_ns(mutex, std::min(limit_ns, left_ns));
    return {};
  }
  // Whoever is asked may wait for a thread that waits for this lock.
  mutex.unlock();
  Status status = ask();
  mutex.lock();
  next_ns_ = clock_.now_ns() + kAskEveryNs;
  return status;
}

Status send_user_message(Control* control, const std::string& to, const std::string& topic,
                         const std::string& body,
                         const std::function<std::optional<Status>()>& why_ended) {
  constexpr std::size_t kMaxBytes = 1u << 20;
  if (body.size() > kMaxBytes) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a message of {} bytes: the limit is {}", body.size(), kMaxBytes),
                  {.reason = Reason::kLimit});
  }
  SHARDPULL_ASSIGN_OR_RETURN(const Member member, member_from_string(to));
  if (control == nullptr)
    return Status(StatusCode::kFailedPrecondition, "send_message before init",
                  {.reason = Reason::kWrongState});
  const Status sent = control->send(member, UserMessage{topic, body});
  if (sent.ok() || member != kSender) return sent;
  const std::optional<Status> end = why_ended();
  return end && !end->ok() ? *end : sent;
}

void ControlRelay::open() {
  MutexLock lock(mutex_);
  open_ = true;
  for (ProgressThread::Task& task : early_) progress_.post(std::move(task));
  early_.clear();
}

void ControlRelay::post(ProgressThread::Task task) {
  MutexLock lock(mutex_);
  if (open_) {
    progress_.post(std::move(task));
  } else {
    early_.push_back(std::move(task));
  }
}

void ControlRelay::on_control(const Member& from, Incarnation incarnation, ControlBody body) {
  post([this, from, incarnation, body = std::move(body)]() mutable {
    handlers_.message(from, incarnation, std::move(body));
  });
}

void ControlRelay::on_member_up(const Member& member, Incarnation incarnation) {
  post([this, member, incarnation] { handlers_.up(member, incarnation); });
}

void ControlRelay::on_member_lost(const Member& member, Incarnation, const Status& why) {
  post([this, member, why] { handlers_.lost(member, why); });
}

void MessageQueue::push(FleetMessage message) {
  bool warn = false;
  {
    MutexLock lock(mutex_);
    ++unread_;
    unread_bytes_ += bytes_of(message);
    messages_.push_back(std::move(message));
    while (above_limits()) {
      take(std::find_if(messages_.begin(), messages_.end(), [](const auto& each) { return each.ok(); }));
      ++dropped_;
      warn |= !std::exchange(warned_, true);
    }
    wake_.notify_all();
  }
  if (warn) {
    log_warn("more than {} messages or {} wait to be received: the oldest are dropped from now on",
             limits_.messages, format_bytes(limits_.bytes));
  }
}

bool MessageQueue::above_limits() const {
  return unread_ > limits_.messages || (unread_bytes_ > limits_.bytes && unread_ > 1);
}

FleetMessage MessageQueue::take(std::deque<Result<FleetMessage>>::iterator at) {
  FleetMessage message = std::move(*at).value();
  messages_.erase(at);
  --unread_;
  unread_bytes_ -= bytes_of(message);
  return message;
}

void MessageQueue::push_error(const Status& why) {
  MutexLock lock(mutex_);
  messages_.push_back(why);
  wake_.notify_all();
}

void MessageQueue::forget_errors_of(const std::string& peer) {
  MutexLock lock(mutex_);
  std::erase_if(messages_, [&](const Result<FleetMessage>& each) {
    return !each.ok() && each.status().info().peer == peer;
  });
}

void MessageQueue::close(const Status& why) {
  std::uint64_t lost = 0;
  {
    MutexLock lock(mutex_);
    if (!closed_) {
      closed_ = why;
      lost = dropped_;
    }
    wake_.notify_all();
  }
  if (lost > 0) log_warn("messages to this process that were dropped unread: {}", lost);
}

Result<std::optional<FleetMessage>> MessageQueue::pop(std::uint64_t timeout_ms, const FleetOptions& options) {
  Interrupt interrupt(options, SystemClock::instance());
  const std::int64_t deadline =
      SystemClock::instance().now_ns() +
      static_cast<std::int64_t>(std::min<std::uint64_t>(timeout_ms, 1u << 30)) * kNanosPerMilli;
  MutexLock lock(mutex_);
  while (messages_.empty() && !closed_) {
    const std::int64_t left = deadline - SystemClock::instance().now_ns();
    if (left <= 0) return std::optional<FleetMessage>();
    SHARDPULL_RETURN_IF_ERROR(interrupt.wait(wake_, mutex_, left));
  }
  if (const std::uint64_t lost = std::exchange(dropped_, 0); lost > 0) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("messages dropped unread, the oldest: {} (at most {} wait to be received, or {})",
                              lost, limits_.messages, format_bytes(limits_.bytes)),
                  {.reason = Reason::kLimit, .retryable = true});
  }
  if (messages_.empty()) {
    if (!closed_->ok()) return *closed_;
    return Status(StatusCode::kUnavailable, "the fleet has ended: no message follows",
                  {.reason = Reason::kShutdown});
  }
  if (messages_.front().ok()) return std::optional<FleetMessage>(take(messages_.begin()));
  const Status error = messages_.front().status();
  messages_.pop_front();
  return error;
}

}  // namespace shardpull
