#include "transport/hot_wire.h"

#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "base/random.h"

namespace shardpull {
namespace {

HotHeader sample_header() {
  HotHeader header;
  header.type = HotType::kPull;
  header.token = 0x1122334455667788;
  header.incarnation = 0x99AABBCCDDEEFF01;
  header.sync_id = 42;
  header.consumer = 7;
  header.target = 1234;
  header.attempt = 3;
  header.run = 2;
  header.lane_kind = 1;
  header.seq = 99;
  header.length = 4096;
  header.sum = 0xDEADBEEFCAFEF00D;
  return header;
}

// Goal: every field survives the way through the bytes, and the layout is the documented one.
TEST(HotHeader, RoundTripsAndHasTheDocumentedLayout) {
  const HotHeader in = sample_header();
  const auto bytes = encode(in);
  const Result<HotHeader> out = decode_hot_header(bytes.data(), bytes.size());
  ASSERT_TRUE(out.ok()) << out.status().to_string();
  EXPECT_EQ(out->type, in.type);
  EXPECT_EQ(out->token, in.token);
  EXPECT_EQ(out->incarnation, in.incarnation);
  EXPECT_EQ(out->sync_id, in.sync_id);
  EXPECT_EQ(out->consumer, in.consumer);
  EXPECT_EQ(out->target, in.target);
  EXPECT_EQ(out->attempt, in.attempt);
  EXPECT_EQ(out->run, in.run);
  EXPECT_EQ(out->lane_kind, in.lane_kind);
  EXPECT_EQ(out->seq, in.seq);
  EXPECT_EQ(out->length, in.length);
  EXPECT_EQ(out->sum, in.sum);

  EXPECT_EQ(std::memcmp(bytes.data(), "SPUL", 4), 0);
  const auto at = [&](std::size_t offset) { return std::to_integer<unsigned>(bytes[offset]); };
  EXPECT_EQ(at(4), kWireVersion);
  EXPECT_EQ(at(6), 3u);
  EXPECT_EQ(at(8), 0x88u);
  EXPECT_EQ(at(16), 0x01u);
  EXPECT_EQ(at(24), 42u);
  EXPECT_EQ(at(32), 7u);
  EXPECT_EQ(at(40), 3u);
  EXPECT_EQ(at(42), 2u);
  EXPECT_EQ(at(44), 1u);
  EXPECT_EQ(at(48), 99u);
  EXPECT_EQ(at(53), 0x10u);
  EXPECT_EQ(at(56), 0x0Du);
}

// Goal: a header cut anywhere is refused, never half believed.
TEST(HotHeader, IsRefusedWhenTruncatedAtAnyByte) {
  const auto bytes = encode(sample_header());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode_hot_header(bytes.data(), size).ok()) << size;
  }
}

// Goal: each rule of the header has its own refusal, in words that name what was wrong.
TEST(HotHeader, RefusesWhatIsNotOurs) {
  const auto with = [](std::size_t offset, std::uint8_t value) {
    auto bytes = encode(sample_header());
    bytes[offset] = std::byte{value};
    return decode_hot_header(bytes.data(), bytes.size()).status();
  };
  EXPECT_NE(with(0, 'H').message().find("not our protocol"), std::string::npos);
  const Status version = with(4, 9);
  EXPECT_EQ(version.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(version.info().reason, Reason::kVersionMismatch);
  EXPECT_NE(version.message().find("wire version 9, this process 1"), std::string::npos) << version.message();
  EXPECT_NE(with(6, 0).message().find("type 0"), std::string::npos);
  EXPECT_NE(with(6, 200).message().find("type 200"), std::string::npos);
  EXPECT_NE(with(44, 2).message().find("lane kind 2"), std::string::npos);
  EXPECT_NE(with(7, 0x80).message().find("flags 0x80"), std::string::npos);
  EXPECT_NE(with(46, 1).message().find("reserved"), std::string::npos);
  EXPECT_EQ(with(55, 0x7F).info().reason, Reason::kLimit);

  HotHeader header = sample_header();
  header.token = 0;
  auto bytes = encode(header);
  EXPECT_FALSE(decode_hot_header(bytes.data(), bytes.size()).ok());
  header = sample_header();
  header.incarnation = 0;
  bytes = encode(header);
  EXPECT_FALSE(decode_hot_header(bytes.data(), bytes.size()).ok());
  header = sample_header();
  header.length = kMaxHotPayloadBytes;
  bytes = encode(header);
  EXPECT_TRUE(decode_hot_header(bytes.data(), bytes.size()).ok());
}

// Goal: whatever bytes arrive, the decoder answers; what it accepts encodes back to the same bytes.
TEST(HotHeader, SurvivesRandomMutations) {
  Random random(20260101);
  for (int round = 0; round < 20'000; ++round) {
    auto bytes = encode(sample_header());
    for (std::uint64_t changes = 1 + random.below(4); changes > 0; --changes) {
      bytes[random.below(bytes.size())] = static_cast<std::byte>(random.below(256));
    }
    const Result<HotHeader> out = decode_hot_header(bytes.data(), bytes.size());
    if (out.ok()) {
      EXPECT_EQ(encode(*out), bytes);
    }
  }
}

ReadyPayload sample_ready() {
  ReadyPayload payload;
  payload.entries = {{.where = {.region = 1, .generation = 2, .offset = 3, .bytes = 4}, .stride = {}},
                     {.where = {.region = 5, .generation = 6, .offset = 1ull << 40, .bytes = ~0ull}, .stride = {128, -1, 0}}};
  payload.sums = {1, ~0ull, 0x123456789ABCDEF0};
  return payload;
}

std::vector<FreeEntry> sample_free() { return {{.consumer = 0, .groups = {0, 1, 7}}, {.consumer = 65535, .groups = {}}}; }

Status sample_status() {
  return Status(StatusCode::kDataLoss, "chunk 7 from trainer 1 is not what was packed",
                {.reason = Reason::kCorrupt, .fault = Fault::kPeer, .retryable = true, .peer = "trainer 1", .tensor = "lm_head.weight"});
}

// Goal: the payloads survive the way through the bytes.
TEST(HotPayloads, RoundTrip) {
  const auto ready_bytes = encode(sample_ready());
  const Result<ReadyPayload> ready = decode_ready(ready_bytes.data(), ready_bytes.size());
  ASSERT_TRUE(ready.ok()) << ready.status().to_string();
  ASSERT_EQ(ready->entries.size(), 2u);
  EXPECT_EQ(ready->entries[1].where, sample_ready().entries[1].where);
  EXPECT_EQ(ready->entries[1].stride, sample_ready().entries[1].stride);
  EXPECT_EQ(ready->sums, sample_ready().sums);

  const auto free_bytes = encode(sample_free());
  const Result<std::vector<FreeEntry>> free = decode_free(free_bytes.data(), free_bytes.size());
  ASSERT_TRUE(free.ok()) << free.status().to_string();
  ASSERT_EQ(free->size(), 2u);
  EXPECT_EQ((*free)[0].groups, sample_free()[0].groups);
  EXPECT_EQ((*free)[1].consumer, 65535u);

  const auto status_bytes = encode(sample_status());
  const Status status = decode_status(status_bytes.data(), status_bytes.size());
  EXPECT_EQ(status, sample_status());
  EXPECT_EQ(status.info().reason, Reason::kCorrupt);
  EXPECT_EQ(status.info().fault, Fault::kPeer);
  EXPECT_TRUE(status.info().retryable);
  EXPECT_EQ(status.info().peer, "trainer 1");
  EXPECT_EQ(status.info().tensor, "lm_head.weight");
}

// Goal: cut anywhere, or with a byte too many, each payload is refused.
TEST(HotPayloads, AreRefusedWhenTruncatedOrTooLong) {
  for (const std::vector<std::byte>& bytes : {encode(sample_ready()), encode(sample_free()), encode(sample_status())}) {
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(decode_ready(bytes.data(), size).ok()) << size;
      EXPECT_FALSE(decode_free(bytes.data(), size).ok()) << size;
      EXPECT_NE(decode_status(bytes.data(), size), sample_status()) << size;
    }
    auto longer = bytes;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(decode_ready(longer.data(), longer.size()).ok());
    EXPECT_FALSE(decode_free(longer.data(), longer.size()).ok());
    EXPECT_NE(decode_status(longer.data(), longer.size()), sample_status());
  }
}

// Goal: a count no bytes can back never makes the decoder reserve memory.
TEST(HotPayloads, RefuseCountsTheBytesCannotHold) {
  std::vector<std::byte> bytes(5, std::byte{0xFF});
  bytes[0] = std::byte{0};
  EXPECT_FALSE(decode_ready(bytes.data(), bytes.size()).ok());
  EXPECT_FALSE(decode_free(bytes.data() + 1, 4).ok());
}

// Goal: values that only a broken or hostile peer sends are refused.
TEST(HotPayloads, RefuseWhatNoPeerOfOursSends) {
  ReadyPayload other_encoding = sample_ready();
  other_encoding.encoding = 1;
  auto bytes = encode(other_encoding);
  EXPECT_FALSE(decode_ready(bytes.data(), bytes.size()).ok());

  ReadyPayload many_dims = sample_ready();
  many_dims.entries[0].stride.assign(9, 1);
  bytes = encode(many_dims);
  EXPECT_FALSE(decode_ready(bytes.data(), bytes.size()).ok());

  for (const std::vector<std::uint32_t>& groups : {std::vector<std::uint32_t>{1, 1}, std::vector<std::uint32_t>{2, 1}}) {
    bytes = encode(std::vector<FreeEntry>{{.consumer = 1, .groups = groups}});
    EXPECT_FALSE(decode_free(bytes.data(), bytes.size()).ok());
  }

  bytes = encode(Status());
  EXPECT_EQ(decode_status(bytes.data(), bytes.size()).code(), StatusCode::kDataLoss);
}

// Goal: a decoder answers whatever it is given, and what it accepts it can write again.
TEST(HotPayloads, SurviveRandomMutations) {
  Random random(20260102);
  for (int round = 0; round < 20'000; ++round) {
    const auto mutate = [&](std::vector<std::byte> bytes) {
      for (std::uint64_t changes = 1 + random.below(4); changes > 0; --changes) {
        bytes[random.below(bytes.size())] = static_cast<std::byte>(random.below(256));
      }
      return bytes;
    };
    auto bytes = mutate(encode(sample_ready()));
    if (const auto out = decode_ready(bytes.data(), bytes.size()); out.ok()) {
      EXPECT_EQ(encode(*out), bytes);
    }
    bytes = mutate(encode(sample_free()));
    if (const auto out = decode_free(bytes.data(), bytes.size()); out.ok()) {
      EXPECT_EQ(encode(*out), bytes);
    }
    bytes = mutate(encode(sample_status()));
    EXPECT_FALSE(decode_status(bytes.data(), bytes.size()).ok());
  }
}

// Goal: a long message is cut, between characters, so that the rest of the error still travels.
TEST(HotPayloads, CutLongMessagesBetweenCharacters) {
  std::string text(4095, 'x');
  text += "\xC3\xA4\xC3\xA4";  // the limit falls within the first of these two letters
  const auto bytes = encode(Status(StatusCode::kInternal, text));
  const Status out = decode_status(bytes.data(), bytes.size());
  EXPECT_EQ(out.code(), StatusCode::kInternal);
  EXPECT_EQ(out.message(), std::string(4095, 'x'));
}

// Goal: codes and reasons of a later build become something this build can name.
TEST(HotPayloads, UnknownCodesAndReasonsStayErrors) {
  auto bytes = encode(sample_status());
  bytes[0] = std::byte{200};
  bytes[1] = bytes[2] = bytes[3] = std::byte{0xFF};
  const Status out = decode_status(bytes.data(), bytes.size());
  EXPECT_EQ(out.code(), StatusCode::kUnknown);
  EXPECT_EQ(out.info().reason, Reason::kUnspecified);
}

// Goal: nothing but one of the three words is taken for an outcome.
TEST(HotPayloads, OutcomesAreOneOfThreeWords) {
  for (int word = 0; word < 256; ++word) {
    auto bytes = encode_outcome(static_cast<std::uint8_t>(word));
    const auto decoded = decode_outcome(bytes.data(), bytes.size());
    ASSERT_EQ(decoded.ok(), word >= 1 && word <= 3) << word;
    if (decoded.ok()) {
      EXPECT_EQ(*decoded, word);
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(decode_outcome(bytes.data(), bytes.size()).ok());
  }
  EXPECT_FALSE(decode_outcome(nullptr, 0).ok());
}

TEST(HotPayloads, SumOfNothingIsXxh3OfNothing) {
  EXPECT_EQ(payload_sum(nullptr, 0), 0x2D06800538D394C2u);
}

TEST(HotType, EveryTypeHasAName) {
  for (std::uint8_t type = 1; type <= 9; ++type) EXPECT_NE(name_of(static_cast<HotType>(type)), "unknown");
  EXPECT_EQ(name_of(static_cast<HotType>(0)), "unknown");
}

}  // namespace
}  // namespace shardpull
