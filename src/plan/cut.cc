#include "plan/cut.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/status_macros.h"
#include "plan/boxes.h"
#include "plan/plan_errors.h"
#include "tensor/affine.h"
#include "tensor/slice_algebra.h"

namespace shardpull {
namespace {

// One dim of a copy: a step moves `source` elements in the source and `destination` elements in the window's
// parameter.
struct NestDim {
  std::int64_t size = 0, source = 0, destination = 0;
};

// A rectangle of a copy, enumerated row-major on both sides.
struct Nest {
  std::int64_t source = 0, destination = 0;
  std::vector<NestDim> dims;
};

// Positions x with x mod period in [low, high); period 0: x itself.
struct Band {
  std::int64_t period = 0, low = 0, high = 0;
};

// Splits nests at the edges of a band and keeps what lies inside. A dim whose step is a multiple of the
// period does not matter to the band and stays whole, so the number of results depends on the shapes, not on
// the sizes.
class Clip {
 public:
  Clip(const Band& band, std::size_t max_nests)
      : band_(band), max_nests_(max_nests), steps_left_(64 * max_nests) {}

  // Appends the parts of `nest` inside the band, in order. False when there are too many.
  bool run(const Nest& nest, std::vector<Nest>& out) {
    if (steps_left_-- == 0) return false;
    const std::int64_t at = band_.period == 0 ? nest.source : nest.source % band_.period;
    std::int64_t span = 0;
    std::optional<std::size_t> widest;
    for (std::size_t d = 0; d < nest.dims.size(); ++d) {
      const NestDim& dim = nest.dims[d];
      if (dim.size == 1 || (band_.period != 0 && dim.source % band_.period == 0)) continue;
      span += (dim.size - 1) * dim.source;
      if (!widest || dim.source > nest.dims[*widest].source) widest = d;
    }
    if (band_.period == 0 || at + span < band_.period) {
      if (at >= band_.high || at + span < band_.low) return true;
      if (at >= band_.low && at + span < band_.high) {
        if (out.size() >= max_nests_) return false;
        out.push_back(nest);
        return true;
      }
      return split_at_edges(nest, *widest, at, span, out);
    }
    return split_at_periods(nest, *widest, at, span, out);
  }

 private:
  static std::int64_t floor_div(std::int64_t a, std::int64_t b) {
    return a / b - (a % b != 0 && a < 0 ? 1 : 0);
  }

  // Iterations [first, first + count) of dim d.
  bool run_range(const Nest& nest, std::size_t d, std::int64_t first, std::int64_t count,
                 std::vector<Nest>& out) {
    if (count <= 0) return true;
    Nest part = nest;
    part.source += first * nest.dims[d].source;
    part.destination += first * nest.dims[d].destination;
    part.dims[d].size = count;
    if (count == 1) part.dims.erase(part.dims.begin() + static_cast<std::ptrdiff_t>(d));
    return run(part, out);
  }

  bool run_each(const Nest& nest, std::size_t d, std::int64_t first, std::int64_t end,
                std::vector<Nest>& out) {
    for (std::int64_t t = first; t < end; ++t) {
      if (!run_range(nest, d, t, 1, out)) return false;
    }
    return true;
  }

  // All of the nest is in one period and an edge of the band runs through it.
  bool split_at_edges(const Nest& nest, std::size_t d, std::int64_t at, std::int64_t span,
                      std::vector<Nest>& out) {
    const NestDim dim = nest.dims[d];
    const std::int64_t rest = span - (dim.size - 1) * dim.source;
    // Iterations that touch the band, and among them those that are inside as a whole.
    const std::int64_t first = std::max<std::int64_t>(0, -floor_div(at + rest - band_.low, dim.source));
    const std::int64_t end = std::min(dim.size, floor_div(band_.high - 1 - at, dim.source) + 1);
    const std::int64_t inner_first = std::max(first, -floor_div(at - band_.low, dim.source));
    const std::int64_t inner_end = std::min(end, floor_div(band_.high - 1 - rest - at, dim.source) + 1);
    if (inner_first >= inner_end) return run_each(nest, d, first, end, out);
    return run_each(nest, d, first, inner_first, out) &&
           run_range(nest, d, inner_first, inner_end - inner_first, out) &&
           run_each(nest, d, inner_end, end, out);
  }

  // The nest reaches into another period.
  bool split_at_periods(const Nest& nest, std::size_t d, std::int64_t at, std::int64_t span,
                        std::vector<Nest>& out) {
    const NestDim dim = nest.dims[d];
    if (band_.period % dim.source != 0) return run_each(nest, d, 0, dim.size, out);
    const std::int64_t rest = span - (dim.size - 1) * dim.source;
    const std::int64_t next =
        ceil_div(band_.period - at, dim.source);  // the first iteration that begins in the next period
    if (next >= dim.size) {
      const std::int64_t whole =
          std::clamp<std::int64_t>(floor_div(band_.period - 1 - rest - at, dim.source) + 1, 0, dim.size);
      return run_range(nest, d, 0, whole, out) && run_each(nest, d, whole, dim.size, out);
    }
    // An incomplete period, as many whole ones as there are, and an incomplete one.
    const std::int64_t per_period = band_.period / dim.source;
    const std::int64_t before = next == per_period ? 0 : next;
    const std::int64_t periods = (dim.size - before) / per_period;
    if (!run_range(nest, d, 0, before, out)) return false;
    if (periods > 0) {
      Nest body = nest;
      body.source += before * dim.source;
      body.destination += before * dim.destination;
      body.dims[d] = {per_period, dim.source, dim.destination};
      if (periods > 1) {
        body.dims.insert(body.dims.begin() + static_cast<std::ptrdiff_t>(d),
                         {periods, dim.source * per_period, dim.destination * per_period});
      }
      if (!run(body, out)) return false;
    }
    const std::int64_t done = before + periods * per_period;
    return run_range(nest, d, done, dim.size - done, out);
  }

  const Band band_;
  const std::size_t max_nests_;
  std::size_t steps_left_;
};

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

std::string part_text(std::string_view name, DType dtype, const Slice& slice) {
  return fmt::format("'{}' {} {}", name, dtype_name(dtype), to_string(slice));
}

// The window in units of wire elements. A window written as raw bytes has `unit` elements per wire element,
// innermost and `unit_stride` apart; its dims then count wire elements.
struct Window {
  std::vector<Dim> dims;
  std::int64_t unit = 1, unit_stride = 1;
};

std::optional<Window> window_of(const Destination& destination, std::int64_t elements) {
  const std::int64_t size = product(destination.shape);
  if (elements == 0 || size % elements != 0) return std::nullopt;
  Window window{.dims = {}, .unit = size / elements};
  for (std::size_t d = 0; d < destination.shape.size(); ++d)
    window.dims.push_back({destination.shape[d], destination.stride[d]});
  if (window.unit == 1) return window;
  Dim& last = window.dims.back();
  if (last.size % window.unit != 0) return std::nullopt;
  window.unit_stride = last.stride;
  last = {last.size / window.unit, last.stride * window.unit};
  return window;
}

// Pairs source and window: rectangles on which both are strided.
Status pair_up(const Scatter& scatter, const Window& window, std::string_view name, std::vector<Nest>& out) {
  std::vector<AffinePiece> rectangles;
  std::int64_t first = 0;
  for (const Region& region : scatter.slice.regions) {
    const std::int64_t count = region.numel();
    const std::array layouts{Layout(region.dims, region.offset),
                             Layout(window.dims, scatter.destination.offset)};
    const Loop all{.size = count, .step = {1, 1}};
    const std::array<std::int64_t, 2> start{0, first};
    if (!decompose(layouts, std::span(&all, 1), start, PieceOrder::kFree, kMaxPartsPerScatter, rectangles)) {
      return plan_limit_error(
          fmt::format("{} falls into its destination in more than {} rectangles",
                      part_text(name, scatter.wire_dtype, scatter.slice), kMaxPartsPerScatter),
          std::string(name));
    }
    first += count;
  }
  for (const AffinePiece& rectangle : rectangles) {
    Nest nest{.source = rectangle.offset[0], .destination = rectangle.offset[1], .dims = {}};
    for (const Loop& loop : rectangle.loops) nest.dims.push_back({loop.size, loop.step[0], loop.step[1]});
    out.push_back(std::move(nest));
  }
  return {};
}

// Adds an innermost dim to a window, merged into the one before it where the strides allow.
void append_dim(Destination& window, std::int64_t size, std::int64_t stride) {
  if (!window.stride.empty() && window.stride.back() == size * stride) {
    window.shape.back() *= size;
    window.stride.back() = stride;
  } else {
    window.shape.push_back(size);
    window.stride.push_back(stride);
  }
}

// A tensor's dims and a box in it. Dims of which the box has everything are merged into the dim outside them,
// so that every dim but the first is cut.
struct PieceShape {
  std::vector<std::int64_t> sizes, start, kept;  // per merged dim
  std::vector<std::int64_t> weights;             // positions per step in the tensor
  std::vector<Dim> dims;                         // (size, positions per step in the piece)
  std::int64_t piece_offset = 0;                 // of the box's first element, as `dims` would count it

  PieceShape(const std::vector<std::int64_t>& shape, const Box& box) {
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (!sizes.empty() && box.size[d] == shape[d]) {
        sizes.back() *= shape[d];
        start.back() *= shape[d];
        kept.back() *= shape[d];
      } else {
        sizes.push_back(shape[d]);
        start.push_back(box.start[d]);
        kept.push_back(box.size[d]);
      }
    }
    weights.resize(sizes.size());
    dims.resize(sizes.size());
    std::int64_t weight = 1, stride = 1;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      weights[d] = weight;
      dims[d] = {sizes[d], stride};
      piece_offset += start[d] * stride;
      weight *= sizes[d];
      stride *= kept[d];
    }
  }

  // Inner dims first: splitting at a larger period keeps the splits at the smaller ones.
  std::vector<Band> bands() const {
    std::vector<Band> bands;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      if (kept[d] == sizes[d]) continue;
      bands.push_back({.period = d == 0 ? 0 : weights[d] * sizes[d],
                       .low = start[d] * weights[d],
                       .high = (start[d] + kept[d]) * weights[d]});
    }
    return bands;
  }
};

// The box in wire elements; nothing when its bounds are not on whole ones, or not on whole bytes.
std::optional<Box> wire_box(const Box& box, DType dtype, DType wire) {
  const std::int64_t from = dtype_bits(dtype), to = dtype_bits(wire);
  const auto start_bits = checked_mul(box.start.back(), from), size_bits = checked_mul(box.size.back(), from);
  if (!start_bits || !size_bits || *start_bits % 8 != 0 || *size_bits % 8 != 0) return std::nullopt;
  if (*start_bits % to != 0 || *size_bits % to != 0) return std::nullopt;
  Box scaled = box;
  scaled.start.back() = *start_bits / to;
  scaled.size.back() = *size_bits / to;
  return scaled;
}

}  // namespace

Result<std::vector<std::int64_t>> wire_shape(const TensorMeta& meta, DType wire) {
  std::vector<std::int64_t> shape = meta.shape;
  const std::int64_t from = dtype_bits(meta.dtype), to = dtype_bits(wire);
  if (from == to) return shape;
  const auto bits = shape.empty() ? std::optional<std::int64_t>() : checked_mul(shape.back(), from);
  if (!bits || *bits % to != 0) {
    return plan_error(fmt::format("'{}' {} {} cannot be read as {}", meta.name, dtype_name(meta.dtype),
                                  shape_text(meta.shape), dtype_name(wire)),
                      meta.name);
  }
  shape.back() = *bits / to;
  return shape;
}

Result<Part> whole_part(const Scatter& scatter) {
  Part part{.piece = 0,
            .wire_dtype = scatter.wire_dtype,
            .slice = scatter.slice,
            .shape = scatter.shape,
            .destination = scatter.destination};
  SHARDPULL_ASSIGN_OR_RETURN(part.bytes, bytes_of(scatter.wire_dtype, scatter.slice.numel()));
  return part;
}

Result<std::vector<Part>> cut_by_pieces(const Scatter& scatter, const TensorMeta& meta,
                                        std::span<const OwnedPiece> pieces, std::uint32_t first_piece) {
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<std::int64_t> shape, wire_shape(meta, scatter.wire_dtype));
  const auto window = window_of(scatter.destination, scatter.slice.numel());
  if (!window) {
    return plan_unimplemented(
        fmt::format("'{}' is held in pieces, and its copy into a {} view cannot be cut by them", meta.name,
                    dtype_name(scatter.destination.dtype)),
        meta.name);
  }
  std::vector<Nest> copy;
  SHARDPULL_RETURN_IF_ERROR(pair_up(scatter, *window, meta.name, copy));

  // Positions that the copy reads lie in [first, end); most copies read few of many pieces.
  std::int64_t first = INT64_MAX, end = 0;
  for (const Nest& nest : copy) {
    std::int64_t last = nest.source;
    for (const NestDim& dim : nest.dims) last += (dim.size - 1) * dim.source;
    first = std::min(first, nest.source);
    end = std::max(end, last + 1);
  }
  const std::int64_t row =
      shape.empty() || shape[0] == 0 ? 1 : product(shape) / shape[0];  // positions per row

  std::vector<Part> parts;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    // Rows are whole elements of both dtypes, unless the tensor has one dim only.
    const Box& rows = pieces[i].box;
    if (rows.start.size() > 1 &&
        (rows.start[0] * row >= end || (rows.start[0] + rows.size[0]) * row <= first))
      continue;
    const auto box = wire_box(pieces[i].box, meta.dtype, scatter.wire_dtype);
    if (!box) {
      return plan_unimplemented(
          fmt::format(
              "'{}' is read as {}, but its piece {} in elements of {} ends within one or within a byte",
              meta.name, dtype_name(scatter.wire_dtype), to_string(pieces[i].box), dtype_name(meta.dtype)),
          meta.name);
    }
    const PieceShape piece(shape, *box);
    std::vector<Nest> inside = copy;
    for (const Band& band : piece.bands()) {
      std::vector<Nest> kept;
      Clip clip(band, kMaxPartsPerScatter);
      for (const Nest& nest : inside) {
        if (clip.run(nest, kept)) continue;
        return plan_limit_error(
            fmt::format("piece {} cuts {} into more than {} parts", to_string(pieces[i].box),
                        part_text(meta.name, scatter.wire_dtype, scatter.slice), kMaxPartsPerScatter),
            meta.name);
      }
      inside = std::move(kept);
    }
    const Layout layout(piece.dims, -piece.piece_offset);
    for (const Nest& nest : inside) {
      Part part{.piece = first_piece + static_cast<std::uint32_t>(i) + 1,
                .wire_dtype = scatter.wire_dtype,
                .slice = {},
                .shape = {},
                .destination = {.parameter = scatter.destination.parameter,
                                .dtype = scatter.destination.dtype,
                                .offset = nest.destination,
                                .shape = {},
                                .stride = {}}};
      Region region{.offset = layout.address(nest.source), .dims = {}};
      for (const NestDim& dim : nest.dims) {
        region.dims.push_back({dim.size, layout.delta(dim.source)});
        part.shape.push_back(dim.size);
        append_dim(part.destination, dim.size, dim.destination);
      }
      if (window->unit > 1) append_dim(part.destination, window->unit, window->unit_stride);
      part.slice = canonicalise({std::move(region)});
      Status fits = check_limits(part.slice);
      if (fits.ok()) fits = check_byte_runs(part.slice, scatter.wire_dtype);
      if (fits.ok() && part.destination.shape.size() > static_cast<std::size_t>(kMaxDims)) {
        fits = plan_unimplemented(fmt::format("the destination has {} dims, at most {} allowed",
                                              part.destination.shape.size(), kMaxDims),
                                  meta.name);
      }
      if (!fits.ok()) {
        return fits.with_context(fmt::format("piece {} of {}", to_string(pieces[i].box),
                                             part_text(meta.name, scatter.wire_dtype, scatter.slice)));
      }
      SHARDPULL_ASSIGN_OR_RETURN(part.bytes, bytes_of(scatter.wire_dtype, part.slice.numel()));
      parts.push_back(std::move(part));
    }
  }
  return parts;
}

Status cut_by_rows(Part part, std::string_view name, std::uint64_t max_bytes, std::vector<Part>& out) {
  const auto longer = [](std::int64_t size) { return size > 1; };
  const auto axis = std::find_if(part.shape.begin(), part.shape.end(), longer);
  if (part.bytes <= max_bytes || axis == part.shape.end()) {
    out.push_back(std::move(part));
    return {};
  }
  const std::int64_t rows = *axis;
  const std::int64_t elements = part.slice.numel();
  const std::int64_t row_elements = elements / rows;
  const auto row_bits =
      static_cast<std::uint64_t>(row_elements) * static_cast<std::uint64_t>(dtype_bits(part.wire_dtype));

  // The window's dim that the rows run along; a window of raw bytes may have several of its rows to one of
  // the copy.
  Destination& window = part.destination;
  const auto window_axis = std::find_if(window.shape.begin(), window.shape.end(), longer);
  if (window_axis == window.shape.end()) {
    return plan_unimplemented(
        fmt::format("'{}' is larger than max_chunk_bytes, {}, and its copy cannot be cut into rows", name,
                    max_bytes),
        std::string(name));
  }
  const auto d = static_cast<std::size_t>(window_axis - window.shape.begin());
  const std::int64_t window_rows = window.shape[d];
  // Rows are cut in multiples of `unit`: whole bytes on the wire, whole rows of the window.
  std::int64_t unit = rows / std::gcd(rows, window_rows);
  if (static_cast<std::uint64_t>(unit) * row_bits % 8 != 0) unit *= 2;

  const std::uint64_t unit_bytes = static_cast<std::uint64_t>(unit) * row_bits / 8;
  const std::int64_t most =
      unit * std::max<std::int64_t>(1, static_cast<std::int64_t>(max_bytes / unit_bytes));
  const std::int64_t runs = ceil_div(rows, most);
  if (runs > static_cast<std::int64_t>(kMaxChunks)) {
    return plan_limit_error(fmt::format("max_chunk_bytes {} would cut '{}' into {} keys, at most {} allowed",
                                        max_bytes, name, runs, kMaxChunks),
                            std::string(name));
  }
  const std::int64_t each = ceil_div(ceil_div(rows, runs), unit) * unit;
  for (std::int64_t first = 0; first < rows; first += each) {
    const std::int64_t count = std::min(each, rows - first);
    Part run = part;
    auto slice = slice_range(part.slice, first * row_elements, count * row_elements);
    if (!slice.ok())
      return slice.status().with_context(fmt::format("rows [{}, {}) of '{}'", first, first + count, name));
    run.slice = std::move(slice).value();
    run.shape[static_cast<std::size_t>(axis - part.shape.begin())] = count;
    const std::int64_t window_first = first * window_rows / rows;
    run.destination.shape[d] = (first + count) * window_rows / rows - window_first;
    run.destination.offset += window_first * window.stride[d];
    SHARDPULL_ASSIGN_OR_RETURN(run.bytes, bytes_of(part.wire_dtype, run.slice.numel()));
    out.push_back(std::move(run));
  }
  return {};
}

}  // namespace shardpull
