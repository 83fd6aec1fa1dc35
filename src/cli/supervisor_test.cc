#include "cli/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardpull::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

ChildEnd said(std::string name, Reason reason, std::string peer, std::string message, std::uint64_t order) {
  return {.name = std::move(name),
          .error = ChildError{reason, std::move(peer), std::move(message)},
          .exit = "exited with code 1",
          .failed = true,
          .crashed = false,
          .order = order};
}
ChildEnd died(std::string name, std::uint64_t order) {
  return {.name = std::move(name),
          .error = std::nullopt,
          .exit = "was killed by signal 9 (Killed)",
          .failed = true,
          .crashed = true,
          .order = order};
}
ChildEnd fine(std::string name) {
  return {.name = std::move(name), .error = std::nullopt, .exit = "exited with code 0"};
}

TEST(ChooseCause, NobodyFailed) {
  EXPECT_FALSE(choose_cause({fine("trainer 0"), fine("worker 0")}));
}

// Goal: the dead one is named, though others reported its death before the launcher saw it.
TEST(ChooseCause, ADeadProcessBeforeThoseWhoNoticed) {
  const auto cause =
      choose_cause({said("trainer 0", Reason::kPeerLost, "worker 1", "worker 1 is lost", 1),
                    said("worker 0", Reason::kShutdown, "", "the fleet ended", 2), died("worker 1", 3)});
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->process, "worker 1");
  EXPECT_EQ(cause->message, "was killed by signal 9 (Killed)");
}

TEST(ChooseCause, AnOwnErrorBeforeOneThatBlamesAPeer) {
  const auto cause =
      choose_cause({said("trainer 0", Reason::kBakeFailed, "worker 1", "worker 1: bake failed", 1),
                    said("worker 1", Reason::kBakeFailed, "", "bake failed", 2)});
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->process, "worker 1");
}

TEST(ChooseCause, TheEarliestAmongEquals) {
  const auto cause = choose_cause({said("worker 0", Reason::kNoMemory, "", "second", 2),
                                   said("worker 1", Reason::kNoMemory, "", "first", 1)});
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->message, "first");
}

TEST(ChooseCause, TheProcessIsNamedOnce) {
  const auto cause =
      choose_cause({said("worker 2", Reason::kHost, "", "sync 1: worker 2: chunk 0 failed", 1)});
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->message, "sync 1: chunk 0 failed");
}

TEST(LineBuffer, LinesOverReads) {
  LineBuffer lines;
  EXPECT_THAT(lines.add("on"), IsEmpty());
  EXPECT_THAT(lines.add("e\ntwo\n\nthr"), ElementsAre("one", "two", ""));
  EXPECT_EQ(lines.take_rest(), "thr");
  EXPECT_EQ(lines.take_rest(), "");
}

}  // namespace
}  // namespace shardpull::cli
