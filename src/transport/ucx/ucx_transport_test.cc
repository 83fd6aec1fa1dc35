#include "transport/ucx/ucx_transport.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/host_port.h"
#include "base/unique_fd.h"
#include "base/units.h"
#include "transport/transport_testing.h"
#include "transport/ucx/ucx_frame.h"
#include "transport/ucx/ucx_library.h"

namespace shardpull {
namespace {

using transport_testing::coded_byte;
using transport_testing::entries_of;
using transport_testing::Event;
using transport_testing::kToken;
using transport_testing::pattern;
using transport_testing::pull;
using transport_testing::pump;
using transport_testing::Side;

UcxOptions options_of(const std::string& name, Incarnation incarnation) {
  UcxOptions options;
  options.token = kToken;
  options.incarnation = incarnation;
  options.self_name = name;
  return options;
}

class UcxTransportTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const Result<std::string> ucx = describe_ucx(); !ucx.ok()) GTEST_SKIP() << ucx.status().message();
    set_log_level(LogLevel::kError);  // warnings about strangers are expected
  }
  void TearDown() override { set_log_level(LogLevel::kWarn); }
};

// Called before each piece that UCX gives to a socket, with its size; of the thread that sets it.
thread_local std::function<void(std::size_t bytes)> before_send;

// What is written to standard error while it lives.
class Stderr {
 public:
  Stderr() { testing::internal::CaptureStderr(); }
  ~Stderr() {
    if (!taken_) testing::internal::GetCapturedStderr();
  }
  std::string take() {
    taken_ = true;
    return testing::internal::GetCapturedStderr();
  }

 private:
  bool taken_ = false;
};

// Connects `from` to whoever listens at `address` and waits for the first message back or the end.
EndpointId introduce(Side& from, const std::string& address) {
  const Result<EndpointId> endpoint = from.transport->connect(address, 10 * kNanosPerSecond);
  EXPECT_TRUE(endpoint.ok()) << endpoint.status().to_string();
  if (!endpoint.ok()) return 0;
  EXPECT_TRUE(from.transport->send(*endpoint, {.type = HotType::kHello}, nullptr, 0).ok());
  return *endpoint;
}

// A process of its own, which listens, and grants a region of position-coded bytes to whoever says hello.
constexpr std::uint64_t kChildBytes = 64u << 20;

class Child {
 public:
  explicit Child(std::uint16_t port, Incarnation incarnation, std::uint32_t workers = 1) {
    int pipes[2];
    EXPECT_EQ(pipe(pipes), 0);
    const std::string out = std::to_string(pipes[1]), at = std::to_string(port),
                      life = std::to_string(incarnation), streams = std::to_string(workers);
    pid_ = fork();
    if (pid_ == 0) {
      setenv("SHARDPULL_TEST_CHILD", fmt::format("{} {} {} {}", out, at, life, streams).c_str(), 1);
      execl("/proc/self/exe", "ucx_child", "--gtest_also_run_disabled_tests", "--gtest_brief=1",
            "--gtest_output=", "--gtest_filter=UcxChild.DISABLED_Serves", nullptr);
      _exit(127);
    }
    ::close(pipes[1]);
    UniqueFd in(pipes[0]);
    pollfd ready{.fd = in.get(), .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&ready, 1, 60'000), 1);
    std::array<char, 128> text{};
    const ssize_t got = ::read(in.get(), text.data(), text.size() - 1);
    if (got > 0) address_.assign(text.data(), static_cast<std::size_t>(got));
    EXPECT_FALSE(address_.empty());
  }
  ~Child() { kill_it(); }
  void kill_it() {
    if (pid_ <= 0) return;
    EXPECT_EQ(kill(pid_, SIGKILL), 0);
    EXPECT_EQ(waitpid(pid_, nullptr, 0), pid_);
    pid_ = 0;
  }
  void stop() { EXPECT_EQ(kill(pid_, SIGSTOP), 0); }
  const std::string& address() const { return address_; }

 private:
  pid_t pid_ = 0;
  std::string address_;
};

// Not a test: what a Child runs.
TEST(UcxChild, DISABLED_Serves) {
  const char* const task = std::getenv("SHARDPULL_TEST_CHILD");
  if (task == nullptr) GTEST_SKIP() << "only as a child of the tests below";
  int out = -1;
  unsigned port = 0, workers = 0;
  unsigned long long incarnation = 0;
  ASSERT_EQ(std::sscanf(task, "%d %u %llu %u", &out, &port, &incarnation, &workers), 4);
  UcxOptions options = options_of("trainer-0", incarnation);
  options.workers = workers;
  options.port = static_cast<std::uint16_t>(port);
  Side side(make_ucx_transport(options));
  const auto memory = *side.transport->allocate(kChildBytes, "weights");
  for (std::uint64_t i = 0; i < kChildBytes; ++i) memory->ref().address[i] = coded_byte(i);
  side.on_message_hook = [&](EndpointId endpoint, const HotHeader&) {
    HotHeader reply;
    reply.type = HotType::kReady;
    reply.target = memory->ref().region;
    reply.seq = memory->ref().generation;
    side.transport->grant(endpoint, memory).ignore();
    side.transport->send(endpoint, reply, nullptr, 0).ignore();
  };
  const Result<std::string> address = side.transport->listen();
  ASSERT_TRUE(address.ok()) << address.status().to_string();
  ASSERT_EQ(write(out, address->data(), address->size()), static_cast<ssize_t>(address->size()));
  // Until it is killed; at most as long as any test may take.
  const std::int64_t start_ns = SystemClock::instance().now_ns();
  while (SystemClock::instance().now_ns() - start_ns < 120 * kNanosPerSecond &&
         side.transport->progress(kNanosPerSecond, side).ok()) {
  }
}

// Goal: between two processes: a read of what the other one wrote; then its death is noticed at once, reads
// under way fail before the end is reported, exactly once; nothing is printed; its successor at the same
// address is reached.
void notice_a_killed_peer(std::uint32_t its_workers, std::uint32_t our_workers) {
  std::optional<Child> child(std::in_place, 0, 100, its_workers);
  Stderr printed;
  UcxOptions options = options_of("worker-0", 5);
  options.workers = our_workers;
  Side side(make_ucx_transport(options));
  EndpointId endpoint = introduce(side, child->address());
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kMessage) == 1; }));
  const HotHeader reply = side.last(Event::kMessage).header;
  EXPECT_EQ(reply.incarnation, 100u);
  const RemoteRef odd{
      .region = reply.target, .generation = reply.seq, .offset = 12'345, .bytes = (10u << 20) + 3};
  std::vector<std::byte> landed(odd.bytes);
  side.transport->read(endpoint, odd, landed.data(), 1);
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kRead) == 1; }));
  ASSERT_TRUE(side.last(Event::kRead).status.ok()) << side.last(Event::kRead).status.to_string();
  for (std::uint64_t i = 0; i < odd.bytes; ++i) ASSERT_EQ(landed[i], coded_byte(odd.offset + i)) << i;

  std::vector<std::byte> whole(kChildBytes);
  child->stop();  // so that reads are under way for certain
  for (ReadToken token = 2; token < 10; ++token) {
    side.transport->read(endpoint, {reply.target, reply.seq, 0, kChildBytes}, whole.data(), token);
  }
  ASSERT_TRUE(side.transport->progress(kNanosPerMilli, side).ok());
  child->kill_it();
  const std::int64_t killed_ns = SystemClock::instance().now_ns();
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kClosed) == 1; }));
  EXPECT_LT(SystemClock::instance().now_ns() - killed_ns, kNanosPerSecond);
  EXPECT_EQ(side.count(Event::kRead), 9u);
  EXPECT_EQ(side.events.back().kind, Event::kClosed);
  const Status why = side.last(Event::kClosed).status;
  EXPECT_EQ(why.code(), StatusCode::kUnavailable) << why.to_string();
  EXPECT_EQ(why.info().reason, Reason::kPeerLost);
  EXPECT_NE(why.message().find("trainer-0"), std::string::npos) << why.message();
  EXPECT_FALSE(side.last(Event::kRead).status.ok());
  EXPECT_EQ(side.transport->send(endpoint, pull(1), nullptr, 0).code(), StatusCode::kUnavailable);

  const std::uint16_t port = parse_host_port(child->address(), "the child")->port;
  child.emplace(port, 101);
  endpoint = introduce(side, child->address());
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kMessage) == 2; }));
  EXPECT_EQ(side.last(Event::kMessage).header.incarnation, 101u);
  EXPECT_EQ(side.count(Event::kClosed), 1u);
  side.transport.reset();
  EXPECT_EQ(printed.take(), "");
}
TEST_F(UcxTransportTest, Case129NoticesAKilledPeerAndReachesItsSuccessor) {
  notice_a_killed_peer(1, 1);
}
// Every worker ends. The smaller number of the two counts.
TEST_F(UcxTransportTest, NoticesAKilledPeerOfSeveralWorkers) {
  const std::size_t threads = entries_of("/proc/self/task");
  notice_a_killed_peer(3, 2);
  notice_a_killed_peer(1, 4);
  EXPECT_LE(entries_of("/proc/self/task"), threads + 1);  // UCX's own
}

// Not a test: reads from an owner, over and over, until it is killed.
TEST(UcxChild, DISABLED_Reads) {
  const char* const task = std::getenv("SHARDPULL_TEST_READER");
  if (task == nullptr) GTEST_SKIP() << "only as a child of the test below";
  char address[64] = {};
  unsigned workers = 0;
  ASSERT_EQ(std::sscanf(task, "%63s %u", address, &workers), 2);
  UcxOptions options = options_of("worker-0", static_cast<Incarnation>(getpid()));
  options.workers = workers;
  Side side(make_ucx_transport(options));
  const EndpointId endpoint = introduce(side, address);
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kMessage) == 1; }));
  const HotHeader reply = side.last(Event::kMessage).header;
  std::vector<std::byte> landed(kChildBytes);
  const std::int64_t start_ns = SystemClock::instance().now_ns();
  while (SystemClock::instance().now_ns() - start_ns < 120 * kNanosPerSecond) {
    side.events.clear();
    for (ReadToken token = 0; token < 4; ++token)
      side.transport->read(endpoint, {reply.target, reply.seq, 0, kChildBytes}, landed.data(), token);
    ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kRead) == 4; }));
    if (std::memcmp(landed.data(), landed.data() + 4096, 8) == 0) _exit(3);
    side.transport->send(endpoint, pull(1), nullptr, 0).ignore();
  }
}

// Grants position-coded bytes to whoever says hello.
struct Owner {
  explicit Owner(std::uint32_t workers) : side(make_ucx_transport(options(workers))) {
    memory = *side.transport->allocate(kChildBytes, "weights");
    for (std::uint64_t i = 0; i < kChildBytes; ++i) memory->ref().address[i] = coded_byte(i);
    address = *side.transport->listen();
    side.on_message_hook = [this](EndpointId endpoint, const HotHeader& header) {
      if (header.type != HotType::kHello) return;
      HotHeader reply;
      reply.type = HotType::kReady;
      reply.target = memory->ref().region;
      reply.seq = memory->ref().generation;
      side.transport->grant(endpoint, memory).ignore();
      side.transport->send(endpoint, reply, nullptr, 0).ignore();
    };
  }
  static UcxOptions options(std::uint32_t workers) {
    UcxOptions options = options_of("trainer-0", 1);
    options.workers = workers;
    return options;
  }
  // A process that reads from this owner with as many workers.
  pid_t start_reader(std::uint32_t workers) const {
    const pid_t reader = fork();
    if (reader != 0) return reader;
    setenv("SHARDPULL_TEST_READER", fmt::format("{} {}", address, workers).c_str(), 1);
    execl("/proc/self/exe", "ucx_child", "--gtest_also_run_disabled_tests", "--gtest_brief=1",
          "--gtest_output=", "--gtest_filter=UcxChild.DISABLED_Reads", nullptr);
    _exit(127);
  }

  Side side;
  std::shared_ptr<ExportedMemory> memory;
  std::string address;
};

// Goal: an owner outlives readers that are killed, or stopped and then killed, while all its workers send to
// them; the end of each is reported once.
TEST_F(UcxTransportTest, OwnersOutliveKilledReaders) {
  for (const std::uint32_t workers : {1u, 3u}) {
    Owner owner(workers);
    Side& side = owner.side;
    for (int life = 0; life < 4; ++life) {
      const pid_t reader = owner.start_reader(workers);
      const std::size_t ended = side.count(Event::kClosed), told = side.count(Event::kMessage);
      // Until a round of reads has been checked, and the next one is under way.
      ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kMessage) == told + 2; }));
      if (life % 2 == 1) {
        ASSERT_EQ(kill(reader, SIGSTOP), 0);
        for (int i = 0; i < 50; ++i) ASSERT_TRUE(side.transport->progress(kNanosPerMilli, side).ok());
        if (life == 3) side.transport->close(side.last(Event::kMessage).endpoint);
      }
      ASSERT_EQ(kill(reader, SIGKILL), 0);
      ASSERT_EQ(waitpid(reader, nullptr, 0), reader);
      ASSERT_TRUE(pump({&side}, [&] { return side.transport->counters().endpoints == 0; }));
      EXPECT_EQ(side.count(Event::kClosed), life == 3 ? ended : ended + 1);
    }
  }
}

// Goal: an owner outlives readers that are killed right before one of its writes to them, each before another,
// so that the write is what finds the connection broken.
TEST_F(UcxTransportTest, OwnersOutliveReadersKilledBeforeAWrite) {
  Owner owner(1);
  Side& side = owner.side;
  for (std::size_t life = 1; life <= 12; ++life) {
    pid_t reader = owner.start_reader(1);
    std::size_t writes = 0;
    before_send = [&](std::size_t bytes) {
      if (bytes < 4096 || ++writes != life) return;
      EXPECT_EQ(kill(reader, SIGKILL), 0);
      EXPECT_EQ(waitpid(reader, nullptr, 0), reader);
      reader = 0;
    };
    const bool over = pump({&side}, [&] { return side.count(Event::kClosed) == life; });
    before_send = nullptr;
    if (reader != 0) {
      kill(reader, SIGKILL);
      waitpid(reader, nullptr, 0);
    }
    ASSERT_EQ(reader, 0) << life << ": it was not written to";
    ASSERT_TRUE(over) << life;
    EXPECT_EQ(side.last(Event::kClosed).status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(side.transport->counters().endpoints, 0u);
  }
}

// Goal: an owner outlives a reader that is killed while it is being served, and serves the next one.
TEST_F(UcxTransportTest, OwnersOutliveTheirReaders) {
  Side owner(make_ucx_transport(options_of("trainer-0", 1)));
  const auto memory = *owner.transport->allocate(kChildBytes, "weights");
  const std::string address = *owner.transport->listen();
  for (int life = 0; life < 3; ++life) {
    Side reader(make_ucx_transport(options_of("worker-0", 10 + static_cast<Incarnation>(life))));
    const EndpointId endpoint = introduce(reader, address);
    ASSERT_TRUE(pump({&owner, &reader},
                     [&] { return owner.count(Event::kMessage) == static_cast<std::size_t>(life) + 1; }));
    const EndpointId back = owner.last(Event::kMessage).endpoint;
    ASSERT_TRUE(owner.transport->grant(back, memory).ok());
    ASSERT_TRUE(owner.transport->send(back, pull(1), nullptr, 0).ok());
    ASSERT_TRUE(pump({&owner, &reader}, [&] { return reader.count(Event::kMessage) == 1; }));
    std::vector<std::byte> landed(kChildBytes);
    for (ReadToken token = 0; token < 4; ++token) {
      reader.transport->read(endpoint, {memory->ref().region, memory->ref().generation, 0, kChildBytes},
                             landed.data(), token);
    }
    for (int i = 0; i < 2 + life; ++i) {
      ASSERT_TRUE(reader.transport->progress(0, reader).ok());
      ASSERT_TRUE(owner.transport->progress(0, owner).ok());
    }
    reader.transport.reset();
    ASSERT_TRUE(
        pump({&owner}, [&] { return owner.count(Event::kClosed) == static_cast<std::size_t>(life) + 1; }));
  }
  EXPECT_EQ(owner.transport->counters().endpoints, 0u);
}

// Goal: a peer of another fleet, or of another life on one connection, is refused by name; others are not
// disturbed.
TEST_F(UcxTransportTest, RefusesOtherFleets) {
  Side ours(make_ucx_transport(options_of("trainer-0", 1)));
  UcxOptions options = options_of("worker-9", 2);
  options.token = kToken + 1;
  Side theirs(make_ucx_transport(options));
  Side friendly(make_ucx_transport(options_of("worker-0", 3)));
  const std::string address = *ours.transport->listen();
  introduce(friendly, address);
  introduce(theirs, address);
  ASSERT_TRUE(pump({&ours, &theirs, &friendly}, [&] {
    return ours.count(Event::kClosed) == 1 && theirs.count(Event::kClosed) == 1 &&
           ours.count(Event::kMessage) == 1;
  }));
  const Status why = ours.last(Event::kClosed).status;
  EXPECT_EQ(why.code(), StatusCode::kUnauthenticated);
  EXPECT_EQ(why.info().reason, Reason::kBadToken);
  EXPECT_NE(why.message().find("another fleet"), std::string::npos) << why.message();
  EXPECT_EQ(friendly.count(Event::kClosed), 0u);
  EXPECT_EQ(ours.last(Event::kMessage).header.incarnation, 3u);
}

UniqueFd connected_socket(const std::string& address) {
  const HostPort parsed = *parse_host_port(address, "a test");
  const SocketAddress target = resolve(parsed)->front();
  UniqueFd fd(socket(target.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), target.get(), target.length), 0);
  return fd;
}

void send_junk(int fd, const std::vector<std::byte>& junk) {
  [[maybe_unused]] const ssize_t sent = ::send(fd, junk.data(), junk.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto* const data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

// Goal: bytes of strangers close their connection, with a reason, print nothing and disturb nobody.
TEST_F(UcxTransportTest, ClosesForeignConnectionsAndLivesOn) {
  Stderr printed;
  Side a(make_ucx_transport(options_of("trainer-0", 1)));
  Side b(make_ucx_transport(options_of("worker-0", 2)));
  const std::string address = *a.transport->listen();
  const EndpointId b_to_a = introduce(b, address);
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  const std::size_t descriptors = entries_of("/proc/self/fd");
  const auto expect_closed = [&](std::string_view what, const std::vector<std::byte>& junk, bool hang_up,
                                 std::string_view reason) {
    const std::size_t before = a.count(Event::kClosed);
    UniqueFd fd = connected_socket(address);
    send_junk(fd.get(), junk);
    if (hang_up) fd.reset();
    ASSERT_TRUE(pump({&a}, [&] { return a.count(Event::kClosed) == before + 1; })) << what;
    const std::string message = a.last(Event::kClosed).status.message();
    EXPECT_NE(message.find(reason), std::string::npos) << what << ": " << message;
  };
  const auto hello = [](FleetToken token, std::uint64_t name, std::uint64_t bytes, std::size_t data) {
    const auto frame = encode(UcxFrame{.kind = UcxFrameKind::kHello,
                                       .token = token,
                                       .incarnation = 7,
                                       .read = 1,
                                       .offset = name,
                                       .bytes = bytes});
    std::vector<std::byte> out(frame.begin(), frame.end());
    out.resize(out.size() + data, std::byte{'x'});
    return out;
  };
  expect_closed("HTTP", bytes_of("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), false, "not our protocol");
  expect_closed("TLS", bytes_of(std::string_view("\x16\x03\x01\x02\x00\x01\x00\x01", 8)), false,
                "not our protocol");
  expect_closed("zeros", std::vector<std::byte>(4096), false, "not our protocol");
  expect_closed("random", pattern(20'000, 1), false, "not our protocol");
  expect_closed("nothing", {}, true, "before a hello");
  expect_closed("three bytes", bytes_of("SPU"), true, "within its hello");
  expect_closed("another fleet", hello(kToken + 1, 4, 100, 100), false, "another fleet");
  expect_closed("a hello cut short", hello(kToken, 4, 100, 50), true, "within its hello");
  expect_closed("a name beyond the data", hello(kToken, 60, 50, 50), false, "said hello with");
  expect_closed("a gigabyte announced", hello(kToken, 4, 1u << 30, 0), false, "said hello with");
  expect_closed("more than a hello", hello(kToken, 4, 100, 101), false, "more than a hello");
  auto version = hello(kToken, 4, 100, 100);
  version[4] = std::byte{99};
  expect_closed("another version", version, false, "wire version 99");

  ASSERT_TRUE(b.transport->send(b_to_a, pull(7), nullptr, 0).ok());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 2; }));
  EXPECT_EQ(a.last(Event::kMessage).header.seq, 7u);
  EXPECT_EQ(b.count(Event::kClosed), 0u);
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(printed.take(), "");
}

// Where this process listens by TCP over IPv4: address as the kernel's table has it, and port.
std::vector<std::pair<std::uint32_t, std::uint16_t>> listening_at() {
  std::set<std::string> ours;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    ours.insert(std::filesystem::read_symlink(entry.path(), error).string());
  }
  std::vector<std::pair<std::uint32_t, std::uint16_t>> out;
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  while (std::getline(table, line)) {
    unsigned address = 0, port = 0, state = 0;
    unsigned long inode = 0;
    if (std::sscanf(line.c_str(), " %*d: %8x:%x %*8x:%*x %x %*s %*s %*s %*d %*d %lu", &address, &port, &state,
                    &inode) == 4 &&
        state == 0x0A && ours.contains(fmt::format("socket:[{}]", inode))) {
      out.emplace_back(address, static_cast<std::uint16_t>(port));
    }
  }
  return out;
}

// Goal: with a loopback address everything listens on loopback alone, and strangers at UCX's own ports do no
// harm.
TEST_F(UcxTransportTest, LivesOnWhenStrangersReachUcx) {
  UcxOptions options = options_of("trainer-0", 1);
  options.transports = "";
  Side a(make_ucx_transport(options));
  Side b(make_ucx_transport(options_of("worker-0", 2)));
  const EndpointId b_to_a = introduce(b, *a.transport->listen());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  const auto ports = listening_at();
  EXPECT_GE(ports.size(), 3u);  // ours, and one of each UCX worker
  for (const auto& [address, port] : ports) {
    EXPECT_EQ(address, htonl(INADDR_LOOPBACK)) << port;
    for (const auto& junk : {bytes_of("GET / HTTP/1.1\r\n\r\n"), bytes_of("SPU"), pattern(20'000, 1), {}}) {
      UniqueFd fd = connected_socket(fmt::format("127.0.0.1:{}", port));
      send_junk(fd.get(), junk);
      for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(a.transport->progress(kNanosPerMilli, a).ok());
        ASSERT_TRUE(b.transport->progress(kNanosPerMilli, b).ok());
      }
    }
  }
  ASSERT_TRUE(b.transport->send(b_to_a, pull(7), nullptr, 0).ok());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.last(Event::kMessage).header.seq == 7; }));
}

// Goal: an address where nobody, or somebody else, listens is an error in time, with the address in it.
TEST_F(UcxTransportTest, SaysWhenNothingOfOursListens) {
  Side side(make_ucx_transport(options_of("worker-0", 2)));
  UniqueFd silent(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(silent.get(), reinterpret_cast<sockaddr*>(&name), sizeof name), 0);
  socklen_t size = sizeof name;
  ASSERT_EQ(getsockname(silent.get(), reinterpret_cast<sockaddr*>(&name), &size), 0);
  const std::string address = fmt::format("127.0.0.1:{}", ntohs(name.sin_port));
  const Status refused = side.transport->connect(address, kNanosPerSecond).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  EXPECT_NE(refused.message().find(address), std::string::npos) << refused.message();
  ASSERT_EQ(listen(silent.get(), 8), 0);
  const auto fails = [&](StatusCode code, std::string_view reason, std::int64_t timeout_ns,
                         const std::function<void()>& meanwhile) {
    const std::size_t before = side.count(Event::kClosed);
    const Result<EndpointId> endpoint = side.transport->connect(address, timeout_ns);
    ASSERT_TRUE(endpoint.ok()) << endpoint.status().to_string();
    meanwhile();
    ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kClosed) == before + 1; }));
    const Status why = side.last(Event::kClosed).status;
    EXPECT_EQ(why.code(), code) << why.to_string();
    EXPECT_NE(why.message().find(address), std::string::npos) << why.message();
    EXPECT_NE(why.message().find(reason), std::string::npos) << why.message();
  };
  fails(StatusCode::kDeadlineExceeded, "no hello", 100 * kNanosPerMilli, [] {});
  UniqueFd web;
  UniqueFd never(accept(silent.get(), nullptr, nullptr));
  fails(StatusCode::kDataLoss, "not our protocol", 10 * kNanosPerSecond, [&] {
    web = UniqueFd(accept(silent.get(), nullptr, nullptr));
    send_junk(web.get(), bytes_of("HTTP/1.1 400 Bad Request\r\n\r\n"));
  });
  EXPECT_EQ(side.transport->connect("nonsense", kNanosPerSecond).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(side.transport->connect("10.1.2.3:5000", kNanosPerSecond).status().code(),
            StatusCode::kFailedPrecondition);
}

// Goal: a peer that connects and says nothing does not hold its place for ever.
TEST_F(UcxTransportTest, ClosesSilentPeers) {
  UcxOptions options = options_of("trainer-0", 1);
  options.hello_timeout_ns = 50 * kNanosPerMilli;
  Side a(make_ucx_transport(options));
  const UniqueFd stranger = connected_socket(*a.transport->listen());
  ASSERT_TRUE(pump({&a}, [&] { return a.count(Event::kClosed) == 1; }));
  EXPECT_EQ(a.last(Event::kClosed).status.code(), StatusCode::kDeadlineExceeded);
}

// Goal: the owner checks too: what it freed is not sent, though the reader has not heard of it yet.
TEST_F(UcxTransportTest, OwnersCheckWhatIsRead) {
  Side a(make_ucx_transport(options_of("trainer-0", 1)));
  Side b(make_ucx_transport(options_of("worker-0", 2)));
  const EndpointId b_to_a = introduce(b, *a.transport->listen());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  const EndpointId a_to_b = a.last(Event::kAccepted).endpoint;
  auto memory = *a.transport->allocate(100'000, "a slot");
  const MemoryRef ref = memory->ref();
  ASSERT_TRUE(a.transport->grant(a_to_b, memory).ok());
  ASSERT_TRUE(a.transport->send(a_to_b, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kMessage) == 1; }));
  memory.reset();
  std::vector<std::byte> landed(100'000, std::byte{0xCD});
  b.transport->read(b_to_a, {ref.region, ref.generation, 0, 100'000}, landed.data(), 1);
  ASSERT_TRUE(pump({&b, &a}, [&] { return b.count(Event::kRead) == 1; }));
  const Status why = b.last(Event::kRead).status;
  EXPECT_NE(why.message().find("freed"), std::string::npos) << why.to_string();
  EXPECT_NE(why.message().find("trainer-0"), std::string::npos) << why.to_string();
  EXPECT_EQ(landed[0], std::byte{0xCD});
  EXPECT_EQ(b.count(Event::kClosed), 0u);
}

// Goal: memory of others is served from where it lies; the same extent is registered once while it is held.
TEST_F(UcxTransportTest, AdoptsMemory) {
  Side a(make_ucx_transport(options_of("trainer-0", 1)));
  Side b(make_ucx_transport(options_of("worker-0", 2)));
  const EndpointId b_to_a = introduce(b, *a.transport->listen());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  const EndpointId a_to_b = a.last(Event::kAccepted).endpoint;
  const auto bytes = pattern(3'000'001, 9);
  auto memory = *a.transport->adopt(bytes.data(), bytes.size(), "a tensor");
  EXPECT_EQ(memory->ref().address, bytes.data());
  EXPECT_EQ(*a.transport->adopt(bytes.data(), bytes.size(), "again"), memory);
  EXPECT_NE(*a.transport->adopt(bytes.data(), bytes.size() - 1, "a part"), memory);
  EXPECT_EQ(a.transport->adopt(nullptr, 5, "nothing").status().code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(a.transport->grant(a_to_b, memory).ok());
  ASSERT_TRUE(a.transport->send(a_to_b, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kMessage) == 1; }));
  std::vector<std::byte> landed(bytes.size());
  std::vector<ReadPart> parts;
  for (std::uint64_t at = 0; at < bytes.size(); at += 1'000'000) {
    const std::uint64_t size = std::min<std::uint64_t>(1'000'000, bytes.size() - at);
    parts.push_back(
        {.remote = {memory->ref().region, memory->ref().generation, at, size}, .local = landed.data() + at});
  }
  b.transport->read_parts(b_to_a, parts, 1);
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kRead) == 1; }));
  EXPECT_TRUE(b.last(Event::kRead).status.ok());
  EXPECT_EQ(landed, bytes);
  const std::uint32_t generation = memory->ref().generation, region = memory->ref().region;
  memory.reset();
  const auto later = *a.transport->adopt(bytes.data(), bytes.size(), "a tensor");
  EXPECT_TRUE(later->ref().region != region || later->ref().generation != generation);
}

// A trainer and a worker with as many UCX workers each, introduced.
struct Peers {
  explicit Peers(std::uint32_t workers) : a(make("trainer-0", workers)), b(make("worker-0", workers)) {
    b_to_a = introduce(b, *a.transport->listen());
    EXPECT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
    a_to_b = a.last(Event::kAccepted).endpoint;
  }
  static Result<std::unique_ptr<Transport>> make(const std::string& name, std::uint32_t workers) {
    UcxOptions options = options_of(name, 1);
    options.workers = workers;
    return make_ucx_transport(options);
  }
  // Until b knows of it.
  void grant(const std::shared_ptr<ExportedMemory>& memory) {
    EXPECT_TRUE(a.transport->grant(a_to_b, memory).ok());
    EXPECT_TRUE(a.transport->send(a_to_b, pull(1), nullptr, 0).ok());
    EXPECT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kMessage) == 1; }));
  }

  Side a, b;
  EndpointId b_to_a = 0, a_to_b = 0;
};

// Goal: adopted memory is not let go of while UCX sends from it; a read of what is left fails by name,
// however many streams carry parts of it.
TEST_F(UcxTransportTest, WaitsForTransfersOutOfAdoptedMemory) {
  for (const std::uint32_t workers : {1u, 3u}) {
    Peers peers(workers);
    Side &a = peers.a, &b = peers.b;
    auto bytes = std::make_unique<std::vector<std::byte>>(pattern(128u << 20, 9));
    auto memory = *a.transport->adopt(bytes->data(), bytes->size(), "a tensor");
    peers.grant(memory);
    std::vector<std::byte> landed(bytes->size());
    b.transport->read(peers.b_to_a, {memory->ref().region, memory->ref().generation, 0, bytes->size()},
                      landed.data(), 1);
    // Until the first fragments are under way.
    for (int i = 0; i < 5; ++i) {
      ASSERT_TRUE(b.transport->progress(0, b).ok());
      ASSERT_TRUE(a.transport->progress(0, a).ok());
    }
    std::atomic<bool> begun{false}, let_go{false};
    std::thread owner([&] {
      begun = true;
      memory.reset();
      bytes.reset();
      let_go = true;
    });
    while (!begun) std::this_thread::yield();
    EXPECT_TRUE(pump({&a, &b}, [&] { return let_go && b.count(Event::kRead) == 1; }));
    owner.join();
    const Status why = b.last(Event::kRead).status;
    EXPECT_NE(why.message().find("freed"), std::string::npos) << why.to_string();
    EXPECT_EQ(a.count(Event::kClosed) + b.count(Event::kClosed), 0u);
  }
}

// Goal: of as many reads as there are streams, each comes over one of them, so in order; a long one that is
// alone over all.
TEST_F(UcxTransportTest, ReadsComeInOrderOverSeveralStreams) {
  class Order final : public ReadTarget {
   public:
    void take(std::uint64_t offset, std::span<const std::byte> bytes) override {
      std::lock_guard lock(mutex_);
      in_order = in_order && offset == next_;
      next_ = offset + bytes.size();
      threads.insert(std::this_thread::get_id());
    }
    bool in_order = true;
    std::set<std::thread::id> threads;

   private:
    std::mutex mutex_;
    std::uint64_t next_ = 0;
  };
  constexpr std::uint64_t kBytes = 32u << 20;
  constexpr std::uint32_t kStreams = 3;
  Peers peers(kStreams);
  Side &a = peers.a, &b = peers.b;
  const auto memory = *a.transport->allocate(kBytes, "weights");
  peers.grant(memory);
  const auto read = [&](std::uint64_t bytes) {
    const auto target = std::make_shared<Order>();
    b.transport->read_to(peers.b_to_a, {memory->ref().region, memory->ref().generation, 0, bytes}, target, 1);
    return target;
  };
  const auto alone = read(kBytes);
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kRead) == 1; }));
  EXPECT_EQ(alone->threads.size(), kStreams);

  // Short ones are not shared, whenever they come.
  std::vector<std::shared_ptr<Order>> several;
  for (std::size_t i = 0; i < 2 * kStreams; ++i) several.push_back(read(3u << 20));
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kRead) == 1 + several.size(); }));
  for (const auto& each : several) {
    EXPECT_TRUE(each->in_order);
    EXPECT_EQ(each->threads.size(), 1u);
  }
}

// Goal: a read to a target brings every byte once, over one or several streams, and is checked as others are.
TEST_F(UcxTransportTest, ReadsToTargets) {
  class Target final : public ReadTarget {
   public:
    explicit Target(std::uint64_t bytes) : bytes_(bytes), times_(bytes) {}
    void take(std::uint64_t offset, std::span<const std::byte> bytes) override {
      std::copy(bytes.begin(), bytes.end(), bytes_.begin() + static_cast<std::ptrdiff_t>(offset));
      for (std::size_t i = 0; i < bytes.size(); ++i) ++times_[offset + i];
    }
    bool has(std::uint64_t from) const {
      for (std::uint64_t i = 0; i < bytes_.size(); ++i) {
        if (bytes_[i] != coded_byte(from + i) || times_[i] != 1) return false;
      }
      return true;
    }

   private:
    std::vector<std::byte> bytes_;
    std::vector<std::uint8_t> times_;
  };
  constexpr std::uint64_t kBytes = 5'000'011;
  for (const std::uint32_t workers : {1u, 3u}) {
    Peers peers(workers);
    Side &a = peers.a, &b = peers.b;
    ASSERT_TRUE(b.transport->can_read_to());
    const auto memory = *a.transport->allocate(kBytes, "a slot");
    for (std::uint64_t i = 0; i < kBytes; ++i) memory->ref().address[i] = coded_byte(i);
    peers.grant(memory);
    const auto read = [&](std::uint64_t offset, std::uint64_t bytes, std::shared_ptr<ReadTarget> target) {
      const std::size_t before = b.count(Event::kRead);
      b.transport->read_to(peers.b_to_a, {memory->ref().region, memory->ref().generation, offset, bytes},
                           std::move(target), 1);
      EXPECT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kRead) == before + 1; }));
      return b.last(Event::kRead).status;
    };
    for (const std::uint64_t bytes :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{4096}, kBytes - 777}) {
      const auto target = std::make_shared<Target>(bytes);
      ASSERT_TRUE(read(777, bytes, target).ok());
      EXPECT_TRUE(target->has(777)) << bytes;
      EXPECT_EQ(target.use_count(), 1) << "nothing of the transport holds it after the end";
    }
    EXPECT_EQ(read(kBytes - 1, 2, std::make_shared<Target>(2)).code(), StatusCode::kOutOfRange);
    a.transport->close(peers.a_to_b);  // with a read under way
    const auto target = std::make_shared<Target>(kBytes);
    const std::size_t before = b.count(Event::kRead);
    b.transport->read_to(peers.b_to_a, {memory->ref().region, memory->ref().generation, 0, kBytes}, target,
                         2);
    EXPECT_TRUE(
        pump({&a, &b}, [&] { return b.count(Event::kRead) == before + 1 && b.count(Event::kClosed) == 1; }));
    EXPECT_FALSE(b.last(Event::kRead).status.ok());
    EXPECT_EQ(target.use_count(), 1);
  }
}

// Goal: reads are fetched where the options say so, and checked the same.
TEST_F(UcxTransportTest, FetchesWhereItShould) {
  UcxOptions options = options_of("trainer-0", 1);
  options.reads = UcxOptions::Reads::kGets;
  options.fragment_bytes = 100'000;
  Side a(make_ucx_transport(options));
  options.self_name = "worker-0";
  Side b(make_ucx_transport(options));
  const EndpointId b_to_a = introduce(b, *a.transport->listen());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  const EndpointId a_to_b = a.last(Event::kAccepted).endpoint;
  const auto memory = *a.transport->allocate(1'000'000, "a slot");
  for (std::uint64_t i = 0; i < 1'000'000; ++i) memory->ref().address[i] = coded_byte(i);
  ASSERT_TRUE(a.transport->grant(a_to_b, memory).ok());
  ASSERT_TRUE(a.transport->send(a_to_b, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kMessage) == 1; }));
  std::vector<std::byte> landed(1'000'000);
  const auto read = [&](std::uint64_t offset, std::uint64_t bytes) {
    const std::size_t before = b.count(Event::kRead);
    b.transport->read(b_to_a, {memory->ref().region, memory->ref().generation, offset, bytes}, landed.data(),
                      1);
    EXPECT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kRead) == before + 1; }));
    return b.last(Event::kRead).status;
  };
  for (const std::uint64_t bytes : {0ull, 1ull, 15ull, 4096ull, 700'001ull}) {
    ASSERT_TRUE(read(777, bytes).ok());
    for (std::uint64_t i = 0; i < bytes; ++i) ASSERT_EQ(landed[i], coded_byte(777 + i));
  }
  EXPECT_EQ(read(999'999, 2).code(), StatusCode::kOutOfRange);
}

// Goal: IPv6 works, and its addresses are written in brackets.
TEST_F(UcxTransportTest, SpeaksIpv6) {
  UniqueFd probe(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 name{};
  name.sin6_family = AF_INET6;
  name.sin6_addr = in6addr_loopback;
  if (!probe || bind(probe.get(), reinterpret_cast<sockaddr*>(&name), sizeof name) != 0)
    GTEST_SKIP() << "no IPv6 here";
  UcxOptions options = options_of("trainer-0", 1);
  options.host = "::1";
  Side a(make_ucx_transport(options));
  options.self_name = "worker-0";
  Side b(make_ucx_transport(options));
  const std::string address = *a.transport->listen();
  EXPECT_EQ(address.substr(0, 6), "[::1]:");
  introduce(b, address);
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
}

// Goal: which UCX was loaded can be told.
TEST_F(UcxTransportTest, SaysWhichUcxItIs) {
  const std::string which = *describe_ucx();
  EXPECT_NE(which.find("libucp.so.0"), std::string::npos) << which;
  std::printf("%s\n", which.c_str());
}

// Goal: with nothing to do it waits, it does not spin.
TEST_F(UcxTransportTest, WaitsWhenIdle) {
  Side a(make_ucx_transport(options_of("trainer-0", 1)));
  Side b(make_ucx_transport(options_of("worker-0", 2)));
  introduce(b, *a.transport->listen());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(a.transport->progress(kNanosPerMilli, a).ok());
    ASSERT_TRUE(b.transport->progress(kNanosPerMilli, b).ok());
  }
  const auto used_ns = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * kNanosPerSecond + time.tv_nsec;
  };
  const std::int64_t before_ns = used_ns(), start_ns = SystemClock::instance().now_ns();
  int rounds = 0;
  while (SystemClock::instance().now_ns() - start_ns < 500 * kNanosPerMilli) {
    ASSERT_TRUE(a.transport->progress(250 * kNanosPerMilli, a).ok());
    ++rounds;
  }
  EXPECT_LT(rounds, 20);
  EXPECT_LT(used_ns() - before_ns, 50 * kNanosPerMilli);
}

// Goal: a crash stays a crash: UCX's handlers are not left installed.
TEST_F(UcxTransportTest, LeavesSignalsAlone) {
  Side side(make_ucx_transport(options_of("worker-0", 2)));
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGINT, SIGTERM, SIGUSR1}) {
    struct sigaction action{};
    ASSERT_EQ(sigaction(number, nullptr, &action), 0);
#if !defined(__SANITIZE_ADDRESS__)
    EXPECT_EQ(action.sa_handler, SIG_DFL) << number;
#endif
  }
}

// Goal: options that cannot work are refused at once, with what to do.
TEST_F(UcxTransportTest, RefusesImpossibleOptions) {
  const auto status = [](UcxOptions options) { return make_ucx_transport(std::move(options)).status(); };
  const UcxOptions good = options_of("worker-0", 1);
  EXPECT_TRUE(status(good).ok());
  UcxOptions bad = good;
  bad.token = 0;
  EXPECT_EQ(status(bad).code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.self_name = std::string(65, 'x');
  EXPECT_EQ(status(bad).code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.host = "0.0.0.0";
  EXPECT_NE(status(bad).message().find("--interface"), std::string::npos) << status(bad).message();
  bad = good;
  bad.host = "192.0.2.77";
  EXPECT_NE(status(bad).message().find("no network interface"), std::string::npos) << status(bad).message();
  bad = good;
  bad.interface = "no-such-interface0";
  const Status missing = status(bad);
  EXPECT_FALSE(missing.ok());
  EXPECT_NE(missing.message().find("no-such-interface0"), std::string::npos) << missing.message();
  Side side(make_ucx_transport(good));
  const std::string address = *side.transport->listen();
  EXPECT_EQ(*side.transport->listen(), address);  // again is the same
  bad = good;
  bad.port = parse_host_port(address, "a test")->port;
  Side rival(make_ucx_transport(bad));
  const Status taken = rival.transport->listen().status();
  EXPECT_FALSE(taken.ok());
  EXPECT_NE(taken.message().find("listens there"), std::string::npos) << taken.message();
}

// Goal: a registration that the limit of locked memory forbids says so and how to raise it; what was
// registered before goes on, and ends cleanly.
TEST_F(UcxTransportTest, Case114RegistrationBeyondTheLimitOfLockedMemory) {
  UcxOptions options = options_of("trainer-0", 1);
  options.fail_registration = [](std::uint64_t registration, bool) { return registration == 3; };
  Side a(make_ucx_transport(options));
  auto first = *a.transport->allocate(10'000, "export buffer 0");
  auto second = *a.transport->allocate(20'000, "export buffer 1");
  const Status third = a.transport->allocate(3u << 20, "export buffer 2").status();
  EXPECT_EQ(third.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(third.info().reason, Reason::kNoMemory);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  const std::string allowed = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur);
  for (const std::string& part : {std::string("export buffer 2"), std::string("3 MiB"), "may lock " + allowed,
                                  std::string("ulimit -l")}) {
    EXPECT_NE(third.message().find(part), std::string::npos) << part << ": " << third.message();
  }
  EXPECT_EQ(a.transport->counters().regions, 2u);
  EXPECT_EQ(a.transport->counters().region_bytes, 30'000u);
  first->ref().address[9'999] = second->ref().address[19'999] = std::byte{1};
  first.reset();
  second.reset();
  EXPECT_EQ(a.transport->counters().regions, 0u);
  EXPECT_TRUE(a.transport->allocate(3u << 20, "export buffer 2").ok());
}

// Goal: memory of which a part of the registration fails is no region: it may end and be used again, and no
// peer reaches it.
TEST_F(UcxTransportTest, Case115RegistrationIsAllOrNothing) {
  UcxOptions options = options_of("trainer-0", 1);
  options.fail_registration = [](std::uint64_t registration, bool key) { return registration == 1 && key; };
  Side a(make_ucx_transport(options));
  Side b(make_ucx_transport(options_of("worker-0", 2)));
  const EndpointId b_to_a = introduce(b, *a.transport->listen());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  const EndpointId a_to_b = a.last(Event::kAccepted).endpoint;
  auto bytes = pattern(1u << 20, 3);
  EXPECT_EQ(a.transport->adopt(bytes.data(), bytes.size(), "a tensor").status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(a.transport->counters().regions, 0u);
  bytes = {};
  std::vector<std::byte> landed(100, std::byte{0xCD});
  b.transport->read(b_to_a, {1, 1, 0, 100}, landed.data(), 1);
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kRead) == 1; }));
  EXPECT_EQ(b.last(Event::kRead).status.code(), StatusCode::kNotFound);
  bytes = pattern(1u << 20, 4);
  const auto memory = *a.transport->adopt(bytes.data(), bytes.size(), "a tensor");
  ASSERT_TRUE(a.transport->grant(a_to_b, memory).ok());
  ASSERT_TRUE(a.transport->send(a_to_b, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kMessage) == 1; }));
  b.transport->read(b_to_a, {memory->ref().region, memory->ref().generation, 0, 100}, landed.data(), 2);
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kRead) == 2; }));
  EXPECT_TRUE(std::equal(landed.begin(), landed.end(), bytes.begin()));
}

// Goal: a UCX older than the one that this was built with is refused with both versions and where it lies; a
// newer one of the same major version is taken.
TEST(UcxLibraryTest, Case126OlderUcxIsRefused) {
  const std::string path = "/opt/old/lib/libucp.so.0";
  const Status old = check_ucx_version(UCP_API_MAJOR, UCP_API_MINOR - 1, 7, path, "");
  EXPECT_EQ(old.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(old.info().reason, Reason::kHost);
  for (const std::string& part : {fmt::format("UCX {}.{}.7", UCP_API_MAJOR, UCP_API_MINOR - 1),
                                  fmt::format("built with {}.{}", UCP_API_MAJOR, UCP_API_MINOR), path,
                                  std::string("LD_LIBRARY_PATH")}) {
    EXPECT_NE(old.message().find(part), std::string::npos) << part << ": " << old.message();
  }
  EXPECT_TRUE(check_ucx_version(UCP_API_MAJOR, UCP_API_MINOR, 0, path, "").ok());
  EXPECT_TRUE(check_ucx_version(UCP_API_MAJOR, UCP_API_MINOR + 40, 0, path, "").ok());
  EXPECT_FALSE(check_ucx_version(UCP_API_MAJOR + 1, 0, 0, path, "").ok());
  const Status lacking = check_ucx_version(UCP_API_MAJOR, UCP_API_MINOR, 0, path, " ucp_am_send_nbx");
  EXPECT_NE(lacking.message().find("lacks ucp_am_send_nbx"), std::string::npos) << lacking.message();
}

// Goal: peers whose UCX has nothing in common say so soon, with the transports of both.
TEST_F(UcxTransportTest, Case128NoTransportInCommon) {
  Side a(make_ucx_transport(options_of("trainer-0", 1)));
  UcxOptions options = options_of("worker-0", 2);
  options.transports = "posix,self";
  options.interface = "memory";
  Result<std::unique_ptr<Transport>> made = make_ucx_transport(options);
  if (!made.ok()) GTEST_SKIP() << made.status().message();
  Side b(std::move(made));
  const std::int64_t start_ns = SystemClock::instance().now_ns();
  introduce(b, *a.transport->listen());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kClosed) == 1 && b.count(Event::kClosed) == 1; }));
  EXPECT_LT(SystemClock::instance().now_ns() - start_ns, 10 * kNanosPerSecond);
  int named = 0;
  for (const Side* side : {&a, &b}) {
    const std::string message = side->last(Event::kClosed).status.message();
    named += message.find("\"tcp on lo\"") != std::string::npos &&
             message.find("\"posix,self on memory\"") != std::string::npos;
  }
  EXPECT_GE(named, 1) << a.last(Event::kClosed).status.message() << "\n"
                      << b.last(Event::kClosed).status.message();
}

// Goal: memory that cannot be read is refused when it is adopted, by name and offset, and ends no process.
TEST_F(UcxTransportTest, Case131MemoryThatCannotBeRead) {
  Side a(make_ucx_transport(options_of("trainer-0", 1)));
  const std::size_t page = 4096, pages = 1500;
  void* const area = mmap(nullptr, pages * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(area, MAP_FAILED);
  auto* const data = static_cast<std::byte*>(area);
  EXPECT_TRUE(a.transport->adopt(data, pages * page, "lm_head.weight").ok());
  const auto refused = [&](std::size_t bad_page) {
    ASSERT_EQ(mprotect(data + bad_page * page, page, PROT_NONE), 0);
    const Status why = a.transport->adopt(data + 100, pages * page - 100, "lm_head.weight").status();
    EXPECT_EQ(why.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(why.message().find("lm_head.weight"), std::string::npos) << why.message();
    EXPECT_NE(why.message().find(fmt::format("offset {} ", bad_page * page - 100)), std::string::npos)
        << why.message();
  };
  refused(pages - 1);
  refused(1100);
  refused(1);
  ASSERT_EQ(munmap(area, pages * page), 0);
  EXPECT_FALSE(a.transport->adopt(data, page, "lm_head.weight").ok());
  EXPECT_EQ(a.transport->counters().regions, 0u);
}

// Goal: a hello cut short at every byte, and with lengths that lie, closes its connection and nothing else.
TEST_F(UcxTransportTest, Case133HellosCutShortAndWithWrongLengths) {
  Side a(make_ucx_transport(options_of("trainer-0", 1)));
  UcxOptions options = options_of("worker-0", 2);
  options.workers = 2;
  Side b(make_ucx_transport(options));
  const std::string address = *a.transport->listen();
  // Whoever is connected to is greeted at once.
  std::vector<std::byte> hello(4096);
  {
    const UniqueFd fd = connected_socket(*b.transport->listen());
    ASSERT_TRUE(pump({&b}, [&] { return b.count(Event::kAccepted) == 1; }));
    const ssize_t got = recv(fd.get(), hello.data(), hello.size(), 0);
    ASSERT_GT(got, 100);
    hello.resize(static_cast<std::size_t>(got));
  }
  const std::size_t name_end = kUcxFrameBytes + std::string_view("worker-0").size();
  const auto send = [&](const std::vector<std::byte>& bytes) {
    const std::size_t before = a.count(Event::kClosed);
    UniqueFd fd = connected_socket(address);
    send_junk(fd.get(), bytes);
    fd.reset();
    ASSERT_TRUE(pump({&a}, [&] { return a.count(Event::kClosed) == before + 1; }));
  };
  for (std::size_t size = 0; size < hello.size(); ++size) {
    send({hello.begin(), hello.begin() + static_cast<std::ptrdiff_t>(size)});
  }
  // The lengths of the transports, of the list of addresses, and of the first address.
  std::uint32_t transports = 0;
  std::memcpy(&transports, hello.data() + name_end, sizeof transports);
  const std::size_t list = name_end + sizeof transports + transports;
  for (const std::size_t at : {name_end, list, list + sizeof(std::uint32_t)}) {
    for (const std::uint32_t length : {0u, 3u, 17u, 255u, 4096u, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
      std::vector<std::byte> wrong = hello;
      std::memcpy(wrong.data() + at, &length, sizeof length);
      send(wrong);
    }
  }
  introduce(b, address);
  const std::size_t before = a.count(Event::kMessage);
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == before + 1; }));
}

}  // namespace
}  // namespace shardpull

// UCX's calls come here, as the program exports these (CMakeLists.txt).
extern "C" [[gnu::visibility("default")]] ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  if (shardpull::before_send) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < message->msg_iovlen; ++i) bytes += message->msg_iov[i].iov_len;
    shardpull::before_send(bytes);
  }
  return syscall(SYS_sendmsg, fd, message, flags);
}
extern "C" [[gnu::visibility("default")]] ssize_t send(int fd, const void* data, std::size_t bytes, int flags) {
  if (shardpull::before_send) shardpull::before_send(bytes);
  return syscall(SYS_sendto, fd, data, bytes, flags, nullptr, 0);
}
