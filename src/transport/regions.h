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

namespace shardpull {

// The owner's regions. A freed number is given out again with the next generation, so that a peer who still
// holds the old pair is told, and never reads the new memory by mistake. Thread-safe.
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
  std::vector<std::uint32_t> generations_
      SHARDPULL_GUARDED_BY(mutex_);                                 // by region - 1; the last one given out
  std::vector<std::uint32_t> unused_ SHARDPULL_GUARDED_BY(mutex_);  // regions to give out again
  std::vector<Name> freed_ SHARDPULL_GUARDED_BY(mutex_);
  std::uint64_t live_regions_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::uint64_t live_bytes_ SHARDPULL_GUARDED_BY(mutex_) = 0;
};

// OK when [offset, offset + bytes) lies within [0, region_bytes). Never overflows. OUT_OF_RANGE names the
// numbers.
Status check_window(const RemoteRef& window, std::uint64_t region_bytes);

// What one peer granted to this process, with what the backend keeps of each region: `Held` has bytes().
// Thread-compatible.
template <typename Held>
class PeerRegions {
 public:
  // `peer` is named in errors.
  explicit PeerRegions(std::string peer) : peer_(std::move(peer)) {}

  // Takes a grant, with what is kept of it or the reason why it cannot be reached from here. DATA_LOSS when
  // the region was granted before with this or a later generation: an honest peer does not do that.
  Status grant(std::uint32_t region, std::uint32_t generation, Result<std::shared_ptr<const Held>> held);
  // The owner freed it. DATA_LOSS for a region that was never granted. An older generation is ignored.
  Status retire(std::uint32_t region, std::uint32_t generation);

  // What holds `window`, or why there is none, each case in its own words: never granted, another generation,
  // freed by its owner, not reachable from here, out of range.
  Result<std::shared_ptr<const Held>> find(const RemoteRef& window) const;

  std::uint64_t held_bytes() const { return held_bytes_; }

 private:
  struct Entry {
    std::uint32_t generation = 0;
    std::shared_ptr<const Held> held;  // null: retired, or `unreachable` says why
    Status unreachable;
  };
  void drop(Entry& entry);

  std::string peer_;
  std::unordered_map<std::uint32_t, Entry> entries_;
  std::uint64_t held_bytes_ = 0;
};

namespace region_errors {

Status granted_again(const std::string& peer, std::uint32_t region, std::uint32_t generation,
                     std::uint32_t had);
Status retired_unknown(const std::string& peer, std::uint32_t region, std::uint32_t generation);
Status never_granted(const std::string& peer, const RemoteRef& window);
Status stale(const std::string& peer, const RemoteRef& window, std::uint32_t generation);
Status freed(const std::string& peer, const RemoteRef& window);

}  // namespace region_errors

template <typename Held>
Status PeerRegions<Held>::grant(std::uint32_t region, std::uint32_t generation,
                                Result<std::shared_ptr<const Held>> held) {
  Entry& entry = entries_[region];
  if (generation <= entry.generation)
    return region_errors::granted_again(peer_, region, generation, entry.generation);
  drop(entry);
  entry.generation = generation;
  if (held.ok()) {
    entry.held = std::move(held).value();
    held_bytes_ += entry.held->bytes();
  } else {
    entry.unreachable = held.status();
  }
  return {};
}

template <typename Held>
Status PeerRegions<Held>::retire(std::uint32_t region, std::uint32_t generation) {
  const auto found = entries_.find(region);
  if (found == entries_.end() || found->second.generation < generation) {
    return region_errors::retired_unknown(peer_, region, generation);
  }
  if (found->second.generation == generation) drop(found->second);
  return {};
}

template <typename Held>
Result<std::shared_ptr<const Held>> PeerRegions<Held>::find(const RemoteRef& window) const {
  const auto found = entries_.find(window.region);
  if (found == entries_.end()) return region_errors::never_granted(peer_, window);
  const Entry& entry = found->second;
  if (entry.generation != window.generation) return region_errors::stale(peer_, window, entry.generation);
  if (!entry.unreachable.ok()) return entry.unreachable;
  if (entry.held == nullptr) return region_errors::freed(peer_, window);
  if (Status status = check_window(window, entry.held->bytes()); !status.ok()) return status;
  return entry.held;
}

template <typename Held>
void PeerRegions<Held>::drop(Entry& entry) {
  if (entry.held != nullptr) held_bytes_ -= entry.held->bytes();
  entry.held.reset();
  entry.unreachable = Status();
}

}  // namespace shardpull
