#include "shardpull/status.h"

namespace shardpull {

struct Status::Rep {
  StatusCode code;
  std::string message;
  ErrorInfo info;
};

namespace {

// What an OK status refers to. Never destroyed: statuses may be read while other static objects go away.
const std::string& empty_message() {
  static const std::string* const empty = new std::string;
  return *empty;
}

const ErrorInfo& empty_info() {
  static const ErrorInfo* const empty = new ErrorInfo;
  return *empty;
}

}  // namespace

std::string_view to_string(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "OK";
    case StatusCode::kCancelled:
      return "CANCELLED";
    case StatusCode::kUnknown:
      return "UNKNOWN";
    case StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case StatusCode::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case StatusCode::kNotFound:
      return "NOT_FOUND";
    case StatusCode::kAlreadyExists:
      return "ALREADY_EXISTS";
    case StatusCode::kPermissionDenied:
      return "PERMISSION_DENIED";
    case StatusCode::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case StatusCode::kAborted:
      return "ABORTED";
    case StatusCode::kOutOfRange:
      return "OUT_OF_RANGE";
    case StatusCode::kUnimplemented:
      return "UNIMPLEMENTED";
    case StatusCode::kInternal:
      return "INTERNAL";
    case StatusCode::kUnavailable:
      return "UNAVAILABLE";
    case StatusCode::kDataLoss:
      return "DATA_LOSS";
    case StatusCode::kUnauthenticated:
      return "UNAUTHENTICATED";
  }
  return "UNKNOWN";
}

std::string_view to_string(Reason reason) {
  switch (reason) {
    case Reason::kUnspecified:
      return "unspecified";
    case Reason::kBadArgument:
      return "bad_argument";
    case Reason::kUnsupportedOp:
      return "unsupported_op";
    case Reason::kBakeFailed:
      return "bake_failed";
    case Reason::kCheckpointMalformed:
      return "checkpoint_malformed";
    case Reason::kUnknownArchitecture:
      return "unknown_architecture";
    case Reason::kMetadataMismatch:
      return "metadata_mismatch";
    case Reason::kPlanInvalid:
      return "plan_invalid";
    case Reason::kVersionMismatch:
      return "version_mismatch";
    case Reason::kSettingMismatch:
      return "setting_mismatch";
    case Reason::kBadToken:
      return "bad_token";
    case Reason::kPeerLost:
      return "peer_lost";
    case Reason::kStalled:
      return "stalled";
    case Reason::kSuperseded:
      return "superseded";
    case Reason::kWrongState:
      return "wrong_state";
    case Reason::kShutdown:
      return "shutdown";
    case Reason::kNoMemory:
      return "no_memory";
    case Reason::kLimit:
      return "limit";
    case Reason::kHost:
      return "host";
    case Reason::kCorrupt:
      return "corrupt";
  }
  return "unspecified";
}

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n') || byte == 0x7F) {
      constexpr char kDigits[] = "0123456789abcdef";
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    } else {
      out.push_back(c);
    }
  }
  return out;
}

Status::Status(StatusCode code, std::string message, ErrorInfo info) {
  if (code == StatusCode::kOk) return;
  message = printable(message);
  rep_ = std::make_shared<const Rep>(Rep{code, std::move(message), std::move(info)});
}

StatusCode Status::code() const noexcept {
  return rep_ ? rep_->code : StatusCode::kOk;
}

const std::string& Status::message() const noexcept {
  return rep_ ? rep_->message : empty_message();
}

const ErrorInfo& Status::info() const noexcept {
  return rep_ ? rep_->info : empty_info();
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return {};
  std::string message;
  message.reserve(context.size() + 2 + rep_->message.size());
  message.append(context).append(": ").append(rep_->message);
  return Status(rep_->code, std::move(message), rep_->info);
}

std::string Status::to_string() const {
  std::string text(shardpull::to_string(code()));
  if (!ok()) text.append(": ").append(rep_->message);
  return text;
}

}  // namespace shardpull
