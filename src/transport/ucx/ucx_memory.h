// Memory that UCX knows: the context it is registered with, and the blocks of it that peers can read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "shardpull/status.h"
#include "transport/regions.h"
#include "transport/transport.h"
#include "transport/ucx/ucx_library.h"

namespace shardpull {

// What UCX's status means as ours. `what` says what failed; `peer` may be empty. Total.
Status ucx_error(const UcxLibrary& ucx, ucs_status_t status, std::string_view what,
                 const std::string& peer = {});

class UcxExportedMemory;

// A UCX context, with what exported memory and other threads share with the transport. Thread-safe. Outlives
// the transport as long as memory of it does.
struct UcxContext {
  UcxContext(const UcxLibrary& library, ucp_context_h handle) : ucx(library), context(handle) {}
  ~UcxContext() { ucx.ucp_cleanup(context); }
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;
  // Ends a wait of the transport.
  void wake() const;

  const UcxLibrary& ucx;
  const ucp_context_h context;
  OwnRegions regions;
  UniqueFd wake_fd;
  // For tests: see UcxOptions.
  std::function<bool(std::uint64_t registration, bool key)> fail_registration;
  std::atomic<std::uint64_t> registrations{0};
  std::atomic<std::thread::id> progress_thread;  // that must not wait for itself
  Mutex mutex;
  // Memory that was adopted and is still held, by address and extent.
  std::map<std::pair<const std::byte*, std::uint64_t>, std::weak_ptr<UcxExportedMemory>> adopted
      SHARDPULL_GUARDED_BY(mutex);
};

// Registered memory. What was allocated lives until its owner and every transfer out of it have let go.
class UcxBlock {
 public:
  // Allocates it: page-aligned, zero-filled, every page present. RESOURCE_EXHAUSTED, kNoMemory, names `what`
  // and the size.
  static Result<std::shared_ptr<const UcxBlock>> allocate(std::shared_ptr<UcxContext> context,
                                                          std::uint64_t bytes, std::string_view what);
  // Registers memory of somebody else, who keeps it. INVALID_ARGUMENT names the offset of the first page that
  // cannot be read.
  static Result<std::shared_ptr<const UcxBlock>> adopt(std::shared_ptr<UcxContext> context,
                                                       const std::byte* data, std::uint64_t bytes,
                                                       std::string_view what);
  ~UcxBlock();
  UcxBlock(const UcxBlock&) = delete;
  UcxBlock& operator=(const UcxBlock&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  bool adopted() const { return mapping_ == nullptr; }
  ucp_mem_h handle() const { return handle_; }
  // Begins to send from it: not after its owner let go. Thread-safe, as the other two.
  bool begin_transfer() const;
  void end_transfer() const;
  // No transfer begins any more. Waits until those under way have ended, at most `timeout_ns`.
  void end(std::int64_t timeout_ns) const;

  const std::vector<std::byte>& key() const { return key_; }  // what a peer needs to fetch from it

 private:
  explicit UcxBlock(std::shared_ptr<UcxContext> context) : context_(std::move(context)) {}
  Status make_known(std::string_view what);

  const std::shared_ptr<UcxContext> context_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::byte* mapping_ = nullptr;  // ours to unmap, or null
  std::uint64_t mapping_bytes_ = 0;
  ucp_mem_h handle_ = nullptr;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  mutable bool ended_ SHARDPULL_GUARDED_BY(mutex_) = false;
  mutable std::uint64_t transfers_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::vector<std::byte> key_;
};

class UcxExportedMemory final : public ExportedMemory {
 public:
  UcxExportedMemory(std::shared_ptr<UcxContext> context, std::shared_ptr<const UcxBlock> block,
                    OwnRegions::Name name);
  // Peers are told from the progress thread. Transfers out of adopted memory are waited for, a moment, unless
  // this is that thread.
  ~UcxExportedMemory() override;

  const std::shared_ptr<const UcxBlock>& block() const { return block_; }
  bool belongs_to(const std::shared_ptr<UcxContext>& context) const { return context_ == context; }

 private:
  const std::shared_ptr<UcxContext> context_;
  const std::shared_ptr<const UcxBlock> block_;
  const OwnRegions::Name name_;
};

// A peer's region. Immutable.
class UcxRemoteRegion {
 public:
  // `key` may be null: then the owner is asked to send.
  UcxRemoteRegion(const UcxLibrary& ucx, std::uint64_t bytes, std::uint64_t address, ucp_rkey_h key)
      : ucx_(ucx), bytes_(bytes), address_(address), key_(key) {}
  ~UcxRemoteRegion() {
    if (key_ != nullptr) ucx_.ucp_rkey_destroy(key_);
  }
  UcxRemoteRegion(const UcxRemoteRegion&) = delete;
  UcxRemoteRegion& operator=(const UcxRemoteRegion&) = delete;

  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t address() const { return address_; }
  ucp_rkey_h key() const { return key_; }

 private:
  const UcxLibrary& ucx_;
  const std::uint64_t bytes_;
  const std::uint64_t address_;
  const ucp_rkey_h key_;
};

}  // namespace shardpull
