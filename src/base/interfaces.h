// This host's network interfaces, and which of its addresses other hosts are told.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/host_port.h"
#include "shardpull/status.h"

namespace shardpull {

struct InterfaceAddress {
  SocketAddress address;    // port 0; a link-local IPv6 one with its scope
  std::uint8_t prefix = 0;  // bits of it that name the network
};

struct NetworkInterface {
  std::string name;
  unsigned index = 0;
  bool up = false;       // switched on
  bool running = false;  // and connected
  bool loopback = false;
  bool empty_bridge = false;  // a bridge that connects nothing
  std::vector<InterfaceAddress> addresses;

  bool usable() const { return up && running; }
};

// All of them, in the system's order; the addresses of an alias ("eth0:1") are its interface's.
Result<std::vector<NetworkInterface>> list_interfaces();

// "eth0 (10.0.0.7, fd00::7), eth1 (down), ib0 (no address)"; "none" for none.
std::string describe(const std::vector<NetworkInterface>& interfaces);

// "eth0,eth1" as names. INVALID_ARGUMENT naming `what` when one is empty, or too long for an interface.
Result<std::vector<std::string>> parse_interface_list(std::string_view text, std::string_view what);

// Those which the user named, in that order. A name with a colon ("mlx5_0:1") is that of a UCX device, which
// has no address of its own, and is left out. Errors name the interface, what it lacks (it is unknown, down,
// or has no address) and those that exist.
Result<std::vector<NetworkInterface>> select_interfaces(const std::vector<NetworkInterface>& interfaces,
                                                        const std::vector<std::string>& names);

struct Candidate {
  std::string interface;
  SocketAddress address;
};

// The addresses that can be told to another host, best first:
//   1. of ordinary interfaces     2. alone in their network (/32, /128), as overlays have them
//   3. of bridges between this host's containers, which look alike on many hosts     4. link-local ones
// and within each routable ones before private (10.0.0.0/8 and the like, fc00::/7), IPv4 before IPv6, else as
// listed. Never: loopback, unspecified and multicast addresses, IPv6 link-local ones without a scope, and
// interfaces that are down or not connected.
std::vector<Candidate> rank_addresses(const std::vector<NetworkInterface>& interfaces);

// The address of this host from which the system would send to `target`. Sends nothing. UNAVAILABLE when
// there is no way to it.
Result<SocketAddress> source_address_toward(const SocketAddress& target);
using SourceToward = std::function<Result<SocketAddress>(const SocketAddress&)>;

// What this process tells its peers as the host it is reached at: a numeric address, never a wildcard.
// `resolved` is what the rendezvous host means here.
//   The sender: the rendezvous host itself, which must be an address of this host, and no loopback one where
//   there is a choice. A wildcard stands for the best of rank_addresses.
//   Others: the address from which the rendezvous is reached.
// With `names` (--interface) it is an address of those interfaces: that one if they have it, else the best
// they have of the rendezvous' family, else the best they have. A loopback address comes out only where the
// rendezvous host is one, which is right for a fleet on one host alone (loopback_trap).
Result<std::string> choose_address(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved,
                                   const std::vector<NetworkInterface>& interfaces,
                                   const std::vector<std::string>& names, bool self_is_sender,
                                   const SourceToward& source);
// The same with this host's facts. May ask a name server: blocks as long as the resolver does.
Result<std::string> advertised_address(const HostPort& rendezvous, const std::vector<std::string>& names,
                                       bool self_is_sender);

// Why no other host can meet this one at `rendezvous`: all addresses in `resolved` are loopback ones. Empty
// when that is not so. Names the host, what it means here (/etc/hosts often has a host's own name beside
// 127.0.1.1) and an address to give instead.
std::string loopback_trap(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved,
                          const std::vector<NetworkInterface>& interfaces);
// The same with this host's interfaces.
std::string loopback_trap(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved);

// Whether whoever wrote `rendezvous` means this host alone: "localhost", or a loopback address in figures.
bool means_loopback(const HostPort& rendezvous, const std::vector<SocketAddress>& resolved);

}  // namespace shardpull
