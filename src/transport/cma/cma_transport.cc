#include "transport/cma/cma_transport.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/host_memory.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "transport/cma/process_memory.h"

namespace shardpull {
namespace {

constexpr unsigned kReadThreads = 2;
constexpr int kProbeTimeoutMs = 5000;

std::uint64_t page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::uint64_t address_of(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}

Status no_memory(std::uint64_t bytes, std::string_view what, std::string_view problem) {
  return Status(
      StatusCode::kResourceExhausted,
      fmt::format("cannot allocate {} ({} bytes) for {}: {}", format_bytes(bytes), bytes, what, problem),
      {.reason = Reason::kNoMemory, .fault = Fault::kHost});
}

// Private pages of this process, unmapped by the destructor.
class Pages {
 public:
  static Result<std::shared_ptr<const Pages>> allocate(std::uint64_t bytes, std::string_view what) {
    const auto rounded = checked_align_up<std::uint64_t>(bytes, page_bytes());
    if (!rounded) return no_memory(bytes, what, "no address space is that large");
    if (const std::uint64_t available = available_memory_bytes(); *rounded > available) {
      return no_memory(bytes, what, fmt::format("{} are available", format_bytes(available)));
    }
    void* const data =
        mmap(nullptr, *rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return no_memory(bytes, what, fmt::format("mmap: {}", std::strerror(errno)));
    auto pages = std::make_shared<Pages>();
    pages->data_ = static_cast<std::byte*>(data);
    pages->bytes_ = *rounded;
    madvise(data, *rounded, MADV_HUGEPAGE);  // a hint: without huge pages everything works, slower
    int error = 0;
    while (madvise(data, *rounded, MADV_POPULATE_WRITE) != 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      error = errno;
      break;
    }
    if (error == EINVAL) {  // a kernel before 5.14
      for (std::uint64_t at = 0; at < *rounded; at += page_bytes()) pages->data_[at] = std::byte{0};
    } else if (error != 0) {
      return no_memory(bytes, what, error == EFAULT ? "the host has no more memory" : std::strerror(error));
    }
    return std::shared_ptr<const Pages>(std::move(pages));
  }
  Pages() = default;
  ~Pages() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

class CmaExport;

// What a cma transport and its memory share. Thread-safe.
class CmaShared {
 public:
  // The word of a region, or, as 0, of the transport itself. It stays where it is as long as this object
  // lives.
  std::atomic<std::uint64_t>& word(std::uint32_t region) {
    MutexLock lock(mutex_);
    while (words_.size() <= region) words_.emplace_back(0);
    return words_[region];
  }

  using Extent = std::pair<const std::byte*, std::uint64_t>;
  std::shared_ptr<CmaExport> adopted(const Extent& extent) {
    MutexLock lock(mutex_);
    const auto found = adopted_.find(extent);
    return found == adopted_.end() ? nullptr : found->second.lock();
  }
  // `memory`, or what another thread adopted meanwhile.
  std::shared_ptr<CmaExport> add(const Extent& extent, const std::shared_ptr<CmaExport>& memory) {
    MutexLock lock(mutex_);
    std::weak_ptr<CmaExport>& entry = adopted_[extent];
    if (std::shared_ptr<CmaExport> other = entry.lock(); other != nullptr) return other;
    entry = memory;
    return memory;
  }
  void forget(const Extent& extent) {
    MutexLock lock(mutex_);
    const auto found = adopted_.find(extent);
    if (found != adopted_.end() && found->second.expired()) adopted_.erase(found);
  }

 private:
  Mutex mutex_;
  std::deque<std::atomic<std::uint64_t>> words_ SHARDPULL_GUARDED_BY(mutex_);
  std::map<Extent, std::weak_ptr<CmaExport>> adopted_ SHARDPULL_GUARDED_BY(mutex_);
};

class CmaExport final : public LocalExport {
 public:
  // `pages` is null for adopted memory.
  CmaExport(std::shared_ptr<LocalShared> shared, std::shared_ptr<CmaShared> cma, OwnRegions::Name name,
            std::byte* address, std::uint64_t bytes, std::shared_ptr<const Pages> pages)
      : LocalExport(std::move(shared), name, address, bytes),
        cma_(std::move(cma)),
        pages_(std::move(pages)),
        word_(cma_->word(name.region)),
        proof_(random_nonzero_u64()) {
    word_.store(proof_, std::memory_order_release);
  }
  ~CmaExport() override {
    // Before anything of the memory ends: who still reads will see that it has.
    word_.store(0, std::memory_order_seq_cst);
    if (pages_ == nullptr) cma_->forget({ref_.address, ref_.bytes});
  }
  void describe(LocalFrame& grant) const override {
    grant.address = address_of(ref_.address);
    grant.proof_address = address_of(&word_);
    grant.proof = proof_;
  }

 private:
  const std::shared_ptr<CmaShared> cma_;
  const std::shared_ptr<const Pages> pages_;
  std::atomic<std::uint64_t>& word_;
  const std::uint64_t proof_;
};

// Whether this process can read [data, data + bytes) in the way its peers will: a byte of every page.
Status check_readable(const std::byte* data, std::uint64_t bytes, std::string_view what) {
  constexpr std::size_t kPages = 1024;  // IOV_MAX
  std::array<iovec, kPages> pages;
  std::array<std::byte, kPages> landed;
  const std::uint64_t page = page_bytes();
  for (std::uint64_t at = 0; at < bytes;) {
    std::size_t count = 0;
    std::uint64_t next = at;
    for (; count < kPages && next < bytes; ++count) {
      pages[count] = {.iov_base = const_cast<std::byte*>(data + next), .iov_len = 1};
      next += page - (address_of(data) + next) % page;
    }
    const iovec local{.iov_base = landed.data(), .iov_len = count};
    const ssize_t got = process_vm_readv(getpid(), &local, 1, pages.data(), count, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno != EFAULT) return cma_available();
    if (got != static_cast<ssize_t>(count)) {
      const auto* const bad =
          static_cast<const std::byte*>(pages[got < 0 ? 0 : static_cast<std::size_t>(got)].iov_base);
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} ({} bytes) cannot be read by other processes from offset {} on: no "
                                "memory is mapped there, it is "
                                "protected, or it belongs to a device",
                                what, bytes, bad - data),
                    {.reason = Reason::kBadArgument, .fault = Fault::kUser});
    }
    at = next;
  }
  return {};
}

class CmaTransport final : public LocalTransport {
 public:
  static Result<std::unique_ptr<Transport>> make(CmaOptions options) {
    SHARDPULL_ASSIGN_OR_RETURN(Setup setup, set_up(std::move(options), LocalBackend::kCma));
    return std::unique_ptr<Transport>(new CmaTransport(std::move(setup)));
  }
  ~CmaTransport() override { word_.store(0, std::memory_order_seq_cst); }

  bool can_map() const override { return false; }

  Result<std::shared_ptr<ExportedMemory>> allocate(std::uint64_t bytes, std::string_view what) override {
    if (bytes == 0) return bad_argument(fmt::format("memory for {} of 0 bytes", what));
    SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const Pages> pages, Pages::allocate(bytes, what));
    SHARDPULL_ASSIGN_OR_RETURN(const OwnRegions::Name name, shared()->regions.add(bytes));
    std::byte* const data = pages->data();
    return std::shared_ptr<ExportedMemory>(
        std::make_shared<CmaExport>(shared(), cma_, name, data, bytes, std::move(pages)));
  }

  Result<std::shared_ptr<ExportedMemory>> adopt(const std::byte* data, std::uint64_t bytes,
                                                std::string_view what) override {
    if (data == nullptr || bytes == 0 || !checked_add(address_of(data), bytes)) {
      return bad_argument(fmt::format("{} cannot be adopted: {} bytes at {}", what, bytes, fmt::ptr(data)));
    }
    const CmaShared::Extent extent{data, bytes};
    if (std::shared_ptr<ExportedMemory> known = cma_->adopted(extent); known != nullptr) return known;
    SHARDPULL_RETURN_IF_ERROR(check_readable(data, bytes, what));
    SHARDPULL_ASSIGN_OR_RETURN(const OwnRegions::Name name, shared()->regions.add(bytes));
    // Never written: peers only read it.
    auto memory = std::make_shared<CmaExport>(shared(), cma_, name, const_cast<std::byte*>(data), bytes,
                                              /*pages=*/nullptr);
    return std::shared_ptr<ExportedMemory>(cma_->add(extent, memory));
  }

  Result<std::string> listen() override {
    SHARDPULL_ASSIGN_OR_RETURN(const std::string path, LocalTransport::listen());
    allow_reads_of_this_process();
    return fmt::format("{}#{:x}-{:x}", path, address_of(&word_), proof_);
  }

  Result<EndpointId> connect(const std::string& address, std::int64_t timeout_ns) override {
    const std::size_t hash = address.rfind('#');
    Proof proof;
    if (hash == std::string::npos || !parse(std::string_view(address).substr(hash + 1), proof)) {
      return bad_argument(
          fmt::format("\"{}\" is no address of a cma transport: PATH#ADDRESS-VALUE", address));
    }
    return connect_to(address.substr(0, hash), timeout_ns, [&](pid_t pid, const std::string& peer) {
      return check_proof({.pid = pid, .name = peer}, proof,
                         "the process that listens there is not the one whose address was given: it was "
                         "started anew, or its "
                         "number means another process in its pid namespace");
    });
  }

 private:
  explicit CmaTransport(Setup setup)
      : LocalTransport(std::move(setup), LocalBackend::kCma, kReadThreads,
                       [](std::span<const CopyPart> parts, std::uint64_t) { return read_process(parts); }),
        word_(cma_->word(0)),
        proof_(random_nonzero_u64()) {
    word_.store(proof_, std::memory_order_release);
  }

  Result<std::shared_ptr<const PeerMemory>> open_grant(const LocalFrame& grant,
                                                       LocalEndpoint& endpoint) override {
    PeerProcess process{.pid = endpoint.pid(), .name = endpoint.peer()};
    const Proof proof{.address = grant.proof_address, .value = grant.proof};
    SHARDPULL_RETURN_IF_ERROR(check_proof(
        process, proof, "stale: it freed the region it granted, or its number means another process here"));
    return std::shared_ptr<const PeerMemory>(
        std::make_shared<ProcessMemory>(std::move(process), grant.address, grant.bytes, proof));
  }

  static Status bad_argument(std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message),
                  {.reason = Reason::kBadArgument, .fault = Fault::kUser});
  }
  static bool parse(std::string_view text, Proof& proof) {
    const std::size_t dash = text.find('-');
    if (dash == std::string_view::npos) return false;
    const auto hexadecimal = [](std::string_view digits, std::uint64_t& value) {
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
      return error == std::errc() && end == digits.data() + digits.size();
    };
    return hexadecimal(text.substr(0, dash), proof.address) &&
           hexadecimal(text.substr(dash + 1), proof.value);
  }

  const std::shared_ptr<CmaShared> cma_ = std::make_shared<CmaShared>();
  std::atomic<std::uint64_t>& word_;
  const std::uint64_t proof_;
};

}  // namespace

Result<std::unique_ptr<Transport>> make_cma_transport(CmaOptions options) {
  return CmaTransport::make(std::move(options));
}

Status cma_available() {
  allow_reads_of_this_process();
  std::atomic<std::uint64_t> word{random_nonzero_u64()};
  const std::uint64_t expected = word.load();
  int ends[2];
  const auto failed = [](std::string_view what, int error) {
    return Status(StatusCode::kUnknown,
                  fmt::format("whether processes may read each other's memory cannot be tried: {}: {}", what,
                              std::strerror(error)),
                  {.reason = Reason::kHost, .fault = Fault::kHost});
  };
  if (pipe2(ends, O_CLOEXEC) != 0) return failed("pipe", errno);
  const UniqueFd from(ends[0]);
  UniqueFd to(ends[1]);
  const pid_t self = getpid();
  // The child shares the state of a process with many threads: it makes system calls and nothing else.
  const pid_t child = _Fork();
  if (child < 0) return failed("fork", errno);
  if (child == 0) {
    std::uint64_t got = 0;
    const iovec local{.iov_base = &got, .iov_len = sizeof got};
    const iovec remote{.iov_base = &word, .iov_len = sizeof got};
    const long count = syscall(SYS_process_vm_readv, self, &local, 1, &remote, 1, 0);
    const int answer = count < 0 ? errno : count == sizeof got && got == expected ? 0 : EIO;
    syscall(SYS_exit_group, syscall(SYS_write, to.get(), &answer, sizeof answer) == sizeof answer ? 0 : 1);
  }
  to.reset();
  pollfd readable{.fd = from.get(), .events = POLLIN, .revents = 0};
  int ready = 0;
  do {
    ready = poll(&readable, 1, kProbeTimeoutMs);
  } while (ready < 0 && errno == EINTR);
  int answer = EIO;
  const bool answered = ready == 1 && ::read(from.get(), &answer, sizeof answer) == sizeof answer;
  if (!answered) kill(child, SIGKILL);
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (!answered) return failed("a child process", ready == 0 ? ETIMEDOUT : EPIPE);
  return answer == 0 ? Status() : read_refused(answer, {.pid = self, .name = "another process"});
}

}  // namespace shardpull
