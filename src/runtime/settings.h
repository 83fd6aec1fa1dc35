// Settings that the processes of a fleet must share, as text for people: one a line, "name=value".
#pragma once

#include <string>
#include <string_view>

namespace shardpull {

// The settings in which two texts differ, as each has them: "lookahead=5", "no --names". Of texts that differ
// in nothing but the order, the whole ones.
struct SettingsDifference {
  std::string here, there;
};
SettingsDifference settings_difference(std::string_view here, std::string_view there);

}  // namespace shardpull
