// Regions: numbers for memory. The owner's side hands them out, the peer's side resolves them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/memory_ref.h"
#include "base/mutex.h"
#include "shardpull/status.h"
#include "transport/shm/shared_memory.h"

namespace shardpull {

// The owner's regions. A freed number is given out again with the next generation, so that a peer who still holds the old
// pair is told, and never reads the new memory by mistake. Thread-safe.
class OwnRegions {
 public:
  struct Name {
    std::uint32_t region = 0;
    std::uint32_t generation = 0;
  };
  // A name for memory of `bytes`. RESOURCE_EXHAUSTED after 2^32 - 1 live regions.
  Result<Name> add(std::uint64_t bytes);
  // Ends it; take_freed() reports it once.
  void free(const Name& name, std::uint64_t bytes);
  std::vector<Name> take_freed();

  std::uint64_t live_regions() const;
  std::uint64_t live_bytes() const;

 private:
  mutable Mutex mutex_;
  std::vector<std::uint32_t> generations_ SHARDPULL_GUARDED_BY(mutex_);  // by region - 1; the last one given out
  std::vector<std::uint32_t> unused_ SHARDPULL_GUARDED_BY(mutex_);       // regions to give out again
  std::vector<Name> freed_ SHARDPULL_GUARDED_BY(mutex_);
  std::uint64_t live_regions_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::uint64_t live_bytes_ SHARDPULL_GUARDED_BY(mutex_) = 0;
};

// OK when [offset, offset + bytes) lies within [0, region_bytes). Never overflows. OUT_OF_RANGE names the numbers.
Status check_window(const RemoteRef& window, std::uint64_t region_bytes);

// What one peer granted to this process. Thread-compatible.
class PeerRegions {
 public:
  // `peer` is named in errors.
  explicit PeerRegions(std::string peer) : peer_(std::move(peer)) {}

  // Takes a grant, with its mapping or the reason why this host has none. DATA_LOSS when the region was granted before with
  // this or a later generation: an honest peer does not do that.
  Status grant(std::uint32_t region, std::uint32_t generation, Result<std::shared_ptr<const PeerSegment>> segment);
  // The owner freed it. DATA_LOSS for a region that was never granted. An older generation is ignored.
  Status retire(std::uint32_t region, std::uint32_t generation);

  // The segment that holds `window`, or why there is none, each case in its own words: never granted, another generation,
  // freed by its owner, not mappable here, out of range.
  Result<std::shared_ptr<const PeerSegment>> find(const RemoteRef& window) const;

  std::uint64_t mapped_bytes() const { return mapped_bytes_; }

 private:
  struct Entry {
    std::uint32_t generation = 0;
    std::shared_ptr<const PeerSegment> segment;  // null: retired, or `unmapped` says why
    Status unmapped;
  };
  void drop(Entry& entry);

  std::string peer_;
  std::unordered_map<std::uint32_t, Entry> entries_;
  std::uint64_t mapped_bytes_ = 0;
};

}  // namespace shardpull
