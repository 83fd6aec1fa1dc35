#include "transport/ucx/ucx_lane.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/log.h"
#include "tensor/copy_kernels.h"

namespace shardpull {
namespace {

constexpr int kRoundsBeforeTasks = 16;  // of UCX's progress
constexpr int kWaitMs = 1000;
// A read of more than a fragment lands in memory that no cache holds, and where it is not read soon.
constexpr std::size_t kStreamedBytes = 256u << 10;

Status host_error(std::string message) {
  return Status(StatusCode::kFailedPrecondition, std::move(message),
                {.reason = Reason::kHost, .fault = Fault::kHost});
}

void wake_by(const UniqueFd& event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof one);  // full: it is awake
}

}  // namespace

// ---- UcxWorker ----

Result<std::unique_ptr<UcxWorker>> UcxWorker::make(std::shared_ptr<UcxContext> context,
                                                   ucp_am_recv_callback_t handler, void* argument) {
  std::unique_ptr<UcxWorker> worker(new UcxWorker(std::move(context)));
  const UcxLibrary& ucx = worker->context_->ucx;
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  params.flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK;
  ucs_status_t status = ucx.ucp_worker_create(worker->context_->context, &params, &worker->handle_);
  if (status != UCS_OK) {
    worker->handle_ = nullptr;
    return ucx_error(ucx, status,
                     "no UCX worker (it needs /proc and /sys, and where it is not held to tcp 4 MiB of /dev/shm; "
                     "`shardpull doctor` says what is missing)");
  }
  status = ucx.ucp_worker_get_efd(worker->handle_, &worker->event_fd_);
  if (status != UCS_OK) return ucx_error(ucx, status, "UCX cannot wait for events with these transports");
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER | UCP_WORKER_ATTR_FIELD_ADDRESS;
  status = ucx.ucp_worker_query(worker->handle_, &attributes);
  if (status == UCS_OK) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(attributes.address);
    worker->address_.assign(bytes, bytes + attributes.address_length);
    ucx.ucp_worker_release_address(worker->handle_, attributes.address);
  }
  if (status != UCS_OK || attributes.max_am_header < kUcxHeaderBytes) {
    return host_error(fmt::format("UCX's headers hold {} bytes with these transports, not {}",
                                  attributes.max_am_header, kUcxHeaderBytes));
  }
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                     UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  param.id = kUcxActiveMessage;
  param.flags = UCP_AM_FLAG_WHOLE_MSG;
  param.cb = handler;
  param.arg = argument;
  status = ucx.ucp_worker_set_am_recv_handler(worker->handle_, &param);
  if (status != UCS_OK) return ucx_error(ucx, status, "UCX takes no handler");
  return worker;
}

UcxWorker::~UcxWorker() {
  if (handle_ != nullptr) context_->ucx.ucp_worker_destroy(handle_);
}

Result<bool> UcxWorker::arm() {
  const ucs_status_t armed = context_->ucx.ucp_worker_arm(handle_);
  if (armed == UCS_OK) return true;
  if (armed == UCS_ERR_BUSY) return false;
  return ucx_error(context_->ucx, armed, "UCX cannot wait");
}

ucs_status_t UcxWorker::connect(const std::byte* address, ucp_err_handler_cb_t on_error, void* argument,
                                ucp_ep_h* endpoint) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {on_error, argument};
  const ucs_status_t status = context_->ucx.ucp_ep_create(handle_, &params, endpoint);
  if (status != UCS_OK) *endpoint = nullptr;
  return status;
}

// ---- data ----

ucs_status_t take_ucx_data(UcxReads& reads, std::uint64_t key, const UcxFrame& frame, void* data,
                           std::size_t length, bool rendezvous,
                           const std::function<void(UcxReads::Part part)>& receive) {
  std::optional<UcxReads::Part> part = reads.place(key, frame, length, /*copied=*/!rendezvous);
  if (!part) return UCS_OK;  // of a rendezvous UCX tells the sender
  if (!rendezvous) {
    const auto* const bytes = static_cast<const std::byte*>(data);
    if (part->target != nullptr) {
      part->target->take(part->place, {bytes, length});
      part->target.reset();  // before the end of the read may be told
    } else if (length >= kStreamedBytes) {
      stream_copy(part->local, bytes, length);
      end_streaming();
    } else {
      std::memcpy(part->local, bytes, length);
    }
    reads.landed(*part, {});
    return UCS_OK;
  }
  receive(std::move(*part));
  return UCS_INPROGRESS;
}

// ---- UcxLane ----

Result<std::unique_ptr<UcxLane>> UcxLane::start(std::shared_ptr<UcxContext> context, UcxReads& reads) {
  std::unique_ptr<UcxLane> lane(new UcxLane(std::move(context), reads));
  Result<std::unique_ptr<UcxWorker>> worker =
      UcxWorker::make(lane->context_, &UcxLane::on_active_message, lane.get());
  if (!worker.ok()) return worker.status();
  lane->worker_ = std::move(worker).value();
  lane->epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  lane->wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{};
  event.events = EPOLLIN;
  if (!lane->epoll_ || !lane->wake_ ||
      epoll_ctl(lane->epoll_.get(), EPOLL_CTL_ADD, lane->worker_->event_fd(), &event) != 0 ||
      epoll_ctl(lane->epoll_.get(), EPOLL_CTL_ADD, lane->wake_.get(), &event) != 0) {
    return host_error(
        fmt::format("a worker of the ucx transport cannot wait for events: {}; with too many open "
                    "files, raise the limit with: ulimit -n",
                    std::strerror(errno)));
  }
  lane->thread_ = std::thread([raw = lane.get()] { raw->run(); });
  return lane;
}

UcxLane::~UcxLane() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  wake_by(wake_);
  thread_.join();
}

void UcxLane::add(Task task) {
  bool first = false;
  {
    MutexLock lock(mutex_);
    first = tasks_.empty();
    tasks_.push_back(std::move(task));
    has_tasks_.store(true, std::memory_order_release);
  }
  if (first) wake_by(wake_);
}

void UcxLane::connect(EndpointId endpoint, std::string peer, std::vector<std::byte> address) {
  add({.kind = Task::Kind::kConnect,
       .endpoint = endpoint,
       .peer = std::move(peer),
       .address = std::move(address)});
}

void UcxLane::send(UcxOperation* operation, const std::byte* from, std::uint32_t flags) {
  add({.kind = Task::Kind::kSend,
       .endpoint = operation->endpoint,
       .operation = operation,
       .from = from,
       .flags = flags});
}

void UcxLane::close(UcxOperation* operation, std::uint32_t flags) {
  add({.kind = Task::Kind::kClose, .endpoint = operation->endpoint, .operation = operation, .flags = flags});
}

std::vector<UcxLane::Done> UcxLane::take_done() {
  MutexLock lock(mutex_);
  has_done_.store(false, std::memory_order_relaxed);
  return std::exchange(done_, {});
}

void UcxLane::done(UcxOperation* operation, ucs_status_t status) {
  {
    MutexLock lock(mutex_);
    done_.push_back({.operation = operation, .status = status});
    has_done_.store(true, std::memory_order_release);
  }
  context_->wake();
}

void UcxLane::answered(UcxOperation* operation, ucs_status_ptr_t answer) {
  if (!UCS_PTR_IS_PTR(answer)) return done(operation, UCS_PTR_RAW_STATUS(answer));
  operation->request = answer;
  if (operation->kind == UcxOperation::Kind::kClose) closing_.insert(operation);
}

void UcxLane::on_sent(void* request, ucs_status_t status, void* data) {
  auto* const operation = static_cast<UcxOperation*>(data);
  UcxLane& self = *operation->lane;
  self.closing_.erase(operation);
  self.done(operation, status);  // which gives it away
  self.ucx_.ucp_request_free(request);
}

void UcxLane::perform(Task& task) {
  const auto peer = peers_.find(task.endpoint);
  if (task.kind == Task::Kind::kConnect) {
    Peer made{.handle = nullptr, .name = std::move(task.peer)};
    const ucs_status_t status = worker_->connect(task.address.data(), &UcxLane::on_error, this, &made.handle);
    if (status != UCS_OK) {
      reads_.fail_endpoint(
          task.endpoint,
          ucx_error(ucx_, status, fmt::format("UCX finds no further way to {}", made.name), made.name));
      return context_->wake();
    }
    by_handle_[made.handle] = task.endpoint;
    peers_[task.endpoint] = std::move(made);
    return;
  }
  if (peer == peers_.end()) {
    return done(task.operation, task.kind == Task::Kind::kClose ? UCS_OK : UCS_ERR_NOT_CONNECTED);
  }
  task.operation->lane = this;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.user_data = task.operation;
  param.cb.send = &UcxLane::on_sent;
  const ucp_ep_h handle = peer->second.handle;
  if (task.kind == Task::Kind::kClose) {
    by_handle_.erase(handle);
    peers_.erase(peer);
    param.flags = task.flags;
    return answered(task.operation, ucx_.ucp_ep_close_nbx(handle, &param));
  }
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
  param.memh = task.operation->block->handle();
  param.flags = task.flags;
  answered(task.operation,
           ucx_.ucp_am_send_nbx(handle, kUcxActiveMessage, task.operation->header.data(), kUcxHeaderBytes,
                                task.from, static_cast<std::size_t>(task.operation->bytes), &param));
}

void UcxLane::on_error(void* data, ucp_ep_h handle, ucs_status_t status) {
  auto& self = *static_cast<UcxLane*>(data);
  const auto found = self.by_handle_.find(handle);
  if (found == self.by_handle_.end()) return;
  const std::string& name = self.peers_[found->second].name;
  self.reads_.fail_endpoint(
      found->second, ucx_error(self.ucx_, status, fmt::format("the connection to {} was lost", name), name));
  self.context_->wake();
}

ucs_status_t UcxLane::on_active_message(void* data_of_lane, const void* header, std::size_t header_length,
                                        void* data, std::size_t length, const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<UcxLane*>(data_of_lane);
  if (header_length != kUcxHeaderBytes) return UCS_OK;
  std::uint64_t key = 0;
  std::memcpy(&key, header, sizeof key);
  const auto* const rest = static_cast<const std::byte*>(header) + 2 * sizeof key;
  // Nothing but data comes here; who sends something else is nobody's peer.
  if (!is_ucx_frame(rest)) return UCS_OK;
  const Result<UcxFrame> frame = decode_ucx_frame(rest, kUcxFrameBytes);
  if (!frame.ok() || frame->kind != UcxFrameKind::kData) return UCS_OK;
  const ucs_status_t answer = take_ucx_data(
      self.reads_, key, *frame, data, length, (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0,
      [&](UcxReads::Part part) {
        auto receive = std::make_unique<Receive>(Receive{.lane = &self, .part = std::move(part)});
        Receive* const begun = receive.get();
        self.receives_.emplace(begun, std::move(receive));
        ucp_request_param_t receive_param{};
        receive_param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
        receive_param.user_data = begun;
        receive_param.cb.recv_am = &UcxLane::on_received;
        const ucs_status_ptr_t begins = self.ucx_.ucp_am_recv_data_nbx(
            self.worker_->handle(), data, begun->part.local, length, &receive_param);
        if (!UCS_PTR_IS_PTR(begins)) self.received(begun, UCS_PTR_RAW_STATUS(begins));
      });
  if (self.reads_.has_news()) self.context_->wake();
  return answer;
}

void UcxLane::on_received(void* request, ucs_status_t status, std::size_t length, void* data) {
  auto* const receive = static_cast<Receive*>(data);
  UcxLane& self = *receive->lane;
  if (status == UCS_OK && length != receive->part.bytes) status = UCS_ERR_MESSAGE_TRUNCATED;
  self.received(receive, status);
  self.ucx_.ucp_request_free(request);
  if (self.reads_.has_news()) self.context_->wake();
}

void UcxLane::received(Receive* raw, ucs_status_t status) {
  const auto found = receives_.find(raw);
  const std::unique_ptr<Receive> receive = std::move(found->second);
  receives_.erase(found);
  reads_.landed(receive->part,
                status == UCS_OK ? Status() : ucx_error(ucx_, status, "a part of a read did not arrive"));
}

void UcxLane::wait() {
  const Result<bool> armed = worker_->arm();
  if (armed.ok() && !*armed) return;
  if (!armed.ok()) log_warn("{}", armed.status().message());
  std::array<epoll_event, 2> events;
  epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), kWaitMs);
  std::uint64_t ignored = 0;
  [[maybe_unused]] const ssize_t got = read(wake_.get(), &ignored, sizeof ignored);
}

void UcxLane::run() {
  for (;;) {
    if (has_tasks_.load(std::memory_order_acquire)) {
      std::vector<Task> tasks;
      {
        MutexLock lock(mutex_);
        tasks.swap(tasks_);
        has_tasks_.store(false, std::memory_order_relaxed);
      }
      for (Task& task : tasks) perform(task);
    }
    unsigned moved = 0;
    for (int i = 0; i < kRoundsBeforeTasks; ++i) {
      const unsigned count = worker_->progress();
      moved += count;
      if (count == 0) break;
    }
    if (moved != 0 || has_tasks_.load(std::memory_order_acquire)) continue;
    if (stopping_) break;
    wait();
  }
  // UCX ends a process that leaves it a request of this kind.
  for (const UcxOperation* const operation : closing_) ucx_.ucp_request_free(operation->request);
  worker_.reset();
}

}  // namespace shardpull
