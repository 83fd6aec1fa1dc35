#include "sim/scale_links.h"

#include <algorithm>
#include <cmath>

namespace shardpull::sim {

FairLinks::FairLinks(std::uint32_t outward, std::uint64_t outward_bytes_per_s, std::uint32_t inward,
                     std::uint64_t inward_bytes_per_s)
    : outward_(outward), links_(std::size_t{outward} + inward) {
  bytes_per_ns_[0] = static_cast<double>(outward_bytes_per_s) / 1e9;
  bytes_per_ns_[1] = static_cast<double>(inward_bytes_per_s) / 1e9;
  for (std::uint32_t l = 0; l < links_.size(); ++l)
    links_[l].bytes_per_ns = bytes_per_ns_[l < outward ? 0 : 1];
  with_[0].assign(1, outward);
  with_[1].assign(1, inward);
  while (leaves_ < links_.size()) leaves_ *= 2;
  ends_.assign(2 * leaves_, kNever);
}

void FairLinks::serve(Link& link, std::int64_t now_ns) const {
  if (!link.transfers.empty() && now_ns > link.served_ns) {
    link.served += static_cast<double>(now_ns - link.served_ns) * link.share();
    link.busy_ns += now_ns - link.served_ns;
  }
  link.served_ns = now_ns;
}

// Both links have been served up to now.
void FairLinks::govern(std::uint32_t transfer, std::uint8_t side, double left) {
  Transfer& t = transfers_[transfer];
  Link& link = links_[t.link[side]];
  t.governor = side;
  t.end = link.served + left;
  ++t.stamp;
  ++link.governed;
  link.due.push({t.end, transfer, t.stamp});
}

// To its other link.
void FairLinks::move(std::int64_t now_ns, std::uint32_t transfer) {
  Transfer& t = transfers_[transfer];
  Link &from = links_[t.link[t.governor]], &to = links_[t.link[1 - t.governor]];
  serve(from, now_ns);
  serve(to, now_ns);
  --from.governed;
  govern(transfer, static_cast<std::uint8_t>(1 - t.governor), std::max(0.0, t.end - from.served));
  reschedule(t.link[0]);
  reschedule(t.link[1]);
}

// The link's shares have become smaller: it may give less now than the other link of those it did not govern.
void FairLinks::shrunk(std::int64_t now_ns, std::uint32_t link, std::uint8_t side) {
  const Link& l = links_[link];
  if (l.governed == l.transfers.size()) return;
  const double share = l.share();
  for (const std::uint32_t transfer : l.transfers) {
    const Transfer& t = transfers_[transfer];
    if (t.governor != side && links_[t.link[1 - side]].share() > share) move(now_ns, transfer);
  }
}

// They have become larger: the other link of those it governs may give less now. None does where this one's
// share is below the least of the other side.
void FairLinks::grown(std::int64_t now_ns, std::uint32_t link, std::uint8_t side) {
  const Link& l = links_[link];
  if (l.governed == 0) return;
  const double share = l.share();
  if (share <= bytes_per_ns_[1 - side] / static_cast<double>(std::max<std::size_t>(1, most_[1 - side])))
    return;
  for (const std::uint32_t transfer : l.transfers) {
    const Transfer& t = transfers_[transfer];
    if (t.governor == side && links_[t.link[1 - side]].share() < share) move(now_ns, transfer);
  }
}

void FairLinks::count(std::uint8_t side, std::size_t before, std::size_t after) {
  std::vector<std::uint32_t>& with = with_[side];
  if (with.size() <= after) with.resize(after + 1, 0);
  --with[before];
  ++with[after];
  most_[side] = std::max(most_[side], after);
  while (most_[side] > 0 && with[most_[side]] == 0) --most_[side];
}

void FairLinks::reschedule(std::uint32_t link) {
  Link& l = links_[link];
  const auto stale = [&](const Due& due) { return transfers_[due.transfer].stamp != due.stamp; };
  while (!l.due.empty() && stale(l.due.top())) l.due.pop();
  std::int64_t end = kNever;
  if (!l.due.empty()) {
    const double wait = std::ceil(std::max(0.0, l.due.top().end - l.served) / l.share());
    end = l.served_ns + static_cast<std::int64_t>(wait);
  }
  std::size_t node = leaves_ + link;
  ends_[node] = end;
  for (node /= 2; node != 0; node /= 2) ends_[node] = std::min(ends_[2 * node], ends_[2 * node + 1]);
}

void FairLinks::begin(std::int64_t now_ns, std::uint32_t outward, std::uint32_t inward, std::uint64_t bytes,
                      std::uint32_t token) {
  std::uint32_t transfer = static_cast<std::uint32_t>(transfers_.size());
  if (free_.empty()) {
    transfers_.emplace_back();
  } else {
    transfer = free_.back();
    free_.pop_back();
  }
  Transfer& t = transfers_[transfer];
  t.token = token;
  t.link[0] = outward;
  t.link[1] = outward_ + inward;
  for (std::uint8_t side = 0; side < 2; ++side) {
    Link& link = links_[t.link[side]];
    serve(link, now_ns);
    t.place[side] = static_cast<std::uint32_t>(link.transfers.size());
    link.transfers.push_back(transfer);
    link.bytes += bytes;
    count(side, link.transfers.size() - 1, link.transfers.size());
  }
  const bool inward_gives_less = links_[t.link[1]].share() < links_[t.link[0]].share();
  govern(transfer, inward_gives_less ? 1 : 0, static_cast<double>(bytes));
  for (std::uint8_t side = 0; side < 2; ++side) shrunk(now_ns, t.link[side], side);
  for (const std::uint32_t link : t.link) reschedule(link);
}

void FairLinks::end_due(std::int64_t now_ns, std::vector<std::uint32_t>& tokens) {
  std::size_t node = 1;
  while (node < leaves_) node = 2 * node + (ends_[2 * node] == ends_[node] ? 0 : 1);
  Link& due = links_[node - leaves_];
  serve(due, now_ns);
  // What is left of these would end within the nanosecond.
  const double reached = due.served + due.share();
  bool first = true;
  std::vector<std::uint32_t> over;
  while (!due.due.empty()) {
    const Due top = due.due.top();
    const bool stale = transfers_[top.transfer].stamp != top.stamp;
    if (!stale && !first && top.end >= reached) break;
    due.due.pop();
    if (stale) continue;
    first = false;
    over.push_back(top.transfer);
    ++transfers_[top.transfer].stamp;
  }
  for (const std::uint32_t transfer : over) {
    const Transfer& t = transfers_[transfer];
    tokens.push_back(t.token);
    --links_[t.link[t.governor]].governed;
    for (std::uint8_t side = 0; side < 2; ++side) {
      Link& link = links_[t.link[side]];
      serve(link, now_ns);
      const std::uint32_t last = link.transfers.back();
      link.transfers[t.place[side]] = last;
      transfers_[last].place[side] = t.place[side];
      link.transfers.pop_back();
      count(side, link.transfers.size() + 1, link.transfers.size());
    }
  }
  for (const std::uint32_t transfer : over) {
    const Transfer& t = transfers_[transfer];
    for (std::uint8_t side = 0; side < 2; ++side) {
      if (!links_[t.link[side]].transfers.empty()) grown(now_ns, t.link[side], side);
    }
    for (const std::uint32_t link : t.link) reschedule(link);
    free_.push_back(transfer);
  }
}

}  // namespace shardpull::sim
