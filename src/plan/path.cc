#include "plan/path.h"

#include <fmt/format.h>

#include "base/units.h"
#include "plan/boxes.h"

namespace shardpull {

std::optional<MappingObstacle> why_not_mapped(const InitTables& tables, const Chunk& chunk) {
  std::optional<std::uint32_t> gatherer;  // the first of the producers whose export buffers it depends on
  for (const std::uint32_t producer : chunk.candidates) {
    if (tables.producer_mappable[producer] != 0) continue;
    if (tables.producer_resident[producer] != 0 && !chunk.keys.empty()) {
      const std::uint32_t name = chunk.keys.front().name;
      return MappingObstacle{
          .producer = producer,
          .name = name,
          .reason =
              fmt::format("trainer {} does not hold '{}' in memory that can be mapped, and publishes it in "
                          "place, without export buffers",
                          producer, tables.metadata[name].name)};
    }
    if (!gatherer) gatherer = producer;
  }
  if (!gatherer) return std::nullopt;
  for (const ChunkKey& key : chunk.keys) {
    const TensorMeta& meta = tables.metadata[key.name];
    const auto bytes = bytes_of(meta.dtype, checked_numel(meta.shape).value_or(0));
    if (!bytes.ok() || *bytes <= tables.export_pack_limit) continue;
    return MappingObstacle{
        .producer = *gatherer,
        .name = key.name,
        .reason =
            fmt::format("trainer {} does not hold '{}' in memory that can be mapped, and its {} are above "
                        "export_pack_limit, {} (raise it to have them in an export buffer)",
                        *gatherer, meta.name, format_bytes(*bytes), format_bytes(tables.export_pack_limit))};
  }
  return std::nullopt;
}

}  // namespace shardpull
