// Plain C++: 4 lanes, for any CPU.
#pragma once

#include "vec/vec_four.h"

namespace headrace::HEADRACE_ISA {

// Small sizes, because plain kernels take long to compile.
constexpr Tuning kTuning = {
    .direct_rows = 2,
    .turn_rows = 2,
    .turn_parts = 1,
    .unpacks = false,
    .panel_rows = 2,
    .panel_tiles = 8,
    .panels_from = 24,
    .by_row_rows = 2,
    .bf16_rows = 2,
    .attention_rows = 2,
    .attention_pages = 1,
    .attention_vectors = 2,
    .probe_sums = 4,
};

// a * b + c rounded once. Without a fast fma, the product is exact in double, and the sum is rounded to odd in double
// and then to float, which gives the correctly rounded float (Boldo and Melquiond 2008).
#if defined(__FP_FAST_FMAF) || defined(__aarch64__)
HEADRACE_INLINE F32v fma(F32v a, F32v b, F32v c) {
    return F32v{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
                __builtin_fmaf(a[3], b[3], c[3])};
}
#else
#define HEADRACE_SOFT_FMA
typedef double F64pair __attribute__((vector_size(16)));
typedef int64_t I64pair __attribute__((vector_size(16)));

HEADRACE_INLINE F64pair fma_odd(F64pair a, F64pair b, F64pair c) {
    const F64pair product = a * b, sum = product + c, back = sum - product;
    const F64pair error = (product - (sum - back)) + (c - back);
    const I64pair above = error > 0.0, inexact = (error < 0.0) | above, inward = above ^ (sum > 0.0);
    const I64pair bits = (I64pair)sum, even = (bits & 1) - 1;
    return (F64pair)(bits + ((inward | 1) & inexact & even));
}

// Not inlined: it has about forty instructions and many hundred uses.
__attribute__((noinline, unused)) static F32v fma(F32v a, F32v b, F32v c) {
    const F64pair low = fma_odd(F64pair{a[0], a[1]}, F64pair{b[0], b[1]}, F64pair{c[0], c[1]});
    const F64pair high = fma_odd(F64pair{a[2], a[3]}, F64pair{b[2], b[3]}, F64pair{c[2], c[3]});
    return F32v{(float)low[0], (float)low[1], (float)high[0], (float)high[1]};
}
#endif

HEADRACE_INLINE U8v lookup(U8v table, U8v index) {
#if defined(__clang__)
    const U8v found = __builtin_shufflevector(table, index);
#else
    const U8v found = __builtin_shuffle(table, index);
#endif
    return found & (U8v)(index < 128);
}

constexpr int kWideZero = 0;
HEADRACE_INLINE U8v wide_bytes(U8v w) { return w; }
template <bool wide>
HEADRACE_INLINE DotSum dot_add(DotSum sum, U8v w, const int8_t* a) {
    // Even and odd bytes as 16-bit words: each product fits a word; then the products of a lane are added.
    typedef int16_t I16v __attribute__((vector_size(16)));
    typedef uint16_t U16v __attribute__((vector_size(16)));
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    const I16v x = (I16v)set_i32(quad), words = (I16v)w;
    const I32v even = (I32v)((words & 0xff) * ((x << 8) >> 8)), odd = (I32v)((I16v)((U16v)words >> 8) * (x >> 8));
    return sum + (even << 16 >> 16) + (even >> 16) + (odd << 16 >> 16) + (odd >> 16);
}

}  // namespace headrace::HEADRACE_ISA
