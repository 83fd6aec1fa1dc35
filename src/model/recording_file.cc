// Recording files. Writing looks names up and lays lines out; reading is in four steps:
//
//   lines     every line is read by the same description that writes it, and its names are looked up
//   copies    each op chain is replayed on a fake, and must give the dtype, shape and slice written beside
//   it;
//             each window must lie in its parameter
//   model     modules, parameters and aliases must make a model
//   coverage  the windows of each parameter of a baked module are disjoint and cover it
//
// A file is somebody else's: what a step costs is bounded by the length of the text and the limits of the
// format.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/edit_distance.h"
#include "base/limits.h"
#include "base/status_macros.h"
#include "base/strict_json.h"
#include "model/coverage.h"
#include "model/describe.h"
#include "model/recorded_model.h"
#include "model/recording_lines.h"
#include "shardpull/recording.h"
#include "shardpull/tensor.h"
#include "tensor/chain_text.h"
#include "tensor/convert.h"
#include "tensor/metadata_digest.h"

namespace shardpull {
namespace {

constexpr std::int64_t kVersion = 1;
constexpr std::string_view kBegin = R"({"format":"shardpull-recording","version":)";

// Runs of consecutive bits that the checks of one file may spread windows into (coverage.h).
constexpr std::int64_t kMaxRunsPerFile = std::int64_t{1} << 24;

// Of the names, dtypes and shapes, whatever their order: a recording names its tensors.
std::string names_digest(std::vector<TensorMeta> metadata) {
  std::sort(metadata.begin(), metadata.end(),
            [](const TensorMeta& a, const TensorMeta& b) { return a.name < b.name; });
  return to_string(metadata_digest(metadata));
}

std::string full_name(const std::string& module, const std::string& parameter) {
  return module.empty() ? parameter : module + "." + parameter;
}

Status refused(std::string message, Reason reason = Reason::kBadArgument,
               StatusCode code = StatusCode::kInvalidArgument) {
  return Status(code, std::move(message), {.reason = reason});
}

// ---- writing
// ---------------------------------------------------------------------------------------------------

std::string write_lines(const Recording& recording, const std::vector<TensorMeta>& metadata,
                        const RecordingHeader& header) {
  std::string out;
  LineWriter writer(out);
  const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  const HeaderLine first{.version = kVersion,
                         .slice_format = kSliceFormatVersion,
                         .engine = header.engine,
                         .architecture = header.architecture,
                         .layout = header.layout,
                         .worker = header.worker,
                         .names = count(metadata),
                         .digest = names_digest(metadata),
                         .modules = count(recording.modules),
                         .parameters = count(recording.parameters),
                         .aliases = count(recording.aliases),
                         .fills = count(recording.fills),
                         .scatters = count(recording.scatters),
                         .dead = count(recording.dead),
                         .conversions = count(recording.conversions)};
  header_line(writer, first);
  writer.end();

  const auto name_of = [&](std::uint32_t parameter) {
    const RecordedParameter& found = recording.parameters[parameter];
    return full_name(recording.modules[found.module].name, found.name);
  };
  std::size_t p = 0;
  for (std::size_t m = 0; m < recording.modules.size(); ++m) {
    const RecordedModule& module = recording.modules[m];
    const ModuleLine line{module.name, module.type, module.baked, module.has_post_process, module.aliases};
    module_line(writer, line);
    writer.end();
    for (; p < recording.parameters.size() && recording.parameters[p].module == m; ++p) {
      const RecordedParameter& parameter = recording.parameters[p];
      const ParameterLine its{parameter.name,   parameter.dtype,    parameter.shape,
                              parameter.stride, parameter.optional, parameter.initial};
      parameter_line(writer, its);
      writer.end();
    }
  }
  for (const RecordedAlias& alias : recording.aliases) {
    const AliasLine line{alias.name, recording.modules[alias.module].name, name_of(alias.parameter),
                         alias.shape};
    alias_line(writer, line);
    writer.end();
  }
  for (const Fill& fill : recording.fills) {
    const Destination& at = fill.destination;
    const FillLine line{name_of(at.parameter), at.dtype, at.offset, at.shape, at.stride};
    fill_line(writer, line);
    writer.end();
  }
  for (const Scatter& scatter : recording.scatters) {
    const Destination& at = scatter.destination;
    const ScatterLine line{
        metadata[scatter.name].name, scatter.wire_dtype, scatter.chain, scatter.slice, scatter.shape,
        name_of(at.parameter),       at.dtype,           at.offset,     at.stride};
    scatter_line(writer, line);
    writer.end();
  }
  std::vector<DeadLine> dead;
  for (std::size_t i = 0; i < recording.dead.size(); ++i) {
    dead.push_back({metadata[recording.dead[i]].name, recording.unused_reasons[i]});
  }
  std::sort(dead.begin(), dead.end(), [](const DeadLine& a, const DeadLine& b) { return a.name < b.name; });
  for (const DeadLine& line : dead) {
    dead_line(writer, line);
    writer.end();
  }
  for (const std::string& text : recording.conversions) {
    const ConversionLine line{text};
    conversion_line(writer, line);
    writer.end();
  }
  return out;
}

// Whether every index of the recording may be followed.
bool indices_fit(const Recording& recording, std::size_t names) {
  const std::size_t modules = recording.modules.size();
  const std::size_t parameters = recording.parameters.size();
  if (recording.unused_reasons.size() != recording.dead.size()) return false;
  for (std::size_t p = 0; p < parameters; ++p) {
    if (recording.parameters[p].module >= modules) return false;
    if (p > 0 && recording.parameters[p].module < recording.parameters[p - 1].module) return false;
  }
  for (const RecordedAlias& alias : recording.aliases) {
    if (alias.module >= modules || alias.parameter >= parameters) return false;
  }
  for (const Fill& fill : recording.fills) {
    if (fill.destination.parameter >= parameters) return false;
  }
  for (const Scatter& scatter : recording.scatters) {
    if (scatter.destination.parameter >= parameters || scatter.name >= names) return false;
    if (scatter.destination.shape != scatter.shape) return false;
  }
  return std::all_of(recording.dead.begin(), recording.dead.end(),
                     [&](std::uint32_t name) { return name < names; });
}

// ---- reading
// ---------------------------------------------------------------------------------------------------

// Whether no two elements of a window can share a bit, as far as its strides tell: sorted, each is at least
// what those inside it reach over. Every window that view operations make of a plain parameter is so. Extents
// are known not to overflow.
bool is_nested(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& stride) {
  std::vector<Dim> dims;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) return true;
    if (shape[d] > 1) dims.push_back({shape[d], stride[d]});
  }
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  std::int64_t reach = 1;
  for (const Dim& dim : dims) {
    if (dim.stride < reach) return false;
    reach += (dim.size - 1) * dim.stride;
  }
  return true;
}

class RecordingReader {
 public:
  RecordingReader(std::string_view text, const std::vector<TensorMeta>& metadata, std::string_view origin)
      : text_(text), metadata_(metadata), origin_(origin) {}

  Result<RecordingFile> read() {
    SHARDPULL_RETURN_IF_ERROR(read_header());
    Status status = read_lines();
    if (status.ok()) status = check_counts();
    if (!status.ok()) return status.with_context(fmt::format("{}:{}", origin_, number_));
    status = check_whole();
    if (!status.ok()) return status.with_context(origin_);
    return std::move(file_);
  }

 private:
  enum Kind { kModule, kParameter, kAlias, kFill, kScatter, kDead, kConversion, kKinds };
  struct KindText {
    std::string_view begin, plural;
  };
  static constexpr KindText kTexts[kKinds] = {
      {R"({"module":)", "modules"},        {R"({"parameter":)", "parameters"},
      {R"({"alias":)", "aliases"},         {R"({"fill":)", "fills"},
      {R"({"scatter":)", "scatters"},      {R"({"dead":)", "dead names"},
      {R"({"conversion":)", "conversions"}};

  Recording& recording() { return file_.recording; }

  // The next line, without its line feed, or nothing at the end.
  std::optional<std::string_view> next() {
    if (at_ == text_.size()) return std::nullopt;
    const std::size_t end = std::min(text_.find('\n', at_), text_.size());
    const std::string_view line = text_.substr(at_, end - at_);
    at_ = std::min(end + 1, text_.size());
    ++number_;
    return line;
  }

  Status read_header() {
    const auto fail = [&](const Status& status) { return status.with_context(fmt::format("{}:1", origin_)); };
    if (text_.size() > kMaxRecordingBytes) {
      return refused(
          fmt::format("{}: {} bytes, a recording has at most {}", origin_, text_.size(), kMaxRecordingBytes),
          Reason::kLimit);
    }
    if (!text_.starts_with(kBegin)) {
      return refused(fmt::format("{}: no recording: it begins with {} instead of {}", origin_,
                                 in_quotes(text_.substr(0, 48)), kBegin));
    }
    if (!text_.ends_with('\n')) return refused(fmt::format("{}: the last line does not end", origin_));
    if (const auto at = first_invalid_utf8(text_)) {
      return refused(fmt::format("{}: invalid UTF-8 at offset {}", origin_, *at));
    }
    const std::string_view first = *next();
    std::int64_t version = 0;
    LineReader peek(first.substr(kBegin.size()));
    peek.integer(version);
    if (peek.status().ok() && version != kVersion) {
      return refused(
          fmt::format("{}: recording format version {}, this program reads {}", origin_, version, kVersion),
          Reason::kVersionMismatch, StatusCode::kFailedPrecondition);
    }
    LineReader line(first);
    header_line(line, header_);
    line.end();
    if (line.failed()) return fail(line.status());
    if (header_.slice_format != kSliceFormatVersion) {
      return refused(fmt::format("{}: slice format version {}, this program reads {}", origin_,
                                 header_.slice_format, kSliceFormatVersion),
                     Reason::kVersionMismatch, StatusCode::kFailedPrecondition);
    }
    if (header_.worker >= kMaxRanks) {
      return fail(refused(fmt::format("worker {}, at most {}", header_.worker, kMaxRanks - 1)));
    }
    const std::string digest = names_digest(metadata_);
    if (header_.names != static_cast<std::int64_t>(metadata_.size()) || header_.digest != digest) {
      return refused(
          fmt::format(
              "{}: made of other tensors than this model's: {} names with digest {}, the model has {} "
              "with digest {}{}",
              origin_, header_.names, in_quotes(header_.digest), metadata_.size(), digest, other_name()),
          Reason::kMetadataMismatch, StatusCode::kFailedPrecondition);
    }
    file_.header = {header_.engine, header_.architecture, header_.layout,
                    static_cast<std::uint32_t>(header_.worker)};
    recording().metadata = to_string(metadata_digest(metadata_));
    return {};
  }

  // Of a file that was made of other names: the first one that the metadata lacks, and the one it has
  // instead, which is the likest of those that the file lacks. Nothing when only dtypes or shapes differ.
  std::string other_name() {
    std::unordered_set<std::string> here, there;
    for (const TensorMeta& meta : metadata_) here.insert(meta.name);
    std::string unknown;
    while (const auto text = next()) {
      for (const Kind kind : {kScatter, kDead}) {
        if (!text->starts_with(kTexts[kind].begin)) continue;
        LineReader line(text->substr(kTexts[kind].begin.size()));
        std::string name;
        line.string(name, kMaxNameBytes);
        if (line.failed()) return {};
        if (unknown.empty() && !here.contains(name)) unknown = name;
        there.insert(std::move(name));
      }
    }
    if (unknown.empty()) return {};
    std::string text = fmt::format("; it has {}, which the model lacks", in_quotes(unknown));
    const TensorMeta* likest = nullptr;
    std::size_t least = std::numeric_limits<std::size_t>::max();
    for (const TensorMeta& meta : metadata_) {
      if (there.contains(meta.name)) continue;
      const std::size_t distance = edit_distance(meta.name, unknown, least);
      if (distance >= least) continue;
      least = distance;
      likest = &meta;
    }
    if (likest != nullptr)
      text += fmt::format("; the model has {}, which the file lacks", in_quotes(likest->name));
    return text;
  }

  Status read_lines() {
    for (std::uint32_t n = 0; n < metadata_.size(); ++n) names_.emplace(metadata_[n].name, n);
    fakes_.resize(metadata_.size());
    is_dead_.resize(metadata_.size(), false);
    while (const auto text = next()) {
      const auto* const kind = std::find_if(std::begin(kTexts), std::end(kTexts), [&](const KindText& known) {
        return text->starts_with(known.begin);
      });
      if (kind == std::end(kTexts)) {
        return refused(fmt::format("no line of a recording begins with {}", in_quotes(text->substr(0, 32))));
      }
      const auto found = static_cast<Kind>(kind - std::begin(kTexts));
      // Modules and their parameters take turns; then everything comes in the order of the kinds.
      if (found < last_ && !(found == kModule && last_ == kParameter)) {
        return refused(fmt::format("{} come before {}", kTexts[found].plural, kTexts[last_].plural));
      }
      last_ = found;
      ++counts_[found];
      SHARDPULL_RETURN_IF_ERROR(read_line(found, *text));
    }
    return {};
  }

  Status read_line(Kind kind, std::string_view text) {
    switch (kind) {
      case kModule:
        return take<ModuleLine>(text, [](auto& f, auto& line) { module_line(f, line); });
      case kParameter:
        return take<ParameterLine>(text, [](auto& f, auto& line) { parameter_line(f, line); });
      case kAlias:
        return take<AliasLine>(text, [](auto& f, auto& line) { alias_line(f, line); });
      case kFill:
        return take<FillLine>(text, [](auto& f, auto& line) { fill_line(f, line); });
      case kScatter:
        return take<ScatterLine>(text, [](auto& f, auto& line) { scatter_line(f, line); });
      case kDead:
        return take<DeadLine>(text, [](auto& f, auto& line) { dead_line(f, line); });
      case kConversion:
        return take<ConversionLine>(text, [](auto& f, auto& line) { conversion_line(f, line); });
      case kKinds:
        break;
    }
    return {};
  }

  template <typename Line, typename Description>
  Status take(std::string_view text, const Description& description) {
    Line line;
    LineReader reader(text);
    description(reader, line);
    reader.end();
    SHARDPULL_RETURN_IF_ERROR(reader.status());
    return add(std::move(line));
  }

  Status add(ModuleLine line) {
    if (!modules_.emplace(line.name, static_cast<std::uint32_t>(recording().modules.size())).second) {
      return refused(fmt::format("module {} is there twice", in_quotes(line.name)));
    }
    for (std::size_t i = 1; i < line.aliases.size(); ++i) {
      if (line.aliases[i - 1] >= line.aliases[i]) {
        return refused(fmt::format("the aliases of {} do not ascend", in_quotes(line.name)));
      }
    }
    in_module_.emplace_back();
    recording().modules.push_back(
        {std::move(line.name), std::move(line.type), line.baked, line.post_process, std::move(line.aliases)});
    return {};
  }

  Status add(ParameterLine line) {
    if (recording().modules.empty()) return refused("a parameter comes before the first module");
    const auto module = static_cast<std::uint32_t>(recording().modules.size() - 1);
    const std::string name = full_name(recording().modules.back().name, line.name);
    if (++in_module_[module].parameters > kMaxParametersPerModule) return too_many(module, "parameters");
    if (!parameters_.emplace(name, static_cast<std::uint32_t>(recording().parameters.size())).second) {
      return refused(fmt::format("parameter {} is there twice", in_quotes(name)));
    }
    // The model checks the rest; this bounds what its checks cost.
    const auto extent =
        line.shape.size() == line.stride.size() ? extent_of(line.shape, line.stride) : std::nullopt;
    const auto bits = extent ? checked_mul<std::int64_t>(*extent, dtype_bits(line.dtype)) : std::nullopt;
    if (!bits || *bits > std::numeric_limits<std::int64_t>::max() / 2 ||
        !is_nested(line.shape, line.stride)) {
      return refused(fmt::format("parameter {}: shape {} with stride {} is too large, or its strides overlap",
                                 in_quotes(name), describe(line.shape), describe(line.stride)));
    }
    if (!line.optional && !line.initial.empty()) {
      return refused(fmt::format("parameter {} has initial bytes, and is no buffer", in_quotes(name)));
    }
    recording().parameters.push_back({module, std::move(line.name), line.dtype, std::move(line.shape),
                                      std::move(line.stride), line.optional, std::move(line.initial)});
    storage_bits_.push_back(*bits);
    windows_.emplace_back();
    return {};
  }

  Status add(AliasLine line) {
    const auto module = modules_.find(line.module);
    if (module == modules_.end())
      return refused(fmt::format("there is no module {}", in_quotes(line.module)));
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint32_t parameter, find_parameter(line.parameter));
    if (++in_module_[module->second].aliases > kMaxParametersPerModule)
      return too_many(module->second, "aliases");
    recording().aliases.push_back({module->second, std::move(line.name), parameter, std::move(line.shape)});
    return {};
  }

  Status add(FillLine line) {
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint32_t parameter, find_parameter(line.parameter));
    if (!recording().fills.empty() && recording().fills.back().destination.parameter > parameter) {
      return refused("fills are not in the order of their parameters");
    }
    Destination at{parameter, line.dtype, line.offset, std::move(line.shape), std::move(line.stride)};
    SHARDPULL_RETURN_IF_ERROR(add_window(at));
    if (windows_[parameter].back().empty()) return refused("a fill of nothing");
    recording().fills.push_back({std::move(at)});
    return {};
  }

  Status add(ScatterLine line) {
    const auto name = names_.find(line.name);
    if (name == names_.end()) return refused(fmt::format("the model has no tensor {}", in_quotes(line.name)));
    SHARDPULL_ASSIGN_OR_RETURN(const std::uint32_t parameter, find_parameter(line.parameter));
    SHARDPULL_RETURN_IF_ERROR(check_copy(name->second, line).with_context(in_quotes(line.name)));
    if (line.wire_dtype != line.dtype && convert_kernel(line.wire_dtype, line.dtype) == nullptr) {
      return refused(fmt::format("there is no conversion from {} to {}", dtype_name(line.wire_dtype),
                                 dtype_name(line.dtype)));
    }
    Destination at{parameter, line.dtype, line.offset, line.shape, std::move(line.stride)};
    SHARDPULL_RETURN_IF_ERROR(add_window(at));
    recording().scatters.push_back({name->second, line.wire_dtype, std::move(line.slice),
                                    std::move(line.shape), std::move(line.chain), std::move(at)});
    return {};
  }

  Status add(DeadLine line) {
    const auto name = names_.find(line.name);
    if (name == names_.end()) return refused(fmt::format("the model has no tensor {}", in_quotes(line.name)));
    if (!last_dead_.empty() && last_dead_ >= line.name) {
      return refused("dead names do not ascend");
    }
    if (line.reason.empty()) return refused(fmt::format("{} is dead without a reason", in_quotes(line.name)));
    if (fakes_[name->second]) {
      return refused(fmt::format("{} is dead, and a scatter takes from it", in_quotes(line.name)));
    }
    last_dead_ = metadata_[name->second].name;
    is_dead_[name->second] = true;
    reasons_.emplace(name->second, std::move(line.reason));
    return {};
  }

  Status add(ConversionLine line) {
    recording().conversions.push_back(std::move(line.text));
    return {};
  }

  Status too_many(std::uint32_t module, std::string_view what) const {
    return refused(
        fmt::format("module {} has more than {} {}", in_quotes(file_.recording.modules[module].name),
                    kMaxParametersPerModule, what),
        Reason::kLimit);
  }

  Result<std::uint32_t> find_parameter(const std::string& name) const {
    const auto found = parameters_.find(name);
    if (found == parameters_.end()) return refused(fmt::format("there is no parameter {}", in_quotes(name)));
    return found->second;
  }

  // The chain, replayed, must give what is written beside it.
  Status check_copy(std::uint32_t name, const ScatterLine& line) {
    const TensorMeta& meta = metadata_[name];
    if (!fakes_[name]) {
      SHARDPULL_ASSIGN_OR_RETURN(fakes_[name], Tensor::fake(meta.name, meta.dtype, meta.shape));
    }
    SHARDPULL_ASSIGN_OR_RETURN(const OpChain chain, parse_chain(line.chain));
    SHARDPULL_ASSIGN_OR_RETURN(const Tensor tensor, Tensor::apply(*fakes_[name], chain));
    if (const std::string text = to_string(tensor.chain()); text != line.chain) {
      return refused(fmt::format("the chain is not written as it is recorded: {} instead of {}",
                                 in_quotes(line.chain), in_quotes(text)));
    }
    if (tensor.dtype() != line.wire_dtype || tensor.shape() != line.shape) {
      return refused(fmt::format("the chain gives {} {}, written is {} {}", dtype_name(tensor.dtype()),
                                 describe(tensor.shape()), dtype_name(line.wire_dtype),
                                 describe(line.shape)));
    }
    SHARDPULL_ASSIGN_OR_RETURN(const Slice slice, tensor.slice());
    if (slice != line.slice) {
      return refused(fmt::format("the chain {} gives the slice {}, written is {}", in_quotes(line.chain),
                                 to_string(slice), to_string(line.slice)));
    }
    return {};
  }

  // Keeps a window that lies in the storage of its parameter.
  Status add_window(const Destination& at) {
    const RecordedParameter& parameter = recording().parameters[at.parameter];
    const RecordedModule& module = recording().modules[parameter.module];
    const auto wrong = [&](std::string_view why) {
      return refused(fmt::format("the window offset {} shape {} stride {} of {} in {} {} {}", at.offset,
                                 describe(at.shape), describe(at.stride), dtype_name(at.dtype),
                                 in_quotes(full_name(module.name, parameter.name)), describe(parameter.shape),
                                 why));
    };
    if (!module.baked) return wrong("is of a module that did not bake");
    if (at.shape.size() != at.stride.size()) return wrong("has another number of strides than dims");
    const auto extent = extent_of(at.shape, at.stride);
    const auto end = extent ? checked_add<std::int64_t>(at.offset, *extent) : std::nullopt;
    const auto bits = end ? checked_mul<std::int64_t>(*end, dtype_bits(at.dtype)) : std::nullopt;
    if (!bits || *bits > storage_bits_[at.parameter]) return wrong("lies outside");
    if (!is_nested(at.shape, at.stride)) return wrong("has strides that overlap");
    windows_[at.parameter].push_back(bit_window(at.dtype, at.offset, at.shape, at.stride));
    return {};
  }

  Status check_counts() const {
    const std::int64_t announced[kKinds] = {header_.modules,    header_.parameters, header_.aliases,
                                            header_.fills,      header_.scatters,   header_.dead,
                                            header_.conversions};
    for (int kind = 0; kind < kKinds; ++kind) {
      if (announced[kind] == counts_[kind]) continue;
      return refused(fmt::format("the file ends after {} {}, its header says {}", counts_[kind],
                                 kTexts[kind].plural, announced[kind]));
    }
    return {};
  }

  Status check_whole() {
    std::vector<bool> taken(metadata_.size(), false);
    for (const Scatter& scatter : recording().scatters) taken[scatter.name] = true;
    for (std::uint32_t n = 0; n < metadata_.size(); ++n) {
      if (is_dead_[n]) {
        recording().dead.push_back(n);
        recording().unused_reasons.push_back(std::move(reasons_[n]));
      } else if (!taken[n]) {
        return refused(
            fmt::format("nothing is said of checkpoint tensor {}: it has neither a scatter nor a dead line",
                        in_quotes(metadata_[n].name)));
      } else {
        recording().live.push_back(n);
      }
    }
    SHARDPULL_RETURN_IF_ERROR(skeleton_of(recording()).status());
    for (std::uint32_t p = 0; p < windows_.size(); ++p) SHARDPULL_RETURN_IF_ERROR(check_coverage(p));
    for (const Scatter& scatter : recording().scatters) SHARDPULL_RETURN_IF_ERROR(check_conversion(scatter));
    return {};
  }

  Status check_coverage(std::uint32_t p) {
    const RecordedParameter& parameter = recording().parameters[p];
    const RecordedModule& module = recording().modules[parameter.module];
    const std::string name = in_quotes(full_name(module.name, parameter.name));
    const std::vector<BitWindow>& windows = windows_[p];
    const BitWindow whole = bit_window(parameter.dtype, 0, parameter.shape, parameter.stride);
    if (windows.empty()) {
      if (parameter.optional || whole.empty()) return {};
      return refused(fmt::format("nothing writes into parameter {}", name));
    }
    // Disjoint windows as large as the parameter, all in one piece of memory as large as the parameter, cover
    // it.
    std::vector<const BitWindow*> order;
    std::int64_t size =
        0;  // no overflow: every window lies in the parameter's storage, and sums stop above it
    for (const BitWindow& window : windows) {
      if (window.empty()) continue;
      order.push_back(&window);
      size += window.size();
      if (size > whole.size()) {
        return refused(
            fmt::format("the windows in parameter {} are larger than it: two overlap, or one lies in "
                        "its gaps",
                        name));
      }
    }
    std::sort(order.begin(), order.end(),
              [](const BitWindow* a, const BitWindow* b) { return a->offset < b->offset; });
    bool apart = true;
    for (std::size_t i = 1; i < order.size() && apart; ++i) {
      apart = order[i - 1]->end() <= order[i]->offset;
    }
    if (apart && size == whole.size() && whole.dims.empty()) return {};

    std::int64_t runs = whole.run_count();
    for (const BitWindow& window : windows) {
      runs = std::min(runs, kMaxSortedRuns + 1) + std::min(window.run_count(), kMaxSortedRuns + 1);
    }
    runs_ += runs;
    if (runs > kMaxSortedRuns || runs_ > kMaxRunsPerFile) {
      return refused(fmt::format("the windows in parameter {} are too finely interleaved to be checked: more "
                                 "than {} runs of bytes there, or {} in the file",
                                 name, kMaxSortedRuns, kMaxRunsPerFile),
                     Reason::kLimit);
    }
    if (!disjoint(windows)) return refused(fmt::format("two windows in parameter {} overlap", name));
    if (const auto gap = first_gap(whole, windows)) {
      return refused(fmt::format("parameter {} {} is not written from element {} on", name,
                                 describe(parameter.shape), gap->begin / dtype_bits(parameter.dtype)));
    }
    return {};
  }

  // A conversion that no line lists would go unseen.
  Status check_conversion(const Scatter& scatter) {
    const Destination& at = scatter.destination;
    if (scatter.wire_dtype == at.dtype) return {};
    const RecordedParameter& parameter = recording().parameters[at.parameter];
    const std::string line =
        conversion_text(metadata_[scatter.name].name, scatter.wire_dtype,
                        full_name(recording().modules[parameter.module].name, parameter.name), at.dtype);
    if (listed_.empty()) listed_.insert(recording().conversions.begin(), recording().conversions.end());
    if (listed_.contains(line)) return {};
    return refused(fmt::format("no line lists the conversion {}", in_quotes(line)));
  }

  const std::string_view text_;
  const std::vector<TensorMeta>& metadata_;
  const std::string_view origin_;

  std::size_t at_ = 0;      // where the next line begins
  std::size_t number_ = 0;  // of the line last read, from 1
  HeaderLine header_;
  Kind last_ = kModule;
  std::int64_t counts_[kKinds] = {};
  RecordingFile file_;

  std::unordered_map<std::string_view, std::uint32_t> names_;
  std::unordered_map<std::string, std::uint32_t> modules_, parameters_;
  std::vector<std::optional<Tensor>> fakes_;  // by name, of those a scatter takes from
  std::vector<bool> is_dead_;
  std::unordered_map<std::uint32_t, std::string> reasons_;
  std::string_view last_dead_;
  std::unordered_set<std::string> listed_;
  struct InModule {
    std::size_t parameters = 0, aliases = 0;
  };
  std::vector<InModule> in_module_;
  std::vector<std::int64_t> storage_bits_;       // by parameter
  std::vector<std::vector<BitWindow>> windows_;  // by parameter
  std::int64_t runs_ = 0;
};

}  // namespace

Result<std::string> write_recording(const Recording& recording, const std::vector<TensorMeta>& metadata,
                                    const RecordingHeader& header) {
  if (!recording.unbaked.empty()) {
    return refused(
        fmt::format("a recording with {} name(s) that did not bake cannot be replayed without the "
                    "model's own loaders; {} is one (bake with unbaked=strict)",
                    recording.unbaked.size(),
                    recording.unbaked.front() < metadata.size() ? metadata[recording.unbaked.front()].name
                                                                : std::string("?")),
        Reason::kWrongState, StatusCode::kFailedPrecondition);
  }
  if (recording.metadata != to_string(metadata_digest(metadata)) ||
      !indices_fit(recording, metadata.size())) {
    return Status(StatusCode::kInternal, "the recording is not one of this metadata",
                  {.reason = Reason::kMetadataMismatch, .fault = Fault::kLibrary});
  }
  std::string text = write_lines(recording, metadata, header);
  // What is written can be read: a bake may go beyond the format's limits.
  auto back = read_recording(text, metadata, "the recording");
  if (!back.ok()) return back.status().with_context("it cannot be written to a file");
  if (back->recording != recording) {
    return Status(StatusCode::kInternal, "the recording reads back as another one",
                  {.reason = Reason::kCorrupt, .fault = Fault::kLibrary});
  }
  return text;
}

Result<RecordingFile> read_recording(std::string_view text, const std::vector<TensorMeta>& metadata,
                                     std::string_view origin) {
  return RecordingReader(text, metadata, origin).read();
}

}  // namespace shardpull
