// GroupPlacer: checks what a weight source yields, and decides where consumers read it: packed into an export
// buffer, in place where peers can map it, or nowhere but through packs.
//
// Confined to the thread of send_weights.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "plan/plan.h"
#include "runtime/export_buffers.h"
#include "runtime/producer_server.h"
#include "shardpull/source.h"
#include "transport/transport.h"

namespace shardpull {

// What this rank has said of itself: constant after its init.
struct RankDescription {
  std::uint32_t rank = 0;
  std::vector<TensorMeta> metadata;
  std::vector<GatherGroup> groups;
  std::vector<bool> held;                   // by name
  std::vector<std::uint32_t> owned_groups;  // ascending
  bool mappable = false;                    // WeightSource::in_engine_memory
  std::uint64_t export_pack_limit = 0;
};

class GroupPlacer {
 public:
  GroupPlacer(const RankDescription& rank, const Clock& clock) : rank_(rank), clock_(clock) {}

  // Allocates one export buffer per resident group, each as large as the largest owned group's small tensors.
  Status allocate(Transport& transport, std::uint32_t resident_groups);
  const ExportBuffers& exports() const { return exports_; }

  // Forgets the figures of the last sync.
  void begin_sync();
  // Checks a yielded group: the expected one, an entry per name, a view exactly for the names held, dtype and
  // shape of the metadata, and a storage that holds every byte. Errors name tensor and rule.
  Status check(const GroupTensors& tensors, std::uint32_t group) const;
  // Places a checked group: copies its small tensors (complete when this returns) and says where everything
  // is. `memory`: what Trainer::allocate gave out and somebody still owns. The group counts as resident from
  // here on.
  Result<std::vector<ServedTensor>> place(const GroupTensors& tensors, std::uint32_t group,
                                          const std::vector<std::shared_ptr<ExportedMemory>>& memory);
  // Nobody reads the group any more. False when it was not resident.
  bool release(std::uint32_t group);
  std::vector<std::uint32_t> resident() const;

  std::uint64_t export_ns() const { return export_ns_; }
  std::uint64_t export_bytes() const { return export_bytes_; }
  std::uint64_t peak_resident_bytes() const { return peak_resident_bytes_; }

 private:
  Status wrong(const std::string& what, const std::string& tensor = {}) const;
  Status check_view(const TensorView& view, const TensorMeta& meta) const;

  const RankDescription& rank_;
  const Clock& clock_;
  ExportBuffers exports_;
  std::map<std::uint32_t, std::uint64_t> resident_;  // group -> bytes
  std::uint64_t resident_bytes_ = 0, peak_resident_bytes_ = 0, export_ns_ = 0, export_bytes_ = 0;
};

}  // namespace shardpull
