// UcxWorker: one of UCX's workers. UcxLane: one more of them, with a thread of its own, over which data of
// reads travels beside what the transport's first worker carries.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "shardpull/status.h"
#include "transport/ucx/ucx_endpoint.h"
#include "transport/ucx/ucx_memory.h"
#include "transport/ucx/ucx_reads.h"

namespace shardpull {

// The one active message that is used.
inline constexpr unsigned kUcxActiveMessage = 1;

// Thread-compatible.
class UcxWorker {
 public:
  // Makes a worker whose messages go to `handler`, with `argument`, from within progress().
  static Result<std::unique_ptr<UcxWorker>> make(std::shared_ptr<UcxContext> context,
                                                 ucp_am_recv_callback_t handler, void* argument);
  // Nothing of the caller's is touched any more after it.
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h handle() const { return handle_; }
  int event_fd() const { return event_fd_; }
  const std::vector<std::byte>& address() const { return address_; }
  unsigned progress() { return context_->ucx.ucp_worker_progress(handle_); }
  // True when event_fd() will tell of the next thing to do, false when there is something to do already.
  Result<bool> arm();
  // An endpoint with peer error handling to the worker at `address`; `on_error` is called with `argument`.
  ucs_status_t connect(const std::byte* address, ucp_err_handler_cb_t on_error, void* argument,
                       ucp_ep_h* endpoint);

 private:
  explicit UcxWorker(std::shared_ptr<UcxContext> context) : context_(std::move(context)) {}

  const std::shared_ptr<UcxContext> context_;
  ucp_worker_h handle_ = nullptr;
  int event_fd_ = -1;
  std::vector<std::byte> address_;
};

// Does what the transport asks for, in order, and wakes it when something is done. What arrives is put where
// UcxReads says. Thread-safe, but that all calls come from one thread at a time.
class UcxLane {
 public:
  // `reads` outlives the lane.
  static Result<std::unique_ptr<UcxLane>> start(std::shared_ptr<UcxContext> context, UcxReads& reads);
  // Ends its thread. Every endpoint has been closed.
  ~UcxLane();
  UcxLane(const UcxLane&) = delete;
  UcxLane& operator=(const UcxLane&) = delete;

  const std::vector<std::byte>& address() const { return worker_->address(); }
  // An endpoint that cannot be made, or is lost, fails in `reads`.
  void connect(EndpointId endpoint, std::string peer, std::vector<std::byte> address);
  // Sends a fragment from `from`, or closes the operation's endpoint. The operation is the caller's again
  // when take_done() returns it.
  void send(UcxOperation* operation, const std::byte* from, std::uint32_t flags);
  void close(UcxOperation* operation, std::uint32_t flags);

  struct Done {
    UcxOperation* operation = nullptr;
    ucs_status_t status = UCS_OK;
  };
  bool has_done() const { return has_done_.load(std::memory_order_acquire); }
  std::vector<Done> take_done();

 private:
  struct Task {
    enum class Kind { kConnect, kSend, kClose } kind = Kind::kConnect;
    EndpointId endpoint = 0;
    std::string peer = {};
    std::vector<std::byte> address = {};
    UcxOperation* operation = nullptr;
    const std::byte* from = nullptr;
    std::uint32_t flags = 0;
  };
  struct Peer {
    ucp_ep_h handle = nullptr;
    std::string name;
  };
  struct Receive {
    UcxLane* lane = nullptr;
    UcxReads::Part part;
  };

  UcxLane(std::shared_ptr<UcxContext> context, UcxReads& reads)
      : context_(std::move(context)), ucx_(context_->ucx), reads_(reads) {}
  void add(Task task);
  void run();
  void perform(Task& task);
  void answered(UcxOperation* operation, ucs_status_ptr_t answer);
  void done(UcxOperation* operation, ucs_status_t status);
  void wait();

  static void on_error(void* self, ucp_ep_h handle, ucs_status_t status);
  static ucs_status_t on_active_message(void* self, const void* header, std::size_t header_length, void* data,
                                        std::size_t length, const ucp_am_recv_param_t* param);
  static void on_sent(void* request, ucs_status_t status, void* operation);
  static void on_received(void* request, ucs_status_t status, std::size_t length, void* receive);
  void received(Receive* receive, ucs_status_t status);

  const std::shared_ptr<UcxContext> context_;
  const UcxLibrary& ucx_;
  UcxReads& reads_;
  std::unique_ptr<UcxWorker> worker_;
  UniqueFd epoll_, wake_;

  Mutex mutex_;
  std::vector<Task> tasks_ SHARDPULL_GUARDED_BY(mutex_);
  std::vector<Done> done_ SHARDPULL_GUARDED_BY(mutex_);
  std::atomic<bool> has_tasks_{false}, has_done_{false}, stopping_{false};

  // Of the lane's thread.
  std::unordered_map<EndpointId, Peer> peers_;
  std::unordered_map<ucp_ep_h, EndpointId> by_handle_;
  std::unordered_map<Receive*, std::unique_ptr<Receive>> receives_;
  std::unordered_set<UcxOperation*> closing_;

  std::thread thread_;
};

// Takes the data of a read as it arrives: copies it to where it belongs, or lets `receive` begin to. The
// answer to UCX.
ucs_status_t take_ucx_data(UcxReads& reads, std::uint64_t key, const UcxFrame& frame, void* data,
                           std::size_t length, bool rendezvous,
                           const std::function<void(UcxReads::Part part)>& receive);

}  // namespace shardpull
