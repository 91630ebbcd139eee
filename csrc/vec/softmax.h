// What attention needs beyond the shim: powers of two, choice of lanes by bits.
#pragma once

#include "vec.h"

namespace headrace::HEADRACE_ISA {

// y where the lane's bit is set, else z.
HEADRACE_INLINE F32v choose(uint32_t bits, F32v y, F32v z) {
#if HEADRACE_IS(avx512)
    return _mm512_mask_blend_ps((__mmask16)bits, z, y);
#else
    I32v lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = 1 << i;
    const I32v set = (set_i32((int32_t)bits) & lane) == lane;
    return as_f32((as_i32(y) & set) | (as_i32(z) & ~set));
#endif
}

// 2^x for x <= 0, relative error 1e-7; exactly 1 at 0, exactly 0 below -125; NaN stays NaN.
HEADRACE_INLINE F32v exp2(F32v x) {
    constexpr float kTerms[6] = {1.0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba12p-10f};
#if HEADRACE_IS(avx512)
    const F32v r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT);  // x less the nearest integer
#else
    const F32v held = max(set_f32(-127.0f), x);
    const I32v n = round_i32(held);
    const F32v r = held - to_f32(n);
#endif
    F32v p = set_f32(kTerms[5]);
#pragma GCC unroll 5
    for (int i = 4; i >= 0; --i) p = fma(p, r, set_f32(kTerms[i]));
#if HEADRACE_IS(avx512)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set_f32(-125.0f), _CMP_NLT_UQ), p, x - r);
#else
    const I32v gone = (I32v)(x < set_f32(-125.0f));
    return as_f32((as_i32(p) + (n << 23)) & ~gone);
#endif
}

}  // namespace headrace::HEADRACE_ISA
