#include "plan/plan_testing.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "plan/boxes.h"

namespace shardpull::plan_testing {

TensorMeta meta(std::string name, std::vector<std::int64_t> shape, DType dtype) {
  return {.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
}

InitTables make_tables(std::vector<TensorMeta> metadata, std::uint32_t producers, std::uint32_t consumers) {
  InitTables tables;
  for (std::uint32_t p = 0; p < producers; ++p) tables.producers.push_back(fmt::format("trainer-{}", p));
  for (const GatherGroup& group : must(form_groups(metadata))) tables.group_lens.push_back(group.count);
  tables.metadata = std::move(metadata);
  tables.producer_mappable.assign(producers, 1);
  tables.producer_resident.assign(producers, 0);
  tables.num_consumers = consumers;
  return tables;
}

std::vector<Holding> holdings_of(const std::vector<TensorMeta>& metadata, std::uint32_t ranks) {
  std::vector<Holding> holdings(ranks);
  for (std::uint32_t r = 0; r < ranks; ++r) {
    holdings[r].rank = r;
    holdings[r].digest = metadata_digest(metadata);
    holdings[r].whole.assign((metadata.size() + 7) / 8, 0);
  }
  return holdings;
}

void hold(Holding& holding, std::uint32_t name) {
  holding.whole[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
}

void hold(Holding& holding, std::uint32_t name, Box box) {
  holding.pieces.push_back({.name = name, .box = std::move(box), .rank = holding.rank});
}

std::uint32_t RecordingBuilder::parameter(const std::string& module, const std::string& name,
                                          std::vector<std::int64_t> shape, DType dtype) {
  const auto [at, fresh] =
      modules_.try_emplace(module, static_cast<std::uint32_t>(recording_.modules.size()));
  if (fresh) recording_.modules.push_back({.name = module, .type = "Module", .baked = true});
  recording_.parameters.push_back({.module = at->second,
                                   .name = name,
                                   .dtype = dtype,
                                   .shape = shape,
                                   .stride = contiguous_stride(shape)});
  return static_cast<std::uint32_t>(recording_.parameters.size() - 1);
}

Tensor RecordingBuilder::fake(std::uint32_t name) const {
  const TensorMeta& meta = metadata_.at(name);
  return must(Tensor::fake(meta.name, meta.dtype, meta.shape));
}

void RecordingBuilder::copy(std::uint32_t name, const Tensor& source, std::uint32_t parameter,
                            std::int64_t offset, std::vector<std::int64_t> shape,
                            std::vector<std::int64_t> stride) {
  Scatter scatter;
  scatter.name = name;
  scatter.wire_dtype = source.dtype();
  scatter.slice = must(source.slice());
  scatter.shape = source.shape();
  scatter.chain = to_string(source.chain());
  scatter.destination = {.parameter = parameter,
                         .dtype = recording_.parameters.at(parameter).dtype,
                         .offset = offset,
                         .shape = std::move(shape),
                         .stride = std::move(stride)};
  recording_.scatters.push_back(std::move(scatter));
}

void RecordingBuilder::copy(std::uint32_t name, const Tensor& source, std::uint32_t parameter) {
  const RecordedParameter& to = recording_.parameters.at(parameter);
  copy(name, source, parameter, 0, to.shape, to.stride);
}

void RecordingBuilder::copy_at(std::uint32_t name, const Tensor& source, std::uint32_t parameter,
                               std::int64_t offset) {
  copy(name, source, parameter, offset, source.shape(), contiguous_stride(source.shape()));
}

void RecordingBuilder::whole(const std::string& module, std::uint32_t name, const Tensor& source) {
  copy(name, source, parameter(module, "weight", source.shape(), source.dtype()));
}

void RecordingBuilder::fill(std::uint32_t parameter) {
  const RecordedParameter& to = recording_.parameters.at(parameter);
  recording_.fills.push_back(
      {{.parameter = parameter, .dtype = to.dtype, .offset = 0, .shape = to.shape, .stride = to.stride}});
}

Recording RecordingBuilder::build() const {
  Recording recording = recording_;
  std::vector<bool> live(metadata_.size(), false);
  for (const Scatter& scatter : recording.scatters) live[scatter.name] = true;
  for (std::uint32_t name = 0; name < metadata_.size(); ++name)
    (live[name] ? recording.live : recording.dead).push_back(name);
  recording.unused_reasons.assign(recording.dead.size(), "other rank");
  return recording;
}

std::vector<std::int64_t> contiguous_stride(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> stride(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;)
    stride[d - 1] = stride[d] * std::max<std::int64_t>(shape[d], 1);
  return stride;
}

namespace {

// Row-major walk of a box of strides.
void walk(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& stride, std::size_t d,
          std::int64_t at, std::vector<std::int64_t>& out) {
  if (d == shape.size()) {
    out.push_back(at);
    return;
  }
  for (std::int64_t i = 0; i < shape[d]; ++i) walk(shape, stride, d + 1, at + i * stride[d], out);
}

}  // namespace

std::vector<std::int64_t> elements_of(const Slice& slice) {
  std::vector<std::int64_t> out;
  for (const Region& region : slice.regions) {
    std::vector<std::int64_t> shape, stride;
    for (const Dim& dim : region.dims) {
      shape.push_back(dim.size);
      stride.push_back(dim.stride);
    }
    walk(shape, stride, 0, region.offset, out);
  }
  return out;
}

std::vector<std::int64_t> elements_of(const Destination& window) {
  std::vector<std::int64_t> out;
  walk(window.shape, window.stride, 0, window.offset, out);
  return out;
}

std::vector<std::int64_t> elements_of(const Box& box, const std::vector<std::int64_t>& shape) {
  const std::vector<std::int64_t> stride = contiguous_stride(shape);
  const std::int64_t first =
      std::inner_product(box.start.begin(), box.start.end(), stride.begin(), std::int64_t{0});
  std::vector<std::int64_t> out;
  walk(box.size, stride, 0, first, out);
  return out;
}

std::string origins_of(const Recording& recording, Origins& out) {
  for (const Scatter& scatter : recording.scatters) {
    const auto from = elements_of(scatter.slice);
    const auto to = elements_of(scatter.destination);
    if (from.size() != to.size()) return "a copy's sides differ in size";
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (!out.try_emplace({scatter.destination.parameter, to[i]}, scatter.name, from[i]).second)
        return "recorded copies overlap";
    }
  }
  return {};
}

std::string origins_of(const WorkerPlan& plan, const InitTables& tables, Origins& out) {
  for (const Chunk& chunk : plan.chunks) {
    // The slot, byte by byte: which element of which name begins there. Filled run by run, as producers pack.
    std::map<std::uint64_t, std::pair<std::uint32_t, std::int64_t>> slot;
    std::uint32_t next_key = 0;
    std::uint64_t end = 0;
    for (const Run& run : chunk.runs) {
      if (run.first_key != next_key)
        return fmt::format("chunk {}: runs do not follow each other", chunk.chunk_id);
      if (run.key_count == 0) continue;  // of a restricted plan
      next_key += run.key_count;
      std::uint64_t packed = 0;  // bytes of the run so far, counted from its own start
      for (std::uint32_t k = run.first_key; k < next_key; ++k) {
        const ChunkKey& key = chunk.keys[k];
        packed = *checked_align_up(packed, kLayoutAlignment);
        if (run.offset + packed != key.offset)
          return fmt::format("chunk {} key {}: the producer packs it elsewhere", chunk.chunk_id, k);
        if (key.offset < end) return fmt::format("chunk {} key {}: keys overlap", chunk.chunk_id, k);
        const TensorMeta& meta = tables.metadata[key.name];
        std::vector<std::int64_t> of_piece;
        if (key.piece != 0) of_piece = elements_of(tables.ownership.pieces[key.piece - 1].box, meta.shape);
        const std::uint64_t width = static_cast<std::uint64_t>(dtype_bits(key.wire_dtype)) / 8;
        for (const std::int64_t element : elements_of(key.slice)) {
          if (key.piece != 0 && static_cast<std::size_t>(element) >= of_piece.size())
            return "a key reads outside its piece";
          slot[run.offset + packed] = {
              key.name, key.piece != 0 ? of_piece[static_cast<std::size_t>(element)] : element};
          packed += width;
        }
        end = key.offset + key.bytes;
        if (run.offset + packed != end)
          return fmt::format("chunk {} key {}: bytes do not match its slice", chunk.chunk_id, k);
      }
      if (packed != run.bytes)
        return fmt::format("chunk {}: a run's bytes do not match its keys", chunk.chunk_id);
    }
    if (next_key != chunk.keys.size() || end != chunk.bytes)
      return fmt::format("chunk {}: runs do not cover it", chunk.chunk_id);
    for (const PlannedScatter& scatter : chunk.scatters) {
      const ChunkKey& key = chunk.keys.at(scatter.key);
      std::uint64_t at = key.offset;
      const auto to = elements_of(scatter.destination);
      if (to.size() != static_cast<std::size_t>(key.slice.numel()))
        return fmt::format("chunk {}: a copy's sides differ", chunk.chunk_id);
      for (const std::int64_t position : to) {
        if (!out.try_emplace({scatter.destination.parameter, position}, slot.at(at)).second) {
          return fmt::format("chunk {}: a destination element is written twice", chunk.chunk_id);
        }
        at += static_cast<std::uint64_t>(dtype_bits(key.wire_dtype)) / 8;
      }
    }
  }
  return {};
}

namespace {

std::uint8_t coded_byte(std::uint32_t name, std::int64_t position) {
  std::uint64_t word = static_cast<std::uint64_t>(position) + 1 + (std::uint64_t{name} << 40);
  word *= 0x9e3779b97f4a7c15;  // neighbours, and equal places of other names, differ
  return static_cast<std::uint8_t>(word >> 56);
}

std::int64_t width_of(DType dtype) {
  return dtype_bits(dtype) / 8;
}

WorkerBytes empty_parameters(const Recording& recording) {
  WorkerBytes out(recording.parameters.size());
  for (std::size_t p = 0; p < out.size(); ++p) {
    const RecordedParameter& parameter = recording.parameters[p];
    const auto size = static_cast<std::size_t>(*checked_numel(parameter.shape) * width_of(parameter.dtype));
    out[p].bytes.assign(size, 0);
    out[p].writes.assign(size, 0);
  }
  return out;
}

// Writes elements, one after the other, to the window's places.
std::string write_window(const Destination& to, const std::vector<std::uint8_t>& elements, WorkerBytes& out) {
  ParameterBytes& parameter = out.at(to.parameter);
  const std::int64_t width = width_of(to.dtype);
  std::size_t next = 0;
  for (const std::int64_t position : elements_of(to)) {
    for (std::int64_t b = 0; b < width; ++b, ++next) {
      const auto at = static_cast<std::size_t>(position * width + b);
      if (at >= parameter.bytes.size() || next >= elements.size()) return "a window is larger than its sides";
      parameter.bytes[at] = elements[next];
      ++parameter.writes[at];
    }
  }
  return next == elements.size() ? "" : "a window is smaller than what is written to it";
}

// The box of `holding` that holds all of `wanted`, a box of `name`.
std::optional<Box> held_box(const Holding& holding, std::uint32_t name, const Box& all, const Box& wanted) {
  if ((holding.whole[name / 8] >> (name % 8) & 1) != 0) return all;
  for (const Piece& piece : holding.pieces) {
    if (piece.name != name) continue;
    const Box& box = piece.box.whole() ? all : piece.box;
    bool inside = true;
    for (std::size_t d = 0; d < box.start.size(); ++d) {
      inside = inside && box.start[d] <= wanted.start[d] &&
               wanted.start[d] + wanted.size[d] <= box.start[d] + box.size[d];
    }
    if (inside) return box;
  }
  return std::nullopt;
}

// What the rank that declared `holding` packs for a key.
std::string pack_key(const InitTables& tables, const Holding& holding, const ChunkKey& key,
                     std::vector<std::uint8_t>& out) {
  const TensorMeta& meta = tables.metadata.at(key.name);
  const Box all{.start = std::vector<std::int64_t>(meta.shape.size(), 0), .size = meta.shape};
  const Box& wanted = key.piece == 0 ? all : tables.ownership.pieces.at(key.piece - 1).box;
  const auto box = held_box(holding, key.name, all, wanted);
  if (!box)
    return fmt::format("trainer {} does not hold what it shall pack of '{}'", holding.rank, meta.name);
  // Its memory is the box, row-major; `places` are those of the wanted elements in it.
  const std::vector<std::int64_t> held_positions = elements_of(*box, meta.shape);
  std::vector<std::uint8_t> memory;
  const std::int64_t width = width_of(meta.dtype);
  for (const std::int64_t position : held_positions) {
    for (std::int64_t b = 0; b < width; ++b) memory.push_back(coded_byte(key.name, position * width + b));
  }
  Box within = wanted;
  for (std::size_t d = 0; d < within.start.size(); ++d) within.start[d] -= box->start[d];
  const std::vector<std::int64_t> places = elements_of(within, box->size);
  const std::int64_t wire = width_of(key.wire_dtype);
  for (const std::int64_t element : elements_of(key.slice)) {
    for (std::int64_t b = 0; b < wire; ++b) {
      const std::int64_t byte = element * wire + b;  // of the piece
      if (byte / width >= static_cast<std::int64_t>(places.size())) return "a key reads outside its piece";
      const std::int64_t at = places[static_cast<std::size_t>(byte / width)] * width + byte % width;
      out.push_back(memory.at(static_cast<std::size_t>(at)));
    }
  }
  return out.size() == key.bytes ? "" : "a key has other bytes than its slice";
}

}  // namespace

std::string bytes_of_recording(const std::vector<TensorMeta>& metadata, const Recording& recording,
                               WorkerBytes& out) {
  out = empty_parameters(recording);
  for (const Scatter& scatter : recording.scatters) {
    const std::int64_t wire = width_of(scatter.wire_dtype);
    const std::int64_t size =
        *checked_numel(metadata.at(scatter.name).shape) * width_of(metadata[scatter.name].dtype);
    std::vector<std::uint8_t> elements;
    for (const std::int64_t element : elements_of(scatter.slice)) {
      if ((element + 1) * wire > size) return "a copy reads outside its tensor";
      for (std::int64_t b = 0; b < wire; ++b)
        elements.push_back(coded_byte(scatter.name, element * wire + b));
    }
    if (std::string failure = write_window(scatter.destination, elements, out); !failure.empty())
      return failure;
  }
  return {};
}

std::string bytes_of_plan(const InitTables& tables, const std::vector<Holding>& holdings,
                          const Recording& recording, const WorkerPlan& plan, WorkerBytes& out) {
  out = empty_parameters(recording);
  std::map<std::uint32_t, std::vector<std::uint8_t>> slots;  // by chunk
  for (const Chunk& chunk : plan.chunks) slots[chunk.chunk_id].assign(chunk.bytes, 0);
  for (const ProducerPlan& at : plan.producers) {
    const auto encoded = encode_pulls(pulls_at(plan, at.producer));
    for (const PullDescription& pull : must(decode_pulls(encoded.data(), encoded.size()))) {
      std::vector<std::uint8_t> packed(pull.bytes, 0);
      for (const ChunkKey& key : pull.keys) {
        std::vector<std::uint8_t> bytes;
        const Holding& holding = holdings.at(at.producer);
        if (std::string failure = pack_key(tables, holding, key, bytes); !failure.empty()) return failure;
        if (key.offset + bytes.size() > packed.size()) return "a producer packs past the end of a pull";
        std::copy(bytes.begin(), bytes.end(), packed.begin() + static_cast<std::ptrdiff_t>(key.offset));
      }
      const std::uint64_t begin = plan.chunks.at(pull.chunk_id).runs.at(pull.run).offset;
      std::vector<std::uint8_t>& slot = slots.at(pull.chunk_id);
      if (begin + packed.size() > slot.size()) return "a run lies outside its chunk";
      std::copy(packed.begin(), packed.end(), slot.begin() + static_cast<std::ptrdiff_t>(begin));
    }
  }
  for (const Chunk& chunk : plan.chunks) {
    const std::vector<std::uint8_t>& slot = slots.at(chunk.chunk_id);
    for (const PlannedScatter& scatter : chunk.scatters) {
      const ChunkKey& key = chunk.keys.at(scatter.key);
      const auto first = slot.begin() + static_cast<std::ptrdiff_t>(key.offset);
      const std::vector<std::uint8_t> elements(first, first + static_cast<std::ptrdiff_t>(key.bytes));
      if (std::string failure = write_window(scatter.destination, elements, out); !failure.empty())
        return fmt::format("chunk {}: {}", chunk.chunk_id, failure);
    }
  }
  return {};
}

}  // namespace shardpull::plan_testing
