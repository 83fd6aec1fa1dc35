#include "control/grpc/codec.h"

#include <string>
#include <utility>
#include <vector>

#include <grpcpp/support/status_code_enum.h>
#include <gtest/gtest.h>

#include "base/random.h"

namespace shardpull {
namespace {

std::vector<std::byte> some_bytes() {
  return {std::byte{0}, std::byte{0xFF}, std::byte{0x80}, std::byte{7}};
}

Status some_error() {
  return Status(StatusCode::kAborted,
                "tensor \"\xff\xfe\" from /tmp/\xc3",  // not UTF-8: file names need not be
                {.reason = Reason::kSuperseded,
                 .fault = Fault::kLibrary,
                 .retryable = true,
                 .peer = "worker 3",
                 .tensor = "a.b"});
}

// One of each body, no field at its default.
std::vector<ControlBody> samples() {
  return {
      TrainerJoin{.world_size = 4,
                  .holding = some_bytes(),
                  .producer_address = "/run/\xff.sock",
                  .settings = some_bytes()},
      TrainerTable{.status = some_error(), .tables = some_bytes(), .returned = true},
      InitRequest{.ring_depth = 2, .settings = "--names \xff"},
      InitPayload{.status = some_error(), .tables = some_bytes(), .trainers = {~0ull, 0, 1}},
      InitDone{.status = some_error(), .bytes_kept = 1ull << 40, .bytes_planned = ~0ull},
      Reserve{.slot_bytes = 1ull << 33,
              .ring_depth = 2,
              .num_consumers = 3,
              .workers_per_replica = 4,
              .digest_low = ~0ull,
              .digest_high = 1,
              .pulls = some_bytes()},
      ReserveReply{.status = some_error()},
      SyncOpen{
          .sync_id = 5, .version = 6, .live_consumers = {0, 2, 65535}, .names = {1, 0, 255}, .trace = true},
      StartUpdate{.sync_id = 7, .version = 8, .names = {9}, .trace = true},
      UpdateStarted{.sync_id = 10, .status = some_error()},
      Update{.sync_id = 11},
      Prepared{.sync_id = 12,
               .status = some_error(),
               .bytes_moved = 13,
               .update_ns = 14,
               .copy_ns = 15,
               .bytes_kept = 16,
               .padding_bytes = 17},
      Finish{.sync_id = 16},
      Finished{.sync_id = 17,
               .status = some_error(),
               .commit_ns = 18,
               .phases = {{Phase::kScatter, 19, 20, 21}, {Phase::kEngine, 22, 23, 24}},
               .waited_for = 25,
               .waited_ns = 26},
      FreeGroups{.sync_id = 18, .groups = {3, 1, 2}},
      FreeAck{.sync_id = 19, .groups = {}},
      RankEnded{.sync_id = 20,
                .status = some_error(),
                .export_ns = 21,
                .export_bytes = 22,
                .peak_resident_bytes = 23,
                .packs = 24,
                .packed_bytes = 25,
                .wall_ns = 26,
                .phases = {{Phase::kSource, 27, 28, 29}}},
      SyncClosed{.sync_id = 24, .status = some_error()},
      SyncFailed{.sync_id = 25, .status = some_error()},
      Shutdown{.reason = "done", .status = some_error()},
      UserMessage{.topic = "verify", .body = std::string("\0\xff", 2)},
      SyncBegan{.sync_id = 26},
      TimelineReport{.sync_id = 27, .timeline = some_bytes()},
      MateListens{.address = "/fleet/worker-1-00000007.sock"},
      LeaveLanes{.sync_id = 28},
      TrainerReturned{
          .rank = 3, .incarnation = ~0ull, .producer_address = "/run/\xff.sock", .without_until = 1ull << 40},
  };
}

// A printable form with every field, to compare bodies without an operator== on each.
std::string print(const ControlBody& body) {
  v1::Routed routed;
  to_wire(body, routed);
  return routed.SerializeAsString();
}

// Goal: every body survives the way over the wire; the list of samples is complete.
TEST(ControlCodec, EveryBodyRoundTrips) {
  const std::vector<ControlBody> all = samples();
  ASSERT_EQ(all.size(), std::variant_size_v<ControlBody>);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].index(), i) << name_of(all[i]);
    v1::Routed routed, parsed;
    to_wire(all[i], routed);
    ASSERT_TRUE(parsed.ParseFromString(routed.SerializeAsString())) << name_of(all[i]);
    const Result<ControlBody> out = from_wire(std::move(parsed));
    ASSERT_TRUE(out.ok()) << name_of(all[i]) << ": " << out.status().to_string();
    EXPECT_EQ(out->index(), i);
    EXPECT_EQ(print(*out), print(all[i])) << name_of(all[i]);
  }
  // print() compares wire forms; these two show that decoding fills the structs themselves.
  v1::Routed routed;
  to_wire(samples()[5], routed);
  const auto reserve = std::get<Reserve>(*from_wire(std::move(routed)));
  EXPECT_EQ(reserve.slot_bytes, 1ull << 33);
  EXPECT_EQ(reserve.digest_low, ~0ull);
  EXPECT_EQ(reserve.pulls, some_bytes());
  to_wire(samples()[11], routed);
  const auto prepared = std::get<Prepared>(*from_wire(std::move(routed)));
  EXPECT_EQ(prepared.status, some_error());
  EXPECT_EQ(prepared.status.info().reason, Reason::kSuperseded);
  EXPECT_EQ(prepared.status.info().fault, Fault::kLibrary);
  EXPECT_TRUE(prepared.status.info().retryable);
  EXPECT_EQ(prepared.status.info().peer, "worker 3");
  EXPECT_EQ(prepared.status.info().tensor, "a.b");
  to_wire(samples()[13], routed);
  const auto finished = std::get<Finished>(*from_wire(std::move(routed)));
  EXPECT_EQ(finished.commit_ns, 18u);
  EXPECT_EQ(finished.phases,
            (std::vector<PhaseTime>{{Phase::kScatter, 19, 20, 21}, {Phase::kEngine, 22, 23, 24}}));
}

TEST(ControlCodec, SuccessTravels) {
  v1::Routed routed;
  to_wire(ReserveReply{}, routed);
  EXPECT_TRUE(std::get<ReserveReply>(*from_wire(std::move(routed))).status.ok());
}

// Goal: a body of a later build, or lists that break their rule, are refused.
TEST(ControlCodec, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(from_wire(v1::Routed()).status().code(), StatusCode::kInvalidArgument);
  v1::Routed routed;
  to_wire(SyncOpen{.sync_id = 1, .version = 1, .live_consumers = {2, 2}, .names = {}}, routed);
  EXPECT_EQ(from_wire(std::move(routed)).status().code(), StatusCode::kInvalidArgument);
}

// Goal: a phase of a later build counts as none of those this build knows.
TEST(ControlCodec, APhaseItDoesNotKnowIsTheEngines) {
  v1::Routed routed;
  to_wire(Finished{.sync_id = 1, .status = {}, .phases = {{Phase::kScatter, 1, 2, 3}}}, routed);
  routed.mutable_finished()->mutable_phases(0)->set_phase(999);
  const auto finished = std::get<Finished>(*from_wire(std::move(routed)));
  EXPECT_EQ(finished.phases, (std::vector<PhaseTime>{{Phase::kEngine, 1, 2, 3}}));
}

// Goal: mutated bytes either do not parse, or decode to something that can be written again.
TEST(ControlCodec, SurvivesRandomMutations) {
  Random random(31);
  const std::vector<ControlBody> all = samples();
  for (int round = 0; round < 20'000; ++round) {
    v1::Routed routed;
    to_wire(all[random.below(all.size())], routed);
    std::string bytes = routed.SerializeAsString();
    for (std::uint64_t changes = 1 + random.below(3); changes > 0; --changes) {
      bytes[random.below(bytes.size())] = static_cast<char>(random.below(256));
    }
    v1::Routed parsed;
    if (!parsed.ParseFromString(bytes)) continue;
    const Result<ControlBody> out = from_wire(std::move(parsed));
    if (out.ok()) print(*out);
  }
}

TEST(ControlCodec, MembersRoundTripAndUnknownRolesAreNone) {
  for (const Member& member : {kSender, Member{Role::kTrainer, 7}, Member{Role::kWorker, 4'000'000'000u}}) {
    EXPECT_EQ(from_wire(to_wire(member)), member);
  }
  v1::Member unknown;
  EXPECT_EQ(from_wire(unknown), std::nullopt);
  unknown.set_role(static_cast<v1::Role>(9));
  EXPECT_EQ(from_wire(unknown), std::nullopt);
}

// Goal: the table between our codes and gRPC's is total, and the same both ways.
TEST(GrpcCodes, TableIsTotal) {
  const std::vector<std::pair<StatusCode, grpc::StatusCode>> table = {
      {StatusCode::kOk, grpc::OK},
      {StatusCode::kCancelled, grpc::CANCELLED},
      {StatusCode::kUnknown, grpc::UNKNOWN},
      {StatusCode::kInvalidArgument, grpc::INVALID_ARGUMENT},
      {StatusCode::kDeadlineExceeded, grpc::DEADLINE_EXCEEDED},
      {StatusCode::kNotFound, grpc::NOT_FOUND},
      {StatusCode::kAlreadyExists, grpc::ALREADY_EXISTS},
      {StatusCode::kPermissionDenied, grpc::PERMISSION_DENIED},
      {StatusCode::kResourceExhausted, grpc::RESOURCE_EXHAUSTED},
      {StatusCode::kFailedPrecondition, grpc::FAILED_PRECONDITION},
      {StatusCode::kAborted, grpc::ABORTED},
      {StatusCode::kOutOfRange, grpc::OUT_OF_RANGE},
      {StatusCode::kUnimplemented, grpc::UNIMPLEMENTED},
      {StatusCode::kInternal, grpc::INTERNAL},
      {StatusCode::kUnavailable, grpc::UNAVAILABLE},
      {StatusCode::kDataLoss, grpc::DATA_LOSS},
      {StatusCode::kUnauthenticated, grpc::UNAUTHENTICATED},
  };
  ASSERT_EQ(table.size(), 17u);
  for (const auto& [own, theirs] : table) {
    EXPECT_EQ(to_grpc_code(own), static_cast<int>(theirs));
    EXPECT_EQ(from_grpc_code(static_cast<int>(theirs)), own);
  }
  for (const int outside : {-1, 17, 1000}) {
    EXPECT_EQ(from_grpc_code(outside), StatusCode::kUnknown);
    EXPECT_EQ(to_grpc_code(static_cast<StatusCode>(outside)), static_cast<int>(grpc::UNKNOWN));
  }
}

// Goal: a refusal arrives with its detail; a plain gRPC status still becomes one of ours.
TEST(GrpcCodes, StatusTravelsInTheDetails) {
  const Status out = from_grpc_status(to_grpc_code(StatusCode::kAborted), "x", to_grpc_details(some_error()));
  EXPECT_EQ(out, some_error());
  EXPECT_EQ(out.info().reason, Reason::kSuperseded);
  EXPECT_TRUE(from_grpc_status(0, "", "").ok());
  const Status plain = from_grpc_status(to_grpc_code(StatusCode::kUnavailable), "connection refused", "");
  EXPECT_EQ(plain.code(), StatusCode::kUnavailable);
  EXPECT_EQ(plain.message(), "connection refused");
  EXPECT_TRUE(plain.info().retryable);
  EXPECT_EQ(from_grpc_status(to_grpc_code(StatusCode::kInternal), "x", "\xff garbage").code(),
            StatusCode::kInternal);
  // Details of another code are not believed.
  EXPECT_EQ(
      from_grpc_status(to_grpc_code(StatusCode::kInternal), "x", to_grpc_details(some_error())).message(),
      "x");
}

// Goal: numbers of a later build become something this build can name, and stay errors.
TEST(GrpcCodes, UnknownNumbersStayErrors) {
  v1::Error error;
  error.set_code(99);
  error.set_reason(9999);
  error.set_fault(77);
  const Status out = from_wire(error);
  EXPECT_EQ(out.code(), StatusCode::kUnknown);
  EXPECT_EQ(out.info().reason, Reason::kUnspecified);
  EXPECT_EQ(out.info().fault, Fault::kPeer);
}

}  // namespace
}  // namespace shardpull
