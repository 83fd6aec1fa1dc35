// MemoryRef: memory that a transport knows, named so that another process can reach it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardpull {

enum class DeviceKind : std::uint8_t { kHost = 0, kCuda = 1 };

// `region` and `generation` name the allocation for peers (0 = not exported). An address alone never does: addresses are
// reused, and a reused one would give wrong bytes silently.
struct MemoryRef {
  std::byte* address = nullptr;
  std::uint64_t bytes = 0;
  DeviceKind device = DeviceKind::kHost;
  std::uint32_t device_ordinal = 0;
  std::uint32_t region = 0;
  std::uint32_t generation = 0;
};

// The same, as a peer sees it: a window of a region.
struct RemoteRef {
  std::uint32_t region = 0;
  std::uint32_t generation = 0;
  std::uint64_t offset = 0;  // bytes from the region's start
  std::uint64_t bytes = 0;
  friend bool operator==(const RemoteRef&, const RemoteRef&) = default;
};

}  // namespace shardpull
