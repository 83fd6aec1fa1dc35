#include "runtime/arrival.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tensor/copy_kernels.h"

namespace shardpull {
namespace {

// What is scattered of a long read is not read soon, and would only push out of the caches what is to be
// copied next.
constexpr std::uint64_t kStreamedBytes = 4u << 20;
// More than come at a time; of more, which have come in no order, the oldest are given up.
constexpr std::size_t kMaxStretches = 32;

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
    const std::byte* const from = bytes.data() + (first - offset);
    for (const Copy& copy : key->copies) {
      if (copy.program != nullptr) {
        run_part(*copy.program, static_cast<std::int64_t>(first - key->offset),
                 static_cast<std::int64_t>(last - first), from, copy.to, streaming);
      } else if (streaming) {
        stream_copy(copy.to + (first - key->offset), from, last - first);
        end_streaming();
      } else {
        std::memcpy(copy.to + (first - key->offset), from, last - first);
      }
    }
  }
}

Arrival::Stretch& Arrival::stretch_at(std::uint64_t offset) {
  const auto found = std::find_if(stretches_.begin(), stretches_.end(),
                                  [&](const Stretch& each) { return each.next == offset; });
  if (found != stretches_.end()) return *found;
  if (stretches_.size() == kMaxStretches) stretches_.erase(stretches_.begin());
  Stretch begun;  // a key that is under way here is lost to it; those that begin are not
  begun.key =
      static_cast<std::size_t>(std::partition_point(keys_.begin(), keys_.end(),
                                                    [&](const Key& each) { return each.offset < offset; }) -
                               keys_.begin());
  stretches_.push_back(std::move(begun));
  return stretches_.back();
}

void Arrival::add(std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::uint64_t end = offset + bytes.size();
  Stretch& stretch = stretch_at(offset);
  stretch.next = end;
  for (; stretch.key < keys_.size() && keys_[stretch.key].offset < end; ++stretch.key) {
    const Key& key = keys_[stretch.key];
    const std::uint64_t first = std::max(key.offset, offset), last = std::min(key.offset + key.bytes, end);
    stretch.hasher.update(bytes.subspan(first - offset, last - first));
    if (last < key.offset + key.bytes) return;
    sums_[stretch.key] = stretch.hasher.checksum();
    stretch.hasher = Hasher();
  }
}

std::optional<std::uint64_t> Arrival::sum(std::size_t key) const {
  MutexLock lock(mutex_);
  return sums_[key];
}

}  // namespace shardpull
