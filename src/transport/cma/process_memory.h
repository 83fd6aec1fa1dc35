// Memory of another process, read by process_vm_readv: no mapping, no help from its owner, and one copy.
//
// A process number alone does not say whose memory is read: numbers are given out again, differ between pid
// namespaces, and stay when a process becomes another program. Therefore the owner of every region keeps a
// proof: a word of random bits at an address it tells with its grant, which it clears before the memory may
// end. A reader looks at the proof before it reads, so that nobody else's memory is read, and after it has
// read: if it still stands then, all bytes before came from that process, and from memory that was granted
// all along.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "shardpull/status.h"
#include "transport/peer_memory.h"

namespace shardpull {

// Where a process keeps a word, and what it reads while all is well; never 0.
struct Proof {
  std::uint64_t address = 0;
  std::uint64_t value = 0;
};

// A process of this host, as this process's pid namespace numbers it.
struct PeerProcess {
  pid_t pid = 0;     // 0: it has no number here
  std::string name;  // for messages
};

// A region of a peer. Immutable.
class ProcessMemory final : public PeerMemory {
 public:
  // [address, address + bytes) must not wrap.
  ProcessMemory(PeerProcess process, std::uint64_t address, std::uint64_t bytes, Proof proof)
      : process_(std::move(process)), address_(address), bytes_(bytes), proof_(proof) {}
  std::uint64_t bytes() const override { return bytes_; }
  const PeerProcess& process() const { return process_; }
  std::uint64_t address() const { return address_; }
  const Proof& proof() const { return proof_; }

 private:
  const PeerProcess process_;
  const std::uint64_t address_, bytes_;
  const Proof proof_;
};

// The system call, so that a test can put its own in its place.
using ReadProcess = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long,
                                unsigned long);

// What it means that the system refused, with this errno, to read `process`: the errors of check_proof.
Status read_refused(int error, const PeerProcess& process);

// OK when `process` is the one that keeps `proof`, and this process may read it. Else the error says which of
// these is not so and what to do:
//   PERMISSION_DENIED    kHost      ptrace rules, a seccomp filter or a container forbid it
//   UNIMPLEMENTED        kHost      the kernel has no process_vm_readv
//   FAILED_PRECONDITION  kHost      the process has no number here: it is in another pid namespace
//   UNAVAILABLE          kPeerLost  no process has that number any more
//   FAILED_PRECONDITION  kWrongState  the proof does not stand: `otherwise` says what that means
Status check_proof(const PeerProcess& process, const Proof& proof, std::string_view otherwise,
                   ReadProcess read = process_vm_readv);

// Copies parts of one peer's ProcessMemory, all of them, with as few calls as their number allows. Reads that
// end early are continued. The errors are those of check_proof, and DATA_LOSS, kCorrupt, when the peer
// granted memory that it does not have, or the system delivers nothing.
Status read_process(std::span<const CopyPart> parts, ReadProcess read = process_vm_readv);

// Lets the processes of this user read this process where Yama's rules want that said (ptrace_scope 1).
void allow_reads_of_this_process();

}  // namespace shardpull
