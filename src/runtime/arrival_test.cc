// Goal: packed keys that are scattered while they arrive land as a scatter of the whole slot does, and have
// the sums of their bytes wherever these came in order.
#include "runtime/arrival.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace shardpull {
namespace {

using Bytes = std::vector<std::byte>;

// Three keys of a slot, with gaps between them: one run, rows, and a key that lands twice.
class ArrivalTest : public testing::Test {
 protected:
  ArrivalTest() : slot_(static_cast<std::size_t>(sizes_[0] + 12 + sizes_[1] + 4 + sizes_[2])) {
    for (std::size_t i = 0; i < slot_.size(); ++i) slot_[i] = static_cast<std::byte>(i * 167 + (i >> 8) * 59);
    programs_ = {scatter(sizes_[0], contiguous_region(sizes_[0], 5)),
                 scatter(sizes_[1], {64, {{100, 200}, {93, 1}}}),
                 scatter(sizes_[2], contiguous_region(sizes_[2])), scatter(sizes_[2], {3, {{sizes_[2], 2}}})};
    expected_ = memory();
    for (std::size_t p = 0; p < programs_.size(); ++p)
      run(programs_[p], slot_.data() + offset_of(key_of_[p]), expected_[p].data());
  }

  static CopyProgram scatter(std::int64_t bytes, const Region& to) {
    return compile_copy(Slice::whole(bytes), SourceLayout::contiguous(DType::kU8, bytes), DType::kU8, to,
                        DType::kU8)
        .value();
  }
  std::uint64_t offset_of(std::size_t key) const {
    const std::int64_t offset = key == 0 ? 0 : key == 1 ? sizes_[0] + 12 : sizes_[0] + 12 + sizes_[1] + 4;
    return static_cast<std::uint64_t>(offset);
  }
  std::vector<Bytes> memory() const {
    std::vector<Bytes> out;
    for (const CopyProgram& program : programs_)
      out.emplace_back(static_cast<std::size_t>(program.dst_end) + 1);
    return out;
  }
  std::shared_ptr<Arrival> arrival_into(std::vector<Bytes>& memory) const {
    std::vector<Arrival::Key> keys;
    for (std::size_t key = 0; key < 3; ++key)
      keys.push_back({offset_of(key), static_cast<std::uint64_t>(sizes_[key]), {}});
    for (std::size_t p = 0; p < programs_.size(); ++p)
      keys[key_of_[p]].copies.push_back({&programs_[p], memory[p].data()});
    return std::make_shared<Arrival>(std::move(keys), true, nullptr);
  }
  void take(Arrival& arrival, std::size_t from, std::size_t to) const {
    const Bytes part(slot_.data() + from, slot_.data() + to);
    arrival.take(from, part);
  }
  std::uint64_t sum_of(std::size_t key) const {
    return checksum64({slot_.data() + offset_of(key), static_cast<std::size_t>(sizes_[key])});
  }

  const std::vector<std::int64_t> sizes_ = {40'001, 9300, 1000};
  const std::vector<std::size_t> key_of_ = {0, 1, 2, 2};
  Bytes slot_;
  std::vector<CopyProgram> programs_;
  std::vector<Bytes> expected_;
};

TEST_F(ArrivalTest, InOrderEveryKeyIsSummed) {
  for (const std::size_t step :
       {std::size_t{1}, std::size_t{977}, std::size_t{40'001}, std::size_t{40'007}, slot_.size()}) {
    std::vector<Bytes> memory = this->memory();
    const auto arrival = arrival_into(memory);
    for (std::size_t from = 0; from < slot_.size(); from += step)
      take(*arrival, from, std::min(from + step, slot_.size()));
    EXPECT_EQ(memory, expected_) << step;
    for (std::size_t key = 0; key < 3; ++key) EXPECT_EQ(arrival->sum(key), sum_of(key)) << step << " " << key;
  }
}

// Keys that lie in the parameter as they come, of a short read and of one that goes past the caches.
TEST_F(ArrivalTest, KeysWithoutAProgramLandAsTheyCome) {
  for (const std::size_t bytes : {std::size_t{100'000}, std::size_t{5} << 20}) {
    Bytes sent(bytes), first(bytes / 3), rest(bytes - bytes / 3);
    for (std::size_t i = 0; i < bytes; ++i) sent[i] = static_cast<std::byte>(i * 167 + (i >> 8) * 59);
    Arrival arrival(
        {{0, first.size(), {{nullptr, first.data()}}}, {first.size(), rest.size(), {{nullptr, rest.data()}}}},
        true, nullptr);
    for (std::size_t from = 0; from < bytes; from += 7919)
      arrival.take(from, std::span(sent).subspan(from, std::min<std::size_t>(7919, bytes - from)));
    EXPECT_TRUE(std::equal(first.begin(), first.end(), sent.begin()));
    EXPECT_TRUE(
        std::equal(rest.begin(), rest.end(), sent.begin() + static_cast<std::ptrdiff_t>(first.size())));
    EXPECT_EQ(arrival.sum(0), checksum64(first));
    EXPECT_EQ(arrival.sum(1), checksum64(rest));
  }
}

TEST_F(ArrivalTest, OutOfOrderAllLandsAndOnlyWholeKeysAreSummed) {
  std::vector<Bytes> memory = this->memory();
  const auto arrival = arrival_into(memory);
  take(*arrival, 30'000, slot_.size());  // the end of the first key, and the others
  take(*arrival, 0, 30'000);
  EXPECT_EQ(memory, expected_);
  EXPECT_FALSE(arrival->sum(0).has_value());
  EXPECT_EQ(arrival->sum(1), sum_of(1));
  EXPECT_EQ(arrival->sum(2), sum_of(2));
}

// As over two streams that share a read: all keys have their sums but the one that is cut.
TEST_F(ArrivalTest, PartsThatComeInOrderBesideEachOtherAreSummed) {
  std::vector<Bytes> memory = this->memory();
  const auto arrival = arrival_into(memory);
  const std::size_t middle = 45'000;  // in the second key
  for (std::size_t at = 0; at < middle; at += 1000) {
    take(*arrival, at, at + 1000);
    if (middle + at / 4 < slot_.size())
      take(*arrival, middle + at / 4, std::min(middle + at / 4 + 250, slot_.size()));
  }
  EXPECT_EQ(memory, expected_);
  EXPECT_EQ(arrival->sum(0), sum_of(0));
  EXPECT_FALSE(arrival->sum(1).has_value());
  EXPECT_EQ(arrival->sum(2), sum_of(2));
}

TEST_F(ArrivalTest, SeveralThreadsBringIt) {
  std::vector<Bytes> memory = this->memory();
  const auto arrival = arrival_into(memory);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t from = t * 1000; from < slot_.size(); from += 3000)
        take(*arrival, from, std::min(from + 1000, slot_.size()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(memory, expected_);
  for (std::size_t key = 0; key < 3; ++key)
    EXPECT_EQ(arrival->sum(key).value_or(sum_of(key)), sum_of(key)) << key;
}

}  // namespace
}  // namespace shardpull
