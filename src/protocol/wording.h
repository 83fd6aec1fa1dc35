// How the machines word what they refuse: lists of ids for people, and statuses with the reason and peer a
// program reads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/identity.h"
#include "shardpull/status.h"

namespace shardpull {

// "0-3, 7, 9-12" of an ascending list; at most `max_ranges` ranges, then ", ... (N in all)". "none" when
// empty.
std::string list_ranges(const std::vector<std::uint32_t>& ascending, std::size_t max_ranges = 8);

// "group 3" or "groups 3-5, 9": the noun in its right number, then the ranges.
std::string count_noun(std::string_view noun, const std::vector<std::uint32_t>& ascending);

inline std::string worker_name(std::uint32_t consumer) {
  return to_string(Member{Role::kWorker, consumer});
}
inline std::string trainer_name(std::uint32_t rank) {
  return to_string(Member{Role::kTrainer, rank});
}

// A call or message that the current state does not allow.
inline Status wrong_state(std::string message, Fault fault = Fault::kUser) {
  return Status(StatusCode::kFailedPrecondition, std::move(message),
                {.reason = Reason::kWrongState, .fault = fault});
}
// A message of `peer` that the protocol does not allow.
inline Status peer_error(StatusCode code, std::string peer, std::string message,
                         Reason reason = Reason::kWrongState) {
  return Status(code, std::move(message), {.reason = reason, .fault = Fault::kPeer, .peer = std::move(peer)});
}
inline Status bad_argument(std::string message, std::string tensor = {}) {
  return Status(StatusCode::kInvalidArgument, std::move(message),
                {.reason = Reason::kBadArgument, .tensor = std::move(tensor)});
}
inline Status stalled(std::string message) {
  return Status(StatusCode::kDeadlineExceeded, std::move(message),
                {.reason = Reason::kStalled, .fault = Fault::kPeer, .retryable = true});
}
Status shutting_down();

}  // namespace shardpull
