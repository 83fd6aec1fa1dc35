#include "tensor/slice_algebra.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/status_macros.h"

namespace shardpull {
namespace {

// Pieces before neighbours are merged. Far above kMaxRegions: pieces often merge again across the cuts.
constexpr std::size_t kMaxPieces = 4096;

Status bad_slice(std::string message, Reason reason = Reason::kBadArgument) {
  return Status(StatusCode::kInvalidArgument, std::move(message), {.reason = reason});
}

Status too_many_regions() {
  return bad_slice(fmt::format("needs more than {} strided regions", kMaxRegions), Reason::kLimit);
}

std::vector<Loop> to_loops(const Region& region) {
  std::vector<Loop> loops;
  loops.reserve(region.dims.size());
  for (const Dim& dim : region.dims) loops.push_back({.size = dim.size, .step = {dim.stride}});
  return loops;
}

Region to_region(const AffinePiece& piece) {
  Region region{.offset = piece.offset[0], .dims = {}};
  region.dims.reserve(piece.loops.size());
  for (const Loop& loop : piece.loops) region.dims.push_back({loop.size, loop.step[0]});
  return region;
}

// Index of the last element, or nothing on overflow. Sizes > 0, strides >= 0.
std::optional<std::int64_t> last_element(const Region& region) {
  std::int64_t last = region.offset;
  for (const Dim& dim : region.dims) {
    const auto reach = checked_mul<std::int64_t>(dim.size - 1, dim.stride);
    const auto sum = reach ? checked_add<std::int64_t>(last, *reach) : std::nullopt;
    if (!sum) return std::nullopt;
    last = *sum;
  }
  return last;
}

// Drops dims of size 1 and merges neighbours. Sizes > 0.
void normalise(Region& region) {
  std::size_t kept = 0;
  for (const Dim& dim : region.dims) {
    if (dim.size == 1) continue;
    Dim* const outer = kept > 0 ? &region.dims[kept - 1] : nullptr;
    if (outer != nullptr && outer->stride == dim.size * dim.stride) {
      *outer = {outer->size * dim.size, dim.stride};
    } else {
      region.dims[kept++] = dim;
    }
  }
  region.dims.resize(kept);
}

bool same_dims(std::span<const Dim> a, std::span<const Dim> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Makes `first` the one region that enumerates `first` and then `second`, if there is one with positive
// strides and few enough dims. Both normalised.
bool merge(Region& first, const Region& second) {
  const std::int64_t gap = second.offset - first.offset;
  if (gap <= 0) return false;
  const std::span<const Dim> a(first.dims);
  const std::span<const Dim> b(second.dims);
  if (same_dims(a, b)) {
    if (a.size() == kMaxDims && a[0].size * a[0].stride != gap) return false;
    first.dims.insert(first.dims.begin(), Dim{2, gap});
  } else if (!a.empty() && gap == a[0].size * a[0].stride && !b.empty() && a[0].stride == b[0].stride &&
             same_dims(a.subspan(1), b.subspan(1))) {
    first.dims[0].size += b[0].size;
  } else if (!a.empty() && gap == a[0].size * a[0].stride && same_dims(a.subspan(1), b)) {
    first.dims[0].size += 1;
  } else if (!b.empty() && gap == b[0].stride && same_dims(a, b.subspan(1))) {
    first.dims.insert(first.dims.begin(), Dim{b[0].size + 1, b[0].stride});
  } else {
    return false;
  }
  normalise(first);
  return true;
}

// Selections of up to this many blocks are described by the fewest regions there are. Larger ones are cut
// where the chain's reshapes cut them, which is as good but for selections made to defeat it.
constexpr std::int64_t kMaxExactBlocks = 2048;

// Above this many regions only the whole list is tried as one region, and no part of it.
constexpr std::size_t kMaxFoldedRegions = 4 * kMaxRegions;

// The innermost run that all regions are made of, a block: one element when there are few, else the largest
// common run.
Dim common_block(const std::vector<Region>& regions) {
  std::int64_t numel = 0;
  for (const Region& region : regions) numel += region.numel();
  Dim block{1, 1};
  if (numel <= kMaxExactBlocks) return block;
  block.size = 0;
  for (const Region& region : regions) {
    if (region.dims.empty()) return {1, 1};
    if (block.size == 0) block.stride = region.dims.back().stride;
    if (region.dims.back().stride != block.stride) return {1, 1};
    block.size = std::gcd(block.size, region.dims.back().size);
  }
  return block;
}

// The fewest regions that enumerate the same elements; where several ways are equally short, the first region
// is as long as possible, then the second, and so on. Depends on nothing but the elements and their order.
// Empty when there are too many blocks to look at.
std::vector<Region> fewest(const std::vector<Region>& regions) {
  const Dim block = common_block(regions);
  std::vector<std::int64_t> starts;
  for (const Region& region : regions) {
    const std::int64_t count = region.numel() / block.size;
    if (count > kMaxExactBlocks - static_cast<std::int64_t>(starts.size())) return {};
    Region outer = region;
    if (block.size > 1) {
      outer.dims.back() = {outer.dims.back().size / block.size, outer.dims.back().stride * block.size};
    }
    const Layout layout(outer.dims, outer.offset);
    for (std::int64_t i = 0; i < count; ++i) starts.push_back(layout.address(i));
  }
  const std::size_t n = starts.size();
  const std::size_t max_levels = kMaxDims - (block.size > 1 ? 1 : 0);
  struct Choice {
    std::uint32_t regions = 0;  // for the blocks from here to the end
    std::uint32_t length = 1;   // blocks of the first of them
    std::vector<Dim> dims;      // of the first of them
  };
  std::vector<Choice> best(n + 1);
  for (std::size_t first = n; first-- > 0;) {
    Choice& choice = best[first];
    choice.regions = best[first + 1].regions + 1;
    // Grow level by level: the only regions that start here are the longest run, whole runs of it, and so on.
    std::vector<Dim> dims;
    for (std::size_t length = 1; dims.size() < max_levels;) {
      std::size_t repeats = 1;
      const std::int64_t stride = first + length < n ? starts[first + length] - starts[first] : 0;
      while (stride > 0 && first + (repeats + 1) * length <= n) {
        const auto* const next = &starts[first + repeats * length];
        if (!std::equal(next, next + length, next - length,
                        [&](std::int64_t a, std::int64_t b) { return a - b == stride; }))
          break;
        ++repeats;
      }
      if (repeats == 1) break;
      for (std::size_t count = 2; count <= repeats; ++count) {
        const std::size_t end = first + count * length;
        if (best[end].regions + 1 > choice.regions) continue;
        choice.regions = best[end].regions + 1;
        choice.length = static_cast<std::uint32_t>(count * length);
        choice.dims = dims;
        choice.dims.insert(choice.dims.begin(), Dim{static_cast<std::int64_t>(count), stride});
      }
      length *= repeats;
      dims.insert(dims.begin(), Dim{static_cast<std::int64_t>(repeats), stride});
    }
  }
  std::vector<Region> result;
  for (std::size_t first = 0; first < n; first += best[first].length) {
    Region region{.offset = starts[first], .dims = best[first].dims};
    region.dims.push_back(block);
    normalise(region);
    result.push_back(std::move(region));
  }
  return result;
}

// Consecutive regions as one sequence of elements. Borrows.
class Sequence {
 public:
  explicit Sequence(std::span<const Region> regions) : regions_(regions) {
    for (const Region& region : regions) {
      layouts_.emplace_back(region.dims, region.offset);
      ends_.push_back((ends_.empty() ? 0 : ends_.back()) + region.numel());
    }
  }

  // Regions [first, last) as the one region that enumerates them, if there is one with positive strides and
  // at most kMaxDims dims.
  std::optional<Region> as_region(std::size_t first, std::size_t last) const {
    const std::int64_t begin = first == 0 ? 0 : ends_[first - 1];
    const std::int64_t numel = ends_[last - 1] - begin;
    // The dims can only be these: innermost the longest arithmetic run, then the longest run of such runs,
    // and so on.
    const std::int64_t origin = element(begin);
    Region candidate{.offset = origin, .dims = {}};
    for (std::int64_t block = 1; block < numel;) {
      const std::int64_t stride = element(begin + block) - origin;
      if (numel % block != 0 || stride <= 0 || candidate.dims.size() == kMaxDims) return std::nullopt;
      const auto continues = [&](std::int64_t i) {
        return element(begin + i * block) == origin + i * stride;
      };
      // Block 1 continues by the choice of the stride. Galloping finds the end of the run: within twice its
      // length no block continues it again by chance.
      const std::int64_t blocks = numel / block;
      std::int64_t low = 1;
      while (2 * low < blocks && continues(2 * low)) low *= 2;
      std::int64_t high = std::min(2 * low, blocks) - 1;
      while (low < high) {
        const std::int64_t middle = low + (high - low + 1) / 2;
        if (continues(middle)) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      const std::int64_t size = low + 1;
      candidate.dims.insert(candidate.dims.begin(), Dim{size, stride});
      block *= size;
    }
    if (candidate.numel() != numel || !enumerates(candidate, first, last)) return std::nullopt;
    return candidate;
  }

 private:
  std::int64_t element(std::int64_t position) const {
    const auto at =
        static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), position) - ends_.begin());
    return layouts_[at].address(position - (at == 0 ? 0 : ends_[at - 1]));
  }

  // Whether `candidate`'s elements are those of regions [first, last), one for one. Walks both in lockstep.
  bool enumerates(const Region& candidate, std::size_t first, std::size_t last) const {
    const Layout whole(candidate.dims, candidate.offset);
    std::int64_t position = 0;
    std::vector<AffinePiece> pieces;
    for (std::size_t i = first; i < last; ++i) {
      const Layout layouts[kMaxLayouts] = {whole, layouts_[i]};
      const std::int64_t numel = regions_[i].numel();
      const std::int64_t start[kMaxLayouts] = {position, 0};
      const Loop loop{.size = numel, .step = {1, 1}};
      pieces.clear();
      if (!decompose(layouts, {&loop, 1}, start, PieceOrder::kFree, kMaxPieces, pieces)) return false;
      for (const AffinePiece& piece : pieces) {
        if (piece.offset[0] != piece.offset[1]) return false;
        for (const Loop& inner : piece.loops) {
          if (inner.step[0] != inner.step[1]) return false;
        }
      }
      position += numel;
    }
    return true;
  }

  std::span<const Region> regions_;
  std::vector<Layout> layouts_;
  std::vector<std::int64_t> ends_;  // positions one past each region's last element
};

// Replaces runs of regions by the one region that enumerates them, from the left, the longest first. Pairs
// that merge at their border are merged already: this finds rows that the cuts went through.
std::vector<Region> fold(const std::vector<Region>& regions) {
  const Sequence sequence(regions);
  if (auto whole = sequence.as_region(0, regions.size())) return {*std::move(whole)};
  if (regions.size() > kMaxFoldedRegions) return regions;
  std::vector<Region> folded;
  for (std::size_t first = 0; first < regions.size();) {
    std::size_t last = regions.size() + 1;
    std::optional<Region> one;
    while (!one && --last > first + 2) one = sequence.as_region(first, last);
    folded.push_back(one ? *std::move(one) : regions[first]);
    first = one ? last : first + 1;
  }
  return folded;
}

}  // namespace

Slice canonicalise(std::vector<Region> regions) {
  Slice slice;
  std::vector<Region>& kept = slice.regions;
  for (Region& region : regions) {
    if (std::any_of(region.dims.begin(), region.dims.end(), [](const Dim& dim) { return dim.size == 0; }))
      continue;
    normalise(region);
    kept.push_back(std::move(region));
    while (kept.size() > 1 && merge(kept[kept.size() - 2], kept.back())) kept.pop_back();
  }
  if (kept.size() < 2) return slice;
  std::vector<Region> exact = fewest(kept);
  kept = exact.empty() ? fold(kept) : std::move(exact);
  return slice;
}

Status check_limits(const Slice& slice) {
  if (slice.regions.size() > static_cast<std::size_t>(kMaxRegions)) {
    return bad_slice(
        fmt::format("needs {} strided regions, at most {} are allowed", slice.regions.size(), kMaxRegions),
        Reason::kLimit);
  }
  for (const Region& region : slice.regions) {
    if (region.dims.size() > static_cast<std::size_t>(kMaxDims)) {
      return bad_slice(
          fmt::format("needs a region of {} dims, at most {} are allowed", region.dims.size(), kMaxDims),
          Reason::kLimit);
    }
  }
  return {};
}

Result<Slice> slice_range(const Slice& slice, std::int64_t first, std::int64_t count) {
  const std::int64_t numel = slice.numel();
  if (first < 0 || count < 0 || first > numel || count > numel - first) {
    return bad_slice(fmt::format("elements [{}, {} + {}) of a slice of {}", first, first, count, numel));
  }
  std::vector<Region> regions;
  std::int64_t begin = 0;  // position of the current region's first element
  for (const Region& region : slice.regions) {
    const std::int64_t end = begin + region.numel();
    const std::int64_t from = std::max(begin, first), to = std::min(end, first + count);
    if (from < to) {
      const Layout layout(region.dims, region.offset);
      const Loop loop{.size = to - from, .step = {1}};
      const std::int64_t start = from - begin;
      std::vector<AffinePiece> pieces;
      if (!decompose({&layout, 1}, {&loop, 1}, {&start, 1}, PieceOrder::kKeep, kMaxPieces, pieces))
        return too_many_regions();
      for (const AffinePiece& piece : pieces) regions.push_back(to_region(piece));
    }
    begin = end;
  }
  Slice result = canonicalise(std::move(regions));
  SHARDPULL_RETURN_IF_ERROR(check_limits(result));
  return result;
}

Result<Slice> compose(const Region& outer, const Slice& inner, std::size_t max_regions) {
  const std::int64_t numel = outer.numel();
  const Layout layout(outer.dims, outer.offset);
  std::vector<AffinePiece> pieces;
  for (const Region& region : inner.regions) {
    const auto last = last_element(region);
    if (!last || *last >= numel || region.offset < 0) {
      return bad_slice(fmt::format("{} reaches outside its {} elements", to_string(Slice{{region}}), numel));
    }
    if (!decompose({&layout, 1}, to_loops(region), {&region.offset, 1}, PieceOrder::kKeep,
                   std::max(max_regions, kMaxPieces), pieces)) {
      return too_many_regions();
    }
  }
  std::vector<Region> regions;
  regions.reserve(pieces.size());
  for (const AffinePiece& piece : pieces) regions.push_back(to_region(piece));
  Slice result = canonicalise(std::move(regions));
  if (result.regions.size() > max_regions) return too_many_regions();
  return result;
}

Result<Slice> change_unit(const Slice& slice, int from_bits, int to_bits) {
  if (from_bits == to_bits) return slice;
  std::vector<Region> regions = slice.regions;
  if (from_bits > to_bits) {
    const std::int64_t ratio = from_bits / to_bits;
    for (Region& region : regions) {
      bool fits = true;
      const auto scale = [&](std::int64_t& value) {
        const auto scaled = checked_mul<std::int64_t>(value, ratio);
        fits = fits && scaled.has_value();
        value = scaled.value_or(0);
      };
      scale(region.offset);
      for (Dim& dim : region.dims) scale(dim.stride);
      if (!fits) return bad_slice("offsets do not fit 64 bits", Reason::kLimit);
      region.dims.push_back({ratio, 1});
    }
    return canonicalise(std::move(regions));
  }
  const std::int64_t ratio = to_bits / from_bits;
  const Slice canonical = canonicalise(std::move(regions));
  regions = canonical.regions;
  for (Region& region : regions) {
    bool whole = !region.dims.empty() && region.dims.back().stride == 1 &&
                 region.dims.back().size % ratio == 0 && region.offset % ratio == 0;
    for (std::size_t i = 0; whole && i + 1 < region.dims.size(); ++i)
      whole = region.dims[i].stride % ratio == 0;
    if (!whole) {
      return bad_slice(
          fmt::format("its runs do not begin and end on multiples of {} bits in the checkpoint tensor",
                      to_bits),
          Reason::kUnsupportedOp);
    }
    region.offset /= ratio;
    region.dims.back().size /= ratio;
    for (std::size_t i = 0; i + 1 < region.dims.size(); ++i) region.dims[i].stride /= ratio;
  }
  return canonicalise(std::move(regions));
}

Status check_byte_runs(const Slice& slice, DType wire) {
  const int bits = dtype_bits(wire);
  if (bits % 8 == 0) return {};
  return change_unit(slice, bits, 8).status();
}

Status check_slice(const Slice& slice, DType wire, DType dtype, std::int64_t numel) {
  SHARDPULL_RETURN_IF_ERROR(check_limits(slice));
  const auto bits = checked_mul<std::int64_t>(numel, dtype_bits(dtype));
  if (!bits) return bad_slice(fmt::format("a tensor of {} elements is too large", numel), Reason::kLimit);
  const std::int64_t available = *bits / dtype_bits(wire);
  std::int64_t total = 0;
  for (std::size_t i = 0; i < slice.regions.size(); ++i) {
    const Region& region = slice.regions[i];
    const auto refused = [&](std::string_view why) {
      return bad_slice(fmt::format("region {} of the slice, {}, {}", i, to_string(Slice{{region}}), why));
    };
    if (region.offset < 0) return refused("starts before the tensor");
    std::int64_t count = 1;
    for (const Dim& dim : region.dims) {
      if (dim.size <= 0 || dim.stride < 0) return refused("has a size or a stride that is not positive");
      const auto product = checked_mul<std::int64_t>(count, dim.size);
      if (!product) return refused("has more elements than 64 bits can count");
      count = *product;
    }
    const auto last = last_element(region);
    if (!last || *last >= available) {
      return refused(
          fmt::format("reaches outside the tensor's {} elements of {}", available, dtype_name(wire)));
    }
    const auto sum = checked_add<std::int64_t>(total, count);
    if (!sum) return refused("has more elements than 64 bits can count");
    total = *sum;
  }
  if (!bytes_of(wire, total).ok()) return bytes_of(wire, total).status();
  return check_byte_runs(slice, wire);
}

void encode_slice(ByteWriter& writer, const Slice& slice) {
  writer.u32(static_cast<std::uint32_t>(slice.regions.size()));
  for (const Region& region : slice.regions) {
    writer.i64(region.offset);
    writer.u32(static_cast<std::uint32_t>(region.dims.size()));
    for (const Dim& dim : region.dims) {
      writer.i64(dim.size);
      writer.i64(dim.stride);
    }
  }
}

Status decode_slice(ByteReader& reader, Slice& out) {
  std::uint32_t regions = 0;
  SHARDPULL_RETURN_IF_ERROR(reader.count(regions, kMaxRegions, sizeof(std::int64_t) + sizeof(std::uint32_t)));
  Slice slice;
  slice.regions.resize(regions);
  for (Region& region : slice.regions) {
    std::uint32_t dims = 0;
    SHARDPULL_RETURN_IF_ERROR(reader.i64(region.offset));
    SHARDPULL_RETURN_IF_ERROR(reader.count(dims, kMaxDims, 2 * sizeof(std::int64_t)));
    region.dims.resize(dims);
    for (Dim& dim : region.dims) {
      SHARDPULL_RETURN_IF_ERROR(reader.i64(dim.size));
      SHARDPULL_RETURN_IF_ERROR(reader.i64(dim.stride));
    }
  }
  out = std::move(slice);
  return {};
}

}  // namespace shardpull
