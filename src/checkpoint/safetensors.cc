#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/status_macros.h"
#include "base/strict_json.h"
#include "base/units.h"
#include "checkpoint/posix_file.h"
#include "shardpull/slice.h"

namespace shardpull {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is never swapped");

constexpr std::uint64_t kPrefixBytes = 8;  // the header's length

// One tensor of a header.
struct Entry {
  TensorMeta meta;
  std::uint64_t begin = 0;  // data offsets
  std::uint64_t end = 0;
};

struct Header {
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
};

// Takes exactly what a header may hold, in one pass. Rules that need more than one entry are checked afterwards.
class HeaderSax : public StrictSax {
 public:
  HeaderSax(std::string_view origin, const SafetensorsLimits& limits, Header& header)
      : StrictSax(origin), limits_(limits), header_(header) {
    expected_ = "the header's object";
  }

  bool start_object(std::size_t) {
    switch (at_) {
      case At::kRoot:
        at_ = At::kNames;
        expected_ = "a tensor name";
        return true;
      case At::kValue:
        if (in_metadata_) {
          at_ = At::kMetadata;
        } else {
          at_ = At::kEntry;
          seen_ = {};
        }
        return true;
      case At::kMetadata: return bad_metadata("an object");
      default: return unexpected_in_entry("an object");
    }
  }

  bool end_object() {
    switch (at_) {
      case At::kNames: at_ = At::kEnd; return true;
      case At::kMetadata:
        at_ = At::kNames;
        in_metadata_ = false;
        return true;
      default:
        for (std::size_t i = 0; i < seen_.size(); ++i) {
          if (!seen_[i]) return refuse(entry().meta.name, fmt::format("the key \"{}\" is missing", kKeys[i]));
        }
        at_ = At::kNames;
        return true;
    }
  }

  bool key(std::string& name) {
    if (name.size() > limits_.max_name_bytes) {
      return refuse(Status(StatusCode::kResourceExhausted,
                           fmt::format("{}: a name of {} bytes, the limit is {}: {}", origin_, name.size(),
                                       limits_.max_name_bytes, in_quotes(name)),
                           {.reason = Reason::kLimit}));
    }
    switch (at_) {
      case At::kNames: return begin_value(name);
      case At::kMetadata:
        metadata_key_ = name;
        if (!header_.metadata.emplace(name, std::string()).second) {
          return refuse({}, fmt::format("duplicate name: {} appears twice in {}", in_quotes(name), kSafetensorsMetadataName));
        }
        return true;
      default: return entry_key(name);
    }
  }

  bool string(std::string& value) {
    if (at_ == At::kMetadata) {
      header_.metadata[metadata_key_] = value;
      return true;
    }
    if (at_ != At::kDtype) return unexpected_in_entry("the string " + in_quotes(value));
    auto dtype = dtype_from_name(value);
    if (!dtype.ok()) return refuse(entry().meta.name, fmt::format("unknown dtype {}", in_quotes(value)));
    entry().meta.dtype = *dtype;
    at_ = At::kEntry;
    return true;
  }

  bool start_array(std::size_t) {
    if (at_ == At::kMetadata) return bad_metadata("an array");
    if (at_ == At::kShapeValue) {
      at_ = At::kShape;
      return true;
    }
    if (at_ == At::kOffsetsValue) {
      at_ = At::kOffsets;
      offsets_ = 0;
      return true;
    }
    return unexpected_in_entry("an array");
  }

  bool end_array() {
    if (at_ == At::kOffsets && offsets_ != 2) {
      return refuse(entry().meta.name, fmt::format("data_offsets has {} numbers instead of 2", offsets_));
    }
    at_ = At::kEntry;
    return true;
  }

  bool number_unsigned(json::number_unsigned_t value) {
    if (at_ == At::kShape) {
      auto& shape = entry().meta.shape;
      if (shape.size() == kMaxDims) {
        return refuse(Status(StatusCode::kResourceExhausted,
                             fmt::format("{}: tensor {}: more than {} dims", origin_, in_quotes(entry().meta.name), kMaxDims),
                             {.reason = Reason::kLimit, .tensor = entry().meta.name}));
      }
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return refuse(entry().meta.name, fmt::format("the dim {} overflows", value));
      }
      shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (at_ == At::kOffsets) {
      if (offsets_ == 0) entry().begin = value;
      if (offsets_ == 1) entry().end = value;
      ++offsets_;
      return true;
    }
    return number(fmt::format("{}", value));
  }
  // Literals with a minus sign, -0 included.
  bool number_integer(json::number_integer_t value) {
    if (at_ == At::kShape) return refuse(entry().meta.name, fmt::format("negative dim {}", value));
    if (at_ == At::kOffsets) return refuse(entry().meta.name, fmt::format("negative data offset {}", value));
    return number(fmt::format("{}", value));
  }
  // Literals with a fraction or an exponent, and integers above 2^64 - 1.
  bool number_float(json::number_float_t, const std::string& text) {
    if (at_ == At::kShape) return refuse(entry().meta.name, fmt::format("the dim {} is not a 64-bit integer", text));
    if (at_ == At::kOffsets) {
      return refuse(entry().meta.name, fmt::format("the data offset {} is not a 64-bit integer", text));
    }
    return number(text);
  }
  bool null() { return at_ == At::kMetadata ? bad_metadata("null") : unexpected_in_entry("null"); }
  bool boolean(bool) { return at_ == At::kMetadata ? bad_metadata("a boolean") : unexpected_in_entry("a boolean"); }

 private:
  // What the next event belongs to.
  enum class At { kRoot, kNames, kValue, kMetadata, kEntry, kDtype, kShapeValue, kShape, kOffsetsValue, kOffsets, kEnd };
  static constexpr std::array<std::string_view, 3> kKeys = {"dtype", "shape", "data_offsets"};

  Entry& entry() { return header_.entries.back(); }

  bool begin_value(const std::string& name) {
    at_ = At::kValue;
    in_metadata_ = name == kSafetensorsMetadataName;
    if (in_metadata_) {
      if (std::exchange(metadata_seen_, true)) {
        return refuse({}, fmt::format("duplicate name: {} appears twice", kSafetensorsMetadataName));
      }
      return true;
    }
    if (header_.entries.size() == limits_.max_tensors) {
      return refuse(Status(StatusCode::kResourceExhausted,
                           fmt::format("{}: more than {} tensors", origin_, limits_.max_tensors),
                           {.reason = Reason::kLimit}));
    }
    header_.entries.emplace_back().meta.name = name;
    return true;
  }

  bool entry_key(const std::string& name) {
    const auto found = std::find(kKeys.begin(), kKeys.end(), name);
    if (found == kKeys.end()) return refuse(entry().meta.name, fmt::format("unknown key {} in the header", in_quotes(name)));
    const auto i = static_cast<std::size_t>(found - kKeys.begin());
    if (std::exchange(seen_[i], true)) {
      return refuse(entry().meta.name, fmt::format("duplicate name: the key \"{}\" appears twice", name));
    }
    at_ = std::array{At::kDtype, At::kShapeValue, At::kOffsetsValue}[i];
    return true;
  }

  bool bad_metadata(std::string_view found) {
    const bool tensor = metadata_key_ == "shape" || metadata_key_ == "data_offsets";
    return refuse({}, fmt::format("{} must map strings to strings, but {} has {}{}", kSafetensorsMetadataName,
                                  in_quotes(metadata_key_), found,
                                  tensor ? ": the name is reserved, a tensor was saved under it" : ""));
  }

  bool number(std::string_view text) {
    const std::string found = fmt::format("the number {}", text);
    return at_ == At::kMetadata ? bad_metadata(found) : unexpected_in_entry(found);
  }

  bool unexpected_in_entry(std::string_view found) {
    switch (at_) {
      case At::kValue:
        if (in_metadata_) {
          return refuse({}, fmt::format("{} must be an object of strings, found {}", kSafetensorsMetadataName, found));
        }
        return refuse(entry().meta.name, fmt::format("the entry must be an object, found {}", found));
      case At::kDtype: return refuse(entry().meta.name, fmt::format("dtype must be a string, found {}", found));
      case At::kShapeValue: return refuse(entry().meta.name, fmt::format("shape must be an array, found {}", found));
      case At::kShape: return refuse(entry().meta.name, fmt::format("shape must hold integers, found {}", found));
      case At::kOffsetsValue:
        return refuse(entry().meta.name, fmt::format("data_offsets must be an array, found {}", found));
      case At::kOffsets: return refuse(entry().meta.name, fmt::format("data_offsets must hold integers, found {}", found));
      default: return unexpected(found);
    }
  }

  const SafetensorsLimits& limits_;
  Header& header_;
  At at_ = At::kRoot;
  bool in_metadata_ = false;
  bool metadata_seen_ = false;
  std::string metadata_key_;
  std::array<bool, 3> seen_{};
  std::uint64_t offsets_ = 0;
};

// What else the first bytes of something that is no safetensors file may be, or "".
std::string_view looks_like(std::string_view first, std::uint64_t header_bytes, std::uint64_t file_bytes) {
  if (first.starts_with("version https://git-lfs")) {
    return "it is a Git LFS pointer, not the file itself: run `git lfs pull`";
  }
  if (first.starts_with("PK\x03\x04")) return "it is a zip archive, perhaps a PyTorch .bin";
  if (first.starts_with("GGUF")) return "it is a GGUF file";
  if (first.starts_with("<!") || first.starts_with("<html")) return "it is an HTML page, perhaps a failed download";
  const std::uint64_t swapped = __builtin_bswap64(header_bytes);
  if (swapped >= 2 && swapped <= kMaxSafetensorsHeaderBytes && swapped <= file_bytes) {
    return "the length is stored big-endian; the format is little-endian";
  }
  const auto printable = [](char c) { return (c >= 0x20 && c < 0x7F) || c == '\n' || c == '\r' || c == '\t'; };
  if (std::all_of(first.begin(), first.end(), printable)) return "it is a text file";
  return {};
}

// Rules that one entry satisfies or breaks alone.
Status check_entry(const Entry& entry, std::string_view origin) {
  const auto& [meta, begin, end] = entry;
  if (begin > end) return malformed(origin, meta.name, fmt::format("data_offsets [{}, {}] are reversed", begin, end));
  const auto bytes = tensor_bytes(meta.dtype, meta.shape);
  if (!bytes.ok()) return malformed(origin, meta.name, bytes.status().message());
  if (*bytes != end - begin) {
    return malformed(origin, meta.name,
                     fmt::format("size mismatch: {} {} takes {} bytes, data_offsets [{}, {}] hold {}",
                                 dtype_name(meta.dtype), fmt::format("[{}]", fmt::join(meta.shape, ", ")), *bytes, begin,
                                 end, end - begin));
  }
  return {};
}

// Sorts by offset and requires that the entries cover [0, end of the last) once.
Status check_coverage(std::vector<Entry>& entries, std::string_view origin, std::uint64_t& covered) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.meta.name) < std::tie(b.begin, b.end, b.meta.name);
  });
  covered = 0;
  const Entry* previous = nullptr;
  for (const Entry& entry : entries) {
    if (entry.begin > covered) {
      return malformed(origin, entry.meta.name,
                       fmt::format("hole: bytes [{}, {}) of the data belong to no tensor; {}", covered, entry.begin,
                                   previous ? "the tensor before is " + in_quotes(previous->meta.name)
                                            : std::string("the first tensor must begin at 0")));
    }
    if (entry.begin < covered) {
      const bool same = entry.begin == previous->begin && entry.end == previous->end;
      return malformed(
          origin, entry.meta.name,
          fmt::format("overlap: data_offsets [{}, {}] overlap [{}, {}] of tensor {}{}", entry.begin, entry.end,
                      previous->begin, previous->end, in_quotes(previous->meta.name),
                      same ? "; to tie two names, store one of them and set tie_word_embeddings in config.json" : ""));
    }
    covered = entry.end;
    previous = &entry;
  }
  return {};
}

Status check_duplicates(std::vector<Entry>& entries, std::string_view origin) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.meta.name < b.meta.name; });
  const auto twice = std::adjacent_find(entries.begin(), entries.end(),
                                        [](const Entry& a, const Entry& b) { return a.meta.name == b.meta.name; });
  if (twice == entries.end()) return {};
  return malformed(origin, twice->meta.name, "duplicate name: the header lists it twice");
}

}  // namespace

Result<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape) {
  const auto invalid = [&](std::string_view rule) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} {}: {}", dtype_name(dtype), fmt::format("[{}]", fmt::join(shape, ", ")), rule),
                  {.reason = Reason::kBadArgument});
  };
  if (shape.size() > kMaxDims) return invalid(fmt::format("more than {} dims", kMaxDims));
  const auto bits = static_cast<std::uint64_t>(dtype_bits(dtype));
  std::uint64_t product = bits;  // of the non-zero dims: what strides over this shape must hold
  bool empty = false;
  for (const std::int64_t dim : shape) {
    if (dim < 0) return invalid(fmt::format("negative dim {}", dim));
    if (dim == 0) {
      empty = true;
      continue;
    }
    const auto next = checked_mul(product, static_cast<std::uint64_t>(dim));
    if (!next || *next > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return invalid("the shape's size overflows");
    }
    product = *next;
  }
  if (empty) return std::uint64_t{0};
  // Rows, not just the whole, must end on a byte: what is cut by rows has no half bytes.
  if (bits < 8 && (shape.empty() || static_cast<std::uint64_t>(shape.back()) * bits % 8 != 0)) {
    return invalid("the rows of a sub-byte dtype must fall on whole bytes");
  }
  return product / 8;
}

struct SafetensorsFile::Impl {
  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (mapping != nullptr) ::munmap(mapping, file_bytes);
  }

  std::filesystem::path path;
  FileDescriptor file;
  std::uint64_t file_bytes = 0;
  void* mapping = nullptr;
  std::vector<TensorMeta> tensors;
  std::vector<std::uint64_t> offsets;  // from the start of the file
  std::vector<std::uint64_t> sizes;
  std::map<std::string, std::string> metadata;
};

SafetensorsFile::SafetensorsFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path, const SafetensorsLimits& limits) {
  const std::string& origin = path.native();
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  SHARDPULL_ASSIGN_OR_RETURN(impl->file, open_regular_file(path, impl->file_bytes));
  const std::uint64_t file_bytes = impl->file_bytes;

  std::array<char, 64> first_bytes{};
  const std::string_view first(first_bytes.data(), std::min<std::uint64_t>(file_bytes, first_bytes.size()));
  SHARDPULL_RETURN_IF_ERROR(read_fully(impl->file, path, 0, std::as_writable_bytes(std::span(first_bytes.data(), first.size()))));
  if (file_bytes < kPrefixBytes) {
    return malformed(origin, {},
                     fmt::format("truncated: a safetensors file has at least {} bytes, this one has {}{}", kPrefixBytes + 2,
                                 file_bytes, file_bytes == 0 ? " (an interrupted download?)" : ""));
  }
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, first.data(), kPrefixBytes);

  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    const std::string_view hint = looks_like(first, header_bytes, file_bytes);
    return malformed(origin, {},
                     fmt::format("header too large: the first 8 bytes announce {} bytes, the format allows {}{}{}",
                                 header_bytes, kMaxSafetensorsHeaderBytes, hint.empty() ? "" : "; ", hint));
  }
  if (header_bytes > limits.max_header_bytes) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("{}: header too large: {} bytes, the limit is {}", origin, header_bytes, limits.max_header_bytes),
                  {.reason = Reason::kLimit});
  }
  if (header_bytes < 2) {
    return malformed(origin, {}, fmt::format("a header of {} bytes cannot hold a JSON object", header_bytes));
  }
  if (file_bytes > kPrefixBytes && first[kPrefixBytes] != '{') {
    return malformed(origin, {}, fmt::format("the header does not begin with '{{' but with {}",
                                             in_quotes(first.substr(kPrefixBytes, 1))));
  }
  if (file_bytes - kPrefixBytes < header_bytes) {
    return malformed(origin, {},
                     fmt::format("truncated: 8 bytes and a header of {} need at least {} bytes, the file has {}",
                                 header_bytes, kPrefixBytes + header_bytes, file_bytes));
  }

  Header header;
  {
    std::string text(header_bytes, '\0');
    SHARDPULL_RETURN_IF_ERROR(read_fully(impl->file, path, kPrefixBytes, std::as_writable_bytes(std::span(text.data(), text.size()))));
    SHARDPULL_RETURN_IF_ERROR(check_text(text, origin));
    HeaderSax sax(origin, limits, header);
    SHARDPULL_RETURN_IF_ERROR(parse_with(text, sax));
  }
  SHARDPULL_RETURN_IF_ERROR(check_duplicates(header.entries, origin));
  for (const Entry& entry : header.entries) SHARDPULL_RETURN_IF_ERROR(check_entry(entry, origin));
  std::uint64_t covered = 0;
  SHARDPULL_RETURN_IF_ERROR(check_coverage(header.entries, origin, covered));

  const std::uint64_t data_start = kPrefixBytes + header_bytes;
  const std::uint64_t data_bytes = file_bytes - data_start;
  if (covered > data_bytes) {
    const std::string& last = header.entries.back().meta.name;
    return malformed(origin, last,
                     fmt::format("truncated: its data ends at byte {}, beyond the end of the file: expected {} bytes, the "
                                 "file has {}",
                                 covered, covered > std::numeric_limits<std::uint64_t>::max() - data_start
                                              ? std::string("more than 2^64")
                                              : fmt::format("{}", data_start + covered),
                                 file_bytes));
  }
  if (covered < data_bytes) {
    return malformed(origin, {},
                     fmt::format("trailing bytes: {} bytes behind the last tensor belong to none; expected {} bytes, the "
                                 "file has {}",
                                 data_bytes - covered, data_start + covered, file_bytes));
  }

  std::sort(header.entries.begin(), header.entries.end(),
            [](const Entry& a, const Entry& b) { return a.meta.name < b.meta.name; });
  impl->tensors.reserve(header.entries.size());
  impl->offsets.reserve(header.entries.size());
  impl->sizes.reserve(header.entries.size());
  for (Entry& entry : header.entries) {
    impl->tensors.push_back(std::move(entry.meta));
    impl->offsets.push_back(data_start + entry.begin);
    impl->sizes.push_back(entry.end - entry.begin);
  }
  impl->metadata = std::move(header.metadata);

  void* mapping = ::mmap(nullptr, file_bytes, PROT_READ, MAP_SHARED, impl->file.get(), 0);
  if (mapping == MAP_FAILED) {
    return host_error(errno, fmt::format("{}: cannot map {}", origin, format_bytes(file_bytes)));
  }
  impl->mapping = mapping;
  return SafetensorsFile(std::move(impl));
}

const std::filesystem::path& SafetensorsFile::path() const { return impl_->path; }
std::uint64_t SafetensorsFile::file_bytes() const { return impl_->file_bytes; }
const std::vector<TensorMeta>& SafetensorsFile::tensors() const { return impl_->tensors; }
std::uint64_t SafetensorsFile::bytes(std::size_t tensor) const { return impl_->sizes[tensor]; }
std::uint64_t SafetensorsFile::file_offset(std::size_t tensor) const { return impl_->offsets[tensor]; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return impl_->metadata; }

std::optional<std::size_t> SafetensorsFile::find(std::string_view name) const {
  const auto found = std::lower_bound(impl_->tensors.begin(), impl_->tensors.end(), name,
                                      [](const TensorMeta& meta, std::string_view key) { return meta.name < key; });
  if (found == impl_->tensors.end() || found->name != name) return std::nullopt;
  return static_cast<std::size_t>(found - impl_->tensors.begin());
}

const std::byte* SafetensorsFile::data(std::size_t tensor) const {
  return static_cast<const std::byte*>(impl_->mapping) + impl_->offsets[tensor];
}

Status SafetensorsFile::read(std::size_t tensor, std::uint64_t begin, std::span<std::byte> out) const {
  const std::string& name = impl_->tensors[tensor].name;
  const std::uint64_t size = impl_->sizes[tensor];
  if (begin > size || out.size() > size - begin) {
    return Status(StatusCode::kOutOfRange,
                  fmt::format("{}: tensor {}: bytes [{}, {}) of {}", impl_->path.native(), in_quotes(name), begin,
                              begin + out.size(), size),
                  {.reason = Reason::kBadArgument, .tensor = name});
  }
  Status status = read_fully(impl_->file, impl_->path, impl_->offsets[tensor] + begin, out);
  if (status.ok() || status.info().reason != Reason::kCheckpointMalformed) return status;
  struct stat now {};
  const bool known = ::fstat(impl_->file.get(), &now) == 0;
  return malformed(impl_->path.native(), name,
                   fmt::format("truncated while it was being read: expected {} bytes, the file has {}", impl_->file_bytes,
                               known ? fmt::format("{}", now.st_size) : std::string("fewer")));
}

Status SafetensorsFile::read(std::string_view name, std::byte* out) const {
  const auto tensor = find(name);
  if (!tensor) {
    return Status(StatusCode::kNotFound, fmt::format("{}: no tensor {}", impl_->path.native(), in_quotes(name)),
                  {.reason = Reason::kBadArgument, .tensor = std::string(name)});
  }
  return read(*tensor, 0, std::span(out, impl_->sizes[*tensor]));
}

// --- writing ---

struct SafetensorsWriter::Impl {
  TemporaryFile file;
  std::vector<TensorMeta> tensors;
  std::vector<std::uint64_t> sizes;
  std::size_t current = 0;    // index of the first tensor that is not complete
  std::uint64_t written = 0;  // its bytes so far

  void skip_complete() {
    while (current < tensors.size() && written == sizes[current]) {
      ++current;
      written = 0;
    }
  }
};

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

Result<SafetensorsWriter> SafetensorsWriter::create(const std::filesystem::path& path, std::vector<TensorMeta> tensors,
                                                    const std::map<std::string, std::string>& metadata) {
  const auto refused = [&](std::string_view name, std::string_view rule) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: tensor {}: {}", path.native(), in_quotes(name), rule),
                  {.reason = Reason::kBadArgument, .tensor = std::string(name)});
  };
  const auto json_string = [](std::string_view text) { return nlohmann::json(text).dump(); };  // text is valid UTF-8

  auto impl = std::make_unique<Impl>();
  std::string header = "{";
  if (!metadata.empty()) {
    header += fmt::format("\"{}\":{{", kSafetensorsMetadataName);
    bool first = true;
    for (const auto& [key, value] : metadata) {
      if (first_invalid_utf8(key) || first_invalid_utf8(value)) return refused(key, "metadata is not UTF-8");
      header += fmt::format("{}{}:{}", first ? "" : ",", json_string(key), json_string(value));
      first = false;
    }
    header += '}';
  }
  std::set<std::string_view> names;
  std::uint64_t offset = 0;
  for (const TensorMeta& meta : tensors) {
    if (meta.name == kSafetensorsMetadataName) return refused(meta.name, "the name is reserved by the format");
    if (!names.insert(meta.name).second) return refused(meta.name, "duplicate name");
    if (first_invalid_utf8(meta.name)) return refused(meta.name, "the name is not UTF-8");
    if (meta.name.size() > kMaxNameBytes) return refused(meta.name, fmt::format("the name exceeds {} bytes", kMaxNameBytes));
    const auto bytes = tensor_bytes(meta.dtype, meta.shape);
    if (!bytes.ok()) return refused(meta.name, bytes.status().message());
    const auto end = checked_add(offset, *bytes);
    if (!end) return refused(meta.name, "the file's size overflows");
    header += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", header.size() == 1 ? "" : ",",
                          json_string(meta.name), dtype_name(meta.dtype), fmt::join(meta.shape, ","), offset, *end);
    if (header.size() > kMaxSafetensorsHeaderBytes) {
      return refused(meta.name, fmt::format("the header exceeds the format's {} bytes: write several files",
                                            kMaxSafetensorsHeaderBytes));
    }
    impl->sizes.push_back(*bytes);
    offset = *end;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the data begins on a multiple of 8
  impl->tensors = std::move(tensors);

  SHARDPULL_ASSIGN_OR_RETURN(impl->file, TemporaryFile::create(path));
  const std::uint64_t header_bytes = header.size();
  SHARDPULL_RETURN_IF_ERROR(impl->file.write(std::as_bytes(std::span(&header_bytes, 1))));
  SHARDPULL_RETURN_IF_ERROR(impl->file.write(std::as_bytes(std::span(header.data(), header.size()))));
  impl->skip_complete();
  return SafetensorsWriter(std::move(impl));
}

Status SafetensorsWriter::append(std::string_view name, std::span<const std::byte> bytes) {
  const auto refused = [&](std::string_view rule) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: tensor {}: {}", impl_->file.path().native(), in_quotes(name), rule),
                  {.reason = Reason::kBadArgument, .tensor = std::string(name)});
  };
  if (bytes.empty()) {
    for (const TensorMeta& meta : impl_->tensors) {
      if (meta.name == name) return {};
    }
    return refused("not announced to the writer");
  }
  if (impl_->current == impl_->tensors.size()) return refused("every tensor is complete already");
  const std::string& due = impl_->tensors[impl_->current].name;
  if (name != due) return refused(fmt::format("tensor {} is due", in_quotes(due)));
  const std::uint64_t left = impl_->sizes[impl_->current] - impl_->written;
  if (bytes.size() > left) {
    return refused(fmt::format("size mismatch: {} bytes for the {} that are left of {}", bytes.size(), left,
                               impl_->sizes[impl_->current]));
  }
  SHARDPULL_RETURN_IF_ERROR(impl_->file.write(bytes));
  impl_->written += bytes.size();
  impl_->skip_complete();
  return {};
}

Status SafetensorsWriter::finish() {
  if (impl_->current < impl_->tensors.size()) {
    const std::string& due = impl_->tensors[impl_->current].name;
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("{}: tensor {}: size mismatch: {} of {} bytes were written", impl_->file.path().native(),
                              in_quotes(due), impl_->written, impl_->sizes[impl_->current]),
                  {.reason = Reason::kWrongState, .tensor = due});
  }
  return impl_->file.commit();
}

}  // namespace shardpull
