#include "runtime/landing_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/units.h"

namespace shardpull {

LandingMemory::LandingMemory(LandingMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

LandingMemory& LandingMemory::operator=(LandingMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

LandingMemory::~LandingMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Result<LandingMemory> LandingMemory::allocate(std::uint64_t bytes, std::string_view what,
                                              std::string_view setting) {
  void* const address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (address == MAP_FAILED) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("cannot allocate {} for the {}: {}; {} lowers it", format_bytes(bytes), what,
                              std::strerror(errno), setting),
                  {.reason = Reason::kNoMemory, .fault = Fault::kHost});
  }
  LandingMemory memory;
  memory.data_ = static_cast<std::byte*>(address);
  memory.bytes_ = bytes;
  return memory;
}

}  // namespace shardpull
