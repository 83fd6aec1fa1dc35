#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>

#include "base/clock.h"

namespace shardpull::cli {
namespace {

constexpr std::int64_t kPeriodNs = 100 * kNanosPerMilli;
constexpr std::string_view kEraseLine = "\r\x1b[K";

std::size_t terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool draws_bars() {
  const char* const terminal = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && terminal != nullptr && std::string_view(terminal) != "dumb";
}

void write_out(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

std::string format_clock(std::int64_t ns) {
  const std::int64_t all = std::max<std::int64_t>(ns, 0) / kNanosPerSecond;
  const std::int64_t hours = all / 3600, minutes = all / 60 % 60, seconds = all % 60;
  return hours != 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, seconds)
                    : fmt::format("{}:{:02}", minutes, seconds);
}

std::string progress_frame(std::string_view label, double fraction, std::string_view rate,
                           std::string_view left, std::size_t width) {
  fraction = std::clamp(fraction, 0.0, 1.0);
  std::string tail = fmt::format(" {:>3}%", static_cast<int>(fraction * 100));
  if (!rate.empty()) tail += fmt::format("  {}", rate);
  if (!left.empty()) tail += fmt::format("  {} left", left);
  constexpr std::size_t kMaxBar = 40;
  const std::size_t fixed = label.size() + 3 + tail.size();  // " [" and "]"
  std::string frame(label);
  if (width >= fixed + 4) {
    const std::size_t bar = std::min(kMaxBar, width - fixed);
    const auto full = static_cast<std::size_t>(fraction * static_cast<double>(bar));
    frame += " [" + std::string(full, '=');
    if (full < bar) frame += ">" + std::string(bar - full - 1, ' ');
    frame += "]";
  }
  frame += tail;
  if (frame.size() > width) frame.resize(width);
  return frame;
}

Progress::Progress(bool quiet)
    : quiet_(quiet), terminal_(!quiet && draws_bars()), begin_ns_(SystemClock::instance().now_ns()) {}

Progress::~Progress() {
  clear();
}

void Progress::update(std::string_view label, double fraction, std::string_view rate) {
  if (!terminal_) return;
  const std::int64_t now = SystemClock::instance().now_ns();
  if (visible_ && now - drawn_ns_ < kPeriodNs) return;
  drawn_ns_ = now;
  std::string left;
  const std::int64_t elapsed = now - begin_ns_;
  if (fraction > 0.02 && elapsed > kNanosPerSecond / 2) {
    left = format_clock(static_cast<std::int64_t>(static_cast<double>(elapsed) * (1 - fraction) / fraction));
  }
  write_out(std::string(kEraseLine) + progress_frame(label, fraction, rate, left, terminal_width() - 1));
  visible_ = true;
}

void Progress::line(std::string_view text) {
  if (quiet_) return;
  clear();
  write_out(std::string(text) + "\n");
}

void Progress::clear() {
  if (!visible_) return;
  write_out(kEraseLine);
  visible_ = false;
}

}  // namespace shardpull::cli
