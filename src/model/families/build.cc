#include "model/families/build.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string_view>
#include <unordered_map>

#include "base/checked.h"
#include "base/status_macros.h"
#include "model/describe.h"

namespace shardpull {
namespace {

using families::Bias;
using families::Cut;
using families::Extent;
using families::Family;
using families::IgnoredName;
using families::IndexBuffer;
using families::ModuleRow;
using families::Place;
using families::Section;

constexpr std::int64_t kVocabAlignment = 64;  // vLLM's DEFAULT_VOCAB_PADDING_SIZE

constexpr std::string_view kNestedSource = "model.language_model.";
constexpr std::string_view kNestedWorker = "language_model.";

Status refused(std::string message, Reason reason = Reason::kBadArgument, std::string tensor = {}) {
  return Status(StatusCode::kInvalidArgument, std::move(message),
                ErrorInfo{.reason = reason, .tensor = std::move(tensor)});
}

// ---- a rank's part of a dim --------------------------------------------------------------------------

// Of a dim of `total`: this rank holds [start, start + length), in a local dim of `local` >= length.
struct Share {
  std::int64_t total = 0, start = 0, length = 0, local = 0;
  bool whole() const { return start == 0 && length == total; }
};

struct Sizes {  // of one layer
  const ModelConfig* config = nullptr;
  std::int64_t key_value_heads = 0;

  std::int64_t of(Extent extent) const {
    switch (extent) {
      case Extent::kNone:
        return 1;
      case Extent::kHidden:
        return config->hidden_size;
      case Extent::kIntermediate:
        return config->intermediate_size;
      case Extent::kQuery:
        return config->num_attention_heads * config->head_dim;
      case Extent::kKeyValue:
        return key_value_heads * config->head_dim;
      case Extent::kHeadDim:
        return config->head_dim;
      case Extent::kVocab:
        return config->vocab_size;
      case Extent::kPositions:
        return config->max_position_embeddings;
      case Extent::kTokenTypes:
        return config->type_vocab_size;
    }
    return 0;
  }
};

std::string_view field_of(Extent extent) {
  switch (extent) {
    case Extent::kNone:
      break;
    case Extent::kHidden:
      return "hidden_size";
    case Extent::kIntermediate:
      return "intermediate_size";
    case Extent::kQuery:
      return "num_attention_heads";
    case Extent::kKeyValue:
      return "num_key_value_heads";
    case Extent::kHeadDim:
      return "head_dim";
    case Extent::kVocab:
      return "vocab_size";
    case Extent::kPositions:
      return "max_position_embeddings";
    case Extent::kTokenTypes:
      return "type_vocab_size";
  }
  return "size";
}

// An even cut into `parts` of which `rank` gets one.
Result<Share> even_share(std::int64_t total, std::int64_t unit, std::string_view what, std::int64_t parts,
                         std::int64_t rank, const std::string& module) {
  if (total % parts != 0) {
    return refused("tp=" + std::to_string(parts) + " does not divide " + std::string(what) + " " +
                   std::to_string(total) + " of " + module);
  }
  const std::int64_t length = total / parts * unit;
  return Share{total * unit, rank * length, length, length};
}

Result<Share> share(const Sizes& sizes, Extent extent, Cut cut, int tp, int rank, const std::string& module) {
  const std::int64_t total = sizes.of(extent);
  switch (cut) {
    case Cut::kWhole:
      return Share{total, 0, total, total};
    case Cut::kEven:
      return even_share(total, 1, field_of(extent), tp, rank, module);
    case Cut::kQueryHeads: {
      const std::int64_t heads = sizes.config->num_attention_heads;
      return even_share(heads, total / heads, "num_attention_heads", tp, rank, module);
    }
    case Cut::kKeyValueHeads: {
      const std::int64_t heads = sizes.key_value_heads;
      if (heads >= tp) return even_share(heads, total / heads, "num_key_value_heads", tp, rank, module);
      if (tp % heads != 0) {
        return refused("tp=" + std::to_string(tp) + " is no multiple of num_key_value_heads " +
                       std::to_string(heads) + " of " + module + ", so its heads cannot be shared evenly");
      }
      return even_share(heads, total / heads, "num_key_value_heads", heads, rank / (tp / heads), module);
    }
    case Cut::kVocab: {
      const std::int64_t padded = ceil_div(total, kVocabAlignment) * kVocabAlignment;
      if (padded % tp != 0) {
        return refused("tp=" + std::to_string(tp) + " does not divide " + std::string(field_of(extent)) +
                       " " + std::to_string(total) + " padded to " + std::to_string(padded) + " rows of " +
                       module);
      }
      const std::int64_t local = padded / tp;
      const std::int64_t start = std::min(rank * local, total);
      return Share{total, start, std::min(local, total - start), local};
    }
  }
  return Share{};
}

// ---- loaders -----------------------------------------------------------------------------------------

// How the parts of one parameter are cut out of their checkpoint tensors. Shared by the parameter's loader.
struct Cutter {
  struct Part {
    std::string shard;
    Share rows;
    std::int64_t local_start = 0;  // in the parameter
  };
  std::vector<Part> parts;
  std::optional<Share> columns;  // absent: one dim

  std::vector<std::int64_t> shape_of(std::int64_t rows) const {
    return columns ? std::vector<std::int64_t>{rows, columns->total} : std::vector<std::int64_t>{rows};
  }
  std::int64_t fused_rows() const {
    return std::accumulate(parts.begin(), parts.end(), std::int64_t{0},
                           [](std::int64_t sum, const Part& part) { return sum + part.rows.total; });
  }
  // Of the checkpoint tensor that feeds `shard`; "" with several parts is the fused one.
  std::vector<std::int64_t> source_shape(std::string_view shard) const {
    for (const Part& part : parts) {
      if (part.shard == shard) return shape_of(part.rows.total);
    }
    return shape_of(fused_rows());
  }

  Status load(Parameter& parameter, const Tensor& loaded, const std::string& shard) const {
    const std::vector<std::int64_t> expected = source_shape(shard);
    if (loaded.shape() != expected) {
      return refused(loaded.name() + " has shape " + describe(loaded.shape()) + "; config.json implies " +
                         describe(expected),
                     Reason::kCheckpointMalformed, loaded.name());
    }
    std::int64_t source_start = 0;  // of the part in a tensor fused on disk
    for (const Part& part : parts) {
      const bool alone = part.shard == shard;
      if (alone) source_start = 0;
      if (alone || shard.empty()) SHARDPULL_RETURN_IF_ERROR(load_part(parameter, loaded, part, source_start));
      if (alone) return {};
      source_start += part.rows.total;
    }
    return {};
  }

 private:
  Status load_part(Parameter& parameter, const Tensor& loaded, const Part& part,
                   std::int64_t source_start) const {
    Tensor source = loaded;
    if (part.rows.length != loaded.size(0)) {
      SHARDPULL_ASSIGN_OR_RETURN(source, source.narrow(0, source_start + part.rows.start, part.rows.length));
    }
    if (columns && !columns->whole()) {
      SHARDPULL_ASSIGN_OR_RETURN(source, source.narrow(1, columns->start, columns->length));
    }
    ParameterView target = parameter.data();
    if (part.rows.length != parameter.shape()[0]) {
      SHARDPULL_ASSIGN_OR_RETURN(target, target.narrow(0, part.local_start, part.rows.length));
    }
    return target.copy_(source);
  }
};

// ---- the model ---------------------------------------------------------------------------------------

// How far apart two names are (insertions, deletions, replacements).
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

class FamilyModel final : public Model {
 public:
  // What a checkpoint tensor is to this worker.
  struct Source {
    std::vector<std::int64_t> shape;  // that the config implies
    std::string unused;               // why this worker does not keep it, when nothing is in `targets`
    struct Target {
      Parameter* parameter;
      std::string shard;
    };
    std::vector<Target> targets;
    std::string instead_of;  // of a tensor fused on disk: the module whose parts it replaces
  };

  std::map<std::string, Source, std::less<>> sources;
  std::map<const Parameter*, std::vector<std::string>> fed_by;
  std::map<std::string, std::vector<std::string>>
      fused;  // fused name -> the names it replaces, where this worker keeps them
  std::vector<IgnoredName> ignored;
  std::string tied_head;  // the name a tied head would have; empty when not tied
  std::string tied_to;

  Status load_weights(const std::vector<NamedTensor>& weights) override {
    std::set<std::string_view> given;
    std::vector<std::string> unknown;
    for (const NamedTensor& weight : weights) {
      given.insert(weight.name);
      const auto source = sources.find(weight.name);
      if ((source == sources.end() || source->second.targets.empty()) &&
          explain_unused(weight.name).empty()) {
        unknown.push_back(weight.name);
      }
    }
    if (!unknown.empty()) return unknown_names(unknown);
    SHARDPULL_RETURN_IF_ERROR(check_fused(given));
    for (const NamedTensor& weight : weights) {
      const auto source = sources.find(weight.name);
      if (source == sources.end()) continue;
      for (const Source::Target& target : source->second.targets) {
        SHARDPULL_RETURN_IF_ERROR(target.parameter->load(weight.tensor, target.shard));
      }
    }
    return {};
  }

  std::string explain_unused(std::string_view name) const override {
    if (const auto source = sources.find(name); source != sources.end()) return source->second.unused;
    if (!tied_head.empty() && name == tied_head) return "tied head: " + tied_to + " feeds it";
    for (const IgnoredName& rule : ignored) {
      if (rule.match == IgnoredName::Match::kPrefix ? name.starts_with(rule.pattern)
                                                    : name.ends_with(rule.pattern)) {
        return std::string(rule.reason);
      }
    }
    return {};
  }

  std::vector<std::string> sources_of(const Parameter& parameter) const override {
    const auto names = fed_by.find(&parameter);
    return names == fed_by.end() ? std::vector<std::string>() : names->second;
  }

  Status unknown_names(const std::vector<std::string>& unknown) const {
    std::vector<std::string> lines;
    for (const std::string& name : unknown) {
      std::string line = name;
      if (lines.size() < kMaxListed) {
        const std::string* nearest = nullptr;
        std::size_t best = std::max<std::size_t>(3, name.size() / 4);
        for (const auto& [known, source] : sources) {
          const std::size_t here = distance(name, known);
          if (here < best) {
            best = here;
            nearest = &known;
          }
        }
        if (nearest != nullptr) line += " (nearest: " + *nearest + ")";
      }
      lines.push_back(std::move(line));
    }
    return refused(std::to_string(unknown.size()) +
                       " name(s) that this architecture does not have: " + describe_list(lines),
                   Reason::kBakeFailed, unknown.front());
  }

  // A part may come fused or separate, not both.
  Status check_fused(const std::set<std::string_view>& given) const {
    for (const auto& [name, parts] : fused) {
      if (!given.contains(name)) continue;
      for (const std::string& part : parts) {
        if (given.contains(part)) {
          return refused(part + " is in the checkpoint twice: by itself and fused in " + name,
                         Reason::kCheckpointMalformed, part);
        }
      }
    }
    return {};
  }
};

// ---- the builder -------------------------------------------------------------------------------------

class Builder {
 public:
  Builder(const Family& family, const ModelConfig& config, const InferenceLayout& layout,
          const WorkerCoordinates& at, const BuildOptions& options)
      : family_(family),
        config_(config),
        layout_(layout),
        at_(at),
        options_(options),
        dtype_(options.dtype.value_or(config.dtype.value_or(DType::kF32))),
        nested_(is_wrapped(config)),
        tied_(config.tie_word_embeddings && family.has_head),
        stages_(pipeline_stages(config.num_hidden_layers, layout.pp)),
        model_(std::make_unique<FamilyModel>()) {}

  static bool is_wrapped(const ModelConfig& config) {
    for (const families::Wrapper& wrapper : families::wrappers()) {
      if (std::find(config.architectures.begin(), config.architectures.end(), wrapper.architecture) !=
          config.architectures.end()) {
        return true;
      }
    }
    return false;
  }

  Result<std::unique_ptr<Model>> build() {
    model_->ignored.assign(family_.ignored.begin(), family_.ignored.end());
    for (const IndexBuffer& buffer : family_.buffers) SHARDPULL_RETURN_IF_ERROR(add_buffer(buffer));
    for (const ModuleRow& row : family_.rows) {
      if (row.place == Place::kFirstStage || row.place == Place::kEmbedding)
        SHARDPULL_RETURN_IF_ERROR(add_row(row, -1));
    }
    for (std::int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      for (const ModuleRow& row : family_.rows) {
        if (row.place == Place::kLayer) SHARDPULL_RETURN_IF_ERROR(add_row(row, layer));
      }
    }
    for (const ModuleRow& row : family_.rows) {
      if (row.place == Place::kLastStage || row.place == Place::kHead)
        SHARDPULL_RETURN_IF_ERROR(add_row(row, -1));
    }
    return std::unique_ptr<Model>(std::move(model_));
  }

 private:
  bool first_stage() const { return at_.pp_rank == 0; }
  bool last_stage() const { return at_.pp_rank == layout_.pp - 1; }

  std::string source_name(std::string_view name, std::int64_t layer) const {
    if (layer >= 0)
      return outer_source(std::string(family_.source_layer_prefix) + std::to_string(layer) + "." +
                          std::string(name));
    return outer_source(std::string(name));
  }
  std::string outer_source(std::string name) const {
    if (nested_ && name.starts_with("model.")) return std::string(kNestedSource) + name.substr(6);
    return name;
  }
  std::string worker_name(std::string_view name, std::int64_t layer) const {
    std::string out = nested_ ? std::string(kNestedWorker) : std::string();
    if (layer >= 0) out += std::string(family_.worker_layer_prefix) + std::to_string(layer) + ".";
    return out + std::string(name);
  }

  // Whether this worker keeps the row; if not, why.
  bool kept(const ModuleRow& row, std::int64_t layer, std::string& why) const {
    const std::string here = ", this worker is stage " + std::to_string(at_.pp_rank);
    switch (row.place) {
      case Place::kFirstStage:
        why = "other stage: stage 0" + here;
        return first_stage();
      case Place::kEmbedding:
        why = "other stage: stage 0" + here;
        return first_stage() || (tied_ && !options_.separate_tied_head && last_stage());
      case Place::kLayer: {
        const auto& [begin, end] = stages_[static_cast<std::size_t>(at_.pp_rank)];
        int owner = 0;
        while (layer >= stages_[static_cast<std::size_t>(owner)].second) ++owner;
        why = "other stage: layer " + std::to_string(layer) + " is on stage " + std::to_string(owner) + here;
        return layer >= begin && layer < end;
      }
      case Place::kLastStage:
      case Place::kHead:
        why = "other stage: stage " + std::to_string(layout_.pp - 1) + here;
        return last_stage();
    }
    return false;
  }

  bool has_bias(Bias bias) const {
    switch (bias) {
      case Bias::kNever:
        return false;
      case Bias::kAlways:
        return true;
      case Bias::kAttentionBias:
        return config_.attention_bias;
      case Bias::kMlpBias:
        return config_.mlp_bias;
    }
    return false;
  }

  Status add_row(const ModuleRow& row, std::int64_t layer) {
    std::string why;
    const bool keep = kept(row, layer, why);
    bool from_embedding = false;
    if (row.place == Place::kHead && tied_) {
      model_->tied_head = source_name(row.sections[0].source, layer) + ".weight";
      model_->tied_to = embedding_source() + ".weight";
      if (!options_.separate_tied_head) {
        Module* const embedding = model_->find_module(worker_name(embedding_row()->name, -1));
        return keep && embedding != nullptr
                   ? model_->add_module_alias(worker_name(row.name, layer), *embedding)
                   : Status();
      }
      from_embedding = true;
    }

    const std::string name = worker_name(row.name, layer);
    const Sizes sizes{&config_,
                      layer >= 0 ? config_.num_key_value_heads[static_cast<std::size_t>(layer)] : 0};
    auto cutter = std::make_shared<Cutter>();
    std::int64_t local_rows = 0;
    std::int64_t padding_first = 0, padding_end = 0;
    std::vector<std::string> section_sources;
    for (const Section& section : row.sections) {
      if (section.source.empty()) break;
      SHARDPULL_ASSIGN_OR_RETURN(const Share rows,
                                 share(sizes, section.rows, section.cut, layout_.tp, at_.tp_rank, name));
      cutter->parts.push_back({std::string(section.shard), rows, local_rows});
      if (rows.local > rows.length) {
        padding_first = local_rows + rows.length;
        padding_end = local_rows + rows.local;
      }
      local_rows += rows.local;
      section_sources.push_back(from_embedding ? embedding_source() : source_name(section.source, layer));
    }
    auto bias_cutter = std::make_shared<Cutter>(*cutter);
    std::vector<std::int64_t> shape{local_rows};
    if (row.columns != Extent::kNone) {
      SHARDPULL_ASSIGN_OR_RETURN(const Share columns,
                                 share(sizes, row.columns, row.column_cut, layout_.tp, at_.tp_rank, name));
      cutter->columns = columns;
      shape.push_back(columns.local);
    }

    Module* module = nullptr;
    if (keep) {
      SHARDPULL_ASSIGN_OR_RETURN(module, model_->add_module(name, std::string(row.type)));
    }
    SHARDPULL_RETURN_IF_ERROR(
        add_parameter(row, layer, module, why, "weight", shape, cutter, section_sources));
    if (module != nullptr && padding_end > padding_first) {
      SHARDPULL_RETURN_IF_ERROR(module->declare_padding_rows("weight", padding_first, padding_end));
    }
    if (has_bias(row.bias)) {
      SHARDPULL_RETURN_IF_ERROR(
          add_parameter(row, layer, module, why, "bias", {local_rows}, bias_cutter, section_sources));
    }
    return {};
  }

  // Adds "weight" or "bias" to `module` (null: another stage has it) and registers the names that feed it.
  Status add_parameter(const ModuleRow& row, std::int64_t layer, Module* module, const std::string& why,
                       std::string parameter_name, std::vector<std::int64_t> shape,
                       std::shared_ptr<const Cutter> cutter,
                       const std::vector<std::string>& section_sources) {
    Parameter* parameter = nullptr;
    if (module != nullptr) {
      SHARDPULL_ASSIGN_OR_RETURN(
          parameter,
          module->add_parameter(parameter_name, dtype_, std::move(shape),
                                [cutter](Parameter& target, const Tensor& loaded, const std::string& shard) {
                                  return cutter->load(target, loaded, shard);
                                }));
    }
    const auto add_source = [&](const std::string& source_module, const std::string& shard) {
      const std::string name = source_module + "." + parameter_name;
      FamilyModel::Source& source = model_->sources[name];
      source.shape = cutter->source_shape(shard);
      if (parameter != nullptr) {
        source.targets.push_back({parameter, shard});
        source.unused.clear();
        model_->fed_by[parameter].push_back(name);
      } else if (source.targets.empty()) {
        source.unused = why;
      }
      return name;
    };
    std::vector<std::string> parts;
    for (std::size_t s = 0; s < section_sources.size(); ++s)
      parts.push_back(add_source(section_sources[s], cutter->parts[s].shard));
    if (!row.fused_source.empty()) {
      const std::string name = source_name(row.fused_source, layer) + "." + parameter_name;
      FamilyModel::Source& source = model_->sources[name];
      source.shape = cutter->shape_of(cutter->fused_rows());
      source.instead_of = parts.front();
      if (parameter != nullptr) {
        source.targets.push_back({parameter, ""});
      } else {
        source.unused = why;
      }
      model_->fused[name] = parts;
    }
    return {};
  }

  Status add_buffer(const IndexBuffer& buffer) {
    const std::int64_t size = Sizes{&config_, 0}.of(buffer.size);
    const std::string name = outer_source(std::string(buffer.source));
    FamilyModel::Source& source = model_->sources[name];
    source.shape = {1, size};
    if (!first_stage()) {
      source.unused = "other stage: stage 0, this worker is stage " + std::to_string(at_.pp_rank);
      return {};
    }
    std::vector<std::byte> initial(static_cast<std::size_t>(size) * sizeof(std::int64_t));
    for (std::int64_t i = 0; i < size; ++i) {
      std::memcpy(initial.data() + static_cast<std::size_t>(i) * sizeof i, &i, sizeof i);
    }
    SHARDPULL_ASSIGN_OR_RETURN(Module* const module,
                               model_->add_module(worker_name(buffer.module, -1), std::string(buffer.type)));
    SHARDPULL_ASSIGN_OR_RETURN(
        Parameter* const parameter,
        module->add_buffer(std::string(buffer.name), DType::kI64, {1, size}, std::move(initial),
                           [size](Parameter& target, const Tensor& loaded, const std::string&) -> Status {
                             if (loaded.shape() != std::vector<std::int64_t>{1, size}) {
                               return refused(loaded.name() + " has shape " + describe(loaded.shape()) +
                                                  "; config.json implies " + describe({1, size}),
                                              Reason::kCheckpointMalformed, loaded.name());
                             }
                             return target.data().copy_(loaded);
                           }));
    source.targets.push_back({parameter, ""});
    model_->fed_by[parameter].push_back(name);
    return {};
  }

  const ModuleRow* embedding_row() const {
    for (const ModuleRow& row : family_.rows) {
      if (row.place == Place::kEmbedding) return &row;
    }
    return nullptr;  // a family with a head has one
  }
  std::string embedding_source() const { return source_name(embedding_row()->sections[0].source, -1); }

  const Family& family_;
  const ModelConfig& config_;
  const InferenceLayout layout_;
  const WorkerCoordinates at_;
  const BuildOptions options_;
  const DType dtype_;
  const bool nested_;
  const bool tied_;
  const std::vector<std::pair<std::int64_t, std::int64_t>> stages_;
  std::unique_ptr<FamilyModel> model_;
};

Status check_config(const Family& family, const ModelConfig& config) {
  for (const std::string_view field : family.required_fields)
    SHARDPULL_RETURN_IF_ERROR(config.require({field}));
  if (config.head_dim <= 0) SHARDPULL_RETURN_IF_ERROR(config.require({"head_dim"}));
  const auto layers = static_cast<std::size_t>(config.num_hidden_layers);
  if (config.num_key_value_heads.size() != layers) {
    return refused(config.origin + ": num_key_value_heads has " +
                       std::to_string(config.num_key_value_heads.size()) + " entries for " +
                       std::to_string(layers) + " layers",
                   Reason::kCheckpointMalformed);
  }
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const std::int64_t heads = config.num_key_value_heads[layer];
    if (heads < 1 || config.num_attention_heads % heads != 0) {
      return refused(config.origin + ": num_key_value_heads " + std::to_string(heads) + " of layer " +
                         std::to_string(layer) + " does not divide num_attention_heads " +
                         std::to_string(config.num_attention_heads),
                     Reason::kCheckpointMalformed);
    }
  }
  return {};
}

Result<std::unique_ptr<FamilyModel>> whole_model(const ModelConfig& config) {
  SHARDPULL_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, build_model(config, InferenceLayout{}, 0));
  return std::unique_ptr<FamilyModel>(static_cast<FamilyModel*>(model.release()));
}

// Compares a head with the embedding it is tied to. `rows` for the message.
Status compare_tied(const std::string& head, const std::string& embedding, std::span<const std::byte> a,
                    std::span<const std::byte> b, std::int64_t rows) {
  const auto differ = [&](std::string where) {
    return refused(head + " differs from " + embedding + " " + where +
                       ", although config.json ties them (tie_word_embeddings=true): one of the two is wrong",
                   Reason::kCheckpointMalformed, head);
  };
  if (a.size() != b.size()) return differ("in size");
  if (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0) return {};
  const auto first = static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
  const std::size_t row_bytes =
      std::max<std::size_t>(1, a.size() / static_cast<std::size_t>(std::max<std::int64_t>(1, rows)));
  return differ("from byte " + std::to_string(first) + " (row " + std::to_string(first / row_bytes) + ") on");
}

}  // namespace

Result<WorkerCoordinates> worker_coordinates(const InferenceLayout& layout, std::int64_t consumer_id) {
  if (layout.tp < 1 || layout.pp < 1 || layout.dp < 1 || layout.replicas < 1) {
    return refused("the inference layout tp=" + std::to_string(layout.tp) +
                   ",pp=" + std::to_string(layout.pp) + ",dp=" + std::to_string(layout.dp) +
                   ",replicas=" + std::to_string(layout.replicas) + " has a factor below 1");
  }
  if (consumer_id < 0 || consumer_id >= layout.workers()) {
    return refused("worker id " + std::to_string(consumer_id) + " is outside [0, " +
                   std::to_string(layout.workers()) + ")");
  }
  WorkerCoordinates at;
  at.tp_rank = static_cast<int>(consumer_id % layout.tp);
  consumer_id /= layout.tp;
  at.pp_rank = static_cast<int>(consumer_id % layout.pp);
  consumer_id /= layout.pp;
  at.dp_rank = static_cast<int>(consumer_id % layout.dp);
  at.replica = static_cast<int>(consumer_id / layout.dp);
  return at;
}

std::vector<std::pair<std::int64_t, std::int64_t>> pipeline_stages(std::int64_t layers, int pp) {
  std::vector<std::pair<std::int64_t, std::int64_t>> stages;
  const std::int64_t each = layers / pp;
  const std::int64_t rest = layers % pp;
  std::int64_t begin = 0;
  for (int stage = 0; stage < pp; ++stage) {
    const bool gets_one_more = stage < pp - 1 && stage >= pp - 1 - rest;
    const std::int64_t end = begin + each + (gets_one_more ? 1 : 0);
    stages.emplace_back(begin, end);
    begin = end;
  }
  return stages;
}

std::vector<std::string> known_architectures() {
  std::vector<std::string> names;
  for (const Family& family : families::catalogue()) {
    for (const std::string_view architecture : family.architectures) names.emplace_back(architecture);
  }
  for (const families::Wrapper& wrapper : families::wrappers()) names.emplace_back(wrapper.architecture);
  return names;
}

Result<const families::Family*> find_family(const ModelConfig& config) {
  for (const std::string& architecture : config.architectures) {
    for (const Family& family : families::catalogue()) {
      if (std::find(family.architectures.begin(), family.architectures.end(), architecture) !=
          family.architectures.end()) {
        return &family;
      }
    }
  }
  std::string what = "unknown architecture " + config.architecture();
  if (Builder::is_wrapped(config)) {
    for (const Family& family : families::catalogue()) {
      if (config.nested && std::find(family.text_types.begin(), family.text_types.end(),
                                     config.text_model_type) != family.text_types.end()) {
        return &family;
      }
    }
    what = "architecture " + config.architecture() + " with a language model of unknown type \"" +
           config.text_model_type + "\"";
  }
  std::string known;
  for (const std::string& name : known_architectures()) known += (known.empty() ? "" : ", ") + name;
  return Status(StatusCode::kUnimplemented, config.origin + ": " + what + "; known: " + known,
                ErrorInfo{.reason = Reason::kUnknownArchitecture});
}

namespace {

// The families lay out plain weights; scales and packed types would be missed in silence.
Status refuse_quantised(const ModelConfig& config) {
  for (const char* const key : {"quantization_config", "compression_config"}) {
    const auto found = config.other.find(key);
    if (found == config.other.end() || found->second == "null") continue;
    return refused(std::string("config.json has a ") + key + ": quantised checkpoints are not supported");
  }
  const std::optional<DType> dtype = config.dtype;
  const bool plain = !dtype || *dtype == DType::kF32 || *dtype == DType::kBF16 || *dtype == DType::kF16 ||
                     *dtype == DType::kF64;
  if (!plain) {
    return refused("config.json asks for dtype " + std::string(dtype_name(*dtype)) +
                   "; a model is built in F64, F32, BF16 or F16");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Model>> build_model(const families::Family& family, const ModelConfig& config,
                                           const InferenceLayout& layout, std::int64_t consumer_id,
                                           const BuildOptions& options) {
  SHARDPULL_ASSIGN_OR_RETURN(const WorkerCoordinates at, worker_coordinates(layout, consumer_id));
  SHARDPULL_RETURN_IF_ERROR(refuse_quantised(config));
  SHARDPULL_RETURN_IF_ERROR(check_config(family, config));
  if (layout.pp > 1 && !family.pipelines) {
    return refused("pp=" + std::to_string(layout.pp) + ": " + config.architecture() +
                   " cannot be cut into pipeline stages");
  }
  return Builder(family, config, layout, at, options).build();
}

Result<std::unique_ptr<Model>> build_model(const ModelConfig& config, const InferenceLayout& layout,
                                           std::int64_t consumer_id, const BuildOptions& options) {
  SHARDPULL_ASSIGN_OR_RETURN(const families::Family* const family, find_family(config));
  return build_model(*family, config, layout, consumer_id, options);
}

Result<std::vector<std::string>> check_checkpoint(const ModelConfig& config,
                                                  const std::vector<TensorMeta>& metadata,
                                                  const ReadTensor& read) {
  SHARDPULL_ASSIGN_OR_RETURN(const std::unique_ptr<FamilyModel> model, whole_model(config));
  std::map<std::string_view, std::uint32_t> names;
  std::set<std::string_view> given;
  std::vector<std::string> unknown, shapes;
  for (std::uint32_t n = 0; n < metadata.size(); ++n) {
    const TensorMeta& meta = metadata[n];
    if (!names.emplace(meta.name, n).second) {
      return refused("the checkpoint has the name " + meta.name + " twice", Reason::kCheckpointMalformed,
                     meta.name);
    }
    given.insert(meta.name);
    const auto source = model->sources.find(meta.name);
    if (source == model->sources.end()) {
      if (model->explain_unused(meta.name).empty()) unknown.push_back(meta.name);
    } else if (source->second.shape != meta.shape) {
      shapes.push_back(meta.name + " has shape " + describe(meta.shape) + "; config.json implies " +
                       describe(source->second.shape));
    }
  }
  if (!unknown.empty()) return model->unknown_names(unknown);
  if (!shapes.empty()) {
    return refused(describe_list(shapes, "; "), Reason::kCheckpointMalformed,
                   shapes.front().substr(0, shapes.front().find(' ')));
  }
  SHARDPULL_RETURN_IF_ERROR(model->check_fused(given));

  std::set<std::string, std::less<>> replaced;
  for (const auto& [name, parts] : model->fused) {
    if (given.contains(name)) replaced.insert(parts.begin(), parts.end());
  }
  std::vector<std::string> missing;
  for (const auto& module : model->modules()) {
    for (const auto& parameter : module->parameters()) {
      if (parameter->optional()) continue;
      for (std::string& name : model->sources_of(*parameter)) {
        if (!given.contains(name) && !replaced.contains(name)) missing.push_back(std::move(name));
      }
    }
  }
  if (!missing.empty()) {
    const std::string first = missing.front();
    return refused(
        std::to_string(missing.size()) +
            " tensor(s) that config.json implies are not in the checkpoint: " + describe_list(missing) +
            (std::find(missing.begin(), missing.end(), "lm_head.weight") != missing.end()
                 ? " (tie_word_embeddings is not true, so the head needs a tensor of its own)"
                 : ""),
        Reason::kCheckpointMalformed, first);
  }

  std::vector<std::string> notes;
  const auto head = names.find(model->tied_head);
  const auto embedding = names.find(model->tied_to);
  if (!model->tied_head.empty() && head != names.end() && embedding != names.end()) {
    const TensorMeta& a = metadata[head->second];
    const TensorMeta& b = metadata[embedding->second];
    if (a.dtype != b.dtype || a.shape != b.shape) {
      return refused(a.name + " " + std::string(dtype_name(a.dtype)) + " " + describe(a.shape) +
                         " cannot repeat " + b.name + " " + std::string(dtype_name(b.dtype)) + " " +
                         describe(b.shape) + ", although config.json ties them (tie_word_embeddings=true)",
                     Reason::kCheckpointMalformed, a.name);
    }
    if (read) {
      SHARDPULL_ASSIGN_OR_RETURN(const std::span<const std::byte> first, read(head->second));
      // `read` may reuse its buffer: keep the first answer.
      const std::vector<std::byte> copy(first.begin(), first.end());
      SHARDPULL_ASSIGN_OR_RETURN(const std::span<const std::byte> second, read(embedding->second));
      SHARDPULL_RETURN_IF_ERROR(compare_tied(a.name, b.name, copy, second, a.shape.empty() ? 1 : a.shape[0]));
      notes.push_back("redundant head: " + a.name + " repeats the tied " + b.name + " and is not used");
    } else {
      notes.push_back("redundant head: " + a.name + " is tied to " + b.name +
                      " and is not used; its bytes were not compared");
    }
  }
  return notes;
}

}  // namespace shardpull
