// FleetTrace: a process's trace file, and on the sender what the others tell of a sync for it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock_offset.h"
#include "base/identity.h"
#include "base/mutex.h"
#include "control/messages.h"
#include "observe/timeline.h"
#include "observe/trace_file.h"

namespace shardpull {

class FleetTrace {
 public:
  // The errors of TraceFile::create. Null for an empty path: no trace.
  static Result<std::unique_ptr<FleetTrace>> create(const std::string& path);

  // From here on only what belongs to this sync is kept. Thread-safe, as take() is.
  void begin(std::uint64_t sync_id);
  void take(const Member& from, TimelineReport report);
  // Adds `sync`, which holds this process's own timeline, with those of `others`: waits for them, at most
  // kPatienceNs. `clock_of` says how a member's clock stands to this one's. A trace that cannot be written is
  // logged: it never fails a sync.
  void finish(FleetTimeline sync, const std::vector<Member>& others,
              const std::function<std::optional<ClockOffset>(const Member&)>& clock_of);

 private:
  explicit FleetTrace(std::unique_ptr<TraceFile> file) : file_(std::move(file)) {}

  static constexpr std::int64_t kPatienceNs = 2'000'000'000;
  // What is held of a sync until it is written. A fleet whose timelines are larger has some left out.
  static constexpr std::uint64_t kMaxHeldBytes = 256u << 20;

  const std::unique_ptr<TraceFile> file_;  // the caller's of finish()
  Mutex mutex_;
  CondVar wake_;
  std::uint64_t sync_id_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::uint64_t held_bytes_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::map<Member, std::vector<std::byte>> held_ SHARDPULL_GUARDED_BY(mutex_);  // empty: too large to be held
};

}  // namespace shardpull
