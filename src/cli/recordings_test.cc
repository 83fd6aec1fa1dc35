#include "cli/recordings.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardpull::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Goal: a name with {worker} in it stands for one file per worker of a replica, and so does a list of as
// many; replicas share them.
TEST(RecordingFiles, OnePerWorkerOfAReplica) {
  const InferenceLayout layout{.tp = 2, .pp = 2, .replicas = 3};
  const auto files = recording_files({"{worker}/r-{worker}.jsonl"}, layout, "--recording");
  ASSERT_TRUE(files.ok()) << files.status().to_string();
  EXPECT_THAT(*files, ElementsAre("0/r-0.jsonl", "1/r-1.jsonl", "2/r-2.jsonl", "3/r-3.jsonl"));
  const std::vector<std::string> listed = {"a", "b", "c", "d"};
  EXPECT_EQ(*recording_files(listed, layout, "--recording"), listed);
  EXPECT_THAT(*recording_files({"alone"}, {}, "--recording"), ElementsAre("alone"));
}

// Goal: any other number of names is refused, with the flag and both numbers.
TEST(RecordingFiles, OtherCountsAreRefused) {
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{}, {"one"}, {"{worker}", "two", "three"}, {"1", "2", "3", "4"}}) {
    const auto files = recording_files(names, {.tp = 2}, "--save-recording");
    ASSERT_FALSE(files.ok());
    EXPECT_THAT(files.status().message(),
                HasSubstr("--save-recording: " + std::to_string(names.size()) + " file(s)"));
    EXPECT_THAT(files.status().message(), HasSubstr("the 2 workers"));
  }
}

}  // namespace
}  // namespace shardpull::cli
