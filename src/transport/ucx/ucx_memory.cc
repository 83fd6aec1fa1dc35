#include "transport/ucx/ucx_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/host_memory.h"
#include "base/unique_fd.h"
#include "base/units.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kHugePageBytes = 2u << 20;
constexpr std::int64_t kEndOfTransfersNs = 2 * kNanosPerSecond;

Status no_memory(std::uint64_t bytes, std::string_view what, std::string_view problem) {
  return Status(StatusCode::kResourceExhausted,
                fmt::format("cannot allocate {} ({} bytes) of memory for {}: {}", format_bytes(bytes), bytes,
                            what, problem),
                {.reason = Reason::kNoMemory, .fault = Fault::kHost});
}

struct Meaning {
  StatusCode code;
  Reason reason;
  Fault fault;
};

Meaning meaning_of(ucs_status_t status) {
  switch (status) {
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_IO_ERROR:
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_CANCELED:
      return {StatusCode::kUnavailable, Reason::kPeerLost, Fault::kPeer};
    case UCS_ERR_NO_MEMORY:
      return {StatusCode::kResourceExhausted, Reason::kNoMemory, Fault::kHost};
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_EXCEEDS_LIMIT:
      return {StatusCode::kResourceExhausted, Reason::kLimit, Fault::kHost};
    case UCS_ERR_INVALID_PARAM:
      return {StatusCode::kInvalidArgument, Reason::kBadArgument, Fault::kUser};
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NOT_IMPLEMENTED:
      return {StatusCode::kUnimplemented, Reason::kHost, Fault::kHost};
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_NO_ELEM:
    case UCS_ERR_INVALID_ADDR:
    case UCS_ERR_BUSY:
      return {StatusCode::kFailedPrecondition, Reason::kHost, Fault::kHost};
    case UCS_ERR_MESSAGE_TRUNCATED:
      return {StatusCode::kDataLoss, Reason::kCorrupt, Fault::kPeer};
    default:
      return {StatusCode::kInternal, Reason::kUnspecified, Fault::kLibrary};
  }
}

// Whether a byte of every page can be read: through a pipe, as a read of what cannot would end the process.
Status check_readable(const std::byte* data, std::uint64_t bytes, std::string_view what) {
  std::size_t at_once = 1024;  // IOV_MAX
  int ends[2] = {-1, -1};
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return Status(
        StatusCode::kFailedPrecondition,
        fmt::format("no pipe to check the memory of {}: {}; with too many open files, raise the limit with: "
                    "ulimit -n",
                    what, std::strerror(errno)),
        {.reason = Reason::kHost, .fault = Fault::kHost});
  }
  const UniqueFd out(ends[0]), in(ends[1]);
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  std::array<iovec, 1024> pages;
  std::array<std::byte, 1024> ignored;
  for (std::uint64_t at = 0; at < bytes;) {
    std::size_t count = 0;
    std::uint64_t next = at;
    for (; count < at_once && next < bytes; ++count) {
      pages[count] = {.iov_base = const_cast<std::byte*>(data + next), .iov_len = 1};
      next += page - (reinterpret_cast<std::uintptr_t>(data) + next) % page;
    }
    const ssize_t got = writev(in.get(), pages.data(), static_cast<int>(count));
    if (got < 0 && errno == EINTR) continue;
    if (got != static_cast<ssize_t>(count) && count > 1) {
      for (ssize_t left = got; left > 0;)
        left -= std::max<ssize_t>(0, read(out.get(), ignored.data(), count));
      at_once = 1;  // which of them it is
      continue;
    }
    if (got < 0) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("{} ({} bytes) cannot be read by this process from offset {} on: no memory is "
                      "mapped there, it is protected, or it belongs to a device; copy it to memory of the "
                      "host first",
                      what, bytes, at),
          {.reason = Reason::kBadArgument, .fault = Fault::kUser});
    }
    for (ssize_t left = got; left > 0;) left -= std::max<ssize_t>(0, read(out.get(), ignored.data(), count));
    at = next;
  }
  return {};
}

// For people: "64 KiB", "unlimited".
std::string limit_of_locked_memory() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur);
}

}  // namespace

Status ucx_error(const UcxLibrary& ucx, ucs_status_t status, std::string_view what, const std::string& peer) {
  const Meaning meaning = meaning_of(status);
  return Status(meaning.code, fmt::format("{}: {}", what, ucx.ucs_status_string(status)),
                {.reason = meaning.reason, .fault = meaning.fault, .peer = peer});
}

void UcxContext::wake() const {
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then the reader is being woken already.
  [[maybe_unused]] const ssize_t written = write(wake_fd.get(), &one, sizeof one);
}

Result<std::shared_ptr<const UcxBlock>> UcxBlock::allocate(std::shared_ptr<UcxContext> context,
                                                           std::uint64_t bytes, std::string_view what) {
  if (bytes == 0) {
    return Status(StatusCode::kInvalidArgument, fmt::format("memory for {} of 0 bytes", what),
                  {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
  }
  const auto page_bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const auto rounded = checked_align_up<std::uint64_t>(bytes, page_bytes);
  const auto reserved = rounded ? checked_add<std::uint64_t>(*rounded, kHugePageBytes) : std::nullopt;
  if (!reserved || !checked_cast<off_t>(*reserved))
    return no_memory(bytes, what, "no address space is that large");
  if (const std::uint64_t available = available_memory_bytes(); *rounded > available) {
    return no_memory(bytes, what, fmt::format("{} are available", format_bytes(available)));
  }
  std::shared_ptr<UcxBlock> block(new UcxBlock(std::move(context)));
  // Room to begin at a huge page's border.
  const std::uint64_t mapped = *rounded < kHugePageBytes ? *rounded : *reserved;
  void* const area =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) return no_memory(bytes, what, std::strerror(errno));
  block->mapping_ = static_cast<std::byte*>(area);
  block->mapping_bytes_ = mapped;
  block->data_ = block->mapping_;
  if (mapped != *rounded) {
    const auto start = reinterpret_cast<std::uintptr_t>(area);
    block->data_ += (kHugePageBytes - start % kHugePageBytes) % kHugePageBytes;
    madvise(block->data_, *rounded, MADV_HUGEPAGE);  // a hint: without huge pages everything works, slower
  }
  block->bytes_ = bytes;
  while (madvise(block->data_, *rounded, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL)
      return no_memory(bytes, what, errno == EFAULT ? "the host has no more memory" : std::strerror(errno));
    // A kernel before 5.14.
    for (std::uint64_t offset = 0; offset < *rounded; offset += page_bytes) {
      const_cast<volatile std::byte&>(block->data_[offset]) = std::byte{0};
    }
    break;
  }
  if (Status known = block->make_known(what); !known.ok()) return known;
  return std::shared_ptr<const UcxBlock>(std::move(block));
}

Result<std::shared_ptr<const UcxBlock>> UcxBlock::adopt(std::shared_ptr<UcxContext> context,
                                                        const std::byte* data, std::uint64_t bytes,
                                                        std::string_view what) {
  if (data == nullptr || bytes == 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("memory of {} at no address, or of 0 bytes", what),
                  {.reason = Reason::kBadArgument, .fault = Fault::kLibrary});
  }
  if (Status readable = check_readable(data, bytes, what); !readable.ok()) return readable;
  std::shared_ptr<UcxBlock> block(new UcxBlock(std::move(context)));
  block->data_ = const_cast<std::byte*>(data);  // what reads it does not write it
  block->bytes_ = bytes;
  if (Status known = block->make_known(what); !known.ok()) return known;
  return std::shared_ptr<const UcxBlock>(std::move(block));
}

Status UcxBlock::make_known(std::string_view what) {
  const UcxLibrary& ucx = context_->ucx;
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = data_;
  params.length = bytes_;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  void* key = nullptr;
  std::size_t key_bytes = 0;
  const std::uint64_t number = ++context_->registrations;
  const auto fails = [&](bool at_key) {
    return context_->fail_registration && context_->fail_registration(number, at_key);
  };
  ucs_status_t status =
      fails(false) ? UCS_ERR_NO_MEMORY : ucx.ucp_mem_map(context_->context, &params, &handle_);
  if (status != UCS_OK) handle_ = nullptr;
  // What was registered is not any more when the block ends, wherever it fails.
  if (status == UCS_OK) {
    status =
        fails(true) ? UCS_ERR_NO_MEMORY : ucx.ucp_rkey_pack(context_->context, handle_, &key, &key_bytes);
  }
  if (status != UCS_OK) {
    return ucx_error(
        ucx, status,
        fmt::format("cannot register {} ({} bytes) at {} for {}; this process may lock {} of memory: "
                    "raise that with: ulimit -l unlimited (containers: --ulimit memlock=-1)",
                    format_bytes(bytes_), bytes_, static_cast<const void*>(data_), what,
                    limit_of_locked_memory()));
  }
  const auto* const bytes = static_cast<const std::byte*>(key);
  key_.assign(bytes, bytes + key_bytes);
  ucx.ucp_rkey_buffer_release(key);
  return {};
}

bool UcxBlock::begin_transfer() const {
  MutexLock lock(mutex_);
  if (!ended_) ++transfers_;
  return !ended_;
}

void UcxBlock::end_transfer() const {
  {
    MutexLock lock(mutex_);
    --transfers_;
  }
  changed_.notify_all();
}

void UcxBlock::end(std::int64_t timeout_ns) const {
  MutexLock lock(mutex_);
  ended_ = true;
  const std::int64_t give_up_ns = SystemClock::instance().now_ns() + timeout_ns;
  for (;;) {
    const std::int64_t left_ns = give_up_ns - SystemClock::instance().now_ns();
    if (transfers_ == 0 || left_ns <= 0) return;
    changed_.wait_for_ns(mutex_, left_ns);
  }
}

UcxBlock::~UcxBlock() {
  if (handle_ != nullptr) context_->ucx.ucp_mem_unmap(context_->context, handle_);
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

UcxExportedMemory::UcxExportedMemory(std::shared_ptr<UcxContext> context,
                                     std::shared_ptr<const UcxBlock> block, OwnRegions::Name name)
    : context_(std::move(context)), block_(std::move(block)), name_(name) {
  ref_.address = block_->data();
  ref_.bytes = block_->bytes();
  ref_.region = name.region;
  ref_.generation = name.generation;
}

UcxExportedMemory::~UcxExportedMemory() {
  const bool may_wait = block_->adopted() && context_->progress_thread.load() != std::this_thread::get_id();
  block_->end(may_wait ? kEndOfTransfersNs : 0);
  context_->regions.free(name_, block_->bytes());
  context_->wake();
}

}  // namespace shardpull
