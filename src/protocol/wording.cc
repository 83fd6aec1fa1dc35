#include "protocol/wording.h"

#include <fmt/format.h>

namespace shardpull {

std::string list_ranges(const std::vector<std::uint32_t>& ascending, std::size_t max_ranges) {
  if (ascending.empty()) return "none";
  std::string text;
  std::size_t ranges = 0;
  for (std::size_t i = 0; i < ascending.size();) {
    std::size_t end = i + 1;
    while (end < ascending.size() && ascending[end] == ascending[end - 1] + 1) ++end;
    if (ranges++ == max_ranges) return text + fmt::format(", ... ({} in all)", ascending.size());
    if (!text.empty()) text += ", ";
    text += end - i == 1 ? fmt::format("{}", ascending[i])
                         : fmt::format("{}-{}", ascending[i], ascending[end - 1]);
    i = end;
  }
  return text;
}

std::string count_noun(std::string_view noun, const std::vector<std::uint32_t>& ascending) {
  return fmt::format("{}{} {}", noun, ascending.size() == 1 ? "" : "s", list_ranges(ascending));
}

Status shutting_down() {
  return Status(StatusCode::kCancelled, "shutting down", {.reason = Reason::kShutdown});
}

}  // namespace shardpull
