#include "runtime/transport_probe.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/cma/cma_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;

constexpr ProbeOptions kSmall{.buffer_bytes = (20u << 20) + 13, .budget_ns = 1, .timeout_ns = 60'000'000'000};

class Directory {
 public:
  Directory() {
    std::string name = (std::filesystem::temp_directory_path() / "shardpull-probe-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void expect_read_whole(TransportKind kind) {
  const Directory directory;
  const auto rate = probe_transport(kind, directory.path(), kSmall);
  ASSERT_TRUE(rate.ok()) << rate.status().message();
  EXPECT_GE(rate->bytes, kSmall.buffer_bytes);
  EXPECT_GT(rate->ns, 0);
}

TEST(TransportProbe, Shm) {
  expect_read_whole(TransportKind::kShm);
}

TEST(TransportProbe, Cma) {
  if (const Status status = cma_available(); !status.ok()) GTEST_SKIP() << status.message();
  expect_read_whole(TransportKind::kCma);
}

TEST(TransportProbe, Tcp) {
  if (const auto ucx = describe_ucx(); !ucx.ok()) GTEST_SKIP() << ucx.status().message();
  expect_read_whole(TransportKind::kTcp);
}

TEST(TransportProbe, Memcpy) {
  const TransferRate rate = probe_memcpy({.buffer_bytes = 4096, .budget_ns = 1});
  EXPECT_GE(rate.bytes, 4096u);
  EXPECT_GT(rate.ns, 0);
}

// A transport without a directory says so.
TEST(TransportProbe, ErrorsAreTheTransports) {
  const auto rate = probe_transport(TransportKind::kShm, "/no/such/directory", kSmall);
  ASSERT_FALSE(rate.ok());
  EXPECT_THAT(rate.status().message(), HasSubstr("/no/such/directory"));
}

// ---- transports that fail ---------------------------------------------------------------------------------

enum class Fault { kWrongByte, kNoAnswer, kNoRead, kFailedRead, kClosed };

class Memory final : public ExportedMemory {
 public:
  explicit Memory(std::uint64_t bytes) : bytes_(bytes) {
    ref_ = {.address = bytes_.data(), .bytes = bytes, .region = 1, .generation = 1};
  }

 private:
  std::vector<std::byte> bytes_;
};

// One side of a pair in one process. The owner makes the memory that both know; the reader answers itself.
class Faulty final : public Transport {
 public:
  Faulty(Fault fault, std::shared_ptr<std::shared_ptr<Memory>> memory)
      : fault_(fault), memory_(std::move(memory)) {}

  std::string name() const override { return "faulty"; }
  bool can_map() const override { return false; }
  Result<std::shared_ptr<ExportedMemory>> allocate(std::uint64_t bytes, std::string_view) override {
    *memory_ = std::make_shared<Memory>(bytes);
    return std::shared_ptr<ExportedMemory>(*memory_);
  }
  Result<std::string> listen() override { return std::string("here"); }
  Result<EndpointId> connect(const std::string&, std::int64_t) override { return EndpointId{1}; }
  Status send(EndpointId, HotHeader, const std::byte*, std::size_t) override {
    said_hello_ = true;
    return {};
  }
  Status grant(EndpointId, const std::shared_ptr<ExportedMemory>&) override { return {}; }
  void close(EndpointId) override {}
  void read(EndpointId, const RemoteRef& remote, std::byte* local, ReadToken token) override {
    std::memcpy(local, (*memory_)->ref().address + remote.offset, remote.bytes);
    if (fault_ == Fault::kWrongByte && remote.offset == 0) local[77] ^= std::byte{1};
    reads_.push_back(token);
  }
  Result<Mapping> map(EndpointId, const RemoteRef&) override { return Mapping{}; }
  void add_mapped_bytes(std::uint64_t) override {}
  Status progress(std::int64_t, TransportSink& sink) override {
    if (said_hello_ && fault_ == Fault::kClosed) {
      sink.on_closed(1, Status(StatusCode::kUnavailable, "the peer went"));
    } else if (said_hello_ && fault_ != Fault::kNoAnswer) {
      sink.on_message(1, {.type = HotType::kHelloReply}, nullptr);
    }
    said_hello_ = false;
    for (const ReadToken token : std::exchange(reads_, {})) {
      if (fault_ == Fault::kNoRead) continue;
      const bool failed = fault_ == Fault::kFailedRead && token == 2;
      sink.on_read_done(token, failed ? Status(StatusCode::kDataLoss, "the second read failed") : Status());
    }
    return {};
  }
  void wake() override {}
  TransportCounters counters() const override { return {}; }

 private:
  const Fault fault_;
  const std::shared_ptr<std::shared_ptr<Memory>> memory_;
  bool said_hello_ = false;
  std::vector<ReadToken> reads_;
};

std::string failure_of(Fault fault, std::int64_t timeout_ns) {
  const auto memory = std::make_shared<std::shared_ptr<Memory>>();
  const auto rate =
      probe_transport(std::make_unique<Faulty>(fault, memory), std::make_unique<Faulty>(fault, memory),
                      {.buffer_bytes = 9u << 20, .budget_ns = 1, .timeout_ns = timeout_ns});
  return rate.ok() ? "none" : rate.status().message();
}

TEST(TransportProbe, AWrongByteIsNoticed) {
  EXPECT_THAT(failure_of(Fault::kWrongByte, 60'000'000'000), HasSubstr("those at 72 are not what was sent"));
}

TEST(TransportProbe, NothingIsWaitedForWithoutEnd) {
  EXPECT_THAT(failure_of(Fault::kNoAnswer, 5'000'000), HasSubstr("did not meet within 5 ms"));
  EXPECT_THAT(failure_of(Fault::kNoRead, 5'000'000), HasSubstr("reads did not end within 5 ms"));
}

TEST(TransportProbe, WhatTheTransportReportsIsTold) {
  EXPECT_THAT(failure_of(Fault::kFailedRead, 60'000'000'000), HasSubstr("the second read failed"));
  EXPECT_THAT(failure_of(Fault::kClosed, 60'000'000'000), HasSubstr("the peer went"));
}

}  // namespace
}  // namespace shardpull
