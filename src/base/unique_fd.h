// UniqueFd: a file descriptor that is closed when its owner goes.
#pragma once

#include <unistd.h>

#include <utility>

namespace shardpull {

// Owns at most one descriptor. Movable; thread-compatible.
class UniqueFd {
 public:
  UniqueFd() = default;
  // Takes `fd`; a negative one is none.
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  explicit operator bool() const { return valid(); }
  // Gives the descriptor up to the caller.
  int release() { return std::exchange(fd_, -1); }
  // Closes it. On Linux a descriptor is gone whatever close() returns, so there is nothing to retry.
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace shardpull
