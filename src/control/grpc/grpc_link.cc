// A link: every other process's side of the star, and what both sides need around gRPC.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>

#include "base/interfaces.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "base/unix_socket.h"
#include "control/grpc/codec.h"
#include "control/grpc/foreign_service.h"
#include "control/grpc/frame_stream.h"
#include "control/grpc/grpc_control.h"
#include "shardpull/slice.h"

namespace shardpull {

namespace {

// What gRPC's address parser would take for syntax, percent-encoded.
std::string percent_encoded(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '/' || c == '-' || c == '_' || c == '.' || c == '~';
    out += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

Result<GrpcTarget> unix_target(std::string path) {
  GrpcTarget out;
  out.shown = out.path = std::move(path);
  SHARDPULL_RETURN_IF_ERROR(
      check_owner_only_directory(directory_of(out.path), "the control channel's socket"));
  SHARDPULL_ASSIGN_OR_RETURN(SocketPath socket_path, SocketPath::open(out.path));
  auto kept = std::make_shared<SocketPath>(std::move(socket_path));
  out.targets.push_back("unix:" + percent_encoded(kept->name()));
  out.keeps_alive = std::move(kept);
  return out;
}

Result<GrpcTarget> tcp_target(std::string_view text) {
  GrpcTarget out;
  SHARDPULL_ASSIGN_OR_RETURN(const HostPort address, parse_host_port(text, "the control address"));
  out.shown = to_string(address);
  SHARDPULL_ASSIGN_OR_RETURN(out.addresses, resolve(address));
  for (const SocketAddress& each : out.addresses) {
    out.targets.push_back(each.family() == AF_INET6
                              ? fmt::format("ipv6:%5B{}%5D:{}", percent_encoded(each.host()), each.port())
                              : "ipv4:" + each.to_string());
  }
  return out;
}

}  // namespace

Result<GrpcTarget> grpc_target(const std::string& address) {
  constexpr std::string_view kUnix = "unix:", kTcp = "tcp:";
  const std::string_view text(address);
  if (text.starts_with(kUnix) && text.size() > kUnix.size()) return unix_target(address.substr(kUnix.size()));
  if (text.starts_with(kTcp)) return tcp_target(text.substr(kTcp.size()));
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("the control address \"{}\" is not of the form unix:/path/to/socket or tcp:HOST:PORT",
                  address),
      {.reason = Reason::kBadArgument});
}

std::string describe_grpc() {
  return fmt::format("gRPC {}", grpc::Version());
}

void prepare_grpc() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* const wanted = std::getenv("GRPC_VERBOSITY");
    if (wanted == nullptr || *wanted == '\0') {
      gpr_set_log_verbosity(static_cast<gpr_log_severity>(static_cast<int>(GPR_LOG_SEVERITY_ERROR) + 1));
    }
    grpc_init();
  });
}

Status check_message_size(std::string_view name, std::uint64_t bytes) {
  if (bytes <= kMaxControlMessageBytes) return {};
  return Status(StatusCode::kInvalidArgument,
                fmt::format("a {} message of {} is above the limit of {} of the control channel", name,
                            format_bytes(bytes), format_bytes(kMaxControlMessageBytes)),
                {.reason = Reason::kLimit, .fault = Fault::kUser});
}

Status member_gone(const Member& member, std::string_view why, Reason reason) {
  const std::string name = to_string(member);
  return Status(StatusCode::kUnavailable, fmt::format("{} is gone: {}", name, why),
                {.reason = reason, .fault = Fault::kPeer, .peer = name});
}

namespace {

constexpr std::int64_t kRetryNs = 100 * kNanosPerMilli;
// How long something that accepts connections may be silent. A gRPC server speaks at once, on threads of its
// own.
constexpr std::int64_t kForeignNs = 3 * kNanosPerSecond;

gpr_timespec in_ns(std::int64_t ns) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(ns, GPR_TIMESPAN));
}

// " (10.0.0.7, fd00::7)" for a name: hosts may disagree about it.
std::string meaning(const GrpcTarget& target) {
  std::string hosts;
  for (const SocketAddress& each : target.addresses) {
    if (to_string(HostPort{each.host(), each.port()}) == target.shown) return {};
    hosts += (hosts.empty() ? "" : ", ") + each.host();
  }
  return hosts.empty() ? hosts : fmt::format(" ({})", hosts);
}

// Why the hub cannot be on another host, as a sentence's end, or nothing.
std::string trap(const GrpcTarget& target) {
  const auto address = parse_host_port(target.shown, "the control address");
  const std::string why = address.ok() ? loopback_trap(*address, target.addresses) : std::string();
  return why.empty() ? why : fmt::format("; if it runs on another host: {}", why);
}

// Trying again cannot help: the hub is there and said no.
bool is_permanent(const Status& status) {
  switch (status.code()) {
    case StatusCode::kUnauthenticated:
    case StatusCode::kFailedPrecondition:
    case StatusCode::kInvalidArgument:
    case StatusCode::kPermissionDenied:
    case StatusCode::kUnimplemented:
      return true;
    default:
      return false;
  }
}

class LinkStream final : public FrameStream<grpc::ClientBidiReactor<v1::Frame, v1::Frame>> {
 public:
  explicit LinkStream(std::shared_ptr<Dispatcher> dispatcher) : FrameStream(std::move(dispatcher)) {}

  void start(v1::Control::Stub& stub, Handlers handlers, FramePtr hello) {
    stub.async()->Link(&context_, this);
    AddHold();  // operations are started outside reactions, until the read side ends
    open(std::move(handlers));
    write(std::move(hello)).ignore();
    StartCall();
  }
  // Ends it now, whatever the hub does.
  void abort() {
    context_.TryCancel();
    MutexLock lock(mutex_);
    if (!reading_) drop_hold();  // no read is under way whose end would do it
  }
  // The hub answered the hello. False when nobody waits for it any more.
  bool accept() {
    MutexLock lock(mutex_);
    accepted_ = !abandoned_;
    return accepted_;
  }
  // Nobody waits for the answer any more. False when it came first.
  bool abandon() {
    MutexLock lock(mutex_);
    abandoned_ = !accepted_;
    return abandoned_;
  }
  // Everything the answer said has been reported.
  void welcomed() {
    {
      MutexLock lock(mutex_);
      welcomed_ = true;
    }
    done_changed_.notify_all();
  }
  bool is_welcomed() {
    MutexLock lock(mutex_);
    return welcomed_;
  }
  // Waits for the answer to the hello, or the end; true when either came.
  bool wait_answer(std::int64_t timeout_ns) {
    MutexLock lock(mutex_);
    return done_changed_.wait_for_ns(
        mutex_, timeout_ns, [this]() SHARDPULL_NO_THREAD_SAFETY_ANALYSIS { return welcomed_ || done_; });
  }
  // Why it ended; OK while it has not.
  Status final_status() {
    MutexLock lock(mutex_);
    return from_grpc_status(final_status_.error_code(), final_status_.error_message(),
                            final_status_.error_details());
  }

 private:
  void end_side() SHARDPULL_REQUIRES(mutex_) override { StartWritesDone(); }
  void on_read_ended() SHARDPULL_REQUIRES(mutex_) override { drop_hold(); }
  void on_write_failed() SHARDPULL_REQUIRES(mutex_) override {
  }  // the read side ends too, and OnDone says why
  void OnDone(const grpc::Status& status) override {
    {
      MutexLock lock(mutex_);
      final_status_ = status;
    }
    done();
  }
  void drop_hold() SHARDPULL_REQUIRES(mutex_) {
    closed_ = true;
    drop_queue();
    if (!std::exchange(hold_dropped_, true)) RemoveHold();
  }

  grpc::ClientContext context_;
  grpc::Status final_status_ SHARDPULL_GUARDED_BY(mutex_);
  bool accepted_ SHARDPULL_GUARDED_BY(mutex_) = false;
  bool abandoned_ SHARDPULL_GUARDED_BY(mutex_) = false;
  bool welcomed_ SHARDPULL_GUARDED_BY(mutex_) = false;
  bool hold_dropped_ SHARDPULL_GUARDED_BY(mutex_) = false;
};

using StreamPtr = std::shared_ptr<LinkStream>;

class GrpcLink final : public Control {
 public:
  GrpcLink(const ControlOptions& options, ControlSink& sink)
      : options_(options),
        sink_(sink),
        dispatcher_(std::make_shared<Dispatcher>("shardpull-link")),
        standstill_(options.dead_after_ns) {}
  ~GrpcLink() override { shutdown(); }

  Status connect();
  Status send(const Member& to, ControlBody body) override;
  std::optional<ClockOffset> clock_offset(const Member& member) override;
  void shutdown() override;

 private:
  // Tells gRPC to connect to the hub's address number `index`.
  void aim(std::size_t index);
  StreamPtr try_once();
  void release(const StreamPtr& stream) const;
  void beat();

  // ---- on the dispatcher ----
  void take(const StreamPtr& stream, v1::Frame frame);
  void take_welcome(const StreamPtr& stream, const v1::Welcome& welcome);
  void take_up(const v1::MemberUp& up);
  void take_lost(const v1::MemberLost& lost);
  void ended(const StreamPtr& stream);

  const ControlOptions options_;
  ControlSink& sink_;
  const std::shared_ptr<Dispatcher> dispatcher_;
  GrpcTarget target_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Control::Stub> stub_;
  StandstillWatch standstill_;
  std::unique_ptr<Ticker> ticker_;
  std::once_flag shutdown_once_;
  std::atomic<bool> closing_{false};

  Mutex mutex_;
  CondVar changed_;
  StreamPtr stream_ SHARDPULL_GUARDED_BY(mutex_);  // the one that was welcomed
  Status down_ SHARDPULL_GUARDED_BY(mutex_);       // why the link is down, once it is
  std::map<Member, Incarnation> up_ SHARDPULL_GUARDED_BY(mutex_);
  std::map<Member, Incarnation> lost_ SHARDPULL_GUARDED_BY(mutex_);  // and not up again

  // The dispatcher's:
  Member hub_;
  Incarnation hub_incarnation_ = 0;
  std::string farewell_;
  Status broken_;
};

StreamPtr GrpcLink::try_once() {
  auto stream = std::make_shared<LinkStream>(dispatcher_);
  auto hello = std::make_shared<v1::Frame>();
  v1::Hello& h = *hello->mutable_hello();
  h.set_token(options_.token);
  *h.mutable_member() = to_wire(options_.self);
  h.set_incarnation(options_.incarnation);
  h.set_software_version(kSoftwareVersion);
  h.set_wire_version(kWireVersion);
  h.set_slice_format_version(static_cast<std::uint32_t>(kSliceFormatVersion));
  h.set_byte_order(kByteOrderMark);
  const std::weak_ptr<LinkStream> weak = stream;
  stream->start(*stub_,
                {.on_frame =
                     [this, weak](v1::Frame frame) {
                       if (const StreamPtr self = weak.lock()) take(self, std::move(frame));
                     },
                 .on_read_ended = [] {},
                 .on_done =
                     [this, weak] {
                       if (const StreamPtr self = weak.lock()) ended(self);
                     }},
                std::move(hello));
  return stream;
}

// Waits until gRPC has let go of a stream that ended or was aborted, so that it can be destroyed here.
void GrpcLink::release(const StreamPtr& stream) const {
  if (stream->wait_done(kControlAbortNs)) return;
  // gRPC ends a cancelled call at once; should it ever not, a leak is better than a crash.
  log_error("control: a cancelled call has not ended within {} ms", kControlAbortNs / kNanosPerMilli);
  new StreamPtr(stream);
}

void GrpcLink::aim(std::size_t index) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxWireFrameBytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(kMaxWireFrameBytes));
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES,
                   0);  // a stream cannot be replayed, and its messages need not be kept
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  channel_ = grpc::CreateCustomChannel(target_.targets[index], grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::Control::NewStub(channel_);
}

Status GrpcLink::connect() {
  const SystemClock& clock = SystemClock::instance();
  const std::int64_t deadline_ns = clock.now_ns() + options_.connect_timeout_ns;
  std::int64_t duplicate_until_ns = 0;
  Status last(StatusCode::kUnavailable, "nobody listens there");
  const auto ask = [&] { return options_.interrupt ? options_.interrupt() : Status(); };
  const std::int64_t slice_ns = options_.interrupt ? kAskEveryNs : kNanosPerSecond;
  const auto pause = [&] {
    MutexLock lock(mutex_);
    changed_.wait_for_ns(mutex_, std::clamp<std::int64_t>(deadline_ns - clock.now_ns(), 1, kRetryNs));
  };
  for (;;) {
    auto target = grpc_target(options_.address);
    if (target.ok()) {
      target_ = std::move(target).value();
      break;
    }
    // A host's name may appear in the name service together with its first process.
    if (!target.status().info().retryable || clock.now_ns() >= deadline_ns) return target.status();
    SHARDPULL_RETURN_IF_ERROR(ask());
    pause();
  }
  std::size_t aimed = 0;
  aim(aimed);
  for (;;) {
    const std::int64_t left_ns = deadline_ns - clock.now_ns();
    if (left_ns <= 0) break;
    // True to its name, but for a hub that is not there yet: then it returns at the time limit.
    bool connected = false;
    const std::int64_t until_ns = clock.now_ns() + std::min(left_ns, kNanosPerSecond);
    do {
      SHARDPULL_RETURN_IF_ERROR(ask());
      connected =
          channel_->WaitForConnected(in_ns(std::clamp<std::int64_t>(until_ns - clock.now_ns(), 1, slice_ns)));
    } while (!connected && clock.now_ns() < until_ns);
    if (!connected) {
      if (target_.path.empty()) {
        const Status foreign = check_no_foreign_service(target_.addresses[aimed], kForeignNs);
        if (!foreign.ok())
          return foreign.with_context(fmt::format("no control hub at \"{}\"", target_.shown));
      }
      if (target_.targets.size() > 1) aim(aimed = (aimed + 1) % target_.targets.size());
      continue;
    }
    const StreamPtr stream = try_once();
    const std::int64_t answer_ns =
        std::min(std::max<std::int64_t>(1, deadline_ns - clock.now_ns()), options_.dead_after_ns);
    Status interrupted;
    const auto answered = [&](std::int64_t limit_ns) {
      for (const std::int64_t until = clock.now_ns() + limit_ns; interrupted.ok();) {
        const std::int64_t still_ns = until - clock.now_ns();
        if (stream->wait_answer(std::clamp<std::int64_t>(still_ns, 1, slice_ns))) return true;
        if (still_ns <= 0) return false;
        interrupted = ask();
      }
      return false;
    };
    if (!answered(answer_ns) && (stream->abandon() || !answered(options_.dead_after_ns))) {
      stream->abort();
      release(stream);
      SHARDPULL_RETURN_IF_ERROR(interrupted);
      last = Status(StatusCode::kDeadlineExceeded,
                    "the process there accepted the connection and did not answer");
      continue;
    }
    if (stream->is_welcomed()) {
      standstill_.start(clock.now_ns());
      ticker_ = std::make_unique<Ticker>("shardpull-beat", options_.heartbeat_ns, [this] { beat(); });
      return {};
    }
    last = stream->final_status();
    if (is_permanent(last))
      return last.with_context(
          fmt::format("the hub at \"{}\" refused {}", target_.shown, to_string(options_.self)));
    if (last.code() == StatusCode::kAlreadyExists) {
      // The old process of this number may be dead and not found so yet.
      if (duplicate_until_ns == 0) {
        duplicate_until_ns =
            clock.now_ns() + options_.dead_after_ns + 2 * options_.heartbeat_ns + kNanosPerSecond;
      }
      if (clock.now_ns() >= duplicate_until_ns) {
        return last.with_context(
            fmt::format("the hub at \"{}\" refused {}", target_.shown, to_string(options_.self)));
      }
    }
    pause();
  }
  return Status(
      StatusCode::kDeadlineExceeded,
      fmt::format(
          "no control hub answered at \"{}\"{} within {} ({}): check that trainer 0 is running, that it was "
          "given the same address, and that it has not failed at its start{}",
          target_.shown, meaning(target_), format_duration_ns(options_.connect_timeout_ns), last.message(),
          trap(target_)),
      {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .retryable = true, .peer = to_string(kSender)});
}

void GrpcLink::beat() {
  StreamPtr stream;
  {
    MutexLock lock(mutex_);
    stream = stream_;
  }
  standstill_.beat(SystemClock::instance().now_ns());
  if (stream == nullptr) return;
  if (!stream->beat(SystemClock::instance().now_ns(), options_.heartbeat_ns, options_.dead_after_ns)) return;
  dispatcher_->post([this, stream] {
    broken_ = member_gone(
        hub_, fmt::format("its hub did not answer for {} ms", options_.dead_after_ns / kNanosPerMilli));
    stream->abort();
  });
}

Status GrpcLink::send(const Member& to, ControlBody body) {
  if (closing_) return member_gone(to, "this control link is shut down", Reason::kShutdown);
  if (to == options_.self) {
    dispatcher_->post([this, body = std::make_shared<ControlBody>(std::move(body))] {
      if (!closing_) sink_.on_control(options_.self, options_.incarnation, std::move(*body));
    });
    return {};
  }
  auto frame = std::make_shared<v1::Frame>();
  v1::Routed& routed = *frame->mutable_routed();
  StreamPtr stream;
  {
    MutexLock lock(mutex_);
    if (!down_.ok()) return down_;
    if (const auto up = up_.find(to); up != up_.end()) {
      routed.set_to_incarnation(up->second);
    } else if (lost_.contains(to)) {
      return member_gone(to, "it is not connected to the hub");
    }
    stream = stream_;
  }
  *routed.mutable_to() = to_wire(to);
  to_wire(body, routed);
  SHARDPULL_RETURN_IF_ERROR(check_message_size(name_of(body), routed.ByteSizeLong()));
  return stream->write(std::move(frame));
}

std::optional<ClockOffset> GrpcLink::clock_offset(const Member& member) {
  if (member == options_.self) return ClockOffset();
  StreamPtr stream;
  {
    MutexLock lock(mutex_);
    stream = stream_;
  }
  if (member != kSender || stream == nullptr) return std::nullopt;
  return stream->clock_offset(SystemClock::instance().now_ns());
}

void GrpcLink::shutdown() {
  if (dispatcher_->is_current_thread()) {
    log_error("control: shutdown() called from a callback; ignored, the destructor shuts down");
    return;
  }
  std::call_once(shutdown_once_, [this] {
    closing_ = true;
    StreamPtr stream;
    {
      MutexLock lock(mutex_);
      stream = stream_;
    }
    if (stream != nullptr) {
      auto goodbye = std::make_shared<v1::Frame>();
      goodbye->mutable_goodbye()->set_reason("it left in good order");
      stream->write(std::move(goodbye)).ignore();
      stream->end_after_flush();
      if (!stream->wait_done(kControlFlushNs)) stream->abort();
    }
    if (ticker_ != nullptr) ticker_->stop();
    dispatcher_->stop();
    if (stream != nullptr) release(stream);
    MutexLock lock(mutex_);
    stream_.reset();
  });
}

void GrpcLink::take(const StreamPtr& stream, v1::Frame frame) {
  const bool welcomed = stream->is_welcomed();
  if (closing_ && welcomed) return;
  switch (frame.kind_case()) {
    case v1::Frame::kWelcome:
      if (welcomed) break;
      return take_welcome(stream, frame.welcome());
    case v1::Frame::kMemberUp:
      if (!welcomed) break;
      return take_up(frame.member_up());
    case v1::Frame::kMemberLost:
      if (!welcomed) break;
      return take_lost(frame.member_lost());
    case v1::Frame::kRouted: {
      if (!welcomed) break;
      v1::Routed& routed = *frame.mutable_routed();
      const std::optional<Member> from = from_wire(routed.from());
      const Incarnation incarnation = routed.from_incarnation();
      Result<ControlBody> body = from_wire(std::move(routed));
      if (!from || !body.ok()) break;
      sink_.on_control(*from, incarnation, std::move(body).value());
      return;
    }
    case v1::Frame::kGoodbye:
      farewell_ = frame.goodbye().reason();
      return;
    case v1::Frame::kHello:
    case v1::Frame::kHeartbeat:
    case v1::Frame::kPart:
    case v1::Frame::KIND_NOT_SET:
      break;
  }
  broken_ = Status(StatusCode::kDataLoss, "the hub sent a frame that makes no sense",
                   {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = to_string(kSender)});
  log_warn("control: {}", broken_.message());
  stream->abort();
}

void GrpcLink::take_welcome(const StreamPtr& stream, const v1::Welcome& welcome) {
  if (!stream->accept()) return;
  hub_ = from_wire(welcome.member()).value_or(kSender);
  hub_incarnation_ = welcome.incarnation();
  {
    MutexLock lock(mutex_);
    stream_ = stream;
    down_ = Status();
    up_[hub_] = hub_incarnation_;
  }
  if (!closing_) sink_.on_member_up(hub_, hub_incarnation_);
  for (const v1::MemberUp& up : welcome.members()) take_up(up);
  stream->greet();
  stream->welcomed();
}

void GrpcLink::take_up(const v1::MemberUp& up) {
  const std::optional<Member> member = from_wire(up.member());
  if (!member) return;
  {
    MutexLock lock(mutex_);
    up_[*member] = up.incarnation();
    lost_.erase(*member);
  }
  if (!closing_) sink_.on_member_up(*member, up.incarnation());
}

void GrpcLink::take_lost(const v1::MemberLost& lost) {
  const std::optional<Member> member = from_wire(lost.member());
  if (!member) return;
  {
    MutexLock lock(mutex_);
    up_.erase(*member);
    lost_[*member] = lost.incarnation();
  }
  Status why = from_wire(lost.why());
  if (why.ok()) why = member_gone(*member, "the hub does not say why");
  if (!closing_) sink_.on_member_lost(*member, lost.incarnation(), why);
}

void GrpcLink::ended(const StreamPtr& stream) {
  if (!stream->is_welcomed()) return;
  Status why = broken_;
  if (why.ok() && !farewell_.empty()) why = member_gone(hub_, farewell_, Reason::kShutdown);
  if (why.ok())
    why = member_gone(hub_, fmt::format("its control link broke: {}", stream->final_status().message()));
  // Then it is this process that is gone, for the others.
  if (const std::string still = standstill_.recent(SystemClock::instance().now_ns()); !still.empty()) {
    const std::string name = to_string(hub_);
    why = Status(StatusCode::kUnavailable,
                 fmt::format("{} is gone: {}: the fleet has taken it for dead. It can be started again", name, still),
                 {.reason = Reason::kPeerLost, .fault = Fault::kHost, .peer = name});
  }
  {
    MutexLock lock(mutex_);
    down_ = why;
  }
  if (!closing_) sink_.on_member_lost(hub_, hub_incarnation_, why);
}

}  // namespace

Result<std::unique_ptr<Control>> connect_grpc_control(const ControlOptions& options, ControlSink& sink) {
  prepare_grpc();
  if (options.token == 0 || options.incarnation == 0 || options.heartbeat_ns <= 0 ||
      options.dead_after_ns <= 0) {
    return Status(StatusCode::kInvalidArgument,
                  "a control link needs a token, an incarnation, and times above 0",
                  {.reason = Reason::kBadArgument});
  }
  auto link = std::make_unique<GrpcLink>(options, sink);
  SHARDPULL_RETURN_IF_ERROR(link->connect());
  return std::unique_ptr<Control>(std::move(link));
}

}  // namespace shardpull
