// Every recorded plan of these families: the model built from the same config bakes the same names into the
// same slices and destinations as the engine did.
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint/config.h"
#include "model/families/build.h"
#include "model/model_testing.h"
#include "oracles/oracle.h"
#include "shardpull/bake.h"

namespace shardpull {
namespace {

using oracles::Oracle;
using oracles::OracleScatter;

class OracleBake : public ::testing::TestWithParam<std::string> {};

// "model.norm.weight <- model.norm.weight BF16 [off 0: 64] | BF16 +0 [64] stride [1]": all that must be
// equal.
struct Entry {
  std::string module, type, parameter, name;
  DType wire_dtype;
  Slice slice;
  std::vector<std::int64_t> shape;
  DType dtype;
  std::int64_t offset;
  std::vector<std::int64_t> destination_shape, destination_stride;

  friend bool operator==(const Entry&, const Entry&) = default;
};

void PrintTo(const Entry& e, std::ostream* out) {
  *out << e.module << " (" << e.type << ")." << e.parameter << " <- " << e.name << " "
       << dtype_name(e.wire_dtype) << " " << to_string(e.slice) << " | " << dtype_name(e.dtype) << " +"
       << e.offset << " " << ::testing::PrintToString(e.destination_shape) << " stride "
       << ::testing::PrintToString(e.destination_stride);
}

// By module; within a module in recording order.
using Entries = std::map<std::string, std::vector<Entry>>;

Entries of_oracle(const Oracle& oracle) {
  Entries entries;
  for (const OracleScatter& s : oracle.scatters) {
    entries[s.module].push_back({s.module, s.type, s.parameter, oracle.names[s.name].name, s.wire_dtype,
                                 s.slice, s.shape, s.dtype, s.destination.offset, s.destination.shape,
                                 s.destination.stride});
  }
  return entries;
}

Entries of_recording(const Recording& recording, const std::vector<TensorMeta>& names) {
  Entries entries;
  for (const Scatter& s : recording.scatters) {
    const RecordedParameter& parameter = recording.parameters[s.destination.parameter];
    const RecordedModule& module = recording.modules[parameter.module];
    entries[module.name].push_back({module.name, module.type, parameter.name, names[s.name].name,
                                    s.wire_dtype, s.slice, s.shape, s.destination.dtype, s.destination.offset,
                                    s.destination.shape, s.destination.stride});
  }
  return entries;
}

DType engine_dtype(const Oracle& oracle) {
  for (const OracleScatter& s : oracle.scatters) {
    if (s.parameter == "weight") return s.dtype;
  }
  return DType::kF32;
}

TEST_P(OracleBake, EqualEntryByEntry) {
  const Oracle oracle = oracles::load_oracle(GetParam());
  const ModelConfig config = must(ModelConfig::load(oracle.config));
  const InferenceLayout layout{
      .tp = oracle.tp, .pp = oracle.pp, .ep = oracle.ep, .replicas = oracle.num_replicas};
  const auto model = must(build_model(config, layout, oracle.consumer_id, {.dtype = engine_dtype(oracle)}));
  const Result<Recording> baked = bake(*model, oracle.names);
  ASSERT_OK(baked);
  const Recording& recording = *baked;

  const Entries expected = of_oracle(oracle);
  const Entries actual = of_recording(recording, oracle.names);
  std::set<std::string> modules;
  for (const auto& [module, entries] : expected) modules.insert(module);
  for (const auto& [module, entries] : actual) modules.insert(module);
  std::size_t compared = 0;
  for (const std::string& module : modules) {
    const auto e = expected.find(module);
    const auto a = actual.find(module);
    ASSERT_TRUE(e != expected.end()) << module << " is written here and not in the recording";
    ASSERT_TRUE(a != actual.end()) << module << " is not written here";
    EXPECT_EQ(a->second, e->second) << module;
    compared += e->second.size();
  }
  EXPECT_EQ(compared, oracle.scatters.size());

  // Names: the lists, in metadata order.
  std::vector<std::string> live, dead;
  for (const std::uint32_t n : recording.live) live.push_back(oracle.names[n].name);
  for (const std::uint32_t n : recording.dead) dead.push_back(oracle.names[n].name);
  EXPECT_EQ(std::multiset<std::string>(live.begin(), live.end()),
            std::multiset<std::string>(oracle.live.begin(), oracle.live.end()));
  EXPECT_EQ(std::multiset<std::string>(dead.begin(), dead.end()),
            std::multiset<std::string>(oracle.not_live.begin(), oracle.not_live.end()));
  EXPECT_TRUE(recording.unbaked.empty());
  ASSERT_EQ(recording.unused_reasons.size(), recording.dead.size());
  for (const std::string& reason : recording.unused_reasons) EXPECT_FALSE(reason.empty());

  // The worker's parameters, where the recording lists them.
  for (std::size_t p = 0; p < recording.parameters.size(); ++p) {
    const RecordedParameter& parameter = recording.parameters[p];
    const auto listed =
        oracle.parameters.find(recording.modules[parameter.module].name + "." + parameter.name);
    if (listed == oracle.parameters.end()) {
      EXPECT_TRUE(parameter.name.ends_with("bias")) << recording.modules[parameter.module].name;
      continue;
    }
    EXPECT_EQ(parameter.shape, listed->second.shape) << listed->first;
    EXPECT_EQ(parameter.stride, listed->second.stride) << listed->first;
    EXPECT_EQ(parameter.dtype, listed->second.dtype) << listed->first;
  }
}

INSTANTIATE_TEST_SUITE_P(All, OracleBake, ::testing::ValuesIn(oracles::oracle_files()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name) {
    if (c == '.') c = '_';
  }
  return name;
});

}  // namespace
}  // namespace shardpull
