#include "checkpoint/safetensors.h"

#include <unistd.h>

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint_testing.h"
#include "shardpull/slice.h"

namespace shardpull {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::as_bytes;
using testing::as_text;
using testing::counting_bytes;
using testing::raw_safetensors;
using testing::read_file;
using testing::TemporaryDirectory;
using testing::write_file;

class SafetensorsTest : public ::testing::Test {
 protected:
  std::filesystem::path path() const { return directory_.path() / "f.safetensors"; }
  Result<SafetensorsFile> open_bytes(std::string_view bytes) {
    write_file(path(), bytes);
    return SafetensorsFile::open(path());
  }
  Result<SafetensorsFile> open(std::string_view header, std::string_view data) {
    return open_bytes(raw_safetensors(header, data));
  }
  // The message of the refusal; "" when the file was accepted.
  std::string refusal(std::string_view header, std::string_view data) { return refusal_of(raw_safetensors(header, data)); }
  std::string refusal_of(std::string_view bytes) {
    const auto file = open_bytes(bytes);
    if (file.ok()) return "";
    EXPECT_EQ(file.status().info().reason, Reason::kCheckpointMalformed) << file.status().to_string();
    EXPECT_THAT(file.status().message(), HasSubstr(path().native()));
    return file.status().message();
  }
  std::string content(const SafetensorsFile& file, std::string_view name) {
    std::string out(file.bytes(*file.find(name)), '\0');
    EXPECT_TRUE(file.read(name, reinterpret_cast<std::byte*>(out.data())).ok());
    const std::size_t tensor = *file.find(name);
    EXPECT_EQ(out, as_text({file.data(tensor), file.bytes(tensor)}));
    return out;
  }

 private:
  TemporaryDirectory directory_;
};

// Goal: names, dtypes, shapes and both ways to the bytes, on a file whose header is not in offset order.
TEST_F(SafetensorsTest, ReadsNamesShapesAndBytes) {
  const auto file = open(R"({"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[8,16]},)"
                         R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  )",
                         counting_bytes(16));
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const std::vector<TensorMeta> expected = {{"a", DType::kF32, {2}}, {"b", DType::kBF16, {2, 2}}};
  EXPECT_EQ(file->tensors(), expected);
  EXPECT_EQ(content(*file, "a"), counting_bytes(16).substr(0, 8));
  EXPECT_EQ(content(*file, "b"), counting_bytes(16).substr(8));
  EXPECT_FALSE(file->find("c").has_value());
  std::byte two[2];
  EXPECT_TRUE(file->read(1, 3, two).ok());
  EXPECT_EQ(two[0], std::byte{11});
  EXPECT_EQ(file->read(1, 7, two).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(file->read("c", two).code(), StatusCode::kNotFound);
}

TEST_F(SafetensorsTest, NamesWhatIsNoFile) {
  EXPECT_EQ(SafetensorsFile::open(path()).status().code(), StatusCode::kNotFound);
  EXPECT_THAT(SafetensorsFile::open(path().parent_path()).status().message(), HasSubstr("a directory"));
  std::filesystem::create_symlink("nowhere", path());
  EXPECT_THAT(SafetensorsFile::open(path()).status().message(), HasSubstr("dangling symbolic link to nowhere"));
}

// Goal: every dtype of the format is known by its name, with its size; F4 counts logical elements.
TEST_F(SafetensorsTest, case_028_every_dtype) {
  const std::vector<std::pair<std::string, int>> bits = {
      {"BOOL", 8},    {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
      {"I16", 16},    {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},    {"U32", 32},
      {"F32", 32},    {"F64", 64}, {"I64", 64}, {"U64", 64},    {"C64", 64},    {"F4", 4}};
  for (const auto& [name, size] : bits) {
    const int bytes = 6 * size / 8;
    const auto file = open(R"({"t":{"dtype":")" + name + R"(","shape":[1,6],"data_offsets":[0,)" + std::to_string(bytes) + "]}}",
                           counting_bytes(static_cast<std::size_t>(bytes)));
    ASSERT_TRUE(file.ok()) << name << ": " << file.status().to_string();
    EXPECT_EQ(dtype_name(file->tensors()[0].dtype), name);
  }
  EXPECT_THAT(refusal(R"({"t":{"dtype":"F4","shape":[2,7],"data_offsets":[0,7]}})", counting_bytes(7)),
              AllOf(HasSubstr("\"t\""), HasSubstr("whole bytes")));
  EXPECT_THAT(refusal(R"({"t":{"dtype":"F4","shape":[],"data_offsets":[0,0]}})", ""), HasSubstr("whole bytes"));
  EXPECT_THAT(refusal(R"({"t":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})", counting_bytes(3)),
              AllOf(HasSubstr("\"t\""), HasSubstr("unknown dtype \"F6_E2M3\"")));
}

TEST_F(SafetensorsTest, case_070_duplicate_name_in_header) {
  const std::string message = refusal(R"({"A":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                      R"("A":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
                                      counting_bytes(16));
  EXPECT_THAT(message, AllOf(HasSubstr("duplicate name"), HasSubstr("\"A\"")));
  EXPECT_THAT(refusal(R"({"A":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", counting_bytes(8)),
              HasSubstr("duplicate name"));
  EXPECT_THAT(refusal(R"({"__metadata__":{},"__metadata__":{}})", ""), HasSubstr("duplicate name"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"k":"1","k":"2"}})", ""), HasSubstr("duplicate name"));
}

TEST_F(SafetensorsTest, case_071_two_names_for_the_same_bytes) {
  const std::string message = refusal(R"({"embed":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]},)"
                                      R"("head":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}})",
                                      counting_bytes(64));
  EXPECT_THAT(message, AllOf(HasSubstr("overlap"), HasSubstr("\"embed\""), HasSubstr("\"head\""),
                             HasSubstr("tie_word_embeddings")));
}

TEST_F(SafetensorsTest, case_072_layout_of_the_data) {
  const auto header = [](int a, int b, int c) {
    const auto entry = [](const char* name, int begin) {
      return std::string("\"") + name + R"(":{"dtype":"F32","shape":[4],"data_offsets":[)" + std::to_string(begin) + "," +
             std::to_string(begin + 16) + "]}";
    };
    return "{" + entry("z", a) + "," + entry("y", b) + "," + entry("x", c) + "}";
  };
  EXPECT_EQ(refusal(header(0, 16, 32), counting_bytes(48)), "");
  EXPECT_EQ(refusal(header(32, 16, 0), counting_bytes(48)), "") << "the header's order is free";
  EXPECT_THAT(refusal(header(0, 16, 48), counting_bytes(64)), AllOf(HasSubstr("hole"), HasSubstr("\"x\""), HasSubstr("[32, 48)")));
  EXPECT_THAT(refusal(header(16, 32, 48), counting_bytes(64)), AllOf(HasSubstr("hole"), HasSubstr("\"z\"")));
  EXPECT_THAT(refusal(header(0, 12, 28), counting_bytes(44)), AllOf(HasSubstr("overlap"), HasSubstr("\"y\""), HasSubstr("\"z\"")));
}

TEST_F(SafetensorsTest, case_073_trailing_bytes) {
  const std::string good = raw_safetensors(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", counting_bytes(8));
  EXPECT_EQ(refusal_of(good), "");
  EXPECT_THAT(refusal_of(good + std::string(7, '\0')), AllOf(HasSubstr("trailing bytes"), HasSubstr("7 bytes")));
  EXPECT_THAT(refusal("{}", "x"), HasSubstr("trailing bytes"));
}

TEST_F(SafetensorsTest, case_074_offsets_and_shapes) {
  const auto message = [&](std::string_view shape, std::string_view offsets) {
    return refusal(R"({"t":{"dtype":"F32","shape":)" + std::string(shape) + R"(,"data_offsets":)" + std::string(offsets) + "}}",
                   counting_bytes(8));
  };
  EXPECT_EQ(message("[2]", "[0,8]"), "");
  EXPECT_THAT(message("[1000,1000]", "[0,4]"), AllOf(HasSubstr("\"t\""), HasSubstr("size mismatch"), HasSubstr("4000000")));
  EXPECT_THAT(message("[2]", "[8,0]"), HasSubstr("reversed"));
  EXPECT_THAT(message("[2]", "[0,9223372036854775808]"), HasSubstr("size mismatch"));
  EXPECT_THAT(message("[2]", "[0,18446744073709551616]"), HasSubstr("not a 64-bit integer"));
  EXPECT_THAT(message("[4294967296,4294967296,4294967296]", "[0,8]"), HasSubstr("overflows"));
  EXPECT_THAT(message("[0,4294967296,4294967296]", "[0,0]"), HasSubstr("overflows"));
  EXPECT_THAT(message("[2305843009213693952]", "[0,9223372036854775808]"), HasSubstr("overflows"));
  EXPECT_THAT(message("[9223372036854775808]", "[0,8]"), HasSubstr("overflows"));
  EXPECT_THAT(message("[-2]", "[0,8]"), HasSubstr("negative dim"));
  EXPECT_THAT(message("[-0]", "[0,8]"), HasSubstr("negative dim"));
  EXPECT_THAT(message("[2]", "[-8,0]"), HasSubstr("negative data offset"));
  EXPECT_THAT(message("[2.0]", "[0,8]"), HasSubstr("not a 64-bit integer"));
  EXPECT_THAT(message("[2]", "[0,8e0]"), HasSubstr("not a 64-bit integer"));
  EXPECT_THAT(message("[2]", "[0]"), HasSubstr("1 numbers instead of 2"));
  EXPECT_THAT(message("[2]", "[0,8,8]"), HasSubstr("3 numbers instead of 2"));
  EXPECT_THAT(message("[2]", "8"), HasSubstr("must be an array"));
  EXPECT_THAT(message("\"2\"", "[0,8]"), HasSubstr("must be an array"));
  EXPECT_THAT(message("[[2]]", "[0,8]"), HasSubstr("must hold integers"));
  EXPECT_THAT(message("null", "[0,8]"), HasSubstr("must be an array"));
  EXPECT_THAT(message("[2]", "[0,true]"), HasSubstr("must hold integers"));
  EXPECT_THAT(message("[20]", "[0,80]"), HasSubstr("beyond the end of the file"));
  // The dims themselves are bounded.
  const auto dims = open(R"({"t":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]}})", counting_bytes(8));
  EXPECT_EQ(dims.status().info().reason, Reason::kLimit);
}

// Goal: a file that announces a giant header costs no memory, and the message says what the file probably is.
TEST_F(SafetensorsTest, case_075_header_too_large) {
  const auto resident_kib = [] {
    long pages = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> pages >> resident;
    return resident * (::sysconf(_SC_PAGESIZE) / 1024);
  };
  const long before = resident_kib();
  const auto prefix = [](std::uint64_t length) { return std::string(reinterpret_cast<const char*>(&length), 8); };

  write_file(path(), prefix(100'000'001));
  std::filesystem::resize_file(path(), 200'000'000);  // sparse
  EXPECT_THAT(SafetensorsFile::open(path()).status().message(),
              AllOf(HasSubstr("header too large"), HasSubstr("100000001"), HasSubstr("100000000")));
  EXPECT_THAT(refusal_of(prefix(~0ull) + "{}"), AllOf(HasSubstr("header too large"), HasSubstr("18446744073709551615")));
  EXPECT_THAT(refusal_of("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 999\n"),
              AllOf(HasSubstr("Git LFS pointer"), HasSubstr("git lfs pull")));
  EXPECT_THAT(refusal_of("this is a read-me, not a model\n"), HasSubstr("text file"));
  EXPECT_THAT(refusal_of("<!DOCTYPE html><html>404</html>"), HasSubstr("HTML"));
  EXPECT_THAT(refusal_of("PK\x03\x04\x14\x14\x08\x08 and so on"), HasSubstr("zip"));
  // At the limit: believed, and then found to be longer than the file.
  EXPECT_THAT(refusal_of(prefix(100'000'000) + "{"), AllOf(HasSubstr("truncated"), HasSubstr("100000008"), HasSubstr("has 9")));
  // A sparse file that has the bytes but no JSON in them.
  write_file(path(), prefix(50'000'000) + "{");
  std::filesystem::resize_file(path(), 60'000'000);
  EXPECT_THAT(SafetensorsFile::open(path()).status().message(), HasSubstr("control character"));
  EXPECT_LT(resident_kib() - before, 64 * 1024);

  SafetensorsLimits limits;
  limits.max_header_bytes = 16;
  write_file(path(), raw_safetensors(R"({"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", ""));
  const auto limited = SafetensorsFile::open(path(), limits);
  EXPECT_EQ(limited.status().info().reason, Reason::kLimit);
  limits = {};
  limits.max_tensors = 0;
  EXPECT_EQ(SafetensorsFile::open(path(), limits).status().info().reason, Reason::kLimit);
}

TEST_F(SafetensorsTest, case_076_truncated) {
  const std::string good =
      raw_safetensors(R"({"t":{"dtype":"U8","shape":[4000],"data_offsets":[0,4000]}})", counting_bytes(4000));
  EXPECT_EQ(refusal_of(good), "");
  EXPECT_THAT(refusal_of(""), AllOf(HasSubstr("truncated"), HasSubstr("has 0")));
  EXPECT_THAT(refusal_of(good.substr(0, 5)), AllOf(HasSubstr("truncated"), HasSubstr("has 5")));
  EXPECT_THAT(refusal_of(good.substr(0, 30)), AllOf(HasSubstr("truncated"), HasSubstr("has 30")));
  EXPECT_THAT(refusal_of(good.substr(0, good.size() - 1)),
              AllOf(HasSubstr("truncated"), HasSubstr("expected " + std::to_string(good.size())),
                    HasSubstr("has " + std::to_string(good.size() - 1))));

  // Cut while it is open: a clean error of read(), for the part that is gone.
  auto file = open_bytes(good);
  ASSERT_TRUE(file.ok());
  std::filesystem::resize_file(path(), good.size() - 100);
  std::vector<std::byte> out(4000);
  const Status status = file->read("t", out.data());
  EXPECT_EQ(status.info().reason, Reason::kCheckpointMalformed);
  EXPECT_EQ(status.info().tensor, "t");
  EXPECT_THAT(status.message(), AllOf(HasSubstr("truncated"), HasSubstr("expected " + std::to_string(good.size())),
                                      HasSubstr("has " + std::to_string(good.size() - 100))));
  EXPECT_TRUE(file->read(0, 0, std::span(out.data(), 3900)).ok());
}

TEST_F(SafetensorsTest, case_077_zero_size_tensors) {
  const auto file = open(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                         R"("scaled_fp8":{"dtype":"F32","shape":[0],"data_offsets":[8,8]},)"
                         R"("e":{"dtype":"BF16","shape":[0,64],"data_offsets":[16,16]},)"
                         R"("b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
                         counting_bytes(16));
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(content(*file, "scaled_fp8"), "");
  EXPECT_EQ(content(*file, "b"), counting_bytes(16).substr(8));
  EXPECT_THAT(refusal(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,0]}})", ""), HasSubstr("size mismatch"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                      R"("e":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})",
                      counting_bytes(8)),
              HasSubstr("overlap"));
}

TEST_F(SafetensorsTest, case_078_unaligned_data) {
  std::string header = R"({"u":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"f":{"dtype":"F32","shape":[5],"data_offsets":[3,23]},)"
                       R"("i":{"dtype":"I64","shape":[1],"data_offsets":[23,31]}})";
  header.resize(0x4A6, ' ');
  const auto file = open(header, counting_bytes(31));
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(file->file_offset(*file->find("f")), 8u + 0x4A6 + 3);
  EXPECT_EQ(content(*file, "f"), counting_bytes(31).substr(3, 20));
  EXPECT_EQ(content(*file, "i"), counting_bytes(31).substr(23));
}

TEST_F(SafetensorsTest, case_080_metadata) {
  const auto with = [&](std::string_view metadata) {
    return "{" + std::string(metadata) + R"("t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  };
  EXPECT_EQ(refusal(with(""), "x"), "");
  EXPECT_EQ(refusal(with(R"("__metadata__":{},)"), "x"), "");
  const auto rich = open(with(R"("__metadata__":{"format":"pt","e":"é"},)"), "x");
  ASSERT_TRUE(rich.ok());
  EXPECT_EQ(rich->metadata().at("format"), "pt");
  EXPECT_EQ(rich->metadata().at("e"), "é");
  EXPECT_EQ(rich->tensors().size(), 1u);
  EXPECT_THAT(refusal(with(R"("__metadata__":{"n":0},)"), "x"), AllOf(HasSubstr("__metadata__"), HasSubstr("\"n\""), HasSubstr("number 0")));
  EXPECT_THAT(refusal(with(R"("__metadata__":{"n":null},)"), "x"), HasSubstr("null"));
  EXPECT_THAT(refusal(with(R"("__metadata__":null,)"), "x"), AllOf(HasSubstr("__metadata__"), HasSubstr("null")));
  EXPECT_THAT(refusal(with(R"("__metadata__":[],)"), "x"), HasSubstr("an array"));
  EXPECT_EQ(refusal(R"({"__metadata__":{"format":"pt"}})", ""), "") << "metadata without tensors";
  EXPECT_EQ(refusal("{}", ""), "");
}

TEST_F(SafetensorsTest, case_081_reserved_name) {
  EXPECT_THAT(refusal(R"({"__metadata__":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})", counting_bytes(8)),
              AllOf(HasSubstr("__metadata__"), HasSubstr("reserved")));
  EXPECT_EQ(refusal(R"({"__metadata___":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})", counting_bytes(8)), "");
  const auto writer = SafetensorsWriter::create(path(), {{"__metadata__", DType::kI32, {2}}});
  EXPECT_THAT(writer.status().message(), HasSubstr("reserved"));
}

TEST_F(SafetensorsTest, case_082_big_endian_length) {
  std::string bytes = raw_safetensors(R"({"t":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}})", "\x80\x3F");
  const auto file = open_bytes(bytes);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(content(*file, "t"), "\x80\x3F") << "BF16 one, low byte first";
  std::reverse(bytes.begin(), bytes.begin() + 8);
  EXPECT_THAT(refusal_of(bytes), AllOf(HasSubstr("header too large"), HasSubstr("big-endian")));
}

TEST_F(SafetensorsTest, case_084_names_are_utf8) {
  const std::vector<std::string> names = {"слой.вес", "層.重み", "🙂.weight", "with space", "with/slash", std::string(300, 'n'), ""};
  std::vector<TensorMeta> tensors;
  for (const auto& name : names) tensors.push_back({name, DType::kU8, {1}});
  auto writer = SafetensorsWriter::create(path(), tensors);
  ASSERT_TRUE(writer.ok()) << writer.status().to_string();
  for (std::size_t i = 0; i < names.size(); ++i) ASSERT_TRUE(writer->append(names[i], as_bytes(std::string(1, static_cast<char>(i)))).ok());
  ASSERT_TRUE(writer->finish().ok());
  const auto file = SafetensorsFile::open(path());
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(content(*file, names[i]), std::string(1, static_cast<char>(i)));

  const auto entry = [](std::string_view name) {
    return "{\"" + std::string(name) + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  };
  const auto escaped = open(entry(R"(\u0441\u043b\u043e\u0439 \ud83d\ude42)"), "x");
  ASSERT_TRUE(escaped.ok()) << escaped.status().to_string();
  EXPECT_EQ(escaped->tensors()[0].name, "слой 🙂");

  EXPECT_THAT(refusal(entry("a\xFF"), "x"), AllOf(HasSubstr("invalid UTF-8"), HasSubstr("0xff")));
  EXPECT_THAT(refusal(entry("\xC0\x80"), "x"), HasSubstr("invalid UTF-8"));
  EXPECT_THAT(refusal(entry("\xED\xA0\x80"), "x"), HasSubstr("invalid UTF-8"));
  EXPECT_THAT(refusal(entry("\xF4\x90\x80\x80"), "x"), HasSubstr("invalid UTF-8"));
  EXPECT_THAT(refusal(entry(R"(\ud83d)"), "x"), HasSubstr("invalid JSON"));
  EXPECT_EQ(open(entry(std::string(5000, 'n')), "x").status().info().reason, Reason::kLimit);
  EXPECT_EQ(SafetensorsWriter::create(path(), {{"a\xFF", DType::kU8, {1}}}).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(SafetensorsTest, RefusesWhatIsNotAHeader) {
  EXPECT_THAT(refusal("", ""), HasSubstr("cannot hold"));
  EXPECT_THAT(refusal(" {}", ""), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(refusal("[]", ""), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(refusal("{}{}", ""), HasSubstr("invalid JSON"));
  EXPECT_THAT(refusal(std::string_view("{}\0", 3), ""), HasSubstr("control character"));
  EXPECT_EQ(refusal("{} \n\t", ""), "");
  EXPECT_THAT(refusal(R"({"t":1})", ""), AllOf(HasSubstr("\"t\""), HasSubstr("must be an object")));
  EXPECT_THAT(refusal(R"({"t":[]})", ""), HasSubstr("must be an object"));
  EXPECT_THAT(refusal(R"({"t":{}})", ""), HasSubstr("\"dtype\" is missing"));
  EXPECT_THAT(refusal(R"({"t":{"dtype":"U8","shape":[0]}})", ""), HasSubstr("\"data_offsets\" is missing"));
  EXPECT_THAT(refusal(R"({"t":{"dtype":8,"shape":[0],"data_offsets":[0,0]}})", ""), HasSubstr("dtype must be a string"));
  EXPECT_THAT(refusal(R"({"t":{"dtype":{},"shape":[0],"data_offsets":[0,0]}})", ""), HasSubstr("dtype must be a string"));
  EXPECT_THAT(refusal(R"({"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"strides":[1]}})", ""), HasSubstr("unknown key"));
  EXPECT_THAT(refusal(R"({"t":{"dtype":"u8","shape":[0],"data_offsets":[0,0]}})", ""), HasSubstr("unknown dtype"));
}

// Goal: no byte string crashes the reader or is believed by accident. Every prefix of a good file and every single flipped
// bit of its header is opened; what is accepted must still cover the data exactly.
TEST_F(SafetensorsTest, SurvivesEveryCutAndEveryFlippedBit) {
  const std::string good = raw_safetensors(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                                           R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}})",
                                           counting_bytes(32));
  const std::size_t header_end = good.size() - 32;
  ASSERT_EQ(refusal_of(good), "");
  for (std::size_t cut = 0; cut < good.size(); ++cut) EXPECT_NE(refusal_of(good.substr(0, cut)), "") << "cut at " << cut;
  const auto check = [&](const std::string& bytes) {
    const auto file = open_bytes(bytes);
    if (!file.ok()) return;
    std::uint64_t total = 0;
    for (std::size_t t = 0; t < file->tensors().size(); ++t) {
      total += file->bytes(t);
      EXPECT_EQ(*tensor_bytes(file->tensors()[t].dtype, file->tensors()[t].shape), file->bytes(t));
      std::vector<std::byte> out(file->bytes(t));
      EXPECT_TRUE(file->read(t, 0, out).ok());
    }
    EXPECT_LE(total, 32u + header_end);
  };
  for (std::size_t byte = 0; byte < header_end; ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = good;
      flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << bit));
      check(flipped);
    }
  }
  std::mt19937_64 random(20);
  for (int round = 0; round < 3000; ++round) {
    std::string noisy = good;
    for (std::uint64_t n = 1 + random() % 6; n > 0; --n) noisy[random() % header_end] = static_cast<char>(random());
    check(noisy);
  }
}

// --- the writer ---

TEST_F(SafetensorsTest, WriterRoundTrip) {
  auto writer = SafetensorsWriter::create(path(), {{"b", DType::kF32, {2}}, {"empty", DType::kI8, {0}}, {"a", DType::kU8, {3}}},
                                          {{"format", "pt"}, {"quote", "\"\\\n"}});
  ASSERT_TRUE(writer.ok()) << writer.status().to_string();
  EXPECT_FALSE(std::filesystem::exists(path())) << "not under its name before it is whole";
  ASSERT_TRUE(writer->append("b", as_bytes("12345")).ok());
  ASSERT_TRUE(writer->append("b", as_bytes("678")).ok());
  ASSERT_TRUE(writer->append("empty", {}).ok());
  ASSERT_TRUE(writer->append("a", as_bytes("abc")).ok());
  ASSERT_TRUE(writer->finish().ok());
  const auto file = SafetensorsFile::open(path());
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(content(*file, "a"), "abc");
  EXPECT_EQ(content(*file, "b"), "12345678");
  EXPECT_EQ(file->metadata().at("quote"), "\"\\\n");
  EXPECT_EQ(file->file_offset(*file->find("b")) % 8, 0u);
}

TEST_F(SafetensorsTest, WriterRefusesAndLeavesNothingBehind) {
  EXPECT_THAT(SafetensorsWriter::create(path(), {{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}).status().message(),
              HasSubstr("duplicate name"));
  EXPECT_EQ(SafetensorsWriter::create(path(), {{"a", DType::kU8, {-1}}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsWriter::create(path(), {{"a", DType::kF4, {3}}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsWriter::create("/nonexistent/x.safetensors", {}).status().code(), StatusCode::kNotFound);
  write_file(path(), "old");
  {
    auto writer = SafetensorsWriter::create(path(), {{"a", DType::kU8, {2}}, {"b", DType::kU8, {1}}});
    ASSERT_TRUE(writer.ok());
    EXPECT_THAT(writer->append("b", as_bytes("x")).message(), HasSubstr("\"a\" is due"));
    EXPECT_THAT(writer->append("a", as_bytes("xyz")).message(), HasSubstr("size mismatch"));
    EXPECT_THAT(writer->append("c", {}).message(), HasSubstr("not announced"));
    ASSERT_TRUE(writer->append("a", as_bytes("x")).ok());
    const Status unfinished = writer->finish();
    EXPECT_EQ(unfinished.code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(unfinished.info().tensor, "a");
  }
  EXPECT_EQ(read_file(path()), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path().parent_path()), {}), 1);
}

}  // namespace
}  // namespace shardpull
