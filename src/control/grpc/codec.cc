#include "control/grpc/codec.h"

#include <algorithm>
#include <functional>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

namespace shardpull {
namespace {

template <typename Byte>
std::string to_text(const std::vector<Byte>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}
template <typename Byte>
std::vector<Byte> to_vector(const std::string& text) {
  const auto* const data = reinterpret_cast<const Byte*>(text.data());
  return std::vector<Byte>(data, data + text.size());
}
template <typename Repeated>
std::vector<std::uint32_t> to_list(const Repeated& values) {
  return std::vector<std::uint32_t>(values.begin(), values.end());
}

bool ascends(const std::vector<std::uint32_t>& values) {
  return std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end();
}

std::vector<PhaseTime> to_phases(const google::protobuf::RepeatedPtrField<v1::PhaseTime>& phases) {
  std::vector<PhaseTime> out;
  for (const v1::PhaseTime& each : phases) {
    const bool known = each.phase() <= static_cast<std::uint32_t>(Phase::kEngine);
    out.push_back({known ? static_cast<Phase>(each.phase()) : Phase::kEngine, each.charged_ns(),
                   each.active_ns(), each.count()});
  }
  return out;
}

// One overload per body, in the order of the struct's fields.
struct Writer {
  v1::Routed& out;

  void status(v1::Error* error, const Status& value) const { *error = to_wire(value); }
  void phases(google::protobuf::RepeatedPtrField<v1::PhaseTime>& to,
              const std::vector<PhaseTime>& phases) const {
    for (const PhaseTime& each : phases) {
      v1::PhaseTime& w = *to.Add();
      w.set_phase(static_cast<std::uint32_t>(each.phase));
      w.set_charged_ns(each.charged_ns);
      w.set_active_ns(each.active_ns);
      w.set_count(each.count);
    }
  }

  void operator()(const TrainerJoin& m) const {
    v1::TrainerJoin& w = *out.mutable_trainer_join();
    w.set_world_size(m.world_size);
    w.set_holding(to_text(m.holding));
    w.set_producer_address(m.producer_address);
    w.set_settings(to_text(m.settings));
  }
  void operator()(const TrainerTable& m) const {
    v1::TrainerTable& w = *out.mutable_trainer_table();
    status(w.mutable_status(), m.status);
    w.set_tables(to_text(m.tables));
    w.set_returned(m.returned);
  }
  void operator()(const TrainerReturned& m) const {
    v1::TrainerReturned& w = *out.mutable_trainer_returned();
    w.set_rank(m.rank);
    w.set_incarnation(m.incarnation);
    w.set_producer_address(m.producer_address);
    w.set_without_until(m.without_until);
  }
  void operator()(const InitRequest& m) const {
    out.mutable_init_request()->set_ring_depth(m.ring_depth);
    out.mutable_init_request()->set_settings(m.settings);
  }
  void operator()(const InitPayload& m) const {
    v1::InitPayload& w = *out.mutable_init_payload();
    status(w.mutable_status(), m.status);
    w.set_tables(to_text(m.tables));
    w.mutable_trainers()->Assign(m.trainers.begin(), m.trainers.end());
  }
  void operator()(const InitDone& m) const {
    v1::InitDone& w = *out.mutable_init_done();
    status(w.mutable_status(), m.status);
    w.set_bytes_kept(m.bytes_kept);
    w.set_bytes_planned(m.bytes_planned);
  }
  void operator()(const MateListens& m) const { out.mutable_mate_listens()->set_address(m.address); }
  void operator()(const Reserve& m) const {
    v1::Reserve& w = *out.mutable_reserve();
    w.set_slot_bytes(m.slot_bytes);
    w.set_ring_depth(m.ring_depth);
    w.set_num_consumers(m.num_consumers);
    w.set_workers_per_replica(m.workers_per_replica);
    w.set_digest_low(m.digest_low);
    w.set_digest_high(m.digest_high);
    w.set_pulls(to_text(m.pulls));
  }
  void operator()(const ReserveReply& m) const {
    v1::ReserveReply& w = *out.mutable_reserve_reply();
    status(w.mutable_status(), m.status);
    w.set_lane_kind(m.lane_kind);
  }
  void operator()(const SyncOpen& m) const {
    v1::SyncOpen& w = *out.mutable_sync_open();
    w.set_sync_id(m.sync_id);
    w.set_version(m.version);
    w.mutable_live_consumers()->Assign(m.live_consumers.begin(), m.live_consumers.end());
    w.set_names(to_text(m.names));
    w.set_trace(m.trace);
  }
  void operator()(const SyncBegan& m) const { out.mutable_sync_began()->set_sync_id(m.sync_id); }
  void operator()(const StartUpdate& m) const {
    v1::StartUpdate& w = *out.mutable_start_update();
    w.set_sync_id(m.sync_id);
    w.set_version(m.version);
    w.set_names(to_text(m.names));
    w.set_trace(m.trace);
  }
  void operator()(const UpdateStarted& m) const {
    v1::UpdateStarted& w = *out.mutable_update_started();
    w.set_sync_id(m.sync_id);
    status(w.mutable_status(), m.status);
  }
  void operator()(const Update& m) const { out.mutable_update()->set_sync_id(m.sync_id); }
  void operator()(const Prepared& m) const {
    v1::Prepared& w = *out.mutable_prepared();
    w.set_sync_id(m.sync_id);
    status(w.mutable_status(), m.status);
    w.set_bytes_moved(m.bytes_moved);
    w.set_update_ns(m.update_ns);
    w.set_copy_ns(m.copy_ns);
    w.set_bytes_kept(m.bytes_kept);
    w.set_padding_bytes(m.padding_bytes);
    w.set_rerouted(m.rerouted);
    w.set_fallback_names(m.fallback_names);
  }
  void operator()(const Finish& m) const { out.mutable_finish()->set_sync_id(m.sync_id); }
  void operator()(const Finished& m) const {
    v1::Finished& w = *out.mutable_finished();
    w.set_sync_id(m.sync_id);
    status(w.mutable_status(), m.status);
    w.set_commit_ns(m.commit_ns);
    phases(*w.mutable_phases(), m.phases);
    w.set_waited_for(m.waited_for);
    w.set_waited_ns(m.waited_ns);
  }
  void operator()(const FreeGroups& m) const {
    v1::FreeGroups& w = *out.mutable_free_groups();
    w.set_sync_id(m.sync_id);
    w.mutable_groups()->Assign(m.groups.begin(), m.groups.end());
  }
  void operator()(const FreeAck& m) const {
    v1::FreeAck& w = *out.mutable_free_ack();
    w.set_sync_id(m.sync_id);
    w.mutable_groups()->Assign(m.groups.begin(), m.groups.end());
  }
  void operator()(const LeaveLanes& m) const { out.mutable_leave_lanes()->set_sync_id(m.sync_id); }
  void operator()(const RankEnded& m) const {
    v1::RankEnded& w = *out.mutable_rank_ended();
    w.set_sync_id(m.sync_id);
    status(w.mutable_status(), m.status);
    w.set_export_ns(m.export_ns);
    w.set_export_bytes(m.export_bytes);
    w.set_peak_resident_bytes(m.peak_resident_bytes);
    w.set_packs(m.packs);
    w.set_packed_bytes(m.packed_bytes);
    w.set_wall_ns(m.wall_ns);
    phases(*w.mutable_phases(), m.phases);
  }
  void operator()(const SyncClosed& m) const {
    v1::SyncClosed& w = *out.mutable_sync_closed();
    w.set_sync_id(m.sync_id);
    status(w.mutable_status(), m.status);
  }
  void operator()(const SyncFailed& m) const {
    v1::SyncFailed& w = *out.mutable_sync_failed();
    w.set_sync_id(m.sync_id);
    status(w.mutable_status(), m.status);
  }
  void operator()(const Shutdown& m) const {
    v1::Shutdown& w = *out.mutable_shutdown();
    w.set_reason(m.reason);
    status(w.mutable_status(), m.status);
  }
  void operator()(const TimelineReport& m) const {
    v1::TimelineReport& w = *out.mutable_timeline_report();
    w.set_sync_id(m.sync_id);
    w.set_timeline(to_text(m.timeline));
  }
  void operator()(const UserMessage& m) const {
    v1::UserMessage& w = *out.mutable_user_message();
    w.set_topic(m.topic);
    w.set_body(m.body);
  }
};

}  // namespace

v1::Member to_wire(const Member& member) {
  v1::Member out;
  out.set_role(static_cast<v1::Role>(member.role));
  out.set_id(member.id);
  return out;
}

std::optional<Member> from_wire(const v1::Member& member) {
  switch (member.role()) {
    case v1::ROLE_TRAINER:
      return Member{Role::kTrainer, member.id()};
    case v1::ROLE_WORKER:
      return Member{Role::kWorker, member.id()};
    default:
      return std::nullopt;
  }
}

v1::Error to_wire(const Status& status) {
  v1::Error out;
  if (status.ok()) return out;
  const ErrorInfo& info = status.info();
  out.set_code(static_cast<std::uint32_t>(status.code()));
  out.set_message(status.message());
  out.set_reason(static_cast<std::uint32_t>(info.reason));
  out.set_fault(static_cast<std::uint32_t>(info.fault));
  out.set_retryable(info.retryable);
  out.set_peer(info.peer);
  out.set_tensor(info.tensor);
  return out;
}

Status from_wire(const v1::Error& error) {
  if (error.code() == 0) return {};
  ErrorInfo info;
  info.reason = error.reason() <= static_cast<std::uint32_t>(Reason::kCorrupt)
                    ? static_cast<Reason>(error.reason())
                    : Reason::kUnspecified;
  info.fault = error.fault() <= static_cast<std::uint32_t>(Fault::kLibrary)
                   ? static_cast<Fault>(error.fault())
                   : Fault::kPeer;
  info.retryable = error.retryable();
  info.peer = error.peer();
  info.tensor = error.tensor();
  const StatusCode code = error.code() <= static_cast<std::uint32_t>(StatusCode::kUnauthenticated)
                              ? static_cast<StatusCode>(error.code())
                              : StatusCode::kUnknown;
  return Status(code, error.message(), std::move(info));
}

void to_wire(const ControlBody& body, v1::Routed& out) {
  std::visit(Writer{out}, body);
}

Result<ControlBody> from_wire(v1::Routed&& routed) {
  const auto malformed = [](std::string_view what, std::string_view problem) {
    return Status(StatusCode::kInvalidArgument, fmt::format("a {} message with {}", what, problem),
                  {.reason = Reason::kCorrupt, .fault = Fault::kPeer});
  };
  using R = v1::Routed;
  switch (routed.body_case()) {
    case R::kTrainerJoin: {
      const v1::TrainerJoin& w = routed.trainer_join();
      return ControlBody(TrainerJoin{.world_size = w.world_size(),
                                     .holding = to_vector<std::byte>(w.holding()),
                                     .producer_address = w.producer_address(),
                                     .settings = to_vector<std::byte>(w.settings())});
    }
    case R::kTrainerTable: {
      const v1::TrainerTable& w = routed.trainer_table();
      return ControlBody(TrainerTable{.status = from_wire(w.status()),
                                      .tables = to_vector<std::byte>(w.tables()),
                                      .returned = w.returned()});
    }
    case R::kTrainerReturned: {
      const v1::TrainerReturned& w = routed.trainer_returned();
      return ControlBody(TrainerReturned{.rank = w.rank(),
                                         .incarnation = w.incarnation(),
                                         .producer_address = w.producer_address(),
                                         .without_until = w.without_until()});
    }
    case R::kInitRequest:
      return ControlBody(InitRequest{.ring_depth = routed.init_request().ring_depth(),
                                     .settings = routed.init_request().settings()});
    case R::kInitPayload: {
      const v1::InitPayload& w = routed.init_payload();
      return ControlBody(InitPayload{.status = from_wire(w.status()),
                                     .tables = to_vector<std::byte>(w.tables()),
                                     .trainers = {w.trainers().begin(), w.trainers().end()}});
    }
    case R::kInitDone: {
      const v1::InitDone& w = routed.init_done();
      return ControlBody(InitDone{
          .status = from_wire(w.status()), .bytes_kept = w.bytes_kept(), .bytes_planned = w.bytes_planned()});
    }
    case R::kReserve: {
      const v1::Reserve& w = routed.reserve();
      return ControlBody(Reserve{.slot_bytes = w.slot_bytes(),
                                 .ring_depth = w.ring_depth(),
                                 .num_consumers = w.num_consumers(),
                                 .workers_per_replica = w.workers_per_replica(),
                                 .digest_low = w.digest_low(),
                                 .digest_high = w.digest_high(),
                                 .pulls = to_vector<std::byte>(w.pulls())});
    }
    case R::kReserveReply:
      return ControlBody(ReserveReply{.status = from_wire(routed.reserve_reply().status()),
                                      .lane_kind = routed.reserve_reply().lane_kind()});
    case R::kSyncOpen: {
      const v1::SyncOpen& w = routed.sync_open();
      SyncOpen out{.sync_id = w.sync_id(),
                   .version = w.version(),
                   .live_consumers = to_list(w.live_consumers()),
                   .names = to_vector<std::uint8_t>(w.names()),
                   .trace = w.trace()};
      if (!ascends(out.live_consumers)) return malformed("SyncOpen", "live consumers that do not ascend");
      return ControlBody(std::move(out));
    }
    case R::kMateListens:
      return ControlBody(MateListens{.address = routed.mate_listens().address()});
    case R::kSyncBegan:
      return ControlBody(SyncBegan{.sync_id = routed.sync_began().sync_id()});
    case R::kStartUpdate: {
      const v1::StartUpdate& w = routed.start_update();
      return ControlBody(StartUpdate{.sync_id = w.sync_id(),
                                     .version = w.version(),
                                     .names = to_vector<std::uint8_t>(w.names()),
                                     .trace = w.trace()});
    }
    case R::kUpdateStarted: {
      const v1::UpdateStarted& w = routed.update_started();
      return ControlBody(UpdateStarted{.sync_id = w.sync_id(), .status = from_wire(w.status())});
    }
    case R::kUpdate:
      return ControlBody(Update{.sync_id = routed.update().sync_id()});
    case R::kPrepared: {
      const v1::Prepared& w = routed.prepared();
      return ControlBody(Prepared{.sync_id = w.sync_id(),
                                  .status = from_wire(w.status()),
                                  .bytes_moved = w.bytes_moved(),
                                  .update_ns = w.update_ns(),
                                  .copy_ns = w.copy_ns(),
                                  .bytes_kept = w.bytes_kept(),
                                  .padding_bytes = w.padding_bytes(),
                                  .rerouted = w.rerouted(),
                                  .fallback_names = w.fallback_names()});
    }
    case R::kFinish:
      return ControlBody(Finish{.sync_id = routed.finish().sync_id()});
    case R::kFinished: {
      const v1::Finished& w = routed.finished();
      return ControlBody(Finished{.sync_id = w.sync_id(),
                                  .status = from_wire(w.status()),
                                  .commit_ns = w.commit_ns(),
                                  .phases = to_phases(w.phases()),
                                  .waited_for = w.waited_for(),
                                  .waited_ns = w.waited_ns()});
    }
    case R::kFreeGroups: {
      const v1::FreeGroups& w = routed.free_groups();
      return ControlBody(FreeGroups{.sync_id = w.sync_id(), .groups = to_list(w.groups())});
    }
    case R::kFreeAck: {
      const v1::FreeAck& w = routed.free_ack();
      return ControlBody(FreeAck{.sync_id = w.sync_id(), .groups = to_list(w.groups())});
    }
    case R::kLeaveLanes:
      return ControlBody(LeaveLanes{.sync_id = routed.leave_lanes().sync_id()});
    case R::kRankEnded: {
      const v1::RankEnded& w = routed.rank_ended();
      return ControlBody(RankEnded{.sync_id = w.sync_id(),
                                   .status = from_wire(w.status()),
                                   .export_ns = w.export_ns(),
                                   .export_bytes = w.export_bytes(),
                                   .peak_resident_bytes = w.peak_resident_bytes(),
                                   .packs = w.packs(),
                                   .packed_bytes = w.packed_bytes(),
                                   .wall_ns = w.wall_ns(),
                                   .phases = to_phases(w.phases())});
    }
    case R::kSyncClosed: {
      const v1::SyncClosed& w = routed.sync_closed();
      return ControlBody(SyncClosed{.sync_id = w.sync_id(), .status = from_wire(w.status())});
    }
    case R::kSyncFailed: {
      const v1::SyncFailed& w = routed.sync_failed();
      return ControlBody(SyncFailed{.sync_id = w.sync_id(), .status = from_wire(w.status())});
    }
    case R::kShutdown: {
      const v1::Shutdown& w = routed.shutdown();
      return ControlBody(Shutdown{.reason = w.reason(), .status = from_wire(w.status())});
    }
    case R::kTimelineReport: {
      const v1::TimelineReport& w = routed.timeline_report();
      return ControlBody(
          TimelineReport{.sync_id = w.sync_id(), .timeline = to_vector<std::byte>(w.timeline())});
    }
    case R::kUserMessage:
      return ControlBody(UserMessage{.topic = std::move(*routed.mutable_user_message()->mutable_topic()),
                                     .body = std::move(*routed.mutable_user_message()->mutable_body())});
    case R::BODY_NOT_SET:
      break;
  }
  return malformed("control", "a body this build does not know");
}

int to_grpc_code(StatusCode code) {
  const int number = static_cast<int>(code);
  return number >= 0 && number <= static_cast<int>(StatusCode::kUnauthenticated)
             ? number
             : static_cast<int>(StatusCode::kUnknown);
}

StatusCode from_grpc_code(int code) {
  return code >= 0 && code <= static_cast<int>(StatusCode::kUnauthenticated) ? static_cast<StatusCode>(code)
                                                                             : StatusCode::kUnknown;
}

std::string to_grpc_details(const Status& status) {
  return to_wire(status).SerializeAsString();
}

Status from_grpc_status(int code, const std::string& message, const std::string& details) {
  const StatusCode own = from_grpc_code(code);
  if (own == StatusCode::kOk) return {};
  if (v1::Error error;
      !details.empty() && error.ParseFromString(details) && error.code() == static_cast<std::uint32_t>(own)) {
    return from_wire(error);
  }
  const bool lost = own == StatusCode::kUnavailable || own == StatusCode::kCancelled;
  return Status(
      own, message,
      {.reason = lost ? Reason::kPeerLost : Reason::kUnspecified, .fault = Fault::kPeer, .retryable = lost});
}

}  // namespace shardpull
