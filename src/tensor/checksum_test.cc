#include "tensor/checksum.h"

#include <cstring>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace shardpull {
namespace {

std::span<const std::byte> bytes_of_text(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Goal: the values are XXH3's, seed 0, so that another program can check them. Constants of the xxHash
// project.
TEST(Checksum, KnownValues) {
  EXPECT_EQ(checksum64({}), 0x2D06800538D394C2u);
  EXPECT_EQ(digest128({}).hex(), "99aa06d3014798d86001c324468d497f");
  EXPECT_NE(digest128(bytes_of_text("a")), digest128(bytes_of_text("b")));
  EXPECT_EQ(Digest{}.hex(), std::string(32, '0'));
}

// Goal: bytes in parts give the sum of the whole, wherever they are cut.
RC_GTEST_PROP(Checksum, PartsEqualWhole,
              (const std::vector<std::uint8_t>& seed, std::uint16_t size, std::uint16_t cut)) {
  std::vector<std::byte> data(size % 5000);
  for (std::size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<std::byte>(seed.empty() ? i : seed[i % seed.size()] + i);
  const std::size_t first = data.empty() ? 0 : cut % data.size();
  Hasher hasher;
  hasher.update(std::span(data).first(first));
  hasher.update(std::span(data).subspan(first));
  RC_ASSERT(hasher.checksum() == checksum64(data));
  RC_ASSERT(hasher.digest() == digest128(data));
}

}  // namespace
}  // namespace shardpull
