#include "transport/shm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/host_memory.h"
#include "base/units.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kHugePageBytes = 2u << 20;
constexpr unsigned kMfdNoExecSeal = 0x0008;  // Linux 6.3; the kernel's log complains about files without it

std::uint64_t page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Makes all pages of the range present, without touching their contents. 0 or errno.
int prefault(std::byte* data, std::uint64_t bytes, bool writable) {
  for (;;) {
    if (madvise(data, bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0) return 0;
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    break;  // a kernel before 5.14
  }
  // The file's pages exist (fallocate), so a read cannot fail; it maps them.
  for (std::uint64_t offset = 0; offset < bytes; offset += page_bytes()) {
    static_cast<void>(*const_cast<const volatile std::byte*>(data + offset));
  }
  return 0;
}

Status corrupt_grant(std::string message) {
  return Status(StatusCode::kDataLoss, std::move(message),
                {.reason = Reason::kCorrupt, .fault = Fault::kPeer});
}

}  // namespace

PageMapping::~PageMapping() {
  if (data_ != nullptr) munmap(data_, mapped_bytes_);
}

PageMapping::PageMapping(PageMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), mapped_bytes_(std::exchange(other.mapped_bytes_, 0)) {}

PageMapping& PageMapping::operator=(PageMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  return *this;
}

PageMapping PageMapping::map(int fd, std::uint64_t bytes, bool writable) {
  PageMapping out;
  const auto rounded = checked_align_up<std::uint64_t>(bytes, page_bytes());
  const auto reserved = rounded ? checked_add<std::uint64_t>(*rounded, kHugePageBytes) : std::nullopt;
  if (!reserved) {
    errno = ENOMEM;
    return out;
  }
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (*rounded < kHugePageBytes) {
    void* const at = mmap(nullptr, *rounded, protection, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return out;
    out.data_ = static_cast<std::byte*>(at);
    out.mapped_bytes_ = *rounded;
    return out;
  }
  // A huge page maps only where address and file offset agree modulo its size: reserve more and map over the
  // aligned part.
  void* const area = mmap(nullptr, *reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) return out;
  const auto start = reinterpret_cast<std::uintptr_t>(area);
  const std::uintptr_t aligned = (start + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  auto* const data = reinterpret_cast<std::byte*>(aligned);
  if (mmap(data, *rounded, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(area, *reserved);
    errno = error;
    return out;
  }
  if (aligned > start) munmap(area, aligned - start);
  const std::uintptr_t end = aligned + *rounded;
  if (start + *reserved > end) munmap(reinterpret_cast<void*>(end), start + *reserved - end);
  madvise(data, *rounded, MADV_HUGEPAGE);  // a hint: without huge pages everything works, slower
  out.data_ = data;
  out.mapped_bytes_ = *rounded;
  return out;
}

Result<std::shared_ptr<const SharedSegment>> SharedSegment::create(std::uint64_t bytes,
                                                                   std::string_view what) {
  if (bytes == 0) {
    return Status(StatusCode::kInvalidArgument, fmt::format("shared memory for {} of 0 bytes", what),
                  {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
  }
  const auto failed = [&](std::string_view problem) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("cannot allocate {} ({} bytes) of shared memory for {}: {}",
                              format_bytes(bytes), bytes, what, problem),
                  {.reason = Reason::kNoMemory, .fault = Fault::kHost});
  };
  const auto rounded = checked_align_up<std::uint64_t>(bytes, page_bytes());
  if (!rounded || !checked_cast<off_t>(*rounded)) return failed("no address space is that large");
  if (const std::uint64_t available = available_memory_bytes(); *rounded > available) {
    return failed(fmt::format("{} are available", format_bytes(available)));
  }

  auto segment = std::make_shared<SharedSegment>();
  segment->bytes_ = bytes;
  segment->fd_ = UniqueFd(memfd_create("shardpull", MFD_CLOEXEC | MFD_ALLOW_SEALING | kMfdNoExecSeal));
  if (!segment->fd_) segment->fd_ = UniqueFd(memfd_create("shardpull", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment->fd_) {
    const int error = errno;
    return failed(fmt::format("memfd_create: {}{}", std::strerror(error),
                              error == EMFILE ? "; raise the limit with: ulimit -n" : ""));
  }
  if (ftruncate(segment->fd(), static_cast<off_t>(*rounded)) != 0) {
    return failed(fmt::format("ftruncate: {}", std::strerror(errno)));
  }
  segment->mapping_ = PageMapping::map(segment->fd(), *rounded, /*writable=*/true);
  if (segment->mapping_.data() == nullptr) return failed(fmt::format("mmap: {}", std::strerror(errno)));
  // Pages come from the fault of the huge-page mapping, not from fallocate, which would make small ones.
  int error = 0;
  while (madvise(segment->data(), *rounded, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    error = errno;
    break;
  }
  if (error == EINVAL) {
    int allocated = 0;
    do {
      allocated = fallocate(segment->fd(), 0, 0, static_cast<off_t>(*rounded));
    } while (allocated != 0 && errno == EINTR);
    error = allocated != 0 ? errno : prefault(segment->data(), *rounded, /*writable=*/true);
  }
  if (error != 0) return failed(error == EFAULT ? "the host has no more memory" : std::strerror(error));
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (fcntl(segment->fd(), F_ADD_SEALS, kSeals | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0 &&
      fcntl(segment->fd(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
    return failed(fmt::format("it cannot be sealed: {}", std::strerror(errno)));
  }
  return std::shared_ptr<const SharedSegment>(std::move(segment));
}

Result<std::shared_ptr<const PeerSegment>> PeerSegment::map(UniqueFd fd, std::uint64_t bytes) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0) return corrupt_grant("the descriptor of a granted region is not a memory file");
  if ((seals & F_SEAL_SHRINK) == 0)
    return corrupt_grant("a granted region is not sealed: it could shrink under its readers");
  struct stat info{};
  if (fstat(fd.get(), &info) != 0 || info.st_size < 0 || static_cast<std::uint64_t>(info.st_size) < bytes ||
      bytes == 0) {
    return corrupt_grant(
        fmt::format("a granted region claims {} bytes, its file has {}", bytes, info.st_size));
  }
  const auto failed = [&](int error) {
    return Status(
        StatusCode::kResourceExhausted,
        fmt::format("cannot map {} of a peer's memory: {}{}", format_bytes(bytes), std::strerror(error),
                    error == ENOMEM ? " (address space, or vm.max_map_count)" : ""),
        {.reason = Reason::kNoMemory, .fault = Fault::kHost});
  };
  auto segment = std::make_shared<PeerSegment>();
  segment->bytes_ = bytes;
  segment->mapping_ = PageMapping::map(fd.get(), bytes, /*writable=*/false);
  if (segment->mapping_.data() == nullptr) return failed(errno);
  const auto rounded = *checked_align_up<std::uint64_t>(bytes, page_bytes());
  if (const int error = prefault(segment->mapping_.data(), rounded, /*writable=*/false); error != 0)
    return failed(error);
  return std::shared_ptr<const PeerSegment>(std::move(segment));
}

}  // namespace shardpull
