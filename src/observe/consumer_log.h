// ConsumerLog: the timeline of one worker's sync, from what its driver tells it. Only clock readings that are
// handed in, so that it is as cheap as they are. Confined to one thread.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "observe/charge.h"
#include "observe/span.h"
#include "observe/timeline.h"

namespace shardpull {

class ConsumerLog {
 public:
  // `items`: chunks of the sync, and pulls of all of them together.
  void begin_sync(std::size_t items);
  void begin_update(std::int64_t now_ns);
  // update() is over, with success or without. What is not answered has been waited for until now. No effect
  // where none is under way: a sync may fail before and after.
  void end_update(std::int64_t now_ns);
  void begin_commit(std::int64_t now_ns);
  // As end_update.
  void end_commit(std::int64_t now_ns);

  void pull_sent(std::uint32_t chunk, std::uint16_t run, std::uint32_t trainer, std::int64_t now_ns);
  void answered(std::uint32_t chunk, std::uint16_t run, std::int64_t now_ns);
  // A run's transfer was started, or the copy or reads of a whole chunk.
  void run_started(std::uint32_t chunk, std::uint16_t run, std::int64_t now_ns);
  void chunk_started(std::uint32_t chunk, std::int64_t now_ns);
  // Work that has ended. Spans of no length are left out.
  void worked(const Span& span);

  const std::vector<Span>& spans() const { return log_.spans(); }
  // Of what has begun and ended: the update, the commit.
  const std::vector<Window>& windows() const { return windows_; }
  // Fills commit_ns, phases, waited_for and waited_ns.
  void fill(WorkerReport& report) const;
  Timeline timeline() const { return make_timeline(windows_, log_.spans(), log_.dropped()); }

 private:
  struct Pull {
    std::uint32_t trainer = 0;
    std::int64_t sent_ns = 0;
    std::int64_t answered_ns = 0;
    bool waiting = true;
  };

  SpanLog log_;
  std::vector<Window> windows_;
  std::map<std::pair<std::uint32_t, std::uint16_t>, Pull> pulls_;  // not started yet, by chunk and run
  bool updating_ = false, committing_ = false;
  std::int64_t update_ns_ = 0, commit_ns_ = 0;  // when they began
  std::int64_t line_ns_ = 0;            // since when the next chunk is the next in line
  std::uint32_t last_asked_ = kNoItem;  // the chunk that was asked for last
  std::int64_t last_work_ns_ = 0;       // the latest end of work
};

}  // namespace shardpull
