#include "transport/sim/sim_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/random.h"
#include "transport/hot_wire.h"

namespace shardpull {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr FleetToken kToken = 77;

// Writes down what a transport reports.
struct Side : TransportSink {
  explicit Side(std::unique_ptr<Transport> given) : transport(std::move(given)) {}
  void on_accepted(EndpointId endpoint) override { accepted.push_back(endpoint); }
  void on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload) override {
    from.push_back(endpoint);
    seqs.push_back(header.seq);
    payloads.emplace_back(payload, payload + header.length);
  }
  void on_closed(EndpointId endpoint, const Status& why) override {
    closed.push_back(endpoint);
    why_closed = why;
  }
  void on_read_done(ReadToken token, const Status& status) override { reads.emplace_back(token, status); }

  std::unique_ptr<Transport> transport;
  std::vector<EndpointId> accepted, closed, from;
  std::vector<std::uint32_t> seqs;
  std::vector<std::vector<std::byte>> payloads;
  std::vector<std::pair<ReadToken, Status>> reads;
  Status why_closed;
};

class SimTransportTest : public testing::Test {
 protected:
  FakeClock clock;
  SimNet net{clock, {.seed = 5, .piece_bytes = 64}};
  Side a{net.open("a", kToken, 1)}, b{net.open("b", kToken, 2)};

  // Runs both sides until nothing is due any more, or for `steps`.
  void run(int steps = 100000) {
    while (steps-- > 0) {
      const auto due = net.next_due_ns();
      if (!due) return;
      clock.set_ns(*due);
      for (Side* side : {&a, &b}) {
        if (side->transport != nullptr) {
          ASSERT_EQ(side->transport->progress(0, *side), Status());
        }
      }
    }
  }
  EndpointId connect() {
    EXPECT_TRUE(b.transport->listen().ok());
    const auto endpoint = a.transport->connect("sim:b", 0);
    EXPECT_TRUE(endpoint.ok());
    run();
    return endpoint.ok() ? *endpoint : 0;
  }
  static HotHeader header(std::uint32_t seq) {
    HotHeader header;
    header.type = HotType::kPull;
    header.seq = seq;
    return header;
  }
};

TEST_F(SimTransportTest, AnEndpointKeepsTheOrderOfItsMessages) {
  const EndpointId endpoint = connect();
  ASSERT_EQ(b.accepted.size(), 1u);
  const std::byte payload[3] = {std::byte{1}, std::byte{2}, std::byte{3}};
  for (std::uint32_t i = 0; i < 50; ++i)
    ASSERT_EQ(a.transport->send(endpoint, header(i), payload, i % 4), Status());
  run();
  ASSERT_EQ(b.seqs.size(), 50u);
  EXPECT_TRUE(std::is_sorted(b.seqs.begin(), b.seqs.end()));
  EXPECT_EQ(b.payloads[3].size(), 3u);
}

TEST_F(SimTransportTest, DifferentEndpointsOvertakeEachOther) {
  ASSERT_TRUE(b.transport->listen().ok());
  std::vector<EndpointId> endpoints;
  for (int i = 0; i < 8; ++i) endpoints.push_back(*a.transport->connect("sim:b", 0));
  for (std::uint32_t i = 0; i < 8; ++i)
    ASSERT_EQ(a.transport->send(endpoints[i], header(i), nullptr, 0), Status());
  run();
  ASSERT_EQ(b.seqs.size(), 8u);
  EXPECT_FALSE(std::is_sorted(b.seqs.begin(), b.seqs.end()));
}

// Goal: a read of many windows, done by single ones, ends once: when all have ended, with the first error.
TEST_F(SimTransportTest, ReadsOfManyPartsEndOnce) {
  const EndpointId endpoint = connect();
  auto memory = *b.transport->allocate(1000, "a test");
  for (std::uint32_t i = 0; i < 1000; ++i) memory->ref().address[i] = static_cast<std::byte>(i * 7);
  ASSERT_EQ(b.transport->grant(b.accepted[0], memory), Status());
  const auto window = [&](std::uint64_t offset, std::uint64_t bytes) {
    return RemoteRef{memory->ref().region, memory->ref().generation, offset, bytes};
  };
  std::vector<std::byte> local(1300);
  a.transport->read_parts(endpoint, {{window(501, 100), local.data()}, {window(3, 199), local.data() + 101}},
                          9);
  run();
  ASSERT_EQ(a.reads.size(), 1u);
  EXPECT_EQ(a.reads[0], (std::pair<ReadToken, Status>(9, {})));
  EXPECT_EQ(std::memcmp(local.data(), memory->ref().address + 501, 100), 0);
  EXPECT_EQ(local[100], std::byte{0});
  EXPECT_EQ(std::memcmp(local.data() + 101, memory->ref().address + 3, 199), 0);

  a.transport->read_parts(endpoint, {{window(0, 100), local.data()}, {window(999, 2), local.data()}}, 10);
  run();
  ASSERT_EQ(a.reads.size(), 2u);
  EXPECT_EQ(a.reads[1].first, 10u);
  EXPECT_EQ(a.reads[1].second.code(), StatusCode::kOutOfRange);

  a.transport->read_parts(endpoint, {{window(0, 1000), local.data()}, {window(0, 100), local.data()}}, 11);
  b.transport.reset();
  run();
  ASSERT_EQ(a.reads.size(), 3u);
  EXPECT_EQ(a.reads[2].first, 11u);
  EXPECT_FALSE(a.reads[2].second.ok());
}

// Goal: a backend that reaches only what it allocated says so, and what to do.
TEST_F(SimTransportTest, AdoptsNoMemory) {
  const std::byte bytes[8] = {};
  const Status status = a.transport->adopt(bytes, sizeof bytes, "lm_head.weight").status();
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("sim transport"));
  EXPECT_THAT(status.message(), HasSubstr("lm_head.weight"));
}

TEST_F(SimTransportTest, ReadsCopyPieceByPieceWhatWasGranted) {
  const EndpointId endpoint = connect();
  auto memory = *b.transport->allocate(1000, "a test");
  for (std::uint32_t i = 0; i < 1000; ++i) memory->ref().address[i] = static_cast<std::byte>(i);
  std::vector<std::byte> local(1000);
  const RemoteRef window{memory->ref().region, memory->ref().generation, 100, 500};
  a.transport->read(endpoint, window, local.data(), 1);
  run();
  ASSERT_EQ(a.reads.size(), 1u);
  EXPECT_THAT(a.reads[0].second.message(), HasSubstr("not granted"));

  ASSERT_EQ(b.transport->grant(b.accepted[0], memory), Status());
  a.transport->read(endpoint, window, local.data(), 2);
  a.transport->read(endpoint, {window.region, 9, 0, 1}, local.data(), 3);
  a.transport->read(endpoint, {window.region, window.generation, 600, 500}, local.data(), 4);
  a.transport->read(endpoint, {window.region, window.generation, ~0ull, 2}, local.data(), 5);
  run();
  ASSERT_EQ(a.reads.size(), 5u);
  for (const auto& [token, status] : a.reads) EXPECT_EQ(status.ok(), token == 2);
  EXPECT_TRUE(std::equal(local.begin(), local.begin() + 500, memory->ref().address + 100));
  EXPECT_EQ(a.transport->counters().payload_bytes_read, 500u);
}

TEST_F(SimTransportTest, AReadOfMemoryThatChangesMeanwhileIsTorn) {
  const EndpointId endpoint = connect();
  auto memory = *b.transport->allocate(4096, "a test");
  ASSERT_EQ(b.transport->grant(b.accepted[0], memory), Status());
  std::vector<std::byte> local(4096);
  a.transport->read(endpoint, {memory->ref().region, memory->ref().generation, 0, 4096}, local.data(), 1);
  run(30);
  std::fill(memory->ref().address, memory->ref().address + 4096, std::byte{1});
  run();
  EXPECT_EQ(local.front(), std::byte{0});
  EXPECT_EQ(local.back(), std::byte{1});
}

TEST_F(SimTransportTest, FreedMemoryShowsInMappings) {
  const EndpointId endpoint = connect();
  auto memory = *b.transport->allocate(16, "a test");
  ASSERT_EQ(b.transport->grant(b.accepted[0], memory), Status());
  const auto mapping = *a.transport->map(endpoint, {memory->ref().region, memory->ref().generation, 4, 8});
  memory->ref().address[4] = std::byte{42};
  EXPECT_EQ(mapping.data[0], std::byte{42});
  EXPECT_EQ(b.transport->counters().regions, 1u);
  memory.reset();
  EXPECT_EQ(mapping.data[0], SimNet::kFreedByte);
  EXPECT_EQ(b.transport->counters().regions, 0u);
}

TEST_F(SimTransportTest, ClosingReachesThePeerAfterWhatWasSentAndEndsItsReads) {
  const EndpointId endpoint = connect();
  auto memory = *b.transport->allocate(100000, "a test");
  ASSERT_EQ(b.transport->grant(b.accepted[0], memory), Status());
  std::vector<std::byte> local(100000);
  ASSERT_EQ(b.transport->send(b.accepted[0], header(1), nullptr, 0), Status());
  run();
  a.transport->read(endpoint, {memory->ref().region, memory->ref().generation, 0, 100000}, local.data(), 9);
  ASSERT_EQ(b.transport->send(b.accepted[0], header(2), nullptr, 0), Status());
  b.transport->close(b.accepted[0]);
  run();
  EXPECT_THAT(a.seqs, ElementsAre(1u, 2u));
  EXPECT_THAT(a.closed, ElementsAre(endpoint));
  ASSERT_EQ(a.reads.size(), 1u);
  EXPECT_FALSE(a.reads[0].second.ok());
  EXPECT_FALSE(a.transport->send(endpoint, header(3), nullptr, 0).ok());
  EXPECT_TRUE(b.closed.empty()) << "without a callback on the side that closes";
}

TEST_F(SimTransportTest, APeerThatGoesAwayIsNoticed) {
  const EndpointId endpoint = connect();
  b.transport.reset();
  EXPECT_FALSE(a.transport->send(endpoint, header(1), nullptr, 0).ok());
  run();
  EXPECT_THAT(a.closed, ElementsAre(endpoint));
  EXPECT_FALSE(a.transport->connect("sim:b", 0).ok());
}

TEST_F(SimTransportTest, AnotherTokenClosesTheEndpoint) {
  ASSERT_TRUE(b.transport->listen().ok());
  Side stranger(net.open("stranger", kToken + 1, 3));
  const EndpointId endpoint = *stranger.transport->connect("sim:b", 0);
  ASSERT_EQ(stranger.transport->send(endpoint, header(1), nullptr, 0), Status());
  run();
  EXPECT_TRUE(b.seqs.empty());
  ASSERT_EQ(b.closed.size(), 1u);
  EXPECT_EQ(b.why_closed.info().reason, Reason::kBadToken);
}

TEST_F(SimTransportTest, OneAddressOneListener) {
  ASSERT_TRUE(b.transport->listen().ok());
  const auto other = net.open("b", kToken, 9);
  EXPECT_FALSE(other->listen().ok());
}

// Two progress threads on the system clock: what the runtime's tests use.
TEST(SimTransportThreads, ProgressWaitsAndIsWoken) {
  SimNet net(SystemClock::instance(), {.seed = 1});
  Side a(net.open("a", kToken, 1)), b(net.open("b", kToken, 2));
  ASSERT_TRUE(b.transport->listen().ok());
  const EndpointId endpoint = *a.transport->connect("sim:b", 0);
  std::thread receiver([&] {
    while (b.seqs.size() < 100) ASSERT_EQ(b.transport->progress(kNanosPerSecond, b), Status());
  });
  for (std::uint32_t i = 0; i < 100; ++i) {
    HotHeader header;
    header.type = HotType::kPull;
    header.seq = i;
    ASSERT_EQ(a.transport->send(endpoint, header, nullptr, 0), Status());
  }
  receiver.join();
  EXPECT_TRUE(std::is_sorted(b.seqs.begin(), b.seqs.end()));

  std::thread sleeper([&] { ASSERT_EQ(a.transport->progress(3600 * kNanosPerSecond, a), Status()); });
  a.transport->wake();
  sleeper.join();
}

// Both sides hear of the end, and so do reads; the transports live on.
TEST_F(SimTransportTest, ACutConnectionEndsOnBothSides) {
  ASSERT_TRUE(b.transport->listen().ok());
  const EndpointId endpoint = *a.transport->connect("sim:b", 0);
  ASSERT_TRUE(a.transport->send(endpoint, HotHeader{.type = HotType::kPull, .seq = 1}, nullptr, 0).ok());
  run();
  ASSERT_THAT(b.seqs, ElementsAre(1));
  net.cut("a", "b");
  run();
  EXPECT_THAT(a.closed, ElementsAre(endpoint));
  EXPECT_EQ(b.closed, b.accepted);
  EXPECT_THAT(a.why_closed.message(), HasSubstr("was cut"));
  EXPECT_FALSE(a.transport->send(endpoint, HotHeader{.type = HotType::kPull, .seq = 2}, nullptr, 0).ok());
}

TEST_F(SimTransportTest, WhatIsHeldArrivesLaterAndInOrder) {
  ASSERT_TRUE(b.transport->listen().ok());
  const EndpointId endpoint = *a.transport->connect("sim:b", 0);
  run();
  const std::int64_t until_ns = clock.now_ns() + kNanosPerSecond;
  for (std::uint32_t seq = 1; seq <= 3; ++seq) {
    if (seq == 2) net.hold("b", until_ns);  // the first is under way
    ASSERT_TRUE(a.transport->send(endpoint, HotHeader{.type = HotType::kPull, .seq = seq}, nullptr, 0).ok());
  }
  ASSERT_TRUE(net.next_due_ns().has_value());
  EXPECT_GE(*net.next_due_ns(), until_ns);
  run();
  EXPECT_THAT(b.seqs, ElementsAre(1, 2, 3));
}

}  // namespace
}  // namespace shardpull
