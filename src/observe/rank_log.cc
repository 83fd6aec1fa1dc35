#include "observe/rank_log.h"

namespace shardpull {

void ServeLog::begin_sync(bool serves) {
  log_.reset(kRoom);
  serves_ = serves;
  open_.clear();
}

void ServeLog::pulled(std::uint32_t worker, std::uint32_t chunk, std::uint16_t run, std::int64_t now_ns) {
  if (serves_ && open_.size() < kRoom) open_[{worker, chunk, run}] = now_ns;
}

void ServeLog::answered(std::uint32_t worker, std::uint32_t chunk, std::uint16_t run, std::int64_t now_ns) {
  const auto found = open_.find({worker, chunk, run});
  if (found == open_.end()) return;
  log_.add({.phase = Phase::kServe,
            .run = run,
            .item = chunk,
            .peer = worker,
            .begin_ns = found->second,
            .end_ns = now_ns});
  open_.erase(found);
}

}  // namespace shardpull
