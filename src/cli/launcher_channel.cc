#include "cli/launcher_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/clock.h"

namespace shardpull::cli {
namespace {

constexpr std::int64_t kGateTimeoutNs = 600 * kNanosPerSecond;

}  // namespace

void LauncherChannel::send(const nlohmann::json& event) {
  if (!attached()) return;
  // Messages quote names from files, which may be no UTF-8.
  std::string line = event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  line.push_back('\n');
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t sent = ::send(fd_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return;
    rest.remove_prefix(static_cast<std::size_t>(sent));
  }
}

void LauncherChannel::send_progress(std::uint64_t bytes) {
  if (attached()) send({{"event", "progress"}, {"bytes", bytes}});
}

void LauncherChannel::send_error(const Status& status) {
  if (!attached()) return;
  send({{"event", "error"},
        {"code", to_string(status.code())},
        {"reason", static_cast<int>(status.info().reason)},
        {"peer", status.info().peer},
        {"message", status.message()}});
}

Status LauncherChannel::pass_gate(const char* gate, std::uint32_t sync) {
  if (!attached()) return {};
  send({{"event", gate}, {"sync", sync}});
  const SystemClock& clock = SystemClock::instance();
  const std::int64_t deadline = clock.now_ns() + kGateTimeoutNs;
  for (;;) {
    const std::int64_t left = deadline - clock.now_ns();
    if (left <= 0) {
      return Status(StatusCode::kDeadlineExceeded,
                    fmt::format("the launcher did not answer at gate \"{}\" of sync {}", gate, sync),
                    {.reason = Reason::kStalled, .fault = Fault::kPeer, .peer = "launcher"});
    }
    pollfd waiting{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    const int ready = ::poll(&waiting, 1, static_cast<int>(left / kNanosPerMilli) + 1);
    if (ready <= 0) continue;
    char byte = 0;
    const ssize_t got = ::recv(fd_.get(), &byte, 1, 0);
    if (got == 1) return {};
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    return Status(StatusCode::kUnavailable, "the launcher has gone",
                  {.reason = Reason::kShutdown, .fault = Fault::kPeer, .peer = "launcher"});
  }
}

}  // namespace shardpull::cli
