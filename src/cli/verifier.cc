#include "cli/verifier.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/status_macros.h"
#include "checkpoint/mutate.h"
#include "checkpoint/safetensors.h"
#include "shardpull/tensor.h"

namespace shardpull::cli {
namespace {

constexpr std::uint64_t kAlignment = 64;

// Anonymous pages that go back to the system at once, unlike a heap's.
class Pages {
 public:
  static Result<Pages> make(std::uint64_t bytes) {
    Pages pages;
    if (bytes == 0) return pages;
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      return Status(StatusCode::kResourceExhausted, fmt::format("no memory to verify with: {} bytes", bytes),
                    {.reason = Reason::kNoMemory, .fault = Fault::kHost});
    }
    pages.data_ = static_cast<std::byte*>(at);
    pages.bytes_ = bytes;
    return pages;
  }
  Pages() = default;
  Pages(Pages&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Pages() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

Status differs(const Parameter& parameter, const std::byte* got, const std::byte* wanted,
               std::uint64_t bytes) {
  const auto at = static_cast<std::uint64_t>(std::mismatch(got, got + bytes, wanted).first - got);
  std::uint64_t wrong = 0;
  for (std::uint64_t i = at; i < bytes; ++i) wrong += got[i] != wanted[i] ? 1 : 0;
  const std::uint64_t shown = std::min<std::uint64_t>(8, bytes - at);
  const auto hex = [shown](const std::byte* from) {
    std::string text;
    for (std::uint64_t i = 0; i < shown; ++i) text += fmt::format("{:02x}", static_cast<unsigned>(from[i]));
    return text;
  };
  const std::string name = parameter.full_name();
  return Status(
      StatusCode::kDataLoss,
      fmt::format("{} is not exact: {} of {} bytes differ, first byte {}: {} instead of {}{}", name, wrong,
                  bytes, at, hex(got + at), hex(wanted + at), got[at] == kCanary ? " (never written)" : ""),
      {.reason = Reason::kCorrupt, .fault = Fault::kLibrary, .tensor = name});
}

}  // namespace

Result<Verdict> verify(const ModelInput& input, const ModelFactory& build, const Recording& recording,
                       const std::vector<std::uint64_t>& versions, Model& model) {
  const Checkpoint& files = *input.checkpoint;
  const std::size_t count = input.metadata.size();
  std::vector<bool> live(count, false);
  for (const std::uint32_t name : recording.live) live[name] = true;
  for (const std::uint32_t name : recording.unbaked) live[name] = true;

  // Read, not mapped: a file that is cut short meanwhile gives an error and no signal.
  std::vector<std::uint64_t> offsets(count, 0);
  std::uint64_t total = 0;
  for (std::size_t name = 0; name < count; ++name) {
    if (!live[name]) continue;
    offsets[name] = total;
    total =
        checked_align_up<std::uint64_t>(total + files.bytes(input.tensor[name]), kAlignment).value_or(total);
  }
  SHARDPULL_ASSIGN_OR_RETURN(const Pages changed, Pages::make(total));
  std::vector<NamedTensor> weights;
  weights.reserve(count);
  for (std::size_t name = 0; name < count; ++name) {
    const TensorMeta& meta = input.metadata[name];
    std::byte* const data = changed.data() + offsets[name];
    if (live[name]) {
      const std::uint64_t bytes = files.bytes(input.tensor[name]);
      SHARDPULL_RETURN_IF_ERROR(files.read(input.tensor[name], 0, {data, bytes}));
      mutate(data, bytes, 0, versions[name]);
    }
    SHARDPULL_ASSIGN_OR_RETURN(Tensor tensor, Tensor::real(meta.name, meta.dtype, meta.shape, data));
    weights.push_back({meta.name, std::move(tensor)});
  }
  SHARDPULL_ASSIGN_OR_RETURN(const std::unique_ptr<Model> reference, build());
  SHARDPULL_RETURN_IF_ERROR(reference->materialise(kCanary));
  SHARDPULL_RETURN_IF_ERROR(load_eagerly(*reference, weights));

  Verdict verdict;
  for (const auto& module : model.modules()) {
    const Module* const twin = reference->find_module(module->name());
    for (const auto& parameter : module->parameters()) {
      const Parameter* const wanted = twin == nullptr ? nullptr : twin->find(parameter->name());
      const std::uint64_t bytes = parameter->storage_bytes();
      if (wanted == nullptr || wanted->storage_bytes() != bytes) {
        return Status(
            StatusCode::kInternal, parameter->full_name() + " is not the same parameter when built again",
            {.reason = Reason::kUnspecified, .fault = Fault::kLibrary, .tensor = parameter->full_name()});
      }
      verdict.parameters += static_cast<std::uint64_t>(parameter->numel());
      verdict.bytes += bytes + 2 * kGuardBytes;
      if (bytes == 0 || !verdict.status.ok()) continue;
      if (std::memcmp(parameter->memory(), wanted->memory(), bytes) != 0) {
        verdict.status = differs(*parameter, parameter->memory(), wanted->memory(), bytes);
      }
    }
  }
  if (verdict.status.ok()) verdict.status = model.check_guards();
  return verdict;
}

void poison(Model& model, const Recording& recording, const std::vector<std::uint32_t>& names) {
  std::set<std::string_view> fed;
  for (const Scatter& scatter : recording.scatters) {
    // A module that takes no bytes, fills only, is not touched by a sync of some names.
    if (scatter.slice.numel() == 0 || !std::binary_search(names.begin(), names.end(), scatter.name)) continue;
    fed.insert(recording.modules[recording.parameters[scatter.destination.parameter].module].name);
  }
  for (const auto& module : model.modules()) {
    if (!names.empty() && !fed.contains(module->name())) continue;
    for (const auto& parameter : module->parameters()) {
      if (parameter->optional() || parameter->memory() == nullptr) continue;
      std::memset(parameter->memory(), static_cast<int>(kCanary), parameter->storage_bytes());
    }
  }
}

Status prepare_dump(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (!error && ::access(directory.c_str(), W_OK | X_OK) != 0) error = {errno, std::generic_category()};
  if (error) {
    return Status(StatusCode::kInternal,
                  fmt::format("--dump: cannot write to {}: {}", directory, error.message()),
                  {.reason = Reason::kHost, .fault = Fault::kHost});
  }
  return {};
}

Status dump(const Model& model, const std::string& directory, std::uint32_t consumer, std::uint64_t version) {
  std::map<std::string, const Parameter*> parameters;
  for (const auto& module : model.modules()) {
    for (const auto& parameter : module->parameters()) parameters[parameter->full_name()] = parameter.get();
  }
  std::vector<TensorMeta> tensors;
  for (const auto& [name, parameter] : parameters) {
    tensors.push_back({name, parameter->dtype(), parameter->shape()});
  }
  const auto path = std::filesystem::path(directory) / fmt::format("worker-{}.safetensors", consumer);
  SHARDPULL_ASSIGN_OR_RETURN(
      SafetensorsWriter writer,
      SafetensorsWriter::create(path, tensors, {{"version", fmt::format("{}", version)}}));
  std::vector<std::byte> row_major;
  for (const auto& [name, parameter] : parameters) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                               tensor_bytes(parameter->dtype(), parameter->shape()));
    SHARDPULL_ASSIGN_OR_RETURN(const Tensor tensor,
                               Tensor::real_strided(name, parameter->dtype(), parameter->shape(),
                                                    parameter->stride(), parameter->memory()));
    std::span<const std::byte> data(parameter->memory(), bytes);
    if (!tensor.is_contiguous()) {
      row_major.resize(bytes);
      SHARDPULL_RETURN_IF_ERROR(tensor.copy_out(row_major.data(), bytes));
      data = row_major;
    }
    SHARDPULL_RETURN_IF_ERROR(writer.append(name, data));
  }
  return writer.finish();
}

}  // namespace shardpull::cli
