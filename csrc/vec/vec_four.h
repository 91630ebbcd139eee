// 4 lanes with the compiler's vector extensions, for any little-endian CPU. Common part of vec_plain.h and vec_neon.h.
#pragma once

namespace headrace::HEADRACE_ISA {

constexpr int kLanes = 4;
typedef float F32v __attribute__((vector_size(16)));
typedef int32_t I32v __attribute__((vector_size(16)));
typedef uint32_t U32v __attribute__((vector_size(16)));
typedef uint8_t U8v __attribute__((vector_size(16)));

template <class V, class T>
HEADRACE_INLINE V load_as(const T* p) {
    V x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

HEADRACE_INLINE F32v as_f32(I32v x) { return (F32v)x; }
HEADRACE_INLINE I32v as_i32(F32v x) { return (I32v)x; }

HEADRACE_INLINE F32v load_f32(const float* p) { return load_as<F32v>(p); }
HEADRACE_INLINE F32v load_f32(const float* p, int n) {
    F32v x = {};
    for (int i = 0; i < n; ++i) x[i] = p[i];
    return x;
}
HEADRACE_INLINE void store_f32(float* p, F32v x) { __builtin_memcpy(p, &x, sizeof x); }
HEADRACE_INLINE void store_f32(float* p, F32v x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x[i];
}
HEADRACE_INLINE F32v set_f32(float x) { return F32v{x, x, x, x}; }
HEADRACE_INLINE F32v max(F32v a, F32v b) { return a > b ? a : b; }  // b if either is NaN, like x86
HEADRACE_INLINE F32v min(F32v a, F32v b) { return a < b ? a : b; }

HEADRACE_INLINE I32v load_i32(const int32_t* p) { return load_as<I32v>(p); }
HEADRACE_INLINE I32v set_i32(int32_t x) { return I32v{x, x, x, x}; }
HEADRACE_INLINE I32v shift_left(I32v x, int count) { return x << count; }
HEADRACE_INLINE F32v to_f32(I32v x) { return __builtin_convertvector(x, F32v); }
HEADRACE_INLINE I32v round_i32(F32v x) {  // |x| < 2^22: the last bit of the sum is 1
    const F32v magic = set_f32(12582912.0f);
    return as_i32(x + magic) - as_i32(magic);
}
HEADRACE_INLINE void store_i8(int8_t* p, I32v x) {
    for (int i = 0; i < kLanes; ++i) p[i] = (int8_t)x[i];
}

HEADRACE_INLINE I32v max(I32v a, I32v b) { return a > b ? a : b; }
HEADRACE_INLINE int32_t max_i32(I32v x) {
    const int32_t a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}
HEADRACE_INLINE int32_t sum_i32(I32v x) { return x[0] + x[1] + x[2] + x[3]; }

HEADRACE_INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    const float small = (float)fraction * 0x1p-24f;  // zero and subnormals, exact
    uint32_t bits;
    __builtin_memcpy(&bits, &small, 4);
    if (exponent) bits = (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    bits |= sign;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

HEADRACE_INLINE F32v load_f16(const uint16_t* p) {
    return F32v{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
HEADRACE_INLINE F32v load_i8_f32(const int8_t* p) { return F32v{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
HEADRACE_INLINE I32v load_u8_i32(const uint8_t* p) { return I32v{p[0], p[1], p[2], p[3]}; }
HEADRACE_INLINE F32v load_u8_f32(const uint8_t* p) { return to_f32(load_u8_i32(p)); }
HEADRACE_INLINE F32v load_bf16(const uint16_t* p) { return as_f32(I32v{p[0], p[1], p[2], p[3]} << 16); }
HEADRACE_INLINE void store_bf16(uint16_t* p, F32v x) {
    const U32v bits = (U32v)as_i32(x), nan = (U32v)(x != x);
    const U32v kept = (nan & (bits | 0x400000)) | (~nan & (bits + 0x7fff + ((bits >> 16) & 1)));  // nearest even
    for (int i = 0; i < kLanes; ++i) p[i] = (uint16_t)(kept[i] >> 16);
}

HEADRACE_INLINE U8v load_u8(const void* p) { return load_as<U8v>(p); }
HEADRACE_INLINE void store_u8(void* p, U8v x) { __builtin_memcpy(p, &x, sizeof x); }

template <int bits, int from, int to>
HEADRACE_INLINE U8v field(U8v x) {
    const U8v mask = U8v{} + (uint8_t)(((1 << bits) - 1) << to);
    return (from > to ? x >> (from > to ? from - to : 0) : x << (to > from ? to - from : 0)) & mask;
}

HEADRACE_INLINE I32v pick(const int32_t* eight, I32v index) {
    return I32v{eight[index[0] & 7], eight[index[1] & 7], eight[index[2] & 7], eight[index[3] & 7]};
}

// Byte products are added directly to their int32 lanes.
typedef I32v DotSum;
static constexpr int dot_room(int) { return 1 << 20; }
HEADRACE_INLINE DotSum dot_begin(I32v acc) { return acc; }
HEADRACE_INLINE I32v dot_end(I32v, DotSum sum) { return sum; }

HEADRACE_INLINE U8v load_table(const uint8_t* p) { return load_as<U8v>(p); }
HEADRACE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
HEADRACE_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace headrace::HEADRACE_ISA
