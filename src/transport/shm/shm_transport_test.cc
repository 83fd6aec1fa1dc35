#include "transport/shm/shm_transport.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "base/unix_socket.h"
#include "transport/shm/shm_frame.h"

namespace shardpull {
namespace {

constexpr FleetToken kToken = 0xF1EE7;
constexpr std::int64_t kPatience = 20 * kNanosPerSecond;  // far above what any step takes; a test that waits it out fails

// A directory of its own, gone with it.
class RunDirectory {
 public:
  explicit RunDirectory(const std::string& below = "") {
    std::string name = (std::filesystem::temp_directory_path() / "shardpull-shm-XXXXXX").string();
    root_ = mkdtemp(name.data());
    path_ = root_ + below;
    std::filesystem::create_directories(path_);
    chmod(path_.c_str(), 0700);
  }
  ~RunDirectory() { std::filesystem::remove_all(root_); }
  const std::string& path() const { return path_; }

 private:
  std::string root_, path_;
};

struct Event {
  enum Kind { kAccepted, kMessage, kClosed, kRead } kind;
  EndpointId endpoint = 0;
  HotHeader header;
  std::vector<std::byte> payload;
  Status status;
  ReadToken token = 0;
};

// A transport and everything it reported.
class Side final : public TransportSink {
 public:
  Side(const std::string& directory, const std::string& name, Incarnation incarnation, ShmOptions options = {}) {
    options.directory = directory;
    options.self_name = name;
    if (options.token == 0) options.token = kToken;
    options.incarnation = incarnation;
    auto made = make_shm_transport(std::move(options));
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    if (made.ok()) transport = std::move(made).value();
  }

  void on_accepted(EndpointId endpoint) override { events.push_back({.kind = Event::kAccepted, .endpoint = endpoint}); }
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override {
    events.push_back({.kind = Event::kMessage,
                      .endpoint = endpoint,
                      .header = header,
                      .payload = std::vector<std::byte>(payload, payload + header.length)});
    if (on_message_hook) on_message_hook(endpoint, header);
  }
  void on_closed(EndpointId endpoint, const Status& why) override {
    events.push_back({.kind = Event::kClosed, .endpoint = endpoint, .status = why});
  }
  void on_read_done(ReadToken token, const Status& status) override {
    events.push_back({.kind = Event::kRead, .status = status, .token = token});
  }

  std::size_t count(Event::Kind kind) const {
    return static_cast<std::size_t>(std::count_if(events.begin(), events.end(), [&](const Event& e) { return e.kind == kind; }));
  }
  const Event& last(Event::Kind kind) const {
    const auto found = std::find_if(events.rbegin(), events.rend(), [&](const Event& e) { return e.kind == kind; });
    EXPECT_NE(found, events.rend());
    return *found;
  }

  std::unique_ptr<Transport> transport;
  std::vector<Event> events;
  std::function<void(EndpointId, const HotHeader&)> on_message_hook;
};

// Drives the sides in turn until `done`, at most kPatience.
bool pump(const std::vector<Side*>& sides, const std::function<bool()>& done) {
  const std::int64_t give_up_ns = SystemClock::instance().now_ns() + kPatience;
  while (!done()) {
    if (SystemClock::instance().now_ns() > give_up_ns) return false;
    for (Side* side : sides) {
      EXPECT_TRUE(side->transport->progress(kNanosPerMilli, *side).ok());
    }
  }
  return true;
}

HotHeader pull(std::uint32_t seq) {
  HotHeader header;
  header.type = HotType::kPull;
  header.seq = seq;
  return header;
}

std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::byte> out(bytes);
  Random random(seed);
  for (std::byte& byte : out) byte = static_cast<std::byte>(random.next_u64());
  return out;
}

// A listening and a connected side, introduced to each other.
struct Pair {
  explicit Pair(ShmOptions options = {}) : a(directory.path(), "trainer-0", 11, options), b(directory.path(), "worker-0", 22, options) {
    const auto address = a.transport->listen();
    EXPECT_TRUE(address.ok()) << address.status().to_string();
    const auto connected = b.transport->connect(*address, kNanosPerSecond);
    EXPECT_TRUE(connected.ok()) << connected.status().to_string();
    b_to_a = *connected;
    EXPECT_TRUE(b.transport->send(b_to_a, {.type = HotType::kHello}, nullptr, 0).ok());
    EXPECT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
    a_to_b = a.last(Event::kAccepted).endpoint;
  }
  bool pump_until(const std::function<bool()>& done) { return pump({&a, &b}, done); }

  RunDirectory directory;
  Side a, b;
  EndpointId a_to_b = 0, b_to_a = 0;
};

// Goal: messages arrive whole, in order, with their payload, both ways; the header's own fields are filled in.
TEST(ShmTransport, CarriesMessagesBothWaysInOrder) {
  Pair pair;
  const auto small = pattern(1000, 1), large = pattern(3'000'000, 2), largest = pattern(kMaxHotPayloadBytes, 3);
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(1), small.data(), small.size()).ok());
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(2), large.data(), large.size()).ok());
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(3), nullptr, 0).ok());
  ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(4), largest.data(), largest.size()).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.a.count(Event::kMessage) == 4 && pair.b.count(Event::kMessage) == 1; }));
  std::vector<Event> got;
  for (const Event& event : pair.a.events) {
    if (event.kind == Event::kMessage) got.push_back(event);
  }
  EXPECT_EQ(got[1].payload, small);
  EXPECT_EQ(got[2].payload, large);
  EXPECT_TRUE(got[3].payload.empty());
  EXPECT_EQ(got[3].header.seq, 3u);
  EXPECT_EQ(got[1].header.token, kToken);
  EXPECT_EQ(got[1].header.incarnation, 22u);
  EXPECT_EQ(pair.b.last(Event::kMessage).payload, largest);

  const TransportCounters counters = pair.a.transport->counters();
  EXPECT_EQ(counters.messages, 5u);
  EXPECT_EQ(counters.endpoints, 1u);
  EXPECT_EQ(counters.header_bytes, 5 * kHotHeaderBytes + small.size() + large.size() + largest.size());
}

// Goal: memory granted on one side can be read and mapped on the other, byte for byte, and never written.
TEST(ShmTransport, ReadsAndMapsGrantedMemory) {
  Pair pair;
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

// Goal (case 132): what may not be read is refused by name before a byte moves, and the endpoint lives on.
TEST(ShmTransport, RefusesReadsOutsideWhatWasGranted) {
  Pair pair;
  auto memory = *pair.a.transport->allocate(4096, "a slot");
  const MemoryRef ref = memory->ref();
  std::vector<std::byte> landed(8192, std::byte{0xCD});
  const auto read = [&](RemoteRef remote) {
    const std::size_t before = pair.b.count(Event::kRead);
    pair.b.transport->read(pair.b_to_a, remote, landed.data(), before);
    EXPECT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kRead) == before + 1; }));
    const Status status = pair.b.last(Event::kRead).status;
    EXPECT_EQ(pair.b.transport->map(pair.b_to_a, remote).status(), status);
    return status;
  };
  const std::uint64_t max = ~std::uint64_t{0};
  EXPECT_EQ(read({ref.region, ref.generation, 0, 1}).code(), StatusCode::kNotFound);
  ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, memory).ok());
  ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kMessage) == 1; }));
  EXPECT_TRUE(read({ref.region, ref.generation, 4096, 0}).ok());
  EXPECT_EQ(read({ref.region, ref.generation, 0, 4097}).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(read({ref.region, ref.generation, 4096, 1}).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(read({ref.region, ref.generation, max, 2}).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(read({ref.region, ref.generation, 1, max}).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(read({ref.region, ref.generation + 1, 0, 1}).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::all_of(landed.begin(), landed.end(), [](std::byte b) { return b == std::byte{0xCD}; }));

  // Freed: the peer is told, a new allocation of the same number is another generation, old mappings stay readable.
  memory->ref().address[0] = std::byte{9};
  const auto mapping = *pair.b.transport->map(pair.b_to_a, {ref.region, ref.generation, 0, 4096});
  memory.reset();
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.transport->counters().mapped_bytes == 0; }));
  EXPECT_NE(read({ref.region, ref.generation, 0, 1}).message().find("freed"), std::string::npos);
  EXPECT_EQ(mapping.data[0], std::byte{9});
  auto again = *pair.a.transport->allocate(8192, "a slot");
  EXPECT_EQ(again->ref().region, ref.region);
  EXPECT_EQ(again->ref().generation, ref.generation + 1);
  ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, again).ok());
  ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(2), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kMessage) == 2; }));
  EXPECT_NE(read({ref.region, ref.generation, 0, 1}).message().find("stale"), std::string::npos);
  EXPECT_TRUE(read({ref.region, ref.generation + 1, 0, 8192}).ok());
  EXPECT_EQ(pair.b.count(Event::kClosed), 0u);
}

// Goal: memory of another transport, or none, cannot be granted.
TEST(ShmTransport, GrantsOnlyItsOwnMemory) {
  Pair pair;
  const auto foreign = *pair.b.transport->allocate(10, "theirs");
  EXPECT_EQ(pair.a.transport->grant(pair.a_to_b, foreign).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pair.a.transport->grant(pair.a_to_b, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pair.a.transport->grant(999, foreign).code(), StatusCode::kUnavailable);
}

// Goal: exported memory and mappings outlive the transports that made them.
TEST(ShmTransport, MemoryOutlivesTheTransport) {
  std::shared_ptr<ExportedMemory> memory;
  Transport::Mapping mapping;
  {
    Pair pair;
    memory = *pair.a.transport->allocate(1 << 20, "weights");
    memory->ref().address[5] = std::byte{5};
    ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, memory).ok());
    ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(1), nullptr, 0).ok());
    ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kMessage) == 1; }));
    mapping = *pair.b.transport->map(pair.b_to_a, {memory->ref().region, memory->ref().generation, 0, 1 << 20});
  }
  memory->ref().address[6] = std::byte{6};
  EXPECT_EQ(mapping.data[5], std::byte{5});
  EXPECT_EQ(mapping.data[6], std::byte{6});
  memory.reset();
  EXPECT_EQ(mapping.data[6], std::byte{6});
}

// Goal: a peer that stops reading never blocks the sender, and costs bounded memory: its endpoint ends, with a reason.
TEST(ShmTransport, EndsPeersThatDoNotRead) {
  set_log_level(LogLevel::kError);
  ShmOptions options;
  options.max_queued_bytes = 4u << 20;
  Pair pair(options);
  const auto payload = pattern(512 << 10, 5);
  EXPECT_EQ(pair.b.transport->send(pair.b_to_a, pull(0), nullptr, kMaxHotPayloadBytes + 1).code(), StatusCode::kInvalidArgument);
  std::uint32_t sent = 0;
  Status status;
  while (sent < 100 && (status = pair.b.transport->send(pair.b_to_a, pull(sent), payload.data(), payload.size())).ok()) ++sent;
  ASSERT_GE(sent, 8u);
  ASSERT_LT(sent, 100u);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(status.info().reason, Reason::kLimit);
  EXPECT_EQ(pair.b.transport->send(pair.b_to_a, pull(0), nullptr, 0).code(), StatusCode::kUnavailable);
  ASSERT_TRUE(pump({&pair.b}, [&] { return pair.b.count(Event::kClosed) == 1; }));
  EXPECT_EQ(pair.b.last(Event::kClosed).status, status);
  ASSERT_TRUE(pump({&pair.a}, [&] { return pair.a.count(Event::kClosed) == 1; }));
  set_log_level(LogLevel::kWarn);
}

// Goal: what fits the bound arrives whole, however slowly the peer reads.
TEST(ShmTransport, KeepsWhatAPeerHasNotReadYet) {
  Pair pair;
  const auto payload = pattern(512 << 10, 5);
  for (std::uint32_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(i), payload.data(), payload.size()).ok());
  }
  ASSERT_TRUE(pair.pump_until([&] { return pair.a.count(Event::kMessage) == 101; }));
  for (std::uint32_t seq = 0; const Event& event : pair.a.events) {
    if (event.kind != Event::kMessage || event.header.type != HotType::kPull) continue;
    ASSERT_EQ(event.header.seq, seq++);
    ASSERT_EQ(event.payload, payload);
  }
}

// Goal: closing sends what is queued first; the other side gets it all, then the end; nobody is called back on our side.
TEST(ShmTransport, CloseSendsWhatIsQueuedFirst) {
  Pair pair;
  const auto payload = pattern(2 << 20, 6);
  for (std::uint32_t i = 0; i < 8; ++i) {
    ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(i), payload.data(), payload.size()).ok());
  }
  pair.b.transport->close(pair.b_to_a);
  EXPECT_EQ(pair.b.transport->send(pair.b_to_a, pull(9), nullptr, 0).code(), StatusCode::kUnavailable);
  ASSERT_TRUE(pair.pump_until([&] { return pair.a.count(Event::kClosed) == 1; }));
  EXPECT_EQ(pair.a.count(Event::kMessage), 9u);
  EXPECT_EQ(pair.a.last(Event::kClosed).status.code(), StatusCode::kUnavailable);
  EXPECT_EQ(pair.b.count(Event::kClosed), 0u);
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.transport->counters().endpoints == 0; }));
  EXPECT_EQ(pair.a.transport->send(pair.a_to_b, pull(1), nullptr, 0).code(), StatusCode::kUnavailable);
  pair.b.transport->close(pair.b_to_a);  // again, and of one that never was
  pair.b.transport->close(12345);
}

// Goal: a closed endpoint whose peer reads nothing is given up within its bound.
TEST(ShmTransport, CloseGivesUpOnAPeerThatReadsNothing) {
  ShmOptions options;
  options.close_timeout_ns = 20 * kNanosPerMilli;
  Pair pair(options);
  const auto payload = pattern(4 << 20, 6);
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(1), payload.data(), payload.size()).ok());
  pair.b.transport->close(pair.b_to_a);
  ASSERT_TRUE(pump({&pair.b}, [&] { return pair.b.transport->counters().endpoints == 0; }));
}

// Goal: callbacks may close, send, connect and read; the transport copes.
TEST(ShmTransport, CallbacksMayCallBack) {
  Pair pair;
  pair.a.on_message_hook = [&](EndpointId endpoint, const HotHeader& header) {
    if (header.seq == 1) {
      EXPECT_TRUE(pair.a.transport->send(endpoint, pull(100), nullptr, 0).ok());
      pair.a.transport->close(endpoint);
    }
  };
  for (std::uint32_t i = 1; i <= 3; ++i) ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(i), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kClosed) == 1; }));
  EXPECT_EQ(pair.a.count(Event::kMessage), 2u);  // the hello, and seq 1: nothing follows a close
  EXPECT_EQ(pair.b.last(Event::kMessage).header.seq, 100u);
}

// Goal: reads of an endpoint that ends are reported before its end.
TEST(ShmTransport, ReportsReadsBeforeTheEnd) {
  Pair pair;
  const std::size_t bytes = 64u << 20;
  const auto memory = *pair.a.transport->allocate(bytes, "a slot");
  ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, memory).ok());
  ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kMessage) == 1; }));
  std::vector<std::byte> landed(bytes);
  for (ReadToken token = 1; token <= 8; ++token) {
    pair.b.transport->read(pair.b_to_a, {memory->ref().region, memory->ref().generation, 0, bytes}, landed.data(), token);
  }
  pair.b.transport->read(pair.b_to_a, {4711, 1, 0, 1}, landed.data(), 9);
  pair.a.transport->close(pair.a_to_b);
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kClosed) == 1; }));
  EXPECT_EQ(pair.b.count(Event::kRead), 9u);
  EXPECT_EQ(pair.b.events.back().kind, Event::kClosed);
}

// Goal: reads still under way when the transport is destroyed end with it; nothing writes to their memory afterwards.
TEST(ShmTransport, DestructionEndsReads) {
  Pair pair;
  const std::size_t bytes = 64u << 20;
  const auto memory = *pair.a.transport->allocate(bytes, "a slot");
  ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, memory).ok());
  ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kMessage) == 1; }));
  std::vector<std::byte> landed(bytes);
  for (ReadToken token = 1; token <= 50; ++token) {
    pair.b.transport->read(pair.b_to_a, {memory->ref().region, memory->ref().generation, 0, bytes}, landed.data(), token);
  }
  pair.b.transport.reset();
  landed = {};
}

// Goal: wake() ends a wait, also one that begins later.
TEST(ShmTransport, WakeEndsAWait) {
  RunDirectory directory;
  Side side(directory.path(), "worker-0", 1);
  side.transport->wake();
  const std::int64_t start_ns = SystemClock::instance().now_ns();
  ASSERT_TRUE(side.transport->progress(kPatience, side).ok());
  std::thread waker([&] { side.transport->wake(); });
  ASSERT_TRUE(side.transport->progress(kPatience, side).ok());
  waker.join();
  EXPECT_LT(SystemClock::instance().now_ns() - start_ns, kPatience / 2);
}

// A bare socket to the transport: what a stranger has.
UniqueFd stranger(const std::string& address) {
  auto fd = connect_unix(address, kNanosPerSecond);
  EXPECT_TRUE(fd.ok()) << fd.status().to_string();
  return std::move(fd).value();
}

// Goal: bytes that are not ours close that endpoint, with a reason, and disturb nothing else.
TEST(ShmTransport, ClosesForeignConnectionsAndLivesOn) {
  set_log_level(LogLevel::kError);  // the warnings are expected here
  Pair pair;
  const std::string address = *pair.a.transport->listen();
  const auto expect_closed = [&](std::string_view what, const std::vector<std::byte>& bytes, bool hang_up,
                                 std::string_view reason) {
    const std::size_t before = pair.a.count(Event::kClosed);
    UniqueFd fd = stranger(address);
    std::size_t sent = 0;
    while (sent < bytes.size()) {
      const ssize_t step = ::send(fd.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (step > 0) sent += static_cast<std::size_t>(step);
      if (step < 0 && errno != EAGAIN) break;
      EXPECT_TRUE(pair.a.transport->progress(0, pair.a).ok());
    }
    if (hang_up) fd.reset();
    ASSERT_TRUE(pump({&pair.a}, [&] { return pair.a.count(Event::kClosed) == before + 1; })) << what;
    const std::string message = pair.a.last(Event::kClosed).status.message();
    EXPECT_NE(message.find(reason), std::string::npos) << what << ": " << message;
  };
  const auto bytes_of = [](std::string_view text) {
    const auto* const data = reinterpret_cast<const std::byte*>(text.data());
    return std::vector<std::byte>(data, data + text.size());
  };
  const auto frame_of = [](HotHeader header, std::vector<std::byte> payload = {}) {
    header.length = static_cast<std::uint32_t>(payload.size());
    if (header.sum == 0) header.sum = payload_sum(payload.data(), payload.size());
    const auto encoded = encode(header);
    payload.insert(payload.begin(), encoded.begin(), encoded.end());
    return payload;
  };
  HotHeader good = pull(1);
  good.token = kToken;
  good.incarnation = 33;

  expect_closed("HTTP", bytes_of("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), false, "not our protocol");
  expect_closed("TLS", bytes_of(std::string_view("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11)), false, "not our protocol");
  expect_closed("nothing", {}, true, "closed the connection");
  expect_closed("three bytes", bytes_of("SPU"), true, "within a message");
  expect_closed("random", pattern(100'000, 9), false, "not our protocol");
  HotHeader other = good;
  other.token = kToken + 1;
  expect_closed("another fleet", frame_of(other), false, "another fleet");
  HotHeader damaged = good;
  damaged.sum = 12345;
  expect_closed("damaged payload", frame_of(damaged, pattern(10, 1)), false, "its sum differs");
  auto truncated = frame_of(good, pattern(1000, 1));
  truncated.resize(500);
  expect_closed("truncated", truncated, true, "within a message");
  auto two = frame_of(good);
  HotHeader changed = good;
  changed.incarnation = 34;
  const auto second = frame_of(changed);
  two.insert(two.end(), second.begin(), second.end());
  expect_closed("changed incarnation", two, false, "changed its incarnation");
  const auto grant = encode(ShmFrame{.token = kToken, .incarnation = 1, .region = 1, .generation = 1, .bytes = 1});
  expect_closed("grant without memory", {grant.begin(), grant.end()}, false, "without its descriptor");
  const auto retire = encode(
      ShmFrame{.kind = ShmFrameKind::kRetire, .token = kToken, .incarnation = 1, .region = 1, .generation = 1, .bytes = 0});
  expect_closed("retire of nothing", {retire.begin(), retire.end()}, false, "never granted");
  HotHeader huge = good;
  huge.length = 0;
  auto too_long = frame_of(huge);
  too_long[55] = std::byte{0x40};
  expect_closed("a gigabyte announced", too_long, false, "above the limit");

  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(7), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.a.last(Event::kMessage).header.seq == 7; }));
  set_log_level(LogLevel::kWarn);
}

std::size_t entries_of(const char* directory) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator()));
}

// Sends bytes with descriptors, as a grant does.
void send_with_descriptors(int socket, std::vector<std::byte> bytes, const std::vector<int>& fds) {
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
  RunDirectory directory;
  Side side(directory.path(), "trainer-0", 1);
  const std::string address = *side.transport->listen();
  const std::size_t before = entries_of("/proc/self/fd");
  const auto grant_of = [](std::uint64_t bytes) {
    const auto frame = encode(ShmFrame{.token = kToken, .incarnation = 2, .region = 1, .generation = 1, .bytes = bytes});
    return std::vector<std::byte>(frame.begin(), frame.end());
  };
  const auto expect_closed = [&](std::vector<std::byte> bytes, const std::vector<int>& fds, std::string_view reason,
                                 int times = 1) {
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
    expect_closed(grant_of(4096), {unsealed.get()}, "not sealed");
    expect_closed(grant_of(4096), {STDIN_FILENO}, "not a memory file");
    const UniqueFd sealed(memfd_create("sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(ftruncate(sealed.get(), 4096), 0);
    ASSERT_EQ(fcntl(sealed.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    expect_closed(grant_of(1 << 20), {sealed.get()}, "claims 1048576 bytes");
    expect_closed(grant_of(4096), {sealed.get(), sealed.get(), sealed.get(), sealed.get(), sealed.get(), sealed.get()},
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
  Pair pair;
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

// Goal: random streams, mutated from real ones, never do more than close their endpoint.
TEST(ShmTransport, SurvivesMutatedStreams) {
  set_log_level(LogLevel::kError);
  RunDirectory directory;
  Side side(directory.path(), "trainer-0", 1);
  const std::string address = *side.transport->listen();
  Random random(77);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::byte> stream;
    for (std::uint64_t frames = 1 + random.below(4); frames > 0; --frames) {
      HotHeader header = pull(1);
      header.token = kToken;
      header.incarnation = 2;
      const auto payload = pattern(random.below(3000), random.next_u64());
      header.length = static_cast<std::uint32_t>(payload.size());
      header.sum = payload_sum(payload.data(), payload.size());
      const auto hot = encode(header);
      const auto own = encode(ShmFrame{.kind = random.chance(0.5) ? ShmFrameKind::kGrant : ShmFrameKind::kRetire,
                                       .token = kToken, .incarnation = 2, .region = 1, .generation = 1, .bytes = 1});
      const bool is_hot = random.chance(0.7);
      stream.insert(stream.end(), is_hot ? hot.begin() : own.begin(), is_hot ? hot.end() : own.end());
      if (is_hot) stream.insert(stream.end(), payload.begin(), payload.end());
    }
    for (std::uint64_t changes = random.below(3); changes > 0; --changes) {
      stream[random.below(stream.size())] = static_cast<std::byte>(random.below(256));
    }
    stream.resize(random.below(stream.size() + 1));
    const std::size_t before = side.count(Event::kClosed);
    UniqueFd fd = stranger(address);
    [[maybe_unused]] const ssize_t sent = ::send(fd.get(), stream.data(), stream.size(), MSG_NOSIGNAL);
    fd.reset();
    ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kClosed) == before + 1; }));
  }
  EXPECT_EQ(side.transport->counters().endpoints, 0u);
  set_log_level(LogLevel::kWarn);
}

// Goal: a peer that connects and says nothing does not hold its place for ever.
TEST(ShmTransport, ClosesSilentStrangers) {
  set_log_level(LogLevel::kError);
  RunDirectory directory;
  ShmOptions options;
  options.hello_timeout_ns = 30 * kNanosPerMilli;
  Side side(directory.path(), "trainer-0", 1, options);
  UniqueFd fd = stranger(*side.transport->listen());
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kClosed) == 1; }));
  EXPECT_EQ(side.last(Event::kClosed).status.code(), StatusCode::kDeadlineExceeded);
  set_log_level(LogLevel::kWarn);
}

// Goal: a killed peer is noticed at once, its memory stays readable, and its socket file is replaced by its successor.
TEST(ShmTransport, NoticesAKilledPeerAndKeepsItsMemory) {
  RunDirectory directory;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // The child holds memory, grants it to whoever says hello, and never ends by itself.
    Side side(directory.path(), "trainer-0", 100);
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
  Side side(directory.path(), "worker-0", 5);
  const std::string address = directory.path() + "/trainer-0.sock";
  const auto endpoint = side.transport->connect(address, kNanosPerSecond);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status().to_string();
  ASSERT_TRUE(side.transport->send(*endpoint, {.type = HotType::kHello}, nullptr, 0).ok());
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kMessage) == 1; }));
  const HotHeader reply = side.last(Event::kMessage).header;
  const RemoteRef whole{.region = reply.target, .generation = reply.seq, .offset = 0, .bytes = 1 << 20};
  const auto mapping = side.transport->map(*endpoint, whole);
  ASSERT_TRUE(mapping.ok());

  // While it lives, nobody else may take its address.
  Side rival(directory.path(), "trainer-0", 101);
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

// Goal: nothing is left behind when a transport ends, and it does not remove a successor's socket.
TEST(ShmTransport, RemovesItsSocketAndOnlyItsOwn) {
  RunDirectory directory;
  const std::string path = directory.path() + "/trainer-0.sock";
  {
    Side side(directory.path(), "trainer-0", 1);
    ASSERT_EQ(*side.transport->listen(), path);
    ASSERT_EQ(*side.transport->listen(), path);  // again is the same
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  {
    Side side(directory.path(), "trainer-0", 1);
    ASSERT_TRUE(side.transport->listen().ok());
    std::filesystem::remove(path);
    Side successor(directory.path(), "trainer-0", 2);
    ASSERT_TRUE(successor.transport->listen().ok());
    side.transport.reset();
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  std::filesystem::create_directory(path);
  Side side(directory.path(), "trainer-0", 1);
  EXPECT_NE(side.transport->listen().status().message().find("not a socket"), std::string::npos);
}

// Goal: directories deeper than a socket address holds work all the same.
TEST(ShmTransport, WorksInLongDirectories) {
  RunDirectory directory("/" + std::string(100, 'a') + "/with space/" + std::string(100, 'b'));
  Side a(directory.path(), "trainer-0", 1), b(directory.path(), "worker-0", 2);
  const auto address = a.transport->listen();
  ASSERT_TRUE(address.ok()) << address.status().to_string();
  const auto endpoint = b.transport->connect(*address, kNanosPerSecond);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status().to_string();
  ASSERT_TRUE(b.transport->send(*endpoint, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  a.transport.reset();
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

// Goal: options that cannot work are refused at once, with what to do.
TEST(ShmTransport, RefusesUnsafeOrImpossibleOptions) {
  RunDirectory directory;
  const auto status = [](ShmOptions options) { return make_shm_transport(std::move(options)).status(); };
  const ShmOptions good{.directory = directory.path(), .token = 1, .incarnation = 1, .self_name = "worker-0"};
  EXPECT_TRUE(status(good).ok());
  ShmOptions bad = good;
  bad.token = 0;
  EXPECT_EQ(status(bad).code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.self_name = "../x";
  EXPECT_EQ(status(bad).code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.directory += "/missing";
  EXPECT_NE(status(bad).message().find("mkdir -m 700"), std::string::npos) << status(bad).message();
  ASSERT_EQ(chmod(directory.path().c_str(), 0755), 0);
  EXPECT_NE(status(good).message().find("chmod 700"), std::string::npos) << status(good).message();
  ASSERT_EQ(chmod(directory.path().c_str(), 0700), 0);
  Side side(directory.path(), "worker-0", 1);
  EXPECT_EQ(side.transport->connect(directory.path() + "/nobody.sock", kNanosPerSecond).status().code(),
            StatusCode::kUnavailable);
}

// Goal: two hundred lives later there are as many descriptors, threads and mappings as before.
TEST(ShmTransport, LeaksNothingOverManyLives) {
  RunDirectory directory;
  const auto live = [&] {
    Side a(directory.path(), "trainer-0", 1), b(directory.path(), "worker-0", 2);
    const auto endpoint = b.transport->connect(*a.transport->listen(), kNanosPerSecond);
    const auto memory = *a.transport->allocate(4096, "a slot");
    ASSERT_TRUE(b.transport->send(*endpoint, pull(1), nullptr, 0).ok());
    ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
    const EndpointId back = a.last(Event::kAccepted).endpoint;
    ASSERT_TRUE(a.transport->grant(back, memory).ok());
    ASSERT_TRUE(a.transport->send(back, pull(2), nullptr, 0).ok());
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kMessage) == 1; }));
    std::byte byte{1};
    b.transport->read(*endpoint, {memory->ref().region, memory->ref().generation, 0, 1}, &byte, 1);
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.count(Event::kRead) == 1; }));
    EXPECT_EQ(byte, std::byte{0});
  };
  live();
  const std::size_t descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  for (int i = 0; i < 200; ++i) live();
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

// Goal: memory can be allocated and freed from other threads while the progress thread works.
TEST(ShmTransport, AllocatesFromAnyThread) {
  Pair pair;
  std::thread other([&] {
    for (int i = 0; i < 200; ++i) {
      auto memory = pair.a.transport->allocate(4096 + static_cast<std::uint64_t>(i), "a slot");
      EXPECT_TRUE(memory.ok());
    }
  });
  for (std::uint32_t i = 0; i < 200; ++i) {
    const auto memory = *pair.a.transport->allocate(100, "a slot");
    ASSERT_TRUE(pair.a.transport->grant(pair.a_to_b, memory).ok());
    ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(i), nullptr, 0).ok());
    ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kMessage) == i + 1; }));
    EXPECT_TRUE(pair.b.transport->map(pair.b_to_a, {memory->ref().region, memory->ref().generation, 0, 100}).ok());
  }
  other.join();
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.transport->counters().mapped_bytes == 0; }));
  EXPECT_EQ(pair.a.transport->counters().regions, 0u);
}

}  // namespace
}  // namespace shardpull
