#include "observe/rank_log.h"

#include <map>
#include <tuple>

namespace shardpull {

void ServeLog::begin_sync(std::uint64_t sync_id, bool serves) {
  log_.reset(kRoom);
  serves_ = serves;
  std::erase_if(open_, [&](const auto& each) { return std::get<0>(each.first) != sync_id; });
}

void ServeLog::pulled(std::uint64_t sync_id, std::uint32_t worker, std::uint32_t chunk, std::uint16_t run,
                      std::int64_t now_ns) {
  if (open_.size() < kRoom) open_[{sync_id, worker, chunk, run}] = now_ns;
}

void ServeLog::answered(std::uint64_t sync_id, std::uint32_t worker, std::uint32_t chunk, std::uint16_t run,
                        std::int64_t now_ns) {
  const auto found = open_.find({sync_id, worker, chunk, run});
  if (found == open_.end()) return;
  if (serves_) {
    log_.add({.phase = Phase::kServe,
              .run = run,
              .item = chunk,
              .peer = worker,
              .begin_ns = found->second,
              .end_ns = now_ns});
  }
  open_.erase(found);
}

}  // namespace shardpull
