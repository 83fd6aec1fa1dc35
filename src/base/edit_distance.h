// How near two words are, for messages that name what may have been meant.
#pragma once

#include <cstddef>
#include <limits>
#include <string_view>

namespace shardpull {

// Bytes changed, added and dropped that lead from `a` to `b`; `limit` when that many or more, which is found
// sooner.
std::size_t edit_distance(std::string_view a, std::string_view b,
                          std::size_t limit = std::numeric_limits<std::size_t>::max());

}  // namespace shardpull
