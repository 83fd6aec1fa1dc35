// What `shardpull doctor` finds: what the facts about a host mean for a fleet, and what is slow or fails by
// them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/host_facts.h"
#include "shardpull/fleet.h"

namespace shardpull::cli {

enum class Severity : std::uint8_t { kOk, kSlow, kFails };
std::string_view to_string(Severity severity);  // "ok", "slow", "fails"

struct Finding {
  std::string name;  // the heading in docs/TROUBLESHOOTING.md
  Severity severity = Severity::kOk;
  std::vector<TransportKind> transports = {};  // which it concerns
  std::string text = {};                       // what is so, and what is slow or fails by it
  std::string fix = {};                        // a command or a setting, or empty
};

// What the facts mean for a fleet as `arguments` describe it. Pure. Of findings that concern other transports
// than the one asked for there are none.
std::vector<Finding> findings_of(const HostFacts& facts, const DoctorArguments& arguments);
Severity worst(const std::vector<Finding>& findings);

// For people, and as the object of docs/FORMATS.md, "Output of doctor".
std::string as_text(const HostFacts& facts, const std::vector<Finding>& findings);
std::string as_json(const HostFacts& facts, const std::vector<Finding>& findings);

// Descriptors that the busiest process of a fleet may need, the program that it is part of included.
std::uint64_t descriptors_needed(std::uint32_t ranks, std::uint32_t workers, TransportKind kind,
                                 std::uint32_t ucx_workers);

}  // namespace shardpull::cli
