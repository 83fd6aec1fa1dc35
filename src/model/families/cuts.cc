#include "model/families/cuts.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/checked.h"
#include "base/status_macros.h"
#include "model/describe.h"

namespace shardpull::families {
namespace {

constexpr std::int64_t kVocabAlignment = 64;  // vLLM's DEFAULT_VOCAB_PADDING_SIZE

Status refused(std::string message, Reason reason = Reason::kBadArgument, std::string tensor = {}) {
  return Status(StatusCode::kInvalidArgument, std::move(message),
                ErrorInfo{.reason = reason, .tensor = std::move(tensor)});
}

// An even cut into `parts` of which `rank` gets one.
Result<Share> even_share(std::int64_t total, std::int64_t unit, std::string_view what, std::int64_t parts,
                         std::int64_t rank, const std::string& module) {
  if (total % parts != 0) {
    return refused("tp=" + std::to_string(parts) + " does not divide " + std::string(what) + " " +
                   std::to_string(total) + " of " + module);
  }
  const std::int64_t length = total / parts * unit;
  return Share{total * unit, rank * length, length, length};
}

}  // namespace

std::int64_t extent_size(const ModelConfig& config, std::int64_t key_value_heads, Extent extent) {
  const std::int64_t heads = config.num_attention_heads;
  const std::int64_t no_rope = config.qk_nope_head_dim.value_or(0);
  const std::int64_t rope = config.qk_rope_head_dim.value_or(0);
  const std::int64_t value = config.v_head_dim.value_or(0);
  switch (extent) {
    case Extent::kNone:
      return 1;
    case Extent::kHidden:
      return config.hidden_size;
    case Extent::kIntermediate:
      return config.intermediate_size;
    case Extent::kQuery:
      return heads * config.head_dim;
    case Extent::kKeyValue:
      return key_value_heads * config.head_dim;
    case Extent::kHeadDim:
      return config.head_dim;
    case Extent::kVocab:
      return config.vocab_size;
    case Extent::kPositions:
      return config.max_position_embeddings;
    case Extent::kTokenTypes:
      return config.type_vocab_size;
    case Extent::kExperts:
      return config.num_experts.value_or(0);
    case Extent::kExpertIntermediate:
      return config.moe_intermediate_size.value_or(0);
    case Extent::kSharedIntermediate:
      return config.n_shared_experts.value_or(0) * config.moe_intermediate_size.value_or(0);
    case Extent::kQueryLatent:
      return config.q_lora_rank.value_or(0);
    case Extent::kKeyValueLatent:
      return config.kv_lora_rank.value_or(0);
    case Extent::kKeyValueLatentMqa:
      return config.kv_lora_rank.value_or(0) + rope;
    case Extent::kLatentQuery:
      return heads * (no_rope + rope);
    case Extent::kLatentKeyValue:
      return heads * (no_rope + value);
    case Extent::kLatentValue:
      return heads * value;
  }
  return 0;
}

std::string_view extent_field(Extent extent) {
  switch (extent) {
    case Extent::kNone:
      break;
    case Extent::kHidden:
      return "hidden_size";
    case Extent::kIntermediate:
      return "intermediate_size";
    case Extent::kQuery:
      return "num_attention_heads";
    case Extent::kKeyValue:
      return "num_key_value_heads";
    case Extent::kHeadDim:
      return "head_dim";
    case Extent::kVocab:
      return "vocab_size";
    case Extent::kPositions:
      return "max_position_embeddings";
    case Extent::kTokenTypes:
      return "type_vocab_size";
    case Extent::kExperts:
      return "num_experts";
    case Extent::kExpertIntermediate:
      return "moe_intermediate_size";
    case Extent::kSharedIntermediate:
      return "n_shared_experts x moe_intermediate_size";
    case Extent::kQueryLatent:
      return "q_lora_rank";
    case Extent::kKeyValueLatent:
    case Extent::kKeyValueLatentMqa:
      return "kv_lora_rank";
    case Extent::kLatentQuery:
    case Extent::kLatentKeyValue:
    case Extent::kLatentValue:
      return "num_attention_heads";
  }
  return "size";
}

Result<Share> share_of(const ModelConfig& config, std::int64_t key_value_heads, Extent extent, Cut cut,
                       int tp, int rank, const std::string& module) {
  const std::int64_t total = extent_size(config, key_value_heads, extent);
  if (total <= 0) {
    return refused(config.origin + ": " + std::string(extent_field(extent)) + " is missing or 0, and " +
                       module + " needs it",
                   Reason::kCheckpointMalformed);
  }
  switch (cut) {
    case Cut::kWhole:
      return Share{total, 0, total, total};
    case Cut::kEven:
      return even_share(total, 1, extent_field(extent), tp, rank, module);
    case Cut::kQueryHeads: {
      const std::int64_t heads = config.num_attention_heads;
      return even_share(heads, total / heads, "num_attention_heads", tp, rank, module);
    }
    case Cut::kKeyValueHeads: {
      const std::int64_t heads = key_value_heads;
      if (heads >= tp) return even_share(heads, total / heads, "num_key_value_heads", tp, rank, module);
      if (tp % heads != 0) {
        return refused("tp=" + std::to_string(tp) + " is no multiple of num_key_value_heads " +
                       std::to_string(heads) + " of " + module + ", so its heads cannot be shared evenly");
      }
      return even_share(heads, total / heads, "num_key_value_heads", heads, rank / (tp / heads), module);
    }
    case Cut::kVocab: {
      const std::int64_t padded = ceil_div(total, kVocabAlignment) * kVocabAlignment;
      if (padded % tp != 0) {
        return refused("tp=" + std::to_string(tp) + " does not divide " + std::string(extent_field(extent)) +
                       " " + std::to_string(total) + " padded to " + std::to_string(padded) + " rows of " +
                       module);
      }
      const std::int64_t local = padded / tp;
      const std::int64_t start = std::min(rank * local, total);
      return Share{total, start, std::min(local, total - start), local};
    }
  }
  return Share{};
}

Result<Share> expert_share(std::int64_t experts, int ep, int rank, const std::string& module) {
  if (experts < ep) {
    return refused("ep=" + std::to_string(ep) + " is more than the " + std::to_string(experts) +
                   " experts of " + module + ": a rank would hold none");
  }
  const std::int64_t each = experts / ep;
  const std::int64_t rest = experts % ep;
  const std::int64_t length = each + (rank < rest ? 1 : 0);
  return Share{experts, rank * each + std::min<std::int64_t>(rank, rest), length, length};
}

int expert_rank(std::int64_t experts, int ep, std::int64_t expert) {
  const std::int64_t each = experts / ep;
  const std::int64_t rest = experts % ep;  // so many first ranks hold each + 1
  const std::int64_t in_larger = rest * (each + 1);
  return static_cast<int>(expert < in_larger ? expert / (each + 1) : rest + (expert - in_larger) / each);
}

Status wrong_shape(const std::string& name, const std::vector<std::int64_t>& shape,
                   const std::vector<std::int64_t>& implied) {
  return refused(name + " has shape " + describe(shape) + "; config.json implies " + describe(implied),
                 Reason::kCheckpointMalformed, name);
}

// ---- Cutter ------------------------------------------------------------------------------------------

std::vector<std::int64_t> Cutter::shape_of(std::int64_t rows) const {
  return columns ? std::vector<std::int64_t>{rows, columns->total} : std::vector<std::int64_t>{rows};
}

std::int64_t Cutter::fused_rows() const {
  std::int64_t sum = 0;
  for (const Part& part : parts) sum += part.rows.total;
  return sum;
}

std::vector<std::int64_t> Cutter::source_shape(std::string_view shard) const {
  for (const Part& part : parts) {
    if (part.shard == shard) return shape_of(part.rows.total);
  }
  return shape_of(fused_rows());
}

Status Cutter::load(Parameter& parameter, const Tensor& loaded, const std::string& shard) const {
  const auto load_part = [&](const Part& part, std::int64_t source_start) -> Status {
    Tensor source = loaded;
    if (part.rows.length != loaded.size(0)) {
      SHARDPULL_ASSIGN_OR_RETURN(source, source.narrow(0, source_start + part.rows.start, part.rows.length));
    }
    if (columns && !columns->whole()) {
      SHARDPULL_ASSIGN_OR_RETURN(source, source.narrow(1, columns->start, columns->length));
    }
    ParameterView target = parameter.data();
    if (part.rows.length != parameter.shape()[0]) {
      SHARDPULL_ASSIGN_OR_RETURN(target, target.narrow(0, part.local_start, part.rows.length));
    }
    return target.copy_(source);
  };
  const std::vector<std::int64_t> expected = source_shape(shard);
  if (loaded.shape() != expected) return wrong_shape(loaded.name(), loaded.shape(), expected);
  std::int64_t source_start = 0;  // of the part in a tensor fused on disk
  for (const Part& part : parts) {
    const bool alone = part.shard == shard;
    if (alone) source_start = 0;
    if (alone || shard.empty()) SHARDPULL_RETURN_IF_ERROR(load_part(part, source_start));
    if (alone) return {};
    source_start += part.rows.total;
  }
  return {};
}

// ---- ExpertCutter ------------------------------------------------------------------------------------

std::vector<std::int64_t> ExpertCutter::source_shape(std::string_view shard) const {
  if (shard == "w13") return {experts.total, 2 * intermediate.total, hidden};
  if (shard == "w2") return {experts.total, hidden, intermediate.total};
  return shard.ends_with(".w2") ? std::vector<std::int64_t>{hidden, intermediate.total}
                                : std::vector<std::int64_t>{intermediate.total, hidden};
}

Result<bool> ExpertCutter::exchanged(const std::string& name, std::string_view shard,
                                     const std::vector<std::int64_t>& shape) const {
  const std::vector<std::int64_t> straight = source_shape(shard);
  const std::vector<std::int64_t> other{straight[0], straight[2], straight[1]};
  if (!either_order) {
    if (shape != straight) return wrong_shape(name, shape, straight);
    return false;
  }
  if (shape != straight && shape != other) {
    return refused(name + " has shape " + describe(shape) + "; config.json implies " + describe(straight) +
                       " or " + describe(other),
                   Reason::kCheckpointMalformed, name);
  }
  if (straight == other) {
    return refused(name + " " + describe(shape) +
                       ": checkpoints of this architecture have stacked experts as [experts, out, in] and as "
                       "[experts, in, out], and a square shape does not tell which; convert it to one tensor "
                       "per expert",
                   Reason::kCheckpointMalformed, name);
  }
  return shape == other;
}

Status ExpertCutter::load(Parameter& parameter, const Tensor& loaded, const std::string& shard) const {
  // Part of the intermediate dim `dim` of the source that this rank holds; `offset` past its start.
  const auto part = [&](const Tensor& source, std::int64_t dim, std::int64_t offset) -> Result<Tensor> {
    if (intermediate.whole()) return source;
    return source.narrow(dim, offset + intermediate.start, intermediate.length);
  };
  if (shard == "w13" || shard == "w2") {
    SHARDPULL_ASSIGN_OR_RETURN(const bool other, exchanged(loaded.name(), shard, loaded.shape()));
    Tensor source = loaded;
    if (other) {
      SHARDPULL_ASSIGN_OR_RETURN(source, source.transpose(1, 2));
    }
    if (!experts.whole()) {
      SHARDPULL_ASSIGN_OR_RETURN(source, source.narrow(0, experts.start, experts.length));
    }
    if (shard == "w2") {
      SHARDPULL_ASSIGN_OR_RETURN(source, part(source, 2, 0));
      return parameter.data().copy_(source);
    }
    if (intermediate.whole()) return parameter.data().copy_(source);
    for (const std::int64_t half : {0, 1}) {  // gate, up
      SHARDPULL_ASSIGN_OR_RETURN(const Tensor cut, part(source, 1, half * intermediate.total));
      SHARDPULL_ASSIGN_OR_RETURN(const ParameterView target,
                                 parameter.data().narrow(1, half * intermediate.length, intermediate.length));
      SHARDPULL_RETURN_IF_ERROR(target.copy_(cut));
    }
    return {};
  }

  std::int64_t expert = -1;
  std::from_chars(shard.data(), shard.data() + shard.size(), expert);
  const std::vector<std::int64_t> expected = source_shape(shard);
  if (loaded.shape() != expected) return wrong_shape(loaded.name(), loaded.shape(), expected);
  const bool down = shard.ends_with(".w2");
  SHARDPULL_ASSIGN_OR_RETURN(const Tensor source, part(loaded, down ? 1 : 0, 0));
  SHARDPULL_ASSIGN_OR_RETURN(ParameterView target, parameter.data().select(0, expert - experts.start));
  if (!down) {
    const std::int64_t start = shard.ends_with(".w3") ? intermediate.length : 0;
    SHARDPULL_ASSIGN_OR_RETURN(target, target.narrow(0, start, intermediate.length));
  }
  return target.copy_(source);
}

}  // namespace shardpull::families
