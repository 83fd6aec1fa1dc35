#include "transport/cma/cma_transport.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "transport/local_transport_testing.h"

namespace shardpull::transport_testing {
namespace {

struct CmaBackend : LocalTestBackend<LocalBackend::kCma, make_cma_transport> {
  using LocalTestBackend::LocalTestBackend;
  static std::string why_not() { return cma_available().message(); }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Cma, TransportContract, CmaBackend);
INSTANTIATE_TYPED_TEST_SUITE_P(Cma, LocalContract, CmaBackend);

class CmaTransport : public TransportContract<CmaBackend> {};

// A forked process that does `body`, which writes what it has to say to the descriptor it is given, and ends.
// Made while no transport lives here: what has threads is not safely forked.
class Child {
 public:
  explicit Child(const std::function<void(int out)>& body) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    from_ = UniqueFd(ends[0]);
    UniqueFd to(ends[1]);
    pid_ = fork();
    if (pid_ == 0) {
      from_.reset();
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      body(to.get());
      _exit(0);
    }
  }
  ~Child() { kill_now(); }
  void kill_now() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  // The next line it wrote, or everything until it ended.
  std::string line() {
    std::string text;
    char c = 0;
    while (::read(from_.get(), &c, 1) == 1 && c != '\n') text += c;
    return text;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  UniqueFd from_;
};

void say(int out, const std::string& text) {
  const std::string line = text + "\n";
  [[maybe_unused]] const ssize_t told = write(out, line.data(), line.size());
}

constexpr std::uint64_t kShift = 3;  // what is adopted begins at an odd address

// Serves `bytes` of malloc'ed, position-coded memory for ever; says its address first.
void serve(CmaBackend& backend, std::uint64_t bytes, int out) {
  Side side(backend.make_with("trainer-0", 100));
  auto* const data = static_cast<std::byte*>(std::malloc(bytes + kShift)) + kShift;
  for (std::uint64_t i = 0; i < bytes; ++i) data[i] = coded_byte(i);
  const auto memory = side.transport->adopt(data, bytes, "a tensor");
  const auto address = side.transport->listen();
  if (!memory.ok() || !address.ok()) {
    say(out, memory.status().to_string() + address.status().to_string());
    return;
  }
  side.on_message_hook = [&](EndpointId endpoint, const HotHeader&) {
    HotHeader reply;
    reply.type = HotType::kReady;
    reply.target = (*memory)->ref().region;
    reply.seq = (*memory)->ref().generation;
    side.transport->grant(endpoint, *memory).ignore();
    side.transport->send(endpoint, reply, nullptr, 0).ignore();
  };
  say(out, *address);
  while (side.transport->progress(kNanosPerSecond, side).ok()) {
  }
}

// A worker that has met the server at `address` and knows its region.
struct Client {
  Client(CmaBackend& backend, const std::string& address) : side(backend.make_with("worker-0", 5)) {
    const auto connected = side.transport->connect(address, kNanosPerSecond);
    EXPECT_TRUE(connected.ok()) << connected.status().to_string();
    if (!connected.ok()) return;
    endpoint = *connected;
    EXPECT_TRUE(side.transport->send(endpoint, {.type = HotType::kHello}, nullptr, 0).ok());
    EXPECT_TRUE(pump({&side}, [&] { return side.count(Event::kMessage) == 1; }));
    region = side.last(Event::kMessage).header.target;
    generation = side.last(Event::kMessage).header.seq;
  }
  RemoteRef window(std::uint64_t offset, std::uint64_t bytes) const {
    return {region, generation, offset, bytes};
  }
  Side side;
  EndpointId endpoint = 0;
  std::uint32_t region = 0, generation = 0;
};

// Goal: memory that another process got from malloc arrives byte for byte, whole, at odd offsets, and in
// thousands of parts.
TEST_F(CmaTransport, ReadsMemoryAnotherProcessDidNotAllocateWithIt) {
  CmaBackend backend;
  const std::uint64_t bytes = (13u << 20) + 5;
  Child child([&](int out) { serve(backend, bytes, out); });
  Client client(backend, child.line());
  ASSERT_NE(client.endpoint, 0u);
  Transport& transport = *client.side.transport;
  EXPECT_EQ(transport.map(client.endpoint, client.window(0, 1)).status().code(), StatusCode::kUnimplemented);
  std::vector<std::byte> landed(bytes);
  for (const std::uint64_t offset : {0u, 1u, 4093u, 70'001u}) {
    const std::size_t before = client.side.count(Event::kRead);
    transport.read(client.endpoint, client.window(offset, bytes - offset), landed.data(), 1);
    ASSERT_TRUE(pump({&client.side}, [&] { return client.side.count(Event::kRead) == before + 1; }));
    ASSERT_TRUE(client.side.last(Event::kRead).status.ok())
        << client.side.last(Event::kRead).status.to_string();
    for (std::uint64_t i = 0; i < bytes - offset; ++i)
      ASSERT_EQ(landed[i], coded_byte(offset + i)) << offset << " " << i;
  }
  // The rows of a column-parallel slice: 2001 bytes of every 4001.
  std::vector<ReadPart> parts;
  for (std::uint64_t row = 0; row < bytes / 4001; ++row) {
    parts.push_back({.remote = client.window(row * 4001 + 7, 2001), .local = landed.data() + row * 2001});
  }
  ASSERT_GT(parts.size(), 3000u);
  const std::size_t rows = parts.size();
  std::fill(landed.begin(), landed.end(), std::byte{0xCD});
  transport.read_parts(client.endpoint, std::move(parts), 2);
  ASSERT_TRUE(pump({&client.side}, [&] { return client.side.count(Event::kRead) == 5; }));
  ASSERT_TRUE(client.side.last(Event::kRead).status.ok());
  for (std::uint64_t row = 0; row < rows; ++row) {
    for (std::uint64_t i = 0; i < 2001; ++i)
      ASSERT_EQ(landed[row * 2001 + i], coded_byte(row * 4001 + 7 + i)) << row;
  }
  EXPECT_EQ(landed[rows * 2001], std::byte{0xCD});
}

// Goal: a peer killed in the middle of reads is an error of each read that was not done, then the end of its
// endpoint, at once.
TEST_F(CmaTransport, NoticesAPeerKilledInMidRead) {
  set_log_level(LogLevel::kError);
  CmaBackend backend;
  const std::uint64_t bytes = 64u << 20;
  Child child([&](int out) { serve(backend, bytes, out); });
  Client client(backend, child.line());
  ASSERT_NE(client.endpoint, 0u);
  std::vector<std::byte> landed(bytes);
  constexpr std::size_t kReads = 200;
  for (ReadToken token = 0; token < kReads; ++token) {
    client.side.transport->read(client.endpoint, client.window(0, bytes), landed.data(), token);
  }
  ASSERT_TRUE(pump({&client.side}, [&] { return client.side.count(Event::kRead) >= 1; }));
  const std::int64_t killed_ns = SystemClock::instance().now_ns();
  child.kill_now();
  ASSERT_TRUE(pump({&client.side}, [&] { return client.side.count(Event::kClosed) == 1; }));
  EXPECT_LT(SystemClock::instance().now_ns() - killed_ns, 5 * kNanosPerSecond);
  EXPECT_EQ(client.side.count(Event::kRead), kReads);
  EXPECT_EQ(client.side.events.back().kind, Event::kClosed);
  const Event last = client.side.last(Event::kRead);
  EXPECT_EQ(last.status.code(), StatusCode::kUnavailable);
  EXPECT_EQ(last.status.info().reason, Reason::kPeerLost);
  EXPECT_NE(last.status.message().find("trainer-0.sock"), std::string::npos) << last.status.message();
  for (const Event& event : client.side.events) {
    if (event.kind != Event::kRead || event.status.ok()) continue;
    EXPECT_EQ(event.status.code(), StatusCode::kUnavailable);
  }
  set_log_level(LogLevel::kWarn);
}

// Goal: an extent has one name while it is held; another extent, or the same one later, has another.
TEST_F(CmaTransport, NamesEachExtentOnce) {
  CmaBackend backend;
  Side side(backend.make_with("trainer-0", 1));
  Transport& transport = *side.transport;
  std::vector<std::byte> bytes(100'000);
  auto whole = *transport.adopt(bytes.data(), bytes.size(), "a tensor");
  EXPECT_EQ(whole->ref().address, bytes.data());
  EXPECT_EQ(whole->ref().bytes, bytes.size());
  auto again = *transport.adopt(bytes.data(), bytes.size(), "a tensor");
  EXPECT_EQ(again, whole);
  EXPECT_EQ(transport.counters().regions, 1u);
  const auto shorter = *transport.adopt(bytes.data(), bytes.size() - 1, "a tensor");
  const auto inner = *transport.adopt(bytes.data() + 1, 10, "a tensor");
  EXPECT_NE(shorter->ref().region, whole->ref().region);
  EXPECT_NE(inner->ref().region, whole->ref().region);
  EXPECT_EQ(transport.counters().regions, 3u);
  const MemoryRef before = whole->ref();
  whole.reset();
  EXPECT_EQ(transport.counters().regions, 3u);  // `again` holds it
  EXPECT_EQ(again.use_count(), 1);
  again.reset();
  EXPECT_EQ(transport.counters().regions, 2u);
  const auto later = *transport.adopt(bytes.data(), bytes.size(), "a tensor");
  EXPECT_TRUE(later->ref().region != before.region || later->ref().generation != before.generation);

  // From many threads at once it is one as well.
  std::vector<std::shared_ptr<ExportedMemory>> found(8);
  std::vector<std::thread> threads;
  for (auto& slot : found) {
    threads.emplace_back([&] { slot = *transport.adopt(bytes.data() + 5, 50'000, "a tensor"); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& slot : found) EXPECT_EQ(slot, found[0]);
  EXPECT_EQ(transport.counters().regions, 4u);
}

// Goal (case 131): memory that peers could not read is refused when it is adopted, naming the first bytes.
TEST_F(CmaTransport, AdoptsOnlyReadableMemory) {
  CmaBackend backend;
  Side side(backend.make_with("trainer-0", 1));
  constexpr std::size_t kPages = 3000;
  auto* const data = static_cast<std::byte*>(
      mmap(nullptr, kPages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(data, MAP_FAILED);
  const auto status = [&](const std::byte* at, std::uint64_t bytes) {
    return side.transport->adopt(at, bytes, "layers.0.weight").status();
  };
  EXPECT_TRUE(status(data + 5, kPages * 4096 - 9).ok());
  ASSERT_EQ(mprotect(data + 2500 * 4096, 4096, PROT_NONE), 0);
  const Status guarded = status(data + 5, kPages * 4096 - 9);
  EXPECT_EQ(guarded.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(guarded.message().find("layers.0.weight"), std::string::npos) << guarded.message();
  EXPECT_NE(guarded.message().find("offset 10239995 "), std::string::npos)
      << guarded.message();  // 2500 * 4096 - 5
  ASSERT_EQ(munmap(data + 2500 * 4096, 4096), 0);
  EXPECT_EQ(status(data + 2500 * 4096, 1).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(status(data, 2500 * 4096).ok());
  EXPECT_EQ(status(nullptr, 10).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status(data, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status(data, ~std::uint64_t{0}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(side.transport->counters().regions, 0u);
  munmap(data, 2500 * 4096);
  munmap(data + 2501 * 4096, (kPages - 2501) * 4096);
}

// Goal: memory whose owner let it go is not read any more, even before the peer has been told, and even when
// its number has been given out again.
TEST_F(CmaTransport, ReadsNothingThatWasFreed) {
  Pair<CmaBackend> pair;
  std::vector<std::byte> bytes(1000, std::byte{7}), other(1000, std::byte{8});
  auto memory = *pair.a.transport->adopt(bytes.data(), bytes.size(), "a tensor");
  pair.grant(memory);
  const MemoryRef ref = memory->ref();
  std::vector<std::byte> landed(1000, std::byte{0xCD});
  const auto read = [&] {
    // Side a is not driven: it tells nobody.
    const std::size_t before = pair.b.count(Event::kRead);
    pair.b.transport->read(pair.b_to_a, {ref.region, ref.generation, 0, 1000}, landed.data(), 1);
    EXPECT_TRUE(pump({&pair.b}, [&] { return pair.b.count(Event::kRead) == before + 1; }));
    return pair.b.last(Event::kRead).status;
  };
  ASSERT_TRUE(read().ok());
  EXPECT_EQ(landed, bytes);
  memory.reset();
  landed.assign(1000, std::byte{0xCD});
  const Status freed = read();
  EXPECT_EQ(freed.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(freed.message().find("stale"), std::string::npos) << freed.message();
  const auto next = *pair.a.transport->adopt(other.data(), other.size(), "another tensor");
  EXPECT_EQ(next->ref().region, ref.region);
  EXPECT_EQ(next->ref().generation, ref.generation + 1);
  EXPECT_EQ(read().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(landed[0], std::byte{0xCD});
}

// Goal: an address of a process that ended is refused when its successor listens in its place.
TEST_F(CmaTransport, RefusesASuccessorsSocketByTheOldAddress) {
  CmaBackend backend;
  Side worker(backend.make_with("worker-0", 1));
  std::string old;
  {
    Side first(backend.make_with("trainer-0", 2));
    old = *first.transport->listen();
  }
  Side second(backend.make_with("trainer-0", 3));
  const std::string address = *second.transport->listen();
  ASSERT_EQ(socket_path(address), socket_path(old));
  const Status refused = worker.transport->connect(old, kNanosPerSecond).status();
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("started anew"), std::string::npos) << refused.message();
  EXPECT_TRUE(worker.transport->connect(address, kNanosPerSecond).ok());
  for (const std::string& bad :
       {socket_path(address), address + "x", address + "-1", socket_path(address) + "#1"}) {
    EXPECT_EQ(worker.transport->connect(bad, kNanosPerSecond).status().code(), StatusCode::kInvalidArgument)
        << bad;
  }
}

// Makes process_vm_readv fail in this process from now on, as a container's filter does.
bool forbid_reads(int error) {
  std::array<sock_filter, 4> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{.len = filter.size(), .filter = filter.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Goal (case 111): where a filter forbids reads, asking says so with the fix, connecting says so as well, and
// nothing aborts.
TEST_F(CmaTransport, SaysWhenAFilterForbidsReads) {
  CmaBackend backend;
  Child trainer([&](int out) { serve(backend, 1000, out); });
  const std::string address = trainer.line();
  for (const auto& [error, code] :
       {std::pair(EPERM, StatusCode::kPermissionDenied), std::pair(ENOSYS, StatusCode::kUnimplemented)}) {
    Child child([&](int out) {
      if (!forbid_reads(error)) return say(out, "no seccomp");
      Side worker(backend.make_with("worker-0", 2));
      say(out, cma_available().to_string());
      say(out, worker.transport->connect(address, kNanosPerSecond).status().to_string());
      std::byte byte{};
      say(out, worker.transport->adopt(&byte, 1, "a tensor").status().to_string());
    });
    const std::string available = child.line();
    if (available == "no seccomp") GTEST_SKIP() << "this host allows no seccomp filter";
    const std::string connected = child.line(), adopted = child.line();
    for (const std::string& text : {available, connected, adopted}) {
      EXPECT_EQ(text.find(to_string(code)), 0u) << text;
      EXPECT_NE(text.find("--transport shm"), std::string::npos) << text;
    }
  }
}

bool drop_capabilities() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> none{};
  return syscall(SYS_capset, &header, none.data()) == 0;
}

// Goal: a peer that the kernel does not let us read is refused when we connect, not in the middle of a sync.
TEST_F(CmaTransport, SaysWhenAPeerMayNotBeRead) {
  CmaBackend backend;
  for (const bool dumpable : {true, false}) {
    Child server([&](int out) {
      if (!drop_capabilities()) return say(out, "capabilities");
      prctl(PR_SET_DUMPABLE, dumpable ? 1 : 0);
      serve(backend, 1000, out);
    });
    const std::string address = server.line();
    Child worker([&](int out) {
      if (!drop_capabilities()) return say(out, "capabilities");
      Side side(backend.make_with("worker-0", 2));
      say(out, side.transport->connect(address, kNanosPerSecond).status().to_string());
    });
    const std::string connected = worker.line();
    if (dumpable) {
      EXPECT_EQ(connected, "OK");
    } else {
      EXPECT_EQ(connected.find("PERMISSION_DENIED: reading the memory of trainer-0.sock"), 0u) << connected;
      EXPECT_NE(connected.find("SYS_PTRACE"), std::string::npos) << connected;
    }
  }
}

// Goal (cases 111, 113): a peer in another pid namespace that we cannot see is refused with the reason when
// we connect; its number there, which somebody has here too, is never used.
TEST_F(CmaTransport, SaysWhenAPeerIsInAnotherPidNamespace) {
  CmaBackend backend;
  Child trainer([&](int out) { serve(backend, 1000, out); });
  const std::string address = trainer.line();
  Child child([&](int out) {
    if (unshare(CLONE_NEWPID) != 0) return say(out, "no namespace");
    Child inner([&](int) {
      Side worker(backend.make_with("worker-0", 2));
      say(out, std::to_string(getpid()));
      say(out, worker.transport->connect(address, kNanosPerSecond).status().to_string());
    });
    waitpid(inner.pid(), nullptr, 0);
  });
  const std::string pid = child.line();
  if (pid == "no namespace") GTEST_SKIP() << "this user makes no pid namespace";
  EXPECT_EQ(pid, "1");
  const std::string connected = child.line();
  EXPECT_EQ(connected.find("FAILED_PRECONDITION: trainer-0.sock"), 0u) << connected;
  EXPECT_NE(connected.find("another pid namespace"), std::string::npos) << connected;
  EXPECT_NE(connected.find("--transport shm"), std::string::npos) << connected;

  // The other way round it is visible, under a number of ours.
  Child server([&](int out) {
    if (unshare(CLONE_NEWPID) != 0) return;
    Child inner([&](int) {
      Side trainer(backend.make_with("trainer-1", 3));
      say(out, *trainer.transport->listen());
      while (trainer.transport->progress(kNanosPerSecond, trainer).ok()) {
      }
    });
    waitpid(inner.pid(), nullptr, 0);
  });
  Side worker(backend.make_with("worker-1", 4));
  const auto seen = worker.transport->connect(server.line(), kNanosPerSecond);
  EXPECT_TRUE(seen.ok()) << seen.status().to_string();
}

// Goal: asking whether reads are permitted leaves no process, descriptor or thread behind.
TEST_F(CmaTransport, AskingLeavesNothingBehind) {
  ASSERT_TRUE(cma_available().ok()) << cma_available().to_string();
  const std::size_t descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(cma_available().ok());
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

}  // namespace
}  // namespace shardpull::transport_testing
