#include "runtime/transport_probe.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/random.h"
#include "base/status_macros.h"
#include "runtime/hot_transport.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kReadBytes = 8u << 20;
constexpr std::size_t kReadsAtOnce = 4;
constexpr std::int64_t kStepNs = 10 * kNanosPerMilli;
constexpr std::int64_t kGoodbyeNs = kNanosPerSecond / 2;

using Bytes = std::unique_ptr<std::byte[]>;

void fill(std::byte* data, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = splitmix64(at);
    std::memcpy(data + at, &word, std::min<std::uint64_t>(sizeof word, bytes - at));
  }
}

// The first byte that is not as fill() made it, or nothing.
std::optional<std::uint64_t> first_difference(const std::byte* data, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = splitmix64(at);
    if (std::memcmp(data + at, &word, std::min<std::uint64_t>(sizeof word, bytes - at)) != 0) return at;
  }
  return std::nullopt;
}

// The side whose memory is read: it grants it to whoever says hello. Used by one thread at a time.
class Owner final : public TransportSink {
 public:
  Owner(Transport& transport, std::shared_ptr<ExportedMemory> memory)
      : transport_(transport), memory_(std::move(memory)) {}

  void on_accepted(EndpointId) override {}
  void on_message(EndpointId endpoint, const HotHeader&, const std::byte*) override {
    Status status = transport_.grant(endpoint, memory_);
    if (status.ok()) status = transport_.send(endpoint, {.type = HotType::kHelloReply}, nullptr, 0);
    if (!status.ok()) transport_.close(endpoint);  // the reader sees that
  }
  void on_closed(EndpointId, const Status&) override {}
  void on_read_done(ReadToken, const Status&) override {}

 private:
  Transport& transport_;
  const std::shared_ptr<ExportedMemory> memory_;
};

class Reader final : public TransportSink {
 public:
  void on_accepted(EndpointId) override {}
  void on_message(EndpointId, const HotHeader&, const std::byte*) override { granted = true; }
  void on_closed(EndpointId, const Status& why) override { fail(why); }
  void on_read_done(ReadToken, const Status& status) override {
    --in_flight;
    fail(status);
  }

  bool granted = false;
  std::size_t in_flight = 0;
  Status failure;

 private:
  void fail(const Status& status) {
    if (failure.ok()) failure = status;
  }
};

// Drives a transport on a thread of its own until this object goes.
class Driven {
 public:
  Driven(Transport& transport, TransportSink& sink)
      : transport_(transport), thread_([this, &sink] {
          while (!stop_.load(std::memory_order_acquire)) {
            if (!transport_.progress(kStepNs, sink).ok()) return;  // the other side's wait is bounded
          }
        }) {}
  ~Driven() {
    stop_.store(true, std::memory_order_release);
    transport_.wake();
    thread_.join();
  }
  Driven(const Driven&) = delete;
  Driven& operator=(const Driven&) = delete;

 private:
  std::atomic<bool> stop_{false};
  Transport& transport_;
  std::thread thread_;
};

}  // namespace

Result<TransferRate> probe_transport(std::unique_ptr<Transport> owner, std::unique_ptr<Transport> reader,
                                     const ProbeOptions& options) {
  const SystemClock& clock = SystemClock::instance();
  const std::string name = owner->name();
  const std::uint64_t bytes = options.buffer_bytes;
  SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<ExportedMemory> memory,
                             owner->allocate(bytes, fmt::format("a test of transport {}", name)));
  fill(memory->ref().address, bytes);
  const RemoteRef all{memory->ref().region, memory->ref().generation, 0, bytes};
  const Bytes landed = std::make_unique<std::byte[]>(bytes);  // zeroed, so that its pages are there
  // What reads into `landed` goes before it.
  std::unique_ptr<Transport> from = std::move(owner), to = std::move(reader);

  SHARDPULL_ASSIGN_OR_RETURN(const std::string address, from->listen());
  Owner owner_sink(*from, std::move(memory));
  const Driven owner_thread(*from, owner_sink);
  SHARDPULL_ASSIGN_OR_RETURN(const EndpointId endpoint, to->connect(address, options.timeout_ns));
  SHARDPULL_RETURN_IF_ERROR(to->send(endpoint, {.type = HotType::kHello}, nullptr, 0));

  Reader sink;
  std::int64_t give_up_ns = clock.now_ns() + options.timeout_ns;
  const auto late = [&](std::string_view what) {
    return Status(
        StatusCode::kDeadlineExceeded,
        fmt::format("transport {}: {} within {} ms", name, what, options.timeout_ns / kNanosPerMilli),
        {.reason = Reason::kStalled, .fault = Fault::kHost});
  };
  while (!sink.granted) {
    if (clock.now_ns() > give_up_ns) return late("two sides on this host did not meet");
    SHARDPULL_RETURN_IF_ERROR(to->progress(kStepNs, sink));
    SHARDPULL_RETURN_IF_ERROR(sink.failure);
  }

  TransferRate rate;
  const std::int64_t begin_ns = clock.now_ns();
  give_up_ns = begin_ns + options.timeout_ns;
  ReadToken token = 0;
  std::uint64_t asked = 0;  // bytes, over all rounds
  for (;;) {
    const bool more = asked < bytes || clock.now_ns() - begin_ns < options.budget_ns;
    while (more && sink.in_flight < kReadsAtOnce) {
      const std::uint64_t at = asked % bytes;
      // Two reads never write the same bytes at once: a round that begins again waits for the one before.
      if (at == 0 && asked != 0 && sink.in_flight != 0) break;
      const std::uint64_t part = std::min(kReadBytes, bytes - at);
      ++sink.in_flight;
      to->read(endpoint, {all.region, all.generation, at, part}, landed.get() + at, ++token);
      asked += part;
    }
    if (!more && sink.in_flight == 0) break;
    if (clock.now_ns() > give_up_ns) return late("reads did not end");
    SHARDPULL_RETURN_IF_ERROR(to->progress(kStepNs, sink));
    SHARDPULL_RETURN_IF_ERROR(sink.failure);
  }
  rate.ns = clock.now_ns() - begin_ns;
  rate.bytes = asked;
  if (const auto at = first_difference(landed.get(), bytes)) {
    return Status(StatusCode::kDataLoss,
                  fmt::format("transport {}: of {} bytes that were read, those at {} are not what was sent",
                              name, bytes, *at),
                  {.reason = Reason::kCorrupt, .fault = Fault::kHost});
  }
  // While both sides listen, so that neither destructor waits for the other.
  to->close(endpoint);
  for (give_up_ns = clock.now_ns() + kGoodbyeNs;
       to->counters().endpoints > 0 && clock.now_ns() < give_up_ns;) {
    SHARDPULL_RETURN_IF_ERROR(to->progress(kNanosPerMilli, sink));
  }
  return rate;
}

Result<TransferRate> probe_transport(TransportKind kind, const std::string& directory,
                                     const ProbeOptions& options) {
  FleetOptions fleet;
  fleet.directory = directory;
  fleet.token = random_nonzero_u64();
  fleet.transport = kind;
  SHARDPULL_ASSIGN_OR_RETURN(auto owner,
                             make_hot_transport(fleet, {Role::kTrainer, 0}, random_nonzero_u64()));
  SHARDPULL_ASSIGN_OR_RETURN(auto reader,
                             make_hot_transport(fleet, {Role::kWorker, 0}, random_nonzero_u64()));
  return probe_transport(std::move(owner), std::move(reader), options);
}

TransferRate probe_memcpy(const ProbeOptions& options) {
  const SystemClock& clock = SystemClock::instance();
  const Bytes from = std::make_unique<std::byte[]>(options.buffer_bytes);
  const Bytes to = std::make_unique<std::byte[]>(options.buffer_bytes);
  fill(from.get(), options.buffer_bytes);
  TransferRate rate;
  const std::int64_t begin_ns = clock.now_ns();
  do {
    std::memcpy(to.get(), from.get(), options.buffer_bytes);
    asm volatile("" : : "r"(to.get()) : "memory");  // nobody reads the copies, which must be made
    rate.bytes += options.buffer_bytes;
    rate.ns = clock.now_ns() - begin_ns;
  } while (rate.ns < options.budget_ns);
  return rate;
}

}  // namespace shardpull
