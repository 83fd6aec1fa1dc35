#include "runtime/hot_transport.h"

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/host_port.h"
#include "base/interfaces.h"
#include "base/status_macros.h"
#include "base/unix_socket.h"
#include "transport/cma/cma_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull {
namespace {

Result<std::unique_ptr<Transport>> make_ucx(const FleetOptions& options, const Member& self, bool tcp,
                                            UcxOptions ucx) {
  if (!options.rendezvous.empty()) {
    SHARDPULL_ASSIGN_OR_RETURN(const HostPort rendezvous, parse_host_port(options.rendezvous, "rendezvous"));
    std::vector<std::string> interfaces;
    if (!options.interfaces.empty()) {
      SHARDPULL_ASSIGN_OR_RETURN(interfaces, parse_interface_list(options.interfaces, "interface"));
    }
    const bool is_sender = self.role == Role::kTrainer && self.id == 0;
    SHARDPULL_ASSIGN_OR_RETURN(ucx.host, advertised_address(rendezvous, interfaces, is_sender));
  }
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<SocketAddress> addresses, resolve({ucx.host, 1}));
  if (!addresses.front().loopback() && !options.insecure_listen) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the {} transport of {} would listen at {}, which other hosts reach, and neither "
                              "the fleet token nor the weights are encrypted: allow it with insecure_listen "
                              "(--insecure-listen) on a network you trust",
                              tcp ? "tcp" : "ucx", to_string(self), ucx.host),
                  {.reason = Reason::kBadArgument});
  }
  if (ucx.host.find('%') != std::string::npos && !addresses.front().loopback()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} would be reached at {}, whose scope means something else on every host: give a "
                              "rendezvous or interfaces (--interface) with an address that is not link-local",
                              to_string(self), ucx.host),
                  {.reason = Reason::kBadArgument});
  }
  ucx.transports = tcp ? "tcp" : "";
  ucx.interface = options.interfaces;
  ucx.workers = options.ucx_workers;
  return make_ucx_transport(std::move(ucx));
}

// Names the socket file of this life of `name`. One that takes the place of a process which has not ended yet
// (a stopped one, say) listens beside it; what such lives left behind is removed.
std::string socket_name(const std::string& directory, const std::string& name, Incarnation incarnation) {
  const std::string beside = name + "-", end = ".sock";
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(directory, none)) {
    const std::string file = entry.path().filename().string();
    if (file.size() == beside.size() + 16 + end.size() && file.starts_with(beside) && file.ends_with(end))
      remove_stale_socket(fmt::format("{}/{}", directory, file)).ignore();
  }
  const Status other = connect_unix(fmt::format("{}/{}{}", directory, name, end), kNanosPerMilli).status();
  const bool lives = other.ok() || other.code() == StatusCode::kDeadlineExceeded;  // it accepts nobody now
  return lives ? fmt::format("{}{:016x}", beside, incarnation) : name;
}

}  // namespace

TransportKind transport_of(const FleetOptions& options) {
  if (options.transport != TransportKind::kAuto) return options.transport;
  return options.rendezvous.empty() ? TransportKind::kShm : TransportKind::kTcp;
}

std::string_view to_string(PathChoice path) {
  switch (path) {
    case PathChoice::kAuto:
      return "auto";
    case PathChoice::kPacked:
      return "packed";
    case PathChoice::kMapped:
      return "mapped";
    case PathChoice::kDirect:
      return "direct";
  }
  return "unknown";
}

std::string_view to_string(Apply apply) {
  return apply == Apply::kStaged ? "staged" : "inplace";
}

PathPolicy policy_of(PathChoice path) {
  switch (path) {
    case PathChoice::kAuto:
      return PathPolicy::kAuto;
    case PathChoice::kPacked:
      return PathPolicy::kPacked;
    case PathChoice::kMapped:
      return PathPolicy::kMapped;
    case PathChoice::kDirect:
      return PathPolicy::kDirect;
  }
  return PathPolicy::kAuto;
}

Result<std::unique_ptr<Transport>> make_hot_transport(const FleetOptions& options, const Member& self,
                                                      Incarnation incarnation) {
  const std::string name =
      fmt::format("{}-{}", self.role == Role::kTrainer ? "trainer" : "worker", self.id);
  const auto local = [&] {
    return LocalOptions{.directory = options.directory,
                        .token = options.token,
                        .incarnation = incarnation,
                        .self_name = socket_name(options.directory, name, incarnation)};
  };
  const TransportKind kind = transport_of(options);
  switch (kind) {
    case TransportKind::kAuto:
    case TransportKind::kShm:
      return make_shm_transport(local());
    case TransportKind::kCma:
      SHARDPULL_RETURN_IF_ERROR(cma_available().with_context("transport cma"));
      return make_cma_transport(local());
    case TransportKind::kTcp:
    case TransportKind::kUcx:
      break;
  }
  UcxOptions ucx;
  ucx.token = options.token;
  ucx.incarnation = incarnation;
  ucx.self_name = name;
  return make_ucx(options, self, kind == TransportKind::kTcp, std::move(ucx));
}

}  // namespace shardpull
