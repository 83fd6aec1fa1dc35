// Unix sockets by path: who may reach them, paths longer than the kernel takes, and sockets left behind by a killed process.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/unique_fd.h"
#include "shardpull/status.h"

namespace shardpull {

// OK when `path` is a directory of this process's user that nobody else can enter. Else the error names it, `what` it is for,
// and the command that makes it right.
Status check_owner_only_directory(const std::string& path, std::string_view what);

// The directory part of `path`: "." when there is none, "/" for a file of the root.
std::string directory_of(const std::string& path);

// A way to name a socket file in a sockaddr_un, which holds 107 bytes. A longer path is reached through a descriptor of its
// directory, "/proc/self/fd/N/name"; the short name works while this object lives, in this process only.
class SocketPath {
 public:
  // Fails when the directory of a long path cannot be opened, or the file's name alone is too long.
  static Result<SocketPath> open(const std::string& path);

  const std::string& name() const { return name_; }  // at most 107 bytes
  sockaddr_un address() const;

 private:
  std::string name_;
  UniqueFd directory_;
};

// Connects a stream socket to the one that listens at `path`. Waits no longer than `timeout_ns` while the listener's backlog is
// full. Nobody listening is UNAVAILABLE. The socket is close-on-exec and non-blocking.
Result<UniqueFd> connect_unix(const std::string& path, std::int64_t timeout_ns);

// Removes the socket at `path` when the process that listened there is gone. Nothing there is OK; a live listener or a file
// that is no socket is ALREADY_EXISTS, and nothing is removed.
Status remove_stale_socket(const std::string& path);

}  // namespace shardpull
