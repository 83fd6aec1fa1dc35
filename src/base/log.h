// Logging: to standard error, never to standard output. The level comes from SHARDPULL_LOG (trace, debug, info, warn,
// error, off), read once; the default is warn. Arguments are formatted only when the level is on.
#pragma once

#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace shardpull {

enum class LogLevel : int { kTrace = 0, kDebug, kInfo, kWarn, kError, kOff };

// Thread-safe. True when a message of `level` would be written.
bool log_enabled(LogLevel level);

// Thread-safe. Writes one line.
void log_line(LogLevel level, std::string_view message);

// Changes the level of this process; for tests and for --verbose.
void set_log_level(LogLevel level);

// Puts "worker 3" or "trainer 1" into every line of this process. Call before threads start.
void set_log_identity(std::string_view identity);

template <typename... Args>
void log_at(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(level)) log_line(level, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  log_at(LogLevel::kDebug, format, std::forward<Args>(args)...);
}
template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_at(LogLevel::kInfo, format, std::forward<Args>(args)...);
}
template <typename... Args>
void log_warn(fmt::format_string<Args...> format, Args&&... args) {
  log_at(LogLevel::kWarn, format, std::forward<Args>(args)...);
}
template <typename... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_at(LogLevel::kError, format, std::forward<Args>(args)...);
}

}  // namespace shardpull
