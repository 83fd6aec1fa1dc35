// The transports of one host against the limits of the same run: shm's reads and mapped copies beside
// BM_memcpy, cma's reads beside two threads that do nothing but process_vm_readv, a pull and its answer
// beside a bare round trip over a unix socket.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "base/clock.h"
#include "transport/cma/cma_transport.h"
#include "transport/shm/shm_transport.h"

namespace shardpull {
namespace {

constexpr std::int64_t kWait = kNanosPerMilli * 100;

using TransportMaker = Result<std::unique_ptr<Transport>> (*)(LocalOptions);

class Peer final : public TransportSink {
 public:
  Peer(const std::string& directory, const std::string& name, Incarnation incarnation,
       TransportMaker make = make_shm_transport)
      : transport(make({.directory = directory, .token = 1, .incarnation = incarnation, .self_name = name})
                      .value()) {}
  void on_accepted(EndpointId endpoint) override { accepted = endpoint; }
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte*) override {
    ++messages;
    last = header;
    if (granted != nullptr) {
      transport->grant(endpoint, granted).ignore();
      transport
          ->send(endpoint,
                 {.type = HotType::kReady, .target = granted->ref().region, .seq = granted->ref().generation},
                 nullptr, 0)
          .ignore();
    }
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
  HotHeader last;
  bool echo = false;
  std::shared_ptr<ExportedMemory> granted;  // to whoever says something
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

// Memory of another process, and a consumer here that may read it with cma.
class OtherProcess {
 public:
  explicit OtherProcess(std::uint64_t size) : bytes(size) {
    std::string name = (std::filesystem::temp_directory_path() / "shardpull-bench-XXXXXX").string();
    directory_ = mkdtemp(name.data());
    // At the same address on both sides; the other one's pages become its own when it writes them.
    data = static_cast<std::byte*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    madvise(data, bytes, MADV_HUGEPAGE);
    int ends[2];
    if (data == MAP_FAILED || pipe(ends) != 0) std::abort();
    pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      std::memset(data, 1, bytes);
      Peer producer(directory_, "producer", 1, make_cma_transport);
      producer.granted = producer.transport->adopt(data, bytes, "a benchmark").value();
      const std::string address = producer.transport->listen().value();
      if (write(ends[1], address.data(), address.size()) < 0) _exit(1);
      close(ends[1]);
      for (;;) producer.transport->progress(kWait, producer).ignore();
    }
    close(ends[1]);
    std::string address(4096, '\0');
    address.resize(
        static_cast<std::size_t>(std::max<ssize_t>(read(ends[0], address.data(), address.size()), 0)));
    close(ends[0]);
    consumer = std::make_unique<Peer>(directory_, "consumer", 2, make_cma_transport);
    endpoint = consumer->transport->connect(address, kNanosPerSecond).value();
    consumer->transport->send(endpoint, {.type = HotType::kHello}, nullptr, 0).ignore();
    consumer->progress_until([&] { return consumer->messages == 1; });
  }
  ~OtherProcess() {
    consumer.reset();
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    munmap(data, bytes);
    std::filesystem::remove_all(directory_);
  }
  RemoteRef window(std::uint64_t offset, std::uint64_t length) const {
    return {
        .region = consumer->last.target, .generation = consumer->last.seq, .offset = offset, .bytes = length};
  }

  const std::uint64_t bytes;
  std::byte* data = nullptr;
  pid_t pid = 0;
  std::unique_ptr<Peer> consumer;
  EndpointId endpoint = 0;

 private:
  std::string directory_;
};

// Rows of half their distance, as a column-parallel slice has them; 0: everything as one.
std::vector<std::pair<std::uint64_t, std::uint64_t>> rows_of(std::uint64_t bytes, std::uint64_t row_bytes) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> rows;
  if (row_bytes == 0) return {{0, bytes}};
  for (std::uint64_t at = 0; at + row_bytes <= bytes; at += 2 * row_bytes) rows.emplace_back(at, row_bytes);
  return rows;
}

// A read of many parts with cma, from issue to on_read_done. Arguments: bytes there, bytes of a row.
void BM_cma_read(benchmark::State& state) {
  if (const Status status = cma_available(); !status.ok())
    return state.SkipWithError(status.message().c_str());
  OtherProcess other(static_cast<std::uint64_t>(state.range(0)));
  std::vector<std::byte> landed(other.bytes, std::byte{2});
  std::vector<ReadPart> parts;
  std::uint64_t at = 0;
  for (const auto& [offset, length] : rows_of(other.bytes, static_cast<std::uint64_t>(state.range(1)))) {
    parts.push_back({.remote = other.window(offset, length), .local = landed.data() + at});
    at += length;
  }
  for (auto _ : state) {
    const std::uint64_t before = other.consumer->reads;
    other.consumer->transport->read_parts(other.endpoint, parts, 1);
    other.consumer->progress_until([&] { return other.consumer->reads > before; });
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(at));
}

// The limit: the same bytes by two threads, each with half of the rows, which only call the kernel.
void BM_two_vectored_reads(benchmark::State& state) {
  if (const Status status = cma_available(); !status.ok())
    return state.SkipWithError(status.message().c_str());
  OtherProcess other(static_cast<std::uint64_t>(state.range(0)));
  std::vector<std::byte> landed(other.bytes, std::byte{2});
  constexpr std::uint64_t kPiece = 4u << 20;
  std::vector<iovec> local[2], remote[2];
  std::uint64_t at = 0;
  const auto rows = rows_of(other.bytes, static_cast<std::uint64_t>(state.range(1)));
  for (const auto& [offset, length] : rows) {
    for (std::uint64_t done = 0; done < length; done += kPiece) {
      const std::uint64_t step = std::min(kPiece, length - done);
      const std::size_t half = offset + done < other.bytes / 2 ? 0 : 1;
      local[half].push_back({landed.data() + at, step});
      remote[half].push_back({other.data + offset + done, step});
      at += step;
    }
  }
  const auto read_half = [&](std::size_t half) {
    const std::size_t per_call = state.range(1) == 0 ? 1 : 1024;
    for (std::size_t next = 0; next < local[half].size(); next += per_call) {
      const std::size_t count = std::min(per_call, local[half].size() - next);
      if (process_vm_readv(other.pid, &local[half][next], count, &remote[half][next], count, 0) <= 0)
        std::abort();
    }
  };
  std::atomic<std::uint64_t> round{0}, done{0};
  std::atomic<bool> stop{false};
  std::thread second([&] {
    for (std::uint64_t seen = 0;;) {
      round.wait(seen);
      if (stop) return;
      ++seen;
      read_half(1);
      done.store(seen);
      done.notify_one();
    }
  });
  std::uint64_t rounds = 0;
  for (auto _ : state) {
    round.store(++rounds);
    round.notify_one();
    read_half(0);
    for (std::uint64_t seen = done; seen < rounds; seen = done) done.wait(seen);
  }
  stop = true;
  round.store(rounds + 1);
  round.notify_one();
  second.join();
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(at));
}
BENCHMARK(BM_two_vectored_reads)
    ->Args({64 << 20, 0})
    ->Args({64 << 20, 2048})
    ->Args({64 << 20, 384})
    ->UseRealTime();
BENCHMARK(BM_cma_read)->Args({64 << 20, 0})->Args({64 << 20, 2048})->Args({64 << 20, 384})->UseRealTime();

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
