#include "plan/fallback.h"

#include <gtest/gtest.h>

#include "plan/plan.h"

namespace shardpull {
namespace {

Recording recording_of(std::vector<RecordedFallback> fallbacks) {
  Recording recording;
  for (const char* name : {"a", "b", "c", "d"}) recording.modules.push_back({.name = name, .type = "M"});
  recording.fallbacks = std::move(fallbacks);
  for (const RecordedFallback& fallback : recording.fallbacks) recording.unbaked.push_back(fallback.name);
  return recording;
}

TEST(Fallback, ModulesThatNamesJoinAreLoadedTogether) {
  // Name 0 feeds a and b, name 2 feeds b and c: one. Name 1 feeds d.
  const auto found = fallback_modules(recording_of({{0, 0}, {0, 1}, {1, 3}, {2, 1}, {2, 2}}));
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].names, (std::vector<std::uint32_t>{0, 2}));
  EXPECT_EQ(found[0].modules, (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(found[1].names, (std::vector<std::uint32_t>{1}));
  EXPECT_EQ(found[1].modules, (std::vector<std::uint32_t>{3}));
  EXPECT_TRUE(fallback_modules(recording_of({})).empty());
}

TEST(Fallback, ThePlannedRecordingTakesEachNameWhole) {
  const Recording baked = recording_of({{0, 2}, {1, 2}});
  const std::vector<TensorMeta> metadata{{"x", DType::kBF16, {4, 3}}, {"y", DType::kF32, {}}};
  const auto planned = with_fallbacks(baked, metadata);
  ASSERT_TRUE(planned.ok()) << planned.status().message();
  ASSERT_EQ(planned->modules.size(), 5u);
  EXPECT_TRUE(planned->modules[4].baked);
  EXPECT_EQ(planned->modules[4].name, "c (by its loaders)");
  ASSERT_EQ(planned->scatters.size(), 2u);
  EXPECT_EQ(planned->scatters[0].slice, Slice::whole(12));
  EXPECT_EQ(planned->scatters[1].slice, Slice::whole(1));
  EXPECT_EQ(planned->parameters[1].name, "y");
  EXPECT_TRUE(planned->unbaked.empty());
  EXPECT_FALSE(with_fallbacks(recording_of({{7, 0}}), metadata).ok());
}

}  // namespace
}  // namespace shardpull
