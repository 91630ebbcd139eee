// Math functions on the shim's vectors. Every instruction set uses the same operations in the same order, so the bits
// are equal.
#pragma once

namespace headrace::HEADRACE_ISA {

#if !HEADRACE_IS(neon) && !HEADRACE_IS(i8mm)  // they have dot_lane on a register
typedef const int8_t* Inputs;
HEADRACE_INLINE Inputs load_inputs(const int8_t* a) { return a; }
template <bool wide, int lane>
HEADRACE_INLINE DotSum dot_lane(DotSum sum, U8v w, Inputs inputs) {
    return dot_add<wide>(sum, w, inputs + 4 * lane);
}
#endif

// acc[n] + sum over i of w[4n + i] * a[i]; see dot_add.
template <bool wide>
HEADRACE_INLINE I32v dot(I32v acc, U8v w, const int8_t* a) {
    return dot_end(acc, dot_add<wide>(dot_begin(acc), w, a));
}

#if !HEADRACE_IS(avx512)  // avx512 has vdpbf16ps
HEADRACE_INLINE F32v dot_bf16(F32v acc, U8v w, const uint16_t* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    const I32v both = set_i32(pair), pairs = (I32v)w;
    const F32v even = as_f32(pairs << 16), odd = as_f32(pairs & (int32_t)0xffff0000);
    const F32v x0 = as_f32(both << 16), x1 = as_f32(both & (int32_t)0xffff0000);
    return fma(even, x0, fma(odd, x1, acc));  // the order of vdpbf16ps
}
#endif

// e^x, error about 1 ulp. x is clamped to [-87.3, 88.3], so the result is never 0 or infinite. NaN gives a finite
// value.
HEADRACE_INLINE F32v exp(F32v x) {
    x = min(max(x, set_f32(-87.3f)), set_f32(88.3f));
    const I32v n = round_i32(x * set_f32(1.44269504f));
    const F32v k = to_f32(n);
    F32v r = fma(k, set_f32(-0.693145752f), x);  // ln 2 in two parts; the product with the first is exact
    r = fma(k, set_f32(-1.42860677e-6f), r);
    F32v p = set_f32(1.0f / 5040);
    p = fma(p, r, set_f32(1.0f / 720));
    p = fma(p, r, set_f32(1.0f / 120));
    p = fma(p, r, set_f32(1.0f / 24));
    p = fma(p, r, set_f32(1.0f / 6));
    p = fma(p, r, set_f32(0.5f));
    p = fma(p, r, set_f32(1.0f));
    p = fma(p, r, set_f32(1.0f));
    return p * as_f32((n + 127) << 23);  // n is -126..127
}

// x * sigmoid(x). x is clamped to -88, where the result is almost 0. NaN stays NaN.
HEADRACE_INLINE F32v silu(F32v x) { return max(set_f32(-88.0f), x) / (set_f32(1.0f) + exp(-x)); }

// tanh from e^2x: absolute error about 1e-7. NaN stays NaN.
HEADRACE_INLINE F32v tanh(F32v x) {
    const F32v y = set_f32(1.0f) - set_f32(2.0f) / (set_f32(1.0f) + exp(x + x));
    return x == x ? y : x;
}

// The tanh form of GELU: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
HEADRACE_INLINE F32v gelu_tanh(F32v x) {
    const F32v cubic = fma(x * x * set_f32(0.044715f), x, x);
    return max(set_f32(-88.0f), x) / (set_f32(1.0f) + exp(cubic * set_f32(-1.59576912f)));
}

// GELU: x times the normal distribution function, from erfc(|x| / sqrt(2)) (Abramowitz and Stegun 7.1.26). Absolute
// error about 1e-7 * |x|. NaN stays NaN.
HEADRACE_INLINE F32v gelu(F32v x) {
    const F32v size = max(x, -x), t = size * set_f32(0.70710678f);
    const F32v k = set_f32(1.0f) / fma(t, set_f32(0.3275911f), set_f32(1.0f));
    F32v p = set_f32(1.061405429f);
    p = fma(p, k, set_f32(-1.453152027f));
    p = fma(p, k, set_f32(1.421413741f));
    p = fma(p, k, set_f32(-0.284496736f));
    p = fma(p, k, set_f32(0.254829592f));
    const F32v y = max(x, set_f32(0.0f)) - size * set_f32(0.5f) * p * k * exp(-t * t);
    return x == x ? y : x;
}

// Sixteen lanes for any vector width, so that sums over a row have the same order on every instruction set.
struct Lanes16 {
    static constexpr int kParts = 16 / kLanes;
    F32v part[kParts];
};

HEADRACE_INLINE Lanes16 zero_lanes() {
    Lanes16 x;
    for (int i = 0; i < Lanes16::kParts; ++i) x.part[i] = set_f32(0.0f);
    return x;
}

// Reduces the lanes by halves: ((0+8)+(4+12)) + ((2+10)+(6+14)) + ... `join` takes vectors of 8, 4, 2 and 1 floats.
template <class Join>
HEADRACE_INLINE float join_lanes(const Lanes16& x, Join join) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    typedef float Two __attribute__((vector_size(8)));
    Eight eight[2];
    Four four[2];
    Two two[2];
    __builtin_memcpy(eight, x.part, sizeof eight);
    const Eight a = join(eight[0], eight[1]);
    __builtin_memcpy(four, &a, sizeof four);
    const Four b = join(four[0], four[1]);
    __builtin_memcpy(two, &b, sizeof two);
    const Two c = join(two[0], two[1]);
    return join(c[0], c[1]);
}

HEADRACE_INLINE float sum_lanes(const Lanes16& x) {
    return join_lanes(x, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

HEADRACE_INLINE float max_lanes(const Lanes16& x) {
    return join_lanes(x, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

}  // namespace headrace::HEADRACE_ISA
