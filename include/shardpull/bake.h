// The bake: runs a model's own loaders once over fakes of ALL names and records every copy. Rules:
// docs/FORMATS.md, "Bake".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardpull/api.h"
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
  DType dtype = DType::kF32;    // of the view that was written through
  std::int64_t offset = 0;      // from the parameter's first element
  // Both in elements:
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> stride;
  friend bool operator==(const Destination&, const Destination&) = default;
};

// One recorded copy: a fetch key (name, wire dtype, canonical slice) plus where it lands. destination.shape
// equals `shape` (leading 1s of the destination are dropped); a slice without elements is legal.
struct Scatter {
  std::uint32_t name = 0;  // index into the metadata
  DType wire_dtype = DType::kF32;   // what the bytes travel as
  Slice slice;                      // which elements of the tensor
  std::vector<std::int64_t> shape;  // the chain's result shape
  std::string chain;                // how to get there from the tensor: ".narrow(0, 512, 512)"
  Destination destination;          // where they land
  friend bool operator==(const Scatter&, const Scatter&) = default;
};

// A destination window that takes no source: zeroed when its module is materialised, before its first
// scatter.
struct Fill {
  Destination destination;  // what is zeroed
  friend bool operator==(const Fill&, const Fill&) = default;
};

// A parameter that owns its storage.
struct RecordedParameter {
  std::uint32_t module = 0;  // index into Recording::modules
  std::string name;          // "weight"
  DType dtype = DType::kF32;            // of its elements
  // Both in elements:
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> stride;
  bool optional = false;                // a buffer: Parameter::optional
  std::vector<std::byte> initial = {};  // a buffer's bytes before anything feeds it; empty: none given
  friend bool operator==(const RecordedParameter&, const RecordedParameter&) = default;
};

// Another name and shape for a parameter's storage: Module::add_alias.
struct RecordedAlias {
  std::uint32_t module = 0;     // the alias's own, index into Recording::modules
  std::string name;             // within that module
  std::uint32_t parameter = 0;  // whose storage it is, index into Recording::parameters
  std::vector<std::int64_t> shape;  // in elements; contiguous
  friend bool operator==(const RecordedAlias&, const RecordedAlias&) = default;
};

// A module of the model: Module.
struct RecordedModule {
  std::string name;    // dotted
  std::string type;    // "QKVParallelLinear"
  bool baked = false;  // the union of what is written covers it; false for a module that nothing writes into
  bool has_post_process = false;  // whether Module::post_process is set
  std::vector<std::string> aliases = {};  // its other paths (Model::add_module_alias), ascending
  friend bool operator==(const RecordedModule&, const RecordedModule&) = default;
};

// A name that feeds a module which did not bake.
struct RecordedFallback {
  std::uint32_t name = 0;    // index into the metadata
  std::uint32_t module = 0;  // index into Recording::modules
  friend bool operator==(const RecordedFallback&, const RecordedFallback&) = default;
};

// What to do with a live name that did not bake. kFallback: every sync pulls it whole, and the worker runs the
// model's own loaders over it, on the thread that post-processes. It costs the worker memory of the tensor's
// size and a second copy. Which modules are loaded so is known by the bake; a loader that writes into other
// modules as well is ignored there.
enum class UnbakedPolicy : std::uint8_t { kStrict, kFallback };
// A parameter of another dtype than the chain.
enum class ConversionPolicy : std::uint8_t { kAllow, kWiden, kRefuse };

// What a bake lets pass.
struct BakeOptions {
  UnbakedPolicy unbaked = UnbakedPolicy::kStrict;           // a name that did not bake
  ConversionPolicy conversions = ConversionPolicy::kAllow;  // a parameter of another dtype than the chain
};

// Everything a plan needs to know of a worker. Parameter and module order are the model's; scatters are in
// recording order. Scatters and fills are those of baked modules only. No two destinations of one parameter
// overlap, fills included, so that they may run in any order.
struct Recording {
  std::string metadata;  // digest of the names, dtypes and shapes that `name` indices are of, 32 hex digits
  std::vector<RecordedModule> modules;        // in the model's order
  std::vector<RecordedParameter> parameters;  // those that own storage, in the model's order
  std::vector<RecordedAlias> aliases;         // in the model's order
  std::vector<Scatter> scatters;              // of baked modules, in recording order
  std::vector<Fill> fills;                    // of baked modules
  std::vector<std::uint32_t> live;       // names whose copy fired, ascending
  std::vector<std::uint32_t> dead;       // names that never fired here, ascending
  std::vector<std::uint32_t> unbaked;    // live names that feed a module which did not bake (policy fallback)
  std::vector<RecordedFallback> fallbacks = {};  // of those, ascending: each with every such module
  std::vector<std::string> conversions;  // "name F32 -> module.param BF16", one line each
  std::vector<std::string> unused_reasons;  // parallel to `dead`
  friend bool operator==(const Recording&, const Recording&) = default;
};

// Bakes. The model is left exactly as it was, also on error. Refused (reason kBakeFailed, or the loader's
// own), each naming what it is about: a loader error, an unsupported op, out-of-range or self-overlapping
// windows, other shapes, a conversion the policy forbids, duplicate names in `metadata`, a dead name that the
// model cannot explain, a name whose copies are all overwritten by later ones (unless it is explained), a
// parameter that no source feeds, and, when strict, a live name whose module did not bake: an unattributed
// copy went into it, its windows do not cover it, or two of them overlap in a way that cannot be cut to keep
// the loader's last word.
SHARDPULL_API Result<Recording> bake(Model& model, const std::vector<TensorMeta>& metadata,
                                     const BakeOptions& options = {});

// Loads `weights` (real tensors, the source's order) eagerly through the same loaders: padding and fills
// first, then copies.
SHARDPULL_API Status load_eagerly(Model& model, const std::vector<NamedTensor>& weights);

// The same for some modules (indices into Model::modules()): what a loader writes into others is dropped, and
// their padding is left alone.
SHARDPULL_API Status load_modules(Model& model, const std::vector<std::uint32_t>& modules,
                                  const std::vector<NamedTensor>& weights);

}  // namespace shardpull
