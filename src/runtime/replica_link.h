// ReplicaLink: a worker's connections to its mates, the other workers of its replica, on which they agree how
// a sync ends when the sender is lost: binds one CommitMachine to the transport. docs/PROTOCOL.md, "Commit".
//
// Connections are made when there is something to ask: in a fleet that lives, none is.
//
// Confined to the progress thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/identity.h"
#include "protocol/commit_machine.h"
#include "runtime/progress_thread.h"
#include "transport/transport.h"

namespace shardpull {

// What the link needs from whoever owns it.
struct ReplicaHooks {
  // Tells a mate, by the control channel, where this worker listens.
  std::function<void(std::uint32_t mate, const std::string& address)> announce;
  // The sync is decided. Called within the event that decided it: what arrives next must find it so.
  std::function<void(std::uint64_t sync_id)> commit;
  std::function<void(std::uint64_t sync_id, const Status& why)> abort;
  // deciding() may have ended with a mate that is gone.
  std::function<void()> settled = [] {};
};

class ReplicaLink {
 public:
  ReplicaLink(ProgressThread& progress, std::uint32_t consumer, std::vector<std::uint32_t> mates,
              FleetToken token, Incarnation incarnation, std::int64_t dead_after_ns, ReplicaHooks hooks);

  // Listens, when there are mates.
  Status listen();
  // From the control channel: a worker is up (it is told where this one listens when it is a mate), and where
  // one listens.
  void worker_up(std::uint32_t worker, Incarnation incarnation);
  void mate_listens(std::uint32_t mate, Incarnation incarnation, std::string address);

  // As CommitMachine's.
  Status start(std::uint64_t sync_id) { return machine_.start(sync_id); }
  void update_done(std::uint64_t sync_id, const Status& status) { machine_.update_done(sync_id, status); }
  Status finish(std::uint64_t sync_id);
  bool heeds_failure(std::uint64_t sync_id) const { return machine_.heeds_failure(sync_id); }
  void sender_lost(const Status& why);
  bool deciding() const { return machine_.deciding(); }
  void tick();

  // From the transport. False when the endpoint is not one of this link's.
  void on_accepted(EndpointId endpoint);
  bool on_message(EndpointId endpoint, const HotHeader& header, const std::byte* payload);
  bool on_closed(EndpointId endpoint, const Status& why);

 private:
  struct Mate {
    Incarnation incarnation = 0;   // 0: not up
    std::string address;           // empty: it has not said
    EndpointId endpoint = 0;       // to it; 0: none
  };

  void unreachable(std::uint32_t mate, const Status& why);
  // Runs one event of the machine, then performs what it asked for.
  template <typename Event>
  void drive(Event event);
  void perform(const commit_action::AskMate& action);
  void perform(const commit_action::AnswerMate& action);
  void perform(const commit_action::Commit& action);
  void perform(const commit_action::Abort& action);
  HotHeader header(HotType type, std::uint64_t sync_id, std::uint32_t mate, std::uint32_t round) const;

  ProgressThread& progress_;
  const std::uint32_t consumer_;
  const FleetToken token_;
  const Incarnation incarnation_;
  const std::int64_t connect_timeout_ns_;
  const ReplicaHooks hooks_;
  CommitMachine machine_;
  std::string address_;  // empty: not listening
  std::map<std::uint32_t, Mate> mates_;
  std::map<EndpointId, std::uint32_t> to_mates_;
  // Accepted, and the mate that it is; 0xFFFFFFFF: it has not said.
  std::map<EndpointId, std::uint32_t> from_mates_;
};

}  // namespace shardpull
