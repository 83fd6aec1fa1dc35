// Files as this room and the commands read and write them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "shardpull/status.h"

namespace shardpull {

// Owns a file descriptor; -1 is none. Movable.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();
  int get() const { return fd_; }
  int release() noexcept;

 private:
  int fd_ = -1;
};

// The status for an errno of the host: NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED (space, memory, descriptors) or
// INTERNAL, with reason kHost (kNoMemory for memory) and "CONTEXT: what the errno says".
Status host_error(int error, std::string_view context);

// Why `path` cannot be read as a file, before anybody tries: "missing", "a dangling symbolic link to X", "a directory",
// "not a regular file", "empty (0 bytes)"; "" when nothing speaks against it.
std::string unreadable_reason(const std::filesystem::path& path);

// Opens a regular file for reading. Never blocks on a FIFO. Errors name the path and say when it is a dangling link.
Result<FileDescriptor> open_regular_file(const std::filesystem::path& path, std::uint64_t& file_bytes);

// Fills `out` from `offset`. A file that ends before gives DATA_LOSS with reason kCheckpointMalformed ("truncated").
Status read_fully(const FileDescriptor& file, const std::filesystem::path& path, std::uint64_t offset,
                  std::span<std::byte> out);

// The text of a regular file of at most `max_bytes`; a larger one is refused with its size (kLimit).
Result<std::string> read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes);

// A file that gets its name only when it is complete. Movable; the destructor removes what was not committed.
class TemporaryFile {
 public:
  TemporaryFile() = default;
  static Result<TemporaryFile> create(const std::filesystem::path& path);
  TemporaryFile(TemporaryFile&& other) noexcept;
  TemporaryFile& operator=(TemporaryFile&& other) noexcept;
  ~TemporaryFile();

  const std::filesystem::path& path() const { return path_; }  // the name it will have
  Status write(std::span<const std::byte> bytes);
  // Renames over whatever is at path().
  Status commit();

 private:
  void discard() noexcept;
  FileDescriptor file_;
  std::filesystem::path path_;
  std::string temporary_;  // empty once committed
};

// Writes a whole text file by way of a TemporaryFile.
Status write_text_file(const std::filesystem::path& path, std::string_view text);

}  // namespace shardpull
