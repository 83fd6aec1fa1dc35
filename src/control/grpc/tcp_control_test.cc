// The control channel over TCP: addresses, what is refused, and members that come and go. What a hub and its
// links promise whatever carries them is in grpc_control_test.cc.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/host_port.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "control/grpc/grpc_control.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;

constexpr Member kWorker0{Role::kWorker, 0};

class Counter final : public ControlSink {
 public:
  void on_control(const Member&, Incarnation, ControlBody body) override {
    if (const auto* note = std::get_if<UserMessage>(&body)) add("note " + note->body);
  }
  void on_member_up(const Member& member, Incarnation) override { add("up " + to_string(member)); }
  void on_member_lost(const Member& member, Incarnation, const Status&) override {
    add("lost " + to_string(member));
  }
  bool wait(const std::string& event) {
    MutexLock lock(mutex_);
    return changed_.wait_for_ns(mutex_, 30 * kNanosPerSecond, [&]() SHARDPULL_NO_THREAD_SAFETY_ANALYSIS {
      return std::find(events_.begin(), events_.end(), event) != events_.end();
    });
  }

 private:
  void add(std::string event) {
    {
      MutexLock lock(mutex_);
      events_.push_back(std::move(event));
    }
    changed_.notify_all();
  }
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> events_ SHARDPULL_GUARDED_BY(mutex_);
};

// A socket that is bound to a free port of `host`, and thereby keeps others from taking it until it is
// closed.
struct Reserved {
  UniqueFd fd;
  std::uint16_t port = 0;
};
Reserved reserve(int family) {
  Reserved out;
  out.fd = UniqueFd(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_storage address{};
  socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  address.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr = in6addr_loopback;
  } else {
    reinterpret_cast<sockaddr_in*>(&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  }
  const int on = 1;
  setsockopt(out.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(out.fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return out;
  getsockname(out.fd.get(), reinterpret_cast<sockaddr*>(&address), &length);
  out.port = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                      : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  return out;
}
std::uint16_t free_port(int family = AF_INET) {
  return reserve(family).port;
}

ControlOptions at(const std::string& address, const Member& self) {
  ControlOptions options;
  options.address = "tcp:" + address;
  options.token = 7;
  options.self = self;
  options.incarnation = self == kSender ? 1 : 2;
  options.heartbeat_ns = 50 * kNanosPerMilli;
  options.connect_timeout_ns = 10 * kNanosPerSecond;
  return options;
}

void expect_talk(const std::string& hub_address, const std::string& link_address) {
  Counter at_hub, at_worker;
  auto hub = start_grpc_hub(at(hub_address, kSender), at_hub);
  ASSERT_TRUE(hub.ok()) << hub.status().message();
  auto link = connect_grpc_control(at(link_address, kWorker0), at_worker);
  ASSERT_TRUE(link.ok()) << link.status().message();
  ASSERT_TRUE(at_hub.wait("up worker 0"));
  ASSERT_TRUE((*link)->send(kSender, UserMessage{.topic = "t", .body = "to the hub"}).ok());
  ASSERT_TRUE((*hub)->send(kWorker0, UserMessage{.topic = "t", .body = "to the worker"}).ok());
  EXPECT_TRUE(at_hub.wait("note to the hub"));
  EXPECT_TRUE(at_worker.wait("note to the worker"));
  (*link)->shutdown();
  EXPECT_TRUE(at_hub.wait("lost worker 0"));
}

TEST(TcpControl, NumericAddressesAndNames) {
  const std::string port = std::to_string(free_port());
  expect_talk("127.0.0.1:" + port, "127.0.0.1:" + port);
  expect_talk("localhost:" + port, "localhost:" + port);
  // The name has an IPv6 address where nobody listens: the other one is tried as well.
  expect_talk("127.0.0.1:" + port, "localhost:" + port);
}

TEST(TcpControl, Ipv6) {
  const Reserved reserved = reserve(AF_INET6);
  if (reserved.port == 0) GTEST_SKIP() << "this host has no IPv6 loopback";
  const std::string address = "[::1]:" + std::to_string(free_port(AF_INET6));
  expect_talk(address, address);
}

// Goal: a link started before its hub finds it.
TEST(TcpControl, WaitsForTheHub) {
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  Counter at_hub, at_worker;
  std::unique_ptr<Control> link;
  std::thread connecting([&] {
    auto made = connect_grpc_control(at(address, kWorker0), at_worker);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (made.ok()) link = std::move(made).value();
  });
  auto hub = start_grpc_hub(at(address, kSender), at_hub);
  connecting.join();
  ASSERT_TRUE(hub.ok()) << hub.status().message();
  EXPECT_TRUE(at_hub.wait("up worker 0"));
}

// Goal: what is wrong with the address is said with the address and what to do.
TEST(TcpControl, RefusesAddressesThatCannotServe) {
  Counter sink;
  const auto hub = [&](const std::string& address) {
    return start_grpc_hub(at(address, kSender), sink).status().message();
  };
  const Reserved taken = reserve(AF_INET);
  ASSERT_EQ(listen(taken.fd.get(), 1), 0);
  EXPECT_THAT(hub("127.0.0.1:" + std::to_string(taken.port)), HasSubstr("another process listens there"));
  EXPECT_THAT(hub("127.0.0.1:" + std::to_string(taken.port)), HasSubstr(std::to_string(taken.port)));
  EXPECT_THAT(hub("0.0.0.0:4000"), HasSubstr("--insecure-listen"));
  ControlOptions foreign = at("192.0.2.1:4000", kSender);  // documentation's own, nobody's
  foreign.insecure_listen = true;
  EXPECT_THAT(start_grpc_hub(foreign, sink).status().message(), HasSubstr("no address of this host"));
  EXPECT_THAT(hub("no-such-host.invalid:4000"), HasSubstr("\"no-such-host.invalid\" cannot be resolved"));
  EXPECT_THAT(hub("fe80::1:4000"), HasSubstr("without brackets"));
  EXPECT_THAT(hub("host"), HasSubstr("has no port"));

  ControlOptions lost = at("no-such-host.invalid:4000", kWorker0);
  lost.connect_timeout_ns = 200 * kNanosPerMilli;
  EXPECT_THAT(connect_grpc_control(lost, sink).status().message(), HasSubstr("cannot be resolved"));
  lost = at("127.0.0.1:" + std::to_string(free_port()), kWorker0);
  lost.connect_timeout_ns = 200 * kNanosPerMilli;
  EXPECT_THAT(connect_grpc_control(lost, sink).status().message(), HasSubstr("no control hub answered"));
}

// Goal: another fleet's process at the same address is told so.
TEST(TcpControl, RefusesAnotherToken) {
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  Counter at_hub, at_worker;
  auto hub = start_grpc_hub(at(address, kSender), at_hub);
  ASSERT_TRUE(hub.ok()) << hub.status().message();
  ControlOptions other = at(address, kWorker0);
  other.token = 8;
  const Status refused = connect_grpc_control(other, at_worker).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnauthenticated);
  EXPECT_THAT(refused.message(), HasSubstr(address));
}

// Goal: another service at the address is found out within seconds, however long the fleet may take to appear.
TEST(TcpControl, Case125_another_service_is_named) {
  const std::string http = "HTTP/1.0 400 Bad Request\r\nServer: x\r\n\r\n";
  for (const std::string& answer : {http, std::string("SSH-2.0-x\r\n"), std::string()}) {
    SCOPED_TRACE(answer);
    const Reserved taken = reserve(AF_INET);
    ASSERT_EQ(listen(taken.fd.get(), 8), 0);
    std::atomic<bool> over{false};
    std::thread service([&] {
      std::vector<UniqueFd> connections;
      while (!over) {
        pollfd waiting{taken.fd.get(), POLLIN, 0};
        if (poll(&waiting, 1, 20) <= 0) continue;
        connections.emplace_back(accept4(taken.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!answer.empty()) {
          EXPECT_GE(send(connections.back().get(), answer.data(), answer.size(), MSG_NOSIGNAL), 0);
        }
      }
    });
    Counter at_worker;
    const Status refused =
        connect_grpc_control(at("127.0.0.1:" + std::to_string(taken.port), kWorker0), at_worker).status();
    over = true;
    service.join();
    EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused.message();
    EXPECT_THAT(refused.message(), HasSubstr(answer.empty() ? "no hello" : "not speak our protocol"));
    EXPECT_THAT(refused.message(), HasSubstr(answer.substr(0, answer.find('\r'))));
  }
}

}  // namespace
}  // namespace shardpull
