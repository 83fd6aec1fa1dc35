// Runs a set of children to their end: passes on what they say, and when one fails ends the others and tells
// whose fault it was.
#pragma once

#include <signal.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "base/unique_fd.h"
#include "cli/child_process.h"
#include "cli/sync_report.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// What a child said about why it ends.
struct ChildError {
  Reason reason = Reason::kUnspecified;
  std::string peer;  // the process it blames, or empty
  std::string message;
};

// How a child ended, for choose_cause.
struct ChildEnd {
  std::string name;
  std::optional<ChildError> error;
  std::string exit;         // "was killed by signal 9 (Killed)"
  bool failed = false;      // ended otherwise than with code 0, or said an error
  bool crashed = false;     // ended by a signal that we did not send, or badly without a word
  std::uint64_t order = 0;  // of the first sign of its failure
};

// The child whose own fault ended the run, when any failed: one that crashed, else one that blames nobody
// else, else one that blames another, else one that only noticed the end of others; the earliest among
// equals.
std::optional<RunError> choose_cause(const std::vector<ChildEnd>& ends);

// One supervisor per process. While it lives SIGINT, SIGTERM, SIGHUP and SIGCHLD are blocked and handled
// here: the first three end all children and with them run(), within two seconds; a second one kills at once.
// Thread-compatible.
class Supervisor {
 public:
  // Refused: the host has no descriptor left.
  static Result<std::unique_ptr<Supervisor>> make();
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // Starts a child in the group of the others. Its number counts up from 0 since the last run().
  Status start(ChildOptions options);

  struct Handlers {
    // A line of a child's channel. It may call release().
    std::function<void(std::size_t child, const nlohmann::json& event)> on_event;
    // Another descriptor to watch; -1 = none. Asked before every wait.
    std::function<int()> extra_fd;
    std::function<void()> on_extra;
    // A process of ours that is no child of the supervisor may have ended.
    std::function<void()> on_child_signal;
  };
  // Lets a child that waits at a gate go on.
  void release(std::size_t child);
  // Until all children have ended. Nothing = all of them with code 0.
  std::optional<RunError> run(const Handlers& handlers);

  // Lines that children of the last run() wrote to standard error, prefixed with their names: of those that
  // crashed after a failure, of all after a success. Empty when they were passed on at once, which
  // SHARDPULL_LOG=info and below asks for.
  const std::vector<std::string>& held_lines() const { return held_lines_; }

 private:
  struct Child;
  Supervisor() = default;
  void read_channel(std::size_t child, const Handlers& handlers);
  void read_errors(Child& child);
  void take_line(Child& child, std::string line);
  void note_failure(Child& child);
  void reap(const Handlers& handlers);
  void take_signals(const Handlers& handlers);
  void stop_all(int number);

  UniqueFd signals_;
  sigset_t previous_{};
  std::vector<std::unique_ptr<Child>> children_;
  std::vector<std::string> held_lines_;
  std::uint64_t failures_ = 0;
  std::optional<std::int64_t> stop_at_ns_, kill_at_ns_;
  int interrupted_by_ = 0;
};

}  // namespace shardpull::cli
