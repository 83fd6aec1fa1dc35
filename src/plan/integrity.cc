#include "plan/integrity.h"

#include "shardpull/fleet.h"

namespace shardpull {

std::string_view to_string(Integrity integrity) {
  switch (integrity) {
    case Integrity::kOff:
      return "off";
    case Integrity::kWire:
      return "wire";
    case Integrity::kFull:
      return "full";
  }
  return "unknown";
}

bool summed(const InitTables& tables, Path path) {
  switch (tables.integrity) {
    case Integrity::kOff:
      return false;
    case Integrity::kWire:
      return tables.transport != TransportKind::kShm && path != Path::kMapped;
    case Integrity::kFull:
      return true;
  }
  return false;
}

std::set<Path> summed_paths(const InitTables& tables) {
  std::set<Path> paths{Path::kPacked, Path::kMapped, Path::kDirect};
  std::erase_if(paths, [&](Path path) { return !summed(tables, path); });
  return paths;
}

}  // namespace shardpull
