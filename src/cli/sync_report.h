// What a run of syncs gave: collected by the sender, completed by the launcher, shown as a table or as JSON.
//
// The JSON object is documented in docs/FORMATS.md, "Output of sync". Its version is kReportVersion: fields
// may be added under one version, none changes its meaning.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "shardpull/fleet.h"
#include "shardpull/status.h"

namespace shardpull::cli {

inline constexpr int kReportVersion = 1;

// One worker's verdict on a sync.
struct VerdictReport {
  bool exact = false;
  std::string error;             // empty when exact
  std::uint64_t parameters = 0;  // elements compared
  std::uint64_t bytes = 0;       // bytes compared, padding and guard bytes included
};

// The memory of one process, the most so far.
struct MemoryReport {
  std::string process;                 // "worker 0"
  std::uint64_t model_bytes = 0;       // the model itself: parameters, or held tensors
  std::uint64_t engine_bytes = 0;      // rings, slots and export buffers
  std::uint64_t peak_extra_bytes = 0;  // anonymous memory and own shared memory, less the model itself
};

nlohmann::json to_json(const MemoryReport& memory);
Result<MemoryReport> memory_report_from_json(const nlohmann::json& json);

// What a process other than the sender tells the sender after each sync.
struct ProcessReport {
  MemoryReport memory;
  std::optional<VerdictReport> verdict;  // workers that verify
};
std::string encode(const ProcessReport& report);
// INVALID_ARGUMENT when `text` is no such report.
Result<ProcessReport> decode_process_report(const std::string& text);

// What one worker's part of a sync came to.
struct WorkerOutcome {
  WorkerReport report;
  std::optional<VerdictReport> verdict;
};

struct SyncOutcome {
  std::uint32_t sync = 0;  // 1, 2, ...
  std::uint64_t version = 0;
  std::uint64_t wall_ns = 0;
  std::string summary;                 // summary_line()
  std::vector<WorkerOutcome> workers;  // by consumer
  std::vector<RankReport> ranks;       // by rank

  // Times of the plain copies beside this sync; absent where they were not measured.
  std::optional<std::int64_t> copy_before_ns, copy_after_ns, copy_non_temporal_ns;
  std::optional<std::int64_t> read_vectored_ns;  // transport cma only

  std::uint64_t bytes_kept() const;
  std::uint64_t bytes_moved() const;
  std::uint64_t padding_bytes() const;
  std::uint64_t export_ns() const;     // of the slowest rank
  std::uint64_t export_bytes() const;  // of all ranks
  // Pulls that all ranks packed into serve slots. Workers of several replicas that take the same share a
  // pack.
  std::uint64_t packs() const;
  std::uint64_t packed_bytes() const;
  // Mean of the two plain copies.
  std::optional<double> memcpy_limit_ns() const;
  // False when the two differ by more than 15 %: the machine changed its speed, and a ratio to them means
  // nothing.
  bool memcpy_steady() const;
  bool verified() const;  // every worker compared
  bool exact() const;     // and found no difference
};
nlohmann::json to_json(const SyncOutcome& outcome);  // the sender's event: what from_json reads
Result<SyncOutcome> sync_outcome_from_json(const nlohmann::json& json);

// Why a run failed, and whose own error it is.
struct RunError {
  std::string process;  // "worker 1", "launcher"
  std::string message;
};

struct RunReport {
  std::string model;
  std::uint64_t model_bytes = 0;
  std::uint64_t tensors = 0;
  std::string trainer, inference, path, apply, transport, integrity;
  std::string publish;             // "gather" or "resident"
  std::vector<std::string> names;  // patterns that the syncs after the first are restricted to
  std::uint32_t ring_depth = 0, lookahead = 0, chunk_split = 1, pull_split = 1;
  std::uint64_t max_chunk_bytes = 0, export_pack_limit_bytes = 0;
  bool verify = false;
  std::vector<std::string> notes;
  std::vector<SyncOutcome> syncs;
  std::vector<MemoryReport> processes;  // trainers, then workers
  std::optional<RunError> error;

  // The elements that all workers hold together, each compared in every sync.
  std::uint64_t parameters() const;
  // Bytes compared over all workers and syncs.
  std::uint64_t bytes_compared() const;
  // True when every sync was verified and none differed, false also when the run failed; nothing when it did
  // not verify.
  std::optional<bool> exact() const;
};

// "exact: 1234 parameters, 5678 bytes, 3 syncs".
std::string verdict_line(const RunReport& report);
std::string to_text(const RunReport& report);  // the tables and, last, the verdict
std::string to_json_text(const RunReport& report);

// Columns padded to their widest cell, numbers right, two spaces between; no trailing spaces.
std::string format_table(const std::vector<std::vector<std::string>>& rows, std::size_t left_columns = 1);

}  // namespace shardpull::cli
