#include "cli/checkpoint_source.h"

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/mutate.h"

namespace shardpull::cli {
namespace {

constexpr std::uint64_t kAlignment = 256;  // of each tensor, as allocators of accelerators have it

std::vector<std::int64_t> contiguous(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> stride(shape.size());
  std::int64_t step = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    stride[d] = step;
    step *= std::max<std::int64_t>(shape[d], 1);
  }
  return stride;
}

}  // namespace

class CheckpointSource::Stream final : public GroupStream {
 public:
  Stream(CheckpointSource& source, std::vector<std::uint32_t> groups)
      : source_(source), groups_(std::move(groups)) {}

  Result<std::optional<GroupTensors>> next() override {
    if (at_ == groups_.size()) return std::optional<GroupTensors>();
    GroupTensors out;
    out.group = groups_[at_++];
    const GatherGroup& group = source_.groups_[out.group];
    for (std::uint32_t name = group.first; name < group.first + group.count; ++name) {
      NamedView view{.name = name, .view = std::nullopt};
      const Tensor& tensor = source_.tensors_[name];
      if (tensor.data != nullptr) {
        const TensorMeta& meta = source_.model_.metadata[name];
        view.view = TensorView{.data = tensor.data,
                               .dtype = meta.dtype,
                               .shape = meta.shape,
                               .stride = tensor.stride,
                               .storage = tensor.data,
                               .storage_bytes = tensor.bytes};
      }
      out.tensors.push_back(std::move(view));
    }
    return std::optional<GroupTensors>(std::move(out));
  }

  void released(std::uint32_t group) override {
    const GatherGroup& names = source_.groups_[group];
    for (std::uint32_t name = names.first; name < names.first + names.count; ++name) {
      through_ += source_.tensors_[name].bytes;
    }
    if (source_.progress_) source_.progress_(through_);
  }

 private:
  CheckpointSource& source_;
  const std::vector<std::uint32_t> groups_;
  std::size_t at_ = 0;
  std::uint64_t through_ = 0;
};

Result<std::unique_ptr<CheckpointSource>> CheckpointSource::load(const ModelInput& model,
                                                                 std::vector<std::uint32_t> held,
                                                                 Trainer& trainer, Progress progress) {
  std::unique_ptr<CheckpointSource> source(new CheckpointSource(model, std::move(held), std::move(progress)));
  SHARDPULL_ASSIGN_OR_RETURN(source->groups_, form_groups(model.metadata));
  source->tensors_.resize(model.metadata.size());
  std::uint64_t total = 0;
  std::vector<std::uint64_t> offsets;
  for (const std::uint32_t name : source->held_) {
    Tensor& tensor = source->tensors_[name];
    tensor.bytes = bytes_of(model, name);
    tensor.stride = contiguous(model.metadata[name].shape);
    offsets.push_back(total);
    // An empty tensor has an address of its own, too.
    const auto end = checked_add<std::uint64_t>(total, std::max<std::uint64_t>(tensor.bytes, 1));
    const auto next = end ? checked_align_up<std::uint64_t>(*end, kAlignment) : std::nullopt;
    if (!next) {
      return Status(StatusCode::kInvalidArgument, fmt::format("{}: the tensors are too large", model.label),
                    {.reason = Reason::kLimit});
    }
    total = *next;
    source->held_bytes_ += tensor.bytes;
  }
  SHARDPULL_ASSIGN_OR_RETURN(source->memory_,
                             trainer.allocate(std::max<std::uint64_t>(total, kAlignment), "weights"));
  for (std::size_t i = 0; i < source->held_.size(); ++i) {
    const std::uint32_t name = source->held_[i];
    Tensor& tensor = source->tensors_[name];
    tensor.data = source->memory_.data + offsets[i];
    SHARDPULL_RETURN_IF_ERROR(
        model.checkpoint->read(model.tensor[name], 0, std::span<std::byte>(tensor.data, tensor.bytes)));
  }
  return source;
}

Result<std::unique_ptr<GroupStream>> CheckpointSource::iter_groups(const SyncRequest& request) {
  if (request.version != version_) {
    return Status(StatusCode::kInternal,
                  fmt::format("sync asks for version {}, the weights are at {}", request.version, version_),
                  {.reason = Reason::kWrongState, .fault = Fault::kLibrary});
  }
  return std::unique_ptr<GroupStream>(std::make_unique<Stream>(*this, request.groups));
}

void CheckpointSource::set_version(std::uint64_t version) {
  if (version == version_) return;
  for (const std::uint32_t name : held_) mutate(tensors_[name].data, tensors_[name].bytes, version_, version);
  version_ = version;
}

}  // namespace shardpull::cli
