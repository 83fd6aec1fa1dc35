// The ucx transport keeps every transport's promises, over TCP alone and over what UCX finds on this host.
#include <gtest/gtest.h>

#include "transport/transport_testing.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull::transport_testing {
namespace {

template <const char* kTransports>
struct UcxBackend {
  static std::string why_not() { return describe_ucx().status().message(); }
  Result<std::unique_ptr<Transport>> make(const std::string& name, Incarnation incarnation,
                                          const Settings& settings) {
    UcxOptions options;
    options.token = kToken;
    options.incarnation = incarnation;
    options.self_name = name;
    options.transports = kTransports;
    options.fragment_bytes = 1u << 20;
    if (settings.max_queued_bytes != 0) options.max_queued_bytes = settings.max_queued_bytes;
    if (settings.close_timeout_ns != 0) options.close_timeout_ns = settings.close_timeout_ns;
    return make_ucx_transport(std::move(options));
  }
};

constexpr char kTcp[] = "tcp";
constexpr char kAny[] = "";
struct Names {
  template <typename Backend>
  static std::string GetName(int) {
    return std::is_same_v<Backend, UcxBackend<kTcp>> ? "Tcp" : "Any";
  }
};
using Backends = testing::Types<UcxBackend<kTcp>, UcxBackend<kAny>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Ucx, TransportContract, Backends, Names);

}  // namespace
}  // namespace shardpull::transport_testing
