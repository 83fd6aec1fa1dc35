// The canonical little-endian encoding that plans and messages are digested and sent in: fixed-width integers, lengths
// before variable parts, no padding, no alignment. The same values give the same bytes on every machine.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardpull/status.h"

namespace shardpull {

static_assert(std::endian::native == std::endian::little, "hosts are little-endian, as checkpoint files are");

// Appends values to a byte vector it owns. A value type; thread-compatible.
class ByteWriter {
 public:
  void u8(std::uint8_t value) { append(value); }
  void u16(std::uint16_t value) { append(value); }
  void u32(std::uint32_t value) { append(value); }
  void u64(std::uint64_t value) { append(value); }
  void i64(std::int64_t value) { append(value); }
  void boolean(bool value) { append<std::uint8_t>(value ? 1 : 0); }
  // The bytes alone, without their length.
  void raw(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  // u32 length, then the bytes. Texts over 4 GiB cannot be written: the caller has checked its limits (base/limits.h).
  void string(std::string_view text) {
    u32(static_cast<std::uint32_t>(text.size()));
    raw(std::as_bytes(std::span(text.data(), text.size())));
  }
  // u32 count, then each element as i64.
  void i64_list(std::span<const std::int64_t> values) {
    u32(static_cast<std::uint32_t>(values.size()));
    for (const std::int64_t value : values) i64(value);
  }
  // u32 count, then each element as u32.
  void u32_list(std::span<const std::uint32_t> values) {
    u32(static_cast<std::uint32_t>(values.size()));
    for (const std::uint32_t value : values) u32(value);
  }

  // Overwrites the u32 at `offset`, written before, with `value`: for a length known only afterwards.
  void patch_u32(std::size_t offset, std::uint32_t value) { std::memcpy(bytes_.data() + offset, &value, sizeof value); }

  void reserve(std::size_t bytes) { bytes_.reserve(bytes); }
  std::size_t size() const { return bytes_.size(); }
  std::span<const std::byte> bytes() const { return bytes_; }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  template <typename T>
  void append(T value) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof value);
    std::memcpy(bytes_.data() + at, &value, sizeof value);
  }
  std::vector<std::byte> bytes_;
};

// Reads what ByteWriter wrote from bytes it borrows. Every read is bounds-checked; a failed one leaves the position where it
// was and its output unchanged. Errors name the offset and `what` (the thing being decoded). Thread-compatible.
class ByteReader {
 public:
  // `what` names the message in errors and must outlive the reader ("plan", "pull header").
  explicit ByteReader(std::span<const std::byte> bytes, std::string_view what = "message") : bytes_(bytes), what_(what) {}

  Status u8(std::uint8_t& out) { return fixed(out); }
  Status u16(std::uint16_t& out) { return fixed(out); }
  Status u32(std::uint32_t& out) { return fixed(out); }
  Status u64(std::uint64_t& out) { return fixed(out); }
  Status i64(std::int64_t& out) { return fixed(out); }
  // Only 0 and 1 are booleans.
  Status boolean(bool& out);
  // Borrows `size` bytes of the input.
  Status raw(std::uint64_t size, std::span<const std::byte>& out);
  // A string of at most `max_bytes`.
  Status string(std::string& out, std::uint64_t max_bytes);
  // A u32 count of items that take at least `min_item_bytes` (> 0) each. A count above `max`, or above what the rest of the
  // input could hold, is refused: memory is never reserved for items that cannot be there.
  Status count(std::uint32_t& out, std::uint64_t max, std::uint64_t min_item_bytes);
  Status i64_list(std::vector<std::int64_t>& out, std::uint64_t max);
  Status u32_list(std::vector<std::uint32_t>& out, std::uint64_t max);
  // OK when nothing is left over.
  Status end() const;

  std::size_t position() const { return position_; }
  std::size_t remaining() const { return bytes_.size() - position_; }

  // A DATA_LOSS status that names `what` and the current offset, for rules the caller checks on decoded values.
  Status malformed(std::string_view problem) const;

 private:
  template <typename T>
  Status fixed(T& out) {
    if (remaining() < sizeof(T)) return truncated(sizeof(T));
    std::memcpy(&out, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return {};
  }
  Status truncated(std::uint64_t wanted) const;

  std::span<const std::byte> bytes_;
  std::string_view what_;
  std::size_t position_ = 0;
};

}  // namespace shardpull
