#include "protocol/commit_machine.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/plants.h"
#include "protocol/wording.h"

namespace shardpull {

using namespace commit_action;  // NOLINT: this file is about them

struct CommitMachine::State {
  explicit State(CommitConfig given) : config(std::move(given)) {}

  enum class Stage : std::uint8_t { kNone, kUpdating, kPrepared, kDeciding, kCommitted, kAborted };

  const CommitConfig config;
  std::uint64_t sync_id = 0;
  Stage stage = Stage::kNone;
  Status why;                        // aborted, deciding: what began it
  std::uint64_t last_committed = 0;  // of all syncs
  std::uint64_t fenced_through = 0;  // syncs up to this one that had not started here will not be committed
  std::uint32_t fenced_by = 0;       // the mate that was promised so

  // Deciding.
  std::uint32_t round = 0;
  bool told = false;  // committed: mates are or were
  std::int64_t deadline_ns = 0;
  std::set<std::uint32_t> alive;                  // mates not taken for dead
  std::set<std::uint32_t> waiting;                // of them, those that have not answered this round
  std::map<std::uint32_t, std::uint32_t> parked;  // mate -> the later round it asks about
  std::map<std::uint32_t, AskMate> asked;         // the last question to each mate
  std::set<std::uint32_t> asked_again;            // mates whose last question went over a second connection

  std::string me() const { return worker_name(config.consumer); }

  void decide(std::int64_t now_ns, const Status& reason, CommitActions& out) {
    stage = Stage::kDeciding;
    why = reason;
    round = 0;
    alive = {config.mates.begin(), config.mates.end()};
    parked.clear();
    next_round(now_ns, out);
  }

  void ask(std::uint32_t mate, CommitWord word, CommitActions& out) {
    asked_again.erase(mate);
    out.push_back(asked[mate] = AskMate{mate, sync_id, round, word});
  }

  void next_round(std::int64_t now_ns, CommitActions& out) {
    if (alive.empty() || round == config.mates.size()) {
      return abort(
          Status(why.code(), fmt::format("{}; no mate has committed sync {}", why.message(), sync_id),
                 why.info()),
          out);
    }
    ++round;
    waiting = alive;
    deadline_ns = now_ns + config.answer_within_ns;
    for (const std::uint32_t mate : alive)
      ask(mate, CommitWord::kUndecided, out);
    for (auto it = parked.begin(); it != parked.end();) {
      if (it->second > round) {
        ++it;
        continue;
      }
      out.push_back(AnswerMate{it->first, sync_id, it->second, CommitWord::kUndecided});
      it = parked.erase(it);
    }
  }

  void commit(CommitActions& out) {
    stage = Stage::kCommitted;
    last_committed = sync_id;
    end(CommitWord::kCommitted, out);
    out.push_back(Commit{sync_id});
  }

  // Without a sender to rely on: all mates are told, and waited for.
  void tell(std::int64_t now_ns, CommitActions& out) {
    told = true;
    waiting = {config.mates.begin(), config.mates.end()};
    deadline_ns = now_ns + config.answer_within_ns;
    for (const std::uint32_t mate : config.mates)
      ask(mate, CommitWord::kCommitted, out);
  }

  void abort(const Status& reason, CommitActions& out) {
    stage = Stage::kAborted;
    why = reason;
    end(CommitWord::kAborted, out);
    out.push_back(Abort{sync_id, why});
  }

  void end(CommitWord word, CommitActions& out) {
    for (const auto& [mate, asked_round] : std::exchange(parked, {}))
      out.push_back(AnswerMate{mate, sync_id, asked_round, word});
    waiting.clear();
  }

  void dead(std::int64_t now_ns, std::uint32_t mate, CommitActions& out) {
    alive.erase(mate);
    waiting.erase(mate);
    if (stage == Stage::kDeciding && waiting.empty()) next_round(now_ns, out);
  }
};

CommitMachine::CommitMachine(CommitConfig config) : state_(std::make_unique<State>(std::move(config))) {}
CommitMachine::~CommitMachine() = default;

Status CommitMachine::start(std::uint64_t sync_id) {
  State& s = *state_;
  if (s.stage == State::Stage::kDeciding) {
    return Status(
        StatusCode::kFailedPrecondition,
        fmt::format("{}: sync {} while it asks its mates how sync {} ended", s.me(), sync_id, s.sync_id),
        s.why.info());
  }
  if (sync_id <= s.fenced_through) {
    return peer_error(StatusCode::kFailedPrecondition, worker_name(s.fenced_by),
                      fmt::format("{}: {} has lost {}, and was promised that sync {} will not be committed",
                                  s.me(), worker_name(s.fenced_by), trainer_name(0), sync_id),
                      Reason::kPeerLost);
  }
  s.sync_id = sync_id;
  s.stage = State::Stage::kUpdating;
  s.why = {};
  s.round = 0;
  s.told = false;
  s.waiting.clear();
  return {};
}

void CommitMachine::update_done(std::uint64_t sync_id, const Status& status) {
  State& s = *state_;
  if (sync_id != s.sync_id) return;
  if (!status.ok() && (s.stage == State::Stage::kUpdating || s.stage == State::Stage::kPrepared)) {
    s.stage = State::Stage::kAborted;
    s.why = status;
  } else if (status.ok() && s.stage == State::Stage::kUpdating) {
    s.stage = State::Stage::kPrepared;
  }
}

Status CommitMachine::finish(std::uint64_t sync_id, CommitActions& out) {
  State& s = *state_;
  if (sync_id != s.sync_id)
    return wrong_state(fmt::format("{}: finish of sync {}, started was {}", s.me(), sync_id, s.sync_id));
  switch (s.stage) {
    case State::Stage::kPrepared:
      s.commit(out);
      return {};
    case State::Stage::kCommitted:
      return {};
    case State::Stage::kDeciding:
      return Status(
          StatusCode::kFailedPrecondition,
          fmt::format("{}: sync {} is being decided by its mates: {}", s.me(), sync_id, s.why.message()),
          s.why.info());
    case State::Stage::kAborted:
      return s.why;
    case State::Stage::kNone:
    case State::Stage::kUpdating:
      break;
  }
  return wrong_state(fmt::format("{}: finish of sync {} before it was prepared", s.me(), sync_id));
}

bool CommitMachine::heeds_failure(std::uint64_t sync_id) const {
  return sync_id != state_->sync_id || state_->stage != State::Stage::kDeciding;
}

void CommitMachine::sender_lost(std::int64_t now_ns, const Status& why, CommitActions& out) {
  State& s = *state_;
  if (s.stage == State::Stage::kUpdating) s.abort(why, out);
  if (s.stage == State::Stage::kPrepared && SHARDPULL_PLANT("aborts-without-asking")) s.abort(why, out);
  if (s.stage == State::Stage::kPrepared) s.decide(now_ns, why, out);
  if (s.stage == State::Stage::kCommitted && !s.told) s.tell(now_ns, out);
}

void CommitMachine::asked(std::int64_t now_ns, std::uint32_t mate, std::uint64_t sync_id, std::uint32_t round,
                          CommitWord word, CommitActions& out) {
  State& s = *state_;
  if (sync_id > s.sync_id) {
    s.fenced_through = std::max(s.fenced_through, sync_id);
    s.fenced_by = mate;
    out.push_back(AnswerMate{mate, sync_id, round, CommitWord::kAborted});
    return;
  }
  // An earlier one: mates go on together, so that of those it is the last one that may have been committed.
  if (sync_id < s.sync_id) {
    const bool committed = sync_id == s.last_committed;
    out.push_back(
        AnswerMate{mate, sync_id, round, committed ? CommitWord::kCommitted : CommitWord::kAborted});
    return;
  }
  const Status why(
      StatusCode::kUnavailable,
      fmt::format("{} has lost {} and asks how sync {} ended", worker_name(mate), trainer_name(0), sync_id),
      {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = worker_name(mate)});
  if (word == CommitWord::kCommitted) {
    if (s.stage == State::Stage::kPrepared || s.stage == State::Stage::kDeciding) {
      s.commit(out);
      s.tell(now_ns, out);
    }
    s.waiting.erase(mate);
  }
  if (s.stage == State::Stage::kUpdating || s.stage == State::Stage::kNone) s.abort(why, out);
  if (s.stage == State::Stage::kPrepared) s.decide(now_ns, why, out);
  if (s.stage == State::Stage::kDeciding && round > s.round) {
    s.parked[mate] = round;
    return;
  }
  out.push_back(AnswerMate{mate, sync_id, round,
                           s.stage == State::Stage::kDeciding    ? CommitWord::kUndecided
                           : s.stage == State::Stage::kCommitted ? CommitWord::kCommitted
                                                                 : CommitWord::kAborted});
}

void CommitMachine::answered(std::int64_t now_ns, std::uint32_t mate, std::uint64_t sync_id,
                             std::uint32_t round, CommitWord word, CommitActions& out) {
  State& s = *state_;
  if (sync_id != s.sync_id) return;
  if (s.stage == State::Stage::kCommitted && word != CommitWord::kUndecided) s.waiting.erase(mate);
  if (s.stage != State::Stage::kDeciding) return;
  switch (word) {
    case CommitWord::kCommitted:
      s.commit(out);
      s.tell(now_ns, out);
      s.waiting.erase(mate);
      return;
    case CommitWord::kAborted:
      return s.abort(
          Status(s.why.code(),
                 fmt::format("{}; {} has not committed sync {}", s.why.message(), worker_name(mate), sync_id),
                 s.why.info()),
          out);
    case CommitWord::kUndecided:
      break;
  }
  if (round != s.round || s.waiting.erase(mate) == 0 || !s.waiting.empty()) return;
  s.next_round(now_ns, out);
}

void CommitMachine::connection_broke(std::int64_t now_ns, std::uint32_t mate, CommitActions& out) {
  State& s = *state_;
  const auto asked = s.asked.find(mate);
  if (!deciding() || asked == s.asked.end()) return;
  if (!s.asked_again.insert(mate).second) return unreachable(now_ns, mate, out);
  out.push_back(asked->second);
}

void CommitMachine::unreachable(std::int64_t now_ns, std::uint32_t mate, CommitActions& out) {
  state_->dead(now_ns, mate, out);
}

void CommitMachine::tick(std::int64_t now_ns, CommitActions& out) {
  State& s = *state_;
  if (!deciding() || now_ns < s.deadline_ns) return;
  for (const std::uint32_t mate : std::set<std::uint32_t>(s.waiting)) {
    // The last of them begins the next round, whose answers are not awaited since just now.
    s.dead(now_ns, mate, out);
    if (!deciding()) return;
  }
}

bool CommitMachine::deciding() const {
  const State& s = *state_;
  return s.stage == State::Stage::kDeciding || (s.stage == State::Stage::kCommitted && !s.waiting.empty());
}

}  // namespace shardpull
