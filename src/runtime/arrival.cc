#include "runtime/arrival.h"

#include <algorithm>
#include <utility>

namespace shardpull {
namespace {

// What is scattered of a long read is not read soon, and would only push out of the caches what is to be
// copied next.
constexpr std::uint64_t kStreamedBytes = 4u << 20;

}  // namespace

std::set<std::uint32_t> scattered_on_arrival(const WorkerPlan& plan) {
  std::set<std::uint32_t> chunks;
  for (const Chunk& chunk : plan.chunks) {
    const bool as_they_are =
        std::all_of(chunk.scatters.begin(), chunk.scatters.end(), [&](const PlannedScatter& scatter) {
          return scatter.destination.dtype == chunk.keys[scatter.key].wire_dtype;
        });
    if (chunk.path == Path::kPacked && as_they_are) chunks.insert(chunk.chunk_id);
  }
  return chunks;
}

Arrival::Arrival(std::vector<Key> keys, bool summed, std::shared_ptr<const void> owner)
    : keys_(std::move(keys)), summed_(summed), owner_(std::move(owner)), sums_(keys_.size()) {}

void Arrival::take(std::uint64_t offset, std::span<const std::byte> bytes) {
  scatter(offset, bytes);
  if (!summed_) return;
  MutexLock lock(mutex_);
  add(offset, bytes);
}

void Arrival::scatter(std::uint64_t offset, std::span<const std::byte> bytes) const {
  const std::uint64_t end = offset + bytes.size();
  const bool streaming = !keys_.empty() && keys_.back().offset + keys_.back().bytes >= kStreamedBytes;
  auto key = std::partition_point(keys_.begin(), keys_.end(),
                                  [&](const Key& each) { return each.offset + each.bytes <= offset; });
  for (; key != keys_.end() && key->offset < end; ++key) {
    const std::uint64_t first = std::max(key->offset, offset), last = std::min(key->offset + key->bytes, end);
    for (const Copy& copy : key->copies) {
      run_part(*copy.program, static_cast<std::int64_t>(first - key->offset),
               static_cast<std::int64_t>(last - first), bytes.data() + (first - offset), copy.to, streaming);
    }
  }
}

void Arrival::add(std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::uint64_t end = offset + bytes.size();
  if (offset != next_) {  // the key under way is lost to it; those that begin here are not
    key_ =
        static_cast<std::size_t>(std::partition_point(keys_.begin(), keys_.end(),
                                                      [&](const Key& each) { return each.offset < offset; }) -
                                 keys_.begin());
    hasher_ = Hasher();
  }
  next_ = end;
  for (; key_ < keys_.size() && keys_[key_].offset < end; ++key_) {
    const Key& key = keys_[key_];
    const std::uint64_t first = std::max(key.offset, offset), last = std::min(key.offset + key.bytes, end);
    hasher_.update(bytes.subspan(first - offset, last - first));
    if (last < key.offset + key.bytes) return;
    sums_[key_] = hasher_.checksum();
    hasher_ = Hasher();
  }
}

std::optional<std::uint64_t> Arrival::sum(std::size_t key) const {
  MutexLock lock(mutex_);
  return sums_[key];
}

}  // namespace shardpull
