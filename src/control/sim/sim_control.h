// The simulated control channel: the members of a fleet in one process, joined as the real one joins them, by
// a star. Every member has a link to the hub, which is the sender's process; a message between two others
// crosses both their links.
//
// Each link keeps its order in each direction, and everything takes a random, seeded time: so messages of one
// member to another arrive in the order they were sent, what the hub tells a member arrives in the order in
// which the hub did, and links overtake one another. Nothing is delivered by itself: whoever owns the network
// calls deliver_due(), in one thread, as simulated time goes on.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/clock.h"
#include "base/random.h"
#include "control/control.h"

namespace shardpull {

struct SimControlOptions {
  std::uint64_t seed = 0;
  std::int64_t min_delay_ns = 20 * kNanosPerMicro;  // over one link
  std::int64_t max_delay_ns = 1 * kNanosPerMilli;
  std::int64_t heartbeat_ns = 100 * kNanosPerMilli;
  std::int64_t dead_after_ns = 1 * kNanosPerSecond;
};

// Confined to one thread, with its links.
class SimControlNet {
 public:
  // `clock` must outlive the network.
  SimControlNet(const Clock& clock, const SimControlOptions& options);
  ~SimControlNet();
  SimControlNet(const SimControlNet&) = delete;
  SimControlNet& operator=(const SimControlNet&) = delete;

  // A member's link; that of kSender is the hub, which is opened first. All members hear of each other
  // (on_member_up), of the sender last, and of one whose link ends (on_member_lost). `sink` must outlive the
  // link; the link must not outlive the network. A member that opens a link while its earlier one is up
  // replaces it: the old life is lost first.
  std::unique_ptr<Control> open(const Member& self, Incarnation incarnation, ControlSink& sink);

  // The member's process dies: nothing is delivered to it any more, what it had sent last may be lost, and
  // the others hear of its end. With the hub's process every link ends.
  void crash(const Member& member);
  // Nothing crosses the member's link for so long; what was sent meanwhile arrives then, in order. Beyond
  // dead_after both ends take each other for dead, one a little later than the other, and the link is over.
  // Not the hub's own. False: the member has no link.
  bool silence(const Member& member, std::int64_t duration_ns);

  // When the next message is due; nothing when none is under way.
  std::optional<std::int64_t> next_due_ns() const;
  // Delivers every message that is due now. Messages to a life that is gone are dropped.
  void deliver_due();

 private:
  friend class SimControl;
  // One life of a member, and its link.
  struct Link {
    Member self;
    Incarnation incarnation = 0;
    ControlSink* sink = nullptr;
    bool up = true;                       // as the member sees it
    std::map<Member, Incarnation> known;  // who is up, as far as the member has heard
    std::set<Member> lost;                // who was, and is not
    std::int64_t up_ns = 0, down_ns = 0;  // when what was sent last in each direction arrives
    std::int64_t silent_until_ns = 0;
  };
  using LinkPtr = std::shared_ptr<Link>;
  struct Event {
    // kOver: a side gives the link up, `at_hub` says which.
    enum class Kind : std::uint8_t { kMessage, kUp, kLost, kOver };
    Kind kind = Kind::kMessage;
    LinkPtr link;         // the link it crosses; of a message to oneself, one's own
    bool at_hub = false;  // where it arrives
    bool timer = false;   // no message: silence does not hold it back
    Member from{}, to{};
    Incarnation from_life = 0, to_life = 0;
    ControlBody body{};
  };

  std::int64_t delay() { return random_.between(options_.min_delay_ns, options_.max_delay_ns); }
  void post(Event event);  // over event.link, towards the side that at_hub says
  void post_at(std::int64_t due_ns, Event event);
  Status send(const LinkPtr& link, const Member& to, ControlBody body);
  void leave(const LinkPtr& link);
  void arrive_at_hub(Event& event);
  void arrive_at_member(Event& event);
  void admit(const LinkPtr& link);
  void lose(const LinkPtr& link);  // at the hub
  void lose_hub(const LinkPtr& link);
  void drop_some(const LinkPtr& link, bool at_hub);

  const Clock& clock_;
  const SimControlOptions options_;
  Random random_;
  LinkPtr hub_;
  std::map<Member, LinkPtr> links_;    // the latest of each member but the hub
  std::map<Member, LinkPtr> members_;  // of them, those that are up, as the hub sees it
  std::map<std::pair<std::int64_t, std::uint64_t>, Event> events_;  // by due time, then order of sending
  std::uint64_t next_order_ = 0;
};

}  // namespace shardpull
