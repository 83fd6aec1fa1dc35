// Reads over the ucx transport by TCP, beside what plain sockets move: the limit. Both go between two
// processes, from one memory to another that no cache holds, over loopback and, as root, between two network
// namespaces joined by a veth pair. Each read is measured between two runs of the pump, `ratio` is the median
// of limit time over read time; the bytes are checked.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "base/clock.h"
#include "base/host_port.h"
#include "base/unique_fd.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kBytes = 256u << 20;
constexpr std::uint64_t kCallBytes = 64u << 20;  // of one vectored read
constexpr int kCallsInFlight = 2;

std::byte byte_at(std::uint64_t at) {
  return static_cast<std::byte>((at >> 12) * 31 + at);
}

bool right(const std::byte* bytes) {
  for (std::uint64_t i = 0; i < kBytes; i += 509) {
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
  pid_t pid() const { return pid_; }

 private:
  const pid_t pid_;
};

struct Pipe {
  Pipe() {
    int ends[2] = {-1, -1};
    if (pipe(ends) != 0) std::abort();
    out = UniqueFd(ends[0]);
    in = UniqueFd(ends[1]);
  }
  void put(const std::string& line) const {
    if (write(in.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) _exit(1);
  }
  // One line; empty when its writer is gone.
  std::string take() {
    in.reset();
    std::string line;
    for (char c = 0; read(out.get(), &c, 1) == 1 && c != '\n';) line += c;
    return line;
  }
  UniqueFd out, in;
};

bool run(const std::string& command) {
  return std::system(fmt::format("{} >/dev/null 2>&1", command).c_str()) == 0;
}

// Puts this thread into a network namespace of its own, with the /sys that UCX lists interfaces from.
bool enter_own_network() {
  return unshare(CLONE_NEWNS | CLONE_NEWNET) == 0 && mount("", "/", "", MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0 && run("ip link set lo up");
}

// Waits until the kernel sees the other end, as it does a moment after both are up.
bool link_is_up(const std::string& device) {
  for (int i = 0; i < 500; ++i) {
    std::string word;
    if (std::ifstream(fmt::format("/sys/class/net/{}/operstate", device)) >> word && word == "up")
      return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

bool transfer(int fd, std::byte* at, std::uint64_t bytes, bool sends) {
  while (bytes > 0) {
    const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, 1u << 20));
    const ssize_t moved = sends ? send(fd, at, step, MSG_NOSIGNAL) : recv(fd, at, step, 0);
    if (moved <= 0) return false;
    at += moved;
    bytes -= static_cast<std::uint64_t>(moved);
  }
  return true;
}

class Sink final : public TransportSink {
 public:
  void on_accepted(EndpointId) override {}
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte*) override {
    last = header;
    if (greet) greet(endpoint);
  }
  void on_closed(EndpointId, const Status& why) override { failed = why; }
  void on_read_done(ReadToken, const Status& status) override {
    if (!status.ok()) failed = status;
    ++reads;
  }
  HotHeader last;
  std::function<void(EndpointId)> greet;
  int reads = 0;
  Status failed;
};

struct Case {
  bool veth = false;
  int streams = 1;  // of the pump, and UCX workers
  std::uint64_t window = 0;
};

// Serves the memory to one reader, by both ways.
void serve(const UcxOptions& options, const Pipe& tell) {
  auto transport = make_ucx_transport(options);
  if (!transport.ok()) {
    tell.put(fmt::format("-{}\n", transport.status().message()));
    return;
  }
  const auto memory = *(*transport)->allocate(kBytes, "weights");
  std::byte* const bytes = memory->ref().address;
  for (std::uint64_t i = 0; i < kBytes; ++i) bytes[i] = byte_at(i);
  Sink sink;
  sink.greet = [&](EndpointId endpoint) {
    HotHeader reply{.type = HotType::kReady};
    reply.target = memory->ref().region;
    reply.seq = memory->ref().generation;
    (*transport)->grant(endpoint, memory).ignore();
    (*transport)->send(endpoint, reply, nullptr, 0).ignore();
  };
  const std::string address = *(*transport)->listen();
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  inet_pton(AF_INET, options.host.c_str(), &name.sin_addr);
  socklen_t size = sizeof name;
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&name), size) != 0 ||
      listen(listener.get(), 16) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    return tell.put("-no socket\n");
  }
  // One thread a stream; the reader says what it wants of it.
  std::thread([&] {
    for (;;) {
      const int fd = accept(listener.get(), nullptr, nullptr);
      std::thread([fd, bytes] {
        std::array<std::uint64_t, 2> part{};
        while (recv(fd, part.data(), sizeof part, MSG_WAITALL) == sizeof part)
          transfer(fd, bytes + part[0], part[1], true);
      }).detach();
    }
  }).detach();
  tell.put(fmt::format("{}\n{}\n", address, ntohs(name.sin_port)));
  while ((*transport)->progress(kNanosPerSecond, sink).ok()) {
  }
}

// Of all threads of a process, ever.
double cpu_s_of(pid_t pid) {
  clockid_t id = 0;
  timespec time{};
  if (clock_getcpuclockid(pid, &id) != 0 || clock_gettime(id, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

void tcp_read(benchmark::State& state, const Case& wanted) {
  const std::string here = wanted.veth ? "10.77.0.1" : "127.0.0.1",
                    there = wanted.veth ? "10.77.0.2" : "127.0.0.1";
  static const bool own_network = enter_own_network();
  if (wanted.veth && !own_network) return state.SkipWithError("namespaces need root");
  UcxOptions options;
  options.token = options.incarnation = 1;
  options.self_name = "bench";
  options.host = there;
  options.workers = static_cast<std::uint32_t>(wanted.streams);
  Pipe tell, go;
  const Other owner([&] {
    if (wanted.veth) {
      const bool entered = enter_own_network();
      tell.put(entered ? "entered\n" : "-no namespace\n");
      if (go.take() != "linked" || !run(fmt::format("ip addr add {}/24 dev spb", there)) ||
          !run("ip link set spb up") || !link_is_up("spb")) {
        return tell.put("-no veth pair\n");
      }
    }
    serve(options, tell);
  });
  if (wanted.veth) {
    run("ip link del spa");
    if (tell.take() != "entered" ||
        !run(fmt::format("ip link add spa type veth peer name spb netns {}", owner.pid())) ||
        !run(fmt::format("ip addr add {}/24 dev spa", here)) || !run("ip link set spa up")) {
      return state.SkipWithError("no veth pair");
    }
    go.put("linked\n");
  }
  const std::string address = tell.take();
  if (address.empty() || address[0] == '-') return state.SkipWithError(address.c_str());
  sockaddr_in name{};
  name.sin_family = AF_INET;
  inet_pton(AF_INET, there.c_str(), &name.sin_addr);
  name.sin_port = htons(static_cast<std::uint16_t>(std::stoi(tell.take())));

  options.host = here;
  auto transport = make_ucx_transport(options);
  if (!transport.ok()) return state.SkipWithError(transport.status().message().c_str());
  Sink sink;
  const auto wait_for = [&](const std::function<bool()>& done) {
    while (!done() && sink.failed.ok() && (*transport)->progress(kNanosPerSecond, sink).ok()) {
    }
  };
  const Result<EndpointId> endpoint = (*transport)->connect(address, kNanosPerSecond * 10);
  if (!endpoint.ok()) return state.SkipWithError(endpoint.status().message().c_str());
  (*transport)->send(*endpoint, {.type = HotType::kHello}, nullptr, 0).ignore();
  wait_for([&] { return sink.last.type == HotType::kReady; });

  std::vector<UniqueFd> sockets;
  for (int i = 0; i < wanted.streams; ++i) {
    sockets.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(sockets.back().get(), reinterpret_cast<sockaddr*>(&name), sizeof name) != 0)
      return state.SkipWithError("no connection");
  }
  std::vector<std::byte> landed(kBytes);
  bool moved = true;
  const SystemClock& clock = SystemClock::instance();
  const auto both_cpu_s = [&] { return cpu_s_of(getpid()) + cpu_s_of(owner.pid()); };
  const auto pump_s = [&] {
    const std::int64_t start_ns = clock.now_ns();
    std::vector<std::thread> threads;
    std::vector<char> whole(sockets.size());
    for (std::size_t i = 0; i < sockets.size(); ++i) {
      threads.emplace_back([&, i] {
        const std::array<std::uint64_t, 2> part{i * kBytes / sockets.size(), kBytes / sockets.size()};
        whole[i] = send(sockets[i].get(), part.data(), sizeof part, 0) == sizeof part &&
                   transfer(sockets[i].get(), landed.data() + part[0], part[1], false);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const char one : whole) moved = moved && one != 0;
    return 1e-9 * static_cast<double>(clock.now_ns() - start_ns);
  };
  const auto read_s = [&] {
    const std::int64_t start_ns = clock.now_ns();
    sink.reads = 0;
    int asked = 0;
    for (std::uint64_t at = 0; at < kBytes; at += kCallBytes) {
      std::vector<ReadPart> parts;
      for (std::uint64_t part = at; part < at + kCallBytes; part += wanted.window) {
        parts.push_back({{sink.last.target, sink.last.seq, part, wanted.window}, landed.data() + part});
      }
      (*transport)->read_parts(*endpoint, std::move(parts), 1);
      ++asked;
      wait_for([&] { return sink.reads > asked - kCallsInFlight; });
    }
    wait_for([&] { return sink.reads == asked; });
    return 1e-9 * static_cast<double>(clock.now_ns() - start_ns);
  };
  pump_s();
  read_s();
  std::vector<double> limits, ratios, cpu_limits, cpu_reads;
  double before_s = pump_s();
  for (auto _ : state) {
    std::memset(landed.data(), 0, landed.size());
    double cpu_s = both_cpu_s();
    const double it_s = read_s();
    cpu_reads.push_back(both_cpu_s() - cpu_s);
    if (!right(landed.data())) moved = false;
    cpu_s = both_cpu_s();
    const double after_s = pump_s(), limit_s = (before_s + after_s) / 2;
    before_s = after_s;
    cpu_limits.push_back(both_cpu_s() - cpu_s);
    limits.push_back(kBytes / limit_s);
    ratios.push_back(limit_s / it_s);
    state.SetIterationTime(it_s);
  }
  if (!moved || !sink.failed.ok()) state.SkipWithError(moved ? sink.failed.message().c_str() : "wrong bytes");
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kBytes));
  state.counters["limit"] =
      benchmark::Counter(median(limits), benchmark::Counter::kDefaults, benchmark::Counter::kIs1024);
  state.counters["cpu_ratio"] = median(cpu_limits) / median(cpu_reads);
  state.counters["ratio"] = median(ratios);
  state.counters["lowest"] = ratios.empty() ? 0 : *std::min_element(ratios.begin(), ratios.end());
  (*transport)->close(*endpoint);
}

const int registered = [] {
  for (const bool veth : {false, true}) {
    for (const int streams : {1, 2}) {
      for (const std::uint64_t window : {64u << 20, 4u << 20, 256u << 10}) {
        const Case wanted{.veth = veth, .streams = streams, .window = window};
        benchmark::RegisterBenchmark(fmt::format("tcp_read/{}/streams:{}/window_kib:{}",
                                                 veth ? "veth" : "loopback", streams, window >> 10)
                                         .c_str(),
                                     [wanted](benchmark::State& state) { tcp_read(state, wanted); })
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
  return 0;
}();

}  // namespace
}  // namespace shardpull
