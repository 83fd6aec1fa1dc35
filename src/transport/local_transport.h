// LocalTransport: what the backends of one host have in common: messages over unix sockets, and regions that
// one side grants and the other reads. How memory is made, told and copied is the backend's: shm/ (mapped
// memory files), cma/ (reads across processes).
//
// An endpoint is a unix stream socket between two processes of one user. On it travel hot messages
// (hot_wire.h) and, between them, two messages of these backends alone, 64 bytes each:
//
//    0 u32 magic "SPLM"   6 u8 kind      8 u64 token         24 u32 region       40 u64 address
//    4 u16 wire version   7 u8 backend  16 u64 incarnation   28 u32 generation   48 u64 proof's address
//                                                            32 u64 bytes        56 u64 proof
//
//   grant   the sender's region may be read from now on. With shm its memory file travels along (SCM_RIGHTS),
//           and the receiver maps it, read-only and prefaulted, before it looks at the next message. With cma
//           the last three fields say where the region is in its owner, and how the receiver can tell that it
//           still is.
//   retire  the owner freed the region. The receiver forgets it; mappings that were handed out stay readable.
//
// What arrives is believed only after checks: the peer runs as our user (SO_PEERCRED), every frame carries
// the fleet's token and the incarnation of the first one, and every grant our own backend. Anything else
// closes the endpoint, is logged once per peer, and disturbs nothing else.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/local_endpoint.h"
#include "transport/local_frame.h"
#include "transport/peer_memory.h"
#include "transport/read_threads.h"
#include "transport/regions.h"
#include "transport/transport.h"

namespace shardpull {

struct LocalOptions {
  std::string directory;  // holds the listening socket; this user's alone (mode 700)
  FleetToken token = 0;
  Incarnation incarnation = 0;  // this process's
  std::string self_name;        // "worker-3": names the socket file; letters, digits, '-', '_', '.'
  std::uint64_t max_queued_bytes =
      64u << 20;  // of messages a peer has not taken yet; with more its endpoint is ended
  std::int64_t hello_timeout_ns =
      10 * kNanosPerSecond;  // an accepted peer that sent no valid message for so long is closed
  std::int64_t close_timeout_ns =
      2 * kNanosPerSecond;  // how long queued messages may take to leave a closed endpoint
};

// What exported memory and other threads share with the transport, and may outlive it. Thread-safe.
struct LocalShared {
  OwnRegions regions;
  UniqueFd wake_fd;

  void wake() const;
};

// Memory of this process with a name for peers. A backend's own class adds what a grant says of it.
class LocalExport : public ExportedMemory {
 public:
  ~LocalExport() override;  // frees the name; peers are told from the progress thread
  virtual void describe(LocalFrame& grant) const = 0;
  virtual SentDescriptor descriptor() const { return {}; }
  bool belongs_to(const std::shared_ptr<LocalShared>& shared) const { return shared_ == shared; }

 protected:
  LocalExport(std::shared_ptr<LocalShared> shared, OwnRegions::Name name, std::byte* address,
              std::uint64_t bytes);

 private:
  const std::shared_ptr<LocalShared> shared_;
};

// `token`, `incarnation` and, where they are 0, those of sent headers are filled in. Large reads run on
// `read_threads` threads, in the order they were asked for; everything else happens on the progress thread.
// Reads are reported in any order.
//
// The destructor sends what is queued (within a second), removes the socket file, ends reads between two
// steps without reporting them, and joins the threads. Exported memory and mappings that were handed out
// outlive it.
class LocalTransport : public Transport {
 public:
  ~LocalTransport() override;

  std::string name() const override { return std::string(name_of(backend_)); }
  Result<std::string> listen() override;
  Result<EndpointId> connect(const std::string& address, std::int64_t timeout_ns) override;
  Status send(EndpointId endpoint, HotHeader header, const std::byte* payload, std::size_t length) override;
  Status grant(EndpointId endpoint, const std::shared_ptr<ExportedMemory>& memory) override;
  void close(EndpointId endpoint) override;
  void read(EndpointId endpoint, const RemoteRef& remote, std::byte* local, ReadToken token) override;
  void read_parts(EndpointId endpoint, std::vector<ReadPart> parts, ReadToken token) override;
  Result<Mapping> map(EndpointId endpoint, const RemoteRef& remote) override;
  void add_mapped_bytes(std::uint64_t bytes) override {
    payload_bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
  }
  Status progress(std::int64_t timeout_ns, TransportSink& sink) override;
  void wake() override { shared_->wake(); }
  TransportCounters counters() const override;

 protected:
  // What a transport is made of once its options have been checked.
  struct Setup {
    LocalOptions options;
    std::shared_ptr<LocalShared> shared;
    UniqueFd epoll;
  };
  // Fails when an option is missing, or when the directory is not this user's alone.
  static Result<Setup> set_up(LocalOptions options, LocalBackend backend);
  LocalTransport(Setup setup, LocalBackend backend, unsigned read_threads, CopyParts copy);

  // Connects to the socket at `path`. With `check`, only to a peer it finds nothing wrong with.
  using PeerCheck = std::function<Status(pid_t pid, const std::string& peer)>;
  Result<EndpointId> connect_to(const std::string& path, std::int64_t timeout_ns, const PeerCheck& check);
  const std::shared_ptr<LocalShared>& shared() const { return shared_; }

 private:
  // Takes a peer's grant, with the descriptor that came along. An error for kCorrupt closes the endpoint; any
  // other is told to whoever asks for the region.
  virtual Result<std::shared_ptr<const PeerMemory>> open_grant(const LocalFrame& grant,
                                                               LocalEndpoint& endpoint) = 0;

  struct Read {
    EndpointId endpoint = 0;
    ReadToken token = 0;
    std::uint64_t bytes = 0;
  };
  struct SettledRead {
    Read read;
    Status status;
  };

  LocalEndpoint* find(EndpointId id);
  Result<EndpointId> add(UniqueFd fd, pid_t pid, std::string peer, bool accepted);
  void accept_peers(TransportSink& sink);
  void receive(LocalEndpoint& endpoint, TransportSink& sink);
  Status take_frame(LocalEndpoint& endpoint, std::span<const std::byte> frame, TransportSink& sink);
  Status check_sender(LocalEndpoint& endpoint, FleetToken token, Incarnation incarnation) const;
  Status take_local_frame(LocalEndpoint& endpoint, const LocalFrame& frame);
  // Begins a read of checked windows, or says why it cannot.
  Status begin_read(LocalEndpoint& endpoint, std::span<const ReadPart> parts, Read& read, bool& done);
  LocalFrame frame_of(LocalFrameKind kind, std::uint32_t region, std::uint32_t generation) const;
  // Ends an endpoint that the peer closed or broke; it is reported when its reads have been.
  void end(LocalEndpoint& endpoint, Status why);
  // The same for a peer that sent what is not ours: logged, once per peer.
  void refuse(LocalEndpoint& endpoint, const Status& why);
  void flush(LocalEndpoint& endpoint);
  void watch(LocalEndpoint& endpoint);
  void retire_freed_regions();
  void report_reads(TransportSink& sink);
  void report_closed(TransportSink& sink);
  void count_down_read(EndpointId id);
  void run_timers();
  void remove_gone();
  std::int64_t next_timer_ns() const;
  bool work_waits() const { return !settled_reads_.empty() || !closed_.empty() || !gone_.empty(); }
  void linger_all();

  const LocalOptions options_;
  const LocalBackend backend_;
  const std::shared_ptr<LocalShared> shared_;
  const SystemClock& clock_ = SystemClock::instance();

  UniqueFd epoll_;
  UniqueFd listener_;
  std::string listen_path_;
  ino_t listen_inode_ = 0;
  std::int64_t accept_again_ns_ = 0;  // 0: accepting
  bool told_out_of_descriptors_ = false;

  std::unordered_map<EndpointId, std::unique_ptr<LocalEndpoint>> endpoints_;
  EndpointId last_endpoint_ = 0;
  std::vector<EndpointId> closed_;   // in state kClosed, to be reported
  std::vector<EndpointId> gone_;     // to be destroyed at the end of the round
  std::vector<EndpointId> timed_;    // with a deadline
  std::vector<EndpointId> retries_;  // with frames to send again soon
  std::unordered_set<std::string> refused_peers_;

  std::uint64_t last_read_ = 0;
  std::unordered_map<std::uint64_t, Read> reads_;
  std::vector<SettledRead> settled_reads_;  // refused, or done at once; to be reported

  std::atomic<std::uint64_t> payload_bytes_read_{0}, header_bytes_{0}, messages_{0}, open_endpoints_{0},
      held_bytes_{0};

  const CopyParts copy_;
  ReadThreads readers_;  // last: they end before what they wake
};

}  // namespace shardpull
