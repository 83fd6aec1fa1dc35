// Status, Result<T> and ErrorInfo: how every fallible call of shardpull reports.
//
// Nothing in the public API throws. A function that can fail returns `Status` (no value) or `Result<T>` (a value or a
// non-OK Status). Codes are gRPC's canonical codes with the same numbers; the detail a program can act on is in
// `ErrorInfo`; the detail a person needs is in `message()`, which names the tensor, rank, sizes and the setting that
// helps.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "shardpull/api.h"

namespace shardpull {

// gRPC's canonical codes, same numbers.
enum class StatusCode : int {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

// The canonical spelling, "INVALID_ARGUMENT" and so on. Total: an unknown number gives "UNKNOWN".
SHARDPULL_API std::string_view to_string(StatusCode code);

// What went wrong, as a closed list a program can switch on.
enum class Reason : std::uint16_t {
  kUnspecified = 0,
  kBadArgument,         // a value the caller passed
  kUnsupportedOp,       // an operation the op table lacks, or a malformed one
  kBakeFailed,          // the bake refused the model or its loader
  kCheckpointMalformed, // a safetensors file, an index or a config breaks its format's rules
  kUnknownArchitecture, // no family for this config.json
  kMetadataMismatch,    // the ranks, or source and metadata, do not describe the same model
  kPlanInvalid,         // tables that cannot be planned
  kVersionMismatch,     // software, wire or slice-format versions differ
  kSettingMismatch,     // K, C, workers_per_replica or a digest differ between the sides
  kBadToken,            // fleet token or incarnation refused
  kPeerLost,            // a process of the fleet ended or stopped answering
  kStalled,             // the watchdog saw no progress
  kSuperseded,          // a newer sync replaced the one this call waited for
  kWrongState,          // a call that the current state does not allow
  kShutdown,            // the engine is shutting down
  kNoMemory,            // memory or address space
  kLimit,               // one of the stated limits
  kHost,                // the operating system refused something
  kCorrupt,             // bytes that arrived are not the bytes that were sent
};
SHARDPULL_API std::string_view to_string(Reason reason);  // "bad_argument", "peer_lost"; unknown: "unspecified"

// Whose fault an error is.
enum class Fault : std::uint8_t { kUser, kPeer, kHost, kLibrary };

// The machine-readable half of an error.
struct ErrorInfo {
  Reason reason = Reason::kUnspecified;  // what went wrong
  Fault fault = Fault::kUser;            // whose fault it is
  bool retryable = false;   // whether the same call may succeed later without anybody changing anything
  std::string peer = {};    // "trainer 1", "worker 3", or empty
  std::string tensor = {};  // checkpoint name or module.parameter, or empty
};

// `text` with control characters but the line feed written as \xNN: names come from files and peers, messages go to terminals.
SHARDPULL_API std::string printable(std::string_view text);

// A code, a message (made printable) and an ErrorInfo. Immutable; cheap to copy (OK allocates nothing).
class [[nodiscard]] SHARDPULL_API Status {
 public:
  Status() noexcept = default;  // OK
  // An error. With code kOk the rest is dropped.
  Status(StatusCode code, std::string message, ErrorInfo info = {});

  static Status ok_status() { return {}; }                // OK, by name
  bool ok() const noexcept { return rep_ == nullptr; }    // whether it is no error
  StatusCode code() const noexcept;             // kOk when OK
  const std::string& message() const noexcept;  // empty when OK
  const ErrorInfo& info() const noexcept;       // defaults when OK

  // The same error with `context` and ": " put before its message. OK stays OK.
  Status with_context(std::string_view context) const;
  // "OK" or "INVALID_ARGUMENT: message".
  std::string to_string() const;
  // Marks a deliberately dropped status.
  void ignore() const noexcept {}

  // Whether code and message are the same.
  friend bool operator==(const Status& a, const Status& b) {
    return a.code() == b.code() && a.message() == b.message();
  }

 private:
  struct SHARDPULL_HIDDEN Rep;
  std::shared_ptr<const Rep> rep_;
};

// A T, or the Status that says why there is none. Reading the value of a failed Result ends the process: check first.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<1>, std::move(value)) {}            // NOLINT: implicit on purpose
  Result(Status status) : state_(std::in_place_index<0>, std::move(status)) {      // NOLINT: implicit on purpose
    if (std::get<0>(state_).ok()) std::abort();  // a Result built from OK has no value: a bug of the caller
  }

  bool ok() const noexcept { return state_.index() == 1; }  // whether there is a value
  // OK where there is a value, else why there is none.
  Status status() const { return ok() ? Status() : std::get<0>(state_); }
  // The value, in each of the ways that std::optional gives one:
  T& value() & { return std::get<1>(require()); }
  const T& value() const& { return std::get<1>(const_cast<Result*>(this)->require()); }
  T&& value() && { return std::get<1>(std::move(require())); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<Status, T>& require() {
    if (!ok()) std::abort();
    return state_;
  }
  std::variant<Status, T> state_;
};

}  // namespace shardpull
