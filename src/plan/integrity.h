// Which keys travel with a checksum: XXH3-64 of the bytes of the key, made where they are read from the
// trainer's tensors and compared before they count as landed. Producer and consumer derive it from the same
// tables. docs/PROTOCOL.md, "Integrity".
#pragma once

#include <set>

#include "plan/plan.h"

namespace shardpull {

// Whether every Ready of this path carries one sum per key. kWire sums what crosses a transport: not what lies
// in memory that both sides share, and not what is copied out of a mapping.
bool summed(const InitTables& tables, Path path);
std::set<Path> summed_paths(const InitTables& tables);

}  // namespace shardpull
