// Each fault of a host by itself: the finding that names it, what it makes fail, and the command that helps.
#include "cli/host_report.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace shardpull::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::uint64_t kGiB = 1ull << 30;

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

NetworkInterface interface(const std::string& name, const std::vector<SocketAddress>& addresses) {
  NetworkInterface out;
  out.name = name;
  out.index = 2;
  out.up = out.running = true;
  for (const SocketAddress& each : addresses) out.addresses.push_back({each, 24});
  return out;
}

Status refused(const std::string& message) {
  return Status(StatusCode::kPermissionDenied, message, {.reason = Reason::kHost, .fault = Fault::kHost});
}

// A host on which everything is well.
HostFacts healthy() {
  HostFacts facts;
  facts.limits = {.online_cores = 16,
                  .usable_cores = 16,
                  .memory_bytes = 64 * kGiB,
                  .available_bytes = 60 * kGiB,
                  .open_files = 65536,
                  .open_files_hard = 65536,
                  .ptrace_scope = 1,
                  .receive_buffer_bytes = 16u << 20,
                  .send_buffer_bytes = 16u << 20,
                  .dev_shm = Space{.total_bytes = 32 * kGiB, .free_bytes = 32 * kGiB}};
  facts.grpc = "gRPC 1.51.1";
  facts.ucx = "UCX 1.13.1, /lib/libucp.so.0";
  for (const TransportKind kind :
       {TransportKind::kShm, TransportKind::kCma, TransportKind::kTcp, TransportKind::kUcx}) {
    facts.transports.push_back({.kind = kind, .usable = {}, .rate = TransferRate{4'000'000, 1'000'000}});
  }
  facts.memcpy = TransferRate{8'000'000, 1'000'000};
  NetworkInterface lo = interface("lo", {address("127.0.0.1")});
  lo.loopback = true;
  facts.interfaces = {lo, interface("eth0", {address("10.0.0.7")})};
  facts.hostname = "node7";
  facts.hostname_addresses = {address("10.0.0.7")};
  facts.temporary_directory = {.path = "/tmp", .usable = {}, .space = Space{100 * kGiB, 50 * kGiB}};
  return facts;
}

RendezvousFacts rendezvous(const std::string& host, const std::vector<SocketAddress>& addresses, bool local) {
  RendezvousFacts out;
  out.address = {host, 5000};
  out.addresses = addresses;
  out.local = local;
  out.told = "10.0.0.7";
  return out;
}

Finding named(const std::vector<Finding>& findings, const std::string& name) {
  const auto found =
      std::find_if(findings.begin(), findings.end(), [&](const Finding& each) { return each.name == name; });
  EXPECT_NE(found, findings.end()) << name;
  return found == findings.end() ? Finding{} : *found;
}

std::vector<std::string> not_ok(const std::vector<Finding>& findings) {
  std::vector<std::string> out;
  for (const Finding& each : findings) {
    if (each.severity != Severity::kOk)
      out.push_back(std::string(to_string(each.severity)) + " " + each.name);
  }
  return out;
}

Finding finding(const HostFacts& facts, const std::string& name, const DoctorArguments& arguments = {}) {
  return named(findings_of(facts, arguments), name);
}

TEST(HostReport, NothingIsWrongWithAHealthyHost) {
  HostFacts facts = healthy();
  facts.rendezvous = rendezvous("node7", {address("10.0.0.7")}, true);
  facts.fleet_directory = {.path = "/run/fleet", .usable = {}, .space = Space{kGiB, kGiB}};
  const auto findings = findings_of(facts, {});
  EXPECT_THAT(not_ok(findings), IsEmpty());
  EXPECT_EQ(worst(findings), Severity::kOk);
  std::set<std::string> names;
  for (const Finding& each : findings) {
    EXPECT_TRUE(names.insert(each.name).second) << each.name;
    EXPECT_FALSE(each.text.empty()) << each.name;
    EXPECT_FALSE(each.transports.empty()) << each.name;
  }
  EXPECT_TRUE(names.contains("advertised-address"));
}

TEST(HostReport, OnlyWhatTheTransportNeeds) {
  HostFacts facts = healthy();
  facts.transports[2].usable = refused("no TCP");
  facts.limits.receive_buffer_bytes = 212992;
  facts.interfaces.pop_back();
  EXPECT_EQ(worst(findings_of(facts, {})), Severity::kFails);
  facts.transports = {facts.transports[0]};
  const auto of_shm = findings_of(facts, {.transport = TransportKind::kShm});
  EXPECT_EQ(worst(of_shm), Severity::kOk);
  for (const Finding& each : of_shm) EXPECT_NE(each.name, "network");
}

TEST(HostReport, UcxIsNotThere) {
  HostFacts facts = healthy();
  facts.ucx = "";
  facts.ucx_status = Status(StatusCode::kUnavailable, "libucp.so.0 is not there");
  facts.transports[2].usable = facts.transports[3].usable = facts.ucx_status;
  const auto findings = findings_of(facts, {});
  EXPECT_THAT(not_ok(findings), ElementsAre("fails tcp", "fails ucx"));
  EXPECT_THAT(named(findings, "tcp").text, HasSubstr("libucp.so.0 is not there"));
  EXPECT_THAT(named(findings, "tcp").fix, HasSubstr("apt-get install libucx0"));
  EXPECT_THAT(as_text(facts, findings), HasSubstr("no UCX: libucp.so.0 is not there"));
  facts.ucx_status = Status(StatusCode::kUnimplemented, "this build is without UCX");
  EXPECT_THAT(finding(facts, "ucx").fix, HasSubstr("build again"));
}

TEST(HostReport, ReadsAcrossProcessesAreFiltered) {
  HostFacts facts = healthy();
  facts.transports[1].usable = refused("reading the memory of this process is not permitted");
  const Finding found = finding(facts, "cma");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.text, HasSubstr("is not permitted"));
  EXPECT_THAT(found.fix, AllOf(HasSubstr("--cap-add=SYS_PTRACE"), HasSubstr("process_vm_readv"),
                               HasSubstr("--transport shm")));
}

TEST(HostReport, YamaForbidsReads) {
  HostFacts facts = healthy();
  for (const int scope : {-1, 0, 1}) {
    facts.limits.ptrace_scope = scope;
    EXPECT_EQ(finding(facts, "ptrace-scope").severity, Severity::kOk) << scope;
  }
  facts.limits.ptrace_scope = 2;
  facts.transports[1].usable = refused("not permitted");
  EXPECT_THAT(not_ok(findings_of(facts, {})), ElementsAre("fails cma", "fails ptrace-scope"));
  EXPECT_THAT(finding(facts, "ptrace-scope").fix, HasSubstr("sysctl -w kernel.yama.ptrace_scope=1"));
  EXPECT_THAT(finding(facts, "cma").fix, HasSubstr("sysctl -w kernel.yama.ptrace_scope=1"));
  facts.limits.may_ptrace = true;
  EXPECT_EQ(finding(facts, "ptrace-scope").severity, Severity::kOk);
  facts.limits.ptrace_scope = 3;
  EXPECT_EQ(finding(facts, "ptrace-scope").severity, Severity::kFails);
  EXPECT_THAT(finding(facts, "ptrace-scope").fix, HasSubstr("reboot"));
}

TEST(HostReport, LittleMemory) {
  HostFacts facts = healthy();
  facts.limits.available_bytes = 100u << 20;
  facts.limits.group_bytes = 512u << 20;
  const Finding found = finding(facts, "memory");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.text, AllOf(HasSubstr("100 MiB available"), HasSubstr("512 MiB of the host's 64 GiB"),
                                HasSubstr("do not fit")));
  EXPECT_THAT(found.fix, AllOf(HasSubstr("docker run --memory"), HasSubstr("--max-chunk-bytes")));
  facts.limits.group_bytes = kNoLimit;
  EXPECT_THAT(finding(facts, "memory").fix, HasSubstr("end other programs"));
  facts.limits.available_bytes = kNoLimit;
  EXPECT_EQ(finding(facts, "memory").severity, Severity::kOk);
}

TEST(HostReport, SharedMemoryBoundsUcxAlone) {
  HostFacts facts = healthy();
  facts.limits.dev_shm = Space{1u << 20, 1u << 20};
  Finding found = finding(facts, "shared-memory");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.transports, ElementsAre(TransportKind::kUcx));
  EXPECT_THAT(found.text, HasSubstr("--transport ucx fails"));
  EXPECT_THAT(found.fix, AllOf(HasSubstr("mount -o remount,size=256m /dev/shm"), HasSubstr("--shm-size=256m"),
                               HasSubstr("--transport tcp")));
  // What containers have by default is enough for a few processes.
  facts.limits.dev_shm = Space{64u << 20, 64u << 20};
  found = finding(facts, "shared-memory");
  EXPECT_EQ(found.severity, Severity::kSlow);
  EXPECT_THAT(found.text, HasSubstr("from the 13th process on this host on; the fleet has 16"));
  EXPECT_EQ(finding(facts, "shared-memory", {.fleet_ranks = 6, .fleet_workers = 6}).severity, Severity::kOk);
  EXPECT_EQ(
      finding(facts, "shared-memory", {.fleet_ranks = 6, .fleet_workers = 6, .ucx_workers = 2}).severity,
      Severity::kSlow);
  facts.limits.dev_shm.reset();
  EXPECT_EQ(finding(facts, "shared-memory").severity, Severity::kFails);
}

TEST(HostReport, LockedMemoryMattersWithRdma) {
  HostFacts facts = healthy();
  facts.limits.locked_bytes = 65536;
  Finding found = finding(facts, "locked-memory");
  EXPECT_EQ(found.severity, Severity::kOk);
  EXPECT_THAT(found.text, AllOf(HasSubstr("64 KiB may be locked"), HasSubstr("does not have")));
  facts.limits.rdma = true;
  found = finding(facts, "locked-memory");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.fix, AllOf(HasSubstr("ulimit -l unlimited"), HasSubstr("--ulimit memlock=-1")));
  facts.limits.locked_bytes = kNoLimit;
  EXPECT_EQ(finding(facts, "locked-memory").severity, Severity::kOk);
}

TEST(HostReport, OpenFilesAgainstTheFleet) {
  HostFacts facts = healthy();
  facts.limits.open_files = 64;
  Finding found = finding(facts, "open-files");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.text, AllOf(HasSubstr("64 files"), HasSubstr("fleet of 8x8 needs up to 104")));
  EXPECT_EQ(found.fix, "ulimit -n 1024");
  facts.limits.open_files = facts.limits.open_files_hard = 1024;
  EXPECT_EQ(finding(facts, "open-files").severity, Severity::kOk);
  found = finding(facts, "open-files", {.fleet_ranks = 64, .fleet_workers = 512});
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.fix, AllOf(HasSubstr("ulimit -n 4096"), HasSubstr("hard limit of 1024"),
                               HasSubstr("--ulimit nofile=4096")));
  EXPECT_LT(descriptors_needed(64, 512, TransportKind::kShm, 1),
            descriptors_needed(64, 512, TransportKind::kTcp, 1));
  EXPECT_LT(descriptors_needed(64, 512, TransportKind::kTcp, 1),
            descriptors_needed(64, 512, TransportKind::kTcp, 4));
}

TEST(HostReport, FewCores) {
  HostFacts facts = healthy();
  facts.limits.usable_cores = 1;
  EXPECT_EQ(finding(facts, "cores").severity, Severity::kSlow);
  EXPECT_THAT(finding(facts, "cores").fix, HasSubstr("taskset"));
  facts.limits.usable_cores = 16;
  facts.limits.quota_cores = 1.5;
  EXPECT_EQ(finding(facts, "cores").severity, Severity::kSlow);
  EXPECT_THAT(finding(facts, "cores").text, HasSubstr("1.5 of them at a time"));
  EXPECT_THAT(finding(facts, "cores").fix, HasSubstr("docker run --cpus"));
  facts.limits.quota_cores = 2;
  EXPECT_EQ(finding(facts, "cores").severity, Severity::kOk);
}

TEST(HostReport, SmallSocketBuffers) {
  HostFacts facts = healthy();
  facts.limits.send_buffer_bytes = 212992;
  const Finding found = finding(facts, "socket-buffers");
  EXPECT_EQ(found.severity, Severity::kSlow);
  EXPECT_THAT(found.text, AllOf(HasSubstr("wmem_max 208 KiB"), HasSubstr("below 4 MiB")));
  EXPECT_EQ(found.fix, "sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304");
  facts.limits.send_buffer_bytes.reset();
  EXPECT_EQ(finding(facts, "socket-buffers").severity, Severity::kOk);
}

TEST(HostReport, NoNetwork) {
  HostFacts facts = healthy();
  facts.interfaces.pop_back();
  Finding found = finding(facts, "network");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.text, AllOf(HasSubstr("lo (127.0.0.1)"), HasSubstr("several hosts fails")));
  NetworkInterface down = interface("eth1", {});
  down.up = false;
  facts.interfaces.push_back(down);
  EXPECT_EQ(finding(facts, "network").fix, "ip link set eth1 up");
  facts.interfaces.push_back(interface("eth2", {address("fe80::2", 3)}));
  found = finding(facts, "network");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.text, HasSubstr("link-local"));
  EXPECT_THAT(found.fix, HasSubstr("dev eth2"));
}

TEST(HostReport, OnlyIpv6) {
  HostFacts facts = healthy();
  facts.interfaces.back() = interface("eth0", {address("fd00::7")});
  const Finding found = finding(facts, "network");
  EXPECT_EQ(found.severity, Severity::kOk);
  EXPECT_THAT(found.text,
              HasSubstr("only IPv6, so an address is written in brackets: --rendezvous [fd00::7]:"));
}

TEST(HostReport, ADownInterfaceBesideAGoodOne) {
  HostFacts facts = healthy();
  NetworkInterface down = interface("eth1", {address("10.0.1.7")});
  down.up = down.running = false;
  facts.interfaces.push_back(down);
  NetworkInterface never = interface("eth2", {});
  never.up = never.running = false;
  facts.interfaces.push_back(never);
  Finding found = finding(facts, "down-interfaces");
  EXPECT_EQ(found.severity, Severity::kSlow);
  EXPECT_THAT(found.text, AllOf(HasSubstr("eth1 (10.0.1.7)"), Not(HasSubstr("eth2"))));
  EXPECT_EQ(found.fix, "ip link set eth1 up");
  EXPECT_EQ(finding(facts, "network").severity, Severity::kOk);
  // The user wants just that one.
  facts.named_interfaces = {"eth0", "eth1"};
  found = finding(facts, "interface");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.text, HasSubstr("eth1: that network interface is down"));
  facts.named_interfaces = {"eth0"};
  EXPECT_EQ(finding(facts, "interface").severity, Severity::kOk);
}

TEST(HostReport, TheHostsOwnName) {
  HostFacts facts = healthy();
  facts.hostname_addresses = {address("127.0.1.1")};
  Finding found = finding(facts, "hostname");
  EXPECT_EQ(found.severity, Severity::kOk);  // nothing uses it before it is given as the rendezvous
  EXPECT_THAT(found.text, AllOf(HasSubstr("\"node7\" means 127.0.1.1"), HasSubstr("/etc/hosts")));
  EXPECT_EQ(found.fix, "--rendezvous with 10.0.0.7");
  facts.hostname_addresses.clear();
  facts.hostname_resolves = refused("unknown");
  EXPECT_THAT(finding(facts, "hostname").text, HasSubstr("cannot be resolved"));
}

TEST(HostReport, ARendezvousThatCannotBe) {
  HostFacts facts = healthy();
  const auto found = [&](const RendezvousFacts& its) {
    facts.rendezvous = its;
    return finding(facts, "rendezvous");
  };
  RendezvousFacts its = rendezvous("nosuch", {}, false);
  its.resolves = refused("the host name \"nosuch\" cannot be resolved");
  EXPECT_EQ(found(its).severity, Severity::kFails);
  EXPECT_THAT(found(its).text, HasSubstr("\"nosuch\" cannot be resolved"));
  EXPECT_THAT(found(its).fix, AllOf(HasSubstr("10.0.0.7:5000"), HasSubstr("/etc/hosts")));

  its = rendezvous("0.0.0.0", {address("0.0.0.0")}, true);
  EXPECT_EQ(found(its).severity, Severity::kFails);
  EXPECT_THAT(found(its).fix, HasSubstr("10.0.0.7:5000"));

  its = rendezvous("node7", {address("127.0.1.1")}, true);
  EXPECT_EQ(found(its).severity, Severity::kFails);
  EXPECT_THAT(found(its).text, AllOf(HasSubstr("\"node7\" means 127.0.1.1"), HasSubstr("no other host")));
  EXPECT_THAT(found(its).fix, HasSubstr("--rendezvous 10.0.0.7:5000"));

  its = rendezvous("10.0.0.7", {address("10.0.0.7")}, true);
  its.can_listen = refused("trainer 0 cannot listen at 10.0.0.7:5000: in use");
  its.answer = Answer::kSender;
  EXPECT_THAT(found(its).text, AllOf(HasSubstr("in use"), HasSubstr("the sender of a fleet is there")));
  EXPECT_THAT(found(its).fix, HasSubstr("another port"));
  its.answer = Answer::kOther;
  its.answer_text = "it says SSH-2.0";
  EXPECT_THAT(found(its).text, HasSubstr("SSH-2.0"));

  its = rendezvous("10.0.0.9", {address("10.0.0.9")}, false);
  its.answer = Answer::kUnreachable;
  its.answer_text = "10.0.0.9:5000: No route to host";
  EXPECT_EQ(found(its).severity, Severity::kFails);
  EXPECT_THAT(found(its).text, HasSubstr("No route to host"));
  EXPECT_THAT(found(its).fix, HasSubstr("ip route get 10.0.0.9"));
  its.answer = Answer::kOther;
  EXPECT_EQ(found(its).severity, Severity::kFails);
}

TEST(HostReport, ARendezvousThatIsWell) {
  HostFacts facts = healthy();
  const auto found = [&](const RendezvousFacts& its) {
    facts.rendezvous = its;
    EXPECT_EQ(finding(facts, "rendezvous").severity, Severity::kOk);
    return finding(facts, "rendezvous").text;
  };
  RendezvousFacts its = rendezvous("10.0.0.9", {address("10.0.0.9")}, false);
  EXPECT_THAT(found(its), HasSubstr("no sender listens there yet"));
  EXPECT_THAT(finding(facts, "advertised-address").text, HasSubstr("peers are told 10.0.0.7"));
  EXPECT_THAT(finding(facts, "advertised-address").text, HasSubstr("--insecure-listen"));
  its.answer = Answer::kSender;
  EXPECT_THAT(found(its), HasSubstr("where the sender of a fleet listens"));
  its = rendezvous("127.0.0.1", {address("127.0.0.1")}, true);
  its.told = "127.0.0.1";
  EXPECT_THAT(found(its), HasSubstr("on this host alone"));
  EXPECT_THAT(finding(facts, "advertised-address").text, HasSubstr("on this host alone"));
  its.told_status = refused("no way there");
  facts.rendezvous = its;
  EXPECT_EQ(finding(facts, "advertised-address").severity, Severity::kFails);
}

TEST(HostReport, Directories) {
  HostFacts facts = healthy();
  facts.fleet_directory = {
      .path = "/run/fleet", .usable = refused("/run/fleet is open to others"), .space = {}};
  Finding found = finding(facts, "fleet-directory");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.fix, HasSubstr("chmod 700 /run/fleet"));
  facts.temporary_directory.space = Space{kGiB, 1u << 20};
  EXPECT_EQ(finding(facts, "temporary-directory").severity, Severity::kSlow);
  facts.temporary_directory.usable = refused("/tmp: no directory can be made there: Read-only file system");
  found = finding(facts, "temporary-directory");
  EXPECT_EQ(found.severity, Severity::kFails);
  EXPECT_THAT(found.fix, HasSubstr("TMPDIR"));
}

TEST(HostReport, UcxIsSteeredFromOutside) {
  HostFacts facts = healthy();
  facts.ucx_environment = {"UCX_NET_DEVICES=eth9", "UCX_TLS=rc"};
  EXPECT_THAT(finding(facts, "ucx-environment").text, HasSubstr("UCX_NET_DEVICES=eth9, UCX_TLS=rc"));
}

// Goal: whoever looks a finding up finds it.
TEST(HostReport, EveryFindingHasAHeading) {
  std::ifstream file(std::string(SHARDPULL_SOURCE_DIR) + "/docs/TROUBLESHOOTING.md");
  std::set<std::string> headings;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("## ")) continue;
    std::istringstream words(line.substr(3));
    for (std::string word; words >> word;) headings.insert(word);
  }
  HostFacts facts = healthy();
  facts.rendezvous = rendezvous("10.0.0.9", {address("10.0.0.9")}, false);
  facts.fleet_directory = facts.temporary_directory;
  facts.named_interfaces = {"eth0"};
  facts.ucx_environment = {"UCX_TLS=tcp"};
  for (const Finding& each : findings_of(facts, {})) EXPECT_TRUE(headings.contains(each.name)) << each.name;
}

TEST(HostReport, TextAndJsonSayTheSame) {
  HostFacts facts = healthy();
  facts.limits.open_files = 64;
  facts.limits.receive_buffer_bytes = 212992;
  const auto findings = findings_of(facts, {});
  EXPECT_EQ(worst(findings), Severity::kFails);
  const std::string text = as_text(facts, findings);
  EXPECT_THAT(text, AllOf(HasSubstr("fails  open-files "), HasSubstr("fix: ulimit -n 1024"),
                          HasSubstr("slow   socket-buffers "), HasSubstr("shm           ")));
  const auto json = nlohmann::json::parse(as_json(facts, findings));
  EXPECT_EQ(json["shardpull"], 1);
  EXPECT_EQ(json["result"], "fails");
  EXPECT_EQ(json["host"]["open_files"], 64);
  EXPECT_EQ(json["host"]["locked_bytes"], nullptr);
  EXPECT_EQ(json["host"]["interfaces"][1]["addresses"][0], "10.0.0.7/24");
  EXPECT_EQ(json["findings"].size(), findings.size());
  for (std::size_t i = 0; i < findings.size(); ++i) {
    EXPECT_EQ(json["findings"][i]["name"], findings[i].name);
    EXPECT_EQ(json["findings"][i]["fix"], findings[i].fix);
  }
  EXPECT_DOUBLE_EQ(json["speed"]["memcpy_bytes_per_s"], 8e9);
  EXPECT_DOUBLE_EQ(json["speed"]["transports"][0]["of_memcpy"], 0.5);
  facts.memcpy.reset();
  EXPECT_EQ(nlohmann::json::parse(as_json(facts, findings))["speed"], nullptr);
}

}  // namespace
}  // namespace shardpull::cli
