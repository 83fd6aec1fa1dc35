#include "observe/trace_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace shardpull {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class TraceFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "shardpull-trace-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  static json read(const std::filesystem::path& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return json::parse(text.str());
  }

  std::filesystem::path directory_;
};

FleetTimeline sample(std::uint64_t sync) {
  const auto at = static_cast<std::int64_t>(sync) * 1'000'000;
  FleetTimeline fleet;
  fleet.sync_id = sync;
  fleet.version = 40 + sync;
  fleet.begin_ns = at;
  fleet.end_ns = at + 130'000;
  fleet.summary = "text with \"quotes\" and a bad \xff byte";
  // The worker's clock is 5 ms behind the sender's.
  const std::int64_t own = at - 5'000'000;
  ProcessTimeline worker{{Role::kWorker, 2}, {}, ClockOffset{5'000'000, 1'000}};
  worker.timeline = make_timeline(
      {{own + 10'000, own + 90'001, Phase::kEngine}, {own + 100'000, own + 120'000, Phase::kCommit}},
      {{.phase = Phase::kSlotWait, .item = 0, .begin_ns = own + 10'000, .end_ns = own + 10'500},
       {.phase = Phase::kSlotWait, .item = 1, .begin_ns = own + 10'500, .end_ns = own + 11'000},
       {.phase = Phase::kProduceWait, .item = 0, .peer = 0, .begin_ns = own + 10'500, .end_ns = own + 40'000},
       {.phase = Phase::kProduceWait, .item = 1, .peer = 0, .begin_ns = own + 11'000, .end_ns = own + 60'000},
       {.phase = Phase::kProduceWait,
        .run = 1,
        .item = 0,
        .peer = 0,
        .begin_ns = own + 10'600,
        .end_ns = own + 50'000},
       {.phase = Phase::kTransfer,
        .path = SpanPath::kMapped,
        .item = 0,
        .begin_ns = own + 50'000,
        .end_ns = own + 70'000,
        .bytes = 77},
       {.phase = Phase::kSignalWait, .begin_ns = own + 70'000, .end_ns = own + 90'001}},
      0);
  ProcessTimeline sender{kSender, {}, ClockOffset()};
  sender.timeline = make_timeline(
      {{at, at + 125'000, Phase::kEngine}},
      {{.phase = Phase::kSource, .item = 3, .begin_ns = at, .end_ns = at + 35'000},
       {.phase = Phase::kServe, .item = 0, .peer = 2, .begin_ns = at + 11'000, .end_ns = at + 39'000},
       {.phase = Phase::kServe, .item = 1, .peer = 2, .begin_ns = at + 12'000, .end_ns = at + 59'000}},
      0);
  fleet.processes = {sender, worker};
  fleet.missing = {{Role::kTrainer, 1}};
  return fleet;
}

// Goal: after every sync the file is one JSON object in which complete events of a thread nest, the charged
// ones of a worker add up to its time, and times are the sender's.
TEST_F(TraceFileTest, IsCompleteAfterEverySync) {
  const auto path = directory_ / "trace.json";
  auto trace = TraceFile::create(path.string());
  ASSERT_TRUE(trace.ok()) << trace.status().to_string();
  EXPECT_TRUE(read(path).at("traceEvents").empty());
  for (std::uint64_t sync = 1; sync <= 3; ++sync) {
    ASSERT_TRUE((*trace)->add(sample(sync)).ok());
    const json all = read(path);
    std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> threads;
    std::map<int, double> charged;
    std::size_t names = 0;
    for (const json& event : all.at("traceEvents")) {
      if (event.at("ph") == "M" && event.at("name") == "process_name") ++names;
      if (event.at("ph") != "X") continue;
      const double begin = event.at("ts"), end = begin + event.at("dur").get<double>();
      threads[{event.at("pid"), event.at("tid")}].emplace_back(begin, end);
      if (event.at("cat") == "charged") charged[event.at("pid")] += event.at("dur").get<double>();
    }
    EXPECT_EQ(names, 2u);
    constexpr int kWorker = 1'000'002;
    EXPECT_NEAR(charged.at(kWorker), static_cast<double>(sync) * (80.001 + 20), 1e-6);
    EXPECT_NEAR(charged.at(1), static_cast<double>(sync) * 125, 1e-6);
    for (auto& [thread, events] : threads) {
      std::vector<double> open;  // ends of what is under way
      std::stable_sort(events.begin(), events.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      for (const auto& [begin, end] : events) {
        while (!open.empty() && open.back() <= begin + 1e-6) open.pop_back();
        EXPECT_LE(end, open.empty() ? end : open.back() + 1e-6) << thread.first << "/" << thread.second;
        open.push_back(end);
      }
    }
  }
  const json all = read(path);
  bool caused = false, missing = false;
  for (const json& event : all.at("traceEvents")) {
    missing = missing || event.at("name") == "no timeline of trainer 1";
    if (event.value("cat", "") != "charged" || event.at("name") != "produce wait") continue;
    caused = caused || event.at("args").at("cause") == "trainer 0: source, group 3";
  }
  EXPECT_TRUE(caused);
  EXPECT_TRUE(missing);
}

// Goal: what cannot be written is refused at once, by name and cause.
TEST_F(TraceFileTest, RefusesWhatItCannotWrite) {
  for (const auto& path : {directory_ / "no" / "trace.json", directory_}) {
    const auto trace = TraceFile::create(path.string());
    ASSERT_FALSE(trace.ok());
    EXPECT_THAT(trace.status().message(),
                HasSubstr(fmt::format("the trace file {} cannot be created", path.string())));
  }
  const std::string pipe = (directory_ / "pipe").string();
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, std::string("/dev/full")}) {
    const auto trace = TraceFile::create(path);
    ASSERT_FALSE(trace.ok());
    EXPECT_EQ(trace.status().message(), fmt::format("the trace file {} is not a regular file", path));
  }
  // No byte more may be written, as on a full disk.
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
  const auto full = TraceFile::create((directory_ / "full.json").string());
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  ASSERT_FALSE(full.ok());
  EXPECT_THAT(full.status().message(), HasSubstr("cannot be written: File too large"));
}

}  // namespace
}  // namespace shardpull
