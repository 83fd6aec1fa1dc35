#include "cli/copy_probe.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/checked.h"
#include "base/clock.h"
#include "base/host_memory.h"
#include "base/units.h"
#include "transport/shm/shared_memory.h"

namespace shardpull::cli {
namespace {

constexpr char kCommands[] = {'p', 'n', 'v'};  // by CopyKind
constexpr std::uint64_t kAlignment = 64;

Status host_error(const char* what) {
  return Status(StatusCode::kInternal, fmt::format("the memcpy limit: {}: {}", what, std::strerror(errno)),
                {.reason = Reason::kHost, .fault = Fault::kHost});
}

void copy_non_temporal(std::byte* to, const std::byte* from, std::uint64_t bytes) {
#if defined(__SSE2__)
  const std::uint64_t head =
      std::min<std::uint64_t>(bytes, (16 - reinterpret_cast<std::uintptr_t>(to) % 16) % 16);
  std::memcpy(to, from, head);
  std::uint64_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

// Whole, in as few calls as the kernel takes; gives up where it refuses.
void read_vectored(std::vector<iovec> to, std::vector<iovec> from) {
  constexpr std::size_t kMostVectors = 1024;  // UIO_MAXIOV
  for (std::size_t at = 0; at < to.size();) {
    const std::size_t count = std::min(kMostVectors, to.size() - at);
    ssize_t got = process_vm_readv(getpid(), &to[at], count, &from[at], count, 0);
    if (got <= 0) return;
    for (; at < to.size() && static_cast<std::size_t>(got) >= to[at].iov_len; ++at) {
      got -= static_cast<ssize_t>(to[at].iov_len);
    }
    if (at == to.size()) return;
    for (iovec* const part : {&to[at], &from[at]}) {  // a call takes at most 2 GiB
      part->iov_base = static_cast<std::byte*>(part->iov_base) + got;
      part->iov_len -= static_cast<std::size_t>(got);
    }
  }
}

bool reply(int fd) {
  const char byte = 1;
  for (;;) {
    const ssize_t wrote = write(fd, &byte, 1);
    if (wrote == 1) return true;
    if (wrote < 0 && errno == EINTR) continue;
    return false;
  }
}

}  // namespace

struct CopyProbe::Line {
  struct Times {
    std::int64_t begin = 0, end = 0;
  };
  std::atomic<std::uint32_t> arrived;  // counts up over all rounds
  Times times[1];                      // one per process
};

void CopyProbe::run(Line* line, std::size_t index, std::size_t count, const std::vector<std::uint64_t>& keys,
                    int commands, int replies) {
  std::uint64_t total = 0;
  for (const std::uint64_t bytes : keys) {
    total += checked_align_up<std::uint64_t>(bytes, kAlignment).value_or(0);
  }
  if (total == 0) total = kAlignment;
  auto owned = SharedSegment::create(total, "the memcpy limit's source");
  if (!owned.ok()) _exit(1);
  std::memset((*owned)->data(), 0x5A, total);
  auto source = PeerSegment::map(UniqueFd(fcntl((*owned)->fd(), F_DUPFD_CLOEXEC, 3)), total);
  if (!source.ok()) _exit(1);
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::uint64_t bytes;
  };
  std::vector<Copy> copies;
  std::uint64_t offset = 0;
  for (const std::uint64_t bytes : keys) {
    auto* const to = static_cast<std::byte*>(std::malloc(std::max<std::uint64_t>(bytes, 1)));
    if (to == nullptr) _exit(1);
    std::memset(to, 0xCD, bytes);
    copies.push_back({to, (*source)->data() + offset, bytes});
    offset += checked_align_up<std::uint64_t>(bytes, kAlignment).value_or(0);
  }
  std::vector<iovec> to, from;
  for (const Copy& copy : copies) {
    if (copy.bytes == 0) continue;
    to.push_back({copy.to, copy.bytes});
    from.push_back({const_cast<std::byte*>(copy.from), copy.bytes});
  }
  if (!reply(replies)) _exit(0);

  const SystemClock& clock = SystemClock::instance();
  for (std::uint32_t round = 1;; ++round) {
    char command = 0;
    ssize_t got = 0;
    do {
      got = read(commands, &command, 1);
    } while (got < 0 && errno == EINTR);
    if (got != 1) _exit(0);
    line->arrived.fetch_add(1, std::memory_order_acq_rel);
    while (line->arrived.load(std::memory_order_acquire) < round * count) sched_yield();
    line->times[index].begin = clock.now_ns();
    if (command == kCommands[static_cast<int>(CopyKind::kNonTemporal)]) {
      for (const Copy& copy : copies) copy_non_temporal(copy.to, copy.from, copy.bytes);
    } else if (command == kCommands[static_cast<int>(CopyKind::kVectored)]) {
      read_vectored(to, from);
    } else {
      for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    }
    line->times[index].end = clock.now_ns();
    if (!reply(replies)) _exit(0);
  }
}

Result<std::unique_ptr<CopyProbe>> CopyProbe::start(
    const std::vector<std::vector<std::uint64_t>>& key_bytes) {
  std::uint64_t needed = 0;
  for (const auto& keys : key_bytes) {
    needed += 2 * std::accumulate(keys.begin(), keys.end(), std::uint64_t{0});
  }
  const std::uint64_t available = available_memory_bytes();
  if (needed > available / 2) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("the memcpy limit is not measured: it needs {} and {} are available",
                              format_bytes(needed), format_bytes(available)),
                  {.reason = Reason::kNoMemory, .fault = Fault::kHost});
  }
  std::unique_ptr<CopyProbe> probe(new CopyProbe);
  probe->line_bytes_ = sizeof(Line) + key_bytes.size() * sizeof(Line::Times);
  void* const shared =
      mmap(nullptr, probe->line_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return host_error("mmap");
  probe->line_ = new (shared) Line{};

  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return host_error("pipe");
  probe->replies_ = UniqueFd(ends[0]);
  UniqueFd replies(ends[1]);
  if (fcntl(probe->replies_.get(), F_SETFL, O_NONBLOCK) != 0) return host_error("fcntl");
  const pid_t parent = getpid();
  for (std::size_t index = 0; index < key_bytes.size(); ++index) {
    if (pipe2(ends, O_CLOEXEC) != 0) return host_error("pipe");
    UniqueFd commands(ends[0]);
    Runner runner;
    runner.commands = UniqueFd(ends[1]);
    runner.pid = fork();
    if (runner.pid < 0) return host_error("fork");
    if (runner.pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(0);
      signal(SIGPIPE, SIG_IGN);
      run(probe->line_, index, key_bytes.size(), key_bytes[index], commands.get(), replies.get());
    }
    probe->runners_.push_back(std::move(runner));
  }
  return probe;
}

CopyProbe::~CopyProbe() {
  for (Runner& runner : runners_) {
    if (runner.pid <= 0) continue;
    kill(runner.pid, SIGKILL);
    while (waitpid(runner.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (line_ != nullptr) munmap(line_, line_bytes_);
}

void CopyProbe::begin(CopyKind kind) {
  replied_ = 0;
  ++round_;
  for (const Runner& runner : runners_) {
    // A pipe with room for one byte: a failure means that the process has gone, which broken() tells.
    const ssize_t ignored = write(runner.commands.get(), &kCommands[static_cast<int>(kind)], 1);
    static_cast<void>(ignored);
  }
}

bool CopyProbe::advance() {
  char bytes[256];
  for (;;) {
    const ssize_t got = read(replies_.get(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    replied_ += static_cast<std::size_t>(got);
  }
  return replied_ == runners_.size();
}

std::int64_t CopyProbe::elapsed_ns() const {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  std::int64_t end = std::numeric_limits<std::int64_t>::min();
  for (std::size_t i = 0; i < runners_.size(); ++i) {
    begin = std::min(begin, line_->times[i].begin);
    end = std::max(end, line_->times[i].end);
  }
  return end - begin;
}

bool CopyProbe::broken() {
  for (Runner& runner : runners_) {
    if (runner.pid <= 0) return true;
    if (waitpid(runner.pid, nullptr, WNOHANG) == 0) continue;
    runner.pid = -1;
    return true;
  }
  return runners_.empty();
}

}  // namespace shardpull::cli
