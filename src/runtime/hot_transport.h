// Which transport a process's options ask for, and making it: the only file that knows the backends by name.
#pragma once

#include <memory>

#include "base/identity.h"
#include "control/messages.h"
#include "plan/plan.h"
#include "shardpull/fleet.h"
#include "shardpull/worker.h"
#include "transport/transport.h"

namespace shardpull {

// What kAuto stands for: kTcp with a rendezvous, else kShm.
TransportKind transport_of(const FleetOptions& options);
PathPolicy policy_of(PathChoice path);

// Refused, each naming what helps: what the backend needs and this host does not allow (reads across
// processes; UCX), interfaces that do not exist, an address beyond loopback without insecure_listen, a
// rendezvous host that does not resolve. For kCma it forks, so it is called before there is much memory.
Result<std::unique_ptr<Transport>> make_hot_transport(const FleetOptions& options, const Member& self,
                                                      Incarnation incarnation);

}  // namespace shardpull
