// The copy path against memcpy on the same bytes: every benchmark moves kBytes between prefaulted buffers
// that no cache holds. Compare bytes_per_second with BM_memcpy of the same run.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#include "tensor/copy.h"

namespace shardpull {
namespace {

constexpr std::int64_t kBytes = 128 << 20;

struct Buffers {
  std::vector<std::byte> src = std::vector<std::byte>(2 * kBytes, std::byte{1});
  std::vector<std::byte> dst = std::vector<std::byte>(2 * kBytes, std::byte{2});
};

Buffers& buffers() {
  static Buffers instance;
  return instance;
}

void run_program(benchmark::State& state, const Slice& slice, DType from, std::int64_t source_numel,
                 const Region& region, DType to) {
  auto program = compile_copy(slice, SourceLayout::contiguous(from, source_numel), from, region, to);
  if (!program.ok()) {
    state.SkipWithError(program.status().message().c_str());
    return;
  }
  Buffers& memory = buffers();
  for (auto _ : state) {
    run(*program, memory.src.data(), memory.dst.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kBytes);
}

void BM_memcpy(benchmark::State& state) {
  Buffers& memory = buffers();
  for (auto _ : state) {
    std::memcpy(memory.dst.data(), memory.src.data(), kBytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kBytes);
}
BENCHMARK(BM_memcpy);

void BM_contiguous(benchmark::State& state) {
  run_program(state, Slice::whole(kBytes / 2), DType::kBF16, kBytes / 2, contiguous_region(kBytes / 2),
              DType::kBF16);
}
BENCHMARK(BM_contiguous);

// Half of each row of a matrix, as a tensor-parallel worker takes it: rows of state.range(0) bytes are kept.
void BM_gather_rows(benchmark::State& state) {
  const std::int64_t row = state.range(0) / 2, rows = kBytes / state.range(0);
  const Slice slice{{Region{0, {{rows, 2 * row}, {row, 1}}}}};
  run_program(state, slice, DType::kBF16, 2 * rows * row, contiguous_region(rows * row), DType::kBF16);
}
BENCHMARK(BM_gather_rows)->Arg(384)->Arg(2048)->Arg(32768);

void BM_scatter_rows(benchmark::State& state) {
  const std::int64_t row = state.range(0) / 2, rows = kBytes / state.range(0);
  run_program(state, Slice::whole(rows * row), DType::kBF16, rows * row,
              Region{0, {{rows, 2 * row}, {row, 1}}}, DType::kBF16);
}
BENCHMARK(BM_scatter_rows)->Arg(384)->Arg(2048)->Arg(32768);

// bytes_per_second counts source bytes.
void BM_convert_f32_to_bf16(benchmark::State& state) {
  run_program(state, Slice::whole(kBytes / 4), DType::kF32, kBytes / 4, contiguous_region(kBytes / 4),
              DType::kBF16);
}
BENCHMARK(BM_convert_f32_to_bf16);

}  // namespace
}  // namespace shardpull
