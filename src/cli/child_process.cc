#include "cli/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

namespace shardpull::cli {
namespace {

Status host_error(const std::string& what) {
  return Status(StatusCode::kInternal, fmt::format("{}: {}", what, std::strerror(errno)),
                {.reason = Reason::kHost, .fault = Fault::kHost});
}

// Between fork and exec: async-signal-safe calls only. Descriptors 0 to 2 and `channel` pass on, all others
// are close-on-exec.
[[noreturn]] void become(char* const* arguments, pid_t parent, pid_t group, int nothing, int errors,
                         int channel) {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGCHLD}) signal(number, SIG_DFL);
  setpgid(0, group);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // the parent died before the line above
  if (dup2(nothing, 0) < 0 || dup2(errors, 1) < 0 || dup2(errors, 2) < 0) _exit(127);
  if (fcntl(channel, F_SETFD, 0) < 0) _exit(127);
  execv("/proc/self/exe", arguments);
  _exit(127);
}

}  // namespace

std::vector<std::string> LineBuffer::add(std::string_view bytes) {
  std::vector<std::string> lines;
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    rest_.append(bytes.substr(0, end));
    if (rest_.size() > kMaxLine) rest_.resize(kMaxLine);
    if (end == std::string_view::npos) break;
    lines.push_back(std::move(rest_));
    rest_.clear();
    bytes.remove_prefix(end + 1);
  }
  return lines;
}

std::string LineBuffer::take_rest() {
  return std::exchange(rest_, {});
}

Result<ChildProcess> ChildProcess::start(const ChildOptions& options) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return host_error("socketpair");
  UniqueFd ours(pair[0]), theirs(pair[1]);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return host_error("pipe");
  UniqueFd errors(ends[0]), writes(ends[1]);
  UniqueFd nothing(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!nothing) return host_error("/dev/null");
  for (const int fd : {ours.get(), errors.get()}) {
    if (fcntl(fd, F_SETFL, O_NONBLOCK) != 0) return host_error("fcntl");
  }

  std::vector<std::string> words = {"shardpull"};
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  words.push_back("--launcher-fd");
  words.push_back(std::to_string(theirs.get()));
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return host_error("fork");
  if (pid == 0) become(pointers.data(), parent, options.group, nothing.get(), writes.get(), theirs.get());
  setpgid(pid, options.group);  // also here, so that the group exists when the next child joins it; one of
                                // the two wins

  ChildProcess child;
  child.name_ = options.name;
  child.pid_ = Pid(pid);
  child.group_ = options.group != 0 ? options.group : pid;
  child.channel_ = std::move(ours);
  child.errors_ = std::move(errors);
  return child;
}

ChildProcess::~ChildProcess() {
  if (!running()) return;
  kill(pid_.value, SIGKILL);
  while (waitpid(pid_.value, &wait_status_, 0) < 0 && errno == EINTR) {
  }
}

bool ChildProcess::poll_exit() {
  if (!running()) return false;
  const pid_t done = waitpid(pid_.value, &wait_status_, WNOHANG);
  if (done != pid_.value) return false;
  exited_ = true;
  return true;
}

int ChildProcess::exit_code() const {
  return exited_ && WIFEXITED(wait_status_) ? WEXITSTATUS(wait_status_) : -1;
}
int ChildProcess::exit_signal() const {
  return exited_ && WIFSIGNALED(wait_status_) ? WTERMSIG(wait_status_) : 0;
}

void ChildProcess::signal(int number) {
  if (!running()) return;
  signalled_ = true;
  kill(pid_.value, number);
}

std::string ChildProcess::describe_exit() const {
  if (!exited_) return "still runs";
  if (exit_signal() != 0) {
    return fmt::format("was killed by signal {} ({})", exit_signal(), strsignal(exit_signal()));
  }
  return fmt::format("exited with code {}", exit_code());
}

}  // namespace shardpull::cli
