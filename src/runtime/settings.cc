#include "runtime/settings.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace shardpull {
namespace {

using Lines = std::vector<std::string_view>;

Lines lines_of(std::string_view text) {
  Lines lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (end > 0) lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string_view name_of(std::string_view line) { return line.substr(0, line.find('=')); }

std::string only_in(const Lines& own, const Lines& other) {
  std::vector<std::string> text;
  const auto has = [](const Lines& lines, auto matches) {
    return std::any_of(lines.begin(), lines.end(), matches);
  };
  for (const std::string_view line : own) {
    if (!has(other, [&](std::string_view each) { return each == line; })) text.emplace_back(line);
  }
  if (!text.empty()) return fmt::format("{}", fmt::join(text, ", "));
  for (const std::string_view line : other) {
    const std::string_view name = name_of(line);
    if (!has(own, [&](std::string_view each) { return name_of(each) == name; }))
      text.push_back(fmt::format("no {}", name));
  }
  return fmt::format("{}", fmt::join(text, ", "));
}

}  // namespace

SettingsDifference settings_difference(std::string_view here, std::string_view there) {
  const Lines mine = lines_of(here), theirs = lines_of(there);
  SettingsDifference difference{only_in(mine, theirs), only_in(theirs, mine)};
  if (difference.here.empty() || difference.there.empty()) {
    difference.here = fmt::format("{}", fmt::join(mine, ", "));
    difference.there = fmt::format("{}", fmt::join(theirs, ", "));
  }
  return difference;
}

}  // namespace shardpull
