// The bake: runs a model's own loaders once over fakes of ALL names and records every copy. Rules:
// docs/FORMATS.md, "Bake".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardpull/model.h"
#include "shardpull/slice.h"
#include "shardpull/source.h"
#include "shardpull/status.h"

namespace shardpull {

// A destination window: offset from the parameter's first element, shape and stride, all in elements of
// `dtype`. `dtype` is the parameter's own dtype, or that of the view(dtype) the loader wrote through: the
// bytes are then replayed through the same view (converted to `dtype` when the wire dtype differs, never to
// the parameter's).
struct Destination {
  std::uint32_t parameter = 0;  // index into Recording::parameters
  DType dtype = DType::kF32;
  std::int64_t offset = 0;
  std::vector<std::int64_t> shape, stride;
  friend bool operator==(const Destination&, const Destination&) = default;
};

// One recorded copy: a fetch key (name, wire dtype, canonical slice) plus where it lands. destination.shape
// equals `shape` (leading 1s of the destination are dropped); a slice without elements is legal.
struct Scatter {
  std::uint32_t name = 0;  // index into the metadata
  DType wire_dtype = DType::kF32;
  Slice slice;
  std::vector<std::int64_t> shape;  // the chain's result shape
  std::string chain;                // for people
  Destination destination;
};

// A destination window that takes no source: zeroed when its module is materialised, before its first
// scatter.
struct Fill {
  Destination destination;
};

struct RecordedParameter {
  std::uint32_t module = 0;  // index into Recording::modules
  std::string name;          // "weight"
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape, stride;
};

struct RecordedModule {
  std::string name, type;
  bool baked = false;  // the union of what is written covers it; false for a module that nothing writes into
  bool has_post_process = false;
};

// What to do with a live name that did not bake.
enum class UnbakedPolicy : std::uint8_t { kStrict, kFallback };
// A parameter of another dtype than the chain.
enum class ConversionPolicy : std::uint8_t { kAllow, kWiden, kRefuse };

struct BakeOptions {
  UnbakedPolicy unbaked = UnbakedPolicy::kStrict;
  ConversionPolicy conversions = ConversionPolicy::kAllow;
};

// Everything a plan needs to know of a worker. Parameter and module order are the model's; scatters are in
// recording order. Scatters and fills are those of baked modules only. No two destinations of one parameter
// overlap, fills included, so that they may run in any order.
struct Recording {
  std::vector<RecordedModule> modules;
  std::vector<RecordedParameter> parameters;
  std::vector<Scatter> scatters;
  std::vector<Fill> fills;
  std::vector<std::uint32_t> live;       // names whose copy fired, ascending
  std::vector<std::uint32_t> dead;       // names that never fired here, ascending
  std::vector<std::uint32_t> unbaked;    // live names that feed a module which did not bake (policy fallback)
  std::vector<std::string> conversions;  // "name F32 -> module.param BF16", one line each
  std::vector<std::string> unused_reasons;  // parallel to `dead`
};

// Bakes. The model is left exactly as it was, also on error. Refused (reason kBakeFailed, or the loader's
// own), each naming what it is about: a loader error, an unsupported op, out-of-range or self-overlapping
// windows, other shapes, a conversion the policy forbids, duplicate names in `metadata`, a dead name that the
// model cannot explain, a parameter that no source feeds, and, when strict, a live name whose module did not
// bake: an unattributed copy went into it, its windows do not cover it, or two of them overlap in a way that
// cannot be cut to keep the loader's last word.
Result<Recording> bake(Model& model, const std::vector<TensorMeta>& metadata,
                       const BakeOptions& options = {});

// Loads `weights` (real tensors, the source's order) eagerly through the same loaders: padding and fills
// first, then copies.
Status load_eagerly(Model& model, const std::vector<NamedTensor>& weights);

}  // namespace shardpull
