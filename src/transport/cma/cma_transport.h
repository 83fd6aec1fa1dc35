// The cma transport: memory of one host is read by its peers with process_vm_readv, whoever allocated it. It
// maps nothing, so weights can be pulled directly into parameters or packed, never copied out of a mapping.
// local_transport.h tells what travels between the processes, process_memory.h how it is known that the right
// memory is read.
//
// Two threads read, as one does not reach what the memory can deliver.
#pragma once

#include <memory>

#include "transport/local_transport.h"

namespace shardpull {

using CmaOptions = LocalOptions;

// Makes the transport and starts its reading threads. Its addresses are a path and, after '#', a proof of
// this process in hexadecimal, "ADDRESS-VALUE": connect() reads it, so that a host which forbids reading
// processes, a peer in another pid namespace or a stranger with a number we knew is found before anything is
// planned. listen() lets every process of this user read this one where Yama's rules want that said (prctl
// PR_SET_PTRACER), until the process ends.
//
// adopt() reads a byte of every page once, to refuse memory that cannot be read.
//
// Fails when an option is missing, or when the directory is not this user's alone.
Result<std::unique_ptr<Transport>> make_cma_transport(CmaOptions options);

// Whether processes like this one may read each other's memory on this host: a child reads a word of this
// process. To be asked before anything is planned on it. OK, or PERMISSION_DENIED, UNIMPLEMENTED and others
// with what to do about it, as check_proof(). Forks (without fork handlers), and waits at most some seconds.
Status cma_available();

}  // namespace shardpull
