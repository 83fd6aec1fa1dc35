// What a process of a fleet learns from the environment it was started in: torchrun's and Slurm's variables.
// What the command line says comes first.
//
//            of rank and size          of the rendezvous (none when --fleet-dir is given)
//   1.                                 SHARDPULL_RENDEZVOUS, HOST or HOST:PORT
//   2.       RANK, WORLD_SIZE          MASTER_ADDR; the port after MASTER_PORT, where torch itself listens
//   3.       SLURM_PROCID, SLURM_NTASKS  the first host of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "shardpull/status.h"

namespace shardpull::cli {

inline constexpr std::uint16_t kDefaultRendezvousPort = 29610;  // of a rendezvous without one

using Environment = std::function<std::optional<std::string>(const char* name)>;
Environment process_environment();

struct RankOf {
  std::uint32_t rank = 0;
  std::optional<std::uint32_t> size;  // of the job
  std::string source;                 // "RANK and WORLD_SIZE", for messages
};
// This process's place in its job, or nothing where no launcher said one. Refused, naming the variable: what
// is no number, or a rank that is not below the size.
Result<std::optional<RankOf>> rank_from(const Environment& environment);

// "HOST:PORT" for the rendezvous of a fleet, or nothing. Refused, naming the variable.
Result<std::optional<std::string>> rendezvous_from(const Environment& environment);

// A rendezvous as people write it, with its port: "node7" -> "node7:29610", "::1" and "[::1]" ->
// "[::1]:29610". A bare IPv6 address is never split: its last group is no port. Refused, naming `what`: what
// is no host and port.
Result<std::string> complete_rendezvous(const std::string& text, const std::string& what);

// The first host of a Slurm node list: "gpu[003-007,9],login1" -> "gpu003".
std::string first_host(const std::string& node_list);

}  // namespace shardpull::cli
