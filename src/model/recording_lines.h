// The lines of a recording file (docs/FORMATS.md, "Recording file"): what each holds, and one description of
// its text that both writes and reads it. A line has one spelling, so reading is comparing: whatever would
// not be written is refused.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/limits.h"
#include "base/strict_json.h"
#include "shardpull/dtype.h"
#include "shardpull/slice.h"
#include "shardpull/status.h"

namespace shardpull {

// Limits of the format, beyond those of names, dims and regions.
inline constexpr std::uint64_t kMaxRecordingBytes = 1ull << 30;
inline constexpr std::uint64_t kMaxRecordingTextBytes = 65'536;  // a chain, reason or conversion
inline constexpr std::size_t kMaxParametersPerModule = 4096;     // and as many aliases: looked up one by one
inline constexpr std::uint64_t kMaxRecordingInitialBytes = 1 << 20;  // of one buffer

struct HeaderLine {
  std::int64_t version = 1, slice_format = kSliceFormatVersion;
  std::string engine, architecture, layout;
  std::int64_t worker = 0;
  std::int64_t names = 0;
  std::string digest;  // of the names, sorted by bytes
  std::int64_t modules = 0, parameters = 0, aliases = 0, fills = 0, scatters = 0, dead = 0, conversions = 0;
};
struct ModuleLine {
  std::string name, type;
  bool baked = false, post_process = false;
  std::vector<std::string> aliases;
};
struct ParameterLine {  // of the module line before it
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape, stride;
  bool optional = false;
  std::vector<std::byte> initial;
};
struct AliasLine {
  std::string name, module, parameter;
  std::vector<std::int64_t> shape;
};
struct FillLine {
  std::string parameter;
  DType dtype = DType::kF32;
  std::int64_t offset = 0;
  std::vector<std::int64_t> shape, stride;
};
struct ScatterLine {
  std::string name;
  DType wire_dtype = DType::kF32;
  std::string chain;
  Slice slice;
  std::vector<std::int64_t> shape;
  std::string parameter;
  DType dtype = DType::kF32;
  std::int64_t offset = 0;
  std::vector<std::int64_t> stride;
};
struct DeadLine {
  std::string name, reason;
};
struct ConversionLine {
  std::string text;
};

// ---- the text of each line. `line` is const when it is written.
// ------------------------------------------------

template <typename Format, typename Line>
void header_line(Format& f, Line& line) {
  f.text(R"({"format":"shardpull-recording","version":)");
  f.integer(line.version);
  f.text(R"(,"slice_format":)");
  f.integer(line.slice_format);
  f.text(R"(,"engine":)");
  f.string(line.engine, kMaxNameBytes);
  f.text(R"(,"architecture":)");
  f.string(line.architecture, kMaxNameBytes);
  f.text(R"(,"layout":)");
  f.string(line.layout, kMaxNameBytes);
  f.text(R"(,"worker":)");
  f.integer(line.worker);
  f.text(R"(,"names":)");
  f.integer(line.names);
  f.text(R"(,"digest":)");
  f.string(line.digest, kMaxNameBytes);
  f.text(R"(,"modules":)");
  f.integer(line.modules);
  f.text(R"(,"parameters":)");
  f.integer(line.parameters);
  f.text(R"(,"aliases":)");
  f.integer(line.aliases);
  f.text(R"(,"fills":)");
  f.integer(line.fills);
  f.text(R"(,"scatters":)");
  f.integer(line.scatters);
  f.text(R"(,"dead":)");
  f.integer(line.dead);
  f.text(R"(,"conversions":)");
  f.integer(line.conversions);
  f.text("}");
}

template <typename Format, typename Line>
void module_line(Format& f, Line& line) {
  f.text(R"({"module":)");
  f.string(line.name, kMaxNameBytes);
  f.text(R"(,"type":)");
  f.string(line.type, kMaxNameBytes);
  f.text(R"(,"baked":)");
  f.boolean(line.baked);
  f.text(R"(,"post_process":)");
  f.boolean(line.post_process);
  f.text(R"(,"aliases":)");
  f.list(line.aliases, kMaxTensors, "name", [&](auto& alias) { f.string(alias, kMaxNameBytes); });
  f.text("}");
}

template <typename Format, typename Line>
void parameter_line(Format& f, Line& line) {
  f.text(R"({"parameter":)");
  f.string(line.name, kMaxNameBytes);
  f.text(R"(,"dtype":)");
  f.dtype(line.dtype);
  f.text(R"(,"shape":)");
  f.sizes(line.shape);
  f.text(R"(,"stride":)");
  f.sizes(line.stride);
  f.text(R"(,"optional":)");
  f.boolean(line.optional);
  f.text(R"(,"initial":)");
  f.bytes(line.initial, kMaxRecordingInitialBytes);
  f.text("}");
}

template <typename Format, typename Line>
void alias_line(Format& f, Line& line) {
  f.text(R"({"alias":)");
  f.string(line.name, kMaxNameBytes);
  f.text(R"(,"module":)");
  f.string(line.module, kMaxNameBytes);
  f.text(R"(,"of":)");
  f.string(line.parameter, 2 * kMaxNameBytes);
  f.text(R"(,"shape":)");
  f.sizes(line.shape);
  f.text("}");
}

template <typename Format, typename Line>
void fill_line(Format& f, Line& line) {
  f.text(R"({"fill":)");
  f.string(line.parameter, 2 * kMaxNameBytes);
  f.text(R"(,"dtype":)");
  f.dtype(line.dtype);
  f.text(R"(,"offset":)");
  f.integer(line.offset);
  f.text(R"(,"shape":)");
  f.sizes(line.shape);
  f.text(R"(,"stride":)");
  f.sizes(line.stride);
  f.text("}");
}

template <typename Format, typename Line>
void scatter_line(Format& f, Line& line) {
  f.text(R"({"scatter":)");
  f.string(line.name, kMaxNameBytes);
  f.text(R"(,"dtype":)");
  f.dtype(line.wire_dtype);
  f.text(R"(,"chain":)");
  f.string(line.chain, kMaxRecordingTextBytes);
  f.text(R"(,"slice":)");
  f.list(line.slice.regions, kMaxRegions, "region", [&](auto& region) {
    f.text("[");
    f.integer(region.offset);
    f.text(",");
    f.list(region.dims, kMaxDims, "dim", [&](auto& dim) {
      f.text("[");
      f.integer(dim.size);
      f.text(",");
      f.integer(dim.stride);
      f.text("]");
    });
    f.text("]");
  });
  f.text(R"(,"shape":)");
  f.sizes(line.shape);
  f.text(R"(,"into":{"parameter":)");
  f.string(line.parameter, 2 * kMaxNameBytes);
  f.text(R"(,"dtype":)");
  f.dtype(line.dtype);
  f.text(R"(,"offset":)");
  f.integer(line.offset);
  f.text(R"(,"stride":)");
  f.sizes(line.stride);
  f.text("}}");
}

template <typename Format, typename Line>
void dead_line(Format& f, Line& line) {
  f.text(R"({"dead":)");
  f.string(line.name, kMaxNameBytes);
  f.text(R"(,"reason":)");
  f.string(line.reason, kMaxRecordingTextBytes);
  f.text("}");
}

template <typename Format, typename Line>
void conversion_line(Format& f, Line& line) {
  f.text(R"({"conversion":)");
  f.string(line.text, kMaxRecordingTextBytes);
  f.text("}");
}

// ---- writing
// ---------------------------------------------------------------------------------------------------

// Appends to a text it borrows. What the limits forbid is written all the same: reading refuses it.
class LineWriter {
 public:
  explicit LineWriter(std::string& out) : out_(out) {}

  void text(std::string_view literal) { out_ += literal; }
  void integer(std::int64_t value) { fmt::format_to(std::back_inserter(out_), "{}", value); }
  void boolean(bool value) { out_ += value ? "true" : "false"; }
  void dtype(DType value) { string(dtype_name(value), 0); }
  void sizes(const std::vector<std::int64_t>& values) {
    list(values, kMaxDims, "dim", [&](std::int64_t value) { integer(value); });
  }
  void string(std::string_view value, std::uint64_t) {
    out_ += '"';
    for (const char c : value) {
      const std::string_view escape = short_escape(c);
      if (!escape.empty()) {
        out_ += escape;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        fmt::format_to(std::back_inserter(out_), "\\u{:04x}", static_cast<unsigned char>(c));
      } else {
        out_ += c;
      }
    }
    out_ += '"';
  }
  void bytes(const std::vector<std::byte>& value, std::uint64_t) {
    out_ += '"';
    for (const std::byte b : value) {
      out_ += "0123456789abcdef"[static_cast<unsigned>(b) >> 4];
      out_ += "0123456789abcdef"[static_cast<unsigned>(b) & 15];
    }
    out_ += '"';
  }
  template <typename Values, typename Each>
  void list(const Values& values, std::uint64_t, std::string_view, const Each& each) {
    out_ += '[';
    bool first = true;
    for (const auto& value : values) {
      if (!first) out_ += ',';
      first = false;
      each(value);
    }
    out_ += ']';
  }
  void end() { out_ += '\n'; }

  // The two-character escape of `c`, or nothing.
  static std::string_view short_escape(char c) {
    switch (c) {
      case '"':
        return "\\\"";
      case '\\':
        return "\\\\";
      case '\b':
        return "\\b";
      case '\f':
        return "\\f";
      case '\n':
        return "\\n";
      case '\r':
        return "\\r";
      case '\t':
        return "\\t";
      default:
        return {};
    }
  }

 private:
  std::string& out_;
};

// ---- reading
// ---------------------------------------------------------------------------------------------------

// Reads one line (without its line feed). The first thing that is wrong stays in status(); everything after
// it reads as nothing.
class LineReader {
 public:
  explicit LineReader(std::string_view line) : line_(line) {}

  const Status& status() const { return status_; }
  bool failed() const { return !status_.ok(); }

  void text(std::string_view literal) {
    if (failed()) return;
    if (line_.substr(at_).starts_with(literal)) {
      at_ += literal.size();
    } else {
      refuse(fmt::format("expected {}", literal));
    }
  }
  void integer(std::int64_t& value) {
    if (failed()) return;
    const char* const begin = line_.data() + at_;
    const auto [end, error] = std::from_chars(begin, line_.data() + line_.size(), value);
    const bool whole = error == std::errc() && *begin != '-' && (*begin != '0' || end == begin + 1);
    if (!whole) return refuse("expected a number from 0 to 9223372036854775807");
    at_ += static_cast<std::size_t>(end - begin);
  }
  void boolean(bool& value) {
    value = line_.substr(at_).starts_with("true");
    text(value ? "true" : "false");
  }
  void dtype(DType& value) {
    std::string name;
    string(name, kMaxNameBytes);
    if (failed()) return;
    const auto known = dtype_from_name(name);
    if (!known.ok()) return refuse(known.status().message());
    value = *known;
  }
  void sizes(std::vector<std::int64_t>& values) {
    list(values, kMaxDims, "dim", [&](std::int64_t& value) { integer(value); });
  }
  void string(std::string& value, std::uint64_t limit) {
    text("\"");
    while (!failed()) {
      if (at_ == line_.size()) return refuse("the string does not end");
      if (value.size() > limit) return refuse(fmt::format("the string is longer than {} bytes", limit));
      const char c = line_[at_];
      if (c == '"') {
        ++at_;
        return;
      }
      if (c == '\\') {
        unescape(value);
      } else if (static_cast<unsigned char>(c) < 0x20) {
        refuse("a control character that is not escaped");
      } else {
        value += c;
        ++at_;
      }
    }
  }
  void bytes(std::vector<std::byte>& value, std::uint64_t limit) {
    text("\"");
    while (!failed()) {
      if (line_.substr(at_).starts_with('"')) {
        ++at_;
        return;
      }
      if (value.size() == limit) return refuse(fmt::format("more than {} bytes", limit));
      const int high = digit(at_), low = digit(at_ + 1);
      if (high < 0 || low < 0) return refuse("expected two of 0123456789abcdef");
      value.push_back(static_cast<std::byte>(high * 16 + low));
      at_ += 2;
    }
  }
  template <typename T, typename Each>
  void list(std::vector<T>& values, std::uint64_t limit, std::string_view what, const Each& each) {
    text("[");
    if (!failed() && line_.substr(at_).starts_with(']')) {
      ++at_;
      return;
    }
    while (!failed()) {
      if (values.size() == limit) return refuse(fmt::format("more than {} {}s", limit, what));
      each(values.emplace_back());
      if (failed()) return;
      if (!line_.substr(at_).starts_with(',')) return text("]");
      ++at_;
    }
  }
  // Nothing may follow.
  void end() {
    if (!failed() && at_ != line_.size()) refuse("expected the end of the line");
  }

 private:
  void refuse(std::string_view why) {
    status_ = Status(StatusCode::kInvalidArgument,
                     fmt::format("{} at byte {}, found {}", why, at_, in_quotes(line_.substr(at_, 32))),
                     {.reason = Reason::kBadArgument});
  }
  int digit(std::size_t at) const {
    if (at >= line_.size()) return -1;
    const char c = line_[at];
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  }
  // Only the escapes that are written.
  void unescape(std::string& value) {
    constexpr std::string_view kEscaped = "\"\\\b\f\n\r\t";
    const std::string_view rest = line_.substr(at_);
    for (const char c : kEscaped) {
      if (!rest.starts_with(LineWriter::short_escape(c))) continue;
      value += c;
      at_ += 2;
      return;
    }
    const int high = digit(at_ + 4), low = digit(at_ + 5);
    const int code = high * 16 + low;
    if (!rest.starts_with("\\u00") || high < 0 || low < 0 || code >= 0x20 ||
        !LineWriter::short_escape(static_cast<char>(code)).empty()) {
      return refuse("an escape that is not written so");
    }
    value += static_cast<char>(code);
    at_ += 6;
  }

  std::string_view line_;
  std::size_t at_ = 0;
  Status status_;
};

}  // namespace shardpull
