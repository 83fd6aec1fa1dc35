#include "runtime/fleet_trace.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/status_macros.h"

namespace shardpull {

Result<std::unique_ptr<FleetTrace>> FleetTrace::create(const std::string& path) {
  if (path.empty()) return std::unique_ptr<FleetTrace>();
  SHARDPULL_ASSIGN_OR_RETURN(std::unique_ptr<TraceFile> file, TraceFile::create(path));
  return std::unique_ptr<FleetTrace>(new FleetTrace(std::move(file)));
}

void FleetTrace::begin(std::uint64_t sync_id) {
  MutexLock lock(mutex_);
  sync_id_ = sync_id;
  held_bytes_ = 0;
  held_.clear();
}

void FleetTrace::take(const Member& from, TimelineReport report) {
  MutexLock lock(mutex_);
  if (report.sync_id != sync_id_) return;
  if (held_bytes_ + report.timeline.size() > kMaxHeldBytes) report.timeline.clear();
  held_bytes_ += report.timeline.size();
  held_[from] = std::move(report.timeline);
  wake_.notify_all();
}

void FleetTrace::finish(FleetTimeline sync, const std::vector<Member>& others,
                        const std::function<std::optional<ClockOffset>(const Member&)>& clock_of) {
  std::map<Member, std::vector<std::byte>> came;
  {
    MutexLock lock(mutex_);
    wake_.wait_for_ns(mutex_, kPatienceNs, [&]() SHARDPULL_NO_THREAD_SAFETY_ANALYSIS {
      return std::all_of(others.begin(), others.end(),
                         [&](const Member& member)
                             SHARDPULL_NO_THREAD_SAFETY_ANALYSIS { return held_.contains(member); });
    });
    came = std::exchange(held_, {});
    sync_id_ = 0;
  }
  for (const Member& member : others) {
    const auto found = came.find(member);
    auto timeline = found == came.end() || found->second.empty()
                        ? Result<Timeline>(Status(StatusCode::kUnavailable, "it has not come"))
                        : decode_timeline(found->second);
    if (timeline.ok()) {
      sync.processes.push_back({member, std::move(*timeline), clock_of(member)});
    } else {
      log_warn("no timeline of {} in the trace of sync {}: {}", to_string(member), sync.sync_id,
               timeline.status().message());
      sync.missing.push_back(member);
    }
  }
  if (const Status written = file_->add(sync); !written.ok()) log_warn("{}", written.message());
}

}  // namespace shardpull
