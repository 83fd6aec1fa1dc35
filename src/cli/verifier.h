// Whether a worker's parameters hold exactly the bytes they should.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/layouts.h"
#include "cli/model_input.h"
#include "shardpull/bake.h"
#include "shardpull/model.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// What fresh parameters and their guard bytes hold: what no copy wrote shows.
inline constexpr std::byte kCanary{0xCD};
inline constexpr std::uint64_t kGuardBytes = 64;

struct Verdict {
  Status status;                 // OK = exact; else the first parameter and byte that differ
  std::uint64_t parameters = 0;  // elements compared
  std::uint64_t bytes = 0;       // bytes compared: parameters with their padding, and guard bytes
};

// Makes the model of one worker, not materialised; each call makes another one of the same.
using ModelFactory = std::function<Result<std::unique_ptr<Model>>()>;

// Loads the checkpoint a second time, each tensor at its version (`versions`, by metadata index), eagerly,
// into a second model made by `build`, and compares all bytes of all parameters, padding included, and the
// guard bytes of `model` (materialised with kCanary and kGuardBytes). `recording` only says which tensors
// need their bytes changed to their version: a tensor that it wrongly calls dead is loaded with the
// checkpoint's bytes, and differs. The second model is gone when this returns.
Result<Verdict> verify(const ModelInput& input, const ModelFactory& build, const Recording& recording,
                       const std::vector<std::uint64_t>& versions, Model& model);

// Sets every parameter that a source must feed to the canary, so that the next sync has to write all of it
// again. `names`: only those of modules that one of these (ascending) feeds, as a sync of some names writes
// them; empty: all.
void poison(Model& model, const Recording& recording, const std::vector<std::uint32_t>& names = {});

// Makes `directory` if it is not there, and checks that it can be written to, before a fleet is started for
// it.
Status prepare_dump(const std::string& directory);
// Writes `directory`/worker-<consumer>.safetensors: every parameter as "module.parameter", row-major.
Status dump(const Model& model, const std::string& directory, std::uint32_t consumer, std::uint64_t version);

}  // namespace shardpull::cli
