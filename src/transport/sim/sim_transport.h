// The simulated transport: several transports of one process, joined by a network of random, seeded delays.
//
// Endpoints behave as shm's do: messages of one endpoint arrive in the order they were sent, those of
// different endpoints in any order; every message travels as encoded bytes; reads take time and copy piece by
// piece, so that memory which is written while it is read shows. Time is a Clock that is handed in: on a
// FakeClock a simulator runs any number of transports in one thread (progress(0, sink) never waits); on the
// SystemClock each transport may have its progress thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "transport/transport.h"

namespace shardpull {

struct SimNetOptions {
  std::uint64_t seed = 0;
  std::int64_t min_delay_ns = 5 * kNanosPerMicro;  // of a message, a connection, the start of a read
  std::int64_t max_delay_ns = 500 * kNanosPerMicro;
  std::uint64_t piece_bytes = 4096;                 // a read copies this much at a time
  std::int64_t max_piece_ns = 50 * kNanosPerMicro;  // between two pieces
};

// The network. Thread-safe. Transports keep what they need of it alive.
class SimNet {
 public:
  // `clock` must outlive the network and its transports.
  SimNet(const Clock& clock, const SimNetOptions& options);
  ~SimNet();

  // A transport on this network. Its listener's address is "sim:" and `name`, which must be its alone.
  // Headers with another token close their endpoint; `token` and `incarnation` are filled in where a sent
  // header has 0.
  //
  // Its destructor closes its endpoints; reads in progress are given up without a report. Memory it exported
  // is filled with kFreedByte when it is freed: reading it afterwards is a fault that must show.
  std::unique_ptr<Transport> open(std::string name, FleetToken token, Incarnation incarnation);
  static constexpr std::byte kFreedByte{0xDB};

  // Breaks the connections between the transports of these two names: both report their end, with the reads
  // over them, and of what is under way some may be lost.
  void cut(const std::string& one, const std::string& other);
  // What the transport has sent or been sent and is under way, and what follows, arrives at `until_ns` or
  // later, in order.
  void hold(const std::string& name, std::int64_t until_ns);

  // When the next transport has something to do; nothing when none has. For simulators.
  std::optional<std::int64_t> next_due_ns() const;

 private:
  friend class SimTransport;
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shardpull
