// PeerMemory: memory that a peer on this host granted, as this process reaches it, and the copies made out of
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "shardpull/status.h"

namespace shardpull {

// Immutable. One class per backend.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  virtual std::uint64_t bytes() const = 0;
  // The first byte where the memory is mapped here, for as long as this object lives; null where it can only
  // be copied.
  virtual const std::byte* data() const { return nullptr; }
};

// One copy of a read: [offset, offset + bytes) of `memory`, within its bounds.
struct CopyPart {
  const PeerMemory* memory = nullptr;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;  // not 0
  std::byte* to = nullptr;
};

// How a backend copies: all of `parts`, which are memory of one peer and at most a few MiB, in the order it
// likes. `read_bytes` is the size of the whole read they are part of. Called on several threads at once.
// After an error the destinations are undefined.
using CopyParts = std::function<Status(std::span<const CopyPart> parts, std::uint64_t read_bytes)>;

}  // namespace shardpull
