// Reads over the ucx transport by TCP on loopback, beside what a plain socket moves: the limit. Both go
// between two processes, memory to memory, and the bytes are checked.
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull {
namespace {

constexpr std::size_t kBytes = 128u << 20;

std::byte byte_at(std::size_t at) {
  return static_cast<std::byte>((at >> 12) * 31 + at);
}

std::vector<std::byte> filled() {
  std::vector<std::byte> out(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) out[i] = byte_at(i);
  return out;
}

bool right(const std::vector<std::byte>& bytes) {
  for (std::size_t i = 0; i < bytes.size(); i += 509) {
    if (bytes[i] != byte_at(i)) return false;
  }
  return true;
}

// A process that ends with this one, or with the object.
class Other {
 public:
  explicit Other(const std::function<void()>& work) : pid_(fork()) {
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    work();
    _exit(0);
  }
  ~Other() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  const pid_t pid_;
};

bool take(int fd, std::byte* to, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = recv(fd, to, std::min<std::size_t>(bytes, 1u << 20), 0);
    if (got <= 0) return false;
    to += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

void socket_pump(benchmark::State& state) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof name;
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&name), size) != 0 || listen(listener.get(), 1) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    return state.SkipWithError("no socket");
  }
  const Other sender([&] {
    const UniqueFd fd(accept(listener.get(), nullptr, nullptr));
    const std::vector<std::byte> bytes = filled();
    char go = 0;
    while (recv(fd.get(), &go, 1, 0) == 1) {
      for (std::size_t at = 0; at < kBytes;) {
        const ssize_t sent =
            send(fd.get(), bytes.data() + at, std::min<std::size_t>(kBytes - at, 1u << 20), 0);
        if (sent <= 0) _exit(1);
        at += static_cast<std::size_t>(sent);
      }
    }
  });
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::vector<std::byte> landed(kBytes);
  bool moved = connect(fd.get(), reinterpret_cast<sockaddr*>(&name), size) == 0 &&
               send(fd.get(), "g", 1, 0) == 1 &&
               take(fd.get(), landed.data(), kBytes);  // its memory is filled by then
  for (auto _ : state) {
    moved = moved && send(fd.get(), "g", 1, 0) == 1 && take(fd.get(), landed.data(), kBytes);
  }
  if (!moved || !right(landed)) state.SkipWithError("wrong bytes");
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kBytes));
}

class Sink final : public TransportSink {
 public:
  void on_accepted(EndpointId) override {}
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte*) override {
    last = header;
    if (greet) greet(endpoint);
  }
  void on_closed(EndpointId, const Status&) override { closed = true; }
  void on_read_done(ReadToken, const Status& status) override {
    closed = closed || !status.ok();
    ++reads;
  }
  HotHeader last;
  std::function<void(EndpointId)> greet;
  int reads = 0;
  bool closed = false;
};

void tcp_read(benchmark::State& state) {
  int pipes[2];
  if (pipe(pipes) != 0) return state.SkipWithError("no pipe");
  UcxOptions options;
  options.token = options.incarnation = 1;
  options.self_name = "bench";
  options.fragment_bytes = static_cast<std::uint64_t>(state.range(0)) << 10;
  options.fragments_in_flight = static_cast<std::uint32_t>(state.range(1));
  const Other owner([&] {
    auto transport = make_ucx_transport(options);
    if (!transport.ok()) _exit(1);
    const auto memory = *(*transport)->allocate(kBytes, "weights");
    for (std::size_t i = 0; i < kBytes; ++i) memory->ref().address[i] = byte_at(i);
    Sink sink;
    sink.greet = [&](EndpointId endpoint) {
      HotHeader reply{.type = HotType::kReady};
      reply.target = memory->ref().region;
      reply.seq = memory->ref().generation;
      (*transport)->grant(endpoint, memory).ignore();
      (*transport)->send(endpoint, reply, nullptr, 0).ignore();
    };
    const std::string address = *(*transport)->listen();
    if (write(pipes[1], address.data(), address.size()) < 0) _exit(1);
    while ((*transport)->progress(kNanosPerSecond, sink).ok()) {
    }
  });
  const UniqueFd in(pipes[0]);
  UniqueFd(pipes[1]).reset();
  char address[64] = {};
  if (read(in.get(), address, sizeof address - 1) <= 0) return state.SkipWithError("no UCX");
  auto transport = make_ucx_transport(options);
  if (!transport.ok()) return state.SkipWithError(transport.status().message().c_str());
  Sink sink;
  const auto wait_for = [&](const std::function<bool()>& done) {
    while (!done() && !sink.closed && (*transport)->progress(kNanosPerSecond, sink).ok()) {
    }
  };
  const Result<EndpointId> endpoint = (*transport)->connect(address, kNanosPerSecond * 10);
  if (!endpoint.ok()) return state.SkipWithError("no connection");
  (*transport)->send(*endpoint, {.type = HotType::kHello}, nullptr, 0).ignore();
  wait_for([&] { return sink.last.type == HotType::kReady; });
  std::vector<std::byte> landed(kBytes);
  for (auto _ : state) {
    const int before = sink.reads;
    (*transport)->read(*endpoint, {sink.last.target, sink.last.seq, 0, kBytes}, landed.data(), 1);
    wait_for([&] { return sink.reads > before; });
  }
  if (sink.closed || !right(landed)) state.SkipWithError("wrong bytes");
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kBytes));
}

BENCHMARK(socket_pump)->UseRealTime()->Unit(benchmark::kMillisecond);
// KiB of a fragment, fragments in flight.
BENCHMARK(tcp_read)->Args({1024, 4})->Args({4096, 4})->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardpull
