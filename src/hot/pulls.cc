#include "hot/pulls.h"

#include <utility>

namespace shardpull {

PullId pull_of(const HotHeader& header) {
  return {.sync_id = header.sync_id,
          .consumer = header.consumer,
          .chunk = header.target,
          .run = header.run,
          .attempt = header.attempt,
          .seq = header.seq,
          .lane = static_cast<LaneKind>(header.lane_kind)};
}

HotHeader header_of(HotType type, const PullId& pull) {
  HotHeader header;
  header.type = type;
  header.sync_id = pull.sync_id;
  header.consumer = pull.consumer;
  header.target = pull.chunk;
  header.run = pull.run;
  header.attempt = pull.attempt;
  header.seq = pull.seq;
  header.lane_kind = static_cast<std::uint16_t>(pull.lane);
  return header;
}

ReadyInfo ready_info(ReadyPayload payload, Path path) {
  ReadyInfo info;
  info.path = path;
  info.sums = std::move(payload.sums);
  for (ReadyEntry& entry : payload.entries) info.entries.push_back({entry.where, std::move(entry.stride)});
  if (path == Path::kPacked && !info.entries.empty()) info.bytes = info.entries[0].where.bytes;
  return info;
}

}  // namespace shardpull
