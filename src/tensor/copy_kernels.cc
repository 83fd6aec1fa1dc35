#include "tensor/copy_kernels.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shardpull {
namespace {

// Runs at least this long are worth the set-up of streaming stores.
constexpr std::int64_t kStreamingRunBytes = 512;

// Copies one run of more than 64 bytes. Loads may be unaligned.
using RunCopy = void (*)(std::byte*, const std::byte*, std::size_t);

struct RunCopies {
  RunCopy cached;
  RunCopy streaming;
};

void copy_run_portable(std::byte* dst, const std::byte* src, std::size_t bytes) {
  std::memcpy(dst, src, bytes);
}

#if defined(__x86_64__)
// From here on memcpy is as good as a plain loop, and better where the processor moves strings well.
constexpr std::size_t kPlainLoopBytes = 64u << 10;

// The number of bytes up to the next multiple of 64.
std::size_t to_line(const std::byte* address) {
  return (64 - (reinterpret_cast<std::uintptr_t>(address) & 63)) & 63;
}

__attribute__((target("avx2"))) void copy_line_avx2(std::byte* dst, const std::byte* src) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 32), b);
}

// The last line overlaps what was written before it, instead of a loop over the rest.
__attribute__((target("avx2"))) void copy_cached_avx2(std::byte* dst, const std::byte* src,
                                                      std::size_t bytes) {
  if (bytes >= kPlainLoopBytes) return copy_run_portable(dst, src, bytes);
  const std::size_t last = bytes - 64;
  for (std::size_t i = 0; i < last; i += 64) copy_line_avx2(dst + i, src + i);
  copy_line_avx2(dst + last, src + last);
}

// Whole destination lines by streaming stores; the ends by plain ones.
__attribute__((target("avx2"))) void copy_streaming_avx2(std::byte* dst, const std::byte* src,
                                                         std::size_t bytes) {
  std::size_t i = to_line(dst);
  if (i > 0) copy_line_avx2(dst, src);
  for (; i + 64 <= bytes; i += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), b);
  }
  std::memcpy(dst + i, src + i, bytes - i);
}

__attribute__((target("avx512f"))) void copy_cached_avx512(std::byte* dst, const std::byte* src,
                                                           std::size_t bytes) {
  if (bytes >= kPlainLoopBytes) return copy_run_portable(dst, src, bytes);
  const std::size_t last = bytes - 64;
  for (std::size_t i = 0; i < last; i += 64) _mm512_storeu_si512(dst + i, _mm512_loadu_si512(src + i));
  _mm512_storeu_si512(dst + last, _mm512_loadu_si512(src + last));
}

__attribute__((target("avx512f"))) void copy_streaming_avx512(std::byte* dst, const std::byte* src,
                                                              std::size_t bytes) {
  std::size_t i = to_line(dst);
  if (i > 0) _mm512_storeu_si512(dst, _mm512_loadu_si512(src));
  for (; i + 64 <= bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
  std::memcpy(dst + i, src + i, bytes - i);
}
#endif

// Chosen once, by what the processor has.
const RunCopies& run_copies() {
  static const RunCopies kCopies = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return RunCopies{copy_cached_avx512, copy_streaming_avx512};
    if (__builtin_cpu_supports("avx2")) return RunCopies{copy_cached_avx2, copy_streaming_avx2};
#endif
    return RunCopies{copy_run_portable, copy_run_portable};
  }();
  return kCopies;
}

// Copies `rows` runs of exactly kBytes: the compiler turns each into one or two moves.
template <std::size_t kBytes>
void copy_short_rows(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride,
                     std::int64_t rows) {
  for (std::int64_t i = 0; i < rows; ++i) std::memcpy(dst + i * dst_stride, src + i * src_stride, kBytes);
}

// Runs of 17 to 64 bytes, any number: two overlapping halves of a fixed size.
template <std::size_t kHalf>
void copy_medium_rows(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride,
                      std::int64_t rows, std::size_t bytes) {
  const std::size_t second = bytes - kHalf;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::byte* const from = src + i * src_stride;
    std::byte* const to = dst + i * dst_stride;
    std::byte low[kHalf], high[kHalf];
    std::memcpy(low, from, kHalf);
    std::memcpy(high, from + second, kHalf);
    std::memcpy(to, low, kHalf);
    std::memcpy(to + second, high, kHalf);
  }
}

void copy_rows(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride,
               std::int64_t rows, std::int64_t run, bool streaming) {
  const auto bytes = static_cast<std::size_t>(run);
  switch (bytes) {
    case 1:
      return copy_short_rows<1>(src, src_stride, dst, dst_stride, rows);
    case 2:
      return copy_short_rows<2>(src, src_stride, dst, dst_stride, rows);
    case 4:
      return copy_short_rows<4>(src, src_stride, dst, dst_stride, rows);
    case 8:
      return copy_short_rows<8>(src, src_stride, dst, dst_stride, rows);
    case 16:
      return copy_short_rows<16>(src, src_stride, dst, dst_stride, rows);
    case 32:
      return copy_short_rows<32>(src, src_stride, dst, dst_stride, rows);
    case 64:
      return copy_short_rows<64>(src, src_stride, dst, dst_stride, rows);
    case 128:
      return copy_short_rows<128>(src, src_stride, dst, dst_stride, rows);
    default:
      break;
  }
  if (bytes > 64) {
    const RunCopies& copies = run_copies();
    const RunCopy copy = streaming && run >= kStreamingRunBytes ? copies.streaming : copies.cached;
    for (std::int64_t i = 0; i < rows; ++i) copy(dst + i * dst_stride, src + i * src_stride, bytes);
  } else if (bytes > 32) {
    copy_medium_rows<32>(src, src_stride, dst, dst_stride, rows, bytes);
  } else if (bytes > 16) {
    copy_medium_rows<16>(src, src_stride, dst, dst_stride, rows, bytes);
  } else if (bytes > 8) {
    copy_medium_rows<8>(src, src_stride, dst, dst_stride, rows, bytes);
  } else if (bytes > 4) {
    copy_medium_rows<4>(src, src_stride, dst, dst_stride, rows, bytes);
  } else {
    copy_medium_rows<2>(src, src_stride, dst, dst_stride, rows, bytes);  // 3 bytes
  }
}

// Whether the two innermost loops of a nest walk the source across its grain: the inner one steps over the
// source's cache lines, and only the loop around it would use them whole.
bool transposes(const CopyLoop& outer, const CopyLoop& inner, std::int64_t run) {
  return run <= 8 && (run & (run - 1)) == 0 && outer.src_stride < inner.src_stride &&
         outer.dst_stride > inner.dst_stride && outer.src_stride < 64;
}

// Copies a two-dimensional nest of kBytes elements through a tile that holds one cache line a row: every line
// of the source is read whole and every line of the destination written whole, however the strides alias in
// the caches.
template <std::size_t kBytes>
void copy_transposed(const CopyLoop& outer, const CopyLoop& inner, const std::byte* src, std::byte* dst) {
  constexpr std::int64_t kTile = 64 / static_cast<std::int64_t>(kBytes);
  constexpr std::size_t kRow = 64 + kBytes;  // rows start in different places of the cache's sets
  constexpr auto kElement = static_cast<std::int64_t>(kBytes);
  std::byte tile[static_cast<std::size_t>(kTile) * kRow];
  for (std::int64_t o = 0; o < outer.size; o += kTile) {
    const std::int64_t outers = std::min(kTile, outer.size - o);
    for (std::int64_t i = 0; i < inner.size; i += kTile) {
      const std::int64_t inners = std::min(kTile, inner.size - i);
      const std::byte* const from = src + o * outer.src_stride + i * inner.src_stride;
      std::byte* const to = dst + o * outer.dst_stride + i * inner.dst_stride;
      for (std::int64_t b = 0; b < inners; ++b) {
        std::byte* const row = tile + static_cast<std::size_t>(b) * kRow;
        const std::byte* const line = from + b * inner.src_stride;
        if (outer.src_stride == kElement) {
          std::memcpy(row, line, static_cast<std::size_t>(outers) * kBytes);
        } else {
          for (std::int64_t a = 0; a < outers; ++a)
            std::memcpy(row + a * kElement, line + a * outer.src_stride, kBytes);
        }
      }
      for (std::int64_t a = 0; a < outers; ++a) {
        const std::byte* const column = tile + a * kElement;
        std::byte* const line = to + a * outer.dst_stride;
        if (inner.dst_stride == kElement) {
          for (std::int64_t b = 0; b < inners; ++b)
            std::memcpy(line + b * kElement, column + static_cast<std::size_t>(b) * kRow, kBytes);
        } else {
          for (std::int64_t b = 0; b < inners; ++b)
            std::memcpy(line + b * inner.dst_stride, column + static_cast<std::size_t>(b) * kRow, kBytes);
        }
      }
    }
  }
}

void copy_transposed(const CopyLoop& outer, const CopyLoop& inner, const std::byte* src, std::byte* dst,
                     std::int64_t run) {
  switch (run) {
    case 1:
      return copy_transposed<1>(outer, inner, src, dst);
    case 2:
      return copy_transposed<2>(outer, inner, src, dst);
    case 4:
      return copy_transposed<4>(outer, inner, src, dst);
    default:
      return copy_transposed<8>(outer, inner, src, dst);
  }
}

// Calls visit(src, dst) for every iteration of loops[first..last), outermost first.
template <typename Visit>
void for_each(const CopyLoop* first, const CopyLoop* last, const std::byte* src, std::byte* dst,
              const Visit& visit) {
  if (first == last) {
    visit(src, dst);
    return;
  }
  for (std::int64_t i = 0; i < first->size; ++i) {
    for_each(first + 1, last, src + i * first->src_stride, dst + i * first->dst_stride, visit);
  }
}

}  // namespace

void copy_nest(const CopyNest& nest, const std::byte* src, std::byte* dst, bool streaming) {
  const CopyLoop* const first = nest.loops.data();
  const CopyLoop* const last = first + nest.loops.size();
  if (first == last) {
    copy_rows(src, 0, dst, 0, 1, nest.run_elements, streaming);
    return;
  }
  const CopyLoop inner = last[-1];
  if (last - first >= 2 && transposes(last[-2], inner, nest.run_elements)) {
    const CopyLoop outer = last[-2];
    for_each(first, last - 2, src, dst, [&](const std::byte* from, std::byte* to) {
      copy_transposed(outer, inner, from, to, nest.run_elements);
    });
    return;
  }
  for_each(first, last - 1, src, dst, [&](const std::byte* from, std::byte* to) {
    copy_rows(from, inner.src_stride, to, inner.dst_stride, inner.size, nest.run_elements, streaming);
  });
}

void convert_nest(const CopyNest& nest, ConvertKernel kernel, std::int64_t src_unit, std::int64_t dst_unit,
                  const std::byte* src, std::byte* dst) {
  const CopyLoop* const first = nest.loops.data();
  const CopyLoop* const last = first + nest.loops.size();
  if (nest.run_elements > 1 || first == last) {
    for_each(first, last, src, dst, [&](const std::byte* from, std::byte* to) {
      kernel(from, src_unit, to, dst_unit, nest.run_elements);
    });
    return;
  }
  const CopyLoop inner = last[-1];
  for_each(first, last - 1, src, dst, [&](const std::byte* from, std::byte* to) {
    kernel(from, inner.src_stride, to, inner.dst_stride, inner.size);
  });
}

void stream_copy(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (bytes <= 64) {
    std::memcpy(dst, src, bytes);
  } else {
    run_copies().streaming(dst, src, bytes);
  }
}

void end_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace shardpull
