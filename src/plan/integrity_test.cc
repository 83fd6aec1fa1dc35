// Goal: which paths are summed follows from the setting and the transport alone.
#include "plan/integrity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardpull {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::set<Path> summed_by(Integrity integrity, TransportKind transport) {
  InitTables tables;
  tables.integrity = integrity;
  tables.transport = transport;
  return summed_paths(tables);
}

TEST(Integrity, wire_sums_what_crosses_a_transport_other_than_shared_memory) {
  EXPECT_THAT(summed_by(Integrity::kWire, TransportKind::kShm), IsEmpty());
  for (const TransportKind transport : {TransportKind::kCma, TransportKind::kTcp, TransportKind::kUcx}) {
    EXPECT_THAT(summed_by(Integrity::kWire, transport), ElementsAre(Path::kPacked, Path::kDirect));
    EXPECT_THAT(summed_by(Integrity::kOff, transport), IsEmpty());
  }
}

TEST(Integrity, full_sums_every_path_and_off_none) {
  for (const TransportKind transport : {TransportKind::kShm, TransportKind::kTcp}) {
    EXPECT_THAT(summed_by(Integrity::kFull, transport),
                ElementsAre(Path::kPacked, Path::kMapped, Path::kDirect));
    EXPECT_THAT(summed_by(Integrity::kOff, transport), IsEmpty());
  }
}

}  // namespace
}  // namespace shardpull
