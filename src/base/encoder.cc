#include "base/encoder.h"

#include <fmt/format.h>

#include "base/status_macros.h"

namespace shardpull {

Status ByteReader::malformed(std::string_view problem) const {
  return Status(StatusCode::kDataLoss,
                fmt::format("{}: {} at byte {} of {}", what_, problem, position_, bytes_.size()),
                {.reason = Reason::kCorrupt, .fault = Fault::kPeer});
}

Status ByteReader::truncated(std::uint64_t wanted) const {
  return malformed(fmt::format("truncated: {} bytes wanted, {} left,", wanted, remaining()));
}

Status ByteReader::boolean(bool& out) {
  if (remaining() < 1) return truncated(1);
  const auto value = std::to_integer<std::uint8_t>(bytes_[position_]);
  if (value > 1) return malformed(fmt::format("{} is not a boolean", value));
  ++position_;
  out = value == 1;
  return {};
}

Status ByteReader::raw(std::uint64_t size, std::span<const std::byte>& out) {
  if (remaining() < size) return truncated(size);
  out = bytes_.subspan(position_, static_cast<std::size_t>(size));
  position_ += static_cast<std::size_t>(size);
  return {};
}

Status ByteReader::string(std::string& out, std::uint64_t max_bytes) {
  const std::size_t start = position_;
  std::uint32_t size = 0;
  SHARDPULL_RETURN_IF_ERROR(u32(size));
  Status status;
  std::span<const std::byte> bytes;
  if (size > max_bytes)
    status = malformed(fmt::format("string of {} bytes, at most {} allowed,", size, max_bytes));
  if (status.ok()) status = raw(size, bytes);
  if (!status.ok()) {
    position_ = start;
    return status;
  }
  out.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return {};
}

Status ByteReader::count(std::uint32_t& out, std::uint64_t max, std::uint64_t min_item_bytes) {
  const std::size_t start = position_;
  std::uint32_t value = 0;
  SHARDPULL_RETURN_IF_ERROR(u32(value));
  if (value > max || value > remaining() / min_item_bytes) {
    Status status = value > max
                        ? malformed(fmt::format("count {}, at most {} allowed,", value, max))
                        : malformed(fmt::format("count {} of items of {} bytes or more, {} bytes left,",
                                                value, min_item_bytes, remaining()));
    position_ = start;
    return status;
  }
  out = value;
  return {};
}

Status ByteReader::i64_list(std::vector<std::int64_t>& out, std::uint64_t max) {
  std::uint32_t items = 0;
  SHARDPULL_RETURN_IF_ERROR(count(items, max, sizeof(std::int64_t)));
  out.resize(items);
  if (items > 0) std::memcpy(out.data(), bytes_.data() + position_, items * sizeof(std::int64_t));
  position_ += items * sizeof(std::int64_t);
  return {};
}

Status ByteReader::u32_list(std::vector<std::uint32_t>& out, std::uint64_t max) {
  std::uint32_t items = 0;
  SHARDPULL_RETURN_IF_ERROR(count(items, max, sizeof(std::uint32_t)));
  out.resize(items);
  if (items > 0) std::memcpy(out.data(), bytes_.data() + position_, items * sizeof(std::uint32_t));
  position_ += items * sizeof(std::uint32_t);
  return {};
}

Status ByteReader::end() const {
  if (remaining() == 0) return {};
  return malformed(fmt::format("{} bytes left over", remaining()));
}

}  // namespace shardpull
