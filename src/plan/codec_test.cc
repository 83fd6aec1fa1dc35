// Goal: what travels decodes to what was sent or is refused with a message; no bytes crash, hang or take
// memory.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"
#include "plan/plan.h"
#include "plan/plan_testing.h"

namespace shardpull {
namespace {

using namespace plan_testing;
using Bytes = std::vector<std::byte>;

struct Samples {
  InitTables tables;
  Recording recording;
  WorkerPlan plan;
  std::vector<PullDescription> pulls;
  Holding holding;

  Samples() {
    const std::vector<TensorMeta> metadata{meta("embed", {6, 4}), meta("l.0.w", {4, 4}), meta("l.0.b", {3}),
                                           meta("norm", {4}, DType::kF32)};
    tables = make_tables(metadata, 2, 4);
    tables.num_replicas = 2;
    auto holdings = holdings_of(metadata, 2);
    hold(holdings[0], 0);
    hold(holdings[1], 0);
    hold(holdings[0], 1, Box{{0, 0}, {3, 4}});
    hold(holdings[1], 1, Box{{3, 0}, {1, 4}});
    hold(holdings[0], 2);
    hold(holdings[0], 3);
    holding = holdings[0];
    holding.mappable = false;
    tables.ownership = must(resolve_ownership(metadata, holdings));
    RecordingBuilder builder(metadata);
    builder.whole("embed", 0, must(builder.fake(0).narrow(0, 0, 3)));
    builder.whole("w", 1, must(builder.fake(1).transpose(0, 1)));
    builder.whole("b", 2, builder.fake(2));
    recording = builder.build();
    plan = must(plan_worker(tables, recording, 2, {.path = PathPolicy::kPacked}));
    pulls = pulls_at(plan, 0);
    EXPECT_EQ(plan.producers.size(), 2u);
  }
};

// A codec under test: its bytes, and decoding followed by encoding again.
struct Codec {
  std::string name;
  Bytes bytes;
  std::function<Result<Bytes>(const Bytes&)> round_trip;
};

std::vector<Codec> codecs() {
  const Samples samples;
  return {
      {"tables", encode_tables(samples.tables),
       [](const Bytes& bytes) -> Result<Bytes> {
         auto value = decode_tables(bytes.data(), bytes.size());
         if (!value.ok()) return value.status();
         return encode_tables(*value);
       }},
      {"holding", encode_holding(samples.holding),
       [](const Bytes& bytes) -> Result<Bytes> {
         auto value = decode_holding(bytes.data(), bytes.size());
         if (!value.ok()) return value.status();
         return encode_holding(*value);
       }},
      {"plan", encode(samples.plan),
       [](const Bytes& bytes) -> Result<Bytes> {
         auto value = decode_plan(bytes.data(), bytes.size());
         if (!value.ok()) return value.status();
         return encode(*value);
       }},
      {"pulls", encode_pulls(samples.pulls),
       [](const Bytes& bytes) -> Result<Bytes> {
         auto value = decode_pulls(bytes.data(), bytes.size());
         if (!value.ok()) return value.status();
         return encode_pulls(*value);
       }},
  };
}

TEST(PlanCodec, values_come_back) {
  const Samples samples;
  const auto tables = encode_tables(samples.tables);
  EXPECT_EQ(must(decode_tables(tables.data(), tables.size())), samples.tables);
  const auto holding = encode_holding(samples.holding);
  EXPECT_EQ(must(decode_holding(holding.data(), holding.size())), samples.holding);
  const auto plan = encode(samples.plan);
  EXPECT_EQ(must(decode_plan(plan.data(), plan.size())), samples.plan);
  EXPECT_EQ(digest(must(decode_plan(plan.data(), plan.size()))), digest(samples.plan));
  const auto pulls = encode_pulls(samples.pulls);
  EXPECT_EQ(must(decode_pulls(pulls.data(), pulls.size())), samples.pulls);
}

TEST(PlanCodec, bytes_are_fixed) {
  // The encoding is a format: these digests change only with its version.
  const Samples samples;
  EXPECT_EQ(to_string(metadata_digest(samples.tables.metadata)), "2472348330934b83ee47301c9c971f07");
  EXPECT_EQ(to_string(digest(samples.plan)), "176ebcca939664c9f2cb84c2f48d114b");
  EXPECT_EQ(to_string(pulls_digest(samples.pulls, samples.plan.ring_depth)),
            "8d7f89147174bb3ceb4de86381a581fd");
}

TEST(PlanCodec, case_133_truncated_at_every_byte_is_refused) {
  for (const Codec& codec : codecs()) {
    for (std::size_t size = 0; size < codec.bytes.size(); ++size) {
      const auto result = codec.round_trip(
          Bytes(codec.bytes.begin(), codec.bytes.begin() + static_cast<std::ptrdiff_t>(size)));
      ASSERT_FALSE(result.ok()) << codec.name << " cut at " << size;
      ASSERT_FALSE(result.status().message().empty());
    }
    Bytes longer = codec.bytes;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(codec.round_trip(longer).ok()) << codec.name;
  }
}

TEST(PlanCodec, case_133_any_changed_byte_is_refused_or_decodes_canonically) {
  for (const Codec& codec : codecs()) {
    for (std::size_t at = 0; at < codec.bytes.size(); ++at) {
      for (const int change : {1, 2, 0x40, 0x80, 0xFF}) {
        Bytes bytes = codec.bytes;
        bytes[at] ^= static_cast<std::byte>(change);
        const auto result = codec.round_trip(bytes);
        ASSERT_TRUE(!result.ok() || *result == bytes) << codec.name << " at " << at;
      }
    }
  }
}

TEST(PlanCodec, case_133_random_bytes_and_lengths) {
  Random random(7);
  for (const Codec& codec : codecs()) {
    for (int i = 0; i < 20000; ++i) {
      Bytes bytes = codec.bytes;
      for (std::int64_t n = random.between(1, 4); n > 0; --n) {
        const std::size_t at = random.below(bytes.size());
        if (random.below(2) == 0 && at + 4 <= bytes.size()) {
          const std::uint32_t words[] = {
              0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, static_cast<std::uint32_t>(random.next_u64())};
          const std::uint32_t word = words[random.below(6)];
          std::memcpy(bytes.data() + at, &word, 4);
        } else {
          bytes[at] = static_cast<std::byte>(random.below(256));
        }
      }
      bytes.resize(random.below(4) == 0 ? random.below(bytes.size() + 1) : bytes.size());
      const auto result = codec.round_trip(bytes);
      ASSERT_TRUE(!result.ok() || *result == bytes) << codec.name << ", change " << i;
    }
  }
}

TEST(PlanCodec, case_127_another_version_is_named) {
  for (const Codec& codec : codecs()) {
    Bytes bytes = codec.bytes;
    bytes[4] = std::byte{9};
    const auto result = codec.round_trip(bytes);
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().info().reason, Reason::kVersionMismatch);
    EXPECT_NE(result.status().message().find("version 9"), std::string::npos) << result.status().message();
  }
}

TEST(PlanCodec, one_encoding_is_not_taken_for_another) {
  const auto all = codecs();
  for (const Codec& codec : all) {
    for (const Codec& other : all) {
      EXPECT_EQ(codec.round_trip(other.bytes).ok(), codec.name == other.name);
    }
  }
}

TEST(PullsDigest, covers_every_field_and_the_ring_depth) {
  const Samples samples;
  const Digest128 digest = pulls_digest(samples.pulls, 2);
  EXPECT_NE(pulls_digest(samples.pulls, 3), digest);
  const std::vector<std::function<void(std::vector<PullDescription>&)>> changes{
      [](auto& p) { p.pop_back(); },
      [](auto& p) { p[0].chunk_id += 1; },
      [](auto& p) { p[0].lane.sharing_group += 1; },
      [](auto& p) { p[0].lane.producer += 1; },
      [](auto& p) { p[0].seq += 1; },
      [](auto& p) { p[0].bytes += 1; },
      [](auto& p) { p[0].path = Path::kMapped; },
      [](auto& p) { p[0].keys[0].name += 1; },
      [](auto& p) { p[0].keys[0].wire_dtype = DType::kF16; },
      [](auto& p) { p[0].keys[0].slice.regions[0].offset += 1; },
      [](auto& p) { p[0].keys[0].offset += 16; },
      [](auto& p) { p[0].keys[0].bytes += 1; },
      [](auto& p) { std::swap(p[0], p[1]); },
  };
  for (const auto& change : changes) {
    auto pulls = samples.pulls;
    change(pulls);
    EXPECT_NE(pulls_digest(pulls, 2), digest);
  }
}

TEST(CheckPulls, refuses_what_the_tables_do_not_allow) {
  const Samples samples;
  ASSERT_GE(samples.pulls.size(), 2u);
  ASSERT_TRUE(check_pulls(samples.pulls, samples.tables, 0).ok())
      << check_pulls(samples.pulls, samples.tables, 0).message();
  const auto refused = [&](const std::function<void(std::vector<PullDescription>&)>& spoil,
                           const std::string& part) {
    auto pulls = samples.pulls;
    spoil(pulls);
    const Status status = check_pulls(pulls, samples.tables, 0);
    ASSERT_FALSE(status.ok()) << part;
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  refused([](auto& p) { p[0].lane.producer = 1; }, "trainer 1");
  refused([](auto& p) { p[0].lane.sharing_group = 2; }, "sharing group 2");
  refused([](auto& p) { p[1].lane.sharing_group = 1; }, "another lane");
  refused([](auto& p) { p[0].lane.kind = LaneKind::kRecovery; }, "of a recovery lane");
  refused(
      [](auto& p) {
        p[0].lane.kind = LaneKind::kRecovery;
        p[0].lane.sharing_group = 2;
      },
      "another lane");
  refused(
      [&](auto& p) {
        p[0].lane.kind = LaneKind::kRecovery;
        p[0].lane.sharing_group = 2 + samples.tables.num_consumers;
      },
      "of a recovery lane");
  refused([](auto& p) { p[0].run = 9; }, "run 9");
  refused([](auto& p) { p[1].seq = 7; }, "seq 7");
  refused([](auto& p) { p[1].chunk_id = p[0].chunk_id; }, "not after");
  refused([](auto& p) { p[0].group = 99; }, "group 99");
  refused([](auto& p) { p[0].group = 2; }, "group");
  refused([](auto& p) { p[0].owner_class = 99; }, "owner class 99");
  refused([](auto& p) { p[0].owner_class = 2; }, "owner class");
  {
    InitTables tables = samples.tables;
    tables.transport = TransportKind::kTcp;
    auto pulls = samples.pulls;
    pulls[0].path = Path::kDirect;
    EXPECT_TRUE(check_pulls(pulls, tables, 0).ok()) << check_pulls(pulls, tables, 0).message();
    pulls[0].path = Path::kMapped;
    const Status status = check_pulls(pulls, tables, 0);
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.message().find("mapped is not served over tcp"), std::string::npos) << status.message();
  }
  refused([](auto& p) { p[0].keys.clear(); }, "no keys");
  refused([](auto& p) { p[0].keys[0].name = 99; }, "name 99");
  refused([](auto& p) { p[0].keys[0].piece = 1; }, "piece 0");
  refused([](auto& p) { p[0].keys[0].piece = 99; }, "piece 98");
  refused([](auto& p) { p[0].keys[0].offset = 16; }, "offset 16");
  refused([](auto& p) { p[0].keys[0].bytes = 8; }, "8 bytes");
  refused([](auto& p) { p[0].bytes += 1; }, "bytes stated");
  refused([](auto& p) { p[0].keys[0].slice.regions[0].offset = 13; }, "embed");         // past the end
  refused([](auto& p) { p[0].keys[0].slice.regions[0].offset = INT64_MAX; }, "embed");  // far past it
  refused([](auto& p) { p[0].keys[0].slice.regions[0].offset = -1; }, "embed");
  refused([](auto& p) { p[0].keys[0].slice.regions.clear(); }, "without elements");
  refused([](auto& p) { p[0].keys[0].wire_dtype = DType::kF32; }, "embed");  // too many elements
  refused(
      [](auto& p) {
        p[0].keys[0].slice.regions[0].dims = {{3, 4}, {4, 1}};  // the same elements, not merged
      },
      "not canonical");
}

}  // namespace
}  // namespace shardpull
