#include "base/host_port.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/unique_fd.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;

TEST(HostPort, ReadsWhatItWrites) {
  for (const char* text :
       {"node7:5000", "10.0.0.7:1", "[fd00::7]:65535", "[fe80::1%eth0]:80", "a.b-c.example:443"}) {
    const auto parsed = parse_host_port(text, "--rendezvous");
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    EXPECT_EQ(to_string(*parsed), text);
  }
  EXPECT_EQ(parse_host_port("[::1]:5000", "x")->host, "::1");
  EXPECT_EQ(parse_host_port("h:0", "x", true)->port, 0);
}

TEST(HostPort, RefusesTheRestNamingTheForm) {
  const std::vector<std::string> texts = {
      "",           "host",      ":5000",       "host:",    "host:0",
      "host:65536", "host:5k",   "[host]:5000", "a b:5",    "fd00::7:5000",
      "[::1]",      "[::1]5000", "[::1",        "host:5\n", std::string(400, 'a')};
  for (const std::string& text : texts) {
    const auto parsed = parse_host_port(text, "--rendezvous");
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr("--rendezvous")) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr("HOST:PORT")) << text;
  }
}

TEST(HostPort, ResolvesNumericAddresses) {
  const auto v4 = resolve({"127.0.0.3", 81});
  ASSERT_TRUE(v4.ok()) << v4.status().message();
  ASSERT_EQ(v4->size(), 1u);
  EXPECT_EQ(v4->front().to_string(), "127.0.0.3:81");
  EXPECT_TRUE(v4->front().loopback());
  EXPECT_EQ(v4->front().port(), 81);
  const auto v6 = resolve({"fd00::7", 81});
  ASSERT_TRUE(v6.ok()) << v6.status().message();
  EXPECT_EQ(v6->front().to_string(), "[fd00::7]:81");
  EXPECT_FALSE(v6->front().loopback());
  EXPECT_TRUE(resolve({"::1", 1})->front().loopback());
  EXPECT_TRUE(resolve({"::ffff:127.0.0.1", 1})->front().loopback());
  EXPECT_FALSE(resolve({"10.0.0.1", 1})->front().loopback());
}

TEST(HostPort, UnknownNameIsNamed) {
  const auto nothing = resolve({"no-such-host.invalid", 5000});
  ASSERT_FALSE(nothing.ok());
  EXPECT_EQ(nothing.status().code(), StatusCode::kUnavailable);
  EXPECT_THAT(nothing.status().message(), HasSubstr("\"no-such-host.invalid\""));
}

// Goal: whoever comes while it is checked whether one can listen is turned away, as by a host where nobody
// does, and not taken in and hung up on.
TEST(HostPort, CheckingTakesNobodyIn) {
  auto address = resolve({"127.0.0.1", 1})->front();
  {
    const UniqueFd probe(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;  // as gRPC's own sockets are
    ASSERT_EQ(::setsockopt(probe.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
    reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = 0;
    ASSERT_EQ(::bind(probe.get(), address.get(), address.length), 0);
    ASSERT_EQ(::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.length), 0);
    EXPECT_TRUE(check_can_listen(address, "somebody").ok()) << "bound, but nobody listens";
    ASSERT_EQ(::listen(probe.get(), 1), 0);
    EXPECT_THAT(check_can_listen(address, "somebody").message(), HasSubstr("another process listens there"));
  }
  std::atomic<bool> over = false;
  std::thread checks([&] {
    while (!over) check_can_listen(address, "somebody").ignore();
  });
  // From another address: a socket whose own port is the one it connects to meets itself.
  auto any = resolve({"127.0.0.2", 1})->front();
  reinterpret_cast<sockaddr_in*>(&any.storage)->sin_port = 0;
  int turned_away = 0;
  for (int i = 0; i < 2000; ++i) {
    const UniqueFd comes(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (::bind(comes.get(), any.get(), any.length) != 0) break;
    int error = ::connect(comes.get(), address.get(), address.length) != 0 ? errno : 0;
    if (error == EINPROGRESS) {
      pollfd answer{comes.get(), POLLOUT, 0};
      socklen_t size = sizeof error;
      if (::poll(&answer, 1, 500) == 1) ::getsockopt(comes.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error != ECONNREFUSED) break;
    ++turned_away;
  }
  over = true;
  checks.join();
  EXPECT_EQ(turned_away, 2000);
}

}  // namespace
}  // namespace shardpull
