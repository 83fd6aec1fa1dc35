#include "cli/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

#include <fmt/format.h>

namespace shardpull::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "shardpull-run-";
constexpr const char* kLockName = "lock";

Status host_error(const std::string& what) {
  return Status(StatusCode::kInternal, fmt::format("{}: {}", what, std::strerror(errno)),
                {.reason = Reason::kHost, .fault = Fault::kHost});
}

fs::path parent_directory() {
  const char* const wanted = std::getenv("TMPDIR");
  return wanted != nullptr && *wanted != '\0' ? wanted : "/tmp";
}

// Removes what killed runs of this user left. A directory without a lock file is one that is being made or
// removed right now.
void remove_abandoned(const fs::path& parent) {
  std::error_code ignored;
  for (fs::directory_iterator at(parent, ignored), end; !ignored && at != end; at.increment(ignored)) {
    if (!at->path().filename().string().starts_with(kPrefix)) continue;
    struct stat info{};
    if (lstat(at->path().c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid()) continue;
    const UniqueFd lock(open((at->path() / kLockName).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!lock || flock(lock.get(), LOCK_EX | LOCK_NB) != 0) continue;
    std::error_code removing;
    fs::remove_all(at->path(), removing);
  }
}

}  // namespace

Result<RunDirectory> RunDirectory::make() {
  const fs::path parent = parent_directory();
  remove_abandoned(parent);
  std::string name = (parent / (std::string(kPrefix) + "XXXXXX")).string();
  if (mkdtemp(name.data()) == nullptr) {
    return host_error(fmt::format("cannot make a directory in {} (TMPDIR)", parent.string()));
  }
  // The lock exists under its name only once it is held, so that nobody takes a directory in the making for
  // an abandoned one.
  const std::string making = name + "/" + kLockName + ".new";
  UniqueFd lock(open(making.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!lock || flock(lock.get(), LOCK_EX | LOCK_NB) != 0 ||
      rename(making.c_str(), (name + "/" + kLockName).c_str()) != 0) {
    const Status failed = host_error(name);
    std::error_code ignored;
    fs::remove_all(name, ignored);
    return failed;
  }
  return RunDirectory(name, std::move(lock));
}

RunDirectory::~RunDirectory() {
  if (!lock_) return;  // moved from
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace shardpull::cli
