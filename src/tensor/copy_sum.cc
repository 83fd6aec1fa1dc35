#include "tensor/copy_sum.h"

#include "tensor/checksum.h"

namespace shardpull {
namespace {

// The runs of `loops` [d, end) of a nest.
void add_runs(const CopyNest& nest, std::size_t d, const std::byte* from, Hasher& hasher) {
  if (d == nest.loops.size()) return hasher.update({from, static_cast<std::size_t>(nest.run_elements)});
  for (std::int64_t i = 0; i < nest.loops[d].size; ++i)
    add_runs(nest, d + 1, from + i * nest.loops[d].src_stride, hasher);
}

}  // namespace

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
