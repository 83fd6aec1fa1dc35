// Recording files on the command line: `plan --save-recording`, and `--recording` of plan, sync and worker.
//
// Workers with the same id modulo the workers of a replica do the same: there is one file per worker of a
// replica, named in the order of the workers' ids, or by one name with "{worker}" in the place of the id.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/layouts.h"
#include "cli/model_input.h"
#include "shardpull/bake.h"
#include "shardpull/recording.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// Who bakes what this program saves: RecordingHeader::engine.
inline constexpr std::string_view kOwnEngine = "shardpull";
// What the id stands for in a file's name.
inline constexpr std::string_view kWorkerPlace = "{worker}";

// The file of each worker of a replica. Refused, naming `flag`: another number of names than workers, a name
// without "{worker}" for several.
Result<std::vector<std::string>> recording_files(const std::vector<std::string>& names,
                                                 const InferenceLayout& layout, std::string_view flag);

// Reads the recording of one worker of a replica. Refused besides what read_recording refuses: one of another
// architecture, layout or worker.
Result<RecordingFile> load_recording(const std::string& file, const ModelInput& model,
                                     const InferenceLayout& layout, std::uint32_t worker);

// Writes it. The file, which check_outputs() has let pass, appears under its name only when it is complete.
Status save_recording(const std::string& file, const Recording& recording, const ModelInput& model,
                      const InferenceLayout& layout, std::uint32_t worker);

}  // namespace shardpull::cli
