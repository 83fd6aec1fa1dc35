#include "base/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <tuple>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace shardpull {
namespace {

Status unusable(std::string message) {
  return Status(StatusCode::kUnavailable, std::move(message),
                {.reason = Reason::kHost, .fault = Fault::kHost});
}

Status bad_argument(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = Reason::kBadArgument});
}

// The bytes of an address; those of the IPv4 one it maps, if it does. Empty for other families.
struct AddressBytes {
  std::array<std::uint8_t, 16> bytes{};
  std::size_t count = 0;
};

AddressBytes bytes_of(const SocketAddress& address) {
  AddressBytes out;
  if (address.family() == AF_INET) {
    out.count = 4;
    std::memcpy(out.bytes.data(), &reinterpret_cast<const sockaddr_in*>(address.get())->sin_addr, 4);
  } else if (address.family() == AF_INET6) {
    const in6_addr& in6 = reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr;
    out.count = IN6_IS_ADDR_V4MAPPED(&in6) ? 4 : 16;
    std::memcpy(out.bytes.data(), in6.s6_addr + 16 - out.count, out.count);
  }
  return out;
}

std::uint32_t scope_of(const SocketAddress& address) {
  return address.family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_scope_id
                                      : 0;
}

bool wildcard(const SocketAddress& address) {
  const AddressBytes it = bytes_of(address);
  return std::all_of(it.bytes.begin(), it.bytes.end(), [](std::uint8_t byte) { return byte == 0; });
}

bool multicast(const SocketAddress& address) {
  const AddressBytes it = bytes_of(address);
  return it.count == 4 ? it.bytes[0] >= 224 : it.bytes[0] == 0xFF;
}

bool link_local(const SocketAddress& address) {
  const AddressBytes it = bytes_of(address);
  return it.count == 4 ? it.bytes[0] == 169 && it.bytes[1] == 254
                       : it.bytes[0] == 0xFE && (it.bytes[1] & 0xC0) == 0x80;
}

bool is_private(const SocketAddress& address) {
  const AddressBytes it = bytes_of(address);
  if (it.count == 16) return (it.bytes[0] & 0xFE) == 0xFC;
  return it.bytes[0] == 10 || (it.bytes[0] == 172 && (it.bytes[1] & 0xF0) == 16) ||
         (it.bytes[0] == 192 && it.bytes[1] == 168) ||
         (it.bytes[0] == 100 && (it.bytes[1] & 0xC0) == 64);  // shared address space of carriers and overlays
}

bool same_host(const SocketAddress& a, const SocketAddress& b) {
  const AddressBytes left = bytes_of(a), right = bytes_of(b);
  return left.count != 0 && left.count == right.count && left.bytes == right.bytes &&
         scope_of(a) == scope_of(b);
}

// Named as container runtimes and virtual machine managers name the bridges they make.
bool container_bridge(const NetworkInterface& interface) {
  constexpr std::array<std::string_view, 9> kPrefixes = {"docker", "br-",   "cni",   "flannel", "virbr",
                                                         "podman", "lxcbr", "lxdbr", "kube-"};
  return interface.empty_bridge ||
         std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](std::string_view prefix) { return interface.name.starts_with(prefix); });
}

// Why an address cannot be told to another host at all.
bool never_told(const NetworkInterface& interface, const SocketAddress& address) {
  return !interface.usable() || interface.loopback || bytes_of(address).count == 0 || address.loopback() ||
         wildcard(address) || multicast(address) ||
         (bytes_of(address).count == 16 && link_local(address) && scope_of(address) == 0);
}

std::uint8_t prefix_of(const sockaddr* netmask) {
  if (netmask == nullptr) return 0;
  SocketAddress mask;
  mask.length = netmask->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  std::memcpy(&mask.storage, netmask, mask.length);
  std::uint8_t bits = 0;
  const AddressBytes it = bytes_of(mask);
  for (const std::uint8_t byte : it.bytes) bits = static_cast<std::uint8_t>(bits + std::popcount(byte));
  return bits;
}

// Reads /sys, which shows the interfaces of where it was mounted: absent ones are none.
bool is_empty_bridge(const std::string& name) {
  std::error_code error;
  const auto ports = std::filesystem::directory_iterator("/sys/class/net/" + name + "/brif", error);
  return !error && ports == std::filesystem::directory_iterator();
}

std::vector<Candidate> of_family(const std::vector<Candidate>& all, int family) {
  std::vector<Candidate> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out),
               [&](const Candidate& each) { return each.address.family() == family; });
  return out;
}

std::string hosts(const std::vector<SocketAddress>& addresses) {
  std::string text;
  for (const SocketAddress& each : addresses) text += (text.empty() ? "" : ", ") + each.host();
  return text;
}

// "node7 (10.0.0.7)"; a numeric host says it all.
std::string with_meaning(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved) {
  if (resolved.size() == 1 && resolved.front().host() == rendezvous.host) return rendezvous.host;
  return fmt::format("{} ({})", rendezvous.host, hosts(resolved));
}

// Of the addresses that a name of this host has, the one to listen at: no loopback where there is a choice.
std::optional<SocketAddress> own_address(const std::vector<SocketAddress>& resolved,
                                         const std::vector<NetworkInterface>& interfaces) {
  std::optional<SocketAddress> loopback;
  for (const SocketAddress& each : resolved) {
    if (each.loopback()) {
      if (!loopback) loopback = each;
      continue;
    }
    for (const NetworkInterface& interface : interfaces) {
      for (const InterfaceAddress& its : interface.addresses) {
        if (interface.usable() && same_host(its.address, each)) return each;
      }
    }
  }
  return loopback;
}

}  // namespace

Result<std::vector<NetworkInterface>> list_interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    return unusable(fmt::format("the network interfaces cannot be listed: {}", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::vector<NetworkInterface> out;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    // An alias "eth0:1" is a label on another address of eth0.
    const std::string label = each->ifa_name;
    const std::string name = label.substr(0, label.find(':'));
    auto found = std::find_if(out.begin(), out.end(),
                              [&](const NetworkInterface& other) { return other.name == name; });
    if (found == out.end()) {
      NetworkInterface one;
      one.name = name;
      one.index = if_nametoindex(name.c_str());
      one.up = (each->ifa_flags & IFF_UP) != 0;
      one.running = (each->ifa_flags & IFF_RUNNING) != 0;
      one.loopback = (each->ifa_flags & IFF_LOOPBACK) != 0;
      one.empty_bridge = is_empty_bridge(name);
      found = out.insert(out.end(), std::move(one));
    }
    if (each->ifa_addr == nullptr) continue;
    const int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress its;
    its.address.length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    std::memcpy(&its.address.storage, each->ifa_addr, its.address.length);
    its.prefix = prefix_of(each->ifa_netmask);
    found->addresses.push_back(its);
  }
  return out;
}

std::string describe(const std::vector<NetworkInterface>& interfaces) {
  std::string text;
  for (const NetworkInterface& each : interfaces) {
    std::string what;
    if (!each.up) {
      what = "down";
    } else if (!each.running) {
      what = "not connected";
    } else if (each.addresses.empty()) {
      what = "no address";
    } else {
      for (const InterfaceAddress& its : each.addresses) {
        what += (what.empty() ? "" : ", ") + its.address.host();
      }
    }
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", each.name, what);
  }
  return text.empty() ? "none" : text;
}

Result<std::vector<std::string>> parse_interface_list(std::string_view text, std::string_view what) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view name = text.substr(begin, end - begin);
    const bool fits = !name.empty() && name.size() < 64 &&
                      std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 0x7F; });
    if (!fits) {
      return bad_argument(
          fmt::format("{}: \"{}\" has no interface's name between its commas; expected names "
                      "such as eth0 or eth0,eth1",
                      what, text.substr(0, 100)));
    }
    if (std::find(out.begin(), out.end(), name) == out.end()) out.emplace_back(name);
    begin = end + 1;
  }
  return out;
}

Result<std::vector<NetworkInterface>> select_interfaces(const std::vector<NetworkInterface>& interfaces,
                                                        const std::vector<std::string>& names) {
  std::vector<NetworkInterface> out;
  for (const std::string& name : names) {
    if (name.find(':') != std::string::npos) continue;
    const auto found = std::find_if(interfaces.begin(), interfaces.end(),
                                    [&](const NetworkInterface& each) { return each.name == name; });
    std::string lack;
    if (found == interfaces.end()) {
      lack = "there is no such network interface";
    } else if (!found->up) {
      lack = fmt::format("that network interface is down (ip link set {} up)", name);
    } else if (!found->running) {
      lack = "that network interface is not connected";
    } else if (found->addresses.empty()) {
      lack = "that network interface has no address";
    }
    if (!lack.empty()) {
      return bad_argument(
          fmt::format("--interface {}: {}; this host has {}", name, lack, describe(interfaces)));
    }
    out.push_back(*found);
  }
  return out;
}

std::vector<Candidate> rank_addresses(const std::vector<NetworkInterface>& interfaces) {
  using Rank = std::tuple<int, bool, bool>;
  std::vector<std::pair<Rank, Candidate>> ranked;
  for (const NetworkInterface& interface : interfaces) {
    for (const InterfaceAddress& its : interface.addresses) {
      if (never_told(interface, its.address)) continue;
      const std::size_t bytes = bytes_of(its.address).count;
      int kind = 1;
      if (its.prefix == 8 * bytes) kind = 2;
      if (container_bridge(interface)) kind = 3;
      if (link_local(its.address)) kind = 4;
      ranked.push_back({{kind, is_private(its.address), bytes == 16}, {interface.name, its.address}});
    }
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Candidate> out;
  for (auto& [rank, candidate] : ranked) out.push_back(std::move(candidate));
  return out;
}

Result<SocketAddress> source_address_toward(const SocketAddress& target) {
  const auto failed = [&](int error) {
    return unusable(fmt::format("this host has no way to {}: {}", target.host(), std::strerror(error)));
  };
  const UniqueFd fd(::socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd) return failed(errno);
  // To connect a datagram socket chooses a route and sends nothing. Some systems refuse port 0.
  SocketAddress there = target;
  if (there.port() == 0) {
    if (there.family() == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&there.storage)->sin6_port = htons(9);
    } else {
      reinterpret_cast<sockaddr_in*>(&there.storage)->sin_port = htons(9);
    }
  }
  if (::connect(fd.get(), there.get(), there.length) != 0) return failed(errno);
  SocketAddress here;
  here.length = sizeof here.storage;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&here.storage), &here.length) != 0) {
    return failed(errno);
  }
  if (here.family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&here.storage)->sin6_port = 0;
  } else {
    reinterpret_cast<sockaddr_in*>(&here.storage)->sin_port = 0;
  }
  return here;
}

Result<std::string> choose_address(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved,
                                   const std::vector<NetworkInterface>& interfaces,
                                   const std::vector<std::string>& names, bool self_is_sender,
                                   const SourceToward& source) {
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<NetworkInterface> named, select_interfaces(interfaces, names));
  const bool any = std::any_of(resolved.begin(), resolved.end(), wildcard);
  if (any && !self_is_sender) {
    return bad_argument(fmt::format(
        "--rendezvous {}: {} is no address to connect to; give the address of the host of trainer 0",
        to_string(rendezvous), rendezvous.host));
  }

  std::optional<SocketAddress> own;
  Status why;
  if (self_is_sender && !any) {
    own = own_address(resolved, interfaces);
    if (!own) {
      return unusable(fmt::format(
          "--rendezvous {}: {} is no address of this host, which has {}; trainer 0 listens there, so give an "
          "address of its host, or run it where that address is",
          to_string(rendezvous), with_meaning(rendezvous, resolved), describe(interfaces)));
    }
  } else if (!self_is_sender) {
    std::vector<SocketAddress> targets = resolved;
    std::stable_partition(targets.begin(), targets.end(),
                          [](const SocketAddress& each) { return !each.loopback(); });
    for (const SocketAddress& target : targets) {
      auto from = source(target);
      if (from.ok()) {
        own = *from;
        break;
      }
      if (why.ok()) why = from.status();
    }
  }

  if (!named.empty()) {
    for (const NetworkInterface& interface : named) {
      if (own && own->loopback() && interface.loopback) return own->host();  // all of 127.0.0.0/8 is its own
      for (const InterfaceAddress& its : interface.addresses) {
        if (own && same_host(its.address, *own)) return own->host();
      }
    }
    // In the user's order of interfaces, and within each by rank.
    std::vector<Candidate> theirs;
    for (const NetworkInterface& interface : named) {
      const auto ranked = rank_addresses({interface});
      theirs.insert(theirs.end(), ranked.begin(), ranked.end());
    }
    if (own) {
      const auto same = of_family(theirs, own->family());
      if (!same.empty()) return same.front().address.host();
    }
    if (!theirs.empty()) return theirs.front().address.host();
    return unusable(fmt::format("--interface: {} {} no address that another host reaches; this host has {}",
                                describe(named), named.size() == 1 ? "has" : "have", describe(interfaces)));
  }
  if (own) return own->host();
  if (any) {
    const auto best = rank_addresses(interfaces);
    if (!best.empty()) return best.front().address.host();
    return unusable(fmt::format(
        "--rendezvous {}: this host has no address that another host reaches, it has {}; connect an "
        "interface, or give 127.0.0.1 for a fleet on this host alone",
        to_string(rendezvous), describe(interfaces)));
  }
  return unusable(fmt::format("--rendezvous {}: {}; this host has {}", to_string(rendezvous),
                              why.ok() ? "it has no address" : why.message(), describe(interfaces)));
}

Result<std::string> advertised_address(const HostPort& rendezvous, const std::vector<std::string>& names,
                                       bool self_is_sender) {
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<NetworkInterface> interfaces, list_interfaces());
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<SocketAddress> resolved, resolve(rendezvous));
  return choose_address(rendezvous, resolved, interfaces, names, self_is_sender, source_address_toward);
}

std::string loopback_trap(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved,
                          const std::vector<NetworkInterface>& interfaces) {
  const bool all =
      !resolved.empty() && std::all_of(resolved.begin(), resolved.end(),
                                       [](const SocketAddress& each) { return each.loopback(); });
  if (!all) return {};
  const bool numeric = resolved.size() == 1 && resolved.front().host() == rendezvous.host;
  const auto best = rank_addresses(interfaces);
  const std::string instead = best.empty() ? "this host has no address that another host reaches"
                                           : fmt::format("give {}, an address of this host's {}",
                                                         best.front().address.host(), best.front().interface);
  if (numeric) {
    return fmt::format("{} is every host's name for itself, so no other host can meet this one there: {}",
                       rendezvous.host, instead);
  }
  return fmt::format(
      "\"{}\" means {} on this host (see /etc/hosts), which no other host can reach: {}, or remove that line",
      rendezvous.host, hosts(resolved), instead);
}

std::string loopback_trap(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved) {
  const auto interfaces = list_interfaces();
  return interfaces.ok() ? loopback_trap(rendezvous, resolved, *interfaces) : std::string();
}

bool means_loopback(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved) {
  return rendezvous.host == "localhost" ||
         (resolved.size() == 1 && resolved.front().loopback() && resolved.front().host() == rendezvous.host);
}

}  // namespace shardpull
