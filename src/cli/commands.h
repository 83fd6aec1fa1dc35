// The subcommands of `shardpull`: what each takes, and the function that does it.
//
// Exit codes: 0 done (for a verified sync: exact), 1 failed or not exact, 2 wrong use.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/shapes.h"
#include "cli/layouts.h"
#include "cli/trainer_side.h"
#include "shardpull/worker.h"
#include "sim/scale.h"

namespace shardpull::cli {

inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

// A checkpoint directory or a shape of the catalogue; exactly one.
struct ModelArguments {
  std::string directory;
  std::optional<ShapeSpec> shape;
  ShapeOverrides overrides;  // of the shape
};

// What all processes of a fleet must agree on. Every process is started with the same.
struct FleetArguments {
  TrainerSide trainer;
  InferenceLayout inference;
  std::uint32_t lookahead = 1;
  std::uint32_t ring_depth = 2;
  std::uint64_t max_chunk_bytes = 64ull << 20;
  std::uint64_t export_pack_limit_bytes = 64ull << 20;
  std::uint32_t chunk_split = 1, pull_split = 1;
  PathChoice path = PathChoice::kAuto;
  Apply apply = Apply::kInplace;
  // kAuto until the command line is read: then tcp with a rendezvous, else shm.
  TransportKind transport = TransportKind::kAuto;
  std::uint32_t ucx_workers = 1;
  Integrity integrity = Integrity::kWire;
  std::vector<std::string> names;  // glob patterns: what the syncs after the first send; empty: everything
  std::int64_t connect_timeout_ns = 60'000'000'000;
  std::int64_t stall_timeout_ns = 300'000'000'000;
  std::int64_t heartbeat_ns = 500'000'000, dead_after_ns = 5'000'000'000;
};

// Which bytes each sync sends.
struct VersionArguments {
  std::uint32_t syncs = 1;
  bool mutate = true;
  std::uint64_t seed = 0;
  // Sync i of 1, 2, ... sends version seed + i - 1; without mutation always 0, the checkpoint.
  std::uint64_t version_of(std::uint32_t sync) const { return mutate ? seed + sync - 1 : 0; }
};

// How a process finds its fleet.
struct ProcessArguments {
  std::string fleet_directory;  // may be empty with a rendezvous and a transport between hosts
  std::string rendezvous;       // "HOST:PORT", or empty
  std::string interfaces;       // "eth0,eth1", or empty
  bool insecure_listen = false;
  std::string token_file;  // empty: the descriptor, else the environment variable SHARDPULL_TOKEN
  int token_fd = -1;       // an open descriptor to read the token from, or -1
  int launcher_fd = -1;    // a socket of the launcher that started this process; -1: started by hand
};

struct GenerateArguments {
  ShapeSpec shape;
  ShapeOverrides overrides;
  std::string directory;
  int launcher_fd = -1;
};

struct InspectArguments {
  std::string path;
  bool json = false;
};

struct PlanArguments {
  ModelArguments model;
  FleetArguments fleet;
  std::vector<std::string> withhold;
  std::vector<std::string> recordings;  // instead of bakes (cli/recordings.h); none: bake
  std::string save_recording;           // a file name to write the bakes to, or empty
  std::string explain;                  // a checkpoint name, or empty
  bool summary = false;
  bool json = false;
  // Link speeds in bytes per second, to predict the time of a sync; 0: no prediction, or as `link`.
  std::uint64_t link = 0, trainer_link = 0, worker_link = 0;
  std::int64_t pull_latency_ns = 20'000;
};

struct SyncArguments {
  ModelArguments model;
  FleetArguments fleet;
  VersionArguments versions;
  std::vector<std::string> recordings;  // as of plan
  std::vector<std::string> withhold;
  bool verify = false;
  std::string dump;   // a directory, or empty
  std::string trace;  // a file, or empty
  bool json = false;
};

struct TrainerArguments {
  std::string model;
  FleetArguments fleet;
  VersionArguments versions;
  ProcessArguments process;
  std::vector<std::string> withhold;
  std::uint32_t rank = 0;
  bool verify = false;            // the sender waits for the workers' verdicts and reports them
  bool any_architecture = false;  // the checkpoint is not compared with what a family implies
  std::string trace;              // a file, or empty
  OnConsumerLoss on_consumer_loss = OnConsumerLoss::kFail;  // kContinue: not with names
};

struct WorkerArguments {
  std::string model;
  FleetArguments fleet;
  ProcessArguments process;
  std::uint32_t id = 0;
  std::vector<std::string> recordings;  // as of plan, or this worker's alone
  bool enable_eplb = false;
  bool verify = false;
  std::string dump;
  std::string trace;  // a file, or empty
};

struct DoctorArguments {
  std::string rendezvous;       // "HOST:PORT", or empty
  std::string interfaces;       // "eth0,eth1", or empty
  std::string fleet_directory;  // or empty
  std::uint32_t fleet_ranks = 8, fleet_workers = 8;
  TransportKind transport = TransportKind::kAuto;  // kAuto: all
  std::uint32_t ucx_workers = 1;
  bool speed = true;
  bool json = false;
};

// One sync of a fleet at its real size, under a model of its links.
struct ScaleArguments {
  std::string workload;  // "F1" or "F2", whose model and fleet these are then, or "own"
  ModelArguments model;
  FleetArguments fleet;
  sim::ScaleModel links;
  bool json = false;
};

struct SimulateArguments {
  std::optional<ScaleArguments> scale;  // this, and none of the others
  std::uint64_t seeds = 200;
  std::uint64_t first_seed = 1;
  std::optional<std::int64_t> seed;  // one alone, with all that it draws
  bool trace = false;                 // of that one: a line for each step
  std::uint32_t threads = 0;          // 0: as many as there are cores
};

int run_generate(const GenerateArguments& arguments);
int run_inspect(const InspectArguments& arguments);
int run_plan(const PlanArguments& arguments);
int run_sync(const SyncArguments& arguments);
int run_trainer(const TrainerArguments& arguments);
int run_worker(const WorkerArguments& arguments);
int run_doctor(const DoctorArguments& arguments);
int run_simulate(const SimulateArguments& arguments);
int run_scale(const ScaleArguments& arguments);

}  // namespace shardpull::cli
