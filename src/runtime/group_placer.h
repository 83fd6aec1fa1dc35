// GroupPlacer: checks what a weight source yields, and decides where consumers read it: packed into an export
// buffer, in place where peers can map it, or nowhere but through packs. What the rank holds as one tensor or
// piece is placed once; the plan's pieces of it point into that.
//
// Confined to the thread of send_weights.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "plan/plan.h"
#include "plan/published.h"
#include "plan/restrict.h"
#include "runtime/export_buffers.h"
#include "runtime/producer_server.h"
#include "shardpull/source.h"
#include "transport/transport.h"

namespace shardpull {

// What this rank has said of itself, and what the fleet's tables make of it: constant after its init.
struct RankDescription {
  std::uint32_t rank = 0;
  std::vector<TensorMeta> metadata;
  std::vector<GatherGroup> groups;
  std::vector<bool> whole;    // by name: held whole
  std::vector<Piece> pieces;  // ascending by name, those of one name as held_pieces() lists them
  std::vector<std::uint32_t> owned_groups;  // ascending
  bool mappable = false;                    // WeightSource::in_engine_memory
  bool resident = false;                    // published in place: no export buffers
  std::uint64_t export_pack_limit = 0;
  bool adopts = false;  // its transport lets peers read any memory of this process
  bool sums_views = false;  // integrity full: what the source yields must stay as it is until it is released
  std::vector<PublishedPart> parts;  // ascending by name; set once the tables are known

  // Its pieces of one name.
  std::span<const Piece> pieces_of(std::uint32_t name) const;
  // The shape of its `held`-th piece of a name, or of the name held whole.
  const std::vector<std::int64_t>& held_shape(std::uint32_t name, std::uint32_t held) const;
};

// Fills in `whole`, `pieces` and `owned_groups` of `rank`, whose metadata and groups are set, from what its
// source declares. Refused, naming the tensor: a name out of range, a name held whole and in pieces, a box
// that is empty or leaves its tensor, one whose first element lies within a byte.
Status describe_holding(const std::vector<std::uint32_t>& names, std::vector<Piece> pieces,
                        RankDescription& rank);

class GroupPlacer {
 public:
  GroupPlacer(const RankDescription& rank, const Clock& clock) : rank_(rank), clock_(clock) {}

  // Keeps `transport`, which must outlive it. Allocates one export buffer per resident group, each as large as the largest owned group's small tensors
  // and pieces. None for a resident rank.
  Status allocate(Transport& transport, std::uint32_t resident_groups);
  const ExportBuffers& exports() const { return exports_; }

  // Forgets the figures of the last sync. `names`: those this one is restricted to.
  void begin_sync(NameSet names);
  // Checks a yielded group: the expected one, an entry per whole name and per piece, a view exactly for what
  // is held and listed, dtype and shape of the metadata or box, and a storage that holds every byte. Errors
  // name tensor and rule.
  Status check(const GroupTensors& tensors, std::uint32_t group) const;
  // Places a checked group: copies its small tensors (complete when this returns) and says where each
  // published part is. `memory`: what Trainer::allocate gave out and somebody still owns, ascending by
  // address. The group counts as resident from here on.
  Result<std::vector<ServedTensor>> place(const GroupTensors& tensors, std::uint32_t group,
                                          const std::vector<std::shared_ptr<ExportedMemory>>& memory);
  // Memory of the source that peers may read while `group` is resident, for a rank that adopts.
  std::vector<std::shared_ptr<ExportedMemory>> adopted(std::uint32_t group) const;
  // Whether every view that `group` was yielded with still has the bytes it had when it was placed, for a rank
  // that sums views; else DATA_LOSS naming group, tensor and rank. Before release().
  Status check_unchanged(std::uint32_t group) const;
  // Nobody reads the group any more. False when it was not resident.
  bool release(std::uint32_t group);
  std::vector<std::uint32_t> resident() const;

  std::uint64_t export_ns() const { return export_ns_; }
  std::uint64_t export_bytes() const { return export_bytes_; }
  // Most bytes of gathered groups held at once; of a resident rank everything it has published.
  std::uint64_t peak_resident_bytes() const { return peak_resident_bytes_; }

 private:
  // Where one held tensor or piece lies, and so everything cut from it.
  struct Placed {
    const std::byte* data = nullptr;
    std::vector<std::int64_t> stride;
    RemoteRef where;  // of `data`; region 0: not exported, packed only
  };

  // A view of the source and the sum of its bytes.
  struct SummedView {
    std::uint32_t name = 0, held = 0;
    TensorView view;
    std::uint64_t sum = 0;
  };

  Status wrong(const std::string& what, const std::string& tensor = {}) const;
  // "w" or "w piece 2 [0:4, 0:8]", for messages.
  std::string label(std::uint32_t name, std::uint32_t held) const;
  Status check_view(const TensorView& view, const NamedView& entry) const;
  Result<Placed> place_held(const NamedView& entry, std::uint32_t group,
                            const std::vector<std::shared_ptr<ExportedMemory>>& memory);
  Result<ServedTensor> cut(const Placed& held, const PublishedPart& part) const;

  const RankDescription& rank_;
  const Clock& clock_;
  Transport* transport_ = nullptr;
  ExportBuffers exports_;
  NameSet names_;
  // The export buffer of the group that is being placed, and the bytes of it in use.
  ExportedMemory* buffer_ = nullptr;
  std::uint64_t filled_ = 0;
  std::map<std::uint32_t, std::uint64_t> resident_;  // group -> bytes
  std::map<std::uint32_t, std::vector<std::shared_ptr<ExportedMemory>>> adopted_;  // by group
  std::map<std::uint32_t, std::vector<SummedView>> summed_;                        // by group
  std::uint64_t resident_bytes_ = 0, peak_resident_bytes_ = 0, export_ns_ = 0, export_bytes_ = 0;
};

}  // namespace shardpull
