#include "base/identity.h"

#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"

namespace shardpull {
namespace {

// Fills `out` from the kernel. False only on kernels without getrandom and without /dev/urandom.
bool fill_from_kernel(void* out, std::size_t bytes) {
  ssize_t got = 0;
  do {
    got = getrandom(out, bytes, 0);
  } while (got < 0 && errno == EINTR);
  if (got == static_cast<ssize_t>(bytes)) return true;
  const int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  do {
    got = read(fd, out, bytes);
  } while (got < 0 && errno == EINTR);
  close(fd);
  return got == static_cast<ssize_t>(bytes);
}

}  // namespace

std::string to_string(const Member& member) {
  switch (member.role) {
    case Role::kTrainer: return fmt::format("trainer {}", member.id);
    case Role::kWorker: return fmt::format("worker {}", member.id);
  }
  return fmt::format("member of unknown role {} with id {}", static_cast<int>(member.role), member.id);
}

std::uint64_t random_nonzero_u64() {
  std::uint64_t value = 0;
  while (value == 0) {
    if (fill_from_kernel(&value, sizeof value)) continue;
    // No source of randomness at all: still distinct between processes and over time, which is what incarnations need.
    static int salt = 0;
    value = splitmix64(static_cast<std::uint64_t>(SystemClock::instance().now_ns()) ^
                       splitmix64(static_cast<std::uint64_t>(getpid()) ^ reinterpret_cast<std::uintptr_t>(&salt)));
  }
  return value;
}

}  // namespace shardpull
