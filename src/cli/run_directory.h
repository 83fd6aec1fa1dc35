// A private directory for one run, gone when the run ends.
#pragma once

#include <filesystem>

#include "base/unique_fd.h"
#include "shardpull/status.h"

namespace shardpull::cli {

// Owner-only, in TMPDIR or /tmp. The destructor removes it with everything in it. A run that was killed
// cannot do that: its directory is removed by the next run that makes one (a lock that the dead no longer
// hold tells which).
class RunDirectory {
 public:
  static Result<RunDirectory> make();
  RunDirectory(RunDirectory&&) noexcept = default;
  RunDirectory& operator=(RunDirectory&&) = delete;
  ~RunDirectory();

  const std::filesystem::path& path() const { return path_; }

 private:
  RunDirectory(std::filesystem::path path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  std::filesystem::path path_;
  UniqueFd lock_;
};

}  // namespace shardpull::cli
