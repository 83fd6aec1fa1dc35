#include "runtime/settings.h"

#include <gtest/gtest.h>

namespace shardpull {
namespace {

void expect(std::string_view a, std::string_view b, std::string_view here, std::string_view there) {
  const SettingsDifference ab = settings_difference(a, b), ba = settings_difference(b, a);
  EXPECT_EQ(ab.here, here);
  EXPECT_EQ(ab.there, there);
  EXPECT_EQ(ba.here, there);
  EXPECT_EQ(ba.there, here);
}

// Goal: what differs is told, and nothing else, whichever side has it.
TEST(Settings, OnlyTheDifferenceIsTold) {
  expect("a=1\nb=2\nc=3", "a=1\nb=5\nc=3\n", "b=2", "b=5");
  expect("a=1\n--pp=2,ep=1\nc=3", "a=2\n--pp=4,ep=1\nc=3", "a=1, --pp=2,ep=1", "a=2, --pp=4,ep=1");
  expect("a=1\n--still", "a=1", "--still", "no --still");
  expect("a=1\n--names=x\n--names=y", "a=1\n--names=x\n--names=z", "--names=y", "--names=z");
  expect("free text", "other text", "free text", "other text");
  expect("a=1", "", "a=1", "no a");
  expect("a=1\n--names=x", "a=2", "a=1, --names=x", "a=2");
}

// Goal: texts that differ are never told to differ in nothing.
TEST(Settings, WholeWhereLinesAreTheSame) {
  expect("a=1\nb=2", "b=2\na=1", "a=1, b=2", "b=2, a=1");
  expect("--names=x\n--names=y", "--names=x", "--names=x, --names=y", "--names=x");
}

}  // namespace
}  // namespace shardpull
