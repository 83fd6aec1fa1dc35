#include "plan/path.h"

#include <numeric>

#include <fmt/format.h>

#include "base/units.h"
#include "plan/boxes.h"

namespace shardpull {
namespace {

// Whether the elements of `box` follow one another in a tensor of `shape`: from the first dim longer than 1 on,
// it spans the others. Such a box is contiguous in every box that holds it.
bool contiguous_box(const Box& box, const std::vector<std::int64_t>& shape) {
  if (box.whole()) return true;
  std::size_t d = 0;
  while (d < shape.size() && box.size[d] == 1) ++d;
  for (++d; d < shape.size(); ++d) {
    if (box.size[d] != shape[d]) return false;
  }
  return true;
}

}  // namespace

std::string_view to_string(TransportKind transport) {
  switch (transport) {
    case TransportKind::kAuto:
      return "auto";
    case TransportKind::kShm:
      return "shm";
    case TransportKind::kCma:
      return "cma";
    case TransportKind::kTcp:
      return "tcp";
    case TransportKind::kUcx:
      return "ucx";
  }
  return "unknown";
}

bool maps(TransportKind transport) {
  return transport == TransportKind::kShm;
}

bool reads_vectored(TransportKind transport) {
  return transport == TransportKind::kCma;
}

bool reads_any_memory(TransportKind transport) {
  return transport == TransportKind::kCma;
}

std::optional<std::string> illegal_pair(TransportKind transport, PathPolicy policy) {
  if (policy != PathPolicy::kMapped || maps(transport)) return std::nullopt;
  return fmt::format("path mapped with transport {}: only shm maps its peers' memory; use auto, direct or packed",
                     to_string(transport));
}

std::optional<MappingObstacle> why_not_reachable(const InitTables& tables,
                                                 const std::vector<std::uint32_t>& owners,
                                                 std::span<const ChunkKey> keys) {
  if (reads_any_memory(tables.transport)) return std::nullopt;
  std::optional<std::uint32_t> gatherer;  // the first of the producers whose export buffers it depends on
  for (const std::uint32_t producer : owners) {
    if (tables.producer_mappable[producer] != 0) continue;
    if (tables.producer_resident[producer] != 0 && !keys.empty()) {
      const std::uint32_t name = keys.front().name;
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
  for (const ChunkKey& key : keys) {
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

std::uint64_t direct_run_bytes(const InitTables& tables, std::uint32_t name, std::uint32_t piece, DType wire_dtype,
                               const Slice& slice, const Destination& destination) {
  if (destination.dtype != wire_dtype || slice.regions.size() != 1) return 0;
  if (piece != 0 && !contiguous_box(tables.ownership.pieces[piece - 1].box, tables.metadata[name].shape)) return 0;
  const std::vector<Dim>& dims = slice.regions.front().dims;  // canonical: neighbours are merged
  const std::int64_t in_source = dims.empty() ? 1 : dims.back().stride == 1 ? dims.back().size : 1;
  std::int64_t in_parameter = 1;
  for (std::size_t d = destination.shape.size(); d-- > 0;) {
    if (destination.shape[d] != 1 && destination.stride[d] != in_parameter) break;
    in_parameter *= destination.shape[d];
  }
  const auto bytes = bytes_of(wire_dtype, std::gcd(in_source, in_parameter));
  return bytes.ok() ? *bytes : 0;  // a run of F4 elements may end within a byte
}

}  // namespace shardpull
