#include "plan/kept.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>

#include "shardpull/slice.h"

namespace shardpull {
namespace {

constexpr std::uint64_t kMaxRuns = 16'000'000;

// Positions in bits, so that slices of several dtypes can be compared: [begin, end).
struct Extent {
  std::uint64_t begin = 0, end = 0;
};

// A region in bits: contiguous runs of `run` bits at every combination of the dims.
struct BitRegion {
  Extent extent;
  std::uint64_t run = 0;
  std::uint64_t runs = 1;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // (size, stride in bits), outermost first
  auto order() const { return std::tie(extent.begin, extent.end, run, dims); }
};

BitRegion in_bits(const Region& region, DType dtype) {
  const int bits = dtype_bits(dtype);
  const auto scaled = [&](std::int64_t elements) {
    return static_cast<std::uint64_t>(elements) * static_cast<std::uint64_t>(bits);
  };
  BitRegion out;
  out.run = scaled(1);
  out.extent.begin = scaled(region.offset);
  std::uint64_t last = out.extent.begin;
  for (std::size_t d = region.dims.size(); d-- > 0;) {
    const Dim& dim = region.dims[d];
    last += static_cast<std::uint64_t>(dim.size - 1) * scaled(dim.stride);
    if (out.dims.empty() && scaled(dim.stride) == out.run) {
      out.run *= static_cast<std::uint64_t>(dim.size);
      continue;
    }
    out.dims.emplace_back(dim.size, static_cast<std::int64_t>(scaled(dim.stride)));
    out.runs *= static_cast<std::uint64_t>(dim.size);
  }
  out.extent.end = last + scaled(1);
  std::reverse(out.dims.begin(), out.dims.end());
  return out;
}

void append_runs(const BitRegion& region, std::size_t d, std::uint64_t at, std::vector<Extent>& out) {
  if (d == region.dims.size()) {
    out.push_back({at, at + region.run});
    return;
  }
  const auto& [size, stride] = region.dims[d];
  for (std::int64_t i = 0; i < size; ++i)
    append_runs(region, d + 1, at + static_cast<std::uint64_t>(i * stride), out);
}

// Whether no two of its runs overlap, seen from the strides alone.
bool plainly_distinct(BitRegion region) {
  std::sort(region.dims.begin(), region.dims.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  std::uint64_t reach = region.run;
  for (const auto& [size, stride] : region.dims) {
    if (static_cast<std::uint64_t>(stride) < reach) return false;
    reach += static_cast<std::uint64_t>(size - 1) * static_cast<std::uint64_t>(stride);
  }
  return true;
}

std::uint64_t union_bits(std::span<const BitRegion> regions) {
  std::uint64_t bits = 0, runs = 0;
  for (const BitRegion& region : regions) {
    bits += region.run * region.runs;
    runs += region.runs;
  }
  if (runs > kMaxRuns || (regions.size() == 1 && plainly_distinct(regions.front()))) return bits;
  std::vector<Extent> extents;
  extents.reserve(runs);
  for (const BitRegion& region : regions) append_runs(region, 0, region.extent.begin, extents);
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  bits = 0;
  std::uint64_t end = 0;
  for (const Extent& extent : extents) {
    if (extent.end > end) bits += extent.end - std::max(end, extent.begin);
    end = std::max(end, extent.end);
  }
  return bits;
}

std::uint64_t unique_bits(const std::vector<Scatter>& scatters, std::span<const std::uint32_t> of_name) {
  std::vector<BitRegion> regions;
  for (const std::uint32_t s : of_name) {
    for (const Region& region : scatters[s].slice.regions)
      regions.push_back(in_bits(region, scatters[s].wire_dtype));
  }
  std::sort(regions.begin(), regions.end(),
            [](const BitRegion& a, const BitRegion& b) { return a.order() < b.order(); });
  const auto same = [](const BitRegion& a, const BitRegion& b) { return a.order() == b.order(); };
  regions.erase(std::unique(regions.begin(), regions.end(), same), regions.end());
  // Regions whose extents do not meet have nothing in common.
  std::uint64_t bits = 0;
  for (std::size_t first = 0; first < regions.size();) {
    std::size_t next = first + 1;
    std::uint64_t end = regions[first].extent.end;
    for (; next < regions.size() && regions[next].extent.begin < end; ++next)
      end = std::max(end, regions[next].extent.end);
    bits += union_bits(std::span(regions).subspan(first, next - first));
    first = next;
  }
  return bits;
}

}  // namespace

std::uint64_t unique_source_bytes(const std::vector<Scatter>& scatters) {
  std::vector<std::uint32_t> order(scatters.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return scatters[a].name < scatters[b].name; });
  std::uint64_t bytes = 0;
  for (std::size_t first = 0; first < order.size();) {
    std::size_t next = first + 1;
    while (next < order.size() && scatters[order[next]].name == scatters[order[first]].name) ++next;
    bytes += unique_bits(scatters, std::span(order).subspan(first, next - first)) / 8;
    first = next;
  }
  return bytes;
}

}  // namespace shardpull
