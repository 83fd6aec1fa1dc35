// Between the plain structs of control/messages.h and their wire form, proto/shardpull/v1/control.proto. No
// gRPC here.
#pragma once

#include <optional>
#include <string>

#include "control/messages.h"
#include "shardpull/status.h"
#include "shardpull/v1/control.pb.h"

namespace shardpull {

v1::Member to_wire(const Member& member);
// Nothing when the role is not one of ours.
std::optional<Member> from_wire(const v1::Member& member);

v1::Error to_wire(const Status& status);
// Total: an unknown code becomes UNKNOWN, an unknown reason kUnspecified, an unknown fault kPeer.
Status from_wire(const v1::Error& error);

// Sets the body of `out`; the rest of it is left alone.
void to_wire(const ControlBody& body, v1::Routed& out);
// Takes the bytes out of `routed`. INVALID_ARGUMENT when it has no body this build knows, or one whose lists
// are malformed.
Result<ControlBody> from_wire(v1::Routed&& routed);

// gRPC's codes have our numbers. Total both ways; a number outside becomes UNKNOWN.
int to_grpc_code(StatusCode code);
StatusCode from_grpc_code(int code);
// What travels in a gRPC status's details, and back. Details that are no Error give a status of `code` and
// `message` alone.
std::string to_grpc_details(const Status& status);
Status from_grpc_status(int code, const std::string& message, const std::string& details);

}  // namespace shardpull
