// gRPC control over a unix socket or TCP. The only room that includes gRPC.
#pragma once

#include <memory>
#include <string>

#include "control/control.h"

namespace shardpull {

// The sender's side: serves the hub at options.address and is itself member options.self. A hello with
// another token, software or wire version is refused, naming both sides' values. A member that connects again
// with another incarnation while its old link lives gets ALREADY_EXISTS, and its link tries again until the
// old one is found dead and reported lost.
Result<std::unique_ptr<Control>> start_grpc_hub(const ControlOptions& options, ControlSink& sink);

// Everybody else: connects, waiting up to connect_timeout for the hub to appear, and says hello.
Result<std::unique_ptr<Control>> connect_grpc_control(const ControlOptions& options, ControlSink& sink);

// What is linked, for diagnosis: "gRPC 1.51.1".
std::string describe_grpc();

}  // namespace shardpull
