#include "observe/trace_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace shardpull {
namespace {

using nlohmann::ordered_json;

constexpr const char* kHead = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
constexpr const char* kTail = "\n]}\n";

constexpr std::uint32_t kChargedThread = 1, kSyncThread = 2, kFirstLane = 3;
// Workers are numbered after all ranks there may be.
constexpr std::uint32_t kFirstWorkerProcess = 1'000'000;

std::uint32_t process_of(const Member& member) {
  return member.role == Role::kTrainer ? 1 + member.id : kFirstWorkerProcess + member.id;
}

bool serves(Phase phase) {
  return phase == Phase::kServe || phase == Phase::kPack || phase == Phase::kSum;
}

// Threads for spans of which several may be under way: each goes to the first on which it overlaps nothing.
class Lanes {
 public:
  // Begins must not descend.
  std::uint32_t place(std::int64_t begin_ns, std::int64_t end_ns) {
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      if (ends_[i] > begin_ns) continue;
      ends_[i] = end_ns;
      return static_cast<std::uint32_t>(i);
    }
    ends_.push_back(end_ns);
    return static_cast<std::uint32_t>(ends_.size() - 1);
  }
  std::size_t size() const { return ends_.size(); }

 private:
  std::vector<std::int64_t> ends_;
};

// The events of one sync, as text.
class Events {
 public:
  Events(const FleetTimeline& fleet, std::int64_t origin_ns, std::set<Member>& named)
      : fleet_(fleet), causes_(fleet), origin_ns_(origin_ns), named_(named) {}

  std::vector<std::string> take() {
    for (const ProcessTimeline& process : fleet_.processes) add_process(process);
    for (const Member& member : fleet_.missing) {
      event({{"name", fmt::format("no timeline of {}", to_string(member))},
             {"ph", "i"},
             {"s", "g"},
             {"ts", micros(fleet_.end_ns)},
             {"pid", process_of(kSender)},
             {"tid", kSyncThread}});
    }
    return std::move(events_);
  }

 private:
  // Of the sender's clock.
  double micros(std::int64_t ns) const { return static_cast<double>(ns - origin_ns_) / 1e3; }

  void event(const ordered_json& event) {
    events_.push_back(event.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  }

  void name(const char* what, std::uint32_t pid, std::uint32_t tid, ordered_json args) {
    event({{"name", what}, {"ph", "M"}, {"pid", pid}, {"tid", tid}, {"args", std::move(args)}});
  }

  void complete(std::string_view what, std::string_view category, std::uint32_t tid, std::int64_t begin_ns,
                std::int64_t end_ns, ordered_json args) {
    event({{"name", what},
           {"cat", category},
           {"ph", "X"},
           {"ts", micros(begin_ns + shift_ns_)},
           {"dur", static_cast<double>(end_ns - begin_ns) / 1e3},
           {"pid", pid_},
           {"tid", tid},
           {"args", std::move(args)}});
  }

  ordered_json args_of(const Span& span, bool worker) const {
    ordered_json args = ordered_json::object();
    if (span.item != kNoItem) args[worker || serves(span.phase) ? "chunk" : "group"] = span.item;
    if (span.item != kNoItem && (worker || serves(span.phase))) args["run"] = span.run;
    if (span.peer != kNoPeer) args[worker ? "trainer" : "worker"] = span.peer;
    if (span.bytes != 0) args["bytes"] = span.bytes;
    if (span.path != SpanPath::kNone) args["path"] = to_string(span.path);
    return args;
  }

  void add_process(const ProcessTimeline& process) {
    pid_ = process_of(process.member);
    shift_ns_ = process.clock.value_or(ClockOffset()).offset_ns;
    const Timeline& timeline = process.timeline;
    const bool worker = process.member.role == Role::kWorker;
    if (named_.insert(process.member).second) {
      name("process_name", pid_, 0, {{"name", to_string(process.member)}});
      name("process_sort_index", pid_, 0, {{"sort_index", pid_}});
      name("thread_name", pid_, kChargedThread, {{"name", "charged"}});
      name("thread_name", pid_, kSyncThread, {{"name", "sync"}});
    }
    if (timeline.windows.empty()) return;
    const Charged charged = charge(timeline.spans, timeline.windows);
    for (const Segment& segment : charged.segments) {
      ordered_json args =
          segment.span == kNoSpan ? ordered_json::object() : args_of(timeline.spans[segment.span], worker);
      if (std::string cause = causes_.of(process, segment); worker && !cause.empty())
        args["cause"] = std::move(cause);
      complete(to_string(segment.phase), "charged", kChargedThread, segment.begin_ns, segment.end_ns,
               std::move(args));
    }
    add_sync(process, charged);
    if (worker) {
      add_chunks(timeline);
    } else {
      add_rank(timeline);
    }
  }

  // The sync as a whole, and within it its windows.
  void add_sync(const ProcessTimeline& process, const Charged& charged) {
    const Timeline& timeline = process.timeline;
    ordered_json args = {{"sync", fleet_.sync_id}, {"version", fleet_.version}};
    if (process.member == kSender) args["summary"] = fleet_.summary;
    ordered_json& phases = args["phases"] = ordered_json::object();
    for (const PhaseTime& phase : charged.phases) {
      phases[std::string(to_string(phase.phase))] = {
          {"charged_us", static_cast<double>(phase.charged_ns) / 1e3},
          {"active_us", static_cast<double>(phase.active_ns) / 1e3},
          {"count", phase.count}};
    }
    if (process.clock) {
      args["clock_offset_us"] = static_cast<double>(process.clock->offset_ns) / 1e3;
      args["clock_error_us"] = static_cast<double>(process.clock->error_ns) / 1e3;
    } else {
      args["clock_error_us"] = nullptr;
    }
    args["spans_dropped"] = timeline.dropped;
    complete(fmt::format("sync {}", fleet_.sync_id), "sync", kSyncThread, timeline.windows.front().begin_ns,
             timeline.windows.back().end_ns, std::move(args));
    if (process.member.role != Role::kWorker) return;
    for (const Window& window : timeline.windows) {
      complete(window.rest == Phase::kCommit ? "commit" : "update", "window", kSyncThread, window.begin_ns,
               window.end_ns, ordered_json::object());
    }
  }

  // Each chunk on a lane of its own while it lives, from when it is next in line, its phases within it. A
  // run's wait beside the chunk's first has another lane.
  void add_chunks(const Timeline& timeline) {
    struct Piece {
      std::uint32_t chunk = 0;
      std::int64_t begin_ns = 0, end_ns = 0;
      std::vector<const Span*> spans;  // none overlaps another
    };
    // By chunk and run; what a chunk does as a whole is with its run 0.
    std::map<std::pair<std::uint32_t, std::uint16_t>, Piece> open;
    std::vector<Piece> pieces;
    for (const Span& span : timeline.spans) {
      if (span.item == kNoItem) {
        complete(to_string(span.phase), "phase", kSyncThread, span.begin_ns, span.end_ns,
                 args_of(span, true));
        continue;
      }
      Piece& piece = open[{span.item, span.run}];
      // Asked for again, of another trainer: what began before has not ended.
      if (!piece.spans.empty() && span.begin_ns < piece.end_ns)
        pieces.push_back(std::exchange(piece, Piece()));
      if (piece.spans.empty()) piece.begin_ns = piece.end_ns = span.begin_ns;
      piece.chunk = span.item;
      piece.end_ns = std::max(piece.end_ns, span.end_ns);
      piece.spans.push_back(&span);
    }
    for (auto& [id, piece] : open) pieces.push_back(std::move(piece));
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.begin_ns < b.begin_ns; });
    Lanes lanes;
    for (const Piece& piece : pieces) {
      const std::uint32_t tid = kFirstLane + lanes.place(piece.begin_ns, piece.end_ns);
      complete(fmt::format("chunk {}", piece.chunk), "chunk", tid, piece.begin_ns, piece.end_ns,
               {{"chunk", piece.chunk}});
      for (const Span* span : piece.spans) {
        complete(to_string(span->phase), "phase", tid, span->begin_ns, span->end_ns, args_of(*span, true));
      }
    }
    name_lanes("chunks", lanes.size());
  }

  void add_rank(const Timeline& timeline) {
    Lanes lanes;
    for (const Span& span : timeline.spans) {
      const std::uint32_t tid =
          serves(span.phase) ? kFirstLane + lanes.place(span.begin_ns, span.end_ns) : kSyncThread;
      complete(to_string(span.phase), "phase", tid, span.begin_ns, span.end_ns, args_of(span, false));
    }
    name_lanes("serves", lanes.size());
  }

  void name_lanes(const char* what, std::size_t count) {
    for (std::size_t lane = 0; lane < count; ++lane) {
      name("thread_name", pid_, kFirstLane + static_cast<std::uint32_t>(lane),
           {{"name", fmt::format("{} {}", what, lane)}});
    }
  }

  const FleetTimeline& fleet_;
  const Causes causes_;
  const std::int64_t origin_ns_;
  std::set<Member>& named_;
  std::uint32_t pid_ = 0;
  std::int64_t shift_ns_ = 0;  // to the sender's clock
  std::vector<std::string> events_;
};

Status failed(const std::string& path, const char* what, int error) {
  return Status(StatusCode::kFailedPrecondition,
                fmt::format("the trace file {} cannot be {}: {}", path, what, std::strerror(error)),
                {.reason = Reason::kHost, .fault = Fault::kUser});
}

}  // namespace

Result<std::unique_ptr<TraceFile>> TraceFile::create(const std::string& path) {
  // A pipe would hold the caller until somebody reads it; only a file can be written as this one is.
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666));
  struct stat info{};
  if (!fd && errno != ENXIO) return failed(path, "created", errno);
  if (!fd || ::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("the trace file {} is not a regular file", path),
                  {.reason = Reason::kHost, .fault = Fault::kUser});
  }
  std::FILE* const file = ::ftruncate(fd.get(), 0) == 0 ? ::fdopen(fd.get(), "wb") : nullptr;
  if (file == nullptr) return failed(path, "created", errno);
  fd.release();
  std::unique_ptr<TraceFile> trace(new TraceFile(path, file));
  trace->end_ = static_cast<std::int64_t>(std::strlen(kHead));
  if (std::fputs(kHead, file) < 0 || std::fputs(kTail, file) < 0 || std::fflush(file) != 0 ||
      std::fseek(file, 0, SEEK_SET) != 0)
    return failed(path, "written", errno);
  return trace;
}

TraceFile::~TraceFile() {
  std::fclose(file_);  // flushed after every write
}

Status TraceFile::add(const FleetTimeline& sync) {
  if (ended_) return {};
  if (origin_ns_ == 0) origin_ns_ = sync.begin_ns;
  const bool first = first_;
  std::string text;
  for (const std::string& event : Events(sync, origin_ns_, named_).take()) {
    if (!first_) text += ",\n";
    first_ = false;
    text += event;
  }
  if (end_ + static_cast<std::int64_t>(text.size()) > kMaxBytes) {
    ended_ = true;
    const ordered_json full = {{"name", fmt::format("the trace ends here: it has {} bytes", end_)},
                               {"ph", "i"},
                               {"s", "g"},
                               {"ts", static_cast<double>(sync.end_ns - origin_ns_) / 1e3},
                               {"pid", process_of(kSender)},
                               {"tid", kSyncThread}};
    text = (first ? "" : ",\n") + full.dump();
  }
  const Status written = write(text);
  ended_ = ended_ || !written.ok();
  return written;
}

Status TraceFile::write(const std::string& events) {
  if (std::fseek(file_, static_cast<long>(end_), SEEK_SET) != 0 ||
      std::fwrite(events.data(), 1, events.size(), file_) != events.size() || std::fputs(kTail, file_) < 0 ||
      std::fflush(file_) != 0)
    return failed(path_, "written", errno);
  end_ += static_cast<std::int64_t>(events.size());
  return {};
}

}  // namespace shardpull
