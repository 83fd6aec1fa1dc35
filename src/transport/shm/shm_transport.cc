#include "transport/shm/shm_transport.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/log.h"
#include "base/status_macros.h"
#include "base/unix_socket.h"
#include "transport/regions.h"
#include "transport/shm/copy_worker.h"
#include "transport/shm/shared_memory.h"
#include "transport/shm/shm_endpoint.h"
#include "transport/shm/shm_frame.h"

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
constexpr std::uint64_t kInlineReadBytes = 128u << 10;  // copied faster than the copying thread could be woken
constexpr std::int64_t kDestructorFlushNs = kNanosPerSecond;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

Status host_error(std::string message) {
  return Status(StatusCode::kFailedPrecondition, std::move(message), {.reason = Reason::kHost, .fault = Fault::kHost});
}

Status gone(EndpointId endpoint) {
  return Status(StatusCode::kUnavailable, fmt::format("endpoint {} is closed", endpoint),
                {.reason = Reason::kPeerLost, .fault = Fault::kPeer});
}

bool valid_name(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  };
  return !name.empty() && name.front() != '.' && std::all_of(name.begin(), name.end(), allowed);
}

// What exported memory and other threads share with the transport, and may outlive it.
struct Shared {
  OwnRegions regions;
  UniqueFd wake_fd;

  void wake() const {
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the reader is being woken already.
    [[maybe_unused]] const ssize_t written = write(wake_fd.get(), &one, sizeof one);
  }
};

class ShmExportedMemory final : public ExportedMemory {
 public:
  ShmExportedMemory(std::shared_ptr<Shared> shared, std::shared_ptr<const SharedSegment> segment, OwnRegions::Name name)
      : shared_(std::move(shared)), segment_(std::move(segment)), name_(name) {
    ref_.address = segment_->data();
    ref_.bytes = segment_->bytes();
    ref_.region = name.region;
    ref_.generation = name.generation;
  }
  ~ShmExportedMemory() override {
    shared_->regions.free(name_, segment_->bytes());
    shared_->wake();  // peers are told from the progress thread
  }
  const std::shared_ptr<const SharedSegment>& segment() const { return segment_; }
  bool belongs_to(const std::shared_ptr<Shared>& shared) const { return shared_ == shared; }

 private:
  const std::shared_ptr<Shared> shared_;
  const std::shared_ptr<const SharedSegment> segment_;
  const OwnRegions::Name name_;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(ShmOptions options, std::shared_ptr<Shared> shared, UniqueFd epoll)
      : options_(std::move(options)),
        shared_(std::move(shared)),
        epoll_(std::move(epoll)),
        copier_([shared = shared_] { shared->wake(); }) {}
  ~ShmTransport() override;

  std::string name() const override { return "shm"; }
  bool can_map() const override { return true; }
  Result<std::shared_ptr<ExportedMemory>> allocate(std::uint64_t bytes, std::string_view what) override;
  Result<std::string> listen() override;
  Result<EndpointId> connect(const std::string& address, std::int64_t timeout_ns) override;
  Status send(EndpointId endpoint, HotHeader header, const std::byte* payload, std::size_t length) override;
  Status grant(EndpointId endpoint, const std::shared_ptr<ExportedMemory>& memory) override;
  void close(EndpointId endpoint) override;
  void read(EndpointId endpoint, const RemoteRef& remote, std::byte* local, ReadToken token) override;
  Result<Mapping> map(EndpointId endpoint, const RemoteRef& remote) override;
  void add_mapped_bytes(std::uint64_t bytes) override { payload_bytes_read_.fetch_add(bytes, std::memory_order_relaxed); }
  Status progress(std::int64_t timeout_ns, TransportSink& sink) override;
  void wake() override { shared_->wake(); }
  TransportCounters counters() const override;

 private:
  struct Read {
    EndpointId endpoint = 0;
    ReadToken token = 0;
    std::uint64_t bytes = 0;
  };
  struct SettledRead {
    Read read;
    Status status;
  };

  ShmEndpoint* find(EndpointId id);
  Result<EndpointId> add(UniqueFd fd, std::string peer, bool accepted);
  void accept_peers(TransportSink& sink);
  void receive(ShmEndpoint& endpoint, TransportSink& sink);
  Status take_frame(ShmEndpoint& endpoint, std::span<const std::byte> frame, TransportSink& sink);
  Status check_sender(ShmEndpoint& endpoint, FleetToken token, Incarnation incarnation) const;
  Status take_shm_frame(ShmEndpoint& endpoint, const ShmFrame& frame);
  // Ends an endpoint that the peer closed or broke; it is reported when its reads have been.
  void end(ShmEndpoint& endpoint, Status why);
  // The same for a peer that sent what is not ours: logged, once per peer.
  void refuse(ShmEndpoint& endpoint, const Status& why);
  void flush(ShmEndpoint& endpoint);
  void watch(ShmEndpoint& endpoint);
  void retire_freed_regions();
  void report_reads(TransportSink& sink);
  void report_closed(TransportSink& sink);
  void count_down_read(EndpointId id);
  void run_timers();
  void remove_gone();
  std::int64_t next_timer_ns() const;
  bool work_waits() const { return !settled_reads_.empty() || !closed_.empty() || !gone_.empty(); }
  void linger_all();

  const ShmOptions options_;
  const std::shared_ptr<Shared> shared_;
  const SystemClock& clock_ = SystemClock::instance();

  UniqueFd epoll_;
  UniqueFd listener_;
  std::string listen_path_;
  ino_t listen_inode_ = 0;
  std::int64_t accept_again_ns_ = 0;  // 0: accepting
  bool told_out_of_descriptors_ = false;

  std::unordered_map<EndpointId, std::unique_ptr<ShmEndpoint>> endpoints_;
  EndpointId last_endpoint_ = 0;
  std::vector<EndpointId> closed_;   // in state kClosed, to be reported
  std::vector<EndpointId> gone_;     // to be destroyed at the end of the round
  std::vector<EndpointId> timed_;    // with a deadline
  std::vector<EndpointId> retries_;  // with frames to send again soon
  std::unordered_set<std::string> refused_peers_;

  std::uint64_t last_read_ = 0;
  std::unordered_map<std::uint64_t, Read> reads_;
  std::vector<SettledRead> settled_reads_;  // refused, or done at once; to be reported

  std::atomic<std::uint64_t> payload_bytes_read_{0}, header_bytes_{0}, messages_{0}, open_endpoints_{0}, mapped_bytes_{0};

  CopyWorker copier_;  // last: it ends before what it wakes
};

ShmTransport::~ShmTransport() {
  if (listener_) {
    listener_.reset();
    if (const Result<SocketPath> path = SocketPath::open(listen_path_); path.ok()) {
      struct stat info {};
      // Only our own socket: somebody may have made another one of this name meanwhile.
      if (lstat(path->name().c_str(), &info) == 0 && info.st_ino == listen_inode_) unlink(path->name().c_str());
    }
  }
  linger_all();
}

void ShmTransport::linger_all() {
  const std::int64_t give_up_ns = clock_.now_ns() + kDestructorFlushNs;
  for (;;) {
    std::vector<pollfd> waiting;
    for (auto& [id, endpoint] : endpoints_) {
      if (endpoint->queued_bytes() == 0 || endpoint->state == ShmEndpoint::State::kClosed) continue;
      endpoint->flush().ignore();
      if (endpoint->queued_bytes() > 0) waiting.push_back({.fd = endpoint->fd(), .events = POLLOUT, .revents = 0});
    }
    const std::int64_t left_ns = give_up_ns - clock_.now_ns();
    if (waiting.empty() || left_ns <= 0) return;
    poll(waiting.data(), waiting.size(), static_cast<int>(std::min<std::int64_t>(left_ns / kNanosPerMilli + 1, 50)));
  }
}

Result<std::shared_ptr<ExportedMemory>> ShmTransport::allocate(std::uint64_t bytes, std::string_view what) {
  SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const SharedSegment> segment, SharedSegment::create(bytes, what));
  SHARDPULL_ASSIGN_OR_RETURN(const OwnRegions::Name name, shared_->regions.add(bytes));
  return std::shared_ptr<ExportedMemory>(std::make_shared<ShmExportedMemory>(shared_, std::move(segment), name));
}

Result<std::string> ShmTransport::listen() {
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
  struct stat info {};
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

Result<EndpointId> ShmTransport::connect(const std::string& address, std::int64_t timeout_ns) {
  SHARDPULL_ASSIGN_OR_RETURN(UniqueFd fd, connect_unix(address, timeout_ns));
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) {
    return Status(StatusCode::kPermissionDenied,
                  fmt::format("the process that listens at \"{}\" runs as user {}, this one as user {}", address, peer.uid,
                              geteuid()),
                  {.reason = Reason::kHost, .fault = Fault::kPeer});
  }
  const std::size_t slash = address.rfind('/');
  return add(std::move(fd), fmt::format("{} (pid {})", address.substr(slash == std::string::npos ? 0 : slash + 1), peer.pid),
             /*accepted=*/false);
}

ShmEndpoint* ShmTransport::find(EndpointId id) {
  const auto found = endpoints_.find(id);
  return found == endpoints_.end() ? nullptr : found->second.get();
}

Result<EndpointId> ShmTransport::add(UniqueFd fd, std::string peer, bool accepted) {
  if (last_endpoint_ == std::numeric_limits<EndpointId>::max()) {
    return Status(StatusCode::kResourceExhausted, "no endpoint number is left",
                  {.reason = Reason::kLimit, .fault = Fault::kLibrary});
  }
  auto endpoint = std::make_unique<ShmEndpoint>(++last_endpoint_, std::move(fd), std::move(peer), accepted);
  epoll_event event{};
  event.events = endpoint->watched_events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = endpoint->id();
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, endpoint->fd(), &event) != 0) {
    return host_error(fmt::format("cannot watch the connection to {}: {}", endpoint->peer(), std::strerror(errno)));
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

Status ShmTransport::send(EndpointId id, HotHeader header, const std::byte* payload, std::size_t length) {
  ShmEndpoint* const endpoint = find(id);
  if (endpoint == nullptr || endpoint->state != ShmEndpoint::State::kOpen) return gone(id);
  if (length > kMaxHotPayloadBytes) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a {} message with {} bytes, above the limit of {}", name_of(header.type), length,
                              kMaxHotPayloadBytes),
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

Status ShmTransport::grant(EndpointId id, const std::shared_ptr<ExportedMemory>& memory) {
  ShmEndpoint* const endpoint = find(id);
  if (endpoint == nullptr || endpoint->state != ShmEndpoint::State::kOpen) return gone(id);
  const auto* const exported = dynamic_cast<const ShmExportedMemory*>(memory.get());
  if (exported == nullptr || !exported->belongs_to(shared_)) {
    return Status(StatusCode::kInvalidArgument, "only memory that this transport allocated can be granted",
                  {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
  }
  const MemoryRef& ref = exported->ref();
  std::uint32_t& granted = endpoint->granted[ref.region];
  if (granted == ref.generation) return {};
  granted = ref.generation;
  const auto frame = encode(ShmFrame{.kind = ShmFrameKind::kGrant,
                                     .token = options_.token,
                                     .incarnation = options_.incarnation,
                                     .region = ref.region,
                                     .generation = ref.generation,
                                     .bytes = ref.bytes});
  endpoint->queue({frame.begin(), frame.end()}, exported->segment());
  Status sent = endpoint->flush();
  watch(*endpoint);
  return sent;
}

void ShmTransport::close(EndpointId id) {
  ShmEndpoint* const endpoint = find(id);
  if (endpoint == nullptr) return;
  using State = ShmEndpoint::State;
  if (endpoint->state == State::kLingering || endpoint->state == State::kGone) return;
  const bool send_rest = endpoint->state == State::kOpen && endpoint->flush().ok() && endpoint->queued_bytes() > 0;
  endpoint->state = send_rest ? State::kLingering : State::kGone;
  if (send_rest) {
    endpoint->deadline_ns = clock_.now_ns() + options_.close_timeout_ns;
    timed_.push_back(id);
  } else {
    gone_.push_back(id);
  }
  watch(*endpoint);
}

void ShmTransport::read(EndpointId id, const RemoteRef& remote, std::byte* local, ReadToken token) {
  const Read read{.endpoint = id, .token = token, .bytes = remote.bytes};
  ShmEndpoint* const endpoint = find(id);
  if (endpoint == nullptr || endpoint->state != ShmEndpoint::State::kOpen) {
    settled_reads_.push_back({.read = {.endpoint = 0, .token = token, .bytes = 0}, .status = gone(id)});
    return;
  }
  ++endpoint->reads;
  Result<std::shared_ptr<const PeerSegment>> segment = endpoint->regions.find(remote);
  if (!segment.ok()) {
    settled_reads_.push_back({.read = read, .status = segment.status()});
    return;
  }
  if (remote.bytes <= kInlineReadBytes) {
    if (remote.bytes > 0) std::memcpy(local, segment.value()->data() + remote.offset, static_cast<std::size_t>(remote.bytes));
    settled_reads_.push_back({.read = read, .status = {}});
    return;
  }
  CopyWorker::Job job{.id = ++last_read_,
                      .from = segment.value()->data() + remote.offset,
                      .to = local,
                      .bytes = remote.bytes,
                      .keeps_alive = segment.value()};
  if (Status queued = copier_.submit(std::move(job)); !queued.ok()) {
    settled_reads_.push_back({.read = read, .status = std::move(queued)});
    return;
  }
  reads_.emplace(last_read_, read);
}

Result<Transport::Mapping> ShmTransport::map(EndpointId id, const RemoteRef& remote) {
  ShmEndpoint* const endpoint = find(id);
  if (endpoint == nullptr || endpoint->state != ShmEndpoint::State::kOpen) return gone(id);
  SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const PeerSegment> segment, endpoint->regions.find(remote));
  return Mapping{.data = segment->data() + remote.offset, .owner = segment};
}

Status ShmTransport::progress(std::int64_t timeout_ns, TransportSink& sink) {
  std::int64_t wait_ns = std::max<std::int64_t>(0, timeout_ns);
  if (const std::int64_t timer_ns = next_timer_ns(); timer_ns != kNever) {
    wait_ns = std::min(wait_ns, std::max<std::int64_t>(0, timer_ns - clock_.now_ns()));
  }
  if (work_waits()) wait_ns = 0;

  std::array<epoll_event, kEventsPerRound> events;
  const timespec wait{.tv_sec = wait_ns / kNanosPerSecond, .tv_nsec = wait_ns % kNanosPerSecond};
  int count = epoll_pwait2(epoll_.get(), events.data(), kEventsPerRound, &wait, nullptr);
  if (count < 0 && errno == ENOSYS) {  // a kernel before 5.11 waits in milliseconds
    const std::int64_t wait_ms = std::min<std::int64_t>((wait_ns + kNanosPerMilli - 1) / kNanosPerMilli, 1'000'000);
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
    } else if (ShmEndpoint* const endpoint = find(static_cast<EndpointId>(event.data.u64)); endpoint != nullptr) {
      if ((event.events & EPOLLOUT) != 0 || endpoint->state == ShmEndpoint::State::kLingering) flush(*endpoint);
      if (endpoint->state == ShmEndpoint::State::kOpen && (event.events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) {
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

void ShmTransport::accept_peers(TransportSink& sink) {
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
      log_warn("{}: refused a connection from process {} of user {}: this process runs as user {}", options_.self_name,
               peer.pid, peer.uid, geteuid());
      continue;
    }
    Result<EndpointId> id = add(std::move(fd), fmt::format("pid {}", peer.pid), /*accepted=*/true);
    if (!id.ok()) {
      log_warn("{}: {}", options_.self_name, id.status().message());
      continue;
    }
    sink.on_accepted(*id);
  }
}

void ShmTransport::receive(ShmEndpoint& endpoint, TransportSink& sink) {
  for (int i = 0; i < kReceivesPerRound && endpoint.state == ShmEndpoint::State::kOpen; ++i) {
    const Result<ShmEndpoint::Received> received = endpoint.receive();
    if (!received.ok()) {
      refuse(endpoint, received.status());
      return;
    }
    if (*received == ShmEndpoint::Received::kNothing) return;
    while (endpoint.state == ShmEndpoint::State::kOpen) {
      const Result<std::optional<ShmEndpoint::Frame>> frame = endpoint.next_frame();
      Status taken = frame.status();
      if (taken.ok()) {
        if (!frame.value().has_value()) break;
        taken = take_frame(endpoint, frame.value()->bytes, sink);
      }
      // A callback may have closed the endpoint meanwhile.
      if (!taken.ok() && endpoint.state == ShmEndpoint::State::kOpen) refuse(endpoint, taken);
    }
    if (*received == ShmEndpoint::Received::kEnd && endpoint.state == ShmEndpoint::State::kOpen) {
      end(endpoint, Status(StatusCode::kUnavailable,
                           endpoint.unfinished_bytes() == 0
                               ? fmt::format("{} closed the connection", endpoint.peer())
                               : fmt::format("{} closed the connection within a message, after {} bytes of it",
                                             endpoint.peer(), endpoint.unfinished_bytes()),
                           {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = endpoint.peer()}));
    }
  }
}

Status ShmTransport::check_sender(ShmEndpoint& endpoint, FleetToken token, Incarnation incarnation) const {
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

Status ShmTransport::take_frame(ShmEndpoint& endpoint, std::span<const std::byte> bytes, TransportSink& sink) {
  if (is_shm_frame(bytes.data())) {
    SHARDPULL_ASSIGN_OR_RETURN(const ShmFrame frame, decode_shm_frame(bytes.data(), bytes.size()));
    SHARDPULL_RETURN_IF_ERROR(check_sender(endpoint, frame.token, frame.incarnation));
    const std::uint64_t before = endpoint.regions.held_bytes();
    Status taken = take_shm_frame(endpoint, frame);
    mapped_bytes_.fetch_add(endpoint.regions.held_bytes() - before, std::memory_order_relaxed);
    return taken;
  }
  SHARDPULL_ASSIGN_OR_RETURN(const HotHeader header, decode_hot_header(bytes.data(), bytes.size()));
  SHARDPULL_RETURN_IF_ERROR(check_sender(endpoint, header.token, header.incarnation));
  const std::span<const std::byte> payload = bytes.subspan(kHotHeaderBytes);
  if (payload_sum(payload.data(), payload.size()) != header.sum) {
    return Status(StatusCode::kDataLoss,
                  fmt::format("the payload of a {} message from {} is not what was sent: its sum differs", name_of(header.type),
                              endpoint.peer()),
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = endpoint.peer()});
  }
  header_bytes_.fetch_add(bytes.size(), std::memory_order_relaxed);
  messages_.fetch_add(1, std::memory_order_relaxed);
  sink.on_message(endpoint.id(), header, payload.data());
  return {};
}

Status ShmTransport::take_shm_frame(ShmEndpoint& endpoint, const ShmFrame& frame) {
  if (frame.kind == ShmFrameKind::kRetire) return endpoint.regions.retire(frame.region, frame.generation);
  UniqueFd fd = endpoint.take_descriptor();
  if (!fd) {
    return Status(StatusCode::kDataLoss, fmt::format("{} granted a region without its descriptor", endpoint.peer()),
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = endpoint.peer()});
  }
  Result<std::shared_ptr<const PeerSegment>> segment = PeerSegment::map(std::move(fd), frame.bytes);
  if (!segment.ok() && segment.status().info().reason == Reason::kCorrupt) {
    return segment.status().with_context(endpoint.peer());
  }
  // That this host cannot map it is told to whoever asks for the region.
  return endpoint.regions.grant(frame.region, frame.generation, std::move(segment));
}

void ShmTransport::end(ShmEndpoint& endpoint, Status why) {
  endpoint.state = ShmEndpoint::State::kClosed;
  endpoint.why = std::move(why);
  closed_.push_back(endpoint.id());
  watch(endpoint);
}

void ShmTransport::refuse(ShmEndpoint& endpoint, const Status& why) {
  if (refused_peers_.size() < kMaxRememberedPeers && refused_peers_.insert(endpoint.peer()).second) {
    log_warn("{}: closed the connection to {}: {}", options_.self_name, endpoint.peer(), why.message());
  }
  end(endpoint, why);
}

void ShmTransport::flush(ShmEndpoint& endpoint) {
  const bool sent = endpoint.flush().ok();
  if (endpoint.state == ShmEndpoint::State::kLingering && (!sent || endpoint.queued_bytes() == 0)) {
    endpoint.state = ShmEndpoint::State::kGone;
    gone_.push_back(endpoint.id());
  }
  watch(endpoint);
}

void ShmTransport::watch(ShmEndpoint& endpoint) {
  using State = ShmEndpoint::State;
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
  const int operation = events == 0 ? EPOLL_CTL_DEL : endpoint.watched_events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  epoll_ctl(epoll_.get(), operation, endpoint.fd(), &event);
  endpoint.watched_events = events;
}

void ShmTransport::retire_freed_regions() {
  const std::vector<OwnRegions::Name> freed = shared_->regions.take_freed();
  if (freed.empty()) return;
  for (auto& [id, endpoint] : endpoints_) {
    if (endpoint->state != ShmEndpoint::State::kOpen) continue;
    for (const OwnRegions::Name& name : freed) {
      const auto granted = endpoint->granted.find(name.region);
      if (granted == endpoint->granted.end() || granted->second != name.generation) continue;
      endpoint->granted.erase(granted);
      const auto frame = encode(ShmFrame{.kind = ShmFrameKind::kRetire,
                                         .token = options_.token,
                                         .incarnation = options_.incarnation,
                                         .region = name.region,
                                         .generation = name.generation,
                                         .bytes = 0});
      endpoint->queue({frame.begin(), frame.end()});
    }
    flush(*endpoint);
  }
}

void ShmTransport::count_down_read(EndpointId id) {
  if (ShmEndpoint* const endpoint = find(id); endpoint != nullptr && endpoint->reads > 0) --endpoint->reads;
}

void ShmTransport::report_reads(TransportSink& sink) {
  for (const std::uint64_t id : copier_.take_done()) {
    const auto found = reads_.find(id);
    if (found == reads_.end()) continue;
    settled_reads_.push_back({.read = found->second, .status = {}});
    reads_.erase(found);
  }
  for (const SettledRead& settled : std::exchange(settled_reads_, {})) {
    if (settled.status.ok()) payload_bytes_read_.fetch_add(settled.read.bytes, std::memory_order_relaxed);
    count_down_read(settled.read.endpoint);
    report_read(sink, settled.read.token, settled.status);
  }
}

void ShmTransport::report_closed(TransportSink& sink) {
  for (const EndpointId id : std::exchange(closed_, {})) {
    ShmEndpoint* const endpoint = find(id);
    if (endpoint == nullptr || endpoint->state != ShmEndpoint::State::kClosed) continue;
    if (endpoint->reads > 0) {
      closed_.push_back(id);
      continue;
    }
    endpoint->state = ShmEndpoint::State::kGone;
    gone_.push_back(id);
    sink.on_closed(id, endpoint->why);
  }
}

void ShmTransport::run_timers() {
  const std::int64_t now_ns = clock_.now_ns();
  if (accept_again_ns_ != 0 && now_ns >= accept_again_ns_) {
    accept_again_ns_ = 0;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kListenKey;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
  }
  for (const EndpointId id : std::exchange(retries_, {})) {
    if (ShmEndpoint* const endpoint = find(id); endpoint != nullptr) flush(*endpoint);
  }
  for (const EndpointId id : std::exchange(timed_, {})) {
    ShmEndpoint* const endpoint = find(id);
    if (endpoint == nullptr || endpoint->deadline_ns == 0) continue;
    if (now_ns < endpoint->deadline_ns) {
      timed_.push_back(id);
      continue;
    }
    if (endpoint->state == ShmEndpoint::State::kLingering) {
      endpoint->state = ShmEndpoint::State::kGone;
      gone_.push_back(id);
      watch(*endpoint);
    } else if (endpoint->state == ShmEndpoint::State::kOpen) {
      refuse(*endpoint, Status(StatusCode::kDeadlineExceeded,
                               fmt::format("{} connected and sent no message", endpoint->peer()),
                               {.reason = Reason::kBadToken, .fault = Fault::kPeer, .peer = endpoint->peer()}));
    }
  }
}

void ShmTransport::remove_gone() {
  for (const EndpointId id : std::exchange(gone_, {})) {
    const auto found = endpoints_.find(id);
    if (found == endpoints_.end()) continue;
    mapped_bytes_.fetch_sub(found->second->regions.held_bytes(), std::memory_order_relaxed);
    open_endpoints_.fetch_sub(1, std::memory_order_relaxed);
    endpoints_.erase(found);
  }
}

std::int64_t ShmTransport::next_timer_ns() const {
  std::int64_t next = accept_again_ns_ != 0 ? accept_again_ns_ : kNever;
  if (!retries_.empty()) next = std::min(next, clock_.now_ns() + kRetryNs);
  for (const EndpointId id : timed_) {
    const auto found = endpoints_.find(id);
    if (found != endpoints_.end() && found->second->deadline_ns != 0) next = std::min(next, found->second->deadline_ns);
  }
  return next;
}

TransportCounters ShmTransport::counters() const {
  TransportCounters out;
  out.payload_bytes_read = payload_bytes_read_.load(std::memory_order_relaxed);
  out.header_bytes = header_bytes_.load(std::memory_order_relaxed);
  out.messages = messages_.load(std::memory_order_relaxed);
  out.endpoints = open_endpoints_.load(std::memory_order_relaxed);
  out.mapped_bytes = mapped_bytes_.load(std::memory_order_relaxed);
  out.regions = shared_->regions.live_regions();
  out.region_bytes = shared_->regions.live_bytes();
  return out;
}

}  // namespace

Result<std::unique_ptr<Transport>> make_shm_transport(ShmOptions options) {
  const auto bad = [](std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = Reason::kBadArgument});
  };
  if (options.token == 0 || options.incarnation == 0) return bad("the shm transport needs a fleet token and an incarnation");
  if (!valid_name(options.self_name)) {
    return bad(fmt::format("\"{}\" cannot name a socket file: letters, digits, '-', '_' and '.', not first", options.self_name));
  }
  SHARDPULL_RETURN_IF_ERROR(check_owner_only_directory(options.directory, "the run directory"));
  auto shared = std::make_shared<Shared>();
  shared->wake_fd = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeKey;
  if (!shared->wake_fd || !epoll || epoll_ctl(epoll.get(), EPOLL_CTL_ADD, shared->wake_fd.get(), &event) != 0) {
    return host_error(fmt::format("the shm transport cannot wait for events: {}", std::strerror(errno)));
  }
  return std::unique_ptr<Transport>(std::make_unique<ShmTransport>(std::move(options), std::move(shared), std::move(epoll)));
}

}  // namespace shardpull
