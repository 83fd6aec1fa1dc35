// Who is who in a fleet: members, incarnations, the fleet token and the versions peers compare.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace shardpull {

inline constexpr std::uint16_t kWireVersion = 1;      // hot header, control messages, plan encoding
inline constexpr const char* kSoftwareVersion = "0.1.0";

enum class Role : std::uint8_t { kTrainer = 1, kWorker = 2 };

// A process of the fleet: trainer rank R or inference worker C. Trainer 0 is the sender.
struct Member {
  Role role = Role::kTrainer;
  std::uint32_t id = 0;
  friend auto operator<=>(const Member&, const Member&) = default;
};
inline constexpr Member kSender{Role::kTrainer, 0};
std::string to_string(const Member& member);  // "trainer 0", "worker 3"

// A process's life: random, never 0. A restarted peer at the same address has another one.
using Incarnation = std::uint64_t;
// Random 64 bits per fleet, never 0, handed down by file, environment or descriptor, never on a command line.
using FleetToken = std::uint64_t;

// 64 bits from the operating system, never 0.
std::uint64_t random_nonzero_u64();

}  // namespace shardpull
