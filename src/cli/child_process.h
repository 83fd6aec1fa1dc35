// A process that the launcher starts, watches and ends.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// Splits a stream into lines. Bytes behind the last newline wait for more; a line above `kMaxLine` is cut
// there.
class LineBuffer {
 public:
  static constexpr std::size_t kMaxLine = 4 << 20;
  // Returns the lines that `bytes` completes, without their newlines.
  std::vector<std::string> add(std::string_view bytes);
  // The rest, at the end of the stream.
  std::string take_rest();

 private:
  std::string rest_;
};

struct ChildOptions {
  std::string name;                    // "worker 1"
  std::vector<std::string> arguments;  // behind the program's name; "--launcher-fd N" is added
  pid_t group = 0;                     // process group to join; 0 starts one
};

// One child: this same program with other arguments. It gets the parent's environment and an end of a socket
// pair; its standard error is a pipe, its standard input is empty and its standard output goes where its
// standard error does. The kernel kills it when the parent dies. Thread-compatible; start() and the object's
// life belong to one thread, which must live as long as the child (PR_SET_PDEATHSIG watches the thread).
class ChildProcess {
 public:
  static Result<ChildProcess> start(const ChildOptions& options);
  ChildProcess(ChildProcess&&) noexcept = default;
  ChildProcess& operator=(ChildProcess&&) noexcept = default;
  // A child that still runs is killed and reaped.
  ~ChildProcess();

  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_.value; }
  pid_t group() const { return group_; }
  int channel() const { return channel_.get(); }
  int errors() const { return errors_.get(); }
  void close_channel() { channel_.reset(); }
  void close_errors() { errors_.reset(); }

  bool running() const { return pid_.value > 0 && !exited_; }
  // Reaps it when it has ended; true when it has just done so. Does not block.
  bool poll_exit();
  int exit_code() const;    // -1 while it runs or when a signal ended it
  int exit_signal() const;  // 0 unless a signal ended it
  bool signalled_by_us() const { return signalled_; }
  void signal(int number);            // no effect once it has ended
  std::string describe_exit() const;  // "was killed by signal 9 (Killed)", "exited with code 3"

 private:
  struct Pid {  // moves leave nothing behind
    pid_t value = -1;
    Pid() = default;
    explicit Pid(pid_t v) : value(v) {}
    Pid(Pid&& other) noexcept : value(other.value) { other.value = -1; }
    Pid& operator=(Pid&& other) noexcept {
      value = other.value;
      other.value = -1;
      return *this;
    }
  };
  ChildProcess() = default;

  std::string name_;
  Pid pid_;
  pid_t group_ = 0;
  UniqueFd channel_, errors_;
  bool exited_ = false;
  bool signalled_ = false;
  int wait_status_ = 0;
};

}  // namespace shardpull::cli
