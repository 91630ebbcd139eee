// AVX2, FMA and F16C: 8 lanes. Compiled twice: without VNNI (avx2) and with it (avxvnni).
#pragma once

#include <immintrin.h>

namespace headrace::HEADRACE_ISA {

constexpr int kLanes = 8;
constexpr Tuning kTuning = {
    .direct_rows = 8,
    .turn_rows = 4,
    .turn_parts = 2,
    // Unpacking halves the compile time of these kernels. It costs 5 % of their speed with six instructions per product
    // (avx2), but 30 % with two (avxvnni).
    .unpacks = HEADRACE_IS(avx2),
    .panel_rows = 3,
    .panel_tiles = 8,  // L1 may have 32 KB
    .panels_from = 24,
    .by_row_rows = HEADRACE_IS(avx2) ? 3 : 4,
    .bf16_rows = 2,
    .attention_rows = 3,
    .attention_pages = 1,
    .attention_vectors = 2,
    .probe_sums = 10,
};
typedef __m256 F32v;
typedef int32_t I32v __attribute__((vector_size(32)));
typedef uint32_t U32v __attribute__((vector_size(32)));
typedef uint8_t U8v __attribute__((vector_size(32)));

HEADRACE_INLINE __m256i raw(I32v x) { return (__m256i)x; }
HEADRACE_INLINE __m256i raw(U8v x) { return (__m256i)x; }
HEADRACE_INLINE __m256i lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

HEADRACE_INLINE F32v load_f32(const float* p) { return _mm256_loadu_ps(p); }
HEADRACE_INLINE F32v load_f32(const float* p, int n) { return _mm256_maskload_ps(p, lanes_below(n)); }
HEADRACE_INLINE void store_f32(float* p, F32v x) { _mm256_storeu_ps(p, x); }
HEADRACE_INLINE void store_f32(float* p, F32v x, int n) { _mm256_maskstore_ps(p, lanes_below(n), x); }
HEADRACE_INLINE F32v set_f32(float x) { return _mm256_set1_ps(x); }
HEADRACE_INLINE F32v fma(F32v a, F32v b, F32v c) { return _mm256_fmadd_ps(a, b, c); }
HEADRACE_INLINE F32v max(F32v a, F32v b) { return _mm256_max_ps(a, b); }
HEADRACE_INLINE F32v min(F32v a, F32v b) { return _mm256_min_ps(a, b); }

HEADRACE_INLINE I32v load_i32(const int32_t* p) { return (I32v)_mm256_loadu_si256((const __m256i*)p); }
HEADRACE_INLINE I32v set_i32(int32_t x) { return (I32v)_mm256_set1_epi32(x); }
HEADRACE_INLINE I32v shift_left(I32v x, int count) { return (I32v)_mm256_sll_epi32(raw(x), _mm_cvtsi32_si128(count)); }
HEADRACE_INLINE F32v to_f32(I32v x) { return _mm256_cvtepi32_ps(raw(x)); }
HEADRACE_INLINE I32v round_i32(F32v x) { return (I32v)_mm256_cvtps_epi32(x); }
HEADRACE_INLINE F32v as_f32(I32v x) { return _mm256_castsi256_ps(raw(x)); }
HEADRACE_INLINE I32v as_i32(F32v x) { return (I32v)_mm256_castps_si256(x); }
HEADRACE_INLINE void store_i8(int8_t* p, I32v x) {  // the values fit a byte, so nothing saturates
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(raw(x)), _mm256_extracti128_si256(raw(x), 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}

HEADRACE_INLINE I32v max(I32v a, I32v b) { return (I32v)_mm256_max_epi32(raw(a), raw(b)); }
HEADRACE_INLINE int32_t max_i32(I32v x) {
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(raw(x)), _mm256_extracti128_si256(raw(x), 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
HEADRACE_INLINE int32_t sum_i32(I32v x) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(raw(x)), _mm256_extracti128_si256(raw(x), 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

HEADRACE_INLINE F32v load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
HEADRACE_INLINE F32v load_i8_f32(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
HEADRACE_INLINE I32v load_u8_i32(const uint8_t* p) {
    return (I32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
HEADRACE_INLINE F32v load_u8_f32(const uint8_t* p) { return to_f32(load_u8_i32(p)); }
HEADRACE_INLINE F32v load_bf16(const uint16_t* p) {
    return as_f32((I32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
HEADRACE_INLINE void store_bf16(uint16_t* p, F32v x) {
    const U32v bits = (U32v)as_i32(x), odd = (bits >> 16) & 1;
    const U32v nan = (U32v)_mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    // Round to nearest even: add half of the last kept bit, minus one if that bit is 0. NaN stays NaN.
    const __m256i high = _mm256_srli_epi32((__m256i)((nan & (bits | 0x400000)) | (~nan & (bits + 0x7fff + odd))), 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i*)p, packed);
}

HEADRACE_INLINE U8v load_u8(const void* p) { return (U8v)_mm256_loadu_si256((const __m256i*)p); }
HEADRACE_INLINE void store_u8(void* p, U8v x) { _mm256_storeu_si256((__m256i*)p, raw(x)); }

template <int bits, int from, int to>
HEADRACE_INLINE U8v field(U8v x) {
    __m256i moved = raw(x);
    if constexpr (from > to) moved = _mm256_srli_epi16(moved, from - to);
    if constexpr (from < to) moved = _mm256_slli_epi16(moved, to - from);
    return (U8v)_mm256_and_si256(moved, _mm256_set1_epi8((char)(((1 << bits) - 1) << to)));
}

HEADRACE_INLINE U8v load_table(const uint8_t* p) {
    return (U8v)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
}
HEADRACE_INLINE U8v lookup(U8v table, U8v index) { return (U8v)_mm256_shuffle_epi8(raw(table), raw(index)); }

HEADRACE_INLINE I32v pick(const int32_t* eight, I32v index) {
    return (I32v)_mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i*)eight), raw(index));
}

HEADRACE_INLINE __m256i load_quads(const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    return _mm256_set1_epi32(quad);
}

#if HEADRACE_IS(avxvnni)
constexpr int kWideZero = 0;
typedef I32v DotSum;
static constexpr int dot_room(int) { return 1 << 20; }
HEADRACE_INLINE U8v wide_bytes(U8v w) { return w; }
HEADRACE_INLINE DotSum dot_begin(I32v acc) { return acc; }
template <bool wide>
HEADRACE_INLINE DotSum dot_add(DotSum sum, U8v w, const int8_t* a) {
    return (I32v)_mm256_dpbusd_avx_epi32(raw(sum), raw(w), load_quads(a));
}
HEADRACE_INLINE I32v dot_end(I32v, DotSum sum) { return sum; }
#else
// 16-bit sums, widened to 32 bits by dot_end.
constexpr int kWideZero = 128;
typedef int16_t DotSum __attribute__((vector_size(32)));
// Each dot_add adds two products of at most most * 127 to a 16-bit lane.
static constexpr int dot_room(int most) { return 32767 / (2 * 127 * most); }
HEADRACE_INLINE U8v wide_bytes(U8v w) { return w ^ 0x80; }
HEADRACE_INLINE DotSum dot_begin(I32v) { return DotSum{}; }
template <bool wide>
HEADRACE_INLINE DotSum dot_add(DotSum sum, U8v w, const int8_t* a) {
    const __m256i x = load_quads(a);
    if constexpr (wide) {  // move the sign to the other factor; 2 * 128 * 127 fits 16 bits
        sum += (DotSum)_mm256_maddubs_epi16(_mm256_abs_epi8(raw(w)), _mm256_sign_epi8(x, raw(w)));
    } else {
        sum += (DotSum)_mm256_maddubs_epi16(raw(w), x);
    }
    // Keeps the additions in order: summing as a tree would need more registers than there are.
    __asm__("" : "+x"(sum));
    return sum;
}
HEADRACE_INLINE I32v dot_end(I32v acc, DotSum sum) {
    acc += (I32v)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
    __asm__("" : "+x"(acc));
    return acc;
}
#endif

HEADRACE_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
HEADRACE_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace headrace::HEADRACE_ISA
