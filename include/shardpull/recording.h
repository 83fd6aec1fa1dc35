// The recording file: a bake as text, so that a worker's plan can be made, and replayed, without the code of
// its model. JSON Lines, one header and then one line per module, parameter, alias, fill, copy and dead name;
// the whole format is docs/FORMATS.md, "Recording file". Whoever writes it, the same bake gives the same
// bytes.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/api.h"
#include "shardpull/bake.h"
#include "shardpull/model.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// What the header says beyond the format's version and the digest of the names.
struct RecordingHeader {
  std::string engine;        // who baked: "shardpull"
  std::string architecture;  // of config.json: "Qwen3MoeForCausalLM"
  std::string layout;        // of the inference side: "tp=2,dp=2,ep=4"
  std::uint32_t worker = 0;  // its consumer id in that layout
  friend bool operator==(const RecordingHeader&, const RecordingHeader&) = default;
};

// The file's text. Names are written out, so that it can be read against another order of the same names.
// Refused: names that did not bake (only the model's own loaders can load them), and what read_recording
// would refuse, such as first bytes of a buffer above the limit. INTERNAL when the recording does not fit the
// metadata.
SHARDPULL_API Result<std::string> write_recording(const Recording& recording,
                                                  const std::vector<TensorMeta>& metadata,
                                                  const RecordingHeader& header);

// A recording file as it was read.
struct RecordingFile {
  RecordingHeader header;  // who made it, for what
  Recording recording;  // its names are indices into the metadata it was read against
};

// Reads a recording from an untrusted `text` against `metadata`. A text that is accepted is the one that
// write_recording gives for what was read. Refused, naming `origin` and where it is one the line: another
// format or version (FAILED_PRECONDITION), names, dtypes or shapes other than the metadata's (likewise), any
// other spelling, what is above the limits of docs/FORMATS.md, slices that are not those of their op chains,
// windows outside their parameters, overlaps, copies that do not cover a baked module, parameters that no
// model can have.
SHARDPULL_API Result<RecordingFile> read_recording(std::string_view text,
                                                   const std::vector<TensorMeta>& metadata,
                                                   std::string_view origin);

// A model with the recording's modules, parameters, buffers and aliases, not materialised. Its load_weights
// replays the op chains, not the slices, on the tensors it is given, which must be those of `metadata`; what
// takes no source is declared padding. A post-process hook is code: a module that had one gets one that does
// nothing, until set_post_process gives it another. `recording` (of bake or read_recording) and `metadata`
// are copied.
SHARDPULL_API Result<std::unique_ptr<Model>> model_of(const Recording& recording,
                                                      const std::vector<TensorMeta>& metadata);

}  // namespace shardpull
