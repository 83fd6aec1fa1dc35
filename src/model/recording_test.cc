// Recording files: what is written, that it is read back, that a model made of it is the model, and that a
// stranger's file does no harm.
#include "shardpull/recording.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"
#include "checkpoint/config.h"
#include "checkpoint/shapes.h"
#include "model/families/build.h"
#include "model/model_testing.h"

namespace shardpull {
namespace {

constexpr std::byte kCanary{0xCD};
const RecordingHeader kHeader{"shardpull", "SampleModel", "tp=2,pp=1", 1};

// A model with everything a recording can hold: a buffer with first bytes and one without, aliases of a
// parameter and of a module, padding, a fill through another dtype, gaps, a hook, conversions, fused parts,
// cut copies, a chain that copies, and names that need escapes.
class SampleModel : public TableModel {
 public:
  static std::vector<TensorMeta> tensors() {
    return {{"a.k", DType::kBF16, {2, 4}},       {"a.q", DType::kBF16, {4, 4}},
            {"a.scale", DType::kF32, {4}},       {"b.stack", DType::kF16, {2, 3, 4}},
            {"embed", DType::kBF16, {5, 4}},     {"lm_head \"é\"\n\x01", DType::kBF16, {5, 4}},
            {"other.stage", DType::kF32, {7, 9}}};
  }

  SampleModel() {
    Module& embed = module("embed", "Embedding");
    Parameter* const table = must(embed.add_parameter("weight", DType::kBF16, {8, 4}, narrowed(0, 0, 5)));
    must_ok(embed.declare_padding_rows("weight", 5, 8));
    feed("embed", table);

    Module& attention = module("attention", "Fused");
    Parameter* const qk = must(attention.add_parameter("qk", DType::kBF16, {6, 2}, fused()));
    must_ok(
        status_of(attention.add_buffer("positions", DType::kI16, {1, 3}, bytes_of_text("\0\1\2\3\4\xff"))));
    must_ok(status_of(attention.add_buffer("scratch", DType::kU8, {2})));
    attention.set_post_process([](Module&, const std::vector<std::byte*>&) { return Status(); });
    feed("a.q", qk, "q");
    feed("a.k", qk, "k");

    Module& mixed = module("mixed", "Mixed");
    Parameter* const scale =
        must(mixed.add_strided_parameter("scale", DType::kBF16, {2, 2}, {3, 1}, reshaped()));
    feed("a.scale", scale);
    Parameter* const experts = must(mixed.add_parameter("experts", DType::kF16, {4, 7}, stacked()));
    feed("b.stack", experts);
    must_ok(status_of(mixed.add_alias("flat", *table, {32})));
    must_ok(add_module_alias("lm_head", embed));
    must_ok(add_module_alias("tied \t head", embed));

    unused["lm_head \"é\"\n\x01"] = "tied head: embed feeds it";
    unused["other.stage"] = "other stage";
  }

 private:
  static void must_ok(const Status& status) {
    if (!status.ok()) std::abort();
  }
  static std::vector<std::byte> bytes_of_text(const char (&text)[7]) {
    const auto* const first = reinterpret_cast<const std::byte*>(text);
    return {first, first + 6};
  }
  static Loader narrowed(std::int64_t dim, std::int64_t start, std::int64_t length) {
    return [=](Parameter& parameter, const Tensor& loaded, const std::string&) {
      return must(parameter.data().narrow(dim, start, length)).copy_(loaded);
    };
  }
  // Columns [2, 4) of each part; the part's first row is then written again, from other columns.
  static Loader fused() {
    return [](Parameter& parameter, const Tensor& loaded, const std::string& shard) -> Status {
      const ParameterView target = must(parameter.data().narrow(0, shard == "q" ? 0 : 4, loaded.size(0)));
      const Status whole = target.copy_(must(loaded.narrow(1, 2, 2)));
      if (!whole.ok()) return whole;
      return must(target.narrow(0, 0, 1)).copy_(must(must(loaded.chunk(2, 1))[0].narrow(0, 0, 1)));
    };
  }
  static Loader reshaped() {
    return [](Parameter& parameter, const Tensor& loaded, const std::string&) {
      return parameter.data().copy_(must(loaded.view({2, 2})));
    };
  }
  // [2, 3, 4] as [4, 6] beside a column that is zeroed byte by byte.
  static Loader stacked() {
    return [](Parameter& parameter, const Tensor& loaded, const std::string&) -> Status {
      const Tensor rows = must(must(loaded.permute({2, 0, 1})).reshape({4, -1}));
      const Status copied = must(parameter.data().narrow(1, 0, 6)).copy_(rows);
      if (!copied.ok()) return copied;
      return must(must(parameter.data().narrow(1, 6, 1)).view(DType::kU8)).zero_();
    };
  }
};

Recording sample_recording() {
  SampleModel model;
  return must(bake(model, SampleModel::tensors()));
}

// The whole file of the sample, to the byte: a program in another language that writes it must write exactly
// this.
const std::string& sample_text() {
  static const std::string text = [] {
    std::ifstream file(std::string(SHARDPULL_SOURCE_DIR) + "/tests/recordings/sample.jsonl",
                       std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }();
  return text;
}

std::string replaced(std::string_view text, std::string_view what, std::string_view with) {
  std::string out(text);
  const std::size_t at = out.find(what);
  EXPECT_NE(at, std::string::npos) << what << " is not in the text";
  if (at != std::string::npos) out.replace(at, what.size(), with);
  return out;
}

// Both models' parameters hold the same bytes, and their guards are whole.
void expect_same_bytes(const Model& a, const Model& b) {
  ASSERT_EQ(a.modules().size(), b.modules().size());
  for (std::size_t m = 0; m < a.modules().size(); ++m) {
    ASSERT_EQ(a.modules()[m]->parameters().size(), b.modules()[m]->parameters().size());
    for (std::size_t p = 0; p < a.modules()[m]->parameters().size(); ++p) {
      const Parameter& left = *a.modules()[m]->parameters()[p];
      const Parameter& right = *b.modules()[m]->parameters()[p];
      ASSERT_EQ(left.full_name(), right.full_name());
      ASSERT_EQ(left.optional(), right.optional());
      ASSERT_EQ(left.storage_bytes(), right.storage_bytes());
      EXPECT_EQ(std::memcmp(left.memory(), right.memory(), left.storage_bytes()), 0) << left.full_name();
    }
  }
  EXPECT_OK(a.check_guards());
  EXPECT_OK(b.check_guards());
}

// A recording goes through a file unchanged, and the model made of it bakes to the same recording and loads
// the same bytes as the model itself. `same_fills`: false where fills go through another dtype than the
// parameter's.
void expect_replays(Model& model, const Weights& weights, bool same_fills = true) {
  const Recording recording = must(bake(model, weights.metadata));
  const std::string text = must(write_recording(recording, weights.metadata, kHeader));
  const RecordingFile file = must(read_recording(text, weights.metadata, "r.jsonl"));
  EXPECT_EQ(file.header, kHeader);
  EXPECT_EQ(file.recording, recording);

  const auto replayed = must(model_of(file.recording, weights.metadata));
  Recording again = must(bake(*replayed, weights.metadata));
  if (!same_fills) again.fills = recording.fills;
  EXPECT_EQ(again, recording);
  ASSERT_OK(model.materialise(kCanary, 64));
  ASSERT_OK(replayed->materialise(kCanary, 64));
  ASSERT_OK(load_eagerly(model, weights.real()));
  ASSERT_OK(load_eagerly(*replayed, weights.real()));
  expect_same_bytes(model, *replayed);
}

// Goal: the format is fixed to the byte.
TEST(RecordingFile, IsWrittenByteForByte) {
  EXPECT_EQ(must(write_recording(sample_recording(), SampleModel::tensors(), kHeader)), sample_text());
  const RecordingFile file = must(read_recording(sample_text(), SampleModel::tensors(), "r.jsonl"));
  EXPECT_EQ(file.recording, sample_recording());
  EXPECT_EQ(file.header, kHeader);
}

// Goal: everything a model has survives: buffers, aliases, padding, gaps, conversions, hooks.
TEST(RecordingFile, ModelOfTheSampleIsTheSample) {
  const Weights weights(SampleModel::tensors());
  SampleModel model;
  expect_replays(model, weights, false);

  const auto replayed = must(model_of(sample_recording(), weights.metadata));
  ASSERT_NE(replayed->find_module("tied \t head"), nullptr);
  EXPECT_EQ(replayed->find_module("tied \t head"), replayed->find_module("embed"));
  const Parameter* const flat = replayed->find_module("mixed")->find("flat");
  ASSERT_NE(flat, nullptr);
  EXPECT_EQ(flat->shape(), std::vector<std::int64_t>{32});
  EXPECT_EQ(&flat->storage(), replayed->find_module("embed")->find("weight"));
  EXPECT_TRUE(replayed->find_module("attention")->post_process() != nullptr);
  EXPECT_FALSE(replayed->find_module("embed")->post_process() != nullptr);
  EXPECT_EQ(replayed->explain_unused("other.stage"), "other stage");
  EXPECT_EQ(replayed->explain_unused("nobody"), "");
  EXPECT_EQ(replayed->sources_of(*replayed->find_module("mixed")->find("scale")),
            std::vector<std::string>{"a.scale"});

  ASSERT_OK(replayed->materialise());
  const Weights other({{"a.q", DType::kBF16, {8, 2}}, {"x", DType::kBF16, {1}}});
  EXPECT_TRUE(fails_with(replayed->load_weights({other.real()[0]}), {"a.q is BF16 [8, 2]", "BF16 [4, 4]"}));
  EXPECT_TRUE(fails_with(replayed->load_weights({other.real()[1]}), {"x is not one of the names"}));
}

// Goal: what holds for the sample holds for every family of the catalogue, cut every way that its tiny shape
// allows.
TEST(RecordingFile, EveryFamilyIsReplayedWithoutItsCode) {
  int replayed = 0;
  std::set<std::string_view> families;
  for (const ShapeInfo& info : known_shapes()) {
    if (!info.available || !families.insert(info.family).second) continue;
    for (const bool tied : {false, true}) {
      ShapeOverrides overrides;
      if (tied) overrides.tied = true;
      const auto shape = shape_config({std::string(info.key), ShapeSize::kTiny}, overrides);
      if (!shape.ok()) continue;  // bert has no head to tie
      const ModelConfig config = must(ModelConfig::parse(shape->config_json));
      const Weights weights(shape->tensors);
      for (const InferenceLayout& layout :
           {InferenceLayout{}, InferenceLayout{.tp = 2}, InferenceLayout{.tp = 2, .pp = 2}}) {
        for (std::int64_t id = 0; id < layout.workers(); ++id) {
          SCOPED_TRACE(std::string(info.key) + " worker " + std::to_string(id));
          const auto model = build_model(config, layout, id);
          if (!model.ok()) break;  // bert has no stages
          expect_replays(**model, weights);
          ++replayed;
        }
      }
    }
  }
  EXPECT_GE(replayed, 20);
}

// Goal: names are looked up, so the same recording serves any order of them.
TEST(RecordingFile, IsReadAgainstAnotherOrderOfTheNames) {
  std::vector<TensorMeta> reversed = SampleModel::tensors();
  std::reverse(reversed.begin(), reversed.end());
  const RecordingFile file = must(read_recording(sample_text(), reversed, "r"));
  ASSERT_EQ(file.recording.scatters.size(), 7u);
  EXPECT_EQ(reversed[file.recording.scatters[0].name].name, "a.k");
  EXPECT_EQ(file.recording.dead, (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(file.recording.unused_reasons[0], "other stage");
  EXPECT_EQ(must(write_recording(file.recording, reversed, file.header)), sample_text());
  EXPECT_NE(file.recording.metadata, sample_recording().metadata);
}

// Goal: a module that one side has renamed since the recording was made is named, with what it is called now.
TEST(RecordingFile, case_051_a_renamed_module) {
  std::vector<TensorMeta> renamed = SampleModel::tensors();
  for (TensorMeta& meta : renamed) {
    if (meta.name == "a.k") meta.name = "mtp_model_layer.k";
  }
  EXPECT_TRUE(fails_with(read_recording(sample_text(), renamed, "r.jsonl"),
                         {"other tensors than this model's", R"(it has "a.k", which the model lacks)",
                          R"(the model has "mtp_model_layer.k", which the file lacks)"}));
  std::vector<TensorMeta> reshaped = SampleModel::tensors();
  std::swap(reshaped[0].shape[0], reshaped[0].shape[1]);
  const auto refused = read_recording(sample_text(), reshaped, "r.jsonl");
  EXPECT_EQ(refused.status().message().find("lacks"), std::string::npos) << refused.status().to_string();
  EXPECT_TRUE(fails_with(read_recording(sample_text(), {}, "r.jsonl"), {"which the model lacks"}));
}

// Goal: a recording that cannot be replayed, or is of another model, is not written.
TEST(RecordingFile, RefusesToWriteWhatNobodyCouldRead) {
  Recording recording = sample_recording();
  std::vector<TensorMeta> metadata = SampleModel::tensors();
  EXPECT_TRUE(fails_with(write_recording(recording, metadata, {"\xff", "a", "b", 0}),
                         {"cannot be written", "UTF-8"}));
  recording.unbaked = {1};
  EXPECT_TRUE(fails_with(write_recording(recording, metadata, kHeader), {"did not bake", "a.q"}));
  recording.unbaked.clear();
  recording.scatters[0].slice.regions[0].offset = 5;
  EXPECT_TRUE(fails_with(write_recording(recording, metadata, kHeader), {"cannot be written", "slice"}));
  recording.scatters[0].name = 99;
  EXPECT_EQ(write_recording(recording, metadata, kHeader).status().code(), StatusCode::kInternal);
  metadata[0].shape = {4, 2};
  EXPECT_EQ(write_recording(sample_recording(), metadata, kHeader).status().code(), StatusCode::kInternal);
}

// Goal: one way to write each line; every rule is named, with the line it is broken in.
TEST(RecordingFile, RefusesWhatBreaksARule) {
  struct Case {
    std::string_view what, with;
    std::vector<std::string> message;
  };
  const std::vector<Case> cases = {
      // The spelling.
      {R"({"format")", R"({ "format")", {"r.jsonl: no recording"}},
      {R"("version":1)", R"("version":2)", {"r.jsonl: recording format version 2, this program reads 1"}},
      {R"("slice_format":1)", R"("slice_format":3)", {"slice format version 3"}},
      {R"("worker":1)", R"("worker":65536)", {"r.jsonl:1", "65535"}},
      {R"("worker":1)", R"("worker":01)", {"r.jsonl:1", "expected a number"}},
      {R"("worker":1)", R"("worker":-1)", {"r.jsonl:1", "expected a number"}},
      {R"("worker":1)", R"("worker":1.0)", {"r.jsonl:1", R"(expected ,"names":)"}},
      {R"("worker":1)", R"("worker":9223372036854775808)", {"r.jsonl:1", "expected a number"}},
      {R"("engine":"shardpull","architecture":"SampleModel")",
       R"("architecture":"SampleModel","engine":"shardpull")",
       {"r.jsonl:1", R"(expected ,"engine":)"}},
      {R"({"module":"embed",)", R"({"module": "embed",)", {"r.jsonl:2", "expected \""}},
      {R"("aliases":["lm_head",)", R"("aliases":["lm_head", )", {"r.jsonl:2", "expected \""}},
      {R"(tied \t head)", R"(tied \u0009 head)", {"r.jsonl:2", "escape"}},
      {R"(\u0001)", R"(\u0001\u0041)", {"r.jsonl:21", "escape"}},
      {R"(\u0001)", R"(\/)", {"r.jsonl:21", "escape"}},
      {"\xC3\xA9", "\xC3\x28", {"r.jsonl: invalid UTF-8"}},
      {R"("baked":true)", R"("baked":True)", {"r.jsonl:2", "expected false"}},
      {R"("initial":"0001020304ff")", R"("initial":"0001020304FF")", {"r.jsonl:6", "0123456789abcdef"}},
      {R"("initial":"0001020304ff")", R"("initial":"0001020304f")", {"r.jsonl:6", "0123456789abcdef"}},
      {R"("initial":""})", R"("initial":""} )", {"r.jsonl:3", "end of the line"}},
      {R"({"dead":"other)", R"({"comment":"other)", {"r.jsonl:22", "no line of a recording begins with"}},
      {R"("dtype":"BF16")", R"("dtype":"bf16")", {"r.jsonl:3", "bf16"}},
      {R"([8,4],"stride")", R"([8,4,1,1,1,1,1,1,1],"stride")", {"r.jsonl:3", "more than 8 dims"}},
      // The names.
      {R"("names":7)", R"("names":8)", {"other tensors than this model's", "8 names", "has 7"}},
      {"d0b84ba3", "d0b84ba4", {"other tensors than this model's"}},
      {R"({"scatter":"a.k")", R"({"scatter":"a.x")", {"r.jsonl:14", R"(no tensor "a.x")"}},
      {R"({"dead":"other.stage")", R"({"dead":"embed")", {"r.jsonl:22", "do not ascend"}},
      {R"({"dead":"lm_head \"é\"\n\u0001")", R"({"dead":"embed")", {"r.jsonl:21", "a scatter takes from it"}},
      {R"("reason":"other stage")", R"("reason":"")", {"r.jsonl:22", "without a reason"}},
      // The structure.
      {R"("modules":3)", R"("modules":4)", {"the file ends after 3 modules, its header says 4"}},
      {R"("dead":2,)", R"("dead":3,)", {"the file ends after 2 dead names, its header says 3"}},
      {R"({"module":"mixed")", R"({"module":"embed")", {"r.jsonl:8", R"(module "embed" is there twice)"}},
      {R"({"parameter":"experts")",
       R"({"parameter":"scale")",
       {"r.jsonl:10", R"("mixed.scale" is there twice)"}},
      {R"(["lm_head","tied \t head"])", R"(["z","a"])", {"r.jsonl:2", "do not ascend"}},
      {R"(["lm_head","tied \t head"])", R"(["mixed"])", {"r.jsonl: ", "mixed already"}},
      {R"("module":"mixed","of")", R"("module":"mix","of")", {"r.jsonl:11", R"(no module "mix")"}},
      {R"("of":"embed.weight","shape":[32])", R"("of":"embed.weight","shape":[31])", {"r.jsonl: ", "view"}},
      {R"("of":"embed.weight")", R"("of":"embed.bias")", {"r.jsonl:11", R"(no parameter "embed.bias")"}},
      {R"({"alias":"flat")", R"({"alias":"scale")", {"r.jsonl: ", "mixed.scale exists already"}},
      {R"("optional":false,"initial":"")", R"("optional":false,"initial":"00")", {"r.jsonl:3", "no buffer"}},
      {R"("initial":"0001020304ff")", R"("initial":"00010203")", {"r.jsonl: ", "4 initial bytes", "needs 6"}},
      {R"([1,3],"stride":[3,1])", R"([1,3],"stride":[1,3])", {"r.jsonl: ", "buffers are contiguous"}},
      {R"("stride":[3,1],"optional":false)",
       R"("stride":[1,1],"optional":false)",
       {"r.jsonl:9", "strides overlap"}},
      {R"([8,4],"stride":[4,1])", R"([8,4],"stride":[4])", {"r.jsonl:3", "[8, 4] with stride [4]"}},
      {R"([8,4],"stride":[4,1])", R"([8,4],"stride":[9223372036854775807,1])", {"r.jsonl:3", "too large"}},
      // The copies.
      {".view(2, 2)", ".view(2,2)", {"r.jsonl:18", "a.scale", "at offset 7"}},
      {".view(2, 2)", ".view(-1, 2)", {"r.jsonl:18", "not written as it is recorded"}},
      {".view(2, 2)", ".clone().view(2, 2)", {"r.jsonl:18", "clone", "copies"}},
      {".view(2, 2)", ".view(4, 1)", {"r.jsonl:18", "gives F32 [4, 1], written is F32 [2, 2]"}},
      {R"("dtype":"F32","chain")",
       R"("dtype":"I32","chain")",
       {"r.jsonl:18", "gives F32 [2, 2], written is I32"}},
      {R"([[0,[[4,1],[6,4]]]])", R"([[0,[[2,12],[4,1],[3,4]]]])", {"r.jsonl:19", "gives the slice"}},
      {R"([[0,[[4,1],[6,4]]]])", R"([[1,[[4,1],[6,4]]]])", {"r.jsonl:19", "gives the slice"}},
      {R"([[0,[[20,1]]]])", R"([[0,[[10,1]]],[10,[[10,1]]]])", {"r.jsonl:20", "gives the slice"}},
      {R"("into":{"parameter":"embed.weight","dtype":"BF16","offset":0)",
       R"("into":{"parameter":"embed.weight","dtype":"BF16","offset":13)",
       {"r.jsonl:20", "lies outside"}},
      {R"("into":{"parameter":"embed.weight","dtype":"BF16","offset":0)",
       R"("into":{"parameter":"embed.weight","dtype":"F4","offset":0)",
       {"r.jsonl:20", "no conversion from BF16 to F4"}},
      {R"("offset":0,"stride":[4,1]}})", R"("offset":0,"stride":[4]}})", {"r.jsonl:20", "number of strides"}},
      {R"("offset":0,"stride":[4,1]}})",
       R"("offset":0,"stride":[3,1]}})",
       {"r.jsonl:20", "strides that overlap"}},
      {R"("offset":0,"stride":[4,1]}})",
       R"("offset":0,"stride":[4611686018427387904,1]}})",
       {"r.jsonl:20", "lies outside"}},
      {R"("offset":12,"shape":[4,2])", R"("offset":12,"shape":[0,2])", {"r.jsonl:13", "a fill of nothing"}},
      {R"({"fill":"embed.weight","dtype":"BF16","offset":20)",
       R"({"fill":"mixed.experts","dtype":"U8","offset":48)",
       {"r.jsonl:12", "lies outside"}},
      // The coverage.
      {R"("fill":"embed.weight","dtype":"BF16","offset":20,"shape":[3,4])",
       R"("fill":"embed.weight","dtype":"BF16","offset":20,"shape":[2,4])",
       {"r.jsonl: ", R"("embed.weight" [8, 4] is not written from element 28)"}},
      {R"("fill":"embed.weight","dtype":"BF16","offset":20,"shape":[3,4])",
       R"("fill":"embed.weight","dtype":"BF16","offset":16,"shape":[3,4])",
       {"r.jsonl: ", R"(two windows in parameter "embed.weight" overlap)"}},
      {R"("fill":"embed.weight","dtype":"BF16","offset":20,"shape":[3,4])",
       R"("fill":"embed.weight","dtype":"BF16","offset":16,"shape":[4,4])",
       {"r.jsonl: ", R"(the windows in parameter "embed.weight" are larger than it)"}},
      {R"("mixed.scale","dtype":"BF16","offset":0,"stride":[3,1])",
       R"("mixed.scale","dtype":"BF16","offset":0,"stride":[2,1])",
       {"r.jsonl: ", R"("mixed.scale" [2, 2] is not written)"}},
      {R"("type":"Mixed","baked":true)", R"("type":"Mixed","baked":false)", {"r.jsonl:13", "did not bake"}},
      {R"("dtype":"U8","shape":[2],"stride":[1],"optional":true)",
       R"("dtype":"U8","shape":[2],"stride":[1],"optional":false)",
       {"r.jsonl: ", R"(nothing writes into parameter "attention.scratch")"}},
      {R"({"conversion":"a.scale F32 -> mixed.scale BF16"})",
       R"({"conversion":"none"})",
       {"r.jsonl: ", R"(no line lists the conversion "a.scale F32 -> mixed.scale BF16")"}},
  };
  for (const Case& c : cases) {
    const auto file =
        read_recording(replaced(sample_text(), c.what, c.with), SampleModel::tensors(), "r.jsonl");
    EXPECT_TRUE(fails_with(file, c.message)) << c.what << " -> " << c.with;
  }
  for (const std::string_view order : {R"({"dead":"lm_head)", R"({"fill":"embed)", R"({"alias":"flat")"}) {
    std::string text(sample_text());
    const std::size_t at = text.find(order), end = text.find('\n', at) + 1;
    const std::string line = text.substr(at, end - at);
    text.erase(at, line.size());
    EXPECT_FALSE(read_recording(text, SampleModel::tensors(), "r").ok()) << "without " << line;
    EXPECT_TRUE(fails_with(read_recording(text + line, SampleModel::tensors(), "r"), {"come before"}))
        << line;
  }
  EXPECT_TRUE(fails_with(read_recording("", SampleModel::tensors(), "r"), {"no recording"}));
  EXPECT_TRUE(fails_with(
      read_recording(sample_text().substr(0, sample_text().size() - 1), SampleModel::tensors(), "r"),
      {"last line does not end"}));
}

// Goal: strings, lists and chains are bounded one by one, whatever the file's size.
TEST(RecordingFile, LimitsHold) {
  const auto refuses = [](std::string_view what, const std::string& with,
                          const std::vector<std::string>& message) {
    EXPECT_TRUE(fails_with(read_recording(replaced(sample_text(), what, with), SampleModel::tensors(), "r"),
                           message));
  };
  refuses(R"("Mixed")", '"' + std::string(4097, 'x') + '"', {"r:8", "longer than 4096 bytes"});
  refuses(".view(2, 2)", std::string(65'537, '.'), {"r:18", "longer than 65536 bytes"});
  refuses(R"("initial":"0001020304ff")", R"("initial":")" + std::string(2 * ((1 << 20) + 1), '0') + '"',
          {"r:6", "more than 1048576 bytes"});
  std::string regions = "[";
  for (int i = 0; i < 65; ++i)
    regions += (i > 0 ? "," : "") + std::string("[") + std::to_string(3 * i) + ",[]]";
  refuses(R"([[0,[[20,1]]]])", regions + "]", {"r:20", "more than 64 regions"});
  std::string chain;
  for (int i = 0; i < 257; ++i) chain += ".contiguous()";
  refuses(".view(2, 2)", chain, {"r:18", "more than 256 operations"});
  std::string parameters;
  for (int i = 0; i < 4096; ++i) {
    parameters += R"({"parameter":"p)" + std::to_string(i) +
                  R"(","dtype":"U8","shape":[],"stride":[],"optional":true,"initial":""})" + "\n";
  }
  refuses(R"({"module":"attention")", parameters + R"({"module":"attention")",
          {"r:4099", R"(module "embed" has more than 4096 parameters)"});
  // Parameters of an exabyte whose windows interleave element by element cost no memory.
  refuses(R"("shape":[2,2],"stride":[3,1],"optional":false)",
          R"("shape":[2,288230376151711744],"stride":[1,2],"optional":false)", {"r:9", "too large"});
  refuses(R"("shape":[4,7],"stride":[7,1])", R"("shape":[4,72057594037927936],"stride":[1,4])",
          {"r:10", "experts", "too large"});
  std::string swapped = sample_text();
  const std::size_t second = swapped.find(R"({"fill":"mixed)"), end = swapped.find('\n', second) + 1;
  const std::string line = swapped.substr(second, end - second);
  swapped.erase(second, line.size()).insert(swapped.find(R"({"fill":"embed)"), line);
  EXPECT_TRUE(fails_with(read_recording(swapped, SampleModel::tensors(), "r"),
                         {"r:13", "order of their parameters"}));
}

// Goal: what would take long to check is refused, by name: a million columns of two names, one beside the
// other.
TEST(RecordingFile, RefusesWindowsThatInterleaveTooFinely) {
  const std::vector<TensorMeta> metadata = {{"x", DType::kU8, {1 << 20}}, {"y", DType::kU8, {1 << 20}}};
  TableModel model;
  Parameter* const both = must(model.module("m").add_parameter(
      "both", DType::kU8, {1 << 20, 2},
      [](Parameter& parameter, const Tensor& loaded, const std::string& shard) {
        return must(parameter.data().select(1, shard == "x" ? 0 : 1)).copy_(loaded);
      }));
  model.feed("x", both, "x");
  model.feed("y", both, "y");
  const Recording recording = must(bake(model, metadata));
  EXPECT_TRUE(fails_with(write_recording(recording, metadata, kHeader),
                         {"cannot be written", R"("m.both")", "too finely interleaved"}));
}

// Goal: a damaged or hostile file gives an error, or is a recording whose text is that very file.
TEST(RecordingFile, ThousandsOfDamagedFilesDoNoHarm) {
  const std::vector<TensorMeta> metadata = SampleModel::tensors();
  const std::vector<std::string> words = {"0",
                                          "1",
                                          "9223372036854775807",
                                          "-1",
                                          "[",
                                          "]",
                                          "{",
                                          "}",
                                          "\"",
                                          "\\",
                                          ",",
                                          ":",
                                          "\n",
                                          "true",
                                          ".chunk(1048576, 0)[7]",
                                          ".unbind(0)[0]",
                                          ".t()",
                                          "F4",
                                          "U8",
                                          "[[0,[[4,1]]]]",
                                          "[[1152921504606846976,4],[2,1]]",
                                          "\xff",
                                          "\\u0000"};
  int accepted = 0, refused = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    std::string text(sample_text());
    const std::uint64_t edits = 1 + random.below(3);
    for (std::uint64_t e = 0; e < edits; ++e) {
      const auto at = static_cast<std::size_t>(random.below(text.size()));
      switch (random.below(6)) {
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
        case 4:  // another digit: most often still a number
          for (std::size_t i = at; i < text.size(); ++i) {
            if (text[i] < '0' || text[i] > '9') continue;
            text[i] = static_cast<char>('0' + random.below(10));
            break;
          }
          break;
        default: {  // two lines change places
          const std::size_t line = text.rfind('\n', at) + 1;
          const std::size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
          const std::string moved = text.substr(line, end - line);
          text.erase(line, moved.size());
          text.insert(text.find('\n', random.below(text.size() + 1)) + 1, moved);
        }
      }
      if (text.empty()) text = "\n";
    }
    const auto file = read_recording(text, metadata, "fuzz");
    if (!file.ok()) {
      EXPECT_FALSE(file.status().message().empty());
      ++refused;
      continue;
    }
    ++accepted;
    EXPECT_EQ(must(write_recording(file->recording, metadata, file->header)), text) << "seed " << seed;
    EXPECT_TRUE(model_of(file->recording, metadata).ok()) << "seed " << seed;
  }
  EXPECT_GT(refused, 2000);
  EXPECT_GT(accepted, 20);  // edits of a type, a reason, an offset that fits
}

}  // namespace
}  // namespace shardpull
