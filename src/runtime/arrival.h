// Arrival: packed keys of one producer that are scattered and summed while they arrive: out of the
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
    const CopyProgram* program = nullptr;  // of the key's packed bytes
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
  // than they lie.
  std::optional<std::uint64_t> sum(std::size_t key) const;

 private:
  void scatter(std::uint64_t offset, std::span<const std::byte> bytes) const;
  void add(std::uint64_t offset, std::span<const std::byte> bytes);

  const std::vector<Key> keys_;
  const bool summed_;
  const std::shared_ptr<const void> owner_;

  mutable Mutex mutex_;
  std::uint64_t next_ SHARDPULL_GUARDED_BY(mutex_) = 0;  // where the next part to sum begins
  std::size_t key_ SHARDPULL_GUARDED_BY(mutex_) =
      0;  // that `hasher_` has the first bytes of, or that is next
  Hasher hasher_ SHARDPULL_GUARDED_BY(mutex_);
  std::vector<std::optional<std::uint64_t>> sums_ SHARDPULL_GUARDED_BY(mutex_);
};

}  // namespace shardpull
