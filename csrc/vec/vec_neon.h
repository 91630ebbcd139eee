// Arm NEON: 4 lanes. Compiled twice: with the dot product of signed bytes (neon), and with the dot product of unsigned
// and signed bytes (i8mm).
#pragma once

#include <arm_neon.h>

#include "vec/vec_four.h"

namespace headrace::HEADRACE_ISA {

// By the count of registers (32) and instructions: not tuned on hardware yet.
constexpr Tuning kTuning = {
    .direct_rows = 4,
    .turn_rows = 2,
    .turn_parts = 1,
    .unpacks = false,
    .panel_rows = 4,
    .panel_tiles = 8,
    .panels_from = 24,
    .by_row_rows = 4,
    .bf16_rows = 2,
    .attention_rows = 2,
    .attention_pages = 1,
    .attention_vectors = 2,
    .probe_sums = 4,
};

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

// Products of matrices: two rows of weights times two rows of inputs, over eight columns.
// Quads j and j + 1 of four rows become columns [4j, 4j + 8) of rows 0 and 1, and of rows 2 and 3.
HEADRACE_INLINE void zip_quads(U8v& first, U8v& second) {
    const int32x4_t a = (int32x4_t)first, b = (int32x4_t)second;
    first = (U8v)vzip1q_s32(a, b);
    second = (U8v)vzip2q_s32(a, b);
}
// Sixteen columns of input rows a and b: eight of both, then the other eight of both.
struct PairInputs {
    int8x16_t half[2];
};
HEADRACE_INLINE PairInputs load_pair(const int8_t* a, const int8_t* b) {
    const int64x2_t x = vreinterpretq_s64_s8(load_inputs(a)), y = vreinterpretq_s64_s8(load_inputs(b));
    return {{vreinterpretq_s8_s64(vzip1q_s64(x, y)), vreinterpretq_s8_s64(vzip2q_s64(x, y))}};
}
// Lanes of a sum: weight row 0 with a and b, weight row 1 with a and b.
HEADRACE_INLINE I32v set_pair(int32_t a, int32_t b) { return I32v{a, b, a, b}; }
HEADRACE_INLINE I32v pair_add(I32v sum, U8v w, int8x16_t inputs) {
    return (I32v)vusmmlaq_s32((int32x4_t)sum, (uint8x16_t)w, inputs);
}
// The sums of input rows a and b for four rows of weights. low, high: the sums of rows 0 and 1, and of rows 2 and 3.
HEADRACE_INLINE void split_pairs(I32v low, I32v high, I32v& a, I32v& b) {
    a = (I32v)vuzp1q_s32((int32x4_t)low, (int32x4_t)high);
    b = (I32v)vuzp2q_s32((int32x4_t)low, (int32x4_t)high);
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
