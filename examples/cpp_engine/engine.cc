// An inference engine in C++ that gets its weights from a torch trainer (train.py beside this file).
//
//   engine DIRECTORY RANK RANKS
//
// One process of RANKS, cut by tensor parallelism. The model is a stack of gated blocks,
//
//   y = down (relu(gate x) * (up x))
//
// of which the trainer has gate, up and down as three float32 tensors a block. This engine holds, as engines
// do, gate and up fused into one matrix, only the rows and columns of its own rank, and all of it in
// bfloat16. The trainer is told none of that. The loaders below, which an engine has for its checkpoints
// anyway, say it all: shardpull runs them once, without weights, notes which slice of which tensor they copy
// where, and from then on brings exactly those slices.
#include <bit>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shardpull/shardpull.h"

namespace {

using namespace shardpull;

// What config.json says in an engine that reads one.
constexpr int kBlocks = 2;
constexpr std::int64_t kHidden = 24;
constexpr std::int64_t kInner = 40;

// ---- The model -----------------------------------------------------------------------------------------

// The model of one tensor-parallel rank. It owns the parameters' memory; syncs land in it.
class GatedModel final : public Model {
 public:
  // Declares modules and parameters; nothing is allocated yet.
  static Result<std::unique_ptr<GatedModel>> create(std::int64_t rank, std::int64_t ranks) {
    if (rank < 0 || rank >= ranks || kInner % ranks != 0) {
      return Status(StatusCode::kInvalidArgument,
                    "RANK must be below RANKS, and RANKS must divide " + std::to_string(kInner));
    }
    auto model = std::unique_ptr<GatedModel>(new GatedModel(rank, kInner / ranks));
    for (int i = 0; i < kBlocks; ++i) {
      if (Status status = model->add_block("blocks." + std::to_string(i)); !status.ok()) return status;
    }
    return model;
  }

  // From the checkpoint's names to this model's. shardpull calls it with fakes of all names of the trainer;
  // given tensors with memory, it loads a checkpoint.
  Status load_weights(const std::vector<NamedTensor>& weights) override {
    // The last word is for the loader alone: which part of a fused parameter a tensor is.
    struct Part {
      std::string_view of, module, shard;
    };
    static constexpr Part kParts[] = {
        {".gate.", ".gate_up", "gate"}, {".up.", ".gate_up", "up"}, {".down.", ".down", ""}};
    for (const auto& [name, tensor] : weights) {
      Parameter* parameter = nullptr;
      std::string shard;
      for (const Part& part : kParts) {
        const std::size_t at = name.find(part.of);
        const Module* const module =
            at == name.npos ? nullptr : find_module(name.substr(0, at) + std::string(part.module));
        if (module == nullptr) continue;
        parameter = module->find("weight");
        shard = part.shard;
      }
      if (parameter == nullptr && explain_unused(name).empty()) {
        return {StatusCode::kInvalidArgument, "this engine has no place for " + name};
      }
      if (parameter == nullptr) continue;
      if (Status status = parameter->load(tensor, shard); !status.ok()) return status;
    }
    return {};
  }

  // A name that feeds nothing is a mistake, and the worker is refused, unless this says why.
  std::string explain_unused(std::string_view name) const override {
    return name.starts_with("value_head.") ? "only the trainer uses it" : "";
  }

  // This rank's part of a block's y; the parts of all ranks add up to y.
  std::vector<float> apply(int block, const std::vector<float>& x) const {
    const std::string name = "blocks." + std::to_string(block);
    const std::vector<float> gate_up = times(*find_module(name + ".gate_up")->find("weight"), x);
    std::vector<float> inner(static_cast<std::size_t>(rows_));
    for (std::size_t i = 0; i < inner.size(); ++i) {
      inner[i] = (gate_up[i] > 0 ? gate_up[i] : 0.0F) * gate_up[inner.size() + i];
    }
    return times(*find_module(name + ".down")->find("weight"), inner);
  }

 private:
  GatedModel(std::int64_t rank, std::int64_t rows) : rank_(rank), rows_(rows) {}

  Status add_block(const std::string& name) {
    const auto gate_up = add_module(name + ".gate_up", "MergedColumnParallelLinear");
    if (!gate_up.ok()) return gate_up.status();
    const auto down = add_module(name + ".down", "RowParallelLinear");
    if (!down.ok()) return down.status();
    // Rows of gate, then rows of up: where a tensor goes depends on which of the two it is.
    const Loader load_gate_up = [this](Parameter& parameter, const Tensor& loaded, const std::string& shard) {
      const auto mine = loaded.narrow(0, rank_ * rows_, rows_);
      if (!mine.ok()) return mine.status();
      const auto place = parameter.data().narrow(0, shard == "gate" ? 0 : rows_, rows_);
      return place.ok() ? place->copy_(*mine) : place.status();
    };
    // Columns: strided in the trainer's tensor, contiguous here.
    const Loader load_down = [this](Parameter& parameter, const Tensor& loaded, const std::string&) {
      const auto mine = loaded.narrow(1, rank_ * rows_, rows_);
      return mine.ok() ? parameter.data().copy_(*mine) : mine.status();
    };
    // The trainer's tensors are float32: they are rounded to these as they land, as torch rounds.
    const auto fused = (*gate_up)->add_parameter("weight", DType::kBF16, {2 * rows_, kHidden}, load_gate_up);
    if (!fused.ok()) return fused.status();
    return (*down)->add_parameter("weight", DType::kBF16, {kHidden, rows_}, load_down).status();
  }

  // matrix x, summed from the first column to the last.
  static std::vector<float> times(const Parameter& matrix, const std::vector<float>& x) {
    std::vector<float> y(static_cast<std::size_t>(matrix.shape()[0]));
    const std::byte* at = matrix.memory();
    for (float& sum : y) {
      for (const float element : x) {
        std::uint16_t bits = 0;  // a bfloat16 is the upper half of a float
        std::memcpy(&bits, at, sizeof bits);
        at += sizeof bits;
        sum += std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16) * element;
      }
    }
    return y;
  }

  const std::int64_t rank_, rows_;
};

// ---- The engine ----------------------------------------------------------------------------------------

// FNV-1a, 64 bits, of a parameter's bytes.
std::uint64_t checksum(const Parameter& parameter) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::uint64_t i = 0; i < parameter.storage_bytes(); ++i) {
    hash = (hash ^ static_cast<std::uint8_t>(parameter.memory()[i])) * 0x100000001b3;
  }
  return hash;
}

// In the place of an engine's answers a line a block: what it holds, and what it computes with it.
void answer(const GatedModel& model, std::uint64_t version) {
  const std::vector<float> x(kHidden, 0.5F);
  for (int block = 0; block < kBlocks; ++block) {
    const Module& gate_up = *model.find_module("blocks." + std::to_string(block) + ".gate_up");
    std::cout << "version " << version << " block " << block << std::hex << " sum "
              << checksum(*gate_up.find("weight")) << " y" << std::hexfloat;
    for (const float element : model.apply(block, x)) std::cout << ' ' << element;
    std::cout << std::defaultfloat << std::dec << std::endl;
  }
}

Status run(const std::string& directory, std::uint32_t rank, std::uint32_t ranks) {
  auto model = GatedModel::create(rank, ranks);
  if (!model.ok()) return model.status();

  const auto token = token_from_environment();
  if (!token.ok()) return token.status();
  WorkerOptions options;
  options.fleet.directory = directory;
  options.fleet.token = *token;
  options.consumer = rank;  // a second replica's ranks follow those of the first
  auto worker = Worker::connect(options, **model);  // waits for the trainer, bakes, plans
  if (!worker.ok()) return worker.status();

  // Returns when the trainer ends the fleet. The next sync begins only when this callback has returned, which
  // may therefore read the parameters. An engine that answers on other threads meanwhile takes
  // Apply::kStaged, which leaves the old version in place until the new one is complete, and reads under
  // Worker::version_guard.
  Status failed;
  const Status served =
      (*worker)->serve([&](std::uint64_t version, const Status& status, const WorkerReport&) {
        if (status.ok()) {
          answer(**model, version);
        } else {
          failed = status;  // of this sync: the trainer hears of it too, and may send again
        }
      });
  return served.ok() ? failed : served;
}

bool parse(std::string_view word, std::uint32_t& number) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  return error == std::errc() && end == word.data() + word.size();
}

}  // namespace

int main(int argc, char** argv) {
  std::uint32_t rank = 0, ranks = 0;
  if (argc != 4 || !parse(argv[2], rank) || !parse(argv[3], ranks)) {
    std::cerr << "usage: engine DIRECTORY RANK RANKS\n";
    return 2;
  }
  const Status status = run(argv[1], rank, ranks);
  if (status.ok()) return 0;
  std::cerr << status.to_string() << "\n";
  return 1;
}
