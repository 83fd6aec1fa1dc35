// How two monotonic clocks of different processes stand to each other, from messages that went back and
// forth.
#pragma once

#include <cstdint>
#include <optional>

namespace shardpull {

// Another's clock against this process's: here = there + offset, within `error_ns` either way.
struct ClockOffset {
  std::int64_t offset_ns = 0;
  std::int64_t error_ns = 0;
  friend bool operator==(const ClockOffset&, const ClockOffset&) = default;
};

// Keeps the best of many exchanges. An exchange bounds the offset by half of the time that its two messages
// were under way; a bound grows as it ages, since clocks drift apart. Confined.
class ClockComparison {
 public:
  // One exchange: a message left here at `sent_ns` and came there at `there_received_ns`; the answer left
  // there at `there_sent_ns` and came here at `received_ns`. Times that cannot be are ignored: they come from
  // a peer.
  void add(std::int64_t sent_ns, std::int64_t there_received_ns, std::int64_t there_sent_ns,
           std::int64_t received_ns);
  // Nothing before the first exchange.
  std::optional<ClockOffset> at(std::int64_t now_ns) const;

 private:
  struct Best {
    std::int64_t offset_ns = 0, error_ns = 0, at_ns = 0;
  };
  static std::int64_t error_at(const Best& best, std::int64_t now_ns);
  std::optional<Best> best_;
};

}  // namespace shardpull
