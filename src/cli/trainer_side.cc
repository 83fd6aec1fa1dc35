#include "cli/trainer_side.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "checkpoint/posix_file.h"
#include "checkpoint/safetensors.h"

namespace shardpull::cli {
namespace {

constexpr std::uint64_t kMaxFileBytes = std::uint64_t{16} << 20;  // docs/FORMATS.md, "Layout file"

// Every name whole of which a rank has a part.
HeldByRank gathered(const HeldByRank& kept) {
  std::set<std::uint32_t> names(kept.whole.begin(), kept.whole.end());
  for (const Piece& piece : kept.pieces) names.insert(piece.name);
  return {.whole = {names.begin(), names.end()}, .pieces = {}};
}

Status withhold(const ModelInput& model, const std::vector<std::string>& withheld,
                std::vector<HeldByRank>& holdings) {
  for (const std::string& name : withheld) {
    const auto at = std::find_if(model.metadata.begin(), model.metadata.end(),
                                 [&](const TensorMeta& meta) { return meta.name == name; });
    if (at == model.metadata.end()) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--withhold: {} has no tensor {}", model.label, name),
                    {.reason = Reason::kBadArgument, .tensor = name});
    }
    const auto index = static_cast<std::uint32_t>(at - model.metadata.begin());
    for (HeldByRank& held : holdings) {
      std::erase(held.whole, index);
      std::erase_if(held.pieces, [&](const Piece& piece) { return piece.name == index; });
    }
  }
  return {};
}

}  // namespace

std::string to_string(const TrainerSide& side) {
  return side.file.empty() ? to_string(side.layout) : side.file;
}

std::uint64_t held_bytes(const std::vector<TensorMeta>& metadata, const HeldByRank& held) {
  std::uint64_t total = 0;
  const auto add = [&](DType dtype, const std::vector<std::int64_t>& shape) {
    const auto bytes = tensor_bytes(dtype, shape);
    if (bytes.ok()) total += *bytes;
  };
  for (const std::uint32_t name : held.whole) add(metadata[name].dtype, metadata[name].shape);
  for (const Piece& piece : held.pieces) add(metadata[piece.name].dtype, piece.box.size);
  return total;
}

Result<TrainerHoldings> trainer_holdings(const ModelInput& model, const TrainerSide& side,
                                         const std::vector<std::string>& withheld) {
  TrainerHoldings out;
  if (side.file.empty()) {
    SHARDPULL_ASSIGN_OR_RETURN(out.kept,
                               holdings_of(model.metadata, model.config.tie_word_embeddings, side.layout));
  } else {
    const auto text = read_text_file(side.file, kMaxFileBytes);
    if (!text.ok()) return text.status().with_context("--trainer-layout");
    SHARDPULL_ASSIGN_OR_RETURN(out.kept, read_layout(*text, model.metadata, side.file));
  }
  const bool pieces = std::any_of(out.kept.begin(), out.kept.end(),
                                  [](const HeldByRank& held) { return !held.pieces.empty(); });
  out.resident = side.publish == PublishMode::kResident || (side.publish == PublishMode::kAuto && pieces);
  if (out.resident) {
    out.served = out.kept;
  } else if (side.file.empty()) {
    TrainerLayout groups = side.layout;
    groups.fsdp = 1;
    SHARDPULL_ASSIGN_OR_RETURN(const std::vector<HeldByRank> together,
                               holdings_of(model.metadata, model.config.tie_word_embeddings, groups));
    for (std::uint32_t rank = 0; rank < out.ranks(); ++rank) {
      HeldByRank served = together[rank / side.layout.fsdp];
      for (Piece& piece : served.pieces) piece.rank = rank;
      out.served.push_back(std::move(served));
    }
  } else {
    for (const HeldByRank& kept : out.kept) out.served.push_back(gathered(kept));
  }
  SHARDPULL_RETURN_IF_ERROR(withhold(model, withheld, out.kept));
  SHARDPULL_RETURN_IF_ERROR(withhold(model, withheld, out.served));
  return out;
}

}  // namespace shardpull::cli
