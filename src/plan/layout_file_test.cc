#include "plan/layout_file.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/random.h"
#include "plan/plan.h"

namespace shardpull {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two layers of a model, its embedding and a tensor without elements.
std::vector<TensorMeta> model() {
  std::vector<TensorMeta> metadata = {{"embed.weight", DType::kBF16, {10, 4}},
                                      {"empty", DType::kF32, {4, 0}}};
  for (const std::string layer : {"layers.0.", "layers.1."}) {
    metadata.push_back({layer + "norm.bias", DType::kF32, {}});
    metadata.push_back({layer + "norm.weight", DType::kF32, {6}});
    metadata.push_back({layer + "o_proj.weight", DType::kBF16, {6, 8}});
    metadata.push_back({layer + "q_proj.weight", DType::kBF16, {8, 6}});
  }
  return metadata;
}

std::string layout(const std::string& groups) {
  return R"({"format": "shardpull-layout", "version": 1, "groups": [)" + groups + "]}";
}

Result<std::vector<HeldByRank>> read(const std::string& groups) {
  return read_layout(layout(groups), model(), "l.json");
}

// "layers.0.q_proj.weight[0:4, 0:6]" of every piece, whole names alone.
std::vector<std::string> texts(const HeldByRank& held) {
  const std::vector<TensorMeta> metadata = model();
  std::vector<std::string> out;
  for (const std::uint32_t name : held.whole) out.push_back(metadata[name].name);
  for (const Piece& piece : held.pieces) {
    std::string text = metadata[piece.name].name + "[";
    for (std::size_t d = 0; d < piece.box.start.size(); ++d) {
      text += (d > 0 ? ", " : "") + std::to_string(piece.box.start[d]) + ":" +
              std::to_string(piece.box.start[d] + piece.box.size[d]);
    }
    out.push_back(text + "]");
  }
  return out;
}

// Goal: pipeline stages are patterns.
TEST(LayoutFile, WholeNamesByPattern) {
  const auto held = read(R"({"ranks": [0], "hold": [{"name": "e*"}, {"name": "layers.0.*"}]},
                            {"ranks": [1], "hold": [{"name": "layers.[1-9].*"}]})");
  ASSERT_TRUE(held.ok()) << held.status().to_string();
  ASSERT_EQ(held->size(), 2u);
  EXPECT_THAT((*held)[0].whole, ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT((*held)[1].whole, ElementsAre(6, 7, 8, 9));
  EXPECT_TRUE((*held)[0].pieces.empty());
}

// Goal: fully_shard over three ranks is one rule: rows as torch.chunk cuts them, uneven ones and empty ones;
// the scalar, which has no rows, is held whole by a rule before it.
TEST(LayoutFile, OneRuleShardsOverTheRanksOfItsGroup) {
  const auto held =
      read(R"({"ranks": [0, 1, 2, 3], "hold": [{"name": "*.bias"}, {"name": "*", "shard": [{"dim": 0}]}]})");
  ASSERT_TRUE(held.ok()) << held.status().to_string();
  ASSERT_EQ(held->size(), 4u);
  EXPECT_THAT(texts((*held)[0]),
              ElementsAre("empty", "layers.0.norm.bias", "layers.1.norm.bias", "embed.weight[0:3, 0:4]",
                          "layers.0.norm.weight[0:2]", "layers.0.o_proj.weight[0:2, 0:8]",
                          "layers.0.q_proj.weight[0:2, 0:6]", "layers.1.norm.weight[0:2]",
                          "layers.1.o_proj.weight[0:2, 0:8]", "layers.1.q_proj.weight[0:2, 0:6]"));
  EXPECT_THAT(texts((*held)[3]),
              ElementsAre("empty", "layers.0.norm.bias", "layers.1.norm.bias", "embed.weight[9:10, 0:4]",
                          "layers.0.q_proj.weight[6:8, 0:6]", "layers.1.q_proj.weight[6:8, 0:6]"));
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    for (const Piece& piece : (*held)[rank].pieces) EXPECT_EQ(piece.rank, rank);
  }
}

// Goal: FSDP inside tensor parallelism, by two groups; columns and rows cut one after the other.
TEST(LayoutFile, MeshesAreCutsOfCuts) {
  const auto held = read(R"(
      {"ranks": [0, 1, 2, 3], "hold": [{"name": "e*"}, {"name": "*norm*"}]},
      {"ranks": [0, 1], "hold": [{"name": "*o_proj*", "shard": [{"dim": 1, "index": 0, "of": 2}, {"dim": 0}]},
                                 {"name": "*q_proj*", "shard": [{"dim": 0, "index": 0, "of": 2}, {"dim": 0}]}]},
      {"ranks": [3, 2], "hold": [{"name": "*o_proj*", "shard": [{"dim": 1, "index": 1, "of": 2}, {"dim": 0}]},
                                 {"name": "*q_proj*", "shard": [{"dim": 0, "index": 1, "of": 2}, {"dim": 0}]}]})");
  ASSERT_TRUE(held.ok()) << held.status().to_string();
  EXPECT_EQ(texts((*held)[1])[6], "layers.0.o_proj.weight[3:6, 0:4]");
  EXPECT_EQ(texts((*held)[1])[7], "layers.0.q_proj.weight[2:4, 0:6]");
  EXPECT_EQ(texts((*held)[3])[6], "layers.0.o_proj.weight[0:3, 4:8]");
  EXPECT_EQ(texts((*held)[2])[7], "layers.0.q_proj.weight[6:8, 0:6]");
}

// Goal: boxes on any dim, several of one name, as written; a box that is everything is the whole tensor.
TEST(LayoutFile, BoxesAreTakenAsWritten) {
  const auto held = read(R"(
      {"ranks": [0], "hold": [{"name": "layers.*.q_proj.weight", "boxes": [[[4, 4], [3, 3]], [[0, 4], [0, 6]]]},
                              {"name": "layers.*.norm.weight", "boxes": [[[0, 6]]]}]})");
  ASSERT_TRUE(held.ok()) << held.status().to_string();
  EXPECT_THAT(texts((*held)[0]),
              ElementsAre("layers.0.norm.weight", "layers.1.norm.weight", "layers.0.q_proj.weight[4:8, 3:6]",
                          "layers.0.q_proj.weight[0:4, 0:6]", "layers.1.q_proj.weight[4:8, 3:6]",
                          "layers.1.q_proj.weight[0:4, 0:6]"));
}

// Goal: what is read can be planned: the pieces of the two-level mesh cover the model.
TEST(LayoutFile, PiecesResolveToOwners) {
  const std::vector<TensorMeta> metadata = model();
  const auto held =
      read(R"({"ranks": [0, 1, 2], "hold": [{"name": "*.bias"}, {"name": "*", "shard": [{"dim": 0}]}]})");
  ASSERT_TRUE(held.ok());
  std::vector<Holding> holdings;
  for (std::uint32_t rank = 0; rank < held->size(); ++rank) {
    Holding holding;
    holding.rank = rank;
    holding.digest = metadata_digest(metadata);
    holding.whole.assign((metadata.size() + 7) / 8, 0);
    for (const std::uint32_t name : (*held)[rank].whole) {
      holding.whole[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
    }
    holding.pieces = (*held)[rank].pieces;
    holdings.push_back(std::move(holding));
  }
  const auto ownership = resolve_ownership(metadata, holdings);
  EXPECT_TRUE(ownership.ok()) << ownership.status().to_string();
}

// Goal: every rule of the format is named, with the place it is broken at.
TEST(LayoutFile, RefusesWhatBreaksARule) {
  struct Case {
    std::string groups;
    std::vector<std::string> message;
  };
  const std::string rest = R"({"ranks": [0], "hold": [{"name": "*"}]})";
  for (
      const Case& c : std::vector<Case>{
          {"", {"groups: expected a list of 1 to"}},
          {R"({"ranks": [0], "hold": [{"name": "*"}], "rank": 1})",
           {R"(groups[0]: the field "rank" is unknown)"}},
          {R"({"ranks": [0]})", {R"(groups[0]: the field "hold" is missing)"}},
          {R"({"ranks": [], "hold": [{"name": "*"}]})", {"groups[0].ranks: expected a list"}},
          {R"({"ranks": [0, 0], "hold": [{"name": "*"}]})", {"groups[0].ranks: rank 0 is there twice"}},
          {R"({"ranks": [-1], "hold": [{"name": "*"}]})",
           {"groups[0].ranks[0]: expected an integer from 0 to 65535"}},
          {R"({"ranks": [1.0], "hold": [{"name": "*"}]})", {"groups[0].ranks[0]: expected an integer"}},
          {R"({"ranks": [18446744073709551615], "hold": [{"name": "*"}]})",
           {"groups[0].ranks[0]: expected an integer"}},
          {R"({"ranks": [1], "hold": [{"name": "*"}]})", {"no group has rank 0, and there is rank 1"}},
          {R"({"ranks": [0], "hold": ["*"]})", {"groups[0].hold[0]: expected an object"}},
          {R"({"ranks": [0], "hold": [{"name": 5}]})", {"groups[0].hold[0].name: expected a name"}},
          {R"({"ranks": [0], "hold": [{"name": "layers.2.*"}]})", {"groups[0].hold[0].name", "layers.2.*"}},
          {R"({"ranks": [0], "hold": [{"name": "nobody"}]})", {R"(the model has no tensor "nobody")"}},
          {R"({"ranks": [0], "hold": [{"name": "e*"}, {"name": "empty"}]})",
           {R"(groups[0].hold[1].name: all 1 name(s) that "empty" matches are decided by rules before it)"}},
          {rest + R"(, {"ranks": [0], "hold": [{"name": "empty"}]})",
           {"groups[1].hold[0]: gives rank 0 the tensor empty, which groups[0].hold[0] gives it already"}},
          {R"({"ranks": [0], "hold": [{"name": "empty", "boxes": [[[0, 4], [0, 0]]]}]})",
           {"boxes[0][1][1]", "from 1"}},
          {R"({"ranks": [0], "hold": [{"name": "embed.weight", "boxes": [[[0, 10], [0, 5]]]}]})",
           {"groups[0].hold[0].boxes[0]: does not fit embed.weight [10, 4]"}},
          {R"({"ranks": [0], "hold": [{"name": "embed.weight", "boxes": [[[0, 10]]]}]})",
           {"does not fit embed.weight"}},
          {R"({"ranks": [0], "hold": [{"name": "embed.weight", "boxes": [[[9223372036854775807, 2], [0, 4]]]}]})",
           {"does not fit embed.weight"}},
          {R"({"ranks": [0], "hold": [{"name": "embed.weight", "boxes": [[[0, 6], [0, 4]], [[5, 5], [1, 1]]]}]})",
           {"groups[0].hold[0].boxes: boxes", "overlap"}},
          {R"({"ranks": [0], "hold": [{"name": "embed.weight", "boxes": [[[0], [0, 4]]]}]})",
           {"expected [start, size]"}},
          {R"({"ranks": [0], "hold": [{"name": "embed.weight", "boxes": [[[0, 10], [0, 4]]], "shard": [{"dim": 0}]}]})",
           {"has boxes and shard"}},
          {R"({"ranks": [0], "hold": [{"name": "*norm*", "shard": [{"dim": 0}]}]})",
           {"groups[0].hold[0].shard[0]: layers.0.norm.bias [] has no dim 0"}},
          {R"({"ranks": [0], "hold": [{"name": "e*", "shard": [{"dim": 0, "of": 2}]}]})", {"both or none"}},
          {R"({"ranks": [0], "hold": [{"name": "e*", "shard": [{"dim": 0, "index": 2, "of": 2}]}]})",
           {"shard[0].index: expected an integer from 0 to 1"}},
          {R"({"ranks": [0, 1], "hold": [{"name": "*norm.weight", "shard": [{"dim": 0, "index": 6, "of": 7}]}]})",
           {"rank 0 holds nothing"}},
      }) {
    const auto held = read(c.groups);
    ASSERT_FALSE(held.ok()) << c.groups;
    EXPECT_THAT(held.status().message(), ::testing::StartsWith("l.json: "));
    for (const std::string& part : c.message) EXPECT_THAT(held.status().message(), HasSubstr(part));
  }
  const auto refused = [](const std::string& text) {
    return read_layout(text, model(), "l.json").status().message();
  };
  EXPECT_THAT(refused(""), HasSubstr("invalid JSON"));
  EXPECT_THAT(refused("[]"), HasSubstr("expected an object"));
  EXPECT_THAT(refused(layout(rest) + "x"), HasSubstr("invalid JSON"));
  EXPECT_THAT(refused(layout(R"({"ranks": [0], "ranks": [0], "hold": [{"name": "*"}]})")),
              HasSubstr("twice"));
  EXPECT_THAT(refused(std::string(100'000, '[')), HasSubstr("nested"));
  EXPECT_THAT(refused(R"({"format": "x", "version": 1, "groups": []})"), HasSubstr("shardpull-layout"));
  EXPECT_THAT(refused(R"({"format": "shardpull-layout", "version": 2, "groups": []})"),
              HasSubstr("version 2"));
  EXPECT_THAT(refused(std::string((16 << 20) + 1, ' ')), HasSubstr("at most 16777216"));
  std::string many = R"({"ranks": [0], "hold": [{"name": "embed.weight", "boxes": [)";
  for (int i = 0; i < 65; ++i) many += (i > 0 ? "," : "") + std::string("[[0, 1], [0, 1]]");
  EXPECT_THAT(refused(layout(many + "]}]}")), HasSubstr("1 to 64 entries"));
}

// Goal: what a short file may ask for is bounded: thousands of groups that each match every name of a large
// model.
TEST(LayoutFile, WorkIsBoundedByTheFile) {
  std::vector<TensorMeta> metadata;
  for (int i = 0; i < 100'000; ++i) metadata.push_back({"t." + std::to_string(i), DType::kU8, {1}});
  std::string groups;
  for (int rank = 0; rank < 3000; ++rank) {
    groups += (rank > 0 ? "," : "") + std::string(R"({"ranks": [)") + std::to_string(rank) +
              R"(], "hold": [{"name": "*"}]})";
  }
  const auto held = read_layout(layout(groups), metadata, "l.json");
  ASSERT_FALSE(held.ok());
  EXPECT_EQ(held.status().info().reason, Reason::kLimit) << held.status().to_string();
}

// Goal: a damaged file gives an error or a layout whose pieces fit their tensors.
TEST(LayoutFile, ThousandsOfDamagedFilesDoNoHarm) {
  const std::vector<TensorMeta> metadata = model();
  const std::string good = layout(R"(
      {"ranks": [0, 1, 2, 3], "hold": [{"name": "e*"}, {"name": "*norm*"}]},
      {"ranks": [0, 1], "hold": [{"name": "*o_proj*", "shard": [{"dim": 1, "index": 0, "of": 2}, {"dim": 0}]},
                                 {"name": "layers.0.q_proj.weight", "boxes": [[[0, 2], [0, 6]], [[4, 2], [1, 3]]]}]},
      {"ranks": [3, 2], "hold": [{"name": "*o_proj*", "shard": [{"dim": 1, "index": 1, "of": 2}, {"dim": 0}]}]})");
  ASSERT_TRUE(read_layout(good, metadata, "l").ok());
  const std::vector<std::string> words = {"0",       "-1",   "9223372036854775807",
                                          "1e9",     "[",    "]",
                                          "{",       "}",    "\"",
                                          ",",       ":",    "null",
                                          "\\u0000", "\xff", "*",
                                          "[a-",     "65535"};
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    std::string text = good;
    const std::uint64_t edits = 1 + random.below(3);
    for (std::uint64_t e = 0; e < edits && !text.empty(); ++e) {
      const auto at = static_cast<std::size_t>(random.below(text.size()));
      switch (random.below(5)) {
        case 0:
          text.resize(at);
          break;
        case 1:
          text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
          break;
        case 2:
          text.erase(at, 1 + random.below(8));
          break;
        case 3:
          text.insert(at, words[random.below(words.size())]);
          break;
        default:
          for (std::size_t i = at; i < text.size(); ++i) {
            if (text[i] < '0' || text[i] > '9') continue;
            text[i] = static_cast<char>('0' + random.below(10));
            break;
          }
      }
    }
    const auto held = read_layout(text, metadata, "fuzz");
    if (!held.ok()) continue;
    ++accepted;
    for (std::uint32_t rank = 0; rank < held->size(); ++rank) {
      EXPECT_TRUE(std::is_sorted((*held)[rank].whole.begin(), (*held)[rank].whole.end()));
      for (const Piece& piece : (*held)[rank].pieces) {
        const std::vector<std::int64_t>& shape = metadata[piece.name].shape;
        ASSERT_EQ(piece.rank, rank);
        ASSERT_EQ(piece.box.start.size(), shape.size());
        for (std::size_t d = 0; d < shape.size(); ++d) {
          EXPECT_GE(piece.box.start[d], 0);
          EXPECT_GT(piece.box.size[d], 0);
          EXPECT_LE(piece.box.start[d] + piece.box.size[d], shape[d]);
        }
      }
    }
  }
  EXPECT_GT(accepted, 50);
  EXPECT_LT(accepted, 2500);
}

}  // namespace
}  // namespace shardpull
