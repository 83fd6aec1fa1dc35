// Files that a command writes because a flag names them: checked before anything starts, so that no input is
// lost under an output and nobody waits at a pipe.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "shardpull/status.h"

namespace shardpull::cli {

struct NamedFile {
  std::string flag;  // "--trace"
  std::filesystem::path file;
};

struct CommandInputs {
  std::string model;  // the directory of --model, or empty
  std::vector<NamedFile> files;
};

// What a fleet's processes read: the layout file, recordings (one name with {worker} is a file per worker of
// a replica) and, by hand, the token file. Empty names are left out.
CommandInputs fleet_inputs(const std::string& model, const FleetArguments& fleet,
                           const std::vector<std::string>& recordings, const std::string& token_file);

// The files of --dump in `directory`, of workers `first` .. `last` - 1; none where the directory is empty.
std::vector<NamedFile> dump_files(const std::string& directory, std::uint32_t first, std::uint32_t last);

// Refused, naming the flag and that of the input or of the other output: a file that exists and is no regular
// one, would lie in the model's directory, is a file of the model by another name, another input, or the file
// of another flag. Empty names are left out.
Status check_outputs(const std::vector<NamedFile>& outputs, const CommandInputs& inputs);

}  // namespace shardpull::cli
