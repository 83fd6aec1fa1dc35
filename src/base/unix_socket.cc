#include "base/unix_socket.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/status_macros.h"

namespace shardpull {
namespace {

constexpr std::size_t kMaxSocketName = sizeof(sockaddr_un{}.sun_path) - 1;

Status host_error(StatusCode code, std::string message, bool retryable = false) {
  return Status(code, std::move(message), {.reason = Reason::kHost, .fault = Fault::kHost, .retryable = retryable});
}

std::string reason_text(int error) { return std::strerror(error); }

}  // namespace

std::string directory_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Status check_owner_only_directory(const std::string& path, std::string_view what) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    const int error = errno;
    return host_error(StatusCode::kFailedPrecondition,
                      fmt::format("{}: the directory \"{}\" cannot be used: {}; make it with: mkdir -m 700 '{}'", what, path,
                                  reason_text(error), path));
  }
  if (!S_ISDIR(info.st_mode)) {
    return host_error(StatusCode::kFailedPrecondition, fmt::format("{}: \"{}\" is not a directory", what, path));
  }
  if (info.st_uid != geteuid()) {
    return host_error(StatusCode::kPermissionDenied,
                      fmt::format("{}: the directory \"{}\" belongs to user {}, this process runs as user {}; use one that "
                                  "this user made",
                                  what, path, info.st_uid, geteuid()));
  }
  if ((info.st_mode & 077) != 0) {
    return host_error(StatusCode::kPermissionDenied,
                      fmt::format("{}: the directory \"{}\" is open to others (mode {:o}); close it with: chmod 700 '{}'", what,
                                  path, info.st_mode & 07777u, path));
  }
  return {};
}

Result<SocketPath> SocketPath::open(const std::string& path) {
  SocketPath out;
  const std::size_t slash = path.rfind('/');
  const std::string file = slash == std::string::npos ? path : path.substr(slash + 1);
  if (file.empty() || path.find('\0') != std::string::npos) {
    return Status(StatusCode::kInvalidArgument, fmt::format("\"{}\" does not name a socket file", path),
                  {.reason = Reason::kBadArgument});
  }
  if (path.size() <= kMaxSocketName) {
    out.name_ = path;
    return out;
  }
  const std::string directory = directory_of(path);
  out.directory_ = UniqueFd(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!out.directory_) {
    const int error = errno;
    return host_error(error == ENOENT ? StatusCode::kUnavailable : StatusCode::kFailedPrecondition,
                      fmt::format("the socket's directory \"{}\" cannot be opened: {}", directory, reason_text(error)));
  }
  out.name_ = fmt::format("/proc/self/fd/{}/{}", out.directory_.get(), file);
  if (out.name_.size() > kMaxSocketName) {
    return host_error(StatusCode::kInvalidArgument,
                      fmt::format("the socket name \"{}\" has {} bytes, too many for a unix socket; use a shorter one", file,
                                  file.size()));
  }
  return out;
}

sockaddr_un SocketPath::address() const {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name_.begin(), name_.end(), address.sun_path);
  return address;
}

Result<UniqueFd> connect_unix(const std::string& path, std::int64_t timeout_ns) {
  SHARDPULL_ASSIGN_OR_RETURN(const SocketPath socket_path, SocketPath::open(path));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) {
    const int error = errno;
    return host_error(StatusCode::kResourceExhausted,
                      fmt::format("no socket for \"{}\": {}{}", path, reason_text(error),
                                  error == EMFILE ? "; raise the limit with: ulimit -n" : ""));
  }
  // The kernel waits for a place in the backlog as long as a send may take.
  const auto micros = std::max<std::int64_t>(1, timeout_ns / kNanosPerMicro);
  const timeval limit{.tv_sec = micros / 1'000'000, .tv_usec = micros % 1'000'000};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  const sockaddr_un address = socket_path.address();
  int connected = 0;
  do {
    connected = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  } while (connected != 0 && errno == EINTR);
  if (connected != 0) {
    const int error = errno;
    switch (error) {
      case ENOENT:
      case ECONNREFUSED:
        return Status(StatusCode::kUnavailable,
                      fmt::format("nobody listens at \"{}\" ({}): the process there has ended or has not started", path,
                                  reason_text(error)),
                      {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .retryable = true});
      case EAGAIN:
        return Status(StatusCode::kDeadlineExceeded,
                      fmt::format("the process at \"{}\" did not accept a connection within {} ms", path, micros / 1000),
                      {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .retryable = true});
      case EACCES:
      case EPERM:
        return host_error(StatusCode::kPermissionDenied,
                          fmt::format("\"{}\" may not be reached by user {}: {}", path, geteuid(), reason_text(error)));
      default:
        return host_error(StatusCode::kUnavailable, fmt::format("cannot connect to \"{}\": {}", path, reason_text(error)));
    }
  }
  fcntl(fd.get(), F_SETFL, fcntl(fd.get(), F_GETFL) | O_NONBLOCK);
  return fd;
}

Status remove_stale_socket(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return {};
  if (!S_ISSOCK(info.st_mode)) {
    return host_error(StatusCode::kAlreadyExists,
                      fmt::format("\"{}\" exists and is not a socket; remove it or use another directory", path));
  }
  Result<UniqueFd> probe = connect_unix(path, 100 * kNanosPerMilli);
  if (probe.ok() || probe.status().code() == StatusCode::kDeadlineExceeded) {
    ucred listener{};
    socklen_t size = sizeof listener;
    const bool named = probe.ok() && getsockopt(probe->get(), SOL_SOCKET, SO_PEERCRED, &listener, &size) == 0;
    return host_error(StatusCode::kAlreadyExists,
                      fmt::format("the address \"{}\" is in use by {}; end it, also if it is stopped, or use another directory",
                                  path, named ? fmt::format("process {}", listener.pid) : "a process that accepts nobody"));
  }
  if (probe.status().code() != StatusCode::kUnavailable) return probe.status();
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    const int error = errno;
    return host_error(StatusCode::kFailedPrecondition,
                      fmt::format("the socket \"{}\" was left behind and cannot be removed: {}", path, reason_text(error)));
  }
  return {};
}

}  // namespace shardpull
