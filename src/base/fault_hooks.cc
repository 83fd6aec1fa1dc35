#include "base/fault_hooks.h"

#ifdef SHARDPULL_FAULT_HOOKS

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/mutex.h"
#include "base/unique_fd.h"

namespace shardpull {
namespace {

constexpr int kAnswerMs = 120'000;

struct Fault {
  std::string action, point;
  std::uint64_t sync_id = 0;  // 0: any
  std::uint64_t which = 0;    // 0: every time
  std::uint64_t reached = 0;
};

// Takes what follows the last `mark` off `text`, as a number above 0; 0 when there is no mark.
std::uint64_t take_number(std::string_view& text, char mark) {
  const std::size_t at = text.rfind(mark);
  if (at == std::string_view::npos) return 0;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data() + at + 1, text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number == 0) return UINT64_MAX;
  text = text.substr(0, at);
  return number;
}

std::vector<Fault> from_environment() {
  std::vector<Fault> faults;
  const char* const variable = std::getenv("SHARDPULL_FAULT");
  std::string_view left(variable == nullptr ? "" : variable);
  while (!left.empty()) {
    std::string_view entry = left.substr(0, left.find(','));
    left.remove_prefix(std::min(left.size(), entry.size() + 1));
    const std::string whole(entry);
    Fault fault;
    fault.which = take_number(entry, ':');
    fault.sync_id = take_number(entry, '/');
    const std::size_t at = entry.find('@');
    fault.action = entry.substr(0, at);
    if (at != std::string_view::npos) fault.point = entry.substr(at + 1);
    const bool known = fault.action == "kill" || fault.action == "stop" || fault.action == "announce";
    if (!known || fault.point.empty() || fault.which == UINT64_MAX || fault.sync_id == UINT64_MAX) {
      std::fprintf(stderr, "error: SHARDPULL_FAULT: \"%s\" is not of the form ACTION@POINT[/SYNC][:N]\n",
                   whole.c_str());
      std::_Exit(2);  // a test that would prove nothing
    }
    faults.push_back(std::move(fault));
  }
  return faults;
}

struct Faults {
  Mutex mutex;
  std::vector<Fault> faults SHARDPULL_GUARDED_BY(mutex) = from_environment();
  const bool any = std::getenv("SHARDPULL_FAULT") != nullptr;
};

void announce(const Fault& fault, std::uint64_t sync_id) {
  const char* const path = std::getenv("SHARDPULL_FAULT_SOCKET");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path == nullptr || std::strlen(path) >= sizeof address.sun_path) return;
  std::strcpy(address.sun_path, path);
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return;
  const std::string line = fmt::format("{} {} {} {}\n", getpid(), fault.point, sync_id, fault.reached);
  if (send(fd.get(), line.data(), line.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(line.size())) return;
  pollfd answer{fd.get(), POLLIN, 0};
  while (poll(&answer, 1, kAnswerMs) < 0 && errno == EINTR) {
  }
}

}  // namespace

inline namespace with_fault_hooks {

void fault_point(std::string_view point, std::uint64_t sync_id) {
  static Faults all;
  if (!all.any) return;
  std::vector<Fault> due;
  {
    MutexLock lock(all.mutex);
    for (Fault& fault : all.faults) {
      if (fault.point != point || (fault.sync_id != 0 && fault.sync_id != sync_id)) continue;
      ++fault.reached;
      if (fault.which == 0 || fault.which == fault.reached) due.push_back(fault);
    }
  }
  for (const Fault& fault : due) {
    if (fault.action == "announce") {
      announce(fault, sync_id);
    } else {
      // To this thread, which then does not go on while another one takes the signal.
      pthread_kill(pthread_self(), fault.action == "kill" ? SIGKILL : SIGSTOP);
    }
  }
}

}  // namespace with_fault_hooks

}  // namespace shardpull

#endif
