// The shm transport keeps every transport's promises, and those of the backends of one host.
#include <gtest/gtest.h>

#include "transport/local_transport_testing.h"
#include "transport/shm/shm_transport.h"

namespace shardpull::transport_testing {
namespace {

using ShmBackend = LocalTestBackend<LocalBackend::kShm, make_shm_transport>;
INSTANTIATE_TYPED_TEST_SUITE_P(Shm, TransportContract, ShmBackend);
INSTANTIATE_TYPED_TEST_SUITE_P(Shm, LocalContract, ShmBackend);

}  // namespace
}  // namespace shardpull::transport_testing
