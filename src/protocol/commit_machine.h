// CommitMachine: how the workers of a replica end a sync together when one of them has lost the sender.
// Rules: docs/PROTOCOL.md, "Commit".
//
//   none --start--> updating --prepared--> prepared --finish--> committed
//   updating --fails, a mate asks, or the sender is lost--> aborted
//   prepared --a mate asks, or the sender is lost--> deciding --> committed, aborted
//
// The sender's Finish messages leave together, but a sender that dies between them leaves mates of which some
// have seen theirs. A prepared worker that has lost the sender asks the others; whoever is asked no longer
// obeys the sender in this sync (it is fenced), so that nobody commits behind the back of a mate that aborts.
// One answer "committed" is enough to commit, one "aborted" to abort. Where all are undecided they ask again,
// as many rounds as there are mates, each answering a round when it has ended its own one before: however
// many of them die on the way, those that are left have heard the same (the flooding consensus of crash
// failures). Whoever has committed and has no sender any more tells all its mates, by a question with its own
// word, and stays until each has answered or is gone: a mate that found nobody to ask would abort.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "protocol/types.h"

namespace shardpull {

// What a worker says of a sync to a mate that asks. Wire: docs/PROTOCOL.md, "Hot messages".
enum class CommitWord : std::uint8_t {
  kUndecided = 1,  // prepared, fenced, and asking around itself
  kCommitted = 2,  // has been told to commit, and does or did
  kAborted = 3,    // has not, and will not
};

struct CommitConfig {
  std::uint32_t consumer = 0;
  std::vector<std::uint32_t> mates;               // the other workers of its replica
  std::int64_t answer_within_ns = 5'000'000'000;  // a mate that is silent for this long is taken for dead
};

namespace commit_action {
// Ask, saying this worker's own word, and answer with answered(), or with unreachable() when the mate cannot
// be reached any more.
struct AskMate {
  std::uint32_t mate = 0;
  std::uint64_t sync_id = 0;
  std::uint32_t round = 0;
  CommitWord word = CommitWord::kUndecided;
};
struct AnswerMate {
  std::uint32_t mate = 0;
  std::uint64_t sync_id = 0;
  std::uint32_t round = 0;
  CommitWord word = CommitWord::kAborted;
};
// The sync is decided: call ConsumerMachine::finish_update.
struct Commit {
  std::uint64_t sync_id = 0;
};
// The sync is decided: call ConsumerMachine::fail with `why`.
struct Abort {
  std::uint64_t sync_id = 0;
  Status why;
};
}  // namespace commit_action
using CommitAction = std::variant<commit_action::AskMate, commit_action::AnswerMate, commit_action::Commit,
                                  commit_action::Abort>;
using CommitActions = std::vector<CommitAction>;

class CommitMachine {
 public:
  explicit CommitMachine(CommitConfig config);
  ~CommitMachine();

  // A sync is about to start here. Refused when a mate has been promised that it will not be committed, and
  // while an earlier one is being decided.
  Status start(std::uint64_t sync_id);
  // ConsumerMachine's UpdateDone: prepared, or failed. A failure of a sync that is being decided changes
  // nothing: what mates do is theirs to find out, and the commit will fail here.
  void update_done(std::uint64_t sync_id, const Status& status);
  // The sender's Finish has arrived: Commit, unless the sync is committed already. An error when it is not
  // prepared, fenced or aborted: the sender is to be told.
  Status finish(std::uint64_t sync_id, CommitActions& out);
  // Whether the sender's word that the sync has failed is for ConsumerMachine::fail: not while mates are
  // asked. A worker that had failed then could not commit what one of them turns out to have committed;
  // Commit or Abort ends the sync.
  bool heeds_failure(std::uint64_t sync_id) const;
  // The sender is gone. Commit or Abort follows, at once or when mates have answered; neither when no sync is
  // under way or its commit is.
  void sender_lost(std::int64_t now_ns, const Status& why, CommitActions& out);

  // `word`: the asking mate's own.
  void asked(std::int64_t now_ns, std::uint32_t mate, std::uint64_t sync_id, std::uint32_t round,
             CommitWord word, CommitActions& out);
  void answered(std::int64_t now_ns, std::uint32_t mate, std::uint64_t sync_id, std::uint32_t round,
                CommitWord word, CommitActions& out);
  // The connection to the mate broke. A connection may break while its process lives: the question at hand is
  // asked once more, over another one; the mate counts as gone when that breaks as well.
  void connection_broke(std::int64_t now_ns, std::uint32_t mate, CommitActions& out);
  // The mate's process is gone, or cannot be reached.
  void unreachable(std::int64_t now_ns, std::uint32_t mate, CommitActions& out);
  void tick(std::int64_t now_ns, CommitActions& out);

  // Whether a sync is being decided, or was committed without the sender and mates are still being told:
  // until then this worker must be there to answer them. Bounded by answer_within for each round in which a
  // mate falls silent.
  bool deciding() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardpull
