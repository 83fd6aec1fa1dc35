// The plan: everything one worker does in every sync, made once, from data that every process of the fleet
// shares.
//
//   metadata --form_groups--> groups --resolve_ownership--> InitTables --plan_worker(recording)--> WorkerPlan
//
// Pure functions: same inputs, same bytes, whatever the locale, hash seed or thread count. No I/O, no clock.
// The rules are docs/PROTOCOL.md, "Planning". A plan can be encoded (canonical little-endian bytes),
// digested, summarised and explained without any process of the fleet running.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/bake.h"
#include "shardpull/dtype.h"
#include "shardpull/fleet.h"
#include "shardpull/slice.h"
#include "shardpull/source.h"
#include "shardpull/status.h"
#include "tensor/metadata_digest.h"

namespace shardpull {

inline constexpr std::uint64_t kLayoutAlignment = 16;  // bytes; every key of a packed chunk starts on it

// Limits on what may be planned and decoded, beyond those of base/limits.h.
inline constexpr std::uint32_t kMaxPieces = 64'000'000;    // pieces of one fleet
inline constexpr std::uint32_t kMaxOwnerSets = 4'000'000;  // distinct owner sets
inline constexpr std::uint32_t kMaxChunks = 16'000'000;    // chunks of one worker, and pulls at one producer
inline constexpr std::uint32_t kMaxKeysPerChunk = 4'000'000;  // fetch keys of one chunk
inline constexpr std::uint32_t kMaxPartsPerScatter =
    4096;  // keys one recorded copy may be cut into by one piece

// ---- gather groups
// ----------------------------------------------------------------------------------------------------

// A run of names: [first, first + count) of the metadata. `label` is "model.layers.3" or "" for a run outside
// layers.
struct GatherGroup {
  std::uint32_t first = 0, count = 0;
  std::string label;
  friend bool operator==(const GatherGroup&, const GatherGroup&) = default;
};

// Cuts the name list into gather groups in order of first appearance: a name's group is its first dotted part
// of ASCII digits together with the path before it, and every run of names without such a part is a group of
// its own. Values compare as numbers of any length ("00" is "0"). Flattening the groups reproduces the list.
// Refused: a duplicate name, a key that returns after another group (naming the name and both places).
Result<std::vector<GatherGroup>> form_groups(const std::vector<TensorMeta>& metadata);
// The reference's order of a list of names: unindexed before the first indexed one; prefixes by first
// appearance, values ascending; all other unindexed names. Returns indices into `names`; names of one group
// keep their order.
std::vector<std::uint32_t> normalise(const std::vector<std::string>& names);

// ---- ownership
// --------------------------------------------------------------------------------------------------------

// What one trainer rank declares. Whole names as a bitmask over metadata order, lowest bit first, ceil(n/8)
// bytes; pieces for names not held whole.
struct Holding {
  std::uint32_t rank = 0;
  Digest128 digest;  // metadata_digest of ITS metadata
  std::vector<std::uint8_t> whole;
  std::vector<Piece> pieces;
  // Whether every tensor this rank publishes lies in memory consumers can map; false: only storages up to
  // export_pack_limit (they are packed into export buffers) can be.
  bool mappable = true;
  // Whether it publishes in place, without credit or export buffers (WeightSource::resident).
  bool resident = false;
  friend bool operator==(const Holding&, const Holding&) = default;
};

// A box of a name and the ranks that hold it. Pieces of a name are disjoint, not empty and tile it: where the
// boxes that ranks declare overlap they are cut, and the common part is one piece held by both. Such a piece
// is a sub-box of what each of its owners publishes.
struct OwnedPiece {
  std::uint32_t name = 0;
  Box box;
  std::uint32_t owner_class = 0;
  friend bool operator==(const OwnedPiece&, const OwnedPiece&) = default;
};

// Transposed ownership. Empty tables mean that everyone holds everything. name_owner_class is -1 for names
// held in pieces.
struct Ownership {
  std::vector<std::vector<std::uint32_t>>
      owner_sets;  // each ascending; numbered by first appearance in metadata order
  std::vector<std::int32_t> name_owner_class;
  std::vector<OwnedPiece> pieces;  // ascending by (name, box start)
  friend bool operator==(const Ownership&, const Ownership&) = default;
};

// Transposes what the ranks declare; `holdings` in any order, one of each rank 0..n-1. Refused, naming ranks
// and names: differing digests, a rank missing or twice, unknown or out-of-range held names, an empty held
// set, a name (or part of one) that nobody holds.
Result<Ownership> resolve_ownership(const std::vector<TensorMeta>& metadata,
                                    const std::vector<Holding>& holdings);

// ---- init payload
// -----------------------------------------------------------------------------------------------------

// What a consumer receives once. All tables are indexed by metadata order.
struct InitTables {
  std::vector<std::string> producers;  // hot-channel addresses in rank order
  std::vector<TensorMeta> metadata;
  std::vector<std::uint32_t> group_lens;
  Ownership ownership;
  std::vector<std::uint8_t> producer_mappable;  // per producer, Holding::mappable
  std::vector<std::uint8_t> producer_resident;  // per producer, Holding::resident
  std::uint32_t num_consumers = 1;              // C
  std::uint32_t num_replicas = 1;
  std::uint32_t workers_per_replica = 0;  // 0 = C / num_replicas
  std::uint32_t ring_depth = 2;           // K
  std::uint64_t presize = 0;
  std::uint64_t export_pack_limit = 64ull << 20;
  TransportKind transport = TransportKind::kShm;  // of the hot channel; decides which paths there are
  Integrity integrity = Integrity::kWire;         // which paths are summed: plan/integrity.h
  friend bool operator==(const InitTables&, const InitTables&) = default;
};

// Checks every rule of the payload; the error names the field.
Status validate(const InitTables& tables);

// Workers of one replica, as routing and slot sharing count them: the field, or C / num_replicas where it is
// 0. A value equal to C means that no slots are shared. The tables must be valid.
std::uint32_t effective_workers_per_replica(const InitTables& tables);

// Per name, its gather group. The tables must be valid.
std::vector<std::uint32_t> group_of_names(const InitTables& tables);

// The owners of each group: all ranks that hold any of its names, ascending. They publish it and receive its
// signals. The tables must be valid.
std::vector<std::vector<std::uint32_t>> group_owners(const InitTables& tables);

// Whether everything is held by a rank other than those (ascending). The tables must be valid.
bool held_without(const InitTables& tables, const std::vector<std::uint32_t>& lost);

// ---- routing
// ----------------------------------------------------------------------------------------------------------

// The producers consumer `consumer` pulls from, for an owner set: the block rule, within a replica. With P'
// owners and C' workers per replica, c = consumer mod C': owners [c P'/C', (c+1) P'/C') when P' >= C', else
// the single owner c P'/C'.
std::vector<std::uint32_t> route_block(const std::vector<std::uint32_t>& owners, std::uint32_t consumer,
                                       std::uint32_t workers_per_replica);

// A producer and how much of it is there for one consumer, relative to the others of the same block.
struct BlockOwner {
  std::uint32_t producer = 0;
  std::uint64_t weight = 1;
  friend bool operator==(const BlockOwner&, const BlockOwner&) = default;
};
// The block rule without rounding: the owners laid side by side, the consumers likewise over the same length,
// each takes from the owners it lies against, by the length of the contact. An owner is C' long, a consumer
// P', so the weights of a block sum to P' and those of an owner over all consumers to C'. Equal to
// route_block, with equal weights, where P' or C' divides the other.
std::vector<BlockOwner> weighted_block(const std::vector<std::uint32_t>& owners, std::uint32_t consumer,
                                       std::uint32_t workers_per_replica);

// The greedy cut of a list of byte sizes into at most `runs` contiguous runs: a new run starts before the
// item that would take the current one past ceil(total / runs), unless `runs` runs exist already; the last
// run takes the rest. Returns the first item of every run; no run is empty.
std::vector<std::uint32_t> greedy_cut(const std::vector<std::uint64_t>& bytes, std::uint32_t runs);
// The same with one run per weight (each > 0), at most ceil(total * weight / sum of weights) long.
std::vector<std::uint32_t> greedy_cut(const std::vector<std::uint64_t>& bytes,
                                      const std::vector<std::uint64_t>& weights);

// ---- the plan of one worker
// -------------------------------------------------------------------------------------------

enum class Path : std::uint8_t { kPacked = 0, kMapped = 1, kDirect = 2 };
// kAuto, kDirect: key by key (plan/path.h). kDirect takes every key that can be read directly (contiguous on
// both sides, over cma also long runs); kAuto maps where the transport can, and elsewhere takes those of them
// that are worth it.
enum class PathPolicy : std::uint8_t { kAuto, kPacked, kMapped, kDirect };
std::string_view to_string(Path path);

enum class LaneKind : std::uint8_t { kRegular = 0, kRecovery = 1 };
// A lane orders pulls: `seq mod slots` names the slot. A consumer has a regular lane, which it shares with the
// same worker of every other replica, and a recovery lane of its own, for pulls whose producer died:
// docs/PROTOCOL.md, "Takeover".
struct Lane {
  std::uint32_t producer = 0;
  // Regular: consumer id mod workers_per_replica. Recovery: workers_per_replica + consumer id. So it also
  // names the serve ring.
  std::uint32_t sharing_group = 0;
  LaneKind kind = LaneKind::kRegular;
  friend bool operator==(const Lane&, const Lane&) = default;
};

// One fetch key of a chunk and its place in the packed layout.
struct ChunkKey {
  std::uint32_t name = 0;
  std::uint32_t piece = 0;  // index into Ownership::pieces + 1, 0 = the whole tensor
  DType wire_dtype = DType::kF32;
  Slice slice;  // over the piece's logical row-major elements (the whole tensor's when piece is 0)
  std::uint64_t offset = 0;  // bytes from the chunk's start, a multiple of kLayoutAlignment
  std::uint64_t bytes = 0;
  friend bool operator==(const ChunkKey&, const ChunkKey&) = default;
};

// One part of a chunk that one producer serves: keys [first_key, first_key + key_count). One run unless
// pull_split > 1. Without keys (in a restricted plan only) nothing is pulled: the run keeps its place among
// the chunk's.
struct Run {
  std::uint32_t producer = 0;
  std::uint32_t first_key = 0, key_count = 0;
  std::uint64_t offset = 0, bytes = 0;  // its part of the slot; the producer packs it from 0
  std::uint32_t seq = 0;                // in its lane
  friend bool operator==(const Run&, const Run&) = default;
};

// A key of this chunk and where it lands. The key's elements, in order, fill the destination row-major.
struct PlannedScatter {
  std::uint32_t key = 0;  // index into Chunk::keys
  Destination destination;
  friend bool operator==(const PlannedScatter&, const PlannedScatter&) = default;
};

struct Chunk {
  std::uint32_t chunk_id = 0;  // stable: position in WorkerPlan::chunks
  std::uint32_t group = 0;
  std::uint32_t owner_class = 0;
  Path path = Path::kPacked;
  std::vector<std::uint32_t> candidates;  // every owner, primary first; the others serve when it dies
  std::vector<Run> runs;                  // empty when the chunk has no keys
  std::vector<ChunkKey> keys;
  std::uint64_t bytes = 0;    // ends with the last key, no padding
  std::uint8_t encoding = 0;  // 0 = raw
  std::vector<PlannedScatter> scatters;
  std::vector<std::uint32_t> materialise;   // modules (Recording::modules) whose first chunk this is
  std::vector<std::uint32_t> post_process;  // modules whose last chunk this is
  std::vector<std::uint32_t>
      signal_groups;  // groups to signal to all their owners once this chunk has landed
  friend bool operator==(const Chunk&, const Chunk&) = default;
};

struct ProducerPlan {  // what this worker takes at one producer
  std::uint32_t producer = 0;
  std::uint64_t serve_slot_bytes = 0;  // largest packed chunk or run taken there; 0 when only mapped
  std::uint32_t pulls = 0;
  Digest128 digest;  // pulls_digest of pulls_at(plan, producer)
  friend bool operator==(const ProducerPlan&, const ProducerPlan&) = default;
};

struct WorkerPlan {
  std::uint32_t consumer = 0;
  std::uint32_t ring_depth = 2;
  std::uint32_t sharing_group = 0;
  std::vector<Chunk> chunks;            // in pull order
  std::vector<std::uint32_t> pre_free;  // groups this worker takes nothing from: signalled at sync start
  std::vector<std::vector<std::uint32_t>> group_owners;
  std::vector<ProducerPlan> producers;   // only those this worker pulls from, ascending
  std::uint64_t receive_slot_bytes = 0;  // largest packed chunk, at least presize; 0 when nothing is packed
  std::uint64_t bytes_kept = 0;          // bytes of the sources that the baked copies read, each byte once
  std::uint64_t bytes_planned = 0;       // sum of key bytes over chunks = what a sync moves
  friend bool operator==(const WorkerPlan&, const WorkerPlan&) = default;
};

// Which producer of several that hold the same bytes serves a chunk.
enum class Balance : std::uint8_t {
  kBytes,     // weighted_block; within it so that bytes come out even by weight (docs/PROTOCOL.md, "Routing")
  kRotation,  // route_block; within it the next one with every gather group
};

// Bytes of the plan's packed pulls that are no key's: gaps between keys, which travel with them.
std::uint64_t padding_bytes(const WorkerPlan& plan);

struct PlanOptions {
  std::uint64_t max_chunk_bytes = 64ull << 20;  // 0 = off
  std::uint32_t chunk_split = 1;
  std::uint32_t pull_split = 1;
  PathPolicy path = PathPolicy::kAuto;
  Balance balance = Balance::kBytes;
};

// Order of the chunks: groups ascending, owner classes ascending within a group, what is read directly last,
// then the cuts by chunk_split and max_chunk_bytes. Within (group, owner class): modules by the first of their
// names in the group, copies of a module as recorded, keys by first use; all scatters of one key are in the chunk of that key.
//
// Copies without elements take no part. A baked module that is left with fills or empty copies only is
// materialised and post-processed with the first chunk; where the worker pulls nothing at all, that is a
// chunk without keys.
//
// Refused: tables that do not validate, a consumer id out of range, a recording of other metadata, path
// mapped where the transport or a producer's memory cannot (path direct packs what cannot), names that did not
// bake (plan/fallback.h has them as modules); kUnimplemented: copies which pieces or max_chunk_bytes would cut in a
// way that no strided window describes. Invariant, checked before it returns: every group is signalled exactly once to every one of its owners, every baked
// scatter's elements are in exactly one chunk.
Result<WorkerPlan> plan_worker(const InitTables& tables, const Recording& recording, std::uint32_t consumer,
                               const PlanOptions& options = {});

// Canonical bytes of the whole plan, and their digest (XXH3-128). Decoding refuses hostile bytes; it does not
// check the plan against tables.
std::vector<std::byte> encode(const WorkerPlan& plan);
Result<WorkerPlan> decode_plan(const std::byte* data, std::size_t size);
Digest128 digest(const WorkerPlan& plan);

// ---- what travels to a producer at reserve
// ------------------------------------------------------------------------------

// One pull as the producer sees it: a chunk's run. Key offsets are relative to the run's start.
struct PullDescription {
  std::uint32_t chunk_id = 0, run = 0, group = 0, owner_class = 0;
  Path path = Path::kPacked;
  Lane lane;
  std::uint32_t seq = 0;
  std::uint64_t bytes = 0;
  std::vector<ChunkKey> keys;
  friend bool operator==(const PullDescription&, const PullDescription&) = default;
};
// What `plan` pulls at `producer`, in pull order.
std::vector<PullDescription> pulls_at(const WorkerPlan& plan, std::uint32_t producer);
// What `plan` may have to pull at `producer` because another died, in plan order: every pull that it is a
// candidate for and does not serve by plan. `workers_per_replica` as effective_workers_per_replica has it.
// `seq` is the place in this list; in a sync the pulls of a recovery lane are numbered as they are issued.
std::vector<PullDescription> recovery_pulls_at(const WorkerPlan& plan, std::uint32_t producer,
                                               std::uint32_t workers_per_replica);
// Slots of the serve ring behind a lane with these announced pulls. Regular: K. Recovery: 2 K times the runs
// of a chunk. Pulls there are issued out of plan order, but while one has not landed, all others in its lane
// are of the 2 K - 1 chunks around its own (drain before issue), so that none ever meets a slot in use.
std::uint32_t lane_slots(const std::vector<PullDescription>& pulls, std::uint32_t ring_depth);
// Bytes of a slot there: the largest packed pull.
std::uint64_t lane_slot_bytes(const std::vector<PullDescription>& pulls);
// Canonical little-endian bytes; decode checks every count, size and bound against `limits`-like constants
// and refuses hostile bytes with a message.
std::vector<std::byte> encode_pulls(const std::vector<PullDescription>& pulls);
Result<std::vector<PullDescription>> decode_pulls(const std::byte* data, std::size_t size);
// Over (chunk id, lane, seq, keys as name, wire dtype and canonical slice, offsets, bytes) in pull order, and
// K. Sharers of serve slots must agree on it.
Digest128 pulls_digest(const std::vector<PullDescription>& pulls, std::uint32_t ring_depth);
// Checks pulls a consumer sent against the tables: names, pieces, groups, owner classes, dtypes, canonical
// slices within bounds, layout, bytes, one lane and sequence numbers. Run by the producer. The tables must be
// valid.
Status check_pulls(const std::vector<PullDescription>& pulls, const InitTables& tables,
                   std::uint32_t producer);

// Encoded init payload and holdings (same codec rules). decode_tables validates what it decoded; a holding is
// checked by resolve_ownership.
std::vector<std::byte> encode_tables(const InitTables& tables);
Result<InitTables> decode_tables(const std::byte* data, std::size_t size);
std::vector<std::byte> encode_holding(const Holding& holding);
Result<Holding> decode_holding(const std::byte* data, std::size_t size);

// ---- for people
// -------------------------------------------------------------------------------------------------------

// Who holds `name`, and how they publish it. Lines of text ending in a newline; a name the metadata lacks is
// answered with the nearest ones.
std::string explain(const InitTables& tables, std::string_view name);
// Who serves `name` to the worker of `plan`, by which path, and why; or why it is dead there. Lines of text
// ending in a newline; nothing for a name the metadata lacks.
std::string explain(const InitTables& tables, const WorkerPlan& plan, const Recording& recording,
                    std::string_view name);
// What one worker pulls: bytes in all and per producer, how those publish, chunks, slots, groups, dead names,
// conversions.
std::string summarise(const InitTables& tables, const WorkerPlan& plan, const Recording& recording);

}  // namespace shardpull
