// The transport of one host: memory is shared by sealed memfds, messages travel over unix sockets.
//
// An endpoint is a unix stream socket between two processes of one user. On it travel hot messages (hot_wire.h) and, between
// them, two messages of this backend alone, 64 bytes each:
//
//    0 u32 magic "SPSM"   6 u8 kind      8 u64 token         24 u32 region       32 u64 bytes
//    4 u16 wire version   7 u8 0        16 u64 incarnation   28 u32 generation   40 zeros
//
//   grant   the sender's region may be read from now on; its memory file travels with it (SCM_RIGHTS). The receiver maps it,
//           read-only and prefaulted, before it looks at the next message.
//   retire  the owner freed the region. The receiver forgets it; mappings that were handed out stay readable.
//
// What arrives is believed only after checks: the peer runs as our user (SO_PEERCRED), and every frame carries the fleet's
// token and the incarnation of the first one. Anything else closes the endpoint, is logged once per peer, and disturbs nothing else.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "transport/transport.h"

namespace shardpull {

struct ShmOptions {
  std::string directory;                         // holds the listening socket; this user's alone (mode 700)
  FleetToken token = 0;
  Incarnation incarnation = 0;                   // this process's
  std::string self_name;                         // "worker-3": names the socket file; letters, digits, '-', '_', '.'
  std::uint64_t max_queued_bytes = 64u << 20;    // of messages a peer has not taken yet; with more its endpoint is ended
  std::int64_t hello_timeout_ns = 10 * kNanosPerSecond;  // an accepted peer that sent no valid message for so long is closed
  std::int64_t close_timeout_ns = 2 * kNanosPerSecond;   // how long queued messages may take to leave a closed endpoint
};

// Makes the transport and starts its copying thread. Large reads run there, one after the other; everything else happens on
// the progress thread. Reads are reported in any order. `token`, `incarnation` and, where they are 0, those of sent headers are filled in.
//
// The destructor sends what is queued (within a second), removes the socket file, ends reads between two steps without
// reporting them, and joins the thread. Exported memory and mappings that were handed out outlive it.
//
// Fails when an option is missing, or when the directory is not this user's alone.
Result<std::unique_ptr<Transport>> make_shm_transport(ShmOptions options);

}  // namespace shardpull
