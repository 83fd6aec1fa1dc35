#include "runtime/fleet_link.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardpull {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const Status kLost(StatusCode::kUnavailable, "worker 1 is lost",
                   {.reason = Reason::kPeerLost, .peer = "worker 1"});

FleetMessage message(const std::string& body) { return {"worker 0", "topic", body}; }

// All that a program receives: bodies, and the texts of errors.
std::vector<std::string> received(MessageQueue& queue) {
  std::vector<std::string> out;
  for (;;) {
    const auto next = queue.pop(0, {});
    if (!next.ok()) {
      out.push_back(std::string(to_string(next.status().info().reason)) + ": " + next.status().message());
      if (next.status().info().reason == Reason::kShutdown) return out;
    } else if (next->has_value()) {
      out.push_back((*next)->body);
    } else {
      return out;
    }
  }
}

// Goal: the oldest messages make room, which the program is told, once and first; of a lost member it hears in
// any case.
TEST(MessageQueue, keeps_the_newest_of_too_many) {
  MessageQueue queue({.messages = 3, .bytes = 1 << 20});
  queue.push(message("0"));
  queue.push_error(kLost);
  for (const char* body : {"1", "2", "3", "4"}) queue.push(message(body));
  const std::string limit =
      "limit: messages dropped unread, the oldest: 2 (at most 3 wait to be received, or 1 MiB)";
  EXPECT_THAT(received(queue), ElementsAre(limit, "peer_lost: worker 1 is lost", "2", "3", "4"));

  for (const char* body : {"5", "6", "7"}) queue.push(message(body));
  EXPECT_THAT(received(queue), ElementsAre("5", "6", "7"));
  for (const char* body : {"8", "9", "10", "11"}) queue.push(message(body));
  EXPECT_THAT(received(queue), ElementsAre(HasSubstr("unread, the oldest: 1 ("), "9", "10", "11"));
}

// Goal: the same for few that are large; one that is larger than what is allowed arrives.
TEST(MessageQueue, keeps_the_newest_of_too_many_bytes) {
  const std::string a(1'000, 'a'), b(1'000, 'b'), c(1'000, 'c'), d(9'000, 'd');
  MessageQueue queue({.messages = 100, .bytes = 3'000});
  for (const std::string& body : {a, b, c}) queue.push(message(body));
  EXPECT_THAT(received(queue), ElementsAre(HasSubstr("unread, the oldest: 1 ("), b, c));
  for (const std::string& body : {a, b}) queue.push(message(body));
  queue.push(message(d));
  EXPECT_THAT(received(queue), ElementsAre(HasSubstr("unread, the oldest: 2 ("), d));
}

// Goal: who receives them in time gets them all, however many.
TEST(MessageQueue, loses_nothing_that_is_received) {
  MessageQueue queue({.messages = 3, .bytes = 3'000});
  for (int round = 0; round < 100; ++round) {
    const std::string number = std::to_string(round);
    queue.push_error(kLost);
    queue.push(message(number));
    queue.push(message(number + "'"));
    ASSERT_THAT(received(queue), ElementsAre(HasSubstr("is lost"), number, number + "'"));
  }
}

// Goal: a program that never receives holds no more than the limits; the log says so at the first loss, and how
// many there were at the end.
TEST(MessageQueue, nobody_receives) {
  constexpr std::uint64_t kLimit = UnreadLimits().messages;
  testing::internal::CaptureStderr();
  MessageQueue queue;
  for (std::uint64_t i = 0; i < kLimit; ++i) queue.push(message(""));
  const std::string none = testing::internal::GetCapturedStderr();
  testing::internal::CaptureStderr();
  for (std::uint64_t i = 0; i < 10; ++i) queue.push(message(""));
  const std::string first = testing::internal::GetCapturedStderr();
  testing::internal::CaptureStderr();
  queue.close({});
  queue.close({});
  const std::string last = testing::internal::GetCapturedStderr();
  EXPECT_EQ(none, "");
  EXPECT_THAT(first, HasSubstr("more than 262144 messages or 256 MiB wait"));
  EXPECT_EQ(first.find("wait to be"), first.rfind("wait to be"));
  EXPECT_THAT(last, HasSubstr("messages to this process that were dropped unread: 10\n"));
  EXPECT_EQ(last.find("dropped"), last.rfind("dropped"));

  const std::vector<std::string> all = received(queue);
  ASSERT_EQ(all.size(), 1 + kLimit + 1);
  EXPECT_THAT(all.front(), HasSubstr("unread, the oldest: 10 ("));
  EXPECT_THAT(all.back(), HasSubstr("the fleet has ended"));
}

}  // namespace
}  // namespace shardpull
