// Numbers with units, as people type and read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shardpull/status.h"

namespace shardpull {

// Parses a byte count: decimal digits, then one of B, KiB, MiB, GiB, TiB (powers of 1024), kB, MB, GB, TB (powers of
// 1000) or nothing (bytes). No sign, no fraction, no space: "1.5MiB", "64M" and "64 MiB" are refused with the accepted form.
// `what` names the setting in the message ("--max-chunk-bytes").
Result<std::uint64_t> parse_bytes(std::string_view text, std::string_view what);

// Parses a duration into nanoseconds: decimal digits, then ns, us, ms, s, min or h. The unit is required.
Result<std::int64_t> parse_duration_ns(std::string_view text, std::string_view what);

// Of a speed in Gbit/s, as network cards are sold.
inline constexpr std::uint64_t kBytesPerGigabit = 125'000'000;

// Parses a whole decimal integer in [low, high]: an optional minus sign and digits, nothing else.
Result<std::int64_t> parse_integer(std::string_view text, std::string_view what, std::int64_t low, std::int64_t high);

// "0 B", "512 B", "64 MiB", "1.46 GiB": three significant digits above 1 KiB, no trailing zeros.
std::string format_bytes(std::uint64_t bytes);

// "950 ns", "1.23 ms", "4.56 s", "2 min 03 s", "1 h 02 min". Negative durations carry a minus sign.
std::string format_duration_ns(std::int64_t ns);

// "3.21 GB/s": decimal units, as link speeds are given. "-" when `ns` is not positive.
std::string format_rate(std::uint64_t bytes, std::int64_t ns);

}  // namespace shardpull
