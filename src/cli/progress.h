// Progress on standard error: a bar with rate and time left on a terminal, plain lines elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardpull::cli {

// One frame of the bar, `width` columns at most: "sync 2/3 [=====>    ]  52%  1.2 GB/s  0:04 left".
// `fraction` in [0, 1]; `rate` and `left` may be empty.
std::string progress_frame(std::string_view label, double fraction, std::string_view rate,
                           std::string_view left, std::size_t width);

// "0:04", "12:03", "1:02:03".
std::string format_clock(std::int64_t ns);

// Draws at most ten times a second. Thread-compatible.
class Progress {
 public:
  // `quiet` shows nothing at all.
  explicit Progress(bool quiet = false);
  ~Progress();  // clears the bar

  // Shows `fraction` of the whole; `rate` is text ("1.2 GB/s"), may be empty. On a terminal only.
  void update(std::string_view label, double fraction, std::string_view rate);
  // A line that stays: on a terminal above the bar.
  void line(std::string_view text);
  // Removes the bar, so that others may write to the terminal.
  void clear();

 private:
  const bool quiet_;
  const bool terminal_;
  const std::int64_t begin_ns_;
  std::int64_t drawn_ns_ = 0;
  bool visible_ = false;
};

}  // namespace shardpull::cli
