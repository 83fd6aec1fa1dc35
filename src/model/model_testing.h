// What tests of models share: a model made of lambdas, position-coded weights, and a replay of recordings
// that is as plain as it can be (element by element), to compare the real copy paths with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint/generate.h"
#include "shardpull/bake.h"
#include "shardpull/model.h"

namespace shardpull {

// EXPECT_OK(status or result).
inline Status status_of(const Status& status) {
  return status;
}
template <typename T>
Status status_of(const Result<T>& result) {
  return result.status();
}
#define EXPECT_OK(expression)                                     \
  do {                                                            \
    const ::shardpull::Status expect_ok_ = status_of(expression); \
    EXPECT_TRUE(expect_ok_.ok()) << expect_ok_.to_string();       \
  } while (false)
#define ASSERT_OK(expression)                                     \
  do {                                                            \
    const ::shardpull::Status assert_ok_ = status_of(expression); \
    ASSERT_TRUE(assert_ok_.ok()) << assert_ok_.to_string();       \
  } while (false)

// The value of a Result that a test expects to be there.
template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "must: %s\n", result.status().to_string().c_str());
    std::abort();
  }
  return std::move(result).value();
}

// True when the status failed and its message holds every one of `parts`.
inline ::testing::AssertionResult fails_with(const Status& status, const std::vector<std::string>& parts) {
  if (status.ok()) return ::testing::AssertionFailure() << "it succeeded";
  for (const std::string& part : parts) {
    if (status.message().find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "\"" << part << "\" is not in: " << status.to_string();
    }
  }
  return ::testing::AssertionSuccess() << status.to_string();
}
template <typename T>
::testing::AssertionResult fails_with(const Result<T>& result, const std::vector<std::string>& parts) {
  return fails_with(result.status(), parts);
}

// A model whose mapping is a table: checkpoint name -> what to do with the tensor.
class TableModel : public Model {
 public:
  using Rule = std::function<Status(const Tensor&)>;
  std::map<std::string, Rule, std::less<>> rules;
  std::map<std::string, std::string, std::less<>> unused;  // name -> why it is legal

  Status load_weights(const std::vector<NamedTensor>& weights) override {
    for (const NamedTensor& weight : weights) {
      const auto rule = rules.find(weight.name);
      if (rule == rules.end()) continue;
      const Status status = rule->second(weight.tensor);
      if (!status.ok()) return status;
    }
    return {};
  }
  std::string explain_unused(std::string_view name) const override {
    const auto found = unused.find(name);
    return found == unused.end() ? std::string() : found->second;
  }

  Module& module(std::string name, std::string type = "Module") {
    return *must(add_module(std::move(name), std::move(type)));
  }
  // `name` feeds the whole of `parameter` through its loader.
  void feed(std::string name, Parameter* parameter, std::string shard = "") {
    rules[std::move(name)] = [parameter, shard](const Tensor& loaded) {
      return parameter->load(loaded, shard);
    };
  }
};

// Checkpoint tensors with position-coded bytes.
struct Weights {
  std::vector<TensorMeta> metadata;
  std::vector<std::vector<std::byte>> bytes;

  explicit Weights(std::vector<TensorMeta> metas) : metadata(std::move(metas)) {
    for (const TensorMeta& meta : metadata) {
      std::int64_t count = 1;
      for (const std::int64_t size : meta.shape) count *= size;
      bytes.emplace_back(must(bytes_of(meta.dtype, count)));
      fill_position_coded(meta.name, 0, bytes.back());
    }
  }
  std::vector<NamedTensor> real() const {
    std::vector<NamedTensor> tensors;
    for (std::size_t i = 0; i < metadata.size(); ++i) {
      tensors.push_back({metadata[i].name, must(Tensor::real(metadata[i].name, metadata[i].dtype,
                                                             metadata[i].shape, bytes[i].data()))});
    }
    return tensors;
  }
  const std::vector<std::byte>& of(std::string_view name) const {
    for (std::size_t i = 0; i < metadata.size(); ++i) {
      if (metadata[i].name == name) return bytes[i];
    }
    std::abort();
  }
};

// Offsets of a strided box, row-major.
inline std::vector<std::int64_t> enumerate(std::int64_t offset, const std::vector<std::int64_t>& shape,
                                           const std::vector<std::int64_t>& stride) {
  std::vector<std::int64_t> offsets{offset};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::vector<std::int64_t> next;
    for (const std::int64_t base : offsets) {
      for (std::int64_t i = 0; i < shape[d]; ++i) next.push_back(base + i * stride[d]);
    }
    offsets = std::move(next);
  }
  return offsets;
}

inline std::vector<std::int64_t> enumerate(const Slice& slice) {
  std::vector<std::int64_t> offsets;
  for (const Region& region : slice.regions) {
    std::vector<std::int64_t> shape, stride;
    for (const Dim& dim : region.dims) {
      shape.push_back(dim.size);
      stride.push_back(dim.stride);
    }
    for (const std::int64_t offset : enumerate(region.offset, shape, stride)) offsets.push_back(offset);
  }
  return offsets;
}

// Runs a recording without conversions over a materialised model: fills, then scatters.
inline void replay(const Recording& recording, Model& model, const Weights& weights) {
  std::vector<Parameter*> parameters;
  for (const auto& module : model.modules()) {
    for (const auto& parameter : module->parameters()) parameters.push_back(parameter.get());
  }
  for (const Fill& fill : recording.fills) {
    const Destination& d = fill.destination;
    const std::int64_t size = dtype_bits(d.dtype) / 8;
    for (const std::int64_t at : enumerate(d.offset, d.shape, d.stride)) {
      std::memset(parameters[d.parameter]->memory() + at * size, 0, static_cast<std::size_t>(size));
    }
  }
  for (const Scatter& scatter : recording.scatters) {
    const Destination& d = scatter.destination;
    ASSERT_EQ(d.dtype, scatter.wire_dtype) << "replay converts nothing";
    ASSERT_EQ(d.shape, scatter.shape);
    const std::int64_t size = dtype_bits(d.dtype) / 8;
    const std::vector<std::int64_t> from = enumerate(scatter.slice);
    const std::vector<std::int64_t> to = enumerate(d.offset, d.shape, d.stride);
    ASSERT_EQ(from.size(), to.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      std::memcpy(parameters[d.parameter]->memory() + to[i] * size,
                  weights.bytes[scatter.name].data() + from[i] * size, static_cast<std::size_t>(size));
    }
  }
}

inline std::vector<std::byte> bytes_of_parameter(const Model& model, std::string_view module,
                                                 std::string_view parameter) {
  const Parameter* const found = model.find_module(module)->find(parameter);
  return {found->memory(), found->memory() + found->storage_bytes()};
}

// Rows [first, first + count) of a checkpoint tensor: the independent slice.
inline std::vector<std::byte> rows(const Weights& weights, std::string_view name, std::int64_t first,
                                   std::int64_t count) {
  for (std::size_t i = 0; i < weights.metadata.size(); ++i) {
    const TensorMeta& meta = weights.metadata[i];
    if (meta.name != name) continue;
    const std::int64_t row = static_cast<std::int64_t>(weights.bytes[i].size()) / meta.shape.at(0);
    const auto begin = weights.bytes[i].begin() + first * row;
    return {begin, begin + count * row};
  }
  std::abort();
}

// Columns [first, first + count) of a 2-D checkpoint tensor.
inline std::vector<std::byte> columns(const Weights& weights, std::string_view name, std::int64_t first,
                                      std::int64_t count) {
  for (std::size_t i = 0; i < weights.metadata.size(); ++i) {
    const TensorMeta& meta = weights.metadata[i];
    if (meta.name != name) continue;
    const std::int64_t size = dtype_bits(meta.dtype) / 8;
    std::vector<std::byte> out;
    for (std::int64_t r = 0; r < meta.shape.at(0); ++r) {
      const auto begin = weights.bytes[i].begin() + (r * meta.shape.at(1) + first) * size;
      out.insert(out.end(), begin, begin + count * size);
    }
    return out;
  }
  std::abort();
}

inline std::vector<std::byte> joined(const std::vector<std::vector<std::byte>>& parts) {
  std::vector<std::byte> out;
  for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

using Bytes = std::vector<std::byte>;

inline std::vector<TensorMeta> one(std::string name, DType dtype, std::vector<std::int64_t> shape) {
  return {{std::move(name), dtype, std::move(shape)}};
}

// Bakes a hand-made model, replays it over 0xCD with guards, and loads a second round eagerly over the same
// memory.
inline void expect_exact(TableModel& model, const Weights& weights) {
  const Recording recording = must(bake(model, weights.metadata));
  ASSERT_OK(model.materialise(std::byte{0xCD}, 64));
  replay(recording, model, weights);
  std::vector<Bytes> replayed;
  for (const auto& module : model.modules()) {
    for (const auto& parameter : module->parameters())
      replayed.push_back({parameter->memory(), parameter->memory() + parameter->storage_bytes()});
  }
  ASSERT_OK(load_eagerly(model, weights.real()));
  std::size_t i = 0;
  for (const auto& module : model.modules()) {
    for (const auto& parameter : module->parameters()) {
      EXPECT_EQ(replayed[i++], Bytes(parameter->memory(), parameter->memory() + parameter->storage_bytes()))
          << parameter->full_name();
    }
  }
  EXPECT_OK(model.check_guards());
}

}  // namespace shardpull
