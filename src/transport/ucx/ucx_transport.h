// The transport between hosts: messages and memory travel over UCX, by TCP or by whatever else UCX finds.
//
// Peers meet on a TCP socket of ours. Each says hello there (ucx_frame.h): its token, name, UCX worker's
// address, and a key which it wants to see before each of the peer's messages. After that the socket only
// tells that the peer lives; everything else travels over a UCX endpoint with peer error handling, as active
// messages with a header of 80 bytes and perhaps data:
//
//    message   u64 key, u64 order, hot header (hot_wire.h)   data: the payload
//    frame     u64 key, u64 order, frame (ucx_frame.h)       data: by kind
//    data      u64 key, u64 0, frame of kind data            data: bytes of a read, for where they belong
//
// UCX promises no order between active messages; messages and frames are put back into the order they were
// sent in. Data has none and needs none. A bye is a peer's last frame, so that what was sent before a close
// is not lost with the connection. Every header carries the fleet's token and the incarnation of the hello.
// Anything else closes the endpoint, is logged once per peer, and disturbs nothing else. UCX sees nothing of
// a peer before its token was right.
//
// A read asks its owner, who checks the window against what it granted and sends fragments, a few at a time:
// over TCP through UCX's segments, else by its rendezvous straight into the reader's memory. Where UCX
// connected them by RDMA the reader fetches them one-sidedly.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "transport/transport.h"

namespace shardpull {

inline constexpr std::uint32_t kMaxUcxWorkers = 16;

struct UcxOptions {
  FleetToken token = 0;
  Incarnation incarnation = 0;  // this process's
  std::string self_name;        // "worker-3": what peers call this process in errors; 64 bytes at most
  // "tcp" is TCP alone; empty is whatever UCX finds; else a list as in UCX_TLS.
  std::string transports = "tcp";
  // This process's own address: what it listens at, and with "tcp" and no `interface`, whose interface it
  // uses for everything. A name is resolved. A wildcard is refused: peers are told this address.
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  // 0: any free one
  std::string interface;   // "eth0", or a list of UCX's device names; empty: see `host`
  // UCX workers, 1..kMaxUcxWorkers: streams to each peer over which reads are spread, long ones in parts. The
  // first one is driven by progress() and carries all messages; each other one has a thread of its own. Of
  // two peers the smaller number counts. Fetched reads (see Reads) use the first worker alone.
  std::uint32_t workers = 1;
  enum class Reads {
    kAuto,  // one-sided where UCX connected by RDMA
    kSent,  // the owner sends
    // One-sided always. For tests: without RDMA it is slow, and UCX ends an owner whose reader dies
    // meanwhile.
    kGets,
  };
  Reads reads = Reads::kAuto;
  std::uint64_t fragment_bytes = 1u << 20;  // of a read, at a time; over TCP 512 KiB at most
  std::uint32_t fragments_in_flight = 8;    // per endpoint and UCX worker
  // Of messages a peer has not taken yet; with more its endpoint is ended.
  std::uint64_t max_queued_bytes = 64u << 20;
  // An accepted peer that sent no valid message for so long is closed.
  std::int64_t hello_timeout_ns = 10 * kNanosPerSecond;
  // How long queued messages may take to leave a closed endpoint.
  std::int64_t close_timeout_ns = 2 * kNanosPerSecond;
  // For tests. Asked for the n-th registration of memory (from 1), and again when its key is made: true lets
  // it fail as for want of memory that may be locked.
  std::function<bool(std::uint64_t registration, bool key)> fail_registration;
};

// Makes the transport. Loads UCX on the first call, so that processes which do without it do not have it:
// UNAVAILABLE names what is missing, UNIMPLEMENTED says that this build was made without it. UCX's log lines
// go to ours, at level debug; its signal handlers are not installed.
//
// Addresses are "host:port" or "[host]:port". connect() waits for the peer's kernel; a peer that is none of
// ours or does not say hello within the time is reported by on_closed. Paths are not mapped: can_map() is
// false. Reads are reported in any order.
//
// The destructor sends what is queued (bounded), ends reads without reporting them, and does not return
// before UCX has let go of their memory. Exported memory outlives it.
Result<std::unique_ptr<Transport>> make_ucx_transport(UcxOptions options);

// What was found, for diagnosis: "UCX 1.13.1, /usr/lib/x86_64-linux-gnu/libucp.so.0". Loads it.
Result<std::string> describe_ucx();

}  // namespace shardpull
