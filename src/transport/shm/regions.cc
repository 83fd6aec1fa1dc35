#include "transport/shm/regions.h"

#include <limits>

#include <fmt/format.h>

namespace shardpull {

Result<OwnRegions::Name> OwnRegions::add(std::uint64_t bytes) {
  MutexLock lock(mutex_);
  Name name;
  if (!unused_.empty()) {
    name.region = unused_.back();
    unused_.pop_back();
  } else {
    if (generations_.size() >= std::numeric_limits<std::uint32_t>::max()) {
      return Status(StatusCode::kResourceExhausted, "no region number is left",
                    {.reason = Reason::kLimit, .fault = Fault::kLibrary});
    }
    generations_.push_back(0);
    name.region = static_cast<std::uint32_t>(generations_.size());
  }
  name.generation = ++generations_[name.region - 1];
  ++live_regions_;
  live_bytes_ += bytes;
  return name;
}

void OwnRegions::free(const Name& name, std::uint64_t bytes) {
  MutexLock lock(mutex_);
  --live_regions_;
  live_bytes_ -= bytes;
  freed_.push_back(name);
  // A region whose generations are used up rests for ever.
  if (name.generation != std::numeric_limits<std::uint32_t>::max()) unused_.push_back(name.region);
}

std::vector<OwnRegions::Name> OwnRegions::take_freed() {
  MutexLock lock(mutex_);
  return std::exchange(freed_, {});
}

std::uint64_t OwnRegions::live_regions() const {
  MutexLock lock(mutex_);
  return live_regions_;
}

std::uint64_t OwnRegions::live_bytes() const {
  MutexLock lock(mutex_);
  return live_bytes_;
}

Status check_window(const RemoteRef& window, std::uint64_t region_bytes) {
  if (window.offset <= region_bytes && window.bytes <= region_bytes - window.offset) return {};
  return Status(StatusCode::kOutOfRange,
                fmt::format("{} bytes at offset {} are not within region {} generation {}, which has {} bytes", window.bytes,
                            window.offset, window.region, window.generation, region_bytes),
                {.reason = Reason::kBadArgument, .fault = Fault::kPeer});
}

Status PeerRegions::grant(std::uint32_t region, std::uint32_t generation,
                          Result<std::shared_ptr<const PeerSegment>> segment) {
  Entry& entry = entries_[region];
  if (generation <= entry.generation) {
    return Status(StatusCode::kDataLoss,
                  fmt::format("{} granted region {} generation {} after generation {}", peer_, region, generation,
                              entry.generation),
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = peer_});
  }
  drop(entry);
  entry.generation = generation;
  if (segment.ok()) {
    entry.segment = std::move(segment).value();
    mapped_bytes_ += entry.segment->bytes();
  } else {
    entry.unmapped = segment.status();
  }
  return {};
}

Status PeerRegions::retire(std::uint32_t region, std::uint32_t generation) {
  const auto found = entries_.find(region);
  if (found == entries_.end() || found->second.generation < generation) {
    return Status(StatusCode::kDataLoss,
                  fmt::format("{} retired region {} generation {}, which it never granted", peer_, region, generation),
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = peer_});
  }
  if (found->second.generation == generation) drop(found->second);
  return {};
}

Result<std::shared_ptr<const PeerSegment>> PeerRegions::find(const RemoteRef& window) const {
  const auto stale = [&](std::string message) {
    return Status(StatusCode::kFailedPrecondition, std::move(message),
                  {.reason = Reason::kWrongState, .fault = Fault::kPeer, .peer = peer_});
  };
  const auto found = entries_.find(window.region);
  if (found == entries_.end()) {
    return Status(StatusCode::kNotFound, fmt::format("{} never granted region {}", peer_, window.region),
                  {.reason = Reason::kBadArgument, .fault = Fault::kPeer, .peer = peer_});
  }
  const Entry& entry = found->second;
  if (entry.generation != window.generation) {
    return stale(fmt::format("stale: region {} of {} is at generation {}, not {}", window.region, peer_, entry.generation,
                             window.generation));
  }
  if (!entry.unmapped.ok()) return entry.unmapped;
  if (entry.segment == nullptr) {
    return stale(fmt::format("stale: region {} generation {} was freed by {}", window.region, window.generation, peer_));
  }
  if (Status status = check_window(window, entry.segment->bytes()); !status.ok()) return status;
  return entry.segment;
}

void PeerRegions::drop(Entry& entry) {
  if (entry.segment != nullptr) mapped_bytes_ -= entry.segment->bytes();
  entry.segment.reset();
  entry.unmapped = Status();
}

}  // namespace shardpull
