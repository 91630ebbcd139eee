// Vector functions for attention: powers of two, selection of lanes by bits.
#pragma once

#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

// a * b + c. Rounded once if the CPU has fma; in software, fma would cost a call per vector.
HEADRACE_INLINE F32v multiply_add(F32v a, F32v b, F32v c) {
#ifdef HEADRACE_SOFT_FMA
    return a * b + c;
#else
    return fma(a, b, c);
#endif
}

// sum[n] + w[2n] * x[0] + w[2n + 1] * x[1] on bfloat16 pairs.
HEADRACE_INLINE F32v add_pairs(F32v sum, U8v w, const uint16_t* x) {
#ifdef HEADRACE_SOFT_FMA
    const I32v pairs = (I32v)w, x0 = set_i32((int32_t)((uint32_t)x[0] << 16)),
               x1 = set_i32((int32_t)((uint32_t)x[1] << 16));
    return as_f32(pairs & (int32_t)0xffff0000) * as_f32(x1) + (as_f32(pairs << 16) * as_f32(x0) + sum);
#else
    return dot_bf16(sum, w, x);
#endif
}

// Per lane: y if the lane's bit is set, otherwise z.
HEADRACE_INLINE F32v choose(uint32_t bits, F32v y, F32v z) {
#if HEADRACE_LANES == 16
    return _mm512_mask_blend_ps((__mmask16)bits, z, y);
#else
    I32v lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = 1 << i;
    const I32v set = (set_i32((int32_t)bits) & lane) == lane;
    return as_f32((as_i32(y) & set) | (as_i32(z) & ~set));
#endif
}

// The largest of sixteen lanes. The order of the comparisons does not matter, so each shim uses its fastest.
HEADRACE_INLINE float top_lane(const Lanes16& x) {
#if HEADRACE_LANES == 16
    return _mm512_reduce_max_ps(x.part[0]);
#elif HEADRACE_LANES == 8
    const F32v eight = max(x.part[0], x.part[1]);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    return max_lanes(x);
#endif
}

// Stores x as bfloat16 and adds the stored values to the lanes of `sum`, in any order of lanes.
HEADRACE_INLINE F32v store_and_sum(uint16_t* p, F32v x, F32v sum) {
#if HEADRACE_IS(avx512)
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256((__m256i*)p, rounded);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_zextsi256_si512(rounded), (__m512bh)_mm512_set1_epi16(0x3f80));
#else
    store_bf16(p, x);
    return sum + load_bf16(p);
#endif
}

// 2^x for x up to about 0, relative error 1e-7. Exactly 1 at 0, and 0 at -inf. NaN stays NaN.
HEADRACE_INLINE F32v exp2(F32v x) {
    constexpr float kTerms[6] = {1.0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba12p-10f};
#if HEADRACE_LANES == 16
    const F32v r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT);  // x minus the nearest integer; 0 at -inf
#else
    const F32v held = max(set_f32(-127.0f), x);
    const I32v n = round_i32(held);
    const F32v r = held - to_f32(n);
#endif
    F32v p = set_f32(kTerms[5]);
#pragma GCC unroll 5
    for (int i = 4; i >= 0; --i) p = multiply_add(p, r, set_f32(kTerms[i]));
#if HEADRACE_LANES == 16
    return _mm512_scalef_ps(p, x - r);
#else
    const I32v gone = (I32v)(x < set_f32(-125.0f));  // the exponent would wrap
    return as_f32((as_i32(p) + (n << 23)) & ~gone);
#endif
}

}  // namespace headrace::HEADRACE_ISA
