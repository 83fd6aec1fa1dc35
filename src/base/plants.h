// Planted mistakes: faults put into the machines on purpose, one at a time, to prove that the simulator finds
// them. They exist only in builds with SHARDPULL_PLANTS (`./dev test --planted`); elsewhere each is a
// constant false and leaves nothing behind.
#pragma once

#ifdef SHARDPULL_PLANTS

#include <string_view>

namespace shardpull {

// Switches one on, for every thread; "" switches it off. Not while machines run.
void plant(std::string_view name);
bool is_planted(std::string_view name);

}  // namespace shardpull

#define SHARDPULL_PLANT(name) ::shardpull::is_planted(name)

#else

#define SHARDPULL_PLANT(name) false

#endif
