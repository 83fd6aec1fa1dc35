#include "cli/host_facts.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "base/unix_socket.h"
#include "control/grpc/foreign_service.h"
#include "control/grpc/grpc_control.h"
#include "transport/ucx/ucx_transport.h"

extern char** environ;

namespace shardpull::cli {
namespace {

constexpr std::int64_t kConnectNs = 2 * kNanosPerSecond;
constexpr std::int64_t kAnswerNs = kNanosPerSecond + kNanosPerSecond / 2;
constexpr std::int64_t kHelloNs = 3 * kNanosPerSecond;

Status host_error(std::string message) {
  return Status(StatusCode::kUnavailable, std::move(message),
                {.reason = Reason::kHost, .fault = Fault::kHost});
}

// ---- directories ------------------------------------------------------------------------------------------

// An owner-only directory within another, gone with this object.
class OwnDirectory {
 public:
  static Result<OwnDirectory> make(const std::string& parent) {
    std::string name = parent + "/shardpull-doctor-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) {
      return host_error(fmt::format("{}: no directory can be made there: {}", parent, std::strerror(errno)));
    }
    return OwnDirectory(std::move(name));
  }
  OwnDirectory(OwnDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  OwnDirectory& operator=(OwnDirectory&&) = delete;
  ~OwnDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit OwnDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

Status check_write(const std::string& directory) {
  const std::string path = directory + "/file";
  const std::array<char, 4096> page{};
  errno = 0;  // a write cut short sets none
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd || write(fd.get(), page.data(), page.size()) != static_cast<ssize_t>(page.size())) {
    return host_error(fmt::format("{}: no file can be written: {}", path,
                                  errno == 0 ? "no space is left" : std::strerror(errno)));
  }
  return {};
}

// Keeps the directory that was made, for what needs one.
DirectoryFacts look_at(const std::string& path, std::optional<OwnDirectory>& made) {
  DirectoryFacts facts;
  facts.path = path;
  facts.space = space_at(path);
  auto own = OwnDirectory::make(path);
  facts.usable = own.ok() ? check_write(own->path()) : own.status();
  if (own.ok() && facts.usable.ok()) made.emplace(std::move(own).value());
  return facts;
}

// ---- who listens there ------------------------------------------------------------------------------------

bool wait_for(int fd, short events, std::int64_t deadline_ns) {
  for (;;) {
    const std::int64_t left_ns = deadline_ns - SystemClock::instance().now_ns();
    if (left_ns <= 0) return false;
    pollfd one{.fd = fd, .events = events, .revents = 0};
    const auto left_ms = std::min<std::int64_t>(left_ns / kNanosPerMilli + 1, INT_MAX);
    const int ready = poll(&one, 1, static_cast<int>(left_ms));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

// A connected socket, or the errno.
UniqueFd connect_to(const SocketAddress& address, int& error) {
  UniqueFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  error = errno;
  if (!fd) return fd;
  if (::connect(fd.get(), address.get(), address.length) == 0) return fd;
  error = errno;
  if (error != EINPROGRESS) return {};
  if (!wait_for(fd.get(), POLLOUT, SystemClock::instance().now_ns() + kConnectNs)) {
    error = ETIMEDOUT;
    return {};
  }
  socklen_t length = sizeof error;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  return error == 0 ? std::move(fd) : UniqueFd();
}

class NoSink final : public ControlSink {
 public:
  void on_control(const Member&, Incarnation, ControlBody) override {}
  void on_member_up(const Member&, Incarnation) override {}
  void on_member_lost(const Member&, Incarnation, const Status&) override {}
};

// A hub of ours checks the token first. Ours of the moment is nobody's, so that it joins no fleet.
Status say_hello(const HostPort& address) {
  NoSink sink;
  ControlOptions options;
  options.address = "tcp:" + to_string(address);
  options.token = random_nonzero_u64();
  options.self = {Role::kWorker, 0};
  options.incarnation = random_nonzero_u64();
  options.connect_timeout_ns = kHelloNs;
  return connect_grpc_control(options, sink).status();
}

void ask(RendezvousFacts& facts) {
  facts.answer = Answer::kUnreachable;
  facts.answer_text = "it has no address";
  bool first = true;
  for (const SocketAddress& address : facts.addresses) {
    int error = 0;
    const UniqueFd fd = connect_to(address, error);
    if (!fd && error == ECONNREFUSED) facts.answer = Answer::kNobody;
    if (!fd) {
      if (std::exchange(first, false)) {
        facts.answer_text = fmt::format("{}: {}", address.to_string(), std::strerror(error));
      }
      continue;
    }
    facts.answer = Answer::kOther;
    if (const Status foreign = check_no_foreign_service(address, kAnswerNs); !foreign.ok()) {
      facts.answer_text = foreign.message();
    } else if (const Status hello = say_hello(facts.address); hello.info().reason == Reason::kBadToken) {
      facts.answer = Answer::kSender;
      facts.answer_text.clear();
    } else {
      facts.answer_text = hello.message();
    }
    return;
  }
}

RendezvousFacts look_at(const HostPort& address, const HostFacts& host) {
  RendezvousFacts facts;
  facts.address = address;
  auto resolved = resolve(address);
  if (!resolved.ok()) {
    facts.resolves = resolved.status();
    return facts;
  }
  facts.addresses = std::move(resolved).value();
  const auto own = [&](const SocketAddress& one) {
    if (one.loopback()) return true;
    for (const NetworkInterface& interface : host.interfaces) {
      for (const InterfaceAddress& its : interface.addresses) {
        if (its.address.host() == one.host()) return true;
      }
    }
    return false;
  };
  for (const SocketAddress& each : facts.addresses) {
    if (!own(each)) continue;
    facts.local = true;
    if (facts.can_listen.ok()) facts.can_listen = check_can_listen(each, "trainer 0");
  }
  if (!facts.local || !facts.can_listen.ok()) ask(facts);
  auto told = choose_address(address, facts.addresses, host.interfaces, host.named_interfaces, facts.local,
                             source_address_toward);
  if (told.ok()) {
    facts.told = *told;
  } else {
    facts.told_status = told.status();
  }
  return facts;
}

// ---- transports -------------------------------------------------------------------------------------------

TransportFacts look_at(TransportKind kind, const std::string& directory, const HostFacts& host, bool speed) {
  TransportFacts facts;
  facts.kind = kind;
  const bool between = kind == TransportKind::kTcp || kind == TransportKind::kUcx;
  if (between && !host.ucx_status.ok()) {
    facts.usable = host.ucx_status;
    return facts;
  }
  if (!between && directory.empty()) {
    facts.usable = host.fleet_directory ? host.fleet_directory->usable : host.temporary_directory.usable;
    return facts;
  }
  ProbeOptions options;
  if (!speed || host.limits.available_bytes < (1u << 30)) options.buffer_bytes = 1u << 20;
  if (!speed) options.budget_ns = 0;
  auto rate = probe_transport(kind, directory, options);
  if (!rate.ok()) {
    facts.usable = rate.status();
  } else if (speed) {
    facts.rate = *rate;
  }
  return facts;
}

}  // namespace

HostFacts read_host_facts(const DoctorArguments& arguments) {
  HostFacts facts;
  facts.limits = read_host_limits();
  facts.grpc = describe_grpc();
  for (char** each = environ; each != nullptr && *each != nullptr; ++each) {
    if (std::string_view(*each).starts_with("UCX_")) facts.ucx_environment.emplace_back(*each);
  }
  std::sort(facts.ucx_environment.begin(), facts.ucx_environment.end());

  auto interfaces = list_interfaces();
  facts.interfaces_status = interfaces.status();
  if (interfaces.ok()) facts.interfaces = std::move(interfaces).value();
  if (!arguments.interfaces.empty()) {
    auto names = parse_interface_list(arguments.interfaces, "--interface");
    if (names.ok()) facts.named_interfaces = std::move(names).value();
  }
  std::array<char, HOST_NAME_MAX + 1> name{};
  if (gethostname(name.data(), name.size() - 1) == 0) facts.hostname = name.data();
  auto meaning = resolve({facts.hostname, 0});
  facts.hostname_resolves = meaning.status();
  if (meaning.ok()) facts.hostname_addresses = std::move(meaning).value();

  std::optional<OwnDirectory> in_fleet_directory, in_temporary;
  if (!arguments.fleet_directory.empty()) {
    DirectoryFacts& directory = facts.fleet_directory.emplace();
    directory.path = arguments.fleet_directory;
    directory.usable = check_owner_only_directory(directory.path, "--fleet-dir");
    if (directory.usable.ok()) directory = look_at(arguments.fleet_directory, in_fleet_directory);
  }
  const char* const wanted = std::getenv("TMPDIR");
  facts.temporary_directory = look_at(wanted != nullptr && *wanted != '\0' ? wanted : "/tmp", in_temporary);
  std::string directory;
  if (facts.fleet_directory) {
    if (in_fleet_directory) directory = in_fleet_directory->path();
  } else if (in_temporary) {
    directory = in_temporary->path();
  }

  const auto look_at_those = [&](std::initializer_list<TransportKind> kinds) {
    for (const TransportKind kind : kinds) {
      if (arguments.transport != TransportKind::kAuto && arguments.transport != kind) continue;
      facts.transports.push_back(look_at(kind, directory, facts, arguments.speed));
    }
  };
  look_at_those({TransportKind::kCma, TransportKind::kShm});  // cma forks, so it comes before UCX's threads
  auto ucx = describe_ucx();
  facts.ucx_status = ucx.status();
  if (ucx.ok()) facts.ucx = std::move(ucx).value();
  look_at_those({TransportKind::kTcp, TransportKind::kUcx});
  std::sort(facts.transports.begin(), facts.transports.end(),
            [](const TransportFacts& a, const TransportFacts& b) { return a.kind < b.kind; });
  if (arguments.speed) {
    ProbeOptions options;
    if (facts.limits.available_bytes < (1u << 30)) options.buffer_bytes = 1u << 20;
    facts.memcpy = probe_memcpy(options);
  }
  if (!arguments.rendezvous.empty()) {
    // What cannot be parsed was refused with the command line.
    const auto address = parse_host_port(arguments.rendezvous, "--rendezvous");
    if (address.ok()) facts.rendezvous = look_at(*address, facts);
  }
  return facts;
}

}  // namespace shardpull::cli
