#include "tensor/copy_sum.h"

#include <algorithm>

#include "tensor/checksum.h"
#include "tensor/copy_kernels.h"

namespace shardpull {
namespace {

// The runs of `loops` [d, end) of a nest.
void add_runs(const CopyNest& nest, std::size_t d, const std::byte* from, Hasher& hasher) {
  if (d == nest.loops.size()) return hasher.update({from, static_cast<std::size_t>(nest.run_elements)});
  for (std::int64_t i = 0; i < nest.loops[d].size; ++i)
    add_runs(nest, d + 1, from + i * nest.loops[d].src_stride, hasher);
}

// What is summed and then copied while a core's cache holds it.
constexpr std::int64_t kStepBytes = 128 << 10;
// A step of the sum costs about what it takes to sum so many bytes: shorter runs are summed where they are
// packed.
constexpr std::int64_t kShortRun = 256;

// Sums and copies loops [d, end) of a nest in steps.
struct SummedNest {
  const CopyNest& nest;
  Hasher& hasher;
  bool streaming;
  CopyNest step = {};

  void copy(std::size_t d, const std::byte* from, std::byte* to) {
    if (d == nest.loops.size()) {
      for (std::int64_t done = 0; done < nest.run_elements; done += kStepBytes) {
        step.loops.clear();
        step.run_elements = std::min(kStepBytes, nest.run_elements - done);
        take(from + done, to + done);
      }
      return;
    }
    std::int64_t inner = nest.run_elements;
    for (std::size_t i = d + 1; i < nest.loops.size(); ++i) inner *= nest.loops[i].size;
    const CopyLoop& loop = nest.loops[d];
    const std::int64_t per_step = kStepBytes / inner;  // iterations
    for (std::int64_t i = 0; i < loop.size; i += std::max<std::int64_t>(per_step, 1)) {
      const std::byte* const here = from + i * loop.src_stride;
      std::byte* const there = to + i * loop.dst_stride;
      if (per_step == 0) {
        copy(d + 1, here, there);
        continue;
      }
      step.loops.assign(nest.loops.begin() + static_cast<std::ptrdiff_t>(d), nest.loops.end());
      step.loops.front().size = std::min(per_step, loop.size - i);
      step.run_elements = nest.run_elements;
      take(here, there);
    }
  }
  void take(const std::byte* from, std::byte* to) {
    add_runs(step, 0, from, hasher);
    copy_nest(step, from, to, streaming);
  }
};

}  // namespace

bool sums_in_place(const CopyProgram& program) {
  return program.from == program.to && reads_in_order(program) &&
         std::all_of(program.nests.begin(), program.nests.end(), [](const CopyNest& nest) {
           return nest.loops.empty() || nest.run_elements >= kShortRun;
         });
}

std::uint64_t run_and_sum(const CopyProgram& program, const std::byte* src, std::byte* dst) {
  if (!sums_in_place(program)) {
    run(program, src, dst);
    return checksum64({dst, static_cast<std::size_t>(program.bytes)});
  }
  const bool streaming = program.bytes >= kStreamingProgramBytes;
  Hasher hasher;
  for (const CopyNest& nest : program.nests) {
    SummedNest summed{nest, hasher, streaming};
    summed.copy(0, src + nest.src_offset, dst + nest.dst_offset);
  }
  if (streaming) end_streaming();
  return hasher.checksum();
}

std::uint64_t sum_of_reads(const CopyProgram& program, const std::byte* src) {
  if (program.nests.size() == 1 && program.nests.front().loops.empty()) {
    const CopyNest& nest = program.nests.front();
    return checksum64({src + nest.src_offset, static_cast<std::size_t>(nest.run_elements)});
  }
  Hasher hasher;
  for (const CopyNest& nest : program.nests) add_runs(nest, 0, src + nest.src_offset, hasher);
  return hasher.checksum();
}

bool reads_in_order(const CopyProgram& program) {
  std::int64_t packed = 0;  // bytes so far
  for (const CopyNest& nest : program.nests) {
    if (nest.dst_offset != packed) return false;
    std::int64_t block = nest.run_elements;
    for (std::size_t d = nest.loops.size(); d-- > 0;) {
      if (nest.loops[d].dst_stride != block) return false;
      block *= nest.loops[d].size;
    }
    packed += block;
  }
  return true;
}

}  // namespace shardpull
