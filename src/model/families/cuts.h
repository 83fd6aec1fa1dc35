// A rank's part of a tensor, and the loaders that cut it out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config.h"
#include "model/families/family.h"
#include "shardpull/model.h"
#include "shardpull/status.h"
#include "shardpull/tensor.h"

namespace shardpull::families {

// Of a dim of `total`: this rank holds [start, start + length), in a local dim of `local` >= length.
struct Share {
  std::int64_t total = 0, start = 0, length = 0, local = 0;
  bool whole() const { return start == 0 && length == total; }
};

// What config.json says an extent is, in one layer. `key_value_heads` is the layer's; 0 outside layers. 0
// when config.json does not say.
std::int64_t extent_size(const ModelConfig& config, std::int64_t key_value_heads, Extent extent);
// The field of config.json that decides it, for messages.
std::string_view extent_field(Extent extent);

// Rank `rank` of `tp`'s share of a dim of `module` (for messages). Refused: a size that config.json lacks; tp
// that does not divide what must be whole on a rank, with the numbers.
Result<Share> share_of(const ModelConfig& config, std::int64_t key_value_heads, Extent extent, Cut cut,
                       int tp, int rank, const std::string& module);

// Rank `rank` of `ep`'s block of whole experts; the remainder goes to the first ranks. Refused: fewer experts
// than ranks, with the numbers.
Result<Share> expert_share(std::int64_t experts, int ep, int rank, const std::string& module);
// The rank whose block holds `expert`.
int expert_rank(std::int64_t experts, int ep, std::int64_t expert);

// How the parts of one parameter are cut out of their checkpoint tensors. Immutable once built; shared by the
// parameter's loader.
struct Cutter {
  struct Part {
    std::string shard;
    Share rows;
    std::int64_t local_start = 0;  // in the parameter
  };
  std::vector<Part> parts;
  std::optional<Share> columns;  // absent: one dim

  // Of a checkpoint tensor with `rows` rows.
  std::vector<std::int64_t> shape_of(std::int64_t rows) const;
  std::int64_t fused_rows() const;  // of one tensor with all parts
  // Of the checkpoint tensor that feeds `shard`; "" with several parts is the fused one.
  std::vector<std::int64_t> source_shape(std::string_view shard) const;
  // The loader. Refused: a tensor of another shape, with both.
  Status load(Parameter& parameter, const Tensor& loaded, const std::string& shard) const;
};

// The same for the two stacks of routed experts. A shard is "E.w1" (gate), "E.w3" (up) or "E.w2" (down) of
// expert E, which must be one of this rank's, or "w13" or "w2": a stack of all experts.
struct ExpertCutter {
  Share experts;       // whole experts
  Share intermediate;  // of each expert: whole when experts are spread over ranks
  std::int64_t hidden = 0;
  bool either_order = false;  // a stack may have its last two dims exchanged

  std::vector<std::int64_t> gate_up_shape() const {
    return {experts.length, 2 * intermediate.length, hidden};
  }
  std::vector<std::int64_t> down_shape() const { return {experts.length, hidden, intermediate.length}; }
  // Of a checkpoint tensor: per expert, or stacked in the order [E, out, in].
  std::vector<std::int64_t> source_shape(std::string_view shard) const;
  // Whether a stack of the given shape has its last two dims exchanged. Refused: a shape of neither order,
  // and one of both where `either_order` holds, since nothing tells which it is.
  Result<bool> exchanged(const std::string& name, std::string_view shard,
                         const std::vector<std::int64_t>& shape) const;
  Status load(Parameter& parameter, const Tensor& loaded, const std::string& shard) const;
};

// "NAME has shape [..]; config.json implies [..]".
Status wrong_shape(const std::string& name, const std::vector<std::int64_t>& shape,
                   const std::vector<std::int64_t>& implied);

}  // namespace shardpull::families
