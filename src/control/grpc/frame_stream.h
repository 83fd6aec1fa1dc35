// FrameStream: one side of a Link, on gRPC's callback API: a queue of frames to write, one write at a time,
// and frames read and handed to the owner's dispatcher in order.
//
// Lifetime: gRPC holds a plain pointer until the last reaction has returned. A hub's stream keeps itself
// alive so long. A link's stream is kept by the link, which destroys it after wait_done(): its context holds
// the channel, and a channel destroyed on one of gRPC's own threads makes gRPC 1.51 wait for itself and
// crash.
//
// Threads: reactions run on gRPC's threads. Operations are started under the stream's own lock; gRPC never
// runs a reaction within the call that starts an operation, so that no lock is taken twice. No other lock is
// held meanwhile.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <grpcpp/grpcpp.h>

#include "base/clock.h"
#include "base/clock_offset.h"
#include "base/host_port.h"
#include "base/identity.h"
#include "base/mutex.h"
#include "control/grpc/control_threads.h"
#include "shardpull/status.h"
#include "shardpull/v1/control.grpc.pb.h"

namespace shardpull {

inline constexpr std::uint64_t kMaxControlMessageBytes = 64u << 20;
inline constexpr std::uint64_t kMaxControlFrameBytes =
    kMaxControlMessageBytes + 1024;                                  // with addresses around the body
inline constexpr std::uint64_t kMaxControlQueuedBytes = 512u << 20;  // a peer has not taken yet
// A larger frame travels in parts of this size, so that heartbeats come between them: one that takes seconds,
// on a slow host, must not look like silence.
inline constexpr std::uint64_t kPartBytes = 1u << 20;
inline constexpr std::uint64_t kMaxWireFrameBytes = kPartBytes + 4096;  // what gRPC takes
inline constexpr std::uint64_t kQueuedFrameBytes = 512;                 // what a frame costs beside its bytes
// Frames of one peer that may wait for the dispatcher; more stay in gRPC's flow control, so that a peer which
// sends faster than we work is slowed down and costs no memory.
inline constexpr int kMaxUndelivered = 8;
// Heartbeats of a new link that each side answers at once. The best of a few exchanges is not one that a busy
// machine held up.
inline constexpr int kGreetings = 4;

using FramePtr = std::shared_ptr<const v1::Frame>;

template <typename Reactor>
class FrameStream : public Reactor, public std::enable_shared_from_this<FrameStream<Reactor>> {
 public:
  // All run on the dispatcher. `on_frame` gets every frame but heartbeats; `on_read_ended` says that none
  // follows; `on_done`, the last call, that the peer knows it too.
  struct Handlers {
    std::function<void(v1::Frame)> on_frame;
    std::function<void()> on_read_ended;
    std::function<void()> on_done;
  };

  explicit FrameStream(std::shared_ptr<Dispatcher> dispatcher) : dispatcher_(std::move(dispatcher)) {}

  // Queues a frame. UNAVAILABLE when the stream has ended, RESOURCE_EXHAUSTED when the peer does not take
  // what is queued.
  Status write(FramePtr frame) {
    const std::vector<FramePtr> pieces = split(std::move(frame));
    std::uint64_t size = 0;
    for (const FramePtr& piece : pieces) size += piece->ByteSizeLong() + kQueuedFrameBytes;
    MutexLock lock(mutex_);
    if (closed_ || ending_) {
      return Status(StatusCode::kUnavailable, "the control link is closed",
                    {.reason = Reason::kPeerLost, .fault = Fault::kPeer});
    }
    if (queued_bytes_ + size > kMaxControlQueuedBytes) {
      return Status(StatusCode::kResourceExhausted,
                    fmt::format("the peer has not taken {} bytes of control messages", queued_bytes_),
                    {.reason = Reason::kLimit, .fault = Fault::kPeer, .retryable = true});
    }
    queue_.insert(queue_.end(), pieces.begin(), pieces.end());
    queued_bytes_ += size;
    start_next();
    return {};
  }

  // Writes what is queued, then ends this side. Later writes are refused.
  void end_after_flush() {
    MutexLock lock(mutex_);
    ending_ = true;
    start_next();
  }

  // Sends a heartbeat ahead of its time, so that the two clocks are soon compared: the first few that a side
  // receives it answers at once.
  void greet() {
    MutexLock lock(mutex_);
    send_beat();
  }

  // How the peer's clock stands to ours, by the heartbeats so far.
  std::optional<ClockOffset> clock_offset(std::int64_t now_ns) {
    MutexLock lock(mutex_);
    return comparison_.at(now_ns);
  }

  // Once per heartbeat: sends one, and says whether the peer has been silent for `dead_after_ns` AND for as
  // many beats as fit in it, so that a process which was itself stopped does not take its peers for dead.
  bool beat(std::int64_t now_ns, std::int64_t heartbeat_ns, std::int64_t dead_after_ns) {
    MutexLock lock(mutex_);
    if (closed_) return false;
    if (heard_ || handling_ || !reading_) {  // while we do not read, silence is ours
      silent_beats_ = 0;
      heard_ns_ = now_ns;
    } else {
      ++silent_beats_;
    }
    heard_ = false;
    send_beat();
    return now_ns - heard_ns_ >= dead_after_ns && silent_beats_ * heartbeat_ns >= dead_after_ns;
  }

  // True when the stream ended within `timeout_ns`: gRPC does not know it any more.
  bool wait_done(std::int64_t timeout_ns) {
    MutexLock lock(mutex_);
    return done_changed_.wait_for_ns(mutex_, timeout_ns,
                                     [this]() SHARDPULL_NO_THREAD_SAFETY_ANALYSIS { return done_; });
  }

 protected:
  // What ends this side when everything is written; called with the lock held, at most once.
  virtual void end_side() SHARDPULL_REQUIRES(mutex_) = 0;
  // The peer sends no more, or the stream broke; called with the lock held, at most once.
  virtual void on_read_ended() SHARDPULL_REQUIRES(mutex_) = 0;
  // A write failed: the stream broke; called with the lock held.
  virtual void on_write_failed() SHARDPULL_REQUIRES(mutex_) = 0;

  void open(Handlers handlers) {
    handlers_ = std::move(handlers);
    MutexLock lock(mutex_);
    heard_ns_ = SystemClock::instance().now_ns();
    reading_ = true;
    this->StartRead(&incoming_);
  }

  // The last reaction calls it last: whoever waits in wait_done() may destroy this object as soon as the lock
  // is free.
  void done() {
    dispatcher_->post([self = this->shared_from_this()] { self->handlers_.on_done(); });
    MutexLock lock(mutex_);
    closed_ = true;
    done_ = true;
    drop_queue();
    done_changed_.notify_all();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      // Posted before our side ends: when the peer sees that, and comes again, this life is known to be over.
      dispatcher_->post([self = this->shared_from_this()] { self->handlers_.on_read_ended(); });
      MutexLock lock(mutex_);
      reading_ = false;
      if (!std::exchange(read_ended_, true)) on_read_ended();
      return;
    }
    const std::int64_t now_ns = SystemClock::instance().now_ns();
    {
      MutexLock lock(mutex_);
      handling_ = true;  // joining a large frame takes a while
    }
    const bool is_beat = incoming_.kind_case() == v1::Frame::kHeartbeat;
    const v1::Heartbeat beat = incoming_.heartbeat();
    const bool is_whole = !is_beat && (incoming_.kind_case() != v1::Frame::kPart || join_part());
    if (is_whole) {
      // Posted before the next read starts, whose reaction may run on another thread.
      auto frame = std::make_shared<v1::Frame>(std::move(incoming_));
      dispatcher_->post([self = this->shared_from_this(), frame] {
        self->handlers_.on_frame(std::move(*frame));
        self->delivered();
      });
    }
    incoming_.Clear();
    MutexLock lock(mutex_);
    heard_ = true;
    heard_ns_ = now_ns;
    if (is_beat) {
      peer_beat_sent_ns_ = beat.sent_ns();
      peer_beat_received_ns_ = now_ns;
      if (beat.echo_received_ns() != 0)
        comparison_.add(beat.echo_sent_ns(), beat.echo_received_ns(), beat.sent_ns(), now_ns);
      if (greetings_ < kGreetings) {
        ++greetings_;
        send_beat();
      }
    }
    if (is_whole) ++undelivered_;
    handling_ = false;
    reading_ = false;
    read_more();
  }

  // Adds the part in `incoming_` to those before it. True when that made a frame, which is then in
  // `incoming_`; parts that make none, or too large a one, give an empty frame, which no owner accepts.
  bool join_part() {
    const v1::Part& part = incoming_.part();
    const bool too_large = joined_.size() + part.data().size() > kMaxControlFrameBytes;
    if (!too_large) joined_ += part.data();
    if (!too_large && !part.last()) return false;
    const std::string bytes = std::exchange(joined_, std::string());
    const bool parsed = !too_large && incoming_.ParseFromString(bytes);
    if (!parsed || incoming_.kind_case() == v1::Frame::kPart ||
        incoming_.kind_case() == v1::Frame::kHeartbeat)
      incoming_.Clear();
    return true;
  }

  static std::vector<FramePtr> split(FramePtr frame) {
    if (frame->ByteSizeLong() <= kPartBytes) return {std::move(frame)};
    const std::string bytes = frame->SerializeAsString();
    std::vector<FramePtr> parts;
    for (std::size_t offset = 0; offset < bytes.size(); offset += kPartBytes) {
      auto piece = std::make_shared<v1::Frame>();
      piece->mutable_part()->set_data(bytes.substr(offset, kPartBytes));
      piece->mutable_part()->set_last(bytes.size() - offset <= kPartBytes);
      parts.push_back(std::move(piece));
    }
    return parts;
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    in_flight_.reset();
    if (ok) {
      start_next();
    } else {
      drop_queue();
      on_write_failed();
    }
  }

  void send_beat() SHARDPULL_REQUIRES(mutex_) {
    if (closed_ || ending_) return;
    beat_due_ = true;
    start_next();
  }

  void delivered() {
    MutexLock lock(mutex_);
    --undelivered_;
    read_more();
  }

  void read_more() SHARDPULL_REQUIRES(mutex_) {
    if (reading_ || read_ended_ || closed_ || undelivered_ >= kMaxUndelivered) return;
    reading_ = true;
    this->StartRead(&incoming_);
  }

  void start_next() SHARDPULL_REQUIRES(mutex_) {
    if (writing_ || closed_ || side_ended_) return;
    if (std::exchange(beat_due_, false)) {  // ahead of the queue: a beat has no order to keep
      auto frame = std::make_shared<v1::Frame>();
      v1::Heartbeat& beat = *frame->mutable_heartbeat();
      beat.set_sent_ns(SystemClock::instance().now_ns());
      beat.set_echo_sent_ns(peer_beat_sent_ns_);
      beat.set_echo_received_ns(peer_beat_received_ns_);
      in_flight_ = std::move(frame);
    } else if (!queue_.empty()) {
      in_flight_ = std::move(queue_.front());
      queue_.pop_front();
      queued_bytes_ -= in_flight_->ByteSizeLong() + kQueuedFrameBytes;
    } else {
      if (ending_) {
        side_ended_ = true;
        end_side();
      }
      return;
    }
    writing_ = true;
    this->StartWrite(in_flight_.get());
  }

  void drop_queue() SHARDPULL_REQUIRES(mutex_) {
    queue_.clear();
    queued_bytes_ = 0;
  }

  const std::shared_ptr<Dispatcher> dispatcher_;
  Handlers handlers_;
  v1::Frame incoming_;  // gRPC's while a read is under way, else its reaction's
  std::string joined_;  // the parts of an unfinished frame; the reactions' too

  Mutex mutex_;
  CondVar done_changed_;
  std::deque<FramePtr> queue_ SHARDPULL_GUARDED_BY(mutex_);
  std::uint64_t queued_bytes_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  FramePtr in_flight_ SHARDPULL_GUARDED_BY(mutex_);
  bool writing_ SHARDPULL_GUARDED_BY(mutex_) = false;
  bool beat_due_ SHARDPULL_GUARDED_BY(mutex_) = false;
  bool ending_ SHARDPULL_GUARDED_BY(mutex_) = false;      // end_side() once the queue is empty
  bool side_ended_ SHARDPULL_GUARDED_BY(mutex_) = false;  // end_side() was called
  bool closed_ SHARDPULL_GUARDED_BY(mutex_) = false;      // no operation may be started any more
  bool reading_ SHARDPULL_GUARDED_BY(mutex_) = false;     // from StartRead to the end of its reaction
  bool handling_ SHARDPULL_GUARDED_BY(mutex_) = false;    // within the reaction
  bool read_ended_ SHARDPULL_GUARDED_BY(mutex_) = false;
  int undelivered_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  bool done_ SHARDPULL_GUARDED_BY(mutex_) = false;
  bool heard_ SHARDPULL_GUARDED_BY(mutex_) = true;  // since the last beat
  std::int64_t heard_ns_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::int64_t silent_beats_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::int64_t peer_beat_sent_ns_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::int64_t peer_beat_received_ns_ SHARDPULL_GUARDED_BY(mutex_) = 0;  // 0: none yet
  ClockComparison comparison_ SHARDPULL_GUARDED_BY(mutex_);
  int greetings_ SHARDPULL_GUARDED_BY(mutex_) = 0;  // beats answered at once
};

// The address of a hub as gRPC takes it. Long or oddly spelled paths work: the name that gRPC sees is
// percent-encoded.
struct GrpcTarget {
  std::string shown;                     // for people: the socket file, or "node7:5000"
  std::string path;                      // the socket file; empty for TCP
  std::vector<SocketAddress> addresses;  // of TCP, in the resolver's order; empty for a socket file
  std::vector<std::string> targets;      // "unix:...", or one per address; valid while `keeps_alive` lives
  std::shared_ptr<const void> keeps_alive;
};
// INVALID_ARGUMENT when the address is neither "unix:/path" nor "tcp:HOST:PORT"; else the errors of
// check_owner_only_directory, or of resolve().
Result<GrpcTarget> grpc_target(const std::string& address);

// Before any other use of gRPC. Keeps its log off standard error, unless GRPC_VERBOSITY asks for it, and
// keeps the library initialised until the process ends: shut down with the last channel, it may wait ten
// seconds for a poller of its own.
void prepare_grpc();

// INVALID_ARGUMENT, kLimit, when a body is larger than a control message may be.
Status check_message_size(std::string_view name, std::uint64_t bytes);

// A peer is gone: UNAVAILABLE with its name.
Status member_gone(const Member& member, std::string_view why, Reason reason = Reason::kPeerLost);

inline constexpr std::uint32_t kByteOrderMark = 0x01020304;
inline constexpr std::int64_t kControlFlushNs =
    2 * kNanosPerSecond;  // what shutdown() waits for queued frames
inline constexpr std::int64_t kControlAbortNs = 2 * kNanosPerSecond;  // and then for a cancelled stream
inline constexpr std::int64_t kHelloTimeoutNs =
    10 * kNanosPerSecond;  // for a stream that does not say who it is

}  // namespace shardpull
