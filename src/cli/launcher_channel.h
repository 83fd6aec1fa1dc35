// The line between a process and the launcher that started it: JSON objects, one a line, towards the
// launcher; single bytes back. A process started by hand has none, and every call returns at once.
//
//   {"event":"progress","bytes":N}       trainer: bytes of its groups that are through, in this sync
//   {"event":"ready","sync":I}           trainer: about to start sync I; waits for a byte
//   {"event":"synced","sync":I}          everybody: sync I is through here; waits for a byte
//   {"event":"sync","outcome":{..},"processes":[..]}   sender: the report of a sync (sync_report.h)
//   {"event":"generated","bytes":N,"total":N}          generate: bytes written
//   {"event":"error","code":..,"reason":..,"peer":..,"message":..}   why this process will end
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "base/unique_fd.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// Process side. Thread-compatible. The launcher's end is in launcher.cc.
class LauncherChannel {
 public:
  explicit LauncherChannel(int fd) : fd_(fd) {}

  bool attached() const { return fd_.valid(); }
  // Never fails the caller: a launcher that has gone takes this process with it.
  void send(const nlohmann::json& event);
  void send_progress(std::uint64_t bytes);
  void send_error(const Status& status);
  // Tells the launcher that this process is at a gate and waits until it may go on. An error when the
  // launcher has gone, or after ten minutes.
  Status pass_gate(const char* gate, std::uint32_t sync);

 private:
  UniqueFd fd_;
};

}  // namespace shardpull::cli
