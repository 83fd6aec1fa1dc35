#include "checkpoint/checkpoint.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint_testing.h"

namespace shardpull {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::as_bytes;
using testing::counting_bytes;
using testing::TemporaryDirectory;
using testing::write_file;

struct Tensor {
  std::string name;
  std::string bytes;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape = {};  // empty: [bytes]
};

class CheckpointTest : public ::testing::Test {
 protected:
  std::filesystem::path dir() const { return directory_.path(); }

  void write_shard(const std::string& file, const std::vector<Tensor>& tensors) {
    std::vector<TensorMeta> metas;
    for (const Tensor& tensor : tensors) {
      metas.push_back({tensor.name, tensor.dtype,
                       tensor.shape.empty() ? std::vector<std::int64_t>{static_cast<std::int64_t>(tensor.bytes.size())} : tensor.shape});
    }
    auto writer = SafetensorsWriter::create(dir() / file, metas);
    ASSERT_TRUE(writer.ok()) << writer.status().to_string();
    for (const Tensor& tensor : tensors) ASSERT_TRUE(writer->append(tensor.name, as_bytes(tensor.bytes)).ok());
    ASSERT_TRUE(writer->finish().ok());
  }

  // `entries`: "name", "file" in turn.
  void write_index(const std::vector<std::pair<std::string, std::string>>& entries) {
    std::string text = R"({"metadata":{"total_size":1},"weight_map":{)";
    for (std::size_t i = 0; i < entries.size(); ++i) {
      text += (i == 0 ? "\"" : ",\"") + entries[i].first + "\":\"" + entries[i].second + "\"";
    }
    write_file(dir() / "model.safetensors.index.json", text + "}}");
  }

  std::string refusal() {
    const auto checkpoint = Checkpoint::open(dir());
    return checkpoint.ok() ? "" : checkpoint.status().message();
  }

  static std::string content(const Checkpoint& checkpoint, std::string_view name) {
    const auto tensor = checkpoint.find(name);
    if (!tensor) return "(absent)";
    std::string out(checkpoint.bytes(*tensor), '\0');
    EXPECT_TRUE(checkpoint.read(name, reinterpret_cast<std::byte*>(out.data())).ok());
    return out;
  }

 private:
  TemporaryDirectory directory_;
};

TEST_F(CheckpointTest, SingleFileSortedByName) {
  write_shard("model.safetensors", {{"b.10", "10"}, {"b.2", "2"}, {"a", "a"}});
  const auto checkpoint = Checkpoint::open(dir());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
  ASSERT_EQ(checkpoint->tensors().size(), 3u);
  EXPECT_EQ(checkpoint->tensors()[0].name, "a");
  EXPECT_EQ(checkpoint->tensors()[1].name, "b.10");
  EXPECT_EQ(checkpoint->tensors()[2].name, "b.2");
  EXPECT_EQ(content(*checkpoint, "b.10"), "10");
  EXPECT_EQ(checkpoint->total_bytes(), 4u);
  EXPECT_THAT(checkpoint->notes(), IsEmpty());
  EXPECT_EQ(checkpoint->read("x", nullptr).code(), StatusCode::kNotFound);
}

// Goal: the same path with new content is new bytes, in the same process: whether a checkpoint that is open
// is written to in place or the directory is opened again, and though the files' sizes and times are the
// same.
TEST_F(CheckpointTest, case_101_files_rewritten_in_place) {
  write_shard("model.safetensors", {{"a", "old bytes of a"}, {"b", "old bytes of b"}});
  const auto path = dir() / "model.safetensors";
  const auto time = std::filesystem::last_write_time(path);
  const auto before = Checkpoint::open(dir());
  ASSERT_TRUE(before.ok()) << before.status().to_string();
  EXPECT_EQ(content(*before, "b"), "old bytes of b");
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t at = text.find("old bytes of b");
  ASSERT_NE(at, std::string::npos);
  file.seekp(static_cast<std::streamoff>(at));
  file << "new" << std::flush;
  std::filesystem::last_write_time(path, time);
  EXPECT_EQ(content(*before, "b"), "new bytes of b");
  const auto after = Checkpoint::open(dir());
  ASSERT_TRUE(after.ok()) << after.status().to_string();
  EXPECT_EQ(content(*after, "a"), "old bytes of a");
  EXPECT_EQ(content(*after, "b"), "new bytes of b");
}

TEST_F(CheckpointTest, NamesWhatIsNoCheckpoint) {
  EXPECT_THAT(Checkpoint::open(dir() / "none").status().message(), HasSubstr("no such directory"));
  EXPECT_EQ(Checkpoint::open(dir() / "none").status().code(), StatusCode::kNotFound);
  EXPECT_THAT(refusal(), HasSubstr("no safetensors file"));
  write_file(dir() / "pytorch_model.bin", "x");
  EXPECT_THAT(refusal(), HasSubstr("pytorch_model.bin"));
  EXPECT_THAT(Checkpoint::open(dir() / "pytorch_model.bin").status().message(), HasSubstr("is a directory, this is a file"));
  write_shard("model.safetensors", {});
  EXPECT_THAT(refusal(), HasSubstr("holds no tensor"));
}

// Goal: nothing is remembered of a path.
TEST_F(CheckpointTest, ReopenedPathGivesNewContent) {
  write_shard("model.safetensors", {{"a", "old"}});
  const auto before = Checkpoint::open(dir());
  ASSERT_TRUE(before.ok());
  write_shard("model.safetensors", {{"a", "newer"}});
  const auto after = Checkpoint::open(dir());
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(content(*before, "a"), "old");
  EXPECT_EQ(content(*after, "a"), "newer");
}

TEST_F(CheckpointTest, case_066_missing_shards) {
  const std::vector<std::string> files = {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                          "model-00003-of-00003.safetensors"};
  for (std::size_t i = 0; i < 3; ++i) write_shard(files[i], {{std::string(1, static_cast<char>('a' + i)), "x"}});
  // Without an index the numbers in the names say what is missing.
  std::filesystem::remove(dir() / files[1]);
  EXPECT_THAT(refusal(), AllOf(HasSubstr("missing"), HasSubstr(files[1]), Not(HasSubstr(files[0]))));

  write_index({{"a", files[0]}, {"b", files[1]}, {"c", files[2]}});
  EXPECT_THAT(refusal(), AllOf(HasSubstr("1 of 3"), HasSubstr(files[1] + " (missing)")));
  std::filesystem::remove(dir() / files[2]);
  EXPECT_THAT(refusal(), AllOf(HasSubstr("2 of 3"), HasSubstr(files[1]), HasSubstr(files[2])));
  write_file(dir() / files[1], "");
  std::filesystem::create_symlink("../blobs/0123", dir() / files[2]);
  EXPECT_THAT(refusal(), AllOf(HasSubstr(files[1] + " (empty (0 bytes))"),
                               HasSubstr(files[2] + " (a dangling symbolic link to ../blobs/0123)")));
  std::filesystem::remove(dir() / files[1]);
  std::filesystem::create_directory(dir() / files[1]);
  EXPECT_THAT(refusal(), HasSubstr(files[1] + " (a directory)"));
}

TEST_F(CheckpointTest, case_067_tensors_that_the_index_leaves_out) {
  write_shard("model-00001-of-00001.safetensors", {{"a", "a"}, {"also.not.indexed", "b"}});
  write_shard("mtp.safetensors", {{"mtp.fc.weight", counting_bytes(64 * 128 * 2), DType::kBF16, {64, 128}}});
  write_index({{"a", "model-00001-of-00001.safetensors"}});
  auto checkpoint = Checkpoint::open(dir());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
  EXPECT_EQ(content(*checkpoint, "mtp.fc.weight"), counting_bytes(64 * 128 * 2));
  EXPECT_TRUE(checkpoint->indexed(*checkpoint->find("a")));
  EXPECT_FALSE(checkpoint->indexed(*checkpoint->find("mtp.fc.weight")));
  EXPECT_FALSE(checkpoint->indexed(*checkpoint->find("also.not.indexed")));
  EXPECT_THAT(checkpoint->notes(), Contains(AllOf(HasSubstr("mtp.safetensors"), HasSubstr("mtp.fc.weight"))));
  EXPECT_THAT(checkpoint->notes(), Contains(HasSubstr("also.not.indexed")));

  write_index({});
  checkpoint = Checkpoint::open(dir());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
  EXPECT_EQ(content(*checkpoint, "a"), "a");
  EXPECT_THAT(checkpoint->notes(), Contains(HasSubstr("lists no tensor")));

  // The other way round: an index that lists what no file holds.
  write_index({{"a", "model-00001-of-00001.safetensors"}, {"ghost", "mtp.safetensors"}});
  EXPECT_THAT(refusal(), AllOf(HasSubstr("\"ghost\""), HasSubstr("mtp.safetensors")));
  // A tensor that only another file than the assigned one holds is not taken from there.
  write_index({{"a", "mtp.safetensors"}});
  EXPECT_THAT(refusal(), HasSubstr("\"a\" (in mtp.safetensors)"));
  // A broken file that the index does not promise is reported, and costs nothing else.
  write_index({{"a", "model-00001-of-00001.safetensors"}});
  write_file(dir() / "mtp.safetensors", "short");
  checkpoint = Checkpoint::open(dir());
  ASSERT_TRUE(checkpoint.ok());
  EXPECT_THAT(checkpoint->notes(), Contains(AllOf(HasSubstr("mtp.safetensors"), HasSubstr("truncated"))));
}

TEST_F(CheckpointTest, case_068_consolidated_file_is_ignored) {
  write_shard("consolidated.safetensors", {{"layers.0.attention.wq.weight", "vendor"}, {"a", "vendor"}});
  write_shard("model-00001-of-00001.safetensors", {{"a", "hf"}});
  write_index({{"a", "model-00001-of-00001.safetensors"}});
  for (int round = 0; round < 2; ++round) {
    const auto checkpoint = Checkpoint::open(dir());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
    EXPECT_EQ(checkpoint->tensors().size(), 1u);
    EXPECT_EQ(content(*checkpoint, "a"), "hf");
    EXPECT_THAT(checkpoint->notes(), Contains(AllOf(HasSubstr("consolidated.safetensors"), HasSubstr("ignored"))));
    std::filesystem::remove(dir() / "model.safetensors.index.json");  // the second round has none
  }
  std::filesystem::remove(dir() / "model-00001-of-00001.safetensors");
  const auto alone = Checkpoint::open(dir());
  ASSERT_TRUE(alone.ok());
  EXPECT_EQ(content(*alone, "a"), "vendor");
}

TEST_F(CheckpointTest, case_069_tensor_in_two_shards) {
  for (const bool swapped : {false, true}) {
    const std::string one = swapped ? "z.safetensors" : "a.safetensors";
    const std::string two = swapped ? "a.safetensors" : "z.safetensors";
    write_shard(one, {{"X", "1111"}});
    write_shard(two, {{"X", "2222"}, {"Y", "y"}});
    write_index({{"X", one}, {"Y", two}});
    const auto checkpoint = Checkpoint::open(dir());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
    EXPECT_EQ(content(*checkpoint, "X"), "1111");
    EXPECT_EQ(checkpoint->file(*checkpoint->find("X")), dir() / one);
    EXPECT_THAT(checkpoint->notes(), Contains(AllOf(HasSubstr(two), HasSubstr("X (from " + one + ")"))));
    std::filesystem::remove(dir() / "model.safetensors.index.json");
    EXPECT_THAT(refusal(), AllOf(HasSubstr("duplicate name"), HasSubstr("\"X\""), HasSubstr(one), HasSubstr(two)));
    write_index({{"Y", two}});
    EXPECT_THAT(refusal(), AllOf(HasSubstr("\"X\""), HasSubstr("nothing decides")));
  }
}

TEST_F(CheckpointTest, case_070_duplicate_key_in_index) {
  write_shard("a.safetensors", {{"X", "1"}});
  write_shard("b.safetensors", {{"X", "2"}});
  write_index({{"X", "a.safetensors"}, {"X", "b.safetensors"}});
  EXPECT_THAT(refusal(), AllOf(HasSubstr("\"X\""), HasSubstr("duplicate name")));
}

TEST_F(CheckpointTest, RefusesBadIndexes) {
  write_shard("a.safetensors", {{"X", "1"}});
  const auto index = [&](std::string_view text) {
    write_file(dir() / "model.safetensors.index.json", text);
    return refusal();
  };
  EXPECT_THAT(index(""), HasSubstr("empty"));
  EXPECT_THAT(index("{"), HasSubstr("invalid JSON"));
  EXPECT_THAT(index("[]"), HasSubstr("weight_map"));
  EXPECT_THAT(index(R"({"weight_map":[]})"), HasSubstr("weight_map"));
  EXPECT_THAT(index(R"({"weight_map":{"X":1}})"), AllOf(HasSubstr("\"X\""), HasSubstr("file names")));
  EXPECT_THAT(index(R"({"weight_map":{"X":"../a.safetensors"}})"), HasSubstr("not the name of a file"));
  EXPECT_THAT(index(R"({"weight_map":{"X":""}})"), HasSubstr("not the name of a file"));
  EXPECT_THAT(index(std::string(100, '[')), HasSubstr("nested"));
  EXPECT_THAT(index("{\"weight_map\":{\"\xFF\":\"a.safetensors\"}}"), HasSubstr("invalid UTF-8"));
  EXPECT_EQ(index(R"({"metadata":{"total_size":1,"x":[{}]},"other":null,"weight_map":{"X":"a.safetensors"}})"), "");
}

// Goal: no change of one byte of the index crashes, and what is accepted has every tensor it promises.
TEST_F(CheckpointTest, SurvivesEveryChangedByteOfTheIndex) {
  write_shard("a.safetensors", {{"X", "1"}, {"Y", "2"}});
  write_index({{"X", "a.safetensors"}, {"Y", "a.safetensors"}});
  const auto path = dir() / "model.safetensors.index.json";
  const std::string good = testing::read_file(path);
  ASSERT_EQ(refusal(), "");
  for (std::size_t cut = 0; cut < good.size(); ++cut) {
    write_file(path, good.substr(0, cut));
    EXPECT_NE(refusal(), "") << "cut at " << cut;
  }
  for (std::size_t at = 0; at < good.size(); ++at) {
    for (const char with : {'\0', '"', '{', '[', '/', ',', '\\', '\xFF'}) {
      std::string changed = good;
      changed[at] = with;
      write_file(path, changed);
      const auto checkpoint = Checkpoint::open(dir());
      EXPECT_TRUE(!checkpoint.ok() || content(*checkpoint, "X") + content(*checkpoint, "Y") == "12") << at;
    }
  }
}

// Goal: the same verdict and message for a broken file, whoever opens it.
TEST_F(CheckpointTest, case_073_same_verdict_from_every_path) {
  write_shard("model.safetensors", {{"X", "1"}});
  std::string bytes = testing::read_file(dir() / "model.safetensors") + std::string(7, '\0');
  write_file(dir() / "model.safetensors", bytes);
  const std::string direct = SafetensorsFile::open(dir() / "model.safetensors").status().message();
  EXPECT_THAT(direct, HasSubstr("trailing bytes"));
  EXPECT_EQ(refusal(), direct);
  write_index({{"X", "model.safetensors"}});
  EXPECT_EQ(refusal(), direct);
}

TEST_F(CheckpointTest, case_083_integer_and_boolean_maps) {
  write_shard("model.safetensors", {{"d2t", counting_bytes(256), DType::kI64, {32}},
                                    {"t2d", counting_bytes(100), DType::kBool, {100}},
                                    {"draft.lm_head.weight", counting_bytes(4096), DType::kBF16, {32, 64}}});
  const auto checkpoint = Checkpoint::open(dir());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
  EXPECT_EQ(checkpoint->tensors()[*checkpoint->find("d2t")].dtype, DType::kI64);
  EXPECT_EQ(checkpoint->tensors()[*checkpoint->find("t2d")].dtype, DType::kBool);
  EXPECT_EQ(content(*checkpoint, "t2d"), counting_bytes(100));
}

}  // namespace
}  // namespace shardpull
