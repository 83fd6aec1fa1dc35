#include "transport/cma/process_memory.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace shardpull {
namespace {

constexpr std::size_t kMaxVectors = IOV_MAX;

iovec here(void* data, std::uint64_t bytes) {
  return {.iov_base = data, .iov_len = static_cast<std::size_t>(bytes)};
}
iovec there(std::uint64_t address, std::uint64_t bytes) {
  return {.iov_base = reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)),
          .iov_len = static_cast<std::size_t>(bytes)};
}

Status host_status(StatusCode code, std::string message) {
  return Status(code, std::move(message), {.reason = Reason::kHost, .fault = Fault::kHost});
}

// "2", or "absent".
std::string ptrace_scope() {
  const UniqueFd fd(open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC));
  char digit = 0;
  return fd && ::read(fd.get(), &digit, 1) == 1 ? std::string(1, digit) : "absent";
}

Status no_number(const PeerProcess& process) {
  return host_status(
      StatusCode::kFailedPrecondition,
      fmt::format(
          "{} runs in another pid namespace, where this process cannot see it, so its memory cannot be read. "
          "Run both in one pid namespace (docker run --pid=host, Kubernetes shareProcessNamespace), or "
          "use --transport shm or --transport tcp",
          process.name));
}

Status not_proven(const PeerProcess& process, std::string_view otherwise) {
  return Status(StatusCode::kFailedPrecondition, fmt::format("{}: {}", process.name, otherwise),
                {.reason = Reason::kWrongState, .fault = Fault::kPeer, .peer = process.name});
}

// Whether all proofs stand. They are of one process.
Status check_proofs(const PeerProcess& process, std::span<const Proof> proofs, std::string_view otherwise,
                    ReadProcess read) {
  if (process.pid <= 0) return no_number(process);
  std::array<std::uint64_t, kMaxVectors> words;
  std::array<iovec, kMaxVectors> remote;
  while (!proofs.empty()) {
    const std::size_t count = std::min(proofs.size(), kMaxVectors);
    for (std::size_t i = 0; i < count; ++i) remote[i] = there(proofs[i].address, sizeof words[i]);
    const iovec local = here(words.data(), count * sizeof words[0]);
    ssize_t got = 0;
    do {
      got = read(process.pid, &local, 1, remote.data(), count, 0);
    } while (got < 0 && errno == EINTR);
    if (got < 0 && errno != EFAULT) return read_refused(errno, process);
    if (got != static_cast<ssize_t>(local.iov_len)) return not_proven(process, otherwise);
    for (std::size_t i = 0; i < count; ++i) {
      if (words[i] != proofs[i].value) return not_proven(process, otherwise);
    }
    proofs = proofs.subspan(count);
  }
  return {};
}

constexpr std::string_view kEnded =
    "stale: it freed the region that is read, or another process has its number now";

const ProcessMemory& memory_of(const CopyPart& part) {
  return static_cast<const ProcessMemory&>(*part.memory);
}

Status read_all(std::span<const CopyPart> parts, ReadProcess read) {
  const PeerProcess& process = memory_of(parts.front()).process();
  std::array<iovec, kMaxVectors> local, remote;
  std::size_t next = 0;    // the part to go on with
  std::uint64_t done = 0;  // bytes of it
  while (next < parts.size()) {
    const std::size_t count = std::min(parts.size() - next, kMaxVectors);
    for (std::size_t i = 0; i < count; ++i) {
      const CopyPart& part = parts[next + i];
      const std::uint64_t skip = i == 0 ? done : 0;
      local[i] = here(part.to + skip, part.bytes - skip);
      remote[i] = there(memory_of(part).address() + part.offset + skip, part.bytes - skip);
    }
    const ssize_t got = read(process.pid, local.data(), count, remote.data(), count, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno != EFAULT) return read_refused(errno, process);
    if (got <= 0) {
      const CopyPart& part = parts[next];
      return Status(
          StatusCode::kDataLoss,
          fmt::format("{} of {} bytes at offset {} of a region of {} did not arrive: {}", part.bytes - done,
                      part.bytes, part.offset, process.name,
                      got == 0 ? "the system delivers nothing, without an error (a ptrace rule or a filter "
                                 "may be the cause); "
                                 "--transport shm or --transport tcp do without"
                               : "its owner granted memory that is not there, or freed it without saying so"),
          {.reason = Reason::kCorrupt,
           .fault = got == 0 ? Fault::kHost : Fault::kPeer,
           .peer = process.name});
    }
    for (auto rest = static_cast<std::uint64_t>(got); rest > 0;) {
      const std::uint64_t step = std::min(rest, parts[next].bytes - done);
      rest -= step;
      done += step;
      if (done == parts[next].bytes) {
        ++next;
        done = 0;
      }
    }
  }
  return {};
}

}  // namespace

Status read_refused(int error, const PeerProcess& process) {
  switch (error) {
    case EPERM:
    case EACCES:
      return host_status(StatusCode::kPermissionDenied,
                         fmt::format("reading the memory of {} is not permitted. One of these forbids it: "
                                     "kernel.yama.ptrace_scope (here: {}; 0 "
                                     "and 1 will do: sysctl kernel.yama.ptrace_scope=1), a seccomp filter or "
                                     "a container without the right to "
                                     "ptrace (docker run --cap-add=SYS_PTRACE, or a profile that allows "
                                     "process_vm_readv), another user or "
                                     "user namespace. Without it: --transport shm or --transport tcp",
                                     process.name, ptrace_scope()));
    case ENOSYS:
      return host_status(
          StatusCode::kUnimplemented,
          "this kernel has no process_vm_readv (CONFIG_CROSS_MEMORY_ATTACH). Without it: --transport shm or "
          "--transport tcp");
    case ESRCH:
      return Status(StatusCode::kUnavailable,
                    fmt::format("{} is gone: no process has its number any more", process.name),
                    {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = process.name});
    default:
      return host_status(StatusCode::kInternal, fmt::format("reading the memory of {} failed: {}",
                                                            process.name, std::strerror(error)));
  }
}

Status check_proof(const PeerProcess& process, const Proof& proof, std::string_view otherwise,
                   ReadProcess read) {
  return check_proofs(process, std::span(&proof, 1), otherwise, read);
}

Status read_process(std::span<const CopyPart> parts, ReadProcess read) {
  if (parts.empty()) return {};
  std::vector<const ProcessMemory*> regions;
  for (const CopyPart& part : parts) {
    if (regions.empty() || regions.back() != &memory_of(part)) regions.push_back(&memory_of(part));
  }
  std::sort(regions.begin(), regions.end());
  regions.erase(std::unique(regions.begin(), regions.end()), regions.end());
  std::vector<Proof> proofs;
  proofs.reserve(regions.size());
  for (const ProcessMemory* region : regions) proofs.push_back(region->proof());

  const PeerProcess& process = regions.front()->process();
  SHARDPULL_RETURN_IF_ERROR(check_proofs(process, proofs, kEnded, read));
  const Status status = read_all(parts, read);
  // What went wrong with memory that has ended meanwhile went wrong because it has ended.
  if (status.ok() || status.info().reason == Reason::kCorrupt) {
    SHARDPULL_RETURN_IF_ERROR(check_proofs(process, proofs, kEnded, read));
  }
  return status;
}

void allow_reads_of_this_process() {
#ifdef PR_SET_PTRACER
  // Fails where there is no Yama, and needs not to succeed there.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
#endif
}

}  // namespace shardpull
