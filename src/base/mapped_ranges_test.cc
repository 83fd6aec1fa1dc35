#include "base/mapped_ranges.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include <gtest/gtest.h>

namespace shardpull {
namespace {

// Goal: what was unmapped, and what may only be read, is told from what can be written; a range that crosses
// into either is neither; numbers that wrap are no ranges.
TEST(MappedRanges, TellsWhatCanBeWritten) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto* const memory = static_cast<std::byte*>(
      ::mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  const auto whole = MappedRanges::read();
  ASSERT_TRUE(whole.has_value());
  EXPECT_TRUE(whole->writable(memory, 4 * page));
  ASSERT_EQ(::munmap(memory + page, page), 0);
  ASSERT_EQ(::mprotect(memory + 3 * page, page, PROT_READ), 0);
  const auto left = MappedRanges::read();
  ASSERT_TRUE(left.has_value());
  EXPECT_TRUE(left->writable(memory, page));
  EXPECT_TRUE(left->writable(memory + 2 * page + 1, page - 1));
  EXPECT_FALSE(left->writable(memory, page + 1));
  EXPECT_FALSE(left->writable(memory + page, 1));
  EXPECT_FALSE(left->writable(memory + page - 1, page + 2));
  EXPECT_FALSE(left->writable(memory + 3 * page, 1));
  EXPECT_FALSE(left->writable(memory, UINT64_MAX));
  EXPECT_FALSE(left->writable(nullptr, 1));
  EXPECT_TRUE(left->writable(nullptr, 0));
  ::munmap(memory, page);
  ::munmap(memory + 2 * page, 2 * page);
}

TEST(MappedRanges, SaysNothingWhereItCannotRead) {
  EXPECT_FALSE(MappedRanges::read("/no/such/file").has_value());
  EXPECT_FALSE(MappedRanges::read("/proc/self/status").has_value());
}

}  // namespace
}  // namespace shardpull
