// Instead of the rest of this room, where UCX's headers are not installed.
#include "transport/ucx/ucx_transport.h"

namespace shardpull {
namespace {

Status absent() {
  return Status(
      StatusCode::kUnimplemented,
      "this build has no UCX: build it where UCX's headers are (Debian: apt-get install libucx-dev)",
      {.reason = Reason::kHost, .fault = Fault::kHost});
}

}  // namespace

Result<std::unique_ptr<Transport>> make_ucx_transport(UcxOptions) {
  return absent();
}

Result<std::string> describe_ucx() {
  return absent();
}

}  // namespace shardpull
