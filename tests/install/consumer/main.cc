// A stranger's program: the public headers and the library, nothing else of the source tree. A trainer and a worker
// of one fleet, in one process, move one tensor twice.
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "shardpull/shardpull.h"

namespace {

using namespace shardpull;

const std::vector<TensorMeta> kMetadata = {{"layer.weight", DType::kF32, {4, 3}}};
constexpr std::size_t kElements = 12;

float element(std::uint64_t version, std::size_t index) { return static_cast<float>(version * 100 + index); }

int fail(const std::string& what) {
  std::cerr << what << "\n";
  return 1;
}

class Source final : public WeightSource {
 public:
  void set_version(std::uint64_t version) {
    for (std::size_t i = 0; i < kElements; ++i) elements_[i] = element(version, i);
  }
  std::vector<TensorMeta> metadata() const override { return kMetadata; }
  Result<std::unique_ptr<GroupStream>> iter_groups(const SyncRequest& request) override {
    return std::unique_ptr<GroupStream>(std::make_unique<Stream>(*this, request));
  }

 private:
  class Stream final : public GroupStream {
   public:
    Stream(const Source& source, const SyncRequest& request) : source_(source), groups_(request.groups) {}
    Result<std::optional<GroupTensors>> next() override {
      if (groups_.empty()) return std::optional<GroupTensors>();
      const auto* const data = reinterpret_cast<const std::byte*>(source_.elements_.data());
      TensorView view{data, DType::kF32, {4, 3}, {3, 1}, data, kElements * sizeof(float)};
      GroupTensors group{groups_.front(), {NamedView{0, 0, view}}};
      groups_.erase(groups_.begin());
      return std::optional<GroupTensors>(std::move(group));
    }

   private:
    const Source& source_;
    std::vector<std::uint32_t> groups_;
  };

  std::vector<float> elements_ = std::vector<float>(kElements);
};

class LinearModel final : public Model {
 public:
  Status load_weights(const std::vector<NamedTensor>& weights) override {
    for (const NamedTensor& weight : weights) {
      if (const Status loaded = find_module("layer")->find("weight")->load(weight.tensor); !loaded.ok())
        return loaded;
    }
    return {};
  }
};

int train(const FleetOptions& fleet) {
  TrainerOptions options;
  options.fleet = fleet;
  auto trainer = Trainer::create(options);
  if (!trainer.ok()) return fail(trainer.status().to_string());
  Source source;
  if (const Status ready = (*trainer)->init(source); !ready.ok()) return fail(ready.to_string());
  for (const std::uint64_t version : {1, 2}) {
    source.set_version(version);
    const auto report = (*trainer)->send_weights(version);
    if (!report.ok()) return fail(report.status().to_string());
  }
  (*trainer)->shutdown();
  return 0;
}

int work(const FleetOptions& fleet) {
  LinearModel model;
  auto layer = model.add_module("layer", "Linear");
  if (!layer.ok()) return fail(layer.status().to_string());
  const auto weight = (*layer)->add_parameter("weight", DType::kF32, {4, 3});
  if (!weight.ok()) return fail(weight.status().to_string());
  WorkerOptions options;
  options.fleet = fleet;
  auto worker = Worker::connect(options, model);
  if (!worker.ok()) return fail(worker.status().to_string());
  int wrong = 0;
  const Status served =
      (*worker)->serve([&](std::uint64_t version, const Status& status, const WorkerReport& report) {
        if (!status.ok()) wrong += fail(status.to_string());
        std::vector<float> got(kElements);
        std::memcpy(got.data(), (*weight)->memory(), kElements * sizeof(float));
        for (std::size_t i = 0; i < kElements; ++i) {
          if (got[i] != element(version, i)) wrong += fail("element " + std::to_string(i) + " is wrong");
        }
        std::cout << "version " << version << ": " << report.bytes_moved << " bytes of "
                  << dtype_name((*weight)->dtype()) << "\n";
      });
  if (!served.ok()) return fail(served.to_string());
  return wrong;
}

}  // namespace

int main() {
  char directory[] = "/tmp/shardpull-consumer-XXXXXX";
  if (::mkdtemp(directory) == nullptr) return fail("no directory");
  FleetOptions fleet;
  fleet.directory = directory;
  fleet.token = 0x5eed;
  int trained = 1;
  std::thread trainer([&] { trained = train(fleet); });
  const int worked = work(fleet);
  trainer.join();
  std::filesystem::remove_all(directory);
  return trained + worked;
}
