// Memory of the engine's own allocator: page-aligned, zero-filled and prefaulted, in huge pages where the host
// has them, and in a sealed memory file that peers on this host can map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace shardpull {

// Freed when the last owner lets go.
struct EngineMemory {
  std::byte* data = nullptr;    // page-aligned
  std::uint64_t bytes = 0;      // all of them usable
  std::shared_ptr<void> owner;  // keeps the memory
};

}  // namespace shardpull
