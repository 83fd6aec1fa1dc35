#include "base/host_port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

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

}  // namespace
}  // namespace shardpull
