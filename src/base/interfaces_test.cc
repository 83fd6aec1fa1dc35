// The cases by their names in the headings below: hosts as they come, and which of their addresses is told.
#include "base/interfaces.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardpull {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// An address with a scope as a number, whether or not this machine has such an interface.
SocketAddress address(const std::string& text, std::uint32_t scope = 0) {
  SocketAddress out;
  auto* in6 = reinterpret_cast<sockaddr_in6*>(&out.storage);
  auto* in4 = reinterpret_cast<sockaddr_in*>(&out.storage);
  if (inet_pton(AF_INET6, text.c_str(), &in6->sin6_addr) == 1) {
    in6->sin6_family = AF_INET6;
    in6->sin6_scope_id = scope;
    out.length = sizeof *in6;
  } else {
    in4->sin_family = AF_INET;
    EXPECT_EQ(inet_pton(AF_INET, text.c_str(), &in4->sin_addr), 1) << text;
    out.length = sizeof *in4;
  }
  return out;
}

NetworkInterface interface(const std::string& name, const std::vector<InterfaceAddress>& addresses) {
  return {.name = name, .index = 7, .up = true, .running = true, .addresses = addresses};
}

NetworkInterface loopback() {
  NetworkInterface lo = interface("lo", {{address("127.0.0.1"), 8}, {address("::1"), 128}});
  lo.loopback = true;
  return lo;
}

std::vector<std::string> ranked(const std::vector<NetworkInterface>& interfaces) {
  std::vector<std::string> out;
  for (const Candidate& each : rank_addresses(interfaces)) out.push_back(each.address.host());
  return out;
}

// A host from which every target is reached by `from`, or none is when it is empty.
SourceToward always(const std::string& from) {
  return [from](const SocketAddress& target) -> Result<SocketAddress> {
    if (!from.empty()) return address(from);
    return Status(StatusCode::kUnavailable, "this host has no way to " + target.host());
  };
}

std::string chosen(const Result<std::string>& result) {
  return result.ok() ? *result : "error: " + result.status().message();
}

// ---- ranking ----------------------------------------------------------------------------------------------

TEST(Interfaces, Case117BridgeOfTheSameAddressOnEveryHost) {
  const std::vector<NetworkInterface> host = {loopback(), interface("docker0", {{address("172.17.0.1"), 16}}),
                                              interface("br-4f2a", {{address("172.18.0.1"), 16}}),
                                              interface("veth9", {{address("10.9.0.1"), 24}})};
  EXPECT_THAT(ranked(host), ElementsAre("10.9.0.1", "172.17.0.1", "172.18.0.1"));
  const HostPort wildcard{"0.0.0.0", 5000};
  EXPECT_EQ(chosen(choose_address(wildcard, {address("0.0.0.0")}, host, {}, true, always(""))), "10.9.0.1");
  // An explicit list overrides.
  EXPECT_EQ(chosen(choose_address(wildcard, {address("0.0.0.0")}, host, {"docker0"}, true, always(""))),
            "172.17.0.1");
}

TEST(Interfaces, Case118OverlayAddressAlone) {
  // The overlay is listed first, and under a name that says nothing.
  const std::vector<NetworkInterface> host = {
      loopback(), interface("flannel.1", {{address("10.244.0.0"), 32}}),
      interface("tailscale0", {{address("100.101.1.2"), 32}, {address("fd7a::2"), 128}}),
      interface("veth9", {{address("10.9.0.1"), 24}})};
  EXPECT_THAT(ranked(host), ElementsAre("10.9.0.1", "100.101.1.2", "fd7a::2", "10.244.0.0"));
  // Where the only real interface has such an address, as on some clouds, a bridge is still no better.
  EXPECT_THAT(ranked({interface("docker0", {{address("172.17.0.1"), 16}}),
                      interface("eth0", {{address("10.128.0.2"), 32}})}),
              ElementsAre("10.128.0.2", "172.17.0.1"));
}

TEST(Interfaces, Case119LinkLocalIsLast) {
  const std::vector<NetworkInterface> host = {
      interface("eth0", {{address("fe80::1", 7), 64}, {address("169.254.1.1"), 16}}), loopback(),
      interface("docker0", {{address("172.17.0.1"), 16}}),
      interface("eth1", {{address("10.14.1.72"), 20}, {address("fd00::1"), 64}})};
  EXPECT_THAT(ranked(host), ElementsAre("10.14.1.72", "fd00::1", "172.17.0.1", "169.254.1.1", "fe80::1%7"));
}

TEST(Interfaces, RoutableBeforePrivateAndIpv4First) {
  EXPECT_THAT(ranked({interface("eth0", {{address("fd00::5"), 64},
                                         {address("100.64.0.5"), 10},
                                         {address("192.168.0.5"), 24},
                                         {address("2001:db8::5"), 64},
                                         {address("198.51.100.5"), 24}})}),
              ElementsAre("198.51.100.5", "2001:db8::5", "100.64.0.5", "192.168.0.5", "fd00::5"));
}

TEST(Interfaces, WhatNoOtherHostReachesIsNeverTold) {
  NetworkInterface down = interface("eth0", {{address("10.0.0.1"), 24}});
  down.up = false;
  NetworkInterface unplugged = interface("eth1", {{address("10.0.1.1"), 24}});
  unplugged.running = false;
  EXPECT_THAT(ranked({loopback(), down, unplugged,
                      interface("eth2", {{address("fe80::2"), 64},  // no scope
                                         {address("127.0.1.1"), 8},
                                         {address("::ffff:127.0.0.1"), 128},
                                         {address("0.0.0.0"), 0},
                                         {address("::"), 0},
                                         {address("224.0.0.1"), 4},
                                         {address("ff02::1", 7), 8}})}),
              IsEmpty());
}

TEST(Interfaces, ABridgeWithoutPortsIsNoWayOut) {
  NetworkInterface bridge = interface("lan", {{address("10.0.0.1"), 24}});
  bridge.empty_bridge = true;
  EXPECT_THAT(ranked({bridge, interface("eth0", {{address("10.0.1.1"), 24}})}),
              ElementsAre("10.0.1.1", "10.0.0.1"));
}

// ---- --interface ------------------------------------------------------------------------------------------

TEST(Interfaces, ReadsAListOfNames) {
  EXPECT_EQ(*parse_interface_list("eth0,mlx5_0:1,eth0,eth1", "--interface"),
            (std::vector<std::string>{"eth0", "mlx5_0:1", "eth1"}));
  for (const char* text : {"", ",", "eth0,", ",eth0", "eth0,,eth1", "eth0, eth1", "eth0\n"}) {
    const auto parsed = parse_interface_list(text, "--interface");
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr("--interface")) << text;
  }
}

TEST(Interfaces, NamedOnesMustBeUsable) {
  NetworkInterface down = interface("eth1", {{address("10.0.1.1"), 24}});
  down.up = false;
  NetworkInterface unplugged = interface("eth2", {{address("10.0.2.1"), 24}});
  unplugged.running = false;
  const std::vector<NetworkInterface> host = {loopback(), interface("eth0", {{address("10.0.0.1"), 24}}),
                                              down, unplugged, interface("ib0", {})};
  const std::string all =
      "lo (127.0.0.1, ::1), eth0 (10.0.0.1), eth1 (down), eth2 (not connected), ib0 (no address)";
  const auto message = [&](const std::string& name) {
    const auto selected = select_interfaces(host, {"eth0", name});
    return selected.ok() ? std::string("accepted") : selected.status().message();
  };
  EXPECT_THAT(message("eth7"), AllOf(HasSubstr("eth7: there is no such"), HasSubstr(all)));
  EXPECT_THAT(message("eth1"), AllOf(HasSubstr("eth1: that network interface is down"), HasSubstr(all)));
  EXPECT_THAT(message("eth2"), AllOf(HasSubstr("eth2: that network interface is not conn"), HasSubstr(all)));
  EXPECT_THAT(message("ib0"), AllOf(HasSubstr("ib0: that network interface has no addr"), HasSubstr(all)));
  EXPECT_EQ(message("mlx5_0:1"), "accepted");
  EXPECT_EQ(select_interfaces(host, {"mlx5_0:1", "eth0"})->size(), 1u);
}

// ---- what a process tells ---------------------------------------------------------------------------------

TEST(Interfaces, TheSenderTellsTheRendezvousAddress) {
  const std::vector<NetworkInterface> host = {
      loopback(), interface("eth0", {{address("10.0.0.1"), 24}, {address("fd00::1"), 64}}),
      interface("eth1", {{address("10.0.1.1"), 24}})};
  const auto told = [&](const std::vector<SocketAddress>& resolved, std::vector<std::string> names = {}) {
    return chosen(choose_address({"node7", 5000}, resolved, host, names, true, always("")));
  };
  EXPECT_EQ(told({address("10.0.1.1")}), "10.0.1.1");
  EXPECT_EQ(told({address("fd00::1")}), "fd00::1");
  EXPECT_EQ(told({address("127.0.1.1"), address("10.0.0.1")}), "10.0.0.1");  // there is a choice
  EXPECT_EQ(told({address("203.0.113.9"), address("10.0.0.1")}), "10.0.0.1");
  EXPECT_EQ(told({address("127.0.0.1")}), "127.0.0.1");
  EXPECT_EQ(told({address("0.0.0.0")}), "10.0.0.1");
  EXPECT_EQ(told({address("::")}), "10.0.0.1");
  // Named interfaces decide what data travels over, wherever the rendezvous is.
  EXPECT_EQ(told({address("10.0.0.1")}, {"eth1"}), "10.0.1.1");
  EXPECT_EQ(told({address("fd00::1")}, {"eth1", "eth0"}), "fd00::1");
  EXPECT_EQ(told({address("127.0.1.1")}, {"lo"}), "127.0.1.1");
  EXPECT_EQ(told({address("10.0.0.1")}, {"mlx5_0:1"}), "10.0.0.1");
  EXPECT_THAT(told({address("10.0.0.1")}, {"lo"}), HasSubstr("no address that another host reaches"));
  EXPECT_THAT(told({address("203.0.113.9")}),
              AllOf(HasSubstr("node7 (203.0.113.9) is no address of this"), HasSubstr("eth1 (10.0.1.1)")));
}

TEST(Interfaces, OthersTellTheAddressTowardTheRendezvous) {
  const std::vector<NetworkInterface> host = {
      loopback(), interface("eth0", {{address("10.0.0.2"), 24}, {address("fd00::2"), 64}}),
      interface("eth1", {{address("10.0.1.2"), 24}, {address("fd01::2"), 64}})};
  const auto told = [&](const char* from, std::vector<std::string> names = {},
                        std::vector<SocketAddress> resolved = {address("10.0.0.1")}) {
    return chosen(choose_address({"node7", 5000}, resolved, host, names, false, always(from)));
  };
  EXPECT_EQ(told("10.0.1.2"), "10.0.1.2");
  EXPECT_EQ(told("10.0.1.2", {"eth0"}), "10.0.0.2");
  EXPECT_EQ(told("fd00::2", {"eth1"}), "fd01::2");  // of the rendezvous' family
  EXPECT_EQ(told("10.0.1.2", {"eth0", "eth1"}), "10.0.1.2");
  EXPECT_THAT(told(""), AllOf(HasSubstr("no way to 10.0.0.1"), HasSubstr("eth0 (10.0.0.2, fd00::2)")));
  EXPECT_THAT(told("10.0.1.2", {}, {address("0.0.0.0")}), HasSubstr("is no address to connect to"));
  // The first target that there is a way to, loopback last.
  const SourceToward only_v4 = [](const SocketAddress& target) -> Result<SocketAddress> {
    if (target.loopback()) return address("127.0.0.1");
    if (target.family() == AF_INET) return address("10.0.0.2");
    return Status(StatusCode::kUnavailable, "no way");
  };
  const std::vector<SocketAddress> three = {address("127.0.1.1"), address("2001:db8::1"),
                                            address("10.0.0.1")};
  EXPECT_EQ(chosen(choose_address({"node7", 5000}, three, host, {}, false, only_v4)), "10.0.0.2");
}

TEST(Interfaces, Case123LoopbackIsToldToNobodyElse) {
  const std::vector<NetworkInterface> host = {loopback(), interface("eth0", {{address("10.0.0.1"), 24}})};
  // A host whose name stands beside 127.0.1.1 in /etc/hosts.
  const std::string trap = loopback_trap({"node7", 5000}, {address("127.0.1.1")}, host);
  EXPECT_THAT(trap, AllOf(HasSubstr("\"node7\" means 127.0.1.1"), HasSubstr("/etc/hosts"),
                          HasSubstr("10.0.0.1"), HasSubstr("eth0")));
  EXPECT_THAT(loopback_trap({"127.0.0.1", 5000}, {address("127.0.0.1")}, host),
              AllOf(HasSubstr("127.0.0.1 is every host's name for itself"), HasSubstr("10.0.0.1"),
                    Not(HasSubstr("/etc/hosts"))));
  EXPECT_THAT(loopback_trap({"::1", 5000}, {address("::1")}, {loopback()}), HasSubstr("has no address"));
  EXPECT_EQ(loopback_trap({"node7", 5000}, {address("127.0.1.1"), address("10.0.0.1")}, host), "");
  EXPECT_EQ(loopback_trap({"10.0.0.1", 5000}, {address("10.0.0.1")}, host), "");
  EXPECT_EQ(loopback_trap({"node7", 5000}, {}, host), "");
  // Nobody need be told of what was meant.
  EXPECT_TRUE(means_loopback({"localhost", 5000}, {address("127.0.0.1"), address("::1")}));
  EXPECT_TRUE(means_loopback({"::1", 5000}, {address("::1")}));
  EXPECT_FALSE(means_loopback({"node7", 5000}, {address("127.0.1.1")}));
  EXPECT_FALSE(means_loopback({"10.0.0.1", 5000}, {address("10.0.0.1")}));
}

// ---- IPv6 as people write it ------------------------------------------------------------------------------

TEST(Interfaces, Case120Ipv6AddressesAreReadAndPrintedInOnePlace) {
  for (const char* text : {"[::1]:7000", "[2001:db8::1]:7000"}) {
    const auto parsed = parse_host_port(text, "--rendezvous");
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    const auto resolved = resolve(*parsed);
    ASSERT_TRUE(resolved.ok()) << resolved.status().message();
    EXPECT_EQ(resolved->front().to_string(), text);
  }
  const auto scoped = parse_host_port("[fe80::1%lo]:7000", "--rendezvous");
  ASSERT_TRUE(scoped.ok()) << scoped.status().message();
  EXPECT_EQ(scoped->host, "fe80::1%lo");
  if (if_nametoindex("lo") == 0) GTEST_SKIP() << "no interface lo";
  const auto resolved = resolve(*scoped);
  ASSERT_TRUE(resolved.ok()) << resolved.status().message();
  EXPECT_EQ(resolved->front().to_string(), "[fe80::1%lo]:7000");
}

TEST(Interfaces, Case121BracketsAreStrippedBeforeResolving) {
  for (const auto& [text, host] : {std::pair{"[::1]:5000", "::1"}, {"[2001:db8::1]:5000", "2001:db8::1"}}) {
    const auto parsed = parse_host_port(text, "--rendezvous");
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    EXPECT_EQ(parsed->host, host);
    EXPECT_EQ(resolve(*parsed)->front().host(), host);
  }
  for (const char* text : {"[::1", "::1]", "[::1:5000", "::1]:5000", "[[::1]]:5000", "[::1]", "::1"}) {
    const auto parsed = parse_host_port(text, "--rendezvous");
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr(text));
  }
}

TEST(Interfaces, Case122NoGroupOfAnAddressIsTakenForAPort) {
  for (const char* text : {"2605:340:cd51:4600::1", "2605:340:cd51:4600::1:7000", "2605:340"}) {
    const auto parsed = parse_host_port(text, "--rendezvous");
    if (text == std::string("2605:340")) {  // a host name and a port, whatever was meant
      EXPECT_EQ(*parsed, (HostPort{"2605", 340}));
      continue;
    }
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr("an IPv6 address in brackets"));
  }
}

// ---- this host --------------------------------------------------------------------------------------------

// `body` in a process with a network of its own, in which `commands` have run; it prints what it finds wrong.
// Skips where that is not allowed.
void in_own_network(const std::vector<std::string>& commands, const std::function<std::string()>& body) {
  constexpr int kSkipped = 77;
  std::fflush(nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (::unshare(CLONE_NEWNET) != 0) _exit(kSkipped);
    for (const std::string& command : commands) {
      if (std::system((command + " >/dev/null 2>&1").c_str()) != 0) _exit(kSkipped);
    }
    const std::string wrong = body();
    std::fputs(wrong.c_str(), stderr);
    std::fflush(stderr);
    _exit(wrong.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped) {
    GTEST_SKIP() << "needs root and iproute2, and the kernel's veth and bridge";
  }
  EXPECT_EQ(status, 0);
}

// The kernel tells of a cable a moment after both its ends have changed.
std::string wait_for_carrier(const std::string& interface, bool carrier) {
  return fmt::format("for i in $(seq 250); do ip link show {} | grep -q NO-CARRIER {} break; sleep 0.02; done",
                     interface, carrier ? "||" : "&&");
}

std::string differs(const std::string& what, const std::string& got, const std::string& expected) {
  return got == expected ? "" : fmt::format("{}: {}, expected {}\n", what, got, expected);
}

TEST(Interfaces, ListsWhatTheSystemHas) {
  in_own_network({"ip link set lo up", "ip link add eth0 type veth peer name eth1",
                  "ip addr add 10.9.0.1/20 dev eth0", "ip addr add fd00::9/64 dev eth0 nodad",
                  "ip addr add 10.9.0.77/32 dev eth0 label eth0:1", "ip link set eth0 up",
                  "ip link set eth1 up", "ip addr add 10.8.0.1/24 dev eth1", "ip link set eth1 down",
                  wait_for_carrier("eth0", false)},
                 [] {
                   const auto listed = list_interfaces();
                   if (!listed.ok()) return listed.status().message() + "\n";
                   std::string wrong;
                   for (const NetworkInterface& each : *listed) {
                     wrong += differs(each.name + " up", each.up ? "yes" : "no",
                                      each.name == "eth1" ? "no" : "yes");
                     wrong += differs(each.name + " loopback", each.loopback ? "yes" : "no",
                                      each.name == "lo" ? "yes" : "no");
                     if (each.index == 0) wrong += each.name + " has no index\n";
                     std::string prefixes;
                     for (const InterfaceAddress& its : each.addresses) {
                       if (!its.address.host().starts_with("fe80")) {
                         prefixes += fmt::format("{}/{} ", its.address.host(), its.prefix);
                       }
                     }
                     if (each.name == "eth0") {
                       wrong += differs("eth0", prefixes, "10.9.0.1/20 10.9.0.77/32 fd00::9/64 ");
                       // The other end is down.
                       wrong += differs("eth0 running", each.running ? "yes" : "no", "no");
                     }
                   }
                   return wrong + differs("interfaces", std::to_string(listed->size()), "3");
                 });
}

// Goal: a peer behind the good interface is reached from it, whatever bridges and overlays there are.
TEST(Interfaces, TakesTheWayTheSystemTakes) {
  in_own_network(
      {"ip link set lo up", "ip link add docker0 type bridge", "ip addr add 172.17.0.1/16 dev docker0",
       "ip link set docker0 up", "ip link add flannel.1 type veth peer name other",
       "ip addr add 10.244.0.0/32 dev flannel.1", "ip link set flannel.1 up", "ip link set other up",
       "ip link add net0 type veth peer name net1", "ip addr add 10.9.0.1/24 dev net0",
       "ip addr add fd09::1/64 dev net0 nodad", "ip link set net0 up", "ip link set net1 up",
       wait_for_carrier("net0", true), wait_for_carrier("flannel.1", true)},
      [] {
        std::string wrong;
        const auto told = [&](const HostPort& rendezvous, bool sender, std::vector<std::string> names = {}) {
          return chosen(advertised_address(rendezvous, names, sender));
        };
        wrong += differs("toward a peer", told({"10.9.0.2", 5000}, false), "10.9.0.1");
        wrong += differs("toward an IPv6 peer", told({"fd09::2", 5000}, false), "fd09::1");
        wrong += differs("toward itself", told({"10.9.0.1", 5000}, false), "10.9.0.1");
        wrong += differs("toward loopback", told({"127.0.0.1", 5000}, false), "127.0.0.1");
        wrong += differs("of the sender", told({"10.9.0.1", 5000}, true), "10.9.0.1");
        wrong += differs("of any", told({"0.0.0.0", 5000}, true), "10.9.0.1");
        wrong += differs("as asked", told({"10.9.0.2", 5000}, false, {"docker0"}), "172.17.0.1");
        const std::string lost = told({"203.0.113.1", 5000}, false);
        if (lost.find("no way to 203.0.113.1") == std::string::npos ||
            lost.find("net0 (10.9.0.1") == std::string::npos) {
          wrong += lost + "\n";
        }
        const auto listed = list_interfaces();
        for (const NetworkInterface& each : *listed) {
          if (each.name == "net1" && each.empty_bridge) wrong += "net1 is no bridge\n";
        }
        return wrong;
      });
}

// Goal: with no interface but a loopback that is down, all of it says so and names what there is.
TEST(Interfaces, AHostWithoutANetwork) {
  in_own_network({}, [] {
    std::string wrong;
    const auto listed = list_interfaces();
    if (!rank_addresses(*listed).empty()) wrong += "an address was found\n";
    for (const bool sender : {false, true}) {
      const auto told = advertised_address({"10.9.0.2", 5000}, {}, sender);
      if (told.ok() || told.status().message().find("lo (down)") == std::string::npos) {
        wrong += chosen(told) + "\n";
      }
    }
    return wrong;
  });
}

}  // namespace
}  // namespace shardpull
