#include "transport/ucx/ucx_reads.h"

#include <algorithm>

#include <fmt/format.h>

namespace shardpull {

void UcxReads::admit(std::uint64_t key, EndpointId endpoint, std::string peer, FleetToken token,
                     Incarnation incarnation) {
  MutexLock lock(mutex_);
  peers_[key] = {.endpoint = endpoint, .name = std::move(peer), .token = token, .incarnation = incarnation};
}

void UcxReads::dismiss(std::uint64_t key) {
  MutexLock lock(mutex_);
  peers_.erase(key);
}

void UcxReads::fail_endpoint(EndpointId endpoint, Status why) {
  MutexLock lock(mutex_);
  failures_.emplace_back(endpoint, std::move(why));
}

std::uint64_t UcxReads::add(Read read) {
  MutexLock lock(mutex_);
  reads_[++last_].read = std::move(read);
  return last_;
}

void UcxReads::settle(Settled read) {
  MutexLock lock(mutex_);
  settled_.push_back(std::move(read));
}

std::optional<UcxReads::Part> UcxReads::next_part(std::uint64_t number, std::uint64_t max_bytes) {
  MutexLock lock(mutex_);
  const auto found = reads_.find(number);
  if (found == reads_.end()) return std::nullopt;
  Entry& entry = found->second;
  if (!entry.failed.ok() || entry.asked == entry.read.bytes) return std::nullopt;
  Part part{.read = number,
            .bytes = std::min(max_bytes, entry.read.bytes - entry.asked),
            .offset = entry.read.offset + entry.asked,
            .local = entry.read.local + entry.asked,
            .target = nullptr,
            .place = entry.asked,
            .copied = false,
            .region = entry.read.region};
  entry.asked += part.bytes;
  ++entry.operations;
  return part;
}

std::optional<UcxReads::Part> UcxReads::place(std::uint64_t key, const UcxFrame& frame, std::uint64_t length,
                                              bool copied) {
  MutexLock lock(mutex_);
  const auto peer = peers_.find(key);
  if (peer == peers_.end()) return std::nullopt;
  const EndpointId endpoint = peer->second.endpoint;
  const std::string& name = peer->second.name;
  if (frame.token != peer->second.token || frame.incarnation != peer->second.incarnation) {
    failures_.emplace_back(
        endpoint, Status(StatusCode::kUnauthenticated,
                         fmt::format("{} sent data with another token or incarnation than its hello", name),
                         {.reason = Reason::kBadToken, .fault = Fault::kPeer, .peer = name}));
    return std::nullopt;
  }
  const auto found = reads_.find(frame.read);
  if (found == reads_.end() || !found->second.failed.ok()) return std::nullopt;
  Entry& entry = found->second;
  const std::uint64_t bytes = entry.read.bytes;
  if (entry.read.endpoint != endpoint || frame.bytes != length || frame.offset > bytes ||
      length > bytes - frame.offset || length > bytes - entry.asked) {
    failures_.emplace_back(
        endpoint,
        Status(StatusCode::kDataLoss,
               fmt::format("{} sent {} bytes at offset {} of a read of {} bytes, of which {} are there", name,
                           length, frame.offset, bytes, entry.asked),
               {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = name}));
    return std::nullopt;
  }
  if (entry.read.target != nullptr && !copied) {
    failures_.emplace_back(
        endpoint,
        Status(StatusCode::kDataLoss,
               fmt::format("{} sent a part of a read by rendezvous, which is not for this transport", name),
               {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .peer = name}));
    return std::nullopt;
  }
  entry.asked += length;
  ++(copied ? entry.copies : entry.operations);
  return Part{.read = frame.read,
              .bytes = length,
              .offset = entry.read.offset + frame.offset,
              .local = entry.read.target == nullptr ? entry.read.local + frame.offset : nullptr,
              .target = entry.read.target,
              .place = frame.offset,
              .copied = copied,
              .region = nullptr};
}

void UcxReads::landed(const Part& part, Status status) {
  MutexLock lock(mutex_);
  const auto found = reads_.find(part.read);
  if (found == reads_.end()) return;
  Entry& entry = found->second;
  std::uint32_t& writers = part.copied ? entry.copies : entry.operations;
  if (writers > 0) --writers;
  if (status.ok()) {
    entry.landed += part.bytes;
  } else if (entry.failed.ok()) {
    entry.failed = std::move(status);
  }
  settle_if_over(found);
}

void UcxReads::refused(std::uint64_t number, EndpointId endpoint, Status why) {
  MutexLock lock(mutex_);
  const auto found = reads_.find(number);
  if (found == reads_.end() || found->second.read.endpoint != endpoint) return;
  if (found->second.failed.ok()) found->second.failed = std::move(why);
  settle_if_over(found);
}

bool UcxReads::end_all(EndpointId endpoint, const Status& why) {
  MutexLock lock(mutex_);
  std::vector<std::uint64_t> over;
  for (const auto& [number, entry] : reads_) {
    if (entry.read.endpoint == endpoint) over.push_back(number);
  }
  bool all = true;
  for (const std::uint64_t number : over) {
    const auto found = reads_.find(number);
    found->second.operations = 0;
    if (found->second.failed.ok()) found->second.failed = why;
    all = all && found->second.copies == 0;
    settle_if_over(found);
  }
  return all;
}

void UcxReads::settle_if_over(std::unordered_map<std::uint64_t, Entry>::iterator found) {
  Entry& entry = found->second;
  if (entry.operations > 0 || entry.copies > 0 || (entry.failed.ok() && entry.landed < entry.read.bytes))
    return;
  settled_.push_back({.endpoint = entry.read.endpoint,
                      .token = entry.read.token,
                      .bytes = entry.read.bytes,
                      .status = std::move(entry.failed)});
  reads_.erase(found);
}

bool UcxReads::has_news() const {
  MutexLock lock(mutex_);
  return !settled_.empty() || !failures_.empty();
}

std::vector<UcxReads::Settled> UcxReads::take_settled() {
  MutexLock lock(mutex_);
  return std::exchange(settled_, {});
}

std::vector<std::pair<EndpointId, Status>> UcxReads::take_failures() {
  MutexLock lock(mutex_);
  return std::exchange(failures_, {});
}

}  // namespace shardpull
