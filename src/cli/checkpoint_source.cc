#include "cli/checkpoint_source.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/mutate.h"
#include "tensor/strided_view.h"

namespace shardpull::cli {
namespace {

constexpr std::uint64_t kAlignment = 256;  // of each tensor, as allocators of accelerators have it

Box written_out(const Box& box, const std::vector<std::int64_t>& shape) {
  return box.whole() ? Box{std::vector<std::int64_t>(shape.size(), 0), shape} : box;
}

std::uint64_t align_up(std::uint64_t bytes) {
  return (std::max<std::uint64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

// Calls run(offset in the outer tensor, offset in the box, bytes) for each run of bytes of `box` that lies
// together in a row-major tensor of `shape`, in order. The box has elements, and its runs whole bytes.
template <typename Run>
Status for_each_run(DType dtype, const std::vector<std::int64_t>& shape, const Box& box, Run run) {
  const std::vector<std::int64_t> stride = contiguous_strides(shape);
  std::size_t outer = shape.size();  // dims [outer, end) are one run
  std::int64_t elements = 1;
  while (outer > 0 && elements == stride[outer - 1]) {
    --outer;
    elements *= box.size[outer];
  }
  const auto bytes = [&](std::int64_t count) {
    return static_cast<std::uint64_t>(count) * static_cast<std::uint64_t>(dtype_bits(dtype)) / 8;
  };
  std::int64_t base = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) base += box.start[d] * stride[d];
  std::vector<std::int64_t> index(outer, 0);
  std::uint64_t within = 0;
  for (;;) {
    std::int64_t at = base;
    for (std::size_t d = 0; d < outer; ++d) at += index[d] * stride[d];
    SHARDPULL_RETURN_IF_ERROR(run(bytes(at), within, bytes(elements)));
    within += bytes(elements);
    std::size_t d = outer;
    while (d > 0 && ++index[d - 1] == box.size[d - 1]) index[--d] = 0;
    if (d == 0) return {};
  }
}

}  // namespace

class CheckpointSource::Stream final : public GroupStream {
 public:
  Stream(CheckpointSource& source, const SyncRequest& request)
      : source_(source), groups_(request.groups), listed_(request.names) {
    if (!source_.gathers_) return;
    for (std::uint32_t i = 0; i < source_.options_.resident_groups; ++i) free_.push_back(i);
  }

  Result<std::optional<GroupTensors>> next() override {
    if (at_ == groups_.size()) return std::optional<GroupTensors>();
    GroupTensors out;
    out.group = groups_[at_++];
    std::byte* buffer = nullptr;
    if (source_.gathers_) {
      if (free_.empty()) {  // the engine waits for credit before it asks
        return Status(StatusCode::kInternal, "no gather buffer is free",
                      {.reason = Reason::kWrongState, .fault = Fault::kLibrary});
      }
      buffer = source_.gather_memory_.data + free_.back() * source_.gather_buffer_bytes_;
      buffer_of_[out.group] = free_.back();
      free_.pop_back();
    }
    const GatherGroup& group = source_.groups_[out.group];
    const std::span<const Slab> slabs = source_.served_of(out.group);
    auto at = slabs.begin();
    for (std::uint32_t name = group.first; name < group.first + group.count; ++name) {
      const bool listed = listed_.empty() || std::binary_search(listed_.begin(), listed_.end(), name);
      std::uint32_t piece = 0;
      for (; at != slabs.end() && at->name == name; ++at) {
        const Slab& slab = *at;
        NamedView& view = out.tensors.emplace_back(NamedView{.name = name, .piece = piece++, .view = {}});
        if (!listed) continue;
        std::byte* data = slab.data;
        if (buffer != nullptr) {
          data = buffer;
          buffer += align_up(slab.bytes);
          SHARDPULL_RETURN_IF_ERROR(source_.gather(slab, data));
        }
        view.view = TensorView{.data = data,
                               .dtype = source_.model_.metadata[name].dtype,
                               .shape = slab.box.size,
                               .stride = contiguous_strides(slab.box.size),
                               .storage = data,
                               .storage_bytes = slab.bytes};
      }
      if (piece == 0) out.tensors.push_back({.name = name, .piece = 0, .view = std::nullopt});
    }
    return std::optional<GroupTensors>(std::move(out));
  }

  void released(std::uint32_t group) override {
    for (const Slab& slab : source_.served_of(group)) through_ += slab.bytes;
    if (const auto at = buffer_of_.find(group); at != buffer_of_.end()) {
      free_.push_back(at->second);
      buffer_of_.erase(at);
    }
    if (source_.progress_) source_.progress_(through_);
  }

 private:
  CheckpointSource& source_;
  const std::vector<std::uint32_t> groups_;
  const std::vector<std::uint32_t> listed_;
  std::vector<std::uint32_t> free_;                   // gather buffers
  std::map<std::uint32_t, std::uint32_t> buffer_of_;  // group -> buffer
  std::size_t at_ = 0;
  std::uint64_t through_ = 0;
};

std::span<const CheckpointSource::Slab> CheckpointSource::served_of(std::uint32_t group) const {
  const auto from = [&](std::uint32_t name) {
    return std::lower_bound(served_.begin(), served_.end(), name,
                            [](const Slab& one, std::uint32_t wanted) { return one.name < wanted; });
  };
  const GatherGroup& names = groups_[group];
  return {from(names.first), from(names.first + names.count)};
}

Result<std::vector<CheckpointSource::Slab>> CheckpointSource::slabs_of(const HeldByRank& held) const {
  std::vector<Slab> slabs;
  const auto add = [&](std::uint32_t name, const Box& box) -> Status {
    const TensorMeta& meta = model_.metadata[name];
    Slab slab{.name = name, .box = written_out(box, meta.shape)};
    SHARDPULL_ASSIGN_OR_RETURN(slab.bytes, tensor_bytes(meta.dtype, slab.box.size));
    slabs.push_back(std::move(slab));
    return {};
  };
  for (const std::uint32_t name : held.whole) SHARDPULL_RETURN_IF_ERROR(add(name, {}));
  for (const Piece& piece : held.pieces) SHARDPULL_RETURN_IF_ERROR(add(piece.name, piece.box));
  std::stable_sort(slabs.begin(), slabs.end(), [](const Slab& a, const Slab& b) { return a.name < b.name; });
  return slabs;
}

Status CheckpointSource::allocate(Trainer& trainer) {
  const auto sum = [&](std::uint64_t total, std::uint64_t more) -> Result<std::uint64_t> {
    const auto next = checked_add(total, more);
    if (next) return *next;
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: the tensors are too large", model_.label),
                  {.reason = Reason::kLimit});
  };
  std::uint64_t total = 0;
  for (const Slab& slab : kept_) {
    SHARDPULL_ASSIGN_OR_RETURN(total, sum(total, align_up(slab.bytes)));
    held_bytes_ += slab.bytes;
  }
  SHARDPULL_ASSIGN_OR_RETURN(memory_, trainer.allocate(std::max(total, kAlignment), "weights"));
  std::byte* at = memory_.data;
  for (Slab& slab : kept_) {
    slab.data = at;
    at += align_up(slab.bytes);
  }
  if (!gathers_) {
    served_ = kept_;
    return {};
  }
  std::map<std::uint32_t, std::uint64_t> by_group;
  std::uint32_t group = 0;
  for (const Slab& slab : served_) {
    while (slab.name >= groups_[group].first + groups_[group].count) ++group;
    SHARDPULL_ASSIGN_OR_RETURN(by_group[group], sum(by_group[group], align_up(slab.bytes)));
    gather_buffer_bytes_ = std::max(gather_buffer_bytes_, by_group[group]);
  }
  const auto all = checked_mul<std::uint64_t>(gather_buffer_bytes_, options_.resident_groups);
  SHARDPULL_RETURN_IF_ERROR(sum(all.value_or(UINT64_MAX), all ? 0 : 1).status());
  SHARDPULL_ASSIGN_OR_RETURN(gather_memory_, trainer.allocate(std::max(*all, kAlignment), "gathered groups"));
  return {};
}

// The checkpoint's bytes of a kept slab.
Status CheckpointSource::read(const Slab& slab) const {
  if (slab.bytes == 0) return {};
  const TensorMeta& meta = model_.metadata[slab.name];
  return for_each_run(
      meta.dtype, meta.shape, slab.box, [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
        return model_.checkpoint->read(model_.tensor[slab.name], from, {slab.data + to, bytes});
      });
}

Status CheckpointSource::gather(const Slab& slab, std::byte* to) const {
  if (slab.bytes == 0) return {};
  const TensorMeta& meta = model_.metadata[slab.name];
  const std::uint64_t version = version_[slab.name];
  SHARDPULL_RETURN_IF_ERROR(for_each_run(
      meta.dtype, meta.shape, slab.box,
      [&](std::uint64_t from, std::uint64_t at, std::uint64_t bytes) -> Status {
        SHARDPULL_RETURN_IF_ERROR(model_.checkpoint->read(model_.tensor[slab.name], from, {to + at, bytes}));
        mutate(to + at, bytes, 0, version, from);
        return {};
      }));
  auto own = std::lower_bound(kept_.begin(), kept_.end(), slab.name,
                              [](const Slab& one, std::uint32_t name) { return one.name < name; });
  for (; own != kept_.end() && own->name == slab.name; ++own) {
    Box within = own->box;  // relative to the slab, which holds all that is kept of the name
    for (std::size_t d = 0; d < within.start.size(); ++d) within.start[d] -= slab.box.start[d];
    SHARDPULL_RETURN_IF_ERROR(for_each_run(meta.dtype, slab.box.size, within,
                                           [&](std::uint64_t at, std::uint64_t from, std::uint64_t bytes) {
                                             std::memcpy(to + at, own->data + from, bytes);
                                             return Status();
                                           }));
  }
  return {};
}

Result<std::unique_ptr<CheckpointSource>> CheckpointSource::load(const ModelInput& model,
                                                                 SourceOptions options, Trainer& trainer,
                                                                 Progress progress) {
  std::unique_ptr<CheckpointSource> source(
      new CheckpointSource(model, std::move(options), std::move(progress)));
  SHARDPULL_ASSIGN_OR_RETURN(source->groups_, form_groups(model.metadata));
  source->version_.assign(model.metadata.size(), 0);
  source->gathers_ = !(source->options_.kept == source->options_.served);
  SHARDPULL_ASSIGN_OR_RETURN(source->kept_, source->slabs_of(source->options_.kept));
  SHARDPULL_ASSIGN_OR_RETURN(source->served_, source->slabs_of(source->options_.served));
  SHARDPULL_RETURN_IF_ERROR(source->allocate(trainer));
  for (const Slab& slab : source->kept_) SHARDPULL_RETURN_IF_ERROR(source->read(slab));
  return source;
}

Result<std::unique_ptr<GroupStream>> CheckpointSource::iter_groups(const SyncRequest& request) {
  return std::unique_ptr<GroupStream>(std::make_unique<Stream>(*this, request));
}

void CheckpointSource::set_version(std::uint64_t version, const std::vector<std::uint32_t>& names) {
  for (const Slab& slab : kept_) {
    if (!names.empty() && !std::binary_search(names.begin(), names.end(), slab.name)) continue;
    if (slab.bytes == 0) continue;
    const TensorMeta& meta = model_.metadata[slab.name];
    for_each_run(meta.dtype, meta.shape, slab.box,
                 [&](std::uint64_t begin, std::uint64_t at, std::uint64_t bytes) {
                   mutate(slab.data + at, bytes, version_[slab.name], version, begin);
                   return Status();
                 })
        .ignore();  // its callback cannot fail
  }
  for (std::size_t name = 0; name < version_.size(); ++name) {
    if (names.empty() || std::binary_search(names.begin(), names.end(), name)) version_[name] = version;
  }
}

}  // namespace shardpull::cli
