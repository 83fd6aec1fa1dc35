// Private, page-aligned, prefaulted memory for receive slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shardpull/status.h"

namespace shardpull {

// Owns one anonymous mapping. Movable; empty by default.
class LandingMemory {
 public:
  LandingMemory() = default;
  LandingMemory(LandingMemory&& other) noexcept;
  LandingMemory& operator=(LandingMemory&& other) noexcept;
  ~LandingMemory();

  // Out of memory names the size, `what` and the setting that lowers it.
  static Result<LandingMemory> allocate(std::uint64_t bytes, std::string_view what, std::string_view setting);

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace shardpull
