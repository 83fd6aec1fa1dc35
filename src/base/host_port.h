// Addresses between hosts, as people write them: "node7:5000", "10.0.0.7:5000", "[fd00::7]:5000".
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/status.h"

namespace shardpull {

struct HostPort {
  std::string host;  // a name, or a numeric address without brackets
  std::uint16_t port = 0;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};
std::string to_string(const HostPort& address);  // an IPv6 address in brackets

// Refused, naming `what` and the accepted form: no host, no port or one that is not 1..65535 (0 too where
// `any_port`), an IPv6 address without brackets, white space.
Result<HostPort> parse_host_port(std::string_view text, std::string_view what, bool any_port = false);

// One numeric address.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool loopback() const;     // of this host only
  std::string host() const;  // "10.0.0.7", "fd00::7", "fe80::1%eth0"
  std::uint16_t port() const;
  std::string to_string() const;  // "10.0.0.7:5000", "[fd00::7]:5000"
};

// All stream addresses of a host, in the resolver's order, none twice. May ask a name server: blocks as long
// as the resolver does. UNAVAILABLE naming the host and the resolver's reason.
Result<std::vector<SocketAddress>> resolve(const HostPort& address);

// Why a stream socket could not listen at `address`, or OK: in use, not an address of this host, a port that
// needs privileges. Binds and closes; nothing is left.
Status check_can_listen(const SocketAddress& address, std::string_view what);

}  // namespace shardpull
