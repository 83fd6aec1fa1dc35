// M:N routing: which producers a consumer pulls from.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/checked.h"
#include "plan/plan.h"

namespace shardpull {
namespace {

std::uint64_t sum_of(const std::vector<std::uint64_t>& items) {
  return std::accumulate(items.begin(), items.end(), std::uint64_t{0});
}

// The first item of each run; `target(r)` is what run r is cut at.
template <typename Target>
std::vector<std::uint32_t> cut_at_targets(const std::vector<std::uint64_t>& bytes, std::size_t runs,
                                          const Target& target) {
  std::vector<std::uint32_t> starts;
  if (bytes.empty() || runs == 0) return starts;
  starts.push_back(0);
  std::uint64_t current = 0;
  for (std::uint32_t i = 0; i < bytes.size(); ++i) {
    if (i > starts.back() && starts.size() < runs && current + bytes[i] > target(starts.size() - 1)) {
      starts.push_back(i);
      current = 0;
    }
    current += bytes[i];
  }
  return starts;
}

}  // namespace

std::vector<std::uint32_t> route_block(const std::vector<std::uint32_t>& owners, std::uint32_t consumer,
                                       std::uint32_t workers_per_replica) {
  if (owners.empty() || workers_per_replica == 0) return {};
  const std::uint64_t producers = owners.size();
  const std::uint64_t workers = workers_per_replica;
  const std::uint64_t worker = consumer % workers;
  const std::uint64_t first = worker * producers / workers;
  const std::uint64_t end = producers >= workers ? (worker + 1) * producers / workers : first + 1;
  return {owners.begin() + static_cast<std::ptrdiff_t>(first),
          owners.begin() + static_cast<std::ptrdiff_t>(end)};
}

std::vector<BlockOwner> weighted_block(const std::vector<std::uint32_t>& owners, std::uint32_t consumer,
                                       std::uint32_t workers_per_replica) {
  std::vector<BlockOwner> block;
  if (owners.empty() || workers_per_replica == 0) return block;
  const std::uint64_t length = owners.size();  // of a consumer; an owner is `workers` long
  const std::uint64_t workers = workers_per_replica;
  const std::uint64_t begin = consumer % workers * length, end = begin + length;
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t owner = at / workers;
    const std::uint64_t next = std::min(end, (owner + 1) * workers);
    block.push_back({.producer = owners[owner], .weight = next - at});
    at = next;
  }
  return block;
}

std::vector<std::uint32_t> greedy_cut(const std::vector<std::uint64_t>& bytes, std::uint32_t runs) {
  const std::uint64_t target = runs == 0 ? 0 : ceil_div(sum_of(bytes), runs);
  return cut_at_targets(bytes, runs, [&](std::size_t) { return target; });
}

std::vector<std::uint32_t> greedy_cut(const std::vector<std::uint64_t>& bytes,
                                      const std::vector<std::uint64_t>& weights) {
  const std::uint64_t total = sum_of(bytes), sum = sum_of(weights);
  return cut_at_targets(bytes, weights.size(), [&](std::size_t run) {
    return total / sum * weights[run] + ceil_div(total % sum * weights[run], sum);
  });
}

}  // namespace shardpull
