// The timeline of one rank's sync: what its producer serves, on the progress thread, and what the thread of
// send_weights does. Each confined to its thread; merged when both have ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "observe/span.h"

namespace shardpull {

class ServeLog {
 public:
  // `serves`: whether to log what lies between pulls and answers, which only a trace shows.
  void begin_sync(std::uint64_t sync_id, bool serves);
  // Also before begin_sync: workers may ask before a rank comes to a sync.
  void pulled(std::uint64_t sync_id, std::uint32_t worker, std::uint32_t chunk, std::uint16_t run,
              std::int64_t now_ns);
  // The pull was answered, or refused. One that was not logged is left out.
  void answered(std::uint64_t sync_id, std::uint32_t worker, std::uint32_t chunk, std::uint16_t run,
                std::int64_t now_ns);
  void worked(const Span& span) { log_.add(span); }

  const std::vector<Span>& spans() const { return log_.spans(); }
  std::uint64_t dropped() const { return log_.dropped(); }

 private:
  // Pulls of thousands of workers: what has no room is missed by the trace, and packs of it by the phases.
  static constexpr std::size_t kRoom = 1u << 16;

  SpanLog log_;
  bool serves_ = false;
  // When a pull came, by sync, worker, chunk and run.
  std::map<std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint16_t>, std::int64_t> open_;
};

}  // namespace shardpull
