// Control: one process's link to the fleet's cold channel.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/clock_offset.h"
#include "base/identity.h"
#include "control/messages.h"
#include "shardpull/status.h"

namespace shardpull {

// What arrives. Called on the control implementation's own threads, one at a time, in order per peer; must
// not block: a driver queues an event for its progress thread and returns.
class ControlSink {
 public:
  virtual ~ControlSink() = default;
  virtual void on_control(const Member& from, Incarnation incarnation, ControlBody body) = 0;
  // `member` said hello (also a restarted one, with another incarnation). On a link that is not the hub,
  // members that were up before this process are reported right after it connected.
  virtual void on_member_up(const Member& member, Incarnation incarnation) = 0;
  // Its link broke, or it missed heartbeats for dead_after. On a link that is not the hub the sender's loss
  // means that the hub is gone: no further message follows.
  virtual void on_member_lost(const Member& member, Incarnation incarnation, const Status& why) = 0;
};

struct ControlOptions {
  // Where the hub is: "unix:/path" (in an owner-only directory) or "tcp:HOST:PORT" (a name, an IPv4 address,
  // or an IPv6 address in brackets). A hub listens at every address HOST has.
  std::string address;
  bool insecure_listen = false;  // a hub may listen where other hosts reach it: nothing is encrypted
  FleetToken token = 0;
  Member self;
  Incarnation incarnation = 0;
  std::int64_t heartbeat_ns = 500 * kNanosPerMilli;
  std::int64_t dead_after_ns = 5 * kNanosPerSecond;
  std::int64_t connect_timeout_ns = 60 * kNanosPerSecond;  // how long a link waits for the hub to appear
  std::function<Status()> interrupt = {};  // asked meanwhile, on its thread; an error ends it. Empty: never
};
// How often what blocks asks a caller's interrupt.
inline constexpr std::int64_t kAskEveryNs = 50 * kNanosPerMilli;

class Control {
 public:
  virtual ~Control() = default;  // shuts down
  // Queues `body` for `to`; never blocks; thread-safe. UNAVAILABLE when the link is down or `to` is not known
  // to be up (the hub knows; a link learns it by a later on_member_lost). A member may send to itself.
  virtual Status send(const Member& to, ControlBody body) = 0;
  // How `member`'s clock stands to this process's, by the heartbeats of their link; its own is no different.
  // Nothing for a member without a link of its own to here, or whose first heartbeat has not come back yet,
  // and always where a channel has no heartbeats, as all its members have one clock. Thread-safe.
  virtual std::optional<ClockOffset> clock_offset(const Member& member) {
    (void)member;
    return std::nullopt;
  }
  // Whom the hub has refused so far for a reason that does not pass by itself ("a peer: the fleet token is ..."),
  // each reason once: what a member that does not come may have met. Empty on other links. Thread-safe.
  virtual std::vector<std::string> refusals() const {
    return {};
  }
  // Sends what is queued (bounded, 2 s), closes, joins the threads; no callback runs after it returns.
  // Idempotent.
  virtual void shutdown() = 0;
};

}  // namespace shardpull
