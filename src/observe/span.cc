#include "observe/span.h"

#include <algorithm>

namespace shardpull {

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::kTransfer:
      return "transfer";
    case Phase::kScatter:
      return "scatter";
    case Phase::kCheck:
      return "check";
    case Phase::kMaterialise:
      return "materialise";
    case Phase::kRegister:
      return "register";
    case Phase::kPostProcess:
      return "post-process";
    case Phase::kEventWait:
      return "event wait";
    case Phase::kProduceWait:
      return "produce wait";
    case Phase::kSlotWait:
      return "slot wait";
    case Phase::kSignalWait:
      return "signal wait";
    case Phase::kCommit:
      return "commit";
    case Phase::kSource:
      return "source";
    case Phase::kExport:
      return "export";
    case Phase::kPublish:
      return "publish";
    case Phase::kPack:
      return "pack";
    case Phase::kSum:
      return "sum";
    case Phase::kCreditWait:
      return "credit wait";
    case Phase::kEndWait:
      return "end wait";
    case Phase::kServe:
      return "serve";
    case Phase::kEngine:
      break;
  }
  return "engine";
}

std::string_view to_string(SpanPath path) {
  switch (path) {
    case SpanPath::kPacked:
      return "packed";
    case SpanPath::kMapped:
      return "mapped";
    case SpanPath::kDirect:
      return "direct";
    case SpanPath::kNone:
      break;
  }
  return "";
}

void SpanLog::reset(std::size_t room) {
  spans_.clear();
  room_ = std::min(room, kMaxSpans);
  spans_.reserve(room_);
  dropped_ = 0;
}

}  // namespace shardpull
