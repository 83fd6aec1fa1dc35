#include "transport/regions.h"

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
  return Status(
      StatusCode::kOutOfRange,
      fmt::format("{} bytes at offset {} are not within region {} generation {}, which has {} bytes",
                  window.bytes, window.offset, window.region, window.generation, region_bytes),
      {.reason = Reason::kBadArgument, .fault = Fault::kPeer});
}

namespace region_errors {
namespace {

Status corrupt(const std::string& peer, std::string message) {
  return Status(StatusCode::kDataLoss, std::move(message),
                {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = peer});
}

Status wrong_state(const std::string& peer, std::string message) {
  return Status(StatusCode::kFailedPrecondition, std::move(message),
                {.reason = Reason::kWrongState, .fault = Fault::kPeer, .peer = peer});
}

}  // namespace

Status granted_again(const std::string& peer, std::uint32_t region, std::uint32_t generation,
                     std::uint32_t had) {
  return corrupt(peer, fmt::format("{} granted region {} generation {} after generation {}", peer, region,
                                   generation, had));
}

Status retired_unknown(const std::string& peer, std::uint32_t region, std::uint32_t generation) {
  return corrupt(peer, fmt::format("{} retired region {} generation {}, which it never granted", peer, region,
                                   generation));
}

Status never_granted(const std::string& peer, const RemoteRef& window) {
  return Status(StatusCode::kNotFound, fmt::format("{} never granted region {}", peer, window.region),
                {.reason = Reason::kBadArgument, .fault = Fault::kPeer, .peer = peer});
}

Status stale(const std::string& peer, const RemoteRef& window, std::uint32_t generation) {
  return wrong_state(peer, fmt::format("stale: region {} of {} is at generation {}, not {}", window.region,
                                       peer, generation, window.generation));
}

Status freed(const std::string& peer, const RemoteRef& window) {
  return wrong_state(peer, fmt::format("stale: region {} generation {} was freed by {}", window.region,
                                       window.generation, peer));
}

}  // namespace region_errors
}  // namespace shardpull
