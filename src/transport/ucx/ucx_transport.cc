#include "transport/ucx/ucx_transport.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/encoder.h"
#include "base/host_port.h"
#include "base/interfaces.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "transport/ucx/ucx_endpoint.h"
#include "transport/ucx/ucx_frame.h"
#include "transport/ucx/ucx_lane.h"
#include "transport/ucx/ucx_library.h"
#include "transport/ucx/ucx_memory.h"
#include "transport/ucx/ucx_reads.h"

namespace shardpull {
namespace {

// What epoll reports that is no endpoint; endpoints report their id.
constexpr std::uint64_t kWakeKey = 1ull << 32;
constexpr std::uint64_t kListenKey = kWakeKey + 1;
constexpr std::uint64_t kWorkerKey = kWakeKey + 2;
constexpr int kEventsPerRound = 64;
constexpr int kAcceptsPerRound = 64;
constexpr std::int64_t kAcceptPauseNs = 100 * kNanosPerMilli;  // when the process is out of descriptors
constexpr std::uint64_t kSendBufferBytes = 1u << 20;
constexpr std::uint64_t kEagerReadBytes = 4096;  // smaller than a rendezvous is worth
// Over TCP a rendezvous moves the same messages through the same buffers, and waits for the reader before
// each fragment. So fragments are sent at once, each in one of UCX's segments, from which it is copied while
// the caches still hold it.
constexpr std::uint64_t kTcpFragmentBytes = 512u << 10;
constexpr std::uint64_t kTcpSegmentBytes = kTcpFragmentBytes + (4u << 10);  // with the headers
constexpr int kRoundsPerProgress = 256;     // of UCX's own progress, before what it brought is looked at
constexpr std::size_t kMaxUnproven = 1024;  // accepted peers that have not said hello
constexpr std::size_t kMaxServes = 65'536;  // reads of one peer waiting
constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kSharedBytes = 4u << 20;  // left of a read: worth to be halved between UCX workers
constexpr std::uint64_t kMaxEarlyBytes = 64u << 20;
constexpr std::size_t kMaxRememberedPeers = 4096;
constexpr std::int64_t kLetGoNs = kNanosPerSecond;  // for UCX to end what an endpoint has under way
constexpr std::int64_t kDestructorLingerNs = 300 * kNanosPerMilli;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

Status bad_argument(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = Reason::kBadArgument});
}

Status host_error(std::string message) {
  return Status(StatusCode::kFailedPrecondition, std::move(message),
                {.reason = Reason::kHost, .fault = Fault::kHost});
}

Status gone(EndpointId endpoint) {
  return Status(StatusCode::kUnavailable, fmt::format("endpoint {} is closed", endpoint),
                {.reason = Reason::kPeerLost, .fault = Fault::kPeer});
}

Status corrupt(const std::string& peer, std::string_view problem) {
  return Status(StatusCode::kDataLoss, fmt::format("{} {}", peer, problem),
                {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = peer});
}

// The key is put before it when it is known.
std::array<std::byte, kUcxHeaderBytes> header_of(std::uint64_t order,
                                                 const std::array<std::byte, kHotHeaderBytes>& rest) {
  std::array<std::byte, kUcxHeaderBytes> header{};
  std::memcpy(header.data() + sizeof order, &order, sizeof order);
  std::copy(rest.begin(), rest.end(), header.begin() + 2 * sizeof order);
  return header;
}

// Whether the connection has a lane of an RDMA transport. UCX's call for this question is newer than 1.13;
// its listing of the lanes, as "0:rc_mlx5/mlx5_0:1", is not.
bool has_rdma_lane(const UcxLibrary& ucx, ucp_ep_h handle) {
  char* text = nullptr;
  std::size_t size = 0;
  std::FILE* const stream = open_memstream(&text, &size);
  if (stream == nullptr) return false;
  ucx.ucp_ep_print_info(handle, stream);
  std::fclose(stream);
  const std::string_view listing(text, size);
  const auto lists = [&](std::string_view transport) {
    return listing.find(transport) != std::string_view::npos;
  };
  const bool found = lists(":rc_") || lists(":dc_");
  std::free(text);
  return found;
}

}  // namespace

class UcxTransport final : public Transport {
 public:
  UcxTransport(UcxOptions options, std::string interface, SocketAddress own,
               std::shared_ptr<UcxContext> context)
      : options_(std::move(options)),
        interface_(std::move(interface)),
        tcp_(options_.transports == "tcp"),
        eager_bytes_(tcp_ ? kTcpFragmentBytes : kEagerReadBytes),
        fragment_bytes_(tcp_ ? std::min(options_.fragment_bytes, kTcpFragmentBytes)
                             : options_.fragment_bytes),
        own_(own),
        context_(std::move(context)),
        ucx_(context_->ucx) {}
  ~UcxTransport() override;
  Status start();

  std::string name() const override { return tcp_ ? "tcp" : "ucx"; }
  bool can_map() const override { return false; }
  Result<std::shared_ptr<ExportedMemory>> allocate(std::uint64_t bytes, std::string_view what) override;
  Result<std::shared_ptr<ExportedMemory>> adopt(const std::byte* data, std::uint64_t bytes,
                                                std::string_view what) override;
  Result<std::string> listen() override;
  Result<EndpointId> connect(const std::string& address, std::int64_t timeout_ns) override;
  Status send(EndpointId endpoint, HotHeader header, const std::byte* payload, std::size_t length) override;
  Status grant(EndpointId endpoint, const std::shared_ptr<ExportedMemory>& memory) override;
  void close(EndpointId endpoint) override;
  void read(EndpointId endpoint, const RemoteRef& remote, std::byte* local, ReadToken token) override;
  bool can_read_to() const override { return tcp_ && options_.reads != UcxOptions::Reads::kGets; }
  void read_to(EndpointId endpoint, const RemoteRef& remote, std::shared_ptr<ReadTarget> target,
               ReadToken token) override;
  Result<Mapping> map(EndpointId endpoint, const RemoteRef& remote) override;
  void add_mapped_bytes(std::uint64_t bytes) override {
    payload_bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
  }
  Status progress(std::int64_t timeout_ns, TransportSink& sink) override;
  void wake() override { context_->wake(); }
  TransportCounters counters() const override;

 private:
  // ---- called by UCX, on the progress thread, from within its progress: they only note what happened ----
  static void on_error(void* self, ucp_ep_h handle, ucs_status_t status);
  static ucs_status_t on_active_message(void* self, const void* header, std::size_t header_length, void* data,
                                        std::size_t length, const ucp_am_recv_param_t* param);
  static void on_sent(void* request, ucs_status_t status, void* operation);
  static void on_received(void* request, ucs_status_t status, std::size_t length, void* operation);
  ucs_status_t take_active_message(const void* header, std::size_t header_length, void* data,
                                   std::size_t length, const ucp_am_recv_param_t& param);
  void begin_receive(UcxEndpoint& endpoint, void* data, UcxReads::Part part);
  void note_failure(EndpointId endpoint, Status why) { reads_.fail_endpoint(endpoint, std::move(why)); }

  // ---- operations ----
  UcxOperation* begin(UcxEndpoint& endpoint, UcxOperation::Kind kind);
  // UCX's answer to the call that began it: done, failed, or its callback will tell.
  void answered(UcxOperation* operation, ucs_status_ptr_t answer);
  void finished(UcxOperation* operation, ucs_status_t status);
  ucp_request_param_t param_of(UcxOperation* operation) const;

  UcxEndpoint* find(EndpointId id);
  UcxEndpoint* find_open(EndpointId id);
  Result<UcxEndpoint*> add(UniqueFd socket, std::string peer, bool accepted);
  void accept_peers();
  void receive_greeting(UcxEndpoint& endpoint);
  Status take_greeting(UcxEndpoint& endpoint);
  Status take_hello(UcxEndpoint& endpoint, const UcxFrame& frame, std::span<const std::byte> data);
  void post(UcxEndpoint& endpoint, const std::array<std::byte, kHotHeaderBytes>& header,
            std::vector<std::byte> data);
  void post(UcxEndpoint& endpoint, UcxFrame frame, std::vector<std::byte> data = {});
  // Gives UCX a message that waited for the connection, or not.
  void pass_on(UcxEndpoint& endpoint, UcxOperation* operation);

  void take_in_order(UcxIncoming incoming, TransportSink& sink);
  void take_early(EndpointId id, TransportSink& sink);
  Status take(UcxEndpoint& endpoint, const UcxIncoming& incoming, TransportSink& sink);
  std::string transports_text() const;
  Status check_sender(const UcxEndpoint& endpoint, FleetToken token, Incarnation incarnation) const;
  Status take_grant(UcxEndpoint& endpoint, const UcxFrame& frame, const std::vector<std::byte>& data);
  Status take_read(UcxEndpoint& endpoint, const UcxFrame& frame);
  Status take_refused(UcxEndpoint& endpoint, const UcxFrame& frame, const std::vector<std::byte>& data);

  void read(EndpointId endpoint, const RemoteRef& remote, std::byte* local,
            std::shared_ptr<ReadTarget> target, ReadToken token);
  void pump_all();
  void pump_later(UcxEndpoint& endpoint) {
    if (!std::exchange(endpoint.pumped_later, true)) to_pump_.push_back(endpoint.id);
  }
  void pump_serves(UcxEndpoint& endpoint);
  std::deque<UcxServe>::iterator serve_for(UcxEndpoint& endpoint, std::size_t lane) const;
  void pump_gets(UcxEndpoint& endpoint);
  void send_fragment(UcxEndpoint& endpoint, std::deque<UcxServe>::iterator serve, std::size_t lane);
  void take_from_lanes();
  void settle(EndpointId endpoint, ReadToken token, std::uint64_t bytes, Status status);

  // Ends an endpoint: UCX lets go of it, then its reads fail, then it is reported.
  void end(UcxEndpoint& endpoint, Status why);
  // The same for a peer that sent what is not ours: logged, once per host.
  void refuse(UcxEndpoint& endpoint, const Status& why);
  void let_go(UcxEndpoint& endpoint);
  void take_failures();
  void refuse_lost_reads();
  void retire_freed_regions();
  void step_endings();
  void report_reads(TransportSink& sink);
  void report_closed(TransportSink& sink);
  void run_timers();
  void drive();
  bool watch(int fd, std::uint64_t key);
  Status wait(std::int64_t timeout_ns);
  std::int64_t next_timer_ns() const;
  bool work_waits() const {
    return !accepted_.empty() || !to_refuse_.empty() || !greeted_.empty() || !inbox_.empty() ||
           !closed_.empty() || !to_pump_.empty() || reads_.has_news() ||
           std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->has_done(); });
  }

  const UcxOptions options_;
  const std::string interface_;         // that UCX is held to, or empty
  const bool tcp_;                      // and nothing else
  const std::uint64_t eager_bytes_;     // larger fragments are sent by rendezvous
  const std::uint64_t fragment_bytes_;  // of a read
  const SocketAddress own_;
  const std::shared_ptr<UcxContext> context_;
  const UcxLibrary& ucx_;
  const SystemClock& clock_ = SystemClock::instance();

  std::unique_ptr<UcxWorker> worker_;            // carries messages, and data
  std::vector<std::unique_ptr<UcxLane>> lanes_;  // carry data
  std::vector<std::byte> hello_data_;            // the same for all peers
  UniqueFd epoll_;
  UniqueFd listener_;
  std::string listen_address_;
  std::int64_t accept_again_ns_ = 0;  // 0: accepting
  bool told_out_of_descriptors_ = false;

  std::unordered_map<EndpointId, std::unique_ptr<UcxEndpoint>> endpoints_;
  std::unordered_map<ucp_ep_h, EndpointId> by_handle_;
  std::unordered_map<std::uint64_t, EndpointId> by_key_;
  EndpointId last_endpoint_ = 0;
  std::unordered_map<UcxOperation*, std::unique_ptr<UcxOperation>> operations_;

  std::vector<EndpointId> accepted_;  // to be reported
  std::vector<EndpointId> greeted_;   // may have sent messages before their hello was read
  std::vector<UcxIncoming> inbox_;    // to be looked at
  std::vector<EndpointId> closed_;    // to be reported, and removed
  std::vector<EndpointId> to_pump_;   // with room for more fragments
  // Reads that lost a fragment. Told later: UCX calls back while it takes a broken connection down, and does
  // not survive a message on it then.
  struct LostRead {
    EndpointId endpoint = 0;
    std::uint64_t read = 0;
    ucs_status_t why = UCS_OK;
  };
  std::vector<LostRead> to_refuse_;
  std::unordered_set<std::string> refused_peers_;

  UcxReads reads_;

  std::atomic<std::uint64_t> payload_bytes_read_{0}, header_bytes_{0}, messages_{0}, open_endpoints_{0};
};

// ---- life ----

Status UcxTransport::start() {
  SHARDPULL_ASSIGN_OR_RETURN(worker_, UcxWorker::make(context_, &UcxTransport::on_active_message, this));
  while (lanes_.size() + 1 < options_.workers) {
    SHARDPULL_ASSIGN_OR_RETURN(std::unique_ptr<UcxLane> lane, UcxLane::start(context_, reads_));
    lanes_.push_back(std::move(lane));
  }
  ByteWriter hello;
  hello.raw(std::as_bytes(std::span(options_.self_name)));
  const std::string text = transports_text();
  hello.string(text);
  hello.u32(options_.workers);
  const auto add_address = [&](const std::vector<std::byte>& address) {
    hello.u32(static_cast<std::uint32_t>(address.size()));
    hello.raw(address);
  };
  add_address(worker_->address());
  for (const auto& lane : lanes_) add_address(lane->address());
  // UCX ends a process that gives it a damaged address.
  hello.u64(payload_sum(hello.bytes().data(), hello.size()));
  hello_data_ = hello.take();
  if (hello_data_.size() > kMaxUcxHelloDataBytes) {
    return host_error(
        fmt::format("the addresses of {} UCX workers take {} bytes, above the limit of {}: name fewer "
                    "transports or interfaces, or have fewer workers (--ucx-workers)",
                    options_.workers, hello_data_.size(), kMaxUcxHelloDataBytes));
  }
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_ || !watch(worker_->event_fd(), kWorkerKey) || !watch(context_->wake_fd.get(), kWakeKey)) {
    return host_error(fmt::format("the ucx transport cannot wait for events: {}", std::strerror(errno)));
  }
  return {};
}

UcxTransport::~UcxTransport() {
  if (worker_ == nullptr) return;
  listener_.reset();
  class Silence final : public TransportSink {
    void on_accepted(EndpointId) override {}
    void on_message(EndpointId, const HotHeader&, const std::byte*) override {}
    void on_closed(EndpointId, const Status&) override {}
    void on_read_done(ReadToken, const Status&) override {}
  } silence;
  const std::int64_t now_ns = clock_.now_ns();
  for (auto& [id, endpoint] : endpoints_) {
    close(id);
    if (endpoint->deadline_ns != 0)
      endpoint->deadline_ns = std::min(endpoint->deadline_ns, now_ns + kDestructorLingerNs);
  }
  const std::int64_t give_up_ns = now_ns + kDestructorLingerNs + kLetGoNs;
  while (!endpoints_.empty() && clock_.now_ns() < give_up_ns && progress(10 * kNanosPerMilli, silence).ok()) {
  }
  lanes_.clear();
  // UCX ends a process that leaves it a request of this kind.
  for (const auto& [raw, operation] : operations_) {
    if (operation->kind == UcxOperation::Kind::kClose && operation->lane == nullptr &&
        operation->request != nullptr) {
      ucx_.ucp_request_free(operation->request);
    }
  }
  worker_.reset();  // nothing of ours is touched any more
}

Result<std::shared_ptr<ExportedMemory>> UcxTransport::allocate(std::uint64_t bytes, std::string_view what) {
  SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const UcxBlock> block,
                             UcxBlock::allocate(context_, bytes, what));
  SHARDPULL_ASSIGN_OR_RETURN(const OwnRegions::Name name, context_->regions.add(bytes));
  return std::shared_ptr<ExportedMemory>(
      std::make_shared<UcxExportedMemory>(context_, std::move(block), name));
}

Result<std::shared_ptr<ExportedMemory>> UcxTransport::adopt(const std::byte* data, std::uint64_t bytes,
                                                            std::string_view what) {
  const std::pair<const std::byte*, std::uint64_t> key(data, bytes);
  {
    MutexLock lock(context_->mutex);
    std::erase_if(context_->adopted, [](const auto& entry) { return entry.second.expired(); });
    if (const auto found = context_->adopted.find(key); found != context_->adopted.end()) {
      if (std::shared_ptr<UcxExportedMemory> held = found->second.lock(); held != nullptr) {
        return std::shared_ptr<ExportedMemory>(std::move(held));
      }
    }
  }
  SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const UcxBlock> block,
                             UcxBlock::adopt(context_, data, bytes, what));
  SHARDPULL_ASSIGN_OR_RETURN(const OwnRegions::Name name, context_->regions.add(bytes));
  auto memory = std::make_shared<UcxExportedMemory>(context_, std::move(block), name);
  MutexLock lock(context_->mutex);
  context_->adopted[key] = memory;
  return std::shared_ptr<ExportedMemory>(std::move(memory));
}

bool UcxTransport::watch(int fd, std::uint64_t key) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

Result<std::string> UcxTransport::listen() {
  if (listener_) return listen_address_;
  SHARDPULL_RETURN_IF_ERROR(
      check_can_listen(own_, fmt::format("the {} transport of {}", name(), options_.self_name)));
  UniqueFd fd(socket(own_.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  SocketAddress bound;
  bound.length = sizeof bound.storage;
  if (!fd || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(fd.get(), own_.get(), own_.length) != 0 || ::listen(fd.get(), SOMAXCONN) != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0 ||
      !watch(fd.get(), kListenKey)) {
    return host_error(fmt::format("the {} transport of {} cannot listen at {}: {}", name(),
                                  options_.self_name, own_.to_string(), std::strerror(errno)));
  }
  listener_ = std::move(fd);
  listen_address_ = bound.to_string();
  return listen_address_;
}

Result<EndpointId> UcxTransport::connect(const std::string& address, std::int64_t timeout_ns) {
  SHARDPULL_ASSIGN_OR_RETURN(const HostPort parsed, parse_host_port(address, "a peer's address"));
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<SocketAddress> found, resolve(parsed));
  // The family this process uses, where the peer has it.
  const auto same = std::find_if(found.begin(), found.end(),
                                 [&](const SocketAddress& one) { return one.family() == own_.family(); });
  const SocketAddress& target = same != found.end() ? *same : found.front();
  if (target.loopback() != own_.loopback() && options_.interface.empty()) {
    return host_error(fmt::format(
        "the peer's address {} and this process's own {} cannot reach each other: one of them is of its "
        "host only; give each process an address that the others reach (--interface)",
        target.to_string(), own_.host()));
  }
  const auto failed = [&](int error) {
    return Status(StatusCode::kUnavailable,
                  fmt::format("nothing of ours answers at {}: {}", address, std::strerror(error)),
                  {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .retryable = true});
  };
  const std::int64_t give_up_ns = clock_.now_ns() + std::max(timeout_ns, kNanosPerMilli);
  UniqueFd fd(socket(target.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) {
    return host_error(
        fmt::format("no socket to connect to {}: {}; with too many open files, raise the "
                    "limit with: ulimit -n",
                    address, std::strerror(errno)));
  }
  if (::connect(fd.get(), target.get(), target.length) != 0 && errno != EINPROGRESS) return failed(errno);
  pollfd ready{.fd = fd.get(), .events = POLLOUT, .revents = 0};
  int got = 0;
  do {
    const std::int64_t left_ms = (give_up_ns - clock_.now_ns()) / kNanosPerMilli;
    got = poll(&ready, 1, static_cast<int>(std::clamp<std::int64_t>(left_ms, 0, 1'000'000)));
  } while (got < 0 && errno == EINTR);
  int error = got == 0 ? ETIMEDOUT : 0;
  socklen_t size = sizeof error;
  if (got > 0) getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return failed(error);
  SHARDPULL_ASSIGN_OR_RETURN(UcxEndpoint* const endpoint, add(std::move(fd), address, /*accepted=*/false));
  endpoint->deadline_ns = give_up_ns;
  return endpoint->id;
}

Result<UcxEndpoint*> UcxTransport::add(UniqueFd socket, std::string peer, bool accepted) {
  if (last_endpoint_ == std::numeric_limits<EndpointId>::max()) {
    return Status(StatusCode::kResourceExhausted, "no endpoint number is left",
                  {.reason = Reason::kLimit, .fault = Fault::kLibrary});
  }
  // A host that is gone without a word is noticed, too.
  const int on = 1, idle_s = 5, interval_s = 5, count = 3;
  setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);

  auto endpoint = std::make_unique<UcxEndpoint>(++last_endpoint_, std::move(peer), accepted);
  do {
    endpoint->own_key = random_nonzero_u64();
  } while (by_key_.contains(endpoint->own_key));
  // A new socket takes a hello at once.
  const std::string& name = options_.self_name;
  const auto frame = encode(UcxFrame{.kind = UcxFrameKind::kHello,
                                     .token = options_.token,
                                     .incarnation = options_.incarnation,
                                     .read = endpoint->own_key,
                                     .offset = name.size(),
                                     .bytes = hello_data_.size()});
  std::vector<std::byte> hello(frame.begin(), frame.end());
  hello.insert(hello.end(), hello_data_.begin(), hello_data_.end());
  const ssize_t sent = ::send(socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(hello.size()) || !watch(socket.get(), endpoint->id)) {
    return Status(StatusCode::kUnavailable,
                  fmt::format("no connection to {}: {}", endpoint->peer, std::strerror(errno)),
                  {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = endpoint->peer});
  }
  endpoint->socket = std::move(socket);
  UcxEndpoint* const added = endpoint.get();
  by_key_[added->own_key] = added->id;
  endpoints_.emplace(added->id, std::move(endpoint));
  open_endpoints_.fetch_add(1, std::memory_order_relaxed);
  return added;
}

UcxEndpoint* UcxTransport::find(EndpointId id) {
  const auto found = endpoints_.find(id);
  return found == endpoints_.end() ? nullptr : found->second.get();
}

UcxEndpoint* UcxTransport::find_open(EndpointId id) {
  UcxEndpoint* const endpoint = find(id);
  return endpoint != nullptr && endpoint->state == UcxEndpoint::State::kOpen ? endpoint : nullptr;
}

// ---- sending ----

UcxOperation* UcxTransport::begin(UcxEndpoint& endpoint, UcxOperation::Kind kind) {
  auto operation = std::make_unique<UcxOperation>();
  operation->transport = this;
  operation->endpoint = endpoint.id;
  operation->kind = kind;
  ++endpoint.operations;
  UcxOperation* const begun = operation.get();
  operations_.emplace(begun, std::move(operation));
  return begun;
}

ucp_request_param_t UcxTransport::param_of(UcxOperation* operation) const {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.user_data = operation;
  if (operation->kind == UcxOperation::Kind::kReceive) {
    param.cb.recv_am = &UcxTransport::on_received;
  } else {
    param.cb.send = &UcxTransport::on_sent;
  }
  return param;
}

void UcxTransport::answered(UcxOperation* operation, ucs_status_ptr_t answer) {
  if (!UCS_PTR_IS_PTR(answer)) return finished(operation, UCS_PTR_RAW_STATUS(answer));
  operation->request = answer;
}

void UcxTransport::on_sent(void* request, ucs_status_t status, void* data) {
  auto* const operation = static_cast<UcxOperation*>(data);
  UcxTransport& self = *operation->transport;
  self.finished(operation, status);
  self.ucx_.ucp_request_free(request);
}

void UcxTransport::on_received(void* request, ucs_status_t status, std::size_t length, void* data) {
  auto* const operation = static_cast<UcxOperation*>(data);
  UcxTransport& self = *operation->transport;
  if (status == UCS_OK && length != operation->bytes) status = UCS_ERR_MESSAGE_TRUNCATED;
  self.finished(operation, status);
  self.ucx_.ucp_request_free(request);
}

void UcxTransport::finished(UcxOperation* raw, ucs_status_t status) {
  const auto found = operations_.find(raw);
  const std::unique_ptr<UcxOperation> operation = std::move(found->second);
  operations_.erase(found);
  if (operation->kind == UcxOperation::Kind::kFragment) operation->block->end_transfer();
  UcxEndpoint* const endpoint = find(operation->endpoint);
  if (endpoint == nullptr) return;  // it was given up on
  --endpoint->operations;
  using Kind = UcxOperation::Kind;
  switch (operation->kind) {
    case Kind::kSend:
      endpoint->queued_bytes -= operation->bytes;
      if (status != UCS_OK) {
        note_failure(endpoint->id,
                     ucx_error(ucx_, status, fmt::format("{} takes no more messages", endpoint->peer),
                               endpoint->peer));
      }
      return;
    case Kind::kFragment:
      --endpoint->fragments[operation->lane_number];
      pump_later(*endpoint);
      // A reader that gave the read up refuses it, and ignores this; every other one must not wait for ever.
      if (status != UCS_OK) to_refuse_.push_back({endpoint->id, operation->read, status});
      return;
    case Kind::kReceive:
    case Kind::kGet: {
      if (operation->kind == Kind::kGet) {
        --endpoint->gets;
        pump_later(*endpoint);
      }
      return reads_.landed(operation->part,
                           status == UCS_OK
                               ? Status()
                               : ucx_error(ucx_, status, fmt::format("a read from {} failed", endpoint->peer),
                                           endpoint->peer));
    }
    case Kind::kClose:
      endpoint->let_go = --endpoint->closing == 0;
      return;
  }
}

void UcxTransport::post(UcxEndpoint& endpoint, const std::array<std::byte, kHotHeaderBytes>& header,
                        std::vector<std::byte> data) {
  UcxOperation* const operation = begin(endpoint, UcxOperation::Kind::kSend);
  operation->header = header_of(endpoint.next_out++, header);
  operation->data = std::move(data);
  operation->bytes = kUcxHeaderBytes + operation->data.size();
  endpoint.queued_bytes += operation->bytes;
  if (endpoint.handle == nullptr) {
    endpoint.unsent.push_back(operation);
  } else {
    pass_on(endpoint, operation);
  }
}

void UcxTransport::pass_on(UcxEndpoint& endpoint, UcxOperation* operation) {
  std::memcpy(operation->header.data(), &endpoint.peer_key, sizeof endpoint.peer_key);
  ucp_request_param_t param = param_of(operation);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  answered(operation,
           ucx_.ucp_am_send_nbx(endpoint.handle, kUcxActiveMessage, operation->header.data(), kUcxHeaderBytes,
                                operation->data.data(), operation->data.size(), &param));
}

void UcxTransport::post(UcxEndpoint& endpoint, UcxFrame frame, std::vector<std::byte> data) {
  frame.token = options_.token;
  frame.incarnation = options_.incarnation;
  post(endpoint, encode(frame), std::move(data));
}

Status UcxTransport::send(EndpointId id, HotHeader header, const std::byte* payload, std::size_t length) {
  UcxEndpoint* const endpoint = find_open(id);
  if (endpoint == nullptr) return gone(id);
  if (length > kMaxHotPayloadBytes) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a {} message with {} bytes, above the limit of {}", name_of(header.type),
                              length, kMaxHotPayloadBytes),
                  {.reason = Reason::kLimit, .fault = Fault::kLibrary});
  }
  if (endpoint->queued_bytes + kUcxHeaderBytes + length > options_.max_queued_bytes) {
    Status full(StatusCode::kResourceExhausted,
                fmt::format("{} has not taken {} bytes of messages: it stopped reading", endpoint->peer,
                            endpoint->queued_bytes),
                {.reason = Reason::kLimit, .fault = Fault::kPeer, .peer = endpoint->peer});
    refuse(*endpoint, full);  // with a message missing, what followed would make no sense
    return full;
  }
  if (header.token == 0) header.token = options_.token;
  if (header.incarnation == 0) header.incarnation = options_.incarnation;
  header.length = static_cast<std::uint32_t>(length);
  header.sum = payload_sum(payload, length);
  header_bytes_.fetch_add(kHotHeaderBytes + length, std::memory_order_relaxed);
  messages_.fetch_add(1, std::memory_order_relaxed);
  post(*endpoint, encode(header), std::vector<std::byte>(payload, payload + length));
  return {};
}

Status UcxTransport::grant(EndpointId id, const std::shared_ptr<ExportedMemory>& memory) {
  UcxEndpoint* const endpoint = find_open(id);
  if (endpoint == nullptr) return gone(id);
  const auto* const exported = dynamic_cast<const UcxExportedMemory*>(memory.get());
  if (exported == nullptr || !exported->belongs_to(context_)) {
    return Status(StatusCode::kInvalidArgument,
                  "only memory that this transport allocated or adopted can be granted",
                  {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
  }
  const MemoryRef& ref = exported->ref();
  UcxEndpoint::Granted& granted = endpoint->granted[ref.region];
  if (granted.generation == ref.generation) return {};
  granted = {.generation = ref.generation, .block = exported->block()};
  const auto address = reinterpret_cast<std::uintptr_t>(ref.address);
  const std::vector<std::byte>& key = exported->block()->key();
  std::vector<std::byte> data(sizeof address + key.size());
  std::memcpy(data.data(), &address, sizeof address);
  std::copy(key.begin(), key.end(), data.begin() + sizeof address);
  post(*endpoint,
       {.kind = UcxFrameKind::kGrant, .region = ref.region, .generation = ref.generation, .bytes = ref.bytes},
       std::move(data));
  return {};
}

void UcxTransport::retire_freed_regions() {
  for (const OwnRegions::Name& name : context_->regions.take_freed()) {
    for (auto& [id, endpoint] : endpoints_) {
      if (endpoint->state != UcxEndpoint::State::kOpen) continue;
      const auto granted = endpoint->granted.find(name.region);
      if (granted == endpoint->granted.end() || granted->second.generation != name.generation) continue;
      endpoint->granted.erase(granted);
      post(*endpoint, {.kind = UcxFrameKind::kRetire, .region = name.region, .generation = name.generation});
    }
  }
}

// ---- reading ----

void UcxTransport::settle(EndpointId endpoint, ReadToken token, std::uint64_t bytes, Status status) {
  reads_.settle({.endpoint = endpoint, .token = token, .bytes = bytes, .status = std::move(status)});
}

void UcxTransport::read(EndpointId id, const RemoteRef& remote, std::byte* local, ReadToken token) {
  read(id, remote, local, nullptr, token);
}

void UcxTransport::read_to(EndpointId id, const RemoteRef& remote, std::shared_ptr<ReadTarget> target,
                           ReadToken token) {
  read(id, remote, nullptr, std::move(target), token);
}

void UcxTransport::read(EndpointId id, const RemoteRef& remote, std::byte* local,
                        std::shared_ptr<ReadTarget> target, ReadToken token) {
  UcxEndpoint* const endpoint = find_open(id);
  if (endpoint == nullptr) return settle(0, token, 0, gone(id));
  ++endpoint->reads;
  Result<std::shared_ptr<const UcxRemoteRegion>> region = endpoint->regions.find(remote);
  if (!region.ok() || remote.bytes == 0) return settle(id, token, 0, region.status());
  const bool fetched = (*region)->key() != nullptr;
  const std::uint64_t number = reads_.add({.endpoint = id,
                                           .token = token,
                                           .offset = remote.offset,
                                           .bytes = remote.bytes,
                                           .local = local,
                                           .target = std::move(target),
                                           .region = std::move(region).value()});
  if (fetched) {
    endpoint->fetching.push_back(number);
    pump_gets(*endpoint);
  } else {
    post(*endpoint, {.kind = UcxFrameKind::kRead,
                     .region = remote.region,
                     .generation = remote.generation,
                     .read = number,
                     .offset = remote.offset,
                     .bytes = remote.bytes});
  }
}

Result<Transport::Mapping> UcxTransport::map(EndpointId, const RemoteRef&) {
  return Status(StatusCode::kUnimplemented,
                fmt::format("the {} transport maps no memory: it lies on another host", name()),
                {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
}

void UcxTransport::pump_all() {
  for (const EndpointId id : std::exchange(to_pump_, {})) {
    if (UcxEndpoint* const endpoint = find_open(id); endpoint != nullptr) {
      endpoint->pumped_later = false;
      pump_serves(*endpoint);
      pump_gets(*endpoint);
    }
  }
}

void UcxTransport::pump_gets(UcxEndpoint& endpoint) {
  while (endpoint.gets < options_.fragments_in_flight && !endpoint.fetching.empty()) {
    std::optional<UcxReads::Part> part = reads_.next_part(endpoint.fetching.front(), fragment_bytes_);
    if (!part) {
      endpoint.fetching.pop_front();
      continue;
    }
    UcxOperation* const operation = begin(endpoint, UcxOperation::Kind::kGet);
    operation->bytes = part->bytes;
    operation->part = std::move(*part);
    ++endpoint.gets;
    const ucp_request_param_t param = param_of(operation);
    const UcxReads::Part& from = operation->part;
    answered(operation, ucx_.ucp_get_nbx(endpoint.handle, from.local, static_cast<std::size_t>(from.bytes),
                                         from.region->address() + from.offset, from.region->key(), &param));
  }
}

// What a lane is to send: the rest of its read, else of the first that none sends, else the second half of
// what is left of another's, where that is much. So what comes over one lane comes in order, and almost all
// keys can be summed as they arrive. The end: nothing.
std::deque<UcxServe>::iterator UcxTransport::serve_for(UcxEndpoint& endpoint, std::size_t lane) const {
  std::deque<UcxServe>& serving = endpoint.serving;
  auto serve = serving.begin();
  for (; serve != serving.end() && serve->lane.has_value(); ++serve)
    if (*serve->lane == lane) return serve;
  if (serve != serving.end()) {
    serve->lane = lane;
    return serve;
  }
  const auto left = [](const UcxServe& each) { return each.bytes - each.sent; };
  const auto longest =
      std::max_element(serving.begin(), serving.end(),
                       [&](const UcxServe& a, const UcxServe& b) { return left(a) < left(b); });
  if (longest == serving.end() || left(*longest) < kSharedBytes) return serving.end();
  UcxServe half = *longest;
  half.lane = lane;
  half.sent += left(half) / 2 / kPageBytes * kPageBytes;
  longest->bytes = half.sent;
  serving.push_front(std::move(half));
  return serving.begin();
}

void UcxTransport::pump_serves(UcxEndpoint& endpoint) {
  // Over TCP a fragment may be over as soon as it is sent. The other lanes, and other peers, have their turn
  // before many have been.
  for (std::uint32_t round = 0; round < 2 * options_.fragments_in_flight; ++round) {
    bool sent = false;
    for (std::size_t lane = 0; lane < endpoint.fragments.size(); ++lane) {
      if (endpoint.fragments[lane] >= options_.fragments_in_flight) continue;
      const auto serve = serve_for(endpoint, lane);
      if (serve == endpoint.serving.end()) continue;
      sent = true;
      if (serve->block->begin_transfer()) {
        send_fragment(endpoint, serve, lane);
        continue;
      }
      post(endpoint, {.kind = UcxFrameKind::kRefused, .read = serve->read},
           encode(Status(StatusCode::kFailedPrecondition,
                         fmt::format("stale: {} freed the region while it was read", options_.self_name),
                         {.reason = Reason::kWrongState, .fault = Fault::kPeer})));
      endpoint.serving.erase(serve);
    }
    if (!sent) return;
  }
  pump_later(endpoint);
}

// Lane 0 is this thread's own worker. `serve` may be gone afterwards.
void UcxTransport::send_fragment(UcxEndpoint& endpoint, std::deque<UcxServe>::iterator serve,
                                 std::size_t lane) {
  UcxOperation* const operation = begin(endpoint, UcxOperation::Kind::kFragment);
  operation->read = serve->read;
  operation->bytes = std::min(fragment_bytes_, serve->bytes - serve->sent);
  operation->block = serve->block;
  operation->lane_number = lane;
  operation->header = header_of(0, encode(UcxFrame{.kind = UcxFrameKind::kData,
                                                   .token = options_.token,
                                                   .incarnation = options_.incarnation,
                                                   .read = serve->read,
                                                   .offset = serve->sent,
                                                   .bytes = operation->bytes}));
  std::memcpy(operation->header.data(), &endpoint.peer_key, sizeof endpoint.peer_key);
  const std::byte* const from = serve->block->data() + serve->offset + serve->sent;
  const std::uint32_t flags =
      operation->bytes <= eager_bytes_ ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
  ++endpoint.fragments[lane];
  serve->sent += operation->bytes;
  if (serve->sent == serve->bytes) endpoint.serving.erase(serve);
  if (lane > 0) return lanes_[lane - 1]->send(operation, from, flags);
  ucp_request_param_t param = param_of(operation);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMH;
  param.memh = operation->block->handle();
  param.flags = flags;
  answered(operation,
           ucx_.ucp_am_send_nbx(endpoint.handle, kUcxActiveMessage, operation->header.data(), kUcxHeaderBytes,
                                from, static_cast<std::size_t>(operation->bytes), &param));
}

void UcxTransport::take_from_lanes() {
  for (const auto& lane : lanes_) {
    if (!lane->has_done()) continue;
    for (const UcxLane::Done& done : lane->take_done()) finished(done.operation, done.status);
  }
}

// ---- what arrives ----

void UcxTransport::accept_peers() {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    SocketAddress from;
    from.length = sizeof from.storage;
    UniqueFd fd(accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.length,
                        SOCK_CLOEXEC | SOCK_NONBLOCK));
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
    const auto unproven = std::count_if(endpoints_.begin(), endpoints_.end(), [](const auto& entry) {
      return entry.second->accepted && entry.second->incarnation == 0;
    });
    if (static_cast<std::size_t>(unproven) >= kMaxUnproven) continue;
    const Result<UcxEndpoint*> endpoint = add(std::move(fd), from.to_string(), /*accepted=*/true);
    if (!endpoint.ok()) {
      log_warn("{}: {}", options_.self_name, endpoint.status().message());
      continue;
    }
    (*endpoint)->deadline_ns = clock_.now_ns() + options_.hello_timeout_ns;
    accepted_.push_back((*endpoint)->id);
  }
}

void UcxTransport::receive_greeting(UcxEndpoint& endpoint) {
  std::array<std::byte, 4096> bytes;
  for (;;) {
    const ssize_t got = recv(endpoint.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    const int error = errno;
    if (got < 0 && error == EINTR) continue;
    if (got < 0 && (error == EAGAIN || error == EWOULDBLOCK)) return;
    if (got <= 0) {
      const std::string_view how = endpoint.handle != nullptr  ? "ended"
                                   : endpoint.greeting.empty() ? "ended before a hello"
                                                               : "ended within its hello";
      note_failure(endpoint.id,
                   Status(StatusCode::kUnavailable,
                          fmt::format("the connection to {} {}{}{}", endpoint.peer, how, got < 0 ? ": " : "",
                                      got < 0 ? std::strerror(error) : ""),
                          {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = endpoint.peer}));
      // It would be reported over and over.
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, endpoint.socket.get(), nullptr);
      return;
    }
    endpoint.greeting.insert(endpoint.greeting.end(), bytes.begin(), bytes.begin() + got);
    if (Status taken = take_greeting(endpoint); !taken.ok()) {
      note_failure(endpoint.id, std::move(taken));
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, endpoint.socket.get(), nullptr);
      return;
    }
  }
}

Status UcxTransport::take_greeting(UcxEndpoint& endpoint) {
  const std::vector<std::byte>& greeting = endpoint.greeting;
  if (endpoint.handle != nullptr) return corrupt(endpoint.peer, "sent more than a hello");
  // Foreign bytes are refused by their first four, before more of them are waited for.
  if (greeting.size() < sizeof kUcxMagic ||
      (is_ucx_frame(greeting.data()) && greeting.size() < kUcxFrameBytes)) {
    return {};
  }
  const Result<UcxFrame> frame = decode_ucx_frame(greeting.data(), greeting.size());
  if (!frame.ok()) return frame.status().with_context(endpoint.peer);
  if (frame->kind != UcxFrameKind::kHello) return corrupt(endpoint.peer, "sent a frame before it said hello");
  SHARDPULL_RETURN_IF_ERROR(check_sender(endpoint, frame->token, frame->incarnation));
  if (frame->offset == 0 || frame->offset > kMaxUcxNameBytes || frame->bytes <= frame->offset ||
      frame->bytes > kMaxUcxHelloDataBytes) {
    return corrupt(endpoint.peer, fmt::format("said hello with a name of {} bytes in {} bytes of data",
                                              frame->offset, frame->bytes));
  }
  const std::size_t whole = kUcxFrameBytes + static_cast<std::size_t>(frame->bytes);
  if (greeting.size() < whole) return {};
  if (greeting.size() > whole) return corrupt(endpoint.peer, "sent more than a hello");
  return take_hello(endpoint, *frame, std::span(greeting).subspan(kUcxFrameBytes));
}

Status UcxTransport::take_hello(UcxEndpoint& endpoint, const UcxFrame& frame,
                                std::span<const std::byte> data) {
  const std::string_view name(reinterpret_cast<const char*>(data.data()), frame.offset);
  endpoint.peer = fmt::format("{} ({})", printable(name), endpoint.peer);
  endpoint.regions = PeerRegions<UcxRemoteRegion>(endpoint.peer);
  ByteReader reader(data.subspan(frame.offset), "ucx hello");
  std::string transports;
  std::uint32_t workers = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.string(transports, kMaxUcxTransportsBytes).with_context(endpoint.peer));
  SHARDPULL_RETURN_IF_ERROR(
      reader.count(workers, kMaxUcxWorkers, sizeof(std::uint32_t) + 1).with_context(endpoint.peer));
  std::vector<std::span<const std::byte>> addresses(workers);
  for (std::span<const std::byte>& address : addresses) {
    std::uint32_t bytes = 0;
    SHARDPULL_RETURN_IF_ERROR(reader.u32(bytes).with_context(endpoint.peer));
    SHARDPULL_RETURN_IF_ERROR(reader.raw(bytes, address).with_context(endpoint.peer));
    if (bytes == 0) return corrupt(endpoint.peer, "said hello with an empty address");
  }
  const std::size_t summed = data.size() - reader.remaining();
  std::uint64_t sum = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u64(sum).with_context(endpoint.peer));
  SHARDPULL_RETURN_IF_ERROR(reader.end().with_context(endpoint.peer));
  if (sum != payload_sum(data.data(), summed)) return corrupt(endpoint.peer, "said a damaged hello");
  if (addresses.empty()) return corrupt(endpoint.peer, "said hello without an address");
  endpoint.incarnation = frame.incarnation;
  endpoint.peer_key = frame.read;
  const ucs_status_t status =
      worker_->connect(addresses[0].data(), &UcxTransport::on_error, this, &endpoint.handle);
  if (status != UCS_OK) {
    return Status(
        StatusCode::kFailedPrecondition,
        fmt::format("UCX finds no way to {}: it has the transports {}, this process has {}; give both "
                    "the same (--transport, UCX_TLS, --interface): {}",
                    endpoint.peer, printable(transports), transports_text(), ucx_.ucs_status_string(status)),
        {.reason = Reason::kSettingMismatch, .fault = Fault::kUser, .peer = endpoint.peer});
  }
  reads_.admit(endpoint.own_key, endpoint.id, endpoint.peer, options_.token, endpoint.incarnation);
  endpoint.fragments.resize(std::min<std::size_t>(addresses.size(), options_.workers));
  for (std::size_t lane = 1; lane < endpoint.fragments.size(); ++lane) {
    lanes_[lane - 1]->connect(endpoint.id, endpoint.peer, {addresses[lane].begin(), addresses[lane].end()});
  }
  by_handle_[endpoint.handle] = endpoint.id;
  if (endpoint.state == UcxEndpoint::State::kOpen) endpoint.deadline_ns = 0;  // it has proven itself
  endpoint.greeting.clear();
  for (UcxOperation* const operation : std::exchange(endpoint.unsent, {})) pass_on(endpoint, operation);
  greeted_.push_back(endpoint.id);
  return {};
}

void UcxTransport::on_error(void* self, ucp_ep_h handle, ucs_status_t status) {
  auto& transport = *static_cast<UcxTransport*>(self);
  const auto found = transport.by_handle_.find(handle);
  if (found == transport.by_handle_.end()) return;
  UcxEndpoint* const endpoint = transport.find(found->second);
  if (endpoint == nullptr) return;
  transport.note_failure(
      endpoint->id, ucx_error(transport.ucx_, status,
                              fmt::format("the connection to {} was lost", endpoint->peer), endpoint->peer));
}

ucs_status_t UcxTransport::on_active_message(void* self, const void* header, std::size_t header_length,
                                             void* data, std::size_t length,
                                             const ucp_am_recv_param_t* param) {
  return static_cast<UcxTransport*>(self)->take_active_message(header, header_length, data, length, *param);
}

ucs_status_t UcxTransport::take_active_message(const void* header, std::size_t header_length, void* data,
                                               std::size_t length, const ucp_am_recv_param_t& param) {
  // Who sends without a key of ours is nobody's peer.
  if (header_length != kUcxHeaderBytes) return UCS_OK;
  std::uint64_t key = 0;
  std::memcpy(&key, header, sizeof key);
  const auto found = by_key_.find(key);
  UcxEndpoint* const endpoint = found == by_key_.end() ? nullptr : find(found->second);
  if (endpoint == nullptr || endpoint->state == UcxEndpoint::State::kEnding) return UCS_OK;
  const bool rendezvous = (param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const auto* const bytes_of_header = static_cast<const std::byte*>(header);
  UcxIncoming incoming;
  incoming.endpoint = endpoint->id;
  std::memcpy(&incoming.order, bytes_of_header + sizeof key, sizeof incoming.order);
  std::memcpy(incoming.header.data(), bytes_of_header + 2 * sizeof key, kHotHeaderBytes);
  if (is_ucx_frame(incoming.header.data())) {
    const Result<UcxFrame> frame = decode_ucx_frame(incoming.header.data(), incoming.header.size());
    if (!frame.ok()) {
      note_failure(endpoint->id, frame.status().with_context(endpoint->peer));
      return UCS_OK;
    }
    if (frame->kind == UcxFrameKind::kData) {
      return take_ucx_data(reads_, key, *frame, data, length, rendezvous,
                           [&](UcxReads::Part part) { begin_receive(*endpoint, data, std::move(part)); });
    }
    if (length > kMaxUcxFrameDataBytes) {
      note_failure(endpoint->id,
                   corrupt(endpoint->peer, fmt::format("sent a frame with {} bytes of data", length)));
      return UCS_OK;
    }
  }
  if (rendezvous || length > kMaxHotPayloadBytes) {
    note_failure(
        endpoint->id,
        corrupt(endpoint->peer, fmt::format("sent a message with {} bytes, above the limit of {}, or not at "
                                            "once",
                                            length, kMaxHotPayloadBytes)));
    return UCS_OK;
  }
  const auto* const bytes = static_cast<const std::byte*>(data);
  incoming.data.assign(bytes, bytes + length);
  inbox_.push_back(std::move(incoming));
  return UCS_OK;
}

void UcxTransport::begin_receive(UcxEndpoint& endpoint, void* data, UcxReads::Part part) {
  UcxOperation* const operation = begin(endpoint, UcxOperation::Kind::kReceive);
  operation->bytes = part.bytes;
  operation->part = std::move(part);
  const ucp_request_param_t param = param_of(operation);
  answered(operation, ucx_.ucp_am_recv_data_nbx(worker_->handle(), data, operation->part.local,
                                                static_cast<std::size_t>(operation->bytes), &param));
}

// What UCX may use here, for people.
std::string UcxTransport::transports_text() const {
  const char* const environment = std::getenv("UCX_TLS");
  std::string out = !options_.transports.empty() ? options_.transports
                    : environment != nullptr     ? environment
                                                 : "all";
  if (!interface_.empty()) out += fmt::format(" on {}", interface_);
  out.resize(std::min(out.size(), kMaxUcxTransportsBytes));
  return fmt::format("\"{}\"", out);
}

Status UcxTransport::check_sender(const UcxEndpoint& endpoint, FleetToken token,
                                  Incarnation incarnation) const {
  const auto refused = [&](std::string_view problem) {
    return Status(StatusCode::kUnauthenticated, fmt::format("{} {}", endpoint.peer, problem),
                  {.reason = Reason::kBadToken, .fault = Fault::kPeer, .peer = endpoint.peer});
  };
  if (token != options_.token) return refused("belongs to another fleet: its token is not ours");
  if (endpoint.incarnation != 0 && endpoint.incarnation != incarnation) {
    return refused("changed its incarnation on one connection");
  }
  return {};
}

void UcxTransport::take_in_order(UcxIncoming incoming, TransportSink& sink) {
  UcxEndpoint* const endpoint = find(incoming.endpoint);
  if (endpoint == nullptr || endpoint->state == UcxEndpoint::State::kEnding) return;
  endpoint->early_bytes += kUcxHeaderBytes + incoming.data.size();
  const bool again = incoming.order < endpoint->next_in || endpoint->early.contains(incoming.order);
  if (again || endpoint->early_bytes > kMaxEarlyBytes) {
    refuse(*endpoint, corrupt(endpoint->peer, fmt::format("sent message {} when message {} was next",
                                                          incoming.order, endpoint->next_in)));
    return;
  }
  const EndpointId id = endpoint->id;
  const bool known = endpoint->incarnation != 0;
  endpoint->early.emplace(incoming.order, std::move(incoming));
  if (known) take_early(id, sink);
}

void UcxTransport::take_early(EndpointId id, TransportSink& sink) {
  for (;;) {
    // A callback may have closed it meanwhile.
    UcxEndpoint* const endpoint = find(id);
    if (endpoint == nullptr || endpoint->state == UcxEndpoint::State::kEnding) return;
    const auto next = endpoint->early.find(endpoint->next_in);
    if (next == endpoint->early.end()) return;
    const UcxIncoming incoming = std::move(next->second);
    endpoint->early.erase(next);
    endpoint->early_bytes -= kUcxHeaderBytes + incoming.data.size();
    ++endpoint->next_in;
    Status taken = take(*endpoint, incoming, sink);
    if (taken.ok()) continue;
    if (UcxEndpoint* const left = find_open(id); left != nullptr) refuse(*left, taken);
    return;
  }
}

Status UcxTransport::take(UcxEndpoint& endpoint, const UcxIncoming& incoming, TransportSink& sink) {
  const bool open = endpoint.state == UcxEndpoint::State::kOpen;
  if (is_ucx_frame(incoming.header.data())) {
    SHARDPULL_ASSIGN_OR_RETURN(const UcxFrame frame,
                               decode_ucx_frame(incoming.header.data(), incoming.header.size()));
    SHARDPULL_RETURN_IF_ERROR(check_sender(endpoint, frame.token, frame.incarnation));
    if (frame.kind == UcxFrameKind::kBye) {
      end(endpoint, Status(StatusCode::kUnavailable, fmt::format("{} closed the connection", endpoint.peer),
                           {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = endpoint.peer}));
      return {};
    }
    if (!open) return {};
    switch (frame.kind) {
      case UcxFrameKind::kGrant:
        return take_grant(endpoint, frame, incoming.data);
      case UcxFrameKind::kRetire:
        return endpoint.regions.retire(frame.region, frame.generation);
      case UcxFrameKind::kRead:
        return take_read(endpoint, frame);
      case UcxFrameKind::kRefused:
        return take_refused(endpoint, frame, incoming.data);
      default:
        return corrupt(endpoint.peer, "said hello twice");
    }
  }
  SHARDPULL_ASSIGN_OR_RETURN(const HotHeader header,
                             decode_hot_header(incoming.header.data(), incoming.header.size()));
  SHARDPULL_RETURN_IF_ERROR(check_sender(endpoint, header.token, header.incarnation));
  if (header.length != incoming.data.size()) {
    return corrupt(endpoint.peer, fmt::format("sent a {} message that announces {} bytes and has {}",
                                              name_of(header.type), header.length, incoming.data.size()));
  }
  if (payload_sum(incoming.data.data(), incoming.data.size()) != header.sum) {
    return Status(StatusCode::kDataLoss,
                  fmt::format("the payload of a {} message from {} is not what was sent: its sum differs",
                              name_of(header.type), endpoint.peer),
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = endpoint.peer});
  }
  if (!open) return {};
  header_bytes_.fetch_add(kHotHeaderBytes + header.length, std::memory_order_relaxed);
  messages_.fetch_add(1, std::memory_order_relaxed);
  sink.on_message(endpoint.id, header, incoming.data.data());
  return {};
}

Status UcxTransport::take_grant(UcxEndpoint& endpoint, const UcxFrame& frame,
                                const std::vector<std::byte>& data) {
  std::uint64_t address = 0;
  if (data.size() <= sizeof address) return corrupt(endpoint.peer, "granted a region without its key");
  // Its lanes are known by now.
  const bool one_sided = options_.reads == UcxOptions::Reads::kGets ||
                         (options_.reads == UcxOptions::Reads::kAuto && options_.transports != "tcp" &&
                          has_rdma_lane(ucx_, endpoint.handle));
  if (!one_sided) {
    return endpoint.regions.grant(frame.region, frame.generation,
                                  std::make_shared<const UcxRemoteRegion>(ucx_, frame.bytes, 0, nullptr));
  }
  std::memcpy(&address, data.data(), sizeof address);
  if (frame.bytes > std::numeric_limits<std::uint64_t>::max() - address) {
    return corrupt(endpoint.peer, "granted a region beyond its address space");
  }
  ucp_rkey_h key = nullptr;
  const ucs_status_t status = ucx_.ucp_ep_rkey_unpack(endpoint.handle, data.data() + sizeof address, &key);
  if (status != UCS_OK) {
    return endpoint.regions.grant(
        frame.region, frame.generation,
        ucx_error(ucx_, status, fmt::format("the key of region {} of {}", frame.region, endpoint.peer),
                  endpoint.peer));
  }
  return endpoint.regions.grant(frame.region, frame.generation,
                                std::make_shared<const UcxRemoteRegion>(ucx_, frame.bytes, address, key));
}

Status UcxTransport::take_read(UcxEndpoint& endpoint, const UcxFrame& frame) {
  const RemoteRef window{
      .region = frame.region, .generation = frame.generation, .offset = frame.offset, .bytes = frame.bytes};
  const auto found = endpoint.granted.find(frame.region);
  std::shared_ptr<const UcxBlock> block;
  Status allowed;
  if (found == endpoint.granted.end() || found->second.generation != frame.generation) {
    allowed = region_errors::stale(options_.self_name, window,
                                   found == endpoint.granted.end() ? 0 : found->second.generation);
  } else if (block = found->second.block.lock(); block == nullptr) {
    allowed = region_errors::freed(options_.self_name, window);
  } else {
    allowed = check_window(window, block->bytes());
  }
  if (!allowed.ok()) {
    post(endpoint, {.kind = UcxFrameKind::kRefused, .read = frame.read}, encode(allowed));
    return {};
  }
  if (endpoint.serving.size() >= kMaxServes) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("{} has {} reads waiting", endpoint.peer, kMaxServes),
                  {.reason = Reason::kLimit, .fault = Fault::kPeer, .peer = endpoint.peer});
  }
  endpoint.serving.push_back(
      {.read = frame.read, .block = std::move(block), .offset = frame.offset, .bytes = frame.bytes});
  pump_serves(endpoint);
  return {};
}

Status UcxTransport::take_refused(UcxEndpoint& endpoint, const UcxFrame& frame,
                                  const std::vector<std::byte>& data) {
  reads_.refused(frame.read, endpoint.id,
                 decode_status(data.data(), data.size()).with_context(endpoint.peer));
  return {};
}

// ---- ends ----

void UcxTransport::close(EndpointId id) {
  UcxEndpoint* const endpoint = find(id);
  if (endpoint == nullptr) return;
  endpoint->report = false;
  if (endpoint->state != UcxEndpoint::State::kOpen) return;
  endpoint->serving.clear();
  post(*endpoint, {.kind = UcxFrameKind::kBye});
  endpoint->state = UcxEndpoint::State::kLingering;
  endpoint->deadline_ns = clock_.now_ns() + options_.close_timeout_ns;
}

void UcxTransport::end(UcxEndpoint& endpoint, Status why) {
  endpoint.report = endpoint.state == UcxEndpoint::State::kOpen;
  endpoint.why = std::move(why);
  endpoint.state = UcxEndpoint::State::kEnding;
  endpoint.deadline_ns = clock_.now_ns() + kLetGoNs;
  endpoint.serving.clear();
  endpoint.fetching.clear();
  endpoint.early.clear();
  let_go(endpoint);
}

void UcxTransport::refuse(UcxEndpoint& endpoint, const Status& why) {
  // By host: whoever connects again comes from another port.
  const std::string host = endpoint.peer.substr(0, endpoint.peer.rfind(':'));
  if (refused_peers_.size() < kMaxRememberedPeers && refused_peers_.insert(host).second) {
    log_warn("{}: closed the connection to {}: {}", options_.self_name, endpoint.peer, why.message());
  }
  end(endpoint, why);
}

void UcxTransport::let_go(UcxEndpoint& endpoint) {
  by_key_.erase(endpoint.own_key);
  reads_.dismiss(endpoint.own_key);
  endpoint.socket.reset();  // which also tells the peer
  for (UcxOperation* const operation : std::exchange(endpoint.unsent, {})) finished(operation, UCS_OK);
  if (endpoint.handle == nullptr) {
    endpoint.let_go = true;
    return;
  }
  by_handle_.erase(endpoint.handle);
  // Forced, UCX 1.13 may use a connection that it has freed: when a message was sent in part and the peer's
  // end and room for the rest are noticed at once. So it is forced only where UCX may still write to a
  // reader's memory, which over TCP alone it never does.
  const std::uint32_t flags = !tcp_ && endpoint.reads > 0 ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  endpoint.closing = 1;
  for (std::size_t lane = 1; lane < endpoint.fragments.size(); ++lane) {
    ++endpoint.closing;
    lanes_[lane - 1]->close(begin(endpoint, UcxOperation::Kind::kClose), flags);
  }
  UcxOperation* const operation = begin(endpoint, UcxOperation::Kind::kClose);
  ucp_request_param_t param = param_of(operation);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = flags;
  answered(operation, ucx_.ucp_ep_close_nbx(std::exchange(endpoint.handle, nullptr), &param));
}

void UcxTransport::take_failures() {
  for (auto& [id, why] : reads_.take_failures()) {
    UcxEndpoint* const endpoint = find(id);
    if (endpoint == nullptr || endpoint->state == UcxEndpoint::State::kEnding) continue;
    if (why.info().reason == Reason::kPeerLost) {
      end(*endpoint, std::move(why));
    } else {
      refuse(*endpoint, why);
    }
  }
}

void UcxTransport::refuse_lost_reads() {
  for (const LostRead& lost : std::exchange(to_refuse_, {})) {
    if (UcxEndpoint* const endpoint = find_open(lost.endpoint); endpoint != nullptr) {
      post(*endpoint, {.kind = UcxFrameKind::kRefused, .read = lost.read},
           encode(ucx_error(ucx_, lost.why, "a part of the read could not be sent")));
    }
  }
}

void UcxTransport::step_endings() {
  const std::int64_t now_ns = clock_.now_ns();
  for (auto& [id, endpoint] : endpoints_) {
    if (endpoint->state != UcxEndpoint::State::kEnding) continue;
    // Until UCX has let go, it may still write to the memory of reads. After its connection is closed nothing
    // can arrive for them, whether or not UCX says so for each.
    if (!(endpoint->let_go && endpoint->operations == 0) && now_ns < endpoint->deadline_ns) continue;
    if (endpoint->reads > 0 && !reads_.end_all(id, endpoint->why.ok() ? gone(id) : endpoint->why)) continue;
    closed_.push_back(id);
  }
}

void UcxTransport::report_reads(TransportSink& sink) {
  for (const UcxReads::Settled& settled : reads_.take_settled()) {
    if (settled.status.ok()) payload_bytes_read_.fetch_add(settled.bytes, std::memory_order_relaxed);
    if (UcxEndpoint* const endpoint = find(settled.endpoint); endpoint != nullptr) --endpoint->reads;
    report_read(sink, settled.token, settled.status);
  }
}

void UcxTransport::report_closed(TransportSink& sink) {
  for (const EndpointId id : std::exchange(closed_, {})) {
    const auto found = endpoints_.find(id);
    if (found == endpoints_.end() || found->second->reads > 0) continue;  // the next round
    const std::unique_ptr<UcxEndpoint> endpoint = std::move(found->second);
    endpoints_.erase(found);
    open_endpoints_.fetch_sub(1, std::memory_order_relaxed);
    if (endpoint->report) sink.on_closed(id, endpoint->why);
  }
}

void UcxTransport::run_timers() {
  const std::int64_t now_ns = clock_.now_ns();
  if (accept_again_ns_ != 0 && now_ns >= accept_again_ns_) {
    accept_again_ns_ = 0;
    if (listener_) watch(listener_.get(), kListenKey);
  }
  for (auto& [id, endpoint] : endpoints_) {
    if (endpoint->deadline_ns == 0 || now_ns < endpoint->deadline_ns) continue;
    if (endpoint->state == UcxEndpoint::State::kLingering) {
      end(*endpoint, {});
    } else if (endpoint->state == UcxEndpoint::State::kOpen && endpoint->accepted) {
      refuse(*endpoint, Status(StatusCode::kDeadlineExceeded,
                               fmt::format("{} connected and sent no message", endpoint->peer),
                               {.reason = Reason::kBadToken, .fault = Fault::kPeer, .peer = endpoint->peer}));
    } else if (endpoint->state == UcxEndpoint::State::kOpen) {
      end(*endpoint,
          Status(StatusCode::kDeadlineExceeded,
                 fmt::format("no hello from {} in time: nothing of ours listens there, or the way is blocked",
                             endpoint->peer),
                 {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = endpoint->peer}));
    }
  }
}

// ---- progress ----

void UcxTransport::drive() {
  for (int i = 0; i < kRoundsPerProgress; ++i) {
    const unsigned count = worker_->progress();
    take_from_lanes();
    if (!to_pump_.empty()) {
      pump_all();
    } else if (count == 0) {
      return;
    }
  }
}

std::int64_t UcxTransport::next_timer_ns() const {
  std::int64_t next = accept_again_ns_ != 0 ? accept_again_ns_ : kNever;
  for (const auto& [id, endpoint] : endpoints_) {
    if (endpoint->deadline_ns != 0) next = std::min(next, endpoint->deadline_ns);
  }
  return next;
}

Status UcxTransport::wait(std::int64_t timeout_ns) {
  std::int64_t wait_ns = std::max<std::int64_t>(0, timeout_ns);
  if (work_waits()) {
    wait_ns = 0;
  } else {
    SHARDPULL_ASSIGN_OR_RETURN(const bool armed, worker_->arm());
    if (!armed) wait_ns = 0;  // something came meanwhile
  }
  if (const std::int64_t timer_ns = next_timer_ns(); wait_ns > 0 && timer_ns != kNever) {
    wait_ns = std::min(wait_ns, std::max<std::int64_t>(0, timer_ns - clock_.now_ns()));
  }
  std::array<epoll_event, kEventsPerRound> events;
  const timespec limit{.tv_sec = wait_ns / kNanosPerSecond, .tv_nsec = wait_ns % kNanosPerSecond};
  int count = epoll_pwait2(epoll_.get(), events.data(), kEventsPerRound, &limit, nullptr);
  if (count < 0 && errno == ENOSYS) {  // a kernel before 5.11 waits in milliseconds
    const std::int64_t wait_ms = (wait_ns + kNanosPerMilli - 1) / kNanosPerMilli;
    count = epoll_wait(epoll_.get(), events.data(), kEventsPerRound,
                       static_cast<int>(std::min<std::int64_t>(wait_ms, 1'000'000)));
  }
  if (count < 0 && errno != EINTR) {
    return Status(StatusCode::kInternal, fmt::format("epoll: {}", std::strerror(errno)),
                  {.reason = Reason::kHost, .fault = Fault::kHost});
  }
  for (int i = 0; i < count; ++i) {
    const std::uint64_t key = events[static_cast<std::size_t>(i)].data.u64;
    if (key == kWakeKey) {
      std::uint64_t ignored = 0;
      [[maybe_unused]] const ssize_t got = ::read(context_->wake_fd.get(), &ignored, sizeof ignored);
    } else if (key == kListenKey) {
      accept_peers();
    } else if (key != kWorkerKey) {
      UcxEndpoint* const endpoint = find(static_cast<EndpointId>(key));
      if (endpoint != nullptr && endpoint->socket) receive_greeting(*endpoint);
    }
  }
  return {};
}

Status UcxTransport::progress(std::int64_t timeout_ns, TransportSink& sink) {
  context_->progress_thread = std::this_thread::get_id();
  drive();
  SHARDPULL_RETURN_IF_ERROR(wait(timeout_ns));
  drive();
  for (const EndpointId id : std::exchange(accepted_, {})) {
    if (find_open(id) != nullptr) sink.on_accepted(id);
  }
  for (const EndpointId id : std::exchange(greeted_, {})) take_early(id, sink);
  for (UcxIncoming& incoming : std::exchange(inbox_, {})) take_in_order(std::move(incoming), sink);
  take_failures();
  refuse_lost_reads();
  retire_freed_regions();
  step_endings();
  report_reads(sink);
  report_closed(sink);
  run_timers();
  return {};
}

TransportCounters UcxTransport::counters() const {
  TransportCounters out;
  out.payload_bytes_read = payload_bytes_read_.load(std::memory_order_relaxed);
  out.header_bytes = header_bytes_.load(std::memory_order_relaxed);
  out.messages = messages_.load(std::memory_order_relaxed);
  out.endpoints = open_endpoints_.load(std::memory_order_relaxed);
  out.regions = context_->regions.live_regions();
  out.region_bytes = context_->regions.live_bytes();
  return out;
}

// ---- making ----

namespace {

bool kernel_allows_socket_buffer(std::uint64_t bytes) {
  std::uint64_t limit = 0;
  return std::ifstream("/proc/sys/net/core/wmem_max") >> limit && limit >= bytes;
}

// The interface that has `address`.
Result<std::string> interface_of(const SocketAddress& address) {
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<NetworkInterface> interfaces, list_interfaces());
  for (const NetworkInterface& each : interfaces) {
    for (const InterfaceAddress& its : each.addresses) {
      if (its.address.host() == address.host()) return each.name;
    }
  }
  // All of 127.0.0.0/8 is loopback's.
  if (address.loopback()) return std::string("lo");
  return host_error(
      fmt::format("no network interface of this host has the address {}: give one of its own (--interface)",
                  address.host()));
}

}  // namespace

Result<std::unique_ptr<Transport>> make_ucx_transport(UcxOptions options) {
  if (options.token == 0 || options.incarnation == 0) {
    return bad_argument("the ucx transport needs a fleet token and an incarnation");
  }
  if (options.self_name.empty() || options.self_name.size() > kMaxUcxNameBytes) {
    return bad_argument(fmt::format("the ucx transport needs a name of 1 to {} bytes", kMaxUcxNameBytes));
  }
  if (options.workers == 0 || options.workers > kMaxUcxWorkers) {
    return bad_argument(fmt::format("the ucx transport has 1 to {} UCX workers, not {} (--ucx-workers)",
                                    kMaxUcxWorkers, options.workers));
  }
  if (options.fragment_bytes == 0 || options.fragments_in_flight == 0) {
    return bad_argument("reads need fragments of at least a byte, at least one at a time");
  }
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<SocketAddress> addresses,
                             resolve({.host = options.host, .port = options.port}));
  const SocketAddress own = addresses.front();
  if (own.host() == "0.0.0.0" || own.host() == "::") {
    return bad_argument(fmt::format(
        "peers cannot reach {}: give the address of this process's host (--interface)", own.host()));
  }
  std::string interface = options.interface;
  if (interface.empty() && (options.transports == "tcp" || own.loopback())) {
    SHARDPULL_ASSIGN_OR_RETURN(interface, interface_of(own));
  }
  SHARDPULL_ASSIGN_OR_RETURN(const UcxLibrary* const ucx, load_ucx());

  ucp_config_t* config = nullptr;
  ucs_status_t status = ucx->ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return ucx_error(*ucx, status, "UCX cannot read its configuration");
  const auto set = [&](const char* name, const std::string& value) {
    if (status == UCS_OK && !value.empty()) status = ucx->ucp_config_modify(config, name, value.c_str());
  };
  set("TLS", options.transports);
  set("NET_DEVICES", interface);
  if (options.transports == "tcp") {
    // Newer versions want the transport's name before it.
    const auto set_tcp = [&](const std::string& name, const char* value) {
      if (ucx->ucp_config_modify(config, name.c_str(), value) != UCS_OK) set(("TCP_" + name).c_str(), value);
    };
    const std::string segment = fmt::format("{}", kTcpSegmentBytes);
    set_tcp("TX_SEG_SIZE", segment.c_str());
    set_tcp("RX_SEG_SIZE", segment.c_str());
    // From a copy in the segment. Of a fragment sent from where it lies, UCX 1.13 ends the process when the
    // reader is gone and the write of its rest is what finds it: it completes the fragment twice, and asserts.
    set("ZCOPY_THRESH", "inf");
    // What is sent should still be in a cache when it is received. The kernel would let megabytes wait in
    // between (docs/decisions/0008); for receiving its own adjusting is good.
    if (kernel_allows_socket_buffer(kSendBufferBytes)) {
      set_tcp("SNDBUF", fmt::format("{}", kSendBufferBytes).c_str());
    }
  }
  if (status != UCS_OK) {
    ucx->ucp_config_release(config);
    return ucx_error(*ucx, status,
                     fmt::format("UCX does not take transports \"{}\" and interface \"{}\"",
                                 options.transports, interface));
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  // Over TCP UCX would serve gets and puts to any address by messages. Nobody needs that; and an owner is
  // ended by an assertion when a reader dies with such gets under way.
  if (options.transports != "tcp" || options.reads == UcxOptions::Reads::kGets)
    params.features |= UCP_FEATURE_RMA;
  params.mt_workers_shared = 1;  // memory is registered from any thread
  ucp_context_h handle = nullptr;
  status = ucx->ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &handle);
  ucx->ucp_config_release(config);
  if (status != UCS_OK) {
    return ucx_error(*ucx, status,
                     fmt::format("{} finds no usable network with transports \"{}\" and interface \"{}\"",
                                 ucx->description, options.transports, interface));
  }
  auto context = std::make_shared<UcxContext>(*ucx, handle);
  context->fail_registration = std::move(options.fail_registration);
  context->wake_fd = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!context->wake_fd)
    return host_error(fmt::format("the ucx transport cannot be woken: {}", std::strerror(errno)));
  auto transport =
      std::make_unique<UcxTransport>(std::move(options), std::move(interface), own, std::move(context));
  SHARDPULL_RETURN_IF_ERROR(transport->start());
  return std::unique_ptr<Transport>(std::move(transport));
}

Result<std::string> describe_ucx() {
  SHARDPULL_ASSIGN_OR_RETURN(const UcxLibrary* const ucx, load_ucx());
  return ucx->description;
}

}  // namespace shardpull
