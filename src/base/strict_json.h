// JSON from strangers: the checks that nlohmann-json leaves to its caller, shared by every reader of files.
//
// Two passes. check_text() looks at the bytes: UTF-8, and no control character but white space (nlohmann takes a NUL for the
// end of the input). StrictSax then drives the parser event by event; what it cannot place it refuses, so that nothing is
// built before it is known to be wanted. Depth, keys and strings are bounded by the text's own length, which the caller bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "shardpull/status.h"

namespace shardpull {

// `text` in quotes, as errors show names: control characters and bytes that are not UTF-8 escaped, long ones cut.
std::string in_quotes(std::string_view text);

// Offset of the first byte that is not part of well-formed UTF-8 (no surrogates, no overlong forms), or nothing.
std::optional<std::size_t> first_invalid_utf8(std::string_view text);

// DATA_LOSS, kCheckpointMalformed: "ORIGIN: tensor "NAME": RULE". `tensor` may be empty.
Status malformed(std::string_view origin, std::string_view tensor, std::string_view rule);

// The first rule that the bytes break, or OK.
Status check_text(std::string_view text, std::string_view origin);

// Checks everything that nlohmann-json's own parser lets pass: check_text, no key twice in one object (named), at most
// `max_depth` open arrays and objects. `text` must be one JSON value.
Status check_json(std::string_view text, std::size_t max_depth, std::string_view origin);

// Base of the SAX consumers: refuses every event. A consumer hides the events it takes. Confined.
class StrictSax {
 public:
  using json = nlohmann::json;

  explicit StrictSax(std::string_view origin) : origin_(origin) {}

  // The first refusal; OK while there was none.
  const Status& status() const { return status_; }

  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool number_integer(json::number_integer_t value) { return unexpected(fmt::format("the number {}", value)); }
  bool number_unsigned(json::number_unsigned_t value) { return unexpected(fmt::format("the number {}", value)); }
  bool number_float(json::number_float_t, const std::string& text) { return unexpected("the number " + text); }
  bool string(std::string& value) { return unexpected("the string " + in_quotes(value)); }
  bool binary(json::binary_t&) { return unexpected("binary data"); }
  bool start_object(std::size_t) { return unexpected("an object"); }
  bool key(std::string& name) { return unexpected("the key " + in_quotes(name)); }
  bool end_object() { return true; }
  bool start_array(std::size_t) { return unexpected("an array"); }
  bool end_array() { return true; }
  bool parse_error(std::size_t position, const std::string& last_token, const json::exception& error);

 protected:
  // Ends the parse with this status. Returns false, as the events do.
  bool refuse(Status status) {
    if (status_.ok()) status_ = std::move(status);
    return false;
  }
  bool refuse(std::string_view tensor, std::string_view rule) { return refuse(malformed(origin_, tensor, rule)); }
  bool unexpected(std::string_view found) { return refuse({}, fmt::format("{} where {} belongs", found, expected_)); }

  std::string origin_;
  std::string expected_ = "an object";  // for unexpected()

 private:
  Status status_;
};

// Runs `sax` over `text`.
template <typename Sax>
Status parse_with(std::string_view text, Sax& sax) {
  // The result is in the status: a parse that ends early has one.
  (void)nlohmann::json::sax_parse(text.begin(), text.end(), &sax);
  return sax.status();
}

}  // namespace shardpull
