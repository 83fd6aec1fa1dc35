// The simulated control channel: the members of a fleet in one process, joined by messages with random,
// seeded delays.
//
// Messages of one member to another arrive in the order they were sent, those of different pairs in any
// order. Nothing is delivered by itself: whoever owns the network calls deliver_due(), in one thread, as
// simulated time goes on.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/random.h"
#include "control/control.h"

namespace shardpull {

struct SimControlOptions {
  std::uint64_t seed = 0;
  std::int64_t min_delay_ns = 20 * kNanosPerMicro;
  std::int64_t max_delay_ns = 2 * kNanosPerMilli;
};

// Confined to one thread, with its links.
class SimControlNet {
 public:
  // `clock` must outlive the network.
  SimControlNet(const Clock& clock, const SimControlOptions& options);
  ~SimControlNet();
  SimControlNet(const SimControlNet&) = delete;
  SimControlNet& operator=(const SimControlNet&) = delete;

  // A member's link. All members hear of each other (on_member_up), and of one whose link is shut down or
  // destroyed (on_member_lost). `sink` must outlive the link; the link must not outlive the network. A member
  // that opens a link while its earlier one is up replaces it: the old life is lost first.
  std::unique_ptr<Control> open(const Member& self, Incarnation incarnation, ControlSink& sink);

  // When the next message is due; nothing when none is under way.
  std::optional<std::int64_t> next_due_ns() const;
  // Delivers every message that is due now. Messages to a life that is gone are dropped.
  void deliver_due();

 private:
  friend class SimControl;
  struct Life {
    Incarnation incarnation = 0;
    ControlSink* sink = nullptr;
  };
  struct Event {
    enum class Kind : std::uint8_t { kMessage, kUp, kLost };
    Kind kind = Kind::kMessage;
    Member from, to;
    Incarnation from_life = 0, to_life = 0;
    ControlBody body;
  };

  void post(Event event);
  void leave(const Member& self, Incarnation incarnation);

  const Clock& clock_;
  const SimControlOptions options_;
  Random random_;
  std::map<Member, Life> members_;
  std::map<std::pair<Member, Member>, std::int64_t> last_due_ns_;   // per (from, to): order is kept
  std::map<std::pair<std::int64_t, std::uint64_t>, Event> events_;  // by due time, then order of sending
  std::uint64_t next_order_ = 0;
};

}  // namespace shardpull
