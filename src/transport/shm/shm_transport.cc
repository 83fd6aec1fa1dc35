#include "transport/shm/shm_transport.h"

#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "tensor/copy_kernels.h"
#include "transport/shm/shared_memory.h"

namespace shardpull {
namespace {

class ShmExport final : public LocalExport {
 public:
  ShmExport(std::shared_ptr<LocalShared> shared, OwnRegions::Name name,
            std::shared_ptr<const SharedSegment> segment)
      : LocalExport(std::move(shared), name, segment->data(), segment->bytes()),
        segment_(std::move(segment)) {}
  void describe(LocalFrame&) const override {}  // the file tells the rest
  SentDescriptor descriptor() const override { return {.fd = segment_->fd(), .owner = segment_}; }

 private:
  const std::shared_ptr<const SharedSegment> segment_;
};

Status copy_mapped(std::span<const CopyPart> parts, std::uint64_t read_bytes) {
  // What exceeds the caches is written past them, as on every other copy path.
  const bool streaming = read_bytes >= kStreamingProgramBytes;
  for (const CopyPart& part : parts) {
    const std::byte* const from = part.memory->data() + part.offset;
    if (streaming) {
      stream_copy(part.to, from, static_cast<std::size_t>(part.bytes));
    } else {
      std::memcpy(part.to, from, static_cast<std::size_t>(part.bytes));
    }
  }
  return {};
}

class ShmTransport final : public LocalTransport {
 public:
  static Result<std::unique_ptr<Transport>> make(ShmOptions options) {
    SHARDPULL_ASSIGN_OR_RETURN(Setup setup, set_up(std::move(options), LocalBackend::kShm));
    return std::unique_ptr<Transport>(new ShmTransport(std::move(setup)));
  }

  bool can_map() const override { return true; }
  Result<std::shared_ptr<ExportedMemory>> allocate(std::uint64_t bytes, std::string_view what) override {
    SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const SharedSegment> segment,
                               SharedSegment::create(bytes, what));
    SHARDPULL_ASSIGN_OR_RETURN(const OwnRegions::Name name, shared()->regions.add(bytes));
    return std::shared_ptr<ExportedMemory>(std::make_shared<ShmExport>(shared(), name, std::move(segment)));
  }

 private:
  explicit ShmTransport(Setup setup)
      : LocalTransport(std::move(setup), LocalBackend::kShm, /*read_threads=*/1, copy_mapped) {}

  Result<std::shared_ptr<const PeerMemory>> open_grant(const LocalFrame& grant,
                                                       LocalEndpoint& endpoint) override {
    UniqueFd fd = endpoint.take_descriptor();
    if (!fd) {
      return Status(StatusCode::kDataLoss, "a region was granted without its descriptor",
                    {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = endpoint.peer()});
    }
    SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<const PeerMemory> memory,
                               PeerSegment::map(std::move(fd), grant.bytes));
    return memory;
  }
};

}  // namespace

Result<std::unique_ptr<Transport>> make_shm_transport(ShmOptions options) {
  return ShmTransport::make(std::move(options));
}

}  // namespace shardpull
