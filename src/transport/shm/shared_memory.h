// Shared memory as sealed memfds: the owner's writable mapping, and a peer's read-only one of the same pages.
//
// The file can neither shrink nor grow once it exists (F_SEAL_SHRINK, F_SEAL_GROW), so that no access through
// a mapping of it can raise SIGBUS, and no new writable mapping of it can be made (F_SEAL_FUTURE_WRITE, where
// the kernel has it). It has no name: nothing is left behind when its processes are killed, and /dev/shm's
// size does not limit it. All pages are present on both sides before the first byte moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/unique_fd.h"
#include "shardpull/status.h"
#include "transport/peer_memory.h"

namespace shardpull {

// Pages of this process's address space, unmapped by the destructor. Movable.
class PageMapping {
 public:
  PageMapping() = default;
  ~PageMapping();
  PageMapping(PageMapping&& other) noexcept;
  PageMapping& operator=(PageMapping&& other) noexcept;

  // Maps the first `bytes` of `fd`, shared, at an address that suits huge pages. Null data() and errno on
  // failure.
  static PageMapping map(int fd, std::uint64_t bytes, bool writable);

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t mapped_bytes_ = 0;
};

// Memory this process owns and may write. The pages live until this object and every peer's mapping are gone.
// Immutable once made (the bytes are the user's).
class SharedSegment {
 public:
  // Zero-filled and prefaulted. RESOURCE_EXHAUSTED, kNoMemory, names `what`, the size and what is available:
  // a request the host cannot satisfy is refused before the kernel would have to kill a process for it.
  static Result<std::shared_ptr<const SharedSegment>> create(std::uint64_t bytes, std::string_view what);

  std::byte* data() const { return mapping_.data(); }
  std::uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  PageMapping mapping_;
  std::uint64_t bytes_ = 0;
  UniqueFd fd_;
};

// A peer's segment, readable here. Immutable.
class PeerSegment final : public PeerMemory {
 public:
  // Maps `bytes` of the descriptor a peer sent, prefaulted. DATA_LOSS, kCorrupt, when it is not what an
  // honest peer sends: no memory file, not sealed, or smaller than claimed. RESOURCE_EXHAUSTED when this host
  // cannot map it.
  static Result<std::shared_ptr<const PeerSegment>> map(UniqueFd fd, std::uint64_t bytes);

  const std::byte* data() const override { return mapping_.data(); }
  std::uint64_t bytes() const override { return bytes_; }

 private:
  PageMapping mapping_;
  std::uint64_t bytes_ = 0;
};

}  // namespace shardpull
