#include "base/strict_json.h"

#include <set>
#include <vector>

#include "base/status_macros.h"

namespace shardpull {
namespace {

// Bytes of the well-formed UTF-8 sequence at the front of `text` (not empty), or 0.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto continues = [&](std::size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;  // a continuation byte, or an overlong form
  if (lead < 0xE0) return text.size() >= 2 && continues(1) ? 2 : 0;
  if (lead < 0xF0) {
    if (text.size() < 3 || !continues(1) || !continues(2)) return 0;
    if (lead == 0xE0 && byte(1) < 0xA0) return 0;   // overlong
    if (lead == 0xED && byte(1) >= 0xA0) return 0;  // a surrogate
    return 3;
  }
  if (lead < 0xF5) {
    if (text.size() < 4 || !continues(1) || !continues(2) || !continues(3)) return 0;
    if (lead == 0xF0 && byte(1) < 0x90) return 0;   // overlong
    if (lead == 0xF4 && byte(1) >= 0x90) return 0;  // above U+10FFFF
    return 4;
  }
  return 0;
}

// Takes any JSON; refuses a key that an object already has, and depth.
class CheckSax : public StrictSax {
 public:
  CheckSax(std::string_view origin, std::size_t max_depth) : StrictSax(origin), max_depth_(max_depth) {}

  bool null() { return true; }
  bool boolean(bool) { return true; }
  bool number_integer(json::number_integer_t) { return true; }
  bool number_unsigned(json::number_unsigned_t) { return true; }
  bool number_float(json::number_float_t, const std::string&) { return true; }
  bool string(std::string&) { return true; }
  bool start_object(std::size_t) { return open(); }
  bool key(std::string& name) {
    if (levels_.back().insert(name).second) return true;
    return refuse({}, fmt::format("the key {} appears twice in one object (duplicate name)", in_quotes(name)));
  }
  bool end_object() { return close(); }
  bool start_array(std::size_t) { return open(); }
  bool end_array() { return close(); }

 private:
  bool open() {
    if (levels_.size() == max_depth_) {
      return refuse({}, fmt::format("more than {} nested objects and arrays", max_depth_));
    }
    levels_.emplace_back();
    return true;
  }
  bool close() {
    levels_.pop_back();
    return true;
  }

  std::size_t max_depth_;
  std::vector<std::set<std::string>> levels_;  // keys seen; arrays have none
};

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kShown = 256;
  std::string out = "\"";
  std::size_t at = 0;
  while (at < text.size() && at < kShown) {
    const std::size_t length = utf8_length(text.substr(at));
    const auto byte = static_cast<unsigned char>(text[at]);
    if (length == 0 || byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
      at += 1;
    } else {
      out += text.substr(at, length);
      at += length;
    }
  }
  out += '"';
  if (at < text.size()) out += fmt::format("... ({} bytes)", text.size());
  return out;
}

std::optional<std::size_t> first_invalid_utf8(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t length = utf8_length(text.substr(at));
    if (length == 0) return at;
    at += length;
  }
  return std::nullopt;
}

Status malformed(std::string_view origin, std::string_view tensor, std::string_view rule) {
  std::string message(origin);
  if (!tensor.empty()) message += ": tensor " + in_quotes(tensor);
  message += ": ";
  message += rule;
  return Status(StatusCode::kDataLoss, std::move(message),
                {.reason = Reason::kCheckpointMalformed, .tensor = std::string(tensor)});
}

Status check_text(std::string_view text, std::string_view origin) {
  if (const auto at = first_invalid_utf8(text)) {
    return malformed(origin, {},
                     fmt::format("invalid UTF-8: byte 0x{:02x} at offset {}, after {}",
                                 static_cast<unsigned char>(text[*at]), *at,
                                 in_quotes(text.substr(*at < 40 ? 0 : *at - 40, std::min<std::size_t>(*at, 40)))));
  }
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 && byte != '\t' && byte != '\n' && byte != '\r') {
      return malformed(origin, {}, fmt::format("invalid JSON: control character 0x{:02x} at offset {}", byte, i));
    }
  }
  return {};
}

Status check_json(std::string_view text, std::size_t max_depth, std::string_view origin) {
  SHARDPULL_RETURN_IF_ERROR(check_text(text, origin));
  CheckSax sax(origin, max_depth);
  return parse_with(text, sax);
}

bool StrictSax::parse_error(std::size_t position, const std::string&, const json::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: DETAIL; last read: '...'"
  std::string_view detail = error.what();
  if (const auto bracket = detail.find("] "); bracket != detail.npos) detail.remove_prefix(bracket + 2);
  if (const auto colon = detail.find(": "); colon != detail.npos) detail.remove_prefix(colon + 2);
  if (const auto last = detail.rfind("; last read"); last != detail.npos) detail = detail.substr(0, last);
  return refuse({}, fmt::format("invalid JSON at byte {}: {}", position, detail));
}

}  // namespace shardpull
