#include "cli/sync_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/progress.h"

namespace shardpull::cli {
namespace {

using ::testing::HasSubstr;

SyncOutcome outcome(std::uint32_t sync, bool exact) {
  SyncOutcome out;
  out.sync = sync;
  out.version = sync - 1;
  out.wall_ns = 2'000'000;
  out.summary = "version 1, slowest \"worker 0\"";
  for (std::uint32_t id = 0; id < 2; ++id) {
    WorkerOutcome worker;
    worker.report = {.consumer = id,
                     .bytes_kept = 1000,
                     .bytes_moved = 1000,
                     .update_ns = 7,
                     .copy_ns = 5,
                     .padding_bytes = 3};
    worker.report.commit_ns = 2;
    worker.report.phases = {{Phase::kTransfer, 6, 8, 2}, {Phase::kCommit, 3, 3, 1}};
    worker.report.waited_for = 1;
    worker.report.waited_ns = id;
    worker.verdict =
        VerdictReport{.exact = exact, .error = exact ? "" : "differs", .parameters = 500, .bytes = 1128};
    out.workers.push_back(worker);
  }
  out.ranks = {{.rank = 0,
                .export_ns = 30,
                .export_bytes = 100,
                .peak_resident_bytes = 9,
                .packs = 4,
                .packed_bytes = 70},
               {.rank = 1,
                .export_ns = 40,
                .export_bytes = 200,
                .peak_resident_bytes = 8,
                .packs = 5,
                .packed_bytes = 60,
                .wall_ns = 90,
                .phases = {{Phase::kSource, 90, 90, 4}}}};
  return out;
}

TEST(SyncReport, AnOutcomeSurvivesItsJson) {
  const SyncOutcome sent = outcome(3, true);
  const auto read = sync_outcome_from_json(to_json(sent));
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(to_json(*read), to_json(sent));
  EXPECT_EQ(read->bytes_moved(), 2000u);
  EXPECT_EQ(read->padding_bytes(), 6u);
  EXPECT_EQ(read->export_ns(), 40u);
  EXPECT_EQ(read->export_bytes(), 300u);
  EXPECT_EQ(read->packs(), 9u);
  EXPECT_EQ(read->packed_bytes(), 130u);
  EXPECT_EQ(read->summary, sent.summary);
  EXPECT_EQ(read->workers[1].report.phases, sent.workers[1].report.phases);
  EXPECT_EQ(read->workers[1].report.waited_ns, 1u);
  EXPECT_EQ(read->ranks[1].phases, sent.ranks[1].phases);
  EXPECT_EQ(read->ranks[1].wall_ns, 90u);
  EXPECT_TRUE(read->exact());
  EXPECT_FALSE(sync_outcome_from_json(nlohmann::json::array()).ok());
  EXPECT_FALSE(sync_outcome_from_json({{"sync", "three"}}).ok());
}

TEST(SyncReport, AProcessReportSurvivesItsText) {
  const ProcessReport sent{
      .memory = {.process = "worker 1", .model_bytes = 1, .engine_bytes = 2, .peak_extra_bytes = 3},
      .verdict = VerdictReport{.exact = false, .error = "bad \xff byte", .parameters = 4, .bytes = 5}};
  const auto read = decode_process_report(encode(sent));
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->memory.process, "worker 1");
  EXPECT_EQ(read->memory.peak_extra_bytes, 3u);
  ASSERT_TRUE(read->verdict);
  EXPECT_FALSE(read->verdict->exact);
  EXPECT_FALSE(decode_process_report("{").ok());
  EXPECT_FALSE(decode_process_report("{\"memory\": 3}").ok());
}

TEST(SyncReport, TheLimitIsTheMeanOfAPairThatAgrees) {
  SyncOutcome sync = outcome(1, true);
  EXPECT_FALSE(sync.memcpy_limit_ns());
  sync.copy_before_ns = 1000;
  sync.copy_after_ns = 1150;
  EXPECT_EQ(sync.memcpy_limit_ns(), 1075.0);
  EXPECT_TRUE(sync.memcpy_steady());
  sync.copy_after_ns = 1200;
  EXPECT_FALSE(sync.memcpy_steady());
}

RunReport report(bool verify, bool exact) {
  RunReport run;
  run.model = "m";
  run.verify = verify;
  run.syncs = {outcome(1, exact), outcome(2, exact)};
  if (!verify) {
    for (SyncOutcome& sync : run.syncs) {
      for (WorkerOutcome& worker : sync.workers) worker.verdict.reset();
    }
  }
  return run;
}

TEST(SyncReport, TheVerdictIsTheLastLine) {
  EXPECT_THAT(to_text(report(true, true)),
              ::testing::EndsWith("\nexact: 1000 parameters, 4512 bytes, 2 syncs\n"));
  EXPECT_EQ(report(true, false).exact(), false);
  EXPECT_EQ(report(false, true).exact(), std::nullopt);
  EXPECT_THAT(to_text(report(false, true)), HasSubstr("not verified"));
  RunReport failed = report(true, true);
  failed.error = RunError{"worker 1", "gone"};
  EXPECT_EQ(failed.exact(), false);
}

TEST(SyncReport, JsonSaysWhatIsNotKnown) {
  const auto json = nlohmann::json::parse(to_json_text(report(false, true)));
  EXPECT_EQ(json["shardpull"], kReportVersion);
  EXPECT_TRUE(json["exact"].is_null());
  EXPECT_TRUE(json["syncs"][0]["memcpy_limit_s"].is_null());
  EXPECT_TRUE(json["syncs"][0]["ratio"].is_null());
  EXPECT_EQ(json["syncs"][0]["wall_s"], 0.002);
  EXPECT_EQ(json["syncs"][0]["summary"], outcome(1, false).summary);
  const auto& workers = json["syncs"][0]["workers"];
  EXPECT_EQ(workers[1]["phases"]["transfer"]["charged_s"], 6e-9);
  EXPECT_EQ(workers[1]["waited_for_rank"], 1);
  EXPECT_TRUE(workers[0]["waited_for_rank"].is_null());
  EXPECT_EQ(json["syncs"][0]["ranks"][1]["phases"]["source"]["count"], 4);
  EXPECT_FALSE(json.contains("error"));
}

TEST(Table, ColumnsAlign) {
  EXPECT_EQ(format_table({{"name", "n"}, {"a", "100"}, {"bcdef", "2"}}),
            "name     n\na      100\nbcdef    2\n");
  EXPECT_EQ(format_table({{"a", "b"}, {"cc", ""}}, 2), "a   b\ncc\n");
}

TEST(ProgressBar, Frames) {
  EXPECT_EQ(progress_frame("sync 1/2", 0.5, "1 GB/s", "0:04", 48),
            "sync 1/2 [======>      ]  50%  1 GB/s  0:04 left");
  EXPECT_LE(progress_frame("sync 1/2", 0.5, "1 GB/s", "0:04", 20).size(), 20u);
  EXPECT_THAT(progress_frame("x", 1.0, "", "", 80), HasSubstr("====] 100%"));
  EXPECT_THAT(progress_frame("x", 7.0, "", "", 80), HasSubstr("100%"));
  EXPECT_EQ(format_clock(3'000'000'000), "0:03");
  EXPECT_EQ(format_clock(3'723'000'000'000), "1:02:03");
}

}  // namespace
}  // namespace shardpull::cli
