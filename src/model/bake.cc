// The bake.
//
//   begin     the model gets a recorder: its parameters lose their memory, its structure is frozen
//   run       load_weights over one fake a name; each copy_ and zero_ arrives here as a Write, in program
//   order resolve   per parameter: padding first, then the writes; a later write cuts an earlier one it
//   overlaps judge     per module: unattributed copies, uncuttable overlaps, coverage by union end       the
//   model gets everything back, whatever happened
//
// A bake of a dynamic language has to look at every parameter afterwards (replaced? rebound? holding a
// fake?). Here nothing of that can happen: while a model bakes, adding modules or parameters and binding
// memory are refused, and a Parameter has no place for a tensor.
//
// Attribution: the innermost running Parameter::load names the parameter; a write counts when its destination
// lies in that parameter's storage.
#include "shardpull/bake.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/status_macros.h"
#include "model/coverage.h"
#include "model/describe.h"
#include "model/recorder.h"
#include "tensor/metadata_digest.h"

namespace shardpull {
namespace {

constexpr std::size_t kMaxPieces = 64;  // of one write that later ones cut

Status bake_error(std::string message, std::string tensor) {
  return Status(StatusCode::kInvalidArgument, std::move(message),
                ErrorInfo{.reason = Reason::kBakeFailed, .tensor = std::move(tensor)});
}

BitWindow bits_of(const ParameterView& view) {
  return bit_window(view.dtype(), view.offset(), view.shape(), view.stride());
}

BitWindow bits_of(const Parameter& parameter) {
  return bit_window(parameter.dtype(), 0, parameter.shape(), parameter.stride());
}

// Whether every value of `from` is a value of `to`.
bool lossless(DType from, DType to) {
  struct Number {
    bool real, is_signed;
    int digits;                      // integers: value bits; reals: significand bits, the hidden one included
    int min_exponent, max_exponent;  // of the smallest subnormal's and the largest number's leading bit
  };
  const auto number = [](DType dtype) -> std::optional<Number> {
    switch (dtype) {
      case DType::kBool:
        return Number{false, false, 1, 0, 0};
      case DType::kU8:
        return Number{false, false, 8, 0, 7};
      case DType::kI8:
        return Number{false, true, 7, 0, 7};
      case DType::kU16:
        return Number{false, false, 16, 0, 15};
      case DType::kI16:
        return Number{false, true, 15, 0, 15};
      case DType::kU32:
        return Number{false, false, 32, 0, 31};
      case DType::kI32:
        return Number{false, true, 31, 0, 31};
      case DType::kU64:
        return Number{false, false, 64, 0, 63};
      case DType::kI64:
        return Number{false, true, 63, 0, 63};
      case DType::kF8E5M2:
        return Number{true, true, 3, -16, 15};
      case DType::kF8E4M3:
        return Number{true, true, 4, -9, 8};
      case DType::kF8E8M0:
        return Number{true, false, 1, -127, 127};
      case DType::kF16:
        return Number{true, true, 11, -24, 15};
      case DType::kBF16:
        return Number{true, true, 8, -133, 127};
      case DType::kF32:
        return Number{true, true, 24, -149, 127};
      case DType::kF64:
        return Number{true, true, 53, -1074, 1023};
      case DType::kC64:
      case DType::kF4:
        return std::nullopt;
    }
    return std::nullopt;
  };
  if (from == to) return true;
  const auto a = number(from);
  const auto b = number(to);
  if (!a || !b || to == DType::kBool) return false;
  if (a->is_signed && !b->is_signed) return false;
  if (a->real && !b->real) return false;
  if (a->digits > b->digits) return false;
  return !b->real || (a->min_exponent >= b->min_exponent && a->max_exponent <= b->max_exponent);
}

// One copy_ or zero_, or what later ones left of it.
struct Write {
  ParameterView destination;
  std::optional<Tensor> source;  // absent: a fill
  std::uint32_t name = 0;        // of a copy
  std::size_t order = 0;         // program order, for the recording
  BitWindow bits;
};

// How much of `part` the sorted, joined `runs` touch.
enum class Touch { kNone, kSome, kAll };

Touch touch(const BitWindow& part, const std::vector<BitRun>& runs) {
  bool some = false;
  bool all = true;
  for (const BitRun& run : runs_of(part)) {
    auto next = std::upper_bound(runs.begin(), runs.end(), run.begin,
                                 [](std::int64_t at, const BitRun& candidate) { return at < candidate.end; });
    if (next == runs.end() || next->begin >= run.end) {
      all = false;
    } else {
      some = true;
      if (next->begin > run.begin || next->end < run.end) all = false;
    }
  }
  return some ? (all ? Touch::kAll : Touch::kSome) : Touch::kNone;
}

// Appends what is left of `write` once the bits of `runs` belong to somebody else, as boxes: along `dim`,
// stretches that are free are kept, stretches that are taken are dropped, mixed ones are cut along the next
// dim. False when single elements would have to be split, or too many pieces are left.
Result<bool> cut(const Write& write, const std::vector<BitRun>& runs, std::int64_t dim,
                 std::vector<Write>& pieces) {
  const auto dims = static_cast<std::int64_t>(write.destination.shape().size());
  while (dim < dims && write.destination.shape()[static_cast<std::size_t>(dim)] == 1) ++dim;
  if (dim >= dims) return false;
  const std::int64_t size = write.destination.shape()[static_cast<std::size_t>(dim)];

  const auto stretch = [&](std::int64_t begin, std::int64_t end) -> Result<Write> {
    SHARDPULL_ASSIGN_OR_RETURN(ParameterView destination, write.destination.narrow(dim, begin, end - begin));
    Write piece{destination, std::nullopt, write.name, write.order, bits_of(destination)};
    if (write.source) {
      SHARDPULL_ASSIGN_OR_RETURN(Tensor source, write.source->narrow(dim, begin, end - begin));
      piece.source = std::move(source);
    }
    return piece;
  };

  std::int64_t begin = 0;
  std::optional<Touch> current;
  for (std::int64_t i = 0; i <= size; ++i) {
    std::optional<Touch> here;
    if (i < size) {
      SHARDPULL_ASSIGN_OR_RETURN(const ParameterView row, write.destination.narrow(dim, i, 1));
      here = touch(bits_of(row), runs);
    }
    if (i > 0 && here != current) {
      if (current != Touch::kAll) {
        SHARDPULL_ASSIGN_OR_RETURN(Write piece, stretch(begin, i));
        if (current == Touch::kNone) {
          pieces.push_back(std::move(piece));
        } else {
          SHARDPULL_ASSIGN_OR_RETURN(const bool done, cut(piece, runs, dim + 1, pieces));
          if (!done) return false;
        }
        if (pieces.size() > kMaxPieces) return false;
      }
      begin = i;
    }
    current = here;
  }
  return true;
}

using NameIndex = std::unordered_map<std::string_view, std::uint32_t>;  // name -> index into the metadata

class BakeRecorder final : public Recorder {
 public:
  BakeRecorder(Model& model, NameIndex names, const BakeOptions& options,
               const std::vector<Parameter*>& stamps)
      : model_(&model), options_(options), stamps_(&stamps), names_(std::move(names)) {
    problems.resize(model.modules().size());
    for (const auto& module : model.modules()) {
      for (const auto& parameter : module->parameters()) {
        index_.emplace(parameter.get(), static_cast<std::uint32_t>(parameters.size()));
        parameters.push_back(parameter.get());
      }
    }
    writes.resize(parameters.size());
    unattributed.resize(parameters.size(), false);
  }

  Status on_copy(const Tensor& source, const ParameterView& destination) override {
    return keep(record_copy(source, destination));
  }
  Status on_zero(const ParameterView& destination) override { return keep(record_fill(destination)); }

  // Ends the recording: handles of this bake's fakes may outlive it, and what they copy is refused from now
  // on.
  void close() { model_ = nullptr; }
  // The index of a parameter that owns its storage.
  std::uint32_t index_of(const Parameter& parameter) const { return index_.at(&parameter); }
  // Of the metadata, and valid as long as that.
  const NameIndex& names() const { return names_; }
  // Lets go of the recorded tensors, which hold this recorder, and of the names.
  void release() {
    writes.clear();
    names_.clear();
  }

  std::vector<Parameter*> parameters;      // the model's, in order
  std::vector<std::vector<Write>> writes;  // per parameter, in program order
  std::vector<bool> unattributed;          // per parameter: something wrote into it that cannot be replayed
  std::vector<std::vector<std::string>> problems;           // per module: why it cannot bake
  std::set<std::pair<std::uint32_t, std::uint32_t>> feeds;  // (name, module)
  std::vector<std::string> conversions;
  Status failure;  // the first write that was refused, even when a loader swallowed the error

 private:
  Status keep(Status status) {
    if (!status.ok() && failure.ok()) failure = status;
    return status;
  }

  std::string loader_text() const {
    return stamps_->empty() ? "outside any parameter's loader"
                            : "in the loader of " + stamps_->back()->full_name();
  }

  // The parameter's index when the write is attributed or can be blamed on a module; an error when its
  // storage is unknown.
  Result<std::uint32_t> place(const ParameterView& destination, const std::string& what) {
    if (model_ == nullptr)
      return bake_error(what + " after its bake has ended", destination.parameter().full_name());
    const auto found = index_.find(&destination.parameter());
    if (found == index_.end()) {
      return bake_error(
          what + " " + loader_text() + ": the destination belongs to no parameter of the model that bakes",
          destination.parameter().full_name());
    }
    return found->second;
  }

  bool attributed(const ParameterView& destination) const {
    return !stamps_->empty() && &stamps_->back()->storage() == &destination.parameter();
  }

  void blame(std::uint32_t parameter, const std::string& what) {
    unattributed[parameter] = true;
    problems[parameters[parameter]->module().index()].push_back(what + " " + loader_text() +
                                                                " is not attributed to it");
  }

  Status record_copy(const Tensor& source, const ParameterView& destination) {
    const std::string what = "the copy of " + source.to_string() + " into " + destination.to_string();
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint32_t parameter, place(destination, what));
    const auto name = names_.find(source.name());
    if (name == names_.end()) return bake_error(what + ": no such name in the metadata", source.name());
    feeds.emplace(name->second, destination.parameter().module().index());

    if (source.dtype() != destination.dtype()) {
      const std::string line = conversion_text(source.name(), source.dtype(),
                                               destination.parameter().full_name(), destination.dtype());
      const bool widens = lossless(source.dtype(), destination.dtype());
      if (options_.conversions == ConversionPolicy::kRefuse ||
          (options_.conversions == ConversionPolicy::kWiden && !widens)) {
        return bake_error("the conversion " + line +
                              (options_.conversions == ConversionPolicy::kRefuse
                                   ? " is refused by conversions=refuse"
                                   : " loses values and is refused by conversions=widen"),
                          source.name());
      }
      if (conversion_lines_.insert(line).second) conversions.push_back(line);
    }
    if (!attributed(destination)) {
      blame(parameter, what);
      return {};
    }
    // Found now, so that the error carries the loader's context.
    SHARDPULL_RETURN_IF_ERROR(source.slice().status());
    writes[parameter].push_back({destination, source, name->second, next_order_++, bits_of(destination)});
    return {};
  }

  Status record_fill(const ParameterView& destination) {
    const std::string what = "the zero_ of " + destination.to_string();
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint32_t parameter, place(destination, what));
    if (!attributed(destination)) {
      blame(parameter, what);
      return {};
    }
    writes[parameter].push_back({destination, std::nullopt, 0, next_order_++, bits_of(destination)});
    return {};
  }

  Model* model_;
  BakeOptions options_;
  const std::vector<Parameter*>* stamps_;
  NameIndex names_;
  std::unordered_map<const Parameter*, std::uint32_t> index_;
  std::set<std::string> conversion_lines_;
  std::size_t next_order_ = 1;  // 0: padding
};

// Declared padding as the parameter's first writes: whatever a loader writes there has the last word.
Status prepend_padding(Parameter& parameter, std::vector<Write>& writes) {
  std::vector<Write> all;
  for (const Region& region : parameter.padding()) {
    std::vector<std::int64_t> shape, stride;
    for (const Dim& dim : region.dims) {
      shape.push_back(dim.size);
      stride.push_back(dim.stride);
    }
    SHARDPULL_ASSIGN_OR_RETURN(const ParameterView view,
                               parameter.data().as_strided(region.offset, shape, stride));
    all.push_back({view, std::nullopt, 0, 0, bits_of(view)});
  }
  if (all.empty()) return {};
  for (Write& write : writes) all.push_back(std::move(write));
  writes = std::move(all);
  return {};
}

// Makes the writes of one parameter disjoint by the last-word rule. False, with `why`, when an earlier write
// cannot be cut.
Result<bool> keep_last_words(std::vector<Write>& writes, std::string& why) {
  std::vector<BitWindow> windows;
  windows.reserve(writes.size());
  for (const Write& write : writes) windows.push_back(write.bits);
  if (disjoint(windows)) return true;

  std::vector<Write> kept;
  for (Write& later : writes) {
    std::vector<Write> next;
    std::optional<std::vector<BitRun>> runs;
    for (Write& earlier : kept) {
      if (!intersects(earlier.bits, later.bits)) {
        next.push_back(std::move(earlier));
        continue;
      }
      if (contains(later.bits, earlier.bits)) continue;
      if (!runs) runs = runs_of(later.bits);
      SHARDPULL_ASSIGN_OR_RETURN(const bool done, cut(earlier, *runs, 0, next));
      if (!done) {
        why = (later.source ? later.source->to_string() : std::string("a zero_")) + " into " +
              later.destination.to_string() + " overwrites a part of " +
              (earlier.source ? earlier.source->to_string() : std::string("a zero_")) + " into " +
              earlier.destination.to_string() + " that cannot be cut out of it";
        return false;
      }
    }
    kept = std::move(next);
    kept.push_back(std::move(later));
  }
  writes = std::move(kept);
  return true;
}

std::string gap_text(const Parameter& parameter, const BitRun& gap) {
  const std::int64_t first = gap.begin / dtype_bits(parameter.dtype());
  std::string out = parameter.full_name() + " " + describe(parameter.shape()) +
                    " is not written from element " + std::to_string(first);
  if (parameter.shape().size() > 1 && parameter.stride()[0] > 0) {
    out += " (row " + std::to_string(first / parameter.stride()[0]) + ")";
  }
  return out + " on";
}

// "; the source has no M" for a parameter that is not covered. A model that does not know what feeds it: the
// question.
std::string sources_text(const Model& model, const Parameter& parameter, const NameIndex& names) {
  std::vector<std::string> sources = model.sources_of(parameter);
  if (sources.empty()) return "; does the source lack a tensor for it?";
  std::vector<std::string> missing;
  for (std::string& source : sources) {
    if (!names.contains(source)) missing.push_back(std::move(source));
  }
  return missing.empty() ? std::string() : "; the source has no " + describe_list(missing);
}

Destination destination_of(const Write& write, std::uint32_t parameter) {
  return {parameter, write.destination.dtype(), write.destination.offset(), write.destination.shape(),
          write.destination.stride()};
}

// Turns what the recorder saw into a Recording, or into the error that says why there is none.
Result<Recording> judge(const Model& model, BakeRecorder& recorder, const std::vector<TensorMeta>& metadata,
                        const BakeOptions& options) {
  Recording recording;
  recording.metadata = to_string(metadata_digest(metadata));

  std::vector<bool> fed(model.modules().size(), false);
  for (const auto& [name, module] : recorder.feeds) fed[module] = true;

  std::vector<std::string> unfed;  // parameters that nothing feeds, in modules that nothing feeds
  std::string first_unfed;
  for (const auto& module : model.modules()) {
    recording.modules.push_back(
        {module->name(), module->type(), false, static_cast<bool>(module->post_process()), {}});
    for (const auto& alias : module->aliases()) {
      recording.aliases.push_back(
          {module->index(), alias->name(), recorder.index_of(alias->storage()), alias->shape()});
    }
  }
  for (auto& [path, module] : model.module_aliases()) {
    recording.modules[module->index()].aliases.push_back(std::move(path));
  }
  std::vector<bool> written(model.modules().size(), false);
  // Names by what becomes of their copies: recorded with elements, and not overwritten by a later one.
  std::vector<bool> copied(metadata.size(), false), left(metadata.size(), false);
  const auto mark = [](std::vector<bool>& names, const std::vector<Write>& writes) {
    for (const Write& write : writes) {
      if (write.source && !write.bits.empty()) names[write.name] = true;
    }
  };
  for (std::uint32_t p = 0; p < recorder.parameters.size(); ++p) {
    Parameter& parameter = *recorder.parameters[p];
    const std::uint32_t module = parameter.module().index();
    std::vector<std::string>& problems = recorder.problems[module];
    recording.parameters.push_back({module, parameter.name(), parameter.dtype(), parameter.shape(),
                                    parameter.stride(), parameter.optional(), parameter.initial()});

    std::vector<Write>& writes = recorder.writes[p];
    if (parameter.optional() && writes.empty()) continue;  // a buffer that nothing feeds is left alone
    SHARDPULL_RETURN_IF_ERROR(prepend_padding(parameter, writes));
    std::string why;
    mark(copied, writes);
    SHARDPULL_ASSIGN_OR_RETURN(const bool ordered, keep_last_words(writes, why));
    mark(left, writes);
    if (!ordered) {
      problems.push_back(why);
      continue;
    }
    if (!writes.empty()) written[module] = true;
    if (recorder.unattributed[p]) continue;  // has its problem already
    std::vector<BitWindow> windows;
    for (const Write& write : writes) windows.push_back(write.bits);
    if (const auto gap = first_gap(bits_of(parameter), windows)) {
      const std::string line = gap_text(parameter, *gap) + sources_text(model, parameter, recorder.names());
      if (fed[module]) {
        problems.push_back(line);
      } else {
        if (unfed.empty()) first_unfed = parameter.full_name();
        unfed.push_back(line);
      }
    }
  }

  // Names.
  std::vector<std::string> unexplained;
  std::vector<std::string> overwritten;
  std::vector<std::string> unbaked;
  std::string first_name;
  auto feed = recorder.feeds.begin();
  for (std::uint32_t n = 0; n < metadata.size(); ++n) {
    const std::string& name = metadata[n].name;
    if (feed == recorder.feeds.end() || feed->first != n) {
      std::string reason = model.explain_unused(name);
      if (reason.empty()) {
        unexplained.push_back(name);
        if (first_name.empty()) first_name = name;
      }
      recording.dead.push_back(n);
      recording.unused_reasons.push_back(std::move(reason));
      continue;
    }
    bool failed = false;
    for (; feed != recorder.feeds.end() && feed->first == n; ++feed) {
      const std::vector<std::string>& problems = recorder.problems[feed->second];
      if (problems.empty()) continue;
      const Module& module = *model.modules()[feed->second];
      unbaked.push_back(name + " -> " + module.name() + " (" + module.type() + ")");
      recording.fallbacks.push_back({n, feed->second});
      failed = true;
    }
    if (!failed && copied[n] && !left[n]) {  // it feeds nothing in the end
      std::string reason = model.explain_unused(name);
      if (reason.empty()) {
        overwritten.push_back(name);
        if (first_name.empty()) first_name = name;
      }
      recording.dead.push_back(n);
      recording.unused_reasons.push_back(std::move(reason));
      continue;
    }
    recording.live.push_back(n);
    if (failed) {
      recording.unbaked.push_back(n);
      if (options.unbaked == UnbakedPolicy::kStrict && first_name.empty()) first_name = name;
    }
  }

  // Fills into a module that cannot bake and that no name feeds have nobody to fall back to.
  std::vector<std::string> reasons;
  std::vector<std::string> homeless;
  for (const auto& module : model.modules()) {
    for (const std::string& problem : recorder.problems[module->index()]) {
      (fed[module->index()] ? reasons : homeless).push_back(module->name() + ": " + problem);
    }
  }

  std::vector<std::string> errors;
  if (!unexplained.empty()) {
    errors.push_back(
        std::to_string(unexplained.size()) +
        " name(s) feed nothing and the model cannot explain them: " + describe_list(unexplained));
  }
  if (!overwritten.empty()) {
    errors.push_back(
        std::to_string(overwritten.size()) +
        " name(s) are loaded and then overwritten whole by others, and the model does not explain it: " +
        describe_list(overwritten));
  }
  if (!unfed.empty()) errors.push_back("what no source feeds: " + describe_list(unfed, "; "));
  if (!homeless.empty()) errors.push_back(describe_list(homeless, "; "));
  if (!unbaked.empty() && options.unbaked == UnbakedPolicy::kStrict) {
    errors.push_back(std::to_string(unbaked.size()) +
                     " name(s) are loaded into modules that do not bake (unbaked is strict): " +
                     describe_list(unbaked) + ". Why: " + describe_list(reasons, "; "));
  }
  if (!errors.empty())
    return bake_error("the bake failed: " + describe_list(errors, ". "),
                      first_name.empty() ? first_unfed : first_name);

  // Windows.
  for (const auto& module : model.modules()) {
    recording.modules[module->index()].baked =
        written[module->index()] && recorder.problems[module->index()].empty();
  }
  std::vector<std::pair<const Write*, std::uint32_t>> copies;
  for (std::uint32_t p = 0; p < recorder.parameters.size(); ++p) {
    if (!recording.modules[recording.parameters[p].module].baked) continue;
    for (const Write& write : recorder.writes[p]) {
      if (write.source) {
        copies.emplace_back(&write, p);
      } else if (!write.bits.empty()) {
        recording.fills.push_back({destination_of(write, p)});
      }
    }
  }
  std::stable_sort(copies.begin(), copies.end(),
                   [](const auto& a, const auto& b) { return a.first->order < b.first->order; });
  for (const auto& [write, p] : copies) {
    SHARDPULL_ASSIGN_OR_RETURN(Slice slice, write->source->slice());
    recording.scatters.push_back({write->name, write->source->dtype(), std::move(slice),
                                  write->source->shape(), to_string(write->source->chain()),
                                  destination_of(*write, p)});
  }
  recording.conversions = std::move(recorder.conversions);
  return recording;
}

}  // namespace

// Puts a model into the state "bakes" and back.
class BakeSession {
 public:
  BakeSession(Model& model, Recorder* recorder) : model_(model) { model_.recorder_ = recorder; }
  ~BakeSession() {
    model_.recorder_ = nullptr;
    model_.stamps_.clear();  // only an exception that a loader threw leaves any
  }
  BakeSession(const BakeSession&) = delete;
  BakeSession& operator=(const BakeSession&) = delete;

  static bool loading(const Model& model) { return !model.stamps_.empty(); }
  static const std::vector<Parameter*>& stamps(const Model& model) { return model.stamps_; }

 private:
  Model& model_;
};

Result<Recording> bake(Model& model, const std::vector<TensorMeta>& metadata, const BakeOptions& options) {
  if (model.baking() || BakeSession::loading(model)) {
    return Status(StatusCode::kFailedPrecondition, "the model bakes or loads already",
                  ErrorInfo{.reason = Reason::kWrongState});
  }
  NameIndex names;
  names.reserve(metadata.size());
  for (std::uint32_t n = 0; n < metadata.size(); ++n) {
    const std::string& name = metadata[n].name;
    if (!names.emplace(name, n).second)
      return bake_error("the metadata has the name " + name + " twice", name);
  }

  const auto recorder =
      std::make_shared<BakeRecorder>(model, std::move(names), options, BakeSession::stamps(model));
  struct Release {
    BakeRecorder& recorder;
    ~Release() {
      recorder.close();
      recorder.release();
    }
  } const release{*recorder};
  std::vector<NamedTensor> fakes;
  fakes.reserve(metadata.size());
  for (const TensorMeta& meta : metadata) {
    SHARDPULL_ASSIGN_OR_RETURN(Tensor fake, Tensor::fake(meta.name, meta.dtype, meta.shape, recorder));
    fakes.push_back({meta.name, std::move(fake)});
  }
  Status loaded;
  {
    const BakeSession session(model, recorder.get());
    loaded = model.load_weights(fakes);
  }
  recorder->close();
  if (!loaded.ok()) return loaded.with_context("bake");
  if (!recorder->failure.ok()) return recorder->failure.with_context("bake (a loader ignored this)");
  return judge(model, *recorder, metadata, options);
}

// Restricts what loaders write to some modules of a model.
class LoadScope {
 public:
  LoadScope(Model& model, const std::vector<bool>* modules) : model_(model) { model_.loaded_ = modules; }
  ~LoadScope() { model_.loaded_ = nullptr; }
  LoadScope(const LoadScope&) = delete;
  LoadScope& operator=(const LoadScope&) = delete;

 private:
  Model& model_;
};

namespace {

Status zero_padding(Module& module) {
  for (const auto& parameter : module.parameters()) {
    for (const Region& region : parameter->padding()) {
      std::vector<std::int64_t> shape, stride;
      for (const Dim& dim : region.dims) {
        shape.push_back(dim.size);
        stride.push_back(dim.stride);
      }
      SHARDPULL_ASSIGN_OR_RETURN(const ParameterView view,
                                 parameter->data().as_strided(region.offset, shape, stride));
      SHARDPULL_RETURN_IF_ERROR(view.zero_());
    }
  }
  return {};
}

}  // namespace

Status load_eagerly(Model& model, const std::vector<NamedTensor>& weights) {
  for (const auto& module : model.modules()) SHARDPULL_RETURN_IF_ERROR(zero_padding(*module));
  return model.load_weights(weights);
}

Status load_modules(Model& model, const std::vector<std::uint32_t>& modules,
                    const std::vector<NamedTensor>& weights) {
  std::vector<bool> loaded(model.modules().size(), false);
  for (const std::uint32_t module : modules) {
    if (module >= loaded.size()) {
      return Status(StatusCode::kInvalidArgument,
                    "module " + std::to_string(module) + " of " + std::to_string(loaded.size()),
                    {.reason = Reason::kBadArgument});
    }
    loaded[module] = true;
    SHARDPULL_RETURN_IF_ERROR(zero_padding(*model.modules()[module]));
  }
  const LoadScope scope(model, &loaded);
  return model.load_weights(weights);
}

}  // namespace shardpull
