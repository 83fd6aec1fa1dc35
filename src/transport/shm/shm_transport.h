// The shm transport: memory of one host is shared by sealed memfds and mapped by its readers.
// local_transport.h tells what travels between them.
#pragma once

#include <memory>

#include "transport/local_transport.h"

namespace shardpull {

using ShmOptions = LocalOptions;

// Makes the transport and starts its reading thread. Fails when an option is missing, or when the directory
// is not this user's alone.
Result<std::unique_ptr<Transport>> make_shm_transport(ShmOptions options);

}  // namespace shardpull
