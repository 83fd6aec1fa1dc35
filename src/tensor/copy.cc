#include "tensor/copy.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/status_macros.h"
#include "tensor/affine.h"
#include "tensor/convert.h"
#include "tensor/copy_kernels.h"
#include "tensor/shape.h"
#include "tensor/slice_algebra.h"

namespace shardpull {
namespace {

// A slice that lies across the grain of a published tensor's strides takes many nests; more than this is no
// longer a copy that anybody planned.
constexpr std::size_t kMaxNests = 65'536;

Status refused(std::string why, Reason reason = Reason::kBadArgument) {
  return Status(StatusCode::kInvalidArgument, std::move(why), {.reason = reason});
}

// One past the last element of a region with sizes > 0. Refused: a negative offset or stride, overflow, a
// region whose elements lie on each other because a stride is 0.
Result<std::int64_t> checked_end(const Region& region, std::string_view what, bool may_repeat) {
  std::int64_t last = region.offset;
  if (last < 0) return refused(fmt::format("{} starts at the negative offset {}", what, last));
  for (const Dim& dim : region.dims) {
    if (dim.stride < 0) return refused(fmt::format("{} has the negative stride {}", what, dim.stride));
    if (dim.stride == 0 && dim.size > 1 && !may_repeat)
      return refused(fmt::format("{} overlaps itself", what));
    const auto reach = checked_mul<std::int64_t>(dim.size - 1, dim.stride);
    const auto sum = reach ? checked_add<std::int64_t>(last, *reach) : std::nullopt;
    if (!sum) return refused(fmt::format("{} reaches further than 64 bits can count", what), Reason::kLimit);
    last = *sum;
  }
  const auto end = checked_add<std::int64_t>(last, 1);
  if (!end) return refused(fmt::format("{} reaches further than 64 bits can count", what), Reason::kLimit);
  return *end;
}

// `region` counted in units of to_bits.
Result<Region> in_units(const Region& region, int from_bits, int to_bits) {
  SHARDPULL_ASSIGN_OR_RETURN(Slice slice, change_unit(canonicalise({region}), from_bits, to_bits));
  return std::move(slice.regions.front());
}

// Dims of a piece as a nest: destination order, merged, the contiguous run taken out.
CopyNest make_nest(const AffinePiece& piece, std::int64_t src_unit, std::int64_t dst_unit) {
  CopyNest nest;
  nest.src_offset = piece.offset[0] * src_unit;
  nest.dst_offset = piece.offset[1] * dst_unit;
  std::vector<CopyLoop> loops;
  for (const Loop& loop : piece.loops)
    loops.push_back({loop.size, loop.step[0] * src_unit, loop.step[1] * dst_unit});
  std::sort(loops.begin(), loops.end(), [](const CopyLoop& a, const CopyLoop& b) {
    return std::tie(a.dst_stride, a.src_stride, a.size) > std::tie(b.dst_stride, b.src_stride, b.size);
  });
  for (const CopyLoop& loop : loops) {
    CopyLoop* const outer = nest.loops.empty() ? nullptr : &nest.loops.back();
    if (outer != nullptr && outer->src_stride == loop.size * loop.src_stride &&
        outer->dst_stride == loop.size * loop.dst_stride) {
      *outer = {outer->size * loop.size, loop.src_stride, loop.dst_stride};
    } else {
      nest.loops.push_back(loop);
    }
  }
  nest.run_elements = 1;
  if (!nest.loops.empty() && nest.loops.back().src_stride == src_unit &&
      nest.loops.back().dst_stride == dst_unit) {
    nest.run_elements = nest.loops.back().size;
    nest.loops.pop_back();
  }
  return nest;
}

std::uint64_t nest_elements(const CopyNest& nest) {
  auto elements = static_cast<std::uint64_t>(nest.run_elements);
  for (const CopyLoop& loop : nest.loops) elements *= static_cast<std::uint64_t>(loop.size);
  return elements;
}

std::int64_t unit_bytes(DType dtype) {
  return dtype_bits(dtype) / 8;
}

// Source bytes from the first to past the last one of loops [d, end) of a nest of bytes.
std::int64_t source_extent(const CopyNest& nest, std::size_t d) {
  std::int64_t extent = nest.run_elements;
  for (; d < nest.loops.size(); ++d) extent += (nest.loops[d].size - 1) * nest.loops[d].src_stride;
  return extent;
}

// What run_part() does with loops [d, end) of a nest of bytes, whose first source byte is the program's byte
// `at` and goes to `to`. `window` is the source from the program's byte `from` up to `end`.
struct PartOfNest {
  const CopyNest& nest;
  std::int64_t from, end;
  const std::byte* window;
  bool streaming;
  CopyNest whole = {};  // whole iterations, copied at once

  void copy(std::size_t d, std::int64_t at, std::byte* to) {
    if (d == nest.loops.size()) {
      const std::int64_t first = std::max(from, at), last = std::min(end, at + nest.run_elements);
      if (first >= last) return;
      whole.loops.clear();
      whole.run_elements = last - first;
      copy_nest(whole, window + (first - from), to + (first - at), streaming);
      return;
    }
    const CopyLoop& loop = nest.loops[d];
    const std::int64_t inner = source_extent(nest, d + 1), stride = loop.src_stride;
    if (stride == 0) {  // repeats what it reads
      for (std::int64_t i = 0; i < loop.size; ++i) copy(d + 1, at, to + i * loop.dst_stride);
      return;
    }
    // Iterations [begin, past) touch the window, [inside, outside) lie in it.
    const std::int64_t begin = std::clamp<std::int64_t>((from - at - inner) / stride, 0, loop.size);
    const std::int64_t past = end <= at ? 0 : std::min(loop.size, (end - at - 1) / stride + 1);
    const std::int64_t inside = from <= at ? 0 : (from - at + stride - 1) / stride;
    const std::int64_t outside = end - at < inner ? 0 : std::min(loop.size, (end - at - inner) / stride + 1);
    for (std::int64_t i = begin; i < past; ++i) {
      std::byte* const there = to + i * loop.dst_stride;
      if (i != inside || inside >= outside) {
        copy(d + 1, at + i * loop.src_stride, there);
        continue;
      }
      whole.loops.assign(nest.loops.begin() + static_cast<std::ptrdiff_t>(d), nest.loops.end());
      whole.loops.front().size = outside - inside;
      whole.run_elements = nest.run_elements;
      copy_nest(whole, window + (at + i * loop.src_stride - from), there, streaming);
      i = outside - 1;
    }
  }
};

}  // namespace

SourceLayout SourceLayout::contiguous(DType dtype, std::int64_t numel) {
  return {dtype, {numel}, {1}};
}

Region contiguous_region(std::int64_t numel, std::int64_t offset) {
  return {offset, {{numel, 1}}};
}

Result<CopyProgram> compile_copy(const Slice& src, const SourceLayout& layout, DType wire, const Region& dst,
                                 DType dst_dtype, bool raw) {
  const bool converts = !raw && wire != dst_dtype;
  if (converts && convert_kernel(wire, dst_dtype) == nullptr) {
    return refused(fmt::format("{} cannot be converted to {}", dtype_name(wire), dtype_name(dst_dtype)),
                   Reason::kUnsupportedOp);
  }
  if (layout.stride.size() != layout.shape.size())
    return refused("the layout's shape and stride have different numbers of dims");
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t available, checked_numel(layout.dtype, layout.shape));
  SHARDPULL_RETURN_IF_ERROR(check_slice(src, wire, layout.dtype, available));

  const std::int64_t numel = src.numel();
  SHARDPULL_ASSIGN_OR_RETURN(const std::uint64_t wire_bytes, bytes_of(wire, numel));
  std::int64_t dst_numel = 1;
  for (const Dim& dim : dst.dims) {
    const auto product = dim.size < 0 ? std::nullopt : checked_mul<std::int64_t>(dst_numel, dim.size);
    if (!product) return refused("the destination has a negative or an impossible size");
    dst_numel = *product;
  }
  const std::uint64_t expected = raw ? wire_bytes : static_cast<std::uint64_t>(numel);
  if (static_cast<std::uint64_t>(dst_numel) != expected) {
    return refused(fmt::format("the source has {} {}, the destination {}", expected,
                               raw ? "bytes" : "elements", dst_numel));
  }
  CopyProgram program;
  if (converts) {
    program.from = wire;
    program.to = dst_dtype;
  }
  if (numel == 0) return program;

  // Positions count bytes where bytes just move, and elements where elements are converted.
  const int unit_bits = converts ? dtype_bits(wire) : 8;
  const std::int64_t src_unit = unit_bits / 8;
  const std::int64_t dst_unit = converts ? unit_bytes(dst_dtype) : 1;
  Region memory;
  for (std::size_t i = 0; i < layout.shape.size(); ++i)
    memory.dims.push_back({layout.shape[i], layout.stride[i]});
  SHARDPULL_RETURN_IF_ERROR(checked_end(memory, "the published tensor", true).status());
  SHARDPULL_RETURN_IF_ERROR(checked_end(dst, "the destination", false).status());
  SHARDPULL_ASSIGN_OR_RETURN(memory, in_units(memory, dtype_bits(layout.dtype), unit_bits));
  SHARDPULL_ASSIGN_OR_RETURN(const Slice elements, change_unit(src, dtype_bits(wire), unit_bits));
  Region target = dst;
  if (!converts && !raw) {
    SHARDPULL_ASSIGN_OR_RETURN(target, in_units(dst, dtype_bits(dst_dtype), 8));
  }
  SHARDPULL_RETURN_IF_ERROR(checked_end(memory, "the published tensor", true).status());
  SHARDPULL_RETURN_IF_ERROR(checked_end(target, "the destination", false).status());

  const Layout layouts[kMaxLayouts] = {Layout(memory.dims, memory.offset),
                                       Layout(target.dims, target.offset)};
  std::vector<AffinePiece> pieces;
  std::int64_t position = 0;  // of the current region's first unit in the enumeration
  for (const Region& region : elements.regions) {
    std::vector<Loop> loops(region.dims.size());
    std::int64_t weight = 1;
    for (std::size_t i = region.dims.size(); i-- > 0;) {
      loops[i] = {.size = region.dims[i].size, .step = {region.dims[i].stride, weight}};
      weight *= region.dims[i].size;
    }
    const std::int64_t start[kMaxLayouts] = {region.offset, position};
    if (!decompose(layouts, loops, start, PieceOrder::kFree, kMaxNests, pieces)) {
      return refused(fmt::format("the copy takes more than {} strided pieces", kMaxNests), Reason::kLimit);
    }
    position += weight;
  }
  program.nests.reserve(pieces.size());
  for (const AffinePiece& piece : pieces) program.nests.push_back(make_nest(piece, src_unit, dst_unit));
  for (const CopyNest& nest : program.nests) {
    std::int64_t src_last = nest.src_offset + nest.run_elements * src_unit;
    std::int64_t dst_last = nest.dst_offset + nest.run_elements * dst_unit;
    for (const CopyLoop& loop : nest.loops) {
      src_last += (loop.size - 1) * loop.src_stride;
      dst_last += (loop.size - 1) * loop.dst_stride;
    }
    program.src_end = std::max(program.src_end, src_last);
    program.dst_end = std::max(program.dst_end, dst_last);
  }
  program.bytes =
      converts ? static_cast<std::uint64_t>(numel) * static_cast<std::uint64_t>(dst_unit) : wire_bytes;
  return program;
}

void run(const CopyProgram& program, const std::byte* src, std::byte* dst) {
  if (program.from != program.to) {
    const ConvertKernel kernel = convert_kernel(program.from, program.to);
    for (const CopyNest& nest : program.nests) {
      convert_nest(nest, kernel, unit_bytes(program.from), unit_bytes(program.to), src + nest.src_offset,
                   dst + nest.dst_offset);
    }
    return;
  }
  // Streaming stores pay only when the destination will not be in the cache anyway.
  const bool streaming = program.bytes >= kStreamingProgramBytes;
  for (const CopyNest& nest : program.nests)
    copy_nest(nest, src + nest.src_offset, dst + nest.dst_offset, streaming);
  if (streaming) end_streaming();
}

void run_part(const CopyProgram& program, std::int64_t from, std::int64_t bytes, const std::byte* src,
              std::byte* dst, bool streaming) {
  for (const CopyNest& nest : program.nests) {
    if (from >= nest.src_offset + source_extent(nest, 0) || from + bytes <= nest.src_offset) continue;
    PartOfNest part{nest, from, from + bytes, src, streaming};
    part.copy(0, nest.src_offset, dst + nest.dst_offset);
  }
  if (streaming) end_streaming();
}

std::vector<CopyProgram> split(const CopyProgram& program, std::size_t max_parts, std::uint64_t min_bytes) {
  const auto src_unit = unit_bytes(program.from), dst_unit = unit_bytes(program.to);
  std::uint64_t elements = 0;
  for (const CopyNest& nest : program.nests) elements += nest_elements(nest);
  const std::uint64_t min_elements =
      std::max<std::uint64_t>(1, ceil_div(min_bytes, static_cast<std::uint64_t>(dst_unit)));
  const std::uint64_t parts =
      std::clamp<std::uint64_t>(elements / min_elements, 1, std::max<std::size_t>(max_parts, 1));
  if (parts == 1) return {program};

  std::vector<CopyProgram> result(1);
  std::uint64_t taken = 0;  // elements in all parts so far
  // The part that is being filled ends at this many elements in all.
  const auto boundary = [&] { return elements * result.size() / parts; };
  const auto take = [&](const CopyNest& nest) {
    result.back().nests.push_back(nest);
    taken += nest_elements(nest);
  };
  for (CopyNest nest : program.nests) {
    for (;;) {
      // A step can be larger than a part: the boundaries it went over are passed by.
      while (taken >= boundary() && result.size() < parts) result.emplace_back();
      if (result.size() == parts) break;
      const std::uint64_t room = boundary() - taken;
      const std::uint64_t here = nest_elements(nest);
      if (here <= room) break;
      // Cut along the outermost loop, or the run; at least one step, so that it ends.
      CopyNest head = nest;
      if (nest.loops.empty()) {
        constexpr std::int64_t kCutAlignment = 64;  // a cache line of bytes
        const std::int64_t cut =
            std::max<std::int64_t>(static_cast<std::int64_t>(room) / kCutAlignment * kCutAlignment, 1);
        head.run_elements = cut;
        nest.run_elements -= cut;
        nest.src_offset += cut * src_unit;
        nest.dst_offset += cut * dst_unit;
      } else {
        CopyLoop& outer = nest.loops.front();
        const std::uint64_t per_step = here / static_cast<std::uint64_t>(outer.size);
        const std::int64_t cut = std::max<std::int64_t>(static_cast<std::int64_t>(room / per_step), 1);
        head.loops.front().size = cut;
        outer.size -= cut;
        nest.src_offset += cut * outer.src_stride;
        nest.dst_offset += cut * outer.dst_stride;
        if (head.loops.front().size == 1) head.loops.erase(head.loops.begin());
        if (outer.size == 1) nest.loops.erase(nest.loops.begin());
      }
      take(head);
    }
    take(nest);
  }
  std::erase_if(result, [](const CopyProgram& part) { return part.nests.empty(); });
  for (CopyProgram& part : result) {
    part.from = program.from;
    part.to = program.to;
    part.src_end = program.src_end;
    part.dst_end = program.dst_end;
    for (const CopyNest& nest : part.nests)
      part.bytes += nest_elements(nest) * static_cast<std::uint64_t>(dst_unit);
  }
  return result;
}

}  // namespace shardpull
