#include "tensor/copy_kernels.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shardpull {
namespace {

// Runs at least this long are worth the set-up of streaming stores.
constexpr std::int64_t kStreamingRunBytes = 4096;

void copy_streaming_scalar(std::byte* dst, const std::byte* src, std::size_t bytes) { std::memcpy(dst, src, bytes); }

#if defined(__x86_64__)
// 64 destination-aligned bytes at a time; head and tail by memcpy. Loads may be unaligned.
__attribute__((target("avx2"))) void copy_streaming_avx2(std::byte* dst, const std::byte* src, std::size_t bytes) {
  const std::size_t head = (64 - (reinterpret_cast<std::uintptr_t>(dst) & 63)) & 63;
  if (bytes < head + 64) {
    std::memcpy(dst, src, bytes);
    return;
  }
  std::memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 64; dst += 64, src += 64, bytes -= 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), b);
  }
  std::memcpy(dst, src, bytes);
}

__attribute__((target("avx512f"))) void copy_streaming_avx512(std::byte* dst, const std::byte* src, std::size_t bytes) {
  const std::size_t head = (64 - (reinterpret_cast<std::uintptr_t>(dst) & 63)) & 63;
  if (bytes < head + 64) {
    std::memcpy(dst, src, bytes);
    return;
  }
  std::memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 64; dst += 64, src += 64, bytes -= 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
  }
  std::memcpy(dst, src, bytes);
}
#endif

using StreamCopy = void (*)(std::byte*, const std::byte*, std::size_t);

StreamCopy choose_stream_copy() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return copy_streaming_avx512;
  if (__builtin_cpu_supports("avx2")) return copy_streaming_avx2;
#endif
  return copy_streaming_scalar;
}

// Copies `rows` runs of exactly kBytes: the compiler turns each into one or two moves.
template <std::size_t kBytes>
void copy_short_rows(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride, std::int64_t rows) {
  for (std::int64_t i = 0; i < rows; ++i) std::memcpy(dst + i * dst_stride, src + i * src_stride, kBytes);
}

// Runs of 17 to 64 bytes, any number: two overlapping halves of a fixed size.
template <std::size_t kHalf>
void copy_medium_rows(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride, std::int64_t rows,
                      std::size_t bytes) {
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

void copy_rows(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride, std::int64_t rows,
               std::int64_t run, bool streaming) {
  const auto bytes = static_cast<std::size_t>(run);
  switch (bytes) {
    case 1: return copy_short_rows<1>(src, src_stride, dst, dst_stride, rows);
    case 2: return copy_short_rows<2>(src, src_stride, dst, dst_stride, rows);
    case 4: return copy_short_rows<4>(src, src_stride, dst, dst_stride, rows);
    case 8: return copy_short_rows<8>(src, src_stride, dst, dst_stride, rows);
    case 16: return copy_short_rows<16>(src, src_stride, dst, dst_stride, rows);
    case 32: return copy_short_rows<32>(src, src_stride, dst, dst_stride, rows);
    case 64: return copy_short_rows<64>(src, src_stride, dst, dst_stride, rows);
    case 128: return copy_short_rows<128>(src, src_stride, dst, dst_stride, rows);
    default: break;
  }
  if (bytes > 64) {
    if (streaming && run >= kStreamingRunBytes) {
      static const StreamCopy kCopy = choose_stream_copy();
      for (std::int64_t i = 0; i < rows; ++i) kCopy(dst + i * dst_stride, src + i * src_stride, bytes);
    } else {
      for (std::int64_t i = 0; i < rows; ++i) std::memcpy(dst + i * dst_stride, src + i * src_stride, bytes);
    }
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

// Calls visit(src, dst) for every iteration of loops[first..last), outermost first.
template <typename Visit>
void for_each(const CopyLoop* first, const CopyLoop* last, const std::byte* src, std::byte* dst, const Visit& visit) {
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
  for_each(first, last - 1, src, dst, [&](const std::byte* from, std::byte* to) {
    copy_rows(from, inner.src_stride, to, inner.dst_stride, inner.size, nest.run_elements, streaming);
  });
}

void convert_nest(const CopyNest& nest, ConvertKernel kernel, std::int64_t src_unit, std::int64_t dst_unit, const std::byte* src,
                  std::byte* dst) {
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
  static const StreamCopy kCopy = choose_stream_copy();
  kCopy(dst, src, bytes);
}

void end_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace shardpull
