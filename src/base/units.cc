#include "base/units.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include <fmt/format.h>

#include "base/checked.h"

namespace shardpull {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t factor;
};

constexpr std::uint64_t kKi = 1024;
constexpr Unit kByteUnits[] = {
    {"", 1},
    {"B", 1},
    {"KiB", kKi},
    {"MiB", kKi* kKi},
    {"GiB", kKi* kKi* kKi},
    {"TiB", kKi* kKi* kKi* kKi},
    {"kB", 1000},
    {"MB", 1000'000},
    {"GB", 1000'000'000},
    {"TB", 1000'000'000'000},
};
constexpr std::string_view kByteForm =
    "a whole number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB (or none for bytes), such as 64MiB";

constexpr Unit kDurationUnits[] = {
    {"ns", 1},
    {"us", 1'000},
    {"ms", 1'000'000},
    {"s", 1'000'000'000},
    {"min", 60'000'000'000},
    {"h", 3'600'000'000'000},
};
constexpr std::string_view kDurationForm = "a whole number and one of ns, us, ms, s, min, h, such as 300s";

Status refused(std::string_view text, std::string_view what, std::string_view why, std::string_view form) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{}: \"{}\" {}; expected {}", what, text, why, form),
                {.reason = Reason::kBadArgument});
}

Result<std::uint64_t> parse_with_unit(std::string_view text, std::string_view what,
                                      std::span<const Unit> units, std::string_view form, std::uint64_t max) {
  std::uint64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc::result_out_of_range) return refused(text, what, "is too large", form);
  if (error != std::errc())
    return refused(text, what, text.empty() ? "is empty" : "does not start with a digit", form);
  const std::string_view unit = text.substr(static_cast<std::size_t>(rest - text.data()));
  for (const Unit& known : units) {
    if (known.name != unit) continue;
    const auto value = checked_mul<std::uint64_t>(number, known.factor);
    if (!value || *value > max) return refused(text, what, "is too large", form);
    return *value;
  }
  if (unit.empty()) return refused(text, what, "has no unit", form);
  if (unit.front() == '.' || unit.front() == ',') return refused(text, what, "is not a whole number", form);
  return refused(text, what, fmt::format("ends in \"{}\", which is no unit", unit), form);
}

// Three significant digits without trailing zeros: 1, 1.5, 12.3, 999.
std::string three_digits(double value) {
  const int decimals = value < 10 ? 2 : value < 100 ? 1 : 0;
  std::string text = fmt::format("{:.{}f}", value, decimals);
  if (decimals > 0) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
  }
  return text;
}

}  // namespace

Result<std::uint64_t> parse_bytes(std::string_view text, std::string_view what) {
  return parse_with_unit(text, what, kByteUnits, kByteForm, std::numeric_limits<std::uint64_t>::max());
}

Result<std::int64_t> parse_duration_ns(std::string_view text, std::string_view what) {
  auto value = parse_with_unit(text, what, kDurationUnits, kDurationForm,
                               static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  if (!value.ok()) return value.status();
  return static_cast<std::int64_t>(*value);
}

Result<std::int64_t> parse_integer(std::string_view text, std::string_view what, std::int64_t low,
                                   std::int64_t high) {
  const std::string form =
      low == std::numeric_limits<std::int64_t>::min() && high == std::numeric_limits<std::int64_t>::max()
          ? std::string("a whole number")
      : high == std::numeric_limits<std::int64_t>::max()
          ? fmt::format("a whole number, {} or more", low)
          : fmt::format("a whole number from {} to {}", low, high);
  std::int64_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || rest != text.data() + text.size()) {
    return refused(text, what,
                   error == std::errc::result_out_of_range ? "is out of range" : "is not a whole number",
                   form);
  }
  if (value < low || value > high) return refused(text, what, "is out of range", form);
  return value;
}

std::string format_bytes(std::uint64_t bytes) {
  if (bytes < kKi) return fmt::format("{} B", bytes);
  static constexpr const char* kNames[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / static_cast<double>(kKi);
  int unit = 0;
  while (value >= 999.5 && unit < 5) {
    value /= static_cast<double>(kKi);
    ++unit;
  }
  return fmt::format("{} {}", three_digits(value), kNames[unit]);
}

std::string format_duration_ns(std::int64_t ns) {
  if (ns < 0) {
    const std::uint64_t positive = 0 - static_cast<std::uint64_t>(ns);
    if (positive > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      return "-" + format_duration_ns(std::numeric_limits<std::int64_t>::max());
    return "-" + format_duration_ns(static_cast<std::int64_t>(positive));
  }
  const double value = static_cast<double>(ns);
  if (ns < 1'000) return fmt::format("{} ns", ns);
  if (value < 999.5e3) return three_digits(value / 1e3) + " us";
  if (value < 999.5e6) return three_digits(value / 1e6) + " ms";
  if (value < 59.95e9) return three_digits(value / 1e9) + " s";
  const std::int64_t seconds = ns / 1'000'000'000 + (ns % 1'000'000'000 >= 500'000'000 ? 1 : 0);
  if (seconds < 3600) return fmt::format("{} min {:02} s", seconds / 60, seconds % 60);
  return fmt::format("{} h {:02} min", seconds / 3600, seconds / 60 % 60);
}

std::string format_rate(std::uint64_t bytes, std::int64_t ns) {
  if (ns <= 0) return "-";
  static constexpr const char* kNames[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  double value = static_cast<double>(bytes) * 1e9 / static_cast<double>(ns);
  int unit = 0;
  while (value >= 999.5 && unit < 4) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{} {}", three_digits(value), kNames[unit]);
}

}  // namespace shardpull
