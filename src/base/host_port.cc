#include "base/host_port.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "base/units.h"

namespace shardpull {
namespace {

Status refused(std::string_view what, std::string_view text, std::string_view why) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{}: \"{}\" {}; expected HOST:PORT, an IPv6 address in brackets: [::1]:5000",
                            what, text, why),
                {.reason = Reason::kBadArgument});
}

}  // namespace

std::string to_string(const HostPort& address) {
  return address.host.find(':') == std::string::npos ? fmt::format("{}:{}", address.host, address.port)
                                                     : fmt::format("[{}]:{}", address.host, address.port);
}

Result<HostPort> parse_host_port(std::string_view text, std::string_view what, bool any_port) {
  if (text.size() > 300) return refused(what, text.substr(0, 40), "... is too long");
  for (const char c : text) {
    if (static_cast<unsigned char>(c) <= ' ' || c == 0x7F) return refused(what, "", "holds white space");
  }
  std::string_view host, port;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return refused(what, text, "has no closing bracket");
    host = text.substr(1, end - 1);
    const std::string numeric(host.substr(0, host.find('%')));
    in6_addr address{};
    if (inet_pton(AF_INET6, numeric.c_str(), &address) != 1) {
      return refused(what, text, "has no IPv6 address in its brackets");
    }
    if (!text.substr(end + 1).starts_with(':')) return refused(what, text, "has no port");
    port = text.substr(end + 2);
  } else {
    const std::size_t colon = text.rfind(':');
    if (colon == std::string_view::npos) return refused(what, text, "has no port");
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (host.find(':') != std::string_view::npos) {
      return refused(what, text, "has an IPv6 address without brackets");
    }
  }
  if (host.empty()) return refused(what, text, "has no host");
  const auto number = parse_integer(port, what, any_port ? 0 : 1, 65535);
  if (!number.ok()) return refused(what, text, "has no port from 1 to 65535");
  return HostPort{std::string(host), static_cast<std::uint16_t>(*number)};
}

bool SocketAddress::loopback() const {
  if (family() == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(&storage);
    return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
  }
  if (family() != AF_INET6) return false;
  const auto* in = reinterpret_cast<const sockaddr_in6*>(&storage);
  if (IN6_IS_ADDR_V4MAPPED(&in->sin6_addr)) return in->sin6_addr.s6_addr[12] == 127;
  return IN6_IS_ADDR_LOOPBACK(&in->sin6_addr);
}

std::string SocketAddress::host() const {
  char text[NI_MAXHOST] = "";
  if (getnameinfo(get(), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "?";
  return text;
}

std::uint16_t SocketAddress::port() const {
  return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port
                                    : reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string SocketAddress::to_string() const {
  return shardpull::to_string(HostPort{host(), port()});
}

Result<std::vector<SocketAddress>> resolve(const HostPort& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int failed = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, [](addrinfo* each) {
    if (each != nullptr) freeaddrinfo(each);
  });
  const auto unresolved = [&](std::string_view why) {
    return Status(
        StatusCode::kUnavailable,
        fmt::format("the host name \"{}\" cannot be resolved ({}): give a name that this host knows, or its "
                    "numeric address",
                    address.host, why),
        {.reason = Reason::kHost, .fault = Fault::kHost, .retryable = true});
  };
  if (failed != 0) return unresolved(failed == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(failed));
  std::vector<SocketAddress> out;
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    if (each->ai_family != AF_INET && each->ai_family != AF_INET6) continue;
    SocketAddress one;
    one.length = each->ai_addrlen;
    std::memcpy(&one.storage, each->ai_addr, each->ai_addrlen);
    const bool known = std::any_of(out.begin(), out.end(), [&](const SocketAddress& other) {
      return other.length == one.length && std::memcmp(&other.storage, &one.storage, one.length) == 0;
    });
    if (!known) out.push_back(one);
  }
  if (out.empty()) return unresolved("it has neither an IPv4 nor an IPv6 address");
  return out;
}

Status check_can_listen(const SocketAddress& address, std::string_view what) {
  const auto failed = [&](int error) {
    std::string fix;
    switch (error) {
      case EADDRINUSE:
        fix = "another process listens there; choose another port, or end that process";
        break;
      case EADDRNOTAVAIL:
        fix = "it is no address of this host; give one of its own, or run the sender where it is";
        break;
      case EACCES:
        fix = "ports below 1024 need privileges; choose a higher one";
        break;
      default:
        fix = "check the address";
    }
    return Status(
        StatusCode::kFailedPrecondition,
        fmt::format("{} cannot listen at {}: {} ({})", what, address.to_string(), std::strerror(error), fix),
        {.reason = Reason::kHost, .fault = Fault::kHost});
  };
  const UniqueFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return failed(errno);
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // Fails where somebody listens. Listening here as well would take in, and hang up on, who comes for the one that is
  // to listen.
  if (::bind(fd.get(), address.get(), address.length) != 0) return failed(errno);
  return {};
}

}  // namespace shardpull
