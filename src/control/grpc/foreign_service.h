// Whether what listens at a TCP address is a gRPC server at all. gRPC itself only ever says "not connected".
#pragma once

#include "base/host_port.h"
#include "shardpull/status.h"

namespace shardpull {

// Connects, says what every HTTP/2 client says first, and looks at the first bytes that come back. OK when they
// are those of an HTTP/2 server, and when nobody listens. FAILED_PRECONDITION when they are something else
// ("not our protocol", with what they are); when the other side accepts and says nothing within
// `timeout_ns`, or hangs up ("no hello").
Status check_no_foreign_service(const SocketAddress& address, std::int64_t timeout_ns);

}  // namespace shardpull
