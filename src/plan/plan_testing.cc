#include "plan/plan_testing.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
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

}  // namespace shardpull::plan_testing
