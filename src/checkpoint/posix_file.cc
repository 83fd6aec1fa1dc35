#include "checkpoint/posix_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/status_macros.h"

namespace shardpull {
namespace {

constexpr std::size_t kMaxTransferBytes = 1u << 30;  // one read or write call moves less than 2 GiB

std::string link_target(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::read_symlink(path, error).native();
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

int FileDescriptor::release() noexcept { return std::exchange(fd_, -1); }

Status host_error(int error, std::string_view context) {
  const std::string message = fmt::format("{}: {}", context, std::generic_category().message(error));
  ErrorInfo info{.reason = Reason::kHost, .fault = Fault::kHost};
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      info.fault = Fault::kUser;
      return Status(StatusCode::kNotFound, message, std::move(info));
    case EACCES:
    case EPERM:
    case EROFS: return Status(StatusCode::kPermissionDenied, message, std::move(info));
    case ENOMEM:
      info.reason = Reason::kNoMemory;
      return Status(StatusCode::kResourceExhausted, message, std::move(info));
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE: return Status(StatusCode::kResourceExhausted, message, std::move(info));
    default: return Status(StatusCode::kInternal, message, std::move(info));
  }
}

std::string unreadable_reason(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    const int error = errno;
    if (::lstat(path.c_str(), &status) == 0 && S_ISLNK(status.st_mode)) {
      return fmt::format("a dangling symbolic link to {}", link_target(path));
    }
    return error == ENOENT ? "missing" : std::generic_category().message(error);
  }
  if (S_ISDIR(status.st_mode)) return "a directory";
  if (!S_ISREG(status.st_mode)) return "not a regular file";
  if (status.st_size == 0) return "empty (0 bytes)";
  return {};
}

Result<FileDescriptor> open_regular_file(const std::filesystem::path& path, std::uint64_t& file_bytes) {
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    const int error = errno;
    struct stat status {};
    if (error == ENOENT && ::lstat(path.c_str(), &status) == 0) {
      return Status(StatusCode::kNotFound, fmt::format("{}: a dangling symbolic link to {}", path.native(), link_target(path)),
                    {.reason = Reason::kHost});
    }
    return host_error(error, path.native());
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return host_error(errno, path.native());
  if (!S_ISREG(status.st_mode)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: {}, not a regular file", path.native(),
                              S_ISDIR(status.st_mode) ? "a directory" : "a device, pipe or socket"),
                  {.reason = Reason::kBadArgument});
  }
  file_bytes = static_cast<std::uint64_t>(status.st_size);
  return file;
}

Status read_fully(const FileDescriptor& file, const std::filesystem::path& path, std::uint64_t offset,
                  std::span<std::byte> out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const std::size_t part = std::min(out.size() - done, kMaxTransferBytes);
    const ssize_t got = ::pread(file.get(), out.data() + done, part, static_cast<off_t>(offset + done));
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else if (got == 0) {
      return Status(StatusCode::kDataLoss,
                    fmt::format("{}: truncated while it was being read: expected {} bytes, the file ends at {}", path.native(),
                                offset + out.size(), offset + done),
                    {.reason = Reason::kCheckpointMalformed});
    } else if (errno != EINTR) {
      return host_error(errno, fmt::format("{}: reading {} bytes at {}", path.native(), part, offset + done));
    }
  }
  return {};
}

Result<std::string> read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes) {
  std::uint64_t file_bytes = 0;
  SHARDPULL_ASSIGN_OR_RETURN(const FileDescriptor file, open_regular_file(path, file_bytes));
  if (file_bytes > max_bytes) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("{}: {} bytes, the limit is {}", path.native(), file_bytes, max_bytes),
                  {.reason = Reason::kLimit});
  }
  std::string text(file_bytes, '\0');
  SHARDPULL_RETURN_IF_ERROR(read_fully(file, path, 0, std::as_writable_bytes(std::span(text.data(), text.size()))));
  return text;
}

Result<TemporaryFile> TemporaryFile::create(const std::filesystem::path& path) {
  TemporaryFile out;
  out.path_ = path;
  // Names that another process, or a dead one with our number, has taken are passed over.
  static std::atomic<std::uint64_t> counter{0};
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const std::string name = (path.parent_path() / fmt::format(".{}.{}-{}.tmp", path.filename().native(), ::getpid(),
                                                               counter.fetch_add(1, std::memory_order_relaxed)))
                                 .native();
    out.file_ = FileDescriptor(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (out.file_.get() >= 0) {
      out.temporary_ = name;
      return out;
    }
    if (errno != EEXIST) break;
  }
  return host_error(errno, fmt::format("{}: cannot create", path.native()));
}

TemporaryFile::TemporaryFile(TemporaryFile&& other) noexcept
    : file_(std::move(other.file_)), path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, {})) {}

TemporaryFile& TemporaryFile::operator=(TemporaryFile&& other) noexcept {
  if (this != &other) {
    discard();
    file_ = std::move(other.file_);
    path_ = std::move(other.path_);
    temporary_ = std::exchange(other.temporary_, {});
  }
  return *this;
}

TemporaryFile::~TemporaryFile() { discard(); }

void TemporaryFile::discard() noexcept {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

Status TemporaryFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(file_.get(), bytes.data(), std::min(bytes.size(), kMaxTransferBytes));
    if (put >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    } else if (errno != EINTR) {
      return host_error(errno, fmt::format("{}: cannot write", path_.native()));
    }
  }
  return {};
}

Status TemporaryFile::commit() {
  if (temporary_.empty()) {
    return Status(StatusCode::kFailedPrecondition, fmt::format("{}: already finished", path_.native()),
                  {.reason = Reason::kWrongState});
  }
  // Some file systems report a failed write only here.
  if (::close(file_.release()) != 0) return host_error(errno, fmt::format("{}: cannot write", path_.native()));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return host_error(errno, fmt::format("{}: cannot rename {}", path_.native(), temporary_));
  }
  temporary_.clear();
  return {};
}

Status write_text_file(const std::filesystem::path& path, std::string_view text) {
  SHARDPULL_ASSIGN_OR_RETURN(TemporaryFile file, TemporaryFile::create(path));
  SHARDPULL_RETURN_IF_ERROR(file.write(std::as_bytes(std::span(text.data(), text.size()))));
  return file.commit();
}

}  // namespace shardpull
