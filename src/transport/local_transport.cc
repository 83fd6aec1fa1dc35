#include "transport/local_transport.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"
#include "base/status_macros.h"
#include "base/unix_socket.h"

namespace shardpull {
namespace {

// What epoll reports that is no endpoint; endpoints report their id.
constexpr std::uint64_t kWakeKey = 1ull << 32;
constexpr std::uint64_t kListenKey = kWakeKey + 1;
constexpr int kEventsPerRound = 64;
constexpr int kAcceptsPerRound = 64;
constexpr int kReceivesPerRound = 16;  // of one endpoint, so that a busy one does not starve the others
constexpr std::int64_t kAcceptPauseNs = 100 * kNanosPerMilli;  // when the process is out of descriptors
constexpr std::int64_t kRetryNs = kNanosPerMilli;
constexpr std::size_t kMaxRememberedPeers = 4096;
constexpr std::uint64_t kInlineReadBytes = 128u << 10;  // copied faster than a reading thread could be woken
constexpr std::size_t kInlineReadParts = 64;
constexpr std::int64_t kDestructorFlushNs = kNanosPerSecond;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

Status host_error(std::string message) {
  return Status(StatusCode::kFailedPrecondition, std::move(message),
                {.reason = Reason::kHost, .fault = Fault::kHost});
}

Status gone(EndpointId endpoint) {
  return Status(StatusCode::kUnavailable, fmt::format("endpoint {} is closed", endpoint),
                {.reason = Reason::kPeerLost, .fault = Fault::kPeer});
}

bool valid_name(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
  };
  return !name.empty() && name.front() != '.' && std::all_of(name.begin(), name.end(), allowed);
}

}  // namespace

void LocalShared::wake() const {
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then the reader is being woken already.
  [[maybe_unused]] const ssize_t written = write(wake_fd.get(), &one, sizeof one);
}

LocalExport::LocalExport(std::shared_ptr<LocalShared> shared, OwnRegions::Name name, std::byte* address,
                         std::uint64_t bytes)
    : shared_(std::move(shared)) {
  ref_.address = address;
  ref_.bytes = bytes;
  ref_.region = name.region;
  ref_.generation = name.generation;
}

LocalExport::~LocalExport() {
  shared_->regions.free({.region = ref_.region, .generation = ref_.generation}, ref_.bytes);
  shared_->wake();
}

LocalTransport::LocalTransport(Setup setup, LocalBackend backend, unsigned read_threads, CopyParts copy)
    : options_(std::move(setup.options)),
      backend_(backend),
      shared_(std::move(setup.shared)),
      epoll_(std::move(setup.epoll)),
      copy_(std::move(copy)),
      readers_(read_threads, copy_, [shared = shared_] { shared->wake(); }) {}

LocalTransport::~LocalTransport() {
  if (listener_) {
    listener_.reset();
    if (const Result<SocketPath> path = SocketPath::open(listen_path_); path.ok()) {
      struct stat info{};
      // Only our own socket: somebody may have made another one of this name meanwhile.
      if (lstat(path->name().c_str(), &info) == 0 && info.st_ino == listen_inode_)
        unlink(path->name().c_str());
    }
  }
  linger_all();
}

void LocalTransport::linger_all() {
  const std::int64_t give_up_ns = clock_.now_ns() + kDestructorFlushNs;
  for (;;) {
    std::vector<pollfd> waiting;
    for (auto& [id, endpoint] : endpoints_) {
      if (endpoint->queued_bytes() == 0 || endpoint->state == LocalEndpoint::State::kClosed) continue;
      endpoint->flush().ignore();
      if (endpoint->queued_bytes() > 0)
        waiting.push_back({.fd = endpoint->fd(), .events = POLLOUT, .revents = 0});
    }
    const std::int64_t left_ns = give_up_ns - clock_.now_ns();
    if (waiting.empty() || left_ns <= 0) return;
    poll(waiting.data(), waiting.size(),
         static_cast<int>(std::min<std::int64_t>(left_ns / kNanosPerMilli + 1, 50)));
  }
}

Result<std::string> LocalTransport::listen() {
  if (listener_) return listen_path_;
  const std::string path = fmt::format("{}/{}.sock", options_.directory, options_.self_name);
  SHARDPULL_RETURN_IF_ERROR(remove_stale_socket(path));
  SHARDPULL_ASSIGN_OR_RETURN(const SocketPath socket_path, SocketPath::open(path));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return host_error(fmt::format("no socket to listen at \"{}\": {}", path, std::strerror(errno)));
  const sockaddr_un address = socket_path.address();
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return host_error(fmt::format("cannot listen at \"{}\": {}", path, std::strerror(errno)));
  }
  struct stat info{};
  if (::listen(fd.get(), SOMAXCONN) != 0 || lstat(socket_path.name().c_str(), &info) != 0) {
    const int error = errno;
    unlink(socket_path.name().c_str());
    return host_error(fmt::format("cannot listen at \"{}\": {}", path, std::strerror(error)));
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kListenKey;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0) {
    const int error = errno;
    unlink(socket_path.name().c_str());
    return host_error(fmt::format("cannot watch \"{}\": {}", path, std::strerror(error)));
  }
  listener_ = std::move(fd);
  listen_path_ = path;
  listen_inode_ = info.st_ino;
  return path;
}

Result<EndpointId> LocalTransport::connect(const std::string& address, std::int64_t timeout_ns) {
  return connect_to(address, timeout_ns, nullptr);
}

Result<EndpointId> LocalTransport::connect_to(const std::string& path, std::int64_t timeout_ns,
                                              const PeerCheck& check) {
  SHARDPULL_ASSIGN_OR_RETURN(UniqueFd fd, connect_unix(path, timeout_ns));
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 ||
      credentials.uid != geteuid()) {
    return Status(StatusCode::kPermissionDenied,
                  fmt::format("the process that listens at \"{}\" runs as user {}, this one as user {}", path,
                              credentials.uid, geteuid()),
                  {.reason = Reason::kHost, .fault = Fault::kPeer});
  }
  const std::size_t slash = path.rfind('/');
  std::string peer =
      fmt::format("{} (pid {})", path.substr(slash == std::string::npos ? 0 : slash + 1), credentials.pid);
  if (check) SHARDPULL_RETURN_IF_ERROR(check(credentials.pid, peer));
  return add(std::move(fd), credentials.pid, std::move(peer), /*accepted=*/false);
}

LocalEndpoint* LocalTransport::find(EndpointId id) {
  const auto found = endpoints_.find(id);
  return found == endpoints_.end() ? nullptr : found->second.get();
}

Result<EndpointId> LocalTransport::add(UniqueFd fd, pid_t pid, std::string peer, bool accepted) {
  if (last_endpoint_ == std::numeric_limits<EndpointId>::max()) {
    return Status(StatusCode::kResourceExhausted, "no endpoint number is left",
                  {.reason = Reason::kLimit, .fault = Fault::kLibrary});
  }
  auto endpoint =
      std::make_unique<LocalEndpoint>(++last_endpoint_, std::move(fd), pid, std::move(peer), accepted);
  epoll_event event{};
  event.events = endpoint->watched_events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = endpoint->id();
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, endpoint->fd(), &event) != 0) {
    return host_error(
        fmt::format("cannot watch the connection to {}: {}", endpoint->peer(), std::strerror(errno)));
  }
  const EndpointId id = endpoint->id();
  if (accepted) {
    endpoint->deadline_ns = clock_.now_ns() + options_.hello_timeout_ns;
    timed_.push_back(id);
  }
  endpoints_.emplace(id, std::move(endpoint));
  open_endpoints_.fetch_add(1, std::memory_order_relaxed);
  return id;
}

Status LocalTransport::send(EndpointId id, HotHeader header, const std::byte* payload, std::size_t length) {
  LocalEndpoint* const endpoint = find(id);
  if (endpoint == nullptr || endpoint->state != LocalEndpoint::State::kOpen) return gone(id);
  if (length > kMaxHotPayloadBytes) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a {} message with {} bytes, above the limit of {}", name_of(header.type),
                              length, kMaxHotPayloadBytes),
                  {.reason = Reason::kLimit, .fault = Fault::kLibrary});
  }
  if (endpoint->queued_bytes() + kHotHeaderBytes + length > options_.max_queued_bytes) {
    Status full(StatusCode::kResourceExhausted,
                fmt::format("{} has not taken {} bytes of messages: it stopped reading", endpoint->peer(),
                            endpoint->queued_bytes()),
                {.reason = Reason::kLimit, .fault = Fault::kPeer, .peer = endpoint->peer()});
    refuse(*endpoint, full);  // with a message missing, what followed would make no sense
    return full;
  }
  if (header.token == 0) header.token = options_.token;
  if (header.incarnation == 0) header.incarnation = options_.incarnation;
  header.length = static_cast<std::uint32_t>(length);
  header.sum = payload_sum(payload, length);
  const auto encoded = encode(header);
  std::vector<std::byte> frame(kHotHeaderBytes + length);
  std::copy(encoded.begin(), encoded.end(), frame.begin());
  if (length > 0) std::memcpy(frame.data() + kHotHeaderBytes, payload, length);
  header_bytes_.fetch_add(frame.size(), std::memory_order_relaxed);
  messages_.fetch_add(1, std::memory_order_relaxed);
  endpoint->queue(std::move(frame));
  Status sent = endpoint->flush();
  watch(*endpoint);
  return sent;
}

Status LocalTransport::grant(EndpointId id, const std::shared_ptr<ExportedMemory>& memory) {
  LocalEndpoint* const endpoint = find(id);
  if (endpoint == nullptr || endpoint->state != LocalEndpoint::State::kOpen) return gone(id);
  const auto* const exported = dynamic_cast<const LocalExport*>(memory.get());
  if (exported == nullptr || !exported->belongs_to(shared_)) {
    return Status(StatusCode::kInvalidArgument, "only memory that this transport allocated can be granted",
                  {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
  }
  const MemoryRef& ref = exported->ref();
  std::uint32_t& granted = endpoint->granted[ref.region];
  if (granted == ref.generation) return {};
  granted = ref.generation;
  LocalFrame frame = frame_of(LocalFrameKind::kGrant, ref.region, ref.generation);
  frame.bytes = ref.bytes;
  exported->describe(frame);
  const auto bytes = encode(frame);
  endpoint->queue({bytes.begin(), bytes.end()}, exported->descriptor());
  Status sent = endpoint->flush();
  watch(*endpoint);
  return sent;
}

void LocalTransport::close(EndpointId id) {
  LocalEndpoint* const endpoint = find(id);
  if (endpoint == nullptr) return;
  using State = LocalEndpoint::State;
  if (endpoint->state == State::kLingering || endpoint->state == State::kGone) return;
  const bool send_rest =
      endpoint->state == State::kOpen && endpoint->flush().ok() && endpoint->queued_bytes() > 0;
  endpoint->state = send_rest ? State::kLingering : State::kGone;
  if (send_rest) {
    endpoint->deadline_ns = clock_.now_ns() + options_.close_timeout_ns;
    timed_.push_back(id);
  } else {
    gone_.push_back(id);
  }
  watch(*endpoint);
}

LocalFrame LocalTransport::frame_of(LocalFrameKind kind, std::uint32_t region,
                                    std::uint32_t generation) const {
  LocalFrame frame;
  frame.kind = kind;
  frame.backend = backend_;
  frame.token = options_.token;
  frame.incarnation = options_.incarnation;
  frame.region = region;
  frame.generation = generation;
  return frame;
}

void LocalTransport::read(EndpointId id, const RemoteRef& remote, std::byte* local, ReadToken token) {
  read_parts(id, {{.remote = remote, .local = local}}, token);
}

void LocalTransport::read_parts(EndpointId id, std::vector<ReadPart> parts, ReadToken token) {
  LocalEndpoint* const endpoint = find(id);
  if (endpoint == nullptr || endpoint->state != LocalEndpoint::State::kOpen) {
    settled_reads_.push_back({.read = {.endpoint = 0, .token = token, .bytes = 0}, .status = gone(id)});
    return;
  }
  ++endpoint->reads;
  Read read{.endpoint = id, .token = token, .bytes = 0};
  bool done = false;
  Status status = begin_read(*endpoint, parts, read, done);
  if (done || !status.ok()) settled_reads_.push_back({.read = read, .status = std::move(status)});
}

Status LocalTransport::begin_read(LocalEndpoint& endpoint, std::span<const ReadPart> parts, Read& read,
                                  bool& done) {
  ReadThreads::Job job;
  job.parts.reserve(parts.size());
  for (const ReadPart& part : parts) {
    SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const PeerMemory> memory, endpoint.regions.find(part.remote));
    if (part.remote.bytes == 0) continue;
    read.bytes += part.remote.bytes;
    if (!job.parts.empty()) {
      CopyPart& last = job.parts.back();
      if (last.memory == memory.get() && last.offset + last.bytes == part.remote.offset &&
          last.to + last.bytes == part.local) {
        last.bytes += part.remote.bytes;
        continue;
      }
    }
    job.parts.push_back(
        {.memory = memory.get(), .offset = part.remote.offset, .bytes = part.remote.bytes, .to = part.local});
    if (job.keeps_alive.empty() || job.keeps_alive.back() != memory)
      job.keeps_alive.push_back(std::move(memory));
  }
  if (read.bytes <= kInlineReadBytes && job.parts.size() <= kInlineReadParts) {
    done = true;
    return job.parts.empty() ? Status() : copy_(job.parts, read.bytes);
  }
  job.id = ++last_read_;
  SHARDPULL_RETURN_IF_ERROR(readers_.submit(std::move(job)));
  reads_.emplace(last_read_, read);
  return {};
}

Result<Transport::Mapping> LocalTransport::map(EndpointId id, const RemoteRef& remote) {
  LocalEndpoint* const endpoint = find(id);
  if (endpoint == nullptr || endpoint->state != LocalEndpoint::State::kOpen) return gone(id);
  if (!can_map()) {
    return Status(StatusCode::kUnimplemented, fmt::format("the {} transport maps no memory of peers", name()),
                  {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
  }
  SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const PeerMemory> memory, endpoint->regions.find(remote));
  const std::byte* const data = memory->data() + remote.offset;
  return Mapping{.data = data, .owner = std::move(memory)};
}

Status LocalTransport::progress(std::int64_t timeout_ns, TransportSink& sink) {
  std::int64_t wait_ns = std::max<std::int64_t>(0, timeout_ns);
  if (const std::int64_t timer_ns = next_timer_ns(); timer_ns != kNever) {
    wait_ns = std::min(wait_ns, std::max<std::int64_t>(0, timer_ns - clock_.now_ns()));
  }
  if (work_waits()) wait_ns = 0;

  std::array<epoll_event, kEventsPerRound> events;
  const timespec wait{.tv_sec = wait_ns / kNanosPerSecond, .tv_nsec = wait_ns % kNanosPerSecond};
  int count = epoll_pwait2(epoll_.get(), events.data(), kEventsPerRound, &wait, nullptr);
  if (count < 0 && errno == ENOSYS) {  // a kernel before 5.11 waits in milliseconds
    const std::int64_t wait_ms =
        std::min<std::int64_t>((wait_ns + kNanosPerMilli - 1) / kNanosPerMilli, 1'000'000);
    count = epoll_wait(epoll_.get(), events.data(), kEventsPerRound, static_cast<int>(wait_ms));
  }
  if (count < 0 && errno != EINTR) {
    return Status(StatusCode::kInternal, fmt::format("epoll: {}", std::strerror(errno)),
                  {.reason = Reason::kHost, .fault = Fault::kHost});
  }
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.u64 == kWakeKey) {
      std::uint64_t ignored = 0;
      [[maybe_unused]] const ssize_t got = ::read(shared_->wake_fd.get(), &ignored, sizeof ignored);
    } else if (event.data.u64 == kListenKey) {
      accept_peers(sink);
    } else if (LocalEndpoint* const endpoint = find(static_cast<EndpointId>(event.data.u64));
               endpoint != nullptr) {
      if ((event.events & EPOLLOUT) != 0 || endpoint->state == LocalEndpoint::State::kLingering)
        flush(*endpoint);
      if (endpoint->state == LocalEndpoint::State::kOpen &&
          (event.events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) {
        receive(*endpoint, sink);
      }
    }
  }
  retire_freed_regions();
  report_reads(sink);
  report_closed(sink);
  run_timers();
  remove_gone();
  return {};
}

void LocalTransport::accept_peers(TransportSink& sink) {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      const int error = errno;
      if (error == EINTR || error == ECONNABORTED) continue;
      if (error == EAGAIN || error == EWOULDBLOCK) return;
      // The connection stays in the backlog, and epoll would report it at once: look again a little later.
      if (!told_out_of_descriptors_) {
        told_out_of_descriptors_ = true;
        log_warn("{}: cannot accept a connection: {}; raise the limit with: ulimit -n", options_.self_name,
                 std::strerror(error));
      }
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      accept_again_ns_ = clock_.now_ns() + kAcceptPauseNs;
      return;
    }
    ucred peer{};
    socklen_t size = sizeof peer;
    if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) {
      log_warn("{}: refused a connection from process {} of user {}: this process runs as user {}",
               options_.self_name, peer.pid, peer.uid, geteuid());
      continue;
    }
    Result<EndpointId> id = add(std::move(fd), peer.pid, fmt::format("pid {}", peer.pid), /*accepted=*/true);
    if (!id.ok()) {
      log_warn("{}: {}", options_.self_name, id.status().message());
      continue;
    }
    sink.on_accepted(*id);
  }
}

void LocalTransport::receive(LocalEndpoint& endpoint, TransportSink& sink) {
  for (int i = 0; i < kReceivesPerRound && endpoint.state == LocalEndpoint::State::kOpen; ++i) {
    const Result<LocalEndpoint::Received> received = endpoint.receive();
    if (!received.ok()) {
      refuse(endpoint, received.status());
      return;
    }
    if (*received == LocalEndpoint::Received::kNothing) return;
    while (endpoint.state == LocalEndpoint::State::kOpen) {
      const Result<std::optional<LocalEndpoint::Frame>> frame = endpoint.next_frame();
      Status taken = frame.status();
      if (taken.ok()) {
        if (!frame.value().has_value()) break;
        taken = take_frame(endpoint, frame.value()->bytes, sink);
      }
      // A callback may have closed the endpoint meanwhile.
      if (!taken.ok() && endpoint.state == LocalEndpoint::State::kOpen) refuse(endpoint, taken);
    }
    if (*received == LocalEndpoint::Received::kEnd && endpoint.state == LocalEndpoint::State::kOpen) {
      end(endpoint,
          Status(StatusCode::kUnavailable,
                 endpoint.unfinished_bytes() == 0
                     ? fmt::format("{} closed the connection", endpoint.peer())
                     : fmt::format("{} closed the connection within a message, after {} bytes of it",
                                   endpoint.peer(), endpoint.unfinished_bytes()),
                 {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = endpoint.peer()}));
    }
  }
}

Status LocalTransport::check_sender(LocalEndpoint& endpoint, FleetToken token,
                                    Incarnation incarnation) const {
  const auto refused = [&](std::string_view problem) {
    return Status(StatusCode::kUnauthenticated, fmt::format("{} {}", endpoint.peer(), problem),
                  {.reason = Reason::kBadToken, .fault = Fault::kPeer, .peer = endpoint.peer()});
  };
  if (token != options_.token) return refused("belongs to another fleet: its token is not ours");
  if (endpoint.incarnation == 0) {
    endpoint.incarnation = incarnation;
    if (endpoint.accepted()) endpoint.deadline_ns = 0;  // it has proven itself
  }
  if (endpoint.incarnation != incarnation) return refused("changed its incarnation on one connection");
  return {};
}

Status LocalTransport::take_frame(LocalEndpoint& endpoint, std::span<const std::byte> bytes,
                                  TransportSink& sink) {
  if (is_local_frame(bytes.data())) {
    SHARDPULL_ASSIGN_OR_RETURN(const LocalFrame frame, decode_local_frame(bytes.data(), bytes.size()));
    SHARDPULL_RETURN_IF_ERROR(check_sender(endpoint, frame.token, frame.incarnation));
    const std::uint64_t before = endpoint.regions.held_bytes();
    Status taken = take_local_frame(endpoint, frame);
    held_bytes_.fetch_add(endpoint.regions.held_bytes() - before, std::memory_order_relaxed);
    return taken;
  }
  SHARDPULL_ASSIGN_OR_RETURN(const HotHeader header, decode_hot_header(bytes.data(), bytes.size()));
  SHARDPULL_RETURN_IF_ERROR(check_sender(endpoint, header.token, header.incarnation));
  const std::span<const std::byte> payload = bytes.subspan(kHotHeaderBytes);
  if (payload_sum(payload.data(), payload.size()) != header.sum) {
    return Status(StatusCode::kDataLoss,
                  fmt::format("the payload of a {} message from {} is not what was sent: its sum differs",
                              name_of(header.type), endpoint.peer()),
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = endpoint.peer()});
  }
  header_bytes_.fetch_add(bytes.size(), std::memory_order_relaxed);
  messages_.fetch_add(1, std::memory_order_relaxed);
  sink.on_message(endpoint.id(), header, payload.data());
  return {};
}

Status LocalTransport::take_local_frame(LocalEndpoint& endpoint, const LocalFrame& frame) {
  if (frame.backend != backend_) {
    return Status(
        StatusCode::kFailedPrecondition,
        fmt::format(
            "{} speaks the {} transport, this process {}: give all processes of a fleet the same transport",
            endpoint.peer(), name_of(frame.backend), name_of(backend_)),
        {.reason = Reason::kSettingMismatch, .fault = Fault::kPeer, .peer = endpoint.peer()});
  }
  if (frame.kind == LocalFrameKind::kRetire) return endpoint.regions.retire(frame.region, frame.generation);
  Result<std::shared_ptr<const PeerMemory>> memory = open_grant(frame, endpoint);
  if (!memory.ok() && memory.status().info().reason == Reason::kCorrupt) {
    return memory.status().with_context(endpoint.peer());
  }
  return endpoint.regions.grant(frame.region, frame.generation, std::move(memory));
}

void LocalTransport::end(LocalEndpoint& endpoint, Status why) {
  endpoint.state = LocalEndpoint::State::kClosed;
  endpoint.why = std::move(why);
  closed_.push_back(endpoint.id());
  watch(endpoint);
}

void LocalTransport::refuse(LocalEndpoint& endpoint, const Status& why) {
  if (refused_peers_.size() < kMaxRememberedPeers && refused_peers_.insert(endpoint.peer()).second) {
    log_warn("{}: closed the connection to {}: {}", options_.self_name, endpoint.peer(), why.message());
  }
  end(endpoint, why);
}

void LocalTransport::flush(LocalEndpoint& endpoint) {
  const bool sent = endpoint.flush().ok();
  if (endpoint.state == LocalEndpoint::State::kLingering && (!sent || endpoint.queued_bytes() == 0)) {
    endpoint.state = LocalEndpoint::State::kGone;
    gone_.push_back(endpoint.id());
  }
  watch(endpoint);
}

void LocalTransport::watch(LocalEndpoint& endpoint) {
  using State = LocalEndpoint::State;
  std::uint32_t events = 0;
  if (endpoint.state == State::kOpen) events |= EPOLLIN | EPOLLRDHUP;
  if (endpoint.state == State::kOpen || endpoint.state == State::kLingering) {
    if (endpoint.must_retry()) {
      retries_.push_back(endpoint.id());
    } else if (endpoint.queued_bytes() > 0) {
      events |= EPOLLOUT;
    }
  }
  if (events == endpoint.watched_events) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = endpoint.id();
  // With nothing to wait for, epoll would still report a hang-up, over and over.
  const int operation = events == 0                    ? EPOLL_CTL_DEL
                        : endpoint.watched_events == 0 ? EPOLL_CTL_ADD
                                                       : EPOLL_CTL_MOD;
  epoll_ctl(epoll_.get(), operation, endpoint.fd(), &event);
  endpoint.watched_events = events;
}

void LocalTransport::retire_freed_regions() {
  const std::vector<OwnRegions::Name> freed = shared_->regions.take_freed();
  if (freed.empty()) return;
  for (auto& [id, endpoint] : endpoints_) {
    if (endpoint->state != LocalEndpoint::State::kOpen) continue;
    for (const OwnRegions::Name& name : freed) {
      const auto granted = endpoint->granted.find(name.region);
      if (granted == endpoint->granted.end() || granted->second != name.generation) continue;
      endpoint->granted.erase(granted);
      const auto frame = encode(frame_of(LocalFrameKind::kRetire, name.region, name.generation));
      endpoint->queue({frame.begin(), frame.end()});
    }
    flush(*endpoint);
  }
}

void LocalTransport::count_down_read(EndpointId id) {
  if (LocalEndpoint* const endpoint = find(id); endpoint != nullptr && endpoint->reads > 0) --endpoint->reads;
}

void LocalTransport::report_reads(TransportSink& sink) {
  for (ReadThreads::Done& done : readers_.take_done()) {
    const auto found = reads_.find(done.id);
    if (found == reads_.end()) continue;
    settled_reads_.push_back({.read = found->second, .status = std::move(done.status)});
    reads_.erase(found);
  }
  for (const SettledRead& settled : std::exchange(settled_reads_, {})) {
    if (settled.status.ok()) payload_bytes_read_.fetch_add(settled.read.bytes, std::memory_order_relaxed);
    count_down_read(settled.read.endpoint);
    sink.on_read_done(settled.read.token, settled.status);
  }
}

void LocalTransport::report_closed(TransportSink& sink) {
  for (const EndpointId id : std::exchange(closed_, {})) {
    LocalEndpoint* const endpoint = find(id);
    if (endpoint == nullptr || endpoint->state != LocalEndpoint::State::kClosed) continue;
    if (endpoint->reads > 0) {
      closed_.push_back(id);
      continue;
    }
    endpoint->state = LocalEndpoint::State::kGone;
    gone_.push_back(id);
    sink.on_closed(id, endpoint->why);
  }
}

void LocalTransport::run_timers() {
  const std::int64_t now_ns = clock_.now_ns();
  if (accept_again_ns_ != 0 && now_ns >= accept_again_ns_) {
    accept_again_ns_ = 0;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kListenKey;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
  }
  for (const EndpointId id : std::exchange(retries_, {})) {
    if (LocalEndpoint* const endpoint = find(id); endpoint != nullptr) flush(*endpoint);
  }
  for (const EndpointId id : std::exchange(timed_, {})) {
    LocalEndpoint* const endpoint = find(id);
    if (endpoint == nullptr || endpoint->deadline_ns == 0) continue;
    if (now_ns < endpoint->deadline_ns) {
      timed_.push_back(id);
      continue;
    }
    if (endpoint->state == LocalEndpoint::State::kLingering) {
      endpoint->state = LocalEndpoint::State::kGone;
      gone_.push_back(id);
      watch(*endpoint);
    } else if (endpoint->state == LocalEndpoint::State::kOpen) {
      refuse(*endpoint,
             Status(StatusCode::kDeadlineExceeded,
                    fmt::format("{} connected and sent no message", endpoint->peer()),
                    {.reason = Reason::kBadToken, .fault = Fault::kPeer, .peer = endpoint->peer()}));
    }
  }
}

void LocalTransport::remove_gone() {
  for (const EndpointId id : std::exchange(gone_, {})) {
    const auto found = endpoints_.find(id);
    if (found == endpoints_.end()) continue;
    held_bytes_.fetch_sub(found->second->regions.held_bytes(), std::memory_order_relaxed);
    open_endpoints_.fetch_sub(1, std::memory_order_relaxed);
    endpoints_.erase(found);
  }
}

std::int64_t LocalTransport::next_timer_ns() const {
  std::int64_t next = accept_again_ns_ != 0 ? accept_again_ns_ : kNever;
  if (!retries_.empty()) next = std::min(next, clock_.now_ns() + kRetryNs);
  for (const EndpointId id : timed_) {
    const auto found = endpoints_.find(id);
    if (found != endpoints_.end() && found->second->deadline_ns != 0)
      next = std::min(next, found->second->deadline_ns);
  }
  return next;
}

TransportCounters LocalTransport::counters() const {
  TransportCounters out;
  out.payload_bytes_read = payload_bytes_read_.load(std::memory_order_relaxed);
  out.header_bytes = header_bytes_.load(std::memory_order_relaxed);
  out.messages = messages_.load(std::memory_order_relaxed);
  out.endpoints = open_endpoints_.load(std::memory_order_relaxed);
  out.mapped_bytes = can_map() ? held_bytes_.load(std::memory_order_relaxed) : 0;
  out.regions = shared_->regions.live_regions();
  out.region_bytes = shared_->regions.live_bytes();
  return out;
}

Result<LocalTransport::Setup> LocalTransport::set_up(LocalOptions options, LocalBackend backend) {
  const auto bad = [](std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = Reason::kBadArgument});
  };
  if (options.token == 0 || options.incarnation == 0) {
    return bad(fmt::format("the {} transport needs a fleet token and an incarnation", name_of(backend)));
  }
  if (!valid_name(options.self_name)) {
    return bad(fmt::format("\"{}\" cannot name a socket file: letters, digits, '-', '_' and '.', not first",
                           options.self_name));
  }
  SHARDPULL_RETURN_IF_ERROR(check_owner_only_directory(options.directory, "the run directory"));
  auto shared = std::make_shared<LocalShared>();
  shared->wake_fd = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeKey;
  if (!shared->wake_fd || !epoll ||
      epoll_ctl(epoll.get(), EPOLL_CTL_ADD, shared->wake_fd.get(), &event) != 0) {
    return host_error(
        fmt::format("the {} transport cannot wait for events: {}", name_of(backend), std::strerror(errno)));
  }
  return Setup{.options = std::move(options), .shared = std::move(shared), .epoll = std::move(epoll)};
}

}  // namespace shardpull
