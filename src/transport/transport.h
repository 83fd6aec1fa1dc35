// Transport: the hot channel of one process: endpoints that carry hot messages, memory that peers can reach,
// and the one-sided reads and mappings of it. Backends: shm/ (same host, memfd mappings), cma/ (same host,
// reads across processes), sim/ (the simulator). docs/ARCHITECTURE.md.
//
// Threads: confined to the process's progress thread, except where a method says thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/memory_ref.h"
#include "shardpull/status.h"
#include "transport/hot_wire.h"

namespace shardpull {

using EndpointId = std::uint32_t;  // never reused in a transport's life; 0 is none
using ReadToken = std::uint64_t;   // the caller's, below 2^63

// Takes the bytes of a read as they arrive, instead of memory.
class ReadTarget {
 public:
  virtual ~ReadTarget() = default;
  // Bytes [offset, offset + bytes.size()) of the read; they are gone when it returns. Each byte of a read
  // comes once before its on_read_done(OK); in any order, from threads of the transport, from several of them
  // at once.
  virtual void take(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
};

// One window of a vectored read, and where it goes: `remote.bytes` bytes at `local`, or to `target`, only
// where Transport::can_read_to().
struct ReadPart {
  RemoteRef remote;
  std::byte* local = nullptr;
  std::shared_ptr<ReadTarget> target = {};
};

// What progress() reports. Called on the progress thread, from within progress() only.
class TransportSink {
 public:
  virtual ~TransportSink() = default;
  // A peer connected to our listener. It has not said hello yet.
  virtual void on_accepted(EndpointId endpoint) = 0;
  virtual void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) = 0;
  // The endpoint is gone: closed by the peer, broken, or it sent bytes that are not ours (the status says
  // which). No callback for this endpoint follows; its reads have been reported.
  virtual void on_closed(EndpointId endpoint, const Status& why) = 0;
  virtual void on_read_done(ReadToken token, const Status& status) = 0;
};

struct TransportCounters {
  std::uint64_t payload_bytes_read = 0;  // by reads and, reported by add_mapped_bytes, copies out of mappings
  std::uint64_t header_bytes = 0;        // hot headers and payloads, both directions
  std::uint64_t messages = 0;
  std::uint64_t endpoints = 0;  // open now
  std::uint64_t regions = 0;    // own regions alive
  std::uint64_t region_bytes = 0;
  std::uint64_t mapped_bytes = 0;  // peers' regions mapped now
};

// Memory of this process that peers may reach. Freed by its destructor; peers that mapped it keep their
// mapping readable.
class ExportedMemory {
 public:
  virtual ~ExportedMemory() = default;
  const MemoryRef& ref() const { return ref_; }

 protected:
  MemoryRef ref_;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string name() const = 0;  // "shm"
  virtual bool can_map() const = 0;      // path mapped is legal

  // Allocates page-aligned, prefaulted, zero-filled memory. Thread-safe. Out of memory names the size and
  // `what`.
  virtual Result<std::shared_ptr<ExportedMemory>> allocate(std::uint64_t bytes, std::string_view what) = 0;

  // Lets peers reach memory that this transport did not allocate: [data, data + bytes), readable, of this
  // process. It is not written and not owned: the caller keeps it in place until the last owner of the result
  // has let go, and does so before the memory ends. From then on no read of it succeeds. The same extent
  // adopted again while it is alive is the same object; another extent at the same address is another region
  // or generation. `what` names it in errors. Thread-safe. UNIMPLEMENTED when the backend can only reach what
  // it allocated; an error names the first bytes that cannot be read.
  virtual Result<std::shared_ptr<ExportedMemory>> adopt(const std::byte* data, std::uint64_t bytes,
                                                        std::string_view what);

  // Starts listening; returns the address peers connect to.
  virtual Result<std::string> listen() = 0;
  // Connects; does not block longer than `timeout_ns`. The endpoint is usable at once.
  virtual Result<EndpointId> connect(const std::string& address, std::int64_t timeout_ns) = 0;
  // Queues a message; never blocks. `header.length` and `header.sum` are filled in here. UNAVAILABLE when the
  // endpoint is gone; RESOURCE_EXHAUSTED when the peer does not take what is queued: the endpoint has ended
  // then, and on_closed follows.
  virtual Status send(EndpointId endpoint, HotHeader header, const std::byte* payload,
                      std::size_t length) = 0;
  // Lets the peer behind `endpoint` reach `memory` from the next message on. Idempotent.
  virtual Status grant(EndpointId endpoint, const std::shared_ptr<ExportedMemory>& memory) = 0;
  // Closes without a callback. Messages already queued are sent first, bounded.
  virtual void close(EndpointId endpoint) = 0;

  // Reads a window of the peer's memory into `local`; on_read_done(token) follows from progress(). `local`
  // must stay valid until then. Checked against what was granted: unknown region, stale generation and
  // out-of-range windows fail by name.
  virtual void read(EndpointId endpoint, const RemoteRef& remote, std::byte* local, ReadToken token) = 0;
  // The same for one or more windows at once, with one on_read_done for all of them, which has the first
  // error. A backend with vectored reads refuses them all when one may not be read, and brings parts that
  // follow one another on both sides as one. After an error the destinations are undefined. Done by read()
  // unless a backend knows better.
  virtual void read_parts(EndpointId endpoint, std::vector<ReadPart> parts, ReadToken token);
  // Whether read_to() is implemented: what arrives passes through memory of the transport, from where a
  // target takes it with one copy less than out of a slot.
  virtual bool can_read_to() const { return false; }
  // As read(), with a target in place of memory; it is kept until on_read_done(token). Only where
  // can_read_to().
  virtual void read_to(EndpointId endpoint, const RemoteRef& remote, std::shared_ptr<ReadTarget> target,
                       ReadToken token);
  // The first byte of a window of the peer's memory, readable in place while the endpoint (or the returned
  // owner) lives.
  struct Mapping {
    const std::byte* data = nullptr;
    std::shared_ptr<const void> owner;
  };
  virtual Result<Mapping> map(EndpointId endpoint, const RemoteRef& remote) = 0;
  virtual void add_mapped_bytes(std::uint64_t bytes) = 0;  // thread-safe

  // Waits up to `timeout_ns` for something to do, does it, reports to `sink`. Returns after one round.
  virtual Status progress(std::int64_t timeout_ns, TransportSink& sink) = 0;
  // Makes a progress() in progress, or the next one, return at once. Thread-safe.
  virtual void wake() = 0;

  virtual TransportCounters counters() const = 0;  // thread-safe

 protected:
  // How a backend that leaves read_parts() as it is reports the end of every read.
  void report_read(TransportSink& sink, ReadToken token, const Status& status);

 private:
  struct PartialRead {
    ReadToken token = 0;   // of the whole
    std::size_t left = 0;  // parts
    Status status;
  };
  std::unordered_map<ReadToken, std::shared_ptr<PartialRead>>
      part_reads_;  // by the part's token, 2^63 or above
  ReadToken last_part_ = 0;
};

}  // namespace shardpull
