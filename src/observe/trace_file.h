// TraceFile: syncs as Trace Event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
//
// A process a member. Its threads: "charged", which every instant of its time is on once; "sync"; and one for
// each of what runs at once: chunks of a worker, what a rank serves. Times are microseconds of the sender's
// clock since the first sync. docs/FORMATS.md, "Trace file".
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>

#include "base/identity.h"
#include "observe/timeline.h"
#include "shardpull/status.h"

namespace shardpull {

// Thread-compatible.
class TraceFile {
 public:
  // Creates or empties the file. Refused, naming it: what cannot be written, or not at any offset (a pipe).
  static Result<std::unique_ptr<TraceFile>> create(const std::string& path);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // Appends one sync; the file is complete afterwards. An error (a full disk) ends the trace: later syncs are
  // not added and give OK. So does a file of more than kMaxBytes, which no viewer opens; its last event says
  // so.
  Status add(const FleetTimeline& sync);

  static constexpr std::int64_t kMaxBytes = std::int64_t{1} << 30;

 private:
  TraceFile(std::string path, std::FILE* file) : path_(std::move(path)), file_(file) {}
  Status write(const std::string& events);

  const std::string path_;
  std::FILE* const file_;
  std::int64_t end_ = 0;  // where the next event goes
  bool first_ = true;     // no event yet
  bool ended_ = false;
  std::int64_t origin_ns_ = 0;
  std::set<Member> named_;
};

}  // namespace shardpull
