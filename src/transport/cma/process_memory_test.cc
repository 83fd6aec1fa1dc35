#include "transport/cma/process_memory.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "base/random.h"
#include "transport/transport_testing.h"

namespace shardpull {
namespace {

using transport_testing::coded_byte;

// Ours, and a process that is not ours to read: it has our memory as it was, and another number.
constexpr std::uint64_t kProof = 0x5EED5EED5EED5EED;
std::atomic<std::uint64_t> proof_word{kProof};

std::uint64_t address_of(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}
Proof own_proof() {
  return {.address = address_of(&proof_word), .value = kProof};
}
PeerProcess self() {
  return {.pid = getpid(), .name = "trainer-0.sock (pid 7)"};
}
ProcessMemory region(const std::vector<std::byte>& bytes) {
  return ProcessMemory(self(), address_of(bytes.data()), bytes.size(), own_proof());
}
std::vector<std::byte> coded(std::size_t bytes) {
  std::vector<std::byte> out(bytes);
  for (std::size_t i = 0; i < bytes; ++i) out[i] = coded_byte(i);
  return out;
}

// What the next calls of fake_read do instead of the system; the last one stays.
struct Behaviour {
  ssize_t at_most = -1;  // bytes to deliver; -1: all
  int error = 0;
};
std::vector<Behaviour> behaviours;
std::vector<std::uint64_t> calls;  // the bytes asked for
ssize_t fake_read(pid_t pid, const iovec* local, unsigned long locals, const iovec* remote,
                  unsigned long remotes, unsigned long flags) {
  std::uint64_t wanted = 0;
  for (unsigned long i = 0; i < remotes; ++i) wanted += remote[i].iov_len;
  const Behaviour behaviour = behaviours[std::min(calls.size(), behaviours.size() - 1)];
  calls.push_back(wanted);
  if (behaviour.error != 0) {
    errno = behaviour.error;
    return -1;
  }
  std::vector<iovec> cut(local, local + locals);
  if (behaviour.at_most >= 0) {
    auto left = static_cast<std::size_t>(behaviour.at_most);
    for (iovec& part : cut) {
      part.iov_len = std::min(part.iov_len, left);
      left -= part.iov_len;
    }
    if (behaviour.at_most == 0) return 0;
  }
  return process_vm_readv(pid, cut.data(), locals, remote, remotes, flags);
}
Status read_with(std::vector<Behaviour> plan, std::span<const CopyPart> parts) {
  behaviours = std::move(plan);
  calls.clear();
  return read_process(parts, fake_read);
}

// Goal: many parts at odd offsets arrive each in its place, in as few calls as vectors allow, two of them for
// the proof.
TEST(ProcessMemory, ReadsManyPartsInFewCalls) {
  const auto source = coded(100'003);
  const ProcessMemory memory = region(source);
  Random random(3);
  for (const std::size_t count : {1u, 2u, 1024u, 1025u, 5000u}) {
    std::vector<std::byte> landed(count * 20, std::byte{0xCD}), want = landed;
    std::vector<CopyPart> parts;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t bytes = 1 + random.below(19), offset = random.below(source.size() - bytes + 1);
      parts.push_back({.memory = &memory, .offset = offset, .bytes = bytes, .to = landed.data() + i * 20});
      std::memcpy(want.data() + i * 20, source.data() + offset, bytes);
    }
    ASSERT_TRUE(read_with({{}}, parts).ok());
    EXPECT_TRUE(landed == want) << count;
    EXPECT_EQ(calls.size(), (count + 1023) / 1024 + 2);
  }
}

// Goal (case 112): a read that ends early is continued where it ended, wherever that is; one that delivers
// nothing is an error, never taken for done.
TEST(ProcessMemory, ContinuesShortReadsAndRefusesEmptyOnes) {
  const auto source = coded(10'000);
  const ProcessMemory memory = region(source);
  for (const ssize_t at_most : {1, 499, 500, 501, 4999, 5000, 5001}) {
    std::vector<std::byte> landed(10'000, std::byte{0xCD});
    std::vector<CopyPart> parts;
    for (std::uint64_t i = 0; i < 20; ++i) {
      parts.push_back({.memory = &memory, .offset = i * 500, .bytes = 500, .to = landed.data() + i * 500});
    }
    // The proof, a short read, another one, the rest, the proof.
    ASSERT_TRUE(read_with({{}, {.at_most = at_most}, {.at_most = at_most / 2 + 1}, {}}, parts).ok())
        << at_most;
    EXPECT_TRUE(landed == source) << at_most;

    const Status nothing = read_with({{}, {.at_most = at_most}, {.at_most = 0}, {}}, parts);
    EXPECT_EQ(nothing.code(), StatusCode::kDataLoss);
    EXPECT_NE(nothing.message().find("delivers nothing"), std::string::npos) << nothing.message();
  }
}

// Goal (case 111): each refusal of the system has its own status, and says what to do.
TEST(ProcessMemory, TellsRefusalsApart) {
  const auto source = coded(10);
  const ProcessMemory memory = region(source);
  std::byte landed[10];
  const CopyPart part{.memory = &memory, .offset = 0, .bytes = 10, .to = landed};
  const auto expect = [&](int error, StatusCode code, Reason reason, std::string_view text) {
    // At the first call, and after the proof has been read.
    for (const std::vector<Behaviour>& plan :
         {std::vector<Behaviour>{{.error = error}}, {{}, {.error = error}}}) {
      const Status status = read_with(plan, std::span(&part, 1));
      EXPECT_EQ(status.code(), code) << status.to_string();
      EXPECT_EQ(status.info().reason, reason);
      EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
    }
  };
  expect(EPERM, StatusCode::kPermissionDenied, Reason::kHost, "ptrace_scope");
  expect(EPERM, StatusCode::kPermissionDenied, Reason::kHost, "--cap-add=SYS_PTRACE");
  expect(EPERM, StatusCode::kPermissionDenied, Reason::kHost, "--transport shm");
  expect(ENOSYS, StatusCode::kUnimplemented, Reason::kHost, "no process_vm_readv");
  expect(ESRCH, StatusCode::kUnavailable, Reason::kPeerLost, "trainer-0.sock (pid 7) is gone");
  expect(ENOMEM, StatusCode::kInternal, Reason::kHost, "Cannot allocate memory");
}

// Goal: a process that has the number but is not the peer is never taken for it, though the address is mapped
// there as well.
TEST(ProcessMemory, NoticesAnotherProcessWithTheNumber) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t stranger = fork();
  ASSERT_GE(stranger, 0);
  if (stranger == 0) {
    proof_word = kProof + 1;  // its own word at the same address
    [[maybe_unused]] const ssize_t told = write(ready[1], "x", 1);
    for (;;) pause();
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  const PeerProcess process{.pid = stranger, .name = "trainer-0.sock"};
  const Status refused = check_proof(process, own_proof(), "not the one");
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("not the one"), std::string::npos);
  const Proof unmapped{.address = 4096, .value = 1};
  EXPECT_EQ(check_proof(process, unmapped, "not the one"), refused);
  EXPECT_TRUE(check_proof(process, {.address = own_proof().address, .value = kProof + 1}, "").ok());

  // Nothing of it is read.
  const auto source = coded(10);
  const ProcessMemory memory(process, address_of(source.data()), 10, own_proof());
  std::byte landed[10] = {};
  const CopyPart part{.memory = &memory, .offset = 0, .bytes = 10, .to = landed};
  EXPECT_EQ(read_process(std::span(&part, 1)).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(
      std::all_of(std::begin(landed), std::end(landed), [](std::byte b) { return b == std::byte{0}; }));

  // Dead but not yet waited for, and gone.
  ASSERT_EQ(kill(stranger, SIGKILL), 0);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(stranger), &info, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(check_proof(process, own_proof(), "").code(), StatusCode::kUnavailable);
  ASSERT_EQ(waitpid(stranger, nullptr, 0), stranger);
  EXPECT_EQ(check_proof(process, own_proof(), "").code(), StatusCode::kUnavailable);
  const Status invisible = check_proof({.pid = 0, .name = "trainer-0.sock"}, own_proof(), "");
  EXPECT_EQ(invisible.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(invisible.message().find("another pid namespace"), std::string::npos);
  close(ready[0]);
  close(ready[1]);
}

// Goal: bytes that were read while their region ended are not handed out, and memory that is not there is the
// owner's fault only while the region is alive.
TEST(ProcessMemory, BelievesBytesOnlyWhileTheProofStands) {
  const auto source = coded(1000);
  const ProcessMemory memory = region(source);
  std::vector<std::byte> landed(1000);
  const CopyPart part{.memory = &memory, .offset = 0, .bytes = 1000, .to = landed.data()};
  static bool freed_while_read = false;
  freed_while_read = false;
  const Status ended =
      read_process(std::span(&part, 1), [](pid_t pid, const iovec* local, unsigned long locals,
                                           const iovec* remote, unsigned long remotes, unsigned long flags) {
        const ssize_t got = process_vm_readv(pid, local, locals, remote, remotes, flags);
        if (remote->iov_len == 1000) {
          proof_word = 0;
          freed_while_read = true;
        }
        return got;
      });
  ASSERT_TRUE(freed_while_read);
  EXPECT_EQ(ended.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(ended.message().find("stale"), std::string::npos) << ended.message();
  proof_word = kProof;

  void* const gone = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gone, MAP_FAILED);
  std::memset(gone, 1, 8192);
  ASSERT_EQ(munmap(static_cast<std::byte*>(gone) + 4096, 4096), 0);
  const ProcessMemory half(self(), address_of(gone), 8192, own_proof());
  std::vector<std::byte> bytes(8192);
  const CopyPart whole{.memory = &half, .offset = 0, .bytes = 8192, .to = bytes.data()};
  const Status missing = read_process(std::span(&whole, 1));
  EXPECT_EQ(missing.code(), StatusCode::kDataLoss);
  EXPECT_NE(missing.message().find("4096 of 8192 bytes"), std::string::npos) << missing.message();
  proof_word = 0;
  EXPECT_EQ(read_process(std::span(&whole, 1)).code(), StatusCode::kFailedPrecondition);
  proof_word = kProof;
  munmap(gone, 4096);
}

}  // namespace
}  // namespace shardpull
