// What every transport promises (transport.h), as tests that each backend instantiates: see TransportContract
// at the end.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "transport/transport.h"

namespace shardpull::transport_testing {

constexpr FleetToken kToken = 0xF1EE7;
constexpr std::int64_t kPatience =
    20 * kNanosPerSecond;  // far above what any step takes; a test that waits it out fails

// What tests vary; 0 is the backend's own value.
struct Settings {
  std::uint64_t max_queued_bytes = 0;
  std::int64_t close_timeout_ns = 0;
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
  explicit Side(Result<std::unique_ptr<Transport>> made) {
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    if (made.ok()) transport = std::move(made).value();
  }

  void on_accepted(EndpointId endpoint) override {
    events.push_back({.kind = Event::kAccepted, .endpoint = endpoint});
  }
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
    return static_cast<std::size_t>(
        std::count_if(events.begin(), events.end(), [&](const Event& e) { return e.kind == kind; }));
  }
  Event last(Event::Kind kind) const {
    const auto found =
        std::find_if(events.rbegin(), events.rend(), [&](const Event& e) { return e.kind == kind; });
    EXPECT_NE(found, events.rend());
    return found == events.rend() ? Event{} : *found;
  }

  std::unique_ptr<Transport> transport;
  std::vector<Event> events;
  std::function<void(EndpointId, const HotHeader&)> on_message_hook;
};

// Drives the sides in turn until `done`, at most kPatience.
inline bool pump(const std::vector<Side*>& sides, const std::function<bool()>& done) {
  const std::int64_t give_up_ns = SystemClock::instance().now_ns() + kPatience;
  while (!done()) {
    if (SystemClock::instance().now_ns() > give_up_ns) return false;
    for (Side* side : sides) EXPECT_TRUE(side->transport->progress(kNanosPerMilli / 4, *side).ok());
  }
  return true;
}

inline HotHeader pull(std::uint32_t seq) {
  HotHeader header;
  header.type = HotType::kPull;
  header.seq = seq;
  return header;
}

inline std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::byte> out(bytes);
  Random random(seed);
  for (std::byte& byte : out) byte = static_cast<std::byte>(random.next_u64());
  return out;
}

// The byte at each position, so that any window can be checked without its neighbours.
inline std::byte coded_byte(std::uint64_t position) {
  std::uint64_t word = (position >> 3) * 0x9E3779B97F4A7C15ull + 0x1234567;
  word ^= word >> 29;
  return static_cast<std::byte>(word >> (8 * (position & 7)));
}

inline std::size_t entries_of(const char* directory) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator()));
}

// A listening and a connected side, introduced to each other. Backend: `make(name, incarnation, settings)`
// makes transports that reach each other as long as the Backend lives; the static why_not() says why it
// cannot be tested here, or nothing.
template <typename Backend>
struct Pair {
  explicit Pair(Settings settings = {})
      : a(backend.make("trainer-0", 11, settings)), b(backend.make("worker-0", 22, settings)) {
    const auto address = a.transport->listen();
    EXPECT_TRUE(address.ok()) << address.status().to_string();
    const auto connected = b.transport->connect(*address, kNanosPerSecond);
    EXPECT_TRUE(connected.ok()) << connected.status().to_string();
    b_to_a = *connected;
    EXPECT_TRUE(b.transport->send(b_to_a, {.type = HotType::kHello}, nullptr, 0).ok());
    EXPECT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
    a_to_b = a.last(Event::kAccepted).endpoint;
  }
  // Both say goodbye while both listen, so that neither destructor waits for the other.
  ~Pair() {
    if (a.transport == nullptr || b.transport == nullptr) return;
    a.transport->close(a_to_b);
    b.transport->close(b_to_a);
    for (int i = 0; i < 200 && a.transport->counters().endpoints + b.transport->counters().endpoints > 0;
         ++i) {
      a.transport->progress(kNanosPerMilli, a).ignore();
      b.transport->progress(kNanosPerMilli, b).ignore();
    }
  }
  bool pump_until(const std::function<bool()>& done) { return pump({&a, &b}, done); }
  // Memory of a's, granted to b, who knows of it on return.
  std::shared_ptr<ExportedMemory> granted(std::uint64_t bytes) {
    auto memory = *a.transport->allocate(bytes, "a slot");
    grant(memory);
    return memory;
  }
  void grant(const std::shared_ptr<ExportedMemory>& memory) {
    EXPECT_TRUE(a.transport->grant(a_to_b, memory).ok());
    introduce();
  }
  // What a did before has reached b.
  void introduce() {
    const std::size_t before = b.count(Event::kMessage);
    EXPECT_TRUE(a.transport->send(a_to_b, pull(1), nullptr, 0).ok());
    EXPECT_TRUE(pump_until([&] { return b.count(Event::kMessage) == before + 1; }));
  }
  Status read(const RemoteRef& remote, std::byte* local) {
    const std::size_t before = b.count(Event::kRead);
    b.transport->read(b_to_a, remote, local, 1000 + before);
    EXPECT_TRUE(pump_until([&] { return b.count(Event::kRead) == before + 1; }));
    EXPECT_EQ(b.last(Event::kRead).token, 1000 + before);
    return b.last(Event::kRead).status;
  }

  Backend backend;
  Side a, b;
  EndpointId a_to_b = 0, b_to_a = 0;
};

template <typename Backend>
class TransportContract : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = Backend::why_not(); !why.empty()) GTEST_SKIP() << why;
  }
};
TYPED_TEST_SUITE_P(TransportContract);

// Goal: messages arrive whole, in order, with their payload, both ways; the header's own fields are filled
// in.
TYPED_TEST_P(TransportContract, CarriesMessagesBothWaysInOrder) {
  Pair<TypeParam> pair;
  const auto small = pattern(1000, 1), large = pattern(3'000'000, 2),
             largest = pattern(kMaxHotPayloadBytes, 3);
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(1), small.data(), small.size()).ok());
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(2), large.data(), large.size()).ok());
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(3), nullptr, 0).ok());
  ASSERT_TRUE(pair.a.transport->send(pair.a_to_b, pull(4), largest.data(), largest.size()).ok());
  ASSERT_TRUE(pair.pump_until(
      [&] { return pair.a.count(Event::kMessage) == 4 && pair.b.count(Event::kMessage) == 1; }));
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

// Goal: thousands of small messages of all sizes keep their order and their bytes.
TYPED_TEST_P(TransportContract, KeepsTheOrderOfThousandsOfMessages) {
  Pair<TypeParam> pair;
  constexpr std::uint32_t kMessages = 5000;
  const auto payload = pattern(40'000, 7);
  const auto size_of = [](std::uint32_t i) { return i % 97 == 0 ? 9'000 + i % 31'000 : i % 300; };
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(i), payload.data() + i % 64, size_of(i)).ok());
    if (i % 8 == 0) {
      ASSERT_TRUE(pair.a.transport->progress(0, pair.a).ok());
    }
  }
  ASSERT_TRUE(pair.pump_until([&] { return pair.a.count(Event::kMessage) == kMessages + 1; }));
  std::uint32_t next = 0;
  for (const Event& event : pair.a.events) {
    if (event.kind != Event::kMessage || event.header.type != HotType::kPull) continue;
    ASSERT_EQ(event.header.seq, next);
    ASSERT_EQ(event.payload.size(), size_of(next));
    ASSERT_TRUE(std::equal(event.payload.begin(), event.payload.end(), payload.begin() + next % 64));
    ++next;
  }
}

// Goal: reads of every size at odd offsets bring exactly the window's bytes, and touch no other.
TYPED_TEST_P(TransportContract, ReadsExactlyTheWindow) {
  Pair<TypeParam> pair;
  const std::uint64_t total = (11u << 20) + 77;
  const auto memory = pair.granted(total);
  const MemoryRef ref = memory->ref();
  EXPECT_EQ(ref.bytes, total);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(ref.address) % 4096, 0u);
  for (std::uint64_t i = 0; i < total; ++i) ASSERT_EQ(ref.address[i], std::byte{0});
  for (std::uint64_t i = 0; i < total; ++i) ref.address[i] = coded_byte(i);
  std::uint64_t moved = 0;
  for (const std::uint64_t bytes : {0ull, 1ull, 15ull, 4096ull, 4097ull, 70'001ull, (10ull << 20) + 3}) {
    for (const std::uint64_t offset : {0ull, 1ull, 4095ull, 65'537ull}) {
      std::vector<std::byte> landed(bytes + 32, std::byte{0xCD});
      ASSERT_TRUE(pair.read({ref.region, ref.generation, offset, bytes}, landed.data() + 16).ok());
      for (std::uint64_t i = 0; i < bytes; ++i)
        ASSERT_EQ(landed[16 + i], coded_byte(offset + i)) << bytes << " at " << offset + i;
      for (std::uint64_t i = 0; i < 16; ++i) {
        ASSERT_EQ(landed[i], std::byte{0xCD});
        ASSERT_EQ(landed[bytes + 16 + i], std::byte{0xCD});
      }
      moved += bytes;
    }
  }
  EXPECT_EQ(pair.b.transport->counters().payload_bytes_read, moved);
  EXPECT_EQ(pair.a.transport->counters().regions, 1u);
  EXPECT_EQ(pair.a.transport->counters().region_bytes, total);
}

// Goal: many reads at once, of several regions, each bring their own bytes; messages pass meanwhile.
TYPED_TEST_P(TransportContract, ReadsManyWindowsAtOnce) {
  Pair<TypeParam> pair;
  std::vector<std::shared_ptr<ExportedMemory>> memories;
  const std::uint64_t bytes = (1u << 20) + 11;
  for (int i = 0; i < 5; ++i) {
    memories.push_back(pair.granted(bytes));
    const MemoryRef ref = memories.back()->ref();
    for (std::uint64_t at = 0; at < bytes; ++at)
      ref.address[at] = coded_byte(at + static_cast<std::uint64_t>(i) * bytes);
  }
  std::vector<std::vector<std::byte>> landed;
  for (std::size_t i = 0; i < 40; ++i) {
    const MemoryRef ref = memories[i % 5]->ref();
    landed.emplace_back(bytes - i);
    pair.b.transport->read(pair.b_to_a, {ref.region, ref.generation, i, bytes - i}, landed.back().data(), i);
  }
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(3), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until(
      [&] { return pair.b.count(Event::kRead) == 40 && pair.a.count(Event::kMessage) == 2; }));
  for (const Event& event : pair.b.events) {
    if (event.kind != Event::kRead) continue;
    EXPECT_TRUE(event.status.ok()) << event.status.to_string();
  }
  for (std::size_t i = 0; i < 40; ++i) {
    for (std::uint64_t at = 0; at < landed[i].size(); at += 7) {
      ASSERT_EQ(landed[i][at], coded_byte(at + i + (i % 5) * bytes)) << i << " " << at;
    }
  }
}

// Goal (case 132): what may not be read is refused by name before a byte moves, and the endpoint lives on.
TYPED_TEST_P(TransportContract, RefusesReadsOutsideWhatWasGranted) {
  Pair<TypeParam> pair;
  auto memory = *pair.a.transport->allocate(4096, "a slot");
  const MemoryRef ref = memory->ref();
  std::vector<std::byte> landed(8192, std::byte{0xCD});
  const auto read = [&](RemoteRef remote) { return pair.read(remote, landed.data()); };
  const std::uint64_t max = ~std::uint64_t{0};
  EXPECT_EQ(read({ref.region, ref.generation, 0, 1}).code(), StatusCode::kNotFound);
  pair.grant(memory);
  pair.grant(memory);  // idempotent
  EXPECT_TRUE(read({ref.region, ref.generation, 4096, 0}).ok());
  EXPECT_EQ(read({ref.region, ref.generation, 0, 4097}).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(read({ref.region, ref.generation, 4096, 1}).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(read({ref.region, ref.generation, max, 2}).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(read({ref.region, ref.generation, 1, max}).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(read({ref.region, ref.generation + 1, 0, 1}).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::all_of(landed.begin(), landed.end(), [](std::byte b) { return b == std::byte{0xCD}; }));

  memory.reset();
  ASSERT_TRUE(pair.a.transport->progress(0, pair.a).ok());  // tells b
  pair.introduce();
  EXPECT_NE(read({ref.region, ref.generation, 0, 1}).message().find("freed"), std::string::npos);
  auto again = *pair.a.transport->allocate(8192, "a slot");
  EXPECT_EQ(again->ref().region, ref.region);
  EXPECT_EQ(again->ref().generation, ref.generation + 1);
  pair.grant(again);
  EXPECT_NE(read({ref.region, ref.generation, 0, 1}).message().find("stale"), std::string::npos);
  EXPECT_TRUE(read({ref.region, ref.generation + 1, 0, 8192}).ok());
  EXPECT_EQ(pair.b.count(Event::kClosed), 0u);
}

// Goal: memory of another transport, or none, cannot be granted.
TYPED_TEST_P(TransportContract, GrantsOnlyItsOwnMemory) {
  Pair<TypeParam> pair;
  const auto foreign = *pair.b.transport->allocate(10, "theirs");
  EXPECT_EQ(pair.a.transport->grant(pair.a_to_b, foreign).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pair.a.transport->grant(pair.a_to_b, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pair.a.transport->grant(999, foreign).code(), StatusCode::kUnavailable);
}

// Goal: more memory than the host has is an error with the numbers, not a killed process.
TYPED_TEST_P(TransportContract, RefusesMoreMemoryThanTheHostHas) {
  TypeParam backend;
  Side side(backend.make("trainer-0", 1, {}));
  const Status status = side.transport->allocate(1ull << 50, "the serve ring").status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(status.info().reason, Reason::kNoMemory);
  EXPECT_NE(status.message().find("the serve ring"), std::string::npos) << status.message();
  EXPECT_EQ(side.transport->allocate(0, "nothing").status().code(), StatusCode::kInvalidArgument);
}

// Goal: a peer that stops reading never blocks the sender, and costs bounded memory: its endpoint ends, with
// a reason.
TYPED_TEST_P(TransportContract, EndsPeersThatDoNotRead) {
  set_log_level(LogLevel::kError);
  Pair<TypeParam> pair({.max_queued_bytes = 4u << 20});
  const auto payload = pattern(512 << 10, 5);
  EXPECT_EQ(pair.b.transport->send(pair.b_to_a, pull(0), nullptr, kMaxHotPayloadBytes + 1).code(),
            StatusCode::kInvalidArgument);
  std::uint32_t sent = 0;
  Status status;
  while (sent < 100 &&
         (status = pair.b.transport->send(pair.b_to_a, pull(sent), payload.data(), payload.size())).ok())
    ++sent;
  ASSERT_GE(sent, 7u);
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
TYPED_TEST_P(TransportContract, KeepsWhatAPeerHasNotReadYet) {
  Pair<TypeParam> pair;
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

// Goal: closing sends what is queued first; the other side gets it all, then the end; nobody is called back
// on our side.
TYPED_TEST_P(TransportContract, CloseSendsWhatIsQueuedFirst) {
  Pair<TypeParam> pair;
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
  EXPECT_EQ(pair.b.count(Event::kClosed), 0u);
  EXPECT_EQ(pair.a.transport->send(pair.a_to_b, pull(1), nullptr, 0).code(), StatusCode::kUnavailable);
  pair.b.transport->close(pair.b_to_a);  // again, and of one that never was
  pair.b.transport->close(12345);
}

// Goal: a closed endpoint whose peer reads nothing is given up within its bound.
TYPED_TEST_P(TransportContract, CloseGivesUpOnAPeerThatReadsNothing) {
  Pair<TypeParam> pair({.close_timeout_ns = 20 * kNanosPerMilli});
  const auto payload = pattern(4 << 20, 6);
  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(1), payload.data(), payload.size()).ok());
  pair.b.transport->close(pair.b_to_a);
  ASSERT_TRUE(pump({&pair.b}, [&] { return pair.b.transport->counters().endpoints == 0; }));
}

// Goal: callbacks may close, send, connect and read; the transport copes.
TYPED_TEST_P(TransportContract, CallbacksMayCallBack) {
  Pair<TypeParam> pair;
  pair.a.on_message_hook = [&](EndpointId endpoint, const HotHeader& header) {
    if (header.seq == 1) {
      EXPECT_TRUE(pair.a.transport->send(endpoint, pull(100), nullptr, 0).ok());
      pair.a.transport->close(endpoint);
    }
  };
  for (std::uint32_t i = 1; i <= 3; ++i)
    ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(i), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kClosed) == 1; }));
  EXPECT_EQ(pair.a.count(Event::kMessage), 2u);  // the hello, and seq 1: nothing follows a close
  EXPECT_EQ(pair.b.last(Event::kMessage).header.seq, 100u);
}

// Goal: reads of an endpoint that ends are reported before its end.
TYPED_TEST_P(TransportContract, ReportsReadsBeforeTheEnd) {
  Pair<TypeParam> pair;
  const std::size_t bytes = 64u << 20;
  const auto memory = pair.granted(bytes);
  std::vector<std::byte> landed(bytes);
  for (ReadToken token = 1; token <= 8; ++token) {
    pair.b.transport->read(pair.b_to_a, {memory->ref().region, memory->ref().generation, 0, bytes},
                           landed.data(), token);
  }
  pair.b.transport->read(pair.b_to_a, {4711, 1, 0, 1}, landed.data(), 9);
  pair.a.transport->close(pair.a_to_b);
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kClosed) == 1; }));
  EXPECT_EQ(pair.b.count(Event::kRead), 9u);
  EXPECT_EQ(pair.b.events.back().kind, Event::kClosed);
}

// Goal: reads still under way when the transport is destroyed end with it; nothing writes to their memory
// afterwards.
TYPED_TEST_P(TransportContract, DestructionEndsReads) {
  Pair<TypeParam> pair;
  const std::size_t bytes = 64u << 20;
  const auto memory = pair.granted(bytes);
  std::vector<std::byte> landed(bytes);
  for (ReadToken token = 1; token <= 50; ++token) {
    pair.b.transport->read(pair.b_to_a, {memory->ref().region, memory->ref().generation, 0, bytes},
                           landed.data(), token);
  }
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(pair.b.transport->progress(0, pair.b).ok());
    ASSERT_TRUE(pair.a.transport->progress(0, pair.a).ok());
  }
  pair.b.transport.reset();
  landed = {};
  ASSERT_TRUE(pump({&pair.a}, [&] { return pair.a.count(Event::kClosed) == 1; }));
}

// Goal: two readers of one region in one process do not disturb each other: one is dropped while both read.
TYPED_TEST_P(TransportContract, Case054TwoReadersOfOneRegionInOneProcess) {
  Pair<TypeParam> pair;
  const std::size_t bytes = 1u << 20;
  const auto memory = pair.granted(bytes);
  for (std::size_t i = 0; i < bytes; ++i) memory->ref().address[i] = coded_byte(i);
  const RemoteRef window{memory->ref().region, memory->ref().generation, 0, bytes};
  constexpr ReadToken kDropped = 20;  // each lands in memory of its own: several threads may read at once
  std::vector<std::byte> landed(bytes), dropped(kDropped * bytes);
  {
    Side other(pair.backend.make("worker-1", 33, {}));
    const auto address = pair.a.transport->listen();
    ASSERT_TRUE(address.ok()) << address.status().to_string();
    const auto connected = other.transport->connect(*address, kNanosPerSecond);
    ASSERT_TRUE(connected.ok()) << connected.status().to_string();
    const std::size_t accepted = pair.a.count(Event::kAccepted);
    ASSERT_TRUE(other.transport->send(*connected, {.type = HotType::kHello}, nullptr, 0).ok());
    ASSERT_TRUE(pump({&pair.a, &other}, [&] { return pair.a.count(Event::kMessage) == 2; }));
    ASSERT_GE(pair.a.count(Event::kAccepted), accepted);
    const EndpointId back = pair.a.last(Event::kMessage).endpoint;
    ASSERT_TRUE(pair.a.transport->grant(back, memory).ok());
    ASSERT_TRUE(pair.a.transport->send(back, pull(1), nullptr, 0).ok());
    ASSERT_TRUE(pump({&pair.a, &other}, [&] { return other.count(Event::kMessage) == 1; }));
    for (ReadToken token = 1; token <= kDropped; ++token)
      other.transport->read(*connected, window, dropped.data() + (token - 1) * bytes, token);
    pair.b.transport->read(pair.b_to_a, window, landed.data(), 1);
  }
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kRead) == 1; }));
  EXPECT_TRUE(pair.b.last(Event::kRead).status.ok()) << pair.b.last(Event::kRead).status.to_string();
  for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(landed[i], coded_byte(i)) << i;
}

// Goal: exported memory outlives its transport.
TYPED_TEST_P(TransportContract, MemoryOutlivesTheTransport) {
  std::shared_ptr<ExportedMemory> memory;
  {
    Pair<TypeParam> pair;
    memory = pair.granted(1 << 20);
    memory->ref().address[5] = std::byte{5};
  }
  EXPECT_EQ(memory->ref().address[5], std::byte{5});
  memory->ref().address[(1 << 20) - 1] = std::byte{6};
}

// Goal: wake() ends a wait, also one that begins later.
TYPED_TEST_P(TransportContract, WakeEndsAWait) {
  TypeParam backend;
  Side side(backend.make("worker-0", 1, {}));
  side.transport->wake();
  const std::int64_t start_ns = SystemClock::instance().now_ns();
  ASSERT_TRUE(side.transport->progress(kPatience, side).ok());
  std::thread waker([&] { side.transport->wake(); });
  ASSERT_TRUE(side.transport->progress(kPatience, side).ok());
  waker.join();
  EXPECT_LT(SystemClock::instance().now_ns() - start_ns, kPatience / 2);
}

// Goal: memory can be allocated and freed from other threads while the progress thread works.
TYPED_TEST_P(TransportContract, AllocatesFromAnyThread) {
  Pair<TypeParam> pair;
  std::thread other([&] {
    for (int i = 0; i < 200; ++i) {
      auto memory = pair.a.transport->allocate(4096 + static_cast<std::uint64_t>(i), "a slot");
      EXPECT_TRUE(memory.ok());
    }
  });
  for (std::uint32_t i = 0; i < 50; ++i) {
    const auto memory = pair.granted(100);
    std::vector<std::byte> landed(100, std::byte{1});
    EXPECT_TRUE(pair.read({memory->ref().region, memory->ref().generation, 0, 100}, landed.data()).ok());
    EXPECT_EQ(landed[99], std::byte{0});
  }
  other.join();
  EXPECT_EQ(pair.a.transport->counters().regions, 0u);
}

// Goal: two hundred lives later there are as many descriptors and threads as before, and hardly more memory.
TYPED_TEST_P(TransportContract, LeaksNothingOverManyLives) {
  const auto live = [] {
    Pair<TypeParam> pair;
    const auto memory = pair.granted(4096);
    std::byte byte{1};
    EXPECT_TRUE(pair.read({memory->ref().region, memory->ref().generation, 0, 1}, &byte).ok());
    EXPECT_EQ(byte, std::byte{0});
  };
  const auto resident_pages = [] {
    std::ifstream file("/proc/self/statm");
    std::size_t size = 0, resident = 0;
    file >> size >> resident;
    return resident;
  };
  for (int i = 0; i < 20; ++i) live();
  const std::size_t pages = resident_pages();
  const std::size_t descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  for (int i = 0; i < 200; ++i) live();
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they keep freed memory
  EXPECT_LT(resident_pages(), pages + 2048);                         // 8 MiB
#endif
}

REGISTER_TYPED_TEST_SUITE_P(TransportContract, CarriesMessagesBothWaysInOrder,
                            KeepsTheOrderOfThousandsOfMessages, ReadsExactlyTheWindow, ReadsManyWindowsAtOnce,
                            RefusesReadsOutsideWhatWasGranted, GrantsOnlyItsOwnMemory,
                            RefusesMoreMemoryThanTheHostHas, EndsPeersThatDoNotRead,
                            KeepsWhatAPeerHasNotReadYet, CloseSendsWhatIsQueuedFirst,
                            CloseGivesUpOnAPeerThatReadsNothing, CallbacksMayCallBack,
                            ReportsReadsBeforeTheEnd, DestructionEndsReads,
                            Case054TwoReadersOfOneRegionInOneProcess, MemoryOutlivesTheTransport,
                            WakeEndsAWait, AllocatesFromAnyThread, LeaksNothingOverManyLives);

}  // namespace shardpull::transport_testing
