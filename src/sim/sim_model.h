// The simulator's models: small, made from a few numbers, with every shape of ownership and of cut that plans
// know, and an answer to the question which bytes each worker must hold that uses none of the library's copy
// code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/random.h"
#include "plan/plan.h"
#include "plan/restrict.h"
#include "shardpull/bake.h"
#include "shardpull/status.h"
#include "sim/simulate.h"

namespace shardpull::sim {

// Bytes per element of the dtypes the models use.
std::uint64_t element_bytes(DType dtype);
// Byte `byte` of element `element` (row-major in the whole tensor) of tensor `name` at a version: no two
// alike.
std::byte source_byte(std::uint32_t name, std::uint64_t element, std::uint64_t byte, std::uint64_t version);
// Positions of a slice's elements, in order.
std::vector<std::uint64_t> positions_of(const Slice& slice);
// Positions of a window's elements, row-major.
std::vector<std::uint64_t> positions_of(const Destination& window);

// Immutable after make().
struct SimModel {
  static Result<SimModel> make(const SimOptions& options, std::uint64_t seed);

  std::uint32_t workers_per_replica() const;
  // Shape of a name, or of a piece of it.
  const std::vector<std::int64_t>& shape_of(std::uint32_t name, std::uint32_t piece) const;
  // The element of the whole tensor that element `position` of a piece is.
  std::uint64_t global_element(std::uint32_t name, std::uint32_t piece, std::uint64_t position) const;

  static constexpr std::byte kUnwritten{0xCD};  // parameters before their first scatter
  // The bytes of a parameter of a worker that holds `versions` of the names, 0 for those never moved: then
  // nothing of its module is.
  std::vector<std::byte> expected(std::uint32_t consumer, std::uint32_t parameter,
                                  const std::vector<std::uint64_t>& versions) const;
  // A set that a sync may move: all names of a module or none, on every worker.
  NameSet draw_names(Random& random) const;
  // One that no sync may move: half of a module of the first layer.
  NameSet half_a_module() const;
  // Whether a sync of `names` loads the worker's module.
  bool touches(std::uint32_t consumer, std::uint32_t module, const NameSet& names) const;

  SimOptions options;
  std::shared_ptr<const InitTables> tables;
  std::vector<Recording> recordings;                     // by consumer
  std::vector<std::shared_ptr<const WorkerPlan>> plans;  // by consumer
  std::vector<std::vector<std::uint32_t>> owned_groups;  // by rank
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>>
      held;                    // by rank: (name, piece), ascending
  std::vector<bool> resident;  // by rank
  std::vector<bool> staged;    // by worker: ConsumerConfig::staged
};

}  // namespace shardpull::sim
