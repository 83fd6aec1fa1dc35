#include "cli/environment.h"

#include <arpa/inet.h>

#include <cstdlib>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "base/host_port.h"
#include "base/status_macros.h"
#include "base/units.h"

namespace shardpull::cli {
namespace {

bool is_ipv6(std::string_view text) {
  const std::string address(text.substr(0, text.find('%')));
  in6_addr parsed{};
  return inet_pton(AF_INET6, address.c_str(), &parsed) == 1;
}

// The number in a variable, or nothing where it is not set.
Result<std::optional<std::int64_t>> number(const Environment& environment, const char* name, std::int64_t low,
                                           std::int64_t high) {
  const auto text = environment(name);
  if (!text) return std::optional<std::int64_t>();
  SHARDPULL_ASSIGN_OR_RETURN(const std::int64_t value,
                             parse_integer(*text, fmt::format("the environment variable {}", name), low, high));
  return std::optional(value);
}

}  // namespace

Environment process_environment() {
  return [](const char* name) -> std::optional<std::string> {
    const char* const value = std::getenv(name);
    return value == nullptr || *value == '\0' ? std::optional<std::string>() : value;
  };
}

Result<std::optional<RankOf>> rank_from(const Environment& environment) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  struct Names {
    const char* rank;
    const char* size;
  };
  for (const Names names : {Names{"RANK", "WORLD_SIZE"}, Names{"SLURM_PROCID", "SLURM_NTASKS"}}) {
    SHARDPULL_ASSIGN_OR_RETURN(const auto rank, number(environment, names.rank, 0, kMost));
    if (!rank) continue;
    SHARDPULL_ASSIGN_OR_RETURN(const auto size, number(environment, names.size, 1, kMost));
    if (size && *rank >= *size) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("the environment variable {} is {}, which is not below {}, {}", names.rank, *rank,
                                names.size, *size),
                    {.reason = Reason::kBadArgument});
    }
    RankOf found{static_cast<std::uint32_t>(*rank), std::nullopt, names.rank};
    if (size) {
      found.size = static_cast<std::uint32_t>(*size);
      found.source += fmt::format(" and {}", names.size);
    }
    return std::optional(found);
  }
  return std::optional<RankOf>();
}

Result<std::optional<std::string>> rendezvous_from(const Environment& environment) {
  if (const auto own = environment("SHARDPULL_RENDEZVOUS")) {
    SHARDPULL_ASSIGN_OR_RETURN(std::string text,
                               complete_rendezvous(*own, "the environment variable SHARDPULL_RENDEZVOUS"));
    return std::optional(std::move(text));
  }
  std::optional<std::string> host = environment("MASTER_ADDR");
  std::string what = "the environment variable MASTER_ADDR";
  std::int64_t port = kDefaultRendezvousPort;
  if (host) {
    SHARDPULL_ASSIGN_OR_RETURN(const auto torch, number(environment, "MASTER_PORT", 1, 65534));
    if (torch) port = *torch + 1;
  } else {
    for (const char* const name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
      const auto list = host ? std::nullopt : environment(name);
      if (!list) continue;
      host = first_host(*list);
      what = fmt::format("the first host of the environment variable {}", name);
    }
  }
  if (!host) return std::optional<std::string>();
  if (is_ipv6(*host)) host = fmt::format("[{}]", *host);
  SHARDPULL_ASSIGN_OR_RETURN(std::string text, complete_rendezvous(fmt::format("{}:{}", *host, port), what));
  return std::optional(std::move(text));
}

Result<std::string> complete_rendezvous(const std::string& text, const std::string& what) {
  std::string full = text;
  if (is_ipv6(text)) {
    full = fmt::format("[{}]:{}", text, kDefaultRendezvousPort);
  } else if (!text.empty() && (text.find(':') == std::string::npos || (text.front() == '[' && text.back() == ']'))) {
    full = fmt::format("{}:{}", text, kDefaultRendezvousPort);
  }
  SHARDPULL_ASSIGN_OR_RETURN(const HostPort parsed, parse_host_port(full, what));
  return to_string(parsed);
}

std::string first_host(const std::string& node_list) {
  const std::size_t bracket = node_list.find('[');
  const std::size_t comma = node_list.find(',');
  if (bracket == std::string::npos || comma < bracket) return node_list.substr(0, comma);
  const std::size_t end = node_list.find_first_of("-,]", bracket);
  const std::size_t close = node_list.find(']', bracket);
  if (end == std::string::npos || close == std::string::npos) return node_list;
  const std::size_t next = node_list.find(',', close);
  return node_list.substr(0, bracket) + node_list.substr(bracket + 1, end - bracket - 1) +
         node_list.substr(close + 1, next == std::string::npos ? next : next - close - 1);
}

}  // namespace shardpull::cli
