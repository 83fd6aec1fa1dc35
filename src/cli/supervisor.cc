#include "cli/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/clock.h"

namespace shardpull::cli {
namespace {

// After the first failure the others have this long to say what they saw; one of them may be the cause.
constexpr std::int64_t kGraceNs = kNanosPerSecond;
// Between asking the children to end and ending them.
constexpr std::int64_t kTermNs = kNanosPerSecond / 2;
constexpr std::size_t kHeldLines = 200;  // per child

std::int64_t now() {
  return SystemClock::instance().now_ns();
}

bool passes_logs_on() {
  const char* const level = std::getenv("SHARDPULL_LOG");
  if (level == nullptr) return false;
  const std::string_view name = level;
  return name == "trace" || name == "debug" || name == "info";
}

// Errors that only say that somebody else ended, or that nobody answered.
bool is_aftermath(Reason reason) {
  return reason == Reason::kPeerLost || reason == Reason::kStalled || reason == Reason::kSuperseded ||
         reason == Reason::kShutdown;
}

int rank_of(const ChildEnd& end) {
  if (end.crashed && !end.error) return 0;
  if (!end.error) return 4;
  if (is_aftermath(end.error->reason)) return 3;
  return end.error->peer.empty() || end.error->peer == end.name ? 1 : 2;
}

}  // namespace

std::optional<RunError> choose_cause(const std::vector<ChildEnd>& ends) {
  const ChildEnd* cause = nullptr;
  for (const ChildEnd& end : ends) {
    if (!end.failed) continue;
    const auto place = [](const ChildEnd& each) { return std::pair(rank_of(each), each.order); };
    if (cause == nullptr || place(end) < place(*cause)) cause = &end;
  }
  if (cause == nullptr) return std::nullopt;
  std::string message = cause->error ? cause->error->message : cause->exit;
  // The engine names its own process, too; once is enough.
  const std::string name = cause->name + ": ";
  if (const std::size_t at = message.find(name); at != std::string::npos) message.erase(at, name.size());
  return RunError{cause->name, std::move(message)};
}

struct Supervisor::Child {
  explicit Child(ChildProcess started) : process(std::move(started)) {}
  ChildProcess process;
  LineBuffer events, lines;
  std::deque<std::string> held;
  std::optional<ChildError> error;
  std::uint64_t failure_order = 0;  // 0 = none
  bool channel_open = true, errors_open = true;
  bool crashed = false;
};

Result<std::unique_ptr<Supervisor>> Supervisor::make() {
  std::unique_ptr<Supervisor> supervisor(new Supervisor);
  sigset_t mask;
  sigemptyset(&mask);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&mask, number);
  sigprocmask(SIG_BLOCK, &mask, &supervisor->previous_);
  supervisor->signals_ = UniqueFd(signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!supervisor->signals_) {
    return Status(StatusCode::kInternal, fmt::format("signalfd: {}", std::strerror(errno)),
                  {.reason = Reason::kHost, .fault = Fault::kHost});
  }
  return supervisor;
}

Supervisor::~Supervisor() {
  children_.clear();
  sigprocmask(SIG_SETMASK, &previous_, nullptr);
}

Status Supervisor::start(ChildOptions options) {
  for (const auto& child : children_) {
    if (child->process.running()) options.group = child->process.group();
  }
  auto started = ChildProcess::start(options);
  if (!started.ok()) return started.status().with_context("starting " + options.name);
  children_.push_back(std::make_unique<Child>(std::move(*started)));
  return {};
}

void Supervisor::release(std::size_t child) {
  const char go = 'g';
  // A child that has gone meanwhile is noticed by its exit.
  const ssize_t ignored = ::send(children_[child]->process.channel(), &go, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  static_cast<void>(ignored);
}

void Supervisor::note_failure(Child& child) {
  if (child.failure_order == 0) child.failure_order = ++failures_;
  if (!stop_at_ns_) stop_at_ns_ = now() + kGraceNs;
}

void Supervisor::read_channel(std::size_t index, const Handlers& handlers) {
  Child& child = *children_[index];
  char bytes[16384];
  while (child.channel_open) {
    const ssize_t got = recv(child.process.channel(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      child.channel_open = false;
      child.process.close_channel();
      return;
    }
    for (const std::string& line : child.events.add(std::string_view(bytes, static_cast<std::size_t>(got)))) {
      const nlohmann::json event = nlohmann::json::parse(line, nullptr, false);
      if (!event.is_object()) continue;
      if (event.value("event", "") == "error") {
        if (!child.error) {
          child.error = ChildError{static_cast<Reason>(event.value("reason", 0)), event.value("peer", ""),
                                   event.value("message", "")};
        }
        note_failure(child);
      } else if (handlers.on_event) {
        handlers.on_event(index, event);
      }
    }
  }
}

void Supervisor::take_line(Child& child, std::string line) {
  line = fmt::format("{}: {}", child.process.name(), line);
  if (passes_logs_on()) {
    std::fprintf(stderr, "%s\n", line.c_str());
    return;
  }
  child.held.push_back(std::move(line));
  if (child.held.size() > kHeldLines) child.held.pop_front();
}

void Supervisor::read_errors(Child& child) {
  char bytes[16384];
  while (child.errors_open) {
    const ssize_t got = read(child.process.errors(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      child.errors_open = false;
      child.process.close_errors();
      std::string rest = child.lines.take_rest();
      if (!rest.empty()) take_line(child, std::move(rest));
      return;
    }
    for (std::string& line : child.lines.add(std::string_view(bytes, static_cast<std::size_t>(got)))) {
      take_line(child, std::move(line));
    }
  }
}

void Supervisor::reap(const Handlers& handlers) {
  for (std::size_t i = 0; i < children_.size(); ++i) {
    Child& child = *children_[i];
    if (!child.process.poll_exit()) continue;
    read_channel(i, handlers);  // what it said before it ended
    read_errors(child);
    const int code = child.process.exit_code();
    // A process that fails by itself says why. Any other bad end is none that it chose: what it wrote last
    // may explain it.
    child.crashed = code < 0 ? !child.process.signalled_by_us() : code != 0 && !child.error;
    if (code != 0 && (child.crashed || !child.process.signalled_by_us())) note_failure(child);
  }
}

void Supervisor::stop_all(int number) {
  for (const auto& child : children_) child->process.signal(number);
}

void Supervisor::take_signals(const Handlers& handlers) {
  signalfd_siginfo info{};
  while (read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    if (info.ssi_signo == SIGCHLD) continue;
    if (interrupted_by_ != 0) {
      stop_all(SIGKILL);
      continue;
    }
    interrupted_by_ = static_cast<int>(info.ssi_signo);
    stop_all(SIGTERM);
    stop_at_ns_.reset();
    kill_at_ns_ = now() + kTermNs;
  }
  reap(handlers);
  if (handlers.on_child_signal) handlers.on_child_signal();
}

std::optional<RunError> Supervisor::run(const Handlers& handlers) {
  held_lines_.clear();
  for (;;) {
    const bool running = std::any_of(children_.begin(), children_.end(),
                                     [](const auto& child) { return child->process.running(); });
    if (!running) break;

    std::vector<pollfd> fds = {{signals_.get(), POLLIN, 0}};
    const int extra = handlers.extra_fd ? handlers.extra_fd() : -1;
    if (extra >= 0) fds.push_back({extra, POLLIN, 0});
    const std::size_t first = fds.size();
    for (const auto& child : children_) {  // closed ones are -1, which poll leaves alone
      fds.push_back({child->process.channel(), POLLIN, 0});
      fds.push_back({child->process.errors(), POLLIN, 0});
    }
    int timeout = -1;
    for (const auto& at : {stop_at_ns_, kill_at_ns_}) {
      if (!at) continue;
      const int ms = static_cast<int>(std::max<std::int64_t>(0, *at - now()) / kNanosPerMilli) + 1;
      timeout = timeout < 0 ? ms : std::min(timeout, ms);
    }
    if (poll(fds.data(), fds.size(), timeout) < 0 && errno != EINTR) break;

    if (fds[0].revents != 0) take_signals(handlers);
    if (extra >= 0 && fds[1].revents != 0 && handlers.on_extra) handlers.on_extra();
    for (std::size_t i = 0; i < children_.size(); ++i) {
      if (fds[first + 2 * i].revents != 0) read_channel(i, handlers);
      if (fds[first + 2 * i + 1].revents != 0) read_errors(*children_[i]);
    }
    if (stop_at_ns_ && now() >= *stop_at_ns_) {
      stop_all(SIGTERM);
      stop_at_ns_.reset();
      kill_at_ns_ = now() + kTermNs;
    }
    if (kill_at_ns_ && now() >= *kill_at_ns_) {
      stop_all(SIGKILL);
      kill_at_ns_.reset();
    }
  }

  std::vector<ChildEnd> ends;
  for (const auto& child : children_) {
    ends.push_back({.name = child->process.name(),
                    .error = child->error,
                    .exit = child->process.describe_exit(),
                    .failed = child->failure_order != 0,
                    .crashed = child->crashed,
                    .order = child->failure_order});
  }
  std::optional<RunError> cause = choose_cause(ends);
  if (interrupted_by_ != 0) {
    const char* const name = strsignal(interrupted_by_);
    cause = RunError{"", fmt::format("interrupted by signal {} ({})", interrupted_by_, name)};
  }
  for (const auto& child : children_) {
    if (cause && !child->crashed) continue;
    held_lines_.insert(held_lines_.end(), child->held.begin(), child->held.end());
  }
  children_.clear();
  failures_ = 0;
  stop_at_ns_.reset();
  kill_at_ns_.reset();
  return cause;
}

}  // namespace shardpull::cli
