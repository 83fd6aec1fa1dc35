#include "cli/command_line.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardpull::cli {
namespace {

using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

Command parse(const std::vector<std::string>& words, const Variables& variables) {
  return parse_command_line(words, [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::optional<std::string>() : found->second;
  });
}

template <typename T>
T parsed(const std::vector<std::string>& words, const Variables& variables = {}) {
  Command command = parse(words, variables);
  if (const auto* notice = std::get_if<Notice>(&command)) ADD_FAILURE() << notice->text;
  return std::holds_alternative<T>(command) ? std::get<T>(std::move(command)) : T();
}

Notice notice(const std::vector<std::string>& words, const Variables& variables = {}) {
  const Command command = parse(words, variables);
  const auto* found = std::get_if<Notice>(&command);
  if (found == nullptr) ADD_FAILURE() << "not refused";
  return found != nullptr ? *found : Notice{};
}

// Goal: what the launcher hands to a process is what it was given, for every setting.
TEST(CommandLine, FleetFlagsSurviveTheWayToAnotherProcess) {
  FleetArguments fleet;
  fleet.trainer.layout = {.pp = 3, .ep = 2, .fsdp = 4};
  fleet.trainer.publish = PublishMode::kGather;
  fleet.chunk_split = 3;
  fleet.pull_split = 5;
  fleet.names = {"model.layers.0.*", "lm_head.weight"};
  fleet.inference.tp = 4;
  fleet.inference.pp = 2;
  fleet.inference.dp = 2;
  fleet.inference.ep = 8;
  fleet.inference.replicas = 5;
  fleet.lookahead = 0;
  fleet.ring_depth = 7;
  fleet.max_chunk_bytes = (3ull << 20) + 1;
  fleet.export_pack_limit_bytes = 0;
  fleet.path = PathChoice::kDirect;
  fleet.apply = Apply::kStaged;
  fleet.transport = TransportKind::kTcp;
  fleet.ucx_workers = 3;
  fleet.integrity = Integrity::kFull;
  fleet.connect_timeout_ns = 1'500'000'000;
  fleet.stall_timeout_ns = 2'000'001'000;
  fleet.heartbeat_ns = 20'000'000;
  fleet.dead_after_ns = 700'000'000;
  VersionArguments versions;
  versions.syncs = 9;
  versions.mutate = false;
  versions.seed = 1ull << 40;

  std::vector<std::string> words = {"trainer", "--rank", "2", "--model", "m", "--fleet-dir", "d"};
  for (const auto& flags : {to_flags(fleet), to_flags(versions)}) {
    words.insert(words.end(), flags.begin(), flags.end());
  }
  const auto read = parsed<TrainerArguments>(words);
  EXPECT_EQ(read.fleet.trainer, fleet.trainer);
  EXPECT_EQ(to_string(read.fleet.inference), "tp=4,pp=2,dp=2,ep=8,replicas=5");
  EXPECT_EQ(to_flags(read.fleet), to_flags(fleet));
  EXPECT_EQ(read.fleet.max_chunk_bytes, fleet.max_chunk_bytes);
  EXPECT_EQ(read.fleet.export_pack_limit_bytes, 0u);
  EXPECT_EQ(read.fleet.path, PathChoice::kDirect);
  EXPECT_EQ(read.fleet.apply, Apply::kStaged);
  EXPECT_EQ(read.fleet.transport, TransportKind::kTcp);
  EXPECT_EQ(read.fleet.ucx_workers, 3u);
  EXPECT_EQ(read.fleet.integrity, Integrity::kFull);
  EXPECT_EQ(read.fleet.chunk_split, 3u);
  EXPECT_EQ(read.fleet.pull_split, 5u);
  EXPECT_EQ(read.fleet.names, fleet.names);
  EXPECT_EQ(read.fleet.connect_timeout_ns, fleet.connect_timeout_ns);
  EXPECT_EQ(read.fleet.stall_timeout_ns, fleet.stall_timeout_ns);
  EXPECT_EQ(to_flags(read.versions), to_flags(versions));
  EXPECT_EQ(read.rank, 2u);
}

TEST(CommandLine, TransportFollowsTheRendezvous) {
  const std::vector<std::string> worker = {"worker", "--id", "0", "--model", "m"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), worker.begin(), worker.end());
    return more;
  };
  EXPECT_EQ(parsed<WorkerArguments>(with({"--fleet-dir", "d"})).fleet.transport, TransportKind::kShm);
  const auto far = parsed<WorkerArguments>(with({"--rendezvous", "::1"}));
  EXPECT_EQ(far.fleet.transport, TransportKind::kTcp);
  EXPECT_EQ(far.process.rendezvous, "[::1]:29610");
  EXPECT_EQ(parsed<WorkerArguments>(with({"--rendezvous", "a:1", "--transport", "ucx"})).fleet.transport,
            TransportKind::kUcx);
  EXPECT_THAT(notice(with({})).text, HasSubstr("expected --rendezvous HOST:PORT, or --fleet-dir DIR"));
  EXPECT_THAT(notice(with({"--rendezvous", "[::1"})).text, HasSubstr("--rendezvous"));
  EXPECT_EQ(notice(with({"--fleet-dir", ""})).exit_code, kExitUsage);
}

TEST(CommandLine, IllegalPairsOfTransportAndPathAreNamed) {
  for (const char* const transport : {"cma", "tcp", "ucx"}) {
    const Notice refused =
        notice({"sync", "--shape", "qwen3-8b:tiny", "--transport", transport, "--path", "mapped"});
    EXPECT_EQ(refused.exit_code, kExitUsage);
    EXPECT_THAT(refused.text, HasSubstr(std::string("path mapped with transport ") + transport));
    for (const char* const path : {"auto", "packed", "direct"})
      parsed<SyncArguments>({"sync", "--shape", "qwen3-8b:tiny", "--transport", transport, "--path", path});
  }
  EXPECT_THAT(notice({"sync", "--shape", "qwen3-8b:tiny", "--transport", "cma", "--ucx-workers", "2"}).text,
              HasSubstr("--ucx-workers: transport cma has none"));
  for (const char* const path : {"auto", "packed", "mapped", "direct"})
    parsed<SyncArguments>({"sync", "--shape", "qwen3-8b:tiny", "--transport", "shm", "--path", path});
  EXPECT_EQ(notice({"plan", "--shape", "qwen3-8b:tiny", "--link", "1GB/s", "--path", "mapped"}).exit_code,
            kExitUsage);
}

TEST(CommandLine, TorchrunAndSlurmSayWhichProcessThisIs) {
  const std::vector<std::string> trainer = {"trainer", "--trainer", "pp=2", "--model", "m"};
  const Variables torchrun = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29500"}};
  const auto by_torchrun = parsed<TrainerArguments>(trainer, torchrun);
  EXPECT_EQ(by_torchrun.rank, 1u);
  EXPECT_EQ(by_torchrun.process.rendezvous, "node7:29501");
  const Variables slurm = {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_NODELIST", "gpu[4-5]"}};
  EXPECT_EQ(parsed<TrainerArguments>(trainer, slurm).process.rendezvous, "gpu4:29610");
  EXPECT_THAT(notice({"trainer", "--model", "m", "--fleet-dir", "d"}).text, HasSubstr("--rank is required"));
  // A job of another size than the layout.
  EXPECT_THAT(notice({"trainer", "--trainer", "pp=3", "--model", "m"}, torchrun).text,
              HasSubstr("RANK and WORLD_SIZE"));
  // What the command line says comes first.
  std::vector<std::string> words = trainer;
  for (const char* const word : {"--rank", "0", "--rendezvous", "here:7"}) words.emplace_back(word);
  const auto given = parsed<TrainerArguments>(words, torchrun);
  EXPECT_EQ(given.rank, 0u);
  EXPECT_EQ(given.process.rendezvous, "here:7");
  EXPECT_EQ(parsed<WorkerArguments>({"worker", "--inference", "tp=2", "--model", "m"}, torchrun).id, 1u);
}

TEST(CommandLine, LayoutFileReplacesTheWords) {
  FleetArguments fleet;
  fleet.trainer.file = "ranks.json";
  std::vector<std::string> words = {"trainer", "--rank", "7", "--model", "m", "--fleet-dir", "d"};
  const auto flags = to_flags(fleet);
  words.insert(words.end(), flags.begin(), flags.end());
  EXPECT_EQ(parsed<TrainerArguments>(words).fleet.trainer, fleet.trainer);
  EXPECT_EQ(notice({"sync", "--model", "m", "--trainer", "pp=2", "--trainer-layout", "f"}).exit_code,
            kExitUsage);
}

TEST(CommandLine, DefaultsAreThoseOfTheLibrary) {
  const auto sync = parsed<SyncArguments>({"sync", "--shape", "qwen3-8b:tiny"});
  EXPECT_EQ(sync.fleet.ring_depth, 2u);
  EXPECT_EQ(sync.fleet.lookahead, 1u);
  EXPECT_EQ(sync.fleet.max_chunk_bytes, WorkerOptions{}.max_chunk_bytes);
  EXPECT_EQ(sync.versions.syncs, 1u);
  EXPECT_FALSE(sync.verify);
  EXPECT_EQ(sync.model.shape->key, "qwen3-8b");
  EXPECT_FALSE(sync.model.overrides.tied);
}

TEST(CommandLine, VersionsStartAtTheSeed) {
  const auto sync = parsed<SyncArguments>({"sync", "--model", "m", "--syncs", "3", "--seed", "5"});
  EXPECT_EQ(sync.versions.version_of(1), 5u);
  EXPECT_EQ(sync.versions.version_of(3), 7u);
  const auto still = parsed<SyncArguments>({"sync", "--model", "m", "--no-mutate", "--seed", "5"});
  EXPECT_EQ(still.versions.version_of(3), 0u);
}

TEST(CommandLine, ShapeOverrides) {
  const auto sync = parsed<SyncArguments>(
      {"sync", "--shape", "qwen3-8b:tiny", "--vocab=100", "--tied", "--layers", "3", "--kv-heads", "1"});
  EXPECT_EQ(sync.model.overrides.vocab, 100);
  EXPECT_EQ(sync.model.overrides.layers, 3);
  EXPECT_EQ(sync.model.overrides.kv_heads, 1);
  EXPECT_EQ(sync.model.overrides.tied, true);
}

TEST(CommandLine, LinksToPredictFor) {
  const std::vector<std::string> base = {"plan", "--shape", "qwen3-8b:full"};
  EXPECT_EQ(parsed<PlanArguments>(base).link, 0u);
  auto words = base;
  for (const char* word : {"--link", "50GB/s", "--worker-link", "400MiB/s", "--pull-latency", "5us"})
    words.emplace_back(word);
  const auto plan = parsed<PlanArguments>(words);
  EXPECT_EQ(plan.link, 50'000'000'000u);
  EXPECT_EQ(plan.trainer_link, 0u);
  EXPECT_EQ(plan.worker_link, 400u << 20);
  EXPECT_EQ(plan.pull_latency_ns, 5'000);
  EXPECT_THAT(notice({"plan", "--shape", "qwen3-8b:full", "--link", "50GB"}).text,
              HasSubstr("--link: \"50GB\" is no speed such as 50GB/s"));
  EXPECT_EQ(notice({"plan", "--shape", "qwen3-8b:full", "--link", "0B/s"}).exit_code, kExitUsage);
  EXPECT_THAT(notice({"plan", "--shape", "qwen3-8b:full", "--worker-link", "1GB/s"}).text,
              HasSubstr("--link"));
}

TEST(CommandLine, Recordings) {
  const std::vector<std::string> base = {"plan", "--shape", "qwen3-8b:full"};
  const auto with = [](std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  EXPECT_EQ(parsed<PlanArguments>(with(base, {"--save-recording", "r-{worker}"})).save_recording,
            "r-{worker}");
  EXPECT_EQ(parsed<PlanArguments>(with(base, {"--recording", "a", "b"})).recordings,
            (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(notice(with(base, {"--recording", "a", "--save-recording", "b"})).exit_code, kExitUsage);
  EXPECT_EQ(notice(with(base, {"--recording", ""})).exit_code, kExitUsage);
  EXPECT_EQ(parsed<SyncArguments>({"sync", "--model", "m", "--recording", "a", "b", "--verify"}).recordings,
            (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(
      parsed<WorkerArguments>({"worker", "--id", "0", "--model", "m", "--fleet-dir", "d", "--recording", "a"})
          .recordings,
      std::vector<std::string>{"a"});
  const std::vector<std::string> trainer = {"trainer", "--rank", "0", "--model", "m", "--fleet-dir", "d"};
  EXPECT_FALSE(parsed<TrainerArguments>(trainer).any_architecture);
  EXPECT_TRUE(parsed<TrainerArguments>(with(trainer, {"--any-architecture"})).any_architecture);
}

TEST(CommandLine, RefusalsNameTheFlagAndTheAcceptedForm) {
  const std::vector<std::string> base = {"sync", "--shape", "qwen3-8b:tiny"};
  const auto with = [&](std::string flag, std::string value) {
    auto words = base;
    words.push_back(std::move(flag));
    words.push_back(std::move(value));
    return notice(words);
  };
  EXPECT_EQ(with("--syncs", "2.5").exit_code, kExitUsage);
  EXPECT_THAT(with("--syncs", "2.5").text, HasSubstr("--syncs: \"2.5\" is not a whole number"));
  EXPECT_THAT(with("--max-chunk-bytes", "64M").text, HasSubstr("such as 64MiB"));
  EXPECT_THAT(with("--stall-timeout", "1us").text, HasSubstr("below 1ms"));
  EXPECT_THAT(with("--path", "x").text, HasSubstr("auto|packed|mapped|direct"));
  EXPECT_THAT(with("--apply", "x").text, HasSubstr("inplace|staged"));
  EXPECT_THAT(with("--transport", "rdma").text, HasSubstr("auto|shm|cma|tcp|ucx"));
  EXPECT_THAT(with("--syncz", "3").text, HasSubstr("did you mean --syncs?"));
  EXPECT_THAT(notice({"sync"}).text, HasSubstr("exactly one of --model DIR and --shape"));
  EXPECT_THAT(notice({"plna"}).text, HasSubstr("did you mean plan?"));
}

TEST(CommandLine, HelpAndVersionAreNoErrors) {
  EXPECT_EQ(notice({"--help"}).exit_code, kExitDone);
  EXPECT_EQ(notice({"sync", "--help"}).exit_code, kExitDone);
  EXPECT_THAT(notice({"sync", "--help"}).text, HasSubstr("--max-chunk-bytes"));
  EXPECT_THAT(notice({"worker", "--help"}).text, ::testing::Not(HasSubstr("launcher-fd")));
  EXPECT_EQ(notice({"--version"}).exit_code, kExitDone);
  EXPECT_EQ(notice({}).exit_code, kExitUsage);
}

// Goal: the fleets of the workloads are those that they are documented to be, and settings of one kind of
// simulation do not pass silently in the other.
TEST(CommandLine, SimulateTakesSeedsOrAFleetAtItsSize) {
  const auto f2 =
      parsed<SimulateArguments>({"simulate", "--scale", "F2", "--ring-depth", "4", "--nic-gbps", "200"});
  ASSERT_TRUE(f2.scale.has_value());
  EXPECT_EQ(to_string(f2.scale->fleet.trainer), "pp=8,ep=64");
  EXPECT_EQ(workers(f2.scale->fleet.inference), 10'240u);
  EXPECT_EQ(f2.scale->model.shape->key, "kimi-k2");
  EXPECT_EQ(f2.scale->fleet.ring_depth, 4u);
  EXPECT_EQ(f2.scale->fleet.transport, TransportKind::kTcp);
  EXPECT_EQ(f2.scale->links.trainer_host_bytes_per_s, 25'000'000'000u);
  EXPECT_EQ(f2.scale->links.worker_host_bytes_per_s, 25'000'000'000u);
  const auto own =
      parsed<SimulateArguments>({"simulate", "--scale", "own", "--shape", "qwen3-8b:full", "--trainer",
                                 "pp=2", "--inference", "tp=4,replicas=3", "--worker-nic-gbps", "100",
                                 "--latency", "0us", "--source-speed", "3GB/s", "--transport", "ucx"});
  EXPECT_EQ(workers(own.scale->fleet.inference), 12u);
  EXPECT_EQ(own.scale->links.trainer_host_bytes_per_s, 50'000'000'000u);
  EXPECT_EQ(own.scale->links.worker_host_bytes_per_s, 12'500'000'000u);
  EXPECT_EQ(own.scale->links.latency_ns, 0);
  EXPECT_EQ(own.scale->links.source_bytes_per_s, 3'000'000'000u);
  EXPECT_FALSE(parsed<SimulateArguments>({"simulate", "--seed", "7", "--trace"}).scale.has_value());
  for (const char* several : {"--seeds", "--first-seed"}) {
    const Notice refused = notice({"simulate", several, "5", "--seed", "7"});
    EXPECT_EQ(refused.exit_code, kExitUsage);
    EXPECT_THAT(refused.text, HasSubstr(std::string(several) + " excludes --seed\n"));
  }
  EXPECT_THAT(notice({"simulate", "--scale", "F3"}).text, HasSubstr("expected F1|F2|own"));
  EXPECT_THAT(notice({"simulate", "--scale", "F1", "--seed", "1"}).text,
              HasSubstr("--seed: not with --scale"));
  EXPECT_THAT(notice({"simulate", "--nic-gbps", "100"}).text, HasSubstr("--nic-gbps: needs --scale"));
  EXPECT_THAT(notice({"simulate", "--lookahead", "2"}).text, HasSubstr("--lookahead: needs --scale"));
  EXPECT_THAT(notice({"simulate", "--scale", "F1", "--trainer", "pp=2"}).text,
              HasSubstr("--trainer: F1 says it"));
  EXPECT_THAT(notice({"simulate", "--scale", "own"}).text,
              HasSubstr("exactly one of --model DIR and --shape"));
  EXPECT_THAT(notice({"simulate", "--scale", "F1", "--transport", "shm"}).text, HasSubstr("of one host"));
  EXPECT_THAT(notice({"simulate", "--scale", "F1", "--nic-gbps", "0"}).text, HasSubstr("--nic-gbps"));
}

}  // namespace
}  // namespace shardpull::cli
