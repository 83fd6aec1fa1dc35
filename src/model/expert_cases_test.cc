// Faults that systems of this kind have had with mixtures of experts, as small inputs; see cases_test.cc. 30
// and 31, about the router's bias, are there.
#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "model/family_testing.h"

namespace shardpull {
namespace {

using Order = TinyExperts::Order;

constexpr const char* kWrapped = "Qwen3VLMoeForConditionalGeneration";

// Element [e, r, c] of a BF16 tensor [*, rows, columns] of one name.
Bytes element(const Weights& weights, std::string_view name, std::int64_t r, std::int64_t row_elements,
              std::int64_t c) {
  const Bytes& bytes = weights.of(name);
  const auto at = bytes.begin() + 2 * (r * row_elements + c);
  return {at, at + 2};
}

// A down projection that is square and transposed on disk, and gate and up in alternating columns.
TEST(Cases, case_032_square_transposed_and_interleaved_experts) {
  const Weights weights({{"mlp.experts.down_proj", DType::kBF16, {4, 64, 64}},
                         {"mlp.experts.gate_up_proj", DType::kBF16, {4, 64, 128}}});
  for (std::int64_t r = 0; r < 2; ++r) {
    TableModel model;
    Module& experts = model.module("experts");
    model.feed("mlp.experts.down_proj",
               must(experts.add_parameter("w2", DType::kBF16, {2, 64, 64},
                                          [r](Parameter& target, const Tensor& loaded, const std::string&) {
                                            return target.data().copy_(
                                                must(must(loaded.narrow(0, 2 * r, 2)).transpose(1, 2)));
                                          })));
    model.feed("mlp.experts.gate_up_proj",
               must(experts.add_parameter(
                   "w13", DType::kBF16, {2, 128, 64},
                   [r](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
                     const Tensor mine = must(must(loaded.narrow(0, 2 * r, 2)).transpose(1, 2));
                     for (const std::int64_t part : {0, 1}) {
                       const Tensor half =
                           must(mine.index({IndexSlice{}, IndexSlice{.start = part, .stop = {}, .step = 2}}));
                       const Status status = must(target.data().narrow(1, 64 * part, 64)).copy_(half);
                       if (!status.ok()) return status;
                     }
                     return {};
                   })));
    expect_exact(model, weights);
    const Bytes w2 = bytes_of_parameter(model, "experts", "w2");
    const Bytes w13 = bytes_of_parameter(model, "experts", "w13");
    for (std::int64_t e = 0; e < 2; ++e) {
      for (std::int64_t out = 0; out < 64; ++out) {
        for (std::int64_t in = 0; in < 64; ++in) {
          const auto found = [&](const Bytes& bytes, std::int64_t rows, std::int64_t row) {
            const auto at = bytes.begin() + 2 * ((e * rows + row) * 64 + in);
            return Bytes(at, at + 2);
          };
          const std::int64_t row = (2 * r + e) * 64 + in;
          ASSERT_EQ(found(w2, 64, out), element(weights, "mlp.experts.down_proj", row, 64, out));
          ASSERT_EQ(found(w13, 128, out), element(weights, "mlp.experts.gate_up_proj", row, 128, 2 * out));
          ASSERT_EQ(found(w13, 128, 64 + out),
                    element(weights, "mlp.experts.gate_up_proj", row, 128, 2 * out + 1));
        }
      }
    }
  }
}

// A square stack has one meaning where the architecture has one order, and none where it has had two.
TEST(Cases, case_033_orientation_is_never_guessed_from_a_shape) {
  const TinyExperts per_expert{.hidden = 64, .experts = 4, .width = 64};
  TinyExperts stacked = per_expert;
  stacked.order = Order::kOutIn;
  const Weights weights(per_expert.tensors());
  const auto model = exact_worker(stacked.config(), stacked.stacked(weights), {.tp = 2}, 1);
  EXPECT_EQ(bytes_of_parameter(*model, "model.layers.1.mlp.experts.routed_experts", "w2_weight"),
            stacked.w2(weights, 1, {0, 1, 2, 3}, 32, 32));

  // Width 64 makes the down projection square, width 32 gate and up together.
  for (const auto& [width, square] : {std::pair{64, "down_proj"}, std::pair{32, "gate_up_proj"}}) {
    for (const Order order : {Order::kOutIn, Order::kInOut}) {
      const TinyExperts either{.architecture = kWrapped, .experts = 4, .width = width, .order = order};
      const std::string name = "model.language_model.layers.1.mlp.experts." + std::string(square);
      EXPECT_TRUE(fails_with(bake(*must(build_model(either.config(), {.tp = 2}, 1)), either.tensors()),
                             {name, "square"}));
      EXPECT_TRUE(fails_with(check_checkpoint(either.config(), either.tensors(), nullptr), {name, "square"}));
    }
  }
  // The other order where there is one only: its shape does not fit.
  const TinyExperts other{.experts = 4, .order = Order::kInOut};
  EXPECT_TRUE(fails_with(bake(*must(build_model(other.config(), {}, 0)), other.tensors()),
                         {"model.layers.1.mlp.experts.down_proj", "[4, 48, 64]", "[4, 64, 48]"}));
}

// Two stacks a layer where the worker's own names are per expert: the same bytes.
TEST(Cases, case_034_stacks_feed_per_expert_places) {
  const TinyExperts per_expert{};
  TinyExperts stacked = per_expert;
  stacked.order = Order::kOutIn;
  const Weights weights(per_expert.tensors());
  const Weights on_disk = stacked.stacked(weights);
  for (int rank = 0; rank < 2; ++rank) {
    const auto model = exact_worker(stacked.config(), on_disk, {.tp = 2, .ep = 2}, rank);
    const std::vector<int> mine = rank == 0 ? std::vector{0, 1, 2, 3} : std::vector{4, 5, 6, 7};
    for (const int layer : {1, 2}) {
      const std::string module = "model.layers." + std::to_string(layer) + ".mlp.experts.routed_experts";
      EXPECT_EQ(bytes_of_parameter(*model, module, "w13_weight"), stacked.w13(weights, layer, mine, 0, 48));
      EXPECT_EQ(bytes_of_parameter(*model, module, "w2_weight"), stacked.w2(weights, layer, mine, 0, 48));
    }
  }
  EXPECT_OK(check_checkpoint(stacked.config(), on_disk.metadata, nullptr));
}

TEST(Cases, case_035_two_generations_of_stacks_give_the_same_bytes) {
  const TinyExperts per_expert{.architecture = kWrapped, .experts = 4};
  const Weights weights(per_expert.tensors());
  for (const InferenceLayout& layout : {InferenceLayout{.tp = 2}, InferenceLayout{.tp = 2, .ep = 2}}) {
    for (int rank = 0; rank < 2; ++rank) {
      const auto expected = exact_worker(per_expert.config(), weights, layout, rank);
      for (const Order order : {Order::kOutIn, Order::kInOut}) {
        TinyExperts stacked = per_expert;
        stacked.order = order;
        const Weights on_disk = stacked.stacked(weights);
        EXPECT_OK(check_checkpoint(stacked.config(), on_disk.metadata, nullptr));
        const auto model = exact_worker(stacked.config(), on_disk, layout, rank);
        for (const auto& module : expected->modules()) {
          for (const auto& parameter : module->parameters()) {
            EXPECT_EQ(bytes_of_parameter(*model, module->name(), parameter->name()),
                      bytes_of_parameter(*expected, module->name(), parameter->name()))
                << parameter->full_name();
          }
        }
      }
    }
  }
  // Of neither generation.
  TinyExperts stacked = per_expert;
  stacked.order = Order::kOutIn;
  std::vector<TensorMeta> metas = stacked.tensors();
  for (TensorMeta& meta : metas) {
    if (meta.name.ends_with(".gate_up_proj")) meta.shape = {4, 64, 95};
  }
  EXPECT_TRUE(fails_with(bake(*must(build_model(stacked.config(), {.tp = 2}, 0)), metas),
                         {"gate_up_proj", "[4, 64, 95]", "[4, 96, 64] or [4, 64, 96]"}));
}

TEST(Cases, case_036_expert_blocks_are_cut_before_tensor_parallel_parts) {
  // Whole experts in blocks, as the families have them.
  const TinyExperts per_expert{.architecture = kWrapped};
  TinyExperts stacked = per_expert;
  stacked.order = Order::kInOut;  // down is [8, 48, 64]
  const Weights weights(per_expert.tensors());
  for (int rank = 0; rank < 4; ++rank) {
    const auto model = exact_worker(stacked.config(), stacked.stacked(weights), {.tp = 4, .ep = 4}, rank);
    EXPECT_EQ(
        bytes_of_parameter(*model, "language_model.model.layers.1.mlp.experts.routed_experts", "w2_weight"),
        stacked.w2(weights, 1, {2 * rank, 2 * rank + 1}, 0, 48));
  }
  // Blocks whose experts are cut once more, which no layout here asks for and a loader may do.
  const Weights down(std::vector<TensorMeta>{{"experts.down_proj", DType::kBF16, {8, 48, 64}}});
  for (std::int64_t e = 0; e < 2; ++e) {
    for (std::int64_t t = 0; t < 2; ++t) {
      TableModel model;
      model.feed(
          "experts.down_proj",
          must(model.module("experts").add_parameter(
              "w2", DType::kBF16, {4, 24, 64},
              [e, t](Parameter& target, const Tensor& loaded, const std::string&) {
                return target.data().copy_(must(must(loaded.narrow(0, 4 * e, 4)).narrow(1, 24 * t, 24)));
              })));
      expect_exact(model, down);
      std::vector<Bytes> expected;
      for (std::int64_t expert = 4 * e; expert < 4 * e + 4; ++expert) {
        const auto begin = down.bytes[0].begin() + (expert * 48 + 24 * t) * 64 * 2;
        expected.emplace_back(begin, begin + 24 * 64 * 2);
      }
      EXPECT_EQ(bytes_of_parameter(model, "experts", "w2"), joined(expected));
    }
  }
}

TEST(Cases, case_037_every_expert_is_on_one_rank_and_none_is_empty) {
  const TinyExperts per_expert{.experts = 5};
  TinyExperts stacked = per_expert;
  stacked.order = Order::kOutIn;
  const Weights weights(per_expert.tensors());
  const Weights on_disk = stacked.stacked(weights);
  const std::string module = "model.layers.2.mlp.experts.routed_experts";
  const std::vector<int> blocks[] = {{0, 1, 2}, {3, 4}};
  for (int rank = 0; rank < 2; ++rank) {
    const auto spread = exact_worker(stacked.config(), on_disk, {.dp = 2, .ep = 2}, rank);
    EXPECT_EQ(bytes_of_parameter(*spread, module, "w13_weight"),
              stacked.w13(weights, 2, blocks[rank], 0, 48));
    const auto replica = exact_worker(stacked.config(), on_disk, {.dp = 2}, rank);
    EXPECT_EQ(bytes_of_parameter(*replica, module, "w13_weight"),
              stacked.w13(weights, 2, {0, 1, 2, 3, 4}, 0, 48));
  }
  EXPECT_TRUE(fails_with(build_model(stacked.config(), {.dp = 6, .ep = 6}, 0), {"ep=6", "5 experts"}));
  // A loader that swaps start and end, or that takes nothing, does not bake.
  for (const std::int64_t length : {-2, 0}) {
    TableModel model;
    model.feed("experts",
               must(model.module("m").add_parameter(
                   "w2", DType::kBF16, {2, 48, 64},
                   [length](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
                     const Result<Tensor> mine = loaded.narrow(0, 3, length);
                     if (!mine.ok()) return mine.status();
                     return must(target.data().narrow(0, 0, length)).copy_(*mine);
                   })));
    EXPECT_TRUE(fails_with(bake(model, {{"experts", DType::kBF16, {5, 48, 64}}}), {"m.w2"})) << length;
  }
}

// The shared expert as one more slot of the routed ones, on every rank.
TEST(Cases, case_038_a_shared_expert_in_a_slot_of_the_routed_ones) {
  std::vector<TensorMeta> metas;
  for (const std::string part : {"experts.0.", "experts.1.", "experts.2.", "experts.3.", "shared_experts."}) {
    metas.push_back({"mlp." + part + "gate_proj.weight", DType::kBF16, {48, 64}});
    metas.push_back({"mlp." + part + "up_proj.weight", DType::kBF16, {48, 64}});
    metas.push_back({"mlp." + part + "down_proj.weight", DType::kBF16, {64, 48}});
  }
  const Weights weights(metas);
  for (int rank = 0; rank < 2; ++rank) {
    TableModel model;
    Module& experts = model.module("experts");
    const Loader slot = [](Parameter& target, const Tensor& loaded, const std::string& shard) {  // "slot row"
      const std::int64_t at = shard[0] - '0', row = shard[1] == 'u' ? 48 : 0;
      return must(must(target.data().select(0, at)).narrow(0, row, loaded.size(0))).copy_(loaded);
    };
    Parameter* const w13 = must(experts.add_parameter("w13", DType::kBF16, {3, 96, 64}, slot));
    Parameter* const w2 = must(experts.add_parameter("w2", DType::kBF16, {3, 64, 48}, slot));
    const std::string mine[] = {"experts." + std::to_string(2 * rank) + ".",
                                "experts." + std::to_string(2 * rank + 1) + ".", "shared_experts."};
    for (int e = 0; e < 4; ++e) {
      for (const char* part : {"gate", "up", "down"})
        model.unused["mlp.experts." + std::to_string(e) + "." + part + "_proj.weight"] = "other rank";
    }
    std::vector<Bytes> expected;
    for (int i = 0; i < 3; ++i) {
      const std::string number = std::to_string(i);
      model.feed("mlp." + mine[i] + "gate_proj.weight", w13, number + "g");
      model.feed("mlp." + mine[i] + "up_proj.weight", w13, number + "u");
      model.feed("mlp." + mine[i] + "down_proj.weight", w2, number + "d");
      expected.push_back(weights.of("mlp." + mine[i] + "gate_proj.weight"));
      expected.push_back(weights.of("mlp." + mine[i] + "up_proj.weight"));
    }
    expect_exact(model, weights);
    EXPECT_EQ(bytes_of_parameter(model, "experts", "w13"), joined(expected));
    // A slot that nothing feeds is not overlooked.
    model.rules.erase("mlp.shared_experts.up_proj.weight");
    model.unused["mlp.shared_experts.up_proj.weight"] = "forgotten";
    EXPECT_TRUE(fails_with(bake(model, metas), {"experts.w13", "not written"}));
  }
}

// Stacks and shared experts of a layer in every order; one that is missing is an error.
TEST(Cases, case_039_the_order_of_stacked_and_shared_experts_does_not_matter) {
  TinyExperts stacked{
      .architecture = "DeepseekV3ForCausalLM", .layers = 1, .dense = 0, .order = Order::kOutIn};
  TinyExperts per_expert = stacked;
  per_expert.order = Order::kPerExpert;
  const Weights weights = stacked.stacked(Weights(per_expert.tensors()));
  const auto expected = exact_worker(stacked.config(), weights, {.tp = 2}, 1);
  std::vector<std::string> names;
  for (const TensorMeta& meta : weights.metadata) {
    if (meta.name.find("experts") != std::string::npos) names.push_back(meta.name);
  }
  ASSERT_EQ(names.size(), 5u);
  do {
    Weights shuffled = weights;
    for (std::size_t i = 0, next = 0; i < shuffled.metadata.size(); ++i) {
      if (shuffled.metadata[i].name.find("experts") == std::string::npos) continue;
      const std::string& name = names[next++];
      for (std::size_t j = 0; j < weights.metadata.size(); ++j) {
        if (weights.metadata[j].name != name) continue;
        shuffled.metadata[i] = weights.metadata[j];
        shuffled.bytes[i] = weights.bytes[j];
      }
    }
    const auto model = must(build_model(stacked.config(), {.tp = 2}, 1));
    const Recording recording = must(bake(*model, shuffled.metadata));
    ASSERT_OK(model->materialise(std::byte{0xCD}));
    replay(recording, *model, shuffled);
    for (const auto& module : expected->modules()) {
      for (const auto& parameter : module->parameters()) {
        ASSERT_EQ(bytes_of_parameter(*model, module->name(), parameter->name()),
                  bytes_of_parameter(*expected, module->name(), parameter->name()));
      }
    }
  } while (std::next_permutation(names.begin(), names.end()));
  for (const std::string& missing : names) {
    std::vector<TensorMeta> metas = weights.metadata;
    std::erase_if(metas, [&](const TensorMeta& meta) { return meta.name == missing; });
    EXPECT_FALSE(bake(*must(build_model(stacked.config(), {.tp = 2}, 1)), metas).ok()) << missing;
    EXPECT_FALSE(check_checkpoint(stacked.config(), metas, nullptr).ok()) << missing;
  }
}

// The families here place experts in blocks that never move. A loader that knows a placement is baked again
// when the placement changes: a recording is for one of them, and both copies of an expert are fed.
TEST(Cases, case_040_a_placement_has_a_recording_of_its_own) {
  std::vector<TensorMeta> metas;
  for (int e = 0; e < 8; ++e) metas.push_back({"experts." + std::to_string(e), DType::kBF16, {16, 8}});
  const Weights weights(metas);
  // 10 slots of 8 experts, 5 on each of two ranks: expert 0 has two. Then 3 and 6 change places, and 0's copy
  // moves.
  const std::vector<std::vector<int>> placements{{0, 1, 2, 3, 0, 4, 5, 6, 7, 1},
                                                 {0, 1, 2, 6, 7, 4, 5, 3, 0, 1}};
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<Recording> recordings;
    for (const std::vector<int>& placement : placements) {
      TableModel model;
      Parameter* const w = must(model.module("experts").add_parameter(
          "w", DType::kBF16, {5, 16, 8},
          [](Parameter& target, const Tensor& loaded, const std::string& slot) {
            return must(target.data().select(0, slot[0] - '0')).copy_(loaded);
          }));
      for (int e = 0; e < 8; ++e) {
        std::vector<std::string> slots;
        for (int s = 0; s < 5; ++s) {
          if (placement[static_cast<std::size_t>(5 * rank + s)] == e) slots.push_back(std::to_string(s));
        }
        const std::string name = "experts." + std::to_string(e);
        if (slots.empty()) model.unused[name] = "other rank";
        model.rules[name] = [w, slots](const Tensor& loaded) -> Status {
          for (const std::string& slot : slots) {
            if (const Status status = w->load(loaded, slot); !status.ok()) return status;
          }
          return {};
        };
      }
      expect_exact(model, weights);
      std::vector<Bytes> expected;
      for (int s = 0; s < 5; ++s)
        expected.push_back(
            weights.of("experts." + std::to_string(placement[static_cast<std::size_t>(5 * rank + s)])));
      EXPECT_EQ(bytes_of_parameter(model, "experts", "w"), joined(expected));
      recordings.push_back(must(bake(model, metas)));
    }
    const auto same = [](const Scatter& a, const Scatter& b) {
      return a.name == b.name && a.destination.offset == b.destination.offset;
    };
    EXPECT_FALSE(std::equal(recordings[0].scatters.begin(), recordings[0].scatters.end(),
                            recordings[1].scatters.begin(), recordings[1].scatters.end(), same));
  }
}

// A parameter keeps its shape and strides for the model's life: it cannot be laid out anew behind a
// recording's back, only other memory of the same layout can be bound, and too little is refused.
TEST(Cases, case_041_a_destination_cannot_be_laid_out_anew) {
  const TinyExperts tiny{.experts = 4};
  const Weights weights(tiny.tensors());
  const auto model = exact_worker(tiny.config(), weights, {.tp = 2, .ep = 2}, 0);
  Module* const experts = model->find_module("model.layers.1.mlp.experts.routed_experts");
  EXPECT_TRUE(fails_with(experts->add_parameter("w13_weight", DType::kBF16, {2, 3, 32, 64}), {"w13_weight"}));
  EXPECT_TRUE(fails_with(experts->add_alias("blocked", *experts->find("w13_weight"), {2, 3, 32, 64}),
                         {"materialised"}));
  Parameter* const w13 = experts->find("w13_weight");
  const Bytes before = bytes_of_parameter(*model, experts->name(), "w13_weight");
  Bytes memory(before.size() - 2);
  EXPECT_TRUE(
      fails_with(w13->bind(memory.data(), memory.size()), {"w13_weight", std::to_string(before.size())}));
  EXPECT_EQ(bytes_of_parameter(*model, experts->name(), "w13_weight"), before);
}

}  // namespace
}  // namespace shardpull
