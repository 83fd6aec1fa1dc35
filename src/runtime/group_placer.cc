#include "runtime/group_placer.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked.h"
#include "base/status_macros.h"
#include "tensor/copy.h"
#include "tensor/shape.h"

namespace shardpull {
namespace {

std::uint64_t align_up(std::uint64_t bytes) {
  return (bytes + kLayoutAlignment - 1) / kLayoutAlignment * kLayoutAlignment;
}

bool is_row_major(const TensorView& view) {
  std::int64_t expected = 1;
  for (std::size_t d = view.shape.size(); d-- > 0;) {
    if (view.shape[d] != 1 && view.stride[d] != expected) return false;
    expected *= view.shape[d];
  }
  return true;
}

// Bytes from a view's first element to past its last one. The view has elements.
Result<std::uint64_t> extent_of(const TensorView& view) {
  std::int64_t last = 0;
  for (std::size_t d = 0; d < view.shape.size(); ++d) {
    const auto step = checked_mul(view.shape[d] - 1, view.stride[d]);
    const auto sum = step ? checked_add(last, *step) : std::nullopt;
    if (!sum || *sum == INT64_MAX) return Status(StatusCode::kInvalidArgument, "its strides overflow");
    last = *sum;
  }
  return bytes_of(view.dtype, last + 1);
}

}  // namespace

Status GroupPlacer::wrong(const std::string& what, const std::string& tensor) const {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("the weight source of trainer {}: {}", rank_.rank, what),
                {.reason = Reason::kMetadataMismatch, .tensor = tensor});
}

Status GroupPlacer::allocate(Transport& transport, std::uint32_t resident_groups) {
  std::uint64_t largest = 0;
  for (const std::uint32_t g : rank_.owned_groups) {
    const GatherGroup& group = rank_.groups[g];
    std::uint64_t small = 0;
    for (std::uint32_t name = group.first; name < group.first + group.count; ++name) {
      if (!rank_.held[name]) continue;
      SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                                 checked_bytes(rank_.metadata[name].dtype, rank_.metadata[name].shape));
      if (bytes <= rank_.export_pack_limit) small += align_up(bytes);
    }
    largest = std::max(largest, small);
  }
  const std::uint64_t count = std::min<std::uint64_t>(resident_groups, rank_.owned_groups.size());
  return exports_.allocate(transport, static_cast<std::uint32_t>(count), largest);
}

void GroupPlacer::begin_sync() {
  resident_.clear();
  exports_.give_back_all();
  resident_bytes_ = peak_resident_bytes_ = export_ns_ = export_bytes_ = 0;
}

Status GroupPlacer::check_view(const TensorView& view, const TensorMeta& meta) const {
  if (view.dtype != meta.dtype) {
    return wrong(fmt::format("{} is {}, the metadata says {}", meta.name, dtype_name(view.dtype),
                             dtype_name(meta.dtype)),
                 meta.name);
  }
  if (view.shape != meta.shape) {
    return wrong(fmt::format("{} has shape [{}], the metadata says [{}]", meta.name,
                             fmt::join(view.shape, ", "), fmt::join(meta.shape, ", ")),
                 meta.name);
  }
  const bool negative =
      std::any_of(view.stride.begin(), view.stride.end(), [](std::int64_t stride) { return stride < 0; });
  if (view.stride.size() != view.shape.size() || negative) {
    return wrong(fmt::format("{} has strides [{}] for shape [{}]", meta.name, fmt::join(view.stride, ", "),
                             fmt::join(view.shape, ", ")),
                 meta.name);
  }
  if (std::find(view.shape.begin(), view.shape.end(), 0) != view.shape.end()) return {};
  auto extent = extent_of(view);
  if (!extent.ok()) return wrong(meta.name + ": " + extent.status().message(), meta.name);
  // A released or short buffer is found here, before anything is published.
  const bool inside = view.data != nullptr && view.storage != nullptr && view.data >= view.storage &&
                      *extent <= view.storage_bytes &&
                      static_cast<std::uint64_t>(view.data - view.storage) <= view.storage_bytes - *extent;
  if (!inside) {
    return wrong(fmt::format("{} needs {} bytes, its storage of {} bytes does not hold them", meta.name,
                             *extent, view.storage_bytes),
                 meta.name);
  }
  return {};
}

Status GroupPlacer::check(const GroupTensors& tensors, std::uint32_t group) const {
  if (tensors.group != group)
    return wrong(fmt::format("gave group {}, expected group {}", tensors.group, group));
  const GatherGroup& span = rank_.groups[group];
  if (tensors.tensors.size() != span.count) {
    return wrong(fmt::format("group {} has {} entries, expected {} (one per name)", group,
                             tensors.tensors.size(), span.count));
  }
  for (std::uint32_t i = 0; i < span.count; ++i) {
    const NamedView& entry = tensors.tensors[i];
    const std::uint32_t name = span.first + i;
    const TensorMeta& meta = rank_.metadata[name];
    if (entry.name != name) {
      return wrong(fmt::format("entry {} of group {} is name {}, expected {}", i, group, entry.name, name),
                   meta.name);
    }
    if (entry.view.has_value() != rank_.held[name]) {
      return wrong(meta.name + (rank_.held[name] ? " is claimed as held and carries no tensor"
                                                 : " carries a tensor and is not claimed as held"),
                   meta.name);
    }
    if (entry.view) SHARDPULL_RETURN_IF_ERROR(check_view(*entry.view, meta));
  }
  return {};
}

Result<std::vector<ServedTensor>> GroupPlacer::place(
    const GroupTensors& tensors, std::uint32_t group,
    const std::vector<std::shared_ptr<ExportedMemory>>& memory) {
  ExportedMemory* buffer = nullptr;
  std::uint64_t filled = 0, group_bytes = 0;
  std::vector<ServedTensor> served;
  for (const NamedView& entry : tensors.tensors) {
    if (!entry.view) continue;
    const TensorView& view = *entry.view;
    SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t numel, checked_numel(view.dtype, view.shape));
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes, bytes_of(view.dtype, numel));
    group_bytes += bytes;
    ServedTensor& tensor = served.emplace_back();
    tensor.view = {entry.name, 0, view.dtype, view.shape, {}};
    tensor.data = view.data;
    if (bytes == 0) continue;
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t extent, extent_of(view));
    const auto home = std::find_if(memory.begin(), memory.end(), [&](const auto& each) {
      const MemoryRef& ref = each->ref();
      return view.data >= ref.address && view.data + extent <= ref.address + ref.bytes;
    });
    const bool contiguous = is_row_major(view);
    // Small is judged by the storage. A tensor that plans take for small (they know names, not storages)
    // whose storage is large and cannot be mapped is packed too: its plan may be to map it.
    const bool small = bytes <= rank_.export_pack_limit &&
                       (view.storage_bytes <= rank_.export_pack_limit || home == memory.end());
    if (small) {
      if (buffer == nullptr) {
        SHARDPULL_ASSIGN_OR_RETURN(buffer, exports_.take(group));
      }
      const SourceLayout layout = contiguous ? SourceLayout::contiguous(view.dtype, numel)
                                             : SourceLayout{view.dtype, view.shape, view.stride};
      SHARDPULL_ASSIGN_OR_RETURN(
          const CopyProgram program,
          compile_copy(Slice::whole(numel), layout, view.dtype, contiguous_region(numel), view.dtype));
      std::byte* const to = buffer->ref().address + filled;
      const std::int64_t before = clock_.now_ns();
      run(program, view.data, to);
      export_ns_ += static_cast<std::uint64_t>(clock_.now_ns() - before);
      export_bytes_ += bytes;
      tensor.data = to;
      tensor.view.location.where = {buffer->ref().region, buffer->ref().generation, filled, bytes};
      filled = align_up(filled + bytes);
      continue;
    }
    if (!contiguous) tensor.view.location.stride = view.stride;
    if (home != memory.end()) {
      const MemoryRef& ref = (*home)->ref();
      tensor.view.location.where = {ref.region, ref.generation,
                                    static_cast<std::uint64_t>(view.data - ref.address), extent};
    } else if (rank_.mappable) {
      const std::string& name = rank_.metadata[entry.name].name;
      return wrong(name + " is declared to lie in memory from Trainer::allocate and does not", name);
    } else {
      tensor.view.location.where.bytes = extent;  // not exported: packed only
    }
  }
  resident_[group] = group_bytes;
  resident_bytes_ += group_bytes;
  peak_resident_bytes_ = std::max(peak_resident_bytes_, resident_bytes_);
  return served;
}

bool GroupPlacer::release(std::uint32_t group) {
  const auto found = resident_.find(group);
  if (found == resident_.end()) return false;
  resident_bytes_ -= found->second;
  resident_.erase(found);
  exports_.give_back(group);
  return true;
}

std::vector<std::uint32_t> GroupPlacer::resident() const {
  std::vector<std::uint32_t> groups;
  for (const auto& [group, bytes] : resident_) groups.push_back(group);
  return groups;
}

}  // namespace shardpull
