#include "shardpull/bake.h"

#include <cstring>

#include <gtest/gtest.h>

#include "model/families/build.h"
#include "model/model_testing.h"

namespace shardpull {
namespace {

std::vector<TensorMeta> metas(std::vector<std::string> names, std::vector<std::int64_t> shape,
                              DType dtype = DType::kF32) {
  std::vector<TensorMeta> out;
  for (std::string& name : names) out.push_back({std::move(name), dtype, shape});
  return out;
}

// The bake leaves no trace: not baking, same memory, loads work.
void expect_untouched(TableModel& model, const std::vector<std::byte>& before, Parameter& parameter) {
  EXPECT_FALSE(model.baking());
  ASSERT_NE(parameter.memory(), nullptr);
  EXPECT_EQ(std::memcmp(parameter.memory(), before.data(), before.size()), 0);
  EXPECT_OK(model.check_guards());
}

TEST(Bake, RecordsSliceDestinationAndNames) {
  TableModel model;
  Module& module = model.module("fc", "Linear");
  Parameter* const p = must(
      module.add_parameter("weight", DType::kBF16, {4, 3},
                           [](Parameter& target, const Tensor& loaded, const std::string& shard) -> Status {
                             return must(target.data().narrow(0, shard == "1" ? 2 : 0, 2))
                                 .copy_(must(must(loaded.narrow(0, 4, 2)).narrow(1, 0, 3)));
                           }));
  module.set_post_process([](Module&, const std::vector<std::byte*>&) { return Status(); });
  model.feed("b", p, "1");
  model.feed("a", p, "0");
  model.unused["z"] = "other stage";
  const Recording r =
      must(bake(model, {{"z", DType::kF32, {1}}, {"b", DType::kBF16, {8, 3}}, {"a", DType::kBF16, {8, 3}}}));
  ASSERT_EQ(r.scatters.size(), 2u);
  EXPECT_EQ(r.scatters[0].name, 1u);
  EXPECT_EQ(r.scatters[0].wire_dtype, DType::kBF16);
  EXPECT_EQ(r.scatters[0].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(r.scatters[0].slice, (Slice{{Region{12, {{6, 1}}}}}));
  EXPECT_NE(r.scatters[0].chain.find("narrow(0, 4, 2)"), std::string::npos);
  EXPECT_EQ(r.scatters[0].destination, (Destination{0, DType::kBF16, 6, {2, 3}, {3, 1}}));
  EXPECT_EQ(r.scatters[1].destination.offset, 0);
  EXPECT_EQ(r.live, (std::vector<std::uint32_t>{1, 2}));
  EXPECT_EQ(r.dead, (std::vector<std::uint32_t>{0}));
  EXPECT_EQ(r.unused_reasons, (std::vector<std::string>{"other stage"}));
  ASSERT_EQ(r.modules.size(), 1u);
  EXPECT_TRUE(r.modules[0].baked);
  EXPECT_TRUE(r.modules[0].has_post_process);
  EXPECT_EQ(r.parameters[0].name, "weight");
}

// A loader's error names tensor and parameter; the model is as it was, bytes and all.
TEST(Bake, LoaderErrorRestoresTheModel) {
  TableModel model;
  Module& module = model.module("fc");
  Parameter* const inner = must(module.add_parameter(
      "inner", DType::kF32, {4}, [](Parameter&, const Tensor& loaded, const std::string&) -> Status {
        return loaded.narrow(0, 2, 9).status();
      }));
  Parameter* const outer = must(
      module.add_parameter("outer", DType::kF32, {4},
                           [inner](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
                             EXPECT_EQ(target.memory(), nullptr) << "stand-ins have no storage";
                             return inner->load(loaded);
                           }));
  model.feed("x", outer);
  ASSERT_OK(model.materialise(std::byte{0xCD}, 64));
  const auto before = bytes_of_parameter(model, "fc", "outer");
  EXPECT_TRUE(fails_with(bake(model, metas({"x"}, {4})),
                         {"bake", "loading x into fc.outer", "loading x into fc.inner", "narrow"}));
  expect_untouched(model, before, *outer);
  EXPECT_TRUE(fails_with(bake(model, metas({"x"}, {4})), {"narrow"})) << "and again";
}

// Stamps nest, and leaving one restores the attribution before it, also after an error the outer loader
// swallowed.
TEST(Bake, StampsNest) {
  TableModel model;
  Module& module = model.module("fc");
  Parameter* const inner = must(module.add_parameter("inner", DType::kF32, {2}));
  Parameter* const failing = must(module.add_buffer(
      "failing", DType::kF32, {2}, {}, [](Parameter&, const Tensor& loaded, const std::string&) -> Status {
        return loaded.select(0, 99).status();
      }));
  Parameter* const outer = must(module.add_parameter(
      "outer", DType::kF32, {4}, [=](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
        const Status first = must(target.data().narrow(0, 0, 2)).copy_(must(loaded.narrow(0, 0, 2)));
        if (!first.ok()) return first;
        const Status nested = inner->load(must(loaded.narrow(0, 1, 2)));
        if (!nested.ok()) return nested;
        failing->load(loaded).ignore();
        return must(target.data().narrow(0, 2, 2)).copy_(must(loaded.narrow(0, 2, 2)));
      }));
  model.feed("x", outer);
  const Recording r = must(bake(model, metas({"x"}, {4})));
  EXPECT_EQ(r.scatters.size(), 3u);
  EXPECT_TRUE(r.modules[0].baked);
}

// A copy outside any loader, or into a parameter whose loader does not run, belongs to nobody: its module is
// not baked and strict refuses, naming tensor, chain and loader.
TEST(Bake, UnattributedCopies) {
  for (const bool in_other_loader : {false, true}) {
    TableModel model;
    Module& a = model.module("a");
    Module& b = model.module("b");
    Parameter* const target = must(a.add_parameter("weight", DType::kF32, {4}));
    Parameter* const other = must(b.add_parameter(
        "weight", DType::kF32, {4}, [=](Parameter& self, const Tensor& loaded, const std::string&) -> Status {
          const Status status = target->data().copy_(must(loaded.view({4})));
          return status.ok() ? self.data().copy_(loaded) : status;
        }));
    if (in_other_loader) {
      model.feed("x", other);
    } else {
      model.rules["x"] = [=](const Tensor& loaded) { return target->data().copy_(must(loaded.view({4}))); };
      model.feed("y", other);
    }
    if (!in_other_loader) {
      must(a.add_buffer("spare", DType::kF32, {1}));
      const auto refused = bake(model, metas({"x"}, {4}));
      EXPECT_TRUE(fails_with(refused, {"x.view(4)", "a.weight", "outside any parameter's loader"}));
      continue;
    }
    const auto refused = bake(model, metas({"x"}, {4}));
    EXPECT_TRUE(fails_with(refused, {"x.view(4)", "a.weight", "in the loader of b.weight", "strict"}));
    const Recording r = must(bake(model, metas({"x"}, {4}), {.unbaked = UnbakedPolicy::kFallback}));
    EXPECT_EQ(r.unbaked, (std::vector<std::uint32_t>{0}))
        << "judged per (name, module), although x baked in b";
    EXPECT_FALSE(r.modules[0].baked);
    EXPECT_TRUE(r.modules[1].baked);
    ASSERT_EQ(r.scatters.size(), 1u);
    EXPECT_EQ(r.parameters[r.scatters[0].destination.parameter].module, 1u);
  }
}

TEST(Bake, ForeignParameterFailsTheBake) {
  TableModel model, stranger;
  Parameter* const mine = must(model.module("a").add_parameter("weight", DType::kF32, {4}));
  Parameter* const theirs = must(stranger.module("s").add_parameter("weight", DType::kF32, {4}));
  model.rules["x"] = [=](const Tensor& loaded) {
    theirs->load(loaded).ignore();  // a swallowed error is not forgotten
    return mine->load(loaded);
  };
  EXPECT_TRUE(fails_with(bake(model, metas({"x"}, {4}), {.unbaked = UnbakedPolicy::kFallback}),
                         {"s.weight", "no parameter of the model"}));
}

// Two names that write the same half count once: the other half is missing.
TEST(Bake, CoverageIsTheUnion) {
  TableModel model;
  Parameter* const p = must(model.module("fc").add_parameter(
      "weight", DType::kF32, {8}, [](Parameter& target, const Tensor& loaded, const std::string&) {
        return must(target.data().narrow(0, 0, 4)).copy_(loaded);
      }));
  model.feed("x", p);
  model.feed("y", p);
  EXPECT_TRUE(fails_with(bake(model, metas({"x", "y"}, {4})), {"fc", "from element 4", "strict", "x", "y"}));
  const Recording r = must(bake(model, metas({"x", "y"}, {4}), {.unbaked = UnbakedPolicy::kFallback}));
  EXPECT_EQ(r.unbaked.size(), 2u);
  EXPECT_TRUE(r.scatters.empty());
  EXPECT_FALSE(r.modules[0].baked);
}

// Destinations that nothing feeds are loud, whatever the policy; buffers are not.
TEST(Bake, UnfedParametersAreLoud) {
  TableModel model;
  Parameter* const a = must(model.module("a").add_parameter("weight", DType::kF32, {4}));
  must(model.module("b").add_parameter("weight", DType::kF32, {4}));
  must(model.module("c").add_buffer("ids", DType::kI64, {4}));
  model.feed("x", a);
  EXPECT_TRUE(fails_with(bake(model, metas({"x"}, {4}), {.unbaked = UnbakedPolicy::kFallback}),
                         {"no source feeds", "b.weight"}));
  TableModel fine;
  fine.feed("x", must(fine.module("a").add_parameter("weight", DType::kF32, {4})));
  must(fine.module("c").add_buffer("ids", DType::kI64, {4}));
  const Recording r = must(bake(fine, metas({"x"}, {4})));
  EXPECT_FALSE(r.modules[1].baked);
}

TEST(Bake, NamesMustBeUniqueAndExplained) {
  TableModel model;
  model.feed("x", must(model.module("a").add_parameter("weight", DType::kF32, {4})));
  EXPECT_TRUE(fails_with(bake(model, metas({"x", "x"}, {4})), {"x", "twice"}));
  const auto unknown = bake(model, metas({"x", "y"}, {4}));
  EXPECT_TRUE(fails_with(unknown, {"y", "cannot explain"}));
  EXPECT_EQ(unknown.status().info().tensor, "y");
  EXPECT_EQ(unknown.status().info().reason, Reason::kBakeFailed);
  model.unused["y"] = "unused buffer";
  EXPECT_OK(bake(model, metas({"x", "y"}, {4})));
}

// One name feeds two modules, several names feed one.
TEST(Bake, SharedNames) {
  TableModel model;
  Parameter* const a = must(model.module("embed").add_parameter("weight", DType::kF32, {4}));
  Parameter* const b = must(model.module("head").add_parameter("weight", DType::kF32, {4}));
  model.rules["x"] = [=](const Tensor& loaded) {
    const Status status = a->load(loaded);
    return status.ok() ? b->load(loaded) : status;
  };
  const Recording r = must(bake(model, metas({"x"}, {4})));
  EXPECT_EQ(r.scatters.size(), 2u);
  EXPECT_EQ(r.live.size(), 1u);
  EXPECT_TRUE(r.modules[0].baked && r.modules[1].baked);
}

// Declared padding is filled and never missing; a loader that zeroes the rest does the same.
TEST(Bake, PaddingAndFills) {
  for (const bool declared : {true, false}) {
    TableModel model;
    Module& module = model.module("embed");
    Parameter* const p =
        must(module.add_parameter("weight", DType::kBF16, {8, 2},
                                  [=](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
                                    const Status status = must(target.data().narrow(0, 0, 5)).copy_(loaded);
                                    if (!status.ok() || declared) return status;
                                    return must(target.data().narrow(0, 5, 3)).zero_();
                                  }));
    if (declared) ASSERT_OK(module.declare_padding_rows("weight", 5, 8));
    model.feed("x", p);
    const Recording r = must(bake(model, metas({"x"}, {5, 2}, DType::kBF16)));
    ASSERT_EQ(r.fills.size(), 1u);
    EXPECT_EQ(r.fills[0].destination, (Destination{0, DType::kBF16, 10, {3, 2}, {2, 1}}));
    EXPECT_EQ(r.scatters.size(), 1u);
  }
}

// A module that only has fills is baked, and filled.
TEST(Bake, FillsWithoutCopies) {
  TableModel model;
  Module& module = model.module("embed");
  must(module.add_parameter("weight", DType::kF32, {4, 2}));
  ASSERT_OK(module.declare_padding_rows("weight", 0, 4));
  const Recording r = must(bake(model, {}));
  EXPECT_TRUE(r.modules[0].baked);
  EXPECT_EQ(r.fills.size(), 1u);
}

// The loader zeroes everything first and then writes a part: the fill is cut around the copy.
TEST(Bake, LaterCopyCutsEarlierFill) {
  TableModel model;
  Parameter* const p = must(model.module("m").add_parameter(
      "weight", DType::kF32, {6, 4},
      [](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
        const Status status = target.data().zero_();
        if (!status.ok()) return status;
        return must(must(target.data().narrow(0, 2, 2)).narrow(1, 1, 2)).copy_(loaded);
      }));
  model.feed("x", p);
  const Recording r = must(bake(model, metas({"x"}, {2, 2})));
  ASSERT_EQ(r.scatters.size(), 1u);
  std::int64_t filled = 0;
  for (const Fill& fill : r.fills) {
    std::int64_t count = 1;
    for (const std::int64_t size : fill.destination.shape) count *= size;
    filled += count;
  }
  EXPECT_EQ(filled, 24 - 4);
  Weights weights(metas({"x"}, {2, 2}));
  ASSERT_OK(model.materialise(std::byte{0xCD}, 64));
  replay(r, model, weights);
  const auto replayed = bytes_of_parameter(model, "m", "weight");
  ASSERT_OK(load_eagerly(model, weights.real()));
  EXPECT_EQ(replayed, bytes_of_parameter(model, "m", "weight"));
}

// A zero_ after a copy has the last word: the copy is cut, source and destination alike.
TEST(Bake, LaterFillCutsEarlierCopy) {
  TableModel model;
  Parameter* const p = must(model.module("m").add_parameter(
      "weight", DType::kBF16, {8, 3},
      [](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
        const Status status = target.data().copy_(loaded);
        return status.ok() ? must(target.data().narrow(0, 5, 3)).zero_() : status;
      }));
  model.feed("x", p);
  const Recording r = must(bake(model, metas({"x"}, {8, 3}, DType::kBF16)));
  ASSERT_EQ(r.scatters.size(), 1u);
  EXPECT_EQ(r.scatters[0].shape, (std::vector<std::int64_t>{5, 3}));
  EXPECT_EQ(r.scatters[0].slice, Slice::whole(15));
  EXPECT_EQ(r.fills.size(), 1u);
}

// Two copies that overlap: the later one wins, the earlier one keeps the rest, cut by rows or by columns.
TEST(Bake, OverlappingCopiesKeepTheLastWord) {
  for (const std::int64_t dim : {0, 1}) {
    TableModel model;
    Parameter* const p = must(model.module("m").add_parameter(
        "weight", DType::kF32, {6, 6},
        [dim](Parameter& target, const Tensor& loaded, const std::string& shard) -> Status {
          return shard == "whole"
                     ? target.data().copy_(loaded)
                     : must(target.data().narrow(dim, 2, 2)).copy_(must(loaded.narrow(dim, 0, 2)));
        }));
    model.feed("a", p, "whole");
    model.feed("b", p, "part");
    Weights weights(metas({"a", "b"}, {6, 6}));
    const Recording r = must(bake(model, weights.metadata));
    EXPECT_EQ(r.scatters.size(), 3u);
    ASSERT_OK(model.materialise(std::byte{0xCD}, 64));
    replay(r, model, weights);
    const auto replayed = bytes_of_parameter(model, "m", "weight");
    ASSERT_OK(load_eagerly(model, weights.real()));
    EXPECT_EQ(replayed, bytes_of_parameter(model, "m", "weight"));
  }
}

// An earlier copy that is overwritten completely is gone, which its model must explain; its name is dead then.
TEST(Bake, OverwrittenCopyIsDropped) {
  TableModel model;
  Parameter* const p = must(model.module("m").add_parameter("weight", DType::kF32, {6}));
  model.feed("a", p);
  model.feed("b", p);
  EXPECT_TRUE(fails_with(bake(model, metas({"a", "b"}, {6})), {"overwritten whole", "a"}));
  model.unused["a"] = "b replaces it";
  const Recording r = must(bake(model, metas({"a", "b"}, {6})));
  ASSERT_EQ(r.scatters.size(), 1u);
  EXPECT_EQ(r.scatters[0].name, 1u);
  EXPECT_EQ(r.live, std::vector<std::uint32_t>{1});
  EXPECT_EQ(r.dead, std::vector<std::uint32_t>{0});
  EXPECT_EQ(r.unused_reasons, std::vector<std::string>{"b replaces it"});
}

// Overlaps that cannot be cut into boxes keep the module from baking.
TEST(Bake, UncuttableOverlap) {
  TableModel model;
  Parameter* const p = must(model.module("m").add_parameter(
      "weight", DType::kF32, {128, 128},
      [](Parameter& target, const Tensor& loaded, const std::string& shard) -> Status {
        return shard == "whole"
                   ? target.data().copy_(loaded)
                   : must(target.data().as_strided(0, {128}, {129})).copy_(must(loaded.select(0, 0)));
      }));
  model.feed("a", p, "whole");
  model.feed("diagonal", p, "diagonal");
  EXPECT_TRUE(fails_with(bake(model, metas({"a", "diagonal"}, {128, 128})),
                         {"overwrites a part", "a F32", "strict"}));
}

// Random writes into a matrix: recording and eager load leave the same bytes, whatever overlaps what.
TEST(Bake, RandomWritesReplayLikeTheLoader) {
  std::uint64_t state = 12345;
  const auto next = [&](std::int64_t bound) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(bound));
  };
  int baked = 0;
  for (int round = 0; round < 300; ++round) {
    struct Box {
      std::int64_t r0, rn, c0, cn;
      bool zero, transposed;
    };
    std::vector<Box> boxes;
    boxes.push_back({0, 7, 0, 9, next(2) == 0, false});
    for (std::int64_t i = 1 + next(4); i > 0; --i) {
      Box box{};
      box.r0 = next(7);
      box.rn = next(8 - box.r0);
      box.c0 = next(9);
      box.cn = next(10 - box.c0);
      box.zero = next(3) == 0;
      box.transposed = next(3) == 0;
      boxes.push_back(box);
    }
    TableModel model;
    Parameter* const p = must(model.module("m").add_parameter(
        "weight", DType::kBF16, {7, 9},
        [boxes](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
          for (const Box& box : boxes) {
            ParameterView window =
                must(must(target.data().narrow(0, box.r0, box.rn)).narrow(1, box.c0, box.cn));
            Tensor source = must(
                must(loaded.narrow(0, 7 - box.rn - box.r0, box.rn)).narrow(1, 9 - box.cn - box.c0, box.cn));
            if (box.transposed) {
              window = must(window.transpose(0, 1));
              source = must(source.t());
            }
            const Status status = box.zero ? window.zero_() : window.copy_(source);
            if (!status.ok()) return status;
          }
          return {};
        }));
    model.feed("x", p);
    model.unused["x"] = "it may be all zeros";
    Weights weights(metas({"x"}, {7, 9}, DType::kBF16));
    const auto recording = bake(model, weights.metadata);
    ASSERT_OK(recording);
    ++baked;
    ASSERT_OK(model.materialise(std::byte{0xCD}, 64));
    replay(*recording, model, weights);
    const auto replayed = bytes_of_parameter(model, "m", "weight");
    EXPECT_OK(model.check_guards());
    ASSERT_OK(load_eagerly(model, weights.real()));
    ASSERT_EQ(replayed, bytes_of_parameter(model, "m", "weight")) << "round " << round;
  }
  EXPECT_EQ(baked, 300);
}

// An empty slice is a scatter, counts for coverage and makes its name live.
TEST(Bake, EmptySlices) {
  TableModel model;
  Module& module = model.module("embed");
  Parameter* const p = must(module.add_parameter(
      "weight", DType::kF32, {4, 2}, [](Parameter& target, const Tensor& loaded, const std::string&) {
        return must(target.data().narrow(0, 0, 0)).copy_(must(loaded.narrow(0, 3, 0)));
      }));
  ASSERT_OK(module.declare_padding_rows("weight", 0, 4));
  model.feed("x", p);
  const Recording r = must(bake(model, metas({"x"}, {3, 2})));
  ASSERT_EQ(r.scatters.size(), 1u);
  EXPECT_TRUE(r.scatters[0].slice.regions.empty());
  EXPECT_EQ(r.scatters[0].shape, (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(r.live.size(), 1u);
  EXPECT_TRUE(r.modules[0].baked);
}

TEST(Bake, ConversionPolicies) {
  const auto model_of = [](DType dtype) {
    auto model = std::make_unique<TableModel>();
    model->feed("x", must(model->module("m").add_parameter("weight", dtype, {4})));
    return model;
  };
  const auto narrowing = model_of(DType::kBF16);
  const Recording r = must(bake(*narrowing, metas({"x"}, {4})));
  EXPECT_EQ(r.conversions, (std::vector<std::string>{"x F32 -> m.weight BF16"}));
  EXPECT_EQ(r.scatters[0].wire_dtype, DType::kF32);
  EXPECT_EQ(r.scatters[0].destination.dtype, DType::kBF16);
  EXPECT_TRUE(fails_with(bake(*narrowing, metas({"x"}, {4}), {.conversions = ConversionPolicy::kWiden}),
                         {"x F32 -> m.weight BF16", "widen"}));
  EXPECT_TRUE(fails_with(bake(*narrowing, metas({"x"}, {4}), {.conversions = ConversionPolicy::kRefuse}),
                         {"x F32", "refuse"}));
  const auto widening = model_of(DType::kF32);
  EXPECT_OK(bake(*widening, metas({"x"}, {4}, DType::kBF16), {.conversions = ConversionPolicy::kWiden}));
  EXPECT_TRUE(fails_with(
      bake(*widening, metas({"x"}, {4}, DType::kI32), {.conversions = ConversionPolicy::kWiden}), {"widen"}));
  EXPECT_OK(bake(*widening, metas({"x"}, {4}, DType::kI16), {.conversions = ConversionPolicy::kWiden}));
  EXPECT_OK(bake(*widening, metas({"x"}, {4}), {.conversions = ConversionPolicy::kRefuse}));
  EXPECT_TRUE(fails_with(bake(*model_of(DType::kBF16), metas({"x"}, {4}, DType::kF16),
                              {.conversions = ConversionPolicy::kWiden}),
                         {"F16"}));
}

// A write through a view of another dtype is recorded in that view's elements and replayed through it.
TEST(Bake, ViewOfDtypeAsDestination) {
  TableModel model;
  Parameter* const p = must(model.module("m").add_parameter(
      "packed", DType::kU8, {4, 8}, [](Parameter& target, const Tensor& loaded, const std::string&) {
        return must(target.data().view(DType::kBF16)).copy_(must(loaded.view(DType::kBF16)));
      }));
  model.feed("x", p);
  const Recording r = must(bake(model, metas({"x"}, {4, 2})));
  ASSERT_EQ(r.scatters.size(), 1u);
  EXPECT_EQ(r.scatters[0].wire_dtype, DType::kBF16);
  EXPECT_EQ(r.scatters[0].destination, (Destination{0, DType::kBF16, 0, {4, 4}, {4, 1}}));
  EXPECT_TRUE(r.conversions.empty());
}

// What a bake may not do: change the model, write real bytes, bake again, keep recording afterwards.
TEST(Bake, ForbiddenDuringAndAfter) {
  TableModel model;
  Module& module = model.module("m");
  Parameter* const p = must(module.add_parameter("weight", DType::kU8, {4}));
  const std::vector<std::byte> data(4);
  std::optional<Tensor> kept;
  int step = 0;
  model.rules["x"] = [&](const Tensor& loaded) -> Status {
    kept = loaded;
    switch (step) {
      case 0:
        return p->data().copy_(must(Tensor::real("r", DType::kU8, {4}, data.data())));
      case 1:
        return module.add_parameter("late", DType::kU8, {4}).status();
      case 2:
        return p->bind(nullptr, 0);
      case 3:
        return bake(model, {}).status();
      case 4:
        return model.add_module("late", "Module").status();
      default:
        return p->load(loaded);
    }
  };
  const std::vector<std::string> expected{"real tensor", "bakes", "bakes", "already", "bakes"};
  for (step = 0; step < 5; ++step) {
    EXPECT_TRUE(
        fails_with(bake(model, metas({"x"}, {4}, DType::kU8)), {expected[static_cast<std::size_t>(step)]}))
        << step;
  }
  EXPECT_OK(bake(model, metas({"x"}, {4}, DType::kU8)));
  EXPECT_TRUE(fails_with(p->load(*kept), {"after its bake"}));
}

// Two paths to one storage: one write; two storages: two writes.
TEST(Bake, AliasesAreCoveredOnce) {
  TableModel model;
  Parameter* const gate = must(model.module("gate").add_parameter("bias", DType::kF32, {8}));
  Parameter* const experts = must(model.module("experts").add_alias("bias", *gate, {8}));
  model.rules["b"] = [=](const Tensor& loaded) {
    const Status status = gate->load(loaded);
    return status.ok() ? experts->load(loaded) : status;
  };
  const Recording r = must(bake(model, metas({"b"}, {8})));
  EXPECT_EQ(r.scatters.size(), 1u);
  EXPECT_EQ(r.parameters.size(), 1u);
  EXPECT_TRUE(r.modules[0].baked);
}

TEST(Bake, LargeColumnSliceIsQuick) {
  TableModel model;
  Parameter* const p = must(model.module("m").add_parameter(
      "weight", DType::kBF16, {200000, 4}, [](Parameter& target, const Tensor& loaded, const std::string&) {
        return target.data().copy_(must(loaded.narrow(1, 0, 4)));
      }));
  model.feed("x", p);
  const Recording r = must(bake(model, metas({"x"}, {200000, 8}, DType::kBF16)));
  ASSERT_EQ(r.scatters.size(), 1u);
  EXPECT_EQ(r.scatters[0].slice, (Slice{{Region{0, {{200000, 8}, {4, 1}}}}}));
}

// Two interleaved halves of a large matrix: coverage by bitmap, both kept.
TEST(Bake, InterleavedColumns) {
  TableModel model;
  const auto half = [](std::int64_t first) {
    return std::vector<IndexItem>{IndexEllipsis{}, IndexSlice{first, std::nullopt, 2}};
  };
  Parameter* const p = must(model.module("m").add_parameter(
      "weight", DType::kBF16, {1024, 2048},
      [=](Parameter& target, const Tensor& loaded, const std::string& shard) {
        return must(target.data().index(half(shard == "gate" ? 0 : 1))).copy_(loaded);
      }));
  model.feed("gate", p, "gate");
  model.feed("up", p, "up");
  const Recording r = must(bake(model, metas({"gate", "up"}, {1024, 1024}, DType::kBF16)));
  EXPECT_EQ(r.scatters.size(), 2u);
  EXPECT_TRUE(r.modules[0].baked);
}

}  // namespace
}  // namespace shardpull
