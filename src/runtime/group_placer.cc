#include "runtime/group_placer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked.h"
#include "base/status_macros.h"
#include "plan/boxes.h"
#include "tensor/copy.h"
#include "tensor/copy_sum.h"
#include "tensor/shape.h"

namespace shardpull {
namespace {

std::uint64_t align_up(std::uint64_t bytes) {
  return (bytes + kLayoutAlignment - 1) / kLayoutAlignment * kLayoutAlignment;
}

bool is_row_major(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& stride) {
  std::int64_t expected = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    if (shape[d] != 1 && stride[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> stride(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  return stride;
}

// Bytes from the first element of a strided window to past its last one. The window has elements.
Result<std::uint64_t> extent_of(DType dtype, const std::vector<std::int64_t>& shape,
                                const std::vector<std::int64_t>& stride) {
  std::int64_t last = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const auto step = checked_mul(shape[d] - 1, stride[d]);
    const auto sum = step ? checked_add(last, *step) : std::nullopt;
    if (!sum || *sum == INT64_MAX) return Status(StatusCode::kInvalidArgument, "its strides overflow");
    last = *sum;
  }
  return bytes_of(dtype, last + 1);
}

// The sum of a view's bytes, in an order that depends on how it lies only.
Result<std::uint64_t> sum_of(const TensorView& view) {
  // Dims by stride, so that what is contiguous in any order of its dims is summed in long runs.
  std::vector<std::size_t> order;
  for (std::size_t d = 0; d < view.shape.size(); ++d) {
    if (view.shape[d] != 1) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return view.stride[a] > view.stride[b]; });
  SourceLayout layout{view.dtype, {}, {}};
  for (const std::size_t d : order) {
    layout.shape.push_back(view.shape[d]);
    layout.stride.push_back(view.stride[d]);
  }
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t numel, checked_numel(view.dtype, view.shape));
  SHARDPULL_ASSIGN_OR_RETURN(
      const CopyProgram program,
      compile_copy(Slice::whole(numel), layout, view.dtype, contiguous_region(numel), view.dtype));
  return sum_of_reads(program, view.data);
}

}  // namespace

std::span<const Piece> RankDescription::pieces_of(std::uint32_t name) const {
  const auto [first, last] =
      std::equal_range(pieces.begin(), pieces.end(), Piece{.name = name, .box = {}, .rank = rank},
                       [](const Piece& a, const Piece& b) { return a.name < b.name; });
  return {first, last};
}

const std::vector<std::int64_t>& RankDescription::held_shape(std::uint32_t name, std::uint32_t held) const {
  const auto own = pieces_of(name);
  return own.empty() || own[held].box.whole() ? metadata[name].shape : own[held].box.size;
}

Status describe_holding(const std::vector<std::uint32_t>& names, std::vector<Piece> pieces,
                        RankDescription& rank) {
  const auto wrong = [&](const std::string& what, const std::string& tensor = {}) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the weight source of trainer {}: {}", rank.rank, what),
                  {.reason = Reason::kMetadataMismatch, .tensor = tensor});
  };
  rank.whole.assign(rank.metadata.size(), false);
  for (const std::uint32_t name : names) {
    if (name >= rank.metadata.size())
      return wrong(fmt::format("holds name {}, the model has {} names", name, rank.metadata.size()));
    rank.whole[name] = true;
  }
  for (Piece& piece : pieces) {
    if (piece.name >= rank.metadata.size()) {
      return wrong(
          fmt::format("holds a piece of name {}, the model has {} names", piece.name, rank.metadata.size()));
    }
    const TensorMeta& meta = rank.metadata[piece.name];
    if (rank.whole[piece.name]) return wrong(meta.name + " is held whole and in pieces", meta.name);
    if (const auto problem = box_problem(piece.box, meta.shape)) {
      return wrong(fmt::format("a piece of {}: {}", meta.name, *problem), meta.name);
    }
    piece.rank = rank.rank;
    if (piece.box.whole()) continue;
    if (box_empty(piece.box)) {
      return wrong(fmt::format("a piece of {} is empty: {}; leave it out", meta.name, to_string(piece.box)),
                   meta.name);
    }
    const std::int64_t bits = dtype_bits(meta.dtype);
    if (piece.box.start.back() * bits % 8 != 0 || piece.box.size.back() * bits % 8 != 0) {
      return wrong(fmt::format("piece {} of {} begins or ends within a byte of {}", to_string(piece.box),
                               meta.name, dtype_name(meta.dtype)),
                   meta.name);
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.name < b.name; });
  rank.pieces = std::move(pieces);
  for (std::uint32_t g = 0; g < rank.groups.size(); ++g) {
    const GatherGroup& group = rank.groups[g];
    bool owned = false;
    for (std::uint32_t name = group.first; name < group.first + group.count && !owned; ++name)
      owned = rank.whole[name] || !rank.pieces_of(name).empty();
    if (owned) rank.owned_groups.push_back(g);
  }
  return {};
}

Status GroupPlacer::wrong(const std::string& what, const std::string& tensor) const {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("the weight source of trainer {}: {}", rank_.rank, what),
                {.reason = Reason::kMetadataMismatch, .tensor = tensor});
}

std::string GroupPlacer::label(std::uint32_t name, std::uint32_t held) const {
  const std::string& text = rank_.metadata[name].name;
  const auto own = rank_.pieces_of(name);
  return own.empty() ? text : fmt::format("{} piece {} {}", text, held, to_string(own[held].box));
}

Status GroupPlacer::allocate(Transport& transport, std::uint32_t resident_groups) {
  transport_ = &transport;
  if (rank_.resident) return {};
  std::uint64_t largest = 0;
  for (const std::uint32_t g : rank_.owned_groups) {
    const GatherGroup& group = rank_.groups[g];
    std::uint64_t small = 0;
    const auto count = [&](std::uint32_t name, const std::vector<std::int64_t>& shape) -> Status {
      SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes, checked_bytes(rank_.metadata[name].dtype, shape));
      if (bytes <= rank_.export_pack_limit) small += align_up(bytes);
      return {};
    };
    for (std::uint32_t name = group.first; name < group.first + group.count; ++name) {
      if (rank_.whole[name]) SHARDPULL_RETURN_IF_ERROR(count(name, rank_.metadata[name].shape));
      for (std::uint32_t held = 0; held < rank_.pieces_of(name).size(); ++held)
        SHARDPULL_RETURN_IF_ERROR(count(name, rank_.held_shape(name, held)));
    }
    largest = std::max(largest, small);
  }
  const std::uint64_t count = std::min<std::uint64_t>(resident_groups, rank_.owned_groups.size());
  return exports_.allocate(transport, static_cast<std::uint32_t>(count), largest);
}

void GroupPlacer::begin_sync(NameSet names) {
  names_ = std::move(names);
  resident_.clear();
  adopted_.clear();
  summed_.clear();
  exports_.give_back_all();
  resident_bytes_ = peak_resident_bytes_ = export_ns_ = export_bytes_ = 0;
}

Status GroupPlacer::check_view(const TensorView& view, const NamedView& entry) const {
  const TensorMeta& meta = rank_.metadata[entry.name];
  const auto what = [&] { return label(entry.name, entry.piece); };
  if (view.dtype != meta.dtype) {
    return wrong(
        fmt::format("{} is {}, the metadata says {}", what(), dtype_name(view.dtype), dtype_name(meta.dtype)),
        meta.name);
  }
  const std::vector<std::int64_t>& shape = rank_.held_shape(entry.name, entry.piece);
  if (view.shape != shape) {
    return wrong(fmt::format("{} has shape [{}], the metadata says [{}]", what(), fmt::join(view.shape, ", "),
                             fmt::join(shape, ", ")),
                 meta.name);
  }
  const bool negative =
      std::any_of(view.stride.begin(), view.stride.end(), [](std::int64_t stride) { return stride < 0; });
  if (view.stride.size() != view.shape.size() || negative) {
    return wrong(fmt::format("{} has strides [{}] for shape [{}]", what(), fmt::join(view.stride, ", "),
                             fmt::join(view.shape, ", ")),
                 meta.name);
  }
  if (std::find(view.shape.begin(), view.shape.end(), 0) != view.shape.end()) return {};
  auto extent = extent_of(view.dtype, view.shape, view.stride);
  if (!extent.ok()) return wrong(what() + ": " + extent.status().message(), meta.name);
  // A released or short buffer is found here, before anything is published.
  const bool inside = view.data != nullptr && view.storage != nullptr && view.data >= view.storage &&
                      *extent <= view.storage_bytes &&
                      static_cast<std::uint64_t>(view.data - view.storage) <= view.storage_bytes - *extent;
  if (!inside) {
    return wrong(fmt::format("{} needs {} bytes, its storage of {} bytes does not hold them", what(), *extent,
                             view.storage_bytes),
                 meta.name);
  }
  return {};
}

Status GroupPlacer::check(const GroupTensors& tensors, std::uint32_t group) const {
  if (tensors.group != group)
    return wrong(fmt::format("gave group {}, expected group {}", tensors.group, group));
  const GatherGroup& span = rank_.groups[group];
  std::size_t at = 0;
  for (std::uint32_t name = span.first; name < span.first + span.count; ++name) {
    const std::string& text = rank_.metadata[name].name;
    const std::size_t pieces = rank_.pieces_of(name).size();
    for (std::uint32_t held = 0; held < std::max<std::size_t>(pieces, 1); ++held, ++at) {
      if (at == tensors.tensors.size()) {
        return wrong(fmt::format("group {} has {} entries and none for {} (one is due per name and piece)",
                                 group, at, label(name, held)),
                     text);
      }
      const NamedView& entry = tensors.tensors[at];
      if (entry.name != name || entry.piece != held) {
        return wrong(fmt::format("entry {} of group {} is name {} piece {}, expected {} piece {} ({})", at,
                                 group, entry.name, entry.piece, name, held, label(name, held)),
                     text);
      }
      const bool holds = rank_.whole[name] || pieces != 0;
      const bool due = holds && listed(names_, name);
      if (entry.view.has_value() != due) {
        return wrong(label(name, held) + (due     ? " is claimed as held and carries no tensor"
                                          : holds ? " carries a tensor and is not part of this sync"
                                                  : " carries a tensor and is not claimed as held"),
                     text);
      }
      if (entry.view) SHARDPULL_RETURN_IF_ERROR(check_view(*entry.view, entry));
    }
  }
  if (at != tensors.tensors.size()) {
    return wrong(fmt::format("group {} has {} entries, expected {} (one per name and piece)", group,
                             tensors.tensors.size(), at));
  }
  return {};
}

Result<GroupPlacer::Placed> GroupPlacer::place_held(
    const NamedView& entry, std::uint32_t group, const std::vector<std::shared_ptr<ExportedMemory>>& memory) {
  const TensorView& view = *entry.view;
  SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes, checked_bytes(view.dtype, view.shape));
  SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t extent, extent_of(view.dtype, view.shape, view.stride));
  auto home =
      std::upper_bound(memory.begin(), memory.end(), view.data,
                       [](const std::byte* at, const auto& each) { return at < each->ref().address; });
  if (home == memory.begin()) {
    home = memory.end();
  } else {
    const MemoryRef& ref = (*--home)->ref();
    const auto offset = static_cast<std::uint64_t>(view.data - ref.address);
    if (offset > ref.bytes || extent > ref.bytes - offset) home = memory.end();
  }
  // Small is judged by the storage. A tensor that plans take for small (they know names, not storages)
  // whose storage is large and cannot be mapped is packed too: its plan may be to map it.
  const bool small = bytes <= rank_.export_pack_limit &&
                     (view.storage_bytes <= rank_.export_pack_limit || home == memory.end());
  if (small && !rank_.resident) {
    if (buffer_ == nullptr) {
      SHARDPULL_ASSIGN_OR_RETURN(buffer_, exports_.take(group));
    }
    SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t numel, checked_numel(view.dtype, view.shape));
    const SourceLayout layout = is_row_major(view.shape, view.stride)
                                    ? SourceLayout::contiguous(view.dtype, numel)
                                    : SourceLayout{view.dtype, view.shape, view.stride};
    SHARDPULL_ASSIGN_OR_RETURN(
        const CopyProgram program,
        compile_copy(Slice::whole(numel), layout, view.dtype, contiguous_region(numel), view.dtype));
    const MemoryRef& ref = buffer_->ref();
    const RemoteRef where{ref.region, ref.generation, filled_, bytes};
    std::byte* const to = ref.address + filled_;
    const std::int64_t before = clock_.now_ns();
    run(program, view.data, to);
    export_ns_ += static_cast<std::uint64_t>(clock_.now_ns() - before);
    export_bytes_ += bytes;
    filled_ = align_up(filled_ + bytes);
    return Placed{to, row_major(view.shape), where};
  }
  if (home != memory.end()) {
    const MemoryRef& ref = (*home)->ref();
    return Placed{view.data,
                  view.stride,
                  {ref.region, ref.generation, static_cast<std::uint64_t>(view.data - ref.address), extent}};
  }
  if (rank_.mappable) {
    return wrong(
        label(entry.name, entry.piece) + " is declared to lie in memory from Trainer::allocate and does not",
        rank_.metadata[entry.name].name);
  }
  if (rank_.adopts) {
    auto adopted = transport_->adopt(view.storage, view.storage_bytes, label(entry.name, entry.piece));
    if (!adopted.ok()) return adopted.status().with_context(fmt::format("the weight source of trainer {}", rank_.rank));
    const MemoryRef& ref = (*adopted)->ref();
    adopted_[group].push_back(*adopted);
    return Placed{view.data,
                  view.stride,
                  {ref.region, ref.generation, static_cast<std::uint64_t>(view.data - ref.address), extent}};
  }
  return Placed{view.data, view.stride, {0, 0, 0, extent}};
}

Result<ServedTensor> GroupPlacer::cut(const Placed& held, const PublishedPart& part) const {
  const DType dtype = rank_.metadata[part.name].dtype;
  const std::vector<std::int64_t>& shape =
      part.within.whole() ? rank_.held_shape(part.name, part.held) : part.within.size;
  std::int64_t first = 0;  // its element in the held view's storage: within the extent that was checked
  for (std::size_t d = 0; d < part.within.start.size(); ++d) first += part.within.start[d] * held.stride[d];
  const auto offset = bytes_of(dtype, first);
  if (!offset.ok()) {
    return wrong(fmt::format("the part {} of {} begins within a byte", to_string(part.within),
                             label(part.name, part.held)),
                 rank_.metadata[part.name].name);
  }
  SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t extent, extent_of(dtype, shape, held.stride));
  ServedTensor served;
  served.data = held.data + *offset;
  served.view = {part.name, part.piece, dtype, shape, {}};
  served.view.location.where = {held.where.region, held.where.generation, held.where.offset, extent};
  if (held.where.region != 0) served.view.location.where.offset += *offset;
  if (!is_row_major(shape, held.stride)) served.view.location.stride = held.stride;
  return served;
}

Result<std::vector<ServedTensor>> GroupPlacer::place(
    const GroupTensors& tensors, std::uint32_t group,
    const std::vector<std::shared_ptr<ExportedMemory>>& memory) {
  buffer_ = nullptr;
  filled_ = 0;
  std::uint64_t group_bytes = 0;
  std::vector<ServedTensor> served;
  for (const NamedView& entry : tensors.tensors) {
    if (!entry.view) continue;
    const TensorView& view = *entry.view;
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t bytes, checked_bytes(view.dtype, view.shape));
    group_bytes += bytes;
    if (rank_.sums_views && bytes != 0) {
      auto sum = sum_of(view);
      if (!sum.ok()) return sum.status().with_context(label(entry.name, entry.piece));
      summed_[group].push_back({entry.name, entry.piece, view, *sum});
    }
    std::optional<Placed> placed;
    const auto [first, last] =
        std::equal_range(rank_.parts.begin(), rank_.parts.end(), PublishedPart{entry.name, 0, 0, {}},
                         [](const PublishedPart& a, const PublishedPart& b) { return a.name < b.name; });
    for (auto part = first; part != last; ++part) {
      if (part->held != entry.piece) continue;
      if (bytes == 0) {
        ServedTensor& empty = served.emplace_back();
        empty.view = {entry.name, part->piece, view.dtype, view.shape, {}};
        empty.data = view.data;
        continue;
      }
      if (!placed) {
        SHARDPULL_ASSIGN_OR_RETURN(placed, place_held(entry, group, memory));
      }
      SHARDPULL_ASSIGN_OR_RETURN(ServedTensor tensor, cut(*placed, *part));
      served.push_back(std::move(tensor));
    }
  }
  resident_[group] = group_bytes;
  resident_bytes_ += group_bytes;
  peak_resident_bytes_ = std::max(peak_resident_bytes_, resident_bytes_);
  return served;
}

Status GroupPlacer::check_unchanged(std::uint32_t group) const {
  const auto found = summed_.find(group);
  if (found == summed_.end()) return {};
  for (const SummedView& yielded : found->second) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t sum, sum_of(yielded.view));
    if (sum == yielded.sum) continue;
    return Status(StatusCode::kDataLoss,
                  fmt::format("the weight source of trainer {} wrote {} of group {} after it had yielded it and "
                              "before it was released: its sum was {:016x} and is {:016x}",
                              rank_.rank, label(yielded.name, yielded.held), group, yielded.sum, sum),
                  {.reason = Reason::kCorrupt, .tensor = rank_.metadata[yielded.name].name});
  }
  return {};
}

bool GroupPlacer::release(std::uint32_t group) {
  const auto found = resident_.find(group);
  if (found == resident_.end()) return false;
  if (!rank_.resident) resident_bytes_ -= found->second;  // a resident rank's tensors stay
  resident_.erase(found);
  adopted_.erase(group);
  summed_.erase(group);
  exports_.give_back(group);
  return true;
}

std::vector<std::shared_ptr<ExportedMemory>> GroupPlacer::adopted(std::uint32_t group) const {
  const auto found = adopted_.find(group);
  return found == adopted_.end() ? std::vector<std::shared_ptr<ExportedMemory>>() : found->second;
}

std::vector<std::uint32_t> GroupPlacer::resident() const {
  std::vector<std::uint32_t> groups;
  for (const auto& [group, bytes] : resident_) groups.push_back(group);
  return groups;
}

}  // namespace shardpull
