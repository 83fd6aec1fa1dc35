// M:N routing: which producers a consumer pulls from.
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace shardpull {

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

std::vector<std::uint32_t> greedy_cut(const std::vector<std::uint64_t>& bytes, std::uint32_t runs) {
  std::vector<std::uint32_t> starts;
  if (bytes.empty() || runs == 0) return starts;
  std::uint64_t total = 0;
  for (const std::uint64_t item : bytes) total += item;
  const std::uint64_t target = total / runs + (total % runs != 0 ? 1 : 0);
  starts.push_back(0);
  std::uint64_t current = 0;
  for (std::uint32_t i = 0; i < bytes.size(); ++i) {
    if (i > starts.back() && starts.size() < runs && current + bytes[i] > target) {
      starts.push_back(i);
      current = 0;
    }
    current += bytes[i];
  }
  return starts;
}

}  // namespace shardpull
