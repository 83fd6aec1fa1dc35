// Layout words: "pp=2" on the trainer's side, "tp=2,pp=1" on the inference side (also dp and replicas), and
// which names a trainer rank holds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/families/build.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// Trainer ranks: pipeline stages, each holding whole tensors of a run of layers.
struct TrainerLayout {
  std::uint32_t pp = 1;
  std::uint32_t ranks() const { return pp; }
  friend bool operator==(const TrainerLayout&, const TrainerLayout&) = default;
};

// Parses comma-separated WORD=NUMBER. Refused (INVALID_ARGUMENT), each with the accepted form: an unknown
// word, a word twice, a number that is not whole or out of range, nothing at all; a word of other layouts
// (fsdp, ep) says that it is not there.
Result<TrainerLayout> parse_trainer_layout(std::string_view text);
Result<InferenceLayout> parse_inference_layout(std::string_view text);

// "pp=2"; "tp=2,pp=1", then dp and replicas when they are not 1.
std::string to_string(const TrainerLayout& layout);
std::string to_string(const InferenceLayout& layout);
// Workers of the whole fleet.
std::uint32_t workers(const InferenceLayout& layout);

// The names each rank holds, ascending indices into `metadata`. Layers (a name's first path part made of
// digits) are split as pipeline_stages does; of the names outside layers the embeddings go to the first rank
// and all others to the last; with `tied` the input embedding is on both. Refused: a rank that would hold
// nothing, naming it and the number of layers.
Result<std::vector<std::vector<std::uint32_t>>> names_of_ranks(const std::vector<TensorMeta>& metadata,
                                                               bool tied, const TrainerLayout& layout);

}  // namespace shardpull::cli
