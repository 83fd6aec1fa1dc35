#include "tensor/metadata_digest.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "base/encoder.h"

namespace shardpull {

std::string to_string(const Digest128& digest) {
  return fmt::format("{:016x}{:016x}", digest.high, digest.low);
}

Digest128 metadata_digest(const std::vector<TensorMeta>& metadata) {
  // Recordings keep this digest in files: the encoding has a version of its own, apart from the wire's.
  constexpr std::uint32_t kTag = 0x444D5053;  // "SPMD"
  constexpr std::uint16_t kVersion = 1;
  ByteWriter writer;
  writer.u32(kTag);
  writer.u16(kVersion);
  writer.u32(static_cast<std::uint32_t>(metadata.size()));
  for (const TensorMeta& meta : metadata) {
    writer.string(meta.name);
    writer.u8(static_cast<std::uint8_t>(meta.dtype));
    writer.i64_list(meta.shape);
  }
  const XXH128_hash_t hash = XXH3_128bits(writer.bytes().data(), writer.size());
  return {.low = hash.low64, .high = hash.high64};
}

}  // namespace shardpull
