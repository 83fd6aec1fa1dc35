#include "tensor/convert_simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shardpull {
namespace {

#if defined(__x86_64__)

// Eight F32 as BF16 in the low halves of eight 32-bit lanes.
__attribute__((target("avx2"))) __m256i bf16_lanes(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
}

__attribute__((target("avx2"))) std::int64_t f32_to_bf16(const std::byte* src, std::byte* dst,
                                                         std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const auto* const from = reinterpret_cast<const float*>(src + i * 4);
    const __m256i low = bf16_lanes(_mm256_loadu_ps(from));
    const __m256i high = bf16_lanes(_mm256_loadu_ps(from + 8));
    // Packing works on halves of the registers; the permutation puts the quarters in order.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i * 2), packed);
  }
  return i;
}

__attribute__((target("avx2"))) std::int64_t bf16_to_f32(const std::byte* src, std::byte* dst,
                                                         std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i * 2));
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i * 4), bits);
  }
  return i;
}

__attribute__((target("avx2,f16c"))) std::int64_t f16_to_f32(const std::byte* src, std::byte* dst,
                                                             std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i * 2));
    _mm256_storeu_ps(reinterpret_cast<float*>(dst + i * 4), _mm256_cvtph_ps(half));
  }
  return i;
}

__attribute__((target("avx2,f16c"))) std::int64_t f32_to_f16(const std::byte* src, std::byte* dst,
                                                             std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    // The instruction keeps a NaN's upper bits; the portable kernel keeps its sign only.
    const __m256 values = _mm256_loadu_ps(reinterpret_cast<const float*>(src + i * 4));
    const __m256 nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    const __m256 sign = _mm256_and_ps(values, _mm256_set1_ps(-0.0f));
    const __m256 quiet = _mm256_or_ps(sign, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)));
    const __m128i half =
        _mm256_cvtps_ph(_mm256_blendv_ps(values, quiet, nan), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i * 2), half);
  }
  return i;
}

struct Features {
  bool avx2 = false;
  bool f16c = false;
};

const Features& features() {
  static const Features kFeatures = [] {
    __builtin_cpu_init();
    return Features{__builtin_cpu_supports("avx2") != 0,
                    __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0};
  }();
  return kFeatures;
}

#endif

}  // namespace

ConvertPrefix convert_prefix(DType from, DType to) {
#if defined(__x86_64__)
  const Features& has = features();
  if (from == DType::kF32 && to == DType::kBF16 && has.avx2) return f32_to_bf16;
  if (from == DType::kBF16 && to == DType::kF32 && has.avx2) return bf16_to_f32;
  if (from == DType::kF16 && to == DType::kF32 && has.f16c) return f16_to_f32;
  if (from == DType::kF32 && to == DType::kF16 && has.f16c) return f32_to_f16;
#else
  (void)from;
  (void)to;
#endif
  return nullptr;
}

}  // namespace shardpull
