#include "cli/output_files.h"

#include <system_error>

#include <fmt/format.h>

#include "base/status_macros.h"
#include "cli/recordings.h"

namespace shardpull::cli {
namespace {

namespace fs = std::filesystem;

Status refused(const NamedFile& output, const std::string& why) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{}: {} {}", output.flag, output.file.string(), why),
                {.reason = Reason::kBadArgument});
}

// Whether both names lead to one file, there or not.
bool same(const fs::path& a, const fs::path& b) {
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  const fs::path first = fs::weakly_canonical(a, error), second = fs::weakly_canonical(b, error);
  return !first.empty() && first == second;
}

Status check_against_model(const NamedFile& output, const std::string& model) {
  std::error_code error;
  const fs::path target = fs::weakly_canonical(fs::absolute(output.file, error), error);
  if (same(target.parent_path(), model) || same(fs::absolute(output.file, error).parent_path(), model))
    return refused(output, fmt::format("would lie in --model {}; write it elsewhere", model));
  // The files of a model may be links into a store, or have several names.
  if (!fs::exists(target, error)) return {};
  for (const auto& entry : fs::directory_iterator(model, error)) {
    if (same(target, entry.path()))
      return refused(output, fmt::format("is {} of --model {}; write it elsewhere",
                                         entry.path().filename().string(), model));
  }
  return {};
}

}  // namespace

CommandInputs fleet_inputs(const std::string& model, const FleetArguments& fleet,
                           const std::vector<std::string>& recordings, const std::string& token_file) {
  CommandInputs inputs{model, {{"--trainer-layout", fleet.trainer.file}, {"--token-file", token_file}}};
  for (const std::string& name : recordings) {
    const auto files = recording_files({name}, fleet.inference, "--recording");
    for (const std::string& file : files.ok() ? *files : std::vector<std::string>{name})
      inputs.files.push_back({"--recording", file});
  }
  std::erase_if(inputs.files, [](const NamedFile& each) { return each.file.empty(); });
  return inputs;
}

std::vector<NamedFile> dump_files(const std::string& directory, std::uint32_t first, std::uint32_t last) {
  std::vector<NamedFile> files;
  if (directory.empty()) return files;
  for (std::uint32_t worker = first; worker < last; ++worker)
    files.push_back({"--dump", fs::path(directory) / fmt::format("worker-{}.safetensors", worker)});
  return files;
}

Status check_outputs(const std::vector<NamedFile>& outputs, const CommandInputs& inputs) {
  for (auto output = outputs.begin(); output != outputs.end(); ++output) {
    if (output->file.empty()) continue;
    std::error_code error;
    const fs::file_type kind = fs::status(output->file, error).type();
    if (kind != fs::file_type::regular && kind != fs::file_type::not_found && kind != fs::file_type::none)
      return refused(*output, "is not a regular file");
    if (!inputs.model.empty()) SHARDPULL_RETURN_IF_ERROR(check_against_model(*output, inputs.model));
    for (const NamedFile& input : inputs.files) {
      if (same(output->file, input.file))
        return refused(*output, fmt::format("is the file of {}; write it elsewhere", input.flag));
    }
    for (auto other = outputs.begin(); other != output; ++other) {
      if (other->flag != output->flag && same(output->file, other->file))
        return refused(*output, fmt::format("is also the file of {}", other->flag));
    }
  }
  return {};
}

}  // namespace shardpull::cli
