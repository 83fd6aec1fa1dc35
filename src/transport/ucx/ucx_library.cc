#include "transport/ucx/ucx_library.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <ucs/debug/log_def.h>

#include "base/log.h"

namespace shardpull {
namespace {

// UCX reports much as an error that is none to us: a peer that was killed, a stranger at the door. What
// matters comes back as a status.
ucs_log_func_rc_t take_log_line(const char*, unsigned, const char*, ucs_log_level_t,
                                const ucs_log_component_config_t*, const char* format, va_list arguments) {
  if (log_enabled(LogLevel::kDebug)) {
    std::array<char, 512> line;
    const int size = std::vsnprintf(line.data(), line.size(), format, arguments);
    if (size > 0) {
      log_line(LogLevel::kDebug,
               fmt::format("UCX: {}", std::string_view(line.data(), std::min(static_cast<std::size_t>(size),
                                                                             line.size() - 1))));
    }
  }
  return UCS_LOG_FUNC_RC_STOP;
}

Status unusable(StatusCode code, std::string message) {
  return Status(code, std::move(message), {.reason = Reason::kHost, .fault = Fault::kHost});
}

// Loads both libraries, and puts the handlers of all signals back as they were: libucs sets its own from its
// constructor.
std::pair<void*, void*> open_quietly() {
  std::vector<std::pair<int, struct sigaction>> before;
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action{};
    if (sigaction(number, nullptr, &action) == 0) before.emplace_back(number, action);
  }
  void* const ucs = dlopen("libucs.so.0", RTLD_NOW | RTLD_LOCAL);
  void* const ucp = ucs != nullptr ? dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL) : nullptr;
  for (const auto& [number, action] : before) sigaction(number, &action, nullptr);
  return {ucs, ucp};
}

Result<const UcxLibrary*> load() {
  const auto [ucs, ucp] = open_quietly();
  if (ucs == nullptr || ucp == nullptr) {
    return unusable(
        StatusCode::kUnavailable,
        fmt::format(
            "UCX cannot be loaded: {}; install it (Debian: apt-get install libucx0), or say where it is with "
            "LD_LIBRARY_PATH",
            dlerror()));
  }
  auto* const library = new UcxLibrary;
  std::string missing;
#define SHARDPULL_RESOLVE(from, name)                                            \
  library->name = reinterpret_cast<decltype(library->name)>(dlsym(from, #name)); \
  if (library->name == nullptr) missing += " " #name;
#define SHARDPULL_FROM_UCP(name) SHARDPULL_RESOLVE(ucp, name)
#define SHARDPULL_FROM_UCS(name) SHARDPULL_RESOLVE(ucs, name)
  SHARDPULL_UCP_FUNCTIONS(SHARDPULL_FROM_UCP)
  SHARDPULL_UCS_FUNCTIONS(SHARDPULL_FROM_UCS)
  using PushHandler = void (*)(ucs_log_func_t);
  if (const auto push = reinterpret_cast<PushHandler>(dlsym(ucs, "ucs_log_push_handler")); push != nullptr) {
    push(take_log_line);
  }
  Dl_info where{};
  const char* path = "libucp.so.0";
  if (library->ucp_get_version != nullptr &&
      dladdr(reinterpret_cast<void*>(library->ucp_get_version), &where) != 0 && where.dli_fname != nullptr) {
    path = where.dli_fname;
  }
  unsigned major = 0, minor = 0, release = 0;
  if (library->ucp_get_version != nullptr) library->ucp_get_version(&major, &minor, &release);
  library->description = fmt::format("UCX {}.{}.{}, {}", major, minor, release, path);
  if (Status usable = check_ucx_version(major, minor, release, path, missing); !usable.ok()) {
    delete library;
    return usable;
  }
  return library;
}

}  // namespace

Status check_ucx_version(unsigned major, unsigned minor, unsigned release, const std::string& path,
                         const std::string& missing) {
  const bool newer_major = major > UCP_API_MAJOR;
  if (missing.empty() && !newer_major && UCP_VERSION(major, minor) >= UCP_API_VERSION) return {};
  return unusable(
      StatusCode::kFailedPrecondition,
      fmt::format("UCX {}.{}.{}, {} cannot be used: this was built with {}.{} and takes that or a newer "
                  "{}.x{}{}; point LD_LIBRARY_PATH at one",
                  major, minor, release, path, UCP_API_MAJOR, UCP_API_MINOR, UCP_API_MAJOR,
                  missing.empty() ? "" : "; it lacks", missing));
}

Result<const UcxLibrary*> load_ucx() {
  static const Result<const UcxLibrary*>* const loaded = new Result<const UcxLibrary*>(load());
  return *loaded;
}

}  // namespace shardpull
