// `shardpull inspect`: what a checkpoint holds, what was decided about it, and what is wrong with it.
#include <cstdio>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/units.h"
#include "checkpoint/safetensors.h"
#include "cli/commands.h"
#include "cli/model_input.h"
#include "cli/sync_report.h"

namespace shardpull::cli {
namespace {

using nlohmann::ordered_json;

struct Row {
  TensorMeta meta;
  std::uint64_t bytes = 0;
  std::string file;
};

struct Findings {
  std::string path;
  std::vector<std::pair<std::string, std::string>> config;
  std::vector<Row> tensors;
  std::vector<std::string> notes;
  std::vector<std::string> problems;
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

void inspect_file(Findings& findings) {
  auto file = SafetensorsFile::open(findings.path);
  if (!file.ok()) {
    findings.problems.push_back(file.status().message());
    return;
  }
  for (std::size_t i = 0; i < file->tensors().size(); ++i) {
    findings.tensors.push_back({file->tensors()[i], file->bytes(i), file->path().filename().string()});
  }
  for (const auto& [key, value] : file->metadata()) {
    findings.notes.push_back(fmt::format("metadata {}: {}", key, value));
  }
}

void inspect_config(Findings& findings) {
  auto config = ModelConfig::load(findings.path);
  if (!config.ok()) {
    findings.problems.push_back(config.status().message());
    return;
  }
  const auto add = [&](const char* name, std::string value) {
    findings.config.emplace_back(name, std::move(value));
  };
  const auto add_size = [&](const char* name, std::int64_t value) {
    if (value != 0) add(name, fmt::format("{}", value));
  };
  add("architecture", config->architecture());
  add("model_type", config->text_model_type);
  add_size("hidden_size", config->hidden_size);
  add_size("num_hidden_layers", config->num_hidden_layers);
  add_size("num_attention_heads", config->num_attention_heads);
  if (!config->num_key_value_heads.empty()) {
    const auto& heads = config->num_key_value_heads;
    const bool same = std::equal(heads.begin() + 1, heads.end(), heads.begin());
    add("num_key_value_heads", same ? fmt::format("{}", heads.front()) : shape_text(heads));
  }
  add_size("head_dim", config->head_dim);
  add_size("intermediate_size", config->intermediate_size);
  add_size("vocab_size", config->vocab_size);
  add("tie_word_embeddings", config->tie_word_embeddings ? "true" : "false");
  if (config->dtype) add("dtype", std::string(dtype_name(*config->dtype)));
}

void inspect_directory(Findings& findings) {
  inspect_config(findings);
  auto files = Checkpoint::open(findings.path);
  if (!files.ok()) {
    findings.problems.push_back(files.status().message());
    return;
  }
  for (std::size_t i = 0; i < files->tensors().size(); ++i) {
    findings.tensors.push_back({files->tensors()[i], files->bytes(i), files->file(i).filename().string()});
  }
  findings.notes = files->notes();
  if (!findings.problems.empty()) return;  // without a config there is no model
  auto model = open_model(findings.path);
  if (model.ok()) {
    findings.notes = model->notes;
  } else {
    findings.problems.push_back(model.status().message());
  }
}

std::string as_text(const Findings& findings) {
  std::string text;
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, value] : findings.config) rows.push_back({name, value});
  text += format_table(rows, 2);
  if (!findings.tensors.empty()) {
    if (!rows.empty()) text += "\n";
    rows = {{"tensor", "dtype", "shape", "file", "bytes"}};
    std::uint64_t total = 0;
    for (const Row& row : findings.tensors) {
      rows.push_back({printable(row.meta.name), std::string(dtype_name(row.meta.dtype)),
                      shape_text(row.meta.shape), row.file, fmt::format("{}", row.bytes)});
      total += row.bytes;
    }
    text += format_table(rows, 4);
    text += fmt::format("\n{} tensors, {}\n", findings.tensors.size(), format_bytes(total));
  }
  for (const std::string& note : findings.notes) text += fmt::format("note: {}\n", note);
  return text;
}

std::string as_json(const Findings& findings) {
  ordered_json out;
  out["shardpull"] = kReportVersion;
  out["path"] = findings.path;
  out["config"] = ordered_json::object();
  for (const auto& [name, value] : findings.config) out["config"][name] = value;
  out["tensors"] = ordered_json::array();
  for (const Row& row : findings.tensors) {
    out["tensors"].push_back({{"name", row.meta.name},
                              {"dtype", dtype_name(row.meta.dtype)},
                              {"shape", row.meta.shape},
                              {"bytes", row.bytes},
                              {"file", row.file}});
  }
  out["notes"] = findings.notes;
  out["problems"] = findings.problems;
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace

int run_inspect(const InspectArguments& arguments) {
  Findings findings;
  findings.path = arguments.path;
  std::error_code error;
  const auto status = std::filesystem::status(arguments.path, error);
  if (!std::filesystem::exists(status)) {
    findings.problems.push_back(fmt::format("{}: no such file or directory", arguments.path));
  } else if (std::filesystem::is_directory(status)) {
    inspect_directory(findings);
  } else {
    inspect_file(findings);
  }
  std::fputs((arguments.json ? as_json(findings) : as_text(findings)).c_str(), stdout);
  std::fflush(stdout);
  for (const std::string& problem : findings.problems) std::fprintf(stderr, "error: %s\n", problem.c_str());
  return findings.problems.empty() ? kExitDone : kExitFailed;
}

}  // namespace shardpull::cli
