// `shardpull generate`: a checkpoint of a known shape.
#include <algorithm>
#include <cstdio>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/generate.h"
#include "cli/commands.h"
#include "cli/launcher_channel.h"
#include "cli/progress.h"

namespace shardpull::cli {
namespace {

Status generate(const GenerateArguments& arguments, LauncherChannel& launcher) {
  SHARDPULL_ASSIGN_OR_RETURN(const ModelShape shape, shape_config(arguments.shape, arguments.overrides));
  const SystemClock& clock = SystemClock::instance();
  const std::int64_t begin = clock.now_ns();
  std::int64_t told = 0;
  Progress progress(launcher.attached());
  GenerateOptions options;
  options.progress = [&](std::uint64_t done, std::uint64_t total) {
    const std::int64_t now = clock.now_ns();
    if (now - told < 50 * kNanosPerMilli) return;
    told = now;
    launcher.send({{"event", "generated"}, {"bytes", done}, {"total", total}});
    progress.update("generating",
                    static_cast<double>(done) / static_cast<double>(std::max<std::uint64_t>(total, 1)),
                    format_rate(done, now - begin));
  };
  SHARDPULL_RETURN_IF_ERROR(shardpull::generate(arguments.directory, shape, options));
  progress.clear();
  if (!launcher.attached()) {
    std::fprintf(stdout, "%s: %zu tensors, %s\n", arguments.directory.c_str(), shape.tensors.size(),
                 format_bytes(shape.total_bytes).c_str());
  }
  return {};
}

}  // namespace

int run_generate(const GenerateArguments& arguments) {
  LauncherChannel launcher(arguments.launcher_fd);
  const Status status = generate(arguments, launcher);
  if (status.ok()) return kExitDone;
  if (launcher.attached()) {
    launcher.send_error(status);
  } else {
    std::fprintf(stderr, "error: %s\n", status.message().c_str());
  }
  return status.code() == StatusCode::kInvalidArgument ? kExitUsage : kExitFailed;
}

}  // namespace shardpull::cli
