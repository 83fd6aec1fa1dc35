#include "sim/sim_model.h"

#include <algorithm>
#include <map>
#include <numeric>

#include <fmt/format.h>

#include "base/random.h"
#include "base/status_macros.h"

namespace shardpull::sim {
namespace {

constexpr std::int64_t kHidden = 16, kVocabulary = 20;

std::int64_t product(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// Rows [r0, r0 + rows) and columns [c0, c0 + columns) of a matrix of `width` columns, canonical.
Slice box_of(std::int64_t width, std::int64_t r0, std::int64_t rows, std::int64_t c0, std::int64_t columns) {
  Region region;
  region.offset = r0 * width + c0;
  if (columns == width) {
    region.dims = {{rows * width, 1}};
  } else {
    if (rows > 1) region.dims.push_back({rows, width});
    if (columns > 1) region.dims.push_back({columns, 1});
  }
  return Slice{{region}};
}

// Enumerates a strided box, row-major.
template <typename Visit>
void enumerate(std::int64_t offset, const std::vector<std::int64_t>& size,
               const std::vector<std::int64_t>& stride, Visit visit) {
  std::vector<std::int64_t> index(size.size(), 0);
  const std::int64_t count = product(size);
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t at = offset;
    for (std::size_t d = 0; d < size.size(); ++d) at += index[d] * stride[d];
    visit(static_cast<std::uint64_t>(at));
    for (std::size_t d = size.size(); d-- > 0;) {
      if (++index[d] < size[d]) break;
      index[d] = 0;
    }
  }
}

// Writes one worker's recording.
class Recorder {
 public:
  explicit Recorder(const std::vector<TensorMeta>& metadata) : metadata_(metadata) {}

  std::uint32_t parameter(const std::string& module, const std::string& name, DType dtype,
                          std::vector<std::int64_t> shape) {
    const auto [at, fresh] = modules_.emplace(module, static_cast<std::uint32_t>(recording_.modules.size()));
    if (fresh) recording_.modules.push_back({module, "Sim", true, true});
    std::vector<std::int64_t> stride(shape.size(), 1);
    for (std::size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
    recording_.parameters.push_back({at->second, name, dtype, std::move(shape), std::move(stride)});
    return static_cast<std::uint32_t>(recording_.parameters.size() - 1);
  }

  // `slice` of a name into `rows` x `columns` at `offset` of a matrix parameter (or all of a vector: rows 0).
  void copy(const std::string& name, Slice slice, std::uint32_t parameter, std::int64_t offset,
            std::int64_t rows, std::int64_t columns) {
    const auto it = std::find_if(metadata_.begin(), metadata_.end(),
                                 [&](const TensorMeta& meta) { return meta.name == name; });
    Scatter scatter;
    scatter.name = static_cast<std::uint32_t>(it - metadata_.begin());
    scatter.wire_dtype = it->dtype;
    scatter.slice = std::move(slice);
    scatter.chain = "sim";
    Destination& to = scatter.destination;
    to.parameter = parameter;
    to.dtype = it->dtype;
    to.offset = offset;
    if (rows == 0) {
      to.shape = {columns};
      to.stride = {1};
    } else {
      to.shape = {rows, columns};
      to.stride = {recording_.parameters[parameter].stride[0], 1};
    }
    scatter.shape = to.shape;
    recording_.scatters.push_back(std::move(scatter));
  }

  void fill_rows(std::uint32_t parameter, std::int64_t first, std::int64_t rows) {
    const RecordedParameter& p = recording_.parameters[parameter];
    recording_.fills.push_back(
        {{parameter, p.dtype, first * p.stride[0], {rows, p.shape[1]}, {p.stride[0], 1}}});
  }

  Recording finish() {
    std::vector<std::uint8_t> live(metadata_.size(), 0);
    for (const Scatter& scatter : recording_.scatters) live[scatter.name] = 1;
    for (std::uint32_t name = 0; name < live.size(); ++name)
      (live[name] != 0 ? recording_.live : recording_.dead).push_back(name);
    recording_.unused_reasons.assign(recording_.dead.size(), "not on this worker");
    return std::move(recording_);
  }

 private:
  const std::vector<TensorMeta>& metadata_;
  Recording recording_;
  std::map<std::string, std::uint32_t> modules_;
};

std::vector<TensorMeta> metadata_of(const SimOptions& options) {
  std::vector<TensorMeta> metadata;
  metadata.push_back({"embed.weight", DType::kBF16, {kVocabulary, kHidden}});
  for (std::uint32_t layer = 0; layer < options.layers; ++layer) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    metadata.push_back({prefix + "q.weight", DType::kBF16, {2 * kHidden, kHidden}});
    metadata.push_back({prefix + "k.weight", DType::kBF16, {kHidden, kHidden}});
    metadata.push_back({prefix + "o.weight", DType::kF32, {kHidden, 2 * kHidden}});
    metadata.push_back({prefix + "scale", DType::kU8, {3}});  // ends off every alignment
    metadata.push_back({prefix + "norm.weight", DType::kF32, {kHidden}});
  }
  metadata.push_back({"norm.weight", DType::kF32, {kHidden}});
  if (!options.tied) metadata.push_back({"head.weight", DType::kBF16, {kVocabulary, kHidden}});
  return metadata;
}

// Worker (stage, rank) of one replica: embedding and head by rows with a padded row each, q and k fused into
// one parameter, o by columns, the rest whole; one module takes its parameters from the first layer and from
// the end.
Recording record(const SimOptions& options, const std::vector<TensorMeta>& metadata, std::uint32_t stage,
                 std::uint32_t rank) {
  Recorder recorder(metadata);
  const std::int64_t tp = options.tp, t = rank;
  const std::int64_t rows = kVocabulary / tp, q = 2 * kHidden / tp, k = kHidden / tp;
  const std::uint32_t first = options.layers * stage / options.pp,
                      last = options.layers * (stage + 1) / options.pp;
  if (stage == 0) {
    const std::uint32_t weight = recorder.parameter("embed", "weight", DType::kBF16, {rows + 1, kHidden});
    recorder.copy("embed.weight", box_of(kHidden, t * rows, rows, 0, kHidden), weight, 0, rows, kHidden);
    recorder.fill_rows(weight, rows, 1);
  }
  for (std::uint32_t layer = first; layer < last; ++layer) {
    const std::string source = fmt::format("layers.{}.", layer), module = fmt::format("layer{}", layer);
    const std::uint32_t qk = recorder.parameter(module + ".qk", "weight", DType::kBF16, {q + k, kHidden});
    recorder.copy(source + "q.weight", box_of(kHidden, t * q, q, 0, kHidden), qk, 0, q, kHidden);
    recorder.copy(source + "k.weight", box_of(kHidden, t * k, k, 0, kHidden), qk, q * kHidden, k, kHidden);
    const std::uint32_t o = recorder.parameter(module + ".o", "weight", DType::kF32, {kHidden, q});
    recorder.copy(source + "o.weight", box_of(2 * kHidden, 0, kHidden, t * q, q), o, 0, kHidden, q);
    const std::uint32_t scale = recorder.parameter(module + ".o", "scale", DType::kU8, {3});
    recorder.copy(source + "scale", Slice::whole(3), scale, 0, 0, 3);
    const std::uint32_t norm = recorder.parameter(module + ".norm", "weight", DType::kF32, {kHidden});
    recorder.copy(source + "norm.weight", Slice::whole(kHidden), norm, 0, 0, kHidden);
  }
  if (stage + 1 == options.pp) {
    const std::uint32_t weight = recorder.parameter("head", "weight", DType::kBF16, {rows + 1, kHidden});
    recorder.copy(options.tied ? "embed.weight" : "head.weight", box_of(kHidden, t * rows, rows, 0, kHidden),
                  weight, 0, rows, kHidden);
    recorder.fill_rows(weight, rows, 1);
    if (options.pp == 1) {
      const std::uint32_t early = recorder.parameter("mix", "early", DType::kF32, {kHidden});
      recorder.copy("layers.0.norm.weight", Slice::whole(kHidden), early, 0, 0, kHidden);
    }
    const std::uint32_t late = recorder.parameter("mix", "late", DType::kF32, {kHidden});
    recorder.copy("norm.weight", Slice::whole(kHidden), late, 0, 0, kHidden);
  }
  return recorder.finish();
}

void hold_whole(Holding& holding, std::uint32_t name) {
  holding.whole[name / 8] = static_cast<std::uint8_t>(holding.whole[name / 8] | 1u << name % 8);
}

// Cuts a tensor along one dim into boxes, some longer than their share, and gives rank r box r mod their
// number.
void hold_boxes(const TensorMeta& meta, std::uint32_t name, std::vector<Holding>& holdings, Random& random) {
  const auto ranks = static_cast<std::int64_t>(holdings.size());
  const std::size_t dim = random.below(meta.shape.size());
  const std::int64_t size = meta.shape[dim], boxes = random.between(1, std::min(ranks, size));
  std::vector<Box> cut;
  for (std::int64_t i = 0; i < boxes; ++i) {
    Box box{std::vector<std::int64_t>(meta.shape.size(), 0), meta.shape};
    const std::int64_t from = size * i / boxes, to = size * (i + 1) / boxes;
    box.start[dim] = random.chance(0.3) ? random.between(0, from) : from;
    box.size[dim] = (random.chance(0.3) ? random.between(to, size) : to) - box.start[dim];
    cut.push_back(std::move(box));
  }
  for (std::int64_t r = 0; r < ranks; ++r) {
    Holding& holding = holdings[static_cast<std::size_t>(r)];
    if (boxes == 1) {
      hold_whole(holding, name);
    } else {
      holding.pieces.push_back({name, cut[static_cast<std::size_t>(r % boxes)], holding.rank});
    }
  }
}

std::vector<Holding> holdings_of(const SimOptions& options, const std::vector<TensorMeta>& metadata,
                                 Random& random) {
  std::vector<Holding> holdings(options.trainers);
  const std::size_t mask_bytes = (metadata.size() + 7) / 8;
  for (std::uint32_t r = 0; r < options.trainers; ++r) {
    holdings[r].rank = r;
    holdings[r].digest = metadata_digest(metadata);
    holdings[r].whole.assign(mask_bytes, 0);
  }
  const auto hold = [&](std::uint32_t rank, std::uint32_t name) { hold_whole(holdings[rank], name); };
  for (std::uint32_t name = 0; name < metadata.size(); ++name) {
    switch (options.holdings) {
      case Holdings::kEverybody:
        for (std::uint32_t r = 0; r < options.trainers; ++r) hold(r, name);
        break;
      case Holdings::kStages:
        hold(static_cast<std::uint32_t>(name * options.trainers / metadata.size()), name);
        break;
      case Holdings::kRandom: {
        hold(name < options.trainers ? name : static_cast<std::uint32_t>(random.below(options.trainers)),
             name);
        for (std::uint32_t r = 0; r < options.trainers; ++r) {
          if (random.chance(0.3)) hold(r, name);
        }
        break;
      }
      case Holdings::kRows: {
        const std::vector<std::int64_t>& shape = metadata[name].shape;
        if (shape.size() < 2) {
          for (std::uint32_t r = 0; r < options.trainers; ++r) hold(r, name);
          break;
        }
        for (std::uint32_t r = 0; r < options.trainers; ++r) {
          const std::int64_t from = shape[0] * r / options.trainers,
                             to = shape[0] * (r + 1) / options.trainers;
          if (options.trainers == 1) {
            hold(r, name);
          } else if (to > from) {
            holdings[r].pieces.push_back({name, Box{{from, 0}, {to - from, shape[1]}}, r});
          }
        }
        break;
      }
      case Holdings::kBoxes:
        hold_boxes(metadata[name], name, holdings, random);
        break;
    }
  }
  return holdings;
}

}  // namespace

std::uint64_t element_bytes(DType dtype) {
  return static_cast<std::uint64_t>(dtype_bits(dtype)) / 8;
}

std::byte source_byte(std::uint32_t name, std::uint64_t element, std::uint64_t byte, std::uint64_t version) {
  const std::uint64_t word = splitmix64(splitmix64(version << 32 | name) ^ element);
  return static_cast<std::byte>(word >> 8 * byte);
}

std::vector<std::uint64_t> positions_of(const Slice& slice) {
  std::vector<std::uint64_t> positions;
  for (const Region& region : slice.regions) {
    std::vector<std::int64_t> size, stride;
    for (const Dim& dim : region.dims) {
      size.push_back(dim.size);
      stride.push_back(dim.stride);
    }
    enumerate(region.offset, size, stride, [&](std::uint64_t at) { positions.push_back(at); });
  }
  return positions;
}

std::vector<std::uint64_t> positions_of(const Destination& window) {
  std::vector<std::uint64_t> positions;
  enumerate(window.offset, window.shape, window.stride, [&](std::uint64_t at) { positions.push_back(at); });
  return positions;
}

Result<SimModel> SimModel::make(const SimOptions& options, std::uint64_t seed) {
  Random random = Random(seed).fork(77);
  SimModel model;
  model.options = options;
  auto tables = std::make_shared<InitTables>();
  tables->metadata = metadata_of(options);
  SHARDPULL_ASSIGN_OR_RETURN(const std::vector<GatherGroup> groups, form_groups(tables->metadata));
  for (const GatherGroup& group : groups) tables->group_lens.push_back(group.count);
  for (std::uint32_t r = 0; r < options.trainers; ++r)
    tables->producers.push_back(fmt::format("sim:trainer-{}", r));
  SHARDPULL_ASSIGN_OR_RETURN(
      tables->ownership, resolve_ownership(tables->metadata, holdings_of(options, tables->metadata, random)));
  tables->producer_mappable.assign(options.trainers, 1);
  for (std::uint32_t r = 0; r < options.trainers; ++r) {
    model.resident.push_back(options.resident && random.chance(0.5));
    tables->producer_resident.push_back(model.resident[r] ? 1 : 0);
  }
  if (options.path == PathPolicy::kAuto || options.path == PathPolicy::kDirect) {
    for (std::uint32_t r = 0; r < options.trainers; ++r)
      tables->producer_mappable[r] = random.chance(0.3) ? 1 : 0;
    tables->export_pack_limit = 512;  // the matrices are above it, vectors below
  }
  tables->num_consumers = options.tp * options.pp * options.replicas;
  tables->num_replicas = options.replicas;
  tables->workers_per_replica = options.share_slots ? 0 : tables->num_consumers;
  tables->ring_depth = options.ring_depth;
  tables->transport = options.transport;
  tables->integrity = options.integrity;
  SHARDPULL_RETURN_IF_ERROR(validate(*tables));

  PlanOptions plan;
  plan.path = options.path;
  plan.max_chunk_bytes = options.max_chunk_bytes;
  plan.chunk_split = options.chunk_split;
  plan.pull_split = options.pull_split;
  for (std::uint32_t c = 0; c < tables->num_consumers; ++c) {
    const std::uint32_t in_replica = c % (options.tp * options.pp);
    model.recordings.push_back(
        record(options, tables->metadata, in_replica / options.tp, in_replica % options.tp));
    SHARDPULL_ASSIGN_OR_RETURN(WorkerPlan worker, plan_worker(*tables, model.recordings.back(), c, plan));
    model.plans.push_back(std::make_shared<const WorkerPlan>(std::move(worker)));
    model.staged.push_back(random.chance(0.5));
  }

  const auto owners = group_owners(*tables);
  const Ownership& own = tables->ownership;
  model.owned_groups.resize(options.trainers);
  model.held.resize(options.trainers);
  for (std::uint32_t r = 0; r < options.trainers; ++r) {
    for (std::uint32_t g = 0; g < owners.size(); ++g) {
      if (std::binary_search(owners[g].begin(), owners[g].end(), r)) model.owned_groups[r].push_back(g);
    }
    const auto holds = [&](std::uint32_t owner_class) {
      return std::binary_search(own.owner_sets[owner_class].begin(), own.owner_sets[owner_class].end(), r);
    };
    for (std::uint32_t name = 0; name < tables->metadata.size(); ++name) {
      if (own.name_owner_class.empty()) {
        model.held[r].emplace_back(name, 0);
      } else if (own.name_owner_class[name] >= 0 &&
                 holds(static_cast<std::uint32_t>(own.name_owner_class[name]))) {
        model.held[r].emplace_back(name, 0);
      }
    }
    for (std::uint32_t p = 0; p < own.pieces.size(); ++p) {
      if (holds(own.pieces[p].owner_class)) model.held[r].emplace_back(own.pieces[p].name, p + 1);
    }
    std::sort(model.held[r].begin(), model.held[r].end());
  }
  model.tables = std::move(tables);
  return model;
}

std::uint32_t SimModel::workers_per_replica() const {
  return options.tp * options.pp;
}

const std::vector<std::int64_t>& SimModel::shape_of(std::uint32_t name, std::uint32_t piece) const {
  return piece == 0 ? tables->metadata[name].shape : tables->ownership.pieces[piece - 1].box.size;
}

std::uint64_t SimModel::global_element(std::uint32_t name, std::uint32_t piece,
                                       std::uint64_t position) const {
  if (piece == 0) return position;
  const Box& box = tables->ownership.pieces[piece - 1].box;
  const std::vector<std::int64_t>& shape = tables->metadata[name].shape;
  std::uint64_t global = 0, scale = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    const auto size = static_cast<std::uint64_t>(box.size[d]);
    global += (position % size + static_cast<std::uint64_t>(box.start[d])) * scale;
    position /= size;
    scale *= static_cast<std::uint64_t>(shape[d]);
  }
  return global;
}

std::vector<std::byte> SimModel::expected(std::uint32_t consumer, std::uint32_t parameter,
                                          const std::vector<std::uint64_t>& versions) const {
  const Recording& recording = recordings[consumer];
  const RecordedParameter& p = recording.parameters[parameter];
  const std::uint64_t width = element_bytes(p.dtype);
  std::vector<std::byte> bytes(static_cast<std::uint64_t>(product(p.shape)) * width, kUnwritten);
  const bool loaded =
      std::any_of(recording.scatters.begin(), recording.scatters.end(), [&](const Scatter& scatter) {
        return recording.parameters[scatter.destination.parameter].module == p.module &&
               versions[scatter.name] != 0;
      });
  if (!loaded) return bytes;
  for (const Fill& fill : recording.fills) {
    if (fill.destination.parameter != parameter) continue;
    for (const std::uint64_t at : positions_of(fill.destination)) {
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at * width), width, std::byte{0});
    }
  }
  for (const Scatter& scatter : recording.scatters) {
    if (scatter.destination.parameter != parameter) continue;
    const auto from = positions_of(scatter.slice), to = positions_of(scatter.destination);
    for (std::size_t i = 0; i < from.size(); ++i) {
      for (std::uint64_t b = 0; b < width; ++b)
        bytes[to[i] * width + b] = source_byte(scatter.name, from[i], b, versions[scatter.name]);
    }
  }
  return bytes;
}

NameSet SimModel::draw_names(Random& random) const {
  NameSet names((tables->metadata.size() + 7) / 8, 0);
  const auto add = [&](std::uint32_t name) {
    if (names[name / 8] >> name % 8 & 1) return false;
    names[name / 8] = static_cast<std::uint8_t>(names[name / 8] | 1u << name % 8);
    return true;
  };
  const auto count = static_cast<std::uint32_t>(tables->metadata.size());
  for (std::uint32_t n = 1 + static_cast<std::uint32_t>(random.below(count / 2)); n > 0; --n)
    add(static_cast<std::uint32_t>(random.below(count)));
  for (bool grown = true; grown;) {
    grown = false;
    for (std::uint32_t c = 0; c < recordings.size(); ++c) {
      const Recording& recording = recordings[c];
      for (const Scatter& scatter : recording.scatters) {
        const std::uint32_t module = recording.parameters[scatter.destination.parameter].module;
        if (!listed(names, scatter.name) && touches(c, module, names)) grown = add(scatter.name) || grown;
      }
    }
  }
  return names;
}

NameSet SimModel::half_a_module() const {
  const auto q = std::find_if(tables->metadata.begin(), tables->metadata.end(),
                              [](const TensorMeta& meta) { return meta.name == "layers.0.q.weight"; });
  const auto name = static_cast<std::size_t>(q - tables->metadata.begin());
  NameSet names((tables->metadata.size() + 7) / 8, 0);
  names[name / 8] = static_cast<std::uint8_t>(1u << name % 8);
  return names;
}

bool SimModel::touches(std::uint32_t consumer, std::uint32_t module, const NameSet& names) const {
  const Recording& recording = recordings[consumer];
  return std::any_of(recording.scatters.begin(), recording.scatters.end(), [&](const Scatter& scatter) {
    return recording.parameters[scatter.destination.parameter].module == module &&
           listed(names, scatter.name);
  });
}

}  // namespace shardpull::sim
