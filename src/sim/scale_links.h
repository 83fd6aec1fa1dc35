// Links that transfers share: each transfer leaves by one link and arrives by another, and moves at the
// smaller of its equal shares of the two.
//
//   rate = min(capacity of a link / transfers on it), over its two links
//
// What a transfer leaves of its share of one link, because the other gives it less, is not given to others.
// So no link ever carries more than its capacity, a link on which all transfers get their share is full, and
// no transfer is faster than max-min fairness would have it; where one side is the bottleneck, which is the
// usual case, both are the same.
//
// Exact between events, without a sweep over all transfers: a transfer is governed by the link that gives it
// less, and a link counts the bytes that it has given to each of those it governs (`served`). They end in the
// order of the count at which they do, whatever the shares were meanwhile.
#pragma once

#include <cstdint>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace shardpull::sim {

// Thread-compatible. Time never goes back.
class FairLinks {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  // How many links there are to leave by and to arrive by, and bytes per second of each; speeds > 0.
  FairLinks(std::uint32_t outward, std::uint64_t outward_bytes_per_s, std::uint32_t inward,
            std::uint64_t inward_bytes_per_s);

  // A transfer of `bytes` begins. `token` comes back when it ends.
  void begin(std::int64_t now_ns, std::uint32_t outward, std::uint32_t inward, std::uint64_t bytes,
             std::uint32_t token);
  // When the next transfer ends; kNever: none is under way.
  std::int64_t next_ns() const { return ends_[1]; }
  // Ends those that are due at next_ns(), on one link, and appends their tokens.
  void end_due(std::int64_t now_ns, std::vector<std::uint32_t>& tokens);

  // Of a link so far: bytes of the transfers that began on it, and how long any was under way.
  std::uint64_t outward_bytes(std::uint32_t link) const { return links_[link].bytes; }
  std::uint64_t inward_bytes(std::uint32_t link) const { return links_[outward_ + link].bytes; }
  std::int64_t outward_busy_ns(std::uint32_t link) const { return links_[link].busy_ns; }
  std::int64_t inward_busy_ns(std::uint32_t link) const { return links_[outward_ + link].busy_ns; }

 private:
  struct Transfer {
    std::uint32_t link[2] = {0, 0};   // outward, inward
    std::uint32_t place[2] = {0, 0};  // in Link::transfers of each
    std::uint8_t governor = 0;        // which of the two
    std::uint32_t token = 0;
    std::uint32_t stamp = 0;  // counts its governors, and those who had the record before
    double end = 0;           // of the governor's `served`
  };
  struct Due {
    double end = 0;
    std::uint32_t transfer = 0, stamp = 0;
    bool operator>(const Due& other) const {
      return end != other.end ? end > other.end : transfer > other.transfer;
    }
  };
  struct Link {
    double bytes_per_ns = 0;
    std::vector<std::uint32_t> transfers;
    std::uint32_t governed = 0;
    double served = 0;  // bytes given to each transfer that it governs
    std::int64_t served_ns = 0;
    std::priority_queue<Due, std::vector<Due>, std::greater<>> due;  // stale ones among them
    std::uint64_t bytes = 0;
    std::int64_t busy_ns = 0;
    double share() const { return bytes_per_ns / static_cast<double>(transfers.size()); }
  };

  void serve(Link& link, std::int64_t now_ns) const;
  void govern(std::uint32_t transfer, std::uint8_t side, double left);
  void move(std::int64_t now_ns, std::uint32_t transfer);
  // The number of transfers on the link has changed: who is governed by it now.
  void shrunk(std::int64_t now_ns, std::uint32_t link, std::uint8_t side);
  void grown(std::int64_t now_ns, std::uint32_t link, std::uint8_t side);
  void count(std::uint8_t side, std::size_t before, std::size_t after);
  void reschedule(std::uint32_t link);

  const std::uint32_t outward_;
  std::vector<Link> links_;  // outward, then inward
  std::vector<Transfer> transfers_;
  std::vector<std::uint32_t> free_;
  // Per side: how many links have so many transfers, and the most that any has.
  std::vector<std::uint32_t> with_[2];
  std::size_t most_[2] = {0, 0};
  double bytes_per_ns_[2];
  // When each link's next transfer ends, as the leaves of a tree whose nodes are the earliest of two.
  std::size_t leaves_ = 1;
  std::vector<std::int64_t> ends_;
};

}  // namespace shardpull::sim
