// ExportBuffers: where small tensors of resident groups are packed, so that their memory can be mapped by
// consumers and the source may let go of them. One buffer per resident group, handed out from a pool keyed by
// live group: groups complete out of order, so a modular counter would hand out a buffer that is still read.
//
// Confined to the thread of send_weights; allocate() before the fleet meets.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "shardpull/status.h"
#include "transport/transport.h"

namespace shardpull {

class ExportBuffers {
 public:
  // `count` buffers of `bytes` each (none when bytes is 0). They persist across syncs.
  Status allocate(Transport& transport, std::uint32_t count, std::uint64_t bytes);
  const std::vector<std::shared_ptr<ExportedMemory>>& buffers() const { return buffers_; }
  // The buffer of `group` until give_back(group). RESOURCE_EXHAUSTED when all are out: a bug of the caller,
  // who has credit for as many groups as there are buffers.
  Result<ExportedMemory*> take(std::uint32_t group);
  void give_back(std::uint32_t group);
  void give_back_all();
  std::uint64_t bytes() const;

 private:
  std::vector<std::shared_ptr<ExportedMemory>> buffers_;
  std::vector<std::size_t> free_;
  std::map<std::uint32_t, std::size_t> out_;  // group -> buffer
};

}  // namespace shardpull
