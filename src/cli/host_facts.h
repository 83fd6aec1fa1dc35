// Facts about this host for `shardpull doctor`, read once. What they mean is in host_report.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/host_limits.h"
#include "base/host_port.h"
#include "base/interfaces.h"
#include "cli/commands.h"
#include "runtime/transport_probe.h"
#include "shardpull/fleet.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// Whether two sides on this host could move bytes with it, and how fast.
struct TransportFacts {
  TransportKind kind = TransportKind::kShm;
  Status usable;
  std::optional<TransferRate> rate;  // where it was measured
};

struct DirectoryFacts {
  std::string path;
  Status usable;  // a directory could be made in it, and a file written there
  std::optional<Space> space;
};

// Who was found at the rendezvous.
enum class Answer : std::uint8_t {
  kNobody,       // the host is there, nobody listens
  kSender,       // the sender of a fleet
  kOther,        // something that is none of ours
  kUnreachable,  // no answer at all
};

struct RendezvousFacts {
  HostPort address;
  Status resolves;
  std::vector<SocketAddress> addresses;
  bool local = false;  // one of them is this host's
  Status can_listen;   // where local
  Answer answer = Answer::kNobody;
  std::string answer_text;  // what was seen, for kOther and kUnreachable
  Status told_status;
  std::string told;  // the address that this process would tell its peers
};

struct HostFacts {
  HostLimits limits;
  std::string grpc;  // "gRPC 1.51.1"
  std::string ucx;   // "UCX 1.13.1, /usr/lib/x86_64-linux-gnu/libucp.so.0", or empty
  Status ucx_status;
  std::vector<std::string> ucx_environment;  // "UCX_TLS=tcp"
  std::vector<TransportFacts> transports;
  std::optional<TransferRate> memcpy;  // where speed was measured

  Status interfaces_status;
  std::vector<NetworkInterface> interfaces;
  std::vector<std::string> named_interfaces;  // by --interface
  std::string hostname;
  Status hostname_resolves;
  std::vector<SocketAddress> hostname_addresses;
  std::optional<RendezvousFacts> rendezvous;

  std::optional<DirectoryFacts> fleet_directory;
  DirectoryFacts temporary_directory;
};

// Asks the system, and where they are given the rendezvous and the directory; bounded, but for the resolver.
// Forks, so call it before there are threads.
HostFacts read_host_facts(const DoctorArguments& arguments);

}  // namespace shardpull::cli
