#include "protocol/key_sums.h"

#include <fmt/format.h>

#include "protocol/wording.h"
#include "tensor/checksum.h"

namespace shardpull {

Status check_sum(const InitTables& tables, const ChunkKey& key, std::uint32_t producer,
                 std::span<const std::byte> bytes, std::uint64_t expected) {
  return compare_sums(tables, key, producer, checksum64(bytes), expected);
}

Status compare_sums(const InitTables& tables, const ChunkKey& key, std::uint32_t producer, std::uint64_t sum,
                    std::uint64_t expected) {
  if (sum == expected) return {};
  const std::string& name = tables.metadata[key.name].name;
  return Status(StatusCode::kDataLoss,
                fmt::format("{} bytes of '{}' from {} are corrupt: their sum is {:016x}, {} made {:016x} of them",
                            key.bytes, name, trainer_name(producer), sum, trainer_name(producer), expected),
                {.reason = Reason::kCorrupt,
                 .fault = Fault::kHost,
                 .retryable = true,
                 .peer = trainer_name(producer),
                 .tensor = name});
}

}  // namespace shardpull
