// LocalEndpoint: one connected socket of a backend of one host, its queue of frames to send and its buffer of
// bytes received.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <sys/types.h>

#include "base/unique_fd.h"
#include "shardpull/status.h"
#include "transport/peer_memory.h"
#include "transport/regions.h"
#include "transport/transport.h"

namespace shardpull {

// A descriptor that travels with a frame, and what keeps it open until then. None: fd < 0.
struct SentDescriptor {
  int fd = -1;
  std::shared_ptr<const void> owner;
};

// Confined to the progress thread.
class LocalEndpoint {
 public:
  enum class State {
    kOpen,       // carries messages
    kClosed,     // ended by the peer or by an error: reported once its reads have been
    kLingering,  // closed by us: sends what is queued, reports nothing but the end of its reads
    kGone,       // to be destroyed
  };
  // A frame as it arrived; `bytes` and the descriptor are valid until the next call.
  struct Frame {
    std::span<const std::byte> bytes;  // header and payload
  };

  // `pid` is the peer's as this process's pid namespace has it; 0 when it has none.
  LocalEndpoint(EndpointId id, UniqueFd fd, pid_t pid, std::string peer, bool accepted);

  EndpointId id() const { return id_; }
  int fd() const { return fd_.get(); }
  pid_t pid() const { return pid_; }
  const std::string& peer() const { return peer_; }  // for messages: "pid 17"
  bool accepted() const { return accepted_; }

  // ---- sending ----
  // Queues a frame; `descriptor` travels with its first byte.
  void queue(std::vector<std::byte> frame, SentDescriptor descriptor = {});
  // Sends what the socket takes. An error means that the peer takes nothing more; the queue is dropped then,
  // and later calls return the same error. What the peer sent before can still be received.
  Status flush();
  std::uint64_t queued_bytes() const { return queued_bytes_; }
  // Some frame waits although the socket might take it: the kernel has too many descriptors in flight. Try
  // again soon.
  bool must_retry() const { return must_retry_; }

  // ---- receiving ----
  enum class Received { kBytes, kNothing, kEnd };
  // Reads once from the socket. An error closes the endpoint: the connection broke, or the peer sent
  // descriptors nobody asked for.
  Result<Received> receive();
  // The next whole frame in the buffer, or nothing yet. An error is a frame that is not ours.
  Result<std::optional<Frame>> next_frame();
  // Bytes of an unfinished frame.
  std::size_t unfinished_bytes() const { return end_ - begin_; }
  // The descriptor that came with the frames so far, oldest first; invalid when there is none.
  UniqueFd take_descriptor();
  std::size_t unclaimed_descriptors() const { return descriptors_.size(); }

  State state = State::kOpen;
  Status why;                                                // kClosed: what on_closed tells
  Incarnation incarnation = 0;                               // the peer's, from its first frame; 0 before
  PeerRegions<PeerMemory> regions;                           // what the peer granted
  std::unordered_map<std::uint32_t, std::uint32_t> granted;  // what it was granted: region -> generation
  std::uint32_t reads = 0;                                   // under way
  std::uint32_t watched_events = 0;                          // what epoll waits for
  std::int64_t deadline_ns = 0;  // kLingering: when to give up; kOpen, accepted, no frame yet: when to close

 private:
  struct Outgoing {
    std::vector<std::byte> bytes;
    std::size_t sent = 0;
    SentDescriptor descriptor;
  };
  // Makes room for `wanted` bytes from begin_ on.
  void reserve(std::size_t wanted);

  const EndpointId id_;
  UniqueFd fd_;
  const pid_t pid_;
  const std::string peer_;
  const bool accepted_;

  std::deque<Outgoing> outgoing_;
  std::uint64_t queued_bytes_ = 0;
  bool must_retry_ = false;
  Status send_error_;

  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0, end_ = 0;  // the bytes not consumed yet
  std::deque<UniqueFd> descriptors_;
};

}  // namespace shardpull
