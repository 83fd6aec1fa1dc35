#include "control/messages.h"

namespace shardpull {
namespace {

struct NameOf {
  std::string_view operator()(const TrainerJoin&) const { return "TrainerJoin"; }
  std::string_view operator()(const TrainerTable&) const { return "TrainerTable"; }
  std::string_view operator()(const InitRequest&) const { return "InitRequest"; }
  std::string_view operator()(const TrainerReturned&) const { return "TrainerReturned"; }
  std::string_view operator()(const InitPayload&) const { return "InitPayload"; }
  std::string_view operator()(const InitDone&) const { return "InitDone"; }
  std::string_view operator()(const MateListens&) const { return "MateListens"; }
  std::string_view operator()(const Reserve&) const { return "Reserve"; }
  std::string_view operator()(const ReserveReply&) const { return "ReserveReply"; }
  std::string_view operator()(const SyncOpen&) const { return "SyncOpen"; }
  std::string_view operator()(const SyncBegan&) const { return "SyncBegan"; }
  std::string_view operator()(const StartUpdate&) const { return "StartUpdate"; }
  std::string_view operator()(const UpdateStarted&) const { return "UpdateStarted"; }
  std::string_view operator()(const Update&) const { return "Update"; }
  std::string_view operator()(const Prepared&) const { return "Prepared"; }
  std::string_view operator()(const Finish&) const { return "Finish"; }
  std::string_view operator()(const Finished&) const { return "Finished"; }
  std::string_view operator()(const FreeGroups&) const { return "FreeGroups"; }
  std::string_view operator()(const FreeAck&) const { return "FreeAck"; }
  std::string_view operator()(const LeaveLanes&) const { return "LeaveLanes"; }
  std::string_view operator()(const RankEnded&) const { return "RankEnded"; }
  std::string_view operator()(const SyncClosed&) const { return "SyncClosed"; }
  std::string_view operator()(const SyncFailed&) const { return "SyncFailed"; }
  std::string_view operator()(const Shutdown&) const { return "Shutdown"; }
  std::string_view operator()(const UserMessage&) const { return "UserMessage"; }
  std::string_view operator()(const TimelineReport&) const { return "TimelineReport"; }
};

}  // namespace

std::string_view name_of(const ControlBody& body) {
  return std::visit(NameOf{}, body);
}

}  // namespace shardpull
