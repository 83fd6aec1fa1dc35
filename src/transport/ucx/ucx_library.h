// UcxLibrary: UCX's functions, loaded at run time.
//
// Not linked: libucs installs signal handlers, reads its environment and may print as soon as it is loaded,
// and a process that syncs within its host needs none of it. It also lets one build run where UCX is not
// installed, and with any 1.13 or newer.
#pragma once

#include <string>

#include <ucp/api/ucp.h>

#include "shardpull/status.h"

namespace shardpull {

// Every function that the transport calls and that is not inline in UCX's headers.
#define SHARDPULL_UCP_FUNCTIONS(X)  \
  X(ucp_get_version)                \
  X(ucp_get_version_string)         \
  X(ucp_config_read)                \
  X(ucp_config_modify)              \
  X(ucp_config_release)             \
  X(ucp_init_version)               \
  X(ucp_cleanup)                    \
  X(ucp_ep_print_info)              \
  X(ucp_worker_create)              \
  X(ucp_worker_destroy)             \
  X(ucp_worker_query)               \
  X(ucp_worker_release_address)     \
  X(ucp_worker_progress)            \
  X(ucp_worker_get_efd)             \
  X(ucp_worker_arm)                 \
  X(ucp_worker_set_am_recv_handler) \
  X(ucp_ep_create)                  \
  X(ucp_ep_close_nbx)               \
  X(ucp_ep_rkey_unpack)             \
  X(ucp_rkey_destroy)               \
  X(ucp_rkey_pack)                  \
  X(ucp_rkey_buffer_release)        \
  X(ucp_mem_map)                    \
  X(ucp_mem_unmap)                  \
  X(ucp_am_send_nbx)                \
  X(ucp_am_recv_data_nbx)           \
  X(ucp_get_nbx)                    \
  X(ucp_request_free)
#define SHARDPULL_UCS_FUNCTIONS(X) X(ucs_status_string)

// Immutable; lives until the process ends, as UCX cannot be unloaded safely.
struct UcxLibrary {
#define SHARDPULL_POINTER(name) decltype(&::name) name = nullptr;
  SHARDPULL_UCP_FUNCTIONS(SHARDPULL_POINTER)
  SHARDPULL_UCS_FUNCTIONS(SHARDPULL_POINTER)
#undef SHARDPULL_POINTER
  std::string description;  // "UCX 1.13.1, /usr/lib/x86_64-linux-gnu/libucp.so.0"
};

// Whether a library that says it is `major`.`minor`.`release`, at `path`, can be used: OK for what this was
// built with and all newer minor versions. FAILED_PRECONDITION names both versions and the path, and the
// functions it lacks (`missing`, each with a blank before it).
Status check_ucx_version(unsigned major, unsigned minor, unsigned release, const std::string& path,
                         const std::string& missing);

// Thread-safe. Loads libucp.so.0 as the dynamic linker finds it, once. Signal handlers that it installs for
// errors are undone, and its log lines go to ours. UNAVAILABLE when it is not there, FAILED_PRECONDITION when
// it is older than what this was built with.
Result<const UcxLibrary*> load_ucx();

}  // namespace shardpull
