// The shm transport against the limits of the same run: reads and mapped copies beside BM_memcpy, a pull and
// its answer beside a bare round trip over a unix socket.
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "base/clock.h"
#include "transport/shm/shm_transport.h"

namespace shardpull {
namespace {

constexpr std::int64_t kWait = kNanosPerMilli * 100;

class Peer final : public TransportSink {
 public:
  Peer(const std::string& directory, const std::string& name, Incarnation incarnation)
      : transport(
            std::move(
                make_shm_transport(
                    {.directory = directory, .token = 1, .incarnation = incarnation, .self_name = name}))
                .value()) {}
  void on_accepted(EndpointId endpoint) override { accepted = endpoint; }
  void on_message(EndpointId endpoint, const HotHeader&, const std::byte*) override {
    ++messages;
    if (echo) transport->send(endpoint, {.type = HotType::kReady}, nullptr, 0).ignore();
  }
  void on_closed(EndpointId, const Status&) override {}
  void on_read_done(ReadToken, const Status&) override { ++reads; }
  void progress_until(const std::function<bool()>& done) {
    while (!done()) transport->progress(kWait, *this).ignore();
  }

  std::unique_ptr<Transport> transport;
  EndpointId accepted = 0;
  std::uint64_t messages = 0, reads = 0;
  bool echo = false;
};

// A producer on its own thread, which answers every message, and a consumer on the benchmark's.
class Fleet {
 public:
  explicit Fleet(std::uint64_t bytes) {
    std::string name = (std::filesystem::temp_directory_path() / "shardpull-bench-XXXXXX").string();
    directory_ = mkdtemp(name.data());
    producer_ = std::make_unique<Peer>(directory_, "producer", 1);
    consumer = std::make_unique<Peer>(directory_, "consumer", 2);
    endpoint = consumer->transport->connect(producer_->transport->listen().value(), kNanosPerSecond).value();
    consumer->transport->send(endpoint, {.type = HotType::kHello}, nullptr, 0).ignore();
    producer_->progress_until([&] { return producer_->messages == 1; });
    if (bytes > 0) {
      memory_ = producer_->transport->allocate(bytes, "a benchmark").value();
      std::memset(memory_->ref().address, 1, bytes);
      remote = {.region = memory_->ref().region,
                .generation = memory_->ref().generation,
                .offset = 0,
                .bytes = bytes};
      producer_->transport->grant(producer_->accepted, memory_).ignore();
    }
    producer_->transport->send(producer_->accepted, {.type = HotType::kReady}, nullptr, 0).ignore();
    consumer->progress_until([&] { return consumer->messages == 1; });
    producer_->echo = true;
    thread_ = std::thread([this] {
      while (!stop_) producer_->transport->progress(kWait, *producer_).ignore();
    });
  }
  ~Fleet() {
    stop_ = true;
    producer_->transport->wake();
    thread_.join();
    consumer.reset();
    producer_.reset();
    std::filesystem::remove_all(directory_);
  }

  std::unique_ptr<Peer> consumer;
  EndpointId endpoint = 0;
  RemoteRef remote;

 private:
  std::string directory_;
  std::unique_ptr<Peer> producer_;
  std::shared_ptr<ExportedMemory> memory_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void BM_memcpy(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  std::vector<std::byte> from(bytes, std::byte{1}), to(bytes, std::byte{2});
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_memcpy)->Arg(1 << 16)->Arg(1 << 20)->Arg(64 << 20)->UseRealTime();

// A read of one serve slot, from issue to on_read_done.
void BM_read(benchmark::State& state) {
  Fleet fleet(static_cast<std::uint64_t>(state.range(0)));
  std::vector<std::byte> slot(fleet.remote.bytes, std::byte{2});
  for (auto _ : state) {
    const std::uint64_t before = fleet.consumer->reads;
    fleet.consumer->transport->read(fleet.endpoint, fleet.remote, slot.data(), 1);
    fleet.consumer->progress_until([&] { return fleet.consumer->reads > before; });
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_read)->Arg(1 << 16)->Arg(1 << 20)->Arg(64 << 20)->UseRealTime();

// One copy out of a mapping, on the caller's thread: the mapped path.
void BM_mapped_copy(benchmark::State& state) {
  Fleet fleet(static_cast<std::uint64_t>(state.range(0)));
  std::vector<std::byte> parameter(fleet.remote.bytes, std::byte{2});
  const Transport::Mapping mapping = fleet.consumer->transport->map(fleet.endpoint, fleet.remote).value();
  for (auto _ : state) {
    std::memcpy(parameter.data(), mapping.data, parameter.size());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_mapped_copy)->Arg(1 << 16)->Arg(1 << 20)->Arg(64 << 20)->UseRealTime();

// A pull and its answer, each side on its own thread.
void BM_round_trip(benchmark::State& state) {
  Fleet fleet(0);
  for (auto _ : state) {
    const std::uint64_t before = fleet.consumer->messages;
    fleet.consumer->transport->send(fleet.endpoint, {.type = HotType::kPull}, nullptr, 0).ignore();
    fleet.consumer->progress_until([&] { return fleet.consumer->messages > before; });
  }
}
BENCHMARK(BM_round_trip)->UseRealTime();

// What the kernel alone takes for it: 64 bytes there and back between two threads.
void BM_socket_round_trip(benchmark::State& state) {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) return state.SkipWithError("no sockets");
  std::thread other([&] {
    char buffer[64];
    while (recv(fds[1], buffer, sizeof buffer, MSG_WAITALL) == sizeof buffer) {
      if (send(fds[1], buffer, sizeof buffer, MSG_NOSIGNAL) < 0) return;
    }
  });
  char buffer[64] = {};
  for (auto _ : state) {
    if (send(fds[0], buffer, sizeof buffer, MSG_NOSIGNAL) < 0) break;
    if (recv(fds[0], buffer, sizeof buffer, MSG_WAITALL) != sizeof buffer) break;
  }
  shutdown(fds[0], SHUT_RDWR);
  other.join();
  close(fds[0]);
  close(fds[1]);
}
BENCHMARK(BM_socket_round_trip)->UseRealTime();

// Allocating and prefaulting memory: paid once, at init.
void BM_allocate(benchmark::State& state) {
  Fleet fleet(0);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        fleet.consumer->transport->allocate(static_cast<std::uint64_t>(state.range(0)), "a benchmark").ok());
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_allocate)->Arg(1 << 20)->Arg(64 << 20)->UseRealTime();

}  // namespace
}  // namespace shardpull
