#include "transport/local_endpoint.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "transport/local_frame.h"

namespace shardpull {
namespace {

constexpr std::size_t kFirstBufferBytes = 64u << 10;
constexpr std::size_t kKeptBufferBytes = 1u << 20;  // a larger buffer is given back when it runs empty
constexpr std::size_t kMaxFramesPerSend = 32;
constexpr std::size_t kMaxDescriptorsPerReceive = 4;  // an honest peer sends one with a frame
constexpr std::size_t kMaxUnclaimedDescriptors = 64;

Status broken(std::string message) {
  return Status(StatusCode::kUnavailable, std::move(message),
                {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .retryable = false});
}

}  // namespace

LocalEndpoint::LocalEndpoint(EndpointId id, UniqueFd fd, pid_t pid, std::string peer, bool accepted)
    : regions(peer), id_(id), fd_(std::move(fd)), pid_(pid), peer_(std::move(peer)), accepted_(accepted) {}

void LocalEndpoint::queue(std::vector<std::byte> frame, SentDescriptor descriptor) {
  if (!send_error_.ok()) return;
  queued_bytes_ += frame.size();
  outgoing_.push_back({.bytes = std::move(frame), .sent = 0, .descriptor = std::move(descriptor)});
}

Status LocalEndpoint::flush() {
  must_retry_ = false;
  while (send_error_.ok() && !outgoing_.empty()) {
    std::array<iovec, kMaxFramesPerSend> parts;
    std::size_t count = 0;
    msghdr message{};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    for (Outgoing& frame : outgoing_) {
      if (count == parts.size() || (frame.descriptor.fd >= 0 && count > 0)) break;
      parts[count++] = {frame.bytes.data() + frame.sent, frame.bytes.size() - frame.sent};
      if (frame.descriptor.fd >= 0) {
        message.msg_control = control.data();
        message.msg_controllen = control.size();
        cmsghdr* const header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        const int fd = frame.descriptor.fd;
        std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
        break;
      }
    }
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      const int error = errno;
      if (error == EINTR) continue;
      if (error == EAGAIN || error == EWOULDBLOCK) break;
      if (error == ETOOMANYREFS || error == ENOBUFS || error == ENOMEM) {
        must_retry_ = true;
        break;
      }
      send_error_ = broken(fmt::format("{} takes no more messages: {}", peer_, std::strerror(error)));
      outgoing_.clear();
      queued_bytes_ = 0;
      break;
    }
    queued_bytes_ -= static_cast<std::uint64_t>(sent);
    auto rest = static_cast<std::size_t>(sent);
    if (rest > 0) outgoing_.front().descriptor = {};  // the descriptor went with the first byte
    while (rest > 0) {
      Outgoing& frame = outgoing_.front();
      const std::size_t step = std::min(rest, frame.bytes.size() - frame.sent);
      frame.sent += step;
      rest -= step;
      if (frame.sent == frame.bytes.size()) outgoing_.pop_front();
    }
  }
  return send_error_;
}

Result<LocalEndpoint::Received> LocalEndpoint::receive() {
  if (end_ == buffer_.size()) reserve(end_ - begin_ + 1);
  iovec part{buffer_.data() + end_, buffer_.size() - end_};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptorsPerReceive)> control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    const int error = errno;
    if (error == EAGAIN || error == EWOULDBLOCK) return Received::kNothing;
    if (error == ECONNRESET) return Received::kEnd;  // it closed before it read all of ours
    return broken(fmt::format("the connection to {} broke: {}", peer_, std::strerror(error)));
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      descriptors_.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("descriptors sent by {} did not arrive: this process has no more, raise the "
                              "limit with: ulimit -n; "
                              "or the peer sent more than one with a message",
                              peer_),
                  {.reason = Reason::kLimit, .fault = Fault::kHost, .peer = peer_});
  }
  if (descriptors_.size() > kMaxUnclaimedDescriptors) {
    return Status(StatusCode::kDataLoss, fmt::format("{} sent descriptors without grants", peer_),
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = peer_});
  }
  if (got == 0) return Received::kEnd;
  end_ += static_cast<std::size_t>(got);
  return Received::kBytes;
}

Result<std::optional<LocalEndpoint::Frame>> LocalEndpoint::next_frame() {
  const std::size_t have = end_ - begin_;
  if (have == 0) {
    begin_ = end_ = 0;
    if (buffer_.size() > kKeptBufferBytes) {
      buffer_.resize(kFirstBufferBytes);
      buffer_.shrink_to_fit();
    }
    return std::optional<Frame>();
  }
  const std::byte* const data = buffer_.data() + begin_;
  std::size_t size = kHotHeaderBytes;
  if (have >= sizeof(kHotMagic) && !is_local_frame(data)) {
    // Foreign bytes are refused by their first four, before more of them are waited for.
    std::uint32_t magic = 0;
    std::memcpy(&magic, data, sizeof magic);
    if (magic != kHotMagic || have >= kHotHeaderBytes) {
      SHARDPULL_ASSIGN_OR_RETURN(const HotHeader header, decode_hot_header(data, have));
      size += header.length;
    }
  }
  if (have < size) {
    // Room for the whole frame is made as its bytes arrive, so that a header alone cannot claim memory.
    if (buffer_.size() - begin_ < size && end_ == buffer_.size()) reserve(std::min(size, have * 2));
    return std::optional<Frame>();
  }
  begin_ += size;
  return std::optional<Frame>(Frame{.bytes = {data, size}});
}

UniqueFd LocalEndpoint::take_descriptor() {
  if (descriptors_.empty()) return {};
  UniqueFd fd = std::move(descriptors_.front());
  descriptors_.pop_front();
  return fd;
}

void LocalEndpoint::reserve(std::size_t wanted) {
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (buffer_.size() < wanted) buffer_.resize(std::max({wanted, kFirstBufferBytes, buffer_.size() * 2}));
}

}  // namespace shardpull
