#include "cli/command_line.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <limits>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "base/edit_distance.h"
#include "base/identity.h"
#include "base/interfaces.h"
#include "base/limits.h"
#include "base/units.h"
#include "plan/path.h"
#include "runtime/hot_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull::cli {
namespace {

constexpr std::int64_t kMaxSyncs = 1'000'000'000;

// ---- options with the library's own parsers ---------------------------------------------------------------

// The value of a Result, or the parse error that shows its message.
const CLI::Validator not_empty(
    [](std::string& text) { return text.empty() ? std::string("must not be empty") : std::string(); }, "",
    "not empty");

template <typename T>
T value_or_throw(Result<T> result) {
  if (!result.ok()) throw CLI::ValidationError(result.status().message());
  return std::move(result).value();
}

// An option whose text is read by `parse`. `type` is what help shows in place of the value.
CLI::Option* add_text(CLI::App& app, const std::string& flag, const std::string& help,
                      const std::string& type, std::function<void(const std::string&)> parse,
                      const std::string& standard = "") {
  const std::string shown = standard.empty() ? help : fmt::format("{} [default: {}]", help, standard);
  CLI::Option* const option = app.add_option_function<std::string>(flag, std::move(parse), shown);
  option->type_name(type);
  return option;
}

template <typename T>
CLI::Option* add_integer(CLI::App& app, const std::string& flag, T& target, std::int64_t low,
                         std::int64_t high, const std::string& help) {
  const std::string name = flag;
  return add_text(
      app, flag, help, "N",
      [&target, name, low, high](const std::string& text) {
        target = static_cast<T>(value_or_throw(parse_integer(text, name, low, high)));
      },
      fmt::format("{}", target));
}

CLI::Option* add_optional_integer(CLI::App& app, const std::string& flag, std::optional<std::int64_t>& target,
                                  std::int64_t low, std::int64_t high, const std::string& help) {
  return add_text(app, flag, help, "N", [&target, flag, low, high](const std::string& text) {
    target = value_or_throw(parse_integer(text, flag, low, high));
  });
}

std::string exact_bytes(std::uint64_t bytes) {
  for (const auto& [name, factor] :
       {std::pair{"GiB", 1ull << 30}, {"MiB", 1ull << 20}, {"KiB", 1ull << 10}}) {
    if (bytes != 0 && bytes % factor == 0) return fmt::format("{}{}", bytes / factor, name);
  }
  return fmt::format("{}", bytes);
}

CLI::Option* add_bytes(CLI::App& app, const std::string& flag, std::uint64_t& target,
                       const std::string& help) {
  return add_text(
      app, flag, help, "BYTES",
      [&target, flag](const std::string& text) { target = value_or_throw(parse_bytes(text, flag)); },
      exact_bytes(target));
}

CLI::Option* add_speed(CLI::App& app, const std::string& flag, std::uint64_t& target,
                       const std::string& help) {
  return add_text(app, flag, help, "BYTES/s", [&target, flag](const std::string& text) {
    if (!text.ends_with("/s")) {
      throw CLI::ValidationError(fmt::format("{}: \"{}\" is no speed such as 50GB/s", flag, text));
    }
    target = value_or_throw(parse_bytes(std::string_view(text).substr(0, text.size() - 2), flag));
    if (target == 0) throw CLI::ValidationError(fmt::format("{}: a speed must be above 0", flag));
  });
}

std::string exact_duration(std::int64_t ns) {
  for (const auto& [name, factor] : {std::pair{"s", 1'000'000'000ll}, {"ms", 1'000'000ll}, {"us", 1'000ll}}) {
    if (ns % factor == 0) return fmt::format("{}{}", ns / factor, name);
  }
  return fmt::format("{}ns", ns);
}

CLI::Option* add_duration(CLI::App& app, const std::string& flag, std::int64_t& target,
                          const std::string& help) {
  return add_text(
      app, flag, help, "TIME",
      [&target, flag](const std::string& text) {
        const std::int64_t ns = value_or_throw(parse_duration_ns(text, flag));
        if (ns < 1'000'000) throw CLI::ValidationError(fmt::format("{}: \"{}\" is below 1ms", flag, text));
        target = ns;
      },
      exact_duration(target));
}

// One of a closed list of words.
template <typename T, std::size_t N>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, T& target,
                        const std::array<std::pair<const char*, T>, N>& words, const std::string& help) {
  std::string type;
  std::string standard;
  for (const auto& [word, value] : words) {
    type += (type.empty() ? "" : "|") + std::string(word);
    if (value == target && standard.empty()) standard = word;
  }
  return add_text(
      app, flag, help, type,
      [&target, flag, words, type](const std::string& text) {
        for (const auto& [word, value] : words) {
          if (text != word) continue;
          target = value;
          return;
        }
        throw CLI::ValidationError(fmt::format("{}: \"{}\" is unknown; expected {}", flag, text, type));
      },
      standard);
}

// ---- groups of options ------------------------------------------------------------------------------------

constexpr std::array<std::pair<const char*, PathChoice>, 4> kPaths = {{{"auto", PathChoice::kAuto},
                                                                       {"packed", PathChoice::kPacked},
                                                                       {"mapped", PathChoice::kMapped},
                                                                       {"direct", PathChoice::kDirect}}};
constexpr std::array<std::pair<const char*, Apply>, 2> kApplies = {{{"inplace", Apply::kInplace}, {"staged", Apply::kStaged}}};
constexpr std::array<std::pair<const char*, TransportKind>, 5> kTransports = {{{"auto", TransportKind::kAuto},
                                                                               {"shm", TransportKind::kShm},
                                                                               {"cma", TransportKind::kCma},
                                                                               {"tcp", TransportKind::kTcp},
                                                                               {"ucx", TransportKind::kUcx}}};

constexpr std::array<std::pair<const char*, Integrity>, 3> kIntegrity = {
    {{"off", Integrity::kOff}, {"wire", Integrity::kWire}, {"full", Integrity::kFull}}};
constexpr std::array<std::pair<const char*, OnConsumerLoss>, 2> kOnConsumerLoss = {
    {{"fail", OnConsumerLoss::kFail}, {"continue", OnConsumerLoss::kContinue}}};
constexpr std::array<std::pair<const char*, PublishMode>, 3> kPublish = {
    {{"auto", PublishMode::kAuto}, {"gather", PublishMode::kGather}, {"resident", PublishMode::kResident}}};

std::string_view word_of(PublishMode publish) {
  for (const auto& [word, value] : kPublish) {
    if (value == publish) return word;
  }
  return "auto";
}

void add_shape(CLI::App& app, std::optional<ShapeSpec>& target) {
  add_text(app, "--shape", "A shape of the catalogue, such as qwen3-8b:tiny", "KEY:tiny|scaled|full",
           [&target](const std::string& text) {
             auto spec = parse_shape_spec(text);
             if (!spec.ok()) throw CLI::ValidationError("--shape: " + spec.status().message());
             target = *spec;
           });
}

void add_overrides(CLI::App& app, ShapeOverrides& overrides) {
  const std::string group = "Changes to a shape";
  add_optional_integer(app, "--vocab", overrides.vocab, 1, (std::int64_t{1} << 31) - 1, "Vocabulary size")
      ->group(group);
  add_optional_integer(app, "--layers", overrides.layers, 1, 10'000, "Number of layers")->group(group);
  add_optional_integer(app, "--kv-heads", overrides.kv_heads, 1, std::numeric_limits<std::int32_t>::max(),
                       "Key/value heads; must divide the attention heads")
      ->group(group);
  CLI::Option* const tied = app.add_flag_function(
      "--tied", [&overrides](std::int64_t) { overrides.tied = true; }, "The head shares the embedding");
  CLI::Option* const untied = app.add_flag_function(
      "--untied", [&overrides](std::int64_t) { overrides.tied = false; }, "The head has its own tensor");
  tied->excludes(untied)->group(group);
  untied->group(group);
}

void add_model(CLI::App& app, ModelArguments& model) {
  app.add_option("--model", model.directory, "A Hugging Face directory: config.json and safetensors files")
      ->type_name("DIR");
  add_shape(app, model.shape);
  add_overrides(app, model.overrides);
}

void check_model(const CLI::App& app, const ModelArguments& model) {
  if (model.directory.empty() == !model.shape) {
    throw CLI::ValidationError(
        fmt::format("{}: expected exactly one of --model DIR and --shape KEY:SIZE", app.get_name()));
  }
  if (model.shape) return;
  for (const char* const flag : {"--vocab", "--layers", "--kv-heads", "--tied", "--untied"}) {
    if (app.count(flag) != 0) {
      throw CLI::ValidationError(fmt::format("{}: changes a shape; it needs --shape", flag));
    }
  }
}

void check_has_bytes(const ShapeSpec& shape) {
  if (shape.size != ShapeSize::kFull) return;
  throw CLI::ValidationError(
      "--shape: a full shape has names and sizes but no bytes; use tiny or scaled, or `shardpull plan`");
}

void add_fleet(CLI::App& app, FleetArguments& fleet) {
  CLI::Option* const words = add_text(
      app, "--trainer", "How the trainer's ranks hold the model: pp, ep, fsdp", "WORD=N,..",
      [&fleet](const std::string& text) {
        fleet.trainer.layout = value_or_throw(parse_trainer_layout(text));
      },
      to_string(fleet.trainer));
  app.add_option("--trainer-layout", fleet.trainer.file, "A layout file that says it instead, rank by rank")
      ->type_name("FILE")
      ->check(not_empty)
      ->excludes(words);
  add_choice(app, "--publish", fleet.trainer.publish, kPublish,
             "Ranks gather whole tensors group by group, or serve what they hold in place; auto = in place "
             "where they hold pieces");
  add_text(
      app, "--inference", "How the workers hold the model: tp, pp, dp, ep, replicas", "WORD=N,..",
      [&fleet](const std::string& text) { fleet.inference = value_or_throw(parse_inference_layout(text)); },
      to_string(fleet.inference));
  const std::string group = "Transfer";
  add_integer(app, "--ring-depth", fleet.ring_depth, 1, kMaxRingDepth, "Slots and pulls in flight")
      ->group(group);
  add_integer(app, "--lookahead", fleet.lookahead, 0, 1'000'000,
              "Groups a rank holds beyond the one being pulled")
      ->group(group);
  add_bytes(app, "--max-chunk-bytes", fleet.max_chunk_bytes,
            "No chunk is larger unless a single row is; 0 = no limit")
      ->group(group);
  add_bytes(app, "--export-pack-limit", fleet.export_pack_limit_bytes,
            "Tensors up to this size are packed into export buffers, larger ones are served where they are")
      ->group(group);
  add_integer(app, "--chunk-split", fleet.chunk_split, 1, 1'000'000,
              "Parts of about equal bytes that a group's chunk is cut into")
      ->group(group);
  add_integer(app, "--pull-split", fleet.pull_split, 1, kMaxRanks,
              "Ranks that one chunk is pulled from at once, where several hold it")
      ->group(group);
  add_choice(app, "--path", fleet.path, kPaths,
             "How bytes travel; auto = mapped with shm, else direct where that is worth it and packed")
      ->group(group);
  add_choice(app, "--apply", fleet.apply, kApplies,
             "Where workers let a sync land: in the parameters, or beside them, in as much memory again, so that "
             "the old version stays until the commit and when a sync fails")
      ->group(group);
  add_choice(app, "--transport", fleet.transport, kTransports,
             "What carries them: shm and cma on one host, tcp and ucx between hosts; auto = shm, or tcp with "
             "--rendezvous")
      ->group(group);
  add_integer(app, "--ucx-workers", fleet.ucx_workers, 1, kMaxUcxWorkers,
              "Streams to each peer over tcp and ucx, each with a thread of its own")
      ->group(group);
  add_choice(app, "--integrity", fleet.integrity, kIntegrity,
             "What is summed and compared before it is used: nothing; what crosses a transport other than shm; "
             "every byte, and that the trainer does not write what it is serving")
      ->group(group);
  app.add_option("--names", fleet.names,
                 "The syncs after the first send only the tensors that match this pattern (*, ? and [..]), "
                 "all names of a module or none; may be "
                 "repeated")
      ->type_name("GLOB")
      ->check(not_empty)
      ->group(group);
  add_duration(app, "--connect-timeout", fleet.connect_timeout_ns, "How long a process waits for the others")
      ->group(group);
  add_duration(app, "--stall-timeout", fleet.stall_timeout_ns, "A sync without progress for this long fails")
      ->group(group);
  add_duration(app, "--heartbeat", fleet.heartbeat_ns, "How often processes show each other that they live")
      ->group(group);
  add_duration(app, "--dead-after", fleet.dead_after_ns,
               "A process that is silent for this long, two heartbeats at least, is taken for dead")
      ->group(group);
}

void add_versions(CLI::App& app, VersionArguments& versions) {
  const std::string group = "Syncs";
  add_integer(app, "--syncs", versions.syncs, 1, kMaxSyncs, "Number of syncs")->group(group);
  app.add_flag_function(
         "--no-mutate", [&versions](std::int64_t) { versions.mutate = false; },
         "Send the checkpoint in every sync instead of changing all bytes between syncs")
      ->group(group);
  add_integer(app, "--seed", versions.seed, 0, std::numeric_limits<std::int64_t>::max() / 2,
              "The first sync sends this version; 0 is the checkpoint itself")
      ->group(group);
}

void add_process(CLI::App& app, ProcessArguments& process) {
  app.add_option("--fleet-dir", process.fleet_directory,
                 "Owner-only directory in which the processes of one host meet; the same for all")
      ->type_name("DIR")
      ->check(not_empty);
  add_text(app, "--rendezvous",
           "Where trainer 0 listens and the others meet it, from any host; [HOST]:PORT for IPv6. Without a port: "
           "29610. Without --rendezvous and --fleet-dir: SHARDPULL_RENDEZVOUS, else torchrun's MASTER_ADDR with "
           "the port after MASTER_PORT, else the first host of Slurm's node list",
           "HOST:PORT", [&process](const std::string& text) { process.rendezvous = text; });
  add_text(app, "--interface", "Network interfaces to use, where several lead to the others", "NAME,..",
           [&process](const std::string& text) {
             value_or_throw(parse_interface_list(text, "--interface"));
             process.interfaces = text;
           });
  app.add_flag("--insecure-listen", process.insecure_listen,
               "Listen where other hosts reach this one: neither the token nor the weights are encrypted");
  CLI::Option* const file =
      app.add_option("--token-file", process.token_file,
                     "File with the fleet's token, 16 hexadecimal digits; else the environment variable "
                     "SHARDPULL_TOKEN")
          ->type_name("FILE");
  add_integer(app, "--token-fd", process.token_fd, 0, 1 << 20, "")
      ->description("An open descriptor to read the token from")
      ->excludes(file);
}

void add_launcher_fd(CLI::App& app, int& fd) {
  add_integer(app, "--launcher-fd", fd, -1, 1 << 20, "")->group("");  // hidden: for the launcher
}

void add_trace(CLI::App& app, std::string& file, const char* of_what) {
  app.add_option("--trace", file,
                 fmt::format("Write when what happened in each sync {} here, for ui.perfetto.dev", of_what))
      ->check(not_empty)
      ->type_name("FILE");
}

void add_withhold(CLI::App& app, std::vector<std::string>& names) {
  app.add_option("--withhold", names, "No rank holds this tensor (to see what happens then); may be repeated")
      ->type_name("NAME")
      ->group("Faults");
}

void add_recordings(CLI::App& app, std::vector<std::string>& files) {
  app.add_option(
         "--recording", files,
         "Replay these recordings instead of baking: one file per worker of a replica, in the order of "
         "their ids, or one name with {worker} in it")
      ->type_name("FILE..")
      ->check(not_empty);
}

constexpr std::int64_t kMaxSeed = std::int64_t{1} << 62;

// Of each host's network card, in Gbit/s. `standard`: what is shown as its default, if anything.
CLI::Option* add_gigabits(CLI::App& app, const std::string& flag, std::uint64_t& target,
                          const std::string& help, const std::string& standard = "") {
  return add_text(
      app, flag, help, "N",
      [&target, flag](const std::string& text) {
        target = static_cast<std::uint64_t>(value_or_throw(parse_integer(text, flag, 1, 1'000'000))) *
                 kBytesPerGigabit;
      },
      standard);
}

// Any duration from 0 on.
CLI::Option* add_short_time(CLI::App& app, const std::string& flag, std::int64_t& target,
                            const std::string& help) {
  return add_text(
      app, flag, help, "TIME",
      [&target, flag](const std::string& text) { target = value_or_throw(parse_duration_ns(text, flag)); },
      exact_duration(target));
}

// Every speed but 0 is shown as its default.
CLI::Option* add_known_speed(CLI::App& app, const std::string& flag, std::uint64_t& target,
                             const std::string& help) {
  return add_speed(app, flag, target, fmt::format("{} [default: {}GB/s]", help, target / 1'000'000'000));
}

// The flags of fleets from seeds, and of a fleet at its size: of these two only one.
struct SimulateFlags {
  ScaleArguments scale;
  std::vector<const CLI::Option*> seeds, sizes;
};

void add_simulate(CLI::App& app, SimulateArguments& simulate, SimulateFlags& flags) {
  add_integer(app, "--seeds", simulate.seeds, 1, 1'000'000'000, "How many fleets to run");
  add_integer(app, "--first-seed", simulate.first_seed, 0, kMaxSeed, "The first one's seed; the others follow");
  add_optional_integer(app, "--seed", simulate.seed, 0, kMaxSeed,
                       "Run this one alone, and show what it draws and its trace's hash");
  for (const char* several : {"--seeds", "--first-seed"})
    app.get_option("--seed")->excludes(app.get_option(several));
  app.add_flag("--trace", simulate.trace, "With --seed: a line for each step, on standard error");
  add_integer(app, "--threads", simulate.threads, 0, 1024, "Fleets at once; 0 = one a core");
  for (const char* flag : {"--seeds", "--first-seed", "--seed", "--trace", "--threads"})
    flags.seeds.push_back(app.get_option(flag));

  ScaleArguments& scale = flags.scale;
  const std::vector<const CLI::Option*> before = std::as_const(app).get_options();
  const std::string group = "One sync of a fleet at its size (instead of seeds)";
  add_text(
      app, "--scale",
      "Run the planner and all machines of this fleet under a model of its links, without bytes, and show "
      "how long a sync takes, what crosses which link, control messages and memory. F1: kimi-k2, trainer "
      "pp=8,ep=32, inference tp=32,ep=32,replicas=4; F2: trainer pp=8,ep=64, replicas=320; own: what "
      "--shape or --model, --trainer and --inference say. Each host has one link; a read takes two latencies "
      "and its bytes at the smaller of its equal shares of both hosts' links; a control message takes its "
      "turn at the sender's hub. Not modelled: init's time, hooks, heartbeats, losses, other traffic, limits "
      "of the network between hosts",
      "F1|F2|own",
      [&scale](const std::string& text) {
        if (text != "F1" && text != "F2" && text != "own")
          throw CLI::ValidationError(fmt::format("--scale: \"{}\" is unknown; expected F1|F2|own", text));
        scale.workload = text;
      })
      ->group(group);
  const auto of_scale = [&](CLI::Option* option) { option->group(group); };
  of_scale(add_gigabits(app, "--nic-gbps", scale.links.trainer_host_bytes_per_s,
                        "Speed of a host's network link, Gbit/s each way",
                        fmt::format("{}", scale.links.trainer_host_bytes_per_s / kBytesPerGigabit)));
  of_scale(add_gigabits(app, "--worker-nic-gbps", scale.links.worker_host_bytes_per_s,
                        "Into a worker's host, where it differs"));
  of_scale(add_integer(app, "--ranks-per-host", scale.links.ranks_per_host, 1, kMaxRanks,
                       "Trainer ranks on a host"));
  of_scale(add_integer(app, "--workers-per-host", scale.links.workers_per_host, 1, kMaxRanks,
                       "Workers on a host"));
  of_scale(add_short_time(app, "--latency", scale.links.latency_ns, "Of a message, one way"));
  of_scale(add_known_speed(app, "--copy-speed", scale.links.copy_bytes_per_s,
                           "Of one thread that packs, scatters or fills export buffers"));
  of_scale(add_known_speed(app, "--sum-speed", scale.links.sum_bytes_per_s, "Of one thread that sums"));
  of_scale(add_speed(app, "--source-speed", scale.links.source_bytes_per_s,
                     "Of a rank's gathers; without it they take no time"));
  of_scale(add_short_time(app, "--hub-message", scale.links.hub_message_ns,
                          "What the sender's hub takes to receive or to send one message"));
  app.add_flag("--json", scale.json, "One JSON object on standard output")->group(group);
  add_model(app, scale.model);
  add_fleet(app, scale.fleet);
  for (const CLI::Option* option : std::as_const(app).get_options()) {
    const bool of_seeds = std::find(before.begin(), before.end(), option) != before.end();
    if (!of_seeds && option->get_name() != "--scale") flags.sizes.push_back(option);
  }
}

void decide_transport(FleetArguments& fleet, TransportKind standard);

// What --scale leaves open, or nothing where it is not given.
void decide_scale(const CLI::App& app, SimulateFlags& flags, SimulateArguments& simulate) {
  ScaleArguments& scale = flags.scale;
  const bool given = !scale.workload.empty();
  for (const CLI::Option* option : given ? flags.seeds : flags.sizes) {
    if (option->count() == 0) continue;
    throw CLI::ValidationError(option->get_name() +
                               (given ? ": not with --scale" : ": needs --scale F1, F2 or own"));
  }
  if (!given) return;
  if (scale.workload == "own") {
    check_model(app, scale.model);
  } else {
    for (const char* flag : {"--model", "--shape", "--trainer", "--trainer-layout", "--inference"}) {
      if (app.count(flag) != 0)
        throw CLI::ValidationError(fmt::format("{}: {} says it; give --scale own", flag, scale.workload));
    }
    const bool first = scale.workload == "F1";
    scale.model.shape = ShapeSpec{"kimi-k2", ShapeSize::kFull};
    scale.fleet.trainer.layout = value_or_throw(parse_trainer_layout(first ? "pp=8,ep=32" : "pp=8,ep=64"));
    scale.fleet.inference =
        value_or_throw(parse_inference_layout(first ? "tp=32,ep=32,replicas=4" : "tp=32,ep=32,replicas=320"));
  }
  if (app.count("--worker-nic-gbps") == 0)
    scale.links.worker_host_bytes_per_s = scale.links.trainer_host_bytes_per_s;
  if (!scale.fleet.names.empty())
    throw CLI::ValidationError("--names: a simulated sync at this size moves them all");
  decide_transport(scale.fleet, TransportKind::kTcp);
  if (scale.fleet.transport != TransportKind::kTcp && scale.fleet.transport != TransportKind::kUcx) {
    throw CLI::ValidationError(
        fmt::format("--transport: {} is of one host; the links between hosts carry tcp or ucx",
                    to_string(scale.fleet.transport)));
  }
  simulate.scale = scale;
}

void add_doctor(CLI::App& app, DoctorArguments& doctor) {
  add_text(app, "--rendezvous", "Where a fleet would meet: is it this host's and free, or reached from here?",
           "HOST:PORT", [&doctor](const std::string& text) {
             doctor.rendezvous = value_or_throw(complete_rendezvous(text, "--rendezvous"));
           });
  add_text(app, "--interface", "The network interfaces that a fleet would use", "NAME,..",
           [&doctor](const std::string& text) {
             value_or_throw(parse_interface_list(text, "--interface"));
             doctor.interfaces = text;
           });
  app.add_option("--fleet-dir,--directory", doctor.fleet_directory,
                 "Where the processes of one host would meet; else TMPDIR is tried")
      ->type_name("DIR")
      ->check(not_empty);
  add_text(
      app, "--fleet", "The size of the fleet: trainer ranks and inference workers", "RANKSxWORKERS",
      [&doctor](const std::string& text) {
        const std::size_t x = std::min(text.find('x'), text.size());
        const auto count = [&](std::string_view part) {
          const auto number = parse_integer(part, "--fleet", 1, kMaxRanks);
          if (!number.ok()) {
            throw CLI::ValidationError(
                fmt::format("--fleet: \"{}\" is no size such as 8x64, each side 1 to {}", text, kMaxRanks));
          }
          return static_cast<std::uint32_t>(*number);
        };
        doctor.fleet_ranks = count(std::string_view(text).substr(0, x));
        doctor.fleet_workers = count(std::string_view(text).substr(std::min(x + 1, text.size())));
      },
      fmt::format("{}x{}", doctor.fleet_ranks, doctor.fleet_workers));
  add_choice(app, "--transport", doctor.transport, kTransports,
             "Look only at what this one needs; auto = all of them");
  add_integer(app, "--ucx-workers", doctor.ucx_workers, 1, kMaxUcxWorkers, "As of a fleet's processes");
  app.add_flag_function(
      "--no-speed", [&doctor](std::int64_t) { doctor.speed = false; }, "Do not measure the transports' speed");
  app.add_flag("--json", doctor.json, "One JSON object on standard output");
}

// ---- messages ---------------------------------------------------------------------------------------------

// The known word nearest to a mistyped one, when it is near.
std::string nearest(std::string_view word, const std::vector<std::string>& known) {
  std::string best;
  std::size_t distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : known) {
    const std::size_t d = edit_distance(word, candidate);
    if (d < distance) {
      distance = d;
      best = candidate;
    }
  }
  return best;
}

std::string unexpected(const CLI::App& app, std::string_view word) {
  std::vector<std::string> known;
  if (word.starts_with('-')) {
    for (const CLI::Option* option : app.get_options()) {
      if (option->get_group().empty()) continue;
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    }
  } else {
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
      known.push_back(command->get_name());
    }
  }
  const std::string_view bare = word.substr(0, word.find('='));
  const std::string near = nearest(bare, known);
  std::string text = fmt::format("{} {} is unknown", word.starts_with('-') ? "flag" : "argument", bare);
  if (!near.empty()) text += fmt::format("; did you mean {}?", near);
  return text;
}

// ---- what the command line leaves open --------------------------------------------------------------------

// Decides auto, and refuses what the transport cannot do.
void decide_transport(FleetArguments& fleet, TransportKind standard) {
  if (fleet.transport == TransportKind::kAuto) fleet.transport = standard;
  if (const auto illegal = illegal_pair(fleet.transport, policy_of(fleet.path))) {
    throw CLI::ValidationError("--path: " + *illegal);
  }
  if (fleet.ucx_workers != 1 && fleet.transport != TransportKind::kTcp && fleet.transport != TransportKind::kUcx) {
    throw CLI::ValidationError(
        fmt::format("--ucx-workers: transport {} has none; it is of tcp and ucx", to_string(fleet.transport)));
  }
}

TransportKind transport_at(const ProcessArguments& process) {
  return process.rendezvous.empty() ? TransportKind::kShm : TransportKind::kTcp;
}

void find_fleet(ProcessArguments& process, const Environment& environment) {
  if (!process.rendezvous.empty()) {
    process.rendezvous = value_or_throw(complete_rendezvous(process.rendezvous, "--rendezvous"));
  } else if (process.fleet_directory.empty()) {
    const auto found = value_or_throw(rendezvous_from(environment));
    if (!found) {
      throw CLI::ValidationError(
          "expected --rendezvous HOST:PORT, or --fleet-dir DIR where all processes run on one host");
    }
    process.rendezvous = *found;
  }
}

// `size`: of the fleet's side, 0 where it is not known yet.
void find_rank(const CLI::App& app, const std::string& flag, const Environment& environment, std::uint32_t size,
               std::uint32_t& rank) {
  if (app.count(flag) != 0) return;
  const auto found = value_or_throw(rank_from(environment));
  if (!found) {
    throw CLI::ValidationError(
        fmt::format("{} is required, as neither torchrun (RANK) nor Slurm (SLURM_PROCID) started this process",
                    flag));
  }
  if (size != 0 && found->size && *found->size != size) {
    throw CLI::ValidationError(fmt::format("{} of the environment tell of {} processes, the layout has {}; give {} "
                                           "to say which one this is",
                                           found->source, *found->size, size, flag));
  }
  rank = found->rank;
}

Notice wrong_use(const CLI::App& app, const std::string& message) {
  const std::string command =
      app.get_parent() == nullptr ? app.get_name() : app.get_parent()->get_name() + " " + app.get_name();
  return {kExitUsage, fmt::format("error: {}\n`{} --help` lists what is accepted\n", message, command)};
}

}  // namespace

std::vector<std::string> to_flags(const FleetArguments& fleet) {
  std::vector<std::string> flags = {fleet.trainer.file.empty() ? "--trainer" : "--trainer-layout",
                                    to_string(fleet.trainer),
                                    "--publish",
                                    std::string(word_of(fleet.trainer.publish)),
                                    "--inference",
                                    to_string(fleet.inference),
                                    "--ring-depth",
                                    fmt::format("{}", fleet.ring_depth),
                                    "--lookahead",
                                    fmt::format("{}", fleet.lookahead),
                                    "--max-chunk-bytes",
                                    exact_bytes(fleet.max_chunk_bytes),
                                    "--export-pack-limit",
                                    exact_bytes(fleet.export_pack_limit_bytes),
                                    "--chunk-split",
                                    fmt::format("{}", fleet.chunk_split),
                                    "--pull-split",
                                    fmt::format("{}", fleet.pull_split),
                                    "--path",
                                    std::string(to_string(fleet.path)),
                                    "--apply",
                                    std::string(to_string(fleet.apply)),
                                    "--transport",
                                    std::string(to_string(fleet.transport)),
                                    "--ucx-workers",
                                    fmt::format("{}", fleet.ucx_workers),
                                    "--integrity",
                                    std::string(to_string(fleet.integrity)),
                                    "--connect-timeout",
                                    exact_duration(fleet.connect_timeout_ns),
                                    "--stall-timeout",
                                    exact_duration(fleet.stall_timeout_ns),
                                    "--heartbeat",
                                    exact_duration(fleet.heartbeat_ns),
                                    "--dead-after",
                                    exact_duration(fleet.dead_after_ns)};
  for (const std::string& pattern : fleet.names) {
    flags.push_back("--names");
    flags.push_back(pattern);
  }
  return flags;
}

std::vector<std::string> to_flags(const VersionArguments& versions) {
  std::vector<std::string> flags = {"--syncs", fmt::format("{}", versions.syncs), "--seed",
                                    fmt::format("{}", versions.seed)};
  if (!versions.mutate) flags.push_back("--no-mutate");
  return flags;
}

Command parse_command_line(const std::vector<std::string>& words, const Environment& environment) {
  CLI::App app{"Moves the weights of a training fleet to an inference fleet, each worker only what it keeps.",
               "shardpull"};
  app.set_version_flag("--version", fmt::format("shardpull {}", kSoftwareVersion));
  app.require_subcommand(0, 1);
  app.get_formatter()->column_width(34);

  GenerateArguments generate;
  std::optional<ShapeSpec> generate_shape;
  CLI::App* const generate_app =
      app.add_subcommand("generate", "Write a checkpoint of a known shape with position-coded bytes");
  add_shape(*generate_app, generate_shape);
  generate_app->get_option("--shape")->required();
  generate_app->add_option("--out", generate.directory, "The directory to make")
      ->type_name("DIR")
      ->required();
  add_overrides(*generate_app, generate.overrides);
  add_launcher_fd(*generate_app, generate.launcher_fd);

  InspectArguments inspect;
  CLI::App* const inspect_app =
      app.add_subcommand("inspect", "Show what a checkpoint holds and what is wrong with it");
  inspect_app->add_option("path", inspect.path, "A Hugging Face directory or one safetensors file")
      ->type_name("DIR|FILE")
      ->required();
  inspect_app->add_flag("--json", inspect.json, "One JSON object on standard output");

  PlanArguments plan;
  CLI::App* const plan_app = app.add_subcommand("plan", "Bake and plan every worker without running a fleet");
  add_model(*plan_app, plan.model);
  add_fleet(*plan_app, plan.fleet);
  add_withhold(*plan_app, plan.withhold);
  CLI::Option* const explain =
      plan_app
          ->add_option("--explain", plan.explain, "Who serves this tensor to whom, by which path, and why")
          ->check(not_empty)
          ->type_name("NAME");
  CLI::Option* const summary =
      plan_app->add_flag("--summary", plan.summary, "Only bytes, chunks and slots per worker");
  add_recordings(*plan_app, plan.recordings);
  plan_app
      ->add_option("--save-recording", plan.save_recording,
                   "Write what the workers bake; with several workers {worker} stands for the id")
      ->type_name("FILE")
      ->check(not_empty)
      ->excludes(plan_app->get_option("--recording"));
  const std::string prediction = "Prediction";
  CLI::Option* const link = add_speed(*plan_app, "--link", plan.link,
                                      "Predict the time of a sync over links of this speed, per process")
                                ->group(prediction);
  add_speed(*plan_app, "--trainer-link", plan.trainer_link, "Speed out of a trainer rank, where it differs")
      ->group(prediction)
      ->needs(link);
  add_speed(*plan_app, "--worker-link", plan.worker_link, "Speed into a worker, where it differs")
      ->group(prediction)
      ->needs(link);
  add_text(
      *plan_app, "--pull-latency", "From a pull to its first byte", "TIME",
      [&plan](const std::string& text) {
        plan.pull_latency_ns = value_or_throw(parse_duration_ns(text, "--pull-latency"));
      },
      exact_duration(plan.pull_latency_ns))
      ->group(prediction)
      ->needs(link);
  plan_app->add_flag("--json", plan.json, "One JSON object on standard output")
      ->excludes(explain)
      ->excludes(summary);
  explain->excludes(summary);

  SyncArguments sync;
  CLI::App* const sync_app = app.add_subcommand(
      "sync", "Start a trainer fleet and an inference fleet on this host and sync weights between them");
  add_model(*sync_app, sync.model);
  add_fleet(*sync_app, sync.fleet);
  add_versions(*sync_app, sync.versions);
  add_recordings(*sync_app, sync.recordings);
  add_withhold(*sync_app, sync.withhold);
  sync_app->add_flag("--verify", sync.verify,
                     "After each sync load every worker's parameters a second time and compare all bytes");
  sync_app->add_option("--dump", sync.dump, "Write worker-<id>.safetensors here after the last sync")
      ->check(not_empty)
      ->type_name("DIR");
  add_trace(*sync_app, sync.trace, "of the fleet");
  sync_app->add_flag("--json", sync.json, "One JSON object on standard output");

  TrainerArguments trainer;
  CLI::App* const trainer_app =
      app.add_subcommand("trainer", "One trainer rank; rank 0 is the sender and drives the syncs");
  add_integer(*trainer_app, "--rank", trainer.rank, 0, kMaxRanks - 1, "")
      ->description("This process's rank; else that of torchrun (RANK) or Slurm (SLURM_PROCID)");
  trainer_app->add_option("--model", trainer.model, "The checkpoint this fleet trains")
      ->type_name("DIR")
      ->required();
  add_process(*trainer_app, trainer.process);
  add_fleet(*trainer_app, trainer.fleet);
  add_versions(*trainer_app, trainer.versions);
  trainer_app->add_flag("--verify", trainer.verify,
                        "Wait for the verdicts of workers that run with --verify");
  trainer_app->add_flag("--any-architecture", trainer.any_architecture,
                        "Do not compare the checkpoint with what its architecture implies, which nobody need "
                        "know: the workers replay recordings");
  add_choice(*trainer_app, "--on-consumer-loss", trainer.on_consumer_loss, kOnConsumerLoss,
             "When a worker is lost: the syncs fail and the fleet ends, or they go on without its replica until "
             "it is started again");
  add_withhold(*trainer_app, trainer.withhold);
  add_trace(*trainer_app, trainer.trace, "of the fleet (rank 0), or of this rank,");
  add_launcher_fd(*trainer_app, trainer.process.launcher_fd);

  WorkerArguments worker;
  CLI::App* const worker_app = app.add_subcommand("worker", "One inference worker");
  add_integer(*worker_app, "--id", worker.id, 0, kMaxRanks - 1, "")
      ->description("This worker's id over the whole fleet; else as a trainer's --rank, from its own job");
  worker_app
      ->add_option("--model", worker.model, "The checkpoint (its config.json; its tensors with --verify)")
      ->type_name("DIR")
      ->required();
  add_process(*worker_app, worker.process);
  add_fleet(*worker_app, worker.fleet);
  add_recordings(*worker_app, worker.recordings);
  worker_app->add_flag(
      "--enable-eplb", worker.enable_eplb,
      "The engine moves experts between slots at run time: refused, as a plan fixes the slot of each");
  worker_app->add_flag("--verify", worker.verify,
                       "After each sync load the parameters a second time and compare all bytes");
  worker_app->add_option("--dump", worker.dump, "Write worker-<id>.safetensors here at the end")
      ->check(not_empty)
      ->type_name("DIR");
  add_trace(*worker_app, worker.trace, "of this worker");
  add_launcher_fd(*worker_app, worker.process.launcher_fd);

  DoctorArguments doctor;
  CLI::App* const doctor_app = app.add_subcommand(
      "doctor", "Say what of this host makes a fleet slow or fail, and the command that helps");
  add_doctor(*doctor_app, doctor);
  SimulateArguments simulate;
  CLI::App* const simulate_app =
      app.add_subcommand("simulate",
                         "Run whole fleets in simulated time: small ones with everything that can go wrong, "
                         "and check every rule; or, with "
                         "--scale, one of any size under a model of its links");
  SimulateFlags simulate_flags;
  add_simulate(*simulate_app, simulate, simulate_flags);

  const auto chosen = [&]() -> const CLI::App& {
    const auto commands = app.get_subcommands();
    return commands.empty() ? app : *commands.front();
  };
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 takes them from the back
    if (generate_app->parsed()) {
      generate.shape = *generate_shape;
      check_has_bytes(generate.shape);
      return generate;
    }
    if (inspect_app->parsed()) return inspect;
    if (plan_app->parsed()) {
      check_model(*plan_app, plan.model);
      // Links are between hosts.
      decide_transport(plan.fleet, plan.link == 0 ? TransportKind::kShm : TransportKind::kTcp);
      return plan;
    }
    if (sync_app->parsed()) {
      check_model(*sync_app, sync.model);
      if (!sync.fleet.names.empty() && sync.versions.syncs == 1) {
        throw CLI::ValidationError("--names: restricts the syncs after the first; give --syncs 2 or more");
      }
      if (sync.model.shape) check_has_bytes(*sync.model.shape);
      decide_transport(sync.fleet, TransportKind::kShm);
      return sync;
    }
    if (trainer_app->parsed()) {
      find_fleet(trainer.process, environment);
      decide_transport(trainer.fleet, transport_at(trainer.process));
      if (trainer.on_consumer_loss == OnConsumerLoss::kContinue && !trainer.fleet.names.empty()) {
        throw CLI::ValidationError(
            "--on-consumer-loss continue: not with --names, as a worker that was started again needs all names");
      }
      const TrainerSide& held = trainer.fleet.trainer;
      find_rank(*trainer_app, "--rank", environment, held.file.empty() ? held.layout.ranks() : 0, trainer.rank);
      const TrainerSide& side = trainer.fleet.trainer;  // a layout file is read later
      if (side.file.empty() && trainer.rank >= side.layout.ranks()) {
        throw CLI::ValidationError(fmt::format("--rank: {} is not below the {} ranks of --trainer {}",
                                               trainer.rank, side.layout.ranks(), to_string(side)));
      }
      return trainer;
    }
    if (worker_app->parsed()) {
      find_fleet(worker.process, environment);
      decide_transport(worker.fleet, transport_at(worker.process));
      find_rank(*worker_app, "--id", environment, workers(worker.fleet.inference), worker.id);
      if (worker.id >= workers(worker.fleet.inference)) {
        throw CLI::ValidationError(fmt::format("--id: {} is not below the {} workers of --inference {}",
                                               worker.id, workers(worker.fleet.inference),
                                               to_string(worker.fleet.inference)));
      }
      return worker;
    }
    if (doctor_app->parsed()) return doctor;
    if (simulate_app->parsed()) {
      decide_scale(*simulate_app, simulate_flags, simulate);
      if (simulate.trace && !simulate.seed) throw CLI::ValidationError("--trace: of one seed alone; give --seed");
      return simulate;
    }
    return Notice{kExitUsage, app.help()};
  } catch (const CLI::CallForHelp&) {
    return Notice{kExitDone, app.help()};
  } catch (const CLI::CallForAllHelp&) {
    return Notice{kExitDone, app.help("", CLI::AppFormatMode::All)};
  } catch (const CLI::CallForVersion& version) {
    return Notice{kExitDone, std::string(version.what()) + "\n"};
  } catch (const CLI::ExtrasError&) {
    const auto extras = chosen().remaining();
    const auto& words_left = extras.empty() ? app.remaining() : extras;
    return wrong_use(
        chosen(), words_left.empty() ? "an argument is unknown" : unexpected(chosen(), words_left.front()));
  } catch (const CLI::ParseError& error) {
    return wrong_use(chosen(), error.what());
  }
}

int run(int argc, const char* const* argv) {
  const Command command = parse_command_line(std::vector<std::string>(argv + std::min(argc, 1), argv + argc),
                                             process_environment());
  struct Runner {
    int operator()(const Notice& notice) const {
      std::fputs(notice.text.c_str(), notice.exit_code == kExitDone ? stdout : stderr);
      return notice.exit_code;
    }
    int operator()(const GenerateArguments& arguments) const { return run_generate(arguments); }
    int operator()(const InspectArguments& arguments) const { return run_inspect(arguments); }
    int operator()(const PlanArguments& arguments) const { return run_plan(arguments); }
    int operator()(const SyncArguments& arguments) const { return run_sync(arguments); }
    int operator()(const TrainerArguments& arguments) const { return run_trainer(arguments); }
    int operator()(const WorkerArguments& arguments) const { return run_worker(arguments); }
    int operator()(const DoctorArguments& arguments) const { return run_doctor(arguments); }
    int operator()(const SimulateArguments& arguments) const { return run_simulate(arguments); }
  };
  // A closed standard stream must not become the descriptor of something else, and what is written to it is
  // lost.
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) == -1) (void)::open("/dev/full", O_RDWR);
  }
  int code = kExitFailed;
  try {
    code = std::visit(Runner{}, command);
  } catch (const std::exception& error) {  // no memory, or no thread
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fputs("error: standard output cannot be written\n", stderr);
    return code == kExitDone ? kExitFailed : code;
  }
  return code;
}

}  // namespace shardpull::cli
