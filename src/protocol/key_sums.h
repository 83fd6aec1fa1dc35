// What a consumer says of a key whose bytes are not those that its producer summed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plan/plan.h"
#include "shardpull/status.h"

namespace shardpull {

// Sums `bytes`, the packed bytes of `key` that came from `producer`, and compares. DATA_LOSS, corrupt, naming
// tensor and producer, when the sum is not `expected`.
Status check_sum(const InitTables& tables, const ChunkKey& key, std::uint32_t producer,
                 std::span<const std::byte> bytes, std::uint64_t expected);
// The same of bytes that were summed as they lie, in the key's order.
Status compare_sums(const InitTables& tables, const ChunkKey& key, std::uint32_t producer, std::uint64_t sum,
                    std::uint64_t expected);

}  // namespace shardpull
