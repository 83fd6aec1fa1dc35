// Arrival: keys of one read that are copied to where they belong and summed while they arrive: out of the
// transport's memory into the parameters, without a receive slot between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "plan/plan.h"
#include "tensor/checksum.h"
#include "tensor/copy.h"
#include "transport/transport.h"

namespace shardpull {

// The packed chunks that can be scattered part by part: none of their keys is converted, whose elements parts
// could cut, and whose sum the parameter could not tell.
std::set<std::uint32_t> scattered_on_arrival(const WorkerPlan& plan);

// Thread-safe.
class Arrival final : public ReadTarget {
 public:
  struct Copy {
    const CopyProgram* program = nullptr;  // of the key's packed bytes; null: they lie at `to` as they come
    std::byte* to = nullptr;
  };
  struct Key {
    std::uint64_t offset = 0, bytes = 0;  // of the read
    std::vector<Copy> copies;
  };

  // `keys`: ascending by offset. `owner` keeps the programs and is kept as long.
  Arrival(std::vector<Key> keys, bool summed, std::shared_ptr<const void> owner);

  void take(std::uint64_t offset, std::span<const std::byte> bytes) override;
  // The sum of key `key` of `keys`, once everything has arrived: none when its parts came in another order
  // than they lie. Several parts of the read may come at a time, each in order.
  std::optional<std::uint64_t> sum(std::size_t key) const;

 private:
  void scatter(std::uint64_t offset, std::span<const std::byte> bytes) const;
  void add(std::uint64_t offset, std::span<const std::byte> bytes) SHARDPULL_REQUIRES(mutex_);

  const std::vector<Key> keys_;
  const bool summed_;
  const std::shared_ptr<const void> owner_;

  // What came in order, so far.
  struct Stretch {
    std::uint64_t next = 0;  // where it ends
    std::size_t key = 0;     // that `hasher` has the first bytes of, or that is next
    Hasher hasher;
  };
  Stretch& stretch_at(std::uint64_t offset) SHARDPULL_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<Stretch> stretches_ SHARDPULL_GUARDED_BY(mutex_);  // the latest begun last
  std::vector<std::optional<std::uint64_t>> sums_ SHARDPULL_GUARDED_BY(mutex_);
};

}  // namespace shardpull
