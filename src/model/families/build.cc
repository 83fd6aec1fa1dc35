#include "model/families/build.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "base/limits.h"
#include "base/status_macros.h"
#include "model/describe.h"
#include "model/families/cuts.h"
#include "model/families/family_model.h"

namespace shardpull {
namespace {

using families::Bias;
using families::Cutter;
using families::ExpertCutter;
using families::ExpertLayers;
using families::ExpertRow;
using families::Extent;
using families::Family;
using families::FamilyModel;
using families::IndexBuffer;
using families::ModuleRow;
using families::Place;
using families::Present;
using families::Section;
using families::Share;

constexpr std::string_view kNestedSource = "model.language_model.";
constexpr std::string_view kNestedWorker = "language_model.";

Status refused(std::string message, Reason reason = Reason::kBadArgument, std::string tensor = {}) {
  return Status(StatusCode::kInvalidArgument, std::move(message),
                ErrorInfo{.reason = reason, .tensor = std::move(tensor)});
}

// Whether a layer has routed experts.
bool is_expert_layer(const Family& family, const ModelConfig& config, std::int64_t layer) {
  switch (family.expert_layers) {
    case ExpertLayers::kNone:
      return false;
    case ExpertLayers::kStep:
      return config.num_experts.value_or(0) > 0 &&
             std::find(config.mlp_only_layers.begin(), config.mlp_only_layers.end(), layer) ==
                 config.mlp_only_layers.end() &&
             (layer + 1) % config.decoder_sparse_step.value_or(1) == 0;
    case ExpertLayers::kAfterDense:
      return config.num_experts.value_or(0) > 0 && layer >= config.first_k_dense_replace.value_or(0) &&
             layer % config.moe_layer_freq.value_or(1) == 0;
  }
  return false;
}

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
        wrapper_(wrapper_of(config)),
        nested_(wrapper_ != nullptr),
        tied_(config.tie_word_embeddings && family.has_head),
        stages_(pipeline_stages(config.num_hidden_layers, layout.pp)),
        model_(std::make_unique<FamilyModel>()) {}

  // The multimodal architecture around the language model; null when there is none.
  static const families::Wrapper* wrapper_of(const ModelConfig& config) {
    for (const families::Wrapper& wrapper : families::wrappers()) {
      if (std::find(config.architectures.begin(), config.architectures.end(), wrapper.architecture) !=
          config.architectures.end()) {
        return &wrapper;
      }
    }
    return nullptr;
  }

  Result<std::unique_ptr<Model>> build() {
    model_->ignored.assign(family_.ignored.begin(), family_.ignored.end());
    if (family_.expert_layers != ExpertLayers::kNone) {  // tens of thousands of names
      const std::int64_t names = config_.num_hidden_layers * (3 * config_.num_experts.value_or(0) + 32);
      model_->sources.reserve(std::min(static_cast<std::uint64_t>(names), kMaxTensors));
    }
    model_->prediction_layers = {outer_source(std::string(family_.source_layer_prefix)),
                                 config_.num_hidden_layers,
                                 config_.num_hidden_layers + config_.num_nextn_predict_layers.value_or(0)};
    for (const IndexBuffer& buffer : family_.buffers) SHARDPULL_RETURN_IF_ERROR(add_buffer(buffer));
    for (const ModuleRow& row : family_.rows) {
      if (row.place == Place::kFirstStage || row.place == Place::kEmbedding)
        SHARDPULL_RETURN_IF_ERROR(add_row(row, -1));
    }
    for (std::int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      for (const ModuleRow& row : family_.rows) {
        if (row.place == Place::kLayer && is_present(row.present, layer))
          SHARDPULL_RETURN_IF_ERROR(add_row(row, layer));
      }
      if (is_expert_layer(family_, config_, layer))
        SHARDPULL_RETURN_IF_ERROR(add_experts(family_.experts, layer));
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

  // Whether this worker keeps what has this place; if not, why.
  bool kept(Place place, std::int64_t layer, std::string& why) const {
    const std::string here = ", this worker is stage " + std::to_string(at_.pp_rank);
    switch (place) {
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
      case Bias::kRouterCorrection:
        return config_.topk_method.empty() || config_.topk_method == "noaux_tc";
    }
    return false;
  }

  bool is_present(Present present, std::int64_t layer) const {
    switch (present) {
      case Present::kAlways:
        return true;
      case Present::kDenseLayer:
        return !is_expert_layer(family_, config_, layer);
      case Present::kExpertLayer:
        return is_expert_layer(family_, config_, layer);
      case Present::kSharedExperts:
        return config_.n_shared_experts.value_or(0) > 0 && is_expert_layer(family_, config_, layer);
      case Present::kQueryLatent:
        return config_.q_lora_rank.has_value();
      case Present::kNoQueryLatent:
        return !config_.q_lora_rank.has_value();
    }
    return false;
  }

  Status add_row(const ModuleRow& row, std::int64_t layer) {
    std::string why;
    const bool keep = kept(row.place, layer, why);
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
    const std::int64_t key_value_heads =
        layer >= 0 ? config_.num_key_value_heads[static_cast<std::size_t>(layer)] : 0;
    auto cutter = std::make_shared<Cutter>();
    std::int64_t local_rows = 0;
    std::int64_t padding_first = 0, padding_end = 0;
    std::vector<std::string> section_sources;
    for (const Section& section : row.sections) {
      if (section.source.empty()) break;
      SHARDPULL_ASSIGN_OR_RETURN(const Share rows,
                                 families::share_of(config_, key_value_heads, section.rows, section.cut,
                                                    layout_.tp, at_.tp_rank, name));
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
                                 families::share_of(config_, key_value_heads, row.columns, row.column_cut,
                                                    layout_.tp, at_.tp_rank, name));
      cutter->columns = columns;
      shape.push_back(columns.local);
    }

    Module* module = nullptr;
    if (keep) {
      SHARDPULL_ASSIGN_OR_RETURN(module, model_->add_module(name, std::string(row.type)));
    }
    SHARDPULL_RETURN_IF_ERROR(
        add_parameter(row, layer, module, why, "weight", dtype_, shape, cutter, section_sources));
    if (module != nullptr && padding_end > padding_first) {
      SHARDPULL_RETURN_IF_ERROR(module->declare_padding_rows("weight", padding_first, padding_end));
    }
    if (has_bias(row.bias)) {
      const bool router = row.bias == Bias::kRouterCorrection;
      SHARDPULL_RETURN_IF_ERROR(
          add_parameter(row, layer, module, why, router ? "e_score_correction_bias" : "bias",
                        router ? DType::kF32 : dtype_, {local_rows}, bias_cutter, section_sources));
    }
    return {};
  }

  // Adds a weight or bias to `module` (null: another stage has it) and registers the names that feed it.
  Status add_parameter(const ModuleRow& row, std::int64_t layer, Module* module, const std::string& why,
                       std::string parameter_name, DType dtype, std::vector<std::int64_t> shape,
                       std::shared_ptr<const Cutter> cutter,
                       const std::vector<std::string>& section_sources) {
    Parameter* parameter = nullptr;
    if (module != nullptr) {
      SHARDPULL_ASSIGN_OR_RETURN(
          parameter,
          module->add_parameter(parameter_name, dtype, std::move(shape),
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
      if (parameter != nullptr) {
        source.targets.push_back({parameter, ""});
      } else {
        source.unused = why;
      }
      source.is_fused = true;
      model_->fused[name] = parts;
    }
    return {};
  }

  // The two stacks of a layer's routed experts, and the names of all experts, whoever holds them.
  Status add_experts(const ExpertRow& row, std::int64_t layer) {
    std::string why;
    const bool keep = kept(Place::kLayer, layer, why);
    const std::string name = worker_name(row.name, layer);
    const std::int64_t experts = config_.num_experts.value_or(0);
    auto cutter = std::make_shared<ExpertCutter>();
    cutter->hidden = config_.hidden_size;
    cutter->either_order = wrapper_ != nullptr && wrapper_->either_stack_order;
    SHARDPULL_ASSIGN_OR_RETURN(cutter->experts,
                               families::expert_share(experts, layout_.ep, at_.ep_rank, name));
    const bool spread = layout_.ep > 1;
    SHARDPULL_ASSIGN_OR_RETURN(cutter->intermediate,
                               families::share_of(config_, 0, Extent::kExpertIntermediate,
                                                  spread ? families::Cut::kWhole : families::Cut::kEven,
                                                  layout_.tp, at_.tp_rank, name));

    Parameter* gate_up = nullptr;
    Parameter* down = nullptr;
    if (keep) {
      SHARDPULL_ASSIGN_OR_RETURN(Module* const module, model_->add_module(name, std::string(row.type)));
      const Loader loader = [cutter](Parameter& target, const Tensor& loaded, const std::string& shard) {
        return cutter->load(target, loaded, shard);
      };
      SHARDPULL_ASSIGN_OR_RETURN(
          gate_up, module->add_parameter("w13_weight", dtype_, cutter->gate_up_shape(), loader));
      SHARDPULL_ASSIGN_OR_RETURN(down,
                                 module->add_parameter("w2_weight", dtype_, cutter->down_shape(), loader));
    }

    const std::string prefix = source_name(row.source, layer);
    struct Part {
      std::string_view source;
      const char* shard;
      Parameter* parameter;
      std::vector<std::string>* names;
    };
    std::vector<std::string> gate_up_names, down_names;
    const Part parts[] = {{row.gate, ".w1", gate_up, &gate_up_names},
                          {row.up, ".w3", gate_up, &gate_up_names},
                          {row.down, ".w2", down, &down_names}};
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      const std::string number = std::to_string(expert);
      const bool here =
          expert >= cutter->experts.start && expert < cutter->experts.start + cutter->experts.length;
      for (const Part& part : parts) {
        std::string source_of_part = prefix + number + "." + std::string(part.source) + ".weight";
        FamilyModel::Source& source = model_->sources[source_of_part];
        source.shape = cutter->source_shape(part.shard);
        if (!keep) {
          source.unused = why;
        } else if (here) {
          source.targets.push_back({part.parameter, number + part.shard});
          model_->fed_by[part.parameter].push_back(source_of_part);
        } else {
          source.unused = "other rank: expert " + number + " is on rank " +
                          std::to_string(families::expert_rank(experts, layout_.ep, expert));
        }
        part.names->push_back(std::move(source_of_part));
      }
    }
    add_stack(prefix + std::string(row.stacked_gate_up), "w13", gate_up, why, cutter,
              std::move(gate_up_names));
    add_stack(prefix + std::string(row.down), "w2", down, why, cutter, std::move(down_names));
    return {};
  }

  // A checkpoint tensor that holds all experts of a layer.
  void add_stack(const std::string& name, const char* shard, Parameter* parameter, const std::string& why,
                 std::shared_ptr<const ExpertCutter> cutter, std::vector<std::string> replaces) {
    FamilyModel::Source& source = model_->sources[name];
    source.shape = cutter->source_shape(shard);
    source.stack = std::move(cutter);
    source.stack_shard = shard;
    if (parameter != nullptr) {
      source.targets.push_back({parameter, shard});
    } else {
      source.unused = why;
    }
    source.is_fused = true;
    model_->fused[name] = std::move(replaces);
  }

  Status add_buffer(const IndexBuffer& buffer) {
    const std::int64_t size = families::extent_size(config_, 0, buffer.size);
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
                             if (loaded.shape() != std::vector<std::int64_t>{1, size})
                               return families::wrong_shape(loaded.name(), loaded.shape(), {1, size});
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
  const families::Wrapper* const wrapper_;  // null: none
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
  if (family.expert_layers == ExpertLayers::kStep && config.decoder_sparse_step == 0) {
    return refused(config.origin + ": decoder_sparse_step 0 leaves no layer to divide by it",
                   Reason::kCheckpointMalformed);
  }
  const bool experts = family.expert_layers != ExpertLayers::kNone && config.num_experts.value_or(0) > 0;
  std::uint64_t names = 0;  // of experts, each with a tensor of its own for gate, up and down
  for (std::int64_t layer = 0; experts && layer < config.num_hidden_layers; ++layer) {
    if (is_expert_layer(family, config, layer)) names += 3 * static_cast<std::uint64_t>(*config.num_experts);
  }
  if (names > kMaxTensors) {
    return Status(StatusCode::kResourceExhausted,
                  config.origin + ": " + std::to_string(*config.num_experts) + " experts in each of " +
                      std::to_string(config.num_hidden_layers) + " layers have " + std::to_string(names) +
                      " tensors; the limit is " + std::to_string(kMaxTensors),
                  ErrorInfo{.reason = Reason::kLimit});
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
  if (layout.tp < 1 || layout.pp < 1 || layout.dp < 1 || layout.ep < 1 || layout.replicas < 1) {
    return refused("the inference layout tp=" + std::to_string(layout.tp) +
                   ",pp=" + std::to_string(layout.pp) + ",dp=" + std::to_string(layout.dp) +
                   ",ep=" + std::to_string(layout.ep) + ",replicas=" + std::to_string(layout.replicas) +
                   " has a factor below 1");
  }
  if (layout.ep > 1 && layout.ep != std::int64_t{layout.tp} * layout.dp) {
    return refused("ep=" + std::to_string(layout.ep) +
                   " is neither 1 nor tp x dp = " + std::to_string(layout.tp) + " x " +
                   std::to_string(layout.dp) + " = " + std::to_string(std::int64_t{layout.tp} * layout.dp) +
                   ": experts are spread over all ranks of a stage, or over none");
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
  if (layout.ep > 1) at.ep_rank = at.dp_rank * layout.tp + at.tp_rank;
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
  if (Builder::wrapper_of(config) != nullptr) {
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
  std::unordered_map<std::string_view, std::uint32_t> names;
  std::vector<std::string> unknown, shapes;
  std::string first_shape;  // the name that the first of `shapes` is about
  for (std::uint32_t n = 0; n < metadata.size(); ++n) {
    const TensorMeta& meta = metadata[n];
    if (!names.emplace(meta.name, n).second) {
      return refused("the checkpoint has the name " + meta.name + " twice", Reason::kCheckpointMalformed,
                     meta.name);
    }
    const auto source = model->sources.find(meta.name);
    if (source == model->sources.end()) {
      if (model->explain_unused(meta.name).empty()) unknown.push_back(meta.name);
    } else if (Status status = source->second.check_shape(meta.name, meta.shape); !status.ok()) {
      if (shapes.empty()) first_shape = meta.name;
      shapes.push_back(status.message());
    }
  }
  const auto given = [&](std::string_view name) { return names.contains(name); };
  if (!unknown.empty()) return model->unknown_names(unknown, given);
  if (!shapes.empty()) return refused(describe_list(shapes, "; "), Reason::kCheckpointMalformed, first_shape);
  SHARDPULL_RETURN_IF_ERROR(model->check_fused(given));

  std::unordered_set<std::string_view> replaced;
  for (const auto& [name, parts] : model->fused) {
    if (names.contains(name)) replaced.insert(parts.begin(), parts.end());
  }
  std::vector<std::string> missing;
  for (const auto& module : model->modules()) {
    for (const auto& parameter : module->parameters()) {
      if (parameter->optional()) continue;
      for (std::string& name : model->sources_of(*parameter)) {
        if (!names.contains(name) && !replaced.contains(name)) missing.push_back(std::move(name));
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
