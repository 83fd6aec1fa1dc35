// The memcpy limit: how long as many processes as there are workers need to copy the same bytes, key by key,
// with plain memcpy and nothing else, all at once.
//
// One process per worker, forked from this one. Each has a source like the trainer's (a shared memory file,
// mapped read-only) and destinations like a model's (one allocation a key), all pages present. A round starts
// when all of them stand at the line, and lasts until the last has finished. A sync cannot be faster than
// that on the same machine in the same second, so it is measured right before and right after each sync,
// while the fleet waits.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "shardpull/status.h"

namespace shardpull::cli {

enum class CopyKind : std::uint8_t {
  kPlain,        // memcpy
  kNonTemporal,  // stores that bypass the caches; falls back to memcpy where the processor has none
  kVectored,     // process_vm_readv of the process's own memory: what reads across processes cost at least
};

// Thread-compatible. Rounds do not block: begin(), then poll reply_fd() and call advance() until it says that
// all replied.
class CopyProbe {
 public:
  // `key_bytes[w]` are worker w's keys. Returns at once: the memory is made in the background and the probe
  // is ready when advance() first says true. RESOURCE_EXHAUSTED when twice the bytes are more than half of
  // what this host has left.
  static Result<std::unique_ptr<CopyProbe>> start(const std::vector<std::vector<std::uint64_t>>& key_bytes);
  ~CopyProbe();  // kills the processes
  CopyProbe(const CopyProbe&) = delete;
  CopyProbe& operator=(const CopyProbe&) = delete;

  int reply_fd() const { return replies_.get(); }
  void begin(CopyKind kind);
  // Takes the replies that are there; true when the round (or the start) is complete.
  bool advance();
  // Of the last complete round: from the first process's start to the last one's end.
  std::int64_t elapsed_ns() const;
  // True when a process has ended: no round will complete any more.
  bool broken();

 private:
  struct Line;  // shared with the processes
  struct Runner {
    pid_t pid = -1;
    UniqueFd commands;
  };
  CopyProbe() = default;
  [[noreturn]] static void run(Line* line, std::size_t index, std::size_t count,
                               const std::vector<std::uint64_t>& keys, int commands, int replies);

  std::vector<Runner> runners_;
  UniqueFd replies_;
  Line* line_ = nullptr;
  std::size_t line_bytes_ = 0;
  std::size_t replied_ = 0;
  std::uint32_t round_ = 0;
};

}  // namespace shardpull::cli
