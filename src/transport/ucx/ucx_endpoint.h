// UcxEndpoint: what the ucx transport keeps of one connection, and the pieces of work UCX does for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "transport/regions.h"
#include "transport/ucx/ucx_frame.h"
#include "transport/ucx/ucx_memory.h"
#include "transport/ucx/ucx_reads.h"

namespace shardpull {

// The receiver's key of the connection, the message's order, then a header of 64 bytes.
inline constexpr std::size_t kUcxHeaderBytes = 2 * sizeof(std::uint64_t) + kUcxFrameBytes;

// One active message as it arrived.
struct UcxIncoming {
  EndpointId endpoint = 0;
  std::uint64_t order = 0;
  std::array<std::byte, kHotHeaderBytes> header{};
  std::vector<std::byte> data;
};

// A read that a peer asked for, or a part of it.
struct UcxServe {
  std::uint64_t read = 0;
  std::shared_ptr<const UcxBlock> block;
  std::uint64_t offset = 0;              // of the read in the block
  std::uint64_t bytes = 0;               // of the read, where the part ends
  std::uint64_t sent = 0;                // of the read, where the rest of the part begins
  std::optional<std::size_t> lane = {};  // that sends it
};

struct UcxOperation;

// Confined to the progress thread.
struct UcxEndpoint {
  enum class State {
    kOpen,       // carries messages
    kLingering,  // closed by us: waits for the peer to have taken everything
    kEnding,     // UCX lets go of it; then its reads are reported, then its end if `report`
  };

  UcxEndpoint(EndpointId number, std::string name, bool was_accepted)
      : id(number), accepted(was_accepted), peer(std::move(name)), regions(peer) {}

  const EndpointId id;
  const bool accepted;
  std::string peer;                  // for messages: "10.0.0.7:5000", and its name once it told
  UniqueFd socket;                   // carries the hellos, then only tells that the peer lives
  std::vector<std::byte> greeting;   // received of the peer's hello, and its data
  ucp_ep_h handle = nullptr;         // none before the hellos
  std::uint64_t own_key = 0;         // what the peer puts before its messages
  std::uint64_t peer_key = 0;        // what it wants before ours
  std::deque<UcxOperation*> unsent;  // messages for when there is a handle
  State state = State::kOpen;

  Incarnation incarnation = 0;  // the peer's, from its hello; 0 before
  std::uint64_t next_out = 0, next_in = 0;
  std::map<std::uint64_t, UcxIncoming> early;  // arrived before their turn
  std::uint64_t early_bytes = 0;
  std::uint64_t queued_bytes = 0;  // of messages UCX has not passed on
  std::uint64_t operations = 0;    // UCX is busy with; they may touch memory

  PeerRegions<UcxRemoteRegion> regions;  // what the peer granted
  struct Granted {
    std::uint32_t generation = 0;
    std::weak_ptr<const UcxBlock> block;
  };
  std::unordered_map<std::uint32_t, Granted> granted;  // what it was granted, by region

  std::uint64_t reads = 0;             // not reported yet
  std::deque<std::uint64_t> fetching;  // reads to fetch, in order
  std::uint32_t gets = 0;              // under way
  std::deque<UcxServe> serving;        // reads to send, in order; those with a lane are the first
  // Under way, by UCX worker: as many as both sides have, none before the hellos.
  std::vector<std::uint32_t> fragments;
  bool pumped_later = false;  // it is listed to send or fetch more

  bool report = false;  // kEnding: whether on_closed is called
  Status why;
  std::size_t closing = 0;       // kEnding: UCX workers that have not closed it
  bool let_go = false;           // kEnding: all have
  std::int64_t deadline_ns = 0;  // kOpen: to have said hello; kLingering, kEnding: when to stop waiting
};

class UcxTransport;
class UcxLane;

// Something UCX was asked to do and will report. Holds what must live until then. Of one thread at a time:
// the progress thread's, or of the lane it was given to.
struct UcxOperation {
  enum class Kind { kSend, kFragment, kReceive, kGet, kClose };

  UcxTransport* transport = nullptr;
  UcxLane* lane = nullptr;  // that has it, or had it
  void* request = nullptr;  // UCX's, while it is under way
  EndpointId endpoint = 0;
  Kind kind = Kind::kSend;
  std::uint64_t bytes = 0;
  std::array<std::byte, kUcxHeaderBytes> header{};
  std::vector<std::byte> data;
  // kFragment: of which read of the peer's, out of what memory, on which UCX worker.
  std::uint64_t read = 0;
  std::shared_ptr<const UcxBlock> block;
  std::size_t lane_number = 0;
  UcxReads::Part part;  // kReceive, kGet
};

}  // namespace shardpull
