// What the backends of one host do alike beyond the contract of every transport: what strangers on their
// sockets can do, where the sockets are, reads of many parts. Each instantiates LocalContract and
// TransportContract with its LocalTestBackend.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "base/unix_socket.h"
#include "transport/local_frame.h"
#include "transport/local_transport.h"
#include "transport/transport_testing.h"

namespace shardpull::transport_testing {

// Transports of one backend in a directory of their own, which is gone with this object.
template <LocalBackend kind, Result<std::unique_ptr<Transport>> (*make_transport)(LocalOptions)>
class LocalTestBackend {
 public:
  static constexpr LocalBackend kKind = kind;
  static std::string why_not() { return {}; }

  explicit LocalTestBackend(const std::string& below = "") {
    std::string name = (std::filesystem::temp_directory_path() / "shardpull-local-XXXXXX").string();
    root_ = mkdtemp(name.data());
    directory_ = root_ + below;
    std::filesystem::create_directories(directory_);
    chmod(directory_.c_str(), 0700);
  }
  ~LocalTestBackend() { std::filesystem::remove_all(root_); }
  LocalTestBackend(const LocalTestBackend&) = delete;
  LocalTestBackend& operator=(const LocalTestBackend&) = delete;

  const std::string& directory() const { return directory_; }
  static Result<std::unique_ptr<Transport>> make_exactly(LocalOptions options) {
    return make_transport(std::move(options));
  }
  Result<std::unique_ptr<Transport>> make_with(const std::string& name, Incarnation incarnation,
                                               LocalOptions options = {}) {
    options.directory = directory_;
    options.token = kToken;
    options.incarnation = incarnation;
    options.self_name = name;
    return make_transport(std::move(options));
  }
  Result<std::unique_ptr<Transport>> make(const std::string& name, Incarnation incarnation,
                                          const Settings& settings) {
    LocalOptions options;
    if (settings.max_queued_bytes != 0) options.max_queued_bytes = settings.max_queued_bytes;
    if (settings.close_timeout_ns != 0) options.close_timeout_ns = settings.close_timeout_ns;
    return make_with(name, incarnation, options);
  }

 private:
  std::string root_, directory_;
};

// The file of the socket that an address names; what follows is the backend's.
inline std::string socket_path(const std::string& address) {
  return address.substr(0, address.find('#'));
}

// A bare socket to the transport: what a stranger has.
inline UniqueFd stranger(const std::string& address) {
  auto fd = connect_unix(socket_path(address), kNanosPerSecond);
  EXPECT_TRUE(fd.ok()) << fd.status().to_string();
  return std::move(fd).value();
}

template <typename Backend>
class LocalContract : public TransportContract<Backend> {};
TYPED_TEST_SUITE_P(LocalContract);

// Goal: bytes that are not ours close that endpoint, with a reason, and disturb nothing else.
TYPED_TEST_P(LocalContract, ClosesForeignConnectionsAndLivesOn) {
  set_log_level(LogLevel::kError);  // the warnings are expected here
  Pair<TypeParam> pair;
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
  expect_closed("TLS", bytes_of(std::string_view("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11)), false,
                "not our protocol");
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
  LocalFrame ended{.kind = LocalFrameKind::kRetire,
                   .backend = TypeParam::kKind,
                   .token = kToken,
                   .incarnation = 1,
                   .region = 1,
                   .generation = 1};
  const auto retire = encode(ended);
  expect_closed("retire of nothing", {retire.begin(), retire.end()}, false, "never granted");
  ended.backend = ended.backend == LocalBackend::kShm ? LocalBackend::kCma : LocalBackend::kShm;
  const auto foreign = encode(ended);
  expect_closed("another transport", {foreign.begin(), foreign.end()}, false,
                "give all processes of a fleet the same");
  HotHeader huge = good;
  huge.length = 0;
  auto too_long = frame_of(huge);
  too_long[55] = std::byte{0x40};
  expect_closed("a gigabyte announced", too_long, false, "above the limit");

  ASSERT_TRUE(pair.b.transport->send(pair.b_to_a, pull(7), nullptr, 0).ok());
  ASSERT_TRUE(pair.pump_until([&] { return pair.a.last(Event::kMessage).header.seq == 7; }));
  set_log_level(LogLevel::kWarn);
}

// Goal: random streams, mutated from real ones, never do more than close their endpoint.
TYPED_TEST_P(LocalContract, SurvivesMutatedStreams) {
  set_log_level(LogLevel::kError);
  TypeParam backend;
  Side side(backend.make_with("trainer-0", 1));
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
      LocalFrame frame{.kind = random.chance(0.5) ? LocalFrameKind::kGrant : LocalFrameKind::kRetire,
                       .backend = TypeParam::kKind,
                       .token = kToken,
                       .incarnation = 2,
                       .region = 1,
                       .generation = 1,
                       .bytes = 1};
      if (frame.kind == LocalFrameKind::kGrant && frame.backend == LocalBackend::kCma) {
        frame.address = frame.proof_address = frame.proof = 4096;
      }
      const auto own = encode(frame);
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
TYPED_TEST_P(LocalContract, ClosesSilentStrangers) {
  set_log_level(LogLevel::kError);
  TypeParam backend;
  LocalOptions options;
  options.hello_timeout_ns = 30 * kNanosPerMilli;
  Side side(backend.make_with("trainer-0", 1, options));
  UniqueFd fd = stranger(*side.transport->listen());
  ASSERT_TRUE(pump({&side}, [&] { return side.count(Event::kClosed) == 1; }));
  EXPECT_EQ(side.last(Event::kClosed).status.code(), StatusCode::kDeadlineExceeded);
  set_log_level(LogLevel::kWarn);
}

// Goal: nothing is left behind when a transport ends, and it does not remove a successor's socket.
TYPED_TEST_P(LocalContract, RemovesItsSocketAndOnlyItsOwn) {
  TypeParam backend;
  const std::string path = backend.directory() + "/trainer-0.sock";
  {
    Side side(backend.make_with("trainer-0", 1));
    ASSERT_EQ(socket_path(*side.transport->listen()), path);
    ASSERT_EQ(socket_path(*side.transport->listen()), path);  // again is the same
    EXPECT_TRUE(std::filesystem::exists(path));
    Side twin(backend.make_with("trainer-0", 2));
    EXPECT_NE(twin.transport->listen().status().message().find(
                  fmt::format("in use by process {}; end it", getpid())),
              std::string::npos);
  }
  EXPECT_TRUE(std::filesystem::is_empty(backend.directory()));
  {
    Side side(backend.make_with("trainer-0", 1));
    ASSERT_TRUE(side.transport->listen().ok());
    std::filesystem::remove(path);
    Side successor(backend.make_with("trainer-0", 2));
    ASSERT_TRUE(successor.transport->listen().ok());
    side.transport.reset();
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  std::filesystem::create_directory(path);
  Side side(backend.make_with("trainer-0", 1));
  EXPECT_NE(side.transport->listen().status().message().find("not a socket"), std::string::npos);
}

// Goal: directories deeper than a socket address holds work all the same.
TYPED_TEST_P(LocalContract, WorksInLongDirectories) {
  TypeParam backend("/" + std::string(100, 'a') + "/with space/" + std::string(100, 'b'));
  Side a(backend.make_with("trainer-0", 1)), b(backend.make_with("worker-0", 2));
  const auto address = a.transport->listen();
  ASSERT_TRUE(address.ok()) << address.status().to_string();
  const auto endpoint = b.transport->connect(*address, kNanosPerSecond);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status().to_string();
  ASSERT_TRUE(b.transport->send(*endpoint, pull(1), nullptr, 0).ok());
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.count(Event::kMessage) == 1; }));
  a.transport.reset();
  EXPECT_TRUE(std::filesystem::is_empty(backend.directory()));
}

// Goal: options that cannot work are refused at once, with what to do.
TYPED_TEST_P(LocalContract, RefusesUnsafeOrImpossibleOptions) {
  TypeParam backend;
  const auto status = [&](LocalOptions options) {
    return TypeParam::make_exactly(std::move(options)).status();
  };
  const LocalOptions good{
      .directory = backend.directory(), .token = 1, .incarnation = 1, .self_name = "worker-0"};
  EXPECT_TRUE(status(good).ok());
  LocalOptions bad = good;
  bad.token = 0;
  EXPECT_EQ(status(bad).code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.self_name = "../x";
  EXPECT_EQ(status(bad).code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.directory += "/missing";
  EXPECT_NE(status(bad).message().find("mkdir -m 700"), std::string::npos) << status(bad).message();
  ASSERT_EQ(chmod(backend.directory().c_str(), 0755), 0);
  EXPECT_NE(status(good).message().find("chmod 700"), std::string::npos) << status(good).message();
  ASSERT_EQ(chmod(backend.directory().c_str(), 0700), 0);
  Side side(backend.make_with("worker-0", 1));
  std::string address;
  {
    Side ended(backend.make_with("trainer-0", 2));
    address = *ended.transport->listen();
  }
  EXPECT_EQ(side.transport->connect(address, kNanosPerSecond).status().code(), StatusCode::kUnavailable);
}

// Goal: thousands of windows of several regions, of odd sizes at odd offsets, land each in its place with one
// completion, and nothing beside them is written.
TYPED_TEST_P(LocalContract, ReadsThousandsOfPartsAtOnce) {
  Pair<TypeParam> pair;
  const std::uint64_t bytes = (9u << 20) + 77;
  const auto first = pair.granted(bytes), second = pair.granted(bytes);
  for (std::uint64_t i = 0; i < bytes; ++i) first->ref().address[i] = coded_byte(i);
  for (std::uint64_t i = 0; i < bytes; ++i) second->ref().address[i] = coded_byte(i + bytes);
  for (const std::size_t count :
       {std::size_t{1}, std::size_t{50}, std::size_t{1024}, std::size_t{1025}, std::size_t{20'000}}) {
    Random random(count);
    struct Expected {
      std::uint64_t from = 0, at = 0, bytes = 0, code = 0;
    };
    std::vector<Expected> expected;
    std::vector<std::byte> landed(2 * bytes + 2 * count, std::byte{0xCD});
    std::vector<ReadPart> parts;
    std::uint64_t at = 1;
    const std::uint64_t longest = bytes / count;
    for (std::size_t i = 0; i < count; ++i) {
      const bool in_second = random.chance(0.3);
      const ExportedMemory& memory = in_second ? *second : *first;
      // Some continue the part before on both sides.
      const bool follows =
          !expected.empty() && random.chance(0.3) && expected.back().from + expected.back().bytes < bytes;
      const std::uint64_t from = follows ? expected.back().from + expected.back().bytes : random.below(bytes);
      const std::uint64_t length = std::min(random.below(longest) + (i % 7 == 0 ? 0 : 1), bytes - from);
      if (!follows) at += 1;
      parts.push_back({.remote = {memory.ref().region, memory.ref().generation, from, length},
                       .local = landed.data() + at});
      expected.push_back({from, at, length, in_second ? bytes : 0});
      at += length;
    }
    const std::size_t before = pair.b.count(Event::kRead);
    pair.b.transport->read_parts(pair.b_to_a, std::move(parts), 4711);
    ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kRead) == before + 1; }));
    ASSERT_TRUE(pair.b.last(Event::kRead).status.ok()) << pair.b.last(Event::kRead).status.to_string();
    EXPECT_EQ(pair.b.last(Event::kRead).token, 4711u);
    std::vector<std::byte> want(landed.size(), std::byte{0xCD});
    for (const Expected& part : expected) {
      for (std::uint64_t i = 0; i < part.bytes; ++i)
        want[part.at + i] = coded_byte(part.code + part.from + i);
    }
    ASSERT_TRUE(landed == want) << count << " parts";
  }
}

// Goal: one window that may not be read refuses them all, before a byte moves.
TYPED_TEST_P(LocalContract, RefusesAllPartsForOne) {
  Pair<TypeParam> pair;
  const auto memory = pair.granted(4096);
  std::vector<std::byte> landed(8192, std::byte{0xCD});
  const auto ref = memory->ref();
  pair.b.transport->read_parts(
      pair.b_to_a,
      {{.remote = {ref.region, ref.generation, 0, 4096}, .local = landed.data()},
       {.remote = {ref.region, ref.generation, 1, 4096}, .local = landed.data() + 4096}},
      1);
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kRead) == 1; }));
  EXPECT_EQ(pair.b.last(Event::kRead).status.code(), StatusCode::kOutOfRange);
  EXPECT_TRUE(std::all_of(landed.begin(), landed.end(), [](std::byte b) { return b == std::byte{0xCD}; }));
  pair.b.transport->read_parts(pair.b_to_a, {}, 2);
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kRead) == 2; }));
  EXPECT_TRUE(pair.b.last(Event::kRead).status.ok());
  pair.b.transport->read_parts(999, {{.remote = {ref.region, ref.generation, 0, 1}, .local = landed.data()}},
                               3);
  ASSERT_TRUE(pair.pump_until([&] { return pair.b.count(Event::kRead) == 3; }));
  EXPECT_EQ(pair.b.last(Event::kRead).status.code(), StatusCode::kUnavailable);
}

REGISTER_TYPED_TEST_SUITE_P(LocalContract, ClosesForeignConnectionsAndLivesOn, SurvivesMutatedStreams,
                            ClosesSilentStrangers, RemovesItsSocketAndOnlyItsOwn, WorksInLongDirectories,
                            RefusesUnsafeOrImpossibleOptions, ReadsThousandsOfPartsAtOnce,
                            RefusesAllPartsForOne);

}  // namespace shardpull::transport_testing
