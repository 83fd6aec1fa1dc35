// The hub: the sender's side of the star. All decisions are taken on one dispatcher thread, so that
// membership, routing and what each link is told have one order.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <grpc/support/log.h>

#include "base/interfaces.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/unix_socket.h"
#include "control/grpc/codec.h"
#include "control/grpc/frame_stream.h"
#include "control/grpc/grpc_control.h"
#include "shardpull/slice.h"

namespace shardpull {
namespace {

constexpr std::size_t kMaxRememberedRefusals = 1024;

grpc::Status to_grpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(to_grpc_code(status.code())), status.message(),
                      to_grpc_details(status));
}

class HubStream final : public FrameStream<grpc::ServerBidiReactor<v1::Frame, v1::Frame>> {
 public:
  HubStream(std::shared_ptr<Dispatcher> dispatcher, grpc::CallbackServerContext* context)
      : FrameStream(std::move(dispatcher)), context_(context), opened_ns(SystemClock::instance().now_ns()) {}

  void open(Handlers handlers) {
    self_ = shared_from_this();
    FrameStream::open(std::move(handlers));
  }

  // Ends the call with `status` once everything is written.
  void finish(const Status& status) {
    {
      MutexLock lock(mutex_);
      final_status_ = to_grpc(status);
    }
    end_after_flush();
  }
  // Ends it now, whatever the peer does.
  void abort() {
    MutexLock lock(mutex_);
    if (!done_) context_->TryCancel();
  }

 private:
  void end_side() SHARDPULL_REQUIRES(mutex_) override { finish_call(); }
  void on_read_ended() SHARDPULL_REQUIRES(
      mutex_) override {  // the peer has said everything; what is queued for it still goes out
    ending_ = true;
    start_next();
  }
  void on_write_failed() SHARDPULL_REQUIRES(mutex_) override { finish_call(); }
  void OnCancel() override {
    MutexLock lock(mutex_);
    drop_queue();
    if (!writing_) finish_call();
  }
  void OnDone() override {
    const std::shared_ptr<FrameStream> self = std::move(self_);
    done();
  }

  void finish_call() SHARDPULL_REQUIRES(mutex_) {
    if (std::exchange(closed_, true)) return;
    Finish(final_status_);
  }

  grpc::CallbackServerContext* const context_;  // gRPC's, until OnDone returns
  grpc::Status final_status_ SHARDPULL_GUARDED_BY(mutex_);
  std::shared_ptr<FrameStream> self_;  // from open() to OnDone

 public:
  const std::int64_t opened_ns;
  std::atomic<bool> identified{false};
  // The dispatcher's:
  std::optional<Member> member;
  Incarnation incarnation = 0;
  std::set<Member> told_missing;  // members it wrote to in vain; once is enough until they come
  std::string farewell;           // why it left, when it said goodbye
  Status broken;                  // why we ended it, when we did
};

using StreamPtr = std::shared_ptr<HubStream>;

class GrpcHub final : public Control, private v1::Control::CallbackService {
 public:
  GrpcHub(const ControlOptions& options, ControlSink& sink)
      : options_(options),
        sink_(sink),
        dispatcher_(std::make_shared<Dispatcher>("shardpull-hub")),
        standstill_(options.dead_after_ns) {}
  ~GrpcHub() override { shutdown(); }

  Status start();
  Status send(const Member& to, ControlBody body) override;
  std::optional<ClockOffset> clock_offset(const Member& member) override;
  std::vector<std::string> refusals() const override;
  void shutdown() override;

 private:
  struct Up {
    Incarnation incarnation = 0;
    StreamPtr stream;
  };

  grpc::ServerBidiReactor<v1::Frame, v1::Frame>* Link(grpc::CallbackServerContext* context) override;
  void beat();

  // ---- on the dispatcher ----
  void take(const StreamPtr& stream, v1::Frame frame);
  void take_hello(const StreamPtr& stream, const v1::Hello& hello);
  Status check_hello(const v1::Hello& hello, std::optional<Member>& member) const;
  void route(v1::Routed routed, const Member& from, Incarnation from_incarnation,
             const StreamPtr& from_stream);
  void ended(const StreamPtr& stream);
  void lose(const Member& member, const Status& why);
  void break_stream(const StreamPtr& stream, Status why);
  void broadcast(const FramePtr& frame, const Member& except);
  void write(const Up& up, FramePtr frame);

  const ControlOptions options_;
  ControlSink& sink_;
  const std::shared_ptr<Dispatcher> dispatcher_;
  StandstillWatch standstill_;
  GrpcTarget target_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Ticker> ticker_;
  std::once_flag shutdown_once_;
  std::atomic<bool> closing_{false};

  mutable Mutex mutex_;
  std::set<StreamPtr> streams_ SHARDPULL_GUARDED_BY(mutex_);    // every call that has not ended
  std::map<Member, Up> known_up_ SHARDPULL_GUARDED_BY(mutex_);  // members_, for other threads
  std::vector<std::string> lasting_refusals_ SHARDPULL_GUARDED_BY(mutex_);

  // The dispatcher's:
  std::map<Member, Up> members_;
  std::set<std::string> refusals_;
};

Status GrpcHub::start() {
  SHARDPULL_ASSIGN_OR_RETURN(target_, grpc_target(options_.address));
  if (target_.path.empty()) {
    for (const SocketAddress& address : target_.addresses) {
      if (!address.loopback() && !options_.insecure_listen) {
        return Status(
            StatusCode::kInvalidArgument,
            fmt::format("the control hub would listen at {}, which other hosts reach, and neither the fleet "
                        "token nor the weights are encrypted: allow it with insecure_listen "
                        "(--insecure-listen) on a network you trust, or use a loopback address",
                        address.to_string()),
            {.reason = Reason::kBadArgument});
      }
      SHARDPULL_RETURN_IF_ERROR(check_can_listen(address, "the control hub"));
    }
    const auto address = parse_host_port(target_.shown, "the control address");
    if (address.ok() && !means_loopback(*address, target_.addresses)) {
      if (const std::string trap = loopback_trap(*address, target_.addresses); !trap.empty())
        log_warn("{}", trap);
    }
  } else {
    // gRPC would take the address over from a running hub.
    SHARDPULL_RETURN_IF_ERROR(remove_stale_socket(target_.path));
  }
  grpc::ServerBuilder builder;
  std::vector<int> ports(target_.targets.size(), 0);
  for (std::size_t i = 0; i < ports.size(); ++i) {
    // A server takes a numeric address bare, a client with its scheme.
    builder.AddListeningPort(target_.path.empty() ? target_.addresses[i].to_string() : target_.targets[i],
                             grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.SetMaxReceiveMessageSize(static_cast<int>(kMaxWireFrameBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(kMaxWireFrameBytes));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.RegisterService(static_cast<v1::Control::CallbackService*>(this));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || std::find(ports.begin(), ports.end(), 0) != ports.end()) {
    return Status(
        StatusCode::kFailedPrecondition,
        fmt::format(
            "the control hub cannot listen at \"{}\": check that {} and that no other process uses it",
            target_.shown,
            target_.path.empty() ? "it is an address of this host" : "its directory is writable"),
        {.reason = Reason::kHost, .fault = Fault::kHost});
  }
  standstill_.start(SystemClock::instance().now_ns());
  ticker_ = std::make_unique<Ticker>("shardpull-beat", options_.heartbeat_ns, [this] { beat(); });
  return {};
}

grpc::ServerBidiReactor<v1::Frame, v1::Frame>* GrpcHub::Link(grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<HubStream>(dispatcher_, context);
  HubStream* const reactor = stream.get();
  {
    MutexLock lock(mutex_);
    streams_.insert(stream);
  }
  const std::weak_ptr<HubStream> weak = stream;
  stream->open({.on_frame =
                    [this, weak](v1::Frame frame) {
                      if (const StreamPtr self = weak.lock()) take(self, std::move(frame));
                    },
                .on_read_ended =
                    [this, weak] {
                      if (const StreamPtr self = weak.lock()) ended(self);
                    },
                .on_done =
                    [this, weak] {
                      const StreamPtr self = weak.lock();
                      if (self == nullptr) return;
                      ended(self);  // a call may end without its read side
                      MutexLock lock(mutex_);
                      streams_.erase(self);
                    }});
  if (closing_) {
    stream->finish(Status(StatusCode::kUnavailable, "the hub is shutting down",
                          {.reason = Reason::kShutdown, .fault = Fault::kPeer, .retryable = true}));
  }
  return reactor;
}

void GrpcHub::beat() {
  std::vector<StreamPtr> streams;
  {
    MutexLock lock(mutex_);
    streams.assign(streams_.begin(), streams_.end());
  }
  const std::int64_t now_ns = SystemClock::instance().now_ns();
  standstill_.beat(now_ns);
  for (const StreamPtr& stream : streams) {
    if (!stream->identified) {
      if (now_ns - stream->opened_ns < kHelloTimeoutNs) continue;
      stream->finish(
          Status(StatusCode::kDeadlineExceeded, "no hello arrived", {.reason = Reason::kBadToken}));
    } else if (stream->beat(now_ns, options_.heartbeat_ns, options_.dead_after_ns)) {
      dispatcher_->post([this, stream] {
        if (!stream->member) return;
        break_stream(stream,
                     member_gone(*stream->member, fmt::format("it did not answer for {} ms",
                                                              options_.dead_after_ns / kNanosPerMilli)));
      });
    }
  }
}

Status GrpcHub::send(const Member& to, ControlBody body) {
  if (closing_) return member_gone(to, "this hub is shut down", Reason::kShutdown);
  if (to == options_.self) {
    dispatcher_->post([this, body = std::make_shared<ControlBody>(std::move(body))] {
      if (!closing_) sink_.on_control(options_.self, options_.incarnation, std::move(*body));
    });
    return {};
  }
  v1::Routed routed;
  {
    MutexLock lock(mutex_);
    const auto up = known_up_.find(to);
    if (up == known_up_.end()) return member_gone(to, "it is not connected to the hub");
    routed.set_to_incarnation(up->second.incarnation);
  }
  *routed.mutable_to() = to_wire(to);
  to_wire(body, routed);
  SHARDPULL_RETURN_IF_ERROR(check_message_size(name_of(body), routed.ByteSizeLong()));
  dispatcher_->post([this, routed = std::make_shared<v1::Routed>(std::move(routed))] {
    route(std::move(*routed), options_.self, options_.incarnation, nullptr);
  });
  return {};
}

std::optional<ClockOffset> GrpcHub::clock_offset(const Member& member) {
  if (member == options_.self) return ClockOffset();
  StreamPtr stream;
  {
    MutexLock lock(mutex_);
    const auto up = known_up_.find(member);
    if (up == known_up_.end()) return std::nullopt;
    stream = up->second.stream;
  }
  return stream->clock_offset(SystemClock::instance().now_ns());
}

std::vector<std::string> GrpcHub::refusals() const {
  MutexLock lock(mutex_);
  return lasting_refusals_;
}

void GrpcHub::shutdown() {
  if (dispatcher_->is_current_thread()) {
    log_error("control: shutdown() called from a callback; ignored, the destructor shuts down");
    return;
  }
  std::call_once(shutdown_once_, [this] {
    closing_ = true;
    const std::int64_t give_up_ns = SystemClock::instance().now_ns() + kControlFlushNs;
    const auto all = [this] {
      MutexLock lock(mutex_);
      return std::vector<StreamPtr>(streams_.begin(), streams_.end());
    };
    // After everything that was sent before.
    dispatcher_->post([all] {
      auto goodbye = std::make_shared<v1::Frame>();
      goodbye->mutable_goodbye()->set_reason("the hub shuts down");
      for (const StreamPtr& stream : all()) {
        stream->write(goodbye).ignore();
        stream->finish(Status());
      }
    });
    for (const StreamPtr& stream : all()) {
      stream->wait_done(std::max<std::int64_t>(0, give_up_ns - SystemClock::instance().now_ns()));
    }
    for (const StreamPtr& stream : all()) stream->abort();
    if (server_ != nullptr) {
      server_->Shutdown(
          gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(kControlAbortNs, GPR_TIMESPAN)));
    }
    if (ticker_ != nullptr) ticker_->stop();
    dispatcher_->stop();
    server_.reset();
    members_.clear();
    MutexLock lock(mutex_);
    streams_.clear();
    known_up_.clear();
  });
}

void GrpcHub::take(const StreamPtr& stream, v1::Frame frame) {
  if (!stream->broken.ok()) return;
  if (!stream->member && frame.kind_case() != v1::Frame::kHello) {
    return break_stream(stream, Status(StatusCode::kInvalidArgument, "the first frame is not a hello",
                                       {.reason = Reason::kBadToken, .fault = Fault::kPeer}));
  }
  switch (frame.kind_case()) {
    case v1::Frame::kHello:
      return take_hello(stream, frame.hello());
    case v1::Frame::kRouted: {
      return route(std::move(*frame.mutable_routed()), *stream->member, stream->incarnation, stream);
    }
    case v1::Frame::kGoodbye:
      stream->farewell = frame.goodbye().reason();
      return;
    case v1::Frame::kWelcome:
    case v1::Frame::kMemberUp:
    case v1::Frame::kMemberLost:
    case v1::Frame::kHeartbeat:
    case v1::Frame::kPart:
    case v1::Frame::KIND_NOT_SET:
      break;
  }
  break_stream(stream, Status(StatusCode::kInvalidArgument,
                              "a frame that only the hub may send, or of an unknown kind",
                              {.reason = Reason::kCorrupt, .fault = Fault::kPeer}));
}

Status GrpcHub::check_hello(const v1::Hello& hello, std::optional<Member>& member) const {
  if (hello.token() != options_.token) {
    return Status(StatusCode::kUnauthenticated,
                  "the fleet token is not this fleet's: both sides must be given the same one",
                  {.reason = Reason::kBadToken, .fault = Fault::kPeer});
  }
  const auto mismatch = [](std::string message) {
    return Status(StatusCode::kFailedPrecondition, std::move(message),
                  {.reason = Reason::kVersionMismatch, .fault = Fault::kPeer});
  };
  if (hello.byte_order() != kByteOrderMark)
    return mismatch("the byte order differs: all hosts of a fleet must be little-endian");
  if (hello.software_version() != kSoftwareVersion || hello.wire_version() != kWireVersion ||
      hello.slice_format_version() != static_cast<std::uint32_t>(kSliceFormatVersion)) {
    return mismatch(fmt::format(
        "versions differ: the peer has software {}, wire {}, slice format {}; the hub has software {}, "
        "wire {}, slice format {}",
        hello.software_version(), hello.wire_version(), hello.slice_format_version(), kSoftwareVersion,
        kWireVersion, kSliceFormatVersion));
  }
  member = from_wire(hello.member());
  if (!member || hello.incarnation() == 0) {
    return Status(StatusCode::kInvalidArgument, "the hello names no member or no incarnation",
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer});
  }
  if (*member == options_.self) {
    return Status(
        StatusCode::kFailedPrecondition,
        fmt::format("{} is the hub itself: another process was started with its number", to_string(*member)),
        {.reason = Reason::kBadArgument, .fault = Fault::kPeer});
  }
  if (const auto up = members_.find(*member); up != members_.end()) {
    return Status(
        StatusCode::kAlreadyExists,
        fmt::format(
            "{} is connected already: another process was started with its number, or the old one has not "
            "been found dead yet",
            to_string(*member)),
        {.reason = Reason::kWrongState, .fault = Fault::kPeer, .retryable = true});
  }
  return {};
}

void GrpcHub::take_hello(const StreamPtr& stream, const v1::Hello& hello) {
  std::optional<Member> member;
  Status checked = stream->member ? Status(StatusCode::kInvalidArgument, "a second hello",
                                           {.reason = Reason::kCorrupt, .fault = Fault::kPeer})
                                  : check_hello(hello, member);
  if (!checked.ok()) {
    // The refused side reports it too. One that comes again and again is logged once.
    const std::string text = fmt::format("{}: {}", member ? to_string(*member) : "a peer", checked.message());
    if (refusals_.size() < kMaxRememberedRefusals && refusals_.insert(text).second) {
      log_at(checked.info().retryable ? LogLevel::kInfo : LogLevel::kWarn, "control: refused {}", text);
      if (!checked.info().retryable) {
        MutexLock lock(mutex_);
        lasting_refusals_.push_back(text);
      }
    }
    return break_stream(stream, std::move(checked));
  }
  stream->member = member;
  stream->incarnation = hello.incarnation();

  auto welcome = std::make_shared<v1::Frame>();
  *welcome->mutable_welcome()->mutable_member() = to_wire(options_.self);
  welcome->mutable_welcome()->set_incarnation(options_.incarnation);
  for (const auto& [other, up] : members_) {
    v1::MemberUp& entry = *welcome->mutable_welcome()->add_members();
    *entry.mutable_member() = to_wire(other);
    entry.set_incarnation(up.incarnation);
  }
  if (!stream->write(std::move(welcome)).ok())
    return;  // it broke meanwhile; ended() follows and finds nobody
  stream->identified = true;
  members_[*member] = Up{stream->incarnation, stream};
  {
    MutexLock lock(mutex_);
    known_up_[*member] = Up{stream->incarnation, stream};
  }
  auto up = std::make_shared<v1::Frame>();
  *up->mutable_member_up()->mutable_member() = to_wire(*member);
  up->mutable_member_up()->set_incarnation(stream->incarnation);
  for (const auto& [other, other_up] : members_) other_up.stream->told_missing.erase(*member);
  broadcast(up, *member);
  if (!closing_) sink_.on_member_up(*member, stream->incarnation);
}

void GrpcHub::route(v1::Routed routed, const Member& from, Incarnation from_incarnation,
                    const StreamPtr& from_stream) {
  const std::optional<Member> to = from_wire(routed.to());
  const auto refuse = [&](Status why) {
    if (from_stream != nullptr) break_stream(from_stream, std::move(why));
  };
  if (!to) {
    return refuse(Status(StatusCode::kInvalidArgument, "a message to no member",
                         {.reason = Reason::kCorrupt, .fault = Fault::kPeer}));
  }
  if (*to == options_.self) {
    if (routed.to_incarnation() != 0 && routed.to_incarnation() != options_.incarnation) return;
    Result<ControlBody> body = from_wire(std::move(routed));
    if (!body.ok()) return refuse(body.status());
    if (!closing_) sink_.on_control(from, from_incarnation, std::move(body).value());
    return;
  }
  const auto up = members_.find(*to);
  if (up != members_.end() &&
      (routed.to_incarnation() == 0 || routed.to_incarnation() == up->second.incarnation)) {
    *routed.mutable_from() = to_wire(from);
    routed.set_from_incarnation(from_incarnation);
    auto frame = std::make_shared<v1::Frame>();
    *frame->mutable_routed() = std::move(routed);
    return write(up->second, std::move(frame));
  }
  // A sender that knew the life it wrote to has been told of its end. One that knew none is told now.
  if (from_stream == nullptr || routed.to_incarnation() != 0 || !from_stream->told_missing.insert(*to).second)
    return;
  auto lost = std::make_shared<v1::Frame>();
  *lost->mutable_member_lost()->mutable_member() = to_wire(*to);
  *lost->mutable_member_lost()->mutable_why() = to_wire(member_gone(*to, "it is not connected to the hub"));
  from_stream->write(std::move(lost)).ignore();
}

void GrpcHub::ended(const StreamPtr& stream) {
  if (!stream->member) return;
  const auto up = members_.find(*stream->member);
  if (up == members_.end() || up->second.stream != stream) return;
  Status why = stream->broken;
  if (why.ok()) {
    why = stream->farewell.empty() ? member_gone(*stream->member, "its control link broke")
                                   : member_gone(*stream->member, stream->farewell, Reason::kShutdown);
    if (const std::string still = standstill_.recent(SystemClock::instance().now_ns()); !still.empty())
      why = member_gone(*stream->member, still + ", and it has left");
  }
  lose(*stream->member, why);
}

void GrpcHub::lose(const Member& member, const Status& why) {
  const auto up = members_.find(member);
  if (up == members_.end()) return;
  const Incarnation incarnation = up->second.incarnation;
  members_.erase(up);
  {
    MutexLock lock(mutex_);
    known_up_.erase(member);
  }
  auto lost = std::make_shared<v1::Frame>();
  *lost->mutable_member_lost()->mutable_member() = to_wire(member);
  lost->mutable_member_lost()->set_incarnation(incarnation);
  *lost->mutable_member_lost()->mutable_why() = to_wire(why);
  broadcast(lost, member);
  if (!closing_) sink_.on_member_lost(member, incarnation, why);
}

void GrpcHub::break_stream(const StreamPtr& stream, Status why) {
  if (!stream->broken.ok()) return;
  stream->broken = why;
  const bool was_up = stream->member.has_value();
  if (was_up) {
    log_warn("control: ended the link of {}: {}", to_string(*stream->member), why.message());
    const auto up = members_.find(*stream->member);
    if (up != members_.end() && up->second.stream == stream) lose(*stream->member, why);
    stream->abort();  // it may not be reading
  } else {
    stream->finish(why);
  }
}

void GrpcHub::broadcast(const FramePtr& frame, const Member& except) {
  std::vector<Member> members;
  for (const auto& [member, up] : members_) {
    if (member != except) members.push_back(member);
  }
  for (const Member& member : members) {  // a failing write may change members_
    if (const auto up = members_.find(member); up != members_.end()) write(up->second, frame);
  }
}

void GrpcHub::write(const Up& up, FramePtr frame) {
  const StreamPtr stream = up.stream;
  const Status written = stream->write(std::move(frame));
  // A closed stream is reported by its end. One that takes nothing must be ended, or its messages would be
  // lost silently.
  if (written.code() == StatusCode::kResourceExhausted) break_stream(stream, written);
}

}  // namespace

Result<std::unique_ptr<Control>> start_grpc_hub(const ControlOptions& options, ControlSink& sink) {
  prepare_grpc();
  if (options.token == 0 || options.incarnation == 0 || options.heartbeat_ns <= 0 ||
      options.dead_after_ns <= 0) {
    return Status(StatusCode::kInvalidArgument,
                  "the control hub needs a token, an incarnation, and times above 0",
                  {.reason = Reason::kBadArgument});
  }
  auto hub = std::make_unique<GrpcHub>(options, sink);
  SHARDPULL_RETURN_IF_ERROR(hub->start());
  return std::unique_ptr<Control>(std::move(hub));
}

}  // namespace shardpull
