// What plain sockets move between two hosts, memory to memory that no cache holds, one thread a stream: the
// limit that bench/wire_bench.py compares syncs with.
//
//    wire_pump_bench serve HOST          prints the port, then sends whoever connects what it asks for
//    wire_pump_bench take HOST PORT STREAMS BYTES [ROUNDS]    prints the seconds of each round, a line each
//    wire_pump_bench                     both over loopback, with 1 and 2 streams
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kServedBytes = 512u << 20;

struct Wanted {
  std::uint64_t offset = 0, bytes = 0;
};

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

sockaddr_in address_of(const char* host, std::uint16_t port) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(port);
  if (inet_pton(AF_INET, host, &name.sin_addr) != 1) {
    std::fprintf(stderr, "%s is no IPv4 address\n", host);
    std::exit(2);
  }
  return name;
}

// Returns the port; serves until the process ends.
std::uint16_t serve(const char* host) {
  static std::vector<std::byte> memory(kServedBytes, std::byte{1});
  static UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name = address_of(host, 0);
  socklen_t size = sizeof name;
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&name), size) != 0 ||
      listen(listener.get(), 64) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    std::perror("wire_pump_bench");
    std::exit(1);
  }
  std::thread([] {
    for (;;) {
      const int fd = accept(listener.get(), nullptr, nullptr);
      if (fd < 0) continue;
      std::thread([fd] {
        const UniqueFd owned(fd);
        Wanted wanted;
        while (recv(fd, &wanted, sizeof wanted, MSG_WAITALL) == sizeof wanted &&
               wanted.offset <= kServedBytes && wanted.bytes <= kServedBytes - wanted.offset &&
               transfer(fd, memory.data() + wanted.offset, wanted.bytes, true)) {
        }
      }).detach();
    }
  }).detach();
  return ntohs(name.sin_port);
}

// The seconds of each round.
std::vector<double> take(const char* host, std::uint16_t port, std::size_t streams, std::uint64_t bytes,
                         int rounds) {
  const sockaddr_in name = address_of(host, port);
  std::vector<UniqueFd> sockets;
  for (std::size_t i = 0; i < streams; ++i) {
    sockets.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(sockets.back().get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0) {
      std::perror("wire_pump_bench");
      std::exit(1);
    }
  }
  std::vector<std::byte> landed(bytes, std::byte{0});
  std::vector<double> out;
  for (int round = 0; round < rounds; ++round) {
    const std::int64_t start_ns = SystemClock::instance().now_ns();
    std::vector<std::thread> threads;
    std::vector<char> whole(streams);
    for (std::size_t i = 0; i < streams; ++i) {
      threads.emplace_back([&, i] {
        const Wanted wanted{.offset = i * bytes / streams,
                            .bytes = (i + 1) * bytes / streams - i * bytes / streams};
        whole[i] = send(sockets[i].get(), &wanted, sizeof wanted, MSG_NOSIGNAL) == sizeof wanted &&
                   transfer(sockets[i].get(), landed.data() + wanted.offset, wanted.bytes, false);
      });
    }
    for (std::thread& thread : threads) thread.join();
    out.push_back(1e-9 * static_cast<double>(SystemClock::instance().now_ns() - start_ns));
    if (std::count(whole.begin(), whole.end(), 1) != static_cast<std::ptrdiff_t>(streams)) {
      std::fprintf(stderr, "wire_pump_bench: the other side ended\n");
      std::exit(1);
    }
  }
  return out;
}

int run(int count, char** arguments) {
  const std::string_view what = count > 1 ? arguments[1] : "";
  if (what == "serve" && count == 3) {
    std::printf("%u\n", serve(arguments[2]));
    std::fflush(stdout);
    while (std::getchar() != EOF) {
    }
    std::_Exit(0);  // the threads of its streams have nothing to finish
  }
  if (what == "take" && count >= 6) {
    const std::uint64_t bytes =
        std::min<std::uint64_t>(std::strtoull(arguments[5], nullptr, 10), kServedBytes);
    for (const double seconds : take(arguments[2], static_cast<std::uint16_t>(std::atoi(arguments[3])),
                                     static_cast<std::size_t>(std::max(1, std::atoi(arguments[4]))), bytes,
                                     count > 6 ? std::atoi(arguments[6]) : 1)) {
      std::printf("%.9f\n", seconds);
    }
    return 0;
  }
  const std::uint16_t port = serve("127.0.0.1");
  for (const std::size_t streams : {std::size_t{1}, std::size_t{2}}) {
    std::vector<double> seconds = take("127.0.0.1", port, streams, kServedBytes / 2, 5);
    std::sort(seconds.begin(), seconds.end());
    std::printf("wire_pump/loopback/streams:%zu %.2f GB/s\n", streams,
                static_cast<double>(kServedBytes / 2) / seconds[seconds.size() / 2] / 1e9);
  }
  std::fflush(stdout);
  std::_Exit(0);
}

}  // namespace
}  // namespace shardpull

int main(int count, char** arguments) {
  return shardpull::run(count, arguments);
}
