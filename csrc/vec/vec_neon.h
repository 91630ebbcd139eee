// Arm NEON: 4 lanes. Compiled twice: with the dot product of signed bytes (neon), and with the dot product of unsigned
// and signed bytes (i8mm).
#pragma once

#include <arm_neon.h>

#include "vec/vec_four.h"

namespace headrace::HEADRACE_ISA {

HEADRACE_INLINE F32v fma(F32v a, F32v b, F32v c) {
    return (F32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
HEADRACE_INLINE U8v lookup(U8v table, U8v index) { return (U8v)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index); }

HEADRACE_INLINE int8x16_t load_quads(const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}
typedef int8x16_t Inputs;
HEADRACE_INLINE Inputs load_inputs(const int8_t* a) { return load_as<Inputs>(a); }
#if HEADRACE_IS(i8mm)
constexpr int kWideZero = 0;
HEADRACE_INLINE U8v wide_bytes(U8v w) { return w; }
template <bool wide>
HEADRACE_INLINE DotSum dot_add(DotSum sum, U8v w, const int8_t* a) {
    return (I32v)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, load_quads(a));
}
template <bool wide, int lane>
HEADRACE_INLINE DotSum dot_lane(DotSum sum, U8v w, Inputs inputs) {
    return (I32v)vusdotq_laneq_s32((int32x4_t)sum, (uint8x16_t)w, inputs, lane);
}
#else
constexpr int kWideZero = 128;  // bytes that are not wide are below 128, so they have the same value as signed bytes
HEADRACE_INLINE U8v wide_bytes(U8v w) { return w ^ 0x80; }
template <bool wide>
HEADRACE_INLINE DotSum dot_add(DotSum sum, U8v w, const int8_t* a) {
    return (I32v)vdotq_s32((int32x4_t)sum, (int8x16_t)w, load_quads(a));
}
template <bool wide, int lane>
HEADRACE_INLINE DotSum dot_lane(DotSum sum, U8v w, Inputs inputs) {
    return (I32v)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)w, inputs, lane);
}
#endif

}  // namespace headrace::HEADRACE_ISA
