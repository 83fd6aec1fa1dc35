#include "control/grpc/foreign_service.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/unique_fd.h"

namespace shardpull {
namespace {

using namespace std::string_view_literals;

// RFC 9113, 3.4: the client's connection preface, then an empty SETTINGS frame.
constexpr std::string_view kHello = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"sv;
constexpr std::size_t kFrameHeaderBytes = 9;

bool wait_for(int fd, short events, std::int64_t until_ns) {
  for (;;) {
    const std::int64_t left = until_ns - SystemClock::instance().now_ns();
    if (left <= 0) return false;
    pollfd waiting{fd, events, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(left / kNanosPerMilli) + 1);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

// The beginning of a SETTINGS frame, the first thing that an HTTP/2 server sends.
bool is_settings_frame(std::string_view bytes) {
  return bytes.substr(3, 1) == "\4"sv && bytes.substr(5, 4) == "\0\0\0\0"sv;
}

std::string first_line(std::string_view bytes) {
  constexpr std::size_t kShown = 40;
  return printable(std::string(bytes.substr(0, std::min(bytes.find_first_of("\r\n"), kShown))));
}

}  // namespace

Status check_no_foreign_service(const SocketAddress& address, std::int64_t timeout_ns) {
  const auto foreign = [&](const std::string& what) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("what listens at {} {}: another service has this port; check host and port",
                              address.to_string(), what),
                  {.reason = Reason::kVersionMismatch, .fault = Fault::kUser});
  };
  const std::int64_t until_ns = SystemClock::instance().now_ns() + timeout_ns;
  const UniqueFd fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return {};
  if (connect(fd.get(), address.get(), address.length) != 0) {
    int error = errno;
    socklen_t size = sizeof error;
    if (error != EINPROGRESS || !wait_for(fd.get(), POLLOUT, until_ns) ||
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
      return {};
    }
  }
  if (send(fd.get(), kHello.data(), kHello.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(kHello.size())) return {};
  std::string answer;
  while (answer.size() < kFrameHeaderBytes) {
    if (!wait_for(fd.get(), POLLIN, until_ns)) break;
    char buffer[64];
    const ssize_t got = recv(fd.get(), buffer, sizeof buffer, 0);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) {
      if (!answer.empty()) break;
      return foreign("hung up and said no hello");
    }
    answer.append(buffer, static_cast<std::size_t>(got));
  }
  if (answer.empty()) {
    return foreign(fmt::format("accepts connections and says no hello ({} ms)", timeout_ns / kNanosPerMilli));
  }
  if (answer.size() >= kFrameHeaderBytes && is_settings_frame(answer)) return {};
  return foreign(fmt::format("does not speak our protocol: it answers \"{}\"", first_line(answer)));
}

}  // namespace shardpull
