// The ucx transport keeps every transport's promises, over TCP alone and over what UCX finds on this host,
// with one UCX worker and with several.
#include <gtest/gtest.h>

#include "transport/transport_testing.h"
#include "transport/ucx/ucx_transport.h"

namespace shardpull::transport_testing {
namespace {

template <const char* kTransports, std::uint32_t kWorkers = 1>
struct UcxBackend {
  static std::string why_not() { return describe_ucx().status().message(); }
  Result<std::unique_ptr<Transport>> make(const std::string& name, Incarnation incarnation,
                                          const Settings& settings) {
    UcxOptions options;
    options.token = kToken;
    options.incarnation = incarnation;
    options.self_name = name;
    options.transports = kTransports;
    options.workers = kWorkers;
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
    if (std::is_same_v<Backend, UcxBackend<kTcp>>) return "Tcp";
    if (std::is_same_v<Backend, UcxBackend<kTcp, 3>>) return "TcpOf3Workers";
    return std::is_same_v<Backend, UcxBackend<kAny>> ? "Any" : "AnyOf2Workers";
  }
};
using Backends = testing::Types<UcxBackend<kTcp>, UcxBackend<kAny>, UcxBackend<kTcp, 3>, UcxBackend<kAny, 2>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Ucx, TransportContract, Backends, Names);

}  // namespace
}  // namespace shardpull::transport_testing
