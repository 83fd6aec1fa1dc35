// The errors of this room: tables, recordings or bytes that cannot be planned.
#pragma once

#include <string>
#include <utility>

#include "shardpull/status.h"

namespace shardpull {

// INVALID_ARGUMENT with reason plan_invalid; `tensor` is the name it is about, if there is one.
inline Status plan_error(std::string message, std::string tensor = {}) {
  return Status(StatusCode::kInvalidArgument, std::move(message),
                {.reason = Reason::kPlanInvalid, .tensor = std::move(tensor)});
}

// RESOURCE_EXHAUSTED with reason limit.
inline Status plan_limit_error(std::string message, std::string tensor = {}) {
  return Status(StatusCode::kResourceExhausted, std::move(message),
                {.reason = Reason::kLimit, .tensor = std::move(tensor)});
}

// UNIMPLEMENTED: legal input that this version cannot plan.
inline Status plan_unimplemented(std::string message, std::string tensor = {}) {
  return Status(StatusCode::kUnimplemented, std::move(message),
                {.reason = Reason::kPlanInvalid, .fault = Fault::kLibrary, .tensor = std::move(tensor)});
}

// INTERNAL: an invariant of the planner does not hold.
inline Status plan_internal_error(std::string message, std::string tensor = {}) {
  return Status(StatusCode::kInternal, std::move(message),
                {.reason = Reason::kPlanInvalid, .fault = Fault::kLibrary, .tensor = std::move(tensor)});
}

}  // namespace shardpull
