// The trainer's side of a fleet as the command line describes it: layout words or a layout file, and how the
// ranks publish.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/layouts.h"
#include "cli/model_input.h"
#include "plan/layout_file.h"
#include "shardpull/status.h"
#include "shardpull/trainer.h"

namespace shardpull::cli {

struct TrainerSide {
  TrainerLayout layout;
  std::string file;  // a layout file instead of `layout`; empty: none
  PublishMode publish = PublishMode::kAuto;
  friend bool operator==(const TrainerSide&, const TrainerSide&) = default;
};

// "pp=2,fsdp=4", or "FILE" of a layout file.
std::string to_string(const TrainerSide& side);

// Who has what, by rank.
struct TrainerHoldings {
  std::vector<HeldByRank> kept;    // in its memory between syncs
  std::vector<HeldByRank> served;  // what it publishes: the same, or what its owners gather first
  bool resident = false;           // published in place, without credit
  std::uint32_t ranks() const { return static_cast<std::uint32_t>(kept.size()); }
};

// Bytes of what one rank has. The metadata is a checked one.
std::uint64_t held_bytes(const std::vector<TensorMeta>& metadata, const HeldByRank& held);

// auto: resident when some rank holds a piece of a name, else gather. In gather mode fsdp ranks gather what
// their group holds together; the ranks of a layout file gather every name of which they hold a part. A
// withheld name is held by nobody. Refused: what layouts and layout files refuse; a withheld name that the
// model does not have; a layout file that cannot be read.
Result<TrainerHoldings> trainer_holdings(const ModelInput& model, const TrainerSide& side,
                                         const std::vector<std::string>& withheld);

}  // namespace shardpull::cli
