// Limits on everything that arrives from outside the process. They are far above what real models need; their purpose is
// that a wrong or hostile length is refused before memory is spent on it. The limits of a slice (dims, regions) are part of
// its public format: shardpull/slice.h.
#pragma once

#include <cstdint>

namespace shardpull {

inline constexpr std::uint64_t kMaxNameBytes = 4096;                     // one tensor, module or parameter name
inline constexpr std::uint64_t kMaxTensors = 4'000'000;                  // names in one model
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000; // the format's own bound
inline constexpr std::uint64_t kMaxOpsPerChain = 256;                    // operations from a checkpoint tensor to a slice
inline constexpr std::uint64_t kMaxOutputsPerOp = 1 << 20;               // tensors returned by one chunk, split or unbind
inline constexpr std::uint32_t kMaxRanks = 65'536;                       // trainer ranks, or inference workers, of a fleet
inline constexpr std::uint32_t kMaxRingDepth = 1'024;                    // K

}  // namespace shardpull
