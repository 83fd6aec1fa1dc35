#include "runtime/export_buffers.h"

#include <fmt/format.h>

#include "base/status_macros.h"

namespace shardpull {

Status ExportBuffers::allocate(Transport& transport, std::uint32_t count, std::uint64_t bytes) {
  if (bytes == 0) return {};
  for (std::uint32_t i = 0; i < count; ++i) {
    auto memory = transport.allocate(bytes, "export buffer");
    if (!memory.ok()) {
      return memory.status().with_context(fmt::format(
          "export buffer {} of {} (a smaller lookahead or export_pack_limit lowers it)", i + 1, count));
    }
    free_.push_back(buffers_.size());
    buffers_.push_back(std::move(memory).value());
  }
  return {};
}

Result<ExportedMemory*> ExportBuffers::take(std::uint32_t group) {
  if (free_.empty()) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("no free export buffer for group {}: {} groups hold one", group, out_.size()));
  }
  const std::size_t index = free_.back();
  free_.pop_back();
  out_[group] = index;
  return buffers_[index].get();
}

void ExportBuffers::give_back(std::uint32_t group) {
  const auto found = out_.find(group);
  if (found == out_.end()) return;
  free_.push_back(found->second);
  out_.erase(found);
}

void ExportBuffers::give_back_all() {
  for (const auto& [group, index] : out_) free_.push_back(index);
  out_.clear();
}

std::uint64_t ExportBuffers::bytes() const {
  std::uint64_t total = 0;
  for (const auto& buffer : buffers_) total += buffer->ref().bytes;
  return total;
}

}  // namespace shardpull
