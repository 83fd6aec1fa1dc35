#include "transport/shm/shm_transport.h"

#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/local_transport_testing.h"

namespace shardpull::transport_testing {
namespace {

using ShmBackend = LocalTestBackend<LocalBackend::kShm, make_shm_transport>;

// Goal: memory granted on one side can be read and mapped on the other, byte for byte, and never written.
TEST(ShmTransport, ReadsAndMapsGrantedMemory) {
  Pair<ShmBackend> pair;
  const std::size_t bytes = (5u << 20) + 123;
  const auto memory = pair.a.transport->allocate(bytes, "a serve slot");
  ASSERT_TRUE(memory.ok());
  const MemoryRef ref = (*memory)->ref();
  EXPECT_EQ(ref.bytes, bytes);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(ref.address) % 4096, 0u);
  const auto contents = pattern(bytes, 4);
  std::memcpy(ref.address, contents.data(), bytes);
  ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, *memory).ok());
  ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, *memory).ok());  // idempotent
  ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kMessage) == 1; }));

  const RemoteRef whole{.region = ref.region, .generation = ref.generation, .offset = 0, .bytes = bytes};
  std::vector<std::byte> landed(bytes);
  pair.b.transport->read(pair.b_to_a, whole, landed.data(), 77);
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kRead) == 1; }));
  EXPECT_TRUE(pair.b.last(Event::kRead).status.ok());
  EXPECT_EQ(pair.b.last(Event::kRead).token, 77u);
  EXPECT_EQ(landed, contents);
  EXPECT_EQ(pair.b.transport->counters().payload_bytes_read, bytes);

  const auto mapping = pair.b.transport->map(pair.b_to_a, {ref.region, ref.generation, 100, bytes - 100});
  ASSERT_TRUE(mapping.ok());
  EXPECT_EQ(std::memcmp(mapping->data, contents.data() + 100, bytes - 100), 0);
  (*memory)->ref().address[100] = std::byte{0xEE};
  EXPECT_EQ(mapping->data[0], std::byte{0xEE});  // the same pages
  // What may not be mapped is told in the words of what may not be read.
  const RemoteRef outside{ref.region, ref.generation, 1, bytes};
  pair.b.transport->read(pair.b_to_a, outside, landed.data(), 78);
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kRead) == 2; }));
  EXPECT_EQ(pair.b.last(Event::kRead).status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(pair.b.transport->map(pair.b_to_a, outside).status(), pair.b.last(Event::kRead).status);
  pair.b.transport->add_mapped_bytes(5);
  EXPECT_EQ(pair.b.transport->counters().payload_bytes_read, bytes + 5);
  EXPECT_EQ(pair.b.transport->counters().mapped_bytes, bytes);
  EXPECT_EQ(pair.a.transport->counters().regions, 1u);
  EXPECT_EQ(pair.a.transport->counters().region_bytes, bytes);
  // The kernel itself may not write there for us.
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  ASSERT_EQ(write(pipes[1], "x", 1), 1);
  EXPECT_EQ(::read(pipes[0], const_cast<std::byte*>(mapping->data), 1), -1);
  EXPECT_EQ(errno, EFAULT);
  ::close(pipes[0]);
  ::close(pipes[1]);
}

// Goal: exported memory and mappings outlive the transports that made them.
TEST(ShmTransport, MemoryOutlivesTheTransport) {
  std::shared_ptr<ExportedMemory> memory;
  Transport::Mapping mapping;
  {
    Pair<ShmBackend> pair;
    memory = *pair.a.transport->allocate(1 << 20, "weights");
    memory->ref().address[5] = std::byte{5};
    ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, memory).ok());
    ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(1), nullptr, 0).ok());
    ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kMessage) == 1; }));
    mapping =
        *pair.b.transport->map(pair.b_to_a, {memory->ref().region, memory->ref().generation, 0, 1 << 20});
  }
  memory->ref().address[6] = std::byte{6};
  EXPECT_EQ(mapping.data[5], std::byte{5});
  EXPECT_EQ(mapping.data[6], std::byte{6});
  memory.reset();
  EXPECT_EQ(mapping.data[6], std::byte{6});
}

// Sends bytes with descriptors, as a grant does.
void send_with_descriptors(int socket, std::vector<std::byte> bytes, const std::vector<int>& fds) {
  if (fds.empty()) {
    [[maybe_unused]] const ssize_t bare = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    return;
  }
  iovec part{bytes.data(), bytes.size()};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  [[maybe_unused]] const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
}

// Goal: descriptors from a hostile peer are neither mapped, if they could harm us, nor kept.
TEST(ShmTransport, RefusesForgedGrantsAndKeepsNoDescriptors) {
  set_log_level(LogLevel::kError);
  ShmBackend backend;
  Side side(backend.make_with("trainer-0", 1));
  const std::string address = *side.transport->listen();
  const std::size_t before = entries_of("/proc/self/fd");
  const auto grant_of = [](std::uint64_t bytes) {
    const auto frame = encode(LocalFrame{.backend = LocalBackend::kShm,
                                         .token = kToken,
                                         .incarnation = 2,
                                         .region = 1,
                                         .generation = 1,
                                         .bytes = bytes});
    return std::vector<std::byte>(frame.begin(), frame.end());
  };
  const auto expect_closed = [&](std::vector<std::byte> bytes, const std::vector<int>& fds,
                                 std::string_view reason, int times = 1) {
    const std::size_t closed = side.count(Event::kClosed);
    UniqueFd fd = stranger(address);
    for (int i = 0; i < times; ++i) send_with_descriptors(fd.get(), bytes, fds);
    ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kClosed) == closed + 1; })) << reason;
    const std::string message = side.last(Event::kClosed).status.message();
    EXPECT_NE(message.find(reason), std::string::npos) << message;
  };
  {
    const UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(ftruncate(unsealed.get(), 4096), 0);
    expect_closed(grant_of(4096), {}, "without its descriptor");
    expect_closed(grant_of(4096), {unsealed.get()}, "not sealed");
    expect_closed(grant_of(4096), {STDIN_FILENO}, "not a memory file");
    const UniqueFd sealed(memfd_create("sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(ftruncate(sealed.get(), 4096), 0);
    ASSERT_EQ(fcntl(sealed.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    expect_closed(grant_of(1 << 20), {sealed.get()}, "claims 1048576 bytes");
    expect_closed(grant_of(4096),
                  {sealed.get(), sealed.get(), sealed.get(), sealed.get(), sealed.get(), sealed.get()},
                  "more than one");
    HotHeader header = pull(1);
    header.token = kToken;
    header.incarnation = 2;
    header.sum = payload_sum(nullptr, 0);
    const auto hot = encode(header);
    expect_closed({hot.begin(), hot.end()}, {sealed.get(), sealed.get()}, "without grants", 60);
    // A second grant of the same generation.
    auto twice = grant_of(4096);
    UniqueFd fd = stranger(address);
    const std::size_t closed = side.count(Event::kClosed);
    send_with_descriptors(fd.get(), twice, {sealed.get()});
    send_with_descriptors(fd.get(), twice, {sealed.get()});
    ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kClosed) == closed + 1; }));
    EXPECT_NE(side.last(Event::kClosed).status.message().find("after generation 1"), std::string::npos);
  }
  EXPECT_EQ(entries_of("/proc/self/fd"), before);
  EXPECT_EQ(side.transport->counters().mapped_bytes, 0u);
  set_log_level(LogLevel::kWarn);
}

// Goal: a process out of descriptors says so, keeps its endpoints, and accepts again once it has some.
TEST(ShmTransport, LivesThroughAShortageOfDescriptors) {
  set_log_level(LogLevel::kError);
  Pair<ShmBackend> pair;
  const std::string address = *pair.a.transport->listen();
  UniqueFd waiting = stranger(address);  // in the backlog
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old_limit), 0);
  const rlimit none{.rlim_cur = 3, .rlim_max = old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const Status refused = pair.a.transport->allocate(4096, "a slot").status();
  const std::int64_t start_ns = SystemClock::instance().now_ns();
  std::uint64_t rounds = 0;
  while (SystemClock::instance().now_ns() - start_ns < 250 * kNanosPerMilli) {
    EXPECT_TRUE(pair.a.transport->progress(50 * kNanosPerMilli, pair.a).ok());
    ++rounds;
  }
  EXPECT_TRUE(pair.b.transport->send(pair.b_to_a, pull(5), nullptr, 0).ok());
  EXPECT_TRUE(pair.pump_until([&] { return pair.a.count(Event::kMessage) == 2; }));
  EXPECT_EQ(pair.a.count(Event::kAccepted), 1u);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old_limit), 0);
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("ulimit -n"), std::string::npos) << refused.message();
  EXPECT_LT(rounds, 1000u);  // it waits: the listener does not keep it busy
  ASSERT_TRUE(pump({&pair.a}, [&] { return pair.a.count(Event::kAccepted) == 2; }));
  set_log_level(LogLevel::kWarn);
}

// Goal: a killed peer is noticed at once, its memory stays readable, and its socket file is replaced by its
// successor.
TEST(ShmTransport, NoticesAKilledPeerAndKeepsItsMemory) {
  ShmBackend backend;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // The child holds memory, grants it to whoever says hello, and never ends by itself.
    Side side(backend.make_with("trainer-0", 100));
    const auto memory = side.transport->allocate(1 << 20, "weights");
    if (!side.transport->listen().ok() || !memory.ok()) _exit(1);
    std::memset((*memory)->ref().address, 0x77, 1 << 20);
    side.on_message_hook = [&](EndpointId endpoint, const HotHeader&) {
      HotHeader reply;
      reply.type = HotType::kReady;
      reply.target = (*memory)->ref().region;
      reply.seq = (*memory)->ref().generation;
      side.transport->grant(endpoint, *memory).ignore();
      side.transport->send(endpoint, reply, nullptr, 0).ignore();
    };
    [[maybe_unused]] const ssize_t told = write(ready[1], "x", 1);
    for (;;) {
      if (!side.transport->progress(kNanosPerSecond, side).ok()) _exit(1);
    }
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  Side side(backend.make_with("worker-0", 5));
  const std::string address = backend.directory() + "/trainer-0.sock";
  const auto endpoint = side.transport->connect(address, kNanosPerSecond);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status().to_string();
  ASSERT_TRUE(side.transport->send(*endpoint, {.type = HotType::kHello}, nullptr, 0).ok());
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kMessage) == 1; }));
  const HotHeader reply = side.last(Event::kMessage).header;
  const RemoteRef whole{.region = reply.target, .generation = reply.seq, .offset = 0, .bytes = 1 << 20};
  const auto mapping = side.transport->map(*endpoint, whole);
  ASSERT_TRUE(mapping.ok());

  // While it lives, nobody else may take its address.
  Side rival(backend.make_with("trainer-0", 101));
  EXPECT_EQ(rival.transport->listen().status().code(), StatusCode::kAlreadyExists);

  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  const std::int64_t killed_ns = SystemClock::instance().now_ns();
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kClosed) == 1; }));
  EXPECT_LT(SystemClock::instance().now_ns() - killed_ns, 5 * kNanosPerSecond);
  EXPECT_EQ(mapping->data[(1 << 20) - 1], std::byte{0x77});
  EXPECT_EQ(side.transport->connect(address, kNanosPerSecond).status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(rival.transport->listen().ok());
  close(ready[0]);
  close(ready[1]);
}

}  // namespace
}  // namespace shardpull::transport_testing
