#include "observe/consumer_log.h"

#include <algorithm>
#include <utility>

namespace shardpull {

void ConsumerLog::begin_sync(std::size_t items) {
  // A pull has three, a chunk six at most; what is asked for again has room by that.
  constexpr std::size_t kSpansAnItem = 6;
  log_.reset(kSpansAnItem * (items + 1));
  windows_.clear();
  pulls_.clear();
  updating_ = committing_ = false;
  last_asked_ = kNoItem;
}

void ConsumerLog::begin_update(std::int64_t now_ns) {
  updating_ = true;
  update_ns_ = line_ns_ = last_work_ns_ = now_ns;
}

void ConsumerLog::end_update(std::int64_t now_ns) {
  if (!std::exchange(updating_, false)) return;
  for (auto& [id, pull] : pulls_) {
    if (pull.waiting) answered(id.first, id.second, now_ns);
  }
  pulls_.clear();
  log_.add({.phase = Phase::kSignalWait, .begin_ns = last_work_ns_, .end_ns = now_ns});
  windows_.push_back({update_ns_, now_ns, Phase::kEngine});
}

void ConsumerLog::begin_commit(std::int64_t now_ns) {
  committing_ = true;
  commit_ns_ = now_ns;
}

void ConsumerLog::end_commit(std::int64_t now_ns) {
  if (!std::exchange(committing_, false)) return;
  windows_.push_back({commit_ns_, now_ns, Phase::kCommit});
}

void ConsumerLog::pull_sent(std::uint32_t chunk, std::uint16_t run, std::uint32_t trainer,
                            std::int64_t now_ns) {
  answered(chunk, run, now_ns);  // where it had been asked for before, of a trainer that is gone
  const bool again = !pulls_.insert_or_assign({chunk, run}, Pull{trainer, now_ns, now_ns, true}).second;
  if (again || chunk == last_asked_) return;
  log_.add({.phase = Phase::kSlotWait, .item = chunk, .begin_ns = line_ns_, .end_ns = now_ns});
  line_ns_ = now_ns;
  last_asked_ = chunk;
}

void ConsumerLog::answered(std::uint32_t chunk, std::uint16_t run, std::int64_t now_ns) {
  const auto found = pulls_.find({chunk, run});
  if (found == pulls_.end() || !found->second.waiting) return;
  Pull& pull = found->second;
  log_.add({.phase = Phase::kProduceWait,
            .run = run,
            .item = chunk,
            .peer = pull.trainer,
            .begin_ns = pull.sent_ns,
            .end_ns = now_ns});
  pull.waiting = false;
  pull.answered_ns = now_ns;
}

void ConsumerLog::run_started(std::uint32_t chunk, std::uint16_t run, std::int64_t now_ns) {
  const auto found = pulls_.find({chunk, run});
  if (found == pulls_.end()) return;
  const Pull& pull = found->second;
  log_.add({.phase = Phase::kEventWait,
            .run = run,
            .item = chunk,
            .peer = pull.trainer,
            .begin_ns = pull.answered_ns,
            .end_ns = now_ns});
  pulls_.erase(found);
}

void ConsumerLog::chunk_started(std::uint32_t chunk, std::int64_t now_ns) {
  const auto first = pulls_.lower_bound({chunk, 0});
  auto end = first;
  std::int64_t answered_ns = 0;
  for (; end != pulls_.end() && end->first.first == chunk; ++end)
    answered_ns = std::max(answered_ns, end->second.answered_ns);
  if (first == end) return;  // it is fed by nobody
  log_.add({.phase = Phase::kEventWait,
            .item = chunk,
            .peer = first->second.trainer,
            .begin_ns = answered_ns,
            .end_ns = now_ns});
  pulls_.erase(first, end);
}

void ConsumerLog::worked(const Span& span) {
  if (span.end_ns <= span.begin_ns) return;
  last_work_ns_ = std::max(last_work_ns_, span.end_ns);
  log_.add(span);
}

void ConsumerLog::fill(WorkerReport& report) const {
  const Charged charged = charge(log_.spans(), windows_);
  report.commit_ns = 0;
  for (const Window& window : windows_) {
    if (window.rest == Phase::kCommit)
      report.commit_ns += static_cast<std::uint64_t>(window.end_ns - window.begin_ns);
  }
  report.phases = charged.phases;
  const Waited most = most_waited(charged, log_.spans(), Phase::kProduceWait);
  report.waited_for = most.ns != 0 ? most.peer : 0;
  report.waited_ns = most.ns;
}

}  // namespace shardpull
