// What memory this host has left.
#pragma once

#include <cstdint>

namespace shardpull {

// What this process could still allocate, in bytes: the least of the host's and its control group's.
// UINT64_MAX when unknown.
std::uint64_t available_memory_bytes();

}  // namespace shardpull
