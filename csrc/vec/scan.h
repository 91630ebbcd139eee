// Vector functions for scans of the vocabulary: comparisons as bit masks, unsigned words, and 64-bit lanes (kHalf).
#pragma once

#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

constexpr int kHalf = kLanes / 2;
typedef uint64_t U64v __attribute__((vector_size(4 * kLanes)));
typedef int64_t I64v __attribute__((vector_size(4 * kLanes)));
typedef double F64v __attribute__((vector_size(4 * kLanes)));

//   at_least above equal below    one bit per lane of the comparison
//   min_u32 unsigned_f32          minimum of words; words to floats, rounded once
//   widen_low widen_high          floats to doubles
//   fma_f64                       a * b + c, rounded once if the CPU has fma
//   mul_low(x, y)                 64-bit products of the low words
//   even_low(x, y)                the low words: lane 2i from x, lane 2i + 1 from y
//   interleave<high, width>(x, y) alternating words (width 1) or pairs (2) of x and y, from one half of each 128 bits
//   compress_f32 compress_i32     stores the selected lanes contiguously (p needs space for kLanes)

#if HEADRACE_LANES == 16

HEADRACE_INLINE uint32_t at_least(F32v x, F32v y) { return _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ); }
HEADRACE_INLINE uint32_t above(F32v x, F32v y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ); }
HEADRACE_INLINE uint32_t equal(F32v x, F32v y) { return _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ); }
HEADRACE_INLINE uint32_t below(U32v x, U32v y) { return _mm512_cmplt_epu32_mask((__m512i)x, (__m512i)y); }
HEADRACE_INLINE U32v min_u32(U32v x, U32v y) { return (U32v)_mm512_min_epu32((__m512i)x, (__m512i)y); }
HEADRACE_INLINE F32v unsigned_f32(U32v x) { return _mm512_cvtepu32_ps((__m512i)x); }
HEADRACE_INLINE F64v widen_low(F32v x) { return (F64v)_mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
HEADRACE_INLINE F64v widen_high(F32v x) { return (F64v)_mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
HEADRACE_INLINE F64v max_f64(F64v x, F64v y) { return (F64v)_mm512_max_pd((__m512d)x, (__m512d)y); }
HEADRACE_INLINE F64v fma_f64(F64v a, F64v b, F64v c) {
    return (F64v)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
HEADRACE_INLINE U64v mul_low(U64v x, U64v y) { return (U64v)_mm512_mul_epu32((__m512i)x, (__m512i)y); }
HEADRACE_INLINE U32v even_low(U64v x, U64v y) {
    return (U32v)_mm512_mask_blend_epi32(0xaaaa, (__m512i)x, _mm512_slli_epi64((__m512i)y, 32));
}
template <bool high, int width>
HEADRACE_INLINE U32v interleave(U32v x, U32v y) {
    const __m512i a = (__m512i)x, b = (__m512i)y;
    if constexpr (width == 1) return (U32v)(high ? _mm512_unpackhi_epi32(a, b) : _mm512_unpacklo_epi32(a, b));
    return (U32v)(high ? _mm512_unpackhi_epi64(a, b) : _mm512_unpacklo_epi64(a, b));
}
HEADRACE_INLINE void compress_f32(float* p, uint32_t lanes, F32v x) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)lanes, x));
}
HEADRACE_INLINE void compress_i32(int32_t* p, uint32_t lanes, I32v x) {
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32((__mmask16)lanes, (__m512i)x));
}

#else

// Both 16-bit halves are exact in float, so only their sum is rounded.
HEADRACE_INLINE F32v unsigned_f32(U32v x) {
    return to_f32((I32v)(x >> 16)) * set_f32(65536.0f) + to_f32((I32v)(x & 0xffff));
}
HEADRACE_INLINE U32v even_low(U64v x, U64v y) { return (U32v)((x & 0xffffffff) | y << 32); }
HEADRACE_INLINE void compress_f32(float* p, uint32_t lanes, F32v x) {
    for (; lanes; lanes &= lanes - 1) *p++ = x[__builtin_ctz(lanes)];
}
HEADRACE_INLINE void compress_i32(int32_t* p, uint32_t lanes, I32v x) {
    for (; lanes; lanes &= lanes - 1) *p++ = x[__builtin_ctz(lanes)];
}

#if HEADRACE_LANES == 8

HEADRACE_INLINE uint32_t at_least(F32v x, F32v y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GE_OQ)); }
HEADRACE_INLINE uint32_t above(F32v x, F32v y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ)); }
HEADRACE_INLINE uint32_t equal(F32v x, F32v y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_EQ_OQ)); }
HEADRACE_INLINE uint32_t below(U32v x, U32v y) { return _mm256_movemask_ps((__m256)(x < y)); }
HEADRACE_INLINE U32v min_u32(U32v x, U32v y) { return (U32v)_mm256_min_epu32((__m256i)x, (__m256i)y); }
HEADRACE_INLINE F64v widen_low(F32v x) { return (F64v)_mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
HEADRACE_INLINE F64v widen_high(F32v x) { return (F64v)_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
HEADRACE_INLINE F64v max_f64(F64v x, F64v y) { return (F64v)_mm256_max_pd((__m256d)x, (__m256d)y); }
HEADRACE_INLINE F64v fma_f64(F64v a, F64v b, F64v c) {
    return (F64v)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
HEADRACE_INLINE U64v mul_low(U64v x, U64v y) { return (U64v)_mm256_mul_epu32((__m256i)x, (__m256i)y); }
template <bool high, int width>
HEADRACE_INLINE U32v interleave(U32v x, U32v y) {
    const __m256i a = (__m256i)x, b = (__m256i)y;
    if constexpr (width == 1) return (U32v)(high ? _mm256_unpackhi_epi32(a, b) : _mm256_unpacklo_epi32(a, b));
    return (U32v)(high ? _mm256_unpackhi_epi64(a, b) : _mm256_unpacklo_epi64(a, b));
}

#else

HEADRACE_INLINE uint32_t sign_bits(I32v x) { return (x[0] & 1) | (x[1] & 2) | (x[2] & 4) | (x[3] & 8); }
HEADRACE_INLINE uint32_t at_least(F32v x, F32v y) { return sign_bits(x >= y); }
HEADRACE_INLINE uint32_t above(F32v x, F32v y) { return sign_bits(x > y); }
HEADRACE_INLINE uint32_t equal(F32v x, F32v y) { return sign_bits(x == y); }
HEADRACE_INLINE uint32_t below(U32v x, U32v y) { return sign_bits((I32v)(x < y)); }
HEADRACE_INLINE U32v min_u32(U32v x, U32v y) { return x < y ? x : y; }
HEADRACE_INLINE F64v widen_low(F32v x) { return F64v{x[0], x[1]}; }
HEADRACE_INLINE F64v widen_high(F32v x) { return F64v{x[2], x[3]}; }
HEADRACE_INLINE F64v max_f64(F64v x, F64v y) { return x > y ? x : y; }
HEADRACE_INLINE F64v fma_f64(F64v a, F64v b, F64v c) { return a * b + c; }
HEADRACE_INLINE U64v mul_low(U64v x, U64v y) { return (x & 0xffffffff) * (y & 0xffffffff); }
template <bool high, int width>
HEADRACE_INLINE U32v interleave(U32v x, U32v y) {
    constexpr int h = high ? 2 : 0;
    if constexpr (width == 1) return U32v{x[h], y[h], x[h + 1], y[h + 1]};
    return U32v{x[h], x[h + 1], y[h], y[h + 1]};
}

#endif
#endif

HEADRACE_INLINE U32v set_u32(uint32_t x) { return U32v{} + x; }
HEADRACE_INLINE U64v set_u64(uint64_t x) { return U64v{} + x; }
HEADRACE_INLINE F64v set_f64(double x) { return F64v{} + x; }

HEADRACE_INLINE float max_lane(F32v x) {
    float lane[kLanes], best;
    store_f32(lane, x);
    best = lane[0];
    for (int i = 1; i < kLanes; ++i) best = lane[i] > best ? lane[i] : best;
    return best;
}

}  // namespace headrace::HEADRACE_ISA
