#include "transport/regions.h"

#include <cstring>
#include <limits>
#include <memory>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/host_memory.h"
#include "transport/shm/shared_memory.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

std::shared_ptr<const PeerSegment> mapped(std::uint64_t bytes) {
  const auto own = SharedSegment::create(bytes, "a test");
  EXPECT_TRUE(own.ok()) << own.status().to_string();
  auto peer = PeerSegment::map(UniqueFd(dup((*own)->fd())), bytes);
  EXPECT_TRUE(peer.ok()) << peer.status().to_string();
  return *peer;
}

// Goal (case 132): range arithmetic cannot be wrapped, whatever the numbers.
TEST(CheckWindow, NeverWraps) {
  const auto window = [](std::uint64_t offset, std::uint64_t bytes) {
    return RemoteRef{.region = 1, .generation = 1, .offset = offset, .bytes = bytes};
  };
  EXPECT_TRUE(check_window(window(0, 4096), 4096).ok());
  EXPECT_TRUE(check_window(window(4096, 0), 4096).ok());
  EXPECT_TRUE(check_window(window(4095, 1), 4096).ok());
  EXPECT_FALSE(check_window(window(4095, 2), 4096).ok());
  EXPECT_FALSE(check_window(window(4097, 0), 4096).ok());
  EXPECT_FALSE(check_window(window(1, kMax), 4096).ok());
  EXPECT_FALSE(check_window(window(kMax, 1), 4096).ok());
  EXPECT_FALSE(check_window(window(kMax, kMax), 4096).ok());
  EXPECT_FALSE(check_window(window(kMax - 4095, 8192), 4096).ok());
  EXPECT_TRUE(check_window(window(0, kMax), kMax).ok());
  EXPECT_TRUE(check_window(window(8192, 4096), kMax).ok());
  EXPECT_FALSE(check_window(window(kMax - 4095, 8192), kMax).ok());
  EXPECT_EQ(check_window(window(1, kMax), 4096).code(), StatusCode::kOutOfRange);
}

// Goal: a freed number comes back with the next generation, so that a holder of the old pair is told.
TEST(OwnRegions, GivesFreedNumbersOutAgainWithTheNextGeneration) {
  OwnRegions regions;
  const auto a = *regions.add(10);
  const auto b = *regions.add(20);
  EXPECT_NE(a.region, 0u);
  EXPECT_NE(a.region, b.region);
  EXPECT_EQ(regions.live_regions(), 2u);
  EXPECT_EQ(regions.live_bytes(), 30u);
  regions.free(a, 10);
  EXPECT_EQ(regions.live_bytes(), 20u);
  const auto c = *regions.add(5);
  EXPECT_EQ(c.region, a.region);
  EXPECT_EQ(c.generation, a.generation + 1);
  const auto freed = regions.take_freed();
  ASSERT_EQ(freed.size(), 1u);
  EXPECT_EQ(freed[0].region, a.region);
  EXPECT_EQ(freed[0].generation, a.generation);
  EXPECT_TRUE(regions.take_freed().empty());
}

// Goal (case 132): "never granted", "stale", "freed" and "out of range" are told apart.
TEST(PeerRegions, TellsApartWhyThereIsNoWindow) {
  PeerRegions<PeerSegment> regions("trainer 1");
  ASSERT_TRUE(regions.grant(4, 2, mapped(8192)).ok());
  EXPECT_EQ(regions.held_bytes(), 8192u);
  EXPECT_TRUE(regions.find({.region = 4, .generation = 2, .offset = 8000, .bytes = 192}).ok());

  const Status unknown = regions.find({.region = 5, .generation = 1, .offset = 0, .bytes = 1}).status();
  EXPECT_EQ(unknown.code(), StatusCode::kNotFound);
  EXPECT_NE(unknown.message().find("trainer 1 never granted region 5"), std::string::npos)
      << unknown.message();

  const Status stale = regions.find({.region = 4, .generation = 1, .offset = 0, .bytes = 1}).status();
  EXPECT_EQ(stale.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(stale.message().find("stale"), std::string::npos);

  const Status range = regions.find({.region = 4, .generation = 2, .offset = 8000, .bytes = 193}).status();
  EXPECT_EQ(range.code(), StatusCode::kOutOfRange);
  EXPECT_NE(range.message().find("193 bytes at offset 8000"), std::string::npos) << range.message();

  ASSERT_TRUE(regions.retire(4, 2).ok());
  EXPECT_EQ(regions.held_bytes(), 0u);
  const Status freed = regions.find({.region = 4, .generation = 2, .offset = 0, .bytes = 1}).status();
  EXPECT_NE(freed.message().find("freed"), std::string::npos) << freed.message();
}

// Goal: generations only go forward; anything else is not what an honest peer sends.
TEST(PeerRegions, RefusesGrantsAndRetiresOutOfOrder) {
  PeerRegions<PeerSegment> regions("trainer 1");
  ASSERT_TRUE(regions.grant(1, 2, mapped(100)).ok());
  EXPECT_FALSE(regions.grant(1, 2, mapped(100)).ok());
  EXPECT_FALSE(regions.grant(1, 1, mapped(100)).ok());
  EXPECT_FALSE(regions.retire(1, 3).ok());
  EXPECT_FALSE(regions.retire(2, 1).ok());
  EXPECT_TRUE(regions.grant(1, 3, mapped(200)).ok());
  EXPECT_TRUE(regions.retire(1, 2).ok());  // overtaken by the new generation
  EXPECT_EQ(regions.held_bytes(), 200u);
  EXPECT_TRUE(regions.find({.region = 1, .generation = 3, .offset = 0, .bytes = 200}).ok());
}

// Goal: a region this host cannot map says so to whoever asks, and harms nothing else.
TEST(PeerRegions, RemembersWhyARegionIsNotMapped) {
  PeerRegions<PeerSegment> regions("trainer 1");
  ASSERT_TRUE(regions.grant(1, 1, Status(StatusCode::kResourceExhausted, "no address space")).ok());
  EXPECT_EQ(regions.find({.region = 1, .generation = 1, .offset = 0, .bytes = 1}).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(regions.held_bytes(), 0u);
}

// Goal: both mappings are the same zero-filled pages, the peer's cannot be written, and the file's size
// cannot change.
TEST(SharedMemory, IsOneSetOfPagesSealed) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{4097}, std::uint64_t{5} << 20}) {
    const auto own = SharedSegment::create(bytes, "a test");
    ASSERT_TRUE(own.ok()) << own.status().to_string();
    EXPECT_EQ((*own)->data()[bytes - 1], std::byte{0});
    auto peer = PeerSegment::map(UniqueFd(dup((*own)->fd())), bytes);
    ASSERT_TRUE(peer.ok()) << peer.status().to_string();
    std::memset((*own)->data(), 0x5A, bytes);
    EXPECT_EQ((*peer)->data()[0], std::byte{0x5A});
    EXPECT_EQ((*peer)->data()[bytes - 1], std::byte{0x5A});
    EXPECT_NE(ftruncate((*own)->fd(), 0), 0);
    EXPECT_NE(ftruncate((*own)->fd(), static_cast<off_t>(bytes * 2 + 8192)), 0);
    EXPECT_EQ(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (*own)->fd(), 0), MAP_FAILED);
  }
}

// Goal: memory is gone only when both sides let go.
TEST(SharedMemory, StaysReadableAfterTheOwnerLetsGo) {
  auto own = SharedSegment::create(8192, "a test");
  ASSERT_TRUE(own.ok());
  (*own)->data()[8191] = std::byte{7};
  auto peer = PeerSegment::map(UniqueFd(dup((*own)->fd())), 8192);
  ASSERT_TRUE(peer.ok());
  *own = nullptr;
  EXPECT_EQ((*peer)->data()[8191], std::byte{7});
}

// Goal: descriptors that would let a peer harm us are refused before they are mapped.
TEST(SharedMemory, RefusesForgedDescriptors) {
  const auto refuse = [](int fd, std::uint64_t bytes) {
    const auto segment = PeerSegment::map(UniqueFd(fd), bytes);
    EXPECT_FALSE(segment.ok());
    EXPECT_EQ(segment.status().info().reason, Reason::kCorrupt) << segment.status().to_string();
  };
  refuse(open("/dev/zero", O_RDONLY), 4096);
  refuse(open("/proc/self/exe", O_RDONLY), 4096);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  refuse(pipes[0], 1);
  close(pipes[1]);
  const int unsealed = memfd_create("unsealed", MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(unsealed, 4096), 0);
  refuse(unsealed, 4096);
  const auto own = SharedSegment::create(4096, "a test");
  ASSERT_TRUE(own.ok());
  refuse(dup((*own)->fd()), 4097);  // page-rounded to 4096: smaller than claimed
  refuse(dup((*own)->fd()), kMax);
  refuse(dup((*own)->fd()), 0);
}

// Goal: a size the host cannot have is an error with the numbers, not a killed process.
TEST(SharedMemory, RefusesMoreThanTheHostHas) {
  for (const std::uint64_t bytes : {std::uint64_t{1} << 50, kMax, kMax - 4096}) {
    const auto own = SharedSegment::create(bytes, "the serve ring (ring_depth 2)");
    ASSERT_FALSE(own.ok());
    EXPECT_EQ(own.status().code(), StatusCode::kResourceExhausted);
    EXPECT_EQ(own.status().info().reason, Reason::kNoMemory);
    EXPECT_NE(own.status().message().find("the serve ring (ring_depth 2)"), std::string::npos);
  }
  EXPECT_EQ(SharedSegment::create(0, "nothing").status().code(), StatusCode::kInvalidArgument);
  EXPECT_GT(available_memory_bytes(), 0u);
}

}  // namespace
}  // namespace shardpull
