// Known faults of systems of this kind that are about names: prefixes, adapters, drafts.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "model/family_testing.h"
#include "model/model_testing.h"

namespace shardpull {
namespace {

// Goal: a text-only trainer before a worker of the multimodal class fails with both lists and shows the
// prefix.
TEST(NameCases, case_047_names_without_the_workers_prefix) {
  const TinyModel worker{.architecture = "LlavaForConditionalGeneration", .text_config_type = "llama"};
  const TinyModel trainer;
  const auto model = must(build_model(worker.config(), {.tp = 2}, 0));
  const auto refused = bake(*model, trainer.tensors());
  EXPECT_TRUE(
      fails_with(refused, {"does not have", "model.layers.0.", "nearest: model.language_model.layers.0.",
                           "needs are not given", "model.language_model.embed_tokens.weight"}));
  // Parts of a tensor that is fused on disk are not missing.
  const TinyModel fused{.fused = true};
  std::vector<TensorMeta> misspelt = fused.tensors();
  for (TensorMeta& meta : misspelt) {
    if (meta.name == "model.norm.weight") meta.name = "model.nrom.weight";
  }
  EXPECT_TRUE(fails_with(bake(*must(build_model(fused.config(), {}, 0)), misspelt),
                         {"; 1 name(s) that it needs are not given: model.norm.weight"}));
  // The vision tower of a multimodal trainer before a text-only worker: no near name, but named.
  std::vector<TensorMeta> more = trainer.tensors();
  more.push_back({"visual.blocks.0.attn.qkv.weight", DType::kBF16, {192, 64}});
  more.push_back({"visual.blocks.0.attn.qkv.bias", DType::kBF16, {192}});
  EXPECT_TRUE(fails_with(bake(*must(build_model(trainer.config(), {.tp = 2}, 0)), more),
                         {"2 name(s)", "visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.bias"}));
}

// Goal: whether a name has an adapter's base layer is decided name by name, in both directions; a mapping
// that strips or adds the part everywhere is loud.
TEST(NameCases, case_049_base_layers_are_decided_name_by_name) {
  const std::vector<TensorMeta> wrapped = {
      {"q_proj.base_layer.weight", DType::kBF16, {8, 4}},
      {"visual.merger.linear_fc1.base_layer.weight", DType::kBF16, {8, 4}}};
  const std::vector<TensorMeta> plain = {{"q_proj.weight", DType::kBF16, {8, 4}},
                                         {"visual.merger.linear_fc1.weight", DType::kBF16, {8, 4}}};
  struct Wrapping : TableModel {
    // The worker has a base layer under q_proj only.
    Wrapping() {
      q = must(module("q_proj.base_layer").add_parameter("weight", DType::kBF16, {8, 4}));
      fc1 = must(module("visual.merger.linear_fc1").add_parameter("weight", DType::kBF16, {8, 4}));
    }
    Parameter *q = nullptr, *fc1 = nullptr;
  };
  for (const auto& metas : {wrapped, plain}) {
    Wrapping model;
    model.feed(metas[0].name, model.q);
    model.feed(metas[1].name, model.fc1);
    const Weights weights(metas);
    const Recording recording = must(bake(model, metas));
    ASSERT_OK(model.materialise(std::byte{0xCD}));
    replay(recording, model, weights);
    EXPECT_EQ(bytes_of_parameter(model, "q_proj.base_layer", "weight"), weights.bytes[0]);
    EXPECT_EQ(bytes_of_parameter(model, "visual.merger.linear_fc1", "weight"), weights.bytes[1]);
  }
  Wrapping all_alike;
  all_alike.feed(wrapped[0].name, all_alike.q);
  EXPECT_TRUE(fails_with(bake(all_alike, wrapped), {"visual.merger.linear_fc1.base_layer.weight"}));
  // A family knows neither.
  const TinyModel tiny;
  std::vector<TensorMeta> metas = tiny.tensors();
  for (TensorMeta& meta : metas) {
    if (meta.name == "model.layers.0.self_attn.q_proj.weight")
      meta.name = "model.layers.0.self_attn.q_proj.base_layer.weight";
  }
  EXPECT_TRUE(fails_with(bake(*must(build_model(tiny.config(), {}, 0)), metas),
                         {"model.layers.0.self_attn.q_proj.base_layer.weight",
                          "needs are not given: model.layers.0.self_attn.q_proj.weight"}));
}

// Goal: two prediction layers renumbered past the model's own keep apart; a map that sends both to one is
// loud, naming the one whose bytes would be lost.
TEST(NameCases, case_057_renumbered_layers_must_not_collide) {
  const std::vector<TensorMeta> metas = {{"mtp.layers.0.mlp.up_proj.weight", DType::kBF16, {8, 4}},
                                         {"mtp.layers.1.mlp.up_proj.weight", DType::kBF16, {8, 4}}};
  for (const bool injective : {true, false}) {
    TableModel model;
    for (int layer = 0; layer < 2; ++layer) {
      const std::string name = "model.layers." + std::to_string(4 + layer) + ".mlp.up_proj";
      must(model.module(name).add_parameter("weight", DType::kBF16, {8, 4}));
    }
    const auto parameter = [&](int layer) {
      return model.find_module("model.layers." + std::to_string(4 + layer) + ".mlp.up_proj")->find("weight");
    };
    model.feed(metas[0].name, parameter(0));
    model.feed(metas[1].name, parameter(injective ? 1 : 0));
    const auto recording = bake(model, metas);
    if (injective) {
      const Weights weights(metas);
      ASSERT_OK(recording);
      ASSERT_OK(model.materialise(std::byte{0xCD}));
      replay(*recording, model, weights);
      EXPECT_EQ(bytes_of_parameter(model, "model.layers.4.mlp.up_proj", "weight"), weights.bytes[0]);
      EXPECT_EQ(bytes_of_parameter(model, "model.layers.5.mlp.up_proj", "weight"), weights.bytes[1]);
    } else {
      EXPECT_FALSE(recording.ok());
    }
  }
  // The same with one layer's parameter alone: nothing is missing, yet the first name's bytes would be lost.
  TableModel model;
  Parameter* const only =
      must(model.module("model.layers.4.mlp.up_proj").add_parameter("weight", DType::kBF16, {8, 4}));
  model.feed(metas[0].name, only);
  model.feed(metas[1].name, only);
  EXPECT_TRUE(fails_with(bake(model, metas), {"mtp.layers.0.mlp.up_proj.weight"}));
}

}  // namespace
}  // namespace shardpull
