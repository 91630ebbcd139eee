// Plain C++ on the compiler's vectors: 4 lanes, any CPU (little-endian).
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
// a * b + c rounded once. Where the CPU cannot: the product is exact in double; the sum, rounded to odd there, rounds
// to the right float (Boldo and Melquiond 2008).
#if defined(__FP_FAST_FMAF)
HEADRACE_INLINE F32v fma(F32v a, F32v b, F32v c) {
    return F32v{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
                __builtin_fmaf(a[3], b[3], c[3])};
}
#else
typedef double F64pair __attribute__((vector_size(16)));
typedef int64_t I64pair __attribute__((vector_size(16)));

HEADRACE_INLINE F64pair fma_odd(F64pair a, F64pair b, F64pair c) {
    const F64pair product = a * b, sum = product + c, back = sum - product;
    const F64pair error = (product - (sum - back)) + (c - back);
    const I64pair above = error > 0.0, inexact = (error < 0.0) | above, inward = above ^ (sum > 0.0);
    const I64pair bits = (I64pair)sum, even = (bits & 1) - 1;
    return (F64pair)(bits + ((inward | 1) & inexact & even));
}

// Not inline: a product and a sum would be forty instructions in many hundred places.
__attribute__((noinline, unused)) static F32v fma(F32v a, F32v b, F32v c) {
    const F64pair low = fma_odd(F64pair{a[0], a[1]}, F64pair{b[0], b[1]}, F64pair{c[0], c[1]});
    const F64pair high = fma_odd(F64pair{a[2], a[3]}, F64pair{b[2], b[3]}, F64pair{c[2], c[3]});
    return F32v{(float)low[0], (float)low[1], (float)high[0], (float)high[1]};
}
#endif

HEADRACE_INLINE F32v max(F32v a, F32v b) { return a > b ? a : b; }  // the second one where either is NaN, as x86 does
HEADRACE_INLINE F32v min(F32v a, F32v b) { return a < b ? a : b; }

HEADRACE_INLINE I32v load_i32(const int32_t* p) { return load_as<I32v>(p); }
HEADRACE_INLINE I32v set_i32(int32_t x) { return I32v{x, x, x, x}; }
HEADRACE_INLINE I32v shift_left(I32v x, int count) { return x << count; }
HEADRACE_INLINE F32v to_f32(I32v x) { return __builtin_convertvector(x, F32v); }
HEADRACE_INLINE I32v round_i32(F32v x) {  // |x| below 2^22: the sum's last bit is a one
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

HEADRACE_INLINE U8v load_table(const uint8_t* p) { return load_as<U8v>(p); }
HEADRACE_INLINE U8v lookup(U8v table, U8v index) {
#if defined(__clang__)
    return __builtin_shufflevector(table, index);
#else
    return __builtin_shuffle(table, index);
#endif
}

constexpr int kWideZero = 0;
typedef I32v DotSum;
static constexpr int dot_room(int) { return 1 << 20; }
HEADRACE_INLINE U8v wide_bytes(U8v w) { return w; }
HEADRACE_INLINE DotSum dot_begin(I32v acc) { return acc; }
HEADRACE_INLINE I32v dot_end(I32v, DotSum sum) { return sum; }
template <bool wide>
HEADRACE_INLINE DotSum dot_add(DotSum sum, U8v w, const int8_t* a) {
    // Bytes at even and at odd places as words: a product fits one, and the two of a lane are added.
    typedef int16_t I16v __attribute__((vector_size(16)));
    typedef uint16_t U16v __attribute__((vector_size(16)));
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    const I16v x = (I16v)set_i32(quad), words = (I16v)w;
    const I32v even = (I32v)((words & 0xff) * ((x << 8) >> 8)), odd = (I32v)((I16v)((U16v)words >> 8) * (x >> 8));
    return sum + (even << 16 >> 16) + (even >> 16) + (odd << 16 >> 16) + (odd >> 16);
}

HEADRACE_INLINE F32v dot_bf16(F32v acc, U8v w, const uint16_t* x) {
    const I32v pairs = (I32v)w;
    const F32v even = as_f32(pairs << 16), odd = as_f32(pairs & (int32_t)0xffff0000);
    const I32v x0 = set_i32((int32_t)((uint32_t)x[0] << 16)), x1 = set_i32((int32_t)((uint32_t)x[1] << 16));
    return fma(even, as_f32(x0), fma(odd, as_f32(x1), acc));  // in the order vdpbf16ps has
}

HEADRACE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
HEADRACE_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace headrace::HEADRACE_ISA
