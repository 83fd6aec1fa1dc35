// Canonical encodings of this room, little-endian and fixed-width (base/encoder.h). Each begins with a
// four-byte tag and the encoding's version; the field order is that of the structs in plan.h. A value has one
// encoding, and only that decodes:
//
//   "SPHO" a holding         "SPTB" the init tables
//   "SPLN" a worker's plan   "SPPU" the pulls at one producer
//
// Decoders believe nothing: counts are checked against limits and against the bytes that are left before
// memory is taken, enumerations and slices against their formats. What needs tables to check is checked by
// validate, resolve_ownership and check_pulls.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <xxhash.h>

#include "base/encoder.h"
#include "base/identity.h"
#include "base/limits.h"
#include "base/status_macros.h"
#include "plan/boxes.h"
#include "plan/path.h"
#include "plan/plan.h"
#include "plan/plan_errors.h"
#include "tensor/slice_algebra.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kMaxAddressBytes = 1024;  // of a hot-channel address
constexpr std::uint64_t kMaxScattersPerChunk = 16'000'000;

constexpr std::uint32_t tag(const char (&text)[5]) {
  return static_cast<std::uint32_t>(static_cast<unsigned char>(text[0])) |
         static_cast<std::uint32_t>(static_cast<unsigned char>(text[1])) << 8 |
         static_cast<std::uint32_t>(static_cast<unsigned char>(text[2])) << 16 |
         static_cast<std::uint32_t>(static_cast<unsigned char>(text[3])) << 24;
}
constexpr std::uint32_t kHoldingTag = tag("SPHO");
constexpr std::uint32_t kTablesTag = tag("SPTB");
constexpr std::uint32_t kPlanTag = tag("SPLN");
constexpr std::uint32_t kPullsTag = tag("SPPU");

Digest128 digest_of(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {.low = hash.low64, .high = hash.high64};
}

void write_header(ByteWriter& writer, std::uint32_t tag) {
  writer.u32(tag);
  writer.u16(kWireVersion);
}

Status read_header(ByteReader& reader, std::uint32_t tag) {
  std::uint32_t found = 0;
  std::uint16_t version = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u32(found));
  if (found != tag) return reader.malformed("these bytes are something else");
  SHARDPULL_RETURN_IF_ERROR(reader.u16(version));
  if (version != kWireVersion) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("plan encoding version {}, this process has {}", version, kWireVersion),
                  {.reason = Reason::kVersionMismatch, .fault = Fault::kPeer});
  }
  return {};
}

Status read_dtype(ByteReader& reader, DType& out) {
  std::uint8_t number = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u8(number));
  if (!dtype_valid(number)) return reader.malformed(fmt::format("unknown dtype number {}", number));
  out = static_cast<DType>(number);
  return {};
}

Status read_path(ByteReader& reader, Path& out) {
  std::uint8_t number = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u8(number));
  if (number > static_cast<std::uint8_t>(Path::kDirect))
    return reader.malformed(fmt::format("unknown path number {}", number));
  out = static_cast<Path>(number);
  return {};
}

void write_digest(ByteWriter& writer, const Digest128& digest) {
  writer.u64(digest.low);
  writer.u64(digest.high);
}

Status read_digest(ByteReader& reader, Digest128& out) {
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.low));
  return reader.u64(out.high);
}

void write_meta(ByteWriter& writer, const TensorMeta& meta) {
  writer.string(meta.name);
  writer.u8(static_cast<std::uint8_t>(meta.dtype));
  writer.i64_list(meta.shape);
}

void write_box(ByteWriter& writer, const Box& box) {
  writer.i64_list(box.start);
  writer.i64_list(box.size);
}

Status read_box(ByteReader& reader, Box& out) {
  SHARDPULL_RETURN_IF_ERROR(reader.i64_list(out.start, kMaxDims));
  return reader.i64_list(out.size, kMaxDims);
}

void write_key(ByteWriter& writer, const ChunkKey& key) {
  writer.u32(key.name);
  writer.u32(key.piece);
  writer.u8(static_cast<std::uint8_t>(key.wire_dtype));
  encode_slice(writer, key.slice);
  writer.u64(key.offset);
  writer.u64(key.bytes);
}
constexpr std::uint64_t kMinKeyBytes = 4 + 4 + 1 + 4 + 8 + 8;

Status read_key(ByteReader& reader, ChunkKey& out) {
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.name));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.piece));
  SHARDPULL_RETURN_IF_ERROR(read_dtype(reader, out.wire_dtype));
  SHARDPULL_RETURN_IF_ERROR(decode_slice(reader, out.slice));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.offset));
  return reader.u64(out.bytes);
}

void write_keys(ByteWriter& writer, const std::vector<ChunkKey>& keys) {
  writer.u32(static_cast<std::uint32_t>(keys.size()));
  for (const ChunkKey& key : keys) write_key(writer, key);
}

Status read_keys(ByteReader& reader, std::vector<ChunkKey>& out) {
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxKeysPerChunk, kMinKeyBytes));
  out.resize(count);
  for (ChunkKey& key : out) SHARDPULL_RETURN_IF_ERROR(read_key(reader, key));
  return {};
}

void write_pull(ByteWriter& writer, const PullDescription& pull) {
  writer.u32(pull.chunk_id);
  writer.u32(pull.run);
  writer.u32(pull.group);
  writer.u32(pull.owner_class);
  writer.u8(static_cast<std::uint8_t>(pull.path));
  writer.u32(pull.lane.producer);
  writer.u32(pull.lane.sharing_group);
  writer.u8(static_cast<std::uint8_t>(pull.lane.kind));
  writer.u32(pull.seq);
  writer.u64(pull.bytes);
  write_keys(writer, pull.keys);
}
constexpr std::uint64_t kMinPullBytes = 4 * 4 + 1 + 4 + 4 + 1 + 4 + 8 + 4;

Status read_pull(ByteReader& reader, PullDescription& out) {
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.chunk_id));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.run));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.group));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.owner_class));
  SHARDPULL_RETURN_IF_ERROR(read_path(reader, out.path));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.lane.producer));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.lane.sharing_group));
  std::uint8_t kind = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u8(kind));
  if (kind > static_cast<std::uint8_t>(LaneKind::kRecovery))
    return reader.malformed(fmt::format("unknown lane kind {}", kind));
  out.lane.kind = static_cast<LaneKind>(kind);
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.seq));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.bytes));
  return read_keys(reader, out.keys);
}

void write_destination(ByteWriter& writer, const Destination& destination) {
  writer.u32(destination.parameter);
  writer.u8(static_cast<std::uint8_t>(destination.dtype));
  writer.i64(destination.offset);
  writer.i64_list(destination.shape);
  writer.i64_list(destination.stride);
}

Status read_destination(ByteReader& reader, Destination& out) {
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.parameter));
  SHARDPULL_RETURN_IF_ERROR(read_dtype(reader, out.dtype));
  SHARDPULL_RETURN_IF_ERROR(reader.i64(out.offset));
  SHARDPULL_RETURN_IF_ERROR(reader.i64_list(out.shape, kMaxDims));
  return reader.i64_list(out.stride, kMaxDims);
}

void write_run(ByteWriter& writer, const Run& run) {
  writer.u32(run.producer);
  writer.u32(run.first_key);
  writer.u32(run.key_count);
  writer.u64(run.offset);
  writer.u64(run.bytes);
  writer.u32(run.seq);
}
constexpr std::uint64_t kRunBytes = 3 * 4 + 2 * 8 + 4;

Status read_run(ByteReader& reader, Run& out) {
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.producer));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.first_key));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.key_count));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.offset));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.bytes));
  return reader.u32(out.seq);
}

void write_chunk(ByteWriter& writer, const Chunk& chunk) {
  writer.u32(chunk.chunk_id);
  writer.u32(chunk.group);
  writer.u32(chunk.owner_class);
  writer.u8(static_cast<std::uint8_t>(chunk.path));
  writer.u32_list(chunk.candidates);
  writer.u32(static_cast<std::uint32_t>(chunk.runs.size()));
  for (const Run& run : chunk.runs) write_run(writer, run);
  write_keys(writer, chunk.keys);
  writer.u64(chunk.bytes);
  writer.u8(chunk.encoding);
  writer.u32(static_cast<std::uint32_t>(chunk.scatters.size()));
  for (const PlannedScatter& scatter : chunk.scatters) {
    writer.u32(scatter.key);
    write_destination(writer, scatter.destination);
  }
  writer.u32_list(chunk.materialise);
  writer.u32_list(chunk.post_process);
  writer.u32_list(chunk.signal_groups);
}
constexpr std::uint64_t kMinChunkBytes = 3 * 4 + 1 + 3 * 4 + 8 + 1 + 4 * 4;
constexpr std::uint64_t kMinScatterBytes = 4 + 4 + 1 + 8 + 4 + 4;

Status read_chunk(ByteReader& reader, Chunk& out) {
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.chunk_id));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.group));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.owner_class));
  SHARDPULL_RETURN_IF_ERROR(read_path(reader, out.path));
  SHARDPULL_RETURN_IF_ERROR(reader.u32_list(out.candidates, kMaxRanks));
  std::uint32_t runs = 0, scatters = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(runs, kMaxRanks, kRunBytes));
  out.runs.resize(runs);
  for (Run& run : out.runs) SHARDPULL_RETURN_IF_ERROR(read_run(reader, run));
  SHARDPULL_RETURN_IF_ERROR(read_keys(reader, out.keys));
  for (const Run& run : out.runs) {
    if (run.key_count == 0 || run.first_key > out.keys.size() ||
        run.key_count > out.keys.size() - run.first_key) {
      return reader.malformed(fmt::format("run of keys [{}, +{}) in a chunk of {}", run.first_key,
                                          run.key_count, out.keys.size()));
    }
    if (run.offset > out.keys[run.first_key].offset)
      return reader.malformed("a run begins after its first key");
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.bytes));
  SHARDPULL_RETURN_IF_ERROR(reader.u8(out.encoding));
  if (out.encoding != 0) return reader.malformed(fmt::format("unknown chunk encoding {}", out.encoding));
  SHARDPULL_RETURN_IF_ERROR(reader.count(scatters, kMaxScattersPerChunk, kMinScatterBytes));
  out.scatters.resize(scatters);
  for (PlannedScatter& scatter : out.scatters) {
    SHARDPULL_RETURN_IF_ERROR(reader.u32(scatter.key));
    if (scatter.key >= out.keys.size())
      return reader.malformed(fmt::format("copy of key {} of {}", scatter.key, out.keys.size()));
    SHARDPULL_RETURN_IF_ERROR(read_destination(reader, scatter.destination));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u32_list(out.materialise, kMaxTensors));
  SHARDPULL_RETURN_IF_ERROR(reader.u32_list(out.post_process, kMaxTensors));
  return reader.u32_list(out.signal_groups, kMaxTensors);
}

void write_lists(ByteWriter& writer, const std::vector<std::vector<std::uint32_t>>& lists) {
  writer.u32(static_cast<std::uint32_t>(lists.size()));
  for (const auto& list : lists) writer.u32_list(list);
}

Status read_lists(ByteReader& reader, std::vector<std::vector<std::uint32_t>>& out, std::uint64_t max_lists) {
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, max_lists, 4));
  out.resize(count);
  for (auto& list : out) SHARDPULL_RETURN_IF_ERROR(reader.u32_list(list, kMaxRanks));
  return {};
}

void write_bytes(ByteWriter& writer, const std::vector<std::uint8_t>& bytes) {
  writer.u32(static_cast<std::uint32_t>(bytes.size()));
  writer.raw(std::as_bytes(std::span(bytes)));
}

Status read_bytes(ByteReader& reader, std::vector<std::uint8_t>& out, std::uint64_t max) {
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, max, 1));
  std::span<const std::byte> bytes;
  SHARDPULL_RETURN_IF_ERROR(reader.raw(count, bytes));
  out.resize(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = std::to_integer<std::uint8_t>(bytes[i]);
  return {};
}

Status read_tables(ByteReader& reader, InitTables& out) {
  SHARDPULL_RETURN_IF_ERROR(read_header(reader, kTablesTag));
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxRanks, 4));
  out.producers.resize(count);
  for (std::string& address : out.producers)
    SHARDPULL_RETURN_IF_ERROR(reader.string(address, kMaxAddressBytes));
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxTensors, 4 + 1 + 4));
  out.metadata.resize(count);
  for (TensorMeta& meta : out.metadata) {
    SHARDPULL_RETURN_IF_ERROR(reader.string(meta.name, kMaxNameBytes));
    SHARDPULL_RETURN_IF_ERROR(read_dtype(reader, meta.dtype));
    SHARDPULL_RETURN_IF_ERROR(reader.i64_list(meta.shape, kMaxDims));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u32_list(out.group_lens, kMaxTensors));
  SHARDPULL_RETURN_IF_ERROR(read_lists(reader, out.ownership.owner_sets, kMaxOwnerSets));
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxTensors, 4));
  out.ownership.name_owner_class.resize(count);
  for (std::int32_t& owner_class : out.ownership.name_owner_class) {
    std::uint32_t bits = 0;
    SHARDPULL_RETURN_IF_ERROR(reader.u32(bits));
    owner_class = static_cast<std::int32_t>(bits);
  }
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxPieces, 4 + 4 + 4 + 4));
  out.ownership.pieces.resize(count);
  for (OwnedPiece& piece : out.ownership.pieces) {
    SHARDPULL_RETURN_IF_ERROR(reader.u32(piece.name));
    SHARDPULL_RETURN_IF_ERROR(read_box(reader, piece.box));
    SHARDPULL_RETURN_IF_ERROR(reader.u32(piece.owner_class));
  }
  SHARDPULL_RETURN_IF_ERROR(read_bytes(reader, out.producer_mappable, kMaxRanks));
  SHARDPULL_RETURN_IF_ERROR(read_bytes(reader, out.producer_resident, kMaxRanks));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.num_consumers));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.num_replicas));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.workers_per_replica));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.ring_depth));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.presize));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.export_pack_limit));
  std::uint8_t transport = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u8(transport));
  if (transport > static_cast<std::uint8_t>(TransportKind::kUcx))
    return reader.malformed(fmt::format("unknown transport {}", transport));
  out.transport = static_cast<TransportKind>(transport);
  std::uint8_t integrity = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.u8(integrity));
  if (integrity > static_cast<std::uint8_t>(Integrity::kFull))
    return reader.malformed(fmt::format("unknown integrity {}", integrity));
  out.integrity = static_cast<Integrity>(integrity);
  return reader.end();
}

Status read_plan(ByteReader& reader, WorkerPlan& out) {
  SHARDPULL_RETURN_IF_ERROR(read_header(reader, kPlanTag));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.consumer));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.ring_depth));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.sharing_group));
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxChunks, kMinChunkBytes));
  out.chunks.resize(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    SHARDPULL_RETURN_IF_ERROR(read_chunk(reader, out.chunks[i]));
    if (out.chunks[i].chunk_id != i)
      return reader.malformed(fmt::format("chunk {} calls itself {}", i, out.chunks[i].chunk_id));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u32_list(out.pre_free, kMaxTensors));
  SHARDPULL_RETURN_IF_ERROR(read_lists(reader, out.group_owners, kMaxTensors));
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxRanks, 4 + 8 + 4 + 16));
  out.producers.resize(count);
  for (ProducerPlan& producer : out.producers) {
    SHARDPULL_RETURN_IF_ERROR(reader.u32(producer.producer));
    SHARDPULL_RETURN_IF_ERROR(reader.u64(producer.serve_slot_bytes));
    SHARDPULL_RETURN_IF_ERROR(reader.u32(producer.pulls));
    SHARDPULL_RETURN_IF_ERROR(read_digest(reader, producer.digest));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.receive_slot_bytes));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.bytes_kept));
  SHARDPULL_RETURN_IF_ERROR(reader.u64(out.bytes_planned));
  return reader.end();
}

Status read_holding(ByteReader& reader, Holding& out) {
  SHARDPULL_RETURN_IF_ERROR(read_header(reader, kHoldingTag));
  SHARDPULL_RETURN_IF_ERROR(reader.u32(out.rank));
  SHARDPULL_RETURN_IF_ERROR(read_digest(reader, out.digest));
  SHARDPULL_RETURN_IF_ERROR(read_bytes(reader, out.whole, (kMaxTensors + 7) / 8));
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxPieces, 4 + 4 + 4 + 4));
  out.pieces.resize(count);
  for (Piece& piece : out.pieces) {
    SHARDPULL_RETURN_IF_ERROR(reader.u32(piece.name));
    SHARDPULL_RETURN_IF_ERROR(read_box(reader, piece.box));
    SHARDPULL_RETURN_IF_ERROR(reader.u32(piece.rank));
  }
  SHARDPULL_RETURN_IF_ERROR(reader.boolean(out.mappable));
  SHARDPULL_RETURN_IF_ERROR(reader.boolean(out.resident));
  return reader.end();
}

Status read_pulls(ByteReader& reader, std::vector<PullDescription>& out) {
  SHARDPULL_RETURN_IF_ERROR(read_header(reader, kPullsTag));
  std::uint32_t count = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(count, kMaxChunks, kMinPullBytes));
  out.resize(count);
  for (PullDescription& pull : out) SHARDPULL_RETURN_IF_ERROR(read_pull(reader, pull));
  return reader.end();
}

// One key of a pull against the tables; `end` is where the key before it ended.
Status check_key(const PullDescription& pull, const ChunkKey& key, std::uint64_t end,
                 const InitTables& tables, const std::vector<std::uint32_t>& group_of) {
  if (key.name >= tables.metadata.size()) {
    return plan_error(fmt::format("name {} of {} names", key.name, tables.metadata.size()));
  }
  const TensorMeta& meta = tables.metadata[key.name];
  const auto wrong = [&](std::string problem) {
    return plan_error(fmt::format("'{}': {}", meta.name, problem), meta.name);
  };
  if (group_of[key.name] != pull.group)
    return wrong(fmt::format("it is in group {}, not {}", group_of[key.name], pull.group));

  const Ownership& own = tables.ownership;
  std::int64_t owner_class = own.name_owner_class.empty() ? 0 : own.name_owner_class[key.name];
  std::int64_t numel = *checked_numel(meta.shape);
  if (key.piece != 0) {
    if (key.piece > own.pieces.size() || own.pieces[key.piece - 1].name != key.name) {
      return wrong(fmt::format("piece {} is none of its pieces", key.piece - 1));
    }
    numel = box_numel(own.pieces[key.piece - 1].box);
    owner_class = own.pieces[key.piece - 1].owner_class;
  }
  if (owner_class != static_cast<std::int64_t>(pull.owner_class)) {
    return wrong(fmt::format("its owner class is {}, the pull's is {}", owner_class, pull.owner_class));
  }

  if (!dtype_valid(static_cast<std::uint8_t>(key.wire_dtype))) return wrong("unknown wire dtype");
  if (Status slice = check_slice(key.slice, key.wire_dtype, meta.dtype, numel); !slice.ok())
    return slice.with_context(meta.name);
  if (key.slice.regions.empty()) return wrong("a key without elements");
  if (canonicalise(key.slice.regions) != key.slice)
    return wrong(fmt::format("slice {} is not canonical", to_string(key.slice)));
  const auto bytes = bytes_of(key.wire_dtype, key.slice.numel());
  if (!bytes.ok()) return bytes.status().with_context(meta.name);
  if (*bytes != key.bytes)
    return wrong(fmt::format("{} bytes stated, slice {} has {}", key.bytes, to_string(key.slice), *bytes));
  const std::uint64_t offset = (end + kLayoutAlignment - 1) / kLayoutAlignment * kLayoutAlignment;
  if (key.offset != offset)
    return wrong(fmt::format("offset {} in the pull, the layout puts it at {}", key.offset, offset));
  return {};
}

}  // namespace

std::vector<std::byte> encode(const WorkerPlan& plan) {
  ByteWriter writer;
  write_header(writer, kPlanTag);
  writer.u32(plan.consumer);
  writer.u32(plan.ring_depth);
  writer.u32(plan.sharing_group);
  writer.u32(static_cast<std::uint32_t>(plan.chunks.size()));
  for (const Chunk& chunk : plan.chunks) write_chunk(writer, chunk);
  writer.u32_list(plan.pre_free);
  write_lists(writer, plan.group_owners);
  writer.u32(static_cast<std::uint32_t>(plan.producers.size()));
  for (const ProducerPlan& producer : plan.producers) {
    writer.u32(producer.producer);
    writer.u64(producer.serve_slot_bytes);
    writer.u32(producer.pulls);
    write_digest(writer, producer.digest);
  }
  writer.u64(plan.receive_slot_bytes);
  writer.u64(plan.bytes_kept);
  writer.u64(plan.bytes_planned);
  return writer.take();
}

Result<WorkerPlan> decode_plan(const std::byte* data, std::size_t size) {
  ByteReader reader({data, size}, "plan");
  WorkerPlan plan;
  SHARDPULL_RETURN_IF_ERROR(read_plan(reader, plan));
  return plan;
}

Digest128 digest(const WorkerPlan& plan) {
  return digest_of(encode(plan));
}

std::vector<std::byte> encode_pulls(const std::vector<PullDescription>& pulls) {
  ByteWriter writer;
  write_header(writer, kPullsTag);
  writer.u32(static_cast<std::uint32_t>(pulls.size()));
  for (const PullDescription& pull : pulls) write_pull(writer, pull);
  return writer.take();
}

Result<std::vector<PullDescription>> decode_pulls(const std::byte* data, std::size_t size) {
  ByteReader reader({data, size}, "pulls");
  std::vector<PullDescription> pulls;
  SHARDPULL_RETURN_IF_ERROR(read_pulls(reader, pulls));
  return pulls;
}

Digest128 pulls_digest(const std::vector<PullDescription>& pulls, std::uint32_t ring_depth) {
  ByteWriter writer;
  write_header(writer, kPullsTag);
  writer.u32(ring_depth);
  writer.u32(static_cast<std::uint32_t>(pulls.size()));
  for (const PullDescription& pull : pulls) write_pull(writer, pull);
  return digest_of(writer.bytes());
}

Status check_pulls(const std::vector<PullDescription>& pulls, const InitTables& tables,
                   std::uint32_t producer) {
  const Ownership& own = tables.ownership;
  const std::vector<std::uint32_t> group_of = group_of_names(tables);
  const std::uint32_t workers = effective_workers_per_replica(tables);
  for (std::size_t i = 0; i < pulls.size(); ++i) {
    const PullDescription& pull = pulls[i];
    const auto wrong = [&](std::string problem) {
      return plan_error(fmt::format("pull {} (chunk {}, run {}): {}", i, pull.chunk_id, pull.run, problem));
    };
    if (pull.lane.producer != producer)
      return wrong(fmt::format("it is for trainer {}, not {}", pull.lane.producer, producer));
    const bool regular = pull.lane.kind == LaneKind::kRegular;
    if (regular ? pull.lane.sharing_group >= workers
                : pull.lane.sharing_group < workers ||
                      pull.lane.sharing_group - workers >= tables.num_consumers) {
      return wrong(fmt::format("sharing group {} of a {} lane", pull.lane.sharing_group,
                               regular ? "regular" : "recovery"));
    }
    if (pull.lane != pulls.front().lane) return wrong("another lane than the first pull");
    if (pull.run >= tables.producers.size())
      return wrong(fmt::format("run {}, there are {} trainers", pull.run, tables.producers.size()));
    if (pull.seq != i) return wrong(fmt::format("seq {}, its place in the lane is {}", pull.seq, i));
    if (i > 0 && std::pair(pull.chunk_id, pull.run) <= std::pair(pulls[i - 1].chunk_id, pulls[i - 1].run)) {
      return wrong("not after the one before it");
    }
    if (pull.group >= tables.group_lens.size())
      return wrong(fmt::format("group {} of {}", pull.group, tables.group_lens.size()));
    if (own.owner_sets.empty() ? pull.owner_class != 0 : pull.owner_class >= own.owner_sets.size()) {
      return wrong(fmt::format("owner class {} of {}", pull.owner_class, own.owner_sets.size()));
    }
    if (!own.owner_sets.empty()) {
      const auto& owners = own.owner_sets[pull.owner_class];
      if (!std::binary_search(owners.begin(), owners.end(), producer)) {
        return wrong(fmt::format("trainer {} does not hold owner class {}", producer, pull.owner_class));
      }
    }
    if (pull.path == Path::kMapped && !maps(tables.transport))
      return wrong(fmt::format("path mapped is not served over {}", to_string(tables.transport)));
    if (pull.keys.empty()) return wrong("no keys");
    std::uint64_t end = 0;
    for (const ChunkKey& key : pull.keys) {
      if (Status status = check_key(pull, key, end, tables, group_of); !status.ok()) {
        return status.with_context(fmt::format("pull {} (chunk {}, run {})", i, pull.chunk_id, pull.run));
      }
      if (key.bytes > UINT64_MAX - key.offset - kLayoutAlignment) return wrong("larger than 2^64 bytes");
      end = key.offset + key.bytes;
    }
    if (pull.bytes != end) return wrong(fmt::format("{} bytes stated, its keys have {}", pull.bytes, end));
  }
  return {};
}

std::vector<std::byte> encode_tables(const InitTables& tables) {
  ByteWriter writer;
  write_header(writer, kTablesTag);
  writer.u32(static_cast<std::uint32_t>(tables.producers.size()));
  for (const std::string& address : tables.producers) writer.string(address);
  writer.u32(static_cast<std::uint32_t>(tables.metadata.size()));
  for (const TensorMeta& meta : tables.metadata) write_meta(writer, meta);
  writer.u32_list(tables.group_lens);
  write_lists(writer, tables.ownership.owner_sets);
  writer.u32(static_cast<std::uint32_t>(tables.ownership.name_owner_class.size()));
  for (const std::int32_t owner_class : tables.ownership.name_owner_class)
    writer.u32(static_cast<std::uint32_t>(owner_class));
  writer.u32(static_cast<std::uint32_t>(tables.ownership.pieces.size()));
  for (const OwnedPiece& piece : tables.ownership.pieces) {
    writer.u32(piece.name);
    write_box(writer, piece.box);
    writer.u32(piece.owner_class);
  }
  write_bytes(writer, tables.producer_mappable);
  write_bytes(writer, tables.producer_resident);
  writer.u32(tables.num_consumers);
  writer.u32(tables.num_replicas);
  writer.u32(tables.workers_per_replica);
  writer.u32(tables.ring_depth);
  writer.u64(tables.presize);
  writer.u64(tables.export_pack_limit);
  writer.u8(static_cast<std::uint8_t>(tables.transport));
  writer.u8(static_cast<std::uint8_t>(tables.integrity));
  return writer.take();
}

Result<InitTables> decode_tables(const std::byte* data, std::size_t size) {
  ByteReader reader({data, size}, "init payload");
  InitTables tables;
  SHARDPULL_RETURN_IF_ERROR(read_tables(reader, tables));
  SHARDPULL_RETURN_IF_ERROR(validate(tables));
  return tables;
}

std::vector<std::byte> encode_holding(const Holding& holding) {
  ByteWriter writer;
  write_header(writer, kHoldingTag);
  writer.u32(holding.rank);
  write_digest(writer, holding.digest);
  write_bytes(writer, holding.whole);
  writer.u32(static_cast<std::uint32_t>(holding.pieces.size()));
  for (const Piece& piece : holding.pieces) {
    writer.u32(piece.name);
    write_box(writer, piece.box);
    writer.u32(piece.rank);
  }
  writer.boolean(holding.mappable);
  writer.boolean(holding.resident);
  return writer.take();
}

Result<Holding> decode_holding(const std::byte* data, std::size_t size) {
  ByteReader reader({data, size}, "holding");
  Holding holding;
  SHARDPULL_RETURN_IF_ERROR(read_holding(reader, holding));
  return holding;
}

}  // namespace shardpull
