// Layout words: "pp=2,ep=2,fsdp=2" on the trainer's side, "tp=2,pp=1" on the inference side (also ep, dp and
// replicas), and what each trainer rank holds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/families/build.h"
#include "plan/layout_file.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// Trainer ranks: pp x ep x fsdp, fsdp fastest. Pipeline stages hold a run of layers; of these an expert-parallel
// rank holds a contiguous block of the experts and everything else; of that an fsdp rank holds its rows.
struct TrainerLayout {
  std::uint32_t pp = 1, ep = 1, fsdp = 1;
  std::uint32_t ranks() const { return pp * ep * fsdp; }  // at most kMaxRanks when parsed
  friend bool operator==(const TrainerLayout&, const TrainerLayout&) = default;
};

// Parses comma-separated WORD=NUMBER. Refused (INVALID_ARGUMENT), each with the accepted form: an unknown
// word, a word twice, a number that is not whole or out of range, too many processes, nothing at all. On the
// inference side `ep` is 1 or tp x dp; ep=N alone means tp=N,ep=N.
Result<TrainerLayout> parse_trainer_layout(std::string_view text);
Result<InferenceLayout> parse_inference_layout(std::string_view text);

// "pp=2", then ep and fsdp when they are not 1; "tp=2,pp=1", then dp, ep and replicas when they are not 1.
std::string to_string(const TrainerLayout& layout);
std::string to_string(const InferenceLayout& layout);
// Workers of the whole fleet.
std::uint32_t workers(const InferenceLayout& layout);

// What each rank of a layout has in its memory between syncs.
//   pp    layers (a name's first path part made of digits) are split as pipeline_stages does; of the names
//         outside layers the embeddings go to the first stage and all others to the last; with `tied` the
//         input embedding is on both.
//   ep    of per-expert names (.. .experts.E. ..) a contiguous block of E, of a stack of experts (.. .experts.
//         gate_up_proj) the same block of dim 0, the remainder going to the first ranks. All else is on every
//         rank.
//   fsdp  rows of dim 0 as torch's fully_shard cuts them: ceil(rows / fsdp) each, so that the last ranks may
//         have fewer or none. Scalars are on every rank.
// Refused: a rank that would hold nothing, naming it.
Result<std::vector<HeldByRank>> holdings_of(const std::vector<TensorMeta>& metadata, bool tied,
                                            const TrainerLayout& layout);

}  // namespace shardpull::cli
