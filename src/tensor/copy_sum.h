// Sums of what a copy reads, with the copy and without.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/copy.h"

namespace shardpull {

// The sum of the bytes that a program without conversion reads, in the order it reads them: the same program
// over the same bytes has the same sum. Where reads_in_order, it is checksum64 of what the program writes.
std::uint64_t sum_of_reads(const CopyProgram& program, const std::byte* src);

// Whether a program that packs (its destination is contiguous, from 0) reads its bytes in the order in which it
// packs them.
bool reads_in_order(const CopyProgram& program);

// Whether a program that packs is best summed where it reads: it reads in order, and in long runs. Another
// one costs less to gather first.
bool sums_in_place(const CopyProgram& program);

// Runs a program that packs, without conversion; returns checksum64 of the bytes that it packed, summed as
// they are read. Like run() but for that.
std::uint64_t run_and_sum(const CopyProgram& program, const std::byte* src, std::byte* dst);

}  // namespace shardpull
