#include "base/log.h"

#include <cstdlib>
#include <memory>
#include <string>

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "shardpull/status.h"

namespace shardpull {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::off;
}

std::string pattern_for(std::string_view identity) {
  std::string pattern = "%Y-%m-%d %H:%M:%S.%f %L [";
  for (const char c : identity) {
    pattern.push_back(c);
    if (c == '%') pattern.push_back('%');
  }
  return pattern.append("] %v");
}

// An own logger, not spdlog's registry: a program that links us keeps its own spdlog set-up. Never destroyed,
// so that threads still running at exit may log.
spdlog::logger& logger() {
  static spdlog::logger* const instance = [] {
    auto* made = new spdlog::logger("shardpull", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern(pattern_for("shardpull"));
    made->flush_on(spdlog::level::trace);
    made->set_level(spdlog::level::warn);
    if (const char* const wanted = std::getenv("SHARDPULL_LOG"); wanted != nullptr && *wanted != '\0') {
      const std::string_view name = wanted;
      if (name == "trace")
        made->set_level(spdlog::level::trace);
      else if (name == "debug")
        made->set_level(spdlog::level::debug);
      else if (name == "info")
        made->set_level(spdlog::level::info);
      else if (name == "warn")
        made->set_level(spdlog::level::warn);
      else if (name == "error")
        made->set_level(spdlog::level::err);
      else if (name == "off")
        made->set_level(spdlog::level::off);
      else
        made->warn("SHARDPULL_LOG=\"{}\" is not a level (trace, debug, info, warn, error, off); using warn",
                   name);
    }
    return made;
  }();
  return *instance;
}

}  // namespace

bool log_enabled(LogLevel level) {
  return level != LogLevel::kOff && logger().should_log(to_spdlog(level));
}

void log_line(LogLevel level, std::string_view message) {
  if (level == LogLevel::kOff) return;
  logger().log(to_spdlog(level), printable(message));
}

void set_log_level(LogLevel level) {
  logger().set_level(to_spdlog(level));
}

void set_log_identity(std::string_view identity) {
  logger().set_pattern(pattern_for(identity));
}

}  // namespace shardpull
