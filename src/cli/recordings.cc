#include "cli/recordings.h"

#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "checkpoint/posix_file.h"
#include "shardpull/recording.h"

namespace shardpull::cli {
namespace {

constexpr std::uint64_t kMaxFileBytes = std::uint64_t{1} << 30;

Status refused(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = Reason::kBadArgument});
}

InferenceLayout replica_of(InferenceLayout layout) {
  layout.replicas = 1;
  return layout;
}

}  // namespace

Result<std::vector<std::string>> recording_files(const std::vector<std::string>& names,
                                                 const InferenceLayout& layout, std::string_view flag) {
  const std::uint32_t count = workers(replica_of(layout));
  if (names.size() == 1 && names.front().find(kWorkerPlace) != std::string::npos) {
    std::vector<std::string> files;
    for (std::uint32_t worker = 0; worker < count; ++worker) {
      std::string file = names.front();
      for (std::size_t at = file.find(kWorkerPlace); at != std::string::npos; at = file.find(kWorkerPlace)) {
        file.replace(at, kWorkerPlace.size(), fmt::format("{}", worker));
      }
      files.push_back(std::move(file));
    }
    return files;
  }
  if (names.size() != count) {
    return refused(
        fmt::format("{}: {} file(s) for the {} workers of a replica (--inference {}); name one for each, "
                    "in the order of their ids, or put {} into one name",
                    flag, names.size(), count, to_string(layout), kWorkerPlace));
  }
  return names;
}

Result<RecordingFile> load_recording(const std::string& file, const ModelInput& model,
                                     const InferenceLayout& layout, std::uint32_t worker) {
  const auto text = read_text_file(file, kMaxFileBytes);
  if (!text.ok()) return text.status().with_context("--recording");
  SHARDPULL_ASSIGN_OR_RETURN(RecordingFile read, read_recording(*text, model.metadata, file));
  const RecordingHeader& header = read.header;
  if (header.architecture != model.config.architecture()) {
    return refused(fmt::format("{}: a recording of architecture {}, {} has {}", file, header.architecture,
                               model.label, model.config.architecture()));
  }
  const auto recorded = parse_inference_layout(header.layout);
  if (!recorded.ok() || to_string(*recorded) != to_string(replica_of(layout))) {
    return refused(fmt::format("{}: a recording of --inference {}, this fleet's replicas are {}", file,
                               header.layout, to_string(replica_of(layout))));
  }
  if (header.worker != worker) {
    return refused(
        fmt::format("{}: the recording of worker {}, given for worker {}", file, header.worker, worker));
  }
  return read;
}

Status save_recording(const std::string& file, const Recording& recording, const ModelInput& model,
                      const InferenceLayout& layout, std::uint32_t worker) {
  const RecordingHeader header{.engine = std::string(kOwnEngine),
                               .architecture = model.config.architecture(),
                               .layout = to_string(replica_of(layout)),
                               .worker = worker};
  SHARDPULL_ASSIGN_OR_RETURN(const std::string text, write_recording(recording, model.metadata, header));
  // What a link leads to is replaced, not the link.
  std::error_code error;
  const std::filesystem::path path = std::filesystem::weakly_canonical(file, error);
  return write_text_file(path, text).with_context("--save-recording");
}

}  // namespace shardpull::cli
