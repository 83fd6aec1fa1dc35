#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/status_macros.h"
#include "base/strict_json.h"
#include "checkpoint/posix_file.h"

namespace shardpull {
namespace {

constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kExtension = ".safetensors";
constexpr std::size_t kMaxIndexDepth = 64;
constexpr std::size_t kMaxListed = 32;  // names in one message; the rest is counted

using WeightMap = std::map<std::string, std::string>;  // tensor name -> file name

std::string join_some(const std::vector<std::string>& items) {
  const std::size_t shown = std::min(items.size(), kMaxListed);
  std::string out = fmt::format("{}", fmt::join(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(shown), ", "));
  if (shown < items.size()) out += fmt::format(" and {} more", items.size() - shown);
  return out;
}

std::string plural(std::size_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

bool is_consolidated(std::string_view name) { return name.starts_with("consolidated"); }

// What a directory holds, by kind, each list sorted.
struct Listing {
  bool has_index = false;
  std::vector<std::string> files;         // *.safetensors but for the next
  std::vector<std::string> consolidated;  // consolidated*.safetensors
  std::vector<std::string> other_weights; // formats that are not read
};

Result<Listing> list_directory(const std::filesystem::path& directory, const CheckpointLimits& limits) {
  std::error_code error;
  const auto status = std::filesystem::status(directory, error);
  if (!std::filesystem::exists(status)) {
    return Status(StatusCode::kNotFound,
                  fmt::format("{}: no such directory{}", directory.native(),
                              error && error != std::errc::no_such_file_or_directory ? ": " + error.message() : ""),
                  {.reason = Reason::kHost});
  }
  if (!std::filesystem::is_directory(status)) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: a checkpoint is a directory, this is a file", directory.native()),
                  {.reason = Reason::kBadArgument});
  }
  Listing out;
  std::filesystem::directory_iterator at(directory, error);
  for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().native();
    if (name == kIndexName) out.has_index = true;
    if (name.starts_with('.')) continue;  // temporaries of a download or a writer
    if (name.ends_with(kExtension)) {
      (is_consolidated(name) ? out.consolidated : out.files).push_back(name);
    } else if (name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth") || name.ends_with(".gguf")) {
      out.other_weights.push_back(name);
    }
    if (out.files.size() + out.consolidated.size() > limits.max_files) {
      return Status(StatusCode::kResourceExhausted,
                    fmt::format("{}: more than {} safetensors files", directory.native(), limits.max_files),
                    {.reason = Reason::kLimit});
    }
  }
  if (error) return host_error(error.value(), directory.native());
  std::sort(out.files.begin(), out.files.end());
  std::sort(out.consolidated.begin(), out.consolidated.end());
  std::sort(out.other_weights.begin(), out.other_weights.end());
  return out;
}

Result<WeightMap> read_index(const std::filesystem::path& path, const CheckpointLimits& limits) {
  const std::string& origin = path.native();
  SHARDPULL_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, limits.max_index_bytes));
  if (text.empty()) return malformed(origin, {}, "empty (0 bytes): an interrupted download?");
  SHARDPULL_RETURN_IF_ERROR(check_json(text, kMaxIndexDepth, origin));
  const auto index = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    return malformed(origin, {}, "an index is an object with an object \"weight_map\"");
  }
  WeightMap out;
  std::set<std::string> files;
  for (const auto& [name, value] : index["weight_map"].items()) {
    if (!value.is_string()) return malformed(origin, name, "weight_map must map names to file names");
    const auto& file = value.get_ref<const std::string&>();
    if (file.empty() || file == "." || file == ".." || file.find('/') != file.npos || file.find('\0') != file.npos) {
      return malformed(origin, name, fmt::format("{} is not the name of a file in the directory", in_quotes(file)));
    }
    if (name.size() > limits.file.max_name_bytes || out.size() == limits.file.max_tensors) {
      return Status(StatusCode::kResourceExhausted,
                    fmt::format("{}: more than {} tensors, or a name above {} bytes", origin, limits.file.max_tensors,
                                limits.file.max_name_bytes),
                    {.reason = Reason::kLimit});
    }
    files.insert(file);
    out.emplace(name, file);
  }
  if (files.size() > limits.max_files) {
    return Status(StatusCode::kResourceExhausted, fmt::format("{}: {} files, the limit is {}", origin, files.size(), limits.max_files),
                  {.reason = Reason::kLimit});
  }
  return out;
}

// Refuses when a file cannot be read, listing all such files. `what` begins the sentence.
Status check_readable(const std::filesystem::path& directory, const std::vector<std::string>& files, std::string_view origin,
                      std::string_view what) {
  std::vector<std::string> problems;
  for (const std::string& file : files) {
    if (const std::string reason = unreadable_reason(directory / file); !reason.empty()) {
      problems.push_back(fmt::format("{} ({})", file, reason));
    }
  }
  if (problems.empty()) return {};
  return malformed(origin, {},
                   fmt::format("{} of {} cannot be used (an interrupted download?): {}", problems.size(),
                               plural(files.size(), what), fmt::join(problems, ", ")));
}

// Without an index: refuses a set "PREFIX-00001-of-00003.safetensors" that lacks parts, listing them.
Status check_complete_sets(const std::filesystem::path& directory, const std::vector<std::string>& files) {
  std::map<std::pair<std::string, std::uint32_t>, std::set<std::uint32_t>> sets;
  for (const std::string& file : files) {
    const std::string_view stem = std::string_view(file).substr(0, file.size() - kExtension.size());
    constexpr std::size_t kTail = std::string_view("-00001-of-00003").size();
    if (stem.size() < kTail) continue;
    const std::string_view tail = stem.substr(stem.size() - kTail);
    std::uint32_t part = 0, total = 0;
    const auto number = [](std::string_view text, std::uint32_t& out) {
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
      return error == std::errc() && end == text.data() + text.size();
    };
    if (tail[0] != '-' || tail.substr(6, 4) != "-of-") continue;
    if (!number(tail.substr(1, 5), part) || !number(tail.substr(10, 5), total)) continue;
    sets[{std::string(stem.substr(0, stem.size() - kTail)), total}].insert(part);
  }
  std::vector<std::string> missing;
  for (const auto& [set, parts] : sets) {
    for (std::uint32_t part = 1; part <= set.second; ++part) {
      if (!parts.contains(part)) missing.push_back(fmt::format("{}-{:05}-of-{:05}{}", set.first, part, set.second, kExtension));
    }
  }
  if (missing.empty()) return {};
  return malformed(directory.native(), {},
                   fmt::format("there is no {}, and of the set of files these are missing (an interrupted download?): {}",
                               kIndexName, join_some(missing)));
}

}  // namespace

struct Checkpoint::Impl {
  struct Location {
    std::uint32_t file = 0;
    bool indexed = true;
    std::size_t tensor = 0;  // in that file
  };

  std::filesystem::path directory;
  std::vector<SafetensorsFile> files;
  std::vector<TensorMeta> tensors;
  std::vector<Location> locations;
  std::uint64_t total_bytes = 0;
  std::vector<std::string> notes;

  std::string file_name(std::size_t file) const { return files[file].path().filename().native(); }
  void add(std::size_t file, std::size_t tensor, bool indexed) {
    tensors.push_back(files[file].tensors()[tensor]);
    locations.push_back({static_cast<std::uint32_t>(file), indexed, tensor});
    total_bytes += files[file].bytes(tensor);
  }
  Status open_file(const std::string& name, const CheckpointLimits& limits) {
    SHARDPULL_ASSIGN_OR_RETURN(auto file, SafetensorsFile::open(directory / name, limits.file));
    files.push_back(std::move(file));
    return {};
  }
  Status open_indexed(const Listing& listing, const CheckpointLimits& limits);
  Status open_unindexed(const Listing& listing, const CheckpointLimits& limits);
  Status sort_by_name(const std::string& origin, std::string_view advice);
};

// Orders by name; refuses a name that was added twice.
Status Checkpoint::Impl::sort_by_name(const std::string& origin, std::string_view advice) {
  std::vector<std::size_t> order(tensors.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(tensors[a].name, locations[a].file) < std::tie(tensors[b].name, locations[b].file);
  });
  std::vector<TensorMeta> sorted_tensors;
  std::vector<Location> sorted_locations;
  sorted_tensors.reserve(order.size());
  sorted_locations.reserve(order.size());
  for (const std::size_t i : order) {
    if (!sorted_tensors.empty() && sorted_tensors.back().name == tensors[i].name) {
      return malformed(origin, tensors[i].name,
                       fmt::format("duplicate name: both {} and {} hold it; {}", file_name(sorted_locations.back().file),
                                   file_name(locations[i].file), advice));
    }
    sorted_tensors.push_back(std::move(tensors[i]));
    sorted_locations.push_back(locations[i]);
  }
  tensors = std::move(sorted_tensors);
  locations = std::move(sorted_locations);
  return {};
}

Status Checkpoint::Impl::open_indexed(const Listing& listing, const CheckpointLimits& limits) {
  const std::string origin = (directory / kIndexName).native();
  SHARDPULL_ASSIGN_OR_RETURN(WeightMap weight_map, read_index(directory / kIndexName, limits));
  std::vector<std::string> named;
  for (const auto& [name, file] : weight_map) named.push_back(file);
  std::sort(named.begin(), named.end());
  named.erase(std::unique(named.begin(), named.end()), named.end());
  SHARDPULL_RETURN_IF_ERROR(check_readable(directory, named, origin, "named file"));

  for (const std::string& file : named) SHARDPULL_RETURN_IF_ERROR(open_file(file, limits));
  for (const std::string& file : listing.files) {
    if (std::binary_search(named.begin(), named.end(), file)) continue;
    // Not part of what the index promises: a broken one costs its tensors, which are missed only where they are needed.
    if (const Status status = open_file(file, limits); !status.ok()) {
      notes.push_back(fmt::format("{} is not in the index and was ignored: {}", file, status.message()));
    }
  }
  if (weight_map.empty()) notes.push_back(fmt::format("{} lists no tensor", kIndexName));

  for (std::size_t f = 0; f < files.size(); ++f) {
    std::vector<std::string> extra, elsewhere;
    for (std::size_t t = 0; t < files[f].tensors().size(); ++t) {
      const std::string& name = files[f].tensors()[t].name;
      const auto assigned = weight_map.find(name);
      if (assigned == weight_map.end()) {
        extra.push_back(name);
        add(f, t, /*indexed=*/false);
      } else if (assigned->second == file_name(f)) {
        add(f, t, /*indexed=*/true);
      } else {
        elsewhere.push_back(fmt::format("{} (from {})", name, assigned->second));
      }
    }
    if (!extra.empty()) {
      notes.push_back(fmt::format("{} holds {} that the index does not list; used where needed: {}", file_name(f),
                                  plural(extra.size(), "tensor"), join_some(extra)));
    }
    if (!elsewhere.empty()) {
      notes.push_back(fmt::format("{} holds {} that the index takes from another file; ignored here: {}", file_name(f),
                                  plural(elsewhere.size(), "tensor"), join_some(elsewhere)));
    }
  }
  SHARDPULL_RETURN_IF_ERROR(sort_by_name(origin, "the index lists it in neither, so nothing decides"));

  std::vector<std::string> absent;
  for (const auto& [name, file] : weight_map) {
    const auto found = std::lower_bound(tensors.begin(), tensors.end(), name,
                                        [](const TensorMeta& meta, const std::string& key) { return meta.name < key; });
    if (found == tensors.end() || found->name != name) absent.push_back(fmt::format("{} (in {})", in_quotes(name), file));
  }
  if (!absent.empty()) {
    return malformed(origin, {},
                     fmt::format("the files lack {} that the index lists: {}", plural(absent.size(), "tensor"), join_some(absent)));
  }
  return {};
}

Status Checkpoint::Impl::open_unindexed(const Listing& listing, const CheckpointLimits& limits) {
  const auto& names = listing.files.empty() ? listing.consolidated : listing.files;
  if (names.empty()) {
    return Status(StatusCode::kNotFound,
                  fmt::format("{}: no safetensors file{}", directory.native(),
                              listing.other_weights.empty()
                                  ? std::string()
                                  : fmt::format("; {} cannot be read: convert to safetensors", join_some(listing.other_weights))),
                  {.reason = Reason::kCheckpointMalformed});
  }
  SHARDPULL_RETURN_IF_ERROR(check_readable(directory, names, directory.native(), "file"));
  SHARDPULL_RETURN_IF_ERROR(check_complete_sets(directory, names));
  for (const std::string& name : names) SHARDPULL_RETURN_IF_ERROR(open_file(name, limits));
  for (std::size_t f = 0; f < files.size(); ++f) {
    for (std::size_t t = 0; t < files[f].tensors().size(); ++t) add(f, t, /*indexed=*/true);
  }
  if (names.size() > 1) {
    notes.push_back(fmt::format("there is no {}: the tensors of {} are taken together: {}", kIndexName,
                                plural(names.size(), "file"), join_some(names)));
  }
  return sort_by_name(directory.native(), fmt::format("without a {} nothing decides which one counts", kIndexName));
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Result<Checkpoint> Checkpoint::open(const std::filesystem::path& directory, const CheckpointLimits& limits) {
  auto impl = std::make_unique<Impl>();
  impl->directory = directory;
  SHARDPULL_ASSIGN_OR_RETURN(const Listing listing, list_directory(directory, limits));
  if (!listing.consolidated.empty() && (listing.has_index || !listing.files.empty())) {
    impl->notes.push_back(fmt::format("{} ignored: the Hugging Face files beside it count", join_some(listing.consolidated)));
  }
  SHARDPULL_RETURN_IF_ERROR(listing.has_index ? impl->open_indexed(listing, limits) : impl->open_unindexed(listing, limits));
  if (impl->tensors.empty()) return malformed(directory.native(), {}, "the checkpoint holds no tensor");
  if (impl->tensors.size() > limits.file.max_tensors) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("{}: {} tensors, the limit is {}", directory.native(), impl->tensors.size(), limits.file.max_tensors),
                  {.reason = Reason::kLimit});
  }
  return Checkpoint(std::move(impl));
}

const std::filesystem::path& Checkpoint::directory() const { return impl_->directory; }
const std::vector<TensorMeta>& Checkpoint::tensors() const { return impl_->tensors; }
std::uint64_t Checkpoint::total_bytes() const { return impl_->total_bytes; }
const std::vector<std::string>& Checkpoint::notes() const { return impl_->notes; }

std::optional<std::size_t> Checkpoint::find(std::string_view name) const {
  const auto found = std::lower_bound(impl_->tensors.begin(), impl_->tensors.end(), name,
                                      [](const TensorMeta& meta, std::string_view key) { return meta.name < key; });
  if (found == impl_->tensors.end() || found->name != name) return std::nullopt;
  return static_cast<std::size_t>(found - impl_->tensors.begin());
}

std::uint64_t Checkpoint::bytes(std::size_t tensor) const {
  const auto& location = impl_->locations[tensor];
  return impl_->files[location.file].bytes(location.tensor);
}

bool Checkpoint::indexed(std::size_t tensor) const { return impl_->locations[tensor].indexed; }

const std::filesystem::path& Checkpoint::file(std::size_t tensor) const {
  return impl_->files[impl_->locations[tensor].file].path();
}

const std::byte* Checkpoint::data(std::size_t tensor) const {
  const auto& location = impl_->locations[tensor];
  return impl_->files[location.file].data(location.tensor);
}

Status Checkpoint::read(std::size_t tensor, std::uint64_t begin, std::span<std::byte> out) const {
  const auto& location = impl_->locations[tensor];
  return impl_->files[location.file].read(location.tensor, begin, out);
}

Status Checkpoint::read(std::string_view name, std::byte* out) const {
  const auto tensor = find(name);
  if (!tensor) {
    return Status(StatusCode::kNotFound, fmt::format("{}: no tensor {}", impl_->directory.native(), in_quotes(name)),
                  {.reason = Reason::kBadArgument, .tensor = std::string(name)});
  }
  return read(*tensor, 0, std::span(out, bytes(*tensor)));
}

}  // namespace shardpull
