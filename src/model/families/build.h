// Builds the inference model of one worker from a config.json, and says what a checkpoint must hold for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/config.h"
#include "model/families/family.h"
#include "shardpull/dtype.h"
#include "shardpull/model.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// How the inference side is cut. Workers are numbered replica, dp, pp, tp with tp fastest.
struct InferenceLayout {
  int tp = 1;        // tensor parallel
  int pp = 1;        // pipeline stages
  int dp = 1;        // data parallel: within one engine, workers with the same weights but for experts
  int ep = 1;        // expert parallel: 1, or tp x dp; experts are then not cut by tp
  int replicas = 1;  // independent engines
  std::int64_t workers() const { return std::int64_t{tp} * pp * dp * replicas; }
};

// Where one worker stands in the layout.
struct WorkerCoordinates {
  int replica = 0, dp_rank = 0, pp_rank = 0, tp_rank = 0;
  int ep_rank = 0;  // dp_rank * tp + tp_rank when ep > 1, else 0
};
// Refused, with the numbers: a factor below 1, an ep that is neither 1 nor tp x dp, an id outside [0,
// workers()).
Result<WorkerCoordinates> worker_coordinates(const InferenceLayout& layout, std::int64_t consumer_id);

// The layers [first, second) of each pipeline stage, as vLLM's get_pp_indices cuts them: equal counts, the
// remainder going one each to the stages before the last, from the back. A stage may get none. layers >= 0,
// pp >= 1.
std::vector<std::pair<std::int64_t, std::int64_t>> pipeline_stages(std::int64_t layers, int pp);

struct BuildOptions {
  // Of the parameters; absent: config.json's, or F32 when it has none. Index buffers stay I64, correction
  // biases of routers F32.
  std::optional<DType> dtype;
  // Gives a tied head storage of its own, fed by the embedding's name, as engines do that pack their head.
  bool separate_tied_head = false;
};

// The names of the architectures build_model knows, in the catalogue's order.
std::vector<std::string> known_architectures();
// The family of a config. UNIMPLEMENTED with reason kUnknownArchitecture, naming it and the known ones.
Result<const families::Family*> find_family(const ModelConfig& config);

// The model of worker `consumer_id`, not materialised. Its load_weights accepts the checkpoint's Hugging Face
// names in any order and refuses, before it loads anything, a name that the family does not have (naming it
// and the nearest known one) or a part that is there both fused (or stacked) and separate; a tensor of
// another shape than the config implies is refused by name, with both shapes. explain_unused says "other
// stage: ...", "other rank: ...", "tied head: ..." or "unused ...".
//
// With ep > 1 a worker holds a contiguous block of whole experts, the remainder going to the first ranks;
// with ep = 1 it holds its tp part of every expert. Everything else, shared experts too, is cut by tp alone,
// so that the dp ranks repeat it.
//
// Refused: an unknown architecture; a layout or id out of range; a field config.json lacks; tp that does not
// divide the query heads, the key/value heads (nor is divided by them), the intermediate size (of experts,
// when ep = 1) or the padded vocabulary, each with the numbers; pp > 1 for a family without pipeline stages;
// ep > 1 for a model with fewer experts than that (one without any takes no notice of ep).
Result<std::unique_ptr<Model>> build_model(const ModelConfig& config, const InferenceLayout& layout,
                                           std::int64_t consumer_id, const BuildOptions& options = {});
// The same for a family that is not in the catalogue. Its strings must outlive the model.
Result<std::unique_ptr<Model>> build_model(const families::Family& family, const ModelConfig& config,
                                           const InferenceLayout& layout, std::int64_t consumer_id,
                                           const BuildOptions& options = {});

// Gives the bytes of tensor `name` (index into the metadata), row-major, borrowed until the next call.
using ReadTensor = std::function<Result<std::span<const std::byte>>(std::uint32_t name)>;

// Looks at a whole checkpoint before anything starts: names the config does not explain, tensors it implies
// that are missing (an untied head too), other shapes than it implies. A head that repeats a tied embedding
// is accepted with a note when its bytes are equal, and refused by name when they differ; `read` is called
// for those two only, and may be null when the bytes are not at hand (the note says so then). Returns notes
// for people, maybe none.
Result<std::vector<std::string>> check_checkpoint(const ModelConfig& config,
                                                  const std::vector<TensorMeta>& metadata,
                                                  const ReadTensor& read);

}  // namespace shardpull
