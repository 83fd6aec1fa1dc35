#include "control/grpc/grpc_control.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/unix_socket.h"
#include "control/grpc/codec.h"
#include "shardpull/slice.h"
#include "shardpull/v1/control.grpc.pb.h"

namespace shardpull {
namespace {

constexpr FleetToken kToken = 0xF1EE7;
constexpr std::int64_t kPatience =
    30 * kNanosPerSecond;  // far above what any step takes; a test that waits it out fails
constexpr Member kWorker0{Role::kWorker, 0}, kWorker1{Role::kWorker, 1}, kTrainer1{Role::kTrainer, 1};

class RunDirectory {
 public:
  explicit RunDirectory(const std::string& below = "") {
    std::string name = (std::filesystem::temp_directory_path() / "shardpull-control-XXXXXX").string();
    root_ = mkdtemp(name.data());
    path_ = root_ + below;
    std::filesystem::create_directories(path_);
    chmod(path_.c_str(), 0700);
  }
  ~RunDirectory() { std::filesystem::remove_all(root_); }
  const std::string& path() const { return path_; }
  std::string socket() const { return path_ + "/hub.sock"; }

 private:
  std::string root_, path_;
};

// Everything a control channel reported, in order.
class Recorder final : public ControlSink {
 public:
  struct Event {
    enum Kind { kMessage, kUp, kLost } kind;
    Member member;
    Incarnation incarnation = 0;
    ControlBody body;
    Status why;
  };

  void on_control(const Member& from, Incarnation incarnation, ControlBody body) override {
    add({.kind = Event::kMessage,
         .member = from,
         .incarnation = incarnation,
         .body = std::move(body),
         .why = {}});
  }
  void on_member_up(const Member& member, Incarnation incarnation) override {
    add({.kind = Event::kUp, .member = member, .incarnation = incarnation, .body = {}, .why = {}});
  }
  void on_member_lost(const Member& member, Incarnation incarnation, const Status& why) override {
    add({.kind = Event::kLost, .member = member, .incarnation = incarnation, .body = {}, .why = why});
  }

  std::vector<Event> events() {
    MutexLock lock(mutex_);
    return events_;
  }
  bool wait(const std::function<bool(const std::vector<Event>&)>& done) {
    MutexLock lock(mutex_);
    return changed_.wait_for_ns(mutex_, kPatience,
                                [&]() SHARDPULL_NO_THREAD_SAFETY_ANALYSIS { return done(events_); });
  }
  bool wait_count(Event::Kind kind, const Member& member, std::size_t count) {
    return wait([&](const std::vector<Event>& events) {
      return static_cast<std::size_t>(std::count_if(events.begin(), events.end(), [&](const Event& e) {
               return e.kind == kind && e.member == member;
             })) >= count;
    });
  }
  Event last(Event::Kind kind, const Member& member) {
    const auto all = events();
    const auto found = std::find_if(all.rbegin(), all.rend(),
                                    [&](const Event& e) { return e.kind == kind && e.member == member; });
    EXPECT_NE(found, all.rend());
    return found == all.rend() ? Event{} : *found;
  }

 private:
  void add(Event event) {
    {
      MutexLock lock(mutex_);
      events_.push_back(std::move(event));
    }
    changed_.notify_all();
  }
  Mutex mutex_;
  CondVar changed_;
  std::vector<Event> events_ SHARDPULL_GUARDED_BY(mutex_);
};
using Event = Recorder::Event;

ControlOptions options_for(const RunDirectory& directory, const Member& self, Incarnation incarnation) {
  ControlOptions options;
  options.address = "unix:" + directory.socket();
  options.token = kToken;
  options.self = self;
  options.incarnation = incarnation;
  options.heartbeat_ns = 50 * kNanosPerMilli;
  options.dead_after_ns = 10 * kNanosPerSecond;
  options.connect_timeout_ns = 10 * kNanosPerSecond;
  return options;
}

std::unique_ptr<Control> hub_at(const ControlOptions& options, ControlSink& sink) {
  auto hub = start_grpc_hub(options, sink);
  EXPECT_TRUE(hub.ok()) << hub.status().to_string();
  return hub.ok() ? std::move(hub).value() : nullptr;
}
std::unique_ptr<Control> link_at(const ControlOptions& options, ControlSink& sink) {
  auto link = connect_grpc_control(options, sink);
  EXPECT_TRUE(link.ok()) << link.status().to_string();
  return link.ok() ? std::move(link).value() : nullptr;
}

UserMessage note(std::string topic, std::string body = "") {
  return {.topic = std::move(topic), .body = std::move(body)};
}

// Goal: a hello introduces both sides, messages go both ways and to oneself, and every member learns of every
// other.
TEST(GrpcControl, IntroducesMembersAndCarriesMessages) {
  RunDirectory directory;
  Recorder at_hub, at_worker, at_trainer;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  const auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
  // The sender, up before, is reported by the time connecting is done.
  ASSERT_EQ(at_worker.events().size(), 1u);
  EXPECT_EQ(at_worker.last(Event::kUp, kSender).incarnation, 1u);
  const auto trainer = link_at(options_for(directory, kTrainer1, 3), at_trainer);
  EXPECT_EQ(at_trainer.events().size(), 2u);
  EXPECT_EQ(at_trainer.last(Event::kUp, kWorker0).incarnation, 2u);
  ASSERT_TRUE(at_worker.wait_count(Event::kUp, kTrainer1, 1));
  ASSERT_TRUE(at_hub.wait_count(Event::kUp, kWorker0, 1));
  ASSERT_TRUE(at_hub.wait_count(Event::kUp, kTrainer1, 1));

  const auto expect_arrives = [](Control& from, const Member& self, Incarnation incarnation, const Member& to,
                                 Recorder& at) {
    const std::string topic = to_string(self) + " to " + to_string(to);
    ASSERT_TRUE(from.send(to, note(topic, std::string("\0\xff", 2))).ok());
    ASSERT_TRUE(at.wait([&](const std::vector<Event>& events) {
      return std::any_of(events.begin(), events.end(), [&](const Event& e) {
        const auto* const body = std::get_if<UserMessage>(&e.body);
        return e.kind == Event::kMessage && e.member == self && e.incarnation == incarnation &&
               body != nullptr && body->topic == topic && body->body == std::string("\0\xff", 2);
      });
    })) << topic;
  };
  expect_arrives(*hub, kSender, 1, kWorker0, at_worker);
  expect_arrives(*hub, kSender, 1, kSender, at_hub);
  expect_arrives(*worker, kWorker0, 2, kSender, at_hub);
  expect_arrives(*worker, kWorker0, 2, kTrainer1, at_trainer);
  expect_arrives(*trainer, kTrainer1, 3, kWorker0, at_worker);
  expect_arrives(*trainer, kTrainer1, 3, kTrainer1, at_trainer);
}

// Goal: messages of one member to another arrive in the order in which they were sent, also through the hub.
TEST(GrpcControl, KeepsTheOrderOfManyMessages) {
  RunDirectory directory;
  Recorder at_hub, at_worker, at_trainer;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  const auto trainer = link_at(options_for(directory, kTrainer1, 3), at_trainer);
  const auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
  constexpr std::uint64_t kMessages = 10'000;
  std::thread from_hub([&] {
    for (std::uint64_t i = 0; i < kMessages; ++i)
      EXPECT_TRUE(hub->send(kTrainer1, Update{.sync_id = i}).ok());
  });
  for (std::uint64_t i = 0; i < kMessages; ++i)
    ASSERT_TRUE(worker->send(kTrainer1, Finish{.sync_id = i}).ok());
  from_hub.join();
  ASSERT_TRUE(at_trainer.wait_count(Event::kMessage, kWorker0, kMessages));
  ASSERT_TRUE(at_trainer.wait_count(Event::kMessage, kSender, kMessages));
  std::uint64_t updates = 0, finishes = 0;
  for (const Event& event : at_trainer.events()) {
    if (const auto* const update = std::get_if<Update>(&event.body);
        event.kind == Event::kMessage && update != nullptr) {
      ASSERT_EQ(update->sync_id, updates++);
    }
    if (const auto* const finish = std::get_if<Finish>(&event.body);
        event.kind == Event::kMessage && finish != nullptr) {
      ASSERT_EQ(finish->sync_id, finishes++);
    }
  }
  EXPECT_EQ(updates, kMessages);
  EXPECT_EQ(finishes, kMessages);
}

// Goal: large messages pass; one above the limit is refused by name before it is sent.
TEST(GrpcControl, CarriesLargeMessagesUpToTheLimit) {
  RunDirectory directory;
  Recorder at_hub, at_worker;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  const auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
  ASSERT_TRUE(at_hub.wait_count(Event::kUp, kWorker0, 1));
  InitPayload payload;
  payload.tables.assign((64u << 20) - 1000, std::byte{7});
  ASSERT_TRUE(hub->send(kWorker0, payload).ok());
  ASSERT_TRUE(at_worker.wait_count(Event::kMessage, kSender, 1));
  EXPECT_EQ(std::get<InitPayload>(at_worker.last(Event::kMessage, kSender).body).tables, payload.tables);
  payload.tables.resize((64u << 20) + 1);
  const Status refused = hub->send(kWorker0, payload);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("InitPayload message of 64 MiB"), std::string::npos) << refused.message();
  EXPECT_EQ(worker->send(kSender, payload).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(worker->send(kSender, note("still here")).ok());
  ASSERT_TRUE(at_hub.wait_count(Event::kMessage, kWorker0, 1));
}

// Goal: a link waits for a hub that comes later.
TEST(GrpcControl, WaitsForTheHub) {
  RunDirectory directory;
  Recorder at_hub, at_worker;
  std::unique_ptr<Control> worker;
  std::thread connecting([&] { worker = link_at(options_for(directory, kWorker0, 2), at_worker); });
  // The link finds nobody at first: the hub starts only once the thread has begun.
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  connecting.join();
  ASSERT_NE(worker, nullptr);
  EXPECT_TRUE(at_hub.wait_count(Event::kUp, kWorker0, 1));
}

// Goal: with no hub at all, connecting ends in time and says what to check.
TEST(GrpcControl, SaysWhatToCheckWhenThereIsNoHub) {
  RunDirectory directory;
  Recorder sink;
  ControlOptions options = options_for(directory, kWorker0, 2);
  options.connect_timeout_ns = 300 * kNanosPerMilli;
  const std::int64_t start_ns = SystemClock::instance().now_ns();
  const Status status = connect_grpc_control(options, sink).status();
  EXPECT_LT(SystemClock::instance().now_ns() - start_ns, 5 * kNanosPerSecond);
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find(directory.socket()), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("trainer 0 is running"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("300 ms"), std::string::npos) << status.message();
}

// Goal: something that listens there but never answers does not hold a link for ever.
TEST(GrpcControl, GivesUpOnAListenerThatNeverAnswers) {
  RunDirectory directory;
  const UniqueFd mute(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto path = SocketPath::open(directory.socket());
  ASSERT_TRUE(path.ok());
  const sockaddr_un address = path->address();
  ASSERT_EQ(bind(mute.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(mute.get(), 16), 0);
  Recorder sink;
  ControlOptions options = options_for(directory, kWorker0, 2);
  options.connect_timeout_ns = 500 * kNanosPerMilli;
  EXPECT_EQ(connect_grpc_control(options, sink).status().code(), StatusCode::kDeadlineExceeded);
}

// Goal: another fleet's token is refused at once, for good, and names nothing of ours.
TEST(GrpcControl, RefusesAnotherToken) {
  set_log_level(LogLevel::kError);
  RunDirectory directory;
  Recorder at_hub, at_worker;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  ControlOptions options = options_for(directory, kWorker0, 2);
  options.token = kToken + 1;
  const std::int64_t start_ns = SystemClock::instance().now_ns();
  const Status status = connect_grpc_control(options, at_worker).status();
  EXPECT_EQ(status.code(), StatusCode::kUnauthenticated);
  EXPECT_EQ(status.info().reason, Reason::kBadToken);
  EXPECT_LT(SystemClock::instance().now_ns() - start_ns, options.connect_timeout_ns / 2);  // not tried again
  EXPECT_EQ(status.message().find(std::to_string(kToken)), std::string::npos);
  EXPECT_TRUE(at_hub.events().empty());
  const std::vector<std::string> refusals = hub->refusals();
  ASSERT_EQ(refusals.size(), 1U);
  EXPECT_EQ(refusals[0].find("a peer: the fleet token is not this fleet's"), 0U) << refusals[0];
  set_log_level(LogLevel::kWarn);
}

// A client without our code: what a process of another build would send.
struct RawLink {
  explicit RawLink(const RunDirectory& directory)
      : channel(grpc::CreateChannel("unix:" + directory.socket(), grpc::InsecureChannelCredentials())),
        stub(v1::Control::NewStub(channel)) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    stream = stub->Link(&context);
  }
  v1::Frame hello(const Member& member, Incarnation incarnation) const {
    v1::Frame frame;
    v1::Hello& h = *frame.mutable_hello();
    h.set_token(kToken);
    *h.mutable_member() = to_wire(member);
    h.set_incarnation(incarnation);
    h.set_software_version(kSoftwareVersion);
    h.set_wire_version(kWireVersion);
    h.set_slice_format_version(kSliceFormatVersion);
    h.set_byte_order(0x01020304);
    return frame;
  }
  // The status with which the hub ends the call.
  Status end() {
    v1::Frame ignored;
    while (stream->Read(&ignored)) {
    }
    const grpc::Status status = stream->Finish();
    return from_grpc_status(status.error_code(), status.error_message(), status.error_details());
  }

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Control::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::Frame, v1::Frame>> stream;
};

// Goal: another software, wire or format version is refused, naming both sides' values.
TEST(GrpcControl, RefusesOtherVersionsNamingBoth) {
  set_log_level(LogLevel::kError);
  RunDirectory directory;
  Recorder at_hub;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  const auto refused = [&](const std::function<void(v1::Hello&)>& change) {
    RawLink link(directory);
    v1::Frame frame = link.hello(kWorker0, 2);
    change(*frame.mutable_hello());
    link.stream->Write(frame);
    const Status status = link.end();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.to_string();
    return status;
  };
  const Status software = refused([](v1::Hello& h) { h.set_software_version("0.0.9"); });
  EXPECT_EQ(software.info().reason, Reason::kVersionMismatch);
  EXPECT_NE(software.message().find("software 0.0.9"), std::string::npos) << software.message();
  EXPECT_NE(software.message().find(std::string("software ") + kSoftwareVersion), std::string::npos);
  EXPECT_NE(refused([](v1::Hello& h) { h.set_wire_version(77); }).message().find("wire 77"),
            std::string::npos);
  EXPECT_NE(refused([](v1::Hello& h) { h.set_slice_format_version(78); }).message().find("slice format 78"),
            std::string::npos);
  EXPECT_NE(refused([](v1::Hello& h) { h.set_byte_order(0x04030201); }).message().find("byte order"),
            std::string::npos);
  EXPECT_NE(refused([](v1::Hello& h) { *h.mutable_member() = to_wire(kSender); }).message().find("trainer 0"),
            std::string::npos);
  EXPECT_TRUE(at_hub.events().empty());
  set_log_level(LogLevel::kWarn);
}

// Goal: hub and link know how their clocks stand to each other as soon as two messages have gone there and
// back, long before a heartbeat is due; and nobody claims to know others'.
TEST(GrpcControl, ComparesClocksAsALinkComesUp) {
  RunDirectory directory;
  Recorder at_hub, at_worker;
  const auto patient = [&](const Member& self, Incarnation incarnation) {
    ControlOptions options = options_for(directory, self, incarnation);
    options.heartbeat_ns = 3600 * kNanosPerSecond;
    options.dead_after_ns = 7200 * kNanosPerSecond;
    return options;
  };
  const auto hub = hub_at(patient(kSender, 1), at_hub);
  const auto worker = link_at(patient(kWorker0, 2), at_worker);
  for (std::size_t round = 1; round <= 2; ++round) {
    ASSERT_TRUE(worker->send(kSender, note("there")).ok());
    ASSERT_TRUE(at_hub.wait_count(Event::kMessage, kWorker0, round));
    ASSERT_TRUE(hub->send(kWorker0, note("and back")).ok());
    ASSERT_TRUE(at_worker.wait_count(Event::kMessage, kSender, round));
  }
  for (const auto& found : {hub->clock_offset(kWorker0), worker->clock_offset(kSender)}) {
    ASSERT_TRUE(found.has_value());
    EXPECT_LE(std::abs(found->offset_ns), found->error_ns);  // both clocks are this process's
    EXPECT_LT(found->error_ns, kPatience);
  }
  EXPECT_EQ(hub->clock_offset(kSender), ClockOffset());
  EXPECT_EQ(worker->clock_offset(kWorker0), ClockOffset());
  EXPECT_FALSE(hub->clock_offset(kWorker1));
  EXPECT_FALSE(worker->clock_offset(kWorker1));
}

// Goal: frames that make no sense end that link only.
TEST(GrpcControl, EndsLinksThatSendNonsense) {
  set_log_level(LogLevel::kOff);
  RunDirectory directory;
  Recorder at_hub, at_worker;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  const auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
  {
    RawLink link(directory);
    v1::Frame frame;
    frame.mutable_routed();
    link.stream->Write(frame);
    EXPECT_EQ(link.end().code(), StatusCode::kInvalidArgument);  // no hello
  }
  {
    RawLink link(directory);
    v1::Frame frame = link.hello(kWorker1, 5);
    frame.mutable_hello()->set_incarnation(0);
    link.stream->Write(frame);
    EXPECT_EQ(link.end().code(), StatusCode::kInvalidArgument);
  }
  std::size_t lives = 0;
  const auto ends_after_hello = [&](const v1::Frame& frame) {
    RawLink link(directory);
    link.stream->Write(link.hello(kWorker1, 10 + lives));
    v1::Frame welcome;  // only whoever was let in is lost: gRPC itself ends the call for a frame too large,
                        // hello or not
    ASSERT_TRUE(link.stream->Read(&welcome));
    link.stream->Write(frame);
    EXPECT_FALSE(link.end().ok());
    ++lives;
    ASSERT_TRUE(at_hub.wait_count(Event::kLost, kWorker1, lives));
    EXPECT_EQ(at_hub.last(Event::kLost, kWorker1).incarnation, 9 + lives);
  };
  v1::Frame frame;
  ends_after_hello(frame);  // of no kind
  frame.mutable_welcome();
  ends_after_hello(frame);
  *frame.mutable_hello() = RawLink(directory).hello(kWorker1, 99).hello();
  ends_after_hello(frame);
  frame.mutable_routed();  // to nobody
  ends_after_hello(frame);
  *frame.mutable_routed()->mutable_to() = to_wire(kSender);  // without a body
  ends_after_hello(frame);
  frame.mutable_part()->set_last(true);
  frame.mutable_part()->set_data("\xff\xff not a frame");
  ends_after_hello(frame);
  v1::Frame nested;
  nested.mutable_part()->set_data("parts of parts");
  frame.mutable_part()->set_data(nested.SerializeAsString());
  ends_after_hello(frame);
  frame.mutable_part()->set_data(std::string(2 << 20, 'x'));  // larger than a part may be
  ends_after_hello(frame);
  ASSERT_TRUE(worker->send(kSender, note("undisturbed")).ok());
  ASSERT_TRUE(at_hub.wait_count(Event::kMessage, kWorker0, 1));
  set_log_level(LogLevel::kWarn);
}

// Goal: bytes that are no gRPC at all harm nobody.
TEST(GrpcControl, SurvivesForeignBytes) {
  RunDirectory directory;
  Recorder at_hub, at_worker;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(10'000, '\xA5'),
                                   std::string("SPUL"), std::string()}) {
    auto fd = connect_unix(directory.socket(), kNanosPerSecond);
    ASSERT_TRUE(fd.ok());
    [[maybe_unused]] const ssize_t sent = ::send(fd->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  const auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
  ASSERT_TRUE(worker->send(kSender, note("undisturbed")).ok());
  ASSERT_TRUE(at_hub.wait_count(Event::kMessage, kWorker0, 1));
}

// Goal: two processes of one number are a mistake, told to the second; after the first has gone the number is
// free.
TEST(GrpcControl, RefusesASecondMemberOfTheSameNumber) {
  set_log_level(LogLevel::kError);
  RunDirectory directory;
  Recorder at_hub, at_first, at_second;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  auto first = link_at(options_for(directory, kWorker0, 2), at_first);
  ControlOptions options = options_for(directory, kWorker0, 3);
  options.dead_after_ns = 300 * kNanosPerMilli;
  const Status status = connect_grpc_control(options, at_second).status();
  EXPECT_EQ(status.code(), StatusCode::kAlreadyExists);
  EXPECT_NE(status.message().find("worker 0 is connected already"), std::string::npos) << status.message();
  first->shutdown();
  const auto second = link_at(options, at_second);
  ASSERT_TRUE(at_hub.wait_count(Event::kUp, kWorker0, 2));
  const auto events = at_hub.events();
  ASSERT_EQ(events.size(), 3u);  // up, lost, up: the old life is lost before the new one is up
  EXPECT_EQ(events[1].kind, Event::kLost);
  EXPECT_EQ(events[1].incarnation, 2u);
  EXPECT_EQ(events[1].why.info().reason, Reason::kShutdown);
  EXPECT_EQ(events[2].incarnation, 3u);
  set_log_level(LogLevel::kWarn);
}

// Goal: whoever writes to somebody who is not there learns it, in the way the contract says.
TEST(GrpcControl, TellsSendersAboutMembersThatAreNotThere) {
  RunDirectory directory;
  Recorder at_hub, at_trainer, at_worker;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  const auto trainer = link_at(options_for(directory, kTrainer1, 2), at_trainer);
  EXPECT_EQ(hub->send(kWorker0, note("x")).code(), StatusCode::kUnavailable);
  ASSERT_TRUE(trainer->send(kWorker0, note("x")).ok());  // only the hub knows
  ASSERT_TRUE(at_trainer.wait_count(Event::kLost, kWorker0, 1));
  EXPECT_EQ(at_trainer.last(Event::kLost, kWorker0).incarnation, 0u);
  EXPECT_EQ(trainer->send(kWorker0, note("x")).code(), StatusCode::kUnavailable);  // now it is known here too

  auto worker = link_at(options_for(directory, kWorker0, 3), at_worker);
  ASSERT_TRUE(at_trainer.wait_count(Event::kUp, kWorker0, 1));
  ASSERT_TRUE(trainer->send(kWorker0, note("hello")).ok());
  ASSERT_TRUE(at_worker.wait_count(Event::kMessage, kTrainer1, 1));
  worker.reset();
  ASSERT_TRUE(at_trainer.wait_count(Event::kLost, kWorker0, 2));
  ASSERT_TRUE(at_hub.wait_count(Event::kLost, kWorker0, 1));
  EXPECT_EQ(at_trainer.last(Event::kLost, kWorker0).incarnation, 3u);
  EXPECT_EQ(at_trainer.last(Event::kLost, kWorker0).why.info().reason, Reason::kShutdown);
  EXPECT_EQ(trainer->send(kWorker0, note("x")).code(), StatusCode::kUnavailable);
  EXPECT_EQ(hub->send(kWorker0, note("x")).code(), StatusCode::kUnavailable);
}

// Goal: what was sent before a shutdown arrives; afterwards nothing is sent and nothing is called back.
TEST(GrpcControl, ShutdownSendsWhatIsQueued) {
  RunDirectory directory;
  Recorder at_hub, at_worker;
  auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
  ASSERT_TRUE(at_hub.wait_count(Event::kUp, kWorker0, 1));
  for (std::uint64_t i = 0; i < 2000; ++i) ASSERT_TRUE(worker->send(kSender, Update{.sync_id = i}).ok());
  worker->shutdown();
  ASSERT_TRUE(at_hub.wait_count(Event::kLost, kWorker0, 1));
  auto events = at_hub.events();
  ASSERT_EQ(events.size(), 2002u);
  EXPECT_EQ(std::get<Update>(events[2000].body).sync_id, 1999u);
  EXPECT_EQ(worker->send(kSender, note("x")).code(), StatusCode::kUnavailable);
  const std::size_t seen = at_worker.events().size();

  Recorder at_next;
  auto next = link_at(options_for(directory, kWorker0, 3), at_next);
  ASSERT_TRUE(at_hub.wait_count(Event::kUp, kWorker0, 2));
  for (std::uint64_t i = 0; i < 2000; ++i) ASSERT_TRUE(hub->send(kWorker0, Update{.sync_id = i}).ok());
  hub->shutdown();
  ASSERT_TRUE(at_next.wait_count(Event::kLost, kSender, 1));
  EXPECT_EQ(at_next.last(Event::kLost, kSender).why.info().reason, Reason::kShutdown);
  events = at_next.events();
  ASSERT_EQ(events.size(), 2002u);
  EXPECT_EQ(std::get<Update>(events[2000].body).sync_id, 1999u);
  EXPECT_EQ(hub->send(kWorker0, note("x")).code(), StatusCode::kUnavailable);
  EXPECT_EQ(next->send(kSender, note("x")).code(), StatusCode::kUnavailable);
  EXPECT_EQ(at_worker.events().size(), seen);
  hub->shutdown();  // again is nothing
  next->shutdown();
  EXPECT_FALSE(std::filesystem::exists(directory.socket()));
}

// Goal: shutting down in any order and state ends, soon, with nothing left.
TEST(GrpcControl, ShutsDownFromEveryState) {
  RunDirectory directory;
  Recorder sinks[4];
  {  // a hub nobody came to
    const auto hub = hub_at(options_for(directory, kSender, 1), sinks[0]);
  }
  {  // links first, hub first, and together with messages on their way
    for (int round = 0; round < 6; ++round) {
      auto hub = hub_at(options_for(directory, kSender, 1), sinks[0]);
      auto a = link_at(options_for(directory, kWorker0, 2), sinks[1]);
      auto b = link_at(options_for(directory, kWorker1, 3), sinks[2]);
      std::atomic<bool> stop{false};
      std::thread busy([&] {
        while (!stop) a->send(kWorker1, note("x")).ignore();
      });
      switch (round % 3) {
        case 0:
          b.reset();
          hub->shutdown();
          break;
        case 1:
          hub.reset();
          break;
        default: {
          std::thread other([&] { b->shutdown(); });
          hub->shutdown();
          other.join();
        }
      }
      stop = true;
      busy.join();
    }
  }
  {  // while a link is connecting, and a stranger is half way through
    auto hub = hub_at(options_for(directory, kSender, 1), sinks[0]);
    RawLink raw(directory);
    ControlOptions options = options_for(directory, kWorker0, 2);
    options.connect_timeout_ns = 500 * kNanosPerMilli;
    std::thread connecting([&] { connect_grpc_control(options, sinks[3]).status().ignore(); });
    hub.reset();
    connecting.join();
  }
}

// Goal: a hub that ends is reported as the sender's loss; a new hub at the same address serves new links.
TEST(GrpcControl, AHubMayComeBack) {
  RunDirectory directory;
  Recorder at_first, at_second, at_worker, at_again;
  auto first = hub_at(options_for(directory, kSender, 1), at_first);
  auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
  first.reset();
  ASSERT_TRUE(at_worker.wait_count(Event::kLost, kSender, 1));
  const auto second = hub_at(options_for(directory, kSender, 9), at_second);
  EXPECT_EQ(worker->send(kSender, note("x")).code(), StatusCode::kUnavailable);  // links are not mended
  worker.reset();
  const auto again = link_at(options_for(directory, kWorker0, 3), at_again);
  EXPECT_EQ(at_again.last(Event::kUp, kSender).incarnation, 9u);
}

// Goal: one address, one hub; and an address that is not one is refused with the form it must have.
TEST(GrpcControl, RefusesAddressesThatCannotServe) {
  RunDirectory directory;
  Recorder sink;
  const auto hub = hub_at(options_for(directory, kSender, 1), sink);
  EXPECT_EQ(start_grpc_hub(options_for(directory, kSender, 2), sink).status().code(),
            StatusCode::kAlreadyExists);
  ControlOptions options = options_for(directory, kSender, 1);
  options.address = "0.0.0.0:1234";
  EXPECT_NE(start_grpc_hub(options, sink).status().message().find("unix:/path"), std::string::npos);
  EXPECT_FALSE(connect_grpc_control(options, sink).ok());
  options.address = "unix:" + directory.path() + "/missing/hub.sock";
  EXPECT_NE(start_grpc_hub(options, sink).status().message().find("mkdir"), std::string::npos);
  options = options_for(directory, kSender, 0);
  EXPECT_EQ(start_grpc_hub(options, sink).status().code(), StatusCode::kInvalidArgument);
  RunDirectory open_directory;
  ASSERT_EQ(chmod(open_directory.path().c_str(), 0755), 0);
  EXPECT_EQ(start_grpc_hub(options_for(open_directory, kSender, 1), sink).status().code(),
            StatusCode::kPermissionDenied);
}

// Goal: a killed hub's socket file does not stand in the way of the next one.
TEST(GrpcControl, ReplacesAStaleSocket) {
  RunDirectory directory;
  {
    const UniqueFd left_behind(socket(AF_UNIX, SOCK_STREAM, 0));
    const auto path = SocketPath::open(directory.socket());
    const sockaddr_un address = path->address();
    ASSERT_EQ(bind(left_behind.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  Recorder at_hub, at_worker;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  const auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
}

// Goal: paths with spaces, percent signs, other scripts and any length work.
TEST(GrpcControl, WorksAtOddPaths) {
  for (const std::string& below :
       {std::string("/with space/100%25 ?#[a]"), std::string("/\xC3\xA4\xE2\x82\xAC"),
        "/" + std::string(100, 'a') + "/ b/" + std::string(100, 'c')}) {
    RunDirectory directory(below);
    Recorder at_hub, at_worker;
    const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
    ASSERT_NE(hub, nullptr) << below;
    EXPECT_TRUE(std::filesystem::exists(directory.socket()));
    const auto worker = link_at(options_for(directory, kWorker0, 2), at_worker);
    ASSERT_NE(worker, nullptr) << below;
    ASSERT_TRUE(worker->send(kSender, note("x")).ok());
    ASSERT_TRUE(at_hub.wait_count(Event::kMessage, kWorker0, 1));
  }
}

// ---- other processes ----

constexpr const char* kChildVariable = "SHARDPULL_TEST_CHILD_DIRECTORY";

// What the tests below start, stop and kill: a link of worker 0 which says "up" and then answers every
// message. It ends with code 3 when the sender is lost.
[[noreturn]] void run_child(const std::string& directory) {
  class Echo final : public ControlSink {
   public:
    void on_control(const Member& from, Incarnation, ControlBody body) override {
      if (Control* const to = control.load()) to->send(from, std::move(body)).ignore();
    }
    void on_member_up(const Member&, Incarnation) override {}
    void on_member_lost(const Member& member, Incarnation, const Status&) override {
      if (member == kSender) _exit(3);
    }
    std::atomic<Control*> control{nullptr};
  } echo;
  ControlOptions options;
  options.address = "unix:" + directory + "/hub.sock";
  options.token = kToken;
  options.self = kWorker0;
  options.incarnation = 2;
  options.heartbeat_ns = 50 * kNanosPerMilli;
  options.dead_after_ns = 60 * kNanosPerSecond;
  const auto link = connect_grpc_control(options, echo);
  if (!link.ok()) _exit(1);
  echo.control = link->get();
  if (!(*link)->send(kSender, note("up")).ok()) _exit(1);
  Mutex mutex;
  CondVar never;
  MutexLock lock(mutex);
  for (int i = 0; i < 60; ++i)
    never.wait_for_ns(mutex, kNanosPerSecond);  // a bound, should the parent be gone
  _exit(2);
}

// A child is this program with a variable in its environment, executed anew: gRPC does not survive a mere
// fork. It never comes as far as GoogleTest.
const bool kIsChild = [] {
  if (const char* const directory = std::getenv(kChildVariable)) run_child(directory);
  return false;
}();

class ChildProcess {
 public:
  explicit ChildProcess(const RunDirectory& directory) {
    EXPECT_FALSE(kIsChild);
    std::string variable = std::string(kChildVariable) + "=" + directory.path();
    std::vector<char*> environment = {variable.data()};
    for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
    environment.push_back(nullptr);
    const char* const arguments[] = {"child", nullptr};
    pid_ = fork();
    if (pid_ == 0) {  // nothing but exec: other threads' locks may be taken
      execve("/proc/self/exe", const_cast<char* const*>(arguments), environment.data());
      _exit(127);
    }
  }
  ~ChildProcess() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  void signal(int number) const { EXPECT_EQ(kill(pid_, number), 0); }
  int wait() {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_ = -1;
};

// Goal: a killed process is reported lost at once, by the break of its stream, to the hub and to everybody
// else.
TEST(GrpcControl, ReportsAKilledProcessAtOnce) {
  RunDirectory directory;
  Recorder at_hub, at_trainer;
  ControlOptions options = options_for(directory, kSender, 1);
  options.dead_after_ns = kPatience;  // only the break can tell
  const auto hub = hub_at(options, at_hub);
  const auto trainer = link_at(options_for(directory, kTrainer1, 5), at_trainer);
  ChildProcess child(directory);
  ASSERT_TRUE(at_hub.wait_count(Event::kMessage, kWorker0, 1));
  ASSERT_TRUE(at_trainer.wait_count(Event::kUp, kWorker0, 1));
  child.signal(SIGKILL);
  child.wait();
  const std::int64_t killed_ns = SystemClock::instance().now_ns();
  ASSERT_TRUE(at_hub.wait_count(Event::kLost, kWorker0, 1));
  ASSERT_TRUE(at_trainer.wait_count(Event::kLost, kWorker0, 1));
  EXPECT_LT(SystemClock::instance().now_ns() - killed_ns, 5 * kNanosPerSecond);
  EXPECT_EQ(at_hub.last(Event::kLost, kWorker0).why.info().reason, Reason::kPeerLost);
  EXPECT_EQ(at_hub.last(Event::kLost, kWorker0).incarnation, 2u);
}

// Goal: a process that is stopped, its connection still open, is found dead by its silence; when it goes on
// it is fenced.
TEST(GrpcControl, FindsAStoppedProcessDeadAndFencesIt) {
  set_log_level(LogLevel::kError);
  RunDirectory directory;
  Recorder at_hub;
  ControlOptions options = options_for(directory, kSender, 1);
  options.dead_after_ns = 1500 * kNanosPerMilli;
  const auto hub = hub_at(options, at_hub);
  ChildProcess child(directory);
  ASSERT_TRUE(at_hub.wait_count(Event::kMessage, kWorker0, 1));
  child.signal(SIGSTOP);
  const std::int64_t stopped_ns = SystemClock::instance().now_ns();
  // Messages to it are no sign of life.
  for (int i = 0; i < 10; ++i) hub->send(kWorker0, note("x")).ignore();
  ASSERT_TRUE(at_hub.wait_count(Event::kLost, kWorker0, 1));
  EXPECT_GE(SystemClock::instance().now_ns() - stopped_ns, kNanosPerSecond);
  EXPECT_NE(at_hub.last(Event::kLost, kWorker0).why.message().find("did not answer for 1500 ms"),
            std::string::npos);
  EXPECT_EQ(hub->send(kWorker0, note("x")).code(), StatusCode::kUnavailable);
  const std::size_t seen = at_hub.events().size();
  child.signal(SIGCONT);
  const int status = child.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3);  // it learned that it lost the sender
  EXPECT_EQ(at_hub.events().size(), seen);                     // and nothing it had to say was heard
  set_log_level(LogLevel::kWarn);
}

// Goal: a link that is alive but whose program has nothing to say is not taken for dead.
TEST(GrpcControl, QuietMembersStayUp) {
  RunDirectory directory;
  Recorder at_hub, at_worker;
  ControlOptions options = options_for(directory, kSender, 1);
  options.heartbeat_ns = 20 * kNanosPerMilli;
  options.dead_after_ns = kNanosPerSecond;
  const auto hub = hub_at(options, at_hub);
  options.self = kWorker0;
  options.incarnation = 2;
  const auto worker = link_at(options, at_worker);
  Mutex mutex;
  CondVar never;
  {
    MutexLock lock(mutex);
    never.wait_for_ns(mutex, 5 * kNanosPerSecond / 2, [] { return false; });  // more than twice the bound
  }
  EXPECT_EQ(at_hub.events().size(), 1u);
  EXPECT_EQ(at_worker.events().size(), 1u);
}

std::size_t entries_of(const char* directory) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator()));
}

// Goal: two hundred lives later there are as many descriptors and threads as before.
TEST(GrpcControl, LeaksNothingOverManyLives) {
  RunDirectory directory;
  Recorder at_hub;
  const auto hub = hub_at(options_for(directory, kSender, 1), at_hub);
  const auto live = [&](Incarnation incarnation) {
    Recorder sink;
    const auto worker = link_at(options_for(directory, kWorker0, incarnation), sink);
    ASSERT_NE(worker, nullptr);
    ASSERT_TRUE(worker->send(kSender, note("x")).ok());
  };
  for (Incarnation i = 1; i <= 20; ++i) live(i);
  ASSERT_TRUE(at_hub.wait_count(Event::kLost, kWorker0, 20));
  const std::size_t descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  for (Incarnation i = 21; i <= 220; ++i) live(i);
  ASSERT_TRUE(at_hub.wait_count(Event::kLost, kWorker0, 220));
  // gRPC closes connections and parks threads on its own time.
  const std::int64_t give_up_ns = SystemClock::instance().now_ns() + kPatience;
  while ((entries_of("/proc/self/fd") > descriptors || entries_of("/proc/self/task") > threads + 4) &&
         SystemClock::instance().now_ns() < give_up_ns) {
    std::this_thread::yield();
  }
  EXPECT_LE(entries_of("/proc/self/fd"), descriptors);
  EXPECT_LE(entries_of("/proc/self/task"), threads + 4);
}

}  // namespace
}  // namespace shardpull
