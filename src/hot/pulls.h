// Pulls on the hot wire: what the machines' words (PullId, ReadyInfo) are in a hot message. The one place
// that says so, for the drivers of real fleets and of simulated ones. docs/PROTOCOL.md, "Hot messages".
#pragma once

#include "protocol/types.h"
#include "transport/hot_wire.h"

namespace shardpull {

// The pull that a Pull, Ready or Fail speaks of. In other messages the fields mean something else.
PullId pull_of(const HotHeader& header);

// The header of a Pull, Ready or Fail about `pull`. Token and incarnation are left 0 for whoever sends it.
HotHeader header_of(HotType type, const PullId& pull);

// A Ready as the consumer's machine takes it. `path` is the plan's for the chunk: the wire does not repeat
// it.
ReadyInfo ready_info(ReadyPayload payload, Path path);

}  // namespace shardpull
