// Reads the recorded plans in tests/oracles/. For tests only: a file that is not as expected ends the test
// program with a message. Header-only, so that the tests of several rooms share it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "shardpull/dtype.h"
#include "shardpull/slice.h"
#include "shardpull/source.h"
#include "shardpull/tensor.h"

namespace shardpull::oracles {

struct OracleScatter {
  std::uint32_t name = 0;  // index into Oracle::names
  OpChain ops;
  std::vector<std::int64_t> shape;  // the chain's result
  DType wire_dtype = DType::kF32;
  Slice slice;  // canonical, from the op chain
  struct Window {
    std::int64_t offset = 0;
    std::vector<std::int64_t> shape, stride;
  };
  Window source;  // over the checkpoint tensor, in elements
  std::string module, type, parameter;
  DType dtype = DType::kF32;  // of the parameter
  Window destination;
};

struct OracleChunk {
  std::uint32_t owner = 0, seq = 0;
  std::uint64_t bytes = 0;
  struct Key {
    std::uint64_t offset = 0;
    DType dtype = DType::kF32;
    std::int64_t numel = 0;
    std::vector<std::int64_t> shape;
  };
  std::vector<Key> layout;
  std::vector<std::uint32_t> scatters;  // indices into Oracle::scatters
  std::vector<std::string> materialise, post_process;
  std::vector<std::uint32_t> signal_groups;
};

struct OracleParameter {
  std::vector<std::int64_t> shape, stride;
  DType dtype = DType::kF32;
  bool buffer = false;
};

struct Oracle {
  std::string file;    // "qwen3.tp2.rank1"
  std::string config;  // path of its config.json
  std::string architecture;
  int tp = 1, pp = 1, ep = 1, consumer_id = 0;
  std::vector<TensorMeta> names;
  std::vector<std::uint32_t> group_lens;
  std::vector<std::string> live, not_live;  // as listed
  std::vector<std::string> zero_size;       // names with an empty slice: a scatter, no key
  std::vector<OracleScatter> scatters;      // module by module, each module's in recording order
  std::map<std::string, OracleParameter> parameters;
  int num_producers = 1, num_consumers = 1, num_replicas = 1, workers_per_replica = 0;
  std::vector<std::vector<std::uint32_t>> owner_sets;
  std::vector<std::int32_t> name_owner_class;
  std::vector<std::vector<std::uint32_t>> group_owners;  // may be absent
  std::vector<OracleChunk> chunks;
  std::vector<std::uint32_t> pre_free;
};

[[noreturn]] inline void oracle_failure(const std::string& what) {
  std::fprintf(stderr, "oracle: %s\n", what.c_str());
  std::abort();
}

template <typename T>
T oracle_value(Result<T> result, const std::string& what) {
  if (!result.ok()) oracle_failure(what + ": " + result.status().to_string());
  return std::move(result).value();
}

inline std::filesystem::path oracle_directory() {
  return std::filesystem::path(SHARDPULL_SOURCE_DIR) / "tests" / "oracles";
}

// The stems of all recorded plans, sorted.
inline std::vector<std::string> oracle_files() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(oracle_directory())) {
    if (entry.path().extension() == ".json") files.push_back(entry.path().stem().string());
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) oracle_failure("no files in " + oracle_directory().string());
  return files;
}

// "qwen3_tied_pptrain.pp2.rank1" -> "qwen3_tied": the longest config name that begins it, or that it is a
// variant of.
inline std::string oracle_config(const std::string& file) {
  std::string best;
  for (const auto& entry : std::filesystem::directory_iterator(oracle_directory() / "configs")) {
    const std::string stem = entry.path().stem().string();
    if (file.starts_with(stem) && stem.size() > best.size()) best = stem;
  }
  if (best.empty()) oracle_failure("no config for " + file);
  return (oracle_directory() / "configs" / (best + ".json")).string();
}

inline OpChain oracle_chain(const nlohmann::json& ops) {
  OpChain chain;
  for (const auto& op : ops) {
    Op parsed{op.at(0).get<std::string>(), {}};
    if (!op.at(2).empty()) oracle_failure("keyword arguments: " + op.dump());
    for (const auto& argument : op.at(1)) {
      if (argument.is_array()) {
        parsed.args.emplace_back(argument.get<std::vector<std::int64_t>>());
      } else {
        parsed.args.emplace_back(argument.get<std::int64_t>());
      }
    }
    chain.push_back(std::move(parsed));
  }
  return chain;
}

inline OracleScatter::Window oracle_window(const nlohmann::json& json) {
  return {json.at("offset"), json.at("shape").get<std::vector<std::int64_t>>(),
          json.at("stride").get<std::vector<std::int64_t>>()};
}

inline Oracle load_oracle(const std::string& file) {
  const std::filesystem::path path = oracle_directory() / (file + ".json");
  std::ifstream stream(path);
  const nlohmann::json json = nlohmann::json::parse(stream, nullptr, false);
  if (json.is_discarded()) oracle_failure(path.string() + " is no JSON");
  const auto dtype = [](const nlohmann::json& name) {
    return oracle_value(dtype_from_torch_name(name.get<std::string>()), "dtype");
  };

  Oracle oracle;
  oracle.file = file;
  oracle.config = oracle_config(file);
  oracle.architecture = json.at("arch");
  oracle.tp = json.at("tp_size");
  oracle.pp = json.at("world_size").get<int>() / oracle.tp;
  if (json.at("enable_expert_parallel").get<bool>()) oracle.ep = oracle.tp;
  std::map<std::string, std::uint32_t> index;
  for (const auto& name : json.at("names")) {
    oracle.names.push_back(
        {name.at("name"), dtype(name.at("dtype")), name.at("shape").get<std::vector<std::int64_t>>()});
    index[oracle.names.back().name] = static_cast<std::uint32_t>(oracle.names.size() - 1);
  }
  oracle.group_lens = json.at("group_lens").get<std::vector<std::uint32_t>>();
  oracle.live = json.at("live_names").get<std::vector<std::string>>();
  oracle.not_live = json.at("not_live").get<std::vector<std::string>>();
  if (json.contains("zero_size")) oracle.zero_size = json.at("zero_size").get<std::vector<std::string>>();

  for (const auto& entry : json.at("scatters")) {
    OracleScatter scatter;
    scatter.name = index.at(entry.at("name"));
    scatter.ops = oracle_chain(entry.at("ops"));
    scatter.shape = entry.at("src_shape").get<std::vector<std::int64_t>>();
    scatter.wire_dtype = dtype(entry.at("dtype"));
    scatter.source = oracle_window(entry.at("src_view"));
    const TensorMeta& meta = oracle.names[scatter.name];
    const Tensor root = oracle_value(Tensor::fake(meta.name, meta.dtype, meta.shape), meta.name);
    const Tensor result = oracle_value(Tensor::apply(root, scatter.ops), meta.name);
    if (result.shape() != scatter.shape) oracle_failure(meta.name + ": the chain gives another shape");
    scatter.slice = oracle_value(result.slice(), meta.name);
    const auto& destination = entry.at("dst");
    scatter.module = destination.at("module");
    scatter.type = destination.at("cls");
    scatter.parameter = destination.at("param");
    scatter.dtype = dtype(destination.at("dtype"));
    scatter.destination = oracle_window(destination);
    oracle.scatters.push_back(std::move(scatter));
  }
  for (const auto& [name, entry] : json.at("dst_params").items()) {
    oracle.parameters[name] = {entry.at("shape").get<std::vector<std::int64_t>>(),
                               entry.at("stride").get<std::vector<std::int64_t>>(), dtype(entry.at("dtype")),
                               entry.at("kind") == "buffer"};
  }

  const auto& router = json.at("router");
  oracle.num_producers = router.at("num_producers");
  oracle.num_consumers = router.at("num_consumers");
  oracle.consumer_id = router.at("consumer_id");
  oracle.num_replicas = router.value("num_replicas", 1);
  oracle.workers_per_replica = router.value("workers_per_replica", 0);
  oracle.owner_sets = router.at("owner_sets").get<std::vector<std::vector<std::uint32_t>>>();
  oracle.name_owner_class = router.at("name_owner_class").get<std::vector<std::int32_t>>();
  if (router.contains("group_owners")) {
    oracle.group_owners = router.at("group_owners").get<std::vector<std::vector<std::uint32_t>>>();
  }

  for (const auto& entry : json.at("chunks")) {
    OracleChunk chunk;
    chunk.owner = entry.at("owner");
    chunk.seq = entry.at("seq");
    chunk.bytes = entry.at("pack_bytes");
    for (const auto& key : entry.at("pack_layout")) {
      chunk.layout.push_back(
          {key.at(0), dtype(key.at(1)), key.at(2), key.at(3).get<std::vector<std::int64_t>>()});
    }
    chunk.scatters = entry.at("scatters").get<std::vector<std::uint32_t>>();
    chunk.materialise = entry.at("materialize").get<std::vector<std::string>>();
    chunk.post_process = entry.at("quant").get<std::vector<std::string>>();
    chunk.signal_groups = entry.at("free").get<std::vector<std::uint32_t>>();
    oracle.chunks.push_back(std::move(chunk));
  }
  oracle.pre_free = json.at("pre_free").get<std::vector<std::uint32_t>>();
  return oracle;
}

}  // namespace shardpull::oracles
