// Goal: the cut of name lists into gather groups, and its order, are a pure function of the names.
#include <clocale>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "plan/plan.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using plan_testing::meta;

std::vector<TensorMeta> named(const std::vector<std::string>& names) {
  std::vector<TensorMeta> metadata;
  for (const std::string& name : names) metadata.push_back(meta(name, {2}));
  return metadata;
}

std::vector<std::string> labels(const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (const GatherGroup& group : plan_testing::must(form_groups(named(names)))) {
    out.push_back(group.label + "*" + std::to_string(group.count));
  }
  return out;
}

TEST(Groups, one_per_layer_and_one_per_run_of_other_names) {
  EXPECT_EQ(labels({"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.a", "model.layers.0.b",
                    "model.layers.1.a", "model.norm.weight"}),
            (std::vector<std::string>{"*2", "model.layers.0*2", "model.layers.1*1", "*1"}));
}

TEST(Groups, the_first_part_of_digits_decides) {
  EXPECT_EQ(labels({"model.layers.3.mlp.experts.7.w1", "model.layers.3.mlp.experts.8.w1", "transformer.h.0.w",
                    "visual.blocks.0.w"}),
            (std::vector<std::string>{"model.layers.3*2", "transformer.h.0*1", "visual.blocks.0*1"}));
}

TEST(Groups, digits_may_be_the_first_or_the_last_part) {
  EXPECT_EQ(labels({"0.weight", "0.bias", "1.weight", "heads.2", "heads.3"}),
            (std::vector<std::string>{"0*2", "1*1", "heads.2*1", "heads.3*1"}));
  // "x1", "1x", "" and signs are no digits.
  EXPECT_EQ(labels({"x1.1x.-1..w", "conv1d.w"}), (std::vector<std::string>{"*2"}));
  EXPECT_EQ(labels({".0.w", "0.w"}), (std::vector<std::string>{".0*1", "0*1"}));
}

TEST(Groups, values_compare_as_numbers_of_any_length) {
  EXPECT_EQ(labels({"l.00.a", "l.0.b", "l.000000000000000000000000000001.a", "l.1.b",
                    "l.123456789012345678901234567890.a"}),
            (std::vector<std::string>{"l.0*2", "l.1*2", "l.123456789012345678901234567890*1"}));
}

TEST(Groups, any_order_of_layers_is_legal) {
  EXPECT_EQ(labels({"l.0.a", "l.1.a", "l.10.a", "l.11.a", "l.2.a"}),
            (std::vector<std::string>{"l.0*1", "l.1*1", "l.10*1", "l.11*1", "l.2*1"}));
}

TEST(Groups, flattening_reproduces_the_list) {
  const auto metadata = named({"a", "b", "l.1.x", "l.0.x", "c", "m.0.x", "d", "e"});
  std::uint32_t next = 0;
  for (const GatherGroup& group : plan_testing::must(form_groups(metadata))) {
    EXPECT_EQ(group.first, next);
    EXPECT_GT(group.count, 0u);
    next += group.count;
  }
  EXPECT_EQ(next, metadata.size());
}

TEST(Groups, a_key_that_returns_is_refused_naming_name_and_places) {
  const auto groups = form_groups(named({"l.0.a", "l.1.a", "l.00.b"}));
  ASSERT_FALSE(groups.ok());
  EXPECT_EQ(groups.status().info().reason, Reason::kPlanInvalid);
  EXPECT_EQ(groups.status().info().tensor, "l.00.b");
  EXPECT_NE(groups.status().message().find("'l.00.b' at 2"), std::string::npos) << groups.status().message();
  EXPECT_NE(groups.status().message().find("'l.0.a' at 0"), std::string::npos) << groups.status().message();
}

TEST(Groups, a_name_given_twice_is_refused) {
  const auto groups = form_groups(named({"a", "l.0.a", "a"}));
  ASSERT_FALSE(groups.ok());
  EXPECT_NE(groups.status().message().find("'a' appears twice"), std::string::npos)
      << groups.status().message();
  EXPECT_NE(groups.status().message().find("at 0 and at 2"), std::string::npos) << groups.status().message();
}

TEST(Groups, normalise_gives_the_reference_order) {
  const std::vector<std::string> names{"embed", "l.10.a", "v.1.a", "norm", "l.2.b", "l.2.a", "v.0.a", "head"};
  std::vector<std::string> sorted;
  for (const std::uint32_t i : normalise(names)) sorted.push_back(names[i]);
  EXPECT_EQ(sorted, (std::vector<std::string>{"embed", "l.2.b", "l.2.a", "l.10.a", "v.0.a", "v.1.a", "norm",
                                              "head"}));
  EXPECT_TRUE(form_groups(named(sorted)).ok());
  EXPECT_TRUE(normalise({}).empty());
}

TEST(MetadataDigest, covers_count_names_dtypes_shapes_and_order) {
  const std::vector<TensorMeta> base{meta("a", {2, 3}), meta("b", {6})};
  const Digest128 digest = metadata_digest(base);
  EXPECT_EQ(metadata_digest(base), digest);
  auto renamed = base, retyped = base, reshaped = base, swapped = base, longer = base;
  renamed[0].name = "c";
  retyped[0].dtype = DType::kF16;
  reshaped[0].shape = {3, 2};
  std::swap(swapped[0], swapped[1]);
  longer.push_back(meta("c", {}));
  for (const auto* other : {&renamed, &retyped, &reshaped, &swapped, &longer})
    EXPECT_NE(metadata_digest(*other), digest);
  // Names and dims cannot trade bytes.
  EXPECT_NE(metadata_digest({meta("ab", {}), meta("c", {})}),
            metadata_digest({meta("a", {}), meta("bc", {})}));
  EXPECT_EQ(to_string(digest).size(), 32u);
}

}  // namespace
}  // namespace shardpull
