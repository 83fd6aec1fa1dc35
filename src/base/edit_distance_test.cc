#include "base/edit_distance.h"

#include <gtest/gtest.h>

namespace shardpull {
namespace {

TEST(EditDistance, CountsWhatIsChangedAddedAndDropped) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("--trainr", "--trainer"), 1u);
}

TEST(EditDistance, StopsAtTheLimit) {
  EXPECT_EQ(edit_distance("kitten", "sitting", 4), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting", 3), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting", 2), 2u);
  EXPECT_EQ(edit_distance("a", "abcdef", 2), 2u);
}

}  // namespace
}  // namespace shardpull
