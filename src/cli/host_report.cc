#include "cli/host_report.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/identity.h"
#include "base/units.h"
#include "cli/sync_report.h"
#include "shardpull/slice.h"

namespace shardpull::cli {
namespace {

using nlohmann::ordered_json;

// Two slots of --max-chunk-bytes' default on the side that needs them, and as much again for all the rest.
constexpr std::uint64_t kLittleMemory = 256u << 20;
// Socket buffers as the tcp transport asks for them.
constexpr std::uint64_t kSocketBuffer = 4u << 20;
// What a UCX worker takes of /dev/shm, and somewhat more.
constexpr std::uint64_t kUcxWorkerShm = 5u << 20;
constexpr std::uint64_t kLittleTemporary = 64u << 20;
// Descriptors of the program around the engine: its files, libraries and other connections.
constexpr std::uint64_t kOwnDescriptors = 64;

const std::vector<TransportKind> kAll = {TransportKind::kShm, TransportKind::kCma, TransportKind::kTcp,
                                         TransportKind::kUcx};
const std::vector<TransportKind> kBetweenHosts = {TransportKind::kTcp, TransportKind::kUcx};

std::string bytes_or_unlimited(std::uint64_t bytes) {
  return bytes == kNoLimit ? "unlimited" : format_bytes(bytes);
}

std::string count_or_unlimited(std::uint64_t count) {
  return count == kNoLimit ? "unlimited" : fmt::format("{}", count);
}

std::string hosts(const std::vector<SocketAddress>& addresses) {
  std::string text;
  for (const SocketAddress& each : addresses) text += (text.empty() ? "" : ", ") + each.host();
  return text;
}

// ---- one finding each -------------------------------------------------------------------------------------

Finding of_transport(const HostFacts& facts, const TransportFacts& transport) {
  const std::string name(to_string(transport.kind));
  Finding out{.name = name, .transports = {transport.kind}};
  if (transport.usable.ok()) {
    switch (transport.kind) {
      case TransportKind::kCma:
        out.text = "works: processes of this user may read each other's memory";
        break;
      case TransportKind::kTcp:
      case TransportKind::kUcx:
        out.text = fmt::format("works on this host ({})", facts.ucx);
        break;
      default:
        out.text = "works: sealed memory files can be made, handed over and mapped";
    }
    return out;
  }
  out.severity = Severity::kFails;
  out.text = fmt::format("--transport {} fails: {}", name, transport.usable.message());
  const bool between = transport.kind == TransportKind::kTcp || transport.kind == TransportKind::kUcx;
  if (between && !facts.ucx_status.ok()) {
    out.fix = facts.ucx_status.code() == StatusCode::kUnimplemented
                  ? "install UCX's headers (apt-get install libucx-dev) and build again"
                  : "apt-get install libucx0, or another UCX 1.13 or newer in the linker's path";
  } else if (facts.limits.open_files < kOwnDescriptors / 2) {
    out.fix = "see open-files";
  } else if (between) {
    const bool lo_down =
        std::any_of(facts.interfaces.begin(), facts.interfaces.end(),
                    [](const NetworkInterface& each) { return each.loopback && !each.usable(); });
    const auto& shm = facts.limits.dev_shm;
    if (lo_down) {
      out.fix = "ip link set lo up";
    } else if (transport.kind == TransportKind::kUcx && shm && shm->free_bytes < 2 * kUcxWorkerShm) {
      out.fix = "see shared-memory, or --transport tcp";
    } else {
      out.fix = "UCX_LOG_LEVEL=debug SHARDPULL_LOG=debug shardpull doctor shows what UCX tried";
    }
  } else if (!facts.temporary_directory.usable.ok() && !facts.fleet_directory) {
    out.fix = "see temporary-directory";
  } else if (facts.fleet_directory && !facts.fleet_directory->usable.ok()) {
    out.fix = "see fleet-directory";
  } else if (transport.kind == TransportKind::kCma) {
    out.fix = facts.limits.ptrace_scope >= 2
                  ? "sysctl -w kernel.yama.ptrace_scope=1, or --transport shm"
                  : "docker run --cap-add=SYS_PTRACE, or a seccomp profile that allows process_vm_readv; or "
                    "--transport shm";
  } else {
    out.fix = "a container profile that allows memfd_create and its seals, or --transport tcp";
  }
  return out;
}

Finding of_memory(const HostLimits& limits) {
  Finding out{.name = "memory", .transports = kAll};
  out.text = fmt::format("{} available", bytes_or_unlimited(limits.available_bytes));
  if (limits.group_bytes < limits.memory_bytes) {
    out.text +=
        fmt::format(": the control group allows {} of the host's {}, memory files of transport shm included",
                    format_bytes(limits.group_bytes), bytes_or_unlimited(limits.memory_bytes));
  } else {
    out.text += fmt::format(" of {}", bytes_or_unlimited(limits.memory_bytes));
  }
  if (limits.available_bytes < kLittleMemory) {
    out.severity = Severity::kFails;
    out.text += "; rings of the default size (2 slots of 64 MiB) do not fit beside a model";
    out.fix = limits.group_bytes < limits.memory_bytes
                  ? "raise the limit (docker run --memory, or memory.max of the control group), or lower "
                    "--max-chunk-bytes and --ring-depth"
                  : "end other programs, or lower --max-chunk-bytes and --ring-depth";
  }
  return out;
}

Finding of_shared_memory(const HostLimits& limits, const DoctorArguments& arguments) {
  Finding out{.name = "shared-memory", .transports = {TransportKind::kUcx}};
  if (!limits.dev_shm) {
    out.severity = Severity::kFails;
    out.text =
        "there is no /dev/shm, where UCX keeps the shared memory of --transport ucx; memory files of "
        "transport shm do without";
    out.fix = "mount -t tmpfs tmpfs /dev/shm, or --transport tcp";
    return out;
  }
  const std::uint64_t per_process = kUcxWorkerShm * arguments.ucx_workers;
  const std::uint64_t processes = std::uint64_t{arguments.fleet_ranks} + arguments.fleet_workers;
  const std::uint64_t fit = limits.dev_shm->free_bytes / per_process;
  const std::uint64_t wanted = per_process * processes;
  out.text = fmt::format(
      "{} of {} free in /dev/shm, which bounds transport ucx alone: memory files of transport "
      "shm are bounded by memory",
      format_bytes(limits.dev_shm->free_bytes), format_bytes(limits.dev_shm->total_bytes));
  if (fit >= processes) return out;
  out.severity = fit == 0 ? Severity::kFails : Severity::kSlow;
  out.text +=
      fit == 0
          ? fmt::format(". --transport ucx fails: a process takes {} of it", format_bytes(per_process))
          : fmt::format(". --transport ucx fails from the {}th process on this host on; the fleet has {}",
                        fit + 1, processes);
  const std::uint64_t size = std::bit_ceil(std::max<std::uint64_t>(2 * wanted, 64u << 20)) >> 20;
  out.fix = fmt::format("mount -o remount,size={}m /dev/shm (docker run --shm-size={}m), or --transport tcp",
                        size, size);
  return out;
}

Finding of_locked_memory(const HostLimits& limits) {
  Finding out{.name = "locked-memory", .transports = {TransportKind::kUcx}};
  if (limits.locked_bytes == kNoLimit) {
    out.text = "unlimited (ulimit -l)";
    return out;
  }
  out.text = fmt::format("{} may be locked (ulimit -l)", format_bytes(limits.locked_bytes));
  out.fix = "ulimit -l unlimited (docker run --ulimit memlock=-1; memlock in /etc/security/limits.conf)";
  if (limits.rdma) {
    out.severity = Severity::kFails;
    out.text += ": RDMA devices cannot register more, so --transport ucx fails or falls back to TCP";
  } else {
    out.text += "; RDMA devices, which this host does not have, would need more";
  }
  return out;
}

Finding of_open_files(const HostLimits& limits, const DoctorArguments& arguments,
                      const std::vector<TransportKind>& asked) {
  Finding out{.name = "open-files", .transports = asked};
  std::uint64_t needed = 0;
  for (const TransportKind kind : asked) {
    needed = std::max(needed, descriptors_needed(arguments.fleet_ranks, arguments.fleet_workers, kind,
                                                 arguments.ucx_workers));
  }
  out.text = fmt::format("{} files may be open (ulimit -n); a process of a fleet of {}x{} needs up to {}",
                         count_or_unlimited(limits.open_files), arguments.fleet_ranks,
                         arguments.fleet_workers, needed);
  if (limits.open_files >= needed) return out;
  out.severity = Severity::kFails;
  out.text += ": connections and memory files are refused";
  const std::uint64_t enough = std::bit_ceil(std::max<std::uint64_t>(needed, 1024));
  out.fix = fmt::format("ulimit -n {}", enough);
  if (limits.open_files_hard < enough) {
    out.fix += fmt::format(
        ", once the hard limit of {} is raised (docker run --ulimit nofile={}; nofile in "
        "/etc/security/limits.conf; LimitNOFILE of the service)",
        limits.open_files_hard, enough);
  }
  return out;
}

Finding of_ptrace_scope(const HostFacts& facts) {
  Finding out{.name = "ptrace-scope", .transports = {TransportKind::kCma}};
  const HostLimits& limits = facts.limits;
  if (limits.ptrace_scope < 0) {
    out.text = "kernel.yama.ptrace_scope is not there: Yama restricts nothing";
    return out;
  }
  out.text = fmt::format("kernel.yama.ptrace_scope is {}", limits.ptrace_scope);
  const bool forbids = limits.ptrace_scope == 3 || (limits.ptrace_scope == 2 && !limits.may_ptrace);
  if (!forbids) return out;
  out.severity = Severity::kFails;
  out.text += limits.ptrace_scope == 3 ? ": no process may read another's memory, so --transport cma fails"
                                       : ": only processes with CAP_SYS_PTRACE may read another's memory, so "
                                         "--transport cma fails";
  out.fix = limits.ptrace_scope == 3
                ? "kernel.yama.ptrace_scope=1 in /etc/sysctl.d and a reboot (3 cannot be lowered before), or "
                  "--transport shm"
                : "sysctl -w kernel.yama.ptrace_scope=1, or --transport shm";
  return out;
}

Finding of_cores(const HostLimits& limits) {
  Finding out{.name = "cores", .transports = kAll};
  out.text = fmt::format("{} of {} cores may be used", limits.usable_cores, limits.online_cores);
  const bool quota = limits.quota_cores > 0 && limits.quota_cores < limits.usable_cores;
  if (quota)
    out.text += fmt::format(", {:.3g} of them at a time (the control group's quota)", limits.quota_cores);
  const double cores = quota ? limits.quota_cores : limits.usable_cores;
  if (limits.usable_cores == 0 || cores >= 2) return out;
  out.severity = Severity::kSlow;
  out.text += ": a process's progress and copy threads take turns, with everything else it does";
  out.fix =
      quota ? "docker run --cpus=2 or more, or cpu.max of the control group"
            : "docker run --cpuset-cpus, taskset or srun --cpus-per-task with 2 cores or more per process";
  return out;
}

Finding of_socket_buffers(const HostLimits& limits) {
  Finding out{.name = "socket-buffers", .transports = kBetweenHosts};
  if (!limits.receive_buffer_bytes || !limits.send_buffer_bytes) {
    out.text = "net.core.rmem_max and wmem_max are not shown in this network namespace; the host's count";
    return out;
  }
  out.text = fmt::format("net.core.rmem_max is {}, wmem_max {}", format_bytes(*limits.receive_buffer_bytes),
                         format_bytes(*limits.send_buffer_bytes));
  if (std::min(*limits.receive_buffer_bytes, *limits.send_buffer_bytes) >= kSocketBuffer) return out;
  out.severity = Severity::kSlow;
  out.text += fmt::format(": below {} transfers over TCP stall where links are fast or long",
                          format_bytes(kSocketBuffer));
  out.fix = fmt::format("sysctl -w net.core.rmem_max={} net.core.wmem_max={}", kSocketBuffer, kSocketBuffer);
  return out;
}

Finding of_network(const HostFacts& facts) {
  Finding out{.name = "network", .transports = kBetweenHosts};
  if (!facts.interfaces_status.ok()) {
    out.severity = Severity::kFails;
    out.text = facts.interfaces_status.message();
    return out;
  }
  const std::vector<Candidate> ranked = rank_addresses(facts.interfaces);
  if (ranked.empty()) {
    out.severity = Severity::kFails;
    out.text = fmt::format(
        "no interface has an address that another host reaches: {}; a fleet on several hosts "
        "fails, one on this host alone (--transport shm or cma) does not",
        describe(facts.interfaces));
    const auto down = std::find_if(facts.interfaces.begin(), facts.interfaces.end(),
                                   [](const NetworkInterface& each) { return !each.loopback && !each.up; });
    out.fix =
        down == facts.interfaces.end()
            ? "docker run --network=host, or another network than none; ip address add ADDRESS/BITS dev NAME"
            : fmt::format("ip link set {} up", down->name);
    return out;
  }
  std::vector<std::string> shown;
  for (const Candidate& each : ranked)
    shown.push_back(fmt::format("{} ({})", each.address.host(), each.interface));
  out.text = fmt::format("addresses that other hosts may reach, best first: {}", fmt::join(shown, ", "));
  const bool v4 = std::any_of(ranked.begin(), ranked.end(),
                              [](const Candidate& each) { return each.address.family() == AF_INET; });
  if (!v4) {
    out.text += fmt::format("; only IPv6, so an address is written in brackets: --rendezvous [{}]:5000",
                            ranked.front().address.host());
  }
  const std::string best = ranked.front().address.host();
  if (best.starts_with("169.254.") || best.starts_with("fe80:")) {
    out.severity = Severity::kFails;
    out.text +=
        "; link-local ones lead no further than to the next switch, and mean something else on every host";
    out.fix = fmt::format("ip address add ADDRESS/BITS dev {}, or DHCP", ranked.front().interface);
  }
  return out;
}

Finding of_down_interfaces(const HostFacts& facts) {
  Finding out{.name = "down-interfaces", .transports = kBetweenHosts};
  std::vector<std::string> configured, others, commands;
  for (const NetworkInterface& each : facts.interfaces) {
    if (each.usable()) continue;
    if (each.addresses.empty() && !each.loopback) {
      others.push_back(each.name);
      continue;
    }
    configured.push_back(each.addresses.empty()
                             ? each.name
                             : fmt::format("{} ({})", each.name, each.addresses.front().address.host()));
    if (!each.up) commands.push_back(fmt::format("ip link set {} up", each.name));
  }
  if (configured.empty()) {
    out.text = others.empty()
                   ? "none"
                   : fmt::format("{}: without an address, so nobody set them up", fmt::join(others, ", "));
    return out;
  }
  out.severity = Severity::kSlow;
  out.text = fmt::format("{}: set up, but down or not connected; nothing can travel over them",
                         fmt::join(configured, ", "));
  out.fix = commands.empty() ? "connect the cable, or what stands for it"
                             : fmt::format("{}", fmt::join(commands, "; "));
  return out;
}

Finding of_named_interfaces(const HostFacts& facts) {
  Finding out{.name = "interface", .transports = kBetweenHosts};
  const auto selected = select_interfaces(facts.interfaces, facts.named_interfaces);
  if (!selected.ok()) {
    out.severity = Severity::kFails;
    out.text = selected.status().message();
    out.fix = "--interface with one of those that exist, are up and have an address";
    return out;
  }
  out.text = selected->empty() ? "UCX's devices only" : describe(*selected);
  return out;
}

Finding of_hostname(const HostFacts& facts) {
  Finding out{.name = "hostname", .transports = kAll};
  const HostPort name{facts.hostname, 0};
  const std::vector<Candidate> ranked = rank_addresses(facts.interfaces);
  const std::string instead = ranked.empty() ? "the numeric address of trainer 0's host"
                                             : fmt::format("{}", ranked.front().address.host());
  if (!facts.hostname_resolves.ok()) {
    out.text =
        fmt::format("\"{}\" cannot be resolved, so it cannot be given as --rendezvous here", facts.hostname);
    out.fix = fmt::format("--rendezvous with {}, or a line for {} in /etc/hosts", instead, facts.hostname);
    return out;
  }
  if (!loopback_trap(name, facts.hostname_addresses, facts.interfaces).empty()) {
    out.text = fmt::format("\"{}\" means {} here (see /etc/hosts), so it cannot be given as --rendezvous",
                           facts.hostname, hosts(facts.hostname_addresses));
    out.fix = fmt::format("--rendezvous with {}", instead);
    return out;
  }
  out.text = fmt::format("\"{}\" means {}", facts.hostname, hosts(facts.hostname_addresses));
  return out;
}

bool any_address(const RendezvousFacts& facts) {
  return std::any_of(facts.addresses.begin(), facts.addresses.end(), [](const SocketAddress& each) {
    return each.host() == "0.0.0.0" || each.host() == "::";
  });
}

Finding of_rendezvous(const HostFacts& facts) {
  const RendezvousFacts& its = *facts.rendezvous;
  const std::string shown = to_string(its.address);
  const std::vector<Candidate> ranked = rank_addresses(facts.interfaces);
  const std::string own = ranked.empty() ? "10.0.0.7" : ranked.front().address.host();
  const std::string example = to_string(HostPort{own, its.address.port});
  const auto fails = [&](std::string_view text, std::string fix) {
    return Finding{.name = "rendezvous",
                   .severity = Severity::kFails,
                   .transports = kAll,
                   .text = fmt::format("{}: {}", shown, text),
                   .fix = std::move(fix)};
  };
  const auto ok = [&](std::string_view text) {
    return Finding{.name = "rendezvous",
                   .transports = kAll,
                   .text = fmt::format("{} ({}) is {}", shown, hosts(its.addresses), text)};
  };
  if (!its.resolves.ok()) {
    return fails(
        its.resolves.message(),
        fmt::format("--rendezvous with a numeric address, such as {}, or a line for {} in /etc/hosts on "
                    "every host",
                    example, its.address.host));
  }
  if (any_address(its)) {
    return fails("this is every address of a host and none to connect to",
                 fmt::format("--rendezvous with an address of trainer 0's host, such as {}", example));
  }
  const std::string trap = loopback_trap(its.address, its.addresses, facts.interfaces);
  if (!trap.empty() && !means_loopback(its.address, its.addresses)) {
    return fails(trap, fmt::format("--rendezvous {} on every host, or an /etc/hosts whose line for {} has it",
                                   example, its.address.host));
  }
  if (its.local && !its.can_listen.ok()) {
    std::string who;
    if (its.answer == Answer::kSender) who = "; the sender of a fleet is there";
    if (its.answer == Answer::kOther) who = fmt::format("; what is there is no fleet ({})", its.answer_text);
    return fails(
        its.can_listen.message() + who,
        fmt::format("another port, or end what listens there (ss -ltnp 'sport = :{}')", its.address.port));
  }
  if (its.local) {
    return ok(trap.empty() ? "this host's, and the port is free"
                           : "this host's, and the port is free; for a fleet on this host alone");
  }
  switch (its.answer) {
    case Answer::kSender:
      return ok("another host, where the sender of a fleet listens");
    case Answer::kOther:
      return fails(
          fmt::format("another host, where something listens that is no fleet ({})", its.answer_text),
          "another port, or end what listens there");
    case Answer::kUnreachable:
      return fails(fmt::format("another host, which does not answer ({})", its.answer_text),
                   fmt::format("ip route get {}; open TCP port {} in the firewalls between",
                               its.addresses.front().host(), its.address.port));
    case Answer::kNobody:
      break;
  }
  return ok("another host, which answers; no sender listens there yet");
}

Finding of_advertised_address(const RendezvousFacts& facts) {
  Finding out{.name = "advertised-address", .transports = kBetweenHosts};
  if (!facts.told_status.ok()) {
    out.severity = Severity::kFails;
    out.text = facts.told_status.message();
    out.fix = "--interface with an interface that leads to the other hosts";
    return out;
  }
  const bool loopback = facts.told.starts_with("127.") || facts.told == "::1";
  out.text = fmt::format("peers are told {}{}", facts.told,
                         loopback ? ", which is for a fleet on this host alone"
                                  : "; listening there takes --insecure-listen, as nothing is encrypted");
  return out;
}

Finding of_fleet_directory(const DirectoryFacts& directory) {
  Finding out{.name = "fleet-directory", .transports = {TransportKind::kShm, TransportKind::kCma}};
  if (directory.usable.ok()) {
    out.text = fmt::format("{} is this user's alone and can be written", directory.path);
    return out;
  }
  out.severity = Severity::kFails;
  out.text = directory.usable.message();
  out.fix = fmt::format(
      "mkdir -p -m 700 {0} && chmod 700 {0} && chown $(id -u) {0}, on a file system that can be "
      "written",
      directory.path);
  return out;
}

Finding of_temporary_directory(const DirectoryFacts& directory) {
  Finding out{.name = "temporary-directory", .transports = kAll};
  const std::uint64_t left = directory.space ? directory.space->free_bytes : 0;
  if (!directory.usable.ok()) {
    out.severity = Severity::kFails;
    out.text = fmt::format("{}; `shardpull sync` keeps a run's sockets and made checkpoints there",
                           directory.usable.message());
    out.fix = "TMPDIR with a directory that can be written and has room";
  } else if (left < kLittleTemporary) {
    out.severity = Severity::kSlow;
    out.text = fmt::format("{} has only {} free; `shardpull sync --shape` makes checkpoints there",
                           directory.path, format_bytes(left));
    out.fix = "TMPDIR with a directory that has room, or --model with a checkpoint that is there";
  } else {
    out.text = fmt::format("{} can be written, {} free", directory.path, format_bytes(left));
  }
  return out;
}

Finding of_ucx_environment(const HostFacts& facts) {
  return {.name = "ucx-environment",
          .transports = kBetweenHosts,
          .text = fmt::format("{}: UCX reads them, so they must suit the processes of all hosts alike",
                              fmt::join(facts.ucx_environment, ", "))};
}

// ---- output -----------------------------------------------------------------------------------------------

double rate_of(const TransferRate& rate) {
  return rate.ns <= 0 ? 0 : static_cast<double>(rate.bytes) * 1e9 / static_cast<double>(rate.ns);
}

ordered_json limit_or_null(std::uint64_t value) {
  return value == kNoLimit ? ordered_json() : ordered_json(value);
}

ordered_json space_or_null(const std::optional<Space>& space) {
  if (!space) return {};
  return {{"total_bytes", space->total_bytes}, {"free_bytes", space->free_bytes}};
}

template <typename T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json();
}

ordered_json interfaces_json(const std::vector<NetworkInterface>& interfaces) {
  ordered_json out = ordered_json::array();
  for (const NetworkInterface& each : interfaces) {
    ordered_json addresses = ordered_json::array();
    for (const InterfaceAddress& its : each.addresses) {
      addresses.push_back(fmt::format("{}/{}", its.address.host(), its.prefix));
    }
    out.push_back({{"name", each.name},
                   {"up", each.up},
                   {"running", each.running},
                   {"loopback", each.loopback},
                   {"addresses", addresses}});
  }
  return out;
}

}  // namespace

std::string_view to_string(Severity severity) {
  switch (severity) {
    case Severity::kOk:
      return "ok";
    case Severity::kSlow:
      return "slow";
    case Severity::kFails:
      return "fails";
  }
  return "unknown";
}

std::uint64_t descriptors_needed(std::uint32_t ranks, std::uint32_t workers, TransportKind kind,
                                 std::uint32_t ucx_workers) {
  // The sender has a control connection to every other process. Every rank has endpoints to all workers and
  // every worker to all ranks: one descriptor each on one host, and as many again for the memory files of
  // serve rings; between hosts a socket of ours, and UCX's two per UCX worker.
  const std::uint64_t peers = std::max(ranks, workers);
  const bool between = kind == TransportKind::kTcp || kind == TransportKind::kUcx;
  return kOwnDescriptors + ranks + workers + peers * (between ? 1 + 2ull * ucx_workers : 2);
}

std::vector<Finding> findings_of(const HostFacts& facts, const DoctorArguments& arguments) {
  const std::vector<TransportKind> asked =
      arguments.transport == TransportKind::kAuto ? kAll : std::vector<TransportKind>{arguments.transport};
  std::vector<Finding> all;
  for (const TransportFacts& each : facts.transports) all.push_back(of_transport(facts, each));
  all.push_back(of_memory(facts.limits));
  all.push_back(of_shared_memory(facts.limits, arguments));
  all.push_back(of_locked_memory(facts.limits));
  all.push_back(of_open_files(facts.limits, arguments, asked));
  all.push_back(of_ptrace_scope(facts));
  all.push_back(of_cores(facts.limits));
  all.push_back(of_socket_buffers(facts.limits));
  all.push_back(of_network(facts));
  all.push_back(of_down_interfaces(facts));
  if (!facts.named_interfaces.empty()) all.push_back(of_named_interfaces(facts));
  all.push_back(of_hostname(facts));
  if (facts.rendezvous) {
    all.push_back(of_rendezvous(facts));
    if (facts.rendezvous->resolves.ok() && !any_address(*facts.rendezvous)) {
      all.push_back(of_advertised_address(*facts.rendezvous));
    }
  }
  if (facts.fleet_directory) all.push_back(of_fleet_directory(*facts.fleet_directory));
  all.push_back(of_temporary_directory(facts.temporary_directory));
  if (!facts.ucx_environment.empty()) all.push_back(of_ucx_environment(facts));

  std::erase_if(all, [&](const Finding& each) {
    return std::none_of(each.transports.begin(), each.transports.end(), [&](TransportKind kind) {
      return std::find(asked.begin(), asked.end(), kind) != asked.end();
    });
  });
  return all;
}

Severity worst(const std::vector<Finding>& findings) {
  Severity out = Severity::kOk;
  for (const Finding& each : findings) out = std::max(out, each.severity);
  return out;
}

std::string as_text(const HostFacts& facts, const std::vector<Finding>& findings) {
  std::string text = fmt::format("shardpull {}, wire {}, slice format {}, {}, {}\n\n", kSoftwareVersion,
                                 kWireVersion, kSliceFormatVersion, facts.grpc,
                                 facts.ucx.empty() ? "no UCX: " + facts.ucx_status.message() : facts.ucx);
  std::size_t width = 0;
  for (const Finding& each : findings) width = std::max(width, each.name.size());
  for (const Finding& each : findings) {
    text += fmt::format("{:<5}  {:<{}}  {}\n", to_string(each.severity), each.name, width, each.text);
    if (each.fix.empty()) continue;
    text += fmt::format("{:<{}}  {}: {}\n", "", width + 7, each.severity == Severity::kOk ? "hint" : "fix",
                        each.fix);
  }
  if (facts.memcpy) {
    std::vector<std::vector<std::string>> rows = {
        {"one reader, this host", "speed", "of memcpy"},
        {"memcpy", format_rate(facts.memcpy->bytes, facts.memcpy->ns), ""}};
    for (const TransportFacts& each : facts.transports) {
      if (!each.rate) continue;
      rows.push_back({std::string(to_string(each.kind)), format_rate(each.rate->bytes, each.rate->ns),
                      fmt::format("{:.2f}", rate_of(*each.rate) / rate_of(*facts.memcpy))});
    }
    text += "\n" + format_table(rows, 1);
  }
  return text;
}

std::string as_json(const HostFacts& facts, const std::vector<Finding>& findings) {
  ordered_json out;
  out["shardpull"] = kReportVersion;
  out["software"] = kSoftwareVersion;
  out["result"] = to_string(worst(findings));
  out["versions"] = {{"wire", kWireVersion},
                     {"slice_format", kSliceFormatVersion},
                     {"grpc", facts.grpc},
                     {"ucx", facts.ucx.empty() ? ordered_json() : ordered_json(facts.ucx)}};
  const HostLimits& limits = facts.limits;
  out["host"] = {
      {"hostname", facts.hostname},
      {"online_cores", limits.online_cores},
      {"usable_cores", limits.usable_cores},
      {"quota_cores", limits.quota_cores > 0 ? ordered_json(limits.quota_cores) : ordered_json()},
      {"memory_bytes", limit_or_null(limits.memory_bytes)},
      {"available_bytes", limit_or_null(limits.available_bytes)},
      {"control_group_bytes", limit_or_null(limits.group_bytes)},
      {"open_files", limit_or_null(limits.open_files)},
      {"locked_bytes", limit_or_null(limits.locked_bytes)},
      {"ptrace_scope", limits.ptrace_scope < 0 ? ordered_json() : ordered_json(limits.ptrace_scope)},
      {"seccomp_filter", limits.seccomp_filter},
      {"rdma", limits.rdma},
      {"rmem_max", or_null(limits.receive_buffer_bytes)},
      {"wmem_max", or_null(limits.send_buffer_bytes)},
      {"dev_shm", space_or_null(limits.dev_shm)},
      {"interfaces", interfaces_json(facts.interfaces)}};
  out["findings"] = ordered_json::array();
  for (const Finding& each : findings) {
    ordered_json transports = ordered_json::array();
    for (const TransportKind kind : each.transports) transports.push_back(to_string(kind));
    out["findings"].push_back({{"name", each.name},
                               {"severity", to_string(each.severity)},
                               {"transports", transports},
                               {"text", each.text},
                               {"fix", each.fix}});
  }
  out["speed"] = nullptr;
  if (facts.memcpy) {
    ordered_json speed = {{"memcpy_bytes_per_s", rate_of(*facts.memcpy)},
                          {"transports", ordered_json::array()}};
    for (const TransportFacts& each : facts.transports) {
      if (!each.rate) continue;
      speed["transports"].push_back({{"transport", to_string(each.kind)},
                                     {"bytes_per_s", rate_of(*each.rate)},
                                     {"of_memcpy", rate_of(*each.rate) / rate_of(*facts.memcpy)}});
    }
    out["speed"] = speed;
  }
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace shardpull::cli
