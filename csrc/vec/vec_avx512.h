// AVX-512 F, BW, DQ, VL and VNNI: 16 lanes. Compiled twice: without BF16 (avx512vnni) and with it (avx512).
#pragma once

#include <immintrin.h>

namespace headrace::HEADRACE_ISA {

constexpr int kLanes = 16;
constexpr Tuning kTuning = {
    .direct_rows = 8,
    .turn_rows = 8,
    .turn_parts = 1,
    .unpacks = false,
    .panel_rows = 6,
    .panel_tiles = 12,
    .panels_from = 40,
    .by_row_rows = 8,
    .bf16_rows = 6,
    .attention_rows = 6,
    .attention_pages = 4,
    .attention_vectors = 4,
    .probe_sums = 12,
};
typedef __m512 F32v;
typedef int32_t I32v __attribute__((vector_size(64)));
typedef uint32_t U32v __attribute__((vector_size(64)));
typedef uint8_t U8v __attribute__((vector_size(64)));

HEADRACE_INLINE __m512i raw(I32v x) { return (__m512i)x; }
HEADRACE_INLINE __m512i raw(U8v x) { return (__m512i)x; }
HEADRACE_INLINE __mmask16 lanes_below(int n) { return (__mmask16)((1u << n) - 1); }

HEADRACE_INLINE F32v load_f32(const float* p) { return _mm512_loadu_ps(p); }
HEADRACE_INLINE F32v load_f32(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
HEADRACE_INLINE void store_f32(float* p, F32v x) { _mm512_storeu_ps(p, x); }
HEADRACE_INLINE void store_f32(float* p, F32v x, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), x); }
HEADRACE_INLINE F32v set_f32(float x) { return _mm512_set1_ps(x); }
HEADRACE_INLINE F32v fma(F32v a, F32v b, F32v c) { return _mm512_fmadd_ps(a, b, c); }
HEADRACE_INLINE F32v max(F32v a, F32v b) { return _mm512_max_ps(a, b); }
HEADRACE_INLINE F32v min(F32v a, F32v b) { return _mm512_min_ps(a, b); }

HEADRACE_INLINE I32v load_i32(const int32_t* p) { return (I32v)_mm512_loadu_si512(p); }
HEADRACE_INLINE I32v set_i32(int32_t x) { return (I32v)_mm512_set1_epi32(x); }
HEADRACE_INLINE I32v shift_left(I32v x, int count) { return (I32v)_mm512_sll_epi32(raw(x), _mm_cvtsi32_si128(count)); }
HEADRACE_INLINE F32v to_f32(I32v x) { return _mm512_cvtepi32_ps(raw(x)); }
HEADRACE_INLINE I32v round_i32(F32v x) { return (I32v)_mm512_cvtps_epi32(x); }
HEADRACE_INLINE F32v as_f32(I32v x) { return _mm512_castsi512_ps(raw(x)); }
HEADRACE_INLINE I32v as_i32(F32v x) { return (I32v)_mm512_castps_si512(x); }
// Stores 32 values as bytes; sums[2]: the sum of each 16.
HEADRACE_INLINE void store_i8_sums(int8_t* p, const I32v* x, int32_t* sums) {
    const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(raw(x[1])), _mm512_cvtepi32_epi8(raw(x[0])));
    _mm256_storeu_si256((__m256i*)p, bytes);
    const __m256i four = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    const __m256i two = _mm256_add_epi32(four, _mm256_shuffle_epi32(four, 0x4e));
    const __m256i one = _mm256_add_epi32(two, _mm256_shuffle_epi32(two, 0xb1));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(one));
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(one, 1));
}
HEADRACE_INLINE void store_i8(int8_t* p, I32v x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(raw(x))); }

HEADRACE_INLINE I32v max(I32v a, I32v b) { return (I32v)_mm512_max_epi32(raw(a), raw(b)); }
HEADRACE_INLINE int32_t max_i32(I32v x) { return _mm512_reduce_max_epi32(raw(x)); }
HEADRACE_INLINE int32_t sum_i32(I32v x) { return _mm512_reduce_add_epi32(raw(x)); }

HEADRACE_INLINE F32v load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
HEADRACE_INLINE F32v load_i8_f32(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
HEADRACE_INLINE I32v load_u8_i32(const uint8_t* p) {
    return (I32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
HEADRACE_INLINE F32v load_u8_f32(const uint8_t* p) { return to_f32(load_u8_i32(p)); }
HEADRACE_INLINE F32v load_bf16(const uint16_t* p) {
    return as_f32((I32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
HEADRACE_INLINE void store_bf16(uint16_t* p, F32v x) {
    // Round to nearest even: add half of the last kept bit, minus one if that bit is 0. NaN stays NaN. vcvtneps2bf16 is
    // not used: it turns subnormals into zeros.
    const U32v bits = (U32v)as_i32(x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32((__m512i)rounded, nan, (__m512i)bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

HEADRACE_INLINE U8v load_u8(const void* p) { return (U8v)_mm512_loadu_si512(p); }
HEADRACE_INLINE void store_u8(void* p, U8v x) { _mm512_storeu_si512(p, raw(x)); }

template <int bits, int from, int to>
HEADRACE_INLINE U8v field(U8v x) {
    __m512i moved = raw(x);
    if constexpr (from > to) moved = _mm512_srli_epi16(moved, from - to);
    if constexpr (from < to) moved = _mm512_slli_epi16(moved, to - from);
    return (U8v)_mm512_and_si512(moved, _mm512_set1_epi8((char)(((1 << bits) - 1) << to)));
}

HEADRACE_INLINE U8v load_table(const uint8_t* p) {
    return (U8v)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
}
HEADRACE_INLINE U8v lookup(U8v table, U8v index) { return (U8v)_mm512_shuffle_epi8(raw(table), raw(index)); }
HEADRACE_INLINE I32v pick(const int32_t* eight, I32v index) {
    const __m512i twice = _mm512_broadcast_i32x8(_mm256_loadu_si256((const __m256i*)eight));
    return (I32v)_mm512_permutexvar_epi32(raw(index), twice);
}

constexpr int kWideZero = 0;
typedef I32v DotSum;
static constexpr int dot_room(int) { return 1 << 20; }
HEADRACE_INLINE U8v wide_bytes(U8v w) { return w; }
HEADRACE_INLINE DotSum dot_begin(I32v acc) { return acc; }
template <bool wide>
HEADRACE_INLINE DotSum dot_add(DotSum sum, U8v w, const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    return (I32v)_mm512_dpbusd_epi32(raw(sum), raw(w), _mm512_set1_epi32(quad));
}
HEADRACE_INLINE I32v dot_end(I32v, DotSum sum) { return sum; }

#if HEADRACE_IS(avx512)
HEADRACE_INLINE F32v dot_bf16(F32v acc, U8v w, const uint16_t* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(acc, (__m512bh)raw(w), (__m512bh)_mm512_set1_epi32(pair));
}
#endif

HEADRACE_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
HEADRACE_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace headrace::HEADRACE_ISA
